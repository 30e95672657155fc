//! What is measured: figures, by subject and variant. Medians and spreads are kept as [`Results`]; the single runs ([`Case`])
//! are written beside them, for anyone who wants to compute medians again.

use super::{
    Result,
    machine::{Cost, Machine, today},
    network::Packets,
    report,
    stats::Spread,
    subject::{Kind, Subject},
    threshold::Threshold,
    variant::Variant,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// Version of the JSON format.
pub const FORMAT: u32 = 5;
/// Minimum average packet in bytes where packets should be coalesced: two full ones.
const COALESCED: f64 = 2.0 * 1514.0;

/// Parts that are measured at different times. Each has files of its own, with the same contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    Results,
    Million,
    Wan,
    Tpot,
    TpotCosts,
}

impl Part {
    pub const ALL: [Part; 5] = [Part::Results, Part::Million, Part::Wan, Part::Tpot, Part::TpotCosts];

    /// Name of its files, without the extension.
    pub fn file(self) -> &'static str {
        match self {
            Part::Results => "results",
            Part::Million => "million",
            Part::Wan => "wan",
            Part::Tpot => "tpot",
            Part::TpotCosts => "tpot-costs",
        }
    }

    /// Heading; the date follows.
    pub fn title(self) -> &'static str {
        match self {
            Part::Results => "Measured on",
            Part::Million => "Connections at the same time, measured on",
            Part::Wan => "Long and lossy paths, measured on",
            Part::Tpot => "Translucent proxies, measured on",
            Part::TpotCosts => "Costs of translucent proxies, measured on",
        }
    }
}

/// One run of `longsplice-bench`, as kept in JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`FORMAT`].
    pub format: u32,
    pub part: Part,
    /// Day in UTC.
    pub date: String,
    /// Where and with what the results were measured.
    pub machine: Machine,
    /// Requested number of rounds.
    pub rounds: usize,
    /// Length of one transfer in seconds.
    pub seconds: f64,
    /// Network, rules and variants, a sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub setup: Vec<String>,
    /// Names and texts of the configurations.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub configurations: Vec<(String, String)>,
    /// Missing measurements, and why.
    pub skipped: Vec<String>,
    /// Figures by subject and variant.
    pub lines: Vec<Line>,
    /// Number of disturbed rounds left out, and of all rounds.
    pub disturbed: [usize; 2],
    /// Subjects with disturbed rounds only, all of which were counted nevertheless.
    pub all_disturbed: Vec<Subject>,
    /// Sizes from which splicing pays.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub thresholds: Vec<(Kind, Threshold)>,
}

