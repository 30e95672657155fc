//! Transparent connections: the hosts know nothing of the forwarder, which does not have their addresses.
use longsplice_datapath::{Datapath, EndToEnd, LegFlags, PathFlags, Tuple, set_transparent};
use longsplice_engine::{Command, DatapathOptions, EndReason, Ended, FlowState, Policy, SpliceWhen};
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection, Namespace, Options, Shape,
    namespace::counter_here,
    process::wait_for,
    topology::{CLIENT, SERVER},
    traffic::{Script, connect, converse, intact, listen},
};
use longsplice_tests::{
    Forwarder, at_once, by_hand, families,
    forge::Nobody,
    handshake::{PATIENCE, Route, spliced_whole},
    packet::{Packet, flag},
};
use nix::sys::socket::{setsockopt, sockopt::TcpRepair};
use socket2::{Domain, SockRef, Socket, Type};
use std::{
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    time::Duration,
};
use test_case::test_case;

const PORT: u16 = 7000;
/// The port of a client whose addresses an earlier socket has.
const LATER: u16 = 40_003;
const BYTES: u64 = 5_000_000;
/// More than fits into a first flight.
const BYTES_AT_ONCE: u64 = 100_000;

/// Any address, with the port of the tests.
fn any(family: Family) -> SocketAddr {
    match family {
        Family::V4 => (Ipv4Addr::UNSPECIFIED, PORT).into(),
        Family::V6 => (Ipv6Addr::UNSPECIFIED, PORT).into(),
    }
}

fn route(family: Family) -> Route {
    Route { to: SERVER.port(family, PORT), server: SERVER.port(family, PORT) }
}

/// The tuples of both legs of a connection.
fn legs(family: Family, client: SocketAddr) -> [Tuple; 2] {
    let server = SERVER.port(family, PORT);
    [Tuple { remote: client, local: server }, Tuple { remote: server, local: client }]
}

fn both(family: Family, policy: Policy, drive: impl FnOnce(&Forwarder, SocketAddr)) {
    through(&Lab::simple(Shape::TwoDevices).expect("lab"), family, policy, drive);
}

fn through(lab: &Lab, family: Family, policy: Policy, drive: impl FnOnce(&Forwarder, SocketAddr)) {
    let f = Forwarder::transparent(lab, any(family), policy);
    let serving = route(family).serve(lab, &Script::answerer().bytes(BYTES).pace(5_000_000));
    let script = Script::opener(1).bytes(BYTES).pace(5_000_000);
    let (stream, own) = route(family).dial(lab, &script);
    let client = std::thread::spawn(move || converse(stream, &script));
    drive(&f, own);
    let (client, (from, server)) = (client.join().expect("client"), serving.join().expect("server"));
    assert_eq!(from, own, "the server sees the client itself");
    intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    let e = f.ended(1).remove(0);
    assert_eq!((&e.how, e.bytes_up, e.bytes_down), (&EndReason::Closed, BYTES, BYTES), "{e:?}");
    assert_eq!((e.client, e.server), (own, SERVER.port(family, PORT)));
    eprintln!("client {client}\nserver {server}\n{e:?} {:?}", f.verdicts());
}

