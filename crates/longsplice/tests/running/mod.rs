//! A running longsplice and a peer, for tests from outside.

mod setting;
pub mod translucent;

pub use setting::{AT_ONCE, Setting, listener};

use longsplice_lab::{ChildGuard, Namespace, Report, report::show_failures};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    io::{self, BufRead, BufReader, ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::{
        fs::{MetadataExt, chown},
        net::UnixStream,
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Output},
    thread,
    time::{Duration, Instant},
};

/// The program under test.
pub const LONGSPLICE: &str = env!("CARGO_BIN_EXE_longsplice");
/// Time limit for every wait: on an idle machine nothing here takes a second.
const PATIENCE: Duration = Duration::from_secs(30);

/// Repeats a measurement until each count is at most so much, ten times at most. Returns the least of each: what else uses the
/// machine only ever adds to them.
pub fn least<const N: usize>(most: [f64; N], mut measure: impl FnMut() -> [f64; N]) -> [f64; N] {
    let mut least = [f64::INFINITY; N];
    for _ in 0..10 {
        least.iter_mut().zip(measure()).for_each(|(least, n)| *least = least.min(n));
        if least.iter().zip(most).all(|(n, most)| *n <= most) {
            break;
        }
    }
    least
}

/// Repeats `look` until it returns a value.
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

/// Runs the program until it exits. A proxy without a given control
/// socket gets its own: another test may be using the default one.
pub fn longsplice(arguments: &[&str]) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(LONGSPLICE);
    command.args(arguments).env_remove("LONGSPLICE_CONTROL");
    if arguments.first() == Some(&"run") && !arguments.contains(&"--control") {
        command.arg("--control").arg(dir.path().join("control.sock"));
    }
    command.output().unwrap()
}

/// The pins of a proxy in a namespace, which outlive the proxy. Removed on drop, for tests that fail before a clean stop.
pub struct Pins(PathBuf);

impl Pins {
    pub fn of(namespace: &Namespace) -> Pins {
        let inode = fs::metadata(namespace.path()).unwrap().ino();
        Pins(Path::new("/sys/fs/bpf/longsplice").join(format!("net-{inode}")))
    }

    /// Those of translucent proxying.
    pub fn of_tpot(namespace: &Namespace) -> Pins {
        let inode = fs::metadata(namespace.path()).unwrap().ino();
        Pins(Path::new("/sys/fs/bpf/longsplice").join(format!("tpot-{inode}")))
    }

