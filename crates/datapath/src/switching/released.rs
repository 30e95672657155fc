//! Released flows, which have no sockets: the state needed to count their bytes and to take them back.

use crate::{
    Connection, Datapath, LegFlags, LegView, Pair, PathFlags, PathView, Phase, Repair, Side, SwitchError, Tuple,
    abi::{self, switch_op},
    clock::monotonic,
    sockets::diag,
    sockets::socket::{Restore, reset, restore},
    switching::switch::bare,
};
use bytes::{Buf, BufMut, TryGetError};
use nix::libc;
use std::{io, os::fd::OwnedFd, time::Duration};

/// A leg of a released flow: the needed part of its record, as it
/// was at the commit. Small, because there may be a million of them.
#[derive(Clone, Copy, Debug)]
pub struct Released {
    in64: u64,
    seen: u64,
    flags: u32,
    max_in: u32,
    iss: u32,
    tsval_in: u32,
    clock_in: u32,
    tsval_out: u32,
    ts_from_peer: u32,
    mss_in: u16,
    mss_out: u16,
    wscale_in: u8,
    wscale_out: u8,
}

impl Released {
    fn new(l: &abi::leg) -> Released {
        Released {
            in64: l.in64,
            seen: l.seen,
            flags: l.flags,
            max_in: l.max_in,
            iss: l.iss,
            tsval_in: l.tsval_in,
            clock_in: l.clock_in,
            tsval_out: l.tsval_out,
            ts_from_peer: l.ts_from_peer,
            mss_in: l.mss_in,
            mss_out: l.mss_out,
            wscale_in: l.wscale_in,
            wscale_out: l.wscale_out,
        }
    }

    /// Writes it into the record of its flow.
    pub fn write(&self, to: &mut impl BufMut) {
        for n in [self.in64, self.seen] {
            to.put_u64_ne(n);
        }
        let Released { flags, max_in, iss, tsval_in, clock_in, tsval_out, ts_from_peer, .. } = *self;
        for n in [flags, max_in, iss, tsval_in, clock_in, tsval_out, ts_from_peer] {
            to.put_u32_ne(n);
        }
        for n in [self.mss_in, self.mss_out] {
            to.put_u16_ne(n);
        }
        to.put_slice(&[self.wscale_in, self.wscale_out]);
    }

    /// Reads what [`Released::write`] has written. Fails if it is too short.
    pub fn read(from: &mut impl Buf) -> Result<Released, TryGetError> {
        Ok(Released {
            in64: from.try_get_u64_ne()?,
            seen: from.try_get_u64_ne()?,
            flags: from.try_get_u32_ne()?,
            max_in: from.try_get_u32_ne()?,
            iss: from.try_get_u32_ne()?,
            tsval_in: from.try_get_u32_ne()?,
            clock_in: from.try_get_u32_ne()?,
            tsval_out: from.try_get_u32_ne()?,
            ts_from_peer: from.try_get_u32_ne()?,
            mss_in: from.try_get_u16_ne()?,
            mss_out: from.try_get_u16_ne()?,
            wscale_in: from.try_get_u8()?,
            wscale_out: from.try_get_u8()?,
        })
    }

    /// Returns the position of all data from the leg's host, by its entry.
    pub fn end(&self, path: &PathView) -> u64 {
        self.in64 + path.passed(self.max_in)
    }

    /// Returns whether the leg is transparent: neither of its addresses is ours.
    pub fn is_transparent(&self) -> bool {
        self.flags & LegFlags::TRANSPARENT != 0
    }
}

/// Flags of a record that a recreated one keeps.
const KEPT: u32 = LegFlags::TS | LegFlags::SACK | LegFlags::TRANSPARENT | LegFlags::END_TO_END | LegFlags::ECN;

/// New sockets for a released flow.
#[derive(Debug)]
pub struct Recreated {
    /// The sockets, in control mode, with nothing unread.
    pub sockets: Pair<OwnedFd>,
    /// Stream positions at which they begin. Everything that the hosts
    /// sent before was forwarded, and acknowledged by the other host.
    pub ends: Pair<u64>,
}

