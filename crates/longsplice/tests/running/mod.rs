//! A running longsplice and somebody to talk to, for tests from outside.

// Each test file uses what it needs.
#![allow(dead_code)]

use longsplice_lab::Namespace;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::{
        fs::{MetadataExt, chown},
        net::UnixStream,
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

/// The program under test.
pub const LONGSPLICE: &str = env!("CARGO_BIN_EXE_longsplice");
/// Nothing here takes a second on an idle machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Looks until there is something to see.
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(Instant::now() < end, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Runs the program to its end. A proxy that is not told where its control socket is gets one of its own: another test may have
/// the default one at that moment.
pub fn longsplice(arguments: &[&str]) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(LONGSPLICE);
    command.args(arguments).env_remove("LONGSPLICE_CONTROL");
    if arguments.first() == Some(&"run") && !arguments.contains(&"--control") {
        command.arg("--control").arg(dir.path().join("control.sock"));
    }
    command.output().unwrap()
}

/// What a proxy in a namespace pins outlives it: removed at drop, for tests that fail before a clean stop does it.
pub struct Pins(PathBuf);

impl Pins {
    pub fn of(namespace: &Namespace) -> Pins {
        let inode = fs::metadata(namespace.path()).unwrap().ino();
        Pins(Path::new("/sys/fs/bpf/longsplice").join(format!("net-{inode}")))
    }

    pub fn exist(&self) -> bool {
        self.0.exists()
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A proxy, killed at drop.
pub struct Running {
    child: Child,
    dir: tempfile::TempDir,
    control: PathBuf,
}

impl Running {
    /// Copies from a free loopback port to `target`.
    pub fn copying(target: &str, more: &[&str]) -> Running {
        Running::start(
            Command::new(LONGSPLICE),
            None,
            &["--copy-only", "--plug", &format!("127.0.0.1:0={target}")],
            more,
        )
    }

    /// The same with its control socket there.
    pub fn copying_at(control: &Path, target: &str, more: &[&str]) -> Running {
        let plug = format!("127.0.0.1:0={target}");
        Running::start(Command::new(LONGSPLICE), Some(control), &["--copy-only", "--plug", &plug], more)
    }

    /// Any command that comes down to the program, as inside a namespace.
    pub fn start(command: Command, control: Option<&Path>, arguments: &[&str], more: &[&str]) -> Running {
        Running::start_at(tempfile::tempdir().unwrap(), command, control, arguments, more)
    }

    /// The same for a program of the user whose directory this is.
    pub fn start_in(home: &Path, command: Command, arguments: &[&str]) -> Running {
        let dir = tempfile::tempdir_in(home).unwrap();
        let owner = fs::metadata(home).unwrap();
        chown(dir.path(), Some(owner.uid()), Some(owner.gid())).unwrap();
        Running::start_at(dir, command, None, arguments, &[])
    }

    fn start_at(
        dir: tempfile::TempDir,
        mut command: Command,
        control: Option<&Path>,
        arguments: &[&str],
        more: &[&str],
    ) -> Running {
        let control = control.map_or_else(|| dir.path().join("control.sock"), Path::to_owned);
        command.arg("run").args(arguments).args(more);
        // on a busy machine any path may be long for a moment
        if !arguments.contains(&"--path") {
            command.args(["--path", "any"]);
        }
        command.arg("--control").arg(&control).arg("--access-log").arg(dir.path().join("access.log"));
        command.env_remove("RUST_LOG").env_remove("LONGSPLICE_CONTROL");
        command.stdin(Stdio::null()).stderr(File::create(dir.path().join("messages")).unwrap());
        let running = Running { child: command.spawn().unwrap(), dir, control };
        running.wait_message("control socket");
        running
    }

    /// What it has said on standard error.
    pub fn messages(&self) -> String {
        fs::read_to_string(self.dir.path().join("messages")).unwrap()
    }

    /// Waits until it has said this.
    pub fn wait_message(&self, text: &str) {
        eventually(text, || self.messages().contains(text).then_some(()));
    }

    /// The address of its first listener.
    pub fn address(&self) -> SocketAddr {
        let messages = self.messages();
        let (_, rest) = messages.split_once(" on 1").expect("a listener");
        let address = format!("1{}", rest.split([' ', '"', ':']).next().unwrap());
        let port = rest.split([' ', '"', '\n', ';']).next().unwrap().rsplit(':').next().unwrap();
        format!("{address}:{port}").parse().unwrap()
    }

    pub fn control(&self) -> &Path {
        &self.control
    }

    pub fn access_log(&self) -> PathBuf {
        self.dir.path().join("access.log")
    }

    /// Asks it something; the answer.
    pub fn client(&self, arguments: &[&str]) -> String {
        let output = self.ask(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}\n{}", self.messages());
        String::from_utf8(output.stdout).unwrap()
    }

    /// Asks it something that it refuses; why.
    pub fn client_error(&self, arguments: &[&str]) -> String {
        let output = self.ask(arguments);
        assert!(!output.status.success(), "{arguments:?} succeeded");
        String::from_utf8(output.stderr).unwrap()
    }

    fn ask(&self, arguments: &[&str]) -> Output {
        longsplice(&[arguments, &["--control", self.control.to_str().unwrap()]].concat())
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    /// SIGKILL; harmless if it has ended.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// How it ended.
    pub fn wait(&mut self) -> ExitStatus {
        let child = &mut self.child;
        eventually("the end of the proxy", || child.try_wait().unwrap())
    }

    /// How many it has open.
    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    /// Waits until it has nothing to do: each of its threads sleeps, whenever one looks.
    pub fn comes_to_rest(&self) {
        const LOOKS: u32 = 50;
        let tasks = format!("/proc/{}/task", self.child.id());
        let asleep = |task: PathBuf| {
            // one that has just ended sleeps well
            let stat = fs::read_to_string(task.join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, state)| state.starts_with('S'))
        };
        let mut quiet = 0;
        eventually("rest", || {
            let all = fs::read_dir(&tasks).unwrap().all(|task| asleep(task.unwrap().path()));
            quiet = if all { quiet + 1 } else { 0 };
            (quiet == LOOKS).then_some(())
        });
    }

    /// How often its threads have slept, and so were woken.
    pub fn wake_ups(&self) -> u64 {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let slept = |task: PathBuf| {
            let status = fs::read_to_string(task.join("status")).unwrap_or_default();
            let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
            line.map_or(0, |n| n.trim().parse::<u64>().unwrap())
        };
        tasks.map(|task| slept(task.unwrap().path())).sum()
    }

    /// Waits until all flows have ended, and stops it.
    pub fn stop(&mut self, pins: &Pins) {
        eventually("the end of all flows", || (self.client(&["ls", "--json"]).trim() == "[]").then_some(()));
        self.client(&["stop"]);
        assert!(self.wait().success());
        assert!(!pins.exist(), "a clean stop leaves nothing pinned");
    }

    /// The same; its access log, which it writes in JSON.
    pub fn end(&mut self, pins: &Pins) -> Vec<Value> {
        self.stop(pins);
        let log = fs::read_to_string(self.access_log()).unwrap();
        log.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("--- flows and counters:\n{:?}\n{:?}", self.ask(&["ls"]), self.ask(&["counters"]));
            eprintln!("--- the proxy said:\n{}", self.messages());
        }
        self.kill();
    }
}

/// The control socket, without waiting for more than the caller wants to.
pub struct Control(BufReader<UnixStream>);

impl Control {
    pub fn of(proxy: &Running) -> Control {
        Control::at(proxy.control()).unwrap()
    }

    /// Of whoever listens there, if anybody does.
    pub fn at(path: &Path) -> io::Result<Control> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Control(BufReader::new(stream)))
    }

    pub fn send(&mut self, requests: &str) {
        self.0.get_mut().write_all(requests.as_bytes()).unwrap();
    }

    pub fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// Asks this; the answer, unless the program has gone.
    pub fn ask(&mut self, request: &Value) -> io::Result<Value> {
        self.0.get_mut().write_all(format!("{request}\n").as_bytes())?;
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        Ok(serde_json::from_str(&line)?)
    }

    pub fn flows(&mut self) -> Vec<Value> {
        self.send("{\"version\":1,\"ask\":\"ls\"}\n");
        self.answer()["flows"].as_array().unwrap().clone()
    }
}

/// Sends back what it gets, on every connection that comes to `listener`.
pub fn echo(listener: TcpListener) {
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            thread::spawn(move || {
                let mut buffer = [0; 65536];
                while let Ok(n @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..n]).is_err() {
                        return;
                    }
                }
            });
        }
    });
}

/// The address of an echo server on loopback.
pub fn loopback_echo() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    echo(listener);
    address
}

/// Connects, and never waits for ever afterwards.
pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Sends `bytes` and gets them back.
pub fn round_trip(stream: &mut TcpStream, bytes: &[u8]) {
    stream.write_all(bytes).unwrap();
    let mut back = vec![0; bytes.len()];
    stream.read_exact(&mut back).unwrap();
    assert_eq!(back, bytes);
}
