//! Flows while they are forwarded. No task waits for them: one thread, the keeper, holds a record of each, hears events and
//! commands, looks at every flow now and then, and brings it to its end or back into a task.
//!
//! | state | sockets | leaves by |
//! | --- | --- | --- |
//! | `Spliced` | parked | trigger, command, MTU: unsplice; both FINs acknowledged, RST, idle: end; release |
//! | `Released` | none | command, MTU: recreation, when idle; both FINs acknowledged, RST, idle: end |
//!
//! Ends are told by events; a look finds idle flows, and ends whose event was lost. Looks cost at most [`LOOKS`] per [`PACE`];
//! with more than some ten thousand flows each is looked at more rarely, a million every seven minutes. Releases wait for no looks
//! ([`Agenda`]), and come before their time where descriptors run short.

use crate::{
    FlowState, How, Refusal, Splicer, Trigger,
    agenda::Agenda,
    errand::Purpose,
    guard::Guard,
    leg::{Side, Strays},
    relay::Relay,
    splicer::{Command, Flow, Place, Stop},
    sweeper::Sweeper,
};
use longsplice_datapath::{
    Datapath, Event, EventKind, Events, LegFlags, PathFlags, Recreated, Released, SwitchError, Tuple,
};
use std::{
    sync::{Arc, MutexGuard, atomic::Ordering, mpsc},
    time::{Duration, Instant},
};

/// So many flows are looked at ...
const LOOKS: usize = 100;
/// ... in this time, at most.
const PACE: Duration = Duration::from_millis(10);
/// How often one flow is looked at: an eighth of its patience, within these.
const EVERY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(30));
/// The patience of hosts that wait for a flow to come back, if the event is lost that tells of its message's end, or of a trigger.
const PATIENCE: Duration = Duration::from_secs(8);
/// A released flow comes back in an instant in which it is idle: how often that is tried.
const TRY: Duration = Duration::from_millis(1);
/// A host that still sends segments too large so long after it was told ignores ICMP, or does not get it.
const MTU_PATIENCE: Duration = Duration::from_secs(3);
/// One that is silent about them for so long has heard: it repeats what is lost after a minute at most (RFC 6298, 2.5).
const MTU_AGAIN: Duration = Duration::from_secs(90);
/// So many flows or entries at a time, between two looks at what was said.
const PAGE: usize = 1000;
/// A flow that is never to be released is so late that all others go before it.
const NEVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// A released flow that is to be taken back is rarely without an instant when all is acknowledged. After this time it is taken back
/// all the same, and its hosts send again what was not: that costs them a timeout at worst.
const IDLE_WITHIN: Duration = Duration::from_millis(100);
/// Entries that linger are cleared away with this precision.
const SLACK: Duration = Duration::from_secs(1);

/// What the keeper is told.
pub(crate) enum Note {
    /// A flow is forwarded now.
    Kept(u64),
    Command(u64, Command),
    /// The route to one of its hosts leads by a device that nothing will be attached to.
    Elsewhere(u64),
    /// Descriptors run short.
    Room,
    /// The program stops, or the engine closes.
    Stop,
}

/// A released flow is to have sockets.
#[derive(Clone, Copy)]
struct Back {
    /// So long an instant is waited for when all is acknowledged.
    until: Instant,
    /// Afterwards it stays released, and is not taken back all the same.
    only_idle: bool,
    /// It is to stay in control mode.
    stay: bool,
}

impl Back {
    fn soon(stay: bool) -> Back {
        Back { until: Instant::now() + IDLE_WITHIN, only_idle: false, stay }
    }
}

/// What is remembered of a flow that is forwarded.
pub(crate) struct Kept {
    pub sides: [Side; 2],
    pub purpose: Purpose,
    pub stay: bool,
    pub fin_past: bool,
    /// No sockets are left.
    pub released: Option<[Released; 2]>,
    pub began: Instant,
    /// Changes with every byte, and when it last did.
    sign: ([(u16, u32, u32); 2], Instant),
    /// The next look.
    due: Instant,
    /// Segments did not fit: since when, and the last time.
    oversize: Option<[Instant; 2]>,
    /// Sockets are wanted.
    back: Option<Back>,
}

impl Kept {
    pub fn new(sides: [Side; 2], purpose: Purpose, (stay, fin_past): (bool, bool)) -> Kept {
        let now = Instant::now();
        Kept {
            sides,
            purpose,
            stay,
            fin_past,
            released: None,
            began: now,
            sign: ([(0, 0, 0); 2], now),
            due: now,
            oversize: None,
            back: None,
        }
    }
}

