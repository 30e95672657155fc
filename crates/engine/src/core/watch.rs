//! Watches a flow for some round trips after a splice. If a direction becomes much slower than it was
//! while it was copied, the splice has done harm that its path did not let expect.

use super::Time;
use longsplice_datapath::{Pair, PathView, Side};
use std::time::Duration;

/// Round trips of the whole path from one look to the next: a congestion control adapts within a few.
const ROUNDS: u32 = 4;
/// Number of looks. BBR, which suffers most, loses most of its rate within the first three.
const LOOKS: u32 = 6;
/// Number of looks in a row at which a direction must have been slow: a sender may pause.
const SLOW: u32 = 2;

/// The state of the watch.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) struct RateWatch {
    /// Bytes per second while each direction was copied. 0: it is not watched.
    before: Pair<u64>,
    pause: Duration,
    looked: Time,
    /// What the entries had forwarded at the last look.
    ends: Option<Pair<u64>>,
    slow: Pair<u32>,
    looks: u32,
}

impl RateWatch {
    /// `rtt`: of the whole path. Returns `None` if nothing is to be watched.
    pub fn new(now: Time, rtt: Duration, before: Pair<u64>) -> Option<RateWatch> {
        let watch = RateWatch { before, pause: ROUNDS * rtt, looked: now, ends: None, slow: Pair::both(0), looks: 0 };
        before.iter().any(|rate| *rate > 0).then_some(watch)
    }

    /// Returns the time between two looks.
    pub fn pause(&self) -> Duration {
        self.pause
    }

    /// Returns whether the watch is over.
    pub fn is_over(&self) -> bool {
        self.looks > LOOKS
    }

    /// Returns the sender that has become slow.
    pub fn slowest(&self) -> Side {
        if self.slow.client > self.slow.server { Side::Client } else { Side::Server }
    }

    /// Looks, if it is time to. Returns whether a direction has become slow.
    pub fn look(&mut self, now: Time, paths: &Pair<PathView>) -> bool {
        let elapsed = now.saturating_sub(self.looked);
        if self.ends.is_some() && elapsed < self.pause {
            return false;
        }
        let ends = paths.each_ref().map(PathView::reached);
        if let Some(before) = self.ends {
            for from in Side::BOTH {
                let (path, back) = (&paths[from], &paths[from.other()]);
                let moved = paths[from].since(before[from]);
                let least = (self.before[from] as f64 / 2.0 * elapsed.as_secs_f64()) as u64;
                // a sender with nothing in flight waits for its program, or for the other host
                let is_slow = moved < least && path.sent != back.max_ack;
                self.slow[from] = if is_slow { self.slow[from] + 1 } else { 0 };
            }
        }
        (self.ends, self.looked, self.looks) = (Some(ends), now, self.looks + 1);
        self.slow.iter().any(|slow| *slow >= SLOW)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks at a server that sends so many bytes between two looks. Returns after which look it was found to be slow.
    fn found_slow(bytes: &[u32], in_flight: u32) -> Option<usize> {
        let mut now = Duration::from_secs(1);
        let mut watch = RateWatch::new(now, Duration::from_millis(25), Pair::new(0, 1_000_000)).expect("a watch");
        let mut paths = Pair::<PathView>::default();
        paths.server.end = u32::MAX - 1000;
        assert!(!watch.look(now, &paths), "there is nothing to compare with");
        bytes.iter().position(|n| {
            now += watch.pause();
            paths.server.end = paths.server.end.wrapping_add(*n);
            paths.server.sent = paths.client.max_ack.wrapping_add(in_flight);
            watch.look(now, &paths)
        })
    }

    #[test]
    fn a_direction_with_half_its_rate_twice_has_become_slow() {
        // a look each 100 ms
        assert_eq!(found_slow(&[100_000, 49_999, 50_000, 49_999, 49_999], 1), Some(4));
        assert_eq!(found_slow(&[0, 0], 1), Some(1));
        assert_eq!(found_slow(&[10_000; 6], 0), None, "nothing in flight");
        assert_eq!(found_slow(&[50_000; 6], 1), None);
    }

    #[test]
    fn it_looks_at_intervals_and_comes_to_an_end() {
        let (now, rtt) = (Duration::from_secs(1), Duration::from_millis(10));
        assert!(RateWatch::new(now, rtt, Pair::both(0)).is_none(), "no direction has a rate");
        let mut watch = RateWatch::new(now, rtt, Pair::both(1_000_000)).expect("a watch");
        assert_eq!(watch.pause(), Duration::from_millis(40));
        let mut paths = Pair::<PathView>::default();
        paths.client.sent = 1;
        assert!(!watch.look(now, &paths));
        assert!((0..100).all(|_| !watch.look(now + Duration::from_millis(39), &paths)), "too early");
        assert!(!watch.look(now + Duration::from_millis(40), &paths));
        assert!(watch.look(now + Duration::from_millis(80), &paths));
        for n in 3..=LOOKS {
            assert!(!watch.is_over(), "{n}");
            watch.look(now + n * watch.pause(), &paths);
        }
        assert!(watch.is_over());
    }
}
