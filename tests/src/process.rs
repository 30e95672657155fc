//! A forwarder in a process of its own, which can be killed: the test program runs itself for its test `process`.

use crate::{Forwarder, at_once, by_hand, everywhere};
use longsplice_datapath::testing::stop_released;
use longsplice_engine::{Command, FlowState, Policy, TpotHandshake, Trigger};
use longsplice_lab::{Lab, Namespace, process::wait_for};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{
    env,
    io::{self, BufRead, BufReader, Write},
    net::SocketAddr,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Child, Stdio},
    thread,
    time::Duration,
};

const ROLE: &str = "LONGSPLICE_TEST_FORWARDER";
/// In place of an address to listen on.
const TAKER: &str = "taker";
/// Every request takes less than a second on an idle machine. A start may take twenty on a busy one.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the policy with this name; the process gets the name as an argument.
fn policy(name: &str) -> Policy {
    match name {
        "by-hand" => by_hand(),
        "at-once" => at_once(),
        "client-data" => Policy { trigger: Some(Trigger::ClientData), ..at_once() },
        _ => panic!("no such policy: {name}"),
    }
}

/// Returns the handshake with this name.
fn handshake(name: &str) -> TpotHandshake {
    let all = [TpotHandshake::Basic, TpotHandshake::Pipelined, TpotHandshake::Confirm];
    all.into_iter().find(|handshake| format!("{handshake:?}") == name).unwrap_or_else(|| panic!("no such one: {name}"))
}

/// The test's handle of a forwarding process. The process is killed on drop.
pub struct Process {
    child: Child,
    talk: BufReader<UnixStream>,
}

impl Process {
    /// Starts a process in the forwarder of a lab. The root of the
    /// test program must contain a test named `process` that calls [`serve`].
    pub fn start(lab: &Lab, listen: SocketAddr, target: SocketAddr, policy: &str) -> Process {
        Process::with_role(&lab.forwarder, &format!("{listen} {target} {policy}"))
    }

    /// The same, but it intercepts the connections of hosts that ask for a proxy ([`Forwarder::taker`]), and asks for another
    /// one: to `target`, of all addresses of its family.
    pub fn taker(at: &Namespace, target: SocketAddr, policy: &str) -> Process {
        Process::taker_with(at, target, policy, TpotHandshake::Basic)
    }

    /// The same with another handshake.
    pub fn taker_with(at: &Namespace, target: SocketAddr, policy: &str, handshake: TpotHandshake) -> Process {
        Process::with_role(at, &format!("{TAKER} {target} {policy} {handshake:?}"))
    }

    fn with_role(at: &Namespace, role: &str) -> Process {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        ours.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        let program = env::current_exe().expect("this program has a path");
        let mut command = at.command(program.to_str().expect("a path in UTF-8"));
        command.args(["--exact", "process", "--nocapture"]).env(ROLE, role);
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
        let mut process =
            Process { child: command.spawn().expect("the test program starts"), talk: BufReader::new(ours) };
        assert_eq!(process.line(), "ready");
        process
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.talk.read_line(&mut line).expect("the process answers");
        line.trim_end().to_owned()
    }

    fn tell(&mut self, what: &str) -> io::Result<()> {
        self.talk.get_mut().write_all(format!("{what}\n").as_bytes())
    }

    /// Sends a request and returns the lines of the answer.
    pub fn ask(&mut self, what: &str) -> Vec<String> {
        self.tell(what).expect("the process lives");
        let mut answer = Vec::new();
        loop {
            match self.line() {
                line if line == "." => return answer,
                line => {
                    assert!(!line.is_empty(), "{what}: the process has died");
                    answer.push(line);
                }
            }
        }
    }

    /// Its flows: each client's port and the state.
    pub fn flows(&mut self) -> Vec<(u16, String)> {
        let flows = self.ask("ls");
        let parse =
            |line: String| line.split_once(' ').and_then(|(port, state)| Some((port.parse().ok()?, state.to_owned())));
        flows.into_iter().map(|line| parse(line).expect("a flow")).collect()
    }

