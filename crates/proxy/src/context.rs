//! The context of a connection: the state shared by all, that shared by a listener, and the slot that the connection takes.

use crate::{
    access_log::AccessLog,
    cache::{self, Cache},
    config::ListenerConfig,
    counters::Counters,
    limits::{Counted, Full, Slot},
    own::Listening,
    pool::{Pool, Upkeep},
    resolve::Resolver,
    tap_dir::TapDir,
    workers::{Loads, Seat},
};
use longsplice_engine::{Policy, Splicer};
use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
};
use tokio::sync::watch;

/// State shared by all connections.
pub(crate) struct ServerContext {
    pub(crate) splicer: Splicer,
    pub(crate) resolver: Resolver,
    /// Listening sockets.
    pub(crate) listening: Listening,
    pub(crate) log: AccessLog,
    pub(crate) counters: Arc<Counters>,
    /// Pools by name.
    pub(crate) pools: HashMap<String, Arc<Pool>>,
    /// Tap directories by path.
    pub(crate) taps: HashMap<PathBuf, Arc<TapDir>>,
    pub(crate) loads: Loads,
    /// Caches by directory.
    pub(crate) caches: HashMap<PathBuf, Arc<Cache>>,
    /// Count of the connections of all listeners.
    pub(crate) all: Arc<Counted>,
    /// Count of the connections to servers whose clients are not accepted yet.
    pub(crate) early: Arc<Counted>,
    /// Number of live connections, which the end of the program waits for.
    pub(crate) live: watch::Sender<u64>,
    /// Whether no new work may begin.
    pub(crate) stop: watch::Receiver<bool>,
}

impl ServerContext {
    /// Returns the part that the tasks of pools need.
    pub(crate) fn upkeep(&self) -> Upkeep {
        Upkeep {
            splicer: self.splicer.clone(),
            resolver: self.resolver.clone(),
            counters: self.counters.clone(),
            stop: self.stop.clone(),
        }
    }
}

/// A listener: its configuration, and the count of its connections.
pub(crate) struct Front {
    pub(crate) listener: ListenerConfig,
    /// Policy of the listener, shared by all its flows.
    pub(crate) policy: Arc<Policy>,
    /// Policy for bodies of HTTP messages, whose lengths are known.
    pub(crate) bodies: Arc<Policy>,
    pub(crate) tap: Option<Arc<TapDir>>,
    /// Cache, and the fingerprint of the filter that stored replies have passed.
    pub(crate) cache: Option<(Arc<Cache>, Arc<str>)>,
    counted: Arc<Counted>,
}

impl Front {
    pub(crate) fn new(listener: ListenerConfig, shared: &ServerContext) -> Front {
        let counted =
            Counted::new(listener.limits.connections.unwrap_or(u32::MAX), listener.limits.connections_per_client);
        let policy = Arc::new(listener.policy.clone());
        let bodies = Arc::new(listener.policy_of_bodies());
        let tap = listener.tap.as_ref().and_then(|dir| shared.taps.get(dir)).cloned();
        let cache = listener.http().and_then(|http| {
            let cache = shared.caches.get(&http.cache.as_ref()?.dir)?;
            Some((cache.clone(), cache::fingerprint(&http.filter)))
        });
        Front { listener, policy, bodies, tap, cache, counted }
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
pub(crate) struct Live {
    pub(crate) shared: Arc<ServerContext>,
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
