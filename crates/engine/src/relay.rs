//! One flow from hand-over to end. States and what may be done in them:
//!
//! | state | bytes | leaves by |
//! | --- | --- | --- |
//! | `Copying` | both directions copied | threshold or command: freeze; end of both streams |
//! | `Draining` | up to the bound copied, beyond it forwarded | both forwarded: commit; time limit, failure: unsplice |
//! | `Spliced` | forwarded; sockets parked | trigger, command: unsplice; both FINs acknowledged, RST, idle: end; release |
//! | `Released` | forwarded; no sockets | both FINs acknowledged, RST, idle: end |
//!
//! A drain that fails is no error: the flow copies on, with the reason in its status.

use crate::{
    Ended, FlowState, How, Leftovers, Leg, Policy, Refusal, Splicer, Trigger, When,
    pump::{Failed, Pump},
    splicer::{Command, LINGER, Registered, Stop},
};
use longsplice_datapath::{Datapath, EventKind, Half, LegFlags, PathFlags, Released, SwitchError, Switched, Tuple};
use std::{
    future::poll_fn,
    time::{Duration, Instant},
};
use tokio::sync::{mpsc, watch};

/// How old the counts in lists may be while a flow is copied.
const COUNT_EVERY: Duration = Duration::from_millis(250);
/// A switch before this one may not be over, or windows may not fit yet: how long to wait for it ...
const AGAIN: Duration = Duration::from_millis(5);
/// ... and how often for windows. Then what a host sends beyond the other's is lost, and sent again.
const FIT_TRIES: u32 = 1;
/// Events may be lost when their ring is full: phases are looked at this often while a drain is under way.
const DRAIN_POLL: Duration = Duration::from_millis(50);

/// A host that still sends segments too large so long after it was told ignores ICMP, or does not get it.
const MTU_PATIENCE: Duration = Duration::from_secs(3);

pub(crate) struct Relay<'a> {
    splicer: &'a Splicer,
    flow: &'a Registered,
    policy: &'a Policy,
    client: Leg,
    server: Leg,
    pump: Pump,
    orders: mpsc::UnboundedReceiver<Command>,
    events: Option<mpsc::UnboundedReceiver<EventKind>>,
    stop: watch::Receiver<Stop>,
    /// The wire differs from the sockets: entries must outlive them.
    shimmed: bool,
    /// An operator wants it in control mode, or spliced whatever the policy says.
    stay: bool,
    wanted: bool,
    /// The data path could not splice just now: the next try, and how many there were.
    again: Option<Instant>,
    tries: u32,
    /// A FIN was forwarded past its socket: the sockets will not see the end of that direction, or would repeat it.
    fin_past: bool,
    /// No sockets are left.
    released: Option<[Released; 2]>,
}

/// What ends a stretch of copying.
enum Copied {
    Ended(How),
    Splice,
}

/// What an attempt to splice comes to.
enum Attempt {
    Spliced,
    /// Refused, or taken back: the flow copies on.
    Copying,
    Ended(How),
}

/// What ends a stretch of forwarding.
enum Forwarded {
    Ended(How),
    Unsplice,
    /// The flow has new sockets, in control mode.
    Recreated,
}

/// Waits for an order; for ever once the flow's status is gone.
async fn order(rx: &mut mpsc::UnboundedReceiver<Command>) -> Command {
    match rx.recv().await {
        Some(c) => c,
        None => std::future::pending().await,
    }
}

async fn stopped(rx: &mut watch::Receiver<Stop>) -> Stop {
    let told = rx.wait_for(|s| *s != Stop::Go).await.map(|s| *s);
    match told {
        Ok(s) => s,
        Err(_) => std::future::pending().await,
    }
}

