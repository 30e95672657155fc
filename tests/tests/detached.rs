//! Someone detaches the programs while connections are copied and spliced: the
//! programs are attached again, and no host receives a wrong byte or waits forever.
use longsplice_datapath::testing::detach;
use longsplice_engine::{Command, FlowState, Policy};
use longsplice_lab::{
    Family, Lab, Shape,
    process::wait_for,
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::{Report, Script, StreamEnd, connect, converse, intact, listen, serve},
};
use longsplice_tests::{Forwarder, at_once, by_hand};
use std::{thread, time::Duration};

const LASTING: Duration = Duration::from_secs(4);
/// Larger than the largest window in these tests.
const BEYOND_A_WINDOW: u64 = 12_000_000;

/// Runs a connection with traffic both ways, and calls `meanwhile` during it.
fn converse_and(
    seed: u64,
    policy: Policy,
    pace: u64,
    meanwhile: impl FnOnce(&Forwarder),
) -> (Forwarder, Report, Report) {
    let family = Family::BOTH[seed as usize % 2];
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let server = SERVER.port(family, 7000);
    let answer = Script::answerer().lasting(LASTING, pace).deadline(6 * LASTING);
    let serving = lab.server.run(|| serve(listen(server, &answer).expect("listen"), 1, answer.clone()));
    let proxy = FORWARDER_TO_CLIENT.port(family, 7000);
    let f = Forwarder::start(&lab, proxy, server, policy);
    let script = Script::opener(seed).lasting(LASTING, pace).deadline(6 * LASTING);
    let client = lab.client.spawn(move || converse(connect(proxy, &script).expect("connect"), &script));
    meanwhile(&f);
    let (client, server) = (client.join().expect("client"), serving.join().remove(0));
    for report in [&client, &server] {
        assert!(report.mismatch.is_none(), "{seed}: {report}");
        assert!(
            [&report.end, &report.send_end].iter().all(|h| matches!(h, StreamEnd::Eof | StreamEnd::Reset)),
            "{seed}: {report}"
        );
    }
    (f, client, server)
}

fn detached(f: &Forwarder) {
    let d = f.splicer.datapath().expect("kernel path");
    let passed = || f.verdict("forwarded") + f.verdict("local");
    detach(d).expect("detached");
    let before = passed();
    wait_for(Duration::from_secs(10), || (passed() > before).then_some(())).expect("attached again");
}

#[test]
#[ignore = "root"]
fn what_is_spliced_goes_on() {
    for seed in 1..3 {
        let (f, client, server) = converse_and(seed, at_once(), 20_000_000, |f| {
            let far = || f.splicer.flows().first().is_some_and(|f| f.bytes_up.min(f.bytes_down) > BEYOND_A_WINDOW);
            wait_for(Duration::from_secs(10), || far().then_some(())).expect("more than a window has passed");
            detached(f);
        });
        intact(&client, &server).unwrap_or_else(|why| panic!("{seed}: {why}\n{:?}", f.verdicts()));
    }
}

/// Segments that reach the parked sockets are within their windows, so the sockets may accept them.
#[test]
#[ignore = "root"]
fn what_was_spliced_just_now_goes_on_or_ends() {
    let mut whole = 0;
    for seed in 10..14 {
        let (f, client, server) = converse_and(seed, at_once(), 300_000, |f| {
            f.wait_state(FlowState::Spliced);
            thread::sleep(Duration::from_millis(seed % 4 * 100));
            detached(f);
        });
        let is_whole = intact(&client, &server).is_ok();
        eprintln!("{seed}: {is_whole} {client}; {server} {:?}", f.verdicts());
        whole += u32::from(is_whole);
    }
    assert!(whole > 0, "none has gone on");
}

/// A copied flow cannot be spliced any more, because it is no longer known where its bytes end.
#[test]
#[ignore = "root"]
fn what_is_copied_is_copied_to_its_end() {
    let (f, client, server) = converse_and(20, by_hand(), 3_000_000, |f| {
        f.wait_state(FlowState::Copying);
        thread::sleep(Duration::from_millis(300));
        detached(f);
        let why = || {
            f.command(Command::Splice);
            f.splicer.flows().first().and_then(|f| f.refusal).map(|r| r.as_str())
        };
        wait_for(Duration::from_secs(10), || (why() == Some("untracked")).then_some(())).expect("refused");
    });
    intact(&client, &server).unwrap_or_else(|why| panic!("{why}\n{:?}", f.verdicts()));
}

/// The sockets' numbers differ from the hosts'.
#[test]
#[ignore = "root"]
fn what_was_spliced_before_ends() {
    let (f, ..) = converse_and(30, by_hand(), 300_000, |f| {
        f.wait_state(FlowState::Copying);
        f.command(Command::Splice);
        f.wait_state(FlowState::Spliced);
        thread::sleep(Duration::from_millis(200));
        f.command(Command::Unsplice);
        f.wait_state(FlowState::Copying);
        detach(f.splicer.datapath().expect("kernel path")).expect("detached");
    });
    assert_eq!(f.ended(1)[0].how, longsplice_engine::EndReason::Stopped);
}
