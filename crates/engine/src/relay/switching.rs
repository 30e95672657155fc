//! The switches of a flow, in either direction: into the data path by freeze, drain and commit, and back by an unsplice.

use super::{DRAIN_POLL, Relay, reset_by, stopped};
use crate::{
    FlowState, How, Refusal, Trigger, When,
    errand::Purpose,
    holder::Holding,
    pump::Failed,
    refusal,
    sessions::Begin,
    splicer::{Ears, lock},
};
use longsplice_datapath::{
    Datapath, Frozen, Half, LegFlags, Limit, PathFlags, Phase, Recreated, SwitchError, Switched, can_fit,
};
use std::{
    future::poll_fn,
    time::{Duration, Instant},
};

/// How long to wait for a switch before this one that may not be over, and for windows that may not fit yet ...
const AGAIN: Duration = Duration::from_millis(5);
/// ... for a host that was silent for too long to speak ...
const SILENT_AGAIN: Duration = Duration::from_secs(5);
/// ... and how often for windows. Then what a host sends beyond the other's is lost, and sent again.
const FIT_TRIES: u32 = 1;

/// For how long the parked sockets' connections are left to what conntrack remembers: a message or two, and a small part of its
/// smallest timeout for a connection that is not over (nf_conntrack_tcp_timeout_close_wait, 60 s).
const TRACKED: Duration = Duration::from_secs(5);

/// What an attempt to splice comes to.
pub(super) enum Attempt {
    Spliced,
    /// Refused, or taken back: the flow copies on.
    Copying,
    Ended(How),
}

/// Why a drain has not ended in forwarding.
enum Undrained {
    /// It could not.
    Refused(Refusal),
    /// Something came that is the proxy's, it was reset, or is to stop: whoever copies finds out.
    Over,
    /// A connection has failed. Its socket says so once only: to read again would find the end of a stream.
    Failed(Failed),
}

impl Relay {
    /// What of a direction may be forwarded.
    fn limit(&self, d: usize) -> Limit {
        match self.pump.dirs[d].message {
            None => Limit::None,
            Some(0) => Limit::Keep,
            Some(n) => Limit::Bytes(u32::try_from(n).unwrap_or(u32::MAX).min(Limit::MAX)),
        }
    }

    fn half(&self, d: usize) -> Half {
        let leg = if d == 0 { &self.client } else { &self.server };
        Half {
            leg: leg.tuple(),
            consumed: leg.consumed,
            produced: leg.produced,
            leftover: self.pump.dirs[d].in_hand() as u32,
            limit: self.limit(d),
        }
    }

    /// Freeze, drain, commit.
    pub(super) async fn splice(&mut self, ears: &mut Ears) -> Attempt {
        let splicer = self.splicer.clone();
        let Some(datapath) = splicer.datapath() else { return Attempt::Copying };
        if self.is_read() {
            self.stay = true;
            return Attempt::Copying;
        }
        splicer.route_events(self.flow());
        let (a, b) = (self.half(0), self.half(1));
        let fit = self.tries < FIT_TRIES && (self.pump.copied() > 0 || self.message().is_some());
        let hold = self.flow().policy.hold.then(|| Holding::of(&splicer, [a.leg, b.leg]));
        let Ok(holding) = hold.transpose() else {
            self.refuse(Refusal::Unprivileged);
            return Attempt::Copying;
        };
        let frozen = match self.freeze(datapath, &a, &b, [holding.is_some(), fit, self.is_tapped()]) {
            Ok(f) => f,
            Err(error @ (SwitchError::Busy | SwitchError::Window | SwitchError::Silent)) => {
                tracing::debug!(flow = self.flow().id, %error, "not yet");
                self.again = Some(Instant::now() + if error == SwitchError::Silent { SILENT_AGAIN } else { AGAIN });
                self.tries += 1;
                return Attempt::Copying;
            }
            Err(SwitchError::Short) => {
                tracing::debug!(flow = self.flow().id, left = ?self.pump.dirs.each_ref().map(|d| d.message), "all has come");
                self.stay = true;
                return Attempt::Copying;
            }
            Err(e) => {
                self.wanted = false;
                self.refuse_for_good(match e {
                    SwitchError::Untracked => refusal::of_untracked(datapath, &[a.leg, b.leg]),
                    e => e.into(),
                });
                return Attempt::Copying;
            }
        };
        (self.again, self.tries, self.wanted) = (None, 0, false);
        self.set_state(FlowState::Draining);
        tracing::debug!(flow = self.flow().id, ?frozen, "frozen");
        for (d, half) in [&a, &b].into_iter().enumerate() {
            if let (Limit::Bytes(n), Purpose::Message(errand)) = (half.limit, &mut self.purpose) {
                errand.goal = half.consumed + u64::from(n);
            }
            let dir = &mut self.pump.dirs[d];
            dir.limit = Some(frozen.pending[d].into());
            dir.fin = frozen.fin[d];
            self.listed.flow.now().since[d] = frozen.bound[d];
        }
        // All has come just before the freeze: what is behind it must not be waited for.
        let over = self.message().is_some_and(|m| frozen.bound[m.from] >= m.goal);
        self.stay |= over;
        let drained = match () {
            () if over => Err(Undrained::Over),
            () if !self.can_fit(&frozen.at) => Err(Undrained::Refused(Refusal::Mtu)),
            () => self.drain(datapath, ears, holding.as_ref(), frozen.at).await,
        };
        self.pump.unlimited();
        let mut failed = None;
        match drained {
            Ok(at) if self.message().is_some_and(|m| m.is_passed(&at)) => {}
            Ok(at) => match self.commit(datapath, &at) {
                Ok(at) => {
                    tracing::debug!(flow = self.flow().id, ?at, "spliced");
                    self.client.park();
                    self.server.park();
                    self.note_copied();
                    self.flow().count_splice();
                    self.set_state(FlowState::Spliced);
                    return Attempt::Spliced;
                }
                Err(e) => self.refuse(e.into()),
            },
            Err(Undrained::Refused(why)) => self.refuse(why),
            Err(Undrained::Over) => {}
            Err(Undrained::Failed(which)) => failed = Some(which.how()),
        }
        match self.unsplice(false).or(failed) {
            Some(how) => Attempt::Ended(how),
            None => Attempt::Copying,
        }
    }