/// A figure. Counts ([`Figure::is_count`]) are those of one run, and tables show the worst round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Figure {
    /// Number of bytes, segments, connections, clients, requests or cycles.
    Amount,
    /// Duration in seconds.
    Seconds,
    /// The value in the subject's unit.
    Value,
    /// CPU time of the whole machine, end hosts included: seconds per 10^9 bytes, or microseconds per segment, connection or
    /// request.
    Cpu,
    /// Measured ratio of segments with data to those without.
    PerAck,
    /// Average size in bytes of a packet from the server as handled by the forwarder.
    Packet,
    /// Milliseconds from the request to the last byte.
    Request,
    /// Share of longsplice's connections or replies, or of the bytes of a path's transfer, that were spliced.
    Spliced,
    /// The value less that of [`Variant::Direct`] in the same round: what the forwarder alone costs.
    Alone,
    /// Ratio of that to the same for [`Variant::Copy`].
    AloneToCopy,
    /// Ratio of the value to that of copying in the same round, and to that of the slower of routing and copying.
    ToCopied,
    ToSlower,
    /// Segments that the sending host sent again, and its retransmission timeouts.
    Retransmitted,
    Timeouts,
    /// Segments that any host received again although it had acknowledged them.
    Needless,
    /// Packets that the lab dropped for want of room. Should be zero.
    Dropped,
    /// Packets that the forwarder dropped because they lay beyond its window (BeyondWindow); Linux counts them since 6.15.
    BeyondWindow,
    /// The call that sets the bounds of a splice, in microseconds, like those below.
    Freeze,
    /// Time from there until both directions are forwarded: reading, writing, and waiting for acknowledgements.
    Drain,
    /// The call that completes the splice.
    Commit,
    /// The call that returns the flow to its sockets; seconds of a transfer that is unspliced half-way.
    Unsplice,
    /// Closing both sockets silently, and removing the records.
    Release,
    /// The call that recreates sockets and records.
    Recreate,
    /// Bytes in all processes of the proxy, with shared pages divided, per connection; of a million, all together.
    Resident,
    /// Kernel memory for sockets without the end hosts' part, which is measured with a routing forwarder.
    Forwarder,
    /// Kernel memory for the forwarder's queues while the server sends and the client does not read. It is not part of the value.
    Queued,
    /// Bytes of tables, as accounted for by the kernel, and their capacity in entries.
    Tables,
    Entries,
    /// Largest sum of all sockets' memory at the forwarder in bytes, per client.
    Peak,
    /// Resident bytes of the process per connection.
    Process,
    /// Bytes of kernel objects of all kinds (slab) per connection: the sockets of both hosts.
    Slab,
    /// Randomly chosen connections that carried correct data both ways.
    Checked,
    /// Microseconds of a round trip on one CPU, over connections chosen from the first few, and from all.
    MicrosFew,
    MicrosAll,
}

impl Figure {
    fn is_count(self) -> bool {
        use Figure::{BeyondWindow, Dropped, Needless, Retransmitted, Timeouts};
        matches!(self, Retransmitted | Timeouts | Needless | Dropped | BeyondWindow)
    }
}

/// All rounds of one subject.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
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
    pub variant: Variant,
    pub figures: BTreeMap<Figure, f64>,
    /// What happened, in a few words: why a connection was not spliced, or what has disturbed a run that counts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Why the run should not count, if so.
    pub disturbed: Option<String>,
}

/// The medians of one variant of one subject.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    pub subject: Subject,
    pub variant: Variant,
    pub figures: BTreeMap<Figure, Spread>,
    /// Ratios to [`Subject::base`] in the same round, where it was measured. CPU time may be too little to be measured in ticks.
    pub ratios: BTreeMap<Figure, Spread>,
    /// [`Run::notes`], with the number of rounds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub notes: BTreeMap<String, usize>,
    /// Why the variant did not meet the subject's conditions, if so. Then there are no figures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

impl Run {
    /// A run with these figures.
    pub fn of(variant: Variant, figures: impl IntoIterator<Item = (Figure, f64)>) -> Run {
        Run { variant, figures: figures.into_iter().collect(), notes: Vec::new(), disturbed: None }
    }

    /// Creates a run from its cost.
    pub fn new(variant: Variant, cost: Cost, amount: f64, value: f64, cpu: f64) -> Run {
        let figures =
            [(Figure::Amount, amount), (Figure::Seconds, cost.seconds), (Figure::Value, value), (Figure::Cpu, cpu)];
        Run { disturbed: cost.disturbed, ..Run::of(variant, figures) }
    }

    /// A run on one CPU: microseconds for each of a number of things.
    pub fn each(variant: Variant, cost: Cost, amount: f64) -> Run {
        let micros = cost.seconds * 1e6 / amount;
        let cpu = micros * cost.first_busy;
        Run::new(variant, cost, amount, micros, cpu)
    }

    /// A run on all CPUs: a number of things per second.
    pub fn rate(variant: Variant, cost: Cost, amount: f64) -> Run {
        let (rate, cpu) = (amount / cost.seconds, cost.cpu * 1e6 / amount);
        Run::new(variant, cost, amount, rate, cpu)
    }

    /// The same with one more figure, if it is known.
    pub fn with(mut self, figure: Figure, value: Option<f64>) -> Run {
        self.figures.extend(value.map(|value| (figure, value)));
        self
    }

