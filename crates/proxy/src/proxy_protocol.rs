//! The PROXY protocol, versions 1 and 2: what a proxy before us says of the client, and what we say to servers
//! (HAProxy's `doc/proxy-protocol.txt`; the sections below are its).
//!
//! A header is believed only if it comes from a network that is trusted, and there it has to come: whether a
//! connection begins with one is never guessed (section 2). From then on, the source it names is the client for rules,
//! limits, logs and lists. TLVs are skipped, a checksum (PP2_TYPE_CRC32C) among them.

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

/// The longest header of version 1, its CRLF included (section 2.1).
const V1_MAX: usize = 107;
/// The longest header of version 2 that is taken. 65551 bytes are possible (section 2.2); what programs add to the
/// addresses, names of certificates above all, takes some hundred.
const V2_MAX: usize = 4096;
/// Signature, version and command, family and protocol, length (section 2.2).
const V2_FIXED: usize = 16;

/// A version of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// A line of text.
    V1,
    /// Binary.
    V2,
}

/// What a listener is told about it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProxyProtocol {
    /// Connections from here begin with a header, of either version. Empty: none does.
    pub from: Vec<Prefix>,
    /// Refuse connections from elsewhere; otherwise these are from clients themselves.
    pub required: bool,
    /// What is sent to servers before anything else; not to those of pools, whose connections clients share.
    pub send: Option<Version>,
}

/// Source and destination of the connection that a proxy before us serves.
pub type Ends = (SocketAddr, SocketAddr);

/// Why something is no header.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// It begins like nothing the protocol knows.
    #[error("no PROXY header, although one is expected from this address")]
    Missing,
    /// No end within the length that is allowed.
    #[error("a PROXY header of more than {0} bytes")]
    TooLong(usize),
    /// A line of version 1 that is none.
    #[error("bad PROXY header of version 1: {0}")]
    V1(String),
    /// A block of version 2 that is none.
    #[error("bad PROXY header of version 2: {0}")]
    V2(String),
}

/// Reads a header, and how long it is; `None` if more has to come. Without [`Ends`], the proxy speaks for itself, or
/// knows no addresses that could be used: LOCAL, UNKNOWN, UNSPEC and UNIX.
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
        // The parser takes "+80" for a port.
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
    // Of LOCAL only the length counts.
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

/// The header that names these addresses; of different families: the one that names none.
pub fn encode(version: Version, (source, destination): Ends) -> io::Result<Vec<u8>> {
    // A socket of both families has IPv4 addresses in their IPv6 form.
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

    /// Reads the header, if there has to be one, and lets the leg know who the client is.
    pub(crate) async fn receive(
        &self,
        client: &mut Leg,
        buffer: &mut HandshakeBuffer,
        limit: Duration,
    ) -> Result<(), Fault> {
        if !self.expects(client.remote().ip()) {
            return if self.required { Err(Fault::Denied(Denied::Untrusted)) } else { Ok(()) };
        }
        let header = timeout(limit, buffer.message_within(V2_MAX, client, parse)).await;
        let ends =
            header.map_err(|_| Fault::Timeout(Step::Handshake))?.map_err(|e| Fault::BadRequest(e.to_string()))?;
        if let Some((source, destination)) = ends {
            client.announce(source, destination);
        }
        Ok(())
    }

    /// Tells a server that was just connected to who the client is. Does not wait: new sockets have room for it.
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
