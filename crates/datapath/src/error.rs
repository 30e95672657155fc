//! Reasons why the data path cannot be opened.

use crate::{
    abi_id::AbiId,
    requirements::{OLDEST, missing_capabilities, tested_kernels},
    tables::maps::errno,
    tables::pinned::Holdings,
};
use nix::libc;
use std::{fmt, io, path::PathBuf};

/// Reasons why the data path cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Privileges are missing: root, or CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON.
    #[error("no privilege to load programs, {}: run as root or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON", lacking())]
    Privilege,
    /// The kernel is too old for the programs.
    #[error("Linux {0} is too old: splicing needs {major}.{minor} or newer", major = OLDEST.0, minor = OLDEST.1)]
    TooOld(String),
    /// The kernel is new enough, but its verifier rejects a program. This is a bug of longsplice.
    #[error("the verifier of Linux {release} refuses the program `{program}`: {why} ({log}; tested: {})",
        tested_kernels().join(", "))]
    Refused {
        /// Release of the kernel.
        release: String,
        /// Name of the program.
        program: String,
        /// The last line of the verifier's log.
        why: String,
        /// The complete log.
        log: VerifierLog,
    },
    /// The kernel was built without a required feature.
    #[error("Linux {release} lacks what the programs need: {what} ({log})")]
    Lacks {
        /// Release of the kernel.
        release: String,
        /// The missing feature, as the kernel or the library names it.
        what: String,
        /// The complete log.
        log: VerifierLog,
    },
    /// There is no bpffs.
    #[error("no bpffs at {0}: mount -t bpf bpf /sys/fs/bpf")]
    NoBpffs(PathBuf),
    /// Another version has pinned its maps, and they are not empty.
    #[error(
        "{path} has ABI version {found}, and this program {ours}: it holds {held}; run the program that made it until they have \
         ended, or end them with `longsplice stop --flush`",
        ours = AbiId::OURS
    )]
    Abi {
        /// The directory of pins.
        path: PathBuf,
        /// The ABI found.
        found: AbiId,
        /// What would be lost if the pins were removed.
        held: Holdings,
    },
    /// Another process of this network namespace holds the lock of the pins.
    #[error("another process runs the data path of this network namespace (it has locked {0})")]
    Running(PathBuf),
    /// A process of this network namespace, running or dead, has pinned a data path elsewhere.
    #[error(
        "another data path is attached to device {0} of this network namespace, pinned in a bpffs that is not seen from here"
    )]
    Attached(String),
    /// The directory of pins cannot be created.
    #[error("{path}: {source}: pins need a folder of a bpffs that this user may write: make {folder} for it as root, and chown it",
        folder = path.parent().unwrap_or(path).display())]
    Pins {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Another user has created the directory of pins.
    #[error("{0} belongs to another user: remove it")]
    Foreign(PathBuf),
    /// A device that was named does not exist, or is not an Ethernet device.
    #[error("device {0}: not found, or no Ethernet device")]
    Device(String),
    /// Two devices were named of which one carries the other's packets as well.
    #[error("packets of {upper} pass {lower} as well, and would be handled twice: name one of these devices")]
    Stacked {
        /// The port of a bridge or bond, or the device below a macvlan.
        lower: String,
        /// The bridge, bond or macvlan.
        upper: String,
    },
    /// XDP was requested on a device that does not support it.
    #[error("device {device}: cannot attach XDP: {why}")]
    Xdp {
        /// The device.
        device: String,
        /// The reason, and what to do about it.
        why: &'static str,
    },
    /// Delivery to the peer was requested on a device that does not support it.
    #[error("device {device}: packets cannot be handed to its other end: {why}")]
    Peer {
        /// The device.
        device: String,
        /// The reason, and what to do about it.
        why: &'static str,
    },
    /// The kernel refused an operation that should have succeeded.
    #[error("{what}: {source}")]
    Kernel {
        /// The operation.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl OpenError {
    /// Returns whether a wrong device was named: only a change of the options helps.
    pub fn is_mistake(&self) -> bool {
        matches!(self, OpenError::Device(_) | OpenError::Xdp { .. } | OpenError::Peer { .. })
    }
}

/// Describes the missing privileges.
fn lacking() -> String {
    match missing_capabilities() {
        none if none.is_empty() => {
            "though no capability is missing (a container or a security module may forbid it)".into()
        }
        some => format!("without {}", some.join(", ")),
    }
}

/// Converts an error of a system call: the operation `what` failed.
pub(crate) fn system(what: &'static str) -> impl FnOnce(io::Error) -> OpenError {
    move |source| OpenError::Kernel { what, source }
}

/// Converts an error of the library: the kernel refused the operation `what`.
pub(crate) fn kernel(what: &'static str) -> impl FnOnce(libbpf_rs::Error) -> OpenError {
    move |e| refused(what, errno(&e))
}

/// Converts an error number of the kernel.
pub(crate) fn refused(what: &'static str, errno: i32) -> OpenError {
    match errno {
        libc::EPERM => OpenError::Privilege,
        libc::EACCES if !nix::unistd::Uid::effective().is_root() => OpenError::Privilege,
        n => OpenError::Kernel { what, source: io::Error::from_raw_os_error(n) },
    }
}

/// The log of the verifier and the library from a failed load.
#[derive(Debug)]
pub enum VerifierLog {
    /// It was written to this file.
    Written(PathBuf),
    /// It could not be written.
    Lost {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
}

impl fmt::Display for VerifierLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VerifierLog::Written(path) => write!(f, "log in {}", path.display()),
            VerifierLog::Lost { path, error } => write!(f, "log not kept: {}: {error}", path.display()),
        }
    }
}
