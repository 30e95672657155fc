//! Listeners for connections whose hosts shake hands with each other: [`EndToEndListener`].

use crate::{
    engine::Leaving,
    leg::{Leg, live::Live, opened::HeldData},
    passing::{
        handshakes::{self, Course, Opened, TransparentCounts},
        holding::prepare,
    },
    refusal::Refusal,
    splicer::{Splicer, listener::Listener},
    sync::lock,
};
use longsplice_datapath::{Connection, Datapath};
use socket2::SockRef;
use std::{io, net::SocketAddr, os::fd::OwnedFd};
use tokio::sync::mpsc;

/// A listener for connections whose hosts shake hands with each other: transparent ones
/// ([`Splicer::listen_transparent`]), and those of clients of a listening socket ([`Splicer::end_to_end`]).
pub struct EndToEndListener {
    splicer: Splicer,
    addr: SocketAddr,
    transparent: bool,
    opened: mpsc::Receiver<Opened>,
}

impl EndToEndListener {
    /// Accepts the next connection. Returns the client's leg and the server's leg.
    /// Fails with [`io::ErrorKind::NotConnected`] after the engine was closed.
    pub async fn accept(&mut self) -> io::Result<(Leg, Leg)> {
        let opened = self.opened.recv().await.ok_or(io::ErrorKind::NotConnected)?;
        self.legs(opened)
    }

    /// Returns the next connection like [`EndToEndListener::accept`], if one waits.
    pub fn try_accept(&mut self) -> Option<io::Result<(Leg, Leg)>> {
        self.opened.try_recv().ok().map(|opened| self.legs(opened))
    }

    fn legs(&self, Opened { legs, sockets, first }: Opened) -> io::Result<(Leg, Leg)> {
        self.splicer.engine().opened(&sockets.server);
        let mut client = leg(sockets.client, legs.client)?;
        client.opened.first = first.map(|held| held as Box<dyn HeldData>);
        if legs.client.generation == Connection::NONE {
            client.refuse(Refusal::TableFull);
        }
        Ok((client, leg(sockets.server, legs.server)?))
    }

    /// Holds the first data of connections that are opened from now on, until their flow is spliced, or the legs are read or
    /// dropped. A flow that is spliced at once then carries no byte through the sockets. Meant for
    /// [`SpliceWhen::AtOnce`](crate::SpliceWhen::AtOnce); other flows only lose some microseconds. Hand the legs over at once.
    /// Errors are those of raw sockets, which need CAP_NET_RAW, and threads.
    pub fn hold_first_data(&self) -> io::Result<()> {
        let d = self.splicer.datapath().ok_or(io::ErrorKind::NotConnected)?;
        prepare(self.splicer.engine())?;
        lock(self.splicer.handshakes()).hold_first_data(d, self.addr)
    }

    /// Returns the address listened on.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for EndToEndListener {
    fn drop(&mut self) {
        // what comes until another process has taken over is held back: it must not pass unjudged
        if self.transparent && self.splicer.engine().leaving() != Leaving::No {
            return;
        }
        lock(self.splicer.handshakes()).unlisten(self.addr);
        let stop = |d: &Datapath| if self.transparent { d.unlisten(self.addr) } else { d.listen(self.addr) };
        if let Some(Err(error)) = self.splicer.datapath().map(stop) {
            tracing::warn!(addr = %self.addr, %error, "cannot stop listening: new connections are still accepted");
        }
    }
}

fn leg(socket: OwnedFd, connection: Connection) -> io::Result<Leg> {
    SockRef::from(&socket).set_tcp_nodelay(true)?;
    let mut leg = Leg::new(Live::new(socket)?, connection);
    leg.at.shimmed = true; // the socket needs its entry: for its clock, and to get segments for addresses that are not ours
    Ok(leg)
}

impl Splicer {
    /// Accepts transparent connections: connections of other hosts to `addr` that are routed through this machine.
    /// An unspecified address stands for any address with this port. Neither end has to be configured for us or
    /// sees us. Connections that `allow` (client, server) rejects get no answer. A thread calls `allow`; it must
    /// not block. A connection is accepted when its server has answered. Errors are those of raw sockets and
    /// routing rules, which need CAP_NET_RAW and CAP_NET_ADMIN; [`io::ErrorKind::Unsupported`] without a data path,
    /// [`io::ErrorKind::InvalidInput`] for port 0, and [`io::ErrorKind::AddrInUse`] if `addr` has a listener already.
    pub fn listen_transparent(
        &self,
        addr: SocketAddr,
        allow: impl Fn(SocketAddr, SocketAddr) -> bool + Send + 'static,
    ) -> io::Result<EndToEndListener> {
        let without = || io::Error::new(io::ErrorKind::Unsupported, "the kernel's packet path is needed for this");
        let d = self.datapath().ok_or_else(without)?;
        if addr.port() == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a transparent listener needs a port other than 0",
            ));
        }
        let opened =
            handshakes::listen(self.handshakes(), self.engine(), d, addr, Course::Transparent(Box::new(allow)))?;
        Ok(EndToEndListener { splicer: self.clone(), addr, transparent: true, opened })
    }

    /// Lets the clients of a listening socket shake hands with a server: a client's SYN becomes the server's SYN at once,
    /// with the same numbers, clock and options, from an address and port of ours. `choose` names the server for a client's
    /// address; a thread calls it, and it must not block. A connection is accepted when its client has completed the
    /// handshake. A client whose server refuses is refused. `listener` serves the other clients, so accept from both: those
    /// for which `choose` returns `None`, a server of another address family or on this machine, and those for which there is
    /// no room or no free port. `lost` is told of clients whose
    /// server has refused, or has not answered for a minute, on the same thread. Errors are those of raw sockets, which need CAP_NET_RAW; and [`io::ErrorKind::Unsupported`]
    /// without a data path, or if `listener` only copies.
    pub fn end_to_end(
        &self,
        listener: &Listener,
        choose: impl Fn(SocketAddr) -> Option<SocketAddr> + Send + 'static,
        lost: impl Fn(SocketAddr, SocketAddr, io::Error) + Send + 'static,
    ) -> io::Result<EndToEndListener> {
        let without = || io::Error::new(io::ErrorKind::Unsupported, "the kernel's packet path is needed for this");
        let d = self.datapath().filter(|_| !listener.is_to_copy()).ok_or_else(without)?;
        let addr = listener.local_addr()?;
        let course = Course::Chosen(Box::new(choose), Box::new(lost));
        let opened = handshakes::listen(self.handshakes(), self.engine(), d, addr, course)?;
        Ok(EndToEndListener { splicer: self.clone(), addr, transparent: false, opened })
    }

    /// Returns the counters of connections that were not opened.
    pub fn transparent_counts(&self) -> TransparentCounts {
        lock(self.handshakes()).counts()
    }
}
