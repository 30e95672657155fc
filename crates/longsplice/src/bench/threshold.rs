//! From how many bytes on splicing pays: connections that carry N bytes, copied and spliced at once, everything on one CPU.
//!
//! A splice costs a fixed amount and saves some for each byte. Where the two curves cross is the size from which splicing
//! at once would have been right; to splice after as many bytes were copied costs at most twice what the best choice
//! would, however long the connection turns out to be (Karlin et al., "Competitive snoopy caching", Algorithmica 3, 1988).

use super::{
    Bench, Result,
    machine::Watch,
    results::{Size, Threshold},
    rtt::on_one_cpu,
    stats::{Spread, crossing},
    venue::{self, PATIENCE, Packets, Variant, Venue},
};
use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

/// Bytes from server to client.
const SIZES: [u64; 8] = [1, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];
/// More rounds tell no more.
const ROUNDS: usize = 5;
/// One size, one variant, one round: this part of a transfer's length, and not more connections than that. Flows that
/// have ended stay in the tables for a minute.
const SHARE: f64 = 0.2;
const CONNECTIONS: usize = 200;
/// Bytes per write and read.
const BLOCK: usize = 256 << 10;

/// One cell of a round.
struct Run {
    connections: usize,
    micros: f64,
    busy: f64,
    disturbed: bool,
}

/// By variant: copied, spliced.
const VARIANTS: [Variant; 2] = [Variant::Copy, Variant::Spliced];
type Runs = [[Vec<Run>; 2]; SIZES.len()];

/// All sizes, both variants, interleaved.
pub fn measure(bench: &Bench) -> Result<Threshold> {
    let rounds = bench.rounds.min(ROUNDS);
    let mut runs = Runs::default();
    on_one_cpu(|| {
        for n in 0..rounds {
            round(bench, n, &mut runs)?;
            bench.say(&format!("short transfers: round {} of {rounds}", n + 1));
        }
        Ok(())
    })?;
    let sizes: Vec<Size> =
        SIZES.into_iter().zip(&runs).filter_map(|(bytes, [copied, spliced])| size(bytes, copied, spliced)).collect();
    let curve = |of: fn(&Size) -> f64| sizes.iter().map(|s| (s.bytes as f64, of(s))).collect::<Vec<_>>();
    let by_time = crossing(&curve(|s| s.copied.median), &curve(|s| s.spliced.median));
    let by_cpu = crossing(&curve(|s| s.copied_cpu), &curve(|s| s.spliced_cpu));
    let recommended = by_time.zip(by_cpu).map(|(a, b)| (a.max(b).ceil() as u64).next_power_of_two());
    Ok(Threshold { sizes, by_time, by_cpu, recommended })
}

/// New venues for each round: what ended flows leave for a minute must not pile up.
fn round(bench: &Bench, n: usize, runs: &mut Runs) -> Result<()> {
    let venues = [Venue::set(VARIANTS[0], Packets::Large)?, Venue::set(VARIANTS[1], Packets::Large)?];
    let _servers = [Server::start(&venues[0])?, Server::start(&venues[1])?];
    let length = Duration::from_secs_f64(bench.seconds * SHARE);
    for (size, runs) in SIZES.into_iter().zip(runs) {
        for v in 0..2 {
            bench.check()?;
            let v = (v + n) % 2;
            runs[v].push(run(&venues[v], size, length).map_err(|e| format!("{}: {e}", VARIANTS[v]))?);
        }
    }
    Ok(())
}

fn size(bytes: u64, copied: &[Run], spliced: &[Run]) -> Option<Size> {
    // What disturbs one variant of a round makes both worthless.
    let disturbed: Vec<bool> = copied.iter().zip(spliced).map(|(a, b)| a.disturbed || b.disturbed).collect();
    let all = disturbed.iter().all(|d| *d);
    let counted = |runs| -> Vec<&Run> {
        let both = <[Run]>::iter(runs).zip(&disturbed);
        both.filter(|(_, d)| all || !**d).map(|(run, _)| run).collect()
    };
    let (copied, spliced) = (counted(copied), counted(spliced));
    let time = |runs: &[&Run]| Spread::of(runs.iter().map(|r| r.micros));
    let cpu = |runs: &[&Run]| {
        let total: f64 = runs.iter().map(|r| r.micros * r.connections as f64 * r.busy).sum();
        total / runs.iter().map(|r| r.connections as f64).sum::<f64>()
    };
    Some(Size {
        bytes,
        copied: time(&copied)?,
        spliced: time(&spliced)?,
        copied_cpu: cpu(&copied),
        spliced_cpu: cpu(&spliced),
        disturbed: disturbed.iter().filter(|d| **d).count(),
    })
}

fn run(venue: &Venue, bytes: u64, length: Duration) -> Result<Run> {
    let mut block = vec![0; BLOCK];
    fetch(venue, bytes, &mut block)?;
    let watch = Watch::start();
    let end = Instant::now() + length;
    let mut connections = 0;
    while connections < CONNECTIONS && (connections == 0 || Instant::now() < end) {
        fetch(venue, bytes, &mut block)?;
        connections += 1;
    }
    let cost = watch.stop();
    let micros = cost.seconds * 1e6 / connections as f64;
    Ok(Run { connections, micros, busy: cost.first_busy, disturbed: cost.disturbed.is_some() })
}

fn fetch(venue: &Venue, bytes: u64, block: &mut [u8]) -> Result<()> {
    let mut stream = venue.dial()?;
    stream.write_all(&bytes.to_be_bytes())?;
    let mut received = 0;
    loop {
        match stream.read(block)? {
            0 if received == bytes => return Ok(()),
            0 => return Err(format!("{received} of {bytes} bytes arrived").into()),
            n => received += n as u64,
        }
    }
}

/// Serves as many bytes as it is asked for, one connection after the other.
struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Server {
    fn start(venue: &Venue) -> Result<Server> {
        let stop = Arc::new(AtomicBool::new(false));
        let (told, listener) = (stop.clone(), venue.listener()?);
        let thread = thread::spawn(move || {
            while !told.load(Relaxed) {
                // The client notices what goes wrong here.
                let _ = serve(&listener);
            }
        });
        Ok(Server { stop, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

fn serve(listener: &TcpListener) -> io::Result<()> {
    const LOOK: Duration = Duration::from_millis(100);
    let Some(mut stream) = venue::accept(listener, LOOK)? else { return Ok(()) };
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut size = [0; 8];
    stream.read_exact(&mut size)?;
    let mut left = u64::from_be_bytes(size);
    let block = vec![0x55; BLOCK];
    while left > 0 {
        let n = left.min(BLOCK as u64);
        stream.write_all(&block[..n as usize])?;
        left -= n;
    }
    stream.shutdown(Shutdown::Write)?;
    // Until the client has closed: no reset may overtake the end.
    stream.read(&mut size).map(drop)
}

impl Venue {
    /// A connection of the client, whoever accepts it. For a calling thread that is outside of the client.
    fn dial(&self) -> io::Result<TcpStream> {
        let stream = self.lab.client.run(|| TcpStream::connect_timeout(&self.target(), PATIENCE))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(stream)
    }
}
