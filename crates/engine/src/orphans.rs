//! Flows of a process that is gone. What was spliced goes on in the kernel; the next process watches over its end and clears
//! its entries away. What was not spliced died with its sockets, whose last segments still need the entries for a while.

use crate::{
    FlowState, FlowStatus,
    lingering::LINGER,
    splicer::{Inner, lock, stages},
};
use longsplice_datapath::{
    Datapath, IdleEntry, LegFlags, LegView, OpenError, PathFlags, PathView, SwitchError, Switched, Tuple,
};
use std::{
    cmp::Reverse,
    collections::HashSet,
    ops::Bound,
    sync::{Arc, Weak, atomic::Ordering},
    time::{Duration, Instant},
};

/// How often orphans are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Between two pages of them.
const PACE: Duration = Duration::from_millis(10);
/// An orphan without a byte for this long is ended with a reset; its policy is not known any more.
const IDLE: Duration = Duration::from_secs(2 * 3600);

/// One of them, as the last look has found it.
pub(crate) struct Orphan {
    pub id: u64,
    client: Tuple,
    server: Tuple,
    since: Instant,
    /// Changes with every byte, and when it last did.
    sign: ([(u16, u32, u32); 2], Instant),
    bytes: [u64; 2],
    state: FlowState,
}

/// What a look finds.
#[derive(PartialEq, Eq)]
enum Found {
    /// Forwarded, or on the way there or back.
    Live,
    /// Ended by both hosts, or reset: its entries linger.
    Over,
    /// In control mode, without sockets.
    Deserted,
    /// Idle for too long, or removed.
    Gone,
}

/// Has the flow of these entries ended?
fn is_over([a, b]: &[PathView; 2]) -> bool {
    (a.flags | b.flags) & PathFlags::DEAD != 0 || a.flags & b.flags & PathFlags::FIN_ACKED != 0
}

/// Has nothing come for so long that its last segments need the leg's entries no more?
fn is_silent(d: &Datapath, leg: &Tuple) -> bool {
    d.leg(leg).is_none_or(|l| u128::from(l.seen) < now_ns().saturating_sub(LINGER.as_nanos()))
}

impl Orphan {
    fn new(id: u64, [t, other]: [Tuple; 2]) -> Orphan {
        // our side of a client's connection is a port that we listened on: the smaller one, as far as one can tell
        let (client, server) = if t.local.port() <= other.local.port() { (t, other) } else { (other, t) };
        let now = Instant::now();
        let state = FlowState::Released;
        Orphan { id, client, server, since: now, sign: ([(0, 0, 0); 2], now), bytes: [0; 2], state }
    }

    fn legs(&self) -> [&Tuple; 2] {
        [&self.client, &self.server]
    }

    pub fn status(&self) -> FlowStatus {
        FlowStatus {
            id: self.id,
            protocol: "recovered".into(),
            client: self.client.remote,
            server: self.server.remote,
            target: self.server.remote.to_string(),
            user: None,
            state: self.state,
            stages: stages(self.state, "recovered"),
            bytes_up: self.bytes[0],
            bytes_down: self.bytes[1],
            age_ms: self.since.elapsed().as_millis() as u64,
            refusal: None,
        }
    }

    fn look(&mut self, d: &Datapath) -> Found {
        let Some(paths) = d.paths_of(self.legs()) else { return Found::Gone };
        if is_over(&paths) {
            return Found::Over;
        }
        let at = d.look(&self.client, &self.server).ok();
        self.bytes = at.map_or(self.bytes, |at| at.end);
        if paths.iter().any(|p| p.flags & PathFlags::SPLICED == 0) {
            return at.map_or(Found::Gone, |at| self.settle(d, &at));
        }
        self.state = FlowState::Released;
        let sign = paths.map(|p| (p.wraps, p.end, p.max_ack));
        if sign != self.sign.0 {
            self.sign = (sign, Instant::now());
        }
        if self.sign.1.elapsed() < IDLE { Found::Live } else { Found::Gone }
    }

