//! Writes the figures of the latest results into the documents, so that they are never typed by hand.

use super::{
    Result, report,
    results::{
        FORMAT,
        Figure::{self, Cpu, Value},
        Line, Part, Results,
        Section::{self, Bulk, Rate, Response, Segment},
    },
    variant::Variant,
};

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
        let mut files = all_of(results, part.names().0)?;
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
        let _ = writeln!(full, "- {} {}: {}", results.part.names().1, results.date, link(file));
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
    let json: serde_json::Value = serde_json::from_str(&text).map_err(|e| wrong(&e))?;
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

/// Rows of the overview table: row of a section, figure, whether more of it is better, and name.
const ROWS: [(Section, &str, Figure, bool, &str); 12] = [
    (Bulk, "up to 64 KB, 1 connection", Value, true, "throughput, packets of up to 64 KB, 1 connection"),
    (Bulk, "up to 64 KB, 8 connections", Value, true, "throughput, packets of up to 64 KB, 8 connections"),
    (Bulk, "up to 64 KB, 1 connection", Cpu, false, "CPU time per byte, packets of up to 64 KB, 1 connection"),
    (Bulk, "1500 bytes, 1 connection", Value, true, "throughput, packets of 1500 bytes, 1 connection"),
    (Bulk, "1500 bytes, 8 connections", Value, true, "throughput, packets of 1500 bytes, 8 connections"),
    (Bulk, "1500 bytes, 1 connection", Cpu, false, "CPU time per byte, packets of 1500 bytes, 1 connection"),
    (Segment, "1 byte", Value, false, "CPU time per segment of 1 byte"),
    (Segment, "1448 bytes", Value, false, "CPU time per segment of 1448 bytes"),
    (Response, "10 KB, 1 client", Value, false, "response time, 10 KB, 1 client (SOCKS)"),
    (Response, "10 MB, 1 client", Value, false, "response time, 10 MB, 1 client (SOCKS)"),
    (Response, "1 MB, 32 clients", Value, false, "response time, 1 MB, 32 clients (SOCKS)"),
    (Rate, "1 byte", Value, true, "connections per second, 1 byte each"),
];

/// Additional rows with a figure in the first column only: the ways through the data path.
const FLOODS: [(Variant, &str); 4] = [
    (Variant::Tcx, "CPU time per small packet, tcx"),
    (Variant::TcxPeer, "CPU time per small packet, tcx into a veth's peer"),
    (Variant::Xdp, "CPU time per small packet, XDP"),
    (Variant::Identity, "CPU time per small packet, tcx, identity path"),
];

/// Rows from the results of `wan`.
const FAR: [(&str, &str); 2] = [("c100, 1 MB, bbr", "client 100 ms away"), ("s100, 1 MB, bbr", "server 100 ms away")];

/// The table of long paths. What the default policy did is a column of its own: it splices where that harms nobody.
fn rows_of_long_paths(wan: &Results) -> String {
    let mut text =
        "| time of 1 MB, BBR, relative to IP forwarding | copying | HAProxy | default policy | which has |\n"
            .to_owned();
    text += "| --- | ---: | ---: | ---: | --- |\n";
    for (row, name) in FAR {
        let line = |variant| wan.line(Section::Path, row, variant);
        let Some(default) = line(Variant::Default) else { continue };
        let cells = [Variant::Copy, Variant::Haproxy, Variant::Default].map(|variant| cell(line(variant), Value));
        let _ = writeln!(text, "| {name} |{} | {} |", cells.join(" |"), report::decision(default));
    }
    text
}

/// The ratio of a figure to the base.
fn cell(line: Option<&Line>, figure: Figure) -> String {
    line.and_then(|l| l.ratio(figure)).map_or(String::new(), |ratio| format!(" {:.2}", ratio.median))
}

/// The overview table, with ratios only.
fn short((source, r): &(String, Results), wan: Option<&(String, Results)>) -> String {
    let mut text = "| relative to IP forwarding | better is |".to_owned();
    for [variant, _] in COLUMNS {
        let _ = write!(text, " {variant} |");
    }
    text += &format!("\n| --- | --- |{}\n", " ---: |".repeat(COLUMNS.len()));
    for (section, row, figure, more, name) in ROWS {
        let cells = COLUMNS.map(|v| cell(v.iter().find_map(|v| r.line(section, row, *v)), figure));
        if cells.iter().any(|c| !c.is_empty()) {
            let better = if more { "more" } else { "less" };
            let _ = writeln!(text, "| {name} | {better} |{} |", cells.join(" |"));
        }
    }
    for (variant, name) in FLOODS {
        let ratio = cell(r.line(Section::Flood, "1 flow", variant), Value);
        if !ratio.is_empty() {
            let _ = writeln!(text, "| {name} | less |{ratio} |{}", " |".repeat(COLUMNS.len() - 1));
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
        super::results::{Case, Run},
        *,
    };

    /// What the default policy did with 1 MB over 100 ms.
    fn far(rows: &[(&str, f64, Option<&str>)]) -> Results {
        let mut results = Results::new(Part::Wan, 1);
        for (row, spliced, refusal) in rows {
            let run = |variant| Run::of(variant, [(Value, 0.3)]);
            let mut default = run(Variant::Default).with(Figure::Spliced, Some(*spliced));
            default.notes.extend(refusal.map(str::to_owned));
            let rounds = vec![vec![run(Variant::IpForward), run(Variant::Copy), default]];
            results.add(Case { section: Section::Path, row: (*row).to_owned(), rounds });
        }
        results
    }

    #[test]
    fn the_latest_file_that_this_version_can_read() {
        let top = tempfile::tempdir().unwrap();
        let write = |machine, date: &str, format| {
            let kept = Results { date: date.to_owned(), format, ..far(&[]) };
            kept.write(&top.path().join(machine)).unwrap();
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
        let text = rows_of_long_paths(&far(&[(FAR[0].0, 0.0, Some("path")), (FAR[1].0, 0.93, None)]));
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
