//! Round trips of one byte, everything on one CPU: with no CPU to wait for and none to wake, the time of a round trip is
//! the work that it takes.

use super::{
    Bench, Result,
    machine::Watch,
    results::{RttRound, RttRun},
    venue::{PATIENCE, Packets, Pair, Venue},
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

/// Everything happens here.
const CPU: usize = 0;
/// Caches and windows are warm after this.
const WARM_UP: Duration = Duration::from_millis(100);

/// All rounds, interleaved.
pub fn measure(bench: &Bench) -> Result<Vec<RttRound>> {
    on_one_cpu(|| {
        let venues = bench.venues(Packets::Large)?;
        let mut rounds = Vec::new();
        for round in 0..bench.rounds {
            let mut runs = Vec::new();
            for n in 0..venues.len() {
                bench.check()?;
                runs.push(run(&venues[(n + round) % venues.len()], bench.seconds)?);
            }
            runs.sort_by_key(|r| r.variant);
            let words: Vec<String> = runs.iter().map(|r| format!("{} {:.1}", r.variant, r.micros)).collect();
            bench.say(&format!("round trips on one CPU: {} us", words.join(", ")));
            rounds.push(RttRound { runs });
        }
        Ok(rounds)
    })
}

/// Runs this with the calling thread, the threads it starts, and its child processes on one CPU; it has those it had
/// before afterwards.
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

fn run(venue: &Venue, seconds: f64) -> Result<RttRun> {
    let Pair { client, server } = venue.connect(1)?.remove(0);
    let echo = thread::spawn(move || echo(server));
    let (count, cost) = (|| {
        ping(&client, WARM_UP)?;
        let watch = Watch::start();
        let count = ping(&client, Duration::from_secs_f64(seconds))?;
        Ok::<_, io::Error>((count, watch.stop()))
    })()
    .map_err(|e| format!("{}: {e}", venue.variant))?;
    drop(client);
    // The echo ends with its connection, or by its time limit.
    let _ = echo.join();
    Ok(RttRun {
        variant: venue.variant,
        count,
        micros: cost.seconds * 1e6 / count.max(1) as f64,
        busy: cost.first_busy,
        disturbed: cost.disturbed,
    })
}

fn ping(mut to: &TcpStream, length: Duration) -> io::Result<u64> {
    let end = Instant::now() + length.min(PATIENCE * 6);
    let mut byte = [7];
    let mut count = 0;
    while Instant::now() < end {
        to.write_all(&byte)?;
        to.read_exact(&mut byte)?;
        count += 1;
    }
    Ok(count)
}

fn echo(mut with: TcpStream) -> io::Result<()> {
    let mut byte = [0];
    while with.read(&mut byte)? > 0 {
        with.write_all(&byte)?;
    }
    Ok(())
}
