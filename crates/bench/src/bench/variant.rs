//! The ways of forwarding that are compared.

use super::peers::Peer;
use longsplice_engine::Policy;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A way of forwarding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Variant {
    /// None: two hosts on one link. The difference between another variant and this one is the forwarder's cost.
    Direct,
    /// The client connects directly to the server, and the forwarder routes.
    IpForward,
    /// IP forwarding past a dozen rules without connection tracking.
    Filter,
    /// IP forwarding with address translation: the forwarder's address replaces the client's.
    Nat,
    /// longsplice, spliced at once.
    Spliced,
    /// longsplice, spliced at once, with packets delivered directly to the other ends of both veths.
    SplicedPeer,
    /// longsplice's data path at tcx, with flows installed in its table.
    Tcx,
    /// The same, with packets delivered directly to the other end of a veth.
    TcxPeer,
    /// The same, with XDP at the client's device.
    Xdp,
    /// longsplice, spliced at once, with the same addresses, ports and numbers on both sides.
    Identity,
    /// longsplice, spliced according to its default policy.
    Default,
    /// longsplice, copying by read and write, as before a splice.
    Copy,
    /// longsplice, copying by `splice(2)`, as for flows that will never be spliced.
    Pipes,
    /// longsplice as a SOCKS proxy, spliced at once.
    SplicedSocks,
    /// longsplice as a SOCKS proxy, never spliced.
    CopySocks,
    /// IP forwarding past a longsplice that intercepts connections which ask for a proxy (TPOT), as these do not.
    BesideTpot,
    /// longsplice as a translucent proxy, never spliced.
    CopyTpot,
    /// longsplice as a translucent proxy, spliced at once.
    SplicedTpot,
    /// The same, with the tunnel in UDP.
    SplicedTpotUdp,
    /// HAProxy with splice(2).
    Haproxy,
    /// nginx's stream module.
    Nginx,
    /// socat, with a process for each connection.
    Socat,
    /// Dante, a SOCKS proxy.
    Dante,
}

impl Variant {
    /// All variants, in the order of tables.
    pub const ALL: [Variant; 23] = [
        Variant::Direct,
        Variant::IpForward,
        Variant::Filter,
        Variant::Nat,
        Variant::Spliced,
        Variant::SplicedPeer,
        Variant::Tcx,
        Variant::TcxPeer,
        Variant::Xdp,
        Variant::Identity,
        Variant::Default,
        Variant::Copy,
        Variant::Pipes,
        Variant::SplicedSocks,
        Variant::CopySocks,
        Variant::BesideTpot,
        Variant::CopyTpot,
        Variant::SplicedTpot,
        Variant::SplicedTpotUdp,
        Variant::Haproxy,
        Variant::Nginx,
        Variant::Socat,
        Variant::Dante,
    ];
    /// Variants that terminate the client's connection and open one to the server;
    /// without those that differ only in the handshake before the first byte.
    pub const PROXIES: [Variant; 7] = [
        Variant::Spliced,
        Variant::Copy,
        Variant::Pipes,
        Variant::Haproxy,
        Variant::Nginx,
        Variant::Socat,
        Variant::Dante,
    ];

