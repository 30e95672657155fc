//! Flows of an earlier process. Flows that were spliced go on in the kernel; this process watches for their end and removes their
//! entries. Connections that were not spliced died with their sockets, whose last segments still need the entries for a while.

use crate::{
    core::orphan::Found,
    engine::{
        Engine,
        flow::Stop,
        orphan::{Orphan, is_silent},
        record::{FlowRecord, Left},
    },
    lingering::LINGER,
    sync::lock,
    types::{EndReason, FlowState},
};
use longsplice_datapath::{
    Claim, Connection, Datapath, IdleEntry, LegFlags, OpenError, Pair, PathFlags, PathView, Sockets, Tuple, is_held,
};
use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet, hash_map::Entry},
    mem,
    ops::Bound,
    sync::{Arc, Weak, mpsc::channel},
    time::{Duration, Instant},
};

/// Interval between two looks at the orphans.
const LOOK: Duration = Duration::from_secs(1);
/// Pause between two pages of orphans.
const PACE: Duration = Duration::from_millis(10);

/// A connection that died with its socket. By the time its entries are removed, another connection may have its addresses.
struct Dead {
    entry: IdleEntry,
    since: Instant,
    /// When to send the next reset to its host.
    next: Instant,
    /// Time until the reset after that. Doubles each time.
    pause: Duration,
    /// The host has been informed.
    told: bool,
    warned: bool,
}

impl Dead {
    fn now(entry: IdleEntry) -> Dead {
        let now = Instant::now();
        Dead { entry, since: now, next: now, pause: LOOK, told: false, warned: false }
    }

    /// A connection whose process lives. Its entries are removed once its socket is gone; until then, its host hears nothing of us.
    fn foreign(entry: IdleEntry) -> Dead {
        Dead { told: true, ..Dead::now(entry) }
    }

    /// Sends a reset to the host. It is repeated, because a route may be missing now, and a reset may be lost.
    fn tell(&mut self, d: &Datapath) {
        self.next = Instant::now() + self.pause;
        let leg = &self.entry.leg;
        let told = d.reset_deserted(self.entry.connection());
        match told {
            Ok(may_not_know) => (self.told, self.pause) = (!may_not_know, 2 * self.pause),
            Err(_) => self.pause = LOOK,
        }
        if let (Err(error), false) = (told, mem::replace(&mut self.warned, true)) {
            tracing::warn!(?leg, %error, "cannot reset a host yet: it does not know that its connection is over");
        }
    }
}

/// Returns whether the kernel is still closing the connection's socket. This may take minutes, and its segments need the entries.
fn is_closing(sockets: Option<&mut Sockets>, d: &Datapath, entry: &IdleEntry) -> bool {
    let claims = sockets.map(|sockets| sockets.claims(&[(entry.leg, entry.device)]));
    matches!(claims, Some(Ok(claims)) if claims[0] == Claim::Yes) && d.idle_entry(&entry.leg).is(entry)
}

/// Returns the other leg of an earlier process's flow, if any of its bytes are or may be forwarded.
fn other_of(d: &Datapath, t: &Tuple, path: &PathView) -> Option<Tuple> {
    if path.flags & PathFlags::SPLICED != 0 {
        return d.other_leg(t);
    }
    let paired = d.leg(t).and_then(|l| l.peer.map(|other| (l, other)));
    if let Some((leg, other)) = paired {
        let back = d.leg(&other).filter(|l| l.peer == Some(*t))?;
        return (leg.is_switching() || back.is_switching()).then_some(other);
    }
    // the process died while it created sockets for a released flow
    d.other_leg(t).filter(|other| d.resume([t, other]))
}

/// Returns the legs whose sockets a process holds: it has handed the data path over, and goes on with these connections.
fn held<'a>(entries: impl Iterator<Item = &'a (Tuple, PathView)>) -> Vec<Tuple> {
    let Ok(mut sockets) = Sockets::open() else { return Vec::new() };
    let (entries, mut held) = (entries.map(|(t, _)| (*t, 0)).collect::<Vec<_>>(), Vec::new());
    for some in entries.chunks(Sockets::AT_ONCE) {
        let Ok(claims) = sockets.claims(some) else { break };
        let claimed = some.iter().zip(claims).filter(|(_, claim)| *claim == Claim::Yes);
        held.extend(claimed.map(|((t, _), _)| *t).filter(is_held));
    }
    held
}

/// How long startup waits for the adoption of flows. Usually this is enough, and all flows are listed from the beginning.
const ADOPTION: Duration = Duration::from_millis(500);

