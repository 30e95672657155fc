//! Configuration of the proxy: from a TOML file ([`Config::from_file`]), from the command line
//! ([`Config::from_args`]), or from both. Every error names the place of the mistake and how to correct it.
//!
//! docs/configuration.md is the reference of the file, with every table and key, defaults and
//! examples. A test compares it with the types in this module, so a new key has to be described there.

mod admin;
mod asking;
mod cache;
mod control;
mod fields;
mod file;
mod filter;
pub mod ftp;
mod handshake;
mod intercepting;
mod lead;
mod log;
pub mod login;
mod pages;
pub mod plug;
pub mod pool;
mod rewrite;
mod route;
mod site;
mod socks;
mod source;
mod table;
pub mod tls;
mod trigger;
pub mod upstream;
mod value;
mod way;

use crate::{
    access::{Rule, Rules, Upstream, Way},
    commands::Commands,
    fields::FieldChanges,
    filter::Filter,
    first_bytes::FirstBytes,
    limits::Limits,
    log::access_log::{LogConfig, Record},
    pages::ErrorPages,
    proxy_protocol::ProxyProtocol,
    routes::Route,
    secrets::is_trusted,
    target::Target,
    triggers::Trigger,
    users::Users,
};
pub use admin::AdminConfig;
pub use asking::Asking;
pub use cache::CacheConfig;
pub use control::SocketAccess;
use ftp::Ftp;
use login::Login;
use longsplice_engine::{Leg, OpenError, OpenOptions, Policy, SpliceWhen, TpotHandshake, TpotWhose};
use longsplice_http::accept::Codings;
pub use longsplice_http::forward::Forwarded;
use plug::Plug;
use pool::{LeadTo, PoolConfig};
use serde::Deserialize;
use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    io::{self, Read},
    net::SocketAddr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    string::FromUtf8Error,
    sync::Arc,
};
use tls::Tls;
pub use way::{Asker, Came};

/// The configuration. The program around the proxy uses the fields that the proxy itself does not need.
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// Listening addresses and their protocols.
    pub listeners: Vec<ListenerConfig>,
    /// Pools of equivalent servers; routes refer to them by name.
    pub pools: Vec<PoolConfig>,
    /// Proxies through which connections go on; listeners refer to them by name.
    pub upstreams: Vec<Arc<Upstream>>,
    /// Limit of connections on all listeners together; none: [`CONNECTIONS`](crate::limits::CONNECTIONS).
    pub connections: Option<u32>,
    /// The access log.
    pub log: LogConfig,
    /// Behaviour without the data path.
    pub splice: Splicing,
    /// Options of the engine: devices, tables, and local addresses and ports of connections to servers.
    pub engine: OpenOptions,
    /// Which connections to servers ask for a translucent proxy; none: none do.
    pub tpot: Option<Asking>,
    /// Path of the control socket.
    pub control: Option<PathBuf>,
    /// Who may open this socket, and the next one.
    pub control_access: SocketAccess,
    /// Path of the socket that speaks as HAProxy's; none: there is none.
    pub haproxy: Option<PathBuf>,
    /// Where metrics are served; none: nowhere.
    pub admin: Option<AdminConfig>,
    /// Whether spliced flows continue when the program stops.
    pub leave_flows_on_stop: bool,
    /// Groups of users by name, for rules.
    pub groups: BTreeMap<String, Vec<String>>,
    /// Whether each reload judges live connections again.
    pub enforce: bool,
    /// Whether the file holds passwords that are not hashes.
    has_passwords: bool,
    /// What works but is hardly meant, each with its place.
    pub warnings: Vec<String>,
    /// Where the values stand that are tried at the start.
    pub places: Places,
}

/// Where values stand in the file.
#[derive(Debug, Clone, Default)]
pub struct Places(Vec<(String, String)>);

impl Places {
    /// Returns the place of a value for the beginning of a message: `FILE:LINE:COLUMN: `, or nothing if it is not in the file.
    pub fn of(&self, value: impl fmt::Display) -> String {
        let value = value.to_string();
        let place = self.0.iter().find(|(known, _)| *known == value);
        place.map_or_else(String::new, |(_, place)| format!("{place}: "))
    }

