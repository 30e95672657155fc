//! A flow while bytes pass through this process, and its end: the task that drives its
//! [core](crate::core). The task ends with the commit; the state of a forwarded flow is a [`ForwardedFlow`],
//! which the keeper looks after. When the keeper gives a flow back, a new task begins.

mod handing;
mod switching;
#[cfg_attr(not(feature = "taps"), path = "relay/untapped.rs")]
mod tapped;

use crate::{
    adopting::Adopting,
    copying::pump::Pump,
    core::{Action, Core, Event, FAR_CLIENT, State},
    engine::{
        Engine, Listed,
        flow::{Flow, FlowOwner, ForwardedFlow, KeeperMessage, Order, Stop, TaskInbox, ends},
        handed::HandOn,
        purpose::{Purpose, report},
        record::{FlowRecord, Recorded},
    },
    leg::{Leg, parked::Parked},
    passing::holding::Holding,
    types::{EndReason, Ended, Leftovers, Message, RelayedMessage},
};
use bytes::Bytes;
use longsplice_datapath::{Datapath, Pair, Released, Side, Switched, Tuple, monotonic};
use std::{
    future::{pending, poll_fn},
    pin::pin,
    sync::Arc,
    task::Poll,
    time::Duration,
};
use tokio::sync::{mpsc, watch};

pub(crate) struct Relay {
    engine: Arc<Engine>,
    listed: Listed,
    legs: Pair<Leg>,
    pump: Pump,
    core: Core,
    purpose: Purpose,
    /// Set while the data path adopts the legs.
    adopting: Option<Adopting>,
    /// Set while the flow drains under the hold policy.
    holding: Option<Holding>,
    /// What the freeze, the last look of a drain, or the commit found. Its next hops are good for the commit: whatever changes
    /// within the next second is corrected by `Datapath::follow`.
    seen: Option<Box<Switched>>,
    /// Set when no sockets are left.
    released: Option<Pair<Released>>,
    /// It was told to go to another process.
    hands_on: Option<HandOn>,
    /// What the next process has to know of a switch.
    record: Recorded,
}

/// Waits for an order. Never returns after the sender has gone.
async fn order(rx: &mut mpsc::UnboundedReceiver<Order>) -> Order {
    match rx.recv().await {
        Some(c) => c,
        None => pending().await,
    }
}

async fn stopped(rx: &mut watch::Receiver<Stop>) -> Stop {
    let told = rx.wait_for(|s| s.ends_tasks()).await.map(|s| *s);
    match told {
        Ok(s) => s,
        Err(_) => pending().await,
    }
}

impl Relay {
    pub fn new(
        engine: &Arc<Engine>,
        listed: Listed,
        legs: Pair<Leg>,
        left: &Leftovers,
        message: Option<Message>,
        purpose: Purpose,
    ) -> Relay {
        let obstacle = engine.obstacle(&legs.client, &legs.server);
        let in_hand = left.by_sender();
        let lengths = in_hand.each_ref().map(|bytes| bytes.len() as u64);
        let has_streams = message.is_none();
        let mut core = Core::new(message, obstacle, lengths);
        if legs.iter().any(Leg::lacks_record) {
            core = core.without_records();
        }
        let is_client_far = has_streams && legs.server.opened.client_rtt.is_some_and(|rtt| rtt > FAR_CLIENT);
        if is_client_far && !engine.slow.has(legs.server.tuple().remote.ip()) {
            core = core.for_far_client();
        }
        Relay {
            engine: engine.clone(),
            listed,
            core,
            legs,
            pump: Pump::new(in_hand),
            purpose,
            adopting: None,
            holding: None,
            seen: None,
            released: None,
            hands_on: None,
            record: Recorded::default(),
        }
    }

    /// Rebuilds a flow that the keeper gives back.
    pub fn revive(engine: &Arc<Engine>, flow: Arc<Flow>, kept: ForwardedFlow) -> Relay {
        let ForwardedFlow { parked, core, purpose, sockets, record, .. } = kept;
        let mut legs = parked.zip(flow.connections()).map(|(parked, connection)| parked.leg(connection));
        legs.client.set_announced(flow.announced.clone());
        Relay {
            engine: engine.clone(),
            listed: Listed::again(engine, flow),
            legs,
            pump: Pump::new(Pair::default()),
            core,
            purpose,
            adopting: None,
            holding: None,
            seen: None,
            released: sockets.released().copied(),
            hands_on: None,
            record,
        }
    }

