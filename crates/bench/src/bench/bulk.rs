//! Bulk: how fast one connection and several carry bytes from server to client, and what that costs the machine.
//!
//! The two end hosts run on the same machine, and their work is in the figures, the same for every variant: the ratios
//! between variants are therefore nearer to one than for a forwarder by itself.

use super::{
    Bench, Result,
    counters::FromServer,
    machine::{Cost, Watch},
    results::{Case, Run},
    subject::Subject,
    variant::Variant,
    venue::{PATIENCE, Packets, Pair, Venue},
};
use longsplice_lab::process::wait_for;
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
const CONNECTIONS: [u64; 3] = [1, 8, 64];
/// Where packets are to be put together, the average one is as large as two at least.
pub const COALESCED: f64 = 2.0 * 1514.0;
/// Everywhere.
const VARIANTS: [Variant; 5] =
    [Variant::IpForward, Variant::Spliced, Variant::SplicedPeer, Variant::Copy, Variant::Haproxy];
/// All sizes of packets, all numbers of connections.
pub fn measure(bench: &Bench) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for packets in [Packets::Large, Packets::Mtu, Packets::Coalesced] {
        let variants = |connections| variants(packets, connections);
        let venues = bench.venues(&variants(CONNECTIONS[0]), packets)?;
        for venue in venues.all() {
            bench.check()?;
            // Not counted: the first transfer through anything was up to three times slower than the next. A peer that
            // fails will say so when it counts.
            let _ = transfer(venue, 1, bench.seconds.min(FIRST));
        }
        for connections in CONNECTIONS {
            let subject = Subject::Bulk { packets, connections };
            cases.push(
                bench.rounds(subject, &variants(connections), |v| run(venues.of(v)?, connections, bench.seconds))?,
            );
        }
    }
    Ok(cases)
}

/// Every proxy with large packets only, and not with 64 connections: they tell the same story with MTU-size packets.
fn variants(packets: Packets, connections: u64) -> Vec<Variant> {
    if packets == Packets::Large && connections < 64 {
        [&[Variant::IpForward, Variant::SplicedPeer][..], &Variant::PROXIES].concat()
    } else {
        VARIANTS.to_vec()
    }
}

fn run(venue: &Venue, connections: u64, seconds: f64) -> Result<Run> {
    let before = FromServer::so_far(venue)?;
    let (bytes, cost) = transfer(venue, connections as usize, seconds)?;
    let packet = FromServer::so_far(venue)?.size_since(before);
    let gigabytes = bytes as f64 / 1e9;
    let (gbit, cpu) = (gigabytes * 8.0 / cost.seconds, cost.cpu / gigabytes);
    Ok(Run { packet, ..Run::new(venue.variant, cost, bytes as f64, gbit, cpu) })
}

/// Bytes that arrived in the time, and what they have cost.
fn transfer(venue: &Venue, connections: usize, seconds: f64) -> Result<(u64, Cost)> {
    transfer_over(venue.connect(connections)?, seconds)
}

/// The same, over these.
pub fn transfer_over(pairs: Vec<Pair>, seconds: f64) -> Result<(u64, Cost)> {
    let stop = Arc::new(AtomicBool::new(false));
    let received = Arc::new(AtomicU64::new(0));
    let mut threads = Vec::new();
    for Pair { client, server } in pairs {
        let (stop, received) = (stop.clone(), received.clone());
        threads.push(thread::spawn(move || send(server, &stop)));
        threads.push(thread::spawn(move || receive(client, &received)));
    }
    // A busy machine, or a retransmission time-out, can make nothing arrive for longer than a short measurement takes.
    let wait = |seen: u64| wait_for(PATIENCE, || (received.load(Relaxed) > seen).then_some(()));
    thread::sleep(WARM_UP);
    let began = wait(0);
    let watch = Watch::start();
    let begin = received.load(Relaxed);
    thread::sleep(Duration::from_secs_f64(seconds));
    let arrives = began.and_then(|()| wait(begin));
    let bytes = received.load(Relaxed) - begin;
    let cost = watch.stop();
    stop.store(true, Relaxed);
    for thread in threads {
        thread.join().map_err(|_| "a sender or receiver panicked")??;
    }
    arrives.ok_or("nothing arrives")?;
    Ok((bytes, cost))
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
