//! What a flow is for: two streams to their ends, or one message, after which its legs go back to whoever had them.

use crate::{Leg, RelayedMessage, types::Done};
use tokio::sync::oneshot;

pub(crate) enum Purpose {
    /// Both streams.
    Streams(Done),
    /// One message, for a caller who waits. Nothing is read from its receiver meanwhile.
    Message(oneshot::Sender<Report>),
}

/// What the caller gets to know, and the legs if the connections go on.
pub(crate) type Report = (RelayedMessage, Option<(Leg, Leg)>);

/// Tells the caller; if it has gone away, here are its legs.
pub(crate) fn report(
    tell: oneshot::Sender<Report>,
    passed: RelayedMessage,
    legs: Option<(Leg, Leg)>,
) -> Option<(Leg, Leg)> {
    tell.send((passed, legs)).err()?.1
}
