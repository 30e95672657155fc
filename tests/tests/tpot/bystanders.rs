//! What a forged SYN, FIN or RST can do to connections that it does not belong to: those that are routed past the proxy, those of
//! hosts that ask, and those that are spliced and released.

use super::{
    capture::Seen,
    hand::{FIN_ACK, Hand, ISN, MSS, Open, each},
    packets::{option, packet},
};
use longsplice_engine::{Command, FlowState, TpotHandshake};
use longsplice_lab::{Family, topology::SERVER_SECOND};
use longsplice_tests::{
    by_hand, families,
    packet::{Packet, flag},
};
use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Shutdown, SocketAddr},
};
use test_case::test_case;

/// Sends a packet of the client outside of any tunnel. It is routed to the server whole.
fn is_routed(h: &mut Hand, p: &Packet) {
    let p = p.clone();
    let (from, seq, flags) = (p.from, p.seq, p.flags);
    let same = move |s: &Seen| s.is("f1", true) && (s.p.from, s.p.seq, s.p.flags) == (from, seq, flags);
    let before = h.capture.count(same);
    h.plain(&p);
    let routed = h.capture.wait_nth("it is routed", before, same);
    let want = Packet { ttl: p.ttl - 1, dmac: routed.p.dmac, smac: routed.p.smac, ..p };
    assert_eq!((routed.outer, routed.p), (None, want));
}

/// What the client of a connection that the proxy does not know may send.
fn of_another(h: &Hand) -> Vec<Packet> {
    let says = |seq, flags, payload: &[u8]| Packet { flags, ..h.says(seq, 900_000, payload) };
    vec![
        says(700_000, flag::ACK, b"data"),
        says(700_004, flag::ACK, b""),
        says(700_004, FIN_ACK, b"the last"),
        Packet { ack: 0, ..says(700_100, flag::RST, b"") },
        Packet { seq: 700_200, options: MSS.to_vec(), ..h.syn() },
        // the client refuses the server's answer, and asks no more: ours may be on its way
        says(ISN + 1, flag::RST | flag::ACK, b""),
        Packet { options: MSS.to_vec(), ..h.syn() },
    ]
}

/// A connection is routed past the proxy: its host does not ask, or it is older than the proxy. Whoever knows its addresses and
/// ports sends a SYN that asks. The handshake that follows goes on, too, since none of its packets is proven.
#[test]
#[ignore = "root"]
fn a_forged_syn_takes_nothing_from_a_routed_connection() {
    each(|mut h| {
        let iss = h.ask(&h.syn());
        for p in of_another(&h) {
            is_routed(&mut h, &p);
        }
        assert_eq!(h.f.splicer.flows().len(), 0);
        h.tunnelled(&h.says(ISN + 1, iss + 1, b""));
        let (accepted, _) = h.listener.accept().expect("accept");
        h.works(&mut Open { seq: ISN + 1, ack: iss + 1, accepted });
    });
    for family in families() {
        let mut h = Hand::new(family, by_hand(), TpotHandshake::Confirm);
        h.capture.checked = false; // that of a SYN which comes from user space is completed later
        h.ask(&h.syn());
        for p in of_another(&h) {
            is_routed(&mut h, &p);
        }
    }
}

/// The client has two answers to its SYN, and refuses the server's. That passes the connection with the proxy, unless the client
/// is known to send outside of its tunnel.
#[test]
#[ignore = "root"]
fn a_reset_for_the_server_takes_nothing_from_an_open_connection() {
    each(|mut h| {
        let mut open = h.open();
        // its SYN without the option was overtaken by what came in the tunnel
        h.plain(&Packet { options: MSS.to_vec(), ..h.syn() });
        let refuses = Packet { flags: flag::RST | flag::ACK, ..h.says(open.seq, 900_000, b"") };
        is_routed(&mut h, &refuses);
        h.works(&mut open);
        h.exchange(&mut open, true);
        h.plain(&Packet { seq: open.seq, ..refuses });
        let end = open.accepted.read(&mut [0]).expect_err("a reset");
        assert_eq!(end.kind(), ErrorKind::ConnectionReset);
    });
}

