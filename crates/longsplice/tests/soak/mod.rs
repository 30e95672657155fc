//! A soak test: everything at once, for any length of time. Checked streams, HTTP and datagrams pass through
//! listeners of each kind, in both address families, while flows are told to switch, the process is
//! killed and replaced, the network changes, tables are full and descriptors are few. At the end: no
//! wrong byte, no connection that hangs, and nothing left over: flows, entries, descriptors, memory.
//!
//! `LONGSPLICE_SOAK_SECONDS` sets the duration (`make test-all`: 240, `make soak`: an hour), and `LONGSPLICE_SOAK_SEED` the
//! sequence of events; the seed is printed. Needs root and eBPF, and fails without.

mod datagrams;
mod deck;
mod ftp;
mod ledger;
mod modes;
mod plan;
mod program;
mod streams;
mod traffic;
mod ways;
mod web;

use crate::running::more_open;
use deck::{Card, Stage};
use ledger::Ledger;
use longsplice_datapath::Holdings;
use longsplice_lab::{Family, Lab, Options, Shape, process::wait_for};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use program::{Going, Means, Program};
use rand::{SeedableRng, rngs::SmallRng};
use std::{
    collections::BTreeSet,
    env,
    fmt::{self, Display, Formatter},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime},
};
use traffic::Traffic;
use ways::Way;

/// Total duration, unless the environment sets another.
const SECONDS: u64 = 60 + ENDING;
/// Part of the duration reserved until everything has ended.
const ENDING: u64 = 110;
/// Time limit for connections that have nothing to wait for. Hanging connections are found by their own limits.
const DRAIN: Duration = Duration::from_secs(200);
/// Entries linger for a minute, and records of unknown flows for two.
const LINGER: Duration = Duration::from_secs(200);
/// Kilobytes by which the program's memory may grow from start to end: memory kept by threads and allocators.
const MEMORY: u64 = 12 * 1024;

fn number(name: &str) -> Option<u64> {
    let value = env::var(name).ok().filter(|value| !value.is_empty())?;
    Some(value.parse().unwrap_or_else(|e| panic!("{name}={value}: {e}")))
}

#[test]
#[ignore = "root"]
fn everything_at_once() {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock");
    let seed = number("LONGSPLICE_SOAK_SEED").unwrap_or(now.as_secs());
    let seconds = number("LONGSPLICE_SOAK_SECONDS").unwrap_or(SECONDS);
    eprintln!("a soak of {seconds} s, LONGSPLICE_SOAK_SEED={seed}");
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("limits");
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).expect("limits");

    // transparent connections without a free entry are forwarded as by a router
    let options = Options { forwarding: true, ..Options::default() };
    let lab = Lab::new(Shape::TwoDevices, options).expect("a lab");
    let names = [&lab.client, &lab.forwarder, &lab.server].map(|namespace| namespace.path());
    deck::prepare(&lab);
    let program = Program::start(&lab, None);
    let traffic = Traffic::new(Ledger::new());
    streams::begin(&traffic, &lab, seed);
    web::begin(&traffic, &lab, seed);
    datagrams::begin(&traffic, &lab, seed);
    let stage = Stage { program, traffic, r: SmallRng::seed_from_u64(seed), lab };
    Soak { stage, seed }.run(Duration::from_secs(seconds.saturating_sub(ENDING)));
    assert!(names.iter().all(|name| !Path::new(name).exists()), "namespaces are left: {names:?}");
}

struct Soak {
    stage: Stage,
    seed: u64,
}

/// What an idle program uses.
struct Footprint {
    /// A line for each.
    descriptors: BTreeSet<String>,
    /// Kilobytes.
    memory: u64,
}

impl Footprint {
    fn of(program: &Program) -> Footprint {
        Footprint { descriptors: program.running().open_files(), memory: program.memory() }
    }
}

impl Display for Footprint {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} descriptors and {} KB of memory", self.descriptors.len(), self.memory)
    }
}

impl Soak {
    fn run(mut self, time: Duration) {
        let began = Instant::now();
        let stop = Arc::new(AtomicBool::new(false));
        program::tell_now_and_then(&self.stage.program, self.seed, &stop);
        self.stage.pass(2000, 3000);
        self.play(true, began + time * 6 / 10);
        let before = self.begin_anew();
        self.play(false, began + time);
        stop.store(true, Relaxed);
        self.end(&before);
    }

