//! Translucent proxying: hosts that ask for a proxy, and a forwarder that intercepts their connections.

mod again;
mod authenticator;
mod bystanders;
mod capture;
mod dissector;
mod hand;
mod middleboxes;
mod packets;
mod pipelined;
mod plain;
mod router;
mod simultaneous;
mod switches;
mod udp;
mod wire;

use longsplice_datapath::{self as datapath, Datapath, Destinations, TPOT_EXID, TpotOptions};
use longsplice_engine::{Command, EndReason, FlowState, Policy, SpliceWhen};
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection, Options, Shape,
    process::wait_for,
    topology::{
        CLIENT, FORWARDER_TO_CLIENT, FORWARDER_TO_SECOND, FORWARDER_TO_SERVER, FORWARDER_TO_SERVER_SECOND, SERVER,
    },
    traffic::{Report, Script, connect, converse, intact, listen},
};
use longsplice_tests::{Forwarder, TestTpot, at_once, by_hand, forge::Nobody};
use nix::sys::socket::{setsockopt, sockopt::TcpRepair};
use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    thread::JoinHandle,
    time::Duration,
};
use test_case::test_case;

const PORT: u16 = 7000;
const BYTES: u64 = 5_000_000;
/// Longer than any retransmission takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// All addresses of a family, at the port of the tests.
fn everywhere(family: Family) -> Destinations {
    longsplice_tests::everywhere(SERVER.port(family, PORT))
}

/// The client's host asks for proxies.
fn asker(lab: &Lab, family: Family) -> TestTpot {
    let tpot = lab.client.run(TestTpot::open);
    tpot.ask(&everywhere(family)).expect("a rule");
    tpot.trust(&everywhere(family)).expect("a rule");
    tpot
}

/// Serves one connection at the server. Returns the client's apparent address and the report.
fn serve(lab: &Lab, family: Family, script: &Script) -> JoinHandle<(SocketAddr, Report)> {
    let listener = lab.server.run(|| listen(SERVER.port(family, PORT), script)).expect("listen");
    let script = script.clone();
    std::thread::spawn(move || {
        listener.set_nonblocking(true).expect("nonblocking");
        let (stream, from) = wait_for(PATIENCE, || listener.accept().ok()).expect("a connection comes to the server");
        stream.set_nonblocking(false).expect("blocking");
        (from, converse(stream, &script))
    })
}

fn dial(lab: &Lab, family: Family, script: &Script) -> TcpStream {
    let mut script = script.clone();
    script.local = Some(CLIENT.port(family, 0));
    lab.client.run(|| connect(SERVER.port(family, PORT), &script)).expect("the client connects to the server")
}

/// Sends `bytes` in both directions. Returns the client's apparent address.
fn exchange(lab: &Lab, family: Family, bytes: u64) -> SocketAddr {
    let serving = serve(lab, family, &Script::answerer().bytes(bytes));
    let script = Script::opener(1).bytes(bytes);
    let client = converse(dial(lab, family, &script), &script);
    let (from, server) = serving.join().expect("server");
    eprintln!("from {from}: client {client}, server {server}");
    intact(&client, &server).expect("intact");
    from
}

/// Runs one connection through a forwarder that intercepts it.
fn through(family: Family, policy: Policy, spliced: bool, drive: impl FnOnce(&Forwarder)) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let asker = asker(&lab, family);
    let f = Forwarder::taker(&lab.forwarder, everywhere(family), policy, false);
    passes(&lab, family, &f, spliced, drive);
    assert_eq!(asker.verdict("opened"), 1);
    assert_eq!([asker.verdict("plain-refused"), asker.verdict("unproven"), asker.verdict("failed")], [0; 3]);
}

