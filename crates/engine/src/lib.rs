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
mod sessions;
mod splicer;
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
