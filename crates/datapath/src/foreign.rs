//! Transparent connections, called foreign in the code (bpf/handshake.h): forwarding of handshake
//! segments as a router does, and sockets for both sides, whose addresses are not ours.

use crate::{
    Datapath, ExpectError, LegFlags, Pair, Repair, Tuple, abi,
    events::poll_ring,
    maps::from_bytes,
    netlink::{Netlink, request},
    released::restore_instead,
    sockets::Restore,
};
use nix::{
    libc,
    sys::socket::{
        AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, sendto, setsockopt, socket,
        sockopt::SndBufForce,
    },
};
use std::{
    io,
    net::{IpAddr, SocketAddr},
    ops::Range,
    os::fd::{AsRawFd, OwnedFd},
};

/// `MARK_FOREIGN` of bpf/handshake.h.
const MARK: u32 = 0x6c73_706d;
/// Routing table that leads marked packets to local sockets. Its number is unlikely to be in use.
const TABLE: u32 = 0x6c73;

/// Milliseconds by which our sockets' timestamp clocks are behind those of the hosts, most of which count milliseconds. So
/// a socket repeats the last timestamp sent (`foreign_tsval` of bpf/clock.h), and is not ahead of what the host sends next.
const BEHIND: u32 = 1000;

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const PSH: u8 = 0x08;
const ACK: u8 = 0x10;
const ECE: u8 = 0x40;
const CWR: u8 = 0x80;

// Options (RFC 9293, 3.2; RFC 7323; RFC 2018) that our sockets know.
const NOP: u8 = 1;
const MSS: u8 = 2;
const WINDOW_SCALE: u8 = 3;
const SACK_PERMITTED: u8 = 4;
const TIMESTAMPS: u8 = 8;

/// The kind of a handshake segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment {
    /// The client's SYN.
    Syn,
    /// The server's SYN-ACK.
    SynAck,
    /// The client's ACK, or its first data, which the socket has received as well.
    Ack,
    /// A reset.
    Reset,
}

/// A handshake segment between two hosts that do not know of us.
#[derive(Clone, Copy)]
pub struct Handshake {
    /// The leg on which it arrived: `remote` has sent it to `local`.
    pub leg: Tuple,
    /// The kind of segment. `None`: not part of a handshake.
    pub segment: Option<Segment>,
    raw: abi::handshake,
}

impl std::fmt::Debug for Handshake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {:?} seq {} ack {}", self.leg, self.segment, self.seq(), self.ack())
    }
}

/// The options of a SYN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Offer {
    mss: u16,
    wscale: Option<u8>,
    sack: bool,
    tsval: Option<u32>,
}

impl Handshake {
    fn new(raw: abi::handshake) -> Handshake {
        let segment = match raw.tcp[13] & (SYN | ACK | RST) {
            SYN => Some(Segment::Syn),
            flags if flags == SYN | ACK => Some(Segment::SynAck),
            ACK => Some(Segment::Ack),
            flags if flags & RST != 0 => Some(Segment::Reset),
            _ => None,
        };
        Handshake { leg: Tuple::from_abi(&raw.leg), segment, raw }
    }

    fn word(&self, at: usize) -> u32 {
        u32::from_be_bytes(std::array::from_fn(|i| self.raw.tcp[at + i]))
    }

    /// Returns the sequence number.
    pub fn seq(&self) -> u32 {
        self.word(4)
    }

    /// Returns the acknowledgement number.
    pub fn ack(&self) -> u32 {
        self.word(8)
    }

    /// Returns whether `other` is a retransmission of this segment.
    pub fn repeats(&self, other: &Handshake) -> bool {
        (self.seq(), self.ack()) == (other.seq(), other.ack())
    }

    /// Returns the window in bytes. That of a SYN is not scaled (RFC 7323, 2.2).
    fn window(&self) -> u32 {
        u16::from_be_bytes([self.raw.tcp[14], self.raw.tcp[15]]).into()
    }

    /// Returns the TCP header with its options. The data path has checked that it is complete.
    fn header(&self) -> &[u8] {
        let length = usize::from(self.raw.tcp[12] >> 4) * 4;
        &self.raw.tcp[..length.clamp(20, self.raw.tcp.len())]
    }

