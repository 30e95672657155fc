//! [`LegOfProxy`], what a leg does for the proxy of this workspace only.

use super::Leg;
use crate::refusal::Refusal;
use longsplice_datapath::path_facts;
use nix::sys::socket::{MsgFlags, recv};
use std::{
    any::Any,
    future::poll_fn,
    io,
    os::fd::{AsRawFd, OwnedFd},
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

/// What a leg does for the proxy of this workspace only: no part of the interface.
#[doc(hidden)]
pub trait LegOfProxy {
    /// Waits until the host has acknowledged everything that was written, or has acknowledged nothing more for `limit`. A reset
    /// discards what is left.
    fn delivered(&self, limit: Duration) -> impl Future<Output = ()> + Send;

    /// Makes the next close send a reset.
    fn reset_at_close(&self);

    /// Notes whether the proxy will send something to the server of this client as soon as it is connected.
    fn speaks_first(&mut self, yes: bool);

    /// Limits the receive window before the proxy sends a request. Bytes sent before a splice have to be copied, and a host that
    /// was promised a larger window may send more than the other host has room for. Does nothing if the host is far: more than
    /// its first window is never ahead of us then. The engine lifts the limit when it keeps copying, as does
    /// [`LegOfProxy::unclamp`].
    ///
    /// A host takes back the larger window that it was promised only with a segment of a higher number than the last one
    /// (RFC 9293, 3.10.7.4). That is the request of a new connection for which the proxy
    /// [speaks first](LegOfProxy::speaks_first); of any other, the first byte of the request has to be written on its own.
    fn clamp(&mut self);

    /// Whether the receive window is limited by [`LegOfProxy::clamp`].
    fn is_clamped(&self) -> bool;

    /// Lifts the limit of [`LegOfProxy::clamp`].
    fn unclamp(&mut self);

    /// Has the connection copied to its end, and the one to its server, unless the data path knows it already.
    fn only_copy(&self);

    /// Returns the number of bytes from the host that wait to be read.
    fn unread(&self) -> u32;

    /// Reads bytes from the host and leaves them where they are, as soon as there are some. Returns 0 at the end of the stream.
    fn peek(&mut self, bytes: &mut [u8]) -> impl Future<Output = io::Result<usize>> + Send;

    /// Drops `seat` when the flow is spliced, or with the leg: until then, the flow needs the thread that it was assigned to.
    fn until_parked(&mut self, seat: impl Any + Send + Sync);

    /// Returns whether the socket was accepted, and nobody has waited for it yet.
    fn is_idle(&self) -> bool;

    /// Sets keep-alive probes ([`Policy::keepalive`](crate::Policy)) of a leg that is in no flow.
    fn keep_alive(&mut self, after: Option<Duration>);

    /// Writes once. The last of these bytes is urgent (RFC 9293, 3.8.5).
    fn poll_write_urgent(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>>;

    /// Registers the socket with the current runtime, unless it is registered.
    fn attend(&mut self) -> io::Result<()>;

    /// Registers the socket with the current runtime, and takes it out of another one if
    /// necessary. Errors if the runtime accepts no more sockets, or the flow is released.
    fn enter(&mut self) -> io::Result<()>;
}

impl LegOfProxy for Leg {
    async fn delivered(&self, limit: Duration) {
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

    fn reset_at_close(&self) {
        self.abort();
    }

    fn speaks_first(&mut self, yes: bool) {
        self.speaks_first = yes;
    }

    fn clamp(&mut self) {
        self.shaping.clamp(&self.socket, self.known.tuple());
    }

    fn is_clamped(&self) -> bool {
        self.shaping.is_clamped()
    }

    fn unclamp(&mut self) {
        Leg::unclamp(self);
    }

    fn only_copy(&self) {
        if self.lacks_record() {
            self.refuse(Refusal::Policy);
        }
    }

    fn unread(&self) -> u32 {
        Leg::unread(self)
    }

    async fn peek(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        poll_fn(|cx| {
            ready!(self.poll_readable(cx))?;
            let read = |socket: &OwnedFd| Ok(recv(socket.as_raw_fd(), bytes, MsgFlags::MSG_PEEK)?);
            self.socket()?.poll_with_readable(cx, read)
        })
        .await
    }

    fn until_parked(&mut self, seat: impl Any + Send + Sync) {
        self.seat = Some(Box::new(seat));
    }

    fn is_idle(&self) -> bool {
        Leg::is_idle(self)
    }

    fn keep_alive(&mut self, after: Option<Duration>) {
        Leg::keep_alive(self, after);
    }

    fn poll_write_urgent(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_give(cx, bytes, true)
    }

    fn attend(&mut self) -> io::Result<()> {
        Leg::attend(self)
    }

    fn enter(&mut self) -> io::Result<()> {
        Leg::enter(self)
    }
}
