//! Limits of the whole machine that a measurement has to raise. They are restored afterwards.

use super::Result;
use longsplice_lab::Namespace;
use std::fs;

/// Number of tracked connections, below /proc/sys.
const TRACKED: &str = "net/netfilter/nf_conntrack_max";

/// The raised settings, and their previous values.
#[derive(Default)]
pub struct Raised(Vec<(&'static str, u64)>);

impl Raised {
    /// Raises a setting below /proc/sys, unless it is as large already. The error says why this failed.
    fn raise(&mut self, name: &'static str, wanted: u64) -> Result<()> {
        let before = read(name)?;
        if before < wanted {
            write(name, wanted).map_err(|e| format!("{e}, which is {before}"))?;
            self.0.push((name, before));
        }
        Ok(())
    }

    /// Makes room for this many tracked connections in this namespace, and a few of others. Table size and limit belong to the
    /// machine, not to a network namespace.
    pub fn for_tracked(host: &Namespace, connections: u32) -> Result<Raised> {
        let wanted = u64::from(connections) + u64::from(connections) / 10 + 1000;
        let mut raised = Raised::default();
        raised.raise("net/netfilter/nf_conntrack_buckets", wanted)?;
        raised.raise(TRACKED, wanted)?;
        // Kernels with a limit per namespace apply the smaller one; on others this setting cannot be written.
        let limit = host.run(|| {
            let _ = write(TRACKED, wanted);
            read(TRACKED).map_err(|e| e.to_string())
        })?;
        if limit < wanted { Err(format!("{TRACKED} is {limit} there").into()) } else { Ok(raised) }
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        for (name, before) in self.0.drain(..).rev() {
            // Writing it worked before, and no one can handle an error here.
            let _ = write(name, before);
        }
    }
}

/// Number of connections tracked in this namespace.
pub fn tracked(host: &Namespace) -> Result<u64> {
    Ok(host.run(|| read("net/netfilter/nf_conntrack_count").map_err(|e| e.to_string()))?)
}

fn read(name: &str) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/sys/{name}")).map_err(|e| format!("reading {name}: {e}"))?;
    Ok(text.trim().parse()?)
}

fn write(name: &str, value: u64) -> Result<()> {
    let written = fs::write(format!("/proc/sys/{name}"), value.to_string());
    Ok(written.map_err(|e| format!("setting {name} to {value}: {e}"))?)
}
