//! The paths between us and the hosts change: they become longer, shorter or
//! narrower, or fail for a while. Packets already on the old path still arrive.

use super::{MS, Time, World, tcp::FIN, tcp::Packet};
use longsplice_datapath::{Pair, Side};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

/// Future path changes, and the current state of both paths.
pub struct Detours {
    rng: SmallRng,
    left: u32,
    at: Time,
    /// The path is down until this time.
    down: Pair<Time>,
    /// Maximum payload bytes that pass towards us. Larger segments are truncated, like those that do not fit the outgoing
    /// path (make_fit() in bpf/icmp.h); the ICMP answers to their sender are lost.
    most: Pair<usize>,
}

impl World {
    /// Uses a random generator of its own, as for a death.
    pub(super) fn is_to_move(&mut self, seed: u64) {
        let mut rng = SmallRng::seed_from_u64(seed.rotate_left(32) ^ 1);
        if rng.random_bool(0.3) {
            self.other_cpu = Some(SmallRng::seed_from_u64(!seed));
        }
        let (left, at) = (rng.random_range(1..20), rng.random_range(0..50 * MS));
        self.detours = Some(Detours { rng, left, at, down: Pair::both(0), most: Pair::both(usize::MAX) });
    }

    pub(super) fn live_and_move(&mut self) {
        let now = self.now;
        let Some(d) = self.detours.as_mut().filter(|d| d.left > 0 && d.at <= now) else { return };
        let side = Side::BOTH[d.rng.random_range(0..2)];
        match d.rng.random_range(0..4) {
            0 => d.down[side] = now + d.rng.random_range(0..300 * MS),
            1 => d.most[side] = d.rng.random_range(500..1448),
            2 => d.most[side] = usize::MAX,
            _ => {
                let far = if d.rng.random_bool(0.5) { MS } else { 60 * MS };
                self.delay[side] = d.rng.random_range(10..far);
                self.fifo[side] = [0; 2]; // the new path may be faster
            }
        }
        d.left -= 1;
        d.at = now + d.rng.random_range(0..100 * MS);
        self.out.detours += 1;
        let (down, most) = (d.down, d.most);
        self.note(|w| format!("paths: {:?} long, down until {down:?}, {most:?} wide", w.delay));
    }

    /// Applies the path to a packet: may truncate it. Returns whether it passes.
    pub(super) fn pass_detour(&mut self, side: Side, to_host: bool, p: &mut Packet) -> bool {
        let Some(d) = &self.detours else { return true };
        if !to_host && p.data.len() > d.most[side] {
            p.data.truncate(d.most[side]);
            p.flags &= !FIN;
        }
        d.down[side] <= self.now
    }
}
