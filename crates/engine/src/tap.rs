//! A tap: a copy of all that passes a leg, each way, in order, for a reader that nothing waits for.
//!
//! What control mode reads and writes is copied by the [`Leg`](crate::Leg); of what is forwarded the data path makes copies
//! (bpf/tap.h), which come through a ring and are put in their place by stream position (`sessions`). What is missing stays
//! open for a retransmission until the other host has acknowledged what is behind it, or until the flow is back in control mode
//! and nothing is on its way any more. Then it is a gap, and the stream goes on behind it.
//!
//! Memory is bounded by the reader's limit: what is held out of order and what it has not taken yet. Beyond that, bytes become gaps.
//! What control mode has passed on comes once, and is held however far the ring is behind; copies come again, and are held up to
//! [`HELD`] for each direction.

use bytes::{Buf, Bytes};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    time::Duration,
};

use crate::splicer::lock;

/// Copies held out of order at most, per direction: a large window, of which one segment was lost.
const HELD: usize = 4 << 20;
/// What a piece costs beside its bytes.
const OVERHEAD: usize = 128;

/// A direction, as the leg sees it that is tapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
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
    pub way: Way,
    /// Position in it, bytes from 0 on at the beginning of the connection. Each piece begins where the last one has ended.
    pub at: u64,
    /// What is there.
    pub what: What,
}

/// What a [`Piece`] is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// Bytes.
    Bytes(Bytes),
    /// So many bytes have passed, and are not known.
    Gap(u64),
    /// Nothing more: the leg is closed.
    End,
}

/// Bytes of all taps of a reader so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TapCounts {
    /// Handed on.
    pub bytes: u64,
    /// In gaps.
    pub gaps: u64,
}

/// What taps and reader share.
#[derive(Debug)]
struct Shared {
    /// Bytes held or not taken yet, and how many may be.
    used: AtomicUsize,
    most: usize,
    bytes: AtomicU64,
    gaps: AtomicU64,
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
        let shared = Arc::new(Shared { used: AtomicUsize::new(0), most, bytes: counts(), gaps: counts() });
        (Taps { pieces: tx, shared: shared.clone() }, TapReader { pieces, shared })
    }

    /// A tap for one leg. Its number comes with its pieces.
    pub fn tap(&self, id: u64) -> Tap {
        let stream = |way| Stream { id, way, out: self.clone(), next: 0, lost: None, held: BTreeMap::new(), size: 0 };
        let streams = [stream(Way::FromHost), stream(Way::ToHost)];
        Tap { state: Arc::new(Mutex::new(State { streams, open: 0, left: false })) }
    }

    /// What has come so far.
    pub fn counts(&self) -> TapCounts {
        TapCounts { bytes: self.shared.bytes.load(Relaxed), gaps: self.shared.gaps.load(Relaxed) }
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
        if let What::Bytes(bytes) = &piece.what {
            self.shared.used.fetch_sub(bytes.len() + OVERHEAD, Relaxed);
        }
        Some(piece)
    }
}

impl Shared {
    /// False: no room.
    fn reserve(&self, size: usize) -> bool {
        let fits = |used: usize| used.checked_add(size).filter(|n| *n <= self.most);
        self.used.fetch_update(Relaxed, Relaxed, fits).is_ok()
    }
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
    pub(crate) fn passed(&self, way: Way, at: u64, bytes: &[u8]) {
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
    /// Sessions of which the ring may still hold something.
    open: u32,
    /// The leg is closed.
    left: bool,
}

impl State {
    pub fn stream(&mut self, way: Way) -> &mut Stream {
        &mut self.streams[way as usize]
    }

    pub fn begin(&mut self) {
        self.open += 1;
    }

    /// One of the sessions has nothing in the ring any more.
    pub fn settled(&mut self) {
        self.open -= 1;
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
    way: Way,
    out: Taps,
    /// All below was handed on, or is a gap.
    next: u64,
    /// From here on to `next` is a gap that was not told yet.
    lost: Option<u64>,
    /// Beyond `next`, by position; may overlap.
    held: BTreeMap<u64, Held>,
    /// Bytes of those that are not sure.
    size: usize,
}

struct Held {
    bytes: Bytes,
    /// They come once.
    sure: bool,
}

impl Stream {
    /// So far it is known.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Bytes at a position. `sure`: they come once, from control mode; others may come again, if there is no room for them.
    pub fn put(&mut self, at: u64, mut bytes: Bytes, sure: bool) {
        if at > self.next {
            self.hold(at, &bytes, sure);
        }
        let end = at + bytes.len() as u64;
        if at <= self.next && end > self.next {
            bytes.advance((self.next - at) as usize);
            self.emit(bytes);
            self.take_held();
        }
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
            let Some(Held { mut bytes, .. }) = self.unhold(at) else { return };
            let known = usize::try_from(self.next - at).unwrap_or(usize::MAX);
            if bytes.len() > known {
                bytes.advance(known);
                self.emit(bytes);
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
    fn emit(&mut self, bytes: Bytes) {
        let n = bytes.len() as u64;
        if !self.out.shared.reserve(bytes.len() + OVERHEAD) {
            return self.skip(n);
        }
        self.tell_gap();
        self.out.shared.bytes.fetch_add(n, Relaxed);
        self.tell(self.next, What::Bytes(bytes));
        self.next += n;
    }

    fn tell_gap(&mut self) {
        if let Some(from) = self.lost.take() {
            self.tell(from, What::Gap(self.next - from));
        }
    }

    fn tell(&self, at: u64, what: What) {
        // a reader that has gone away wants nothing any more
        let _ = self.out.pieces.send(Piece { tap: self.id, way: self.way, at, what });
    }

    fn end(&mut self) {
        while let Some((&at, _)) = self.held.first_key_value() {
            self.give_up(at);
        }
        self.tell_gap();
        self.tell(self.next, What::End);
    }
}

#[cfg(test)]
mod tests;
