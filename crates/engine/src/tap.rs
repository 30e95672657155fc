//! A tap: a copy of all that passes a leg, each way, in order, for a reader that nothing waits for.
//!
//! What control mode reads and writes is copied by the [`Leg`](crate::Leg); of what is forwarded the data path makes copies
//! (bpf/tap.h), which come through a ring and are put in their place by stream position (`stretches`). What is missing stays
//! open for a retransmission until the other host has acknowledged what is behind it, or until the flow is back in control mode
//! and nothing is on its way any more. Then it is a gap, and the stream goes on behind it.
//!
//! Of copies that are not alike nobody here knows which one the receiver has taken: it may have refused the first for reasons that
//! only a host knows (RFC 7323, 5; RFC 5961, 5). So copies are kept until it has acknowledged them, and a little longer, and compared
//! with what comes of the same bytes; what differs, or could not be kept so long, is told ([`PieceKind::Doubt`]).
//!
//! Memory is bounded by the reader's limit: what is held out of order and what it has not taken yet. Beyond that, bytes become gaps.
//! Half as much again is kept for comparison.
//! What control mode has passed on comes once, and is held however far the ring is behind; copies come again, and are held up to
//! [`HELD`] for each direction.

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

/// Copies held out of order at most, per direction: a large window, of which one segment was lost.
const HELD: usize = 4 << 20;
/// Bytes kept for comparison at most, per direction: half of the largest window that Linux opens unasked (32 MB of `tcp_rmem`, since
/// 6.17; 6 MB before), which only very long and fast paths fill.
const KEPT: usize = 16 << 20;
/// So many of them after they were acknowledged: if the receiver has taken a forged segment, the true one follows at once.
const BEHIND: u64 = 32 << 10;
/// What a piece costs beside its bytes.
const OVERHEAD: usize = 128;

/// A direction, as the leg sees it that is tapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TapDirection {
    /// From the host at its other end.
    FromHost,
    /// To that host.
    ToHost,
}

/// A piece of a tapped stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which tap: the number given to [`Taps::tap`].
    pub tap: u64,
    /// Which of its streams.
    pub way: TapDirection,
    /// Position in it, bytes from 0 on at the beginning of the connection. Each piece begins where the last one has ended, but for a
    /// [`PieceKind::Doubt`], which may lie anywhere.
    pub at: u64,
    /// What is there.
    pub what: PieceKind,
}

/// What a [`Piece`] is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PieceKind {
    /// Bytes.
    Bytes(Bytes),
    /// So many bytes have passed, and are not known.
    Gap(u64),
    /// Of so many bytes, handed on before or to come, it is not known whether the receiver has taken what is handed on: among copies of
    /// them, some were not alike, or could not be compared.
    Doubt(u64),
    /// Nothing more: the leg is closed.
    End,
}

/// Bytes of all taps of a reader so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TapCounts {
    /// Handed on.
    pub bytes: u64,
    /// In gaps.
    pub gaps: u64,
    /// In doubt, more than once if several copies were not alike.
    pub doubts: u64,
}

/// What taps and reader share.
#[derive(Debug)]
struct Shared {
    /// Bytes held or not taken yet, and how many may be.
    used: AtomicUsize,
    most: usize,
    /// Bytes kept for comparison; half of `most` at most.
    kept: AtomicUsize,
    bytes: AtomicU64,
    gaps: AtomicU64,
    doubts: AtomicU64,
}

/// Makes taps for one reader.
#[derive(Clone, Debug)]
pub struct Taps {
    pieces: Sender<Piece>,
    shared: Arc<Shared>,
}

/// Where pieces of all taps arrive.
#[derive(Debug)]
pub struct TapReader {
    pieces: Receiver<Piece>,
    shared: Arc<Shared>,
}

/// To be given to a leg ([`Leg::tap`](crate::Leg::tap)).
pub struct Tap {
    pub(crate) state: Arc<Mutex<State>>,
}

impl Taps {
    /// Taps, and their reader, which may leave at most `most` bytes untaken, those that are held out of order among them.
    pub fn new(most: usize) -> (Taps, TapReader) {
        let (tx, pieces) = channel();
        let counts = AtomicU64::default;
        let (used, kept) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let shared = Arc::new(Shared { used, most, kept, bytes: counts(), gaps: counts(), doubts: counts() });
        (Taps { pieces: tx, shared: shared.clone() }, TapReader { pieces, shared })
    }

    /// A tap for one leg. Its number comes with its pieces.
    pub fn tap(&self, id: u64) -> Tap {
        let stream = |way| Stream::new(id, way, self.clone());
        let streams = [stream(TapDirection::FromHost), stream(TapDirection::ToHost)];
        Tap { state: Arc::new(Mutex::new(State { streams, open: 0, left: false })) }
    }

