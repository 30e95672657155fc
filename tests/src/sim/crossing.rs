//! A second processor: the next segment of one of the hosts arrives in the middle of what the first one does.

use super::{Event, Fate, Queued, VERDICTS, World, relay::Meanwhile};
use longsplice_datapath::Side;
use rand::RngExt;
use std::cmp::Reverse;

impl World {
    pub(super) fn came_meanwhile(&mut self, meanwhile: Option<Meanwhile>) {
        let Some(Meanwhile { serial, from, packet, fate: Some((fate, events)), .. }) = meanwhile else { return };
        // a segment that has to be processed again comes later
        if !matches!(fate, Fate::Dropped(v) if VERDICTS[v as usize] == "stale-cpu") {
            self.queue.retain(|q| q.0.1 != serial);
            self.note(|_| "on another processor:".into());
            self.came(from, &packet, fate, events);
        }
    }

    /// Chooses the next segment of one of the hosts to arrive in the middle of an operation.
    pub(super) fn choose_meanwhile(&mut self) -> Option<Meanwhile> {
        let r = self.other_cpu.as_mut()?;
        let (from, meeting) = (Side::BOTH[r.random_range(0..2)], r.random_range(1..24));
        let coming = self.queue.iter().filter_map(|Reverse(Queued(at, serial, e))| match e {
            Event::ToUs(side, p) if *side == from => Some((*at, *serial, p)),
            _ => None,
        });
        let (_, serial, packet) = coming.min_by_key(|c| (c.0, c.1))?;
        let packet = packet.clone();
        let segment = self.arriving(from, &packet);
        Some(Meanwhile { serial, from, packet, segment, meeting, fate: None })
    }
}
