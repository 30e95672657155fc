//! A tap: a copy of all bytes that pass through a leg, in each direction and in order, for a reader that nothing waits for.
//!
//! The [`Leg`](crate::Leg) copies what control mode reads and writes. The data path copies forwarded segments
//! (bpf/tap.h); these arrive through a ring and are ordered by stream position (stretches.rs). A missing range
//! stays open for a retransmission until the other host has acknowledged data beyond it, or until the flow is
//! back in control mode with nothing in flight. Then it becomes a gap, and the stream goes on after it.
//!
//! If two copies of the same bytes differ, nobody here knows which one the receiver has taken: it may have
//! rejected the first for reasons that only a host knows (RFC 7323, 5; RFC 5961, 5). So copies are kept
//! until shortly after the receiver has acknowledged them, and compared with later copies of the same
//! bytes. Ranges that differ, or that could not be kept long enough, are reported ([`PieceKind::Doubt`]).
//!
//! The reader's limit bounds the memory for bytes that are held out of order or not read yet. Beyond it, bytes become gaps.
//! Copies for comparison take up to half as much again. Bytes from control mode arrive only once, and are held however far
//! behind the ring is. Copies of forwarded segments may arrive again, and are held up to [`HELD`] for each direction.

use bytes::{Buf, Bytes};
use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    time::Duration,
};

use crate::sync::lock;

/// Maximum number of bytes of copies held out of order, per direction: a large window, of which one segment was lost.
const HELD: usize = 4 << 20;
/// Maximum number of bytes kept for comparison, per direction: half of the largest window that Linux opens
/// by default (32 MB of `tcp_rmem` since 6.17; 6 MB before), which only very long and fast paths fill.
const KEPT: usize = 16 << 20;
/// Number of acknowledged bytes that are kept for comparison. If the
/// receiver has taken a forged segment, the true one follows at once.
const BEHIND: u64 = 32 << 10;
/// Bytes of memory that a piece takes in addition to its data.
const OVERHEAD: usize = 128;

/// A direction, as seen from the tapped leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TapDirection {
    /// From the host at the leg's other end.
    FromHost,
    /// To the host at the leg's other end.
    ToHost,
}

/// A piece of a tapped stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The number of the tap, as given to [`Taps::tap`].
    pub tap: u64,
    /// The direction of the stream.
    pub way: TapDirection,
    /// Position in the stream in bytes; 0 is the beginning of the connection. Each piece begins
    /// where the last one ended, except for [`PieceKind::Doubt`], which may lie anywhere.
    pub at: u64,
    /// The content.
    pub what: PieceKind,
}

/// The content of a [`Piece`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PieceKind {
    /// Bytes.
    Bytes(Bytes),
    /// This many bytes have passed, but are not known.
    Gap(u64),
    /// It is not known whether the receiver took these bytes as they were or will be delivered: some
    /// of their copies differed, or could not be compared. The value is the number of bytes.
    Doubt(u64),
    /// The end of the stream: the leg is closed.
    End,
}

/// Byte counts of all taps of a reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TapCounts {
    /// Bytes delivered.
    pub bytes: u64,
    /// Bytes in gaps.
    pub gaps: u64,
    /// Bytes in doubt. They count more than once if several copies differed.
    pub doubts: u64,
}

/// State shared by the taps and their reader.
#[derive(Debug)]
struct TapTotals {
    /// Bytes held or not read yet, and their limit.
    used: AtomicUsize,
    most: usize,
    /// Bytes kept for comparison, at most half of `most`.
    kept: AtomicUsize,
    bytes: AtomicU64,
    gaps: AtomicU64,
    doubts: AtomicU64,
}

/// Creates taps for one reader.
#[derive(Clone, Debug)]
pub struct Taps {
    pieces: Sender<Piece>,
    shared: Arc<TapTotals>,
}

/// Receives the pieces of all taps.
#[derive(Debug)]
pub struct TapReader {
    pieces: Receiver<Piece>,
    shared: Arc<TapTotals>,
}

/// A tap for one leg ([`Leg::tap`](crate::Leg::tap)).
pub struct Tap {
    pub(crate) state: Arc<Mutex<TapState>>,
}

