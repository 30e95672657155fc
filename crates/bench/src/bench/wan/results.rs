//! The figures of `wan`: ratios of times, and what happened to the connections.

use super::super::{
    Result,
    machine::Machine,
    report::{self, table, wrap},
    stats::Spread,
    subject::plural,
};
use super::LIMIT;
use crate::cell::{Cell, Middle};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, fs, path::Path};

/// Name of the result file. It is separate from the other results, because it is measured at another time.
pub const JSON: &str = "wan.json";

/// The contents of the result file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WanResults {
    /// [`FORMAT`](super::FORMAT).
    pub format: u32,
    /// Day in UTC.
    pub date: String,
    /// Where and with what the results were measured.
    pub machine: Machine,
    /// Number of rounds.
    pub rounds: usize,
    /// Requests measured on each HTTP connection.
    pub requests: usize,
    /// The cells.
    pub rows: Vec<Row>,
    /// Memory of slow readers.
    pub readers: Vec<Readers>,
    /// Unsplices in mid-transfer.
    pub unsplices: Vec<Unspliced>,
}

/// One run of a cell with one subject.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Seconds until the last byte arrived, from connecting on, or from the request on a warm connection.
    pub seconds: f64,
    /// Whether it was cut off at [`LIMIT`].
    pub late: bool,
    /// Segments that the sending host sent again.
    pub retransmitted: u32,
    /// Its retransmission timeouts.
    pub timeouts: u32,
    /// Segments that any host received again although it had acknowledged them.
    pub needless: u64,
    /// Packets that the lab dropped for want of room. Should be zero.
    pub dropped: u64,
    /// Share of bytes spliced.
    pub spliced: Option<f64>,
    /// Why the connection was not spliced.
    pub refusal: Option<String>,
}

/// One run with each subject.
type RoundOfRuns = [(Middle, Run)];

/// A cell, measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The cell.
    pub cell: Cell,
    /// One line for each subject.
    pub lines: Vec<Line>,
}

/// A subject in a cell. Counts are those of the worst round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// The subject.
    pub middle: Middle,
    /// Seconds of a transfer.
    pub seconds: Spread,
    /// Bytes per second, from the median.
    pub rate: f64,
    /// The ratio to the time of routing, within each round.
    pub to_routed: Option<Spread>,
    /// The ratio to the time of copying, within each round.
    pub to_copied: Option<Spread>,
    /// The ratio to the slower of the two.
    pub to_slower: Option<Spread>,
    /// Number of rounds cut off after the time limit.
    pub late: usize,
    /// Segments that the sending host sent again.
    pub retransmitted: u32,
    /// Its retransmission timeouts.
    pub timeouts: u32,
    /// Segments that any host received again although it had acknowledged them.
    pub needless: u64,
    /// Packets that the lab dropped for want of room.
    pub dropped: u64,
    /// Share of bytes spliced, the mean of all rounds.
    pub spliced: Option<f64>,
    /// Why connections were not spliced.
    pub refusals: BTreeSet<String>,
}

impl Row {
    /// Summarizes the rounds of a cell.
    pub fn of(cell: Cell, rounds: &[Vec<(Middle, Run)>]) -> Row {
        let all = order().filter_map(|middle| Line::of(middle, cell, rounds));
        Row { cell, lines: all.collect() }
    }

    /// The line of a subject.
    pub fn line(&self, middle: Middle) -> Option<&Line> {
        self.lines.iter().find(|line| line.middle == middle)
    }

    /// How many needless segments this line has more than copying.
    fn more_needless(&self, line: &Line) -> u64 {
        line.needless.saturating_sub(self.line(Middle::Copied).map_or(0, |copied| copied.needless))
    }

    /// Progress, in one line.
    pub fn words(&self) -> String {
        let line = |line: &Line| {
            let happened = if line.happened().is_empty() { String::new() } else { format!(" ({})", line.happened()) };
            format!("{} {}{happened}", line.middle.title(), line.time())
        };
        format!("{}: {} s", self.cell.label(), self.lines.iter().map(line).collect::<Vec<_>>().join(", "))
    }
}

