//! Reuse of the slots of removed entries (bpf/table.h). A program that has found an entry just before may still
//! write to its slot; the data path is told as soon as none does. Otherwise slots rest for a second, which is
//! too long for thousands of short connections a second: their slots would exceed the spare room of the table.

use crate::{
    clock::monotonic,
    tables::maps::{Maps, await_programs},
};
use std::{
    io,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::{self, Thread},
    time::Duration,
};

/// Pause between two rounds. Each takes an RCU grace period, some ten milliseconds.
const PACE: Duration = Duration::from_millis(10);

#[derive(Debug, Default)]
pub(crate) struct Rest {
    /// Entries were removed since the last round began.
    removed: AtomicBool,
    /// The thread that performs the rounds.
    thread: OnceLock<Thread>,
}

impl Rest {
    /// Notes that an entry was removed.
    pub fn begin(&self) {
        if !self.removed.swap(true, SeqCst) {
            self.wake();
        }
    }

    pub fn wake(&self) {
        self.thread.get().iter().for_each(|thread| thread.unpark());
    }

    /// Performs rounds until `is_over` returns true, which is asked after [`Rest::wake`].
    pub fn reuse_slots(&self, maps: &Maps, is_over: impl Fn() -> bool) -> io::Result<()> {
        let _ = self.thread.set(thread::current());
        while !is_over() {
            if self.removed.swap(false, SeqCst) {
                reuse_slots_now(maps)?;
                thread::sleep(PACE);
            } else {
                thread::park();
            }
        }
        Ok(())
    }
}

/// One round.
pub(crate) fn reuse_slots_now(maps: &Maps) -> io::Result<()> {
    let before = monotonic().as_nanos() as u64;
    await_programs()?;
    maps.set_unheld(before)
}
