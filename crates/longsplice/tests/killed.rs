//! SIGKILL at every step of a splice and an unsplice: a connection either continues intact, or ends so that both hosts
//! notice. Needs root and eBPF, and fails without.

use crate::running::{self, Control, LONGSPLICE, Pins, Running, connect, eventually, round_trip};
use longsplice_lab::{
    Family, Lab, Shape,
    pattern::{self, Mismatch},
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::{self, Cue, Ending, Report, Script, StreamEnd, converse, intact, listen, serve},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::{
    collections::{HashMap, HashSet},
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    thread,
    time::{Duration, Instant},
};

const PORT: u16 = 7000;
/// Port of the echo server, used for connections opened after the kill.
const ECHO: u16 = 7001;
const CONNECTIONS: u64 = 8;
const ROUNDS: u64 = 8;
/// More bytes than any test sends, so that only commands splice. "never" would refuse them.
const BY_HAND: &str = "1000000000000";
const PACE: u64 = 1_000_000;
/// A host that still waits after this time has been left hanging: two starts on a busy machine, and a retransmission that has
/// waited for one. Less than the minute after which drains are given up.
const DEADLINE: Duration = Duration::from_secs(50);

/// Random numbers that are the same in every run.
struct Dice {
    seed: u64,
    thrown: u64,
}

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        let mut word = [0; 8];
        // The pattern begins with the seed itself.
        pattern::fill(self.seed, 8 + self.thrown * 8, &mut word);
        self.thrown += 1;
        u64::from_le_bytes(word) % limit
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 0
    }

    fn micros(&mut self, limit: u64) -> Duration {
        Duration::from_micros(self.below(limit))
    }
}

/// Sends random splice and unsplice commands, and records the states seen.
struct Driver {
    control: Control,
    dice: Dice,
    /// The last command sent to each flow.
    told: HashMap<u64, &'static str>,
    /// Clients of the flows that were spliced when last listed.
    spliced: HashSet<String>,
    /// Those of them that have received no command since: the kill must not affect them at all.
    steady: HashSet<String>,
    states: HashMap<String, usize>,
}

impl Driver {
    /// Lists all flows, and sends a command to a random half of them. `wait`: also waits for the answers.
    fn step(&mut self, wait: bool) {
        let mut commands = String::new();
        (self.spliced, self.steady, self.states) = Default::default();
        let flows = self.control.flows();
        let mut told = 0;
        for flow in &flows {
            let (id, client) = (flow["id"].as_u64().unwrap(), flow["client"].as_str().unwrap().to_owned());
            let state = flow["state"].as_str().unwrap();
            *self.states.entry(state.to_owned()).or_default() += 1;
            let ask = match state {
                "copying" => "splice",
                "spliced" => "unsplice",
                _ => continue,
            };
            let chosen = self.dice.coin();
            if state == "spliced" {
                if !chosen && self.told.get(&id).is_none_or(|last| *last == "splice") {
                    self.steady.insert(client.clone());
                }
                self.spliced.insert(client);
            }
            if chosen {
                self.told.insert(id, ask);
                commands += &format!("{}\n", json!({ "version": 1, "ask": ask, "id": id }));
                told += 1;
            }
        }
        self.control.send(&commands);
        if wait {
            // An error about a flow that has ended meanwhile is harmless.
            (0..told).for_each(|_| drop(self.control.answer()));
        }
    }

    /// Switches for some time, sends a last round of commands, and returns when it is time to kill.
    fn drive(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.step(true);
            thread::sleep(self.dice.micros(10_000));
        }
        self.step(false);
        // A switch takes from some hundred microseconds to some milliseconds.
        let longest = 200 << self.dice.below(6);
        thread::sleep(self.dice.micros(longest));
    }
}

/// The results of the connections of one round, or of all rounds.
#[derive(Debug, Default)]
struct Tally {
    connections: usize,
    spliced: usize,
    steady: usize,
    survived: usize,
    ended: usize,
    recovered: usize,
}

impl Tally {
    fn add(&mut self, other: &Tally) {
        self.connections += other.connections;
        self.spliced += other.spliced;
        self.steady += other.steady;
        self.survived += other.survived;
        self.ended += other.ended;
        self.recovered += other.recovered;
    }
}

