//! Everything known about one leg, decoded for people and programs, to diagnose a connection that stands still.
//!
//! Fields have the names and meanings of `bpf/flow.h`. Sequence numbers are those of
//! the wire, in host byte order; their differences are bytes. Nothing is stopped while
//! the state is read: on a busy flow, neighbouring numbers may be a few segments apart.

use crate::{
    Datapath, LegFlags, Pair, PathFlags, PathView, Phase, Released, Tuple, abi, monotonic,
    names::ViaFlags,
    sockets::diag::{SocketState, socket_state},
    tables::maps::{VIA_INDEX, address},
};
use nix::net::if_::if_indextoname;
use std::net::{IpAddr, SocketAddr};

/// Returns the names of flags: `FIN_IN` becomes `fin-in`.
fn names(all: &[(&str, u32)], bits: u32) -> Vec<String> {
    let name = |flag: &str| flag.to_lowercase().replace('_', "-");
    all.iter().filter(|(_, bit)| bits & bit != 0).map(|(flag, _)| name(flag)).collect()
}

/// One leg of a flow.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct LegDetail {
    /// Address and port of the host.
    pub remote: SocketAddr,
    /// Our address and port.
    pub local: SocketAddr,
    /// Phase of the bytes from the host. `None`: the data path does not know the leg.
    pub phase_in: Option<Phase>,
    /// Phase of the bytes to the host.
    pub phase_out: Option<Phase>,
    /// Bytes that have arrived from the host since its SYN. A FIN counts as one.
    pub received: Option<u64>,
    /// The leg's record, `struct leg`. `None`: not tracked, or released.
    pub record: Option<RecordDetail>,
    /// The path entry of packets from the host, `struct path`. `None`: there is no entry.
    pub path: Option<PathDetail>,
    /// The kernel's socket. `None`: there is none, or the kernel did not answer.
    pub socket: Option<SocketState>,
}

/// A leg's record.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RecordDetail {
    /// Names of the flags, without LEG_.
    pub flags: Vec<String>,
    /// The record is outdated: while the flow is forwarded, it stays as it was at the commit, and the path entries are valid.
    pub is_stale: bool,
    /// The host of the other leg, if a switch has ever paired the two.
    pub peer: Option<SocketAddr>,
    /// MSS that the host has announced, in bytes.
    pub mss_in: u16,
    /// MSS that was announced to the host, in bytes.
    pub mss_out: u16,
    /// Scale of the windows that the host announces, as a shift.
    pub wscale_in: u8,
    /// Scale of the windows announced to the host, as a shift.
    pub wscale_out: u8,
    /// Initial sequence number of the host.
    pub irs: u32,
    /// Our initial sequence number.
    pub iss: u32,
    /// Highest end of data from the host that was passed up or forwarded.
    pub max_in: u32,
    /// Number of bytes below `max_in` that were not acknowledged to the host.
    pub unacked_in: u32,
    /// Number of bytes beyond `max_in` that the host may send. Negative if it has sent more.
    pub room_in: i32,
    /// Sequence number of the last switch of the bytes from the host.
    pub bound_in: u32,
    /// Sequence number up to which the host's bytes may be forwarded. `None`: no limit.
    pub limit_in: Option<u32>,
    /// Highest acknowledgement by the host.
    pub ack_in: u32,
    /// Right edge of the host's window.
    pub edge_in: u32,
    /// The host's last timestamp.
    pub tsval_in: u32,
    /// Highest end sent to the host, by the socket or forwarded.
    pub max_out: u32,
    /// Number of bytes below `max_out` that the host has not acknowledged.
    pub unacked_out: u32,
    /// Number of bytes beyond `max_out` for which the host has room. Negative if more was sent.
    pub room_out: i32,
    /// Highest end sent by the local socket.
    pub local_out: u32,
    /// Sequence number of the last switch of the bytes to the host.
    pub bound_out: u32,
    /// Number of bytes that the host has yet to acknowledge before the
    /// switch of the bytes to it is over. `None`: no switch is under way.
    pub undrained: Option<u32>,
    /// Highest acknowledgement sent to the host, by the socket or forwarded.
    pub ack_out: u32,
    /// The window sent with `ack_out`, in bytes.
    pub win_out: u32,
    /// Highest right edge promised to the host.
    pub edge_out: u32,
    /// Highest acknowledgement by the local socket.
    pub ack_local: u32,
    /// The local socket's window, in bytes.
    pub win_local: u32,
    /// Last timestamp sent to the host.
    pub tsval_out: u32,
    /// Shim of the host's sequence numbers: wire = socket + shim.
    pub shim_in: u32,
    /// Shim of the sequence numbers to the host.
    pub shim_out: u32,
    /// Shim of our timestamps.
    pub shim_ts: u32,
    /// The peer's out space = our in space + `seq_off`.
    pub seq_off: u32,
    /// Our timestamps = those of the peer's host + `ts_from_peer`.
    pub ts_from_peer: u32,
    /// Sequence number from which bytes from the host are relayed unchanged.
    pub verbatim: u32,
    /// Highest end of held data, under the hold policy.
    pub held_in: u32,
    /// Number of bytes held since the freeze.
    pub held: u32,
    /// Next hop of packets to the host, as its socket has used it.
    pub hop: HopDetail,
    /// Time since the last segment of the leg, in milliseconds.
    pub seen_ms: u64,
}

