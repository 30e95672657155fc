//! `stop` ends the connections that a killed process left in the kernel: hosts that
//! wait and send nothing are reset. Sockets of ours that wait for hosts cost nothing.

use crate::running::{self, LONGSPLICE, Pins, Running, eventually};
use longsplice_datapath::Repair;
use longsplice_lab::{
    Family, Lab, Shape,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use nix::sys::{
    signal::Signal,
    socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, socket},
};
use std::{
    fs,
    io::{self, ErrorKind, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::fd::AsRawFd,
    thread,
    time::{Duration, Instant},
};
use test_case::test_case;

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

    /// Connections in this state whose process was killed: both ends of each.
    fn after_a_kill(family: Family, state: &str) -> (Place, Vec<TcpStream>) {
        let place = Place::new(family);
        let mut proxy = place.proxy(state == "released");
        let ends = place.connections(&proxy, state);
        proxy.kill();
        (place, ends)
    }

    fn proxy(&self, released: bool) -> Running {
        self.proxy_for(released, 1000)
    }

    fn proxy_for(&self, released: bool, flows: u32) -> Running {
        self.start(&format!("release_after = {}", if released { "0.001" } else { "3600" }), flows)
    }

    /// Starts the next process, with an idle limit in seconds.
    fn next(&self, idle_limit: u32) -> Running {
        self.start(&format!("idle_limit = {idle_limit}"), 1000)
    }

    fn start(&self, policy: &str, flows: u32) -> Running {
        let (listen, target) = (FORWARDER_TO_CLIENT.port(self.family, PORT), SERVER.port(self.family, PORT));
        let config = format!(
            "[[listener]]\nprotocol = \"plug\"\nlisten = \"{listen}\"\ntarget = \"{target}\"\n\
             policy = {{ splice = \"at-once\", {policy} }}\n"
        );
        let file = self.dir.path().join("longsplice.toml");
        fs::write(&file, config).unwrap();
        let arguments = ["--config", file.to_str().unwrap(), "--max-flows", &flows.to_string()];
        Running::start(self.lab.forwarder.command(LONGSPLICE), None, &arguments, &[])
    }

    /// Connections in forwarding mode with all bytes delivered: both ends of each.
    fn connections(&self, proxy: &Running, state: &str) -> Vec<TcpStream> {
        let mut all = Vec::new();
        for _ in 0..CONNECTIONS {
            let front = FORWARDER_TO_CLIENT.port(self.family, PORT);
            let client = self.lab.client.run(|| running::connect(front));
            let server = self.listener.accept().unwrap().0;
            client.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            server.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            server.set_write_timeout(Some(Duration::from_secs(30))).unwrap();
            all.extend([client, server]);
        }
        eventually(state, || {
            let flows = proxy.flows();
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
        are_reset(ends, how);
        assert!(!self.pins.exist(), "{how}: nothing is left pinned");
    }
}

fn are_reset(ends: &[TcpStream], how: &str) {
    for (i, mut end) in ends.iter().enumerate() {
        let heard = end.read(&mut [0]);
        let who = ["client", "server"][i % 2];
        assert_eq!(heard.as_ref().map_err(|e| e.kind()), Err(ErrorKind::ConnectionReset), "{how}, {who}: {heard:?}");
    }
}

/// The idle limit of its listener applies, counted from the start of the new process.
#[test]
#[ignore = "root"]
fn the_idle_limit_resets_what_was_recovered() {
    for (family, state) in [(Family::V4, "released"), (Family::V6, "spliced")] {
        let (place, ends) = Place::after_a_kill(family, state);
        let mut second = place.next(3);
        are_reset(&ends, state);
        second.stop(&place.pins);
    }
}

#[test]
#[ignore = "root"]
fn a_stop_resets_what_was_recovered() {
    for (family, state) in [(Family::V4, "released"), (Family::V6, "spliced")] {
        let (place, ends) = Place::after_a_kill(family, state);
        let mut second = place.proxy(true);
        second.shut_down();
        place.all_are_reset(&ends, state);
        let ended = second.log().lines().filter(|line| line.contains("how=stopped")).count();
        assert_eq!(ended, CONNECTIONS, "{}", second.log());
    }
}

#[test]
#[ignore = "root"]
fn a_flush_resets_what_was_left() {
    for (family, state) in [(Family::V4, "spliced"), (Family::V6, "released")] {
        let (place, ends) = Place::after_a_kill(family, state);
        let said = place.lab.forwarder.execute(LONGSPLICE, &["stop", "--flush"]).unwrap();
        assert!(said.contains(&format!("{CONNECTIONS} forwarded connections were reset")), "{said}");
        place.all_are_reset(&ends, state);
    }
}

/// A socket closed by a kill in the middle of a switch occupies a connection's addresses until the
/// kernel gives it up. The sockets of the killed process give up before their hosts can be reached.
/// The next process finds no route to the hosts either, and resets them once there is one.
#[test]
#[ignore = "root"]
fn hosts_that_cannot_be_reached_hear_later() {
    let place = Place::new(Family::V4);
    let forwarder = &place.lab.forwarder;
    forwarder.sysctl("net.ipv4.tcp_orphan_retries", "1").unwrap();
    let mut first = place.proxy(false);
    let ends = place.copied(&first);
    let link = |state| forwarder.execute("ip", &["link", "set", "f0", state]).unwrap();
    link("down");
    first.kill();
    let closing = || forwarder.execute("ss", &["-Htan", "state", "connected", "dport", "!=", "7000"]).unwrap();
    eventually("the end of the sockets towards clients", || closing().is_empty().then_some(()));
    let proxy = place.proxy(false);
    eventually("a host was not told", || proxy.messages().contains("cannot reset a host yet").then_some(()));
    link("up");
    for (i, mut client) in ends.iter().step_by(2).enumerate() {
        assert_eq!(client.read(&mut [0]).map_err(|e| e.kind()), Err(ErrorKind::ConnectionReset), "{i}");
    }
}

/// When the process dies in a switch, a host may wait for bytes that were forwarded and lost, and whose sender is gone. Or
/// it may have received more than we have seen it acknowledge.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn both_ends_hear_of_a_process_that_dies_in_a_switch(family: Family) {
    let place = Place::new(family);
    let forwarder = &place.lab.forwarder;
    forwarder.sysctl("net.ipv6.conf.f0.keep_addr_on_down", "1").unwrap();
    let mut first = place.proxy(false);
    let ends = place.connections(&first, "spliced");
    let ids = first.flows();
    let (clients, servers): (Vec<_>, Vec<_>) = ends.chunks(2).map(|pair| (&pair[0], &pair[1])).unzip();
    let end_of = |mut end: &TcpStream, reads: bool| {
        let mut bytes = [7; 16 * 1024];
        let began = Instant::now();
        // a flow that the next process takes over survives, and is ended by its writer
        while reads || began.elapsed() < Duration::from_secs(10) {
            match if reads { end.read(&mut bytes) } else { end.write(&bytes) } {
                Ok(0) => return ErrorKind::UnexpectedEof,
                Ok(_) => {}
                Err(e) => return e.kind(),
            }
        }
        drop(end.shutdown(Shutdown::Write));
        ErrorKind::UnexpectedEof
    };
    let (reading, writing) = thread::scope(|scope| {
        let reading: Vec<_> = clients.iter().map(|end| scope.spawn(|| end_of(end, true))).collect();
        let writing: Vec<_> = servers.iter().map(|end| scope.spawn(|| end_of(end, false))).collect();
        thread::sleep(Duration::from_millis(200));
        forwarder.execute("ip", &["link", "set", "f0", "down"]).unwrap();
        for f in &ids {
            first.client(&["unsplice", &f["id"].to_string()]);
        }
        first.kill();
        let second = place.proxy(false);
        forwarder.execute("ip", &["link", "set", "f0", "up"]).unwrap();
        let ends = [reading, writing].map(|all| all.into_iter().map(|t| t.join().unwrap()).collect::<Vec<_>>());
        drop(second);
        ends.into()
    });
    let hear = |ends: &[ErrorKind]| ends.iter().all(|how| *how != ErrorKind::WouldBlock);
    assert!(hear(&reading) && hear(&writing), "{family:?}: {reading:?}, {writing:?}");
}

/// Entries of ended flows are kept for late segments, and need no route.
#[test]
#[ignore = "root"]
fn only_flows_that_live_are_said_to_have_no_way() {
    let place = Place::new(Family::V4);
    let proxy = place.proxy(false);
    let ends = place.connections(&proxy, "spliced");
    let [ended, living] = [&ends[2..], &ends[..2]];
    for end in ended {
        end.shutdown(Shutdown::Write).unwrap();
    }
    for mut end in ended {
        assert_eq!(end.read(&mut [0]).unwrap(), 0);
    }
    eventually("the end of all flows but one", || (proxy.flows().len() == living.len() / 2).then_some(()));
    place.lab.forwarder.execute("ip", &["link", "set", "f0", "down"]).unwrap();
    proxy.wait_message(" 1 directions of spliced connections have no way");
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_stop_resets_hosts_of_sockets_that_nobody_holds(family: Family) {
    let (place, ends) = Place::after_a_kill(family, "released");
    let leave = |connection: &[TcpStream]| {
        let [client, server] = connection else { unreachable!("pairs") };
        let [front, back] = [client.peer_addr().unwrap(), server.peer_addr().unwrap()];
        let legs = [(client.local_addr().unwrap(), front), (server.local_addr().unwrap(), back)];
        for (remote, local) in legs {
            let family = if local.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
            let s = socket(family, SockType::Stream, SockFlag::empty(), None).unwrap();
            Repair::On.set(&s).unwrap();
            bind(s.as_raw_fd(), &SockaddrStorage::from(local)).unwrap();
            connect(s.as_raw_fd(), &SockaddrStorage::from(remote)).unwrap();
            Repair::Off.set(&s).unwrap();
        }
    };
    place.lab.forwarder.run(|| ends.chunks(2).for_each(leave));
    let left = place.lab.forwarder.execute("ss", &["-Htan", "state", "fin-wait-1"]).unwrap();
    assert_eq!(left.lines().count(), 2 * CONNECTIONS, "{left}");
    let mut second = place.proxy(true);
    second.shut_down();
    place.all_are_reset(&ends, "after sockets that nobody holds");
}

/// More bytes than fit a host that does not read, and fewer than fit the proxy's socket.
const QUEUED: usize = 150_000;

impl Place {
    /// Connections that were spliced and are back in control mode: both ends of each.
    fn copied(&self, proxy: &Running) -> Vec<TcpStream> {
        let ends = self.connections(proxy, "spliced");
        proxy.flows().iter().for_each(|f| drop(proxy.client(&["unsplice", &f["id"].to_string()])));
        eventually("control mode", || proxy.flows().iter().all(|f| f["state"] == "copying").then_some(()));
        ends
    }

    /// Clients of unspliced connections that have ended, except for data in the kernel's queue for the client.
    fn queued(&self, proxy: &Running) -> Vec<TcpStream> {
        let mut ends = self.copied(proxy).into_iter();
        let mut clients = Vec::new();
        while let (Some(client), Some(mut server)) = (ends.next(), ends.next()) {
            client.shutdown(Shutdown::Write).unwrap();
            server.write_all(&[7; QUEUED]).unwrap();
            clients.push(client);
        }
        proxy.flows_end();
        clients
    }
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_stop_resets_hosts_of_what_is_still_in_queues(family: Family) {
    let place = Place::new(family);
    let mut proxy = place.proxy(false);
    let clients = place.queued(&proxy);
    proxy.client(&["stop", "--flush"]);
    assert!(proxy.wait().success(), "{}", proxy.messages());
    for mut client in clients {
        let mut got = Vec::new();
        let end = client.read_to_end(&mut got).map_err(|e| e.kind());
        assert_eq!(end, Err(ErrorKind::ConnectionReset), "{} bytes of {QUEUED}", got.len());
    }
}

/// Entries of ended flows give way to new ones, unless data for the host is still queued.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn what_is_still_in_queues_comes_whole(family: Family) {
    let place = Place::new(family);
    let mut proxy = place.proxy_for(false, 16);
    let clients = place.queued(&proxy);
    for _ in 0..4 {
        drop(place.connections(&proxy, "spliced"));
        proxy.flows_end();
    }
    for mut client in clients {
        let mut got = Vec::new();
        client.read_to_end(&mut got).unwrap_or_else(|e| panic!("{e}, {} bytes of {QUEUED}", got.len()));
        assert!(got == [7; QUEUED], "{} bytes", got.len());
    }
    proxy.client(&["stop", "--flush"]);
    assert!(proxy.wait().success(), "{}", proxy.messages());
}

/// Each connection has an idle limit, but no timer that wakes a thread before it.
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
    // the byte counts are updated first
    eventually("less than one of them wakes somebody", || (in_a_while() < IDLE / 2).then_some(()));
    drop(connections);
}

const UPLOADS: usize = 8;
const BODY: usize = 3_000_000;
const BEGUN: usize = 1_000_000;

/// Spliced uploads of which `BEGUN` bytes have arrived: both ends of each. No host sends anything more.
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
    eventually("all are spliced", || (proxy.flows_in("spliced") == UPLOADS).then_some(()));
    (proxy, all)
}

/// Tasks that waited for a body used to make the data path forget their connections before these were reset.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_stop_resets_both_ends_of_uploads(family: Family) {
    let place = Place::new(family);
    let (mut proxy, ends) = uploads(&place, false);
    proxy.shut_down();
    place.all_are_reset(&ends, "stop");
    assert!(!place.pins.exist());
}

/// Uploads left behind are forwarded to their ends. Then their servers are reset, because no one would forward their
/// replies, and so at last are the clients that wait for a reply.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn uploads_that_are_left_pass_to_their_ends(family: Family) {
    const MOST: usize = BODY - BEGUN - 100_000; // a reset may overtake data not read yet
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