    /// Returns what stands for a key at the top level.
    pub fn key(key: &str) -> String {
        format!("the key {key}")
    }

    fn add(&mut self, value: impl fmt::Display, place: String) {
        self.0.push((value.to_string(), place));
    }
}

/// Behaviour if the data path is not available.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Splicing {
    /// Copy, unless a device was named that cannot be used: that is a mistake in the configuration.
    #[default]
    #[serde(skip)]
    AsNamed,
    /// Copy, whatever the reason.
    IfPossible,
    /// Refuse to start.
    Required,
}

impl Splicing {
    /// Whether this error prevents the start.
    pub fn is_fatal(self, error: &OpenError) -> bool {
        match self {
            Splicing::AsNamed => error.is_mistake(),
            Splicing::IfPossible => false,
            Splicing::Required => true,
        }
    }
}

/// From when on the data path knows the connections of a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tracking {
    Never,
    /// It adopts them when a splice is due.
    WhenDue,
    FromSyn,
}

/// One listening address.
#[derive(Debug, Clone)]
pub struct ListenerConfig {
    /// Name, which no other listener has: by default, PROTOCOL-ADDRESS.
    pub name: Arc<str>,
    /// Listening address.
    pub listen: SocketAddr,
    /// Protocol of the clients.
    pub protocol: Protocol,
    /// Whose connections it intercepts that are routed through this machine, instead of listening: those of hosts that ask for a
    /// proxy (TPOT), or of all. They go to the server that the client wants, unless the configuration leads them elsewhere.
    pub intercepts: Option<TpotWhose>,
    /// Servers see the client's address.
    pub shows_clients: bool,
    /// When the servers of intercepted connections are connected to.
    pub handshake: TpotHandshake,
    /// Access rules.
    pub rules: Rules,
    /// When to splice, and for how long idle flows are kept.
    pub policy: Policy,
    /// Limits on connections and time.
    pub limits: Limits,
    /// PROXY headers that are accepted from proxies in front of us and sent to servers.
    pub proxy_protocol: ProxyProtocol,
    /// The proxy through which connections to targets go.
    pub upstream: Option<Arc<Upstream>>,
    /// Conditions on the first bytes, for protocols that are relayed as bytes.
    pub first_bytes: FirstBytes,
    /// Directory for copies of everything that clients send and receive; none: no copies.
    pub tap: Option<PathBuf>,
    /// What happens to its connections, and when. The policy has that by data, too.
    pub triggers: Arc<[Trigger]>,
}

/// Protocol of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Protocol {
    /// SOCKS 5; also 4 and 4a if there are no users.
    Socks5 {
        /// Users with access; empty: everybody.
        users: Users,
        /// What is served.
        commands: Commands,
    },
    /// HTTP/1.0 and 1.1, as a forward proxy (CONNECT, and requests in absolute-form) or as a reverse proxy.
    Http(Http),
    /// TLS, routed by the requested server name.
    Tls(Tls),
    /// FTP, with its data connections.
    Ftp(Ftp),
    /// A conversation that asks who the client is and where it wants to go.
    Login(Login),
    /// One target or pool for all clients.
    Plug {
        /// Where they are led to; none: the server that the client wants, of intercepted connections.
        target: Option<LeadTo>,
        /// Who answers the client's SYN.
        handshake: PlugHandshake,
    },
    /// Connections that are routed through this machine, to their original destination.
    Transparent,
    /// Bytes of intercepted connections ([`ListenerConfig::intercepts`]).
    Tpot,
}

/// Who answers the SYN of a plug's client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PlugHandshake {
    /// The proxy, which then connects to the target.
    #[default]
    Proxy,
    /// The target, if it has the client's address family and the data path is there; otherwise the proxy.
    EndToEnd,
}

