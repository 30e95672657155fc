//! The value of `--plug`: a listening address and a fixed target.

use crate::target::{Target, TargetError};
use std::{net::SocketAddr, str::FromStr};

/// A plug, written `ADDR:PORT=HOST:PORT` as the value of `--plug`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plug {
    /// Listening address.
    pub listen: SocketAddr,
    /// Target of all connections.
    pub target: Target,
}

/// Parse error of a plug.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PlugError {
    /// There is no `=`.
    #[error("no `=`: write ADDR:PORT=HOST:PORT, for example 127.0.0.1:8080=example.org:80")]
    NoTarget,
    /// The left side is not a listening address.
    #[error("left of `=`: {0}")]
    Listen(ListenError),
    /// The right side is not a target.
    #[error("right of `=`: {0}")]
    Target(TargetError),
}

/// Parse error of a listening address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "bad listen address: write ADDR:PORT with a numeric address, IPv6 in brackets, such as 127.0.0.1:1080 or [::1]:1080"
)]
pub struct ListenError;

/// Parses a listening address.
pub fn parse_listen(text: &str) -> Result<SocketAddr, ListenError> {
    text.parse().map_err(|_| ListenError)
}

impl FromStr for Plug {
    type Err = PlugError;

    fn from_str(text: &str) -> Result<Self, PlugError> {
        let (listen, target) = text.split_once('=').ok_or(PlugError::NoTarget)?;
        let listen = parse_listen(listen).map_err(PlugError::Listen)?;
        Ok(Plug { listen, target: target.parse().map_err(PlugError::Target)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugs() {
        let plug: Plug = "[::1]:8080=Example.org:80".parse().unwrap();
        assert_eq!((plug.listen.to_string(), plug.target.to_string()), ("[::1]:8080".into(), "example.org:80".into()));
        let plug: Plug = "0.0.0.0:1=[2001:db8::1]:2".parse().unwrap();
        assert_eq!(plug.target.to_string(), "[2001:db8::1]:2");
    }

    #[test]
    fn no_plugs() {
        for (text, want) in [
            ("127.0.0.1:1", PlugError::NoTarget),
            ("localhost:1=a:2", PlugError::Listen(ListenError)),
            ("::1:1=a:2", PlugError::Listen(ListenError)),
            ("127.0.0.1:1=", PlugError::Target(TargetError::NoPort)),
            ("127.0.0.1:1=::1:2", PlugError::Target(TargetError::NeedsBrackets)),
        ] {
            assert_eq!(text.parse::<Plug>(), Err(want), "{text}");
        }
    }
}
