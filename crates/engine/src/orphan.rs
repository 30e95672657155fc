//! A flow of an earlier process, as the last look found it.

use crate::{
    flow::stages,
    lingering::LINGER,
    types::{FlowState, FlowStatus},
};
use longsplice_datapath::{Datapath, LegFlags, Pair, PathFlags, PathView, SwitchError, Switched, Tuple};
use std::time::{Duration, Instant};

/// A flow of an earlier process, as the last look found it.
pub(crate) struct Orphan {
    pub id: u64,
    pub legs: Pair<Tuple>,
    since: Instant,
    /// A fingerprint that changes with every byte, and the time of its last change.
    sign: (Pair<(u16, u32, u32)>, Instant),
    bytes: Pair<u64>,
    pub state: FlowState,
}

/// The result of a look at an orphan.
#[derive(PartialEq, Eq)]
pub(crate) enum Found {
    /// Forwarded, or switching to or from forwarding.
    Live,
    /// Ended by both hosts, or reset. Its entries linger.
    Over,
    /// In control mode, without sockets.
    Deserted,
    /// Idle for too long, or removed.
    Gone,
}

/// Returns whether nothing has arrived for so long that no last segment needs the leg's entries any more.
pub(crate) fn is_silent(d: &Datapath, leg: &Tuple) -> bool {
    d.leg(leg).is_none_or(|l| u128::from(l.seen) < now_ns().saturating_sub(LINGER.as_nanos()))
}

impl Orphan {
    /// Guesses which of the two legs is the client's.
    pub fn new(id: u64, [t, other]: [Tuple; 2]) -> Orphan {
        // our side of a client's connection is a port that we listened on: most likely the lower one
        let order = |leg: &Tuple| (leg.local.port(), leg.remote);
        let legs = if order(&t) <= order(&other) { Pair::new(t, other) } else { Pair::new(other, t) };
        let now = Instant::now();
        let state = FlowState::Released;
        Orphan { id, legs, since: now, sign: (Pair::default(), now), bytes: Pair::default(), state }
    }

    pub fn status(&self) -> FlowStatus {
        FlowStatus {
            id: self.id,
            protocol: "recovered".into(),
            client: self.legs.client.remote,
            server: self.legs.server.remote,
            target: self.legs.server.remote.to_string(),
            user: None,
            state: self.state,
            stages: stages(self.state, "recovered".into()),
            bytes_up: self.bytes.client,
            bytes_down: self.bytes.server,
            age_ms: self.since.elapsed().as_millis() as u64,
            refusal: None,
        }
    }

    /// Looks at the orphan. After the time `idle` without a byte it is to be reset.
    pub fn look(&mut self, d: &Datapath, idle: Duration) -> Found {
        let Some(paths) = d.paths_of(self.legs.each_ref()) else { return Found::Gone };
        if PathView::are_over(paths.each_ref().into()) {
            return Found::Over;
        }
        let at = d.look(self.legs.each_ref()).ok();
        self.bytes = at.map_or(self.bytes, |at| at.end);
        if paths.iter().any(|p| p.flags & PathFlags::SPLICED == 0) {
            return at.map_or(Found::Gone, |at| self.settle(d, &at));
        }
        self.state = FlowState::Released;
        let sign = paths.map(|p| (p.wraps, p.end, p.max_ack));
        if sign != self.sign.0 {
            self.sign = (sign, Instant::now());
        }
        if self.sign.1.elapsed() < idle { Found::Live } else { Found::Gone }
    }

    /// Handles a flow that is not in forwarding mode: its process died during a switch, or a limit has since taken it back.
    fn settle(&mut self, d: &Datapath, at: &Switched) -> Found {
        if (at.flags.client | at.flags.server) & LegFlags::RESET != 0 || at.is_local() {
            return Found::Deserted;
        }
        self.state = FlowState::Draining;
        if at.is_drained() {
            let legs = self.legs.each_ref();
            return match d.commit(legs, at, at.most(legs, Pair::both(None)), Pair::both(false)) {
                Ok(_) => {
                    self.state = FlowState::Released;
                    Found::Live
                }
                Err(SwitchError::Busy) => Found::Live, // taken back just now
                Err(error) => {
                    tracing::warn!(leg = ?self.legs.client, %error, "a flow of an earlier process could not be committed");
                    Found::Deserted
                }
            };
        }
        // the kernel has its sockets, and drains on
        let is_under_way = at.phase.iter().any(|phase| phase.is_switching());
        if is_under_way && !self.legs.iter().all(|t| is_silent(d, t)) {
            return Found::Live;
        }
        let back = d.unsplice(self.legs.each_ref());
        tracing::debug!(leg = ?self.legs.client, ?back, "the drain of an earlier process has stopped");
        Found::Deserted
    }
}

/// Returns CLOCK_MONOTONIC in nanoseconds, like the time stamps of the data path.
fn now_ns() -> u128 {
    longsplice_datapath::monotonic().as_nanos()
}
