//! Puts the figures of the latest results into documents: nobody types them.

use super::{
    Result, report,
    results::{FORMAT, Results},
    venue::{Packets, Variant},
};
use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

/// The file that is read again.
pub const JSON: &str = "results.json";
const BEGIN: &str = "<!-- figures -->";
const END: &str = "<!-- /figures -->";

/// Rewrites both documents below `top`; which ones.
pub fn update(results: &Path, top: &Path) -> Result<Vec<PathBuf>> {
    let (dir, latest) = latest(results)?;
    let source = dir.strip_prefix(top).unwrap_or(&dir).display().to_string();
    let documents = [
        ("README.md", short(&latest, &source)),
        ("docs/bench.md", format!("{}From {source}.\n", report::full(&latest))),
    ];
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

/// Directories begin with their date: the last one is the latest.
fn latest(results: &Path) -> Result<(PathBuf, Results)> {
    let entries = fs::read_dir(results).map_err(|e| format!("{}: {e}; run `longsplice bench`", results.display()))?;
    let dirs = entries.flatten().map(|e| e.path()).filter(|dir| dir.join(JSON).exists());
    let dir = dirs.max().ok_or_else(|| format!("no results in {}: run `longsplice bench`", results.display()))?;
    let file = dir.join(JSON);
    let wrong = |e: &dyn std::fmt::Display| format!("{}: {e}", file.display());
    let text = fs::read_to_string(&file).map_err(|e| wrong(&e))?;
    let latest: Results = serde_json::from_str(&text).map_err(|e| wrong(&e))?;
    if latest.format != FORMAT {
        return Err(wrong(&format!("format {}, not {FORMAT}: measure again", latest.format)).into());
    }
    Ok((dir, latest))
}

/// What stands between the marks is replaced. None: they are not there.
fn replace(text: &str, figures: &str) -> Option<String> {
    let (head, rest) = text.split_once(BEGIN)?;
    let (_, tail) = rest.split_once(END)?;
    Some(format!("{head}{BEGIN}\n{}\n{END}{tail}", figures.trim()))
}

/// The first screen's table: ratios only.
fn short(results: &Results, source: &str) -> String {
    let s = &results.summary;
    let mut text = "| relative to IP forwarding |".to_owned();
    for variant in Variant::PROXIES {
        let _ = write!(text, " {variant} |");
    }
    text += "\n| --- |";
    text += &" ---: |".repeat(Variant::PROXIES.len());
    text.push('\n');
    let mut row = |name: &str, cell: &dyn Fn(Variant) -> Option<f64>| {
        let cells = Variant::PROXIES.map(|v| cell(v).map_or_else(String::new, |r| format!("{r:.2}")));
        if cells.iter().any(|c| !c.is_empty()) {
            let _ = writeln!(text, "| {name} | {} |", cells.join(" | "));
        }
    };
    for (packets, name) in [(Packets::Large, "packets of up to 64 KB"), (Packets::Mtu, "packets of 1500 bytes")] {
        for connections in [1, 8] {
            let plural =
                if connections == 1 { "1 connection".to_owned() } else { format!("{connections} connections") };
            row(&format!("throughput, {name}, {plural}"), &|v| {
                s.bulk_of(packets, connections, v).map(|b| b.ratio.median)
            });
        }
        row(&format!("CPU time per byte, {name}, 1 connection"), &|v| {
            s.bulk_of(packets, 1, v).map(|b| b.cpu_ratio.median)
        });
    }
    row("CPU time per round trip of 1 byte", &|v| s.rtt_of(v).map(|r| r.cost_ratio.median));
    text.push('\n');
    let m = &results.machine;
    let _ = writeln!(
        text,
        "Medians of {} rounds on {} ({} CPUs of {}, over veth, end hosts",
        results.setup.rounds, results.date, m.cpus, m.cpu
    );
    let _ = writeln!(text, "included), Linux {}. From {source}.", m.kernel.split(' ').next().unwrap_or_default());
    if !s.all_disturbed.is_empty() {
        text += "The machine was not quiet during all of it: see there.\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_stands_between_the_marks_changes() {
        let text = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        let new = replace(&text, "\nnew\n\n").unwrap();
        assert_eq!(new, format!("a\n{BEGIN}\nnew\n{END}\nb\n"));
        assert_eq!(replace(&new, "new").unwrap(), new);
        assert_eq!(replace("a\nb\n", "new"), None);
    }
}
