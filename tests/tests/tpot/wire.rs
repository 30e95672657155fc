//! Whole connections, and each of their packets on the wire.

use super::{
    PATIENCE, PORT, asker,
    capture::{Capture, Seen},
    dial, everywhere, exchange,
    packets::option,
    serve,
};
use longsplice_datapath::Destinations;
use longsplice_engine::{Command, FlowState};
use longsplice_lab::{
    Family, Lab, Options, Shape,
    process::wait_for,
    topology::{
        CLIENT, FORWARDER_TO_CLIENT, FORWARDER_TO_SECOND, FORWARDER_TO_SERVER, FORWARDER_TO_SERVER_SECOND,
        SECOND_TO_FORWARDER, SERVER, SERVER_SECOND,
    },
    traffic::{Script, converse, intact},
};
use longsplice_tests::{Forwarder, at_once, by_hand, packet::flag};
use nix::sys::socket::{setsockopt, sockopt::TcpRepair};
use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
};
use test_case::test_case;

const SYN_ACK: u8 = flag::SYN | flag::ACK;

/// The hops in the option of a packet; `None`: there is no option.
fn hops(s: &Seen) -> Option<u8> {
    (0..=8).find(|n| s.p.options.windows(8).any(|w| w == option(*n)))
}

/// The packets of a leg between an asker and a taker: first a SYN that asks, and then everything in the tunnel.
fn is_tunnelled_leg(all: &[Seen], from: SocketAddr, to: SocketAddr, [own, peer]: [IpAddr; 2], asked: u8) {
    let (syn, rest) = all.split_first().expect("packets");
    assert_eq!((syn.p.from, syn.p.to, syn.outer), (from, to, None), "{syn:?}");
    assert!(syn.has(flag::SYN) && syn.p.payload.is_empty() && hops(syn) == Some(asked), "{syn:?}");
    let (answer, rest) = rest.split_first().expect("an answer");
    assert!(answer.has(SYN_ACK) && answer.p.ack == syn.p.seq.wrapping_add(1), "{answer:?}");
    assert_eq!((answer.p.from, answer.p.to, hops(answer)), (to, from, Some(asked - 1)), "in the server's name");
    for s in [answer].into_iter().chain(rest) {
        let ends = if s.p.from == from { (own, peer) } else { (peer, own) };
        assert_eq!(s.outer.map(|(from, to, _)| (from, to)), Some(ends), "{s:?}");
        assert_eq!(s.outer.map(|o| o.2), Some(s.p.tos), "{s:?}");
        let header = if own.is_ipv4() { 20 } else { 40 };
        assert!(s.length > 2 * header && s.length <= 65_535, "{s:?}");
    }
    for s in rest {
        assert!(!s.has(flag::SYN) && !s.has(SYN_ACK) && hops(s).is_none(), "{s:?}");
    }
}

/// Sends bytes from one socket to the other, and checks them.
pub fn pass(mut from: &TcpStream, mut to: &TcpStream) {
    let data: Vec<u8> = (0..100_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut got = vec![0; data.len()];
    to.set_read_timeout(Some(PATIENCE)).expect("an option");
    std::thread::scope(|s| {
        s.spawn(|| from.write_all(&data).expect("sent"));
        to.read_exact(&mut got).expect("received");
    });
    assert!(got == data, "what arrives is what was sent");
}

/// A connection through one proxy, which splices it or not: the lab, the proxy, the client's socket, and the server's.
fn one(family: Family, spliced: bool) -> (Lab, super::TestTpot, Forwarder, TcpStream, TcpStream) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let asker = asker(&lab, family);
    let f = Forwarder::taker(&lab.forwarder, everywhere(family), if spliced { at_once() } else { by_hand() }, false);
    let listener = lab.server.run(|| TcpListener::bind(SERVER.port(family, PORT))).expect("listen");
    let client = dial(&lab, family, &Script::opener(1));
    let (accepted, _) = listener.accept().expect("accept");
    f.wait_state(if spliced { FlowState::Spliced } else { FlowState::Copying });
    (lab, asker, f, client, accepted)
}

