//! Plugs: listeners with one fixed target. There is no protocol, so only the option is parsed.
//! With `handshake = "end-to-end"`, the clients shake hands with the target themselves.

use crate::{
    access::Subject,
    config::ListenerConfig,
    context::Shared,
    resolve::Resolver,
    target::{Host, Target, TargetError},
};
use longsplice_engine::{EndToEndListener, Listener};
use std::{
    net::SocketAddr,
    str::FromStr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// Time after which a target's name is looked up again. The resolver does not tell how long an answer is valid.
const LOOK_UP_EVERY: Duration = Duration::from_secs(10);

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

/// The addresses of a target. The thread that handles SYNs reads them, since it must not wait for the resolver.
#[derive(Clone, Debug, Default)]
struct Addresses(Arc<Mutex<Vec<SocketAddr>>>);

impl Addresses {
    fn get(&self) -> Vec<SocketAddr> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, addresses: Vec<SocketAddr>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = addresses;
    }

    /// Looks the name up again and again. While that fails, clients are left to the proxy, which reports the failure.
    async fn follow(self, resolver: Resolver, target: Target, limit: Duration) {
        loop {
            self.set(resolver.resolve(&target, limit).await.unwrap_or_default());
            tokio::time::sleep(LOOK_UP_EVERY).await;
        }
    }
}

/// Lets the clients of a plug shake hands with its target, if it is configured and possible. Returns the connections, and
/// the work of following the target's name, if it has one. A client that the rules deny, or whose address family the target
/// does not have, is left to `listening`.
pub(crate) fn end_to_end(
    shared: &Shared,
    listener: &ListenerConfig,
    listening: &Listener,
) -> Option<(EndToEndListener, Option<impl Future<Output = ()> + Send + use<>>)> {
    let target = listener.end_to_end()?.clone();
    let (addresses, rules) = (Addresses::default(), listener.rules.clone());
    let follow = match &target.host {
        Host::Ip(ip) => {
            addresses.set(vec![SocketAddr::new(*ip, target.port)]);
            None
        }
        Host::Name(_) => {
            Some(addresses.clone().follow(shared.resolver.clone(), target.clone(), listener.limits.resolve))
        }
    };
    let choose = move |client: SocketAddr| {
        let subject = Subject::by(client.ip());
        rules.check_name(&subject, &target).ok()?;
        let fits = |a: &SocketAddr| a.is_ipv4() == client.is_ipv4() && rules.check(&subject, &target, *a).is_ok();
        addresses.get().into_iter().find(fits)
    };
    match shared.splicer.end_to_end(listening, choose) {
        Ok(pairs) => Some((pairs, follow)),
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
