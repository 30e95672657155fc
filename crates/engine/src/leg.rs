//! A leg: our end of one connection, as a byte stream that counts what passes.

use crate::{Refusal, Splicer, Tap, TapDirection, core::Position, live::Live};
use longsplice_datapath::{PathFacts, Repair, Tuple, clamp_window, path_facts, received};
use socket2::{Domain, SockAddr, SockRef, Socket as Socket2, TcpKeepalive, Type};
use std::{
    io::{self, IoSlice},
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    pin::Pin,
    sync::OnceLock,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf, unix::AsyncFd};

/// What a leg has of its socket.
#[derive(Debug)]
enum Socket {
    /// In the runtime: it can be read and written.
    Live(Live),
    /// Out of it: the flow is forwarded, or is about to be copied again.
    Parked(OwnedFd),
    /// The flow is released.
    Gone,
}

/// Our end of one connection. Reads and writes are counted, because the boundary of a splice is computed from the
/// counts: hand out no duplicate of the socket.
#[derive(Debug)]
pub struct Leg {
    socket: Socket,
    pub(crate) remote: SocketAddr,
    pub(crate) local: SocketAddr,
    /// Source and destination that a proxy before us has announced. Boxed: most have none.
    pub(crate) announced: Option<Box<(SocketAddr, SocketAddr)>>,
    /// Where the socket is.
    pub(crate) at: Position,
    /// See [`Leg::clamp`].
    clamped: bool,
    /// See [`Leg::keep_alive`].
    keeps_alive: bool,
    /// Why it will never be spliced: the data path does not know of it.
    refusal: OnceLock<Refusal>,
    /// Gets a copy of all that passes.
    pub(crate) tap: Option<Tap>,
}

impl Leg {
    /// TCP_NODELAY has been set: what a proxy passes on was delayed by its sender already, if that wanted it.
    pub(crate) fn new(socket: Live, remote: SocketAddr, local: SocketAddr, refusal: Option<Refusal>) -> Leg {
        let socket = Socket::Live(socket);
        Leg {
            socket,
            remote,
            local,
            announced: None,
            at: Position::default(),
            clamped: false,
            keeps_alive: false,
            refusal: refusal.map(OnceLock::from).unwrap_or_default(),
            tap: None,
        }
    }

    /// Whether it can never be spliced, having been accepted after [`Splicer::listen_to_copy`], or without room for it in the data
    /// path; or made for one of these.
    pub fn is_only_copied(&self) -> bool {
        self.refusal().is_some()
    }

    pub(crate) fn refusal(&self) -> Option<Refusal> {
        self.refusal.get().copied()
    }

    /// The data path does not know of it any more. The first reason counts.
    pub(crate) fn refuse(&self, why: Refusal) {
        let _ = self.refusal.set(why);
    }

    /// A copy of all that passes goes to this tap from now on. Positions count from the beginning of the connection.
    pub fn tap(&mut self, tap: Tap) {
        tap.begin([self.bytes_in(), self.bytes_out()]);
        self.tap = Some(tap);
    }

    /// No more of it. What has passed is still handed on, then the end.
    pub fn untap(&mut self) {
        self.tap = None;
    }

    /// Address of the host at the other end.
    pub fn remote(&self) -> SocketAddr {
        self.remote
    }

    /// Our own address on this connection.
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// Notes what a proxy before us says of the connection that it serves by this one (PROXY protocol): the address it
    /// came from, and the one it was made to. Lists and records then show the first as the client's.
    pub fn announce(&mut self, source: SocketAddr, destination: SocketAddr) {
        self.announced = Some(Box::new((source, destination)));
    }

    /// Where the connection came from at first: as announced, or [`Leg::remote`].
    pub fn source(&self) -> SocketAddr {
        self.announced.as_ref().map_or(self.remote, |a| a.0)
    }

    /// What it was made to at first: as announced, or [`Leg::local`].
    pub fn destination(&self) -> SocketAddr {
        self.announced.as_ref().map_or(self.local, |a| a.1)
    }

