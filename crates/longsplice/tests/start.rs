//! Starts that fail or hang, with messages that say what to do; and the last lines of the log. None of these tests needs root.

use crate::running::{LONGSPLICE, connect, eventually, longsplice, loopback_echo, round_trip};
use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::{
        signal::{Signal, kill},
        stat::Mode,
    },
    unistd::{Pid, mkfifo},
};
use std::{
    fs::{self, File, OpenOptions},
    io::Read,
    net::SocketAddr,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
};

/// A proxy with its messages in a file; killed on drop.
struct Proxy {
    child: Child,
    dir: tempfile::TempDir,
}

impl Proxy {
    fn start(arguments: &[&str]) -> Proxy {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new(LONGSPLICE);
        command.args(["run", "--copy-only"]).args(arguments).arg("--control").arg(dir.path().join("control"));
        command.env_remove("RUST_LOG").stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.stderr(File::create(dir.path().join("messages")).unwrap()).spawn().unwrap();
        Proxy { child, dir }
    }

    fn said(&self) -> String {
        fs::read_to_string(self.dir.path().join("messages")).unwrap()
    }

    fn stop(&mut self) -> ExitStatus {
        kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM).unwrap();
        eventually("the end", || self.child.try_wait().unwrap())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn complaint(arguments: &[&str]) -> String {
    let output = longsplice(arguments);
    assert!(!output.status.success(), "{arguments:?} succeeded");
    String::from_utf8(output.stderr).unwrap()
}

fn fifo(dir: &Path, name: &str) -> String {
    let path = dir.join(name);
    mkfifo(&path, Mode::S_IRWXU).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_log_that_nobody_reads_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = fifo(dir.path(), "fifo");
    let said = complaint(&["run", "--copy-only", "--socks5", "127.0.0.1:0", "--access-log", &fifo]);
    assert!(said.contains("a FIFO that nobody reads; start its reader first"), "{said}");
}

/// Opening the lock of this cache waits for ever, as a disk may that does not answer.
#[test]
fn a_start_that_hangs_can_be_stopped() {
    let dir = tempfile::tempdir().unwrap();
    fifo(dir.path(), "lock");
    let file = dir.path().join("longsplice.toml");
    let cache = format!("cache = {{ dir = \"{}\" }}", dir.path().display());
    fs::write(&file, format!("[[listener]]\nprotocol = \"http\"\nlisten = \"127.0.0.1:0\"\n{cache}\n")).unwrap();
    let mut proxy = Proxy::start(&["--config", file.to_str().unwrap()]);
    eventually("signals to be handled", || proxy.dir.path().join("control").exists().then_some(()));
    assert!(proxy.stop().success());
    let said = proxy.said();
    assert!(said.contains("SIGTERM: stopping, before files and addresses were opened"), "{said}");
    assert!(!proxy.dir.path().join("control").exists());
}

/// Before signals are handled, they have their usual effect.
#[test]
fn a_configuration_that_does_not_come_can_be_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = fifo(dir.path(), "fifo");
    let mut proxy = Proxy::start(&["--config", &fifo]);
    assert!(!proxy.stop().success());
}

#[test]
fn lines_that_are_lost_at_the_end_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = fifo(dir.path(), "fifo");
    // a reader that sleeps
    let mut reader = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(&fifo).unwrap();
    fcntl(&reader, FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
    let plug = format!("127.0.0.1:0={}", loopback_echo());
    let mut proxy = Proxy::start(&["--plug", &plug, "--access-log", &fifo]);
    let at: SocketAddr = eventually("a listener", || {
        let said = proxy.said();
        said.split_once("plug on ")?.1.split(' ').next()?.parse().ok()
    });
    let all = 60;
    for _ in 0..all {
        round_trip(&mut connect(at), b"hello");
    }
    assert!(proxy.stop().success());
    let said = proxy.said();
    let lost = said.split_once("cannot write the end of the access log: ").and_then(|(_, rest)| rest.split(' ').next());
    let lost: usize = lost.unwrap_or_else(|| panic!("{said}")).parse().unwrap();
    let mut lines = String::new();
    reader.read_to_string(&mut lines).unwrap();
    assert_eq!(lines.matches('\n').count() + lost, all, "{said}");
}

#[test]
fn wrong_arguments_are_explained() {
    for (arguments, want) in [
        (&["unsplice", "abc"][..], "write the number of a flow, as `longsplice ls` shows it"),
        (&["inspect", "-1.5"], "unexpected argument"),
        (
            &["tpot", "host", "--proxy", "10.0.0.1", "--port", "80", "--cgroup", "/nope"],
            "--cgroup <DIR>': No such file",
        ),
        (&["tpot", "host", "--port", "80"], "--proxy <PREFIX>|--key-file <FILE>"),
        (&["tpot", "host", "--proxy", "10.9.9.9/8", "--port", "80"], "write 10.0.0.0/8 for the network"),
        (
            &["run", "--copy-only", "--socks5", "127.0.0.1:0", "--control", "/nope/x.sock"],
            "/nope: No such file or directory (os error 2); create this directory first",
        ),
    ] {
        let said = complaint(arguments);
        assert!(said.contains(want), "{arguments:?}: {said}");
    }
    assert!(!Path::new("/nope").exists());
}

#[test]
fn a_wrong_source_and_warnings_have_their_places() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("longsplice.toml");
    let path = file.to_str().unwrap();
    let socks = "[[listener]]\nprotocol = \"socks5\"\nlisten = \"127.0.0.1:0\"\n";
    fs::write(&file, format!("source = [\"127.0.0.1\", \"192.0.2.1\"]\n{socks}")).unwrap();
    let said = complaint(&["run", "--copy-only", "--config", path]);
    assert!(said.contains(&format!("{path}:1:10: source 192.0.2.1: ")), "{said}");
    fs::write(&file, format!("{socks}rules = [{{ action = \"deny\" }}, {{ action = \"allow\" }}]\n")).unwrap();
    let mut proxy = Proxy::start(&["--config", path]);
    eventually("the start", || proxy.said().contains("control socket").then_some(()));
    assert!(proxy.stop().success());
    let said = proxy.said();
    assert!(said.contains(&format!("{path}:4:31: rule 2 is never reached")), "{said}");
}
