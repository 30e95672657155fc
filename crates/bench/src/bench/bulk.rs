//! Bulk: how fast one connection and several transfer bytes from server to client, and the processor time they take.
//!
//! Both end hosts run on the same machine, and their work is part of the figures of every variant: the ratios between
//! variants are therefore closer to one than for a forwarder alone.

use super::{
    Bench, Result,
    counters::FromServer,
    machine::{Cost, Watch},
    network::{PATIENCE, Packets},
    results::{Figure, Run, Section, plural},
    variant::Variant,
    venue::{Near, Pair},
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

/// Bytes per write and read: much larger than a segment, so that the cost of system calls is negligible.
const BLOCK: usize = 256 << 10;
/// Time until windows and pipes are full.
const WARM_UP: Duration = Duration::from_millis(200);
/// Length in seconds of a first transfer that does not count.
const FIRST: f64 = 0.2;
/// The variants compared.
const VARIANTS: [Variant; 9] = [
    Variant::IpForward,
    Variant::Spliced,
    Variant::SplicedPeer,
    Variant::Copy,
    Variant::Pipes,
    Variant::Haproxy,
    Variant::Nginx,
    Variant::Socat,
    Variant::Dante,
];
/// Those with MTU-size packets, and with 64 connections, where the results of all are similar.
const FEW: [Variant; 5] = [Variant::IpForward, Variant::Spliced, Variant::SplicedPeer, Variant::Copy, Variant::Haproxy];

/// Measures all packet sizes and numbers of connections.
pub fn measure(bench: &Bench<'_>) -> Result<()> {
    cases(bench, Packets::Large, &[1, 8], &VARIANTS)?;
    cases(bench, Packets::Large, &[64], &FEW)?;
    [Packets::Mtu, Packets::Coalesced].into_iter().try_for_each(|packets| cases(bench, packets, &[1, 8, 64], &FEW))
}

/// Measures these numbers of connections.
pub fn cases(bench: &Bench<'_>, packets: Packets, numbers: &[u64], variants: &[Variant]) -> Result<()> {
    let venues = bench.venues(variants, |v| Near::set(v, packets))?;
    for venue in venues.all() {
        bench.check()?;
        // Not counted: the first transfer of each venue was up to three times slower
        // than the next. If a peer fails here, it will fail again when it counts.
        let _ = transfer(venue, 1, bench.seconds.min(FIRST));
    }
    numbers.iter().try_for_each(|n| {
        let row = format!("{}, {}", packets.title(), plural(*n, "connection"));
        bench.rounds(Section::Bulk, &row, variants, |v| run(venues.of(v)?, *n, bench.seconds))
    })
}

fn run(venue: &Near, connections: u64, seconds: f64) -> Result<Run> {
    let before = FromServer::so_far(venue)?;
    let (bytes, cost) = transfer(venue, connections as usize, seconds)?;
    let packet = FromServer::so_far(venue)?.size_since(before);
    let gigabytes = bytes as f64 / 1e9;
    let (gbit, cpu) = (gigabytes * 8.0 / cost.seconds, cost.cpu / gigabytes);
    Ok(Run::new(venue.variant, cost, bytes as f64, gbit, cpu).with(Figure::Packet, packet))
}

/// Returns the bytes received in the time, and the cost.
fn transfer(venue: &Near, connections: usize, seconds: f64) -> Result<(u64, Cost)> {
    transfer_over(venue.connect(connections)?, seconds)
}

/// The same over existing connections.
pub fn transfer_over(pairs: Vec<Pair>, seconds: f64) -> Result<(u64, Cost)> {
    let stop = Arc::new(AtomicBool::new(false));
    let received = Arc::new(AtomicU64::new(0));
    let mut threads = Vec::new();
    for Pair { client, server } in pairs {
        let (stop, received) = (stop.clone(), received.clone());
        threads.push(thread::spawn(move || send(server, &stop, Duration::ZERO)));
        threads.push(thread::spawn(move || receive(client, &received)));
    }
    // On a busy machine, or after a retransmission timeout, no byte may arrive for longer than a short measurement lasts.
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

/// Sends blocks, with a pause after each, until it is told to stop and the client has everything.
pub fn send(mut to: TcpStream, stop: &AtomicBool, pause: Duration) -> io::Result<()> {
    let block = vec![0x55; BLOCK];
    while !stop.load(Relaxed) {
        to.write_all(&block)?;
        if !pause.is_zero() {
            thread::sleep(pause);
        }
    }
    to.shutdown(Shutdown::Write)?;
    // The client closes when it has everything. The socket must stay
    // open until then, or data in flight may be cut off by a reset.
    to.read(&mut [0]).map(drop)
}

/// Reads everything, and counts it.
pub fn receive(mut from: TcpStream, received: &AtomicU64) -> io::Result<()> {
    let mut block = vec![0; BLOCK];
    loop {
        match from.read(&mut block)? {
            0 => return Ok(()),
            n => received.fetch_add(n as u64, Relaxed),
        };
    }
}