/// Adopts the pinned flows and starts to watch them. Flows without leg records are only forwarded, and there
/// may be a million of them, so those that are not found at once are adopted while others are already served. `handed`: legs that
/// this process goes on with itself.
pub(crate) fn adopt(engine: &Arc<Engine>, idle: Duration, handed: &[Tuple]) -> Result<(), OpenError> {
    let Some(d) = engine.datapath() else { return Ok(()) };
    let legs = d.legs();
    // the process that read the copies for taps is gone; stop these first, because a commit depends on the leg's flag
    for (t, _) in legs.iter().filter(|(_, leg)| leg.flags & LegFlags::TAP != 0) {
        d.untap(t).map_err(|source| OpenError::Kernel { what: "end of a tap", source })?;
    }
    let known = handed.iter().copied().collect();
    let mut adoption = Adoption { idle, known, left: read_records(engine, d), ..Adoption::default() };
    let with_records = legs.iter().filter_map(|(t, _)| Some((*t, d.path(t)?)));
    let all: Vec<_> = with_records.chain(d.stopped_paths()).collect();
    for t in held(all.iter().filter(|(_, path)| path.flags & PathFlags::SPLICED == 0)) {
        if adoption.known.insert(t) {
            adoption.foreign.push(Dead::foreign(d.idle_entry(&t)));
        }
    }
    for (t, path) in all {
        if !adoption.known.contains(&t) {
            let other = other_of(d, &t, &path);
            adoption.known.extend([Some(t), other].into_iter().flatten());
            adoption.take(engine, d, t, other);
        }
    }
    adoption.linger(engine);
    let ((tell, told), weak) = (channel::<()>(), Arc::downgrade(engine));
    let work = move || {
        let Some(engine) = weak.upgrade() else { return };
        let foreign = mem::take(&mut adoption.foreign);
        let dead = adoption.take_forwarded(&engine).into_iter().map(Dead::now);
        let dead = dead.chain(foreign).collect();
        drop((engine, tell));
        watch(&weak, dead, idle);
    };
    let failed = |source| OpenError::Kernel { what: "orphan thread", source };
    std::thread::Builder::new().name("orphans".into()).spawn(work).map_err(failed)?;
    let _ = told.recv_timeout(ADOPTION);
    Ok(())
}

/// Reads what an earlier process has written of its flows.
fn read_records(engine: &Engine, d: &Datapath) -> HashMap<Tuple, Left> {
    let mut all: HashMap<Tuple, Left> = HashMap::new();
    for (at, contents) in d.flow_records().left() {
        let Some(record) = FlowRecord::from_bytes(&contents) else {
            d.flow_records().remove(at); // another version's
            engine.recovered.tell_unknown();
            continue;
        };
        engine.number_after(record.id);
        let new = Left { at, record };
        // It may have died while it replaced one: both are right, but one may know more.
        match all.entry(new.record.legs.client) {
            Entry::Vacant(place) => drop(place.insert(new)),
            Entry::Occupied(mut place) => {
                let old = &place.get().record;
                let knows_more = new.record.released.is_some() || (old.is_draining && !new.record.is_draining);
                let old = if knows_more { place.insert(new) } else { new };
                d.flow_records().remove(old.at);
            }
        }
    }
    all
}

/// What was found of an earlier process.
#[derive(Default)]
struct Adoption {
    idle: Duration,
    /// What it has written of flows that were not found yet, by the legs of their clients.
    left: HashMap<Tuple, Left>,
    known: HashSet<Tuple>,
    spliced: usize,
    draining: usize,
    /// Flows that have ended, and whose end was told: the time of silence so far, at least, and both legs.
    over: Vec<(Duration, Pair<Connection>)>,
    lingers: usize,
    dead: Vec<Tuple>,
    /// Legs of a process that lives.
    foreign: Vec<Dead>,
}

impl Adoption {
    fn take(&mut self, engine: &Engine, d: &Datapath, t: Tuple, other: Option<Tuple>) {
        let Some(other) = other else {
            self.dead.push(t);
            return;
        };
        let mut orphan = match self.left_of(d, [t, other]) {
            Some(left) => Orphan::of(left),
            None => Orphan::new(engine.next_id(), [t, other]),
        };
        match orphan.look(d, self.idle) {
            // the end of one that has a record was not told yet
            found if found == Found::Live || (orphan.left.is_some() && matches!(found, Found::Over(_))) => {
                *(if orphan.state() == FlowState::Released { &mut self.spliced } else { &mut self.draining }) += 1;
                lock(&engine.orphans).insert(orphan.id, orphan);
            }
            Found::Live => unreachable!("matched above"),
            Found::Over(_) => self.over.push((
                d.paths_of(orphan.connections()).map_or(Duration::ZERO, |p| p.client.silence().min(p.server.silence())),
                orphan.connections(),
            )),
            Found::Gone(_) if d.paths_of(orphan.legs.each_ref()).is_none() => {
                clear_half(engine, d, [t, other].map(|t| d.idle_entry(&t).connection()))
            }
            Found::Deserted | Found::Gone(_) => {
                tell_end(engine, d, &orphan, EndReason::Lost);
                self.dead.extend([t, other]);
            }
        }
    }

