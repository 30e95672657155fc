//! The PROXY protocol, versions 1 and 2: client addresses from proxies in front of us, and to
//! servers (HAProxy's `doc/proxy-protocol.txt`; section numbers refer to it).
//!
//! A header is accepted only from trusted networks, and there it is mandatory: the protocol forbids
//! guessing whether a connection begins with one (section 2). The source address in the header is then the
//! client for rules, limits, logs and lists. TLVs are skipped, including a checksum (PP2_TYPE_CRC32C).

use crate::{
    access::{Denied, Prefix},
    fault::{Fault, Step},
    handshake_buffer::HandshakeBuffer,
};
use longsplice_engine::Leg;
use ppp::{v1, v2};
use std::{
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};
use tokio::{io::AsyncWriteExt, time::timeout};

/// Maximum length of a version 1 header in bytes, including CRLF (section 2.1).
const V1_MAX: usize = 107;
/// Maximum accepted length of a version 2 header in bytes. 65551 bytes are possible (section
/// 2.2). Programs add some hundred bytes to the addresses, mainly names of certificates.
const V2_MAX: usize = 4096;
/// Length in bytes of signature, version and command, family and protocol, and length field (section 2.2).
const V2_FIXED: usize = 16;

/// A version of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// A line of text.
    V1,
    /// Binary.
    V2,
}

/// Configuration of the protocol for a listener.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProxyProtocol {
    /// Networks whose connections begin with a header of either version. Empty: no headers.
    pub from: Vec<Prefix>,
    /// Whether connections from elsewhere are refused; otherwise they count as direct clients.
    pub required: bool,
    /// Header to send to servers first; not to servers of pools, because clients share those connections.
    pub send: Option<Version>,
}

/// Source and destination of the connection to the proxy in front of us.
pub type Ends = (SocketAddr, SocketAddr);

/// Reason why there is no valid header.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The first bytes are not those of a header.
    #[error("no PROXY header, although one is expected from this address")]
    Missing,
    /// The end is not within the allowed length.
    #[error("a PROXY header of more than {0} bytes")]
    TooLong(usize),
    /// Malformed version 1 line.
    #[error("bad PROXY header of version 1: {0}")]
    V1(String),
    /// Malformed version 2 block.
    #[error("bad PROXY header of version 2: {0}")]
    V2(String),
}

/// Says so if a request cannot be read because it begins with a header that is not expected. `seen`: what has arrived of it.
pub fn explained(seen: &[u8], fault: Fault) -> Fault {
    let begins = |with: &[u8]| seen.starts_with(with) || (seen.len() > 4 && with.starts_with(seen));
    match fault {
        Fault::BadRequest(why) if begins(v2::PROTOCOL_PREFIX) || begins(b"PROXY ") => Fault::BadRequest(format!(
            "a PROXY header from an address that `from` of proxy_protocol does not name ({why})"
        )),
        fault => fault,
    }
}

/// Parses a header. Returns the addresses and the length of the header; `None` if it is incomplete. Without [`Ends`],
/// the proxy opened the connection for itself, or has no usable addresses: LOCAL, UNKNOWN, UNSPEC and UNIX.
pub fn parse(input: &[u8]) -> Result<Option<(Option<Ends>, usize)>, HeaderError> {
    let begins = |with: &[u8]| input.iter().zip(with).all(|(a, b)| a == b);
    if begins(v2::PROTOCOL_PREFIX) {
        parse_v2(input)
    } else if begins(b"PROXY ") {
        parse_v1(input)
    } else {
        Err(HeaderError::Missing)
    }
}

fn parse_v1(input: &[u8]) -> Result<Option<(Option<Ends>, usize)>, HeaderError> {
    let within = &input[..input.len().min(V1_MAX)];
    let Some(end) = within.windows(2).position(|w| w == b"\r\n").map(|at| at + 2) else {
        return if within.len() < V1_MAX { Ok(None) } else { Err(HeaderError::TooLong(V1_MAX)) };
    };
    let line = &input[..end];
    let header = v1::Header::try_from(line).map_err(|e| HeaderError::V1(e.to_string()))?;
    let ends = match header.addresses {
        v1::Addresses::Unknown => None,
        // The parser accepts "+80" as a port.
        _ if line.contains(&b'+') => return Err(HeaderError::V1("a port with a sign".into())),
        v1::Addresses::Tcp4(a) => {
            Some(((a.source_address, a.source_port).into(), (a.destination_address, a.destination_port).into()))
        }
        v1::Addresses::Tcp6(a) => {
            Some(((a.source_address, a.source_port).into(), (a.destination_address, a.destination_port).into()))
        }
    };
    Ok(Some((ends, end)))
}

