//! A second implementation of what forwarding mode does to a packet, written from the RFCs
//! and the design. It works on whole values instead of differences: the packet is parsed,
//! its numbers are translated, and it is rebuilt with checksums computed from scratch.

use crate::packet::{Packet, flag};
use std::net::SocketAddr;

/// One direction of a flow: the state that follows from the packets of its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Direction {
    /// Added to the host's numbers to get the numbers on the other connection.
    pub seq_add: u32,
    pub ack_add: u32,
    pub tsval_add: u32,
    pub tsecr_add: u32,
    /// Window scale announced by the host, and the one we announced to the other host.
    pub scale_in: u8,
    pub scale_out: u8,
    /// The window that came with `max_ack`, unscaled: one of [`steps`].
    pub room: u32,
    /// The other side has not negotiated these options.
    pub strip_ts: bool,
    pub strip_sack: bool,
    /// Whether the sender has negotiated ECN, and whether the receiver has as well.
    pub ect: bool,
    pub ecn: bool,
    pub dead: bool,
    /// A FIN has passed; a FIN of the other direction awaits its acknowledgement; this direction's FIN was acknowledged.
    pub fin: bool,
    pub peer_fin: bool,
    pub fin_acked: bool,
    /// Highest sequence number forwarded, how often it has wrapped, highest acknowledgement.
    pub end: u32,
    pub wraps: u16,
    pub max_ack: u32,
    /// The connection on which packets go out: our address there and the host's.
    pub out_from: SocketAddr,
    pub out_to: SocketAddr,
    pub smac: [u8; 6],
    pub dmac: [u8; 6],
    pub mtu: u32,
}

