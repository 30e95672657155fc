//! What the proxy is to do: from a TOML file ([`Config::from_file`]), from the command line ([`Config::from_args`]),
//! or from both. Every error names the place and the cure.
//!
//! docs/configuration.md is the reference of the file: every table and every key, with defaults and examples. A test compares it
//! with the types in here, so a new key has to be described there.

mod cache;
mod file;
mod filter;
pub mod pool;
mod route;
mod site;
mod source;
mod table;
pub mod tls;
mod value;

use crate::{
    access::Rules,
    access_log::LogConfig,
    cache::CacheConfig,
    filter::Filter,
    limits::Limits,
    plug::{self, Plug},
    proxy_protocol::ProxyProtocol,
    routes::Route,
    target::Target,
    users::Users,
};
use longsplice_engine::{OpenError, OpenOptions, Policy, SpliceWhen};
pub use longsplice_http::forward::Forwarded;
use pool::PoolConfig;
use serde::Deserialize;
use std::{
    fmt, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};
use tls::Tls;

/// What the program is told. Everything the proxy itself does not use is for the program around it.
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// Where to listen for what.
    pub listeners: Vec<ListenerConfig>,
    /// Servers that stand for one another, by whose names routes lead to them.
    pub pools: Vec<PoolConfig>,
    /// Connections of all listeners together; none: [`CONNECTIONS`](crate::limits::CONNECTIONS).
    pub connections: Option<u32>,
    /// The access log.
    pub log: LogConfig,
    /// What to do without the data path.
    pub splice: Splicing,
    /// Options of the engine: devices, tables, and local addresses and ports of connections to servers.
    pub engine: OpenOptions,
    /// Path of the control socket.
    pub control: Option<PathBuf>,
    /// Let spliced flows run on when the program stops.
    pub leave_flows_on_stop: bool,
}

/// What to do if the data path cannot be had.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Splicing {
    /// Copy, unless a device was named that cannot be used: that is a mistake of whoever named it.
    #[default]
    #[serde(skip)]
    AsNamed,
    /// Copy, whatever is in the way.
    IfPossible,
    /// Do not start.
    Required,
}

impl Splicing {
    /// Whether this ends the start.
    pub fn is_fatal(self, error: &OpenError) -> bool {
        match self {
            Splicing::AsNamed => error.is_mistake(),
            Splicing::IfPossible => false,
            Splicing::Required => true,
        }
    }
}

/// One listening address.
#[derive(Debug, Clone)]
pub struct ListenerConfig {
    /// Where to listen.
    pub listen: SocketAddr,
    /// What to speak there.
    pub protocol: Protocol,
    /// Who may go where.
    pub rules: Rules,
    /// When to splice.
    pub policy: Policy,
    /// How much and how long.
    pub limits: Limits,
    /// What proxies before us, and we, say of the client.
    pub proxy_protocol: ProxyProtocol,
    /// The directory for a copy of all that clients send and are sent; none: nothing is copied.
    pub tap: Option<PathBuf>,
}

/// What a listener speaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Protocol {
    /// SOCKS 5, and 4 and 4a if there are no users.
    Socks5 {
        /// Who may use it; empty for everybody.
        users: Users,
    },
    /// HTTP/1.0 and 1.1, as a forward proxy (CONNECT, and requests in absolute-form) or as a reverse proxy.
    Http(Http),
    /// TLS, to where the name asked for leads.
    Tls(Tls),
    /// Everything goes to one target.
    Plug {
        /// The target.
        target: Target,
    },
    /// Connections of others, to where they go anyway.
    Transparent,
}

/// What a listener of HTTP is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Http {
    /// Who may use it; empty for everybody.
    pub users: Users,
    /// Our name in `Via`; none: no `Via` (RFC 9110, 7.6.3, asks for it).
    pub via: Option<String>,
    /// What servers are told of the client.
    pub forwarded: Forwarded,
    /// Bodies with so many bytes to come are spliced, where the policy is to splice after some.
    pub bodies: u64,
    /// Where requests go, if it stands for servers (a reverse proxy); empty for a forward proxy.
    pub routes: Vec<Route>,
    /// What servers may reply.
    pub filter: Arc<Filter>,
    /// Servers are asked for bodies that are not compressed, so that the filter can read them.
    pub identity: bool,
    /// Replies that break a rule are answered with 502, also where everybody understands them.
    pub strict_replies: bool,
    /// Where replies are stored; none: nowhere.
    pub cache: Option<CacheConfig>,
}

impl Http {
    /// From so many bytes on a body is spliced: nowhere does that take longer than copying it, by the figures in bench/results
    /// (`longsplice-bench http`). At 512 KB it took an eighth and a fifth more, at 1 MB as long, and a fifth less.
    pub const BODY_PAYS_FROM: u64 = 1024 * 1024;
}

impl Default for Http {
    fn default() -> Http {
        Http {
            users: Users::default(),
            via: Some("longsplice".into()),
            forwarded: Forwarded::None,
            bodies: Http::BODY_PAYS_FROM,
            routes: Vec::new(),
            filter: Arc::default(),
            identity: false,
            strict_replies: false,
            cache: None,
        }
    }
}

