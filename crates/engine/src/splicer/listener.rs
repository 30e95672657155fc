//! Listening sockets: [`BoundSocket`] and [`Listener`].

use crate::{
    leg::{Leg, ip, opened::EarlyConnection},
    refusal::Refusal,
    splicer::{
        Splicer,
        early::{Permit, Pipeline},
    },
    sync::lock,
};
use longsplice_datapath::{Destinations, Tpot, TpotHandshake, TpotWhose, accept, register_shared, set_transparent};
use socket2::{Domain, SockRef, Socket, Type};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::OwnedFd,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::io::{Interest, unix::AsyncFd};

/// Number of times that bind(2) and listen(2) are retried while the address is in use,
/// with a pause between. Sockets that last for microseconds may hold the address.
const LISTEN_TRIES: u32 = 40;
const LISTEN_PAUSE: Duration = Duration::from_millis(5);
/// Length of the queue of clients: the kernel's usual limit.
const QUEUE: i32 = 4096;
/// Of the connections whose handshake was not over when the data path heard of the listener, so many are adopted: nobody says how many
/// there are.
const IN_HANDSHAKE: u32 = 64;
/// The queue of the listener has not been empty yet: all that comes out of it may have begun before.
const ALL: u32 = u32::MAX;

/// A bound socket, for [`Splicer::listen_on`]. Binding it first shows a wrong address before the data path is loaded.
#[derive(Debug)]
pub struct BoundSocket {
    socket: Socket,
    /// Connections may be in its queue already: the data path has not seen their SYNs, and they may lack the options that accepted
    /// sockets inherit.
    has_listened: bool,
}

impl BoundSocket {
    /// Binds a socket with SO_REUSEADDR, and IPV6_V6ONLY for IPv6
    /// addresses. Errors are those of socket(2), setsockopt(2) and bind(2).
    pub fn bind(addr: SocketAddr) -> io::Result<BoundSocket> {
        BoundSocket::bind_as(addr, true)
    }

    /// Binds a socket to an address that is not of this machine, for [`Splicer::listen_elsewhere`]. Needs CAP_NET_ADMIN.
    #[doc(hidden)]
    pub fn bind_elsewhere(addr: SocketAddr) -> io::Result<BoundSocket> {
        BoundSocket::bind_as(addr, false)
    }

    fn bind_as(addr: SocketAddr, is_ours: bool) -> io::Result<BoundSocket> {
        let s = Socket::new(Domain::for_address(addr), Type::STREAM.nonblocking(), None)?;
        if addr.is_ipv6() {
            s.set_only_v6(true)?;
        }
        s.set_reuse_address(true)?;
        inheritable(&s)?;
        if !is_ours {
            set_transparent(&s, addr.is_ipv6())?;
        }
        s.bind(&addr.into())?;
        Ok(BoundSocket { socket: s, has_listened: false })
    }

    /// Takes a listener that the caller has bound, or has received from the process that started it
    /// (socket activation). Connections that arrived before [`Splicer::listen_on`] are adopted when
    /// a splice is due. Returns [`io::ErrorKind::InvalidInput`] if it is not a TCP listener, or if it is an
    /// IPv6 listener that accepts IPv4 connections too: set IPV6_V6ONLY, and use one listener for each.
    pub fn from_listener(listener: std::net::TcpListener) -> io::Result<BoundSocket> {
        let invalid = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        let socket = Socket::from(listener);
        let addr = socket.local_addr()?.as_socket().ok_or_else(|| invalid("a listener of TCP has an IP address"))?;
        let takes_ipv4 = match addr.ip() {
            IpAddr::V6(ip) if ip.is_unspecified() => !socket.only_v6()?,
            IpAddr::V6(ip) => ip.to_ipv4_mapped().is_some(),
            IpAddr::V4(_) => false,
        };
        if takes_ipv4 {
            return Err(invalid("a listener for IPv6 takes connections of IPv4, too: set IPV6_V6ONLY"));
        }
        socket.set_nonblocking(true)?;
        inheritable(&socket)?;
        Ok(BoundSocket { socket, has_listened: true })
    }

    /// Lets clients connect already, and wait until somebody accepts: for a start that takes time. Errors are those of listen(2).
    pub fn listen(&mut self) -> io::Result<()> {
        self.socket.listen(QUEUE)?;
        self.has_listened = true;
        Ok(())
    }
}

