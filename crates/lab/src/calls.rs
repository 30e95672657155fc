//! Counts the system calls of a process, without slowing it down much: a program at the kernel's entry counts them.

use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder};

const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/calls.bpf.o"));

mod places {
    include!(concat!(env!("OUT_DIR"), "/calls.rs"));
}

/// Counts while it lives.
#[derive(Debug)]
pub struct SystemCalls {
    calls: MapHandle,
    _link: Link,
    _object: Object,
}

impl SystemCalls {
    /// Starts to count the calls of a process, which must not be in a PID namespace.
    pub fn of(process: u32) -> libbpf_rs::Result<SystemCalls> {
        let mut object = ObjectBuilder::default().open_memory(PROGRAM)?.load()?;
        for map in object.maps_mut().filter(|map| map.name() == "process") {
            map.update(&places::CALLS_PROCESS.to_ne_bytes(), &u64::from(process).to_ne_bytes(), MapFlags::ANY)?;
        }
        let missing = || libbpf_rs::Error::from_raw_os_error(nix::libc::ENOENT);
        let calls = object.maps().find(|map| map.name() == "calls").ok_or_else(missing)?;
        let calls = MapHandle::try_from(&calls)?;
        let link = object.progs_mut().next().ok_or_else(missing)?.attach()?;
        Ok(SystemCalls { calls, _link: link, _object: object })
    }

    /// Returns how often each call was made so far. The index is its number (`SYS_bpf` and the like of the libc crate).
    pub fn so_far(&self) -> Vec<u64> {
        let count = |number: u32| {
            let count = self.calls.lookup(&number.to_ne_bytes(), MapFlags::ANY).ok().flatten();
            count.and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_ne_bytes)
        };
        (0..self.calls.max_entries()).map(count).collect()
    }
}
