//! The machine: its description, the processor time used, and disturbances by other programs.

use super::{Result, peers::Peer};
use longsplice_lab::Namespace;
use serde::{Deserialize, Serialize};
use std::{
    collections::{HashMap, HashSet},
    fs, io,
    process::Command,
    sync::{Arc, Barrier},
    time::Instant,
};

/// USER_HZ, part of the kernel's interface (proc(5)).
const TICKS: f64 = 100.0;
/// Maximum fraction of time stolen by the hypervisor. Above it, other guests disturb the measurement.
const STEAL: f64 = 0.02;
/// Maximum fraction of time used by other programs.
const FOREIGN: f64 = 0.05;

/// Where and with what the results were measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// CPU model as in /proc/cpuinfo.
    pub cpu: String,
    /// Number of CPUs online.
    pub cpus: usize,
    /// Memory in megabytes.
    pub memory_mb: u64,
    /// Release and build of the kernel.
    pub kernel: String,
    /// Version of longsplice.
    pub longsplice: String,
    /// Version lines of the installed peers.
    pub peers: Vec<String>,
}

impl Machine {
    /// Describes this machine.
    pub fn here() -> Machine {
        let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
        let model = read("/proc/cpuinfo")
            .lines()
            .find_map(|l| Some(l.strip_prefix("model name")?.split_once(": ")?.1.to_owned()));
        let kernel = |name: &str| read(&format!("/proc/sys/kernel/{name}"));
        Machine {
            cpu: model.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cpus: cpus().0.len(),
            memory_mb: number(&read("/proc/meminfo"), "MemTotal").unwrap_or(0) / 1024,
            kernel: format!("{} {}", kernel("osrelease").trim(), kernel("version").trim()),
            longsplice: env!("CARGO_PKG_VERSION").to_owned(),
            peers: Peer::ALL.into_iter().filter_map(Peer::version).collect(),
        }
    }

    /// The CPU's name in a form suitable for file names.
    pub fn slug(&self) -> String {
        let words = self.cpu.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty());
        words.map(str::to_ascii_lowercase).collect::<Vec<_>>().join("-")
    }
}

/// Today's date in UTC: `2026-03-01`.
pub fn today() -> String {
    let date = Command::new("date").args(["-u", "+%F"]).output();
    date.map_or(String::new(), |date| String::from_utf8_lossy(&date.stdout).trim().to_owned())
}

/// A line of /proc/stat, in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ticks {
    busy: u64,
    idle: u64,
    steal: u64,
}

impl Ticks {
    /// Fields: user nice system idle iowait irq softirq steal; guest time is part of user.
    fn parse(line: &str) -> Option<Ticks> {
        let n: Vec<u64> = line.split_whitespace().skip(1).map_while(|w| w.parse().ok()).collect();
        let [user, nice, system, idle, iowait, irq, softirq, steal, ..] = n[..] else { return None };
        Some(Ticks { busy: user + nice + system + irq + softirq, idle: idle + iowait, steal })
    }

    fn since(self, before: Ticks) -> Ticks {
        Ticks {
            busy: self.busy.saturating_sub(before.busy),
            idle: self.idle.saturating_sub(before.idle),
            steal: self.steal.saturating_sub(before.steal),
        }
    }
}

/// The ticks of each CPU, and their sum.
fn cpus() -> (Vec<Ticks>, Ticks) {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let lines = stat.lines().take_while(|l| l.starts_with("cpu"));
    let mut all: Vec<Ticks> = lines.filter_map(Ticks::parse).collect();
    let sum = if all.is_empty() { Ticks::default() } else { all.remove(0) };
    (all, sum)
}

/// The start of a measurement.
pub struct Watch {
    foreign: u64,
    at: Instant,
    ticks: Ticks,
    first: Ticks,
}

/// The cost of a measurement.
#[derive(Clone, Debug, PartialEq)]
pub struct Cost {
    /// Duration.
    pub seconds: f64,
    /// Seconds of processor time on all CPUs, used by any program.
    pub cpu: f64,
    /// Fraction of CPU 0's time that was busy.
    pub first_busy: f64,
    /// Why the measurement should not count, if so.
    pub disturbed: Option<String>,
}

impl Watch {
    /// Starts a measurement.
    pub fn start() -> Watch {
        let foreign = foreign();
        let (each, ticks) = cpus();
        Watch { foreign, at: Instant::now(), ticks, first: each.first().copied().unwrap_or_default() }
    }

    /// The cost from the start until now.
    pub fn stop(&self) -> Cost {
        let seconds = self.at.elapsed().as_secs_f64();
        let (each, sum) = cpus();
        let all = sum.since(self.ticks);
        let first = each.first().copied().unwrap_or_default().since(self.first);
        let foreign = foreign().saturating_sub(self.foreign);
        let whole = (all.busy + all.idle + all.steal).max(1) as f64;
        let share = |ticks: u64| ticks as f64 / whole;
        let disturbed = if share(all.steal) > STEAL {
            Some(format!("{:.0} % of the time stolen by the hypervisor", share(all.steal) * 100.0))
        } else if share(foreign) > FOREIGN {
            Some(format!("{:.0} % of the time used by other programs", share(foreign) * 100.0))
        } else {
            None
        };
        let first_busy = first.busy as f64 / (first.busy + first.idle + first.steal).max(1) as f64;
        Cost { seconds, cpu: all.busy as f64 / TICKS, first_busy, disturbed }
    }
}

