//! Bulk: how fast one connection and several carry bytes from server to client, and what that costs the machine.
//!
//! The two end hosts run on the same machine, and their work is in the figures, the same for every variant: the ratios
//! between variants are therefore nearer to one than for a forwarder by itself.

use super::{
    Bench, Result,
    machine::Watch,
    results::{BulkCase, BulkRound, BulkRun},
    venue::{Packets, Pair, Venue},
};
use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

/// Bytes per write and read: far more than a segment, so that system calls do not count.
const BLOCK: usize = 256 << 10;
/// Windows and pipes are full after this.
const WARM_UP: Duration = Duration::from_millis(200);
/// Seconds of a first transfer that does not count.
const FIRST: f64 = 0.2;
/// Connections at the same time.
const CONNECTIONS: [usize; 2] = [1, 8];

/// All cases, their rounds interleaved: each round measures every variant once, in rotated order.
pub fn measure(bench: &Bench) -> Result<Vec<BulkCase>> {
    let mut cases = Vec::new();
    for packets in [Packets::Large, Packets::Mtu] {
        let venues = bench.venues(packets)?;
        for venue in &venues {
            bench.check()?;
            // Not counted: the first transfer through anything was up to three times slower than the next.
            run(venue, CONNECTIONS[0], bench.seconds.min(FIRST))?;
        }
        let mut of_packets = CONNECTIONS.map(|connections| BulkCase { packets, connections, rounds: Vec::new() });
        for round in 0..bench.rounds {
            for case in &mut of_packets {
                let mut runs = Vec::new();
                for n in 0..venues.len() {
                    bench.check()?;
                    let venue = &venues[(n + round) % venues.len()];
                    runs.push(run(venue, case.connections, bench.seconds)?);
                }
                bench.say(&format!("bulk, {packets:?} packets, {} connections: {}", case.connections, words(&runs)));
                case.rounds.push(BulkRound { runs });
            }
        }
        cases.extend(of_packets);
    }
    Ok(cases)
}

fn words(runs: &[BulkRun]) -> String {
    let mut runs: Vec<&BulkRun> = runs.iter().collect();
    runs.sort_by_key(|r| r.variant);
    let all: Vec<String> = runs.iter().map(|r| format!("{} {:.1}", r.variant, r.gbit)).collect();
    let disturbed = if runs.iter().any(|r| r.disturbed.is_some()) { " (disturbed)" } else { "" };
    format!("{} Gbit/s{disturbed}", all.join(", "))
}

/// One transfer through one variant.
fn run(venue: &Venue, connections: usize, seconds: f64) -> Result<BulkRun> {
    let stop = Arc::new(AtomicBool::new(false));
    let received = Arc::new(AtomicU64::new(0));
    let mut threads = Vec::new();
    for Pair { client, server } in venue.connect(connections)? {
        let (stop, received) = (stop.clone(), received.clone());
        threads.push(thread::spawn(move || send(server, &stop)));
        threads.push(thread::spawn(move || receive(client, &received)));
    }
    thread::sleep(WARM_UP);
    let before = received.load(Relaxed);
    let watch = Watch::start();
    let begin = received.load(Relaxed);
    thread::sleep(Duration::from_secs_f64(seconds));
    let bytes = received.load(Relaxed) - begin;
    let cost = watch.stop();
    stop.store(true, Relaxed);
    for thread in threads {
        thread.join().map_err(|_| "a sender or receiver panicked")?.map_err(|e| format!("{}: {e}", venue.variant))?;
    }
    if before == 0 || bytes == 0 {
        return Err(format!("{}: nothing arrives", venue.variant).into());
    }
    let (variant, disturbed) = (venue.variant, cost.disturbed);
    let gigabytes = bytes as f64 / 1e9;
    Ok(BulkRun {
        variant,
        bytes,
        seconds: cost.seconds,
        gbit: gigabytes * 8.0 / cost.seconds,
        cpu_per_gb: cost.cpu / gigabytes,
        disturbed,
    })
}

fn send(mut to: TcpStream, stop: &AtomicBool) -> io::Result<()> {
    let block = vec![0x55; BLOCK];
    while !stop.load(Relaxed) {
        to.write_all(&block)?;
    }
    to.shutdown(Shutdown::Write)?;
    // The client closes when it has everything: until then the socket must not go, or what is under way may be reset.
    to.read(&mut [0]).map(drop)
}

fn receive(mut from: TcpStream, received: &AtomicU64) -> io::Result<()> {
    let mut block = vec![0; BLOCK];
    loop {
        match from.read(&mut block)? {
            0 => return Ok(()),
            n => received.fetch_add(n as u64, Relaxed),
        };
    }
}
