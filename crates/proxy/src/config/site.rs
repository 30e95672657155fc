//! HTTP routes and pools in the TOML file.

use super::{
    Config, ConfigError, ListenerConfig,
    pool::{Ask, Balance, Check, Get, HealthLimits, Key, PoolConfig, SERVERS_MAX, ServerConfig, Sticky, WEIGHT_MAX},
    route::{RawRoute, list},
    source::SourceFile,
    value::{Count, OrNumber, Parsed, Seconds},
};
use crate::{
    pattern::Pattern,
    routes::{Paths, Route, RouteTo},
    target::{Host, Target},
};
use longsplice_http::Authority;
use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, Visitor, value::MapAccessDeserializer},
};
use std::{
    collections::BTreeMap,
    fmt,
    num::NonZeroU16,
    ops::{Range, RangeInclusive},
    str::FromStr,
};
use toml::Spanned;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawPool {
    servers: Spanned<Vec<RawServer>>,
    #[serde(default)]
    balance: RawBalance,
    hash_field: Option<Spanned<Parsed<FieldName>>>,
    tries: Option<Number<1, 16>>,
    max_connections: Option<Count>,
    queue: Option<Number<0, 65536>>,
    queue_wait: Option<Seconds>,
    idle_connections: Option<Number<0, 65536>>,
    idle_time: Option<Seconds>,
    sticky: Option<RawSticky>,
    slow_start: Option<Spanned<Seconds>>,
    failures: Option<Number<1, 1_000_000>>,
    out: Option<Seconds>,
    check: Option<RawCheck>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSticky {
    cookie: Parsed<FieldName>,
    #[serde(default)]
    secret: String,
    #[serde(default)]
    secure: bool,
    max_age: Option<Seconds>,
}

/// A server of a pool: `"HOST:PORT"`, or a table.
struct RawServer(ServerConfig);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Weighted {
    address: Parsed<Target>,
    weight: Option<Number<1, { WEIGHT_MAX }>>,
    #[serde(default)]
    backup: bool,
    max_connections: Option<Count>,
}

impl<'de> Deserialize<'de> for RawServer {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        // Not untagged: an error would then have the span of the whole list.
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = ServerConfig;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"HOST:PORT\" or { address = \"HOST:PORT\", weight = 2 }")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<ServerConfig, E> {
                Ok(ServerConfig::new(text.parse().map_err(E::custom)?))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ServerConfig, A::Error> {
                let server = Weighted::deserialize(MapAccessDeserializer::new(map))?;
                Ok(ServerConfig {
                    target: server.address.0,
                    weight: server.weight.map_or(1, |n| n.0),
                    backup: server.backup,
                    max_connections: server.max_connections.map(|n| n.0),
                })
            }
        }
        d.deserialize_any(V).map(RawServer)
    }
}

#[derive(Deserialize, Default, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum RawBalance {
    #[default]
    RoundRobin,
    LeastConnections,
    ConsistentHash,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCheck {
    path: Option<Spanned<Parsed<CheckPath>>>,
    #[serde(default)]
    tls: Option<Spanned<bool>>,
    send: Option<Spanned<Parsed<Bytes>>>,
    expect: Option<Spanned<Parsed<Pattern>>>,
    host: Option<Spanned<Parsed<CheckHost>>>,
    port: Option<NonZeroU16>,
    interval: Option<Seconds>,
    timeout: Option<Seconds>,
    status: Option<Spanned<OrNumber<Statuses>>>,
    rise: Option<Number<1, 1000>>,
    fall: Option<Number<1, 1000>>,
}

/// An integer from `A` to `B`.
pub(super) struct Number<const A: u32, const B: u32>(pub(super) u32);

impl<'de, const A: u32, const B: u32> Deserialize<'de> for Number<A, B> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let number = i64::deserialize(d)?;
        let fits = u32::try_from(number).ok().filter(|n| (A..=B).contains(n));
        fits.map(Number).ok_or_else(|| de::Error::custom(format!("{number}: write a number from {A} to {B}")))
    }
}

/// A token (RFC 9110, 5.1), limited to characters that are in use.
struct FieldName(String);

impl FromStr for FieldName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let good = !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
        if good { Ok(FieldName(text.into())) } else { Err("bad field name: write one such as X-User") }
    }
}

