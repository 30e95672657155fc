//! Writes the figures of the latest results into the documents, so that they are never typed by hand.

use super::{
    Result,
    network::Packets,
    report,
    results::{FORMAT, Figure, Line, Part, Results},
    subject::Subject,
    variant::Variant,
};
use crate::cell::{Cell, Distance, Place};
use serde_json::Value;
use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

const BEGIN: &str = "<!-- figures -->";
const END: &str = "<!-- /figures -->";

/// Formats the tables beside all results again, and updates both documents below `top` with the latest. Returns their paths.
pub fn update(results: &Path, top: &Path) -> Result<Vec<PathBuf>> {
    let source = |file: &Path| file.strip_prefix(top).unwrap_or(file).with_extension("md").display().to_string();
    let mut all = Vec::new();
    for part in Part::ALL {
        let mut files = all_of(results, part.file())?;
        for (file, results) in &files {
            fs::write(file.with_extension("md"), report::full(results))?;
        }
        all.extend(files.pop().map(|(file, results)| (source(&file), results)));
    }
    let of = |part: Part| all.iter().find(|(_, results)| results.part == part);
    let bench =
        of(Part::Results).ok_or_else(|| format!("no results in {}: run `longsplice-bench`", results.display()))?;
    let link = |file: &str| format!("[{}](../{file})", file.rsplit('/').next().unwrap_or_default());
    let mut full = String::new();
    for (file, results) in [Some(bench), of(Part::Wan)].into_iter().flatten() {
        full += &report::head(results);
        full += &report::tables(results, true);
        let _ = write!(full, "From {}, with all other tables.\n\n", link(file));
    }
    let others = all.iter().filter(|(_, results)| !matches!(results.part, Part::Results | Part::Wan));
    for (file, results) in others {
        let _ = writeln!(full, "- {} {}: {}", results.part.title(), results.date, link(file));
    }
    let documents = [("README.md", short(bench, of(Part::Wan))), ("docs/bench.md", full)];
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

/// Reads the files of this name, of which each machine's directory may have one. The latest is the last one.
fn all_of(results: &Path, name: &str) -> Result<Vec<(PathBuf, Results)>> {
    let entries = fs::read_dir(results).map_err(|e| format!("{}: {e}; run `longsplice-bench`", results.display()))?;
    let files = entries.flatten().map(|e| e.path().join(name).with_extension("json")).filter(|file| file.exists());
    let mut all = files.map(|file| Ok((read(&file)?, file))).collect::<Result<Vec<_>>>()?;
    all.sort_by(|(a, file), (b, other)| (&a.date, file).cmp(&(&b.date, other)));
    Ok(all.into_iter().map(|(results, file)| (file, results)).collect())
}

/// Reads a file, if this version can.
fn read(file: &Path) -> Result<Results> {
    let wrong = |e: &dyn std::fmt::Display| format!("{}: {e}", file.display());
    let text = fs::read_to_string(file).map_err(|e| wrong(&e))?;
    let json: Value = serde_json::from_str(&text).map_err(|e| wrong(&e))?;
    if json["format"] != FORMAT {
        return Err(wrong(&format!("format {}, not {FORMAT}: measure again", json["format"])).into());
    }
    Ok(serde_json::from_value(json).map_err(|e| wrong(&e))?)
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

/// Rows of the overview table: subject, figure, and name.
const ROWS: [(Subject, Figure, &str); 12] = [
    (bulk(Packets::Large, 1), Figure::Value, "throughput, packets of up to 64 KB, 1 connection"),
    (bulk(Packets::Large, 8), Figure::Value, "throughput, packets of up to 64 KB, 8 connections"),
    (bulk(Packets::Large, 1), Figure::Cpu, "CPU time per byte, packets of up to 64 KB, 1 connection"),
    (bulk(Packets::Mtu, 1), Figure::Value, "throughput, packets of 1500 bytes, 1 connection"),
    (bulk(Packets::Mtu, 8), Figure::Value, "throughput, packets of 1500 bytes, 8 connections"),
    (bulk(Packets::Mtu, 1), Figure::Cpu, "CPU time per byte, packets of 1500 bytes, 1 connection"),
    (Subject::Segment { bytes: 1 }, Figure::Value, "CPU time per segment of 1 byte"),
    (Subject::Segment { bytes: 1448 }, Figure::Value, "CPU time per segment of 1448 bytes"),
    (Subject::Response { bytes: 10 << 10, clients: 1 }, Figure::Value, "response time, 10 KB, 1 client (SOCKS)"),
    (Subject::Response { bytes: 10 << 20, clients: 1 }, Figure::Value, "response time, 10 MB, 1 client (SOCKS)"),
    (Subject::Response { bytes: 1 << 20, clients: 32 }, Figure::Value, "response time, 1 MB, 32 clients (SOCKS)"),
    (Subject::Rate { bytes: 1 }, Figure::Value, "connections per second, 1 byte each"),
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
fn rows_of_long_paths(wan: &Results) -> String {
    let columns = ["copying", "HAProxy", "default policy", "which has"];
    let mut text = format!("| time of 1 MB, BBR, relative to IP forwarding | {} |\n", columns.join(" | "));
    text += "| --- | ---: | ---: | ---: | --- |\n";
    for (distance, name) in FAR {
        let line = |variant| wan.line(Subject::Path(Cell { distance, ..Cell::BASE }), variant);
        let Some(default) = line(Variant::Default) else { continue };
        let cells = [Variant::Copy, Variant::Haproxy, Variant::Default].map(|variant| {
            let ratio = line(variant).and_then(|l| l.ratio(Figure::Value));
            ratio.map_or_else(String::new, |r| format!(" {:.2}", r.median))
        });
        let _ = writeln!(text, "| {name} |{} | {} |", cells.join(" |"), report::decision(default));
    }
    text
}

/// The overview table, with ratios only.
fn short((source, r): &(String, Results), wan: Option<&(String, Results)>) -> String {
    let median = |line: &Line, figure| line.ratio(figure).map(|ratio| ratio.median);
    let figure =
        |subject, figure, variants: [Variant; 2]| median(variants.iter().find_map(|v| r.line(subject, *v))?, figure);
    let mut text = "| relative to IP forwarding | better is |".to_owned();
    for [variant, _] in COLUMNS {
        let _ = write!(text, " {variant} |");
    }
    text += "\n| --- | --- |";
    text += &" ---: |".repeat(COLUMNS.len());
    text.push('\n');
    for (subject, shown, name) in ROWS {
        let cells = COLUMNS.map(|v| figure(subject, shown, v).map_or_else(String::new, |r| format!(" {r:.2}")));
        if cells.iter().any(|c| !c.is_empty()) {
            let counts = matches!(subject, Subject::Bulk { .. } | Subject::Rate { .. }) && shown == Figure::Value;
            let better = if counts { "more" } else { "less" };
            let _ = writeln!(text, "| {name} | {better} |{} |", cells.join(" |"));
        }
    }
    for (variant, name) in FLOODS {
        let line = r.line(Subject::Flood { flows: 1 }, variant);
        if let Some(ratio) = line.and_then(|line| median(line, Figure::Value)) {
            let _ = writeln!(text, "| {name} | less | {ratio:.2} |{}", " |".repeat(COLUMNS.len() - 1));
        }
    }
    text.push('\n');
    if let Some((_, wan)) = wan {
        let _ = writeln!(text, "{}", rows_of_long_paths(wan));
    }
    let m = &r.machine;
    let _ = writeln!(
        text,
        "Medians of {} rounds on {} ({} CPUs of {}, over veth, end hosts",
        r.rounds, r.date, m.cpus, m.cpu
    );
    let _ = writeln!(text, "included), Linux {}. From {source}.", m.kernel.split(' ').next().unwrap_or_default());
    if let Some((file, _)) = wan {
        let _ = writeln!(text, "Transfers over 100 ms: from {file}.");
    }
    if !r.all_disturbed.is_empty() {
        text += "The machine was not quiet during all of it: see there.\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{
        super::results::{Case, Round, Run},
        *,
    };

    /// What the default policy did with 1 MB over 100 ms at this place.
    fn far(place: Place, spliced: f64, refusal: Option<&str>) -> Case {
        let run = |variant, seconds: f64| Run::of(variant, [(Figure::Value, seconds)]);
        let mut default = run(Variant::Default, 0.3).with(Figure::Spliced, Some(spliced));
        default.notes.extend(refusal.map(str::to_owned));
        let runs = vec![run(Variant::IpForward, 0.3), run(Variant::Copy, 0.3), default];
        let cell = Cell { distance: Distance { place, ms: 100 }, ..Cell::BASE };
        Case { subject: Subject::Path(cell), rounds: vec![Round { runs }] }
    }

    #[test]
    fn the_latest_file_that_this_version_can_read() {
        let top = tempfile::tempdir().unwrap();
        let write = |machine, date: &str, format| {
            let kept =
                Results { date: date.to_owned(), format, ..Results::of(Part::Wan, &[far(Place::Client, 0.0, None)]) };
            kept.write(&top.path().join(machine), &[]).unwrap();
        };
        write("a", "2026-01-02", FORMAT);
        write("b", "2026-01-01", FORMAT);
        assert!(all_of(top.path(), "wan").unwrap().pop().unwrap().0.ends_with("a/wan.json"));
        assert!(all_of(top.path(), "million").unwrap().is_empty());
        write("c", "2026-01-01", 0);
        assert!(all_of(top.path(), "wan").unwrap_err().to_string().contains("format 0, not"));
    }

    /// A figure must not stand below the name of something that did not happen.
    #[test]
    fn long_paths_say_what_the_default_policy_did() {
        let cases = [far(Place::Client, 0.0, Some("path")), far(Place::Server, 0.93, None)];
        let text = rows_of_long_paths(&Results::of(Part::Wan, &cases));
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
