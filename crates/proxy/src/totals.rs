//! What has become of the connections of a listener, added up when they end.

use crate::log::access_log::Record;
use serde::Serialize;
use std::{
    collections::BTreeMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// Longest lifetimes, in milliseconds, of those counted together; what lives longer is counted apart.
pub const LIFETIMES_MS: [u64; 8] = [10, 100, 1000, 10_000, 60_000, 600_000, 3_600_000, 86_400_000];
/// The same for what a client waits for: connections to servers, and heads of replies.
pub const WAITS_MS: [u64; 8] = [1, 3, 10, 30, 100, 300, 1000, 10_000];

/// Times, counted by how long they were: up to each of some bounds in milliseconds, and longer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Times {
    /// Their number up to each bound but above the one before, and above the last one.
    pub by_bound: [u64; 9],
    /// Their sum in milliseconds.
    pub sum_ms: u64,
}

impl Times {
    fn add(&mut self, bounds: &[u64; 8], ms: u64) {
        self.by_bound[bounds.partition_point(|most| *most < ms)] += 1;
        self.sum_ms = self.sum_ms.saturating_add(ms);
    }
}

/// Sums over connections, HTTP requests and FTP transfers that have ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Their number, by how they ended: `how` of the access log.
    pub ended: BTreeMap<&'static str, u64>,
    /// Bytes from clients to servers.
    pub bytes_up: u64,
    /// Bytes from servers to clients.
    pub bytes_down: u64,
    /// Bytes of `bytes_up` that were forwarded while spliced.
    pub spliced_up: u64,
    /// Bytes of `bytes_down` that were forwarded while spliced.
    pub spliced_down: u64,
    /// How long they lived, by [`LIFETIMES_MS`].
    pub lifetimes: Times,
    /// How long it took to connect to servers, by [`WAITS_MS`].
    pub connects: Times,
    /// How long servers took to reply to requests of HTTP, by [`WAITS_MS`].
    pub replies: Times,
}

/// Totals that many connections add to.
#[derive(Debug, Default)]
pub(crate) struct Summed {
    ended: Mutex<Totals>,
    begun: AtomicU64,
}

impl Summed {
    /// Counts a connection that begins.
    pub fn begin(&self) {
        self.begun.fetch_add(1, Relaxed);
    }

    /// Returns how many have begun.
    pub fn begun(&self) -> u64 {
        self.begun.load(Relaxed)
    }

    /// Adds what the line of the access log tells.
    pub fn add(&self, record: &Record) {
        let mut sum = self.lock();
        *sum.ended.entry(record.how).or_default() += 1;
        sum.bytes_up += record.bytes_up;
        sum.bytes_down += record.bytes_down;
        sum.spliced_up += record.spliced_up;
        sum.spliced_down += record.spliced_down;
        sum.lifetimes.add(&LIFETIMES_MS, record.duration_ms);
        record.connect_ms.iter().for_each(|ms| sum.connects.add(&WAITS_MS, *ms));
        record.reply_ms.iter().for_each(|ms| sum.replies.add(&WAITS_MS, *ms));
    }

    /// Returns the sums so far.
    pub fn totals(&self) -> Totals {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Totals> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_counted_up_to_their_bound() {
        let sum = Summed::default();
        for duration_ms in [0, 10, 11, 86_400_000, 86_400_001] {
            let client = ([192, 0, 2, 1], 1).into();
            let connect_ms = Some(duration_ms / 10);
            sum.add(&Record { duration_ms, connect_ms, bytes_up: 3, ..Record::new("plug", None, client) });
        }
        let totals = sum.totals();
        assert_eq!(totals.lifetimes, Times { by_bound: [2, 1, 0, 0, 0, 0, 0, 1, 1], sum_ms: 172_800_022 });
        assert_eq!(totals.connects, Times { by_bound: [3, 0, 0, 0, 0, 0, 0, 0, 2], sum_ms: 17_280_002 });
        assert_eq!((totals.ended["closed"], totals.bytes_up, totals.replies), (5, 15, Times::default()));
    }
}
