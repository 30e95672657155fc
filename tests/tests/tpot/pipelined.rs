//! Connections to servers that are opened on the client's SYN.

use super::{
    PATIENCE, PORT, asker,
    capture::{Capture, Seen},
    dial, everywhere,
    hand::{Hand, ISN, Open, SYN_ACK},
    packets::option,
    wire::pass,
};
use longsplice_datapath::{TpotOptions, tpot_tunnels};
use longsplice_engine::TpotHandshake;
use longsplice_lab::{
    Family, Lab, Options, Shape,
    process::wait_for,
    topology::{CLIENT, SERVER},
    traffic::{Script, connect},
};
use longsplice_tests::{
    Forwarder, at_once, by_hand, families,
    packet::{Packet, flag},
    process::Process,
};
use socket2::SockRef;
use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};
use test_case::test_case;

const EARLY: [TpotHandshake; 2] = [TpotHandshake::Pipelined, TpotHandshake::Confirm];
/// The MSS of the client's SYNs, less the header of the tunnel: of IPv4, and of IPv6.
const MSS_ONWARD: [[u8; 2]; 2] = [1440u16.to_be_bytes(), 1420u16.to_be_bytes()];
const RST_ACK: u8 = flag::RST | flag::ACK;

/// Runs a test for both families, at the same time, since some wait for a time limit.
fn each(handshake: TpotHandshake, test: impl Fn(Hand) + Sync) {
    thread::scope(|s| {
        let run = |family| {
            let test = &test;
            s.spawn(move || {
                let mut h = Hand::new(family, by_hand(), handshake);
                // a SYN that was held goes back into its device with a checksum to be completed
                h.capture.checked = handshake != TpotHandshake::Confirm;
                test(h);
            })
        };
        let all: Vec<_> = families().into_iter().map(run).collect();
        all.into_iter().for_each(|t| t.join().expect("the test of a family"));
    });
}

fn each_early(test: impl Fn(Hand, TpotHandshake) + Sync) {
    EARLY.into_iter().for_each(|handshake| each(handshake, |h| test(h, handshake)));
}

/// From now on, the server's stack does this with SYNs to the port: a verdict of nftables.
fn server_does(lab: &Lab, verdict: &str) {
    let syn = format!("tcp flags & (syn | ack) == syn tcp dport {PORT} {verdict}");
    let table = format!("table inet early {{ chain c {{ type filter hook input priority 0; {syn}; }}; }}");
    lab.server.execute("nft", &[&table]).expect("a rule");
}

/// As before.
fn server_answers(lab: &Lab) {
    lab.server.execute("nft", &["delete table inet early"]).expect("the rule is removed");
}

const SILENT: &str = "drop";
const REFUSES: &str = "reject with tcp reset";

fn onward_syn(s: &Seen) -> bool {
    s.is("f1", true) && s.has(flag::SYN)
}

fn answer(s: &Seen) -> bool {
    s.is("f0", true) && s.has(SYN_ACK)
}

fn server_answer(s: &Seen) -> bool {
    s.is("f1", false) && s.has(SYN_ACK)
}

/// A reset that the server gets of this connection.
fn onward_reset(port: u16) -> impl Fn(&Seen) -> bool {
    move |s| s.is("f1", true) && s.p.flags & flag::RST != 0 && s.p.from.port() == port
}

/// Completes the handshake, and talks.
fn complete(h: &mut Hand, syn: &Packet, iss: u32) -> Open {
    h.tunnelled(&h.says(syn.seq + 1, iss + 1, b""));
    h.tunnelled(&h.says(syn.seq + 1, iss + 1, b"hello"));
    let onward = h.capture.wait("data go to the server", |s| s.is("f1", true) && s.p.payload == b"hello").p;
    // other clients' may wait there too, and some are reset already
    let mut accepted = loop {
        let (accepted, from) = h.listener.accept().expect("accept");
        if from == onward.from {
            break accepted;
        }
    };
    accepted.set_read_timeout(Some(PATIENCE)).expect("an option");
    accepted.read_exact(&mut [0; 5]).expect("read");
    let mut open = Open { seq: syn.seq + 6, ack: iss + 1, accepted };
    h.works(&mut open);
    open
}

