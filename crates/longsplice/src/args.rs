//! The only table of flags: `--help`, the man page and the parser are generated from it.

mod serving;

pub use serving::{ReloadArgs, StopArgs, UpgradeArgs};

use crate::{
    import::ImportArgs,
    which::{DrainArgs, EventsArgs, FlowsArgs, ListenerArgs, MemberArgs, WeightArgs, Which, parse_flow},
};
use clap::{ArgAction, ArgGroup, Parser, Subcommand, ValueEnum, builder::NonEmptyStringValueParser};
use clap_complete::Shell;
use longsplice_engine::{DatapathOptions, FlowState, PathRule, SpliceWhen, TpotOptions, TpotUdp};
use longsplice_proxy::{
    access::{PortRange, Prefix},
    target::Target,
};
use std::{
    fs,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    path::PathBuf,
};

/// Maximum duration of a trace in seconds, so that a forgotten trace ends.
pub const TRACE_SECONDS_MAX: u32 = 3600;
/// Longest time in seconds between two looks of `longsplice ls --watch`.
const WATCH_SECONDS_MAX: i64 = 86_400;
/// Longest URL in bytes that `longsplice purge` takes: a request on the control socket has 4096, and JSON may double it.
const URL_MAX: usize = 2000;

/// The version, and the commit and its date if `make build` has made the program.
pub const fn version() -> &'static str {
    match option_env!("LONGSPLICE_VERSION") {
        Some(version) => version,
        None => env!("CARGO_PKG_VERSION"),
    }
}

/// A TCP proxy that hands connections over to the kernel.
///
/// Like any proxy, longsplice accepts connections, decides where they may go, and connects to the server. Then it
/// splices the two connections: the kernel rewrites the headers of their segments and forwards them. No byte passes
/// through the program any more, and spliced connections outlive it. A connection that cannot be spliced is copied, and
/// `longsplice ls` says why.
///
/// Splicing needs Linux 6.6 or newer and CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON (or root). `longsplice doctor` checks
/// that, and names the tested kernels. Copying needs no privilege.
#[derive(Debug, Parser)]
#[command(name = "longsplice", version = version(), arg_required_else_help = true, max_term_width = 100)]
pub struct Args {
    /// Path of the control socket.
    ///
    /// The default is `control` of the configuration file for `run`, and otherwise /run/longsplice/control-INODE.sock.
    /// INODE is the inode of the network namespace, so one longsplice per namespace needs no option. For users who cannot
    /// write to /run/longsplice, the socket is in $XDG_RUNTIME_DIR or in the directory of temporary files.
    #[arg(long, global = true, value_name = "PATH", env = "LONGSPLICE_CONTROL")]
    pub control: Option<PathBuf>,

