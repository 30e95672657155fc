//! The start of a flow with a far client and a near server: it is spliced before anything is copied, if that can be done in time.

use super::{Action, Context, Control, Core, Progress, Time, watch::START_WINDOW};
use crate::{
    finding::{PathCause, PathFinding},
    types::Policy,
};
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

impl Control {
    /// Notes that the flow does not start with a splice.
    pub fn begins_copied(&mut self, shown: &mut Progress) {
        (self.is_client_far, self.start_until) = (false, None);
        shown.finding = shown.finding.filter(|found| found.cause != PathCause::Far || shown.splices > 0);
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
        // A client that had stopped, and reads again, is faster as well. It tells of its server only what no small window carries.
        let small = (f64::from(START_WINDOW) / slowed.rtt.as_secs_f64().max(f64::EPSILON)) as u64;
        let least = (FASTER * slowed.rate.max(small)) as f64 * now.saturating_sub(began).as_secs_f64();
        (control.slowed, control.was_slow) = (None, arrived as f64 > least);
    }

    /// Has a flow with a far client begin like any other. Returns whether a sender was held back for the start.
    pub(super) fn starts_copied(&mut self, shown: &mut Progress, policy: &Policy) -> bool {
        let control = self.control_mut();
        if !control.is_client_far {
            return false;
        }
        control.begins_copied(shown);
        control.enough = control.enough.max(policy.threshold().unwrap_or_default());
        control.approach.take().is_some()
    }
}