/// Configuration of an HTTP listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Http {
    /// Users with access; empty: everybody.
    pub users: Users,
    /// Our name in `Via`; none: no `Via`, which RFC 9110, 7.6.3, requires.
    pub via: Option<String>,
    /// How servers learn the client's address.
    pub forwarded: Forwarded,
    /// Minimum number of remaining bytes for a body to be spliced, if the policy splices after a number of bytes.
    pub bodies: u64,
    /// Routes of a reverse proxy; empty: forward proxy.
    pub routes: Vec<Route>,
    /// Changes of fields in requests and replies.
    pub fields: Arc<FieldChanges>,
    /// Filter for replies.
    pub filter: Arc<Filter>,
    /// The codings that servers are asked for, so that the filter can read bodies.
    pub codings: Codings,
    /// Answer with 502 to all replies that break a rule, even if they have a single meaning.
    pub strict_replies: bool,
    /// Pages for errors.
    pub error_pages: Arc<ErrorPages>,
    /// Cache of replies; none: no cache.
    pub cache: Option<CacheConfig>,
}

impl Http {
    /// Body size in bytes from which splicing takes less time than copying: 0.85 times as long, and 1.13 times with 256 KB
    /// (docs/bench.md).
    pub const BODY_PAYS_FROM: u64 = 512 * 1024;
}

impl Default for Http {
    fn default() -> Http {
        Http {
            users: Users::default(),
            via: Some("longsplice".into()),
            forwarded: Forwarded::None,
            bodies: Http::BODY_PAYS_FROM,
            routes: Vec::new(),
            fields: Arc::default(),
            filter: Arc::default(),
            codings: Codings::Any,
            strict_replies: false,
            error_pages: Arc::default(),
            cache: None,
        }
    }
}

/// What a protocol is to the code that serves all of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Traits {
    /// Name for logs and lists.
    pub name: &'static str,
    /// Clients choose their target, so special ranges of addresses are guarded. Other targets come from the configuration.
    pub guarded: bool,
    /// The proxy has a listening socket for it.
    pub binds: bool,
    /// Nothing has to be read from a client before a splice.
    pub unread: bool,
    /// A client speaks first, and is read by a handshake before a relay.
    pub listens: bool,
    /// A client whose connection fails has been sent the reason, and gets time to read it. Others believe that they are connected
    /// to the target, so they get a reset, as the target would send.
    pub answers: bool,
    /// A row of the program's table of services has it.
    pub is_service: bool,
}

impl Protocol {
    /// Returns what the protocol is. Besides this, a new one needs a step in `handshake()` of connection.rs.
    pub(crate) fn traits(&self) -> Traits {
        let of = |name| {
            let (guarded, binds, unread, listens, answers, is_service) = (false, true, false, false, false, false);
            Traits { name, guarded, binds, unread, listens, answers, is_service }
        };
        match self {
            Protocol::Socks5 { .. } => Traits { guarded: true, listens: true, answers: true, ..of("socks5") },
            Protocol::Http(http) => {
                Traits { guarded: http.routes.is_empty(), answers: true, is_service: true, ..of("http") }
            }
            Protocol::Tls(tls) => Traits { guarded: tls.forwards(), listens: true, answers: true, ..of("tls") },
            Protocol::Ftp(ftp) => {
                Traits { guarded: ftp.target.is_none(), answers: true, is_service: true, ..of("ftp") }
            }
            Protocol::Login(login) => Traits { guarded: login.free, answers: true, ..of("login") },
            Protocol::Plug { target, .. } => Traits { guarded: target.is_none(), unread: true, ..of("plug") },
            Protocol::Transparent => Traits { binds: false, ..of("transparent") },
            Protocol::Tpot => Traits { guarded: true, binds: false, unread: true, ..of("tpot") },
        }
    }