    /// Those of the router of a farm.
    pub fn of_router(namespace: &Namespace) -> Pins {
        let inode = fs::metadata(namespace.path()).unwrap().ino();
        Pins(Path::new("/sys/fs/bpf/longsplice").join(format!("tpot-router-{inode}")))
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

/// A proxy, which is killed on drop. If the test fails or hangs, its flows, its counters and the end of its log are shown.
pub struct Running {
    _state: Report,
    child: ChildGuard,
    dir: tempfile::TempDir,
    control: PathBuf,
}

/// Starts the program. A signal that ends a test that hangs goes to all processes of its group: the program is in one of its
/// own, or it would be gone before it is asked.
pub fn spawn(command: &mut Command) -> ChildGuard {
    show_failures();
    ChildGuard::spawn(command.process_group(0).env_remove("RUST_LOG").env_remove("LONGSPLICE_CONTROL")).unwrap()
}

/// What commands of the program say, if they end within seconds.
pub fn shown(command: impl Fn(&str) -> Command, commands: &[&[&str]]) -> String {
    let all = commands.iter().map(|arguments| {
        let said = command("timeout").args(["-k1", "2", LONGSPLICE]).args(*arguments).output();
        let said = said.map_or_else(|e| e.to_string(), |o| [o.stdout, o.stderr].map(|s| lossy(&s)).concat());
        // most counters are of something else
        let lines: Vec<&str> = said.lines().filter(|line| !line.ends_with(" 0")).collect();
        format!("{arguments:?}\n{}\n", lines.join("\n"))
    });
    all.collect()
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

impl Running {
    /// Starts a proxy that copies from a free loopback port to `target`.
    pub fn copying(target: &str, more: &[&str]) -> Running {
        Running::start(
            Command::new(LONGSPLICE),
            None,
            &["--copy-only", "--plug", &format!("127.0.0.1:0={target}")],
            more,
        )
    }

    /// Like `copying`, with this control socket.
    pub fn copying_at(control: &Path, target: &str, more: &[&str]) -> Running {
        let plug = format!("127.0.0.1:0={target}");
        Running::start(Command::new(LONGSPLICE), Some(control), &["--copy-only", "--plug", &plug], more)
    }

    /// Starts the proxy with any command that executes the program, for instance inside a namespace.
    pub fn start(command: Command, control: Option<&Path>, arguments: &[&str], more: &[&str]) -> Running {
        Running::start_at(tempfile::tempdir().unwrap(), command, control, arguments, more)
    }

    /// Like `start`, with files in this directory, for the user who owns it.
    pub fn start_in(home: &Path, command: Command, arguments: &[&str]) -> Running {
        let dir = tempfile::tempdir_in(home).unwrap();
        let owner = fs::metadata(home).unwrap();
        chown(dir.path(), Some(owner.uid()), Some(owner.gid())).unwrap();
        Running::start_at(dir, command, None, arguments, &[])
    }

    fn start_at(
        dir: tempfile::TempDir,
        command: Command,
        control: Option<&Path>,
        arguments: &[&str],
        more: &[&str],
    ) -> Running {
        let log = dir.path().join("access.log");
        let arguments = [arguments, &["--access-log", log.to_str().unwrap()]].concat();
        Running::launch(dir, command, control, &arguments, more)
    }

    /// Starts a proxy that copies, with a configuration that says where its access log goes.
    pub fn logging_elsewhere(configuration: &Path) -> Running {
        let arguments = ["--copy-only", "--config", configuration.to_str().unwrap()];
        Running::launch(tempfile::tempdir().unwrap(), Command::new(LONGSPLICE), None, &arguments, &[])
    }

    fn launch(
        dir: tempfile::TempDir,
        mut command: Command,
        control: Option<&Path>,
        arguments: &[&str],
        more: &[&str],
    ) -> Running {
        let control = control.map_or_else(|| dir.path().join("control.sock"), Path::to_owned);
        command.arg("run").args(arguments).args(more);
        // on a busy machine any path may look long for a moment
        if !arguments.contains(&"--path") {
            command.args(["--path", "any"]);
        }
        // the default takes a tenth of a second of a processor at each start, and 90 MB
        if !arguments.iter().chain(more).any(|argument| *argument == "--max-flows") {
            command.args(["--max-flows", "4096"]);
        }
        command.arg("--control").arg(&control);
        let path = control.display().to_string();
        let show = move || {
            shown(|program| Command::new(program), &[&["ls", "--control", &path], &["counters", "--control", &path]])
        };
        let child = spawn(&mut command);
        let running = Running { _state: Report::new("flows and counters", show), child, dir, control };
        running.wait_message("control socket");
        running
    }

    /// Returns the proxy's output.
    pub fn messages(&self) -> String {
        self.child.output()
    }

    /// Waits until the output contains `text`.
    pub fn wait_message(&self, text: &str) {
        eventually(text, || self.messages().contains(text).then_some(()));
    }

    /// Returns the address of the first listener.
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

    /// Runs a client command. Returns the output.
    pub fn client(&self, arguments: &[&str]) -> String {
        let output = self.ask(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}\n{}", self.messages());
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a client command that must fail. Returns the error.
    pub fn client_error(&self, arguments: &[&str]) -> String {
        let output = self.ask(arguments);
        assert!(!output.status.success(), "{arguments:?} succeeded");
        String::from_utf8(output.stderr).unwrap()
    }

    fn ask(&self, arguments: &[&str]) -> Output {
        longsplice(&[arguments, &["--control", self.control.to_str().unwrap()]].concat())
    }

    pub fn id(&self) -> u32 {
        self.child.pid()
    }

    pub fn signal(&self, signal: Signal) {
        self.child.signal(signal).unwrap();
    }

    /// Stops the proxy by SIGSTOP, and waits until it stands still.
    pub fn stand_still(&self) {
        self.signal(Signal::SIGSTOP);
        let stat = format!("/proc/{}/stat", self.id());
        eventually("the program stands still", || fs::read_to_string(&stat).unwrap().contains(") T ").then_some(()));
    }

    /// Kills the proxy with SIGKILL; harmless if it has exited.
    pub fn kill(&mut self) {
        self.child.kill();
    }

    /// Waits until the proxy exits. Returns the status.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait(PATIENCE).unwrap_or_else(|| panic!("the proxy does not end within {PATIENCE:?}"))
    }

    /// Returns the number of open descriptors.
    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.id())).unwrap().count()
    }

