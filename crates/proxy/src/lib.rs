//! Control mode: all work on a connection before the splice, and on connections that are never spliced.
//!
//! # Path of a connection
//! [`server`] accepts it within the [`limits`], and runs its protocol ([`socks`], [`tls`], a plug), which yields a [`target`].
//! [`resolve`] looks up addresses, [`access`] says which of them are allowed, and [`onward::dial`] connects to the first that
//! answers. [`onward`] hands both legs to the engine, which relays and splices. [`log::access_log`] writes one line. Before all
//! this, a proxy in front of us may send the client's address ([`proxy_protocol`]).
//!
//! Other protocols are a [`Service`] each: [`ftp`] here, HTTP in longsplice-proxy-http, a crate above this one. Configuration is
//! here ([`routes`], [`fields`], [`filter`]), because one file has the keys of all protocols. All protocols share the [`pool`]s.
//!
//! Parsers do no I/O: they are functions from bytes to `Result<Option<(message, used)>, ParseError>`, where `None`
//! means that the message is not complete. Every wait before the relay has a time limit, every buffer a size limit.
//!
//! # Order of calls
//! [`Config::from_file`] or [`Config::from_args`], then [`Prepared::new`] and
//! [`Prepared::start`]. To end: [`Server::stop_accepting`] and [`Server::drain`].

pub mod access;
pub mod coding;
pub mod commands;
pub mod config;
pub mod context;
pub mod counters;
pub mod events;
pub mod fault;
pub mod fields;
pub mod filter;
pub mod first_bytes;
pub mod ftp;
pub mod handed;
mod handshake_buffer;
pub mod haproxy;
pub mod inherited;
mod later;
pub mod limits;
pub mod log;
pub mod login;
pub mod media;
pub mod onward;
pub mod pages;
pub mod pattern;
pub mod pool;
mod program;
pub mod proxy_protocol;
pub mod resolve;
pub mod rewrite;
mod room;
pub mod routes;
pub mod secrets;
pub mod server;
pub mod socks;
pub mod start_error;
mod tables;
pub mod target;
pub mod tls;
mod totals;
pub mod tpot;
pub mod triggers;
pub mod users;

pub use config::{
    AdminConfig, CacheConfig, Config, ConfigError, Http, ListenerConfig, Protocol, SocketAccess, Splicing,
};
pub use context::workers::Workers;
pub use context::{Handler, Purge, Purged, Service};
pub use counters::{CounterValues, Kind, ListenerValues, Metric};
pub use pool::commanded::{MemberValues, PoolValues, Tell};
pub use secrets::SecretError;
pub use server::{
    Open, Prepared, Server,
    check::check,
    explain::{Explained, Question},
    pausing::ToldListeners,
    reload::Reloaded,
};
pub use start_error::StartError;
pub use totals::{LIFETIMES_MS, Times, Totals, WAITS_MS};
