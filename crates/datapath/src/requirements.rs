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

/// Bits of capabilities (include/uapi/linux/capability.h).
const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

/// Returns the names of required capabilities that this process lacks.
pub fn missing_capabilities() -> Vec<&'static str> {
    missing_of(effective_capabilities())
}

fn missing_of(effective: u64) -> Vec<&'static str> {
    const NEEDED: [(&str, u32); 3] =
        [("CAP_NET_ADMIN", CAP_NET_ADMIN), ("CAP_PERFMON", CAP_PERFMON), ("CAP_BPF", CAP_BPF)];
    let has = |bit: u32| effective >> bit & 1 != 0;
    // the kernel takes CAP_SYS_ADMIN instead of these, as before they were split from it
    let stands_in = |bit: u32| [CAP_PERFMON, CAP_BPF].contains(&bit) && has(CAP_SYS_ADMIN);
    NEEDED.iter().filter(|(_, bit)| !has(*bit) && !stands_in(*bit)).map(|(name, _)| *name).collect()
}

/// Returns whether this process has CAP_NET_RAW, which transparent and translucent connections and held segments need.
pub fn has_raw_sockets() -> bool {
    const CAP_NET_RAW: u32 = 13;
    effective_capabilities() >> CAP_NET_RAW & 1 != 0
}

fn effective_capabilities() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0)
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
    fn what_the_kernel_takes_instead_is_enough() {
        let bits = |all: &[u32]| all.iter().fold(0, |bits, bit| bits | 1u64 << bit);
        assert_eq!(missing_of(0), ["CAP_NET_ADMIN", "CAP_PERFMON", "CAP_BPF"]);
        assert_eq!(missing_of(bits(&[CAP_SYS_ADMIN])), ["CAP_NET_ADMIN"]);
        assert!(missing_of(bits(&[CAP_SYS_ADMIN, CAP_NET_ADMIN])).is_empty());
        assert!(missing_of(bits(&[CAP_NET_ADMIN, CAP_PERFMON, CAP_BPF])).is_empty());
    }

    #[test]
    fn the_record_names_kernels() {
        let all = tested_kernels();
        assert!(all.len() >= 2 && !all.iter().any(|r| is_too_old(r)), "{all:?}");
    }
}
