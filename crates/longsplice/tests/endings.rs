//! What a process that was killed has left in the kernel ends with `stop`: hosts that wait, and send nothing, hear of it. And what
//! waits here for their end costs nothing.

mod running;

use longsplice_lab::{
    Family, Lab, Shape,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use nix::sys::signal::Signal;
use running::{LONGSPLICE, Pins, Running, eventually};
use serde_json::Value;
use std::{
    fs,
    io::{self, ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::Duration,
};

const PORT: u16 = 7000;
const CONNECTIONS: usize = 3;

struct Place {
    pins: Pins,
    lab: Lab,
    family: Family,
    listener: TcpListener,
    dir: tempfile::TempDir,
}

impl Place {
    fn new(family: Family) -> Place {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let listener = lab.server.run(|| TcpListener::bind(SERVER.port(family, PORT))).unwrap();
        Place { pins: Pins::of(&lab.forwarder), lab, family, listener, dir: tempfile::tempdir().unwrap() }
    }

    /// With both ends of connections in this state, whose process was killed.
    fn after_a_kill(family: Family, state: &str) -> (Place, Vec<TcpStream>) {
        let place = Place::new(family);
        let mut proxy = place.proxy(state == "released");
        let ends = place.connections(&proxy, state);
        proxy.kill();
        (place, ends)
    }

    fn proxy(&self, released: bool) -> Running {
        let (listen, target) = (FORWARDER_TO_CLIENT.port(self.family, PORT), SERVER.port(self.family, PORT));
        let after = if released { 0.001 } else { 3600.0 };
        let config = format!(
            "[[listener]]\nprotocol = \"plug\"\nlisten = \"{listen}\"\ntarget = \"{target}\"\n\
             policy = {{ splice = \"at-once\", release_after = {after} }}\n"
        );
        let file = self.dir.path().join("longsplice.toml");
        fs::write(&file, config).unwrap();
        Running::start(self.lab.forwarder.command(LONGSPLICE), None, &["--config", file.to_str().unwrap()], &[])
    }

    /// Connections in forwarding mode, all of whose bytes have arrived: both ends of each.
    fn connections(&self, proxy: &Running, state: &str) -> Vec<TcpStream> {
        let mut all = Vec::new();
        for _ in 0..CONNECTIONS {
            let front = FORWARDER_TO_CLIENT.port(self.family, PORT);
            let client = self.lab.client.run(|| running::connect(front));
            let server = self.listener.accept().unwrap().0;
            server.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            all.extend([client, server]);
        }
        eventually(state, || {
            let flows: Value = serde_json::from_str(&proxy.client(&["ls", "--json"])).unwrap();
            let flows = flows.as_array().unwrap();
            (flows.len() == CONNECTIONS && flows.iter().all(|f| f["state"] == state)).then_some(())
        });
        for pair in all.chunks(2) {
            let [client, server] = pair else { unreachable!("pairs") };
            for (mut from, mut to) in [(client, server), (server, client)] {
                let mut heard = [0; 1000];
                from.write_all(&[7; 1000]).unwrap();
                to.read_exact(&mut heard).unwrap();
            }
        }
        all
    }

    fn all_are_reset(&self, ends: &[TcpStream], how: &str) {
        for (i, mut end) in ends.iter().enumerate() {
            let heard = end.read(&mut [0]);
            let who = ["client", "server"][i % 2];
            assert_eq!(
                heard.as_ref().map_err(|e| e.kind()),
                Err(ErrorKind::ConnectionReset),
                "{how}, {who}: {heard:?}"
            );
        }
        assert!(!self.pins.exist(), "{how}: nothing is left pinned");
    }
}

#[test]
fn needs_root_and_bpf_a_stop_resets_what_was_recovered() {
    for (family, state) in [(Family::V4, "released"), (Family::V6, "spliced")] {
        let (place, ends) = Place::after_a_kill(family, state);
        let mut second = place.proxy(true);
        second.client(&["stop"]);
        assert!(second.wait().success(), "{}", second.messages());
        place.all_are_reset(&ends, state);
        let said = format!("{CONNECTIONS} forwarded connections were reset");
        assert!(second.messages().contains(&said), "{}", second.messages());
    }
}

#[test]
fn needs_root_and_bpf_a_flush_resets_what_was_left() {
    for (family, state) in [(Family::V4, "spliced"), (Family::V6, "released")] {
        let (place, ends) = Place::after_a_kill(family, state);
        let said = place.lab.forwarder.execute(LONGSPLICE, &["stop", "--flush"]).unwrap();
        assert!(said.contains(&format!("{CONNECTIONS} forwarded connections were reset")), "{said}");
        place.all_are_reset(&ends, state);
    }
}

/// Each has its idle limit, and none a timer that wakes anybody before.
#[test]
fn idle_connections_sleep() {
    const IDLE: u64 = 100;
    let proxy = Running::copying(&running::loopback_echo(), &[]);
    let connections: Vec<TcpStream> = (0..IDLE)
        .map(|_| {
            let mut c = running::connect(proxy.address());
            running::round_trip(&mut c, b"hello");
            c
        })
        .collect();
    let in_a_while = || {
        let before = proxy.wake_ups();
        std::thread::sleep(Duration::from_secs(1));
        proxy.wake_ups() - before
    };
    // what they have passed is counted before
    eventually("less than one of them wakes somebody", || (in_a_while() < IDLE / 2).then_some(()));
    drop(connections);
}

const UPLOADS: usize = 8;
const BODY: usize = 3_000_000;
const BEGUN: usize = 1_000_000;

/// Uploads that are spliced, of which so much has arrived: both ends of each. Nobody sends anything.
fn uploads(place: &Place, leave: bool) -> (Running, Vec<TcpStream>) {
    let (front, server) = (FORWARDER_TO_CLIENT.port(place.family, 3128), SERVER.port(place.family, PORT));
    let mut arguments = vec!["--splice", "at-once", "--http"];
    let at = front.to_string();
    arguments.extend([at.as_str()].into_iter().chain(leave.then_some("--leave-flows")));
    let proxy = Running::start(place.lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
    let mut all = Vec::new();
    for _ in 0..UPLOADS {
        let mut client = place.lab.client.run(|| running::connect(front));
        write!(client, "PUT http://{server}/ HTTP/1.1\r\nHost: {server}\r\nContent-Length: {BODY}\r\n\r\n").unwrap();
        let mut server = place.listener.accept().unwrap().0;
        server.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            server.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        thread::scope(|scope| {
            scope.spawn(|| client.write_all(&vec![7; BEGUN]).unwrap());
            server.read_exact(&mut vec![0; BEGUN]).unwrap();
        });
        all.extend([client, server]);
    }
    eventually("all are spliced", || {
        let flows: Value = serde_json::from_str(&proxy.client(&["ls", "--json"])).unwrap();
        (flows.as_array().unwrap().iter().filter(|f| f["state"] == "spliced").count() == UPLOADS).then_some(())
    });
    (proxy, all)
}

/// Tasks that had waited for a body to pass told the data path to forget its connections, before these were ended.
#[test]
fn needs_root_and_bpf_a_stop_resets_both_ends_of_uploads() {
    for family in Family::BOTH {
        let place = Place::new(family);
        let (mut proxy, ends) = uploads(&place, false);
        proxy.client(&["stop"]);
        assert!(proxy.wait().success());
        place.all_are_reset(&ends, "stop");
        assert!(!place.pins.exist());
    }
}

/// They pass to their ends, at which their servers are reset, since what they say then is nobody's to forward. Clients that wait
/// for it hear of that at the last.
#[test]
fn needs_root_and_bpf_uploads_that_are_left_pass_to_their_ends() {
    const MOST: usize = BODY - BEGUN - 100_000; // a reset may overtake what nobody has read yet
    for family in Family::BOTH {
        let place = Place::new(family);
        let (mut proxy, ends) = uploads(&place, true);
        proxy.signal(Signal::SIGTERM);
        assert!(proxy.wait().success());
        let mut clients = Vec::new();
        for pair in ends.chunks(2) {
            let [mut client, mut server] = [&pair[0], &pair[1]];
            thread::scope(|scope| {
                scope.spawn(|| server.read_exact(&mut vec![0; MOST]).unwrap());
                client.write_all(&vec![7; MOST]).unwrap();
            });
            client.write_all(&vec![7; BODY - BEGUN - MOST]).unwrap();
            let over = io::copy(&mut server, &mut io::sink());
            assert!(over.is_err_and(|e| e.kind() == ErrorKind::ConnectionReset), "the server is told");
            clients.push(client);
        }
        place.lab.forwarder.execute(LONGSPLICE, &["stop", "--flush"]).unwrap();
        for mut client in clients {
            let heard = client.read(&mut [0]).map_err(|e| e.kind());
            assert_eq!(heard, Err(ErrorKind::ConnectionReset));
        }
        assert!(!place.pins.exist());
    }
}
