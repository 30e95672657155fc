//! The only table of flags of `longsplice-bench`.

use crate::cell::Cell;
use clap::{Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Compare splicing with IP forwarding, copying and other proxies, in temporary network namespaces.
///
/// Every round measures all variants in turn. The results are medians of the ratios within rounds; rounds during which
/// other programs or guests used the processors do not count. Tables are printed, and written to DIR/PROCESSOR, where they
/// replace those of the last run. The bench needs root, iproute2, ethtool and util-linux, and takes most of an hour. It
/// compares with haproxy, nginx, socat, dante and nftables if they are installed.
///
/// It runs the `longsplice` in its own directory.
#[derive(Debug, Parser)]
#[command(name = "longsplice-bench", version, max_term_width = 100, args_conflicts_with_subcommands = true)]
pub struct Args {
    /// What to do instead.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// What to measure.
    #[command(flatten)]
    pub bench: BenchArgs,
}

/// What stands on the lab beside the bench.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Demonstrate a spliced download that outlives the proxy, or something else, in temporary network namespaces.
    ///
    /// nginx serves a file, and curl downloads it through longsplice. longsplice is killed with SIGKILL half way, and the
    /// file must arrive with the right SHA-256. A sequence-number trace of the switch is written as SVG. `demo ftp` does the same
    /// with a file of vsftpd, and shows the kill. `demo http` sends a thousand requests to a site of two servers over six
    /// connections, and compares every byte. `demo tpot` downloads a file through two translucent proxies, changes the route and
    /// stops one of them half way. The demo needs root, nginx or vsftpd, curl, iproute2, tcpdump and util-linux, and takes less
    /// than a minute. The exit status is 0 only if everything worked.
    Demo(DemoArgs),
    /// Compare the `longsplice` of this directory with another one, such as that of the last release.
    ///
    /// Both run in turn, in each round. The exit status is 0 unless this one needs more than 1.05 times the time, system calls, or
    /// sleeps of the other for a segment or a connection; for times, chance must not explain it. Takes some three minutes, on a
    /// machine that does nothing else.
    Gate(GateArgs),
    /// Compare what reloads cost clients with HAProxy and nginx, if they are installed.
    ///
    /// Each is a TCP proxy that is reloaded several times a second, while a client connects all the time. Prints how many of its
    /// connections were refused or reset, how many of those that stay were lost, how fast new ones were served, and how many
    /// processes there are in the end, with their memory. Takes some minutes, and root.
    Reloads(ReloadsArgs),
    /// Make a client, a forwarder and a server, and start $SHELL in the client. The network is removed when the shell ends,
    /// and all programs in it end.
    Shell,
}

/// What this program is compared with.
#[derive(Debug, clap::Args)]
pub struct GateArgs {
    /// The other `longsplice`.
    #[arg(long, value_name = "PROGRAM")]
    pub against: PathBuf,

    /// Number of rounds, of which each runs both. Chance explains anything in fewer than six.
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(6..=1000))]
    pub rounds: u32,
}

/// How often and with what they are reloaded.
#[derive(Debug, clap::Args)]
pub struct ReloadsArgs {
    /// Number of reloads.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub reloads: u32,

    /// Number of connections that begin before each reload, and stay.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub connections: u32,
}

/// What the demo shows, and where it writes.
#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// What to demonstrate.
    #[arg(value_name = "WHAT", value_enum, default_value_t = Show::Download)]
    pub what: Show,

    /// Directory for the trace, if there is one. It is created if it does not exist.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub out: PathBuf,
}

/// What there is to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Show {
    /// A spliced download that outlives the proxy.
    Download,
    /// An FTP download whose data connection outlives the proxy.
    Ftp,
    /// A thousand requests to a site of two servers, over persistent connections; writes nothing.
    Http,
    /// A download through two translucent proxies, whose route changes half way; writes nothing.
    Tpot,
}

/// What to measure, and where to keep it.
#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    /// What to measure [default: everything up to trace]. Results are kept if all is measured that their file has, which is
    /// said below for those that have files of their own; otherwise only with --out.
    #[arg(value_name = "WHAT", value_enum)]
    pub what: Vec<Measurement>,

    /// Number of rounds to take the median of [default: 5; for long paths 3].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,

    /// Length of one transfer in seconds, from 0.1 to 60.
    #[arg(long, value_name = "S", default_value = "1", value_parser = parse_seconds)]
    pub seconds: f64,

    /// Numbers of flows for `flood`, whose packets belong to random ones of them.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,1000,100000,1000000",
        value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub flows: Vec<u32>,

    /// Number of simultaneous connections for `million`.
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(100..=4_000_000))]
    pub connections: u32,

    /// A row of `wan` and `tpot`, as their tables name them: the place of the round-trip time (c: the client's link; s: the
    /// server's; b: both; t: three links, only with `tpot`) and its milliseconds, the object, the congestion control of client
    /// and server, and what is special, as in `c100, 1 MB, bbr, HTTP, 0.1 % lost, up, IPv6`. May be repeated. Without it, a
    /// selection is measured.
    #[arg(long, value_name = "ROW")]
    pub path: Vec<Cell>,

    /// Compare only these, of those that a measurement has. The results name them, and so does the error for another name.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub variants: Vec<String>,

    /// Directory of results [default: bench/results].
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// Measure nothing. Write the figures of the latest results into README.md and docs/bench.md of this directory,
    /// between `<!-- figures -->` and `<!-- /figures -->`.
    #[arg(long, conflicts_with = "what")]
    pub readme: bool,
}

/// A measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Measurement {
    /// Cost of a segment, from round trips on one CPU.
    Segment,
    /// Throughput by the ratio of data to acknowledgements: calculated from the cost of segments, and measured.
    Ratio,
    /// Throughput of 1, 8 and 64 connections, and processor time per gigabyte.
    Bulk,
    /// Response time by object size, through SOCKS.
    Response,
    /// New connections per second.
    Rate,
    /// The number of bytes from which on splicing takes less time than copying.
    Threshold,
    /// HTTP through reverse proxies.
    Http,
    /// The size from which on splicing a body takes less time.
    Body,
    /// Time of a splice, an unsplice, a release and a recreation.
    Switch,
    /// Memory per connection.
    Memory,
    /// Cost of a small packet with up to a million flows.
    Flood,
    /// Cost of a datagram through SOCKS, from round trips on one CPU.
    Datagrams,
    /// A picture of sequence numbers across splice, unsplice, release and recreation; measures nothing, and needs --out if it is named.
    Trace,
    /// A million simultaneous connections, in a file of their own; takes minutes and some 12 GB.
    Million,
    /// Time of transfers over long and lossy paths; takes up to 15 minutes, and has a file with the two below.
    Wan,
    /// Memory of the forwarder's sockets with ten slow readers 50 ms away.
    Readers,
    /// An unsplice in the middle of a transfer over a long path.
    Unsplice,
    /// Transfers through translucent proxies over long paths, in a file of their own; takes some five minutes.
    Tpot,
    /// What segments and connections through translucent proxies cost without delays, in a file of their own.
    TpotCosts,
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|s| (0.1..=60.0).contains(s));
    seconds.ok_or_else(|| "write a number of seconds from 0.1 to 60".to_owned())
}
