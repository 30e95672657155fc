//! One of the hosts resets the connection at a random moment, and forgets it. The other host must learn of it.

use super::{MS, World, relay::State};
use longsplice_datapath::Side;
use rand::{RngExt, SeedableRng, rngs::SmallRng};

/// Which host resets, and when.
pub struct Reset {
    host: Side,
    /// Instants left before the reset.
    turns: u32,
    /// Count only instants in a drain or in forwarding mode.
    switched: bool,
    /// Only while the host's send window is smaller than its data in flight.
    shrunk: bool,
    done: bool,
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
        let shrunk = rng.random_bool(0.3);
        self.reset = Some(Reset { host, turns, switched, shrunk, done: false });
    }

    pub(super) fn was_reset(&self) -> bool {
        self.reset.as_ref().is_some_and(|r| r.done)
    }

    /// What our socket had received from a host when it was reset has reached the other host before the reset did.
    pub(super) fn judge_reset(&mut self) {
        // positions do not tell how much has passed beside leaps
        let is_judged = self.was_reset() && !self.out.reused && self.out.leaps == 0 && self.out.error.is_none();
        let Some(failure) = self.relay.failure.filter(|_| is_judged) else { return };
        let to = failure.side.other();
        let got = self.apps[to].got + self.hosts[to].unread() as u64;
        self.out.delivered = got;
        if got < failure.received {
            self.fail(&format!("{to:?} got {got} bytes before the reset, of {}", failure.received));
        }
    }

    pub(super) fn live_and_reset(&mut self) {
        let copying = self.relay.state == State::Copying;
        let Some(Reset { host, turns, switched, shrunk, done: done @ false }) = &mut self.reset else { return };
        if (*switched && copying) || (*shrunk && !self.hosts[*host].is_beyond()) {
            return;
        }
        if *turns > 0 {
            *turns -= 1;
            return;
        }
        let (host, h) = (*host, &mut self.hosts[*host]);
        if h.fin_acked && h.eof {
            return; // it has ended normally
        }
        *done = true;
        h.abort(self.now);
        // segments that arrive while it closes get no answer; answers to the reset arrive later
        h.closed_at = self.now + self.delay[host];
        self.out.reset = true;
        self.note(|_| format!("{host:?} resets"));
    }
}
