//! The only table of flags. `--help`, the man page and the parser all come from here.

use crate::control::LONGEST;
use clap::{ArgAction, Parser, Subcommand, ValueEnum, builder::NonEmptyStringValueParser};
use longsplice_engine::{FlowState, PathRule, When};
use std::path::PathBuf;

/// A TCP proxy that gets out of the way.
///
/// longsplice accepts connections, decides where they may go, and opens the onward connection, as any proxy does. Once
/// it has decided, it splices the two: from then on the kernel rewrites the headers of their segments and sends them
/// straight on. No byte passes through the program any more, and spliced connections outlive it. A connection that
/// cannot be spliced is served by copying, and `longsplice ls` says why.
///
/// Splicing needs Linux 6.6 or newer and CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON (or root): `longsplice doctor` checks, and
/// names the kernels that were tested.
/// Copying needs no privilege.
#[derive(Debug, Parser)]
#[command(name = "longsplice", version, arg_required_else_help = true, max_term_width = 100)]
pub struct Args {
    /// Path of the control socket.
    ///
    /// Without it, `run` takes the path from its configuration file, and everybody else
    /// /run/longsplice/control-INODE.sock, where INODE is the inode of the network namespace: one longsplice in each
    /// namespace needs no option at all. Who cannot write to /run uses $XDG_RUNTIME_DIR or the directory of temporary
    /// files instead.
    #[arg(long, global = true, value_name = "PATH", env = "LONGSPLICE_CONTROL")]
    pub control: Option<PathBuf>,

    /// Says more on standard error; twice: every transition of every flow. RUST_LOG, if set, decides instead.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,

    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Runs the proxy until it is told to stop.
    ///
    /// SIGTERM and SIGINT stop it at once, `longsplice stop --drain` gently; SIGHUP and SIGUSR1 open the access log anew, and
    /// SIGUSR2 does nothing. It exits with 0 after a clean stop, and with 1 when it could not start or clean up.
    Run(RunArgs),
    /// Lists live flows.
    ///
    /// One line each: number, protocol, client, server and target, state, bytes from client to server (UP) and back
    /// (DOWN), age, and the stages that segments traverse, or why the flow is not spliced.
    Ls(LsArgs),
    /// Shows all that is known of one flow, for instance when its connection stands still.
    ///
    /// Of each leg: addresses, who owns the bytes (phases), flags, sequence and acknowledgement numbers, windows, timestamps, next
    /// hop, what happens to packets from its host (path), and what the kernel knows of its socket. Numbers are those of the wire;
    /// beside them stand differences in bytes. docs/troubleshooting.md explains what to look at first.
    Inspect(InspectArgs),
    /// Shows the segments of one flow as they pass, with their numbers as they came and as they left, and what the data path did.
    ///
    /// One line for each segment, or two if both the other host and the socket got a copy: seconds since the first one, the leg
    /// where it came in, from whom, and what the TCP header says (windows without their scale, and . for ACK among the flags); then
    /// where it went, the numbers that it left with, and the verdicts. Ends after --count segments, after --seconds, or with the
    /// flow. One flow can be traced at a time; meanwhile forwarding it costs more, as each of its segments takes the general way.
    Trace(TraceArgs),
    /// Splices a flow now, whatever its policy waits for.
    Splice(Flow),
    /// Takes a spliced flow back into the program, which copies from then on.
    Unsplice(Flow),
    /// Shows what the data path did with packets (verdicts) and what the proxy did with connections: of each listener, how many
    /// were spliced, and why others were not.
    Counters(Json),
    /// Stops the running proxy, and waits until it has.
    ///
    /// Flows are ended with a reset, unless the proxy was started with `--leave-flows`. Exits with 0 if the proxy has cleaned up
    /// and ended, and with 1 if it could not clean up, was killed meanwhile, does not answer or does not end.
    Stop(StopArgs),
    /// Checks whether this machine can splice, and says what to do about it if not.
    ///
    /// Changes nothing: programs are loaded and attached inside a network namespace made for the purpose. Exits with 0
    /// if splicing is possible, with 1 otherwise.
    Doctor(Json),
    /// Shows a download that is spliced and outlives the proxy, or a site whose long replies are, in three network namespaces
    /// made for the purpose.
    ///
    /// nginx serves a file, curl fetches it through longsplice, longsplice is killed with SIGKILL half way, and the file
    /// must arrive with the right SHA-256. A sequence-number trace of the switch is written as SVG. Needs root, nginx,
    /// curl, iproute2, tcpdump and util-linux, and takes less than a minute. `demo http` asks a site of two
    /// servers for a thousand things over six connections, and compares every byte. Exits with 0 only if all of it worked.
    Demo(DemoArgs),
    /// Measures splicing against IP forwarding, copying and other proxies, in network namespaces made for the purpose.
    ///
    /// Every round measures all variants in turn; what is reported are medians of ratios within rounds, and rounds during
    /// which other programs or guests had the processors do not count. Prints tables, and writes them with every single
    /// measurement to DIR/DATE-PROCESSOR. Needs root, iproute2, ethtool and util-linux, compares with haproxy, nginx, socat,
    /// dante and nftables if they are installed, and takes the better part of an hour.
    Bench(BenchArgs),
    /// Prints this program's man page, for `man -l` or for packaging.
    Man,
    /// Networks to try things in.
    #[command(hide = true)]
    Lab(LabArgs),
}