    /// Log more on standard error (-v debug, -vv trace). RUST_LOG takes precedence.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,

    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the proxy in the foreground.
    ///
    /// SIGTERM and SIGINT stop it at once; `longsplice stop --drain` first waits for connections to end. SIGUSR1 reopens the access
    /// log; SIGHUP does that and reads the configuration anew, as `longsplice reload` does; SIGUSR2 is ignored. The exit status is
    /// 0 after a clean stop, and 1 if the proxy could not start or clean up.
    Run(Box<RunArgs>),
    /// Check what `longsplice run` with the same options would start with, and start nothing: `longsplice run --check`.
    Check(Box<RunArgs>),
    /// List live flows.
    ///
    /// Each line shows the number of the flow, its protocol, client, server and target, its state, the bytes from client to
    /// server (UP) and back (DOWN), its age, and the stages that segments traverse, or why the flow is not spliced.
    Ls(LsArgs),
    /// Show the details of one flow, for example of a stalled connection.
    ///
    /// For each leg: addresses, owner of the bytes (phases), flags, sequence and acknowledgement numbers, windows,
    /// timestamps, next hop, treatment of packets from its host (path), and the state of its socket. Numbers are
    /// those on the wire, with differences in bytes beside them. docs/troubleshooting.md says what to look at first.
    Inspect(InspectArgs),
    /// Show the segments of one flow as they pass, with their numbers before and after, and the verdicts of the data path.
    ///
    /// Each segment takes one line, or two if both the other host and the socket got a copy. The line shows the seconds
    /// since the first segment, the leg where it came in, its sender and its TCP header (window without scale; . stands for
    /// ACK), then where it went, the numbers that it left with, and the verdicts. The trace ends after --count segments,
    /// after --seconds, or with the flow. Only one flow can be traced at a time. Forwarding costs more meanwhile, because
    /// each segment of the flow takes the general way.
    Trace(TraceArgs),
    /// Splice a flow now, whatever its policy says of when. Where the policy is to never splice, it is copied on.
    Splice(Flow),
    /// Take a spliced flow back into the program, and copy it from then on.
    Unsplice(Flow),
    /// Close the parked sockets of spliced flows now, and print how many. The flows go on without them.
    ///
    /// Name flows as for `kill`. That sets descriptors and memory free before `release_after` of the policy does. A flow that needs
    /// its sockets keeps them: one that relays the body of an HTTP message, or whose trigger waits for data. So does one that is
    /// copied. It is said of each number why it was not released, or of how many, and the exit status is 1 if a number is among them.
    Release(FlowsArgs),
    /// End flows with a reset to client and server, and print how many.
    ///
    /// Name flows by number, or say which ones are meant: conditions that are given together must all hold.
    Kill(FlowsArgs),
    /// Print what happens in the running proxy, as JSON lines, until interrupted.
    ///
    /// Connections begin, are spliced and taken back, end or are refused; servers of pools go down and come back; listeners are
    /// paused, the configuration is reloaded, the program replaced. docs/operating.md lists the events and their fields. A reader
    /// that is too slow misses events, and is told how many; the proxy waits for nobody. At most 16 can listen at a time. The exit
    /// status is 1 when the proxy ends.
    Events(EventsArgs),
    /// List the servers of pools: state, weight, connections and requests now, and how often each was chosen and has failed.
    Pools(Json),
    /// Let a server of a pool take nothing new. What it has goes on; `longsplice pools` shows when that has ended.
    ///
    /// This, and a weight, last until the program ends, over reloads as well.
    Drain(DrainArgs),
    /// Let a drained server take its share again.
    Undrain(MemberArgs),
    /// Give a server of a pool another weight, until the configuration has a new one.
    Weight(WeightArgs),
    /// Let listeners accept no clients for now: those who come wait until `longsplice resume`. Live connections go on.
    ///
    /// Clients wait in the queue of the kernel, and nobody is refused until that is full. This lasts over reloads and upgrades, until
    /// the program ends. If one of the listeners is unknown or cannot be paused, none is. Those that take connections routed
    /// through this machine cannot, nor can plugs whose clients shake hands with the target.
    Pause(ListenerArgs),
    /// Let paused listeners accept again, first those clients that have waited.
    Resume(ListenerArgs),
    /// Show counters of packets (verdicts of the data path) and of connections: for each listener, how many were spliced,
    /// and why the others were not.
    Counters(Json),
    /// Let the running proxy read its configuration anew, and print which listeners were added, moved or removed.
    ///
    /// All of it is put in force at once, or nothing: if the file is wrong, an address in use or a key file unreadable, the proxy
    /// goes on as before, and the exit status is 1. Connections go on with the rules and the policy with which they began;
    /// docs/operating.md says what can change. `longsplice check` with the options of the proxy says before whether it would start.
    Reload(ReloadArgs),
    /// Let another program take the running proxy's place: after an update, or with a configuration that needs a restart.
    ///
    /// The running process starts the new one with its own arguments. The new one checks configuration and machine, and takes over
    /// the listening sockets with the clients that wait there, the control socket, all spliced connections, those that are copied,
    /// caches, and clients between two requests. No client is refused. If anything fails before that, the running process goes on as if
    /// nothing had happened, and the exit status is 1. What is in the midst of something stays with the old process, such as a request
    /// until it is answered. That process ends after the last of them, or after `--hand-over-limit`. docs/operating.md says more.
    Upgrade(UpgradeArgs),
    /// Remove replies from the caches of the running proxy, and print how many.
    ///
    /// Whatever the configuration says of PURGE. All replies of the URL are removed, for every pool and every client; those
    /// that are being stored are not kept. A large cache takes a while, because the head of each stored reply is read.
    Purge(PurgeArgs),
    /// Say which rule of the running proxy would decide on a connection, and connect nothing.
    ///
    /// Each line has a listener, an address of the target, and what decides. Listeners whose target is fixed, and another one, are
    /// left out. The exit status is 0 if at least one listener would allow the connection, and 1 if not.
    Rule(RuleArgs),
    /// Stop the running proxy and wait for it to exit.
    ///
    /// Flows are reset, unless the proxy was started with `--leave-flows`. The exit status is 0 if the proxy has cleaned up
    /// and exited, and 1 if it could not clean up, was killed meanwhile, does not answer or does not exit.
    Stop(StopArgs),
    /// Translucent proxying (TPOT): proxies anywhere on the path of a connection, which intercept it if its host asks for one.
    ///
    /// The proxies are `longsplice run` with a listener of protocol = "tpot". docs/tpot.md describes the protocol.
    Tpot(TpotArgs),
    /// Check whether this machine can splice, and say how to fix what is missing.
    ///
    /// This changes nothing: programs are loaded and attached in a temporary network namespace. The exit status is 0 if
    /// splicing is possible, and 1 if not.
    Doctor(DoctorArgs),
    /// Print the configuration that does what a file of HAProxy, Dante, 3proxy or nginx (`stream`) says.
    ///
    /// Comments name each line that was left out or changed, and why. docs/import.md lists what is translated.
    Import(ImportArgs),
    /// Print a man page, for `man -l` or for packaging.
    Man(ManArgs),
    /// Print what makes a shell complete commands and flags of longsplice.
    ///
    /// `make install` and packages install it for bash, zsh and fish.
    Completions {
        /// The shell.
        shell: Shell,
    },
}

