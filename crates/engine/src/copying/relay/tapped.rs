//! Splices of tapped legs: where the copies of forwarded data begin and end.

use super::Relay;
use crate::{copying::tap_reader, sync::lock, taps::Begin};
use longsplice_datapath::{Commit, FreezeOptions, Frozen, Half, Pair, Side, SwitchError, Switched};

impl Relay {
    /// Freezes both directions. Holds the lock of the stretches meanwhile, because
    /// the reader of copies must know where they belong before it sees the first.
    pub(super) fn freeze_both(&self, halves: Pair<&Half>, how: FreezeOptions) -> Result<Frozen, SwitchError> {
        let (d, legs) = (self.datapath(), halves.map(|half| half.leg));
        if !self.is_tapped() {
            return d.freeze(halves, how);
        }
        // the first copies come as soon as the legs are frozen
        tap_reader::start(&self.engine);
        let mut stretches = lock(&self.engine.tap_ring.stretches);
        // Sequence numbers wrap: copies of a long stretch must be read before they could be taken for the next one's.
        if !legs.iter().all(|leg| stretches.may_begin(leg)) {
            return Err(SwitchError::Busy);
        }
        let frozen = d.freeze(halves, FreezeOptions { tap: true, ..how })?;
        let taps = self.legs.each_ref().map(|leg| leg.tap.as_ref());
        for from in Side::BOTH {
            let (start, seq) = (frozen.bound[from], frozen.seq[from]);
            // bytes in hand and in the socket reach the receiver before those from the bound on
            let left = u64::from(halves[from].leftover) + u64::from(frozen.pending[from]);
            let out = halves[from.other()].produced + left;
            stretches.begin(&Begin { legs, from, start, seq, out, taps });
        }
        Ok(frozen)
    }

    /// Commits both directions, and holds the lock of the stretches meanwhile.
    pub(super) fn commit_both(&self, at: &Switched, most: Pair<u32>) -> Result<Commit, SwitchError> {
        let mut stretches = self.is_tapped().then(|| lock(&self.engine.tap_ring.stretches));
        let tried = self.commit_untapped(at, most)?;
        if let (Some(stretches), Commit::Done(at)) = (&mut stretches, &tried) {
            self.tuples().iter().zip(at.origin).for_each(|(leg, origin)| stretches.committed(leg, origin));
        }
        Ok(tried)
    }

    /// Ends the spliced stretch of bytes from this host for taps: from
    /// `end` on, they get bytes from control mode again. See `Stretches::end`.
    pub(super) fn end_stretch(&self, from: Side, end: Option<u64>) {
        if self.is_tapped() {
            lock(&self.engine.tap_ring.stretches).end(&self.tuples()[from], end);
        }
    }
}