/// The connection to the server is open before the client has acknowledged anything.
#[test]
#[ignore = "root"]
fn the_onward_syn_does_not_wait_for_the_client() {
    each_early(|mut h, handshake| {
        let syn = h.syn();
        let iss = h.ask(&syn);
        h.capture.wait("the server's answer", server_answer);
        if handshake == TpotHandshake::Confirm {
            let order = |kind: fn(&Seen) -> bool| h.capture.position(kind).expect("seen");
            let [server, ours] = [server_answer, answer].map(order);
            assert!(server < ours, "{}", h.capture.last());
        }
        assert!(h.f.splicer.flows().is_empty() && h.tunnels().is_empty());
        let mss = MSS_ONWARD[usize::from(!h.client.is_ipv4())];
        let onward = h.capture.wait("the onward SYN", onward_syn);
        assert_eq!(onward.p.options[..4], [2, 4, mss[0], mss[1]], "the server's segments fit the tunnel");
        complete(&mut h, &syn, iss);
        assert_eq!((h.onward(), h.f.splicer.flows().len(), h.tunnels().len()), (1, 1, 1));
    });
}

/// The same with SYN cookies: the kernel knows nothing of the client.
#[test]
#[ignore = "root"]
fn the_onward_syn_is_sent_with_syn_cookies() {
    each_early(|mut h, _| {
        h.lab.forwarder.sysctl("net.ipv4.tcp_syncookies", "2").expect("cookies for all");
        let syn = h.syn();
        let iss = h.ask(&syn);
        h.capture.wait("the server's answer", server_answer);
        complete(&mut h, &syn, iss);
        assert_eq!(h.onward(), 1);
    });
}

/// The first of two proxies asks the second at once, and this one the server.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_chain_of_proxies_passes_the_syn_on_at_once(family: Family) {
    for handshake in EARLY {
        let lab = Lab::new(Shape::TwoForwarders, Options { forwarding: true, ..Options::default() }).expect("lab");
        let asker = asker(&lab, family);
        let second = lab.second.as_ref().expect("a second");
        let _takers = [&lab.forwarder, second].map(|at| {
            Forwarder::taker_with(at, everywhere(family), at_once(), true, handshake, TpotOptions::default())
        });
        let mut capture = Capture::start(second);
        let server = SERVER.port(family, PORT);
        let listener = lab.server.run(|| TcpListener::bind(server)).expect("listen");
        mute(&lab);
        let mut client = dial(&lab, family, &Script::opener(1));
        let (mut accepted, _) =
            listener.accept().expect("the server has a connection before the client's acknowledgement");
        accepted.write_all(b"first").expect("sent");
        unmute(&lab);
        client.set_read_timeout(Some(PATIENCE)).expect("an option");
        client.write_all(b"x").expect("sent");
        let mut got = [0; 5];
        client.read_exact(&mut got).expect("read");
        assert_eq!((&got, asker.verdict("opened")), (b"first", 1));
        let syns = capture.count(|s| s.out && s.has(flag::SYN) && s.p.to == server);
        assert_eq!(syns, 1, "{}", capture.last());
    }
}

/// The client's data wait for the server.
#[test]
#[ignore = "root"]
fn both_handshakes_are_independent() {
    each(TpotHandshake::Pipelined, |mut h| {
        let syn = h.syn();
        server_does(&h.lab, SILENT);
        let iss = h.ask(&syn);
        h.capture.wait("the onward SYN", onward_syn);
        let data = h.says(ISN + 1, iss + 1, b"early data");
        h.tunnelled(&data);
        h.capture.wait("it is acknowledged", |s| s.is("f0", true) && s.p.ack == ISN + 11);
        server_answers(&h.lab);
        let (mut accepted, _) = h.listener.accept().expect("accept");
        accepted.set_read_timeout(Some(PATIENCE)).expect("an option");
        let mut got = [0; 10];
        accepted.read_exact(&mut got).expect("read");
        assert_eq!(&got, b"early data");
        h.works(&mut Open { seq: ISN + 11, ack: iss + 1, accepted });
    });
}