    /// Hands the flow to the keeper, together with the commands that were not read.
    fn keep(self, mut ears: TaskInbox) {
        let Relay { engine, listed, legs, core, purpose, seen, record, .. } = self;
        let flow = listed.keep();
        let origin = seen.expect("the commit").origin;
        let mut kept = ForwardedFlow::new(legs.map(Parked::new), (core, purpose), origin, record);
        engine.datapath().into_iter().for_each(|d| kept.write_record(d, &flow));
        let mut soon = kept.wants_look_soon(&flow);
        // held until the commands below are passed on: one that comes meanwhile must not overtake them
        let mut owner = flow.owner();
        *owner = FlowOwner::Keeper(Box::new(kept));
        engine.tell_some_time(KeeperMessage::Forwarded(flow.id));
        while let Ok(order) = ears.orders.try_recv() {
            match order {
                Order::Command(command) => {
                    engine.tell_some_time(KeeperMessage::Command(flow.id, command));
                    soon = true;
                }
                Order::Adopt | Order::Limits | Order::HandOn(_) => {} // it is, they are, and it is left to the kernel
                #[cfg(feature = "taps")]
                Order::Tap(..) => {}
            }
        }
        // Events that came before the last look may concern the keeper, too: both hosts may have closed before the commit.
        soon |= ears.events.are_for_keeper();
        drop(owner); // or the keeper would wake up to wait for this lock
        if soon {
            engine.wake_keeper_soon();
        }
    }

    fn flow(&self) -> &Flow {
        &self.listed.flow
    }

    /// Passes an event to the core and returns the next action.
    pub fn on(&mut self, event: Event) -> Action {
        let Relay { core, legs, listed, .. } = self;
        let action = listed.flow.step(core, legs.each_mut().map(|leg| &mut leg.at), event);
        if core.take_was_slow() {
            let server = listed.flow.legs.server.remote.ip();
            tracing::info!(%server, "connections of far clients to this server are spliced no more before their first byte: one was slower");
            self.engine.slow.note(server);
        }
        self.record();
        action
    }

    /// Writes or removes what the next process has to know of a switch.
    fn record(&mut self) {
        let Relay { core, legs, listed, engine, purpose, record, .. } = self;
        match (core.state(), engine.datapath()) {
            (State::Draining, Some(d)) if !record.is_written() => {
                let at = legs.each_ref().map(|leg| leg.at);
                record.write(d, &FlowRecord::of_drain(&listed.flow, core, purpose, at));
            }
            (State::Copying, Some(d)) if record.is_written() => record.remove(d),
            _ => {}
        }
    }

    /// Returns the data path. Only for a flow that can be spliced.
    fn datapath(&self) -> &Datapath {
        self.engine.datapath().expect("without it no flow is spliced")
    }

    /// Returns the legs as the data path knows them.
    fn tuples(&self) -> Pair<Tuple> {
        self.flow().legs
    }

    /// Runs until the flow ends or the keeper takes it. `action` is performed first.
    pub async fn run(mut self, mut ears: TaskInbox, mut action: Action) {
        loop {
            let event = match action {
                Action::Keep => return self.keep(ears),
                Action::End { how, forwarded } => return self.finish(how, forwarded, None),
                Action::Wait => self.wait(&mut ears).await,
                Action::LookBehind => Some(self.look_behind().await),
                action => self.perform(action),
            };
            if let Some(order) = self.hands_on.take() {
                match self.hand_on(&order) {
                    Ok(()) => return,
                    Err(stays) => self = *stays,
                }
            }
            action = event.map_or(Action::Wait, |event| self.on(event));
        }
    }

    /// Performs actions that need no waiting, until the flow has ended. `ends`: positions of all data from the hosts, if known.
    pub fn end(mut self, mut action: Action, ends: Option<Pair<u64>>) {
        loop {
            match action {
                Action::End { how, forwarded } => return self.finish(how, forwarded, ends),
                other => action = self.perform(other).map_or(Action::Wait, |event| self.on(event)),
            }
        }
    }

