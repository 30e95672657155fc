//! What the proxy is to do: from a TOML file ([`Config::from_file`]), from the command line ([`Config::from_args`]),
//! or from both. Every error names the place and the cure.
//!
//! # The file
//! Times are numbers of seconds, whole or not (`2.5`). Relative paths start at the directory of the file.
//! ```toml
//! devices = ["eth0", "eth1"]        # devices to splice on; all Ethernet devices if left out
//! splice = "required"               # no start unless the data path can be had. "if-possible": copies whatever is in the way. Left
//! # out: copies without the rights or the kernel for it; a device that cannot be used as it is named here is a mistake
//! xdp = ["eth0"]                    # those on which native XDP forwards what it can; none if left out
//! peer = ["veth0"]                  # those whose packets of spliced connections go straight to a veth's other end, in another
//! # network namespace: past queueing disciplines, nftables and tc programs, and captures
//! control = "/run/longsplice/control" # socket for `longsplice ls` and its like
//! source_ports = "10240-28671"      # ports of connections to servers
//! source = ["192.0.2.1", "192.0.2.2"] # own addresses to connect from, in turn: each has its own source_ports
//! leave_flows_on_stop = false       # let spliced flows run on in the kernel when the program stops
//! connections = 65536               # of all listeners together; left out: 65536, or --max-flows if more
//! log = { format = "json", file = "access.log" } # "text" is the default, and "-", standard output
//!
//! [[listener]]
//! protocol = "socks5"               # and SOCKS 4 and 4a, as long as there are no users
//! listen = "0.0.0.0:1080"
//! users = { ann = "secret" }        # RFC 1929: passwords cross the network in the clear; here, they may stand as a hash: of
//! users_file = "users"              # bcrypt ($2y$, `htpasswd -nB`), SHA-crypt ($5$, $6$, `openssl passwd -6`, up to 1000000
//! # rounds) or Argon2id (`argon2 SALT -id -e`, up to m=262144 KiB and m times t 1048576). Or in that file: lines NAME:PASSWORD
//! # or NAME:$HASH, # for comments; keep it readable to one user only: one that its group or others may write is refused
//! rules = [                         # the first that matches decides; without a match: allowed, except loopback,
//!   { action = "allow", target = ["10.0.0.0/8", "*.example.org"], ports = [443, "8000-8999"] }, # link-local and
//!   { action = "deny", client = "192.0.2.0/24" },                                    # the like, on SOCKS listeners
//! ]
//! limits = { handshake = 10, resolve = 5, connect = 10, connections_per_client = 1024, connections = 65536 } # the last
//! # left out: as many as all listeners may have
//! policy = { splice = 262144, path = "auto", hold = false, drain_limit = 10, release_after = 60, idle_limit = 7200, keepalive = 60 }
//! # splice: "never", "at-once", or after so many bytes; path: "auto" copies where a splice would slow a transfer down, "any" never;
//! # release_after: "never" keeps the sockets; idle_limit: a connection without a byte for so long is reset, copied or spliced;
//! # keepalive: while it is copied, a client or server that is silent for so long is asked whether it is there, and given up after
//! # as long again; left out, nobody is asked
//!
//! [[listener]]
//! protocol = "http"                 # CONNECT, and requests with absolute URLs
//! listen = "0.0.0.0:3128"           # users, rules, limits and policy as above
//! via = "longsplice"                # our name in Via; "": none
//! forwarded = "none"                # or "forwarded" or "x-forwarded-for": tells servers the client's address
//! strict_replies = false            # true: replies that break a rule are answered with 502, also where everybody understands them:
//! # lines that end with LF alone, folded, or with a space before the colon, a length said twice or beside chunks, and the like
//! limits = { reply = 300, keep_alive = 60 } # what a server may take to reply, and a client to its next request
//! rules = [                         # of HTTP listeners also by method and path. CONNECT has none: what passes through
//!   { action = "deny", methods = ["PUT", "DELETE"], path = ["/admin*", "/x"] }, # it is not looked at
//!   { action = "allow" },
//! ]
//!
//! [listener.filter]                 # of HTTP: what servers may reply. What is let through is spliced as ever
//! rules = [                         # the first that matches decides; without a match: allowed. What is denied is answered with
//!   { action = "deny", type = ["application/x-msdownload", "video/*"] }, # 403, or reset, if it was begun
//!   { action = "deny", status = "200-299", length = "100000001-" }, # bytes; of bodies without Content-Length as counted
//!   { action = "deny", body_begins = '^(MZ|\x7fELF)' }, # found in the first bytes: replies are held back until it is known
//!   { action = "deny", body_contains = '(?i)top secret' }, # found anywhere: such replies are copied to their end
//!   { action = "allow", encoding = "identity" }, # codings of Content-Encoding
//! ] # all that a rule names has to match. Expressions are those of https://docs.rs/regex, over bytes, without Unicode
//! first = 4096                      # so many bytes of a body are its first, up to 32768: they take memory
//! wait = 5                          # nothing is held back for longer; it is judged all the same, but then reset
//! accept_encoding = "identity"      # servers are asked for bodies as they are: rules see them as they are sent, compressed
//! # or in parts (206) too; "pass", the default, asks for what the client asks for
//!
//! [listener.cache]                  # of a forward proxy: replies that all clients may share (RFC 9111) are stored as they pass,
//! dir = "cache"                     # spliced or not, and served from there. One directory may serve several listeners
//! size = 1073741824                 # bytes on the disk; what was not used for the longest time makes room
//! object = 268435456                # bytes of the largest body that is stored; left out: a quarter of the size
//!
//! [[listener]]
//! protocol = "http"                 # with routes: a reverse proxy, several servers as one site. It asks for no passwords
//! listen = "0.0.0.0:80"
//! forwarded = "x-forwarded-for"     # then also X-Forwarded-Host and -Proto; "forwarded": host= and proto=
//! rules = [                         # here, targets and ports are those that are asked for
//!   { action = "deny", path = "/internal*" },
//! ]
//!
//! [[listener.route]]                # the first that matches decides; without a match: 404
//! host = ["www.example.org", "*.example.net"] # as targets of rules; left out: every host
//! path = "/api"                     # and what is below it; left out: every path. Paths are compared without query, %XX
//! pool = "api"                      # undone, case as it is; those with `..` are refused, if any route or rule has a path
//!
//! [[listener.route]]
//! path_regex = '\.(png|jpg)$'       # or path_exact = "/favicon.ico"
//! pool = "files"
//!
//! [pool.api]
//! servers = ["10.0.0.1:8080", { address = "10.0.0.2:8080", weight = 2 }] # weights from 1 to 256
//! balance = "round-robin"           # or "least-connections", or "consistent-hash": of the client's address
//! tries = 3                         # servers for one request at most; sent again only what is safe (RFC 9110, 9.2.2)
//! idle_connections = 32             # kept to each server at most
//! idle_time = 60                    # and for how long
//! failures = 3                      # requests in a row that take a server out
//! out = 10                          # for so long
//! check = { path = "/health", host = "api.example.org", interval = 5, timeout = 2, status = "200-399", rise = 2, fall = 3 }
//! # left out: servers are judged by requests alone. rise, fall: good and failed checks in a row until it is up, down
//!
//! [pool.files]
//! servers = ["files.example.org:80"]
//! balance = "consistent-hash"
//! hash_field = "X-User"             # a field of the request instead of the client's address, where there is one
//!
//! [[listener]]
//! protocol = "tls"                  # to the server that the ClientHello names, without decrypting anything
//! listen = "0.0.0.0:443"            # rules, limits and policy as above
//! port = 443                        # of servers that are only known by their names; left out: the port listened on
//!
//! [[listener.route]]                # the first that matches decides; without any: to the name asked for
//! name = ["example.org", "*.example.org"] # left out: any name, and, if there is a target, none
//! alpn = ["h2", "http/1.1"]         # the client offers one of these; left out: whatever it offers
//! target = "192.0.2.10:8443"        # left out: the name asked for; loopback and the like are then denied as for SOCKS
//!
//! [[listener]]
//! protocol = "plug"
//! listen = "[::1]:8080"
//! target = "example.org:80"
//! # of any protocol: connections from these networks begin with a PROXY header, whose source is the client for rules,
//! # limits, logs and lists; others are refused if it is required; servers are sent one of version 1 or 2, but not
//! # those of pools, whose connections clients share
//! proxy_protocol = { from = ["10.0.0.0/8"], required = true, send = "v2" }
//! tap = "taps"                      # of any protocol: a copy of all that clients send and are sent, spliced or not, goes into
//! # files in this directory, two for each connection; `longsplice run --help` says more
//!
//! [[listener]]
//! protocol = "transparent"          # takes part in connections of others that are routed through this machine: neither end
//! listen = "0.0.0.0:5432"           # sees it, and a client that the rules do not let pass gets no answer. 0.0.0.0 or [::]: to
//! # any address but our own. There is no PROXY header
//! ```

