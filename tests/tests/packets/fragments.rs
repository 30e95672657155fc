//! Fragmented segments. If forwarded, the other host receives the segment that
//! the translator makes of the whole; if refused, the verdict is specific.

use super::*;
use longsplice_datapath::LegFlags;
use longsplice_tests::packet::{check_header, cut, join};

const FORWARDED: (i32, &[&str]) = (REDIRECT, &["fragment-forwarded"]);

/// A segment of `n` bytes, with DF clear for IPv4.
fn segment(f: &Flow, n: usize) -> Packet {
    let mut p = f.next(n);
    (p.fragment, p.id) = (0, 0);
    p
}

/// The flow with an unlimited MTU: the translator works on the whole segment, which no link would carry.
fn unbounded(f: &Flow) -> Flow {
    let mut f = *f;
    (f.up.mtu, f.down.mtu) = (65535, 65535);
    f
}

/// The translation of a whole segment, and the state after it.
fn whole(f: &Flow, frame: &[u8]) -> (Vec<u8>, Flow) {
    let mut want = unbounded(f);
    match translate(&mut want.up, &mut want.down, frame, None) {
        Fate::Forwarded(frame) => (frame, want),
        other => panic!("{other:?}"),
    }
}

fn state(f: &Flow, b: &Bench) -> (Direction, Direction) {
    let f = unbounded(&f.read(b));
    (f.up, f.down)
}

