//! Writes the figures of the latest results into the documents, so that they are never typed by hand.

use super::{
    Result, million,
    network::Packets,
    report,
    results::{FORMAT, Results},
    subject::Subject,
    tpot::{self, TpotResults},
    variant::Variant,
    wan::{self, Line, Row, WanResults},
};
use crate::cell::{Cell, Distance, Middle, Place};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

/// Name of the file that is read back.
pub const JSON: &str = "results.json";
/// Name of the file with the single runs, which git ignores.
pub const ROUNDS: &str = "rounds.json";
const BEGIN: &str = "<!-- figures -->";
const END: &str = "<!-- /figures -->";

/// Updates both documents below `top`. Returns their paths.
pub fn update(results: &Path, top: &Path) -> Result<Vec<PathBuf>> {
    let none = || format!("no results in {}: run `longsplice-bench`", results.display());
    let source = |dir: &Path| dir.strip_prefix(top).unwrap_or(dir).display().to_string();
    let (dir, all): (_, Results) = latest(results, JSON)?.ok_or_else(none)?;
    let dir = source(&dir);
    let mut full = format!("{}From {dir}.\n", report::full(&all));
    if let Some((dir, million)) = latest::<million::MillionResults>(results, million::JSON)? {
        let _ = write!(full, "\n{}From {}.\n", million.text(), source(&dir));
    }
    let wan = latest::<WanResults>(results, wan::JSON)?.map(|(dir, wan)| (source(&dir), wan));
    if let Some((dir, wan)) = &wan {
        let _ = write!(full, "\n{}From {dir}.\n", wan.text());
    }
    if let Some((dir, tpot)) = latest::<TpotResults>(results, tpot::JSON)? {
        let _ = write!(full, "\n{}From {}.\n", tpot.text(), source(&dir));
    }
    let documents = [("README.md", short(&all, &dir, wan.as_ref())), ("docs/bench.md", full)];
    let mut written = Vec::new();
    for (name, figures) in documents {
        let file = top.join(name);
        let text = fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
        let new = replace(&text, &figures).ok_or_else(|| format!("{name} has no {BEGIN} ... {END}"))?;
        fs::write(&file, new).map_err(|e| format!("{}: {e}", file.display()))?;
        written.push(file);
    }
    Ok(written)
}

/// Reads this file in the latest directory that has it; directory names start with the date. `None` if no directory has it.
fn latest<T: DeserializeOwned>(results: &Path, name: &str) -> Result<Option<(PathBuf, T)>> {
    let entries = fs::read_dir(results).map_err(|e| format!("{}: {e}; run `longsplice-bench`", results.display()))?;
    let Some(dir) = entries.flatten().map(|e| e.path()).filter(|dir| dir.join(name).exists()).max() else {
        return Ok(None);
    };
    let file = dir.join(name);
    let wrong = |e: &dyn std::fmt::Display| format!("{}: {e}", file.display());
    let text = fs::read_to_string(&file).map_err(|e| wrong(&e))?;
    let json: Value = serde_json::from_str(&text).map_err(|e| wrong(&e))?;
    if json["format"] != FORMAT {
        return Err(wrong(&format!("format {}, not {FORMAT}: measure again", json["format"])).into());
    }
    Ok(Some((dir, serde_json::from_value(json).map_err(|e| wrong(&e))?)))
}

/// Replaces the text between the marks. `None` if there are no marks.
fn replace(text: &str, figures: &str) -> Option<String> {
    let (head, rest) = text.split_once(BEGIN)?;
    let (_, tail) = rest.split_once(END)?;
    Some(format!("{head}{BEGIN}\n{}\n{END}{tail}", figures.trim()))
}

/// Columns of the overview table. Where a column has no figure as a plug, the figure as a SOCKS proxy is used.
const COLUMNS: [[Variant; 2]; 6] = [
    [Variant::Spliced, Variant::SplicedSocks],
    [Variant::Copy, Variant::CopySocks],
    [Variant::Haproxy; 2],
    [Variant::Nginx; 2],
    [Variant::Socat; 2],
    [Variant::Dante; 2],
];

