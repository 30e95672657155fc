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
/// Maximum bytes per released flow: the record takes about 700; the rest is tables that grow by doubling, and what the allocator
/// keeps for each thread. Runs differ by a third of a megabyte, or 110 bytes per flow, whichever thread ends the flows.
const MOST: usize = 1900;

/// Bytes of anonymous memory that this process has in use, counted page by page: VmRSS is an estimate, off by 64 pages per processor.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/smaps_rollup").expect("proc");
    let line = status.lines().find_map(|l| l.strip_prefix("Anonymous:")).expect("a line for anonymous memory");
    line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") * 1024
}

/// Counts the flows that are released, a few at a time: a list of all would take more memory than is measured.
fn released(f: &Forwarder) -> usize {
    let (mut n, mut last) = (0, 0);
    loop {
        let page = f.splicer.flows_after(last, 50, Some(FlowState::Released));
        let Some(flow) = page.last() else { return n };
        (n, last) = (n + page.len(), flow.id);
    }
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
    wait_for(Duration::from_secs(10), || (released(f) == all).then_some(())).expect("all are released");
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
