//! Tables: on standard output, beside the JSON, and in the README. They are made from [`Results`], never by hand.

use super::{
    results::{Results, Summary},
    venue::{Packets, Variant},
};
use std::fmt::Write;

/// Everything, with the set-up.
pub fn full(results: &Results) -> String {
    let m = &results.machine;
    let mut text = format!(
        "## Measured on {}\n\n{} CPUs ({}), {} MB; Linux {};\nlongsplice {}; {}.\n\n",
        results.date,
        m.cpus,
        m.cpu,
        m.memory_mb,
        m.kernel,
        m.longsplice,
        m.haproxy.as_deref().unwrap_or("no HAProxy"),
    );
    text += &tables(results);
    text += "### Set-up\n\n";
    for line in [&results.setup.network, &results.setup.disturbed].into_iter().chain(&results.setup.variants) {
        let _ = writeln!(text, "- {}", wrap(line).join("\n  "));
    }
    for (name, config) in [("longsplice", &results.setup.longsplice), ("HAProxy", &results.setup.haproxy)] {
        let _ = writeln!(text, "\nConfiguration of {name}:\n\n```text\n{config}```");
    }
    text
}

/// All tables, without the set-up.
pub fn tables(results: &Results) -> String {
    let mut text = String::new();
    let s = &results.summary;
    let n = results.setup.rounds;
    if !s.bulk.is_empty() {
        let _ =
            writeln!(text, "Throughput, Gbit/s, and its ratio to IP forwarding (median of {n} rounds, and spread):\n");
        text += &bulk(s, |b| (format!("{:.1}", b.gbit.median), b.ratio.text(2)));
        let _ = writeln!(text, "\nCPU seconds per GB, end hosts included, and the ratio to IP forwarding:\n");
        text += &bulk(s, |b| (format!("{:.3}", b.cpu_per_gb.median), b.cpu_ratio.text(2)));
        text.push('\n');
    }
    if !s.rtt.is_empty() {
        let _ = writeln!(text, "Round trips of one byte, everything on one CPU; cost relative to IP forwarding:\n");
        text += "| variant | microseconds | cost |\n| --- | ---: | ---: |\n";
        for r in &s.rtt {
            let _ = writeln!(text, "| {} | {:.1} | {} |", r.variant, r.micros.median, r.cost_ratio.text(2));
        }
        text.push('\n');
    }
    text += &switch(results);
    text += &memory(results);
    text += &threshold(results);
    text += &super::million::table(results);
    text += &remarks(results);
    text
}

type Cell = (String, String);

fn bulk(s: &Summary, cell: impl Fn(&super::results::BulkSummary) -> Cell) -> String {
    let mut text = "| packets | connections |".to_owned();
    Variant::ALL.iter().for_each(|v| {
        let _ = write!(text, " {v} |");
    });
    text += "\n| --- | ---: |";
    text += &" ---: |".repeat(Variant::ALL.len());
    text.push('\n');
    let mut cases: Vec<(Packets, usize)> = s.bulk.iter().map(|b| (b.packets, b.connections)).collect();
    cases.dedup();
    for (packets, connections) in cases {
        let name = match packets {
            Packets::Large => "up to 64 KB",
            Packets::Mtu => "1500 bytes",
        };
        let _ = write!(text, "| {name} | {connections} |");
        for variant in Variant::ALL {
            let text_of = s.bulk_of(packets, connections, variant).map(&cell);
            let _ = match text_of {
                None => write!(text, " |"),
                Some((absolute, _)) if variant == Variant::IpForward => write!(text, " {absolute} |"),
                Some((absolute, ratio)) => write!(text, " {absolute}: {ratio} |"),
            };
        }
        text.push('\n');
    }
    text
}

fn switch(results: &Results) -> String {
    if results.switch.is_empty() {
        return String::new();
    }
    let mut text = "Switching, microseconds (median, and the range of eight in ten):\n\n".to_owned();
    text +=
        "| connection | splices | freeze | drain | commit | unsplice |\n| --- | ---: | ---: | ---: | ---: | ---: |\n";
    for case in &results.switch {
        let name = if case.busy { "busy" } else { "idle" };
        let of = [&case.freeze, &case.drain, &case.commit, &case.unsplice].map(|s| s.text(1));
        let _ = writeln!(text, "| {name} | {} | {} |", case.cycles, of.join(" | "));
    }
    text.push('\n');
    text
}

fn memory(results: &Results) -> String {
    let Some(m) = &results.memory else { return String::new() };
    let mut text = format!(
        "Memory, bytes per connection ({} of them, idle):\n\n| what | bytes |\n| --- | ---: |\n",
        m.connections
    );
    let _ = writeln!(text, "| kernel tables, released IPv4 flow | {:.0} |", m.released_flow);
    let _ = writeln!(text, "| kernel tables, parked flow, without its sockets | {:.0} |", m.parked_flow);
    for p in &m.processes {
        let _ = writeln!(text, "| resident in the process, {} | {:.0} |", p.variant, p.per_connection);
    }
    text.push('\n');
    text
}

fn threshold(results: &Results) -> String {
    let Some(t) = &results.threshold else { return String::new() };
    let mut text = "Short transfers on one CPU, microseconds per connection:\n\n".to_owned();
    text += "| bytes | copied | spliced at once | copied, CPU | spliced, CPU |\n| ---: | ---: | ---: | ---: | ---: |\n";
    for s in &t.sizes {
        let of = [s.copied.median, s.spliced.median, s.copied_cpu, s.spliced_cpu].map(|micros| format!("{micros:.0}"));
        let _ = writeln!(text, "| {} | {} |", s.bytes, of.join(" | "));
    }
    let from = |at: Option<f64>| at.map_or("at no size measured".to_owned(), |n| format!("from {n:.0} bytes on"));
    let _ = writeln!(text, "\nSplicing takes less time {}, less CPU {}.", from(t.by_time), from(t.by_cpu));
    if let Some(n) = t.recommended {
        let _ = writeln!(text, "Recommended: splice after {n} bytes.");
    }
    text.push('\n');
    text
}

fn remarks(results: &Results) -> String {
    let mut text = String::new();
    let [disturbed, all] = results.summary.disturbed;
    if disturbed > 0 {
        let _ = writeln!(text, "{disturbed} of {all} rounds were disturbed and do not count.");
    }
    for case in &results.summary.all_disturbed {
        let _ = writeln!(text, "All rounds were disturbed, and counted nevertheless: {case}.");
    }
    for case in results.switch.iter().filter(|c| c.disturbed.is_some()) {
        let name = if case.busy { "busy" } else { "idle" };
        let _ = writeln!(text, "Disturbed: switching, {name}.");
    }
    for skipped in &results.skipped {
        let _ = writeln!(text, "Not measured: {skipped}.");
    }
    if !text.is_empty() {
        text.push('\n');
    }
    text
}

/// Lines that fit where prose is checked.
fn wrap(text: &str) -> Vec<String> {
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
}
