//! Handshakes between hosts, end to end (bpf/handshake.h): passing their segments on, and sockets for both sides.

use crate::{
    Connection, Datapath, ExpectError, ExpectedLeg, LegFlags, LegView, Pair, Repair, Tuple, abi,
    checksum::{fold, sum},
    handshakes::hold::{held_packet, returning_socket},
    sockets::socket::{Restore, send_frame, set_clock},
    switching::released::restore_instead,
    tables::maps::from_bytes,
    watching::events::poll_ring,
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
    time::Duration,
};

/// Milliseconds by which our sockets' timestamp clocks are behind those of the hosts, most of which count milliseconds. So
/// a socket repeats the last timestamp sent (`shared_tsval` of bpf/clock.h), and is not ahead of what the host sends next.
const BEHIND: u32 = 1000;

/// Hop limit of packets that are not forwarded.
pub(crate) const TTL: u8 = 64;

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
pub(crate) const RST: u8 = 0x04;
const PSH: u8 = 0x08;
pub(crate) const ACK: u8 = 0x10;
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

/// A segment of a handshake between two hosts.
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
    pub(crate) fn new(raw: abi::handshake) -> Handshake {
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

    /// Returns the connection that had the leg's entry when the segment arrived: by now, another one may have it.
    pub fn connection(&self) -> Connection {
        let generation = Some(self.raw.generation).filter(|g| *g != Connection::ANY).unwrap_or(Connection::NONE);
        Connection { leg: self.leg, generation }
    }

    /// Returns whether `other` is a retransmission of this segment.
    pub fn repeats(&self, other: &Handshake) -> bool {
        (self.seq(), self.ack()) == (other.seq(), other.ack())
    }

    /// Returns the MSS of a SYN or SYN-ACK in bytes. `None`: it has none.
    pub fn mss(&self) -> Option<u16> {
        let mss = self.options().into_iter().find(|(kind, at)| *kind == MSS && at.len() == 4);
        mss.map(|(_, at)| u16::from_be_bytes([self.header()[at.start + 2], self.header()[at.start + 3]]))
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

    /// Returns the IP packet for the host of `out`, otherwise as a router forwards it, without payload and FIN, which the
    /// socket for its sender receives, and without options that our sockets could not support later. `None`: the hop limit
    /// is exhausted, or `out` has another address family.
    fn packet(&self, out: &Tuple) -> Option<Vec<u8>> {
        let v6 = !self.leg.is_v4();
        let mut tcp = self.header().to_vec();
        tcp[..2].copy_from_slice(&out.local.port().to_be_bytes());
        tcp[2..4].copy_from_slice(&out.remote.port().to_be_bytes());
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
        let (mut ip, hops) = if v6 { (self.raw.ip.to_vec(), 7) } else { (self.raw.ip[..20].to_vec(), 8) };
        ip[hops] = ip[hops].checked_sub(1).filter(|left| *left > 0)?;
        match (out.local.ip(), out.remote.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) if !v6 => {
                ip[12..16].copy_from_slice(&from.octets());
                ip[16..20].copy_from_slice(&to.octets());
            }
            (IpAddr::V6(from), IpAddr::V6(to)) if v6 => {
                ip[8..24].copy_from_slice(&from.octets());
                ip[24..40].copy_from_slice(&to.octets());
            }
            _ => return None,
        }
        Some(complete(ip, tcp))
    }

    /// Returns the IP packet by which its destination refuses the segment (RFC 9293, 3.10.7.1).
    fn refusal(&self) -> Vec<u8> {
        let v6 = !self.leg.is_v4();
        let mut ip = if v6 { self.raw.ip.to_vec() } else { self.raw.ip[..20].to_vec() };
        let (hops, from, to) = if v6 { (7, 8..24, 24..40) } else { (8, 12..16, 16..20) };
        ip[hops] = TTL;
        ip[from.clone()].copy_from_slice(&self.raw.ip[to.clone()]);
        ip[to].copy_from_slice(&self.raw.ip[from]);
        let mut tcp = vec![0; 20];
        tcp[..2].copy_from_slice(&self.raw.tcp[2..4]);
        tcp[2..4].copy_from_slice(&self.raw.tcp[..2]);
        if self.segment == Some(Segment::Syn) {
            tcp[8..12].copy_from_slice(&self.seq().wrapping_add(1).to_be_bytes());
            tcp[12..14].copy_from_slice(&[5 << 4, RST | ACK]);
        } else {
            tcp[4..8].copy_from_slice(&self.ack().to_be_bytes());
            tcp[12..14].copy_from_slice(&[5 << 4, RST]);
        }
        complete(ip, tcp)
    }
}

