//! Checks that only read the state of the machine.

use super::{Check, CheckResult};
use crate::paths;
use longsplice_datapath::{Device, Repair, Sockets};
use longsplice_engine::OpenOptions;
use nix::{
    fcntl::{Flock, FlockArg},
    libc,
    sys::{
        resource::{Resource, getrlimit},
        socket::{AddressFamily, SockFlag, SockType, socket},
        statfs::{BPF_FS_MAGIC, statfs},
    },
    unistd::{AccessFlags, access},
};
use std::{fs, io, ops::RangeInclusive, path::Path};

/// Runs all checks, in the order in which problems should be corrected. `configured`: devices and
/// ports are those of a configuration file, and checked with it.
pub fn all(configured: bool) -> Vec<Check> {
    let mut checks = vec![kernel(), btf(), bpffs(), capabilities(), repair(), sockets(), guard()];
    checks.extend(devices(configured));
    checks.extend(longsplice_datapath::devices().unwrap_or_default().iter().flat_map(offloads)); // devices() names the error
    if !configured {
        checks.push(source_ports_of(&OpenOptions::default().source_ports));
    }
    checks.extend([descriptors(), conntrack(), pinned()]);
    checks
}

fn read(path: &str) -> io::Result<String> {
    Ok(fs::read_to_string(path)?.trim().to_owned())
}

fn kernel() -> Check {
    let (release, old) = longsplice_datapath::kernel_release();
    let tested = longsplice_datapath::tested_kernels().join(", ");
    if old {
        let ((a, b), cure) = (longsplice_datapath::OLDEST, "Debian 12 has a newer one in bookworm-backports");
        Check::missing("kernel", format!("Linux {release} is too old: splicing needs {a}.{b} or newer"), cure)
    } else if release.is_empty() {
        Check::warning("kernel", "not known: cannot read /proc/sys/kernel/osrelease", "mount /proc")
    } else {
        Check::ok("kernel", format!("{release} (tested: {tested})"))
    }
}

fn btf() -> Check {
    const BTF: &str = "/sys/kernel/btf/vmlinux";
    if Path::new(BTF).exists() {
        Check::ok("BTF", BTF)
    } else {
        Check::missing("BTF", format!("no {BTF}"), "boot a kernel with CONFIG_DEBUG_INFO_BTF=y")
    }
}

fn bpffs() -> Check {
    const BPFFS: &str = "/sys/fs/bpf";
    match statfs(BPFFS) {
        Ok(system) if system.filesystem_type() == BPF_FS_MAGIC => Check::ok("bpffs", BPFFS),
        Ok(_) => Check::missing("bpffs", format!("not mounted at {BPFFS}"), format!("mount -t bpf bpf {BPFFS}")),
        Err(e) => {
            let cure = format!("mount -t sysfs sysfs /sys, and mount -t bpf bpf {BPFFS}");
            Check::missing("bpffs", format!("{BPFFS}: {e}"), cure)
        }
    }
}

fn capabilities() -> Check {
    let lacking = longsplice_datapath::missing_capabilities();
    if lacking.is_empty() {
        Check::ok("capabilities", "CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON")
    } else {
        let cure = "run as root, or with AmbientCapabilities=CAP_BPF CAP_NET_ADMIN CAP_PERFMON in a systemd unit";
        Check::missing("capabilities", format!("without {}", lacking.join(", ")), cure)
    }
}

/// TCP_REPAIR: needed to close parked sockets silently.
fn repair() -> Check {
    let tried = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)
        .map_err(io::Error::from)
        .and_then(|s| Repair::On.set(&s).and_then(|()| Repair::Off.set(&s)));
    match tried {
        Ok(()) => Check::ok("TCP_REPAIR", "permitted"),
        Err(e) => {
            let cure = "needs CAP_NET_ADMIN in the user namespace that owns this network namespace";
            Check::missing("TCP_REPAIR", e.to_string(), cure)
        }
    }
}

