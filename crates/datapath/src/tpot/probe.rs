//! Probes of the way to a translucent proxy and back: do packets in a tunnel pass, and SYNs that ask?
//!
//! Answers are read by a packet socket, ahead of this host's firewall, as the programs of a host that asks read them.

use crate::tpot::proxy::{TPOT_EXID, TPOT_UDP_PORT};
use crate::{
    checksum::{fold, sum},
    handshakes::handshake::{ACK, RST, TTL, complete},
    names::MARK_PLAIN,
    random::random,
};
use nix::{
    errno::Errno,
    libc,
    sys::{
        socket::{
            MsgFlags, SockaddrStorage, recv, sendto, setsockopt,
            sockopt::{Mark, ReceiveTimeout},
        },
        time::TimeVal,
    },
};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    time::{Duration, Instant},
};

/// Segments that are sent, since one or two may be lost.
const TIMES: usize = 3;
/// Time to wait for an answer to each.
const WAIT: Duration = Duration::from_secs(1);
/// Bytes of a header of UDP (RFC 768).
const UDP_HEADER: usize = 8;

const SYN: u8 = 0x02;
/// Flags that say what a segment is: SYN, RST and ACK.
const KIND: u8 = SYN | RST | ACK;

/// What becomes of a SYN that asks for a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TpotAnswer {
    /// The proxy answers it, in a tunnel.
    Proxy,
    /// The server itself answers it, or refuses.
    Server,
    /// Nobody does.
    Nobody,
}

/// What becomes of packets in a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TpotPassage {
    /// They reach the proxy, and its answers this host.
    Passes,
    /// There is no answer.
    Lost,
    /// A firewall rule of this host drops the probe. It would not see the packets of connections.
    Unsent,
}

/// Where a probe begins: our address, and a port that is nobody else's meanwhile.
struct Start {
    own: SocketAddr,
    _port: TcpListener,
    answers: OwnedFd,
}

impl Start {
    fn towards(proxy: IpAddr, server: SocketAddr) -> io::Result<Start> {
        if proxy.is_ipv4() != server.is_ipv4() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the proxy and the server have different IP versions",
            ));
        }
        let any: IpAddr = if proxy.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let route = UdpSocket::bind((any, 0))?;
        route.connect((proxy, 9))?; // sends nothing
        let port = TcpListener::bind((route.local_addr()?.ip(), 0))?;
        let protocol = if proxy.is_ipv4() { libc::ETH_P_IP } else { libc::ETH_P_IPV6 } as u16;
        let answers = open(libc::AF_PACKET, libc::SOCK_DGRAM, protocol.to_be().into())?;
        Ok(Start { own: port.local_addr()?, _port: port, answers })
    }

    /// Returns what `read` makes of the first packet that it knows, which is given with its IP header. `None` after [`WAIT`].
    fn hear<T>(&self, read: impl Fn(&[u8]) -> Option<T>) -> io::Result<Option<T>> {
        let end = Instant::now() + WAIT;
        let mut packet = [0; 256];
        while let Some(left) =
            end.checked_duration_since(Instant::now()).filter(|left| *left > Duration::from_millis(1))
        {
            let limit = TimeVal::new(left.as_secs() as _, left.subsec_micros() as _);
            setsockopt(&self.answers, ReceiveTimeout, &limit)?;
            match recv(self.answers.as_raw_fd(), &mut packet, MsgFlags::empty()) {
                Ok(n) => {
                    if let Some(heard) = read(&packet[..n]) {
                        return Ok(Some(heard));
                    }
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => break,
                Err(e) => return Err(e.into()),
            }
        }
        Ok(None)
    }
}

fn open(family: libc::c_int, kind: libc::c_int, protocol: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: no memory is passed.
    let fd = Errno::result(unsafe { libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol) })?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Finds out what becomes of packets in tunnels between this host and a translucent proxy. `server`: a destination whose
/// connections the proxy intercepts, to which nothing is sent. A segment of a connection that does not exist is sent in a tunnel,
/// up to three times in three seconds, and the proxy answers with an RST in the tunnel. `in_udp`: IP in UDP instead of IP in IP.
/// Fails if the addresses are not of one family, without a route, or without CAP_NET_RAW.
pub fn tpot_probe(proxy: IpAddr, server: SocketAddr, in_udp: bool) -> io::Result<TpotPassage> {
    for _ in 0..TIMES {
        // each from another port: the proxy does not answer as long as it knows a connection of that port, such as that of a SYN
        // that has asked
        let start = Start::towards(proxy, server)?;
        let (own, ack) = (start.own, random() as u32);
        let inner = segment(own, server, 0, ack, ACK, &[]);
        let is_reset = |packet: &[u8]| {
            let tunnelled = unwrap(packet, proxy)?;
            let answer = read(tunnelled, server, own)?;
            (answer.flags & KIND == RST && answer.seq == ack).then_some(())
        };
        match send_in_tunnel(proxy, own.port(), &inner, in_udp) {
            Ok(()) => {}
            Err(Errno::EPERM) => return Ok(TpotPassage::Unsent),
            Err(e) => return Err(e.into()),
        }
        if start.hear(is_reset)?.is_some() {
            return Ok(TpotPassage::Passes);
        }
    }
    Ok(TpotPassage::Lost)
}

