//! Control mode: all work on a connection before the splice, and on connections that are never spliced.
//!
//! # Path of a connection
//! [`server`] accepts it within the [`limits`]. `connection` runs its protocol ([`socks5`], [`socks4`], `http`, [`tls`],
//! `plug`), which yields a [`target`] or, by [`routes`], a server of a `pool`. `resolve` looks up addresses, [`access`]
//! says which of them are allowed, and `dial` connects to the first that answers. `onward` hands both legs to the engine,
//! which relays and splices. [`access_log`] writes one line. Replies of HTTP servers may have to pass a [`filter`] first,
//! and may come from a `cache`. Before all this, a proxy in front of us may send the client's address ([`proxy_protocol`]).
//!
//! Parsers do no I/O: they are functions from bytes to `Result<Option<(message, used)>, ParseError>`, where `None`
//! means that the message is not complete. Every wait before the relay has a time limit, every buffer a size limit.
//!
//! # Order of calls
//! [`Config::from_file`] or [`Config::from_args`], then [`Prepared::new`] and
//! [`Prepared::start`]. To end: [`Server::stop_accepting`] and [`Server::drain`].

pub mod access;
pub mod access_log;
mod cache;
mod complaints;
pub mod config;
mod connection;
mod context;
mod counters;
mod dial;
pub mod fault;
pub mod filter;
pub mod guarded_ranges;
mod habit;
mod handshake_buffer;
pub mod hashes;
mod http;
mod http_stream;
pub mod keys;
pub mod limits;
mod onward;
pub mod own;
mod plug;
mod pool;
pub mod proxy_protocol;
mod resolve;
pub mod routes;
mod secrets;
pub mod server;
mod socks;
pub mod socks4;
pub mod socks5;
pub mod start_error;
mod tap_dir;
pub mod target;
pub mod tls;
pub mod tpot;
pub mod users;
mod verify;
mod workers;

pub use cache::{CacheConfig, CacheValues};
pub use config::{Config, ConfigError, Http, ListenerConfig, Protocol, Splicing};
pub use counters::{CounterValues, ListenerValues};
pub use secrets::SecretError;
pub use server::{Prepared, Server};
pub use start_error::StartError;
pub use workers::Workers;
