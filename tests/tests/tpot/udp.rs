//! Tunnels in UDP, for paths that drop IP in IP. hand.rs has what a proxy must do with the packets of both kinds.

use super::{
    BYTES,
    capture::{Capture, Seen},
    dial, everywhere, exchange,
    hand::{Hand, MSS},
    packets::{CAN_UDP as CAN, Host, NEXT, SYN_ACK, USUAL, WANT_UDP, answers, capable, packet, udp_source, wrap_in},
    passes, serve, switch_often,
};
use longsplice_datapath::{TpotOptions, TpotUdp, tpot_flush, tpot_known};
use longsplice_engine::{FlowState, Policy, Refusal, SpliceWhen, TpotHandshake};
use longsplice_lab::{
    Family, Lab, Namespace, Options, Shape,
    process::wait_for,
    topology::CLIENT,
    traffic::{Script, converse, intact},
};
use longsplice_tests::{
    Forwarder, TestTpot, at_once, by_hand, families,
    packet::{ETHERNET, Packet, flag, verify},
};
use std::net::SocketAddr;
use test_case::test_case;

const WANT: u8 = CAN | WANT_UDP;

fn with(udp: TpotUdp) -> TpotOptions {
    TpotOptions { udp, ..TpotOptions::default() }
}

/// The client's host asks for proxies.
fn asks(lab: &Lab, family: Family, udp: TpotUdp) -> TestTpot {
    let tpot = lab.client.run(|| TestTpot::with(&with(udp)));
    tpot.ask(&everywhere(family)).and_then(|()| tpot.trust(&everywhere(family))).expect("rules");
    tpot
}

fn taker(at: &Namespace, family: Family, policy: Policy, udp: TpotUdp) -> Forwarder {
    Forwarder::taker_with(at, everywhere(family), policy, true, TpotHandshake::Basic, with(udp))
}

fn each_host(udp: TpotUdp, test: impl Fn(Host)) {
    families().into_iter().map(|family| Host::with(family, &with(udp))).for_each(test);
}

/// The capabilities in the SYN that leaves; `None`: it does not ask.
fn offers(h: &Host, seq: u32) -> Option<u8> {
    let (code, _, out) = h.run(true, &Packet { seq, ..h.syn() }.frame());
    assert_eq!(code, NEXT);
    let options = verify(&out).expect("sums").options;
    [0, CAN, WANT].into_iter().find(|bits| options.ends_with(&capable(*bits, 8)))
}

/// The proxy's answer to the SYN with this number, in UDP or not.
fn answer(h: &Host, udp: bool, seq: u32) -> Vec<u8> {
    let options = [USUAL.to_vec(), answers(udp, 7)].concat();
    let p = Packet { options, ack: seq + 1, ..h.answer() };
    wrap_in(udp, &p.frame(), h.proxy, h.client.ip(), 0)
}

#[test]
#[ignore = "root"]
fn when_a_syn_offers_udp() {
    let opened = |h: &Host| ["opened", "opened-udp"].map(|v| h.tpot.verdict(v));
    each_host(TpotUdp::Never, |h| {
        assert_eq!([(); 3].map(|()| offers(&h, 1)), [Some(0), Some(0), None]);
        let frame = answer(&h, true, 1);
        assert_eq!(h.run(false, &frame), (NEXT, 0, frame.clone()), "nobody has offered that");
        h.run(false, &answer(&h, false, 1));
        assert_eq!(opened(&h), [1, 0]);
    });
    each_host(TpotUdp::Always, |h| {
        assert_eq!([(); 3].map(|()| offers(&h, 1)), [Some(WANT), Some(WANT), None]);
        h.run(false, &answer(&h, false, 1)); // of a proxy that does not know it
        assert_eq!(opened(&h), [1, 0]);
    });
    each_host(TpotUdp::Fallback, |h| {
        let known = || h.lab.client.run(|| tpot_known().expect("a table"));
        assert_eq!([(); 3].map(|()| offers(&h, 1)), [Some(CAN), Some(WANT), None]);
        h.run(false, &answer(&h, false, 1)); // that to the first one, late
        assert_eq!((opened(&h), known()), ([1, 0], Vec::new()));
        // the proxy repeats its answer
        assert_eq!(offers(&h, 9), Some(CAN));
        h.run(false, &answer(&h, true, 9));
        assert_eq!(opened(&h), [2, 1]);
        assert_eq!(known().iter().map(|k| (k.address, k.in_udp)).collect::<Vec<_>>(), [(h.server.ip(), true)]);
        assert_eq!(offers(&h, 17), Some(WANT), "at once");
        assert_eq!(h.lab.client.run(|| tpot_flush().expect("a table")), 1);
        assert_eq!((known(), offers(&h, 25)), (Vec::new(), Some(CAN)));
    });
}

