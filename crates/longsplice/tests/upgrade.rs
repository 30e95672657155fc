//! Another program takes the place of the running one (`longsplice upgrade`), and clients notice nothing; or it cannot, and the
//! running one goes on.

use crate::running::{
    Control, LONGSPLICE, Running, Setting, connect, eventually, listener, longsplice, loopback_echo, round_trip,
};
use longsplice_lab::{
    Family,
    process::wait_for,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use nix::{
    sys::{
        signal::{Signal, kill},
        socket::{AddressFamily, MsgFlags, SockFlag, SockType, send, socketpair},
        stat::Mode,
    },
    unistd::{Pid, mkfifo},
};
use serde_json::Value;
use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::{fd::AsRawFd, unix::fs::PermissionsExt},
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);
/// Port of the echo server.
const ECHO: u16 = 7020;

/// A proxy and those that took its place.
pub struct Dynasty {
    pub first: Running,
    /// Numbers of the others.
    pub others: Vec<i32>,
}

impl Dynasty {
    pub fn of(first: Running) -> Dynasty {
        Dynasty { first, others: Vec::new() }
    }

    /// Lets another process take over, and returns what is said.
    pub fn upgrade(&mut self, more: &[&str]) -> String {
        let said = self.first.client(&[&["upgrade"], more].concat());
        let number = said.strip_prefix("process ").and_then(|rest| rest.split_once(' ')?.0.parse().ok());
        self.others.push(number.unwrap_or_else(|| panic!("{said}")));
        said
    }

    /// Stops the one that serves, and waits until it is gone.
    pub fn stop(&mut self) {
        self.first.client(&["stop"]);
        self.others.iter().for_each(|number| gone(*number));
        assert!(self.first.wait().success(), "{}", self.first.messages());
    }
}

/// Whether a process runs our program.
fn is_ours(number: i32) -> bool {
    fs::read_link(format!("/proc/{number}/exe")).is_ok_and(|exe| exe == Path::new(LONGSPLICE))
}

/// Numbers of the processes that a process has started, by whichever thread.
fn children(process: u32) -> String {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("children")).ok()).collect()
}

pub fn gone(number: i32) {
    eventually(&format!("the end of process {number}"), || (!is_ours(number)).then_some(()));
}

impl Drop for Dynasty {
    fn drop(&mut self) {
        for number in self.others.iter().filter(|number| is_ours(**number)) {
            let _ = kill(Pid::from_raw(*number), Signal::SIGKILL);
        }
    }
}

/// A program that is a script.
fn script(dir: &TempDir, name: &str, text: &str) -> String {
    let path = dir.path().join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.to_str().unwrap().into()
}

fn is_served(at: SocketAddr) {
    round_trip(&mut connect(at), b"hello");
}

/// Tapped connections stay with their process, where their tap is.
fn tapping(dir: &TempDir, more: &[&str]) -> Running {
    let tap = ["--tap", dir.path().to_str().unwrap()];
    Running::copying(&loopback_echo(), &[&tap, more].concat())
}

/// A client that waits in the queue is accepted by the next process, and one that is served stays with the first, if it has to.
#[test]
fn tapped_connections_stay_and_new_ones_are_taken() {
    let dir = tempfile::tempdir().unwrap();
    let mut proxies = Dynasty::of(tapping(&dir, &[]));
    let at = proxies.first.address();
    let mut stays = connect(at);
    round_trip(&mut stays, b"before");
    let said = proxies.upgrade(&[]);
    assert!(said.contains("handed over plug-127.0.0.1:0") && said.contains("stay with the old process: 1"), "{said}");
    assert_eq!(proxies.first.flows().len(), 0, "the next process has none");
    is_served(at);
    round_trip(&mut stays, b"after");
    proxies.upgrade(&[]);
    round_trip(&mut stays, b"after another");
    is_served(at);
    gone(proxies.others[0]); // nothing was left to it
    drop(stays);
    assert!(proxies.first.wait().success(), "{}", proxies.first.messages());
    is_served(at);
    proxies.stop();
    assert!(TcpStream::connect(at).is_err(), "nobody listens any more");
    assert!(!proxies.first.control().exists());
}

