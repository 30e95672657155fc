//! The program, and what is done to it: reloaded, upgraded, killed and started again.

use super::{
    ledger::{Kill, Ledger},
    lines::Tail,
    ways::{NAMES, STREAMS, WEB, Way, name, other},
};
use crate::running::{Control, LONGSPLICE, Pins, Running, eventually, listener, longsplice};
use longsplice_datapath::Holdings;
use longsplice_lab::{Family, Lab, Namespace, process::wait_for, topology::SERVER};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use std::{
    collections::{BTreeSet, HashMap},
    fs,
    net::SocketAddr,
    os::unix::{fs::MetadataExt, net::UnixStream},
    path::{Path, PathBuf},
    process::Output,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

/// Time limit for what a process does: a start on a busy machine takes seconds.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// Sizes of tables: for flows at a time, with those that have ended up to a minute ago.
const FLOWS: &str = "16384";

/// The last command sent to each flow. Who sends commands, or relies on none being sent, holds the lock.
pub type Told = Arc<Mutex<HashMap<u64, &'static str>>>;

/// Number of kills that have begun, and of those that are over.
#[derive(Clone, Default)]
pub struct Epochs(Arc<[AtomicU64; 2]>);

impl Epochs {
    /// A number that is the same as long as no process is killed; `None` while none serves.
    pub fn now(&self) -> Option<u64> {
        let [begun, over] = [&self.0[0], &self.0[1]].map(|n| n.load(SeqCst));
        (begun == over).then_some(begun)
    }
}

pub struct Program {
    ledger: Arc<Ledger>,
    forwarder: Namespace,
    inode: u64,
    pub pins: Pins,
    dir: tempfile::TempDir,
    /// The first process of each start, whose output is that of those that took its place as well.
    running: Vec<Running>,
    tails: Vec<Tail>,
    /// The process that serves, and since when it may have had connections.
    serving: (i32, Instant),
    pub told: Told,
    pub epochs: Epochs,
}

pub fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Program {
    pub fn start(lab: &Lab, ledger: &Arc<Ledger>) -> Program {
        let dir = tempfile::tempdir().expect("a directory");
        write(&dir.path().join("longsplice.toml"), 0);
        let inode = fs::metadata(lab.forwarder.path()).expect("a namespace").ino();
        let mut program = Program {
            ledger: ledger.clone(),
            forwarder: lab.forwarder.clone(),
            inode,
            pins: Pins::of(&lab.forwarder),
            dir,
            running: Vec::new(),
            tails: Vec::new(),
            serving: (0, Instant::now()),
            told: Told::default(),
            epochs: Epochs::default(),
        };
        program.begin();
        program
    }

    pub fn control(&self) -> PathBuf {
        self.dir.path().join("control.sock")
    }

    pub fn file(&self) -> PathBuf {
        self.dir.path().join("longsplice.toml")
    }

    fn begin(&mut self) {
        let began = Instant::now();
        let (config, control) = (self.file(), self.control());
        let arguments = ["--config", config.to_str().expect("a name"), "--max-flows", FLOWS];
        let command = self.forwarder.command(LONGSPLICE);
        // a killed process has left /proc/PID/exe a moment before its sockets are closed
        eventually("a free control socket", || UnixStream::connect(&control).is_err().then_some(()));
        let running = Running::start(command, Some(&control), &arguments, &["--log-format", "json"]);
        self.tails.push(Tail::of(&running.access_log()).expect("an access log"));
        self.serving = (running.id() as i32, began);
        self.running.push(running);
    }

    /// The last start.
    pub fn running(&self) -> &Running {
        self.running.last().expect("it was started")
    }

    /// The processes of the program.
    pub fn processes(&self) -> BTreeSet<i32> {
        let all = fs::read_dir("/proc").expect("/proc").filter_map(Result::ok);
        let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        numbers.filter(|number| self.is_ours(*number)).collect()
    }

    fn is_ours(&self, number: i32) -> bool {
        let of = |what: &str| Path::new("/proc").join(number.to_string()).join(what);
        fs::read_link(of("exe")).is_ok_and(|exe| exe == Path::new(LONGSPLICE))
            && fs::metadata(of("ns/net")).is_ok_and(|ns| ns.ino() == self.inode)
    }

    /// Takes new lines of the access logs, and forgets starts of which no process is left.
    pub fn look(&mut self) {
        for tail in &mut self.tails {
            self.ledger.lines(&tail.read().expect("the access log"));
        }
        if self.running.len() > 1 && self.processes().len() == 1 {
            // what its processes have written before they ended
            let of_before = self.tails.drain(..self.running.len() - 1);
            of_before.for_each(|mut tail| self.ledger.lines(&tail.read().expect("the access log")));
            self.running.drain(..self.running.len() - 1);
        }
    }

    /// The flows, by client, and whether the kernel forwards them and has not been told to stop that.
    fn flows(&self, told: &HashMap<u64, &'static str>) -> Option<HashMap<SocketAddr, bool>> {
        let mut control = Control::at(&self.control()).ok()?;
        let answer = control.ask(&json!({ "version": 1, "ask": "ls" })).ok()?;
        let of = |flow: &Value| {
            let is_told = flow["id"].as_u64().and_then(|id| told.get(&id)).is_some_and(|last| *last == "unsplice");
            let is_forwarded = flow["state"] == "spliced" || flow["state"] == "released";
            Some((flow["client"].as_str()?.parse().ok()?, is_forwarded && !is_told))
        };
        answer["flows"].as_array()?.iter().map(of).collect()
    }

    fn ends(&self, number: i32) {
        let ended = wait_for(PATIENCE, || (!self.is_ours(number)).then_some(()));
        assert!(ended.is_some(), "process {number} does not end");
    }

    fn upgrading(&self) -> thread::JoinHandle<Output> {
        let control = self.control().display().to_string();
        thread::spawn(move || longsplice(&["upgrade", "--control", &control]))
    }

    /// Another process takes the place of the one that serves.
    pub fn upgrade(&mut self) {
        let began = Instant::now();
        let output = self.upgrading().join().expect("an upgrade");
        match upgraded(&output) {
            Ok((number, stay)) => {
                self.ledger.note(&format!("upgraded to process {number} in {:.1?}; {stay} stay", began.elapsed()));
                self.serving = (number, began);
            }
            Err(why) => self.ledger.fail(format!("an upgrade fails: {why}\n{}", self.last_messages())),
        }
    }

    pub fn last_messages(&self) -> String {
        let messages = self.running().messages();
        let lines: Vec<&str> = messages.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    /// Kills the process that serves, and perhaps those that were before it; then starts another one.
    pub fn kill(&mut self, older: bool, pause: Duration) {
        let told = self.told.clone();
        let mut told = lock(&told);
        let flows = self.flows(&told);
        let states = flows.as_ref().map(|flows| (flows.len(), flows.values().filter(|stays| **stays).count()));
        self.epochs.0[0].fetch_add(1, SeqCst);
        self.ledger.killed(Kill { from: Instant::now(), until: None, since: self.serving.1, flows, older });
        let all = if older { self.processes() } else { [self.serving.0].into() };
        self.ledger.note(&format!("kills {all:?}; flows, and those of them that have to go on: {states:?}"));
        all.iter().for_each(|number| end(*number));
        all.iter().for_each(|number| self.ends(*number));
        told.clear();
        thread::sleep(pause);
        self.serve_again();
    }

    fn serve_again(&mut self) {
        self.begin();
        self.ledger.serves_again();
        self.epochs.0[1].fetch_add(1, SeqCst);
        self.ledger.note(&format!("process {} serves", self.serving.0));
    }

    /// Kills the process that serves, or the one that is to take its place, at some time in an upgrade.
    pub fn kill_in_upgrade(&mut self, new: bool, pause: Duration) {
        let told = self.told.clone();
        let mut told = lock(&told);
        let (old, before, began) = (self.serving.0, self.processes(), Instant::now());
        let flows = self.flows(&told);
        let upgrading = self.upgrading();
        thread::sleep(pause);
        if new {
            let found = wait_for(PATIENCE, || {
                let found = self.processes().difference(&before).next().copied();
                (found.is_some() || upgrading.is_finished()).then_some(found)
            });
            let Some(heir) = found.flatten() else {
                self.ledger.fail("an upgrade has started no process".into());
                return;
            };
            self.ledger.note(&format!("kills {heir}, which is to take the place of {old}, after {pause:?}"));
            // should it serve by now, that is a kill like any other
            self.epochs.0[0].fetch_add(1, SeqCst);
            let since = began;
            self.ledger.killed(Kill { from: Instant::now(), until: None, since, flows: None, older: false });
            end(heir);
            let output = upgrading.join().expect("an upgrade");
            match upgraded(&output) {
                Ok((number, _)) => {
                    assert_eq!(number, heir);
                    self.ledger.note("it served already");
                    told.clear();
                    self.ends(heir);
                    return self.serve_again();
                }
                Err(why) if why.contains("everything stays as it is") => {
                    self.ledger.note("nothing has changed");
                    self.ledger.not_killed();
                }
                Err(why) => match anew(&why) {
                    Some(number) => {
                        self.ledger.note(&format!("the program was started anew, as {number}"));
                        self.serving = (number, began);
                        self.ledger.serves_again();
                    }
                    None => self.ledger.fail(format!("an upgrade whose new process is killed: {why}")),
                },
            }
            self.epochs.0[1].fetch_add(1, SeqCst);
            return;
        }
        self.ledger.note(&format!("kills {old} in an upgrade, after {pause:?}"));
        self.epochs.0[0].fetch_add(1, SeqCst);
        self.ledger.killed(Kill { from: Instant::now(), until: None, since: self.serving.1, flows, older: false });
        end(old);
        self.ends(old);
        told.clear();
        let output = upgrading.join().expect("an upgrade");
        // a process that was prepared serves now; others give up
        let earlier: BTreeSet<i32> = before.into_iter().filter(|number| *number != old).collect();
        let serves = wait_for(PATIENCE, || {
            let new = self.processes().difference(&earlier).next().copied();
            match new {
                None => Some(None),
                Some(new) => self.answers().then_some(Some(new)),
            }
        });
        match serves {
            Some(Some(number)) => {
                self.serving = (number, began);
                self.ledger.serves_again();
                self.epochs.0[1].fetch_add(1, SeqCst);
                self.ledger.note(&format!("process {number} has taken its place"));
            }
            Some(None) => {
                self.ledger.note("nobody has taken its place");
                self.serve_again();
            }
            None => self.ledger.fail(format!("nobody serves, and a process is left: {output:?}")),
        }
    }

    /// Whether a process answers.
    fn answers(&self) -> bool {
        let asked = Control::at(&self.control()).and_then(|mut c| c.ask(&json!({ "version": 1, "ask": "pools" })));
        asked.is_ok()
    }

    /// Names of threads of the process that serves.
    pub fn threads(&self) -> Vec<String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.serving.0)).expect("it runs").filter_map(Result::ok);
        let mut names: Vec<_> = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok()).collect();
        names.sort();
        names
    }

    /// What each descriptor of the process that serves is: how many there are of each.
    pub fn descriptors(&self) -> Vec<String> {
        let all = fs::read_dir(format!("/proc/{}/fd", self.serving.0)).expect("it runs").filter_map(Result::ok);
        let target = |path: PathBuf| {
            let target = fs::read_link(&path).ok()?.display().to_string();
            // numbers of sockets differ
            Some(target.split_once(":[").map_or(target.clone(), |(what, _)| what.to_owned()))
        };
        let mut all: Vec<_> = all.filter_map(|entry| target(entry.path())).collect();
        all.sort();
        all
    }

    pub fn holdings(&self) -> Holdings {
        Holdings::of(self.pins.path()).expect("the tables")
    }

    /// Stops it. Nothing is left.
    pub fn stop(&mut self) {
        let said = longsplice(&["stop", "--control", self.control().to_str().expect("a name")]);
        assert!(said.status.success(), "{said:?}");
        let ended = wait_for(PATIENCE, || self.processes().is_empty().then_some(()));
        assert!(ended.is_some(), "processes are left: {:?}", self.processes());
        assert!(!self.pins.exist(), "a clean stop leaves nothing pinned");
        for tail in &mut self.tails {
            self.ledger.lines(&tail.read().expect("the access log"));
        }
    }

    /// Kills what is left of it.
    pub fn end(&mut self) {
        self.processes().iter().for_each(|number| end(*number));
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.end();
    }
}

