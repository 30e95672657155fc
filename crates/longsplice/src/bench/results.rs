//! What was measured, as JSON keeps it, and what it comes to. Every single run is kept: medians can be taken again.

use super::{
    machine::Machine,
    stats::Spread,
    venue::{Packets, Variant},
};
use serde::{Deserialize, Serialize};

/// Version of the JSON's shape.
pub const FORMAT: u32 = 1;

/// One run of `longsplice bench`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`FORMAT`].
    pub format: u32,
    /// Day in UTC.
    pub date: String,
    /// Where and with what.
    pub machine: Machine,
    /// How.
    pub setup: Setup,
    /// What is missing, and why.
    pub skipped: Vec<String>,
    /// What it comes to.
    pub summary: Summary,
    /// Bulk transfers.
    pub bulk: Vec<BulkCase>,
    /// Round trips.
    pub rtt: Vec<RttRound>,
    /// Switches.
    pub switch: Vec<SwitchCase>,
    /// Memory.
    pub memory: Option<Memory>,
    /// From where on splicing pays.
    pub threshold: Option<Threshold>,
    /// A million connections.
    #[serde(default)]
    pub million: Option<super::million::Million>,
}

/// How it was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Setup {
    /// Rounds asked for.
    pub rounds: usize,
    /// Seconds of one transfer.
    pub seconds: f64,
    /// The network.
    pub network: String,
    /// What each variant runs.
    pub variants: Vec<String>,
    /// longsplice's configuration.
    pub longsplice: String,
    /// HAProxy's configuration.
    pub haproxy: String,
    /// When a round does not count.
    pub disturbed: String,
}

/// One kind of bulk transfer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BulkCase {
    /// Large or MTU-sized.
    pub packets: Packets,
    /// At the same time.
    pub connections: usize,
    /// All rounds, disturbed ones too.
    pub rounds: Vec<BulkRound>,
}

/// Every variant once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BulkRound {
    /// In the order of measurement.
    pub runs: Vec<BulkRun>,
}

/// One transfer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BulkRun {
    /// Through what.
    pub variant: Variant,
    /// How much arrived.
    pub bytes: u64,
    /// In what time.
    pub seconds: f64,
    /// Gbit/s.
    pub gbit: f64,
    /// CPU seconds of the whole machine, end hosts included, per 10^9 bytes.
    pub cpu_per_gb: f64,
    /// Why it should not count, if so.
    pub disturbed: Option<String>,
}

/// Every variant once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RttRound {
    /// By variant.
    pub runs: Vec<RttRun>,
}

/// Round trips through one variant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RttRun {
    /// Through what.
    pub variant: Variant,
    /// How many.
    pub count: u64,
    /// Microseconds each.
    pub micros: f64,
    /// Share of the CPU's time that was busy.
    pub busy: f64,
    /// Why it should not count, if so.
    pub disturbed: Option<String>,
}

/// Splices and unsplices of one kind of connection. Microseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwitchCase {
    /// Whether data flow meanwhile.
    pub busy: bool,
    /// How many splices, and as many unsplices.
    pub cycles: usize,
    /// The call that sets the boundaries.
    pub freeze: Spread,
    /// From there until both directions are forwarded: reading, writing, waiting for acknowledgements.
    pub drain: Spread,
    /// The call that makes forwarding final.
    pub commit: Spread,
    /// The call that takes the flow back.
    pub unsplice: Spread,
    /// Why it should not count, if so.
    pub disturbed: Option<String>,
}

/// Memory per connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// How many connections were held.
    pub connections: usize,
    /// Tables of the data path.
    pub tables: Vec<Table>,
    /// Kernel bytes of a released IPv4 flow: its two path entries.
    pub released_flow: f64,
    /// Kernel bytes of a parked one without its sockets: two leg records more.
    pub parked_flow: f64,
    /// Processes.
    pub processes: Vec<Process>,
}

/// A preallocated table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// Name.
    pub name: String,
    /// Entries it has room for.
    pub entries: u64,
    /// Bytes, as the kernel accounts for it.
    pub bytes: u64,
    /// Bytes of one entry.
    pub per_entry: f64,
}

