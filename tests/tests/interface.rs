//! The engine as another program uses it: events of flows, and handles that are dropped.
use longsplice_engine::{Command, EndReason, FlowEventKind, FlowState, OpenOptions, Splicer};
use longsplice_lab::{
    Family, Lab, Shape,
    process::wait_for,
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::{Chunks, Script, connect, converse, intact, listen, serve},
};
use longsplice_tests::{Forwarder, by_hand};
use std::time::Duration;
use test_case::test_case;

const PORT: u16 = 7000;
const PATIENCE: Duration = Duration::from_secs(20);

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_subscriber_hears_of_each_step(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let (front, server) = (FORWARDER_TO_CLIENT.port(family, PORT), SERVER.port(family, PORT));
    // idle now and then, as a released flow must be to come back
    let answer = Script::answerer().bytes(3_000_000).pace(500_000).chunks(Chunks::Fixed(40_000));
    let serving = lab.server.run(|| serve(listen(server, &answer).expect("listen"), 1, answer.clone()));
    let f = Forwarder::start(&lab, front, server, by_hand());
    let mut events = f.splicer.subscribe();
    let script = Script::opener(1).bytes(4_000_000).pace(500_000).chunks(Chunks::Fixed(40_000));
    let client = lab.client.spawn(move || converse(connect(front, &script).expect("connect"), &script));
    f.wait_state(FlowState::Copying);
    let id = f.splicer.flows()[0].id;
    for (command, state) in [
        (Command::Splice, FlowState::Spliced),
        (Command::Release, FlowState::Released),
        (Command::Unsplice, FlowState::Copying),
    ] {
        f.command(command);
        f.wait_state(state);
    }
    let client = client.join().expect("client");
    intact(&client, &serving.join()[0]).unwrap_or_else(|e| panic!("{e}"));
    f.ended(1);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("runtime");
    let heard: Vec<_> = runtime.block_on(async {
        let mut heard = Vec::new();
        for _ in 0..5 {
            let next = tokio::time::timeout(PATIENCE, events.next()).await;
            heard.push(next.expect("an event").expect("the engine is open"));
        }
        heard
    });
    assert!(heard.iter().all(|event| event.flow == id), "{heard:?}");
    let kinds: Vec<_> = heard.iter().map(|event| event.kind).collect();
    let ended = FlowEventKind::Ended(EndReason::Closed);
    let switches = [FlowEventKind::Spliced, FlowEventKind::Released, FlowEventKind::TakenBack];
    assert_eq!(kinds, [&[FlowEventKind::Begun], &switches[..], &[ended]].concat());
    let begun = heard[0].begun().expect("what is known of it");
    assert_eq!((begun.id, begun.server), (id, server));
}

#[test]
#[ignore = "root"]
fn the_last_handle_detaches_the_programs() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    lab.forwarder.run(|| {
        let splicer = Splicer::open(&OpenOptions::default()).expect("the data path opens");
        let pin = splicer.pin().expect("a data path").to_owned();
        let other = splicer.clone();
        drop(splicer);
        assert!(pin.exists() && !other.devices().is_empty(), "another handle is left");
        drop(other);
        wait_for(PATIENCE, || (!pin.exists()).then_some(())).expect("nothing is left");
        Splicer::open(&OpenOptions::default()).expect("another one may begin").close().expect("closed");
    });
}
