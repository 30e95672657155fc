//! Listening sockets that this process did not open. Whoever started it keeps those of a supervisor, too (socket activation): clients
//! that come while no process accepts wait in their queues. Those that an earlier process hands over become this one's.

use crate::config::{Config, ListenerConfig};
use longsplice_engine::{BoundSocket, TpotWhose};
use serde::{Deserialize, Serialize};
use std::{
    io,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

/// The sockets.
#[derive(Debug, Default)]
pub struct Inherited {
    /// By their addresses. They stay open as long as the program runs: a reload may need one that was not needed before.
    kept: Vec<(SocketAddr, TcpListener)>,
    /// Each until a listener takes it, or all have what they need.
    handed: Mutex<Vec<Handed>>,
    /// There is an earlier process, which hands over what it has.
    follows: bool,
    /// Directories of caches that the earlier process leaves before this one serves.
    left: Vec<PathBuf>,
}

/// Whose socket it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfListener {
    /// Name of the listener.
    pub name: String,
    /// Its connections are routed through this machine, and the address of the socket is not that of the configuration. Here is
    /// that one, and whether clients ask for a proxy.
    #[serde(default)]
    pub intercepts: Option<(SocketAddr, bool)>,
}

/// A socket of an earlier process.
#[derive(Debug)]
struct Handed {
    of: OfListener,
    at: SocketAddr,
    socket: TcpListener,
}

impl Handed {
    /// Whether a listener has its address, or the same name and no port of its own.
    fn is_for(&self, listener: &ListenerConfig) -> bool {
        let (asked, OfListener { name, intercepts }) = (listener.listen, &self.of);
        let is_its = asked.port() == 0 && self.at.ip() == asked.ip() && *name == *listener.name;
        match (intercepts, listener.intercepts) {
            (Some(of), Some(whose)) => *of == (asked, whose == TpotWhose::Askers),
            (None, None) => listener.binds() && (self.at == asked || is_its),
            _ => false,
        }
    }
}

impl Inherited {
    /// Takes those of a supervisor. Errors are those of getsockname(2).
    pub fn new(sockets: Vec<TcpListener>) -> io::Result<Inherited> {
        let kept = sockets.into_iter().map(|socket| Ok((socket.local_addr()?, socket))).collect::<io::Result<_>>()?;
        Ok(Inherited { kept, ..Inherited::default() })
    }

    /// Takes those as well that an earlier process has stored with the supervisor: they are this one's. Errors are those of
    /// getsockname(2).
    pub fn with_stored(self, sockets: Vec<TcpListener>) -> io::Result<Inherited> {
        let of = || OfListener { name: String::new(), intercepts: None }; // by their addresses alone
        let handed = sockets.into_iter().map(|socket| Ok(Handed { of: of(), at: socket.local_addr()?, socket }));
        Ok(Inherited { handed: Mutex::new(handed.collect::<io::Result<_>>()?), ..self })
    }

    /// Takes those of an earlier process as well. Errors are those of getsockname(2).
    pub fn with(self, sockets: Vec<(OfListener, TcpListener)>) -> io::Result<Inherited> {
        let handed = |(of, socket): (OfListener, TcpListener)| Ok(Handed { of, at: socket.local_addr()?, socket });
        let handed = sockets.into_iter().map(handed).collect::<io::Result<_>>()?;
        Ok(Inherited { handed: Mutex::new(handed), follows: true, ..self })
    }

    /// Says which directories of caches an earlier process still has, and leaves before this one serves.
    #[must_use]
    pub fn with_caches(self, left: Vec<PathBuf>) -> Inherited {
        Inherited { left, ..self }
    }

    /// Returns whether an earlier process leaves this directory of a cache.
    pub fn leaves(&self, dir: &Path) -> bool {
        let whole = |dir: &Path| dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        self.left.iter().any(|left| whole(left) == whole(dir))
    }

    /// Returns the addresses of a supervisor's sockets at which no listener of the configuration listens.
    pub fn unused(&self, config: &Config) -> Vec<SocketAddr> {
        let is_used = |at: &SocketAddr| config.listeners.iter().any(|l| l.binds() && l.listen == *at);
        self.kept.iter().map(|(at, _)| *at).filter(|at| !is_used(at)).collect()
    }

    /// Returns whether an earlier process hands over what it has.
    pub(crate) fn follows(&self) -> bool {
        self.follows
    }