impl Taps {
    /// Creates a source of taps and their reader. At most `most` bytes may be unread, including those held out of order.
    pub fn new(most: usize) -> (Taps, TapReader) {
        let (tx, pieces) = channel();
        let counts = AtomicU64::default;
        let (used, kept) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let shared = Arc::new(TapTotals { used, most, kept, bytes: counts(), gaps: counts(), doubts: counts() });
        (Taps { pieces: tx, shared: shared.clone() }, TapReader { pieces, shared })
    }

    /// Creates a tap for one leg. Its pieces carry the number `id`.
    pub fn tap(&self, id: u64) -> Tap {
        let stream = |way| Stream::new(id, way, self.clone());
        let streams = [stream(TapDirection::FromHost), stream(TapDirection::ToHost)];
        Tap { state: Arc::new(Mutex::new(TapState { streams, open: 0, left: false })) }
    }

    /// Returns the byte counts so far.
    pub fn counts(&self) -> TapCounts {
        let [bytes, gaps, doubts] =
            [&self.shared.bytes, &self.shared.gaps, &self.shared.doubts].map(|n| n.load(Relaxed));
        TapCounts { bytes, gaps, doubts }
    }
}

impl TapReader {
    /// Waits for the next piece. `None`: all taps and all [`Taps`] are gone.
    pub fn next(&self) -> Option<Piece> {
        self.take(self.pieces.recv().ok()?)
    }

    /// Waits for the next piece for at most `time`. Fails with [`RecvTimeoutError::Timeout`] if none has arrived.
    pub fn next_within(&self, time: Duration) -> Result<Option<Piece>, RecvTimeoutError> {
        match self.pieces.recv_timeout(time) {
            Ok(piece) => Ok(self.take(piece)),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn take(&self, piece: Piece) -> Option<Piece> {
        if let PieceKind::Bytes(bytes) = &piece.what {
            self.shared.used.fetch_sub(bytes.len() + OVERHEAD, Relaxed);
        }
        Some(piece)
    }
}

impl TapTotals {
    /// Reserves memory. Returns false if there is no room.
    fn reserve(&self, size: usize) -> bool {
        reserve(&self.used, size, self.most)
    }
}

fn reserve(of: &AtomicUsize, size: usize, most: usize) -> bool {
    of.fetch_update(Relaxed, Relaxed, |used| used.checked_add(size).filter(|n| *n <= most)).is_ok()
}

impl fmt::Debug for Tap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tap").finish_non_exhaustive()
    }
}

impl Tap {
    /// Sets the positions at which the streams begin.
    pub(crate) fn begin(&self, at: [u64; 2]) {
        let mut state = lock(&self.state);
        state.streams.iter_mut().zip(at).for_each(|(s, at)| s.next = at);
    }

    /// Copies bytes that control mode has read, at this position.
    pub(crate) fn read(&self, at: u64, bytes: &[u8]) {
        self.passed(TapDirection::FromHost, at, bytes);
    }

    /// Copies bytes that control mode has written, at this position.
    pub(crate) fn wrote(&self, at: u64, bytes: &[u8]) {
        self.passed(TapDirection::ToHost, at, bytes);
    }

    fn passed(&self, way: TapDirection, at: u64, bytes: &[u8]) {
        lock(&self.state).streams[way as usize].put(at, Bytes::copy_from_slice(bytes), true);
    }
}

impl Drop for Tap {
    /// The leg is closed. The streams end once the ring holds no more of their copies.
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        state.left = true;
        state.end();
    }
}

/// Both streams of a tap.
pub(crate) struct TapState {
    streams: [Stream; 2],
    /// Number of stretches of which the ring may still hold copies.
    open: u32,
    /// The leg is closed.
    left: bool,
}

impl TapState {
    pub fn stream(&mut self, way: TapDirection) -> &mut Stream {
        &mut self.streams[way as usize]
    }

    pub fn begin(&mut self) {
        self.open += 1;
    }

    /// One of the stretches has no copies left in the ring.
    pub fn settled(&mut self) {
        self.open -= 1;
        if self.open == 0 {
            self.streams.iter_mut().for_each(Stream::forget);
        }
        self.end();
    }

    fn end(&mut self) {
        if self.left && self.open == 0 {
            self.streams.iter_mut().for_each(Stream::end);
        }
    }
}

