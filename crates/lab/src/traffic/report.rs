//! The observations of one end, and the comparison of two.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use crate::pattern::Mismatch;

/// How one direction of a connection ended, as observed by this end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamEnd {
    /// Receiving: the other end's FIN. Sending: all bytes were passed to the kernel.
    Eof,
    /// The other end reset the connection.
    Reset,
    /// This end ended the connection, as scripted.
    Own,
    /// The deadline of the script expired first.
    Timeout,
    /// Anything else.
    Error(String),
}

impl StreamEnd {
    /// The meaning of a failed system call for the connection.
    pub(crate) fn from_error(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Self::Reset,
            _ => Self::Error(error.to_string()),
        }
    }
}

/// What one end of a connection did and observed.
#[derive(Clone, Debug)]
pub struct Report {
    /// The connection's seed; `None` if it was to be learned and too few bytes arrived.
    pub seed: Option<u64>,
    /// Bytes passed to the kernel.
    pub sent: u64,
    /// Bytes read.
    pub received: u64,
    /// SHA-256 of the bytes sent, in hexadecimal.
    pub sha256_sent: String,
    /// SHA-256 of the bytes received, in hexadecimal.
    pub sha256_received: String,
    /// Positions of bytes sent as urgent.
    pub urgent: Vec<u64>,
    /// Positions of urgent bytes received.
    pub marks: Vec<u64>,
    /// The first wrong byte.
    pub mismatch: Option<Mismatch>,
    /// Time from the start to the first byte read.
    pub first_byte: Option<Duration>,
    /// Longest time between two reads that returned bytes, not counting the script's own pauses.
    pub longest_gap: Duration,
    /// The position at the end of that gap.
    pub longest_gap_at: u64,
    /// Segments retransmitted by this end's kernel (TCP_INFO); `None` if the query failed.
    pub retransmits: Option<u32>,
    /// How receiving ended.
    pub end: StreamEnd,
    /// How sending ended.
    pub send_end: StreamEnd,
    /// Time from the start to the end of both directions.
    pub duration: Duration,
    /// This end's address.
    pub local: Option<SocketAddr>,
    /// The other end's address.
    pub remote: Option<SocketAddr>,
}

impl Report {
    /// Whether the other end has reset the connection. A socket reports that once: to its sender or to its receiver, who then
    /// finds the end of the stream.
    pub fn was_reset(&self) -> bool {
        self.end == StreamEnd::Reset || (self.end == StreamEnd::Eof && self.send_end == StreamEnd::Reset)
    }

    /// Whether this end observed no error: every byte was correct, and both directions ended normally.
    pub fn clean(&self) -> bool {
        self.mismatch.is_none() && self.end == StreamEnd::Eof && self.send_end == StreamEnd::Eof
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sent {} ({:?}), received {} ({:?})", self.sent, self.send_end, self.received, self.end)?;
        write!(f, " in {:?}, longest gap {:?} at {}", self.duration, self.longest_gap, self.longest_gap_at)?;
        write!(f, ", {} retransmissions", self.retransmits.map_or("unknown".into(), |n| n.to_string()))?;
        if self.urgent.len() + self.marks.len() > 0 {
            write!(f, ", urgent ones {:?} and {:?}", self.urgent, self.marks)?;
        }
        self.mismatch.map_or(Ok(()), |mismatch| write!(f, ", {mismatch}"))
    }
}

/// Checks that everything each end sent arrived at the other, unaltered and with
/// its urgent marks, and that both ended normally. Otherwise returns the reason.
pub fn intact(one: &Report, other: &Report) -> Result<(), String> {
    let whole = |from: &Report, to: &Report| {
        from.sent == to.received && from.sha256_sent == to.sha256_received && from.urgent == to.marks
    };
    if one.clean() && other.clean() && whole(one, other) && whole(other, one) {
        return Ok(());
    }
    Err(format!("the two ends disagree\n  one: {one}\n  other: {other}"))
}
