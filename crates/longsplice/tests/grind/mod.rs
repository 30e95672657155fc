//! The grinder: some hundreds of checked connections of all kinds, while the program is reloaded several times a second,
//! upgraded every few seconds, and killed and started again. No byte is ever wrong; nobody is refused, and no connection ends
//! early, unless its process was killed while it copied it; each connection has one line in the access log, with its bytes; and
//! at the end nothing is left.
//!
//! `GRIND_SECONDS` sets the duration (`make grind`: an hour), and `GRIND_SEED` the order of events; the seed is printed. Needs
//! root and eBPF, and fails without.

mod ends;
mod ledger;
mod lines;
mod plan;
mod program;
mod ways;
mod web;

use crate::running::Control;
use ends::converse;
use ledger::Ledger;
use longsplice_datapath::Holdings;
use longsplice_lab::{Family, Impair, Lab, LinkDirection, Options, Shape, process::wait_for};
use plan::{Kind, Plan};
use program::{Program, Told, lock, write};
use rand::{RngExt, SeedableRng, rngs::SmallRng, seq::SliceRandom};
use serde_json::json;
use std::{
    env,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
        mpsc,
    },
    thread,
    time::{Duration, Instant, SystemTime},
};
use tokio::{runtime, sync::Semaphore, time::sleep};
use ways::{Sources, Way};

/// Streams and clients of HTTP at a time.
const STREAMS: u64 = 180;
const VISITS: u64 = 40;
/// The client that connects all the time has at most so many connections.
const SHORT: usize = 64;
/// Descriptors that are opened with the first connections, and stay.
const LATER: usize = 4;
/// Entries linger for a minute, and records of unknown flows for two.
const LINGER: Duration = Duration::from_secs(240);

fn number(name: &str) -> Option<u64> {
    let value = env::var(name).ok().filter(|value| !value.is_empty())?;
    Some(value.parse().unwrap_or_else(|e| panic!("{name}={value}: {e}")))
}

#[test]
#[ignore = "root"]
fn nothing_is_lost() {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock");
    let seed = number("GRIND_SEED").unwrap_or(now.as_secs());
    let seconds = number("GRIND_SECONDS").unwrap_or_default(); // each act happens at least once
    eprintln!("the grinder runs for {seconds} s, GRIND_SEED={seed}");
    let options = Options { large_packets: false, forwarding: true, ..Options::default() };
    let lab = Lab::new(Shape::TwoDevices, options).expect("a lab");
    // The program's machine is a router, so that a server resets what nobody knows after a kill. But no connection begins past it.
    let begins = "tcp flags & (syn | ack) == syn drop";
    let rules = format!("table inet t {{ chain c {{ type filter hook forward priority 0; {begins}; }}; }}");
    lab.forwarder.execute("nft", &[&rules]).expect("rules");
    lab.client.ip(&Sources::addresses()).expect("addresses");
    let losses =
        [LinkDirection::FromClient, LinkDirection::ToClient, LinkDirection::FromServer, LinkDirection::ToServer];
    let impair = Impair { loss: 0.001, duplicate: 0.0005, ..Impair::NONE };
    let impaired: Vec<_> =
        (0..).zip(losses).map(|(n, way)| lab.impair(way, Impair { seed: seed + n, ..impair })).collect();
    assert!(impaired.iter().all(Result::is_ok), "{impaired:?}");
    let ledger = Arc::new(Ledger::new());
    let program = Program::start(&lab, &ledger);
    Grinder { ledger, program, lab: &lab, seed, r: SmallRng::seed_from_u64(seed) }.run(Duration::from_secs(seconds));
    drop(impaired);
    let names = [&lab.client, &lab.forwarder, &lab.server].map(|namespace| namespace.path());
    drop(lab);
    assert!(names.iter().all(|name| !Path::new(name).exists()), "namespaces are left: {names:?}");
}

/// What is done to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Upgrade,
    Kill,
    /// With all that were before it.
    KillAll,
    KillOldInUpgrade,
    KillNewInUpgrade,
}

