//! All integration tests of this crate, a module for each subject. Those of the PROXY protocol are here, too: all protocols get it.

mod cache;
mod changes;
mod codings;
mod fields;
mod filter;
mod http;
mod led_cache;
mod member;
mod origin;
mod proxy_protocol;
#[path = "../../proxy/tests/proxying/mod.rs"]
mod proxying;
mod reverse;
mod site_cache;
mod site_keys;
mod start;
mod uploads;

/// What the servers of these tests serve beside the protocols of the proxy.
const SERVICES: &[longsplice_proxy::Open] = &[longsplice_proxy_http::open];
