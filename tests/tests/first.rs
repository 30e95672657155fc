//! The thin whole: a real client, through a real splice, to a real server.
use longsplice_engine::FlowState;
use longsplice_lab::{
    Family, Lab, Shape,
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::{Script, connect, converse, intact, listen, serve},
};
use longsplice_tests::{Forwarder, at_once};

fn through(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let server = SERVER.port(family, 7000);
    let answer = Script::answerer().bytes(20_000_000).pace(10_000_000);
    let serving = lab.server.run(|| serve(listen(server, &answer).expect("listen"), 1, answer.clone()));
    let proxy = FORWARDER_TO_CLIENT.port(family, 7000);
    let f = Forwarder::start(&lab, proxy, server, at_once());
    let script = Script::opener(1).bytes(20_000_000).pace(10_000_000);
    let client = lab.client.spawn(move || converse(connect(proxy, &script).expect("connect"), &script));
    f.wait_state(FlowState::Spliced);
    let client = client.join().expect("client");
    eprintln!("client {client}\n{:?}", f.verdicts());
    let server = serving.join().remove(0);
    eprintln!("server {server}");
    intact(&client, &server).expect("intact");
    let e = f.ended(1);
    eprintln!("{e:?} {:?}", f.verdicts());
    assert_eq!((e[0].bytes_up, e[0].bytes_down), (20_000_000, 20_000_000));
    assert!(e[0].spliced_down > 1_000_000);
}

#[test]
fn v4() {
    through(Family::V4);
}

#[test]
fn v6() {
    through(Family::V6);
}
