//! Listening sockets that this process was started with (socket activation). Whoever started it keeps them, too: clients that come
//! while no process accepts wait in their queues.

use crate::config::{Config, ListenerConfig};
use longsplice_engine::BoundSocket;
use std::{
    io,
    net::{SocketAddr, TcpListener},
};

/// The sockets, by their addresses. They stay open as long as the program runs: a reload may need one that was not needed before.
#[derive(Debug, Default)]
pub struct Inherited(Vec<(SocketAddr, TcpListener)>);

impl Inherited {
    /// Errors are those of getsockname(2).
    pub fn new(sockets: Vec<TcpListener>) -> io::Result<Inherited> {
        sockets.into_iter().map(|socket| Ok((socket.local_addr()?, socket))).collect::<io::Result<_>>().map(Inherited)
    }

    /// Returns the addresses at which no listener of the configuration listens.
    pub fn unused(&self, config: &Config) -> Vec<SocketAddr> {
        let is_used = |at: &SocketAddr| config.listeners.iter().any(|l| l.binds() && l.listen == *at);
        self.0.iter().map(|(at, _)| *at).filter(|at| !is_used(at)).collect()
    }

    /// Returns the socket of a listener: one that was inherited, or a new one. Errors are those of [`BoundSocket::bind`] and
    /// [`BoundSocket::from_listener`].
    pub(crate) fn bind(&self, listener: &ListenerConfig) -> io::Result<BoundSocket> {
        match self.0.iter().find(|(at, _)| *at == listener.listen) {
            Some((_, socket)) => BoundSocket::from_listener(socket.try_clone()?),
            None => BoundSocket::bind(listener.listen),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_has_the_socket_of_its_address() {
        let theirs = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = theirs.local_addr().unwrap();
        let inherited = Inherited::new(vec![theirs]).unwrap();
        let mut config = Config::default();
        config.add_args(&[at.to_string()], &[], &[], &[]).unwrap();
        assert_eq!(inherited.unused(&config), []);
        assert!(inherited.bind(&config.listeners[0]).is_ok(), "it could not be bound again");
        let mut other = Config::default();
        other.add_args(&["127.0.0.1:0"], &[], &[], &[]).unwrap();
        assert_eq!(inherited.unused(&other), [at]);
        assert!(Inherited::default().bind(&config.listeners[0]).is_err(), "the address is in use");
    }
}