/// Sets the options that accepted sockets inherit.
fn inheritable(s: &Socket) -> io::Result<()> {
    s.set_tcp_nodelay(true)?;
    s.set_out_of_band_inline(true) // see live.rs
}

/// A listening socket. Its connections are tracked from their SYN on, or when a splice is due ([`Splicer::listen_adopting`]).
pub struct Listener {
    splicer: Splicer,
    to_copy: bool,
    /// See [`Splicer::listen_adopting`].
    adopts: bool,
    /// So many of the next connections may have begun before the data path heard of this.
    early: AtomicU32,
    /// What intercepts its connections, whose they are, and the index of its rule there, if it is not awaited by its address.
    tpot: Option<(Arc<Tpot>, TpotWhose, Option<u32>)>,
    /// See [`Listener::pipeline`].
    pipeline: OnceLock<Arc<Pipeline>>,
    /// See [`Listener::show_clients`].
    shows_clients: bool,
    /// The local address of all its connections. `None`: each may have another one.
    local: Option<SocketAddr>,
    /// See [`Splicer::listen_for_a_while`].
    _while: Option<Tracked>,
    listener: AsyncFd<Arc<OwnedFd>>,
}

/// Connections to this address are tracked until this is dropped.
struct Tracked {
    splicer: Splicer,
    addr: SocketAddr,
}

impl Drop for Tracked {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.splicer.datapath().map(|d| d.unlisten(self.addr)) {
            tracing::debug!(addr = %self.addr, %error, "connections to an address that is left are still tracked");
        }
    }
}

impl Listener {
    /// Accepts the next connection. Errors are those of accept(2). On `EMFILE`, wait a little and try again: it is returned
    /// while one descriptor in eight is still free, because connections accepted already need descriptors for their servers.
    pub async fn accept(&self) -> io::Result<Leg> {
        let mut leg = self.accept_idle().await?;
        leg.attend()?;
        Ok(leg)
    }

    /// Accepts the next connection like [`Listener::accept`], without registering its socket with the runtime ([`Leg::attend`]).
    #[doc(hidden)]
    pub async fn accept_idle(&self) -> io::Result<Leg> {
        loop {
            let leg = self.accept_next().await?;
            if !self.is_deaf(&leg) {
                return Ok(leg);
            }
            self.splicer.engine().unheard.fetch_add(1, Relaxed);
            tracing::debug!(client = %leg.remote(), "reset: the data path had no room for an intercepted connection");
            leg.reset();
        }
    }

