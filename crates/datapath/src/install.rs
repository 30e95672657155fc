//! Forwarding mode by decree: path entries for flows that were never in control mode, as a released flow has them.

use crate::{Datapath, PathFlags, Tuple, abi, switch::Hop};
use std::io;

/// Where packets to a host go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextHop {
    /// Interface number.
    pub device: u32,
    /// Ethernet address of the neighbour.
    pub to: [u8; 6],
    /// Ethernet address of the device.
    pub from: [u8; 6],
}

/// The code of the largest window, as `room_code(65535)` in bpf/step.h.
const WIDE_ROOM: u16 = 27 << 10;

/// A leg on which nothing is under way: the host has acknowledged all that it was sent. Sequence numbers are those on the
/// wire of this leg.
#[derive(Clone, Copy, Debug)]
pub struct IdleLeg {
    /// Which leg; IPv4.
    pub leg: Tuple,
    /// The way to its host.
    pub hop: NextHop,
    /// What the host will send next.
    pub end: u32,
    /// What it will be sent next.
    pub ack: u32,
    /// Shift of the windows announced to it and by it.
    pub scale: u8,
}

impl Datapath {
    /// Splices flows without sockets and without records: both path entries of each, as a released flow has them, without
    /// options. For whoever has made the connections elsewhere, or measures what many flows cost; a million of them take
    /// seconds. Nobody watches such a flow: [`Datapath::forget`] both legs when it is over.
    pub fn install(&self, flows: &[[IdleLeg; 2]]) -> io::Result<()> {
        for (from, to) in flows.iter().flat_map(|[a, b]| [(a, b), (b, a)]) {
            let p = self.idle_path(from, to)?;
            self.maps.put_path(&from.leg, abi::path6 { p, ..Default::default() })?;
        }
        Ok(())
    }

    /// The entry for packets that come in on `from`.
    fn idle_path(&self, from: &IdleLeg, to: &IdleLeg) -> io::Result<abi::path> {
        if !from.leg.is_v4() || !to.leg.is_v4() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let out = to.leg.to_abi();
        let hop = Hop { ifindex: to.hop.device, dmac: to.hop.to, smac: to.hop.from, mark: 0 };
        let via = self.via(&self.place(&hop, out.local, u32::MAX))?;
        let mut flags = PathFlags::SPLICED;
        // as the commit finds out by path_identity() of bpf/path.h
        let mirrored = Tuple { remote: from.leg.local, local: from.leg.remote };
        if to.leg == mirrored && (to.ack, to.end, to.scale) == (from.end, from.ack, from.scale) {
            flags |= PathFlags::IDENTITY;
        }
        Ok(abi::path {
            word: abi::path_word { all: u64::from(from.end) | u64::from(flags) << 48 },
            max_ack: from.ack,
            via: via | WIDE_ROOM,
            scales: from.scale | to.scale << 4,
            seq_add: to.ack.wrapping_sub(from.end),
            ack_add: to.end.wrapping_sub(from.ack),
            rport: out.rport,
            lport: out.lport,
            remote4: out.remote[3],
            ..Default::default()
        })
    }
}
