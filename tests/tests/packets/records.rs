//! When a leg's record is removed, and when it is kept.

use super::{sockets::spliced_legs, *};
use longsplice_datapath::{ExpectError, ExpectedLeg, IdleEntry, IdleWalk};
use std::net::{TcpListener, TcpStream};

fn client(v6: bool, port: u16) -> Tuple {
    let mut t = Flow::new(Pair::both(v6)).client;
    t.remote.set_port(port);
    t
}

fn server(v6: bool, port: u16) -> Tuple {
    let mut t = Flow::new(Pair::both(v6)).server;
    t.local.set_port(port);
    t
}

fn segment([from, to]: [SocketAddr; 2], flags: u8, seq: u32, ack: u32) -> Vec<u8> {
    let mut p = Packet::new(from, to);
    if from.is_ipv6() {
        (p.id, p.fragment) = (0, 0);
    }
    (p.flags, p.seq, p.ack) = (flags, seq, ack);
    p.frame()
}

/// A handshake between a client and a listener of ours, with these initial numbers.
fn shake_hands(b: &Bench, t: &Tuple, [irs, iss]: [u32; 2]) -> Outcome {
    let (to_us, from_us) = ([t.remote, t.local], [t.local, t.remote]);
    assert_eq!(b.ingress(&segment(to_us, flag::SYN, irs, 0)).code, NEXT);
    let answer = segment(from_us, flag::SYN | flag::ACK, iss, irs + 1);
    assert_eq!(b.run(true, &answer, TestContext::default()).code, NEXT);
    b.ingress(&segment(to_us, flag::ACK, irs + 1, iss + 1))
}

/// All entries that are not in forwarding mode.
fn idle(b: &Bench) -> Vec<IdleEntry> {
    let mut walk = IdleWalk::default();
    let mut all: Vec<IdleEntry> = Vec::new();
    while let Some(more) = walk.next(&b.datapath, 7).expect("the tables can be read") {
        assert!(more.len() <= 7, "{}", more.len());
        all.extend(more);
    }
    all
}

#[test]
#[ignore = "root"]
fn a_record_that_is_another_by_now_is_not_swept() {
    bench(64, |b| {
        for v6 in [false, true] {
            let t = client(v6, 40_000);
            b.datapath.listen(t.local).expect("listen");
            shake_hands(b, &t, [100, 200]);
            let [first] = idle(b)[..] else { panic!("one: {:?}", idle(b)) };
            assert!(first.leg == t && first.is_spare());
            for (n, numbers) in [[100, 201], [101, 201], [101, 200]].into_iter().enumerate() {
                shake_hands(b, &t, numbers); // the SYN finds no live socket
                let found = idle(b)[0];
                assert!(!b.datapath.sweep(&first) && !found.is(&first), "{n}");
                let l = testing::get_leg(&b.datapath, &t).expect("it stays");
                assert_eq!([l.max_in.wrapping_sub(l.in64 as u32 + 1), l.iss], numbers);
            }
            let found = idle(b)[0];
            assert!(b.datapath.sweep(&found) && b.datapath.leg(&t).is_none() && b.datapath.path(&t).is_none());
            assert!(idle(b).is_empty());

            // an expected leg differs from an entry without a leg, and vice versa
            testing::put_path(&b.datapath, &t, &abi::path::default(), [0; 4]).expect("path");
            let without = idle(b)[0];
            b.datapath.forget(&t);
            b.datapath.expect(&t, None).expect("room");
            let expected = idle(b)[0];
            assert!(!expected.is(&without) && !expected.is_spare() && !b.datapath.sweep(&without));
            b.datapath.forget(&t);
            testing::put_path(&b.datapath, &t, &abi::path::default(), [0; 4]).expect("path");
            assert!(!b.datapath.sweep(&expected) && !b.datapath.sweep(&without), "another entry");
            let again = idle(b)[0];
            assert!(again.leg == t && b.datapath.sweep(&again));
        }
    });
}

