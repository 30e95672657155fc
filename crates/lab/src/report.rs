//! What a test shows when it fails, or when a signal ends it because it hangs.
//!
//! Each part of a test that has a state, such as a program or an engine, has a [`Report`], which describes it.
//! [`show_failures`] shows the reports as soon as the test panics, before anything is dropped and the state is gone; and at the
//! signal by which a runner ends a test that hangs. Without it, a report shows itself if it is dropped by a panic.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, mpsc};
use std::thread::ThreadId;
use std::time::{Duration, Instant};
use std::{env, panic, process, thread};

use tokio::signal::unix::{SignalKind, signal};

/// Lines shown of a log, and of a capture.
pub const LINES: usize = 200;
/// Time limit for all reports. Less than the time between SIGTERM and SIGKILL (`grace-period`) in .config/nextest.toml.
const PATIENCE: Duration = Duration::from_secs(8);

type Show = Arc<dyn Fn() -> String + Send + Sync>;
type End = Arc<dyn Fn() + Send + Sync>;

/// One that has something to show.
#[derive(Clone)]
struct Entry {
    name: String,
    show: Show,
    end: End,
    /// The thread that has made it.
    by: ThreadId,
    is_shown: bool,
}

static ENTRIES: Mutex<BTreeMap<u64, Entry>> = Mutex::new(BTreeMap::new());

fn entries() -> MutexGuard<'static, BTreeMap<u64, Entry>> {
    ENTRIES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shows a state when the test fails. As a field, it must come before what it describes: fields are dropped in order.
#[derive(Debug)]
pub struct Report(u64);

impl Report {
    /// Has `show` describe the state. It must not panic.
    pub fn new(name: impl Into<String>, show: impl Fn() -> String + Send + Sync + 'static) -> Report {
        Report::with_end(name, show, || {})
    }

    /// The same. `end` is called after all reports have been shown at a signal: nothing is dropped then.
    pub fn with_end(
        name: impl Into<String>,
        show: impl Fn() -> String + Send + Sync + 'static,
        end: impl Fn() + Send + Sync + 'static,
    ) -> Report {
        let (name, show, end) = (name.into(), Arc::new(show), Arc::new(end));
        let mut all = entries();
        let number = all.last_key_value().map_or(0, |(number, _)| number + 1);
        all.insert(number, Entry { name, show, end, by: thread::current().id(), is_shown: false });
        Report(number)
    }

    /// Shows the state now, unless it has been shown: for a test that finds a failure and panics later.
    pub fn show(&self) {
        let mut text = Vec::new();
        show(|number, _| number == self.0, &mut text);
        eprint!("{}", String::from_utf8_lossy(&text));
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        if thread::panicking() {
            self.show();
        }
        let removed = entries().remove(&self.0);
        drop(removed); // without the lock: it may own a report
    }
}

/// Shows those that have not been shown. The latest comes first, the packets of a lab at last. The time limit holds even if they
/// wait for something that hangs, or for a lock that the caller holds.
fn show(chosen: impl Fn(u64, &Entry) -> bool, to: &mut dyn std::io::Write) {
    let (done, is_done) = mpsc::channel();
    let mut all = Vec::new();
    for (number, entry) in
        entries().iter_mut().rev().filter(|(number, entry)| !entry.is_shown && chosen(**number, entry))
    {
        entry.is_shown = true;
        all.push((*number, entry.name.clone(), entry.show.clone()));
    }
    let count = all.len();
    thread::spawn(move || {
        // the caller may have gone
        all.into_iter().for_each(|(_, name, show)| drop(done.send(format!("--- {name}:\n{}", show().trim_end()))));
    });
    let end = Instant::now() + PATIENCE;
    for _ in 0..count {
        let Ok(text) = is_done.recv_timeout(end.saturating_duration_since(Instant::now())) else {
            let _ = writeln!(to, "--- (the rest is not known within {PATIENCE:?})");
            return;
        };
        let _ = writeln!(to, "{text}");
    }
}

/// From now on, panics and signals have the process show its reports. Only tests need that.
pub fn show_failures() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        show_at_panics();
        let (ready, is_ready) = mpsc::channel();
        thread::spawn(move || at_signal(&ready));
        let _ = is_ready.recv(); // until then, a signal would end the process without a report
    });
}

fn show_at_panics() {
    // nextest has a process for each test: any thread that panics is a part of it
    let is_one_test = env::var_os("NEXTEST").is_some();
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        before(info);
        let (by, mut text) = (thread::current().id(), Vec::new());
        show(|_, entry| is_one_test || entry.by == by, &mut text);
        eprint!("{}", String::from_utf8_lossy(&text)); // what the harness of Rust captures
    }));
}