/// What becomes of a flow after a look.
enum Next {
    Stays,
    Ended(How),
    /// To the parked sockets.
    Unsplice,
    /// To new ones.
    Recreated(Recreated),
}

struct Keeper {
    splicer: Splicer,
    /// A look counts if it is [`Kept::due`].
    agenda: Agenda,
    /// Flows that want sockets.
    returning: Vec<u64>,
    /// No look and no try before.
    not_before: (Instant, Instant),
    guard: Guard,
    sweeper: Sweeper,
}

/// The thread: until the engine closes.
pub(crate) fn keep(splicer: Splicer, notes: &mpsc::Receiver<Note>, events: &mut Events<'_>) {
    let now = Instant::now();
    let (agenda, returning, guard, sweeper) =
        (Agenda::default(), Vec::new(), Guard::new(&splicer, now), Sweeper::new());
    let mut k = Keeper { splicer, agenda, returning, not_before: (now, now), guard, sweeper };
    while !k.splicer.inner.stopping.load(Ordering::Relaxed) {
        match events.wait(k.rest()) {
            Ok(events) => events.for_each(|event| k.route(&event)),
            Err(error) => {
                tracing::error!(%error, "cannot wait for events of the data path; flows notice by polling");
                std::thread::sleep(PACE);
            }
        }
        notes.try_iter().for_each(|note| k.hear(note));
        let now = Instant::now();
        if now >= k.not_before.1 {
            k.not_before.1 = now + TRY;
            for id in std::mem::take(&mut k.returning) {
                k.tend(id, None);
            }
        }
        if now >= k.not_before.0 {
            k.not_before.0 = now + PACE;
            k.look(now);
        }
        k.release(now);
        k.clear_away(now);
        k.guard.look(&k.splicer, now);
        k.sweep(now);
    }
}

impl Keeper {
    /// Until there is something to do but to listen.
    fn rest(&self) -> Duration {
        let now = Instant::now();
        let [look, release] = self.agenda.due();
        let look = look.map_or(SLACK, |at| until(at, self.not_before.0, now));
        let release = release.map_or(SLACK, |at| until(at, now, now));
        let back = if self.returning.is_empty() { SLACK } else { TRY };
        let sweep = self.sweeper.due().map_or(SLACK, |at| until(at, now, now));
        look.min(release).min(back).min(sweep).min(SLACK)
    }

    /// To the task that has the flow, if it has one. A flow that has just ended hears nothing any more.
    fn route(&mut self, event: &Event) {
        let Some(flow) = self.splicer.flow_of(&event.leg) else { return };
        if let Place::Task { events, .. } = &*flow.place() {
            return events.notify_one();
        }
        self.tend(flow.id, Some(Word::Event(event.kind)));
    }

    fn hear(&mut self, note: Note) {
        match note {
            Note::Kept(id) => self.tend(id, Some(Word::Kept)),
            Note::Command(id, command) => self.tend(id, Some(Word::Command(command))),
            Note::Elsewhere(id) => self.tend(id, Some(Word::Elsewhere)),
            Note::Room => {
                for _ in 0..self.splicer.inner.descriptors.begin() {
                    let Some(id) = self.agenda.soonest_release() else { return };
                    self.tend(id, Some(Word::Command(Command::Release)));
                }
            }
            Note::Stop if *self.splicer.stop_signal().borrow() == Stop::Go => {}
            Note::Stop => {
                let mut last = 0;
                while let Some(flows) = self.splicer.page(last, PAGE) {
                    last = flows[flows.len() - 1].id;
                    flows.iter().for_each(|f| self.tend(f.id, None));
                }
            }
        }
    }

    /// Those whose time has come, as many as may be.
    fn look(&mut self, now: Instant) {
        for _ in 0..LOOKS {
            let Some((at, id)) = self.agenda.next_look(now) else { return };
            self.tend(id, Some(Word::Look(at)));
        }
    }

    fn release(&mut self, now: Instant) {
        for _ in 0..PAGE {
            let Some(id) = self.agenda.next_release(now) else { return };
            self.tend(id, None);
        }
    }

    fn clear_away(&mut self, now: Instant) {
        let Some(d) = self.splicer.datapath() else { return };
        let live = self.splicer.live();
        for _ in 0..PAGE {
            let Some((leg, other)) = self.splicer.inner.lingering.next_over(now, live) else { return };
            d.forget_ended(&leg, other.as_ref());
        }
    }