/// Rows of the overview table: subject, whether CPU time, and name.
const ROWS: [(Subject, bool, &str); 12] = [
    (bulk(Packets::Large, 1), false, "throughput, packets of up to 64 KB, 1 connection"),
    (bulk(Packets::Large, 8), false, "throughput, packets of up to 64 KB, 8 connections"),
    (bulk(Packets::Large, 1), true, "CPU time per byte, packets of up to 64 KB, 1 connection"),
    (bulk(Packets::Mtu, 1), false, "throughput, packets of 1500 bytes, 1 connection"),
    (bulk(Packets::Mtu, 8), false, "throughput, packets of 1500 bytes, 8 connections"),
    (bulk(Packets::Mtu, 1), true, "CPU time per byte, packets of 1500 bytes, 1 connection"),
    (Subject::Segment { bytes: 1 }, false, "CPU time per segment of 1 byte"),
    (Subject::Segment { bytes: 1448 }, false, "CPU time per segment of 1448 bytes"),
    (Subject::Response { bytes: 10 << 10, clients: 1 }, false, "response time, 10 KB, 1 client (SOCKS)"),
    (Subject::Response { bytes: 10 << 20, clients: 1 }, false, "response time, 10 MB, 1 client (SOCKS)"),
    (Subject::Response { bytes: 1 << 20, clients: 32 }, false, "response time, 1 MB, 32 clients (SOCKS)"),
    (Subject::Rate { bytes: 1 }, false, "connections per second, 1 byte each"),
];

/// Additional rows with a figure in the first column only: the ways through the data path.
const FLOODS: [(Variant, &str); 4] = [
    (Variant::Tcx, "CPU time per small packet, tcx"),
    (Variant::TcxPeer, "CPU time per small packet, tcx into a veth's peer"),
    (Variant::Xdp, "CPU time per small packet, XDP"),
    (Variant::Identity, "CPU time per small packet, tcx, identity path"),
];

/// Rows from the results of `wan`.
const FAR: [(Distance, &str); 2] = [
    (Distance { place: Place::Client, ms: 100 }, "client 100 ms away"),
    (Distance { place: Place::Server, ms: 100 }, "server 100 ms away"),
];

const fn bulk(packets: Packets, connections: u64) -> Subject {
    Subject::Bulk { packets, connections }
}

/// The table of long paths. What the default policy did is a column of its own: it splices where that harms nobody.
fn rows_of_long_paths(rows: &[Row]) -> String {
    let mut text =
        "| time of 1 MB, BBR, relative to IP forwarding | copying | HAProxy | default policy | which has |\n\
                    | --- | ---: | ---: | ---: | --- |\n"
            .to_owned();
    for (distance, name) in FAR {
        let cell = Cell { distance, ..Cell::BASE };
        let Some(row) = rows.iter().find(|row| row.cell == cell) else { continue };
        let ratio = |middle| row.line(middle).and_then(|line| line.to_routed);
        let cells = [Middle::Copied, Middle::Haproxy, Middle::Default].map(ratio);
        let cells = cells.map(|r| r.map_or_else(String::new, |r| format!(" {:.2}", r.median)));
        let did = row.line(Middle::Default).map(Line::decision).unwrap_or_default();
        let _ = writeln!(text, "| {name} |{} | {did} |", cells.join(" |"));
    }
    text
}