/// Requirements 7 to 10 and 12, 20 to 22: a connection through one or two proxies that is copied, spliced, released, taken back,
/// and closed.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn every_packet_of_a_connection_has_the_right_headers(family: Family) {
    for proxies in [1, 2] {
        let shape = if proxies == 1 { Shape::TwoDevices } else { Shape::TwoForwarders };
        let lab = Lab::new(shape, Options { forwarding: true, ..Options::default() }).expect("lab");
        let _asker = asker(&lab, family);
        let places = [&lab.forwarder].into_iter().chain(&lab.second);
        let takers: Vec<_> =
            places.clone().map(|at| Forwarder::taker(at, everywhere(family), by_hand(), true)).collect();
        let mut captures: Vec<_> = places.map(Capture::start).collect();
        let server = SERVER.port(family, PORT);
        let listener = lab.server.run(|| TcpListener::bind(server)).expect("listen");
        let client = dial(&lab, family, &Script::opener(1));
        let (accepted, seen_by_server) = listener.accept().expect("accept");
        let own = client.local_addr().expect("bound");
        let talk = || {
            pass(&client, &accepted);
            pass(&accepted, &client);
        };
        talk();
        let sources: Vec<_> = takers.iter().map(|f| f.splicer.flows().remove(0)).collect();
        let [first, last] = [0, proxies - 1];
        assert_eq!((sources[first].client, sources[first].server), (own, server));
        assert_eq!((sources[last].server, &sources[last].target), (server, &server.to_string()));
        for (command, state) in [
            (Command::Splice, FlowState::Spliced),
            (Command::Release, FlowState::Released),
            (Command::Unsplice, FlowState::Copying),
            (Command::Splice, FlowState::Spliced),
        ] {
            for f in &takers {
                f.command(command);
                f.wait_state(state);
            }
            talk();
        }
        drop((client, accepted));
        takers.iter().for_each(|f| drop(f.ended(1)));

        let ip = |a: longsplice_lab::topology::Address| a.ip(family);
        let leg = |c: &mut Capture, device: &str, from| {
            let all: Vec<_> =
                c.seen().iter().filter(|s| s.device == device && s.between(from, server)).cloned().collect();
            assert!(all.iter().any(|s| s.has(flag::FIN | flag::ACK)), "it has ended");
            all
        };
        let all = leg(&mut captures[0], "f0", own);
        is_tunnelled_leg(&all, own, server, [ip(CLIENT), ip(FORWARDER_TO_CLIENT)], 8);
        if proxies == 2 {
            let all = leg(&mut captures[1], "g0", sources[1].client);
            is_tunnelled_leg(&all, sources[1].client, server, [ip(FORWARDER_TO_SECOND), ip(SECOND_TO_FORWARDER)], 7);
        }
        // behind the last one nothing is tunnelled, and it still asks for another one
        let device = ["f1", "g1"][last];
        let all = leg(&mut captures[last], device, seen_by_server);
        let of_proxy = [FORWARDER_TO_SERVER, FORWARDER_TO_SERVER_SECOND].map(ip);
        assert!(of_proxy.contains(&seen_by_server.ip()), "the server sees the last proxy: {seen_by_server}");
        assert!(all.iter().all(|s| s.outer.is_none()));
        assert!(all[0].has(flag::SYN) && hops(&all[0]) == Some(8 - proxies as u8), "{:?}", all[0]);
        assert!(all[1].has(SYN_ACK) && all.iter().skip(1).all(|s| hops(s).is_none()));
        // each proxy connects when its client's handshake is complete
        for c in &mut captures {
            let all = c.seen();
            let complete = all.iter().position(|s| !s.out && s.has(flag::ACK));
            let onward = all.iter().position(|s| s.out && s.has(flag::SYN));
            assert!(complete.is_some() && onward.is_some());
            assert!(complete < onward, "{complete:?} {onward:?}");
        }
    }
}

