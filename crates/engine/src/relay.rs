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

mod switching;

use crate::{
    Ended, FlowState, How, Leftovers, Leg, Passed, Refusal, Splicer, When,
    distance::{Distance, Judgement},
    errand::{Errand, Purpose},
    keeper::{Kept, Note},
    lingering::LINGER,
    pump::{Failed, Pump},
    splicer::{Command, Ears, Flow, FlowNow, Listed, Place, Stop, ends, is_loopback, lock},
};
use bytes::Bytes;
use longsplice_datapath::{LegFlags, PathFlags, Phase, Released, Switched, Tuple};
use std::{
    future::{pending, poll_fn},
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};
use switching::Attempt;
use tokio::sync::{mpsc, watch};

/// How old the counts in lists may be while a flow is copied.
const COUNT_EVERY: Duration = Duration::from_millis(250);
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
    /// Of the paths to the hosts, as their sockets knew it when a splice was last thought of.
    mtu: [Option<u32>; 2],
    /// A FIN was forwarded past its socket: the sockets will not see the end of that direction, or would repeat it.
    fin_past: bool,
    /// No sockets are left.
    released: Option<[Released; 2]>,
    /// Since when it was forwarded, if the keeper has given it back.
    parked: Option<Instant>,
}

/// What ends a stretch of copying.
enum Copied {
    Ended(How),
    Splice,
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
            mtu: [None; 2],
            fin_past: false,
            released: None,
            parked: None,
        }
    }

    /// A flow that the keeper gives back.
    pub fn revive(splicer: &Splicer, flow: Arc<Flow>, kept: Kept) -> Relay {
        let (c, s) = (flow.client, flow.server);
        let Kept { sides: [a, b], purpose, stay, fin_past, released, began, .. } = kept;
        let mut client = a.leg(&c);
        client.announced.clone_from(&flow.announced);
        let listed = Listed::again(splicer, flow);
        let mut r = Relay::new(splicer, listed, client, b.leg(&s), &Leftovers::default(), purpose);
        for (d, copied) in r.pump.dirs.iter_mut().zip(r.listed.flow.now().copied) {
            d.copied = copied;
        }
        Relay { stay, fin_past, released, parked: Some(began), ..r }
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
        let loopback = is_loopback(&c) || is_loopback(&s);
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
        let splicer = self.splicer.clone();
        let (c, s) = self.legs();
        let limit = Instant::now() + self.flow().policy.idle_limit;
        let mut watch = true;
        while let Some(datapath) = splicer.datapath().filter(|_| self.client.shimmed) {
            match datapath.look(&c, &s) {
                Ok(at) if (at.flags[0] | at.flags[1]) & LegFlags::RESET != 0 => return reset_by(&at),
                Ok(at) if at.phase == [Phase::Local; 2] => break,
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
        let policy = self.flow().policy.clone();
        self.client.keep_alive(policy.keepalive);
        self.server.keep_alive(policy.keepalive);
        // While bytes pass, they are counted now and then; in silence there is no wake-up before the limit.
        let (mut moved, mut counting) = ((self.pump.copied(), Instant::now()), false);
        let mut enough = match self.flow().policy.when {
            _ if self.stay || self.is_read() || !self.spliceable() => u64::MAX,
            _ if self.wanted => 0,
            When::AfterBytes(n) if self.message().is_some() => self.worth(n),
            When::Never => u64::MAX,
            When::AtOnce => 0,
            When::AfterBytes(n) => n,
        };
        let heed = self.message().is_some_and(|m| m.heed);
        let mut fails = pin!(self.receiver_fails());
        if enough == u64::MAX {
            self.will_copy(heed);
        }
        loop {
            let due = self.pump.copied() >= enough;
            let wait = self.again.map_or(Duration::ZERO, |t| t.saturating_duration_since(Instant::now()));
            if due && wait.is_zero() {
                match self.judge() {
                    _ if self.wanted => {}
                    Judgement::Splice => {}
                    Judgement::After(n) => {
                        enough = self.pump.copied() + n;
                        continue;
                    }
                    Judgement::Copy => {
                        self.refuse(Refusal::Path);
                        enough = u64::MAX;
                        self.will_copy(heed);
                        continue;
                    }
                }
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
            let tick = if counting { COUNT_EVERY } else { policy.idle_limit.saturating_sub(moved.1.elapsed()) };
            let Relay { pump, client, server, .. } = self;
            let Ears { orders, stop, .. } = ears;
            tokio::select! {
                r = poll_fn(|cx| {
                    let receiver = if upload { &*server } else { &*client };
                    heard = heed && receiver.poll_heard(cx).is_ready();
                    let passed = match heard {
                        true => Poll::Ready(Ok(())),
                        false => pump.poll(cx, client, server, if due { u64::MAX } else { enough }),
                    };
                    let is_first = passed.is_pending() && !counting && pump.copied() != moved.0;
                    if is_first { Poll::Ready(Ok(())) } else { passed }
                }) => {
                    self.note_copied();
                    counting |= self.pump.copied() != moved.0;
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
                which = &mut fails => return Copied::Ended(which.how()),
                _ = stopped(stop) => return Copied::Ended(How::Stopped),
                () = tokio::time::sleep(wait), if due => {}
                () = tokio::time::sleep(tick) => {
                    self.note_copied();
                    counting = self.pump.copied() != moved.0;
                    if counting {
                        moved = (self.pump.copied(), Instant::now());
                    } else if moved.1.elapsed() >= policy.idle_limit {
                        return Copied::Ended(How::Idle);
                    }
                }
            }
        }
    }

    /// Until the connection of a message's receiver has failed: nobody reads from it, and the sender may have nothing more to say.
    fn receiver_fails(&self) -> impl Future<Output = Failed> + use<> {
        let watched = self.message().filter(|m| !m.heed).and_then(|m| {
            let (leg, which) =
                if m.from == 0 { (&self.server, Failed::Server) } else { (&self.client, Failed::Client) };
            Some((leg.failed()?, which))
        });
        async {
            let Some((failed, which)) = watched else { return pending().await };
            failed.await;
            which
        }
    }

    /// For as long as one can see.
    fn will_copy(&mut self, heed: bool) {
        self.client.unclamp();
        self.server.unclamp();
        if !heed && !self.is_tapped() {
            self.pump.through_pipes();
        }
    }

    /// Would a splice make it slower?
    fn judge(&mut self) -> Judgement {
        let facts = [self.client.path_facts(), self.server.path_facts()];
        self.mtu = facts.map(|f| f.mtu);
        let (c, s) = self.legs();
        let spliced = self.flow().now().spliced;
        Distance {
            policy: &self.flow().policy,
            legs: [c, s],
            rtt: facts.map(|f| f.min_rtt),
            carried: [0, 1].map(|i| {
                let d = &self.pump.dirs[i];
                (d.copied + spliced[i]).saturating_add(d.message.unwrap_or(0))
            }),
            copied: self.pump.copied(),
        }
        .judge()
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

    fn note_copied(&self) {
        self.flow().now().copied = [self.pump.dirs[0].copied, self.pump.dirs[1].copied];
    }

    fn is_tapped(&self) -> bool {
        self.client.tap.is_some() || self.server.tap.is_some()
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
        if how == How::Closed && matches!(*self.flow().now(), FlowNow { splices: 0, refusal: None, .. }) {
            self.refuse(Refusal::Short);
        }
        let ended = self.ended(how);
        // no socket is left that would tell the hosts of a released flow
        let given_up = self.released.is_some() && matches!(how, How::Stopped | How::Idle);
        if given_up {
            self.splicer.reset_forwarded([&self.flow().client, &self.flow().server]);
        }
        let Relay { splicer, listed, client, server, purpose, pump, .. } = self;
        let flow = listed.flow.clone();
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
                drop(listed); // whoever waits for the end of all flows closes the data path then
                done(ended, &flow.info);
            }
            Purpose::Message(errand) if how == How::Passed => {
                let dir = &pump.dirs[errand.from];
                let missing = dir.message.filter(|n| *n != u64::MAX).unwrap_or(0);
                let passed = Passed { ended, missing, in_hand: dir.rest() };
                drop(listed);
                // the caller has gone away: nobody wants them any more
                if let Some((client, server)) = errand.report(passed, Some((client, server))) {
                    end(client, server);
                }
            }
            Purpose::Message(errand) => {
                end(client, server);
                drop(listed);
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
            refusal: now.refusal,
            duration_ms: flow.began.elapsed().as_millis() as u64,
        }
    }
}

/// Whose reset it was.
fn reset_by(at: &Switched) -> How {
    if at.flags[0] & LegFlags::RESET_IN != 0 { How::ClientReset } else { How::ServerReset }
}
