//! Raises the limits of connection tracking. Table size and limit belong to
//! the machine, not to a network namespace, so they are restored afterwards.

use super::Result;
use longsplice_lab::Namespace;
use std::fs;

/// The settings, in the order in which they are raised.
const SETTINGS: [&str; 2] = ["nf_conntrack_buckets", "nf_conntrack_max"];

/// The raised settings and their previous values.
pub struct Room(Vec<(&'static str, u64)>);

impl Room {
    /// Makes room for this many connections in this namespace, and a few of others. The error says why this failed.
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
        // Kernels with a limit per namespace apply the smaller one; on others this setting cannot be written.
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
            // Writing it worked before, and no one can handle an error here.
            let _ = write(name, before);
        }
    }
}

/// Number of connections tracked in this namespace.
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