    async fn accept_next(&self) -> io::Result<Leg> {
        let next = async {
            self.splicer.engine().await_descriptors(self.listener.get_ref()).await?;
            let accept_one = |l: &Arc<OwnedFd>| {
                let accepted = accept(l);
                if accepted.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock)
                    && self.early.load(Relaxed) == ALL
                {
                    self.early.store(IN_HANDSHAKE, Relaxed);
                }
                accepted
            };
            self.listener.async_io(Interest::READABLE, accept_one).await
        };
        let pipeline = self.pipeline.get();
        let (socket, remote) = if let Some(pipeline) = pipeline { pipeline.beside(next).await } else { next.await }?;
        self.splicer.engine().opened(&socket);
        let is_early = self.early.load(Relaxed) > 0;
        if is_early {
            // nothing left: another task has taken the last one
            let _ = self.early.fetch_update(Relaxed, Relaxed, |n| if n == ALL { None } else { n.checked_sub(1) });
            inheritable(&SockRef::from(&socket))?;
        }
        let local = self.local.map_or_else(|| Ok(ip(&SockRef::from(&socket).local_addr()?)), Ok::<_, io::Error>)?;
        let mut leg = Leg::idle(socket, remote, local, self.to_copy.then_some(Refusal::Policy));
        if self.adopts || is_early && self.is_unknown(&leg) {
            leg = leg.without_record();
        }
        leg.opened.is_shown = self.shows_clients;
        if let Some((hops, isn)) = self.tpot.as_ref().and_then(|(tpot, ..)| tpot.asked(&leg.tuple())) {
            leg.opened.hops = Some(hops);
            let early = pipeline.and_then(|pipeline| pipeline.take(&leg.tuple(), isn));
            leg.opened.early = early.map(|early| early as Box<dyn EarlyConnection>).into();
        }
        self.splicer.engine().lingering.begins_anew(&leg.tuple());
        Ok(leg)
    }

    /// Returns whether a leg has to be adopted, since the data path has not seen its SYN.
    fn is_unknown(&self, leg: &Leg) -> bool {
        let may_adopt = !self.to_copy && !self.shows_clients && self.tpot.is_none();
        may_adopt && self.splicer.datapath().is_some_and(|d| d.leg(&leg.tuple()).is_none())
    }

    /// Returns whether no segment of the host will find the leg's socket: the address is not ours, the connection is in no tunnel,
    /// and the data path had no room for its record.
    fn is_deaf(&self, leg: &Leg) -> bool {
        let is_plain = self.tpot.as_ref().is_some_and(|(_, whose, _)| *whose == TpotWhose::All);
        is_plain && self.splicer.datapath().is_none_or(|d| d.leg(&leg.tuple()).is_none())
    }

    /// Connects to the servers of clients on their SYN, before they have completed the handshake: [`Splicer::connect`] with an
    /// accepted leg returns that connection. `allow` (client, server) decides whether to; what it returns is dropped when the
    /// connection is taken or given up. Clients for which it returns `None` are accepted all the same. It must not block.
    /// With [`TpotHandshake::Confirm`], a client whose server refuses is refused, which `refused` (client, server) is told of.
    /// A client gets no answer if its server gives none, and `refused` is told of that after ten seconds.
    ///
    /// Connections that no client completes within ten seconds are reset, as are the oldest ones of more than 1024, and all of
    /// them when the listener is dropped. Call it once, in the runtime that accepts, for a listener of
    /// [`Splicer::intercept`]: otherwise it fails with [`io::ErrorKind::InvalidInput`]. Other errors are those of maps.
    pub fn pipeline(
        &self,
        handshake: TpotHandshake,
        allow: impl Fn(SocketAddr, SocketAddr) -> Option<Permit> + Send + Sync + 'static,
        refused: impl Fn(SocketAddr, SocketAddr, io::Error) + Send + Sync + 'static,
    ) -> io::Result<()> {
        let (tpot, _, Some(rule)) = self.tpot.as_ref().ok_or(io::ErrorKind::InvalidInput)? else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let of = (tpot, *rule, self.shows_clients);
        let pipeline = Pipeline::begin(&self.splicer, of, handshake, Box::new(allow), Box::new(refused))?;
        self.pipeline.set(pipeline).map_err(|_| io::ErrorKind::InvalidInput.into())
    }

    /// Lets servers see the address of the client instead of ours, with a port of ours. The server has to be of the client's
    /// family, and what it sends to the client has to come through this machine. Call it before [`Listener::pipeline`]. Errors are
    /// those of routing rules, which need CAP_NET_ADMIN; [`io::ErrorKind::Unsupported`] without a data path.
    pub fn show_clients(&mut self) -> io::Result<()> {
        if self.to_copy || self.splicer.datapath().is_none() {
            return Err(no_data_path());
        }
        lock(self.splicer.handshakes()).route_transparent(self.local_addr()?.is_ipv6())?;
        self.shows_clients = true;
        Ok(())
    }

    /// Returns another descriptor of the socket, with the same queue of clients: for another process.
    pub fn try_clone_socket(&self) -> io::Result<std::net::TcpListener> {
        Ok(self.listener.get_ref().try_clone()?.into())
    }

    /// Returns whether its connections are never spliced ([`Splicer::listen_to_copy`]).
    pub(crate) fn is_to_copy(&self) -> bool {
        self.to_copy
    }

    /// Returns the address listened on, with the port that the kernel chose if 0 was requested.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(ip(&SockRef::from(&self.listener).local_addr()?))
    }
}

impl Splicer {
    /// Listens on `addr`; see [`BoundSocket::bind`].
    pub async fn listen(&self, addr: SocketAddr) -> io::Result<Listener> {
        self.listen_on(patiently(|| BoundSocket::bind(addr)).await?).await
    }

