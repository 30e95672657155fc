//! File descriptors, which are scarce: a copied or parked connection takes two. Before they
//! run out, parked flows are released in the order of their release times. Some are reserved
//! for clients that were accepted already, and whose servers are still to be connected to.
//!
//! A new descriptor shows how many are in use, because the kernel returns the lowest
//! free number (POSIX, File Descriptor Allocation). Nothing has to be counted.

use longsplice_datapath::monotonic;
use nix::sys::resource::{Resource, getrlimit};
use std::{
    os::fd::AsRawFd,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

/// Parked flows are released while no more than one descriptor in this many is free.
const SCARCE: u64 = 4;
/// No client is accepted while no more than one descriptor in this many is free.
const SHORT: u64 = 8;
/// Of this part of all descriptors, the last ones are left to whoever asks what is wrong, by the control socket: connects must not
/// take them. Not fewer nor more than the others, which are more than the threads that may be trying at the same time.
const LAST: (u64, u64, u64) = (16, 4, 64);
/// Number of flows released at a time: the limit of descriptors divided by the first, so that
/// the next ones have time to become due; at most the second, which takes some ten milliseconds.
const BATCH: (u64, u64) = (32, 1000);

/// What is known about the use of descriptors.
#[derive(Debug, Default)]
pub(crate) struct Descriptors {
    /// The keeper was asked to release flows, and has not begun yet.
    asked: AtomicBool,
    /// The last descriptor opened was one of the last that are free.
    short: AtomicBool,
}

/// The limit of descriptors of this process, at most `u32::MAX`, and the second in which the kernel was asked for it, plus one.
static KNOWN: AtomicU64 = AtomicU64::new(0);

/// Returns the limit of descriptors of this process. Asks the kernel once a second: others may change the limit.
fn limit() -> u64 {
    let second = monotonic().as_secs() + 1;
    let known = KNOWN.load(Relaxed);
    if known >> 32 == second & 0xffff_ffff {
        return known & 0xffff_ffff;
    }
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft).min(0xffff_ffff);
    KNOWN.store(second << 32 | limit, Relaxed);
    limit
}

/// Returns whether a descriptor, just opened, is among the last of the limit: one part of `part`.
fn is_among_last(fd: &impl AsRawFd, part: u64) -> bool {
    let limit = limit();
    fd.as_raw_fd() as u64 >= limit - limit / part
}

/// Returns whether a descriptor, just opened, is one of those that are left to whoever asks.
pub(crate) fn is_reserved(fd: &impl AsRawFd) -> bool {
    let (limit, (part, least, most)) = (limit(), LAST);
    fd.as_raw_fd() as u64 >= limit.saturating_sub((limit / part).clamp(least, most))
}

/// Returns whether descriptors are scarce, judged by one just opened: the rest must be saved for necessary uses.
pub(crate) fn are_scarce(fd: &impl AsRawFd) -> bool {
    is_among_last(fd, SCARCE)
}

impl Descriptors {
    /// Notes a descriptor that was just opened. Returns whether descriptors are scarce.
    pub fn opened(&self, fd: &impl AsRawFd) -> bool {
        self.short.store(is_among_last(fd, SHORT), Relaxed);
        are_scarce(fd)
    }

    /// Returns whether no client is accepted at present.
    pub fn are_short(&self) -> bool {
        self.short.load(Relaxed)
    }

    /// Notes that no descriptor could be opened.
    pub fn ran_out(&self) {
        self.short.store(true, Relaxed);
    }

    /// Notes that the keeper is asked to release flows. Returns false if it was asked already.
    pub fn ask(&self) -> bool {
        !self.asked.swap(true, Relaxed)
    }

    /// Returns the number of flows to release now.
    pub fn begin(&self) -> u64 {
        self.asked.store(false, Relaxed);
        (limit() / BATCH.0).clamp(1, BATCH.1)
    }
}
