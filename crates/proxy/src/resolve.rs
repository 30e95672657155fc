//! Resolves a target to a list of addresses, in the order in which to try them.
//!
//! `getaddrinfo` cannot be cancelled: a look-up that exceeds its time limit goes on in its thread.
//! The number of look-ups is therefore bounded, and each counts until it has really ended.
//!
//! # What is remembered
//! A resolver that is slow, dead or wrong for a moment must not take servers down that are well, so the last good answer for each
//! name is kept ([RFC 8767](https://www.rfc-editor.org/rfc/rfc8767)). `getaddrinfo` does not tell how long an answer is valid,
//! so our own times apply: an answer is used as it is for [`FRESH`]. After that, the name is looked up again, and the old answer
//! is used only if this fails or takes longer than [`PATIENCE`], and until it is older than [`STALE`]. `getaddrinfo` does not
//! tell a name that does not exist from a resolver that fails, either, so both count as failures. All who wait for a name wait
//! for the same look-up.
//!
//! Names of the configuration are looked up in the background all the time ([`Resolver::follow`]), so their connections
//! hardly ever wait.

use crate::{
    fault::{Fault, Step},
    target::{Host, Target},
};
use std::{
    collections::HashMap,
    fmt,
    future::Future,
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::{
    sync::{Semaphore, watch},
    time::{sleep, timeout},
};

/// Half of the runtime's threads for blocking calls.
const LOOKUPS_MAX: usize = 256;
/// Maximum number of look-ups of followed names at a time, so that many of them leave room for those of clients.
const FOLLOWING_MAX: usize = 64;
/// Maximum number of addresses tried per name. If none of the first ones works, later ones hardly will.
const ADDRESSES_MAX: usize = 8;
/// Maximum number of names of clients that are remembered: two megabytes. That which was not used for the longest time goes.
const NAMES_MAX: usize = 4096;

/// Age up to which an answer is used without another look-up: a name that has changed is followed after this time.
const FRESH: Duration = Duration::from_secs(10);
/// Age from which an answer is not used any more: long enough to mend a resolver. Also how long a name that was removed is used.
const STALE: Duration = Duration::from_secs(3600);
/// Time for which a client waits for a new answer if there is an old one; a resolver that is well takes less. Then nobody
/// waits for this name during [`FRESH`].
const PATIENCE: Duration = Duration::from_secs(1);
/// Least time between a look-up that has failed and the next one.
const RETRY: Duration = Duration::from_secs(2);

type Found = io::Result<Vec<IpAddr>>;
type LookUp = dyn Fn(String) -> Pin<Box<dyn Future<Output = Found> + Send>> + Send + Sync;
/// The result of a look-up, for all who wait for it; `None`: it is running.
type Told = watch::Receiver<Option<Result<Arc<[IpAddr]>, Arc<io::Error>>>>;

/// Resolver of names. Clones share what is remembered and the limit of look-ups.
#[derive(Clone)]
pub struct Resolver(Arc<Inner>);

struct Inner {
    look_up: Box<LookUp>,
    lookups: Semaphore,
    following: Semaphore,
    names: Mutex<Names>,
    /// Number of times that an old answer was used because a look-up had failed or took too long.
    stale: AtomicU64,
}

#[derive(Default)]
struct Names {
    known: HashMap<String, Known>,
    /// Look-ups that have not ended. There are no more than connections and followed names.
    running: HashMap<String, Told>,
    /// Names of the configuration, which are never forgotten, and how often each is followed.
    followed: HashMap<String, usize>,
}

/// The last good answer for a name.
#[derive(Clone)]
struct Known {
    addresses: Arc<[IpAddr]>,
    since: Instant,
    used: Instant,
    /// When a look-up has failed or was late, if one has since.
    failed: Option<Instant>,
    /// None of the addresses could be connected to, so they may have changed.
    doubted: bool,
}

/// What an answer is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// It is used as it is.
    Fresh,
    /// It is used as it is, and the name is looked up for those who come later.
    Meanwhile,
    /// It is used if a look-up does not yield another one in time.
    Else,
    /// It is too old.
    Never,
}

impl Known {
    fn judge(&self, now: Instant, followed: bool) -> Use {
        let age = now.saturating_duration_since(self.since);
        let failed = self.failed.map(|at| now.saturating_duration_since(at));
        match failed {
            _ if age >= STALE => Use::Never,
            // somebody looks it up already
            _ if !self.doubted && (followed || age < FRESH) => Use::Fresh,
            Some(ago) if ago < RETRY => Use::Fresh,
            Some(ago) if ago < FRESH => Use::Meanwhile,
            _ => Use::Else,
        }
    }
}

