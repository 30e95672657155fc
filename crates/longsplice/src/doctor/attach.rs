//! The attach test: load, attach and remove the programs without disturbing any traffic.

use super::{Check, CheckResult};
use longsplice_datapath::{Datapath, OpenError, Options};
use nix::{
    errno::Errno,
    sched::{CloneFlags, unshare},
};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{self, Command, Stdio},
    thread,
};

const NAME: &str = "tcx";

/// The result when the test cannot succeed and is skipped.
pub fn not_tried() -> Check {
    Check::new(NAME, CheckResult::Note, "not tried, because of what is missing above")
}

/// Loads and attaches in a network namespace that exists only as long as this function's thread.
pub fn attach() -> Check {
    let tried = thread::scope(|s| s.spawn(in_own_namespace).join());
    match tried {
        Ok(Ok(())) => Check::ok(NAME, "loaded, attached and removed in a namespace of its own"),
        Ok(Err(Trouble::Setting(why))) => Check::warning(NAME, format!("not tried: {}", why.what), why.cure),
        Ok(Err(Trouble::Kernel(e))) => Check::missing(NAME, e.to_string(), cure(&e)),
        Err(_) => Check::missing(NAME, "the attempt panicked", "report this, please"),
    }
}

fn cure(e: &OpenError) -> &'static str {
    match e {
        OpenError::Privilege => "a container or a security module may stand in the way of bpf(2): run outside of it",
        OpenError::NoBpffs(_) => "mount -t bpf bpf /sys/fs/bpf",
        OpenError::Pins { .. } => "see above",
        OpenError::TooOld(_) => "see above",
        OpenError::Refused { .. } => "boot one of the kernels that were tested, and report this with the log, please",
        OpenError::Lacks { .. } | OpenError::Kernel { .. } => {
            "boot a kernel with CONFIG_BPF_SYSCALL, CONFIG_BPF_JIT, CONFIG_NET_XGRESS and CONFIG_DEBUG_INFO_BTF"
        }
        OpenError::Abi { .. }
        | OpenError::Running(_)
        | OpenError::Attached(_)
        | OpenError::Foreign(_)
        | OpenError::Device(_)
        | OpenError::Stacked { .. }
        | OpenError::Xdp { .. }
        | OpenError::Peer { .. } => "report this, please",
    }
}

enum Trouble {
    /// The test environment could not be set up. This says nothing about splicing.
    Setting(Setting),
    Kernel(OpenError),
}

/// What could not be set up, and what to do about it.
struct Setting {
    what: String,
    cure: &'static str,
}

fn in_own_namespace() -> Result<(), Trouble> {
    const NO_RIGHT: &str =
        "run doctor as root to try it: a network namespace of its own needs CAP_SYS_ADMIN, splicing does not";
    let setting = |what: String, cure| Trouble::Setting(Setting { what, cure });
    unshare(CloneFlags::CLONE_NEWNET).map_err(|e| {
        let cure = if e == Errno::EPERM { NO_RIGHT } else { "CONFIG_NET_NS, or a higher user.max_net_namespaces" };
        setting(format!("network namespace: {e}"), cure)
    })?;
    for arguments in [&["link", "add", "ls0", "type", "veth", "peer", "name", "ls1"][..], &["link", "set", "ls0", "up"]]
    {
        // A child process inherits the namespace of the thread that starts it.
        let status = Command::new("ip").args(arguments).stderr(Stdio::null()).status();
        let status = status.map_err(|e| setting(format!("ip: {e}"), "install iproute2 to try it"))?;
        if !status.success() {
            let cure = "a kernel with veth devices (CONFIG_VETH), and a complete ip (iproute2)";
            return Err(setting(format!("ip {}: {status}", arguments.join(" ")), cure));
        }
    }
    let pins = Pins::new();
    let options =
        Options { devices: vec!["ls0".into()], pin: Some(pins.0.clone()), max_flows: 16, ..Options::default() };
    Datapath::open(&options.with_smallest_rings()).map(drop).map_err(Trouble::Kernel)
}

/// The pins of the test, removed on every exit path.
struct Pins(PathBuf);

impl Pins {
    fn new() -> Pins {
        Pins(Path::new("/sys/fs/bpf/longsplice").join(format!("doctor-{}", process::id())))
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        // The folder may not exist. A pin that stays is harmless, since its device is gone with the namespace.
        let _ = fs::remove_dir_all(&self.0);
    }
}