/// The result of resetting all flows in forwarding mode.
#[derive(Debug, Default)]
pub struct Resets {
    /// Number of flows whose hosts were both reset.
    pub reset: u64,
    /// Number of flows of which at least one host was not reset.
    pub failed: u64,
    /// The last error.
    pub error: Option<io::Error>,
}

impl std::fmt::Display for Resets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} forwarded connections were reset", self.reset)?;
        match &self.error {
            Some(error) => write!(f, "; of {} others a host was not told: {error}", self.failed),
            None => Ok(()),
        }
    }
}

/// Creates a socket like [`restore`], in place of a closing one if necessary. When a process is killed
/// during a switch, the kernel closes its sockets, and keeps those whose hosts do not answer for
/// minutes. Nobody holds them, and they do not know what has been forwarded since, so they are removed.
pub(crate) fn restore_instead(r: &Restore) -> io::Result<OwnedFd> {
    match restore(r) {
        Err(e) if e.raw_os_error() == Some(libc::EADDRNOTAVAIL) => {
            if diag::end_closing(&Tuple { remote: r.remote, local: r.local })? { restore(r) } else { Err(e) }
        }
        made => made,
    }
}

/// Time that the hosts of transparent connections have to answer a probe before the data path is removed.
const ANSWER: Duration = Duration::from_millis(100);

impl Datapath {
    /// Removes the leg's record from the data path; its path entry stays.
    /// Close the socket silently first. `None` if there is no record.
    pub fn release(&self, connection: impl Into<Connection>) -> Option<Released> {
        let connection = connection.into();
        let released = self.released(connection)?;
        self.forget_leg(&connection.leg);
        Some(released)
    }

    /// Returns what [`Datapath::release`] returns, and leaves the record where it is.
    pub fn released(&self, connection: impl Into<Connection>) -> Option<Released> {
        let Connection { leg, generation } = connection.into();
        let released = Released::new(&self.leg(&leg)?.raw);
        let is_another = generation != Connection::ANY && self.generation(&leg) != Some(generation);
        (!is_another).then_some(released)
    }

    /// Returns the position of all data from the leg's host. `None` if there is no path entry.
    pub fn released_end(&self, leg: &Tuple, r: &Released) -> Option<u64> {
        Some(r.end(&self.path(leg)?))
    }

    /// Creates sockets for both legs, in control mode. Fails with [`SwitchError::Busy`]
    /// while bytes are in flight: try again. With `may_be_busy`, it does not wait for these:
    /// unacknowledged data is then sent again by its host, and passes through the sockets.
    pub fn recreate(
        &self,
        connections: Pair<impl Into<Connection>>,
        released: &Pair<Released>,
        may_be_busy: bool,
    ) -> Result<Recreated, SwitchError> {
        let connections: Pair<Connection> = connections.map(Into::into);
        let (generations, legs) = (connections.map(|c| c.generation), connections.each_ref().map(|c| &c.leg));
        let halves = legs.map(bare);
        self.run(switch_op::OP_STOP, halves.each_ref(), generations, |args| args.fit = u32::from(!may_be_busy))?;
        let made = self.sockets(legs, released);
        if made.is_err() {
            self.run_bare(switch_op::OP_RESUME, connections.each_ref())?;
        }
        made.map_err(|e| {
            tracing::warn!(leg = ?legs.client, error = %e, "cannot create the sockets of a released flow: it stays forwarded");
            SwitchError::Run(e.raw_os_error().unwrap_or(0))
        })
    }