impl Default for Resolver {
    fn default() -> Self {
        Resolver::by(|name| {
            Box::pin(async move {
                let found = tokio::net::lookup_host((name, 0)).await?;
                Ok(found.map(|a| a.ip()).collect())
            })
        })
    }
}

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resolver").finish_non_exhaustive()
    }
}

impl Resolver {
    fn by(look_up: impl Fn(String) -> Pin<Box<dyn Future<Output = Found> + Send>> + Send + Sync + 'static) -> Resolver {
        Resolver(Arc::new(Inner {
            look_up: Box::new(look_up),
            lookups: Semaphore::new(LOOKUPS_MAX),
            following: Semaphore::new(FOLLOWING_MAX),
            names: Mutex::default(),
            stale: AtomicU64::new(0),
        }))
    }

    /// Returns the addresses of `target`, at least one, with alternating families.
    pub async fn resolve(&self, target: &Target, limit: Duration) -> Result<Vec<SocketAddr>, Fault> {
        let name = match &target.host {
            Host::Ip(ip) => return Ok(vec![SocketAddr::new(*ip, target.port)]),
            Host::Name(name) => name,
        };
        let with_port = |ips: &[IpAddr]| ips.iter().map(|ip| SocketAddr::new(*ip, target.port)).collect();
        let (known, told) = self.begin(name);
        let Some(told) = told else { return Ok(with_port(&known.unwrap_or_default())) };
        let wait = if known.is_some() { limit.min(PATIENCE) } else { limit };
        let found = timeout(wait, ended(told)).await;
        match (found, known) {
            (Ok(Ok(found)), _) => Ok(with_port(&found)),
            (late_or_failed, Some(known)) => {
                self.0.stale.fetch_add(1, Relaxed);
                if late_or_failed.is_err() {
                    self.0.is_ill(name);
                }
                Ok(with_port(&known))
            }
            (Ok(Err(e)), None) => Err(Fault::NoAddress(io::Error::new(e.kind(), e.to_string()))),
            (Err(_), None) => Err(Fault::Timeout(Step::Resolve)),
        }
    }

    /// Returns the answer that may be used at once, or otherwise the look-up to wait for, with the answer if that is in vain.
    fn begin(&self, name: &str) -> (Option<Arc<[IpAddr]>>, Option<Told>) {
        let mut names = self.0.lock();
        let (now, followed) = (Instant::now(), names.followed.contains_key(name));
        let known = names.known.get_mut(name).map(|known| {
            known.used = now;
            (known.judge(now, followed), known.clone())
        });
        let of = |known: &Known| Some(known.addresses.clone());
        match &known {
            Some((Use::Fresh | Use::Meanwhile, known)) if known.failed.is_some() => {
                self.0.stale.fetch_add(1, Relaxed);
            }
            _ => {}
        }
        match &known {
            Some((Use::Fresh, known)) => (of(known), None),
            Some((Use::Meanwhile, known)) => {
                self.look_up(&mut names, name);
                (of(known), None)
            }
            Some((Use::Else, known)) => (of(known), Some(self.look_up(&mut names, name))),
            Some((Use::Never, _)) | None => (None, Some(self.look_up(&mut names, name))),
        }
    }

    /// Returns the last good answer for a target, without waiting for a look-up. For names that are followed.
    pub(crate) fn known(&self, target: &Target) -> Vec<SocketAddr> {
        let with_port = |ip: &IpAddr| SocketAddr::new(*ip, target.port);
        match &target.host {
            Host::Ip(ip) => vec![with_port(ip)],
            Host::Name(name) => {
                let names = self.0.lock();
                let known = names.known.get(name).filter(|known| known.judge(Instant::now(), true) != Use::Never);
                known.map_or_else(Vec::new, |known| known.addresses.iter().map(with_port).collect())
            }
        }
    }

    /// Says that no address of the target could be connected to: the next one who asks looks it up anew.
    pub(crate) fn doubt(&self, target: &Target) {
        if let Host::Name(name) = &target.host
            && let Some(known) = self.0.lock().known.get_mut(name)
        {
            known.doubted = true;
        }
    }

    /// Looks a name of the configuration up again and again, so that its connections need not wait. Never
    /// returns; when it is dropped, the name is one like others again.
    pub(crate) async fn follow(self, name: String) {
        let _followed = Followed::begin(&self, &name);
        let mut well = true;
        loop {
            let permit = self.0.following.acquire().await;
            let told = self.look_up(&mut self.0.lock(), &name);
            let found = ended(told).await;
            drop(permit);
            if let Err(error) = &found
                && well
            {
                let has = self.0.lock().known.contains_key(&name);
                let then = if has { "its last addresses are used, for an hour" } else { "it cannot be connected to" };
                tracing::warn!("cannot look up {name} ({error}): {then}");
            } else if found.is_ok() && !well {
                tracing::info!("{name} is looked up again");
            }
            well = found.is_ok();
            sleep(if well { FRESH } else { RETRY }).await;
        }
    }