/// Arguments of `longsplice man`.
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Which page.
    #[arg(default_value = "longsplice")]
    pub page: ManPage,
}

/// The man pages.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum ManPage {
    /// longsplice(1): commands and flags.
    #[value(name = "longsplice")]
    Program,
    /// longsplice.toml(5): the configuration file.
    #[value(name = "longsplice.toml")]
    File,
}

/// Arguments of `longsplice run`.
#[derive(Clone, Debug, clap::Args, Default)]
pub struct RunArgs {
    /// Listen here for SOCKS 5, 4 and 4a clients. May be repeated.
    #[arg(long, value_name = "ADDR:PORT")]
    pub socks5: Vec<String>,

    /// Listen here for HTTP/1.1 and 1.0 clients, as a forward proxy: CONNECT, and requests with absolute URLs. May be
    /// repeated.
    ///
    /// CONNECT tunnels are spliced like other connections. Other requests of one client may go to different servers, so
    /// bodies from 512 KB on (or longer ones, if --splice says so) are spliced one by one, and the rest is copied. Reverse
    /// proxies, filters and caches need a configuration file.
    #[arg(long, value_name = "ADDR:PORT")]
    pub http: Vec<String>,

    /// Listen here for TLS clients, and connect each to the server that its ClientHello names, at the same port, without
    /// decryption. May be repeated.
    ///
    /// Loopback, link-local and similar addresses are denied, unless a rule in the configuration file allows them. The file
    /// can also route by name and protocol (ALPN) to fixed targets.
    #[arg(long, value_name = "ADDR:PORT")]
    pub tls: Vec<String>,

    /// Listen at ADDR:PORT, and connect every client to HOST:PORT. May be repeated.
    #[arg(long, value_name = "ADDR:PORT=HOST:PORT")]
    pub plug: Vec<String>,

