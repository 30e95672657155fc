//! `[admin]`: where metrics are served.

use super::{
    file::Listen,
    value::{Many, Parsed},
};
use crate::access::Prefix;
use ipnet::IpNet;
use serde::Deserialize;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Where metrics are served, and to whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminConfig {
    /// Listening address.
    pub listen: SocketAddr,
    /// Clients that are answered; others are disconnected.
    pub allow: Vec<Prefix>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawAdmin {
    listen: Parsed<Listen>,
    allow: Option<Many<Parsed<Prefix>>>,
}

impl From<RawAdmin> for AdminConfig {
    fn from(raw: RawAdmin) -> AdminConfig {
        let loopback: [IpNet; 2] =
            [IpNet::new_assert(Ipv4Addr::new(127, 0, 0, 0).into(), 8), IpAddr::from(Ipv6Addr::LOCALHOST).into()];
        let allow = match raw.allow {
            Some(allow) => allow.0.into_iter().map(|p| p.0).collect(),
            None => loopback.map(Prefix).into(),
        };
        AdminConfig { listen: raw.listen.0.0, allow }
    }
}

impl AdminConfig {
    /// Returns whether a client is answered.
    pub fn allows(&self, client: IpAddr) -> bool {
        self.allow.iter().any(|prefix| prefix.0.contains(&client.to_canonical()))
    }
}
