//! The actions of a flow's [core](crate::core) that need no waiting: the sockets' part and the data path's part.

use super::Relay;
use crate::{
    Refusal, Trigger,
    core::{Action, Event},
    holder::Holding,
    refusal,
    stretches::Begin,
    sync::lock,
};
use longsplice_datapath::{FreezeOptions, Frozen, Half, LegFlags, PathFlags, Phase, Recreated, SwitchError, Switched};
use std::time::Duration;

/// Time in forwarding mode after which conntrack entries of the parked sockets' connections are
/// renewed. Short enough for conntrack to remember them: a small part of its smallest timeout for an
/// open connection (nf_conntrack_tcp_timeout_close_wait, 60 s). Long enough for a message or two.
const TRACKED: Duration = Duration::from_secs(5);

impl Relay {
    /// Performs an action, and returns its answer if there is one.
    pub(super) fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Attend => Some(Event::Attended(self.attend())),
            Action::CopyOn { forget } => {
                forget.into_iter().for_each(|why| self.forget(why));
                self.copy_on();
                None
            }
            Action::Measure => Some(Event::Measured([self.client.path_facts(), self.server.path_facts()])),
            Action::Freeze { fit } => Some(self.freeze(fit)),
            Action::Look => {
                let [c, s] = self.legs();
                let at = self.datapath().look(&c, &s);
                at.iter().for_each(|at| self.let_go(at));
                Some(Event::Looked(at.map(Box::new)))
            }
            Action::Commit { at, most } => Some(Event::Committed(self.commit(&at, most).map(Box::new))),
            Action::Unsplice { away } => {
                let event = self.unsplice(away);
                self.holding = None; // held segments go to the sockets
                Some(event)
            }
            // actions of a forwarded flow, or performed by the caller
            Action::Wait
            | Action::LookBehind
            | Action::Keep
            | Action::Release
            | Action::Recreate { .. }
            | Action::End { .. } => None,
        }
    }

    fn attend(&mut self) -> bool {
        if let Err(error) = self.client.attend().and_then(|()| self.server.attend()) {
            // out of memory or epoll watches: both sockets are closed now, which ends both connections
            tracing::error!(flow = self.flow().id, %error, "the sockets of a flow are lost");
            return false;
        }
        let after = self.flow().policy.keepalive;
        self.client.keep_alive(after);
        self.server.keep_alive(after);
        true
    }

    /// Prepares to copy for the foreseeable future.
    fn copy_on(&mut self) {
        self.client.unclamp();
        self.server.unclamp();
        if !self.core.listens() && !self.is_tapped() {
            self.pump.through_pipes();
        }
    }

    /// Makes the data path forget legs that will never be spliced, which makes room for others. Legs
    /// that relay a message are not forgotten: they go back to the caller, and may join other flows.
    fn forget(&self, why: Refusal) {
        let Some(d) = self.splicer.datapath() else { return };
        if self.core.message_from().is_some() || self.client.at.shimmed || self.server.at.shimmed {
            return;
        }
        let [c, s] = self.legs();
        for (leg, gone) in [&self.client, &self.server].into_iter().zip(d.give_back([&c, &s])) {
            if gone {
                leg.refuse(why);
            }
        }
    }

    fn freeze(&mut self, fit: bool) -> Event {
        self.splicer.route_events(self.flow());
        let [a, b] = [(0, &self.client), (1, &self.server)].map(|(d, leg)| self.core.half(d, leg.tuple(), &leg.at));
        let hold = self.flow().policy.hold.then(|| Holding::of(&self.splicer, [a.leg, b.leg]));
        match hold.transpose() {
            Ok(holding) => self.holding = holding,
            Err(_) => return Event::Refused { why: Refusal::Unprivileged, for_good: false },
        }
        let frozen = self.freeze_both(&a, &b, fit);
        match &frozen {
            Ok(frozen) => {
                tracing::debug!(flow = self.flow().id, ?frozen, "frozen");
                self.let_go(&frozen.at);
            }
            Err(error) => {
                tracing::debug!(flow = self.flow().id, %error, "not frozen");
                self.holding = None;
                if *error == SwitchError::Untracked {
                    let why = refusal::of_untracked(self.datapath(), &[a.leg, b.leg]);
                    return Event::Refused { why, for_good: true };
                }
            }
        }
        Event::Frozen(frozen.map(Box::new))
    }

    /// Freezes both directions. Holds the lock of the stretches meanwhile, because
    /// the reader of copies must know where they belong before it sees the first.
    fn freeze_both(&self, a: &Half, b: &Half, fit: bool) -> Result<Frozen, SwitchError> {
        let (d, legs, tap) = (self.datapath(), [a.leg, b.leg], self.is_tapped());
        let how = FreezeOptions { hold: self.holding.is_some(), fit, tap };
        if !tap {
            return d.freeze(a, b, how);
        }
        self.splicer.hear_taps();
        let mut stretches = lock(&self.splicer.inner.stretches);
        if !legs.iter().all(|leg| stretches.may_begin(leg)) {
            return Err(SwitchError::Busy);
        }
        let frozen = d.freeze(a, b, how)?;
        let [to_server, to_client] = [a, b].map(|h| u64::from(h.leftover));
        let ends = [
            (b.produced + to_server, [&self.client, &self.server]),
            (a.produced + to_client, [&self.server, &self.client]),
        ];
        for (from, (out, ways)) in ends.into_iter().enumerate() {
            let (start, seq) = (frozen.bound[from], frozen.seq[from]);
            let out = out + u64::from(frozen.pending[from]);
            let taps = ways.map(|leg| leg.tap.as_ref());
            stretches.begin(&Begin { legs, from, start, seq, out, taps });
        }
        Ok(frozen)
    }

    /// Lets held segments go in directions that are no longer held.
    fn let_go(&self, at: &Switched) {
        if let Some(holding) = &self.holding {
            (0..2).filter(|d| at.phase[*d] != Phase::ToForwarding).for_each(|d| holding.let_go(d));
        }
    }

    fn commit(&mut self, at: &Switched, most: [u32; 2]) -> Result<Switched, SwitchError> {
        let [c, s] = self.legs();
        let mut stretches = self.is_tapped().then(|| lock(&self.splicer.inner.stretches));
        let trigger = [Trigger::ClientData, Trigger::ServerData].map(|t| self.flow().policy.trigger == Some(t));
        let at = self.datapath().commit([&c, &s], at, most, trigger)?;
        if let Some(stretches) = &mut stretches {
            stretches.committed(&c, at.origin[0]);
            stretches.committed(&s, at.origin[1]);
        }
        drop(stretches);
        self.client.park();
        self.server.park();
        tracing::debug!(flow = self.flow().id, ?at, "spliced");
        Ok(at)
    }

    /// Installs new sockets, at the positions of the hosts, in a flow that was released.
    pub fn took_over(&mut self, Recreated { sockets: [x, y], ends }: Recreated) -> Action {
        self.client.reopen(x);
        self.server.reopen(y);
        self.released = None;
        (0..2).for_each(|d| self.end_stretch(d, Some(ends[d])));
        self.on(Event::Recreated(Ok(ends)))
    }

    /// Takes the flow back to control mode, from a drain or from forwarding mode (`away`: for how long).
    fn unsplice(&mut self, away: Option<Duration>) -> Event {
        let (d, [c, s]) = (self.datapath(), self.legs());
        let client_reset = d.path(&c).is_some_and(|p| p.flags & PathFlags::RST != 0);
        if let Some(away) = away.filter(|away| *away > TRACKED) {
            d.renew_parked([&c, &s], away);
        }
        let at = d.unsplice(&c, &s);
        match &at {
            Ok(at) => {
                if away.is_some() {
                    self.client.unpark(at.flags[0] & LegFlags::PROBE != 0);
                    self.server.unpark(at.flags[1] & LegFlags::PROBE != 0);
                }
                for d in 0..2 {
                    self.end_stretch(d, at.was_forwarded[d].then(|| at.bound64(d) - u64::from(at.fin[d])));
                }
                tracing::debug!(flow = self.flow().id, ?at, "unspliced");
            }
            Err(error) => tracing::warn!(flow = self.flow().id, %error, "unsplice"),
        }
        Event::Unspliced { at: at.map(Box::new), client_reset }
    }
}
