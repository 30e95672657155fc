//! A deterministic simulation of one flow: two hosts, two links, our two sockets, and in the middle the data path's real
//! decision logic. A seed determines everything.

mod adversary;
mod app;
mod crossing;
mod death;
mod detour;
mod device;
mod excess;
mod holder;
mod kind;
mod leap;
mod marks;
mod relay;
mod reset;
mod reuse;
mod rules;
mod segment;
mod style;
mod tcp;

use app::{App, byte};
use death::Death;
use detour::Detours;
use device::Device;
use holder::HELD;
pub use kind::{Kind, Weather};
use longsplice_datapath::{
    LegFlags, Pair, Side, VERDICTS,
    abi::event_kind,
    model::{Edit, Fate, Model, Seg, Start},
};
use marks::Marks;
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use relay::{Habits, Relay, State};
use reset::Reset;
use segment::show;
use std::{cmp::Reverse, collections::BinaryHeap};
use style::Style;
use tcp::{MS, Packet, Tcp, Time};

const EVENT_TRIGGERED: u8 = 1 << event_kind::EVENT_TRIGGERED.0;
const EVENT_LIMIT_REACHED: u8 = 1 << event_kind::EVENT_LIMIT_REACHED.0;

/// The results of a run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Longest time in which a receiver got nothing although the other host had written data.
    pub gap: Time,
    /// Time at the end of the run.
    pub time: Time,
    /// Completed splices.
    pub splices: u32,
    /// Segments that were held and later forwarded.
    pub held: u32,
    /// Segments forwarded in a drain before earlier ones.
    pub early: u32,
    /// Whether the process died.
    pub killed: bool,
    /// Whether it died at a time when nothing could be lost.
    pub whole: bool,
    /// Whether the hosts have connected again before the process had heard of the end.
    pub reused: bool,
    /// Whether a host has reset the connection.
    pub reset: bool,
    /// What the other host had got of it then, if that was not in forwarding mode.
    pub delivered: u64,
    /// Segments of which a part beyond a limit was cut off or dropped.
    pub cut_off: u32,
    /// Number of path changes.
    pub detours: u32,
    /// Segments sent by the attacker.
    pub forged: u32,
    /// Segments that a host rejected because of their timestamps, though no clock ticks faster than every millisecond, and nobody
    /// was silent for days.
    pub outdated: u32,
    /// Retransmission timeouts of hosts and sockets.
    pub rtos: u32,
    /// How often a flow that was to stay spliced was taken back.
    pub rescued: u32,
    /// How often gigabytes passed at once.
    pub leaps: u32,
    /// Segments for which there was no room in the queue of our device.
    pub refused: u32,
    /// Congestion marks.
    pub marks: marks::Counts,
    /// The error, if any.
    pub error: Option<String>,
    /// The packets, if a trace was requested.
    pub trace: Vec<String>,
    /// When the longest gap began.
    pub gap_at: Time,
}

#[derive(Debug)]
enum Event {
    /// A packet arrives at the host of this side.
    ToHost(Side, Packet),
    /// A packet arrives at our device of this side.
    ToUs(Side, Packet),
    /// A held packet is fed in again at our device of this side.
    Back(Side, Packet),
    Wake,
}

struct Queued(Time, u64, Event);
impl PartialEq for Queued {
    fn eq(&self, o: &Queued) -> bool {
        (self.0, self.1) == (o.0, o.1)
    }
}
impl Eq for Queued {}
impl PartialOrd for Queued {
    fn partial_cmp(&self, o: &Queued) -> Option<std::cmp::Ordering> {
        Some(self.cmp(o))
    }
}
impl Ord for Queued {
    fn cmp(&self, o: &Queued) -> std::cmp::Ordering {
        (self.0, self.1).cmp(&(o.0, o.1))
    }
}