#[test]
#[ignore = "root"]
fn what_is_forwarded_is_neither_found_nor_swept() {
    bench(64, |b| {
        for v6 in SAME {
            let f = Flow::new(v6);
            b.datapath.listen(f.client.local).expect("listen");
            shake_hands(b, &f.client, [100, 200]);
            let found = idle(b)[0];
            f.install(b, 0);
            assert!(idle(b).is_empty(), "{:?}", idle(b));
            assert!(!b.datapath.sweep(&found));
            assert_eq!(b.datapath.give_back(f.legs()), Pair::both(false));
            assert_eq!(b.datapath.paths().len(), 2);
            b.datapath.forget_flow(f.legs().into());
        }
    });
}

/// 32 slots. A client whose server leg finds no slot gives up its own,
/// and is copied. A leg that was part of a switch is needed, and kept.
#[test]
#[ignore = "root"]
fn a_client_without_room_for_its_server_makes_room() {
    bench(16, |b| {
        for v6 in [false, true] {
            let clients: Vec<Tuple> = (0..33).map(|n| client(v6, 40_000 + n)).collect();
            b.datapath.listen(clients[0].local).expect("listen");
            let full = |c: &Tuple| shake_hands(b, c, [100, 200]).verdicts.contains(&"table-full");
            assert!(clients[..32].iter().all(|c| !full(c)) && full(&clients[32]));
            let found_no_room = |n: usize| b.datapath.found_no_room(&clients[n]);
            assert!(found_no_room(32) && !found_no_room(31));
            let expect = |n: usize| b.datapath.expect(&server(v6, 50_000 + n as u16), Some(&clients[n]));
            assert!(matches!(expect(32), Err(ExpectError::Untracked)));
            assert!(matches!(expect(0), Err(ExpectError::Full { given_back: true })));
            assert!(b.datapath.leg(&clients[0]).is_none() && b.datapath.path(&clients[0]).is_none());
            assert!(matches!(expect(0), Err(ExpectError::Untracked)));
            assert!(matches!(expect(1), Ok(ExpectedLeg { mss: Some(_), .. })), "there is room again");
            for (n, needed) in [(2, LegFlags::PAIRED), (3, LegFlags::END_TO_END), (4, LegFlags::RESTORED)] {
                let mut leg = testing::get_leg(&b.datapath, &clients[n]).expect("tracked");
                leg.flags |= needed;
                testing::put_leg(&b.datapath, &clients[n], &leg).expect("leg");
                assert!(matches!(expect(n), Err(ExpectError::Full { given_back: false })));
                assert!(b.datapath.leg(&clients[n]).is_some() && b.datapath.path(&clients[n]).is_some());
            }
            assert_eq!(b.datapath.give_back(Pair::new(&clients[1], &server(v6, 50_001))), Pair::both(true));
            let given_back = b.datapath.give_back(Pair::new(&clients[2], &clients[0]));
            assert_eq!(given_back, Pair::new(false, true), "none is not kept, either");
            assert_eq!(b.datapath.give_back(Pair::new(&clients[3], &clients[4])), Pair::both(false));
            assert_eq!(b.datapath.legs().len(), 30);
            assert!(found_no_room(32) && !full(&clients[32]) && !found_no_room(32), "its next connection has room");
            b.datapath.legs().iter().for_each(|(t, _)| b.datapath.forget(t));
            assert!(b.datapath.paths().is_empty());
        }
    });
}

/// Both FINs of a parked flow have passed, and its client connects again:
/// no part of the old flow is left, since nothing would ever remove it.
fn who_comes_again_after_the_end_leaves_no_record() {
    bench(64, |b| {
        for v6 in FAMILIES {
            let mut f = Flow::new(v6);
            for d in [&mut f.up, &mut f.down] {
                (d.fin, d.fin_acked) = (true, true);
            }
            f.install(b, 0);
            spliced_legs(&f, b, 0);
            let mut syn = f.next(0);
            syn.flags = flag::SYN;
            assert_eq!(b.ingress(&syn.frame()).code, NEXT, "the stack answers it");
            let left = [&f.client, &f.server].map(|t| (b.datapath.path(t).is_some(), b.datapath.leg(t).is_some()));
            assert_eq!(left, [(false, false); 2], "v6 {v6:?}");
        }
    });
}

