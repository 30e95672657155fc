//! A process is killed with SIGKILL in situations that other tests hardly reach; another one takes over.
use longsplice_datapath::{Datapath, IdleLeg, NextHop, Options, Pair, Tuple};
use longsplice_engine::FlowState;
use longsplice_lab::{
    Family, Lab, Shape,
    process::wait_for,
    topology::{CLIENT, FORWARDER_TO_CLIENT, FORWARDER_TO_SERVER, SERVER},
    traffic::{
        Chunks, Cue, Ending, Report, Script, Serving, Start, StreamEnd, connect, converse, intact, listen, serve,
    },
};
use longsplice_tests::{Forwarder, at_once, process::Process};
use std::{collections::HashSet, net::SocketAddr, thread, thread::JoinHandle, time::Duration};
use test_case::test_case;

/// Time limit for every wait.
const PATIENCE: Duration = Duration::from_secs(30);

struct Place {
    lab: Lab,
    front: SocketAddr,
    server: SocketAddr,
}

impl Place {
    fn new(family: Family) -> Place {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        Place { lab, front: FORWARDER_TO_CLIENT.port(family, 7000), server: SERVER.port(family, 7000) }
    }

    fn process(&self, policy: &str) -> Process {
        Process::start(&self.lab, self.front, self.server, policy)
    }

    fn talk(&self, script: Script, answer: Script) -> (JoinHandle<Report>, Serving) {
        let (front, server) = (self.front, self.server);
        let serving = self.lab.server.run(|| serve(listen(server, &answer).expect("listen"), 1, answer.clone()));
        let client = self.lab.client.spawn(move || converse(connect(front, &script).expect("connect"), &script));
        (client, serving)
    }
}

fn reports((client, serving): (JoinHandle<Report>, Serving)) -> (Report, Report) {
    (client.join().expect("client"), serving.join().remove(0))
}

/// With both paths stopped, so that nothing passes in between.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn while_it_makes_sockets_for_a_released_flow(family: Family) {
    let place = Place::new(family);
    let mut first = place.process("at-once");
    // idle from time to time
    let script = Script::opener(1).bytes(3_000_000).pace(1_000_000).chunks(Chunks::Fixed(50_000));
    let answer = Script::answerer().bytes(2_000_000).pace(700_000).chunks(Chunks::Fixed(40_000));
    let talk = place.talk(script, answer);
    first.wait_flows(1, FlowState::Spliced);
    first.ask("release");
    first.wait_flows(1, FlowState::Released);
    first.ask("stop");
    first.kill();
    let mut second = place.process("at-once");
    second.wait_flows(1, FlowState::Released);
    let (client, server) = reports(talk);
    intact(&client, &server).unwrap_or_else(|why| panic!("{why}\n{:?}", second.ask("counters")));
    wait_for(Duration::from_secs(10), || second.flows().is_empty().then_some(())).expect("it is over");
    second.end();
}

/// The kernel delivers the data in the first process's sockets. The drain ends long after the second process has started.
#[test]
#[ignore = "root"]
fn while_a_slow_receiver_drains() {
    let place = Place::new(Family::V4);
    let mut first = place.process("by-hand");
    const FIRST: u64 = 50_000; // what a socket accepts at once
    let reads = Cue::default();
    let script = Script {
        receive_buffer: Some(16_384),
        read_after: Some(reads.clone()),
        ..Script::opener(2).bytes(10 * FIRST).start(Start::Received(FIRST)).deadline(4 * PATIENCE)
    };
    // the rest comes when the first part has been drained
    let answer = Script::answerer_of(2).bytes(10 * FIRST).ahead(FIRST).deadline(4 * PATIENCE);
    let talk = place.talk(script, answer);
    first.wait_flows(1, FlowState::Copying);
    let waits = || {
        let sockets = place.lab.forwarder.execute("ss", &["-tnH", "sport = :7000"]).expect("ss");
        sockets.split_whitespace().nth(2).and_then(|owed| owed.parse::<u64>().ok()).filter(|owed| *owed > 0)
    };
    wait_for(PATIENCE, waits).expect("the socket holds data for the client");
    first.ask("splice");
    first.wait_flows(1, FlowState::Draining);
    first.kill();
    let mut second = place.process("by-hand");
    second.wait_flows(1, FlowState::Draining);
    reads.give();
    second.wait_flows(1, FlowState::Released);
    let (client, server) = reports(talk);
    intact(&client, &server).unwrap_or_else(|why| panic!("{why}\n{:?}", second.ask("counters")));
    second.end();
}

