//! What is set on the socket of a leg and has to be lifted again.

use super::socket::Socket;
use longsplice_datapath::{
    PathFacts, Tuple, clamp_window, lift_outstanding, lift_unread, limit_outstanding, limit_unread, make_room,
    narrow_window, path_facts, widen_window,
};
use socket2::{SockRef, TcpKeepalive};
use std::{io, mem, os::fd::BorrowedFd, time::Duration};

/// Window of [`Shaping::clamp`], in bytes. The kernel makes up to twice as much of it if segments come in large packets. Bytes in
/// hand and bytes to come then fit the usual first window of the other host.
const FIRST_WINDOW: u32 = 16_384;
/// Round trip in which such a window suffices for some Gbit/s.
const NEAR: Duration = Duration::from_micros(250);

/// What is set on the socket of a leg and has to be lifted again. The socket is passed to each method, with its leg for the log.
/// Without one, as that of a released flow, a method does nothing. If something cannot be set, the socket works without it.
#[derive(Debug, Default)]
pub(crate) struct Shaping {
    /// Whether the socket lacks TCP_NODELAY.
    delays: bool,
    /// Size of the receive buffer before [`Shaping::clamp`].
    clamped: Option<usize>,
    /// Whether the receive window is limited by [`Shaping::narrow`].
    narrowed: bool,
    /// Whether the host was near when its path was last measured: a small window does not slow it down.
    is_near: bool,
    /// Whether the host is held back by [`Shaping::hold_back`].
    held_back: bool,
    /// Size of the send buffer before [`Shaping::limit_outstanding`].
    buffered: Option<usize>,
    /// Whether the socket sends keep-alive probes.
    keeps_alive: bool,
}

impl Shaping {
    /// That of a socket on which nothing was set, or TCP_NODELAY only.
    pub fn new(delays: bool) -> Shaping {
        Shaping { delays, ..Shaping::default() }
    }

    /// Whether the socket lacks TCP_NODELAY.
    pub fn delays(&self) -> bool {
        self.delays
    }

    /// Sets TCP_NODELAY, if it is missing.
    pub fn hurry(&mut self, socket: &Socket) -> io::Result<()> {
        if self.delays {
            SockRef::from(socket.live()?.get()).set_tcp_nodelay(true)?;
            self.delays = false;
        }
        Ok(())
    }

    /// Returns what the socket knows of the path to the host; the default if there is no socket.
    pub fn path_facts(&mut self, socket: &Socket) -> PathFacts {
        let facts = socket.descriptor().and_then(|s| path_facts(s).ok()).unwrap_or_default();
        self.is_near = facts.min_rtt.is_some_and(|rtt| rtt <= NEAR);
        facts
    }

    /// Whether a small window does not slow the host down, as its path was last measured.
    pub fn is_near(&self) -> bool {
        self.is_near
    }

    /// Limits the receive buffer of a host that is near.
    pub fn clamp(&mut self, socket: &Socket, leg: Tuple) {
        self.path_facts(socket);
        self.widen(socket, leg);
        if let (true, Socket::Live(s)) = (self.is_near, socket) {
            self.clamped = limit_unread(s.get(), FIRST_WINDOW).ok(); // on failure, more is copied
        }
    }

    /// Whether the receive buffer is limited by [`Shaping::clamp`].
    pub fn is_clamped(&self) -> bool {
        self.clamped.is_some()
    }

    /// Limits the receive window. A larger one that was announced stays until it is used.
    pub fn narrow(&mut self, socket: &Socket, window: u32) {
        self.narrowed = socket.descriptor().is_some_and(|s| narrow_window(s, window).is_ok()); // on failure, it stays large
    }

    /// Lifts the limit of [`Shaping::narrow`].
    pub fn widen(&mut self, socket: &Socket, leg: Tuple) {
        if mem::take(&mut self.narrowed) {
            act(socket, leg, "cannot widen the window of a connection: it stays narrow", widen_window);
        }
    }

    /// Lifts the limits of [`Shaping::clamp`] and [`Shaping::narrow`].
    pub fn unclamp(&mut self, socket: &Socket, leg: Tuple) {
        self.widen(socket, leg);
        if let Some(before) = self.clamped.take() {
            let what = "cannot restore the receive buffer of a connection: its window stays small";
            act(socket, leg, what, |s| lift_unread(s, before));
        }
    }

    /// Has the socket accept as much as its host was promised. This replaces the limit of [`Shaping::clamp`].
    pub fn make_room(&mut self, socket: &Socket, leg: Tuple, promised: u32) {
        self.clamped = None;
        let what = "cannot enlarge the window of a socket: data beyond it will be sent again";
        act(socket, leg, what, |s| make_room(s, promised));
    }

    /// Has the host send no more than `window` bytes ahead of what was read. A larger window that was announced stays.
    pub fn hold_back(&mut self, socket: &Socket, window: u32) {
        let narrowed = socket.descriptor().map(|s| clamp_window(s, window));
        self.held_back |= narrowed.is_some_and(|set| set.is_ok()); // on failure, the queue stays long
    }

    /// Limits the bytes that the socket holds until its host acknowledges them.
    pub fn limit_outstanding(&mut self, socket: &Socket, bytes: u32) {
        let limited = socket.descriptor().map(|s| limit_outstanding(s, bytes));
        if let (None, Some(Ok(before))) = (self.buffered, limited) {
            self.buffered = Some(before);
        }
    }

    /// Lifts the limits of [`Shaping::hold_back`] and [`Shaping::limit_outstanding`].
    pub fn relax(&mut self, socket: &Socket, leg: Tuple) {
        let (was_held, buffered) = (mem::take(&mut self.held_back), self.buffered.take());
        act(socket, leg, "cannot restore the buffers of a connection: they stay small", |s| {
            let lifted = if was_held { clamp_window(s, u32::MAX) } else { Ok(()) };
            lifted.and(buffered.map_or(Ok(()), |before| lift_outstanding(s, before)))
        });
    }

    /// Sets keep-alive probes after so much silence, or none.
    pub fn keep_alive(&mut self, socket: &Socket, leg: Tuple, after: Option<Duration>) {
        const SECONDS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(32767));
        const PROBES: u32 = 4;
        if socket.descriptor().is_none() || self.keeps_alive == after.is_some() {
            return;
        }
        act(socket, leg, "cannot set keep-alive: a host that is gone may be noticed late", |s| {
            let socket = SockRef::from(&s);
            let Some(t) = after.map(|t| t.clamp(SECONDS.0, SECONDS.1)) else { return socket.set_keepalive(false) };
            let probes = TcpKeepalive::new().with_time(t).with_interval((t / PROBES).max(SECONDS.0));
            socket.set_tcp_keepalive(&probes.with_retries(PROBES))
        });
        self.keeps_alive = after.is_some();
    }
}

/// Does something to the socket, if there is one. `what` says in the log what cannot be done, and what follows.
pub(super) fn act<'a>(socket: &'a Socket, leg: Tuple, what: &str, act: impl FnOnce(BorrowedFd<'a>) -> io::Result<()>) {
    if let Some(Err(error)) = socket.descriptor().map(act) {
        tracing::warn!(?leg, %error, "{what}");
    }
}