    /// Returns what was written of the flow of these legs.
    fn left_of(&mut self, d: &Datapath, legs: [Tuple; 2]) -> Option<Left> {
        let (client, other) = if self.left.contains_key(&legs[0]) { (legs[0], legs[1]) } else { (legs[1], legs[0]) };
        let record = &self.left.get(&client)?.record;
        let is = record.legs.server == other
            && record.connections().iter().all(|c| d.generation(&c.leg) == Some(c.generation));
        is.then(|| self.left.remove(&client)).flatten()
    }

    /// Lets flows that have ended linger on, counted from their end.
    fn linger(&mut self, engine: &Engine) {
        self.lingers = self.over.len();
        self.over.sort_by_key(|(silence, ..)| Reverse(*silence));
        let now = Instant::now();
        for (silence, Pair { client, server }) in self.over.drain(..) {
            engine.lingering.add_since(now.checked_sub(silence).unwrap_or(now), client, Some(server));
        }
    }

    /// Adopts the flows without leg records, and returns the connections that died with
    /// the earlier process. Connections of this process may be among what is found.
    fn take_forwarded(mut self, engine: &Engine) -> Vec<IdleEntry> {
        let Some(d) = engine.datapath() else { return Vec::new() };
        let mut dead: Vec<_> = mem::take(&mut self.dead).iter().map(|t| d.idle_entry(t)).collect();
        let mut over = self.lingers;
        let is_ours = |leg: &Tuple| engine.is_routed(leg);
        let walked = d.each_forwarded(|t, path| {
            if self.known.contains(t) || is_ours(t) || d.leg(t).is_some() {
                return true;
            }
            if path.tapped
                && let Err(error) = d.untap(t)
            {
                tracing::warn!(leg = ?t, %error, "cannot stop a tap: the data path still copies its data");
            }
            // the other leg is found later, if it is there
            let other = d
                .other_leg(t)
                .filter(|other| Orphan::new(0, [*t, *other]).legs.client == *t || d.path(other).is_none());
            if let Some(other) = other.filter(|other| !is_ours(other)) {
                self.take(engine, d, *t, Some(other));
                // their end may be assumed too late, so their slots rest for longer
                for (_, Pair { client, server }) in self.over.drain(..) {
                    over += 1;
                    engine.lingering.add(client, Some(server));
                }
            }
            !engine.is_closing()
        });
        if let Err(error) = walked {
            tracing::warn!(%error, "path entries cannot be read: flows of an earlier process may not be listed");
        }
        dead.extend(self.dead.iter().map(|t| d.idle_entry(t)));
        if !engine.is_closing() {
            // their entries are gone: nobody knows how they have ended
            for left in self.left.drain().map(|(_, left)| left) {
                tell_end(engine, d, &Orphan::of(left), EndReason::Lost);
            }
        }
        engine.take_up();
        let Adoption { spliced, draining, .. } = self;
        if spliced + draining + over + dead.len() > 0 {
            tracing::info!(spliced, over, draining, dead = dead.len(), "took over from an earlier process");
        }
        dead
    }
}

/// Tells the end of a flow of an earlier process, and removes its record before, so that no other process tells it again.
fn tell_end(engine: &Engine, d: &Datapath, orphan: &Orphan, how: EndReason) {
    if let Some(left) = orphan.left.as_ref().filter(|_| how != EndReason::Left) {
        d.flow_records().remove(left.at);
    }
    // of one without a record, the earlier process has told the end
    if orphan.left.is_some() || engine.recovered.tells_unknown() {
        engine.recovered.end(orphan.ended(how), orphan.known().as_ref());
    }
}

/// Ends what is left of half a flow: its host is reset when it sends something. Its addresses may belong to another connection by
/// now, which stays.
fn clear_half(engine: &Engine, d: &Datapath, [a, b]: [Connection; 2]) {
    for (connection, other) in [(a, b), (b, a)] {
        let t = &connection.leg;
        let is_half = d.path(t).is_some_and(|p| p.flags & PathFlags::SPLICED != 0) && d.other_leg(t) == Some(other.leg);
        if !is_half {
            d.forget_ended(&connection, None);
        } else if let Err(error) = d.mark_dead(&connection) {
            tracing::warn!(leg = ?t, %error, "cannot end half a flow: its host does not know that its connection is over");
        } else {
            engine.lingering.add(connection, None);
        }
    }
}