    /// Returns the name for logs and lists.
    pub fn name(&self) -> &'static str {
        self.traits().name
    }

    /// Returns such a name for good; that of flows of which little is known if it is none.
    pub(crate) fn name_of(name: &str) -> &'static str {
        let known = ["socks5", "http", "tls", "ftp", "login", "plug", "transparent", "tpot"];
        known.into_iter().find(|known| *known == name).unwrap_or("recovered")
    }

    /// Returns the users of the listener, if its clients can log in.
    pub(crate) fn users(&self) -> Option<&Users> {
        match self {
            Protocol::Socks5 { users, .. } => Some(users),
            Protocol::Http(http) => Some(&http.users),
            Protocol::Ftp(ftp) => Some(&ftp.users),
            Protocol::Login(login) => Some(&login.users),
            Protocol::Tls(_) | Protocol::Plug { .. } | Protocol::Transparent | Protocol::Tpot => None,
        }
    }

    /// Returns these users, and those of routes.
    pub(crate) fn all_users(&self) -> impl Iterator<Item = &Users> {
        let routes = if let Protocol::Http(http) = self { &http.routes[..] } else { &[] };
        self.users().into_iter().chain(routes.iter().map(|route| &route.users))
    }

    /// Lets users take their place behind those of the configuration before, if the listener was there.
    pub(crate) fn follow(&mut self, before: Option<&Protocol>) {
        let known = before.and_then(Protocol::users);
        match self {
            Protocol::Socks5 { users, .. } => users.follow(known),
            Protocol::Ftp(ftp) => ftp.users.follow(known),
            Protocol::Login(login) => {
                login.users.follow(known);
                if let Some(Protocol::Login(old)) = before
                    && login.max_failures == old.max_failures
                {
                    login.failures = old.failures.clone();
                }
            }
            Protocol::Http(http) => {
                http.users.follow(known);
                let old = if let Some(Protocol::Http(old)) = before { &old.routes[..] } else { &[] };
                for route in &mut http.routes {
                    let same = old.iter().find(|old| old.hosts == route.hosts && old.path == route.path);
                    route.users.follow(same.map(|old| &old.users));
                }
            }
            Protocol::Tls(_) | Protocol::Plug { .. } | Protocol::Transparent | Protocol::Tpot => {}
        }
    }
}

fn default_name(protocol: &Protocol, listen: SocketAddr) -> String {
    format!("{}-{listen}", protocol.name())
}

/// Error in the configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A file contains a mistake.
    #[error("{}:{line}:{column}: {message}", file.display())]
    Wrong {
        /// The file.
        file: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Character in the line, from 1.
        column: usize,
        /// The mistake, and what to write instead.
        message: String,
    },
    /// The command line contains a mistake.
    #[error("{option} {value}: {message}")]
    Argument {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
        /// The mistake, and what to write instead.
        message: String,
    },
}

impl ListenerConfig {
    /// Returns a listener with the defaults of its protocol.
    pub fn new(listen: SocketAddr, protocol: Protocol) -> ListenerConfig {
        let rules = Rules::new(Vec::new(), protocol.traits().guarded);
        let intercepts = (protocol == Protocol::Tpot).then_some(TpotWhose::Askers);
        ListenerConfig {
            name: default_name(&protocol, listen).into(),
            listen,
            intercepts,
            shows_clients: false,
            handshake: TpotHandshake::Basic,
            protocol,
            rules: if intercepts.is_some() { rules.for_intercepted() } else { rules },
            policy: Policy::default(),
            limits: Limits::default(),
            proxy_protocol: ProxyProtocol::default(),
            upstream: None,
            first_bytes: FirstBytes::default(),
            tap: None,
            triggers: Arc::default(),
        }
    }

    fn default_name(&self) -> String {
        default_name(&self.protocol, self.listen)
    }

    /// Returns the record of a connection to it, for the access log.
    pub fn record(&self, client: SocketAddr) -> Record {
        let mut record = Record::new(self.protocol.name(), self.listen, client);
        record.name = Some(self.name.clone());
        record
    }

    /// Returns the names of the pools that it leads to.
    pub(crate) fn pools(&self) -> impl Iterator<Item = &str> {
        let of_http = self.http().into_iter().flat_map(|http| &http.routes).filter_map(Route::pool);
        let of_tls = self.tls_routes().iter().filter_map(|route| route.target.as_ref()?.pool());
        of_http.chain(of_tls).chain(self.fixed_pool())
    }

