//! What a SOCKS listener serves.

use crate::access::PortRange;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Associations on a listener: each has up to three sockets, so that they leave most of the usual 65536 descriptors of a
/// service to connections.
pub(crate) const ASSOCIATIONS: u32 = 4096;
/// Sockets of a listener that wait for connections at a time: the data path has room for 1024 listeners in all.
pub(crate) const BINDS: u32 = 512;

/// A command of SOCKS that can be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
    /// Connect to the target.
    Connect,
    /// Accept one connection from the target.
    Bind,
    /// Relay datagrams.
    UdpAssociate,
    /// Look a name up, or an address: extensions of Tor.
    Resolve,
}

impl Command {
    /// Returns the name for the access log and the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Command::Connect => "connect",
            Command::Bind => "bind",
            Command::UdpAssociate => "udp-associate",
            Command::Resolve => "resolve",
        }
    }
}

/// The commands of a listener, and what they may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Commands {
    /// Those that are served.
    pub served: Vec<Command>,
    /// BIND.
    pub bind: Bind,
    /// UDP ASSOCIATE.
    pub udp: Udp,
}

impl Commands {
    /// Whether clients are connected to targets, and nothing else is done for them.
    pub(crate) fn only_connect(&self) -> bool {
        self.served == [Command::Connect]
    }
}

/// What BIND may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bind {
    /// Time to wait for the connection.
    pub wait: Duration,
    /// Whether clients may leave open who connects. Otherwise they have to name the peer's address, and nobody else gets in.
    pub any_peer: bool,
    /// Ports to listen on; none: any.
    pub ports: Option<PortRange>,
    /// Sockets that wait for one client.
    pub per_client: u32,
}

/// What UDP ASSOCIATE may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Udp {
    /// Time without a datagram after which an association ends.
    pub idle_limit: Duration,
    /// Whose datagrams are passed to the client.
    pub replies: Replies,
    /// Destinations that an association remembers.
    pub destinations: u32,
    /// Ports that clients send to; none: any.
    pub ports: Option<PortRange>,
    /// Associations of one client.
    pub per_client: u32,
}

/// Whose datagrams are passed to the client of an association.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replies {
    /// Those from addresses and ports that it has sent to.
    #[default]
    Addressed,
    /// Those from any port of hosts that it has sent to.
    Host,
    /// Those from any address that the rules let it send to.
    Any,
}

impl Default for Commands {
    fn default() -> Commands {
        let served = vec![Command::Connect, Command::Bind, Command::UdpAssociate];
        Commands { served, bind: Bind::default(), udp: Udp::default() }
    }
}

impl Default for Bind {
    fn default() -> Bind {
        // A server that was told the port connects within round trips; a person may have to answer first.
        Bind { wait: Duration::from_secs(60), any_peer: false, ports: None, per_client: 16 }
    }
}

impl Default for Udp {
    fn default() -> Udp {
        Udp {
            // as NAT keeps what is in use (RFC 4787, 4.3: five minutes are recommended)
            idle_limit: Duration::from_secs(300),
            replies: Replies::default(),
            // more than browsers and resolvers address, in a hundred kilobytes
            destinations: 1024,
            ports: None,
            // a browser opens one for each QUIC connection
            per_client: 256,
        }
    }
}

impl Commands {
    /// Whether it is served.
    pub fn serves(&self, command: Command) -> bool {
        self.served.contains(&command)
    }
}