struct World {
    now: Time,
    serial: u64,
    rng: SmallRng,
    queue: BinaryHeap<Reverse<Queued>>,
    hosts: Pair<Tcp>,
    apps: Pair<App>,
    sockets: Pair<Tcp>,
    model: Model,
    relay: Relay,
    relay_at: Option<Time>,
    weather: Weather,
    delay: Pair<Time>,
    jitter: Time,
    /// Time that segments to us wait in the queue of each link, if there are queues.
    waits: Pair<Time>,
    queues: Option<SmallRng>,
    /// Segments held until the end of a drain, and when the last released one is fed in.
    held: Pair<Vec<Packet>>,
    let_go_at: Pair<Time>,
    /// The end of the data forwarded in a drain.
    reached: Pair<Option<u32>>,
    /// Future sleeps: the earliest time and the duration. See [`Tcp::slept`].
    sleeps: Vec<(Time, Time)>,
    /// Earliest times at which the next packets to us and to the host may arrive: links keep the order.
    fifo: Pair<[Time; 2]>,
    tracing: bool,
    /// Chooses segments that arrive in the middle of an operation, if a second processor is simulated.
    other_cpu: Option<SmallRng>,
    /// Chooses forged segments.
    adversary: Option<SmallRng>,
    /// Chooses when the hosts connect again.
    reuse: Option<SmallRng>,
    /// Chooses how much passes at once.
    leaps: Option<SmallRng>,
    /// When the process dies, and when the next one starts.
    death: Option<Death>,
    reset: Option<Reset>,
    detours: Option<Detours>,
    device: Option<Device>,
    marks: Marks,
    out: Outcome,
    progress: Pair<u64>,
}

/// Runs one seed, and records a trace of its packets if requested.
pub fn run(seed: u64, kind: Kind, tracing: bool) -> Outcome {
    let marks = if kind == Kind::Marked { Marks::random(seed) } else { Marks::default() };
    let mut w = World::new(seed, matches!(kind, Kind::Calm | Kind::Still | Kind::Held | Kind::Queued), marks, tracing);
    match kind {
        Kind::Still => w.relay.habits.switches = 0,
        Kind::Kept => w.is_to_be_kept(),
        Kind::Held => w.relay.habits.hold = true,
        Kind::Queued => w.queues = Some(SmallRng::seed_from_u64(!seed)),
        Kind::Crossing => w.other_cpu = Some(SmallRng::seed_from_u64(!seed)),
        Kind::Hostile => w.adversary = Some(SmallRng::seed_from_u64(!seed)),
        Kind::Full => w.is_to_be_full(seed),
        Kind::Killed => w.is_to_die(seed),
        Kind::Reset => w.is_to_be_reset(seed),
        Kind::Long => w.is_to_leap(seed),
        Kind::Reused => w.is_to_be_reused(seed),
        Kind::Moved => w.is_to_move(seed),
        Kind::HostileMoved => {
            w.is_to_move(seed);
            w.adversary = Some(SmallRng::seed_from_u64(!seed));
        }
        Kind::Calm | Kind::Bad | Kind::Marked => {}
    }
    w.go();
    w.judge_reset();
    w.out.rtos = w.hosts.iter().chain(&w.sockets).map(|t| t.rtos).sum();
    // The data path expects clocks to tick every millisecond. If it has not heard one for days, a switch may expect days too much,
    // and a few of them in a row half a round. Then a host drops what looks old, and its answer corrects that (tsval_reached()).
    let are_known = w.hosts.client.slept < 24 * 3_600_000 * MS;
    if are_known && w.hosts.iter().all(|h| h.style.tick >= MS) {
        let old = |h: &Tcp| h.ignored.iter().find(|i| i.0 == tcp::Ignored::Paws).map_or(0, |i| i.1);
        w.out.outdated = w.hosts.iter().map(old).sum();
    }
    w.out.refused = w.device.map_or(0, |d| d.refused);
    w.out.splices = w.relay.splices;
    w.out.rescued = w.relay.rescued;
    w.out.time = w.now;
    w.out.whole = w.relay.goes_on;
    w.out
}

