//! Where connections go that are allowed: to their targets, through an upstream proxy, or to a server of a pool instead.

use super::{Pattern, Rule, Rules};
use crate::target::Target;
use serde::Deserialize;
use std::{fmt, net::SocketAddr, sync::Arc};

/// An upstream proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upstream {
    /// Name of the table.
    pub name: String,
    /// What it speaks.
    pub protocol: UpstreamProtocol,
    /// Servers that are equivalent: they are tried in this order. None, if there is a pool.
    pub servers: Vec<Target>,
    /// Name of the pool of its servers.
    pub pool: Option<Arc<str>>,
    /// Name and password, if it asks for them.
    pub login: Option<(String, String)>,
    /// Targets to which connections do not go through it.
    pub direct: Vec<Pattern>,
    /// Names are looked up here, and it gets addresses. None: nothing was said, and it gets names.
    pub resolve: Option<bool>,
    /// The proxy through which it is reached.
    pub through: Option<Arc<Upstream>>,
}

/// What an upstream proxy speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UpstreamProtocol {
    /// SOCKS 5 (RFC 1928).
    Socks5,
    /// HTTP's CONNECT (RFC 9110, 9.3.6).
    Http,
}

impl Upstream {
    /// Whether connections to this target go through it. `at`: the address of the target, if that is known.
    pub fn leads_to(&self, target: &Target, at: Option<SocketAddr>) -> bool {
        let ip = at.map(|at| at.ip().to_canonical()).or(target.host.ip());
        !self.direct.iter().any(|p| p.matches_name(&target.host) || ip.is_some_and(|ip| p.matches_ip(ip)))
    }

    /// Whether it, or one through which it is reached, has a pool.
    pub fn has_pool(&self) -> bool {
        self.pool.is_some() || self.through.as_ref().is_some_and(|next| next.has_pool())
    }
}

/// Where a connection goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// To its target.
    Direct,
    /// To its target, through this proxy.
    Through(Arc<Upstream>),
    /// To a server of the pool of this name instead.
    Pool(Arc<str>),
}

impl Way {
    /// Whether it has to be known here which address the name of the target has.
    pub fn needs_address(&self) -> bool {
        match self {
            Way::Direct => true,
            Way::Through(upstream) => upstream.resolve == Some(true),
            Way::Pool(_) => false,
        }
    }

    /// Whether a connection to this target would not go straight to it.
    pub(super) fn leads_away(&self, target: &Target) -> bool {
        match self {
            Way::Direct => false,
            Way::Through(upstream) => upstream.leads_to(target, None),
            Way::Pool(_) => true,
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Way::Direct => f.write_str("direct"),
            Way::Through(upstream) => write!(f, "through {}", upstream.name),
            Way::Pool(pool) => write!(f, "pool {pool}"),
        }
    }
}

impl Rules {
    /// Whether some rule leads elsewhere than to the target.
    pub(crate) fn lead(&self) -> bool {
        self.filed.now().lead
    }
}

impl Rule {
    /// Whether it matches some targets by their addresses alone.
    pub(crate) fn names_addresses(&self) -> bool {
        self.target.iter().any(|p| matches!(p, Pattern::Prefix(_)))
    }

    /// Whether it matches some names, whatever their addresses are.
    pub(crate) fn matches_names(&self) -> bool {
        self.target.is_empty() || self.target.iter().any(|p| !matches!(p, Pattern::Prefix(_)))
    }
}
