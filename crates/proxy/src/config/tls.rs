//! Routes of TLS and the PROXY protocol, from the TOML file.

use super::value::{Many, Parsed};
use crate::{
    access::{Pattern, Prefix},
    proxy_protocol::{ProxyProtocol, Version},
    target::Target,
    tls::{Route, Tls},
};
use serde::Deserialize;
use std::ops::Range;
use toml::Spanned;

/// Where something is wrong, and what.
type Wrong = (Range<usize>, &'static str);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawRoute {
    #[serde(default)]
    name: Many<Parsed<Pattern>>,
    #[serde(default)]
    alpn: Many<String>,
    target: Option<Parsed<Target>>,
}

pub(super) fn tls(port: Option<u16>, routes: Vec<Spanned<RawRoute>>) -> Result<Tls, Wrong> {
    let mut tls = Tls { port, ..Tls::default() };
    if !routes.is_empty() {
        tls.routes = routes.into_iter().map(route).collect::<Result<_, _>>()?;
    }
    Ok(tls)
}

fn route(spanned: Spanned<RawRoute>) -> Result<Route, Wrong> {
    let (span, raw) = (spanned.span(), spanned.into_inner());
    let name: Vec<Pattern> = raw.name.0.into_iter().map(|n| n.0).collect();
    if name.iter().any(|n| matches!(n, Pattern::Prefix(_))) {
        return Err((span, "an address is no server name (RFC 6066, 3): write a name or *.SUFFIX"));
    }
    // RFC 7301, 3.1.
    if raw.alpn.0.iter().any(|p| !(1..=255).contains(&p.len())) {
        return Err((span, "bad protocol in `alpn`: write names of 1 to 255 bytes, such as \"h2\""));
    }
    Ok(Route { name, alpn: raw.alpn.0, target: raw.target.map(|t| t.0) })
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

pub(super) fn proxy_protocol(spanned: Spanned<RawProxyProtocol>) -> Result<ProxyProtocol, Wrong> {
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
