//! Measurements and results. Medians and spreads are kept as [`Results`]; the single runs ([`Case`]) are written beside
//! them, for anyone who wants to compute medians again.

use super::{
    machine::Machine,
    network::Packets,
    stats::Spread,
    subject::{Kind, Subject},
    variant::Variant,
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Version of the JSON format.
pub const FORMAT: u32 = 4;
/// Minimum average packet in bytes where packets should be coalesced: two full ones.
const COALESCED: f64 = 2.0 * 1514.0;

/// One run of `longsplice-bench`, as kept in JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`FORMAT`].
    pub format: u32,
    /// Day in UTC.
    pub date: String,
    /// Where and with what the results were measured.
    pub machine: Machine,
    /// How the results were measured.
    pub setup: Setup,
    /// Missing measurements, and why.
    pub skipped: Vec<String>,
    /// Medians and ratios.
    pub summary: Summary,
    /// Times of switches.
    pub switch: Vec<SwitchCase>,
    /// Memory per connection.
    pub memory: Option<Memory>,
    /// The size from which splicing pays.
    pub threshold: Option<Threshold>,
    /// The same for HTTP bodies.
    #[serde(default)]
    pub bodies: Option<Threshold>,
}

/// How the results were measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Setup {
    /// Requested number of rounds.
    pub rounds: usize,
    /// Length of one transfer in seconds.
    pub seconds: f64,
    /// Description of the network.
    pub network: String,
    /// Description of each variant.
    pub variants: Vec<String>,
    /// Names and texts of the configurations.
    pub configurations: Vec<(String, String)>,
    /// The rule by which a round does not count.
    pub disturbed: String,
}

/// All rounds of one subject.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// The subject.
    pub subject: Subject,
    /// All rounds, including disturbed ones.
    pub rounds: Vec<Round>,
}

/// One run of every variant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// The runs in the order of measurement.
    pub runs: Vec<Run>,
}

/// One run of one variant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The variant.
    pub variant: Variant,
    /// Number of bytes, segments, connections or requests.
    pub amount: f64,
    /// Duration in seconds.
    pub seconds: f64,
    /// The value in the subject's unit.
    pub value: f64,
    /// CPU time of the whole machine, end hosts included: seconds per 10^9 bytes, or microseconds per segment, connection or
    /// request.
    pub cpu: f64,
    /// Measured ratio of segments with data to those without, where it matters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_ack: Option<f64>,
    /// Average size in bytes of a packet from the server as handled by the forwarder, where it matters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packet: Option<f64>,
    /// Milliseconds from the request to the last byte, where it matters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<f64>,
    /// Share of longsplice's connections or replies that were spliced, where it matters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spliced: Option<f64>,
    /// Why the run should not count, if so.
    pub disturbed: Option<String>,
}

/// The state of a connection that is switched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Connection {
    /// No data flows; an unsplice returns to the parked sockets.
    Idle,
    /// The server sends at full speed.
    Busy,
    /// No data flows; the sockets are closed and recreated.
    Released,
}

impl Connection {
    /// Title in tables.
    pub fn title(self) -> &'static str {
        match self {
            Connection::Idle => "idle",
            Connection::Busy => "busy",
            Connection::Released => "idle, released",
        }
    }
}

/// Times of splices and of the ways back, in microseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwitchCase {
    /// The state of the connection.
    pub connection: Connection,
    /// Number of splices, and of ways back.
    pub cycles: usize,
    /// The call that sets the bounds.
    pub freeze: Spread,
    /// Time from there until both directions are forwarded: reading, writing, and waiting for acknowledgements.
    pub drain: Spread,
    /// The call that completes the splice.
    pub commit: Spread,
    /// The call that returns the flow to its sockets.
    pub unsplice: Option<Spread>,
    /// Closing both sockets silently, and removing the records.
    pub release: Option<Spread>,
    /// The call that recreates sockets and records.
    pub recreate: Option<Spread>,
    /// Why the times should not count, if so.
    pub disturbed: Option<String>,
}

