//! What the keeper has to do, and when: looks at flows, and releases. Each has a queue of its own. Looks may wait, for there is a
//! limit to their number; a release that waited would keep two descriptors.

use crate::core::Time;
use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap},
};

#[derive(Debug, Default)]
pub(crate) struct Agenda {
    /// By the time of the next look. Entries of flows that have left stay until then.
    looks: BinaryHeap<Reverse<(Time, u64)>>,
    /// Flows with parked sockets, by the time of their release.
    releases: BTreeSet<(Time, u64)>,
}

impl Agenda {
    /// So many looks are to come.
    pub fn looks(&self) -> usize {
        self.looks.len()
    }

    pub fn look(&mut self, at: Time, id: u64) {
        self.looks.push(Reverse((at, id)));
    }

    pub fn release(&mut self, at: Time, id: u64) {
        self.releases.insert((at, id));
    }

    /// The flow has left, or its sockets have gone some other way.
    pub fn cancel_release(&mut self, at: Time, id: u64) {
        self.releases.remove(&(at, id));
    }

    /// When the next look is due, and the next release.
    pub fn due(&self) -> [Option<Time>; 2] {
        [self.looks.peek().map(|Reverse((at, _))| *at), self.releases.first().map(|(at, _)| *at)]
    }

    /// The next look that is due at `now`: when it was to be, and at which flow.
    pub fn next_look(&mut self, now: Time) -> Option<(Time, u64)> {
        self.due()[0].filter(|at| *at <= now)?;
        self.looks.pop().map(|Reverse(look)| look)
    }

    /// The next flow whose release is due at `now`.
    pub fn next_release(&mut self, now: Time) -> Option<u64> {
        self.due()[1].filter(|at| *at <= now)?;
        self.soonest_release()
    }

    /// The next flow to be released, due or not.
    pub fn soonest_release(&mut self) -> Option<u64> {
        self.releases.pop_first().map(|(_, id)| id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn no_look_delays_a_release() {
        let (mut agenda, now) = (Agenda::default(), Time::from_secs(100));
        (0..100_000).for_each(|id| agenda.look(now, id));
        agenda.release(now + SECOND, 7);
        agenda.release(now + 3 * SECOND, 8);
        assert_eq!(agenda.due(), [Some(now), Some(now + SECOND)]);
        assert_eq!(agenda.next_release(now), None);
        let later = now + 2 * SECOND;
        assert_eq!(agenda.next_release(later), Some(7));
        assert_eq!(agenda.next_release(later), None);
        assert_eq!(agenda.looks(), 100_000);
        assert_eq!(agenda.next_look(later).map(|(at, _)| at), Some(now));
    }

    #[test]
    fn when_room_is_needed_the_next_go_first() {
        let (mut agenda, now) = (Agenda::default(), Time::from_secs(100));
        for id in 1..5 {
            agenda.release(now + SECOND / id, id.into());
        }
        agenda.cancel_release(now + SECOND / 3, 3);
        let order: Vec<_> = std::iter::from_fn(|| agenda.soonest_release()).collect();
        assert_eq!(order, [4, 2, 1]);
    }
}
