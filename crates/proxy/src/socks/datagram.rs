//! The header of datagrams between a SOCKS client and its relay (RFC 1928, section 7), without I/O:
//! `RSV RSV FRAG ATYP DST.ADDR DST.PORT`, and the data behind it.

use crate::{
    socks::socks5::{ParseError, parse_address},
    target::{Host, Target},
};
use std::net::{IpAddr, SocketAddr};

/// Longest header that we write, in bytes: that of IPv6.
pub const HEADER_MAX: usize = 22;

/// Why a datagram of a client is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DatagramError {
    /// It ends within its header.
    #[error("it ends within its header")]
    Short,
    /// It is a fragment. Relays may drop them all (RFC 1928, section 7), and hosts that use them are not known.
    #[error("fragment {0}")]
    Fragment(u8),
    /// Type of address or name are wrong.
    #[error("{0}")]
    Address(ParseError),
    /// No datagram can be sent to port 0.
    #[error("port 0")]
    Port,
}

/// Returns where a client's datagram is to go, and the length of its header. The reserved bytes are ignored.
pub fn parse(datagram: &[u8]) -> Result<(Target, usize), DatagramError> {
    let &[_, _, fragment, address_type, ..] = datagram else { return Err(DatagramError::Short) };
    if fragment != 0 {
        return Err(DatagramError::Fragment(fragment));
    }
    let address = parse_address(datagram, address_type).map_err(DatagramError::Address)?;
    let (host, at) = address.ok_or(DatagramError::Short)?;
    let &[high, low, ..] = &datagram[at..] else { return Err(DatagramError::Short) };
    match u16::from_be_bytes([high, low]) {
        0 => Err(DatagramError::Port),
        port => Ok((Target { host, port }, at + 2)),
    }
}

/// Header of a datagram from `source` to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    bytes: [u8; HEADER_MAX],
    length: usize,
}

impl Header {
    /// Encodes the header.
    pub fn new(source: SocketAddr) -> Header {
        let mut bytes = [0; HEADER_MAX];
        let port = source.port().to_be_bytes();
        let length = match source.ip().to_canonical() {
            IpAddr::V4(ip) => {
                bytes[3] = 1;
                bytes[4..8].copy_from_slice(&ip.octets());
                bytes[8..10].copy_from_slice(&port);
                10
            }
            IpAddr::V6(ip) => {
                bytes[3] = 4;
                bytes[4..20].copy_from_slice(&ip.octets());
                bytes[20..22].copy_from_slice(&port);
                HEADER_MAX
            }
        };
        Header { bytes, length }
    }

    /// Returns its bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// The port from which a client says that it sends its datagrams (RFC 1928, section 6), if that can be true. Clients behind
/// NAT name addresses that nobody else sees; their first datagram tells.
pub fn announced_port(target: &Target, client: IpAddr) -> Option<u16> {
    let is_its = match target.host {
        Host::Ip(ip) => ip.is_unspecified() || ip == client.to_canonical(),
        Host::Name(_) => false,
    };
    Some(target.port).filter(|port| is_its && *port != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(datagram: &[u8]) -> Result<(String, usize), DatagramError> {
        parse(datagram).map(|(target, used)| (target.to_string(), used))
    }

    #[test]
    fn every_type_of_address() {
        for (header, want) in [
            (&b"\0\0\0\x01\xc0\x00\x02\x01\x00\x35"[..], "192.0.2.1:53"),
            (b"\xff\xff\0\x01\xc0\x00\x02\x01\x00\x35", "192.0.2.1:53"),
            (b"\0\0\0\x03\x0bExample.org\x00\x35", "example.org:53"),
            (b"\0\0\0\x04\x20\x01\x0d\xb8\0\0\0\0\0\0\0\0\0\0\0\x01\x01\xbb", "[2001:db8::1]:443"),
            (b"\0\0\0\x04\0\0\0\0\0\0\0\0\0\0\xff\xff\xc0\x00\x02\x01\x01\xbb", "192.0.2.1:443"),
        ] {
            for cut in 0..header.len() {
                assert_eq!(read(&header[..cut]), Err(DatagramError::Short), "{want}, cut at {cut}");
            }
            for data in [&b""[..], b"data"] {
                assert_eq!(read(&[header, data].concat()), Ok((want.into(), header.len())));
            }
        }
    }

    #[test]
    fn what_is_dropped() {
        assert_eq!(read(b"\0\0\x01\x01\xc0\x00\x02\x01\x00\x35"), Err(DatagramError::Fragment(1)));
        assert_eq!(read(b"\0\0\x80\x07"), Err(DatagramError::Fragment(0x80)), "whatever else is wrong");
        assert_eq!(read(b"\0\0\0\x01\xc0\x00\x02\x01\x00\x00"), Err(DatagramError::Port));
        assert_eq!(read(b"\0\0\0\x02\xc0\x00"), Err(DatagramError::Address(ParseError::AddressType(2))));
        assert_eq!(read(b"\0\0\0\x03\x00\x00\x35"), Err(DatagramError::Address(ParseError::Name)));
    }

    #[test]
    fn headers_of_replies_are_read_as_the_same() {
        for source in ["192.0.2.1:53", "[2001:db8::1]:443"] {
            let header = Header::new(source.parse().unwrap());
            assert_eq!(read(header.as_bytes()), Ok((source.into(), header.as_bytes().len())));
        }
        let mapped = Header::new("[::ffff:192.0.2.1]:53".parse().unwrap());
        assert_eq!(read(mapped.as_bytes()), Ok(("192.0.2.1:53".into(), 10)));
    }

    #[test]
    fn ports_that_clients_announce() {
        let client = "192.0.2.7".parse().unwrap();
        for (target, want) in [
            ("0.0.0.0:5000", Some(5000)),
            ("[::]:5000", Some(5000)),
            ("192.0.2.7:5000", Some(5000)),
            ("10.0.0.1:5000", None),
            ("name:5000", None),
        ] {
            assert_eq!(announced_port(&target.parse().unwrap(), client), want, "{target}");
        }
        let unknown = Target { host: Host::Ip([0, 0, 0, 0].into()), port: 0 };
        assert_eq!(announced_port(&unknown, client), None);
    }
}
