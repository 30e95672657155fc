//! The engine over simulated sockets: runs the [core](longsplice_engine::core) of the flow as the task and the keeper do.
//! Like a process, it sleeps between events and wakes up late.

use super::tcp::{MS, Packet, Tcp, Time};
use longsplice_datapath::{
    Half, LegFlags, Limit, Pair, PathFacts, PathFlags, PathView, Phase, Side, SwitchError, Switched, Tuple,
    abi::switch_op,
    model::{Fate, Model, Seg, Switch},
};
use longsplice_engine::{
    Command, EndReason, PathRule, Policy, SpliceWhen,
    core::{self, Action, Context, Core, Event, Next, Position, Progress, Seen, Why, orphan},
};
use rand::{RngExt, rngs::SmallRng};
use std::{ops::Range, time::Duration};

const PATH_ENDS: u16 = PathFlags::FIN | PathFlags::FIN_ACKED | PathFlags::DEAD;
/// Longer than any run.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);
/// Wake-ups between two serializations of the flow, as for a hand-over to another process.
const WRITTEN_DOWN: u32 = 16;

/// That of the flow's connections.
const GENERATION: u32 = 1;

/// The address of a leg: the model does not use addresses.
fn leg(side: Side) -> Tuple {
    let n = side as u8;
    Tuple { remote: ([10, 0, n, 1], 1).into(), local: ([10, 0, n, 2], 2).into() }
}

fn is_forwarded_by(flags: Pair<u16>) -> bool {
    flags.client & flags.server & PathFlags::SPLICED != 0
}

fn path_flags(m: &Model) -> Pair<u16> {
    Pair::from_fn(|from| m.path(from).flags)
}

fn is_forwarded(m: &Model) -> bool {
    is_forwarded_by(path_flags(m))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Copying,
    Draining,
    Spliced,
    /// Forwarded until the end; the sockets no longer exist.
    Ended,
    /// The process has died; true: another one has taken over its state.
    Killed(bool),
}

/// Bytes read and not yet written.
#[derive(Default)]
struct Hand {
    bytes: Vec<u8>,
    /// The buffer contains a single byte, which is urgent.
    urgent: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Habits {
    /// Maximum size of a read.
    pub buffer: usize,
    /// Maximum delay of a wake-up.
    pub late: Time,
    /// Mean time between switches.
    pub period: Time,
    pub hold: bool,
    pub trigger: bool,
    /// Splices may be limited to a number of bytes per direction.
    pub limits: bool,
    pub drain_limit: Time,
    pub switches: u32,
    /// How long a freeze waits for windows to fit.
    pub patience: Time,
    /// A spliced flow stays so, unless the core wants it back. The core decides how long a freeze waits.
    pub keeps: bool,
}

/// What our sockets held when one of them was reset.
#[derive(Clone, Copy, Debug)]
pub struct Failure {
    /// Whose socket was reset.
    pub side: Side,
    /// Number of bytes from its host that its socket had received in order.
    pub received: u64,
}

/// A segment that arrives on another processor in the middle of the next operation.
pub struct Meanwhile {
    pub serial: u64,
    pub from: Side,
    pub packet: Packet,
    pub segment: Seg,
    /// It arrives before the first processor takes a lock, or changes a shared word, for this many times.
    pub meeting: u32,
    /// The decision about the segment; `None`: the operation did that less often.
    pub fate: Option<(Fate, u8)>,
}

impl Meanwhile {
    pub fn during<T>(&mut self, m: &mut Model, work: impl FnOnce(&mut Model) -> T) -> T {
        if self.fate.is_some() {
            return work(m);
        }
        let (done, fate) = m.meanwhile((self.meeting, self.from, &self.segment), work);
        self.fate = fate;
        done
    }
}

pub struct Relay {
    pub meanwhile: Option<Meanwhile>,
    pub habits: Habits,
    pub state: State,
    core: Core,
    /// Watches the flow after a death.
    orphan: orphan::Watch,
    policy: Policy,
    shown: Progress,
    at: Pair<Position>,
    hands: Pair<Hand>,
    /// The result of a freeze that the process has not seen yet.
    unheard: Option<Event>,
    /// Limits of the next splice, and the positions that it must not pass.
    limit: Pair<Limit>,
    goal: Pair<Option<u64>>,
    /// Whether segments from this host are held.
    pub holding: Pair<bool>,
    /// When a freeze started to wait for windows to fit.
    waiting: Option<Time>,
    pub switch_at: Time,
    pub splices: u32,
    pub refused: u32,
    pub short: u32,
    pub taken_back: u32,
    /// How often a flow that was to stay spliced was taken back.
    pub rescued: u32,
    /// A socket was reset before the flow was forwarded.
    pub failure: Option<Failure>,
    /// Positions of the bytes from each host that were forwarded past the sockets last.
    pub forwarded: Pair<Range<u64>>,
    /// The path entries, as they were when new connections replaced the flow's.
    pub replaced: Option<Pair<PathView>>,
    /// The data path has reported an event of the flow.
    pub told: bool,
    /// The process has died, and all data in flight must arrive nevertheless.
    pub goes_on: bool,
    pub log: Vec<String>,
    pub tracing: bool,
    wakes: u32,
}

/// The data path, the sockets and the random generator, while the process is awake.
struct Awake<'a> {
    now: Time,
    m: &'a mut Model,
    sockets: &'a mut Pair<Tcp>,
    rng: &'a mut SmallRng,
}

