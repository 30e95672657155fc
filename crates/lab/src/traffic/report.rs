//! What one end saw, and whether two ends agree.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use crate::pattern::Mismatch;

/// How one direction of a connection ended, as this end saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamEnd {
    /// Receiving: the other end's FIN. Sending: everything was handed to the kernel.
    Eof,
    /// The other end reset the connection.
    Reset,
    /// This end ended it, as its script said.
    Own,
    /// The deadline of the script came first.
    Timeout,
    /// Anything else.
    Error(String),
}

impl StreamEnd {
    /// What a failed system call means for the connection.
    pub(crate) fn from_error(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Self::Reset,
            _ => Self::Error(error.to_string()),
        }
    }
}

/// What one end of a connection did and saw.
#[derive(Clone, Debug)]
pub struct Report {
    /// The connection's seed; `None` if it was to be learnt and too little came.
    pub seed: Option<u64>,
    /// Bytes handed to the kernel.
    pub sent: u64,
    /// Bytes read.
    pub received: u64,
    /// Digest of what was sent, in hexadecimal.
    pub sha256_sent: String,
    /// Digest of what was received, in hexadecimal.
    pub sha256_received: String,
    /// Positions of the bytes that were sent as urgent ones.
    pub urgent: Vec<u64>,
    /// Positions of the urgent bytes that were received.
    pub marks: Vec<u64>,
    /// The first wrong byte.
    pub mismatch: Option<Mismatch>,
    /// When the first byte was read, from the start.
    pub first_byte: Option<Duration>,
    /// Longest time from one read that gave bytes to the next. A script's own pauses do not count.
    pub longest_gap: Duration,
    /// The position before which that was.
    pub longest_gap_at: u64,
    /// Segments this end's kernel sent again (TCP_INFO); `None` if it could not be asked.
    pub retransmits: Option<u32>,
    /// How receiving ended.
    pub end: StreamEnd,
    /// How sending ended.
    pub send_end: StreamEnd,
    /// From the start to the end of both directions.
    pub duration: Duration,
    /// This end's address.
    pub local: Option<SocketAddr>,
    /// The other end's address.
    pub remote: Option<SocketAddr>,
}

impl Report {
    /// Whether this end saw nothing wrong: every byte as it should be, and both directions ended by themselves.
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

/// Whether all that each end sent has arrived at the other, unaltered and as urgent as it was, and both ended well. If not, says why.
pub fn intact(one: &Report, other: &Report) -> Result<(), String> {
    let whole = |from: &Report, to: &Report| {
        from.sent == to.received && from.sha256_sent == to.sha256_received && from.urgent == to.marks
    };
    if one.clean() && other.clean() && whole(one, other) && whole(other, one) {
        return Ok(());
    }
    Err(format!("the two ends disagree\n  one: {one}\n  other: {other}"))
}
