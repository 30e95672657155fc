//! The hosts connect again from the same ports as soon as their connection is over, while the process has not heard of the end: its
//! next steps are about a connection that is gone, and must not change the new one.

use super::{MS, World, relay::State};
use longsplice_datapath::{Pair, Side, model::Start};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

impl World {
    /// Uses a random generator of its own. The connection ends by FINs, and in half of the runs by a reset.
    pub(super) fn is_to_be_reused(&mut self, seed: u64) {
        let mut rng = SmallRng::seed_from_u64(seed.rotate_left(32) ^ 3);
        match rng.random_range(0..4) {
            0 => self.other_cpu = Some(SmallRng::seed_from_u64(seed)),
            1 | 2 => self.is_to_be_reset(seed),
            _ => {}
        }
        self.reuse = Some(rng);
    }

    /// Occasionally begins anew, once the connection is over. Returns whether it has.
    pub(super) fn begin_anew(&mut self) -> bool {
        if !self.model.is_over() {
            return false;
        }
        let Some(r) = self.reuse.as_mut() else { return false };
        if !r.random_bool(0.3) {
            return false;
        }
        let mut r = r.clone();
        let start = |r: &mut SmallRng| Start { irs: r.random(), iss: r.random(), ..Start::default() };
        let last = Pair::from_fn(|from| self.model.path(from));
        self.model.replace(Pair::new(start(&mut r), start(&mut r)));
        self.relay.replaced = Some(last);
        // the socket of the client's old connection is reset; the process may hear of the rest before that
        if self.relay.state == State::Copying || r.random_bool(0.5) {
            self.sockets.client.reset = true;
        }
        self.out.reused = true;
        self.out.splices = self.relay.splices;
        let new = format!("{:?} {:?}", self.model, Side::BOTH.map(|side| self.model.path(side)));
        // it wakes up again and again, and may wish to splice or to take back
        for _ in 0..100 {
            if r.random_bool(0.5) {
                self.relay.switch_at = 0;
            }
            self.now += r.random_range(0..2000 * MS); // what was received before a reset has to be delivered, for a while
            let next = self.relay.run(self.now, &mut self.model, &mut self.sockets, &mut r);
            for line in std::mem::take(&mut self.relay.log) {
                self.note(|_| line);
            }
            let now = format!("{:?} {:?}", self.model, Side::BOTH.map(|side| self.model.path(side)));
            if now != new {
                self.fail(&format!("the new connection was changed: {new}"));
            }
            if next.is_none() || self.relay.state == State::Ended || self.out.error.is_some() {
                return true;
            }
        }
        // after a reset, the other host has to take what came before; here it does nothing any more
        if self.relay.failure.is_none() {
            self.fail("a flow whose connection is gone does not end");
        }
        true
    }
}