    /// Bytes read so far, end of stream not counted.
    pub fn bytes_in(&self) -> u64 {
        self.at.consumed - u64::from(self.at.eof)
    }

    /// Bytes written so far, our FIN not counted.
    pub fn bytes_out(&self) -> u64 {
        self.at.produced - u64::from(self.at.shut)
    }

    /// Closes with a reset instead of a FIN (RFC 9293, 3.10.5: ABORT).
    pub fn reset(self) {
        self.abort();
    }

    /// Makes the next close one with a reset.
    #[doc(hidden)]
    pub fn reset_at_close(&self) {
        self.abort();
    }

    /// Lets the host send no more than 32 KB ahead: what it has sent before a splice is copied, and what it was promised before may
    /// be more than the other has room for. Lifted by the engine where it copies after all, and by [`Leg::unclamp`].
    #[doc(hidden)]
    pub fn clamp(&mut self) {
        const FIRST_WINDOW: u32 = 32_768; // half of what hosts announce at first: what is in hand and what may come both fit
        if let Socket::Live(s) = &self.socket {
            self.clamped = clamp_window(s.get(), FIRST_WINDOW).is_ok(); // without it more is copied
        }
    }

    /// Lets the kernel choose the window again.
    #[doc(hidden)]
    pub fn unclamp(&mut self) {
        if let Socket::Live(s) = &self.socket
            && std::mem::take(&mut self.clamped)
            && let Err(error) = clamp_window(s.get(), u32::MAX)
        {
            tracing::warn!(leg = ?self.tuple(), %error, "the window stays small");
        }
    }

