//! Splice and unsplice: the state machine of a flow (`relay`) and the handle through which a proxy uses it ([`Splicer`]).
//!
//! # Order of calls
//! 1. [`Splicer::open`] once per process; [`Splicer::copying`] where the kernel path is not to be had.
//! 2. [`Splicer::listen`] for the client's side, [`Splicer::connect`] for the server's: connections made through
//!    these two are tracked from their SYN on, which is what makes a splice at any later moment possible.
//! 3. Read and write both [`Leg`]s as ordinary asynchronous streams: control mode. Whoever wants a copy of all that passes one,
//!    spliced or not, gives it a [`Tap`] first.
//! 4. [`Splicer::relay`] hands both over. It copies, splices when [`Policy`] says so, and returns when the
//!    connections have ended. [`Splicer::relay_message`] does so with one message, the body of an HTTP reply say, and gives both
//!    back, so that each may join another.
//! 5. [`Splicer::stop`] tells all flows to end, and may leave spliced ones to the kernel; [`Splicer::ended`] waits for the others;
//!    [`Splicer::close`] removes what was attached and pinned. When the last [`Splicer`] is dropped without, flows are reset and all
//!    is removed: in order, but nobody waits for copied flows.
//!
//! Meanwhile [`Splicer::flows`] lists flows, [`Splicer::command`] splices one or takes it back, and [`Splicer::subscribe`] tells what
//! happens to them. Complete programs are in this crate's `examples`: [`plug`], [`socks`], a proxy of SOCKS 5, and [`login`], a
//! gateway that reads a line first.
//!
//! [`plug`]: https://docs.rs/crate/longsplice-engine/latest/source/examples/plug.rs
//! [`socks`]: https://docs.rs/crate/longsplice-engine/latest/source/examples/socks.rs
//! [`login`]: https://docs.rs/crate/longsplice-engine/latest/source/examples/login.rs
//!
//! # Versions
//! The crate follows Semantic Versioning; before 1.0 a minor release may break callers. Other releases add functions, variants of enums
//! and fields of records, all of which are `non_exhaustive` but [`Policy`], [`OpenOptions`], [`Piece`], [`TapDirection`] and those of the data path: write
//! `..Policy::default()` behind the fields you set. [`crate::core`] and what is hidden from this documentation may change at any time. The oldest Rust that compiles it
//! is `rust-version` in Cargo.toml; a newer one is needed by a minor release at the earliest.
//!
//! # The caller's duties
//! - All reading and writing goes through [`Leg`], which counts: the boundary arithmetic rests on these counts.
//! - Bytes that were read but not passed on yet, or that the caller adds, go into [`Leftovers`].
//! - Nobody else holds the sockets: no duplicated descriptor, no child process.

mod agenda;
mod connect;
pub mod core;
mod counters;
mod descriptors;
mod events;
mod flow;
mod foreign;
mod guard;
mod holder;
mod inspect;
mod keeper;
mod leg;
mod lingering;
mod live;
mod orphans;
mod paths;
mod pipe;
mod ports;
mod pump;
mod purpose;
mod refusal;
mod relay;
mod splicer;
mod stretches;
mod sweeper;
mod sync;
mod tap;
mod types;

pub use events::{FlowEvent, FlowEventKind, FlowEvents};
pub use foreign::{ForeignCounts, ForeignListener};
pub use inspect::{FlowDetail, TraceError, TracedSegment};
pub use leg::{BoundSocket, Leg, Listener};
pub use longsplice_datapath::{ConntrackCounts, LegDetail, Numbers, OpenError, PathChanges};
pub use refusal::{Refusal, Tally};
pub use splicer::{OpenOptions, Splicer};
pub use tap::{Piece, PieceKind, Tap, TapCounts, TapDirection, TapReader, Taps};
pub use types::{
    Command, EndReason, Ended, FlowInfo, FlowState, FlowStatus, Leftovers, Message, PathRule, Policy, RelayedMessage,
    SpliceWhen, Trigger,
};

/// The example in README.md compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