    /// Copies until an event occurs. `None`: the core need not know of it.
    async fn wait(&mut self, ears: &mut TaskInbox) -> Option<Event> {
        self.legs.client.opened.first = None; // it was not spliced at once: what has come is copied
        let state = self.core.state();
        // only now: a socket that was accepted and is spliced at once is never registered
        for side in Side::BOTH.into_iter().filter(|_| state == State::Copying) {
            if self.legs[side].attend().is_err() {
                return Some(Event::Failed(side));
            }
        }
        let (copies, listens) = (self.core.copies(), Pair::from_fn(|side| self.core.listens_to(side)));
        let most = if copies { self.core.most() } else { 0 };
        let mut fails = pin!(self.receiver_fails());
        let rest = self.core.timer().map(|at| at.saturating_sub(monotonic()));
        if rest == Some(Duration::ZERO) {
            return Some(Event::Timer); // it comes last below
        }
        let Relay { pump, core, legs, adopting, .. } = self;
        let TaskInbox { orders, events, stop } = ears;
        let event = tokio::select! {
            biased; // most waits end without setting the timer
            () = async { adopting.as_mut().expect("checked").ready().await }, if adopting.is_some() => return self.adopted(),
            s = stopped(stop), if core.heeds_stop(monotonic()) => Event::Stop { leave: s == Stop::Leave },
            c = order(orders), if core.takes_commands() => match c {
                Order::Command(command) => Event::Command(command),
                Order::Limits => {
                    core.look_at_limits(monotonic());
                    return None; // its timer is due now
                }
                Order::Adopt if state == State::Copying => return self.adopt(),
                Order::Adopt => return None,
                Order::HandOn(order) => {
                    self.hands_on = Some(order);
                    return None;
                }
                #[cfg(feature = "taps")]
                Order::Tap(make, begun) => {
                    if state == State::Copying {
                        if legs.client.tap.is_none() {
                            pump.without_pipes();
                            legs.client.tap(make());
                        }
                        let _ = begun.send(()); // unless nobody waits for it any more
                    }
                    Event::Moved // nothing else has changed
                }
            },
            side = &mut fails => Event::Failed(side),
            event = poll_fn(|cx| {
                if Side::BOTH.into_iter().any(|side| listens[side] && legs[side].poll_heard(cx).is_ready()) {
                    return Poll::Ready(Event::Heard);
                }
                if !copies {
                    return Poll::Pending;
                }
                match pump.poll(cx, core.streams_mut(), legs, most) {
                    // an acknowledgement ends this state: the event would change nothing, and be repeated at once
                    Poll::Ready(Ok(())) if state == State::Resetting => Poll::Pending,
                    Poll::Ready(Ok(())) => Poll::Ready(Event::Copied),
                    Poll::Ready(Err(side)) => Poll::Ready(Event::Failed(side)),
                    // a silent flow has no timer that counts its bytes: the core sets one now
                    Poll::Pending if core.has_moved() => Poll::Ready(Event::Moved),
                    Poll::Pending => Poll::Pending,
                }
            }) => event,
            () = events.notified(), if state != State::Copying => Event::Told,
            () = tokio::time::sleep(rest.unwrap_or_default()), if rest.is_some() => Event::Timer,
        };
        Some(event)
    }

    /// Waits until the connection of a message's receiver has failed.
    /// Nobody reads from it, and the sender may have nothing more to send.
    fn receiver_fails(&self) -> impl Future<Output = Side> + use<> {
        let is_watched = self.core.state() == State::Copying && !self.core.listens();
        let watched = self.core.message_from().filter(|_| is_watched).and_then(|from| {
            let receiver = from.other();
            Some((self.legs[receiver].failed()?, receiver))
        });
        async {
            let Some((failed, side)) = watched else { return pending().await };
            failed.await;
            side
        }
    }

    /// Reads once, beyond the bytes that were enough for a splice.
    async fn look_behind(&mut self) -> Event {
        let most = self.core.most().min(self.core.streams().iter().map(|s| s.copied).sum::<u64>() + 1);
        let Relay { pump, core, legs, .. } = self;
        let ended = |legs: &Pair<Leg>| legs.each_ref().map(|leg| leg.at.eof);
        let before = ended(legs);
        let looked = poll_fn(|cx| match pump.poll(cx, core.streams_mut(), legs, most) {
            Poll::Ready(Err(side)) => Poll::Ready(Err(side)),
            // without waiting: only an end that is there already makes the splice pointless
            _ => Poll::Ready(Ok(())),
        });
        match looked.await {
            Ok(()) => Event::LookedBehind(ended(legs) != before),
            Err(side) => Event::Failed(side),
        }
    }

    fn is_tapped(&self) -> bool {
        self.legs.iter().any(|leg| leg.tap.is_some())
    }

    /// Stops the copies for taps: the flow goes on without the process that reads them.
    fn untap(&self) {
        for leg in self.flow().connections().iter().filter(|_| self.is_tapped()) {
            if let Some(Err(error)) = self.engine.datapath().map(|d| d.untap(leg)) {
                let _named = self.flow().named();
                tracing::warn!(?leg, %error, "cannot stop the tap of this flow: the data path still copies its data");
            }
        }
    }