    /// Lets a flow go on without sockets if a process died in [`Datapath::recreate`]. Returns
    /// false if something else has stopped the flow. The order of the legs does not matter.
    pub fn resume(&self, legs: [&Tuple; 2]) -> bool {
        let Some(paths) = self.maps.paths_of(legs.map(Into::into)) else { return false };
        // a record that was inserted, but never used
        let is_fresh = |l: &abi::leg, p: &PathView, back: &PathView| {
            let used = LegFlags::PAIRED | LegFlags::FIN_IN | LegFlags::FIN_OUT | LegFlags::RESET | LegFlags::SYN;
            let is = (l.max_in, l.ack_local, l.max_out, l.local_out);
            let acked = p.acked(back);
            l.flags & used == 0 && is == (acked, acked, back.sent, p.max_ack)
        };
        let [p, q] = &paths;
        let is_unused = |t: &Tuple, p, back| self.leg(t).is_none_or(|l| is_fresh(&l.raw, p, back));
        let is_stopped = paths.iter().all(|p| p.flags & (PathFlags::SPLICED | PathFlags::DEAD) == 0);
        if !is_stopped || !is_unused(legs[0], p, q) || !is_unused(legs[1], q, p) {
            return false;
        }
        legs.iter().for_each(|t| self.forget_leg(t));
        self.run_bare(switch_op::OP_RESUME, Pair::from(legs)).is_ok()
    }

    /// Resets the leg's host if it does not know that its connection is over, and no socket is left to inform it. Returns false
    /// if it knows. Otherwise call it again, at growing intervals: segments may be lost, or a socket may not get through.
    pub fn reset_deserted(&self, connection: impl Into<Connection>) -> io::Result<bool> {
        // A socket closed during a switch does not know all bytes that were forwarded, so the host cannot accept its FIN.
        let is_ahead = |l: LegView| l.phase_out != Phase::Local || l.flags & LegFlags::AHEAD != 0;
        let connection = connection.into();
        let is_deaf = self.leg(&connection.leg).is_some_and(is_ahead);
        match self.reset_host(&connection, if is_deaf { restore_instead } else { restore }) {
            Err(e) if e.raw_os_error() == Some(libc::EADDRNOTAVAIL) => Ok(true), // there is a socket
            told => told,
        }
    }

    /// Removes the leg of a transparent connection whose process died during its handshake, and resets the host
    /// if it has answered, so that the handshake can start again. Returns false if a process holds its socket.
    pub fn forget_unopened(&self, leg: &Tuple) -> bool {
        let entry = self.idle_entry(leg);
        match self.reset_host(&entry.connection(), restore_instead) {
            // nothing was made in place of its socket, if it has one
            Ok(false) if diag::socket_state(leg).is_some_and(|socket| socket.is_held) => false,
            Ok(_) => self.sweep(&entry),
            Err(error) => {
                tracing::debug!(?leg, %error, "what is left of a handshake stays");
                false
            }
        }
    }

    fn reset_host(&self, connection: &Connection, restore: fn(&Restore) -> io::Result<OwnedFd>) -> io::Result<bool> {
        const TOLD: u32 = LegFlags::FIN_OUT | LegFlags::FIN_ACKED;
        let Connection { leg, generation } = connection;
        let Some(LegView { raw: l, flags, .. }) = self.leg(leg) else { return Ok(false) };
        // In this order: the record is that of the connection. Its numbers mean nothing to the host of a later one.
        if *generation != Connection::ANY && self.generation(leg) != Some(*generation) {
            return Ok(false);
        }
        // For an address that is not ours, the stack does not answer segments that arrive after our FIN.
        let is_answered = flags & LegFlags::TRANSPARENT == 0 || flags & LegFlags::FIN_IN != 0;
        if flags & (LegFlags::RESET_IN | LegFlags::SYN) != 0 || (flags & TOLD == TOLD && is_answered) {
            return Ok(false);
        }
        let made = restore(&Restore {
            next_out: l.ack_in.wrapping_sub(l.shim_out),
            next_in: l.ack_out.wrapping_sub(l.shim_in),
            tsval: (flags & LegFlags::TS != 0).then(|| l.tsval_out.wrapping_sub(l.shim_ts)),
            ..Restore::mute(leg)
        });
        self.conntrack.renew_for_reset(&[leg]);
        made.and_then(reset).map(|()| true)
    }