    /// Where copies belong has to be known before the first one is looked at: hence the lock.
    fn freeze(&self, d: &Datapath, a: &Half, b: &Half, how: [bool; 3]) -> Result<Frozen, SwitchError> {
        let (legs, tap) = ([a.leg, b.leg], how[2]);
        if !tap {
            return d.freeze(a, b, how);
        }
        self.splicer.hear_taps();
        let mut sessions = lock(&self.splicer.inner.sessions);
        if !legs.iter().all(|leg| sessions.may_begin(leg)) {
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
            sessions.begin(&Begin { legs, from, start, seq, out, taps });
        }
        Ok(frozen)
    }

    /// Can hosts that have something to send be told of packets small enough for the other?
    fn can_fit(&self, at: &Switched) -> bool {
        let legs = [self.client.tuple(), self.server.tuple()];
        let most = at.most(legs.each_ref(), self.mtu);
        (0..2).all(|d| self.pump.dirs[d].message == Some(0) || can_fit(&legs[d], &legs[1 - d], most[1 - d]))
    }

    fn commit(&self, d: &Datapath, at: &Switched) -> Result<Switched, SwitchError> {
        let (c, s) = self.legs();
        let mut sessions = self.is_tapped().then(|| lock(&self.splicer.inner.sessions));
        let trigger = [Trigger::ClientData, Trigger::ServerData].map(|t| self.flow().policy.trigger == Some(t));
        let at = d.commit([&c, &s], at, at.most([&c, &s], self.mtu), trigger)?;
        if let Some(sessions) = &mut sessions {
            sessions.committed(&c, at.origin[0]);
            sessions.committed(&s, at.origin[1]);
        }
        Ok(at)
    }