/// A client whose server refuses is reset after its handshake.
#[test]
#[ignore = "root"]
fn a_refusal_resets_the_client() {
    each(TpotHandshake::Pipelined, |mut h| {
        let syn = h.syn();
        server_does(&h.lab, REFUSES);
        let iss = h.ask(&syn);
        h.capture.wait("the refusal", |s| s.is("f1", false) && s.has(RST_ACK));
        h.tunnelled(&h.says(ISN + 1, iss + 1, b""));
        let reset = h.capture.wait("a reset", |s| s.is("f0", true) && s.p.flags & flag::RST != 0 && s.outer.is_some());
        assert_eq!((reset.p.from, reset.p.to, reset.p.seq), (h.server, h.client, iss + 1));
        assert_eq!(h.onward(), 1);
        let [(_, tunnel)] = h.tunnels()[..] else { panic!("{:?}", h.tunnels()) };
        assert!(tunnel.over);
        server_answers(&h.lab);
        h.open_with(&Packet { seq: ISN + 100_000, ..syn });
    });
}

/// With `confirm`, it is refused.
#[test]
#[ignore = "root"]
fn a_refusal_is_passed_on() {
    each(TpotHandshake::Confirm, |mut h| {
        let syn = h.syn();
        server_does(&h.lab, REFUSES);
        for n in 0..2 {
            h.plain(&syn); // the same SYN again begins anew
            let refusal = |s: &Seen| s.is("f0", true) && s.p.flags & flag::RST != 0 && s.outer.is_some();
            let reset = h.capture.wait_nth("a reset", n, refusal);
            assert_eq!((reset.p.from, reset.p.to, reset.p.ack), (h.server, h.client, ISN + 1));
            assert!(reset.has(RST_ACK));
            assert_eq!(reset.outer.map(|o| (o.0, o.1)), Some((h.taker, h.client.ip())));
        }
        assert_eq!((h.capture.count(answer), h.onward(), h.tunnels().len()), (0, 2, 0));
        server_answers(&h.lab);
        h.open();
    });
}

/// A program sees what it would see without proxies.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_program_is_refused(family: Family) {
    for proxies in [1, 2] {
        let lab = Lab::new(Shape::TwoForwarders, Options { forwarding: true, ..Options::default() }).expect("lab");
        let asker = asker(&lab, family);
        let places = [&lab.forwarder, lab.second.as_ref().expect("a second")];
        let taker = |at| {
            Forwarder::taker_with(
                at,
                everywhere(family),
                at_once(),
                true,
                TpotHandshake::Confirm,
                TpotOptions::default(),
            )
        };
        let _takers: Vec<_> = places.into_iter().take(proxies).map(taker).collect();
        let server = SERVER.port(family, PORT);
        let refused = lab.client.run(|| connect(server, &Script::opener(1))).expect_err("nobody listens");
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        assert_eq!(asker.verdict("opened"), 0);
    }
}

/// With `confirm`, a client gets no answer as long as its server gives none, however often it asks.
#[test]
#[ignore = "root"]
fn a_server_that_is_silent_for_a_while() {
    each(TpotHandshake::Confirm, |mut h| {
        let syn = h.syn();
        server_does(&h.lab, SILENT);
        for _ in 0..3 {
            h.plain(&syn);
        }
        h.capture.wait("the onward SYN", onward_syn);
        h.fence();
        assert_eq!(h.capture.count(answer), 0);
        server_answers(&h.lab);
        let iss = h.capture.wait("the answer", answer).p.seq;
        complete(&mut h, &syn, iss);
        let first = h.capture.wait("the onward SYN", onward_syn).p;
        assert_eq!(h.capture.count(|s| onward_syn(s) && s.p.from != first.from), 0, "{}", h.capture.last());
    });
}

/// SYNs that are sent again, before and after the answer.
#[test]
#[ignore = "root"]
fn a_repeated_syn_makes_no_second_onward_connection() {
    each_early(|mut h, _| {
        let syn = h.syn();
        let iss = h.ask(&syn);
        assert_eq!([(); 2].map(|()| h.ask(&syn)), [iss; 2]);
        let mut open = complete(&mut h, &syn, iss);
        h.plain(&syn);
        h.works(&mut open);
        h.fence();
        assert_eq!((h.onward(), h.f.splicer.flows().len()), (1, 1));
    });
}

/// A client that does not complete its handshake for long: the server is reset.
#[test]
#[ignore = "root"]
fn a_client_that_goes_away() {
    each_early(|mut h, _| {
        let syn = h.syn();
        let iss = h.ask(&syn);
        let onward = h.capture.wait("the server's answer", server_answer);
        h.capture.wait("the server is reset", onward_reset(onward.p.to.port()));
        let datapath = h.f.splicer.datapath().expect("kernel path");
        wait_for(PATIENCE, || datapath.legs().is_empty().then_some(())).expect("no record is left");
        // it comes back, and gets another connection
        complete(&mut h, &syn, iss);
        assert_eq!(h.onward(), 2);
    });
}

