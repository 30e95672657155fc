//! A flow while bytes pass through this process, and its end: the task that drives its
//! [core](crate::core). The task ends with the commit; the state of a forwarded flow is a [`ForwardedFlow`],
//! which the [keeper](crate::keeper) looks after. When the keeper gives a flow back, a new task begins.

mod switching;

use crate::{
    EndReason, Ended, FlowEventKind, Leftovers, Leg, Message, Refusal, RelayedMessage, Splicer,
    core::{Action, Core, Event, Side, State},
    flow::{Flow, FlowOwner, ForwardedFlow, KeeperMessage, Stop, TaskInbox, ends, is_loopback},
    holder::Holding,
    pump::Pump,
    purpose::{Purpose, report},
    splicer::Listed,
    sync::lock,
    types::Command,
};
use bytes::Bytes;
use longsplice_datapath::{Datapath, PathFlags, Released, Tuple, monotonic};
use std::{
    future::{pending, poll_fn},
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};
use tokio::sync::{mpsc, watch};

pub(crate) struct Relay {
    splicer: Splicer,
    listed: Listed,
    client: Leg,
    server: Leg,
    pump: Pump,
    core: Core,
    purpose: Purpose,
    /// Set while the flow drains under the hold policy.
    holding: Option<Holding>,
    /// Set when no sockets are left.
    released: Option<[Released; 2]>,
}

/// Waits for a command. Never returns after the sender has gone.
async fn order(rx: &mut mpsc::UnboundedReceiver<Command>) -> Command {
    match rx.recv().await {
        Some(c) => c,
        None => pending().await,
    }
}

async fn stopped(rx: &mut watch::Receiver<Stop>) -> Stop {
    let told = rx.wait_for(|s| *s != Stop::Go).await.map(|s| *s);
    match told {
        Ok(s) => s,
        Err(_) => pending().await,
    }
}

impl Relay {
    pub fn new(
        splicer: &Splicer,
        listed: Listed,
        [client, server]: [Leg; 2],
        left: &Leftovers,
        message: Option<Message>,
        purpose: Purpose,
    ) -> Relay {
        let is_loopback = [&client, &server].iter().any(|leg| is_loopback(&leg.tuple()));
        let loopback = is_loopback.then_some(Refusal::Loopback);
        let obstacle = splicer.refusal().or(loopback).or(client.refusal()).or(server.refusal());
        let in_hand = [&left.to_server, &left.to_client].map(|b| b.len() as u64);
        Relay {
            splicer: splicer.clone(),
            listed,
            client,
            server,
            pump: Pump::new(&left.to_server, &left.to_client),
            core: Core::new(message, obstacle, in_hand),
            purpose,
            holding: None,
            released: None,
        }
    }

    /// Rebuilds a flow that the keeper gives back.
    pub fn revive(splicer: &Splicer, flow: Arc<Flow>, kept: ForwardedFlow) -> Relay {
        let ForwardedFlow { sides: [a, b], core, purpose, released, .. } = kept;
        let (mut client, server) = (a.leg(&flow.client), b.leg(&flow.server));
        client.announced.clone_from(&flow.announced);
        Relay {
            splicer: splicer.clone(),
            listed: Listed::again(splicer, flow),
            client,
            server,
            pump: Pump::new(&[], &[]),
            core,
            purpose,
            holding: None,
            released,
        }
    }

    /// Hands the flow to the keeper, together with the commands that were not read.
    fn keep(self, mut ears: TaskInbox) {
        let Relay { splicer, listed, client, server, core, purpose, .. } = self;
        let flow = listed.keep();
        let kept = ForwardedFlow::new([client.parked(), server.parked()], core, purpose);
        let soon = kept.wants_look_soon(&flow);
        let mut owner = flow.owner();
        *owner = FlowOwner::Keeper(Box::new(kept));
        // a look finds what the task was notified of but has not seen
        let heard = pin!(ears.events.notified()).poll(&mut Context::from_waker(Waker::noop())).is_ready();
        if soon || heard {
            splicer.tell(KeeperMessage::Forwarded(flow.id));
        } else {
            splicer.tell_some_time(KeeperMessage::Forwarded(flow.id));
        }
        while let Ok(command) = ears.orders.try_recv() {
            splicer.tell(KeeperMessage::Command(flow.id, command));
        }
    }

