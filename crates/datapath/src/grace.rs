//! The end of what processors are doing with packets now.

use crate::tables::maps::await_programs;
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};
use std::{fs, io, sync::OnceLock};

/// Number of processors from which the kernel's own grace period is the cheaper way.
const FEW: usize = 32;

/// Waits until each segment that passes a program now has reached its socket, or waits for it where a process works on the socket.
/// It takes a moment; if the kernel must be asked, some ten milliseconds. Call it in a thread that may block.
///
/// A processor handles a segment in one piece, from the program to the socket, with softirqs disabled, and runs no thread meanwhile.
/// So the calling thread goes to each processor in turn: when it runs there, what the processor was doing before is over. With
/// PREEMPT_RT this is not so, and it is not possible where the thread may not go. Then
/// `await_programs` has to do, a grace period of RCU.
pub fn await_packets() -> io::Result<()> {
    if is_realtime() || visit_all().is_none() { await_programs() } else { Ok(()) }
}

/// Has the calling thread run on each processor, and then where it may run. `None`: not everywhere.
fn visit_all() -> Option<()> {
    let here = Pid::from_raw(0);
    let online = processors(&fs::read_to_string("/sys/devices/system/cpu/online").ok()?)?;
    let before = sched_getaffinity(here).ok()?;
    let visit = |cpu: &usize| {
        let mut one = CpuSet::new();
        one.set(*cpu).and_then(|()| sched_setaffinity(here, &one)).ok()
    };
    let visited = if online.len() < FEW { online.iter().try_for_each(visit) } else { None };
    sched_setaffinity(here, &before).ok()?;
    visited
}

/// Returns the processors of a list as in sysfs, `0-3,8`.
fn processors(list: &str) -> Option<Vec<usize>> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    let ranges: Option<Vec<_>> = list.trim().split(',').map(range).collect();
    Some(ranges?.into_iter().flatten().collect())
}

/// Returns whether threads can take a processor from the handling of packets (PREEMPT_RT).
fn is_realtime() -> bool {
    static IS: OnceLock<bool> = OnceLock::new();
    *IS.get_or_init(|| fs::read_to_string("/sys/kernel/realtime").is_ok_and(|is| is.trim() == "1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors() {
        assert_eq!(processors("0\n"), Some(vec![0]));
        assert_eq!(processors("0-2,5,7-8\n"), Some(vec![0, 1, 2, 5, 7, 8]));
        assert_eq!(processors("\n"), None);
        assert_eq!(processors("a-b"), None);
    }

    #[test]
    fn the_thread_may_run_afterwards_where_it_might_before() {
        let before = sched_getaffinity(Pid::from_raw(0)).expect("affinity");
        await_packets().expect("waited");
        assert_eq!(sched_getaffinity(Pid::from_raw(0)).expect("affinity"), before);
    }
}