    /// Ends a flow in forwarding mode: stops forwarding, and resets both hosts with the sequence number that they expect
    /// (RFC 9293, 3.5.2). A reset may be lost, and the stack does not answer for addresses that are not ours, so the entries
    /// stay: until the caller forgets them, they answer what the hosts still send. Returns false if the flow has ended already,
    /// or is not forwarded. Costs some dozen system calls, and waits for nothing. The order of the legs does not matter.
    pub fn reset_forwarded(&self, legs: [impl Into<Connection>; 2]) -> io::Result<bool> {
        let connections: [Connection; 2] = legs.map(Into::into);
        let Some([a, b]) = self.maps.paths_of(connections) else { return Ok(false) };
        let lives = |p: &PathView| p.flags & (PathFlags::SPLICED | PathFlags::DEAD) == PathFlags::SPLICED;
        if !lives(&a) || !lives(&b) || a.flags & b.flags & PathFlags::FIN_ACKED != 0 {
            return Ok(false);
        }
        // from now on, our own resets pass
        connections.iter().try_for_each(|connection| self.mark_dead(connection))?;
        let legs = connections.each_ref().map(|c| &c.leg);
        self.conntrack.renew_for_reset(&legs);
        let told = [(legs[0], b.sent, a.end), (legs[1], a.sent, b.end)].map(|(leg, next_out, next_in)| {
            restore_instead(&Restore { next_out, next_in, ..Restore::mute(leg) }).and_then(reset)
        });
        told.into_iter().collect::<io::Result<()>>().map(|()| true)
    }

    /// Marks the entry of a leg in forwarding mode as reset: what its host still sends is answered with a reset.
    pub fn mark_dead(&self, connection: &Connection) -> io::Result<()> {
        self.maps.path_op_on(abi::path_op::PATH_OP_DEAD, connection)
    }

    /// Resets all flows in forwarding mode, some ten thousand a second, and returns the result.
    /// Includes flows that a limit has taken back when no process had sockets for them any more.
    pub fn reset_all_forwarded(&self) -> Resets {
        let mut all = Resets::default();
        for (leg, _) in self.paths().iter().filter(|(_, p)| p.flags & PathFlags::SPLICED != 0) {
            let Some(other) = self.other_leg(leg) else { continue };
            match self.reset_forwarded([leg, &other]) {
                Ok(is_reset) => all.reset += u64::from(is_reset),
                Err(error) => (all.failed, all.error) = (all.failed + 1, Some(error)),
            }
        }
        let legs = self.legs();
        let mut reset = |(leg, record): &(Tuple, LegView)| {
            // after a switch, a socket's segments are useless without the leg's record
            let restore = if record.flags & LegFlags::PAIRED != 0 { restore_instead } else { restore };
            if let Err(error) = self.reset_host(&leg.into(), restore) {
                (all.failed, all.error) = (all.failed + 1, Some(error));
            }
        };
        legs.iter().for_each(&mut reset);
        // A host that was ahead of its reset has ignored it, and answers the probe. The stack does
        // not answer for an address that is not ours, but now the record has the right number.
        let transparent = || legs.iter().filter(|(_, record)| record.flags & LegFlags::TRANSPARENT != 0);
        if transparent().next().is_some() {
            std::thread::sleep(ANSWER);
        }
        let is_ahead =
            |(leg, before): &&(Tuple, LegView)| self.leg(leg).is_some_and(|l| l.raw.ack_in != before.raw.ack_in);
        transparent().filter(is_ahead).for_each(reset);
        all
    }

