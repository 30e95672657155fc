//! Pools of equivalent servers: which server is chosen next, and how well each of them is.
//!
//! Who needs a server takes a [`Lease`] on one ([`Pool::pick`]), which counts as its load until it is dropped: a relayed connection
//! has it up to its end, spliced or not. What comes of it counts for the health of the server ([`Member::succeeded`],
//! [`Member::failed`]).
//!
//! A reload that changes a pool makes another one. What is known of a server goes on with the server of the same address in the
//! pool of the same name (`State`), and so does the count of its connections.

mod balance;
mod check;
pub(crate) mod commanded;
mod health;
mod hello;
mod queue;

use crate::{
    config::pool::{Balance, HealthLimits, PoolConfig, ServerConfig},
    counters::Counters,
    events::{Events, Kind},
    log::access_log::Record,
    resolve::Resolver,
    target::Target,
};
pub use balance::hash;
use balance::{Candidate, Turns, hash_of, owner};
use health::{Change, Health, ServerHealth};
use longsplice_engine::Splicer;
use queue::Queue;
use std::{
    collections::HashMap,
    fmt::{self, Display},
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::{sync::watch, task::JoinHandle};

/// Running pools by name.
pub type Pools = Arc<HashMap<String, Arc<Pool>>>;

/// Everything that the tasks of a pool use.
#[derive(Clone)]
pub struct Upkeep {
    /// The engine.
    pub splicer: Splicer,
    /// Addresses of names.
    pub resolver: Resolver,
    /// What happened so far.
    pub counters: Arc<Counters>,
    /// Whether no new work may begin.
    pub stop: watch::Receiver<bool>,
}

impl fmt::Debug for Upkeep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Upkeep")
    }
}

/// A running pool.
#[derive(Debug)]
pub struct Pool {
    /// Its configuration.
    pub config: PoolConfig,
    /// Its servers, in the order of the configuration.
    pub members: Vec<Arc<Member>>,
    turns: Mutex<Turns>,
    queue: Arc<Queue>,
    /// Its tasks have begun.
    tended: OnceLock<()>,
}

/// A server of a running pool.
#[derive(Debug)]
pub struct Member {
    /// Its address.
    pub target: Target,
    /// Its address, as the log has it.
    pub name: Arc<str>,
    /// Name of the pool.
    pub pool: Arc<str>,
    /// `POOL/HOST:PORT`, as operators name it.
    pub label: Arc<str>,
    /// Its place in the pool.
    pub index: usize,
    weight: u32,
    backup: bool,
    most: u32,
    hash: u64,
    slow_start: Duration,
    limits: HealthLimits,
    is_checked: bool,
    state: Arc<State>,
    queue: Arc<Queue>,
    events: Arc<Events>,
}

/// What is known of a server, whatever a reload changes.
#[derive(Debug, Default)]
struct State {
    /// When it came back.
    back: Mutex<Option<Instant>>,
    active: AtomicU32,
    health: Mutex<Health>,
    /// Number of times that it was chosen, and of those that it has failed.
    chosen: AtomicU64,
    failed: AtomicU64,
    /// Whether an operator has told it to take nothing new.
    duty: AtomicU8,
    /// The weight that it was told, behind the one that the configuration had then; 0: none.
    told: AtomicU32,
}

/// What decides about the server, besides the servers themselves.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// For consistent hashing.
    pub hash: u64,
    /// Place of the server that the client has had before, and should have again.
    pub named: Option<usize>,
}

impl Key {
    /// Returns the key of a client.
    pub fn of(client: IpAddr) -> Key {
        Key { hash: hash_of(client), named: None }
    }
}

/// What there is for a key.
enum Choice {
    Of(Lease),
    /// The servers that it could have are full.
    Full,
    /// No server is up.
    None,
}

