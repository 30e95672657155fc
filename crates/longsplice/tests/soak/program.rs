//! The program under test: starting and ending it, the commands sent to it, and the flows that are to outlive it.

use super::{
    ledger::{Harm, Ledger},
    ways::{
        CROSSING, FTP, FTP_ACTIVE, FTP_ROUTED, JUDGED, LOGIN, NAMES, PROXY, SOCKS, STREAMS, TRANSPARENT, TRIGGERED,
        name, other,
    },
    web::{SITE, servers},
};
use crate::running::{Control, LONGSPLICE, Pins, Running, eventually};
use longsplice_datapath::{Holdings, LegView, Tuple};
use longsplice_lab::{Family, Lab, topology};
use nix::sys::signal::Signal;
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use serde_json::{Value, json};
use std::{
    collections::{HashMap, HashSet},
    fs::{self, Permissions},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

/// Table size for all flows at a time, including those that ended up to a minute ago.
const FLOWS: u32 = 8192;
/// Table size for a few flows.
const FEW_FLOWS: u32 = 16;
/// Descriptors allowed beyond those of an idle program.
const FEW_DESCRIPTORS: usize = 80;
/// Number of log lines shown.
const TAIL: usize = 60;

/// The resources of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Means {
    Ample,
    FewDescriptors,
    FewFlows,
}

/// How a process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Going {
    /// SIGKILL: forwarded flows continue.
    Killed,
    /// SIGTERM: forwarded flows continue.
    Leaving,
    /// `longsplice stop --flush`: no flow continues, and nothing is left.
    Clean,
}

/// The last command sent to each flow. The sender of commands holds the lock.
#[derive(Default)]
pub struct Told(HashMap<u64, &'static str>);

pub struct Program {
    running: Option<Running>,
    pins: Pins,
    dir: tempfile::TempDir,
    configuration: String,
    idle_descriptors: usize,
    pub told: Arc<Mutex<Told>>,
    /// Messages of earlier processes.
    before: String,
}

impl Program {
    /// `splice`: when, at all listeners; `None`: each has a policy of its own.
    pub fn start(lab: &Lab, splice: Option<&str>) -> Program {
        let dir = tempfile::tempdir().expect("a directory");
        let configuration = configuration(splice, dir.path());
        fs::write(dir.path().join("longsplice.toml"), &configuration).expect("the configuration");
        let answers = dir.path().join("answers");
        fs::write(&answers, "#!/bin/sh\necho go-on\n").expect("a program");
        fs::set_permissions(&answers, Permissions::from_mode(0o755)).expect("a program");
        let pins = Pins::of(&lab.forwarder);
        let (told, before) = (Arc::default(), String::new());
        let mut program = Program { running: None, pins, dir, configuration, idle_descriptors: 0, told, before };
        program.running = Some(program.begin(lab, Means::Ample));
        program.idle_descriptors = program.running().descriptors();
        program
    }

    fn begin(&self, lab: &Lab, means: Means) -> Running {
        let mut command = lab.forwarder.command(LONGSPLICE);
        if means == Means::FewDescriptors {
            command = lab.forwarder.command("prlimit");
            command.arg(format!("--nofile={}", self.idle_descriptors + FEW_DESCRIPTORS)).arg(LONGSPLICE);
        }
        let config = self.dir.path().join("longsplice.toml");
        let flows = if means == Means::FewFlows { FEW_FLOWS } else { FLOWS };
        let arguments = ["--config", config.to_str().expect("a name"), "--max-flows", &flows.to_string()];
        Running::start(command, Some(&self.control()), &arguments, &[])
    }

    /// Reloads the configuration, one of two by turns.
    pub fn reload(&self, turn: u32) {
        let limits = self.configuration.replace("connect = 20", &format!("connect = {}", 20 + turn % 2));
        fs::write(self.dir.path().join("longsplice.toml"), limits).expect("the configuration");
        self.running().client(&["reload"]);
    }

    pub fn control(&self) -> PathBuf {
        self.dir.path().join("control.sock")
    }

    pub fn running(&self) -> &Running {
        self.running.as_ref().expect("it runs")
    }

    /// Ends the process and starts another one after a pause. `meanwhile` is called in between.
    pub fn replace(&mut self, lab: &Lab, ledger: &Ledger, how: Going, means: Means, meanwhile: impl FnOnce()) {
        let told = self.told.clone();
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        let going = ledger.begins(&format!("{how:?}, and then {means:?}"), Harm::AllBut(HashSet::new()));
        let flows = Control::of(self.running()).flows();
        if how != Going::Clean {
            // a client may use the same port for another listener, too
            let is_one = |flow: &&Value| flows.iter().filter(|other| client(other) == client(flow)).count() == 1;
            let steady = flows.iter().filter(|flow| told.is_steady(flow));
            let stays: HashSet<_> = steady.filter(is_one).map(client).collect();
            ledger.note(&format!("{} flows ({}), of which {} have to go on", flows.len(), states(&flows), stays.len()));
            ledger.harms(going, Harm::AllBut(stays));
        }
        let mut running = self.running.take().expect("it runs");
        match how {
            Going::Killed => running.kill(),
            Going::Leaving => running.signal(Signal::SIGTERM),
            Going::Clean => drop(running.client(&["stop", "--flush"])),
        }
        if how != Going::Killed {
            assert!(running.wait().success(), "{}", running.messages());
        }
        assert!(how != Going::Clean || !self.pins.exist(), "a clean stop leaves nothing pinned");
        if let Some(flows) = untold(&running.messages()) {
            ledger.note(&format!("{flows} flows could not be told"));
            ledger.untold(flows);
        }
        let lines: String = flows.iter().map(|flow| format!("{flow}\n")).collect();
        self.before += &format!("--- {how:?}\n{}{lines}", tail(&running.messages()));
        drop(running);
        *told = Told::default();
        meanwhile();
        self.running = Some(self.begin(lab, means));
        ledger.ends(going);
    }

    /// Ends the last process, and checks that nothing is left.
    pub fn end(&mut self) {
        let mut running = self.running.take().expect("it runs");
        running.shut_down();
        assert!(!self.pins.exist(), "a clean stop leaves nothing pinned");
    }

    /// Ends the last process, and removes what it has left.
    pub fn flush(&mut self) {
        let mut running = self.running.take().expect("it runs");
        running.client(&["stop", "--flush"]);
        assert!(running.wait().success() && !self.pins.exist(), "{}", running.messages());
    }

    /// Its private memory in kilobytes.
    pub fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.running().id())).expect("/proc");
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("a line of /proc/PID/status");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    pub fn holdings(&self) -> Holdings {
        Holdings::of(self.pins.path()).expect("the tables")
    }

    /// The data path's record of each connection.
    pub fn records(&self) -> Vec<(Tuple, LegView)> {
        longsplice_datapath::records(self.pins.path()).unwrap_or_default()
    }

    /// Number of packets with this verdict.
    pub fn verdict(&self, name: &str) -> u64 {
        let all = self.running().counters();
        all["verdicts"][name].as_u64().unwrap_or_else(|| panic!("no {name}: {all}"))
    }

    /// The last messages of earlier processes.
    pub fn before(&self) -> String {
        let lines: Vec<&str> = self.before.lines().collect();
        lines[lines.len().saturating_sub(3 * TAIL)..].join("\n")
    }

    /// Checks that all flows of the program have ended.
    pub fn has_no_flows(&self) {
        eventually("the end of all flows", || Control::of(self.running()).flows().is_empty().then_some(()));
    }
}

