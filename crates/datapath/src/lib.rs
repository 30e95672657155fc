//! The border to the kernel, and the only crate with unsafe code. It loads and pins the programs of
//! bpf/, provides typed access to their maps, and sets socket options that no safe library offers.
//!
//! `bpf/flow.h` alone defines the layout of everything shared with the
//! kernel. [`abi`] is generated from the compiled object's BTF at build time.
//!
//! `datapath.rs` has the handle, [`Datapath`]. The files below it define what it consists of, and do not use it; the files
//! above it implement what it can do. No file uses one that uses it.

mod abi_id;
mod attaching;
mod checksum;
mod clock;
mod datapath;
mod error;
mod grace;
mod handshakes;
mod hops;
mod memory;
#[cfg(feature = "model")]
pub mod model;
mod names;
mod network;
mod opening;
mod random;
mod requirements;
mod side;
mod sockets;
mod switching;
mod tables;
mod test_run;
#[cfg(feature = "testing")]
pub mod testing;
mod tpot;
mod watching;

/// Types of the maps, generated from the object's BTF. Meanings, units and byte orders of the fields: `bpf/flow.h`.
pub mod abi {
    pub(crate) use crate::skel::types::__sk_buff;
    pub use crate::skel::types::{
        abi, adopt_args, adopt_op, adopt_result, clear_call, embryo, ended_flow, event, event_kind, half, handshake,
        held_bytes, held_record, hop, leg, leg_flag, limit, listen_key, listens, path, path_args, path_flag, path_op,
        path_word, path6, phase, replaced, switch_args, switch_call, switch_op, switch_result, tap_record, trace_copy,
        trace_record, trace_word, train, train_key, tuple, verdict, via, via_flag,
    };
    #[cfg(feature = "model")]
    pub use crate::skel::types::{edit, seg};
}

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks)]
#[allow(non_snake_case, non_camel_case_types, dead_code, unused_imports, unsafe_op_in_unsafe_fn)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/splice.skel.rs"));
}

/// Types of the maps of translucent proxying (bpf/tpot/tpot.h).
mod tpot_abi {
    pub use crate::tpot_skel::types::*;
}

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks)]
#[allow(non_snake_case, non_camel_case_types, dead_code, unused_imports, unsafe_op_in_unsafe_fn)]
mod tpot_skel {
    include!(concat!(env!("OUT_DIR"), "/tpot.skel.rs"));
}

/// Types of the maps of a farm's router (bpf/tpot/tpot.h).
mod tpot_router_abi {
    pub use crate::tpot_router_skel::types::tpot_farm;
}

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks)]
#[allow(non_snake_case, non_camel_case_types, dead_code, unused_imports, unsafe_op_in_unsafe_fn)]
mod tpot_router_skel {
    include!(concat!(env!("OUT_DIR"), "/tpot_router.skel.rs"));
}

pub use abi_id::AbiId;
pub use attaching::attach::attach_first;
pub use attaching::attachment::Mended;
pub use attaching::guard::has_guard;
pub use attaching::pins::{default_pin, other_datapath, remove_dead};
pub use clock::monotonic;
pub use datapath::Datapath;
pub use error::{OpenError, VerifierLog};
pub use grace::await_packets;
pub use handshakes::handshake::{EndToEnd, Handshake, HandshakeSender, Segment, established_sockets, without_record};
pub use handshakes::hold::{HeldSegment, Reinjector};
pub use handshakes::transparent::{TransparentRoutes, is_local};
pub use hops::follow::{PathChanges, Watch};
pub use memory::give_large_blocks_back;
pub use names::{ABI_VERSION, LegFlags, MAX_LISTENERS, PathFlags, Phase, VERDICTS};
pub use network::conntrack::{ConntrackCounts, conntrack};
pub use network::devices::{Device, devices};
pub use network::forward_policy::dropping_forward_chain;
pub use network::offloads::{LISTS, LRO, features};
pub use opening::flush::flush;
pub use opening::options::Options;
pub use requirements::{OLDEST, has_raw_sockets, kernel_release, missing_capabilities, tested_kernels};
pub use side::{Pair, Side};
pub use sockets::diag::{Claim, SocketState, Sockets, TcpInfo, is_claimed, is_held};
pub use sockets::name::name_of;
pub use sockets::socket::{
    Agreed, PathFacts, Repair, SenderFacts, accept, acknowledge_with_data, agreed, clamp_window, closes_mutely,
    has_connection, has_ulp, is_urgent, lift_outstanding, lift_unread, limit_outstanding, limit_unread, limit_unsent,
    low_water, make_room, narrow_window, path_facts, queue_is_full, receive, received, register, register_shared,
    sender_facts, set_hops, set_transparent, silent_for, unread, widen_window,
};
pub use switching::adoption::{AdoptError, Attended};
pub use switching::install::{IdleLeg, NextHop};
pub use switching::released::{Recreated, Released, Resets};
pub use switching::switch::{
    Commit, CommitOptions, Connection, FreezeOptions, Frozen, Half, Limit, SwitchError, Switched, can_fit, headers,
};
pub use tables::flow_records::{FlowRecordId, FlowRecords};
pub use tables::idle::{IdleEntry, IdleWalk};
pub use tables::maps::{ExpectError, ExpectedLeg, LegView, PathView, Tuple};
pub use tables::pages::{MapSize, map_size};
pub use tables::pinned::{Holdings, records};
pub use test_run::TestContext;
pub use tpot::probe::{TpotAnswer, TpotPassage, tpot_ask, tpot_probe};
pub use tpot::proxy::{
    Destinations, DeviceChanges, TPOT_DOORS, TPOT_EXID, TPOT_KEYS, TPOT_RULES, TPOT_UDP_PORT, Tpot, TpotAsking,
    TpotHandshake, TpotKey, TpotOptions, TpotUdp, TpotWhose, try_tpot,
};
pub use tpot::router::{
    TPOT_MEMBERS, TPOT_WEIGHT, TpotFarm, TpotMember, TpotRouter, TpotRouterError, TpotRouterOptions, tpot_router,
};
pub use tpot::tables::{TpotKnown, TpotRole, TpotTunnel, tpot_flush, tpot_is_there, tpot_known, tpot_tunnels};
pub use watching::events::{Event, EventKind, Events, LastRecord, TapPosition, TapRecord};
pub use watching::inspect::{HopDetail, LegDetail, PathDetail, RecordDetail, ViaDetail, untracked};
pub use watching::trace::{Numbers, Traced};
