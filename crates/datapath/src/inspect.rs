//! Everything that is known of one leg, decoded for people and programs: what to look at when a connection stands still.
//!
//! Fields have the names and meanings of `bpf/flow.h`. Sequence numbers are those of the wire, in host byte order; differences of
//! them are bytes. Nothing stops while they are read: on a busy flow, neighbouring numbers may be a few segments apart.

use crate::{
    Datapath, LegFlags, PathFlags, PathView, Phase, Released, Tuple, abi,
    diag::{SocketState, socket_state},
    maps::{VIA_INDEX, address},
    monotonic,
    names::ViaFlags,
};
use nix::net::if_::if_indextoname;
use serde::Serialize;
use std::net::{IpAddr, SocketAddr};

/// `FIN_IN` becomes `fin-in`.
fn names(all: &[(&str, u32)], bits: u32) -> Vec<String> {
    let name = |flag: &str| flag.to_lowercase().replace('_', "-");
    all.iter().filter(|(_, bit)| bits & bit != 0).map(|(flag, _)| name(flag)).collect()
}

/// One leg of a flow.
#[derive(Clone, Debug, Serialize)]
pub struct LegDetail {
    /// The host.
    pub remote: SocketAddr,
    /// Our address.
    pub local: SocketAddr,
    /// Who owns the bytes from the host; `None`: the data path does not know the leg.
    pub phase_in: Option<Phase>,
    /// The same for the bytes to the host.
    pub phase_out: Option<Phase>,
    /// Bytes that have come from the host since its SYN, a FIN counting one.
    pub received: Option<u64>,
    /// `struct leg`; `None`: not tracked, or released.
    pub record: Option<RecordDetail>,
    /// `struct path`, for packets from the host; `None`: there is no entry.
    pub path: Option<PathDetail>,
    /// The kernel's socket; `None`: there is none, or the kernel did not say.
    pub socket: Option<SocketState>,
}

/// A leg's record.
#[derive(Clone, Debug, Serialize)]
pub struct RecordDetail {
    /// By name, without LEG_.
    pub flags: Vec<String>,
    /// While the flow is forwarded, the record is as it was at the commit: the path entries count.
    pub is_stale: bool,
    /// The other leg's host, if a switch has ever paired the two.
    pub peer: Option<SocketAddr>,
    /// MSS that the host has announced, bytes.
    pub mss_in: u16,
    /// MSS that was announced to the host, bytes.
    pub mss_out: u16,
    /// Shift of windows that the host announces.
    pub wscale_in: u8,
    /// Shift of windows announced to the host.
    pub wscale_out: u8,
    /// Initial sequence number of the host.
    pub irs: u32,
    /// Our initial sequence number.
    pub iss: u32,
    /// Highest end of what came from the host and was passed up or forwarded.
    pub max_in: u32,
    /// Bytes below `max_in` that were not acknowledged to the host.
    pub unacked_in: u32,
    /// Bytes beyond `max_in` that the host may send: negative if it has sent more.
    pub room_in: i32,
    /// Position of the last switch of the bytes from the host.
    pub bound_in: u32,
    /// The host's bytes may be forwarded up to here; `None`: without limit.
    pub limit_in: Option<u32>,
    /// Highest acknowledgement by the host.
    pub ack_in: u32,
    /// Right edge of the host's window.
    pub edge_in: u32,
    /// The host's last timestamp.
    pub tsval_in: u32,
    /// Highest end sent to the host by anyone.
    pub max_out: u32,
    /// Bytes below `max_out` that the host has not acknowledged.
    pub unacked_out: u32,
    /// Bytes beyond `max_out` that the host has room for: negative if it was sent more.
    pub room_out: i32,
    /// Highest end sent by the local socket.
    pub local_out: u32,
    /// Position of the last switch of the bytes to the host.
    pub bound_out: u32,
    /// Bytes that the host has yet to acknowledge before the switch of the bytes to it is over; `None`: none is under way.
    pub undrained: Option<u32>,
    /// Highest acknowledgement sent to the host by anyone.
    pub ack_out: u32,
    /// The window sent with it, bytes.
    pub win_out: u32,
    /// Highest right edge promised to the host.
    pub edge_out: u32,
    /// Highest acknowledgement by the local socket.
    pub ack_local: u32,
    /// The local socket's window, bytes.
    pub win_local: u32,
    /// Last timestamp sent to the host.
    pub tsval_out: u32,
    /// Numbers of the host's bytes: wire = socket + shim.
    pub shim_in: u32,
    /// The same for the bytes to the host.
    pub shim_out: u32,
    /// The same for our timestamps.
    pub shim_ts: u32,
    /// The peer's out space = our in space + `seq_off`.
    pub seq_off: u32,
    /// Our timestamps = those of the peer's host + `ts_from_peer`.
    pub ts_from_peer: u32,
    /// From this position on, bytes from the host are relayed unchanged.
    pub verbatim: u32,
    /// Highest end that was held, under the hold policy.
    pub held_in: u32,
    /// Bytes that were held since the freeze.
    pub held: u32,
    /// Where packets to the host leave, as its socket has shown it.
    pub hop: HopDetail,
    /// Milliseconds since a segment of the leg was seen.
    pub seen_ms: u64,
}

