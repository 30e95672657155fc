//! Tables for standard output, beside the JSON, and in the documents.
//! They are generated from [`Results`], never written by hand.

use super::{
    machine::Machine,
    ratio,
    results::{Figure, Line, Part, Results},
    segment,
    stats::Spread,
    subject::{Connection, Kind, Map, Subject, plural},
    threshold::Threshold,
    variant::Variant,
    wan::{LIMIT, REQUESTS},
};
use std::fmt::Write;

/// What a cell of a table shows of a line.
type Show<'a> = &'a dyn Fn(&Line) -> String;

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
    let mut text = format!("## {} {}\n\n{}", r.part.title(), r.date, machine(&r.machine));
    for peer in r.machine.peers.iter().filter(|_| r.part == Part::Results) {
        let _ = write!(text, ";\n{peer}");
    }
    text + ".\n\n"
}

/// The machine, in two lines.
fn machine(m: &Machine) -> String {
    format!("{} CPUs ({}), {} MB; Linux {};\nlongsplice {}", m.cpus, m.cpu, m.memory_mb, m.kernel, m.longsplice)
}

/// The tables of all that was measured. `brief`: only those that matter most.
pub fn tables(r: &Results, brief: bool) -> String {
    let share = |what: &str| format!("Share of these {what} that were spliced:");
    let rounds = format!("median of {} rounds, and spread", r.rounds);
    let relative = format!("and the ratio to IP forwarding ({rounds})");
    let short = "Short transfers on one CPU, microseconds per connection, and the ratio to copying";
    let http = "over persistent connections to reverse proxies, and the ratio to HAProxy";
    let body = "HTTP replies on one CPU, microseconds per request, and the ratio to copying";
    let flood = "Nanoseconds of one CPU per small packet, generator and sink included, and the ratio to IP forwarding";
    let datagrams = "Datagrams through SOCKS on one CPU, microseconds each";
    let requests = if r.part == Part::Wan { format!("; of {REQUESTS} requests each over HTTP") } else { String::new() };
    let times = match r.part {
        Part::Tpot => "Seconds from connecting until the last byte has arrived, and the ratio to routing",
        _ => "Seconds until the last byte has arrived, and the ratios to routing and to copying",
    };
    let happened = "What happened in the worst round: transfers cut off after 20 seconds, the sender's retransmission timeouts \
                    (RTO), segments that it sent again, segments that any host received in vain, the share of bytes that \
                    were spliced, and why they were not:";
    let value = |l: &Line| with_ratio(l, Figure::Value, None);
    let cpu = |digits| move |l: &Line| with_ratio(l, Figure::Cpu, Some(digits));
    let spliced = |l: &Line| l.spread(Figure::Spliced).map_or(String::new(), |s| s.text(2));
    let alone = |l: &Line| with_ratio(l, Figure::Alone, None);
    let packet = |l: &Line| l.get(Figure::Packet).map_or(String::new(), |bytes| format!("{bytes:.0}"));
    let rate = |l: &Line| match l.subject {
        Subject::Path(cell) => format!("{:.0}", cell.size.0 as f64 / l.value() / 1e3),
        _ => String::new(),
    };
    let by = |kind, head: String, cell: Show<'_>| by_variant(r, kind, &head, cell);
    let relative_cpu = |what: &str| format!("{what}, and the ratio to IP forwarding:");
    let sections = [
        (true, segments(r, &rounds)),
        (true, ratios(r, &rounds)),
        (true, by(Kind::Bulk, format!("Throughput, Gbit/s, {relative}:"), &value)),
        (false, by(Kind::Bulk, relative_cpu("CPU seconds per GB, end hosts included"), &cpu(3))),
        (
            false,
            by(Kind::Bulk, "Packets from the server as the forwarder handled them, bytes on average:".into(), &packet),
        ),
        (
            true,
            by(
                Kind::Response,
                format!("Response time, milliseconds from connecting to the last byte, {relative}:"),
                &value,
            ),
        ),
        (
            false,
            by(Kind::Response, format!("Milliseconds from the request to the last byte, {relative}:"), &|l| {
                with_ratio(l, Figure::Request, None)
            }),
        ),
        (false, by(Kind::Response, share("connections"), &spliced)),
        (true, by(Kind::Rate, format!("Connections per second, of eight clients, {relative}:"), &value)),
        (false, by(Kind::Rate, relative_cpu("CPU microseconds per connection"), &cpu(0))),
        (false, by(Kind::Rate, share("connections"), &spliced)),
        (false, by(Kind::Short, format!("{short} ({rounds}):"), &value)),
        (false, by(Kind::Short, format!("{short}, CPU time:"), &cpu(0))),
        (false, by(Kind::Short, share("connections"), &spliced)),
        (true, threshold(r, Kind::Short, "Splicing", "splice after")),
        (true, by(Kind::Http, format!("HTTP requests per second, {http} ({rounds}):"), &value)),
        (false, by(Kind::Http, format!("CPU microseconds per HTTP request, {http}:"), &cpu(0))),
        (false, by(Kind::Http, share("replies"), &spliced)),
        (false, by(Kind::Body, format!("{body} ({rounds}):"), &value)),
        (false, by(Kind::Body, format!("{body}, CPU time:"), &cpu(0))),
        (false, by(Kind::Body, share("replies"), &spliced)),
        (true, threshold(r, Kind::Body, "Splicing a body", "splice bodies from")),
        (true, switch(r)),
        (true, memory(r)),
        (true, by(Kind::Flood, format!("{flood} ({rounds}):"), &value)),
        (
            true,
            by(Kind::Datagrams, format!("{datagrams}, end hosts included, and the ratio to Dante ({rounds}):"), &value),
        ),
        (false, by(Kind::Datagrams, format!("{datagrams}, forwarder alone:"), &alone)),
        (false, million(r)),
        (true, by(Kind::Path, format!("{times} (medians of {} rounds{requests}):", r.rounds), &time_and_ratios)),
        (false, by(Kind::Path, "Rate, KB per second:".into(), &rate)),
        (false, if is_there(r, Kind::Path) { by(Kind::Path, happened.into(), &what_happened) } else { String::new() }),
        (true, verdict(r)),
        (false, slow_readers(r)),
        (false, unsplices(r)),
        (false, remarks(r)),
    ];
    sections.into_iter().filter(|(matters, _)| *matters || !brief).map(|(_, text)| text).collect()
}