/// Finds out what becomes of a SYN that asks for a proxy, with the usual identifier. It is sent to the server up to three times in
/// three seconds, and each answer to it is reset. Fails like [`tpot_probe`].
pub fn tpot_ask(proxy: IpAddr, server: SocketAddr) -> io::Result<TpotAnswer> {
    let start = Start::towards(proxy, server)?;
    let (own, isn) = (start.own, random() as u32);
    let [high, low] = TPOT_EXID.to_be_bytes();
    const VERSION: u8 = 1;
    const HOPS: u8 = 1;
    const CAN_UDP: u8 = 1;
    let options = [2, 4, 5, 0xb4, 253, 8, high, low, VERSION, HOPS, 0, CAN_UDP]; // MSS, and the option
    let syn = segment(own, server, isn, 0, SYN, &options);
    let family = if own.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let socket = open(family, libc::SOCK_RAW, libc::IPPROTO_RAW)?;
    setsockopt(&socket, Mark, &MARK_PLAIN)?; // the programs of this host leave it alone
    let acks = |segment: Segment| segment.flags & ACK != 0 && segment.ack == isn.wrapping_add(1);
    let answer = |packet: &[u8]| {
        let tunnelled = unwrap(packet, proxy).and_then(|inner| read(inner, server, own)).filter(|s| acks(*s));
        let direct = || read(packet, server, own).filter(|s| acks(*s)).map(|_| TpotAnswer::Server);
        tunnelled.map(|_| TpotAnswer::Proxy).or_else(direct)
    };
    for _ in 0..TIMES {
        let to = SockaddrStorage::from(SocketAddr::new(server.ip(), 0));
        sendto(socket.as_raw_fd(), &syn, &to, MsgFlags::empty())?;
        let Some(answer) = start.hear(answer)? else { continue };
        if answer == TpotAnswer::Proxy {
            // the proxy forgets the connection; the kernel resets the server's own answer by itself
            let reset = segment(own, server, isn.wrapping_add(1), 0, RST, &[]);
            let _ = send_in_tunnel(proxy, own.port(), &reset, false); // otherwise its handshake times out
        }
        return Ok(answer);
    }
    Ok(TpotAnswer::Nobody)
}

/// Sends a packet in a tunnel.
fn send_in_tunnel(proxy: IpAddr, port: u16, inner: &[u8], in_udp: bool) -> Result<(), Errno> {
    let (family, protocol) = match proxy {
        IpAddr::V4(_) => (libc::AF_INET, libc::IPPROTO_IPIP),
        IpAddr::V6(_) => (libc::AF_INET6, libc::IPPROTO_IPV6),
    };
    let protocol = if in_udp { libc::IPPROTO_UDP } else { protocol };
    let socket =
        open(family, libc::SOCK_RAW, protocol).map_err(|e| e.raw_os_error().map_or(Errno::EIO, Errno::from_raw))?;
    let packet = if in_udp { udp(port, inner) } else { inner.to_vec() };
    let to = SockaddrStorage::from(SocketAddr::new(proxy, 0));
    sendto(socket.as_raw_fd(), &packet, &to, MsgFlags::empty()).map(drop)
}

/// Puts a packet into UDP, without a checksum.
fn udp(source: u16, packet: &[u8]) -> Vec<u8> {
    let length = (UDP_HEADER + packet.len()) as u16;
    let header = [source, TPOT_UDP_PORT, length, 0].map(u16::to_be_bytes);
    [header.as_flattened(), packet].concat()
}