/// The table has room for the server's leg, and none for the client's when that has completed its handshake.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn hosts_go_on_without_us_if_the_clients_leg_finds_no_room(family: Family) {
    const FLOWS: u16 = 16;
    const LIVE: u16 = 9; // more than half: otherwise only the places of this four-tuple would be taken
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).expect("lab");
    let options = DatapathOptions { max_flows: FLOWS.into(), ..DatapathOptions::default() }.into();
    let f = Forwarder::transparent_with(&lab, any(family), at_once(), options);
    let at = SERVER.port(family, PORT);
    let listener = lab.server.run(|| TcpListener::bind(at)).expect("listen");
    let idle = |_| (lab.client.run(|| TcpStream::connect(at)).expect("connect"), listener.accept().expect("accept"));
    let _open: Vec<_> = (0..LIVE).map(idle).collect();
    wait_for(PATIENCE, || (f.splicer.flows().len() == usize::from(LIVE)).then_some(())).expect("live flows");
    let d = f.splicer.datapath().expect("kernel path");
    for n in 1..2 * (FLOWS - LIVE) {
        let other = Tuple { remote: ([192, 0, 2, 1], n).into(), local: ([192, 0, 2, 2], 9).into() };
        d.expect(&other, None).expect("room for all but one");
    }
    let (script, answer) = (Script::opener(1).bytes(BYTES_AT_ONCE), Script::answerer().bytes(BYTES_AT_ONCE));
    let stream = lab.client.run(|| connect(at, &script)).expect("connect");
    let client = std::thread::spawn(move || converse(stream, &script));
    let server = converse(listener.accept().expect("accept").0, &answer);
    let client = client.join().expect("client");
    intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    // the client's first data may come before user space has heard of its acknowledgement
    assert!(f.verdict("table-full") >= 1, "{:?}", f.verdicts());
    assert_eq!(f.splicer.transparent_counts().untracked, 1);
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn spliced_at_once_they_take_the_identity_path(family: Family) {
    both(family, at_once(), |f, client| {
        f.wait_state(FlowState::Spliced);
        for leg in legs(family, client) {
            let path = f.splicer.datapath().and_then(|d| d.path(&leg)).expect("a path entry");
            let flags = PathFlags::SPLICED | PathFlags::IDENTITY;
            assert_eq!(path.flags & flags, flags, "{leg:?}: {path:?}, {:?}", f.splicer.datapath().unwrap().leg(&leg));
        }
    });
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn copied(family: Family) {
    both(family, Policy { when: SpliceWhen::Never, ..Policy::default() }, |_, _| {});
}

fn back_and_forth(f: &Forwarder, _: SocketAddr) {
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
    both(family, by_hand(), back_and_forth);
}

/// Lost segments must be retransmitted by the right side: a host or one of our sockets.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn spliced_and_taken_back_while_segments_are_lost(family: Family) {
    let options = Options { large_packets: false, ..Options::default() };
    for shape in [Shape::TwoDevices, Shape::OneArmed] {
        let lab = Lab::new(shape, options.clone()).expect("lab");
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
    let f = Forwarder::transparent(&lab, any(family), at_once());
    let listener = lab.server.run(|| TcpListener::bind(SERVER.port(family, PORT))).expect("listen");
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

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn lost_segments_of_the_handshake_come_again(family: Family) {
    let lab = Lab::new(Shape::TwoDevices, Options { large_packets: false, ..Options::default() }).expect("lab");
    let f = Forwarder::transparent(&lab, any(family), at_once());
    let whole = |ended: &Ended, name: &str| spliced_whole(ended, BYTES_AT_ONCE, name);
    route(family).lose_handshake_segments(&lab, &f, BYTES_AT_ONCE, whole);
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn data_right_behind_the_handshake_is_spliced(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let f = Forwarder::transparent(&lab, any(family), at_once());
    route(family).splice_from_the_first_byte(&lab, &f);
}

/// The server has an earlier connection from the client's port, and
/// answers a SYN with its numbers. The client resets that connection.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_server_that_remembers_an_earlier_connection(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let routes = |on| {
        for key in ["net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"] {
            lab.forwarder.sysctl(key, on).expect("sysctl");
        }
    };
    routes("1");
    let listener = lab.server.run(|| TcpListener::bind(SERVER.port(family, PORT))).expect("listen");
    let script = Script { local: Some(CLIENT.port(family, 40_001)), ..Script::opener(1).bytes(1000) };
    let routed = lab.client.run(|| connect(SERVER.port(family, PORT), &script)).expect("routed");
    let _earlier = listener.accept().expect("accept");
    setsockopt(&routed, TcpRepair, &1).expect("repair mode"); // so that it is closed silently
    drop(routed);
    routes("0");
    let f = Forwarder::transparent(&lab, any(family), at_once());
    let again = lab.client.spawn(move || connect(SERVER.port(family, PORT), &script).map(|c| converse(c, &script)));
    let answer = Script::answerer().bytes(1000);
    listener.set_nonblocking(true).expect("nonblocking");
    let (server, _) = wait_for(PATIENCE, || listener.accept().ok()).expect("the client connects in the end");
    server.set_nonblocking(false).expect("blocking");
    let server = converse(server, &answer);
    let client = again.join().expect("client").expect("connected");
    intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    assert_eq!(f.ended(1)[0].splices, 1, "{family:?}");
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn who_is_refused_hears_of_it(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let f = Forwarder::transparent(&lab, any(family), at_once());
    let refused = lab.client.run(|| TcpStream::connect(SERVER.port(family, PORT)));
    assert_eq!(refused.expect_err("nobody listens").kind(), ErrorKind::ConnectionRefused);
    let nothing = || f.splicer.datapath().expect("kernel path").legs().is_empty().then_some(());
    wait_for(Duration::from_secs(5), nothing).expect("nothing is left behind");
}

/// The server's answer reaches a client that is gone, whose kernel sends a reset.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_server_hears_that_its_client_has_gone(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let f = Forwarder::transparent(&lab, any(family), at_once());
    let server = SERVER.port(family, PORT);
    let listener = lab.server.run(|| TcpListener::bind(server)).expect("listen");
    listener.set_nonblocking(true).expect("nonblocking");
    let delay = Impair { delay: Duration::from_millis(300), ..Impair::default() };
    let late = lab.impair(LinkDirection::FromServer, delay).expect("impair");
    lab.client.run(|| {
        let s = Socket::new(Domain::for_address(server), Type::STREAM.nonblocking(), None).expect("socket");
        assert_eq!(s.connect(&server.into()).expect_err("it waits").raw_os_error(), Some(nix::libc::EINPROGRESS));
    });
    wait_for(Duration::from_secs(5), || (f.verdict("handshake") >= 3).then_some(())).expect("SYN, SYN-ACK, RST");
    let nothing = || f.splicer.datapath().expect("kernel path").legs().is_empty().then_some(());
    wait_for(Duration::from_secs(5), nothing).expect("nothing is left behind");
    assert!(late.counters().delayed >= 1);
    assert_eq!(listener.accept().expect_err("reset before").kind(), ErrorKind::WouldBlock);
}

/// The server resets a connection, and the client does not get our reset: because its device is down, or because the reset
/// is lost. The kernel would not answer what the client sends later, since it does not have the server's address.
#[test]
#[ignore = "root"]
fn a_client_that_misses_a_reset_hears_of_it_when_it_sends() {
    let cases = [(Family::V4, true), (Family::V6, true), (Family::V4, false), (Family::V6, false)];
    for (n, (family, is_down)) in cases.into_iter().enumerate() {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        let f = Forwarder::transparent(&lab, any(family), by_hand());
        let listener = lab.server.run(|| TcpListener::bind(SERVER.port(family, PORT))).expect("listen");
        let (mut client, _) = route(family).dial(&lab, &Script::opener(1));
        client.set_read_timeout(Some(PATIENCE)).expect("time limit");
        let (server, _) = listener.accept().expect("accept");
        f.wait_state(FlowState::Copying);
        let nothing = Impair { loss: 1.0, ..Impair::default() };
        let lost = (!is_down).then(|| lab.impair(LinkDirection::ToClient, nothing).expect("impair"));
        if is_down {
            lab.take_down(lab.client_device()).expect("down");
        }
        SockRef::from(&server).set_linger(Some(Duration::ZERO)).expect("linger");
        drop(server);
        assert_eq!(f.ended(1)[0].how, EndReason::ServerReset, "{family:?}");
        if is_down {
            lab.bring_up(lab.client_device()).expect("up");
        }
        lost.iter().for_each(|lost| lost.change(Impair::default()).expect("change"));
        client.write_all(b"x").expect("sent");
        let told = client.read(&mut [0]).expect_err("nobody is there");
        assert_eq!(told.kind(), ErrorKind::ConnectionReset, "{n}: {family:?} {is_down} {:?}", f.verdicts());
    }
}

/// The client has received more than we have seen it acknowledge when we stop. It ignores a reset with the number that it has
/// acknowledged (RFC 5961, 3.2), and has nothing to send.
#[test]
#[ignore = "root"]
fn a_client_that_is_ahead_of_the_reset_is_reset_again() {
    for (family, policy) in [(Family::V4, at_once()), (Family::V6, at_once()), (Family::V4, by_hand())] {
        let state = if policy.when == SpliceWhen::AtOnce { FlowState::Spliced } else { FlowState::Copying };
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        let f = Forwarder::transparent(&lab, any(family), policy);
        let listener = lab.server.run(|| TcpListener::bind(SERVER.port(family, PORT))).expect("listen");
        let (mut client, _) = route(family).dial(&lab, &Script::opener(1));
        client.set_read_timeout(Some(PATIENCE)).expect("time limit");
        let (mut server, _) = listener.accept().expect("accept");
        f.wait_state(state);
        let nothing = Impair { loss: 1.0, ..Impair::default() };
        let lost = lab.impair(LinkDirection::FromClient, nothing).expect("impair");
        server.write_all(b"x").expect("sent");
        client.read_exact(&mut [0]).expect("received");
        lost.change(Impair { delay: Duration::from_millis(20), ..Impair::default() }).expect("change");
        drop(f);
        let told = client.read(&mut [0]).expect_err("the flow is over");
        assert_eq!(told.kind(), ErrorKind::ConnectionReset, "{family:?} {state:?}");
        let told = server.read(&mut [0]).expect_err("the flow is over");
        assert_eq!(told.kind(), ErrorKind::ConnectionReset, "{family:?} {state:?}: server");
    }
}

/// A server that does not answer, and a client that sends SYN after SYN from new ports.
#[test]
#[ignore = "root"]
fn a_flood_of_syns_takes_no_more_than_its_share() {
    families().into_iter().for_each(flood);
}

fn flood(family: Family) {
    const HALF_OPEN: usize = 1024;
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let f = Forwarder::transparent(&lab, any(family), at_once());
    let silence =
        lab.impair(LinkDirection::ToServer, Impair { drop_every: Some(1), ..Impair::default() }).expect("impair");
    let to = SERVER.port(family, PORT);
    let flood: Vec<Socket> = lab.client.run(|| {
        let ask = |_| {
            let s = Socket::new(Domain::for_address(to), Type::STREAM.nonblocking(), None).expect("socket");
            assert_eq!(s.connect(&to.into()).expect_err("it waits").raw_os_error(), Some(nix::libc::EINPROGRESS));
            s
        };
        (0..HALF_OPEN + 300).map(ask).collect()
    });
    wait_for(Duration::from_secs(5), || (f.splicer.transparent_counts().given_up >= 300).then_some(())).unwrap_or_else(
        || panic!("the oldest are given up: {}, {:?}", f.splicer.transparent_counts().given_up, f.verdicts()),
    );
    let legs = f.splicer.datapath().expect("kernel path").legs();
    assert!(legs.len() <= HALF_OPEN, "{}", legs.len());
    assert!(legs.iter().all(|(_, l)| l.flags & LegFlags::TRANSPARENT != 0));
    drop(flood);
    drop(silence);
    let serving = route(family).serve(&lab, &Script::answerer().bytes(1000));
    let script = Script::opener(1).bytes(1000);
    let client = converse(route(family).dial(&lab, &script).0, &script);
    intact(&client, &serving.join().expect("server").1).expect("another connection is served as ever");
}

/// A forwarder in front of a server that answers every SYN.
fn answering_server(family: Family) -> (Lab, Forwarder, TcpListener) {
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).expect("lab");
    let f = Forwarder::transparent(&lab, any(family), at_once());
    let listener = lab.server.run(|| listen(SERVER.port(family, PORT), &Script::answerer())).expect("listen");
    listener.set_nonblocking(true).expect("nonblocking");
    (lab, f, listener)
}