fn watch(weak: &Weak<Engine>, mut dead: Vec<Dead>, idle: Duration) {
    let mut sockets = Sockets::open().ok();
    while let Some(engine) = weak.upgrade() {
        let (Some(d), false) = (engine.datapath(), engine.is_closing()) else { return };
        let now = Instant::now();
        dead.iter_mut().filter(|dead| !dead.told && dead.next <= now).for_each(|dead| dead.tell(d));
        dead.retain_mut(|dead| {
            let stays = dead.since.elapsed() < LINGER
                || !is_silent(d, &dead.entry.leg)
                || is_closing(sockets.as_mut(), d, &dead.entry);
            if !stays {
                dead.tell(d); // once more: it, or the last segment of its socket, may have been lost
                d.sweep(&dead.entry);
            }
            stays
        });
        let known = dead.len();
        dead.extend(look_at_all(&engine, d, idle).iter().map(|t| Dead::now(d.idle_entry(t))));
        if dead.is_empty() && lock(&engine.orphans).is_empty() {
            return;
        }
        drop(engine);
        if dead.len() == known {
            std::thread::sleep(LOOK);
        }
    }
}

/// Looks at all orphans, a page at a time, at most a million in two minutes: lists and packets
/// take precedence. Returns the legs of flows that are in control mode without sockets.
fn look_at_all(engine: &Engine, d: &Datapath, idle: Duration) -> Vec<Tuple> {
    const PAGE: usize = 100;
    let (mut last, mut deserted) = (0, Vec::new());
    loop {
        let mut orphans = lock(&engine.orphans);
        let page = orphans.range_mut((Bound::Excluded(last), Bound::Unbounded)).take(PAGE);
        let found: Vec<_> = page.map(|(id, o)| (*id, o.look(d, idle))).collect();
        let Some((end, _)) = found.last() else { return deserted };
        last = *end;
        let ended = found.into_iter().filter(|(_, found)| *found != Found::Live);
        let ended: Vec<_> = ended.filter_map(|(id, found)| Some((orphans.remove(&id)?, found))).collect();
        drop(orphans);
        for (o, found) in ended {
            let how = match found {
                Found::Over(how) | Found::Gone(how) => how,
                Found::Live | Found::Deserted => EndReason::Lost,
            };
            tell_end(engine, d, &o, how);
            match found {
                Found::Over(_) => engine.lingering.add(o.connections().client, Some(o.connections().server)),
                Found::Deserted => deserted.extend(o.legs),
                _ => {
                    let legs = o.connections();
                    if engine.reset_forwarded(legs.into()) {
                        engine.lingering.add(legs.client, Some(legs.server));
                    } else {
                        clear_half(engine, d, legs.into());
                    }
                }
            }
        }
        std::thread::sleep(PACE);
    }
}

impl Engine {
    /// Records the flows of an earlier process that are still forwarded: this process does not watch them any longer.
    pub(crate) fn end_recovered(&self, stop: Stop) {
        let how = match stop {
            Stop::Go => return,
            Stop::Reset => EndReason::Stopped,
            Stop::Leave | Stop::HandOver => EndReason::Left,
        };
        let Some(d) = self.datapath() else { return };
        for mut orphan in mem::take(&mut *lock(&self.orphans)).into_values() {
            orphan.count(d);
            tell_end(self, d, &orphan, how);
        }
    }

    /// Resets both hosts of a flow of an earlier process. Returns false if there is no such flow, or if it is not forwarded.
    pub fn end_orphan(&self, id: u64) -> bool {
        let (Some(d), Some(mut orphan)) = (self.datapath(), lock(&self.orphans).remove(&id)) else { return false };
        orphan.count(d);
        let legs = orphan.connections();
        if !self.reset_forwarded(legs.into()) {
            // it drains, by sockets of the kernel, or has just ended: whoever looks after it goes on
            lock(&self.orphans).insert(id, orphan);
            return false;
        }
        tell_end(self, d, &orphan, EndReason::Stopped);
        self.lingering.add(legs.client, Some(legs.server));
        true
    }

    /// Makes flows of this process of those that an earlier one has left, once there is somebody who takes them up.
    pub fn take_up(&self) {
        let (Some(d), Some(take_up)) = (self.datapath(), self.recovered.take_up()) else { return };
        let ids: Vec<u64> =
            lock(&self.orphans).iter().filter(|(_, o)| o.may_be_taken_up()).map(|(id, _)| *id).collect();
        for id in ids {
            let Some(mut orphan) = lock(&self.orphans).remove(&id) else { continue };
            match orphan.take_up(d, &*take_up, self.announcer.clone()) {
                Some((flow, begun)) => {
                    self.list_kept(flow);
                    begun();
                }
                None => drop(lock(&self.orphans).insert(id, orphan)),
            }
        }
        d.wake();
    }
}
