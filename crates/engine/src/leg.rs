//! [`Leg`], our end of one connection: a byte stream that counts the bytes that pass.

use crate::{
    core::Position,
    live::{Live, read_now, write_now},
    refusal::Refusal,
    sync::lock,
    taps::Tap,
};
use longsplice_datapath::{
    Connection, Datapath, PathFacts, Repair, Tuple, clamp_window, closes_mutely, has_connection, lift_outstanding,
    lift_unread, limit_outstanding, limit_unread, limit_unsent, make_room, narrow_window, path_facts, received, unread,
    widen_window,
};
use socket2::{SockAddr, SockRef, TcpKeepalive};
use std::{
    any::Any,
    fmt::Debug,
    io::{self, IoSlice},
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    pin::Pin,
    sync::{Mutex, OnceLock},
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Window of [`Leg::clamp`], in bytes. The kernel makes up to twice as much of it if segments come in large packets. Bytes in
/// hand and bytes to come then fit the usual first window of the other host.
const FIRST_WINDOW: u32 = 16_384;
/// Round trip in which such a window suffices for some Gbit/s.
const NEAR: Duration = Duration::from_micros(250);

/// The socket of a leg.
#[derive(Debug)]
enum Socket {
    /// Accepted, and not registered with a runtime yet. It can be read and written as long as that need not wait.
    Idle(OwnedFd),
    /// Registered with the runtime: can be read and written.
    Live(Live),
    /// Not registered: the flow is forwarded, or is about to be copied again.
    Parked(OwnedFd),
    /// The flow is released.
    Gone,
}

/// Our end of one connection. Counts the bytes read and written, from which the
/// bound of a splice is computed. Never hand out a duplicate of the socket.
#[derive(Debug)]
pub struct Leg {
    socket: Socket,
    pub(crate) remote: SocketAddr,
    pub(crate) local: SocketAddr,
    /// Source and destination announced by a proxy in front. Boxed, because most legs have none.
    pub(crate) announced: Option<Box<(SocketAddr, SocketAddr)>>,
    /// The socket's position in both streams.
    pub(crate) at: Position,
    /// How many more proxies may intercept the connection to the server, if the client has asked for that (TPOT).
    pub(crate) hops: Option<u8>,
    /// The connection to `local`, if it was opened on the client's SYN.
    pub(crate) early: Mutex<Option<Box<dyn EarlyConnection>>>,
    /// See [`Leg::speaks_first`].
    pub(crate) speaks_first: bool,
    /// Whether the socket lacks TCP_NODELAY; see [`Leg::hurry`].
    delays: bool,
    /// Size of the receive buffer before it was limited; see [`Leg::clamp`].
    clamped: Option<usize>,
    /// Whether the receive window is limited; see [`Leg::narrow`].
    narrowed: bool,
    /// Whether the host was near when its path was last measured: a small window does not slow it down.
    is_near: bool,
    /// Whether the host is held back; see [`Leg::hold_back`].
    held_back: bool,
    /// Size of the send buffer before it was limited; see [`Leg::limit_outstanding`].
    buffered: Option<usize>,
    /// Whether the socket sends keep-alive probes; see [`Leg::keep_alive`].
    keeps_alive: bool,
    /// Whether the host has reset the connection while the flow was switching. The socket may not know.
    pub(crate) was_reset: bool,
    /// Tells the connection from others with the same addresses; see [`Leg::connection`].
    generation: OnceLock<u32>,
    /// Why the leg can never be spliced: the data path does not track it.
    refusal: OnceLock<Refusal>,
    /// Receives a copy of all bytes that pass.
    pub(crate) tap: Option<Tap>,
    /// Holds back the first data of both hosts; see [`EndToEndListener::hold_first_data`](crate::EndToEndListener).
    pub(crate) first: Option<Box<dyn HeldData>>,
    /// See [`Leg::until_parked`].
    seat: Option<Box<dyn Any + Send + Sync>>,
}

/// A connection to a server that was opened on the client's SYN.
pub(crate) trait EarlyConnection: Debug + Send {
    /// Waits until the server has answered. Registers the socket with the current runtime.
    fn connected(self: Box<Self>) -> Pin<Box<dyn Future<Output = io::Result<Leg>> + Send>>;
}

/// First data that the data path holds back, until this is dropped.
pub(crate) trait HeldData: Debug + Send + Sync {
    /// Lets it go. Calls after the first one do nothing.
    fn release(&self);
}

impl Leg {
    /// Wraps a socket that has been connected to a server, without TCP_NODELAY.
    pub(crate) fn to_server(
        socket: Live,
        remote: SocketAddr,
        local: SocketAddr,
        refusal: Option<Refusal>,
        generation: Option<u32>,
    ) -> Leg {
        let generation = generation.map(OnceLock::from).unwrap_or_default();
        Leg { delays: true, generation, ..Leg::new(socket, remote, local, refusal) }
    }

    /// Wraps a socket with TCP_NODELAY that was accepted.
    pub(crate) fn idle(socket: OwnedFd, remote: SocketAddr, local: SocketAddr, refusal: Option<Refusal>) -> Leg {
        Leg::with(Socket::Idle(socket), remote, local, refusal)
    }

    /// Wraps a socket with TCP_NODELAY.
    pub(crate) fn new(socket: Live, remote: SocketAddr, local: SocketAddr, refusal: Option<Refusal>) -> Leg {
        Leg::with(Socket::Live(socket), remote, local, refusal)
    }

    fn with(socket: Socket, remote: SocketAddr, local: SocketAddr, refusal: Option<Refusal>) -> Leg {
        Leg {
            socket,
            remote,
            local,
            announced: None,
            at: Position::default(),
            hops: None,
            early: Mutex::default(),
            speaks_first: false,
            delays: false,
            clamped: None,
            narrowed: false,
            is_near: false,
            held_back: false,
            buffered: None,
            keeps_alive: false,
            was_reset: false,
            generation: OnceLock::new(),
            refusal: refusal.map(OnceLock::from).unwrap_or_default(),
            tap: None,
            first: None,
            seat: None,
        }
    }

    /// Returns whether the leg can never be spliced. This holds for connections accepted after
    /// [`Splicer::listen_to_copy`](crate::Splicer) or for which the data path had no room, and for connections made for them.
    pub fn is_only_copied(&self) -> bool {
        self.refusal().is_some()
    }

    pub(crate) fn refusal(&self) -> Option<Refusal> {
        self.refusal.get().copied()
    }

    /// Takes a generation that the data path has just named for these addresses, if the socket still has its connection. It spares
    /// a call later.
    pub(crate) fn may_be(&self, generation: u32) {
        let own = || self.descriptor().is_some_and(has_connection).then_some(generation);
        self.generation.get_or_init(|| own().unwrap_or(Connection::NONE));
    }

    /// Returns the leg's connection as the data path names it. It is asked for the name once, while the socket has the connection:
    /// afterwards another one may have its addresses.
    pub(crate) fn connection(&self, d: Option<&Datapath>) -> Connection {
        let leg = self.tuple();
        let generation = *self.generation.get_or_init(|| {
            let known = d.filter(|_| !self.is_only_copied()).and_then(|d| d.generation(&leg));
            // it is asked in this order, so that what was known is of this connection
            known.filter(|_| self.descriptor().is_some_and(has_connection)).unwrap_or(Connection::NONE)
        });
        Connection { leg, generation }
    }

    /// Takes the connection to `server` that was opened on the client's SYN.
    pub(crate) fn early_to(&self, server: SocketAddr) -> Option<Box<dyn EarlyConnection>> {
        if server == self.local { lock(&self.early).take() } else { None }
    }

    /// Marks the leg as no longer tracked by the data path. The first reason counts.
    pub(crate) fn refuse(&self, why: Refusal) {
        let _ = self.refusal.set(why);
    }

    /// Copies all bytes that pass from now on to `tap`. Positions count from the beginning of the connection.
    #[cfg(feature = "taps")]
    pub fn tap(&mut self, tap: Tap) {
        tap.begin([self.bytes_in(), self.bytes_out()]);
        self.tap = Some(tap);
    }

    /// Removes the tap. Bytes that have passed are still delivered, followed by the end of the stream.
    #[cfg(feature = "taps")]
    pub fn untap(&mut self) {
        self.tap = None;
    }

    /// Returns the address of the host at the other end.
    pub fn remote(&self) -> SocketAddr {
        self.remote
    }

    /// Returns our own address on this connection.
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// Records the addresses that a proxy in front announced for this connection (PROXY protocol): those from
    /// which and to which the client connected. Lists and records then show `source` as the client's address.
    pub fn announce(&mut self, source: SocketAddr, destination: SocketAddr) {
        self.announced = Some(Box::new((source, destination)));
    }

    /// Returns the original source of the connection: as announced, or [`Leg::remote`].
    pub fn source(&self) -> SocketAddr {
        self.announced.as_ref().map_or(self.remote, |a| a.0)
    }

    /// Returns the original destination of the connection: as announced, or [`Leg::local`].
    pub fn destination(&self) -> SocketAddr {
        self.announced.as_ref().map_or(self.local, |a| a.1)
    }

    /// Returns the number of bytes read so far. The end of the stream does not count.
    pub fn bytes_in(&self) -> u64 {
        self.at.consumed - u64::from(self.at.eof)
    }

    /// Returns the number of bytes written so far. Our FIN does not count.
    pub fn bytes_out(&self) -> u64 {
        self.at.produced - u64::from(self.at.shut)
    }

    /// Closes the connection with a reset instead of a FIN (RFC 9293, 3.10.5: ABORT).
    pub fn reset(self) {
        self.abort();
    }

    /// Waits until the host has acknowledged everything that was written, or has acknowledged nothing more for `limit`. A reset
    /// discards what is left.
    #[doc(hidden)]
    pub async fn delivered(&self, limit: Duration) {
        const RARELY: Duration = Duration::from_millis(50);
        let (mut left, mut since, mut pause) = (u32::MAX, Instant::now(), Duration::from_millis(1));
        loop {
            match self.descriptor().and_then(|s| path_facts(s).ok()).map_or(0, |facts| facts.outstanding) {
                0 => return,
                now if now < left => (left, since) = (now, Instant::now()),
                _ if since.elapsed() >= limit => return,
                _ => {}
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RARELY);
        }
    }

    /// Makes the next close send a reset.
    #[doc(hidden)]
    pub fn reset_at_close(&self) {
        self.abort();
    }

    /// Notes whether the proxy will send something to the server of this client as soon as it is connected.
    #[doc(hidden)]
    pub fn speaks_first(&mut self, yes: bool) {
        self.speaks_first = yes;
    }

    /// Limits the receive window before the proxy sends a request. Bytes sent before a splice have to be copied, and a host that
    /// was promised a larger window may send more than the other host has room for. Does nothing if the host is far: more than
    /// its first window is never ahead of us then. The engine lifts the limit when it keeps copying, as does [`Leg::unclamp`].
    ///
    /// A host takes back the larger window that it was promised only with a segment of a higher number than the last one
    /// (RFC 9293, 3.10.7.4). That is the request of a new connection for which the proxy [speaks first](Leg::speaks_first); of
    /// any other, the first byte of the request has to be written on its own.
    #[doc(hidden)]
    pub fn clamp(&mut self) {
        self.path_facts();
        self.widen();
        if let (true, Socket::Live(s)) = (self.is_near, &self.socket) {
            self.clamped = limit_unread(s.get(), FIRST_WINDOW).ok(); // on failure, more is copied
        }
    }

    /// Whether the receive window is limited by [`Leg::clamp`].
    #[doc(hidden)]
    pub fn is_clamped(&self) -> bool {
        self.clamped.is_some()
    }

    /// Limits the receive window. A larger one that was announced stays until it is used.
    pub(crate) fn narrow(&mut self, window: u32) {
        self.narrowed = self.descriptor().is_some_and(|s| narrow_window(s, window).is_ok()); // on failure, it stays large
    }

    /// Limits the bytes that wait in the socket because its host does not take them. In flight may be more.
    pub(crate) fn limit_unsent(&self, bytes: u32) {
        if let Some(Err(error)) = self.descriptor().map(|s| limit_unsent(s, bytes)) {
            tracing::warn!(leg = ?self.tuple(), %error, "a queue may become long");
        }
    }

    /// Lifts the limit of [`Leg::narrow`].
    pub(crate) fn widen(&mut self) {
        if !std::mem::take(&mut self.narrowed) {
            return;
        }
        if let Some(Err(error)) = self.descriptor().map(widen_window) {
            tracing::warn!(leg = ?self.tuple(), %error, "the window stays narrow");
        }
    }

    /// Lifts the limit of [`Leg::clamp`] or [`Leg::narrow`].
    #[doc(hidden)]
    pub fn unclamp(&mut self) {
        self.widen();
        let Some(before) = self.clamped.take() else { return };
        if let Some(Err(error)) = self.descriptor().map(|s| lift_unread(s, before)) {
            tracing::warn!(leg = ?self.tuple(), %error, "the window stays small");
        }
    }

    /// Has the host send no more than `window` bytes ahead of what was read. A larger window that was announced stays.
    pub(crate) fn hold_back(&mut self, window: u32) {
        let narrowed = self.descriptor().map(|s| clamp_window(s, window));
        self.held_back |= narrowed.is_some_and(|set| set.is_ok()); // on failure, the queue stays long
    }

    /// Limits the bytes that the socket holds until its host acknowledges them.
    pub(crate) fn limit_outstanding(&mut self, bytes: u32) {
        let limited = self.descriptor().map(|s| limit_outstanding(s, bytes));
        if let (None, Some(Ok(before))) = (self.buffered, limited) {
            self.buffered = Some(before);
        }
    }

    /// Lifts the limits of [`Leg::hold_back`] and [`Leg::limit_outstanding`].
    pub(crate) fn relax(&mut self) {
        let was_held = std::mem::take(&mut self.held_back);
        let (buffered, Some(s)) = (self.buffered.take(), self.descriptor()) else { return };
        let lifted = if was_held { clamp_window(s, u32::MAX) } else { Ok(()) };
        if let Err(error) = lifted.and(buffered.map_or(Ok(()), |before| lift_outstanding(s, before))) {
            tracing::warn!(leg = ?self.tuple(), %error, "buffers of a connection stay small");
        }
    }

    /// Waits until there is something to read, or the stream ends, as
    /// far as the runtime knows. The next read may still have to wait.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.first.iter().for_each(|first| first.release());
        match self.socket()?.poll_readable(cx) {
            Poll::Pending if self.was_reset => Poll::Ready(Ok(())),
            readable => readable,
        }
    }

    /// Waits until the host has sent data, or has ended.
    pub(crate) fn poll_heard(&self, cx: &mut Context<'_>) -> Poll<()> {
        match &self.socket {
            Socket::Live(s) => s.poll_heard(cx),
            _ => Poll::Pending,
        }
    }

    /// Waits until the connection has failed, even if nobody reads or writes. Drop the future before the socket is parked.
    pub(crate) fn failed(&self) -> Option<impl Future<Output = ()> + use<>> {
        match &self.socket {
            Socket::Live(s) => Some(s.failed()),
            _ => None,
        }
    }

    /// Drops `seat` when the flow is spliced, or with the leg: until then, the flow needs the thread that it was assigned to.
    #[doc(hidden)]
    pub fn until_parked(&mut self, seat: impl Any + Send + Sync) {
        self.seat = Some(Box::new(seat));
    }

    /// Takes the leg and leaves a closed one in its place.
    pub(crate) fn take(&mut self) -> Leg {
        let (announced, refusal, generation) = (self.announced.clone(), self.refusal.clone(), self.generation.clone());
        let (socket, early) = (Socket::Gone, Mutex::default());
        let closed = Leg { socket, announced, early, generation, refusal, tap: None, first: None, seat: None, ..*self };
        std::mem::replace(self, closed)
    }

    /// Returns whether the socket was accepted, and nobody has waited for it yet.
    #[doc(hidden)]
    pub fn is_idle(&self) -> bool {
        matches!(self.socket, Socket::Idle(_))
    }

    /// Returns whether the leg has no socket, because a flow has taken or closed it.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self.socket, Socket::Gone)
    }

    /// Makes the next drop send a reset.
    pub(crate) fn abort(&self) {
        let Some(s) = self.descriptor() else { return };
        // The socket may be gone already, and then cannot be reset: errors can be ignored.
        let _ = Repair::Off.set(s);
        let _ = SockRef::from(&s).set_linger(Some(std::time::Duration::ZERO));
    }

    /// Returns whether [`Leg::abort`] does not tell the host, which may have to be told.
    pub(crate) fn aborts_mutely(&self) -> bool {
        self.descriptor().is_some_and(closes_mutely)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.socket {
            Socket::Live(s) => Some(s.get().as_fd()),
            Socket::Idle(s) | Socket::Parked(s) => Some(s.as_fd()),
            Socket::Gone => None,
        }
    }

    /// Returns what the socket knows of the path to the host; the default if there is no socket.
    pub(crate) fn path_facts(&mut self) -> PathFacts {
        let facts = self.descriptor().and_then(|fd| path_facts(fd).ok()).unwrap_or_default();
        self.is_near = facts.min_rtt.is_some_and(|rtt| rtt <= NEAR);
        facts
    }

    /// Returns whether a small window does not slow the host down, as its path was last measured.
    pub(crate) fn is_near(&self) -> bool {
        self.is_near
    }

    /// Sets TCP_NODELAY before any but the first write: the sender has already delayed what it wanted to delay. Nagle's algorithm
    /// never delays the first (RFC 9293, 3.7.4), and many connections to servers have no other.
    pub(crate) fn hurry(&mut self) -> io::Result<()> {
        if self.delays && self.at.produced > 0 {
            SockRef::from(self.socket()?.get()).set_tcp_nodelay(true)?;
            self.delays = false;
        }
        Ok(())
    }

    /// Returns the number of bytes from the host that wait to be read.
    #[doc(hidden)]
    pub fn unread(&self) -> u32 {
        self.descriptor().and_then(|fd| unread(fd).ok()).unwrap_or_default()
    }

    /// Returns the socket, for `splice(2)`. The caller must count the bytes in [`Leg::at`].
    pub(crate) fn socket(&self) -> io::Result<&Live> {
        match &self.socket {
            Socket::Live(s) => Ok(s),
            _ => Err(parked()),
        }
    }

    /// Closes the socket without sending anything to the host. Its flow goes on in the kernel.
    #[doc(hidden)]
    pub fn close_silently(&mut self) {
        // a parked socket is in repair mode already; if this fails, the data path mutes the FIN anyway
        if !matches!(self.socket, Socket::Parked(_)) {
            self.repair(Repair::On);
        }
        self.socket = Socket::Gone;
    }

    fn repair(&self, mode: Repair) {
        if let Some(Err(error)) = self.descriptor().map(|s| mode.set(s)) {
            tracing::warn!(leg = ?self.tuple(), %error, "repair mode of a parked socket");
        }
    }

    /// Sets keep-alive probes; see [`Policy::keepalive`](crate::Policy).
    /// Not used on parked sockets, which do not get the host's answers.
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

    /// Takes the socket out of the runtime and puts it into repair mode. If the process dies, the kernel then closes the
    /// socket without a FIN, and no socket is left that could answer for the connection after the data path is gone.
    pub(crate) fn park(&mut self) {
        self.seat = None;
        self.keep_alive(None);
        self.repair(Repair::On);
        match std::mem::replace(&mut self.socket, Socket::Gone) {
            Socket::Live(s) => self.socket = Socket::Parked(s.leave()),
            Socket::Idle(s) => self.socket = Socket::Parked(s),
            Socket::Parked(_) | Socket::Gone => {}
        }
    }

    /// Has a parked socket accept as much as its host was promised while its flow was forwarded: data
    /// beyond the window that the socket has announced would be dropped (RFC 9293, 3.10.7.4).
    pub(crate) fn make_room(&mut self, promised: u32) {
        self.clamped = None;
        if let Some(Err(error)) = self.descriptor().map(|s| make_room(s, promised)) {
            tracing::warn!(leg = ?self.tuple(), %error, "data beyond the socket's window will be sent again");
        }
    }

    /// Takes a parked socket out of repair mode. With `probe`, it sends window
    /// probes, because its host may have gone or may wait for a window update.
    pub(crate) fn unpark(&self, probe: bool) {
        self.repair(if probe { Repair::Probe } else { Repair::Off });
    }

    /// Registers the socket with the current runtime, unless it is registered.
    #[doc(hidden)]
    pub fn attend(&mut self) -> io::Result<()> {
        if matches!(self.socket, Socket::Live(_)) { Ok(()) } else { self.enter() }
    }

    /// Registers the socket with the current runtime, and takes it out of another one if
    /// necessary. Errors if the runtime accepts no more sockets, or the flow is released.
    #[doc(hidden)]
    pub fn enter(&mut self) -> io::Result<()> {
        let socket = match std::mem::replace(&mut self.socket, Socket::Gone) {
            Socket::Live(s) => s.leave(),
            Socket::Idle(s) | Socket::Parked(s) => s,
            Socket::Gone => return Err(parked()),
        };
        self.socket = Socket::Live(Live::new(socket)?);
        Ok(())
    }

    /// Sets a new socket in place of the one that was closed.
    pub(crate) fn reopen(&mut self, socket: OwnedFd) {
        (self.socket, self.delays) = (Socket::Parked(socket), true);
    }

    /// Reduces a parked leg to what cannot be found elsewhere. Addresses, including announced ones, are stored in the flow.
    pub(crate) fn parked(self) -> Parked {
        let Leg { socket, at, delays, tap, .. } = self;
        let socket = if let Socket::Parked(s) = socket { Some(s) } else { None };
        Parked { socket, at, delays, tap }
    }

    /// Returns the connection as the data path knows it.
    pub(crate) fn tuple(&self) -> Tuple {
        Tuple { remote: self.remote, local: self.local }
    }
}

