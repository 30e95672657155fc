//! Records of legs that are no longer needed: of handshakes that the kernel has not accepted, and of flows that cannot be
//! spliced. They must not keep other flows from being spliced.
use longsplice_engine::{
    DatapathOptions, EndReason, Ended, FlowState, OpenOptions, PathRule, Policy, Refusal, SpliceWhen,
};
use longsplice_lab::{
    Family, Lab, Shape,
    process::wait_for,
    topology::{CLIENT, FORWARDER_TO_CLIENT, FORWARDER_TO_SERVER, SERVER},
    traffic::{Script, connect, converse, intact, listen, serve},
};
use longsplice_tests::{Forwarder, at_once, forge::Nobody};
use nix::sys::socket::{setsockopt, sockopt::TcpRepair};
use socket2::{Domain, SockAddr, Socket, Type};
use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
    thread,
    time::Duration,
};
use test_case::test_case;

const PORT: u16 = 7000;
/// A record is removed after ten seconds; on a busy machine a little later.
const PATIENCE: Duration = Duration::from_secs(60);

fn proxy(family: Family) -> SocketAddr {
    FORWARDER_TO_CLIENT.port(family, PORT)
}

fn open(lab: &Lab, family: Family, policy: Policy, max_flows: u32) -> Forwarder {
    let options = DatapathOptions { max_flows, ..DatapathOptions::default() }.into();
    Forwarder::open(lab, proxy(family), SERVER.port(family, PORT), policy, options)
}

fn nft(lab: &Lab, rules: &str) {
    lab.forwarder.execute("nft", &[rules]).unwrap_or_else(|e| panic!("{rules}: {e}"));
}

/// Drops the last segment of a handshake, and all later ones, between the data path and the sockets.
fn drop_what_ends_handshakes(lab: &Lab) {
    nft(lab, "add table inet f; add chain inet f input { type filter hook input priority 0; }");
    nft(lab, &format!("add rule inet f input tcp dport {PORT} tcp flags & (syn | ack) == ack drop"));
}

fn legs(f: &Forwarder) -> usize {
    f.splicer.datapath().expect("kernel path").legs().len()
}

fn entries(f: &Forwarder) -> usize {
    f.splicer.datapath().expect("kernel path").paths().len()
}

/// Closes sockets without sending anything.
fn close_silently(sockets: impl IntoIterator<Item: AsFd>) {
    sockets.into_iter().for_each(|s| setsockopt(&s, TcpRepair, &1).expect("repair mode"));
}

/// Opens connections of the client that the forwarder's kernel does not accept.
fn bad_handshakes(lab: &Lab, family: Family, n: usize) -> Vec<TcpStream> {
    lab.client.run(|| (0..n).map(|_| TcpStream::connect(proxy(family)).expect("the client thinks so")).collect())
}

/// The server has an earlier connection from our port, and answers our SYN with its numbers. The kernel resets it and sends
/// the SYN again: the resulting connection is spliced like any other.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_server_that_remembers_an_earlier_connection(family: Family) {
    const OWN: u16 = 20_000;
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let at = SERVER.port(family, PORT);
    let listener = lab.server.run(|| TcpListener::bind(at)).expect("listen");
    let script = Script { local: Some(FORWARDER_TO_SERVER.port(family, OWN)), ..Script::opener(1) };
    let ours = lab.forwarder.run(|| connect(at, &script)).expect("connect");
    let _earlier = listener.accept().expect("accept");
    close_silently([ours]);
    let options = OpenOptions { source_ports: OWN..=OWN, ..OpenOptions::default() };
    let f = Forwarder::open(&lab, proxy(family), at, at_once(), options);
    let script = Script::opener(2).bytes(1000);
    let client = lab.client.spawn(move || converse(connect(proxy(family), &script).expect("connect"), &script));
    listener.set_nonblocking(true).expect("nonblocking");
    let (server, _) = wait_for(PATIENCE, || listener.accept().ok()).expect("a connection comes to the server");
    server.set_nonblocking(false).expect("blocking");
    let server = converse(server, &Script::answerer().bytes(1000));
    intact(&client.join().expect("client"), &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    let ended = f.ended(1).remove(0);
    assert_eq!((ended.refusal, ended.splices), (None, 1), "{family:?}");
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn handshakes_that_the_kernel_drops_leave_nothing(family: Family) {
    const FLOWS: u32 = 64;
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let script = Script::opener(5).bytes(200_000);
    let answer = Script::answerer().bytes(200_000);
    let f = open(&lab, family, at_once(), FLOWS);
    drop_what_ends_handshakes(&lab);
    let bad = bad_handshakes(&lab, family, 200);
    assert_eq!(legs(&f), 2 * FLOWS as usize, "the table is full: {:?}", f.verdicts());
    wait_for(PATIENCE, || (entries(&f) == 0 && legs(&f) == 0).then_some(()))
        .unwrap_or_else(|| panic!("{} records stay", legs(&f)));
    assert_eq!(f.splicer.swept(), 2 * u64::from(FLOWS));
    close_silently(bad); // otherwise our retransmitted SYN-ACKs would complete them
    nft(&lab, "flush ruleset");
    let at = SERVER.port(family, PORT);
    let serving = lab.server.run(|| serve(listen(at, &answer).expect("listen"), 1, answer.clone()));
    let client = lab.client.run(|| converse(connect(proxy(family), &script).expect("connect"), &script));
    intact(&client, &serving.join()[0]).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    let ended = f.ended(1);
    assert_eq!((ended[0].splices, ended[0].how), (1, EndReason::Closed), "{ended:?}");
}

/// Half-open connections have a table of their own, where the oldest gives way.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_flood_of_syns_keeps_nobody_from_being_spliced(family: Family) {
    const FORGED: u16 = 3000; // three times the size of the table
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let f = open(&lab, family, at_once(), 64);
    let nobody = Nobody::new(&lab, family);
    (1..=FORGED).for_each(|port| nobody.asks(port, proxy(family)));
    assert_eq!((legs(&f), entries(&f)), (0, 0));
    let script = Script::opener(5).bytes(200_000);
    let answer = Script::answerer().bytes(200_000);
    let at = SERVER.port(family, PORT);
    let serving = lab.server.run(|| serve(listen(at, &answer).expect("listen"), 1, answer.clone()));
    let client = lab.client.run(|| converse(connect(proxy(family), &script).expect("connect"), &script));
    intact(&client, &serving.join()[0]).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    let ended = f.ended(1);
    assert_eq!((ended[0].splices, ended[0].how), (1, EndReason::Closed), "{ended:?}");
}