/// A device, and the addresses on its link.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct HopDetail {
    /// Index of the device; 0: not known yet.
    pub ifindex: u32,
    /// Name of the device. `None`: the device is gone.
    pub device: Option<String>,
    /// MAC address of the next hop.
    pub dmac: String,
    /// MAC address of the device, from which packets are sent.
    pub smac: String,
    /// Mark of the packets (`skb->mark`).
    pub mark: u32,
}

impl HopDetail {
    fn new(ifindex: u32, [dmac, smac]: [[u8; 6]; 2], mark: u32) -> HopDetail {
        let mac = |bytes: [u8; 6]| bytes.map(|b| format!("{b:02x}")).join(":");
        let device = if_indextoname(ifindex).ok().and_then(|name| name.into_string().ok());
        HopDetail { ifindex, device, dmac: mac(dmac), smac: mac(smac), mark }
    }
}

/// A path entry: what happens to packets that arrive on the leg.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct PathDetail {
    /// Names of the flags, without PATH_.
    pub flags: Vec<String>,
    /// Whether forwarded data is copied for a tap.
    pub is_tapped: bool,
    /// Highest sequence end that was forwarded.
    pub end: u32,
    /// Number of times that `end` has wrapped. With the flag `trigger`, the upper half of the limit.
    pub wraps: u16,
    /// `end` in the numbers of the other leg: its host was sent nothing beyond.
    pub sent: u32,
    /// Number of bytes forwarded to the other host and not acknowledged by it. `None`: there is no entry for its packets.
    pub unacked: Option<u32>,
    /// Highest acknowledgement that was forwarded.
    pub max_ack: u32,
    /// Minimum of the window that came with `max_ack`, in bytes.
    pub window_least: u32,
    /// Maximum of that window, in bytes: entries store it in steps of half an octave.
    pub window_most: u32,
    /// Scale of the windows that the host announces, as a shift.
    pub scale_in: u8,
    /// Scale of the windows announced to the other host, as a shift.
    pub scale_out: u8,
    /// Added to sequence numbers, modulo 2^32.
    pub seq_add: u32,
    /// Added to acknowledgement numbers, modulo 2^32.
    pub ack_add: u32,
    /// Added to TSval, modulo 2^32.
    pub tsval_add: u32,
    /// Added to TSecr, modulo 2^32.
    pub tsecr_add: u32,
    /// Minimum time since the last packet, in milliseconds: entries store it in units of 8.6 s, modulo 37 minutes.
    pub seen_least_ms: u64,
    /// Source of packets that leave: our address on the other leg. `None`: the entry has no next hop yet.
    pub from: Option<SocketAddr>,
    /// Destination of packets that leave: the other host. `None`: the entry has no next hop yet.
    pub to: Option<SocketAddr>,
    /// The next hop. `None` if the entry has none yet.
    pub via: Option<ViaDetail>,
}

/// A next hop. Flows share it.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct ViaDetail {
    /// Index of the next hop.
    pub index: u16,
    /// Device, MAC addresses and mark.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub hop: HopDetail,
    /// Size in bytes of the largest IP packet that the device and the hosts behind it accept.
    pub mtu: u32,
    /// The part of this limit that is due to hosts and paths, regardless of the device.
    pub most: u32,
    /// Our address on the leg.
    pub local: IpAddr,
    /// Names of the flags, without VIA_.
    pub flags: Vec<String>,
}

/// Describes a leg that the data path does not know: only its socket.
pub fn untracked(leg: &Tuple) -> LegDetail {
    LegDetail {
        remote: leg.remote,
        local: leg.local,
        phase_in: None,
        phase_out: None,
        received: None,
        record: None,
        path: None,
        socket: socket_state(leg),
    }
}

/// Returns the milliseconds since `seen`, in nanoseconds of CLOCK_MONOTONIC.
fn since(seen: u64) -> u64 {
    (monotonic().as_nanos() as u64).saturating_sub(seen) / 1_000_000
}

/// Returns the number of bytes from `b` to `a`; 0 if `a` is not ahead of `b`.
fn ahead(a: u32, b: u32) -> u32 {
    (a.wrapping_sub(b) as i32).max(0) as u32
}

