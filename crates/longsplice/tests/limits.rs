//! The program at its limits: few descriptors, small tables. Every test needs root and eBPF, and fails without.

use crate::running::{LONGSPLICE, Pins, Running, connect, echo, eventually, round_trip};
use longsplice_lab::{Family, Lab, Shape, topology};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::Value;
use std::{
    io::Write,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    process::Command,
    time::Instant,
};

const PORT: u16 = 7000;

/// Client, forwarder and an echo server.
fn lab() -> Lab {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    echo(lab.server.run(|| TcpListener::bind(server()).unwrap()));
    lab
}

fn server() -> SocketAddr {
    topology::SERVER.port(Family::V4, PORT)
}

fn proxy() -> SocketAddr {
    topology::FORWARDER_TO_CLIENT.port(Family::V4, PORT)
}

/// The program in the forwarder, with a limit of descriptors.
fn with_descriptors(lab: &Lab, most: usize) -> Command {
    let mut command = lab.forwarder.command("prlimit");
    command.arg(format!("--nofile={most}")).arg(LONGSPLICE);
    command
}

fn flows(proxy: &Running) -> Vec<Value> {
    serde_json::from_str(&proxy.client(&["ls", "--json"])).unwrap()
}

fn counters(proxy: &Running) -> Value {
    serde_json::from_str(&proxy.client(&["counters", "--json"])).unwrap()
}

fn count(proxy: &Running, state: &str) -> usize {
    flows(proxy).iter().filter(|flow| flow["state"] == state).count()
}

#[test]
#[ignore = "root"]
fn source_ports_that_the_kernel_gives_to_others_are_said() {
    let lab = lab();
    for (range, is_said) in [("30000 50000", true), ("40000 50000", false)] {
        lab.forwarder.sysctl("net.ipv4.ip_local_port_range", range).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("longsplice.toml");
        let text = format!(
            "source_ports = \"20000-30000\"\n[[listener]]\nprotocol = \"plug\"\nlisten = \"{}\"\ntarget = \"{}\"\n",
            proxy(),
            server()
        );
        std::fs::write(&config, text).unwrap();
        let pins = Pins::of(&lab.forwarder);
        let arguments = ["--config", config.to_str().unwrap(), "--max-flows", "64"];
        let mut running = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
        let said = running.messages().contains("the kernel gives ports 30000-50000 to others");
        assert_eq!(said, is_said, "{}", running.messages());
        running.client(&["stop"]);
        assert!(running.wait().success() && !pins.exist());
    }
}

#[test]
#[ignore = "root"]
fn idle_flows_give_their_descriptors_to_new_ones() {
    const DESCRIPTORS: usize = 512;
    const CLIENTS: usize = 700;
    let (lab, plug) = (lab(), format!("{}={}", proxy(), server()));
    let pins = Pins::of(&lab.forwarder);
    let arguments = ["--plug", &plug, "--splice", "at-once", "--max-flows", "1024"];
    let mut running = Running::start(with_descriptors(&lab, DESCRIPTORS), None, &arguments, &[]);
    let open = |n: usize| {
        let mut stream = lab.client.run(|| connect(proxy()));
        round_trip(&mut stream, &n.to_be_bytes());
        stream
    };
    let mut streams: Vec<TcpStream> = (0..CLIENTS).map(open).collect();
    assert_eq!(flows(&running).len(), CLIENTS, "nobody was turned away");
    let parked = eventually("flows that come to rest", || {
        let (parked, released) = (count(&running, "spliced"), count(&running, "released"));
        (parked + released == CLIENTS).then_some(parked)
    });
    assert!((1..DESCRIPTORS / 2).contains(&parked), "{parked} have sockets");
    streams.iter_mut().for_each(|stream| round_trip(stream, b"still there"));
    drop(streams);
    running.stop(&pins);
}