/// A connection or request that occupies a server until it is dropped.
#[derive(Debug)]
pub struct Lease(pub Arc<Member>);

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics in the middle of a change, so the data behind a poisoned lock is consistent.
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns pools of this configuration. What is there already, and the same, is used again. `events`: whom to tell of their servers.
pub fn open(config: &[PoolConfig], before: &Pools, events: &Arc<Events>) -> Pools {
    let pool = |config: &PoolConfig| {
        let before = before.get(&config.name);
        let same = before.filter(|before| before.config == *config).cloned();
        (config.name.clone(), same.unwrap_or_else(|| Arc::new(Pool::new(config.clone(), before.map(|p| &**p), events))))
    };
    Arc::new(config.iter().map(pool).collect())
}

impl Pool {
    /// `before`: the pool of the same name in the configuration before.
    pub fn new(config: PoolConfig, before: Option<&Pool>, events: &Arc<Events>) -> Pool {
        let pool: Arc<str> = config.name.as_str().into();
        let queue = before.map(|before| before.queue.clone()).unwrap_or_default();
        let member = |(index, server): (usize, &ServerConfig)| {
            let known = before.and_then(|before| before.members.iter().find(|known| known.target == server.target));
            let state = known.map(|known| known.state.clone()).unwrap_or_default();
            let name = server.target.to_string();
            Arc::new(Member {
                target: server.target.clone(),
                pool: pool.clone(),
                index,
                weight: server.weight,
                backup: server.backup,
                most: server.max_connections.unwrap_or(u32::MAX),
                label: format!("{pool}/{name}").into(),
                hash: hash(name.as_bytes()),
                name: name.into(),
                slow_start: config.slow_start,
                limits: config.health,
                is_checked: config.check.is_some(),
                state,
                queue: queue.clone(),
                events: events.clone(),
            })
        };
        let members: Vec<_> = config.servers.iter().enumerate().map(member).collect();
        Pool { turns: Mutex::new(Turns::new(members.len())), members, config, queue, tended: OnceLock::new() }
    }

    /// Returns a server for this key that has room, except those in `tried`: the one that the key names, or another that is up; if
    /// none is, a backup that is; if there is none either, one that was taken out after failures.
    pub fn pick(&self, key: Key, tried: &[usize]) -> Option<Lease> {
        if let Choice::Of(lease) = self.choose(key, tried) { Some(lease) } else { None }
    }

    fn choose(&self, key: Key, tried: &[usize]) -> Choice {
        let now = Instant::now();
        let named = key.named.filter(|index| !tried.contains(index)).map(|index| &self.members[index]);
        if let Some(lease) = named.filter(|m| m.health(now) == ServerHealth::Up && m.takes_new()).and_then(Lease::new) {
            return Choice::Of(lease);
        }
        loop {
            let left = self.members.iter().filter(|m| !tried.contains(&m.index) && m.takes_new());
            let look = |m: &Arc<Member>| ((m.health(now), m.backup), m.candidate(now));
            let all: Vec<((ServerHealth, bool), Candidate)> = left.map(look).collect();
            let best = all.iter().map(|(rank, _)| *rank).min().filter(|(health, _)| *health != ServerHealth::Down);
            let Some(best) = best else { return Choice::None };
            let has_room = |c: &Candidate| c.active < self.members[c.index].most;
            let best = all.into_iter().filter(|(rank, _)| *rank == best).map(|(_, candidate)| candidate);
            let candidates: Vec<Candidate> = best.filter(has_room).collect();
            let index = match self.config.balance {
                Balance::RoundRobin => lock(&self.turns).next(&candidates),
                Balance::LeastConnections => lock(&self.turns).least(&candidates),
                Balance::ConsistentHash(_) => owner(key.hash, &candidates),
            };
            let Some(index) = index else { return Choice::Full };
            // another one may have taken the last place meanwhile
            if let Some(lease) = Lease::new(&self.members[index]) {
                return Choice::Of(lease);
            }
        }
    }

    /// Returns a lease on this server for a connection that it has already, whatever its limit is.
    pub(crate) fn lease_again(&self, member: &str) -> Option<Lease> {
        let member = self.members.iter().find(|known| *known.name == *member)?;
        member.state.active.fetch_add(1, Relaxed);
        Some(Lease(member.clone()))
    }