    /// Title in tables.
    pub fn title(self) -> &'static str {
        match self {
            Variant::Direct => "back to back",
            Variant::IpForward => "IP forwarding",
            Variant::Filter => "IP, filtered",
            Variant::Nat => "IP, NAT",
            Variant::Spliced => "spliced",
            Variant::SplicedPeer => "spliced, into the peer",
            Variant::Tcx => "spliced by tcx",
            Variant::TcxPeer => "spliced by tcx, into the peer",
            Variant::Xdp => "spliced by XDP",
            Variant::Identity => "identity path",
            Variant::Default => "default policy",
            Variant::Copy => "copying",
            Variant::Pipes => "splice(2)",
            Variant::SplicedSocks => "spliced, SOCKS",
            Variant::CopySocks => "copying, SOCKS",
            Variant::BesideTpot => "IP past TPOT",
            Variant::CopyTpot => "copying, TPOT",
            Variant::SplicedTpot => "spliced, TPOT",
            Variant::SplicedTpotUdp => "spliced, TPOT in UDP",
            Variant::Haproxy => Peer::Haproxy.name(),
            Variant::Nginx => Peer::Nginx.name(),
            Variant::Socat => Peer::Socat.name(),
            Variant::Dante => Peer::Dante.name(),
        }
    }

    /// Description, for the set-up.
    pub fn does(self) -> String {
        match self {
            Variant::Direct => "client and server share one wire, and nobody is between them".into(),
            Variant::IpForward => "the client connects to the server, and the forwarder's kernel routes".into(),
            Variant::Filter => "the same with an nftables chain of twelve rules, of which the last two accept".into(),
            Variant::Nat => {
                "the same with nftables' masquerade, which tracks connections; in the flood, its dnat".into()
            }
            Variant::Tcx => "longsplice's data path without its proxy, flows put into the table as if released".into(),
            Variant::TcxPeer => "the same, and packets go straight to the other end of the forwarder's veth".into(),
            Variant::Xdp => "the same as spliced by tcx, with XDP at the device towards the client".into(),
            Variant::Nginx => "Debian's, stream module, as many workers as CPUs".into(),
            Variant::Haproxy => "Debian's, TCP mode, `option splice-auto`, as many threads as it chooses".into(),
            Variant::Socat => "Debian's, `TCP-LISTEN:...,fork`: a process for each connection".into(),
            Variant::Dante => "Debian's, SOCKS 5 without authentication".into(),
            longsplice => {
                let protocol = match longsplice {
                    Variant::Identity => "transparent",
                    Variant::BesideTpot => "translucent, which the client does not ask for",
                    Variant::SplicedTpotUdp => "translucent, with the tunnel in UDP",
                    tpot if tpot.tpot() => "translucent",
                    socks if socks.socks() => "SOCKS 5",
                    _ => "a plug",
                };
                let when = longsplice.splice().unwrap_or_else(|| format!("left at {:?}", Policy::default().when));
                let peer = if longsplice == Variant::SplicedPeer { ", --peer of both devices" } else { "" };
                format!("longsplice, {protocol}, --splice {when}{peer}")
            }
        }
    }

    /// The value of longsplice's `--splice`; `None`: the default.
    pub fn splice(self) -> Option<String> {
        /// More than any connection of the bench carries: the proxy copies by read and write, and waits.
        const FAR: u64 = 1 << 50;
        match self {
            spliced if spliced.is_spliced() => Some("at-once".into()),
            Variant::Pipes | Variant::CopySocks | Variant::CopyTpot => Some("never".into()),
            Variant::Copy => Some(FAR.to_string()),
            _ => None,
        }
    }

    /// Whether its connections are spliced as soon as they are open.
    pub fn is_spliced(self) -> bool {
        let tpot = matches!(self, Variant::SplicedTpot | Variant::SplicedTpotUdp);
        tpot || matches!(self, Variant::Spliced | Variant::SplicedPeer | Variant::SplicedSocks | Variant::Identity)
    }

    /// Whether longsplice intercepts connections that ask for a proxy.
    pub fn tpot(self) -> bool {
        self == Variant::BesideTpot || self.udp().is_some()
    }

    /// The value of `--udp` of the client's host, if its connections ask for a proxy.
    pub fn udp(self) -> Option<&'static str> {
        match self {
            Variant::CopyTpot | Variant::SplicedTpot => Some("never"),
            Variant::SplicedTpotUdp => Some("always"),
            _ => None,
        }
    }

    /// Whether connections pass a longsplice, with its control socket.
    pub fn is_longsplice(self) -> bool {
        !self.routed()
            && self.peer().is_none()
            && !matches!(self, Variant::Direct | Variant::Tcx | Variant::TcxPeer | Variant::Xdp)
    }

    /// Whether the client tells the proxy where to connect.
    pub fn socks(self) -> bool {
        matches!(self, Variant::SplicedSocks | Variant::CopySocks | Variant::Dante)
    }

    /// Whether the forwarder forwards IP packets.
    pub fn routed(self) -> bool {
        matches!(self, Variant::IpForward | Variant::Filter | Variant::Nat | Variant::BesideTpot)
    }

    /// Whether the client connects directly to the server.
    pub fn to_server(self) -> bool {
        self.routed() || self.tpot() || self == Variant::Identity
    }

    /// The peer whose program it is; `None`: longsplice or the kernel.
    pub fn peer(self) -> Option<Peer> {
        match self {
            Variant::Filter | Variant::Nat => Some(Peer::Nft),
            Variant::Haproxy => Some(Peer::Haproxy),
            Variant::Nginx => Some(Peer::Nginx),
            Variant::Socat => Some(Peer::Socat),
            Variant::Dante => Some(Peer::Dante),
            _ => None,
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.title())
    }
}
