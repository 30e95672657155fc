//! What is measured: figures, by section, row and variant. Medians and spreads are kept as [`Results`]; the single runs
//! ([`Case`]) are written beside them, for anyone who wants to compute medians again.

use super::{
    Result,
    machine::{Cost, Machine, today},
    network::Packets,
    report,
    stats::Spread,
    variant::Variant,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// Version of the JSON format.
pub const FORMAT: u32 = 6;
/// Minimum average packet in bytes where packets should be coalesced: two full ones.
const COALESCED: f64 = 2.0 * 1514.0;

/// What is measured at different times, and has files of its own with the same contents.
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

    /// Name of its files without the extension, and its heading; the date follows.
    pub fn names(self) -> (&'static str, &'static str) {
        match self {
            Part::Results => ("results", "Measured on"),
            Part::Million => ("million", "Connections at the same time, measured on"),
            Part::Wan => ("wan", "Long and lossy paths, measured on"),
            Part::Tpot => ("tpot", "Translucent proxies, measured on"),
            Part::TpotCosts => ("tpot-costs", "Costs of translucent proxies, measured on"),
        }
    }
}

/// What a table is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Section {
    /// Cost of a segment, by round trips on one CPU.
    Segment,
    /// Throughput on one CPU with a receiver that acknowledges so many segments at once.
    Ratio,
    /// Throughput.
    Bulk,
    /// Time from connecting to the end of an object.
    Response,
    /// Consecutive connections of several clients.
    Rate,
    /// Consecutive connections of one client on one CPU, to find the size from which splicing pays.
    Short,
    /// Requests through reverse proxies over persistent connections.
    Http,
    /// Requests of one client on one CPU, to find the size from which splicing a body pays.
    Body,
    /// Cost of a small packet, on one CPU. Flows are chosen at random for each packet.
    Flood,
    /// Datagrams through SOCKS, so many of them on the way, on one CPU.
    Datagrams,
    /// Times of the calls of splices and of the ways back.
    Switch,
    /// The sums of these, and what a splice costs a short connection.
    Pays,
    /// Memory of idle connections.
    Memory,
    /// Simultaneous connections, spliced and released: each row is a figure.
    Million,
    /// A transfer over a path.
    Path,
    /// The same through translucent proxies.
    Tpot,
    /// Memory of the forwarder's sockets while clients read slowly.
    Readers,
    /// A transfer that is unspliced half-way, and one that is not.
    Unsplice,
}

impl Section {
    /// Words before a row, head of the first column of its tables, the unit of values, and their digits.
    fn about(self) -> (&'static str, &'static str, &'static str, usize) {
        match self {
            Section::Segment => ("segments of", "variant", "us", 1),
            Section::Ratio => ("data to acknowledgements", "ratio", "MB/s", 0),
            Section::Bulk => ("bulk, packets of", "packets", "Gbit/s", 1),
            Section::Response => ("response,", "object", "ms", 2),
            Section::Rate => ("connections of", "bytes", "per second", 0),
            Section::Short => ("short transfers of", "bytes", "us", 0),
            Section::Http => ("HTTP,", "reply", "per second", 0),
            Section::Body => ("bodies of", "reply", "us", 0),
            Section::Flood => ("flood over", "random among", "ns", 0),
            Section::Datagrams => ("datagrams of", "datagrams", "us", 2),
            Section::Switch => ("switching,", "connection", "us", 1),
            Section::Pays => ("", "switch", "us", 1),
            Section::Memory => ("memory", "variant", "bytes", 0),
            Section::Million => ("million:", "what", "", 0),
            Section::Path | Section::Tpot => ("path", "path and object", "s", 3),
            Section::Readers => ("slow readers", "variant", "bytes", 0),
            Section::Unsplice => ("unsplice,", "path and object", "s", 2),
        }
    }