/// Which kind a host accepts, and from where. packets.rs has the rest.
#[test]
#[ignore = "root"]
fn a_host_in_a_tunnel_in_udp() {
    each_host(TpotUdp::Always, |h| {
        let us = h.client.ip();
        assert_eq!(offers(&h, 1000), Some(WANT));
        h.run(false, &answer(&h, true, 1000));
        let says = |payload| Packet { seq: 1001, ack: 5001, payload, ..packet(h.client, h.server) };
        let source = |size| udp_source(h.family, &h.run(true, &says(vec![7; size]).frame()).2).expect("UDP");
        assert!([1, 100, 101].map(source).iter().all(|port| *port == source(0)), "one connection has one path");
        let said = Packet { seq: 5001, ack: 1001, payload: vec![8; 99], ..packet(h.server, h.client) };
        // either kind, as the proxy likes
        let (code, _, out) = h.run(false, &wrap_in(false, &said.frame(), h.proxy, us, 0));
        assert_eq!((code, verify(&out)), (NEXT, Ok(said.clone())));
        let right = wrap_in(true, &said.frame(), h.proxy, us, 0);
        let mut other_port = right.clone();
        other_port[ETHERNET + if h.family == Family::V4 { 20 } else { 40 } + 3] ^= 1;
        for frame in [wrap_in(true, &said.frame(), h.server.ip(), us, 0), other_port] {
            assert_eq!(h.run(false, &frame), (NEXT, 0, frame.clone()));
        }
    });
}

/// A proxy answers in the kind that its client wants, and in UDP if an answer was of no use. It goes on in the client's kind.
#[test]
#[ignore = "root"]
fn a_proxy_follows_its_client() {
    // what the two SYNs offer, and the kinds of the answers
    let cases = [([CAN, CAN], [false, true]), ([WANT, 0], [true, false]), ([0, WANT], [false, true])];
    for (family, (n, (offered, want))) in
        families().into_iter().flat_map(|family| (0..).zip(cases).map(move |case| (family, case)))
    {
        let mut h = Hand::with(family, by_hand(), TpotHandshake::Basic, TpotUdp::Fallback);
        let from = SocketAddr::new(h.client.ip(), 4100 + n);
        let answered = |s: &Seen| s.is("f0", true) && s.p.to == from && s.has(SYN_ACK);
        for (bits, udp) in offered.into_iter().zip(want) {
            let before = h.capture.count(answered);
            h.plain(&Packet { from, options: [MSS.to_vec(), capable(bits, 8)].concat(), ..h.syn() });
            let answer = h.capture.wait_nth("an answer", before, answered);
            assert!(answer.udp.is_some() == udp && answer.p.options.ends_with(&answers(udp, 7)), "{answer:?}");
            // room for the headers of either kind: the device's MTU without those of IP and TCP, and the tunnel's
            let mss = u16::from_be_bytes([answer.p.options[2], answer.p.options[3]]);
            assert_eq!(mss, if family == Family::V4 { 1500 - 40 - 28 } else { 1500 - 60 - 48 }, "{answer:?}");
        }
        // the first answer has arrived late
        let (seq, ack) = (h.syn().seq + 1, h.capture.wait("an answer", answered).p.seq + 1);
        h.udp = want[0];
        h.tunnelled(&Packet { from, ..h.says(seq, ack, b"question") });
        let acks = |s: &Seen| s.is("f0", true) && s.p.to == from && s.has(flag::ACK);
        assert_eq!(h.capture.wait("an acknowledgement", acks).udp.is_some(), want[0]);
    }
}

/// Bits of the option that nobody has defined change nothing, and are not answered.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn unknown_capabilities_are_ignored(family: Family) {
    for udp in [TpotUdp::Never, TpotUdp::Fallback] {
        let mut h = Hand::with(family, by_hand(), TpotHandshake::Basic, udp);
        let mut option = capable(!WANT, 8);
        option[6] = 0xff;
        h.udp = false;
        h.open_with(&Packet { options: [MSS.to_vec(), option].concat(), ..h.syn() });
    }
}

/// Runs one connection through a forwarder that intercepts it, and looks at its packets.
fn through(family: Family, policy: Policy, spliced: bool, drive: impl FnOnce(&Forwarder)) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let asker = asks(&lab, family, TpotUdp::Always);
    let f = taker(&lab.forwarder, family, policy, TpotUdp::Fallback);
    let mut capture = Capture::start(&lab.client);
    passes(&lab, family, &f, spliced, drive);
    let seen = ["opened-udp", "plain-refused", "unproven", "failed"].map(|v| asker.verdict(v));
    assert_eq!(seen, [1, 0, 0, 0]);
    let (syn, rest) = capture.seen().split_first().expect("packets");
    assert!(syn.has(flag::SYN) && syn.outer.is_none(), "{syn:?}");
    assert!(rest.iter().all(|s| s.udp.is_some()), "{:?}", rest.iter().find(|s| s.udp.is_none()));
    let longest = |out| rest.iter().filter(|s| s.out == out).map(|s| s.length).max().expect("packets");
    assert!(
        [true, false].map(longest).iter().all(|n| (10_000..=65_535).contains(n)),
        "segmentation is left to devices"
    );
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn connections_in_udp(family: Family) {
    through(family, Policy { when: SpliceWhen::Never, ..Policy::default() }, false, |_| {});
    through(family, at_once(), true, |f| f.wait_state(FlowState::Spliced));
    through(family, by_hand(), true, switch_often);
}

