//! Programs started by the lab: short ones that are waited for, and long-running ones that are killed on drop.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::LabError;
use crate::report::{Report, tail};

/// Polling interval while waiting for a condition. Short compared with what tests measure, long compared with one check.
const POLL: Duration = Duration::from_millis(5);

/// Time allowed for a program to end its child processes. If it is killed then, they are left behind.
const GENTLE: Duration = Duration::from_secs(5);

/// Repeats `look` until it returns a value or `limit` expires.
pub fn wait_for<T>(limit: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = look() {
            return Some(found);
        }
        if Instant::now() >= deadline {
            return None;
        }
        thread::sleep(POLL);
    }
}

/// Runs a short program with `input` on its standard input. Returns its standard output, or the error.
pub(crate) fn run(program: &str, arguments: &[&str], input: &str) -> Result<String, LabError> {
    let mut child = Command::new(program)
        .args(arguments)
        // Ctrl-C at a terminal is sent to the whole group, and must not end a program that removes a lab.
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|source| LabError::Missing { program: program.into(), source })?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that exits before it has read everything reports the reason on standard error.
        let _ = stdin.write_all(input.as_bytes());
    }
    let done = child.wait_with_output().map_err(LabError::io(format!("waiting for {program}")))?;
    if done.status.success() {
        return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
    }
    Err(LabError::Refused {
        program: format!("{program} {}", arguments.join(" ")),
        status: done.status,
        output: String::from_utf8_lossy(&done.stderr).into_owned(),
    })
}

/// A running program. It is killed and waited for on drop; its output goes to a file.
///
/// If the thread is panicking on drop, or a signal ends the test ([`Report`]), the end of that file is printed, because it
/// usually shows the reason.
#[derive(Debug)]
pub struct ChildGuard {
    _report: Report,
    child: Arc<Mutex<Child>>,
    gentle: bool,
    name: String,
    log: tempfile::NamedTempFile,
}

fn lock(child: &Mutex<Child>) -> MutexGuard<'_, Child> {
    child.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The output of a program so far.
fn output(log: &Path) -> String {
    fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

impl ChildGuard {
    /// Starts `command` (see `Namespace::command`) with standard output and standard error redirected to a file.
    pub fn spawn(command: &mut Command) -> Result<Self, LabError> {
        let name = format!("{command:?}");
        let log = tempfile::NamedTempFile::new().map_err(LabError::io("temporary file"))?;
        // Two open file descriptions overwrite each other's output unless both append.
        let append = |path: &Path| File::options().append(true).open(path).map_err(LabError::io("temporary file"));
        let child = command
            .stdin(Stdio::null())
            .stdout(append(log.path())?)
            .stderr(append(log.path())?)
            .spawn()
            .map_err(|source| LabError::Missing { program: name.clone(), source })?;
        let child = Arc::new(Mutex::new(child));
        let (path, to_end) = (log.path().to_owned(), child.clone());
        let show = move || tail(&output(&path));
        let end = move || drop(lock(&to_end).kill());
        let report = Report::with_end(format!("the output of {name}"), show, end);
        Ok(Self { _report: report, child, gentle: false, name, log })
    }

    /// On drop, send SIGTERM first: the program has child processes, which would be left behind if it were killed.
    #[must_use]
    pub fn ended_gently(mut self) -> Self {
        self.gentle = true;
        self
    }

    /// The process ID. `nsenter` executes the program in its place, so this is the program's own.
    pub fn pid(&self) -> u32 {
        lock(&self.child).id()
    }

    /// The output so far.
    pub fn output(&self) -> String {
        output(self.log.path())
    }

    /// Waits until `text` is in the output.
    pub fn wait_output(&mut self, text: &str, limit: Duration) -> Result<(), LabError> {
        let seen = wait_for(limit, || {
            // Check for exit before reading: the text may be in the last output.
            let running = self.is_running();
            let seen = self.output().contains(text);
            (seen || !running).then_some(seen)
        });
        match seen {
            Some(true) => Ok(()),
            _ => Err(LabError::Late { what: format!("{text:?} from {}", self.name), seconds: limit.as_secs() }),
        }
    }

    /// Whether the program is still running.
    pub fn is_running(&mut self) -> bool {
        matches!(lock(&self.child).try_wait(), Ok(None))
    }

    /// Sends a signal to the program.
    pub fn signal(&self, signal: Signal) -> Result<(), LabError> {
        kill(Pid::from_raw(self.pid() as i32), signal).map_err(LabError::errno(format!("{signal} to {}", self.name)))
    }

    /// Waits for the program to exit; `None` if it still runs after `limit`.
    pub fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        wait_for(limit, || lock(&self.child).try_wait().ok().flatten())
    }

    /// Kills the program (SIGKILL) and waits for it to exit. Does nothing if it has already exited.
    pub fn kill(&mut self) {
        let mut child = lock(&self.child);
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        if self.gentle && self.is_running() {
            let _ = self.signal(Signal::SIGTERM);
            self.wait(GENTLE);
        }
        self.kill(); // the report, which is dropped afterwards, then has all of the output
    }
}
