//! A probe of the way to a translucent proxy and back: do packets in a tunnel pass?

use crate::tpot::TPOT_UDP_PORT;
use crate::{
    handshake::{ACK, RST, TTL, complete, fold, sum},
    kernel::random,
};
use nix::{
    errno::Errno,
    libc,
    sys::{
        socket::{MsgFlags, SockaddrStorage, recv, sendto, setsockopt, sockopt::ReceiveTimeout},
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

/// Returns whether tunnelled packets pass between this host and a translucent proxy, both ways. `server`: a destination whose
/// connections the proxy intercepts. A segment of a connection that does not exist is sent in a tunnel, up to three times in
/// three seconds, and the proxy answers with an RST in the tunnel. `in_udp`: IP in UDP instead of IP in IP. Fails if the addresses
/// are not of one family, without a route, or without CAP_NET_RAW.
pub fn tpot_probe(proxy: IpAddr, server: SocketAddr, in_udp: bool) -> io::Result<bool> {
    if proxy.is_ipv4() != server.is_ipv4() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the proxy and the server have different IP versions"));
    }
    let any: IpAddr = if proxy.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let route = UdpSocket::bind((any, 0))?;
    route.connect((proxy, 9))?; // sends nothing
    // The port is nobody else's meanwhile.
    let port = TcpListener::bind((route.local_addr()?.ip(), 0))?;
    let (own, ack) = (port.local_addr()?, random() as u32);
    let header = if in_udp { UDP_HEADER } else { 0 };
    let (tunnel, inner) = (tunnel_socket(proxy.is_ipv4(), in_udp)?, segment(own, server, ack));
    let probe = if in_udp { udp(own.port(), &inner) } else { inner };
    for _ in 0..TIMES {
        match sendto(tunnel.as_raw_fd(), &probe, &SockaddrStorage::from(SocketAddr::new(proxy, 0)), MsgFlags::empty()) {
            Ok(_) => {}
            Err(Errno::EPERM) => return Ok(false), // a firewall of this host drops it
            Err(e) => return Err(e.into()),
        }
        let end = Instant::now() + WAIT;
        let mut packet = [0; 256];
        while let Some(left) =
            end.checked_duration_since(Instant::now()).filter(|left| *left > Duration::from_millis(1))
        {
            let limit = TimeVal::new(left.as_secs() as _, left.subsec_micros() as _);
            setsockopt(&tunnel, ReceiveTimeout, &limit)?;
            match recv(tunnel.as_raw_fd(), &mut packet, MsgFlags::empty()) {
                Ok(n) if is_answer(&packet[..n], header, own, server, ack) => return Ok(true),
                Ok(_) | Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => break,
                Err(e) => return Err(e.into()),
            }
        }
    }
    Ok(false)
}

/// Opens a socket for IP in IP, or for UDP with its header: it gets answers whoever has the port.
fn tunnel_socket(v4: bool, in_udp: bool) -> io::Result<OwnedFd> {
    let (family, protocol) =
        if v4 { (libc::AF_INET, libc::IPPROTO_IPIP) } else { (libc::AF_INET6, libc::IPPROTO_IPV6) };
    let protocol = if in_udp { libc::IPPROTO_UDP } else { protocol };
    // SAFETY: no memory is passed.
    let fd = Errno::result(unsafe { libc::socket(family, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol) })?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Puts a packet into UDP, without a checksum.
fn udp(source: u16, packet: &[u8]) -> Vec<u8> {
    let length = (UDP_HEADER + packet.len()) as u16;
    let header = [source, TPOT_UDP_PORT, length, 0].map(u16::to_be_bytes);
    [header.as_flattened(), packet].concat()
}

/// Returns the inner packet: an acknowledgement.
fn segment(from: SocketAddr, to: SocketAddr, ack: u32) -> Vec<u8> {
    let mut tcp = vec![0; 20];
    tcp[..2].copy_from_slice(&from.port().to_be_bytes());
    tcp[2..4].copy_from_slice(&to.port().to_be_bytes());
    tcp[8..12].copy_from_slice(&ack.to_be_bytes());
    tcp[12..14].copy_from_slice(&[5 << 4, ACK]);
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

/// Is this the RST of the probe? The kernel gives the outer header of IPv4 as well, and that of IPv6 not. `header`: bytes of UDP.
fn is_answer(packet: &[u8], header: usize, own: SocketAddr, server: SocketAddr, ack: u32) -> bool {
    let inner = packet.get(header + if own.is_ipv4() { 20 } else { 0 }..);
    let want = segment(server, own, 0);
    let (addresses, tcp) = if own.is_ipv4() { (12..20, 20) } else { (8..40, 40) };
    inner.filter(|inner| inner.len() >= tcp + 20).is_some_and(|inner| {
        inner[addresses.clone()] == want[addresses]
            && inner[tcp..tcp + 4] == want[tcp..tcp + 4]
            && inner[tcp + 4..tcp + 8] == ack.to_be_bytes()
            && inner[tcp + 13] == RST
    })
}