/// Whoever listens hears who serves now, and what becomes of the connections that stay.
#[test]
fn subscribers_hear_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut proxies = Dynasty::of(tapping(&dir, &[]));
    let mut stays = connect(proxies.first.address());
    round_trip(&mut stays, b"before");
    let mut heard = Control::of(&proxies.first);
    heard.send("{\"version\":1,\"ask\":\"events\",\"kinds\":[\"handed-over\",\"ended\"]}\n");
    assert_eq!(heard.answer()["process"], proxies.first.id());
    proxies.upgrade(&[]);
    let told = heard.answer();
    assert_eq!((&told["event"], &told["process"]), (&"handed-over".into(), &proxies.others[0].into()), "{told}");
    assert_eq!((&told["stay"], &told["left"], &told["taken"]), (&1.into(), &0.into(), &0.into()), "{told}");
    drop(stays);
    assert_eq!(heard.answer()["event"], "ended");
    assert!(proxies.first.wait().success(), "the old process does not wait for who listens");
    proxies.stop();
}

#[test]
fn what_stays_is_ended_at_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    let mut proxies = Dynasty::of(tapping(&dir, &["--hand-over-limit", "1"]));
    let mut stays = connect(proxies.first.address());
    round_trip(&mut stays, b"before");
    proxies.upgrade(&[]);
    assert!(stays.read(&mut [0]).is_err_and(|e| e.kind() == ErrorKind::ConnectionReset));
    assert!(proxies.first.wait().success(), "{}", proxies.first.messages());
    proxies.first.wait_line(&["how=stopped"]);
    proxies.stop();
}

#[test]
fn what_fails_before_the_commit_leaves_everything_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("longsplice.toml");
    let echo = loopback_echo();
    let plug = |at: &str| listener("plug", at, &format!("target = \"{echo}\""));
    fs::write(&file, plug("127.0.0.1:0")).unwrap();
    let arguments = ["--copy-only", "--config", file.to_str().unwrap()];
    let mut proxies = Dynasty::of(Running::start(Command::new(LONGSPLICE), None, &arguments, &[]));
    let at = proxies.first.address();
    let mut stays = connect(at);
    let program = |name: &str, text: &str| script(&dir, name, text);
    for (binary, want) in [
        ("/nonexistent/longsplice".to_owned(), "cannot start /nonexistent/longsplice: No such file"),
        (file.to_str().unwrap().to_owned(), "Permission denied"),
        (program("text", "no program"), "Exec format error"),
        (program("false", "#!/bin/sh\nexit 3\n"), "has ended: exit status: 3"),
        (program("killed", "#!/bin/sh\nkill -9 $$\n"), "has ended: signal: 9"),
        (program("hangs", "#!/bin/sh\nexec sleep 1000\n"), "does not answer in time"),
        (program("talks", "#!/bin/sh\necho hello >&0\nexec sleep 1000\n"), "is not understood"),
        (program("old", &format!("#!/bin/sh\nexec {LONGSPLICE} run --no-such-flag\n")), "has ended: exit status: 2"),
    ] {
        let why = proxies.first.client_error(&["upgrade", "--limit", "2", "--binary", &binary]);
        assert!(why.contains("everything stays as it is") && why.contains(want), "{binary}: {why}");
        round_trip(&mut stays, b"as before");
        is_served(at);
    }
    // its configuration, and an address that is taken
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken_at = taken.local_addr().unwrap().to_string();
    for (text, want) in [
        ("listen = 7".to_owned(), "longsplice.toml:1"),
        (plug("127.0.0.1:0") + &plug(&taken_at), &format!("cannot listen on {taken_at}")[..]),
    ] {
        fs::write(&file, text).unwrap();
        let why = proxies.first.client_error(&["upgrade"]);
        assert!(why.contains("everything stays as it is") && why.contains(want), "{why}");
        round_trip(&mut stays, b"as before");
        is_served(at);
    }
    assert_eq!(proxies.first.flows().len(), 1);
    // and then it works: a listener is gone, and another one is new
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    fs::write(&file, plug(&free.to_string())).unwrap();
    proxies.upgrade(&[]);
    is_served(free);
    assert!(TcpStream::connect(at).is_err(), "nobody listens there");
    round_trip(&mut stays, b"as before");
    drop(stays);
    proxies.stop();
}