/// What to serve, and how.
#[derive(Debug, clap::Args, Default)]
pub struct RunArgs {
    /// Serves SOCKS 5, 4 and 4a here. May be repeated.
    #[arg(long, value_name = "ADDR:PORT")]
    pub socks5: Vec<String>,

    /// Serves HTTP/1.1 and 1.0 here as a forward proxy: CONNECT, and requests with absolute URLs. May be repeated.
    ///
    /// Connections of CONNECT are spliced as all others are. Of other requests, each may go elsewhere: bodies from 1 MB on
    /// are spliced one by one, or longer ones if --splice says so, and the rest is copied. A reverse proxy, which stands for
    /// servers, needs a configuration file, and so do filters for replies and caches.
    #[arg(long, value_name = "ADDR:PORT")]
    pub http: Vec<String>,

    /// Serves TLS here: connects to the server that the ClientHello names, at the same port, and decrypts nothing. May
    /// be repeated.
    ///
    /// Loopback, link-local and the like are denied unless a rule of a configuration file opens them. There, names and
    /// protocols (ALPN) may lead to fixed targets, too.
    #[arg(long, value_name = "ADDR:PORT")]
    pub tls: Vec<String>,

    /// Connects everybody who comes to the left address to the target on the right. May be repeated.
    #[arg(long, value_name = "ADDR:PORT=HOST:PORT")]
    pub plug: Vec<String>,

    /// Reads this TOML file. Listeners of the command line are added to its own; other options win over it.
    ///
    /// It has what no option says: users, with passwords in the clear or as hashes of bcrypt ($2y$), SHA-crypt ($5$, $6$) or
    /// Argon2id; access rules and limits; sites and their servers; filters for replies of HTTP, by status, media type, length,
    /// and expressions that are looked for in the first bytes of bodies, or in all of them; caches of replies, on the disk.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Splices on this device. May be repeated; without it, on all Ethernet devices. It is an error if there is no such
    /// device, as with --xdp and --peer; splice = "if-possible" in a configuration file copies then.
    #[arg(long, value_name = "DEV", value_parser = NonEmptyStringValueParser::new())]
    pub device: Vec<String>,

    /// Forwards on this device by XDP what can be: native XDP of its driver, before the kernel makes a packet of what has come.
    /// May be repeated. Some drivers switch offloads off for it; over veth it halves the throughput. Packets whose checksum
    /// their sender leaves to a device, as Linux does over veth, take the ordinary way.
    #[arg(long, value_name = "DEV", value_parser = NonEmptyStringValueParser::new())]
    pub xdp: Vec<String>,

    /// Hands packets of spliced connections that leave by this device straight to its other end: it is a veth or netkit, and
    /// its other end in another network namespace. May be repeated. Costs less, but passes by what is attached to the
    /// device's egress: queueing disciplines, nftables and tc programs, and captures do not see these packets.
    #[arg(long, value_name = "DEV", value_parser = NonEmptyStringValueParser::new())]
    pub peer: Vec<String>,

    /// When to splice: never, at-once, or after so many bytes were copied, both directions together [default: 262144,
    /// from where on it was measured to pay].
    #[arg(long, value_name = "never|at-once|BYTES", value_parser = parse_when)]
    pub splice: Option<When>,