/// Runs one connection, which the forwarder intercepts and `drive` may switch.
fn passes(lab: &Lab, family: Family, f: &Forwarder, spliced: bool, drive: impl FnOnce(&Forwarder)) {
    let serving = serve(lab, family, &Script::answerer().bytes(BYTES).pace(5_000_000));
    let script = Script::opener(1).bytes(BYTES).pace(5_000_000);
    let stream = dial(lab, family, &script);
    let client = std::thread::spawn(move || converse(stream, &script));
    drive(f);
    let (client, (from, server)) = (client.join().expect("client"), serving.join().expect("server"));
    intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    assert_ne!(from.ip(), CLIENT.ip(family), "the server sees the proxy");
    let e = f.ended(1).remove(0);
    eprintln!("client {client}\nserver {server}\n{e:?} {:?}", f.verdicts());
    assert_eq!((&e.how, e.bytes_up, e.bytes_down), (&EndReason::Closed, BYTES, BYTES), "{e:?}");
    assert_eq!(e.splices > 0, spliced, "{e:?}");
}

/// Splices a flow and takes it back, ten times.
fn switch_often(f: &Forwarder) {
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
fn copied(family: Family) {
    through(family, Policy { when: SpliceWhen::Never, ..Policy::default() }, false, |_| {});
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn spliced_at_once(family: Family) {
    through(family, at_once(), true, |f| f.wait_state(FlowState::Spliced));
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn switched_again_and_again(family: Family) {
    through(family, by_hand(), true, switch_often);
}

/// Without a proxy on the path, or with one that does not want the connection, the server itself answers.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn nobody_intercepts(family: Family) {
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).expect("lab");
    let asker = asker(&lab, family);
    let from = exchange(&lab, family, BYTES);
    assert_eq!(from.ip(), CLIENT.ip(family), "the server sees the client itself");
    assert_eq!([asker.verdict("asked"), asker.verdict("opened"), asker.verdict("encapsulated")], [1, 0, 0]);
}

/// Each proxy asks for the next one. `hops`: how many the client lets intercept.
fn through_two(family: Family, hops: u8, policy: &Policy) -> [u64; 2] {
    let lab = Lab::new(Shape::TwoForwarders, Options { forwarding: true, ..Options::default() }).expect("lab");
    let tpot = lab.client.run(|| TestTpot::with(&TpotOptions { hops, ..TpotOptions::default() }));
    tpot.ask(&everywhere(family)).and_then(|()| tpot.trust(&everywhere(family))).expect("rules");
    let first = Forwarder::taker(&lab.forwarder, everywhere(family), policy.clone(), true);
    let second = Forwarder::taker(lab.second.as_ref().expect("a second"), everywhere(family), policy.clone(), true);
    let serving = serve(&lab, family, &Script::answerer().bytes(BYTES).pace(5_000_000));
    let script = Script::opener(1).bytes(BYTES).pace(5_000_000);
    let client = converse(dial(&lab, family, &script), &script);
    let (from, server) = serving.join().expect("server");
    intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}\n{:?}", first.verdicts(), second.verdicts()));
    let spliced = |f: &Forwarder, through: bool| {
        let ended = if through { f.ended(1) } else { Vec::new() };
        assert!(ended.iter().all(|e| e.how == EndReason::Closed && e.splices > 0), "{ended:?}");
        ended.len() as u64
    };
    // the server sees the last of them
    let last = [FORWARDER_TO_SERVER, FORWARDER_TO_SERVER_SECOND];
    let (by_first, by_second) =
        (FORWARDER_TO_SECOND.ip(family) == from.ip(), last.iter().any(|a| a.ip(family) == from.ip()));
    [spliced(&first, by_first || by_second), spliced(&second, by_second)]
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_chain_as_long_as_the_hops_allow(family: Family) {
    assert_eq!(through_two(family, 8, &at_once()), [1, 1]);
    assert_eq!(through_two(family, 1, &at_once()), [1, 0]);
}

/// Another data path on the way, without translucent proxying, lets the connection pass. What it notes on packets must not reach
/// the proxy: a spliced segment would leave outside of its tunnel.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn another_data_path_on_the_way(family: Family) {
    let lab = Lab::new(Shape::TwoForwarders, Options { forwarding: true, ..Options::default() }).expect("lab");
    let asker = asker(&lab, family);
    let second = lab.second.as_ref().expect("a second");
    let _passed = second.run(|| Datapath::open(&datapath::Options::default())).expect("a data path");
    let f = Forwarder::taker(&lab.forwarder, everywhere(family), at_once(), false);
    passes(&lab, family, &f, true, |f| f.wait_state(FlowState::Spliced));
    assert_eq!((asker.verdict("opened"), asker.verdict("plain-refused")), (1, 0));
}