    /// Returns the names of the pools to which rules lead.
    pub(crate) fn rule_pools(&self) -> impl Iterator<Item = &str> {
        fn pool(rule: &Rule) -> Option<&str> {
            if let Some(Way::Pool(pool)) = &rule.way { Some(pool) } else { None }
        }
        self.rules.list().iter().filter_map(pool)
    }

    /// Returns the name of the pool of all clients, if there is just one.
    pub(crate) fn fixed_pool(&self) -> Option<&str> {
        self.lead_to()?.pool()
    }

    /// Returns where all clients are led to, if the configuration says so.
    fn lead_to(&self) -> Option<&LeadTo> {
        match &self.protocol {
            Protocol::Plug { target, .. } => target.as_ref(),
            Protocol::Ftp(ftp) => ftp.target.as_ref(),
            _ => None,
        }
    }

    /// Whether all clients are led where the configuration says, whatever server they want.
    pub(crate) fn leads_all(&self) -> bool {
        self.fixed_target().is_some() || self.fixed_pool().is_some()
    }

    fn tls_routes(&self) -> &[tls::Route] {
        if let Protocol::Tls(tls) = &self.protocol { &tls.routes } else { &[] }
    }

    /// Returns the directories of its taps, of all connections or of some.
    pub fn tap_dirs(&self) -> impl Iterator<Item = &PathBuf> {
        self.tap.iter().chain(self.triggers.iter().filter_map(Trigger::tap_dir))
    }

    /// Returns whether it has a listening socket.
    pub fn binds(&self) -> bool {
        self.protocol.traits().binds && self.intercepts.is_none()
    }

    /// Returns the target with which clients shake hands themselves, if they do.
    pub(crate) fn end_to_end(&self) -> Option<&Target> {
        match &self.protocol {
            Protocol::Plug { target, handshake: PlugHandshake::EndToEnd } => target.as_ref()?.target(),
            _ => None,
        }
    }

    /// Returns from when on the data path knows the connections. Where one leads to others, records from the handshake on are
    /// better.
    pub(crate) fn tracking(&self) -> Tracking {
        let can_adopt = matches!(
            self.protocol,
            Protocol::Socks5 { .. } | Protocol::Http(_) | Protocol::Tls(_) | Protocol::Login(_) | Protocol::Plug { .. }
        );
        match self.policy.when {
            _ if !self.binds() || self.end_to_end().is_some() || self.shows_clients => Tracking::FromSyn,
            SpliceWhen::Never => Tracking::Never,
            when if can_adopt && when.threshold().is_some_and(|n| n > 0) => Tracking::WhenDue,
            _ => Tracking::FromSyn,
        }
    }

    /// Returns whether clients and servers shake hands with each other. That needs raw sockets.
    pub fn is_between_hosts(&self) -> bool {
        self.protocol == Protocol::Transparent || self.end_to_end().is_some()
    }

    /// Returns the target of all clients, if there is just one.
    pub fn fixed_target(&self) -> Option<&Target> {
        self.lead_to()?.target()
    }

    /// Returns the address of the server that the client wants, if that is where its connection goes.
    pub(crate) fn wanted(&self, client: &Leg) -> Option<SocketAddr> {
        self.has_wanted().then(|| client.local())
    }

    /// Whether all clients want a server by its address, whatever name they ask for.
    pub(crate) fn has_wanted(&self) -> bool {
        self.intercepts.is_some() && !self.leads_all()
    }

    /// Returns what FTP needs, if the listener reads it.
    pub(crate) fn ftp(&self) -> Option<&Ftp> {
        if let Protocol::Ftp(ftp) = &self.protocol { Some(ftp) } else { None }
    }