/// Segments that arrived at a parked socket instead of the data path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Strays {
    None,
    /// Segments that are not acknowledged: the host will send them again.
    Held,
    /// Segments that are acknowledged: the host will not send them again.
    Taken,
}

/// A leg while its flow is forwarded.
#[derive(Debug)]
pub(crate) struct Parked {
    socket: Option<OwnedFd>,
    pub at: Position,
    delays: bool,
    tap: Option<Tap>,
}

impl Parked {
    /// Makes a leg again, without announced addresses.
    pub fn leg(self, Connection { leg: tuple, generation }: Connection) -> Leg {
        let Parked { socket, at, delays, tap } = self;
        let socket = socket.map_or(Socket::Gone, Socket::Parked);
        Leg {
            socket,
            remote: tuple.remote,
            local: tuple.local,
            announced: None,
            at,
            hops: None,
            early: Mutex::default(),
            speaks_first: false,
            delays,
            clamped: None,
            narrowed: false,
            is_near: false,
            held_back: false,
            buffered: None,
            keeps_alive: false,
            was_reset: false,
            generation: generation.into(),
            refusal: OnceLock::new(),
            tap,
            first: None,
            seat: None,
        }
    }

    /// Returns what has arrived at the parked socket, whose receive position was `stood`. `None` if it was released.
    pub fn strays(&self, stood: u32) -> Option<Strays> {
        let found = received(self.socket.as_ref()?);
        Some(match found {
            Ok((at, false)) if at == stood => Strays::None,
            Ok((at, true)) if at == stood => Strays::Held,
            _ => Strays::Taken,
        })
    }