struct Round {
    pins: Pins,
    lab: Lab,
    family: Family,
    seed: u64,
}

impl Round {
    fn new(seed: u64) -> Round {
        let family = Family::BOTH[seed as usize % 2];
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        Round { pins: Pins::of(&lab.forwarder), lab, family, seed }
    }

    fn front(&self, port: u16) -> SocketAddr {
        FORWARDER_TO_CLIENT.port(self.family, port)
    }

    fn proxy(&self, splice: &str) -> Running {
        self.proxy_with(splice, &[])
    }

    fn proxy_with(&self, splice: &str, more: &[&str]) -> Running {
        let [traffic, echo] =
            [PORT, ECHO].map(|port| format!("{}={}", self.front(port), SERVER.port(self.family, port)));
        let arguments = ["--plug", &traffic, "--plug", &echo, "--splice", splice];
        Running::start(self.lab.forwarder.command(LONGSPLICE), None, &arguments, more)
    }

    /// A process that splices at once, prepared to be killed or to be stopped with its flows left running.
    fn proxy_to_go(&self, killed: bool) -> Running {
        self.proxy_with("at-once", if killed { &[] } else { &["--leave-flows"] })
    }

    fn serve_echo(&self) {
        self.lab.server.run(|| running::echo(TcpListener::bind(SERVER.port(self.family, ECHO)).unwrap()));
    }

    fn run(&self, splice: &str) -> Tally {
        let mut dice = Dice { seed: self.seed, thrown: 0 };
        let mut first = self.proxy(splice);
        let server = SERVER.port(self.family, PORT);
        let enough = Cue::default();
        let answer = Script::answerer().until(&enough, PACE).deadline(DEADLINE);
        let serving =
            self.lab.server.run(|| serve(listen(server, &answer).unwrap(), CONNECTIONS as usize, answer.clone()));
        self.serve_echo();
        let control = Control::of(&first);
        let front = self.front(PORT);
        let clients: Vec<_> = (0..CONNECTIONS)
            .map(|i| {
                let script = Script::opener(self.seed * 1000 + i).until(&enough, PACE).deadline(DEADLINE);
                self.lab.client.spawn(move || {
                    // Connecting to a proxy killed before it could accept is refused.
                    traffic::connect(front, &script).ok().map(|stream| converse(stream, &script))
                })
            })
            .collect();

        let time = if splice == "at-once" { dice.micros(30_000) } else { dice.micros(1_000_000) };
        let mut driver = Driver {
            control,
            dice,
            told: HashMap::new(),
            spliced: HashSet::new(),
            steady: HashSet::new(),
            states: HashMap::new(),
        };
        driver.drive(time);
        first.kill();
        thread::sleep(driver.dice.micros(400_000));

        let mut second = self.proxy("at-once");
        let recovered = self.recovered(&second, &driver);
        self.new_connection(&second);
        enough.give();
        let clients: Vec<Report> = clients.into_iter().filter_map(|client| client.join().unwrap()).collect();
        let servers = serving.stop();
        let mut tally = self.judge(&clients, &servers, &driver);
        tally.recovered = recovered;
        eprintln!(
            "{splice}, round {}, {:?}: killed after {time:?} at {:?}: {tally:?}",
            self.seed, self.family, driver.states
        );

        second.signal(Signal::SIGTERM);
        assert!(second.wait().success(), "{}", second.messages());
        self.nothing_left();
        tally
    }

    /// The number of flows that the new process lists. Flows without commands must be among them, or have been taken over and
    /// have ended since.
    fn recovered(&self, proxy: &Running, driver: &Driver) -> usize {
        let flows = proxy.flows();
        let known: HashSet<&str> = flows.iter().filter_map(|flow| flow["client"].as_str()).collect();
        let missing: Vec<&String> = driver.steady.iter().filter(|client| !known.contains(client.as_str())).collect();
        let ended = taken_over(proxy).saturating_sub(flows.len());
        assert!(ended >= missing.len(), "{missing:?} are spliced, but not taken over: {flows:?}");
        flows.len()
    }

