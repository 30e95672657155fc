//! HTTP/1.0 and 1.1 for clients of the proxy: forward proxy, reverse proxy of several servers, and intercepted connections, with
//! the cache of replies.
//!
//! [`open`] is the row of HTTP in the table of protocols that the program gives to
//! [`Prepared::new`](longsplice_proxy::Prepared::new); nothing else is public. The configuration is part of
//! [`longsplice_proxy::config`], because one file has the keys of all protocols.

mod cache;
mod connection;
mod habit;
mod pool;
mod service;
mod stream;

pub use service::open;