    fn sweep(&mut self, now: Instant) {
        let Some(d) = self.splicer.datapath() else { return };
        let gone = self.sweeper.look(d, now);
        self.splicer.inner.swept.fetch_add(gone as u64, Ordering::Relaxed);
    }

    /// Does with a flow what is to be done. A flow that is not here any more has ended, or has a task.
    fn tend(&mut self, id: u64, word: Option<Word>) {
        let Some(flow) = self.splicer.flow(id) else { return };
        let mut place = flow.place();
        let Place::Kept(kept) = &mut *place else { return };
        if matches!(word, Some(Word::Look(at)) if at != kept.due) {
            return; // a look from an earlier stay
        }
        let next = self.next(&flow, kept, word.as_ref());
        match next {
            Next::Stays => {
                if matches!(word, Some(Word::Look(_) | Word::Kept)) {
                    kept.due = Instant::now() + kept.pause(&flow, self.agenda.looks());
                    self.agenda.look(kept.due, id);
                }
                if let (Some(Word::Kept), None, Some(at)) = (word, &kept.released, kept.release_at(&flow)) {
                    self.agenda.release(at, id);
                }
            }
            Next::Ended(how) => self.take(&flow, place, Place::Gone).finish(how, true),
            Next::Unsplice | Next::Recreated(_) => self.give_back(&flow, place, next),
        }
    }

    fn take(&mut self, flow: &Arc<Flow>, mut place: MutexGuard<'_, Place>, then: Place) -> Relay {
        match std::mem::replace(&mut *place, then) {
            Place::Kept(kept) => {
                kept.release_at(flow).iter().for_each(|at| self.agenda.cancel_release(*at, flow.id));
                Relay::revive(&self.splicer, flow.clone(), *kept)
            }
            _ => unreachable!("looked at under this lock"),
        }
    }

    /// Into a task.
    fn give_back(&mut self, flow: &Arc<Flow>, place: MutexGuard<'_, Place>, next: Next) {
        let (task, ears) = self.splicer.ears();
        let mut relay = self.take(flow, place, task);
        match next {
            Next::Recreated(sockets) => {
                relay.took_over(sockets);
                flow.runtime.spawn(relay.run(ears));
            }
            _ => drop(flow.runtime.spawn(relay.unsplice_and_run(ears))),
        }
    }

    fn next(&mut self, flow: &Arc<Flow>, kept: &mut Kept, word: Option<&Word>) -> Next {
        let stop = *self.splicer.stop_signal().borrow();
        if stop != Stop::Go {
            return Next::Ended(if stop == Stop::Leave { How::Left } else { How::Stopped });
        }
        let splicer = self.splicer.clone();
        let Some(d) = splicer.datapath() else { return Next::Ended(How::Stopped) };
        let wanted = match word {
            Some(Word::Command(Command::Reset)) => return Next::Ended(How::Stopped),
            Some(Word::Command(Command::Unsplice)) if has_fragments(d, flow) => {
                tracing::info!(flow = flow.id, "has had fragments forwarded: stays spliced");
                flow.refuse(Refusal::Fragments);
                None
            }
            // a message that is interrupted may be spliced again
            Some(Word::Event(EventKind::Triggered)) => Some(!kept.is_message()),
            Some(Word::Command(Command::Unsplice)) => Some(true),
            Some(Word::Event(EventKind::Passed) | Word::Kept | Word::Look(_)) if kept.is_passed(d, flow) => Some(false),
            Some(Word::Event(EventKind::Oversize)) => {
                let now = Instant::now();
                // long ago a host was told of another MTU, and has tried since whether it is still so (RFC 1191, 6.3)
                let since = kept.oversize.filter(|[_, last]| now - *last < MTU_AGAIN).map_or(now, |[first, _]| first);
                kept.oversize = Some([since, now]);
                let late = now - since > MTU_PATIENCE;
                late.then(|| flow.refuse(Refusal::Mtu)).map(|()| false)
            }
            Some(Word::Command(Command::Release)) => {
                kept.release(d, flow);
                None
            }
            // New sockets have the hosts' numbers, and do without us, unless a host has got more than it has acknowledged here.
            Some(Word::Elsewhere) if !is_foreign(d, flow, kept) && !has_fragments(d, flow) => {
                kept.release(d, flow);
                if kept.released.is_some() && kept.back.is_none() {
                    flow.refuse(Refusal::Unattached);
                    kept.back =
                        Some(Back { until: Instant::now() + flow.policy.drain_limit, only_idle: true, stay: true });
                }
                None
            }
            _ => None,
        };
        if let Some(stay) = wanted {
            if kept.released.is_none() {
                kept.stay |= stay;
                return Next::Unsplice;
            }
            if kept.back.is_none() {
                kept.back = Some(Back::soon(stay));
            }
        }
        match kept.life(d, flow) {
            Err(how) => return Next::Ended(how),
            Ok(Life::Woken) => {
                kept.stay |= !kept.is_message();
                return Next::Unsplice;
            }
            Ok(Life::Idle(after)) if after >= flow.policy.idle_limit => return Next::Ended(How::Idle),
            Ok(Life::Idle(after))
                if matches!(flow.policy.trigger, Some(Trigger::Idle(t)) if after >= t) && !has_fragments(d, flow) =>
            {
                if kept.released.is_none() {
                    kept.stay = true;
                    return Next::Unsplice;
                }
                if kept.back.is_none() {
                    kept.back = Some(Back::soon(true));
                }
            }
            Ok(_) => {}
        }
        if kept.release_at(flow).is_some_and(|at| at <= Instant::now()) {
            kept.release(d, flow);
        }
        self.bring_back(d, flow, kept)
    }

