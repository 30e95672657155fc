//! Local sockets: shims, muting, triggers.

use super::*;
use longsplice_datapath::LegFlags;

fn shims() {
    bench(64, |b| {
        let shim = [100_000, 0u32.wrapping_sub(3000), 500];
        for v6 in SAME {
            let f = Flow::new(v6);
            for flags in [flag::ACK, flag::ACK | flag::FIN, flag::PSH, flag::RST | flag::ACK] {
                for n in [0, 33] {
                    control_leg(&f, b, shim);
                    let mut p = f.next(n);
                    p.flags = flags;
                    p.options = option::usual(Some((1, 2)), &[(p.ack + 1, p.ack + 2)]);
                    let mut want = p.clone();
                    want.seq = p.seq.wrapping_sub(shim[0]);
                    if flags & flag::ACK != 0 {
                        want.ack = p.ack.wrapping_sub(shim[1]);
                        want.options =
                            option::usual(Some((1, 2u32.wrapping_sub(500))), &[(want.ack + 1, want.ack + 2)]);
                    } else {
                        let at = p.ack.wrapping_sub(shim[1]);
                        want.options = option::usual(Some((1, 2)), &[(at + 1, at + 2)]);
                    }
                    let o = b.ingress(&p.frame());
                    assert_eq!((o.code, &o.verdicts[..]), (NEXT, &["local"][..]), "flags {flags:x}");
                    assert_eq!(verify(&o.frame), Ok(want), "in: flags {flags:x}, {n} bytes, v6 {v6:?}");
                }
            }
            for n in [0, 33] {
                control_leg(&f, b, shim);
                let mut p = Packet::new(f.client.local, f.client.remote);
                if v6.client {
                    (p.id, p.fragment) = (0, 0);
                }
                p.seq = f.up.max_ack.wrapping_sub(shim[1]);
                p.ack = f.up.end.wrapping_sub(shim[0]);
                p.payload = vec![3; n];
                p.options = option::usual(Some((7, 8)), &[(p.ack + 10, p.ack + 20)]);
                let mut want = p.clone();
                (want.seq, want.ack) = (f.up.max_ack, f.up.end);
                want.options = option::usual(Some((507, 8)), &[(want.ack + 10, want.ack + 20)]);
                let o = b.run(true, &p.frame(), TestContext::default());
                assert_eq!((o.code, &o.verdicts[..]), (NEXT, &["local-out"][..]));
                assert_eq!(verify(&o.frame), Ok(want), "out: {n} bytes, v6 {v6:?}");
            }
        }
    });
}

/// Data lost before a bare acknowledgement may be forwarded when it is retransmitted. If the socket had seen the later
/// number, its own view would go backwards, and later window updates would look old to it.
fn a_socket_hears_of_nothing_that_was_lost() {
    bench(64, |b| {
        for (v6, shim) in [(V4, [0; 3]), (V6, [0; 3]), (V4, [100_000, 0, 0])] {
            let f = Flow::new(v6);
            control_leg(&f, b, shim);
            for beyond in [1, 25, 50_000] {
                let mut p = f.next(0);
                p.seq += beyond;
                p.options = option::usual(Some((1, 2)), &[]);
                let o = b.ingress(&p.frame());
                p.seq = f.up.end.wrapping_sub(shim[0]);
                assert_eq!((o.code, &o.verdicts[..]), (NEXT, &["local"][..]), "{beyond} beyond");
                assert_eq!(verify(&o.frame), Ok(p), "{beyond} beyond");
            }
        }
    });
}

/// Flags of a transparent connection's leg.
const TRANSPARENT: u32 = LegFlags::TRANSPARENT | LegFlags::END_TO_END;