    /// Closes the socket without sending anything to the host: a parked socket is in repair mode.
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
    /// Reads or writes a socket that is not registered. If that had to wait, registers it and returns `None`.
    fn if_idle<R>(&mut self, act: impl FnOnce(&OwnedFd) -> io::Result<R>) -> io::Result<Option<R>> {
        let Socket::Idle(socket) = &self.socket else { return Ok(None) };
        match act(socket) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.attend().map(|()| None),
            done => done.map(Some),
        }
    }

    /// Reads once. Returns `true` if the read is one byte of urgent data (RFC 9293, 3.8.5). Other reads end before such a byte.
    pub(crate) fn poll_take(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<bool>> {
        self.first = None;
        let before = buf.filled().len();
        let room = buf.remaining() > 0;
        let urgent = match self.if_idle(|s| read_now(s, buf))? {
            Some(urgent) => urgent,
            None => {
                let socket = open(&mut self.socket)?;
                match socket.poll_read(cx, buf) {
                    // the runtime may not know yet what has arrived; nothing more comes
                    Poll::Pending if self.was_reset => match read_now(socket.get(), buf) {
                        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Err(io::ErrorKind::ConnectionReset.into()),
                        read => read,
                    },
                    read => ready!(read),
                }?
            }
        };
        let n = buf.filled().len() - before;
        if let Some(tap) = self.tap.as_ref().filter(|_| n > 0) {
            tap.read(self.at.consumed, &buf.filled()[before..]);
        }
        if n > 0 || room {
            self.at.took(n);
        }
        Poll::Ready(Ok(urgent))
    }

    /// Writes once. With `urgent`, the last byte is urgent data.
    pub(crate) fn poll_give(&mut self, cx: &mut Context<'_>, buf: &[u8], urgent: bool) -> Poll<io::Result<usize>> {
        self.hurry()?;
        let n = match self.if_idle(|s| write_now(s, buf, urgent))? {
            Some(n) => n,
            None => ready!(open(&mut self.socket)?.poll_write(cx, buf, urgent))?,
        };
        if let Some(tap) = &self.tap {
            tap.wrote(self.at.produced, &buf[..n]);
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
        self.attend()?;
        self.hurry()?;
        let n = ready!(open(&mut self.socket)?.poll_write_vectored(cx, bufs))?;
        let (mut at, mut left) = (self.at.produced, n);
        for buf in bufs.iter().take_while(|_| self.tap.is_some()) {
            let part = &buf[..buf.len().min(left)];
            if let Some(tap) = self.tap.as_ref().filter(|_| !part.is_empty()) {
                tap.wrote(at, part);
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
        self.attend()?;
        self.socket()?.shut()?;
        self.at.closed();
        Poll::Ready(Ok(()))
    }
}

pub(crate) fn ip(address: &SockAddr) -> SocketAddr {
    address.as_socket().expect("a socket of TCP has an IP address")
}
