//! Reasons why flows are not spliced, and counters of spliced and refused flows.

use longsplice_datapath::{Datapath, OpenError, SwitchError, Tuple};
use nix::libc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! refusals {
    ($($(#[$doc:meta])* $name:ident = $label:literal,)*) => {
        /// The reason why a flow stays in control mode. Counted and shown; not an error.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[non_exhaustive]
        pub enum Refusal {
            $($(#[$doc])* #[cfg_attr(feature = "serde", serde(rename = $label))] $name,)*
        }

        impl Refusal {
            /// All reasons.
            pub const ALL: &[Refusal] = &[$(Refusal::$name,)*];

            /// Returns the label used in logs, lists and counters.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Refusal::$name => $label,)*
                }
            }
        }
    };
}

refusals! {
    /// The policy forbids splicing.
    Policy = "policy",
    /// The flow ended before the policy's threshold.
    Short = "short",
    /// Privileges are missing, to load programs or to hold segments.
    /// `longsplice doctor` says more about this and the following reasons.
    Unprivileged = "unprivileged",
    /// The kernel is too old, or was built without a required option.
    Kernel = "kernel",
    /// The kernel's verifier rejects the programs.
    Verifier = "verifier",
    /// There is no bpffs for pins.
    NoBpffs = "no-bpffs",
    /// The directory of pins belongs to another user, or is not writable.
    Pins = "pins",
    /// Another process owns the data path of this network namespace.
    OtherProcess = "other-process",
    /// Another process has taken the data path over from this one, which only ends what it has.
    HandedOver = "handed-over",
    /// Pinned tables of another version hold flows.
    OtherVersion = "other-version",
    /// A device that was named cannot be used.
    Device = "device",
    /// The limit of open files is too low for the data path.
    Descriptors = "descriptors",
    /// The kernel did not have enough memory for the data path.
    Memory = "memory",
    /// The kernel refused another operation that should have succeeded.
    Failed = "failed",
    /// A leg runs over the loopback device, where no tcx program is attached: both of its ends are on this host.
    Loopback = "loopback",
    /// A leg runs over a device to which the data path is not attached.
    Unattached = "unattached",
    /// No segment of a leg was seen, or it was not tracked from its SYN on and was not adopted.
    Untracked = "untracked",
    /// NAT of this machine changes the addresses or ports of a leg: its packets on the device are not those of its socket.
    Nat = "nat",
    /// A leg received IP fragments, which the data path does not reassemble.
    /// A copied flow stays copied, and a spliced flow stays spliced.
    Fragments = "fragments",
    /// A connection was reset, or is closing in both directions.
    Closing = "closing",
    /// The buffers did not drain within [`Policy::drain_limit`](crate::Policy::drain_limit).
    DrainTimeout = "drain-timeout",
    /// A table of the data path is full.
    TableFull = "table-full",
    /// The tracker and the socket disagree. Never expected; splicing would not be safe.
    Mismatch = "mismatch",
    /// The sender's segments exceed the MTU of the other side, and the sender does not reduce them.
    Mtu = "mtu",
    /// The caller must read the whole stream.
    Filter = "filter",
    /// A sender is nearer to us than its receiver, so forwarding would
    /// slow its transfer down ([`PathRule::Within`](crate::PathRule::Within)).
    Path = "path",
    /// One leg is in a tunnel of IP in UDP, and the other one in one of IP in IP
    /// ([`TpotUdp`](longsplice_datapath::TpotUdp)): large packets cannot be moved from one to the other.
    Tunnels = "tunnels",
    /// One leg has negotiated timestamps or selective acknowledgements, the other has not. A host that
    /// has negotiated them relies on them, and nobody can make them up for a host without.
    Options = "options",
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Returns why the data path does not know these legs.
pub(crate) fn of_untracked(d: &Datapath, legs: &[Tuple]) -> Refusal {
    match () {
        () if legs.iter().any(|leg| d.found_no_room(leg)) => Refusal::TableFull,
        () if legs.iter().any(|leg| d.is_elsewhere(leg)) => Refusal::Unattached,
        () if legs.iter().any(|leg| d.is_translated(leg)) => Refusal::Nat,
        () => Refusal::Untracked,
    }
}

/// Why nothing is spliced when the data path could not be opened.
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
            SwitchError::Closing | SwitchError::Other => Refusal::Closing,
            SwitchError::Fragments => Refusal::Fragments,
            SwitchError::Mismatch => Refusal::Mismatch,
            SwitchError::Full => Refusal::TableFull,
            SwitchError::Options => Refusal::Options,
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

/// Counters of spliced flows and of refusals, for example those of one listener. Part of a [`Policy`](crate::Policy).
#[derive(Debug, Default)]
pub struct Tally {
    spliced: AtomicU64,
    refused: [AtomicU64; Refusal::ALL.len()],
}

impl Tally {
    /// Number of flows that were spliced, each counted once.
    pub fn spliced(&self) -> u64 {
        self.spliced.load(Relaxed)
    }

    /// For each reason, how often a flow was not spliced, or stayed spliced although it was to be taken back.
    pub fn refused(&self) -> impl Iterator<Item = (Refusal, u64)> {
        Refusal::ALL.iter().map(|why| (*why, self.refused[*why as usize].load(Relaxed)))
    }

    /// Counts a spliced flow.
    pub fn splice(&self) {
        self.spliced.fetch_add(1, Relaxed);
    }

    /// Counts a refusal.
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
