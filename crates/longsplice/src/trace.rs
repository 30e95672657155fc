//! `longsplice trace`: prints the segments of one flow as they pass, for people.

use crate::{Outcome, args::TraceArgs, client::Client, control::Ask};
use serde_json::Value;
use std::{
    io::{self, Write},
    path::Path,
    process::ExitCode,
};

/// `longsplice trace`.
pub fn trace(control: Option<&Path>, args: &TraceArgs) -> Outcome {
    let mut client = Client::connect(control)?;
    let mut answer = client.ask(Ask::Trace { id: args.id, count: args.count, seconds: args.seconds })?;
    let mut out = io::stdout().lock();
    if !args.json {
        writeln!(out, "{}", head())?;
    }
    let mut first = None;
    loop {
        for segment in answer.get("segments").and_then(Value::as_array).into_iter().flatten() {
            if args.json {
                writeln!(out, "{segment}")?;
                continue;
            }
            let when = segment["when"].as_u64().unwrap_or(0);
            let since = when.saturating_sub(*first.get_or_insert(when));
            out.write_all(lines(segment, since).as_bytes())?;
        }
        out.flush()?;
        match answer.get("lost").and_then(Value::as_u64) {
            Some(0) => return Ok(ExitCode::SUCCESS),
            Some(lost) => {
                eprintln!("longsplice: {lost} segments are missing: they came faster than they could be shown");
                return Ok(ExitCode::SUCCESS);
            }
            None => answer = client.answer()?,
        }
    }
}

fn row(cells: [&str; 14]) -> String {
    let [time, leg, from, flags, seq, ack, len, window, to, seq2, ack2, len2, window2, verdicts] = cells;
    let came = format!("{time:>10}  {leg:<6}  {from:<6}  {flags:<5}{seq:>10}  {ack:>10}  {len:>5}  {window:>5}");
    let left = format!("{to:<6}  {seq2:>10}  {ack2:>10}  {len2:>5}  {window2:>5}");
    format!("{came}   {left}  {verdicts}").trim_end().to_owned()
}

fn head() -> String {
    row(["TIME", "LEG", "FROM", "FLAGS", "SEQ", "ACK", "LEN", "WIN", "TO", "SEQ", "ACK", "LEN", "WIN", "VERDICTS"])
}

/// Formats one segment, `since` nanoseconds after the first.
fn lines(segment: &Value, since: u64) -> String {
    let word = |key: &str| segment[key].as_str().unwrap_or("-");
    let numbers = |of: &Value| ["seq", "ack", "len", "window"].map(|key| of[key].to_string());
    let (leg, from) = (word("leg"), word("from"));
    let other = if leg == "client" { "server" } else { "client" };
    let copies = [("to_host", if from == "socket" { leg } else { other }), ("to_socket", "socket")];
    let mut left: Vec<_> = copies.iter().filter(|(key, _)| segment[key].is_object()).collect();
    left.extend(left.is_empty().then_some(&("", "nobody")));
    let verdicts = segment["verdicts"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let verdicts = verdicts.collect::<Vec<_>>().join(" ");
    let time = format!("{}.{:06}", since / 1_000_000_000, since / 1000 % 1_000_000);
    let [seq, ack, len, window] = numbers(&segment["came"]);
    let flags = segment["came"]["flags"].as_str().unwrap_or("-");
    let mut came = [&*time, leg, from, flags, &seq, &ack, &len, &window];
    let mut text = String::new();
    for (i, (key, to)) in left.iter().enumerate() {
        let [seq, ack, len, window] =
            if segment[key].is_object() { numbers(&segment[key]) } else { Default::default() };
        let verdicts = if i == 0 { &*verdicts } else { "" };
        let [a, b, c, d, e, f, g, h] = came;
        text += &row([a, b, c, d, e, f, g, h, to, &seq, &ack, &len, &window, verdicts]);
        text.push('\n');
        came = [""; 8];
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_line_for_each_copy() {
        let numbers = |seq: u32| json!({ "seq": seq, "ack": 7, "len": 100, "flags": "P.", "window": 500 });
        let mut segment = json!({
            "when": 5, "leg": "client", "from": "host", "came": numbers(1), "to_host": numbers(2), "to_socket": numbers(3),
            "verdicts": ["both"],
        });
        let text = head() + "\n" + &lines(&segment, 1_234_567_890);
        let rows: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(rows[0].len(), 14);
        let first =
            ["1.234567", "client", "host", "P.", "1", "7", "100", "500", "server", "2", "7", "100", "500", "both"];
        assert_eq!(rows[1], first);
        assert_eq!(rows[2], ["socket", "3", "7", "100", "500"]);
        let columns: Vec<_> =
            text.lines().map(|l| [" TO ", " server ", " socket "].iter().find_map(|w| l.find(w))).collect();
        assert!(columns.iter().all(|at| *at == columns[0]), "{text}");
        segment["to_host"] = Value::Null;
        segment["to_socket"] = Value::Null;
        segment["verdicts"] = json!(["out-of-window"]);
        let text = lines(&segment, 0);
        assert!(text.contains(" nobody ") && text.ends_with(" out-of-window\n"), "{text}");
    }
}
