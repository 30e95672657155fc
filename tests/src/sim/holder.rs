//! The hold policy's queue (crates/engine, holder.rs): what waits for the end of a drain, and returns as though it had just arrived.

use super::{
    Event, World,
    relay::State,
    tcp::{self, Packet},
};
use rand::RngExt;

/// Of an event: the segment is held. No event has this number.
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

    /// What waits for nothing any more goes, in order, and late, as processes are.
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
                continue; // lost with its process
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

    /// A packet of host `i` is forwarded. Of those links that lose nothing keep the order.
    pub(super) fn watch_order(&mut self, i: usize, p: &Packet) {
        if self.relay.state == State::Draining && self.relay.habits.hold && !p.data.is_empty() {
            let end = p.seq.wrapping_add(p.data.len() as u32);
            let reached = self.reached[i].unwrap_or_else(|| self.model.leg(1 - i).bound_out);
            self.out.early += u32::from(tcp::after(p.seq, reached));
            self.reached[i] = Some(if tcp::after(end, reached) { end } else { reached });
        }
    }
}