/// A client's connection is over, or was reset, while the socket and the process still hold what it has sent before: only when
/// the server has that, and the end, may its next connection take the place of the flow.
fn who_comes_again_in_a_drain_waits_until_the_other_host_has_all() {
    const CLOSED: u32 = LegFlags::FIN_IN | LegFlags::FIN_OUT | LegFlags::FIN_ACKED;
    bench(64, |b| {
        for (v6, client) in FAMILIES.into_iter().flat_map(|v6| [(v6, CLOSED), (v6, LegFlags::RESET)]) {
            for (server, is_over) in
                [(0, false), (LegFlags::FIN_IN | LegFlags::FIN_OUT, false), (CLOSED, true), (LegFlags::RESET, true)]
            {
                let f = Flow::new(v6);
                spliced_legs(&f, b, 0);
                for (t, flags) in [(&f.client, client), (&f.server, server)] {
                    testing::put_path(&b.datapath, t, &abi::path::default(), [0; 4]).expect("path");
                    let mut leg = testing::get_leg(&b.datapath, t).expect("leg");
                    leg.flags = leg.flags & !(LegFlags::SPLICED | LegFlags::TRIGGER) | flags;
                    (leg.phase_in, leg.phase_out) = (TO_FWD, TO_FWD);
                    testing::put_leg(&b.datapath, t, &leg).expect("leg");
                }
                let mut syn = f.next(0);
                syn.flags = flag::SYN;
                let o = b.ingress(&syn.frame());
                let left = [&f.client, &f.server].map(|t| (b.datapath.path(t).is_some(), b.datapath.leg(t).is_some()));
                let want = if is_over { (NEXT, [(false, false); 2]) } else { (DROP, [(true, true); 2]) };
                assert_eq!((o.code, left), want, "{v6:?} {client:#x} {server:#x}: {:?}", o.verdicts);
            }
        }
    });
}

/// A client has forgotten its connection, and comes again from its port while the flow is in a drain that cannot end, as when its
/// process has died. It is challenged by what the record knows, and its reset ends the flow (RFC 5961, 4.2).
fn who_comes_again_in_a_drain_is_challenged() {
    bench(64, |b| {
        let mut ports = 43_000..; // answers are limited for each connection
        for (v6, phase) in FAMILIES.into_iter().flat_map(|v6| [TO_FWD, TO_LOCAL].map(|phase| (v6, phase))) {
            let mut f = Flow::new(v6);
            f.client.remote.set_port(ports.next().expect("a port"));
            f.down.out_to = f.client.remote;
            spliced_legs(&f, b, 0);
            for t in [&f.client, &f.server] {
                testing::put_path(&b.datapath, t, &abi::path::default(), [0; 4]).expect("path");
                let mut leg = testing::get_leg(&b.datapath, t).expect("leg");
                leg.flags &= !(LegFlags::SPLICED | LegFlags::TRIGGER);
                (leg.phase_in, leg.phase_out) = (phase, phase);
                testing::put_leg(&b.datapath, t, &leg).expect("leg");
            }
            let known = testing::get_leg(&b.datapath, &f.client).expect("leg");
            let syn =
                Packet { flags: flag::SYN, payload: vec![], seq: known.max_in.wrapping_add(5_000_000), ..f.next(0) };
            let o = b.ingress(&syn.frame());
            assert_eq!(o.verdicts, ["syn", "challenge"], "{v6:?}");
            let p = verify(&o.frame).expect("a packet");
            assert_eq!((p.from, p.to, p.flags, p.ack), (syn.to, syn.from, flag::ACK, known.ack_out), "{v6:?}");
            let room = p.seq.wrapping_sub(known.ack_in.wrapping_sub(1));
            assert!(
                room <= known.edge_in.wrapping_sub(known.ack_in).wrapping_add(1),
                "in the host's window, or just below: {p:?}"
            );
            assert_eq!(b.ingress(&syn.frame()).verdicts, ["syn", "challenge-limited"]);
            // the host waits for the answer to its SYN (RFC 9293, 3.10.7.3)
            let reset = Packet { flags: flag::RST, payload: vec![], seq: p.ack, ack: 0, ..f.next(0) };
            b.ingress(&reset.frame());
            let leg = testing::get_leg(&b.datapath, &f.client).expect("leg");
            assert_ne!(leg.flags & LegFlags::RESET_IN, 0, "{v6:?}");
            [&f.client, &f.server].iter().for_each(|t| b.datapath.forget(*t));
        }
    });
}

