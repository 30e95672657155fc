//! Every packet of a host's devices, with its tunnel's header.

use super::packets::{udp_source, unwrap};
use longsplice_lab::{Family, Namespace, process::wait_for};
use longsplice_tests::packet::{ETHERNET, Packet, flag, verify};
use nix::{
    errno::Errno,
    net::if_::if_nameindex,
    sys::socket::{
        AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, setsockopt, socket, sockopt::RcvBufForce,
    },
};
use std::{
    collections::HashMap,
    fmt,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd, OwnedFd},
};

/// Bytes of packets that the kernel keeps for us: more than any connection of these tests carries.
const ROOM: usize = 200_000_000;
/// PACKET_OUTGOING of <linux/if_packet.h>.
const OUTGOING: u8 = 4;

/// A TCP packet.
#[derive(Clone)]
pub struct Seen {
    pub device: String,
    pub out: bool,
    /// Source, destination, and DSCP with ECN of the outer header. Its other fields are as they have to be: see [`unwrap`].
    pub outer: Option<(IpAddr, IpAddr, u8)>,
    /// Source port of a tunnel in UDP.
    pub udp: Option<u16>,
    /// Length of the whole IP packet in bytes.
    pub length: usize,
    pub p: Packet,
}

impl fmt::Debug for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Seen { device, out, outer, p, .. } = self;
        let way = if *out { "out" } else { "in" };
        let outer = outer.map_or_else(String::new, |(from, to, _)| format!(" [{from} > {to}]"));
        let Packet { from, to, seq, ack, flags, options, payload, .. } = p;
        write!(f, "{device} {way}{outer} {from} > {to} seq {seq} ack {ack} flags {flags:#x}")?;
        write!(f, " {} bytes {options:?}", payload.len())
    }
}

impl Seen {
    pub fn is(&self, device: &str, out: bool) -> bool {
        (self.device.as_str(), self.out) == (device, out)
    }

    /// Whether these flags are set, and none of the other ones of SYN, ACK, RST and FIN.
    pub fn has(&self, flags: u8) -> bool {
        self.p.flags & (flag::SYN | flag::ACK | flag::RST | flag::FIN) == flags
    }

    pub fn between(&self, one: SocketAddr, other: SocketAddr) -> bool {
        [(one, other), (other, one)].contains(&(self.p.from, self.p.to))
    }
}

/// What passes all devices of a host from now on, in the order of time.
pub struct Capture {
    socket: OwnedFd,
    names: HashMap<usize, String>,
    seen: Vec<Seen>,
    /// Whether checksums have to be right: those of large packets are completed later.
    pub checked: bool,
    /// Packets that were not TCP, and not TCP in a tunnel, with their devices and whether they went out.
    pub others: Vec<(String, bool, Vec<u8>)>,
}

impl Capture {
    pub fn start(at: &Namespace) -> Capture {
        at.run(|| {
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            let socket = socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll).expect("socket");
            setsockopt(&socket, RcvBufForce, &ROOM).expect("room");
            let names = if_nameindex().expect("devices");
            let name = |i: &nix::net::if_::Interface| (i.index() as usize, i.name().to_string_lossy().into_owned());
            Capture {
                socket,
                names: names.iter().map(name).collect(),
                seen: Vec::new(),
                checked: false,
                others: Vec::new(),
            }
        })
    }

    /// All TCP packets so far.
    pub fn seen(&mut self) -> &[Seen] {
        let mut frame = vec![0; 1 << 18];
        loop {
            match recvfrom::<LinkAddr>(self.socket.as_raw_fd(), &mut frame) {
                Ok((n, from)) => self.keep(&frame[..n], from.expect("a packet has an address")),
                Err(Errno::EAGAIN) => return &self.seen,
                Err(e) => panic!("capture: {e}"),
            }
        }
    }

    fn keep(&mut self, frame: &[u8], at: LinkAddr) {
        let ip = &frame[ETHERNET.min(frame.len())..];
        let (family, tunnel) = match frame.get(12..14) {
            Some([0x08, 0x00]) => (Family::V4, ip[9] == 4),
            Some([0x86, 0xdd]) => (Family::V6, ip[6] == 41),
            _ => return, // ARP
        };
        let is_fragment = family == Family::V4 && (ip[6] & 0x3f, ip[7]) != (0, 0);
        let udp = udp_source(family, frame).filter(|_| !is_fragment);
        let (outer, inner) = if (tunnel || udp.is_some()) && !is_fragment {
            let (from, to, tos, inner) = unwrap(family, frame);
            (Some((from, to, tos)), inner)
        } else {
            (None, frame.to_vec())
        };
        let device = self.names.get(&at.ifindex()).cloned().unwrap_or_default();
        let out = at.pkttype() == OUTGOING;
        let Some(p) = Packet::parse(&inner).filter(|_| !is_fragment) else {
            return self.others.push((device, out, frame.to_vec()));
        };
        if self.checked {
            verify(&inner).expect("checksums");
        }
        self.seen.push(Seen { device, out, outer, udp, length: ip.len(), p });
    }

    /// Waits for the first packet of this kind.
    pub fn wait(&mut self, what: &str, is: impl Fn(&Seen) -> bool) -> Seen {
        self.wait_nth(what, 0, is)
    }

    /// Waits until more than `n` packets of this kind have passed. Returns the next one.
    pub fn wait_nth(&mut self, what: &str, n: usize, is: impl Fn(&Seen) -> bool) -> Seen {
        let found = wait_for(super::PATIENCE, || self.seen().iter().filter(|s| is(s)).nth(n).cloned());
        found.unwrap_or_else(|| panic!("{what}: {}", self.last()))
    }

    /// The last packets, for people.
    pub fn last(&mut self) -> String {
        let all = self.seen();
        all[all.len().saturating_sub(40)..].iter().map(|s| format!("\n{s:?}")).collect()
    }

    /// The place of the first packet of this kind in the order of time.
    pub fn position(&mut self, is: impl Fn(&Seen) -> bool) -> Option<usize> {
        self.seen().iter().position(is)
    }

    pub fn count(&mut self, is: impl Fn(&Seen) -> bool) -> usize {
        self.seen().iter().filter(|s| is(s)).count()
    }
}