/// Accepted clients use up the last descriptors for their servers.
#[test]
#[ignore = "root"]
fn counters_are_told_when_no_descriptor_is_left() {
    const DESCRIPTORS: usize = 256;
    let lab = lab();
    let at = proxy().to_string();
    let arguments = ["--socks5", &at, "--splice", "never", "--max-flows", "1024"];
    let running = Running::start(with_descriptors(&lab, DESCRIPTORS), None, &arguments, &[]);
    let clients: Vec<TcpStream> = (0..DESCRIPTORS).map(|_| lab.client.run(|| connect(proxy()))).collect();
    let ask = |mut client: &TcpStream| {
        let SocketAddr::V4(server) = server() else { unreachable!("an address of IPv4") };
        let address: [u8; 4] = Ipv4Addr::octets(server.ip());
        let port = server.port().to_be_bytes();
        let _ = client.write_all(&[&[5, 1, 0, 5, 1, 0, 1][..], &address, &port].concat());
    };
    clients.iter().take(100).for_each(ask);
    eventually("the last descriptor", || (running.descriptors() == DESCRIPTORS).then_some(()));
    for _ in 0..3 {
        assert!(running.client(&["counters"]).contains("accepted"));
        running.client(&["ls"]);
    }
    drop(clients);
}

#[test]
#[ignore = "root"]
fn a_full_table_is_said_now_and_then() {
    const CLIENTS: usize = 100;
    let (lab, plug, began) = (lab(), format!("{}={}", proxy(), server()), Instant::now());
    let pins = Pins::of(&lab.forwarder);
    let arguments = ["--plug", &plug, "--splice", "at-once", "--max-flows", "16"];
    let mut running = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
    let open = |_| {
        let mut stream = lab.client.run(|| connect(proxy()));
        round_trip(&mut stream, b"hello");
        stream
    };
    let streams: Vec<TcpStream> = (0..CLIENTS).map(open).collect();
    running.wait_message("the tables of flows are full; ");
    let refused = flows(&running).iter().filter(|flow| flow["refusal"] == "table-full").count();
    assert!(refused >= CLIENTS - 16, "{refused}");
    let counters: Value = serde_json::from_str(&running.client(&["counters", "--json"])).unwrap();
    let why = counters["listeners"][0]["refused"].as_object().unwrap();
    let counted: Vec<_> = why.iter().filter(|(_, n)| **n != 0).collect();
    assert_eq!(counted, [(&"table-full".to_owned(), &refused.into())]);
    let messages = running.messages();
    let said = messages.lines().filter(|line| line.contains("WARN")).count();
    assert!((1..=1 + began.elapsed().as_secs() as usize / 10).contains(&said), "{messages}");
    drop(streams);
    running.stop(&pins);
}

/// A client that shakes hands with its server is copied if the table has room for the server's leg, but not for its own. A client
/// that has not asked for anything has one leg, so the table ends between the legs of a flow.
#[test]
#[ignore = "root"]
fn a_client_whose_own_leg_finds_no_room_is_copied() {
    let (lab, dir) = (lab(), tempfile::tempdir().unwrap());
    let silent = topology::FORWARDER_TO_CLIENT.port(Family::V4, PORT + 1);
    let config = dir.path().join("longsplice.toml");
    let text = format!(
        "[[listener]]\nprotocol = \"plug\"\nlisten = \"{}\"\ntarget = \"{}\"\nhandshake = \"end-to-end\"\n\
         policy = {{ splice = \"at-once\" }}\n[[listener]]\nprotocol = \"socks5\"\nlisten = \"{silent}\"\n",
        proxy(),
        server()
    );
    std::fs::write(&config, text).unwrap();
    let pins = Pins::of(&lab.forwarder);
    let arguments = ["--config", config.to_str().unwrap(), "--max-flows", "16"];
    let mut running = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
    let silent = lab.client.run(|| connect(silent));
    let mut clients = Vec::new();
    while counters(&running)["proxy"]["handshakes_left"] == 0 {
        let mut client = lab.client.run(|| connect(proxy()));
        round_trip(&mut client, b"hello");
        clients.push(client);
        assert!(clients.len() <= 2 * 16, "the table is never full: {}", counters(&running));
    }
    clients.iter_mut().for_each(|client| round_trip(client, b"still there"));
    let refused = flows(&running).iter().filter(|flow| flow["refusal"] == "table-full").count();
    assert_eq!(refused, 2, "one without its own leg, and one that was left to the listening socket");
    drop((clients, silent));
    running.stop(&pins);
}