/// A late duplicate from the client's last connection from this port, of a faster client than the clock of initial numbers
/// (RFC 9293, 3.4.1), so that all its numbers are in the window. The socket discards it by its timestamp, and the record must not
/// wait for data that never come.
fn what_is_left_of_an_earlier_connection_counts_for_nothing() {
    let now = longsplice_datapath::monotonic().as_nanos() as u64;
    bench(64, |b| {
        for (v6, phase) in FAMILIES.into_iter().flat_map(|v6| [0, TO_FWD, FWD, TO_LOCAL].map(|phase| (v6, phase))) {
            let f = Flow::new(v6);
            spliced_legs(&f, b, 0);
            for t in [&f.client, &f.server] {
                testing::put_path(&b.datapath, t, &abi::path::default(), [0; 4]).expect("path");
                let mut leg = testing::get_leg(&b.datapath, t).expect("leg");
                leg.flags &= !(LegFlags::SPLICED | LegFlags::TRIGGER);
                leg.flags |= LegFlags::TS;
                (leg.phase_in, leg.phase_out) = (phase, phase);
                (leg.tsval_in, leg.floor_in, leg.seen) = (5_000, 5_000, now);
                testing::put_leg(&b.datapath, t, &leg).expect("leg");
            }
            let before = testing::get_leg(&b.datapath, &f.client).expect("leg");
            for (tsval, is_taken) in [(4_999, false), (4_000, false), (5_000, true)] {
                let mut p = f.next(0);
                (p.payload, p.options) = (vec![7; 100], option::usual(Some((tsval, 1)), &[]));
                p.seq = before.max_in.wrapping_add(12_000);
                b.ingress(&p.frame());
                let leg = testing::get_leg(&b.datapath, &f.client).expect("leg");
                assert_eq!(leg.max_in != before.max_in, is_taken, "{v6:?}, phase {phase}, {tsval}");
            }
            [&f.client, &f.server].iter().for_each(|t| b.datapath.forget(*t));
        }
    });
}

/// The handshake of a transparent connection is answered and has sockets, and then its client resets it and comes again: user
/// space gets the RST and the SYN in this order. A SYN that the kernel routes would reach the server first, which would refuse it.
#[test]
#[ignore = "root"]
fn no_syn_overtakes_the_reset_of_an_answered_handshake() {
    bench(64, |b| {
        for at in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(at).expect("listen");
            let server = listener.local_addr().expect("address");
            let socket = TcpStream::connect(server).expect("connect");
            let client = socket.local_addr().expect("address");
            let (to_server, to_client) = ([client, server], [server, client]);
            b.datapath.listen_transparent(server, false).expect("listen");
            let says = |flags, seq| {
                let o = b.ingress(&segment(to_server, flags, seq, 0));
                (o.code, o.verdicts)
            };
            let (heard, routed) = ((DROP, vec!["handshake"]), (NEXT, vec!["passed-by"]));
            assert_eq!(says(flag::SYN, 100), heard, "{at}");
            let answer = segment(to_client, flag::SYN | flag::ACK, 200, 101);
            assert_eq!(b.run(true, &answer, TestContext::default()).code, NEXT);
            assert_eq!(says(flag::SYN, 300), routed, "it may be forged: {at}");
            assert_eq!(says(flag::RST, 102), routed, "so may this: {at}");
            assert_eq!(says(flag::SYN, 300), routed, "{at}");
            assert_eq!(says(flag::RST, 101), heard, "{at}");
            assert_eq!(says(flag::SYN, 300), heard, "{at}");
        }
    });
}

together!(
    who_comes_again_after_the_end_leaves_no_record,
    who_comes_again_in_a_drain_waits_until_the_other_host_has_all,
    who_comes_again_in_a_drain_is_challenged,
    what_is_left_of_an_earlier_connection_counts_for_nothing
);
