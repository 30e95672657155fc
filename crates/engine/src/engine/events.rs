//! Events of flows, for subscribers. Nobody waits for a subscriber: a slow one misses events and counts them.

use crate::{
    core::Progress,
    refusal::Refusal,
    types::{EndReason, FlowState},
};
use std::sync::OnceLock;
use tokio::sync::broadcast::{self, error::RecvError};

/// Number of events that a subscriber may leave unread.
const UNREAD: usize = 4096;

/// An event of a flow of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlowEvent {
    /// Number of the flow, as [`Splicer::hand_over`](crate::Splicer::hand_over) returns it.
    pub flow: u64,
    /// The kind of event.
    pub kind: FlowEventKind,
}

/// The kind of a [`FlowEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FlowEventKind {
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

    /// Returns how many events this subscription has missed, because 4096 others were unread.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
}

/// Announces the events of flows. Costs one look at a pointer until somebody subscribes.
#[derive(Default)]
pub(crate) struct Announcer(OnceLock<broadcast::Sender<FlowEvent>>);

impl Announcer {
    /// Subscribes to all flows from now on.
    pub fn subscribe(&self) -> FlowEvents {
        let events = self.0.get_or_init(|| broadcast::Sender::new(UNREAD)).subscribe();
        FlowEvents { events, dropped: 0 }
    }

    /// Announces what a step of a flow has changed.
    pub fn step(&self, flow: u64, before: &Progress, now: &Progress) {
        if self.0.get().is_none() {
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
        moved.into_iter().chain(refused.map(FlowEventKind::Refused)).for_each(|kind| self.tell(flow, kind));
    }

    pub fn tell(&self, flow: u64, kind: FlowEventKind) {
        if let Some(subscribers) = self.0.get() {
            let _ = subscribers.send(FlowEvent { flow, kind }); // there may be none
        }
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
        let announcer = Announcer::default();
        announcer.tell(1, FlowEventKind::Spliced); // to nobody
        let mut events = announcer.subscribe();
        let states = [FlowState::Copying, FlowState::Draining, FlowState::Spliced, FlowState::Released];
        states.windows(2).for_each(|w| announcer.step(7, &at(w[0]), &at(w[1])));
        announcer.step(7, &at(FlowState::Released), &at(FlowState::Unsplicing));
        let refused = Progress { refusal: Some(Refusal::Policy), ..at(FlowState::Copying) };
        announcer.step(7, &at(FlowState::Unsplicing), &refused);
        announcer.tell(7, FlowEventKind::Ended(EndReason::Closed));
        for kind in [
            FlowEventKind::Spliced,
            FlowEventKind::Released,
            FlowEventKind::TakenBack,
            FlowEventKind::Refused(Refusal::Policy),
            FlowEventKind::Ended(EndReason::Closed),
        ] {
            assert_eq!(events.next().await, Some(FlowEvent { flow: 7, kind }));
        }
        (0..UNREAD as u64 + 10).for_each(|n| announcer.tell(n, FlowEventKind::Spliced));
        assert_eq!((events.next().await.map(|e| e.flow), events.dropped()), (Some(10), 10));
        drop(announcer);
    }
}