    /// Until there is something to read, or the end, as far as the runtime knows: the next read may still have to wait.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket()?.poll_readable(cx)
    }

    /// Until the host has said something, or has ended.
    pub(crate) fn poll_heard(&self, cx: &mut Context<'_>) -> Poll<()> {
        match &self.socket {
            Socket::Live(s) => s.poll_heard(cx),
            _ => Poll::Pending,
        }
    }

    /// Until the connection has failed, whether or not anybody reads or writes; let go of it before the socket is parked.
    pub(crate) fn failed(&self) -> Option<impl Future<Output = ()> + use<>> {
        match &self.socket {
            Socket::Live(s) => Some(s.failed()),
            _ => None,
        }
    }

    /// The leg; one that is closed stays in its place.
    pub(crate) fn take(&mut self) -> Leg {
        let (announced, refusal) = (self.announced.clone(), self.refusal.clone());
        let closed = Leg { socket: Socket::Gone, announced, refusal, tap: None, ..*self };
        std::mem::replace(self, closed)
    }

    /// Whether it has no socket: a flow has taken it, or closed it.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self.socket, Socket::Gone)
    }

    /// The same at the next drop.
    pub(crate) fn abort(&self) {
        let Some(s) = self.descriptor() else { return };
        // A socket that is gone already cannot be reset any more: nothing is lost by ignoring that.
        let _ = Repair::Off.set(s);
        let _ = SockRef::from(&s).set_linger(Some(std::time::Duration::ZERO));
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.socket {
            Socket::Live(s) => Some(s.get().as_fd()),
            Socket::Parked(s) => Some(s.as_fd()),
            Socket::Gone => None,
        }
    }

    /// What its socket knows of the path to the host: nothing, if there is no socket.
    pub(crate) fn path_facts(&self) -> PathFacts {
        self.descriptor().and_then(|fd| path_facts(fd).ok()).unwrap_or_default()
    }

    /// The socket, for `splice(2)`; what passes is told to [`Leg::at`].
    pub(crate) fn socket(&self) -> io::Result<&Live> {
        match &self.socket {
            Socket::Live(s) => Ok(s),
            _ => Err(parked()),
        }
    }

    /// Closes the socket without a word to the host: its flow goes on in the kernel.
    #[doc(hidden)]
    pub fn close_silently(&mut self) {
        // a parked one is in repair mode already; without it, its FIN is muted by the data path anyway
        if matches!(self.socket, Socket::Live(_)) {
            self.repair(Repair::On);
        }
        self.socket = Socket::Gone;
    }

    fn repair(&self, mode: Repair) {
        if let Some(Err(error)) = self.descriptor().map(|s| mode.set(s)) {
            tracing::warn!(leg = ?self.tuple(), %error, "repair mode of a parked socket");
        }
    }

    /// See [`Policy::keepalive`](crate::Policy). Not of a parked socket: what its host answers is not for it.
    pub(crate) fn keep_alive(&mut self, after: Option<Duration>) {
        const SECONDS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(32767));
        const PROBES: u32 = 4;
        let Some(socket) = self.descriptor().filter(|_| self.keeps_alive != after.is_some()) else { return };
        let socket = SockRef::from(&socket);
        let set = match after.map(|t| t.clamp(SECONDS.0, SECONDS.1)) {
            Some(t) => {
                let probes = TcpKeepalive::new().with_time(t).with_interval((t / PROBES).max(SECONDS.0));
                socket.set_tcp_keepalive(&probes.with_retries(PROBES))
            }
            None => socket.set_keepalive(false),
        };
        if let Err(error) = set {
            tracing::warn!(leg = ?self.tuple(), %error, "keep-alive");
        }
        self.keeps_alive = after.is_some();
    }

    /// Takes the socket out of the runtime. A parked socket is in repair mode: if the process dies, the kernel closes it
    /// without a FIN, and nothing of it is left that would answer for the connection when the data path is gone.
    pub(crate) fn park(&mut self) {
        self.keep_alive(None);
        self.repair(Repair::On);
        if let Socket::Live(s) = std::mem::replace(&mut self.socket, Socket::Gone) {
            self.socket = Socket::Parked(s.leave());
        }
    }

    /// A parked socket may speak again. `probe`: its host may have gone, or wait for a window.
    pub(crate) fn unpark(&self, probe: bool) {
        self.repair(if probe { Repair::Probe } else { Repair::Off });
    }

    /// Back into the runtime, with the parked socket or a new one.
    pub(crate) fn attend(&mut self) -> io::Result<()> {
        match &self.socket {
            Socket::Live(_) => return Ok(()),
            Socket::Parked(s) => SockRef::from(s).set_tcp_nodelay(true)?,
            Socket::Gone => {}
        }
        self.enter()
    }

    /// Into the current runtime, out of none or another: its thread is woken for what comes from now on. Errors if the runtime
    /// takes no more, or the flow is released.
    #[doc(hidden)]
    pub fn enter(&mut self) -> io::Result<()> {
        let socket = match std::mem::replace(&mut self.socket, Socket::Gone) {
            Socket::Live(s) => s.leave(),
            Socket::Parked(s) => s,
            Socket::Gone => return Err(parked()),
        };
        self.socket = Socket::Live(Live::new(socket)?);
        Ok(())
    }

    /// A new socket in place of the one that was closed.
    pub(crate) fn reopen(&mut self, socket: OwnedFd) {
        self.socket = Socket::Parked(socket);
    }

    /// What is left of a parked leg; the addresses, those that were announced among them, are known otherwise.
    pub(crate) fn parked(self) -> Parked {
        let Leg { socket, at, tap, .. } = self;
        let socket = if let Socket::Parked(s) = socket { Some(s) } else { None };
        Parked { socket, at, tap }
    }

    /// The connection as the data path knows it.
    pub(crate) fn tuple(&self) -> Tuple {
        Tuple { remote: self.remote, local: self.local }
    }
}

/// Segments that were meant for the data path and have come to a parked socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Strays {
    None,
    /// They are not acknowledged: their host will send them again.
    Held,
    /// They are, so it will not.
    Taken,
}

/// A leg while its flow is forwarded.
#[derive(Debug)]
pub(crate) struct Parked {
    socket: Option<OwnedFd>,
    pub at: Position,
    tap: Option<Tap>,
}