/// A flood of forged SYNs to a server that answers them all. A slow handshake in progress is not given up for them, and
/// connections beyond the limit are passed on as by a router.
#[test]
#[ignore = "root"]
fn a_flood_that_is_answered_harms_nobody() {
    families().into_iter().for_each(answered_flood);
}

fn answered_flood(family: Family) {
    const FORGED: u16 = 1100;
    let (lab, f, listener) = answering_server(family);
    let to = SERVER.port(family, PORT);
    let exchange = |client: TcpStream| {
        // skip connections from forged addresses
        let own = client.local_addr().expect("bound");
        let accept = || listener.accept().ok().filter(|(_, from)| *from == own);
        let server = wait_for(PATIENCE, accept).expect("it comes to the server").0;
        server.set_nonblocking(false).expect("blocking");
        for s in [&client, &server] {
            s.set_read_timeout(Some(PATIENCE)).expect("a limit");
        }
        for (mut from, mut to) in [(&client, &server), (&server, &client)] {
            let mut heard = [0; 5];
            from.write_all(b"hello").expect("write");
            to.read_exact(&mut heard).unwrap_or_else(|e| panic!("{e}: {from:?} > {to:?}: {:?}", f.verdicts()));
        }
        (client, server)
    };
    // the client is far away, so its handshake is still in progress when the flood arrives
    let delay = Impair { delay: Duration::from_millis(500), ..Impair::default() };
    let far = lab.impair(LinkDirection::ToClient, delay).expect("impair");
    let early = lab.client.spawn(move || TcpStream::connect(to));
    wait_for(PATIENCE, || (f.verdict("handshake") >= 2).then_some(())).expect("SYN and SYN-ACK");
    let nobody = Nobody::new(&lab, family);
    let mut ports = 1..u16::MAX;
    let mut forge = || nobody.asks(ports.next().expect("a port"), to);
    (0..FORGED).for_each(|_| forge());
    let early = exchange(early.join().expect("client").expect("its handshake is not given up"));
    f.wait_state(FlowState::Spliced);
    let counts = || f.splicer.transparent_counts();
    let too_many = || {
        forge();
        (counts().untracked > 0).then_some(())
    };
    wait_for(PATIENCE, too_many).expect("all that are half open are answered");
    drop(far);
    let before = counts();
    let late = exchange(lab.client.run(|| TcpStream::connect(to)).expect("it is passed on"));
    assert!(counts().untracked > before.untracked, "{:?}", counts());
    assert_eq!(f.splicer.flows().len(), 1, "the hosts do without us");
    drop((early, late));
}

