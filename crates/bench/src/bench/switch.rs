//! What the calls of a switch take: freeze, drain, commit, unsplice, with the data path inside this process. The bench is
//! the proxy here, of one connection, and keeps the counts that the engine otherwise keeps.

use super::{
    Bench, Result,
    machine::Watch,
    release,
    results::{Connection, SwitchCase},
    stats::Spread,
    venue::{self, PATIENCE, Packets, Pins},
};
use longsplice_datapath::{Datapath, Half, Limit, Phase, SwitchError, Switched, Tuple};
use longsplice_engine::{Leg, OpenOptions, Splicer};
use longsplice_lab::Lab;
use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

/// Splices, and as many unsplices, unless time is up before.
const CYCLES: usize = 2000;
/// For either kind of connection: this many lengths of a transfer.
const SHARE: f64 = 8.0;
/// How long a busy connection stays spliced, and copied, between two switches.
const DWELL: Duration = Duration::from_millis(1);
/// Bytes per read and write.
const BLOCK: usize = 64 << 10;

/// Idle, busy, and released.
pub fn measure(bench: &Bench) -> Result<Vec<SwitchCase>> {
    let all = [Connection::Idle, Connection::Busy, Connection::Released];
    let bar = bench.bar("switch", all.len());
    let cases = all.into_iter().map(|connection| {
        bench.check()?;
        let case = case(bench, connection)?;
        let micros: Vec<String> = case.costs().into_iter().map(|(what, n)| format!("{what} {n:.1}")).collect();
        bench.say(&format!("switch, {}: {} cycles, us: {}", connection.title(), case.cycles, micros.join(", ")));
        bar.inc(1);
        Ok(case)
    });
    let cases = cases.collect();
    bar.finish_and_clear();
    cases
}

fn case(bench: &Bench, connection: Connection) -> Result<SwitchCase> {
    let lab = venue::lab(Packets::Large, false)?;
    let _pins = Pins::of(&lab)?;
    let length = Duration::from_secs_f64(bench.seconds * SHARE);
    // An error that may cross threads.
    let case = lab.forwarder.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
        runtime.block_on(cycles(bench, &lab, connection, length)).map_err(|e| e.to_string())
    });
    Ok(case?)
}

async fn cycles(bench: &Bench, lab: &Lab, connection: Connection, length: Duration) -> Result<SwitchCase> {
    let splicer = Splicer::open(&OpenOptions { max_flows: 1024, ..OpenOptions::default() })?;
    let hosts = Hosts::default();
    let done = on_splicer(bench, &splicer, lab, &hosts, connection, length).await;
    hosts.stop.store(true, Relaxed);
    splicer.close()?;
    done
}

async fn on_splicer(
    bench: &Bench,
    splicer: &Splicer,
    lab: &Lab,
    hosts: &Hosts,
    connection: Connection,
    length: Duration,
) -> Result<SwitchCase> {
    let datapath = splicer.datapath().ok_or("no data path")?;
    let busy = connection == Connection::Busy;
    let mut proxy = Proxy::new(datapath, connect(splicer, lab, hosts, busy).await?);
    let mut times = Times::default();
    let watch = Watch::start();
    let end = Instant::now() + length;
    let late = "a switch did not come to its end";
    if connection == Connection::Released {
        let mut flow = timeout(PATIENCE, release::Flow::first(proxy)).await.map_err(|_| late)??;
        while times.freeze.len() < CYCLES && Instant::now() < end {
            bench.check()?;
            timeout(PATIENCE, flow.cycle(&mut times)).await.map_err(|_| late)??;
        }
    } else {
        while times.freeze.len() < CYCLES && Instant::now() < end {
            bench.check()?;
            timeout(PATIENCE, proxy.cycle(&mut times, busy)).await.map_err(|_| late)??;
        }
    }
    let cost = watch.stop();
    let none = "no switch in the time there was";
    Ok(SwitchCase {
        connection,
        cycles: times.freeze.len(),
        freeze: Spread::of(times.freeze).ok_or(none)?,
        drain: Spread::of(times.drain).ok_or(none)?,
        commit: Spread::of(times.commit).ok_or(none)?,
        unsplice: Spread::of(times.unsplice),
        release: Spread::of(times.release),
        recreate: Spread::of(times.recreate),
        disturbed: cost.disturbed,
    })
}

/// Threads that play client and server, until told to stop.
#[derive(Default)]
struct Hosts {
    stop: Arc<AtomicBool>,
}

impl Hosts {
    /// The server sends as fast as it can, if there is to be traffic.
    fn server(&self, listener: TcpListener, busy: bool) {
        let stop = self.stop.clone();
        thread::spawn(move || -> io::Result<()> {
            let Some(mut stream) = venue::accept(&listener, PATIENCE)? else { return Ok(()) };
            stream.set_write_timeout(Some(PATIENCE))?;
            let block = vec![0x55; BLOCK];
            stream.write_all(&block[..1])?;
            while !stop.load(Relaxed) {
                if busy { stream.write_all(&block)? } else { thread::sleep(DWELL * 20) }
            }
            Ok(())
        });
    }

    /// The client sends a byte, and reads all that comes.
    fn client(&self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE / 4))?;
        stream.write_all(b"?")?;
        let stop = self.stop.clone();
        thread::spawn(move || {
            let mut block = vec![0; BLOCK];
            while !stop.load(Relaxed) {
                match stream.read(&mut block) {
                    Ok(1..) => {}
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                    _ => return,
                }
            }
        });
        Ok(())
    }
}