impl Relay {
    pub fn new(habits: Habits, first: Time) -> Relay {
        let policy = Policy {
            when: SpliceWhen::AfterBytes(u64::MAX),
            path: PathRule::Any,
            drain_limit: Duration::from_micros(habits.drain_limit),
            release_after: None,
            idle_limit: NEVER.into(),
            ..Policy::default()
        };
        Relay {
            meanwhile: None,
            habits,
            state: State::Copying,
            core: Core::new(None, None, Pair::both(0)),
            orphan: orphan::Watch::new(Duration::ZERO),
            policy,
            shown: Progress::new(None),
            at: Pair::default(),
            hands: Pair::default(),
            unheard: Some(Event::Attended(true)),
            limit: Pair::both(Limit::None),
            goal: Pair::both(None),
            holding: Pair::both(false),
            waiting: None,
            switch_at: first,
            splices: 0,
            refused: 0,
            short: 0,
            taken_back: 0,
            rescued: 0,
            failure: None,
            forwarded: Pair::default(),
            replaced: None,
            told: false,
            goes_on: false,
            log: Vec::new(),
            tracing: false,
            wakes: 0,
        }
    }

    fn say(&mut self, what: impl FnOnce() -> String) {
        if self.tracing {
            self.log.push(what());
        }
    }

    fn next_switch(&mut self, now: Time, rng: &mut SmallRng) {
        self.switch_at = now + rng.random_range(1..2 * self.habits.period);
    }

    /// One wake-up. Returns the latest time of the next one, if any.
    pub fn run(&mut self, now: Time, m: &mut Model, sockets: &mut Pair<Tcp>, rng: &mut SmallRng) -> Option<Time> {
        let mut awake = Awake { now, m, sockets, rng };
        self.wakes += 1;
        if self.wakes.is_multiple_of(WRITTEN_DOWN) {
            let written = serde_json::to_string(&self.core).expect("it can be written down");
            self.core = serde_json::from_str(&written).expect("and read back");
        }
        if let Some(event) = self.unheard.take() {
            self.hear(&mut awake, event);
        }
        self.note_failure(awake.sockets);
        match self.state {
            State::Copying if self.core.state() == core::State::Ended => None,
            State::Copying if self.core.state() == core::State::Closing => {
                let told = std::mem::take(&mut self.told);
                if told || is_due(self.core.timer(), now) {
                    self.hear(&mut awake, if told { Event::Told } else { Event::Timer });
                }
                self.core.timer().map(micros)
            }
            State::Copying | State::Draining
                if self.core.failed().is_none() && awake.sockets.iter().any(|s| s.reset) =>
            {
                let side = if awake.sockets.client.reset { Side::Client } else { Side::Server };
                self.hear(&mut awake, Event::Failed(side));
                Some(now)
            }
            State::Copying if self.core.state() == core::State::Resetting => {
                self.pump(awake.sockets);
                self.hear(&mut awake, Event::Timer);
                Some(now + MS)
            }
            State::Copying => {
                let is_over = self.pump(awake.sockets);
                if self.done() {
                    self.hear(&mut awake, Event::Copied);
                    return Some(now);
                }
                if is_due(self.core.settles_at(), now) {
                    self.hear(&mut awake, Event::Timer);
                    return Some(now);
                }
                if self.core.failed().is_some() {
                    if is_over {
                        self.hear(&mut awake, Event::Copied);
                    } else if self.core.timer() <= Some(Duration::from_micros(now)) {
                        self.hear(&mut awake, Event::Timer);
                    }
                    return Some(now + MS);
                }
                if now >= self.switch_at && self.splices < self.habits.switches {
                    return Some(self.try_to_splice(&mut awake));
                }
                let next = (self.splices < self.habits.switches).then_some(self.switch_at);
                [next, self.core.settles_at().map(micros)].into_iter().flatten().min()
            }
            State::Draining => {
                let passed = self.core.copies() && self.pump(awake.sockets);
                self.hear(&mut awake, if passed { Event::Copied } else { Event::Told });
                Some(now + 50 * MS)
            }
            State::Spliced => {
                let why = if now >= self.switch_at { Why::Command(Command::Unsplice) } else { Why::Look };
                let paths = self.replaced.or_else(|| Some(Pair::from_fn(|from| awake.m.path(from))));
                self.hear(&mut awake, Event::Seen(Box::new(Seen { why, paths, legs: None })));
                match self.state {
                    State::Spliced => Some(self.switch_at.min(now + 100 * MS)),
                    State::Ended => None,
                    _ => Some(now),
                }
            }
            State::Ended => None,
            State::Killed(false) => None,
            State::Killed(true) => self.watch(now, awake.m).then_some(now + 1000 * MS),
        }
    }