/// Only the client completes the handshake, however often the server
/// retransmits: otherwise anyone who forges a SYN would get a connection.
#[test]
#[ignore = "root"]
fn nobody_answers_for_a_client_that_is_silent() {
    families().into_iter().for_each(silent_client);
}

fn silent_client(family: Family) {
    let (lab, f, listener) = answering_server(family);
    let nobody = Nobody::new(&lab, family);
    nobody.asks(9, SERVER.port(family, PORT));
    // SYN, SYN-ACK, and the SYN-ACK again after one second and after two more
    wait_for(PATIENCE, || (f.verdict("handshake") >= 4).then_some(())).expect("they come again");
    let half_open = || lab.server.execute("ss", &["-Htn", "state", "syn-recv"]).expect("ss");
    assert!(half_open().contains(&nobody.address(9).to_string()), "{}", half_open());
    assert_eq!(listener.accept().map(drop).map_err(|e| e.kind()), Err(ErrorKind::WouldBlock));
}

/// The setting that keepalived needs.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn where_any_address_can_be_bound(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let name = if family == Family::V4 { "ipv4" } else { "ipv6" };
    lab.forwarder.sysctl(&format!("net.{name}.ip_nonlocal_bind"), "1").expect("sysctl");
    through(&lab, family, at_once(), |_, _| {});
}