    pub fn get(&self, figure: Figure) -> Option<f64> {
        self.figures.get(&figure).copied()
    }

    pub fn value(&self) -> f64 {
        self.get(Figure::Value).unwrap_or(f64::NAN)
    }
}

impl Round {
    pub fn of(&self, variant: Variant) -> Option<&Run> {
        self.runs.iter().find(|r| r.variant == variant)
    }

    /// Whether the round was not disturbed.
    pub fn is_quiet(&self) -> bool {
        self.runs.iter().all(|r| r.disturbed.is_none())
    }

    /// The figures of a variant that depend on those of others in the same round.
    fn derived(&self, subject: Subject, run: &Run) -> Vec<(Figure, f64)> {
        let value = |v| self.of(v).map(Run::value);
        let found = match subject.kind() {
            Kind::Segment => {
                let alone = |v| Some(value(v)? - value(Variant::Direct)?);
                let copying = alone(Variant::Copy).filter(|micros| *micros > 0.0);
                let own = alone(run.variant);
                vec![(Figure::Alone, own), (Figure::AloneToCopy, own.zip(copying).map(|(own, copy)| own / copy))]
            }
            Kind::Datagrams => vec![(Figure::Alone, value(Variant::Direct).map(|direct| run.value() - direct))],
            Kind::Path => {
                let copied = value(Variant::Copy);
                let slower = value(Variant::IpForward).zip(copied).map(|(routed, copied)| routed.max(copied));
                let to = |other: Option<f64>| other.map(|other| run.value() / other);
                vec![(Figure::ToCopied, to(copied)), (Figure::ToSlower, to(slower))]
            }
            Kind::Memory if run.variant != Variant::IpForward => {
                let ends = value(Variant::IpForward);
                vec![(Figure::Forwarder, ends.map(|ends| (run.value() - ends).max(0.0)))]
            }
            _ => Vec::new(),
        };
        found.into_iter().filter_map(|(figure, value)| Some((figure, value?))).collect()
    }
}

impl Case {
    /// The rounds that were not disturbed, or all if there are none.
    pub fn counted(&self) -> Vec<&Round> {
        let quiet: Vec<&Round> = self.rounds.iter().filter(|r| r.is_quiet()).collect();
        if quiet.is_empty() { self.rounds.iter().collect() } else { quiet }
    }

    /// The medians of a variant, over the rounds that have what it is compared with.
    fn line(&self, variant: Variant) -> Option<Line> {
        let (mut rounds, base) = (self.counted(), self.subject.base());
        if rounds.iter().any(|r| r.of(base).is_some()) {
            rounds.retain(|r| r.of(base).is_some());
        }
        let (mut figures, mut ratios) = (BTreeMap::<_, Vec<f64>>::new(), BTreeMap::<_, Vec<f64>>::new());
        let mut notes = BTreeMap::new();
        for (round, run) in rounds.iter().filter_map(|r| Some((r, r.of(variant)?))) {
            for (figure, value) in run.figures.iter().map(|(f, v)| (*f, *v)).chain(round.derived(self.subject, run)) {
                figures.entry(figure).or_default().push(value);
                let base = round.of(base).and_then(|base| base.get(figure)).filter(|_| !figure.is_count());
                ratios.entry(figure).or_default().extend(base.map(|base| value / base));
            }
            run.notes.iter().for_each(|note| *notes.entry(note.clone()).or_default() += 1);
        }
        let spreads = |all: BTreeMap<Figure, Vec<f64>>| -> BTreeMap<Figure, Spread> {
            all.into_iter().filter_map(|(figure, values)| Some((figure, Spread::of(values)?))).collect()
        };
        let (figures, ratios) = (spreads(figures), spreads(ratios));
        (!figures.is_empty()).then_some(Line { subject: self.subject, variant, figures, ratios, notes, refused: None })
    }