/// The result of translating a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Fate {
    Forwarded(Vec<u8>),
    /// Forwarded, and the flow is dead from now on.
    Reset(Vec<u8>),
    /// An RST that is forwarded, but takes effect only if the other host confirms it.
    Asked(Vec<u8>),
    /// A SYN or a late RST: a challenge makes the other host answer, if the rate limit allows. With the name of the verdict.
    Challenge(Vec<u8>, &'static str),
    /// Too large: an ICMP error reports this MTU, in terms of the sender's address family, if the rate limit allows.
    TooBig(u32),
    /// Its connection was reset, and so is its sender once more.
    Answered(Vec<u8>),
    /// Left to the kernel unchanged.
    Passed,
    /// Dropped, with the name of the verdict.
    Dropped(&'static str),
}

/// Distance from `b` to `a` around the circle of 2^32, -2^31 to 2^31 - 1.
fn distance(a: u32, b: u32) -> i64 {
    i64::from(a.wrapping_sub(b) as i32)
}

/// The distinguishable windows, half an octave apart: up to 8, 12, 16, 24, 32 ... bytes.
pub fn steps() -> impl Iterator<Item = u32> {
    (3..=16).flat_map(|n| [1 << n, 3 << (n - 1)])
}

/// Rounds a window up to one of [`steps`].
pub fn rounded(window: u16) -> u32 {
    if window == 0 { 0 } else { steps().find(|&s| s >= window.into()).expect("65536 is one") }
}

/// The ECN bits of the type of service or traffic class (RFC 3168, 5), which are all set for CE.
const CODEPOINT: u8 = 3;
const CE: u8 = 3;

/// Maximum window (RFC 7323, 2.3).
const FAR: i64 = 1 << 30;

/// Translates one frame and updates the state of both directions. `segment`: payload per segment of a GSO packet.
pub fn translate(d: &mut Direction, reverse: &mut Direction, frame: &[u8], segment: Option<usize>) -> Fate {
    let Some(mut p) = Packet::parse(frame) else { return Fate::Passed };
    if d.dead && p.flags & flag::RST == 0 {
        return match p.flags & (flag::SYN | flag::ACK) {
            flag::SYN => Fate::Passed,
            0 => Fate::Dropped("no-ack"),
            _ => Fate::Answered(refuse(p).frame()),
        };
    }
    let has = |f: u8| p.flags & f != 0;
    let (fin, ack) = (has(flag::FIN), has(flag::ACK));
    let end = p.seq.wrapping_add(p.payload.len() as u32).wrapping_add(fin.into());

    // Acceptable: the next segment in order; or one between the other host's acknowledgement and the right edge of its
    // window, or older by at most the largest possible flight, which acknowledges sent data. A SYN has its own numbers, and
    // is answered in any case (RFC 5961, 4.2); for an RST only the sequence number counts.
    let (syn, reset) = (has(flag::SYN), has(flag::RST));
    let expected = reverse.max_ack.wrapping_add(reverse.ack_add);
    let edge = i64::from(reverse.room) << reverse.scale_in;
    let in_window = p.seq == d.end
        || (distance(p.seq, expected) <= edge && distance(expected, end) <= (65535i64 << reverse.scale_in) + 1);
    let ahead = distance(p.ack, d.max_ack);
    let window = 65535i64 << d.scale_in;
    if !syn && !reset {
        if !ack {
            return Fate::Dropped("no-ack");
        }
        let beyond_fin = d.fin && !p.payload.is_empty();
        let next = p.seq == d.end && !beyond_fin && ahead.abs() <= window;
        if !next && !in_window {
            return Fate::Dropped("out-of-window");
        }
        let unsent = distance(p.ack, reverse.end.wrapping_add(reverse.seq_add)) > 0;
        if !next && (unsent || -ahead > window) {
            return Fate::Dropped("bad-ack");
        }
    }
    if p.ttl <= 1 {
        return Fate::Dropped("ttl");
    }
    let header = if d.out_to.is_ipv4() { 20 } else { 40 } + 20 + p.options.len();
    if !p.payload.is_empty() && header + segment.unwrap_or(p.payload.len()) > d.mtu as usize {
        // RFC 7915, 5: between address families headers grow or shrink by twenty bytes
        return Fate::TooBig(match (p.from.is_ipv4(), d.out_to.is_ipv4()) {
            (true, false) => d.mtu - 20,
            (false, true) => d.mtu + 20,
            _ => d.mtu,
        });
    }
    let proven = p.seq == expected || p.seq == d.end;
    if reset && !syn && !proven && !in_window {
        return Fate::Dropped("bad-rst");
    }
    // RFC 5961, 4 and 3. An RST below the receiver's next expected number, or beyond a window that may be closed, would be
    // ignored. But its sender may simply not have seen the latest acknowledgement yet, or the window has shrunk.
    let sure = steps().take_while(|&s| s < reverse.room).last().unwrap_or(0) << reverse.scale_in;
    let is_ignored = distance(p.seq, expected) < 0 || (distance(p.seq, expected) > sure.into() && sure <= 1);
    if syn || (reset && !proven && is_ignored) {
        // Our probe is a keep-alive: one below the number that the other
        // host expects (RFC 9293, 3.8.4), which it answers with an ACK.
        p.seq = expected.wrapping_sub(1).wrapping_add(d.seq_add);
        p.ack = d.max_ack.wrapping_add(d.ack_add);
        (p.flags, p.window, p.urgent) = (flag::ACK, 0, 0);
        p.options.fill(1);
        p.payload.clear();
        p.tos &= !CODEPOINT;
        return Fate::Challenge(readdress(d, p).frame(), if syn { "syn" } else { "rst-unproven" });
    }
    let mut lost = false;
    if reset {
        d.dead |= proven;
        reverse.dead |= proven;
        // Beyond its window the receiver would ignore the RST; within the window it sends
        // a challenge ACK; at the edge the RST may be in order by the time it arrives.
        if distance(p.seq, expected) > sure.into() {
            p.seq = if proven { expected } else { expected.wrapping_add(sure - 1) };
        }
    } else {
        // Drop a marked segment whose receiver would not echo the mark (RFC 6040, 4.2).
        // A retransmission passes, because its sender has already noticed the loss.
        let ahead_of_all = distance(end.wrapping_sub(fin.into()), d.end) > 0;
        lost = d.ect && !d.ecn && p.tos & CODEPOINT == CE && !p.payload.is_empty() && ahead_of_all;
        // a bare acknowledgement may be beyond lost data
        let known = d.fin;
        if (fin || !p.payload.is_empty()) && distance(end, d.end) > 0 {
            d.wraps = d.wraps.wrapping_add((end < d.end).into());
            d.end = end;
            (d.fin, d.fin_acked) = (false, false); // not the end, since data follows
        }
        // count a FIN only at the end of the stream, and not if its number was acknowledged before as something else
        if fin && end == d.end && (known || distance(end, expected) > 0) {
            d.fin = true;
            reverse.peer_fin |= !d.fin_acked;
        }
        let win = rounded(p.window);
        if ahead > 0 || (ahead == 0 && win > d.room) {
            (d.max_ack, d.room) = (p.ack, win);
        }
        if d.peer_fin && !reverse.fin {
            d.peer_fin = false;
        } else if d.peer_fin && p.ack == reverse.end.wrapping_add(reverse.seq_add) {
            d.peer_fin = false;
            reverse.fin_acked = true;
        }
    }

    if lost {
        return Fate::Dropped("ce-dropped");
    }
    if !d.ecn {
        p.tos &= !CODEPOINT;
        p.flags &= !(flag::ECE | flag::CWR);
    }
    let old_ack = p.ack;
    p.seq = p.seq.wrapping_add(d.seq_add);
    if ack {
        p.ack = p.ack.wrapping_add(d.ack_add);
    }
    let room = u64::from(p.window) << d.scale_in;
    // an open window must not become a closed one, which the host would have to probe (RFC 9293, 3.8.6.1)
    p.window = (room >> d.scale_out).clamp(room.min(1), 65535) as u16;
    translate_options(d, &mut p.options, ack, old_ack);
    p = readdress(d, p);
    match (reset, proven) {
        (true, true) => Fate::Reset(p.frame()),
        (true, false) => Fate::Asked(p.frame()),
        (false, _) => Fate::Forwarded(p.frame()),
    }
}

/// Answers with a reset (RFC 9293, 3.10.7.1).
fn refuse(mut p: Packet) -> Packet {
    (p.seq, p.flags, p.window, p.urgent) = (p.ack, flag::RST, 0, 0);
    p.options.fill(1);
    [&mut p.payload, &mut p.ip_options, &mut p.padding].into_iter().for_each(Vec::clear);
    p.tos &= !CODEPOINT;
    (p.from, p.to) = (p.to, p.from);
    (p.smac, p.dmac) = (p.dmac, p.smac);
    p.ttl = 64;
    p
}

/// Readdresses a packet to the other connection, as a router would (RFC 1812, 5.3.1), and removes the options for this path.
fn readdress(d: &Direction, mut p: Packet) -> Packet {
    if p.from.is_ipv4() != d.out_to.is_ipv4() {
        (p.label, p.id, p.fragment) = (0, 0, 0x4000); // atomic datagram (RFC 6864, 4)
    }
    p.ip_options.clear();
    p.padding.clear(); // link-layer padding
    (p.from, p.to) = (d.out_from, d.out_to);
    (p.smac, p.dmac) = (d.smac, d.dmac);
    p.ttl = p.ttl.saturating_sub(1);
    p
}

/// Kind and position of all options, up to the end of the list or the first malformed option.
fn walk(options: &[u8]) -> Vec<(u8, std::ops::Range<usize>)> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(&kind) = options.get(at) {
        let len = match kind {
            0 => break,
            1 => 1,
            _ => options.get(at + 1).map_or(0, |&l| usize::from(l)),
        };
        if len == 0 || (kind != 1 && len < 2) || at + len > options.len() {
            break;
        }
        found.push((kind, at..at + len));
        at += len;
    }
    found
}

fn translate_options(d: &Direction, options: &mut [u8], ack: bool, old_ack: u32) {
    let shift = |b: &mut [u8], by: &dyn Fn(u32) -> u32| {
        let v = u32::from_be_bytes((&*b).try_into().expect("four bytes"));
        b.copy_from_slice(&by(v).to_be_bytes());
    };
    for (kind, place) in walk(options) {
        let o = &mut options[place];
        match (kind, o.len()) {
            (8, 10) if d.strip_ts => o.fill(1),
            (8, 10) => {
                shift(&mut o[2..6], &|v| v.wrapping_add(d.tsval_add));
                if ack {
                    // RFC 7323, 3.2: not valid without ACK
                    shift(&mut o[6..10], &|v| v.wrapping_add(d.tsecr_add));
                }
            }
            (5, 10..=34) if d.strip_sack => o.fill(1),
            (5, 10..=34) => {
                for edge in o[2..].chunks_exact_mut(4) {
                    // an edge outside any window is clamped to the maximum distance
                    let near = |v: u32| old_ack.wrapping_add(distance(v, old_ack).clamp(-FAR, FAR) as u32);
                    shift(edge, &|v| near(v).wrapping_add(d.ack_add));
                }
            }
            _ => {}
        }
    }
}
