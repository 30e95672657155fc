//! Resets at numbers that a receiver would ignore: every reset must
//! be acceptable to its receiver, or make it send a challenge ACK.

use super::*;
use longsplice_datapath::LegFlags;

/// The largest window of the legs in this file, in bytes.
const LARGEST: u32 = 65535 << 7;

/// A reset in order is given to the socket in order, because the socket may have dropped
/// earlier data. A reset beyond the current window, but within one advertised before, is
/// moved into the window so that the socket sends a challenge ACK; so is a late one.
fn a_reset_reaches_the_socket_where_it_expects_one() {
    bench(64, |b| {
        for v6 in SAME {
            for shim in [[0; 3], [100_000, 0u32.wrapping_sub(3000), 500]] {
                let f = Flow::new(v6);
                let mut leg = control_leg(&f, b, shim);
                let acked = f.up.end - 3000;
                (leg.ack_local, leg.ack_out, leg.win_local) = (acked, acked, 2000);
                (leg.win_out, leg.edge_out) = (2000, f.up.end + 100_000);
                let (edge, promised) = (acked + 2000, leg.edge_out);
                for (seq, want, reset) in [
                    (acked, acked, true),
                    (f.up.end, acked, true),
                    (acked + 1, acked + 1, false),
                    (edge, edge, false),
                    (edge + 1, edge - 1, false),
                    (promised, edge - 1, false),
                    (promised + 1, promised + 1, false),
                    (acked - 1, edge - 1, false),
                    (acked - LARGEST, edge - 1, false),
                    (acked - LARGEST - 1, acked - LARGEST - 1, false),
                ] {
                    testing::put_leg(&b.datapath, &f.client, &leg).expect("leg");
                    let mut p = f.next(0);
                    (p.seq, p.flags) = (seq, flag::RST);
                    let o = b.ingress(&p.frame());
                    assert_eq!(o.code, NEXT);
                    let out = verify(&o.frame).expect("checksums");
                    let case = format!("{v6:?} {shim:?} {}", seq.wrapping_sub(acked).cast_signed());
                    assert_eq!((out.seq, out.flags), (want.wrapping_sub(shim[0]), flag::RST), "{case}");
                    let flags = b.datapath.leg(&f.client).expect("leg").flags;
                    assert_eq!(flags & LegFlags::RESET != 0, reset, "{case}");
                }
            }
        }
    });
}

/// Before a commit both sockets are muted, so the other host sends the challenge ACK. It would ignore a reset that is late, or
/// beyond its window, which is not known exactly after forwarding mode: a keep-alive asks it.
fn a_reset_is_asked_about_where_sockets_are_muted() {
    bench(64, |b| {
        for v6 in FAMILIES {
            let f = Flow::new(v6);
            let keep_alive = Some((flag::ACK, u32::MAX));
            for (seq, want) in [
                (1, keep_alive),
                (0u32.wrapping_sub(1), keep_alive),
                (0u32.wrapping_sub(LARGEST), keep_alive),
                (0u32.wrapping_sub(LARGEST + 1), None),
            ] {
                sockets::spliced_legs(&f, b, 0);
                for t in [&f.client, &f.server] {
                    testing::put_path(&b.datapath, t, &abi::path::default(), [0; 4]).expect("path");
                    let mut l = testing::get_leg(&b.datapath, t).expect("leg");
                    l.flags &= !(LegFlags::SPLICED | LegFlags::TRIGGER);
                    testing::put_leg(&b.datapath, t, &l).expect("leg");
                }
                let mut p = f.next(0);
                (p.seq, p.flags) = (p.seq.wrapping_add(seq), flag::RST);
                let o = b.ingress(&p.frame());
                let name = format!("{v6:?} {}", seq.cast_signed());
                let Some((flags, at)) = want else {
                    assert_eq!((o.code, &o.verdicts[..]), (DROP, &["bad-rst"][..]), "{name}");
                    continue;
                };
                assert_eq!(o.code, REDIRECT, "{name}: {:?}", o.verdicts);
                assert!(o.verdicts.contains(&"rst-unproven"), "{name}: {:?}", o.verdicts);
                let out = verify(&o.frame).expect("checksums");
                let base = testing::get_leg(&b.datapath, &f.server).expect("leg").ack_in;
                assert_eq!((out.flags, out.seq), (flags, base.wrapping_add(at)), "{name}");
                assert!(out.payload.is_empty(), "{name}");
            }
        }
    });
}

/// Both directions have drained, and the host was reset before the commit:
/// the reset that its socket, or the kernel for it, sends is in sequence.
fn a_flow_that_was_reset_before_its_commit_is_not_muted() {
    bench(64, |b| {
        let f = Flow::new(V4);
        let mut leg = control_leg(&f, b, [0; 3]);
        (leg.phase_in, leg.phase_out) = (FWD, FWD);
        let heard = f.up.max_ack + 700;
        (leg.max_out, leg.ack_in) = (heard, heard);
        for (reset, flags, want) in
            [(true, flag::RST | flag::ACK, true), (true, flag::ACK, false), (false, flag::RST | flag::ACK, false)]
        {
            leg.flags = (leg.flags & !LegFlags::RESET) | if reset { LegFlags::RESET } else { 0 };
            testing::put_leg(&b.datapath, &f.client, &leg).expect("leg");
            let mut p = Packet::new(f.client.local, f.client.remote);
            (p.seq, p.ack, p.flags) = (f.up.max_ack, f.up.end, flags);
            let o = b.run(true, &p.frame(), TestContext::default());
            assert_eq!(o.code == NEXT, want, "{reset} {flags:x}");
            if want {
                assert_eq!(verify(&o.frame).map(|p| p.seq), Ok(heard));
            }
        }
    });
}

/// A reset has passed, but its receiver was ahead of it. The receiver's answer must not end in a parked socket, nor depend on the
/// other host, which may have begun its next connection: that one takes the place of its own leg only.
fn a_host_that_has_ignored_a_reset_is_reset_again() {
    bench(64, |b| {
        for (v6, transparent) in [(false, false), (true, false), (false, true), (true, true)] {
            let mut f = Flow::new(Pair::both(v6));
            if transparent {
                f.server = Tuple { remote: f.client.local, local: f.client.remote };
                (f.up.out_from, f.up.out_to) = (f.server.local, f.server.remote);
            }
            (f.up.dead, f.down.dead) = (true, true);
            f.install(b, 0);
            let server = Packet { from: f.server.remote, to: f.server.local, ..f.next(0) };
            let speaks = |b: &Bench| b.ingress(&server.frame());
            let answer = speaks(b);
            assert_eq!(answer.verdicts, ["reset-again"], "{v6}");
            let p = Packet::parse(&answer.frame).expect("a packet");
            assert_eq!((p.from, p.to, p.flags, p.seq), (server.to, server.from, flag::RST, server.ack), "{v6}");
            let syn = Packet { flags: flag::SYN, payload: vec![], ..f.next(0) };
            assert_eq!(b.ingress(&syn.frame()).code, NEXT);
            assert!(b.datapath.path(&f.client).is_none(), "a new connection may begin");
            let want: &[&str] = if transparent { &[] } else { &["reset-again"] }; // its server is asked by the client itself
            assert_eq!(speaks(b).verdicts, want, "{v6}");
            b.datapath.forget(&f.server);
        }
    });
}

together!(
    a_reset_reaches_the_socket_where_it_expects_one,
    a_reset_is_asked_about_where_sockets_are_muted,
    a_flow_that_was_reset_before_its_commit_is_not_muted,
    a_host_that_has_ignored_a_reset_is_reset_again
);
