//! The splice engine of longsplice: the state machine of a flow, and [`Splicer`], the handle through which a proxy uses it.
//!
//! # Order of calls
//! 1. Call [`Splicer::open`] once per process, or [`Splicer::copying`] if the kernel path is not available.
//! 2. Accept clients with [`Splicer::listen`] and connect to servers with [`Splicer::connect`].
//!    Both track a connection from its SYN on. If most connections are too short for a splice, use
//!    [`Splicer::listen_adopting`]: connections are then tracked when a splice is due. Sockets that you have already are
//!    adopted, too ([`Splicer::adopt`]).
//! 3. Read and write both [`Leg`]s as ordinary asynchronous streams (control mode). To receive
//!    a copy of everything that passes through a leg, spliced or not, give it a [`Tap`] first.
//! 4. Hand both legs over with [`Splicer::relay`]. It copies, splices when [`Policy`] says so, and
//!    returns when the connections have ended. [`Splicer::relay_message`] does this for a single message,
//!    such as the body of an HTTP reply, and returns both legs, so that each can join another flow.
//! 5. [`Splicer::stop`] ends all flows; it can leave spliced ones to the kernel. [`Splicer::ended`] waits for the
//!    other flows, and [`Splicer::close`] removes everything that was attached and pinned. Dropping the last [`Splicer`]
//!    without these calls resets all flows and removes everything in the same order, but does not wait for copied flows.
//!
//! Meanwhile, [`Splicer::flows`] lists flows, [`Splicer::command`] splices a flow or takes it back, and [`Splicer::subscribe`]
//! reports what happens to flows. [`Splicer::inspect`], [`Splicer::trace`] and [`Splicer::verdicts`] show why one stalls. This crate's `examples` are complete
//! programs: [`plug`], [`socks`] (a SOCKS 5 proxy) and [`login`] (a gateway that reads a line first).
//!
//! [`plug`]: https://docs.rs/crate/longsplice-engine/latest/source/examples/plug.rs
//! [`socks`]: https://docs.rs/crate/longsplice-engine/latest/source/examples/socks.rs
//! [`login`]: https://docs.rs/crate/longsplice-engine/latest/source/examples/login.rs
//!
//! # Versions
//! The crate follows Semantic Versioning. Before 1.0, a minor release may break callers. Other releases add
//! functions, enum variants and record fields. All of these types are `non_exhaustive` except [`Policy`],
//! [`OpenOptions`], [`Piece`], [`TapDirection`] and those of the data path: write `..Policy::default()`
//! after the fields that you set. [`crate::core`] and everything hidden from this documentation may change
//! at any time. The minimum Rust version is `rust-version` in Cargo.toml; only a minor release may raise it.
//!
//! # Features
//! Both are on by default. `serde` lets records be written, as JSON for example, and the state of a flow's [`crate::core`] be
//! read again. Without `taps`, `Leg::tap` and [`Tap`] are missing.
//!
//! # The caller's duties
//! - Read and write only through [`Leg`]. It counts bytes, and the bound of a splice is computed from these counts.
//! - Put bytes that you have read but not passed on, or that you add, into [`Leftovers`].
//! - Do not share the sockets: no duplicated descriptors, no child processes.
//! - Stop on SIGTERM and SIGINT, as in step 5. A process that is killed leaves its programs attached and its spliced flows to
//!   the kernel, where they go on. The next [`Splicer::open`] in the network namespace takes them over; its `close`, or
//!   `longsplice stop --flush`, ends and removes them.

mod adopting;
mod copying;
pub mod core;
mod engine;
mod finding;
mod grace;
mod keeping;
mod leg;
mod lingering;
mod passing;
mod refusal;
mod splicer;
mod sync;
#[cfg_attr(not(feature = "taps"), path = "no_taps.rs")]
mod taps;
mod types;

pub use engine::events::{FlowEvent, FlowEventKind, FlowEvents, Switches};
#[doc(hidden)]
pub use engine::handed::{FlowAbout, HandedFlow};
pub use engine::recovered::{EarlierFlow, TakenUp};
pub use finding::{PathCause, PathFinding};
#[doc(hidden)]
pub use leg::handed::{HandedLeg, LegAbout};
pub use leg::{Leg, LegOfProxy};
/// Part of [`OpenOptions`].
#[doc(inline)]
pub use longsplice_datapath::Options as DatapathOptions;
#[doc(hidden)]
pub use longsplice_datapath::monotonic;
pub use longsplice_datapath::{
    ConntrackCounts, Destinations, DeviceChanges, LegDetail, Numbers, OpenError, Pair, PathChanges, Side, TPOT_KEYS,
    TPOT_RULES, Tpot, TpotHandshake, TpotKey, TpotOptions, TpotUdp, TpotWhose, Tuple, dropping_forward_chain, is_local,
    name_of, tpot_is_there,
};
pub use passing::handshakes::TransparentCounts;
pub use refusal::{Refusal, Tally};
pub use splicer::early::Permit;
pub use splicer::end_to_end::EndToEndListener;
pub use splicer::inspect::{FlowDetail, TraceError, TracedSegment};
pub use splicer::leaving::HandedOver;
pub use splicer::listener::{BoundSocket, Listener};
pub use splicer::{OpenOptions, Splicer};
#[cfg(feature = "taps")]
pub use taps::{Piece, PieceKind, Tap, TapCounts, TapDirection, TapReader, Taps};
pub use types::{
    Command, Done, EndReason, Ended, Finish, FlowInfo, FlowState, FlowStatus, IdleLimit, Leftovers, Message,
    NotReleased, OnTrigger, PathRule, Policy, RelayedMessage, SpliceWhen, Trigger,
};

/// The example in README.md compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
