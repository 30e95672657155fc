//! One of the hosts resets the connection at some moment, and forgets it. The other one must hear of that.

use super::{MS, World, relay::State};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

/// Which, and when.
pub struct Reset {
    host: usize,
    /// So many things happen before.
    turns: u32,
    /// Only those count that happen in a drain, or in forwarding mode.
    switched: bool,
    /// Only while its window is less than what it has sent.
    shrunk: bool,
    done: bool,
}

impl World {
    /// Choices of their own, as for a death.
    pub(super) fn is_to_be_reset(&mut self, seed: u64) {
        let mut rng = SmallRng::seed_from_u64(seed.rotate_left(16));
        // whoever has nothing to send does not hear of a reset that is lost on the way, by right
        self.weather.loss = 0.0;
        if rng.random_bool(0.5) {
            self.other_cpu = Some(SmallRng::seed_from_u64(!seed));
        }
        let most = 2u32 << rng.random_range(0..9);
        let (host, turns, switched) = (rng.random_range(0..2), rng.random_range(0..most), rng.random_bool(0.8));
        if switched {
            self.relay.switch_at = rng.random_range(0..100 * MS);
        }
        let shrunk = rng.random_bool(0.3);
        self.reset = Some(Reset { host, turns, switched, shrunk, done: false });
    }

    pub(super) fn was_reset(&self) -> bool {
        self.reset.as_ref().is_some_and(|r| r.done)
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
        let (i, h) = (*host, &mut self.hosts[*host]);
        if h.fin_acked && h.eof {
            return; // it has ended well
        }
        *done = true;
        h.abort(self.now);
        // what comes while it closes is not answered; what answers the reset comes later
        h.closed_at = self.now + self.delay[i];
        self.out.reset = true;
        self.note(|_| format!("host {i} resets"));
    }
}
