//! HTTP as one of the protocols of a program: what all its listeners share, and what goes on beside connections.

use crate::{
    cache::{self, Cache, Leaving},
    connection::{self, HttpListener},
    pool::Pool,
};
use bytes::Bytes;
use longsplice_engine::Leg;
use longsplice_proxy::{
    Config, CounterValues, Handler, ListenerConfig, Protocol, Purge, Purged, Service, StartError,
    context::{Front, Live, ServerContext},
    counters::cache::CacheValues,
    inherited::Inherited,
    pool::Pools,
};
use std::{
    collections::HashMap,
    path::PathBuf,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};
use tokio::task::JoinHandle;

/// Time that a cache has to leave its directory, for the same one again: its writer ends within milliseconds.
const LEAVES_WITHIN: Duration = Duration::from_secs(2);

/// Caches by directory, of listeners that there are or were.
type Known = HashMap<PathBuf, (Weak<Cache>, Leaving)>;

/// The pools and caches of all listeners.
struct Http {
    /// Pools by name.
    pools: Arc<HashMap<String, Arc<Pool>>>,
    /// Caches by directory.
    caches: HashMap<PathBuf, Arc<Cache>>,
    /// Those of configurations before, too.
    all: Arc<Mutex<Known>>,
}

/// Opens the caches of the configuration. Fails if a cache cannot be had.
pub fn open(config: &Config, pools: &Pools, inherited: &Inherited) -> Result<Arc<dyn Service>, StartError> {
    let none = Http { pools: Arc::default(), caches: HashMap::new(), all: Arc::default() };
    Ok(Arc::new(none.opened(config, pools, inherited)?))
}

impl Http {
    /// Returns what this configuration needs. What is there already, and the same, is used again.
    fn opened(&self, config: &Config, pools: &Pools, inherited: &Inherited) -> Result<Http, StartError> {
        let (mut caches, mut all) = (HashMap::new(), self.all.lock().unwrap_or_else(PoisonError::into_inner));
        all.retain(|_, (_, leaving)| !leaving.is_over());
        for config in config.listeners.iter().filter_map(ListenerConfig::cache) {
            if !caches.contains_key(&config.dir) {
                // one that no listener has had for a while may still have connections, and only one can have the directory
                let open = || {
                    all.get(&config.dir).into_iter().for_each(|(_, leaving)| leaving.wait(LEAVES_WITHIN));
                    let later = inherited.leaves(&config.dir);
                    let opened = if later { Cache::open_later(config) } else { Cache::open(config) }.map(Arc::new);
                    opened.map_err(|source| StartError::Cache { dir: config.dir.clone(), source })
                };
                let cache = all.get(&config.dir).and_then(|(cache, _)| cache.upgrade()).map_or_else(open, Ok)?;
                all.insert(config.dir.clone(), (Arc::downgrade(&cache), cache.leaving()));
                caches.insert(config.dir.clone(), cache);
            }
        }
        let pools = pools.iter().map(|(name, general)| {
            let before = self.pools.get(name).filter(|before| before.is_of(general)).cloned();
            (name.clone(), before.unwrap_or_else(|| Arc::new(Pool::new(general.clone()))))
        });
        Ok(Http { pools: Arc::new(pools.collect()), caches, all: self.all.clone() })
    }
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
        self.pools.values().filter_map(|pool| pool.tend(&shared.splicer, &shared.stop)).collect()
    }

    fn reopen(&self, config: &Config, pools: &Pools) -> Result<Arc<dyn Service>, StartError> {
        Ok(Arc::new(self.opened(config, pools, &Inherited::default())?))
    }

    fn begin(&self) {
        for (dir, cache) in &self.caches {
            if let Err(error) = cache.begin(LEAVES_WITHIN) {
                let dir = dir.display();
                tracing::error!("cannot take over the cache in {dir}: requests are served without it: {error}");
            }
        }
    }

    fn leave(&self) {
        self.caches.values().for_each(|cache| cache.leave());
    }

    fn take_effect(&self, config: &Config) {
        for of in config.listeners.iter().filter_map(ListenerConfig::cache) {
            self.caches.get(&of.dir).into_iter().for_each(|cache| cache.configure(of));
        }
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