    /// Checks that a new connection works as usual.
    fn new_connection(&self, proxy: &Running) {
        let mut connection = self.lab.client.run(|| connect(self.front(ECHO)));
        round_trip(&mut connection, b"hello");
        let client = connection.local_addr().unwrap().to_string();
        eventually("the new connection is spliced", || {
            proxy.flows().iter().any(|flow| flow["client"] == client && flow["state"] == "spliced").then_some(())
        });
        round_trip(&mut connection, &[7; 100_000]);
    }

    fn judge(&self, clients: &[Report], servers: &[Report], driver: &Driver) -> Tally {
        let mut tally = Tally { connections: clients.len(), ..Tally::default() };
        let answers: HashMap<u64, &Report> = servers.iter().filter_map(|s| Some((s.seed?, s))).collect();
        for report in clients.iter().chain(servers) {
            self.ended(report);
        }
        for client in clients {
            let name = client.local.map(|local| local.to_string()).unwrap_or_default();
            let server = answers.get(&client.seed.unwrap());
            let whole = server.map_or_else(|| Err("it never came to the server".to_owned()), |s| intact(client, s));
            tally.spliced += usize::from(driver.spliced.contains(&name));
            tally.steady += usize::from(driver.steady.contains(&name));
            match whole {
                Ok(()) => tally.survived += 1,
                Err(why) => {
                    assert!(!driver.steady.contains(&name), "{}: {name} was spliced: {why}", self.seed);
                    tally.ended += 1;
                }
            }
            if let Some(server) = server {
                for (from, to) in [(client, *server), (*server, client)] {
                    assert!(to.received <= from.sent, "{}: bytes out of nothing: {client}; {server}", self.seed);
                }
            }
        }
        tally
    }

    /// Checks that no byte is wrong, and that the end did not have to wait for the time limit.
    fn ended(&self, report: &Report) {
        let wrong: Option<Mismatch> = report.mismatch;
        let ends = [&report.end, &report.send_end];
        let over = ends.iter().all(|how| matches!(how, StreamEnd::Eof | StreamEnd::Reset));
        assert!(wrong.is_none() && over, "round {}, {:?} > {:?}: {report}", self.seed, report.local, report.remote);
    }

    fn nothing_left(&self) {
        assert!(!self.pins.exist(), "a clean stop leaves nothing pinned");
        // The kernel owns sockets closed by the kill, and tries to deliver their FINs for a while.
        const CLOSED: [&str; 5] = ["TIME-WAIT", "FIN-WAIT", "CLOSING", "LAST-ACK", "UNCONN"];
        let sockets = self.lab.forwarder.execute("ss", &["-tanH"]).unwrap();
        let (closed, open): (Vec<&str>, Vec<&str>) =
            sockets.lines().partition(|line| CLOSED.iter().any(|state| line.starts_with(state)));
        assert!(open.is_empty(), "round {}: {open:#?}", self.seed);
        let owed = closed.iter().filter(|line| !line.starts_with("TIME-WAIT")).count();
        if owed > 0 {
            eprintln!("round {}: {owed} sockets that the kernel still closes", self.seed);
        }
        let name = self.lab.forwarder.name();
        let processes = Command::new("ip").args(["netns", "pids", name]).output().unwrap();
        assert!(processes.stdout.is_empty(), "{processes:?}");
    }
}

/// The number of flows that the new process has found, including those that were over.
fn taken_over(proxy: &Running) -> usize {
    let messages = proxy.messages();
    let number = |name| {
        let (_, rest) = messages.split_once(name).unwrap_or(("", "0"));
        rest.split_whitespace().next().unwrap().parse::<usize>().unwrap()
    };
    number(" spliced=") + number(" over=") + number(" draining=")
}

fn rounds(splice: &str, first: u64) -> Tally {
    let mut all = Tally::default();
    for seed in first..first + ROUNDS {
        all.add(&Round::new(seed).run(splice));
    }
    eprintln!("--splice {splice}, all rounds: {all:?}");
    all
}

#[test]
#[ignore = "root"]
fn killed_while_flows_are_switched_at_random() {
    let all = rounds(BY_HAND, 100);
    assert!(all.spliced > 0 && all.steady > 0 && all.survived > 0 && all.recovered > 0, "{all:?}");
    assert!(all.ended > 0, "every kill came too late to matter: {all:?}");
}

#[test]
#[ignore = "root"]
fn killed_while_flows_begin() {
    let all = rounds("at-once", 200);
    assert!(all.survived > 0, "{all:?}");
}