    /// Read this TOML file. Listeners of the command line are added to those of the file; other options take precedence
    /// over it.
    ///
    /// Only the file can set users and passwords, access rules, limits, reverse proxies and their servers, filters and
    /// caches of HTTP replies, and transparent listeners. docs/configuration.md is the reference.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Check the configuration, the files that it names, addresses and devices, and exit.
    ///
    /// What would end a start is said as at the start, with the same exit status. Nothing is listened on, created, written or
    /// loaded, so the configuration of a running proxy can be checked before `longsplice reload`. Addresses may be in use. Whether
    /// the kernel takes the data path is what `longsplice doctor` tries.
    #[arg(long)]
    pub check: bool,

    /// Splice on this device. May be repeated. The default is all Ethernet devices.
    ///
    /// A device that does not exist is an error, as with --xdp and --peer, unless the configuration file has splice =
    /// "if-possible": then connections are copied.
    #[arg(long, value_name = "DEV", value_parser = NonEmptyStringValueParser::new())]
    pub device: Vec<String>,

    /// Also attach in native XDP mode on this device, and forward eligible packets before an skb is allocated. May be
    /// repeated.
    ///
    /// Some drivers switch offloads off in this mode; over veth it halves the throughput. Packets with a partial checksum,
    /// as Linux sends them over veth, are forwarded as without XDP.
    #[arg(long, value_name = "DEV", value_parser = NonEmptyStringValueParser::new())]
    pub xdp: Vec<String>,

    /// Deliver spliced packets that leave by this veth or netkit device directly to its peer, which is in another network
    /// namespace. May be repeated.
    ///
    /// This costs less, but bypasses the egress of the device: queueing disciplines, nftables, tc programs and captures do
    /// not see these packets.
    #[arg(long, value_name = "DEV", value_parser = NonEmptyStringValueParser::new())]
    pub peer: Vec<String>,

    /// When to splice: never, at once, or after this many bytes were copied, both directions together. auto: before the first byte
    /// where the client is far and the server near, as long as --path is not any; elsewhere after 32768 bytes [default: auto].
    #[arg(long, value_name = "auto|never|at-once|BYTES", value_parser = parse_when)]
    pub splice: Option<SpliceWhen>,

    /// Paths to splice over. auto: copy where a splice would slow a transfer down, because its sender is nearer than its
    /// receiver, or because segments to the receiver are lost. any: splice over all paths. RATIO: like auto, but copy where the
    /// round-trip time of the whole path is more than RATIO times that of the sender's part; auto stands for 2.125. It
    /// has no effect with --splice at-once, because the path has not been measured then [default: auto].
    #[arg(long, value_name = "auto|any|RATIO", value_parser = parse_path)]
    pub path: Option<PathRule>,

    /// Enable TCP keep-alive while a connection is copied: probe a host that was silent for this time, and give it up after
    /// as long again without an answer.
    ///
    /// Without it, the connection of a host that has lost power lasts until the idle limit, which is two hours unless the
    /// configuration file sets idle_limit.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u16).range(1..=32767))]
    pub keepalive: Option<u16>,

    /// When stopped, leave spliced flows in the kernel, until they end or `longsplice stop --flush` removes them.
    #[arg(long)]
    pub leave_flows: bool,

    /// Copy only, and load nothing into the kernel.
    #[arg(long, conflicts_with_all = ["device", "xdp", "peer"])]
    pub copy_only: bool,

    /// Format of the access log. With json, messages on standard error are JSON, too [default: text].
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<Format>,

    /// Append the access log to this file; `-` is standard output, `off` no log [default: -].
    #[arg(long, value_name = "FILE")]
    pub access_log: Option<PathBuf>,

    /// Write a copy of everything that clients send and receive, on all listeners, spliced or not, into files in this
    /// directory, two per connection.
    ///
    /// START-NUMBER-ADDRESS-PORT-client holds the bytes sent by the client at ADDRESS and PORT, ...-server the bytes
    /// sent to it. No connection waits for the disk: data that could not be written in time leave a hole in the file,
    /// and are listed as a line OFFSET LENGTH in a second file with the same name and the suffix .gaps. A third file,
    /// .doubts, lists bytes that were sent twice with different content, so the receiver may have got the other version.
    /// The name of an incomplete file ends in .part, and keeps that suffix if the list of gaps cannot be written to the
    /// disk. No file grows beyond 16 GiB. The files may contain passwords, so only their owner can read them.
    #[arg(long, value_name = "DIR")]
    pub tap: Option<PathBuf>,