    /// Plays at least one whole deck.
    fn play(&mut self, process: bool, until: Instant) {
        loop {
            for card in Card::deck(process, &mut self.stage.r) {
                self.stage.play(card);
                self.check();
            }
            if Instant::now() >= until {
                return;
            }
        }
    }

    /// Starts a new process, and returns what it uses before it has served anyone.
    fn begin_anew(&mut self) -> Footprint {
        self.stage.traffic.open(false);
        self.stage.replace(Going::Clean, Means::Ample, |_| {});
        self.quiet();
        let program = &self.stage.program;
        program.has_no_flows();
        program.running().comes_to_rest();
        let before = Footprint::of(program);
        self.stage.traffic.ledger.note(&format!("at the start: {before}"));
        self.stage.traffic.open(true);
        self.stage.pass(1000, 2000);
        before
    }

    /// Waits until all traffic has ended by itself.
    fn quiet(&mut self) {
        let is_quiet = self.stage.traffic.is_quiet(DRAIN);
        self.stage.traffic.ledger.settle(true);
        let open = self.stage.traffic.ledger.open();
        if !is_quiet && self.stage.traffic.ledger.failures().is_empty() {
            let ends = self.stage.traffic.ends();
            self.stage.traffic.ledger.fail(format!("hung: {ends} ends of connections, of streams {open:#?}"));
        }
        self.check();
    }

    fn end(mut self, before: &Footprint) {
        let traffic = self.stage.traffic.clone();
        traffic.ledger.note("no more traffic");
        traffic.end();
        self.quiet();
        let program = &self.stage.program;
        program.has_no_flows();
        let nothing = Holdings { transparent: Family::BOTH.len(), ..Holdings::default() }; // the listeners still exist
        let is_empty = wait_for(LINGER, || (program.holdings() == nothing).then_some(()));
        match is_empty {
            Some(()) => traffic.ledger.note("the tables are empty"),
            None => traffic.ledger.fail(format!("the tables are not empty: {}", program.holdings())),
        }
        program.running().comes_to_rest();
        let after = Footprint::of(program);
        traffic.ledger.note(&format!("at the end: {after}"));
        if let Some(more) = more_open(&before.descriptors, &after.descriptors) {
            traffic.ledger.fail(more);
        }
        if after.memory > before.memory + MEMORY {
            traffic.ledger.fail(format!("{} KB of memory, and {} at the start", after.memory, before.memory));
        }
        self.check();
        self.stage.program.end();
        self.stage.lab.end_capture();
        let processes = program::processes(&self.stage.lab);
        assert!(processes.is_empty(), "processes are left: {processes}");
        traffic.ledger.tally(|tally| {
            eprintln!("{tally:#?}");
            let is_one = tally.outlived > 0
                && tally.requests > 0
                && tally.reused > 0
                && tally.whole.len() >= 6
                && tally.datagrams > 0
                && tally.ways.len() == Way::ALL.len();
            assert!(is_one, "this was no soak: {tally:?}");
        });
    }

    /// Checks that nothing has failed so far.
    fn check(&mut self) {
        let failures = self.stage.traffic.ledger.failures();
        if failures.is_empty() {
            return;
        }
        let Lab { client, forwarder, server, .. } = &self.stage.lab;
        for host in [client, forwarder, server] {
            eprintln!("--- sockets of {}:\n{}", host.name(), host.execute("ss", &["-tanoi"]).unwrap_or_default());
            eprintln!("--- and its neighbours:\n{}", host.execute("ip", &["-s", "neigh"]).unwrap_or_default());
        }
        for (leg, record) in self.stage.program.records() {
            eprintln!("--- record of {leg:?}: {record:?}");
        }
        eprintln!("--- what the processes before have said:\n{}", self.stage.program.before());
        // Closest to the failure, since reports are cut in the middle.
        eprintln!("--- what happened last:\n{}", self.stage.traffic.ledger.last_events(40));
        panic!("LONGSPLICE_SOAK_SEED={}: {failures:#?}", self.seed);
    }
}
