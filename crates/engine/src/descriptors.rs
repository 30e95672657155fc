//! File descriptors, which are scarce: a copied or parked connection takes two. Before they
//! run out, parked flows are released, in the order of their release times. Some are reserved
//! for clients that were accepted already, and whose servers are still to be connected to.
//!
//! A new descriptor shows how many are in use, because the kernel returns the lowest
//! free number (POSIX, File Descriptor Allocation). Nothing has to be counted.

use crate::{Splicer, flow::KeeperMessage};
use nix::{
    errno::Errno,
    sys::resource::{Resource, getrlimit},
};
use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, Instant},
};
use tokio::time::sleep;

/// Parked flows are released while no more than one descriptor in this many is free.
const SCARCE: u64 = 4;
/// No client is accepted while no more than one descriptor in this many is free.
const SHORT: u64 = 8;
/// Number of flows released at a time: the limit of descriptors divided by the first, so that
/// the next ones have time to become due; at most the second, which takes some ten milliseconds.
const BATCH: (u64, u64) = (32, 1000);
/// Interval at which a task that waits for descriptors checks for them.
const TRY: Duration = Duration::from_millis(5);
/// Time that a listener waits for descriptors. Then it reports `EMFILE`.
const ACCEPT_PATIENCE: Duration = Duration::from_millis(100);
/// Time that a connect waits for descriptors. The releases of a whole process take less.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(crate) struct Descriptors {
    /// The keeper was asked to release flows, and has not begun yet.
    asked: AtomicBool,
    /// The last descriptor opened was one of the last that are free.
    short: AtomicBool,
}

/// Returns the limit of descriptors of this process.
fn limit() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft)
}

/// Returns whether a descriptor, just opened, is among the last of the limit: one part of `part`.
fn is_among_last(fd: &impl AsRawFd, part: u64) -> bool {
    let limit = limit();
    fd.as_raw_fd() as u64 >= limit - limit / part
}

/// Returns whether descriptors are scarce, judged by one just opened: the rest must be saved for necessary uses.
pub(crate) fn are_scarce(fd: &impl AsRawFd) -> bool {
    is_among_last(fd, SCARCE)
}

impl Descriptors {
    /// Returns the number of flows to release now.
    pub fn begin(&self) -> u64 {
        self.asked.store(false, Relaxed);
        (limit() / BATCH.0).clamp(1, BATCH.1)
    }
}

impl Splicer {
    /// Checks a descriptor that was just opened, and asks for releases if descriptors are scarce.
    pub(crate) fn opened(&self, fd: &impl AsRawFd) {
        self.inner.descriptors.short.store(is_among_last(fd, SHORT), Relaxed);
        if are_scarce(fd) {
            self.release_some();
        }
    }

    fn release_some(&self) {
        if self.datapath().is_some() && !self.inner.descriptors.asked.swap(true, Relaxed) {
            self.tell(KeeperMessage::Room);
        }
    }

    /// Waits for descriptors before a client is accepted. Fails with `EMFILE` if there
    /// are still too few after a while. `any`: a descriptor to duplicate as a test.
    pub(crate) async fn await_descriptors(&self, any: impl AsFd) -> io::Result<()> {
        let end = Instant::now() + ACCEPT_PATIENCE;
        while self.inner.descriptors.short.load(Relaxed) {
            match any.as_fd().try_clone_to_owned() {
                Ok(probe) => self.opened(&probe),
                Err(_) => self.release_some(),
            }
            if self.inner.descriptors.short.load(Relaxed) {
                if Instant::now() >= end {
                    return Err(Errno::EMFILE.into());
                }
                sleep(TRY).await;
            }
        }
        Ok(())
    }

    /// Returns whether something that an accepted client needs, and that has failed since `began`,
    /// should be tried again because descriptors may be free now. Waits before it returns true.
    pub(crate) async fn is_to_be_tried_again(&self, error: &io::Error, began: Instant) -> bool {
        if error.raw_os_error() != Some(Errno::EMFILE as i32) || began.elapsed() >= CONNECT_PATIENCE {
            return false;
        }
        self.inner.descriptors.short.store(true, Relaxed);
        self.release_some();
        sleep(TRY).await;
        true
    }
}