/// A device and the addresses on its link.
#[derive(Clone, Debug, Serialize)]
pub struct HopDetail {
    /// Index of the device; 0: none is known yet.
    pub ifindex: u32,
    /// Name of the device; `None`: it is gone.
    pub device: Option<String>,
    /// MAC address of the next hop.
    pub dmac: String,
    /// MAC address that packets are sent from.
    pub smac: String,
    /// Firewall mark of the packets.
    pub mark: u32,
}

impl HopDetail {
    fn new(ifindex: u32, [dmac, smac]: [[u8; 6]; 2], mark: u32) -> HopDetail {
        let mac = |bytes: [u8; 6]| bytes.map(|b| format!("{b:02x}")).join(":");
        let device = if_indextoname(ifindex).ok().and_then(|name| name.into_string().ok());
        HopDetail { ifindex, device, dmac: mac(dmac), smac: mac(smac), mark }
    }
}

/// A path entry: what happens to packets that come in on the leg.
#[derive(Clone, Debug, Serialize)]
pub struct PathDetail {
    /// By name, without PATH_.
    pub flags: Vec<String>,
    /// What is forwarded is copied for a tap.
    pub is_tapped: bool,
    /// Highest sequence end forwarded.
    pub end: u32,
    /// How often `end` has wrapped; with the flag `trigger`, the upper half of the limit.
    pub wraps: u16,
    /// `end` in the numbers of the other leg: its host was sent nothing beyond.
    pub sent: u32,
    /// Bytes that were forwarded to the other host, and not acknowledged by it; `None`: there is no entry for its packets.
    pub unacked: Option<u32>,
    /// Highest acknowledgement forwarded.
    pub max_ack: u32,
    /// The window that came with `max_ack`, bytes: at least.
    pub window_least: u32,
    /// At most: entries keep it in steps of half an octave.
    pub window_most: u32,
    /// Shift of windows that the host announces.
    pub scale_in: u8,
    /// Shift of windows announced to the other host.
    pub scale_out: u8,
    /// Added to sequence numbers, modulo 2^32.
    pub seq_add: u32,
    /// Added to acknowledgement numbers.
    pub ack_add: u32,
    /// Added to TSval.
    pub tsval_add: u32,
    /// Added to TSecr.
    pub tsecr_add: u32,
    /// Milliseconds since the last packet, at least: entries keep the time in units of 8.6 s, modulo 37 minutes.
    pub seen_least_ms: u64,
    /// From where packets leave: our address at the other leg. `None`: the entry leads nowhere yet.
    pub from: Option<SocketAddr>,
    /// Where they go.
    pub to: Option<SocketAddr>,
    /// The next hop; `None` if the entry leads nowhere yet.
    pub via: Option<ViaDetail>,
}

/// A next hop, which flows share.
#[derive(Clone, Debug, Serialize)]
pub struct ViaDetail {
    /// Its index.
    pub index: u16,
    /// Device, MAC addresses and mark.
    #[serde(flatten)]
    pub hop: HopDetail,
    /// Bytes of IP packet that the device sends, and the hosts behind it take.
    pub mtu: u32,
    /// Of these, what hosts and paths take, whatever the device.
    pub most: u32,
    /// Our address.
    pub local: IpAddr,
    /// By name, without VIA_.
    pub flags: Vec<String>,
}

/// The kernel's socket of a leg that the data path knows nothing of.
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

/// Milliseconds since `seen`, ns of CLOCK_MONOTONIC.
fn since(seen: u64) -> u64 {
    (monotonic().as_nanos() as u64).saturating_sub(seen) / 1_000_000
}

/// Bytes from `b` up to `a`; 0 if it is not ahead of it.
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
        irs: l.irs,
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
    /// Both legs of a flow, and the sockets that the kernel has of them. `released`: what is remembered of a flow without records.
    pub fn inspect(&self, [a, b]: [&Tuple; 2], released: Option<&[Released; 2]>) -> [LegDetail; 2] {
        let [pa, pb] = [a, b].map(|leg| self.maps.entry(leg));
        let [ra, rb] = released.map_or([None; 2], |[a, b]| [Some(a), Some(b)]);
        [self.leg_detail(a, pa.as_ref(), pb.as_ref(), ra), self.leg_detail(b, pb.as_ref(), pa.as_ref(), rb)]
    }

    /// `back`: the entry of the other leg.
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
        // the record's are stale, or there is none
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
        // an entry in control mode leads nowhere, and one that was in forwarding mode still says where it led
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
