//! Positions in a flow's two streams: bytes read and written at each leg, and bytes that may still be read.

use crate::types::Message;
use longsplice_datapath::{Side, Switched};

/// Positions of a leg's socket. They count bytes since the SYN; a FIN counts as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Position {
    /// Bytes read from the host. A FIN that was read as end of stream counts as one.
    pub consumed: u64,
    /// Bytes written to the host. Our FIN counts as one.
    pub produced: u64,
    /// The end of the host's stream was read.
    pub eof: bool,
    /// We have sent our FIN.
    pub shut: bool,
    /// Sequence numbers on the wire may differ from the socket's, or its host be ahead of it. The leg's entries must outlive the
    /// socket.
    pub shimmed: bool,
}

impl Position {
    /// Counts bytes that were read. 0 means end of stream.
    pub fn took(&mut self, n: usize) {
        self.consumed += n as u64;
        if n == 0 && !self.eof {
            self.eof = true;
            self.consumed += 1;
        }
    }

    /// Counts bytes that were written.
    pub fn gave(&mut self, n: usize) {
        self.produced += n as u64;
    }

    /// Counts a FIN that was sent.
    pub fn closed(&mut self) {
        if !std::mem::replace(&mut self.shut, true) {
            self.produced += 1;
        }
    }
}

/// One direction of a flow while it is copied or drained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Stream {
    /// Bytes read but not written yet.
    pub in_hand: u64,
    /// Bytes passed on.
    pub copied: u64,
    /// Bytes of the message that may still be read; `u64::MAX` until its sender
    /// closes. `None`: everything up to the end of the stream, which is passed on.
    pub message: Option<u64>,
    /// Bytes that may still be read during a drain. `None`: no limit.
    pub(super) drain: Option<u64>,
    /// The end of the stream is to be read after the bytes of `drain`.
    pub(super) fin: bool,
    /// The receiver has failed: bytes are read and discarded, so that the sender goes on and listens to what is left for it.
    pub(super) discards: bool,
}

/// The next step in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Write the bytes in hand.
    Write,
    /// Nothing: the requested number of bytes has been passed on.
    Enough,
    /// Read at most this many bytes.
    Read(u64),
    /// Send a FIN.
    Shut,
    /// Nothing: the direction has ended, or has drained to its limit.
    Done,
}

impl Stream {
    /// Returns the next step. `most`: the number of bytes to pass on for now.
    pub fn next(&self, from: &Position, to: &Position, most: u64) -> Next {
        if self.discards {
            return if from.eof { Next::Done } else { Next::Read(u64::MAX) };
        }
        if self.in_hand > 0 {
            return Next::Write;
        }
        if self.copied >= most {
            return Next::Enough;
        }
        if self.is_read(from) {
            return Next::Done;
        }
        if from.eof {
            return if to.shut { Next::Done } else { Next::Shut };
        }
        let drain = match self.drain {
            Some(0) if !self.fin => return Next::Done,
            Some(0) => 1,
            Some(n) => n,
            None => u64::MAX,
        };
        Next::Read(drain.min(self.message.unwrap_or(u64::MAX)))
    }

    /// Returns whether the flow ends with this stream, which is at its end, so that both sockets are closed next. Not in a
    /// drain. After a splice, sockets may have to be closed silently.
    pub fn ends_with(&self, from: &Position, to: &Position) -> bool {
        self.message.is_none() && !self.is_draining() && to.eof && from.shut && !from.shimmed && !to.shimmed
    }

    /// Returns how many bytes will have been passed on when this has drained.
    pub fn when_drained(&self) -> u64 {
        self.copied + self.in_hand + self.drain.unwrap_or(0)
    }

    /// Counts bytes that were read. They are in hand until they are written, unless they are discarded.
    pub fn took(&mut self, n: usize) {
        if self.discards {
            return;
        }
        self.in_hand += n as u64;
        self.drain = self.drain.map(|left| left.saturating_sub(n as u64));
        self.passed(n as u64);
    }

    /// Counts bytes in hand that were written.
    pub fn gave(&mut self, n: usize) {
        self.in_hand -= n as u64;
        self.copied += n as u64;
    }

    /// Returns whether the bytes that are read are to be discarded.
    pub fn discards(&self) -> bool {
        self.discards
    }

    /// Returns whether this is a message of which nothing more is to be read.
    pub fn is_read(&self, from: &Position) -> bool {
        self.message.is_some_and(|left| left == 0 || from.eof)
    }

    /// Returns whether a drain limits what may be read.
    pub fn is_draining(&self) -> bool {
        self.drain.is_some()
    }

