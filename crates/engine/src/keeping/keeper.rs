//! The keeper of forwarded flows. No task waits for them: one thread holds a record of each, receives events and
//! commands, looks at every flow periodically, and ends it or hands it back to a task, as its [core](crate::core) says.
//!
//! Ends are reported by events. Looks find idle flows, and ends whose event was lost. At most [`LOOKS`] looks
//! are done per [`PACE`], so above some ten thousand flows each is looked at less often; with a million, every
//! seven minutes. Releases do not wait for looks ([`Agenda`]), and happen early when descriptors run short.

use crate::{
    copying::relay::Relay,
    core::{Action, Event, Time, Why},
    engine::{
        Engine,
        flow::{Flow, FlowOwner, KeeperMessage, Replaced, Stop, TICK},
    },
    keeping::{agenda::Agenda, deserted::Deserted, guard::Guard, sweeper::Sweeper},
    types::Command,
};
use longsplice_datapath::{Connection, Event as Told, EventKind, Events, monotonic};
use std::{
    sync::{Arc, MutexGuard, mpsc},
    time::{Duration, Instant},
};
use tracing::Instrument as _;

/// Maximum number of looks per [`PACE`].
const LOOKS: usize = 100;
/// Interval to which [`LOOKS`] applies.
const PACE: Duration = Duration::from_millis(10);
/// Interval between attempts to give a released flow new sockets, which need an instant without data in flight.
const TRY: Duration = Duration::from_millis(1);
/// Maximum number of flows or entries handled between two reads of messages.
const PAGE: usize = 1000;

struct Keeper {
    engine: Arc<Engine>,
    /// Times of looks and releases. A look counts only if it is [`ForwardedFlow::due`].
    agenda: Agenda,
    /// Flows that are to get new sockets.
    returning: Vec<u64>,
    /// Earliest time of the next looks.
    next_look: Time,
    /// Number of flows since the last ones that will be looked at soon, since they are watched.
    watched: usize,
    /// Earliest time of the next attempts to give flows new sockets.
    next_try: Time,
    /// Earliest time at which lingering entries are removed again, unless there are too many: many in each call.
    next_clear: Time,
    guard: Guard,
    sweeper: Sweeper,
    deserted: Deserted,
}

/// Runs the keeper's thread until the engine closes.
pub(crate) fn keep(engine: Arc<Engine>, messages: &mpsc::Receiver<KeeperMessage>, events: &mut Events<'_>) {
    let (agenda, returning, sweeper) = (Agenda::default(), Vec::new(), Sweeper::new());
    let (now, guard) = (monotonic(), Guard::new(&engine, Instant::now()));
    let deserted = Deserted::default();
    let (next_look, next_try, next_clear, watched) = (now, now, now, 0);
    let mut k =
        Keeper { engine, agenda, returning, next_look, watched, next_try, next_clear, guard, sweeper, deserted };
    while !k.engine.is_closing() {
        match events.wait(k.rest()) {
            Ok(events) => {
                let events: Vec<_> = events.collect();
                // first: what comes before such an event is looked into when the entries are gone
                events.iter().filter(|event| event.kind == EventKind::Replaced).for_each(|event| k.note_last(event));
                events.iter().for_each(|event| k.route(event));
            }
            Err(error) => {
                tracing::error!(%error, "cannot wait for events of the data path: flows are polled");
                std::thread::sleep(PACE);
            }
        }
        messages.try_iter().for_each(|message| k.receive(message));
        let now = monotonic();
        if now >= k.next_try {
            k.next_try = now + TRY;
            for id in std::mem::take(&mut k.returning) {
                k.handle(id, Why::Due);
            }
        }
        if now >= k.next_look {
            (k.next_look, k.watched) = (now + PACE, 0);
            k.look(now);
        }
        k.release(now);
        k.clear_away(now);
        let now = Instant::now();
        k.guard.look(&k.engine, now);
        k.sweep(now);
    }
}