    /// After `longsplice upgrade`, end connections that this process still has after so many seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub hand_over_limit: u64,

    /// Take everything over from the process that has started this one, which standard input leads to (`longsplice upgrade`).
    #[arg(long, hide = true)]
    pub take_over: bool,

    /// Maximum number of tracked flows. Tables for that many are allocated at the start.
    #[arg(
        long,
        value_name = "N",
        default_value_t = DatapathOptions::default().max_flows,
        value_parser = clap::value_parser!(u32).range(within(&DatapathOptions::FLOWS))
    )]
    pub max_flows: u32,
}

/// Arguments of `longsplice tpot`.
#[derive(Debug, clap::Args)]
pub struct TpotArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: TpotCommand,
}

/// The subcommands of `longsplice tpot`.
#[derive(Debug, Subcommand)]
pub enum TpotCommand {
    /// Let the connections of this host ask for proxies, in the foreground. Programs need no change.
    ///
    /// A SYN carries a TCP option. A proxy on the route may answer it; all later packets of the connection then travel in a
    /// tunnel to that proxy, whatever happens to the route. Without a proxy, or if something on the path drops such SYNs,
    /// connections are as usual. SIGTERM and SIGINT stop it. Connections in tunnels outlive it, and the next start takes them
    /// over.
    Host(TpotHostArgs),
    /// List the connections in tunnels on this machine, as asker (host) or taker (proxy), and what is known about destinations.
    ///
    /// A destination is avoided if it has only answered SYNs without the option: something on the path may drop segments with
    /// options that it does not know. This lasts ten seconds at first, and twice as long each time, up to an hour. With `--udp
    /// fallback`, the list also has those to which tunnels are in UDP.
    Ls(TpotLsArgs),
    /// Forget what is known about destinations: avoid none, and try IP in IP first.
    Flush,
    /// Send SYNs that ask for a proxy, and that this router forwards, to a farm of proxies, in the foreground.
    ///
    /// Each such SYN to one of the ports goes to a member of the farm that is up. A member that cannot serve it sends it back on
    /// the farm's device, and it is routed on. All other packets are routed as ever, and connections of the members do not depend
    /// on this program. When it ends, however it does, everything is routed. SIGTERM and SIGINT stop it.
    Router(TpotRouterArgs),
    /// List the members of this router's farm with weight and number of SYNs, and the router's counters.
    Farm(TpotFarmArgs),
}

/// Arguments of `longsplice tpot router`.
#[derive(Clone, Debug, clap::Args)]
pub struct TpotRouterArgs {
    /// The device in the farm's network. SYNs that arrive there are routed.
    #[arg(long, value_name = "DEV", value_parser = NonEmptyStringValueParser::new())]
    pub farm: String,

    /// Address of a member of the farm, in a network of the device. May be repeated, 64 times at most.
    ///
    /// A member is a machine that runs `longsplice run` with a listener of protocol = "tpot", and whose default gateway is this
    /// router. Name an address of each family that it is to serve. It answers with this address, to which hosts then send.
    #[arg(long, value_name = "ADDR", required = true)]
    pub member: Vec<IpAddr>,

    /// Send SYNs to these ports to the farm. May be repeated.
    #[arg(long, value_name = "PORT|FIRST-LAST", required = true)]
    pub port: Vec<PortRange>,

    /// Only SYNs to these addresses. May be repeated [default: all].
    #[arg(long, value_name = "PREFIX")]
    pub to: Vec<Prefix>,

    /// Only SYNs that leave by this device. May be repeated. The default is all Ethernet devices.
    #[arg(long, value_name = "DEV", value_parser = NonEmptyStringValueParser::new())]
    pub device: Vec<String>,

    /// A member is up if it accepts TCP connections to this port.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub check: u16,