/// A route changes in the middle of a connection: it stays with its proxy, and only the next one does not meet it.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_connection_stays_with_its_proxy(family: Family) {
    let lab = Lab::simple(Shape::OneArmed).expect("lab");
    let _asker = asker(&lab, family);
    let f = Forwarder::taker(&lab.forwarder, everywhere(family), at_once(), false);
    let serving = serve(&lab, family, &Script::answerer().bytes(BYTES).pace(1_000_000));
    let script = Script::opener(1).bytes(BYTES).pace(1_000_000);
    let stream = dial(&lab, family, &script);
    let client = std::thread::spawn(move || converse(stream, &script));
    f.wait_state(FlowState::Spliced);
    // server and client reach each other without the forwarder from now on
    let (to_server, to_client) = (SERVER.ip(family), CLIENT.ip(family));
    lab.client.ip(&format!("route replace {to_server} dev c0\n")).expect("a route");
    lab.server.ip(&format!("route replace {to_client} dev s0\n")).expect("a route");
    let (client, (from, server)) = (client.join().expect("client"), serving.join().expect("server"));
    intact(&client, &server).expect("intact");
    assert_ne!(from.ip(), to_client);
    let from = exchange(&lab, family, 1000);
    assert_eq!(from.ip(), to_client);
}

/// A link between host and proxy is narrower than theirs, which only its router knows.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_narrow_path_to_the_proxy(family: Family) {
    for policy in [at_once(), by_hand()] {
        let lab = Lab::new(Shape::TwoForwarders, Options { forwarding: true, ..Options::default() }).expect("lab");
        lab.forwarder.ip("link set f1 mtu 1400\n").expect("a narrow link");
        let asker = asker(&lab, family);
        let f = Forwarder::taker(lab.second.as_ref().expect("a second"), everywhere(family), policy, false);
        let serving = serve(&lab, family, &Script::answerer().bytes(1000));
        let script = Script::opener(1).bytes(BYTES);
        let client = converse(dial(&lab, family, &script), &script);
        let (_, server) = serving.join().expect("server");
        intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
        assert_eq!(asker.verdict("opened"), 1);
        assert!(asker.verdict("too-big") > 0);
    }
}

/// A device that appears later is attached, behind the data path where packets leave.
#[test]
#[ignore = "root"]
fn devices_that_appear_later() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let asker = asker(&lab, Family::V4);
    lab.client.ip("link add v0 type veth peer name v1\n").expect("a device");
    lab.client.run(|| asker.follow()).expect("attached");
    let all = asker.attached();
    assert!(all.len() == 6, "both ends and the device towards the forwarder, each twice: {all:?}");
    lab.client.ip("link del v0\n").expect("removed");
    lab.client.run(|| asker.follow()).expect("followed");
}

/// SYNs of nobody, more than there is room for half-open connections: those that are open do not suffer, and new ones open.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_flood_of_syns_that_ask(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let asker = asker(&lab, family);
    let f = Forwarder::taker(&lab.forwarder, everywhere(family), at_once(), false);
    let serving = serve(&lab, family, &Script::answerer().bytes(BYTES).pace(1_000_000));
    let script = Script::opener(1).bytes(BYTES).pace(1_000_000);
    let stream = dial(&lab, family, &script);
    let client = std::thread::spawn(move || converse(stream, &script));
    f.wait_state(FlowState::Spliced);
    let nobody = Nobody::new(&lab, family);
    let [high, low] = TPOT_EXID.to_be_bytes();
    for port in 1..=u16::MAX {
        nobody.asks_with(port, SERVER.port(family, PORT), vec![253, 8, high, low, 1, 8, 0, 0]);
    }
    let (client, (_, server)) = (client.join().expect("client"), serving.join().expect("server"));
    intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    exchange(&lab, family, 1000);
    assert_eq!(asker.verdict("opened"), 2);
}

