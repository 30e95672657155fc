//! Routes of TLS and the PROXY protocol, from the TOML file.

use super::value::{Many, Parsed};
use crate::{
    access::{Pattern, Prefix},
    proxy_protocol::{ProxyProtocol, Version},
    target::Target,
    tls::{Route, Tls},
};
use serde::Deserialize;
use std::{ops::Range, str::FromStr};
use toml::Spanned;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawRoute {
    #[serde(default)]
    name: Many<Parsed<ServerName>>,
    #[serde(default)]
    alpn: Many<Parsed<Alpn>>,
    target: Option<Parsed<Target>>,
}

/// A pattern for server names, which are no addresses (RFC 6066, 3).
struct ServerName(Pattern);

impl FromStr for ServerName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.parse() {
            Ok(name @ (Pattern::Name(_) | Pattern::Below(_))) => Ok(ServerName(name)),
            _ => Err(
                "bad server name: write a name (example.org) or *.SUFFIX (*.example.org); without `name`, all match",
            ),
        }
    }
}

/// The name of a protocol (RFC 7301, 3.1).
struct Alpn(String);

impl FromStr for Alpn {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fits = (1..=255).contains(&text.len());
        if fits { Ok(Alpn(text.into())) } else { Err("bad protocol: write a name of 1 to 255 bytes, such as \"h2\"") }
    }
}

pub(super) fn tls(port: Option<u16>, routes: Vec<RawRoute>) -> Tls {
    let routes = routes.into_iter().map(|raw| Route {
        name: raw.name.0.into_iter().map(|n| n.0.0).collect(),
        alpn: raw.alpn.0.into_iter().map(|p| p.0.0).collect(),
        target: raw.target.map(|t| t.0),
    });
    let mut tls = Tls { routes: routes.collect(), port };
    if tls.routes.is_empty() {
        tls.routes = Tls::default().routes;
    }
    tls
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawProxyProtocol {
    #[serde(default)]
    from: Many<Parsed<Prefix>>,
    #[serde(default)]
    required: bool,
    send: Option<RawVersion>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum RawVersion {
    V1,
    V2,
}

/// An error is the place and what is wrong there.
pub(super) fn proxy_protocol(
    raw: Option<Spanned<RawProxyProtocol>>,
) -> Result<ProxyProtocol, (Range<usize>, &'static str)> {
    let Some(spanned) = raw else { return Ok(ProxyProtocol::default()) };
    let (span, raw) = (spanned.span(), spanned.into_inner());
    if raw.required && raw.from.0.is_empty() {
        return Err((span, "nobody may send the header that is required: add from = [\"PREFIX\", ...]"));
    }
    let send = raw.send.map(|version| match version {
        RawVersion::V1 => Version::V1,
        RawVersion::V2 => Version::V2,
    });
    Ok(ProxyProtocol { from: raw.from.0.into_iter().map(|p| p.0).collect(), required: raw.required, send })
}
