//! The program at its limits: few descriptors, small tables. Every test needs root and eBPF, and fails without.

use crate::running::{AT_ONCE, LONGSPLICE, Setting, eventually, listener, round_trip};
use longsplice_lab::{Family, topology};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::{
    io::Write,
    net::{Ipv4Addr, SocketAddr, TcpStream},
    process::Command,
    thread,
    time::Instant,
};

const PORT: u16 = 7000;

/// Client, forwarder and an echo server.
fn setting(configuration: &str) -> Setting {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let setting = Setting::new(configuration);
    setting.echo(server());
    setting
}

/// A plug to the echo server.
fn plug(more: &str) -> String {
    listener("plug", &proxy().to_string(), &format!("target = \"{}\"\n{more}", server()))
}

fn server() -> SocketAddr {
    topology::SERVER.port(Family::V4, PORT)
}

fn proxy() -> SocketAddr {
    topology::FORWARDER_TO_CLIENT.port(Family::V4, PORT)
}

/// The program in the forwarder, with a limit of descriptors.
fn with_descriptors(setting: &Setting, most: usize) -> Command {
    let mut command = setting.lab.forwarder.command("prlimit");
    command.arg(format!("--nofile={most}")).arg(LONGSPLICE);
    command
}

#[test]
#[ignore = "root"]
fn source_ports_that_the_kernel_gives_to_others_are_said() {
    let setting = setting(&format!("source_ports = \"20000-30000\"\n{}", plug("")));
    for (range, is_said) in [("30000 50000", true), ("40000 50000", false)] {
        setting.lab.forwarder.sysctl("net.ipv4.ip_local_port_range", range).unwrap();
        let mut running = setting.start_with(&["--max-flows", "64"]);
        let said = running.messages().contains("the kernel gives ports 30000-50000 to others");
        assert_eq!(said, is_said, "{}", running.messages());
        running.stop(&setting.pins[0]);
    }
}

#[test]
#[ignore = "root"]
fn idle_flows_give_their_descriptors_to_new_ones() {
    const DESCRIPTORS: usize = 512;
    const CLIENTS: usize = 700;
    let setting = setting(&plug(AT_ONCE));
    let mut running = setting.start_by(with_descriptors(&setting, DESCRIPTORS), &["--max-flows", "1024"]);
    let open = |n: usize| {
        let mut stream = setting.connect(proxy());
        round_trip(&mut stream, &n.to_be_bytes());
        stream
    };
    let mut streams: Vec<TcpStream> = (0..CLIENTS).map(open).collect();
    assert_eq!(running.flows().len(), CLIENTS, "nobody was turned away");
    let parked = eventually("flows that come to rest", || {
        let (parked, released) = (running.flows_in("spliced"), running.flows_in("released"));
        (parked + released == CLIENTS).then_some(parked)
    });
    assert!((1..DESCRIPTORS / 2).contains(&parked), "{parked} have sockets");
    streams.iter_mut().for_each(|stream| round_trip(stream, b"still there"));
    drop(streams);
    running.stop(&setting.pins[0]);
}

/// Accepted clients use up the last descriptors for their servers.
#[test]
#[ignore = "root"]
fn counters_are_told_when_no_descriptor_is_left() {
    const DESCRIPTORS: usize = 256;
    let setting = setting(&listener("socks5", &proxy().to_string(), "policy = { splice = \"never\" }"));
    let running = setting.start_by(with_descriptors(&setting, DESCRIPTORS), &["--max-flows", "1024"]);
    let clients: Vec<TcpStream> = (0..DESCRIPTORS).map(|_| setting.connect(proxy())).collect();
    let ask = |mut client: &TcpStream| {
        let SocketAddr::V4(server) = server() else { unreachable!("an address of IPv4") };
        let address: [u8; 4] = Ipv4Addr::octets(server.ip());
        let port = server.port().to_be_bytes();
        let _ = client.write_all(&[&[5, 1, 0, 5, 1, 0, 1][..], &address, &port].concat());
    };
    clients.iter().take(100).for_each(ask);
    // the others are for those who ask
    eventually("the last descriptor", || (running.descriptors() >= DESCRIPTORS - DESCRIPTORS / 16).then_some(()));
    // more than one at a time, although accepted clients wait for descriptors
    for _ in 0..3 {
        thread::scope(|scope| {
            for _ in 0..12 {
                scope.spawn(|| assert!(running.client(&["counters"]).contains("accepted")));
            }
        });
        running.client(&["ls"]);
    }
    drop(clients);
}

#[test]
#[ignore = "root"]
fn a_full_table_is_said_now_and_then() {
    const CLIENTS: usize = 100;
    let (setting, began) = (setting(&plug(AT_ONCE)), Instant::now());
    let mut running = setting.start_with(&["--max-flows", "16"]);
    let open = |_| {
        let mut stream = setting.connect(proxy());
        round_trip(&mut stream, b"hello");
        stream
    };
    let streams: Vec<TcpStream> = (0..CLIENTS).map(open).collect();
    running.wait_message("the tables of flows are full; ");
    let refused = running.flows().iter().filter(|flow| flow["refusal"] == "table-full").count();
    assert!(refused >= CLIENTS - 16, "{refused}");
    let counters = running.counters();
    let why = counters["listeners"][0]["refused"].as_object().unwrap();
    let counted: Vec<_> = why.iter().filter(|(_, n)| **n != 0).collect();
    assert_eq!(counted, [(&"table-full".to_owned(), &refused.into())]);
    let messages = running.messages();
    let said = messages.lines().filter(|line| line.contains("WARN")).count();
    assert!((1..=1 + began.elapsed().as_secs() as usize / 10).contains(&said), "{messages}");
    drop(streams);
    running.stop(&setting.pins[0]);
}

/// A client that shakes hands with its server is copied if the table has room for the server's leg, but not for its own. A client
/// that has not asked for anything has one leg, so the table ends between the legs of a flow.
#[test]
#[ignore = "root"]
fn a_client_whose_own_leg_finds_no_room_is_copied() {
    let silent = topology::FORWARDER_TO_CLIENT.port(Family::V4, PORT + 1);
    let plug = plug(&format!("handshake = \"end-to-end\"\n{AT_ONCE}"));
    let setting = setting(&(plug + &listener("socks5", &silent.to_string(), AT_ONCE)));
    let mut running = setting.start_with(&["--max-flows", "16"]);
    let silent = setting.connect(silent);
    let mut clients = Vec::new();
    while running.count("proxy", "handshakes_left") == 0 {
        let mut client = setting.connect(proxy());
        round_trip(&mut client, b"hello");
        clients.push(client);
        assert!(clients.len() <= 2 * 16, "the table is never full: {}", running.counters());
    }
    clients.iter_mut().for_each(|client| round_trip(client, b"still there"));
    let refused = running.flows().iter().filter(|flow| flow["refusal"] == "table-full").count();
    assert_eq!(refused, 2, "one without its own leg, and one that was left to the listening socket");
    drop((clients, silent));
    running.stop(&setting.pins[0]);
}