/// One stream, which puts pieces in order.
pub(crate) struct Stream {
    id: u64,
    way: TapDirection,
    out: Taps,
    /// Position up to which everything was delivered, or is a gap.
    next: u64,
    /// Start of a gap that ends at `next` and was not reported yet.
    lost: Option<u64>,
    /// Bytes beyond `next`, by position. They may overlap.
    held: BTreeMap<u64, Held>,
    /// Number of held bytes that are not `sure`, and the length of the longest held piece.
    size: usize,
    longest: u64,
    /// Copies below `next`, for comparison, in order and without overlap, and the number of their bytes.
    kept: VecDeque<(u64, Bytes)>,
    kept_size: usize,
    /// Position up to which the receiver has acknowledged.
    acked: u64,
    /// Start and end of a range in doubt that was not reported yet.
    doubt: Option<(u64, u64)>,
}

struct Held {
    bytes: Bytes,
    /// These bytes arrive only once.
    sure: bool,
}

impl Stream {
    fn new(id: u64, way: TapDirection, out: Taps) -> Stream {
        Stream {
            id,
            way,
            out,
            next: 0,
            lost: None,
            held: BTreeMap::new(),
            size: 0,
            longest: 0,
            kept: VecDeque::new(),
            kept_size: 0,
            acked: 0,
            doubt: None,
        }
    }

    /// Returns the position up to which the stream is known.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Adds bytes at a position. `sure`: they come from control mode and
    /// arrive only once; others may arrive again if there is no room.
    pub fn put(&mut self, at: u64, mut bytes: Bytes, sure: bool) {
        self.compare(at, &bytes);
        if at > self.next {
            self.hold(at, &bytes, sure);
        }
        let end = at + bytes.len() as u64;
        if at <= self.next && end > self.next {
            bytes.advance((self.next - at) as usize);
            self.emit(bytes, sure);
            self.take_held();
        }
    }

    /// Records that the receiver has acknowledged everything below `to`.
    pub fn acknowledged(&mut self, to: u64) {
        self.acked = self.acked.max(to);
        while self.kept.front().is_some_and(|(at, bytes)| at + bytes.len() as u64 + BEHIND <= self.acked) {
            self.unkeep();
        }
    }

