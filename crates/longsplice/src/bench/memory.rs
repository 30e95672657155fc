//! Memory: what the data path's tables take, as the kernel accounts for them, and what a process holds for connections
//! that do nothing.

use super::{
    Bench, Result,
    results::{Memory, Process, Table},
    venue::{Packets, Variant, Venue},
};
use crate::paths;
use libbpf_rs::MapHandle;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::{
    fs,
    os::fd::{AsFd, AsRawFd},
    path::Path,
    thread,
    time::Duration,
};

/// Held at the same time: enough that what the process needs anyway does not count.
const CONNECTIONS: usize = 2000;
/// Opened and closed before: code is paged in, and arenas are made.
const FIRST: usize = 50;
/// Closing takes its time, and allocators give back late.
const REST: Duration = Duration::from_millis(500);

/// Tables and processes.
pub fn measure(bench: &Bench) -> Result<Memory> {
    // Both ends of all connections are ours.
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    let mut tables = Vec::new();
    let mut processes = Vec::new();
    for variant in Variant::PROXIES.into_iter().filter(|v| bench.has(*v)) {
        bench.check()?;
        let venue = Venue::set(variant, Packets::Large)?;
        if variant == Variant::Spliced {
            tables = ["paths4", "paths6", "legs"].into_iter().map(|name| table(&venue, name)).collect::<Result<_>>()?;
        }
        let process = process(&venue)?;
        bench.say(&format!("memory: {variant} {:.0} bytes per connection", process.per_connection));
        processes.push(process);
    }
    let per = |name: &str| tables.iter().find(|t: &&Table| t.name == name).map_or(0.0, |t| t.per_entry);
    let released_flow = 2.0 * per("paths4");
    let parked_flow = released_flow + 2.0 * per("legs");
    Ok(Memory { connections: CONNECTIONS, tables, released_flow, parked_flow, processes })
}

/// `memlock` of a pinned map is what it has allocated.
fn table(venue: &Venue, name: &str) -> Result<Table> {
    let pin = paths::pin_folder(paths::netns_inode(&venue.lab.forwarder.path())?);
    let map = MapHandle::from_pinned_path(pin.join(name)).map_err(|e| format!("pinned map {name}: {e}"))?;
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", map.as_fd().as_raw_fd()))?;
    let of = |field: &str| number(&info, field).ok_or_else(|| format!("{name}: no {field} in fdinfo"));
    let (entries, bytes) = (of("max_entries")?, of("memlock")?);
    Ok(Table { name: name.to_owned(), entries, bytes, per_entry: bytes as f64 / entries.max(1) as f64 })
}

fn process(venue: &Venue) -> Result<Process> {
    let pid = venue.pid().ok_or("no proxy")?;
    drop(venue.connect(FIRST)?);
    thread::sleep(REST);
    let before = resident(pid)?;
    let held = venue.connect(CONNECTIONS)?;
    thread::sleep(REST);
    let after = resident(pid)?;
    drop(held);
    let per_connection = after.saturating_sub(before) as f64 / CONNECTIONS as f64;
    Ok(Process { variant: venue.variant, before, after, per_connection })
}

/// Bytes of a process that are in memory.
pub fn resident(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("status"))?;
    let kilobytes = number(&status, "VmRSS").ok_or("no VmRSS in /proc/PID/status")?;
    Ok(kilobytes * 1024)
}

/// The number after `name:`.
pub fn number(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_proc_files() {
        let info = "pos:\t0\nmap_type:\t1\nmax_entries:\t131072\nmemlock:\t15990784\n";
        assert_eq!((number(info, "max_entries"), number(info, "memlock")), (Some(131_072), Some(15_990_784)));
        assert_eq!(number(info, "frozen"), None);
        assert_eq!(number("VmRSS:\t    5120 kB\n", "VmRSS"), Some(5120));
    }
}
