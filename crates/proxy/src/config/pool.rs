//! What a pool of servers is told: who its servers are, how they share the work, and when one of them is down.

use crate::target::Target;
use std::{ops::RangeInclusive, time::Duration};

/// Servers of a pool at most: choosing one looks at all of them.
pub const SERVERS_MAX: usize = 256;
/// The heaviest; the weights of a pool are added up.
pub const WEIGHT_MAX: u32 = 256;

/// What a pool is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolConfig {
    /// Its name, for routes and logs.
    pub name: String,
    /// At least one, and at most [`SERVERS_MAX`].
    pub servers: Vec<ServerConfig>,
    /// How they share the work.
    pub balance: Balance,
    /// How many servers are tried for a request at most, the first included.
    pub tries: u32,
    /// Idle connections that are kept to each server at most.
    pub idle_connections: usize,
    /// For how long.
    pub idle_time: Duration,
    /// When a server is down.
    pub health: HealthLimits,
    /// How servers are checked; none: only by the requests.
    pub check: Option<Check>,
}

/// A server of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerConfig {
    /// Where it is.
    pub target: Target,
    /// Its share of the work, relative to the others: 1 to [`WEIGHT_MAX`].
    pub weight: u32,
}

impl PoolConfig {
    /// A pool of these servers, with defaults for the rest.
    pub fn new(name: String, servers: Vec<ServerConfig>) -> PoolConfig {
        PoolConfig {
            name,
            servers,
            balance: Balance::default(),
            tries: 3,
            idle_connections: 32,
            // As nginx has it. Servers that close earlier are noticed.
            idle_time: Duration::from_secs(60),
            health: HealthLimits::default(),
            check: None,
        }
    }
}

/// How the servers of a pool share the work.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Balance {
    /// In turn, the turns of the heavy spread among those of the light (smooth weighted round robin, as nginx has it).
    #[default]
    RoundRobin,
    /// The one with the fewest requests per weight; of several, in turn.
    LeastConnections,
    /// The same key goes to the same server, for as long as that one is there: others come and go without changing it.
    /// By rendezvous hashing (Thaler and Ravishankar, IEEE/ACM Transactions on Networking 6(1), 1998).
    ConsistentHash(Key),
}

/// What is hashed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Key {
    /// The client's address.
    Client,
    /// The first field of this name, or the client's address without it.
    Field(String),
}

/// When a server counts as down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthLimits {
    /// Requests that fail in a row, until it is taken out.
    pub failures: u32,
    /// For how long.
    pub out: Duration,
    /// Good checks in a row, until it is up.
    pub rise: u32,
    /// Failed checks in a row, until it is down.
    pub fall: u32,
}

impl Default for HealthLimits {
    fn default() -> HealthLimits {
        HealthLimits { failures: 3, out: Duration::from_secs(10), rise: 2, fall: 3 }
    }
}

/// How servers are checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// The path that is asked for with GET; begins with `/`.
    pub path: String,
    /// `Host` of the request; none: the server's address.
    pub host: Option<String>,
    /// From the end of one check to the next.
    pub interval: Duration,
    /// How long one may take, looking up the name and connecting included.
    pub timeout: Duration,
    /// Statuses, from 200 to 599, that are good.
    pub status: RangeInclusive<u16>,
}

impl Check {
    /// A check with defaults for the rest.
    pub fn new(path: String) -> Check {
        Check { path, host: None, interval: Duration::from_secs(5), timeout: Duration::from_secs(2), status: 200..=399 }
    }
}
