//! What a flow is for: two streams to their ends, or one message, after which its legs go back to whoever had them.

use crate::{
    Leg, Passed,
    types::{Done, Message},
};
use longsplice_datapath::Switched;
use tokio::sync::oneshot;

pub(crate) enum Purpose {
    /// Both streams.
    Streams(Done),
    /// One message. Nothing is read from its receiver meanwhile.
    Message(Box<Errand>),
}

/// A message that is passed on for a caller who waits.
pub(crate) struct Errand {
    /// Its direction: 0 is client to server.
    pub from: usize,
    /// Its bytes that were not read yet; while it is copied, the pump counts.
    pub left: u64,
    /// Position in its sender's stream up to which the splice under way goes.
    pub goal: u64,
    /// It stops when its receiver has something to say.
    pub heed: bool,
    tell: oneshot::Sender<Report>,
}

/// What the caller gets to know, and the legs if the connections go on.
pub(crate) type Report = (Passed, Option<(Leg, Leg)>);

impl Errand {
    pub fn new(message: Message, tell: oneshot::Sender<Report>) -> Errand {
        Errand { from: message.from, left: message.bytes, goal: u64::MAX, heed: message.heed, tell }
    }

    /// Has all been forwarded that the splice was for?
    pub fn is_passed(&self, at: &Switched) -> bool {
        at.end[self.from] >= self.goal
    }

    /// Tells the caller; if it has gone away, here are its legs.
    pub fn report(self, passed: Passed, legs: Option<(Leg, Leg)>) -> Option<(Leg, Leg)> {
        self.tell.send((passed, legs)).err()?.1
    }
}
