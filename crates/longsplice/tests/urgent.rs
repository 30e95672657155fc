//! Urgent data through the program, as sent by telnet and FTP (RFC 854, 959): each urgent byte is received at its position,
//! however often the connection is spliced and unspliced meanwhile. Needs root and eBPF, and fails without.

use crate::running::{LONGSPLICE, Pins, Running, eventually};
use longsplice_lab::{
    Family, Lab, Shape,
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::{Chunks, Marks, Script, connect, converse, intact, listen, serve},
};
use serde_json::Value;
use std::time::Duration;
use test_case::test_case;

const PORT: u16 = 7000;
const BYTES: u64 = 24_000;
/// Length of a question or an answer. An urgent byte has been read before
/// the next one is sent, because a receiver knows only the last one.
const LINE: u64 = 100;
/// Longer than the exchange takes, and short enough to notice a hang.
const PATIENCE: Duration = Duration::from_secs(10);

/// Each end answers the other, with an urgent byte now and then: the first and the
/// last byte, bytes at the end of a line, and bytes within; never two in one line.
pub fn exchange(script: Script, first: u64, marks: Marks) -> Script {
    let urgent = (first..BYTES - LINE).step_by(3 * LINE as usize + 33).chain([BYTES - 1]).collect();
    let script = script.bytes(BYTES).pace(BYTES / 3).chunks(Chunks::Fixed(LINE as usize)).deadline(PATIENCE);
    Script { urgent, marks: Some(marks), ..script }
}

/// Runs one connection, and asks for switches meanwhile. Returns its record.
fn converse_through(family: Family, marks: [Marks; 2], splice: &str, switch: impl Fn(&Running)) -> Value {
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let [front, server] = [FORWARDER_TO_CLIENT.port(family, PORT), SERVER.port(family, PORT)];
    let opener = exchange(Script::opener(3), 0, marks[0]).ahead(LINE);
    let answerer = exchange(Script::answerer_of(3), LINE - 1, marks[1]).ahead(0);
    let serving = lab.server.run(|| serve(listen(server, &answerer).unwrap(), 1, answerer.clone()));
    let pins = Pins::of(&lab.forwarder);
    let plug = format!("{front}={server}");
    let arguments = ["--plug", &plug, "--splice", splice, "--log-format", "json"];
    let mut program = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
    let client = lab.client.spawn(move || converse(connect(front, &opener).unwrap(), &opener));
    switch(&program);
    let (client, server) = (client.join().unwrap(), serving.join().remove(0));
    assert!(client.urgent.len() > 50 && server.urgent.len() > 50, "{client}\n{server}");
    intact(&client, &server).unwrap();
    program.end(&pins).remove(0)
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn urgent_data_crosses_switches_by_command(family: Family) {
    const SWITCHES: u64 = 4;
    for marks in [[Marks::Inline, Marks::Apart], [Marks::Apart, Marks::Inline]] {
        let record = converse_through(family, marks, "1000000", |program| {
            let id = eventually("a flow", || program.flows().pop())["id"].to_string();
            for _ in 0..SWITCHES {
                for (command, state) in [("splice", "spliced"), ("unsplice", "copying")] {
                    program.client(&[command, &id]);
                    program.wait_flow(state);
                    // so that some of the urgent bytes arrive in this state
                    let bytes = || program.flow()["bytes_up"].as_u64();
                    let reached = bytes().unwrap() + 3 * LINE;
                    eventually("bytes pass", || (bytes()? > reached).then_some(()));
                }
            }
        });
        let kept = [&record["splices"], &record["bytes_up"], &record["bytes_down"]];
        assert_eq!(kept, [SWITCHES, BYTES, BYTES], "{record}");
    }
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn urgent_data_crosses_a_switch_by_policy(family: Family) {
    for splice in ["at-once", "8000"] {
        let record = converse_through(family, [Marks::Apart, Marks::Inline], splice, |_| {});
        assert_eq!([&record["splices"], &record["bytes_up"], &record["bytes_down"]], [1, BYTES, BYTES], "{record}");
    }
}