/// Returns an IP packet with the right lengths and checksums. The kernel computes that of the IPv4 header (raw(7)).
pub(crate) fn complete(mut ip: Vec<u8>, mut tcp: Vec<u8>) -> Vec<u8> {
    let (length, v6) = (tcp.len() as u16, ip.len() == 40);
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
    ip
}

/// Sends the segments of handshakes of one address family on their way. Needs CAP_NET_RAW.
#[derive(Debug)]
pub struct HandshakeSender {
    /// Sends IP packets.
    raw: OwnedFd,
    /// Sends frames back to the data path, as if they had just arrived.
    back: OwnedFd,
}

/// Bytes of memory for segments whose next hops are not resolved yet, which takes up to 3
/// s. A flood from neighbours that do not exist takes 20 MB, and must not block others.
const WAITING: usize = 32 << 20;

impl HandshakeSender {
    /// Opens the sockets.
    pub fn new(v6: bool) -> io::Result<HandshakeSender> {
        let family = if v6 { AddressFamily::Inet6 } else { AddressFamily::Inet };
        let raw = socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Raw)?;
        setsockopt(&raw, SndBufForce, &WAITING)?;
        Ok(HandshakeSender { raw, back: returning_socket()? })
    }

    /// Sends a segment to the host of `out`, from our side of that leg. A
    /// failure needs no report: the sender of the segment will retransmit it.
    pub fn pass_on(&self, segment: &Handshake, out: &Tuple) -> io::Result<()> {
        let Some(packet) = segment.packet(out) else { return Ok(()) };
        let mut to = out.remote;
        to.set_port(0);
        sendto(self.raw.as_raw_fd(), &packet, &SockaddrStorage::from(to), MsgFlags::MSG_DONTWAIT)?;
        Ok(())
    }

    /// Refuses a client's segment in the name of its destination. A failure needs no report: the client sends it again.
    pub fn refuse(&self, segment: &Handshake) -> io::Result<()> {
        let mut to = segment.leg.remote;
        to.set_port(0);
        sendto(self.raw.as_raw_fd(), &segment.refusal(), &SockaddrStorage::from(to), MsgFlags::MSG_DONTWAIT)?;
        Ok(())
    }

    /// Gives a client's SYN back: the listening socket answers it.
    pub fn give_back(&self, syn: &Handshake) -> io::Result<()> {
        let headers = abi::held_record {
            leg: syn.raw.leg,
            eth: syn.raw.eth,
            ip: syn.raw.ip,
            tcp: syn.raw.tcp,
            ..Default::default()
        };
        let v4 = syn.leg.is_v4();
        let protocol = if v4 { libc::ETH_P_IP } else { libc::ETH_P_IPV6 };
        send_frame(&self.back, syn.raw.ifindex, protocol as u16, &held_packet(&headers, v4, &[]))
    }
}

/// A kind of connections whose hosts shake hands with each other.
#[derive(Clone, Copy, Debug)]
pub struct EndToEnd {
    /// As for [`established_sockets`].
    pub transparent: bool,
    /// As for [`Datapath::listen_end_to_end`].
    pub waits: bool,
}

/// Returns the kind of a listener, with or without `LISTENS_WAITS`.
pub(crate) fn listens(kind: abi::listens, waits: bool) -> abi::listens {
    abi::listens(kind.0 | if waits { abi::listens::LISTENS_WAITS.0 } else { 0 })
}

impl Datapath {
    /// Lets clients of a listening socket shake hands with servers: passes their SYNs to [`Datapath::poll_handshakes`]
    /// instead of the stack, until [`Datapath::listen`] or [`Datapath::unlisten`]. With `waits`, the first
    /// data of each connection is held until [`Datapath::decided`].
    pub fn listen_end_to_end(&self, addr: SocketAddr, waits: bool) -> io::Result<()> {
        self.maps.listen(addr, Some(listens(abi::listens::LISTENS_END_TO_END, waits)))
    }