    /// Notes what a socket holds that was reset before its flow was forwarded.
    fn note_failure(&mut self, sockets: &Pair<Tcp>) {
        let reset = Side::BOTH.into_iter().find(|side| sockets[*side].reset || sockets[*side].reset_late);
        let is_copied = matches!(self.state, State::Copying | State::Draining);
        if let Some(side) = reset.filter(|_| is_copied && self.failure.is_none()) {
            let at = self.at[side];
            let received = at.consumed - u64::from(at.eof) + sockets[side].unread() as u64;
            self.failure = Some(Failure { side, received });
        }
    }

    /// Tries to splice. Returns the time of the next wake-up.
    fn try_to_splice(&mut self, awake: &mut Awake<'_>) -> Time {
        // simulate a wake-up at a busy time, with bytes in the buffer and others unread
        if awake.rng.random_bool(0.5) {
            self.grab(awake.sockets, awake.rng);
        }
        self.choose_limits(awake.rng);
        self.core.set_limits(self.limit);
        self.hear(awake, Event::Command(Command::Splice));
        if self.waiting.is_some() {
            return awake.now + MS;
        }
        self.next_switch(awake.now, awake.rng);
        match self.state {
            State::Draining => awake.now + awake.rng.random_range(0..=self.habits.late),
            _ => self.switch_at,
        }
    }

    /// Passes an event to the core and returns its action.
    fn on(&mut self, now: Time, event: Event) -> Action {
        let (now, legs) = (Duration::from_micros(now), Pair::from_fn(leg));
        let at = self.at.each_mut();
        self.core.on(&mut Context { now, policy: &self.policy, legs, at, shown: &mut self.shown }, event)
    }

    /// Handles an event, and performs all actions until there are no more or the process falls asleep.
    fn hear(&mut self, awake: &mut Awake<'_>, event: Event) {
        let mut event = Some(event);
        while let Some(action) = event.take().map(|event| self.on(awake.now, event)) {
            let before = self.state;
            self.state = match self.core.state() {
                core::State::Draining => State::Draining,
                core::State::Spliced | core::State::Released => State::Spliced,
                _ => State::Copying,
            };
            event = match action {
                Action::Wait | Action::CopyOn { .. } | Action::HoldBack(_) => None,
                Action::Keep => {
                    self.splices += 1;
                    self.next_switch(awake.now, awake.rng);
                    if self.habits.keeps {
                        self.switch_at = Time::MAX;
                    }
                    None
                }
                Action::Attend => Some(Event::Attended(true)),
                Action::Measure if self.core.state() == core::State::Resetting => {
                    let facts =
                        awake.sockets.each_ref().map(|s| PathFacts { outstanding: s.held(), ..PathFacts::default() });
                    Some(Event::Measured(facts))
                }
                Action::Measure => Some(Event::Measured(Pair::both(measured(awake.rng)))),
                Action::Freeze { fit } => {
                    self.freeze(awake, fit);
                    None
                }
                Action::Look if self.state == State::Draining && !self.core.copies() && !self.habits.hold => {
                    // like the program, which tries to commit in its place
                    Some(match self.commit(awake.m) {
                        Err(SwitchError::Busy) => self.looked(awake.m),
                        committed => Event::Committed(committed),
                    })
                }
                Action::Look => Some(self.looked(awake.m)),
                Action::Commit { .. } => Some(Event::Committed(self.commit(awake.m))),
                Action::Unsplice { away } => {
                    self.taken_back += u32::from(away.is_none());
                    self.rescued += u32::from(away.is_some() && self.switch_at == Time::MAX);
                    Some(self.unsplice(awake))
                }
                Action::End { how, forwarded } => {
                    self.end(awake, how, forwarded, before);
                    None
                }
                Action::Adopt | Action::LookBehind | Action::Release | Action::Recreate { .. } => {
                    unreachable!("{action:?}")
                }
            };
        }
    }