    /// Why a variant did not meet the subject's conditions; `None` if it did.
    fn refused(&self, variant: Variant) -> Option<String> {
        let Subject::Bulk { packets: Packets::Coalesced, .. } = self.subject else { return None };
        let runs = self.counted().into_iter().filter_map(|r| r.of(variant));
        let size = Spread::of(runs.map(|run| run.get(Figure::Packet).unwrap_or_default()))?.median;
        (size < COALESCED).then(|| format!("not coalesced: packets of {size:.0} bytes on average"))
    }
}

impl Line {
    /// A line that is no summary of rounds.
    pub fn of(subject: Subject, variant: Variant, figures: impl IntoIterator<Item = (Figure, Option<Spread>)>) -> Line {
        let figures = figures.into_iter().filter_map(|(figure, spread)| Some((figure, spread?))).collect();
        Line { subject, variant, figures, ratios: BTreeMap::new(), notes: BTreeMap::new(), refused: None }
    }

    pub fn spread(&self, figure: Figure) -> Option<&Spread> {
        self.figures.get(&figure)
    }

    /// The median of a figure.
    pub fn get(&self, figure: Figure) -> Option<f64> {
        self.spread(figure).map(|s| s.median)
    }

    /// A count in the worst round.
    pub fn worst(&self, count: Figure) -> u64 {
        self.spread(count).map_or(0, |s| s.high as u64)
    }

    pub fn value(&self) -> f64 {
        self.get(Figure::Value).unwrap_or(f64::NAN)
    }

    pub fn ratio(&self, figure: Figure) -> Option<&Spread> {
        self.ratios.get(&figure)
    }
}

impl Results {
    /// Computes medians over the rounds that count.
    pub fn of(part: Part, cases: &[Case]) -> Results {
        let mut results = Results {
            format: FORMAT,
            part,
            date: today(),
            machine: Machine::here(),
            rounds: 0,
            seconds: 0.0,
            setup: Vec::new(),
            configurations: Vec::new(),
            skipped: Vec::new(),
            lines: Vec::new(),
            disturbed: [0; 2],
            all_disturbed: Vec::new(),
            thresholds: Vec::new(),
        };
        for case in cases {
            let disturbed = case.rounds.iter().filter(|r| !r.is_quiet()).count();
            results.disturbed[1] += case.rounds.len();
            if disturbed == case.rounds.len() {
                results.all_disturbed.push(case.subject);
            } else {
                results.disturbed[0] += disturbed;
            }
            let nothing_to_compare_with = case.refused(case.subject.base()).is_some();
            for variant in case.subject.kind().variants() {
                let refused = case.refused(variant);
                match refused {
                    Some(_) => results.lines.push(Line { refused, ..Line::of(case.subject, variant, []) }),
                    None if nothing_to_compare_with => {}
                    None => results.lines.extend(case.line(variant)),
                }
            }
        }
        results
    }

    /// The line of a subject and variant.
    pub fn line(&self, subject: Subject, variant: Variant) -> Option<&Line> {
        self.lines.iter().find(|l| (l.subject, l.variant) == (subject, variant) && l.refused.is_none())
    }

    /// The lines of a kind, in the order of measurement.
    pub fn lines_of(&self, kind: Kind) -> impl Iterator<Item = &Line> {
        self.lines.iter().filter(move |l| l.subject.kind() == kind && l.refused.is_none())
    }

    /// Subjects of a kind, in the order of measurement.
    pub fn subjects(&self, kind: Kind) -> Vec<Subject> {
        let mut all: Vec<Subject> = self.lines_of(kind).map(|l| l.subject).collect();
        all.dedup();
        all
    }

    /// Variants that were measured for a kind, in the order of tables.
    pub fn variants(&self, kind: Kind) -> Vec<Variant> {
        kind.variants().filter(|v| self.lines_of(kind).any(|l| l.variant == *v)).collect()
    }