    /// Read from that connection how many SYNs a member wants, compared with others: a line like "75%", as agents for HAProxy send
    /// it. With 0%, it gets none.
    #[arg(long)]
    pub load: bool,

    /// Time between two checks of a member, and time limit of a check.
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub interval: u16,

    /// A member that was down is up after this many checks in a row that succeed. At the start, one is enough.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub rise: u8,

    /// A member is down after this many checks in a row that fail.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub fall: u8,

    /// Identifier of the TCP option (RFC 6994). Hosts and proxies must agree on it.
    #[arg(long, value_name = "NUMBER", default_value_t = TpotOptions::default().exid)]
    pub exid: u16,
}

/// Arguments of `longsplice tpot farm`.
#[derive(Debug, clap::Args)]
pub struct TpotFarmArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `longsplice tpot host`.
#[derive(Debug, clap::Args)]
#[command(group = ArgGroup::new("trust").required(true).multiple(true))]
pub struct TpotHostArgs {
    /// Addresses of proxies that may intercept connections. May be repeated.
    ///
    /// Whoever can intercept a connection can read and change what is not encrypted, as any machine on the path could. A
    /// tunnelled connection can be led off its path, so only name proxies that you trust.
    #[arg(long, value_name = "PREFIX", group = "trust")]
    pub proxy: Vec<Prefix>,

    /// File of keys: only proxies that have one of them may intercept connections, and only with an address of --proxy, if given.
    ///
    /// One to four keys, each 32 hexadecimal digits on a line of its own. Empty lines and lines that begin with # are skipped.
    /// The file must be readable by its owner only. Proxies have the same key: `key_file` in the table `tpot` of their
    /// configuration. Whoever has a key can intercept connections as a proxy does.
    #[arg(long, value_name = "FILE", group = "trust")]
    pub key_file: Option<PathBuf>,

    /// Ask for proxies for connections to these ports. May be repeated.
    #[arg(long, value_name = "PORT|FIRST-LAST", required = true)]
    pub port: Vec<PortRange>,

    /// Ask only for connections to these addresses. May be repeated [default: all].
    #[arg(long, value_name = "PREFIX")]
    pub to: Vec<Prefix>,

    /// Ask only for connections of the processes in this cgroup, and those below it: a directory of cgroup2.
    #[arg(long, value_name = "DIR", value_parser = parse_directory)]
    pub cgroup: Option<PathBuf>,

    /// Attach to this device. May be repeated. The default is all Ethernet devices.
    #[arg(long, value_name = "DEV", value_parser = NonEmptyStringValueParser::new())]
    pub device: Vec<String>,

    /// How many proxies may intercept a connection, one after the other.
    #[arg(long, value_name = "N", default_value_t = TpotOptions::default().hops, value_parser = clap::value_parser!(u8).range(1..))]
    pub hops: u8,

    /// Identifier of the TCP option (RFC 6994). Hosts and proxies must agree on it.
    #[arg(long, value_name = "NUMBER", default_value_t = TpotOptions::default().exid)]
    pub exid: u16,

    /// When to offer a tunnel in UDP, for paths that drop IP in IP: never, fallback or always.
    ///
    /// Proxies must allow it as well: `udp` in the table `tpot` of their configuration. With fallback, tunnels are in UDP if the
    /// first answer of a proxy does not arrive, a second later, and at once for further connections to that destination, for an
    /// hour.
    #[arg(long, value_name = "WHEN", default_value = "never", value_parser = parse_udp)]
    pub udp: TpotUdp,
}

/// Arguments of `longsplice tpot ls`.
#[derive(Debug, clap::Args)]
pub struct TpotLsArgs {
    /// Print JSON: one object per connection.
    #[arg(long)]
    pub json: bool,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
    /// The access log as web servers write it, the common format.
    Common,
    /// The same with referrer and user agent.
    Combined,
}

/// Arguments of `longsplice counters`.
#[derive(Debug, clap::Args)]
pub struct Json {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `longsplice doctor`.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,

