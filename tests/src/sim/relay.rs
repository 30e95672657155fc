//! The engine's relay (crates/engine, relay.rs and pump.rs) over simulated sockets: copies, freezes, drains, commits,
//! takes back. It is asleep between events, and wakes up late, as processes do.

use super::{
    seg,
    tcp::{MS, Packet, Tcp, Time},
};
use longsplice_datapath::{
    LegFlags, PathFlags,
    abi::{limit, phase, switch_op, switch_result},
    model::{Fate, Model, SwitchArgs},
};
use rand::{RngExt, rngs::SmallRng};

const PATH_ENDS: u32 = (PathFlags::FIN | PathFlags::FIN_ACKED | PathFlags::DEAD) as u32;

fn is_forwarded_by(flags: [u32; 2]) -> bool {
    flags[0] & flags[1] & u32::from(PathFlags::SPLICED) != 0
}

fn is_forwarded(m: &Model) -> bool {
    is_forwarded_by([m.path_flags(0), m.path_flags(1)])
}

fn was_reset(at: &SwitchArgs) -> bool {
    (at.flags[0] | at.flags[1]) & LegFlags::RESET != 0
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Copying,
    Draining,
    Spliced,
    /// Forwarded to the end; the sockets are gone.
    Ended,
    /// The process is gone; true: another has taken over what it has left.
    Killed(bool),
}