/// Waits for a signal that asks the process to end, shows all reports, and ends it.
fn at_signal(ready: &mpsc::Sender<()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let name = runtime.block_on(async {
        let [mut term, mut int, mut hup] = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()]
            .map(|kind| signal(kind).expect("a handler of a signal"));
        let _ = ready.send(());
        tokio::select! { _ = term.recv() => "SIGTERM", _ = int.recv() => "SIGINT", _ = hup.recv() => "SIGHUP" }
    });
    let mut out = std::io::stderr(); // the harness of Rust would capture the output of macros, and lose it
    let _ = writeln!(out, "--- {name}: the test has not ended by itself. It has, or had when it panicked:");
    show(|_, _| true, &mut out);
    let all: Vec<End> = entries().values().map(|entry| entry.end.clone()).collect();
    all.iter().for_each(|end| end());
    process::exit(1);
}

/// The last [`LINES`] lines of a text, and how many are left out.
pub fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let left_out = lines.len().saturating_sub(LINES);
    let head = if left_out > 0 { format!("({left_out} lines before)\n") } else { String::new() };
    head + &lines[left_out..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ChildGuard;
    use nix::sys::signal::Signal;

    #[test]
    fn a_tail_says_what_it_leaves_out() {
        let long: String = (0..LINES + 2).map(|n| format!("line {n}\n")).collect();
        assert!(tail(&long).starts_with("(2 lines before)\nline 2\n"));
        assert!(tail(&long).ends_with(&format!("line {}", LINES + 1)));
        assert_eq!(tail("one\ntwo\n"), "one\ntwo");
    }

    #[test]
    fn only_a_panic_shows_a_report() {
        let shown = Arc::new(Mutex::new(0));
        let report = || {
            let shown = shown.clone();
            Report::new("a test of reports", move || {
                *shown.lock().expect("lock") += 1;
                String::new()
            })
        };
        drop(report());
        assert_eq!(*shown.lock().expect("lock"), 0);
        let inner = report();
        drop(Report::new("one that owns another", move || format!("{inner:?}")));
        let (one, other) = (report(), report());
        let failed = thread::scope(|scope| {
            let fails = move || {
                let _one = one;
                panic!("this test has to fail");
            };
            scope.spawn(fails).join()
        });
        assert!(failed.is_err());
        drop(other);
        assert_eq!(*shown.lock().expect("lock"), 1);
    }

    const FAILS: &str = "LONGSPLICE_TEST_FAILS";

    /// Runs [`fails`] in a process of its own. Returns what it shows.
    fn shown(how: &str, signal: Option<Signal>) -> String {
        let mut command = process::Command::new(env::current_exe().expect("this program has a path"));
        command.args(["--exact", "report::tests::fails", "--nocapture"]).env(FAILS, how);
        let mut child = ChildGuard::spawn(&mut command).expect("this program starts");
        child.wait_output("ready", PATIENCE).expect("it begins");
        signal.map_or(Ok(()), |signal| child.signal(signal)).expect("it runs");
        let status = child.wait(2 * PATIENCE).expect("it ends");
        assert!(!status.success(), "{how}: {}", child.output());
        child.output()
    }

    /// Does nothing by itself: see [`shown`].
    #[test]
    fn fails() {
        let Ok(how) = env::var(FAILS) else { return };
        show_failures();
        let state = Arc::new(Mutex::new("its state"));
        let of = state.clone();
        let _report = Report::new("it", move || of.lock().expect("lock").to_string());
        eprintln!("ready");
        match &*how {
            "panics" => panic!("this test has to fail"),
            "panics with a lock" => panic!("{:?}", state.lock()), // it is held until the end of the statement
            _ => thread::sleep(Duration::from_secs(600)),
        }
    }

    #[test]
    fn a_panic_shows_the_state_once() {
        let shown = shown("panics", None);
        assert_eq!(shown.matches("--- it:\nits state\n").count(), 1, "{shown}");
    }

    #[test]
    fn a_state_behind_a_lock_does_not_hang() {
        let shown = shown("panics with a lock", None);
        assert!(shown.contains("is not known"), "{shown}");
    }

    #[test]
    fn a_test_that_hangs_shows_its_state_when_it_is_ended() {
        let shown = shown("hangs", Some(Signal::SIGTERM));
        assert!(shown.contains("SIGTERM: the test has not ended by itself") && shown.contains("its state"), "{shown}");
    }
}
