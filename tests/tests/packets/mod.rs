//! The data path packet by packet, under BPF_PROG_TEST_RUN: tables of input and output packets; comparison with an
//! independent translator; and the layout shared by both sides.

mod bench;
mod ecn;
mod fragments;
mod icmp;
mod identity;
mod layout;
mod offloads;
mod options;
mod race;
mod random;
mod records;
mod refused;
mod resets;
mod sockets;
mod table;
mod tap;

use bench::{bench, together};
use longsplice_datapath::{
    Datapath, LegFlags, Pair, PathFlags, Phase, Side, TestContext, Tuple, VERDICTS, abi, testing,
};
use longsplice_tests::{
    packet::{ETHERNET, Packet, flag, hex, option, verify, verify_icmp},
    translator::{Direction, Fate, steps, translate},
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

/// Return codes of tcx programs (enum tcx_action_base, and TC_ACT_REDIRECT).
const NEXT: i32 = -1;
const DROP: i32 = 2;
/// A socket's segment is dropped, and the socket does not notice.
const MUTE: i32 = REDIRECT;
const REDIRECT: i32 = 7;

/// Phase values as in a leg's record.
const FWD: u8 = Phase::Forwarding as u8;
const TO_FWD: u8 = Phase::ToForwarding as u8;
const TO_LOCAL: u8 = Phase::ToLocal as u8;

/// The result of a program run.
#[derive(Debug)]
struct Outcome {
    code: i32,
    frame: Vec<u8>,
    verdicts: Vec<&'static str>,
}

struct Bench {
    datapath: Datapath,
}

impl Bench {
    fn counters(&self) -> Vec<u64> {
        self.datapath.verdicts().expect("counters").into_iter().map(|v| v.1).collect()
    }

    fn run(&self, egress: bool, frame: &[u8], context: TestContext) -> Outcome {
        let before = self.counters();
        let mut out = Vec::new();
        let code = self.datapath.test_run_with(egress, frame, &context, &mut out).expect("test run");
        let after = self.counters();
        let verdicts = (0..VERDICTS.len()).filter(|&i| before[i] != after[i]).map(|i| VERDICTS[i]).collect();
        Outcome { code, frame: out, verdicts }
    }

    fn ingress(&self, frame: &[u8]) -> Outcome {
        self.run(false, frame, TestContext::default())
    }
}

fn addr(s: &str) -> SocketAddr {
    s.parse().expect("an address")
}

/// A spliced flow between a client and a server.
#[derive(Clone, Copy, Debug)]
struct Flow {
    client: Tuple,
    server: Tuple,
    up: Direction,
    down: Direction,
}

const MAC: [[u8; 6]; 4] = [[2, 0, 0, 0, 1, 1], [2, 0, 0, 0, 1, 2], [2, 0, 0, 0, 2, 1], [2, 0, 0, 0, 2, 2]];

impl Flow {
    /// `v6`: whether the client and the server use IPv6.
    fn new(v6: Pair<bool>) -> Flow {
        let leg = |v6: bool, net: u8, port: u16| {
            let (remote, local) = if v6 {
                (format!("[2001:db8:{net}::2]:{port}"), format!("[2001:db8:{net}::1]:{}", port + 1000))
            } else {
                (format!("10.77.{net}.2:{port}"), format!("10.77.{net}.1:{}", port + 1000))
            };
            Tuple { remote: addr(&remote), local: addr(&local) }
        };
        let (client, server) = (leg(v6.client, 1, 40001), leg(v6.server, 2, 7000));
        let d = |out: &Tuple, mac: usize| Direction {
            seq_add: 0x1000_0000,
            ack_add: 0xfff0_0000,
            tsval_add: 1000,
            tsecr_add: 0u32.wrapping_sub(2000),
            scale_in: 7,
            scale_out: 7,
            room: 1024,
            strip_ts: false,
            strip_sack: false,
            ect: false,
            ecn: false,
            dead: false,
            fin: false,
            peer_fin: false,
            fin_acked: false,
            end: 5000,
            wraps: 0,
            max_ack: 9000,
            out_from: out.local,
            out_to: out.remote,
            smac: MAC[mac],
            dmac: MAC[mac + 1],
            mtu: 1500,
        };
        let up = d(&server, 0);
        let mut down = d(&client, 2);
        down.seq_add = up.ack_add.wrapping_neg();
        down.ack_add = up.seq_add.wrapping_neg();
        down.end = up.max_ack.wrapping_add(up.ack_add);
        down.max_ack = up.end.wrapping_add(up.seq_add);
        Flow { client, server, up, down }
    }

    /// Returns both legs.
    fn legs(&self) -> Pair<&Tuple> {
        Pair::new(&self.client, &self.server)
    }

    /// Puts both directions into the maps.
    fn install(&self, b: &Bench, more_flags: u16) {
        self.install_with(b, more_flags, 0);
    }

    /// Like [`Flow::install`], with further bits in `path.via`.
    fn install_with(&self, b: &Bench, more_flags: u16, more_via: u16) {
        for (i, (t, d)) in [(&self.client, &self.up), (&self.server, &self.down)].into_iter().enumerate() {
            let other = if i == 0 { self.server } else { self.client };
            let via = abi::via {
                ifindex: 2,
                mtu: d.mtu,
                most: u32::MAX,
                dmac: d.dmac,
                smac: d.smac,
                local: testing::key(&other).local,
                flags: abi::via_flag(0),
                mark: 0,
            };
            testing::put_via(&b.datapath, 10 + i as u16, &via).expect("via");
            let cross = t.is_v4() && !other.is_v4();
            if let (true, IpAddr::V6(a)) = (cross, other.remote.ip()) {
                testing::put_remote6(&b.datapath, 3, a).expect("remote6");
            }
            let bit = |on: bool, f: u16| if on { f } else { 0 };
            let flags = PathFlags::SPLICED
                | more_flags
                | bit(d.fin, PathFlags::FIN)
                | bit(d.peer_fin, PathFlags::PEER_FIN)
                | bit(d.fin_acked, PathFlags::FIN_ACKED)
                | bit(d.dead, PathFlags::DEAD)
                | bit(d.strip_ts, PathFlags::STRIP_TS)
                | bit(d.strip_sack, PathFlags::STRIP_SACK)
                | bit(d.ect, PathFlags::ECT)
                | bit(d.ecn, PathFlags::ECN)
                | bit(cross, PathFlags::CROSS);
            let room = steps().position(|s| s == d.room).map_or(0, |n| n as u16 + 1) << testing::VIA_ROOM_SHIFT;
            let k = testing::key(&other);
            let p = abi::path {
                word: abi::path_word { all: u64::from(d.end) | u64::from(d.wraps) << 32 | u64::from(flags) << 48 },
                max_ack: d.max_ack,
                via: (10 + i as u16) | room | more_via,
                scales: d.scale_in | d.scale_out << 4,
                seen: 0,
                seq_add: d.seq_add,
                ack_add: d.ack_add,
                tsval_add: d.tsval_add,
                tsecr_add: d.tsecr_add,
                rport: k.rport,
                lport: k.lport,
                remote4: if cross { 3 } else { k.remote[3] },
            };
            testing::put_path(&b.datapath, t, &p, k.remote).expect("path");
        }
    }

    /// Reads the state of both directions from the maps.
    fn read(&self, b: &Bench) -> Flow {
        let mut f = *self;
        for (t, d) in [(&self.client, &mut f.up), (&self.server, &mut f.down)] {
            let p = b.datapath.path(t).expect("the entry is there");
            (d.end, d.wraps, d.max_ack) = (p.end, p.wraps, p.max_ack);
            d.room = steps().find(|s| p.room != 0 && (*s).min(65535) == p.rooms().1).unwrap_or(0);
            let below = steps().take_while(|s| *s < d.room).last().unwrap_or(0);
            assert_eq!(p.rooms().0, if d.room == 0 { 0 } else { below + 1 });
            d.fin = p.flags & PathFlags::FIN != 0;
            d.peer_fin = p.flags & PathFlags::PEER_FIN != 0;
            d.fin_acked = p.flags & PathFlags::FIN_ACKED != 0;
            d.dead = p.flags & PathFlags::DEAD != 0;
        }
        f
    }

    /// The client's next segment, with `n` bytes of new data.
    fn next(&self, n: usize) -> Packet {
        let mut p = Packet::new(self.client.remote, self.client.local);
        if p.from.is_ipv6() {
            (p.id, p.fragment) = (0, 0);
        }
        p.seq = self.up.end;
        p.ack = self.up.max_ack;
        p.payload = (0..n).map(|i| (i * 7 + 3) as u8).collect();
        p
    }
}

/// Normalizes the checksum: one's complement has two zeros, and both verify.
fn same_zero(mut f: Vec<u8>) -> Vec<u8> {
    if let Some(p) = Packet::parse(&f) {
        let l4 = ETHERNET + if p.from.is_ipv4() { 20 + p.ip_options.len() } else { 40 };
        if f[l4 + 16..l4 + 18] == [0xff, 0xff] {
            f[l4 + 16..l4 + 18].fill(0);
        }
    }
    f
}

/// The expected fate of a frame from the client, and the state after it. If the frame does not fit, the data path may either
/// tell its sender or forward the part that fits.
fn fate(f: &Flow, frame: &[u8], gso: Option<usize>, is_cut: impl FnOnce() -> bool) -> (Fate, Flow) {
    let mut want = *f;
    let fate = translate(&mut want.up, &mut want.down, frame, gso);
    if !matches!(fate, Fate::TooBig(_)) || !is_cut() {
        return (fate, want);
    }
    let (mut p, d) = (Packet::parse(frame).expect("a packet"), &f.up);
    p.payload.truncate(d.mtu as usize - if d.out_to.is_ipv4() { 40 } else { 60 } - p.options.len());
    p.flags &= !flag::FIN;
    (translate(&mut want.up, &mut want.down, &p.frame(), None), want)
}

/// Runs one frame from the client from state `f`, and compares the result with the translator's: by the general way alone, which
/// traced flows take, and then as any other flow, by the short way where that is possible. Returns the result of the latter.
fn agree(b: &Bench, name: &str, f: &Flow, frame: &[u8], gso: Option<usize>) -> Outcome {
    agree_with(b, PathFlags::TRACE, &format!("{name}, by the general way"), f, frame, gso);
    agree_with(b, 0, name, f, frame, gso)
}

fn agree_with(b: &Bench, more_flags: u16, name: &str, f: &Flow, frame: &[u8], gso: Option<usize>) -> Outcome {
    f.install(b, more_flags);
    let context = TestContext {
        gso_size: gso.unwrap_or(0) as u32,
        gso_segs: gso.map_or(0, |g| frame.len().div_ceil(g) as u32),
        ..TestContext::default()
    };
    let mut o = b.run(false, frame, context);
    let (fate, want) = fate(f, frame, gso, || o.verdicts.contains(&"cut"));
    o.verdicts.retain(|v| *v != "cut");
    compare(name, f, frame, &o.frame, o.code, &fate);
    match &fate {
        Fate::Passed => assert!(o.verdicts.is_empty(), "{name}: {:?}", o.verdicts),
        Fate::Dropped(v) => assert_eq!(o.verdicts, [*v], "{name}"),
        Fate::Forwarded(_) => assert_eq!(o.verdicts, ["forwarded"], "{name}"),
        Fate::TooBig(_) => assert_eq!(o.verdicts, ["oversize"], "{name}"),
        Fate::Answered(_) => assert_eq!(o.verdicts, ["reset-again"], "{name}"),
        Fate::Challenge(_, v) => assert!(o.verdicts.contains(v), "{name}: {:?}", o.verdicts),
        Fate::Reset(_) => assert!(o.verdicts.contains(&"rst"), "{name}: {:?}", o.verdicts),
        Fate::Asked(_) => assert!(o.verdicts.contains(&"rst-unproven"), "{name}: {:?}", o.verdicts),
    }
    let got = f.read(b);
    assert_eq!((got.up, got.down), (want.up, want.down), "{name}: state after\n{}", hex(frame));
    o
}

fn compare(name: &str, f: &Flow, frame: &[u8], out: &[u8], code: i32, fate: &Fate) {
    let say = || format!("{name}\n in     {}\n out    {}\n flow {f:?}", hex(frame), hex(out));
    match fate {
        Fate::Passed => {
            assert_eq!(code, NEXT, "{}", say());
            assert_eq!(hex(out), hex(frame), "untouched: {name}");
        }
        Fate::Dropped(v) => assert_eq!(code, DROP, "{v}: {}", say()),
        Fate::Challenge(..) | Fate::TooBig(_) if code == DROP => {} // rate limited
        Fate::TooBig(mtu) => {
            assert_eq!(code, REDIRECT, "{}", say());
            assert!(*mtu >= 1280, "the host would send small packets to others, too: {}", say());
            let (p, icmp) = (Packet::parse(frame).expect("a packet"), verify_icmp(out));
            let icmp = icmp.unwrap_or_else(|| panic!("no valid ICMP: {}", say()));
            assert_eq!((icmp.from, icmp.to), (p.to.ip(), p.from.ip()), "{}", say());
            assert_eq!((icmp.dmac, icmp.smac), (p.smac, p.dmac), "{}", say());
            let want = if p.from.is_ipv4() { (3, 4) } else { (2, 0) };
            assert_eq!((icmp.kind, icmp.code, icmp.mtu), (want.0, want.1, *mtu), "{}", say());
            assert!(
                icmp.quote.len() >= 28 && frame[ETHERNET..].starts_with(&icmp.quote),
                "quotes what came: {}",
                say()
            );
        }
        Fate::Forwarded(want)
        | Fate::Reset(want)
        | Fate::Asked(want)
        | Fate::Answered(want)
        | Fate::Challenge(want, _) => {
            assert_eq!(code, REDIRECT, "{}", say());
            if same_zero(out.to_vec()) != same_zero(want.clone()) {
                panic!("{}\n wanted {}", say(), hex(want));
            }
            if let Err(e) = verify(out) {
                panic!("{e}: {}", say());
            }
        }
    }
}

const V4: Pair<bool> = Pair::both(false);
const V6: Pair<bool> = Pair::both(true);
/// Whether the hosts use IPv6, where both use the same.
const SAME: [Pair<bool>; 2] = [V4, V6];
const FAMILIES: [Pair<bool>; 4] = [V4, V6, Pair::new(false, true), Pair::new(true, false)];

/// Option layouts for a segment whose acknowledgement is `ack`.
fn layouts(ack: u32) -> Vec<(&'static str, Vec<u8>)> {
    use option::{fill, sack, ts, usual};
    let blocks = [
        (ack.wrapping_add(1000), ack.wrapping_add(2000)),
        (ack.wrapping_add(4000), ack.wrapping_add(9000)),
        (ack.wrapping_sub(3000), ack.wrapping_sub(1000)),
        (ack.wrapping_add(1 << 20), ack.wrapping_add(1 << 21)),
    ];
    let t = Some((0xffff_fff0, 17));
    let unknown = vec![30, 4, 0xab, 0xcd];
    vec![
        ("none", vec![]),
        ("timestamps", usual(t, &[])),
        ("timestamps, 1 block", usual(t, &blocks[..1])),
        ("timestamps, 2 blocks", usual(t, &blocks[..2])),
        ("timestamps, 3 blocks", usual(t, &blocks[..3])),
        ("1 block", usual(None, &blocks[..1])),
        ("4 blocks", usual(None, &blocks)),
        ("timestamps, then NOPs", fill(ts(5, 6))),
        ("SACK, then timestamps", fill([sack(&blocks[..1]), ts(5, 6)].concat())),
        ("odd offsets", fill([vec![1], ts(5, 6), vec![1, 1, 1], sack(&blocks[..2])].concat())),
        ("unknown option first", fill([unknown.clone(), ts(5, 6)].concat())),
        ("unknown option between", fill([ts(5, 6), unknown, sack(&blocks[..1])].concat())),
        ("unknown option of odd length", fill([vec![253, 5, 1, 2, 3], ts(5, 6)].concat())),
        ("end of list, then what looks like timestamps", fill([vec![1, 0], ts(5, 6)].concat())),
        ("timestamps, end of list", [ts(5, 6), vec![0, 0]].concat()),
        ("length 0", fill([vec![30, 0], ts(5, 6)].concat())),
        ("length 1", fill([vec![30, 1], ts(5, 6)].concat())),
        ("length beyond the header", fill([ts(5, 6), vec![30, 40]].concat())),
        ("timestamps of a wrong length", fill([vec![8, 6, 1, 2, 3, 4], sack(&blocks[..1])].concat())),
        ("kind at the last byte", [ts(5, 6), vec![1, 30]].concat()),
        ("only NOPs", vec![1; 40]),
        ("timestamps at the end", [vec![1; 30], ts(5, 6)].concat()),
    ]
}

/// A few cases with explicit results, so that the translator is not the only reference.
fn by_hand() {
    bench(64, |b| {
        let mut f = Flow::new(V4);
        f.up.seq_add = 100;
        f.up.ack_add = 1000;
        f.up.tsval_add = 7;
        f.up.tsecr_add = 0xffff_ffff;
        (f.up.scale_in, f.up.scale_out) = (3, 1);
        let mut p = f.next(3);
        p.window = 10;
        p.options = option::usual(Some((1, 0)), &[(f.up.max_ack + 1, f.up.max_ack + 2)]);
        f.install(b, 0);
        let o = b.ingress(&p.frame());
        let out = verify(&o.frame).expect("checksums");
        assert_eq!((o.code, &o.verdicts[..]), (REDIRECT, &["forwarded"][..]));
        assert_eq!((out.from, out.to), (f.server.local, f.server.remote));
        assert_eq!((out.seq, out.ack, out.window), (p.seq + 100, p.ack + 1000, 40));
        assert_eq!(out.options, option::usual(Some((8, 0xffff_ffff)), &[(p.ack + 1001, p.ack + 1002)]));
        assert_eq!((out.ttl, out.id, out.fragment, &out.payload), (63, p.id, p.fragment, &p.payload));
        assert_eq!((out.dmac, out.smac), (MAC[1], MAC[0]));
        assert_eq!(f.read(b).up.end, f.up.end + 3);
    });
}

/// A name, a change to the flow, and a change to its next packet.
type Case = (&'static str, fn(&mut Flow), fn(&mut Packet));

const CASES: &[Case] = &[
    ("no ACK flag", |_| (), |p| p.flags = flag::PSH),
    ("no ACK flag, with timestamps", |_| (), |p| (p.flags, p.options) = (flag::PSH, option::usual(Some((1, 2)), &[]))),
    ("no ACK flag, wild acknowledgement", |_| (), |p| (p.flags, p.ack) = (0, 0xdead_beef)),
    ("sequence wraps within the segment", |f| f.up.end = u32::MAX - 2, |p| p.seq = u32::MAX - 2),
    ("sequence wraps by the offset", |f| f.up.seq_add = u32::MAX - 4000, |_| ()),
    ("ends exactly at the wrap", |f| f.up.end = u32::MAX - 9, |p| p.seq = u32::MAX - 9),
    ("acknowledgement wraps", |f| f.up.max_ack = u32::MAX - 3, |p| p.ack = 5),
    ("window scaled up", |f| (f.up.scale_in, f.up.scale_out) = (4, 2), |p| p.window = 1000),
    ("window scaled down", |f| (f.up.scale_in, f.up.scale_out) = (0, 14), |p| p.window = 65535),
    ("window scaled down to nothing", |f| (f.up.scale_in, f.up.scale_out) = (0, 14), |p| p.window = 1000),
    ("less than a unit of the other scale", |f| (f.up.scale_in, f.up.scale_out) = (0, 7), |p| p.window = 1),
    ("window clamped", |f| (f.up.scale_in, f.up.scale_out) = (14, 0), |p| p.window = 5),
    ("largest window clamped", |f| (f.up.scale_in, f.up.scale_out) = (14, 0), |p| p.window = 65535),
    ("window zero", |_| (), |p| p.window = 0),
    ("urgent", |_| (), |p| (p.flags, p.urgent) = (flag::ACK | flag::URG, 77)),
    ("urgent beyond its end", |_| (), |p| (p.flags, p.urgent) = (flag::ACK | flag::URG | flag::PSH, 0xffff)),
    ("an urgent pointer that does not count", |_| (), |p| p.urgent = 77),
    ("congestion marks", |_| (), |p| (p.flags, p.tos) = (flag::ACK | flag::ECE | flag::CWR | flag::PSH, 0x2b)),
    ("flow label, all of the traffic class", |_| (), |p| (p.label, p.tos) = (0xf_edcb, 0xff)),
    ("TTL 1", |_| (), |p| p.ttl = 1),
    ("TTL 0", |_| (), |p| p.ttl = 0),
    ("TTL 2", |_| (), |p| p.ttl = 2),
    ("TTL 255", |_| (), |p| p.ttl = 255),
    ("padding of a short frame", |_| (), |p| p.padding = vec![0xee; 6]),
    ("one byte behind what came", |_| (), |p| p.seq += 1),
    ("a hole", |_| (), |p| p.seq += 60000),
    ("at the right edge", |_| (), |p| p.seq += 1024 << 7),
    ("beyond the right edge", |_| (), |p| p.seq += (1024 << 7) + 1),
    ("a closed window, at the edge", |f| f.down.room = 0, |p| p.seq += 0),
    ("a closed window, beyond the edge", |f| f.down.room = 0, |p| p.seq += 1),
    ("ahead of what was acknowledged by more than the window", |f| f.down.max_ack -= 1 << 18, |p| p.seq += 1),
    (
        "behind, and as old as can be",
        |_| (),
        |p| {
            p.seq = p.seq.wrapping_sub((65535 << 7) + 1 + p.payload.len() as u32);
        },
    ),
    ("behind, and older", |_| (), |p| p.seq = p.seq.wrapping_sub((65535 << 7) + 2 + p.payload.len() as u32)),
    ("a hole, acknowledges what was not sent", |_| (), |p| (p.seq, p.ack) = (p.seq + 100, p.ack + 1)),
    (
        "a hole, acknowledges too little",
        |_| (),
        |p| {
            (p.seq, p.ack) = (p.seq + 100, p.ack.wrapping_sub((65535 << 7) + 1));
        },
    ),
    ("a hole, no ACK flag", |_| (), |p| (p.seq, p.flags) = (p.seq + 100, flag::PSH)),
    ("RST in the window", |_| (), |p| (p.flags, p.payload, p.seq) = (flag::RST, vec![], p.seq + 100)),
    ("RST that is late", |_| (), |p| (p.flags, p.payload, p.seq) = (flag::RST, vec![], p.seq - 100)),
    ("RST, hardly any window", |f| f.down.room = 8, |p| (p.flags, p.payload, p.seq) = (flag::RST, vec![], p.seq + 5)),
    ("RST at the right edge", |_| (), |p| (p.flags, p.payload, p.seq) = (flag::RST, vec![], p.seq + (1024 << 7))),
    ("RST beyond it", |_| (), |p| (p.flags, p.payload, p.seq) = (flag::RST, vec![], p.seq + (1024 << 7) + 1)),
    ("FIN without ACK", |_| (), |p| p.flags = flag::FIN),
    ("FIN far behind", |_| (), |p| (p.flags, p.seq) = (flag::FIN | flag::ACK, p.seq - 4000)),
    ("FIN far behind the circle", |_| (), |p| (p.flags, p.seq) = (flag::FIN | flag::ACK, p.seq ^ 1 << 31)),
    (
        "FIN at what was acknowledged as data",
        |_| (),
        |p| {
            (p.flags, p.payload, p.seq) = (flag::FIN | flag::ACK, vec![], p.seq - 1);
        },
    ),
    (
        "FIN at data that nobody has acknowledged",
        |f| f.down.max_ack -= 10,
        |p| {
            (p.flags, p.payload, p.seq) = (flag::FIN | flag::ACK, vec![], p.seq - 1);
        },
    ),
    ("FIN in the window", |_| (), |p| (p.flags, p.seq) = (flag::FIN | flag::ACK, p.seq + 100)),
    ("data behind a FIN", |f| (f.up.fin, f.down.peer_fin) = (true, true), |p| p.window += 1),
    ("data behind a FIN that was acknowledged", |f| (f.up.fin, f.up.fin_acked) = (true, true), |p| p.window += 1),
    ("acknowledges a FIN that was none", |f| f.up.peer_fin = true, |p| p.payload = vec![]),
    ("a wider window", |_| (), |p| p.window = 1025),
    ("a narrower window", |_| (), |p| p.window = 7),
    ("a narrower window, and new", |f| f.up.max_ack -= 500, |p| (p.window, p.ack) = (7, p.ack + 500)),
    ("a closed window, and new", |f| f.up.max_ack -= 500, |p| (p.window, p.ack) = (0, p.ack + 500)),
    ("opposite side of the circle", |_| (), |p| p.seq ^= 1 << 31),
    ("far behind", |_| (), |p| p.seq = p.seq.wrapping_sub((1 << 30) + (65535 << 7) + 1)),
    ("retransmission", |_| (), |p| p.seq = p.seq.wrapping_sub(4000)),
    ("old acknowledgement", |_| (), |p| p.ack -= 5000),
    ("acknowledgement beyond the window", |_| (), |p| p.ack += (65535 << 7) + 1),
    ("acknowledgement at the window's end", |_| (), |p| p.ack += 65535 << 7),
    ("acknowledgement far behind", |_| (), |p| p.ack = p.ack.wrapping_sub((1 << 30) + 1)),
    ("SYN", |_| (), |p| (p.flags, p.payload) = (flag::SYN, vec![])),
    ("SYN ACK", |_| (), |p| (p.flags, p.payload) = (flag::SYN | flag::ACK, vec![])),
    ("SYN RST", |_| (), |p| (p.flags, p.payload) = (flag::SYN | flag::RST, vec![])),
    ("RST in order", |_| (), |p| (p.flags, p.payload) = (flag::RST, vec![])),
    ("RST ACK in order", |_| (), |p| (p.flags, p.payload) = (flag::RST | flag::ACK, vec![])),
    (
        "RST as the receiver has it",
        |f| f.up.end += 1000,
        |p| {
            (p.flags, p.payload) = (flag::RST, vec![]);
            p.seq -= 1000;
        },
    ),
    ("RST in order, and within the window", |f| f.up.end += 700 << 7, |p| (p.flags, p.payload) = (flag::RST, vec![])),
    ("RST in order, beyond the window", |f| f.up.end += 1100 << 7, |p| (p.flags, p.payload) = (flag::RST, vec![])),
    (
        "RST in order, beyond a window that is closed",
        |f| (f.up.end, f.down.room) = (f.up.end + 700, 0),
        |p| (p.flags, p.payload) = (flag::RST, vec![]),
    ),
    ("RST out of order", |_| (), |p| (p.flags, p.payload, p.seq) = (flag::RST, vec![], p.seq + 1)),
    ("dead flow", |f| f.up.dead = true, |_| ()),
    ("FIN", |_| (), |p| (p.flags, p.payload) = (flag::FIN | flag::ACK, vec![])),
    ("FIN with data", |_| (), |p| p.flags = flag::FIN | flag::ACK),
    (
        "FIN at the wrap",
        |f| f.up.end = u32::MAX,
        |p| (p.flags, p.payload, p.seq) = (flag::FIN | flag::ACK, vec![], u32::MAX),
    ),
    (
        "FIN once more",
        |f| (f.up.fin, f.down.peer_fin) = (true, true),
        |p| {
            (p.flags, p.payload) = (flag::FIN | flag::ACK, vec![]);
            p.seq -= 1;
        },
    ),
    (
        "FIN once more, acknowledged already",
        |f| (f.up.fin, f.up.fin_acked) = (true, true),
        |p| {
            (p.flags, p.payload) = (flag::FIN | flag::ACK, vec![]);
            p.seq -= 1;
        },
    ),
    ("acknowledges the other FIN", |f| (f.up.peer_fin, f.down.fin) = (true, true), |p| p.payload = vec![]),
    ("acknowledges less than the other FIN", |f| (f.up.peer_fin, f.down.fin) = (true, true), |p| p.ack -= 1),
    (
        "acknowledges the other FIN with its own",
        |f| (f.up.peer_fin, f.down.fin) = (true, true),
        |p| p.flags |= flag::FIN,
    ),
    ("fits exactly", |_| (), |p| p.payload = vec![1; 1440]),
    ("too large", |_| (), |p| p.payload = vec![1; 1461]),
    ("too large by one, IPv6", |_| (), |p| p.payload = vec![1; 1441]),
    ("no MTU known, small", |f| f.up.mtu = 576, |p| p.payload = vec![1; 600]),
    ("as little as a host may be told", |f| f.up.mtu = 1280, |p| p.payload = vec![1; 1300]),
    ("less than a host may be told", |f| f.up.mtu = 1279, |p| p.payload = vec![1; 1300]),
];

fn one_packet() {
    bench(64, |b| {
        for v6 in FAMILIES {
            for (name, flow, packet) in CASES {
                for n in [0, 10, 11] {
                    let mut f = Flow::new(v6);
                    flow(&mut f);
                    let mut p = f.next(n);
                    packet(&mut p);
                    agree(b, &format!("{name}, v6 {v6:?}, {n} bytes"), &f, &p.frame(), None);
                }
            }
        }
    });
}

fn ip_options_are_removed() {
    bench(64, |b| {
        for v6 in [V4, Pair::new(false, true)] {
            for n in [4, 8, 40] {
                let f = Flow::new(v6);
                let mut p = f.next(101);
                p.ip_options = vec![1; n];
                p.options = option::usual(Some((1, 2)), &[]);
                let o = agree(b, &format!("{n} bytes of IP options, {v6:?}"), &f, &p.frame(), None);
                assert!(verify(&o.frame).expect("checksums").ip_options.is_empty());
            }
        }
    });
}

/// The checksum is end to end: a corrupt packet must leave corrupt.
fn a_wrong_checksum_stays_wrong() {
    bench(64, |b| {
        for v6 in FAMILIES {
            let f = Flow::new(v6);
            let mut frame = f.next(100).frame();
            *frame.last_mut().expect("bytes") ^= 0x10;
            f.install(b, 0);
            let o = b.ingress(&frame);
            assert!(o.code == DROP || verify(&o.frame).is_err(), "{v6:?}: a broken packet was made whole");
        }
    });
}

fn not_ours() {
    bench(64, |b| {
        let f = Flow::new(V4);
        let f6 = Flow::new(V6);
        f.install(b, 0);
        f6.install(b, 0);
        let good = f.next(32).frame();
        let good6 = f6.next(32).frame();
        let mut stranger = f.next(8);
        stranger.from.set_port(1);
        let mut stranger6 = f6.next(8);
        stranger6.to.set_port(1);
        let changed = |f: &[u8], at: usize, v: u8| {
            let mut f = f.to_vec();
            f[at] = v;
            f
        };
        let mut extended = good6[..ETHERNET + 40].to_vec();
        extended[ETHERNET + 6] = 60; // destination options
        extended.extend([6, 0, 1, 4, 0, 0, 0, 0]);
        extended.extend(&good6[ETHERNET + 40..]);
        let cases: Vec<(&str, Vec<u8>)> = vec![
            ("unknown tuple", stranger.frame()),
            ("unknown tuple, IPv6", stranger6.frame()),
            ("UDP", changed(&good, ETHERNET + 9, 17)),
            ("ICMP", changed(&good, ETHERNET + 9, 1)),
            ("UDP, IPv6", changed(&good6, ETHERNET + 6, 17)),
            ("ARP", changed(&good, 13, 6)),
            ("version 5", changed(&good, ETHERNET, 0x55)),
            ("IP header length 16", changed(&good, ETHERNET, 0x44)),
            ("TCP header length 16", changed(&good, ETHERNET + 32, 0x40)),
            ("TCP header beyond the packet", changed(&f.next(0).frame(), ETHERNET + 32, 0xf0)),
            ("cut in the TCP header", good[..ETHERNET + 30].to_vec()),
            ("cut in the TCP header, IPv6", good6[..ETHERNET + 50].to_vec()),
        ];
        for (name, frame) in cases {
            let o = b.ingress(&frame);
            assert!(o.code == NEXT && o.verdicts.is_empty(), "{name}: {o:?}");
            assert_eq!(hex(&o.frame), hex(&frame), "{name}");
            assert_eq!(f.read(b).up, f.up, "{name}");
            assert_eq!(f6.read(b).up, f6.up, "{name}");
        }
        // part of a flow, but not a header that is forwarded
        let o = b.ingress(&extended);
        assert_eq!((o.code, &o.verdicts[..]), (DROP, &["fragment"][..]), "extension header");
        assert_eq!(f6.read(b).up, f6.up);
    });
}

/// A length field larger than the frame: a router discards the packet (RFC 1812, 5.2.2), and it must not change any state.
fn truncated_packets_move_nothing() {
    bench(64, |b| {
        for v6 in SAME {
            let f = Flow::new(v6);
            let frame = f.next(400).frame();
            for n in [1, 100, 400] {
                f.install(b, 0);
                let o = b.ingress(&frame[..frame.len() - n]);
                assert_ne!(o.code, REDIRECT, "{v6:?}: {n} bytes are missing, and it was forwarded");
                assert_eq!(f.read(b).up, f.up, "{v6:?}: state unchanged");
            }
        }
    });
}

/// A corrupt IP header must not leave with a valid checksum (RFC 1812, 5.2.2).
fn broken_ip_header_is_not_repaired() {
    bench(64, |b| {
        let f = Flow::new(V4);
        for (name, options, ip_options) in [
            ("usual", vec![], vec![]),
            ("unusual", option::fill(option::ts(1, 2)), vec![]),
            ("IP options", vec![], vec![1; 4]),
        ] {
            let mut p = f.next(40);
            (p.options, p.ip_options) = (options, ip_options);
            let mut frame = p.frame();
            frame[ETHERNET + 1] ^= 0x40;
            f.install(b, 0);
            let o = b.ingress(&frame);
            assert_ne!(o.code, REDIRECT, "{name}: sent on: {}", hex(&o.frame));
            assert_eq!(f.read(b).up, f.up, "{name}: nothing is learnt");
        }
    });
}

/// A GSO packet is checked by the size of its segments.
fn large_packets() {
    bench(64, |b| {
        for v6 in FAMILIES {
            let f = Flow::new(v6);
            for (n, segment) in
                [(2800, 1400), (2801, 1400), (3000, 1440), (3000, 1441), (3000, 1460), (3000, 1461), (100, 50)]
            {
                let p = f.next(n);
                agree(b, &format!("{n} bytes by {segment}, {v6:?}"), &f, &p.frame(), Some(segment));
            }
        }
    });
}

/// A leg in control mode, whose socket's numbers are shifted by shims.
fn control_leg(f: &Flow, b: &Bench, shim: [u32; 3]) -> abi::leg {
    let leg = abi::leg {
        flags: LegFlags::TRACKED | LegFlags::TS | LegFlags::SACK,
        wscale_in: 7,
        wscale_out: 7,
        iss: f.up.max_ack - 1,
        max_in: f.up.end,
        ack_out: f.up.end,
        ack_local: f.up.end,
        win_local: 65535,
        win_out: 65535,
        edge_out: f.up.end + 65535,
        max_out: f.up.max_ack,
        local_out: f.up.max_ack,
        ack_in: f.up.max_ack,
        edge_in: f.up.max_ack + 65535,
        shim_in: shim[0],
        shim_out: shim[1],
        shim_ts: shim[2],
        ifindex: 1,
        ..Default::default()
    };
    testing::put_path(&b.datapath, &f.client, &abi::path::default(), [0; 4]).expect("path");
    testing::put_leg(&b.datapath, &f.client, &leg).expect("leg");
    leg
}

fn control_mode_leaves_packets_alone() {
    bench(64, |b| {
        for v6 in SAME {
            let f = Flow::new(v6);
            for flags in
                [flag::ACK, flag::ACK | flag::PSH, flag::ACK | flag::FIN, flag::RST, flag::SYN, flag::SYN | flag::ACK]
            {
                control_leg(&f, b, [0; 3]);
                let mut p = f.next(25);
                p.flags = flags;
                p.options = option::usual(Some((1, 2)), &[(p.ack + 1, p.ack + 2)]);
                let o = b.ingress(&p.frame());
                // a SYN starts a new connection: the old record is removed, and the packet belongs to no flow
                let verdicts: &[&str] = if flags == flag::SYN { &[] } else { &["local"] };
                assert_eq!((o.code, &o.verdicts[..]), (NEXT, verdicts), "flags {flags:x}");
                assert_eq!(hex(&o.frame), hex(&p.frame()), "flags {flags:x}");
            }
            control_leg(&f, b, [0; 3]);
            let mut p = Packet::new(f.client.local, f.client.remote);
            (p.seq, p.ack, p.payload) = (f.up.max_ack, f.up.end, vec![5; 25]);
            if v6.client {
                (p.id, p.fragment) = (0, 0);
            }
            p.options = option::usual(Some((1, 2)), &[]);
            let o = b.run(true, &p.frame(), TestContext::default());
            assert_eq!((o.code, &o.verdicts[..]), (NEXT, &["local-out"][..]));
            assert_eq!(hex(&o.frame), hex(&p.frame()));
            assert_eq!(testing::get_leg(&b.datapath, &f.client).expect("leg").max_out, f.up.max_ack + 25);
        }
    });
}

together!(
    by_hand,
    one_packet,
    ip_options_are_removed,
    a_wrong_checksum_stays_wrong,
    not_ours,
    truncated_packets_move_nothing,
    broken_ip_header_is_not_repaired,
    large_packets,
    control_mode_leaves_packets_alone
);