/// The number of flows that could not be ended because sockets of an earlier process have their addresses. These sockets
/// were closed by a kill in the middle of a drain, and belong to the kernel until it gives them up after about two minutes.
fn untold(messages: &str) -> Option<usize> {
    let (_, rest) = messages.split_once("forwarded connections were reset; of ")?;
    rest.split(' ').next()?.parse().ok()
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL)..].iter().map(|line| format!("{line}\n")).collect()
}

fn client(flow: &Value) -> SocketAddr {
    flow["client"].as_str().and_then(|client| client.parse().ok()).expect("an address")
}

pub fn states(flows: &[Value]) -> String {
    let mut all: HashMap<&str, usize> = HashMap::new();
    flows.iter().for_each(|flow| *all.entry(flow["state"].as_str().unwrap_or("?")).or_default() += 1);
    format!("{all:?}")
}

fn is_forwarded(flow: &Value) -> bool {
    flow["state"] == "spliced" || flow["state"] == "released"
}

impl Told {
    /// Whether a flow is forwarded and has no command to unsplice.
    fn is_steady(&self, flow: &Value) -> bool {
        let last = flow["id"].as_u64().and_then(|id| self.0.get(&id));
        is_forwarded(flow) && last.is_none_or(|last| *last == "splice")
    }

    /// Sends commands to switch to at most this many flows.
    pub fn tell_some(&mut self, control: &mut Control, most: usize, r: &mut SmallRng) -> std::io::Result<()> {
        let answer = control.ask(&json!({ "version": 1, "ask": "ls" }))?;
        let flows = answer["flows"].as_array().cloned().unwrap_or_default();
        let wanted = |flow: &&Value| is_forwarded(flow) || flow["state"] == "copying";
        let mut flows: Vec<_> = flows.iter().filter(wanted).collect();
        for _ in 0..most.min(flows.len()) {
            let flow = flows.swap_remove(r.random_range(0..flows.len()));
            let (id, ask) = (flow["id"].as_u64(), if is_forwarded(flow) { "unsplice" } else { "splice" });
            self.0.insert(id.expect("a number"), ask);
            // An error about a flow that has ended meanwhile is harmless.
            control.ask(&json!({ "version": 1, "ask": ask, "id": id }))?;
        }
        Ok(())
    }
}