/// Without its leg, the socket of a transparent connection would receive no segment, and
/// anyone can send a SYN. Until there is a socket the stack must not see the SYN: it would
/// reset the connection being opened. User space passes on the server's second SYN-ACK.
fn a_syn_removes_no_transparent_leg() {
    bench(64, |b| {
        for (v6, transparent) in [(false, 0), (false, TRANSPARENT), (true, 0), (true, TRANSPARENT)] {
            let f = Flow::new(Pair::both(v6));
            let mut leg = control_leg(&f, b, [0; 3]);
            leg.flags |= transparent;
            testing::put_leg(&b.datapath, &f.client, &leg).expect("leg");
            let mut p = f.next(0);
            for (flags, verdict) in [(flag::SYN | flag::ACK, "handshake"), (flag::SYN, "handshake-lost")] {
                (p.flags, p.seq, p.ack) = (flags, 77, 0);
                let o = b.ingress(&p.frame());
                assert_eq!(o.code, if transparent == 0 { NEXT } else { DROP }, "v6 {v6}, flags {flags:#x}");
                assert_eq!(o.verdicts.contains(&verdict), transparent != 0, "{:?}", o.verdicts);
            }
            let left = testing::get_leg(&b.datapath, &f.client);
            assert_eq!(left.map(|l| l.flags), (transparent != 0).then_some(leg.flags), "v6 {v6}");
        }
    });
}

/// A client may use its port again while the socket of its last connection is being closed. That socket's numbers must not get into
/// the record of the new server's leg, whose own socket has nothing to say before the client has completed the handshake. If it has,
/// the client's next SYN must not silence that socket, which may still have something to pass on.
fn what_the_socket_of_an_earlier_connection_says_is_not_passed_on() {
    bench(64, |b| {
        for v6 in SAME {
            let f = Flow::new(v6);
            let mut leg = control_leg(&f, b, [0; 3]);
            leg.flags |= TRANSPARENT;
            leg.peer = testing::key(&f.server);
            // how far the SYN that the client has sent last is from the one that the server has got; whether the client's leg exists
            for (last, has_client) in [(0, false), (1, false), (0, true)] {
                let opens = (last, has_client) == (0, false);
                testing::put_leg(&b.datapath, &f.client, &leg).expect("leg");
                testing::put_embryo(&b.datapath, &f.server, leg.iss + last).expect("embryo");
                if has_client {
                    testing::put_leg(&b.datapath, &f.server, &leg).expect("leg");
                }
                let before = format!("{:?}", testing::get_leg(&b.datapath, &f.client).expect("leg"));
                for flags in [flag::ACK, flag::ACK | flag::FIN, flag::ACK | flag::PSH] {
                    let mut p = Packet::new(f.client.local, f.client.remote);
                    if v6.client {
                        (p.id, p.fragment) = (0, 0);
                    }
                    (p.flags, p.seq, p.ack) = (flags, f.up.max_ack + 3, f.up.end + 80_000);
                    p.payload = vec![1; if flags & flag::PSH != 0 { 10 } else { 0 }];
                    let o = b.run(true, &p.frame(), TestContext::default());
                    let want = if opens { (MUTE, &["local-muted"][..]) } else { (NEXT, &["local-out"][..]) };
                    assert_eq!((o.code, &o.verdicts[..]), want, "{v6:?}, flags {flags:#x}, {last}, {has_client}");
                }
                let after = format!("{:?}", testing::get_leg(&b.datapath, &f.client).expect("leg"));
                assert_eq!(before == after, opens, "{v6:?}");
            }
            b.datapath.forget(&f.server);
        }
    });
}

