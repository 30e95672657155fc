//! Cost of a small packet, on one CPU: a [flood](longsplice_lab::flood) of random flows through one way of passing packets
//! on, generator and sink included, which are the same for all.
//!
//! To add a way: a [`Way`], its title, and what [`Venue::set`] does for it.

use super::{Bench, Result, machine::Watch, segment::on_one_cpu, stats::Spread, venue, venue::Pins};
use longsplice_datapath::{Datapath, IdleLeg, NextHop, Options, Tuple};
use longsplice_lab::{
    Lab,
    flood::{self, Aim, Flood},
};
use serde::{Deserialize, Serialize};
use std::{fmt, fmt::Write, net::SocketAddr, time::Duration};

/// Tables and caches have met the flows after this.
const WARM_UP: Duration = Duration::from_millis(100);
/// If more than this share of the packets is lost, their time is not the time of those that arrive.
const LOSS: f64 = 0.01;
/// Window scale: the sequence numbers of a flow among a million make large steps.
const SCALE: u8 = 14;
/// Where the numbers of the connections to the server are ahead of those of the clients.
const AHEAD: u32 = 1 << 30;

/// How packets are passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// The forwarder's kernel routes.
    IpForward,
    /// Spliced by the programs at tcx.
    Tcx,
    /// Spliced by the program at XDP.
    Xdp,
}

impl Way {
    /// All of them; the first is what the others are compared with.
    pub const ALL: [Way; 3] = [Way::IpForward, Way::Tcx, Way::Xdp];

    /// For tables.
    pub fn title(self) -> &'static str {
        match self {
            Way::IpForward => "IP forwarding",
            Way::Tcx => "spliced by tcx",
            Way::Xdp => "spliced by XDP",
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.title())
    }
}

/// So many flows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FloodCase {
    /// Hit at random.
    pub flows: u32,
    /// All rounds, disturbed ones too.
    pub rounds: Vec<FloodRound>,
}

/// Every way once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FloodRound {
    /// In the order of measurement.
    pub runs: Vec<FloodRun>,
}

/// One flood.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FloodRun {
    /// Through what.
    pub way: Way,
    /// Packets that were made.
    pub sent: u64,
    /// Packets that arrived.
    pub arrived: u64,
    /// How long it was.
    pub seconds: f64,
    /// CPU time of the flood.
    pub cpu: f64,
    /// Nanoseconds of CPU time for each packet that arrived.
    pub nanos: f64,
    /// Why it should not count, if so.
    pub disturbed: Option<String>,
}

impl FloodRound {
    fn nanos(&self, way: Way) -> Option<f64> {
        self.runs.iter().find(|r| r.way == way).map(|r| r.nanos)
    }

    fn disturbed(&self) -> bool {
        self.runs.iter().any(|r| r.disturbed.is_some())
    }
}

/// All cases, their rounds interleaved.
pub fn measure(bench: &Bench, flows: &[u32]) -> Result<Vec<FloodCase>> {
    on_one_cpu(|| flows.iter().map(|flows| case(bench, *flows)).collect())
}

fn case(bench: &Bench, flows: u32) -> Result<FloodCase> {
    let mut venues = Vec::new();
    for way in Way::ALL {
        bench.check()?;
        venues.push(Venue::set(way, flows).map_err(|e| format!("{way}: {e}"))?);
    }
    let mut rounds = Vec::new();
    for round in 0..bench.rounds {
        let mut runs = Vec::new();
        for n in 0..venues.len() {
            bench.check()?;
            let venue = (n + round) % venues.len();
            runs.push(venues[venue].run(bench.seconds)?);
        }
        let mut words: Vec<&FloodRun> = runs.iter().collect();
        words.sort_by_key(|r| r.way);
        let words: Vec<String> = words.iter().map(|r| format!("{} {:.0}", r.way, r.nanos)).collect();
        bench.say(&format!("flood, {flows} flows: {} ns", words.join(", ")));
        rounds.push(FloodRound { runs });
    }
    Ok(FloodCase { flows, rounds })
}

/// A lab with one way in its middle. Fields are dropped in order.
struct Venue {
    way: Way,
    flood: Flood,
    datapath: Option<Datapath>,
    _pins: Pins,
    _lab: Lab,
}

impl Venue {
    fn set(way: Way, flows: u32) -> Result<Venue> {
        let lab = venue::lab(venue::Packets::Large, way == Way::IpForward)?;
        let pins = Pins::of(&lab)?;
        let v4 = |address| match address {
            SocketAddr::V4(v4) => v4,
            SocketAddr::V6(v6) => unreachable!("{v6}: the venue has IPv4 addresses"),
        };
        let (server, proxy) = (v4(venue::server()), v4(venue::proxy()));
        let (target, datapath) = match way {
            Way::IpForward => (server, None),
            Way::Tcx => (proxy, Some(splice(&lab, flows, &[])?)),
            Way::Xdp => {
                // what makes a veth take frames that XDP sends to its peer, as a network card does
                lab.server.execute("ethtool", &["-K", "s0", "gro", "on"])?;
                (proxy, Some(splice(&lab, flows, &[lab.client_device()])?))
            }
        };
        let flood = Flood::new(&lab, Aim { flows, target, arrives_at: server.port() })?;
        Ok(Venue { way, flood, datapath, _pins: pins, _lab: lab })
    }