fn is_there(r: &Results, kind: Kind) -> bool {
    r.lines_of(kind).next().is_some()
}

/// A figure, with its ratio to the base. Without a number of digits, it has those of the subject.
fn with_ratio(l: &Line, figure: Figure, digits: Option<usize>) -> String {
    let Some(value) = l.get(figure) else { return String::new() };
    let number = digits.map_or_else(|| l.subject.number(value), |digits| format!("{value:.digits$}"));
    match l.ratio(figure).filter(|_| l.variant != l.subject.base()) {
        Some(ratio) => format!("{number}: {}", ratio.text(2)),
        None => number,
    }
}

/// A table with a row for each subject and a column for each variant that has a cell.
fn by_variant(r: &Results, kind: Kind, head: &str, cell: Show<'_>) -> String {
    let (subjects, mut variants) = (r.subjects(kind), r.variants(kind));
    if kind != Kind::Path {
        variants.retain(|v| r.lines_of(kind).any(|l| l.variant == *v && !cell(l).is_empty()));
    }
    if variants.is_empty() {
        return String::new();
    }
    let rows = subjects.iter().map(|subject| {
        let refused = |v| r.lines.iter().any(|l| (l.subject, l.variant) == (*subject, v) && l.refused.is_some());
        let cells = variants.iter().map(|v| match r.line(*subject, *v) {
            Some(line) => cell(line),
            None if refused(*v) => "refused".to_owned(),
            None => String::new(),
        });
        std::iter::once(subject.label()).chain(cells).collect()
    });
    let titles: Vec<&str> = variants.iter().map(|v| kind.title(*v)).collect();
    table(head, kind.first_column(), &titles, rows.collect())
}