    fn sockets(&self, legs: Pair<&Tuple>, released: &Pair<Released>) -> io::Result<Recreated> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let paths = Pair::new(self.path(legs.client).ok_or_else(gone)?, self.path(legs.server).ok_or_else(gone)?);
        let now = monotonic().as_nanos() as u64;
        let one = |side: Side| -> io::Result<(OwnedFd, abi::leg)> {
            let (leg, l, o) = (legs[side], &released[side], &released[side.other()]);
            // p: what the leg's host has sent; back: what it was sent, including the acknowledgements and windows of the other host
            let (p, back) = (&paths[side], &paths[side.other()]);
            // This host keeps what the other host has not acknowledged, and sends it once more.
            let (end, ack) = (p.acked(back), p.max_ack);
            let (least, most) = p.rooms();
            let scaled = l.wscale_in != 0 || l.wscale_out != 0;
            let largest = 65535 << l.wscale_out;
            // the part of the other host's last window that can be announced to this host
            let promised = (back.rooms().1 << o.wscale_in).min(largest);
            let ts = l.flags & o.flags & LegFlags::TS != 0;
            let silent = |l: &Released| (now - l.seen) / 1_000_000;
            // like tsval_reached in bpf/clock.h
            let ms = now / 1_000_000 + (silent(o) >> 11) + 8;
            let reached = o.clock_in.wrapping_add(ms as u32).wrapping_add(l.ts_from_peer);
            let tsval = if ts { reached } else { l.tsval_out.wrapping_add(silent(l) as u32) };
            let s = restore_instead(&Restore {
                local: leg.local,
                remote: leg.remote,
                next_out: ack,
                next_in: end,
                window: least << l.wscale_in,
                promised,
                mss: l.mss_in,
                wscale: scaled.then_some((l.wscale_in, l.wscale_out)),
                sack: l.flags & LegFlags::SACK != 0,
                tsval: (l.flags & LegFlags::TS != 0).then_some(tsval),
                transparent: l.flags & LegFlags::TRANSPARENT != 0,
            })?;
            let position = l.in64 + p.passed(l.max_in) - u64::from(p.end.wrapping_sub(end));
            let hop = self.maps.via(back.via).ok_or_else(gone)?;
            let record = abi::leg {
                flags: l.flags & KEPT
                    | LegFlags::TRACKED
                    | LegFlags::RESTORED
                    | LegFlags::PROBE
                    | if back.sent == ack { 0 } else { LegFlags::AHEAD },
                wscale_in: l.wscale_in,
                wscale_out: l.wscale_out,
                mss_in: l.mss_in,
                mss_out: l.mss_out,
                iss: l.iss,
                max_in: end,
                ack_in: ack,
                edge_in: ack.wrapping_add(most << l.wscale_in), // like wake() in bpf/path.h, and so is edge_out
                tsval_in: l.tsval_in,
                floor_in: l.tsval_in,
                clock_in: l.clock_in,
                max_out: back.sent,
                local_out: ack,
                ack_out: end,
                win_out: promised,
                edge_out: p.end.wrapping_add(largest),
                ack_local: end,
                win_local: promised,
                tsval_out: tsval,
                ifindex: hop.ifindex,
                dmac: hop.dmac,
                smac: hop.smac,
                mark: hop.mark,
                in64: position,
                seen: l.seen,
                ..Default::default()
            };
            Ok((s, record))
        };
        let (client_socket, client_record) = one(Side::Client)?;
        let (server_socket, server_record) = one(Side::Server)?;
        // From here on, segments reach the sockets, and the firewall before them.
        let away = released.each_ref().map(|l| Duration::from_nanos(now.saturating_sub(l.seen)));
        self.conntrack.renew_flow(legs, released.each_ref().map(|l| (l.wscale_in, l.wscale_out)), away, true);
        self.insert_leg(legs.client, &client_record)?;
        self.insert_leg(legs.server, &server_record)?;
        let sockets = Pair::new(client_socket, server_socket);
        // The path entries do not store the exact size of the hosts' windows, and a host may wait for the other's window to open.
        sockets.iter().try_for_each(|s| Repair::Probe.set(s))?;
        Ok(Recreated { sockets, ends: Pair::new(client_record.in64, server_record.in64) })
    }
}