    fn flow(&self) -> &Flow {
        &self.listed.flow
    }

    /// Passes an event to the core and returns the next action.
    pub fn on(&mut self, event: Event) -> Action {
        let Relay { core, client, server, listed, .. } = self;
        listed.flow.step(core, [&mut client.at, &mut server.at], event)
    }

    /// Returns the data path. Only for a flow that can be spliced.
    fn datapath(&self) -> &Datapath {
        self.splicer.datapath().expect("without it no flow is spliced")
    }

    fn legs(&self) -> [Tuple; 2] {
        [self.flow().client, self.flow().server]
    }

    /// Runs until the flow ends or the keeper takes it. `action` is performed first.
    pub async fn run(mut self, mut ears: TaskInbox, mut action: Action) {
        loop {
            let event = match action {
                Action::Keep => return self.keep(ears),
                Action::End { how, forwarded } => return self.finish(how, forwarded),
                Action::Wait => Some(self.wait(&mut ears).await),
                Action::LookBehind => Some(self.look_behind().await),
                action => self.perform(action),
            };
            action = event.map_or(Action::Wait, |event| self.on(event));
        }
    }

    /// Performs actions that need no waiting, until the flow has ended.
    pub fn end(mut self, mut action: Action) {
        loop {
            match action {
                Action::End { how, forwarded } => return self.finish(how, forwarded),
                other => action = self.perform(other).map_or(Action::Wait, |event| self.on(event)),
            }
        }
    }

    /// Copies until an event occurs.
    async fn wait(&mut self, ears: &mut TaskInbox) -> Event {
        let (state, receiver) = (self.core.state(), self.core.message_from().map(|from| Side::sender(1 - from)));
        let (copies, listens) = (self.core.copies(), self.core.listens());
        let most = if copies { self.core.most() } else { 0 };
        let mut fails = pin!(self.receiver_fails());
        let rest = self.core.timer().map(|at| at.saturating_sub(monotonic()));
        let Relay { pump, core, client, server, .. } = self;
        let TaskInbox { orders, events, stop } = ears;
        tokio::select! {
            event = poll_fn(|cx| {
                let heard = if receiver == Some(Side::Server) { &*server } else { &*client };
                if listens && heard.poll_heard(cx).is_ready() {
                    return Poll::Ready(Event::Heard);
                }
                if !copies {
                    return Poll::Pending;
                }
                match pump.poll(cx, core.streams_mut(), client, server, most) {
                    Poll::Ready(Ok(())) => Poll::Ready(Event::Copied),
                    Poll::Ready(Err(side)) => Poll::Ready(Event::Failed(side)),
                    Poll::Pending if core.has_moved() => Poll::Ready(Event::Moved),
                    Poll::Pending => Poll::Pending,
                }
            }) => event,
            () = events.notified(), if state != State::Copying => Event::Told,
            c = order(orders), if core.takes_commands() => Event::Command(c),
            side = &mut fails => Event::Failed(side),
            s = stopped(stop), if state != State::Closing => Event::Stop { leave: s == Stop::Leave },
            () = tokio::time::sleep(rest.unwrap_or_default()), if rest.is_some() => Event::Timer,
        }
    }

