//! Distributes records from the ring of copies to the streams of taps: finds
//! the splice to which a record belongs, and the stream position of its bytes.
//!
//! A stretch is one direction of one splice, from the bound of the freeze to the bound of the unsplice. The bytes
//! below and above it come from control mode. After its end, a stretch stays until the receiver has acknowledged all
//! of it and the ring has been empty since. By then control mode may be far ahead of the ring, and its bytes are held.

use super::tap::{Tap, TapDirection, TapState};
use crate::sync::lock;
use bytes::Bytes;
use longsplice_datapath::{Datapath, Pair, Phase, Side, TapPosition, TapRecord, Tuple};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, OnceLock},
    time::{Duration, Instant},
};

/// Interval between looks at stretches that have ended. The ring was empty at least once between two looks.
const LOOK: Duration = Duration::from_millis(20);
/// Length from which a stretch is settled before the next one of its leg begins, because sequence numbers wrap around.
const LONG: u64 = 1 << 31;

/// A stream that gets the bytes of a stretch.
struct Target {
    state: Arc<Mutex<TapState>>,
    way: TapDirection,
    /// Offset from positions of the sender to positions of this stream, wrapping.
    shift: u64,
}

struct Stretch {
    /// Start in positions of the sender.
    start: u64,
    end: Option<u64>,
    /// Sequence number at the start.
    seq: u32,
    /// Offset of extended sequence numbers, which copies carry from the commit on.
    origin: Option<u64>,
    /// Highest position up to which bytes were copied.
    seen: u64,
    targets: Vec<Target>,
    /// Both legs, and the sender.
    legs: Pair<Tuple>,
    from: Side,
    /// At the last look, everything was acknowledged.
    quiet: bool,
}

impl Stretch {
    /// Returns the stream position of a copy, if it is one of this stretch. `None` if it lies before
    /// the beginning of the stream, which no honest sender produces.
    fn position(&self, at: TapPosition) -> Option<u64> {
        let at = match at {
            TapPosition::Stream(at) => at,
            TapPosition::Extended(at) => self.origin?.wrapping_add(at),
            TapPosition::Low(seq) => self.start.wrapping_add_signed(i64::from(seq.wrapping_sub(self.seq) as i32)),
        };
        (at <= i64::MAX as u64).then_some(at)
    }

    /// Passes bytes at a position to the taps, and up to where the receiver has acknowledged.
    fn put(&mut self, at: u64, acked: u64, bytes: &[u8]) {
        let end = (at + bytes.len() as u64).min(self.end.unwrap_or(u64::MAX));
        let from = at.max(self.start);
        self.seen = self.seen.max(end);
        let sure = acked.min(self.seen);
        let bytes = (from < end).then(|| Bytes::copy_from_slice(&bytes[(from - at) as usize..(end - at) as usize]));
        for t in &self.targets {
            let mut state = lock(&t.state);
            let stream = state.stream(t.way);
            if let Some(bytes) = &bytes {
                stream.put(from.wrapping_add(t.shift), bytes.clone(), false);
            }
            if sure > self.start {
                stream.acknowledged(sure.wrapping_add(t.shift));
            }
            // missing bytes below the start come from control mode, perhaps just now
            if sure > self.start && stream.next() >= self.start.wrapping_add(t.shift) {
                report(t, stream.give_up(sure.wrapping_add(t.shift)), "acknowledged");
            }
        }
    }

    /// Returns whether all bytes of the stretch have arrived.
    fn is_complete(&self) -> bool {
        let known = |t: &Target, end: u64| lock(&t.state).stream(t.way).next() >= end.wrapping_add(t.shift);
        self.end.is_some_and(|end| end == self.start || self.targets.iter().all(|t| known(t, end)))
    }

    fn settle(&self) {
        let end = self.end.unwrap_or(self.seen);
        for t in &self.targets {
            let mut state = lock(&t.state);
            // below a stretch without bytes, control mode may still have to read (`Limit::Keep`)
            if end > self.start {
                report(t, state.stream(t.way).give_up(end.wrapping_add(t.shift)), "settled");
            }
            state.settled();
        }
    }
}

/// Logs that forwarded bytes were not copied.
fn report(to: &Target, missing: u64, because: &str) {
    if missing > 0 {
        tracing::debug!(way = ?to.way, missing, because, "forwarded bytes are missing for a tap");
    }
}

/// One direction of a splice that begins.
pub(crate) struct Begin<'a> {
    pub legs: Pair<Tuple>,
    /// The sender.
    pub from: Side,
    /// Position of the bound in the sender's stream, and its sequence number.
    pub start: u64,
    pub seq: u32,
    /// The same position in the stream to the receiver.
    pub out: u64,
    /// Taps of the legs.
    pub taps: Pair<Option<&'a Tap>>,
}