impl Line {
    fn of(middle: Middle, cell: Cell, rounds: &[Vec<(Middle, Run)>]) -> Option<Line> {
        fn time(round: &RoundOfRuns, middle: Middle) -> Option<f64> {
            round.iter().find(|(m, _)| *m == middle).map(|(_, run)| run.seconds)
        }
        let runs: Vec<&Run> = rounds.iter().flatten().filter(|(m, _)| *m == middle).map(|(_, run)| run).collect();
        let seconds = Spread::of(runs.iter().map(|run| run.seconds))?;
        let ratio = |base: &dyn Fn(&RoundOfRuns) -> Option<f64>| {
            Spread::of(rounds.iter().filter_map(|round| Some(time(round, middle)? / base(round)?)))
        };
        let routed = |round: &RoundOfRuns| time(round, Middle::Routed);
        let copied = |round: &RoundOfRuns| time(round, Middle::Copied);
        let spliced: Vec<f64> = runs.iter().filter_map(|run| run.spliced).collect();
        Some(Line {
            middle,
            seconds,
            rate: cell.size.0 as f64 / seconds.median,
            to_routed: ratio(&routed),
            to_copied: ratio(&copied),
            to_slower: ratio(&|round| Some(routed(round)?.max(copied(round)?))),
            late: runs.iter().filter(|run| run.late).count(),
            retransmitted: runs.iter().map(|run| run.retransmitted).max()?,
            timeouts: runs.iter().map(|run| run.timeouts).max()?,
            needless: runs.iter().map(|run| run.needless).max()?,
            dropped: runs.iter().map(|run| run.dropped).max()?,
            spliced: (!spliced.is_empty()).then(|| spliced.iter().sum::<f64>() / spliced.len() as f64),
            refusals: runs.iter().filter_map(|run| run.refusal.clone()).collect(),
        })
    }

    /// The time: `0.316`, or `>20` if most rounds were cut off.
    fn time(&self) -> String {
        let median = self.seconds.median;
        if median >= LIMIT.as_secs_f64() { format!(">{}", LIMIT.as_secs()) } else { format!("{median:.3}") }
    }

    /// The time with its ratios to routing and to copying.
    fn time_and_ratios(&self) -> String {
        let ratios = match self.middle {
            Middle::Routed => [None, None],
            Middle::Copied => [self.to_routed, None],
            _ => [self.to_routed, self.to_copied],
        };
        let ratios: Vec<String> = ratios.into_iter().flatten().map(|r| format!("{:.2}", r.median)).collect();
        if ratios.is_empty() { self.time() } else { format!("{}: {}", self.time(), ratios.join(" / ")) }
    }

    /// What longsplice decided, in words.
    pub fn decision(&self) -> String {
        let why: Vec<_> = self.refusals.iter().map(|why| format!("`{why}`")).collect();
        let why = if why.is_empty() { String::new() } else { format!(" ({})", why.join(", ")) };
        match self.spliced {
            None => String::new(),
            Some(0.0) => format!("copied{why}"),
            Some(part) => format!("spliced {:.0} % of it{why}", part * 100.0),
        }
    }

    /// What happened to the connection; empty if nothing did.
    fn happened(&self) -> String {
        let mut parts = Vec::new();
        if self.late > 0 {
            parts.push(format!("{} of {} cut off", self.late, self.seconds.n));
        }
        if self.timeouts > 0 {
            parts.push(format!("{} RTO", self.timeouts));
        }
        if self.retransmitted > 0 {
            parts.push(format!("{} again", self.retransmitted));
        }
        if self.needless > 0 {
            parts.push(format!("{} needless", self.needless));
        }
        if self.dropped > 0 {
            parts.push(format!("{} dropped", self.dropped));
        }
        if let Some(spliced) = self.spliced.filter(|_| self.middle != Middle::Copied) {
            parts.push(format!("{spliced:.2} spliced"));
            parts.extend(self.refusals.iter().cloned());
        }
        parts.join(", ")
    }
}

/// Memory of the forwarder's sockets while clients read slowly.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Readers {
    /// What stands in the middle.
    pub middle: Middle,
    /// Number of clients.
    pub clients: usize,
    /// Largest sum of all sockets' memory at the forwarder in bytes, per client.
    pub peak: f64,
    /// The median of that, over the whole transfer.
    pub median: f64,
    /// Seconds until the last client had everything.
    pub seconds: f64,
}

