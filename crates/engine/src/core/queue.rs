//! How long a drain would take, and when that is too long. From the freeze on, the oldest data of a sender is acknowledged when
//! the receiver has taken everything before it: the bytes that wait here, and those that are under way to it. A sender that
//! waits longer than its retransmission timeout (RFC 6298) retransmits in vain, and starts again from one segment.

use longsplice_datapath::{Pair, PathFacts, Side};
use std::time::Duration;

/// Minimum retransmission timeout beyond the round-trip time: TCP_RTO_MIN of Linux. Other systems wait longer.
const TIMEOUT: Duration = Duration::from_millis(200);
/// By how much a drain may exceed a round trip of the receiver's leg in any case.
const SHORT: Duration = Duration::from_millis(5);
/// Paths with shorter round trips are spliced at once. Their queues are short in time unless a host or this machine is slow, and
/// a sender that times out recovers within some round trips.
pub(super) const CLOSE: Duration = Duration::from_millis(10);
/// How much longer a round trip may be for other reasons than a queue: acknowledgements are delayed by up to 40 ms on Linux.
const DELAYED: Duration = Duration::from_millis(50);
/// Smallest window for a sender that is held back, in bytes: ten segments, its initial window (RFC 6928).
const LEAST_WINDOW: u64 = 10 * 1460;

/// The bytes of one direction that a drain would have to pass on: in this process, in both sockets, and on the way.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) struct Queue {
    bytes: u64,
    /// Bytes per second at which the receiver takes them.
    rate: u64,
    /// Bytes wait on the way to the receiver.
    is_queued: bool,
    /// How long it may take.
    allowed: Duration,
    /// Bytes that have arrived, but were not read.
    unread: u64,
    /// Round-trip time of the sender's leg.
    near: Duration,
    /// Smallest number of outstanding bytes with which the receiver takes them at its full rate.
    outstanding: u64,
}

/// How to hold a sender back until its queue is short. Sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Receive window to announce to the sender.
    pub window: u32,
    /// Bytes that the receiver's socket may hold, sent or not, until they are acknowledged.
    pub outstanding: u32,
}

/// Returns whether queues matter on these paths, so that [`PathFacts::unread`] is needed. Not if a path is not measured.
pub fn needs_queues(facts: &Pair<PathFacts>) -> bool {
    facts.client.min_rtt.zip(facts.server.min_rtt).is_some_and(|(client, server)| client + server > CLOSE)
}

impl Queue {
    /// Returns the queue of the direction from `from`'s host. `None` if the hosts are close, or a leg is not measured.
    /// `in_hand`: bytes read but not written. `before`: the queue at the last look, if its sender is held back.
    pub fn of(facts: &Pair<PathFacts>, from: Side, in_hand: u64, before: Option<Queue>) -> Option<Queue> {
        let (sender, receiver) = (&facts[from], &facts[from.other()]);
        let (near, far, shortest) = (sender.rtt?, receiver.rtt?, receiver.min_rtt?);
        if !needs_queues(facts) {
            return None;
        }
        // If a queue on the way makes round trips longer, the receiver takes no more than it has taken lately. Otherwise the
        // congestion window says more: a sender may have paused, and the window may grow, for which it must be used up.
        let is_queued = far > shortest * 3 / 2 + DELAYED || before.is_some_and(|before| before.is_queued);
        let cwnd = if is_queued { 0 } else { u64::from(receiver.cwnd) };
        // while the sender is held back, the receiver may seem slower than it is
        let known = before.filter(|before| before.is_queued == is_queued);
        let possible = (cwnd as f64 / far.as_secs_f64().max(1e-6)) as u64;
        Some(Queue {
            bytes: u64::from(sender.unread) + in_hand + u64::from(receiver.outstanding),
            rate: receiver.rate.max(possible).max(known.map_or(1, |before| before.rate)),
            is_queued,
            allowed: ((TIMEOUT + near) / 2).max(shortest + SHORT),
            unread: sender.unread.into(),
            near,
            outstanding: 2 * cwnd,
        })
    }