/// Connects from this port, whatever used it before.
fn from_port(family: Family, port: u16) -> Socket {
    let s = Socket::new(Domain::for_address(proxy(family)), Type::STREAM, None).expect("socket");
    s.set_reuse_address(true).expect("option");
    s.bind(&SockAddr::from(CLIENT.port(family, port))).expect("the port is free");
    s.connect(&proxy(family).into()).expect("the client thinks so");
    s
}

/// Clients whose records are candidates for removal connect again, at any moment
/// of the check. The new connections are different ones, and their records stay.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_new_connection_from_the_same_port_stays(family: Family) {
    const CLIENTS: u16 = 40;
    const GONE: usize = 10;
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    echo(&lab, family);
    let f =
        open(&lab, family, Policy { when: SpliceWhen::AfterBytes(1), path: PathRule::Any, ..Policy::default() }, 64);
    drop_what_ends_handshakes(&lab);
    let gone = bad_handshakes(&lab, family, GONE);
    let bad: Vec<Socket> = lab.client.run(|| (0..CLIENTS).map(|n| from_port(family, 41_000 + n)).collect());
    assert_eq!(legs(&f), usize::from(CLIENTS) + GONE);
    close_silently(gone);
    close_silently(bad);
    nft(&lab, "flush ruleset");
    let again = |n: u16| {
        lab.client.spawn(move || {
            thread::sleep(Duration::from_millis(300) * u32::from(n));
            TcpStream::from(from_port(family, 41_000 + n))
        })
    };
    let again: Vec<_> = (0..CLIENTS).map(again).collect();
    let streams: Vec<_> = again.into_iter().map(|s| s.join().expect("client")).collect();
    let is_swept = || (f.splicer.swept() >= GONE as u64 && legs(&f) == 2 * usize::from(CLIENTS)).then_some(());
    wait_for(PATIENCE, is_swept).unwrap_or_else(|| panic!("{} swept, {} stay", f.splicer.swept(), legs(&f)));
    for s in &streams {
        ask(s, 1000);
    }
    let spliced = || (count(&f, FlowState::Spliced) == streams.len()).then_some(());
    wait_for(PATIENCE, spliced).unwrap_or_else(|| panic!("{:#?}\n{:?}", f.splicer.flows(), f.verdicts()));
    streams.iter().for_each(|s| ask(s, 1000));
}

/// Runs a server that echoes all bytes.
fn echo(lab: &Lab, family: Family) {
    let listener = lab.server.run(|| TcpListener::bind(SERVER.port(family, PORT))).expect("listen");
    thread::spawn(move || {
        while let Ok((s, _)) = listener.accept() {
            thread::spawn(move || io::copy(&mut &s, &mut &s));
        }
    });
}

fn ask(mut s: &TcpStream, bytes: usize) {
    let question: Vec<u8> = (0..bytes).map(|i| (i >> 8) as u8 ^ i as u8).collect();
    s.set_read_timeout(Some(PATIENCE)).expect("option");
    s.write_all(&question).expect("write");
    let mut answer = vec![0; bytes];
    s.read_exact(&mut answer).expect("read");
    assert!(answer == question, "another answer");
}

