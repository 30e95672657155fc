//! Plugs: listeners with one fixed target. There is no protocol, so only the option is parsed.
//! With `handshake = "end-to-end"`, the clients shake hands with the target themselves.

use crate::{
    access::Subject,
    complaints::Complaints,
    config::ListenerConfig,
    context::Shared,
    fault::{Fault, Step},
    target::{Target, TargetError},
};
use longsplice_engine::{EndToEndListener, Listener};
use std::{io, net::SocketAddr, str::FromStr};

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

/// Lets the clients of a plug shake hands with its target, if it is configured and possible. Returns the connections. A client
/// that the rules deny, or whose address family the target does not have, is left to `listening`.
pub(crate) fn end_to_end(shared: &Shared, listener: &ListenerConfig, listening: &Listener) -> Option<EndToEndListener> {
    let target = listener.end_to_end()?.clone();
    // There is no line in the access log: the client has not proved its address yet.
    let (counters, complaints, of) = (shared.counters.clone(), Complaints::default(), target.clone());
    let lost = move |client: SocketAddr, server: SocketAddr, error: io::Error| {
        let late = error.kind() == io::ErrorKind::TimedOut;
        let fault = if late { Fault::Timeout(Step::Connect) } else { Fault::Unreachable(error) };
        counters.fault(&fault);
        complaints.tell(&format!("the target {of} of a plug is not reached by {client} at {server}: {fault}"));
    };
    let (resolver, rules) = (shared.resolver.clone(), listener.rules.clone());
    // The thread that handles SYNs runs this, and must not wait for the resolver: the name is followed.
    let choose = move |client: SocketAddr| {
        let subject = Subject::by(client.ip());
        rules.check_name(&subject, &target).ok()?;
        let fits = |a: &SocketAddr| a.is_ipv4() == client.is_ipv4() && rules.check(&subject, &target, *a).is_ok();
        resolver.known(&target).into_iter().find(fits)
    };
    match shared.splicer.end_to_end(listening, choose, lost) {
        Ok(pairs) => Some(pairs),
        Err(error) => {
            tracing::warn!("the proxy answers the clients of {} itself, not the target: {error}", listener.listen);
            None
        }
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