    /// Head of the first column of its tables.
    pub fn first_column(self) -> &'static str {
        self.about().1
    }

    /// Unit of its values.
    pub fn unit(self) -> &'static str {
        self.about().2
    }

    /// A row, named outside of its table.
    pub fn row(self, row: &str) -> String {
        format!("{} {row}", self.about().0).trim().to_owned()
    }

    /// Title of a variant in its tables.
    pub fn title(self, variant: Variant) -> &'static str {
        match (self, variant) {
            (Section::Path | Section::Tpot | Section::Readers, Variant::IpForward) => "routed",
            (Section::Path | Section::Readers, Variant::Copy) => "copied",
            (Section::Path | Section::Readers, Variant::Spliced) => "spliced at once",
            _ => variant.title(),
        }
    }

    /// Formats a value with its significant digits.
    pub fn number(self, value: f64) -> String {
        let few = matches!(self, Section::Http | Section::Million) && value < 100.0;
        let digits = if few { 1 } else { self.about().3 };
        format!("{value:.digits$}")
    }

    /// The variant that others are compared with, in the same round.
    pub fn base(self) -> Variant {
        match self {
            Section::Short | Section::Body => Variant::Copy,
            Section::Http => Variant::Haproxy,
            Section::Datagrams => Variant::Dante,
            _ => Variant::IpForward,
        }
    }
}

/// A figure. Counts ([`Figure::is_count`]) are those of one run, and tables show the worst round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Figure {
    /// Number of bytes, segments, connections, clients or requests, and duration in seconds.
    Amount,
    Seconds,
    /// The value in the section's unit.
    Value,
    /// CPU time of the whole machine, end hosts included: seconds per 10^9 bytes, or microseconds per segment, connection or
    /// request.
    Cpu,
    /// Measured ratio of segments with data to those without; what is derived from the cost of segments for that and for the
    /// row's ratio, and for the forwarder alone.
    PerAck,
    DerivedThen,
    Derived,
    DerivedAlone,
    /// Average size in bytes of a packet from the server as handled by the forwarder.
    Packet,
    /// Milliseconds from the request to the last byte.
    Request,
    /// Share of longsplice's connections or replies, or of the bytes of a path's transfer, that were spliced.
    Spliced,
    /// The value less that of [`Variant::Direct`] in the same round: what the forwarder alone costs. And the ratio of that to
    /// the same for [`Variant::Copy`].
    Alone,
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
    /// Microseconds of the call that sets the bounds of a splice; from there until both directions are forwarded; of the call
    /// that completes the splice; of the one that returns the flow to its sockets (or seconds of a transfer that is unspliced
    /// half-way); of closing both sockets silently; and of recreating them.
    Freeze,
    Drain,
    Commit,
    Unsplice,
    Release,
    Recreate,
    /// Numbers of segments of one byte, and of full ones, that save as much.
    Small,
    Full,
    /// Bytes in all processes of the proxy, with shared pages divided, per connection.
    Resident,
    /// Kernel memory for sockets without the end hosts' part, which is measured with a routing forwarder.
    Forwarder,
    /// Kernel memory for the forwarder's queues while the server sends and the client does not read. It is not part of the value.
    Queued,
    /// Largest sum of all sockets' memory at the forwarder in bytes, per client.
    Peak,
}

impl Figure {
    fn is_count(self) -> bool {
        use Figure::{BeyondWindow, Dropped, Needless, Retransmitted, Timeouts};
        matches!(self, Retransmitted | Timeouts | Needless | Dropped | BeyondWindow)
    }
}

/// All rounds of one row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Case {
    pub section: Section,
    pub row: String,
    /// All rounds, including disturbed ones: each has a run of every variant, in the order of tables.
    pub rounds: Vec<Vec<Run>>,
}

/// One run of one variant.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Run {
    pub variant: Variant,
    pub figures: BTreeMap<Figure, f64>,
    /// What happened, in a few words: why a connection was not spliced, or what has disturbed a run that counts.
    pub notes: Vec<String>,
    /// Why the run should not count, if so.
    pub disturbed: Option<String>,
}

