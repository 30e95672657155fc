//! Flows whose process has died: commands and the access log of the next one know them. Needs root and eBPF, and fails without.

use crate::running::{LONGSPLICE, Pins, Running, connect, echo, eventually, round_trip};
use longsplice_lab::{
    Family, Lab, Shape,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::net::{TcpListener, TcpStream};

const PORT: u16 = 7001;

struct Place {
    pins: Pins,
    lab: Lab,
}

impl Place {
    fn new() -> Place {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        lab.server.run(|| echo(TcpListener::bind(SERVER.port(Family::V4, PORT)).unwrap()));
        Place { pins: Pins::of(&lab.forwarder), lab }
    }

    fn proxy(&self, more: &[&str]) -> Running {
        let plug = format!("{}={}", FORWARDER_TO_CLIENT.port(Family::V4, PORT), SERVER.port(Family::V4, PORT));
        let command = self.lab.forwarder.command(LONGSPLICE);
        Running::start(command, None, &["--plug", &plug, "--splice", "at-once", "--log-format", "json"], more)
    }

    /// A spliced connection that has carried so many bytes each way.
    fn spliced(&self, proxy: &Running, bytes: usize) -> TcpStream {
        let before = proxy.flows().len();
        let mut stream = self.lab.client.run(|| connect(FORWARDER_TO_CLIENT.port(Family::V4, PORT)));
        round_trip(&mut stream, &[1]);
        eventually("it is spliced", || {
            let flows = proxy.flows();
            (flows.len() > before && flows.iter().all(|f| f["state"] != "copying")).then_some(())
        });
        round_trip(&mut stream, &vec![2; bytes - 1]);
        stream
    }
}

/// The line of a client, once there is one.
fn line(proxy: &Running, client: &str) -> Value {
    eventually("a line", || proxy.records().into_iter().find(|line| line["client"] == client))
}

fn assert_line(line: &Value, how: &str, bytes: u64, since: u64) {
    let server = SERVER.port(Family::V4, PORT).to_string();
    assert_eq!([&line["listener"], &line["how"], &line["server"]], ["recovered", how, &server], "{line}");
    let numbers = ["bytes_up", "bytes_down", "spliced_up", "spliced_down"].map(|key| line[key].as_u64().unwrap());
    assert_eq!(numbers, [bytes, bytes, since, since], "{line}");
}

#[test]
#[ignore = "root"]
fn the_next_process_records_what_outlived_the_last() {
    let place = Place::new();
    let mut first = place.proxy(&[]);
    let [mut ends, mut stays] = [0, 1].map(|_| place.spliced(&first, 100_000));
    let clients = [&ends, &stays].map(|stream| stream.local_addr().unwrap().to_string());
    first.kill();
    let mut second = place.proxy(&[]);
    let found = second.flows();
    assert_eq!(found.len(), 2, "{found:?}");
    round_trip(&mut ends, &[3; 50_000]);
    round_trip(&mut stays, &[3; 70_000]);
    drop(ends);
    assert_line(&line(&second, &clients[0]), "closed", 150_000, 50_000);
    // each command knows of a flow that `ls` shows
    let [id] = &second.flows()[..] else { panic!("one is left") };
    let id = id["id"].to_string();
    for command in ["splice", "unsplice"] {
        let why = second.client_error(&[command, &id]);
        assert!(why.contains(&format!("flow {id} is of an earlier process")), "{why}");
        let why = second.client_error(&[command, "999"]);
        assert!(why.contains("there is no flow 999"), "{why}");
    }
    second.client(&["inspect", &id]);
    second.shut_down();
    assert_line(&line(&second, &clients[1]), "stopped", 170_000, 70_000);
    assert_eq!(second.records().len(), 2, "each once");
    assert!(!place.pins.exist());
}

/// A flow that is left by two processes has three lines, of which the last has all bytes.
#[test]
#[ignore = "root"]
fn a_flow_that_is_left_is_recorded_by_whoever_sees_its_end() {
    let place = Place::new();
    let mut first = place.proxy(&["--leave-flows"]);
    let mut stream = place.spliced(&first, 100_000);
    let client = stream.local_addr().unwrap().to_string();
    let mut leave = |proxy: &mut Running| {
        proxy.signal(Signal::SIGTERM);
        assert!(proxy.wait().success(), "{}", proxy.messages());
        round_trip(&mut stream, &[4; 10_000]);
    };
    leave(&mut first);
    assert_eq!(line(&first, &client)["how"], "left");
    let mut second = place.proxy(&["--leave-flows"]);
    leave(&mut second);
    assert_line(&line(&second, &client), "left", 110_000, 0);
    let mut third = place.proxy(&[]);
    round_trip(&mut stream, &[5; 20_000]);
    drop(stream);
    assert_line(&line(&third, &client), "closed", 140_000, 20_000);
    third.stop(&place.pins);
    assert_eq!(third.records().len(), 1);
}