impl SwitchCase {
    /// Microseconds of each switch of an idle connection: on a busy one the hosts determine the time of the drain.
    pub fn costs(&self) -> Vec<(String, f64)> {
        let splice = self.freeze.median + self.drain.median + self.commit.median;
        let of = |spread: &Option<Spread>| spread.map_or(0.0, |s| s.median);
        let named = |name: &str, micros| (name.to_owned(), micros);
        match self.connection {
            Connection::Idle => {
                vec![named("splice", splice), named("splice and unsplice", splice + of(&self.unsplice))]
            }
            Connection::Busy => Vec::new(),
            Connection::Released => vec![
                named("splice and release", splice + of(&self.release)),
                named("splice, release and recreate", splice + of(&self.release) + of(&self.recreate)),
            ],
        }
    }
}

/// Memory per connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// Tables of the data path.
    pub tables: Vec<Table>,
    /// Kernel bytes of a released IPv4 flow: two path entries.
    pub released_flow: f64,
    /// Kernel bytes of a parked flow without its sockets: two leg records in addition.
    pub parked_flow: f64,
    /// Memory held by connections.
    pub held: Vec<HeldMemory>,
}

/// A preallocated table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// Map name.
    pub name: String,
    /// Capacity in entries.
    pub entries: u64,
    /// Bytes, as accounted for by the kernel.
    pub bytes: u64,
    /// Bytes per entry.
    pub per_entry: f64,
}

/// Memory of idle connections of one variant, in bytes per connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeldMemory {
    /// The variant.
    pub variant: Variant,
    /// Whether longsplice has closed the sockets.
    pub released: bool,
    /// Number of connections.
    pub connections: usize,
    /// Memory in all processes of the proxy, with shared pages divided; `None` if there is no process.
    pub resident: Option<f64>,
    /// Kernel memory for sockets and related objects, end hosts included.
    pub kernel: f64,
    /// The same minus the end hosts' part, which is measured with a routing forwarder.
    pub forwarder: Option<f64>,
    /// Kernel memory for the forwarder's queues while the server sends and the client does not read. It is not part of `kernel`.
    #[serde(default)]
    pub queued: Option<f64>,
    /// Why the figures should not count, if so.
    pub disturbed: Option<String>,
}

/// Threshold derived from short transfers, spliced at once and copied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Threshold {
    /// The size from which splicing takes less time.
    pub by_time: Crossing,
    /// The size from which splicing takes less CPU time.
    pub by_cpu: Crossing,
    /// The size from which splicing takes significantly less of both,
    /// if the rounds leave little doubt below it; otherwise `None`.
    pub recommended: Option<u64>,
}

/// The size from which splicing costs less: between `costs` and `pays`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Crossing {
    /// The largest size at which splicing costs significantly more; `None` if there is no such size among those measured.
    pub costs: Option<u64>,
    /// The smallest size from which splicing costs significantly less at all sizes; `None` if not even at the largest.
    pub pays: Option<u64>,
}

impl fmt::Display for Crossing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.costs, self.pays) {
            (Some(costs), Some(pays)) => write!(f, "from somewhere between {costs} and {pays} bytes on"),
            (None, Some(pays)) => write!(f, "from {pays} bytes on at the latest"),
            (_, None) => f.write_str("from no size on that was measured, as far as these rounds can tell"),
        }
    }
}

/// Medians of all subjects.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Lines by subject and variant.
    pub lines: Vec<Line>,
    /// Number of disturbed rounds left out, and of all rounds.
    pub disturbed: [usize; 2],
    /// Subjects with disturbed rounds only, all of which were counted nevertheless.
    pub all_disturbed: Vec<Subject>,
    /// Measurements that do not count.
    pub refused: Vec<Refused>,
}

/// The medians of one variant of one subject; ratios are to [`Subject::base`] in the same round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// The subject.
    pub subject: Subject,
    /// The variant.
    pub variant: Variant,
    /// [`Run::value`].
    pub value: Spread,
    /// Ratio of values.
    pub ratio: Spread,
    /// [`Run::cpu`].
    pub cpu: Spread,
    /// Ratio of CPU time; `None` where it is too little to be measured in ticks.
    pub cpu_ratio: Option<Spread>,
    /// [`Run::per_ack`].
    pub per_ack: Option<Spread>,
    /// [`Run::packet`].
    pub packet: Option<Spread>,
    /// [`Run::request`].
    pub request: Option<Spread>,
    /// Ratio of [`Run::request`].
    pub request_ratio: Option<Spread>,
    /// [`Run::spliced`].
    pub spliced: Option<Spread>,
    /// The value less that of [`Variant::Direct`], where that was measured: what the forwarder alone costs.
    pub alone: Option<Spread>,
    /// Ratio of that to the same for [`Variant::Copy`].
    pub alone_ratio: Option<Spread>,
}