/// The setting that wg-quick needs: reverse-path filtering uses the packet's mark.
#[test]
#[ignore = "root"]
fn where_marks_count_for_the_way_back() {
    for filter in ["0", "1", "2"] {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        for (name, value) in [("src_valid_mark", "1"), ("rp_filter", filter)] {
            for device in ["all", "default", lab.server_device(), lab.client_device()] {
                lab.forwarder.sysctl(&format!("net.ipv4.conf.{device}.{name}"), value).expect("sysctl");
            }
        }
        through(&lab, Family::V4, by_hand(), back_and_forth);
    }
}

/// A connection that is routed through a machine on which a program with a transparent listener starts.
struct Older {
    f: Forwarder,
    lab: Lab,
    client: TcpStream,
    server: TcpStream,
}

impl Older {
    fn new(family: Family, policy: Policy) -> Older {
        let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).expect("lab");
        let listener = lab.server.run(|| TcpListener::bind(SERVER.port(family, PORT))).expect("listen");
        let client = lab.client.run(|| TcpStream::connect(SERVER.port(family, PORT))).expect("connected");
        let (server, _) = listener.accept().expect("accept");
        [&client, &server].iter().for_each(|s| s.set_read_timeout(Some(PATIENCE)).expect("a limit"));
        let f = Forwarder::transparent(&lab, any(family), policy);
        Older { f, lab, client, server }
    }

    /// Bytes pass both ways.
    fn works(&mut self, what: &str) {
        let mut heard = [0; 5];
        for up in [true, false, false, true] {
            let (from, to) =
                if up { (&mut self.client, &mut self.server) } else { (&mut self.server, &mut self.client) };
            from.write_all(b"hello").expect("write");
            to.read_exact(&mut heard).unwrap_or_else(|e| panic!("{what}, up {up}: {e}: {:?}", self.f.verdicts()));
            assert_eq!(&heard, b"hello");
        }
        assert!(self.f.splicer.flows().is_empty(), "it is not ours");
    }

    /// Sends a packet in the name of one host, with the number of another connection.
    fn forge(&self, family: Family, from_client: bool, p: Packet) {
        let (client, server) = (self.client.local_addr().expect("bound"), SERVER.port(family, PORT));
        let (at, from, to) =
            if from_client { (&self.lab.client, client, server) } else { (&self.lab.server, server, client) };
        Nobody::at(at, family).sends(&Packet { from, to, ..p });
    }
}

