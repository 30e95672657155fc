//! A leg, with a buffer of bytes that were read and not used yet.

use bytes::Bytes;
use longsplice_engine::{Leg, LegOfProxy, Splicer};
use std::{
    cell::Cell,
    future::poll_fn,
    io::{self, IoSlice},
    pin::{Pin, pin},
    task::{Context, Poll, Waker, ready},
};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Maximum size of the buffer in bytes. No head is longer ([`longsplice_http::REPLY_HEAD_MAX`]).
const MOST: usize = 64 * 1024;
/// Initial size of the buffer in bytes, enough for a usual head.
const FIRST: usize = 8 * 1024;

thread_local! {
    /// Buffer of a connection that has become idle, for the next one that has something to read.
    static SPARE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

#[derive(Debug)]
pub(crate) struct Stream {
    pub leg: Leg,
    /// The buffer; bytes from `start` on are unused.
    bytes: Vec<u8>,
    start: usize,
    /// The last read filled the buffer.
    eager: bool,
    /// The host has sent its FIN.
    pub ended: bool,
    /// Something was written.
    used: bool,
    /// The next byte is written on its own; see [`Stream::limit`].
    split: bool,
}

impl Stream {
    pub fn new(leg: Leg) -> Stream {
        Stream { leg, bytes: Vec::new(), start: 0, eager: false, ended: false, used: false, split: false }
    }

    /// Before a request: limits what the server may send ahead of us, since the reply will probably be spliced, or lifts the
    /// limit ([`LegOfProxy::clamp`]).
    pub fn limit(&mut self, yes: bool) {
        if !yes {
            self.leg.unclamp();
        } else if !self.leg.is_clamped() {
            self.leg.clamp();
            self.split = self.used && self.leg.is_clamped();
        }
    }

    /// Starts with these bytes in the buffer, at most one initial buffer of them.
    pub fn with(leg: Leg, read: &[u8]) -> Stream {
        Stream { bytes: read.to_vec(), ..Stream::new(leg) }
    }

    /// Returns the buffered bytes.
    pub fn in_hand(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// Removes the first `n` bytes from the buffer.
    pub fn consume(&mut self, n: usize) {
        self.start += n;
        if self.start == self.bytes.len() {
            self.bytes.clear();
            self.start = 0;
        }
    }

    /// Replaces `n` buffered bytes, beginning at `at`.
    pub fn replace(&mut self, at: usize, n: usize, with: &[u8]) {
        let at = self.start + at;
        self.bytes.splice(at..at + n, with.iter().copied());
        self.consume(0); // clears the buffer if it is empty now
    }

    /// Puts bytes back in front of the buffered ones.
    pub fn put_back(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.bytes.splice(..self.start, bytes.iter().copied());
            self.start = 0;
        }
    }

    /// Reads more bytes into the buffer; 0: end of stream.
    pub fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.leg.poll_readable(cx)?.is_pending() {
            if self.bytes.is_empty() && self.bytes.capacity() > 0 {
                SPARE.set(std::mem::take(&mut self.bytes)); // an idle connection keeps no buffer
            }
            return Poll::Pending;
        }
        self.make_room();
        let room = self.bytes.capacity() - self.bytes.len();
        let n = ready!(pin!(self.leg.read_buf(&mut self.bytes)).poll(cx))?;
        self.eager = n == room;
        self.ended |= n == 0;
        Poll::Ready(Ok(n))
    }

    fn make_room(&mut self) {
        if self.bytes.capacity() == 0 {
            self.bytes = SPARE.take();
        }
        let most = if self.eager { MOST } else { FIRST };
        if self.bytes.is_empty() && self.bytes.capacity() < most {
            self.bytes = Vec::with_capacity(most);
        } else if self.bytes.len() == self.bytes.capacity() && self.start > 0 {
            self.bytes.drain(..std::mem::take(&mut self.start));
        } else if self.bytes.len() == self.bytes.capacity() {
            // No caller reads more while `most` bytes are buffered.
            self.bytes.reserve_exact(most.saturating_sub(self.bytes.len()).max(1));
        }
    }

    pub async fn fill(&mut self) -> io::Result<usize> {
        poll_fn(|cx| self.poll_fill(cx)).await
    }

    pub fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let bytes = if self.split { &bytes[..1.min(bytes.len())] } else { bytes };
        match ready!(Pin::new(&mut self.leg).poll_write(cx, bytes))? {
            0 => Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
            n => {
                (self.used, self.split) = (true, false);
                Poll::Ready(Ok(n))
            }
        }
    }

    /// Writes two slices with one call.
    pub fn poll_write_both(&mut self, cx: &mut Context<'_>, first: &[u8], second: &[u8]) -> Poll<io::Result<usize>> {
        if second.is_empty() || self.split {
            return self.poll_write(cx, first);
        }
        let both = [first, second].map(IoSlice::new);
        match ready!(Pin::new(&mut self.leg).poll_write_vectored(cx, &both))? {
            0 => Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
            n => {
                self.used = true;
                Poll::Ready(Ok(n))
            }
        }
    }

    pub async fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.leg.write_all(bytes).await
    }

    /// Whether neither bytes nor the end of the stream have arrived.
    pub fn is_quiet(&mut self) -> bool {
        let mut nobody = Context::from_waker(Waker::noop());
        self.poll_fill(&mut nobody).is_pending() && self.in_hand().is_empty()
    }

    /// Closes the connection. If bytes of the host are unread, that is a reset (RFC 2525, 2.17).
    pub fn close(self, splicer: &Splicer) {
        splicer.discard(self.leg);
    }

    /// Returns the leg and the buffered bytes.
    pub fn into_parts(self) -> (Leg, Bytes) {
        let in_hand = Bytes::copy_from_slice(self.in_hand());
        (self.leg, in_hand)
    }
}