    fn run(&mut self, seconds: f64) -> Result<FloodRun> {
        let first = self.flood.run(WARM_UP)?;
        if first.arrived == 0 {
            return Err(format!("{}: nothing arrives; {}", self.way, self.verdicts()).into());
        }
        let watch = Watch::start();
        let run = self.flood.run(Duration::from_secs_f64(seconds))?;
        let cost = watch.stop();
        if self.flood.wrong()? > 0 {
            return Err(format!("{}: packets arrive with wrong checksums", self.way).into());
        }
        let lost = 1.0 - run.arrived as f64 / run.sent.max(1) as f64;
        let loss = (lost > LOSS).then(|| format!("{:.1} % of the packets were lost", lost * 100.0));
        Ok(FloodRun {
            way: self.way,
            sent: run.sent,
            arrived: run.arrived,
            seconds: run.elapsed.as_secs_f64(),
            cpu: run.cpu.as_secs_f64(),
            nanos: run.cpu.as_nanos() as f64 / run.arrived.max(1) as f64,
            disturbed: loss.or(cost.disturbed),
        })
    }

    /// What the data path has to say.
    fn verdicts(&self) -> String {
        let all = self.datapath.as_ref().and_then(|d| d.verdicts().ok()).unwrap_or_default();
        let some: Vec<String> = all.iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{name} {n}")).collect();
        some.join(", ")
    }
}

/// Attaches the data path and installs the flows.
fn splice(lab: &Lab, flows: u32, xdp: &[&str]) -> Result<Datapath> {
    let hop = |device: &str, host: &longsplice_lab::Namespace, its: &str| -> Result<NextHop> {
        let (own, neighbour) = (lab.forwarder.link(device)?, host.link(its)?);
        Ok(NextHop { device: own.index, to: neighbour.mac, from: own.mac })
    };
    let (to_client, to_server) =
        (hop(lab.client_device(), &lab.client, "c0")?, hop(lab.server_device(), &lab.server, "s0")?);
    let xdp = xdp.iter().map(|device| device.to_string()).collect();
    let options = Options { max_flows: flows, xdp, ..Options::default() };
    let datapath = lab.forwarder.run(|| Datapath::open(&options))?;
    let all: Vec<[IdleLeg; 2]> = (0..flows)
        .map(|n| {
            let (remote, local) = (Flood::source(n).into(), Flood::other_side(n).into());
            let client = Tuple { remote, local: venue::proxy() };
            let server = Tuple { remote: venue::server(), local };
            let (end, ack) = (flood::FIRST_SEQ, flood::ACK);
            [
                IdleLeg { leg: client, hop: to_client, end, ack, scale: SCALE },
                IdleLeg { leg: server, hop: to_server, end: ack + AHEAD, ack: end + AHEAD, scale: SCALE },
            ]
        })
        .collect();
    lab.forwarder.run(|| datapath.install(&all))?;
    Ok(datapath)
}

/// The table, as Markdown.
pub fn table(cases: &[FloodCase]) -> String {
    if cases.is_empty() {
        return String::new();
    }
    let mut text =
        "Nanoseconds of one CPU per small packet, generator and sink included, and the ratio to IP forwarding \
                    (median, and spread):\n\n| flows |"
            .to_owned();
    let head = |text: &mut String, cell: &dyn Fn(Way) -> String| {
        Way::ALL.iter().for_each(|way| {
            let _ = write!(text, " {} |", cell(*way));
        });
        text.push('\n');
    };
    head(&mut text, &|way| way.title().to_owned());
    text += "| ---: |";
    head(&mut text, &|_| "---:".to_owned());
    for case in cases {
        let quiet: Vec<&FloodRound> = case.rounds.iter().filter(|r| !r.disturbed()).collect();
        let rounds = if quiet.is_empty() { case.rounds.iter().collect() } else { quiet };
        let _ = write!(text, "| {} |", case.flows);
        head(&mut text, &|way| cell(&rounds, way));
    }
    text.push('\n');
    for case in cases {
        match case.rounds.iter().filter(|r| r.disturbed()).count() {
            0 => {}
            n if n == case.rounds.len() => {
                let _ = writeln!(text, "{} flows: all rounds were disturbed, and counted nevertheless.", case.flows);
            }
            n => {
                let _ = writeln!(text, "{} flows: {n} rounds were disturbed and do not count.", case.flows);
            }
        }
    }
    text.push('\n');
    text
}

fn cell(rounds: &[&FloodRound], way: Way) -> String {
    let nanos = Spread::of(rounds.iter().filter_map(|r| r.nanos(way)));
    let ratio = Spread::of(rounds.iter().filter_map(|r| Some(r.nanos(way)? / r.nanos(Way::ALL[0])?)));
    match (nanos, ratio) {
        (Some(nanos), _) if way == Way::ALL[0] => format!("{:.0}", nanos.median),
        (Some(nanos), Some(ratio)) => format!("{:.0}: {}", nanos.median, ratio.text(2)),
        _ => String::new(),
    }
}