    /// Returns the targets that the configuration names, without those of pools.
    pub(crate) fn targets(&self) -> impl Iterator<Item = &Target> {
        let named = if let Protocol::Login(login) = &self.protocol { &login.destinations[..] } else { &[] };
        let of_routes = self.tls_routes().iter().filter_map(|route| route.target.as_ref()?.target());
        self.fixed_target().into_iter().chain(of_routes).chain(named.iter().map(|destination| &destination.target))
    }

    /// Returns whether the data path copies what passes, for taps or a cache.
    pub fn copies(&self) -> bool {
        self.tap_dirs().next().is_some() || self.cache().is_some()
    }

    /// Returns whether the data path holds segments.
    pub fn holds(&self) -> bool {
        self.policy.hold || self.holds_first_data()
    }

    /// Returns whether the first data of connections is held until they are spliced: their hosts shake hands with each other,
    /// and they are spliced at once.
    pub fn holds_first_data(&self) -> bool {
        self.is_between_hosts() && self.policy.when == SpliceWhen::AtOnce && self.policy.trigger.is_none()
    }

    /// Returns whether connections may be spliced before anything is read from their clients.
    pub(crate) fn splices_unread(&self) -> bool {
        self.protocol.traits().unread && self.policy.when == SpliceWhen::AtOnce && self.first_bytes.is_empty()
    }

    /// Returns what SOCKS serves, if the listener speaks it.
    pub(crate) fn socks(&self) -> Option<&Commands> {
        if let Protocol::Socks5 { commands, .. } = &self.protocol { Some(commands) } else { None }
    }

    /// Returns what HTTP needs, if the listener reads it.
    pub fn http(&self) -> Option<&Http> {
        if let Protocol::Http(http) = &self.protocol { Some(http) } else { None }
    }

    /// Returns the configuration of the cache, if the listener has one.
    pub fn cache(&self) -> Option<&CacheConfig> {
        self.http()?.cache.as_ref()
    }

    /// Returns the policy for bodies of HTTP messages, which are spliced one by one, and for data connections of FTP.
    pub(crate) fn policy_of_bodies(&self) -> Policy {
        if self.ftp().is_some() {
            // Both hosts wait for these connections to be made: no byte has to pass before a splice.
            let at_once = self.policy.when == Policy::default().when;
            let when = if at_once { SpliceWhen::AtOnce } else { self.policy.when };
            return Policy { when, ..self.policy.clone() };
        }
        let when = match (self.http(), self.policy.when.threshold()) {
            (Some(http), Some(n)) => SpliceWhen::AfterBytes(n.max(http.bodies)),
            _ => self.policy.when,
        };
        // bodies count with their request, and each is taken back at its end
        Policy { when, trigger: None, tally: Arc::default(), ..self.policy.clone() }
    }
}

impl Config {
    /// Reads a TOML file and the users files it names.
    pub fn from_file(file: &Path) -> Result<Config, ConfigError> {
        let read = |source| ConfigError::Read { file: file.into(), source };
        let mut open = File::open(file).map_err(read)?;
        let of = open.metadata().map_err(read)?;
        let mut bytes = Vec::new();
        open.read_to_end(&mut bytes).map_err(read)?;
        let text = String::from_utf8(bytes).map_err(|e| not_utf8(&e, file))?;
        let mut config = Config::from_toml(&text, file)?;
        if config.has_passwords {
            let name = file.display();
            if of.mode() & 0o077 != 0 {
                config.warnings.push(format!("{name} holds passwords, and others may read or write it: chmod 600 it"));
            }
            if !is_trusted(of.uid()) {
                config.warnings.push(format!("{name} holds passwords, and belongs to another user: chown it"));
            }
        }
        Ok(config)
    }

    /// Reads TOML. `file` is its name in errors; relative paths start at its directory.
    pub fn from_toml(text: &str, file: &Path) -> Result<Config, ConfigError> {
        file::read(text, file)
    }

    /// Returns the listeners of the command line: values of `--socks5 ADDR:PORT`, `--http ADDR:PORT`,
    /// `--tls ADDR:PORT` and `--plug ADDR:PORT=HOST:PORT`.
    pub fn from_args<S: AsRef<str>>(socks5: &[S], http: &[S], tls: &[S], plugs: &[S]) -> Result<Config, ConfigError> {
        let mut config = Config::default();
        config.add_args(socks5, http, tls, plugs)?;
        Ok(config)
    }