/// What this process knows of the ring of copies.
#[derive(Default)]
pub(crate) struct TapRing {
    pub stretches: Mutex<Stretches>,
    /// Set once a thread reads the ring.
    pub reader: OnceLock<()>,
}

/// All stretches of which the ring may still hold copies, by the leg on which their bytes arrive.
#[derive(Default)]
pub(crate) struct Stretches {
    /// The newest stretch is last.
    of: HashMap<Tuple, VecDeque<Stretch>>,
    /// Legs with stretches that have ended.
    ended: Vec<Tuple>,
    looked: Option<Instant>,
}

impl Stretches {
    /// Returns whether the next stretch of this leg may begin.
    pub fn may_begin(&self, leg: &Tuple) -> bool {
        let last = self.of.get(leg).and_then(VecDeque::back);
        last.is_none_or(|s| s.end.is_some_and(|end| end - s.start < LONG))
    }

    pub fn begin(&mut self, b: &Begin<'_>) {
        let target = |tap: &Tap, way, shift| {
            lock(&tap.state).begin();
            Target { state: tap.state.clone(), way, shift }
        };
        let (sender, receiver) = (b.taps[b.from], b.taps[b.from.other()]);
        let sender = sender.map(|t| target(t, TapDirection::FromHost, 0));
        let receiver = receiver.map(|t| target(t, TapDirection::ToHost, b.out.wrapping_sub(b.start)));
        self.of.entry(b.legs[b.from]).or_default().push_back(Stretch {
            start: b.start,
            end: None,
            seq: b.seq,
            origin: None,
            seen: b.start,
            targets: sender.into_iter().chain(receiver).collect(),
            legs: b.legs,
            from: b.from,
            quiet: false,
        });
    }

    fn open(&mut self, leg: &Tuple) -> Option<&mut Stretch> {
        self.of.get_mut(leg)?.back_mut().filter(|s| s.end.is_none())
    }

    pub fn committed(&mut self, leg: &Tuple, origin: u64) {
        if let Some(s) = self.open(leg) {
            s.origin = Some(origin);
        }
    }

    /// Ends the current stretch of the leg, if there is one: bytes were forwarded
    /// up to `end`. `None`: none were forwarded, or they arrived again.
    pub fn end(&mut self, leg: &Tuple, end: Option<u64>) {
        if let Some(s) = self.open(leg) {
            s.end = Some(end.map_or(s.start, |end| end.max(s.start)));
            self.ended.push(*leg);
        }
    }

    /// Passes a record from the ring to the taps. The ring may be behind: then it belongs to an older stretch, whose extended
    /// sequence numbers have another offset (after 4 GB). So the oldest stretch that has its position takes it.
    pub fn copied(&mut self, c: &TapRecord<'_>) {
        let Some(stretches) = self.of.get_mut(&c.leg) else { return };
        for s in stretches.iter_mut() {
            let Some(at) = s.position(c.at) else { continue };
            let (past, end) = (at + c.bytes.len() as u64, s.end.unwrap_or(u64::MAX));
            if past > s.start && at < end {
                s.put(at, at.saturating_add_signed(c.acked.into()), c.bytes);
                if past <= end {
                    return;
                }
            }
        }
    }

    /// Settles stretches that are over. Called when the ring is empty.
    pub fn look(&mut self, d: &Datapath, now: Instant) {
        if self.ended.is_empty() || self.looked.is_some_and(|t| now - t < LOOK) {
            return;
        }
        self.looked = Some(now);
        for leg in std::mem::take(&mut self.ended) {
            let Some(stretches) = self.of.get_mut(&leg) else { continue };
            stretches.retain_mut(|s| {
                if s.end.is_none() {
                    return true;
                }
                if s.quiet || s.is_complete() {
                    s.settle();
                    return false;
                }
                s.quiet = is_acknowledged(d, s);
                true
            });
            if stretches.iter().any(|s| s.end.is_some()) {
                self.ended.push(leg);
            }
            if stretches.is_empty() {
                self.of.remove(&leg);
            }
        }
        self.ended.sort_unstable_by_key(|t| (t.remote, t.local));
        self.ended.dedup();
    }

    /// Settles all stretches. Called when the ring is no longer read.
    pub fn close(&mut self) {
        self.ended.clear();
        self.of.drain().flat_map(|(_, stretches)| stretches).for_each(|s| s.settle());
    }
}

/// Returns whether no forwarded bytes of the stretch are in flight. If the
/// flow has ended together with it, its legs are gone, or have no bound.
fn is_acknowledged(d: &Datapath, s: &Stretch) -> bool {
    d.look(s.legs.each_ref()).map_or(true, |at| at.phase[s.from] != Phase::ToLocal)
}

#[cfg(test)]
mod tests;
