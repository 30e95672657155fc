//! Tables for standard output, beside the JSON, and in the documents. They are generated from [`Results`] as [`TABLES`] says,
//! never written by hand.

use super::{
    results::{
        Figure::{self, *},
        Line, Part, Results, Section, each,
    },
    stats::Spread,
    variant::Variant,
    wan::{CUT_OFF, LIMIT},
};
use std::fmt::Write;

/// What a cell shows of a line.
type Show = fn(&Line) -> String;

/// What follows from a section's results.
enum Form {
    /// A table with a row for each row of the section, and a column for each variant.
    Variants(Show),
    /// A table with a row for each line, and these columns. If rows have no name, they are named after their variants.
    Lines(&'static [(&'static str, Show)]),
    /// A table with a row for each variant, and these columns for each row of the section; `{row}` is its name.
    Rows(&'static [(&'static str, Show)]),
    /// What the results say in words.
    Words,
}
use Form::{Lines, Rows, Variants, Words};

/// All tables: their sections, whether they are among those that matter most, their headings, and their form. `{rounds}` is the
/// number of rounds, `{medians}` says that cells are medians and spreads.
const TABLES: &[(Section, bool, &str, Form)] = &[
    (
        Section::Segment,
        true,
        "Cost of a segment, by round trips with everything on one CPU ({medians}). Alone: without what back to back takes in \
         the same round. Speedup: of the forwarder alone, over copying. \"Over\": what a forwarder takes alone is not \
         distinguishable from nothing in some rounds.",
        Rows(&[
            ("{row}, us", |l| l.section.number(l.value())),
            ("to IP forwarding", |l| text(l.ratio(Value), 2)),
            ("forwarder alone, us", |l| text(l.spread(Alone).filter(|_| l.variant != Variant::Direct), 1)),
            ("speedup", |l| {
                l.spread(AloneToCopy).filter(|_| l.variant != Variant::Direct).map_or(String::new(), Spread::inverse)
            }),
        ]),
    ),
    (
        Section::Ratio,
        true,
        "Throughput by the ratio of data to acknowledgements, MB per second of CPU time, everything on one CPU ({medians}):",
        Lines(&[
            ("variant", |l| l.variant.to_string()),
            ("derived, forwarder alone", |l| median(l, DerivedAlone, 0)),
            ("derived", |l| median(l, Derived, 0)),
            ("occurred", |l| l.get(PerAck).map_or(String::new(), |ratio| format!("{ratio:.1}:1"))),
            ("derived for that", |l| median(l, DerivedThen, 0)),
            ("measured", |l| median(l, Value, 0)),
            ("to IP forwarding", |l| text(l.ratio(Value), 2)),
        ]),
    ),
    (Section::Bulk, true, "Throughput, Gbit/s, and the ratio to IP forwarding ({medians}):", Variants(value)),
    (
        Section::Bulk,
        false,
        "CPU seconds per GB, end hosts included, and the ratio to IP forwarding:",
        Variants(|l| with_ratio(l, Cpu, 3)),
    ),
    (
        Section::Bulk,
        false,
        "Packets from the server as the forwarder handled them, bytes on average:",
        Variants(|l| median(l, Packet, 0)),
    ),
    (
        Section::Response,
        true,
        "Response time, milliseconds from connecting to the last byte, and the ratio to IP forwarding ({medians}):",
        Variants(value),
    ),
    (
        Section::Response,
        false,
        "Milliseconds from the request to the last byte, and the ratio to IP forwarding ({medians}):",
        Variants(|l| with_ratio(l, Request, 2)),
    ),
    (Section::Response, false, CONNECTIONS, Variants(share)),
    (
        Section::Rate,
        true,
        "Connections per second, of eight clients, and the ratio to IP forwarding ({medians}):",
        Variants(value),
    ),
    (
        Section::Rate,
        false,
        "CPU microseconds per connection, and the ratio to IP forwarding:",
        Variants(|l| with_ratio(l, Cpu, 0)),
    ),
    (Section::Rate, false, CONNECTIONS, Variants(share)),
    (
        Section::Short,
        false,
        "Short transfers on one CPU, microseconds per connection, and the ratio to copying ({medians}):",
        Variants(value),
    ),
    (Section::Short, false, CONNECTIONS, Variants(share)),
    (Section::Short, true, "", Words),
    (
        Section::Http,
        true,
        "HTTP requests per second, over persistent connections to reverse proxies, and the ratio to HAProxy ({medians}):",
        Variants(value),
    ),
    (
        Section::Http,
        false,
        "CPU microseconds per HTTP request, over persistent connections to reverse proxies, and the ratio to HAProxy:",
        Variants(|l| with_ratio(l, Cpu, 0)),
    ),
    (Section::Http, false, REPLIES, Variants(share)),
    (
        Section::Body,
        false,
        "HTTP replies on one CPU, microseconds per request, and the ratio to copying ({medians}):",
        Variants(value),
    ),
    (Section::Body, false, REPLIES, Variants(share)),
    (Section::Body, true, "", Words),
    (
        Section::Switch,
        true,
        "Switching, microseconds (median, and the range of eight in ten):",
        Lines(&[
            ("splices", |l| l.spread(Freeze).map_or(String::new(), |s| s.n.to_string())),
            ("freeze", |l| text(l.spread(Freeze), 1)),
            ("drain", |l| text(l.spread(Drain), 1)),
            ("commit", |l| text(l.spread(Commit), 1)),
            ("unsplice", |l| text(l.spread(Unsplice), 1)),
            ("release", |l| text(l.spread(Release), 1)),
            ("recreate", |l| text(l.spread(Recreate), 1)),
        ]),
    ),
    (
        Section::Pays,
        true,
        "What a switch costs, and how many segments save as much. First the calls by themselves; last, all that a spliced \
         connection of one byte takes more than a copied one (short transfers), which is from when on splicing pays:",
        Lines(&[
            ("us", |l| median(l, Value, 1)),
            ("segments of 1 byte", |l| median(l, Small, 1)),
            ("segments of 1448 bytes", |l| median(l, Full, 1)),
        ]),
    ),
    (
        Section::Memory,
        true,
        "Memory, bytes per connection. The last column is the kernel's memory for the forwarder's queues while the server \
         sends all it can and the client reads nothing; all others are of idle connections:",
        Lines(&[
            ("connections", |l| median(l, Amount, 0)),
            ("in processes", |l| median(l, Resident, 0)),
            ("kernel's sockets", |l| median(l, Value, 0)),
            ("of these, the forwarder's", |l| median(l, Forwarder, 0)),
            ("queues, if the client does not read", |l| median(l, Queued, 0)),
        ]),
    ),
    (Section::Memory, true, "", Words),
    (
        Section::Flood,
        true,
        "Nanoseconds of one CPU per small packet, generator and sink included, and the ratio to IP forwarding ({medians}):",
        Variants(value),
    ),
    (
        Section::Datagrams,
        true,
        "Datagrams through SOCKS on one CPU, microseconds each, end hosts included, and the ratio to Dante ({medians}):",
        Variants(value),
    ),
    (
        Section::Datagrams,
        false,
        "Datagrams through SOCKS on one CPU, microseconds each, forwarder alone:",
        Variants(|l| text(l.spread(Alone).filter(|_| l.variant != Variant::Direct), 2)),
    ),
    (Section::Million, false, "Connections at the same time, spliced and released:", Lines(&[("figure", value)])),
    (
        Section::Path,
        true,
        "Seconds until the last byte has arrived, and the ratios to routing and to copying (medians of {rounds} rounds; of 3 \
         requests each over HTTP):",
        Variants(time_and_ratios),
    ),
    (Section::Path, false, HAPPENED, Variants(what_happened)),
    (Section::Path, true, "", Words),
    (
        Section::Tpot,
        true,
        "Seconds from connecting until the last byte has arrived, and the ratio to routing (medians of {rounds} rounds):",
        Variants(time_and_ratios),
    ),
    (Section::Tpot, false, HAPPENED, Variants(what_happened)),
    (
        Section::Readers,
        false,
        "Memory of the forwarder's sockets while clients read 1 MB per second of 10 MB, 50 ms away:",
        Lines(&[
            ("clients", |l| median(l, Amount, 0)),
            ("KB each, at most", |l| l.get(Peak).map_or(String::new(), |bytes| format!("{:.0}", bytes / 1e3))),
            ("in the median", |l| format!("{:.0}", l.value() / 1e3)),
            ("seconds", |l| median(l, Seconds, 1)),
        ]),
    ),
    (
        Section::Unsplice,
        false,
        "An unsplice half-way through a transfer that was spliced at once:",
        Lines(&[
            ("without, seconds", |l| median(l, Value, 2)),
            ("with, seconds", |l| median(l, Unsplice, 2)),
            ("packets beyond the window", |l| l.spread(BeyondWindow).map_or(String::new(), |s| s.high.to_string())),
            ("sent again", |l| l.worst(Retransmitted).to_string()),
            ("RTO", |l| l.worst(Timeouts).to_string()),
        ]),
    ),
];
const CONNECTIONS: &str = "Share of these connections that were spliced:";
const REPLIES: &str = "Share of these replies that were spliced:";
const HAPPENED: &str = "What happened in the worst round: transfers cut off after 20 seconds, the sender's retransmission \
                        timeouts (RTO), segments that it sent again, segments that any host received in vain, the share of \
                        bytes that were spliced, and why they were not:";

