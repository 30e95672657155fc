//! Transfers over long and lossy paths: a splice must not make any of them slower. After a splice, the sender's congestion
//! control drives the whole path with what it has learned about the leg to the forwarder. And translucent proxies, as the TPOT
//! paper measures them: the time until the first byte of a short connection (its Table 3), and such transfers with a proxy half
//! way, or two at its thirds.
//!
//! Each subject has a [venue](Far), and both [ends](super::ends) are threads of this process. A round measures every subject
//! once, in rotated order. The processors are idle most of the time, so that other programs disturb this less than other
//! measurements.

use super::{
    Bench, Result, Venues, bulk,
    ends::minus,
    far::{Far, PROXIES, Record},
    memory::socket_memory,
    network::Packets,
    rate,
    report::CUT_OFF,
    results::{Case, Figure, Part, Results, Run},
    segment,
    stats::Spread,
    subject::Subject,
    variant::Variant,
};
use crate::{
    args::{WanArgs, WanPart},
    cell::{Cell, Congestion, Direction, Distance, Place, Protocol, SUBJECTS, Size},
};
use longsplice::Ask;
use longsplice_datapath::SenderFacts;
use longsplice_lab::{Namespace, Shape, process::wait_for};
use std::{
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

pub use super::ends::LIMIT;

/// Number of rounds, unless the command line says another.
pub const ROUNDS: usize = 3;
/// Number of requests measured on each warm connection.
pub const REQUESTS: usize = 3;
/// Number of slow readers.
const CLIENTS: usize = 10;
/// Bytes that each of them reads per second.
const PER_SECOND: u64 = 1_000_000;
/// The object that slow readers fetch, and the path.
const SLOW: Cell = Cell {
    distance: Distance { place: Place::Client, ms: 50 },
    size: Size(10_000_000),
    congestion: Congestion::Reno,
    ..Cell::BASE
};
/// How often their memory is read.
const EVERY: Duration = Duration::from_millis(250);
/// Time until a connection has ended, at most.
const PATIENCE: Duration = Duration::from_secs(5);

/// Bytes of the segments whose costs are compared for translucent proxies. The larger one fits the MTU with the headers of a
/// tunnel.
const SEGMENTS: [u64; 2] = [1, 1400];
/// Connections at a time in bulk.
const BULK: u64 = 8;
/// Ways of forwarding whose costs are compared.
const COMPARED: [Variant; 6] = [
    Variant::Direct,
    Variant::IpForward,
    Variant::BesideTpot,
    Variant::CopyTpot,
    Variant::SplicedTpot,
    Variant::SplicedTpotUdp,
];

/// Measures the chosen parts of `wan`.
pub fn measure(bench: &Bench, args: &WanArgs) -> Result<(Results, Vec<Case>)> {
    let wanted = SUBJECTS.into_iter().zip(Variant::WAN).filter(|(name, _)| args.compares(name));
    let variants: Vec<Variant> = wanted.map(|(_, variant)| variant).collect();
    let venues = bench.venues(&variants, |v| Far::set(v, Shape::TwoDevices))?;
    let mut cases = Vec::new();
    if args.wants(WanPart::Cells) {
        cases = paths(bench, &venues, &args.chosen().unwrap_or_else(Cell::defaults))?;
    }
    if args.wants(WanPart::SlowReaders) {
        cases.push(slow_readers(bench, &venues)?);
    }
    if args.wants(WanPart::Unsplice) && variants.contains(&Variant::Spliced) {
        cases.extend(unsplices(bench, venues.of(Variant::Spliced)?)?);
    }
    Ok((bench.results(Part::Wan, &cases), cases))
}

/// Measures the chosen parts of `tpot`, which have files of their own.
pub fn translucent(bench: &Bench, args: &WanArgs) -> Result<Vec<(Results, Vec<Case>)>> {
    let mut parts = Vec::new();
    if args.wants(WanPart::Cells) {
        let venues = bench.venues(&Variant::TPOT, |v| Far::set(v, Shape::TwoForwarders))?;
        parts.push((Part::Tpot, paths(bench, &venues, &args.chosen().unwrap_or_else(selection))?));
    }
    if args.wants(WanPart::Costs) {
        let mut cases = segment::cases(bench, &SEGMENTS, &COMPARED)?;
        cases.push(rate::connections(bench, 1, &COMPARED[1..])?);
        for packets in [Packets::Large, Packets::Mtu] {
            let venues = bulk::venues(bench, packets, &COMPARED[1..])?;
            cases.push(bulk::case(bench, packets, BULK, &COMPARED[1..], &venues)?);
        }
        parts.push((Part::TpotCosts, cases));
    }
    Ok(parts.into_iter().map(|(part, cases)| (bench.results(part, &cases), cases)).collect())
}

/// For translucent proxies: one byte from near and far, a large object over growing distances, and a smaller one with losses.
fn selection() -> Vec<Cell> {
    let cell = |place, ms, bytes, loss| Cell {
        distance: Distance { place, ms },
        size: Size(bytes),
        congestion: Congestion::Reno,
        loss,
        ..Cell::BASE
    };
    let first = [1, 100].map(|ms| cell(Place::Both, ms, 1, 0.0));
    let far = [1, 10, 50, 100, 300].map(|ms| cell(Place::Both, ms, 5_000_000, 0.0));
    let lossy = [0.1, 1.0].map(|loss| cell(Place::Both, 50, 2_000_000, loss));
    let thirds = [(100, 1, 0.0), (100, 5_000_000, 0.0), (300, 5_000_000, 0.0), (60, 2_000_000, 1.0)];
    let thirds = thirds.map(|(ms, bytes, loss)| cell(Place::Thirds, ms, bytes, loss));
    first.into_iter().chain(far).chain(lossy).chain(thirds).collect()
}

/// Measures these cells, with the variants that can take part in them.
fn paths(bench: &Bench, venues: &Venues<Far>, cells: &[Cell]) -> Result<Vec<Case>> {
    let case = |cell: &Cell| {
        let variants: Vec<Variant> = venues.variants().filter(|v| v.serves(cell)).collect();
        for venue in venues.all().filter(|venue| variants.contains(&venue.variant)) {
            venue.prepare(cell)?;
        }
        bench.rounds(Subject::Path(*cell), &variants, |v| run(venues.of(v)?, cell))
    };
    cells.iter().map(case).collect()
}

/// Transfers the object once, or over HTTP a few times after once that does not count.
fn run(venue: &Far, cell: &Cell) -> Result<Run> {
    venue.lose(cell)?;
    let needless = || venue.hosts().map(duplicates).sum::<u64>();
    let before = (needless(), venue.ends.server.facts(), venue.dropped());
    let logged = venue.logged();
    let (seconds, client) = venue
        .lab
        .client
        .run(|| transfers(venue, cell).map_err(|e| e.to_string()))
        .map_err(|e| format!("{e}{}", venue.last_words()))?;
    let facts = match cell.direction {
        Direction::Up => client,
        Direction::Down => minus(venue.ends.server.facts(), before.1),
    };
    let late = seconds.contains(&LIMIT.as_secs_f64());
    if late {
        // What is under way must not meet the next transfer.
        thread::sleep(Duration::from_secs(2));
    }
    let count = if cell.protocol == Protocol::Http { seconds.len() + 1 } else { 1 };
    let records = venue.records(&logged, if late { 0 } else { count });
    if !late && records.len() < venue.variant.translucent() {
        return Err("the connection has not met each proxy".into());
    }
    let seconds = Spread::of(seconds).ok_or("nothing was transferred")?.median;
    let counts = [
        (Figure::Retransmitted, f64::from(facts.retransmitted)),
        (Figure::Timeouts, f64::from(facts.timeouts)),
        (Figure::Needless, (needless() - before.0) as f64),
        (Figure::Dropped, (venue.dropped() - before.2) as f64),
    ];
    let mut run = Run::of(venue.variant, [(Figure::Value, seconds)].into_iter().chain(counts));
    run.notes.extend(late.then(|| CUT_OFF.to_owned()));
    run.notes.extend(records.iter().rev().find_map(|record| record.refusal.clone()));
    Ok(run.with(Figure::Spliced, share(&records, cell.direction)))
}

/// The seconds of each transfer, and what the client's kernel has counted. Must be called in the client's namespace.
fn transfers(venue: &Far, cell: &Cell) -> Result<(Vec<f64>, SenderFacts)> {
    let mut began = Instant::now();
    let mut client = venue.connect(cell)?;
    let mut seconds = Vec::new();
    let warm = cell.protocol == Protocol::Http;
    for n in 0..if warm { REQUESTS + 1 } else { 1 } {
        if n > 0 {
            began = Instant::now();
        }
        let Some(ended) = client.transfer(cell.direction, cell.size.0, began + LIMIT)? else {
            seconds.push(LIMIT.as_secs_f64());
            break;
        };
        let arrived = match cell.direction {
            Direction::Down => ended,
            Direction::Up => venue.ends.server.uploaded().ok_or("no upload arrived")?,
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

/// Share of the sender's bytes that were forwarded while spliced; `None` without records.
fn share(records: &[Record], direction: Direction) -> Option<f64> {
    let sum = |of: fn(&Record) -> u64| records.iter().map(of).sum::<u64>() as f64;
    let (all, spliced) = match direction {
        Direction::Down => (sum(|r| r.bytes_down), sum(|r| r.spliced_down)),
        Direction::Up => (sum(|r| r.bytes_up), sum(|r| r.spliced_up)),
    };
    (all > 0.0).then(|| spliced / all)
}

/// Measures the memory of the forwarder's sockets in all venues with a proxy, while clients read slowly.
fn slow_readers(bench: &Bench, venues: &Venues<Far>) -> Result<Case> {
    let proxies: Vec<Variant> = venues.variants().filter(|v| !v.routed()).collect();
    bench.rounds_of(1, Subject::Readers, &proxies, |v| {
        let venue = venues.of(v)?;
        venue.prepare(&SLOW)?;
        readers(venue)
    })
}

fn readers(venue: &Far) -> Result<Run> {
    let began = Instant::now();
    let read = || venue.connect(&SLOW)?.read_slowly(SLOW.size.0, PER_SECOND);
    let samples = Mutex::new(Vec::new());
    let outcome = thread::scope(|scope| {
        let threads: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(|| venue.lab.client.run(read))).collect();
        while threads.iter().any(|thread| !thread.is_finished()) {
            thread::sleep(EVERY);
            samples.lock().expect("one thread").push(socket_memory(&venue.lab.forwarder)? as f64 / CLIENTS as f64);
        }
        for thread in threads {
            thread.join().map_err(|_| "a reader panicked")??;
        }
        Ok::<(), Box<dyn std::error::Error>>(())
    });
    outcome?;
    let samples = samples.into_inner().expect("one thread");
    let figures = [
        (Figure::Amount, CLIENTS as f64),
        (Figure::Value, Spread::of(samples.iter().copied()).ok_or("no sample")?.median),
        (Figure::Peak, samples.iter().copied().fold(0.0, f64::max)),
        (Figure::Seconds, began.elapsed().as_secs_f64()),
    ];
    Ok(Run::of(venue.variant, figures))
}

/// Measures unsplices with Reno and BBR, a far client and a near server.
fn unsplices(bench: &Bench, venue: &Far) -> Result<Vec<Case>> {
    let cell = |congestion, size| Cell { congestion, size: Size(size), ..Cell::BASE };
    let case = |cell: Cell| {
        venue.prepare(&cell)?;
        bench.rounds(Subject::Unsplice(cell), &[venue.variant], |_| {
            unsplice(venue, &cell).map_err(|e| format!("{e}{}", venue.last_words()).into())
        })
    };
    [cell(Congestion::Reno, 10_000_000), cell(Congestion::Bbr, 2_000_000)].into_iter().map(case).collect()
}

fn unsplice(venue: &Far, cell: &Cell) -> Result<Run> {
    let beyond = || venue.lab.forwarder.counter("TcpExt", "BeyondWindow");
    let without = fetch(venue, cell, || Ok(()))?;
    let mut control = venue.control(PROXIES[0])?;
    let ended = || longsplice::flows(&mut control).is_ok_and(|rows| rows.is_empty()).then_some(());
    wait_for(PATIENCE, ended).ok_or("the connection did not end in time")?;
    let before = (beyond(), venue.ends.server.facts());
    let with = fetch(venue, cell, || take_back(venue, cell.size.0 / 2))?;
    let facts = minus(venue.ends.server.facts(), before.1);
    let figures = [
        (Figure::Value, without),
        (Figure::Unsplice, with),
        (Figure::Retransmitted, f64::from(facts.retransmitted)),
        (Figure::Timeouts, f64::from(facts.timeouts)),
    ];
    let beyond = beyond().zip(before.0).map(|(after, before)| (after - before) as f64);
    Ok(Run::of(venue.variant, figures).with(Figure::BeyondWindow, beyond))
}

/// Fetches the object, and returns the seconds. The connection stays open until `meanwhile` has ended, too.
fn fetch(venue: &Far, cell: &Cell, meanwhile: impl FnOnce() -> Result<()> + Send) -> Result<f64> {
    let began = Instant::now();
    let mut client = venue.lab.client.run(|| venue.connect(cell))?;
    let (ended, done) = thread::scope(|scope| {
        let meanwhile = scope.spawn(|| meanwhile().map_err(|e| e.to_string()));
        (client.transfer(cell.direction, cell.size.0, began + LIMIT), meanwhile.join())
    });
    done.map_err(|_| "what was to be done meanwhile has panicked")??;
    Ok(ended?.map_or(LIMIT, |ended| ended - began).as_secs_f64())
}

/// Unsplices the flow that is open once it is spliced and this many bytes have come from the server. Not after a
/// time: transfers of the same object differ in their duration, with BBR by a factor of some.
fn take_back(venue: &Far, after: u64) -> Result<()> {
    let mut control = venue.control(PROXIES[0])?;
    let found = wait_for(LIMIT, || match longsplice::flows(&mut control) {
        Ok(rows) => rows.iter().find(|row| row.state == "spliced" && row.bytes_down >= after).map(|row| Ok(row.id)),
        Err(e) => Some(Err(e)),
    });
    let id = found.ok_or("no flow was spliced and half-way in time")??;
    control.ask(Ask::Unsplice { id })?;
    Ok(())
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
