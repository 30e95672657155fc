//! The trace of one flow, segment by segment: numbers at arrival and departure, and the verdicts (`bpf/trace.h`).

use crate::{
    Connection, Datapath, Tuple, VERDICTS, abi, monotonic,
    tables::maps::{bytes_of, from_bytes, io_error},
    watching::events::{TICK, poll_ring},
};
use libbpf_rs::{MapCore, MapFlags};
use std::{
    io,
    sync::TryLockError,
    time::{Duration, Instant},
};

/// Time after which the data path stops by itself, if the tracing process is stopped or dies.
const WITHOUT_US: Duration = Duration::from_secs(2);
/// Interval at which the trace is renewed. Also marks entries that were created since.
const RENEW: Duration = Duration::from_millis(500);

/// A segment of a traced flow.
#[derive(Clone, Debug)]
pub struct Traced {
    /// The leg on which it arrived, or whose socket has sent it.
    pub leg: Tuple,
    /// Whether the leg's socket has sent it, and not the host.
    pub from_socket: bool,
    /// Time of the segment, CLOCK_MONOTONIC.
    pub when: Duration,
    /// Names of its verdicts. A segment may be counted more than once.
    pub verdicts: Vec<&'static str>,
    /// The numbers with which it arrived.
    pub came: Numbers,
    /// The numbers with which it left for a host: the leg's own host
    /// if the socket has sent it, otherwise the host of the other leg.
    pub to_host: Option<Numbers>,
    /// The numbers with which the leg's socket received it.
    pub to_socket: Option<Numbers>,
}

/// The fields of a TCP header, in host byte order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Numbers {
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// Number of payload bytes.
    pub len: u32,
    /// First letters of the flags; `.` for ACK and `W` for CWR.
    pub flags: String,
    /// Window as in the header, not scaled.
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

/// Marks the entries of a flow as traced, until it is dropped.
struct Marked<'a>(&'a Datapath, [Connection; 2]);

impl Marked<'_> {
    fn set(&self, op: abi::path_op) -> io::Result<()> {
        let until = if op == abi::path_op::PATH_OP_TRACED { monotonic() + WITHOUT_US } else { Duration::ZERO };
        self.0.set_tracing(abi::trace_word::TRACE_UNTIL, until.as_nanos() as u64)?;
        self.1.iter().try_for_each(|leg| self.0.maps.path_op_on(op, leg))
    }
}

impl Drop for Marked<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.set(abi::path_op::PATH_OP_UNTRACED) {
            tracing::warn!(%error, "cannot end a trace: it ends by itself");
        }
    }
}

impl Datapath {
    /// Passes each segment of a flow to `f`, until it returns false. Passes `None` at least ten times a second. Returns the
    /// number of segments that were lost because the reader was too slow. Blocks: call it from a thread of its own. Fails with
    /// [`io::ErrorKind::ResourceBusy`] during another trace: the ring holds one flow, and only that flow leaves the fast path.
    pub fn trace(
        &self,
        legs: [impl Into<Connection>; 2],
        mut f: impl FnMut(Option<Traced>) -> bool,
    ) -> io::Result<u64> {
        let _one = match self.one_trace.try_lock() {
            Ok(one) => one,
            Err(TryLockError::WouldBlock) => return Err(io::ErrorKind::ResourceBusy.into()),
            Err(TryLockError::Poisoned(one)) => one.into_inner(),
        };
        self.set_tracing(abi::trace_word::TRACE_LOST, 0)?;
        let legs = legs.map(Into::into);
        let (began, marked) = (monotonic(), Marked(self, legs));
        marked.set(abi::path_op::PATH_OP_TRACED)?;
        let (mut renewed, mut failed) = (Instant::now(), Ok(()));
        poll_ring(&self.maps.traces, |data| {
            if renewed.elapsed() > RENEW {
                (renewed, failed) = (Instant::now(), marked.set(abi::path_op::PATH_OP_TRACED));
            }
            let segment = data.and_then(|data| Traced::new(&from_bytes(data)));
            // left over from an earlier trace
            let is_old = segment.as_ref().is_some_and(|s| s.when < began || legs.iter().all(|c| c.leg != s.leg));
            (failed.is_ok() && (is_old || f(segment))).then_some(TICK)
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
