//! Entries of flows that have ended. They answer retransmissions for a while, like
//! TIME-WAIT, unless a new connection needs the port, or there are too many of them.

use crate::sync::lock;
use longsplice_datapath::{Connection, Tuple};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Mutex,
    time::{Duration, Instant},
};

/// Lifetime of the entries (2 MSL as Linux defines it).
pub(crate) const LINGER: Duration = Duration::from_secs(60);
/// Time after which a port may be used for a new connection to the same server (RFC 6191; Linux's tcp_tw_reuse). By then
/// most retransmissions have arrived, and hosts tell old segments from new ones by timestamps and sequence numbers.
const REUSE: Duration = Duration::from_secs(1);

/// Flows that have ended take at most one part in this many of the table.
const SHARE: usize = 4;
/// Flows that have ended take at most one part in this many of the room that live flows leave.
const FREE_SHARE: usize = 2;
/// Flows that have ended are removed at once, without waiting for the next
/// look, if they exceed their share by one part in this many of the table.
const CROWD: usize = 64;

/// The legs of one flow, or a single leg without a flow.
type Legs = (Connection, Option<Connection>);

/// Flows that have ended, in the order of their ends.
#[derive(Debug)]
pub(crate) struct Lingering {
    /// Number of flows for which the table has room. Live flows come first:
    /// the fuller the table is, the sooner the oldest of the others are removed.
    room: usize,
    ended: Mutex<Ended>,
}

#[derive(Debug, Default)]
struct Ended {
    next: u64,
    flows: BTreeMap<u64, (Instant, Legs)>,
    /// The flow to which a leg belonged last, and its generation then. A leg that is used for a new connection belongs to none.
    of: HashMap<Tuple, (u64, u32)>,
}

impl Lingering {
    pub fn new(room: usize) -> Lingering {
        Lingering { room, ended: Mutex::default() }
    }

    /// Returns the maximum number of lingering flows beside `live` live ones.
    fn most(&self, live: usize) -> usize {
        (self.room / SHARE).min(self.room.saturating_sub(live) / FREE_SHARE)
    }

    /// Returns whether there are so many lingering flows that new connections need their room now.
    pub fn is_crowd(&self, live: usize) -> bool {
        lock(&self.ended).flows.len() > self.most(live) + self.room / CROWD
    }

    /// Adds legs that have ended now.
    pub fn add(&self, leg: Connection, other: Option<Connection>) {
        self.add_since(Instant::now(), leg, other);
    }

    /// Adds legs that ended at `since`, which must not be before the end of any other.
    pub fn add_since(&self, since: Instant, leg: Connection, other: Option<Connection>) {
        let mut ended = lock(&self.ended);
        let n = ended.next;
        ended.next += 1;
        ended.flows.insert(n, (since, (leg, other)));
        let legs = [Some(leg), other].into_iter().flatten();
        for Connection { leg, generation } in legs.filter(|c| c.generation != Connection::NONE) {
            // The host may have come again from its port, and that connection may have ended first: the entry is its own.
            if ended.of.get(&leg).is_none_or(|(_, present)| !is_later(*present, generation)) {
                ended.of.insert(leg, (n, generation));
            }
        }
    }

    /// Whether this connection lingers.
    pub fn has(&self, connection: &Connection) -> bool {
        let generation = lock(&self.ended).of.get(&connection.leg).map(|(_, generation)| *generation);
        generation == Some(connection.generation)
    }

    /// Removes a leg that is used for a new connection: its entries now belong to that.
    pub fn begins_anew(&self, leg: &Tuple) {
        lock(&self.ended).of.remove(leg);
    }

    /// Takes the legs that must be removed before this leg can be used for a new connection. `None` if it may not be used.
    pub fn make_way(&self, leg: &Tuple) -> Option<Legs> {
        self.make_way_after(leg, REUSE)
    }

    /// The same for a connection whose host has chosen the port: it may use it again at once, as with any other peer.
    pub fn make_way_at_once(&self, leg: &Tuple) -> Option<Legs> {
        self.make_way_after(leg, Duration::ZERO)
    }

    fn make_way_after(&self, leg: &Tuple, rest: Duration) -> Option<Legs> {
        let mut ended = lock(&self.ended);
        let (n, _) = *ended.of.get(leg)?;
        let since = ended.flows.get(&n)?.0;
        if since.elapsed() < rest {
            return None;
        }
        ended.take(n)
    }

    /// Takes the next flows to be removed at `now`, beside `live` live flows, at most `most`.
    pub fn over(&self, now: Instant, live: usize, most: usize) -> Vec<Legs> {
        std::iter::from_fn(|| self.next_over(now, live)).take(most).collect()
    }

