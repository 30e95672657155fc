//! Copies both directions of a flow, in steps that a splice can interrupt
//! at any byte. The [core](crate::core) says what is to be read.

use crate::{
    Leg,
    core::{Next, Side, Stream},
    pipe::Pipe,
};
use bytes::Bytes;
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
    /// Bytes in hand, from `start` on. An idle connection holds no memory.
    rest: Vec<u8>,
    start: usize,
    /// One byte is in hand, and it is urgent.
    urgent: bool,
    /// Replaces `rest` once that is empty.
    pipe: Option<Pipe>,
    wants_pipe: bool,
}

impl Hand {
    fn new(first: &[u8]) -> Hand {
        Hand { rest: first.to_vec(), start: 0, urgent: false, pipe: None, wants_pipe: false }
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
                Next::Shut => return Pin::new(&mut *to).poll_shutdown(cx).map_err(Broken::Write),
                Next::Read(most) => usize::try_from(most).unwrap_or(usize::MAX),
            };
            if self.wants_pipe && stream.copied >= PIPE_FROM {
                (self.pipe, self.wants_pipe) = (Pipe::new().ok(), false);
            }
            if let Some(p) = &mut self.pipe {
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
        let n = ready!(to.poll_give(cx, &self.rest[self.start..], self.urgent))?;
        self.start += n;
        if self.start == self.rest.len() {
            (self.rest, self.start, self.urgent) = (Vec::new(), 0, false);
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
        if bytes.is_empty() {
            return Poll::Ready(Ok(()));
        }
        let written = match to.poll_give(cx, bytes, urgent) {
            Poll::Ready(n) => n.map_err(Broken::Write)?,
            Poll::Pending => 0,
        };
        stream.gave(written);
        if written < bytes.len() {
            (self.rest, self.urgent) = (bytes[written..].to_vec(), urgent);
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

/// Both directions: 0 is client to server.
#[derive(Debug)]
pub(crate) struct Pump {
    hands: [Hand; 2],
}

impl Pump {
    pub fn new(to_server: &[u8], to_client: &[u8]) -> Pump {
        Pump { hands: [Hand::new(to_server), Hand::new(to_client)] }
    }

    /// Switches to pipes if they are available: the flow is to stay in control mode.
    pub fn through_pipes(&mut self) {
        for h in &mut self.hands {
            h.wants_pipe = h.pipe.is_none();
        }
    }

    /// Returns the bytes in hand in direction `d`, without those in the pipe.
    pub fn rest(&self, d: usize) -> Bytes {
        let hand = &self.hands[d];
        Bytes::copy_from_slice(&hand.rest[hand.start..])
    }

    /// Copies both directions. Ready when both have ended or drained, when `enough`
    /// bytes were copied, or, with the host, when a connection has failed.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        [up, down]: &mut [Stream; 2],
        client: &mut Leg,
        server: &mut Leg,
        enough: u64,
    ) -> Poll<Result<(), Side>> {
        let failed = |d: usize| {
            move |b: Broken| {
                let (Broken::Read(error) | Broken::Write(error)) = &b;
                let side = Side::sender(if matches!(b, Broken::Read(_)) { d } else { 1 - d });
                tracing::debug!(?side, %error, "connection failed");
                side
            }
        };
        let [to_server, to_client] = &mut self.hands;
        let most = enough.saturating_sub(down.copied);
        let is_up = to_server.poll(cx, up, client, server, most).map_err(failed(0))?.is_ready();
        let most = enough.saturating_sub(up.copied);
        let is_down = to_client.poll(cx, down, server, client, most).map_err(failed(1))?.is_ready();
        if up.copied + down.copied >= enough || (is_up && is_down) { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
}
