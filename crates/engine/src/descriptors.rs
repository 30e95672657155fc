//! Descriptors, of which a process has few: a connection that is copied or parked takes two. Before they run out, parked flows are
//! released, those first that would be released next. A part is kept for clients that were accepted already, whose servers
//! are still to be connected to.
//!
//! A new descriptor tells how many are in use: the kernel gives the lowest number that is free (POSIX, File Descriptor
//! Allocation). Nothing has to be counted.

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

/// Parked flows are released while no more than one descriptor in so many is free, ...
const SCARCE: u64 = 4;
/// ... and no client is accepted while no more than one in so many is.
const SHORT: u64 = 8;
/// So many flows are released at a time, a part of the limit that leaves the next ones time to come by; and no more than these,
/// which take some ten milliseconds.
const BATCH: (u64, u64) = (32, 1000);
/// How often it is looked whether there is one again, ...
const TRY: Duration = Duration::from_millis(5);
/// ... and for how long by a listener, which says then what it waits for, ...
const ACCEPT_PATIENCE: Duration = Duration::from_millis(100);
/// ... and by a connect: the releases of a whole process take less.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(crate) struct Descriptors {
    /// The keeper was asked to release flows.
    asked: AtomicBool,
    /// The last one that was opened was one of the last there are.
    short: AtomicBool,
}

/// How many there may be.
fn limit() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft)
}

/// Is this, just opened, among the last part of so many?
fn is_among_last(fd: &impl AsRawFd, part: u64) -> bool {
    let limit = limit();
    fd.as_raw_fd() as u64 >= limit - limit / part
}

/// Of a descriptor just opened: are those few that are left for what cannot do without?
pub(crate) fn are_scarce(fd: &impl AsRawFd) -> bool {
    is_among_last(fd, SCARCE)
}

impl Descriptors {
    /// How many flows are to be released now.
    pub fn begin(&self) -> u64 {
        self.asked.store(false, Relaxed);
        (limit() / BATCH.0).clamp(1, BATCH.1)
    }
}

impl Splicer {
    /// Sees to it that there are more, if need be.
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

    /// Before a client is accepted. `EMFILE` if there are too few to serve it, also after a while. `any`: something to duplicate.
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

    /// What a client needs that was accepted already has failed since `began`: is it worth another try, for there may be
    /// descriptors now?
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
