//! What HTTP adds to pools of servers: fields and cookies that decide about the server of a request, and open connections to the
//! servers.
//!
//! A request takes a [`Lease`] on a server ([`Pool::enter`]), then one of its idle connections ([`Member::idle`])
//! or a new one, and gives the connection back if it may carry another request ([`Member::keep`]). The result
//! counts for the health of the server.
//!
//! An idle connection was opened for another client: its server was given the MSS of that client's path (`Splicer::connect`).
//! For copying, that does not matter, and the data path handles segments that are too long for this client's path.

mod sticky;

use crate::{habit::Habit, stream::Stream};
use longsplice_engine::{Leg, LegOfProxy, Splicer};
use longsplice_http::Request;
use longsplice_proxy::{
    config::pool::{Balance, Key as HashKey, PoolConfig},
    fault::Fault,
    pool::{self, Key, hash},
};
use std::{
    collections::VecDeque,
    net::IpAddr,
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
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

/// A running pool.
pub(crate) struct Pool {
    general: Arc<pool::Pool>,
    members: Vec<Arc<Member>>,
    /// What closes its idle connections, once there may be some.
    splicer: OnceLock<Splicer>,
}

/// A server of a running pool.
#[derive(Debug)]
pub(crate) struct Member {
    general: Arc<pool::Member>,
    /// What its name is in cookies.
    token: String,
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

/// A request or an upgraded connection that occupies a server until it is dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    pub member: Arc<Member>,
    pub general: pool::Lease,
}

impl Deref for Member {
    type Target = pool::Member;

    fn deref(&self) -> &pool::Member {
        &self.general
    }
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics in the middle of a change, so the data behind a poisoned lock is consistent.
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    pub fn new(general: Arc<pool::Pool>) -> Pool {
        let config = &general.config;
        let member = |general: &Arc<pool::Member>| {
            Arc::new(Member {
                general: general.clone(),
                token: config
                    .sticky
                    .as_ref()
                    .map_or_else(String::new, |sticky| sticky::token(&sticky.secret, &config.name, &general.name)),
                idle: Mutex::default(),
                idle_connections: config.idle_connections,
                idle_time: config.idle_time,
                habit: Habit::default(),
            })
        };
        Pool { members: general.members.iter().map(member).collect(), general, splicer: OnceLock::new() }
    }

    /// Whether it is made of this one.
    pub fn is_of(&self, general: &Arc<pool::Pool>) -> bool {
        Arc::ptr_eq(&self.general, general)
    }

    pub fn config(&self) -> &PoolConfig {
        &self.general.config
    }

    /// Returns what decides about the server of a request.
    pub fn key(&self, request: &Request, client: IpAddr) -> Key {
        let field = match &self.config().balance {
            Balance::ConsistentHash(HashKey::Field(name)) => request.fields.all(name).next(),
            _ => None,
        };
        let key = Key { named: self.named(request), ..Key::of(client) };
        field.map_or(key, |field| Key { hash: hash(field), ..key })
    }

    /// Returns a server for a request with this key, except those in `tried`. Waits while all are full.
    pub async fn enter(&self, key: Key, tried: &[usize]) -> Result<Lease, Fault> {
        let general = self.general.enter(key, tried).await?;
        Ok(Lease { member: self.members[general.0.index].clone(), general })
    }

    /// Starts the task that closes old connections, unless it runs. It ends with the pool, which lives as long as a listener leads
    /// to it, or a connection that began when one did.
    pub fn tend(self: &Arc<Self>, splicer: &Splicer, stop: &watch::Receiver<bool>) -> Option<JoinHandle<()>> {
        let is_first = self.splicer.set(splicer.clone()).is_ok();
        is_first.then(|| tokio::spawn(sweep_all(Arc::downgrade(self), splicer.clone(), stop.clone())))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.splicer.get().into_iter().for_each(|splicer| self.members.iter().for_each(|m| m.sweep(splicer, true)));
    }
}

/// Closes connections that were idle for too long or that servers have closed; at the end, all of them.
async fn sweep_all(pool: Weak<Pool>, splicer: Splicer, mut stop: watch::Receiver<bool>) {
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use longsplice_proxy::{
        config::pool::{ServerConfig, Sticky},
        counters::Counters,
    };

    #[test]
    fn a_cookie_names_a_server_while_it_is_up() {
        let server = |n: u16| ServerConfig::new(format!("192.0.2.1:{n}").parse().unwrap());
        let sticky =
            Sticky { cookie: "srv".into(), secret: "s".into(), secure: true, max_age: Some(Duration::from_secs(60)) };
        let config = PoolConfig::new("p".into(), vec![server(1), server(2), server(3)]);
        let general = pool::Pool::new(PoolConfig { sticky: Some(sticky), ..config }, None, &Arc::default());
        let pool = Pool::new(Arc::new(general));
        let request = |cookie: &str| {
            let head = format!("GET / HTTP/1.1\r\nHost: a\r\nCookie: {cookie}\r\n\r\n");
            Request::parse(head.as_bytes()).unwrap()
        };
        let token = pool.members[2].token.clone();
        assert!(token.len() == 24 && token != pool.members[1].token, "{token}");
        let named = request(&format!("a=b; srv={token}"));
        let key = pool.key(&named, [192, 0, 2, 9].into());
        let pick = |pool: &Pool, tried: &[usize]| pool.general.pick(key, tried).unwrap().0.index;
        assert_eq!([0; 3].map(|_| pick(&pool, &[])), [2; 3]);
        assert_ne!(pick(&pool, &[2]), 2);
        assert_eq!(pool.cookie(&named, &pool.members[2]), None, "the client knows it");
        let set = format!("srv={token}; Path=/; HttpOnly; Max-Age=60; Secure");
        for other in ["srv=", "srv=x", "xsrv=1", "srv2=1", &format!("srv={}", pool.members[0].token)] {
            assert_eq!(pool.cookie(&request(other), &pool.members[2]).as_ref(), Some(&set), "{other}");
        }
        (0..3).for_each(|_| pool.members[2].failed(&Counters::default(), &"test"));
        assert_ne!(pick(&pool, &[]), 2);
        pool.members[2].succeeded(&Counters::default(), &"test");
        assert_eq!(pick(&pool, &[]), 2);
    }
}