impl Protocol {
    /// The word for logs and lists.
    pub fn name(&self) -> &'static str {
        match self {
            Protocol::Socks5 { .. } => "socks5",
            Protocol::Http(_) => "http",
            Protocol::Tls(_) => "tls",
            Protocol::Plug { .. } => "plug",
            Protocol::Transparent => "transparent",
        }
    }
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Something in a file is wrong.
    #[error("{}:{line}:{column}: {message}", file.display())]
    Wrong {
        /// The file.
        file: PathBuf,
        /// Its line, from 1.
        line: usize,
        /// The character in the line, from 1.
        column: usize,
        /// What is wrong and what to write instead.
        message: String,
    },
    /// Something on the command line is wrong.
    #[error("{option} {value}: {message}")]
    Argument {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
        /// What is wrong and what to write instead.
        message: String,
    },
}

impl ListenerConfig {
    /// A listener with the defaults of its protocol.
    pub fn new(listen: SocketAddr, protocol: Protocol) -> ListenerConfig {
        // A client of SOCKS, of a forward proxy or of TLS chooses its target; others were chosen by whoever wrote the
        // configuration.
        let guarded = match &protocol {
            Protocol::Socks5 { .. } => true,
            Protocol::Http(http) => http.routes.is_empty(),
            Protocol::Tls(tls) => tls.forwards(),
            Protocol::Plug { .. } | Protocol::Transparent => false,
        };
        ListenerConfig {
            listen,
            protocol,
            rules: Rules::new(Vec::new(), guarded),
            policy: Policy::default(),
            limits: Limits::default(),
            proxy_protocol: ProxyProtocol::default(),
            tap: None,
        }
    }

    /// Where it stores replies, if it does.
    pub fn cache(&self) -> Option<&CacheConfig> {
        match &self.protocol {
            Protocol::Http(http) => http.cache.as_ref(),
            Protocol::Socks5 { .. } | Protocol::Tls(_) | Protocol::Plug { .. } | Protocol::Transparent => None,
        }
    }

    /// The policy for bodies of HTTP messages, which are spliced one by one.
    pub(crate) fn policy_of_bodies(&self) -> Policy {
        let when = match (&self.protocol, self.policy.when) {
            (Protocol::Http(http), SpliceWhen::AfterBytes(n)) => SpliceWhen::AfterBytes(n.max(http.bodies)),
            (_, when) => when,
        };
        // counted with the request that they belong to
        Policy { when, tally: Arc::default(), ..self.policy.clone() }
    }
}

impl Config {
    /// Reads a TOML file, and the users files it names.
    pub fn from_file(file: &Path) -> Result<Config, ConfigError> {
        let read = |source| ConfigError::Read { file: file.into(), source };
        let text = std::fs::read_to_string(file).map_err(read)?;
        Config::from_toml(&text, file)
    }

    /// Reads TOML; `file` is its name in errors and the place that relative paths start at.
    pub fn from_toml(text: &str, file: &Path) -> Result<Config, ConfigError> {
        file::read(text, file)
    }

    /// The listeners of the command line: values of `--socks5 ADDR:PORT`, `--http ADDR:PORT`, `--tls ADDR:PORT` and
    /// `--plug ADDR:PORT=HOST:PORT`.
    pub fn from_args<S: AsRef<str>>(socks5: &[S], http: &[S], tls: &[S], plugs: &[S]) -> Result<Config, ConfigError> {
        let mut config = Config::default();
        config.add_args(socks5, http, tls, plugs)?;
        Ok(config)
    }

    /// Adds the listeners of the command line to those that are there.
    pub fn add_args<S: AsRef<str>>(
        &mut self,
        socks5: &[S],
        http: &[S],
        tls: &[S],
        plugs: &[S],
    ) -> Result<(), ConfigError> {
        for value in socks5.iter().map(AsRef::as_ref) {
            let listen = plug::parse_listen(value).map_err(|e| wrong_argument("--socks5", value, &e))?;
            let socks5 = Protocol::Socks5 { users: Users::default() };
            self.add("--socks5", value, ListenerConfig::new(listen, socks5))?;
        }
        for value in http.iter().map(AsRef::as_ref) {
            let listen = plug::parse_listen(value).map_err(|e| wrong_argument("--http", value, &e))?;
            self.add("--http", value, ListenerConfig::new(listen, Protocol::Http(Http::default())))?;
        }
        for value in tls.iter().map(AsRef::as_ref) {
            let listen = plug::parse_listen(value).map_err(|e| wrong_argument("--tls", value, &e))?;
            self.add("--tls", value, ListenerConfig::new(listen, Protocol::Tls(Tls::default())))?;
        }
        for value in plugs.iter().map(AsRef::as_ref) {
            let plug: Plug = value.parse().map_err(|e| wrong_argument("--plug", value, &e))?;
            let protocol = Protocol::Plug { target: plug.target };
            self.add("--plug", value, ListenerConfig::new(plug.listen, protocol))?;
        }
        Ok(())
    }

    fn add(&mut self, option: &'static str, value: &str, listener: ListenerConfig) -> Result<(), ConfigError> {
        if self.listens_on(listener.listen) {
            return Err(wrong_argument(option, value, &Twice(listener.listen)));
        }
        self.listeners.push(listener);
        Ok(())
    }

    /// Port 0 is another port each time.
    fn listens_on(&self, addr: SocketAddr) -> bool {
        addr.port() != 0 && self.listeners.iter().any(|l| l.listen == addr)
    }
}

/// What is wrong with a listener whose address is taken by another.
struct Twice(SocketAddr);

impl fmt::Display for Twice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "another listener has {} already: remove one or change its address", self.0)
    }
}

fn wrong_argument(option: &'static str, value: &str, e: &dyn fmt::Display) -> ConfigError {
    ConfigError::Argument { option, value: value.into(), message: e.to_string() }
}

#[cfg(test)]
mod tests;
