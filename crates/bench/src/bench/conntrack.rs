//! Room for tracked connections. The hash table and the limit are the machine's, not a network namespace's: what is raised
//! here is put back.

use super::Result;
use longsplice_lab::Namespace;
use std::fs;

/// In the order in which they are raised.
const SETTINGS: [&str; 2] = ["nf_conntrack_buckets", "nf_conntrack_max"];

/// Raised settings, with what they were before.
pub struct Room(Vec<(&'static str, u64)>);

impl Room {
    /// For so many connections in this namespace, and a few of others. Why not, if it cannot be had.
    pub fn for_connections(host: &Namespace, connections: u32) -> Result<Room> {
        let wanted = u64::from(connections) + u64::from(connections) / 10 + 1000;
        let mut room = Room(Vec::new());
        for name in SETTINGS {
            let before = read(name)?;
            if before < wanted {
                write(name, wanted).map_err(|e| format!("{e}, which is {before}"))?;
                room.0.push((name, before));
            }
        }
        // Kernels that have a limit for each namespace apply the smaller one; others do not let this one be written.
        let limit = host.run(|| {
            let _ = write(SETTINGS[1], wanted);
            read(SETTINGS[1]).map_err(|e| e.to_string())
        })?;
        if limit < wanted {
            return Err(format!("{} is {limit} there", SETTINGS[1]).into());
        }
        Ok(room)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        for (name, before) in self.0.drain(..).rev() {
            // It was written before, and nobody waits for an answer any more.
            let _ = write(name, before);
        }
    }
}

/// How many connections are tracked in this namespace.
pub fn tracked(host: &Namespace) -> Result<u64> {
    Ok(host.run(|| read("nf_conntrack_count").map_err(|e| e.to_string()))?)
}

fn path(name: &str) -> String {
    format!("/proc/sys/net/netfilter/{name}")
}

fn read(name: &str) -> Result<u64> {
    let text = fs::read_to_string(path(name)).map_err(|e| format!("reading {name}: {e}"))?;
    Ok(text.trim().parse()?)
}

fn write(name: &str, value: u64) -> Result<()> {
    Ok(fs::write(path(name), value.to_string()).map_err(|e| format!("setting {name} to {value}: {e}"))?)
}
