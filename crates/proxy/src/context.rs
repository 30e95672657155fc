//! The context of a connection: the state shared by all, that shared by a listener, and the slot that the connection takes.
//! Also what a protocol is that another crate serves ([`Service`]).

pub(crate) mod relays;
pub(crate) mod tap_dir;
pub(crate) mod watcher;
pub(crate) mod workers;

use crate::{
    access::own::Listening,
    commands::{ASSOCIATIONS, BINDS},
    config::{ListenerConfig, Protocol},
    context::{
        relays::Relays,
        tap_dir::TapDir,
        watcher::Triggers,
        workers::{Loads, Seat},
    },
    counters::{CounterValues, Counters},
    limits::{Counted, Full, Slot},
    log::access_log::AccessLog,
    resolve::Resolver,
};
use bytes::Bytes;
use longsplice_engine::{Leg, Policy, Splicer, Tpot};
use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    pin::Pin,
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::{sync::watch, task::JoinHandle};

/// Which stored replies are removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Purge {
    /// `http://SITE/PATH`.
    pub url: String,
    /// Those of all URLs that begin so.
    pub below: bool,
    /// Only behind this one.
    pub after: Option<(usize, u64)>,
}

/// How far it has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Purged {
    /// Number of replies that were removed.
    pub removed: u64,
    /// There may be more behind this one.
    pub after: Option<(usize, u64)>,
}

/// A protocol that a crate above this one serves, and all its listeners together. The program gives a table of such protocols
/// to [`Prepared::new`](crate::Prepared::new), which opens what they need before the data path is touched.
pub trait Service: Send + Sync {
    /// Returns whether it serves this protocol.
    fn serves(&self, protocol: &Protocol) -> bool;

    /// Returns what serves the clients of such a listener.
    fn handler(&self, listener: &ListenerConfig) -> Arc<dyn Handler>;

    /// Starts what goes on beside connections, if anything, in the current runtime. The tasks are aborted with the server.
    fn tend(&self, _shared: &ServerContext) -> Vec<JoinHandle<()>> {
        Vec::new()
    }

    /// Fills in what it counts itself.
    fn count(&self, _values: &mut CounterValues) {}

    /// Removes stored replies. Blocks, for as long as some thousand files take to be read. Returns from where to go on.
    fn purge(&self, _what: &Purge) -> Purged {
        Purged::default()
    }

    /// Blocks until it has written what it has to keep, for `limit` at most.
    fn flush(&self, _limit: Duration) {}
}

/// Serves the clients of one listener.
pub trait Handler: Send + Sync {
    /// Serves an accepted connection to its end, with its lines in the access log. `read`: what was read from it so far.
    fn serve<'a>(
        &'a self,
        live: Live,
        front: &'a Front,
        client: Leg,
        read: Bytes,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;
}

/// State shared by all connections.
pub struct ServerContext {
    /// The engine.
    pub splicer: Splicer,
    /// Addresses of names.
    pub resolver: Resolver,
    /// Translucent proxying, if the configuration needs it.
    pub(crate) tpot: Weak<Tpot>,
    /// Listening sockets.
    pub(crate) listening: Listening,
    pub(crate) log: AccessLog,
    /// What happened so far.
    pub counters: Arc<Counters>,
    /// Protocols that other crates serve.
    pub(crate) services: Vec<Arc<dyn Service>>,
    /// Tap directories by path.
    pub(crate) taps: HashMap<PathBuf, Arc<TapDir>>,
    pub(crate) loads: Loads,
    /// Whom to tell of connections with triggers.
    pub(crate) triggers: Triggers,
    /// Relays for datagrams of SOCKS.
    pub(crate) relays: Relays,
    /// Count of the connections of all listeners.
    pub(crate) all: Arc<Counted>,
    /// Count of the connections to servers whose clients are not accepted yet.
    pub(crate) early: Arc<Counted>,
    /// Number of live connections, which the end of the program waits for.
    pub(crate) live: watch::Sender<u64>,
    /// Whether no new work may begin.
    pub stop: watch::Receiver<bool>,
}

/// A listener: its configuration, and the count of its connections.
pub struct Front {
    /// The configuration.
    pub listener: ListenerConfig,
    /// Policy of the listener, shared by all its flows.
    pub policy: Arc<Policy>,
    /// Policy for bodies of HTTP messages, whose lengths are known, and for data connections of FTP.
    pub bodies: Arc<Policy>,
    pub(crate) tap: Option<Arc<TapDir>>,
    /// What serves its clients, if another crate has its protocol.
    pub(crate) handler: Option<Arc<dyn Handler>>,
    /// Counts of what SOCKS opens beside connections: associations, and sockets of BIND.
    pub(crate) associations: Arc<Counted>,
    pub(crate) binds: Arc<Counted>,
    counted: Arc<Counted>,
}

impl Front {
    pub(crate) fn new(listener: ListenerConfig, shared: &ServerContext) -> Front {
        let counted =
            Counted::new(listener.limits.connections.unwrap_or(u32::MAX), listener.limits.connections_per_client);
        let on_trigger = listener.policy.trigger.map(|_| shared.triggers.on_data(&listener.triggers));
        let policy = Arc::new(Policy { on_trigger, ..listener.policy.clone() });
        let bodies = Arc::new(listener.policy_of_bodies());
        let tap = listener.tap.as_ref().and_then(|dir| shared.taps.get(dir)).cloned();
        let service = shared.services.iter().find(|service| service.serves(&listener.protocol));
        let handler = service.map(|service| service.handler(&listener));
        let of_client = listener.socks().map_or((0, 0), |commands| (commands.udp.per_client, commands.bind.per_client));
        let (associations, binds) = (Counted::new(ASSOCIATIONS, of_client.0), Counted::new(BINDS, of_client.1));
        Front { listener, policy, bodies, tap, handler, associations, binds, counted }
    }

    /// Tells whether the listener's limit of connections is reached, from now on.
    pub(crate) fn full(&self) -> watch::Receiver<bool> {
        self.counted.full()
    }

    /// Counts a connection to a server for a client that is not accepted yet, if it could be.
    pub(crate) fn begin_early(&self, shared: &ServerContext, client: IpAddr) -> Option<Slot> {
        let room = [&shared.all, &self.counted].into_iter().all(|of| of.has_room_beside(&shared.early, client));
        shared.early.enter(Some(client)).ok().filter(|_| room)
    }
}

/// Counts a connection as live as long as it exists, even if its task is cancelled or it has none.
pub struct Live {
    /// The state shared by all connections.
    pub shared: Arc<ServerContext>,
    slots: [Slot; 2],
    /// The relay has it, as long as the flow is not spliced.
    pub(crate) seat: Option<Seat>,
}

impl Live {
    pub(crate) fn enter(
        shared: &Arc<ServerContext>,
        front: &Front,
        peer: SocketAddr,
        awake: usize,
    ) -> Result<Live, Full> {
        // Behind a proxy in front of us, the client is not known yet.
        let client = Some(peer.ip()).filter(|ip| !front.listener.proxy_protocol.expects(*ip));
        let slots = [shared.all.enter(client)?, front.counted.enter(client)?];
        shared.live.send_modify(|n| *n += 1);
        Ok(Live { shared: shared.clone(), slots, seat: Some(shared.loads.seat(awake)) })
    }

    /// Counts the connection for its client, once that is known.
    pub(crate) fn is_from(&mut self, client: SocketAddr) -> Result<(), Full> {
        self.slots.iter_mut().try_for_each(|slot| slot.is_from(client.ip()))
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.shared.live.send_modify(|n| *n -= 1);
    }
}
