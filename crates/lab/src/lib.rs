//! The lab: network namespaces, impaired links and checked traffic.
//!
//! Tests, bench and demo all stand on this crate, so that they speak about the same network:
//!
//! - [`topology`] makes client - forwarder - server out of network [`namespace`]s and veth,
//! - [`process`] runs programs in them and never leaves one behind,
//! - [`impair`] loses, duplicates, reorders and delays packets on a device, and counts what it did,
//! - [`traffic`] sends streams of which every byte is known, and reports what arrived,
//! - [`flood`] sends small packets over up to a million flows, and counts what arrives,
//! - [`trace`] taps a device and gives the sequence numbers that went by.
//!
//! Everything is bounded in time and cleaned up at drop, after a panic too; what a killed process left behind is
//! swept away by the next one ([`Lab::sweep`]). It needs root, and of Debian: iproute2, ethtool, util-linux, tcpdump.

mod delay;
pub mod error;
pub mod flood;
pub mod impair;
pub mod namespace;
pub mod pattern;
pub mod process;
pub mod topology;
pub mod trace;
pub mod traffic;

pub use error::LabError;
pub use impair::{Impair, Impaired, Impairment, LinkDirection};
pub use namespace::Namespace;
pub use process::ChildGuard;
pub use topology::{Family, InOrder, Lab, Options, Shape};
