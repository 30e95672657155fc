//! The only table of flags of `longsplice-bench`.

use crate::cell::{Cell, Congestion, Direction, Distance, IpVersion, Protocol, SUBJECTS, Size};
use clap::{Parser, Subcommand, ValueEnum, builder::PossibleValuesParser};
use std::path::PathBuf;

/// Compare splicing with IP forwarding, copying and other proxies, in temporary network namespaces.
///
/// Every round measures all variants in turn. The results are medians of the ratios within rounds; rounds during which
/// other programs or guests used the processors do not count. Tables are printed, and written to DIR/PROCESSOR, where they replace those of the last run. The
/// bench needs root, iproute2, ethtool and util-linux, and takes most of an hour. It compares with haproxy, nginx, socat,
/// dante and nftables if they are installed.
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
    /// Demonstrate a spliced download that outlives the proxy, or a site with spliced replies, in three temporary network
    /// namespaces.
    ///
    /// nginx serves a file, and curl downloads it through longsplice. longsplice is killed with SIGKILL half way, and the
    /// file must arrive with the right SHA-256. A sequence-number trace of the switch is written as SVG. `demo http` sends a
    /// thousand requests to a site of two servers over six connections, and compares every byte. `demo tpot` downloads a
    /// file through two translucent proxies, changes the route and stops one of them half way. The demo needs root, nginx,
    /// curl, iproute2, tcpdump and util-linux, and takes less than a minute. The exit status is 0 only if everything worked.
    Demo(DemoArgs),
    /// Make a client, a forwarder and a server, and start $SHELL in the client. The network is removed when the shell ends.
    Shell,
}

/// What the demo shows, and where it writes.
#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// What to demonstrate.
    #[arg(value_name = "WHAT", value_enum, default_value_t = Show::Download)]
    pub what: Show,

    /// Directory for the trace. It is created if it does not exist.
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
    /// What to measure [default: everything but million, wan and tpot]. If only a part is measured, results are written
    /// only with --out; `million`, and `wan` and `tpot` with their default cells, always write to files of their own.
    #[arg(value_name = "WHAT", value_enum)]
    pub what: Vec<Measurement>,

    /// Number of rounds to take the median of [default: 5; for wan and tpot 3].
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
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = parse_connections)]
    pub connections: usize,

    /// Directory of results [default: bench/results].
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// Measure nothing. Write the figures of the latest results into README.md and docs/bench.md of this directory,
    /// between `<!-- figures -->` and `<!-- /figures -->`.
    #[arg(long, conflicts_with = "what")]
    pub readme: bool,

    /// What `wan` and `tpot` measure.
    #[command(flatten)]
    pub wan: WanArgs,
}

/// What `wan` and `tpot` measure.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Options of wan and tpot")]
pub struct WanArgs {
    /// Round-trip times in milliseconds: at the client's link (c100), at the server's (s100), half at each (b100), or with
    /// `tpot` a third at each of its three links (t90).
    ///
    /// With this flag or one of those up to --ip, all combinations of their values are measured, and c100, 1m, bbr, 0, plug,
    /// down and v4 for those that are left out. Without any of them, a selection is measured.
    #[arg(long, value_name = "PLACE,...", value_delimiter = ',')]
    pub rtt: Vec<Distance>,

    /// Sizes of the object: bytes, or with k or m for thousands or millions of them.
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',')]
    pub size: Vec<Size>,

    /// Congestion control of client and server. A proxy's is the same, but reno instead of cubic.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_enum)]
    pub cc: Vec<Congestion>,

    /// Percentages of packets lost on the path, in both directions.
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', value_parser = parse_loss)]
    pub loss: Vec<f64>,

    /// Protocols between client and proxy; `tpot` has only plug, which stands for its connections.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_enum)]
    pub proto: Vec<Protocol>,

    /// Downloads or uploads.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_enum)]
    pub direction: Vec<Direction>,

    /// IP versions.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_enum)]
    pub ip: Vec<IpVersion>,

    /// What `wan` compares [default: everything].
    #[arg(long, value_name = "NAME,...", value_delimiter = ',',
        value_parser = PossibleValuesParser::new(SUBJECTS))]
    pub subjects: Vec<String>,

    /// Parts of `wan` or `tpot` to measure [default: all; only the cells if some are chosen].
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_enum)]
    pub parts: Vec<WanPart>,
}

/// A part of `wan` or `tpot`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WanPart {
    /// Transfers: the time of each, and what happened to the connection.
    Cells,
    /// Memory of the forwarder's sockets with ten slow readers: only with `wan`.
    SlowReaders,
    /// An unsplice in mid-transfer: only with `wan`.
    Unsplice,
    /// What segments and connections cost without delays: only with `tpot`.
    Costs,
}

impl WanArgs {
    /// Whether cells are chosen.
    fn chooses(&self) -> bool {
        let empty = self.rtt.is_empty() && self.size.is_empty() && self.cc.is_empty() && self.loss.is_empty();
        !(empty && self.proto.is_empty() && self.direction.is_empty() && self.ip.is_empty())
    }

    /// Whether everything is measured as by default.
    pub fn is_default(&self) -> bool {
        !self.chooses() && self.subjects.is_empty() && self.parts.is_empty()
    }

