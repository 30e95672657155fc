//! The process dies at a random moment, with its sockets, and another one takes over the state left in the kernel.

use super::{
    MS, World,
    relay::State,
    show,
    tcp::{ACK, Packet, RST, Time, before},
};
use longsplice_datapath::Side;
use rand::{RngExt, SeedableRng, rngs::SmallRng};

/// The time of the death.
pub struct Death {
    /// Wake-ups of the process before its death.
    wakes: u32,
    /// Count only wake-ups while the flow is spliced.
    spliced: bool,
    /// Time between the death and the start of the next process.
    vacant: Time,
    /// When the next process starts.
    next: Option<Time>,
}

impl World {
    /// Uses a random generator of its own: apart from these choices, the run is that of the same seed.
    pub(super) fn is_to_die(&mut self, seed: u64) {
        let mut rng = SmallRng::seed_from_u64(seed.rotate_left(32));
        if self.has_tiny_windows() {
            return;
        }
        if rng.random_bool(0.5) {
            self.other_cpu = Some(SmallRng::seed_from_u64(!seed));
        }
        // logarithmic distribution: a few are as likely as many
        let dice = |r: &mut SmallRng, bits| {
            let most = 2u64 << r.random_range(0..bits);
            r.random_range(0..most)
        };
        let spliced = rng.random_bool(0.5);
        let wakes = dice(&mut rng, if spliced { 6 } else { 11 }) as u32;
        let vacant = dice(&mut rng, 12) * MS;
        self.death = Some(Death { wakes, spliced, vacant, next: None });
        if spliced {
            // forwarded for good, or long enough for more than a window
            let habits = &mut self.relay.habits;
            // and no host must stay beyond the other's window for good, because only the sockets could resolve that
            habits.patience = 100_000 * MS;
            habits.period = habits.period.max(500 * MS);
            habits.limits &= rng.random_bool(0.3);
            habits.trigger &= rng.random_bool(0.3);
            self.relay.switch_at = rng.random_range(0..100 * MS);
        }
    }

    /// Hosts that have seen larger windows do not use one below a segment, so they need somebody who unsplices the flow.
    pub(super) fn has_tiny_windows(&self) -> bool {
        self.hosts.iter().any(|h| h.style.receive < 2 * h.style.mss)
    }

    pub(super) fn has_died(&self) -> bool {
        matches!(self.relay.state, State::Killed(_))
    }

    /// Whether the connections may end before all data has arrived.
    pub(super) fn may_break_off(&self) -> bool {
        (self.has_died() && !self.relay.goes_on) || self.was_reset()
    }

    /// Whether a host may wait forever. A host with nothing to send does not learn of a reset that was lost, nor of one that
    /// was never sent: a flow that a limit returns to sockets that no longer exist is reset by its next segments.
    pub(super) fn may_be_silent(&self) -> bool {
        self.has_died() && self.may_break_off() && self.hosts.iter().all(|h| h.reset || h.is_quiet())
    }

    /// Whether both hosts have sent more than the other one can take, in a flow that stays forwarded because its process is dead:
    /// each drops the other's acknowledgements (docs/limits.md).
    pub(super) fn are_beyond(&self) -> bool {
        let is_beyond = |from: Side| {
            let (path, (_, max, _)) = (self.model.path(from), self.hosts[from].numbers());
            !before(max.wrapping_add(path.sent.wrapping_sub(path.end)), self.hosts[from.other()].edge())
        };
        self.has_died() && Side::BOTH.into_iter().all(is_beyond)
    }

    /// Called before each wake-up of the process.
    pub(super) fn live_and_die(&mut self) {
        let now = self.now;
        let Some(death) = &mut self.death else { return };
        match (self.relay.state, death.next) {
            (State::Killed(false), Some(at)) if at <= now => {
                self.model.time(now * 1000);
                self.relay.take_over(now, &mut self.model);
            }
            (State::Killed(_), _) | (State::Ended, _) => return,
            _ if self.relay_at.is_none_or(|at| at > now) => return,
            (state, _) if death.spliced && state != State::Spliced => return,
            _ if death.wakes > 0 => return death.wakes -= 1,
            _ => {
                self.model.time(now * 1000);
                self.relay.kill(now, &mut self.model, &mut self.sockets);
                death.next = Some(now + death.vacant);
                (self.out.killed, self.relay_at) = (true, death.next);
            }
        }
        for line in std::mem::take(&mut self.relay.log) {
            self.note(|_| line);
        }
    }

    /// Answers a segment with a reset if our socket no longer exists.
    pub(super) fn answer_for_nobody(&mut self, from: Side, p: &Packet) -> bool {
        if !(self.has_died() || self.was_reset()) || !self.sockets[from].is_gone() {
            return false;
        }
        self.note(|_| format!("{from:?} in {}: no socket", show(p)));
        if let Some(reset) = reset_for(p) {
            self.by_socket(from, &reset);
        }
        true
    }

    /// Answers a segment with a reset at a host whose connection no longer exists.
    pub(super) fn answer_by_nobody(&mut self, host: Side, p: &Packet) {
        let closing = self.now < self.hosts[host].closed_at;
        self.note(|_| {
            format!("{host:?} <- {}: {}", show(p), if closing { "while it closes" } else { "no connection" })
        });
        if closing {
            return;
        }
        if let Some(reset) = reset_for(p) {
            self.wire(host, false, reset);
        }
    }
}

/// The reset that answers a segment for a closed socket (RFC 9293, 3.10.7.1).
fn reset_for(p: &Packet) -> Option<Packet> {
    let (seq, flags) = if p.flags & ACK != 0 { (p.ack, RST) } else { (0, RST | ACK) };
    let reset = Packet { seq, ack: p.end(), flags, ..Packet::default() };
    (p.flags & RST == 0).then_some(reset)
}