fn count(f: &Forwarder, state: FlowState) -> usize {
    f.splicer.flows().iter().filter(|flow| flow.state == state).count()
}

fn is_refused(why: Option<Refusal>) -> bool {
    matches!(why, Some(Refusal::TableFull | Refusal::Untracked))
}

/// Opens connections at the same time, and waits until it is known for each whether it can be spliced.
fn open_at_once(lab: &Lab, family: Family, f: &Forwarder, n: usize) -> Vec<TcpStream> {
    let client = |_| {
        lab.client.spawn(move || {
            let s = TcpStream::connect(proxy(family)).expect("connect");
            ask(&s, 3000);
            s
        })
    };
    let clients: Vec<_> = (0..n).map(client).collect();
    let streams = clients.into_iter().map(|c| c.join().expect("client")).collect();
    let refused = || f.splicer.flows().iter().filter(|flow| is_refused(flow.refusal)).count();
    wait_for(PATIENCE, || (count(f, FlowState::Spliced) + refused() == n).then_some(()))
        .unwrap_or_else(|| panic!("{:#?}\n{:?}", f.splicer.flows(), f.verdicts()));
    streams
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_full_table_is_full_of_spliced_flows(family: Family) {
    const PLACES: usize = 16;
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    echo(&lab, family);
    let f = open(&lab, family, at_once(), PLACES as u32);
    let streams = open_at_once(&lab, family, &f, 60);
    // two flows that find no slot at the same time may both give up theirs
    let spliced = count(&f, FlowState::Spliced);
    assert!((PLACES - 1..=PLACES).contains(&spliced), "{spliced} are spliced: {:#?}", f.splicer.flows());
    assert_eq!(legs(&f), 2 * spliced);
    streams.iter().for_each(|s| ask(s, 100_000));
    drop(streams);
    let ended = f.ended(60);
    let whole = |e: &&Ended| e.how == EndReason::Closed && (e.bytes_up, e.bytes_down) == (103_000, 103_000);
    assert_eq!(ended.iter().filter(whole).count(), 60, "{ended:#?}");
    assert!(ended.iter().all(|e| (e.splices == 1) != is_refused(e.refusal)), "{ended:#?}");
    // a quarter of the table may be taken by ended flows
    let room = || (legs(&f) <= PLACES / 4 * 2).then_some(());
    wait_for(PATIENCE, room).unwrap_or_else(|| panic!("{} records stay", legs(&f)));
    let streams = open_at_once(&lab, family, &f, 60);
    let spliced = count(&f, FlowState::Spliced);
    assert!((PLACES * 3 / 4 - 1..=PLACES).contains(&spliced), "{spliced} are spliced: {:#?}", f.splicer.flows());
    streams.iter().for_each(|s| ask(s, 100_000));
}

/// Live flows take precedence over ended ones.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn flows_that_have_ended_make_room_for_new_ones(family: Family) {
    const PLACES: usize = 16;
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    echo(&lab, family);
    let f = open(&lab, family, at_once(), PLACES as u32);
    open_at_once(&lab, family, &f, PLACES / 2).clear();
    f.ended(PLACES / 2);
    wait_for(PATIENCE, || (legs(&f) == PLACES / 4 * 2).then_some(()))
        .unwrap_or_else(|| panic!("{} records, of a quarter of the table", legs(&f)));
    let mut streams = Vec::new();
    for n in 1..=PLACES {
        wait_for(PATIENCE / 3, || (legs(&f) <= 2 * PLACES - 2).then_some(())).expect("room for a flow");
        streams.push(lab.client.run(|| TcpStream::connect(proxy(family)).expect("connect")));
        ask(&streams[n - 1], 1000);
        wait_for(PATIENCE, || (count(&f, FlowState::Spliced) == n).then_some(()))
            .unwrap_or_else(|| panic!("{n}: {:#?}\n{:?}", f.splicer.flows(), f.verdicts()));
    }
    assert_eq!((legs(&f), f.verdict("table-full")), (2 * PLACES, 0));
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn flows_that_are_never_spliced_need_no_records(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    echo(&lab, family);
    let f = open(&lab, family, Policy { when: SpliceWhen::Never, ..Policy::default() }, 16);
    let connect = || lab.client.run(|| TcpStream::connect(proxy(family)).expect("connect"));
    let streams: Vec<_> = (0..40).map(|_| connect()).inspect(|s| ask(s, 1000)).collect();
    wait_for(PATIENCE, || (f.splicer.flows().len() == streams.len() && entries(&f) == 0).then_some(()))
        .unwrap_or_else(|| panic!("{} records", legs(&f)));
    streams.iter().for_each(|s| ask(s, 100_000));
    assert_eq!(f.verdict("table-full"), 0);
    drop(streams);
    assert!(f.ended(40).iter().all(|e| e.how == EndReason::Closed && e.refusal == Some(Refusal::Policy)));
}
