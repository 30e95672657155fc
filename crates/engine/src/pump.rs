//! Copies both directions of a flow, in steps that a splice can interrupt at any byte.

use crate::{How, Leg, pipe::Pipe};
use bytes::Bytes;
use std::{
    cell::RefCell,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncWrite, ReadBuf};

/// Bytes in hand per direction: large enough that a read empties what a window brings.
const BUFFER: usize = 64 * 1024;
/// From so many bytes on a pipe is worth the calls that make it.
const PIPE_FROM: u64 = 4 * BUFFER as u64;

thread_local! {
    /// What is read goes through here; what cannot be written at once stays with its direction.
    static PASSING: RefCell<Vec<u8>> = RefCell::new(vec![0; BUFFER]);
}

/// One direction: from one leg to the other.
#[derive(Debug)]
pub(crate) struct Direction {
    /// Bytes in hand, from `start` on. An idle connection holds no memory.
    rest: Vec<u8>,
    start: usize,
    /// One byte is in hand, and it is urgent.
    urgent: bool,
    /// Instead of memory, once that is empty.
    pipe: Option<Pipe>,
    wants_pipe: bool,
    /// Bytes that may still be read during a drain; `None`: no limit.
    pub limit: Option<u64>,
    /// Bytes of a message that may still be read, `u64::MAX` until its sender closes. `None`: all until the end of the stream,
    /// which is passed on.
    pub message: Option<u64>,
    /// With the limit used up: end of stream is still to be read.
    pub fin: bool,
    /// Bytes passed on.
    pub copied: u64,
}

impl Direction {
    fn new(first: &[u8]) -> Direction {
        Direction {
            rest: first.to_vec(),
            start: 0,
            urgent: false,
            pipe: None,
            wants_pipe: false,
            limit: None,
            message: None,
            fin: false,
            copied: 0,
        }
    }

    /// Bytes read and not written yet.
    pub fn in_hand(&self) -> usize {
        self.rest.len() - self.start + self.pipe.as_ref().map_or(0, Pipe::filled)
    }

    /// So many bytes of a message were read, or went by.
    pub fn passed(&mut self, n: u64) {
        if let Some(left) = self.message.as_mut().filter(|left| **left != u64::MAX) {
            *left = left.saturating_sub(n);
        }
    }

    /// What is in hand, in memory.
    pub fn rest(&self) -> Bytes {
        Bytes::copy_from_slice(&self.rest[self.start..])
    }

    /// Has all of the message been read that will come?
    pub fn message_is_read(&self, from: &Leg) -> bool {
        self.message.is_some_and(|left| left == 0 || from.eof)
    }

    /// One pass: writes what is in hand, reads more. Ready when the direction has ended, or has drained to its limit.
    /// Pending without a wake-up when `most` bytes have been passed on: the caller looks at the count.
    fn poll(&mut self, cx: &mut Context<'_>, from: &mut Leg, to: &mut Leg, most: u64) -> Poll<Result<(), Broken>> {
        loop {
            while self.start < self.rest.len() {
                let n = ready!(to.poll_give(cx, &self.rest[self.start..], self.urgent)).map_err(Broken::Write)?;
                self.start += n;
                self.copied += n as u64;
            }
            (self.rest, self.start, self.urgent) = (Vec::new(), 0, false);
            while let Some(p) = self.pipe.as_mut().filter(|p| p.filled() > 0) {
                self.copied += ready!(p.empty(cx, to)).map_err(Broken::Write)? as u64;
            }
            if self.copied >= most {
                return Poll::Pending;
            }
            if self.message_is_read(from) {
                return Poll::Ready(Ok(()));
            }
            if from.eof {
                if !to.shut {
                    ready!(Pin::new(&mut *to).poll_shutdown(cx)).map_err(Broken::Write)?;
                }
                return Poll::Ready(Ok(()));
            }
            let most = match self.limit {
                Some(0) if !self.fin => return Poll::Ready(Ok(())),
                Some(0) => 1,
                Some(n) => n,
                None => u64::MAX,
            };
            let most = most.min(self.message.unwrap_or(u64::MAX));
            let room = if self.limit.is_none() && self.pipe.is_some() { usize::MAX } else { BUFFER };
            let room = usize::try_from(most).unwrap_or(usize::MAX).min(room);
            if self.wants_pipe && self.copied >= PIPE_FROM {
                (self.pipe, self.wants_pipe) = (Pipe::new().ok(), false);
            }
            if let Some(p) = &mut self.pipe
                && let Some(n) = ready!(p.fill(cx, from, room)).map_err(Broken::Read)?
            {
                self.took(n);
                continue;
            }
            let room = room.min(BUFFER);
            let n = PASSING.with_borrow_mut(|passing| self.pass(cx, from, to, &mut passing[..room]));
            self.took(ready!(n)?);
        }
    }