    /// Not in forwarding mode: its process died in a switch, or a limit has taken it back since.
    fn settle(&mut self, d: &Datapath, at: &Switched) -> Found {
        const LOCAL: u8 = 0;
        const UNDER_WAY: [u8; 2] = [1, 3]; // to forwarding, to local
        if (at.flags[0] | at.flags[1]) & LegFlags::RESET != 0 || at.phase == [LOCAL; 2] {
            return Found::Deserted;
        }
        self.state = FlowState::Draining;
        if at.is_drained() {
            let legs = self.legs();
            return match d.commit(legs, at, at.most(legs, [None; 2]), [false; 2]) {
                Ok(_) => {
                    self.state = FlowState::Released;
                    Found::Live
                }
                Err(SwitchError::Busy) => Found::Live, // taken back just now
                Err(error) => {
                    tracing::warn!(leg = ?self.client, %error, "a flow of an earlier process could not be committed");
                    Found::Deserted
                }
            };
        }
        // its sockets are the kernel's, and drain on
        let is_under_way = at.phase.iter().any(|phase| UNDER_WAY.contains(phase));
        if is_under_way && !self.legs().iter().all(|t| is_silent(d, t)) {
            return Found::Live;
        }
        let back = d.unsplice(&self.client, &self.server);
        tracing::debug!(leg = ?self.client, ?back, "the drain of an earlier process has stopped");
        Found::Deserted
    }
}

/// The flow that a leg of an earlier process belongs to, if any of its bytes are forwarded, or may be: the other leg.
fn other_of(d: &Datapath, t: &Tuple, path: &PathView) -> Option<Tuple> {
    if path.flags & PathFlags::SPLICED != 0 {
        return d.other_leg(t);
    }
    let is_switching = |l: &LegView| l.phase_in | l.phase_out != 0;
    let paired = d.leg(t).and_then(|l| l.peer.map(|other| (l, other)));
    if let Some((leg, other)) = paired {
        let back = d.leg(&other).filter(|l| l.peer == Some(*t))?;
        return (is_switching(&leg) || is_switching(&back)).then_some(other);
    }
    // died while it made sockets for a released flow
    d.other_leg(t).filter(|other| d.resume([t, other]))
}

/// Takes over what is pinned, and starts to watch it.
pub(crate) fn adopt(inner: &Arc<Inner>) -> Result<(), OpenError> {
    let Some(d) = &inner.datapath else { return Ok(()) };
    // whoever read the copies of what they forward is gone; first of all, for a commit goes by the leg
    let legs = d.legs();
    let tapped = legs.iter().filter(|(_, leg)| leg.flags & LegFlags::TAP != 0).map(|(t, _)| *t);
    let tapped = tapped.chain(d.paths().into_iter().filter(|(_, path)| path.tapped).map(|(t, _)| t));
    for t in tapped.collect::<HashSet<_>>() {
        d.untap(&t).map_err(|source| OpenError::Kernel { what: "end of a tap", source })?;
    }
    let (mut known, mut spliced, mut draining, mut over, mut dead) = (HashSet::new(), 0, 0, Vec::new(), Vec::new());
    for (t, path) in d.paths() {
        if known.contains(&t) {
            continue;
        }
        let Some(other) = other_of(d, &t, &path) else {
            dead.push(t);
            continue;
        };
        known.extend([t, other]);
        let mut orphan = Orphan::new(inner.next_id.fetch_add(1, Ordering::Relaxed), [t, other]);
        match orphan.look(d) {
            Found::Live => {
                *(if orphan.state == FlowState::Released { &mut spliced } else { &mut draining }) += 1;
                lock(&inner.orphans).insert(orphan.id, orphan);
            }
            Found::Over => over.push((d.paths_of([&t, &other]).map_or(Duration::ZERO, |p| silence(&p)), t, other)),
            Found::Gone if d.paths_of([&t, &other]).is_none() => d.forget_flow([&t, &other]), // half a flow goes nowhere
            Found::Deserted | Found::Gone => dead.extend([t, other]),
        }
    }
    if spliced + draining + over.len() + dead.len() == 0 {
        return Ok(());
    }
    tracing::info!(spliced, over = over.len(), draining, dead = dead.len(), "took over from an earlier process");
    // they linger on, from when they ended
    over.sort_by_key(|(silence, ..)| Reverse(*silence));
    let now = Instant::now();
    for (silence, t, other) in over {
        inner.lingering.add_since(now.checked_sub(silence).unwrap_or(now), t, Some(other));
    }
    let (weak, dead) = (Arc::downgrade(inner), dead.iter().map(|t| d.idle_entry(t)).collect());
    std::thread::Builder::new()
        .name("orphans".into())
        .spawn(move || watch(&weak, dead))
        .map(drop)
        .map_err(|source| OpenError::Kernel { what: "orphan thread", source })
}

