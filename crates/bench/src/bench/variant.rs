//! The ways of forwarding that are compared.

use super::peers::Peer;
use crate::cell::{Cell, Protocol};
use clap::ValueEnum;
use longsplice_engine::Policy;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A way of forwarding. [`Variant::does`] describes those that need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Variant {
    /// No forwarder: the difference between another variant and this one is the forwarder's cost.
    Direct,
    IpForward,
    Filter,
    Nat,
    /// longsplice, spliced at once; over long paths, even where that does harm.
    Spliced,
    SplicedPeer,
    /// longsplice, spliced at once, whose sockets are closed.
    Released,
    Tcx,
    TcxPeer,
    Xdp,
    /// longsplice, spliced at once, with the same addresses, ports and numbers on both sides.
    Identity,
    Default,
    /// longsplice, copying by read and write, as before a splice.
    Copy,
    /// longsplice, copying by `splice(2)`, as for flows that will never be spliced.
    Pipes,
    SplicedSocks,
    CopySocks,
    /// IP forwarding past a longsplice that intercepts connections which ask for a proxy (TPOT), as these do not.
    BesideTpot,
    CopyTpot,
    SplicedTpot,
    SplicedTpotUdp,
    /// longsplice, whose clients shake hands with the server: like those below only over long paths.
    EndToEnd,
    /// longsplice as a translucent proxy, copying: it connects to the server after its handshake with the client.
    TpotBasic,
    /// The same, but it connects on the client's SYN.
    TpotPipelined,
    /// The same, splicing before the first byte.
    TpotSpliced,
    /// A chain of two: the same on both forwarders, pipelined and copying.
    TpotTwo,
    /// The same, splicing before the first byte.
    TpotTwoSpliced,
    Haproxy,
    Nginx,
    Socat,
    Dante,
}

use Variant::*;

/// The variant of this name.
pub fn named(name: &str) -> Result<Variant, String> {
    let names =
        || Variant::all().filter_map(|v| Some(v.to_possible_value()?.get_name().to_owned())).collect::<Vec<_>>();
    Variant::from_str(name, false).map_err(|_| format!("--variants {name}: not one of {}", names().join(", ")))
}

impl Variant {
    /// All variants, in the order of tables.
    pub fn all() -> impl Iterator<Item = Variant> {
        Variant::value_variants().iter().copied()
    }

