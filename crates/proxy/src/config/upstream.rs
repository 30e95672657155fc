//! Upstream proxies: other proxies through which the connections of a listener go on.

use super::{
    ConfigError, ListenerConfig, Protocol,
    pool::PoolConfig,
    source::SourceFile,
    value::{Many, Parsed},
};
use crate::{
    access::{Pattern, Rule, Upstream, UpstreamProtocol},
    commands::{Command, Commands},
    secrets::{self, Secret},
    target::Target,
};
use serde::Deserialize;
use std::{collections::BTreeMap, ops::Range, path::PathBuf, sync::Arc};
use toml::Spanned;

/// Maximum number of servers of an upstream proxy: all are tried for one connection.
pub const SERVERS_MAX: usize = 16;
/// Maximum number of proxies in a chain: each adds its round trips.
pub const CHAIN_MAX: usize = 4;
/// Maximum length in bytes of a user name and of a password (RFC 1929, section 2).
const CREDENTIAL_MAX: usize = 255;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawUpstream {
    protocol: UpstreamProtocol,
    servers: Option<Spanned<Many<Parsed<Target>>>>,
    pool: Option<Spanned<String>>,
    user: Option<Spanned<String>>,
    password: Option<Spanned<String>>,
    password_file: Option<Spanned<PathBuf>>,
    #[serde(default)]
    direct: Many<Parsed<Pattern>>,
    resolve: Option<bool>,
    through: Option<Spanned<String>>,
}

pub(super) type RawUpstreams = BTreeMap<String, Spanned<RawUpstream>>;