    /// Compares bytes with known copies of the same range.
    fn compare(&mut self, at: u64, bytes: &[u8]) {
        let end = at + bytes.len() as u64;
        // a keep-alive may carry one byte of garbage, which no host takes (RFC 9293, 3.8.4)
        if bytes.len() == 1 && end <= self.acked {
            return;
        }
        let first = self.kept.partition_point(|(at_kept, kept)| at_kept + kept.len() as u64 <= at);
        let kept = self.kept.range(first..).map(|(at, kept)| (*at, kept)).take_while(|(at, _)| *at < end);
        let held = self.held.range(at.saturating_sub(self.longest)..end).map(|(at, held)| (*at, &held.bytes));
        let known = kept.chain(held).filter_map(|(at_known, known)| differing((at, bytes), (at_known, known)));
        if let Some((from, to)) = known.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))) {
            self.doubt(from, to);
        }
    }

    fn doubt(&mut self, from: u64, to: u64) {
        self.out.shared.doubts.fetch_add(to - from, Relaxed);
        self.doubt = Some(self.doubt.map_or((from, to), |known| (known.0.min(from), known.1.max(to))));
    }

    /// Keeps bytes that were just delivered, for comparison.
    fn keep(&mut self, at: u64, bytes: Bytes) {
        let shared = self.out.shared.clone();
        while self.kept_size + bytes.len() > KEPT || !reserve(&shared.kept, bytes.len() + OVERHEAD, shared.most / 2) {
            let (at, end) = match self.unkeep() {
                Some((at, old)) => (at, at + old.len() as u64),
                None => return self.doubt(at, at + bytes.len() as u64),
            };
            if end > self.acked {
                self.doubt(at.max(self.acked), end);
            }
        }
        self.kept_size += bytes.len();
        self.kept.push_back((at, bytes));
    }

    fn unkeep(&mut self) -> Option<(u64, Bytes)> {
        let (at, bytes) = self.kept.pop_front()?;
        self.kept_size -= bytes.len();
        self.out.shared.kept.fetch_sub(bytes.len() + OVERHEAD, Relaxed);
        Some((at, bytes))
    }

    /// Drops the copies for comparison: no others will arrive.
    fn forget(&mut self) {
        while self.unkeep().is_some() {}
    }

    /// Holds bytes that are out of order. Afterwards, bytes that are `sure` are held, or `next` has reached them.
    fn hold(&mut self, at: u64, bytes: &Bytes, mut sure: bool) {
        if let Some(old) = self.held.get_mut(&at) {
            if old.bytes.len() >= bytes.len() {
                self.size -= if sure && !old.sure { old.bytes.len() } else { 0 };
                old.sure |= sure;
                return;
            }
            sure |= old.sure;
        }
        while (!sure && self.size + bytes.len() > HELD) || !self.out.shared.reserve(bytes.len() + OVERHEAD) {
            let last = self.held.iter().rev().find(|(_, h)| !h.sure).map(|(k, _)| *k);
            match last.filter(|last| *last > at) {
                Some(last) => drop(self.unhold(last)),
                // The reader is far behind: do not wait for missing ranges any longer.
                None if sure => drop(self.give_up(self.held.first_key_value().map_or(at, |(k, _)| *k).min(at))),
                None => return,
            }
            if self.next >= at {
                return;
            }
        }
        self.unhold(at);
        self.size += if sure { 0 } else { bytes.len() };
        self.longest = self.longest.max(bytes.len() as u64);
        self.held.insert(at, Held { bytes: bytes.clone(), sure });
    }

    fn unhold(&mut self, at: u64) -> Option<Held> {
        let held = self.held.remove(&at)?;
        self.size -= if held.sure { 0 } else { held.bytes.len() };
        self.out.shared.used.fetch_sub(held.bytes.len() + OVERHEAD, Relaxed);
        Some(held)
    }

    fn take_held(&mut self) {
        while let Some((&at, _)) = self.held.first_key_value()
            && at <= self.next
        {
            let Some(Held { mut bytes, sure }) = self.unhold(at) else { return };
            let known = usize::try_from(self.next - at).unwrap_or(usize::MAX);
            if bytes.len() > known {
                bytes.advance(known);
                self.emit(bytes, sure);
            }
        }
    }

    /// Turns missing ranges below `to` into gaps. Returns their number of bytes.
    pub fn give_up(&mut self, to: u64) -> u64 {
        let mut missing = 0;
        while self.next < to {
            let hole = self.held.first_key_value().map_or(to, |(at, _)| *at).min(to);
            missing += hole - self.next;
            self.skip(hole - self.next);
            self.take_held();
        }
        missing
    }

    fn skip(&mut self, n: u64) {
        self.lost.get_or_insert(self.next);
        self.out.shared.gaps.fetch_add(n, Relaxed);
        self.next += n;
    }

    /// Delivers bytes that begin at `next`.
    fn emit(&mut self, bytes: Bytes, sure: bool) {
        let n = bytes.len() as u64;
        if !self.out.shared.reserve(bytes.len() + OVERHEAD) {
            return self.skip(n);
        }
        if !sure {
            self.keep(self.next, bytes.clone());
        }
        self.tell_gap();
        self.out.shared.bytes.fetch_add(n, Relaxed);
        self.tell(self.next, PieceKind::Bytes(bytes));
        self.next += n;
    }

    /// Reports a gap and a doubt. Doubts are reported no more often than bytes, however many copies differ.
    fn tell_gap(&mut self) {
        if let Some(from) = self.lost.take() {
            self.tell(from, PieceKind::Gap(self.next - from));
        }
        if let Some((from, to)) = self.doubt.take() {
            self.tell(from, PieceKind::Doubt(to - from));
        }
    }

    fn tell(&self, at: u64, what: PieceKind) {
        // a reader that has gone wants nothing
        let _ = self.out.pieces.send(Piece { tap: self.id, way: self.way, at, what });
    }

    fn end(&mut self) {
        while let Some((&at, _)) = self.held.first_key_value() {
            self.give_up(at);
        }
        self.forget();
        self.tell_gap();
        self.tell(self.next, PieceKind::End);
    }
}

/// Returns the range in which two pieces of one stream differ.
fn differing((at, a): (u64, &[u8]), (at_b, b): (u64, &[u8])) -> Option<(u64, u64)> {
    let (from, to) = (at.max(at_b), (at + a.len() as u64).min(at_b + b.len() as u64));
    if from >= to {
        return None;
    }
    let [a, b] = [(at, a), (at_b, b)].map(|(at, bytes)| &bytes[(from - at) as usize..(to - at) as usize]);
    if a == b {
        return None;
    }
    let differ = || a.iter().zip(b).enumerate().filter(|(_, (x, y))| x != y).map(|(i, _)| from + i as u64);
    Some((differ().next()?, differ().next_back()? + 1))
}

#[cfg(test)]
mod tests;