/// A program that speaks the protocol up to some step, and dies or hangs there.
pub fn player(dir: &TempDir, name: &str, steps: &str) -> String {
    let text = format!(
        "#!/usr/bin/python3
import json, os, signal, socket, sys, time
pair = socket.socket(fileno=0)
def hear():
    text, sockets, *_ = pair.recvmsg(65536, 1024)
    return json.loads(text)
def say(what):
    pair.send(json.dumps(what).encode())
offer = hear()
for _ in range(offer['sockets']):
    hear()
{steps}
"
    );
    script(dir, name, &text)
}

const PREPARED: &str = "say({'say': 'prepared', 'program': 'played'})\n";

/// By then, the process that ran has let go: it is started anew, and nobody is refused. Debian package: python3.
#[test]
#[ignore = "root"]
fn what_fails_after_the_commit_has_the_old_program_started_anew() {
    let dir = tempfile::tempdir().unwrap();
    let mut proxies = Dynasty::of(Running::copying(&loopback_echo(), &[]));
    let at = proxies.first.address();
    for (name, steps, want) in [
        ("gone", format!("{PREPARED}os.kill(os.getpid(), signal.SIGKILL)"), "new program"),
        ("dies", format!("{PREPARED}hear()\nos.kill(os.getpid(), signal.SIGKILL)"), "has ended: signal: 9"),
        ("hangs", format!("{PREPARED}time.sleep(1000)"), "does not answer in time"),
        ("refuses", format!("{PREPARED}hear()\nsay({{'say': 'refused', 'why': 'I may not'}})"), "I may not"),
    ] {
        let mut stays = connect(at);
        round_trip(&mut stays, b"before");
        let player = player(&dir, name, &steps);
        let why = proxies.first.client_error(&["upgrade", "--limit", "10", "--binary", &player]);
        assert!(why.contains("the program that ran was started anew, as process") && why.contains(want), "{why}");
        let number = why.split("as process ").nth(1).and_then(|rest| rest.split_once(':')?.0.parse().ok());
        proxies.others.push(number.unwrap_or_else(|| panic!("{why}")));
        is_served(at);
        round_trip(&mut stays, b"after");
    }
    proxies.stop();
}

/// Before the commit, the one that is new gives up. Debian package: python3.
#[test]
#[ignore = "root"]
fn the_new_program_refuses_what_it_cannot_take() {
    let dir = tempfile::tempdir().unwrap();
    let mut proxies = Dynasty::of(Running::copying(&loopback_echo(), &[]));
    let player = player(&dir, "refuses", "say({'say': 'refused', 'why': 'I may not'})\ntime.sleep(1000)");
    let why = proxies.first.client_error(&["upgrade", "--binary", &player]);
    assert!(why.contains("everything stays as it is: I may not"), "{why}");
    proxies.stop();
}

/// Starts a new process whose predecessor is the test. Returns what it says at its end.
fn orphan(offers: &[&[u8]]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
    let control = dir.path().join("control.sock");
    let mut command = Command::new(LONGSPLICE);
    command.args(["run", "--take-over", "--copy-only", "--plug", "127.0.0.1:0=127.0.0.1:9", "--control"]).arg(control);
    let child = command.stdin(theirs).stderr(Stdio::piped()).spawn().unwrap();
    drop(command);
    for offer in offers {
        let _ = send(ours.as_raw_fd(), offer, MsgFlags::MSG_NOSIGNAL);
    }
    drop(ours);
    let out = child.wait_with_output().unwrap();
    assert!(!out.status.success());
    String::from_utf8(out.stderr).unwrap()
}

/// Whatever is said on the pair, and whenever the process that hands over dies.
#[test]
fn a_new_program_without_a_predecessor_ends() {
    let offer = |version: u32, sockets: u64| {
        let text = "\"program\":\"0\",\"tables\":null,\"control\":\"/nowhere\",\"within\":5";
        format!("{{\"say\":\"offer\",\"version\":{version},\"sockets\":{sockets},{text}}}")
    };
    let commit = b"{\"say\":\"commit\"}".as_slice();
    for (offers, want) in [
        (vec![], "standard input is closed"),
        (vec![b"GET / HTTP/1.1\r\n\r\n".to_vec()], "standard input is of no process"),
        (vec![vec![b' '; 100_000]], "standard input is of no process"),
        (vec![commit.to_vec()], "standard input begins with"),
        (vec![offer(7, 0).into()], "version 7"),
        (vec![offer(1, 1_000_000).into()], "offers 1000000 sockets"),
        (vec![offer(1, u64::MAX).into()], "offers 18446744073709551615 sockets"),
        (vec![offer(1, 1).into()], "is gone"),
        (vec![offer(1, 1).into(), b"{\"say\":\"socket\",\"of\":\"control\"}".to_vec()], "a socket is missing"),
        (vec![offer(1, 0).into()], "has given up"),
        (vec![offer(1, 0).into(), b"{\"say\":\"serving\"}".to_vec()], "says Serving"),
    ] {
        let said = orphan(&offers.iter().map(Vec::as_slice).collect::<Vec<_>>());
        assert!(said.contains(want), "{want}: {said}");
    }
}

