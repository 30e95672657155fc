//! Transfers over long and lossy paths: a splice must not make any of them slower. After a splice, the sender's congestion
//! control drives the whole path with what it has learned about the leg to the forwarder.
//!
//! Each subject has a [`venue`], and both [`ends`] are threads of this process. A round measures every subject once, in
//! rotated order. [`extras`] measures the memory of slow readers and an unsplice, and [`results`] are the figures.
//!
//! The processors are idle most of the time, so that other programs disturb this less than other measurements.

mod ends;
mod extras;
mod results;
mod venue;

use super::{
    Bench, Result,
    machine::{Machine, today},
    results::FORMAT,
    stats::Spread,
};
use crate::{
    args::{WanArgs, WanPart},
    cell::{Cell, Direction, Middle, Protocol},
};
use ends::LIMIT;
use longsplice_datapath::SenderFacts;
use longsplice_lab::{Namespace, Shape};

pub use results::{JSON, Line, Row, Run, WanResults, tables};
use std::{
    thread,
    time::{Duration, Instant},
};
use venue::{Record, Venue};

/// Number of rounds, unless the command line says another.
pub const ROUNDS: usize = 3;
/// Number of requests measured on each warm connection.
const REQUESTS: usize = 3;

/// Measures the chosen parts.
pub fn measure(bench: &Bench, args: &WanArgs) -> Result<WanResults> {
    let mut results = WanResults {
        format: FORMAT,
        date: today(),
        machine: Machine::here(),
        rounds: bench.rounds,
        requests: REQUESTS,
        rows: Vec::new(),
        readers: Vec::new(),
        unsplices: Vec::new(),
    };
    let has = |middle: &Middle| *middle != Middle::Haproxy || bench.has(super::variant::Variant::Haproxy);
    let subjects = Middle::WAN.into_iter().filter(|middle| args.compares(*middle) && has(middle));
    let venues = venues(subjects, Shape::TwoDevices)?;
    if args.wants(WanPart::Cells) {
        results.rows = rows(bench, "wan", &venues, args.cells())?;
    }
    if args.wants(WanPart::SlowReaders) {
        results.readers = extras::slow_readers(bench, &venues)?;
    }
    if args.wants(WanPart::Unsplice) {
        results.unsplices = extras::unsplices(bench, &venues)?;
    }
    Ok(results)
}

/// Sets up a venue for each subject.
pub fn venues(subjects: impl IntoIterator<Item = Middle>, shape: Shape) -> Result<Vec<Venue>> {
    let set = |middle: Middle| Venue::set(middle, shape).map_err(|e| format!("{}: {e}", middle.title()).into());
    subjects.into_iter().map(set).collect()
}

/// Measures these cells, with the subjects that can take part in them.
pub fn rows(bench: &Bench, what: &str, venues: &[Venue], cells: Vec<Cell>) -> Result<Vec<Row>> {
    let bar = bench.bar(what, cells.len());
    let measured = |cell| row(bench, venues, cell).inspect(|_| bar.inc(1));
    let rows = cells.into_iter().map(measured).collect();
    bar.finish_and_clear();
    rows
}

/// Measures a cell with all subjects.
fn row(bench: &Bench, venues: &[Venue], cell: Cell) -> Result<Row> {
    let venues: Vec<&Venue> = venues.iter().filter(|venue| venue.middle.serves(&cell)).collect();
    for venue in &venues {
        venue.prepare(&cell)?;
    }
    let mut rounds = Vec::new();
    for n in 0..bench.rounds {
        let mut runs = Vec::new();
        for i in 0..venues.len() {
            bench.check()?;
            let venue = venues[(i + n) % venues.len()];
            venue.lose(&cell, n)?;
            let named = |e| format!("{}: {}: {e}{}", cell.label(), venue.middle.title(), venue.last_words());
            runs.push((venue.middle, run(venue, &cell).map_err(named)?));
        }
        rounds.push(runs);
    }
    let row = Row::of(cell, &rounds);
    bench.say(&row.words());
    Ok(row)
}

