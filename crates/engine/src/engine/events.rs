//! Events of flows, for subscribers. Nobody waits for a subscriber: a slow one misses events and counts them.

use crate::{
    core::Progress,
    engine::flow::Flow,
    refusal::Refusal,
    types::{EndReason, Ended, FlowState, FlowStatus},
};
use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::SystemTime,
};
use tokio::sync::broadcast::{
    self,
    error::{RecvError, TryRecvError},
};

/// Number of events that a subscriber may leave unread.
const UNREAD: usize = 4096;

/// An event of a flow of this process.
#[derive(Clone)]
#[non_exhaustive]
pub struct FlowEvent {
    /// Number of the flow, as [`Splicer::hand_over`](crate::Splicer::hand_over) returns it.
    pub flow: u64,
    /// The kind of event.
    pub kind: FlowEventKind,
    /// When it happened.
    pub at: SystemTime,
    /// The name of the listener, if it has one.
    pub name: Option<Arc<str>>,
    /// The end of a flow that has relayed a message: nobody else tells of it.
    pub message: Option<Arc<Ended>>,
    /// The flow, if it begins.
    of: Option<Arc<Flow>>,
}

impl fmt::Debug for FlowEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlowEvent").field("flow", &self.flow).field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl FlowEvent {
    fn new(flow: u64, kind: FlowEventKind, name: Option<&Arc<str>>) -> FlowEvent {
        FlowEvent { flow, kind, at: SystemTime::now(), name: name.cloned(), message: None, of: None }
    }

    /// Returns what is known of a flow that begins, even if it has ended meanwhile.
    pub fn begun(&self) -> Option<FlowStatus> {
        self.of.as_ref().map(|flow| flow.status(None))
    }
}

/// The kind of a [`FlowEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FlowEventKind {
    /// The flow begins: it is copied.
    Begun,
    /// The flow is spliced: the kernel forwards it. Not announced if both hosts had closed by then, or if a message had passed.
    Spliced,
    /// The flow is not spliced, or could not be taken back.
    Refused(Refusal),
    /// The flow is no longer forwarded: it is copied again, or ends.
    TakenBack,
    /// The flow was released: it has no sockets any more.
    Released,
    /// The flow has ended.
    Ended(EndReason),
}

/// A subscription to all flows ([`Splicer::subscribe`](crate::Splicer::subscribe)).
#[derive(Debug)]
pub struct FlowEvents {
    events: broadcast::Receiver<FlowEvent>,
    dropped: u64,
    subscribers: Arc<AtomicUsize>,
}

impl FlowEvents {
    /// Waits for the next event. `None`: the engine is gone. Cancel safe.
    pub async fn next(&mut self) -> Option<FlowEvent> {
        loop {
            match self.events.recv().await {
                Ok(event) => return Some(event),
                Err(RecvError::Lagged(missed)) => self.dropped += missed,
                Err(RecvError::Closed) => return None,
            }
        }
    }

    /// Returns the next event if it is there.
    pub fn try_next(&mut self) -> Option<FlowEvent> {
        loop {
            match self.events.try_recv() {
                Ok(event) => return Some(event),
                Err(TryRecvError::Lagged(missed)) => self.dropped += missed,
                Err(TryRecvError::Empty | TryRecvError::Closed) => return None,
            }
        }
    }

    /// Returns how many events are there, or more if some were missed.
    pub fn unread(&self) -> usize {
        self.events.len()
    }

    /// Returns how many events this subscription has missed, because 4096 others were unread.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
}

impl Drop for FlowEvents {
    fn drop(&mut self) {
        self.subscribers.fetch_sub(1, Relaxed);
    }
}

/// How often flows have changed hands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Switches {
    /// Times that a flow was spliced.
    pub spliced: u64,
    /// Times that a flow was taken back, or came back when it ended.
    pub taken_back: u64,
}

/// Announces the events of flows, and counts their switches. Costs one look at a number while nobody subscribes.
#[derive(Default)]
pub(crate) struct Announcer {
    spliced: AtomicU64,
    taken_back: AtomicU64,
    subscribers: Arc<AtomicUsize>,
    to: OnceLock<broadcast::Sender<FlowEvent>>,
}

impl Announcer {
    /// Subscribes to all flows from now on.
    pub fn subscribe(&self) -> FlowEvents {
        let events = self.to.get_or_init(|| broadcast::Sender::new(UNREAD)).subscribe();
        self.subscribers.fetch_add(1, Relaxed);
        FlowEvents { events, dropped: 0, subscribers: self.subscribers.clone() }
    }

