//! An off-path attacker who sends segments with a host's address. He may know more than a real one: all numbers but one, and
//! that one is such that no receiver would accept the segment. Some are duplicates from the host's last connection from this port:
//! all their numbers are good, but their timestamps are older than this connection. None is exactly the next segment.

use super::tcp::{ACK, FIN, PSH, Packet, RST, Tcp};
use rand::{RngExt, rngs::SmallRng};

/// Larger than any window in the simulation.
const FAR: u32 = 1 << 27;

/// Forges a segment from `host`.
pub fn forge(r: &mut SmallRng, host: &Tcp) -> Packet {
    let (una, max, rcv) = host.numbers();
    let far = |r: &mut SmallRng, from: u32| from.wrapping_add(r.random_range(FAR..FAR.wrapping_neg()));
    let near = |r: &mut SmallRng, from: u32| from.wrapping_add(r.random_range(0..5000u32)).wrapping_sub(1000);
    let (sent, heard) = if r.random_bool(0.5) { (max, rcv) } else { (near(r, una), near(r, rcv)) };
    let data = vec![0xee; if r.random_bool(0.5) { 0 } else { r.random_range(1..1448) }];
    let fin = if r.random_bool(0.3) { FIN } else { 0 };
    let first_ts = host.first_tsval().filter(|_| r.random_bool(0.2));
    let (seq, ack, flags) = match r.random_range(0..5) {
        _ if first_ts.is_some() => (max.wrapping_add(r.random_range(1..60_000)), heard, fin | ACK),
        0 => (sent, heard, fin),              // no ACK
        1 => (far(r, max), heard, fin | ACK), // far outside the window
        2 => (sent, far(r, rcv), fin | ACK),  // acknowledges data never sent, or long acknowledged
        3 => (max.wrapping_add(r.random_range(1..FAR)), heard, RST | if r.random_bool(0.5) { ACK } else { 0 }),
        _ => (far(r, max), far(r, rcv), r.random::<u8>() & (FIN | RST | PSH | ACK)),
    };
    let earlier = first_ts.map(|first| (first.wrapping_sub(r.random_range(1..100_000)), r.random()));
    Packet {
        seq,
        ack,
        flags,
        win: r.random(),
        ts: earlier.or_else(|| r.random_bool(0.7).then(|| (r.random(), r.random()))),
        sack: if r.random_bool(0.2) { vec![(r.random(), r.random())] } else { Vec::new() },
        data,
        ..Packet::default()
    }
}