    /// Writes the JSON, the tables, and the single runs if there are any, beside the other parts. Returns the JSON's path.
    pub fn write(&self, dir: &Path, cases: &[Case]) -> Result<PathBuf> {
        let file = |extension: &str| dir.join(self.part.file()).with_extension(extension);
        fs::create_dir_all(dir)?;
        fs::write(file("json"), serde_json::to_string_pretty(self)? + "\n")?;
        fs::write(file("md"), report::full(self))?;
        if !cases.is_empty() {
            fs::write(file("rounds.json"), serde_json::to_string(cases)? + "\n")?;
        }
        Ok(file("json"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BULK: Subject = Subject::Bulk { packets: Packets::Large, connections: 1 };

    fn run(variant: Variant, value: f64, disturbed: bool) -> Run {
        let disturbed = disturbed.then(|| "noise".to_owned());
        Run { disturbed, ..Run::of(variant, [(Figure::Value, value), (Figure::Cpu, 2.0 / value)]) }
    }

    fn round(base: f64, spliced: f64, disturbed: bool) -> Round {
        Round { runs: vec![run(Variant::Spliced, spliced, false), run(Variant::IpForward, base, disturbed)] }
    }

    fn summary(rounds: Vec<Round>) -> Results {
        Results::of(Part::Results, &[Case { subject: BULK, rounds }])
    }

    #[test]
    fn ratios_are_taken_within_rounds_and_disturbed_rounds_left_out() {
        let s = summary(vec![round(10.0, 9.0, false), round(20.0, 16.0, false), round(1.0, 16.0, true)]);
        let spliced = s.line(BULK, Variant::Spliced).unwrap();
        let ratio = spliced.ratio(Figure::Value).unwrap();
        assert_eq!((ratio.median, ratio.n), ((0.9 + 0.8) / 2.0, 2));
        assert_eq!(spliced.ratio(Figure::Cpu).unwrap().n, 2);
        assert_eq!(s.line(BULK, Variant::IpForward).unwrap().ratio(Figure::Value).unwrap().median, 1.0);
        assert_eq!(s.variants(Kind::Bulk), [Variant::IpForward, Variant::Spliced], "the rest was not measured");
        assert_eq!((s.disturbed, s.all_disturbed.len()), ([1, 3], 0));
    }

    #[test]
    fn if_all_rounds_are_disturbed_all_count_and_it_is_said() {
        let s = summary(vec![round(10.0, 9.0, true)]);
        assert_eq!(s.line(BULK, Variant::Spliced).unwrap().ratio(Figure::Value).unwrap().median, 0.9);
        assert_eq!(s.all_disturbed, [BULK]);
    }

    #[test]
    fn what_was_not_coalesced_is_refused_and_nothing_is_compared_with_it() {
        let subject = Subject::Bulk { packets: Packets::Coalesced, connections: 1 };
        let of = |base, spliced| {
            let mut round = round(10.0, 9.0, false);
            for (run, packet) in round.runs.iter_mut().zip([spliced, base]) {
                *run = run.clone().with(Figure::Packet, packet);
            }
            let all = Results::of(Part::Results, &[Case { subject, rounds: vec![round] }]);
            let refused = all.lines.iter().filter_map(|l| l.refused.clone()).collect::<Vec<_>>();
            (all.lines.len() - refused.len(), refused)
        };
        let why = "not coalesced: packets of 1514 bytes on average".to_owned();
        assert_eq!(of(Some(6000.0), Some(1514.0)), (1, vec![why.clone()]));
        assert_eq!(of(Some(6000.0), None).0, 1, "nothing was counted");
        assert_eq!(of(Some(1514.0), Some(6000.0)), (0, vec![why]));
        assert_eq!(of(Some(6000.0), Some(6000.0)), (2, vec![]));
    }

    #[test]
    fn what_has_no_base_in_its_round_does_not_count() {
        let s = summary(vec![round(10.0, 9.0, false), Round { runs: vec![run(Variant::Spliced, 1.0, false)] }]);
        assert_eq!(s.line(BULK, Variant::Spliced).unwrap().spread(Figure::Value).unwrap().n, 1);
        let alone = summary(vec![Round { runs: vec![run(Variant::Spliced, 1.0, false)] }]);
        assert!(alone.line(BULK, Variant::Spliced).unwrap().ratios.is_empty(), "unless no round has it");
    }
}