fn parse_v2(input: &[u8]) -> Result<Option<(Option<Ends>, usize)>, HeaderError> {
    let Some(fixed) = input.get(..V2_FIXED) else { return Ok(None) };
    let end = V2_FIXED + usize::from(u16::from_be_bytes([fixed[14], fixed[15]]));
    if end > V2_MAX {
        return Err(HeaderError::TooLong(V2_MAX));
    }
    let Some(block) = input.get(..end) else { return Ok(None) };
    // In a LOCAL header, only the length matters.
    if fixed[12] == v2::Version::Two as u8 | v2::Command::Local as u8 {
        return Ok(Some((None, end)));
    }
    let header = v2::Header::try_from(block).map_err(|e| HeaderError::V2(e.to_string()))?;
    let ends = match (header.addresses, header.protocol) {
        (v2::Addresses::IPv4(a), v2::Protocol::Stream) => {
            Some(((a.source_address, a.source_port).into(), (a.destination_address, a.destination_port).into()))
        }
        (v2::Addresses::IPv6(a), v2::Protocol::Stream) => {
            Some(((a.source_address, a.source_port).into(), (a.destination_address, a.destination_port).into()))
        }
        (v2::Addresses::Unix(_), v2::Protocol::Stream) | (v2::Addresses::Unspecified, v2::Protocol::Unspecified) => {
            None
        }
        (_, protocol) => return Err(HeaderError::V2(format!("protocol {protocol:?} on a TCP connection"))),
    };
    Ok(Some((ends, end)))
}

/// Encodes a header with these addresses; if their families differ, a header without addresses.
pub fn encode(version: Version, (source, destination): Ends) -> io::Result<Vec<u8>> {
    // A dual-stack socket has IPv4 addresses in IPv6 form.
    let plain = |a: SocketAddr| SocketAddr::new(a.ip().to_canonical(), a.port());
    let ends = (plain(source), plain(destination));
    match version {
        Version::V1 => Ok(v1::Addresses::from(ends).to_string().into_bytes()),
        Version::V2 => {
            let addresses = v2::Addresses::from(ends);
            let protocol = match addresses {
                v2::Addresses::Unspecified => v2::Protocol::Unspecified,
                _ => v2::Protocol::Stream,
            };
            v2::Builder::with_addresses(v2::Version::Two | v2::Command::Proxy, protocol, addresses).build()
        }
    }
}

impl ProxyProtocol {
    /// Whether connections from this address begin with a header.
    pub fn expects(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        self.from.iter().any(|p| p.0.contains(&peer))
    }

    /// Reads the header if one is expected, and sets the client address of the leg.
    pub(crate) async fn receive(
        &self,
        client: &mut Leg,
        buffer: &mut HandshakeBuffer,
        limit: Duration,
    ) -> Result<(), Fault> {
        if !self.expects(client.remote().ip()) {
            return if self.required { Err(Fault::Denied(Denied::Untrusted)) } else { Ok(()) };
        }
        let header = timeout(buffer.left(limit), buffer.message_within(V2_MAX, client, parse)).await;
        let ends =
            header.map_err(|_| Fault::Timeout(Step::Handshake))?.map_err(|e| Fault::BadRequest(e.to_string()))?;
        if let Some((source, destination)) = ends {
            client.announce(source, destination);
        }
        Ok(())
    }

    /// Sends the client address to a server that was just connected. Does not wait: a new socket has room for it.
    pub(crate) async fn send(&self, client: &Leg, server: &mut Leg) -> io::Result<()> {
        match self.send {
            Some(version) => server.write_all(&encode(version, (client.source(), client.destination()))?).await,
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "proxy_protocol_tests.rs"]
mod tests;
