//! Packets delivered directly to the other end of a veth, and devices that do not allow this.
use longsplice_datapath::{Datapath, OpenError, Options, Pair};
use longsplice_engine::{Command, DatapathOptions, EndReason, FlowState};
use longsplice_lab::{
    Family, Lab, Shape,
    process::wait_for,
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::{Script, connect, converse, intact, listen, serve},
};
use longsplice_tests::{Forwarder, by_hand};
use std::time::Duration;

const BYTES: u64 = 20_000_000;
/// Number of switches of a flow in one test.
const CYCLES: u32 = 20;

/// Bytes sent on a device of the forwarder.
fn sent_by(lab: &Lab, device: &str) -> u64 {
    let table = lab.forwarder.run(|| std::fs::read_to_string("/proc/thread-self/net/dev")).expect("net/dev");
    let line = table.lines().find_map(|l| l.trim().strip_prefix(device)?.strip_prefix(':')).expect("the device");
    line.split_whitespace().nth(8).expect("a column").parse().expect("a number")
}

fn peers(lab: &Lab) -> Vec<String> {
    vec![lab.client_device().into(), lab.server_device().into()]
}

fn through(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let server = SERVER.port(family, 7000);
    let answer = Script::answerer().bytes(BYTES).pace(10_000_000);
    let serving = lab.server.run(|| serve(listen(server, &answer).expect("listen"), 1, answer.clone()));
    let proxy = FORWARDER_TO_CLIENT.port(family, 7000);
    let options = DatapathOptions { peer: peers(&lab), ..DatapathOptions::default() }.into();
    let f = Forwarder::open(&lab, proxy, server, by_hand(), options);
    let script = Script::opener(1).bytes(BYTES).pace(10_000_000);
    let client = lab.client.spawn(move || converse(connect(proxy, &script).expect("connect"), &script));

    for cycle in 0..CYCLES {
        f.wait_state(FlowState::Copying);
        f.command(Command::Splice);
        f.wait_state(FlowState::Spliced);
        if cycle + 1 < CYCLES {
            f.command(Command::Unsplice);
        }
    }
    let sent = || [lab.client_device(), lab.server_device()].map(|d| sent_by(&lab, d));
    let passed = || f.splicer.flows().first().map(|flow| Pair::new(flow.bytes_up, flow.bytes_down));
    let (sent_before, passed_before) = (sent(), passed().expect("a flow"));
    let enough = |now: &Pair<u64>| now.zip(passed_before).iter().all(|(now, then)| *now >= then + 2_000_000);
    wait_for(Duration::from_secs(10), || passed().filter(enough)).expect("bytes flow");
    let past: Vec<u64> = sent().iter().zip(sent_before).map(|(now, then)| now - then).collect();
    assert!(past.iter().all(|n| *n < 200_000), "megabytes pass, but not by the devices: {past:?} {:?}", f.verdicts());

    let (client, server) = (client.join().expect("client"), serving.join().remove(0));
    intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    let e = f.ended(1).remove(0);
    assert_eq!((&e.how, e.bytes_up, e.bytes_down), (&EndReason::Closed, BYTES, BYTES), "{e:?}");
    eprintln!("client {client}\nserver {server}\n{e:?} {:?}", f.verdicts());
}

#[test]
#[ignore = "root"]
fn v4() {
    through(Family::V4);
}

#[test]
#[ignore = "root"]
fn v6() {
    through(Family::V6);
}

/// Why the data path cannot be opened in the forwarder with direct delivery over this device.
fn refused(lab: &Lab, devices: &[&str], peer: &str) -> String {
    let devices = devices.iter().map(|d| d.to_string()).collect();
    let options = Options { devices, peer: vec![peer.into()], max_flows: 16, ..Options::default() };
    match lab.forwarder.run(|| Datapath::open(&options).map(|d| d.remove())) {
        Ok(removed) => panic!("{peer} is taken: {removed:?}"),
        Err(e @ (OpenError::Peer { .. } | OpenError::Device(_))) => e.to_string(),
        Err(e) => panic!("{e}"),
    }
}

#[test]
#[ignore = "root"]
fn devices_without_an_end_elsewhere_are_refused() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let add = ["link add near type veth peer name far", "link add plain type bridge"];
    for arguments in add.into_iter().chain(["link set near up", "link set far up", "link set plain up"]) {
        lab.forwarder.execute("ip", &arguments.split(' ').collect::<Vec<_>>()).expect("ip");
    }
    assert!(
        refused(&lab, &[], "plain").contains("device plain: packets cannot be handed to its other end: it is no veth")
    );
    assert!(refused(&lab, &[], "near").contains("in this network namespace: leave it out, or move"));
    assert!(refused(&lab, &["f0"], "f1").contains("not among the devices to splice on"));
    assert!(refused(&lab, &[], "f9").contains("device f9: not found"));
}
