//! Reuse of the slots of removed entries (bpf/table.h). A program that has found an entry just before may still
//! write to its slot; the data path is told as soon as none does. Otherwise slots rest for a second, which is
//! too long for thousands of short connections a second: their slots would exceed the spare room of the table.

use crate::{Datapath, maps::await_programs, monotonic};
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
}

impl Datapath {
    /// Lets slots be reused that nobody holds, until `is_over`, which is asked after [`Datapath::wake`], returns
    /// true. Call it once per data path, on a thread of its own. Fails if the kernel does not support membarrier(2).
    pub fn reuse_slots(&self, is_over: impl Fn() -> bool) -> io::Result<()> {
        let _ = self.rest.thread.set(thread::current());
        while !is_over() {
            if self.rest.removed.swap(false, SeqCst) {
                self.reuse_slots_now()?;
                thread::sleep(PACE);
            } else {
                thread::park();
            }
        }
        Ok(())
    }

    /// Lets slots be reused whose entries were removed before, except in the last few milliseconds. Waits for a grace period.
    pub fn reuse_slots_now(&self) -> io::Result<()> {
        let before = monotonic().as_nanos() as u64;
        await_programs()?;
        self.maps.set_unheld(before)
    }
}
