//! Checked traffic: both ends of a TCP connection, each following a [`Script`] and giving a [`Report`].
//!
//! An end sends the stream of [`crate::pattern`] and checks the one it receives, at the same time, on two threads. All
//! waiting is in steps of [`STEP`], so a [`Script::deadline`] holds whatever the network does. The sockets are plain
//! std sockets: make them inside a namespace ([`crate::Namespace::run`]) and drive them from anywhere.
//!
//! ```no_run
//! # use longsplice_lab::{*, topology::SERVER, traffic::*};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() })?;
//! let at = SERVER.port(Family::V4, 7000);
//! let (opener, answerer) = (Script::opener(1).bytes(1 << 20), Script::answerer().bytes(1 << 16));
//! let server = serve(lab.server.run(|| listen(at, &answerer))?, 1, answerer);
//! let client = converse(lab.client.run(|| connect(at, &opener))?, &opener);
//! intact(&client, &server.join()[0])?;
//! # Ok(()) }
//! ```

mod endpoint;
mod report;
mod sockets;

use std::net::SocketAddr;
use std::time::Duration;

pub use endpoint::converse;
pub use report::{Report, StreamEnd, intact};
pub use sockets::{Serving, connect, listen, serve, socks5_connect};

/// The longest time that any call blocks before it looks at the deadline.
pub const STEP: Duration = Duration::from_millis(50);

/// Who opened the connection; it decides which of the two streams is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The end that connected; it sends the stream of the seed.
    Opener,
    /// The end that accepted; it sends the stream of [`crate::pattern::answer_seed`].
    Answerer,
}

/// How much to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// So many bytes.
    Bytes(u64),
    /// For so long.
    Lasting(Duration),
}

/// How much to give to each write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunks {
    /// Always so many bytes.
    Fixed(usize),
    /// From `.0` to `.1` bytes, drawn from the seed; small ones as likely as large ones (by magnitude).
    Random(usize, usize),
}

/// When to send the first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// At once.
    AtOnce,
    /// When so many bytes have been received: the other end speaks first.
    Received(u64),
    /// After this time.
    Delay(Duration),
}

/// What to do when everything is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Shut down the sending half, and read until the other end ends.
    HalfClose,
    /// Keep both halves open until the other end ends.
    Hold,
    /// Close both halves without reading on; unread data make the kernel send a reset.
    Close,
    /// Reset the connection (SO_LINGER 0). The amount to send is the position of the reset.
    Reset,
    /// Hold, and reset the connection when so many bytes have been received.
    ResetReceived(u64),
}

/// Reading, or sending, stops at a position for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// When so many bytes have been read, or sent.
    pub at: u64,
    /// For so long.
    pub lasting: Duration,
}

/// How urgent bytes are received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marks {
    /// In the stream (SO_OOBINLINE).
    Inline,
    /// Apart from it (MSG_OOB).
    Apart,
}

/// What one end of a connection does. Public fields, and a few methods for what tests set most.
#[derive(Clone, Debug)]
pub struct Script {
    /// Which end this is.
    pub side: Side,
    /// The seed of the connection; `None`: learnt from the first eight bytes received, before anything is sent.
    pub seed: Option<u64>,
    /// How much to send.
    pub send: Amount,
    /// Bytes a second at most.
    pub pace: Option<u64>,
    /// Sizes of the writes.
    pub chunks: Chunks,
    /// Positions of bytes that are sent as urgent ones (MSG_OOB), in order. Of several that a receiver has not read yet, it knows
    /// the last only.
    pub urgent: Vec<u64>,
    /// How urgent bytes are received; `None`: as any others, if none come.
    pub marks: Option<Marks>,
    /// When to begin.
    pub start: Start,
    /// Send only so many bytes more than were received: `Some(1)` against `Some(0)` is a 1-byte ping-pong. An answerer
    /// that learns its seed cannot send before it has received eight: use [`Script::answerer_of`] then.
    pub ahead: Option<u64>,
    /// How to end.
    pub ending: Ending,
    /// Bytes asked for by each read.
    pub read_size: usize,
    /// Where reading sleeps, in order of position.
    pub pauses: Vec<Pause>,
    /// Where sending sleeps, in order of position. The pace does not catch up on it.
    pub rests: Vec<Pause>,
    /// Reading stops for good here; the window closes when the buffer is full.
    pub stop_reading_at: Option<u64>,
    /// SO_RCVBUF, before the handshake.
    pub receive_buffer: Option<usize>,
    /// SO_SNDBUF, before the handshake.
    pub send_buffer: Option<usize>,
    /// TCP_NODELAY.
    pub nodelay: bool,
    /// TCP_MAXSEG, before the handshake.
    pub max_segment: Option<u32>,
    /// Local address of the opener.
    pub local: Option<SocketAddr>,
    /// Everything, from connecting on, has ended by then.
    pub deadline: Duration,
}

impl Script {
    fn new(side: Side, seed: Option<u64>) -> Self {
        Self {
            side,
            seed,
            send: Amount::Bytes(0),
            pace: None,
            chunks: Chunks::Fixed(16 * 1024),
            urgent: Vec::new(),
            marks: None,
            start: Start::AtOnce,
            ahead: None,
            ending: Ending::HalfClose,
            read_size: 64 * 1024,
            pauses: Vec::new(),
            rests: Vec::new(),
            stop_reading_at: None,
            receive_buffer: None,
            send_buffer: None,
            nodelay: true,
            max_segment: None,
            local: None,
            deadline: Duration::from_secs(20),
        }
    }

    /// The end that connects. It sends nothing and half-closes, until told otherwise.
    pub fn opener(seed: u64) -> Self {
        Self::new(Side::Opener, Some(seed))
    }

    /// The end that accepts; it learns each connection's seed from the opener.
    pub fn answerer() -> Self {
        Self::new(Side::Answerer, None)
    }

    /// The end that accepts and can speak first, as it knows the opener's seed.
    pub fn answerer_of(seed: u64) -> Self {
        Self::new(Side::Answerer, Some(seed))
    }

    /// Sends so many bytes.
    pub fn bytes(self, bytes: u64) -> Self {
        Self { send: Amount::Bytes(bytes), ..self }
    }

    /// Sends for this time, at so many bytes a second.
    pub fn lasting(self, time: Duration, pace: u64) -> Self {
        Self { send: Amount::Lasting(time), pace: Some(pace), ..self }
    }

    /// Sends at so many bytes a second at most.
    pub fn pace(self, pace: u64) -> Self {
        Self { pace: Some(pace), ..self }
    }

    /// Writes in these sizes.
    pub fn chunks(self, chunks: Chunks) -> Self {
        Self { chunks, ..self }
    }

    /// Begins then.
    pub fn start(self, start: Start) -> Self {
        Self { start, ..self }
    }

    /// Sends only so many bytes more than were received.
    pub fn ahead(self, ahead: u64) -> Self {
        Self { ahead: Some(ahead), ..self }
    }

    /// Ends so.
    pub fn ending(self, ending: Ending) -> Self {
        Self { ending, ..self }
    }

    /// Reading sleeps at this position; call it in order of position.
    pub fn pause(mut self, at: u64, lasting: Duration) -> Self {
        self.pauses.push(Pause { at, lasting });
        self
    }

    /// Sending sleeps at this position; call it in order of position.
    pub fn rest(mut self, at: u64, lasting: Duration) -> Self {
        self.rests.push(Pause { at, lasting });
        self
    }

    /// Has ended by then.
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }
}