/// Path of a check; may have a query.
struct CheckPath(String);

impl FromStr for CheckPath {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let good = text.starts_with('/') && text.bytes().all(|b| b.is_ascii_graphic() && b != b'#');
        if good {
            Ok(CheckPath(text.into()))
        } else {
            Err("bad path: begin it with `/`, and write other than ASCII as %XX")
        }
    }
}

struct CheckHost(String);

impl FromStr for CheckHost {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let host = Authority::parse(text).map_err(|_| "bad host: write HOST or HOST:PORT")?;
        Ok(CheckHost(host.to_string()))
    }
}

/// Bytes: text with escapes.
struct Bytes(Vec<u8>);

impl FromStr for Bytes {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const CURE: &str = r"bad escape: write \\, \r, \n or \xHH";
        let (mut bytes, mut rest) = (Vec::new(), text);
        while let Some((plain, escape)) = rest.split_once('\\') {
            bytes.extend(plain.bytes());
            let (byte, used) = match escape.bytes().next() {
                Some(b'\\') => (b'\\', 1),
                Some(b'r') => (b'\r', 1),
                Some(b'n') => (b'\n', 1),
                Some(b'x') => (escape.get(1..3).and_then(|hex| u8::from_str_radix(hex, 16).ok()).ok_or(CURE)?, 3),
                _ => return Err(CURE),
            };
            bytes.push(byte);
            rest = &escape[used..];
        }
        bytes.extend(rest.bytes());
        Ok(Bytes(bytes))
    }
}

pub(super) struct Statuses(pub(super) RangeInclusive<u16>);

impl FromStr for Statuses {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let status = |t: &str| t.trim().parse().ok().filter(|n| (200..=599).contains(n));
        match (status(first), status(last)) {
            (Some(first), Some(last)) if first <= last => Ok(Statuses(first..=last)),
            _ => Err("bad status: write one such as 200, or FIRST-LAST such as 200-399, from 200 to 599"),
        }
    }
}

