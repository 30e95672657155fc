//! Network namespaces: enter them, run programs in them, and read their kernel counters.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nix::sched::{CloneFlags, setns};

use crate::LabError;
use crate::listeners;
use crate::process::{run, wait_for};

/// The directory of the namespaces of `ip netns`.
pub(crate) const RUN_NETNS: &str = "/run/netns";

/// A network namespace. Clones are the same namespace; it is removed by its `Lab`.
#[derive(Clone, Debug)]
pub struct Namespace {
    name: String,
    handle: Arc<File>,
}

impl Namespace {
    pub(crate) fn open(name: String) -> Result<Self, LabError> {
        let handle = File::open(Path::new(RUN_NETNS).join(&name)).map_err(LabError::io(name.clone()))?;
        Ok(Self { name, handle: Arc::new(handle) })
    }

    /// The name in /run/netns.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file that represents the namespace.
    pub fn path(&self) -> PathBuf {
        Path::new(RUN_NETNS).join(&self.name)
    }

    /// Runs `work` on a new thread inside the namespace and returns its result; a panic is propagated. Sockets opened there
    /// stay in the namespace wherever they are used later.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let done = thread::scope(|scope| {
            scope
                .spawn(|| {
                    self.enter();
                    work()
                })
                .join()
        });
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Starts a thread inside the namespace without waiting for it.
    pub fn spawn<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> thread::JoinHandle<T> {
        let namespace = self.clone();
        thread::spawn(move || {
            namespace.enter();
            work()
        })
    }

    /// Enters only the network namespace: /sys, and with it bpffs and cgroup2, stay visible.
    fn enter(&self) {
        setns(&*self.handle, CloneFlags::CLONE_NEWNET).expect("entering a network namespace needs root");
    }

    /// Prepares a command that runs inside the namespace. Unlike `ip netns exec`, this does not mount another /sys.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path().display())).arg("--").arg(program);
        command
    }

    /// Runs a short program inside the namespace. Returns its output, or the error.
    pub fn execute(&self, program: &str, arguments: &[&str]) -> Result<String, LabError> {
        // A child process inherits the namespace of the thread that starts it.
        self.run(|| run(program, arguments, ""))
    }

    /// Sets a sysctl, named with dots. Only those below `net` are per namespace.
    pub fn sysctl(&self, name: &str, value: &str) -> Result<(), LabError> {
        let path = Path::new("/proc/sys").join(name.replace('.', "/"));
        self.run(|| fs::write(&path, value)).map_err(LabError::io(format!("sysctl {name}={value}")))
    }

    /// Whether any socket listens on this TCP port. Unlike a connection attempt, this disturbs no one.
    pub fn listening(&self, port: u16) -> bool {
        self.run(listeners::ports).expect("sock_diag(7)").contains(&port)
    }

    /// Waits until a socket listens on this TCP port.
    pub fn wait_listening(&self, port: u16, limit: Duration) -> Result<(), LabError> {
        wait_for(limit, || self.listening(port).then_some(()))
            .ok_or_else(|| LabError::Late { what: format!("a listener on port {port}"), seconds: limit.as_secs() })
    }

    /// Reads a counter from /proc/net/snmp, /proc/net/netstat or /proc/net/snmp6, as in `counter("Tcp", "RetransSegs")`.
    pub fn counter(&self, group: &str, name: &str) -> Option<u64> {
        self.run(|| counter_here(group, name))
    }

    /// Runs commands of ip(8), one per line.
    pub fn ip(&self, batch: &str) -> Result<(), LabError> {
        run("ip", &["-n", &self.name, "-batch", "-"], batch).map(drop)
    }
}

/// Reads a counter of the calling thread's namespace.
pub fn counter_here(group: &str, name: &str) -> Option<u64> {
    let read = |file| fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap_or_default();
    let of_v6 = read("snmp6"); // one counter per line
    let mut words = of_v6.split_whitespace();
    if words.any(|word| word.strip_prefix(group) == Some(name)) {
        return words.next()?.parse().ok();
    }
    let (tables, head) = (["snmp", "netstat"].map(read), format!("{group}:"));
    let lines: Vec<&str> = tables.iter().flat_map(|table| table.lines()).filter(|l| l.starts_with(&head)).collect();
    let [names, values] = lines[..] else { return None };
    let at = names.split_whitespace().position(|n| n == name)?;
    values.split_whitespace().nth(at)?.parse().ok()
}