/// A table with a row for each line, which `name` names, and these columns.
fn by_line(r: &Results, kind: Kind, head: &str, name: Show<'_>, columns: &[(&str, Show<'_>)]) -> String {
    let rows =
        r.lines_of(kind).map(|l| std::iter::once(name(l)).chain(columns.iter().map(|(_, cell)| cell(l))).collect());
    let titles: Vec<&str> = columns.iter().map(|(title, _)| *title).collect();
    table(head, kind.first_column(), &titles, rows.collect())
}

/// Shows the median of a figure with these digits, divided by a unit; nothing if it is unknown.
fn median(figure: Figure, digits: usize, unit: f64) -> impl Fn(&Line) -> String {
    move |l| l.get(figure).map_or(String::new(), |n| format!("{:.digits$}", n / unit))
}

/// Formats a table; empty without rows. The first cell of a row is its head.
pub fn table(head: &str, first: &str, columns: &[&str], rows: Vec<Vec<String>>) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut text = format!("{}\n\n| {first} |", wrap(head).join("\n"));
    columns.iter().for_each(|c| text += &format!(" {c} |"));
    text += "\n| --- |";
    text += &" ---: |".repeat(columns.len());
    for row in rows {
        text += "\n|";
        row.iter().for_each(|cell| text += &if cell.is_empty() { " |".to_owned() } else { format!(" {cell} |") });
    }
    text + "\n\n"
}

/// Table II of the connection-splicing paper.
fn segments(r: &Results, rounds: &str) -> String {
    let subjects = r.subjects(Kind::Segment);
    let columns = subjects.iter().flat_map(|subject| {
        let what = format!("{}, us", subject.label());
        [what, "to IP forwarding".to_owned(), "forwarder alone, us".to_owned(), "speedup".to_owned()]
    });
    let rows = r.variants(Kind::Segment).into_iter().map(|v| {
        let cells = subjects.iter().flat_map(|subject| {
            let line = r.line(*subject, v);
            let of = |figure| line.and_then(|l| l.spread(figure)).filter(|_| v != Variant::Direct);
            [
                line.map_or(String::new(), |l| subject.number(l.value())),
                line.and_then(|l| l.ratio(Figure::Value)).map_or(String::new(), |ratio| ratio.text(2)),
                of(Figure::Alone).map_or(String::new(), |alone| alone.text(1)),
                of(Figure::AloneToCopy).map_or(String::new(), Spread::inverse),
            ]
        });
        std::iter::once(v.to_string()).chain(cells).collect()
    });
    let head = format!(
        "Cost of a segment, by round trips with everything on one CPU ({rounds}). Alone: without what back to back takes in \
         the same round. Speedup: of the forwarder alone, over copying. \"Over\": what a forwarder takes alone is not \
         distinguishable from nothing in some rounds."
    );
    let columns: Vec<String> = columns.collect();
    let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
    table(&head, Kind::Segment.first_column(), &columns, rows.collect())
}