    /// Returns how long the receiver takes to acknowledge everything.
    pub fn lasts(&self) -> Duration {
        Duration::from_secs_f64(self.bytes as f64 / self.rate as f64)
    }

    /// Returns how to hold the sender back, if the queue is too long for a freeze.
    pub fn held(&self) -> Option<Held> {
        if self.lasts() <= self.allowed {
            return None;
        }
        let carried = |time: Duration| (self.rate as f64 * time.as_secs_f64()) as u64;
        let part = carried(self.allowed / 8);
        // A window counts from what has arrived, read or not. So the sender has to be slower than the receiver until it is read.
        let window = if self.unread > part { carried(self.near / 2) } else { carried(self.near) + part };
        let size = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
        Some(Held { window: size(window.max(LEAST_WINDOW)), outstanding: size(self.outstanding.max(6 * part)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_may_take_half_of_the_timeout() {
        let ms = |ms| Some(Duration::from_millis(ms));
        let facts = |near, far, unread, outstanding| {
            let server = PathFacts { rtt: ms(near), min_rtt: ms(near), unread, ..PathFacts::default() };
            // a queue on the way makes the round trip longer than it need be
            let client = PathFacts { rtt: ms(far + 500), min_rtt: ms(far), outstanding, rate: 1_000_000, ..server };
            Pair::new(PathFacts { unread: 0, ..client }, server)
        };
        let held = |near, far, unread, in_hand, outstanding| {
            Queue::of(&facts(near, far, unread, outstanding), Side::Server, in_hand, None).expect("measured").held()
        };
        // the sender's timeout is 200 ms and its round trip
        assert_eq!(held(0, 50, 25_000, 25_000, 50_000), None);
        assert_eq!(held(0, 50, 25_000, 25_001, 50_000), Some(Held { window: 14_600, outstanding: 75_000 }));
        assert_eq!(held(300, 200, 0, 0, 250_000), None);
        // a far sender needs a window for a round trip
        assert_eq!(held(300, 200, 0, 0, 250_001), Some(Held { window: 331_250, outstanding: 187_500 }));
        // an acknowledgement takes longer in any case
        assert_eq!(held(0, 300, 0, 305_000, 0), None);
        assert_eq!(held(0, 300, 0, 305_001, 0).expect("too long").window, 38_125);
        // the sender is slower than the receiver until its bytes are read
        assert_eq!(held(100, 100, 150_001, 0, 0), Some(Held { window: 50_000, outstanding: 112_500 }));
        // nothing is queued on the way: the congestion window grows
        let mut growing = facts(0, 100, 100_000, 14_600);
        (growing.client.rtt, growing.client.cwnd, growing.client.rate) = (ms(100), 14_600, 50_000);
        let queue = Queue::of(&growing, Side::Server, 0, None).expect("measured");
        assert_eq!((queue.rate, queue.held()), (146_000, Some(Held { window: 14_600, outstanding: 29_200 })));
        // the same while it is held back because of a queue on the way
        let before = Queue { is_queued: true, rate: 60_000, ..queue };
        let queue = Queue::of(&growing, Side::Server, 0, Some(before)).expect("measured");
        assert_eq!((queue.rate, queue.held()), (60_000, Some(Held { window: 14_600, outstanding: 4_722 })));
        let slow = |bytes| {
            let Pair { client, server } = facts(0, 20, 0, bytes);
            Pair::new(PathFacts { rate: 10_000, ..client }, server)
        };
        let queue = Queue::of(&slow(1001), Side::Server, 0, None).expect("measured");
        assert_eq!(queue.held(), Some(Held { window: 14_600, outstanding: 750 }));
        assert_eq!(queue.lasts(), Duration::from_micros(100_100));
        assert!(Queue::of(&Pair::default(), Side::Server, 1 << 30, None).is_none(), "not measured");
        assert!(Queue::of(&facts(5, 5, 1 << 30, 0), Side::Server, 0, None).is_none(), "close to each other");
        assert!(Queue::of(&facts(0, 20, 0, 0), Side::Client, 5001, None).expect("rate unknown").held().is_some());
    }
}
