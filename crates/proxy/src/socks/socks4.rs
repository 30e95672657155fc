//! SOCKS version 4 and its extension 4a (the memos of Ying-Da Lee): the messages, without I/O.
//!
//! Neither has real authentication: the user name is an unverified claim. It is parsed and dropped.

use crate::target::{Host, Target};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// First byte of a request.
pub const VERSION: u8 = 4;
/// Maximum lengths of the two zero-terminated strings; the memos set no limit.
const USER_MAX: usize = 255;
const NAME_MAX: usize = 255;
/// Length of `VN CD DSTPORT DSTIP` in bytes.
const HEAD: usize = 8;

/// Error in a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// The first byte is not 4.
    #[error("version {0} where another was expected")]
    Version(u8),
    /// The user name does not end within 255 bytes.
    #[error("user name too long")]
    UserTooLong,
    /// The domain name does not end within 255 bytes, or is not a name.
    #[error("bad domain name")]
    Name,
}

/// Command of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Connect to the target.
    Connect,
    /// Accept one connection.
    Bind,
    /// Anything else.
    Other(u8),
}

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Requested command.
    pub command: Command,
    /// Requested target.
    pub target: Target,
}

/// The outcome of a request: the field CD of the reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// Connected.
    Granted = 0x5a,
    /// Rejected or failed: the memo has one code for all cases that occur here.
    Rejected = 0x5b,
    /// The client runs no identd; never sent, because we do not ask identd.
    NoIdentd = 0x5c,
    /// identd reports a different user; never sent, because we do not ask identd.
    OtherUser = 0x5d,
}

/// Parses `VN CD DSTPORT DSTIP USERID NUL`, and the name of SOCKS 4a after it if DSTIP is 0.0.0.x with x not zero.
pub fn parse_request(input: &[u8]) -> Result<Option<(Request, usize)>, ParseError> {
    let Some(&version) = input.first() else { return Ok(None) };
    if version != VERSION {
        return Err(ParseError::Version(version));
    }
    let &[_, command, p0, p1, a, b, c, d, ref rest @ ..] = input else { return Ok(None) };
    let Some(user) = string(rest, USER_MAX).map_err(|()| ParseError::UserTooLong)? else { return Ok(None) };
    let mut used = HEAD + user.len() + 1;
    let host = if [a, b, c] == [0; 3] && d != 0 {
        let rest = &rest[user.len() + 1..];
        let Some(name) = string(rest, NAME_MAX).map_err(|()| ParseError::Name)? else { return Ok(None) };
        used += name.len() + 1;
        Host::from_name(name).map_err(|_| ParseError::Name)?
    } else {
        Host::Ip(Ipv4Addr::new(a, b, c, d).into())
    };
    let command = match command {
        1 => Command::Connect,
        2 => Command::Bind,
        other => Command::Other(other),
    };
    let target = Target { host, port: u16::from_be_bytes([p0, p1]) };
    Ok(Some((Request { command, target }, used)))
}

/// Returns the string before the first zero byte, which has to come within `max` bytes.
fn string(input: &[u8], max: usize) -> Result<Option<&[u8]>, ()> {
    match input.iter().take(max + 1).position(|b| *b == 0) {
        Some(end) => Ok(Some(&input[..end])),
        None if input.len() > max => Err(()),
        None => Ok(None),
    }
}

/// Encodes `VN CD DSTPORT DSTIP`, with VN 0. The address has a meaning for BIND only; it is ours if that is IPv4.
pub fn encode_reply(reply: Reply, bound: Option<SocketAddr>) -> [u8; 8] {
    let (port, ip) = match bound.map(|a| (a.port(), a.ip().to_canonical())) {
        Some((port, IpAddr::V4(ip))) => (port, ip),
        _ => (0, Ipv4Addr::UNSPECIFIED),
    };
    let ([p0, p1], [a, b, c, d]) = (port.to_be_bytes(), ip.octets());
    [0, reply as u8, p0, p1, a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng, rngs::StdRng};

    fn splits(message: &[u8], command: Command, target: &str) {
        for cut in 0..message.len() {
            assert_eq!(parse_request(&message[..cut]), Ok(None), "cut at {cut}");
        }
        let input = [message, b"more"].concat();
        let want = Request { command, target: target.parse().unwrap() };
        assert_eq!(parse_request(&input), Ok(Some((want, message.len()))));
    }

    #[test]
    fn requests_by_address_and_by_name() {
        splits(b"\x04\x01\x00\x50\xc0\x00\x02\x01\x00", Command::Connect, "192.0.2.1:80");
        splits(b"\x04\x01\x00\x50\xc0\x00\x02\x01ann\x00", Command::Connect, "192.0.2.1:80");
        splits(b"\x04\x01\x01\xbb\x00\x00\x00\x07ann\x00example.org\x00", Command::Connect, "example.org:443");
        splits(b"\x04\x02\x00\x50\xc0\x00\x02\x01\x00", Command::Bind, "192.0.2.1:80");
        splits(b"\x04\x07\x00\x50\xc0\x00\x02\x01\x00", Command::Other(7), "192.0.2.1:80");
    }

    #[test]
    fn all_zero_is_an_address_and_no_name() {
        splits(b"\x04\x01\x00\x50\x00\x00\x00\x00\x00", Command::Connect, "0.0.0.0:80");
    }

    #[test]
    fn what_has_no_end_is_refused() {
        assert_eq!(parse_request(&[5]), Err(ParseError::Version(5)));
        let head = b"\x04\x01\x00\x50\x00\x00\x00\x01";
        let user = [&head[..], &[b'u'; 256]].concat();
        assert_eq!(parse_request(&user[..263]), Ok(None));
        assert_eq!(parse_request(&user), Err(ParseError::UserTooLong));
        let name = [&head[..], b"\0", &[b'n'; 256]].concat();
        assert_eq!(parse_request(&name[..264]), Ok(None));
        assert_eq!(parse_request(&name), Err(ParseError::Name));
        assert_eq!(parse_request(&[&head[..], b"\0\0"].concat()), Err(ParseError::Name));
    }

    #[test]
    fn replies() {
        let bound = Some("192.0.2.9:258".parse().unwrap());
        assert_eq!(encode_reply(Reply::Granted, bound), [0, 0x5a, 1, 2, 192, 0, 2, 9]);
        assert_eq!(encode_reply(Reply::Rejected, None), [0, 0x5b, 0, 0, 0, 0, 0, 0]);
        let v6 = Some("[2001:db8::1]:80".parse().unwrap());
        assert_eq!(encode_reply(Reply::Granted, v6), [0, 0x5a, 0, 0, 0, 0, 0, 0]);
        assert_eq!((Reply::NoIdentd as u8, Reply::OtherUser as u8), (0x5c, 0x5d));
    }

    #[test]
    fn garbage_never_panics() {
        let mut rng = StdRng::seed_from_u64(0x50c4);
        let mut input = [0; 600];
        for round in 0..20_000usize {
            rng.fill_bytes(&mut input);
            input[0] = if round % 8 == 0 { input[0] } else { 4 };
            if round % 2 == 0 {
                input[4..7].fill(0);
            }
            let input = &input[..round % 600];
            if let Ok(Some((_, used))) = parse_request(input) {
                assert!(used >= HEAD && used <= input.len());
            }
        }
    }
}