/// Flows of an earlier process end with the process that has taken them over, and both hosts are reset.
#[test]
#[ignore = "root"]
fn killed_and_then_stopped() {
    for (seed, flush) in [(300, false), (301, false), (302, true), (303, true)] {
        let round = Round::new(seed);
        let mut first = round.proxy("at-once");
        let server = SERVER.port(round.family, PORT);
        let never = Cue::default(); // the reset ends the connection
        let answer = Script::answerer().until(&never, PACE).deadline(DEADLINE);
        let serving = round.lab.server.run(|| serve(listen(server, &answer).unwrap(), 1, answer.clone()));
        let (front, script) = (round.front(PORT), Script::opener(seed).until(&never, PACE).deadline(DEADLINE));
        let client = round.lab.client.spawn(move || converse(traffic::connect(front, &script).unwrap(), &script));
        eventually("spliced", || (Control::of(&first).flows().first()?["state"] == "spliced").then_some(()));
        first.kill();
        thread::sleep(Duration::from_millis(200));
        if flush {
            round.lab.forwarder.execute(LONGSPLICE, &["stop", "--flush"]).unwrap();
        } else {
            let mut second = round.proxy("at-once");
            thread::sleep(Duration::from_millis(200));
            second.signal(Signal::SIGTERM);
            assert!(second.wait().success(), "{}", second.messages());
        }
        let stopped = Instant::now();
        let reports = [client.join().unwrap(), serving.join().remove(0)];
        eprintln!("flush {flush}: ended {:?} after the stop: {} | {}", stopped.elapsed(), reports[0], reports[1]);
        for report in &reports {
            round.ended(report);
            assert_eq!(report.end, StreamEnd::Reset, "{report}");
        }
        round.nothing_left();
    }
}

/// More than the largest window here (65535 bytes at scale 7): numbers in a record this far behind are outside every window.
const BEYOND_A_WINDOW: u64 = 12_000_000;
const FAST: u64 = 20_000_000;

/// Opens a connection through `proxy` whose ends follow these scripts.
fn talk(round: &Round, script: Script, answer: Script) -> (thread::JoinHandle<Report>, traffic::Serving) {
    let server = SERVER.port(round.family, PORT);
    let serving = round.lab.server.run(|| serve(listen(server, &answer).unwrap(), 1, answer.clone()));
    let front = round.front(PORT);
    let client = round.lab.client.spawn(move || converse(traffic::connect(front, &script).unwrap(), &script));
    (client, serving)
}

fn go(proxy: &mut Running, killed: bool) {
    if killed {
        return proxy.kill();
    }
    proxy.signal(Signal::SIGTERM);
    assert!(proxy.wait().success(), "{}", proxy.messages());
}

fn only_flow(proxy: &Running) -> Option<Value> {
    Control::of(proxy).flows().into_iter().next()
}

/// Records of legs are out of date while the path entries are in
/// force: a process that takes a flow over must not rely on them.
#[test]
#[ignore = "root"]
fn more_than_a_window_between_commit_and_take_over() {
    const SOME: u64 = 100;
    let (all, end) = (u64::MAX, [Ending::HalfClose, Ending::Hold]); // all that is sent until the test has seen enough
    let amounts = [[all, SOME], [SOME, all], [all, all]];
    for (n, (amounts, ending)) in amounts.into_iter().flat_map(|a| end.map(|e| (a, e))).enumerate() {
        let (round, killed) = (Round::new(400 + n as u64), (n / 2 + n) % 2 == 0);
        let mut first = round.proxy_to_go(killed);
        let [up, down] = amounts;
        let enough = Cue::default();
        // the end with little data closes its half at once, or only after the other end
        let script = |script: Script, bytes| {
            let script = script.deadline(DEADLINE);
            if bytes == SOME { script.bytes(SOME).ending(ending) } else { script.until(&enough, FAST) }
        };
        let (client, serving) = talk(&round, script(Script::opener(round.seed), up), script(Script::answerer(), down));
        let counted = |flow: &Value| {
            let passed = ["bytes_up", "bytes_down"].map(|name| flow[name].as_u64().unwrap());
            passed.into_iter().zip(amounts).all(|(n, all)| n >= all.min(BEYOND_A_WINDOW))
        };
        eventually("more than a window has passed", || {
            let flow = only_flow(&first).filter(|flow| flow["state"] == "spliced")?;
            counted(&flow).then_some(())
        });
        go(&mut first, killed);
        thread::sleep(Duration::from_millis(100));
        let mut second = round.proxy("at-once");
        let there = only_flow(&second).expect("the flow is taken over");
        eventually("its bytes are counted", || counted(&only_flow(&second)?).then_some(()));
        enough.give();
        let (client, server) = (client.join().unwrap(), serving.join().remove(0));
        eprintln!("{amounts:?} {ending:?}: {there} {client}; {server}");
        intact(&client, &server).unwrap_or_else(|why| panic!("{why}\n{}", second.client(&["counters"])));
        eventually("it is not listed any more", || only_flow(&second).is_none().then_some(()));
        second.signal(Signal::SIGTERM);
        assert!(second.wait().success(), "{}", second.messages());
        round.nothing_left();
    }
}

