//! SOCKS version 5 (RFC 1928) with user name and password (RFC 1929): the messages, without I/O.
//!
//! Every parser takes the bytes that have arrived so far. It returns `Ok(None)` as long as the message is incomplete,
//! or the message and the number of bytes it took. Nothing in this module waits, allocates without bound or panics.

use crate::{
    target::{Host, Target},
    users::Credentials,
};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

/// First byte of every client message except that with the password (RFC 1928, section 3).
pub const VERSION: u8 = 5;
/// The method GSSAPI (RFC 1961).
const GSSAPI: u8 = 1;
/// Version of the password sub-negotiation (RFC 1929, section 2).
const PASSWORD_VERSION: u8 = 1;

/// Error in a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// The first byte is not the expected version.
    #[error("version {0} where another was expected")]
    Version(u8),
    /// The address type is not one of RFC 1928, section 5.
    #[error("unknown address type {0}")]
    AddressType(u8),
    /// The domain name is empty or not a name.
    #[error("bad domain name")]
    Name,
    /// User name or password is empty (RFC 1929 gives both a length of 1 to 255).
    #[error("empty user name or password")]
    EmptyCredential,
}

/// Result of a parser: `None` if the message is incomplete, or the message and its length in bytes.
pub type Parsed<T> = Result<Option<(T, usize)>, ParseError>;

/// The client's first message, reduced to the supported methods (RFC 1928, section 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Greeting {
    /// The client offers to go without authentication.
    pub no_auth: bool,
    /// The client offers user name and password.
    pub password: bool,
    /// The client offers GSSAPI (RFC 1961), which is not supported.
    pub gssapi: bool,
}

/// An authentication method (RFC 1928, section 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// No authentication required.
    NoAuth = 0x00,
    /// User name and password.
    Password = 0x02,
    /// None of the offered methods is acceptable; the client must close.
    NoneAcceptable = 0xff,
}

/// Command of a request (RFC 1928, section 4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Connect to the target.
    Connect,
    /// Accept one connection.
    Bind,
    /// Relay datagrams.
    UdpAssociate,
    /// Anything else.
    Other(u8),
}

/// The client's request (RFC 1928, section 4).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Requested command.
    pub command: Command,
    /// Requested target.
    pub target: Target,
}

/// The outcome of a request (RFC 1928, section 6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// Connected.
    Succeeded = 0,
    /// Another error.
    GeneralFailure = 1,
    /// The access rules deny the request.
    NotAllowed = 2,
    /// No route to the network.
    NetworkUnreachable = 3,
    /// No route to the host, or no such name.
    HostUnreachable = 4,
    /// The host refused the connection.
    ConnectionRefused = 5,
    /// "TTL expired": no answer in time. The RFC has no code for a timeout; other proxies use this one.
    TtlExpired = 6,
    /// Unknown commands, and those that the listener does not serve.
    CommandNotSupported = 7,
    /// Unknown address type.
    AddressTypeNotSupported = 8,
}

impl Reply {
    /// Returns the code that best describes why a connection could not be established.
    pub fn from_io(e: &io::Error) -> Reply {
        match e.kind() {
            io::ErrorKind::ConnectionRefused => Reply::ConnectionRefused,
            io::ErrorKind::HostUnreachable => Reply::HostUnreachable,
            io::ErrorKind::NetworkUnreachable => Reply::NetworkUnreachable,
            io::ErrorKind::TimedOut => Reply::TtlExpired,
            // EPERM and EACCES from connect(2): a local packet filter denies it, which is a rule like any other.
            io::ErrorKind::PermissionDenied => Reply::NotAllowed,
            _ => Reply::GeneralFailure,
        }
    }
}

/// Parses `VER NMETHODS METHODS`.
pub fn parse_greeting(input: &[u8]) -> Parsed<Greeting> {
    let Some(&version) = input.first() else { return Ok(None) };
    if version != VERSION {
        return Err(ParseError::Version(version));
    }
    let Some((methods, used)) = counted(input, 1) else { return Ok(None) };
    let offers = |m: Method| methods.contains(&(m as u8));
    let (no_auth, password) = (offers(Method::NoAuth), offers(Method::Password));
    Ok(Some((Greeting { no_auth, password, gssapi: methods.contains(&GSSAPI) }, used)))
}

