//! Gigabytes pass between two steps: all numbers move on that segments would move, and what does not move with them becomes
//! old. The packets themselves would take too long.

use super::{MS, World, relay::State};
use longsplice_datapath::{Side, model::Leap};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

impl World {
    /// Uses a random generator of its own, and combines this with what other runs are about.
    pub(super) fn is_to_leap(&mut self, seed: u64) {
        let mut rng = SmallRng::seed_from_u64(seed.rotate_left(32) ^ 2);
        match rng.random_range(0..5) {
            0 => self.other_cpu = Some(SmallRng::seed_from_u64(seed)),
            1 => self.adversary = Some(SmallRng::seed_from_u64(seed)),
            2 => self.is_to_die(seed),
            3 => self.is_to_be_reset(seed),
            _ => {}
        }
        // pauses, in which nothing is in flight
        for app in &mut self.apps {
            app.pause = rng.random_range(50..500) * MS;
            app.chunk = app.chunk.max((app.total / 20) as usize);
        }
        self.leaps = Some(rng);
    }

    /// Occasionally moves one direction on by gigabytes.
    pub(super) fn leap(&mut self) {
        if !self.is_silent() {
            return;
        }
        let Some(r) = self.leaps.as_mut() else { return };
        if r.random_bool(0.5) {
            return;
        }
        let from = Side::BOTH[r.random_range(0..2)];
        let n = match r.random_range(0..4) {
            0 => r.random_range(0..1 << 34),
            _ => r.random_range(1 << 31..1 << 32),
        };
        let to = from.other();
        let ends = [&self.hosts[from], &self.hosts[to]];
        if !ends.iter().all(|h| h.may_leap() && !h.is_gone()) {
            return;
        }
        let are_copied =
            self.relay.state == State::Copying && self.sockets.iter().all(|s| s.may_leap() && !s.is_gone());
        let Some(how) = self.model.leap(from, n, are_copied) else { return };
        let moved = n as u32;
        self.hosts[from].leap_out(moved);
        self.hosts[to].leap_in(moved);
        if how == Leap::Copied {
            self.sockets[from].leap_in(moved);
            self.sockets[to].leap_out(moved);
            self.relay.leap(from, n);
        }
        self.out.leaps += 1;
        self.note(|_| format!("{n} bytes from {from:?} pass: {how:?}"));
    }
}