fn devices(configured: bool) -> Vec<Check> {
    let all = match longsplice_datapath::devices() {
        Ok(all) => all,
        Err(e) => {
            let cure =
                "something keeps this process from rtnetlink: see RestrictAddressFamilies (AF_NETLINK) or seccomp";
            return vec![Check::missing("devices", format!("cannot be listed: {e}"), cure)];
        }
    };
    let usable = all.iter().filter(|d| d.ethernet && d.up).count();
    let mut checks: Vec<Check> = all
        .iter()
        .map(|d| {
            let state = if d.ethernet && d.up { CheckResult::Ok } else { CheckResult::Note };
            let link = if d.ethernet { "Ethernet" } else { "not Ethernet: connections over it are copied" };
            let up = if d.up { "up" } else { "down" };
            Check::new("device", state, format!("{}: {link}, {up}", d.name))
        })
        .collect();
    if usable == 0 && !configured {
        checks.push(Check::missing("devices", "no Ethernet device is up", "ip link set DEVICE up"));
    }
    checks
}

/// What a device does to the packets that it gives us (docs/forwarding.md, Offloads).
fn offloads(device: &Device) -> Vec<Check> {
    const NAME: &str = "offloads";
    /// Longest packet without BIG TCP, in bytes.
    const USUAL: u32 = 65536;
    let Device { name, index, largest, .. } = device;
    if !device.ethernet || !device.up {
        return Vec::new();
    }
    let features = match longsplice_datapath::features(*index) {
        Ok(features) => features,
        Err(e) => return vec![Check::new(NAME, CheckResult::Note, format!("{name}: unknown: {e}"))],
    };
    let has = |feature: &str| features.iter().any(|f| f == feature);
    let mut checks = Vec::new();
    if has(longsplice_datapath::LISTS) {
        let found = format!("{name}: segments are joined in lists, which have to be copied to forward them");
        checks.push(Check::warning(NAME, found, format!("ethtool -K {name} rx-gro-list off")));
    }
    if has(longsplice_datapath::LRO) {
        let found = format!("{name}: large receive offload is on; `longsplice run` switches it off, as routing does");
        checks.push(Check::new(NAME, CheckResult::Note, found));
    }
    if *largest > USUAL {
        checks.push(Check::ok(NAME, format!("{name}: packets of up to {largest} bytes (BIG TCP), forwarded whole")));
    }
    checks
}

const PORTS: &str = "/proc/sys/net/ipv4/ip_local_port_range";
const APART: &str =
    "set source_ports in the configuration, or net.ipv4.ip_local_port_range, so that they do not overlap";