/// The whole report of a part, with the set-up.
pub fn full(r: &Results) -> String {
    let mut text = head(r) + &tables(r, false);
    if !r.setup.is_empty() {
        text += "### Set-up\n\n";
    }
    for line in &r.setup {
        let _ = writeln!(text, "- {}", wrap(line).join("\n  "));
    }
    for (name, config) in &r.configurations {
        let _ = writeln!(text, "\nConfiguration of {name}:\n\n```text\n{config}```");
    }
    text
}

/// The heading of a part, with its machine.
pub fn head(r: &Results) -> String {
    let m = &r.machine;
    let mut text = format!(
        "## {} {}\n\n{} CPUs ({}), {} MB; Linux {};\nlongsplice {}",
        r.part.names().1,
        r.date,
        m.cpus,
        m.cpu,
        m.memory_mb,
        m.kernel,
        m.longsplice
    );
    for peer in m.peers.iter().filter(|_| r.part == Part::Results) {
        let _ = write!(text, ";\n{peer}");
    }
    text + ".\n\n"
}

/// The tables of all that was measured. `brief`: only those that matter most.
pub fn tables(r: &Results, brief: bool) -> String {
    let medians = format!("median of {} rounds, and spread", r.rounds);
    let mut text = String::new();
    for (section, matters, head, form) in TABLES {
        if !*matters && brief {
            continue;
        }
        let head = head.replace("{medians}", &medians).replace("{rounds}", &r.rounds.to_string());
        text += &match form {
            Words => r.words.get(section).map_or(String::new(), |words| wrap(words).join("\n") + "\n\n"),
            Variants(show) => by_variant(r, *section, &head, *show),
            Lines(columns) => by_line(r, *section, &head, columns),
            Rows(columns) => by_row(r, *section, &head, columns),
        };
    }
    if brief { text } else { text + &remarks(r) }
}