    /// Check this configuration file as well: its devices, addresses, ports, privileges, and memory.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Ask this translucent proxy for a connection, and send packets through tunnels to it. May be repeated.
    ///
    /// The second address is one whose connections the proxy intercepts. A SYN that asks is sent to it, and what answers is reset.
    /// Both kinds of tunnels are tested, IP in IP (protocol 4, or 41 with IPv6) and IP in UDP. Each answer may take up to three
    /// seconds; without one, something on the path drops the packets, or the proxy is not there.
    #[arg(long, value_name = "PROXY,SERVER:PORT", value_parser = parse_tunnel)]
    pub tunnel: Vec<(IpAddr, SocketAddr)>,
}

/// Arguments of `longsplice ls`.
#[derive(Debug, clap::Args)]
pub struct LsArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,

    /// List at most this many flows, the first ones in the order of --sort.
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,

    /// Order of the flows.
    #[arg(long, value_name = "BY", default_value = "age")]
    pub sort: Sort,

    /// Print sums instead of flows: by listener and state, and by refusal.
    #[arg(long)]
    pub summary: bool,

    /// Print all of it again every so many seconds, until interrupted, with rates.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=WATCH_SECONDS_MAX))]
    pub watch: Option<u32>,

    /// List only flows in this state: copying, draining, spliced, or released.
    #[arg(long, value_name = "STATE", value_parser = parse_state)]
    pub state: Option<FlowState>,

    #[command(flatten)]
    pub which: Which,
}

/// Orders of flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    /// The oldest first: by number.
    Age,
    /// Those with most bytes first, of both directions together.
    Bytes,
    /// Those with most bytes per second first. They are counted for a second, or from one look of --watch to the next.
    Rate,
}

/// Arguments of `longsplice splice` and `longsplice unsplice`.
#[derive(Debug, clap::Args)]
pub struct Flow {
    /// Number of the flow, as `longsplice ls` shows it.
    #[arg(value_parser = parse_flow)]
    pub id: u64,
}

/// Arguments of `longsplice inspect`.
#[derive(Debug, clap::Args)]
pub struct InspectArgs {
    /// Number of the flow, as `longsplice ls` shows it.
    #[arg(value_parser = parse_flow)]
    pub id: u64,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `longsplice trace`.
#[derive(Debug, clap::Args)]
pub struct TraceArgs {
    /// Number of the flow, as `longsplice ls` shows it.
    #[arg(value_parser = parse_flow)]
    pub id: u64,

    /// Stop after this many segments.
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,

    /// Stop after this many seconds, at most an hour, so that a forgotten trace ends.
    #[arg(
        long,
        value_name = "S",
        default_value_t = 60,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(TRACE_SECONDS_MAX))
    )]
    pub seconds: u32,

    /// Print JSON: one object per segment.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `longsplice purge`.
#[derive(Debug, clap::Args)]
pub struct PurgeArgs {
    /// Site and path, with the query: http://www.example.org/news?page=2
    #[arg(value_parser = parse_url)]
    pub url: String,

    /// Also all that begins with this URL: http://www.example.org/ is the whole site.
    #[arg(long)]
    pub below: bool,
}

/// Arguments of `longsplice rule`.
#[derive(Debug, clap::Args)]
pub struct RuleArgs {
    /// Address of the client.
    pub client: IpAddr,

    /// What it would ask for: HOST:PORT.
    pub target: Target,

    /// Name with which it would have logged in.
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,

    /// Method of the HTTP request, such as GET or CONNECT, or verb of FTP.
    #[arg(long)]
    pub method: Option<String>,

    /// Path of the HTTP request.
    #[arg(long)]
    pub path: Option<String>,