impl World {
    fn new(seed: u64, calm: bool, marks: Marks, tracing: bool) -> World {
        let mut rng = SmallRng::seed_from_u64(seed);
        let r = &mut rng;
        let mut host = Pair::new(Style::random(r), Style::random(r));
        let mut ours = Pair::new(Style::local(r), Style::local(r));
        // both legs have one MSS: the SYN to the server carries the client's MSS
        let mss = host.client.mss.min(host.server.mss).min(ours.client.mss);
        if calm {
            // Hosts do nothing that may legitimately stall a flow: no windows below a few segments, no slow probes.
            for h in &mut host {
                h.receive = h.receive.max(6 * mss.max(1 << h.wscale));
                h.delack = h.delack.min(40 * MS);
            }
            for s in &mut ours {
                s.receive = s.receive.max(6 * mss);
                s.send = s.send.max(6 * mss as usize);
            }
            // An advertised window cannot be withdrawn: data that does not fit the other host's window may be lost.
            for side in Side::BOTH {
                let other = &host[side.other()];
                let n = other.receive.min(if other.wscale == 0 { 65535 } else { u32::MAX });
                ours[side].receive = ours[side].receive.min(n);
            }
        }
        style::negotiate(seed, r, mss, &mut host, &mut ours);
        let number = |r: &mut SmallRng| match r.random_range(0..3) {
            0 => r.random_range(0..200_000u32).wrapping_neg(),
            1 => (1u32 << 31) - r.random_range(0..200_000u32),
            _ => r.random(),
        };
        let mut starts = Pair::<Start>::default();
        let make = |side: Side, r: &mut SmallRng, start: &mut Start| {
            let (a, b) = (number(r), number(r));
            let (ta, tb): (u32, u32) = (r.random(), r.random());
            let (h, o) = (&host[side], &ours[side]);
            let far = Tcp::new(*h, o, a, b, ta, tb);
            let near = Tcp::new(*o, h, b, a, tb, ta);
            *start = Start {
                irs: a,
                iss: b,
                edge_in: b.wrapping_add(1).wrapping_add(h.receive.min(65535)),
                edge_out: a.wrapping_add(1).wrapping_add(o.receive.min(65535)),
                tsval_in: ta,
                tsval_out: tb,
                flags: u32::from(h.ts) * LegFlags::TS + u32::from(h.sack) * LegFlags::SACK + marks.leg_flags(side),
                wscale_in: h.wscale,
                wscale_out: o.wscale,
            };
            (far, near)
        };
        let (client, to_client) = make(Side::Client, r, &mut starts.client);
        let (server, to_server) = make(Side::Server, r, &mut starts.server);
        let app = |seed: u64, r: &mut SmallRng| App {
            seed,
            total: match r.random_range(0..8) {
                0 => r.random_range(0..100),
                1 => 0,
                2..5 => r.random_range(100..30_000),
                _ => r.random_range(30_000..400_000),
            },
            written: 0,
            got: 0,
            urgency: 0.0,
            urgent: Vec::new(),
            marks: Vec::new(),
            chunk: *[1, 100, 3000, 50_000].get(r.random_range(0..4usize)).expect("four"),
            pause: *[0, 0, 100, MS, 20 * MS].get(r.random_range(0..5usize)).expect("five"),
            write_at: 0,
            sip: *[10, 1000, 100_000, 100_000].get(r.random_range(0..4usize)).expect("four"),
            nap: if r.random_bool(0.6) { 0 } else { r.random_range(0..5 * MS) },
            read_at: 0,
            after_peer: false,
            closed: false,
            eof: false,
            last: 0,
        };
        let mut apps = Pair::new(app(seed * 2, r), app(seed * 2 + 1, r));
        for (side, a) in Side::BOTH.into_iter().zip(&mut apps) {
            // small windows are wanted, but the run must end
            a.total = a.total.min(u64::from(host[side.other()].receive.min(ours[side].receive)) * 100);
            // at most about 4000 steps
            a.chunk = a.chunk.max((a.total / 1000) as usize).max(1);
            a.sip = a.sip.max((a.total / 1000) as usize);
            if a.pause == 20 * MS {
                a.chunk = a.chunk.max((a.total / 100) as usize).max(1);
            }
        }
        for a in &mut apps {
            a.urgency =
                if r.random_bool(0.4) { *[0.01, 0.1, 0.5].get(r.random_range(0..3usize)).expect("three") } else { 0.0 };
        }
        match r.random_range(0..3) {
            0 => apps.client.after_peer = true,
            1 => apps.server.after_peer = true,
            _ => {}
        }
        let weather = if calm {
            Weather { loss: 0.0, duplicate: 0.0, reorder: 0.0 }
        } else {
            let dice = |r: &mut SmallRng, max: f64| if r.random_bool(0.5) { r.random_range(0.0..max) } else { 0.0 };
            Weather { loss: dice(r, 0.04), duplicate: dice(r, 0.03), reorder: dice(r, 0.05) }
        };
        let habits = Habits {
            buffer: *[100, 1500, 16_384, 65_536].get(r.random_range(0..4usize)).expect("four"),
            late: *[10, 100, 2 * MS, 10 * MS].get(r.random_range(0..4usize)).expect("four"),
            period: *[MS, 5 * MS, 20 * MS, 100 * MS].get(r.random_range(0..4usize)).expect("four"),
            hold: !calm && r.random_bool(0.15),
            trigger: r.random_bool(0.2),
            limits: !calm && r.random_bool(0.5),
            drain_limit: if !calm && r.random_bool(0.2) { r.random_range(0..20 * MS) } else { 10_000 * MS },
            switches: 40,
            patience: std::env::var("SIM_PATIENCE").map_or(200, |p| p.parse().expect("number")) * MS,
            keeps: false,
        };
        let first = r.random_range(0..2 * habits.period);
        let mut relay = Relay::new(habits, first);
        relay.tracing = tracing;
        let far = if calm { 20 * MS } else { 60 * MS };
        let delay = Pair::new(r.random_range(10..far), r.random_range(10..far))
            .map(|d: u64| if r.random_bool(0.4) { d % 500 + 10 } else { d });
        const MINUTE: Time = 60_000 * MS;
        let sleeps = [(); 4].map(|()| {
            let long =
                [30 * MINUTE, 40 * MINUTE, 100 * MINUTE, 7 * 1440 * MINUTE, 25 * 1440 * MINUTE, 40 * 1440 * MINUTE];
            (r.random_range(0..1000 * MS), long[r.random_range(0..long.len())])
        });
        let sleeps = if r.random_bool(0.5) { sleeps.to_vec() } else { Vec::new() };
        let mut out = Outcome::default();
        if tracing {
            out.trace.push(format!(
                "hosts {host:?}\nours {ours:?}\n{habits:?}\n{weather:?} delay {delay:?}\ntotals {:?}\nstarts {starts:?}",
                apps.iter().map(|a| (a.total, a.chunk, a.pause, a.sip, a.nap, a.after_peer)).collect::<Vec<_>>()
            ));
        }
        World {
            now: 0,
            serial: 0,
            hosts: Pair::new(client, server),
            sockets: Pair::new(to_client, to_server),
            apps,
            model: Model::new(starts),
            relay,
            relay_at: Some(0),
            weather,
            delay,
            jitter: 20,
            waits: Pair::default(),
            queues: None,
            sleeps,
            held: Pair::default(),
            let_go_at: Pair::both(0),
            reached: Pair::both(None),
            fifo: Pair::both([0; 2]),
            tracing,
            other_cpu: None,
            adversary: None,
            leaps: None,
            reuse: None,
            death: None,
            reset: None,
            detours: None,
            device: None,
            marks,
            out,
            progress: Pair::both(0),
            queue: BinaryHeap::new(),
            rng,
        }
    }

