//! The target of a connection: an address or a name, and a port.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    str::FromStr,
};

/// The host part of a [`Target`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// An address. IPv4-mapped IPv6 addresses (RFC 4291, 2.5.5.2) are converted to IPv4,
    /// because that is what the kernel would connect to.
    Ip(IpAddr),
    /// A name in lower case, without the final dot, of printable ASCII only.
    Name(String),
}

/// A destination from a client or the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Address or name.
    pub host: Host,
    /// Port, in host order.
    pub port: u16,
}

/// Parse error of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// There is no `:PORT` at the end.
    #[error("no port: write HOST:PORT")]
    NoPort,
    /// The part after the colon is not a port.
    #[error("bad port: write a number from 1 to 65535")]
    BadPort,
    /// There is more than one colon, so the start of the port is ambiguous.
    #[error("an IPv6 address needs brackets: write [ADDR]:PORT")]
    NeedsBrackets,
    /// The host is empty, too long, or contains characters that are not allowed in host names.
    #[error("bad host: write a name of at most 255 letters, digits, '-', '_' and '.', or an address")]
    BadHost,
}

/// Maximum length of a name in bytes, because the length of a SOCKS5 name is one byte (RFC 1928, section 5).
const NAME_MAX: usize = 255;

impl Host {
    /// Returns the address, if it is one.
    pub fn ip(&self) -> Option<IpAddr> {
        if let Host::Ip(ip) = self { Some(*ip) } else { None }
    }

    /// Parses a host name or an address, with or without brackets.
    ///
    /// Names must be printable ASCII, so that nothing else reaches logs and the resolver.
    pub fn from_name(name: &[u8]) -> Result<Host, TargetError> {
        let text = std::str::from_utf8(name).map_err(|_| TargetError::BadHost)?;
        let bare = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
        if let Ok(ip) = bare.parse::<IpAddr>() {
            return Ok(Host::Ip(ip.to_canonical()));
        }
        let text = text.strip_suffix('.').unwrap_or(text);
        let fits = !text.is_empty() && text.len() <= NAME_MAX;
        let plain = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
        // The DNS has no empty labels ("a..b", ".a"), and they would confuse suffix rules. Some
        // programs take an address with a trailing dot for an address, others for a name.
        if !fits || !plain || text.split('.').any(str::is_empty) || text.parse::<IpAddr>().is_ok() {
            return Err(TargetError::BadHost);
        }
        Ok(Host::Name(text.to_ascii_lowercase()))
    }
}

impl From<SocketAddr> for Target {
    fn from(a: SocketAddr) -> Self {
        Target { host: Host::Ip(a.ip().to_canonical()), port: a.port() }
    }
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        if text.parse::<Ipv6Addr>().is_ok() {
            return Err(TargetError::NeedsBrackets);
        }
        let (host, port) = text.rsplit_once(':').ok_or(TargetError::NoPort)?;
        let bracketed = host.starts_with('[') && host.ends_with(']');
        if host.contains(':') && !bracketed {
            return Err(TargetError::NeedsBrackets);
        }
        // `parse` would accept "+80", which no other program does.
        if !port.bytes().all(|b| b.is_ascii_digit()) {
            return Err(TargetError::BadPort);
        }
        let port = port.parse().ok().filter(|p| *p != 0).ok_or(TargetError::BadPort)?;
        let host = Host::from_name(host.as_bytes())?;
        if bracketed && matches!(host, Host::Name(_)) {
            return Err(TargetError::BadHost);
        }
        Ok(Target { host, port })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(ip) => SocketAddr::new(*ip, self.port).fmt(f),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Result<String, TargetError> {
        text.parse::<Target>().map(|t| t.to_string())
    }

    #[test]
    fn texts_become_targets_and_texts_again() {
        for (text, want) in [
            ("example.org:80", "example.org:80"),
            ("Example.ORG.:80", "example.org:80"),
            ("192.0.2.1:443", "192.0.2.1:443"),
            ("[2001:db8::1]:443", "[2001:db8::1]:443"),
            ("[::ffff:192.0.2.1]:443", "192.0.2.1:443"),
            ("my_host:65535", "my_host:65535"),
        ] {
            assert_eq!(target(text).as_deref(), Ok(want), "{text}");
        }
    }

    #[test]
    fn errors_say_what_is_wrong() {
        for (text, want) in [
            ("example.org", TargetError::NoPort),
            ("example.org:0", TargetError::BadPort),
            ("example.org:+80", TargetError::BadPort),
            ("example.org:65536", TargetError::BadPort),
            ("example.org:", TargetError::BadPort),
            ("2001:db8::1", TargetError::NeedsBrackets),
            ("2001:db8::1:80", TargetError::NeedsBrackets),
            ("zz:1:80", TargetError::NeedsBrackets),
            (":80", TargetError::BadHost),
            ("a..b:80", TargetError::BadHost),
            ("a b:80", TargetError::BadHost),
            ("[example.org]:80", TargetError::BadHost),
            ("exämple.org:80", TargetError::BadHost),
        ] {
            assert_eq!(target(text), Err(want), "{text}");
        }
    }

    #[test]
    fn names_of_hostile_clients_are_refused() {
        for name in [&b""[..], b".", b"a\0b", b"a\nb", b"..", b"\xff\xfe", b"a%eth0", b"x/y", b"127.0.0.1."] {
            assert_eq!(Host::from_name(name), Err(TargetError::BadHost), "{name:?}");
        }
        assert!(Host::from_name(&[b'a'; 255]).is_ok());
        assert!(Host::from_name(&[b'a'; 256]).is_err());
    }
}