/// The medians of one variant of one row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    pub section: Section,
    pub row: String,
    pub variant: Variant,
    pub figures: BTreeMap<Figure, Spread>,
    /// Ratios to [`Section::base`] in the same round, where it was measured. CPU time may be too little to be measured in ticks.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ratios: BTreeMap<Figure, Spread>,
    /// [`Run::notes`], with the number of rounds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub notes: BTreeMap<String, usize>,
    /// Why the variant did not meet the row's conditions, if so. Then there are no figures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
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
    /// Network, rules and variants, a sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub setup: Vec<String>,
    /// Names and texts of the configurations.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub configurations: Vec<(String, String)>,
    /// Missing measurements, and why.
    pub skipped: Vec<String>,
    /// Figures by row and variant.
    pub lines: Vec<Line>,
    /// What follows from the figures of a section, in words.
    pub words: BTreeMap<Section, String>,
    /// Number of disturbed rounds left out, and of all rounds.
    pub disturbed: [usize; 2],
    /// Rows with disturbed rounds only, all of which were counted nevertheless.
    pub all_disturbed: Vec<String>,
    /// What the lines are the medians of.
    #[serde(skip)]
    pub cases: Vec<Case>,
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

    pub fn value(&self) -> f64 {
        self.figures.get(&Figure::Value).copied().unwrap_or(f64::NAN)
    }
}

/// The run of a variant in a round.
fn run_of(round: &[Run], variant: Variant) -> Option<&Run> {
    round.iter().find(|run| run.variant == variant)
}

/// Whether a round was not disturbed.
pub fn is_quiet(round: &[Run]) -> bool {
    round.iter().all(|run| run.disturbed.is_none())
}

impl Case {
    /// The rounds that were not disturbed, or all if there are none.
    fn counted(&self) -> Vec<&Vec<Run>> {
        let quiet: Vec<_> = self.rounds.iter().filter(|round| is_quiet(round)).collect();
        if quiet.is_empty() { self.rounds.iter().collect() } else { quiet }
    }

    /// The figures of a variant that depend on those of others in the same round.
    fn derived(&self, round: &[Run], run: &Run) -> Vec<(Figure, f64)> {
        let value = |v| run_of(round, v).map(Run::value);
        let found = match self.section {
            Section::Segment => {
                let alone = |v| Some(value(v)? - value(Variant::Direct)?);
                let copying = alone(Variant::Copy).filter(|micros| *micros > 0.0);
                let own = alone(run.variant);
                vec![(Figure::Alone, own), (Figure::AloneToCopy, own.zip(copying).map(|(own, copy)| own / copy))]
            }
            Section::Datagrams => vec![(Figure::Alone, value(Variant::Direct).map(|direct| run.value() - direct))],
            Section::Path => {
                let copied = value(Variant::Copy);
                let slower = value(Variant::IpForward).zip(copied).map(|(routed, copied)| routed.max(copied));
                let to = |other: Option<f64>| other.map(|other| run.value() / other);
                vec![(Figure::ToCopied, to(copied)), (Figure::ToSlower, to(slower))]
            }
            Section::Memory if run.variant != Variant::IpForward => {
                let ends = value(Variant::IpForward);
                vec![(Figure::Forwarder, ends.map(|ends| (run.value() - ends).max(0.0)))]
            }
            _ => Vec::new(),
        };
        found.into_iter().filter_map(|(figure, value)| Some((figure, value?))).collect()
    }

    /// The savings by splicing in each round. Disturbed rounds are included: they raise the cost of either variant in turn, so
    /// they make a test of them weaker, but not wrong.
    pub fn gains(&self, figure: Figure) -> Vec<f64> {
        let of = |round: &[Run], v| run_of(round, v)?.figures.get(&figure).copied();
        let gain = |round: &Vec<Run>| Some(of(round, Variant::Copy)? - of(round, Variant::Spliced)?);
        self.rounds.iter().filter_map(gain).collect()
    }

    /// The medians of a variant, over the rounds that have what it is compared with.
    fn line(&self, variant: Variant) -> Line {
        let (mut rounds, base) = (self.counted(), self.section.base());
        if rounds.iter().any(|round| run_of(round, base).is_some()) {
            rounds.retain(|round| run_of(round, base).is_some());
        }
        let (mut figures, mut ratios) = (BTreeMap::<_, Vec<f64>>::new(), BTreeMap::<_, Vec<f64>>::new());
        let mut line = Line::of(self.section, &self.row, variant, []);
        for (round, run) in rounds.iter().filter_map(|round| Some((round, run_of(round, variant)?))) {
            for (figure, value) in run.figures.iter().map(|(f, v)| (*f, *v)).chain(self.derived(round, run)) {
                figures.entry(figure).or_default().push(value);
                let base = run_of(round, base).and_then(|base| base.figures.get(&figure));
                ratios.entry(figure).or_default().extend(base.filter(|_| !figure.is_count()).map(|base| value / base));
            }
            run.notes.iter().for_each(|note| *line.notes.entry(note.clone()).or_default() += 1);
        }
        let spreads = |all: BTreeMap<Figure, Vec<f64>>| {
            all.into_iter().filter_map(|(figure, values)| Some((figure, Spread::of(values)?))).collect()
        };
        (line.figures, line.ratios) = (spreads(figures), spreads(ratios));
        line
    }