    /// Only the listener with this name.
    #[arg(long, value_name = "NAME")]
    pub listener: Option<String>,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Converts a range to the one that clap expects.
fn within(range: &RangeInclusive<u32>) -> RangeInclusive<i64> {
    i64::from(*range.start())..=i64::from(*range.end())
}

fn parse_url(text: &str) -> Result<String, String> {
    let site = text.get(..7).filter(|scheme| scheme.eq_ignore_ascii_case("http://")).map(|_| &text[7..]);
    let is_good = text.len() <= URL_MAX && text.bytes().all(|b| b.is_ascii_graphic());
    match site {
        Some(site) if !site.is_empty() && !site.starts_with('/') && is_good => Ok(text.to_owned()),
        _ => Err(format!("write http://SITE/PATH, at most {URL_MAX} bytes, and other than ASCII as %XX")),
    }
}

fn parse_when(text: &str) -> Result<SpliceWhen, String> {
    match text {
        "auto" => Ok(SpliceWhen::Auto),
        "never" => Ok(SpliceWhen::Never),
        "at-once" => Ok(SpliceWhen::AtOnce),
        n => n
            .parse()
            .map(SpliceWhen::AfterBytes)
            .map_err(|_| "write auto, never, at-once, or a number of bytes".to_owned()),
    }
}

fn parse_path(text: &str) -> Result<PathRule, String> {
    match text {
        "auto" => Ok(PathRule::default()),
        "any" => Ok(PathRule::Any),
        n => {
            let ratio = n.parse().map_err(|_| "write auto, any, or a number from 1 to 1000")?;
            PathRule::within(ratio, PathRule::LOSS)
        }
    }
}

fn parse_tunnel(text: &str) -> Result<(IpAddr, SocketAddr), String> {
    let both = text.split_once(',').and_then(|(proxy, server)| Some((proxy.parse().ok()?, server.parse().ok()?)));
    both.filter(|(proxy, server): &(IpAddr, SocketAddr)| proxy.is_ipv4() == server.is_ipv4()).ok_or_else(|| {
        "write the proxy's address, a comma, and a server's address and port, both of one IP version: \
         192.0.2.1,198.51.100.1:80"
            .to_owned()
    })
}

fn parse_directory(text: &str) -> Result<PathBuf, String> {
    match fs::metadata(text) {
        Ok(found) if found.is_dir() => Ok(text.into()),
        Ok(_) => Err("not a directory".to_owned()),
        Err(e) => Err(e.to_string()),
    }
}

fn parse_udp(text: &str) -> Result<TpotUdp, String> {
    serde_json::from_value(text.into()).map_err(|_| "write never, fallback or always".to_owned())
}

fn parse_state(text: &str) -> Result<FlowState, String> {
    serde_json::from_value(text.into()).map_err(|_| "write copying, draining, spliced or released".to_owned())
}

/// End of longsplice(1): everything except flags.
pub const MAN_TAIL: &str = r#".SH EXAMPLES
.TP
SOCKS on one address, spliced after 32 KiB:
longsplice run \-\-socks5 192.0.2.1:1080
.TP
HTTP, with CONNECT:
longsplice run \-\-http 192.0.2.1:3128
.TP
TLS, to the server that the client names:
longsplice run \-\-tls 192.0.2.1:443
.TP
A fixed target, spliced from the first byte on:
longsplice run \-\-plug 192.0.2.1:5432=db.example.org:5432 \-\-splice at\-once
.TP
Without any privilege:
longsplice run \-\-socks5 127.0.0.1:1080 \-\-copy\-only
.SH SIGNALS
SIGTERM and SIGINT stop \fBlongsplice run\fR; while it drains, they end the wait. SIGUSR1 reopens the access log, and
SIGHUP reads the configuration anew as well, as \fBlongsplice reload\fR does.
SIGUSR2 is logged and ignored. After SIGKILL, spliced flows go on in the kernel. The next \fBlongsplice run\fR in the same
network namespace uses the same tables and does not disturb these flows.
.SH FILES
.TP
/etc/longsplice.toml
the configuration of longsplice.service: longsplice.toml(5)
.TP
/run/longsplice/control\-INODE.sock
control socket, mode 0600 unless the configuration gives it to a group
.TP
/sys/fs/bpf/longsplice/net\-INODE/
pinned links and maps of the data path; \fBlongsplice stop \-\-flush\fR removes them
.SH SEE ALSO
longsplice.toml(5), bpf(2), network_namespaces(7), capabilities(7)
"#;

#[cfg(test)]
mod tests;
