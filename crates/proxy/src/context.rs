//! What connections have around them: what all of them share, what those of a listener share, and the place that each takes.

use crate::{
    access_log::AccessLog,
    cache::{self, Cache},
    config::{ListenerConfig, Protocol},
    counters::Counters,
    limits::{Counted, Full, Slot},
    pool::{Pool, Upkeep},
    resolve::Resolver,
    tap_dir::TapDir,
    workers::{Loads, Seat},
};
use longsplice_engine::{Policy, Splicer};
use std::{collections::HashMap, net::SocketAddr, path::PathBuf, sync::Arc};
use tokio::sync::watch;

/// What all connections share.
pub(crate) struct Shared {
    pub(crate) splicer: Splicer,
    pub(crate) resolver: Resolver,
    pub(crate) log: AccessLog,
    pub(crate) counters: Arc<Counters>,
    /// By name.
    pub(crate) pools: HashMap<String, Arc<Pool>>,
    /// By directory.
    pub(crate) taps: HashMap<PathBuf, Arc<TapDir>>,
    pub(crate) loads: Loads,
    /// By directory.
    pub(crate) caches: HashMap<PathBuf, Arc<Cache>>,
    /// Connections of all listeners.
    pub(crate) all: Arc<Counted>,
    /// How many there are, for the end to wait on.
    pub(crate) live: watch::Sender<u64>,
    /// Whether no more is to be begun.
    pub(crate) stop: watch::Receiver<bool>,
}

impl Shared {
    /// What the tasks of pools need of all this.
    pub(crate) fn upkeep(&self) -> Upkeep {
        Upkeep {
            splicer: self.splicer.clone(),
            resolver: self.resolver.clone(),
            counters: self.counters.clone(),
            stop: self.stop.clone(),
        }
    }
}

/// A listener's configuration and the count of its connections.
pub(crate) struct Front {
    pub(crate) listener: ListenerConfig,
    /// The listener's, shared by all its flows.
    pub(crate) policy: Arc<Policy>,
    /// The same for bodies of HTTP messages, whose lengths are known.
    pub(crate) bodies: Arc<Policy>,
    pub(crate) tap: Option<Arc<TapDir>>,
    /// And what a reply in it has passed.
    pub(crate) cache: Option<(Arc<Cache>, Arc<str>)>,
    counted: Arc<Counted>,
}

impl Front {
    pub(crate) fn new(listener: ListenerConfig, shared: &Shared) -> Front {
        let counted =
            Counted::new(listener.limits.connections.unwrap_or(u32::MAX), listener.limits.connections_per_client);
        let policy = Arc::new(listener.policy.clone());
        let bodies = Arc::new(listener.policy_of_bodies());
        let tap = listener.tap.as_ref().and_then(|dir| shared.taps.get(dir)).cloned();
        let cache = listener.cache().and_then(|c| shared.caches.get(&c.dir)).cloned();
        let cache = match &listener.protocol {
            Protocol::Http(http) => cache.map(|cache| (cache, cache::fingerprint(&http.filter))),
            _ => None,
        };
        Front { listener, policy, bodies, tap, cache, counted }
    }
}

/// Counts a connection as live while it exists, also when its task is torn down or when it has none.
pub(crate) struct Live {
    pub(crate) shared: Arc<Shared>,
    slots: [Slot; 2],
    pub(crate) seat: Seat,
}

impl Live {
    pub(crate) fn enter(shared: &Arc<Shared>, front: &Front, peer: SocketAddr, awake: usize) -> Result<Live, Full> {
        // Of a connection that a proxy before us serves, the client is still to be told.
        let client = Some(peer.ip()).filter(|ip| !front.listener.proxy_protocol.expects(*ip));
        let slots = [shared.all.enter(client)?, front.counted.enter(client)?];
        shared.live.send_modify(|n| *n += 1);
        Ok(Live { shared: shared.clone(), slots, seat: shared.loads.seat(awake) })
    }

    /// Counts the connection for its client, as soon as that is known.
    pub(crate) fn is_from(&mut self, client: SocketAddr) -> Result<(), Full> {
        self.slots.iter_mut().try_for_each(|slot| slot.is_from(client.ip()))
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.shared.live.send_modify(|n| *n -= 1);
    }
}
