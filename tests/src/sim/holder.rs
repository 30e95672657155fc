//! The queue of the hold policy (crates/engine, holder.rs): segments wait for
//! the end of a drain, and are then fed in again as if they had just arrived.

use super::{
    Event, World,
    relay::State,
    tcp::{self, Packet},
};
use longsplice_datapath::{Pair, Side};
use rand::RngExt;

/// Event bit: the segment is held. Events of the data path do not use this bit.
pub(super) const HELD: u8 = 1 << 0;

impl World {
    pub(super) fn hold(&mut self, from: Side, p: &Packet, events: u8) {
        if events & HELD == 0 {
            return;
        }
        self.note(|_| format!("{from:?} in {} held", super::show(p)));
        self.held[from].push(p.clone());
        self.let_go();
    }

    /// Releases segments that no longer have to wait, in order, and with a process's delay.
    pub(super) fn let_go(&mut self) {
        if self.relay.state != State::Draining {
            self.reached = Pair::both(None);
        }
        for from in Side::BOTH {
            if self.relay.holding[from] || self.held[from].is_empty() {
                continue;
            }
            let waiting = std::mem::take(&mut self.held[from]);
            if self.has_died() {
                continue; // lost with the process
            }
            let late = self.rng.random_range(0..=self.relay.habits.late);
            let at = (self.now + late).max(self.let_go_at[from]);
            self.let_go_at[from] = at;
            for p in waiting {
                self.out.held += 1;
                self.at(at, Event::Back(from, p));
            }
        }
    }

    /// Checks the order of forwarded packets from this host: it is kept where the link loses nothing.
    pub(super) fn watch_order(&mut self, from: Side, p: &Packet) {
        if self.relay.state == State::Draining && self.relay.habits.hold && !p.data.is_empty() {
            let end = p.seq.wrapping_add(p.data.len() as u32);
            let reached = self.reached[from].unwrap_or_else(|| self.model.leg(from.other()).bound_out);
            self.out.early += u32::from(tcp::after(p.seq, reached));
            self.reached[from] = Some(if tcp::after(end, reached) { end } else { reached });
        }
    }
}
