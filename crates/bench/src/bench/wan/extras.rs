//! Memory of the forwarder's sockets while clients read slowly, and the cost of an unsplice in mid-transfer.

use super::super::{Bench, Result, memory::socket_memory, stats::Spread};
use super::{
    LIMIT, minus,
    results::{Readers, Unspliced},
    venue::Venue,
};
use crate::cell::{Cell, Congestion, Distance, Middle, Place, Size};
use longsplice::Ask;
use longsplice_lab::process::wait_for;
use std::{
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

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
/// How often the memory is read.
const EVERY: Duration = Duration::from_millis(250);
/// Time until a connection has ended, at most.
const PATIENCE: Duration = Duration::from_secs(5);

/// Measures the memory of the forwarder's sockets in all venues with a proxy.
pub fn slow_readers(bench: &Bench, venues: &[Venue]) -> Result<Vec<Readers>> {
    let mut all = Vec::new();
    for venue in venues.iter().filter(|venue| venue.middle != Middle::Routed) {
        bench.check()?;
        venue.prepare(&SLOW)?;
        let readers = readers(venue).map_err(|e| format!("slow readers: {}: {e}", venue.middle.title()))?;
        bench.say(&format!("slow readers: {}: {:.0} KB each", venue.middle.title(), readers.peak / 1e3));
        all.push(readers);
    }
    Ok(all)
}

fn readers(venue: &Venue) -> Result<Readers> {
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
    let seconds = began.elapsed().as_secs_f64();
    let samples = samples.into_inner().expect("one thread");
    let median = Spread::of(samples.iter().copied()).ok_or("no sample")?.median;
    let peak = samples.iter().copied().fold(0.0, f64::max);
    Ok(Readers { middle: venue.middle, clients: CLIENTS, peak, median, seconds })
}

/// Measures unsplices with Reno and BBR, a far client and a near server.
pub fn unsplices(bench: &Bench, venues: &[Venue]) -> Result<Vec<Unspliced>> {
    let Some(venue) = venues.iter().find(|venue| venue.middle == Middle::Once) else { return Ok(Vec::new()) };
    let cell = |congestion, size| Cell { congestion, size: Size(size), ..Cell::BASE };
    let mut all = Vec::new();
    for cell in [cell(Congestion::Reno, 10_000_000), cell(Congestion::Bbr, 2_000_000)] {
        venue.prepare(&cell)?;
        let unspliced = unsplice(bench, venue, cell)
            .map_err(|e| format!("unsplice: {}: {e}{}", cell.label(), venue.last_words()))?;
        bench.say(&format!(
            "unsplice: {}: {:.2} s, without {:.2}",
            cell.label(),
            unspliced.with.median,
            unspliced.without.median
        ));
        all.push(unspliced);
    }
    Ok(all)
}

fn unsplice(bench: &Bench, venue: &Venue, cell: Cell) -> Result<Unspliced> {
    let beyond = || venue.lab.forwarder.counter("TcpExt", "BeyondWindow");
    let (mut without, mut with, mut worst) = (Vec::new(), Vec::new(), (None, 0, 0));
    for _ in 0..bench.rounds {
        bench.check()?;
        without.push(fetch(venue, &cell, || Ok(()))?);
        let mut control = venue.control()?;
        let ended = || longsplice::flows(&mut control).is_ok_and(|rows| rows.is_empty()).then_some(());
        wait_for(PATIENCE, ended).ok_or("the connection did not end in time")?;
        let before = (beyond(), venue.server.facts());
        with.push(fetch(venue, &cell, || take_back(venue, cell.size.0 / 2))?);
        let facts = minus(venue.server.facts(), before.1);
        worst.0 = worst.0.max(beyond().zip(before.0).map(|(after, before)| after - before));
        worst.1 = worst.1.max(facts.retransmitted);
        worst.2 = worst.2.max(facts.timeouts);
    }
    Ok(Unspliced {
        cell,
        without: Spread::of(without).ok_or("no transfer")?,
        with: Spread::of(with).ok_or("no transfer")?,
        beyond_window: worst.0,
        retransmitted: worst.1,
        timeouts: worst.2,
    })
}

/// Fetches the object, and returns the seconds. The connection stays open until `meanwhile` has ended, too.
fn fetch(venue: &Venue, cell: &Cell, meanwhile: impl FnOnce() -> Result<()> + Send) -> Result<f64> {
    let began = Instant::now();
    let client = venue.lab.client.run(|| venue.connect(cell))?;
    let (ended, done) = thread::scope(|scope| {
        let meanwhile = scope.spawn(|| meanwhile().map_err(|e| e.to_string()));
        (client.transfer(cell.direction, cell.size.0, began + LIMIT), meanwhile.join())
    });
    done.map_err(|_| "what was to be done meanwhile has panicked")??;
    Ok(ended?.map_or(LIMIT, |ended| ended - began).as_secs_f64())
}

/// Unsplices the flow that is open once it is spliced and this many bytes have come from the server. Not after a
/// time: transfers of the same object differ in their duration, with BBR by a factor of some.
fn take_back(venue: &Venue, after: u64) -> Result<()> {
    let mut control = venue.control()?;
    let found = wait_for(LIMIT, || match longsplice::flows(&mut control) {
        Ok(rows) => rows.iter().find(|row| row.state == "spliced" && row.bytes_down >= after).map(|row| Ok(row.id)),
        Err(e) => Some(Err(e)),
    });
    let id = found.ok_or("no flow was spliced and half-way in time")??;
    control.ask(Ask::Unsplice { id })?;
    Ok(())
}