/// A server that knows translucent proxying is the end of the chain: it answers as any other, without the option.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn the_server_intercepts_nothing_that_is_for_itself(family: Family) {
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).expect("lab");
    let asker = asker(&lab, family);
    let f = Forwarder::taker(&lab.server, everywhere(family), at_once(), true);
    let mut capture = Capture::start(&lab.server);
    assert_eq!(exchange(&lab, family, 100_000).ip(), CLIENT.ip(family));
    assert_eq!(hops(&capture.wait("the SYN", |s| s.has(flag::SYN))), Some(8));
    assert_eq!(hops(&capture.wait("the answer", |s| s.has(SYN_ACK))), None);
    assert!(capture.seen().iter().all(|s| s.outer.is_none()));
    assert_eq!(["asked", "opened"].map(|v| asker.verdict(v)), [1, 0]);
    assert!(f.splicer.flows().is_empty());
}

/// Segments as large as the hosts can make them, in both directions, through a proxy that copies and one that splices.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn large_packets_in_the_tunnel(family: Family) {
    for spliced in [false, true] {
        let (lab, asker, f, client, accepted) = one(family, spliced);
        let mut capture = Capture::start(&lab.client);
        for _ in 0..100 {
            pass(&client, &accepted);
            pass(&accepted, &client);
        }
        let all = capture.seen();
        for out in [false, true] {
            let bytes = |s: &&Seen| s.is("c0", out) && !s.p.payload.is_empty();
            let longest = all.iter().filter(bytes).map(|s| s.length).max().expect("data");
            assert!(longest > 30_000 && longest <= 65_535, "{family:?} {spliced} {out}: {longest}");
            let sum: usize = all.iter().filter(bytes).map(|s| s.p.payload.len()).sum();
            assert!(sum >= 10_000_000, "{sum}");
        }
        assert!(all.iter().all(|s| s.outer.is_some()));
        assert_eq!((f.verdict("forwarded") > 0, asker.verdict("failed")), (spliced, 0));
    }
}

/// The end of a connection is in the tunnel as well: FINs, their acknowledgements, and resets, by sockets and without one.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn ends_and_resets_are_in_the_tunnel(family: Family) {
    for spliced in [false, true] {
        let in_tunnel = |capture: &mut Capture| {
            for s in capture.seen() {
                assert!(s.outer.is_some(), "{family:?} {spliced}: {s:?}");
            }
        };
        let resets = |capture: &mut Capture, accepted: &mut TcpStream, f: &Forwarder| {
            capture.wait("a reset", |s| s.out && s.p.flags & flag::RST != 0);
            in_tunnel(capture);
            accepted.set_read_timeout(Some(PATIENCE)).expect("an option");
            let end = accepted.read(&mut [0; 10]).map_err(|e| e.kind());
            assert_eq!(end, Err(ErrorKind::ConnectionReset));
            f.ended(1);
        };
        // the client closes first, so that its TIME-WAIT acknowledges the server's FIN
        let (lab, asker, f, client, accepted) = one(family, spliced);
        let mut capture = Capture::start(&lab.client);
        drop(client);
        capture.wait("a FIN", |s| s.out && s.has(flag::FIN | flag::ACK));
        drop(accepted);
        let fin = capture.wait("a FIN", |s| !s.out && s.has(flag::FIN | flag::ACK));
        let answers = |s: &Seen| s.out && s.has(flag::ACK) && s.p.ack == fin.p.seq.wrapping_add(1);
        capture.wait("the last acknowledgement", answers);
        in_tunnel(&mut capture);
        f.ended(1);
        assert_eq!(["failed", "plain-refused"].map(|v| asker.verdict(v)), [0; 2]);

        // the socket resets the connection: there is data that it has not read
        let (lab, _asker, f, client, mut accepted) = one(family, spliced);
        let mut capture = Capture::start(&lab.client);
        accepted.write_all(&[1; 100]).expect("sent");
        capture.wait("data", |s| !s.out && s.p.payload.len() == 100);
        wait_for(PATIENCE, || client.peek(&mut [0]).ok().filter(|n| *n > 0)).expect("data");
        drop(client);
        resets(&mut capture, &mut accepted, &f);

        // the socket is gone: the kernel resets what arrives for it
        let (lab, _asker, f, client, mut accepted) = one(family, spliced);
        let mut capture = Capture::start(&lab.client);
        setsockopt(&client, TcpRepair, &1).expect("repair mode: the close is silent");
        drop(client);
        accepted.write_all(&[1; 100]).expect("sent");
        resets(&mut capture, &mut accepted, &f);
    }
}