    fn note(&mut self, what: impl FnOnce(&World) -> String) {
        if self.tracing {
            let line = format!("{:>10} {}", self.now, what(self));
            self.out.trace.push(line);
        }
    }

    fn at(&mut self, t: Time, e: Event) {
        self.serial += 1;
        self.queue.push(Reverse(Queued(t, self.serial, e)));
    }

    /// Sends a packet on the link between us and this host.
    fn wire(&mut self, side: Side, to_host: bool, mut p: Packet) {
        let w = self.weather;
        if to_host {
            self.judge_rules(side, &p);
            self.note_data(side, true, &p, p.data.len() as u32);
        }
        self.marks.pass(&mut p);
        if !self.pass_detour(side, to_host, &mut p) || self.rng.random_bool(w.loss) {
            self.note(|_| format!("{side:?} lost"));
            return;
        }
        if let Some(r) = self.queues.as_mut().filter(|_| !to_host)
            && r.random_bool(0.05)
        {
            self.waits[side] = if r.random_bool(0.5) { r.random_range(0..1000 * MS) } else { 0 };
        }
        let queue = if to_host { 0 } else { self.waits[side] };
        let copies = 1 + u32::from(self.rng.random_bool(w.duplicate));
        for _ in 0..copies {
            let way = usize::from(to_host);
            let mut t = self.now + self.delay[side] + queue + self.rng.random_range(0..self.jitter);
            if self.rng.random_bool(w.reorder) {
                t += self.rng.random_range(0..self.delay[side] + 5 * MS);
            } else {
                t = t.max(self.fifo[side][way] + 1);
                self.fifo[side][way] = t;
            }
            let p = p.clone();
            self.at(t, if to_host { Event::ToHost(side, p) } else { Event::ToUs(side, p) });
        }
    }