    /// Over which paths to splice: auto copies where a splice would slow a transfer down, because its sender is nearer than its
    /// receiver; any splices all. Nothing is known yet of connections that are spliced at once [default: auto].
    #[arg(long, value_name = "auto|any", value_parser = parse_path)]
    pub path: Option<PathRule>,

    /// While a connection is copied, asks a client or server that is silent for so long whether it is still there (TCP keep-alive),
    /// and gives it up if it has not answered after as long again: one without power would hold its connection until the idle
    /// limit, of two hours unless a configuration file says otherwise.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u16).range(1..=32767))]
    pub keepalive: Option<u16>,

    /// When stopped, lets spliced flows run on in the kernel, until they end or `longsplice stop --flush`.
    #[arg(long)]
    pub leave_flows: bool,

    /// Copies only, without touching the kernel's packet path.
    #[arg(long, conflicts_with_all = ["device", "xdp", "peer"])]
    pub copy_only: bool,

    /// Format of the access log and of messages on standard error [default: text].
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<Format>,

    /// Appends the access log to this file. Without it, and with `-`, it goes to standard output; with `off`, there is none.
    #[arg(long, value_name = "FILE")]
    pub access_log: Option<PathBuf>,

    /// Writes a copy of all that clients send and are sent, on all listeners, into files in this directory, two for each
    /// connection; of spliced connections, too.
    ///
    /// START-NUMBER-ADDRESS-PORT-client has what the client of that address has sent, ...-server what it was sent. Nothing waits
    /// for the disk: what could not be copied in time is a hole in the file, and a line OFFSET LENGTH in another beside it, named
    /// the same with .gaps behind it; in .doubts, bytes that came twice and not alike, so that the receiver may have got others. A
    /// file that is not complete yet, or of which the disk could not take what is missing, has .part behind its name. No file grows beyond 16 GiB. Passwords and the like are in there as well: the files are
    /// readable to their owner only.
    #[arg(long, value_name = "DIR")]
    pub tap: Option<PathBuf>,

    /// Tracks this many flows at most; tables are allocated for as many at the start.
    #[arg(long, value_name = "N", default_value_t = 65536, value_parser = clap::value_parser!(u32).range(16..=16_777_216))]
    pub max_flows: u32,
}

/// How lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

/// How output looks.
#[derive(Debug, clap::Args)]
pub struct Json {
    /// Prints JSON, for programs.
    #[arg(long)]
    pub json: bool,
}

/// Which flows to list, and how.
#[derive(Debug, clap::Args)]
pub struct LsArgs {
    /// Prints JSON, for programs.
    #[arg(long)]
    pub json: bool,

    /// Lists so many at most: those that have lived longest. There may be a million.
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,

    /// Lists only those in this state: copying, draining, spliced, or released.
    #[arg(long, value_name = "STATE", value_parser = parse_state)]
    pub state: Option<FlowState>,
}

/// Which flow.
#[derive(Debug, clap::Args)]
pub struct Flow {
    /// Number of the flow, as `longsplice ls` shows it.
    pub id: u64,
}

/// Which flow to show, and how.
#[derive(Debug, clap::Args)]
pub struct InspectArgs {
    /// Number of the flow, as `longsplice ls` shows it.
    pub id: u64,

    /// Prints JSON, for programs.
    #[arg(long)]
    pub json: bool,
}

/// Which flow to trace, and for how long.
#[derive(Debug, clap::Args)]
pub struct TraceArgs {
    /// Number of the flow, as `longsplice ls` shows it.
    pub id: u64,

    /// Ends after so many segments.
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,

    /// Ends after this time: at most an hour, so that no trace is forgotten.
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=i64::from(LONGEST)))]
    pub seconds: u32,

    /// Prints JSON, for programs: one object for each segment.
    #[arg(long)]
    pub json: bool,
}

/// How to stop.
#[derive(Debug, clap::Args)]
pub struct StopArgs {
    /// Accepts no more connections, and waits this long for the live ones to end by themselves; 30 s without a number.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "30")]
    pub drain: Option<u64>,

    /// Leaves nothing behind in the kernel: ends flows that were to be left, and removes what a process that has died
    /// left in this network namespace. Spliced flows end with it.
    #[arg(long)]
    pub flush: bool,