/// Nobody answers with the option: a proxy that asks for another one serves its clients all the same.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn an_edge_proxy_without_another_one(family: Family) {
    let lab = Lab::new(Shape::TwoForwarders, Options { forwarding: true, ..Options::default() }).expect("lab");
    let (listen, server) = (FORWARDER_TO_CLIENT.port(family, PORT + 1), SERVER.port(family, PORT));
    let edge = Forwarder::start(&lab, listen, server, at_once());
    let tpot = lab.forwarder.run(super::TestTpot::open);
    tpot.ask(&everywhere(family)).and_then(|()| tpot.trust(&everywhere(family))).expect("rules");
    let serving = serve(&lab, family, &Script::answerer().bytes(100_000));
    let script = Script::opener(1).bytes(100_000);
    let stream = lab.client.run(|| longsplice_lab::traffic::connect(listen, &script)).expect("connected");
    let client = converse(stream, &script);
    let (_, served) = serving.join().expect("server");
    intact(&client, &served).unwrap_or_else(|e| panic!("{e}\n{:?}", edge.verdicts()));
    assert!(edge.ended(1)[0].splices > 0);
    assert_eq!(["asked", "opened", "encapsulated"].map(|v| tpot.verdict(v)), [1, 0, 0]);
}

/// A host that lets routers fragment its packets (net.ipv4.ip_no_pmtu_disc), and a narrow link. Nobody reassembles what is in a
/// tunnel, so its packets must not be fragmented either; the host hears of the link, and sends smaller ones.
#[test]
#[ignore = "root"]
fn tunnelled_packets_are_never_fragmented() {
    let family = Family::V4;
    for policy in [at_once(), by_hand()] {
        let lab = Lab::new(Shape::TwoForwarders, Options { forwarding: true, ..Options::default() }).expect("lab");
        lab.forwarder.ip("link set f1 mtu 1400\n").expect("a narrow link");
        for host in [&lab.client, &lab.server] {
            host.sysctl("net.ipv4.ip_no_pmtu_disc", "1").expect("sysctl");
        }
        let asker = asker(&lab, family);
        let second = lab.second.as_ref().expect("a second");
        let f = Forwarder::taker(second, everywhere(family), policy, false);
        let serving = serve(&lab, family, &Script::answerer().bytes(1000));
        let script = Script::opener(1).bytes(2_000_000);
        let client = converse(dial(&lab, family, &script), &script);
        let (_, server) = serving.join().expect("server");
        intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
        assert_eq!(second.counter("Ip", "ReasmReqds"), Some(0), "no fragments of tunnelled packets");
        assert!(asker.verdict("too-big") > 0);
    }
}

/// Only connections to the destinations and ports of a rule ask.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn only_chosen_connections_ask(family: Family) {
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).expect("lab");
    let tpot = lab.client.run(super::TestTpot::open);
    let host = if family == Family::V4 { 32 } else { 128 };
    let rule = |net: IpAddr, prefix, ports| Destinations { net, prefix, ports };
    for to in [
        rule(SERVER.ip(family), host, PORT..=PORT + 1),
        rule(SERVER_SECOND.ip(family), host - 2, PORT + 4..=PORT + 4), // four addresses
        rule(SERVER_SECOND.ip(family), 0, 9..=9),
    ] {
        tpot.ask(&to).expect("a rule");
    }
    let mut capture = Capture::start(&lab.server);
    let both = [(PORT - 1, false), (PORT, true), (PORT + 1, true), (PORT + 2, false), (PORT + 4, false), (9, true)];
    let first = both.map(|(port, asks)| (SERVER.port(family, port), asks));
    let second = [(PORT, false), (PORT + 4, true)].map(|(port, asks)| (SERVER_SECOND.port(family, port), asks));
    for (to, asks) in first.into_iter().chain(second) {
        let _listener = lab.server.run(|| TcpListener::bind(to)).expect("listen");
        let _stream = lab.client.run(|| TcpStream::connect(to)).expect("connected");
        let syn = capture.wait("a SYN", |s| s.has(flag::SYN) && s.p.to == to);
        assert_eq!(hops(&syn).is_some(), asks, "{to}");
    }
    assert_eq!(tpot.verdict("asked"), 4);
}
