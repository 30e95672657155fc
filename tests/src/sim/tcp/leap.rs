//! Moves the numbers of one end on, as if bytes had passed that are too many to be sent one by one.

use super::Tcp;

impl Tcp {
    /// Whether it can be told that more was sent and acknowledged: its end is not under way.
    pub fn may_leap(&self) -> bool {
        self.is_at_rest() && !self.fin_sent
    }

    /// So many bytes were sent and acknowledged.
    pub fn leap_out(&mut self, n: u32) {
        let moved = |at: &mut u32| *at = at.wrapping_add(n);
        for at in [&mut self.una, &mut self.nxt, &mut self.max, &mut self.counted, &mut self.rtx, &mut self.high_sacked]
        {
            moved(at);
        }
        moved(&mut self.wl2);
        self.recover.iter_mut().chain(&mut self.urgent_out).for_each(moved);
        self.timed = None;
        self.sacked.clear();
    }

    /// So many bytes were received, read and acknowledged.
    pub fn leap_in(&mut self, n: u32) {
        let moved = |at: &mut u32| *at = at.wrapping_add(n);
        [&mut self.rcv, &mut self.edge, &mut self.last_ack, &mut self.wl1].into_iter().for_each(moved);
        self.latest.iter_mut().chain(&mut self.urgent_in).for_each(moved);
        self.ooo.iter_mut().for_each(|(at, _)| moved(at));
    }
}
