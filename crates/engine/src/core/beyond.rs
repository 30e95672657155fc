//! Watches a flow whose hosts may both have sent more than the other one's window, because our sockets had promised more. Each
//! then gets a part, and acknowledges it with a number that is beyond the other's window, unless it takes care as Linux does.
//! The other drops that, or the data path does, and it repeats what has arrived: nothing goes on. In control mode, such
//! acknowledgements get through (`pure_ack_seq()`).

use super::Time;
use longsplice_datapath::{Pair, PathView, Side};
use std::time::Duration;

/// Time until everything has arrived that was sent by the old windows.
const SOON: Duration = Duration::from_secs(1);
/// Time without any progress after which nothing is expected of the hosts: a few timeouts (RFC 6298).
const PATIENCE: Duration = Duration::from_secs(3);
/// Time after which the old windows have done what harm they could.
const LASTS: Duration = Duration::from_secs(60);
/// The time of an entry's last packet is known in units of 8.6 s.
const SEEN: u8 = 2;
/// Number of looks in a row that have found progress in both directions.
const WELL: u32 = 2;

/// The state of the watch.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) struct Beyond {
    began: Time,
    looked: Time,
    pause: Duration,
    /// What was seen when something had moved last, and when.
    last: Option<(Pair<Reached>, Time)>,
    /// Number of looks in a row at which both directions had moved.
    well: u32,
}

/// End and acknowledgement of a direction, and when its host was heard.
type Reached = (u32, u32, u8);

/// The result of a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Unclear,
    /// The hosts need our sockets.
    Stuck,
    /// Nothing more is to be feared.
    Over,
}

impl Beyond {
    pub fn new(now: Time) -> Beyond {
        Beyond { began: now, looked: now, pause: SOON, last: None, well: 0 }
    }

    /// Returns the time until the next look.
    pub fn pause(&self) -> Duration {
        self.pause
    }

    /// Looks, if it is time to: ever more rarely.
    pub fn look(&mut self, now: Time, paths: &Pair<PathView>) -> Found {
        if now < self.looked + self.pause {
            return Found::Unclear;
        }
        let age = now.saturating_sub(self.began);
        (self.looked, self.pause) = (now, age);
        let seen = paths.each_ref().map(|p| (p.end, p.max_ack, p.seen));
        let (last, since) = *self.last.get_or_insert((seen, now));
        let moves = |side: Side| (last[side].0, last[side].1) != (seen[side].0, seen[side].1);
        let [a, b] = Side::BOTH.map(moves);
        if a || b {
            self.last = Some((seen, now));
        }
        self.well = if a && b { self.well + 1 } else { 0 };
        if age >= LASTS || self.well >= WELL {
            return Found::Over;
        }
        // what the data path has dropped is not seen here, but that the hosts go on
        let is_heard = |side: Side| seen[side].2.wrapping_sub(last[side].2) >= SEEN;
        let lacks = |from: Side| paths[from].sent != paths[from.other()].max_ack;
        let waits = |side: Side| lacks(side) || is_heard(side);
        let is_stuck = !a && !b && now >= since + PATIENCE && Side::BOTH.into_iter().any(waits);
        if is_stuck { Found::Stuck } else { Found::Unclear }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGAN: Time = Time::from_secs(100);

    /// What is found after so many seconds, if `change` makes of the entries what they are then.
    fn found(looks: &[u64], change: impl Fn(u64, &mut Pair<PathView>)) -> Vec<(u64, Found)> {
        let mut beyond = Beyond::new(BEGAN);
        let mut found = Vec::new();
        for at in looks {
            let mut paths = Pair::<PathView>::default();
            change(*at, &mut paths);
            found.push((*at, beyond.look(BEGAN + Duration::from_secs(*at), &paths)));
        }
        found.retain(|(_, found)| *found != Found::Unclear);
        found
    }

    const LOOKS: [u64; 8] = [0, 1, 2, 4, 8, 16, 32, 64];

    #[test]
    fn hosts_that_wait_for_each_other_are_found() {
        let stuck_at_4 = vec![(4, Found::Stuck)];
        // a part of what was sent has arrived, and nothing more
        assert_eq!(found(&LOOKS[..4], |_, p| p.client.sent = 1), stuck_at_4);
        assert_eq!(found(&LOOKS[..4], |_, p| p.server.sent = 1), stuck_at_4);
        // something has arrived late
        let late = |at, p: &mut Pair<PathView>| (p.client.sent, p.client.max_ack) = (1, u32::from(at >= 4));
        assert_eq!(found(&LOOKS[..5], late), [(8, Found::Stuck)]);
        // the data path drops what they send
        assert_eq!(found(&LOOKS[..6], |at, p| p.server.seen = (at / 8) as u8), [(16, Found::Stuck)]);
    }

    #[test]
    fn it_comes_to_an_end() {
        // both directions go on
        let well = |at: u64, p: &mut Pair<PathView>| (p.client.end, p.server.max_ack) = (at as u32, at as u32);
        assert_eq!(found(&LOOKS[..4], well), [(4, Found::Over)]);
        // one does, or none: nothing is lost, and nobody is heard
        let one = |at: u64, p: &mut Pair<PathView>| p.client.end = at as u32;
        assert_eq!(found(&LOOKS, one), [(64, Found::Over)]);
        assert_eq!(found(&LOOKS, |_, _| ()), [(64, Found::Over)]);
        // looks in between do not count
        assert_eq!(found(&[0, 1, 2, 3, 4], well), [(4, Found::Over)]);
    }
}
