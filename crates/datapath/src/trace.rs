//! The trace of one flow, segment by segment: numbers as they came and as they left, and the verdicts (`bpf/trace.h`).

use crate::{
    Datapath, Tuple, VERDICTS, abi,
    events::poll_ring,
    maps::{bytes_of, from_bytes, io_error},
    monotonic,
};
use libbpf_rs::{MapCore, MapFlags};
use serde::Serialize;
use std::{
    io,
    sync::TryLockError,
    time::{Duration, Instant},
};

/// The data path goes on for so long by itself, if whoever traces is stopped or dies.
const WITHOUT_US: Duration = Duration::from_secs(2);
/// How often it is told to go on. Entries that were created since are marked, too.
const RENEW: Duration = Duration::from_millis(500);

/// A segment of a flow that is traced.
#[derive(Clone, Debug)]
pub struct Traced {
    /// Where it came in, or whose socket has sent it.
    pub leg: Tuple,
    /// Its leg's socket has sent it, and not the host.
    pub from_socket: bool,
    /// CLOCK_MONOTONIC.
    pub when: Duration,
    /// By name; a segment may be counted more than once.
    pub verdicts: Vec<&'static str>,
    /// As it came.
    pub came: Numbers,
    /// As it left for a host: the leg's own if the socket has sent it, otherwise that of the other leg.
    pub to_host: Option<Numbers>,
    /// As the leg's socket got it.
    pub to_socket: Option<Numbers>,
}

/// What a TCP header says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Numbers {
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// Payload bytes.
    pub len: u32,
    /// Their first letters; `.` for ACK, and `W` for CWR.
    pub flags: String,
    /// As in the header, without the scale.
    pub window: u16,
}

impl Numbers {
    fn new(c: &abi::trace_copy) -> Option<Numbers> {
        const FLAGS: [char; 8] = ['F', 'S', 'R', 'P', '.', 'U', 'E', 'W'];
        let flags = FLAGS.iter().enumerate().filter(|(bit, _)| c.flags & 1 << bit != 0).map(|(_, letter)| letter);
        let (seq, ack, len, window) = (c.seq, c.ack, c.len, c.win);
        (c.is != 0).then(|| Numbers { seq, ack, len, flags: flags.collect(), window })
    }
}

impl Traced {
    fn new(r: &abi::trace_record) -> Option<Traced> {
        let verdicts = VERDICTS.iter().enumerate().filter(|(bit, _)| r.verdicts & 1 << bit != 0).map(|(_, name)| *name);
        let (forwarded, local) = (Numbers::new(&r.forwarded), Numbers::new(&r.local));
        let from_socket = r.from_socket != 0;
        Some(Traced {
            leg: Tuple::from_abi(&r.leg),
            from_socket,
            when: Duration::from_nanos(r.when),
            verdicts: verdicts.collect(),
            came: Numbers::new(&r.came)?,
            to_host: if from_socket { local.clone() } else { forwarded },
            to_socket: local.filter(|_| !from_socket),
        })
    }
}

/// The entries of a flow are marked, until this is dropped.
struct Marked<'a>(&'a Datapath, [&'a Tuple; 2]);

impl Marked<'_> {
    fn set(&self, op: abi::path_op) -> io::Result<()> {
        let until = if op == abi::path_op::PATH_TRACED { monotonic() + WITHOUT_US } else { Duration::ZERO };
        self.0.set_tracing(abi::trace_word::TRACE_UNTIL, until.as_nanos() as u64)?;
        self.1.iter().try_for_each(|leg| self.0.maps.path_op(op, leg, abi::path6::default()).map(drop))
    }
}

impl Drop for Marked<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.set(abi::path_op::PATH_UNTRACED) {
            tracing::warn!(%error, "a trace ends by itself");
        }
    }
}

impl Datapath {
    /// Gives each segment of a flow to `f` until it returns false, and `None` ten times a second at least. How many segments were
    /// lost, for the reader was behind. Blocks: give it a thread of its own. [`io::ErrorKind::ResourceBusy`]: there is a trace already.
    /// One is enough, for its flow has the ring to itself, and is the only one that does not take the short way.
    pub fn trace(&self, legs: [&Tuple; 2], mut f: impl FnMut(Option<Traced>) -> bool) -> io::Result<u64> {
        let _one = match self.one_trace.try_lock() {
            Ok(one) => one,
            Err(TryLockError::WouldBlock) => return Err(io::ErrorKind::ResourceBusy.into()),
            Err(TryLockError::Poisoned(one)) => one.into_inner(),
        };
        self.set_tracing(abi::trace_word::TRACE_LOST, 0)?;
        let (began, marked) = (monotonic(), Marked(self, legs));
        marked.set(abi::path_op::PATH_TRACED)?;
        let (mut renewed, mut failed) = (Instant::now(), Ok(()));
        poll_ring(&self.maps.traces, |data| {
            if renewed.elapsed() > RENEW {
                (renewed, failed) = (Instant::now(), marked.set(abi::path_op::PATH_TRACED));
            }
            let segment = data.and_then(|data| Traced::new(&from_bytes(data)));
            // what an earlier trace has left
            let is_old = segment.as_ref().is_some_and(|s| s.when < began || !legs.contains(&&s.leg));
            failed.is_ok() && (is_old || f(segment))
        })?;
        failed?;
        self.tracing(abi::trace_word::TRACE_LOST)
    }

    fn set_tracing(&self, which: abi::trace_word, to: u64) -> io::Result<()> {
        self.maps.tracing.update(bytes_of(&which.0), &to.to_ne_bytes(), MapFlags::ANY).map_err(io_error)
    }

    fn tracing(&self, which: abi::trace_word) -> io::Result<u64> {
        let word = self.maps.tracing.lookup(bytes_of(&which.0), MapFlags::ANY).map_err(io_error)?.unwrap_or_default();
        Ok(word.first_chunk().map_or(0, |b| u64::from_ne_bytes(*b)))
    }
}