    /// Takes the next legs to be removed.
    fn next_over(&self, now: Instant, live: usize) -> Option<Legs> {
        let mut ended = lock(&self.ended);
        while let Some((n, (since, _))) = ended.flows.first_key_value().map(|(n, f)| (*n, *f)) {
            if ended.flows.len() <= self.most(live) && now < since + LINGER {
                return None;
            }
            if let Some(legs) = ended.take(n) {
                return Some(legs);
            }
        }
        if ended.flows.is_empty() && ended.of.capacity() > 0 {
            ended.of = HashMap::new(); // a million that ended at once take memory
        }
        None
    }
}

/// Returns whether a generation is later than another one of the same leg: both are times, modulo half an hour (bpf/table.h).
fn is_later(one: u32, other: u32) -> bool {
    one.wrapping_sub(other) as i32 > 0
}

impl Ended {
    /// Takes a flow's legs, except those that are used for a new connection.
    fn take(&mut self, n: u64) -> Option<Legs> {
        let (_, (a, b)) = self.flows.remove(&n)?;
        let mut still = [Some(a), b].into_iter().flatten().filter(|leg| {
            let is = self.of.get(&leg.leg).is_some_and(|(of, _)| *of == n);
            if is {
                self.of.remove(&leg.leg);
            }
            is
        });
        Some((still.next()?, still.next()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leg(port: u16) -> Connection {
        let leg = Tuple { remote: ([192, 0, 2, 1], 80).into(), local: ([192, 0, 2, 2], port).into() };
        Connection { leg, generation: 1 }
    }

    #[test]
    fn the_oldest_go_when_there_are_too_many() {
        let l = Lingering::new(8);
        let now = Instant::now();
        (0..2).for_each(|n| l.add(leg(n), Some(leg(100 + n))));
        assert_eq!(l.next_over(now, 0), None);
        l.add(leg(2), None);
        assert_eq!(l.next_over(now, 0), Some((leg(0), Some(leg(100)))));
        assert_eq!(l.next_over(now, 0), None);
        let later = Instant::now() + LINGER;
        assert_eq!(l.next_over(later, 0), Some((leg(1), Some(leg(101)))));
        assert_eq!(l.next_over(later, 0), Some((leg(2), None)));
        assert_eq!((l.next_over(later, 0), lock(&l.ended).of.capacity()), (None, 0));
    }

    #[test]
    fn those_that_live_have_the_right_of_way() {
        let (l, now) = (Lingering::new(64), Instant::now());
        (0..16).for_each(|n| l.add(leg(n), None));
        assert_eq!((l.next_over(now, 32), l.is_crowd(33)), (None, false), "a quarter of all, half of what is free");
        assert!(l.is_crowd(40));
        let gone = |live| std::iter::from_fn(|| l.next_over(now, live)).count();
        assert_eq!([gone(40), gone(60), gone(64), gone(1000)], [4, 10, 2, 0]);
    }

    #[test]
    fn what_has_lingered_lingers_on() {
        let l = Lingering::new(36);
        let (now, half) = (Instant::now(), LINGER / 2);
        l.add_since(now.checked_sub(half).unwrap(), leg(0), None);
        l.add_since(now, leg(1), None);
        assert_eq!(l.next_over(now, 0), None);
        assert_eq!(l.next_over(now + half, 0), Some((leg(0), None)));
        assert_eq!(l.next_over(now + half, 0), None);
        assert_eq!(l.next_over(now + LINGER, 0), Some((leg(1), None)));
    }

    /// Otherwise nobody would remove the entry of the client's later connection.
    #[test]
    fn a_flow_that_ends_late_takes_no_leg_from_a_later_connection() {
        for first in [5, u32::MAX - 4] {
            let l = Lingering::new(8);
            let of = |port, generation| Connection { generation, ..leg(port) };
            let (earlier, later) = (of(0, first), of(0, first.wrapping_add(8)));
            l.add(later, Some(leg(101)));
            l.add(earlier, Some(leg(100)));
            let now = Instant::now() + LINGER;
            assert_eq!(l.next_over(now, 0), Some((later, Some(leg(101)))));
            assert_eq!(l.next_over(now, 0), Some((leg(100), None)));
            assert_eq!(l.next_over(now, 0), None);
        }
    }

    #[test]
    fn what_is_used_anew_is_left_alone() {
        let l = Lingering::new(8);
        l.add(leg(0), Some(leg(100)));
        assert_eq!(l.make_way(&leg(0).leg), None, "too early");
        assert_eq!(l.make_way_at_once(&leg(0).leg), Some((leg(0), Some(leg(100)))));
        l.add(leg(0), Some(leg(100)));
        l.begins_anew(&leg(0).leg);
        assert_eq!(l.make_way(&leg(0).leg), None);
        l.add(leg(0), Some(leg(101))); // the new connection has ended, too
        let later = Instant::now() + LINGER;
        assert_eq!(l.next_over(later, 0), Some((leg(100), None)));
        assert_eq!(l.next_over(later, 0), Some((leg(0), Some(leg(101)))));
        assert_eq!(l.next_over(later, 0), None);
    }
}
