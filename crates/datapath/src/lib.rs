//! The border to the kernel, and the only crate with unsafe code. It loads and pins the programs of
//! bpf/, provides typed access to their maps, and sets socket options that no safe library offers.
//!
//! `bpf/flow.h` alone defines the layout of everything shared with the
//! kernel. [`abi`] is generated from the compiled object's BTF at build time.

mod attach;
mod conntrack;
mod devices;
mod diag;
mod events;
mod follow;
mod foreign;
mod guard;
mod held;
mod hold;
mod idle;
mod inspect;
mod install;
mod kernel;
mod load;
mod maps;
#[cfg(feature = "model")]
pub mod model;
mod names;
mod netlink;
mod pages;
mod pins;
mod released;
mod rest;
mod side;
mod sockets;
mod switch;
#[cfg(feature = "testing")]
pub mod testing;
mod trace;
mod vias;
mod ways;

/// Types of the maps, generated from the object's BTF. Meanings, units and byte orders of the fields: `bpf/flow.h`.
pub mod abi {
    pub(crate) use crate::skel::types::__sk_buff;
    pub use crate::skel::types::{
        abi, embryo, event, event_kind, half, handshake, held_bytes, held_record, hop, leg, leg_flag, limit,
        listen_key, listens, path, path_args, path_flag, path_op, path_word, path6, phase, switch_args, switch_call,
        switch_op, switch_result, tap_record, trace_copy, trace_record, trace_word, train, train_key, tuple, verdict,
        via, via_flag,
    };
    #[cfg(feature = "model")]
    pub use crate::skel::types::{edit, seg};
}

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks)]
#[allow(non_snake_case, non_camel_case_types, dead_code, unused_imports, unsafe_op_in_unsafe_fn)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/splice.skel.rs"));
}

pub use conntrack::{ConntrackCounts, conntrack};
pub use devices::{Device, devices};
pub use diag::{Claim, SocketState, Sockets, TcpInfo};
pub use events::{Copied, CopiedAt, Event, EventKind, Events};
pub use follow::{PathChanges, Watch};
pub use foreign::{Foreign, Handshake, Segment, foreign_sockets, is_local};
pub use guard::has_guard;
pub use held::Mended;
pub use hold::{Held, WayBack};
pub use idle::{Idle, IdleEntry};
pub use inspect::{HopDetail, LegDetail, PathDetail, RecordDetail, ViaDetail, untracked};
pub use install::{IdleLeg, NextHop};
pub use kernel::{Datapath, OpenError, Options, TestContext};
pub use load::{Kept, OLDEST, kernel_release, missing_capabilities, tested_kernels};
pub use maps::{ExpectError, LegView, PathView, Tuple};
pub use names::{ABI_VERSION, LegFlags, MAX_LISTENERS, PathFlags, Phase, VERDICTS};
pub use pages::{MapSize, map_size};
pub use pins::{Holdings, default_pin, flush, records, remove_dead};
pub use released::{Recreated, Released, Resets, monotonic};
pub use side::{Pair, Side};
pub use sockets::{PathFacts, Repair, clamp_window, is_urgent, low_water, path_facts, receive, received, register};
pub use switch::{FreezeOptions, Frozen, Half, Limit, SwitchError, Switched, can_fit};
pub use trace::{Numbers, Traced};