    /// Listens on a socket that was bound by [`BoundSocket::bind`], or taken over by [`BoundSocket::from_listener`].
    pub async fn listen_on(&self, socket: BoundSocket) -> io::Result<Listener> {
        if let Some(d) = self.datapath() {
            d.listen(ip(&socket.socket.local_addr()?))?; // before listen(2): the first SYN counts
        }
        self.listen_to_copy(socket).await.map(|listener| Listener { to_copy: false, ..listener })
    }

    /// Listens for connections that are tracked only when a splice is due, as are the connections to servers that are made for
    /// them: until then the data path does no work for any of them, and needs no room. Each of them is then adopted
    /// ([`Splicer::adopt`]), while its bytes are copied on: the splice is some milliseconds late. Use [`Splicer::listen_on`]
    /// where every connection is spliced at once.
    pub async fn listen_adopting(&self, socket: BoundSocket) -> io::Result<Listener> {
        let adopts = self.datapath().is_some();
        self.listen_to_copy(socket).await.map(|listener| Listener { to_copy: false, adopts, ..listener })
    }

    /// Listens like [`Splicer::listen_on`], for a connection or two: the data path knows the address until the listener is
    /// dropped. If it has no room for another one, the connections are copied.
    #[doc(hidden)]
    pub async fn listen_for_a_while(&self, socket: BoundSocket) -> io::Result<Listener> {
        let addr = ip(&socket.socket.local_addr()?);
        let tracked = match self.datapath().map(|d| d.listen(addr)) {
            Some(Ok(())) => Some(Tracked { splicer: self.clone(), addr }),
            Some(Err(error)) => {
                tracing::debug!(%addr, %error, "connections to a new address are copied");
                None
            }
            None => None,
        };
        self.listen_to_copy(socket).await.map(|l| Listener { to_copy: false, _while: tracked, ..l })
    }

    /// Listens like [`Splicer::listen_for_a_while`] at an address that is not of this machine ([`BoundSocket::bind_elsewhere`]), for
    /// connections of `host` that are routed through this machine. It fails if too many are awaited, and
    /// with [`io::ErrorKind::Unsupported`] without a data path. The routes have to be there: [`Listener::show_clients`], or
    /// [`Splicer::intercept`].
    #[doc(hidden)]
    pub async fn listen_elsewhere(&self, tpot: &Arc<Tpot>, socket: BoundSocket, host: IpAddr) -> io::Result<Listener> {
        if self.datapath().is_none() {
            return Err(no_data_path());
        }
        let listener = self.listen_to_copy(socket).await?;
        tpot.await_at(listener.local_addr()?, host, listener.listener.get_ref())?;
        Ok(Listener { to_copy: false, tpot: Some((tpot.clone(), TpotWhose::All, None)), ..listener })
    }

    /// Listens for connections of other hosts to `to`, of those that ask for a proxy or of all ([`Tpot`]). The local address of an
    /// accepted leg is that of the server which its client wants. Errors are those of routing rules and of IP_TRANSPARENT, which need
    /// CAP_NET_ADMIN; [`io::ErrorKind::Unsupported`] without a data path, and [`io::ErrorKind::InvalidInput`] if there is no
    /// room for another rule.
    pub async fn intercept(&self, tpot: &Arc<Tpot>, whose: TpotWhose, to: &Destinations) -> io::Result<Listener> {
        // its own address gets nothing but connections of this host, which are refused as guarded
        let own: IpAddr = if to.net.is_ipv6() { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() };
        self.intercept_on(BoundSocket::bind((own, 0).into())?, tpot, whose, to).await
    }

    /// The same with a socket that another process has used for this, of the family of `to`.
    pub async fn intercept_on(
        &self,
        bound: BoundSocket,
        tpot: &Arc<Tpot>,
        whose: TpotWhose,
        to: &Destinations,
    ) -> io::Result<Listener> {
        if self.datapath().is_none() {
            return Err(no_data_path());
        }
        let v6 = to.net.is_ipv6();
        lock(self.handshakes()).route_transparent(v6)?;
        set_transparent(&bound.socket, v6)?;
        let listener = self.listen_to_copy(bound).await?;
        let rule = tpot.take(whose, to, listener.listener.get_ref())?;
        *lock(&self.engine().tunnels) = Arc::downgrade(tpot);
        lock(&self.engine().intercepting).push(Arc::downgrade(listener.listener.get_ref()));
        Ok(Listener { to_copy: false, tpot: Some((tpot.clone(), whose, Some(rule))), local: None, ..listener })
    }

