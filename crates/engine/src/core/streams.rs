//! Where a flow's two streams are: what was read and written at each leg, and what may still be read.

use crate::types::Message;
use longsplice_datapath::Switched;
use serde::{Deserialize, Serialize};

/// How far a leg's socket is. Positions count bytes since the SYN, FINs counting one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Read from the host; a FIN that was read as end of stream counts one.
    pub consumed: u64,
    /// Written to the host; our FIN counts one.
    pub produced: u64,
    /// The end of the host's stream was read.
    pub eof: bool,
    /// We have sent our FIN.
    pub shut: bool,
    /// The numbers on the wire differ from the socket's: entries must outlive it.
    pub shimmed: bool,
}

impl Position {
    /// Bytes were read; 0: end of stream.
    pub fn took(&mut self, n: usize) {
        self.consumed += n as u64;
        if n == 0 && !self.eof {
            self.eof = true;
            self.consumed += 1;
        }
    }

    /// Bytes were written.
    pub fn gave(&mut self, n: usize) {
        self.produced += n as u64;
    }

    /// A FIN was sent.
    pub fn closed(&mut self) {
        if !std::mem::replace(&mut self.shut, true) {
            self.produced += 1;
        }
    }
}

/// One direction of a flow while it is copied, or drains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stream {
    /// Bytes that were read, and are not written yet.
    pub in_hand: u64,
    /// Bytes passed on.
    pub copied: u64,
    /// Bytes of a message that may still be read, `u64::MAX` until its sender closes. `None`: all until the end of the stream,
    /// which is passed on.
    pub message: Option<u64>,
    /// Bytes that may still be read during a drain; `None`: no limit.
    pub(super) drain: Option<u64>,
    /// After these the end of stream is still to be read.
    pub(super) fin: bool,
}

/// What is to be done next in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Write what is in hand.
    Write,
    /// Nothing: as much as was asked for has been passed on.
    Enough,
    /// Read at most this many bytes.
    Read(u64),
    /// Send a FIN.
    Shut,
    /// Nothing: it has ended, or has drained to its limit.
    Done,
}

impl Stream {
    /// `most`: bytes to be passed on for now.
    pub fn next(&self, from: &Position, to: &Position, most: u64) -> Next {
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

    /// Bytes were read. They are in hand until they are written.
    pub fn took(&mut self, n: usize) {
        self.in_hand += n as u64;
        self.drain = self.drain.map(|left| left.saturating_sub(n as u64));
        self.passed(n as u64);
    }

    /// Bytes in hand were written.
    pub fn gave(&mut self, n: usize) {
        self.in_hand -= n as u64;
        self.copied += n as u64;
    }

    /// Is it a message of which nothing more is to be read?
    pub fn is_read(&self, from: &Position) -> bool {
        self.message.is_some_and(|left| left == 0 || from.eof)
    }

    /// Is it read through a limited drain?
    pub fn is_draining(&self) -> bool {
        self.drain.is_some()
    }

    /// Bytes of a message were read, or were forwarded.
    pub(super) fn passed(&mut self, n: u64) {
        if let Some(left) = self.message.as_mut().filter(|left| **left != u64::MAX) {
            *left = left.saturating_sub(n);
        }
    }

    /// During a drain: this many bytes, and then the end of stream or not.
    pub(super) fn drain(&mut self, pending: u32, fin: bool) {
        (self.drain, self.fin) = (Some(pending.into()), fin);
    }

    pub(super) fn undrained(&mut self) {
        (self.drain, self.fin) = (None, false);
    }
}

/// A message that is being passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Passing {
    /// Its direction: 0 is client to server.
    pub from: usize,
    /// It stops when its receiver has something to say.
    pub until_receiver_speaks: bool,
    /// Its bytes that were not read yet; while it is copied, its [`Stream`] counts.
    pub left: u64,
    /// Position in its sender's stream up to which the splice under way goes.
    pub goal: u64,
}

impl Passing {
    pub fn new(message: &Message) -> Passing {
        Passing {
            from: message.from,
            until_receiver_speaks: message.until_receiver_speaks,
            left: message.bytes,
            goal: u64::MAX,
        }
    }

    /// Has all been forwarded that the splice was for?
    pub fn is_passed(&self, at: &Switched) -> bool {
        at.end[self.from] >= self.goal
    }
}
