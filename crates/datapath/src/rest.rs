//! When slots of entries that were removed are taken again (bpf/table.h). A program that has found one just before may still write to
//! it; as soon as none does, the data path is told. Otherwise slots rest for a second, which thousands of short connections
//! a second feel: all that they have left would be more than the table has to spare.

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

/// Between two rounds, each of which takes a grace period of RCU, some ten milliseconds.
const PACE: Duration = Duration::from_millis(10);

#[derive(Debug, Default)]
pub(crate) struct Rest {
    /// Entries were removed since the last round began.
    removed: AtomicBool,
    /// Who goes the rounds.
    thread: OnceLock<Thread>,
}

impl Rest {
    /// An entry was removed.
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
    /// Lets slots be taken again that nobody holds, until `is_over` says so when it is asked after [`Datapath::wake`]. Once per
    /// data path, on a thread of its own. Fails where the kernel does not tell who runs (membarrier(2)).
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

    /// The same once, of all that were removed before, but for the last few milliseconds.
    pub fn reuse_slots_now(&self) -> io::Result<()> {
        let before = monotonic().as_nanos() as u64;
        await_programs()?;
        self.maps.set_unheld(before)
    }
}
