//! The purpose of a flow: to relay two streams to their ends, or one message, after which the legs go back to the caller.

use crate::{
    leg::Leg,
    types::{Done, RelayedMessage},
};
use longsplice_datapath::Pair;
use tokio::sync::oneshot;

pub(crate) enum Purpose {
    /// Relay both streams to their ends.
    Streams(Done),
    /// Relay one message for a caller that waits. Nothing is read from the receiver meanwhile.
    Message(oneshot::Sender<Report>),
}

/// The record for the caller, and the legs if the connections go on.
pub(crate) type Report = (RelayedMessage, Option<Pair<Leg>>);

/// Reports to the caller. Returns the legs if the caller has gone.
pub(crate) fn report(
    tell: oneshot::Sender<Report>,
    passed: RelayedMessage,
    legs: Option<Pair<Leg>>,
) -> Option<Pair<Leg>> {
    tell.send((passed, legs)).err()?.1
}
