//! SOCKS version 5 (RFC 1928) with user name and password (RFC 1929): the messages, without any I/O.
//!
//! Every parser takes what has arrived so far and answers `Ok(None)` as long as the message is incomplete, or the
//! message and how many bytes of the input it used. Nothing in here waits, allocates without bound or panics.

use crate::target::{Host, Target};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

/// First byte of every client message but the password's (RFC 1928, section 3).
pub const VERSION: u8 = 5;
/// Version of the password sub-negotiation (RFC 1929, section 2).
const PASSWORD_VERSION: u8 = 1;

/// What is wrong with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// The first byte is not the version that has to stand there.
    #[error("version {0} where another was expected")]
    Version(u8),
    /// The address type is none of those of RFC 1928, section 5.
    #[error("unknown address type {0}")]
    AddressType(u8),
    /// The domain name is empty or no name at all.
    #[error("bad domain name")]
    Name,
    /// User name or password is empty (RFC 1929 gives both a length of 1 to 255).
    #[error("empty user name or password")]
    EmptyCredential,
}

/// What a parser returns: nothing yet, or a message and the number of bytes it took.
pub type Parsed<T> = Result<Option<(T, usize)>, ParseError>;

/// The client's first message, reduced to the methods we know (RFC 1928, section 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Greeting {
    /// The client would do without authentication.
    pub no_auth: bool,
    /// The client would send user name and password.
    pub password: bool,
}

/// An authentication method (RFC 1928, section 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// No authentication required.
    NoAuth = 0x00,
    /// User name and password.
    Password = 0x02,
    /// None of the offered methods will do; the client must close.
    NoneAcceptable = 0xff,
}

/// User name and password (RFC 1929, section 2): any bytes but none at all.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// Who.
    pub name: Vec<u8>,
    /// The secret.
    pub password: Vec<u8>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Credentials {{ name: {:?}, .. }}", String::from_utf8_lossy(&self.name))
    }
}

/// What the client wants done (RFC 1928, section 4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// A connection to the target.
    Connect,
    /// A listening socket; not supported.
    Bind,
    /// A UDP relay; not supported.
    UdpAssociate,
    /// Anything else.
    Other(u8),
}

/// The client's request (RFC 1928, section 4).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// What to do.
    pub command: Command,
    /// With whom.
    pub target: Target,
}

/// The outcome of a request (RFC 1928, section 6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// Connected.
    Succeeded = 0,
    /// Something else went wrong.
    GeneralFailure = 1,
    /// The access rules forbid it.
    NotAllowed = 2,
    /// No route to the network.
    NetworkUnreachable = 3,
    /// No answer from the host's network, or no such name.
    HostUnreachable = 4,
    /// The host refused.
    ConnectionRefused = 5,
    /// "TTL expired": no answer in time. The RFC has no code for a time limit; this is the one others use for it.
    TtlExpired = 6,
    /// BIND, UDP ASSOCIATE and unknown commands.
    CommandNotSupported = 7,
    /// An address type that is not known.
    AddressTypeNotSupported = 8,
}

impl Reply {
    /// The code that says best why a connection could not be made.
    pub fn from_io(e: &io::Error) -> Reply {
        match e.kind() {
            io::ErrorKind::ConnectionRefused => Reply::ConnectionRefused,
            io::ErrorKind::HostUnreachable => Reply::HostUnreachable,
            io::ErrorKind::NetworkUnreachable => Reply::NetworkUnreachable,
            io::ErrorKind::TimedOut => Reply::TtlExpired,
            // EPERM and EACCES from connect(2): a local packet filter, which is a rule like any other.
            io::ErrorKind::PermissionDenied => Reply::NotAllowed,
            _ => Reply::GeneralFailure,
        }
    }
}

/// Reads `VER NMETHODS METHODS`.
pub fn parse_greeting(input: &[u8]) -> Parsed<Greeting> {
    let Some(&version) = input.first() else { return Ok(None) };
    if version != VERSION {
        return Err(ParseError::Version(version));
    }
    let Some((methods, used)) = counted(input, 1) else { return Ok(None) };
    let offers = |m: Method| methods.contains(&(m as u8));
    Ok(Some((Greeting { no_auth: offers(Method::NoAuth), password: offers(Method::Password) }, used)))
}

/// Reads `VER ULEN UNAME PLEN PASSWD` (RFC 1929, section 2).
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

/// Reads `VER CMD RSV ATYP DST.ADDR DST.PORT`. RSV is not looked at: nothing depends on it.
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

/// Reads the address at offset 4 (RFC 1928, section 5); the second value is the offset behind it.
fn parse_address(input: &[u8], address_type: u8) -> Parsed<Host> {
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

/// The bytes behind a length byte at `at`, and the offset behind them.
fn counted(input: &[u8], at: usize) -> Option<(&[u8], usize)> {
    let start = at + 1;
    let end = start + usize::from(*input.get(at)?);
    Some((input.get(start..end)?, end))
}

fn array<const N: usize>(input: &[u8], at: usize) -> Option<[u8; N]> {
    input.get(at..at + N)?.try_into().ok()
}

/// `VER METHOD`, the answer to the greeting.
pub fn encode_method(method: Method) -> [u8; 2] {
    [VERSION, method as u8]
}

/// `VER STATUS`, the answer to the password; anything but 0 is a failure (RFC 1929, section 2).
pub fn encode_auth_status(ok: bool) -> [u8; 2] {
    [PASSWORD_VERSION, u8::from(!ok)]
}

/// `VER REP RSV ATYP BND.ADDR BND.PORT` (RFC 1928, section 6). `bound` is our own address on the server's leg; failures
/// carry 0.0.0.0:0.
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

#[cfg(test)]
#[path = "socks5_tests.rs"]
mod tests;