    fn go(&mut self) {
        const LIMIT: Time = 600_000 * MS;
        let mut steps = 0;
        self.at(0, Event::Wake);
        while self.out.error.is_none() {
            self.settle();
            self.attack();
            if self.begin_anew() || self.finished() {
                return;
            }
            steps += 1;
            let Some(next) = self.next() else {
                if self.may_be_silent() {
                    return;
                }
                return self.fail("nothing will ever happen again");
            };
            if next > LIMIT || steps > 1_000_000 {
                if !self.are_beyond() {
                    self.fail("no end");
                }
                return;
            }
            self.now = self.now.max(next);
            while self.queue.peek().is_some_and(|q| q.0.0 <= self.now) && self.out.error.is_none() {
                let Reverse(Queued(_, _, e)) = self.queue.pop().expect("peeked");
                self.event(e);
            }
        }
    }

    fn fail(&mut self, why: &str) {
        let mut s = format!("{why} at {} us", self.now);
        for side in Side::BOTH {
            let a = &self.apps[side];
            s += &format!(
                "\n{side:?}: wrote {}/{} closed {}, got {}/{} eof {}; {} ignored {:?}\nits socket: {} ignored {:?}",
                a.written,
                a.total,
                a.closed,
                a.got,
                self.apps[side.other()].total,
                a.eof,
                self.hosts[side].brief(),
                self.hosts[side].ignored,
                self.sockets[side].brief(),
                self.sockets[side].ignored
            );
        }
        s += &format!("\nrelay {}\n{:?}", self.relay.brief(), self.model);
        self.out.error = Some(s);
    }

    fn next(&self) -> Option<Time> {
        let mut t = self.queue.peek().map(|q| q.0.0);
        let mut also = |x: Option<Time>| {
            if let Some(x) = x {
                t = Some(t.map_or(x, |t| t.min(x)));
            }
        };
        for side in Side::BOTH {
            also(self.hosts[side].wakes());
            also(self.sockets[side].wakes());
            let (a, h) = (&self.apps[side], &self.hosts[side]);
            if h.is_gone() {
                continue;
            }
            if a.written < a.total && h.room() > 0 {
                also(Some(a.write_at));
            }
            if h.unread() > 0 {
                also(Some(a.read_at));
            }
        }
        // a process that only watches orphaned flows causes no events itself
        if t.is_some() || !self.has_died() || self.relay.state == State::Killed(false) {
            t = [t, self.relay_at].into_iter().flatten().min();
        }
        t
    }

