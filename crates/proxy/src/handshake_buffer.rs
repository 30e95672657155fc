//! Reads the messages of a handshake through a bounded buffer, and keeps the bytes that follow the last one.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use std::{
    io,
    time::{Duration, Instant},
};
use tokio::io::{AsyncRead, AsyncReadExt};

/// Maximum size in bytes of a SOCKS message; the longest of RFC 1929 has 513 bytes, that of SOCKS 4a 520.
const CAP: usize = 1024;
/// Bytes per read: enough for most ClientHellos, so that one read suffices.
const STEP: usize = 2048;

/// Bytes that were read and not used yet; never more than the size limit of the message being read.
#[derive(Debug)]
pub(crate) struct HandshakeBuffer {
    buffer: BytesMut,
    /// When the client could begin to speak.
    began: Instant,
}

/// One that begins now.
impl Default for HandshakeBuffer {
    fn default() -> HandshakeBuffer {
        HandshakeBuffer::new(Instant::now())
    }
}

/// Reason why there is no message.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandshakeError<E> {
    #[error("the client closed before its request was complete")]
    Closed,
    #[error("a message of more than {0} bytes")]
    TooLong(usize),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Parse(E),
}

/// What was read before.
impl From<Bytes> for HandshakeBuffer {
    fn from(read: Bytes) -> HandshakeBuffer {
        HandshakeBuffer { buffer: BytesMut::from(&read[..]), ..HandshakeBuffer::default() }
    }
}

impl HandshakeBuffer {
    /// Creates an empty one.
    pub(crate) fn new(began: Instant) -> HandshakeBuffer {
        HandshakeBuffer { buffer: BytesMut::new(), began }
    }

    /// The next part of the handshake has a time limit of its own.
    pub(crate) fn begins_anew(&mut self) {
        self.began = Instant::now();
    }

    /// Returns when the client could begin to speak.
    pub(crate) fn began(&self) -> Instant {
        self.began
    }

    /// Returns what is left of a time limit.
    pub(crate) fn left(&self, limit: Duration) -> Duration {
        limit.saturating_sub(self.began.elapsed())
    }

    /// Returns the next message, as soon as `parse` finds it complete.
    pub(crate) async fn message<T, E>(
        &mut self,
        leg: &mut (impl AsyncRead + Unpin),
        parse: impl FnMut(&[u8]) -> Result<Option<(T, usize)>, E>,
    ) -> Result<T, HandshakeError<E>> {
        self.message_within(CAP, leg, parse).await
    }

    /// Like `message`, with a limit of `cap` bytes.
    pub(crate) async fn message_within<T, E>(
        &mut self,
        cap: usize,
        leg: &mut (impl AsyncRead + Unpin),
        mut parse: impl FnMut(&[u8]) -> Result<Option<(T, usize)>, E>,
    ) -> Result<T, HandshakeError<E>> {
        loop {
            if let Some((message, used)) = parse(&self.buffer).map_err(HandshakeError::Parse)? {
                self.buffer.advance(used);
                return Ok(message);
            }
            let room = cap.saturating_sub(self.buffer.len());
            if room == 0 {
                return Err(HandshakeError::TooLong(cap));
            }
            self.buffer.reserve(room.min(STEP));
            if leg.read_buf(&mut (&mut self.buffer).limit(room)).await? == 0 {
                return Err(HandshakeError::Closed);
            }
        }
    }

    /// Returns the bytes that are not used yet.
    pub(crate) fn seen(&self) -> &[u8] {
        &self.buffer
    }

    /// Returns the bytes that were read after the last message.
    pub(crate) fn rest(self) -> Bytes {
        self.buffer.freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message consists of a length byte and that many bytes.
    fn parse(input: &[u8]) -> Result<Option<(Vec<u8>, usize)>, ()> {
        let Some(&n) = input.first() else { return Ok(None) };
        let end = 1 + usize::from(n);
        Ok(input.get(1..end).map(|m| (m.to_vec(), end)))
    }

    #[tokio::test]
    async fn messages_and_rest_in_one_segment() {
        let mut buffer = HandshakeBuffer::default();
        let mut leg = &b"\x02ab\x01crest"[..];
        assert_eq!(buffer.message(&mut leg, parse).await.unwrap(), b"ab");
        assert_eq!(buffer.message(&mut leg, parse).await.unwrap(), b"c");
        assert_eq!(&buffer.rest()[..], b"rest");
    }

    #[tokio::test]
    async fn nothing_is_read_beyond_the_cap() {
        let never = |_: &[u8]| Ok::<Option<((), usize)>, ()>(None);
        let input = [0; CAP + 1];
        let mut leg = &input[..];
        assert!(matches!(HandshakeBuffer::default().message(&mut leg, never).await, Err(HandshakeError::TooLong(CAP))));
        assert_eq!(leg.len(), 1);
    }

    #[tokio::test]
    async fn end_of_stream_within_a_message() {
        let mut leg = &b"\x02a"[..];
        assert!(matches!(HandshakeBuffer::default().message(&mut leg, parse).await, Err(HandshakeError::Closed)));
    }
}
