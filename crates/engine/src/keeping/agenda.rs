//! The keeper's agenda: looks at flows, and releases, each in its own queue. Looks may wait,
//! because their number is limited; a release that waited would keep two descriptors open.

use crate::core::Time;
use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap},
};

#[derive(Debug, Default)]
pub(crate) struct Agenda {
    /// Looks by time. An entry of a flow that has left stays until its time.
    looks: BinaryHeap<Reverse<(Time, u64)>>,
    /// Releases of flows with parked sockets, by time.
    releases: BTreeSet<(Time, u64)>,
}

impl Agenda {
    /// Returns the number of looks in the queue.
    pub fn looks(&self) -> usize {
        self.looks.len()
    }

    pub fn look(&mut self, at: Time, id: u64) {
        self.looks.push(Reverse((at, id)));
    }

    pub fn release(&mut self, at: Time, id: u64) {
        self.releases.insert((at, id));
    }

    /// Removes a release: the flow has left, or its sockets were closed otherwise.
    pub fn cancel_release(&mut self, at: Time, id: u64) {
        self.releases.remove(&(at, id));
    }

    /// Returns when the next look and the next release are due.
    pub fn due(&self) -> [Option<Time>; 2] {
        [self.looks.peek().map(|Reverse((at, _))| *at), self.releases.first().map(|(at, _)| *at)]
    }

    /// Takes the next look that is due at `now`. Returns its time and its flow.
    pub fn next_look(&mut self, now: Time) -> Option<(Time, u64)> {
        self.due()[0].filter(|at| *at <= now)?;
        self.looks.pop().map(|Reverse(look)| look)
    }

    /// Takes the next release that is due at `now`. Returns its flow.
    pub fn next_release(&mut self, now: Time) -> Option<u64> {
        self.due()[1].filter(|at| *at <= now)?;
        self.soonest_release()
    }

    /// Takes the next release, due or not. Returns its flow.
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
