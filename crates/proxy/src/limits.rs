//! Limits: time per connection, number of connections per client and in total, and how often they begin.

pub(crate) mod rate;

use longsplice_http::HEAD_MAX;
use rate::{Begun, Rate};
use std::{
    collections::HashMap,
    fmt,
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::watch;

/// Default maximum number of connections on all listeners together. Each takes two descriptors,
/// and pipes while copying: well below the usual hard limit of a million.
pub const CONNECTIONS: u32 = 65536;

/// The limits of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Time from accept to the end of the request: greeting, authentication and request
    /// together. A PROXY header before these may take as long again.
    pub handshake: Duration,
    /// Time to resolve a name.
    pub resolve: Duration,
    /// Time to connect, over all addresses of the name.
    pub connect: Duration,
    /// HTTP: time from the last byte in either direction to the head of the reply.
    pub reply: Duration,
    /// HTTP: time from a reply to the first byte of the client's next request.
    pub keep_alive: Duration,
    /// HTTP: longest head of a request, in bytes.
    pub request_head: u32,
    /// HTTP: longest body of a request, in bytes; none: any.
    pub request_body: Option<u64>,
    /// HTTP: longest body of a reply, in bytes; none: any.
    pub reply_body: Option<u64>,
    /// Connections from one client address; for IPv6, from one /64, because a single host may use all of it.
    pub connections_per_client: u32,
    /// How often connections from one client address may begin; none: as often as they like.
    pub new_per_client: Option<Rate>,
    /// Connections of this listener; none: limited only by the total of all listeners.
    pub connections: Option<u32>,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            // Three round trips, and time for a retransmission or two.
            handshake: Duration::from_secs(10),
            // Default of resolv.conf for one attempt at one name server.
            resolve: Duration::from_secs(5),
            // Three retransmissions of the SYN: 1, 3 and 7 seconds after the first.
            connect: Duration::from_secs(10),
            // Servers take longer than networks: reports, queues, long polls.
            reply: Duration::from_secs(300),
            // Roughly what browsers expect of proxies.
            keep_alive: Duration::from_secs(60),
            request_head: HEAD_MAX as u32,
            request_body: None,
            reply_body: None,
            connections_per_client: 1024,
            new_per_client: None,
            connections: None,
        }
    }
}

/// The limit that a new connection would exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Full {
    /// Connections of the client.
    Client,
    /// New connections of the client in a time.
    Rate,
    /// Connections in total.
    Total,
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Full::Client => "too many connections from this client",
            Full::Rate => "too many new connections from this client",
            Full::Total => "too many connections",
        })
    }
}

/// Counter of connections. Its memory is bounded by their number: clients without connections have no entry.
#[derive(Debug)]
pub struct Counted {
    now: Mutex<Now>,
    /// Whether the total limit is reached.
    full: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct Now {
    total_max: u32,
    client_max: u32,
    total: u32,
    clients: HashMap<IpAddr, u32>,
    begun: Begun,
}

/// A counted connection; dropping the slot removes it from the count.
#[derive(Debug)]
pub struct Slot {
    counted: Arc<Counted>,
    client: Option<IpAddr>,
}

impl Counted {
    /// Returns a counter with a total limit and a limit per client.
    pub fn new(total_max: u32, client_max: u32) -> Arc<Counted> {
        let full = watch::Sender::new(total_max == 0);
        Arc::new(Counted { now: Mutex::new(Now { total_max, client_max, ..Now::default() }), full })
    }

    /// Returns a counter without limits, as yet.
    pub(crate) fn unlimited() -> Arc<Counted> {
        Counted::new(u32::MAX, u32::MAX)
    }

    /// Changes the limits. What exceeds the new ones stays; nothing enters until there is room again.
    pub fn limit(&self, total_max: u32, client_max: u32) {
        let mut now = self.lock();
        (now.total_max, now.client_max) = (total_max, client_max);
        self.tell_full(&now);
    }

    /// Changes how often connections of a client may begin.
    pub(crate) fn limit_new(&self, rate: Option<Rate>) {
        self.lock().begun.limit(rate);
    }

    /// Returns how many there are.
    pub(crate) fn total(&self) -> u32 {
        self.lock().total
    }

    /// Tells whether the total limit is reached. Those who listen are woken only if that has changed.
    fn tell_full(&self, now: &Now) {
        let is = now.total >= now.total_max;
        if *self.full.borrow() != is {
            self.full.send_replace(is);
        }
    }

    /// Counts a connection from `client`, or returns the limit it would exceed; without a client, only the total counts.
    pub fn enter(self: &Arc<Self>, client: Option<IpAddr>) -> Result<Slot, Full> {
        let mut now = self.lock();
        if now.total >= now.total_max {
            return Err(Full::Total);
        }
        let client = client.map(counted_as);
        if let Some(client) = client {
            now.enter(client)?;
        }
        now.total += 1;
        self.tell_full(&now);
        Ok(Slot { counted: self.clone(), client })
    }

    /// Counts a connection that is there already, even if it exceeds a limit.
    pub(crate) fn count(self: &Arc<Self>, client: Option<IpAddr>) -> Slot {
        let (mut now, client) = (self.lock(), client.map(counted_as));
        client.into_iter().for_each(|client| *now.clients.entry(client).or_default() += 1);
        now.total += 1;
        self.tell_full(&now);
        Slot { counted: self.clone(), client }
    }

    /// Tells whether the total limit is reached, from now on.
    pub fn full(&self) -> watch::Receiver<bool> {
        self.full.subscribe()
    }

