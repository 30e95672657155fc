//! Why a server does not start, and what to do about it.

use crate::{config::Places, log::access_log::LogTarget};
use longsplice_engine::{OpenError, TPOT_RULES};
use std::{io, net::SocketAddr, path::PathBuf, sync::Arc};

/// Reason why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// There is no listener.
    #[error(
        "no listener: add a [[listener]] to the configuration, or --socks5, --http, --tls or --plug to the command line"
    )]
    NoListener,
    /// The program's table of services lacks the protocol of a listener.
    #[error("protocol {0}: this program does not serve it")]
    NotServed(&'static str),
    /// An address cannot be listened on.
    #[error("cannot listen on {addr}: {source}{}", cure(source, addr.port()))]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// Error of the system.
        source: io::Error,
    },
    /// Translucent proxying cannot be opened.
    #[error("cannot intercept connections (protocol = \"tpot\"): {0}")]
    Tpot(#[from] OpenError),
    /// There are too many rules of translucent proxying.
    #[error(
        "{0} rules of tpot, of which there is room for {TPOT_RULES}: each listener that intercepts is one, and so is every prefix of \
         `proxies`, and every prefix of `to` with every port"
    )]
    TooManyRules(usize),
    /// There are too many rules for connections of this machine.
    #[error("tpot: {0}; every prefix of proxies is a rule, and so is every prefix of `to` with every port")]
    Asking(io::Error),
    /// Packets would bypass the tunnels.
    #[error("packets that leave {0} by XDP or to a veth's peer would bypass the tunnels of tpot: remove xdp and peer")]
    Bypass(String),
    /// The access log cannot be opened.
    #[error("cannot open the access log {to}: {source}")]
    AccessLog {
        /// Destination of the log.
        to: LogTarget,
        /// Error of the system.
        source: io::Error,
    },
    /// A key has changed that is read at the start alone.
    #[error("`{0}` cannot change while the program runs: restart it, or write what it was started with")]
    Fixed(&'static str),
    /// A key of a listener, which is named, has changed that its socket cannot follow.
    #[error("listener {0}: `{2}` cannot change while it listens: restart the program, or let it listen elsewhere")]
    FixedOf(Arc<str>, SocketAddr, &'static str),
    /// A listener, which is named, needs what only a start can give: the key, and what it does.
    #[error("listener {0}: `{2}`: it {3}, and no listener did when the program was started: restart it")]
    NotPrepared(Arc<str>, SocketAddr, &'static str, &'static str),
    /// The program ends.
    #[error("the program is stopping")]
    Stopping,
    /// A value of the configuration file cannot be used.
    #[error("{place}{error}")]
    Placed {
        /// `FILE:LINE:COLUMN: `.
        place: String,
        /// The error.
        error: Box<StartError>,
    },
    /// Taps cannot be written.
    #[error("cannot write taps into {}: {source}; name a directory that can be written", dir.display())]
    Tap {
        /// The directory.
        dir: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A cache cannot be opened.
    #[error("cannot keep a cache in {}: {source}; name a directory that can be written, for this program alone", dir.display())]
    Cache {
        /// The directory.
        dir: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
}

impl StartError {
    /// Returns the value in the configuration that cannot be used.
    fn value(&self) -> Option<String> {
        match self {
            StartError::Fixed(key) => Some(Places::key(key)),
            StartError::Listen { addr, .. }
            | StartError::FixedOf(_, addr, _)
            | StartError::NotPrepared(_, addr, ..) => Some(addr.to_string()),
            StartError::AccessLog { to, .. } => Some(to.to_string()),
            StartError::Tap { dir, .. } | StartError::Cache { dir, .. } => Some(dir.display().to_string()),
            _ => None,
        }
    }

    /// Adds the place of the value in the file.
    pub(crate) fn at(self, places: &Places) -> StartError {
        match self.value().map(|value| places.of(value)) {
            Some(place) if !place.is_empty() => StartError::Placed { place, error: Box::new(self) },
            _ => self,
        }
    }
}

fn cure(e: &io::Error, port: u16) -> &'static str {
    match e.kind() {
        io::ErrorKind::AddrInUse => "; another program listens there: stop it or take another port",
        io::ErrorKind::AddrNotAvailable => "; no device of this host has the address",
        io::ErrorKind::PermissionDenied if (1..1024).contains(&port) => "; ports below 1024 need CAP_NET_BIND_SERVICE",
        _ => "",
    }
}