    fn finished(&self) -> bool {
        let over = |(a, h): (&App, &Tcp)| a.closed && a.eof && h.fin_acked;
        self.apps.iter().zip(&self.hosts).all(|(a, h)| over((a, h)) || (h.is_gone() && self.may_break_off()))
    }

    /// Whether no packet is in flight, and no host has reason to send one.
    fn is_silent(&self) -> bool {
        self.hosts.iter().all(Tcp::is_at_rest)
            && self.queue.iter().all(|Reverse(Queued(_, _, e))| matches!(e, Event::Wake))
    }

    /// Occasionally lets everyone sleep while no packet is in flight. Not in a drain, which has a time limit.
    fn sleep(&mut self) {
        let Some(&(_, long)) = self.sleeps.last().filter(|s| s.0 <= self.now) else { return };
        let quiet = self.relay.state != State::Draining && self.sockets.iter().all(Tcp::is_at_rest);
        if quiet && self.is_silent() {
            self.sleeps.pop();
            self.note(|_| format!("all sleep for {} s", long / 1000 / MS));
            self.hosts.iter_mut().chain(&mut self.sockets).for_each(|t| t.slept += long);
        }
    }

    /// Does everything that can happen at this instant.
    fn settle(&mut self) {
        self.sleep();
        self.leap();
        for side in Side::BOTH {
            self.app(side);
        }
        self.live_and_die();
        self.live_and_reset();
        self.live_and_move();
        if self.relay_at.is_some_and(|t| t <= self.now) {
            self.model.time((self.now + self.hosts.client.slept) * 1000);
            self.relay.meanwhile = self.choose_meanwhile();
            self.relay_at = self.relay.run(self.now, &mut self.model, &mut self.sockets, &mut self.rng);
            for l in std::mem::take(&mut self.relay.log) {
                self.note(|_| l);
            }
            let meanwhile = self.relay.meanwhile.take();
            self.came_meanwhile(meanwhile);
            self.let_go();
        }
        for side in Side::BOTH {
            for mut p in self.hosts[side].poll(self.now) {
                self.marks.by_host(side, &mut p);
                self.note(|_| format!("{side:?} -> {}", show(&p)));
                self.wire(side, false, p);
            }
            let mut goes = true;
            for p in self.sockets[side].poll(self.now) {
                goes = goes && self.by_socket(side, &p);
                if !goes {
                    self.sockets[side].refuse(self.now, &p);
                }
            }
            if self.hosts[side].reset && !self.may_break_off() {
                return self.fail(&format!("{side:?} was reset"));
            }
            if self.sockets[side].reset && !self.has_died() && !self.was_reset() {
                return self.fail(&format!("the socket to {side:?} was reset"));
            }
        }
    }

    /// Occasionally sends a forged segment.
    fn attack(&mut self) {
        let Some(r) = &mut self.adversary else { return };
        if !r.random_bool(0.2) {
            return;
        }
        let from = Side::BOTH[r.random_range(0..2)];
        let p = adversary::forge(r, &self.hosts[from]);
        self.out.forged += 1;
        self.note(|_| format!("forged, as of {from:?}:"));
        self.event(Event::ToUs(from, p));
    }