/// The host crashes and comes back, and uses the port of a connection that the proxy still has.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_host_that_has_forgotten_its_connection(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let f = Forwarder::taker(&lab.forwarder, everywhere(family), at_once(), false);
    let before = asker(&lab, family);
    let listener = lab.server.run(|| TcpListener::bind(SERVER.port(family, PORT))).expect("listen");
    let echo = std::thread::spawn(move || {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().expect("accept");
            stream.set_read_timeout(Some(PATIENCE)).expect("an option");
            let mut back = [0; 5];
            while stream.read_exact(&mut back).is_ok() {
                stream.write_all(&back).expect("the echo");
            }
        }
    });
    let talk = |mut stream: &TcpStream| {
        stream.set_read_timeout(Some(PATIENCE)).expect("an option");
        stream.write_all(b"hello").expect("sent");
        let mut back = [0; 5];
        stream.read_exact(&mut back).expect("an echo");
        assert_eq!(&back, b"hello");
    };
    let stream = dial(&lab, family, &Script::opener(1));
    talk(&stream);
    f.wait_state(FlowState::Spliced);
    let mut script = Script::opener(1);
    script.local = Some(stream.local_addr().expect("bound"));
    setsockopt(&stream, TcpRepair, &1).expect("repair mode: the close is silent");
    drop((stream, before));
    let _after = asker(&lab, family);
    let again = lab.client.run(|| connect(SERVER.port(family, PORT), &script)).expect("the port is of use again");
    talk(&again);
    drop(again);
    echo.join().expect("server");
}

/// A middlebox drops everything that is tunnelled: the connection opens without a proxy, and the next one at once.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_path_that_drops_tunnels(family: Family) {
    let lab = Lab::new(Shape::TwoForwarders, Options { forwarding: true, ..Options::default() }).expect("lab");
    let asker = asker(&lab, family);
    let _f = Forwarder::taker(lab.second.as_ref().expect("a second"), everywhere(family), at_once(), false);
    let drop = "table inet t { chain c { type filter hook forward priority 0; meta l4proto { 4, 41 } drop; }; }";
    lab.forwarder.execute("nft", &[drop]).expect("a rule");
    for avoided in [0, 1] {
        let from = exchange(&lab, family, BYTES);
        assert_eq!(from.ip(), CLIENT.ip(family), "the server sees the client itself");
        assert_eq!((asker.verdict("avoided"), asker.verdict("opened")), (avoided, 0));
    }
}

/// A client that knows nothing of all this: the proxy that it uses asks for the next one.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn an_edge_proxy_asks_for_its_clients(family: Family) {
    // whichever of the two programs on the edge starts first
    for tpot_first in [false, true] {
        let lab = Lab::new(Shape::TwoForwarders, Options { forwarding: true, ..Options::default() }).expect("lab");
        let (listen, server) = (FORWARDER_TO_CLIENT.port(family, PORT + 1), SERVER.port(family, PORT));
        let before = tpot_first.then(|| lab.forwarder.run(TestTpot::open));
        let edge = Forwarder::start(&lab, listen, server, at_once());
        let tpot = before.unwrap_or_else(|| lab.forwarder.run(TestTpot::open));
        tpot.ask(&everywhere(family)).and_then(|()| tpot.trust(&everywhere(family))).expect("rules");
        let second = Forwarder::taker(lab.second.as_ref().expect("a second"), everywhere(family), at_once(), false);
        let serving = serve(&lab, family, &Script::answerer().bytes(BYTES).pace(5_000_000));
        let script = Script::opener(1).bytes(BYTES).pace(5_000_000);
        let stream = lab.client.run(|| connect(listen, &script)).expect("the client connects to its proxy");
        let client = converse(stream, &script);
        let (_, served) = serving.join().expect("server");
        intact(&client, &served).unwrap_or_else(|e| panic!("{e}\n{:?}\n{:?}", edge.verdicts(), second.verdicts()));
        for e in [edge.ended(1).remove(0), second.ended(1).remove(0)] {
            assert_eq!((&e.how, e.bytes_up, e.bytes_down), (&EndReason::Closed, BYTES, BYTES), "{e:?}");
            assert!(e.splices > 0, "{e:?}");
        }
        assert_eq!(tpot.verdict("opened"), 1);
    }
}