/// What a proxy holds for its connections.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Process {
    /// Which proxy.
    pub variant: Variant,
    /// Resident bytes before.
    pub before: u64,
    /// Resident bytes with all connections open and idle.
    pub after: u64,
    /// Of each connection.
    pub per_connection: f64,
}

/// Short transfers, spliced at once and copied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Threshold {
    /// By size.
    pub sizes: Vec<Size>,
    /// Splicing takes less time from here on; none: at no size measured.
    pub by_time: Option<f64>,
    /// The same for CPU time.
    pub by_cpu: Option<f64>,
    /// The larger of the two, up to the next power of two.
    pub recommended: Option<u64>,
}

/// Transfers of one size. Microseconds per connection, from connecting to the end of the stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Size {
    /// Bytes from server to client.
    pub bytes: u64,
    /// Time, copied.
    pub copied: Spread,
    /// Time, spliced at once.
    pub spliced: Spread,
    /// CPU time, copied; of all rounds together, since ticks are coarse.
    pub copied_cpu: f64,
    /// CPU time, spliced at once.
    pub spliced_cpu: f64,
    /// Rounds that were disturbed; they count only if all were.
    pub disturbed: usize,
}

/// Medians.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Of bulk transfers.
    pub bulk: Vec<BulkSummary>,
    /// Of round trips.
    pub rtt: Vec<RttSummary>,
    /// Rounds that were left out as disturbed, out of how many.
    pub disturbed: [usize; 2],
    /// Cases of which all rounds were disturbed: they were all counted nevertheless.
    pub all_disturbed: Vec<String>,
}

/// One variant of one case; ratios are to IP forwarding in the same round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BulkSummary {
    /// Large or MTU-sized.
    pub packets: Packets,
    /// At the same time.
    pub connections: usize,
    /// Through what.
    pub variant: Variant,
    /// Gbit/s.
    pub gbit: Spread,
    /// Of throughput.
    pub ratio: Spread,
    /// CPU seconds per 10^9 bytes.
    pub cpu_per_gb: Spread,
    /// Of CPU time per byte.
    pub cpu_ratio: Spread,
}

/// One variant; ratios are to IP forwarding in the same round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RttSummary {
    /// Through what.
    pub variant: Variant,
    /// Microseconds.
    pub micros: Spread,
    /// Of time per round trip.
    pub cost_ratio: Spread,
}

/// Rounds of one case, without those that were disturbed unless all were.
struct Counted<'a, R> {
    rounds: Vec<&'a R>,
    disturbed: usize,
}

impl<'a, R> Counted<'a, R> {
    fn new(rounds: &'a [R], disturbed: impl Fn(&R) -> bool) -> Counted<'a, R> {
        let quiet: Vec<&R> = rounds.iter().filter(|r| !disturbed(r)).collect();
        let disturbed = rounds.len() - quiet.len();
        Counted { rounds: if quiet.is_empty() { rounds.iter().collect() } else { quiet }, disturbed }
    }
}

impl Summary {
    /// Medians over the rounds that count.
    pub fn of(bulk: &[BulkCase], rtt: &[RttRound]) -> Summary {
        let mut summary = Summary::default();
        for case in bulk {
            let counted = Counted::new(&case.rounds, |r| r.runs.iter().any(|r| r.disturbed.is_some()));
            let name = format!("bulk, {:?} packets, {} connections", case.packets, case.connections);
            summary.note(&name, counted.disturbed, case.rounds.len());
            summary.bulk.extend(Variant::ALL.iter().filter_map(|v| bulk_summary(case, &counted.rounds, *v)));
        }
        let counted = Counted::new(rtt, |r| r.runs.iter().any(|r| r.disturbed.is_some()));
        summary.note("round trips", counted.disturbed, rtt.len());
        summary.rtt.extend(Variant::ALL.iter().filter_map(|v| rtt_summary(&counted.rounds, *v)));
        summary
    }

    fn note(&mut self, name: &str, disturbed: usize, all: usize) {
        self.disturbed[1] += all;
        if disturbed == all && all > 0 {
            self.all_disturbed.push(name.to_lowercase());
        } else {
            self.disturbed[0] += disturbed;
        }
    }