impl Parked {
    /// The leg again, with nothing announced.
    pub fn leg(self, tuple: &Tuple) -> Leg {
        let Parked { socket, at, tap } = self;
        let socket = socket.map_or(Socket::Gone, Socket::Parked);
        Leg {
            socket,
            remote: tuple.remote,
            local: tuple.local,
            announced: None,
            at,
            clamped: false,
            keeps_alive: false,
            refusal: OnceLock::new(),
            tap,
        }
    }

    /// What has come to the parked socket, which stood there: `None` if it was released.
    pub fn strays(&self, stood: u32) -> Option<Strays> {
        let found = received(self.socket.as_ref()?);
        Some(match found {
            Ok((at, false)) if at == stood => Strays::None,
            Ok((at, true)) if at == stood => Strays::Held,
            _ => Strays::Taken,
        })
    }

    /// Closes the socket without a word to the host: parked, it is in repair mode.
    pub fn close_silently(&mut self) {
        self.socket = None;
    }
}

fn open(socket: &mut Socket) -> io::Result<&mut Live> {
    match socket {
        Socket::Live(s) => Ok(s),
        _ => Err(parked()),
    }
}

fn parked() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the flow is forwarded")
}

impl Leg {
    /// Reads once; `true`: one byte of urgent data (RFC 9293, 3.8.5). What is not urgent ends where such a byte begins.
    pub(crate) fn poll_take(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<bool>> {
        let before = buf.filled().len();
        let room = buf.remaining() > 0;
        let urgent = ready!(open(&mut self.socket)?.poll_read(cx, buf))?;
        let n = buf.filled().len() - before;
        if let Some(tap) = self.tap.as_ref().filter(|_| n > 0) {
            tap.passed(TapDirection::FromHost, self.at.consumed, &buf.filled()[before..]);
        }
        if n > 0 || room {
            self.at.took(n);
        }
        Poll::Ready(Ok(urgent))
    }

    /// Writes once. `urgent`: the last of these bytes is.
    pub(crate) fn poll_give(&mut self, cx: &mut Context<'_>, buf: &[u8], urgent: bool) -> Poll<io::Result<usize>> {
        let n = ready!(open(&mut self.socket)?.poll_write(cx, buf, urgent))?;
        if let Some(tap) = &self.tap {
            tap.passed(TapDirection::ToHost, self.at.produced, &buf[..n]);
        }
        self.at.gave(n);
        Poll::Ready(Ok(n))
    }
}

impl AsyncRead for Leg {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.poll_take(cx, buf).map_ok(|_urgent| ())
    }
}

impl AsyncWrite for Leg {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_give(cx, buf, false)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let n = ready!(open(&mut self.socket)?.poll_write_vectored(cx, bufs))?;
        let (mut at, mut left) = (self.at.produced, n);
        for buf in bufs.iter().take_while(|_| self.tap.is_some()) {
            let part = &buf[..buf.len().min(left)];
            if let Some(tap) = self.tap.as_ref().filter(|_| !part.is_empty()) {
                tap.passed(TapDirection::ToHost, at, part);
            }
            (at, left) = (at + part.len() as u64, left - part.len());
        }
        self.at.gave(n);
        Poll::Ready(Ok(n))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.socket().map(drop))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket()?.shut()?;
        self.at.closed();
        Poll::Ready(Ok(()))
    }
}

pub(crate) fn ip(address: &SockAddr) -> SocketAddr {
    address.as_socket().expect("a socket of TCP has an IP address")
}

/// An address that nobody else listens on, before anybody does: so a mistake in it is known before the data path is loaded.
#[derive(Debug)]
pub struct BoundSocket {
    pub(crate) socket: Socket2,
    /// Connections may be in its queue already, without the options that are inherited.
    pub(crate) has_listened: bool,
}

impl BoundSocket {
    /// IPv6-only for IPv6 addresses, SO_REUSEADDR set.
    pub fn bind(addr: SocketAddr) -> io::Result<BoundSocket> {
        let s = Socket2::new(Domain::for_address(addr), Type::STREAM.nonblocking(), None)?;
        if addr.is_ipv6() {
            s.set_only_v6(true)?;
        }
        s.set_reuse_address(true)?;
        inheritable(&s)?;
        s.bind(&addr.into())?;
        Ok(BoundSocket { socket: s, has_listened: false })
    }