/// Columns that are empty are left out.
fn by_variant(r: &Results, section: Section, head: &str, show: Show) -> String {
    let variants = r.variants(section).into_iter();
    let shown = |v: &Variant| r.lines_of(section).any(|l| l.variant == *v && !show(l).is_empty());
    let variants: Vec<Variant> = variants.filter(shown).collect();
    if variants.is_empty() {
        return String::new();
    }
    let rows = each(r.lines.iter().filter(|l| l.section == section).map(|l| &l.row)).into_iter().map(|row| {
        let cells = variants.iter().map(|v| {
            let line = r.lines.iter().find(|l| (l.section, &l.row, l.variant) == (section, row, *v));
            line.map_or(String::new(), |l| if l.refused.is_some() { "refused".to_owned() } else { show(l) })
        });
        std::iter::once(row.clone()).chain(cells).collect()
    });
    let titles = variants.iter().map(|v| section.title(*v).to_owned());
    table(head, section, titles, rows.collect())
}

fn by_line(r: &Results, section: Section, head: &str, columns: &[(&str, Show)]) -> String {
    let rows = r.lines_of(section).map(|l| {
        let name = if l.row.is_empty() { section.title(l.variant).to_owned() } else { l.row.clone() };
        std::iter::once(name).chain(columns.iter().map(|(_, show)| show(l))).collect()
    });
    table(head, section, columns.iter().map(|(title, _)| (*title).to_owned()), rows.collect())
}

fn by_row(r: &Results, section: Section, head: &str, columns: &[(&str, Show)]) -> String {
    let rows = r.rows(section);
    let titles = rows.iter().flat_map(|row| columns.iter().map(move |(title, _)| title.replace("{row}", row)));
    let cells = r.variants(section).into_iter().map(|v| {
        let lines = rows.iter().map(|row| r.line(section, row, v));
        let cells = lines.flat_map(|line| columns.iter().map(move |(_, show)| line.map_or(String::new(), show)));
        std::iter::once(v.to_string()).chain(cells).collect()
    });
    table(head, section, titles, cells.collect())
}

