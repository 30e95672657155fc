//! User-space memory of a released flow: a record, and no task.
use longsplice_engine::{EndReason, FlowState, Policy};
use longsplice_lab::{
    Family, Lab, Shape,
    process::wait_for,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use longsplice_tests::{Forwarder, at_once};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    time::Duration,
};

/// Flows opened before the measurement, until allocator arenas exist and code is paged in.
const FIRST: usize = 200;
const FLOWS: usize = 3000;
/// Maximum bytes per released flow: the record takes about 700; the
/// rest is tables that grow by doubling, and allocator overhead.
const MOST: usize = 1700;

fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("proc");
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") * 1024
}

/// Opens connections through the forwarder with one byte each way, and waits until all existing flows are released.
fn open(lab: &Lab, f: &Forwarder, listener: &TcpListener, n: usize, all: usize) -> Vec<(TcpStream, TcpStream)> {
    let proxy = FORWARDER_TO_CLIENT.port(Family::V4, 7000);
    let pairs = lab.client.run(|| {
        let mut pairs = Vec::with_capacity(n);
        for _ in 0..n {
            let mut client = TcpStream::connect(proxy).expect("connect");
            client.write_all(b"?").expect("write");
            let mut server = listener.accept().expect("accept").0;
            for end in [&client, &server] {
                end.set_read_timeout(Some(Duration::from_secs(10))).expect("socket");
            }
            server.read_exact(&mut [0]).expect("read");
            server.write_all(b"!").expect("write");
            client.read_exact(&mut [0]).expect("read");
            pairs.push((client, server));
        }
        pairs
    });
    let released = || f.splicer.flows().iter().filter(|f| f.state == FlowState::Released).count() == all;
    wait_for(Duration::from_secs(10), || released().then_some(())).expect("all are released");
    pairs
}

#[test]
#[ignore = "root"]
fn released_flows_are_small_and_end_well() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("limit");
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).expect("limit");
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let server = SERVER.port(Family::V4, 7000);
    let listener = lab.server.run(|| TcpListener::bind(server)).expect("listen");
    let policy = Policy { release_after: Some(Duration::ZERO), ..at_once() };
    let f = Forwarder::start(&lab, FORWARDER_TO_CLIENT.port(Family::V4, 7000), server, policy);
    let first = open(&lab, &f, &listener, FIRST, FIRST);
    let before = resident();
    let pairs = open(&lab, &f, &listener, FLOWS, FIRST + FLOWS);
    let each = resident().saturating_sub(before) / FLOWS;
    eprintln!("{each} bytes per released flow");
    assert!(each < MOST, "{each} bytes per released flow");

    for (mut client, mut server) in first.into_iter().chain(pairs) {
        client.write_all(b"forwarded").expect("write");
        server.read_exact(&mut [0; 9]).expect("read");
    }
    let all = f.ended(FIRST + FLOWS);
    for e in &all {
        assert_eq!((e.how, e.bytes_up, e.bytes_down, e.splices), (EndReason::Closed, 10, 1, 1), "{e:?}");
    }
    assert!(f.splicer.flows().is_empty());
}
