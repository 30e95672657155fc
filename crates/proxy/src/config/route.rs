//! The structure of a route in the TOML file. Both protocols with routes use it, so that an
//! error can say that a key belongs to the other protocol.

use super::{
    fields::RawFields,
    rewrite::{RawRedirect, RawRewrite},
    value::{Many, Parsed},
};
use crate::{
    access::Pattern,
    routes::{PlainPath, Regex},
    target::Target,
};
use serde::Deserialize;
use std::{collections::BTreeMap, ops::Range, path::PathBuf, str::FromStr};
use toml::Spanned;

/// An optional list.
pub(super) type Listed<T> = Option<Spanned<Many<Parsed<T>>>>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawRoute {
    // both
    pub pool: Option<Spanned<String>>,
    // TLS
    pub name: Listed<ServerName>,
    pub alpn: Listed<Alpn>,
    pub target: Option<Spanned<Parsed<Target>>>,
    // HTTP
    pub host: Listed<Pattern>,
    pub path: Option<Spanned<Parsed<PlainPath>>>,
    pub path_exact: Option<Spanned<Parsed<PlainPath>>>,
    pub path_regex: Option<Spanned<Parsed<Regex>>>,
    pub fields: Option<Spanned<RawFields>>,
    pub redirect: Option<Spanned<RawRedirect>>,
    pub rewrite: Option<Spanned<RawRewrite>>,
    pub request_body: Option<Spanned<u64>>,
    pub reply_body: Option<Spanned<u64>>,
    pub users: Option<Spanned<BTreeMap<String, String>>>,
    pub users_file: Option<Spanned<PathBuf>>,
}

/// A key, and the position of its value.
type Key = (&'static str, Range<usize>);

fn key<T>(name: &'static str, value: &Option<Spanned<T>>) -> Option<Key> {
    value.as_ref().map(|v| (name, v.span()))
}

impl RawRoute {
    /// Returns the first key that only TLS has.
    pub fn key_of_tls(&self) -> Option<Key> {
        key("name", &self.name).or(key("alpn", &self.alpn)).or(key("target", &self.target))
    }

    /// Returns the first key that only HTTP has.
    pub fn key_of_http(&self) -> Option<Key> {
        let path = key("path", &self.path).or(key("path_exact", &self.path_exact));
        let to = key("redirect", &self.redirect).or(key("rewrite", &self.rewrite));
        let users = key("users", &self.users).or(key("users_file", &self.users_file));
        key("host", &self.host)
            .or(path)
            .or(key("path_regex", &self.path_regex))
            .or(to)
            .or(users)
            .or(key("request_body", &self.request_body))
            .or(key("reply_body", &self.reply_body))
            .or(key("fields", &self.fields))
    }
}

/// Returns the elements; none if the list was left out.
pub(super) fn list<T>(listed: Listed<T>) -> impl Iterator<Item = T> {
    listed.into_iter().flat_map(|l| l.into_inner().0).map(|one| one.0)
}

/// A pattern for server names. Addresses are not server names (RFC 6066, 3).
pub(super) struct ServerName(pub Pattern);

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

/// Name of an application protocol (RFC 7301, 3.1).
pub(super) struct Alpn(pub String);

impl FromStr for Alpn {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fits = (1..=255).contains(&text.len());
        if fits { Ok(Alpn(text.into())) } else { Err("bad protocol: write a name of 1 to 255 bytes, such as \"h2\"") }
    }
}
