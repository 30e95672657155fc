//! What a host may be sent: its peer's part of the RFCs, which the data path and our sockets play together. Hosts that are not so
//! strict would not notice.

use super::{
    Side, World, show,
    tcp::{ACK, Packet, RST, after},
};

impl World {
    /// Checks a segment that leaves for a host.
    pub(super) fn judge_rules(&mut self, to: Side, p: &Packet) {
        let wrong = self.broken(to, p);
        wrong.inspect(|rule| self.fail(&format!("{to:?} is sent {}: {rule}", show(p))));
    }

    fn broken(&self, to: Side, p: &Packet) -> Option<&'static str> {
        let host = &self.hosts[to];
        let (_, max, _) = host.numbers();
        if !host.style.sack && !p.sack.is_empty() {
            return Some("SACK was not negotiated (RFC 2018, 2)");
        }
        if p.flags & RST != 0 {
            return None; // timestamps are a SHOULD (RFC 7323, 3.2), and nobody looks at the rest
        }
        if p.ts.is_some() != host.style.ts {
            return Some("timestamps in all segments, or in none (RFC 7323, 3.2)");
        }
        if p.flags & ACK != 0 && after(p.ack, max) {
            return Some("acknowledges what was not sent (RFC 9293, 3.4)");
        }
        if p.sack.iter().any(|(_, end)| after(*end, max)) {
            return Some("reports what was not sent (RFC 2018, 3)");
        }
        None
    }
}