    /// A released flow gets new sockets, as soon as it is idle for an instant. If it is not in time, some bytes are sent again.
    fn bring_back(&mut self, d: &Datapath, flow: &Flow, kept: &mut Kept) -> Next {
        let (Some(back), Some(released)) = (kept.back, &kept.released) else { return Next::Stays };
        let is_late = Instant::now() >= back.until;
        match d.recreate([&flow.client, &flow.server], released, is_late && !back.only_idle) {
            Ok(sockets) => {
                kept.stay |= back.stay;
                kept.back = None;
                return Next::Recreated(sockets);
            }
            Err(SwitchError::Busy) if !is_late => {
                self.returning.push(flow.id);
                return Next::Stays;
            }
            Err(SwitchError::Busy) => tracing::debug!(flow = flow.id, "never idle: stays released"),
            Err(SwitchError::Fragments) => flow.refuse(Refusal::Fragments),
            Err(error @ SwitchError::Closing) => tracing::debug!(flow = flow.id, %error, "stays released"),
            Err(error) => tracing::warn!(flow = flow.id, %error, "sockets of a released flow could not be made"),
        }
        kept.back = None;
        Next::Stays
    }
}

/// Time until a look, which may be overdue.
fn until(at: Instant, not_before: Instant, now: Instant) -> Duration {
    at.max(not_before).saturating_duration_since(now)
}

/// Have fragments been forwarded? Then a switch back may lose what its host sends again across the bound, and the flow stays
/// forwarded unless that is worse.
fn has_fragments(d: &Datapath, flow: &Flow) -> bool {
    let paths = d.paths_of([&flow.client, &flow.server]);
    paths.is_some_and(|p| p.iter().any(|p| p.flags & PathFlags::FRAGMENTS != 0))
}

/// Do its hosts believe to speak to each other? Their segments come to our sockets by devices that are attached to, or not at all.
fn is_foreign(d: &Datapath, flow: &Flow, kept: &Kept) -> bool {
    let released = kept.released.as_ref().is_some_and(|[a, _]| a.is_foreign());
    released || d.leg(&flow.client).is_some_and(|l| l.flags & LegFlags::FOREIGN != 0)
}

/// Why a flow is tended.
enum Word {
    Kept,
    Look(Instant),
    Command(Command),
    Event(EventKind),
    Elsewhere,
}

enum Life {
    /// For so long.
    Idle(Duration),
    /// A trigger has taken it back, and its event was lost.
    Woken,
}

impl Kept {
    /// Sooner than the keeper looks around by itself.
    pub fn wants_look_soon(&self, flow: &Flow) -> bool {
        let soon = self.began + SLACK;
        self.pause(flow, 0) < SLACK || self.release_at(flow).is_some_and(|at| at < soon)
    }

    /// Until the next look.
    fn pause(&self, flow: &Flow, flows: usize) -> Duration {
        let policy = &flow.policy;
        let patience = match policy.trigger {
            Some(Trigger::Idle(after)) => after.min(policy.idle_limit),
            _ if self.waits(flow) => PATIENCE.min(policy.idle_limit),
            _ => policy.idle_limit,
        };
        // a quarter of the looks there may be: those of flows that come later want a part, too
        let fair = PACE * (4 * flows / LOOKS) as u32;
        (patience / 8).clamp(EVERY.0, EVERY.1).max(fair)
    }