/// Clients that come and go all the time.
pub struct Crowd {
    ends: Arc<AtomicBool>,
    served: Arc<AtomicU64>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Crowd {
    /// Each thread runs `visit` again and again, which panics if it is not served.
    pub fn new(setting: &Setting, visits: Vec<Box<dyn Fn() + Send>>) -> Crowd {
        let (ends, served) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let start = |visit: Box<dyn Fn() + Send>| {
            let (ends, served) = (ends.clone(), served.clone());
            setting.lab.client.run(|| {
                thread::spawn(move || {
                    while !ends.load(Relaxed) {
                        visit();
                        served.fetch_add(1, Relaxed);
                        thread::sleep(Duration::from_millis(2));
                    }
                })
            })
        };
        let threads = visits.into_iter().map(start).collect();
        Crowd { ends, served, threads }
    }

    /// Waits until so many more were served.
    pub fn are_served(&self, more: u64) {
        let (before, end) = (self.served.load(Relaxed), Instant::now() + PATIENCE);
        while self.served.load(Relaxed) < before + more {
            assert!(Instant::now() < end && self.threads.iter().all(|t| !t.is_finished()), "clients are not served");
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn end(self) {
        self.ends.store(true, Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().expect("every client was served"));
    }
}

/// A request of SOCKS 5 to an address, and the proxy's answer.
fn socks(stream: &mut TcpStream, to: SocketAddr) {
    let mut request = vec![5, 1, 0, 5, 1, 0];
    match to {
        SocketAddr::V4(at) => request.extend([&[1][..], &at.ip().octets()].concat()),
        SocketAddr::V6(at) => request.extend([&[4][..], &at.ip().octets()].concat()),
    }
    request.extend(to.port().to_be_bytes());
    stream.write_all(&request).unwrap();
    let mut answer = vec![0; 2 + 4];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[..4], [5, 0, 5, 0]);
    let mut rest = vec![0; if answer[5] == 1 { 6 } else { 18 }];
    stream.read_exact(&mut rest).unwrap();
}

/// CONNECT, and the proxy's answer.
fn http(stream: &mut TcpStream, to: SocketAddr) {
    write!(stream, "CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n").unwrap();
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    assert!(head.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&head));
}

/// The proxies: a plug that splices at once, one after some bytes and one never, SOCKS and HTTP, in both families.
fn setting() -> Setting {
    let mut text = String::new();
    for family in Family::BOTH {
        let at = |port: u16| FORWARDER_TO_CLIENT.port(family, port).to_string();
        let target = format!("target = \"{}\"\n", SERVER.port(family, ECHO));
        for (port, when) in [(7000, "\"at-once\""), (7001, "1000"), (7002, "\"never\"")] {
            text += &listener("plug", &at(port), &format!("{target}policy = {{ splice = {when} }}"));
        }
        text += &listener("socks5", &at(7003), "");
        text += &listener("http", &at(7004), "");
    }
    let setting = Setting::new(&text);
    Family::BOTH.into_iter().for_each(|family| setting.echo(SERVER.port(family, ECHO)));
    setting
}

/// Upgraded again and again: no client is refused or reset, spliced connections go on in the kernel, copied ones in the next process,
/// and nothing is left.
#[test]
#[ignore = "root"]
fn no_client_notices_an_upgrade() {
    const TIMES: usize = 3;
    let setting = setting();
    let mut proxies = Dynasty::of(setting.start_with(&["--log-format", "json"]));
    let at = |family, port| FORWARDER_TO_CLIENT.port(family, port);
    let mut visits: Vec<Box<dyn Fn() + Send>> = Vec::new();
    for family in Family::BOTH {
        for port in 7000..=7004 {
            visits.push(Box::new(move || {
                let mut stream = connect(at(family, port));
                match port {
                    7003 => socks(&mut stream, SERVER.port(family, ECHO)),
                    7004 => http(&mut stream, SERVER.port(family, ECHO)),
                    _ => {}
                }
                round_trip(&mut stream, &[port as u8; 3000]);
            }));
        }
    }
    let long = |family, port| {
        let mut stream = setting.connect(at(family, port));
        round_trip(&mut stream, &[1; 100_000]);
        stream
    };
    let spliced: Vec<_> = Family::BOTH.into_iter().flat_map(|f| [long(f, 7000), long(f, 7001)]).collect();
    eventually("they are spliced", || {
        let flows = proxies.first.flows();
        (flows.len() == spliced.len() && flows.iter().all(|f| f["state"] != "copying" && f["state"] != "draining"))
            .then_some(())
    });
    let mut all: Vec<_> = Family::BOTH.into_iter().map(|f| long(f, 7002)).chain(spliced).collect();
    // taken back, it is copied: its sockets have other numbers than its hosts
    let taken_back = proxies.first.flows().into_iter().filter(|f| f["state"] != "copying").take(2);
    taken_back.for_each(|flow| drop(proxies.first.client(&["unsplice", &flow["id"].to_string()])));
    eventually("it is copied", || (proxies.first.flows_in("copying") >= 4).then_some(()));
    // to be spliced after some more bytes, which the next process gets
    for family in Family::BOTH {
        all.push(setting.connect(at(family, 7001)));
        round_trip(all.last_mut().unwrap(), &[1; 100]);
    }
    let crowd = Crowd::new(&setting, visits);
    crowd.are_served(50);
    for _ in 0..TIMES {
        proxies.upgrade(&[]);
        all.iter_mut().for_each(|stream| round_trip(stream, &[2; 50_000]));
        crowd.are_served(50);
    }
    crowd.end();
    all.iter_mut().for_each(|stream| round_trip(stream, &[3; 50_000]));
    // all of its connections live on, and it does not
    assert!(proxies.first.wait().success(), "{}", proxies.first.messages());
    eventually("those are copied that are never spliced, or were taken back by command", || {
        (proxies.first.flows_in("copying") == 2 + 2).then_some(())
    });
    drop(all);
    let is_one = |record: &&Value| record["processes"] == TIMES as u64 + 1;
    eventually("each has one line", || {
        let records = proxies.first.records();
        let ended = records.iter().filter(|record| record["how"] == "closed");
        (ended.filter(is_one).count() == 4 * Family::BOTH.len()).then_some(())
    });
    let (last, earlier) = proxies.others.split_last().unwrap();
    earlier.iter().for_each(|number| gone(*number));
    assert!(is_ours(*last));
    // those of the last process are spliced, too
    let mut stream = long(Family::V4, 7001);
    eventually("it is spliced", || (proxies.first.flows_in("spliced") == 1).then_some(()));
    round_trip(&mut stream, &[4; 50_000]);
    drop(stream);
    proxies.first.flows_end();
    proxies.stop();
    assert!(!setting.pins[0].exist(), "a clean stop leaves nothing pinned");
}

/// The old process dies when the new one is prepared: that one takes its place, and spliced connections go on in it.
#[test]
#[ignore = "root"]
fn the_new_program_serves_if_the_old_one_is_killed() {
    let setting = setting();
    let (copied, spliced) = (FORWARDER_TO_CLIENT.port(Family::V6, 7002), FORWARDER_TO_CLIENT.port(Family::V6, 7000));
    let mut proxies = Dynasty::of(setting.start());
    let mut goes_on = setting.connect(spliced);
    round_trip(&mut goes_on, &[1; 1000]);
    let number = proxies.first.wait_flow("spliced")["id"].clone();
    let control = proxies.first.control().to_str().unwrap().to_owned();
    let upgrade = thread::spawn(move || longsplice(&["upgrade", "--control", &control]));
    let child = eventually("a new process", || children(proxies.first.id()).trim().parse().ok());
    proxies.others.push(child);
    // It hears nothing from now on. Should it not have offered everything by then, it goes on for a moment.
    eventually("the new process is prepared", || {
        proxies.first.signal(Signal::SIGSTOP);
        let prepared = wait_for(Duration::from_secs(5), || {
            proxies.first.messages().contains("prepared to take over").then_some(())
        });
        if prepared.is_none() {
            proxies.first.signal(Signal::SIGCONT);
        }
        prepared
    });
    proxies.first.kill();
    assert!(!upgrade.join().unwrap().status.success());
    proxies.first.wait_message("this one takes its place");
    let mut new = setting.connect(copied);
    round_trip(&mut new, b"hello");
    round_trip(&mut goes_on, &[3; 1000]);
    assert!(proxies.first.flows().iter().any(|flow| flow["id"] == number && flow["processes"] == 2));
    drop((new, goes_on));
    proxies.first.client(&["stop"]);
    gone(proxies.others[0]);
    assert!(!setting.pins[0].exist(), "a clean stop leaves nothing pinned");
}

/// A reply whose body is spliced when the program is replaced: it is taken back, and copied to its end. So is the rest of an upload.
#[test]
#[ignore = "root"]
fn bodies_that_are_spliced_come_to_their_ends() {
    const SIZE: usize = 8_000_000;
    let at = FORWARDER_TO_CLIENT.port(Family::V4, 7004);
    let server = SERVER.port(Family::V4, 8080);
    let setting = Setting::new(&listener("http", &at.to_string(), ""));
    let mut proxies = Dynasty::of(setting.start());
    let listener = setting.listen(server);
    let body = |seed: u8| -> Vec<u8> { (0..SIZE).map(|n| (n / 251) as u8 ^ seed).collect() };
    let head = |of: &mut TcpStream| read_head(of).expect("a head");
    let length = format!("Content-Length: {SIZE}\r\n\r\n");
    let mut client = setting.connect(at);
    for uploads in [false, true] {
        let method = if uploads { "PUT" } else { "GET" };
        let more = if uploads { &length[..] } else { "\r\n" };
        write!(client, "{method} http://{server}/ HTTP/1.1\r\nHost: {server}\r\n{more}").unwrap();
        let (mut sends, mut receives) = (client.try_clone().unwrap(), listener.accept().unwrap().0);
        receives.set_read_timeout(Some(PATIENCE)).unwrap();
        head(&mut receives);
        if !uploads {
            write!(receives, "HTTP/1.1 200 OK\r\n{length}").unwrap();
            head(&mut client);
            (sends, receives) = (receives, client.try_clone().unwrap());
        }
        let (body, mut got) = (body(uploads.into()), vec![0; SIZE]);
        let (first, rest) = body.split_at(SIZE / 2);
        let pass = |sends: &mut TcpStream, receives: &mut TcpStream, part: &[u8], into: &mut [u8]| {
            thread::scope(|scope| {
                scope.spawn(|| sends.write_all(part).unwrap());
                receives.read_exact(into).unwrap();
            });
        };
        pass(&mut sends, &mut receives, first, &mut got[..SIZE / 2]);
        proxies.first.wait_flow("spliced");
        let said = proxies.upgrade(&[]);
        assert!(said.contains("stay with the old process: 1"), "{said}");
        let messages = proxies.first.messages();
        assert!(uploads || !messages.contains("took over from"), "its process lives: {messages}");
        pass(&mut sends, &mut receives, rest, &mut got[SIZE / 2..]);
        assert!(got == body, "other bytes");
        if uploads {
            write!(receives, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK").unwrap();
            head(&mut client);
            client.read_exact(&mut [0; 2]).unwrap();
        }
        // the reply did not say that it is the last one: the old process would answer another request
        client = setting.connect(at);
    }
    drop(client);
    assert!(proxies.first.wait().success(), "{}", proxies.first.messages());
    proxies.first.flows_end();
    proxies.stop();
    assert!(!setting.pins[0].exist(), "a clean stop leaves nothing pinned");
}

/// One of them comes first. The other one finds another process, or is told that it was too late.
#[test]
fn two_upgrades_at_once() {
    let mut proxies = Dynasty::of(Running::copying(&loopback_echo(), &[]));
    let (at, control) = (proxies.first.address(), proxies.first.control().to_str().unwrap().to_owned());
    let ask = || longsplice(&["upgrade", "--control", &control]);
    let said = thread::scope(|scope| [scope.spawn(ask), scope.spawn(ask)].map(|asked| asked.join().unwrap()));
    let mut upgraded = 0;
    for said in said {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let (said, why) = (text(said.stdout), text(said.stderr));
        match said.strip_prefix("process ").and_then(|rest| rest.split_once(' ')?.0.parse().ok()) {
            Some(number) => {
                proxies.others.push(number);
                upgraded += 1;
            }
            None => assert!(why.contains("was replaced meanwhile") || why.contains("hung up"), "{why}"),
        }
    }
    assert!(upgraded > 0);
    is_served(at);
    proxies.stop();
}

/// The new process has read the file before it is changed: a reload that is asked for meanwhile is one of the process that serves then.
#[test]
fn a_reload_during_an_upgrade_is_not_lost() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("longsplice.toml");
    mkfifo(&file, Mode::S_IRUSR | Mode::S_IWUSR).unwrap(); // whoever reads it waits for what is written
    let echo = loopback_echo();
    let plug = |at: &str| listener("plug", at, &format!("target = \"{echo}\""));
    let write = |text: String| {
        let file = file.clone();
        thread::spawn(move || fs::write(file, text).unwrap())
    };
    let first = write(plug("127.0.0.1:0"));
    let arguments = ["--copy-only", "--config", file.to_str().unwrap()];
    let mut proxies = Dynasty::of(Running::start(Command::new(LONGSPLICE), None, &arguments, &[]));
    first.join().unwrap();
    let control = proxies.first.control().to_str().unwrap().to_owned();
    let at = control.clone();
    let upgrade = thread::spawn(move || longsplice(&["upgrade", "--control", &at]));
    let child = eventually("a new process", || children(proxies.first.id()).trim().parse().ok());
    let reload = thread::spawn(move || longsplice(&["reload", "--control", &control]));
    proxies.first.comes_to_rest();
    assert!(!reload.is_finished(), "it would be lost");
    write(plug("127.0.0.1:0")).join().unwrap();
    let upgraded = upgrade.join().unwrap();
    assert!(upgraded.status.success(), "{upgraded:?}");
    proxies.others.push(child);
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    write(plug("127.0.0.1:0") + &plug(&free.to_string())).join().unwrap();
    let reloaded = reload.join().unwrap();
    assert!(reloaded.status.success(), "{reloaded:?}");
    assert_eq!(String::from_utf8(reloaded.stdout).unwrap(), format!("added plug-{free}\n"));
    is_served(free);
    proxies.stop();
}

/// A client may be about to send its next request: the old process answers it, says that it closes the connection, and does so.
#[test]
fn http_connections_that_stay_have_one_more_request() {
    let listening = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = listening.local_addr().unwrap();
    thread::spawn(move || {
        for mut stream in listening.incoming().map_while(Result::ok) {
            thread::spawn(move || {
                while read_head(&mut stream).is_some() {
                    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK").unwrap();
                }
            });
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("longsplice.toml");
    // those with a tap cannot go over
    let more = format!("rules = [{{ action = \"allow\", target = \"127.0.0.0/8\" }}]\ntap = {:?}", dir.path());
    fs::write(&file, listener("http", "127.0.0.1:0", &more)).unwrap();
    let arguments = ["--copy-only", "--config", file.to_str().unwrap()];
    let mut proxies = Dynasty::of(Running::start(Command::new(LONGSPLICE), None, &arguments, &[]));
    let mut clients = [0; 3].map(|_| connect(proxies.first.address()));
    let ask = |client: &mut TcpStream| {
        write!(client, "GET http://{server}/ HTTP/1.1\r\nHost: {server}\r\n\r\n").unwrap();
        let head = read_head(client).expect("a reply").to_ascii_lowercase();
        client.read_exact(&mut [0; 2]).unwrap();
        assert!(head.starts_with("http/1.1 200"), "{head}");
        head.contains("connection: close")
    };
    clients.iter_mut().for_each(|client| assert!(!ask(client)));
    let said = proxies.upgrade(&[]);
    assert!(said.contains("stay with the old process: 3"), "{said}");
    proxies.first.comes_to_rest();
    for client in &mut clients {
        assert!(ask(client));
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
    }
    assert!(proxies.first.wait().success(), "{}", proxies.first.messages());
    proxies.stop();
}

/// Reads a head, if there is one more.
fn read_head(from: &mut TcpStream) -> Option<String> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        if from.read(&mut byte).unwrap_or(0) == 0 {
            return None;
        }
        head.push(byte[0]);
    }
    Some(String::from_utf8(head).unwrap())
}
