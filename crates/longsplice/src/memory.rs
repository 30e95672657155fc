//! Whether the memory that this process may use is enough for the data path. Where it is not, the kernel kills the process or
//! refuses a part of the tables, and neither says how much is needed.

use std::{fs, path::Path};

/// Memory for loading the programs, and what does not depend on the number of flows: 29 MB on two processors, more on others.
const BASE: u64 = 64 << 20;
/// Memory of the tables for each tracked flow: 1.23 KB were measured.
const PER_FLOW: u64 = 1300;

/// Warns if the memory of this process's control group is less than what the data path needs.
pub fn warn_if_small(max_flows: u32) {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let need = BASE + PER_FLOW * u64::from(max_flows);
    if let Some(limit) = limit(&groups, Path::new("/sys/fs/cgroup")).filter(|limit| *limit < need) {
        let [limit, need] = [limit, need].map(|bytes| bytes >> 20);
        tracing::warn!(
            "the control group of this process may use {limit} MB of memory, and tables for {max_flows} flows need about {need} \
             MB: raise its limit, or lower --max-flows"
        );
    }
}

/// Returns the least limit of the groups that the process is in, of either version. `groups`: /proc/self/cgroup.
fn limit(groups: &str, root: &Path) -> Option<u64> {
    let mut least: Option<u64> = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (base, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            of if of.split(',').any(|c| c == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => continue,
        };
        // In a container, the path may be that of the host, and the group itself is mounted at the root.
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            let said = fs::read_to_string(base.join(group).join(file)).unwrap_or_default();
            // "max", or a number of pages near 2^63, is no limit
            least = said.trim().parse().ok().into_iter().chain(least).min();
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let file = root.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        let of = |groups: &str| limit(groups, root.path());
        assert_eq!(of("0::/a/b\n"), None);
        write("a/b/memory.max", "max\n");
        assert_eq!(of("0::/a/b\n"), None);
        write("a/memory.max", "50000000\n");
        assert_eq!(of("0::/a/b\n"), Some(50_000_000), "of the group above");
        write("a/b/memory.max", "40000000\n");
        assert_eq!(of("0::/a/b\n"), Some(40_000_000));
        write("memory/c/memory.limit_in_bytes", "30000000\n");
        write("memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(of("12:cpu:/x\n4:memory:/c\n0::/a\n"), Some(30_000_000));
        assert_eq!(of("4:hugetlb,memory:/of/the/host\n"), Some(9_223_372_036_854_771_712));
        assert_eq!(of(""), None);
    }
}
