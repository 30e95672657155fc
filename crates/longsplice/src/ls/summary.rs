//! `longsplice ls --summary`: sums over flows.

use super::{bytes, number, printable};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};

/// Sums by listener and state, and numbers of flows by refusal.
pub struct Summary<'a> {
    by: BTreeMap<(&'a str, &'a str), Sum>,
    refused: BTreeMap<&'a str, u64>,
}

#[derive(Default)]
struct Sum {
    flows: u64,
    up: u64,
    down: u64,
    rate: u64,
}

impl<'a> Summary<'a> {
    /// `rates`: bytes per second by the number of the flow.
    pub fn of(flows: &'a [Value], rates: &HashMap<u64, u64>) -> Summary<'a> {
        let mut all = Summary { by: BTreeMap::new(), refused: BTreeMap::new() };
        let text = |flow: &'a Value, key| flow.get(key).and_then(Value::as_str);
        for flow in flows {
            // those of an earlier process have no listener
            let listener = text(flow, "name").or_else(|| text(flow, "protocol")).unwrap_or("-");
            let sum = all.by.entry((listener, text(flow, "state").unwrap_or("-"))).or_default();
            sum.flows += 1;
            sum.up += number(flow, "bytes_up");
            sum.down += number(flow, "bytes_down");
            sum.rate += rates.get(&number(flow, "id")).copied().unwrap_or(0);
            if let Some(refusal) = text(flow, "refusal") {
                *all.refused.entry(refusal).or_default() += 1;
            }
        }
        all
    }

    pub fn json(&self) -> Value {
        let sums = self.by.iter().map(|((listener, state), s)| {
            json!({ "listener": listener, "state": state, "flows": s.flows, "bytes_up": s.up, "bytes_down": s.down, "rate": s.rate })
        });
        json!({ "flows": sums.collect::<Vec<_>>(), "refused": self.refused })
    }

    /// `rated`: whether rates were counted.
    pub fn text(&self, rated: bool) -> String {
        let names = self.by.keys().map(|(listener, _)| listener.chars().count());
        let width = names.chain([8]).max().unwrap_or_default();
        let line = |listener: &str, state: &str, numbers: [String; 4]| {
            let [flows, up, down, rate] = numbers;
            let rate = if rated { format!("  {rate:>10}") } else { String::new() };
            format!("{:<width$}  {state:<8}  {flows:>8}  {up:>9}  {down:>9}{rate}\n", printable(listener))
        };
        let mut text = line("LISTENER", "STATE", ["FLOWS", "UP", "DOWN", "RATE"].map(String::from));
        for ((listener, state), s) in &self.by {
            let numbers = [s.flows.to_string(), bytes(s.up), bytes(s.down), format!("{}/s", bytes(s.rate))];
            text += &line(listener, state, numbers);
        }
        for (refusal, flows) in &self.refused {
            text += &format!("{:<width$}  {:<8}  {flows:>8}\n", format!("refused: {refusal}"), "");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_by_listener_state_and_refusal() {
        let flow = |id: u64, name: Option<&str>, state: &str, refusal: Option<&str>| {
            json!({ "id": id, "name": name, "protocol": "recovered", "state": state, "refusal": refusal,
                "bytes_up": 1000, "bytes_down": 2_000_000 })
        };
        let flows = [
            flow(1, Some("office"), "spliced", None),
            flow(2, Some("office"), "spliced", None),
            flow(3, Some("office"), "copying", Some("path")),
            flow(4, None, "spliced", None),
        ];
        let sums = Summary::of(&flows, &HashMap::from([(1, 500), (2, 1500)]));
        let text = sums.text(true);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5, "{text}");
        assert!(
            lines[2].starts_with("office") && lines[2].contains("spliced") && lines[2].ends_with("2.0 kB/s"),
            "{text}"
        );
        assert!(lines[3].starts_with("recovered") && lines[4].starts_with("refused: path"), "{text}");
        assert!(!sums.text(false).contains("RATE"));
        assert_eq!(sums.json()["flows"][1]["bytes_down"], 4_000_000);
        assert_eq!(sums.json()["refused"]["path"], 1);
    }
}