    /// This case, by variant.
    pub fn bulk_of(&self, packets: Packets, connections: usize, variant: Variant) -> Option<&BulkSummary> {
        self.bulk.iter().find(|b| (b.packets, b.connections, b.variant) == (packets, connections, variant))
    }

    /// This variant.
    pub fn rtt_of(&self, variant: Variant) -> Option<&RttSummary> {
        self.rtt.iter().find(|r| r.variant == variant)
    }
}

fn bulk_summary(case: &BulkCase, rounds: &[&BulkRound], variant: Variant) -> Option<BulkSummary> {
    let runs = || rounds.iter().filter_map(|r| Some((r.of(variant)?, r.of(Variant::IpForward)?)));
    Some(BulkSummary {
        packets: case.packets,
        connections: case.connections,
        variant,
        gbit: Spread::of(runs().map(|(run, _)| run.gbit))?,
        ratio: Spread::of(runs().map(|(run, base)| run.gbit / base.gbit))?,
        cpu_per_gb: Spread::of(runs().map(|(run, _)| run.cpu_per_gb))?,
        cpu_ratio: Spread::of(runs().map(|(run, base)| run.cpu_per_gb / base.cpu_per_gb))?,
    })
}

fn rtt_summary(rounds: &[&RttRound], variant: Variant) -> Option<RttSummary> {
    let of = |round: &RttRound, v| round.runs.iter().find(|r| r.variant == v).map(|r| r.micros);
    let runs = || rounds.iter().filter_map(|r| Some((of(r, variant)?, of(r, Variant::IpForward)?)));
    Some(RttSummary {
        variant,
        micros: Spread::of(runs().map(|(run, _)| run))?,
        cost_ratio: Spread::of(runs().map(|(run, base)| run / base))?,
    })
}

impl BulkRound {
    /// The run of this variant.
    pub fn of(&self, variant: Variant) -> Option<&BulkRun> {
        self.runs.iter().find(|r| r.variant == variant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(variant: Variant, gbit: f64, disturbed: bool) -> BulkRun {
        let disturbed = disturbed.then(|| "noise".to_owned());
        BulkRun { variant, bytes: 1, seconds: 1.0, gbit, cpu_per_gb: 2.0 / gbit, disturbed }
    }

    fn round(base: f64, spliced: f64, disturbed: bool) -> BulkRound {
        BulkRound { runs: vec![run(Variant::Spliced, spliced, false), run(Variant::IpForward, base, disturbed)] }
    }

    fn summary(rounds: Vec<BulkRound>) -> Summary {
        Summary::of(&[BulkCase { packets: Packets::Large, connections: 1, rounds }], &[])
    }

    #[test]
    fn ratios_are_taken_within_rounds_and_disturbed_rounds_left_out() {
        let s = summary(vec![round(10.0, 9.0, false), round(20.0, 16.0, false), round(1.0, 16.0, true)]);
        let spliced = s.bulk_of(Packets::Large, 1, Variant::Spliced).unwrap();
        assert_eq!((spliced.ratio.median, spliced.ratio.n), ((0.9 + 0.8) / 2.0, 2));
        assert_eq!(s.bulk_of(Packets::Large, 1, Variant::IpForward).unwrap().ratio.median, 1.0);
        assert!(s.bulk_of(Packets::Large, 1, Variant::Haproxy).is_none(), "it was not measured");
        assert_eq!((s.disturbed, s.all_disturbed.len()), ([1, 3], 0));
    }

    #[test]
    fn if_all_rounds_are_disturbed_all_count_and_it_is_said() {
        let s = summary(vec![round(10.0, 9.0, true)]);
        assert_eq!(s.bulk_of(Packets::Large, 1, Variant::Spliced).unwrap().ratio.median, 0.9);
        assert_eq!(s.all_disturbed, ["bulk, large packets, 1 connections"]);
    }

    #[test]
    fn round_trips_compare_costs() {
        let run = |variant, micros| RttRun { variant, count: 1, micros, busy: 1.0, disturbed: None };
        let rounds = [RttRound { runs: vec![run(Variant::IpForward, 10.0), run(Variant::Haproxy, 25.0)] }];
        assert_eq!(Summary::of(&[], &rounds).rtt_of(Variant::Haproxy).unwrap().cost_ratio.median, 2.5);
    }
}