/// A body is forwarded to its end, as without the kill; data after it is not forwarded, and both hosts are told.
#[test]
#[ignore = "root"]
fn killed_in_the_midst_of_a_body() {
    const BODY: usize = 6_000_000;
    const PIECE: usize = 100_000;
    for (seed, late) in [(600, false), (601, true)] {
        let round = Round::new(seed);
        let front = round.front(3128);
        let http =
            || Running::start(round.lab.forwarder.command(LONGSPLICE), None, &["--http", &front.to_string()], &[]);
        let mut first = http();
        let body = move || (0..BODY).step_by(PIECE).map(move |at| pattern_at(seed, at, PIECE));
        let serving = serve_body(&round, BODY, PIECE, Duration::from_millis(30));
        let mut client = ask_for_body(&round, front);
        let mut second = None;
        for (n, piece) in body().enumerate() {
            let mut got = vec![0; PIECE];
            client.read_exact(&mut got).unwrap();
            assert!(got == piece, "piece {n} is another one");
            if n == 10 {
                eventually("spliced", || (only_flow(&first)?["state"] == "spliced").then_some(()));
                first.kill();
                second = (!late).then(http);
            }
        }
        let mut second = second.unwrap_or_else(http);
        let over = |end: Result<usize, ErrorKind>| matches!(end, Ok(0) | Err(ErrorKind::ConnectionReset));
        let ends = [client.read(&mut [0]).map_err(|e| e.kind()), serving.join().unwrap()];
        assert!(ends.into_iter().all(over), "{ends:?} {}", second.client(&["counters"]));
        eventually("it is not listed any more", || only_flow(&second).is_none().then_some(()));
        second.signal(Signal::SIGTERM);
        assert!(second.wait().success(), "{}", second.messages());
    }
}

/// A body whose splice is not committed yet is forwarded past sockets that are not parked. The kernel closes these: no byte is
/// wrong up to the end, the next process tells both hosts, and nothing is left.
#[test]
#[ignore = "root"]
fn killed_before_a_body_is_committed() {
    const BODY: usize = 200_000;
    const PIECE: usize = 10_000;
    for seed in 700..712 {
        let round = Round::new(seed);
        let front = round.front(3128);
        let http = || {
            let arguments = ["--http", &front.to_string(), "--splice", "at-once"];
            Running::start(round.lab.forwarder.command(LONGSPLICE), None, &arguments, &[])
        };
        let mut first = http();
        let serving = serve_body(&round, BODY, PIECE, Duration::from_millis(4));
        let mut client = ask_for_body(&round, front);
        let (mut got, mut buffer, mut second, mut since) = (Vec::new(), vec![0; PIECE], None, None);
        let end = loop {
            match client.read(&mut buffer) {
                Ok(n @ 1..) => got.extend_from_slice(&buffer[..n]),
                end => break end.map_err(|e| e.kind()),
            }
            // whatever is forwarded goes on without a process; the next one tells the hosts
            let is_over = got.len() == BODY;
            if got.len() >= (seed as usize % 6 + 1) * PIECE && second.is_none() {
                first.kill();
                second = (is_over || seed % 2 == 0).then(http);
            } else if is_over && second.is_none() {
                second = Some(http());
            }
            since = since.or(second.as_ref().map(|_| Instant::now()));
        };
        let over = |end: Result<usize, ErrorKind>| {
            matches!(end, Ok(0) | Err(ErrorKind::ConnectionReset | ErrorKind::BrokenPipe))
        };
        assert!(got == pattern_at(seed, 0, got.len()) && over(end), "{seed}: {} bytes, {end:?}", got.len());
        let served = serving.join().unwrap();
        assert!(over(served), "{seed}: {served:?}");
        let waited = since.map(|since| since.elapsed());
        eprintln!("{seed}: {} bytes, {end:?}, {served:?}, {waited:?} after the next process has started", got.len());
        let mut second = second.unwrap_or_else(http);
        eventually("it is not listed any more", || only_flow(&second).is_none().then_some(()));
        second.signal(Signal::SIGTERM);
        assert!(second.wait().success(), "{}", second.messages());
        round.nothing_left();
    }
}