/// The urgent byte keeps its position, whatever numbers a copy is sent with, and
/// is announced to each receiver of the byte. Offsets are relative to the bound.
fn urgent_pointers() {
    const FROM_HERE: u32 = 1000;
    bench(64, |b| {
        // phase, start and length of the segment, end of the urgent data;
        // urgent pointers of the copies for the socket and for the host
        type Case = (u8, i32, usize, i32, Option<Option<u16>>, Option<Option<u16>>);
        let cases: &[Case] = &[
            (0, 0, 10, 5, Some(Some(5)), None),
            (0, 0, 10, 11, Some(None), None), // not before it has arrived
            (0, 0, 0, 5, Some(None), None),
            (TO_FWD, -10, 10, -3, Some(Some(7)), None),
            (TO_FWD, -10, 20, -3, Some(Some(7)), Some(Some(7))),
            (TO_FWD, -10, 20, 3, Some(None), Some(Some(13))),
            (TO_FWD, 0, 20, 3, None, Some(Some(3))),
            (FWD, 0, 20, 3, None, Some(Some(3))),
            (TO_LOCAL, -10, 10, -3, None, Some(Some(7))),
            (TO_LOCAL, -10, 20, 3, Some(Some(13)), Some(None)),
            (TO_LOCAL, 0, 20, 3, Some(Some(3)), None),
        ];
        for v6 in SAME {
            for &(phase, begin, len, urgent, local, forwarded) in cases {
                let f = Flow::new(v6);
                spliced_legs(&f, b, 0);
                testing::put_path(&b.datapath, &f.client, &abi::path::default(), [0; 4]).expect("path");
                testing::put_path(&b.datapath, &f.server, &abi::path::default(), [0; 4]).expect("path");
                for (t, to, ours) in [(&f.client, phase, true), (&f.server, phase, false)] {
                    let mut l = testing::get_leg(&b.datapath, t).expect("leg");
                    l.flags &= !(LegFlags::SPLICED | LegFlags::TRIGGER);
                    (l.phase_in, l.phase_out) = if ours { (to, 0) } else { (0, to) };
                    l.verbatim = l.max_in.wrapping_sub(FROM_HERE);
                    if phase == TO_LOCAL && ours {
                        l.ack_out = l.bound_in - 100;
                    }
                    testing::put_leg(&b.datapath, t, &l).expect("leg");
                }
                let mut p = f.next(len);
                let bound = p.seq;
                p.seq = bound.wrapping_add_signed(begin);
                (p.flags, p.urgent) = (flag::ACK | flag::URG, (urgent - begin).min(0xffff) as u16);
                let name = format!("phase {phase}: {len} bytes at {begin}, urgent to {urgent}, {v6:?}");
                let o = b.ingress(&p.frame());
                // of two copies the unmodified one leaves first, where a test run does not see it
                let last = if o.code == NEXT { local } else { forwarded };
                assert_eq!(o.code, if local.is_some() && phase != TO_LOCAL { NEXT } else { o.code }, "{name}");
                let out = verify(&o.frame).expect("checksums");
                let got = (out.flags & flag::URG != 0).then_some(out.urgent);
                assert_eq!(Some(got), last, "{name}: {:?}", o.verdicts);
            }
        }
    });
}

/// A socket that has received the final acknowledgements of both directions
/// is destroyed, and the kernel would answer a retransmitted FIN with an RST.
fn a_socket_outlives_the_acknowledgement_it_holds_back() {
    bench(64, |b| {
        let shim = [100_000, 3000, 500];
        for v6 in SAME {
            let f = Flow::new(v6);
            for (phase_in, hidden) in [(TO_LOCAL, 1), (0, 0)] {
                let mut leg = control_leg(&f, b, shim);
                leg.flags |= LegFlags::FIN_OUT;
                (leg.phase_in, leg.bound_in, leg.ack_out) = (phase_in, f.up.end, f.up.end - 5000);
                leg.ack_in = f.up.max_ack - 1;
                testing::put_leg(&b.datapath, &f.client, &leg).expect("leg");
                let mut p = f.next(0);
                p.ack = f.up.max_ack; // of our FIN, our last segment
                p.options = option::usual(Some((1, 2)), &[]);
                let o = b.ingress(&p.frame());
                assert_eq!((o.code, &o.verdicts[..]), (NEXT, &["local"][..]), "{v6:?}");
                assert_eq!(verify(&o.frame).expect("checksums").ack, p.ack - hidden - shim[1], "{v6:?} {phase_in}");
            }
        }
    });
}

/// A retransmission by a socket that has missed the last acknowledgement has no valid numbers under a new shim.
fn a_stale_retransmission_becomes_a_keep_alive() {
    bench(64, |b| {
        let shim = [100_000, 3000, 500];
        for v6 in SAME {
            let f = Flow::new(v6);
            control_leg(&f, b, shim);
            let mut p = Packet::new(f.client.local, f.client.remote);
            if v6.client {
                (p.id, p.fragment) = (0, 0);
            }
            (p.seq, p.ack) = (f.up.max_ack - 2000 - shim[1], f.up.end - shim[0]);
            (p.flags, p.payload) = (flag::ACK | flag::PSH, vec![3; 100]);
            let o = b.run(true, &p.frame(), TestContext::default());
            assert_eq!((o.code, &o.verdicts[..]), (NEXT, &["local-out"][..]));
            let out = verify(&o.frame).expect("checksums");
            assert_eq!((out.seq, out.ack, out.flags), (f.up.max_ack - 1, f.up.end, flag::ACK), "{v6:?}");
            assert!(out.payload.is_empty());
        }
    });
}

