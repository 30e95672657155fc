//! Translucent proxying: hosts that ask for a proxy, and a forwarder that intercepts their connections.

mod packets;

use longsplice_datapath::Destinations;
use longsplice_engine::{Command, EndReason, FlowState, Policy, SpliceWhen};
use longsplice_lab::{
    Family, Lab, Options, Shape,
    process::wait_for,
    topology::{CLIENT, SERVER},
    traffic::{Report, Script, connect, converse, intact, listen},
};
use longsplice_tests::{Forwarder, TestTpot, at_once, by_hand};
use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    thread::JoinHandle,
    time::Duration,
};

const PORT: u16 = 7000;
const BYTES: u64 = 5_000_000;
/// Longer than any retransmission takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// All addresses of a family, at the port of the tests.
fn everywhere(family: Family) -> Destinations {
    let net = match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    };
    Destinations { net, prefix: 0, ports: PORT..=PORT }
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

/// Runs one connection through a forwarder that intercepts it.
fn through(family: Family, policy: Policy, spliced: bool, drive: impl FnOnce(&Forwarder)) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let asker = asker(&lab, family);
    let f = Forwarder::taker(&lab, everywhere(family), policy);
    let serving = serve(&lab, family, &Script::answerer().bytes(BYTES).pace(5_000_000));
    let script = Script::opener(1).bytes(BYTES).pace(5_000_000);
    let stream = dial(&lab, family, &script);
    let client = std::thread::spawn(move || converse(stream, &script));
    drive(&f);
    let (client, (from, server)) = (client.join().expect("client"), serving.join().expect("server"));
    intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    assert_ne!(from.ip(), CLIENT.ip(family), "the server sees the proxy");
    let e = f.ended(1).remove(0);
    eprintln!("client {client}\nserver {server}\n{e:?} {:?}", f.verdicts());
    assert_eq!((&e.how, e.bytes_up, e.bytes_down), (&EndReason::Closed, BYTES, BYTES), "{e:?}");
    assert_eq!(e.splices > 0, spliced, "{e:?}");
    assert_eq!(asker.verdict("opened"), 1);
    assert_eq!([asker.verdict("plain-refused"), asker.verdict("unproven"), asker.verdict("failed")], [0; 3]);
}

#[test]
#[ignore = "root"]
fn copied() {
    for family in Family::BOTH {
        through(family, Policy { when: SpliceWhen::Never, ..Policy::default() }, false, |_| {});
    }
}

#[test]
#[ignore = "root"]
fn spliced_at_once() {
    for family in Family::BOTH {
        through(family, at_once(), true, |f| f.wait_state(FlowState::Spliced));
    }
}

#[test]
#[ignore = "root"]
fn switched_again_and_again() {
    for family in Family::BOTH {
        through(family, by_hand(), true, |f| {
            for _ in 0..10 {
                f.wait_state(FlowState::Copying);
                f.command(Command::Splice);
                f.wait_state(FlowState::Spliced);
                f.command(Command::Unsplice);
            }
        });
    }
}

/// Without a proxy on the path, or with one that does not want the connection, the server itself answers.
#[test]
#[ignore = "root"]
fn nobody_intercepts() {
    for family in Family::BOTH {
        let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).expect("lab");
        let asker = asker(&lab, family);
        let serving = serve(&lab, family, &Script::answerer().bytes(BYTES));
        let script = Script::opener(1).bytes(BYTES);
        let client = converse(dial(&lab, family, &script), &script);
        let (from, server) = serving.join().expect("server");
        intact(&client, &server).expect("intact");
        assert_eq!(from.ip(), CLIENT.ip(family), "the server sees the client itself");
        assert_eq!([asker.verdict("asked"), asker.verdict("opened"), asker.verdict("encapsulated")], [1, 0, 0]);
    }
}