/// A transfer that is unspliced half-way, and one that is not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Unspliced {
    /// The transfer.
    pub cell: Cell,
    /// Seconds without an unsplice.
    pub without: Spread,
    /// Seconds with it.
    pub with: Spread,
    /// Packets that the forwarder dropped because they lay beyond its window (BeyondWindow), in the worst round; `None`
    /// before Linux 6.15, which counts them first.
    pub beyond_window: Option<u64>,
    /// Segments that the sender sent again, in the worst round.
    pub retransmitted: u32,
    /// Its retransmission timeouts, in the worst round.
    pub timeouts: u32,
}

impl WanResults {
    /// Writes the file, beside other results or alone.
    pub fn write(&self, dir: &Path) -> Result<()> {
        fs::create_dir_all(dir)?;
        Ok(fs::write(dir.join(JSON), serde_json::to_string_pretty(self)? + "\n")?)
    }

    /// Formats the results with a heading, as Markdown.
    pub fn text(&self) -> String {
        let head = format!("## Long and lossy paths, measured on {}", self.date);
        let machine = report::machine(&self.machine);
        format!("{head}\n\n{machine}.\n\n{}{}{}{}", self.cells(), self.verdict(), self.slow_readers(), self.unspliced())
    }

    fn cells(&self) -> String {
        let times = format!(
            "Seconds until the last byte has arrived, and the ratios to routing and to copying (medians of {} rounds; \
             of {} requests each over HTTP):",
            self.rounds, self.requests
        );
        tables(&self.rows, &times)
    }

    /// How the default policy does, compared with the slower of routing and copying.
    fn verdict(&self) -> String {
        let lines = self.rows.iter().filter_map(|row| Some((row, row.line(Middle::Default)?)));
        let ratios: Vec<(&Row, &Line, f64)> =
            lines.filter_map(|(row, line)| Some((row, line, line.to_slower?.median))).collect();
        let Some((worst, _, most)) = ratios.iter().max_by(|a, b| a.2.total_cmp(&b.2)) else { return String::new() };
        let median = Spread::of(ratios.iter().map(|(.., ratio)| *ratio)).map_or(0.0, |s| s.median);
        let lossless = || ratios.iter().filter(|(row, ..)| row.cell.loss == 0.0);
        let timeouts: u32 = lossless().map(|(_, line, _)| line.timeouts).sum();
        let needless: u64 = lossless().map(|(row, line, _)| row.more_needless(line)).sum();
        let text = format!(
            "The default policy takes {median:.2} times as long as the slower of routing and copying in the median of {} \
             rows, and {most:.2} times at most ({}). In the rows without loss, its worst rounds have {}, \
             and {} in vain more than those of copying, all rows together.",
            ratios.len(),
            worst.cell.label(),
            plural(timeouts.into(), "timeout"),
            plural(needless, "segment"),
        ) + &self.share_towards_near_hosts();
        wrap(&text).join("\n") + "\n\n"
    }