    /// Starts the tasks that check servers, unless they run. They end with the pool, which lives as long as a listener leads to it,
    /// or a connection that began when one did is not relayed yet.
    pub fn tend(self: &Arc<Self>, upkeep: &Upkeep) -> Vec<JoinHandle<()>> {
        let Some(check) = self.config.check.as_ref().filter(|_| self.tended.set(()).is_ok()) else { return Vec::new() };
        let watch = |index| tokio::spawn(check::watch(Arc::downgrade(self), index, check.clone(), upkeep.clone()));
        (0..self.members.len()).map(watch).collect()
    }
}

impl Member {
    fn health(&self, now: Instant) -> ServerHealth {
        let health = lock(&self.state.health);
        // what checks said before a reload counts for nothing without checks
        if self.is_checked { health.state(now) } else { health.by_use(now) }
    }

    fn candidate(&self, now: Instant) -> Candidate {
        let (index, active, hash) = (self.index, self.state.active.load(Relaxed), self.hash);
        Candidate { index, weight: self.weight_at(now), active, hash }
    }

    /// Returns the weight at this time, in hundredths if it may be less than the whole one.
    fn weight_at(&self, now: Instant) -> u32 {
        let weight = self.weight_told();
        if self.slow_start.is_zero() {
            return weight;
        }
        let since = lock(&self.state.back).map_or(Duration::MAX, |back| now.saturating_duration_since(back));
        let since = if lock(&self.state.health).is_on_trial() { Duration::ZERO } else { since };
        let share = since.as_secs_f64() / self.slow_start.as_secs_f64();
        ((f64::from(weight) * 100.0 * share.min(1.0)) as u32).max(1)
    }

    /// Records that the server has done what it was asked for. `what`: for the log.
    pub fn succeeded(&self, counters: &Counters, what: &dyn Display) {
        let change = lock(&self.state.health).succeeded();
        self.note(counters, change, what);
    }

    /// Records that the server has not done what it was asked for.
    pub fn failed(&self, counters: &Counters, why: &dyn Display) {
        self.state.failed.fetch_add(1, Relaxed);
        let change = lock(&self.state.health).failed(&self.limits, Instant::now());
        self.note(counters, change, why);
    }

    fn checked(&self, counters: &Counters, result: Result<(), String>) {
        let change = lock(&self.state.health).checked(&self.limits, result.is_ok());
        self.note(counters, change, &result.err().unwrap_or_else(|| "checks are good".into()));
    }

    fn note(&self, counters: &Counters, change: Option<Change>, why: &dyn Display) {
        match change {
            Some(Change::Up) => {
                *lock(&self.state.back) = Some(Instant::now());
                self.queue.freed();
                Counters::add(&counters.servers_up);
                tracing::info!("pool {}: {} is up: {why}", self.pool, self.name);
                self.events.member(Kind::MemberUp, (&self.pool, &self.name), why);
            }
            Some(Change::Down) => {
                Counters::add(&counters.servers_down);
                tracing::warn!("pool {}: {} is down: {why}", self.pool, self.name);
                self.events.member(Kind::MemberDown, (&self.pool, &self.name), why);
            }
            None => {}
        }
    }
}

impl Lease {
    /// `None`: the server has as many as it may have.
    fn new(member: &Arc<Member>) -> Option<Lease> {
        let enter = |n| (n < member.most).then_some(n + 1);
        member.state.active.fetch_update(Relaxed, Relaxed, enter).ok()?;
        member.state.chosen.fetch_add(1, Relaxed);
        Some(Lease(member.clone()))
    }

    /// Fills in whose server it is.
    pub fn note(&self, record: &mut Record) {
        (record.pool, record.member) = (Some(self.0.pool.clone()), Some(self.0.name.clone()));
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.state.active.fetch_sub(1, Relaxed);
        self.0.queue.freed();
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