    /// Returns a line for each open descriptor: its number and what it is, and for programs, maps and links what the kernel
    /// says of them.
    pub fn open_files(&self) -> BTreeSet<String> {
        let of = |part: &str, number: &str| PathBuf::from(format!("/proc/{}/{part}/{number}", self.id()));
        let describe = |number: &str| {
            let target = fs::read_link(of("fd", number)).ok()?.display().to_string(); // it may just have been closed
            let details = fs::read_to_string(of("fdinfo", number)).unwrap_or_default();
            let details =
                details.lines().skip_while(|line| !line.contains("_type:")).map(|line| line.replace('\t', " "));
            Some(format!("{number}: {target} {}", details.collect::<Vec<_>>().join(" ")))
        };
        let all = fs::read_dir(of("fd", "")).unwrap();
        all.filter_map(|entry| describe(entry.unwrap().file_name().to_str().unwrap())).collect()
    }

    /// Waits until the proxy is idle: each thread is asleep whenever checked.
    pub fn comes_to_rest(&self) {
        const LOOKS: u32 = 50;
        let tasks = format!("/proc/{}/task", self.id());
        let asleep = |task: PathBuf| {
            // a thread that has just exited counts as asleep
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

    /// Returns how often the threads have slept and been woken.
    pub fn wake_ups(&self) -> u64 {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.id())).unwrap();
        let slept = |task: PathBuf| {
            let status = fs::read_to_string(task.join("status")).unwrap_or_default();
            let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
            line.map_or(0, |n| n.trim().parse::<u64>().unwrap())
        };
        tasks.map(|task| slept(task.unwrap().path())).sum()
    }

    /// The flows, as `ls` lists them.
    pub fn flows(&self) -> Vec<Value> {
        serde_json::from_str(&self.client(&["ls", "--json"])).unwrap()
    }

    /// The first flow, if there is one; null otherwise.
    pub fn flow(&self) -> Value {
        self.flows().into_iter().next().unwrap_or_default()
    }

    /// The number of flows in this state.
    pub fn flows_in(&self, state: &str) -> usize {
        self.flows().iter().filter(|flow| flow["state"] == state).count()
    }

    /// Waits until a flow is in this state. Returns it.
    pub fn wait_flow(&self, state: &str) -> Value {
        eventually(state, || self.flows().into_iter().find(|flow| flow["state"] == state))
    }