    fn app(&mut self, side: Side) {
        let (now, may_break_off) = (self.now, self.may_break_off());
        if self.hosts[side].is_gone() {
            return;
        }
        let a = &mut self.apps[side];
        let h = &mut self.hosts[side];
        if a.written < a.total && h.room() > 0 && a.write_at <= now {
            let n = (h.room().min(a.chunk) as u64).min(a.total - a.written);
            let data: Vec<u8> = (a.written..a.written + n).map(|p| byte(a.seed, p)).collect();
            h.write(&data);
            a.written += n;
            if a.urgency > 0.0 && self.rng.random_bool(a.urgency) {
                h.mark();
                a.urgent.push(a.written - 1);
            }
            a.write_at = now + a.pause + 1;
        }
        let mut wrong = None;
        if (h.unread() > 0 && a.read_at <= now) || (h.at_eof() && !a.eof) {
            let mut got = Vec::new();
            if h.at_mark() {
                a.marks.push(a.got);
            }
            h.read(a.sip, &mut got);
            let (seed, total) = {
                let peer = &self.apps[side.other()];
                (peer.seed, peer.total)
            };
            let a = &mut self.apps[side];
            for b in &got {
                if *b != byte(seed, a.got) {
                    wrong = Some(format!("{side:?}: byte {} is wrong", a.got));
                    break;
                }
                a.got += 1;
            }
            a.read_at = now + a.nap + u64::from(a.nap == 0);
            if self.hosts[side].at_eof() && !a.eof {
                a.eof = true;
                let (sent, marks) = (&self.apps[side.other()].urgent, &self.apps[side].marks);
                if self.apps[side].got != total && may_break_off {
                    // the connection was broken off
                } else if self.apps[side].got != total {
                    wrong = Some(format!("{side:?}: end of stream after {} of {total}", self.apps[side].got));
                } else if marks.last() != sent.last() || marks.iter().any(|m| !sent.contains(m)) {
                    wrong = Some(format!("{side:?}: urgent are {sent:?}, received as such {marks:?}"));
                }
            }
        }
        let a = &mut self.apps[side];
        if a.written == a.total && !a.closed && (!a.after_peer || a.eof) {
            a.closed = true;
            self.hosts[side].close();
        }
        if let Some(w) = wrong {
            self.fail(&w);
        }
        self.gap(side);
    }

    /// Measures how long this receiver has got nothing although the sender had data.
    fn gap(&mut self, side: Side) {
        let (a, sender) = (&self.apps[side], &self.apps[side.other()]);
        let sent = sender.written + u64::from(sender.closed);
        let got = a.got + self.hosts[side].unread() as u64 + u64::from(self.hosts[side].eof);
        let since = a.last;
        if got != self.progress[side] {
            self.progress[side] = got;
            if self.now - since > self.out.gap {
                self.out.gap = self.now - since;
                self.out.gap_at = since;
            }
            self.apps[side].last = self.now;
        } else if sent <= got {
            self.apps[side].last = self.now;
        }
    }

    /// Sends a packet of our socket. Returns false if the queue of the device is full.
    fn by_socket(&mut self, side: Side, p: &Packet) -> bool {
        let (mut p, mut goes) = (p.clone(), true);
        self.marks.by_socket(side, &mut p);
        self.model.time((self.now + self.hosts.client.slept) * 1000);
        match self.model.egress(side, &seg(&p)) {
            None => self.note(|_| format!("socket to {side:?} muted {}", show(&p))),
            Some(e) => {
                let q = edited(&p, &e);
                goes = self.device.as_mut().is_none_or(Device::takes_one);
                let not = if goes { "" } else { " (queue is full)" };
                self.note(|_| format!("socket to {side:?} {} as {}{not}", show(&p), show(&q)));
                if goes {
                    self.wire(side, true, q);
                }
            }
        }
        self.wake_relay();
        goes
    }

    /// Wakes the relay, with a delay.
    fn wake_relay(&mut self) {
        if matches!(self.relay.state, State::Ended | State::Killed(_)) {
            return;
        }
        let late = self.rng.random_range(0..=self.relay.habits.late);
        let t = self.now + late;
        self.relay_at = Some(self.relay_at.map_or(t, |r| r.min(t)));
    }