struct Grinder<'a> {
    ledger: Arc<Ledger>,
    program: Program,
    lab: &'a Lab,
    seed: u64,
    r: SmallRng,
}

impl Grinder<'_> {
    fn run(mut self, time: Duration) {
        let rested = (self.program.threads(), self.program.descriptors());
        let runs = Arc::new(AtomicBool::new(true));
        let reloads = Arc::new(AtomicU32::new(0));
        let server = self.ledger.clone();
        let serving = runs.clone();
        let (listens, are_listening) = mpsc::channel();
        let servers = self.lab.server.spawn(move || {
            on_one_thread(async {
                ways::serve(&server).expect("servers");
                let _ = listens.send(());
                until(|| !serving.load(SeqCst)).await;
            })
        });
        are_listening.recv().expect("servers");
        let (ledger, seed, serving) = (self.ledger.clone(), self.seed, runs.clone());
        let (handle, is_ready) = mpsc::channel();
        let clients = self.lab.client.spawn(move || {
            on_one_thread(async move {
                let _ = handle.send(runtime::Handle::current());
                clients(&ledger, seed).await;
                until(|| !serving.load(SeqCst)).await;
            })
        });
        let handle = is_ready.recv().expect("a runtime");
        let others = [self.reload_all_the_time(&reloads, handle), self.tell_all_the_time()];
        let began = Instant::now();
        let (mut acts, mut has_played) = (Vec::new(), false);
        loop {
            if acts.is_empty() {
                if (has_played && began.elapsed() >= time) || self.ledger.has_failed_for_good() {
                    break;
                }
                (acts, has_played) = (self.deck(), true);
            }
            self.pass(1000, 3500);
            let act = acts.pop().expect("one more");
            self.play(act);
            self.program.look();
        }
        self.ledger.note("no more traffic");
        self.ledger.close();
        others.into_iter().for_each(|other| other.join().expect("a thread"));
        self.end(&rested, reloads.load(SeqCst));
        runs.store(false, SeqCst);
        servers.join().expect("servers");
        clients.join().expect("clients");
        let failures = self.ledger.failures();
        assert!(failures.is_empty(), "GRIND_SEED={}: {failures:#?}", self.seed);
    }

    /// All acts, with enough upgrades between two kills.
    fn deck(&mut self) -> Vec<Act> {
        use Act::*;
        let mut kills = [Kill, Kill, KillAll, KillOldInUpgrade, KillNewInUpgrade];
        kills.shuffle(&mut self.r);
        kills.into_iter().flat_map(|kill| [kill, Upgrade, Upgrade]).collect()
    }

    /// Waits for a random time in milliseconds.
    fn pass(&mut self, low: u64, high: u64) {
        let end = Instant::now() + Duration::from_millis(self.r.random_range(low..high));
        while Instant::now() < end {
            thread::sleep(Duration::from_millis(100));
            self.program.look();
            self.ledger.settle(false);
        }
    }

    fn play(&mut self, act: Act) {
        let pause = Duration::from_millis(self.r.random_range(0..600));
        let long = Duration::from_millis(self.r.random_range(0..2500));
        match act {
            Act::Upgrade => self.program.upgrade(),
            Act::Kill | Act::KillAll => self.program.kill(act == Act::KillAll, pause),
            Act::KillOldInUpgrade => self.program.kill_in_upgrade(false, long),
            Act::KillNewInUpgrade => self.program.kill_in_upgrade(true, long),
        }
    }

    /// Several times a second. Each listener that comes gets a client before it goes.
    fn reload_all_the_time(&self, count: &Arc<AtomicU32>, handle: runtime::Handle) -> thread::JoinHandle<()> {
        let (ledger, count, epochs) = (self.ledger.clone(), count.clone(), self.program.epochs.clone());
        let (file, control) = (self.program.file(), self.program.control());
        let (sources, mut r) = (Sources::of(100..102), SmallRng::seed_from_u64(self.seed ^ 1));
        thread::spawn(move || {
            let mut turn = 0;
            while ledger.is_open() {
                thread::sleep(Duration::from_millis(r.random_range(20..200)));
                let Some(epoch) = epochs.now() else { continue };
                turn += 1;
                write(&file, turn);
                let asked = Control::at(&control)
                    .and_then(|mut control| control.ask(&json!({ "version": 1, "ask": "reload" })));
                let is_same = || epochs.now() == Some(epoch);
                match asked {
                    Ok(answer) if answer["reloaded"] == true => drop(count.fetch_add(1, SeqCst)),
                    asked if is_same() => ledger.fail(format!("a reload fails: {asked:?}")),
                    _ => continue,
                }
                if turn % 2 == 1 {
                    let seed = Plan::seed(Kind::Paced, &mut r);
                    let family = Family::BOTH[r.random_range(0..2)];
                    let from = sources.next(family);
                    let of = ledger.clone();
                    ledger.begin(seed, Way::Extra, from, family);
                    handle.spawn(async move { stream(&of, seed, Way::Extra, [family; 2], from).await });
                    // it has to be served before the listener goes
                    wait_for(program::PATIENCE, || ledger.has_arrived(seed).then_some(()));
                }
            }
        })
    }

    /// Sends commands to some flows.
    fn tell_all_the_time(&self) -> thread::JoinHandle<()> {
        let (ledger, control, told) = (self.ledger.clone(), self.program.control(), self.program.told.clone());
        let mut r = SmallRng::seed_from_u64(self.seed ^ 2);
        thread::spawn(move || {
            while ledger.is_open() {
                thread::sleep(Duration::from_millis(r.random_range(50..400)));
                let _ = tell(&control, &told, &mut r); // there may be no process
            }
        })
    }

    fn end(&mut self, rested: &(Vec<String>, Vec<String>), reloads: u32) {
        let quiet = wait_for(ends::HANGS + Duration::from_secs(90), || {
            self.program.look();
            self.ledger.settle(false);
            (self.ledger.ends() == 0).then_some(())
        });
        if quiet.is_none() {
            self.ledger.fail(format!("{} ends of connections hang: {:#?}", self.ledger.ends(), self.ledger.open()));
        }
        // as it was at the start
        write(&self.program.file(), 0);
        let asked =
            Control::at(&self.program.control()).and_then(|mut c| c.ask(&json!({ "version": 1, "ask": "reload" })));
        if !asked.as_ref().is_ok_and(|answer| answer["reloaded"] == true) {
            self.ledger.fail(format!("a reload fails: {asked:?}"));
        }
        let ledger = self.ledger.clone();
        let mut left = |what: &str, is_gone: &dyn Fn(&Program) -> Option<String>| {
            let mut last = None;
            let gone = wait_for(LINGER, || {
                self.program.look();
                last = is_gone(&self.program);
                last.is_none().then_some(())
            });
            match gone {
                Some(()) => ledger.note(&format!("{what}: nothing is left")),
                None => ledger.fail(format!("{what}: {}", last.unwrap_or_default())),
            }
        };
        let unless = |is: bool, what: String| (!is).then_some(what);
        left("processes", &|program| {
            let all = program.processes();
            unless(all.len() == 1, format!("{all:?} are left"))
        });
        left("flows", &|program| {
            let flows = Control::at(&program.control()).map(|mut control| control.flows()).unwrap_or_default();
            unless(flows.is_empty(), format!("{flows:#?} are left"))
        });
        left("tables", &|program| {
            let holdings = program.holdings();
            unless(holdings == Holdings::default(), format!("{holdings} are left"))
        });
        left("threads", &|program| {
            let threads = program.threads();
            unless(threads.len() <= rested.0.len(), format!("{threads:?}, and at the start {:?}", rested.0))
        });
        left("descriptors", &|program| {
            let all = program.descriptors();
            unless(all.len() <= rested.1.len() + LATER, format!("{all:#?}, and at the start {:#?}", rested.1))
        });
        self.program.stop();
        self.ledger.settle(true);
        eprintln!("{}\n{reloads} reloads", self.ledger.told());
    }
}

