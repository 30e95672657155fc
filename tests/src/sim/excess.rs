//! What a host sends beyond the limit of a splice may be cut off or dropped. The process has to be able to see that.

use super::{
    EVENT_TRIGGERED, World, show,
    tcp::{Packet, RST},
};
use longsplice_datapath::{LegFlags, Phase, Side, VERDICTS, model::Fate};

impl World {
    /// Called for each segment that the data path has decided about.
    pub(super) fn judge_excess(&mut self, from: Side, p: &Packet, fate: &Fate, events: u8) {
        let leg = self.model.leg(from);
        if p.flags & RST != 0 {
            return; // nobody reads its text
        }
        // In control mode the socket gets all, and a marked segment that is dropped for it is as if lost on its way to us.
        if leg.phase_in == Phase::Local as u8 && events & EVENT_TRIGGERED == 0 {
            return;
        }
        let is_beyond = (p.end().wrapping_sub(leg.limit_in) as i32) > 0;
        let is_lost = match fate {
            // or a FIN before the limit: the message is not whole, and its connection ends with it
            Fate::Dropped(v) => is_beyond && VERDICTS[*v as usize] == "beyond-limit",
            Fate::Sent { plain: true, .. } | Fate::Answered(_) => false,
            Fate::Sent { local, forwarded, .. } => {
                let kept = [local, forwarded].into_iter().flatten().map(|copy| copy.keep).max();
                leg.flags & LegFlags::TRIGGER != 0 && is_beyond && kept.is_some_and(|n| (n as usize) < p.data.len())
            }
        };
        self.out.cut_off += u32::from(is_lost);
        if is_lost && leg.flags & LegFlags::EXCESS == 0 {
            self.fail(&format!("{from:?}: nobody will know of what was cut off {}", show(p)));
        }
    }
}
