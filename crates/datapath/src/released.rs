//! Flows without sockets: what must be remembered to count their bytes and to come back.

use crate::{
    Datapath, LegFlags, Repair, SwitchError, Tuple, abi,
    kernel::{bare, switch_op},
    sockets::{Restore, restore},
};
use std::{io, os::fd::OwnedFd, time::Duration};

/// A leg of a released flow: its record as it was at the commit.
#[derive(Clone, Copy)]
pub struct Released {
    leg: Tuple,
    raw: abi::leg,
}

impl std::fmt::Debug for Released {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Released({:?})", self.leg)
    }
}

/// CLOCK_MONOTONIC, which the data path's time stamps are taken from.
pub fn monotonic() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("this clock always exists").into()
}

impl Datapath {
    /// Takes the leg's record out of the data path; its path entry goes on alone. Close the socket silently first.
    pub fn release(&self, leg: &Tuple) -> Option<Released> {
        let raw = self.leg(leg)?.raw;
        self.forget_leg(leg);
        Some(Released { leg: *leg, raw })
    }

    /// Position of all that came from the leg's host.
    pub fn released_end(&self, r: &Released) -> Option<u64> {
        let p = self.path(&r.leg)?;
        let end = u64::from(p.wraps) << 32 | u64::from(p.end);
        Some(r.raw.in64 + end - u64::from(r.raw.max_in))
    }

    /// Makes sockets for both legs, in control mode. [`SwitchError::Busy`]: bytes are on their way, try again.
    /// The stream positions of the hosts are those of [`Datapath::released_end`]; nothing is unread or unacknowledged.
    pub fn recreate(&self, a: &Released, b: &Released) -> Result<[OwnedFd; 2], SwitchError> {
        self.run(switch_op::OP_STOP, &bare(&a.leg), &bare(&b.leg), |_| {})?;
        let made = self.sockets(a, b);
        if made.is_err() {
            self.run(switch_op::OP_RESUME, &bare(&a.leg), &bare(&b.leg), |_| {})?;
        }
        made.map_err(|e| {
            tracing::warn!(leg = ?a.leg, error = %e, "sockets of a released flow could not be made");
            SwitchError::Run(e.raw_os_error().unwrap_or(0))
        })
    }

    fn sockets(&self, a: &Released, b: &Released) -> io::Result<[OwnedFd; 2]> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let (pa, pb) = (self.path(&a.leg).ok_or_else(gone)?, self.path(&b.leg).ok_or_else(gone)?);
        let now = monotonic().as_nanos() as u64;
        let one = |r: &Released, o: &Released, end: u32, ack: u32| -> io::Result<(OwnedFd, abi::leg)> {
            let l = &r.raw;
            let ts = l.flags & o.raw.flags & LegFlags::TS != 0;
            // as bpf/path.h, tsval_reached
            let reached =
                o.raw.tsval_in.wrapping_add(((now - o.raw.seen) / 1_000_000) as u32 + 8).wrapping_add(l.ts_from_peer);
            let tsval = if ts { reached } else { l.tsval_out.wrapping_add(((now - l.seen) / 1_000_000) as u32) };
            let scaled = l.wscale_in != 0 || l.wscale_out != 0;
            let s = restore(&Restore {
                local: r.leg.local,
                remote: r.leg.remote,
                next_out: ack,
                next_in: end,
                mss: l.mss_in,
                wscale: scaled.then_some((l.wscale_in, l.wscale_out)),
                sack: l.flags & LegFlags::SACK != 0,
                tsval: (l.flags & LegFlags::TS != 0).then_some(tsval),
            })?;
            let position = self.released_end(r).ok_or_else(gone)?;
            let record = abi::leg {
                flags: l.flags & (LegFlags::TS | LegFlags::SACK) | LegFlags::TRACKED,
                wscale_in: l.wscale_in,
                wscale_out: l.wscale_out,
                mss_in: l.mss_in,
                mss_out: l.mss_out,
                irs: end.wrapping_sub(1).wrapping_sub(position as u32),
                iss: l.iss,
                max_in: end,
                ack_in: ack,
                edge_in: ack.wrapping_add(65535),
                tsval_in: l.tsval_in,
                max_out: ack,
                local_out: ack,
                ack_out: end,
                win_out: 65535,
                edge_out: end.wrapping_add(1 << 30),
                ack_local: end,
                win_local: 65535,
                tsval_out: tsval,
                ifindex: l.ifindex,
                dmac: l.dmac,
                smac: l.smac,
                in64: position,
                seen: l.seen,
                ..Default::default()
            };
            Ok((s, record))
        };
        let (sa, la) = one(a, b, pa.end, pa.max_ack)?;
        let (sb, lb) = one(b, a, pb.end, pb.max_ack)?;
        self.insert_leg(&a.leg, &la)?;
        self.insert_leg(&b.leg, &lb)?;
        for s in [&sa, &sb] {
            Repair::Off.set(s)?;
        }
        Ok([sa, sb])
    }
}