    /// Holds no more data from the hosts of a connection ([`Datapath::listen_end_to_end`]).
    pub fn decided(&self, legs: Pair<&Tuple>) -> io::Result<()> {
        self.maps.decided(legs)
    }

    /// Prepares the record of a leg towards a server before the client's SYN is passed on. Returns the new connection.
    pub fn expect_end_to_end(&self, leg: &Tuple, client: &Tuple, kind: EndToEnd) -> Result<Connection, ExpectError> {
        let flag = |wanted, flag| if wanted { flag } else { 0 };
        let flags =
            flag(kind.transparent, LegFlags::TRANSPARENT) | flag(kind.waits, LegFlags::WAITS) | LegFlags::END_TO_END;
        let expected = self.maps.expect(leg, Some(client), flags | LegFlags::TS | LegFlags::SACK)?;
        Ok(Connection { leg: *leg, generation: expected.generation })
    }

    /// Like [`Datapath::expect`], on behalf of a client that has sent this SYN and has no leg yet.
    pub fn expect_for_syn(
        &self,
        leg: &Tuple,
        syn: &Handshake,
        from_elsewhere: bool,
    ) -> Result<ExpectedLeg, ExpectError> {
        let offer = syn.offer();
        let flag = |wanted, flag| if wanted { flag } else { 0 };
        let flags = flag(offer.tsval.is_some(), LegFlags::TS) | flag(offer.sack, LegFlags::SACK);
        let flags = flags | flag(from_elsewhere, LegFlags::TRANSPARENT);
        self.maps.expect(leg, None, flags).map(|expected| ExpectedLeg { mss: syn.mss(), ..expected })
    }

    /// Tells conntrack of a handshake between hosts through our addresses. Call it
    /// before the SYN-ACK is passed on, which conntrack would take for invalid.
    pub fn track_handshake(&self, legs: Pair<&Tuple>, syn: &Handshake, answer: &Handshake) {
        let scales = syn.offer().wscale.zip(answer.offer().wscale).unwrap_or_default();
        self.conntrack.open_flow(legs, Pair::new(scales, (scales.1, scales.0)));
    }

    /// Returns whether the client of the server's leg has completed its handshake, like `has_client` of bpf/handshake.h.
    pub fn has_client(&self, server: &Tuple) -> bool {
        let has = |l: LegView| l.flags & LegFlags::RESTORED != 0 || self.leg(&Tuple::from_abi(&l.raw.peer)).is_some();
        self.leg(server).is_some_and(has)
    }

    /// Returns whether a segment of this client that acknowledges `ack` has passed before its SYN was answered.
    pub fn has_passed(&self, client: &Tuple, ack: u32) -> bool {
        self.maps.acknowledged(client) == Some(ack)
    }

    /// Leaves the rest of the handshake that began with this number of this client's SYN to the stack. If the connection
    /// is transparent and this machine is a router, the stack routes it. The client's next SYN is for us again.
    pub fn let_go_handshake(&self, client: &Tuple, syn: u32) {
        self.maps.forget_embryo(client, syn);
    }

    /// Passes handshake segments to `f`, and `None` when all present segments have been passed. It returns after which time it is
    /// to be called again, at most, or `None` to stop. Blocks: call it from a thread of its own.
    pub fn poll_handshakes(&self, mut f: impl FnMut(Option<Handshake>) -> Option<Duration>) -> io::Result<()> {
        poll_ring(&self.maps.handshakes, |data| f(data.map(|data| Handshake::new(from_bytes(data)))))
    }
}

/// Creates established sockets for both sides of a handshake between hosts, in control mode, with all options that both
/// have agreed on. `transparent`: our addresses on the legs are not ours (transparent connections). Call it before the SYN-ACK
/// is passed on to the client, which may send data then.
pub fn established_sockets(syn: &Handshake, answer: &Handshake, transparent: bool) -> io::Result<Pair<OwnedFd>> {
    let (offer, accepted) = (syn.offer(), answer.offer());
    let wscale = offer.wscale.zip(accepted.wscale);
    const MOST_UNSCALED: u32 = 65535;
    let make = |side: &Handshake, other: &Handshake, mss, wscale, tsval: Option<u32>| {
        restore_instead(&Restore {
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
            transparent,
        })
    };
    let stamps = offer.tsval.zip(accepted.tsval);
    let client = make(syn, answer, offer.mss, wscale, stamps.map(|s| s.1))?;
    let wscale = wscale.map(|(client, server)| (server, client));
    let server = make(answer, syn, accepted.mss, wscale, stamps.map(|s| s.0))?;
    // there are both: a socket that is closed sooner has not said anything to its host
    [&client, &server].into_iter().try_for_each(|s| Repair::Off.set(s))?;
    Ok(Pair { client, server })
}

