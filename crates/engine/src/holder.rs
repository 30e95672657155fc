//! The hold policy: segments that arrive while a splice drains wait here unchanged, and are
//! sent on when the drain is over or was taken back. The data path limits how much may wait.

use longsplice_datapath::{Datapath, HeldSegment, Pair, Reinjector, Tuple};
use std::collections::HashMap;

#[derive(Default)]
pub(crate) struct Holder {
    reinjector: Option<Reinjector>,
    /// Held segments by the leg on which they arrived, in order. Segments of other legs are late and do not wait.
    of: HashMap<Tuple, Vec<HeldSegment>>,
}

impl Holder {
    /// Returns whether a thread reads what is held, and it can be sent on.
    pub fn is_open(&self) -> bool {
        self.reinjector.is_some()
    }

    /// From now on, a thread reads what is held, and `reinjector` sends it on.
    pub fn open(&mut self, reinjector: Reinjector) {
        self.reinjector = Some(reinjector);
    }

    /// Starts to hold the segments that arrive on two legs.
    pub fn begin(&mut self, legs: Pair<Tuple>) {
        for leg in legs {
            self.of.entry(leg).or_default(); // keeps what is held already
        }
    }

    /// Takes a segment that the data path holds.
    pub fn came(&mut self, d: &Datapath, held: HeldSegment) {
        match self.of.get_mut(&held.leg) {
            Some(waiting) => waiting.push(held),
            None => self.send(d, &held),
        }
    }

    /// Sends on what is held of a leg, and what still arrives.
    pub fn let_go(&mut self, d: &Datapath, leg: &Tuple) {
        for held in self.of.remove(leg).unwrap_or_default() {
            self.send(d, &held);
        }
    }

    fn send(&mut self, d: &Datapath, held: &HeldSegment) {
        let Some(reinjector) = &mut self.reinjector else { return };
        if let Err(error) = d.reinject(reinjector, held) {
            tracing::debug!(leg = ?held.leg, %error, "what was held is lost, and will be sent again");
        }
    }
}