    fn looked(&mut self, m: &mut Model) -> Event {
        let at = self.call(m, switch_op::OP_LOOK).switched().map(Box::new);
        if let Ok(at) = &at {
            let is_held = |phase| phase == Phase::ToForwarding;
            self.holding = self.holding.zip(at.phase).map(|(holding, phase)| holding && is_held(phase));
        }
        Event::Looked(at)
    }

    fn commit(&mut self, m: &mut Model) -> Result<Box<Switched>, SwitchError> {
        assert!(self.hands.iter().all(|h| h.bytes.is_empty()), "forwarded with bytes in hand");
        let mut call = self.begin(switch_op::OP_COMMIT);
        call.args().fit = 1;
        let g = self.switch(m, call);
        self.say(|| format!("commit {g:?}"));
        g.switched().map(Box::new)
    }

    /// Kills the process. Its sockets belong to the kernel now: parked ones are silent.
    pub fn kill(&mut self, now: Time, m: &mut Model, sockets: &mut Pair<Tcp>) {
        let (look, state) = (self.look(m), self.state);
        self.say(|| format!("killed in {state:?}: {look:?}"));
        let parked = state == State::Spliced;
        for s in sockets.iter_mut() {
            if parked {
                s.dead = true;
            } else {
                s.abandon(now);
            }
        }
        self.state = State::Killed(false);
        self.unheard = None;
        self.holding = Pair::both(false);
        self.goes_on = parked && self.is_forwarded_for_good(m, &look);
    }

    /// Takes over as crates/engine, adoption.rs, does: drained flows are committed, spliced flows continue unchanged.
    pub fn take_over(&mut self, now: Time, m: &mut Model) {
        self.state = State::Killed(true);
        if is_forwarded(m) {
            self.commit_orphan(m).expect_err("a committed flow is not committed again");
        }
        self.watch(now, m);
    }

    /// Commits a flow of the process that died. No end and no byte may be forgotten.
    fn commit_orphan(&mut self, m: &mut Model) -> Result<(), SwitchError> {
        let (before, flags) = (self.look(m), path_flags(m));
        let committed = self.call(m, switch_op::OP_COMMIT).switched();
        self.say(|| format!("taken over {committed:?}"));
        let at = committed.unwrap_or_else(|_| self.look(m));
        if is_forwarded_by(flags) {
            assert_eq!(flags.map(|f| f & PATH_ENDS), path_flags(m).map(|f| f & PATH_ENDS), "an end is forgotten");
            assert_eq!(before.end, at.end, "bytes are forgotten");
        }
        self.goes_on |= self.is_forwarded_for_good(m, &at);
        committed.map(drop)
    }

    /// Looks at the flow of the process that died. Returns whether it is to be looked at again.
    fn watch(&mut self, now: Time, m: &mut Model) -> bool {
        let mut event = orphan::Event::Paths(Some(Pair::from_fn(|from| m.path(from))));
        loop {
            event = match self.orphan.on(Duration::from_micros(now), NEVER, event) {
                orphan::Action::LookAtLegs => orphan::Event::Legs {
                    at: Some(Box::new(self.look(m))),
                    heard: Pair::from_fn(|side| Some(Duration::from_nanos(m.leg(side).seen))),
                },
                orphan::Action::Commit(_) => orphan::Event::Committed(self.commit_orphan(m)),
                orphan::Action::Unsplice => {
                    let back = self.call(m, switch_op::OP_UNSPLICE).switched();
                    self.say(|| format!("the drain has stopped: {back:?}"));
                    orphan::Event::Unspliced
                }
                orphan::Action::Done(found) => return found == orphan::Found::Live,
            };
        }
    }

    fn look(&mut self, m: &mut Model) -> Switched {
        self.call(m, switch_op::OP_LOOK).switched().expect("nothing refuses a look")
    }