/// Parses `VER ULEN UNAME PLEN PASSWD` (RFC 1929, section 2).
pub fn parse_credentials(input: &[u8]) -> Parsed<Credentials> {
    let Some(&version) = input.first() else { return Ok(None) };
    if version != PASSWORD_VERSION {
        return Err(ParseError::Version(version));
    }
    let Some((name, after_name)) = counted(input, 1) else { return Ok(None) };
    if name.is_empty() {
        return Err(ParseError::EmptyCredential);
    }
    let Some((password, used)) = counted(input, after_name) else { return Ok(None) };
    if password.is_empty() {
        return Err(ParseError::EmptyCredential);
    }
    Ok(Some((Credentials { name: name.to_vec(), password: password.to_vec() }, used)))
}

/// Parses `VER CMD RSV ATYP DST.ADDR DST.PORT`. RSV is ignored.
pub fn parse_request(input: &[u8]) -> Parsed<Request> {
    let Some(&version) = input.first() else { return Ok(None) };
    if version != VERSION {
        return Err(ParseError::Version(version));
    }
    let &[_, command, _, address_type, ..] = input else { return Ok(None) };
    let command = match command {
        1 => Command::Connect,
        2 => Command::Bind,
        3 => Command::UdpAssociate,
        other => Command::Other(other),
    };
    let Some((host, at)) = parse_address(input, address_type)? else { return Ok(None) };
    let Some(port) = array::<2>(input, at) else { return Ok(None) };
    let target = Target { host, port: u16::from_be_bytes(port) };
    Ok(Some((Request { command, target }, at + 2)))
}

/// Parses the address at offset 4 (RFC 1928, section 5); the second value is the offset after it.
pub(crate) fn parse_address(input: &[u8], address_type: u8) -> Parsed<Host> {
    let ip = |ip: IpAddr, end| Some((Host::Ip(ip.to_canonical()), end));
    Ok(match address_type {
        1 => array::<4>(input, 4).and_then(|a| ip(Ipv4Addr::from(a).into(), 8)),
        3 => match counted(input, 4) {
            Some((name, end)) => Some((Host::from_name(name).map_err(|_| ParseError::Name)?, end)),
            None => None,
        },
        4 => array::<16>(input, 4).and_then(|a| ip(Ipv6Addr::from(a).into(), 20)),
        other => return Err(ParseError::AddressType(other)),
    })
}

/// Returns the bytes after the length byte at `at`, and the offset after them.
fn counted(input: &[u8], at: usize) -> Option<(&[u8], usize)> {
    let start = at + 1;
    let end = start + usize::from(*input.get(at)?);
    Some((input.get(start..end)?, end))
}

fn array<const N: usize>(input: &[u8], at: usize) -> Option<[u8; N]> {
    input.get(at..at + N)?.try_into().ok()
}

/// Encodes `VER METHOD`, the answer to the greeting.
pub fn encode_method(method: Method) -> [u8; 2] {
    [VERSION, method as u8]
}

/// Encodes `VER STATUS`, the answer to the password; any status but 0 is a failure (RFC 1929, section 2).
pub fn encode_auth_status(ok: bool) -> [u8; 2] {
    [PASSWORD_VERSION, u8::from(!ok)]
}

/// Encodes `VER REP RSV ATYP BND.ADDR BND.PORT` (RFC 1928, section 6). `bound` is our own
/// address on the server's leg; failures have 0.0.0.0:0.
pub fn encode_reply(reply: Reply, bound: Option<SocketAddr>) -> Vec<u8> {
    let bound = bound.unwrap_or(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0));
    let mut out = vec![VERSION, reply as u8, 0];
    match bound.ip().to_canonical() {
        IpAddr::V4(a) => {
            out.push(1);
            out.extend(a.octets());
        }
        IpAddr::V6(a) => {
            out.push(4);
            out.extend(a.octets());
        }
    }
    out.extend(bound.port().to_be_bytes());
    out
}

/// Encodes a success with a name of 255 bytes at most: the answer to RESOLVE_PTR, an extension of Tor.
pub fn encode_name(name: &str) -> Vec<u8> {
    let name = &name.as_bytes()[..name.len().min(255)];
    [&[VERSION, Reply::Succeeded as u8, 0, 3, name.len() as u8], name, &[0, 0]].concat()
}

#[cfg(test)]
#[path = "socks5_tests.rs"]
mod tests;
