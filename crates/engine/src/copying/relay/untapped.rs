//! Takes the place of tapped.rs without the feature `taps`: no leg is tapped.

use super::Relay;
use crate::taps::TapRing;
use longsplice_datapath::{Commit, FreezeOptions, Frozen, Half, Pair, Side, SwitchError, Switched};

impl Relay {
    pub(super) fn freeze_both(&self, halves: Pair<&Half>, how: FreezeOptions) -> Result<Frozen, SwitchError> {
        self.datapath().freeze(halves, how)
    }

    pub(super) fn commit_both(&self, at: &Switched, most: Pair<u32>) -> Result<Commit, SwitchError> {
        self.commit_untapped(at, most)
    }

    pub(super) fn end_stretch(&self, _from: Side, _end: Option<u64>) {
        let TapRing {} = self.engine.tap_ring; // nothing has begun
    }
}
