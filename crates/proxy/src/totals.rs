//! What has become of the connections of a listener, added up when they end.

use crate::log::access_log::Record;
use serde::Serialize;
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Longest lifetimes, in milliseconds, of those counted together; what lives longer is counted apart.
pub const LIFETIMES_MS: [u64; 8] = [10, 100, 1000, 10_000, 60_000, 600_000, 3_600_000, 86_400_000];

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
    /// Their number by their lifetimes: up to each of [`LIFETIMES_MS`], and longer.
    pub lifetimes: [u64; LIFETIMES_MS.len() + 1],
    /// Sum of their lifetimes in milliseconds.
    pub lifetimes_ms: u64,
}

/// Totals that many connections add to.
#[derive(Debug, Default)]
pub(crate) struct Summed(Mutex<Totals>);

impl Summed {
    /// Adds what the line of the access log tells.
    pub fn add(&self, record: &Record) {
        let mut sum = self.lock();
        *sum.ended.entry(record.how).or_default() += 1;
        sum.bytes_up += record.bytes_up;
        sum.bytes_down += record.bytes_down;
        sum.spliced_up += record.spliced_up;
        sum.spliced_down += record.spliced_down;
        sum.lifetimes[LIFETIMES_MS.partition_point(|most| *most < record.duration_ms)] += 1;
        sum.lifetimes_ms += record.duration_ms;
    }

    /// Returns the sums so far.
    pub fn totals(&self) -> Totals {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Totals> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lifetimes_are_counted_up_to_their_bound() {
        let sum = Summed::default();
        for duration_ms in [0, 10, 11, 86_400_000, 86_400_001] {
            let client = ([192, 0, 2, 1], 1).into();
            sum.add(&Record { duration_ms, bytes_up: 3, ..Record::new("plug", None, client) });
        }
        let totals = sum.totals();
        assert_eq!(totals.lifetimes, [2, 1, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!((totals.ended["closed"], totals.bytes_up, totals.lifetimes_ms), (5, 15, 172_800_022));
    }
}