/// Table III of the paper.
fn ratios(r: &Results, rounds: &str) -> String {
    if !is_there(r, Kind::Ratio) {
        return String::new();
    }
    let each = ratio::SEGMENTS.into_iter().flat_map(|segments| ratio::VARIANTS.map(|variant| (segments, variant)));
    let rows = each.map(|(segments, variant)| {
        let subject = Subject::Ratio { segments };
        let line = r.line(subject, variant);
        let per_ack = line.and_then(|l| l.get(Figure::PerAck));
        let mb = |value: Option<f64>| value.map_or(String::new(), |n| format!("{n:.0}"));
        vec![
            subject.label(),
            variant.to_string(),
            mb(ratio::derived_alone(r, variant, segments as f64)),
            mb(ratio::derived(r, variant, segments as f64)),
            per_ack.map_or(String::new(), |p| format!("{p:.1}:1")),
            mb(per_ack.and_then(|p| ratio::derived(r, variant, p))),
            line.map_or(String::new(), |l| subject.number(l.value())),
            line.and_then(|l| l.ratio(Figure::Value)).map_or(String::new(), |ratio| ratio.text(2)),
        ]
    });
    let columns = [
        "variant",
        "derived, forwarder alone",
        "derived",
        "occurred",
        "derived for that",
        "measured",
        "to IP forwarding",
    ];
    let head = format!(
        "Throughput by the ratio of data to acknowledgements, MB per second of CPU time, everything on one CPU ({rounds}):"
    );
    table(&head, Kind::Ratio.first_column(), &columns, rows.collect())
}

