//! Configuration of a TLS listener; its routes and the PROXY protocol, from the TOML file.

use super::{
    ConfigError, Http, PlugHandshake, Protocol,
    pool::{LeadTo, PoolConfig},
    route::{RawRoute, list},
    source::SourceFile,
    value::{Many, Parsed},
};
use crate::{
    access::{Pattern, Prefix},
    proxy_protocol::{ProxyProtocol, Version},
};
use serde::Deserialize;
use toml::Spanned;

/// Configuration of a TLS listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// Routes; the first match decides. Without a match, the client is refused.
    pub routes: Vec<Route>,
    /// Port of targets that come from the requested name; none: the port of the listener.
    pub port: Option<u16>,
}

/// Target for matching ClientHellos. An empty list matches everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Route {
    /// Server names; prefixes never match.
    pub name: Vec<Pattern>,
    /// Application protocols, of which the client has to offer at least one (RFC 7301).
    pub alpn: Vec<String>,
    /// Where it leads to; none: the requested name, and no match if there is no name.
    pub target: Option<LeadTo>,
}

impl Default for Tls {
    fn default() -> Tls {
        Tls { routes: vec![Route::default()], port: None }
    }
}

impl Tls {
    /// Whether clients may choose their target.
    pub fn forwards(&self) -> bool {
        self.routes.iter().any(|r| r.target.is_none())
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawProxyProtocol {
    #[serde(default)]
    from: Many<Parsed<Prefix>>,
    #[serde(default)]
    required: bool,
    send: Option<Spanned<RawVersion>>,
}

impl RawProxyProtocol {
    /// Whether clients may send a header.
    pub(super) fn is_received(&self) -> bool {
        !self.from.0.is_empty()
    }
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "kebab-case")]
enum RawVersion {
    V1,
    V2,
}

impl SourceFile<'_> {
    pub(super) fn tls(
        &self,
        port: Option<u16>,
        routes: Vec<Spanned<RawRoute>>,
        pools: &[PoolConfig],
    ) -> Result<Tls, ConfigError> {
        if routes.is_empty() {
            return Ok(Tls { port, ..Tls::default() });
        }
        let routes = routes.into_iter().map(|route| self.route_of_tls(route.into_inner(), pools));
        Ok(Tls { routes: routes.collect::<Result<_, _>>()?, port })
    }

    fn route_of_tls(&self, raw: RawRoute, pools: &[PoolConfig]) -> Result<Route, ConfigError> {
        if let Some((key, at)) = raw.key_of_http() {
            let cure =
                format!("routes of TLS have name, alpn, target and pool: remove `{key}`, or use protocol = \"http\"");
            return Err(self.wrong(at, &cure));
        }
        let target = match (raw.target, raw.pool) {
            (Some(_), Some(pool)) => {
                return Err(self.wrong(pool.span(), "a route has a target or a pool: remove one of them"));
            }
            (None, Some(pool)) => Some(LeadTo::Pool(self.pool_named(pool, pools)?)),
            (target, None) => target.map(|target| LeadTo::Target(target.into_inner().0)),
        };
        Ok(Route { name: list(raw.name).map(|n| n.0).collect(), alpn: list(raw.alpn).map(|p| p.0).collect(), target })
    }

    pub(super) fn proxy_protocol(
        &self,
        raw: Option<Spanned<RawProxyProtocol>>,
        protocol: &Protocol,
    ) -> Result<ProxyProtocol, ConfigError> {
        let Some(spanned) = raw else { return Ok(ProxyProtocol::default()) };
        let (span, raw) = (spanned.span(), spanned.into_inner());
        if *protocol == Protocol::Transparent {
            return Err(self.wrong(span, "nobody sends such a header where nobody sees us: remove the key"));
        }
        if let Protocol::Plug { handshake: PlugHandshake::EndToEnd, .. } = protocol {
            let cure = "client and target shake hands with each other, which leaves no room for a PROXY header: \
                        remove the key, or use handshake = \"proxy\"";
            return Err(self.wrong(span, cure));
        }
        if let Protocol::Ftp(_) = protocol {
            return Err(self.wrong(span, "data connections have no such header: remove the key"));
        }
        if raw.required && raw.from.0.is_empty() {
            let cure = "nobody may send the header that is required: add from = [\"PREFIX\", ...]";
            return Err(self.wrong(span, cure));
        }
        if let (Some(send), Protocol::Http(Http { routes, .. })) = (&raw.send, protocol)
            && !routes.is_empty()
        {
            let cure = "clients share the connections to servers of a pool, and a header would name one of them: \
                        remove `send`, and use forwarded = \"x-forwarded-for\"";
            return Err(self.wrong(send.span(), cure));
        }
        let send = raw.send.map(|version| match version.into_inner() {
            RawVersion::V1 => Version::V1,
            RawVersion::V2 => Version::V2,
        });
        Ok(ProxyProtocol { from: raw.from.0.into_iter().map(|p| p.0).collect(), required: raw.required, send })
    }
}
