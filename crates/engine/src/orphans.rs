//! Flows of a process that is gone. What was spliced goes on in the kernel; the next process watches over its end and clears
//! its entries away. What was not spliced died with its sockets, whose last segments still need the entries for a while.

use crate::{
    FlowState, FlowStatus,
    lingering::LINGER,
    splicer::{Inner, lock, stages},
};
use longsplice_datapath::{Datapath, LegFlags, OpenError, PathFlags, PathView, SwitchError, Tuple};
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
/// An orphan without a segment for this long is forgotten; its policy is not known any more.
const IDLE: Duration = Duration::from_secs(2 * 3600);

/// One of them, live.
pub(crate) struct Orphan {
    pub id: u64,
    client: Tuple,
    server: Tuple,
    since: Instant,
    /// Changes with every segment, and when it last did.
    sign: ([(u32, u32, u8); 2], Instant),
    bytes: [u64; 2],
}

/// What a look finds.
#[derive(PartialEq, Eq)]
enum Found {
    Live,
    /// Ended by both hosts, or reset: its entries linger.
    Over,
    /// Idle for too long, or removed.
    Gone,
}

/// Has the flow of these entries ended?
fn is_over([a, b]: &[PathView; 2]) -> bool {
    (a.flags | b.flags) & PathFlags::DEAD != 0 || a.flags & b.flags & PathFlags::FIN_ACKED != 0
}

impl Orphan {
    fn new(id: u64, [t, other]: [Tuple; 2]) -> Orphan {
        // our side of a client's connection is a port that we listened on: the smaller one, as far as one can tell
        let (client, server) = if t.local.port() <= other.local.port() { (t, other) } else { (other, t) };
        let now = Instant::now();
        Orphan { id, client, server, since: now, sign: ([(0, 0, 0); 2], now), bytes: [0; 2] }
    }

    pub fn status(&self) -> FlowStatus {
        FlowStatus {
            id: self.id,
            protocol: "recovered".into(),
            client: self.client.remote,
            server: self.server.remote,
            target: self.server.remote.to_string(),
            user: None,
            state: FlowState::Released,
            stages: stages(FlowState::Released, "recovered"),
            bytes_up: self.bytes[0],
            bytes_down: self.bytes[1],
            age_ms: self.since.elapsed().as_millis() as u64,
            refusal: None,
        }
    }

    fn look(&mut self, d: &Datapath) -> Found {
        let Some(paths) = d.paths_of([&self.client, &self.server]) else { return Found::Gone };
        if is_over(&paths) {
            return Found::Over;
        }
        if let Ok(at) = d.look(&self.client, &self.server) {
            self.bytes = at.end;
        }
        let sign = paths.map(|p| (p.end, p.max_ack, p.seen));
        if sign != self.sign.0 {
            self.sign = (sign, Instant::now());
        }
        if self.sign.1.elapsed() < IDLE { Found::Live } else { Found::Gone }
    }
}

/// Takes over what is pinned, and starts to watch it.
pub(crate) fn adopt(inner: &Arc<Inner>) -> Result<(), OpenError> {
    let Some(d) = &inner.datapath else { return Ok(()) };
    let legs = d.legs();
    // whoever read the copies of what they forward is gone; first of all, for a commit goes by the leg
    let tapped = legs.iter().filter(|(_, leg)| leg.flags & LegFlags::TAP != 0).map(|(t, _)| *t);
    let tapped = tapped.chain(d.paths().into_iter().filter(|(_, path)| path.tapped).map(|(t, _)| t));
    for t in tapped.collect::<HashSet<_>>() {
        d.untap(&t).map_err(|source| OpenError::Kernel { what: "end of a tap", source })?;
    }
    for (t, leg) in legs {
        // died between the end of the drain and the commit; of what is committed, the record is stale
        if let Some(peer) = leg.peer
            && leg.flags & LegFlags::SPLICED == 0
            && leg.phase_in == 2
            && leg.phase_out == 2
        {
            match d.look(&t, &peer).and_then(|at| d.commit(&t, &peer, &at, [false; 2])) {
                Ok(_) | Err(SwitchError::Busy) => {}
                Err(error) => tracing::warn!(leg = ?t, %error, "a flow of an earlier process could not be committed"),
            }
        }
    }
    let (mut known, mut live, mut over, mut dead) = (HashSet::new(), 0, Vec::new(), Vec::new());
    for (t, path) in d.paths() {
        if known.contains(&t) {
            continue;
        }
        let other = d.other_leg(&t).filter(|_| path.flags & PathFlags::SPLICED != 0);
        let Some(other) = other else {
            dead.push(t);
            continue;
        };
        known.extend([t, other]);
        match d.paths_of([&t, &other]) {
            Some(paths) if is_over(&paths) => over.push((silence(&paths), t, other)),
            _ => {
                live += 1;
                let id = inner.next_id.fetch_add(1, Ordering::Relaxed);
                lock(&inner.orphans).insert(id, Orphan::new(id, [t, other]));
            }
        }
    }
    dead.retain(|t| !known.contains(t));
    if live + over.len() + dead.len() == 0 {
        return Ok(());
    }
    tracing::info!(spliced = live, over = over.len(), dead = dead.len(), "took over from an earlier process");
    // they linger on, from when they ended
    over.sort_by_key(|(silence, ..)| Reverse(*silence));
    let now = Instant::now();
    for (silence, t, other) in over {
        inner.lingering.add_since(now.checked_sub(silence).unwrap_or(now), t, Some(other));
    }
    let weak = Arc::downgrade(inner);
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

fn watch(weak: &Weak<Inner>, dead: Vec<Tuple>) {
    let began = Instant::now();
    let mut dead = Some(dead);
    while let Some(inner) = weak.upgrade() {
        let (Some(d), false) = (&inner.datapath, inner.stopping.load(Ordering::Relaxed)) else { return };
        if began.elapsed() >= LINGER {
            for t in dead.take().unwrap_or_default() {
                if d.leg(&t).is_none_or(|l| u128::from(l.seen) < now_ns().saturating_sub(LINGER.as_nanos())) {
                    d.forget(&t);
                }
            }
        }
        look_at_all(&inner, d);
        if dead.is_none() && lock(&inner.orphans).is_empty() {
            return;
        }
        drop(inner);
        std::thread::sleep(LOOK);
    }
}

/// A page at a time, and no faster than a million in two minutes: lists and packets have the right of way.
fn look_at_all(inner: &Inner, d: &Datapath) {
    const PAGE: usize = 100;
    let mut last = 0;
    loop {
        let mut orphans = lock(&inner.orphans);
        let page = orphans.range_mut((Bound::Excluded(last), Bound::Unbounded)).take(PAGE);
        let found: Vec<_> = page.map(|(id, o)| (*id, o.look(d))).collect();
        let Some((end, _)) = found.last() else { return };
        last = *end;
        let ended = found.into_iter().filter(|(_, found)| *found != Found::Live);
        let ended: Vec<_> = ended.filter_map(|(id, found)| Some((orphans.remove(&id)?, found))).collect();
        drop(orphans);
        for (o, found) in ended {
            match found {
                Found::Over => inner.lingering.add(o.client, Some(o.server)),
                _ => d.forget_flow([&o.client, &o.server]),
            }
        }
        std::thread::sleep(PACE);
    }
}

/// CLOCK_MONOTONIC, as the data path's time stamps.
fn now_ns() -> u128 {
    longsplice_datapath::monotonic().as_nanos()
}