/// Runs this many clients at a host. All begin to work at the same time, once each is prepared. Returns what they have done, and
/// the cost of that.
pub fn together<S, T: Send + 'static>(
    host: &Namespace,
    clients: usize,
    prepare: impl Fn(usize) -> io::Result<S> + Clone + Send + 'static,
    work: impl Fn(S) -> io::Result<T> + Clone + Send + 'static,
) -> Result<(Vec<T>, Cost)> {
    let ready = Arc::new(Barrier::new(clients + 1));
    let client = |number| {
        let (ready, prepare, work) = (ready.clone(), prepare.clone(), work.clone());
        host.spawn(move || {
            let prepared = prepare(number);
            ready.wait();
            ready.wait();
            work(prepared?)
        })
    };
    let threads: Vec<_> = (0..clients).map(client).collect();
    ready.wait();
    let watch = Watch::start();
    ready.wait();
    let done = threads.into_iter().map(|thread| thread.join().map_err(|_| io::Error::other("a client panicked"))?);
    let done = done.collect::<io::Result<_>>()?;
    Ok((done, watch.stop()))
}

/// A process in /proc.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Process {
    parent: u32,
    /// Its ticks and those of its dead children: time used by a process moves to its parent, and is not lost.
    ticks: u64,
}

impl Process {
    fn parse(stat: &str) -> Option<Process> {
        // The second field, the name, ends with the last parenthesis.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let time = fields.get(11..15)?.iter().map(|f| f.parse::<u64>().unwrap_or(0)).sum();
        Some(Process { parent: fields.get(1)?.parse().ok()?, ticks: time })
    }
}

/// Seconds of processor time that a process has used; `None` if it has ended.
pub fn seconds_of(pid: u32) -> Option<f64> {
    let process = Process::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
    Some(process.ticks as f64 / TICKS)
}

/// The number after `name:`.
pub fn number(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// A process and all its descendants.
pub fn tree(root: u32) -> Vec<u32> {
    let all = processes();
    all.keys().copied().filter(|pid| descends(&all, *pid, &[root])).collect()
}

/// Ticks used by all programs except this one, its children, and the kernel's threads.
fn foreign() -> u64 {
    outside(&processes(), &[std::process::id(), KTHREADD])
}

fn processes() -> HashMap<u32, Process> {
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    pids.filter_map(|pid| Some((pid, Process::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?)))
        .collect()
}

/// The parent of all kernel threads.
const KTHREADD: u32 = 2;

/// Ticks of all processes that do not descend from these.
fn outside(all: &HashMap<u32, Process>, roots: &[u32]) -> u64 {
    all.iter().filter(|(pid, _)| !descends(all, **pid, roots)).map(|(_, p)| p.ticks).sum()
}

fn descends(all: &HashMap<u32, Process>, mut pid: u32, roots: &[u32]) -> bool {
    let mut seen = HashSet::new();
    while seen.insert(pid) {
        if roots.contains(&pid) {
            return true;
        }
        let Some(process) = all.get(&pid) else { return false };
        pid = process.parent;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_of_a_line() {
        let ticks = Ticks::parse("cpu0 100 1 50 1000 20 3 7 5 0 0").unwrap();
        assert_eq!(ticks, Ticks { busy: 161, idle: 1020, steal: 5 });
        assert_eq!(ticks.since(Ticks { busy: 61, idle: 1021, steal: 5 }), Ticks { busy: 100, idle: 0, steal: 0 });
        assert_eq!(Ticks::parse("cpu0 100 1"), None);
    }

    #[test]
    fn time_of_a_process_with_an_odd_name() {
        let stat = "42 (a) b) S 7 42 42 0 -1 4194560 1 2 3 4 10 20 30 40 20 0 1 0 5";
        assert_eq!(Process::parse(stat), Some(Process { parent: 7, ticks: 100 }));
        assert_eq!(Process::parse("42 (a"), None);
    }

    #[test]
    fn children_and_kernel_threads_are_no_strangers() {
        let p = |parent, ticks| Process { parent, ticks };
        let all = HashMap::from([
            (1, p(0, 1)),
            (2, p(0, 10)),
            (3, p(2, 100)),
            (7, p(1, 1000)),
            (8, p(7, 10_000)),
            (9, p(8, 100_000)),
            (10, p(77, 2)),
        ]);
        assert_eq!(outside(&all, &[7, 2]), 3);
    }

    #[test]
    fn a_slug() {
        let machine = Machine { cpu: "AMD EPYC 7R13 (48-Core)".into(), ..Machine::here() };
        assert_eq!(machine.slug(), "amd-epyc-7r13-48-core");
    }
}
