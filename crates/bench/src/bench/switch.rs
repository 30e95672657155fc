//! Times of the calls of a switch: freeze, drain, commit, unsplice, with the data path in this process. The bench itself is
//! the proxy of one connection, and drives the engine's core as the task and the keeper do.

use super::{
    Bench, Result,
    machine::Watch,
    release,
    results::{Connection, SwitchCase},
    stats::Spread,
    venue::{self, PATIENCE, Packets, Pins},
};
use longsplice_datapath::{Datapath, FreezeOptions, Half, Pair, Phase, Side, Switched, Tuple, monotonic};
use longsplice_engine::{
    Command, Leg, OpenOptions, PathRule, Policy, SpliceWhen, Splicer,
    core::{Action, Context, Core, Event, Next, Position, Progress, Seen, State, Why},
};
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

/// Maximum number of splices, and of unsplices.
const CYCLES: usize = 2000;
/// Maximum duration for each kind of connection, in lengths of a transfer.
const SHARE: f64 = 8.0;
/// Time that a busy connection stays spliced, and copied, between two switches.
const DWELL: Duration = Duration::from_millis(1);
/// Bytes per read and write.
const BLOCK: usize = 64 << 10;

/// Measures idle, busy and released connections.
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
    // Return an error that can be sent between threads.
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

/// Threads that play client and server until told to stop.
#[derive(Default)]
struct Hosts {
    stop: Arc<AtomicBool>,
}

impl Hosts {
    /// The server. If `busy`, it sends at full speed.
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

    /// The client: sends a byte, and reads everything.
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

/// Opens both legs with hosts at their ends, and passes one byte in each direction.
async fn connect(splicer: &Splicer, lab: &Lab, hosts: &Hosts, busy: bool) -> Result<Pair<Leg>> {
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
    Ok(Pair { client, server })
}

/// Times in microseconds.
#[derive(Default)]
pub struct Times {
    pub freeze: Vec<f64>,
    pub drain: Vec<f64>,
    pub commit: Vec<f64>,
    unsplice: Vec<f64>,
    pub release: Vec<f64>,
    pub recreate: Vec<f64>,
}

/// Runs a call and records its duration.
pub fn timed<T>(times: &mut Vec<f64>, call: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let done = call();
    times.push(began.elapsed().as_secs_f64() * 1e6);
    done
}

/// Drives the engine's core for one flow with these legs.
pub struct Proxy<'a> {
    pub datapath: &'a Datapath,
    pub legs: Pair<Leg>,
    core: Core,
    policy: Policy,
    shown: Progress,
    at: Pair<Position>,
    block: Vec<u8>,
}