/// Sends commands to some flows from time to time.
pub fn tell_now_and_then(program: &Program, seed: u64, stop: &Arc<AtomicBool>) {
    let (path, told, stop) = (program.control(), program.told.clone(), stop.clone());
    let mut r = SmallRng::seed_from_u64(seed);
    thread::spawn(move || {
        while !stop.load(Relaxed) {
            thread::sleep(Duration::from_millis(r.random_range(50..600)));
            let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
            let most = r.random_range(1..3);
            // the program may not be running, or be out of descriptors
            let _ = Control::at(&path).and_then(|mut control| told.tell_some(&mut control, most, &mut r));
        }
    });
}

/// Processes in the forwarder's namespace.
pub fn processes(lab: &Lab) -> String {
    let output = Command::new("ip").args(["netns", "pids", lab.forwarder.name()]).output().expect("ip");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Listeners of each kind, in both address families, with different policies, or all with this one. `dir`: where the program is
/// that triggers ask.
fn configuration(splice: Option<&str>, dir: &Path) -> String {
    let mut text =
        "log = { format = \"json\" }\nleave_flows_on_stop = true\nsource = [\"10.77.2.1\", \"10.77.2.11\", \"fd77:2::1\", \"fd77:2::b\"]\n"
            .to_owned();
    for family in Family::BOTH {
        let at = |port| topology::FORWARDER_TO_CLIENT.port(family, port);
        let server = |family| topology::SERVER.port(family, STREAMS);
        let mut listener = |protocol: &str, at: SocketAddr, policy: &str, more: &str| {
            let policy = splice.map_or_else(|| policy.to_owned(), |when| format!("splice = \"{when}\""));
            text += &format!(
                "[[listener]]\nprotocol = \"{protocol}\"\nlisten = \"{at}\"\nlimits = {{ connect = 20, keep_alive = 20 }}\n\
                 policy = {{ {policy} }}\n{more}\n"
            );
        };
        let (plug, crossing) = (server(family), server(other(family)));
        listener("plug", at(STREAMS), "splice = \"at-once\", release_after = 1", &format!("target = \"{plug}\""));
        listener(
            "plug",
            at(CROSSING),
            "splice = \"at-once\", release_after = \"never\"",
            &format!("target = \"{crossing}\""),
        );
        // each stream begins with eight bytes, and an answer may have none
        let judged = "filter.client = { must = '(?s)^.{8}', never = '^never', first = 1000 }\n\
                      filter.server = { never = '^never', first = 5000 }";
        listener(
            "plug",
            at(JUDGED),
            "splice = \"at-once\", release_after = 0.5",
            &format!("target = \"{plug}\"\n{judged}"),
        );
        // none of them takes the connection back, so it has to outlive the process as others do
        let asks = format!("then = \"ask\", program = \"{}\", limit = 5", dir.join("answers").display());
        let triggers = format!("trigger = [{{ bytes = 200_000, {asks} }}, {{ idle = 1, {asks} }}]");
        listener(
            "plug",
            at(TRIGGERED),
            "splice = \"at-once\", release_after = 0.5",
            &format!("target = \"{plug}\"\n{triggers}"),
        );
        listener("socks5", at(SOCKS), "splice = 20000, release_after = 0.2", "bind = { wait = 20 }");
        listener("http", at(PROXY), "splice = 65536, release_after = 2", "");
        // connections to servers come without records from one of them, and each uses those of the other
        let when = if family == Family::V4 { "\"at-once\"" } else { "65536" };
        listener("http", at(SITE), &format!("splice = {when}, release_after = 1"), "route = [{ pool = \"web\" }]");
        let route = |to| format!("{{ name = \"{}\", target = \"{}\" }}", name(to), topology::SERVER.port(to, NAMES));
        let routes = format!("route = [{}, {}]", route(Family::V4), route(Family::V6));
        listener("tls", at(NAMES), "splice = 10000, release_after = 0.5", &routes);
        let to = |to| format!("{{ name = \"{}\", target = \"{}\" }}", name(to), topology::SERVER.port(to, STREAMS));
        let log_in = format!("users = {{ ann = \"secret\" }}\ndestination = [{}, {}]", to(Family::V4), to(Family::V6));
        listener("login", at(LOGIN), "splice = \"at-once\", release_after = 0.5", &log_in);
        listener("ftp", at(FTP), "release_after = 1", "ftp = { data = \"as-client\" }");
        listener("ftp", at(FTP_ACTIVE), "splice = 5000, release_after = 0.3", "ftp = { data = \"active\" }");
        let any = if family == Family::V4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let any = SocketAddr::new(any, TRANSPARENT);
        listener("transparent", any, "splice = \"at-once\", release_after = 1", "");
        let routed = SocketAddr::new(any.ip(), FTP_ROUTED);
        listener("ftp", routed, "splice = \"at-once\", release_after = 0.5", "transparent = true");
    }
    let servers = servers().map(|server| format!("\"{server}\"")).join(", ");
    text + &format!("[pool.web]\nservers = [{servers}]\nfailures = 1000000\nidle_time = 3\n")
}