/// During a drain the other host and our socket both send, and may overtake each other: no segment must look old, and no
/// timestamp echo must tell the socket that its retransmission was spurious.
fn our_clock_stands_still_while_two_speak() {
    bench(64, |b| {
        for (v6, transparent) in SAME.into_iter().flat_map(|v6| [(v6, 0), (v6, TRANSPARENT)]) {
            let f = Flow::new(v6);
            let mut leg = control_leg(&f, b, [0, 0, 0]);
            (leg.phase_out, leg.bound_out, leg.tsval_out) = (TO_FWD, f.up.max_ack, 1000);
            leg.ack_in = f.up.max_ack - 5;
            leg.flags |= LegFlags::TS | transparent;
            testing::put_leg(&b.datapath, &f.client, &leg).expect("leg");
            let says = |tsval, ours| {
                let mut p = Packet::new(f.client.local, f.client.remote);
                if v6.client {
                    (p.id, p.fragment) = (0, 0);
                }
                (p.seq, p.ack, p.options) = (f.up.max_ack, f.up.end, option::usual(Some((tsval, 8)), &[]));
                let o = b.run(true, &p.frame(), TestContext::default());
                p.options = option::usual(Some((ours, 8)), &[]);
                assert_eq!(verify(&o.frame).map(|p| p.options), Ok(p.options), "{v6:?} {tsval}");
            };
            says(1003, 1000);
            says(1009, 1000);
            let mut p = f.next(0);
            p.options = option::usual(Some((7, 1000)), &[]);
            p.ack = f.up.max_ack - 3;
            let want = option::usual(Some((7, 1009)), &[]);
            assert_eq!(verify(&b.ingress(&p.frame()).frame).map(|p| p.options), Ok(want), "{v6:?}");
            if transparent != 0 {
                continue; // its clock is the other host's, and is not to continue from where it stood
            }
            // one of them has stopped: the clock continues from where it stood
            (leg.phase_out, leg.shim_ts) = (0, 3);
            leg.flags |= LegFlags::CLOCK;
            testing::put_leg(&b.datapath, &f.client, &leg).expect("leg");
            says(1030, 1000);
            says(1037, 1007);
        }
    });
}

/// The first data of a host waits for the process, which may have died: its retransmission does not wait.
fn first_data_waits_once() {
    bench(64, |b| {
        for v6 in SAME {
            let f = Flow::new(v6);
            let mut leg = control_leg(&f, b, [0, 0, 0]);
            leg.flags |= LegFlags::WAITS;
            testing::put_leg(&b.datapath, &f.client, &leg).expect("leg");
            let (one, mut two) = (f.next(100), f.next(100));
            two.seq += 100;
            for p in [&one, &two] {
                assert_eq!(b.ingress(&p.frame()).code, DROP, "held: {v6:?}");
            }
            assert_eq!(b.ingress(&f.next(0).frame()).code, NEXT, "an acknowledgement: {v6:?}");
            for p in [&one, &two, &one] {
                assert_eq!(b.ingress(&p.frame()).code, NEXT, "the socket gets it: {v6:?}");
            }
        }
    });
}

/// First data for which there is no room does not wait. If it were dropped, its host would wait for a timeout.
fn first_data_without_room_goes_on() {
    bench(64, |b| {
        for v6 in SAME {
            let f = Flow::new(v6);
            let mut leg = control_leg(&f, b, [0, 0, 0]);
            leg.flags |= LegFlags::WAITS;
            // nobody reads what is held
            let gone_on = (0..100_000).find_map(|_| {
                testing::put_leg(&b.datapath, &f.client, &leg).expect("leg");
                let o = b.ingress(&f.next(1400).frame());
                assert!(
                    o.verdicts.contains(&if o.code == DROP { "held" } else { "hold-overflow" }),
                    "{:?}",
                    o.verdicts
                );
                (o.code != DROP).then_some(o)
            });
            assert_eq!(gone_on.expect("the ring is full").code, NEXT, "the socket gets it: {v6:?}");
            assert_eq!(b.datapath.leg(&f.client).expect("leg").flags & LegFlags::WAITS, 0);
            let mut after = f.next(100);
            after.seq += 1400;
            assert_eq!(b.ingress(&after.frame()).code, NEXT, "what follows does not wait either: {v6:?}");
        }
    });
}