    /// How long has it been idle, or how has it ended?
    fn life(&mut self, datapath: &Datapath, flow: &Flow) -> Result<Life, How> {
        let Some([pc, ps]) = datapath.paths_of([&flow.client, &flow.server]) else {
            return Err(How::Stopped); // somebody has flushed the tables
        };
        if (pc.flags | ps.flags) & PathFlags::DEAD != 0 {
            if pc.flags & ps.flags & PathFlags::FIN != 0 {
                return Err(How::Closed); // a late segment met a host that had forgotten the connection
            }
            return Err(if pc.flags & PathFlags::RST != 0 { How::ClientReset } else { How::ServerReset });
        }
        if pc.flags & ps.flags & PathFlags::FIN_ACKED != 0 {
            return Err(How::Closed);
        }
        if self.released.is_none() && pc.flags & ps.flags & PathFlags::SPLICED == 0 {
            return Ok(Life::Woken);
        }
        let sign = [pc, ps].map(|p| (p.wraps, p.end, p.max_ack));
        if self.sign.0 != sign {
            self.sign = (sign, Instant::now());
        }
        Ok(Life::Idle(self.sign.1.elapsed()))
    }

    /// The programs were detached for a while, and what was to be forwarded has gone to the parked sockets. Does the flow have to
    /// end for it? What they hold and have not acknowledged is gone with them.
    pub fn is_spoilt(&mut self, datapath: &Datapath, flow: &Flow) -> bool {
        let legs = [&flow.client, &flow.server];
        let strays = |(side, leg): (&Side, &Tuple)| match datapath.leg(leg).and_then(|l| l.parked_at()) {
            Some(stood) => side.strays(stood).unwrap_or(Strays::None),
            None if self.released.is_some() => Strays::None,
            None => Strays::Taken, // it was just being taken back
        };
        match self.sides.iter().zip(legs).map(strays).max() {
            None | Some(Strays::None) => return false,
            Some(Strays::Held) => self.release(datapath, flow),
            Some(Strays::Taken) => {}
        }
        self.released.is_none()
    }

    fn is_message(&self) -> bool {
        matches!(self.purpose, Purpose::Message(_))
    }

    /// Has all of the message been forwarded? The event may have come too early, or been lost.
    fn is_passed(&self, datapath: &Datapath, flow: &Flow) -> bool {
        let Purpose::Message(errand) = &self.purpose else { return false };
        datapath.look(&flow.client, &flow.server).is_ok_and(|at| errand.is_passed(&at))
    }

    /// A flow that waits for something to come back keeps its sockets: without their legs' records nobody knows a limit.
    fn waits(&self, flow: &Flow) -> bool {
        self.is_message() || matches!(flow.policy.trigger, Some(Trigger::ClientData | Trigger::ServerData))
    }

    /// None: not even if descriptors run short. The same as long as the flow is forwarded.
    fn release_at(&self, flow: &Flow) -> Option<Instant> {
        (!self.waits(flow)).then(|| self.began + flow.policy.release_after.unwrap_or(NEVER).min(NEVER))
    }

    /// Closes the parked sockets; the flow goes on without.
    fn release(&mut self, datapath: &Datapath, flow: &Flow) {
        if self.released.is_some() || self.waits(flow) {
            return;
        }
        let (c, s) = (flow.client, flow.server);
        let [a, b] = &mut self.sides;
        a.close_silently();
        b.close_silently();
        self.released = datapath.release(&c).zip(datapath.release(&s)).map(|(a, b)| [a, b]);
        flow.set_state(FlowState::Released);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Or whoever has fallen behind would wait the longer the later it is.
    #[test]
    fn what_is_overdue_waits_for_the_pace_alone() {
        let now = Instant::now();
        let (long_ago, soon) = (now.checked_sub(SLACK).unwrap(), now + PACE);
        assert_eq!(until(long_ago, soon, now), PACE);
        assert_eq!(until(long_ago, long_ago, now), Duration::ZERO);
        assert_eq!(until(now + SLACK, soon, now), SLACK);
    }

    /// A million of them are to fit a small machine.
    #[test]
    fn records_are_small() {
        assert!(size_of::<Kept>() + size_of::<Flow>() <= 680, "{} {}", size_of::<Kept>(), size_of::<Flow>());
    }
}