/// A variant of a subject that did not meet the subject's conditions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Refused {
    /// The subject.
    pub subject: Subject,
    /// The variant.
    pub variant: Variant,
    /// Why it has no line.
    pub why: String,
}

impl Round {
    /// The run of this variant.
    pub fn of(&self, variant: Variant) -> Option<&Run> {
        self.runs.iter().find(|r| r.variant == variant)
    }

    /// Whether the round was not disturbed.
    pub fn is_quiet(&self) -> bool {
        self.runs.iter().all(|r| r.disturbed.is_none())
    }
}

impl Case {
    /// The rounds that were not disturbed, or all if there are none.
    pub fn counted(&self) -> Vec<&Round> {
        let quiet: Vec<&Round> = self.rounds.iter().filter(|r| r.is_quiet()).collect();
        if quiet.is_empty() { self.rounds.iter().collect() } else { quiet }
    }

    fn line(&self, variant: Variant) -> Option<Line> {
        let rounds = self.counted();
        let base = self.subject.base();
        let runs = || rounds.iter().filter_map(|r| Some((r.of(variant)?, r.of(base)?)));
        let alone = |round: &Round, v| Some(round.of(v)?.value - round.of(Variant::Direct)?.value);
        let copying = |round: &Round| alone(round, Variant::Copy).filter(|micros| *micros > 0.0);
        Some(Line {
            subject: self.subject,
            variant,
            value: Spread::of(runs().map(|(run, _)| run.value))?,
            ratio: Spread::of(runs().map(|(run, base)| run.value / base.value))?,
            cpu: Spread::of(runs().map(|(run, _)| run.cpu))?,
            cpu_ratio: Spread::of(runs().map(|(run, base)| run.cpu / base.cpu)),
            per_ack: Spread::of(runs().filter_map(|(run, _)| run.per_ack)),
            packet: Spread::of(runs().filter_map(|(run, _)| run.packet)),
            request: Spread::of(runs().filter_map(|(run, _)| run.request)),
            request_ratio: Spread::of(runs().filter_map(|(run, base)| Some(run.request? / base.request?))),
            spliced: Spread::of(runs().filter_map(|(run, _)| run.spliced)),
            alone: Spread::of(rounds.iter().filter_map(|r| alone(r, variant))),
            alone_ratio: Spread::of(rounds.iter().filter_map(|r| Some(alone(r, variant)? / copying(r)?))),
        })
    }

    /// Why a variant did not meet the subject's conditions; `None` if it did.
    fn refused(&self, variant: Variant) -> Option<Refused> {
        let Subject::Bulk { packets: Packets::Coalesced, .. } = self.subject else { return None };
        let sizes = self.counted().into_iter().filter_map(|r| r.of(variant)).map(|run| run.packet.unwrap_or_default());
        let size = Spread::of(sizes)?.median;
        let why = format!("not coalesced: packets of {size:.0} bytes on average");
        (size < COALESCED).then_some(Refused { subject: self.subject, variant, why })
    }
}

impl Summary {
    /// Computes medians over the rounds that count.
    pub fn of(cases: &[Case]) -> Summary {
        let mut summary = Summary::default();
        for case in cases {
            let disturbed = case.rounds.iter().filter(|r| !r.is_quiet()).count();
            summary.disturbed[1] += case.rounds.len();
            if disturbed == case.rounds.len() {
                summary.all_disturbed.push(case.subject);
            } else {
                summary.disturbed[0] += disturbed;
            }
            let refused: Vec<Refused> = Variant::ALL.iter().filter_map(|v| case.refused(*v)).collect();
            let counts = |v: Variant| refused.iter().all(|r| r.variant != v);
            if counts(case.subject.base()) {
                summary.lines.extend(Variant::ALL.iter().filter(|v| counts(**v)).filter_map(|v| case.line(*v)));
            }
            summary.refused.extend(refused);
        }
        summary
    }

