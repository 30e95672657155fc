//! All integration tests of this crate, a module for each subject. Those of HTTP are in its own crate.

mod first_bytes;
mod guesses;
mod login;
mod loopback;
mod pools;
mod proxying;
mod refusals;
mod socks;
mod tls;

/// What the servers of these tests serve beside handshakes that lead to a relay.
const SERVICES: &[longsplice_proxy::Open] = &[longsplice_proxy::ftp::open];