    /// Why a variant did not meet the row's conditions; `None` if it did.
    fn refused(&self, variant: Variant) -> Option<String> {
        if self.section != Section::Bulk || !self.row.starts_with(Packets::Coalesced.title()) {
            return None;
        }
        let runs = self.counted().into_iter().filter_map(|round| run_of(round, variant));
        let sizes = runs.map(|run| run.figures.get(&Figure::Packet).copied().unwrap_or_default());
        let size = Spread::of(sizes)?.median;
        (size < COALESCED).then(|| format!("not coalesced: packets of {size:.0} bytes on average"))
    }
}

impl Line {
    /// A line that is no summary of rounds.
    pub fn of(
        section: Section,
        row: &str,
        variant: Variant,
        figures: impl IntoIterator<Item = (Figure, Option<f64>)>,
    ) -> Line {
        let figures = figures.into_iter().filter_map(|(figure, value)| Some((figure, Spread::of(value)?))).collect();
        let (ratios, notes) = (BTreeMap::new(), BTreeMap::new());
        Line { section, row: row.to_owned(), variant, figures, ratios, notes, refused: None }
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
    /// Nothing yet, on this machine.
    pub fn new(part: Part, rounds: usize) -> Results {
        Results {
            format: FORMAT,
            part,
            date: today(),
            machine: Machine::here(),
            rounds,
            setup: Vec::new(),
            configurations: Vec::new(),
            skipped: Vec::new(),
            lines: Vec::new(),
            words: BTreeMap::new(),
            disturbed: [0; 2],
            all_disturbed: Vec::new(),
            cases: Vec::new(),
        }
    }

    /// Adds the medians of a case over the rounds that count.
    pub fn add(&mut self, case: Case) {
        let disturbed = case.rounds.iter().filter(|round| !is_quiet(round)).count();
        // The rounds of a switch are its cycles.
        self.disturbed[1] += if case.section == Section::Switch { 0 } else { case.rounds.len() };
        if disturbed == case.rounds.len() {
            self.all_disturbed.push(case.section.row(&case.row));
        } else {
            self.disturbed[0] += disturbed;
        }
        let nothing_to_compare_with = case.refused(case.section.base()).is_some();
        for variant in each(case.rounds.iter().flatten().map(|run| run.variant)) {
            match case.refused(variant) {
                None if nothing_to_compare_with => {}
                refused @ Some(_) => {
                    self.lines.push(Line { refused, ..Line::of(case.section, &case.row, variant, []) });
                }
                None => self.lines.push(case.line(variant)),
            }
        }
        self.cases.push(case);
    }

    /// The line of a row and variant.
    pub fn line(&self, section: Section, row: &str, variant: Variant) -> Option<&Line> {
        self.lines_of(section).find(|l| l.row == row && l.variant == variant)
    }

    /// The lines of a section, in the order of measurement.
    pub fn lines_of(&self, section: Section) -> impl Iterator<Item = &Line> {
        self.lines.iter().filter(move |l| l.section == section && l.refused.is_none())
    }

    /// Rows of a section, in the order of measurement.
    pub fn rows(&self, section: Section) -> Vec<&str> {
        each(self.lines_of(section).map(|l| l.row.as_str()))
    }

    /// Variants that were measured for a section, in the order of tables.
    pub fn variants(&self, section: Section) -> Vec<Variant> {
        each(self.lines_of(section).map(|l| l.variant))
    }

    /// Writes the JSON, the tables, and the single runs if there are any, beside the other parts. Returns the JSON's path.
    pub fn write(&self, dir: &Path) -> Result<PathBuf> {
        let file = |extension: &str| dir.join(self.part.names().0).with_extension(extension);
        fs::create_dir_all(dir)?;
        fs::write(file("json"), serde_json::to_string_pretty(self)? + "\n")?;
        fs::write(file("md"), report::full(self))?;
        fs::write(file("rounds.json"), serde_json::to_string(&self.cases)? + "\n")?;
        Ok(file("json"))
    }
}

/// Each of them once, in the order of their first appearance.
pub fn each<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    all.for_each(|one| {
        if !seen.contains(&one) {
            seen.push(one);
        }
    });
    seen
}