fn ends(o: &Outcome) -> (i32, &[&'static str]) {
    (o.code, &o.verdicts)
}

/// Whether each leg is marked as unable to return to control mode.
fn marked(f: &Flow, b: &Bench) -> Pair<bool> {
    f.legs().map(|t| b.datapath.path(t).expect("path").flags & PathFlags::FRAGMENTS != 0)
}

/// Sends the fragments in this order; all must be forwarded, and reassemble to `want`. Returns their new identification.
fn train(name: &str, b: &Bench, fragments: &[Vec<u8>], order: &[usize], want: &[u8]) -> u32 {
    let mut out = Vec::new();
    for &i in order {
        let o = b.ingress(&fragments[i]);
        assert_eq!(ends(&o), FORWARDED, "{name}: fragment {i}: {}", hex(&fragments[i]));
        out.push(o.frame);
    }
    let (got, id) = join(&out);
    assert_eq!(hex(&same_zero(got.clone())), hex(&same_zero(want.to_vec())), "{name}");
    verify(&got).unwrap_or_else(|e| panic!("{name}: {e}"));
    id
}

fn what_arrives_is_the_segment() {
    bench(64, |b| {
        let mut id = 100;
        for v6 in SAME {
            for (layout, options) in layouts(9000) {
                for (cuts, order) in [
                    (&[64, 1464][..], &[0, 1, 2][..]),
                    (&[1400], &[0, 1]),
                    (&[64, 72, 1256], &[0, 1, 2, 3]),
                    (&[512, 1024, 1536, 2048, 2560], &[0, 5, 3, 1, 4, 2]),
                ] {
                    let f = Flow::new(v6);
                    f.install(b, 0);
                    let untouched = state(&f, b);
                    let mut p = segment(&f, 2600);
                    p.options = options.clone();
                    let frame = p.frame();
                    let (want, after) = whole(&f, &frame);
                    id += 1;
                    let name = format!("{layout}, {v6:?}, cut at {cuts:?}, sent as {order:?}");
                    let fragments = cut(&frame, cuts, id);
                    let o = b.ingress(&fragments[0]);
                    assert_eq!(ends(&o), FORWARDED, "{name}");
                    assert_eq!(state(&f, b), untouched, "{name}: nothing counts yet");
                    assert_eq!(marked(&f, b), Pair::both(true), "{name}: no way back");
                    train(&name, b, &fragments, order, &want);
                    assert_eq!(state(&f, b), (after.up, after.down), "{name}: state after");
                }
            }
        }
    });
}

/// Bytes and a FIN are counted once, with the last fragment; acknowledgements with the first.
fn counts_are_exact() {
    type Change = (&'static str, fn(&mut Flow), fn(&mut Packet));
    let cases: [Change; 9] = [
        ("data", |_| (), |_| ()),
        ("at the wrap", |f| (f.up.end, f.up.wraps) = (u32::MAX - 700, 3), |p| p.seq = u32::MAX - 700),
        ("FIN", |_| (), |p| p.flags |= flag::FIN),
        ("FIN at the wrap", |f| f.up.end = u32::MAX - 999, |p| (p.flags, p.seq) = (0x11, u32::MAX - 999)),
        ("FIN, acknowledged already", |f| f.up.fin_acked = true, |p| (p.flags, p.seq) = (0x11, p.seq - 1001)),
        ("once more", |_| (), |p| p.seq -= 1000),
        ("half of it once more", |_| (), |p| p.seq -= 500),
        ("behind a gap", |_| (), |p| p.seq += 4000),
        ("acknowledges the other FIN", |f| (f.up.peer_fin, f.down.fin) = (true, true), |_| ()),
    ];
    bench(64, |b| {
        for v6 in SAME {
            for (i, (name, flow, packet)) in cases.iter().enumerate() {
                let mut f = Flow::new(v6);
                flow(&mut f);
                f.install(b, 0);
                let mut p = segment(&f, 1000);
                packet(&mut p);
                let frame = p.frame();
                let (want, after) = whole(&f, &frame);
                let fragments = cut(&frame, &[504, 800], 500 + i as u32);
                let name = format!("{name}, {v6:?}");
                for i in [0, 1, 1] {
                    assert_eq!(ends(&b.ingress(&fragments[i])), FORWARDED, "{name}");
                    let (up, down) = state(&f, b);
                    assert_eq!((up.end, up.wraps, up.fin), (f.up.end, f.up.wraps, f.up.fin), "{name}: too early");
                    assert_eq!(down.peer_fin, f.down.peer_fin, "{name}: too early");
                    assert_eq!(up.max_ack, after.up.max_ack, "{name}");
                }
                assert_eq!(ends(&b.ingress(&fragments[2])), FORWARDED, "{name}");
                assert_eq!(state(&f, b), (after.up, after.down), "{name}: once");
                assert_eq!(ends(&b.ingress(&fragments[2])), FORWARDED, "{name}");
                assert_eq!(state(&f, b), (after.up, after.down), "{name}: not twice");
                train(&name, b, &fragments, &[0, 1, 2], &want);
            }
        }
    });
}

/// Two hosts that chose the same identification appear as one host here. A repeated first fragment keeps its identification.
fn identifications_are_our_own() {
    bench(64, |b| {
        for v6 in SAME {
            let f = Flow::new(v6);
            let mut g = f;
            g.client.remote = addr(if v6.client { "[2001:db8:1::9]:40001" } else { "10.77.1.9:40001" });
            let mut ids = Vec::new();
            for f in [f, g, f, g] {
                f.install(b, 0);
                let frame = segment(&f, 500).frame();
                let number = 7 + ids.len() as u32 / 2;
                let fragments = cut(&frame, &[256], number);
                let (want, _) = whole(&f, &frame);
                let id = train("one", b, &fragments, &[0, 1], &want);
                assert_eq!(train("the same again", b, &fragments, &[0, 1], &want), id, "{v6:?}");
                ids.push(id);
            }
            ids.sort();
            ids.dedup();
            assert_eq!(ids.len(), 4, "{v6:?}: {ids:?}");
        }
    });
}

/// RFC 6946: a fragment header on an unfragmented packet.
fn atomic_fragment() {
    bench(64, |b| {
        let f = Flow::new(V6);
        for flags in [flag::ACK, flag::ACK | flag::FIN] {
            f.install(b, 0);
            let mut p = segment(&f, 300);
            p.flags = flags;
            let frame = p.frame();
            let (want, after) = whole(&f, &frame);
            train("atomic", b, &cut(&frame, &[], 5), &[0], &want);
            assert_eq!(state(&f, b), (after.up, after.down));
        }
    });
}

fn options_and_padding() {
    bench(64, |b| {
        for n in [4, 8, 40] {
            let f = Flow::new(V4);
            f.install(b, 0);
            let mut p = segment(&f, 300);
            p.ip_options = vec![1; n];
            let frame = p.frame();
            let (want, after) = whole(&f, &frame);
            let mut fragments = cut(&frame, &[64, 312], 800 + n as u32);
            fragments[2].extend([0xa5; 20]); // frame of minimum length
            train(&format!("{n} bytes of IP options"), b, &fragments, &[0, 1, 2], &want);
            assert_eq!(state(&f, b), (after.up, after.down), "padding is not counted");
        }
    });
}

/// Checks that a refused packet leaves no trace, neither in the packet nor in the state.
#[track_caller]
fn refused(name: &str, f: &Flow, b: &Bench, frame: &[u8], code: i32, verdict: &[&str]) {
    let before = state(f, b);
    let o = b.ingress(frame);
    assert_eq!(ends(&o), (code, verdict), "{name}");
    if code == NEXT {
        assert_eq!(hex(&o.frame), hex(frame), "{name}: untouched");
    }
    assert_eq!(state(f, b), before, "{name}: state");
}

fn later_ones_without_a_first() {
    bench(64, |b| {
        for v6 in SAME {
            let f = Flow::new(v6);
            f.install(b, 0);
            let fragments = cut(&segment(&f, 1000).frame(), &[504, 800], 31);
            refused("before the first", &f, b, &fragments[1], NEXT, &["fragment-stray"]);
            refused("before the first", &f, b, &fragments[2], NEXT, &["fragment-stray"]);
            assert_eq!(marked(&f, b), Pair::both(false), "nothing was forwarded");
            assert_eq!(ends(&b.ingress(&fragments[0])), FORWARDED);
            let other = cut(&segment(&f, 1000).frame(), &[504, 800], 32);
            refused("of another number", &f, b, &other[1], NEXT, &["fragment-stray"]);
            assert_eq!(ends(&b.ingress(&fragments[1])), FORWARDED);

            // so old that the receiver has given up
            let k = testing::key(&f.client);
            let id = if v6.client { 31u32.to_be() } else { u32::from(31u16.to_be()) };
            let k = abi::train_key { remote: k.remote, local: k.local, id };
            let mut t = testing::get_train(&b.datapath, &k).expect("map").expect("an entry");
            for (seconds, late) in [(13, false), (16, true)] {
                let now = longsplice_datapath::monotonic().as_nanos() as u64;
                t.when = now - seconds * 1_000_000_000;
                testing::put_train(&b.datapath, &k, &t).expect("map");
                if late {
                    refused("too late", &f, b, &fragments[1], NEXT, &["fragment-stray"]);
                } else {
                    assert_eq!(ends(&b.ingress(&fragments[1])), FORWARDED);
                }
            }
        }
    });
}

fn later_ones_of_a_flow_that_is_no_longer_forwarded() {
    bench(64, |b| {
        for v6 in SAME {
            let f = Flow::new(v6);
            let fragments = cut(&segment(&f, 1000).frame(), &[504, 800], 41);
            let begin = || {
                f.install(b, 0);
                assert_eq!(ends(&b.ingress(&fragments[0])), FORWARDED);
            };
            begin();
            b.datapath.forget(&f.client);
            let o = b.ingress(&fragments[1]);
            assert_eq!(ends(&o), (DROP, &["fragment-late"][..]), "gone");
            begin();
            let mut dead = f;
            dead.up.dead = true;
            dead.install(b, 0);
            refused("reset", &f, b, &fragments[2], DROP, &["fragment-late"]);
            begin();
            let mut another = f;
            another.server.local.set_port(1);
            another.install(b, 0);
            refused("another flow from the same port", &another, b, &fragments[2], DROP, &["fragment-late"]);
            begin();
            testing::put_path(&b.datapath, &f.client, &abi::path::default(), [0; 4]).expect("path");
            let o = b.ingress(&fragments[2]);
            assert_eq!(ends(&o), (DROP, &["fragment-late"][..]), "stopped");
        }
    });
}

fn tiny_and_overlapping() {
    bench(64, |b| {
        for v6 in SAME {
            let f = Flow::new(v6);
            f.install(b, 0);
            let mut p = segment(&f, 1000);
            p.options = option::usual(Some((1, 2)), &[]);
            let frame = p.frame();
            for (i, n) in [8, 16, 24].into_iter().enumerate() {
                let fragments = cut(&frame, &[n, 504], 50 + i as u32);
                refused("tiny", &f, b, &fragments[0], DROP, &["fragment-tiny"]);
                let mut padded = fragments[0].clone();
                padded.extend([0; 40]);
                refused("tiny, on a long frame", &f, b, &padded, DROP, &["fragment-tiny"]);
                refused("and what follows", &f, b, &fragments[1], NEXT, &["fragment-stray"]);
            }
            let good = cut(&frame, &[32, 504], 60);
            assert_eq!(ends(&b.ingress(&good[0])), FORWARDED, "the header and nothing else");
            for n in [8, 16, 24] {
                refused("overlap", &f, b, &cut(&frame, &[n, 504], 60)[1], DROP, &["fragment-overlap"]);
                refused("overlap, last", &f, b, &cut(&frame, &[n], 60)[1], DROP, &["fragment-overlap"]);
            }
            assert_eq!(ends(&b.ingress(&good[1])), FORWARDED);
            let mut beyond = good[2].clone();
            if v6.client {
                beyond[ETHERNET + 42..ETHERNET + 44].copy_from_slice(&0xfff8u16.to_be_bytes());
            } else {
                beyond[ETHERNET + 6..ETHERNET + 8].copy_from_slice(&0x1fffu16.to_be_bytes());
                check_header(&mut beyond);
            }
            refused("beyond 65535", &f, b, &beyond, DROP, &["fragment-overlap"]);
            assert_eq!(ends(&b.ingress(&good[2])), FORWARDED);

            let mut stranger = segment(&f, 1000);
            stranger.from.set_port(1);
            refused("nobody's", &f, b, &cut(&stranger.frame(), &[8], 61)[0], NEXT, &[]);
            refused("nobody's", &f, b, &cut(&stranger.frame(), &[504], 61)[0], NEXT, &[]);
        }
    });
}

fn refused_as_any_segment() {
    type Case = (&'static str, fn(&mut Packet), &'static str);
    let cases: [Case; 6] = [
        ("far ahead", |p| p.seq = p.seq.wrapping_add(1 << 30), "out-of-window"),
        ("acknowledges far ahead", |p| p.ack = p.ack.wrapping_add(1 << 30), "bad-ack"),
        ("hop limit", |p| p.ttl = 1, "ttl"),
        ("SYN", |p| p.flags = flag::SYN, "fragment"),
        ("RST", |p| p.flags = flag::RST, "fragment"),
        ("RST, ACK", |p| p.flags = flag::RST | flag::ACK, "fragment"),
    ];
    bench(64, |b| {
        for v6 in SAME {
            let f = Flow::new(v6);
            f.install(b, 0);
            for (name, change, verdict) in cases {
                let mut p = segment(&f, 1000);
                change(&mut p);
                refused(name, &f, b, &cut(&p.frame(), &[504], 71)[0], DROP, &[verdict]);
                assert_eq!(marked(&f, b), Pair::both(false), "{name}");
            }
            let mut low = segment(&f, 1000);
            low.ttl = 1;
            assert_eq!(ends(&b.ingress(&cut(&segment(&f, 1000).frame(), &[504], 73)[0])), FORWARDED);
            refused("hop limit, later", &f, b, &cut(&low.frame(), &[504], 73)[1], DROP, &["ttl"]);
        }
    });
}

fn too_big_for_the_way_out() {
    bench(64, |b| {
        for v6 in SAME {
            let mut f = Flow::new(v6);
            f.up.mtu = 1400;
            let headers = if v6.client { 48 } else { 20 };
            for n in [1352, 1360, 1376, 1384, 1392] {
                // use another client; otherwise the answer would be rate limited
                f.client.remote.set_port(40_000 + n as u16);
                f.down.out_to = f.client.remote;
                f.install(b, 0);
                let frame = segment(&f, 3000).frame();
                let fragments = cut(&frame, &[n, n + 8], 80 + n as u32);
                let fits = headers + n <= 1400;
                let o = b.ingress(&fragments[0]);
                if fits {
                    assert_eq!(ends(&o), FORWARDED, "{n}, {v6:?}");
                    refused("a later one", &f, b, &fragments[2], DROP, &["oversize"]);
                    continue;
                }
                assert_eq!(ends(&o), (REDIRECT, &["oversize"][..]), "{n}, {v6:?}");
                let icmp = verify_icmp(&o.frame).unwrap_or_else(|| panic!("no valid ICMP: {}", hex(&o.frame)));
                assert_eq!((icmp.to, icmp.mtu), (f.client.remote.ip(), 1400));
                assert!(fragments[0][ETHERNET..].starts_with(&icmp.quote), "quotes what came: {}", hex(&icmp.quote));
            }
            // so little is told to nobody: it would count for the host's other connections
            f.up.mtu = 600;
            f.client.remote.set_port(39_000);
            f.down.out_to = f.client.remote;
            f.install(b, 0);
            let fragments = cut(&segment(&f, 2000).frame(), &[1000], 79);
            refused("too small to be told", &f, b, &fragments[0], DROP, &["oversize"]);
        }
    });
}

fn the_family_cannot_change() {
    bench(64, |b| {
        for v6 in [Pair::new(false, true), Pair::new(true, false)] {
            let f = Flow::new(v6);
            f.install(b, 0);
            let fragments = cut(&segment(&f, 1000).frame(), &[504], 91);
            refused("first", &f, b, &fragments[0], DROP, &["fragment-cross"]);
            refused("later", &f, b, &fragments[1], NEXT, &["fragment-stray"]);
            assert_eq!(marked(&f, b), Pair::both(false));
        }
    });
}

/// A flow with a limit forwards no fragments: the first one ends the splice, and goes to the socket.
fn limited_flows_forward_none() {
    bench(64, |b| {
        for v6 in SAME {
            let mut f = Flow::new(v6);
            sockets::limited(&mut f, b, 1 << 20);
            let fragments = cut(&segment(&f, 1000).frame(), &[504], 101);
            let first = b.ingress(&fragments[0]);
            assert_eq!((first.code, &first.verdicts[..]), (NEXT, &[][..]), "as it came, for there are no shims");
            assert_eq!(ends(&b.ingress(&fragments[1])).0, NEXT);
            assert_eq!(marked(&f, b), Pair::both(false));
            let up = b.datapath.path(&f.client).expect("path");
            assert_eq!((up.flags & PathFlags::SPLICED, up.end), (0, f.up.end));
            assert_ne!(testing::get_leg(&b.datapath, &f.client).expect("leg").flags & LegFlags::FRAGMENTS, 0);
        }
    });
}

fn in_control_mode() {
    bench(64, |b| {
        for v6 in SAME {
            let f = Flow::new(v6);
            let fragments = cut(&segment(&f, 1000).frame(), &[504], 111);
            let flags = || testing::get_leg(&b.datapath, &f.client).expect("leg").flags;
            control_leg(&f, b, [0; 3]);
            for (i, (part, verdicts)) in fragments.iter().zip([&[][..], &["fragment-stray"]]).enumerate() {
                let o = b.ingress(part);
                assert_eq!(ends(&o), (NEXT, verdicts), "{i}");
                assert_eq!(hex(&o.frame), hex(part));
            }
            assert_ne!(flags() & LegFlags::FRAGMENTS, 0, "it can no longer be vouched for");

            // the socket's numbers differ from those on the wire
            control_leg(&f, b, [1000, 5000, 0]);
            let o = b.ingress(&fragments[0]);
            assert_eq!(ends(&o), (NEXT, &["local"][..]));
            let (got, _) = join(&[o.frame, fragments[1].clone()]);
            let got = verify(&got).expect("checksums");
            assert_eq!((got.seq, got.ack), (f.up.end.wrapping_sub(1000), f.up.max_ack.wrapping_sub(5000)));
            assert_eq!((got.from, got.to, got.payload.len()), (f.client.remote, f.client.local, 1000));
            assert_ne!(flags() & LegFlags::FRAGMENTS, 0);
            let o = b.ingress(&cut(&segment(&f, 1000).frame(), &[8], 112)[0]);
            assert_eq!(ends(&o), (DROP, &["fragment-tiny"][..]), "no place for the shim");

            // an identification that a forwarded segment has used
            f.install(b, 0);
            assert_eq!(ends(&b.ingress(&fragments[0])), FORWARDED);
            control_leg(&f, b, [0; 3]);
            assert_eq!(ends(&b.ingress(&fragments[0])), (NEXT, &[][..]));
            assert_eq!(ends(&b.ingress(&fragments[1])), (NEXT, &["fragment-stray"][..]));
        }
    });
}

/// In an unsplice, fragments below the bound are not forwarded; the others reach the socket.
fn while_taken_back() {
    bench(64, |b| {
        for v6 in SAME {
            let f = Flow::new(v6);
            let mut leg = control_leg(&f, b, [1000, 0, 0]);
            leg.phase_in = TO_LOCAL;
            leg.bound_in = f.up.end;
            leg.ack_out = f.up.end - 500;
            testing::put_leg(&b.datapath, &f.client, &leg).expect("leg");
            let mut p = segment(&f, 1000);
            let o = b.ingress(&cut(&p.frame(), &[504], 121)[0]);
            assert_eq!(ends(&o), (NEXT, &["local"][..]), "from the bound on");
            p.seq -= 500;
            let o = b.ingress(&cut(&p.frame(), &[504], 122)[0]);
            assert_eq!(ends(&o), (DROP, &["fragment"][..]), "across it");
        }
    });
}

/// A fragmented segment of our own socket: its end is not visible.
fn from_a_socket() {
    bench(64, |b| {
        for v6 in SAME {
            let f = Flow::new(v6);
            control_leg(&f, b, [0; 3]);
            let mut p = Packet::new(f.client.local, f.client.remote);
            (p.seq, p.ack, p.payload, p.id, p.fragment) = (f.up.max_ack, f.up.end, vec![5; 1000], 0, 0);
            for part in cut(&p.frame(), &[504], 131) {
                assert_eq!(b.run(true, &part, TestContext::default()).code, NEXT);
            }
            assert_ne!(testing::get_leg(&b.datapath, &f.client).expect("leg").flags & LegFlags::FRAGMENTS, 0);
        }
    });
}

/// Any segment that is forwarded whole is also forwarded in fragments, cut
/// anywhere, in any order after the first. `PACKETS_SEED=n` selects other segments.
#[test]
#[ignore = "root"]
fn random_trains() {
    let seed = std::env::var("PACKETS_SEED").map_or(1, |s| s.parse().expect("PACKETS_SEED is a number"));
    bench(65536, |b| {
        let mut r = SmallRng::seed_from_u64(seed);
        let mut trains = 0;
        for n in 0..20_000 {
            let f = unbounded(&random::random_flow(&mut r));
            let mut p = Packet::parse(&random::random_packet(&mut r, &f).0).expect("a packet");
            p.padding.clear();
            (p.id, p.fragment) = (0, 0);
            if f.up.dead || f.client.is_v4() != f.server.is_v4() || p.flags & (flag::SYN | flag::RST) != 0 {
                continue;
            }
            let (frame, header) = (p.frame(), 20 + p.options.len());
            let mut want = f;
            let Fate::Forwarded(whole) = translate(&mut want.up, &mut want.down, &frame, None) else { continue };
            let mut at: Vec<usize> =
                (header.div_ceil(8)..(header + p.payload.len()).div_ceil(8)).map(|i| i * 8).collect();
            at.retain(|_| r.random_bool(0.03));
            if at.is_empty() {
                continue;
            }
            let fragments = cut(&frame, &at, n);
            let mut order: Vec<usize> = (0..fragments.len()).collect();
            for i in 1..order.len() {
                let j = r.random_range(1..order.len());
                order.swap(i, j);
            }
            f.install(b, 0);
            let name = format!("seed {seed}, packet {n}, cut at {at:?}, sent as {order:?}");
            train(&name, b, &fragments, &order, &whole);
            assert_eq!(state(&f, b), (want.up, want.down), "{name}: state after");
            trains += 1;
            b.datapath.forget(&f.client);
            b.datapath.forget(&f.server);
        }
        assert!(trains > 1000, "{trains}");
    });
}

together!(
    what_arrives_is_the_segment,
    counts_are_exact,
    identifications_are_our_own,
    atomic_fragment,
    options_and_padding,
    later_ones_without_a_first,
    later_ones_of_a_flow_that_is_no_longer_forwarded,
    tiny_and_overlapping,
    refused_as_any_segment,
    too_big_for_the_way_out,
    the_family_cannot_change,
    limited_flows_forward_none,
    in_control_mode,
    while_taken_back,
    from_a_socket
);