/// Only the processes of a cgroup ask.
#[test]
#[ignore = "root"]
fn connections_of_a_chosen_cgroup_ask() {
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("/proc");
    let root =
        mounts.lines().filter_map(|l| l.split_once(" cgroup2 ").map(|(l, _)| l)).find_map(|l| l.split(' ').nth(1));
    let group = Path::new(root.expect("cgroup2 is mounted")).join(format!("longsplice-test-{}", std::process::id()));
    std::fs::create_dir(&group).expect("a cgroup");
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).expect("lab");
    let tpot =
        lab.client.run(|| TestTpot::with(&TpotOptions { cgroup: Some(group.clone()), ..TpotOptions::default() }));
    tpot.ask(&everywhere(Family::V4)).expect("a rule");
    for (inside, asked) in [(false, 0), (true, 1)] {
        let serving = serve(&lab, Family::V4, &Script::answerer());
        let join = if inside { format!("echo $$ > {}/cgroup.procs; ", group.display()) } else { String::new() };
        let dial = format!("{join}exec bash -c 'exec 3<>/dev/tcp/{}/{PORT}'", SERVER.ip(Family::V4));
        lab.client.execute("bash", &["-c", &dial]).expect("connected");
        serving.join().expect("server");
        assert_eq!(tpot.verdict("asked"), asked);
    }
    std::fs::remove_dir(&group).expect("it is empty");
}

/// What the lab delays or duplicates passes the client's programs once: it is impaired on the wire.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn impaired_packets_pass_the_programs_once(family: Family) {
    let delays = [Duration::ZERO, Duration::from_millis(1)];
    for delay in delays {
        let lab = Lab::new(Shape::TwoDevices, Options { large_packets: false, ..Options::default() }).expect("lab");
        let asker = asker(&lab, family);
        let _f = Forwarder::taker(&lab.forwarder, everywhere(family), at_once(), false);
        let twice = Impair { duplicate: 1.0, delay, ..Impair::default() };
        let ways = [LinkDirection::FromClient, LinkDirection::ToClient];
        let impaired = ways.map(|way| lab.impair(way, twice).expect("impaired"));
        lab.client.run(|| asker.follow()).expect("attached to the devices of the detour, too");
        exchange(&lab, family, 100_000);
        assert!(impaired.iter().all(|way| way.counters().duplicated > 0));
        let sent = ["asked", "opened", "not-asked", "second-answer", "plain-refused", "unproven"];
        assert_eq!(sent.map(|v| asker.verdict(v)), [1, 1, 0, 0, 0, 0], "{family:?} {delay:?}");
    }
}

/// Losses, duplicates and changes of order on the tunnel and behind it, with packets as on a wire.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn spliced_and_taken_back_while_packets_are_lost(family: Family) {
    let lab = Lab::new(Shape::TwoDevices, Options { large_packets: false, ..Options::default() }).expect("lab");
    let bad = Impair { loss: 0.01, duplicate: 0.01, reorder: 0.01, ..Impair::default() };
    let ways = [LinkDirection::FromClient, LinkDirection::ToClient, LinkDirection::FromServer, LinkDirection::ToServer];
    let asker = asker(&lab, family);
    let f = Forwarder::taker(&lab.forwarder, everywhere(family), by_hand(), false);
    let _bad: Vec<_> = ways.iter().map(|way| lab.impair(*way, bad).expect("impaired")).collect();
    let serving = serve(&lab, family, &Script::answerer().bytes(BYTES).pace(3_000_000));
    let script = Script::opener(1).bytes(BYTES).pace(3_000_000);
    let stream = dial(&lab, family, &script);
    let client = std::thread::spawn(move || converse(stream, &script));
    for _ in 0..5 {
        f.wait_state(FlowState::Copying);
        f.command(Command::Splice);
        f.wait_state(FlowState::Spliced);
        f.command(Command::Unsplice);
    }
    let (client, (_, server)) = (client.join().expect("client"), serving.join().expect("server"));
    intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    assert_eq!([asker.verdict("opened"), asker.verdict("failed")], [1, 0]);
}