/// Has the client's socket of [`established_sockets`] go on without a record, which would have kept its clock from running behind
/// that of the server's `answer`. Call it before the socket says anything.
pub fn without_record(client: &OwnedFd, answer: &Handshake) -> io::Result<()> {
    let Some(tsval) = answer.offer().tsval else { return Ok(()) };
    Repair::On.set(client)?;
    set_clock(client, tsval)?;
    Repair::Off.set(client)
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

    /// The same connection as the receiver's leg, as for a transparent connection.
    fn onward(s: &Handshake) -> Tuple {
        Tuple { remote: s.leg.local, local: s.leg.remote }
    }

    #[test]
    fn from_our_own_address_to_the_server() {
        let s = syn(&[2, 4, 5, 180]);
        let out = Tuple { remote: ([198, 51, 100, 7], 8080).into(), local: ([198, 51, 100, 1], 20_000).into() };
        let p = s.packet(&out).expect("it has far to go");
        assert_eq!((&p[12..16], &p[16..20]), (&[198, 51, 100, 1][..], &[198, 51, 100, 7][..]));
        assert_eq!((&p[20..22], &p[22..24]), (&20_000u16.to_be_bytes()[..], &8080u16.to_be_bytes()[..]));
        assert_eq!(p[24..28], [0, 0, 0, 7], "the client's number");
        assert_eq!(fold(sum(&p[12..]) + 24 + 6), 0xffff, "the checksum is right");
        let v6 = Tuple { remote: ([1; 16], 8080).into(), local: ([2; 16], 20_000).into() };
        assert!(s.packet(&v6).is_none(), "of another family");
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
        let p = s.packet(&onward(&s)).expect("it has far to go");
        assert_eq!(&p[40..], &[1, 1, 1, 1, 3, 3, 7, 1, 1, 1, 4, 2, 1, 1, 1, 1]);
        assert_eq!((p[32], p[33]), (0x90, SYN));
    }

    #[test]
    fn refused_in_the_name_of_the_destination() {
        let mut s = syn(&[]);
        let refused = |s: &Handshake| {
            let p = s.refusal();
            assert_eq!((&p[12..20], &p[20..24]), (&[192, 0, 2, 2, 192, 0, 2, 1][..], &[0, 80, 3, 232][..]));
            assert_eq!(fold(sum(&p[12..]) + 20 + 6), 0xffff, "the checksum is right");
            let word = |at: usize| u32::from_be_bytes(std::array::from_fn(|i| p[at + i]));
            (word(24), word(28), p[33])
        };
        assert_eq!(refused(&s), (0, 8, RST | ACK));
        s.raw.tcp[8..12].copy_from_slice(&9u32.to_be_bytes());
        s.raw.tcp[13] = ACK;
        assert_eq!(refused(&Handshake::new(s.raw)), (9, 0, RST), "exactly what the client expects next");
    }

    #[test]
    fn the_hosts_agree_on_ecn_and_not_on_accecn() {
        let passed = |ae: u8, flags: u8| {
            let mut s = syn(&[]);
            s.raw.tcp[12] |= ae;
            s.raw.tcp[13] = flags;
            let p = s.packet(&onward(&s)).expect("it has far to go");
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
        let p = s.packet(&onward(&s)).expect("it has far to go");
        assert_eq!((p.len(), p[0], p[8], p[33]), (44, 0x45, 63, SYN));
        assert_eq!(u16::from_be_bytes([p[2], p[3]]), 44);
        assert_eq!(fold(sum(&p[12..]) + 24 + 6), 0xffff, "the checksum covers what is left");
        s.raw.ip[8] = 1;
        assert!(s.packet(&onward(&s)).is_none());
    }
}