/// How long nothing has come, at least: entries note the time in coarse units, modulo 256.
fn silence(paths: &[PathView; 2]) -> Duration {
    let now = now_ns() >> 33;
    let units = paths.iter().map(|p| (now as u8).wrapping_sub(p.seen)).min().unwrap_or(0);
    Duration::from_nanos(u64::from(units.saturating_sub(1)) << 33)
}

fn watch(weak: &Weak<Inner>, dead: Vec<IdleEntry>) {
    // connections that died with their sockets, and when; another may have the addresses by the end of that
    let mut dead: Vec<_> = dead.into_iter().map(|entry| (Instant::now(), entry)).collect();
    let mut told = 0;
    while let Some(inner) = weak.upgrade() {
        let (Some(d), false) = (&inner.datapath, inner.stopping.load(Ordering::Relaxed)) else { return };
        for (_, entry) in &dead[told..] {
            if let Err(error) = d.reset_deserted(&entry.leg) {
                tracing::warn!(leg = ?entry.leg, %error, "its host was not told that its connection is over");
            }
        }
        dead.retain(|(since, entry)| {
            let stays = since.elapsed() < LINGER || !is_silent(d, &entry.leg);
            if !stays {
                d.sweep(entry);
            }
            stays
        });
        told = dead.len();
        let now = Instant::now();
        dead.extend(look_at_all(&inner, d).iter().map(|t| (now, d.idle_entry(t))));
        if dead.is_empty() && lock(&inner.orphans).is_empty() {
            return;
        }
        drop(inner);
        if dead.len() == told {
            std::thread::sleep(LOOK);
        }
    }
}

/// A page at a time, and no faster than a million in two minutes: lists and packets have the right of way. Legs of flows that are
/// in control mode, without sockets.
fn look_at_all(inner: &Inner, d: &Datapath) -> Vec<Tuple> {
    const PAGE: usize = 100;
    let (mut last, mut deserted) = (0, Vec::new());
    loop {
        let mut orphans = lock(&inner.orphans);
        let page = orphans.range_mut((Bound::Excluded(last), Bound::Unbounded)).take(PAGE);
        let found: Vec<_> = page.map(|(id, o)| (*id, o.look(d))).collect();
        let Some((end, _)) = found.last() else { return deserted };
        last = *end;
        let ended = found.into_iter().filter(|(_, found)| *found != Found::Live);
        let ended: Vec<_> = ended.filter_map(|(id, found)| Some((orphans.remove(&id)?, found))).collect();
        drop(orphans);
        for (o, found) in ended {
            match found {
                Found::Over => inner.lingering.add(o.client, Some(o.server)),
                Found::Deserted => deserted.extend([o.client, o.server]),
                _ => {
                    if let Err(error) = d.reset_forwarded(o.legs()) {
                        tracing::warn!(legs = ?o.legs(), %error, "a host was not told that its connection is over");
                    }
                    d.forget_flow(o.legs());
                }
            }
        }
        std::thread::sleep(PACE);
    }
}

/// CLOCK_MONOTONIC, as the data path's time stamps.
fn now_ns() -> u128 {
    longsplice_datapath::monotonic().as_nanos()
}