/// Packets as on a wire: each segment fits, with all headers.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn segments_in_udp_fit_the_path(family: Family) {
    for policy in [at_once(), by_hand()] {
        let lab = Lab::new(Shape::TwoDevices, Options { large_packets: false, ..Options::default() }).expect("lab");
        let asker = asks(&lab, family, TpotUdp::Always);
        let f = taker(&lab.forwarder, family, policy, TpotUdp::Fallback);
        let mut capture = Capture::start(&lab.forwarder);
        capture.checked = true;
        exchange(&lab, family, BYTES);
        let longest = capture.seen().iter().filter(|s| s.device == "f0").map(|s| s.length).max();
        assert_eq!((longest, asker.verdict("opened-udp"), asker.verdict("too-big")), (Some(1500), 1, 0));
        drop(f);
    }
}

/// Something drops IP in IP: the proxy's second answer opens the connection in UDP, and for the next connection the first one does.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_path_that_drops_ip_in_ip(family: Family) {
    let lab = Lab::new(Shape::TwoForwarders, Options { forwarding: true, ..Options::default() }).expect("lab");
    let asker = asks(&lab, family, TpotUdp::Fallback);
    let _f = taker(lab.second.as_ref().expect("a second"), family, at_once(), TpotUdp::Fallback);
    let drop = "table inet t { chain c { type filter hook forward priority 0; meta l4proto { 4, 41 } drop; }; }";
    lab.forwarder.execute("nft", &[drop]).expect("a rule");
    for opened in [1, 2] {
        let from = exchange(&lab, family, BYTES);
        assert_ne!(from.ip(), CLIENT.ip(family), "the server sees the proxy");
        assert_eq!(["opened", "opened-udp", "not-asked"].map(|v| asker.verdict(v)), [opened, opened, 0]);
    }
    // one or two SYNs of the first connection, and one of the second one
    assert!((2..=3).contains(&asker.verdict("asked")));
}

/// Two proxies, of which one leg of the first is in UDP and the other one is not: it copies, and says why.
#[test]
#[ignore = "root"]
fn tunnels_of_different_kinds_are_not_spliced() {
    for (family, kinds) in families().into_iter().flat_map(|f| {
        use TpotUdp::{Always, Never};
        [(f, [Always, Always, Never]), (f, [Never, Always, Always]), (f, [Always, Always, Always])]
    }) {
        let lab = Lab::new(Shape::TwoForwarders, Options { forwarding: true, ..Options::default() }).expect("lab");
        let [of_client, of_first, of_second] = kinds;
        let _asker = asks(&lab, family, of_client);
        let first = taker(&lab.forwarder, family, at_once(), of_first);
        let second = taker(lab.second.as_ref().expect("a second"), family, at_once(), of_second);
        exchange(&lab, family, BYTES);
        let (first, second) = (first.ended(1).remove(0), second.ended(1).remove(0));
        let differ = of_client != of_second;
        assert_eq!((first.refusal, first.splices), (differ.then_some(Refusal::Tunnels), (!differ).into()), "{first:?}");
        assert_eq!((second.refusal, second.splices), (None, 1), "{second:?}");
    }
}

/// A host or proxy that starts again without UDP goes on with the connections that are in it.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_tunnel_in_udp_outlives_its_setting(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let before = longsplice_datapath::Tpot::open;
    let open = |udp| lab.client.run(|| before(&with(udp)).expect("TPOT"));
    let asker = open(TpotUdp::Always);
    asker.ask(&everywhere(family)).and_then(|()| asker.trust(&everywhere(family))).expect("rules");
    let f = taker(&lab.forwarder, family, at_once(), TpotUdp::Always);
    let serving = serve(&lab, family, &Script::answerer().bytes(BYTES).pace(2_000_000));
    let script = Script::opener(1).bytes(BYTES).pace(2_000_000);
    let stream = dial(&lab, family, &script);
    let client = std::thread::spawn(move || converse(stream, &script));
    f.wait_state(FlowState::Spliced);
    assert_eq!(asker.close().expect("closed"), 1);
    drop(asker);
    let asker = open(TpotUdp::Never);
    assert!(asker.tunnels().iter().all(|(_, tunnel)| tunnel.in_udp));
    let (client, (_, server)) = (client.join().expect("client"), serving.join().expect("server"));
    intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    f.ended(1);
    wait_for(super::PATIENCE, || (asker.close().expect("closed") == 0).then_some(())).expect("nothing is left");
}
