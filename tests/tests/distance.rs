//! A connection is copied where a splice would make the transfer slower.
use longsplice_engine::{Command, EndReason, Ended, FlowState, PathRule, Policy, SpliceWhen};
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection, Shape,
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::{Script, connect, converse, intact, listen, serve},
};
use longsplice_tests::Forwarder;
use std::time::Duration;

const MANY: u64 = 400_000;
const FEW: u64 = 1_000;

/// Transfers this many bytes each way over one connection whose client or server is 10 ms away.
fn transfer(family: Family, far: LinkDirection, policy: Policy, up: u64, down: u64, command: bool) -> Ended {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let _far = lab.impair(far, Impair { delay: Duration::from_millis(10), ..Impair::NONE }).expect("delay");
    let answer = Script::answerer().bytes(down).pace(4_000_000);
    let server = SERVER.port(family, 7000);
    let serving = lab.server.run(|| serve(listen(server, &answer).expect("listen"), 1, answer.clone()));
    let proxy = FORWARDER_TO_CLIENT.port(family, 7000);
    let f = Forwarder::start(&lab, proxy, server, policy);
    let script = Script::opener(5).bytes(up).pace(4_000_000);
    let client = lab.client.spawn(move || converse(connect(proxy, &script).expect("connect"), &script));
    if command {
        f.wait_state(FlowState::Copying);
        f.command(Command::Splice);
    }
    let (client, server) = (client.join().expect("client"), serving.join().remove(0));
    intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    let ended = f.ended(1).remove(0);
    assert_eq!((ended.how, ended.bytes_up, ended.bytes_down), (EndReason::Closed, up, down), "{ended:?}");
    ended
}

#[test]
#[ignore = "root"]
fn near_senders_are_not_spliced_to_far_receivers() {
    let policy = |when| Policy { when, ..Policy::default() };
    let any = Policy { path: PathRule::Any, ..policy(SpliceWhen::AfterBytes(2_000)) };
    for family in Family::BOTH {
        let after = policy(SpliceWhen::AfterBytes(2_000));
        for (far, up, down) in [
            (LinkDirection::FromClient, FEW, MANY),
            (LinkDirection::ToServer, MANY, FEW),
            (LinkDirection::FromServer, MANY, MANY),
        ] {
            let ended = transfer(family, far, after.clone(), up, down, false);
            let found = (ended.splices, ended.refusal.map(|r| r.as_str()));
            assert_eq!(found, (0, Some("path")), "{family:?} {far:?} {up} {down}: {ended:?}");
        }
        for (far, up, down) in [(LinkDirection::FromClient, MANY, FEW), (LinkDirection::FromServer, FEW, MANY)] {
            let ended = transfer(family, far, after.clone(), up, down, false);
            assert_eq!((ended.splices, ended.refusal), (1, None), "{family:?} {far:?} {up} {down}: {ended:?}");
        }
        for (policy, command) in [(any.clone(), false), (policy(SpliceWhen::AfterBytes(u64::MAX)), true)] {
            let ended = transfer(family, LinkDirection::FromClient, policy, FEW, MANY, command);
            assert_eq!((ended.splices, ended.refusal), (1, None), "{family:?} {command}: {ended:?}");
        }
    }
}
