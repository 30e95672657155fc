//! Tables for standard output, beside the JSON, and in the README.
//! They are generated from [`Results`], never written by hand.

use super::{
    machine::Machine,
    ratio,
    results::{Line, Refused, Results, Summary, SwitchCase, Threshold},
    segment,
    stats::Spread,
    subject::{Kind, Subject},
    variant::Variant,
};
use std::fmt::Write;

/// The whole report, with the set-up.
pub fn full(results: &Results) -> String {
    let mut text = format!("## Measured on {}\n\n{}", results.date, machine(&results.machine));
    for peer in &results.machine.peers {
        let _ = write!(text, ";\n{peer}");
    }
    text += ".\n\n";
    text += &tables(results);
    text += "### Set-up\n\n";
    for line in [&results.setup.network, &results.setup.disturbed].into_iter().chain(&results.setup.variants) {
        let _ = writeln!(text, "- {}", wrap(line).join("\n  "));
    }
    for (name, config) in &results.setup.configurations {
        let _ = writeln!(text, "\nConfiguration of {name}:\n\n```text\n{config}```");
    }
    text
}

/// The machine, in two lines.
pub fn machine(m: &Machine) -> String {
    format!("{} CPUs ({}), {} MB; Linux {};\nlongsplice {}", m.cpus, m.cpu, m.memory_mb, m.kernel, m.longsplice)
}

fn with_ratio(l: &Line) -> String {
    match l.variant == l.subject.base() {
        true => l.subject.number(l.value.median),
        false => format!("{}: {}", l.subject.number(l.value.median), l.ratio.text(2)),
    }
}

fn cpu_with_ratio(digits: usize) -> impl Fn(&Line) -> String {
    move |l| match (l.variant == l.subject.base(), &l.cpu_ratio) {
        (false, Some(ratio)) => format!("{:.digits$}: {}", l.cpu.median, ratio.text(2)),
        _ => format!("{:.digits$}", l.cpu.median),
    }
}

/// What segments and connections cost.
pub fn costs(s: &Summary, rounds: usize) -> String {
    let rounds = format!("median of {rounds} rounds, and spread");
    let relative = format!("and the ratio to IP forwarding ({rounds})");
    segments(s, &rounds) + &rates(s, &relative) + &bulks(s, &relative)
}

fn bulks(s: &Summary, relative: &str) -> String {
    let table = |head: &str, cell: &dyn Fn(&Line) -> String| by_variant(s, Kind::Bulk, head, cell);
    let packet = |l: &Line| l.packet.map_or(String::new(), |bytes| format!("{:.0}", bytes.median));
    table(&format!("Throughput, Gbit/s, {relative}:"), &with_ratio)
        + &table("CPU seconds per GB, end hosts included, and the ratio to IP forwarding:", &cpu_with_ratio(3))
        + &table("Packets from the server as the forwarder handled them, bytes on average:", &packet)
}

fn rates(s: &Summary, relative: &str) -> String {
    let table = |head: &str, cell: &dyn Fn(&Line) -> String| by_variant(s, Kind::Rate, head, cell);
    let cpu = "CPU microseconds per connection, and the ratio to IP forwarding:";
    table(&format!("Connections per second, of eight clients, {relative}:"), &with_ratio)
        + &table(cpu, &cpu_with_ratio(0))
        + &table("Share of these connections that were spliced:", &share)
}

fn share(l: &Line) -> String {
    l.spliced.map_or(String::new(), |s| s.text(2))
}