fn record(l: &abi::leg) -> RecordDetail {
    let is = |flag: u32| l.flags & flag != 0;
    let is_switching = Phase::from(l.phase_out).is_switching();
    RecordDetail {
        flags: names(LegFlags::ALL, l.flags),
        is_stale: is(LegFlags::SPLICED),
        peer: is(LegFlags::PAIRED).then(|| Tuple::from_abi(&l.peer).remote),
        mss_in: l.mss_in,
        mss_out: l.mss_out,
        wscale_in: l.wscale_in,
        wscale_out: l.wscale_out,
        irs: l.max_in.wrapping_sub(l.in64 as u32).wrapping_sub(1),
        iss: l.iss,
        max_in: l.max_in,
        unacked_in: ahead(l.max_in, l.ack_out),
        room_in: l.edge_out.wrapping_sub(l.max_in) as i32,
        bound_in: l.bound_in,
        limit_in: is(LegFlags::TRIGGER).then_some(l.limit_in),
        ack_in: l.ack_in,
        edge_in: l.edge_in,
        tsval_in: l.tsval_in,
        max_out: l.max_out,
        unacked_out: ahead(l.max_out, l.ack_in),
        room_out: l.edge_in.wrapping_sub(l.max_out) as i32,
        local_out: l.local_out,
        bound_out: l.bound_out,
        undrained: is_switching.then(|| ahead(l.bound_out, l.ack_in)),
        ack_out: l.ack_out,
        win_out: l.win_out,
        edge_out: l.edge_out,
        ack_local: l.ack_local,
        win_local: l.win_local,
        tsval_out: l.tsval_out,
        shim_in: l.shim_in,
        shim_out: l.shim_out,
        shim_ts: l.shim_ts,
        seq_off: l.seq_off,
        ts_from_peer: l.ts_from_peer,
        verbatim: l.verbatim,
        held_in: l.held_in,
        held: l.held,
        hop: HopDetail::new(l.ifindex, [l.dmac, l.smac], l.mark),
        seen_ms: since(l.seen),
    }
}

impl Datapath {
    /// Describes both legs of a flow, and their sockets. `released`: the saved state of a flow without records.
    pub fn inspect(&self, legs: Pair<&Tuple>, released: Option<&Pair<Released>>) -> Pair<LegDetail> {
        let paths = legs.map(|leg| self.maps.entry(leg));
        Pair::from_fn(|side| {
            let (path, back) = (paths[side].as_ref(), paths[side.other()].as_ref());
            self.leg_detail(legs[side], path, back, released.map(|both| &both[side]))
        })
    }

    /// Describes one leg. `back`: the path entry of the other leg.
    fn leg_detail(
        &self,
        leg: &Tuple,
        path: Option<&abi::path6>,
        back: Option<&abi::path6>,
        released: Option<&Released>,
    ) -> LegDetail {
        let record_of = self.leg(leg).map(|l| l.raw);
        let (view, back) = (path.map(|e| PathView::new(&e.p)), back.map(|e| PathView::new(&e.p)));
        let forwards = |p: &PathView| p.flags & PathFlags::SPLICED != 0;
        // the record's phases are outdated, or there is no record
        let phase = |view: Option<&PathView>, phase: fn(&abi::leg) -> u8| match (view, &record_of) {
            (Some(p), _) if forwards(p) => Some(Phase::Forwarding),
            (_, Some(l)) => Some(Phase::from(phase(l))),
            _ => None,
        };
        let received = match (&record_of, view.as_ref(), released) {
            (Some(l), Some(p), _) if forwards(p) => Some(l.in64 + p.passed(l.max_in)),
            (Some(l), ..) => Some(l.in64),
            (None, _, Some(r)) => self.released_end(leg, r),
            _ => None,
        };
        LegDetail {
            phase_in: phase(view.as_ref(), |l| l.phase_in),
            phase_out: phase(back.as_ref(), |l| l.phase_out),
            received,
            record: record_of.as_ref().map(record),
            path: path.map(|e| self.path_detail(leg, e, back.as_ref())),
            ..untracked(leg)
        }
    }

    fn path_detail(&self, leg: &Tuple, e: &abi::path6, back: Option<&PathView>) -> PathDetail {
        let (p, view) = (&e.p, PathView::new(&e.p));
        let (scale_in, scale_out) = (p.scales & 15, p.scales >> 4);
        let (least, most) = view.rooms();
        // An entry in control mode has no next hop. One that was in forwarding mode still has its last one.
        let led = p.rport != 0;
        let via = self.maps.via(p.via & VIA_INDEX).filter(|via| led && via.ifindex != 0);
        let out = via.as_ref().and_then(|via| self.maps.way_out(leg, e, via.local));
        PathDetail {
            flags: names(PathFlags::ALL, view.flags.into()),
            is_tapped: view.tapped,
            end: view.end,
            wraps: view.wraps,
            sent: view.sent,
            unacked: back.filter(|_| led).map(|back| ahead(view.sent, back.max_ack)),
            max_ack: view.max_ack,
            window_least: least << scale_in,
            window_most: most << scale_in,
            scale_in,
            scale_out,
            seq_add: p.seq_add,
            ack_add: p.ack_add,
            tsval_add: p.tsval_add,
            tsecr_add: p.tsecr_add,
            seen_least_ms: view.silence().as_millis() as u64,
            from: out.map(|o| o.local),
            to: out.map(|o| o.remote),
            via: via.map(|v| ViaDetail {
                index: view.via,
                hop: HopDetail::new(v.ifindex, [v.dmac, v.smac], v.mark),
                mtu: v.mtu,
                most: v.most,
                local: address(v.local),
                flags: names(ViaFlags::ALL, v.flags.0),
            }),
        }
    }
}