    /// Returns how often flows have changed hands.
    pub fn switches(&self) -> Switches {
        Switches { spliced: self.spliced.load(Relaxed), taken_back: self.taken_back.load(Relaxed) }
    }

    fn is_heard(&self) -> bool {
        self.subscribers.load(Relaxed) > 0
    }

    /// Announces that a flow begins.
    pub fn begin(&self, flow: &Arc<Flow>) {
        if self.is_heard() {
            let event = FlowEvent::new(flow.id, FlowEventKind::Begun, flow.info.name.as_ref());
            self.send(FlowEvent { of: Some(flow.clone()), ..event });
        }
    }

    /// Announces what a step of a flow has changed.
    pub fn step(&self, (flow, name): (u64, Option<&Arc<str>>), before: &Progress, now: &Progress) {
        if before.state == now.state && !self.is_heard() {
            return;
        }
        let is_forwarded = |state| matches!(state, FlowState::Spliced | FlowState::Released);
        let refused = now.refusal.filter(|why| before.refusal != Some(*why));
        let moved = match (before.state, now.state) {
            (before, now) if before == now => None,
            (_, FlowState::Spliced) => Some(FlowEventKind::Spliced),
            (_, FlowState::Released) => Some(FlowEventKind::Released),
            (before, _) if is_forwarded(before) => Some(FlowEventKind::TakenBack),
            _ => None,
        };
        match moved {
            // one that is released was spliced before, unless an earlier process has left it
            Some(FlowEventKind::Spliced) if !is_forwarded(before.state) => self.spliced.fetch_add(1, Relaxed),
            Some(FlowEventKind::TakenBack) => self.taken_back.fetch_add(1, Relaxed),
            _ => 0,
        };
        moved.into_iter().chain(refused.map(FlowEventKind::Refused)).for_each(|kind| self.tell((flow, name), kind));
    }

    /// Announces the end of a flow. `message`: it has relayed one.
    pub fn end(&self, name: Option<&Arc<str>>, ended: &Ended, message: bool) {
        if self.is_heard() {
            let event = FlowEvent::new(ended.id, FlowEventKind::Ended(ended.how), name);
            self.send(FlowEvent { message: message.then(|| Arc::new(ended.clone())), ..event });
        }
    }

    pub fn tell(&self, (flow, name): (u64, Option<&Arc<str>>), kind: FlowEventKind) {
        if self.is_heard() {
            self.send(FlowEvent::new(flow, kind, name));
        }
    }

    fn send(&self, event: FlowEvent) {
        let _ = self.to.get().map(|to| to.send(event)); // the last subscriber may just have gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(state: FlowState) -> Progress {
        Progress { state, ..Progress::new(None) }
    }

    #[tokio::test]
    async fn steps_are_told_and_a_slow_subscriber_misses_some() {
        let (announcer, name) = (Announcer::default(), "front".into());
        announcer.tell((1, None), FlowEventKind::Spliced); // to nobody
        let mut events = announcer.subscribe();
        let states = [FlowState::Copying, FlowState::Draining, FlowState::Spliced, FlowState::Released];
        states.windows(2).for_each(|w| announcer.step((7, Some(&name)), &at(w[0]), &at(w[1])));
        announcer.step((7, Some(&name)), &at(FlowState::Released), &at(FlowState::Unsplicing));
        let refused = Progress { refusal: Some(Refusal::Policy), ..at(FlowState::Copying) };
        announcer.step((7, Some(&name)), &at(FlowState::Unsplicing), &refused);
        announcer.tell((7, Some(&name)), FlowEventKind::Ended(EndReason::Closed));
        for kind in [
            FlowEventKind::Spliced,
            FlowEventKind::Released,
            FlowEventKind::TakenBack,
            FlowEventKind::Refused(Refusal::Policy),
            FlowEventKind::Ended(EndReason::Closed),
        ] {
            let event = events.next().await.expect("an event");
            assert_eq!((event.flow, event.kind, event.name.as_deref()), (7, kind, Some("front")));
        }
        (0..UNREAD as u64 + 10).for_each(|n| announcer.tell((n, None), FlowEventKind::Spliced));
        assert_eq!((events.next().await.map(|e| e.flow), events.dropped()), (Some(10), 10));
        drop(events);
        assert!(!announcer.is_heard());
        announcer.step((7, None), &at(FlowState::Draining), &at(FlowState::Spliced));
        announcer.step((7, None), &at(FlowState::Spliced), &refused);
        announcer.step((8, None), &at(FlowState::Unsplicing), &refused);
        assert_eq!(announcer.switches(), Switches { spliced: 2, taken_back: 2 }, "they are counted for nobody, too");
    }
}
