//! Watches a flow for a while after a splice. If a direction becomes much slower than it was, the splice has done harm that its path
//! did not let expect.

use super::{Time, start::Slowed};
use longsplice_datapath::{Pair, PathView, Side};
use std::time::Duration;

/// Round trips of the whole path from one look to the next: a congestion control adapts within a few.
const ROUNDS: u32 = 4;
/// Number of looks. BBR, which suffers most, loses most of its rate within the first three.
const LOOKS: u32 = 6;
/// Number of looks in a row at which a direction must have been slow: a sender may pause.
const SLOW: u32 = 2;

/// The same of a flow of which nothing was copied before. Its start is the only one with which it can be compared: BBR has lost its
/// rate after some fifteen round trips, once it knows what the path carries and believes that a window for the near leg will do.
const START_ROUNDS: u32 = 2;
/// How many times as rare looks become while nothing moves.
const START_PAUSE: u32 = 8;
/// Looks at which bytes have moved.
const START_LOOKS: u32 = 16;
/// BBR measures the shortest round trip anew after ten seconds, and is not slow any more then.
const START_TIME: Duration = Duration::from_secs(12);
/// Most bytes in flight of a sender that is slow by itself: 16 segments. BBR keeps four, and some for acknowledgements that are late.
pub(super) const START_WINDOW: u32 = 16 * 1460;
/// ... and fewest: four segments that are smaller than most. Who has fewer in flight answers questions, or has nothing to send.
const START_LEAST: u32 = 4 * 1000;
/// It must have carried more than so many times what it carries now. A sender that loses segments may fall to a half, time and again.
const START_MOST: u64 = 3;

/// What a flow is compared with.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) enum Before {
    /// Bytes per second while each direction was copied. 0: it is not watched.
    Copied(Pair<u64>),
    /// Nothing was copied: the most bytes per second that each direction has had so far.
    Start(Pair<u64>),
}

/// The state of the watch.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) struct RateWatch {
    before: Before,
    began: Time,
    /// Time between two looks while bytes move.
    usual: Duration,
    pause: Duration,
    looked: Time,
    /// What the entries had forwarded at the last look.
    ends: Option<Pair<u64>>,
    /// Bytes per second of each direction at the last look.
    rates: Pair<u64>,
    slow: Pair<u32>,
    looks: u32,
}

impl RateWatch {
    /// `rtt`: of the whole path. Returns `None` if nothing is to be watched.
    pub fn new(now: Time, rtt: Duration, before: Before) -> Option<RateWatch> {
        let rounds = match before {
            Before::Copied(rates) if rates == Pair::both(0) => return None,
            Before::Copied(_) => ROUNDS,
            Before::Start(_) => START_ROUNDS,
        };
        let (pause, ends, none) = (rounds * rtt, None, Pair::both(0));
        let (slow, usual) = (Pair::both(0), pause);
        Some(RateWatch { before, began: now, usual, pause, looked: now, ends, rates: none, slow, looks: 0 })
    }

    /// Returns the time between two looks.
    pub fn pause(&self) -> Duration {
        self.pause
    }

    /// Returns whether the watch is over.
    pub fn is_over(&self) -> bool {
        match self.before {
            Before::Copied(_) => self.looks > LOOKS,
            Before::Start(_) => self.looks > START_LOOKS || self.looked >= self.began + START_TIME,
        }
    }

    /// Returns the sender that has become slow.
    pub fn slowest(&self) -> Side {
        if self.slow.client > self.slow.server { Side::Client } else { Side::Server }
    }

    /// Returns how slow a flow is now of which nothing was copied.
    pub fn slowed_since_start(&self) -> Option<Slowed> {
        let sender = self.slowest();
        let slowed = Slowed { sender, rate: self.rates[sender], rtt: self.usual / START_ROUNDS };
        matches!(self.before, Before::Start(_)).then_some(slowed)
    }