impl SourceFile<'_> {
    pub(super) fn upstreams(
        &self,
        raw: &RawUpstreams,
        pools: &[PoolConfig],
    ) -> Result<Vec<Arc<Upstream>>, ConfigError> {
        raw.keys().map(|name| self.upstream(name, (raw, pools), 1)).collect()
    }

    /// `place`: in the chain, from the end at the client.
    fn upstream(
        &self,
        name: &str,
        (all, pools): (&RawUpstreams, &[PoolConfig]),
        place: usize,
    ) -> Result<Arc<Upstream>, ConfigError> {
        let raw = all[name].get_ref();
        let (servers, pool) = self.upstream_servers(&all[name], pools)?;
        let through = match &raw.through {
            None => None,
            Some(next) if !all.contains_key(next.get_ref()) => {
                return Err(self.no_upstream(next.span(), next.get_ref()));
            }
            Some(next) if place == CHAIN_MAX => {
                let cure = format!("a chain has at most {CHAIN_MAX} proxies, and must not come back: remove `through`");
                return Err(self.wrong(next.span(), &cure));
            }
            Some(next) => Some(self.upstream(next.get_ref(), (all, pools), place + 1)?),
        };
        if let (Some(pool), Some(at), Some(next)) = (&pool, &raw.pool, &through) {
            let is_checked = pools.iter().any(|known| *known.name == **pool && known.check.is_some());
            let cure = match () {
                () if next.has_pool() => "a chain has one pool at most: write servers for the other one",
                () if is_checked => {
                    "its servers are checked without going through the other proxy: remove `check` from the pool, or `through`"
                }
                () => "",
            };
            if !cure.is_empty() {
                return Err(self.wrong(at.span(), cure));
            }
        }
        Ok(Arc::new(Upstream {
            name: name.to_owned(),
            protocol: raw.protocol,
            servers,
            pool,
            login: self.upstream_login(raw)?,
            direct: raw.direct.0.iter().map(|pattern| pattern.0.clone()).collect(),
            resolve: raw.resolve,
            through,
        }))
    }

    /// Returns the servers of an upstream proxy, or the name of their pool.
    fn upstream_servers(
        &self,
        spanned: &Spanned<RawUpstream>,
        pools: &[PoolConfig],
    ) -> Result<(Vec<Target>, Option<Arc<str>>), ConfigError> {
        match (&spanned.get_ref().servers, &spanned.get_ref().pool) {
            (Some(_), Some(pool)) => {
                Err(self.wrong(pool.span(), "an upstream proxy has servers or a pool of them: remove one of the keys"))
            }
            (None, Some(pool)) => Ok((Vec::new(), Some(self.pool_named(pool.clone(), pools)?.into()))),
            (None, None) => {
                let cure = "where does it listen? add servers = \"HOST:PORT\", or pool = \"NAME\"";
                Err(self.wrong(spanned.span(), cure))
            }
            (Some(servers), None) => {
                let all: Vec<Target> = servers.get_ref().0.iter().map(|server| server.0.clone()).collect();
                if !(1..=SERVERS_MAX).contains(&all.len()) {
                    let cure =
                        format!("an upstream proxy has 1 to {SERVERS_MAX} servers: write \"HOST:PORT\" for each");
                    return Err(self.wrong(servers.span(), &cure));
                }
                Ok((all, None))
            }
        }
    }

    fn upstream_login(&self, raw: &RawUpstream) -> Result<Option<(String, String)>, ConfigError> {
        let (password, at) = match (&raw.password, &raw.password_file) {
            (Some(_), Some(file)) => {
                return Err(self.wrong(file.span(), "the password is there twice: remove password or password_file"));
            }
            (Some(password), None) => {
                self.has_passwords.set(true);
                (password.get_ref().clone(), password.span())
            }
            (None, Some(file)) => {
                let path = self.path(file.get_ref());
                let Secret { text, exposed } = secrets::read(&path).map_err(|e| self.wrong(file.span(), &e))?;
                if exposed {
                    let what = format!("{} holds a password, and others may read it: chmod 600 it", path.display());
                    self.warn(file.span(), &what);
                }
                (text.lines().next().unwrap_or_default().to_owned(), file.span())
            }
            (None, None) => match &raw.user {
                None => return Ok(None),
                Some(user) => return Err(self.wrong(user.span(), "a password is missing: add password_file")),
            },
        };
        let Some(user) = &raw.user else {
            return Err(self.wrong(at, "whose password is that? add user = \"NAME\""));
        };
        for (text, at) in [(user.get_ref(), user.span()), (&password, at)] {
            if !(1..=CREDENTIAL_MAX).contains(&text.len()) || text.contains(|c: char| c.is_control()) {
                let cure = format!("write 1 to {CREDENTIAL_MAX} bytes, without control characters");
                return Err(self.wrong(at, &cure));
            }
        }
        if raw.protocol == UpstreamProtocol::Http && user.get_ref().contains(':') {
            return Err(self.wrong(user.span(), "a name with a colon cannot be sent (RFC 7617, 2): choose another"));
        }
        Ok(Some((user.get_ref().clone(), password)))
    }

    fn no_upstream(&self, at: Range<usize>, name: &str) -> ConfigError {
        let is_none = matches!(name, "none" | "direct" | "false");
        let or = if is_none { "; in a rule, upstream = false leads to none" } else { "" };
        self.wrong(at, &format!("there is no upstream proxy \"{name}\": add [upstream.{name}]{or}"))
    }

    /// Leads the connections of a listener through the proxy of this name.
    pub(super) fn lead_through(
        &self,
        listener: &mut ListenerConfig,
        name: Option<Spanned<String>>,
        all: &[Arc<Upstream>],
    ) -> Result<(), ConfigError> {
        let Some(name) = name else { return Ok(()) };
        let upstream = self.upstream_named(name.span(), name.get_ref(), all)?;
        let cure = match &listener.protocol {
            _ if listener.no_proxy().is_some() => listener.no_proxy(),
            Protocol::Socks5 { commands, .. } if !commands.only_connect() && *commands != Commands::default() => {
                Some("it is asked for connections only: remove the key, or all commands but \"connect\"")
            }
            _ if upstream.resolve.is_none() && listener.rules.list().iter().any(Rule::names_addresses) => Some(
                "its rules name addresses, and it would look up names itself: add resolve = true to the upstream proxy, \
                 so that names are looked up here, or resolve = false if rules need not know the addresses of names",
            ),
            _ => None,
        };
        if let Some(cure) = cure {
            return Err(self.wrong(name.span(), cure));
        }
        if let Protocol::Socks5 { commands, .. } = &mut listener.protocol {
            commands.served = vec![Command::Connect];
        }
        listener.upstream = Some(upstream);
        Ok(())
    }

    /// Returns the upstream proxy of this name, which there has to be.
    pub(super) fn upstream_named(
        &self,
        at: Range<usize>,
        name: &str,
        all: &[Arc<Upstream>],
    ) -> Result<Arc<Upstream>, ConfigError> {
        let found = all.iter().find(|upstream| upstream.name == name).cloned();
        found.ok_or_else(|| self.no_upstream(at, name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use std::path::Path;

    fn read(listener: &str, upstreams: &str) -> Result<Config, String> {
        let text = format!("[[listener]]\nlisten = \"127.0.0.1:1\"\nupstream = \"up\"\n{listener}\n{upstreams}\n");
        Config::from_toml(&text, Path::new("l.toml")).map_err(|wrong| wrong.to_string())
    }

    const UP: &str = "[upstream.up]\nprotocol = \"socks5\"\nservers = \"a:1\"";

    #[test]
    fn what_goes_through_it() {
        let upstream = format!("{UP}\ndirect = [\"10.0.0.0/8\", \"*.local\", \"b\"]");
        let config = read("protocol = \"http\"", &upstream).unwrap();
        let up = config.listeners[0].upstream.as_ref().unwrap();
        assert_eq!(up, &config.upstreams[0]);
        for (target, goes) in [
            ("10.1.2.3:1", false),
            ("[::ffff:10.1.2.3]:1", false),
            ("11.1.2.3:1", true),
            ("x.local:1", false),
            ("local:1", true),
            ("b:1", false),
            ("c:1", true),
        ] {
            let target: Target = target.parse().unwrap();
            assert_eq!(up.leads_to(&target, None), goes, "{target}");
        }
        let intercepted = Some("10.9.9.9:1".parse().unwrap());
        assert!(!up.leads_to(&"c:1".parse().unwrap(), intercepted));
    }

    #[test]
    fn chains() {
        let next =
            |name: &str, next: &str| format!("[upstream.{name}]\nprotocol = \"http\"\nservers = \"a:1\"\n{next}\n");
        let four =
            ["a", "b", "c"].map(|name| next(name, &format!("through = \"{}\"", (name.as_bytes()[0] + 1) as char)));
        let four = next("up", "through = \"b\"") + &four[1..].concat() + &next("d", "");
        let config = read("protocol = \"http\"", &four).unwrap();
        let mut up = config.listeners[0].upstream.clone().unwrap();
        let mut names = vec![up.name.clone()];
        while let Some(next) = up.through.clone() {
            names.push(next.name.clone());
            up = next;
        }
        assert_eq!(names, ["up", "b", "c", "d"]);
        let round = format!("{UP}\nthrough = \"up\"");
        assert!(
            read("protocol = \"http\"", &round).unwrap_err().contains("l.toml:8:11: a chain has at most 4 proxies")
        );
    }

    #[test]
    fn mistakes() {
        let http = "protocol = \"http\"";
        for (listener, more, want) in [
            ("protocol = \"ftp\"", "", "3:12: data connections of FTP"),
            ("protocol = \"transparent\"", "", "3:12: both hosts shake hands"),
            ("protocol = \"plug\"\ntarget = \"a:1\"\nhandshake = \"end-to-end\"", "", "3:12: both hosts shake hands"),
            ("protocol = \"socks5\"\ncommands = [\"connect\", \"bind\"]", "", "3:12: it is asked for connections only"),
            (
                "protocol = \"plug\"\npool = \"p\"\n[pool.p]\nservers = [\"a:1\"]",
                "",
                "3:12: servers of pools and sites",
            ),
            (
                "protocol = \"plug\"\ntransparent = true\nhandshake = \"confirm\"",
                "",
                "3:12: servers are connected to on",
            ),
            (
                "protocol = \"plug\"\ntransparent = true\nsource = \"client\"",
                "",
                "3:12: servers see the upstream proxy",
            ),
            (
                "protocol = \"http\"\nrules = [{ action = \"deny\", target = \"10.0.0.0/8\" }]",
                "",
                "3:12: its rules name addresses",
            ),
            (http, "\nuser = \"a\"", "8:8: a password is missing"),
            (http, "\npassword = \"a\"", "8:12: whose password is that?"),
            (http, "\nuser = \"a\"\npassword = \"\"", "9:12: write 1 to 255 bytes"),
            (http, "\nuser = \"a\"\npassword = \"b\"\npassword_file = \"c\"", "10:17: the password is there twice"),
            (http, "\nthrough = \"b\"", "8:11: there is no upstream proxy \"b\""),
        ] {
            let wrong = read(listener, &format!("{UP}{more}")).expect_err(listener);
            assert!(wrong.starts_with(&format!("l.toml:{want}")), "{listener} {more}: {wrong}");
        }
        let with_colon = UP.replace("socks5", "http") + "\nuser = \"a:b\"\npassword = \"c\"";
        assert!(read(http, &with_colon).unwrap_err().contains("RFC 7617"));
        let many = format!("[{}]", "\"a:1\", ".repeat(17));
        assert!(read(http, &UP.replace("\"a:1\"", &many)).unwrap_err().contains("1 to 16 servers"));
        assert!(read(http, "").unwrap_err().contains("add [upstream.up]"));
        let known = "protocol = \"http\"\nrules = [{ action = \"deny\", target = \"10.0.0.0/8\" }]";
        assert!(read(known, &format!("{UP}\nresolve = false")).is_ok());
    }
}
