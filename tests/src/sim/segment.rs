//! A segment in the simulation.

pub const FIN: u8 = 1;
pub const RST: u8 = 4;
pub const PSH: u8 = 8;
pub const ACK: u8 = 16;
pub const URG: u8 = 32;

/// A segment on a wire.
#[derive(Clone, Debug, Default)]
pub struct Packet {
    pub seq: u32,
    pub ack: u32,
    pub flags: u8,
    pub win: u16,
    /// With [`URG`]: offset from `seq` to the end of the urgent data.
    pub urg: u16,
    pub ts: Option<(u32, u32)>,
    pub sack: Vec<(u32, u32)>,
    /// ECN codepoint of the IP header (marks.rs).
    pub ecn: u8,
    pub data: Vec<u8>,
}

impl Packet {
    pub fn end(&self) -> u32 {
        self.seq.wrapping_add(self.data.len() as u32).wrapping_add(u32::from(self.flags & FIN != 0))
    }
}

/// The packet in one line of a trace.
pub fn show(p: &Packet) -> String {
    format!(
        "{}{}{}{} len {} ack {} win {}{}{}",
        if p.flags & URG != 0 { format!("U+{} ", p.urg) } else { String::new() },
        if p.flags & FIN != 0 { "F " } else { "" },
        if p.flags & RST != 0 { "R " } else { "" },
        p.seq,
        p.data.len(),
        p.ack,
        p.win,
        p.ts.map_or(String::new(), |(v, e)| format!(" ts {v} {e}")),
        if p.sack.is_empty() { String::new() } else { format!(" sack {:?}", p.sack) }
    )
}