/// Formats a table; empty without rows. The first cell of a row is its head.
fn table(head: &str, section: Section, columns: impl Iterator<Item = String>, rows: Vec<Vec<String>>) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut text = format!("{}\n\n| {} |", wrap(head).join("\n"), section.first_column());
    columns.for_each(|c| text += &format!(" {c} |"));
    text += "\n| --- |";
    text += &" ---: |".repeat(rows[0].len() - 1);
    for row in rows {
        text += "\n|";
        row.iter().for_each(|cell| text += &if cell.is_empty() { " |".to_owned() } else { format!(" {cell} |") });
    }
    text + "\n\n"
}

/// The median of a figure; nothing if it is unknown.
fn median(l: &Line, figure: Figure, digits: usize) -> String {
    l.get(figure).map_or(String::new(), |n| format!("{n:.digits$}"))
}

/// A median with its spread.
fn text(spread: Option<&Spread>, digits: usize) -> String {
    spread.map_or(String::new(), |s| s.text(digits))
}

/// The value, with its ratio to the base.
fn value(l: &Line) -> String {
    beside_ratio(l, Value, l.section.number(l.value()))
}

/// A figure, with its ratio to the base.
fn with_ratio(l: &Line, figure: Figure, digits: usize) -> String {
    let number = median(l, figure, digits);
    if number.is_empty() { number } else { beside_ratio(l, figure, number) }
}

fn beside_ratio(l: &Line, figure: Figure, number: String) -> String {
    match l.ratio(figure).filter(|_| l.variant != l.section.base()) {
        Some(ratio) => format!("{number}: {}", ratio.text(2)),
        None => number,
    }
}

fn share(l: &Line) -> String {
    text(l.spread(Spliced), 2)
}

/// The time of a transfer, `0.316`, or `>20` if most rounds were cut off, with its ratios to routing and to copying.
fn time_and_ratios(l: &Line) -> String {
    let limit = LIMIT.as_secs_f64();
    let time = if l.value() >= limit { format!(">{limit}") } else { l.section.number(l.value()) };
    let ratios = match l.variant {
        Variant::IpForward => [None, None],
        Variant::Copy => [l.ratio(Value), None],
        _ => [l.ratio(Value), l.spread(ToCopied)],
    };
    let ratios: Vec<String> = ratios.into_iter().flatten().map(|r| format!("{:.2}", r.median)).collect();
    if ratios.is_empty() { time } else { format!("{time}: {}", ratios.join(" / ")) }
}

/// Why a connection was not spliced.
fn refusals(l: &Line) -> impl Iterator<Item = &String> {
    l.notes.keys().filter(|note| *note != CUT_OFF)
}

/// What longsplice decided, in words.
pub fn decision(l: &Line) -> String {
    let why: Vec<_> = refusals(l).map(|why| format!("`{why}`")).collect();
    let why = if why.is_empty() { String::new() } else { format!(" ({})", why.join(", ")) };
    match l.get(Spliced) {
        None => String::new(),
        Some(0.0) => format!("copied{why}"),
        Some(part) => format!("spliced {:.0} % of it{why}", part * 100.0),
    }
}

/// What happened to the connection of a transfer; empty if nothing did.
fn what_happened(l: &Line) -> String {
    let late = l.notes.get(CUT_OFF).map(|late| format!("{late} of {} {CUT_OFF}", l.spread(Value).map_or(0, |s| s.n)));
    let counts = [(Timeouts, "RTO"), (Retransmitted, "again"), (Needless, "needless"), (Dropped, "dropped")];
    let counts = counts.map(|(count, name)| (l.worst(count), name)).into_iter().filter(|(n, _)| *n > 0);
    let mut parts: Vec<String> = late.into_iter().chain(counts.map(|(n, name)| format!("{n} {name}"))).collect();
    if let Some(spliced) = l.get(Spliced).filter(|_| l.variant != Variant::Copy) {
        parts.push(format!("{spliced:.2} spliced"));
        parts.extend(refusals(l).cloned());
    }
    parts.join(", ")
}

fn remarks(r: &Results) -> String {
    let mut lines = Vec::new();
    let [disturbed, all] = r.disturbed;
    if disturbed > 0 {
        lines.push(format!("{disturbed} of {all} rounds were disturbed and do not count."));
    }
    let disturbed = r.all_disturbed.iter();
    lines.extend(disturbed.map(|row| format!("All rounds were disturbed, and counted nevertheless: {row}.")));
    for l in &r.lines {
        let name = l.section.row(&l.row);
        match &l.refused {
            Some(why) => lines.push(format!("Refused: {name}: {}: {why}.", l.variant)),
            None if matches!(l.section, Section::Switch | Section::Memory) && !l.notes.is_empty() => {
                let variant = if l.row.is_empty() { format!(", {}", l.variant) } else { String::new() };
                lines.push(format!("Disturbed: {name}{variant}."));
            }
            None => {}
        }
    }
    lines.extend(r.skipped.iter().map(|skipped| wrap(&format!("Not measured: {skipped}.")).join("\n")));
    if lines.is_empty() { String::new() } else { lines.join("\n") + "\n\n" }
}