    /// Waits until all flows have ended.
    pub fn flows_end(&self) {
        let end = Instant::now() + PATIENCE;
        loop {
            let left = self.flows();
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < end, "{} flows do not end; the first: {}", left.len(), left[0]);
            thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn counters(&self) -> Value {
        serde_json::from_str(&self.client(&["counters", "--json"])).unwrap()
    }

    /// One of the counters, of "proxy", "verdicts" or "tpot".
    pub fn count(&self, of: &str, name: &str) -> u64 {
        let all = self.counters();
        all[of][name].as_u64().unwrap_or_else(|| panic!("no {of}.{name}: {all}"))
    }

    /// The lines of the access log that are complete. It need not exist yet.
    pub fn log(&self) -> String {
        let mut log = fs::read_to_string(self.access_log()).unwrap_or_default();
        log.truncate(log.rfind('\n').map_or(0, |end| end + 1));
        log
    }

    /// The access log, if it is in JSON.
    pub fn records(&self) -> Vec<Value> {
        self.log().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Waits for a line of the access log with all of this. Returns it.
    pub fn wait_line(&self, with: &[&str]) -> String {
        let has_all = |line: &&str| with.iter().all(|text| line.contains(text));
        eventually(&format!("a line of the access log with {with:?}"), || {
            self.log().lines().find(has_all).map(str::to_owned)
        })
    }

    /// Like `wait_line`, if the log is in JSON.
    pub fn wait_record(&self, with: &[&str]) -> Value {
        serde_json::from_str(&self.wait_line(with)).unwrap()
    }

    /// Stops the proxy, whatever it does.
    pub fn shut_down(&mut self) {
        self.client(&["stop"]);
        assert!(self.wait().success(), "{}", self.messages());
    }

    /// Waits until all flows have ended, and stops the proxy.
    pub fn stop(&mut self, pins: &Pins) {
        self.flows_end();
        self.shut_down();
        assert!(!pins.exist(), "a clean stop leaves nothing pinned");
    }

    /// Like `stop`; returns the JSON access log.
    pub fn end(&mut self, pins: &Pins) -> Vec<Value> {
        self.stop(pins);
        self.records()
    }
}

/// A connection to the control socket, with time limits.
pub struct Control(BufReader<UnixStream>);

impl Control {
    pub fn of(proxy: &Running) -> Control {
        Control::at(proxy.control()).unwrap()
    }

    /// Connects to a socket, if a process listens there.
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

    /// Sends a request. Returns the answer, or an error if the program has exited.
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

/// Echoes the data on every connection to `listener`.
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

/// The address of an echo server on the loopback device.
pub fn loopback_echo() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    echo(listener);
    address
}

/// Connects, with a time limit for this and for later reads and writes.
pub fn connect(address: SocketAddr) -> TcpStream {
    connect_within(address, PATIENCE)
}

/// The same with another limit for connecting.
pub fn connect_within(address: SocketAddr, limit: Duration) -> TcpStream {
    let stream = TcpStream::connect_timeout(&address, limit).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Whether a connection is reset before a byte has come. The reset may arrive before the caller knows that it is connected.
pub fn is_reset(address: SocketAddr) -> bool {
    let mut stream = match TcpStream::connect_timeout(&address, PATIENCE) {
        Ok(stream) => stream,
        Err(error) => return error.kind() == ErrorKind::ConnectionReset,
    };
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::ConnectionReset)
}

/// Sends `bytes` and receives them back, at the same time: buffers on the way may be smaller.
pub fn round_trip(stream: &mut TcpStream, bytes: &[u8]) {
    let mut back = vec![0; bytes.len()];
    let mut writer = stream.try_clone().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || writer.write_all(bytes).unwrap());
        stream.read_exact(&mut back).unwrap();
    });
    assert_eq!(back, bytes);
}

/// Returns what is open, if it is more than before: what is new, and what is gone.
pub fn more_open(before: &BTreeSet<String>, after: &BTreeSet<String>) -> Option<String> {
    let (was, is) = (before.len(), after.len());
    let [new, gone] = [after.difference(before), before.difference(after)].map(Vec::from_iter);
    (is > was).then(|| format!("{is} descriptors, and {was} at the start; new: {new:#?}, gone: {gone:#?}"))
}