    fn is_forwarded_for_good(&self, m: &Model, at: &Switched) -> bool {
        is_forwarded(m) && (at.flags.client | at.flags.server) & LegFlags::TRIGGER == 0
    }

    fn done(&self) -> bool {
        self.at.iter().all(|at| at.eof && at.shut)
    }

    pub fn brief(&self) -> String {
        format!(
            "{:?} {:?} at {:?} hand {:?} splices {} refused {} back {}",
            self.state,
            self.core.state(),
            self.at,
            self.hands.each_ref().map(|h| h.bytes.len()),
            self.splices,
            self.refused,
            self.taken_back
        )
    }

    /// Reads from the sockets without writing.
    fn grab(&mut self, sockets: &mut Pair<Tcp>, rng: &mut SmallRng) {
        for (from, socket) in Side::BOTH.into_iter().zip(sockets) {
            if self.hands[from].bytes.is_empty() && !self.at[from].eof && socket.unread() > 0 {
                let n = rng.random_range(1..=socket.unread().min(self.habits.buffer));
                self.read(from, n, socket);
            }
        }
    }

    /// Reads at most `most` bytes and returns their number.
    fn read(&mut self, from: Side, most: usize, socket: &mut Tcp) -> usize {
        let hand = &mut self.hands[from];
        hand.urgent = socket.at_mark();
        let n = socket.read(most, &mut hand.bytes);
        if n > 0 {
            self.at[from].took(n);
            self.core.streams_mut()[from].took(n);
        }
        if self.core.streams()[from].discards() {
            self.hands[from].bytes.clear();
        }
        n
    }

    /// Copies in both directions. Returns whether both are done.
    fn pump(&mut self, sockets: &mut Pair<Tcp>) -> bool {
        let mut is_done = Pair::both(false);
        for from in Side::BOTH {
            let to = from.other();
            loop {
                match self.core.streams()[from].next(&self.at[from], &self.at[to], u64::MAX) {
                    Next::Write => {
                        let hand = &mut self.hands[from];
                        let n = sockets[to].room().min(hand.bytes.len());
                        if n == 0 {
                            break;
                        }
                        sockets[to].write(&hand.bytes[..n]);
                        hand.bytes.drain(..n);
                        if std::mem::take(&mut hand.urgent) {
                            sockets[to].mark();
                        }
                        self.at[to].gave(n);
                        self.core.streams_mut()[from].gave(n);
                    }
                    Next::Shut => {
                        self.at[to].closed();
                        sockets[to].close();
                    }
                    Next::Read(_) if sockets[from].at_end() => self.at[from].took(0),
                    Next::Read(most) => {
                        let most = most.min(self.habits.buffer as u64) as usize;
                        if self.read(from, most, &mut sockets[from]) == 0 {
                            is_done[from] = self.core.streams()[from].discards();
                            break;
                        }
                    }
                    Next::Done | Next::Enough => {
                        is_done[from] = true;
                        break;
                    }
                }
            }
        }
        is_done == Pair::both(true)
    }

    /// Runs a switch operation that does not depend on the sockets' positions.
    fn call(&mut self, m: &mut Model, op: switch_op) -> Switch {
        let call = self.begin(op);
        self.switch(m, call)
    }

    fn begin(&self, op: switch_op) -> Switch {
        let half = Half { leg: leg(Side::Client), consumed: 0, produced: 0, leftover: 0, limit: Limit::None };
        let mut call = Switch::new(op, Pair::both(&half), GENERATION);
        call.args().trigger = u32::from(self.habits.trigger) * 3;
        call
    }

    fn switch(&mut self, m: &mut Model, mut call: Switch) -> Switch {
        match &mut self.meanwhile {
            Some(w) => w.during(m, |m| m.switch(&mut call)),
            None => m.switch(&mut call),
        }
        call
    }

    /// Chooses limits for the next splice.
    fn choose_limits(&mut self, rng: &mut SmallRng) {
        if !self.habits.limits || self.waiting.is_some() {
            return;
        }
        self.limit = Pair::from_fn(|_| match rng.random_range(0..3) {
            0 => Limit::None,
            1 => Limit::Keep,
            _ => Limit::Bytes(1 << rng.random_range(0..20)),
        });
    }