    /// Returns the kind of each option, and its place in the header. An unreadable rest is the last one, of kind 0.
    fn options(&self) -> Vec<(u8, Range<usize>)> {
        let (header, mut at, mut all) = (self.header(), 20, Vec::new());
        while let Some(&kind) = header.get(at) {
            let length = if kind == NOP { 1 } else { header.get(at + 1).copied().unwrap_or(0).into() };
            if kind == 0 || length == 0 || (kind != NOP && length < 2) || at + length > header.len() {
                all.push((0, at..header.len()));
                break;
            }
            all.push((kind, at..at + length));
            at += length;
        }
        all
    }

    /// Reads the options, like `parse_syn` of bpf/track.h.
    fn offer(&self) -> Offer {
        let mut offer = Offer { mss: 536, ..Offer::default() }; // RFC 9293, 3.7.1: without the option
        for (kind, at) in self.options() {
            match (kind, &self.header()[at]) {
                (MSS, &[_, _, a, b]) => offer.mss = u16::from_be_bytes([a, b]),
                (WINDOW_SCALE, &[_, _, shift]) => offer.wscale = Some(shift.min(14)), // RFC 7323, 2.3
                (SACK_PERMITTED, &[_, _]) => offer.sack = true,
                (TIMESTAMPS, &[_, _, a, b, c, d, _, _, _, _]) => offer.tsval = Some(u32::from_be_bytes([a, b, c, d])),
                _ => {}
            }
        }
        offer
    }

    /// Returns the IP packet as a router forwards it, without payload and FIN, which the socket for its sender receives,
    /// and without options that our sockets could not support later. `None`: the hop limit is exhausted.
    fn packet(&self) -> Option<Vec<u8>> {
        let v6 = !self.leg.is_v4();
        let mut tcp = self.header().to_vec();
        tcp[13] &= !(FIN | PSH);
        if tcp[13] & SYN != 0 {
            tcp[12] &= 0xf0;
            if tcp[13] & ACK != 0 && tcp[13] & (ECE | CWR) != ECE {
                tcp[13] &= !(ECE | CWR); // like `classic_ecn` of bpf/track.h
            }
            let known = [MSS, WINDOW_SCALE, SACK_PERMITTED, TIMESTAMPS];
            let others = self.options().into_iter().filter(|(kind, _)| !known.contains(kind));
            others.for_each(|(_, at)| tcp[at].fill(NOP));
        }
        let length = tcp.len() as u16;
        let (mut ip, hops) = if v6 { (self.raw.ip.to_vec(), 7) } else { (self.raw.ip[..20].to_vec(), 8) };
        ip[hops] = ip[hops].checked_sub(1).filter(|left| *left > 0)?;
        if v6 {
            ip[4..6].copy_from_slice(&length.to_be_bytes());
        } else {
            ip[0] = 0x45; // the IP options were for us
            ip[2..4].copy_from_slice(&(20 + length).to_be_bytes());
        }
        tcp[16..18].fill(0);
        let addresses = if v6 { &ip[8..40] } else { &ip[12..20] };
        let pseudo = sum(addresses) + u32::from(length) + libc::IPPROTO_TCP as u32;
        let check = !fold(pseudo + sum(&tcp));
        tcp[16..18].copy_from_slice(&check.to_be_bytes());
        ip.extend(tcp);
        Some(ip)
    }
}

/// Adds 16-bit words in network byte order. The length must be even.
pub(crate) fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks_exact(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum()
}

pub(crate) fn fold(sum: u32) -> u16 {
    let once = (sum & 0xffff) + (sum >> 16);
    ((once & 0xffff) + (once >> 16)) as u16
}

/// Access to the transparent connections of one address family. While it lives, marked packets are routed to local sockets.
#[derive(Debug)]
pub struct Foreign {
    raw: OwnedFd,
    family: libc::c_int,
}

/// Bytes of memory for segments whose next hops are not resolved yet, which takes up to 3
/// s. A flood from neighbours that do not exist takes 20 MB, and must not block others.
const WAITING: usize = 32 << 20;

impl Foreign {
    /// Opens a raw socket and installs the routing rules, replacing
    /// those of an earlier process. Needs CAP_NET_RAW and CAP_NET_ADMIN.
    pub fn new(v6: bool) -> io::Result<Foreign> {
        let (family, socket_family) =
            if v6 { (libc::AF_INET6, AddressFamily::Inet6) } else { (libc::AF_INET, AddressFamily::Inet) };
        let raw = socket(socket_family, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Raw)?;
        setsockopt(&raw, SndBufForce, &WAITING)?;
        leave(family)?;
        let foreign = Foreign { raw, family }; // from here on, failures remove the rules
        enter(family)?;
        Ok(foreign)
    }

