//! The hold policy: segments that arrive while a splice drains wait here unchanged, and are
//! sent on when the drain is over or was taken back. The data path limits how much may wait.

use longsplice_datapath::{Datapath, HeldSegment, Pair, Reinjector, Tuple};
use std::collections::HashMap;

/// Who holds segments: of two that hold those of one leg, perhaps for two connections with the same addresses, the later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hold(u64);

#[derive(Default)]
pub(crate) struct Holder {
    reinjector: Option<Reinjector>,
    /// Held segments by the leg on which they arrived, in order. Segments of other legs are late and do not wait.
    of: HashMap<Tuple, (Hold, Vec<HeldSegment>)>,
    /// Number of holds so far.
    holds: u64,
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
    pub fn begin(&mut self, legs: Pair<Tuple>) -> Hold {
        self.holds += 1;
        let hold = Hold(self.holds);
        for leg in legs {
            self.of.entry(leg).or_insert_with(|| (hold, Vec::new())).0 = hold; // keeps what is held already
        }
        hold
    }

    /// Returns whether what arrives on a leg is held by this one.
    pub fn has(&self, leg: &Tuple, hold: Hold) -> bool {
        self.of.get(leg).is_some_and(|(by, _)| *by == hold)
    }

    /// Takes a segment that the data path holds.
    pub fn came(&mut self, d: &Datapath, held: HeldSegment) {
        match self.of.get_mut(&held.leg) {
            Some((_, waiting)) => waiting.push(held),
            None => self.send(d, &held),
        }
    }

    /// Sends on what is held of a leg, and what still arrives, unless another one holds it by now.
    pub fn let_go(&mut self, d: &Datapath, leg: &Tuple, hold: Hold) {
        for held in self.take(leg, hold) {
            self.send(d, &held);
        }
    }

    fn take(&mut self, leg: &Tuple, hold: Hold) -> Vec<HeldSegment> {
        if !self.has(leg, hold) {
            return Vec::new();
        }
        self.of.remove(leg).map(|(_, held)| held).unwrap_or_default()
    }

    fn send(&mut self, d: &Datapath, held: &HeldSegment) {
        let Some(reinjector) = &mut self.reinjector else { return };
        if let Err(error) = d.reinject(reinjector, held) {
            tracing::debug!(leg = ?held.leg, %error, "what was held is lost, and will be sent again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client may use its port again before the flow of its last connection has ended.
    #[test]
    fn what_is_held_for_the_next_connection_stays() {
        let leg = |port| Tuple { remote: ([192, 0, 2, 1], port).into(), local: ([192, 0, 2, 2], 80).into() };
        let legs = Pair::new(leg(1), leg(2));
        let mut holder = Holder::default();
        let [first, next] = [(); 2].map(|()| holder.begin(legs));
        holder.take(&legs.client, first);
        assert!(holder.has(&legs.client, next) && !holder.has(&legs.client, first));
        holder.take(&legs.client, next);
        assert!(!holder.has(&legs.client, next) && holder.has(&legs.server, next));
    }
}