fn spliced_sockets_are_muted() {
    bench(64, |b| {
        for (v6, with_leg) in [(V4, false), (V6, false), (V4, true)] {
            let f = Flow::new(v6);
            if with_leg {
                spliced_legs(&f, b, 0);
            }
            f.install(b, 0);
            for flags in [flag::ACK, flag::ACK | flag::FIN, flag::RST] {
                let mut p = Packet::new(f.client.local, f.client.remote);
                (p.seq, p.ack, p.flags) = (f.up.max_ack, f.up.end, flags);
                let o = b.run(true, &p.frame(), TestContext::default());
                assert_eq!((o.code, &o.verdicts[..]), (MUTE, &["local-muted"][..]), "{v6:?} leg {with_leg} {flags:x}");
            }
        }
        // the kernel's RST of a dead flow passes
        let mut f = Flow::new(V4);
        f.up.dead = true;
        f.install(b, 0);
        let mut p = Packet::new(f.client.local, f.client.remote);
        (p.seq, p.flags) = (f.up.max_ack, flag::RST);
        let o = b.run(true, &p.frame(), TestContext::default());
        assert_eq!((o.code, hex(&o.frame)), (NEXT, hex(&p.frame())));
    });
}

/// Creates the records of both legs of a spliced flow, from whose client `passed` bytes have been forwarded since.
pub(super) fn spliced_legs(f: &Flow, b: &Bench, passed: u32) {
    for (t, other, d, r) in [(&f.client, &f.server, &f.up, &f.down), (&f.server, &f.client, &f.down, &f.up)] {
        let back = if t == &f.client { passed } else { 0 };
        let forth = passed - back;
        let (end, out) = (d.end.wrapping_sub(back), r.end.wrapping_add(r.seq_add).wrapping_sub(forth));
        let leg = abi::leg {
            flags: LegFlags::TRACKED
                | LegFlags::PAIRED
                | LegFlags::SPLICED
                | LegFlags::TRIGGER
                | LegFlags::TS
                | LegFlags::SACK,
            peer: testing::key(other),
            phase_in: FWD,
            phase_out: FWD,
            wscale_in: 7,
            wscale_out: 7,
            iss: out.wrapping_sub(1000),
            max_in: end,
            limit_in: end.wrapping_add(back),
            bound_in: end,
            ack_out: end,
            ack_local: end,
            win_local: 65535,
            win_out: 65535,
            edge_out: end.wrapping_add(65535),
            max_out: out,
            local_out: out,
            bound_out: out,
            ack_in: out,
            edge_in: out.wrapping_add(65535),
            seq_off: d.seq_add,
            ts_from_peer: r.tsval_add,
            ifindex: 1,
            ..Default::default()
        };
        testing::put_leg(&b.datapath, t, &leg).expect("leg");
    }
}

fn trigger_gives_new_data_to_the_socket() {
    bench(64, |b| {
        for v6 in SAME {
            let mut f = Flow::new(v6);
            spliced_legs(&f, b, 1234);
            (f.up.wraps, f.down.wraps) = ((f.up.end >> 16) as u16, (f.down.end >> 16) as u16);
            f.install(b, PathFlags::TRIGGER);
            // old segments do not trigger
            let mut old = f.next(100);
            old.seq -= 100;
            let o = b.ingress(&old.frame());
            assert_eq!((o.code, &o.verdicts[..]), (REDIRECT, &["forwarded"][..]));
            let p = f.next(100);
            let o = b.ingress(&p.frame());
            assert_eq!(o.code, NEXT, "{:?}", o.verdicts);
            let out = verify(&o.frame).expect("checksums");
            assert_eq!((out.from, out.to, out.ttl), (p.from, p.to, p.ttl));
            assert_eq!((out.seq, &out.payload), (p.seq - 1234, &p.payload), "as the socket counts");
            assert_eq!(out.ack, p.ack);
            assert_eq!(b.datapath.path(&f.client).expect("path").flags & PathFlags::SPLICED, 0);
            assert_eq!(b.datapath.path(&f.server).expect("path").flags & PathFlags::SPLICED, 0);
        }
    });
}

