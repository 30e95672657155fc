//! Cost of a segment (Table II of the connection-splicing paper): round trips with everything
//! on one CPU. With no other CPU to wait for or to wake up, the time of a round trip is the
//! work for its two segments, each of which carries the acknowledgement of the other.

use super::{
    Bench, Result,
    machine::{Cost, Watch},
    network::{PATIENCE, Packets},
    results::{Run, Section, plural},
    variant::Variant,
    venue::{Near, Pair},
};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};
use std::{
    io::{self, Read, Write},
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

/// The CPU used for everything.
const CPU: usize = 0;
/// Time until caches and windows are warm.
const WARM_UP: Duration = Duration::from_millis(100);

/// The smallest segment, and the largest that fits an MTU of 1500 with timestamps.
pub const BYTES: [u64; 2] = [1, 1448];
/// Variants that are compared.
const VARIANTS: [Variant; 12] = [
    Variant::Direct,
    Variant::IpForward,
    Variant::Filter,
    Variant::Nat,
    Variant::Spliced,
    Variant::Identity,
    Variant::Copy,
    Variant::Pipes,
    Variant::Haproxy,
    Variant::Nginx,
    Variant::Socat,
    Variant::Dante,
];

/// Measures both sizes.
pub fn measure(bench: &Bench<'_>) -> Result<()> {
    cases(bench, &BYTES, &VARIANTS)
}

/// Measures these sizes with these variants.
pub fn cases(bench: &Bench<'_>, sizes: &[u64], variants: &[Variant]) -> Result<()> {
    on_one_cpu(|| {
        let venues = bench.venues(variants, |v| Near::set(v, Packets::Large))?;
        sizes.iter().try_for_each(|bytes| {
            let run = |v| run(venues.of(v)?, *bytes as usize, bench.seconds);
            bench.rounds(Section::Segment, &plural(*bytes, "byte"), variants, run)
        })
    })
}

/// Runs this with the calling thread, the threads it starts, and its
/// child processes on one CPU, and restores the CPUs afterwards.
pub fn on_one_cpu<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let me = Pid::from_raw(0);
    let before = sched_getaffinity(me)?;
    let mut one = CpuSet::new();
    one.set(CPU)?;
    sched_setaffinity(me, &one).map_err(|e| format!("everything on CPU {CPU}: {e}"))?;
    let done = work();
    sched_setaffinity(me, &before)?;
    done
}

/// Measures round trips of so many bytes for this long. On one CPU, if [`on_one_cpu`] calls it.
pub fn run(venue: &Near, bytes: usize, seconds: f64) -> Result<Run> {
    let Pair { client, server } = venue.connect(1)?.remove(0);
    let echo = thread::spawn(move || echo(server, bytes));
    let (segments, cost) = (|| {
        ping(&client, bytes, WARM_UP)?;
        let watch = Watch::start();
        let count = ping(&client, bytes, Duration::from_secs_f64(seconds))?;
        Ok::<(u64, Cost), io::Error>((2 * count, watch.stop()))
    })()?;
    drop(client);
    // The echo thread ends with its connection, or by its time limit.
    let _ = echo.join();
    Ok(Run::each(venue.variant, cost, segments.max(1) as f64))
}

fn ping(mut to: &TcpStream, bytes: usize, length: Duration) -> io::Result<u64> {
    let end = Instant::now() + length.min(PATIENCE * 6);
    let mut block = vec![7; bytes];
    let mut count = 0;
    while Instant::now() < end {
        to.write_all(&block)?;
        to.read_exact(&mut block)?;
        count += 1;
    }
    Ok(count)
}

/// Answers when all bytes have arrived, so that a segment is never answered by two.
fn echo(mut with: TcpStream, bytes: usize) -> io::Result<()> {
    let mut block = vec![0; bytes];
    loop {
        with.read_exact(&mut block)?;
        with.write_all(&block)?;
    }
}