/// The same when a flood of other SYNs has taken the place of the forged one in the table of half-open connections. Its socket is
/// still there.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_flood_does_not_make_the_proxy_forget_what_it_must_pass_by(family: Family) {
    const SYNS: u32 = 200_000; // three times as many as the table holds
    let mut h = Hand::new(family, by_hand(), TpotHandshake::Basic);
    h.ask(&h.syn());
    let options = [MSS.to_vec(), option(8)].concat();
    // from nobody, so that no answer is answered; from addresses and ports of which each is used once
    let from = |n: u32| {
        let address = match SERVER_SECOND.ip(family) {
            IpAddr::V4(first) => IpAddr::from((u32::from(first) + n / 60_000).to_be_bytes()),
            IpAddr::V6(first) => IpAddr::from((u128::from(first) + u128::from(n / 60_000)).to_be_bytes()),
        };
        SocketAddr::new(address, 1 + (n % 60_000) as u16)
    };
    for n in 0..SYNS {
        h.plain(&Packet { seq: n, flags: flag::SYN, options: options.clone(), ..packet(from(n), h.server) });
    }
    for p in of_another(&h) {
        is_routed(&mut h, &p);
    }
}

/// A forged SYN comes before that of a host which asks, from the same port. The half-open connection challenges that host, whose
/// answer ends it.
#[test]
#[ignore = "root"]
fn a_forged_syn_does_not_keep_a_port_from_asking() {
    each(|mut h| {
        const FORGED: u32 = 77_000_000;
        h.ask(&Packet { seq: FORGED, ..h.syn() });
        h.plain(&h.syn());
        let is = |s: &Seen| s.is("f0", true) && s.has(flag::ACK) && s.p.ack == FORGED + 1;
        let challenge = h.capture.wait("a challenge", is);
        let rst = |seq| Packet { flags: flag::RST, ack: 0, ..h.says(seq, 0, b"") };
        let [wrong, right] = [rst(FORGED + 2), rst(challenge.p.ack)];
        h.plain(&wrong);
        h.plain(&right);
        let mut open = h.open();
        h.works(&mut open);
        assert_eq!(h.tunnels().len(), 1);
    });
}

/// The listener does not get SYNs, because a rule of the firewall drops them. The second one goes to the server, with its option:
/// a host that asks has its connection, and nothing to avoid.
#[test]
#[ignore = "root"]
fn what_the_firewall_keeps_from_the_listener_is_routed() {
    each(|mut h| {
        let rule = format!("tcp dport {} drop", h.server.port());
        let table = format!("table inet t {{ chain c {{ type filter hook input priority 0; {rule}; }}; }}");
        h.lab.forwarder.execute("nft", &[&table]).expect("a rule");
        h.plain(&h.syn());
        h.fence();
        assert_eq!(h.onward(), 0);
        for _ in 0..2 {
            let syn = h.syn();
            is_routed(&mut h, &syn);
        }
        let data = h.says(ISN + 1, 5, b"data");
        is_routed(&mut h, &data);
        h.lab.forwarder.execute("nft", &["delete table inet t"]).expect("done");
        let next = Packet { seq: 70_000, ..h.syn() };
        h.open_with(&next);
    });
}

/// Waits for the challenge to a SYN without the option, which is outside of the tunnel.
fn challenge(h: &mut Hand, n: usize) -> Packet {
    let to = h.client;
    let is = move |s: &Seen| s.is("f0", true) && s.outer.is_none() && s.has(flag::ACK) && s.p.to == to;
    h.capture.wait_nth("a challenge outside of the tunnel", n, is).p
}

