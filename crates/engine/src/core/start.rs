//! The start of a flow with a far client and a near server: it is spliced before anything is copied, if that can be done in time.

use super::{Action, Context, Core, Progress, Time};
use crate::{finding::PathFinding, types::Policy};
use longsplice_datapath::{Pair, PathFacts, Side};
use std::time::Duration;

/// Round trips of the whole path after which the rate of a flow that had become slow while it was spliced is compared with what
/// copying does: slow start has reached any rate by then.
const FASTER_AFTER: u32 = 10;
/// How many times as fast it must have become. Otherwise its server was slow by itself, or the path.
const FASTER: u64 = 3;
/// Part of a far client's round trip within which a flow has to be spliced before its server sends anything.
const START_WITHIN: u32 = 4;
/// ... and most time for that, however long the handshake has taken.
const START_MOST: Duration = Duration::from_millis(250);

/// How slow a flow had become.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) struct Slowed {
    pub sender: Side,
    /// Bytes per second.
    pub rate: u64,
    /// Round-trip time of the whole path.
    pub rtt: Duration,
}

impl Slowed {
    /// Returns whether a flow that has been copied since `began` has been so for long enough.
    pub fn is_to_be_compared(&self, now: Time, began: Time) -> bool {
        now >= began + FASTER_AFTER * self.rtt
    }
}

impl Core {
    /// Splices before anything is copied. What the client has said waits meanwhile: its answer must not come before the splice.
    pub(super) fn start(&mut self, cx: &mut Context<'_>, facts: &Pair<PathFacts>, finding: PathFinding) -> Action {
        let within = (facts.client.min_rtt.unwrap_or_default() / START_WITHIN).min(START_MOST);
        self.control_mut().start_until.get_or_insert(cx.now + within);
        self.approach(cx, facts, finding)
    }

    /// Finds out whether a flow that had become slow after a splice at its start is faster now.
    pub(super) fn compare_with_spliced(&mut self, now: Time, slowed: Slowed, facts: &Pair<PathFacts>) {
        let control = self.control_mut();
        let (before, began) = control.began;
        let copied = control.streams[slowed.sender].copied - before[slowed.sender];
        // what waits here, or is under way, says nothing of the path
        let arrived = copied.saturating_sub(facts[slowed.sender.other()].outstanding.into());
        let least = (FASTER * slowed.rate) as f64 * now.saturating_sub(began).as_secs_f64();
        (control.slowed, control.was_slow) = (None, arrived as f64 > least);
    }

    /// Has a flow with a far client begin like any other. Returns whether a sender was held back for the start.
    pub(super) fn starts_copied(&mut self, shown: &mut Progress, policy: &Policy) -> bool {
        let control = self.control_mut();
        if !std::mem::take(&mut control.is_client_far) {
            return false;
        }
        control.start_until = None;
        control.enough = control.enough.max(policy.threshold().unwrap_or_default());
        shown.finding = None;
        control.approach.take().is_some()
    }
}
