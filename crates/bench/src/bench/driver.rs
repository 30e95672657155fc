//! Drives the engine's core for one flow, as the task and the keeper do, and takes the times of the calls of a switch.

use super::{Result, results::Figure};
use longsplice_datapath::{
    CommitOptions, Datapath, FreezeOptions, Half, Pair, Phase, Side, Switched, Tuple, monotonic,
};
use longsplice_engine::{
    Command, Leg, PathRule, Policy, SpliceWhen,
    core::{Action, Context, Core, Event, Next, Position, Progress, Seen, State, Why},
};
use std::{
    collections::BTreeMap,
    io,
    time::{Duration, Instant},
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Time that a busy connection stays spliced, and copied, between two switches.
const DWELL: Duration = Duration::from_millis(1);
/// Bytes per read and write.
const BLOCK: usize = 64 << 10;

/// The microseconds of each call of a cycle. If one is made again, the last counts: data not yet acknowledged by the hosts
/// belongs to the last switch.
#[derive(Default)]
pub struct Times(pub BTreeMap<Figure, f64>);

impl Times {
    /// Runs a call and records its duration.
    pub fn of<T>(&mut self, figure: Figure, call: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let done = call();
        self.since(figure, began);
        done
    }

    /// Records the time since then.
    pub fn since(&mut self, figure: Figure, began: Instant) {
        self.0.insert(figure, began.elapsed().as_secs_f64() * 1e6);
    }
}

/// Drives the engine's core for one flow with these legs.
pub struct Driver<'a> {
    pub datapath: &'a Datapath,
    pub legs: Pair<Leg>,
    core: Core,
    policy: Policy,
    shown: Progress,
    at: Pair<Position>,
    block: Vec<u8>,
}

impl Driver<'_> {
    pub fn new(datapath: &Datapath, legs: Pair<Leg>) -> Driver<'_> {
        let at = legs.each_ref().map(|leg| Position {
            consumed: leg.bytes_in(),
            produced: leg.bytes_out(),
            ..Position::default()
        });
        let policy = Policy { when: SpliceWhen::AfterBytes(u64::MAX), path: PathRule::Any, ..Policy::default() };
        let (core, shown) = (Core::new(None, None, Pair::both(0)), Progress::new(None));
        let mut driver = Driver { datapath, legs, core, policy, shown, at, block: vec![0; BLOCK] };
        driver.on(Event::Attended(true));
        driver
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
        let Driver { core, policy, shown, at, .. } = self;
        core.on(&mut Context { now: monotonic(), policy, legs, at: at.each_mut(), shown }, event)
    }

    /// Splices and unsplices once; without a commit, the flow was not ready.
    pub async fn cycle(&mut self, times: &mut Times, busy: bool) -> Result<()> {
        let legs = self.tuples();
        let (mut action, mut began) = (self.on(Event::Command(Command::Splice)), Instant::now());
        loop {
            let event = match action {
                Action::Measure => Event::Measured(Pair::default()),
                Action::Freeze { .. } => {
                    let halves = self.halves();
                    let freeze = || self.datapath.freeze(halves.each_ref(), FreezeOptions::default());
                    let frozen = times.of(Figure::Freeze, freeze);
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
                Action::Wait => {
                    tokio::task::yield_now().await;
                    return Ok(());
                }
                Action::Look => Event::Looked(self.datapath.look(legs.each_ref()).map(Box::new)),
                Action::Commit { at, most } => {
                    times.since(Figure::Drain, began);
                    let commit = || self.datapath.commit(legs.each_ref(), &at, most, CommitOptions::default());
                    Event::Committed(times.of(Figure::Commit, commit).map(Box::new))
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
        let at = times.of(Figure::Unsplice, || self.datapath.unsplice(legs.each_ref())).map(Box::new);
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
