//! Each way in each mode: copied, spliced, and switched again and again. Nothing else happens, so nobody has an excuse.

use super::{
    ledger::Ledger,
    plan::{HANGS, Kind},
    program::{self, Program},
    streams,
    traffic::Traffic,
    ways::Way,
    web,
};
use crate::running::Control;
use longsplice_lab::{Lab, Options, Shape};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use serde_json::Value;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};
use test_case::test_case;

/// Bytes of a connection that cannot pass before it is spliced.
const MANY: u64 = 1_000_000;

#[test_case("never", false; "copied")]
#[test_case("at-once", false; "spliced")]
#[test_case("at-once", true; "switched")]
#[ignore = "root"]
fn each_way(splice: &str, switches: bool) {
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).expect("a lab");
    let mut program = Program::start(&lab, Some(splice));
    let traffic = Traffic::new(Ledger::new());
    streams::serve(&traffic, &lab);
    let stop = Arc::new(AtomicBool::new(!switches));
    program::tell_now_and_then(&program, 1, &stop);
    let all = Way::ALL.into_iter().flat_map(|way| Kind::ALL.map(|kind| (way, kind)));
    let one = |(seed, (way, kind))| {
        let (traffic, server) = (traffic.clone(), lab.server.clone());
        lab.client.spawn(move || streams::one(&traffic, &server, way, kind, None, &mut SmallRng::seed_from_u64(seed)))
    };
    let clients: Vec<_> = (1..).zip(all).map(one).collect();
    clients.into_iter().for_each(|client| client.join().expect("a client"));
    stop.store(true, Relaxed);
    traffic.is_quiet(HANGS);
    traffic.ledger.settle(true);
    assert_eq!((traffic.ledger.failures(), traffic.ledger.open()), (Vec::new(), Vec::new()));
    traffic.ledger.tally(|tally| {
        let of_way = |way| tally.ways.get(way).copied().unwrap_or_default();
        assert!(Way::ALL.iter().all(|way| of_way(way) == Kind::ALL.len()), "{tally:#?}");
    });
    program.has_no_flows();
    let lines = program.running().records();
    let of = |line: &Value, key: &str| line[key].as_u64().unwrap_or_default();
    let long = lines.iter().filter(|line| of(line, "bytes_up") + of(line, "bytes_down") > MANY);
    let splices: Vec<u64> = long.map(|line| of(line, "splices")).collect();
    assert!(splices.len() > Way::ALL.len(), "{}", splices.len());
    match splice {
        "never" => assert!(splices.iter().all(|n| *n == 0), "{splices:?}"),
        _ => assert!(splices.iter().all(|n| *n > 0) && (splices.iter().any(|n| *n > 1) == switches), "{splices:?}"),
    }
    program.flush();
}

/// Bodies over persistent connections, while flows are told to switch all the time: when one is taken back, the next message of
/// either host is often there already.
#[test]
#[ignore = "root"]
fn bodies_in_a_storm_of_commands() {
    const REQUESTS: usize = 300;
    let lab = Lab::new(Shape::TwoDevices, Options::default()).expect("a lab");
    let mut program = Program::start(&lab, None);
    let traffic = Traffic::new(Ledger::new());
    web::begin(&traffic, &lab, 1);
    let answered = || {
        let mut requests = 0;
        traffic.ledger.tally(|tally| requests = tally.requests);
        requests
    };
    let (mut r, mut control) = (SmallRng::seed_from_u64(1), Control::of(program.running()));
    while answered() < REQUESTS && traffic.ledger.failures().is_empty() {
        let mut told = program.told.lock().expect("nobody panics under this lock");
        told.tell_some(&mut control, 5, &mut r).expect("the program answers");
        drop(told);
        thread::sleep(Duration::from_micros(r.random_range(0..3000)));
    }
    traffic.end();
    traffic.is_quiet(HANGS);
    let lines = program.running().records();
    let broken: Vec<_> = lines.iter().filter(|line| line["how"] != "closed").collect();
    assert_eq!((traffic.ledger.failures(), broken), (Vec::new(), Vec::new()));
    let splices: u64 = lines.iter().filter_map(|line| line["splices"].as_u64()).sum();
    assert!(splices > REQUESTS as u64, "{splices} splices");
    program.has_no_flows();
    program.flush();
}