/// All tables, without the set-up.
fn tables(results: &Results) -> String {
    let s = &results.summary;
    let rounds = format!("median of {} rounds, and spread", results.setup.rounds);
    let mut text = segments(s, &rounds);
    text += &ratios(s, &rounds);
    let relative = format!("and the ratio to IP forwarding ({rounds})");
    text += &bulks(s, &relative);
    let mut table = |kind, head: &str, cell: &dyn Fn(&Line) -> String| {
        text += &by_variant(s, kind, head, cell);
    };
    table(
        Kind::Response,
        &format!("Response time, milliseconds from connecting to the last byte, {relative}:"),
        &with_ratio,
    );
    let from_request = |l: &Line| match (l.request, l.request_ratio) {
        (Some(ms), Some(ratio)) if l.variant != l.subject.base() => {
            format!("{}: {}", l.subject.number(ms.median), ratio.text(2))
        }
        (ms, _) => ms.map_or(String::new(), |ms| l.subject.number(ms.median)),
    };
    table(Kind::Response, &format!("Milliseconds from the request to the last byte, {relative}:"), &from_request);
    table(Kind::Response, "Share of these connections that were spliced:", &share);
    text += &rates(s, &relative);
    let mut table = |kind, head: &str, cell: &dyn Fn(&Line) -> String| {
        text += &by_variant(s, kind, head, cell);
    };
    let short = "Short transfers on one CPU, microseconds per connection, and the ratio to copying";
    table(Kind::Short, &format!("{short} ({rounds}):"), &with_ratio);
    table(Kind::Short, &format!("{short}, CPU time:"), &cpu_with_ratio(0));
    table(Kind::Short, "Share of these connections that were spliced:", &share);
    text += &threshold("Splicing", "splice after", &results.threshold);
    let mut table = |kind, head: &str, cell: &dyn Fn(&Line) -> String| {
        text += &by_variant(s, kind, head, cell);
    };
    let http = "over persistent connections to reverse proxies, and the ratio to HAProxy";
    table(Kind::Http, &format!("HTTP requests per second, {http} ({rounds}):"), &with_ratio);
    table(Kind::Http, &format!("CPU microseconds per HTTP request, {http}:"), &cpu_with_ratio(0));
    table(Kind::Http, "Share of these replies that were spliced:", &share);
    let body = "HTTP replies on one CPU, microseconds per request, and the ratio to copying";
    table(Kind::Body, &format!("{body} ({rounds}):"), &with_ratio);
    table(Kind::Body, &format!("{body}, CPU time:"), &cpu_with_ratio(0));
    table(Kind::Body, "Share of these replies that were spliced:", &share);
    text += &threshold("Splicing a body", "splice bodies from", &results.bodies);
    text += &switch(results);
    text += &memory(results);
    let flood = "Nanoseconds of one CPU per small packet, generator and sink included, and the ratio to IP forwarding";
    text += &by_variant(s, Kind::Flood, &format!("{flood} ({rounds}):"), &with_ratio);
    text += &remarks(results);
    text
}

/// A table with a row for each subject and a column for each variant that has a cell.
fn by_variant(s: &Summary, kind: Kind, head: &str, cell: &dyn Fn(&Line) -> String) -> String {
    let (subjects, mut variants) = (s.subjects(kind), s.variants(kind));
    variants.retain(|v| s.lines.iter().any(|l| (l.subject.kind(), l.variant) == (kind, *v) && !cell(l).is_empty()));
    if variants.is_empty() {
        return String::new();
    }
    let rows = subjects.iter().map(|subject| {
        let refused = |v| s.refused.iter().any(|r| (r.subject, r.variant) == (*subject, v));
        let cells = variants.iter().map(|v| match s.line(*subject, *v) {
            Some(line) => cell(line),
            None if refused(*v) => "refused".to_owned(),
            None => String::new(),
        });
        std::iter::once(subject.label()).chain(cells).collect()
    });
    let titles: Vec<String> = variants.iter().map(Variant::to_string).collect();
    table(head, first_column(kind), &titles, rows.collect())
}

fn first_column(kind: Kind) -> &'static str {
    match kind {
        Kind::Bulk => "packets",
        Kind::Response => "object",
        Kind::Http | Kind::Body => "reply",
        Kind::Flood => "random among",
        _ => "bytes",
    }
}

