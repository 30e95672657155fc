//! Configuration of a pool of servers: the servers, how connections and requests are distributed, and when a server counts as down.

use crate::{pattern::Pattern, target::Target};
use std::{num::NonZeroU16, ops::RangeInclusive, time::Duration};

/// Maximum number of servers in a pool: each choice looks at all of them.
pub const SERVERS_MAX: usize = 256;
/// Maximum weight; the weights of a pool are added up.
pub const WEIGHT_MAX: u32 = 256;

/// Configuration of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolConfig {
    /// Name of the pool, for routes and logs.
    pub name: String,
    /// One to [`SERVERS_MAX`] servers.
    pub servers: Vec<ServerConfig>,
    /// How connections and requests are distributed.
    pub balance: Balance,
    /// Maximum number of servers tried for one of them, including the first.
    pub tries: u32,
    /// Maximum number of those that wait while no server may have more.
    pub queue: u32,
    /// Time for which they wait.
    pub queue_wait: Duration,
    /// Maximum number of idle connections kept per server; HTTP only, as the next two.
    pub idle_connections: usize,
    /// Time for which an idle connection is kept.
    pub idle_time: Duration,
    /// The cookie that keeps a client at its server.
    pub sticky: Option<Sticky>,
    /// Time in which the share of a server that has come back grows to its weight; zero: at once.
    pub slow_start: Duration,
    /// Thresholds for taking servers out and back.
    pub health: HealthLimits,
    /// Active checks; none: only connections and requests tell whether a server is down.
    pub check: Option<Check>,
}

/// Where a listener or a route leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeadTo {
    /// One server.
    Target(Target),
    /// The pool of this name.
    Pool(String),
}

impl LeadTo {
    /// Returns the server, if there is just one.
    pub fn target(&self) -> Option<&Target> {
        if let LeadTo::Target(target) = self { Some(target) } else { None }
    }

    /// Returns the name of the pool, if it is one.
    pub fn pool(&self) -> Option<&str> {
        if let LeadTo::Pool(name) = self { Some(name) } else { None }
    }
}

/// A server of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerConfig {
    /// Address of the server.
    pub target: Target,
    /// Share relative to the other servers: 1 to [`WEIGHT_MAX`].
    pub weight: u32,
    /// It is for times at which none of the others is up.
    pub backup: bool,
    /// Maximum number of connections and requests at a time; none: any number.
    pub max_connections: Option<u32>,
}

impl ServerConfig {
    /// Returns a server with defaults for the rest.
    pub fn new(target: Target) -> ServerConfig {
        ServerConfig { target, weight: 1, backup: false, max_connections: None }
    }
}

impl PoolConfig {
    /// Returns a pool of these servers, with defaults for the rest.
    pub fn new(name: String, servers: Vec<ServerConfig>) -> PoolConfig {
        PoolConfig {
            name,
            servers,
            balance: Balance::default(),
            tries: 3,
            queue: 1024,
            queue_wait: Duration::from_secs(5),
            idle_connections: 32,
            // The same default as in nginx. Connections that servers close earlier are noticed.
            idle_time: Duration::from_secs(60),
            sticky: None,
            slow_start: Duration::ZERO,
            health: HealthLimits::default(),
            check: None,
        }
    }
}

/// A cookie that names a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sticky {
    /// Name of the cookie.
    pub cookie: String,
    /// Makes its values unpredictable. Proxies with the same secret give the same values.
    pub secret: String,
    /// Clients may send it over TLS only.
    pub secure: bool,
    /// How long clients keep it; none: until they end.
    pub max_age: Option<Duration>,
}

/// How connections and requests are distributed over the servers of a pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Balance {
    /// In turn, with the turns of heavy servers spread among those of light ones (smooth weighted round robin, as in nginx).
    #[default]
    RoundRobin,
    /// The server with the fewest of them per weight; in turn if several are equal.
    LeastConnections,
    /// The same key goes to the same server as long as that server is available. Other servers may come and go without
    /// changing it. Rendezvous hashing (Thaler and Ravishankar, IEEE/ACM Transactions on Networking 6(1), 1998).
    ConsistentHash(Key),
}

/// Input of the hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Key {
    /// The client's address.
    Client,
    /// The first field of this name in a request; without the field, the client's address.
    Field(String),
}

/// Thresholds at which a server counts as down, and as up again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthLimits {
    /// Number of consecutive failed connections and requests after which the server is taken out.
    pub failures: u32,
    /// Time for which it is taken out.
    pub out: Duration,
    /// Number of consecutive good checks after which the server is up.
    pub rise: u32,
    /// Number of consecutive failed checks after which the server is down.
    pub fall: u32,
}

impl Default for HealthLimits {
    fn default() -> HealthLimits {
        HealthLimits { failures: 3, out: Duration::from_secs(10), rise: 2, fall: 3 }
    }
}

/// Active check of servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// What the server is asked; none: it has to accept a connection.
    pub ask: Option<Ask>,
    /// Port that is asked; none: the server's own.
    pub port: Option<NonZeroU16>,
    /// Time from the end of one check to the start of the next, on average.
    pub interval: Duration,
    /// Time limit of a check, including name resolution and connecting.
    pub timeout: Duration,
}

impl Default for Check {
    fn default() -> Check {
        Check { ask: None, port: None, interval: Duration::from_secs(5), timeout: Duration::from_secs(2) }
    }
}

/// What a server is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ask {
    /// A request of HTTP.
    Http(Get),
    /// For a ServerHello of TLS, by this name, if there is one.
    Tls(Option<String>),
    /// These bytes. In what the server sends, this has to be found.
    Bytes(Vec<u8>, Pattern),
}

/// A request of HTTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Get {
    /// Path of the GET request; begins with `/`.
    pub path: String,
    /// `Host` of the request; none: the address of the server.
    pub host: Option<String>,
    /// Good statuses, within 200 to 599.
    pub status: RangeInclusive<u16>,
}

impl Get {
    /// Returns a request with defaults for the rest.
    pub fn new(path: String) -> Get {
        Get { path, host: None, status: 200..=399 }
    }
}