    /// Listens for connections that are never spliced. The connections to servers that are
    /// made for them are not spliced either, and the data path does no work for any of them.
    pub async fn listen_to_copy(&self, bound: BoundSocket) -> io::Result<Listener> {
        let BoundSocket { socket, has_listened } = bound;
        patiently(|| socket.listen(QUEUE)).await?;
        let early = AtomicU32::new(if has_listened { ALL } else { 0 });
        let local = Some(ip(&socket.local_addr()?)).filter(is_of_all);
        let listener = register_shared(Arc::new(socket.into()), Interest::READABLE)?;
        let (splicer, pipeline) = (self.clone(), OnceLock::new());
        let (to_copy, adopts, shows_clients) = (true, false, false);
        Ok(Listener {
            splicer,
            to_copy,
            adopts,
            early,
            tpot: None,
            pipeline,
            shows_clients,
            local,
            _while: None,
            listener,
        })
    }
}

fn no_data_path() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "the kernel's packet path is needed for this")
}

/// Returns whether a listener's address is that of its connections, with scope.
fn is_of_all(local: &SocketAddr) -> bool {
    !local.ip().is_unspecified() && !matches!(local.ip(), IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// Retries while the address is in use: a socket that resets a dead
/// connection cannot share the port before it leaves repair mode.
async fn patiently<T>(attempt: impl Fn() -> io::Result<T>) -> io::Result<T> {
    for _ in 0..LISTEN_TRIES {
        match attempt() {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => tokio::time::sleep(LISTEN_PAUSE).await,
            done => return done,
        }
    }
    attempt()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A socket in repair mode holds its port like this before it can share it.
    #[tokio::test]
    async fn a_port_that_another_socket_holds_for_an_instant_is_listened_on() {
        let splicer = Splicer::copying(Refusal::Policy);
        let bound = BoundSocket::bind(([127, 0, 0, 1], 0).into()).expect("bound");
        let holder = BoundSocket::bind(bound.socket.local_addr().expect("its address").as_socket().expect("IP"))
            .expect("shared");
        holder.socket.set_reuse_address(false).expect("as after repair mode");
        let rest = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            drop(holder);
        });
        let in_use = bound.socket.listen(1).expect_err("held");
        assert_eq!(in_use.kind(), io::ErrorKind::AddrInUse);
        splicer.listen_to_copy(bound).await.expect("soon free");
        rest.await.expect("dropped");

        // nor can the address be bound
        let holder = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        holder.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("bound");
        let at = ip(&holder.local_addr().expect("its address"));
        assert_eq!(BoundSocket::bind(at).expect_err("held").kind(), io::ErrorKind::AddrInUse);
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            drop(holder);
        });
        splicer.listen(at).await.expect("soon free");
    }

    #[tokio::test]
    async fn a_listener_of_the_caller_is_listened_on_with_what_it_has_got_before() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let splicer = Splicer::copying(Refusal::Policy);
        let theirs = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
        let at = theirs.local_addr().expect("its address");
        let mut early = tokio::net::TcpStream::connect(at).await.expect("connected");
        let ours = splicer.listen_on(BoundSocket::from_listener(theirs).expect("ours now")).await.expect("listened on");
        assert_eq!(ours.local_addr().expect("its address"), at);
        early.write_all(b"hi").await.expect("written");
        let (mut leg, mut came) = (ours.accept().await.expect("accepted"), [0; 2]);
        leg.read_exact(&mut came).await.expect("read");
        assert_eq!(&came, b"hi");
        assert!(SockRef::from(leg.socket().expect("open").get()).tcp_nodelay().expect("an option"));
    }

    #[test]
    fn a_listener_of_the_caller_that_takes_both_families_is_refused() {
        let Ok(both) = Socket::new(Domain::IPV6, Type::STREAM, None) else { return };
        both.set_only_v6(false).expect("an option");
        if both.bind(&SocketAddr::from(([0; 16], 0)).into()).is_err() {
            return; // no IPv6 here
        }
        both.listen(1).expect("it listens");
        assert_eq!(BoundSocket::from_listener(both.into()).expect_err("both").kind(), io::ErrorKind::InvalidInput);
    }
}
