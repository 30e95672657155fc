//! Differences between TCP implementations.

use super::tcp::{MS, Time};
use rand::{RngExt, rngs::SmallRng};

/// The behaviour of one TCP implementation.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    pub mss: u32,
    pub receive: u32,
    pub send: usize,
    pub wscale: u8,
    pub ts: bool,
    pub sack: bool,
    /// Pure ACKs below RCV.NXT are unacceptable (RFC 9293, 3.10.7.4); otherwise
    /// they are accepted down to the last acknowledgement sent (Linux).
    pub strict_low: bool,
    /// Zero-window probes carry a byte of data beyond the window (BSD); otherwise an old sequence number (Linux).
    pub probe_data: bool,
    /// The window is updated by SND.WL1 and SND.WL2 alone (RFC 9293); otherwise also whenever it grows (Linux).
    pub strict_window: bool,
    /// Delay of acknowledgements.
    pub delack: Time,
    /// Period of the timestamp clock.
    pub tick: Time,
    pub rto_min: Time,
}

impl Style {
    pub fn random(rng: &mut SmallRng) -> Style {
        let wscale = if rng.random_bool(0.7) { rng.random_range(0..10) } else { 0 };
        let mss = *[536, 1000, 1460, 1448, 100][..].get(rng.random_range(0..5)).expect("five");
        let unit = 1u32 << wscale;
        let receive = match rng.random_range(0..10) {
            0 => rng.random_range(1..4 * mss),
            1..5 => rng.random_range(mss..20 * mss),
            _ => rng.random_range(20_000..400_000),
        };
        Style {
            mss,
            receive: receive.max(unit).max(2),
            send: rng.random_range(2000..200_000),
            wscale,
            ts: rng.random_bool(0.7),
            sack: rng.random_bool(0.7),
            strict_low: rng.random_bool(0.5),
            probe_data: rng.random_bool(0.3),
            strict_window: rng.random_bool(0.5),
            delack: *[0, 1, 40, 40, 100, 200].get(rng.random_range(0..6usize)).expect("six") * MS,
            tick: *[MS, MS, MS, 10 * MS, 100 * MS, 100, 1].get(rng.random_range(0..7usize)).expect("seven"),
            rto_min: 200 * MS,
        }
    }

    /// A style like that of Linux, which our sockets use.
    pub fn local(rng: &mut SmallRng) -> Style {
        Style {
            strict_low: false,
            probe_data: false,
            strict_window: false,
            delack: 40 * MS,
            tick: MS,
            wscale: rng.random_range(0..9),
            receive: rng.random_range(4000..300_000),
            ..Style::random(rng)
        }
    }
}