/// `1 byte`, `2 bytes`.
pub fn plural(n: u64, what: &str) -> String {
    if n == 1 { format!("{n} {what}") } else { format!("{n} {what}s") }
}

/// Formats a size, with units for powers of two.
pub fn size(bytes: u64) -> String {
    match bytes {
        n if n >= 1 << 20 && n % (1 << 20) == 0 => format!("{} MB", n >> 20),
        n if n >= 1 << 10 && n % (1 << 10) == 0 => format!("{} KB", n >> 10),
        n => plural(n, "byte"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: &str = "up to 64 KB, 1 connection";

    fn run(variant: Variant, value: f64, disturbed: bool) -> Run {
        let disturbed = disturbed.then(|| "noise".to_owned());
        Run { disturbed, ..Run::of(variant, [(Figure::Value, value), (Figure::Cpu, 2.0 / value)]) }
    }

    fn round(base: f64, spliced: f64, disturbed: bool) -> Vec<Run> {
        vec![run(Variant::IpForward, base, disturbed), run(Variant::Spliced, spliced, false)]
    }

    fn summary(row: &str, rounds: Vec<Vec<Run>>) -> Results {
        let mut results = Results::new(Part::Results, rounds.len());
        results.add(Case { section: Section::Bulk, row: row.to_owned(), rounds });
        results
    }

    #[test]
    fn ratios_are_taken_within_rounds_and_disturbed_rounds_left_out() {
        let s = summary(ROW, vec![round(10.0, 9.0, false), round(20.0, 16.0, false), round(1.0, 16.0, true)]);
        let spliced = s.line(Section::Bulk, ROW, Variant::Spliced).unwrap();
        let ratio = spliced.ratio(Figure::Value).unwrap();
        assert_eq!((ratio.median, ratio.n), ((0.9 + 0.8) / 2.0, 2));
        assert_eq!(spliced.ratio(Figure::Cpu).unwrap().n, 2);
        assert_eq!(s.variants(Section::Bulk), [Variant::IpForward, Variant::Spliced]);
        assert_eq!((s.disturbed, s.all_disturbed.len()), ([1, 3], 0));
    }

    #[test]
    fn if_all_rounds_are_disturbed_all_count_and_it_is_said() {
        let s = summary(ROW, vec![round(10.0, 9.0, true)]);
        assert_eq!(s.line(Section::Bulk, ROW, Variant::Spliced).unwrap().ratio(Figure::Value).unwrap().median, 0.9);
        assert_eq!(s.all_disturbed, ["bulk, packets of up to 64 KB, 1 connection"]);
    }

    #[test]
    fn what_was_not_coalesced_is_refused_and_nothing_is_compared_with_it() {
        let of = |base, spliced| {
            let mut round = round(10.0, 9.0, false);
            for (run, packet) in round.iter_mut().zip([base, spliced]) {
                *run = run.clone().with(Figure::Packet, packet);
            }
            let all = summary("1500 bytes, coalesced, 1 connection", vec![round]);
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
        let s = summary(ROW, vec![round(10.0, 9.0, false), vec![run(Variant::Spliced, 1.0, false)]]);
        assert_eq!(s.line(Section::Bulk, ROW, Variant::Spliced).unwrap().spread(Figure::Value).unwrap().n, 1);
        let alone = summary(ROW, vec![vec![run(Variant::Spliced, 1.0, false)]]);
        assert!(alone.lines[0].ratios.is_empty(), "unless no round has it");
    }

    #[test]
    fn sizes_are_named() {
        assert_eq!([size(1), size(1448), size(16 << 10), size(100 << 20)], ["1 byte", "1448 bytes", "16 KB", "100 MB"]);
    }
}