/// Wraps prose to the line width allowed in documents.
fn wrap(text: &str) -> Vec<String> {
    const WIDTH: usize = 116;
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut().filter(|line| line.len() + word.len() < WIDTH) {
            Some(line) => *line += &format!(" {word}"),
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
pub mod tests {
    use super::{
        super::results::{Case, Run},
        *,
    };

    #[test]
    fn lines_are_wrapped_between_words() {
        let lines = wrap(&"word ".repeat(50));
        assert!(lines.len() > 1 && lines.iter().all(|l| l.len() <= 116 && !l.ends_with(' ')), "{lines:?}");
        assert_eq!(lines.join(" "), "word ".repeat(50).trim_end());
    }

    #[test]
    fn tables_have_a_cell_for_every_column() {
        let columns = || ["b".to_owned(), "c".to_owned()].into_iter();
        let text = table("Head:", Section::Million, columns(), vec![vec!["1".into(), String::new(), "3".into()]]);
        assert_eq!(text, "Head:\n\n| what | b | c |\n| --- | ---: | ---: |\n| 1 | | 3 |\n\n");
        assert_eq!(table("Head:", Section::Million, columns(), Vec::new()), "", "no table without rows");
    }

    const ROW: &str = "c100, 1 MB, bbr";

    /// Transfers of every kind: routed, copied, spliced, refused and cut off.
    pub fn paths() -> Results {
        let run = |variant, seconds, more: &[(Figure, f64)], note: Option<&str>| {
            let mut run = Run::of(variant, [(Value, seconds)].iter().chain(more).copied());
            run.notes.extend(note.map(str::to_owned));
            run
        };
        let routed = |seconds| run(Variant::IpForward, seconds, &[], None);
        let copied = || run(Variant::Copy, 0.4, &[], None);
        let late = run(Variant::Spliced, 20.0, &[], Some(CUT_OFF));
        let spliced = run(Variant::Default, 0.6, &[(Spliced, 0.5), (Timeouts, 1.0)], None);
        let refused = run(Variant::Default, 0.8, &[(Spliced, 0.0), (Needless, 3.0)], Some("path"));
        let rounds = vec![vec![routed(0.2), copied(), late, spliced], vec![routed(0.8), copied(), refused]];
        let readers = Run::of(Variant::Spliced, [(Value, 1e6), (Peak, 2e6), (Amount, 10.0), (Seconds, 10.1)]);
        let mut results = Results::new(Part::Wan, 2);
        results.add(Case { section: Section::Path, row: ROW.to_owned(), rounds });
        results.add(Case { section: Section::Readers, row: String::new(), rounds: vec![vec![readers]] });
        results
    }

    #[test]
    fn ratios_are_those_within_rounds() {
        let results = paths();
        let line = |variant| results.line(Section::Path, ROW, variant).unwrap();
        let range = |s: Option<&Spread>| s.map(|s| (s.low, s.high));
        let default = line(Variant::Default);
        assert_eq!(range(default.ratio(Value)), Some((1.0, 0.6 / 0.2)));
        assert_eq!(range(default.spread(ToSlower)), Some((1.0, 0.6 / 0.4)));
        assert_eq!(what_happened(default), "1 RTO, 3 needless, 0.25 spliced, path");
        assert_eq!(decision(default), "spliced 25 % of it (`path`)");
        assert_eq!(time_and_ratios(line(Variant::Spliced)), ">20: 100.00 / 50.00");
        assert_eq!(what_happened(line(Variant::Spliced)), "1 of 1 cut off");
        assert!(results.line(Section::Path, ROW, Variant::Haproxy).is_none());
    }

    #[test]
    fn the_report_has_a_row_for_each_cell_and_survives_a_file() {
        let results = paths();
        let text = full(&results);
        for part in [
            "| path and object | routed | copied | spliced at once | default policy |",
            "| c100, 1 MB, bbr | 0.500 | 0.400: 1.25 |",
            "| spliced at once | 10 | 2000 | 1000 | 10.1 |",
        ] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
        let json = serde_json::to_string(&results).unwrap();
        assert_eq!(full(&serde_json::from_str(&json).unwrap()), text);
    }
}