    /// A listener that the caller has bound, or got from who started the program (socket activation). Connections that it has got
    /// before [`Splicer::listen_on`] are copied, not spliced. [`io::ErrorKind::InvalidInput`] if one for IPv6 takes connections
    /// of IPv4, too, or if it is no listener of TCP: set IPV6_V6ONLY, and have one listener for each.
    pub fn from_listener(listener: std::net::TcpListener) -> io::Result<BoundSocket> {
        let invalid = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        let socket = Socket2::from(listener);
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
}

/// Options that accepted sockets inherit.
fn inheritable(s: &Socket2) -> io::Result<()> {
    s.set_tcp_nodelay(true)?;
    s.set_out_of_band_inline(true) // see live.rs
}

/// A listening socket whose connections are tracked from their SYN on.
pub struct Listener {
    pub(crate) splicer: Splicer,
    pub(crate) to_copy: bool,
    pub(crate) has_listened: bool,
    pub(crate) listener: AsyncFd<OwnedFd>,
}

impl Listener {
    /// The next connection. Errors are those of accept(2); the caller waits a little on `EMFILE` and goes on. That comes while one
    /// descriptor in eight is still free: who is accepted already needs them for the way to a server.
    pub async fn accept(&self) -> io::Result<Leg> {
        self.splicer.await_descriptors(self.listener.get_ref()).await?;
        let (socket, remote) = self.listener.async_io(Interest::READABLE, |l| SockRef::from(l).accept()).await?;
        self.splicer.opened(&socket);
        socket.set_nonblocking(true)?;
        if self.has_listened {
            inheritable(&socket)?;
        }
        let (local, remote) = (ip(&socket.local_addr()?), ip(&remote));
        let leg = Leg::new(Live::new(socket.into())?, remote, local, self.to_copy.then_some(Refusal::Policy));
        self.splicer.inner.lingering.begins_anew(&leg.tuple());
        Ok(leg)
    }

    /// The address listened on, with the port the kernel chose if 0 was asked for.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(ip(&SockRef::from(&self.listener).local_addr()?))
    }
}

/// As a socket in repair mode does, before it can share its port.
#[tokio::test]
async fn a_port_that_another_socket_holds_for_an_instant_is_listened_on() {
    let splicer = Splicer::copying(Refusal::Policy);
    let bound = BoundSocket::bind(([127, 0, 0, 1], 0).into()).expect("bound");
    let holder =
        BoundSocket::bind(bound.socket.local_addr().expect("its address").as_socket().expect("IP")).expect("shared");
    holder.socket.set_reuse_address(false).expect("as after repair mode");
    let rest = tokio::spawn(async move {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        drop(holder);
    });
    let in_use = bound.socket.listen(1).expect_err("held");
    assert_eq!(in_use.kind(), io::ErrorKind::AddrInUse);
    splicer.listen_to_copy(bound).await.expect("soon free");
    rest.await.expect("dropped");

    // nor can it be bound
    let holder = Socket2::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    holder.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("bound");
    let at = ip(&holder.local_addr().expect("its address"));
    assert_eq!(BoundSocket::bind(at).expect_err("held").kind(), io::ErrorKind::AddrInUse);
    tokio::spawn(async move {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        drop(holder);
    });
    splicer.listen(at).await.expect("soon free");
}

#[cfg(test)]
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

#[cfg(test)]
#[test]
fn a_listener_of_the_caller_that_takes_both_families_is_refused() {
    let Ok(both) = Socket2::new(Domain::IPV6, Type::STREAM, None) else { return };
    both.set_only_v6(false).expect("an option");
    if both.bind(&SocketAddr::from(([0; 16], 0)).into()).is_err() {
        return; // no IPv6 here
    }
    both.listen(1).expect("it listens");
    assert_eq!(BoundSocket::from_listener(both.into()).expect_err("both").kind(), io::ErrorKind::InvalidInput);
}