    /// Returns other descriptors of the supervisor's sockets.
    pub(crate) fn kept(&self) -> io::Result<Vec<TcpListener>> {
        self.kept.iter().map(|(_, socket)| socket.try_clone()).collect()
    }

    /// Closes what no listener of a configuration can have, and returns its addresses.
    pub fn close_unneeded_of(&self, config: &Config) -> Vec<SocketAddr> {
        let mut handed = self.handed.lock().unwrap_or_else(PoisonError::into_inner);
        let is_needed = |handed: &mut Handed| config.listeners.iter().any(|listener| handed.is_for(listener));
        handed.extract_if(.., |handed| !is_needed(handed)).map(|handed| handed.at).collect()
    }

    /// Closes what an earlier process has handed over and no listener needs: new clients are refused there.
    pub(crate) fn close_unneeded(&self) {
        self.handed.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Returns the socket of a listener: one that was inherited, or a new one if it binds one. Errors are those of
    /// [`BoundSocket::bind`] and [`BoundSocket::from_listener`].
    pub(crate) fn bind(&self, listener: &ListenerConfig) -> io::Result<Option<BoundSocket>> {
        let binds = listener.binds();
        if let Some((_, socket)) = self.kept.iter().find(|(at, _)| binds && *at == listener.listen) {
            return BoundSocket::from_listener(socket.try_clone()?).map(Some);
        }
        let mut handed = self.handed.lock().unwrap_or_else(PoisonError::into_inner);
        match handed.iter().position(|handed| handed.is_for(listener)) {
            Some(n) => BoundSocket::from_listener(handed.swap_remove(n).socket).map(Some),
            None => binds.then(|| BoundSocket::bind(listener.listen)).transpose(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Protocol;

    fn config(at: &str) -> Config {
        let mut config = Config::default();
        config.add_args(&[at], &[], &[], &[]).unwrap();
        config
    }

    #[test]
    fn a_listener_has_the_socket_of_its_address() {
        let theirs = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = theirs.local_addr().unwrap();
        let inherited = Inherited::new(vec![theirs]).unwrap();
        let config_of = config(&at.to_string());
        assert_eq!(inherited.unused(&config_of), []);
        assert!(inherited.bind(&config_of.listeners[0]).is_ok(), "it could not be bound again");
        assert_eq!(inherited.unused(&config("127.0.0.1:0")), [at]);
        assert!(Inherited::default().bind(&config_of.listeners[0]).is_err(), "the address is in use");
    }

    /// One without a port of its own has another one after each start, and goes by its name.
    #[test]
    fn what_is_handed_over_has_one_owner() {
        let handed = |name: &str, theirs: &TcpListener| {
            let of = OfListener { name: name.to_owned(), intercepts: None };
            Inherited::default().with(vec![(of, theirs.try_clone().unwrap())]).unwrap()
        };
        let theirs = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = theirs.local_addr().unwrap();
        let (by_address, by_name) = (config(&at.to_string()), config("127.0.0.1:0"));
        let (by_address, by_name) = (&by_address.listeners[0], &by_name.listeners[0]);
        let inherited = handed("any", &theirs);
        assert!(inherited.bind(by_address).is_ok());
        assert!(inherited.bind(by_address).is_err(), "it is taken");
        assert!(handed(&by_name.name, &theirs).handed.lock().unwrap()[0].is_for(by_name));
        assert!(!handed("another", &theirs).handed.lock().unwrap()[0].is_for(by_name));
        let mut of_another = handed("any", &theirs);
        let other = &mut of_another.handed.get_mut().unwrap()[0];
        let mut between = by_address.clone();
        between.protocol = Protocol::Transparent;
        assert!(!other.is_for(&between), "its connections are routed, and it has no socket");
        let mut intercepting = by_address.clone();
        intercepting.intercepts = Some(TpotWhose::All);
        assert!(!other.is_for(&intercepting));
        other.of.intercepts = Some((at, false));
        assert!(other.is_for(&intercepting) && !other.is_for(by_address), "clients of others would wait in it");
        intercepting.intercepts = Some(TpotWhose::Askers);
        assert!(!other.is_for(&intercepting));
        let inherited = handed("any", &theirs);
        inherited.close_unneeded();
        assert!(inherited.bind(by_address).is_err(), "it is closed");
    }
}