impl Keeper {
    /// Returns the time until there is something to do besides listening.
    fn rest(&self) -> Duration {
        let now = monotonic();
        let [look, release] = self.agenda.due();
        // looks are paced; a release that waited would keep two descriptors open
        let look = look.map_or(TICK, |at| until(at, self.next_look, now));
        let release = release.map_or(TICK, |at| until(at, now, now));
        let back = if self.returning.is_empty() { TICK } else { TRY };
        let sweep = self.sweeper.due().map_or(TICK, |at| at.saturating_duration_since(Instant::now()));
        // at least once a tick: not every message wakes this thread, and the guard looks once a second
        look.min(release).min(back).min(sweep).min(TICK)
    }

    /// Keeps the last state of a leg that was replaced.
    fn note_last(&self, event: &Told) {
        let connection = Connection { leg: event.leg, generation: event.generation };
        let last = Replaced { path: event.path, record: event.record };
        self.engine.flow_of(&connection).inspect(|flow| flow.was_replaced(&event.leg, last));
    }

    /// Passes an event to the task that has the flow, or handles it here. A flow that has just ended gets no events.
    fn route(&mut self, event: &Told) {
        let connection = Connection { leg: event.leg, generation: event.generation };
        let Some(flow) = self.engine.flow_of(&connection) else {
            if event.kind == EventKind::Deserted && self.deserted.is_over(&self.engine, &connection) {
                self.engine.reset_again(&connection);
            }
            return;
        };
        // how the flow ended is only known from the last states of both legs, and the other one's follows
        if event.more {
            return;
        }
        if let FlowOwner::Task { events, .. } = &*flow.owner() {
            return events.notify(event.kind);
        }
        self.handle(flow.id, Why::Told(event.kind));
    }

    fn receive(&mut self, message: KeeperMessage) {
        match message {
            KeeperMessage::Forwarded(id) => self.handle(id, Why::Kept),
            KeeperMessage::Command(id, command) => self.handle(id, Why::Command(command)),
            KeeperMessage::Elsewhere(id) => self.handle(id, Why::Elsewhere { transparent: false }),
            KeeperMessage::Room => {
                for _ in 0..self.engine.descriptors.begin() {
                    let Some(id) = self.agenda.soonest_release() else { return };
                    self.handle(id, Why::Command(Command::Release));
                }
            }
            // the engine closes: the message has only ended the wait for events
            KeeperMessage::Stop if *self.engine.stop_signal().borrow() == Stop::Go => {}
            KeeperMessage::Stop => {
                // page by page, because a flow that ends takes the lock of the table
                let mut last = 0;
                while let Some(flows) = self.engine.page(last, PAGE) {
                    last = flows[flows.len() - 1].id;
                    flows.iter().for_each(|f| self.handle(f.id, Why::Due));
                }
            }
        }
    }

    /// Looks at the flows that are due, up to the limit.
    fn look(&mut self, now: Time) {
        for _ in 0..LOOKS {
            let Some((at, id)) = self.agenda.next_look(now) else { return };
            if self.is_due(id, at) {
                self.handle(id, Why::Look);
            }
        }
    }

    fn release(&mut self, now: Time) {
        for _ in 0..PAGE {
            let Some(id) = self.agenda.next_release(now) else { return };
            self.handle(id, Why::Due);
        }
    }

    fn clear_away(&mut self, now: Time) {
        let Some(d) = self.engine.datapath() else { return };
        let (live, lingering) = (self.engine.live(), &self.engine.lingering);
        if now >= self.next_clear || lingering.is_crowd(live) {
            self.next_clear = now + PACE;
            let over = lingering.over(Instant::now(), live, PAGE);
            d.clear_ended(&over);
        }
    }

    fn sweep(&mut self, now: Instant) {
        let Some(d) = self.engine.datapath() else { return };
        let gone = self.sweeper.look(d, now);
        self.engine.count_swept(gone);
    }

    /// Returns whether a look is due, and not left over from an earlier stay of the flow.
    fn is_due(&self, id: u64, at: Time) -> bool {
        let flow = self.engine.flow(id);
        flow.is_some_and(|flow| matches!(&*flow.owner(), FlowOwner::Keeper(kept) if kept.due == at.into()))
    }

