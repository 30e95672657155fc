//! One of the hosts resets the connection at a random moment, and forgets it. The other host must learn of it.

use super::{
    Event, MS, Queued, World,
    relay::State,
    tcp::{Packet, Time, after, before},
};
use longsplice_datapath::{Pair, Side};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{cmp::Reverse, ops::Range};

/// Which host resets, and when.
pub struct Reset {
    host: Side,
    /// Instants left before the reset.
    turns: u32,
    /// Count only instants in a drain or in forwarding mode.
    switched: bool,
    /// Only while the host's send window is smaller than its data in flight.
    shrunk: bool,
    /// Only while data is copied, and nothing reaches the host any more: a firewall before it has forgotten the connection, too.
    mute: bool,
    done: bool,
    /// Numbers of the data from each host that has come to us, and of that which has left for each host.
    came: Pair<Vec<Range<u32>>>,
    left: Pair<Vec<Range<u32>>>,
}

fn has(all: &[Range<u32>], at: u32) -> bool {
    all.iter().any(|data| !before(at, data.start) && before(at, data.end))
}

impl World {
    /// Uses a random generator of its own, as for a death.
    pub(super) fn is_to_be_reset(&mut self, seed: u64) {
        let mut rng = SmallRng::seed_from_u64(seed.rotate_left(16));
        // a host with nothing to send legitimately misses a reset that is lost
        self.weather.loss = 0.0;
        if rng.random_bool(0.5) {
            self.other_cpu = Some(SmallRng::seed_from_u64(!seed));
        }
        let most = 2u32 << rng.random_range(0..9);
        let (host, turns, switched) =
            (Side::BOTH[rng.random_range(0..2)], rng.random_range(0..most), rng.random_bool(0.8));
        if switched {
            self.relay.switch_at = rng.random_range(0..100 * MS);
        }
        let (shrunk, mute) = (rng.random_bool(0.3), !switched && rng.random_bool(0.5));
        if mute {
            // its only reset must not arrive before its data
            self.weather.reorder = 0.0;
            self.other_cpu = None;
        }
        let (came, left) = (Pair::default(), Pair::default());
        self.reset = Some(Reset { host, turns, switched, shrunk: shrunk && !mute, mute, done: false, came, left });
    }

    pub(super) fn was_reset(&self) -> bool {
        self.reset.as_ref().is_some_and(|r| r.done)
    }

    /// What our socket had received from a host when it was reset has reached the other host before the reset did. It cannot if
    /// bytes are missing before it that were forwarded past the sockets: the hosts alone answer for those. The receiver had no room
    /// for them, dropped them because they were not in order (RFC 9293, SHLD-31), or has never got them; and their sender, which
    /// would have to repeat them, has forgotten the connection (3.10.5).
    pub(super) fn judge_reset(&mut self) {
        // positions do not tell how much has passed beside leaps
        let is_judged = self.was_reset() && !self.out.reused && self.out.leaps == 0 && self.out.error.is_none();
        let Some(failure) = self.relay.failure.filter(|_| is_judged) else { return };
        let to = failure.side.other();
        let got = self.apps[to].got + self.hosts[to].unread() as u64;
        self.out.delivered = got;
        let is_lost = self.relay.forwarded[failure.side].contains(&got) && self.is_lost(failure.side, got);
        if got < failure.received && !is_lost {
            self.fail(&format!("{to:?} got {got} bytes before the reset, of {}", failure.received));
        }
    }

    /// Notes the data of a segment from a host that a copy passes on, or of one that leaves for it. A copy that cannot be cut to its
    /// part is dropped (`is_straddle()`), as if it were lost on the way.
    pub(super) fn note_data(&mut self, host: Side, leaves: bool, p: &Packet, kept: u32) {
        let Some(r) = self.reset.as_mut().filter(|_| kept > 0) else { return };
        let all = if leaves { &mut r.left[host] } else { &mut r.came[host] };
        all.push(p.seq..p.seq.wrapping_add(kept));
    }

    /// Whether a byte from this host, which its receiver lacks, has never come to us, or has reached the receiver in vain: it has
    /// left, and is not on its way.
    fn is_lost(&self, from: Side, position: u64) -> bool {
        let (to, Some(r)) = (from.other(), &self.reset) else { return false };
        let (_, _, next) = self.hosts[to].numbers();
        let leg = self.model.leg(from);
        let has_come = has(&r.came[from], leg.max_in.wrapping_add(position.wrapping_sub(leg.in64) as u32));
        let brings_it = |p: &Packet| !after(p.seq, next) && after(p.seq.wrapping_add(p.data.len() as u32), next);
        let is_coming = |e: &Event| matches!(e, Event::ToHost(at, p) if *at == to && brings_it(p));
        !has_come || (has(&r.left[to], next) && !self.queue.iter().any(|Reverse(Queued(_, _, e))| is_coming(e)))
    }

    pub(super) fn live_and_reset(&mut self) {
        let copying = self.relay.state == State::Copying;
        let Some(Reset { host, turns, switched, shrunk, mute, done: done @ false, .. }) = &mut self.reset else {
            return;
        };
        if (*switched && copying) || (*mute && !copying) || (*shrunk && !self.hosts[*host].is_beyond()) {
            return;
        }
        if *turns > 0 {
            *turns -= 1;
            return;
        }
        let (host, mute, h) = (*host, *mute, &mut self.hosts[*host]);
        if h.fin_acked && h.eof {
            return; // it has ended normally
        }
        *done = true;
        h.abort(self.now);
        // segments that arrive while it closes get no answer; answers to the reset arrive later
        h.closed_at = if mute { Time::MAX } else { self.now + self.delay[host] };
        self.out.reset = true;
        self.note(|_| format!("{host:?} resets"));
    }
}