    fn event(&mut self, e: Event) {
        match e {
            Event::Wake => {}
            Event::ToHost(to, p) if self.hosts[to].is_gone() => self.answer_by_nobody(to, &p),
            Event::ToHost(to, p) => {
                self.judge_host(to, &p);
                let why = self.hosts[to].input(self.now, &p);
                self.note(|w| format!("{to:?} <- {} {why:?} [{}]", show(&p), w.hosts[to].brief()));
            }
            Event::ToUs(from, ref p) | Event::Back(from, ref p) => {
                self.model.time((self.now + self.hosts.client.slept) * 1000);
                let mut meanwhile = self.choose_meanwhile();
                let segment = Seg { again: matches!(e, Event::Back(..)).into(), ..self.arriving(from, p) };
                let (fate, events) = match &mut meanwhile {
                    Some(w) => w.during(&mut self.model, |m| m.ingress(from, &segment)),
                    None => self.model.ingress(from, &segment),
                };
                self.came_meanwhile(meanwhile);
                self.came(from, p, fate, events);
            }
        }
    }

    /// Processes the data path's decision about a packet from this host.
    fn came(&mut self, from: Side, p: &Packet, fate: Fate, events: u8) {
        if events & (EVENT_TRIGGERED | EVENT_LIMIT_REACHED) != 0 {
            self.relay.triggered();
        }
        self.relay.told |= events & !HELD != 0;
        if let Fate::Sent { local, forwarded, plain } = &fate {
            let len = p.data.len() as u32;
            let kept = [local, forwarded].into_iter().flatten().map(|copy| copy.keep).max().unwrap_or(0);
            self.note_data(from, false, p, if *plain { len } else { kept.min(len) });
        }
        self.hold(from, p, events);
        self.judge_marks(from, p, &fate);
        self.judge_excess(from, p, &fate, events);
        match fate {
            Fate::Dropped(v) => self.note(|_| format!("{from:?} in {} DROPPED verdict {v}", show(p))),
            Fate::Answered(e) => {
                let reset = edited(p, &e);
                self.note(|_| format!("{from:?} in {} answered {}", show(p), show(&reset)));
                self.wire(from, true, reset);
            }
            Fate::Sent { local, forwarded, plain } => {
                if let Some(e) = forwarded {
                    let q = edited(p, &e);
                    self.watch_order(from, &q);
                    self.note(|_| format!("{from:?} in {} forwarded {}", show(p), show(&q)));
                    self.wire(from.other(), true, q);
                }
                if let Some(e) = local {
                    let q = if plain { p.clone() } else { edited(p, &e) };
                    if self.answer_for_nobody(from, &q) {
                        return;
                    }
                    self.marks.at_socket(from, &q);
                    let why = self.sockets[from].input(self.now, &q);
                    self.note(|w| {
                        format!("{from:?} in {} local {} {why:?} [{}]", show(p), show(&q), w.sockets[from].brief())
                    });
                }
            }
        }
        self.wake_relay();
    }
}

fn seg(p: &Packet) -> Seg {
    Seg {
        seq: p.seq,
        ack: p.ack,
        len: p.data.len() as u32,
        tsval: p.ts.map_or(0, |t| t.0),
        tsecr: p.ts.map_or(0, |t| t.1),
        win: p.win,
        urg: p.urg,
        flags: p.flags,
        has_ts: p.ts.is_some().into(),
        ecn: p.ecn,
        ..Seg::default()
    }
}

/// The packet as edited by rewrite.h.
fn edited(p: &Packet, e: &Edit) -> Packet {
    let clamp = |v: u32| {
        let v = if tcp::before(v, e.sack_lo) { e.sack_lo } else { v };
        let v = if tcp::after(v, e.sack_hi) { e.sack_hi } else { v };
        v.wrapping_add(e.sack_add)
    };
    let (ecn, flags) = marks::edited(p, e);
    Packet {
        seq: e.seq,
        ack: e.ack,
        flags,
        ecn,
        win: e.win,
        urg: e.urg,
        ts: (e.stamp != 0 || (p.ts.is_some() && e.strip_ts == 0)).then_some((e.tsval, e.tsecr)),
        sack: if e.strip_sack != 0 { Vec::new() } else { p.sack.iter().map(|&(a, b)| (clamp(a), clamp(b))).collect() },
        data: p.data[..(e.keep as usize).min(p.data.len())].to_vec(),
    }
}
