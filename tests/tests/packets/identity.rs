//! A transparent proxy with the same numbers on both sides: forwarding does only what a router does.

use super::*;
use longsplice_datapath::CommitOptions;

/// A flow with the same addresses, ports and numbers on both sides.
fn same(v6: bool) -> Flow {
    let mut f = Flow::new(Pair::both(v6));
    f.server = Tuple { remote: f.client.local, local: f.client.remote };
    for (d, t) in [(&mut f.up, &f.server), (&mut f.down, &f.client)] {
        (d.seq_add, d.ack_add, d.tsval_add, d.tsecr_add) = (0, 0, 0, 0);
        (d.out_from, d.out_to) = (t.local, t.remote);
    }
    (f.down.end, f.down.max_ack) = (f.up.max_ack, f.up.end);
    f
}

fn nothing_changes_but_what_a_router_changes() {
    type Change = (&'static str, fn(&mut Packet));
    let changes: [Change; 6] = [
        ("next", |_| ()),
        ("once more", |p| p.seq -= 50),
        ("behind a gap", |p| p.seq += 5000),
        ("FIN", |p| p.flags |= flag::FIN),
        ("window", |p| p.window = 65535),
        ("too far", |p| p.seq = p.seq.wrapping_add(1 << 30)),
    ];
    bench(64, |b| {
        for v6 in [false, true] {
            let f = same(v6);
            for (layout, options) in layouts(f.up.max_ack) {
                for (change, packet) in changes {
                    let name = format!("{layout}, {change}, v6 {v6}");
                    f.install(b, PathFlags::IDENTITY);
                    let mut p = f.next(100);
                    p.options = options.clone();
                    packet(&mut p);
                    let frame = p.frame();
                    let o = b.ingress(&frame);
                    let mut want = f;
                    let fate = translate(&mut want.up, &mut want.down, &frame, None);
                    compare(&name, &f, &frame, &o.frame, o.code, &fate);
                    let got = f.read(b);
                    assert_eq!((got.up, got.down), (want.up, want.down), "{name}: tracked as ever");
                    if let Fate::Forwarded(_) = fate {
                        let header = ETHERNET + if v6 { 8 } else { 12 };
                        assert_eq!(hex(&o.frame[header..]), hex(&frame[header..]), "{name}");
                    }
                }
            }
        }
    });
}

/// The short way does not even check for changes: an offset that would have to be added is ignored.
fn nothing_is_rewritten() {
    bench(64, |b| {
        for v6 in [false, true] {
            let mut f = same(v6);
            f.up.seq_add = 5;
            for (flags, seq) in [(0, 5), (PathFlags::IDENTITY, 0)] {
                f.install(b, flags);
                let p = f.next(100);
                let o = b.ingress(&p.frame());
                assert_eq!((o.code, &o.verdicts[..]), (REDIRECT, &["forwarded"][..]));
                let out = verify(&o.frame).expect("checksums");
                assert_eq!((out.seq, out.ttl), (p.seq + seq, p.ttl - 1), "v6 {v6}");
                assert_eq!(f.read(b).up.end, f.up.end + 100);
            }
        }
    });
}

fn the_commit_finds_out() {
    type Change = (&'static str, fn(&mut abi::leg), Pair<bool>);
    let changes: [Change; 4] = [
        ("nothing", |_| (), Pair::both(true)),
        ("sequence numbers", |l| l.seq_off = 1, Pair::both(false)),
        ("clocks", |l| l.ts_from_peer = 1, Pair::both(false)),
        ("the window scale of one", |l| l.wscale_in = 3, Pair::new(false, true)),
    ];
    bench(64, |b| {
        let committed = |f: &Flow, change: fn(&mut abi::leg)| {
            f.install(b, 0);
            sockets::spliced_legs(f, b, 0);
            for (side, t) in Side::BOTH.into_iter().zip(f.legs()) {
                let mut leg = testing::get_leg(&b.datapath, t).expect("leg");
                leg.flags &= !LegFlags::SPLICED;
                if side == Side::Client {
                    change(&mut leg);
                }
                testing::put_leg(&b.datapath, t, &leg).expect("leg");
            }
            let at = b.datapath.look(f.legs()).expect("legs");
            b.datapath.commit(f.legs(), &at, Pair::both(u32::MAX), CommitOptions::default()).expect("committed");
            f.legs().map(|t| b.datapath.path(t).expect("path").flags & PathFlags::IDENTITY != 0)
        };
        for v6 in [false, true] {
            for (name, change, want) in changes {
                assert_eq!(committed(&same(v6), change), want, "{name}, v6 {v6}");
            }
            let mut f = same(v6);
            f.server.local.set_port(41001);
            assert_eq!(committed(&f, |_| ()), Pair::both(false), "another port");
            let mut f = same(v6);
            f.server.remote.set_ip(if v6 { addr("[2001:db8::9]:1") } else { addr("10.0.0.9:1") }.ip());
            assert_eq!(committed(&f, |_| ()), Pair::both(false), "another address");
        }
    });
}

together!(nothing_changes_but_what_a_router_changes, nothing_is_rewritten, the_commit_finds_out);