/// Kills a process, unless it has ended.
fn end(number: i32) {
    let _ = kill(Pid::from_raw(number), Signal::SIGKILL);
}

/// What an upgrade says: the number of the process that serves, and how many connections stay with the other; or why it fails.
fn upgraded(output: &Output) -> Result<(i32, String), String> {
    let (said, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let number = said.strip_prefix("process ").and_then(|rest| rest.split_once(' ')?.0.parse().ok());
    let stay = said.lines().filter_map(|line| line.rsplit_once(": ")).map(|(_, n)| n).collect::<Vec<_>>().join(", ");
    number.map(|number| (number, stay)).ok_or_else(|| format!("{said}{why}"))
}

/// The process that a failed upgrade has started anew.
fn anew(why: &str) -> Option<i32> {
    why.split("was started anew, as process ").nth(1)?.split(':').next()?.parse().ok()
}

/// Writes the configuration, so that it is never half there: with small differences each time, and every other time with a
/// listener more.
pub fn write(file: &Path, turn: u32) {
    let new = file.with_extension("new");
    fs::write(&new, configuration(turn)).and_then(|()| fs::rename(new, file)).expect("the configuration");
}

fn configuration(turn: u32) -> String {
    let mut text = String::from(
        "leave_flows_on_stop = true\nsource = [\"10.77.2.1\", \"10.77.2.11\", \"fd77:2::1\", \"fd77:2::b\"]\n",
    );
    let connect = 20 + turn % 3;
    for family in Family::BOTH {
        let limits = format!("limits = {{ connect = {connect}, keep_alive = 30 }}");
        let mut add = |way: Way, protocol: &str, policy: &str, more: &str| {
            let at = way.at(family);
            let name = format!("{way:?}-{family:?}");
            let of = format!("name = \"{name}\"\n{limits}\npolicy = {{ {policy}, keepalive = 10 }}\n{more}");
            text += &listener(protocol, &at.to_string(), &of);
        };
        let to = |family: Family| format!("target = \"{}\"", SERVER.port(family, STREAMS));
        let (plug, crossing) = (to(family), to(other(family)));
        // nobody is denied by it
        let rules = ["", "\nrules = [{ action = \"deny\", ports = 9 }, { action = \"allow\" }]"][turn as usize / 2 % 2];
        let later = format!("splice = {}, release_after = 0.5", 20_000 + turn % 2);
        add(Way::AtOnce, "plug", "splice = \"at-once\", release_after = 1", &(plug.clone() + rules));
        add(Way::Crossing, "plug", "splice = \"at-once\", release_after = \"never\"", &crossing);
        add(Way::Copied, "plug", "splice = \"never\"", &(plug.clone() + rules));
        add(Way::Later, "plug", &later, &plug);
        let trigger = format!("{plug}\ntrigger = [{{ bytes = 50000, then = \"copy\" }}]");
        add(Way::Triggered, "plug", "splice = \"at-once\", release_after = 1", &trigger);
        add(Way::Held, "plug", "splice = 10000, hold = true, release_after = 2", &plug);
        if turn % 2 == 1 {
            add(Way::Extra, "plug", "splice = \"at-once\", release_after = 1", &plug);
        }
        add(Way::Socks, "socks5", "splice = 20000, release_after = 0.2", rules.trim());
        let route = |to| format!("{{ name = \"{}\", target = \"{}\" }}", name(to), SERVER.port(to, NAMES));
        let routes = format!("route = [{}, {}]", route(Family::V4), route(Family::V6));
        add(Way::Tls, "tls", "splice = 10000, release_after = 0.5", &routes);
        add(Way::Connect, "http", "splice = 65536, release_after = 2", "");
        add(Way::Upgrade, "http", "splice = \"at-once\", release_after = 1", "route = [{ pool = \"web\" }]");
        add(Way::Routed, "plug", "splice = \"at-once\", release_after = 1", "transparent = true");
        add(Way::Shown, "plug", "splice = \"never\"", "transparent = true\nsource = \"client\"");
    }
    let servers = Family::BOTH.map(|family| format!("\"{}\"", SERVER.port(family, WEB))).join(", ");
    text + &format!("[pool.web]\nservers = [{servers}]\nfailures = {}\nidle_time = 3\n", 1_000_000 - turn % 2)
}