/// Whoever knows the addresses and ports of a connection that is older than the program sends a SYN in its client's name, and its
/// answer in its server's. Neither may take a byte of that connection.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn forged_handshakes_take_nothing_from_a_routed_connection(family: Family) {
    for policy in [by_hand(), at_once()] {
        let mut older = Older::new(family, policy);
        let client = older.client.local_addr().expect("bound");
        older.works("before");
        let blank = || Packet::new(client, client);
        older.forge(family, true, Packet { seq: 77, flags: flag::SYN, ..blank() });
        wait_for(PATIENCE, || (older.f.verdict("handshake") >= 1).then_some(())).expect("the SYN is heard");
        let half_open = |older: &Older| older.f.splicer.datapath().expect("kernel path").legs().len();
        wait_for(PATIENCE, || (half_open(&older) == 1).then_some(())).expect("the server's leg");
        older.works("a forged SYN");
        assert!(older.f.verdict("passed-by") > 0, "{:?}", older.f.verdicts());
        older.forge(family, false, Packet { seq: 99, ack: 78, flags: flag::SYN | flag::ACK, ..blank() });
        let sockets = || {
            let all = older.lab.forwarder.execute("ss", &["-Htn", "state", "established"]).expect("ss");
            (all.lines().count() == 2).then_some(())
        };
        wait_for(PATIENCE, sockets).expect("its answer makes sockets");
        older.works("and its answer");
        // another SYN is the server's to judge
        let judged = || older.lab.server.run(|| counter_here("TcpExt", "TCPSYNChallenge")).expect("counter");
        let before = judged();
        older.forge(family, true, Packet { seq: 700, flags: flag::SYN, ..blank() });
        wait_for(PATIENCE, || (judged() > before).then_some(())).expect("the SYN is routed");
        older.works("and another SYN");
        // how it ends is none of our business, either
        SockRef::from(&older.server).set_linger(Some(Duration::ZERO)).expect("linger");
        drop(older.server);
        let end = older.client.read(&mut [0]).expect_err("reset");
        assert_eq!(end.kind(), ErrorKind::ConnectionReset, "{family:?}");
    }
}

/// The reset of a routed connection comes while a forged SYN of it waits for its answer.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_reset_of_a_routed_connection_is_routed(family: Family) {
    for by_client in [true, false] {
        let older = Older::new(family, at_once());
        let blank = Packet::new(older.client.local_addr().expect("bound"), older.client.local_addr().expect("bound"));
        older.forge(family, true, Packet { seq: 77, flags: flag::SYN, ..blank });
        wait_for(PATIENCE, || (older.f.splicer.datapath()?.legs().len() == 1).then_some(())).expect("half open");
        let Older { client, server, .. } = older;
        let (ends, mut hears) = if by_client { (client, server) } else { (server, client) };
        SockRef::from(&ends).set_linger(Some(Duration::ZERO)).expect("linger");
        drop(ends);
        let end = hears.read(&mut [0]).expect_err("reset");
        assert_eq!(end.kind(), ErrorKind::ConnectionReset, "{family:?} {by_client}");
    }
}