/// Transfers the object once, or over HTTP a few times after once that does not count.
fn run(venue: &Venue, cell: &Cell) -> Result<Run> {
    let needless = || venue.hosts().map(duplicates).sum::<u64>();
    let before = (needless(), venue.server.facts(), venue.dropped());
    let logged = venue.logged();
    let (seconds, client) = venue.lab.client.run(|| transfers(venue, cell).map_err(|e| e.to_string()))?;
    let facts = match cell.direction {
        Direction::Up => client,
        Direction::Down => minus(venue.server.facts(), before.1),
    };
    let late = seconds.contains(&LIMIT.as_secs_f64());
    if late {
        // What is under way must not meet the next transfer.
        thread::sleep(Duration::from_secs(2));
    }
    let count = if cell.protocol == Protocol::Http { seconds.len() + 1 } else { 1 };
    let records = venue.records(&logged, if late { 0 } else { count });
    if !late && records.len() < venue.middle.translucent() {
        return Err("the connection has not met each proxy".into());
    }
    Ok(Run {
        seconds: Spread::of(seconds).ok_or("nothing was transferred")?.median,
        late,
        retransmitted: facts.retransmitted,
        timeouts: facts.timeouts,
        needless: needless() - before.0,
        dropped: venue.dropped() - before.2,
        spliced: share(&records, cell.direction),
        refusal: records.iter().rev().find_map(|record| record.refusal.clone()),
    })
}

/// The seconds of each transfer, and what the client's kernel has counted. Must be called in the client's namespace.
fn transfers(venue: &Venue, cell: &Cell) -> Result<(Vec<f64>, SenderFacts)> {
    let mut began = Instant::now();
    let mut deadline = began + LIMIT;
    let client = venue.connect(cell)?;
    let mut seconds = Vec::new();
    let warm = cell.protocol == Protocol::Http;
    for n in 0..if warm { REQUESTS + 1 } else { 1 } {
        if n > 0 {
            began = Instant::now();
            deadline = began + LIMIT;
        }
        let Some(ended) = client.transfer(cell.direction, cell.size.0, deadline)? else {
            seconds.push(LIMIT.as_secs_f64());
            break;
        };
        let arrived = match cell.direction {
            Direction::Down => ended,
            Direction::Up => venue.server.uploaded().ok_or("no upload arrived")?,
        };
        if !warm || n > 0 {
            seconds.push((arrived - began).as_secs_f64());
        }
    }
    Ok((seconds, client.facts()))
}

/// Segments that a host has received in vain: it reports each to the sender (RFC 2883).
fn duplicates(host: &Namespace) -> u64 {
    let reported = ["TCPDSACKOldSent", "TCPDSACKOfoSent"];
    reported.into_iter().filter_map(|name| host.counter("TcpExt", name)).sum()
}

fn minus(after: SenderFacts, before: SenderFacts) -> SenderFacts {
    SenderFacts {
        retransmitted: after.retransmitted.saturating_sub(before.retransmitted),
        timeouts: after.timeouts.saturating_sub(before.timeouts),
    }
}

/// Share of the sender's bytes that were forwarded while spliced; `None` without records.
fn share(records: &[Record], direction: Direction) -> Option<f64> {
    let sum = |of: fn(&Record) -> u64| records.iter().map(of).sum::<u64>() as f64;
    let (all, spliced) = match direction {
        Direction::Down => (sum(|r| r.bytes_down), sum(|r| r.spliced_down)),
        Direction::Up => (sum(|r| r.bytes_up), sum(|r| r.spliced_up)),
    };
    (all > 0.0).then(|| spliced / all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_spliced_bytes() {
        let record =
            |bytes_down, spliced_down| Record { bytes_up: 10, bytes_down, spliced_up: 0, spliced_down, refusal: None };
        let records = [record(100, 0), record(300, 200)];
        assert_eq!(share(&records, Direction::Down), Some(0.5));
        assert_eq!(share(&records, Direction::Up), Some(0.0));
        assert_eq!(share(&[], Direction::Down), None);
    }
}