    /// What has come so far.
    pub fn counts(&self) -> TapCounts {
        let [bytes, gaps, doubts] =
            [&self.shared.bytes, &self.shared.gaps, &self.shared.doubts].map(|n| n.load(Relaxed));
        TapCounts { bytes, gaps, doubts }
    }
}

impl TapReader {
    /// The next piece; `None`: all taps are gone, and whatever makes them.
    pub fn next(&self) -> Option<Piece> {
        self.take(self.pieces.recv().ok()?)
    }

    /// The same, at most so long: `Err` if nothing has come.
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

impl Shared {
    /// False: no room.
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
    /// Streams begin here.
    pub(crate) fn begin(&self, at: [u64; 2]) {
        let mut state = lock(&self.state);
        state.streams.iter_mut().zip(at).for_each(|(s, at)| s.next = at);
    }

    /// Bytes that control mode has read or written, at this position.
    pub(crate) fn passed(&self, way: TapDirection, at: u64, bytes: &[u8]) {
        lock(&self.state).streams[way as usize].put(at, Bytes::copy_from_slice(bytes), true);
    }
}

impl Drop for Tap {
    /// The leg is closed. What is still in the ring is waited for.
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        state.left = true;
        state.end();
    }
}

/// Both streams of a tap.
pub(crate) struct State {
    streams: [Stream; 2],
    /// Stretches of which the ring may still hold something.
    open: u32,
    /// The leg is closed.
    left: bool,
}

impl State {
    pub fn stream(&mut self, way: TapDirection) -> &mut Stream {
        &mut self.streams[way as usize]
    }

    pub fn begin(&mut self) {
        self.open += 1;
    }

    /// One of the stretches has nothing in the ring any more.
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

/// One stream, put in order.
pub(crate) struct Stream {
    id: u64,
    way: TapDirection,
    out: Taps,
    /// All below was handed on, or is a gap.
    next: u64,
    /// From here on to `next` is a gap that was not told yet.
    lost: Option<u64>,
    /// Beyond `next`, by position; may overlap.
    held: BTreeMap<u64, Held>,
    /// Bytes of those that are not sure, and the longest of all.
    size: usize,
    longest: u64,
    /// Copies below `next`, for comparison, in order and without overlap; how many bytes.
    kept: VecDeque<(u64, Bytes)>,
    kept_size: usize,
    /// The receiver has acknowledged all below.
    acked: u64,
    /// From here to there are bytes in doubt that were not told yet.
    doubt: Option<(u64, u64)>,
}

struct Held {
    bytes: Bytes,
    /// They come once.
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

    /// So far it is known.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Bytes at a position. `sure`: they come once, from control mode; others may come again, if there is no room for them.
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

    /// The receiver has all below this position.
    pub fn acknowledged(&mut self, to: u64) {
        self.acked = self.acked.max(to);
        while self.kept.front().is_some_and(|(at, bytes)| at + bytes.len() as u64 + BEHIND <= self.acked) {
            self.unkeep();
        }
    }

    /// With what is known of the same bytes.
    fn compare(&mut self, at: u64, bytes: &[u8]) {
        let end = at + bytes.len() as u64;
        // a keep-alive may bring one byte of garbage, which nobody takes (RFC 9293, 3.8.4)
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

    /// What was handed on just now, for comparison.
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

    /// No copies come any more.
    fn forget(&mut self) {
        while self.unkeep().is_some() {}
    }

    /// After this, bytes that are `sure` are held, or `next` is where they begin at least.
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
                // The reader is far behind: what is missing is waited for no longer.
                None if sure => self.give_up(self.held.first_key_value().map_or(at, |(k, _)| *k).min(at)),
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

    /// What is missing below this position will not come any more.
    pub fn give_up(&mut self, to: u64) {
        while self.next < to {
            let hole = self.held.first_key_value().map_or(to, |(at, _)| *at).min(to);
            self.skip(hole - self.next);
            self.take_held();
        }
    }

    fn skip(&mut self, n: u64) {
        self.lost.get_or_insert(self.next);
        self.out.shared.gaps.fetch_add(n, Relaxed);
        self.next += n;
    }

    /// Hands bytes on that begin at `next`.
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

    /// And doubts: no more often than bytes, however many copies differ.
    fn tell_gap(&mut self) {
        if let Some(from) = self.lost.take() {
            self.tell(from, PieceKind::Gap(self.next - from));
        }
        if let Some((from, to)) = self.doubt.take() {
            self.tell(from, PieceKind::Doubt(to - from));
        }
    }

    fn tell(&self, at: u64, what: PieceKind) {
        // a reader that has gone away wants nothing any more
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

/// Two pieces of one stream: from where to where are they not alike?
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