    /// How much the default policy splices where a splice does no harm, by bytes.
    fn share_towards_near_hosts(&self) -> String {
        let near = self.rows.iter().filter(|row| row.cell.is_towards_near_host());
        let shares = near.filter_map(|row| Some((row.cell.size.0 as f64, row.line(Middle::Default)?.spliced?)));
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

    fn slow_readers(&self) -> String {
        let rows = self.readers.iter().map(|r| {
            let kb = |bytes: f64| format!("{:.0}", bytes / 1e3);
            vec![
                r.middle.title().to_owned(),
                r.clients.to_string(),
                kb(r.peak),
                kb(r.median),
                format!("{:.1}", r.seconds),
            ]
        });
        let columns = ["clients", "KB each, at most", "in the median", "seconds"].map(str::to_owned);
        let head = "Memory of the forwarder's sockets while clients read 1 MB per second of 10 MB, 50 ms away:";
        table(head, "variant", &columns, rows.collect())
    }

    fn unspliced(&self) -> String {
        let rows = self.unsplices.iter().map(|u| {
            vec![
                u.cell.label(),
                format!("{:.2}", u.without.median),
                format!("{:.2}", u.with.median),
                u.beyond_window.map_or(String::new(), |n| n.to_string()),
                u.retransmitted.to_string(),
                u.timeouts.to_string(),
            ]
        });
        let columns = ["without, seconds", "with, seconds", "packets beyond the window", "sent again", "RTO"];
        let head = "An unsplice half-way through a transfer that was spliced at once:";
        table(head, "path and object", &columns.map(str::to_owned), rows.collect())
    }
}

/// All subjects, in the order of tables.
fn order() -> impl Iterator<Item = Middle> + Clone {
    Middle::WAN.into_iter().chain(Middle::TPOT.into_iter().skip(1)) // both begin with routing
}

/// The tables of cells: times, with this heading, rates, and what happened.
pub fn tables(rows: &[Row], times: &str) -> String {
    let all = order().filter(|m| rows.iter().any(|row| row.line(*m).is_some()));
    let titles: Vec<String> = all.clone().map(|m| m.title().to_owned()).collect();
    let cells = |cell: fn(&Line) -> String| -> Vec<Vec<String>> {
        let row = |row: &Row| {
            let cells = all.clone().map(|m| row.line(m).map(cell).unwrap_or_default());
            std::iter::once(row.cell.label()).chain(cells).collect()
        };
        rows.iter().map(row).collect()
    };
    let rates = "Rate, KB per second:";
    let happened = "What happened in the worst round: transfers cut off after 20 seconds, the sender's retransmission timeouts (RTO), segments that it sent \
                    again, segments that any host received in vain, the share of bytes that were spliced, and why \
                    they were not:";
    table(times, "path and object", &titles, cells(Line::time_and_ratios))
        + &table(rates, "path and object", &titles, cells(|line| format!("{:.0}", line.rate / 1e3)))
        + &table(happened, "path and object", &titles, cells(Line::happened))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(seconds: f64) -> Run {
        Run {
            seconds,
            late: seconds >= 20.0,
            retransmitted: 0,
            timeouts: 0,
            needless: 0,
            dropped: 0,
            spliced: None,
            refusal: None,
        }
    }

    fn row() -> Row {
        let spliced = Run { spliced: Some(0.5), timeouts: 1, ..run(0.6) };
        let refused = Run { spliced: Some(0.0), refusal: Some("path".into()), needless: 3, ..run(0.8) };
        let rounds = [
            vec![
                (Middle::Routed, run(0.2)),
                (Middle::Copied, run(0.4)),
                (Middle::Default, spliced),
                (Middle::Once, run(20.0)),
            ],
            vec![(Middle::Routed, run(0.8)), (Middle::Copied, run(0.4)), (Middle::Default, refused)],
        ];
        Row::of(Cell::BASE, &rounds)
    }

    #[test]
    fn ratios_are_those_within_rounds() {
        let row = row();
        let line = row.line(Middle::Default).unwrap();
        assert_eq!(line.to_routed.map(|s| (s.low, s.high)), Some((1.0, 0.6 / 0.2)));
        assert_eq!(line.to_slower.map(|s| (s.low, s.high)), Some((1.0, 0.6 / 0.4)));
        assert_eq!(line.happened(), "1 RTO, 3 needless, 0.25 spliced, path");
        assert_eq!(line.rate, 1_000_000.0 / line.seconds.median);
        assert_eq!(row.line(Middle::Once).unwrap().time_and_ratios(), ">20: 100.00 / 50.00");
        assert_eq!(row.line(Middle::Once).unwrap().happened(), "1 of 1 cut off");
        assert!(row.line(Middle::Haproxy).is_none());
    }

    #[test]
    fn the_report_has_a_row_for_each_cell_and_survives_a_file() {
        let machine = Machine::here();
        let mut results = WanResults {
            format: super::super::FORMAT,
            date: "2026-01-01".into(),
            machine,
            rounds: 2,
            requests: 3,
            rows: vec![row()],
            readers: vec![Readers { middle: Middle::Once, clients: 10, peak: 2e6, median: 1e6, seconds: 10.1 }],
            unsplices: Vec::new(),
        };
        let text = results.text().replace('\n', " ");
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
        assert_eq!(serde_json::from_str::<WanResults>(&json).unwrap().text(), results.text());
        results.rows.clear();
        assert!(!results.text().contains("times at most"));
    }
}
