//! Listening sockets whose clients shake hands with the server: from host to host, but with our addresses.
use longsplice_datapath::Tuple;
use longsplice_engine::{Command, EndReason, FlowState, OpenOptions, Policy, SpliceWhen};
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection, Options, Shape,
    process::wait_for,
    topology::{CLIENT, FORWARDER_TO_CLIENT, SERVER},
    traffic::{Report, Script, connect, converse, intact, listen},
};
use longsplice_tests::{Forwarder, at_once, by_hand};
use std::{
    net::{SocketAddr, TcpStream},
    thread::JoinHandle,
    time::Duration,
};

const PORT: u16 = 7000;
const SERVER_PORT: u16 = 8000;
const BYTES: u64 = 5_000_000;
/// Longer than any retransmission takes.
const PATIENCE: Duration = Duration::from_secs(20);

fn listening(family: Family) -> SocketAddr {
    FORWARDER_TO_CLIENT.port(family, PORT)
}

fn server(family: Family) -> SocketAddr {
    SERVER.port(family, SERVER_PORT)
}

fn forwarder(lab: &Lab, family: Family, policy: Policy) -> Forwarder {
    Forwarder::plugged(lab, listening(family), [server(family); 2], policy, OpenOptions::default())
}

/// Serves one connection at the server. Returns the client's apparent address and the report.
fn serve(lab: &Lab, family: Family, script: &Script) -> JoinHandle<(SocketAddr, Report)> {
    let listener = lab.server.run(|| listen(server(family), script)).expect("listen");
    let script = script.clone();
    std::thread::spawn(move || {
        listener.set_nonblocking(true).expect("nonblocking");
        let (stream, from) = wait_for(PATIENCE, || listener.accept().ok()).expect("a connection comes to the server");
        stream.set_nonblocking(false).expect("blocking");
        (from, converse(stream, &script))
    })
}

/// Opens a connection of the client. Returns it with its local address.
fn dial(lab: &Lab, family: Family, script: &Script) -> (TcpStream, SocketAddr) {
    let mut script = script.clone();
    script.local = Some(CLIENT.port(family, 0));
    let c = lab.client.run(|| connect(listening(family), &script)).expect("the client connects");
    let own = c.local_addr().expect("bound");
    (c, own)
}

fn through(lab: &Lab, family: Family, policy: Policy, drive: impl FnOnce(&Forwarder, [Tuple; 2])) {
    let f = forwarder(lab, family, policy);
    let serving = serve(lab, family, &Script::answerer().bytes(BYTES).pace(5_000_000));
    let script = Script::opener(1).bytes(BYTES).pace(5_000_000);
    let (stream, own) = dial(lab, family, &script);
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
    assert_eq!(f.splicer.foreign_counts().left, 0);
    assert!(f.verdict("handshake") >= 3, "{:?}", f.verdicts());
    eprintln!("client {client}\nserver {served}\n{e:?} {:?}", f.verdicts());
}

#[test]
#[ignore = "root"]
fn spliced_from_the_first_byte() {
    for family in Family::BOTH {
        through(&Lab::simple(Shape::TwoDevices).expect("lab"), family, at_once(), |f, legs| {
            f.wait_state(FlowState::Spliced);
            let d = f.splicer.datapath().expect("kernel path");
            let [a, b] = legs.map(|leg| d.path(&leg).expect("a path entry"));
            assert_eq!((a.end, b.end), (a.sent, b.sent), "the same numbers on both legs");
        });
    }
}

#[test]
#[ignore = "root"]
fn copied() {
    for family in Family::BOTH {
        let never = Policy { when: SpliceWhen::Never, ..Policy::default() };
        through(&Lab::simple(Shape::TwoDevices).expect("lab"), family, never, |_, _| {});
    }
}
