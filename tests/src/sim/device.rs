//! Our devices, whose queues may be full. The kernel then tells the socket, which counts new data as unsent, although the data
//! path has seen it leave.

use super::{Side, World, seg, tcp::Packet};
use longsplice_datapath::model::Seg;
use rand::{RngExt, SeedableRng, rngs::SmallRng};

/// How full the queues are.
pub struct Device {
    rng: SmallRng,
    /// Probability that a segment finds no room.
    full: f64,
    /// Probability that a segment arrives while the process works on its socket.
    busy: f64,
    /// Segments that found no room.
    pub refused: u32,
}

impl Device {
    /// Whether the queue has room for a segment.
    pub fn takes_one(&mut self) -> bool {
        let is_full = self.rng.random_bool(self.full);
        self.refused += u32::from(is_full);
        !is_full
    }
}

impl World {
    /// Combines this with what other runs are about.
    pub fn is_to_be_full(&mut self, seed: u64) {
        let mut rng = SmallRng::seed_from_u64(!seed);
        match rng.random_range(0..5) {
            0 => self.other_cpu = Some(SmallRng::seed_from_u64(seed)),
            1 => self.adversary = Some(SmallRng::seed_from_u64(seed)),
            2 => self.is_to_die(seed),
            3 => self.is_to_move(seed),
            _ => {}
        }
        let (full, busy) = (rng.random_range(0.0..0.2), rng.random_range(0.0..0.3));
        self.device = Some(Device { rng, full, busy, refused: 0 });
    }

    /// A segment from this host, with what the data path asks its socket.
    pub fn arriving(&mut self, from: Side, p: &Packet) -> Seg {
        let socket = &self.sockets[from];
        let busy = self.device.as_mut().is_some_and(|d| d.rng.random_bool(d.busy));
        let (known, (_, sent, next)) = (!busy && !socket.is_gone(), socket.numbers());
        Seg { socket_known: known.into(), socket_sent: sent, socket_next: next, ..seg(p) }
    }
}
