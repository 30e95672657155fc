//! Listening sockets whose clients shake hands with the server: from host to host, but with our addresses.
use longsplice_datapath::{LegFlags, Tuple, path_facts};
use longsplice_engine::{Command, EndReason, Ended, FlowState, OpenOptions, Policy, SpliceWhen};
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection, Options, Shape,
    process::wait_for,
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::{Script, connect, converse, intact, listen},
};
use longsplice_tests::{
    Forwarder, at_once, by_hand,
    forge::Nobody,
    handshake::{PATIENCE, Route, spliced_whole},
};
use nix::sys::socket::{setsockopt, sockopt::TcpRepair};
use socket2::{Domain, Socket, Type};
use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};
use test_case::test_case;

const PORT: u16 = 7000;
const SERVER_PORT: u16 = 8000;
const BYTES: u64 = 5_000_000;
/// More than fits into a first flight.
const BYTES_AT_ONCE: u64 = 100_000;

fn listening(family: Family) -> SocketAddr {
    FORWARDER_TO_CLIENT.port(family, PORT)
}

fn server(family: Family) -> SocketAddr {
    SERVER.port(family, SERVER_PORT)
}

fn forwarder(lab: &Lab, family: Family, policy: Policy) -> Forwarder {
    Forwarder::plugged(lab, listening(family), [server(family); 2], policy, OpenOptions::default())
}

fn route(family: Family) -> Route {
    Route { to: listening(family), server: server(family) }
}

