//! Copies both directions of a flow, in steps that a splice can interrupt
//! at any byte. The [core](crate::core) says what is to be read.

use crate::{
    copying::pipe::Pipe,
    core::{Next, Stream},
    leg::Leg,
};
use bytes::{Buf, Bytes};
use longsplice_datapath::{Pair, Side};
use std::{
    cell::RefCell,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncWrite, ReadBuf};

/// Maximum number of bytes in hand per direction: enough for one read to take what a window brings.
const BUFFER: usize = 64 * 1024;
/// Number of copied bytes from which a pipe is worth the system calls that create it.
const PIPE_FROM: u64 = 4 * BUFFER as u64;

thread_local! {
    /// Buffer for reads, shared by all flows of a thread. Bytes that cannot be written at once move to their direction.
    static PASSING: RefCell<Vec<u8>> = RefCell::new(vec![0; BUFFER]);
}

/// The bytes in hand of one direction.
#[derive(Debug)]
struct Hand {
    /// Bytes in hand. An idle connection holds no memory.
    rest: Bytes,
    /// One byte is in hand, and it is urgent.
    urgent: bool,
    /// Replaces `rest` once that is empty.
    pipe: Option<Pipe>,
    wants_pipe: bool,
}

impl Hand {
    fn new(first: Bytes) -> Hand {
        Hand { rest: first, urgent: false, pipe: None, wants_pipe: false }
    }

    /// Writes the bytes in hand, and reads more. Ready when the direction has ended, or has drained to its
    /// limit. Pending without a wake-up when `most` bytes have been passed on: the caller checks the count.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut Stream,
        from: &mut Leg,
        to: &mut Leg,
        most: u64,
    ) -> Poll<Result<(), Broken>> {
        loop {
            let room = match stream.next(&from.at, &to.at, most) {
                Next::Write => {
                    stream.gave(ready!(self.write(cx, to)).map_err(Broken::Write)?);
                    continue;
                }
                Next::Enough => return Poll::Pending,
                Next::Done => return Poll::Ready(Ok(())),
                // the end of the connection: closing it, which follows, sends the FIN
                Next::Shut if stream.ends_with(&from.at, &to.at) => {
                    to.at.closed();
                    continue;
                }
                Next::Shut => return Pin::new(&mut *to).poll_shutdown(cx).map_err(Broken::Write),
                Next::Read(most) => usize::try_from(most).unwrap_or(usize::MAX),
            };
            // This fails if descriptors or pipe memory are scarce. The flow can do without, so it is tried once.
            if self.wants_pipe && stream.copied >= PIPE_FROM {
                (self.pipe, self.wants_pipe) = (Pipe::new().ok(), false);
            }
            // A pipe would store what is to be discarded, and wait for ever if the socket does not report a reset.
            if let Some(p) = self.pipe.as_mut().filter(|_| !stream.discards() && !from.was_reset) {
                let room = if stream.is_draining() { room.min(BUFFER) } else { room };
                if let Some(n) = ready!(p.fill(cx, from, room)).map_err(Broken::Read)? {
                    stream.took(n);
                    continue;
                }
            }
            let room = room.min(BUFFER);
            ready!(PASSING.with_borrow_mut(|passing| self.pass(cx, stream, from, to, &mut passing[..room])))?;
        }
    }

    /// Writes the bytes in hand: those in memory before those in the pipe.
    fn write(&mut self, cx: &mut Context<'_>, to: &mut Leg) -> Poll<io::Result<usize>> {
        if let Some(p) = self.pipe.as_mut().filter(|_| self.rest.is_empty()) {
            return p.empty(cx, to);
        }
        let n = ready!(to.poll_give(cx, &self.rest, self.urgent))?;
        self.rest.advance(n);
        if self.rest.is_empty() {
            (self.rest, self.urgent) = (Bytes::new(), false); // frees its memory
        }
        Poll::Ready(Ok(n))
    }

    /// Reads once, and writes as much as the other leg accepts.
    fn pass(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut Stream,
        from: &mut Leg,
        to: &mut Leg,
        passing: &mut [u8],
    ) -> Poll<Result<(), Broken>> {
        let mut b = ReadBuf::new(passing);
        let urgent = ready!(from.poll_take(cx, &mut b)).map_err(Broken::Read)?;
        let bytes = b.filled();
        stream.took(bytes.len());
        if bytes.is_empty() || stream.discards() {
            return Poll::Ready(Ok(()));
        }
        let written = match to.poll_give(cx, bytes, urgent) {
            Poll::Ready(n) => n.map_err(Broken::Write)?,
            Poll::Pending => 0,
        };
        stream.gave(written);
        if written < bytes.len() {
            (self.rest, self.urgent) = (Bytes::copy_from_slice(&bytes[written..]), urgent);
        }
        Poll::Ready(Ok(()))
    }
}

/// The end of a direction that failed.
#[derive(Debug)]
enum Broken {
    Read(io::Error),
    Write(io::Error),
}

/// Both directions.
#[derive(Debug)]
pub(crate) struct Pump {
    hands: Pair<Hand>,
}

impl Pump {
    /// `in_hand`: bytes that are to be written before what is read.
    pub fn new(in_hand: Pair<Bytes>) -> Pump {
        Pump { hands: in_hand.map(Hand::new) }
    }

    /// Switches to pipes if they are available: the flow is to stay in control mode.
    pub fn through_pipes(&mut self) {
        for h in self.hands.iter_mut() {
            h.wants_pipe = h.pipe.is_none();
        }
    }

    /// Goes on without pipes: their bytes move to memory, where others can see them.
    pub fn without_pipes(&mut self) {
        for h in self.hands.iter_mut() {
            h.wants_pipe = false;
            if let Some(pipe) = h.pipe.take() {
                h.rest = [&h.rest[..], &pipe.into_bytes()].concat().into();
            }
        }
    }

    /// Returns the bytes in hand from this host, without those in the pipe.
    pub fn rest(&self, from: Side) -> Bytes {
        self.hands[from].rest.clone()
    }

    /// Returns whether the next byte for a host is urgent.
    pub fn is_urgent(&self) -> bool {
        self.hands.iter().any(|hand| hand.urgent)
    }

    /// Returns all bytes in hand, by the host that has sent them.
    pub fn into_bytes(mut self) -> Pair<Bytes> {
        self.without_pipes();
        self.hands.map(|hand| hand.rest)
    }

    /// Copies both directions. Ready when both have ended or drained, or discard what comes, when `enough`
    /// bytes were copied, or, with the host, when a connection has failed.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        streams: &mut Pair<Stream>,
        legs: &mut Pair<Leg>,
        enough: u64,
    ) -> Poll<Result<(), Side>> {
        let failed = |from: Side| {
            move |broken: Broken| {
                let (side, error) = match broken {
                    Broken::Read(error) => (from, error),
                    Broken::Write(error) => (from.other(), error),
                };
                tracing::debug!(?side, %error, "connection failed");
                side
            }
        };
        let Pair { client: to_server, server: to_client } = &mut self.hands;
        let Pair { client: up, server: down } = streams;
        let Pair { client, server } = legs;
        let most = enough.saturating_sub(down.copied);
        // A direction that discards may never end, and must not keep the flow from ending.
        let is_up =
            to_server.poll(cx, up, client, server, most).map_err(failed(Side::Client))?.is_ready() || up.discards();
        let most = enough.saturating_sub(up.copied);
        let is_down =
            to_client.poll(cx, down, server, client, most).map_err(failed(Side::Server))?.is_ready() || down.discards();
        if up.copied + down.copied >= enough || (is_up && is_down) { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
}
