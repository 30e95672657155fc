//! `longsplice ls`: live flows as a table.

mod summary;

use crate::{
    Outcome,
    args::{LsArgs, Sort},
    client::Client,
    control::Ask,
    which::{PAGE, Which},
};
use longsplice_engine::{FlowState, PathFinding};
use serde::Deserialize;
use serde_json::Value;
use std::{
    cmp::Reverse,
    collections::HashMap,
    io::{self, IsTerminal, Write},
    path::Path,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

/// A flow as reported by the control socket (`FlowStatus`), limited to the fields shown in the table.
#[derive(Clone, Debug, Deserialize)]
pub struct Row {
    /// Number.
    pub id: u64,
    /// Protocol of the listener.
    pub protocol: String,
    /// Name of the listener; none for flows of an earlier process.
    #[serde(default)]
    pub name: Option<String>,
    /// The client's address.
    pub client: String,
    /// The server's address.
    pub server: String,
    /// The destination as the client named it.
    pub target: String,
    /// State.
    pub state: String,
    /// Stages that every segment traverses.
    pub stages: Vec<String>,
    /// Bytes from client to server.
    pub bytes_up: u64,
    /// Bytes from server to client.
    pub bytes_down: u64,
    /// Age in milliseconds.
    pub age_ms: u64,
    /// Why the flow is not spliced or, if it is spliced, why an unsplice was refused.
    pub refusal: Option<String>,
    /// What was measured of a path that was refused.
    pub path: Option<PathFinding>,
    /// Bytes per second of both directions together, if they were counted. Not from the control socket.
    #[serde(default)]
    pub rate: Option<u64>,
}

/// Time for which bytes are counted to find rates, without --watch.
const SECOND: Duration = Duration::from_secs(1);

/// `longsplice ls`.
pub fn ls(control: Option<&Path>, args: &LsArgs) -> Outcome {
    let mut client = Client::connect(control)?;
    match (args.watch, args.sort, args.summary) {
        (None, Sort::Age, false) => list(&mut client, args),
        _ => look(&mut client, args),
    }
}

/// What has changed of flows since the last look: bytes per second by number.
#[derive(Default)]
struct Rates {
    last: Option<Instant>,
    bytes: HashMap<u64, u64>,
    of: HashMap<u64, u64>,
}

impl Rates {
    fn count(&mut self, flows: &[Value]) {
        let now = Instant::now();
        let bytes: HashMap<_, _> = flows.iter().map(|flow| (number(flow, "id"), all_bytes(flow))).collect();
        if let Some(last) = self.last.replace(now) {
            let ms = u64::try_from((now - last).as_millis()).unwrap_or(u64::MAX).max(1);
            let rate = |(id, n): (&u64, &u64)| {
                (*id, n.saturating_sub(*self.bytes.get(id).unwrap_or(&0)).saturating_mul(1000) / ms)
            };
            self.of = bytes.iter().map(rate).collect();
        }
        self.bytes = bytes;
    }
}

fn number(flow: &Value, key: &str) -> u64 {
    flow.get(key).and_then(Value::as_u64).unwrap_or(0)
}

fn all_bytes(flow: &Value) -> u64 {
    number(flow, "bytes_up").saturating_add(number(flow, "bytes_down"))
}

/// Prints what needs all flows at once, and again as often as it is to be watched.
fn look(client: &mut Client, args: &LsArgs) -> Outcome {
    let every = args.watch.map(|seconds| Duration::from_secs(seconds.into()));
    let mut out = io::stdout().lock();
    let (mut rates, clears) = (Rates::default(), every.is_some() && out.is_terminal() && !args.json);
    let needs_two = args.sort == Sort::Rate || every.is_some();
    loop {
        let mut all = Vec::new();
        pages(client, usize::MAX, (args.state, &args.which), |page| {
            all.extend(page);
            true
        })?;
        let is_first = rates.last.is_none();
        rates.count(&all);
        if is_first && needs_two {
            thread::sleep(SECOND);
            continue;
        }
        if clears {
            write!(out, "\x1b[H\x1b[2J")?; // to the corner, and clear
        }
        if args.summary {
            let sums = summary::Summary::of(&all, &rates.of);
            if args.json { writeln!(out, "{}", sums.json())? } else { write!(out, "{}", sums.text(needs_two))? }
        } else {
            match args.sort {
                Sort::Age => {}
                Sort::Bytes => all.sort_by_key(|flow| Reverse(all_bytes(flow))),
                Sort::Rate => all.sort_by_key(|flow| Reverse(rates.of.get(&number(flow, "id")).copied())),
            }
            all.truncate(args.limit.unwrap_or(usize::MAX));
            if needs_two {
                for flow in &mut all {
                    flow["rate"] = rates.of.get(&number(flow, "id")).copied().unwrap_or(0).into();
                }
            }
            if args.json {
                writeln!(out, "{}", Value::from(all))?;
            } else {
                let rows: Vec<Row> = all.into_iter().map(serde_json::from_value).collect::<Result<_, _>>()?;
                out.write_all(table(&rows, &mut HEAD.map(str::len), true).as_bytes())?;
            }
        }
        out.flush()?;
        match every {
            Some(every) => thread::sleep(every),
            None => return Ok(ExitCode::SUCCESS),
        }
    }
}

/// Prints all flows, page by page.
fn list(client: &mut Client, args: &LsArgs) -> Outcome {
    let mut out = io::stdout().lock();
    let mut width = HEAD.map(str::len);
    let mut first = true;
    let mut all = Ok(());
    pages(client, args.limit.unwrap_or(usize::MAX), (args.state, &args.which), |page| {
        all = if args.json {
            let rows = page.iter().map(Value::to_string).collect::<Vec<_>>().join(",");
            write!(out, "{}{rows}", if first { "[" } else { "," })
        } else {
            let rows: Result<Vec<Row>, _> = page.into_iter().map(serde_json::from_value).collect();
            rows.map_err(io::Error::from).and_then(|rows| out.write_all(table(&rows, &mut width, first).as_bytes()))
        };
        first = false;
        all.is_ok()
    })?;
    all?;
    match (first, args.json) {
        (true, true) => writeln!(out, "[]")?,
        (false, true) => writeln!(out, "]")?,
        (true, false) => out.write_all(table(&[], &mut width, true).as_bytes())?,
        (false, false) => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Passes each non-empty page to `take` until there are no more or `take` declines.
fn pages(
    client: &mut Client,
    mut limit: usize,
    (state, which): (Option<FlowState>, &Which),
    mut take: impl FnMut(Vec<Value>) -> bool,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut after = 0;
    while limit > 0 {
        let most = limit.min(PAGE);
        let mut answer = client.ask(Ask::Ls { after, limit: Some(most), state, which: which.clone() })?;
        let page: Vec<Value> = serde_json::from_value(answer.get_mut("flows").map(Value::take).unwrap_or_default())?;
        let Some(last) = page.last() else { break };
        after = last.get("id").and_then(Value::as_u64).ok_or("a flow without a number")?;
        let n = page.len();
        limit -= n;
        if !take(page) || n < most {
            break;
        }
    }
    Ok(())
}

/// Fetches all flows from a control socket.
pub fn flows(client: &mut Client) -> Result<Vec<Row>, Box<dyn std::error::Error>> {
    let mut all = Vec::new();
    pages(client, usize::MAX, (None, &Which::default()), |page| {
        all.extend(page);
        true
    })?;
    Ok(all.into_iter().map(serde_json::from_value).collect::<Result<_, _>>()?)
}

const HEAD: [&str; 12] = [
    "ID",
    "PROTO",
    "LISTENER",
    "CLIENT",
    "SERVER",
    "TARGET",
    "STATE",
    "UP",
    "DOWN",
    "RATE",
    "AGE",
    "STAGES OR REFUSAL",
];
/// The column that is left out unless rates were counted.
const RATE: usize = 9;
/// Right-aligned columns: numbers, and text whose end matters most.
const RIGHT: [bool; 12] = [true, false, false, false, false, false, false, true, true, true, true, false];

/// Formats a table. Columns are at least `width` wide, and `width` is updated to the widths used.
fn table(rows: &[Row], width: &mut [usize; 12], head: bool) -> String {
    let rated = rows.iter().any(|row| row.rate.is_some());
    let cells: Vec<[String; 12]> = rows.iter().map(cells).collect();
    for row in &cells {
        for (w, cell) in width.iter_mut().zip(row) {
            *w = (*w).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let mut line = |row: &[String; 12]| {
        let mut l = String::new();
        let columns = row.iter().zip(*width).zip(RIGHT).enumerate().filter(|(n, _)| rated || *n != RATE);
        for (_, ((cell, w), right)) in columns {
            l += &if right { format!("{cell:>w$}  ") } else { format!("{cell:<w$}  ") };
        }
        text += l.trim_end();
        text.push('\n');
    };
    if head {
        line(&HEAD.map(String::from));
    }
    cells.iter().for_each(&mut line);
    text
}

fn cells(r: &Row) -> [String; 12] {
    let measured = r.path.map_or_else(String::new, |path| format!(" ({path})"));
    let why = match &r.refusal {
        Some(refusal) if ["spliced", "released"].contains(&&*r.state) => format!("stays {}: {refusal}", r.state),
        Some(refusal) => format!("not spliced: {refusal}{measured}"),
        None => r.stages.join(" > ") + &measured,
    };
    [
        r.id.to_string(),
        r.protocol.clone(),
        r.name.clone().unwrap_or_else(|| "-".into()),
        r.client.clone(),
        r.server.clone(),
        printable(&r.target),
        r.state.clone(),
        bytes(r.bytes_up),
        bytes(r.bytes_down),
        r.rate.map_or_else(String::new, |rate| format!("{}/s", bytes(rate))),
        age(r.age_ms),
        why,
    ]
}

/// Replaces control characters: targets are sent by clients and must not control the operator's terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Formats a number of bytes with one decimal place and a decimal prefix.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["kB", "MB", "GB", "TB", "PB", "EB"];
    if n < 1000 {
        return format!("{n} B");
    }
    let mut x = n as f64 / 1000.0;
    let mut unit = 0;
    // From 999.95 on, "%.1f" would print 1000.0.
    while x >= 999.95 {
        x /= 1000.0;
        unit += 1;
    }
    format!("{x:.1} {}", UNITS[unit])
}

/// Formats a duration in a short form.
pub fn age(ms: u64) -> String {
    match ms / 1000 {
        s @ 0..60 => format!("{s}.{} s", ms / 100 % 10),
        s @ 60..3600 => format!("{}:{:02} min", s / 60, s % 60),
        s => format!("{}:{:02} h", s / 3600, s / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        Row {
            id: 7,
            protocol: "socks5".into(),
            name: Some("office".into()),
            client: "10.77.1.2:40000".into(),
            server: "10.77.2.2:80".into(),
            target: "example.org:80".into(),
            state: "spliced".into(),
            stages: vec!["device".into(), "forward".into(), "device".into()],
            bytes_up: 120,
            bytes_down: 1_234_567_890,
            age_ms: 61_000,
            refusal: None,
            path: None,
            rate: None,
        }
    }

    #[test]
    fn rates_have_a_column_if_they_were_counted() {
        let text = table(&[row()], &mut HEAD.map(str::len), true);
        assert!(!text.contains("RATE"), "{text}");
        let text = table(&[Row { rate: Some(12_500_000), ..row() }, row()], &mut HEAD.map(str::len), true);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].contains("  DOWN       RATE       AGE  "), "{text}");
        assert!(lines[1].contains("1.2 GB  12.5 MB/s  1:01 min  "), "{text}");
    }

    #[test]
    fn rates_are_what_has_changed() {
        let flow = |id: u64, up: u64, down: u64| serde_json::json!({ "id": id, "bytes_up": up, "bytes_down": down });
        let mut rates = Rates::default();
        rates.count(&[flow(1, 10, 20), flow(2, 5, 5)]);
        assert!(rates.of.is_empty());
        rates.last = Some(Instant::now() - Duration::from_secs(10));
        // a flow of which there was no look is counted from its begin; one that is gone is gone
        rates.count(&[flow(1, 1_000_010, 20), flow(3, 0, 500_000)]);
        let of = |id: u64| rates.of[&id];
        assert!((99_000..=100_000).contains(&of(1)) && (49_000..=50_000).contains(&of(3)) && rates.of.len() == 2);
    }

    #[test]
    fn a_table() {
        let refused = Row {
            id: 12,
            state: "copying".into(),
            refusal: Some("loopback".into()),
            target: "a\x1b[2J".into(),
            ..row()
        };
        let stays = Row { refusal: Some("fragments".into()), ..row() };
        let text = table(&[row(), refused, stays], &mut HEAD.map(str::len), true);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(lines[3].ends_with("stays spliced: fragments"), "{text}");
        assert!(lines[0].starts_with("ID  PROTO   LISTENER  CLIENT"), "{text}");
        assert!(
            lines[1].contains("120 B")
                && lines[1].contains("office")
                && lines[1].contains("1.2 GB")
                && lines[1].contains("1:01 min"),
            "{text}"
        );
        assert!(lines[1].ends_with("device > forward > device"), "{text}");
        assert!(lines[2].ends_with("not spliced: loopback") && lines[2].contains("a?[2J"), "{text}");
    }

    #[test]
    fn sizes() {
        for (n, want) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.0 kB"),
            (999_949, "999.9 kB"),
            (999_950, "1.0 MB"),
            (u64::MAX, "18.4 EB"),
        ] {
            assert_eq!(bytes(n), want);
        }
    }

    #[test]
    fn ages() {
        for (ms, want) in
            [(0, "0.0 s"), (59_999, "59.9 s"), (60_000, "1:00 min"), (3_600_000, "1:00 h"), (90_061_000, "25:01 h")]
        {
            assert_eq!(age(ms), want);
        }
    }
}