    /// Counts bytes of a message that were read or forwarded.
    pub(super) fn passed(&mut self, n: u64) {
        if let Some(left) = self.message.as_mut().filter(|left| **left != u64::MAX) {
            *left = left.saturating_sub(n);
        }
    }

    /// Limits reading for a drain: `pending` bytes, followed by the end of the stream if `fin`.
    pub(super) fn drain(&mut self, pending: u32, fin: bool) {
        (self.drain, self.fin) = (Some(pending.into()), fin);
    }

    pub(super) fn undrained(&mut self) {
        (self.drain, self.fin) = (None, false);
    }
}

/// A message that is being relayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) struct Passing {
    /// The sender.
    pub from: Side,
    /// The message stops when its receiver sends data.
    pub until_receiver_speaks: bool,
    /// Bytes of the message that were not read yet. While the message is copied, its [`Stream`] counts them.
    pub left: u64,
    /// Position in the sender's stream at which the current splice ends.
    pub goal: u64,
    /// The message is to be spliced, whatever is left of it.
    pub pays: bool,
    /// That position had passed before the splice was committed.
    pub passed_early: bool,
    /// Since the last freeze, the sender has sent more than the splice was for.
    pub excess: bool,
}

impl Passing {
    pub fn new(message: &Message) -> Passing {
        Passing {
            from: message.from,
            until_receiver_speaks: message.until_receiver_speaks,
            left: message.bytes,
            goal: u64::MAX,
            pays: message.pays,
            passed_early: false,
            excess: false,
        }
    }

    /// Returns whether everything that the splice was for has been forwarded.
    pub fn is_passed(&self, at: &Switched) -> bool {
        at.end[self.from] >= self.goal
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_count_bytes_and_one_fin() {
        let mut at = Position::default();
        at.took(5);
        at.gave(7);
        assert_eq!(at, Position { consumed: 5, produced: 7, ..Position::default() });
        for _ in 0..2 {
            at.took(0);
            at.closed();
        }
        assert_eq!(at, Position { consumed: 6, produced: 8, eof: true, shut: true, shimmed: false });
    }

    #[test]
    fn a_direction_writes_what_it_has_and_reads_no_further_than_it_may() {
        let open = Position::default();
        let (ended, shut) = (Position { eof: true, ..open }, Position { shut: true, ..open });
        let stream = Stream { copied: 5, ..Stream::default() };
        let draining = |left, fin| Stream { drain: Some(left), fin, ..stream };
        let message = |left| Stream { message: Some(left), ..stream };
        let cases = [
            (Stream { in_hand: 1, ..stream }, ended, open, 5, Next::Write),
            (stream, ended, open, 5, Next::Enough),
            (stream, open, open, 6, Next::Read(u64::MAX)),
            (stream, ended, open, 6, Next::Shut),
            (stream, ended, shut, 6, Next::Done),
            // the end of a message is not passed on
            (message(0), open, open, 6, Next::Done),
            (message(9), ended, open, 6, Next::Done),
            (message(9), open, open, 6, Next::Read(9)),
            // a drain ends before the end of the stream, or with it
            (draining(0, false), open, open, 6, Next::Done),
            (draining(0, true), open, open, 6, Next::Read(1)),
            (draining(3, true), open, open, 6, Next::Read(3)),
            (Stream { message: Some(2), ..draining(3, false) }, open, open, 6, Next::Read(2)),
            // for a receiver that has failed
            (Stream { discards: true, message: Some(0), ..stream }, open, open, 5, Next::Read(u64::MAX)),
            (Stream { discards: true, ..stream }, ended, open, 6, Next::Done),
        ];
        for (stream, from, to, most, want) in cases {
            assert_eq!(stream.next(&from, &to, most), want, "{stream:?} {from:?} {to:?}");
        }
    }

    #[test]
    fn bytes_that_were_read_are_in_hand_and_count_for_the_drain_and_the_message() {
        let mut stream = Stream { message: Some(10), ..Stream::default() };
        assert!(!stream.is_draining());
        stream.drain(4, true);
        assert!(stream.is_draining());
        stream.took(3);
        let want = Stream { in_hand: 3, message: Some(7), drain: Some(1), fin: true, ..Stream::default() };
        assert_eq!(stream, want);
        stream.gave(2);
        stream.undrained();
        assert_eq!(stream, Stream { in_hand: 1, copied: 2, drain: None, fin: false, ..want });
        // the length is unknown until the sender closes
        let mut stream = Stream { message: Some(u64::MAX), ..Stream::default() };
        stream.took(3);
        assert_eq!(stream.message, Some(u64::MAX));
    }
}