/// Returns an IP packet with a TCP header. The length of the options is a multiple of four.
fn segment(from: SocketAddr, to: SocketAddr, seq: u32, ack: u32, flags: u8, options: &[u8]) -> Vec<u8> {
    let mut tcp = vec![0; 20];
    tcp[..2].copy_from_slice(&from.port().to_be_bytes());
    tcp[2..4].copy_from_slice(&to.port().to_be_bytes());
    tcp[4..8].copy_from_slice(&seq.to_be_bytes());
    tcp[8..12].copy_from_slice(&ack.to_be_bytes());
    tcp[12..14].copy_from_slice(&[((20 + options.len()) as u8 / 4) << 4, flags]);
    tcp[14..16].copy_from_slice(&u16::MAX.to_be_bytes());
    tcp.extend(options);
    match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let head = [0x45, 0, 0, 0, 0, 0, 0x40, 0, TTL, libc::IPPROTO_TCP as u8, 0, 0];
            let mut packet = complete([&head[..], &from.octets(), &to.octets()].concat(), tcp);
            let check = !fold(sum(&packet[..20]));
            packet[10..12].copy_from_slice(&check.to_be_bytes());
            packet
        }
        (from, to) => {
            let v6 = |ip| match ip {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => v6,
            };
            let head = [0x60, 0, 0, 0, 0, 0, libc::IPPROTO_TCP as u8, TTL];
            complete([&head[..], &v6(from).octets(), &v6(to).octets()].concat(), tcp)
        }
    }
}

/// What of a segment matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    seq: u32,
    ack: u32,
    flags: u8,
}

/// Reads an IP packet's source, protocol and content. `None` for other versions, and for IPv4 options.
fn parse(packet: &[u8]) -> Option<(IpAddr, IpAddr, i32, &[u8])> {
    match packet.first()? {
        0x45 => {
            let address = |at: usize| packet.get(at..)?.first_chunk::<4>().map(|b| IpAddr::from(*b));
            Some((address(12)?, address(16)?, i32::from(packet[9]), packet.get(20..)?))
        }
        first if first >> 4 == 6 => {
            let address = |at: usize| packet.get(at..)?.first_chunk::<16>().map(|b| IpAddr::from(*b));
            Some((address(8)?, address(24)?, i32::from(packet[6]), packet.get(40..)?))
        }
        _ => None,
    }
}

/// Returns the packet in a tunnel from `proxy`, of either kind.
fn unwrap(packet: &[u8], proxy: IpAddr) -> Option<&[u8]> {
    let (from, _, protocol, content) = parse(packet)?;
    match protocol {
        libc::IPPROTO_IPIP | libc::IPPROTO_IPV6 if from == proxy => Some(content),
        libc::IPPROTO_UDP if from == proxy && content.get(2..4)? == TPOT_UDP_PORT.to_be_bytes() => {
            content.get(UDP_HEADER..)
        }
        _ => None,
    }
}

/// Reads a segment between these two.
fn read(packet: &[u8], from: SocketAddr, to: SocketAddr) -> Option<Segment> {
    let (source, destination, protocol, tcp) = parse(packet)?;
    let word = |at: usize| tcp.get(at..)?.first_chunk().map(|b| u32::from_be_bytes(*b));
    let ports = (u32::from(from.port()) << 16) | u32::from(to.port());
    let is_it = (source, destination, protocol, word(0)?) == (from.ip(), to.ip(), libc::IPPROTO_TCP, ports);
    let segment = Segment { seq: word(4)?, ack: word(8)?, flags: *tcp.get(13)? };
    is_it.then_some(segment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_is_read() {
        for (own, server, proxy) in [
            ("192.0.2.1:4000", "198.51.100.7:80", "192.0.2.254"),
            ("[2001:db8::1]:4000", "[2001:db8:1::7]:80", "2001:db8::fe"),
        ] {
            let (own, server): (SocketAddr, SocketAddr) = (own.parse().unwrap(), server.parse().unwrap());
            let proxy: IpAddr = proxy.parse().unwrap();
            let inner = segment(server, own, 7, 9, SYN | ACK, &[2, 4, 5, 0xb4]);
            let want = Some(Segment { seq: 7, ack: 9, flags: SYN | ACK });
            assert_eq!((read(&inner, server, own), read(&inner, own, server)), (want, None));
            for (protocol, content) in [(4, inner.clone()), (17, udp(5000, &inner))] {
                let protocol = if own.is_ipv6() && protocol == 4 { 41 } else { protocol };
                let mut outer = segment(SocketAddr::new(proxy, 0), own, 0, 0, 0, &[]);
                outer.truncate(if own.is_ipv4() { 20 } else { 40 });
                outer[if own.is_ipv4() { 9 } else { 6 }] = protocol;
                outer.extend(content);
                assert_eq!(unwrap(&outer, proxy).and_then(|inner| read(inner, server, own)), want);
                assert_eq!(unwrap(&outer, own.ip()), None, "from another host");
                for n in 0..outer.len() {
                    let cut = unwrap(&outer[..n], proxy).and_then(|inner| read(inner, server, own));
                    assert!(cut.is_none_or(|segment| Some(segment) == want), "{n} bytes");
                }
            }
        }
    }
}
