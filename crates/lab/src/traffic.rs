//! Checked traffic: both ends of a TCP connection, each of which follows a [`Script`] and returns a [`Report`].
//!
//! Each end sends the stream of [`crate::pattern`] and checks the one it receives at the same time, on two threads. Calls
//! never block for longer than [`STEP`], so a [`Script::deadline`] holds in any state of the network. The sockets are plain
//! std sockets: create them inside a namespace ([`crate::Namespace::run`]) and use them from any thread.
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
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub use endpoint::converse;
pub use report::{Report, StreamEnd, intact};
pub use sockets::{Serving, connect, listen, serve, socks5_address, socks5_answer, socks5_ask, socks5_connect};

/// The longest time that a call blocks before the deadline is checked.
pub const STEP: Duration = Duration::from_millis(50);

/// Which end opened the connection; this determines which of the two streams it sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The connecting end; it sends the stream of the seed.
    Opener,
    /// The accepting end; it sends the stream of [`crate::pattern::answer_seed`].
    Answerer,
}

/// How much to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// This many bytes.
    Bytes(u64),
    /// As much as possible in this time.
    Lasting(Duration),
}

/// The size of each write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunks {
    /// The same number of bytes for all writes.
    Fixed(usize),
    /// From `.0` to `.1` bytes, chosen at random from the seed with a logarithmic
    /// distribution, so that small sizes are as likely as large ones.
    Random(usize, usize),
}

/// When to send the first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Immediately.
    AtOnce,
    /// After this many bytes have been received: the other end speaks first.
    Received(u64),
    /// After this time.
    Delay(Duration),
}

/// What to do when everything has been sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Shut down the sending half, and read until the other end finishes.
    HalfClose,
    /// Keep both halves open until the other end finishes.
    Hold,
    /// Close both halves without reading any further; unread data makes the kernel send a reset.
    Close,
    /// Reset the connection (SO_LINGER 0) after the last byte sent.
    Reset,
    /// Hold, and reset the connection when this many bytes have been received.
    ResetReceived(u64),
}

/// A pause in reading or sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// The number of bytes read or sent before the pause.
    pub at: u64,
    /// The length of the pause.
    pub lasting: Duration,
}

/// A sign that the test gives, once: what it waits for may take any time on a busy machine. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Cue(Arc<AtomicBool>);

impl Cue {
    /// Gives the sign.
    pub fn give(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it was given.
    pub fn is_given(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// How urgent bytes are received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marks {
    /// In the stream (SO_OOBINLINE).
    Inline,
    /// Out of band (MSG_OOB).
    Apart,
}

/// The behaviour of one end of a connection. Fields are public; methods exist for those that tests set most.
#[derive(Clone, Debug)]
pub struct Script {
    /// Which end this is.
    pub role: Role,
    /// The seed of the connection; `None`: learned from the first eight bytes received, before anything is sent.
    pub seed: Option<u64>,
    /// How much to send.
    pub send: Amount,
    /// Sending ends at this sign, if not before.
    pub until: Option<Cue>,
    /// Maximum sending rate in bytes per second.
    pub pace: Option<u64>,
    /// Sizes of the writes.
    pub chunks: Chunks,
    /// Positions of bytes that are sent as urgent (MSG_OOB), in ascending order.
    /// If a receiver has not read several of them, it knows only the last.
    pub urgent: Vec<u64>,
    /// How urgent bytes are received; `None`: none are expected.
    pub marks: Option<Marks>,
    /// When to start sending.
    pub start: Start,
    /// Maximum number of bytes sent beyond the number received: `Some(1)` against
    /// `Some(0)` is a 1-byte ping-pong. An answerer that learns its seed cannot send
    /// before it has received eight bytes, so use [`Script::answerer_of`] with this.
    pub ahead: Option<u64>,
    /// How to end the connection.
    pub ending: Ending,
    /// Buffer size of each read.
    pub read_size: usize,
    /// Pauses of reading, by ascending position.
    pub pauses: Vec<Pause>,
    /// Pauses of sending, by ascending position. The pace does not make up for them.
    pub rests: Vec<Pause>,
    /// Reading begins at this sign.
    pub read_after: Option<Cue>,
    /// Position where reading stops for good; the window closes when the buffer is full.
    pub stop_reading_at: Option<u64>,
    /// SO_RCVBUF, set before the handshake.
    pub receive_buffer: Option<usize>,
    /// SO_SNDBUF, set before the handshake.
    pub send_buffer: Option<usize>,
    /// TCP_NODELAY.
    pub nodelay: bool,
    /// TCP_MAXSEG, set before the handshake.
    pub max_segment: Option<u32>,
    /// TCP_CONGESTION, set before the handshake; accepted sockets have that of their
    /// listener. Unlike the sysctl, it accepts cubic in a namespace.
    pub congestion: Option<&'static str>,
    /// Local address of the opener.
    pub local: Option<SocketAddr>,
    /// Time limit for everything, from connecting on.
    pub deadline: Duration,
}

impl Script {
    fn new(role: Role, seed: Option<u64>) -> Self {
        Self {
            role,
            seed,
            send: Amount::Bytes(0),
            until: None,
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
            read_after: None,
            stop_reading_at: None,
            receive_buffer: None,
            send_buffer: None,
            nodelay: true,
            max_segment: None,
            congestion: None,
            local: None,
            deadline: Duration::from_secs(20),
        }
    }

    /// The connecting end. By default it sends nothing and half-closes.
    pub fn opener(seed: u64) -> Self {
        Self::new(Role::Opener, Some(seed))
    }

    /// The accepting end. It learns each connection's seed from the opener.
    pub fn answerer() -> Self {
        Self::new(Role::Answerer, None)
    }

    /// The accepting end with a known seed, which can therefore speak first.
    pub fn answerer_of(seed: u64) -> Self {
        Self::new(Role::Answerer, Some(seed))
    }

    /// Sends this many bytes.
    pub fn bytes(self, bytes: u64) -> Self {
        Self { send: Amount::Bytes(bytes), ..self }
    }

    /// Sends for this time, at `pace` bytes per second.
    pub fn lasting(self, time: Duration, pace: u64) -> Self {
        Self { send: Amount::Lasting(time), pace: Some(pace), ..self }
    }

    /// Sends until this sign, at `pace` bytes per second.
    pub fn until(self, cue: &Cue, pace: u64) -> Self {
        Self { send: Amount::Bytes(u64::MAX), until: Some(cue.clone()), pace: Some(pace), ..self }
    }

    /// Sends at most this many bytes per second.
    pub fn pace(self, pace: u64) -> Self {
        Self { pace: Some(pace), ..self }
    }

    /// Writes in chunks of these sizes.
    pub fn chunks(self, chunks: Chunks) -> Self {
        Self { chunks, ..self }
    }

    /// Sets when to start sending.
    pub fn start(self, start: Start) -> Self {
        Self { start, ..self }
    }

    /// Limits the bytes sent beyond the number received.
    pub fn ahead(self, ahead: u64) -> Self {
        Self { ahead: Some(ahead), ..self }
    }

    /// Sets how to end the connection.
    pub fn ending(self, ending: Ending) -> Self {
        Self { ending, ..self }
    }

    /// Adds a pause of reading at this position; call it by ascending position.
    pub fn pause(mut self, at: u64, lasting: Duration) -> Self {
        self.pauses.push(Pause { at, lasting });
        self
    }

    /// Adds a pause of sending at this position; call it by ascending position.
    pub fn rest(mut self, at: u64, lasting: Duration) -> Self {
        self.rests.push(Pause { at, lasting });
        self
    }

    /// Sets the time limit.
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }
}
