//! Clients who go to another process: those who wait for their task to read something, and of whom it has nothing in hand. Each
//! task does that itself when it begins.

use crate::{
    config::ListenerConfig,
    context::{Live, ServerContext},
    handed::{About, ClientAbout, Handed, Wanted},
    pool::Lease,
};
use bytes::Bytes;
use longsplice_engine::{HandedLeg, Leg};
use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};
use tokio::sync::watch;

/// The state that all tasks share.
#[derive(Debug, Default)]
pub(crate) struct Handing {
    to: Mutex<Option<To>>,
    /// It has begun, or the program stops.
    begun: watch::Sender<bool>,
}

/// Another process, which takes clients.
#[derive(Debug)]
struct To {
    wanted: Wanted,
    clients: Vec<Handed>,
}

impl Handing {
    /// Begins. Tasks that wait do their part when they are next woken up.
    pub fn begin(&self, wanted: Wanted) {
        *self.lock() = Some(To { wanted, clients: Vec::new() });
        self.begun.send_replace(true);
    }

    /// Ends, and returns the clients. From now on, the others stay.
    pub fn end(&self) -> Vec<Handed> {
        self.lock().take().map_or_else(Vec::new, |to| to.clients)
    }

    /// The program stops: whoever waits need not wait any longer.
    pub fn stop(&self) {
        self.begun.send_replace(true);
    }

    /// Waits until it has begun, or the program stops.
    pub fn begun(&self) -> impl Future<Output = ()> + Send + Sync + use<> {
        let mut begun = self.begun.subscribe();
        // also completes if the sender is gone
        async move { drop(begun.wait_for(|begun| *begun).await) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<To>> {
        // No code panics in the middle of a change, so the data behind a poisoned lock is consistent.
        self.to.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How far a client of another process has come there.
#[derive(Debug)]
pub(crate) struct Continued {
    /// When it was accepted.
    pub accepted: Instant,
    /// The same without the time in which nobody has read from it, for its time limits.
    pub began: Instant,
    /// See [`ClientAbout::is_known`].
    pub is_known: bool,
    /// See [`ClientAbout::requests`].
    pub requests: Option<(u64, Instant)>,
}

impl ListenerConfig {
    /// Returns whether its connections may go to another process: they need nothing here but their sockets.
    pub(crate) fn lets_go(&self) -> bool {
        self.tap.is_none()
    }
}

impl ServerContext {
    /// Returns a lease on the server of a pool that a connection already has.
    pub(crate) fn lease_again(&self, (pool, member): &(String, String)) -> Option<Lease> {
        self.opened().pools.get(pool)?.lease_again(member)
    }
}

impl Live {
    /// Waits until clients who wait may go to another process, or the program stops.
    pub fn goes(&self) -> impl Future<Output = ()> + Send + Sync + use<> {
        self.shared.handing.begun()
    }

    /// Lets a client go to another process, if there is one that takes it. Nothing may be in hand of what it has sent. `is_known`: no
    /// PROXY header is to come; `requests`: number so far, and when the last one was answered. Its leg is gone then.
    pub fn hand_on(
        &self,
        listener: &ListenerConfig,
        client: &mut Leg,
        (began, is_known): (Instant, bool),
        requests: Option<(u64, Instant)>,
    ) -> bool {
        let mut to = self.shared.handing.lock();
        let (name, protocol) = (&*listener.name, listener.protocol.name());
        let takes = |to: &&mut To| {
            let has_room = to.clients.len() < to.wanted.sockets;
            has_room && listener.lets_go() && to.wanted.has(Some(name), protocol)
        };
        let Some(to) = to.as_mut().filter(takes) else { return false };
        let handed = self.shared.splicer.hand_on_leg(client, to.wanted.splices);
        let Some(HandedLeg { about: leg, socket }) = handed else { return false };
        let requests = requests.map(|(count, since)| (count, since.into()));
        let (name, protocol, began) = (name.to_owned(), protocol.to_owned(), began.into());
        let left = Instant::now().into();
        let about = About::Client(Box::new(ClientAbout { name, protocol, leg, began, left, is_known, requests }));
        to.clients.push(Handed { about, sockets: vec![socket], in_hand: [const { Bytes::new() }; 2] });
        true
    }

    /// Returns when the client was accepted by another process, with the number of its requests so far and when the last one was
    /// answered.
    pub fn continues(&self) -> Option<(Instant, Option<(u64, Instant)>)> {
        self.continued.as_ref().map(|continued| (continued.began, continued.requests))
    }
}