    /// Looks, if it is time to. Returns whether a direction has become slow.
    pub fn look(&mut self, now: Time, paths: &Pair<PathView>) -> bool {
        let elapsed = now.saturating_sub(self.looked);
        if self.ends.is_some() && elapsed < self.pause {
            return false;
        }
        let ends = paths.each_ref().map(PathView::reached);
        let mut has_moved = self.ends.is_none();
        if let Some(before) = self.ends {
            for from in Side::BOTH {
                let moved = paths[from].since(before[from]);
                let rate = (moved as f64 / elapsed.as_secs_f64()) as u64;
                let in_flight = paths[from].sent.wrapping_sub(paths[from.other()].max_ack);
                let is_less = match &mut self.before {
                    Before::Copied(rates) => rate < rates[from] / 2,
                    Before::Start(most) => {
                        most[from] = most[from].max(rate);
                        let is_small = (START_LEAST..=START_WINDOW).contains(&in_flight);
                        // it has sent a small window in each round trip, and much more before
                        let least = u64::from(START_ROUNDS * START_LEAST);
                        let rtt = (self.usual / START_ROUNDS).as_secs_f64();
                        let was_large = most[from] as f64 * rtt > f64::from(2 * START_WINDOW);
                        is_small && was_large && moved >= least && rate < most[from] / START_MOST
                    }
                };
                // a sender with nothing in flight waits for its program, or for the other host
                self.slow[from] = if is_less && in_flight > 0 { self.slow[from] + 1 } else { 0 };
                self.rates[from] = rate;
                has_moved |= moved > 0;
            }
        }
        (self.ends, self.looked) = (Some(ends), now);
        let counts = has_moved || matches!(self.before, Before::Copied(_));
        self.looks += u32::from(counts);
        // one that waits for its next request costs little
        self.pause = if counts { self.usual } else { (2 * self.pause).min(START_PAUSE * self.usual) };
        self.slow.iter().any(|slow| *slow >= SLOW)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks at a server that sends so many bytes between two looks. Returns after which look it was found to be slow.
    fn found_slow(bytes: &[u32], in_flight: u32) -> Option<usize> {
        let mut now = Duration::from_secs(1);
        let mut watch =
            RateWatch::new(now, Duration::from_millis(25), Before::Copied(Pair::new(0, 1_000_000))).expect("a watch");
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
        assert!(RateWatch::new(now, rtt, Before::Copied(Pair::both(0))).is_none(), "no direction has a rate");
        let mut watch = RateWatch::new(now, rtt, Before::Copied(Pair::both(1_000_000))).expect("a watch");
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

    #[test]
    fn a_flow_that_was_never_copied_is_compared_with_its_start() {
        let rtt = Duration::from_millis(100);
        let slow_after = |looks: &[(u64, u32)]| {
            let (began, mut paths) = (Duration::from_secs(1), Pair::<PathView>::default());
            let mut watch = RateWatch::new(began, rtt, Before::Start(Pair::both(0))).expect("a watch");
            watch.look(began, &paths);
            (1..).zip(looks).find_map(|(n, (bytes, in_flight))| {
                paths.server.end = paths.server.end.wrapping_add(*bytes as u32);
                paths.server.sent = paths.client.max_ack.wrapping_add(*in_flight);
                let is_slow = watch.look(began + n * watch.pause(), &paths);
                assert!(!watch.is_over() || is_slow, "it is over after {n}");
                is_slow.then(|| (n, watch.slowed_since_start().expect("since the start").rate))
            })
        };
        // BBR, whose server knows the near leg alone
        let bbr = [(113_000, 121_000), (398_000, 199_000), (194_000, 68_000), (112_000, 20_000), (33_000, 17_000)];
        assert_eq!(slow_after(&bbr), Some((5, 165_000)));
        let lossy = [(100_000, 50_000), (50_000, 25_000), (34_000, 12_000), (50_000, 20_000), (34_000, 15_000)];
        assert_eq!(slow_after(&lossy), None, "a third is enough");
        let large = [(900_000, 300_000), (100_000, 30_000), (100_000, 30_000), (100_000, 30_000)];
        assert_eq!(slow_after(&large), None, "a window that is no small one");
        let paused = [(900_000, 300_000), (10_000, 0), (10_000, 0), (10_000, 0)];
        assert_eq!(slow_after(&paused), None, "its program pauses");
    }

    #[test]
    fn a_flow_that_was_never_copied_is_watched_while_it_moves_for_some_seconds() {
        let (began, mut paths) = (Duration::from_secs(1), Pair::<PathView>::default());
        let mut watch =
            RateWatch::new(began, Duration::from_millis(100), Before::Start(Pair::both(0))).expect("a watch");
        let mut now = began;
        let looks = (0..).find(|_| {
            now += watch.pause();
            watch.look(now, &paths);
            watch.is_over()
        });
        assert_eq!(looks, Some(10), "nothing has moved for 12 s: after 0.2, 0.4, 0.8 and then each 1.6 s");
        let mut watch =
            RateWatch::new(began, Duration::from_millis(100), Before::Start(Pair::both(0))).expect("a watch");
        let looks = (0..).find(|n| {
            paths.client.end = paths.client.end.wrapping_add(1);
            watch.look(began + *n * watch.pause(), &paths);
            watch.is_over()
        });
        assert_eq!(looks, Some(START_LOOKS));
    }
}