    /// Whether this part is wanted.
    pub fn wants(&self, part: WanPart) -> bool {
        match self.parts.is_empty() {
            true => part == WanPart::Cells || !self.chooses(),
            false => self.parts.contains(&part),
        }
    }

    /// Whether this one is to be compared.
    pub fn compares(&self, subject: &str) -> bool {
        self.subjects.is_empty() || self.subjects.iter().any(|wanted| wanted == subject)
    }

    /// The cells that are chosen, if any are.
    pub fn chosen(&self) -> Option<Vec<Cell>> {
        if !self.chooses() {
            return None;
        }
        let mut cells = vec![Cell::BASE];
        vary(&mut cells, &self.ip, |cell, version| cell.version = version);
        vary(&mut cells, &self.direction, |cell, direction| cell.direction = direction);
        vary(&mut cells, &self.proto, |cell, protocol| cell.protocol = protocol);
        vary(&mut cells, &self.loss, |cell, loss| cell.loss = loss);
        vary(&mut cells, &self.cc, |cell, congestion| cell.congestion = congestion);
        vary(&mut cells, &self.size, |cell, size| cell.size = size);
        vary(&mut cells, &self.rtt, |cell, distance| cell.distance = distance);
        Some(cells)
    }
}

/// Replaces each cell by one for each value; without values they stay.
fn vary<T: Copy>(cells: &mut Vec<Cell>, values: &[T], set: impl Fn(&mut Cell, T)) {
    if values.is_empty() {
        return;
    }
    let with = |mut cell: Cell, value: T| {
        set(&mut cell, value);
        cell
    };
    *cells = cells.iter().flat_map(|cell| values.iter().map(|value| with(*cell, *value))).collect();
}

/// A measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Measurement {
    /// Cost of a segment, from round trips on one CPU.
    Segment,
    /// Throughput by the ratio of data to acknowledgements: calculated from the cost of segments, and measured.
    Ratio,
    /// Throughput of 1, 8 and 64 connections.
    Bulk,
    /// Processor time per gigabyte; measured together with bulk.
    Cpu,
    /// Response time by object size, through SOCKS.
    Response,
    /// New connections per second.
    Rate,
    /// The number of bytes from which on splicing takes less time than copying.
    Threshold,
    /// HTTP through reverse proxies, and the size from which on splicing a body takes less time.
    Http,
    /// Time of a splice, an unsplice, a release and a recreation.
    Switch,
    /// Memory per connection.
    Memory,
    /// Cost of a small packet with up to a million flows.
    Flood,
    /// Cost of a datagram through SOCKS, from round trips on one CPU.
    Datagrams,
    /// A picture of sequence numbers across splice, unsplice, release and recreation; measures nothing, and needs --out.
    Trace,
    /// A million simultaneous connections; takes minutes and some 12 GB, so it runs only if it is named.
    Million,
    /// Time of transfers over long and lossy paths; takes up to 15 minutes, so it runs only if it is named.
    Wan,
    /// The same through a translucent proxy, and the time until the first byte; takes some five minutes, so it runs only if
    /// it is named.
    Tpot,
}

fn parse_connections(text: &str) -> Result<usize, String> {
    let n = text.parse().ok().filter(|n| (100..=4_000_000).contains(n));
    n.ok_or_else(|| "write a number from 100 to 4000000".to_owned())
}

fn parse_loss(text: &str) -> Result<f64, String> {
    let percent = text.parse().ok().filter(|p| (0.0..=50.0).contains(p));
    percent.ok_or_else(|| "write a percentage from 0 to 50".to_owned())
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|s| (0.1..=60.0).contains(s));
    seconds.ok_or_else(|| "write a number of seconds from 0.1 to 60".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wan(arguments: &[&str]) -> WanArgs {
        let all = ["longsplice-bench", "wan"].iter().chain(arguments);
        Args::try_parse_from(all).expect("valid arguments").bench.wan
    }

    #[test]
    fn cells_are_all_combinations_of_what_is_given() {
        let args = wan(&["--rtt", "c100,s50", "--loss", "0,1", "--cc", "reno", "--subjects", "copied,default"]);
        let labels: Vec<String> = args.chosen().unwrap().iter().map(Cell::label).collect();
        assert_eq!(
            labels,
            ["c100, 1 MB, reno", "s50, 1 MB, reno", "c100, 1 MB, reno, 1 % lost", "s50, 1 MB, reno, 1 % lost"]
        );
        assert!(args.compares("copied") && !args.compares("routed"));
        assert!(!args.is_default() && args.wants(WanPart::Cells) && !args.wants(WanPart::Unsplice));
    }

    #[test]
    fn everything_is_measured_by_default() {
        let args = wan(&[]);
        assert!(args.is_default() && args.wants(WanPart::SlowReaders) && args.compares("haproxy"));
        assert_eq!(args.chosen(), None, "a selection");
        let part = wan(&["--parts", "unsplice"]);
        assert!(!part.is_default() && part.wants(WanPart::Unsplice) && !part.wants(WanPart::Cells));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (flag, value) in [("--rtt", "x1"), ("--size", "0"), ("--loss", "51"), ("--cc", "vegas"), ("--ip", "v5")] {
            assert!(Args::try_parse_from(["longsplice-bench", "wan", flag, value]).is_err(), "{flag} {value}");
        }
    }
}
