//! HTTP as one of the protocols of a program: what all its listeners share, and what goes on beside connections.

use crate::{
    cache::{self, Cache},
    connection::{self, HttpListener},
    pool::{Pool, Upkeep},
};
use bytes::Bytes;
use longsplice_engine::Leg;
use longsplice_proxy::{
    Config, CounterValues, Handler, ListenerConfig, Protocol, Purge, Purged, Service, StartError,
    context::{Front, Live, ServerContext},
    counters::cache::CacheValues,
};
use std::{collections::HashMap, path::PathBuf, pin::Pin, sync::Arc, time::Duration};
use tokio::task::JoinHandle;

/// The pools and caches of all listeners.
struct Http {
    /// Pools by name.
    pools: Arc<HashMap<String, Arc<Pool>>>,
    /// Caches by directory.
    caches: HashMap<PathBuf, Arc<Cache>>,
}

/// Opens the caches of the configuration, and makes its pools. Fails if a cache cannot be had.
pub fn open(config: &Config) -> Result<Arc<dyn Service>, StartError> {
    let mut caches = HashMap::new();
    for config in config.listeners.iter().filter_map(ListenerConfig::cache) {
        if !caches.contains_key(&config.dir) {
            let cache = Cache::open(config);
            let cache = cache.map_err(|source| StartError::Cache { dir: config.dir.clone(), source })?;
            caches.insert(config.dir.clone(), Arc::new(cache));
        }
    }
    let pools = config.pools.iter().map(|pool| (pool.name.clone(), Arc::new(Pool::new(pool.clone())))).collect();
    Ok(Arc::new(Http { pools: Arc::new(pools), caches }))
}

impl Service for Http {
    fn serves(&self, protocol: &Protocol) -> bool {
        matches!(protocol, Protocol::Http(_))
    }

    fn handler(&self, listener: &ListenerConfig) -> Arc<dyn Handler> {
        let cache = listener.http().and_then(|http| {
            let cache = self.caches.get(&http.cache.as_ref()?.dir)?;
            Some((cache.clone(), cache::fingerprint(http)))
        });
        Arc::new(HttpListener { pools: self.pools.clone(), cache })
    }

    fn tend(&self, shared: &ServerContext) -> Vec<JoinHandle<()>> {
        let upkeep = Upkeep {
            splicer: shared.splicer.clone(),
            resolver: shared.resolver.clone(),
            counters: shared.counters.clone(),
            stop: shared.stop.clone(),
        };
        self.pools.values().flat_map(|pool| pool.tend(&upkeep)).collect()
    }

    fn count(&self, values: &mut CounterValues) {
        values.cache = self.caches.values().fold(CacheValues::default(), |sum, cache| sum.and(&cache.values()));
    }

    fn purge(&self, what: &Purge) -> Purged {
        let mut caches: Vec<_> = self.caches.iter().collect();
        caches.sort_unstable_by_key(|(dir, _)| *dir);
        let (number, after) = what.after.map_or((0, None), |(number, file)| (number, Some(file)));
        let Some((_, cache)) = caches.get(number) else { return Purged::default() };
        let (removed, last) = cache.purge(&what.url, what.below, after);
        let next = last.map_or((number + 1, None), |last| (number, Some(last)));
        let after = (next.0 < caches.len()).then(|| (next.0, next.1.unwrap_or(0)));
        Purged { removed, after }
    }

    fn flush(&self, limit: Duration) {
        self.caches.values().for_each(|cache| cache.flush(limit));
    }
}

impl Handler for HttpListener {
    fn serve<'a>(
        &'a self,
        live: Live,
        front: &'a Front,
        client: Leg,
        read: Bytes,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        let http = front.listener.http().expect("HTTP is the only protocol that the service has");
        Box::pin(connection::serve(live, (front, http, self), (client, read)))
    }
}