/// A spliced flow whose client may send `more` bytes before the limit.
pub(super) fn limited(f: &mut Flow, b: &Bench, more: u32) {
    spliced_legs(f, b, 0);
    let limit = f.up.end.wrapping_add(more);
    let mut leg = testing::get_leg(&b.datapath, &f.client).expect("leg");
    leg.limit_in = limit;
    testing::put_leg(&b.datapath, &f.client, &leg).expect("leg");
    f.up.wraps = (limit >> 16) as u16;
    f.down.wraps = (f.down.end >> 16) as u16;
    f.install(b, PathFlags::TRIGGER);
}

/// A segment that ends at the limit is forwarded, and ends the splice.
/// With one byte more or a FIN, the whole segment goes to the proxy.
fn limits() {
    bench(64, |b| {
        for v6 in SAME {
            for end in [1000, u32::MAX - 500, u32::MAX - 0x1_0000, 0x7fff_ff00] {
                for (more, len, fin, verdict) in [
                    (1000, 1000, false, "forwarded-slow"),
                    (1000, 999, false, "forwarded"),
                    (1000, 1001, false, "local"),
                    (1000, 999, true, "local"),
                    (1000, 0, true, "local"),
                    (0, 1, false, "local"),
                    (0, 0, false, "forwarded"),
                    (1 << 20, 1000, false, "forwarded"),
                    (1 << 30, 1000, false, "forwarded"),
                    (1 << 20, 1000, true, "local"),
                ] {
                    let name = format!("{len} bytes, FIN {fin}, limit {more} after {end}, {v6:?}");
                    let mut f = Flow::new(v6);
                    f.up.end = end;
                    limited(&mut f, b, more);
                    let mut p = f.next(len);
                    if fin {
                        p.flags |= flag::FIN;
                    }
                    let o = b.ingress(&p.frame());
                    let path = b.datapath.path(&f.client).expect("path");
                    let code = if verdict == "local" { NEXT } else { REDIRECT };
                    assert_eq!((o.code, &o.verdicts[..]), (code, &[verdict][..]), "{name}");
                    let legs = b.datapath.look(f.legs()).expect("legs");
                    assert_eq!(legs.end.client, (len + usize::from(fin)) as u64, "{name}");
                    let out = verify(&o.frame).expect("checksums");
                    assert_eq!(out.payload, p.payload, "{name}");
                    match verdict {
                        "forwarded" => {
                            assert_eq!((path.end, path.wraps), (end.wrapping_add(len as u32), f.up.wraps), "{name}");
                            assert_eq!(legs.phase, Pair::both(Phase::Forwarding), "{name}");
                        }
                        // the last byte, so both directions are on their way back
                        "forwarded-slow" => {
                            assert!(legs.phase.iter().all(|phase| *phase != Phase::Forwarding), "{name}: {legs:?}")
                        }
                        _ => {
                            assert_eq!((path.end, path.flags & PathFlags::SPLICED, out.seq), (end, 0, p.seq), "{name}")
                        }
                    }
                }
            }
        }
    });
}

/// Our own marked clone passes.
fn marked_clone() {
    bench(64, |b| {
        let f = Flow::new(V4);
        f.install(b, 0);
        let p = f.next(10);
        let o = b.run(false, &p.frame(), TestContext { mark: 0x6c73_706c, ..TestContext::default() });
        assert_eq!((o.code, hex(&o.frame)), (NEXT, hex(&p.frame())));
    });
}

together!(
    shims,
    a_socket_hears_of_nothing_that_was_lost,
    a_syn_removes_no_transparent_leg,
    what_the_socket_of_an_earlier_connection_says_is_not_passed_on,
    urgent_pointers,
    a_socket_outlives_the_acknowledgement_it_holds_back,
    a_stale_retransmission_becomes_a_keep_alive,
    our_clock_stands_still_while_two_speak,
    first_data_waits_once,
    first_data_without_room_goes_on,
    spliced_sockets_are_muted,
    trigger_gives_new_data_to_the_socket,
    limits,
    marked_clone
);
