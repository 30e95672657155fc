//! What is counted of HTTP caches.

use super::Kind;
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counts {
    ($($(#[doc = $doc:literal])* $count:ident $name:ident,)*) => {
        /// Counted events.
        #[derive(Debug, Clone, Copy)]
        pub enum Count {
            $($(#[doc = $doc])* $count,)*
        }

        /// Counters of caches.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        pub struct CacheValues {
            /// Replies stored now.
            pub cache_entries: u64,
            /// Bytes on the disk, including replies that are being stored.
            pub cache_bytes: u64,
            $($(#[doc = $doc])* pub $name: u64,)*
        }

        impl CacheValues {
            /// Returns the counters of one cache.
            pub fn new(entries: u64, bytes: u64, counts: &Counts) -> CacheValues {
                let of = |count: Count| counts[count as usize].load(Relaxed);
                CacheValues { cache_entries: entries, cache_bytes: bytes, $($name: of(Count::$count),)* }
            }

            /// Returns all of them: how they change, names, meanings and values.
            pub(super) fn metrics(&self) -> impl Iterator<Item = (Kind, &'static str, &'static str, u64)> + use<> {
                [
                    (Kind::Gauge, "cache_entries", "Replies stored now.", self.cache_entries),
                    (Kind::Gauge, "cache_bytes", "Bytes on the disk.", self.cache_bytes),
                    $((Kind::Counter, stringify!($name), concat!($($doc),*), self.$name),)*
                ]
                .into_iter()
            }

            /// Returns the sum of two caches.
            pub fn and(self, other: &CacheValues) -> CacheValues {
                CacheValues {
                    cache_entries: self.cache_entries + other.cache_entries,
                    cache_bytes: self.cache_bytes + other.cache_bytes,
                    $($name: self.$name + other.$name,)*
                }
            }
        }
    };
}

counts! {
    /// Requests answered from the disk.
    Hits cache_hits,
    /// Requests that could have been answered from the disk, and went to their server.
    Misses cache_misses,
    /// Requests answered from the disk after the server confirmed that the stored reply is still valid.
    Revalidated cache_revalidated,
    /// Requests answered from the disk with a stale reply: its server is being asked again, or has failed.
    Stale cache_stale,
    /// Requests that have waited for another one with the same URL, and were answered with its stored reply.
    Collapsed cache_collapsed,
    /// Replies stored.
    Stored cache_stored,
    /// Replies removed to make room.
    Evicted cache_evicted,
    /// Replies removed because a request may have changed their resource, or because their server did not confirm them.
    Invalidated cache_invalidated,
    /// Damaged files that were removed.
    Damaged cache_damaged,
    /// Replies not stored because the tap lost bytes.
    Gap cache_dropped_gap,
    /// Replies not stored because the receiver may have got other bytes than the tap.
    Doubt cache_dropped_doubt,
    /// Replies not stored because they were cut off, or invalidated while they were stored.
    Cut cache_dropped_cut,
    /// Replies not stored because of a disk error.
    Disk cache_dropped_disk,
    /// Replies not stored because they were too large.
    Large cache_dropped_large,
    /// Replies not stored because another one was being stored for the same URL, or too many in total.
    Busy cache_dropped_busy,
}

/// The counts of a cache, by event.
pub type Counts = [AtomicU64; Count::Busy as usize + 1];