    /// With `--flush`, removes what is left of other network namespaces as well, if they are gone: tables that no process owns and
    /// no device leads to, and sockets that nobody listens on. A proxy that starts does the same.
    #[arg(long, requires = "flush")]
    pub all: bool,
}

/// What the demo shows, and where it writes.
#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// What to show.
    #[arg(value_name = "WHAT", value_enum, default_value_t = Show::Download)]
    pub what: Show,

    /// Directory for the trace; made if it does not exist.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub out: PathBuf,
}

/// What there is to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Show {
    /// One download that is spliced, and outlives the proxy.
    Download,
    /// A thousand requests to a site of two servers, over connections that persist; writes nothing.
    Http,
}

/// What to measure, and where to keep it.
#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    /// What to measure [default: everything but million]. A part is only written to files if there is an
    /// --out; `million` always is, to a file of its own.
    #[arg(value_name = "WHAT", value_enum)]
    pub what: Vec<What>,

    /// Rounds; the median is over them.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,

    /// Length of one transfer, whole or not, from 0.1 to 60.
    #[arg(long, value_name = "S", default_value = "1", value_parser = parse_seconds)]
    pub seconds: f64,

    /// How many flows the flood hits at random; several numbers with commas.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,1000,100000,1000000",
        value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub flows: Vec<u32>,

    /// So many connections at the same time, for `million`.
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = parse_connections)]
    pub connections: usize,

    /// Directory of results [default: bench/results].
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// Measures nothing, but writes the figures of the latest results into README.md and docs/bench.md of this
    /// directory, between `<!-- figures -->` and `<!-- /figures -->`.
    #[arg(long, conflicts_with = "what")]
    pub readme: bool,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// Cost of a segment, by round trips on one CPU.
    Segment,
    /// Throughput by the ratio of data to acknowledgements: derived from the cost of segments, and measured.
    Ratio,
    /// Throughput of 1, 8 and 64 connections.
    Bulk,
    /// Processor time per gigabyte; measured together with bulk.
    Cpu,
    /// Response time by size of object, through SOCKS.
    Response,
    /// New connections per second.
    Rate,
    /// From how many bytes on splicing pays.
    Threshold,
    /// HTTP through reverse proxies, and from what size on splicing a body pays.
    Http,
    /// Time that a splice, an unsplice, a release and a recreation take by themselves.
    Switch,
    /// Memory per connection.
    Memory,
    /// Cost of a small packet, with up to a million flows.
    Flood,
    /// Sequence numbers across splice, unsplice, release and recreation, as a picture; measures nothing, and needs --out.
    Trace,
    /// A million connections at the same time; only if asked for: it takes minutes, and some 12 GB.
    Million,
}

/// Networks to try things in.
#[derive(Debug, clap::Args)]
pub struct LabArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: LabCommand,
}

/// What can be done with a lab.
#[derive(Clone, Copy, Debug, Subcommand)]
pub enum LabCommand {
    /// Makes client, forwarder and server, and starts $SHELL in the client. The lab goes when the shell ends.
    Shell,
}

fn parse_when(text: &str) -> Result<When, String> {
    match text {
        "never" => Ok(When::Never),
        "at-once" => Ok(When::AtOnce),
        n => n.parse().map(When::AfterBytes).map_err(|_| "write never, at-once, or a number of bytes".to_owned()),
    }
}

fn parse_path(text: &str) -> Result<PathRule, String> {
    serde_json::from_value(text.into()).map_err(|_| "write auto or any".to_owned())
}

fn parse_state(text: &str) -> Result<FlowState, String> {
    serde_json::from_value(text.into()).map_err(|_| "write copying, draining, spliced or released".to_owned())
}

fn parse_connections(text: &str) -> Result<usize, String> {
    let n = text.parse().ok().filter(|n| (100..=4_000_000).contains(n));
    n.ok_or_else(|| "write a number from 100 to 4000000".to_owned())
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|s| (0.1..=60.0).contains(s));
    seconds.ok_or_else(|| "write a number of seconds from 0.1 to 60".to_owned())
}