    /// Waits until the connection of a message's receiver has failed.
    /// Nobody reads from it, and the sender may have nothing more to send.
    fn receiver_fails(&self) -> impl Future<Output = Side> + use<> {
        let is_watched = self.core.state() == State::Copying && !self.core.listens();
        let watched = self.core.message_from().filter(|_| is_watched).and_then(|from| {
            let (leg, side) = if from == 0 { (&self.server, Side::Server) } else { (&self.client, Side::Client) };
            Some((leg.failed()?, side))
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
        let Relay { pump, core, client, server, .. } = self;
        let before = [client.at.eof, server.at.eof];
        let looked = poll_fn(|cx| match pump.poll(cx, core.streams_mut(), client, server, most) {
            Poll::Ready(Err(side)) => Poll::Ready(Err(side)),
            _ => Poll::Ready(Ok(())),
        });
        match looked.await {
            Ok(()) => Event::LookedBehind([client.at.eof, server.at.eof] != before),
            Err(side) => Event::Failed(side),
        }
    }

    fn is_tapped(&self) -> bool {
        self.client.tap.is_some() || self.server.tap.is_some()
    }

    /// Stops the copies for taps: the flow goes on without the process that reads them.
    fn untap(&self) {
        for leg in self.legs().iter().filter(|_| self.is_tapped()) {
            if let Some(Err(error)) = self.splicer.datapath().map(|d| d.untap(leg)) {
                tracing::warn!(?leg, %error, "copies are made for nobody");
            }
        }
    }

    /// Ends the spliced stretch of this direction for taps: from `end`
    /// on, they get bytes from control mode again. See `Stretches::end`.
    fn end_stretch(&self, d: usize, end: Option<u64>) {
        if self.is_tapped() {
            lock(&self.splicer.inner.stretches).end(&self.legs()[d], end);
        }
    }

    /// Ends the flow: counts its bytes, closes the sockets, reports the end, and removes the entries once nobody needs them.
    fn finish(mut self, how: EndReason, forwarded: bool) {
        if forwarded {
            self.count_forwarded();
        }
        (0..2).for_each(|d| self.end_stretch(d, None)); // of a flow that could not be taken back
        if how == EndReason::Left {
            self.untap();
        }
        match how {
            // no socket may send for a forwarded flow, and none has anything to add after both FINs have passed
            _ if forwarded || (how == EndReason::Closed && self.core.is_fin_past()) => {
                self.client.close_silently();
                self.server.close_silently();
            }
            EndReason::Closed | EndReason::Left | EndReason::MessageRelayed => {}
            EndReason::ClientReset | EndReason::ServerReset | EndReason::Idle | EndReason::Stopped => {
                self.client.abort();
                self.server.abort();
            }
        }
        let ended = self.ended(how);
        self.flow().announcer.tell(ended.id, FlowEventKind::Ended(how));
        // no socket is left that could inform the hosts of a released flow
        let given_up = self.released.is_some() && matches!(how, EndReason::Stopped | EndReason::Idle);
        if given_up {
            self.splicer.reset_forwarded([&self.flow().client, &self.flow().server]);
        }
        let Relay { splicer, listed, client, server, purpose, pump, core, .. } = self;
        let flow = listed.flow.clone();
        let end = |client: Leg, server: Leg| {
            let shimmed = client.at.shimmed || server.at.shimmed;
            let known = !(client.is_only_copied() && server.is_only_copied());
            drop((client, server)); // the last segments of the sockets need the entries
            if known && how != EndReason::Left {
                splicer.forget(&flow, (forwarded || shimmed) && !given_up);
            }
        };
        match (purpose, core.message_from()) {
            (Purpose::Message(tell), Some(from)) if how == EndReason::MessageRelayed => {
                let missing = core.streams()[from].message.filter(|n| *n != u64::MAX).unwrap_or(0);
                let passed = RelayedMessage { ended, missing, in_hand: pump.rest(from) };
                drop(listed);
                // the caller has gone: nobody wants the legs
                if let Some((client, server)) = report(tell, passed, Some((client, server))) {
                    end(client, server);
                }
            }
            (Purpose::Message(tell), _) => {
                end(client, server);
                drop(listed);
                report(tell, RelayedMessage { ended, missing: 0, in_hand: Bytes::new() }, None);
            }
            (Purpose::Streams(done), _) => {
                end(client, server);
                drop(listed); // a waiter for the end of all flows then closes the data path
                done(ended, &flow.info);
            }
        }
    }

    /// Counts the bytes forwarded since the last splice.
    fn count_forwarded(&self) {
        let Some(d) = self.splicer.datapath() else { return };
        let Some(ends) = ends(d, self.flow(), self.released.as_ref()) else { return };
        let [c, s] = self.legs();
        let fins = d.paths_of([&c, &s]).map_or([false; 2], |paths| paths.map(|p| p.flags & PathFlags::FIN != 0));
        self.flow().now().ends_forwarded(ends, fins);
        (0..2).for_each(|i| self.end_stretch(i, Some(ends[i] - u64::from(fins[i]))));
    }

    fn ended(&self, how: EndReason) -> Ended {
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