/// A client that has another answer resets us. Its server is reset then, before one that has waited for longer.
#[test]
#[ignore = "root"]
fn a_client_that_has_another_answer() {
    each_early(|mut h, _| {
        let onward = |h: &mut Hand, n| h.capture.wait_nth("the server's answer", n, server_answer).p.to.port();
        let other = Packet { from: SocketAddr::new(h.client.ip(), 4001), ..h.syn() };
        h.plain(&other);
        let waits = onward(&mut h, 0);
        h.ask(&h.syn());
        let goes = onward(&mut h, 1);
        h.tunnelled(&Packet { flags: flag::RST, ..h.says(ISN + 1, 0, b"") });
        h.capture.wait("the server is reset", onward_reset(goes));
        assert_eq!(h.capture.count(onward_reset(waits)), 0, "{}", h.capture.last());
        // and so it is if the client does not ask any more
        let bare = Packet { options: super::hand::MSS.to_vec(), ..other };
        h.plain(&bare);
        h.capture.wait("the server is reset", onward_reset(waits));
    });
}

/// More clients than there is room for: the oldest ones make room, and new ones find it.
#[test]
#[ignore = "root"]
fn a_flood_of_syns_leaves_a_bounded_number_of_connections() {
    each_early(|mut h, _| {
        let syn = h.syn();
        let of = |port| Packet { from: SocketAddr::new(syn.from.ip(), port), options: option(8), ..syn.clone() };
        h.plain(&of(5000));
        let first = h.capture.wait("the server's answer", server_answer).p.to.port();
        for n in 1..=1100 {
            h.plain(&of(5000 + n));
            if n % 50 == 0 {
                h.capture.wait_nth("an onward SYN", usize::from(n), onward_syn);
                h.listener.set_nonblocking(true).expect("an option");
                while h.listener.accept().is_ok() {} // there must be room for the next ones
                h.listener.set_nonblocking(false).expect("an option");
            }
        }
        h.capture.wait("the oldest one is reset", onward_reset(first));
        h.plain(&syn);
        let iss = h.capture.wait("an answer to it", |s| answer(s) && s.p.to == syn.from).p.seq;
        complete(&mut h, &syn, iss);
        assert_eq!(h.f.splicer.flows().len(), 1);
    });
}

/// The proxy stops: what waits for its client is reset.
#[test]
#[ignore = "root"]
fn a_proxy_that_stops() {
    each_early(|mut h, _| {
        h.ask(&h.syn());
        let onward = h.capture.wait("the server's answer", server_answer);
        let Hand { f, mut capture, lab, .. } = h;
        drop(f);
        capture.wait("the server is reset", onward_reset(onward.p.to.port()));
        drop(lab);
    });
}

/// The client's acknowledgements do not reach the proxy, so its connection is an early one.
fn mute(lab: &Lab) {
    let acks = format!("tcp flags & (syn | ack) == ack tcp dport {PORT} drop");
    let table = format!("table inet mute {{ chain c {{ type filter hook output priority 0; {acks}; }}; }}");
    lab.client.execute("nft", &[&table]).expect("a rule");
}

fn unmute(lab: &Lab) {
    lab.client.execute("nft", &["delete table inet mute"]).expect("the rule is removed");
}