/// Serves one reply, a piece of its body at a time. Returns what comes after it.
fn serve_body(
    round: &Round,
    length: usize,
    piece: usize,
    pause: Duration,
) -> thread::JoinHandle<Result<usize, ErrorKind>> {
    let (listener, seed) =
        (round.lab.server.run(|| TcpListener::bind(SERVER.port(round.family, PORT)).unwrap()), round.seed);
    thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        read_head(&mut stream);
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n").unwrap();
        for at in (0..length).step_by(piece) {
            stream.write_all(&pattern_at(seed, at, piece)).map_err(|e| e.kind())?;
            thread::sleep(pause);
        }
        stream.read(&mut [0]).map_err(|e| e.kind())
    })
}

/// Asks for it. Returns the connection, whose next byte is the first one of the body.
fn ask_for_body(round: &Round, front: SocketAddr) -> TcpStream {
    let mut client = round.lab.client.run(|| connect(front));
    client.set_read_timeout(Some(DEADLINE)).unwrap();
    let server = SERVER.port(round.family, PORT);
    write!(client, "GET http://{server}/ HTTP/1.1\r\nHost: {server}\r\n\r\n").unwrap();
    read_head(&mut client);
    client
}

fn pattern_at(seed: u64, at: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    pattern::fill(seed, at as u64, &mut bytes);
    bytes
}

/// Reads a head up to its empty line, and no further.
fn read_head(stream: &mut TcpStream) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
}

/// Number of short connections that end before the first process does.
const OVER: usize = 20;

/// An ended flow stays ended: its entries linger, but it does not become a live flow again.
#[test]
#[ignore = "root"]
fn flows_that_are_over_do_not_come_back() {
    for (seed, killed) in [(500, true), (501, true), (502, false)] {
        let round = Round::new(seed);
        let mut first = round.proxy_to_go(killed);
        round.serve_echo();
        // one live flow keeps the tables when the first process stops
        let enough = Cue::default();
        let (client, serving) = talk(
            &round,
            Script::opener(seed).until(&enough, PACE).ending(Ending::Hold).deadline(DEADLINE),
            Script::answerer().until(&enough, PACE).deadline(DEADLINE),
        );
        for _ in 0..OVER {
            let mut short = round.lab.client.run(|| connect(round.front(ECHO)));
            let local = short.local_addr().unwrap().to_string();
            round_trip(&mut short, &[1; 10_000]);
            eventually("spliced", || {
                let flows = Control::of(&first).flows();
                flows.iter().any(|f| f["client"] == local && f["state"] == "spliced").then_some(())
            });
            round_trip(&mut short, &[2; 10_000]);
        }
        eventually("only one is left", || (Control::of(&first).flows().len() == 1).then_some(()));
        go(&mut first, killed);
        let mut second = round.proxy("at-once");
        assert!(second.messages().contains(&format!("spliced=1 over={OVER} ")), "{}", second.messages());
        let flows = Control::of(&second).flows();
        assert_eq!(flows.len(), 1, "{flows:?}");
        enough.give();
        let (client, server) = (client.join().unwrap(), serving.join().remove(0));
        intact(&client, &server).unwrap();
        eventually("it is over as well", || Control::of(&second).flows().is_empty().then_some(()));
        second.signal(Signal::SIGTERM);
        assert!(second.wait().success(), "{}", second.messages());
        round.nothing_left();
    }
}