    /// Performs what the core wants for a flow. Does nothing if the flow has ended, or a task has it.
    fn handle(&mut self, id: u64, why: Why) {
        let Some(flow) = self.engine.flow(id) else { return };
        let _span = flow.span().entered();
        let mut owner = flow.owner();
        let FlowOwner::Keeper(kept) = &mut *owner else { return };
        let (engine, stop) = (self.engine.clone(), *self.engine.stop_signal().borrow());
        let Some(d) = engine.datapath() else { return };
        // whatever the reason: a flow may be handed over only after the others were told to stop
        let event = match stop {
            Stop::Go => kept.see(d, &flow, why),
            stop => Event::Stop { leave: stop != Stop::Reset },
        };
        let ends = kept.ends_seen(&event);
        let mut action = kept.on(&flow, event);
        loop {
            let event = match action {
                Action::Release => {
                    // when descriptors run short, it has none to give
                    kept.core.release_at(&flow.policy).iter().for_each(|at| self.agenda.cancel_release(*at, id));
                    Event::Released(kept.release(d, &flow))
                }
                Action::Recreate { force } => match kept.recreate(d, &flow, force) {
                    Ok(new) => return self.give_back(&flow, owner, |relay| relay.took_over(new)),
                    Err(error) => Event::Recreated(Err(error)),
                },
                // nothing is left to wait for, so the end needs no task
                Action::Unsplice { .. } if kept.core.is_ending() => {
                    return self.take(&flow, owner, FlowOwner::Gone).end(action, None);
                }
                Action::Unsplice { .. } => return self.give_back(&flow, owner, |_| action),
                Action::End { .. } => return self.take(&flow, owner, FlowOwner::Gone).end(action, ends),
                _ => break,
            };
            action = kept.on(&flow, event);
        }
        if kept.core.is_returning() {
            self.returning.push(id);
        }
        // for other reasons the agenda still has the flow's next look
        if matches!(why, Why::Look | Why::Kept) {
            // use at most a quarter of the looks: flows that come later need some, too
            let fair = PACE * (4 * self.agenda.looks() / LOOKS) as u32;
            // one that is watched for some seconds cannot wait for all others
            let is_soon = kept.core.look_within().is_some() && self.watched < LOOKS / 2;
            self.watched += usize::from(is_soon);
            let due = monotonic() + kept.pause(&flow, if is_soon { Duration::ZERO } else { fair });
            kept.due = due.into();
            self.agenda.look(due, id);
        }
        if let (Why::Kept, None, Some(at)) = (why, kept.sockets.released(), kept.core.release_at(&flow.policy)) {
            self.agenda.release(at, id);
        }
    }

    fn take(&mut self, flow: &Arc<Flow>, mut owner: MutexGuard<'_, FlowOwner>, then: FlowOwner) -> Relay {
        match std::mem::replace(&mut *owner, then) {
            FlowOwner::Keeper(kept) => {
                kept.core.release_at(&flow.policy).iter().for_each(|at| self.agenda.cancel_release(*at, flow.id));
                Relay::revive(&self.engine, flow.clone(), *kept)
            }
            _ => unreachable!("looked at under this lock"),
        }
    }

    /// Hands a flow to a new task. `first` returns the first action of that task.
    fn give_back(
        &mut self,
        flow: &Arc<Flow>,
        owner: MutexGuard<'_, FlowOwner>,
        first: impl FnOnce(&mut Relay) -> Action,
    ) {
        let (task, inbox) = self.engine.inbox();
        let mut relay = self.take(flow, owner, task);
        let action = first(&mut relay);
        flow.runtime.spawn(relay.run(inbox, action).instrument(flow.span()));
    }
}

/// Returns the time until a look. It may be overdue.
fn until(at: Time, not_before: Time, now: Time) -> Duration {
    at.max(not_before).saturating_sub(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise, the later a keeper was, the longer it would wait.
    #[test]
    fn what_is_overdue_waits_for_the_pace_alone() {
        let now = Time::from_secs(100);
        let (long_ago, soon) = (now - TICK, now + PACE);
        assert_eq!(until(long_ago, soon, now), PACE);
        assert_eq!(until(long_ago, long_ago, now), Duration::ZERO);
        assert_eq!(until(now + TICK, soon, now), TICK);
    }
}