/// The program starts between a client's SYN and its repetition, while the first answer is on its way to the client: the client's
/// acknowledgement passes unseen, and then the server's second answer comes. Bytes may have passed, so the program must keep out.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_connection_that_began_without_us_is_left_alone(family: Family) {
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).expect("lab");
    let f = Forwarder::transparent(&lab, any(family), at_once());
    let [at_client, at_server] = [&lab.client, &lab.server].map(|at| Nobody::at(at, family));
    let (client, server) = (at_client.address(9), SERVER.port(family, PORT));
    let says = |seq, ack, flags| Packet { seq, ack, flags, ..Packet::new(client, server) };
    // the server is silent, so that its answer can be forged
    lab.server
        .execute("nft", &["table inet t { chain c { type filter hook input priority 0; meta l4proto tcp drop; }; }"])
        .expect("a rule");
    at_client.sends(&says(1, 0, flag::SYN));
    wait_for(PATIENCE, || (f.splicer.datapath()?.legs().len() == 1).then_some(())).expect("half open");
    for n in 0..2 {
        at_client.sends(&says(2, 501, flag::ACK));
        wait_for(PATIENCE, || (f.verdict("passed-by") > n).then_some(())).expect("it is routed");
        at_client.sends(&says(1, 0, flag::SYN)); // and again, with the repetition
        wait_for(PATIENCE, || (f.verdict("handshake") > n + 1).then_some(())).expect("it is heard");
    }
    let answer = Packet { from: server, to: client, ..says(500, 2, flag::SYN | flag::ACK) };
    at_server.sends(&answer);
    wait_for(PATIENCE, || (f.splicer.transparent_counts().untracked == 1).then_some(())).expect("it is let go");
    assert!(f.splicer.datapath().expect("kernel path").legs().is_empty(), "{family:?}");
}

/// A client gives up before the server has answered, and comes again from the same port, with another number.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_client_that_comes_again_before_the_answer_is_served(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let f = Forwarder::transparent(&lab, any(family), at_once());
    let rules = |what: &[&str]| lab.server.execute("nft", what).expect("rules");
    rules(&["table inet t { chain c { type filter hook input priority 0; meta l4proto tcp drop; }; }"]);
    let client = CLIENT.port(family, 40_002);
    let syn = Packet { seq: 77, flags: flag::SYN, ..Packet::new(client, SERVER.port(family, PORT)) };
    Nobody::at(&lab.client, family).sends(&syn);
    wait_for(PATIENCE, || (f.splicer.datapath()?.legs().len() == 1).then_some(())).expect("half open");
    rules(&["delete table inet t"]);
    let serving = route(family).serve(&lab, &Script::answerer().bytes(1000));
    let script = Script { local: Some(client), ..Script::opener(1).bytes(1000) };
    let stream = lab.client.run(|| connect(SERVER.port(family, PORT), &script)).expect("connected");
    let ours = converse(stream, &script);
    intact(&ours, &serving.join().expect("server").1).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    assert_eq!(f.ended(1)[0].how, EndReason::Closed, "{family:?}");
}

/// A server answers, is reset or restarted, and answers again with another number. The sockets have the first number by then.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_server_that_has_forgotten_its_answer_is_asked_again(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let f = Forwarder::transparent(&lab, any(family), at_once());
    let rules = |what: &[&str]| lab.server.execute("nft", what).expect("rules");
    rules(&["table inet t { chain c { type filter hook input priority 0; meta l4proto tcp drop; }; }"]);
    let [asking, answering] = [&lab.client, &lab.server].map(|host| Nobody::at(host, family));
    let (client, server) = (asking.address(40_003), SERVER.port(family, PORT));
    asking.sends(&Packet { seq: 77, flags: flag::SYN, ..Packet::new(client, server) });
    wait_for(PATIENCE, || (f.splicer.datapath()?.legs().len() == 1).then_some(())).expect("half open");
    let answer = |seq| Packet { seq, ack: 78, flags: flag::SYN | flag::ACK, ..Packet::new(server, client) };
    answering.sends(&answer(99));
    let count = |host: &Namespace, state| host.execute("ss", &["-Htn", "state", state]).expect("ss").lines().count();
    wait_for(PATIENCE, || (count(&lab.forwarder, "established") == 2).then_some(())).expect("its answer makes sockets");
    let _listener = lab.server.run(|| TcpListener::bind(server)).expect("listen");
    rules(&["delete table inet t"]);
    answering.sends(&answer(1099));
    let is_asked = || (count(&lab.server, "syn-recv") == 1).then_some(());
    wait_for(PATIENCE, is_asked).unwrap_or_else(|| panic!("the server is asked again: {:?}", f.verdicts()));
}