impl SourceFile<'_> {
    pub(super) fn pools(&self, raw: BTreeMap<String, Spanned<RawPool>>) -> Result<Vec<PoolConfig>, ConfigError> {
        raw.into_iter().map(|(name, pool)| self.pool(name, pool.into_inner())).collect()
    }

    fn pool(&self, name: String, raw: RawPool) -> Result<PoolConfig, ConfigError> {
        let span = raw.servers.span();
        let most = raw.max_connections.map(|n| n.0);
        let limited = |s: ServerConfig| ServerConfig { max_connections: s.max_connections.or(most), ..s };
        let servers: Vec<ServerConfig> = raw.servers.into_inner().into_iter().map(|s| limited(s.0)).collect();
        if !(1..=SERVERS_MAX).contains(&servers.len()) {
            return Err(
                self.wrong(span, &format!("a pool has 1 to {SERVERS_MAX} servers: write \"HOST:PORT\" for each"))
            );
        }
        if let Some(twice) =
            servers.iter().enumerate().find(|(i, s)| servers[..*i].iter().any(|o| o.target == s.target))
        {
            return Err(
                self.wrong(span.clone(), &format!("{} is there twice: give it a weight instead", twice.1.target))
            );
        }
        if servers.iter().all(|server| server.backup) {
            return Err(self.wrong(span, "all servers stand in for others: remove backup from at least one"));
        }
        if let (RawBalance::ConsistentHash, Some(slow)) = (raw.balance, &raw.slow_start) {
            let cure = "clients would change their servers all the time: remove slow_start, or use another balance";
            return Err(self.wrong(slow.span(), cure));
        }
        let d = PoolConfig::new(name, servers);
        Ok(PoolConfig {
            balance: match (raw.balance, raw.hash_field) {
                (RawBalance::ConsistentHash, Some(name)) => Balance::ConsistentHash(Key::Field(name.into_inner().0.0)),
                (RawBalance::ConsistentHash, None) => Balance::ConsistentHash(Key::Client),
                (_, Some(name)) => {
                    let cure = "nothing is hashed: remove hash_field, or use balance = \"consistent-hash\"";
                    return Err(self.wrong(name.span(), cure));
                }
                (RawBalance::RoundRobin, None) => Balance::RoundRobin,
                (RawBalance::LeastConnections, None) => Balance::LeastConnections,
            },
            tries: raw.tries.map_or(d.tries, |n| n.0),
            queue: raw.queue.map_or(d.queue, |n| n.0),
            queue_wait: raw.queue_wait.map_or(d.queue_wait, |s| s.0),
            idle_connections: raw.idle_connections.map_or(d.idle_connections, |n| n.0 as usize),
            idle_time: raw.idle_time.map_or(d.idle_time, |s| s.0),
            sticky: raw.sticky.map(|s| Sticky {
                cookie: s.cookie.0.0,
                secret: s.secret,
                secure: s.secure,
                max_age: s.max_age.map(|s| s.0),
            }),
            slow_start: raw.slow_start.map_or(d.slow_start, |s| s.into_inner().0),
            health: HealthLimits {
                failures: raw.failures.map_or(d.health.failures, |n| n.0),
                out: raw.out.map_or(d.health.out, |s| s.0),
                rise: raw.check.as_ref().and_then(|c| c.rise.as_ref()).map_or(d.health.rise, |n| n.0),
                fall: raw.check.as_ref().and_then(|c| c.fall.as_ref()).map_or(d.health.fall, |n| n.0),
            },
            check: raw.check.map(|raw| self.health_check(raw)).transpose()?,
            ..d
        })
    }

    fn health_check(&self, raw: RawCheck) -> Result<Check, ConfigError> {
        let d = Check::default();
        let tls = raw.tls.filter(|tls| *tls.get_ref());
        let spans = [raw.path.as_ref().map(Spanned::span), tls.as_ref().map(Spanned::span)];
        let [asks, second] = {
            let mut all = spans.into_iter().chain([raw.expect.as_ref().map(Spanned::span)]).flatten();
            [all.next(), all.next()]
        };
        if let Some(at) = second {
            return Err(self.wrong(at, "a check asks one thing: a path, tls or expect; remove the others"));
        }
        let lacks = [
            (raw.send.as_ref().map(Spanned::span), raw.expect.is_some(), "nobody looks at the answer: add expect"),
            (
                raw.host.as_ref().map(Spanned::span),
                raw.path.is_some() || tls.is_some(),
                "it has no host: add a path or tls",
            ),
            (raw.status.as_ref().map(Spanned::span), raw.path.is_some(), "the answer has no status: add a path"),
        ];
        if let Some((Some(at), _, cure)) = lacks.into_iter().find(|(at, is_read, _)| at.is_some() && !is_read) {
            return Err(self.wrong(at, cure));
        }
        if let (Some(host), Some(_)) = (&raw.host, &tls)
            && !matches!(Host::from_name(host.get_ref().0.0.as_bytes()), Ok(Host::Name(_)))
        {
            return Err(self.wrong(host.span(), "servers of TLS are asked for by name: write one without a port"));
        }
        let host = raw.host.map(|host| host.into_inner().0.0);
        let ask = match (raw.path, raw.expect) {
            _ if asks.is_none() => None,
            (Some(path), _) => {
                let d = Get::new(path.into_inner().0.0);
                let status = raw.status.map_or(d.status.clone(), |s| s.into_inner().0.0);
                Some(Ask::Http(Get { host, status, ..d }))
            }
            (None, Some(expect)) => {
                let send = raw.send.map_or_else(Vec::new, |send| send.into_inner().0.0);
                Some(Ask::Bytes(send, expect.into_inner().0))
            }
            (None, None) => Some(Ask::Tls(host)),
        };
        let (interval, timeout) = (raw.interval.map_or(d.interval, |s| s.0), raw.timeout.map_or(d.timeout, |s| s.0));
        Ok(Check { ask, port: raw.port, interval, timeout })
    }

    /// Returns the name of a pool, which there has to be.
    pub(super) fn pool_named(&self, pool: Spanned<String>, pools: &[PoolConfig]) -> Result<String, ConfigError> {
        let (at, name) = (pool.span(), pool.into_inner());
        if !pools.iter().any(|pool| pool.name == name) {
            let cure = format!("there is no pool {name:?}: add [pool.{name}] with servers = [\"HOST:PORT\"]");
            return Err(self.wrong(at, &cure));
        }
        Ok(name)
    }

    /// Warns of pools that nothing leads to, and of keys that nobody reads who is led there.
    pub(super) fn look_at_pools(&self, spans: Vec<(String, Range<usize>)>, config: &Config) {
        for (name, at) in spans {
            let leads = |l: &ListenerConfig| l.pools().chain(l.rule_pools()).any(|pool| pool == name);
            let users = || config.listeners.iter().filter(|listener| leads(listener));
            let of_proxies = config.upstreams.iter().find(|upstream| upstream.pool.as_deref() == Some(&*name));
            let pool = config.pools.iter().find(|pool| pool.name == name);
            let reads =
                pool.is_some_and(|p| p.sticky.is_some() || matches!(p.balance, Balance::ConsistentHash(Key::Field(_))));
            let reads_nothing = |l: &&ListenerConfig| l.http().is_none_or(|http| http.routes.is_empty());
            let whose = match (users().find(reads_nothing), of_proxies) {
                (Some(listener), _) => Some(format!("clients of {}", listener.name)),
                (None, Some(upstream)) => Some(format!("connections through upstream proxy {}", upstream.name)),
                (None, None) => None,
            };
            if users().next().is_none() && of_proxies.is_none() {
                self.warn(
                    at,
                    &format!("nothing leads to pool {name}: no listener, route, rule or upstream proxy names it"),
                );
            } else if let Some(whose) = whose.filter(|_| reads) {
                let what = format!("{whose} are led to pool {name} without a look at cookies and fields");
                self.warn(at, &format!("{what}: hash_field and sticky are for HTTP"));
            }
        }
    }

    pub(super) fn routes(&self, raw: Vec<Spanned<RawRoute>>, pools: &[PoolConfig]) -> Result<Vec<Route>, ConfigError> {
        raw.into_iter().map(|route| self.route(route, pools)).collect()
    }

    fn route(&self, spanned: Spanned<RawRoute>, pools: &[PoolConfig]) -> Result<Route, ConfigError> {
        let span = spanned.span();
        let raw = spanned.into_inner();
        if let Some((key, at)) = raw.key_of_tls() {
            let cure = format!(
                "routes of HTTP have hosts, paths, pools and redirects, and no `{key}`: remove it, \
                 or use protocol = \"tls\""
            );
            return Err(self.wrong(at, &cure));
        }
        let asks = raw.users.as_ref().map(Spanned::span).or(raw.users_file.as_ref().map(Spanned::span));
        let to = match (raw.pool, raw.redirect, asks) {
            (Some(pool), None, _) => RouteTo::Pool(self.pool_named(pool, pools)?),
            (None, Some(_), Some(users)) => {
                return Err(self.wrong(users, "a redirect asks nobody for a password: remove the users"));
            }
            (None, Some(redirect), None) => RouteTo::Redirect(redirect.into_inner().into()),
            (Some(_), Some(redirect), _) => {
                return Err(self.wrong(redirect.span(), "a route has a pool or a redirect: remove one of them"));
            }
            (None, None, _) => {
                let cure = "a route of HTTP needs a pool: add pool = \"NAME\", and [pool.NAME], or a redirect";
                return Err(self.wrong(span, cure));
            }
        };
        let path = match (raw.path, raw.path_exact, raw.path_regex) {
            (None, None, None) => Paths::default(),
            (Some(p), None, None) => Paths::Below(p.into_inner().0),
            (None, Some(p), None) => Paths::Exact(p.into_inner().0),
            (None, None, Some(p)) => Paths::Regex(p.into_inner().0),
            _ => return Err(self.wrong(span, "a route has one of path, path_exact and path_regex: remove the others")),
        };
        let fields = raw.fields.map(|fields| self.fields(fields.into_inner())).transpose()?.unwrap_or_default();
        let rewrite = raw.rewrite.map(|rewrite| self.rewrite(rewrite, &path)).transpose()?;
        let (rewrite, rewrite_replies) = rewrite.map_or((None, false), |(rewrite, replies)| (Some(rewrite), replies));
        let longest = [raw.request_body, raw.reply_body].map(|most| most.map(Spanned::into_inner));
        let users = self.http_users(raw.users, raw.users_file)?;
        Ok(Route { hosts: list(raw.host).collect(), path, to, rewrite, rewrite_replies, longest, users, fields })
    }
}