    /// Passes on what lies before the bounds, until both directions are forwarded; `at`: how the freeze has left them.
    async fn drain(
        &mut self,
        datapath: &Datapath,
        ears: &mut Ears,
        holding: Option<&Holding>,
        at: Switched,
    ) -> Result<Switched, Undrained> {
        let (c, s) = self.legs();
        let limit = Instant::now() + self.flow().policy.drain_limit;
        let (mut passed, mut now) = (false, Ok::<_, SwitchError>(at));
        loop {
            if let (Ok(now), Some(holding)) = (&now, holding) {
                (0..2).filter(|d| now.phase[*d] != Phase::ToForwarding).for_each(|d| holding.let_go(d));
            }
            match now {
                Ok(now) if now.is_drained() => return Ok(now),
                Ok(now) if (now.flags[0] | now.flags[1]) & LegFlags::RESET != 0 => return Err(Undrained::Over),
                // one was taken back by what came beyond its limit, and nothing is on its way any more in the other
                Ok(now) if !now.phase.contains(&Phase::ToForwarding) && !now.is_forwarded() => {
                    return Err(Undrained::Over);
                }
                Ok(_) => {}
                Err(e) => return Err(Undrained::Refused(e.into())),
            }
            let left = limit.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Undrained::Refused(Refusal::DrainTimeout));
            }
            let Relay { pump, client, server, .. } = self;
            let Ears { events, stop, .. } = &mut *ears;
            tokio::select! {
                r = poll_fn(|cx| pump.poll(cx, client, server, u64::MAX)), if !passed => match r {
                    Ok(()) => passed = true,
                    Err(failed) => return Err(Undrained::Failed(failed)),
                },
                () = events.notified() => {}
                _ = stopped(stop) => return Err(Undrained::Over),
                () = tokio::time::sleep(DRAIN_POLL.min(left)) => {}
            }
            now = datapath.look(&c, &s);
        }
    }

    /// New sockets for a flow that was released; they begin where the hosts are.
    pub fn took_over(&mut self, new: Recreated) {
        let [x, y] = new.sockets;
        self.client.reopen(x);
        self.server.reopen(y);
        self.released = None;
        for (d, end) in new.ends.into_iter().enumerate() {
            self.end_session(d, Some(end));
        }
        let mut now = self.listed.flow.now();
        for (d, end) in new.ends.into_iter().enumerate() {
            let forwarded = end - now.since[d];
            now.spliced[d] += forwarded;
            now.since[d] = end;
            let (from, to) =
                if d == 0 { (&mut self.client, &mut self.server) } else { (&mut self.server, &mut self.client) };
            from.consumed += forwarded;
            to.produced += forwarded;
        }
    }

    /// Back to control mode, from forwarding (`spliced`) as well as from a drain. Some: a reset has ended the flow.
    pub(super) fn unsplice(&mut self, spliced: bool) -> Option<How> {
        let splicer = self.splicer.clone();
        let datapath = splicer.datapath()?;
        let (c, s) = self.legs();
        let reset_by_client = datapath.path(&c).is_some_and(|p| p.flags & PathFlags::RST != 0);
        let away = self.parked.filter(|_| spliced).map_or(Duration::ZERO, |since| since.elapsed());
        if away > TRACKED {
            datapath.renew_parked([&c, &s], away);
        }
        match datapath.unsplice(&c, &s) {
            Ok(at) => {
                if spliced {
                    self.client.unpark(at.flags[0] & LegFlags::PROBE != 0);
                    self.server.unpark(at.flags[1] & LegFlags::PROBE != 0);
                }
                self.take_back(&at);
                self.set_state(FlowState::Unsplicing);
                let reset = (at.flags[0] | at.flags[1]) & LegFlags::RESET != 0;
                reset.then(|| if reset_by_client { How::ClientReset } else { reset_by(&at) })
            }
            Err(error) => {
                tracing::warn!(flow = self.flow().id, %error, "unsplice");
                Some(How::Stopped)
            }
        }
    }

    /// The sockets' positions move by what was forwarded past them.
    pub(super) fn take_back(&mut self, at: &Switched) {
        (self.client.shimmed, self.server.shimmed) = (true, true);
        for d in 0..2 {
            self.end_session(d, at.was_forwarded[d].then(|| at.bound64(d) - u64::from(at.fin[d])));
        }
        let mut now = self.listed.flow.now();
        for d in 0..2 {
            if !at.was_forwarded[d] {
                continue;
            }
            let forwarded = at.bound64(d) - now.since[d];
            now.since[d] += forwarded;
            now.spliced[d] += forwarded;
            let (from, to) =
                if d == 0 { (&mut self.client, &mut self.server) } else { (&mut self.server, &mut self.client) };
            from.consumed += forwarded;
            to.produced += forwarded;
            if let Some(left) = self.pump.dirs[d].message {
                // a splice that has not paid is not tried again: the receiver keeps sending
                self.stay |=
                    matches!(self.listed.flow.policy.when, When::AfterBytes(n) if left > forwarded && forwarded < n);
                self.pump.dirs[d].passed(forwarded);
            }
            // that of a message's sender is never forwarded: it is still to be read
            if at.fin[d] && !from.eof && self.pump.dirs[d].message.is_none() {
                (from.eof, to.shut) = (true, true);
                now.spliced[d] -= 1;
                self.fin_past = true;
            }
        }
        tracing::debug!(flow = self.flow().id, ?at, "unspliced");
    }
}