    /// Forwards a segment to its destination. A failure needs no report: the sender will retransmit it.
    pub fn pass_on(&self, segment: &Handshake) -> io::Result<()> {
        let Some(packet) = segment.packet() else { return Ok(()) };
        let mut to = segment.leg.local;
        to.set_port(0);
        sendto(self.raw.as_raw_fd(), &packet, &SockaddrStorage::from(to), MsgFlags::MSG_DONTWAIT)?;
        Ok(())
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Err(error) = leave(self.family) {
            tracing::warn!(%error, "the rules of routing for table {TABLE} stay");
        }
    }
}

/// Removes the routing rules that a dead process has left.
pub(crate) fn remove_rules() -> io::Result<()> {
    [libc::AF_INET, libc::AF_INET6].into_iter().try_for_each(leave)
}

/// Priority of the first of our three rules: before nearly all others, and unlikely to be in use.
const PRIORITY: u32 = 108;
const FRA_PRIORITY: u16 = 6;

/// Action and attributes of a rule (<linux/fib_rules.h>).
type Rule = (u8, Vec<(u16, Vec<u8>)>);

/// Returns the rules. Marked packets are looked up in our own table, in which everything is local.
/// Not so when the kernel looks up the route back to their source, or to that of local sockets,
/// which it does as if from the loopback device: with src_valid_mark, that route would be ours
/// too, and the packet would be dropped as forged. In this case the first rule skips the second.
fn rules() -> [Rule; 3] {
    const FRA_IIFNAME: u16 = 3;
    const FRA_GOTO: u16 = 4;
    const FRA_FWMARK: u16 = 10;
    const FRA_TABLE: u16 = 15;
    const FR_ACT_TO_TBL: u8 = 1;
    const FR_ACT_GOTO: u8 = 2;
    const FR_ACT_NOP: u8 = 3;
    let number = |kind: u16, value: u32| (kind, value.to_ne_bytes().to_vec());
    let (skip, target) = (number(FRA_GOTO, PRIORITY + 2), number(FRA_PRIORITY, PRIORITY + 2));
    let mark = || number(FRA_FWMARK, MARK);
    [
        (FR_ACT_GOTO, vec![number(FRA_PRIORITY, PRIORITY), mark(), (FRA_IIFNAME, b"lo\0".to_vec()), skip]),
        (FR_ACT_TO_TBL, vec![number(FRA_PRIORITY, PRIORITY + 1), mark(), number(FRA_TABLE, TABLE)]),
        (FR_ACT_NOP, vec![target, mark()]),
    ]
}

fn rule(family: libc::c_int, action: u8) -> [u8; 12] {
    [family as u8, 0, 0, 0, 0, 0, 0, action, 0, 0, 0, 0]
}

/// Returns `struct rtmsg` and the attributes of the one route in our table.
fn local_route(family: libc::c_int) -> ([u8; 12], [(u16, Vec<u8>); 2]) {
    const LOOPBACK: u32 = 1; // in every network namespace
    let body = [family as u8, 0, 0, 0, 0, libc::RTPROT_STATIC, libc::RT_SCOPE_HOST, libc::RTN_LOCAL, 0, 0, 0, 0];
    (body, [(libc::RTA_OIF, LOOPBACK.to_ne_bytes().to_vec()), (libc::RTA_TABLE, TABLE.to_ne_bytes().to_vec())])
}

/// Adds the route first, and the rule that uses it last.
fn enter(family: libc::c_int) -> io::Result<()> {
    const NEW: libc::c_int = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
    let (route, attributes) = local_route(family);
    ask(libc::RTM_NEWROUTE, NEW, &route, &attributes)?;
    let [skip, look, target] = rules();
    [target, skip, look]
        .iter()
        .try_for_each(|(action, attributes)| ask(libc::RTM_NEWRULE, NEW, &rule(family, *action), attributes).map(drop))
}

