//! Pools of equivalent servers: selection of a server, health of the servers, and open connections to them.
//!
//! A request takes a [`Lease`] on a server ([`Pool::pick`]), then one of its idle connections ([`Member::idle`])
//! or a new one, and gives the connection back if it may carry another request ([`Member::keep`]). The result
//! counts for the health of the server ([`Member::succeeded`], [`Member::failed`]).
//!
//! An idle connection was opened for another client: its server was given the MSS of that client's path (`Splicer::connect`).
//! For copying, that does not matter, and the data path handles segments that are too long for this client's path.

mod balance;
mod check;
mod health;
mod sticky;

use crate::{habit::Habit, stream::Stream};
use balance::{Candidate, Turns, hash, hash_of, owner};
use health::{Change, Health, ServerHealth};
use longsplice_engine::{Leg, LegOfProxy, Splicer};
use longsplice_http::Request;
use longsplice_proxy::{
    config::pool::{Balance, HealthLimits, Key, PoolConfig, ServerConfig},
    counters::Counters,
    resolve::Resolver,
    target::Target,
};
use std::{
    collections::VecDeque,
    fmt::{self, Display},
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::{
    runtime::{Handle, Id},
    sync::watch,
    task::JoinHandle,
    time::interval,
};

/// Interval between two checks of the idle connections.
const SWEEP: Duration = Duration::from_secs(1);

/// Everything that the tasks of a pool use.
#[derive(Clone)]
pub(crate) struct Upkeep {
    pub splicer: Splicer,
    pub resolver: Resolver,
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
pub(crate) struct Pool {
    pub config: PoolConfig,
    members: Vec<Arc<Member>>,
    turns: Mutex<Turns>,
    /// What its tasks use, once they have begun.
    upkeep: OnceLock<Upkeep>,
}

/// A server of a running pool.
#[derive(Debug)]
pub(crate) struct Member {
    pub target: Target,
    pub pool: Arc<str>,
    pub index: usize,
    weight: u32,
    hash: u64,
    /// What its name is in cookies.
    token: String,
    slow_start: Duration,
    /// When it came back.
    back: Mutex<Option<Instant>>,
    limits: HealthLimits,
    active: AtomicU32,
    health: Mutex<Health>,
    /// Idle connections, the most recently used last.
    idle: Mutex<VecDeque<Idle>>,
    idle_connections: usize,
    idle_time: Duration,
    /// What its replies are like.
    pub habit: Habit,
}

/// An idle connection.
#[derive(Debug)]
struct Idle {
    since: Instant,
    runtime: Id,
    stream: Stream,
}

/// What a request says about its server.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolKey {
    /// For consistent hashing.
    hash: u64,
    /// Index of the server that its cookie names.
    named: Option<usize>,
}

/// A request or an upgraded connection that occupies a server until it is dropped.
#[derive(Debug)]
pub(crate) struct Lease(pub Arc<Member>);

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics in the middle of a change, so the data behind a poisoned lock is consistent.
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    pub fn new(config: PoolConfig) -> Pool {
        let pool: Arc<str> = config.name.as_str().into();
        let member = |(index, server): (usize, &ServerConfig)| {
            Arc::new(Member {
                target: server.target.clone(),
                pool: pool.clone(),
                index,
                weight: server.weight,
                hash: hash(server.target.to_string().as_bytes()),
                token: config.sticky.as_ref().map_or_else(String::new, |sticky| {
                    sticky::token(&sticky.secret, &config.name, &server.target.to_string())
                }),
                slow_start: config.slow_start,
                back: Mutex::default(),
                limits: config.health,
                active: AtomicU32::new(0),
                health: Mutex::default(),
                idle: Mutex::default(),
                idle_connections: config.idle_connections,
                idle_time: config.idle_time,
                habit: Habit::default(),
            })
        };
        let members: Vec<_> = config.servers.iter().enumerate().map(member).collect();
        Pool { turns: Mutex::new(Turns::new(members.len())), members, config, upkeep: OnceLock::new() }
    }

    /// Returns what decides about the server of a request.
    pub fn key(&self, request: &Request, client: IpAddr) -> PoolKey {
        let field = match &self.config.balance {
            Balance::ConsistentHash(Key::Field(name)) => request.fields.all(name).next(),
            _ => None,
        };
        PoolKey { hash: field.map_or_else(|| hash_of(client), hash), named: self.named(request) }
    }

    /// Returns a server for a request with this key, except those in `tried`: the one that its cookie names, or another that is
    /// up; if there is none, one that was taken out after failed requests.
    pub fn pick(&self, key: PoolKey, tried: &[usize]) -> Option<Lease> {
        let now = Instant::now();
        let named = key.named.filter(|index| !tried.contains(index)).map(|index| &self.members[index]);
        if let Some(member) = named.filter(|m| lock(&m.health).state(now) == ServerHealth::Up) {
            return Some(Lease::new(member));
        }
        let left = self.members.iter().filter(|m| !tried.contains(&m.index));
        let look = |m: &Arc<Member>| {
            let state = lock(&m.health).state(now); // unlocked again: the weight asks, too
            (state, m.candidate(now))
        };
        let states: Vec<(ServerHealth, Candidate)> = left.map(look).collect();
        let best = states.iter().map(|(state, _)| *state).min().filter(|s| *s != ServerHealth::Down)?;
        let candidates: Vec<Candidate> = states.into_iter().filter(|(s, _)| *s == best).map(|(_, c)| c).collect();
        let index = match self.config.balance {
            Balance::RoundRobin => lock(&self.turns).next(&candidates),
            Balance::LeastConnections => lock(&self.turns).least(&candidates),
            Balance::ConsistentHash(_) => owner(key.hash, &candidates),
        };
        index.map(|i| Lease::new(&self.members[i]))
    }

    /// Starts the tasks that check servers and close old connections, unless they run. They end with the pool, which lives as
    /// long as a listener leads to it, or a connection that began when one did.
    pub fn tend(self: &Arc<Self>, upkeep: &Upkeep) -> Vec<JoinHandle<()>> {
        if self.upkeep.set(upkeep.clone()).is_err() {
            return Vec::new();
        }
        let mut tasks = vec![tokio::spawn(sweep_all(Arc::downgrade(self), upkeep.clone()))];
        for member in self.config.check.iter().flat_map(|_| &self.members) {
            let member = Arc::downgrade(member);
            tasks.extend(self.config.check.clone().map(|c| tokio::spawn(check::watch(member, c, upkeep.clone()))));
        }
        tasks
    }

    /// What is known of its servers is known of those of `before`, too, the pool of the same name in the configuration before.
    pub fn learn(&self, before: &Pool) {
        for member in &self.members {
            let known = before.members.iter().find(|known| known.target == member.target);
            for known in known.into_iter().filter(|known| known.limits == member.limits) {
                *lock(&member.health) = lock(&known.health).clone();
                *lock(&member.back) = *lock(&known.back);
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let close = |upkeep: &Upkeep| self.members.iter().for_each(|m| m.sweep(&upkeep.splicer, true));
        self.upkeep.get().into_iter().for_each(close);
    }
}

/// Closes connections that were idle for too long or that servers have closed; at the end, all of them.
async fn sweep_all(pool: Weak<Pool>, upkeep: Upkeep) {
    let Upkeep { splicer, mut stop, .. } = upkeep;
    let mut tick = interval(SWEEP);
    loop {
        let stopped = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => true,
            _ = tick.tick() => false,
        };
        let Some(pool) = pool.upgrade() else { return };
        pool.members.iter().for_each(|m| m.sweep(&splicer, stopped));
        if stopped {
            return;
        }
    }
}

impl Member {
    fn candidate(&self, now: Instant) -> Candidate {
        let (index, active, hash) = (self.index, self.active.load(Relaxed), self.hash);
        Candidate { index, weight: self.weight_at(now), active, hash }
    }

    /// Returns the weight at this time, in hundredths if it may be less than the whole one.
    fn weight_at(&self, now: Instant) -> u32 {
        if self.slow_start.is_zero() {
            return self.weight;
        }
        let since = lock(&self.back).map_or(Duration::MAX, |back| now.saturating_duration_since(back));
        let since = if lock(&self.health).is_on_trial() { Duration::ZERO } else { since };
        let share = since.as_secs_f64() / self.slow_start.as_secs_f64();
        ((f64::from(self.weight) * 100.0 * share.min(1.0)) as u32).max(1)
    }

    /// Returns an idle connection for `client` that has received neither a byte (which would not belong to any
    /// request) nor the end of the stream. If no such connection belongs to the current runtime, one is moved there.
    pub fn idle(&self, splicer: &Splicer, client: &Leg) -> Option<Stream> {
        let here = Handle::current().id();
        loop {
            let (since, runtime, mut stream) = {
                let mut idle = lock(&self.idle);
                // a connection that is only copied does not fit a client whose replies may be spliced
                let fits = |i: &Idle| !i.stream.leg.is_only_copied() || client.is_only_copied();
                let at =
                    idle.iter().rposition(|i| i.runtime == here && fits(i)).or_else(|| idle.iter().rposition(fits))?;
                let Idle { since, runtime, stream } = idle.remove(at)?;
                (since, runtime, stream)
            };
            let fresh = since.elapsed() < self.idle_time && stream.is_quiet();
            if fresh && (runtime == here || stream.leg.enter().is_ok()) {
                return Some(stream);
            }
            stream.close(splicer);
        }
    }

    /// Keeps a connection for the next request, unless `stop` is set. If there are too many,
    /// the one that was idle longest is closed.
    pub fn keep(&self, stream: Stream, splicer: &Splicer, stop: &watch::Receiver<bool>) {
        let mut idle = lock(&self.idle);
        idle.push_back(Idle { since: Instant::now(), runtime: Handle::current().id(), stream });
        // Read under the lock: the last sweep, which runs after `stop` is set, finds every connection kept before that.
        let most = if *stop.borrow() { 0 } else { self.idle_connections };
        let surplus = idle.len().saturating_sub(most);
        idle.drain(..surplus).for_each(|i| i.stream.close(splicer));
    }

    fn sweep(&self, splicer: &Splicer, all: bool) {
        let mut idle = lock(&self.idle);
        for mut i in std::mem::take(&mut *idle) {
            if !all && i.since.elapsed() < self.idle_time && i.stream.is_quiet() {
                idle.push_back(i);
            } else {
                i.stream.close(splicer);
            }
        }
    }

    /// Records that the server has answered a request.
    pub fn succeeded(&self, counters: &Counters) {
        let change = lock(&self.health).succeeded();
        self.tell(counters, change, &"it has answered a request");
    }

    /// Records that the server has not answered a request.
    pub fn failed(&self, counters: &Counters, why: &dyn Display) {
        let change = lock(&self.health).failed(&self.limits, Instant::now());
        self.tell(counters, change, why);
    }

    fn checked(&self, counters: &Counters, result: Result<(), String>) {
        let change = lock(&self.health).checked(&self.limits, result.is_ok());
        self.tell(counters, change, &result.err().unwrap_or_else(|| "checks are good".into()));
    }

    fn tell(&self, counters: &Counters, change: Option<Change>, why: &dyn Display) {
        match change {
            Some(Change::Up) => {
                *lock(&self.back) = Some(Instant::now());
                Counters::add(&counters.servers_up);
                tracing::info!("pool {}: {} is up: {why}", self.pool, self.target);
            }
            Some(Change::Down) => {
                Counters::add(&counters.servers_down);
                tracing::warn!("pool {}: {} is down: {why}", self.pool, self.target);
            }
            None => {}
        }
    }
}

impl Lease {
    fn new(member: &Arc<Member>) -> Lease {
        member.active.fetch_add(1, Relaxed);
        Lease(member.clone())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longsplice_proxy::config::pool::Sticky;

    const KEY: PoolKey = PoolKey { hash: 0, named: None };

    fn pool(balance: Balance) -> Pool {
        let server = |n: u16| ServerConfig { target: format!("192.0.2.1:{n}").parse().unwrap(), weight: 1 };
        Pool::new(PoolConfig { balance, ..PoolConfig::new("p".into(), vec![server(1), server(2), server(3)]) })
    }

    fn picked(pool: &Pool, tried: &[usize]) -> Option<usize> {
        pool.pick(KEY, tried).map(|lease| lease.0.index)
    }

    fn fail(pool: &Pool, index: usize) {
        (0..3).for_each(|_| pool.members[index].failed(&Counters::default(), &"test"));
    }

    #[test]
    fn those_that_are_up_come_first_and_those_that_checks_take_down_never() {
        let pool = pool(Balance::RoundRobin);
        fail(&pool, 0);
        assert_eq!([0; 4].map(|_| picked(&pool, &[])), [Some(1), Some(2), Some(1), Some(2)]);
        assert_eq!(picked(&pool, &[1, 2]), Some(0), "better than none");
        (0..3).for_each(|_| pool.members[0].checked(&Counters::default(), Err("test".into())));
        assert_eq!((picked(&pool, &[1, 2]), picked(&pool, &[0, 1, 2])), (None, None));
        fail(&pool, 1);
        assert_eq!([0; 2].map(|_| picked(&pool, &[])), [Some(2); 2]);
    }

    #[test]
    fn leases_count_until_they_are_dropped() {
        let pool = pool(Balance::LeastConnections);
        let first = [0; 3].map(|_| pool.pick(KEY, &[]).unwrap());
        assert_eq!(first.each_ref().map(|l| l.0.index), [0, 1, 2]);
        let [_a, b, _c] = first;
        drop(b);
        assert_eq!(picked(&pool, &[]), Some(1));
    }

    #[test]
    fn a_server_that_is_back_starts_slowly() {
        let server = |n: u16| ServerConfig { target: format!("192.0.2.1:{n}").parse().unwrap(), weight: 2 };
        let slow_start = Duration::from_secs(10);
        let pool = Pool::new(PoolConfig { slow_start, ..PoolConfig::new("p".into(), vec![server(1), server(2)]) });
        let [first, _] = &pool.members[..] else { panic!() };
        let now = Instant::now();
        assert_eq!(first.weight_at(now), 200, "it was never away");
        fail(&pool, 0);
        assert_eq!(first.weight_at(now), 1, "on trial");
        first.succeeded(&Counters::default());
        let back = lock(&first.back).unwrap();
        let weights = [0, 1, 5, 10, 99].map(|s| first.weight_at(back + Duration::from_secs(s)));
        assert_eq!(weights, [1, 20, 100, 200, 200]);
        assert_eq!((0..10).filter(|_| picked(&pool, &[]) == Some(0)).count(), 0, "nearly nothing yet");
    }

    #[test]
    fn a_cookie_names_a_server_while_it_is_up() {
        let mut pool = pool(Balance::RoundRobin);
        let sticky =
            Sticky { cookie: "srv".into(), secret: "s".into(), secure: true, max_age: Some(Duration::from_secs(60)) };
        let config = PoolConfig { sticky: Some(sticky), ..pool.config.clone() };
        pool = Pool::new(config);
        let request = |cookie: &str| {
            let head = format!("GET / HTTP/1.1\r\nHost: a\r\nCookie: {cookie}\r\n\r\n");
            Request::parse(head.as_bytes()).unwrap()
        };
        let token = pool.members[2].token.clone();
        assert!(token.len() == 24 && token != pool.members[1].token, "{token}");
        let named = request(&format!("a=b; srv={token}"));
        let key = pool.key(&named, [192, 0, 2, 9].into());
        let pick = |pool: &Pool, tried: &[usize]| pool.pick(key, tried).unwrap().0.index;
        assert_eq!([0; 3].map(|_| pick(&pool, &[])), [2; 3]);
        assert_ne!(pick(&pool, &[2]), 2);
        assert_eq!(pool.cookie(&named, &pool.members[2]), None, "the client knows it");
        let set = format!("srv={token}; Path=/; HttpOnly; Max-Age=60; Secure");
        for other in ["srv=", "srv=x", "xsrv=1", "srv2=1", &format!("srv={}", pool.members[0].token)] {
            assert_eq!(pool.cookie(&request(other), &pool.members[2]).as_ref(), Some(&set), "{other}");
        }
        fail(&pool, 2);
        assert_ne!(pick(&pool, &[]), 2);
        pool.members[2].succeeded(&Counters::default());
        assert_eq!(pick(&pool, &[]), 2);
    }

    #[test]
    fn a_key_moves_only_while_its_server_is_down() {
        let pool = pool(Balance::ConsistentHash(Key::Client));
        let home = picked(&pool, &[]).unwrap();
        assert_eq!([0; 3].map(|_| picked(&pool, &[])), [Some(home); 3]);
        fail(&pool, home);
        let away = picked(&pool, &[]).unwrap();
        assert_ne!(away, home);
        pool.members[home].succeeded(&Counters::default());
        assert_eq!(picked(&pool, &[]), Some(home));
    }
}
