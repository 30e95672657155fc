//! Upstream proxies: other proxies through which the connections of a listener go on.

use super::{
    ConfigError, ListenerConfig, PlugHandshake, Protocol,
    source::SourceFile,
    value::{Many, Parsed},
};
use crate::{
    access::Pattern,
    commands::{Command, Commands},
    secrets::{self, Secret},
    target::{Host, Target},
};
use longsplice_engine::TpotHandshake;
use serde::Deserialize;
use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, sync::Arc};
use toml::Spanned;

/// Maximum number of servers of an upstream proxy: all are tried for one connection.
pub const SERVERS_MAX: usize = 16;
/// Maximum number of proxies in a chain: each adds its round trips.
pub const CHAIN_MAX: usize = 4;
/// Maximum length in bytes of a user name and of a password (RFC 1929, section 2).
const CREDENTIAL_MAX: usize = 255;

/// An upstream proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upstream {
    /// Name of the table.
    pub name: String,
    /// What it speaks.
    pub protocol: UpstreamProtocol,
    /// One to [`SERVERS_MAX`] servers that are equivalent: they are tried in this order.
    pub servers: Vec<Target>,
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
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawUpstream {
    protocol: UpstreamProtocol,
    servers: Spanned<Many<Parsed<Target>>>,
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
    pub(super) fn upstreams(&self, raw: &RawUpstreams) -> Result<Vec<Arc<Upstream>>, ConfigError> {
        raw.keys().map(|name| self.upstream(name, raw, 1)).collect()
    }

    /// `place`: in the chain, from the end at the client.
    fn upstream(&self, name: &str, all: &RawUpstreams, place: usize) -> Result<Arc<Upstream>, ConfigError> {
        let raw = all[name].get_ref();
        let servers: Vec<Target> = raw.servers.get_ref().0.iter().map(|server| server.0.clone()).collect();
        if !(1..=SERVERS_MAX).contains(&servers.len()) {
            let cure = format!("an upstream proxy has 1 to {SERVERS_MAX} servers: write \"HOST:PORT\" for each");
            return Err(self.wrong(raw.servers.span(), &cure));
        }
        let through = match &raw.through {
            None => None,
            Some(next) if !all.contains_key(next.get_ref()) => return Err(self.no_upstream(next)),
            Some(next) if place == CHAIN_MAX => {
                let cure = format!("a chain has at most {CHAIN_MAX} proxies, and must not come back: remove `through`");
                return Err(self.wrong(next.span(), &cure));
            }
            Some(next) => Some(self.upstream(next.get_ref(), all, place + 1)?),
        };
        Ok(Arc::new(Upstream {
            name: name.to_owned(),
            protocol: raw.protocol,
            servers,
            login: self.upstream_login(raw)?,
            direct: raw.direct.0.iter().map(|pattern| pattern.0.clone()).collect(),
            resolve: raw.resolve,
            through,
        }))
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

    fn no_upstream(&self, name: &Spanned<String>) -> ConfigError {
        let cure = format!("there is no upstream proxy \"{0}\": add [upstream.{0}]", name.get_ref());
        self.wrong(name.span(), &cure)
    }

    /// Leads the connections of a listener through the proxy of this name.
    pub(super) fn lead_through(
        &self,
        listener: &mut ListenerConfig,
        name: Option<Spanned<String>>,
        all: &[Arc<Upstream>],
    ) -> Result<(), ConfigError> {
        let Some(name) = name else { return Ok(()) };
        let upstream = all.iter().find(|u| u.name == *name.get_ref()).ok_or_else(|| self.no_upstream(&name))?;
        let names_addresses = |p: &Pattern| matches!(p, Pattern::Prefix(_));
        let is_site = listener.http().is_some_and(|http| !http.routes.is_empty());
        let cure = match &listener.protocol {
            Protocol::Ftp(_) => "data connections of FTP would not go through it: remove the key",
            Protocol::Transparent => {
                "both hosts shake hands with each other: remove the key, or use protocol = \"plug\""
            }
            Protocol::Plug { handshake: PlugHandshake::EndToEnd, .. } => {
                "both hosts shake hands with each other: remove the key, or the handshake"
            }
            Protocol::Socks5 { commands, .. } if !commands.only_connect() && *commands != Commands::default() => {
                "it is asked for connections only: remove the key, or all commands but \"connect\""
            }
            _ if is_site || listener.pools().next().is_some() => {
                "servers of pools and sites are not asked for through a proxy: remove the key"
            }
            _ if listener.handshake != TpotHandshake::Basic => {
                "servers are connected to on the client's SYN, which no proxy can be asked for: use handshake = \"basic\""
            }
            _ if listener.shows_clients => "servers see the upstream proxy: remove the key, or `source`",
            _ if upstream.resolve.is_none()
                && listener.rules.list().iter().any(|r| r.target.iter().any(names_addresses)) =>
            {
                "its rules name addresses, and it would look up names itself: add resolve = true to the upstream proxy, \
                 so that names are looked up here, or resolve = false if rules need not know the addresses of names"
            }
            _ => {
                if let Protocol::Socks5 { commands, .. } = &mut listener.protocol {
                    commands.served = vec![Command::Connect];
                }
                listener.upstream = Some(upstream.clone());
                return Ok(());
            }
        };
        Err(self.wrong(name.span(), cure))
    }
}

impl ListenerConfig {
    /// Returns the address by which rules judge a connection to `server`. `None` if an upstream proxy has looked up the name.
    pub fn judged(&self, target: &Target, server: SocketAddr) -> Option<SocketAddr> {
        match (&self.upstream, &target.host) {
            (Some(upstream), host) if upstream.leads_to(target, None) => match host {
                Host::Ip(ip) => Some(SocketAddr::new(*ip, target.port)),
                Host::Name(_) => None,
            },
            _ => Some(server),
        }
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
        let listener = &config.listeners[0];
        let up = listener.upstream.as_ref().unwrap();
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
            let server = "192.0.2.1:1".parse().unwrap();
            let want = if goes { target.host.ip().map(|ip| (ip, 1).into()) } else { Some(server) };
            assert_eq!(listener.judged(&target, server), want, "{target}");
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