/// Removes all rules, however many: an earlier version gave them no priority, and left one more with each start after a kill.
fn leave(family: libc::c_int) -> io::Result<()> {
    let until_none = |kind, body: &[u8; 12], attributes: &[(u16, Vec<u8>)]| {
        loop {
            match ask(kind, 0, body, attributes).map_err(|e| (e.raw_os_error(), e)) {
                Ok(_) => {}
                // none left, or no such address family
                Err((Some(libc::ENOENT | libc::ESRCH | libc::EAFNOSUPPORT | libc::EOPNOTSUPP), _)) => return Ok(()),
                Err((_, e)) => return Err(e),
            }
        }
    };
    let [skip, (look, mut by), target] = rules();
    by.retain(|(kind, _)| *kind != FRA_PRIORITY);
    for (action, attributes) in [skip, (look, by), target] {
        until_none(libc::RTM_DELRULE, &rule(family, action), &attributes)?;
    }
    let (route, attributes) = local_route(family);
    until_none(libc::RTM_DELROUTE, &route, &attributes)
}

/// Returns whether an address belongs to this machine, so that its own stack would answer.
pub fn is_local(ip: IpAddr) -> io::Result<bool> {
    const TYPE: usize = 7; // rtm_type
    let (family, address) = match ip {
        IpAddr::V4(v4) => (libc::AF_INET, v4.octets().to_vec()),
        IpAddr::V6(v6) => (libc::AF_INET6, v6.octets().to_vec()),
    };
    let body = [family as u8, 8 * address.len() as u8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let answer = ask(libc::RTM_GETROUTE, 0, &body, &[(libc::RTA_DST, address)])?;
    Ok(answer.get(TYPE) == Some(&libc::RTN_LOCAL))
}

/// Sends a request to rtnetlink. Returns the body of the answer.
fn ask(kind: u16, flags: libc::c_int, body: &[u8; 12], attributes: &[(u16, Vec<u8>)]) -> io::Result<Vec<u8>> {
    let ack = if kind == libc::RTM_GETROUTE { 0 } else { libc::NLM_F_ACK };
    let attributes: Vec<_> = attributes.iter().map(|(kind, value)| (*kind, &value[..])).collect();
    Netlink::open(&[])?.ask(&request(kind, ack | flags, body, &attributes))
}

impl Datapath {
    /// Passes SYNs of transparent connections to this address (any address if it is unspecified)
    /// to [`Datapath::poll_handshakes`] instead of the stack, until [`Datapath::unlisten`].
    pub fn listen_foreign(&self, addr: SocketAddr) -> io::Result<()> {
        self.maps.listen(addr, Some(abi::listens::LISTENS_FOREIGN))
    }

    /// Prepares the record of a transparent connection's leg towards its server, before the client's SYN is forwarded.
    pub fn expect_foreign(&self, leg: &Tuple) -> Result<(), ExpectError> {
        self.maps.expect(leg, None, LegFlags::FOREIGN).map(drop)
    }

    /// Leaves the rest of this client's handshake to the stack, which routes it, until its next SYN.
    pub fn let_go_foreign(&self, client: &Tuple) {
        self.maps.forget_embryo(client);
    }

    /// Passes handshake segments to `f` until it returns false. Passes `None` when all
    /// present segments have been passed. Blocks: call it from a thread of its own.
    pub fn poll_handshakes(&self, mut f: impl FnMut(Option<Handshake>) -> bool) -> io::Result<()> {
        poll_ring(&self.maps.handshakes, |data| f(data.map(|data| Handshake::new(from_bytes(data)))))
    }
}

/// Creates established sockets for both sides of a transparent connection, in control mode, with all
/// options that both hosts have agreed on. Call it before the SYN-ACK is forwarded to the client, which may send data then.
pub fn foreign_sockets(syn: &Handshake, answer: &Handshake) -> io::Result<Pair<OwnedFd>> {
    let (offer, accepted) = (syn.offer(), answer.offer());
    let wscale = offer.wscale.zip(accepted.wscale);
    const MOST_UNSCALED: u32 = 65535;
    let make = |side: &Handshake, other: &Handshake, mss, wscale, tsval: Option<u32>| {
        let s = restore_instead(&Restore {
            local: side.leg.local,
            remote: side.leg.remote,
            next_out: other.seq().wrapping_add(1),
            next_in: side.seq().wrapping_add(1),
            window: side.window(),
            promised: MOST_UNSCALED, // at least the window that `other` has announced
            mss,
            wscale,
            sack: offer.sack && accepted.sack,
            tsval: tsval.map(|t| t.wrapping_sub(BEHIND)),
            foreign: true,
        })?;
        Repair::Off.set(&s)?;
        Ok::<_, io::Error>(s)
    };
    let stamps = offer.tsval.zip(accepted.tsval);
    let client = make(syn, answer, offer.mss, wscale, stamps.map(|s| s.1))?;
    let wscale = wscale.map(|(client, server)| (server, client));
    let server = make(answer, syn, accepted.mss, wscale, stamps.map(|s| s.0))?;
    Ok(Pair { client, server })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A SYN from 192.0.2.1:1000 to 192.0.2.2:80 with these options.
    fn syn(options: &[u8]) -> Handshake {
        let mut raw = abi::handshake { ..Default::default() };
        let tuple = Tuple { remote: ([192, 0, 2, 1], 1000).into(), local: ([192, 0, 2, 2], 80).into() };
        raw.leg = tuple.to_abi();
        raw.ip[8] = 64;
        raw.ip[9] = 6;
        raw.ip[12..20].copy_from_slice(&[192, 0, 2, 1, 192, 0, 2, 2]);
        raw.tcp[..14].copy_from_slice(&[3, 232, 0, 80, 0, 0, 0, 7, 0, 0, 0, 0, 0x50, SYN]);
        raw.tcp[12] = (5 + options.len() as u8 / 4) << 4;
        raw.tcp[20..20 + options.len()].copy_from_slice(options);
        Handshake::new(raw)
    }

    #[test]
    fn what_a_syn_offers() {
        let all = [2, 4, 5, 180, 4, 2, 8, 10, 0, 0, 1, 0, 0, 0, 0, 0, 1, 3, 3, 7];
        assert_eq!(syn(&all).offer(), Offer { mss: 1460, wscale: Some(7), sack: true, tsval: Some(256) });
        assert_eq!(syn(&[]).offer(), Offer { mss: 536, ..Offer::default() });
        for broken in [[2, 40, 5, 180], [8, 0, 0, 0], [3, 1, 7, 0], [1, 1, 1, 8]] {
            assert_eq!(syn(&broken).offer(), Offer { mss: 536, ..Offer::default() }, "{broken:?}");
        }
        assert_eq!((syn(&[]).segment, syn(&[]).seq()), (Some(Segment::Syn), 7));
    }

    #[test]
    fn what_our_sockets_do_not_speak_is_taken_out() {
        let mut s = syn(&[30, 4, 0, 1, 3, 3, 7, 1, 34, 2, 4, 2, 99, 9, 0, 0]);
        s.raw.tcp[12] |= 1;
        let p = s.packet().expect("it has far to go");
        assert_eq!(&p[40..], &[1, 1, 1, 1, 3, 3, 7, 1, 1, 1, 4, 2, 1, 1, 1, 1]);
        assert_eq!((p[32], p[33]), (0x90, SYN));
    }

    #[test]
    fn the_hosts_agree_on_ecn_and_not_on_accecn() {
        let passed = |ae: u8, flags: u8| {
            let mut s = syn(&[]);
            s.raw.tcp[12] |= ae;
            s.raw.tcp[13] = flags;
            let p = s.packet().expect("it has far to go");
            assert_eq!(p[32], 0x50, "AE, or NS");
            p[33]
        };
        for ae in [0, 1] {
            for flags in [SYN, SYN | ECE | CWR, SYN | ACK, SYN | ACK | ECE] {
                assert_eq!(passed(ae, flags), flags);
            }
            for flags in [SYN | ACK | ECE | CWR, SYN | ACK | CWR] {
                assert_eq!(passed(ae, flags), SYN | ACK, "means something in AccECN only");
            }
        }
    }

    #[test]
    fn passed_on_as_by_a_router() {
        let mut s = syn(&[2, 4, 5, 180]);
        s.raw.tcp[13] |= PSH | FIN;
        let p = s.packet().expect("it has far to go");
        assert_eq!((p.len(), p[0], p[8], p[33]), (44, 0x45, 63, SYN));
        assert_eq!(u16::from_be_bytes([p[2], p[3]]), 44);
        assert_eq!(fold(sum(&p[12..]) + 24 + 6), 0xffff, "the checksum covers what is left");
        s.raw.ip[8] = 1;
        assert!(s.packet().is_none());
    }
}
