//! Starts and stops the traffic, and counts the activities that are left.

use super::ledger::Ledger;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

/// State shared by clients and servers.
pub struct Traffic {
    pub ledger: Ledger,
    is_open: AtomicBool,
    is_over: AtomicBool,
    ends: AtomicUsize,
}

/// A counted activity, until it is dropped.
pub struct End<'a>(&'a AtomicUsize);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Traffic {
    pub fn new(ledger: Ledger) -> Arc<Traffic> {
        let [is_open, is_over] = [true, false].map(AtomicBool::new);
        Arc::new(Traffic { ledger, is_open, is_over, ends: AtomicUsize::new(0) })
    }

    /// Counts one end of a connection, or a busy client.
    pub fn count(&self) -> End<'_> {
        self.ends.fetch_add(1, SeqCst);
        End(&self.ends)
    }

    /// Waits until new connections are allowed. `None`: never again.
    pub fn enter(&self) -> Option<End<'_>> {
        while !self.is_over.load(SeqCst) {
            let end = self.count();
            if self.is_open() {
                return Some(end);
            }
            drop(end);
            thread::sleep(Duration::from_millis(20));
        }
        None
    }

    pub fn is_open(&self) -> bool {
        self.is_open.load(SeqCst)
    }

    pub fn open(&self, open: bool) {
        self.is_open.store(open, SeqCst);
    }

    /// Allows no more connections.
    pub fn end(&self) {
        self.open(false);
        self.is_over.store(true, SeqCst);
    }

    /// Waits until all activities have ended, the time limit expires, or something has failed. Returns whether all ended.
    pub fn is_quiet(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        while self.ends.load(SeqCst) > 0 {
            if Instant::now() > end || !self.ledger.failures().is_empty() {
                return false;
            }
            thread::sleep(Duration::from_millis(50));
        }
        true
    }

    /// Number of activities in progress.
    pub fn ends(&self) -> usize {
        self.ends.load(SeqCst)
    }
}