/// A socket of an earlier connection takes the segments for its addresses until it is closed, however long that takes. A client that
/// completed its handshake meanwhile would be heard by nobody.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn no_handshake_completes_before_the_sockets_of_an_earlier_connection_are_closed(family: Family) {
    behind_an_earlier_socket(family, |lab, f| {
        let again = || lab.server.counter("TcpExt", "TCPSynRetrans").filter(|n| *n >= 4);
        wait_for(PATIENCE, again).unwrap_or_else(|| panic!("the server answers again: {:?}", f.verdicts()));
    });
}

/// The server has answered, but nobody has heard of it yet, and the client's reset of its earlier connection comes. The server ignores
/// it, and so must we: the connection that begins would count as reset, would not be spliced, and its server not told of its end.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_late_reset_of_an_earlier_connection_is_not_that_of_the_next(family: Family) {
    behind_an_earlier_socket(family, |lab, f| {
        let server = || f.splicer.datapath()?.legs().into_iter().find(|(_, l)| l.flags & LegFlags::SYN == 0);
        let (leg, _) = wait_for(PATIENCE, server).expect("the server answers");
        let rules = |what: &[&str]| lab.server.execute("nft", what).expect("rules");
        rules(&["table inet t { chain c { type filter hook input priority 0; tcp flags rst counter; }; }"]);
        let late = Packet { seq: 1, flags: flag::RST, ..Packet::new(leg.local, leg.remote) };
        Nobody::at(&lab.client, family).sends(&late);
        let heard = || (!rules(&["list table inet t"]).contains("packets 0 ")).then_some(());
        wait_for(PATIENCE, heard).expect("the server gets it");
    });
}

/// A process has died during the handshake of an earlier connection, and has left the record of its server's leg. Another one has a
/// socket with these addresses. The record goes when that is closed.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn what_is_left_of_a_handshake_stays_while_a_process_has_its_socket(family: Family) {
    let [client, server] = legs(family, CLIENT.port(family, LATER));
    let leave = |d: &Datapath| {
        let kind = EndToEnd { transparent: true, waits: false };
        d.expect_end_to_end(&server, &client, kind).expect("room").generation
    };
    behind_what_is_left(family, leave, |lab, f, left| {
        let again = || lab.client.counter("TcpExt", "TCPSynRetrans").filter(|n| *n >= 2);
        wait_for(PATIENCE, again).unwrap_or_else(|| panic!("the client asks again: {:?}", f.verdicts()));
        assert_eq!(f.splicer.datapath().and_then(|d| d.generation(&server)), Some(left), "it is still the same");
    });
}

/// A client connects while a socket of an earlier connection has its addresses, which is closed after `meanwhile`. It is then served.
fn behind_an_earlier_socket(family: Family, meanwhile: impl FnOnce(&Lab, &Forwarder)) {
    behind_what_is_left(family, |_| (), |lab, f, ()| meanwhile(lab, f));
}

/// The same while the data path has what `leave` puts into it.
fn behind_what_is_left<T>(
    family: Family,
    leave: impl FnOnce(&Datapath) -> T,
    meanwhile: impl FnOnce(&Lab, &Forwarder, T),
) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let f = Forwarder::transparent(&lab, any(family), at_once());
    let (client, to) = (CLIENT.port(family, LATER), SERVER.port(family, PORT));
    let left = leave(f.splicer.datapath().expect("kernel path"));
    let earlier = lab.forwarder.run(|| {
        let s = Socket::new(Domain::for_address(client), Type::STREAM, None).expect("socket");
        set_transparent(&s, client.is_ipv6()).expect("an address that is not ours");
        s.set_reuse_address(true).expect("option");
        setsockopt(&s, TcpRepair, &1).expect("repair mode"); // it is connected, and closed, silently
        s.bind(&client.into()).expect("bound");
        s.connect(&to.into()).expect("connected");
        s
    });
    let serving = route(family).serve(&lab, &Script::answerer().bytes(1000));
    let script = Script { local: Some(client), ..Script::opener(1).bytes(1000) };
    let ours = lab.client.spawn({
        let script = script.clone();
        move || connect(to, &script).map(|stream| converse(stream, &script))
    });
    meanwhile(&lab, &f, left);
    assert!(!ours.is_finished(), "nobody would hear the client");
    drop(earlier);
    let client = ours.join().expect("client").expect("connected");
    intact(&client, &serving.join().expect("server").1).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    assert_eq!(f.ended(1)[0].splices, 1, "{family:?}");
}
