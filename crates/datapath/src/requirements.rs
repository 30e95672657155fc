//! What the data path needs of the kernel and of the process: a version, and capabilities.

use std::fs;

/// The oldest supported kernel, as major and minor version: it introduced tcx links.
pub const OLDEST: (u32, u32) = (6, 6);

const RECORD: &str = include_str!("../bpf/kernels.toml");

/// Returns the releases of the kernels on which the tests have passed, oldest first, from the record of `make kernels`.
pub fn tested_kernels() -> Vec<&'static str> {
    RECORD.lines().filter_map(|l| l.strip_prefix("release = \"")?.strip_suffix('"')).collect()
}

/// Returns the release of the running kernel, and whether it is too old.
pub fn kernel_release() -> (String, bool) {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned();
    let old = is_too_old(&release);
    (release, old)
}

fn is_too_old(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let version = (|| Some((numbers.next()?.ok()?, numbers.next()?.ok()?)))();
    version.is_some_and(|v: (u32, u32)| v < OLDEST)
}

/// Returns the names of required capabilities that this process lacks.
pub fn missing_capabilities() -> Vec<&'static str> {
    // include/uapi/linux/capability.h
    const NEEDED: [(&str, u32); 3] = [("CAP_NET_ADMIN", 12), ("CAP_PERFMON", 38), ("CAP_BPF", 39)];
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let effective = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    NEEDED.iter().filter(|(_, bit)| effective >> bit & 1 == 0).map(|(name, _)| *name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        let old = ["6.1.0-56-cloud-amd64", "6.5.99", "5.10.0", "4.19"];
        let new = ["6.6.0", "6.12.95+deb12-cloud-amd64", "6.18.44", "7.0-rc1", "10.0", ""];
        assert!(old.iter().all(|r| is_too_old(r)) && !new.iter().any(|r| is_too_old(r)));
    }

    #[test]
    fn the_record_names_kernels() {
        let all = tested_kernels();
        assert!(all.len() >= 2 && !all.iter().any(|r| is_too_old(r)), "{all:?}");
    }
}