    /// Ends the flow: counts its bytes, closes the sockets, reports the end, and removes the entries once nobody needs them.
    fn finish(mut self, how: EndReason, forwarded: bool, ends: Option<Pair<u64>>) {
        // A flow that was replaced in its drain counts as closed: only its last records tell of a reset.
        let how = self.flow().was_reset_by().filter(|_| how == EndReason::Closed).map_or(how, EndReason::reset_by);
        if forwarded {
            self.count_forwarded(how, ends);
        }
        Side::BOTH.iter().for_each(|from| self.end_stretch(*from, None)); // of a flow that could not be taken back
        if how == EndReason::Left {
            self.untap();
        }
        let mut mute = Pair::both(false);
        match how {
            // no socket may send for a forwarded flow, and none has anything to add after both FINs have passed
            _ if forwarded || (how == EndReason::Closed && self.core.is_fin_past()) => {
                self.legs.iter_mut().for_each(Leg::close_silently);
            }
            EndReason::Closed | EndReason::Left | EndReason::MessageRelayed => {}
            EndReason::ClientReset
            | EndReason::ServerReset
            | EndReason::Idle
            | EndReason::Stopped
            | EndReason::Lost => {
                // In LAST-ACK and CLOSING, Linux sends no reset, even if the host lacks something: it is told below.
                mute = self.legs.each_ref().map(Leg::aborts_mutely);
                self.legs.iter().for_each(Leg::abort);
            }
        }
        self.legs.iter_mut().for_each(Leg::relax); // they may go back to the caller
        // A socket may have ignored the reset, behind data that it lacks: reads have to fail once it is empty.
        self.core.failed().into_iter().for_each(|side| self.legs[side].was_reset = true);
        // before its end is told, so that no other process tells it again
        if let Some(d) = self.engine.datapath().filter(|_| how != EndReason::Left) {
            self.record.remove(d);
        }
        let ended = self.ended(how);
        let is_message = matches!(self.purpose, Purpose::Message(_));
        self.flow().announcer.end(self.flow().info.name.as_ref(), &ended, is_message);
        // no socket is left that could inform the hosts of a released flow
        if self.released.is_some() && matches!(how, EndReason::Stopped | EndReason::Idle) {
            self.engine.reset_forwarded(self.flow().connections().into());
        }
        let Relay { engine, listed, legs, purpose, pump, core, .. } = self;
        let flow = listed.flow.clone();
        let end = |legs: Pair<Leg>| {
            let shimmed = legs.iter().any(|leg| leg.at.shimmed);
            let known = legs.iter().any(Leg::is_tracked);
            drop(legs); // the last segments of the sockets need the entries
            let connections = flow.connections();
            // after the sockets, to which their hosts would be left, and before the records with the numbers go
            Side::BOTH.iter().filter(|side| mute[**side]).for_each(|side| engine.reset_again(&connections[*side]));
            // a flow that is left goes on in its entries
            if known && how != EndReason::Left {
                engine.forget(&flow, forwarded || shimmed);
            }
        };
        match (purpose, core.message_from()) {
            (Purpose::Message(tell), Some(from)) if how == EndReason::MessageRelayed => {
                let missing = core.streams()[from].message.filter(|n| *n != u64::MAX).unwrap_or(0);
                let (excess, receiver_failed) = (core.has_excess(), core.receiver_failed());
                let passed = RelayedMessage { ended, missing, in_hand: pump.rest(from), excess, receiver_failed };
                drop(listed);
                // the caller has gone: nobody wants the legs
                if let Some(legs) = report(tell, passed, Some(legs)) {
                    end(legs);
                }
            }
            (Purpose::Message(tell), _) => {
                end(legs);
                drop(listed);
                let (in_hand, excess, receiver_failed) = (Bytes::new(), false, false);
                report(tell, RelayedMessage { ended, missing: 0, in_hand, excess, receiver_failed }, None);
            }
            (Purpose::Streams(done), _) => {
                end(legs);
                drop(listed); // a waiter for the end of all flows then closes the data path
                done.finish(ended, &flow.info);
            }
        }
    }

    /// Counts the bytes forwarded since the last splice. `known`: where they ended a moment ago.
    fn count_forwarded(&self, how: EndReason, known: Option<Pair<u64>>) {
        let Some(d) = self.engine.datapath() else { return };
        let found = || ends(d, self.flow(), self.released.as_ref());
        // After both FINs nothing moves: what was seen is exact, and spares a look. Otherwise it is the last resort:
        // a new connection may have replaced the entries
        let Some(ends) = known.filter(|_| how == EndReason::Closed).or_else(found).or(known) else { return };
        // closed: by both hosts
        let fins = if how == EndReason::Closed { Some(Pair::both(true)) } else { self.flow().fins(d) };
        let fins = fins.unwrap_or(Pair::both(false));
        self.flow().now().ends_forwarded(ends, fins);
        for from in Side::BOTH {
            self.end_stretch(from, Some(ends[from] - u64::from(fins[from])));
        }
    }

    fn ended(&self, how: EndReason) -> Ended {
        let flow = self.flow();
        let now = *flow.now();
        Ended {
            id: flow.id,
            client: flow.source(),
            server: flow.legs.server.remote,
            how,
            bytes_up: now.copied.client + now.spliced.client,
            bytes_down: now.copied.server + now.spliced.server,
            spliced_up: now.spliced.client,
            spliced_down: now.spliced.server,
            splices: now.splices,
            refusal: now.refusal,
            path: now.path_finding(),
            duration_ms: flow.began.age().as_millis() as u64,
        }
    }
}
