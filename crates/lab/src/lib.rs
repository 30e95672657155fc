//! The lab: network namespaces, impaired links and checked traffic.
//!
//! Tests, bench and demo are all built on this crate, so that they run on the same network:
//!
//! - [`topology`] builds client - forwarder - server from network [`namespace`]s and veth,
//! - [`process`] runs programs in them and leaves none behind,
//! - [`report`] shows what a failed test had, even if it hangs,
//! - [`impair`] loses, duplicates, reorders and delays packets on a device, and counts them,
//! - [`traffic`] sends streams whose bytes are all known, and reports what arrived,
//! - [`flood`] sends small packets over up to a million flows, and counts the arrivals,
//! - [`calls`] counts the system calls of a process,
//! - [`trace`] captures on a device and returns the sequence numbers seen.
//!
//! Every operation has a time limit, and everything is cleaned up on drop, even after a
//! panic; the remains of a killed process are removed by the next one ([`Lab::sweep`]).
//! Root is required, and the Debian packages iproute2, ethtool, util-linux and tcpdump.

pub mod calls;
mod delay;
pub mod error;
pub mod flood;
pub mod impair;
mod listeners;
pub mod namespace;
pub mod pattern;
pub mod process;
pub mod report;
pub mod topology;
pub mod trace;
pub mod traffic;

pub use error::LabError;
pub use impair::{Impair, Impaired, Impairment, LinkDirection};
pub use namespace::Namespace;
pub use process::ChildGuard;
pub use report::Report;
pub use topology::{Family, InOrder, Lab, Options, Shape};
