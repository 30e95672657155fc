//! Sockets that the caller has made: [`Splicer::adopt`].

use crate::{
    leg::{Leg, ip, live::Live},
    refusal::Refusal,
    splicer::Splicer,
};
use longsplice_datapath::{Tuple, has_ulp};
use socket2::{Protocol, SockRef};
use std::{io, net::SocketAddr, os::fd::OwnedFd};

impl Splicer {
    /// Takes over a connected TCP socket that the caller has accepted or connected, at any moment of its connection: the leg can be
    /// spliced like those of [`Splicer::listen_adopting`]. What the caller has read and not passed on goes into
    /// [`Leftovers`](crate::Leftovers); positions count from here. No other descriptor of the socket may be used any more. If the
    /// connection cannot be spliced, because its packets have other addresses on the wire, for example, it is copied, and its flow
    /// shows why. A flow with such a leg keeps its sockets until it ends ([`Policy::keeps_sockets`](crate::Policy)).
    ///
    /// Call it in the runtime of the flow, and in the network namespace of the data path. Errors are
    /// [`io::ErrorKind::InvalidInput`] if it is not a socket of TCP over IP, or if the kernel changes its bytes (TLS in the kernel,
    /// MPTCP), [`io::ErrorKind::NotConnected`], and those of socket options.
    pub fn adopt(&self, socket: impl Into<OwnedFd>) -> io::Result<Leg> {
        let socket = socket.into();
        let s = SockRef::from(&socket);
        if s.protocol()? != Some(Protocol::TCP) || has_ulp(&socket) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "only plain TCP sockets can be adopted"));
        }
        // a socket for IPv6 may have a connection of IPv4
        let canonical = |a: SocketAddr| SocketAddr::new(a.ip().to_canonical(), a.port());
        let [remote, local] = [s.peer_addr()?, s.local_addr()?].map(|address| canonical(ip(&address)));
        s.set_nonblocking(true)?;
        s.set_tcp_nodelay(true)?;
        s.set_out_of_band_inline(true)?; // see live.rs
        let is_here = self.datapath().is_some() && (remote.ip() == local.ip() || remote.ip().is_loopback());
        // without a data path, the engine's refusal is that of all flows
        Ok(Leg::of_other_code(Live::new(socket)?, &Tuple { remote, local }, is_here.then_some(Refusal::Loopback)))
    }
}
