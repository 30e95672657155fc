//! The host and port of a request target or a `Host` field.

use crate::Wrong;
use std::{fmt, net::Ipv6Addr};

/// A host and a port (RFC 3986, 3.2), without user information or percent encoding. Neither has a meaning in HTTP (RFC 9110,
/// 4.2.4), and both are used to disguise a name as another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authority {
    /// A name or an IPv4 address in lower case, or an IPv6 address in brackets.
    pub host: String,
    /// The port, from 1 to 65535; `None` if not given.
    pub port: Option<u16>,
}

impl Authority {
    /// Reads `HOST`, `HOST:PORT` or `HOST:`, which is the same as `HOST`.
    ///
    /// # Errors
    /// [`Wrong::Authority`]
    pub fn parse(text: &str) -> Result<Authority, Wrong> {
        let (host, port) = match text.rfind(']') {
            Some(end) => text.split_at(end + 1),
            None => text.split_at(text.find(':').unwrap_or(text.len())),
        };
        let port = match port.strip_prefix(':') {
            None if port.is_empty() => None,
            None => return Err(Wrong::Authority),
            Some("") => None, // RFC 3986, 3.2.3
            Some(port) => Some(number(port)?),
        };
        let good = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
            Some(v6) => v6.parse::<Ipv6Addr>().is_ok(),
            None => !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b)),
        };
        if !good {
            return Err(Wrong::Authority);
        }
        Ok(Authority { host: host.to_ascii_lowercase(), port })
    }
}

fn number(port: &str) -> Result<u16, Wrong> {
    let digits = (1..=5).contains(&port.len()) && port.bytes().all(|b| b.is_ascii_digit());
    port.parse().ok().filter(|n| digits && *n != 0).ok_or(Wrong::Authority)
}

impl fmt::Display for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}:{port}", self.host),
            None => f.write_str(&self.host),
        }
    }
}