    /// Runs a freeze. The process learns of its success at the next wake-up.
    fn freeze(&mut self, awake: &mut Awake<'_>, fit: bool) {
        let since = *self.waiting.get_or_insert(awake.now);
        let halves = Pair::from_fn(|side| self.core.half(side, leg(side), &self.at[side]));
        let mut call = Switch::new(switch_op::OP_FREEZE, halves.each_ref(), GENERATION);
        call.args().hold = self.habits.hold.into();
        let is_patient = awake.now < since + self.habits.patience;
        call.args().fit = if self.habits.keeps { fit } else { is_patient }.into();
        let g = self.switch(awake.m, call);
        let frozen = g.frozen(self.at.map(|at| at.consumed));
        match &frozen {
            Err(SwitchError::Window) => return self.hear(awake, Event::Frozen(Err(SwitchError::Window))),
            Err(SwitchError::Short) => self.short += 1,
            Err(_) => self.refused += 1,
            Ok(frozen) => {
                self.say(|| format!("freeze {g:?}"));
                self.goal = Pair::from_fn(|from| match self.limit[from] {
                    Limit::None => None,
                    Limit::Keep => Some(frozen.bound[from]),
                    Limit::Bytes(n) => Some(self.at[from].consumed + u64::from(n)),
                });
                self.state = State::Draining;
                self.holding = Pair::both(self.habits.hold);
            }
        }
        self.waiting = None;
        match frozen {
            Ok(frozen) => self.unheard = Some(Event::Frozen(Ok(Box::new(frozen)))),
            Err(error) => self.hear(awake, Event::Frozen(Err(error))),
        }
    }

    fn unsplice(&mut self, awake: &mut Awake<'_>) -> Event {
        let g = self.call(awake.m, switch_op::OP_UNSPLICE);
        self.say(|| format!("unsplice {g:?}"));
        let at = g.switched();
        self.holding = Pair::both(false);
        if let Ok(at) = &at {
            for from in Side::BOTH.into_iter().filter(|from| at.was_forwarded[*from]) {
                self.forwarded[from] = self.at[from].consumed..at.bound64(from);
            }
        }
        if let Ok(at) = &at
            && (at.flags.client | at.flags.server) & LegFlags::RESET == 0
        {
            for (s, _) in awake.sockets.iter_mut().zip(at.flags).filter(|(_, f)| f & LegFlags::PROBE != 0) {
                s.ask(awake.now);
            }
            for from in Side::BOTH.into_iter().filter(|from| at.was_forwarded[*from]) {
                assert!(
                    self.goal[from].is_none_or(|goal| at.bound64(from) <= goal),
                    "forwarded beyond the limit of {:?}: {g:?}",
                    self.goal
                );
            }
            self.next_switch(awake.now, awake.rng);
        }
        Event::Unspliced { at: at.map(Box::new), client_reset: false }
    }

    /// Handles the end of the flow. If one host has reset the connection, the sockets tell the other one, unless they are parked.
    /// What both hosts have closed is left to the kernel: the sockets send what they have.
    fn end(&mut self, awake: &mut Awake<'_>, how: EndReason, forwarded: bool, before: State) {
        self.say(|| format!("ended in {before:?}: {how:?}"));
        if how == EndReason::Closed && !forwarded {
            return;
        }
        for (side, s) in Side::BOTH.into_iter().zip(awake.sockets.iter_mut()).filter(|(_, s)| !s.is_gone()) {
            if forwarded {
                s.dead = true;
            } else if !s.disconnect(awake.now) {
                // like Datapath::reset_deserted
                let leg = awake.m.leg(side);
                if leg.flags & LegFlags::RESET_IN == 0 {
                    s.reset_from(awake.now, leg.ack_in.wrapping_sub(leg.shim_out));
                }
            }
        }
        self.state = State::Ended;
    }

    /// Counts bytes from this host that have passed through the sockets.
    pub fn leap(&mut self, from: Side, n: u64) {
        self.at[from].consumed += n;
        self.at[from.other()].produced += n;
    }

    /// Handles a trigger event of the data path.
    pub fn triggered(&mut self) {
        self.switch_at = 0;
    }
}

fn is_due(timer: Option<Duration>, now: Time) -> bool {
    timer.is_some_and(|at| at <= Duration::from_micros(now))
}

/// The first microsecond that is not before `at`.
fn micros(at: Duration) -> Time {
    at.as_nanos().div_ceil(1000) as Time
}

/// What the sockets know of a path: sometimes, that a drain would take too long.
fn measured(rng: &mut SmallRng) -> PathFacts {
    let unread = if rng.random_bool(0.2) { 1_000_000 } else { 0 };
    let rtt = Some(Duration::from_millis(10));
    PathFacts { rtt, min_rtt: rtt, rate: 1_000_000, unread, ..PathFacts::default() }
}
