//! Installs flows in forwarding mode directly: path entries of flows
//! that were never in control mode, like those of released flows.

use crate::{Datapath, Pair, PathFlags, Tuple, abi, switching::switch::Hop};
use std::io;

/// The next hop of packets to a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextHop {
    /// Index of the device.
    pub device: u32,
    /// Ethernet address of the neighbour.
    pub to: [u8; 6],
    /// Ethernet address of the device.
    pub from: [u8; 6],
}

/// The code of the largest window, like `room_code(65535)` in bpf/step.h.
const WIDE_ROOM: u16 = 27 << 10;

/// A leg with nothing in flight: the host has acknowledged everything that it was
/// sent. Sequence numbers are those on the wire of this leg, in host byte order.
#[derive(Clone, Copy, Debug)]
pub struct IdleLeg {
    /// The leg. IPv4 only.
    pub leg: Tuple,
    /// The next hop to its host.
    pub hop: NextHop,
    /// The next sequence number that the host will send.
    pub end: u32,
    /// The next sequence number that the host will be sent.
    pub ack: u32,
    /// Scale of the windows announced to it and by it, as a shift.
    pub scale: u8,
}

impl Datapath {
    /// Splices flows without sockets and without records, by installing both path entries of each, without options. For programs
    /// that make the connections elsewhere, or measure the cost of many flows; a million of them take seconds. Nobody watches
    /// such a flow: call [`Datapath::forget`] for both legs when it is over. Fails with [`io::ErrorKind::Unsupported`] for IPv6.
    pub fn install(&self, flows: &[Pair<IdleLeg>]) -> io::Result<()> {
        for (from, to) in flows.iter().flat_map(|f| [(&f.client, &f.server), (&f.server, &f.client)]) {
            let p = self.idle_path(from, to)?;
            self.maps.put_path(&from.leg, abi::path6 { p, ..Default::default() })?;
        }
        Ok(())
    }

    /// Builds the entry of packets that arrive on `from`.
    fn idle_path(&self, from: &IdleLeg, to: &IdleLeg) -> io::Result<abi::path> {
        if !from.leg.is_v4() || !to.leg.is_v4() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let out = to.leg.to_abi();
        let hop = Hop { ifindex: to.hop.device, dmac: to.hop.to, smac: to.hop.from, mark: 0 };
        let via = self.next_hops.slot(&self.maps, &self.next_hops.key(&hop, out.local, u32::MAX))?;
        let mut flags = PathFlags::SPLICED;
        // like path_identity() of bpf/path.h at a commit
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