    /// Adds the listeners of the command line.
    pub fn add_args<S: AsRef<str>>(
        &mut self,
        socks5: &[S],
        http: &[S],
        tls: &[S],
        plugs: &[S],
    ) -> Result<(), ConfigError> {
        for value in socks5.iter().map(AsRef::as_ref) {
            let listen = plug::parse_listen(value).map_err(|e| wrong_argument("--socks5", value, &e))?;
            let socks5 = Protocol::Socks5 { users: Users::default(), commands: Commands::default() };
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
            let protocol =
                Protocol::Plug { target: Some(LeadTo::Target(plug.target)), handshake: PlugHandshake::default() };
            self.add("--plug", value, ListenerConfig::new(plug.listen, protocol))?;
        }
        Ok(())
    }

    fn add(&mut self, option: &'static str, value: &str, listener: ListenerConfig) -> Result<(), ConfigError> {
        if let Some(other) = self.collision(&listener) {
            return Err(wrong_argument(option, value, &Twice(other)));
        }
        self.push(listener).map_err(|name| wrong_argument(option, value, &TwiceNamed(name)))
    }

    /// Adds a listener, unless another one has its name. Those at port 0 without names of their own are numbered.
    fn push(&mut self, mut listener: ListenerConfig) -> Result<(), Arc<str>> {
        let name = listener.name.clone();
        let is_numbered = listener.listen.port() == 0 && *name == *listener.default_name();
        let mut number = 1;
        while self.listeners.iter().any(|l| l.name == listener.name) {
            if !is_numbered {
                return Err(name);
            }
            number += 1;
            listener.name = format!("{name}-{number}").into();
        }
        self.listeners.push(listener);
        Ok(())
    }

    /// Returns the address of the listener that would get the connections of a new one. All addresses of a host include each one,
    /// except for listeners without a socket. Port 0 never counts, because it is a different port each time.
    fn collision(&self, new: &ListenerConfig) -> Option<SocketAddr> {
        let (addr, binds) = (new.listen, new.binds());
        let includes = |l: &ListenerConfig| {
            let any = l.listen.ip().is_unspecified() || addr.ip().is_unspecified();
            l.listen == addr || (binds && l.binds() && any && l.listen.is_ipv4() == addr.is_ipv4())
        };
        let all = self.listeners.iter().filter(|l| l.listen.port() == addr.port() && addr.port() != 0);
        all.map(|l| includes(l).then_some(l.listen)).find(Option::is_some).flatten()
    }
}

/// Error message for a listener whose name another listener has.
struct TwiceNamed(Arc<str>);

impl fmt::Display for TwiceNamed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "another listener is called {} already: give one of them another name", self.0)
    }
}

/// Error message for a listener whose address is in use by another listener.
struct Twice(SocketAddr);

impl fmt::Display for Twice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "another listener has {} already: remove one, or change its address or port", self.0)
    }
}

fn not_utf8(e: &FromUtf8Error, file: &Path) -> ConfigError {
    let before = &e.as_bytes()[..e.utf8_error().valid_up_to()];
    let line_start = before.iter().rposition(|b| *b == b'\n').map_or(0, |i| i + 1);
    ConfigError::Wrong {
        file: file.into(),
        line: before.iter().filter(|b| **b == b'\n').count() + 1,
        column: String::from_utf8_lossy(&before[line_start..]).chars().count() + 1,
        message: "not UTF-8: save the file in this encoding".into(),
    }
}

fn wrong_argument(option: &'static str, value: &str, e: &dyn fmt::Display) -> ConfigError {
    ConfigError::Argument { option, value: value.into(), message: e.to_string() }
}

#[cfg(test)]
mod changes_tests;
#[cfg(test)]
mod judged_tests;
#[cfg(test)]
mod login_tests;
#[cfg(test)]
mod page_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod trigger_tests;
