//! Differences between TCP implementations.

use super::{
    Pair, Side,
    tcp::{MS, Time},
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

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
    /// As Linux: receives what it should not by the RFCs, segments without timestamps that were negotiated; and forgets a connection in
    /// TIME-WAIT that is reset.
    pub lenient: bool,
    /// Drops data that is not in order, instead of keeping it for later (RFC 9293, 3.10.7.4: SHLD-31 is no MUST).
    pub drops_unordered: bool,
    /// A bare acknowledgement at the right edge of the window is unacceptable (RFC 9293, 3.10.7.4, to the letter).
    pub strict_edge: bool,
    /// Ignores all blocks of a SACK option if one of them is invalid.
    pub strict_sack: bool,
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
            lenient: false,
            drops_unordered: false,
            strict_edge: false,
            strict_sack: false,
            delack: *[0, 1, 40, 40, 100, 200].get(rng.random_range(0..6usize)).expect("six") * MS,
            tick: *[MS, MS, MS, 10 * MS, 100 * MS, 100, 1].get(rng.random_range(0..7usize)).expect("seven"),
            rto_min: 200 * MS,
        }
    }

    /// Makes a host stricter in ways that not all hosts are.
    pub fn tighten(&mut self, rng: &mut SmallRng) {
        self.drops_unordered = rng.random_bool(0.1);
        self.strict_edge = rng.random_bool(0.5);
        self.strict_sack = rng.random_bool(0.5);
    }

    /// A style like that of Linux, which our sockets use.
    pub fn local(rng: &mut SmallRng) -> Style {
        Style {
            strict_low: false,
            probe_data: false,
            strict_window: false,
            lenient: true,
            delack: 40 * MS,
            tick: MS,
            wscale: rng.random_range(0..9),
            receive: rng.random_range(4000..300_000),
            ..Style::random(rng)
        }
    }
}

/// Lets both connections agree on options. The server is offered what the client has, like the MSS (`own_syn()` in bpf/track.h).
/// Where it cannot do that, the legs differ, and must not be spliced: in few runs.
pub fn negotiate(seed: u64, r: &mut SmallRng, mss: u32, hosts: &mut Pair<Style>, ours: &mut Pair<Style>) {
    let mut rng = SmallRng::seed_from_u64(seed.rotate_left(32));
    hosts.iter_mut().for_each(|h| h.tighten(&mut rng));
    // a loss costs its sender the rest of the window: with tiny segments, a run would not end in time
    hosts.iter_mut().for_each(|h| h.drops_unordered &= mss > 100);
    let mut offered = (true, true);
    for side in Side::BOTH {
        let (host, our) = (&mut hosts[side], &mut ours[side]);
        let can = |a: bool, b: bool, rng: &mut SmallRng| (a && b) || (side == Side::Server && rng.random_bool(0.95));
        let (ts, sack) = (can(host.ts, our.ts, &mut rng), can(host.sack, our.sack, &mut rng));
        offered = (offered.0 && ts, offered.1 && sack);
        let scaled = r.random_bool(0.8);
        for s in [host, our] {
            s.mss = mss;
            (s.ts, s.sack) = offered;
            if !scaled {
                s.wscale = 0;
                s.receive = s.receive.min(65535);
            }
        }
    }
}