/// Data that the client sends after the limit belongs to the proxy: it is not forwarded, and both hosts are reset.
#[test]
#[ignore = "root"]
fn while_a_limit_is_set() {
    const ALL: u64 = 1_000_000;
    for (seed, late) in [(3, false), (4, true)] {
        let place = Place::new(Family::BOTH[seed as usize % 2]);
        let mut first = place.process("client-data");
        let script = Script::opener(seed).bytes(1000).start(Start::Received(ALL)).ending(Ending::Hold);
        let answer = Script::answerer_of(seed).bytes(ALL).pace(ALL / 3).ending(Ending::Hold);
        let talk = place.talk(script, answer);
        first.wait_flows(1, FlowState::Spliced);
        first.kill();
        if late {
            thread::sleep(Duration::from_secs(5)); // it has been unspliced
        }
        let mut second = place.process("client-data");
        let (client, server) = reports(talk);
        for report in [&client, &server] {
            assert!(
                report.mismatch.is_none() && report.end == StreamEnd::Reset,
                "{client}; {server} {:?}",
                second.ask("counters")
            );
        }
        assert_eq!(
            (client.received, server.received),
            (ALL, 0),
            "what was to pass, and nothing else: {client}; {server}"
        );
        wait_for(Duration::from_secs(10), || second.flows().is_empty().then_some(())).expect("it is over");
        second.end();
    }
}

/// Flows known only from the tables, as after a release. All are taken over once, while a client is served already.
#[test]
#[ignore = "root"]
fn many_released_flows() {
    const FLOWS: u32 = 200_000;
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let [local, own] = [FORWARDER_TO_CLIENT, FORWARDER_TO_SERVER].map(|a| a.port(Family::V4, 0).ip());
    let leg = |net: u8, n: u32, local: SocketAddr| IdleLeg {
        leg: Tuple { remote: ([198, net + (n >> 16) as u8, (n >> 8) as u8, n as u8], 40_000).into(), local },
        hop: NextHop { device: 1, to: [2; 6], from: [4; 6] },
        end: 1,
        ack: 1,
        scale: 7,
    };
    let flow = |n| Pair::new(leg(18, n, SocketAddr::new(local, 7000)), leg(28, n, SocketAddr::new(own, 20_000)));
    lab.forwarder.run(|| {
        let options = Options { max_flows: FLOWS + 16, ..Options::default() };
        let earlier = Datapath::open(&options).expect("the data path opens: root, kernel 6.6, bpffs");
        earlier.install(&(0..FLOWS).map(flow).collect::<Vec<_>>()).expect("installed");
    });
    let (proxy, server) = (FORWARDER_TO_CLIENT.port(Family::V4, 7000), SERVER.port(Family::V4, 7000));
    let answer = Script::answerer().bytes(10_000);
    let serving = lab.server.run(|| serve(listen(server, &answer).expect("listen"), 1, answer.clone()));
    let f = Forwarder::start(&lab, proxy, server, at_once());
    let script = Script::opener(1).bytes(10_000);
    let client = lab.client.run(|| converse(connect(proxy, &script).expect("connect"), &script));
    intact(&client, &serving.join()[0]).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    let ours = f.ended(1).len();
    let listed = f.splicer.flows().len();
    assert!(
        listed < FLOWS as usize,
        "all were adopted before the client was served, which shows nothing: take more flows"
    );
    // The last of them is looked for by its number: a list of so many takes longer than adopting them.
    let last = || (!f.splicer.flows_after(FLOWS.into(), 1, None).is_empty()).then_some(());
    wait_for(2 * PATIENCE, last).unwrap_or_else(|| panic!("{} are listed", f.splicer.flows().len()));
    let all = f.splicer.flows();
    let legs: HashSet<_> = all.iter().map(|f| (f.client, f.server)).collect();
    assert_eq!((legs.len(), ours), (all.len(), 1), "each once");
    let (mut paged, mut last) = (0, 0);
    while let page @ [_, ..] = &f.splicer.flows_after(last, 1000, None)[..] {
        assert!(page.is_sorted_by_key(|f| f.id) && page[0].id > last);
        (paged, last) = (paged + page.len(), page[page.len() - 1].id);
    }
    assert_eq!(paged, all.len());
}

/// By the time the flow is checked, its addresses are in use by another connection: that one must stay.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_client_that_comes_again_at_once(family: Family) {
    let place = Place::new(family);
    let client = CLIENT.port(family, 40_001);
    let mut first = place.process("at-once");
    let script = |seed, bytes| Script { local: Some(client), ..Script::opener(seed).bytes(bytes).pace(1_000_000) };
    let answer = Script::answerer().bytes(100_000).deadline(4 * PATIENCE);
    let (front, server) = (place.front, place.server);
    let serving = place.lab.server.run(|| serve(listen(server, &answer).expect("listen"), 2, answer.clone()));
    let enough = Cue::default(); // given when the next process has seen it
    let earlier = script(1, 0).until(&enough, 1_000_000).deadline(4 * PATIENCE);
    let earlier = place.lab.client.spawn(move || converse(connect(front, &earlier).expect("connect"), &earlier));
    first.wait_flows(1, FlowState::Spliced);
    first.kill();
    let mut second = place.process("at-once");
    second.wait_flows(1, FlowState::Released);
    enough.give();
    earlier.join().expect("client");
    // no TIME-WAIT may block the port
    place.lab.client.sysctl("net.ipv4.tcp_tw_reuse", "1").expect("sysctl");
    let again = script(2, 3_000_000).deadline(PATIENCE);
    let again = place.lab.client.run(|| converse(connect(front, &again).expect("connect"), &again));
    let servers = serving.join();
    let other = servers.iter().find(|s| s.seed == again.seed).expect("it came");
    intact(&again, other).unwrap_or_else(|why| panic!("{family:?}: {why}"));
    second.end();
}
