//! [`SoFar`], what is kept of a copied flow that goes on in another process.

use super::{Core, Refusal, State, Time, control::Control};
use longsplice_datapath::Pair;
use std::time::Duration;

/// Time that a flow has at least before its idle limit counts again: its hosts may have sent meanwhile.
const GRACE: Duration = Duration::from_secs(2);

/// What is kept of a copied flow that goes on in another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SoFar {
    /// Bytes passed on while it was copied, by direction.
    pub copied: Pair<u64>,
    /// It stays in control mode.
    pub stay: bool,
    /// When bytes last moved.
    pub moved: Time,
    /// Not all bytes that were forwarded past its sockets are acknowledged.
    pub unsettled: bool,
}

impl Core {
    /// Returns what another process has to know, if the flow can go on there: it is copied, not as a message, both hosts are there,
    /// and its sockets see the ends of both streams.
    pub fn so_far(&self) -> Option<SoFar> {
        let is_plain = self.state == State::Copying && self.message.is_none() && self.failed.is_none();
        let control = self.control.as_ref().filter(|_| is_plain && !self.fin_past)?;
        Some(SoFar {
            copied: control.streams.each_ref().map(|stream| stream.copied),
            stay: self.stay,
            moved: control.moved.1,
            unsettled: control.settle_at.is_some(),
        })
    }

    /// Creates a flow that another process has copied so far, like [`Core::new`].
    pub fn going_on(so_far: &SoFar, now: Time, obstacle: Option<Refusal>, in_hand: Pair<u64>) -> Core {
        let SoFar { copied, stay, moved, unsettled } = *so_far;
        let mut control = Control::new(None, copied, in_hand);
        (control.quiet_since, control.settled) = (Some(moved), !unsettled);
        control.settle_at = unsettled.then_some(now);
        Core { stay, control: Some(Box::new(control)), ..Core::new(None, obstacle, in_hand) }
    }
}

impl Control {
    /// Returns since when nothing has moved, when copying begins.
    pub fn begins_quiet(&mut self, now: Time, idle: Duration) -> Time {
        let least = now.saturating_sub(idle.saturating_sub(GRACE));
        self.quiet_since.take().map_or(now, |since| since.clamp(least.min(now), now))
    }
}