/// The proxy is killed between its two handshakes: the server and the client hear of it, and nothing is left.
fn killed(family: Family, handshake: TpotHandshake, client_first: bool) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let asker = asker(&lab, family);
    let at = SERVER.port(family, PORT);
    let start = || Process::taker_with(&lab.forwarder, at, "by-hand", handshake);
    let process = start();
    let listener = lab.server.run(|| TcpListener::bind(at)).expect("listen");
    mute(&lab);
    let mut client = dial(&lab, family, &Script::opener(1));
    let (accepted, _) = listener.accept().expect("the server has a connection before the client's acknowledgement");
    process.kill();
    let ended = |mut stream: &TcpStream| {
        stream.set_read_timeout(Some(PATIENCE)).expect("an option");
        match stream.read(&mut [0]) {
            Ok(n) => n == 0,
            Err(e) => e.kind() == ErrorKind::ConnectionReset,
        }
    };
    assert!(ended(&accepted), "the server hears of it");
    reset(accepted);
    let mut says = || {
        unmute(&lab);
        client.write_all(b"x").expect("sent");
    };
    if client_first {
        says();
    }
    let mut process = start();
    if !client_first {
        says();
    }
    assert!(ended(&client), "the client hears of it");
    let client = dial(&lab, family, &Script::opener(1));
    let (accepted, _) = listener.accept().expect("accept");
    pass(&client, &accepted);
    pass(&accepted, &client);
    reset(client);
    // a record is removed ten seconds after its last segment
    wait_for(3 * PATIENCE, || (process.ask("ls").is_empty() && process.ask("legs").is_empty()).then_some(()))
        .unwrap_or_else(|| panic!("something is left: {:?} {:?}", process.ask("ls"), process.ask("legs")));
    let tunnels = lab.forwarder.run(tpot_tunnels).expect("a table");
    assert!(tunnels.iter().all(|(_, tunnel)| tunnel.over), "{tunnels:?}");
    assert_eq!(asker.verdict("opened"), 2);
    listener.set_nonblocking(true).expect("an option");
    assert!(listener.accept().is_err_and(|e| e.kind() == ErrorKind::WouldBlock), "no other connection");
    process.end();
}

/// Closes a connection without TIME-WAIT.
fn reset(stream: TcpStream) {
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).expect("an option");
}

#[test]
#[ignore = "root"]
fn a_proxy_that_is_killed() {
    thread::scope(|s| {
        let run = |family| {
            s.spawn(move || {
                // the client's next segment arrives before the next process starts, or later
                killed(family, TpotHandshake::Pipelined, true);
                killed(family, TpotHandshake::Pipelined, false);
                killed(family, TpotHandshake::Confirm, false);
            })
        };
        let all: Vec<_> = families().into_iter().map(run).collect();
        all.into_iter().for_each(|t| t.join().expect("the test of a family"));
    });
}

/// It is killed while it holds a client's SYN, whose server is silent: the client has one connection in the end.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_proxy_that_is_killed_while_it_holds_a_syn(family: Family) {
    // while there is no process, SYNs are routed
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).expect("lab");
    let _asker = asker(&lab, family);
    let at = SERVER.port(family, PORT);
    let start = || Process::taker_with(&lab.forwarder, at, "by-hand", TpotHandshake::Confirm);
    let process = start();
    let listener = lab.server.run(|| TcpListener::bind(at)).expect("listen");
    let mut capture = Capture::start(&lab.forwarder);
    server_does(&lab, SILENT);
    thread::scope(|s| {
        let client = s.spawn(|| dial(&lab, family, &Script::opener(1)));
        capture.wait("the onward SYN", onward_syn);
        process.kill();
        let process = start();
        server_answers(&lab);
        let (client, (accepted, _)) = (client.join().expect("connected"), listener.accept().expect("accept"));
        pass(&client, &accepted);
        pass(&accepted, &client);
        process.end();
    });
    listener.set_nonblocking(true).expect("an option");
    assert!(listener.accept().is_err_and(|e| e.kind() == ErrorKind::WouldBlock), "no other connection");
}

/// The proxy is in TIME-WAIT, and the client uses its port again: each connection has its own one to the server.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_port_is_used_again(family: Family) {
    const CONNECTIONS: u64 = 3;
    for handshake in EARLY {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        let asker = asker(&lab, family);
        let f = Forwarder::taker_with(
            &lab.forwarder,
            everywhere(family),
            by_hand(),
            false,
            handshake,
            TpotOptions::default(),
        );
        let server = SERVER.port(family, PORT);
        let listener = lab.server.run(|| TcpListener::bind(server)).expect("listen");
        let mut script = Script::opener(1);
        script.local = Some(CLIENT.port(family, 4000));
        for n in 1..=CONNECTIONS {
            let client = lab.client.run(|| connect(server, &script)).expect("connected");
            let (accepted, _) = listener.accept().expect("accept");
            super::again::serve_and_close(client, accepted);
            f.ended(n as usize);
            thread::sleep(super::again::TICK);
        }
        assert_eq!(["opened", "asked", "not-asked"].map(|v| asker.verdict(v)), [CONNECTIONS, CONNECTIONS, 0]);
        listener.set_nonblocking(true).expect("an option");
        assert!(listener.accept().is_err_and(|e| e.kind() == ErrorKind::WouldBlock), "no other connection");
    }
}