    /// Reads once, and writes what the other leg takes. Ready with the bytes read.
    fn pass(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut Leg,
        to: &mut Leg,
        passing: &mut [u8],
    ) -> Poll<Result<usize, Broken>> {
        let mut b = ReadBuf::new(passing);
        let urgent = ready!(from.poll_take(cx, &mut b)).map_err(Broken::Read)?;
        let bytes = b.filled();
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let written = match to.poll_give(cx, bytes, urgent) {
            Poll::Ready(n) => n.map_err(Broken::Write)?,
            Poll::Pending => 0,
        };
        self.copied += written as u64;
        (self.rest, self.urgent) = (bytes[written..].to_vec(), urgent);
        Poll::Ready(Ok(bytes.len()))
    }

    fn took(&mut self, n: usize) {
        if let Some(limit) = &mut self.limit {
            *limit = limit.saturating_sub(n as u64);
        }
        self.passed(n as u64);
    }
}

/// Which end of a direction failed.
#[derive(Debug)]
enum Broken {
    Read(io::Error),
    Write(io::Error),
}

/// Why the pump stopped for good.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Failed {
    /// The client's connection.
    Client,
    /// The server's.
    Server,
}

impl Failed {
    /// What that is to the flow.
    pub fn how(&self) -> How {
        match self {
            Failed::Client => How::ClientReset,
            Failed::Server => How::ServerReset,
        }
    }
}

/// Both directions: 0 is client to server.
#[derive(Debug)]
pub(crate) struct Pump {
    pub dirs: [Direction; 2],
}

impl Pump {
    pub fn new(to_server: &[u8], to_client: &[u8]) -> Pump {
        Pump { dirs: [Direction::new(to_server), Direction::new(to_client)] }
    }

    /// Bytes passed on, both directions.
    pub fn copied(&self) -> u64 {
        self.dirs[0].copied + self.dirs[1].copied
    }

    /// From now on through pipes, where they can be had: the flow is to stay in control mode.
    pub fn through_pipes(&mut self) {
        for d in &mut self.dirs {
            d.wants_pipe = d.pipe.is_none();
        }
    }

    /// Lifts the limits of a drain.
    pub fn unlimited(&mut self) {
        for d in &mut self.dirs {
            d.limit = None;
            d.fin = false;
        }
    }

    /// Runs both directions; ready when both have ended or drained, or when `enough` bytes were copied.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        client: &mut Leg,
        server: &mut Leg,
        enough: u64,
    ) -> Poll<Result<(), Failed>> {
        let failed = |d: usize| {
            move |b: Broken| {
                let client = matches!((d, &b), (0, Broken::Read(_)) | (1, Broken::Write(_)));
                let (Broken::Read(e) | Broken::Write(e)) = b;
                tracing::debug!(client, error = %e, "connection failed");
                if client { Failed::Client } else { Failed::Server }
            }
        };
        let most = enough.saturating_sub(self.dirs[1].copied);
        let up = self.dirs[0].poll(cx, client, server, most).map_err(failed(0))?;
        let most = enough.saturating_sub(self.dirs[0].copied);
        let down = self.dirs[1].poll(cx, server, client, most).map_err(failed(1))?;
        if self.copied() >= enough || (up.is_ready() && down.is_ready()) { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    /// Have both directions ended, or their messages?
    pub fn ended(&self, client: &Leg, server: &Leg) -> bool {
        let [up, down] = &self.dirs;
        if up.message_is_read(client) && down.message_is_read(server) {
            return up.in_hand() + down.in_hand() == 0;
        }
        client.eof && server.eof && client.shut && server.shut
    }
}
