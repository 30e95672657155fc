//! [`Leg`], our end of one connection: a byte stream that counts the bytes that pass.

pub(crate) mod handed;
mod known;
pub(crate) mod live;
mod of_proxy;
pub(crate) mod opened;
pub(crate) mod parked;
mod shaping;
mod socket;

pub use self::of_proxy::LegOfProxy;
use self::{
    known::Known,
    opened::{EarlyConnection, Opened},
    shaping::{Shaping, act},
    socket::Socket,
};
use crate::{
    core::Position,
    leg::live::{Live, read_now, write_now},
    refusal::Refusal,
    sync::lock,
    taps::Tap,
};
use longsplice_datapath::{
    Connection, Datapath, PathFacts, Repair, Tuple, closes_mutely, has_connection, limit_unsent, unread,
};
use socket2::{SockAddr, SockRef};
use std::{
    any::Any,
    fmt::Debug,
    io::{self, IoSlice},
    net::SocketAddr,
    os::fd::{BorrowedFd, OwnedFd},
    pin::Pin,
    sync::OnceLock,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Our end of one connection. Counts the bytes read and written, from which the
/// bound of a splice is computed. Never hand out a duplicate of the socket.
#[derive(Debug)]
pub struct Leg {
    socket: Socket,
    shaping: Shaping,
    known: Known,
    pub(crate) opened: Opened,
    /// The socket's position in both streams.
    pub(crate) at: Position,
    /// See [`LegOfProxy::speaks_first`].
    pub(crate) speaks_first: bool,
    /// Whether the host has reset the connection while the flow was switching. The socket may not know.
    pub(crate) was_reset: bool,
    /// Receives a copy of all bytes that pass.
    pub(crate) tap: Option<Tap>,
    /// See [`LegOfProxy::until_parked`].
    seat: Option<Box<dyn Any + Send + Sync>>,
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
        let known = Known { generation, ..Known::new(remote, local, refusal) };
        Leg { shaping: Shaping::new(true), ..Leg::with(Socket::Live(socket), known) }
    }

    /// Wraps a socket with TCP_NODELAY that was accepted.
    pub(crate) fn idle(socket: OwnedFd, remote: SocketAddr, local: SocketAddr, refusal: Option<Refusal>) -> Leg {
        Leg::with(Socket::Idle(socket), Known::new(remote, local, refusal))
    }

    /// Wraps a socket with TCP_NODELAY whose connection the data path has named.
    pub(crate) fn new(socket: Live, connection: Connection) -> Leg {
        Leg::with(Socket::Live(socket), Known::of(connection))
    }

    /// Nothing was set on the socket, and nothing has passed.
    fn with(socket: Socket, known: Known) -> Leg {
        Leg {
            socket,
            shaping: Shaping::default(),
            known,
            opened: Opened::default(),
            at: Position::default(),
            speaks_first: false,
            was_reset: false,
            tap: None,
            seat: None,
        }
    }

    /// Wraps a socket with TCP_NODELAY that the caller has made, and that the data path does not know.
    pub(crate) fn of_other_code(socket: Live, leg: &Tuple, refusal: Option<Refusal>) -> Leg {
        let known = Known { adopted: true, lacks_record: true, ..Known::new(leg.remote, leg.local, refusal) };
        Leg::with(Socket::Live(socket), known)
    }

    /// Has the leg adopted before it is spliced.
    pub(crate) fn without_record(self) -> Leg {
        Leg { known: Known { lacks_record: true, ..self.known }, ..self }
    }

    /// Returns whether the data path does not know the connection, and could adopt it.
    pub(crate) fn lacks_record(&self) -> bool {
        self.known.lacks_record && !self.is_only_copied()
    }

    /// Notes that the data path has adopted the connection.
    pub(crate) fn has_record(&mut self, connection: Connection) {
        (self.known.lacks_record, self.known.generation) = (false, connection.generation.into());
    }

    /// Returns whether the data path may have a record of the connection.
    pub(crate) fn is_tracked(&self) -> bool {
        !self.known.lacks_record && !self.is_only_copied()
    }

    pub(crate) fn is_adopted(&self) -> bool {
        self.known.adopted
    }

    /// Returns whether the leg can never be spliced. This holds for connections accepted after
    /// [`Splicer::listen_to_copy`](crate::Splicer) or for which the data path had no room, and for connections made for them.
    pub fn is_only_copied(&self) -> bool {
        self.refusal().is_some()
    }

    pub(crate) fn refusal(&self) -> Option<Refusal> {
        self.known.refusal.get().copied()
    }

    /// Takes a generation that the data path has just named for these addresses, if the socket still has its connection. It spares
    /// a call later.
    pub(crate) fn may_be(&self, generation: u32) {
        let own = || self.descriptor().is_some_and(has_connection).then_some(generation);
        self.known.generation.get_or_init(|| own().unwrap_or(Connection::NONE));
    }

    /// Returns the leg's connection as the data path names it. It is asked for the name once, while the socket has the connection:
    /// afterwards another one may have its addresses.
    pub(crate) fn connection(&self, d: Option<&Datapath>) -> Connection {
        let leg = self.tuple();
        if self.known.lacks_record {
            return Connection { leg, generation: Connection::NONE };
        }
        let generation = *self.known.generation.get_or_init(|| {
            let known = d.filter(|_| !self.is_only_copied()).and_then(|d| d.generation(&leg));
            // it is asked in this order, so that what was known is of this connection
            known.filter(|_| self.descriptor().is_some_and(has_connection)).unwrap_or(Connection::NONE)
        });
        Connection { leg, generation }
    }

    /// Takes the connection to `server` that was opened on the client's SYN.
    pub(crate) fn early_to(&self, server: SocketAddr) -> Option<Box<dyn EarlyConnection>> {
        if server == self.local() { lock(&self.opened.early).take() } else { None }
    }

    /// Marks the leg as no longer tracked by the data path. The first reason counts.
    pub(crate) fn refuse(&self, why: Refusal) {
        let _ = self.known.refusal.set(why);
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
        self.known.remote
    }

    /// Returns our own address on this connection.
    pub fn local(&self) -> SocketAddr {
        self.known.local
    }

    /// Records the addresses that a proxy in front announced for this connection (PROXY protocol): those from
    /// which and to which the client connected. Lists and records then show `source` as the client's address.
    pub fn announce(&mut self, source: SocketAddr, destination: SocketAddr) {
        self.known.announced = Some(Box::new((source, destination)));
    }

    /// Returns the announced addresses.
    pub(crate) fn announced(&self) -> Option<Box<(SocketAddr, SocketAddr)>> {
        self.known.announced.clone()
    }

    /// Sets them again in a leg that was parked.
    pub(crate) fn set_announced(&mut self, announced: Option<Box<(SocketAddr, SocketAddr)>>) {
        self.known.announced = announced;
    }

    /// Returns the original source of the connection: as announced, or [`Leg::remote`].
    pub fn source(&self) -> SocketAddr {
        self.known.announced.as_ref().map_or(self.known.remote, |a| a.0)
    }

    /// Returns the original destination of the connection: as announced, or [`Leg::local`].
    pub fn destination(&self) -> SocketAddr {
        self.known.announced.as_ref().map_or(self.known.local, |a| a.1)
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

    /// Limits the receive window. A larger one that was announced stays until it is used.
    pub(crate) fn narrow(&mut self, window: u32) {
        self.shaping.narrow(&self.socket, window);
    }

    /// Limits the bytes that wait in the socket because its host does not take them. In flight may be more.
    pub(crate) fn limit_unsent(&self, bytes: u32) {
        let what = "cannot limit what waits in a socket: its queue may become long";
        act(&self.socket, self.tuple(), what, |s| limit_unsent(s, bytes));
    }

    /// Lifts the limit of [`Leg::narrow`].
    pub(crate) fn widen(&mut self) {
        self.shaping.widen(&self.socket, self.known.tuple());
    }

    /// Lifts the limit of [`LegOfProxy::clamp`] or [`Leg::narrow`].
    pub(crate) fn unclamp(&mut self) {
        self.shaping.unclamp(&self.socket, self.known.tuple());
    }

    /// Has the host send no more than `window` bytes ahead of what was read. A larger window that was announced stays.
    pub(crate) fn hold_back(&mut self, window: u32) {
        self.shaping.hold_back(&self.socket, window);
    }

    /// Limits the bytes that the socket holds until its host acknowledges them.
    pub(crate) fn limit_outstanding(&mut self, bytes: u32) {
        self.shaping.limit_outstanding(&self.socket, bytes);
    }

    /// Lifts the limits of [`Leg::hold_back`] and [`Leg::limit_outstanding`].
    pub(crate) fn relax(&mut self) {
        self.shaping.relax(&self.socket, self.known.tuple());
    }

    /// Waits until there is something to read, or the stream ends, as
    /// far as the runtime knows. The next read may still have to wait.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.opened.first.iter().for_each(|first| first.release());
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

    /// Takes the leg and leaves a closed one in its place.
    pub(crate) fn take(&mut self) -> Leg {
        let closed = Leg { at: self.at, was_reset: self.was_reset, ..Leg::with(Socket::Gone, self.known.clone()) };
        std::mem::replace(self, closed)
    }

    /// Returns whether the socket was accepted, and nobody has waited for it yet.
    pub(crate) fn is_idle(&self) -> bool {
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

    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.socket.descriptor()
    }

    /// Returns what the socket knows of the path to the host; the default if there is no socket.
    pub(crate) fn path_facts(&mut self) -> PathFacts {
        self.shaping.path_facts(&self.socket)
    }

    /// Returns whether a small window does not slow the host down, as its path was last measured.
    pub(crate) fn is_near(&self) -> bool {
        self.shaping.is_near()
    }

    /// Sets TCP_NODELAY before any but the first write: the sender has already delayed what it wanted to delay. Nagle's algorithm
    /// never delays the first (RFC 9293, 3.7.4), and many connections to servers have no other.
    pub(crate) fn hurry(&mut self) -> io::Result<()> {
        if self.at.produced > 0 { self.shaping.hurry(&self.socket) } else { Ok(()) }
    }

    /// Returns the number of bytes from the host that wait to be read.
    pub(crate) fn unread(&self) -> u32 {
        self.descriptor().and_then(|fd| unread(fd).ok()).unwrap_or_default()
    }

    /// Returns the socket, for `splice(2)`. The caller must count the bytes in [`Leg::at`].
    pub(crate) fn socket(&self) -> io::Result<&Live> {
        self.socket.live()
    }

    /// Closes the socket without sending anything to the host. Its flow goes on in the kernel. For the bench, which releases flows.
    #[doc(hidden)]
    pub fn close_silently(&mut self) {
        // a parked socket is in repair mode already; if this fails, the data path mutes the FIN anyway
        if !matches!(self.socket, Socket::Parked(_)) {
            self.repair(Repair::On);
        }
        self.socket = Socket::Gone;
    }

    fn repair(&self, mode: Repair) {
        let what = "cannot set repair mode of a parked socket: it may answer for its flow, or not at all";
        act(&self.socket, self.tuple(), what, |s| mode.set(s));
    }

    /// Sets keep-alive probes; see [`Policy::keepalive`](crate::Policy).
    /// Not used on parked sockets, which do not get the host's answers.
    pub(crate) fn keep_alive(&mut self, after: Option<Duration>) {
        self.shaping.keep_alive(&self.socket, self.known.tuple(), after);
    }

    /// Takes the socket out of the runtime and puts it into repair mode. If the process dies, the kernel then closes the
    /// socket without a FIN, and no socket is left that could answer for the connection after the data path is gone.
    pub(crate) fn park(&mut self) {
        self.seat = None;
        self.keep_alive(None);
        self.repair(Repair::On);
        self.socket.park();
    }

    /// Has a parked socket accept as much as its host was promised while its flow was forwarded: data
    /// beyond the window that the socket has announced would be dropped (RFC 9293, 3.10.7.4).
    pub(crate) fn make_room(&mut self, promised: u32) {
        self.shaping.make_room(&self.socket, self.known.tuple(), promised);
    }

    /// Takes a parked socket out of repair mode. With `probe`, it sends window
    /// probes, because its host may have gone or may wait for a window update.
    pub(crate) fn unpark(&self, probe: bool) {
        self.repair(if probe { Repair::Probe } else { Repair::Off });
    }

    /// Registers the socket with the current runtime, unless it is registered.
    pub(crate) fn attend(&mut self) -> io::Result<()> {
        self.socket.attend()
    }

    /// Registers the socket with the current runtime, and takes it out of another one if necessary.
    pub(crate) fn enter(&mut self) -> io::Result<()> {
        self.socket.enter()
    }

    /// Sets a new socket in place of the one that was closed.
    pub(crate) fn reopen(&mut self, socket: OwnedFd) {
        (self.socket, self.shaping) = (Socket::Parked(socket), Shaping::new(true));
    }

    /// Returns the connection as the data path knows it.
    pub(crate) fn tuple(&self) -> Tuple {
        self.known.tuple()
    }
}

impl Leg {
    /// Reads once. Returns `true` if the read is one byte of urgent data (RFC 9293, 3.8.5). Other reads end before such a byte.
    pub(crate) fn poll_take(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<bool>> {
        self.opened.first = None;
        let before = buf.filled().len();
        let room = buf.remaining() > 0;
        let urgent = match self.socket.if_idle(|s| read_now(s, buf))? {
            Some(urgent) => urgent,
            None => {
                let socket = self.socket.live_mut()?;
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
        let n = match self.socket.if_idle(|s| write_now(s, buf, urgent))? {
            Some(n) => n,
            None => ready!(self.socket.live_mut()?.poll_write(cx, buf, urgent))?,
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
        let n = ready!(self.socket.live_mut()?.poll_write_vectored(cx, bufs))?;
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
