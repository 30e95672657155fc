//! Constants of `bpf/flow.h` that BTF carries as enumerators, under Rust names.

/// Version of the layout of pinned maps, raised with every change of what flow.h, table.h and place.h put into them; a process takes
/// over only maps of its own version.
pub const ABI_VERSION: u32 = 14;

/// Addresses that can be listened on, tracked or of others: `MAX_LISTENERS`.
pub const MAX_LISTENERS: usize = 1024;

/// Bits of `leg.flags` (`enum leg_flag`).
#[allow(missing_docs)]
#[derive(Debug)]
pub struct LegFlags;

#[allow(missing_docs)]
impl LegFlags {
    pub const TS: u32 = 1 << 0;
    pub const SACK: u32 = 1 << 1;
    pub const PAIRED: u32 = 1 << 2;
    pub const SPLICED: u32 = 1 << 3;
    pub const HOLD: u32 = 1 << 4;
    pub const FRAGMENTS: u32 = 1 << 5;
    pub const FIN_IN: u32 = 1 << 6;
    pub const FIN_OUT: u32 = 1 << 7;
    pub const FIN_ACKED: u32 = 1 << 8;
    pub const RESET: u32 = 1 << 9;
    pub const TRACKED: u32 = 1 << 10;
    pub const TRIGGER: u32 = 1 << 11;
    pub const SYN: u32 = 1 << 12;
    pub const CLOCK: u32 = 1 << 13;
    pub const AHEAD: u32 = 1 << 14;
    pub const RESET_IN: u32 = 1 << 15;
    pub const PASSED: u32 = 1 << 16;
    pub const TAP: u32 = 1 << 17;
    pub const FOREIGN: u32 = 1 << 18;
    pub const ECN: u32 = 1 << 19;
    pub const RESTORED: u32 = 1 << 20;
    pub const PROBE: u32 = 1 << 22;
}

/// Bits of `path.word.flags` (`enum path_flag`).
#[allow(missing_docs)]
#[derive(Debug)]
pub struct PathFlags;

#[allow(missing_docs)]
impl PathFlags {
    pub const SPLICED: u16 = 1 << 0;
    pub const FIN: u16 = 1 << 1;
    pub const PEER_FIN: u16 = 1 << 2;
    pub const FIN_ACKED: u16 = 1 << 3;
    pub const DEAD: u16 = 1 << 4;
    pub const TRIGGER: u16 = 1 << 7;
    pub const CROSS: u16 = 1 << 8;
    pub const RST: u16 = 1 << 9;
    pub const FRAGMENTS: u16 = 1 << 10;
    pub const IDENTITY: u16 = 1 << 11;
    pub const ECT: u16 = 1 << 12;
    pub const ECN: u16 = 1 << 13;
}

/// Labels of `enum verdict`, in its order: what the data path did with a packet.
pub const VERDICTS: &[&str] = &[
    "forwarded",
    "forwarded-slow",
    "local",
    "both",
    "local-out",
    "local-muted",
    "held",
    "out-of-window",
    "bad-ack",
    "bad-rst",
    "syn",
    "challenge",
    "challenge-limited",
    "rst",
    "ttl",
    "oversize",
    "fragment",
    "straddle",
    "no-peer",
    "rewrite-failed",
    "table-full",
    "stale-cpu",
    "forwarded-early",
    "icmp-translated",
    "fragment-forwarded",
    "fragment-stray",
    "fragment-late",
    "fragment-tiny",
    "fragment-overlap",
    "fragment-cross",
    "tapped",
    "tap-lost",
    "handshake",
    "handshake-lost",
    "rst-unproven",
    "no-ack",
    "bad-checksum",
    "hold-overflow",
    "beyond-limit",
    "ce-dropped",
    "cut",
    "unwatched",
];