    /// Returns whether there is room for a connection from `client` besides those that `others` counts.
    pub fn has_room_beside(&self, others: &Counted, client: IpAddr) -> bool {
        let client = counted_as(client);
        let of = |now: &Now| (now.total, now.clients.get(&client).copied().unwrap_or_default());
        let (total, of_client) = of(&others.lock());
        let own = self.lock();
        let now = of(&own);
        now.0.saturating_add(total) < own.total_max && now.1.saturating_add(of_client) < own.client_max
    }

    /// Returns the current number of connections.
    pub fn now(&self) -> u32 {
        self.lock().total
    }

    fn lock(&self) -> MutexGuard<'_, Now> {
        // No code panics in the middle of a change, so the data behind a poisoned lock is consistent.
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Now {
    fn enter(&mut self, client: IpAddr) -> Result<(), Full> {
        let max = self.client_max;
        if self.clients.get(&client).is_some_and(|n| *n >= max) || max == 0 {
            return Err(Full::Client);
        }
        if !self.begun.may_begin(client, Instant::now()) {
            return Err(Full::Rate);
        }
        *self.clients.entry(client).or_default() += 1;
        Ok(())
    }
}

impl Slot {
    /// Counts the connection for its client, which was not known at first.
    pub fn is_from(&mut self, client: IpAddr) -> Result<(), Full> {
        if self.client.is_none() {
            let client = counted_as(client);
            self.counted.lock().enter(client)?;
            self.client = Some(client);
        }
        Ok(())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut now = self.counted.lock();
        now.total -= 1;
        self.counted.tell_full(&now);
        if let Some(client) = &self.client
            && let Some(n) = now.clients.get_mut(client)
        {
            *n -= 1;
            if *n == 0 {
                now.clients.remove(client);
            }
        }
    }
}

/// Returns the address by which a client is counted: a host may use all of a /64.
pub(crate) fn counted_as(client: IpAddr) -> IpAddr {
    match client.to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(s: &str) -> IpAddr {
        s.parse().unwrap()
    }

    #[test]
    fn a_client_that_is_known_later() {
        let counted = Counted::new(3, 1);
        let mut a = counted.enter(None).unwrap();
        let mut b = counted.enter(None).unwrap();
        assert_eq!((a.is_from(ip("192.0.2.1")), a.is_from(ip("192.0.2.1"))), (Ok(()), Ok(())));
        assert_eq!(b.is_from(ip("192.0.2.1")), Err(Full::Client));
        drop(a);
        assert_eq!((b.is_from(ip("192.0.2.1")), counted.now()), (Ok(()), 1));
        drop(b);
        assert!(counted.lock().clients.is_empty());
    }

    #[test]
    fn per_client_and_total() {
        let counted = Counted::new(3, 2);
        let full = counted.full();
        let a = counted.enter(Some(ip("192.0.2.1"))).unwrap();
        let _b = counted.enter(Some(ip("192.0.2.1"))).unwrap();
        assert_eq!(counted.enter(Some(ip("192.0.2.1"))).unwrap_err(), Full::Client);
        assert_eq!(counted.enter(Some(ip("::ffff:192.0.2.1"))).unwrap_err(), Full::Client);
        let _c = counted.enter(Some(ip("192.0.2.2"))).unwrap();
        assert_eq!(counted.enter(Some(ip("192.0.2.3"))).unwrap_err(), Full::Total);
        assert!(*full.borrow());
        drop(a);
        assert_eq!((counted.now(), *full.borrow()), (2, false));
        let _d = counted.enter(Some(ip("192.0.2.3"))).unwrap();
    }

    #[test]
    fn limits_that_change() {
        let counted = Counted::new(3, 3);
        let mut full = counted.full();
        let (client, other) = (Some(ip("192.0.2.1")), Some(ip("192.0.2.2")));
        let two = [0; 2].map(|_| counted.enter(client).unwrap());
        counted.limit(1, 1);
        assert!(*full.borrow_and_update() && counted.enter(other).is_err(), "those that are there stay");
        counted.limit(4, 2);
        assert!(!*full.borrow_and_update());
        assert_eq!(counted.enter(client).unwrap_err(), Full::Client);
        let _other = counted.enter(other).unwrap();
        drop(two);
        assert_eq!((counted.now(), full.has_changed().unwrap()), (1, false));
    }

    #[test]
    fn room_beside_others() {
        let (counted, others) = (Counted::new(3, 2), Counted::new(u32::MAX, u32::MAX));
        let (a, b) = (ip("192.0.2.1"), ip("192.0.2.2"));
        let room = || [a, b].map(|client| counted.has_room_beside(&others, client));
        let _live = counted.enter(Some(a)).unwrap();
        assert_eq!(room(), [true, true]);
        let other = others.enter(Some(a)).unwrap();
        assert_eq!(room(), [false, true], "a client's");
        let _more = counted.enter(Some(b)).unwrap();
        assert_eq!(room(), [false, false], "the total");
        drop(other);
        assert_eq!(room(), [true, true]);
    }

    #[test]
    fn an_ipv6_host_is_its_slash_64() {
        let counted = Counted::new(10, 1);
        let _a = counted.enter(Some(ip("2001:db8::1"))).unwrap();
        assert_eq!(counted.enter(Some(ip("2001:db8::ffff:2"))).unwrap_err(), Full::Client);
        let _b = counted.enter(Some(ip("2001:db8:0:1::1"))).unwrap();
    }

    #[test]
    fn clients_that_are_gone_leave_nothing() {
        let counted = Counted::new(10, 2);
        let slots: Vec<_> = (0..10).map(|i| counted.enter(Some(ip(&format!("192.0.2.{i}")))).unwrap()).collect();
        assert_eq!(counted.lock().clients.len(), 10);
        drop(slots);
        assert_eq!((counted.now(), counted.lock().clients.len()), (0, 0));
    }
}