/// A host has crashed, and its next connection from the same port does not ask: it hears of the old one, and ends it.
#[test]
#[ignore = "root"]
fn a_host_that_has_lost_its_agent_can_connect_again() {
    let states = [
        (None, FlowState::Copying),
        (Some(Command::Splice), FlowState::Spliced),
        (Some(Command::Release), FlowState::Released),
    ];
    for last in 0..states.len() {
        each(|mut h| {
            let mut open = h.open();
            for (command, state) in &states[..=last] {
                command.iter().for_each(|command| h.f.command(*command));
                h.f.wait_state(*state);
            }
            let bare = Packet { seq: 500, options: MSS.to_vec(), ..h.syn() };
            h.plain(&bare);
            let challenge = challenge(&mut h, 0);
            assert_eq!((challenge.from, challenge.ack, challenge.payload.len()), (h.server, open.seq, 0));
            h.works(&mut open); // had the SYN been forged
            let rst = Packet { flags: flag::RST, ack: 0, ..h.says(open.seq, 0, b"") };
            h.plain(&Packet { seq: open.seq.wrapping_add(1 << 30), ..rst.clone() });
            h.works(&mut open);
            h.plain(&Packet { seq: open.seq, ..rst });
            let end = open.accepted.read(&mut [0]).expect_err("the old connection is reset");
            assert_eq!(end.kind(), ErrorKind::ConnectionReset);
            h.f.ended(1);
            is_routed(&mut h, &bare);
        });
    }
}

/// A FIN and a SYN in the client's name, with any numbers, at a connection without sockets whose server has closed its side.
#[test]
#[ignore = "root"]
fn forged_ends_do_not_end_a_released_connection() {
    each(|mut h| {
        h.capture.checked = false; // those of what the machine sends to itself are completed by nobody
        let mut open = h.open();
        for (command, state) in [(Command::Splice, FlowState::Spliced), (Command::Release, FlowState::Released)] {
            h.f.command(command);
            h.f.wait_state(state);
        }
        let forged = |h: &Hand, seq: u32| {
            let fin = Packet { flags: FIN_ACK, ..h.says(seq, seq ^ 0x5555, b"") };
            let rst = Packet { flags: flag::RST, ack: 0, ..h.says(seq, 0, b"") };
            let bare = Packet { seq, options: MSS.to_vec(), ..h.syn() };
            [fin.clone(), bare.clone(), rst.clone(), Packet { seq: !seq, ..h.syn() }, fin, rst, bare]
        };
        open.accepted.shutdown(Shutdown::Write).expect("closed");
        let fin = h.capture.wait("the server's FIN", |s| s.is("f0", true) && s.p.flags & flag::FIN != 0);
        assert_eq!((fin.p.seq, fin.outer.is_some()), (open.ack, true));
        for is_acked in [false, true] {
            for distance in [1 << 30, 1 << 31, 3 << 30] {
                for p in forged(&h, open.seq.wrapping_add(distance)) {
                    h.plain(&p);
                    h.tunnelled(&p);
                }
            }
            if is_acked {
                open.ack += 1;
            }
            h.tunnelled(&h.says(open.seq, open.ack, b"upload"));
            open.seq += 6;
            let mut got = [0; 6];
            let read = open.accepted.read_exact(&mut got);
            read.unwrap_or_else(|e| panic!("{e}: {} {:?}", h.capture.last(), h.f.verdicts()));
            assert_eq!((&got, h.tunnels().len(), h.onward()), (b"upload", 1, 1));
        }
        // the genuine end, after which a SYN of any kind begins another connection
        h.tunnelled(&Packet { flags: FIN_ACK, ..h.says(open.seq, open.ack, b"") });
        assert_eq!(open.accepted.read(&mut [0]).expect("the end"), 0);
        let last = open.seq + 1;
        h.capture.wait("the last acknowledgement", |s| s.is("f0", true) && s.p.ack == last && s.outer.is_some());
        h.f.ended(1);
        assert!(h.tunnels()[0].1.proven, "{:?}", h.tunnels());
        let next = Packet { seq: 9_000_000, options: MSS.to_vec(), ..h.syn() };
        is_routed(&mut h, &next);
        assert!(h.tunnels().is_empty());
    });
}

/// The same at a connection that is copied: the socket decides.
#[test]
#[ignore = "root"]
fn data_in_a_tunnel_is_not_disturbed_by_challenges() {
    each(|mut h| {
        let mut open = h.open();
        for n in 0..3 {
            h.plain(&Packet { seq: n, options: MSS.to_vec(), ..h.syn() });
            challenge(&mut h, n as usize);
            open.accepted.write_all(b"").expect("open");
            h.works(&mut open);
        }
        assert_eq!((h.onward(), h.tunnels().len()), (1, 1));
    });
}