fn tell(control: &Path, told: &Told, r: &mut SmallRng) -> std::io::Result<()> {
    let mut told = lock(told);
    let mut control = Control::at(control)?;
    let answer = control.ask(&json!({ "version": 1, "ask": "ls" }))?;
    let mut flows = answer["flows"].as_array().cloned().unwrap_or_default();
    for _ in 0..r.random_range(1..5).min(flows.len()) {
        let flow = flows.swap_remove(r.random_range(0..flows.len()));
        let ask = if flow["state"] == "copying" { "splice" } else { "unsplice" };
        let id = flow["id"].as_u64().expect("a number");
        told.insert(id, ask);
        // it may have ended meanwhile
        control.ask(&json!({ "version": 1, "ask": ask, "id": id }))?;
    }
    Ok(())
}

fn on_one_thread(work: impl Future<Output = ()>) {
    let runtime = runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(work);
}

async fn until(is: impl Fn() -> bool) {
    while !is() {
        sleep(Duration::from_millis(50)).await;
    }
}

/// Starts all clients, and returns when there are to be no more connections.
async fn clients(ledger: &Arc<Ledger>, seed: u64) {
    let sources = Arc::new(Sources::of(102..200));
    let families = |r: &mut SmallRng| [0; 2].map(|_| Family::BOTH[r.random_range(0..2)]);
    for n in 0..STREAMS {
        let (ledger, sources, mut r) = (ledger.clone(), sources.clone(), SmallRng::seed_from_u64(seed ^ (n + 1) << 32));
        tokio::spawn(async move {
            sleep(Duration::from_millis(r.random_range(0..2000))).await;
            while ledger.is_open() {
                let way = Way::ALL[r.random_range(0..Way::ALL.len())];
                let (number, families) = (Plan::seed(Kind::lasting(&mut r), &mut r), way.families(families(&mut r)));
                let from = sources.next(families[0]);
                ledger.begin(number, way, from, families[1]);
                stream(&ledger, number, way, families, from).await;
                sleep(Duration::from_millis(r.random_range(10..100))).await;
            }
        });
    }
    for n in 0..VISITS {
        let (ledger, sources, mut r) = (ledger.clone(), sources.clone(), SmallRng::seed_from_u64(seed ^ (n + 1) << 48));
        tokio::spawn(async move {
            while ledger.is_open() {
                let _open = ledger.count();
                web::visit(&ledger, &sources, SmallRng::seed_from_u64(r.random())).await;
                sleep(Duration::from_millis(r.random_range(10..100))).await;
            }
        });
    }
    let room = Arc::new(Semaphore::new(SHORT));
    let mut r = SmallRng::seed_from_u64(seed ^ 3);
    while ledger.is_open() {
        sleep(Duration::from_millis(r.random_range(2..12))).await;
        let Ok(place) = room.clone().acquire_owned().await else { return };
        let way = Way::ALL[r.random_range(0..Way::ALL.len())];
        let (number, families) = (Plan::seed(Kind::Short, &mut r), way.families(families(&mut r)));
        let (ledger, from) = (ledger.clone(), sources.next(families[0]));
        ledger.begin(number, way, from, families[1]);
        tokio::spawn(async move {
            stream(&ledger, number, way, families, from).await;
            drop(place);
        });
    }
}

/// One connection of a client, from start to end.
async fn stream(ledger: &Ledger, seed: u64, way: Way, [family, to]: [Family; 2], from: std::net::SocketAddr) {
    let _open = ledger.count();
    let seen = match ways::open(way, family, to, from).await {
        Ok((stream, got)) => Ok(converse(stream, seed, 0, got).await),
        Err(error) => Err(error),
    };
    let is_refused = seen.is_err();
    ledger.client_done(seed, seen);
    if is_refused {
        sleep(Duration::from_millis(200)).await;
    }
}
