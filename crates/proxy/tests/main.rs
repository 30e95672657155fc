//! All integration tests of this crate, a module for each subject.

mod cache;
mod filter;
mod http;
mod loopback;
mod proxy_protocol;
mod proxying;
mod reverse;
mod tls;