    /// Returns how often an old answer was used because a look-up had failed or took too long.
    pub(crate) fn stale(&self) -> u64 {
        self.0.stale.load(Relaxed)
    }

    /// Begins a look-up of this name, or joins the one that is running.
    fn look_up(&self, names: &mut Names, name: &str) -> Told {
        // without a sender, the runtime of the one that was running has ended
        if let Some(told) = names.running.get(name).filter(|told| told.has_changed().is_ok()) {
            return told.clone();
        }
        let (tell, told) = watch::channel(None);
        names.running.insert(name.to_owned(), told.clone());
        let (inner, name) = (self.0.clone(), name.to_owned());
        tokio::spawn(async move {
            let permit = inner.lookups.acquire().await;
            let found = (inner.look_up)(name.clone()).await.map(alternate);
            drop(permit);
            let found = found.and_then(|found| match found.is_empty() {
                true => Err(io::Error::other("the name has none")),
                false => Ok(Arc::from(found)),
            });
            inner.learn(name, &found);
            // those who waited may have given up
            let _ = tell.send(Some(found.map_err(Arc::new)));
        });
        told
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Names> {
        // No code panics in the middle of a change, so the data behind a poisoned lock is consistent.
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn learn(&self, name: String, found: &io::Result<Arc<[IpAddr]>>) {
        let (mut names, now) = (self.lock(), Instant::now());
        names.running.remove(&name);
        match found {
            Ok(addresses) => {
                let addresses = addresses.clone();
                let known = Known { addresses, since: now, used: now, failed: None, doubted: false };
                names.known.insert(name, known);
                names.make_room();
            }
            Err(_) => names.fail(&name, now),
        }
    }

    /// The resolver is slower than anybody wants to wait.
    fn is_ill(&self, name: &str) {
        let mut names = self.lock();
        // it may have answered at this moment
        if names.running.contains_key(name) {
            names.fail(name, Instant::now());
        }
    }
}

/// A name that is followed, until this is dropped.
struct Followed {
    resolver: Resolver,
    name: String,
}

impl Followed {
    fn begin(resolver: &Resolver, name: &str) -> Followed {
        *resolver.0.lock().followed.entry(name.to_owned()).or_default() += 1;
        Followed { resolver: resolver.clone(), name: name.to_owned() }
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        let mut names = self.resolver.0.lock();
        if let Some(n) = names.followed.get_mut(&self.name) {
            *n -= 1;
            if *n == 0 {
                names.followed.remove(&self.name);
            }
        }
    }
}

impl Names {
    fn fail(&mut self, name: &str, now: Instant) {
        self.known.get_mut(name).into_iter().for_each(|known| known.failed = Some(now));
    }

    /// Forgets what was not used for the longest time, if there are too many names.
    fn make_room(&mut self) {
        if self.known.len() > NAMES_MAX + self.followed.len() {
            let of_clients = self.known.iter().filter(|(name, _)| !self.followed.contains_key(*name));
            let oldest = of_clients.min_by_key(|(_, known)| known.used).map(|(name, _)| name.clone());
            oldest.and_then(|name| self.known.remove(&name));
        }
    }
}

/// Waits for the end of a look-up.
async fn ended(mut told: Told) -> Result<Arc<[IpAddr]>, Arc<io::Error>> {
    let found = told.wait_for(Option::is_some).await.map(|found| found.clone());
    found.ok().flatten().unwrap_or_else(|| Err(Arc::new(io::Error::other("the look-up was given up"))))
}

/// Alternates between the families, starting with that of the first address. The resolver has sorted them by
/// preference (RFC 6724), but the other family should not have to wait for all of the first (RFC 8305, section 4).
fn alternate(found: Vec<IpAddr>) -> Vec<IpAddr> {
    let mut distinct: Vec<IpAddr> = Vec::new();
    for address in found {
        let address = address.to_canonical();
        if !distinct.contains(&address) {
            distinct.push(address);
        }
    }
    let first_is_v6 = distinct.first().is_some_and(IpAddr::is_ipv6);
    let (one, other): (Vec<_>, Vec<_>) = distinct.into_iter().partition(|a| a.is_ipv6() == first_is_v6);
    let mut other = other.into_iter();
    let mut mixed = Vec::new();
    for address in one {
        mixed.push(address);
        mixed.extend(other.next());
    }
    mixed.extend(other);
    mixed.truncate(ADDRESSES_MAX);
    mixed
}

#[cfg(test)]
#[path = "resolve_tests.rs"]
mod tests;