    /// Title in tables.
    pub fn title(self) -> &'static str {
        self.about().0
    }

    /// Title, and what it does; nothing for those that are measured only over long paths.
    fn about(self) -> (&'static str, &'static str) {
        match self {
            Direct => ("back to back", "client and server share one wire, and no forwarder is between them"),
            IpForward => ("IP forwarding", "the client connects to the server, and the forwarder's kernel routes"),
            Filter => ("IP, filtered", "the same with an nftables chain of twelve rules, of which the last two accept"),
            Nat => ("IP, NAT", "the same with nftables' masquerade, which tracks connections; in the flood, its dnat"),
            Spliced => ("spliced", "longsplice, a plug"),
            SplicedPeer => ("spliced, into the peer", "longsplice, a plug, --peer of both devices"),
            Released => ("spliced, released", "longsplice, a plug, whose sockets are closed soon"),
            Tcx => {
                ("spliced by tcx", "longsplice's data path without its proxy, flows put into the table as if released")
            }
            TcxPeer => (
                "spliced by tcx, into the peer",
                "the same, and packets go straight to the other end of the forwarder's veth",
            ),
            Xdp => ("spliced by XDP", "the same as spliced by tcx, with XDP at the device towards the client"),
            Identity => ("identity path", "longsplice, transparent"),
            Default => ("default policy", "longsplice, a plug"),
            Copy => ("copying", "longsplice, a plug"),
            Pipes => ("splice(2)", "longsplice, a plug"),
            SplicedSocks => ("spliced, SOCKS", "longsplice, SOCKS 5"),
            CopySocks => ("copying, SOCKS", "longsplice, SOCKS 5"),
            BesideTpot => ("IP past TPOT", "longsplice, translucent, which the client does not ask for"),
            CopyTpot => ("copying, TPOT", "longsplice, translucent"),
            SplicedTpot => ("spliced, TPOT", "longsplice, translucent"),
            SplicedTpotUdp => ("spliced, TPOT in UDP", "longsplice, translucent, with the tunnel in UDP"),
            EndToEnd => ("end to end", ""),
            TpotBasic => ("basic, copied", ""),
            TpotPipelined => ("pipelined, copied", ""),
            TpotSpliced => ("pipelined, spliced", ""),
            TpotTwo => ("two, copied", ""),
            TpotTwoSpliced => ("two, spliced", ""),
            Haproxy => ("HAProxy", "Debian's, TCP mode, `option splice-auto`, as many threads as it chooses"),
            Nginx => ("nginx", "Debian's, stream module, as many workers as CPUs"),
            Socat => ("socat", "Debian's, `TCP-LISTEN:...,fork`: a process for each connection"),
            Dante => ("Dante", "Debian's, SOCKS 5 without authentication"),
        }
    }

    /// Description, for the set-up; `None` for those that are measured only over long paths.
    pub fn does(self) -> Option<String> {
        let does = Some(self.about().1).filter(|does| !does.is_empty())?;
        if !self.is_longsplice() {
            return Some(does.to_owned());
        }
        let when = self.splice().unwrap_or_else(|| format!("left at {:?}", Policy::default().when));
        Some(format!("{does}, --splice {when}"))
    }

    /// The value of longsplice's `--splice`; `None`: the default.
    pub fn splice(self) -> Option<String> {
        /// More than any connection of the bench carries: the proxy copies by read and write, and waits.
        const FAR: u64 = 1 << 50;
        match self {
            spliced if spliced.is_spliced() => Some("at-once".into()),
            Pipes | CopySocks | CopyTpot => Some("never".into()),
            Copy | TpotBasic | TpotPipelined | TpotTwo => Some(FAR.to_string()),
            _ => None,
        }
    }

    /// Whether its connections are spliced as soon as they are open.
    pub fn is_spliced(self) -> bool {
        let tpot = matches!(self, SplicedTpot | SplicedTpotUdp | TpotSpliced | TpotTwoSpliced);
        tpot || matches!(self, Spliced | SplicedPeer | Released | SplicedSocks | Identity)
    }

    /// Whether longsplice intercepts connections that ask for a proxy.
    pub fn tpot(self) -> bool {
        self == BesideTpot || self.udp().is_some()
    }

    /// The value of `--udp` of the client's host, if its connections ask for a proxy.
    pub fn udp(self) -> Option<&'static str> {
        match self {
            SplicedTpotUdp => Some("always"),
            tpot => (tpot.translucent() > 0).then_some("never"),
        }
    }

    /// The number of translucent proxies that a connection meets.
    pub fn translucent(self) -> usize {
        match self {
            CopyTpot | SplicedTpot | SplicedTpotUdp | TpotBasic | TpotPipelined | TpotSpliced => 1,
            TpotTwo | TpotTwoSpliced => 2,
            _ => 0,
        }
    }

    /// Whether connections pass a longsplice, with its control socket.
    pub fn is_longsplice(self) -> bool {
        !self.routed() && self.peer().is_none() && !matches!(self, Direct | Tcx | TcxPeer | Xdp)
    }

    /// Whether the client tells the proxy where to connect.
    pub fn socks(self) -> bool {
        matches!(self, SplicedSocks | CopySocks | Dante)
    }

    /// Whether the forwarder only forwards IP packets.
    pub fn routed(self) -> bool {
        matches!(self, IpForward | Filter | Nat | BesideTpot)
    }

    /// Whether the client connects directly to the server.
    pub fn to_server(self) -> bool {
        self.routed() || self.tpot() || self == Identity
    }

    /// Whether it can take part in this cell of a long path.
    pub fn serves(self, cell: &Cell) -> bool {
        match cell.protocol {
            Protocol::Plug => true,
            Protocol::Socks => self.translucent() == 0 && !matches!(self, EndToEnd | Haproxy),
            Protocol::Http => self.translucent() == 0 && self != EndToEnd,
        }
    }

    /// The peer whose program it is; `None`: longsplice or the kernel.
    pub fn peer(self) -> Option<Peer> {
        match self {
            Filter | Nat => Some(Peer::Nft),
            Haproxy => Some(Peer::Haproxy),
            Nginx => Some(Peer::Nginx),
            Socat => Some(Peer::Socat),
            Dante => Some(Peer::Dante),
            _ => None,
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.title())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn haproxy_speaks_no_socks() {
        let [socks, plug] = ["c1, 1 B, bbr, SOCKS", "c1, 1 B, bbr"].map(|row| row.parse::<Cell>().unwrap());
        assert!(!Haproxy.serves(&socks) && Haproxy.serves(&plug) && Spliced.serves(&socks));
    }
}
