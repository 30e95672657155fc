//! The queue of the hold policy (crates/engine, holder.rs): segments wait for
//! the end of a drain, and are then fed in again as if they had just arrived.

use super::{
    Event, World,
    relay::State,
    tcp::{self, Packet},
};
use rand::RngExt;

/// Event bit: the segment is held. Events of the data path do not use this bit.
const HELD: u8 = 1 << 0;

impl World {
    pub(super) fn hold(&mut self, i: usize, p: &Packet, events: u8) {
        if events & HELD == 0 {
            return;
        }
        self.note(|_| format!("{i} in {} held", super::show(p)));
        self.held[i].push(p.clone());
        self.let_go();
    }

    /// Releases segments that no longer have to wait, in order, and with a process's delay.
    pub(super) fn let_go(&mut self) {
        if self.relay.state != State::Draining {
            self.reached = [None; 2];
        }
        for i in 0..2 {
            if self.relay.holding[i] || self.held[i].is_empty() {
                continue;
            }
            let waiting = std::mem::take(&mut self.held[i]);
            if self.has_died() {
                continue; // lost with the process
            }
            let late = self.rng.random_range(0..=self.relay.habits.late);
            let at = (self.now + late).max(self.let_go_at[i]);
            self.let_go_at[i] = at;
            for p in waiting {
                self.out.held += 1;
                self.at(at, Event::Back(i, p));
            }
        }
    }

    /// Checks the order of forwarded packets of host `i`: it is kept where the link loses nothing.
    pub(super) fn watch_order(&mut self, i: usize, p: &Packet) {
        if self.relay.state == State::Draining && self.relay.habits.hold && !p.data.is_empty() {
            let end = p.seq.wrapping_add(p.data.len() as u32);
            let reached = self.reached[i].unwrap_or_else(|| self.model.leg(1 - i).bound_out);
            self.out.early += u32::from(tcp::after(p.seq, reached));
            self.reached[i] = Some(if tcp::after(end, reached) { end } else { reached });
        }
    }
}