mod cache;
mod file;
mod filter;
mod route;
mod site;
mod tls;
mod value;

use crate::{
    access::{PortRange, Rules},
    access_log::LogConfig,
    cache::CacheConfig,
    filter::Filter,
    limits::Limits,
    plug::{self, Plug},
    pool::PoolConfig,
    proxy_protocol::ProxyProtocol,
    routes::Route,
    target::Target,
    tls::Tls,
    users::Users,
};
use longsplice_engine::{OpenError, Policy, When};
pub use longsplice_http::forward::Forwarded;
use serde::Deserialize;
use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
};

/// What the program is told. Everything the proxy itself does not use is for the program around it.
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// Where to listen for what.
    pub listeners: Vec<ListenerConfig>,
    /// Servers that stand for one another, by whose names routes lead to them.
    pub pools: Vec<PoolConfig>,
    /// Connections of all listeners together; none: [`CONNECTIONS`](crate::server::CONNECTIONS).
    pub connections: Option<u32>,
    /// The access log.
    pub log: LogConfig,
    /// What to do without the data path.
    pub splice: Splicing,
    /// Devices to splice on; empty for all.
    pub devices: Vec<String>,
    /// Devices to forward on by XDP as well.
    pub xdp: Vec<String>,
    /// Devices whose other end gets packets directly.
    pub peer: Vec<String>,
    /// Path of the control socket.
    pub control: Option<PathBuf>,
    /// Ports of connections to servers.
    pub source_ports: Option<PortRange>,
    /// Own addresses that connections to servers come from, in turn; empty: the one that the kernel chooses.
    pub sources: Vec<IpAddr>,
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
    /// (`longsplice bench http`). At 512 KB it took an eighth and a fifth more, at 1 MB as long, and a fifth less.
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
            (Protocol::Http(http), When::AfterBytes(n)) => When::AfterBytes(n.max(http.bodies)),
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
