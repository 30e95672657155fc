//! One flow while bytes pass through this process, and its end. States and what may be done in them:
//!
//! | state | bytes | leaves by |
//! | --- | --- | --- |
//! | `Copying` | both directions copied | threshold or command: freeze; end of both streams |
//! | `Draining` | up to the bound copied, beyond it forwarded | both forwarded: commit; time limit, failure: unsplice |
//!
//! A drain that fails is no error: the flow copies on, with the reason in its status. With the commit the task ends: what
//! must be remembered of a flow that is forwarded is a [`Kept`], and the [keeper](crate::keeper) looks after it. What it
//! gives back begins a new task.

use crate::{
    Ended, FlowState, How, Leftovers, Leg, Passed, Refusal, Splicer, Trigger, When,
    errand::{Errand, Purpose},
    holder::Holding,
    keeper::{Kept, Note},
    lingering::LINGER,
    pump::{Failed, Pump},
    sessions::Begin,
    splicer::{Command, Ears, Flow, Listed, Place, Stop, ends, lock},
};
use bytes::Bytes;
use longsplice_datapath::{Datapath, Frozen, Half, LegFlags, Limit, PathFlags, Released, SwitchError, Switched, Tuple};
use std::{
    future::poll_fn,
    os::fd::OwnedFd,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
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

pub(crate) struct Relay {
    splicer: Splicer,
    listed: Listed,
    pub client: Leg,
    pub server: Leg,
    pump: Pump,
    purpose: Purpose,
    /// It is to be in control mode, or spliced whatever the policy says.
    pub stay: bool,
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

/// Why a drain has not ended in forwarding.
enum Undrained {
    /// It could not.
    Refused(Refusal),
    /// Something came that is the proxy's, it was reset, or is to stop: whoever copies finds out.
    Over,
    /// A connection has failed. Its socket says so once only: to read again would find the end of a stream.
    Failed(Failed),
}

/// What an attempt to splice comes to.
enum Attempt {
    Spliced,
    /// Refused, or taken back: the flow copies on.
    Copying,
    Ended(How),
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

impl Relay {
    pub fn new(
        splicer: &Splicer,
        listed: Listed,
        client: Leg,
        server: Leg,
        left: &Leftovers,
        purpose: Purpose,
    ) -> Relay {
        let mut pump = Pump::new(&left.to_server, &left.to_client);
        if let Purpose::Message(errand) = &purpose {
            pump.dirs[errand.from].message = Some(errand.left);
            pump.dirs[1 - errand.from].message = Some(0);
        }
        Relay {
            splicer: splicer.clone(),
            listed,
            client,
            server,
            pump,
            purpose,
            stay: false,
            wanted: false,
            again: None,
            tries: 0,
            fin_past: false,
            released: None,
        }
    }

    /// A flow that the keeper gives back.
    pub fn revive(splicer: &Splicer, flow: Arc<Flow>, kept: Kept) -> Relay {
        let (c, s) = (flow.client, flow.server);
        let Kept { sides: [a, b], purpose, stay, fin_past, released, .. } = kept;
        let mut client = a.leg(&c);
        client.announced.clone_from(&flow.announced);
        let listed = Listed::again(splicer, flow);
        let mut r = Relay::new(splicer, listed, client, b.leg(&s), &Leftovers::default(), purpose);
        for (d, copied) in r.pump.dirs.iter_mut().zip(r.listed.flow.now().copied) {
            d.copied = copied;
        }
        Relay { stay, fin_past, released, ..r }
    }

    /// Leaves the flow to the keeper, with the orders that nobody has heard.
    fn keep(self, mut ears: Ears) {
        let Relay { splicer, listed, client, server, pump, mut purpose, stay, fin_past, .. } = self;
        if let Purpose::Message(errand) = &mut purpose {
            errand.left = pump.dirs[errand.from].message.unwrap_or(0);
        }
        let flow = listed.keep();
        let kept = Kept::new([client.side(), server.side()], purpose, (stay, fin_past));
        let soon = kept.wants_look_soon(&flow);
        let mut place = flow.place();
        *place = Place::Kept(Box::new(kept));
        // what the task was told and has not heard is found by looking
        let heard = pin!(ears.events.notified()).poll(&mut Context::from_waker(Waker::noop())).is_ready();
        if soon || heard {
            splicer.tell(Note::Kept(flow.id));
        } else {
            splicer.tell_some_time(Note::Kept(flow.id));
        }
        while let Ok(command) = ears.orders.try_recv() {
            splicer.tell(Note::Command(flow.id, command));
        }
    }

    fn flow(&self) -> &Flow {
        &self.listed.flow
    }

    fn set_state(&self, state: FlowState) {
        self.flow().set_state(state);
    }

    fn refuse(&self, why: Refusal) {
        self.flow().refuse(why);
    }

    /// For good: nothing but this flow needs what the data path knows of its legs, and others could be spliced instead. Legs of a
    /// message go back to whoever had them, and may join others.
    fn refuse_for_good(&self, why: Refusal) {
        self.refuse(why);
        let Some(d) = self.splicer.datapath() else { return };
        if self.message().is_some() || self.client.shimmed || self.server.shimmed {
            return;
        }
        let (c, s) = self.legs();
        for (leg, gone) in [&self.client, &self.server].into_iter().zip(d.give_back([&c, &s])) {
            if gone {
                leg.refuse(why);
            }
        }
    }

    fn legs(&self) -> (Tuple, Tuple) {
        (self.flow().client, self.flow().server)
    }

    /// May the flow be spliced, as far as one can know before trying?
    fn spliceable(&self) -> bool {
        let (c, s) = self.legs();
        if self.flow().now().refusal.is_some() {
            return false;
        }
        let loopback = c.local.ip().is_loopback() || s.local.ip().is_loopback();
        let refusal = match self.flow().policy.when {
            When::Never => Some(Refusal::Policy),
            _ if loopback => Some(Refusal::Loopback),
            _ => self.client.refusal().or(self.server.refusal()),
        };
        refusal.inspect(|why| self.refuse_for_good(*why)).is_none()
    }

    /// Copies until the flow ends, or the keeper takes it.
    pub async fn run(mut self, mut ears: Ears) {
        if let Err(error) = self.client.attend().and_then(|()| self.server.attend()) {
            // out of memory or watches: both sockets are closed now, which ends both connections
            tracing::error!(flow = self.flow().id, %error, "the sockets of a flow are lost");
            return self.finish(How::Stopped, false);
        }
        let how = loop {
            match self.copy(&mut ears).await {
                Copied::Ended(how) => break how,
                Copied::Splice => {}
            }
            match self.splice(&mut ears).await {
                Attempt::Spliced => return self.keep(ears),
                Attempt::Copying => {}
                Attempt::Ended(how) => break how,
            }
        };
        if let (How::Closed, Purpose::Message(_)) = (how, &self.purpose) {
            let how = self.settle(&mut ears).await;
            return self.finish(how, false);
        }
        if self.fin_past && how == How::Closed {
            self.await_fins().await;
        }
        self.finish(how, false);
    }

    /// A message has been passed on. What was forwarded of it belongs to the data path until it is acknowledged; not before then
    /// may the legs part.
    async fn settle(&mut self, ears: &mut Ears) -> How {
        const CONTROL: u8 = 0;
        let splicer = self.splicer.clone();
        let (c, s) = self.legs();
        let limit = Instant::now() + self.flow().policy.idle_limit;
        let mut watch = true;
        while let Some(datapath) = splicer.datapath().filter(|_| self.client.shimmed) {
            match datapath.look(&c, &s) {
                Ok(at) if (at.flags[0] | at.flags[1]) & LegFlags::RESET != 0 => return reset_by(&at),
                Ok(at) if at.phase == [CONTROL; 2] => break,
                Ok(_) if Instant::now() < limit => {}
                Ok(_) => return How::Idle,
                Err(_) => return How::Stopped,
            }
            let receiver = if self.message().is_some_and(|m| m.from == 0) { &self.server } else { &self.client };
            let Ears { events, stop, .. } = &mut *ears;
            tokio::select! {
                () = events.notified() => {}
                // its next message has brought the last acknowledgement along
                () = poll_fn(|cx| receiver.poll_heard(cx)), if watch => watch = false,
                _ = stopped(stop) => return How::Stopped,
                () = tokio::time::sleep(DRAIN_POLL) => {}
            }
        }
        How::Passed
    }

    /// Takes a spliced flow back, and copies on.
    pub async fn unsplice_and_run(mut self, ears: Ears) {
        match self.unsplice(true) {
            Some(how) => self.finish(how, false),
            None => self.run(ears).await,
        }
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
    async fn copy(&mut self, ears: &mut Ears) -> Copied {
        self.set_state(FlowState::Copying);
        let mut moved = (self.pump.copied(), Instant::now());
        let mut enough = match self.flow().policy.when {
            _ if self.stay || self.is_read() || !self.spliceable() => u64::MAX,
            _ if self.wanted => 0,
            When::AfterBytes(n) if self.message().is_some() => self.worth(n),
            When::Never => u64::MAX,
            When::AtOnce => 0,
            When::AfterBytes(n) => n,
        };
        let heed = self.message().is_some_and(|m| m.heed);
        if enough == u64::MAX {
            self.client.unclamp();
            self.server.unclamp();
        }
        if enough == u64::MAX && !heed && !self.is_tapped() {
            self.pump.through_pipes();
        }
        loop {
            let due = self.pump.copied() >= enough;
            let wait = self.again.map_or(Duration::ZERO, |t| t.saturating_duration_since(Instant::now()));
            if due && wait.is_zero() {
                match self.flow().policy.when {
                    When::AfterBytes(n) if n > 0 && !self.wanted && self.message().is_none() => {
                        match self.ends_now().await {
                            Ok(false) => return Copied::Splice,
                            Ok(true) => enough = self.pump.copied() + n,
                            Err(failed) => return Copied::Ended(failed.how()),
                        }
                    }
                    _ => return Copied::Splice,
                }
                continue;
            }
            let (mut heard, upload) = (false, self.message().is_some_and(|m| m.from == 0));
            let Relay { pump, client, server, .. } = self;
            let Ears { orders, stop, .. } = ears;
            tokio::select! {
                r = poll_fn(|cx| {
                    let receiver = if upload { &*server } else { &*client };
                    heard = heed && receiver.poll_heard(cx).is_ready();
                    if heard { Poll::Ready(Ok(())) } else { pump.poll(cx, client, server, if due { u64::MAX } else { enough }) }
                }) => {
                    self.note_copied();
                    match r {
                        Err(failed) => return Copied::Ended(failed.how()),
                        Ok(()) if heard => return Copied::Ended(How::Closed),
                        Ok(()) if self.pump.ended(&self.client, &self.server) => return Copied::Ended(How::Closed),
                        Ok(()) => {}
                    }
                }
                c = order(orders) => match c {
                    Command::Splice => {
                        self.stay = false;
                        self.flow().now().refusal = self.splicer.refusal();
                        if self.spliceable() {
                            (self.wanted, enough) = (true, 0);
                        }
                    }
                    Command::Unsplice => {
                        (self.stay, self.wanted, enough) = (true, false, u64::MAX);
                    }
                    Command::Release => {}
                    Command::Reset => return Copied::Ended(How::Stopped),
                },
                _ = stopped(stop) => return Copied::Ended(How::Stopped),
                () = tokio::time::sleep(wait), if due => {}
                () = tokio::time::sleep(COUNT_EVERY) => {
                    self.note_copied();
                    if self.pump.copied() != moved.0 {
                        moved = (self.pump.copied(), Instant::now());
                    } else if self.message().is_some() && moved.1.elapsed() >= self.flow().policy.idle_limit {
                        return Copied::Ended(How::Idle);
                    }
                }
            }
        }
    }

    /// Looks once behind the bytes that were enough. A stream that ends there has nothing left to splice for; what the
    /// other brings has to be worth it by itself.
    async fn ends_now(&mut self) -> Result<bool, Failed> {
        let Relay { pump, client, server, .. } = self;
        let (before, most) = ([client.eof, server.eof], pump.copied() + 1);
        poll_fn(|cx| match pump.poll(cx, client, server, most) {
            Poll::Ready(Err(failed)) => Poll::Ready(Err(failed)),
            _ => Poll::Ready(Ok(())),
        })
        .await?;
        let ends = [client.eof, server.eof] != before;
        self.note_copied();
        Ok(ends)
    }

    fn message(&self) -> Option<&Errand> {
        match &self.purpose {
            Purpose::Message(errand) => Some(errand),
            Purpose::Streams(_) => None,
        }
    }

    /// Is nothing left of a message to splice for?
    fn is_read(&self) -> bool {
        let [up, down] = &self.pump.dirs;
        up.message_is_read(&self.client) && down.message_is_read(&self.server)
    }

    /// So many bytes have to be copied before a message is spliced: none if it is known to be long enough.
    fn worth(&self, threshold: u64) -> u64 {
        let left = self.pump.dirs.iter().filter_map(|d| d.message).max();
        match left {
            Some(u64::MAX) => threshold,
            Some(left) if left >= threshold => 0,
            _ => u64::MAX,
        }
    }

    /// What of a direction may be forwarded.
    fn limit(&self, d: usize) -> Limit {
        match self.pump.dirs[d].message {
            None => Limit::None,
            Some(0) => Limit::Keep,
            Some(n) => Limit::Bytes(u32::try_from(n).unwrap_or(u32::MAX).min(Limit::MAX)),
        }
    }

    fn note_copied(&self) {
        self.flow().now().copied = [self.pump.dirs[0].copied, self.pump.dirs[1].copied];
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
    async fn splice(&mut self, ears: &mut Ears) -> Attempt {
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
            Err(error @ (SwitchError::Busy | SwitchError::Window)) => {
                tracing::debug!(flow = self.flow().id, %error, "not yet");
                self.again = Some(Instant::now() + AGAIN);
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
                self.refuse_for_good(e.into());
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
        let drained =
            if over { Err(Undrained::Over) } else { self.drain(datapath, ears, holding.as_ref(), frozen.at).await };
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
                    self.flow().now().splices += 1;
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

    fn is_tapped(&self) -> bool {
        self.client.tap.is_some() || self.server.tap.is_some()
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

    fn commit(&self, d: &Datapath, at: &Switched) -> Result<Switched, SwitchError> {
        let (c, s) = self.legs();
        let mut sessions = self.is_tapped().then(|| lock(&self.splicer.inner.sessions));
        let trigger = [Trigger::ClientData, Trigger::ServerData].map(|t| self.flow().policy.trigger == Some(t));
        let at = d.commit(&c, &s, at, trigger)?;
        if let Some(sessions) = &mut sessions {
            sessions.committed(&c, at.origin[0]);
            sessions.committed(&s, at.origin[1]);
        }
        Ok(at)
    }

    /// The flow goes on without its reader.
    fn untap(&self) {
        let (c, s) = self.legs();
        for leg in [c, s].iter().filter(|_| self.is_tapped()) {
            if let Some(Err(error)) = self.splicer.datapath().map(|d| d.untap(leg)) {
                tracing::warn!(?leg, %error, "copies are made for nobody");
            }
        }
    }

    /// From here on a tap gets bytes of this direction from control mode again. See `Sessions::end`.
    fn end_session(&self, d: usize, end: Option<u64>) {
        if self.is_tapped() {
            let (c, s) = self.legs();
            lock(&self.splicer.inner.sessions).end(if d == 0 { &c } else { &s }, end);
        }
    }

    /// Passes on what lies before the bounds, until both directions are forwarded; `at`: how the freeze has left them.
    async fn drain(
        &mut self,
        datapath: &Datapath,
        ears: &mut Ears,
        holding: Option<&Holding>,
        at: Switched,
    ) -> Result<Switched, Undrained> {
        const DRAINING: u8 = 1;
        let (c, s) = self.legs();
        let limit = Instant::now() + self.flow().policy.drain_limit;
        let (mut passed, mut now) = (false, Ok::<_, SwitchError>(at));
        loop {
            if let (Ok(now), Some(holding)) = (&now, holding) {
                (0..2).filter(|d| now.phase[*d] != DRAINING).for_each(|d| holding.let_go(d));
            }
            match now {
                Ok(now) if now.is_drained() => return Ok(now),
                Ok(now) if (now.flags[0] | now.flags[1]) & LegFlags::RESET != 0 => return Err(Undrained::Over),
                // one was taken back by what came beyond its limit, and nothing is on its way any more in the other
                Ok(now) if !now.phase.contains(&DRAINING) && !now.is_forwarded() => return Err(Undrained::Over),
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
    pub fn took_over(&mut self, datapath: &Datapath, sockets: [OwnedFd; 2]) {
        let [x, y] = sockets;
        self.client.reopen(x);
        self.server.reopen(y);
        let Some(old) = self.released.take() else { return };
        let (c, s) = self.legs();
        for (d, (leg, old)) in [c, s].iter().zip(&old).enumerate() {
            self.end_session(d, datapath.released_end(leg, old));
        }
        let mut now = self.listed.flow.now();
        for (d, (leg, old)) in [c, s].iter().zip(&old).enumerate() {
            let Some(end) = datapath.released_end(leg, old) else { continue };
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
        let splicer = self.splicer.clone();
        let datapath = splicer.datapath()?;
        let (c, s) = self.legs();
        let reset_by_client = datapath.path(&c).is_some_and(|p| p.flags & PathFlags::RST != 0);
        match datapath.unsplice(&c, &s) {
            Ok(at) => {
                if spliced {
                    self.client.unpark();
                    self.server.unpark();
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
    fn take_back(&mut self, at: &Switched) {
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

    /// Counts, closes, tells, and sees to it that the entries go when nobody needs them any more.
    pub fn finish(mut self, how: How, spliced: bool) {
        if spliced && matches!(how, How::Stopped | How::Idle) && self.released.is_none() {
            self.unsplice(true); // the sockets tell the hosts
            return self.finish(how, false);
        }
        if spliced {
            self.count_spliced();
        } else {
            self.note_copied();
        }
        (0..2).for_each(|d| self.end_session(d, None)); // of one that could not be taken back
        if how == How::Left {
            self.untap();
        }
        match (how, spliced) {
            (How::Closed | How::Left | How::Passed, false) => {}
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
        let ended = self.ended(how);
        // nothing of a released flow that was given up is to answer for it
        let given_up = self.released.is_some() && matches!(how, How::Stopped | How::Idle);
        let Relay { splicer, listed, client, server, purpose, pump, .. } = self;
        let flow = listed.flow.clone();
        drop(listed);
        let end = |client: Leg, server: Leg| {
            let shimmed = client.shimmed || server.shimmed;
            let known = !(client.is_only_copied() && server.is_only_copied());
            drop((client, server)); // the last segments of the sockets need the entries
            if known && how != How::Left {
                splicer.forget(&flow, (spliced || shimmed) && !given_up);
            }
        };
        match purpose {
            Purpose::Streams(done) => {
                end(client, server);
                done(ended, &flow.info);
            }
            Purpose::Message(errand) if how == How::Passed => {
                let dir = &pump.dirs[errand.from];
                let missing = dir.message.filter(|n| *n != u64::MAX).unwrap_or(0);
                let passed = Passed { ended, missing, in_hand: dir.rest() };
                // the caller has gone away: nobody wants them any more
                if let Some((client, server)) = errand.report(passed, Some((client, server))) {
                    end(client, server);
                }
            }
            Purpose::Message(errand) => {
                end(client, server);
                errand.report(Passed { ended, missing: 0, in_hand: Bytes::new() }, None);
            }
        }
    }

    /// Adds what was forwarded since the last splice.
    fn count_spliced(&self) {
        let Some(d) = self.splicer.datapath() else { return };
        let (c, s) = self.legs();
        let Some(end) = ends(d, self.flow(), self.released.as_ref()) else { return };
        let paths = d.paths_of([&c, &s]);
        let mut now = self.flow().now();
        for i in 0..2 {
            let fin = u64::from(paths.is_some_and(|p| p[i].flags & PathFlags::FIN != 0));
            now.spliced[i] += (end[i] - now.since[i]).saturating_sub(fin);
            self.end_session(i, Some(end[i] - fin));
        }
    }

    fn ended(&self, how: How) -> Ended {
        let flow = self.flow();
        let now = *flow.now();
        Ended {
            id: flow.id,
            client: flow.source(),
            server: flow.server.remote,
            how,
            bytes_up: now.copied[0] + now.spliced[0],
            bytes_down: now.copied[1] + now.spliced[1],
            spliced_up: now.spliced[0],
            spliced_down: now.spliced[1],
            splices: now.splices,
            refusal: now.refusal.or((now.splices == 0 && how == How::Closed).then_some(Refusal::Short)),
            duration_ms: flow.began.elapsed().as_millis() as u64,
        }
    }
}

/// Whose reset it was.
fn reset_by(at: &Switched) -> How {
    if at.flags[0] & LegFlags::RESET_IN != 0 { How::ClientReset } else { How::ServerReset }
}