/// Both legs, with hosts at their ends, and a byte passed on in either direction.
async fn connect(splicer: &Splicer, lab: &Lab, hosts: &Hosts, busy: bool) -> Result<[Leg; 2]> {
    let at_server = lab.server.run(|| TcpListener::bind(venue::server()))?;
    at_server.set_nonblocking(true)?;
    hosts.server(at_server, busy);
    let listener = splicer.listen(venue::proxy()).await?;
    let dialling = lab.client.spawn(|| TcpStream::connect_timeout(&venue::proxy(), PATIENCE));
    let mut client = timeout(PATIENCE, listener.accept()).await??;
    hosts.client(dialling.join().map_err(|_| "the client panicked")??)?;
    let mut server = timeout(PATIENCE, splicer.connect(venue::server(), &client)).await??;
    let mut byte = [0];
    timeout(PATIENCE, client.read_exact(&mut byte)).await??;
    server.write_all(&byte).await?;
    timeout(PATIENCE, server.read_exact(&mut byte)).await??;
    client.write_all(&byte).await?;
    Ok([client, server])
}

/// Microseconds.
#[derive(Default)]
pub struct Times {
    pub freeze: Vec<f64>,
    pub drain: Vec<f64>,
    pub commit: Vec<f64>,
    unsplice: Vec<f64>,
    pub release: Vec<f64>,
    pub recreate: Vec<f64>,
}

/// Runs this and notes how long it took.
pub fn timed<T>(times: &mut Vec<f64>, call: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let done = call();
    times.push(began.elapsed().as_secs_f64() * 1e6);
    done
}

/// Control mode of one flow. Legs: 0 is the client's, 1 the server's.
pub struct Proxy<'a> {
    pub datapath: &'a Datapath,
    pub legs: [Leg; 2],
    /// Bytes from either host that went past the sockets.
    forwarded: [u64; 2],
    block: Vec<u8>,
}

impl Proxy<'_> {
    fn new(datapath: &Datapath, legs: [Leg; 2]) -> Proxy<'_> {
        Proxy { datapath, legs, forwarded: [0; 2], block: vec![0; BLOCK] }
    }

    /// Both legs as the data path knows them.
    pub fn tuples(&self) -> [Tuple; 2] {
        [0, 1].map(|i| Tuple { remote: self.legs[i].remote(), local: self.legs[i].local() })
    }

    /// Nothing is ever in hand between two steps.
    pub fn half(&self, i: usize) -> Half {
        Half {
            leg: self.tuples()[i],
            consumed: self.legs[i].bytes_in() + self.forwarded[i],
            produced: self.legs[i].bytes_out() + self.forwarded[1 - i],
            leftover: 0,
            limit: Limit::None,
        }
    }

    /// There and back.
    async fn cycle(&mut self, times: &mut Times, busy: bool) -> Result<()> {
        let [c, s] = self.tuples();
        let (a, b) = (self.half(0), self.half(1));
        let frozen = match timed(&mut times.freeze, || self.datapath.freeze(&a, &b, [false; 3])) {
            // What the hosts have not acknowledged yet belongs to the last switch.
            Err(SwitchError::Busy) => {
                times.freeze.pop();
                tokio::task::yield_now().await;
                return Ok(());
            }
            other => other?,
        };
        let began = Instant::now();
        let since = [a.consumed + u64::from(frozen.pending[0]), b.consumed + u64::from(frozen.pending[1])];
        for (from, pending) in frozen.pending.into_iter().enumerate() {
            self.pass(from, pending as usize).await?;
        }
        let at = self.wait_phase(Phase::Forwarding).await?;
        times.drain.push(began.elapsed().as_secs_f64() * 1e6);
        timed(&mut times.commit, || self.datapath.commit([&c, &s], &at, [u32::MAX; 2], [false; 2]))?;
        if busy {
            tokio::time::sleep(DWELL).await;
        }
        let at = timed(&mut times.unsplice, || self.datapath.unsplice(&c, &s))?;
        self.take_back(&at, since);
        self.wait_phase(Phase::Local).await?;
        let end = Instant::now() + DWELL;
        while busy && Instant::now() < end {
            let n = self.legs[1].read(&mut self.block).await?;
            if n == 0 {
                return Err("the server has closed".into());
            }
            self.legs[0].write_all(&self.block[..n]).await?;
        }
        Ok(())
    }

    /// Reads so many bytes and writes them to the other leg.
    async fn pass(&mut self, from: usize, mut bytes: usize) -> io::Result<()> {
        while bytes > 0 {
            let n = bytes.min(BLOCK);
            let n = self.legs[from].read(&mut self.block[..n]).await?;
            if n == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.legs[1 - from].write_all(&self.block[..n]).await?;
            bytes -= n;
        }
        Ok(())
    }

    /// The sockets' positions move by what was forwarded past them.
    fn take_back(&mut self, at: &Switched, since: [u64; 2]) {
        for (d, since) in since.into_iter().enumerate() {
            if at.was_forwarded[d] {
                self.forwarded[d] += at.bound64(d) - since;
            }
        }
    }

    async fn wait_phase(&self, phase: Phase) -> Result<Switched> {
        wait_phase(self.datapath, &self.tuples(), phase).await
    }
}

/// Until both directions are in this phase.
pub async fn wait_phase(datapath: &Datapath, [c, s]: &[Tuple; 2], phase: Phase) -> Result<Switched> {
    loop {
        let at = datapath.look(c, s)?;
        if at.phase == [phase; 2] {
            return Ok(at);
        }
        tokio::task::yield_now().await;
    }
}