    /// The line of a subject and variant.
    pub fn line(&self, subject: Subject, variant: Variant) -> Option<&Line> {
        self.lines.iter().find(|l| (l.subject, l.variant) == (subject, variant))
    }

    /// Subjects of a kind, in the order of measurement.
    pub fn subjects(&self, kind: Kind) -> Vec<Subject> {
        let mut all: Vec<Subject> = self.lines.iter().map(|l| l.subject).filter(|s| s.kind() == kind).collect();
        all.dedup();
        all
    }

    /// Variants that were measured for a kind, in the order of tables.
    pub fn variants(&self, kind: Kind) -> Vec<Variant> {
        let has = |v: &Variant| self.lines.iter().any(|l| l.subject.kind() == kind && l.variant == *v);
        Variant::ALL.into_iter().filter(has).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BULK: Subject = Subject::Bulk { packets: Packets::Large, connections: 1 };

    fn run(variant: Variant, value: f64, disturbed: bool) -> Run {
        let disturbed = disturbed.then(|| "noise".to_owned());
        Run {
            variant,
            amount: 1.0,
            seconds: 1.0,
            value,
            cpu: 2.0 / value,
            per_ack: None,
            packet: None,
            request: None,
            spliced: None,
            disturbed,
        }
    }

    fn round(base: f64, spliced: f64, disturbed: bool) -> Round {
        Round { runs: vec![run(Variant::Spliced, spliced, false), run(Variant::IpForward, base, disturbed)] }
    }

    fn summary(rounds: Vec<Round>) -> Summary {
        Summary::of(&[Case { subject: BULK, rounds }])
    }

    #[test]
    fn ratios_are_taken_within_rounds_and_disturbed_rounds_left_out() {
        let s = summary(vec![round(10.0, 9.0, false), round(20.0, 16.0, false), round(1.0, 16.0, true)]);
        let spliced = s.line(BULK, Variant::Spliced).unwrap();
        assert_eq!((spliced.ratio.median, spliced.ratio.n), ((0.9 + 0.8) / 2.0, 2));
        assert_eq!(spliced.cpu_ratio.unwrap().n, 2);
        assert_eq!(s.line(BULK, Variant::IpForward).unwrap().ratio.median, 1.0);
        assert_eq!(s.variants(Kind::Bulk), [Variant::IpForward, Variant::Spliced], "the rest was not measured");
        assert_eq!((s.disturbed, s.all_disturbed.len()), ([1, 3], 0));
    }

    #[test]
    fn if_all_rounds_are_disturbed_all_count_and_it_is_said() {
        let s = summary(vec![round(10.0, 9.0, true)]);
        assert_eq!(s.line(BULK, Variant::Spliced).unwrap().ratio.median, 0.9);
        assert_eq!(s.all_disturbed, [BULK]);
    }

    #[test]
    fn what_was_not_coalesced_is_refused_and_nothing_is_compared_with_it() {
        let subject = Subject::Bulk { packets: Packets::Coalesced, connections: 1 };
        let of = |base, spliced| {
            let mut round = round(10.0, 9.0, false);
            (round.runs[0].packet, round.runs[1].packet) = (spliced, base);
            Summary::of(&[Case { subject, rounds: vec![round] }])
        };
        let s = of(Some(6000.0), Some(1514.0));
        assert_eq!((s.lines.len(), s.refused.len(), s.refused[0].variant), (1, 1, Variant::Spliced));
        assert_eq!(s.refused[0].why, "not coalesced: packets of 1514 bytes on average");
        assert_eq!(of(Some(6000.0), None).lines.len(), 1, "nobody counted");
        assert!(of(Some(1514.0), Some(6000.0)).lines.is_empty());
        assert_eq!(of(Some(6000.0), Some(6000.0)).lines.len(), 2);
    }

    #[test]
    fn what_has_no_base_in_its_round_does_not_count() {
        let s = summary(vec![round(10.0, 9.0, false), Round { runs: vec![run(Variant::Spliced, 1.0, false)] }]);
        assert_eq!(s.line(BULK, Variant::Spliced).unwrap().value.n, 1);
    }
}