fn through(lab: &Lab, family: Family, policy: Policy, drive: impl FnOnce(&Forwarder, [Tuple; 2])) {
    let f = forwarder(lab, family, policy);
    let serving = route(family).serve(lab, &Script::answerer().bytes(BYTES).pace(5_000_000));
    let script = Script::opener(1).bytes(BYTES).pace(5_000_000);
    let (stream, own) = route(family).dial(lab, &script);
    let client = std::thread::spawn(move || converse(stream, &script));
    let legs = wait_for(PATIENCE, || {
        let d = f.splicer.datapath().expect("kernel path");
        let to_server = d.legs().into_iter().find(|(t, _)| t.remote == server(family)).map(|(t, _)| t)?;
        Some([Tuple { remote: own, local: listening(family) }, to_server])
    });
    let legs = legs.expect("a leg towards the server");
    drive(&f, legs);
    let (client, (from, served)) = (client.join().expect("client"), serving.join().expect("server"));
    assert_eq!(from, legs[1].local, "the server sees the forwarder");
    intact(&client, &served).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    let e = f.ended(1).remove(0);
    assert_eq!((&e.how, e.bytes_up, e.bytes_down), (&EndReason::Closed, BYTES, BYTES), "{e:?}");
    assert_eq!((e.client, e.server), (own, server(family)));
    assert_eq!(f.splicer.transparent_counts().left, 0);
    assert!(f.verdict("handshake") >= 3, "{:?}", f.verdicts());
    eprintln!("client {client}\nserver {served}\n{e:?} {:?}", f.verdicts());
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn spliced_from_the_first_byte(family: Family) {
    through(&Lab::simple(Shape::TwoDevices).expect("lab"), family, at_once(), |f, legs| {
        f.wait_state(FlowState::Spliced);
        let d = f.splicer.datapath().expect("kernel path");
        let [a, b] = legs.map(|leg| d.path(&leg).expect("a path entry"));
        assert_eq!((a.end, b.end), (a.sent, b.sent), "the same numbers on both legs");
    });
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn copied(family: Family) {
    let never = Policy { when: SpliceWhen::Never, ..Policy::default() };
    through(&Lab::simple(Shape::TwoDevices).expect("lab"), family, never, |_, _| {});
}

fn back_and_forth(f: &Forwarder, _: [Tuple; 2]) {
    for _ in 0..10 {
        f.wait_state(FlowState::Copying);
        f.command(Command::Splice);
        f.wait_state(FlowState::Spliced);
        f.command(Command::Unsplice);
    }
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn spliced_and_taken_back_again_and_again(family: Family) {
    through(&Lab::simple(Shape::TwoDevices).expect("lab"), family, by_hand(), back_and_forth);
}

/// Lost segments must be retransmitted by the right side: a host or one of our sockets.
#[test]
#[ignore = "root"]
fn spliced_and_taken_back_while_segments_are_lost() {
    for (family, shape) in [(Family::V4, Shape::OneArmed), (Family::V6, Shape::TwoDevices)] {
        let lab = Lab::new(shape, Options { large_packets: false, ..Options::default() }).expect("lab");
        let loss = Impair { drop_every: Some(150), ..Impair::default() };
        let ways =
            [LinkDirection::FromClient, LinkDirection::ToClient, LinkDirection::FromServer, LinkDirection::ToServer];
        let lossy = ways.map(|way| lab.impair(way, loss).expect("impair"));
        through(&lab, family, by_hand(), back_and_forth);
        assert!(lossy.iter().all(|i| i.counters().lost > 0), "{:?}", lossy.map(|i| i.counters()));
    }
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn released_and_taken_back(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let f = forwarder(&lab, family, at_once());
    let listener = lab.server.run(|| TcpListener::bind(server(family))).expect("listen");
    let (mut client, _) = route(family).dial(&lab, &Script::opener(1));
    let (mut server, _) = listener.accept().expect("accept");
    let mut exchange = |text: &[u8]| {
        let mut heard = vec![0; text.len()];
        client.write_all(text).expect("write");
        server.read_exact(&mut heard).expect("read");
        assert_eq!(heard, text);
        server.write_all(text).expect("write");
        client.read_exact(&mut heard).expect("read");
        assert_eq!(heard, text);
    };
    f.wait_state(FlowState::Spliced);
    exchange(b"spliced");
    f.command(Command::Release);
    f.wait_state(FlowState::Released);
    exchange(b"without sockets");
    f.command(Command::Unsplice);
    f.wait_state(FlowState::Copying);
    exchange(b"through new sockets");
}

/// The purpose of it all: a proxy in between would have measured the short leg only.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn both_hosts_measure_the_whole_path(family: Family) {
    const DELAY: Duration = Duration::from_millis(50);
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let f = forwarder(&lab, family, at_once());
    let _far = lab.impair(LinkDirection::FromClient, Impair { delay: DELAY, ..Impair::default() }).expect("impair");
    let listener = lab.server.run(|| listen(server(family), &Script::answerer())).expect("listen");
    let began = Instant::now();
    let (client, _) = route(family).dial(&lab, &Script::opener(1));
    let took = began.elapsed();
    let (server, _) = listener.accept().expect("accept");
    for (host, name) in [(&client, "client"), (&server, "server")] {
        let rtt = path_facts(host).expect("TCP_INFO").min_rtt.expect("measured in the handshake");
        assert!(rtt >= DELAY && rtt < 2 * DELAY, "{family:?}, {name}: {rtt:?}");
    }
    assert!(took < 2 * DELAY, "one round trip: {took:?}");
    f.wait_state(FlowState::Spliced);
    let mut heard = [0; 4];
    for (mut from, mut to) in [(&client, &server), (&server, &client)] {
        from.write_all(b"data").expect("write");
        to.read_exact(&mut heard).expect("read");
    }
    let rtt = path_facts(&server).expect("TCP_INFO").min_rtt.expect("measured");
    assert!(rtt >= DELAY, "{family:?}: nothing nearer has answered the server: {rtt:?}");
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn lost_segments_of_the_handshake_come_again(family: Family) {
    let lab = Lab::new(Shape::TwoDevices, Options { large_packets: false, ..Options::default() }).expect("lab");
    let f = forwarder(&lab, family, at_once());
    let whole = |ended: &Ended, name: &str| spliced_whole(ended, BYTES_AT_ONCE, name);
    route(family).lose_handshake_segments(&lab, &f, BYTES_AT_ONCE, whole);
    assert_eq!(f.splicer.transparent_counts().left, 0);
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn data_right_behind_the_handshake_is_spliced(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let f = forwarder(&lab, family, at_once());
    route(family).splice_from_the_first_byte(&lab, &f);
}

fn nothing_is_left(f: &Forwarder) {
    let nothing = || f.splicer.datapath().expect("kernel path").legs().is_empty().then_some(());
    wait_for(Duration::from_secs(5), nothing).expect("nothing is left behind");
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn who_is_refused_hears_of_it(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let f = forwarder(&lab, family, at_once());
    let began = Instant::now();
    let refused = lab.client.run(|| TcpStream::connect(listening(family)));
    assert_eq!(refused.expect_err("nobody listens").kind(), ErrorKind::ConnectionRefused);
    assert!(began.elapsed() < Duration::from_millis(500), "at once: {:?}", began.elapsed());
    nothing_is_left(&f);
}

/// The server's answer reaches a client that is gone, whose kernel sends a reset.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_server_hears_that_its_client_has_gone(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let f = forwarder(&lab, family, at_once());
    let listener = lab.server.run(|| TcpListener::bind(server(family))).expect("listen");
    listener.set_nonblocking(true).expect("nonblocking");
    let delay = Impair { delay: Duration::from_millis(300), ..Impair::default() };
    let late = lab.impair(LinkDirection::FromServer, delay).expect("impair");
    lab.client.run(|| {
        let to = listening(family);
        let s = Socket::new(Domain::for_address(to), Type::STREAM.nonblocking(), None).expect("socket");
        assert_eq!(s.connect(&to.into()).expect_err("it waits").raw_os_error(), Some(nix::libc::EINPROGRESS));
    });
    wait_for(Duration::from_secs(5), || (f.verdict("handshake") >= 3).then_some(())).expect("SYN, SYN-ACK, RST");
    nothing_is_left(&f);
    assert!(late.counters().delayed >= 1);
    assert_eq!(listener.accept().expect_err("reset before").kind(), ErrorKind::WouldBlock);
}

/// Options of a forwarder with these source ports only.
fn with_ports(ports: std::ops::RangeInclusive<u16>) -> OpenOptions {
    OpenOptions { source_ports: ports, ..OpenOptions::default() }
}

/// The server has an earlier connection from our port, and answers a SYN with its numbers. The client resets that connection.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_server_that_remembers_an_earlier_connection(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let listener = lab.server.run(|| TcpListener::bind(server(family))).expect("listen");
    let source = lab.forwarder.run(|| {
        let probe = TcpStream::connect(server(family)).expect("connected");
        SocketAddr::new(probe.local_addr().expect("bound").ip(), 20_001)
    });
    let _probe = listener.accept().expect("accept");
    let script = Script { local: Some(source), ..Script::opener(1).bytes(1000) };
    let earlier = lab.forwarder.run(|| connect(server(family), &script)).expect("connected");
    let _earlier = listener.accept().expect("accept");
    setsockopt(&earlier, TcpRepair, &1).expect("repair mode"); // so that it is closed silently
    drop(earlier);
    let to = [server(family); 2];
    let f = Forwarder::plugged(&lab, listening(family), to, at_once(), with_ports(20_001..=20_001));
    let script = Script { local: None, ..script };
    let again = lab.client.spawn(move || connect(listening(family), &script).map(|c| converse(c, &script)));
    let answer = Script::answerer().bytes(1000);
    listener.set_nonblocking(true).expect("nonblocking");
    let (server, from) = wait_for(PATIENCE, || listener.accept().ok()).expect("the client connects in the end");
    server.set_nonblocking(false).expect("blocking");
    let server = converse(server, &answer);
    let client = again.join().expect("client").expect("connected");
    intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    assert_eq!((f.ended(1)[0].splices, from), (1, source), "{family:?}");
}

/// Ports of other sockets are passed over. When none is left, the proxy tries, and has none either.
#[test]
#[ignore = "root"]
fn ports_in_use_are_passed_over() {
    let family = Family::V4;
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let to = [server(family); 2];
    let f = Forwarder::plugged(&lab, listening(family), to, at_once(), with_ports(20_001..=20_003));
    let listener = lab.server.run(|| TcpListener::bind(server(family))).expect("listen");
    let _listening = lab.forwarder.run(|| TcpListener::bind(("0.0.0.0", 20_001))).expect("listen");
    let ours =
        lab.forwarder.run(|| TcpStream::connect(server(family))).expect("connected").local_addr().expect("bound");
    let script = Script { local: Some(SocketAddr::new(ours.ip(), 20_002)), ..Script::opener(1) };
    let _connected = lab.forwarder.run(|| connect(server(family), &script)).expect("connected");
    let accept = || listener.accept().expect("accept").1.port();
    assert_eq!([accept(), accept()], [ours.port(), 20_002]);
    let mut client = route(family).dial(&lab, &Script::opener(2)).0;
    assert_eq!(accept(), 20_003, "{:?}", f.splicer.transparent_counts());
    f.wait_state(FlowState::Spliced);
    client.write_all(b"x").expect("write");
    let mut second = route(family).dial(&lab, &Script::opener(3)).0;
    assert_eq!(f.splicer.transparent_counts().left, 1);
    assert_eq!(second.read(&mut [0]).expect_err("reset").kind(), ErrorKind::ConnectionReset);
}

/// The listening socket serves clients of another family, at once.
#[test]
#[ignore = "root"]
fn the_proxy_answers_where_the_families_differ() {
    for (family, other) in [(Family::V4, Family::V6), (Family::V6, Family::V4)] {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        let options = OpenOptions::default();
        let f = Forwarder::plugged(&lab, listening(family), [server(other); 2], at_once(), options);
        let serving = route(other).serve(&lab, &Script::answerer().bytes(BYTES).pace(5_000_000));
        let script = Script::opener(1).bytes(BYTES).pace(5_000_000);
        let began = Instant::now();
        let (stream, _) = route(family).dial(&lab, &script);
        assert!(began.elapsed() < Duration::from_millis(500), "the SYN need not come again: {:?}", began.elapsed());
        let client = converse(stream, &script);
        intact(&client, &serving.join().expect("server").1).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
        let ended = f.ended(1).remove(0);
        assert_eq!((ended.how, ended.splices), (EndReason::Closed, 1), "tracked like any other");
        assert_eq!(f.splicer.transparent_counts().left, 1);
    }
}

/// A server that does not answer, and a client that sends SYN after SYN from new ports: the
/// proxy answers those beyond the limit, and other clients are served all the while.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_flood_of_syns_takes_no_more_than_its_share(family: Family) {
    const HALF_OPEN: usize = 1024;
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let f = forwarder(&lab, family, at_once());
    let silence =
        lab.impair(LinkDirection::ToServer, Impair { drop_every: Some(1), ..Impair::default() }).expect("impair");
    let nobody = Nobody::new(&lab, family);
    (1..=HALF_OPEN as u16 + 300).for_each(|port| nobody.asks(port, listening(family)));
    wait_for(Duration::from_secs(5), || (f.splicer.transparent_counts().left >= 300).then_some(()))
        .unwrap_or_else(|| panic!("{:?}, {:?}", f.splicer.transparent_counts(), f.verdicts()));
    let legs = f.splicer.datapath().expect("kernel path").legs();
    assert!(legs.len() <= HALF_OPEN, "{}", legs.len());
    assert!(legs.iter().all(|(_, l)| l.flags & LegFlags::END_TO_END != 0));
    drop(silence);
    let serving = route(family).serve(&lab, &Script::answerer().bytes(1000));
    let script = Script::opener(1).bytes(1000);
    let client = converse(route(family).dial(&lab, &script).0, &script);
    intact(&client, &serving.join().expect("server").1).expect("another connection is served as ever");
}

/// Only the client completes the handshake, however often the server retransmits.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn nobody_answers_for_a_client_that_is_silent(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let f = forwarder(&lab, family, at_once());
    let listener = lab.server.run(|| listen(server(family), &Script::answerer())).expect("listen");
    listener.set_nonblocking(true).expect("nonblocking");
    Nobody::new(&lab, family).asks(9, listening(family));
    // SYN, SYN-ACK, and the SYN-ACK again after one second and after two more
    wait_for(PATIENCE, || (f.verdict("handshake") >= 4).then_some(())).expect("they come again");
    assert_eq!(listener.accept().map(drop).map_err(|e| e.kind()), Err(ErrorKind::WouldBlock));
    assert!(f.splicer.flows().is_empty());
}
