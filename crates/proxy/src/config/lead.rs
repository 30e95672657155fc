//! Rules that lead: connections that they allow go through an upstream proxy, or to a pool, instead of straight to their targets.

use super::{Config, ConfigError, ListenerConfig, PlugHandshake, Protocol, source::SourceFile};
use crate::access::{Action, Way};
use longsplice_engine::TpotHandshake;
use serde::{
    Deserialize, Deserializer,
    de::{self, Visitor},
};
use std::{fmt, ops::Range};
use toml::Spanned;

/// The place of a rule in its list, and where it stands that it leads somewhere.
pub(super) type LedAt = (usize, Range<usize>);

/// The name of an upstream proxy, or `false` for none.
pub(super) struct RawLead(Option<String>);

impl<'de> Deserialize<'de> for RawLead {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl Visitor<'_> for V {
            type Value = RawLead;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of an upstream proxy, or false for none")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<RawLead, E> {
                Ok(RawLead(Some(text.into())))
            }
            fn visit_bool<E: de::Error>(self, leads: bool) -> Result<RawLead, E> {
                if leads { Err(E::invalid_value(de::Unexpected::Bool(leads), &self)) } else { Ok(RawLead(None)) }
            }
        }
        d.deserialize_any(V)
    }
}

impl SourceFile<'_> {
    /// Returns where a rule leads, if it does.
    pub(super) fn way(
        &self,
        (upstream, pool): (Option<Spanned<RawLead>>, Option<Spanned<String>>),
        action: Action,
        config: &Config,
    ) -> Result<Option<Way>, ConfigError> {
        let at = upstream.as_ref().map(Spanned::span).or(pool.as_ref().map(Spanned::span));
        match (upstream, pool, at) {
            (_, _, Some(at)) if action == Action::Deny => {
                Err(self.wrong(at, "what a rule denies goes nowhere: remove the key, or use action = \"allow\""))
            }
            (Some(_), Some(pool), _) => {
                let cure = "servers of pools are not asked for through a proxy: remove `upstream` or `pool`";
                Err(self.wrong(pool.span(), cure))
            }
            (Some(upstream), None, _) => match &upstream.get_ref().0 {
                None => Ok(Some(Way::Direct)),
                Some(name) => Ok(Some(Way::Through(self.upstream_named(upstream.span(), name, &config.upstreams)?))),
            },
            (None, Some(pool), _) => Ok(Some(Way::Pool(self.pool_named(pool, &config.pools)?.into()))),
            (None, None, _) => Ok(None),
        }
    }

    /// Checks whether the rules of a listener may lead where they do.
    pub(super) fn may_lead(&self, listener: &ListenerConfig, led: &[LedAt]) -> Result<(), ConfigError> {
        let rules = listener.rules.list();
        for (i, at) in led {
            let cure = match &rules[*i].way {
                Some(Way::Through(upstream)) => match listener.no_proxy() {
                    None if upstream.resolve.is_none()
                        && rules[*i].matches_names()
                        && rules[..*i].iter().any(|rule| rule.names_addresses()) =>
                    {
                        Some(
                            "rules before it name addresses, and it would look up names itself: add resolve = true to \
                             the upstream proxy, so that names are looked up here, or resolve = false if rules need not \
                             know the addresses of names",
                        )
                    }
                    cure => cure,
                },
                Some(Way::Direct) => {
                    if listener.upstream.is_none() {
                        self.warn(at.clone(), "this has no effect: the listener has no upstream proxy");
                    }
                    listener.no_proxy()
                }
                Some(Way::Pool(_)) => listener.no_pool(),
                None => None,
            };
            cure.map_or(Ok(()), |cure| Err(self.wrong(at.clone(), cure)))?;
        }
        Ok(())
    }
}

impl ListenerConfig {
    /// Returns why connections cannot go on through an upstream proxy, if they cannot.
    pub(super) fn no_proxy(&self) -> Option<&'static str> {
        let cure = match &self.protocol {
            Protocol::Ftp(_) => "data connections of FTP would not go through it: remove the key",
            _ if self.is_between_hosts() => return Some(self.no_handshake()),
            _ if self.is_site() || self.pools().next().is_some() => {
                "servers of pools and sites are not asked for through a proxy: remove the key"
            }
            _ if self.handshake != TpotHandshake::Basic => {
                "servers are connected to on the client's SYN, which no proxy can be asked for: use handshake = \"basic\""
            }
            _ if self.shows_clients => "servers see the upstream proxy: remove the key, or `source`",
            _ => return None,
        };
        Some(cure)
    }

    /// Returns why rules cannot lead to a pool, if they cannot.
    fn no_pool(&self) -> Option<&'static str> {
        let cure = match &self.protocol {
            Protocol::Ftp(_) => "rules of FTP are about its commands: write `pool` at the listener",
            _ if self.is_between_hosts() => return Some(self.no_handshake()),
            _ if self.is_site() || self.pools().next().is_some() => {
                "clients are led to pools already: remove the key, or the pool of the listener or its routes"
            }
            _ if self.intercepts.is_some() => {
                "routed connections go to the servers that their clients want: remove the key"
            }
            _ => return None,
        };
        Some(cure)
    }

    fn no_handshake(&self) -> &'static str {
        match &self.protocol {
            Protocol::Plug { handshake: PlugHandshake::EndToEnd, .. } => {
                "both hosts shake hands with each other: remove the key, or the handshake"
            }
            _ => "both hosts shake hands with each other: remove the key, or use protocol = \"plug\"",
        }
    }

    fn is_site(&self) -> bool {
        self.http().is_some_and(|http| !http.routes.is_empty())
    }
}

#[cfg(test)]
#[path = "lead_tests.rs"]
mod tests;
