//! A leg, and what was read from it and is not used yet.

use bytes::Bytes;
use longsplice_engine::{Leg, Splicer};
use std::{
    future::poll_fn,
    io,
    pin::Pin,
    task::{Context, Poll, Waker, ready},
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};

/// Bytes in hand at most. Heads are shorter ([`longsplice_http::HEAD_MAX`]).
const MOST: usize = 64 * 1024;
/// Bytes in hand at first: what a head usually takes.
const FIRST: usize = 8 * 1024;

#[derive(Debug)]
pub(crate) struct Stream {
    pub leg: Leg,
    /// In hand: bytes[start..end].
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// The last read filled all the room there was.
    eager: bool,
    /// The host has said that no more will come.
    pub ended: bool,
}

impl Stream {
    /// Of a server whose replies may be spliced.
    pub fn clamped(mut leg: Leg) -> Stream {
        leg.clamp();
        Stream::new(leg)
    }

    pub fn new(leg: Leg) -> Stream {
        Stream { leg, bytes: Vec::new(), start: 0, end: 0, eager: false, ended: false }
    }

    /// The same with this in hand, which must not be more than is read at first.
    pub fn with(leg: Leg, read: &[u8]) -> Stream {
        Stream { bytes: read.to_vec(), end: read.len(), ..Stream::new(leg) }
    }

    /// What is in hand.
    pub fn in_hand(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// The first `n` bytes in hand are used.
    pub fn consume(&mut self, n: usize) {
        self.start += n;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// The first bytes in hand are to be these.
    pub fn put_back(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.bytes.splice(..self.start, bytes.iter().copied());
            (self.start, self.end) = (0, self.end - self.start + bytes.len());
        }
    }

    /// Reads more; 0: the end.
    pub fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.end == self.bytes.len() || (self.eager && self.end == 0) {
            self.make_room();
        }
        let mut room = ReadBuf::new(&mut self.bytes[self.end..]);
        let read = Pin::new(&mut self.leg).poll_read(cx, &mut room);
        let n = room.filled().len();
        if read.is_pending() && self.end == 0 {
            self.bytes = Vec::new(); // an idle connection holds no memory
        }
        ready!(read)?;
        self.end += n;
        self.eager = self.end == self.bytes.len();
        self.ended |= n == 0;
        Poll::Ready(Ok(n))
    }

    fn make_room(&mut self) {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        } else {
            // Nobody asks for more while so much is in hand.
            self.bytes.resize(if self.eager { MOST.max(self.end + 1) } else { FIRST }, 0);
        }
    }

    pub async fn fill(&mut self) -> io::Result<usize> {
        poll_fn(|cx| self.poll_fill(cx)).await
    }

    pub fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match ready!(Pin::new(&mut self.leg).poll_write(cx, bytes))? {
            0 => Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
            n => Poll::Ready(Ok(n)),
        }
    }

    pub async fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.leg.write_all(bytes).await
    }

    /// Whether nothing has come, neither bytes nor the end.
    pub fn is_quiet(&mut self) -> bool {
        let mut nobody = Context::from_waker(Waker::noop());
        self.poll_fill(&mut nobody).is_pending() && self.in_hand().is_empty()
    }

    /// Closes it. What the host has sent and nobody has read makes that a reset (RFC 2525, 2.17).
    pub fn close(self, splicer: &Splicer) {
        splicer.discard(self.leg);
    }

    /// The leg, and what was read from it.
    pub fn into_parts(self) -> (Leg, Bytes) {
        let in_hand = Bytes::copy_from_slice(self.in_hand());
        (self.leg, in_hand)
    }
}