impl Proxy<'_> {
    fn new(datapath: &Datapath, legs: Pair<Leg>) -> Proxy<'_> {
        let at = legs.each_ref().map(|leg| Position {
            consumed: leg.bytes_in(),
            produced: leg.bytes_out(),
            ..Position::default()
        });
        let policy = Policy { when: SpliceWhen::AfterBytes(u64::MAX), path: PathRule::Any, ..Policy::default() };
        let (core, shown) = (Core::new(None, None, Pair::both(0)), Progress::new(None));
        let mut proxy = Proxy { datapath, legs, core, policy, shown, at, block: vec![0; BLOCK] };
        proxy.on(Event::Attended(true));
        proxy
    }

    /// The tuples of both legs.
    pub fn tuples(&self) -> Pair<Tuple> {
        self.legs.each_ref().map(|leg| Tuple { remote: leg.remote(), local: leg.local() })
    }

    /// Both legs as the data path needs them for a freeze.
    pub fn halves(&self) -> Pair<Half> {
        let tuples = self.tuples();
        Pair::from_fn(|side| self.core.half(side, tuples[side], &self.at[side]))
    }

    fn on(&mut self, event: Event) -> Action {
        let legs = self.tuples();
        let Proxy { core, policy, shown, at, .. } = self;
        core.on(&mut Context { now: monotonic(), policy, legs, at: at.each_mut(), shown }, event)
    }

    /// Splices and unsplices once.
    async fn cycle(&mut self, times: &mut Times, busy: bool) -> Result<()> {
        let legs = self.tuples();
        let (mut action, mut began) = (self.on(Event::Command(Command::Splice)), Instant::now());
        loop {
            let event = match action {
                Action::Measure => Event::Measured(Pair::default()),
                Action::Freeze { .. } => {
                    let halves = self.halves();
                    let freeze = || self.datapath.freeze(halves.each_ref(), FreezeOptions::default());
                    let frozen = timed(&mut times.freeze, freeze);
                    began = Instant::now();
                    Event::Frozen(frozen.map(Box::new))
                }
                Action::Wait if self.core.copies() && self.core.state() == State::Draining => {
                    self.pass(Pair::both(u64::MAX)).await?;
                    Event::Copied
                }
                Action::Wait if self.core.state() == State::Draining => {
                    tokio::task::yield_now().await;
                    Event::Told
                }
                // Data not yet acknowledged by the hosts belongs to the last switch.
                Action::Wait => {
                    times.freeze.pop();
                    tokio::task::yield_now().await;
                    return Ok(());
                }
                Action::Look => Event::Looked(self.datapath.look(legs.each_ref()).map(Box::new)),
                Action::Commit { at, most } => {
                    times.drain.push(began.elapsed().as_secs_f64() * 1e6);
                    let commit = || self.datapath.commit(legs.each_ref(), &at, most, Pair::both(false));
                    Event::Committed(timed(&mut times.commit, commit).map(Box::new))
                }
                Action::Keep => break,
                other => return Err(format!("a splice of the bench does not go on: {other:?}").into()),
            };
            action = self.on(event);
        }
        if busy {
            tokio::time::sleep(DWELL).await;
        }
        let (why, paths) = (Why::Command(Command::Unsplice), self.datapath.paths_of(legs.each_ref()));
        let Action::Unsplice { .. } = self.on(Event::Seen(Box::new(Seen { why, paths, legs: None }))) else {
            return Err("the flow is not taken back".into());
        };
        let at = timed(&mut times.unsplice, || self.datapath.unsplice(legs.each_ref())).map(Box::new);
        let Action::Attend = self.on(Event::Unspliced { at, client_reset: false }) else {
            return Err("the flow has ended".into());
        };
        self.on(Event::Attended(true));
        wait_phase(self.datapath, &legs, Phase::Local).await?;
        let end = Instant::now() + DWELL;
        while busy && Instant::now() < end {
            self.pass(Pair::new(0, BLOCK as u64)).await?;
        }
        Ok(())
    }

    /// Copies data that can be read now, from each host at most this many bytes.
    async fn pass(&mut self, most: Pair<u64>) -> io::Result<()> {
        for from in Side::BOTH {
            let (to, most) = (from.other(), most[from]);
            let until = self.core.streams()[from].copied.saturating_add(most);
            while let Next::Read(n) = self.core.streams()[from].next(&self.at[from], &self.at[to], until) {
                let n = usize::try_from(n.min(most)).unwrap_or(BLOCK).min(BLOCK);
                let n = self.legs[from].read(&mut self.block[..n]).await?;
                if n == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                self.legs[to].write_all(&self.block[..n]).await?;
                self.at[from].took(n);
                self.at[to].gave(n);
                let stream = &mut self.core.streams_mut()[from];
                stream.took(n);
                stream.gave(n);
                if !stream.is_draining() {
                    break; // one read is enough
                }
            }
        }
        Ok(())
    }
}

/// Waits until both directions are in this phase.
pub async fn wait_phase(datapath: &Datapath, legs: &Pair<Tuple>, phase: Phase) -> Result<Switched> {
    loop {
        let at = datapath.look(legs.each_ref())?;
        if at.phase == Pair::both(phase) {
            return Ok(at);
        }
        tokio::task::yield_now().await;
    }
}