#[derive(Default)]
struct Direction {
    hand: Vec<u8>,
    /// One byte is in hand, and it is urgent.
    urgent: bool,
    limit: Option<u64>,
    fin: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Habits {
    /// Reads of at most this many bytes.
    pub buffer: usize,
    /// Latest wake-up.
    pub late: Time,
    /// Mean time between switches.
    pub period: Time,
    pub hold: bool,
    pub trigger: bool,
    /// Splices are for so many bytes of a direction, or for none.
    pub limits: bool,
    pub drain_limit: Time,
    pub switches: u32,
    /// How long a freeze waits for windows to fit.
    pub patience: Time,
}

/// A segment that comes in on another processor, in the middle of what happens next.
pub struct Meanwhile {
    pub serial: u64,
    pub i: usize,
    pub packet: Packet,
    /// Before this lock is taken.
    pub lock: u32,
    /// What became of it; `None`: fewer locks were taken.
    pub fate: Option<(Fate, u8)>,
}

impl Meanwhile {
    pub fn during<T>(&mut self, m: &mut Model, work: impl FnOnce(&mut Model) -> T) -> T {
        if self.fate.is_some() {
            return work(m);
        }
        let (done, fate) = m.meanwhile((self.lock, self.i, &seg(&self.packet)), work);
        self.fate = fate;
        done
    }
}

pub struct Relay {
    pub meanwhile: Option<Meanwhile>,
    pub habits: Habits,
    pub state: State,
    dirs: [Direction; 2],
    consumed: [u64; 2],
    produced: [u64; 2],
    eof: [bool; 2],
    shut: [bool; 2],
    since: [u64; 2],
    /// As told to the data path, and the position of it, if it is one.
    limit: [limit; 2],
    goal: [Option<u64>; 2],
    /// What comes from this host waits.
    pub holding: [bool; 2],
    deadline: Time,
    /// Since when a freeze has been waiting for windows to fit.
    waiting: Option<Time>,
    fit: bool,
    pub switch_at: Time,
    pub splices: u32,
    pub refused: u32,
    pub short: u32,
    pub taken_back: u32,
    /// The process is gone, and all that is under way must arrive none the less.
    pub goes_on: bool,
    pub log: Vec<String>,
    pub tracing: bool,
}

impl Relay {
    pub fn new(habits: Habits, first: Time) -> Relay {
        Relay {
            meanwhile: None,
            habits,
            state: State::Copying,
            dirs: Default::default(),
            consumed: [0; 2],
            produced: [0; 2],
            eof: [false; 2],
            shut: [false; 2],
            since: [0; 2],
            limit: [limit::LIMIT_NONE; 2],
            goal: [None; 2],
            holding: [false; 2],
            deadline: 0,
            waiting: None,
            fit: false,
            switch_at: first,
            splices: 0,
            refused: 0,
            short: 0,
            taken_back: 0,
            goes_on: false,
            log: Vec::new(),
            tracing: false,
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

    /// One wake-up. When to wake at the latest, if at all.
    pub fn run(&mut self, now: Time, m: &mut Model, sockets: &mut [Tcp; 2], rng: &mut SmallRng) -> Option<Time> {
        match self.state {
            State::Copying | State::Draining if sockets.iter().any(|s| s.reset) => {
                self.break_off(now, m, sockets);
                None
            }
            State::Copying => {
                self.pump(sockets);
                if self.done() {
                    return None;
                }
                if now >= self.switch_at && self.splices < self.habits.switches {
                    // a wake-up in the middle of things: something is in hand, something unread
                    if rng.random_bool(0.5) {
                        self.grab(sockets, rng);
                    }
                    self.choose_limits(rng);
                    if !self.freeze(now, m) {
                        return Some(now + MS);
                    }
                    self.next_switch(now, rng);
                    if self.state == State::Draining {
                        return Some(now + rng.random_range(0..=self.habits.late));
                    }
                }
                (self.splices < self.habits.switches).then_some(self.switch_at)
            }
            State::Draining => {
                self.pump(sockets);
                let look = self.call(m, switch_op::OP_LOOK);
                self.holding = [0, 1].map(|d| self.holding[d] && look.phase[d] == phase::PHASE_TO_FWD);
                if look.phase == [phase::PHASE_FWD; 2] && (look.flags[0] | look.flags[1]) & LegFlags::HOLD == 0 {
                    self.commit(now, m, sockets, rng);
                } else if self.given_up(&look.phase) || now >= self.deadline || was_reset(&look) {
                    self.taken_back += 1;
                    self.unsplice(now, m, sockets, rng);
                }
                Some(now + 50 * MS)
            }
            State::Spliced => {
                if (m.path_flags(0) | m.path_flags(1)) & u32::from(PathFlags::DEAD) != 0 {
                    self.break_off(now, m, sockets);
                    return None;
                }
                if m.path_flags(0) & m.path_flags(1) & u32::from(PathFlags::FIN_ACKED) != 0 {
                    self.say(|| "closed while spliced".into());
                    self.state = State::Ended;
                    for s in sockets {
                        s.dead = true;
                    }
                    return None;
                }
                if now >= self.switch_at {
                    self.unsplice(now, m, sockets, rng);
                    return Some(now);
                }
                Some(self.switch_at.min(now + 100 * MS))
            }
            State::Ended => None,
            State::Killed(false) => None,
            State::Killed(true) => self.watch(m).then_some(now + 1000 * MS),
        }
    }

    /// The process is gone, and its sockets are the kernel's: parked ones are silent.
    pub fn kill(&mut self, now: Time, m: &mut Model, sockets: &mut [Tcp; 2]) {
        let (look, state) = (self.call(m, switch_op::OP_LOOK), self.state);
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
        self.holding = [false; 2];
        self.goes_on = parked && self.is_forwarded_for_good(m, &look);
    }

    /// As crates/engine, orphans.rs: what was drained is committed, and what is spliced goes on as it is.
    pub fn take_over(&mut self, m: &mut Model) {
        self.state = State::Killed(true);
        let (before, flags) = (self.call(m, switch_op::OP_LOOK), [0, 1].map(|i| m.path_flags(i)));
        if before.phase != [phase::PHASE_FWD; 2] {
            return;
        }
        let g = self.call(m, switch_op::OP_COMMIT);
        self.say(|| format!("taken over {g:?}"));
        if is_forwarded_by(flags) {
            assert_eq!(
                flags.map(|f| f & PATH_ENDS),
                [0, 1].map(|i| m.path_flags(i) & PATH_ENDS),
                "an end is forgotten"
            );
            assert_eq!(before.end, g.end, "bytes are forgotten");
        }
        self.goes_on |= self.is_forwarded_for_good(m, &g);
    }

    fn is_forwarded_for_good(&self, m: &Model, at: &SwitchArgs) -> bool {
        is_forwarded(m) && (at.flags[0] | at.flags[1]) & LegFlags::TRIGGER == 0
    }

    /// False: it has ended.
    fn watch(&mut self, m: &mut Model) -> bool {
        if !is_forwarded(m) {
            self.take_over(m);
        }
        m.path_flags(0) & m.path_flags(1) & u32::from(PathFlags::FIN_ACKED) == 0
    }

    fn done(&self) -> bool {
        self.eof == [true; 2] && self.shut == [true; 2]
    }

    pub fn brief(&self) -> String {
        format!(
            "{:?} consumed {:?} produced {:?} eof {:?} shut {:?} hand {:?} splices {} refused {} back {}",
            self.state,
            self.consumed,
            self.produced,
            self.eof,
            self.shut,
            [self.dirs[0].hand.len(), self.dirs[1].hand.len()],
            self.splices,
            self.refused,
            self.taken_back
        )
    }

    /// Reads without writing.
    fn grab(&mut self, sockets: &mut [Tcp; 2], rng: &mut SmallRng) {
        for (d, socket) in sockets.iter_mut().enumerate() {
            if self.dirs[d].hand.is_empty() && !self.eof[d] && socket.unread() > 0 {
                let n = rng.random_range(1..=socket.unread().min(self.habits.buffer));
                self.dirs[d].urgent = socket.at_mark();
                let n = socket.read(n, &mut self.dirs[d].hand);
                self.consumed[d] += n as u64;
            }
        }
    }

    fn pump(&mut self, sockets: &mut [Tcp; 2]) {
        for d in 0..2 {
            let o = 1 - d;
            loop {
                let dir = &mut self.dirs[d];
                if !dir.hand.is_empty() {
                    let n = sockets[o].room().min(dir.hand.len());
                    if n == 0 {
                        break;
                    }
                    sockets[o].write(&dir.hand[..n]);
                    dir.hand.drain(..n);
                    if std::mem::take(&mut dir.urgent) {
                        sockets[o].mark();
                    }
                    self.produced[o] += n as u64;
                    continue;
                }
                if self.eof[d] {
                    if !self.shut[o] {
                        self.shut[o] = true;
                        self.produced[o] += 1;
                        sockets[o].close();
                    }
                    break;
                }
                let room = match dir.limit {
                    Some(0) if !dir.fin => break,
                    Some(0) => 1,
                    Some(n) => n.min(self.habits.buffer as u64) as usize,
                    None => self.habits.buffer,
                };
                if sockets[d].at_eof() {
                    self.eof[d] = true;
                    self.consumed[d] += 1;
                    continue;
                }
                dir.urgent = sockets[d].at_mark();
                let n = sockets[d].read(room, &mut dir.hand);
                if n == 0 {
                    break;
                }
                self.consumed[d] += n as u64;
                if let Some(l) = &mut dir.limit {
                    *l -= n as u64;
                }
            }
        }
    }

    fn call(&mut self, m: &mut Model, op: switch_op) -> SwitchArgs {
        let mut g = SwitchArgs {
            op,
            hold: self.habits.hold.into(),
            fit: self.fit.into(),
            consumed: self.consumed.map(|x| x as u32),
            produced: self.produced.map(|x| x as u32),
            leftover: [self.dirs[0].hand.len() as u32, self.dirs[1].hand.len() as u32],
            limit: self.limit,
            trigger: u32::from(self.habits.trigger) * 3,
            ..SwitchArgs::default()
        };
        match &mut self.meanwhile {
            Some(w) => w.during(m, |m| m.switch(&mut g)),
            None => m.switch(&mut g),
        }
        g
    }

    /// For the next splice.
    fn choose_limits(&mut self, rng: &mut SmallRng) {
        if !self.habits.limits || self.waiting.is_some() {
            return;
        }
        self.limit = [(); 2].map(|()| match rng.random_range(0..3) {
            0 => limit::LIMIT_NONE,
            1 => limit::LIMIT_KEEP,
            _ => limit(1 << rng.random_range(0..20)),
        });
    }

    /// What was beyond a limit has come before the drain was over. What is forwarded of the other direction goes on until its
    /// socket may be passed by.
    fn given_up(&self, phases: &[phase; 2]) -> bool {
        phases.iter().any(|p| [phase::PHASE_LOCAL, phase::PHASE_TO_LOCAL].contains(p))
            && !phases.contains(&phase::PHASE_TO_FWD)
    }

    /// False: to be tried again when the windows fit.
    fn freeze(&mut self, now: Time, m: &mut Model) -> bool {
        let since = *self.waiting.get_or_insert(now);
        self.fit = now < since + self.habits.patience;
        let g = self.call(m, switch_op::OP_FREEZE);
        if g.result == switch_result::SWITCH_SHORT {
            self.short += 1;
            self.waiting = None;
            return true;
        }
        if g.result == switch_result::SWITCH_WINDOW {
            return false;
        }
        self.waiting = None;
        self.say(|| format!("freeze {g:?}"));
        if g.result != switch_result::SWITCH_OK {
            self.refused += 1;
            return true;
        }
        for d in 0..2 {
            let bound = self.consumed[d] + u64::from(g.start[d].wrapping_sub(self.consumed[d] as u32));
            self.goal[d] = match self.limit[d] {
                limit::LIMIT_NONE => None,
                limit::LIMIT_KEEP => Some(bound),
                n => Some(self.consumed[d] + u64::from(n.0)),
            };
            let fin = g.fin[d] != 0 && g.pending[d] > 0;
            let pending = u64::from(g.pending[d]) - u64::from(fin);
            self.dirs[d].limit = Some(pending);
            self.dirs[d].fin = fin;
            self.since[d] = bound;
        }
        self.deadline = now + self.habits.drain_limit;
        self.state = State::Draining;
        self.holding = [self.habits.hold; 2];
        true
    }

    fn lift(&mut self) {
        for d in &mut self.dirs {
            d.limit = None;
            d.fin = false;
        }
    }

    fn commit(&mut self, now: Time, m: &mut Model, sockets: &mut [Tcp; 2], rng: &mut SmallRng) {
        let g = self.call(m, switch_op::OP_COMMIT);
        if was_reset(&g) {
            return self.break_off(now, m, sockets);
        }
        assert_eq!(g.result, switch_result::SWITCH_OK, "{g:?}");
        assert!(self.dirs.iter().all(|d| d.hand.is_empty()), "forwarded with bytes in hand");
        self.say(|| format!("commit {g:?}"));
        self.lift();
        self.splices += 1;
        self.state = State::Spliced;
        self.next_switch(now, rng);
    }

    fn unsplice(&mut self, now: Time, m: &mut Model, sockets: &mut [Tcp; 2], rng: &mut SmallRng) {
        let g = self.call(m, switch_op::OP_UNSPLICE);
        self.say(|| format!("unsplice {g:?}"));
        self.lift();
        if was_reset(&g) {
            self.state = State::Copying;
            return self.break_off(now, m, sockets);
        }
        for (s, _) in sockets.iter_mut().zip(g.flags).filter(|(_, f)| f & LegFlags::PROBE != 0) {
            s.ask(now);
        }
        for d in 0..2 {
            if g.pending[d] == 0 {
                continue;
            }
            let o = 1 - d;
            let bound = g.end[d] - u64::from((g.end[d] as u32).wrapping_sub(g.start[d]));
            let forwarded = bound - self.since[d];
            assert!(
                self.goal[d].is_none_or(|goal| bound <= goal),
                "forwarded beyond the limit of {:?}: {g:?}",
                self.goal
            );
            self.consumed[d] += forwarded;
            self.produced[o] += forwarded;
            if g.flags[o] & LegFlags::FIN_OUT != 0 && !self.shut[o] && self.goal[d].is_none() {
                // the end of the stream has passed by the sockets
                self.eof[d] = true;
                self.shut[o] = true;
            }
        }
        self.state = State::Copying;
        self.holding = [false; 2];
        self.next_switch(now, rng);
    }

    /// One of the hosts has reset the connection: the other one hears of it from the sockets, unless they are parked.
    fn break_off(&mut self, now: Time, m: &mut Model, sockets: &mut [Tcp; 2]) {
        let state = self.state;
        self.say(|| format!("broken off in {state:?}"));
        if state == State::Draining {
            self.call(m, switch_op::OP_UNSPLICE);
        }
        for s in sockets.iter_mut().filter(|s| !s.is_gone()) {
            match state {
                State::Spliced => s.dead = true,
                _ => s.abort(now),
            }
        }
        m.close();
        self.state = State::Ended;
    }

    /// Told by an event of the data path.
    pub fn triggered(&mut self) {
        self.switch_at = 0;
    }
}