    /// Waits until it has `n` flows, all in this state.
    pub fn wait_flows(&mut self, n: usize, state: FlowState) {
        let state = format!("{state:?}");
        let all = |flows: &[(u16, String)]| flows.len() == n && flows.iter().all(|(_, s)| *s == state);
        wait_for(PATIENCE, || all(&self.flows()).then_some(()))
            .unwrap_or_else(|| panic!("{n} flows are {state}: {:?} {:?}", self.flows(), self.ask("counters")));
    }

    /// Kills the process (SIGKILL).
    pub fn kill(mut self) {
        self.die();
    }

    fn die(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Ends the process cleanly, which removes everything.
    pub fn end(mut self) {
        self.ask("end");
        assert!(self.child.wait().expect("its end").success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if thread::panicking() && matches!(self.child.try_wait(), Ok(None)) && self.tell("show").is_ok() {
            // it shows its state itself: its standard error is ours
            let _ = self.talk.get_ref().set_read_timeout(Some(Duration::from_secs(5)));
            let _ = self.talk.read_line(&mut String::new());
        }
        self.die();
    }
}

/// The body of the test `process`: does nothing unless this is a forwarding process.
pub fn serve() {
    let Ok(role) = env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let (target, policy) = (words[1].parse().expect("an address"), policy(words[2]));
    let f = match words[0] {
        TAKER => Forwarder::taker_here(everywhere(target), policy, handshake(words[3])),
        listen => Forwarder::here(listen.parse().expect("an address"), target, policy),
    };
    let talk = UnixStream::from(io::stdin().as_fd().try_clone_to_owned().expect("stdin"));
    let mut answer = talk.try_clone().expect("stdin");
    writeln!(answer, "ready").expect("the test listens");
    for line in BufReader::new(talk).lines() {
        let line = line.expect("the test lives");
        let (what, number) = line.split_once(' ').unwrap_or((&line, "0"));
        match what {
            "ls" => f.splicer.flows().iter().for_each(|flow| {
                writeln!(answer, "{} {:?}", flow.client.port(), flow.state).expect("the test listens");
            }),
            "legs" => f.splicer.datapath().expect("kernel path").legs().iter().for_each(|leg| {
                writeln!(answer, "{leg:?}").expect("the test listens");
            }),
            "counters" => f.verdicts().iter().for_each(|v| writeln!(answer, "{v:?}").expect("the test listens")),
            "splice" => f.command(Command::Splice),
            "unsplice" => f.command(Command::Unsplice),
            "release" => f.command(Command::Release),
            "storm" => storm(&f, number.parse().expect("a seed")),
            "stop" => stop(&f),
            "show" => f.show(),
            "end" => {
                drop(f);
                return writeln!(answer, ".").expect("the test listens");
            }
            _ => panic!("no such thing: {line}"),
        }
        writeln!(answer, ".").expect("the test listens");
    }
}

/// Stops just as a process does that is about to create sockets for a released flow.
fn stop(f: &Forwarder) {
    let d = f.splicer.datapath().expect("kernel path");
    let legs: Vec<_> = d.paths().into_iter().map(|(t, _)| t).collect();
    let [a, b] = &legs[..] else { panic!("one flow: {legs:?}") };
    wait_for(PATIENCE, || stop_released(d, [a, b]).ok()).expect("idle for an instant");
}

/// Sends random switches until the process ends. Flows for which [`is_steady`] holds are left alone once they are spliced.
fn storm(f: &Forwarder, seed: u64) {
    let splicer = f.splicer.clone();
    thread::spawn(move || {
        let mut rng = SmallRng::seed_from_u64(seed);
        loop {
            for flow in splicer.flows() {
                let command = match flow.state {
                    FlowState::Copying => Command::Splice,
                    FlowState::Spliced if is_steady(flow.client.port()) => continue,
                    FlowState::Spliced if rng.random_bool(0.1) => Command::Release,
                    FlowState::Spliced | FlowState::Released => Command::Unsplice,
                    _ => continue,
                };
                if rng.random_bool(0.5) {
                    splicer.command(flow.id, command);
                }
            }
            thread::sleep(Duration::from_micros(rng.random_range(500..20_000)));
        }
    });
}

/// Whether the flow of the client with this port is steady. Every other one is: a client with two connections has both kinds.
pub fn is_steady(port: u16) -> bool {
    port.is_multiple_of(2)
}
