//! What the programs on the hosts do with their connections.

use super::tcp::Time;

/// One of them.
pub struct App {
    pub seed: u64,
    pub total: u64,
    pub written: u64,
    pub got: u64,
    /// How likely the last byte of a write is urgent.
    pub urgency: f64,
    /// Positions of the urgent ones ...
    pub urgent: Vec<u64>,
    /// ... and of those that were received.
    pub marks: Vec<u64>,
    pub chunk: usize,
    pub pause: Time,
    pub write_at: Time,
    /// Reads at most so much at a time ...
    pub sip: usize,
    /// ... and then sleeps.
    pub nap: Time,
    pub read_at: Time,
    /// Closes only when the other side has.
    pub after_peer: bool,
    pub closed: bool,
    pub eof: bool,
    pub last: Time,
}

pub fn byte(seed: u64, at: u64) -> u8 {
    let z = (seed.wrapping_add(at >> 3)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((z ^ z >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> (8 * (at & 7))) as u8
}
