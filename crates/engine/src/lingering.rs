//! Entries of flows that have ended. They go on answering retransmissions for a while, as TIME-WAIT does, unless a new
//! connection needs the port, or there are too many of them.

use crate::splicer::lock;
use longsplice_datapath::Tuple;
use std::{
    collections::{BTreeMap, HashMap},
    sync::Mutex,
    time::{Duration, Instant},
};

/// How long (2 MSL as Linux has it).
pub(crate) const LINGER: Duration = Duration::from_secs(60);
/// After so long a port may be used for a new connection to the same server (RFC 6191; Linux's tcp_tw_reuse): what hosts
/// had to send again has mostly come, and they tell old segments from new ones by timestamps and sequence numbers.
const REUSE: Duration = Duration::from_secs(1);

/// Legs of one flow, or of none.
type Legs = (Tuple, Option<Tuple>);

/// Flows that have ended, in that order.
#[derive(Debug)]
pub(crate) struct Lingering {
    /// So many at most: with more, the oldest go, so that the table has room for those that live.
    most: usize,
    ended: Mutex<Ended>,
}

#[derive(Debug, Default)]
struct Ended {
    next: u64,
    flows: BTreeMap<u64, (Instant, Legs)>,
    /// Which flow a leg belonged to. One that is used for a new connection belongs to none.
    of: HashMap<Tuple, u64>,
}

impl Lingering {
    pub fn new(most: usize) -> Lingering {
        Lingering { most, ended: Mutex::default() }
    }

    /// From now on.
    pub fn add(&self, leg: Tuple, other: Option<Tuple>) {
        self.add_since(Instant::now(), leg, other);
    }

    /// One that ended at `since`, which is not before that of any other.
    pub fn add_since(&self, since: Instant, leg: Tuple, other: Option<Tuple>) {
        let mut ended = lock(&self.ended);
        let n = ended.next;
        ended.next += 1;
        ended.flows.insert(n, (since, (leg, other)));
        ended.of.extend([Some(leg), other].into_iter().flatten().map(|leg| (leg, n)));
    }

    /// The leg is used for a new connection: what is known of it is not ours to remove any more.
    pub fn begins_anew(&self, leg: &Tuple) {
        lock(&self.ended).of.remove(leg);
    }

    /// The legs to be removed so that this one can be used for a new connection, if it may.
    pub fn make_way(&self, leg: &Tuple) -> Option<Legs> {
        let mut ended = lock(&self.ended);
        let n = *ended.of.get(leg)?;
        let since = ended.flows.get(&n)?.0;
        if since.elapsed() < REUSE {
            return None;
        }
        ended.take(n)
    }

    /// The next whose time is over at `now`, to be removed.
    pub fn next_over(&self, now: Instant) -> Option<Legs> {
        let mut ended = lock(&self.ended);
        while let Some((n, (since, _))) = ended.flows.first_key_value().map(|(n, f)| (*n, *f)) {
            if ended.flows.len() <= self.most && now < since + LINGER {
                return None;
            }
            if let Some(legs) = ended.take(n) {
                return Some(legs);
            }
        }
        if ended.flows.is_empty() && ended.of.capacity() > 0 {
            ended.of = HashMap::new(); // a million that ended at once are memory
        }
        None
    }
}

impl Ended {
    /// A flow's legs, without those that are used anew.
    fn take(&mut self, n: u64) -> Option<Legs> {
        let (_, (a, b)) = self.flows.remove(&n)?;
        let mut still = [Some(a), b].into_iter().flatten().filter(|leg| {
            let is = self.of.get(leg) == Some(&n);
            if is {
                self.of.remove(leg);
            }
            is
        });
        Some((still.next()?, still.next()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leg(port: u16) -> Tuple {
        Tuple { remote: ([192, 0, 2, 1], 80).into(), local: ([192, 0, 2, 2], port).into() }
    }

    #[test]
    fn the_oldest_go_when_there_are_too_many() {
        let l = Lingering::new(2);
        let now = Instant::now();
        (0..2).for_each(|n| l.add(leg(n), Some(leg(100 + n))));
        assert_eq!(l.next_over(now), None);
        l.add(leg(2), None);
        assert_eq!(l.next_over(now), Some((leg(0), Some(leg(100)))));
        assert_eq!(l.next_over(now), None);
        let later = Instant::now() + LINGER;
        assert_eq!(l.next_over(later), Some((leg(1), Some(leg(101)))));
        assert_eq!(l.next_over(later), Some((leg(2), None)));
        assert_eq!((l.next_over(later), lock(&l.ended).of.capacity()), (None, 0));
    }

    #[test]
    fn what_has_lingered_lingers_on() {
        let l = Lingering::new(9);
        let (now, half) = (Instant::now(), LINGER / 2);
        l.add_since(now.checked_sub(half).unwrap(), leg(0), None);
        l.add_since(now, leg(1), None);
        assert_eq!(l.next_over(now), None);
        assert_eq!(l.next_over(now + half), Some((leg(0), None)));
        assert_eq!(l.next_over(now + half), None);
        assert_eq!(l.next_over(now + LINGER), Some((leg(1), None)));
    }

    #[test]
    fn what_is_used_anew_is_left_alone() {
        let l = Lingering::new(2);
        l.add(leg(0), Some(leg(100)));
        assert_eq!(l.make_way(&leg(0)), None, "too early");
        l.begins_anew(&leg(0));
        assert_eq!(l.make_way(&leg(0)), None);
        l.add(leg(0), Some(leg(101))); // the new connection has ended as well
        let later = Instant::now() + LINGER;
        assert_eq!(l.next_over(later), Some((leg(100), None)));
        assert_eq!(l.next_over(later), Some((leg(0), Some(leg(101)))));
        assert_eq!(l.next_over(later), None);
    }
}
