//! Plugs: the value of `--plug`, a listening address and a fixed target; and what the TOML file says of where a plug leads to.

use super::{
    ConfigError, PlugHandshake, Protocol,
    pool::{LeadTo, PoolConfig},
    source::SourceFile,
    value::Parsed,
};
use crate::target::{Target, TargetError};
use longsplice_engine::TpotWhose;
use std::{net::SocketAddr, ops::Range, str::FromStr};
use toml::Spanned;

/// A plug, written `ADDR:PORT=HOST:PORT` as the value of `--plug`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plug {
    /// Listening address.
    pub listen: SocketAddr,
    /// Target of all connections.
    pub target: Target,
}

/// Parse error of a plug.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PlugError {
    /// There is no `=`.
    #[error("no `=`: write ADDR:PORT=HOST:PORT, for example 127.0.0.1:8080=example.org:80")]
    NoTarget,
    /// The left side is not a listening address.
    #[error("left of `=`: {0}")]
    Listen(ListenError),
    /// The right side is not a target.
    #[error("right of `=`: {0}")]
    Target(TargetError),
}

/// Parse error of a listening address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "bad listen address: write ADDR:PORT with a numeric address, IPv6 in brackets, such as 127.0.0.1:1080 or [::1]:1080"
)]
pub struct ListenError;

/// Parses a listening address.
pub fn parse_listen(text: &str) -> Result<SocketAddr, ListenError> {
    text.parse().map_err(|_| ListenError)
}

impl FromStr for Plug {
    type Err = PlugError;

    fn from_str(text: &str) -> Result<Self, PlugError> {
        let (listen, target) = text.split_once('=').ok_or(PlugError::NoTarget)?;
        let listen = parse_listen(listen).map_err(PlugError::Listen)?;
        Ok(Plug { listen, target: target.parse().map_err(PlugError::Target)? })
    }
}

impl SourceFile<'_> {
    /// `at`, `whose`: the table of the listener, and whose connections it intercepts.
    pub(super) fn plug(
        &self,
        (at, whose): (Range<usize>, Option<TpotWhose>),
        (target, pool): (Option<Spanned<Parsed<Target>>>, Option<Spanned<String>>),
        handshake: PlugHandshake,
        pools: &[PoolConfig],
    ) -> Result<Protocol, ConfigError> {
        match (&target, &pool) {
            (None, None) if whose.is_none() => {
                let cure = "a plug needs a target: add target = \"HOST:PORT\", pool = \"NAME\", or transparent = true";
                Err(self.wrong(at, cure))
            }
            (None, Some(pool)) if handshake == PlugHandshake::EndToEnd => {
                let cure = "a client cannot shake hands with a server that is chosen later: remove the handshake, \
                            or write a target instead";
                Err(self.wrong(pool.span(), cure))
            }
            _ => Ok(Protocol::Plug { target: self.lead_to((target, pool), pools)?, handshake }),
        }
    }

    /// Returns where all clients of a listener are led to, if the file says so.
    pub(super) fn lead_to(
        &self,
        (target, pool): (Option<Spanned<Parsed<Target>>>, Option<Spanned<String>>),
        pools: &[PoolConfig],
    ) -> Result<Option<LeadTo>, ConfigError> {
        match (target, pool) {
            (Some(_), Some(pool)) => {
                Err(self.wrong(pool.span(), "a listener has a target or a pool: remove one of them"))
            }
            (None, Some(pool)) => Ok(Some(LeadTo::Pool(self.pool_named(pool, pools)?))),
            (target, None) => Ok(target.map(|target| LeadTo::Target(target.into_inner().0))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use std::path::Path;

    #[test]
    fn plugs() {
        let plug: Plug = "[::1]:8080=Example.org:80".parse().unwrap();
        assert_eq!((plug.listen.to_string(), plug.target.to_string()), ("[::1]:8080".into(), "example.org:80".into()));
        let plug: Plug = "0.0.0.0:1=[2001:db8::1]:2".parse().unwrap();
        assert_eq!(plug.target.to_string(), "[2001:db8::1]:2");
    }

    #[test]
    fn pools() {
        let read = |more: &str| {
            let plug = format!("[[listener]]\nprotocol = \"plug\"\nlisten = \"127.0.0.1:1\"\n{more}\n");
            Config::from_toml(&(plug + "[pool.db]\nservers = [\"a:1\"]\n"), Path::new("l.toml"))
        };
        let config = read("pool = \"db\"").unwrap();
        let [plug] = &config.listeners[..] else { panic!() };
        assert_eq!(
            plug.protocol,
            Protocol::Plug { target: Some(LeadTo::Pool("db".into())), handshake: PlugHandshake::Proxy }
        );
        assert!(plug.leads_all() && !plug.rules.guarded && plug.fixed_target().is_none());
        assert_eq!((plug.pools().collect::<Vec<_>>(), config.warnings), (vec!["db"], Vec::new()));
        let routed = read("pool = \"db\"\ntransparent = true").unwrap().listeners.remove(0);
        assert!(routed.leads_all() && !routed.rules.guarded);
        for (more, want) in [
            ("pool = \"d\"", "4:8: there is no pool \"d\""),
            ("pool = \"db\"\ntarget = \"a:1\"", "4:8: a listener has a target or a pool"),
            ("pool = \"db\"\nhandshake = \"end-to-end\"", "4:8: a client cannot shake hands with a server that"),
            (
                "pool = \"db\"\ntransparent = true\nhandshake = \"confirm\"",
                "6:13: only the server that the client wants",
            ),
            ("", "1:1: a plug needs a target"),
        ] {
            let wrong = read(more).expect_err(more).to_string();
            assert!(wrong.starts_with(&format!("l.toml:{want}")), "{more}: {wrong}");
        }
        let of_http = "pool = \"db\"\n[pool.db.sticky]\ncookie = \"a\"\n[pool.other]\nservers = [\"b:1\"]";
        let text = format!("[[listener]]\nprotocol = \"plug\"\nlisten = \"127.0.0.1:1\"\n{of_http}\n");
        let text = text.replace("[pool.db.sticky]", "[pool.db]\nservers = [\"a:1\"]\n[pool.db.sticky]");
        let [unread, unused] = &Config::from_toml(&text, Path::new("l.toml")).unwrap().warnings[..] else { panic!() };
        assert!(
            unread.starts_with("l.toml:5:1: ") && unread.contains("hash_field and sticky are for HTTP"),
            "{unread}"
        );
        assert!(unused.contains("nothing leads to pool other"), "{unused}");
    }

    #[test]
    fn no_plugs() {
        for (text, want) in [
            ("127.0.0.1:1", PlugError::NoTarget),
            ("localhost:1=a:2", PlugError::Listen(ListenError)),
            ("::1:1=a:2", PlugError::Listen(ListenError)),
            ("127.0.0.1:1=", PlugError::Target(TargetError::NoPort)),
            ("127.0.0.1:1=::1:2", PlugError::Target(TargetError::NeedsBrackets)),
        ] {
            assert_eq!(text.parse::<Plug>(), Err(want), "{text}");
        }
    }
}
