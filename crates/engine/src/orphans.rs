//! Flows of a process that is gone. What was spliced goes on in the kernel; the next process watches over its end and clears
//! its entries away. What was not spliced died with its sockets, whose last segments still need the entries for a while.

use crate::{
    FlowState, FlowStatus,
    lingering::LINGER,
    splicer::{Inner, lock, stages},
};
use longsplice_datapath::{Datapath, LegFlags, OpenError, PathFlags, SwitchError, Tuple};
use std::{
    collections::HashSet,
    sync::{Arc, Weak, atomic::Ordering},
    time::{Duration, Instant},
};

/// How often orphans are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Between two pages of them.
const PACE: Duration = Duration::from_millis(10);
/// An orphan without a segment for this long is forgotten; its policy is not known any more.
const IDLE: Duration = Duration::from_secs(2 * 3600);

/// One of them.
pub(crate) struct Orphan {
    pub id: u64,
    client: Tuple,
    server: Tuple,
    since: Instant,
    /// Changes with every segment, and when it last did.
    sign: ([(u32, u32, u8); 2], Instant),
    ended: Option<Instant>,
    bytes: [u64; 2],
}

impl Orphan {
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

    /// False: forget it.
    fn look(&mut self, d: &Datapath) -> bool {
        let Some([pc, ps]) = d.paths_of([&self.client, &self.server]) else { return false };
        let over = (pc.flags | ps.flags) & PathFlags::DEAD != 0 || pc.flags & ps.flags & PathFlags::FIN_ACKED != 0;
        if over && self.ended.is_none() {
            self.ended = Some(Instant::now());
        }
        if let Ok(at) = d.look(&self.client, &self.server) {
            self.bytes = at.end;
        }
        let sign = [pc, ps].map(|p| (p.end, p.max_ack, p.seen));
        if sign != self.sign.0 {
            self.sign = (sign, Instant::now());
        }
        self.ended.is_none_or(|t| t.elapsed() < LINGER) && self.sign.1.elapsed() < IDLE
    }
}

/// Takes over what is pinned, and starts to watch it.
pub(crate) fn adopt(inner: &Arc<Inner>) -> Result<(), OpenError> {
    let Some(d) = &inner.datapath else { return Ok(()) };
    let mut known = HashSet::new();
    let legs = d.legs();
    // whoever read the copies of what they forward is gone; first of all, for a commit goes by the leg
    let tapped = legs.iter().filter(|(_, leg)| leg.flags & LegFlags::TAP != 0).map(|(t, _)| *t);
    let tapped = tapped.chain(d.paths().into_iter().filter(|(_, path)| path.tapped).map(|(t, _)| t));
    for t in tapped.collect::<HashSet<_>>() {
        d.untap(&t).map_err(|source| OpenError::Kernel { what: "end of a tap", source })?;
    }
    for (t, leg) in legs {
        // died between the end of the drain and the commit
        if let Some(peer) = leg.peer
            && leg.phase_in == 2
            && leg.phase_out == 2
        {
            match d.look(&t, &peer).and_then(|at| d.commit(&t, &peer, &at, [false; 2])) {
                Ok(_) | Err(SwitchError::Busy) => {}
                Err(error) => tracing::warn!(leg = ?t, %error, "a flow of an earlier process could not be committed"),
            }
        }
    }
    let (mut orphans, mut dead) = (Vec::new(), Vec::new());
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
        // our side of a client's connection is a port that we listened on: the smaller one, as far as one can tell
        let (client, server) = if t.local.port() <= other.local.port() { (t, other) } else { (other, t) };
        orphans.push(Orphan {
            id: inner.next_id.fetch_add(1, Ordering::Relaxed),
            client,
            server,
            since: Instant::now(),
            sign: ([(0, 0, 0); 2], Instant::now()),
            ended: None,
            bytes: [0; 2],
        });
    }
    dead.retain(|t| !known.contains(t));
    if orphans.is_empty() && dead.is_empty() {
        return Ok(());
    }
    tracing::info!(spliced = orphans.len(), dead = dead.len(), "took over from an earlier process");
    *lock(&inner.orphans) = orphans;
    let weak = Arc::downgrade(inner);
    std::thread::Builder::new()
        .name("orphans".into())
        .spawn(move || watch(&weak, dead))
        .map(drop)
        .map_err(|source| OpenError::Kernel { what: "orphan thread", source })
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
        let from = orphans.partition_point(|o| o.id <= last);
        let to = orphans.len().min(from + PAGE);
        let Some(end) = orphans[from..to].last() else { return };
        last = end.id;
        let over: Vec<Orphan> = orphans.extract_if(from..to, |o| !o.look(d)).collect();
        drop(orphans);
        for o in over {
            d.forget(&o.client);
            d.forget(&o.server);
        }
        std::thread::sleep(PACE);
    }
}

/// CLOCK_MONOTONIC, as the data path's time stamps.
fn now_ns() -> u128 {
    longsplice_datapath::monotonic().as_nanos()
}
