//! The applications on the hosts.

use super::tcp::Time;

/// The application on one host.
pub struct App {
    pub seed: u64,
    pub total: u64,
    pub written: u64,
    pub got: u64,
    /// Probability that the last byte of a write is urgent.
    pub urgency: f64,
    /// Positions of urgent bytes sent.
    pub urgent: Vec<u64>,
    /// Positions of urgent bytes received.
    pub marks: Vec<u64>,
    pub chunk: usize,
    pub pause: Time,
    pub write_at: Time,
    /// Maximum size of a read.
    pub sip: usize,
    /// Pause after each read.
    pub nap: Time,
    pub read_at: Time,
    /// Close only after the other side has closed.
    pub after_peer: bool,
    pub closed: bool,
    pub eof: bool,
    pub last: Time,
}

pub fn byte(seed: u64, at: u64) -> u8 {
    let z = (seed.wrapping_add(at >> 3)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((z ^ z >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> (8 * (at & 7))) as u8
}