/// The kernel's range of ephemeral ports.
fn kernel_ports() -> io::Result<RangeInclusive<u16>> {
    let text = read(PORTS)?;
    let mut numbers = text.split_whitespace().map(str::parse);
    let range = (|| Some(numbers.next()?.ok()?..=numbers.next()?.ok()?))();
    range.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn overlap(kernel: &RangeInclusive<u16>, ours: &RangeInclusive<u16>) -> bool {
    kernel.start() <= ours.end() && ours.start() <= kernel.end()
}

/// A warning if the kernel's ephemeral range overlaps ours, or if nobody knows. A port used by both leads to four-tuple collisions.
pub fn warn_of_shared_ports(ours: &RangeInclusive<u16>) -> Option<String> {
    match kernel_ports() {
        Err(e) => Some(format!("whether the kernel gives source_ports to others is not known: {PORTS}: {e}")),
        Ok(kernel) => overlap(&kernel, ours).then(|| {
            let (first, last) = (kernel.start(), kernel.end());
            format!("the kernel gives ports {first}-{last} to others, and some of source_ports are among them: {APART}")
        }),
    }
}

/// Whether these ports are the kernel's as well.
pub fn source_ports_of(ours: &RangeInclusive<u16>) -> Check {
    let kernel = match kernel_ports() {
        Ok(kernel) => kernel,
        Err(e) => {
            return Check::warning(
                "source ports",
                format!("not compared with the kernel's: {PORTS}: {e}"),
                "mount /proc",
            );
        }
    };
    let found = format!("ours {}-{}, the kernel's {}-{}", ours.start(), ours.end(), kernel.start(), kernel.end());
    match overlap(&kernel, ours) {
        false => Check::ok("source ports", found),
        true => Check::warning("source ports", found, APART),
    }
}

/// File descriptors. A copied connection needs two, and four more for pipes
/// if it will never be spliced; a parked one needs two, a released one none.
fn descriptors() -> Check {
    /// Enough for the default limit of flows, none of them released, and some for the program itself.
    const ENOUGH: u64 = 2 * 65536 + 64;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((0, 0));
    let found =
        format!("{hard}: {} connections at a time, beside those that are released", hard.saturating_sub(64) / 2);
    if hard >= ENOUGH {
        Check::ok("open files", found)
    } else {
        Check::warning("open files", found, format!("ulimit -Hn {ENOUGH}, or LimitNOFILE={ENOUGH} in a systemd unit"))
    }
}

/// sock_diag: records of failed handshakes are removed once the kernel has no socket for them.
fn sockets() -> Check {
    match Sockets::open() {
        Ok(_) => Check::ok("sockets", "the kernel tells of them"),
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => {
            Check::warning("sockets", format!("not checked: {e}"), "needs CAP_NET_ADMIN, as splicing does")
        }
        Err(e) => {
            let cure = "CONFIG_INET_DIAG and a loopback device that is up, or failed handshakes fill the tables";
            Check::warning("sockets", e.to_string(), cure)
        }
    }
}

/// The netfilter guard: catches segments of spliced connections
/// that arrive on a device before the programs are attached to it.
fn guard() -> Check {
    if longsplice_datapath::has_guard() {
        return Check::ok("guard", "netfilter runs programs");
    }
    // the kernel refuses an attempt without them, whatever it can do
    let lacking = longsplice_datapath::missing_capabilities();
    if !lacking.is_empty() {
        return Check::new("guard", CheckResult::Note, format!("not checked: without {}", lacking.join(", ")));
    }
    let cure = "CONFIG_NETFILTER_BPF_LINK, or connections may be reset when a device is recreated";
    Check::warning("guard", "netfilter runs no programs", cure)
}

/// Conntrack. Spliced segments bypass it, and after an unsplice they reach sockets behind a firewall that may rely on it.
fn conntrack() -> Check {
    const NAME: &str = "conntrack";
    match longsplice_datapath::conntrack() {
        Ok(None) => Check::ok(NAME, "tracks nothing in this network namespace"),
        Ok(Some(n)) => {
            Check::ok(NAME, format!("tracks {n} connections: renewed for those that were spliced and are taken back"))
        }
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => {
            Check::warning(NAME, format!("in use; not checked: {e}"), "needs CAP_NET_ADMIN, as splicing does")
        }
        Err(e) => {
            let cure = "CONFIG_NF_CT_NETLINK (nf_conntrack_netlink), or see docs/firewalls.md";
            Check::warning(NAME, format!("in use, and cannot be told of connections that are taken back: {e}"), cure)
        }
    }
}

/// Pins in this network namespace, and whether this user may access them.
fn pinned() -> Check {
    const NAME: &str = "data path";
    let pin = match paths::own_pin_folder() {
        Ok(pin) => pin,
        Err(e) => return Check::warning(NAME, e.to_string(), "mount /proc"),
    };
    let other = match longsplice_datapath::other_datapath() {
        Ok(None) => None,
        Ok(Some(device)) => {
            let cure = "run one of them only, or each in a network namespace of its own";
            let found = format!(
                "another one is attached to {device}, pinned where it is not seen from here: another would copy"
            );
            return Check::warning(NAME, found, cure);
        }
        Err(e) => Some(format!("; whether another is attached that is pinned elsewhere is not known: {e}")),
    };
    let nearest = pin.ancestors().find(|dir| fs::exists(dir).unwrap_or(false)).unwrap_or(Path::new("/"));
    if access(nearest, AccessFlags::W_OK | AccessFlags::X_OK).is_err() {
        let cure =
            "as root, for this user: mkdir -p -m 700 /sys/fs/bpf/longsplice, chown it, and chmod a+x /sys/fs/bpf";
        return Check::missing(NAME, format!("cannot be pinned: no right to write {}", nearest.display()), cure);
    }
    let found = match fs::File::open(&pin).map(|folder| Flock::lock(folder, FlockArg::LockExclusiveNonblock)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => "not loaded in this network namespace".to_owned(),
        Err(e) => format!("cannot look at {}: {e}", pin.display()),
        Ok(Ok(_)) => format!("pinned at {}, left by a process that is gone", pin.display()),
        Ok(Err(_)) => format!("pinned at {}, by a process that runs: another would copy", pin.display()),
    };
    Check::new(NAME, CheckResult::Note, found + other.as_deref().unwrap_or_default())
}