impl<'a> Relay<'a> {
    pub fn new(
        splicer: &'a Splicer,
        flow: &'a Registered,
        policy: &'a Policy,
        client: Leg,
        server: Leg,
        left: Leftovers,
        orders: mpsc::UnboundedReceiver<Command>,
    ) -> Relay<'a> {
        let pump = Pump::new(&left.to_server, &left.to_client);
        let stop = splicer.stop_signal();
        Relay {
            splicer,
            flow,
            policy,
            client,
            server,
            pump,
            orders,
            events: None,
            stop,
            shimmed: false,
            stay: false,
            wanted: false,
            again: None,
            tries: 0,
            fin_past: false,
            released: None,
        }
    }

    fn set_state(&self, state: FlowState) {
        let mut now = self.flow.shared.now();
        tracing::debug!(flow = self.flow.shared.id, "{:?} -> {:?}", now.state, state);
        now.state = state;
    }

    fn refuse(&self, why: Refusal) {
        tracing::debug!(flow = self.flow.shared.id, reason = %why, "not spliced");
        self.flow.shared.now().refusal = Some(why);
    }

    fn legs(&self) -> (Tuple, Tuple) {
        (self.flow.shared.client, self.flow.shared.server)
    }

    /// May the flow be spliced, as far as one can know before trying?
    fn spliceable(&self) -> bool {
        let (c, s) = self.legs();
        if self.flow.shared.now().refusal.is_some() {
            return false;
        }
        if self.policy.when == When::Never {
            self.refuse(Refusal::Policy);
            return false;
        }
        if c.local.ip().is_loopback() || s.local.ip().is_loopback() {
            self.refuse(Refusal::Loopback);
            return false;
        }
        true
    }

    pub async fn run(mut self) -> Ended {
        let how = loop {
            match self.copy().await {
                Copied::Ended(how) => break how,
                Copied::Splice => {}
            }
            match self.splice().await {
                Attempt::Spliced => {}
                Attempt::Copying => continue,
                Attempt::Ended(how) => break how,
            }
            match self.forward().await {
                Forwarded::Ended(how) => return self.finish(how, true),
                Forwarded::Recreated => {}
                Forwarded::Unsplice => {
                    if let Some(how) = self.unsplice(true) {
                        break how;
                    }
                }
            }
        };
        if self.fin_past && how == How::Closed {
            self.await_fins().await;
        }
        self.finish(how, false)
    }

    /// Until both hosts have acknowledged the other's FIN; then no socket has anything to add.
    async fn await_fins(&mut self) {
        let Some(datapath) = self.splicer.datapath() else { return };
        let (c, s) = self.legs();
        let limit = Instant::now() + LINGER;
        while Instant::now() < limit {
            match datapath.look(&c, &s) {
                Ok(at) if at.flags[0] & at.flags[1] & LegFlags::FIN_ACKED == 0 => {}
                _ => break,
            }
            tokio::time::sleep(DRAIN_POLL).await;
        }
        self.client.close_silently();
        self.server.close_silently();
    }

    /// Control mode. Returns at the end of the flow, or when it is to be spliced.
    async fn copy(&mut self) -> Copied {
        self.set_state(FlowState::Copying);
        let mut enough = match self.policy.when {
            _ if self.stay || !self.spliceable() => u64::MAX,
            _ if self.wanted => 0,
            When::Never => u64::MAX,
            When::AtOnce => 0,
            When::AfterBytes(n) => n,
        };
        if enough == u64::MAX {
            self.pump.through_pipes();
        }
        loop {
            let due = self.pump.copied() >= enough;
            let wait = self.again.map_or(Duration::ZERO, |t| t.saturating_duration_since(Instant::now()));
            if due && wait.is_zero() {
                return Copied::Splice;
            }
            let Relay { pump, client, server, orders, stop, .. } = self;
            tokio::select! {
                r = poll_fn(|cx| pump.poll(cx, client, server, if due { u64::MAX } else { enough })) => {
                    self.note_copied();
                    match r {
                        Err(Failed::Client) => return Copied::Ended(How::ClientReset),
                        Err(Failed::Server) => return Copied::Ended(How::ServerReset),
                        Ok(()) if self.pump.ended(&self.client, &self.server) => return Copied::Ended(How::Closed),
                        Ok(()) => {}
                    }
                }
                c = order(orders) => match c {
                    Command::Splice => {
                        self.stay = false;
                        self.flow.shared.now().refusal = self.splicer.refusal();
                        if self.spliceable() {
                            (self.wanted, enough) = (true, 0);
                        }
                    }
                    Command::Unsplice => {
                        (self.stay, self.wanted, enough) = (true, false, u64::MAX);
                    }
                    Command::Release => {}
                },
                _ = stopped(stop) => return Copied::Ended(How::Stopped),
                () = tokio::time::sleep(wait), if due => {}
                () = tokio::time::sleep(COUNT_EVERY) => self.note_copied(),
            }
        }
    }

    fn note_copied(&self) {
        self.flow.shared.now().copied = [self.pump.dirs[0].copied, self.pump.dirs[1].copied];
    }

    fn half(leg: &Leg, in_hand: usize) -> Half {
        Half { leg: leg.tuple(), consumed: leg.consumed, produced: leg.produced, leftover: in_hand as u32 }
    }

    /// Freeze, drain, commit.
    async fn splice(&mut self) -> Attempt {
        let Some(datapath) = self.splicer.datapath() else { return Attempt::Copying };
        let (c, s) = self.legs();
        let mut events = self.flow.events();
        let a = Self::half(&self.client, self.pump.dirs[0].in_hand());
        let b = Self::half(&self.server, self.pump.dirs[1].in_hand());
        let fit = self.tries < FIT_TRIES && self.pump.copied() > 0;
        let frozen = match datapath.freeze(&a, &b, self.policy.hold, fit) {
            Ok(f) => f,
            Err(SwitchError::Busy | SwitchError::Window) => {
                self.again = Some(Instant::now() + AGAIN);
                self.tries += 1;
                return Attempt::Copying;
            }
            Err(e) => {
                self.wanted = false;
                self.refuse(refusal(e));
                return Attempt::Copying;
            }
        };
        (self.again, self.tries, self.wanted) = (None, 0, false);
        self.set_state(FlowState::Draining);
        tracing::debug!(flow = self.flow.shared.id, ?frozen, "frozen");
        for (d, half) in [&a, &b].into_iter().enumerate() {
            let dir = &mut self.pump.dirs[d];
            dir.limit = Some(frozen.pending[d].into());
            dir.fin = frozen.fin[d];
            self.flow.shared.now().since[d] = half.consumed + u64::from(frozen.pending[d]) + u64::from(frozen.fin[d]);
        }
        let drained = self.drain(datapath, &mut events).await;
        self.pump.unlimited();
        match drained {
            Ok(()) => match datapath.commit(
                &c,
                &s,
                [Trigger::ClientData, Trigger::ServerData].map(|t| self.policy.trigger == Some(t)),
            ) {
                Ok(at) => {
                    tracing::debug!(flow = self.flow.shared.id, ?at, "spliced");
                    self.events = Some(events);
                    self.client.park(true);
                    self.server.park(true);
                    for d in &mut self.pump.dirs {
                        d.park();
                    }
                    self.note_copied();
                    self.flow.shared.now().splices += 1;
                    self.set_state(FlowState::Spliced);
                    return Attempt::Spliced;
                }
                Err(e) => self.refuse(refusal(e)),
            },
            Err(Some(why)) => self.refuse(why),
            Err(None) => {}
        }
        match self.unsplice(false) {
            Some(how) => Attempt::Ended(how),
            None => Attempt::Copying,
        }
    }

    /// Passes on what lies before the bounds, until both directions are forwarded. Err: why not, None if a connection failed.
    async fn drain(
        &mut self,
        datapath: &Datapath,
        events: &mut mpsc::UnboundedReceiver<EventKind>,
    ) -> Result<(), Option<Refusal>> {
        const FORWARDED: u8 = 2;
        let (c, s) = self.legs();
        let limit = Instant::now() + self.policy.drain_limit;
        let mut passed = false;
        loop {
            match datapath.look(&c, &s) {
                Ok(now) if now.phase == [FORWARDED; 2] => return Ok(()),
                Ok(now) if (now.flags[0] | now.flags[1]) & LegFlags::RESET != 0 => return Err(None),
                Ok(_) => {}
                Err(e) => return Err(Some(refusal(e))),
            }
            let left = limit.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Some(Refusal::DrainTimeout));
            }
            let Relay { pump, client, server, stop, .. } = self;
            tokio::select! {
                r = poll_fn(|cx| pump.poll(cx, client, server, u64::MAX)), if !passed => match r {
                    Ok(()) => passed = true,
                    Err(_) => return Err(None),
                },
                _ = events.recv() => {}
                _ = stopped(stop) => return Err(None),
                () = tokio::time::sleep(DRAIN_POLL.min(left)) => {}
            }
        }
    }

    /// Forwarding mode: waits.
    async fn forward(&mut self) -> Forwarded {
        let Some(datapath) = self.splicer.datapath() else { return Forwarded::Unsplice };
        let began = Instant::now();
        let mut last = (Instant::now(), None);
        let patience = match self.policy.trigger {
            Some(Trigger::Idle(after)) => after.min(self.policy.idle_limit),
            _ => self.policy.idle_limit,
        };
        let poll = (patience / 8).clamp(Duration::from_millis(100), Duration::from_secs(30));
        let release = self.policy.release_after.unwrap_or(Duration::MAX);
        let mut oversize = None;
        loop {
            let due = release.saturating_sub(began.elapsed());
            let events = self.events.as_mut().expect("set by splice()");
            let stop = &mut self.stop;
            tokio::select! {
                e = events.recv() => match e {
                    Some(EventKind::Triggered) => {
                        self.stay = true;
                        return Forwarded::Unsplice;
                    }
                    Some(EventKind::Oversize) if oversize.get_or_insert_with(Instant::now).elapsed() > MTU_PATIENCE => {
                        self.refuse(Refusal::Mtu);
                        if let Some(back) = self.way_back(datapath).await {
                            return back;
                        }
                    }
                    _ => {}
                },
                o = order(&mut self.orders) => match o {
                    Command::Unsplice => if let Some(back) = self.way_back(datapath).await {
                        self.stay = true;
                        return back;
                    },
                    Command::Splice => {}
                    Command::Release => self.release(datapath),
                },
                s = stopped(stop) => {
                    return Forwarded::Ended(if s == Stop::Leave { How::Left } else { How::Stopped });
                }
                () = tokio::time::sleep(due), if self.released.is_none() => self.release(datapath),
                () = tokio::time::sleep(poll) => {}
            }
            let sign = match self.life(datapath) {
                Ok(sign) => Some(sign),
                Err(how) => return Forwarded::Ended(how),
            };
            if last.1 != sign {
                last = (Instant::now(), sign);
                continue;
            }
            let idle = last.0.elapsed();
            if idle >= self.policy.idle_limit {
                return Forwarded::Ended(How::Idle);
            }
            if matches!(self.policy.trigger, Some(Trigger::Idle(after)) if idle >= after)
                && let Some(back) = self.way_back(datapath).await
            {
                self.stay = true;
                return back;
            }
        }
    }

    /// Does the flow still live? A sign that changes with every segment, or how it has ended.
    fn life(&self, datapath: &Datapath) -> Result<[(u32, u32, u8); 2], How> {
        let (c, s) = self.legs();
        let (Some(pc), Some(ps)) = (datapath.path(&c), datapath.path(&s)) else {
            return Err(How::Stopped); // somebody has flushed the tables
        };
        if (pc.flags | ps.flags) & PathFlags::DEAD != 0 {
            if pc.flags & ps.flags & PathFlags::FIN != 0 {
                return Err(How::Closed); // a late segment met a host that had forgotten the connection
            }
            return Err(if pc.flags & PathFlags::RST != 0 { How::ClientReset } else { How::ServerReset });
        }
        if pc.flags & ps.flags & PathFlags::FIN_ACKED != 0 {
            return Err(How::Closed);
        }
        Ok([pc, ps].map(|p| (p.end, p.max_ack, p.seen)))
    }

    /// Closes the parked sockets; the flow goes on without.
    fn release(&mut self, datapath: &Datapath) {
        if self.released.is_some() {
            return;
        }
        self.client.close_silently();
        self.server.close_silently();
        let (c, s) = self.legs();
        self.released = datapath.release(&c).zip(datapath.release(&s)).map(|(a, b)| [a, b]);
        *self.flow.shared.released() = self.released;
        self.set_state(FlowState::Released);
    }

    /// By unsplicing to the parked sockets; a released flow gets new ones, as soon as it is idle for an instant. None: it is
    /// never idle, and stays as it is.
    async fn way_back(&mut self, datapath: &Datapath) -> Option<Forwarded> {
        let Some([a, b]) = self.released else { return Some(Forwarded::Unsplice) };
        let limit = Instant::now() + self.policy.drain_limit;
        while Instant::now() < limit {
            let sockets = match datapath.recreate(&a, &b) {
                Ok(sockets) => sockets,
                Err(SwitchError::Busy) => {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    continue;
                }
                Err(error) => {
                    tracing::warn!(flow = self.flow.shared.id, %error, "sockets of a released flow could not be made");
                    return None;
                }
            };
            let [x, y] = sockets;
            if let Err(error) = self.client.reopen(x).and_then(|()| self.server.reopen(y)) {
                // out of descriptors: both sockets are closed now, which ends both connections
                tracing::error!(flow = self.flow.shared.id, %error, "recreated sockets are lost");
                return Some(Forwarded::Ended(How::Stopped));
            }
            self.took_over(datapath, [a, b]);
            return Some(Forwarded::Recreated);
        }
        tracing::info!(flow = self.flow.shared.id, "never idle: stays released");
        None
    }

    /// The new sockets begin where the hosts are.
    fn took_over(&mut self, datapath: &Datapath, old: [Released; 2]) {
        self.released = None;
        *self.flow.shared.released() = None;
        let mut now = self.flow.shared.now();
        for (d, old) in old.iter().enumerate() {
            let Some(end) = datapath.released_end(old) else { continue };
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
    fn unsplice(&mut self, spliced: bool) -> Option<How> {
        let datapath = self.splicer.datapath()?;
        let (c, s) = self.legs();
        let reset_by_client = datapath.path(&c).is_some_and(|p| p.flags & PathFlags::RST != 0);
        match datapath.unsplice(&c, &s) {
            Ok(at) => {
                if spliced {
                    self.client.park(false);
                    self.server.park(false);
                }
                self.take_back(&at, spliced);
                self.set_state(FlowState::Unsplicing);
                let reset = (at.flags[0] | at.flags[1]) & LegFlags::RESET != 0;
                let by_client = reset_by_client || at.flags[0] & LegFlags::RESET_IN != 0;
                reset.then_some(if by_client { How::ClientReset } else { How::ServerReset })
            }
            Err(error) => {
                tracing::warn!(flow = self.flow.shared.id, %error, "unsplice");
                Some(How::Stopped)
            }
        }
    }

    /// The sockets' positions move by what was forwarded past them. After a trigger the data path has left forwarding mode
    /// by itself: then the phases tell nothing, but both directions were `spliced`.
    fn take_back(&mut self, at: &Switched, spliced: bool) {
        self.shimmed = true;
        let mut now = self.flow.shared.now();
        for d in 0..2 {
            if !spliced && !at.was_forwarded[d] {
                continue;
            }
            let forwarded = at.bound64(d) - now.since[d];
            now.since[d] += forwarded;
            now.spliced[d] += forwarded;
            let (from, to) =
                if d == 0 { (&mut self.client, &mut self.server) } else { (&mut self.server, &mut self.client) };
            from.consumed += forwarded;
            to.produced += forwarded;
            if at.fin[d] && !from.eof {
                (from.eof, to.shut) = (true, true);
                now.spliced[d] -= 1;
                self.fin_past = true;
            }
        }
        tracing::debug!(flow = self.flow.shared.id, ?at, "unspliced");
    }

    /// Counts, closes, and sees to it that the entries go when nobody needs them any more.
    fn finish(mut self, how: How, spliced: bool) -> Ended {
        if spliced && matches!(how, How::Stopped | How::Idle) && self.released.is_none() {
            self.unsplice(true); // the sockets tell the hosts
            return self.finish(how, false);
        }
        let (c, s) = self.legs();
        self.note_copied();
        let datapath = self.splicer.datapath();
        if spliced && let Some(d) = datapath {
            let end = self.flow.shared.ends(d);
            let mut now = self.flow.shared.now();
            for (i, leg) in [&c, &s].into_iter().enumerate() {
                let fin = u64::from(d.path(leg).is_some_and(|p| p.flags & PathFlags::FIN != 0));
                let before = now.since[i];
                now.spliced[i] += end.map_or(0, |e| (e[i] - before).saturating_sub(fin));
            }
        }
        let now = *self.flow.shared.now();
        let ended = Ended {
            id: self.flow.shared.id,
            how,
            bytes_up: now.copied[0] + now.spliced[0],
            bytes_down: now.copied[1] + now.spliced[1],
            spliced_up: now.spliced[0],
            spliced_down: now.spliced[1],
            splices: now.splices,
            refusal: now.refusal.or((now.splices == 0 && how == How::Closed).then_some(Refusal::Short)),
            duration_ms: self.flow.shared.began.elapsed().as_millis() as u64,
        };
        let linger = spliced || self.shimmed;
        match (how, spliced) {
            (How::Closed | How::Left, false) => {}
            (_, false) => {
                self.client.abort();
                self.server.abort();
            }
            // no socket may speak for a flow that is forwarded
            (_, true) => {
                self.client.close_silently();
                self.server.close_silently();
            }
        }
        if how != How::Left && datapath.is_some() {
            let splicer = self.splicer.clone();
            tokio::spawn(async move {
                let Some(d) = splicer.datapath() else { return };
                if linger {
                    tokio::time::sleep(LINGER).await;
                    d.forget_ended(&c);
                    d.forget_ended(&s);
                } else {
                    d.forget(&c);
                    d.forget(&s);
                }
            });
        }
        ended
    }
}

fn refusal(e: SwitchError) -> Refusal {
    match e {
        SwitchError::Untracked => Refusal::Untracked,
        SwitchError::Busy | SwitchError::Window => Refusal::DrainTimeout,
        SwitchError::Closing => Refusal::Closing,
        SwitchError::Fragments => Refusal::Fragments,
        SwitchError::Mismatch => Refusal::Mismatch,
        SwitchError::Full => Refusal::TableFull,
        SwitchError::Run(_) => Refusal::Unprivileged,
    }
}
