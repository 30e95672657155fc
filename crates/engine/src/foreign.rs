//! Listeners for transparent connections: [`ForeignListener`].

use crate::{
    leg::Leg,
    live::Live,
    splicer::Splicer,
    sync::lock,
    transparent::{self, ForeignCounts, Opened, mirrored},
};
use longsplice_datapath::Tuple;
use socket2::SockRef;
use std::{io, net::SocketAddr, os::fd::OwnedFd};
use tokio::sync::mpsc;

/// A listener for transparent connections, which are routed through this machine ([`Splicer::listen_foreign`]).
pub struct ForeignListener {
    splicer: Splicer,
    addr: SocketAddr,
    opened: mpsc::Receiver<Opened>,
}

impl ForeignListener {
    /// Accepts the next connection. Returns the client's leg and the server's leg.
    /// Fails with [`io::ErrorKind::NotConnected`] after the engine was closed.
    pub async fn accept(&mut self) -> io::Result<(Leg, Leg)> {
        let Opened { client, sockets } = self.opened.recv().await.ok_or(io::ErrorKind::NotConnected)?;
        self.splicer.engine().opened(&sockets.server);
        Ok((leg(sockets.client, &client)?, leg(sockets.server, &mirrored(&client))?))
    }

    /// Returns the address listened on.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for ForeignListener {
    fn drop(&mut self) {
        lock(self.splicer.transparent()).unlisten(self.addr);
        if let Some(Err(error)) = self.splicer.datapath().map(|d| d.unlisten(self.addr)) {
            tracing::warn!(addr = %self.addr, %error, "connections are still taken");
        }
    }
}

fn leg(socket: OwnedFd, tuple: &Tuple) -> io::Result<Leg> {
    SockRef::from(&socket).set_tcp_nodelay(true)?;
    let mut leg = Leg::new(Live::new(socket)?, tuple.remote, tuple.local, None);
    leg.at.shimmed = true; // without its entry, no segment would find the socket
    Ok(leg)
}

impl Splicer {
    /// Accepts transparent connections: connections of other hosts to `addr` that are routed through this machine.
    /// An unspecified address stands for any address with this port. Neither end has to be configured for us or
    /// sees us. Connections that `allow` (client, server) rejects get no answer. A thread calls `allow`; it must
    /// not block. A connection is accepted when its server has answered. Errors are those of raw sockets and
    /// routing rules, which need CAP_NET_RAW and CAP_NET_ADMIN; [`io::ErrorKind::Unsupported`] without a data path,
    /// [`io::ErrorKind::InvalidInput`] for port 0, and [`io::ErrorKind::AddrInUse`] if `addr` has a listener already.
    pub fn listen_foreign(
        &self,
        addr: SocketAddr,
        allow: impl Fn(SocketAddr, SocketAddr) -> bool + Send + 'static,
    ) -> io::Result<ForeignListener> {
        let without = || io::Error::new(io::ErrorKind::Unsupported, "the kernel's packet path is needed for this");
        let d = self.datapath().ok_or_else(without)?;
        if addr.port() == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "connections of others have a port: name it"));
        }
        let opened = transparent::listen(self.transparent(), self.engine(), d, addr, Box::new(allow))?;
        Ok(ForeignListener { splicer: self.clone(), addr, opened })
    }

    /// Returns the counters of connections that were not opened.
    pub fn foreign_counts(&self) -> ForeignCounts {
        lock(self.transparent()).counts()
    }
}
