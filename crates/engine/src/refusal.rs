//! Why flows are not spliced, by name, and how many were and were not.

use crate::OpenError;
use longsplice_datapath::{Datapath, SwitchError, Tuple};
use nix::libc;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! refusals {
    ($($(#[$doc:meta])* $name:ident = $label:literal,)*) => {
        /// Why a flow stays in control mode. Counted and shown; not an error.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[non_exhaustive]
        pub enum Refusal {
            $($(#[$doc])* #[serde(rename = $label)] $name,)*
        }

        impl Refusal {
            /// All there are.
            pub const ALL: &[Refusal] = &[$(Refusal::$name,)*];

            /// The label used in logs, lists and counters.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Refusal::$name => $label,)*
                }
            }
        }
    };
}

refusals! {
    /// The policy says never.
    Policy = "policy",
    /// The flow ended before the policy's threshold.
    Short = "short",
    /// Rights are missing: to load programs, or to hold segments. See `longsplice doctor`, for the following as well.
    Unprivileged = "unprivileged",
    /// The kernel is too old, or was built without something.
    Kernel = "kernel",
    /// The kernel's verifier does not accept the programs.
    Verifier = "verifier",
    /// There is no bpffs to pin to.
    NoBpffs = "no-bpffs",
    /// The folder of pins belongs to another user, or may not be written.
    Pins = "pins",
    /// Another process has the data path of this network namespace.
    OtherProcess = "other-process",
    /// Tables of another version are there, and hold flows.
    OtherVersion = "other-version",
    /// A device that was named cannot be used.
    Device = "device",
    /// The limit of open files does not suffice for the data path.
    Descriptors = "descriptors",
    /// The kernel had no memory for the data path.
    Memory = "memory",
    /// The kernel refused something else that it should have done.
    Failed = "failed",
    /// A leg runs over the loopback device, where no tcx program is attached: its two ends are on this host.
    Loopback = "loopback",
    /// A leg runs over a device that the data path is not attached to.
    Unattached = "unattached",
    /// A leg was not seen from its SYN on.
    Untracked = "untracked",
    /// A leg received IP fragments, which the data path does not reassemble: a flow that is copied stays so, and one that is
    /// spliced too.
    Fragments = "fragments",
    /// A connection was already reset or is closing in both directions.
    Closing = "closing",
    /// The buffers did not drain within [`Policy::drain_limit`](crate::Policy::drain_limit).
    DrainTimeout = "drain-timeout",
    /// A table of the data path is full.
    TableFull = "table-full",
    /// Tracker and socket disagree: never expected; splicing would not be safe.
    Mismatch = "mismatch",
    /// Segments of the sender do not fit the other side's MTU, and the sender ignores it.
    Mtu = "mtu",
    /// Whoever uses the engine has to read all of it.
    Filter = "filter",
    /// A sender is nearer to us than its receiver: forwarded, its transfer would be slower
    /// ([`PathRule::Auto`](crate::PathRule::Auto)).
    Path = "path",
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Why legs are not known to the data path.
pub(crate) fn of_untracked(d: &Datapath, legs: &[Tuple]) -> Refusal {
    match () {
        () if legs.iter().any(|leg| d.found_no_room(leg)) => Refusal::TableFull,
        () if legs.iter().any(|leg| d.is_elsewhere(leg)) => Refusal::Unattached,
        () => Refusal::Untracked,
    }
}

/// Why nothing is spliced, if the data path could not be opened.
impl From<&OpenError> for Refusal {
    fn from(e: &OpenError) -> Refusal {
        match e {
            OpenError::Privilege => Refusal::Unprivileged,
            OpenError::TooOld(_) | OpenError::Lacks { .. } => Refusal::Kernel,
            OpenError::Refused { .. } => Refusal::Verifier,
            OpenError::NoBpffs(_) => Refusal::NoBpffs,
            OpenError::Pins { .. } | OpenError::Foreign(_) => Refusal::Pins,
            OpenError::Running(_) | OpenError::Attached(_) => Refusal::OtherProcess,
            OpenError::Abi { .. } => Refusal::OtherVersion,
            OpenError::Device(_) | OpenError::Stacked { .. } | OpenError::Xdp { .. } | OpenError::Peer { .. } => {
                Refusal::Device
            }
            OpenError::Kernel { source, .. } => of_errno(source.raw_os_error()),
        }
    }
}

impl From<SwitchError> for Refusal {
    fn from(e: SwitchError) -> Refusal {
        match e {
            SwitchError::Untracked => Refusal::Untracked,
            SwitchError::Busy | SwitchError::Window | SwitchError::Silent => Refusal::DrainTimeout,
            SwitchError::Short => Refusal::Short,
            SwitchError::Closing => Refusal::Closing,
            SwitchError::Fragments => Refusal::Fragments,
            SwitchError::Mismatch => Refusal::Mismatch,
            SwitchError::Full => Refusal::TableFull,
            SwitchError::Run(errno) => of_errno(Some(errno)),
        }
    }
}

pub(crate) fn of_errno(errno: Option<i32>) -> Refusal {
    match errno {
        Some(libc::EMFILE | libc::ENFILE) => Refusal::Descriptors,
        Some(libc::ENOMEM) => Refusal::Memory,
        _ => Refusal::Failed,
    }
}

/// How many flows were spliced, and why others were not: of one listener, say, whose policy has it.
#[derive(Debug, Default)]
pub struct Tally {
    spliced: AtomicU64,
    refused: [AtomicU64; Refusal::ALL.len()],
}

impl Tally {
    /// Flows that were spliced, each once.
    pub fn spliced(&self) -> u64 {
        self.spliced.load(Relaxed)
    }

    /// How often a flow was not, or stayed spliced when it was to be taken back, by reason.
    pub fn refused(&self) -> impl Iterator<Item = (Refusal, u64)> {
        Refusal::ALL.iter().map(|why| (*why, self.refused[*why as usize].load(Relaxed)))
    }

    /// Counts one that was spliced.
    pub fn splice(&self) {
        self.spliced.fetch_add(1, Relaxed);
    }

    /// Counts one that was not.
    pub fn refuse(&self, why: Refusal) {
        self.refused[why as usize].fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_counted_each_by_its_name() {
        let tally = Tally::default();
        Refusal::ALL.iter().enumerate().for_each(|(n, why)| (0..n).for_each(|_| tally.refuse(*why)));
        assert!(tally.refused().map(|(_, n)| n).eq(0..Refusal::ALL.len() as u64));
        let mut labels: Vec<_> = Refusal::ALL.iter().map(|why| why.as_str()).collect();
        labels.sort_unstable();
        labels.dedup();
        assert_eq!(labels.len(), Refusal::ALL.len());
    }

    #[test]
    fn the_kernels_answers_have_names() {
        let refusal = |errno| {
            Refusal::from(&OpenError::Kernel { what: "maps", source: std::io::Error::from_raw_os_error(errno) })
        };
        let all = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EIO].map(refusal);
        assert_eq!(all, [Refusal::Descriptors, Refusal::Descriptors, Refusal::Memory, Refusal::Failed]);
    }
}