/// What no flag says, for the end of the man page.
pub const MAN_TAIL: &str = r#".SH EXAMPLES
.TP
SOCKS on one address, spliced after 256 KiB:
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
SIGTERM and SIGINT stop \fBlongsplice run\fR, a second one without waiting; SIGHUP and SIGUSR1 open the access log anew;
SIGUSR2 is logged and ignored. After SIGKILL, spliced flows run on; the next \fBlongsplice run\fR in the same network
namespace uses the same tables and does not disturb them.
.SH FILES
.TP
/run/longsplice/control\-INODE.sock
control socket, mode 0600
.TP
/sys/fs/bpf/longsplice/net\-INODE/
links and maps of the data path, pinned; \fBlongsplice stop \-\-flush\fR removes them
.SH SEE ALSO
bpf(2), network_namespaces(7), capabilities(7)
"#;

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use longsplice_engine::Policy;
    use longsplice_proxy::Http;

    fn parse(line: &str) -> Result<Args, clap::Error> {
        Args::try_parse_from(line.split_whitespace())
    }

    fn run(line: &str) -> RunArgs {
        match parse(line).unwrap().command {
            Command::Run(run) => run,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_table_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn where_to_splice() {
        assert_eq!(run("longsplice run").path, None);
        assert_eq!(run("longsplice run --path any").path, Some(PathRule::Any));
        assert_eq!(run("longsplice run --path auto").path, Some(PathRule::Auto));
        assert!(parse("longsplice run --path short").is_err());
    }

    #[test]
    fn when_to_splice() {
        assert_eq!(run("longsplice run").splice, None);
        assert_eq!(run("longsplice run --splice never").splice, Some(When::Never));
        assert_eq!(run("longsplice run --splice at-once").splice, Some(When::AtOnce));
        assert_eq!(run("longsplice run --splice 4096").splice, Some(When::AfterBytes(4096)));
        assert!(parse("longsplice run --splice soon").is_err());
    }

    /// Figures that people read, and the constants.
    #[test]
    fn the_defaults_are_as_they_are_told() {
        let mut command = Args::command();
        let help = command.find_subcommand_mut("run").unwrap().render_long_help().to_string();
        let texts = [&help, MAN_TAIL, include_str!("../../../README.md"), include_str!("../../../docs/bench.md")];
        let [help, man, readme, bench] = texts.map(|t| t.split_whitespace().collect::<Vec<_>>().join(" "));
        let (bytes, body) = (Policy::PAYS_FROM, format!("bodies from {} MB on", Http::BODY_PAYS_FROM >> 20));
        assert_eq!((bytes % 1024, Http::BODY_PAYS_FROM % (1 << 20)), (0, 0));
        assert!(help.contains(&format!("[default: {bytes},")) && help.contains(&body), "{help}");
        assert!(man.contains(&format!("spliced after {} KiB:", bytes >> 10)), "{man}");
        assert!(readme.contains(&format!("(WebSocket) and {body}")), "{body}");
        assert!(bench.contains(&format!("after {} KB, and {body}", bytes >> 10)), "{body}");
    }

    #[test]
    fn listeners_repeat() {
        let one = "--plug [::1]:3=a:4 --http [::1]:5 --tls [::1]:6";
        let run = run(&format!("longsplice run --socks5 [::1]:1 --socks5 [::1]:2 {one} --device a --device b"));
        assert_eq!((run.socks5.len(), run.device.len()), (2, 2));
        assert_eq!((run.plug.len(), run.http.len(), run.tls.len()), (1, 1, 1));
    }

    #[test]
    fn drain_with_and_without_a_number() {
        for (line, want) in [("stop", None), ("stop --drain", Some(30)), ("stop --drain 5 --flush", Some(5))] {
            match parse(&format!("longsplice {line}")).unwrap().command {
                Command::Stop(stop) => assert_eq!(stop.drain, want, "{line}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn options_of_all_subcommands_stand_anywhere() {
        assert_eq!(parse("longsplice ls --control /a").unwrap().control, Some("/a".into()));
        assert_eq!(parse("longsplice --control /a -vv ls").unwrap().verbose, 2);
    }

    #[test]
    fn contradictions_are_refused() {
        assert!(parse("longsplice run --copy-only --device eth0").is_err());
        assert!(parse("longsplice run --max-flows 1").is_err());
        assert!(parse("longsplice splice").is_err());
    }
}