fn switch(r: &Results) -> String {
    let spread = |figure| move |l: &Line| l.spread(figure).map_or(String::new(), |s: &Spread| s.text(1));
    let head = "Switching, microseconds (median, and the range of eight in ten):";
    let columns: [(&str, Show<'_>); 7] = [
        ("splices", &median(Figure::Amount, 0, 1.0)),
        ("freeze", &spread(Figure::Freeze)),
        ("drain", &spread(Figure::Drain)),
        ("commit", &spread(Figure::Commit)),
        ("unsplice", &spread(Figure::Unsplice)),
        ("release", &spread(Figure::Release)),
        ("recreate", &spread(Figure::Recreate)),
    ];
    by_line(r, Kind::Switch, head, &|l| l.subject.label(), &columns) + &pays(r)
}

/// Microseconds of each switch of an idle connection: on a busy one the hosts determine the time of the drain.
pub fn costs(l: &Line) -> Vec<(String, f64)> {
    let sum = |all: &[Figure]| all.iter().filter_map(|figure| l.get(*figure)).sum::<f64>();
    let splice = sum(&[Figure::Freeze, Figure::Drain, Figure::Commit]);
    let release = splice + sum(&[Figure::Release]);
    let named = |name: &str, micros| (name.to_owned(), micros);
    match l.subject {
        Subject::Switch { connection: Connection::Idle } => {
            vec![named("splice", splice), named("splice and unsplice", splice + sum(&[Figure::Unsplice]))]
        }
        Subject::Switch { connection: Connection::Released } => vec![
            named("splice and release", release),
            named("splice, release and recreate", release + sum(&[Figure::Recreate])),
        ],
        _ => Vec::new(),
    }
}

/// Numbers of segments that save as much time as a switch takes: its calls by themselves, on an idle connection, and all
/// that splicing costs a short connection.
fn pays(r: &Results) -> String {
    let saved = segment::BYTES.map(|bytes| {
        let of = |v| r.line(Subject::Segment { bytes }, v).map(Line::value);
        Some(of(Variant::Copy)? - of(Variant::Spliced)?).filter(|micros| *micros > 0.0)
    });
    let cpu = |v| r.line(Subject::Short { bytes: 1 }, v)?.get(Figure::Cpu);
    let all = cpu(Variant::Spliced).zip(cpu(Variant::Copy)).map(|(spliced, copy)| spliced - copy);
    let all = all.filter(|micros| *micros > 0.0).map(|micros| ("all that a splice costs".to_owned(), micros));
    let rows = r.lines_of(Kind::Switch).flat_map(costs).chain(all).map(|(what, micros)| {
        let segments = saved.map(|s| s.map_or(String::new(), |s| format!("{:.1}", micros / s)));
        [vec![what, format!("{micros:.1}")], segments.to_vec()].concat()
    });
    let [small, large] = segment::BYTES.map(|bytes| format!("segments of {}", plural(bytes, "byte")));
    let head = "What a switch costs, and how many segments save as much. First the calls by themselves; last, all that a \
                spliced connection of one byte takes more than a copied one (short transfers), which is from when on splicing \
                pays:";
    table(head, "switch", &["us", &small, &large], rows.collect())
}

fn memory(r: &Results) -> String {
    if !is_there(r, Kind::Memory) {
        return String::new();
    }
    let head = "Memory, bytes per connection. The last column is the kernel's memory for the forwarder's queues while the \
                server sends all it can and the client reads nothing; all others are of idle connections:";
    let columns: [(&str, Show<'_>); 5] = [
        ("connections", &median(Figure::Amount, 0, 1.0)),
        ("in processes", &median(Figure::Resident, 0, 1.0)),
        ("kernel's sockets", &median(Figure::Value, 0, 1.0)),
        ("of these, the forwarder's", &median(Figure::Forwarder, 0, 1.0)),
        ("queues, if the client does not read", &median(Figure::Queued, 0, 1.0)),
    ];
    let per = |map| {
        let line = r.line(Subject::Table { map }, Variant::Spliced);
        line.and_then(|l| Some(l.get(Figure::Tables)? / l.get(Figure::Entries)?.max(1.0))).unwrap_or_default()
    };
    // A path entry for each direction, and before the release a leg record for each side.
    let (released, parked) = (2.0 * per(Map::Paths4), 2.0 * (per(Map::Paths4) + per(Map::Legs)));
    by_line(r, Kind::Memory, head, &|l| l.variant.to_string(), &columns)
        + &format!(
            "Tables of the data path, allocated at the start: {released:.0} bytes per released IPv4 flow, {parked:.0} per \
             parked one.\n\n"
        )
}

fn million(r: &Results) -> String {
    let Some(l) = r.lines_of(Kind::Million).next() else { return String::new() };
    let rows = [
        ("opened per second, hosts included", Figure::Value, 1.0, 0),
        ("resident in the process, bytes per connection", Figure::Process, 1.0, 0),
        ("resident in the process, MB", Figure::Resident, 1e6, 0),
        ("tables of the data path, bytes per flow", Figure::Tables, 1.0, 0),
        ("kernel memory of both hosts' sockets, bytes per connection", Figure::Slab, 1.0, 0),
        ("of them drawn at random, with all bytes right", Figure::Checked, 1.0, 0),
        ("round trip, drawn from the first few, microseconds on one CPU", Figure::MicrosFew, 1.0, 1),
        ("round trip, drawn from all, microseconds on one CPU", Figure::MicrosAll, 1.0, 1),
    ];
    let rows = rows.map(|(what, figure, unit, digits)| vec![what.to_owned(), median(figure, digits, unit)(l)]);
    let head = format!("{}, spliced and released:", l.subject.label());
    table(&head, Kind::Million.first_column(), &["figure"], rows.to_vec())
}

/// The time of a transfer, `0.316`, or `>20` if most rounds were cut off.
pub fn time(l: &Line) -> String {
    if l.value() >= LIMIT.as_secs_f64() { format!(">{}", LIMIT.as_secs()) } else { l.subject.number(l.value()) }
}

/// The time of a transfer with its ratios to routing and to copying.
fn time_and_ratios(l: &Line) -> String {
    let ratios = match l.variant {
        Variant::IpForward => [None, None],
        Variant::Copy => [l.ratio(Figure::Value), None],
        _ => [l.ratio(Figure::Value), l.spread(Figure::ToCopied)],
    };
    let ratios: Vec<String> = ratios.into_iter().flatten().map(|r| format!("{:.2}", r.median)).collect();
    if ratios.is_empty() { time(l) } else { format!("{}: {}", time(l), ratios.join(" / ")) }
}

/// The note of a run that was cut off.
pub const CUT_OFF: &str = "cut off";

/// Why a connection was not spliced.
fn refusals(l: &Line) -> impl Iterator<Item = &String> {
    l.notes.keys().filter(|note| *note != CUT_OFF)
}

/// What longsplice decided, in words.
pub fn decision(l: &Line) -> String {
    let why: Vec<_> = refusals(l).map(|why| format!("`{why}`")).collect();
    let why = if why.is_empty() { String::new() } else { format!(" ({})", why.join(", ")) };
    match l.get(Figure::Spliced) {
        None => String::new(),
        Some(0.0) => format!("copied{why}"),
        Some(part) => format!("spliced {:.0} % of it{why}", part * 100.0),
    }
}

/// What happened to the connection of a transfer; empty if nothing did.
pub fn what_happened(l: &Line) -> String {
    let late =
        l.notes.get(CUT_OFF).map(|late| format!("{late} of {} {CUT_OFF}", l.spread(Figure::Value).map_or(0, |s| s.n)));
    let counts = [
        (Figure::Timeouts, "RTO"),
        (Figure::Retransmitted, "again"),
        (Figure::Needless, "needless"),
        (Figure::Dropped, "dropped"),
    ];
    let counts = counts.map(|(count, name)| (l.worst(count), name)).into_iter().filter(|(n, _)| *n > 0);
    let mut parts: Vec<String> = late.into_iter().chain(counts.map(|(n, name)| format!("{n} {name}"))).collect();
    if let Some(spliced) = l.get(Figure::Spliced).filter(|_| l.variant != Variant::Copy) {
        parts.push(format!("{spliced:.2} spliced"));
        parts.extend(refusals(l).cloned());
    }
    parts.join(", ")
}

/// How the default policy does, compared with the slower of routing and copying.
fn verdict(r: &Results) -> String {
    let lines = r.lines_of(Kind::Path).filter(|l| l.variant == Variant::Default);
    let lines: Vec<(&Line, f64)> = lines.filter_map(|l| Some((l, l.get(Figure::ToSlower)?))).collect();
    let Some((worst, most)) = lines.iter().max_by(|a, b| a.1.total_cmp(&b.1)) else { return String::new() };
    let median = Spread::of(lines.iter().map(|(_, ratio)| *ratio)).map_or(0.0, |s| s.median);
    let lossless = || {
        let cell = |l: &Line| if let Subject::Path(cell) = l.subject { Some(cell) } else { None };
        lines.iter().map(|(l, _)| *l).filter(move |l| cell(l).is_some_and(|cell| cell.loss == 0.0))
    };
    let copied = |l: &Line| r.line(l.subject, Variant::Copy).map_or(0, |copied| copied.worst(Figure::Needless));
    let timeouts = lossless().map(|l| l.worst(Figure::Timeouts)).sum();
    let needless = lossless().map(|l| l.worst(Figure::Needless).saturating_sub(copied(l))).sum();
    let text = format!(
        "The default policy takes {median:.2} times as long as the slower of routing and copying in the median of {} \
         rows, and {most:.2} times at most ({}). In the rows without loss, its worst rounds have {}, \
         and {} in vain more than those of copying, all rows together.{}",
        lines.len(),
        worst.subject.label(),
        plural(timeouts, "timeout"),
        plural(needless, "segment"),
        share_towards_near_hosts(r),
    );
    wrap(&text).join("\n") + "\n\n"
}

/// How much the default policy splices where a splice does no harm, by bytes.
fn share_towards_near_hosts(r: &Results) -> String {
    let default = r.lines_of(Kind::Path).filter(|l| l.variant == Variant::Default);
    let shares = default.filter_map(|l| match l.subject {
        Subject::Path(cell) if cell.is_towards_near_host() => Some((cell.size.0 as f64, l.get(Figure::Spliced)?)),
        _ => None,
    });
    let (all, spliced) = shares.fold((0.0, 0.0), |sum, (size, share)| (sum.0 + size, sum.1 + size * share));
    if all == 0.0 {
        return String::new();
    }
    format!(
        " Of the bytes sent to a near host by a far one, or over 2 ms at most, it splices {:.2}: all but the first \
         ones of each connection that is not HTTP.",
        spliced / all
    )
}

fn slow_readers(r: &Results) -> String {
    let head = "Memory of the forwarder's sockets while clients read 1 MB per second of 10 MB, 50 ms away:";
    let columns: [(&str, Show<'_>); 4] = [
        ("clients", &median(Figure::Amount, 0, 1.0)),
        ("KB each, at most", &median(Figure::Peak, 0, 1e3)),
        ("in the median", &median(Figure::Value, 0, 1e3)),
        ("seconds", &median(Figure::Seconds, 1, 1.0)),
    ];
    by_line(r, Kind::Readers, head, &|l| Kind::Readers.title(l.variant).to_owned(), &columns)
}

fn unsplices(r: &Results) -> String {
    let head = "An unsplice half-way through a transfer that was spliced at once:";
    let worst = |count| move |l: &Line| l.spread(count).map_or(String::new(), |s: &Spread| format!("{:.0}", s.high));
    let columns: [(&str, Show<'_>); 5] = [
        ("without, seconds", &median(Figure::Value, 2, 1.0)),
        ("with, seconds", &median(Figure::Unsplice, 2, 1.0)),
        ("packets beyond the window", &worst(Figure::BeyondWindow)),
        ("sent again", &worst(Figure::Retransmitted)),
        ("RTO", &worst(Figure::Timeouts)),
    ];
    by_line(r, Kind::Unsplice, head, &|l| l.subject.label(), &columns)
}

fn threshold(r: &Results, kind: Kind, what: &str, advice: &str) -> String {
    let Some(Threshold { by_time, by_cpu, recommended }) =
        r.thresholds.iter().find(|(k, _)| *k == kind).map(|(_, t)| t)
    else {
        return String::new();
    };
    let mut text = format!("{what} takes less time {by_time}, less CPU {by_cpu}. ");
    text += &match recommended {
        Some(n) => format!("Recommended: {advice} {n} bytes."),
        None => "These rounds cannot tell from how many bytes on; more may.".to_owned(),
    };
    wrap(&text).join("\n") + "\n\n"
}

fn remarks(r: &Results) -> String {
    let mut text = String::new();
    let [disturbed, all] = r.disturbed;
    if disturbed > 0 {
        let _ = writeln!(text, "{disturbed} of {all} rounds were disturbed and do not count.");
    }
    for subject in &r.all_disturbed {
        let _ = writeln!(text, "All rounds were disturbed, and counted nevertheless: {}.", subject.title());
    }
    for (line, why) in r.lines.iter().filter_map(|l| Some((l, l.refused.as_ref()?))) {
        let _ = writeln!(text, "Refused: {}: {}: {why}.", line.subject.title(), line.variant);
    }
    for l in r.lines_of(Kind::Switch).filter(|l| !l.notes.is_empty()) {
        let _ = writeln!(text, "Disturbed: {}.", l.subject.title());
    }
    for l in r.lines_of(Kind::Memory).filter(|l| !l.notes.is_empty()) {
        let _ = writeln!(text, "Disturbed: memory, {}.", l.variant);
    }
    for skipped in &r.skipped {
        let _ = writeln!(text, "{}", wrap(&format!("Not measured: {skipped}.")).join("\n"));
    }
    if !text.is_empty() {
        text.push('\n');
    }
    text
}

/// Wraps prose to the line width allowed in documents.
pub fn wrap(text: &str) -> Vec<String> {
    const WIDTH: usize = 116;
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut().filter(|line| line.len() + word.len() < WIDTH) {
            Some(line) => {
                line.push(' ');
                line.push_str(word);
            }
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::{
        super::results::{Case, Round, Run},
        *,
    };
    use crate::cell::Cell;

    #[test]
    fn lines_are_wrapped_between_words() {
        let lines = wrap(&"word ".repeat(50));
        assert!(lines.len() > 1 && lines.iter().all(|l| l.len() <= 116 && !l.ends_with(' ')), "{lines:?}");
        assert_eq!(lines.join(" "), "word ".repeat(50).trim_end());
    }

    #[test]
    fn tables_have_a_cell_for_every_column() {
        let text = table("Head:", "a", &["b", "c"], vec![vec!["1".into(), String::new(), "3".into()]]);
        assert_eq!(text, "Head:\n\n| a | b | c |\n| --- | ---: | ---: |\n| 1 | | 3 |\n\n");
        assert_eq!(table("Head:", "a", &[], Vec::new()), "", "no table without rows");
    }

    fn paths() -> Results {
        let run = |variant, seconds, more: &[(Figure, f64)], note: Option<&str>| {
            let mut run = Run::of(variant, [(Figure::Value, seconds)].iter().chain(more).copied());
            run.notes.extend(note.map(str::to_owned));
            run
        };
        let routed = |seconds| run(Variant::IpForward, seconds, &[], None);
        let copied = || run(Variant::Copy, 0.4, &[], None);
        let spliced = run(Variant::Default, 0.6, &[(Figure::Spliced, 0.5), (Figure::Timeouts, 1.0)], None);
        let refused = run(Variant::Default, 0.8, &[(Figure::Spliced, 0.0), (Figure::Needless, 3.0)], Some("path"));
        let late = run(Variant::Spliced, 20.0, &[], Some(CUT_OFF));
        let rounds = [vec![routed(0.2), copied(), spliced, late], vec![routed(0.8), copied(), refused]];
        let rounds = rounds.map(|runs| Round { runs }).to_vec();
        let figures = [(Figure::Value, 1e6), (Figure::Peak, 2e6), (Figure::Amount, 10.0), (Figure::Seconds, 10.1)];
        let readers = Round { runs: vec![Run::of(Variant::Spliced, figures)] };
        let cases = [
            Case { subject: Subject::Path(Cell::BASE), rounds },
            Case { subject: Subject::Readers, rounds: vec![readers] },
        ];
        Results { rounds: 2, ..Results::of(Part::Wan, &cases) }
    }

    #[test]
    fn ratios_are_those_within_rounds() {
        let results = paths();
        let line = |variant| results.line(Subject::Path(Cell::BASE), variant).unwrap();
        let range = |s: Option<&Spread>| s.map(|s| (s.low, s.high));
        let default = line(Variant::Default);
        assert_eq!(range(default.ratio(Figure::Value)), Some((1.0, 0.6 / 0.2)));
        assert_eq!(range(default.spread(Figure::ToSlower)), Some((1.0, 0.6 / 0.4)));
        assert_eq!(what_happened(default), "1 RTO, 3 needless, 0.25 spliced, path");
        assert_eq!(time_and_ratios(line(Variant::Spliced)), ">20: 100.00 / 50.00");
        assert_eq!(what_happened(line(Variant::Spliced)), "1 of 1 cut off");
        assert!(results.line(Subject::Path(Cell::BASE), Variant::Haproxy).is_none());
    }

    #[test]
    fn the_report_has_a_row_for_each_cell_and_survives_a_file() {
        let mut results = paths();
        let text = full(&results).replace('\n', " ");
        for part in [
            "| path and object | routed | copied | spliced at once | default policy |",
            "| c100, 1 MB, bbr | 0.500 | 0.400: 1.25 |",
            "1.25 times at most (c100, 1 MB, bbr)",
            "have 1 timeout, and 3 segments in vain",
            "| spliced at once | 10 | 2000 | 1000 | 10.1 |",
        ] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
        let json = serde_json::to_string(&results).unwrap();
        assert_eq!(full(&serde_json::from_str(&json).unwrap()), full(&results));
        results.lines.clear();
        assert!(!full(&results).contains("times at most"));
    }
}