/// The overview table, with ratios only.
fn short(results: &Results, source: &str, wan: Option<&(String, WanResults)>) -> String {
    let s = &results.summary;
    let figure = |subject, of_cpu: bool, variants: [Variant; 2]| {
        let line = variants.iter().find_map(|v| s.line(subject, *v))?;
        if of_cpu { line.cpu_ratio.map(|r| r.median) } else { Some(line.ratio.median) }
    };
    let mut text = "| relative to IP forwarding | better is |".to_owned();
    for [variant, _] in COLUMNS {
        let _ = write!(text, " {variant} |");
    }
    text += "\n| --- | --- |";
    text += &" ---: |".repeat(COLUMNS.len());
    text.push('\n');
    for (subject, of_cpu, name) in ROWS {
        let cells = COLUMNS.map(|v| figure(subject, of_cpu, v).map_or_else(String::new, |r| format!(" {r:.2}")));
        if cells.iter().any(|c| !c.is_empty()) {
            let counts = matches!(subject, Subject::Bulk { .. } | Subject::Rate { .. }) && !of_cpu;
            let better = if counts { "more" } else { "less" };
            let _ = writeln!(text, "| {name} | {better} |{} |", cells.join(" |"));
        }
    }
    for (variant, name) in FLOODS {
        if let Some(line) = s.line(Subject::Flood { flows: 1 }, variant) {
            let _ = writeln!(text, "| {name} | less | {:.2} |{}", line.ratio.median, " |".repeat(COLUMNS.len() - 1));
        }
    }
    text.push('\n');
    if let Some((_, wan)) = wan {
        let _ = writeln!(text, "{}", rows_of_long_paths(&wan.rows));
    }
    let m = &results.machine;
    let _ = writeln!(
        text,
        "Medians of {} rounds on {} ({} CPUs of {}, over veth, end hosts",
        results.setup.rounds, results.date, m.cpus, m.cpu
    );
    let _ = writeln!(text, "included), Linux {}. From {source}.", m.kernel.split(' ').next().unwrap_or_default());
    if let Some((dir, _)) = wan {
        let _ = writeln!(text, "Transfers over 100 ms: from {dir}.");
    }
    if !s.all_disturbed.is_empty() {
        text += "The machine was not quiet during all of it: see there.\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_file_of_a_name_that_this_version_can_read() {
        let results = tempfile::tempdir().unwrap();
        let read = || latest::<Value>(results.path(), "a.json");
        for (date, json) in [("2026-01-01", r#"{"format": 0}"#), ("2026-01-02", ""), ("2026-01-03", "")] {
            fs::create_dir(results.path().join(date)).unwrap();
            fs::write(results.path().join(date).join(if json.is_empty() { "b.json" } else { "a.json" }), json).unwrap();
        }
        assert!(read().unwrap_err().to_string().contains("format 0, not"));
        fs::write(results.path().join("2026-01-02/a.json"), format!(r#"{{"format": {FORMAT}}}"#)).unwrap();
        assert!(read().unwrap().unwrap().0.ends_with("2026-01-02"));
        assert!(latest::<Value>(results.path(), "c.json").unwrap().is_none());
    }

    /// A figure must not stand below the name of something that did not happen.
    #[test]
    fn long_paths_say_what_the_default_policy_did() {
        let line = |middle, spliced, refusal: Option<&str>| {
            let (refusal, late) = (refusal.map(str::to_owned), false);
            let run = wan::Run {
                seconds: 0.3,
                late,
                retransmitted: 0,
                timeouts: 0,
                needless: 0,
                dropped: 0,
                spliced,
                refusal,
            };
            (middle, run)
        };
        let row = |place, spliced, refusal| {
            let cell = Cell { distance: Distance { place, ms: 100 }, ..Cell::BASE };
            let default = line(Middle::Default, Some(spliced), refusal);
            let all = vec![line(Middle::Routed, None, None), line(Middle::Copied, Some(0.0), Some("policy")), default];
            wan::Row::of(cell, &[all])
        };
        let rows = [row(Place::Client, 0.0, Some("path")), row(Place::Server, 0.93, None)];
        let text = rows_of_long_paths(&rows);
        assert!(text.contains("| client 100 ms away | 1.00 | | 1.00 | copied (`path`) |"), "{text}");
        assert!(text.contains("| server 100 ms away | 1.00 | | 1.00 | spliced 93 % of it |"), "{text}");
    }

    #[test]
    fn only_what_stands_between_the_marks_changes() {
        let text = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        let new = replace(&text, "\nnew\n\n").unwrap();
        assert_eq!(new, format!("a\n{BEGIN}\nnew\n{END}\nb\n"));
        assert_eq!(replace(&new, "new").unwrap(), new);
        assert_eq!(replace("a\nb\n", "new"), None);
    }
}