/// Formats a table; empty without rows. The first cell of a row is its head.
pub fn table(head: &str, first: &str, columns: &[String], rows: Vec<Vec<String>>) -> String {
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

/// Table II of the paper.
fn segments(s: &Summary, rounds: &str) -> String {
    let subjects = s.subjects(Kind::Segment);
    let columns = subjects.iter().flat_map(|subject| {
        let what = subject.label();
        [format!("{what}, us"), "to IP forwarding".to_owned(), "forwarder alone, us".to_owned(), "speedup".to_owned()]
    });
    let rows = s.variants(Kind::Segment).into_iter().map(|v| {
        let cells = subjects.iter().flat_map(|subject| {
            let line = s.line(*subject, v);
            let of = |of: &dyn Fn(&Line) -> Option<String>| line.and_then(of).unwrap_or_default();
            [
                of(&|l| Some(l.subject.number(l.value.median))),
                of(&|l| Some(l.ratio.text(2))),
                of(&|l| l.alone.filter(|_| v != Variant::Direct).map(|alone| alone.text(1))),
                of(&|l| l.alone_ratio.filter(|_| v != Variant::Direct).map(|ratio| ratio.inverse())),
            ]
        });
        std::iter::once(v.to_string()).chain(cells).collect()
    });
    let head = format!(
        "Cost of a segment, by round trips with everything on one CPU ({rounds}). Alone: without what back to back takes in \
         the same round. Speedup: of the forwarder alone, over copying. \"Over\": what a forwarder takes alone is not \
         distinguishable from nothing in some rounds."
    );
    table(&head, "variant", &columns.collect::<Vec<_>>(), rows.collect())
}

/// Table III of the paper.
fn ratios(s: &Summary, rounds: &str) -> String {
    if s.subjects(Kind::Ratio).is_empty() {
        return String::new();
    }
    let each = ratio::SEGMENTS.into_iter().flat_map(|segments| ratio::VARIANTS.map(|variant| (segments, variant)));
    let rows = each.map(|(segments, variant)| {
        let subject = Subject::Ratio { segments };
        let line = s.line(subject, variant);
        let per_ack = line.and_then(|l| l.per_ack);
        let mb = |value: Option<f64>| value.map_or(String::new(), |n| format!("{n:.0}"));
        vec![
            subject.label(),
            variant.to_string(),
            mb(ratio::derived_alone(s, variant, segments as f64)),
            mb(ratio::derived(s, variant, segments as f64)),
            per_ack.map_or(String::new(), |p| format!("{:.1}:1", p.median)),
            mb(per_ack.and_then(|p| ratio::derived(s, variant, p.median))),
            line.map_or(String::new(), |l| l.subject.number(l.value.median)),
            line.map_or(String::new(), |l| l.ratio.text(2)),
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
    table(&head, "ratio", &columns.map(str::to_owned), rows.collect())
}

fn switch(results: &Results) -> String {
    let of = |spread: &Option<Spread>| spread.map_or(String::new(), |s| s.text(1));
    let rows = results.switch.iter().map(|case| {
        let mut row = vec![case.connection.title().to_owned(), case.cycles.to_string()];
        row.extend([&case.freeze, &case.drain, &case.commit].map(|s| s.text(1)));
        row.extend([&case.unsplice, &case.release, &case.recreate].map(of));
        row
    });
    let columns = ["splices", "freeze", "drain", "commit", "unsplice", "release", "recreate"].map(str::to_owned);
    let head = "Switching, microseconds (median, and the range of eight in ten):";
    table(head, "connection", &columns, rows.collect()) + &pays(results)
}

/// Numbers of segments that save as much time as a switch takes: its calls by themselves, on an idle connection, and all
/// that splicing costs a short connection.
fn pays(results: &Results) -> String {
    let s = &results.summary;
    let saved = segment::BYTES.map(|bytes| {
        let of = |v| s.line(Subject::Segment { bytes }, v).map(|l| l.value.median);
        Some(of(Variant::Copy)? - of(Variant::Spliced)?).filter(|micros| *micros > 0.0)
    });
    let cpu = |v| s.line(Subject::Short { bytes: 1 }, v).map(|l| l.cpu.median);
    let all = cpu(Variant::Spliced).zip(cpu(Variant::Copy)).map(|(spliced, copy)| spliced - copy);
    let all = all.filter(|micros| *micros > 0.0).map(|micros| ("all that a splice costs".to_owned(), micros));
    let rows = results.switch.iter().flat_map(SwitchCase::costs).chain(all).map(|(what, micros)| {
        let segments = saved.map(|s| s.map_or(String::new(), |s| format!("{:.1}", micros / s)));
        [vec![what, format!("{micros:.1}")], segments.to_vec()].concat()
    });
    let columns = segment::BYTES.map(|bytes| format!("segments of {}", Subject::Segment { bytes }.label()));
    let columns = [vec!["us".to_owned()], columns.to_vec()].concat();
    let head = "What a switch costs, and how many segments save as much. First the calls by themselves; last, all that a \
                spliced connection of one byte takes more than a copied one (short transfers), which is from when on splicing \
                pays:";
    table(head, "switch", &columns, rows.collect())
}

fn memory(results: &Results) -> String {
    let Some(m) = &results.memory else { return String::new() };
    let bytes = |n: f64| format!("{n:.0}");
    let rows = m.held.iter().map(|h| {
        let name = if h.released { format!("{}, released", h.variant) } else { h.variant.to_string() };
        let resident = h.resident.map_or(String::new(), bytes);
        let of = |n: Option<f64>| n.map_or(String::new(), bytes);
        vec![name, h.connections.to_string(), resident, bytes(h.kernel), of(h.forwarder), of(h.queued)]
    });
    let columns = [
        "connections",
        "in processes",
        "kernel's sockets",
        "of these, the forwarder's",
        "queues, if the client does not read",
    ];
    let head = "Memory, bytes per connection. The last column is the kernel's memory for the forwarder's queues while the \
                server sends all it can and the client reads nothing; all others are of idle connections:";
    let mut text = table(head, "variant", &columns.map(str::to_owned), rows.collect());
    let _ = writeln!(
        text,
        "Tables of the data path, allocated at the start: {:.0} bytes per released IPv4 flow, {:.0} per parked one.\n",
        m.released_flow, m.parked_flow
    );
    text
}

fn threshold(what: &str, advice: &str, found: &Option<Threshold>) -> String {
    let Some(t) = found else { return String::new() };
    let mut text = format!("{what} takes less time {}, less CPU {}. ", t.by_time, t.by_cpu);
    text += &match t.recommended {
        Some(n) => format!("Recommended: {advice} {n} bytes."),
        None => "These rounds cannot tell from how many bytes on; more may.".to_owned(),
    };
    let mut text = wrap(&text).join("\n") + "\n";
    text.push('\n');
    text
}

fn remarks(results: &Results) -> String {
    let mut text = String::new();
    let [disturbed, all] = results.summary.disturbed;
    if disturbed > 0 {
        let _ = writeln!(text, "{disturbed} of {all} rounds were disturbed and do not count.");
    }
    for subject in &results.summary.all_disturbed {
        let _ = writeln!(text, "All rounds were disturbed, and counted nevertheless: {}.", subject.title());
    }
    for Refused { subject, variant, why } in &results.summary.refused {
        let _ = writeln!(text, "Refused: {}: {variant}: {why}.", subject.title());
    }
    for case in results.switch.iter().filter(|c| c.disturbed.is_some()) {
        let _ = writeln!(text, "Disturbed: switching, {}.", case.connection.title());
    }
    for held in results.memory.iter().flat_map(|m| &m.held).filter(|h| h.disturbed.is_some()) {
        let _ = writeln!(text, "Disturbed: memory, {}.", held.variant);
    }
    for skipped in &results.skipped {
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
    use super::*;

    #[test]
    fn lines_are_wrapped_between_words() {
        let lines = wrap(&"word ".repeat(50));
        assert!(lines.len() > 1 && lines.iter().all(|l| l.len() <= 116 && !l.ends_with(' ')), "{lines:?}");
        assert_eq!(lines.join(" "), "word ".repeat(50).trim_end());
    }

    #[test]
    fn tables_have_a_cell_for_every_column() {
        let text = table("Head:", "a", &["b".into(), "c".into()], vec![vec!["1".into(), String::new(), "3".into()]]);
        assert_eq!(text, "Head:\n\n| a | b | c |\n| --- | ---: | ---: |\n| 1 | | 3 |\n\n");
        assert_eq!(table("Head:", "a", &[], Vec::new()), "", "no table without rows");
    }
}
