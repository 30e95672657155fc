//! A process that keeps the listening sockets of the program, and hears of it: socket activation and notifications, as systemd does
//! them.

use crate::running::{AT_ONCE, LONGSPLICE, Running, Setting, connect, eventually, listener, loopback_echo, round_trip};
use longsplice_lab::{
    Family,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    sys::signal::Signal,
};
use rustix::{
    cmsg_space,
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg},
};
use std::{
    fs,
    io::{IoSliceMut, Read, Write},
    mem::MaybeUninit,
    net::{SocketAddr, TcpListener, TcpStream},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixDatagram,
    },
    process::Command,
    thread,
    time::{Duration, Instant},
};
use test_case::test_case;

const PATIENCE: Duration = Duration::from_secs(30);

/// What starts the program.
struct Supervisor {
    socket: TcpListener,
    told: UnixDatagram,
    dir: tempfile::TempDir,
}

impl Supervisor {
    fn new(socket: TcpListener) -> Supervisor {
        fcntl(&socket, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let told = UnixDatagram::bind(dir.path().join("notify")).unwrap();
        told.set_read_timeout(Some(PATIENCE)).unwrap();
        Supervisor { socket, told, dir }
    }

    fn address(&self) -> SocketAddr {
        self.socket.local_addr().unwrap()
    }

    /// The command that starts the program, by this shell.
    fn command(&self, bash: Command) -> Command {
        self.command_with(bash, &[])
    }

    /// The same, with sockets that the program has stored.
    fn command_with(&self, mut bash: Command, stored: &[&TcpListener]) -> Command {
        let all = [&[&self.socket], stored].concat();
        let [mut descriptors, mut names] = [String::new(), "longsplice-of-unit".to_owned()];
        for (to, socket) in (3..).zip(&all) {
            fcntl(*socket, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
            let fd = socket.as_raw_fd();
            descriptors += &format!("exec {to}<&{fd}; ");
            if fd > 2 + all.len() as i32 {
                descriptors += &format!("exec {fd}<&-; "); // or the program would keep it open
            }
        }
        for socket in stored {
            names += &format!(":longsplice-{}", socket.local_addr().unwrap().to_string().replace(':', "_"));
        }
        let (number, program) = (all.len(), "exec \"$0\" \"$@\"");
        let script = format!("{descriptors}export LISTEN_FDS={number} LISTEN_FDNAMES={names} LISTEN_PID=$$; {program}");
        bash.args(["-c", &script, LONGSPLICE]).env("NOTIFY_SOCKET", self.dir.path().join("notify"));
        bash.env("WATCHDOG_USEC", "100000");
        bash
    }

    /// Waits until it is told something that begins like this. Returns the descriptor that comes with it.
    fn hears(&self, what: &str) -> Option<OwnedFd> {
        let end = Instant::now() + PATIENCE;
        loop {
            let mut text = [0; 256];
            let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
            let mut with = RecvAncillaryBuffer::new(&mut space);
            let got = recvmsg(&self.told, &mut [IoSliceMut::new(&mut text)], &mut with, RecvFlags::CMSG_CLOEXEC);
            let got = got.unwrap_or_else(|e| panic!("{what}: {e}"));
            if text[..got.bytes].starts_with(what.as_bytes()) {
                return with.drain().find_map(|with| match with {
                    RecvAncillaryMessage::ScmRights(mut all) => all.next(),
                    _ => None,
                });
            }
            assert!(Instant::now() < end, "{what} is not heard");
        }
    }

    /// Waits until it is given a socket of this name.
    fn stores(&self, name: &str) -> TcpListener {
        self.hears(&format!("FDSTORE=1\nFDNAME={name}\n")).expect("a descriptor").into()
    }

    fn removes(&self, name: &str) {
        self.hears(&format!("FDSTOREREMOVE=1\nFDNAME={name}\n"));
    }
}

#[test]
fn clients_wait_while_no_process_accepts() {
    let supervisor = Supervisor::new(TcpListener::bind("127.0.0.1:0").unwrap());
    let (at, echo) = (supervisor.address(), loopback_echo());
    let file = supervisor.dir.path().join("longsplice.toml");
    let with = listener("plug", &at.to_string(), &format!("target = \"{echo}\""));
    let without = listener("plug", "127.0.0.1:0", &format!("target = \"{echo}\""));
    let configure = |text: &str| fs::write(&file, text).unwrap();
    let start = || {
        let arguments = ["--copy-only", "--config", file.to_str().unwrap()];
        Running::start(supervisor.command(Command::new("bash")), None, &arguments, &[])
    };
    configure(&with);
    let mut proxy = start();
    supervisor.hears("READY=1");
    supervisor.hears("WATCHDOG=1");
    round_trip(&mut connect(at), b"hello");

    let waits = || {
        let mut client = connect(at);
        client.write_all(b"I wait").unwrap();
        client
    };
    proxy.kill();
    let mut waiting = waits();
    let mut is_served = || {
        let mut back = [0; 6];
        waiting.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"I wait");
        waiting = waits();
    };
    configure(&without);
    let mut proxy = start();
    proxy.wait_message(&format!("no listener has the address {at} of an inherited socket"));
    for _ in 0..2 {
        configure(&with);
        proxy.client(&["reload"]);
        is_served();
        configure(&without);
        proxy.client(&["reload"]); // the last client may be accepted before, and is served all the same
    }
    proxy.signal(Signal::SIGTERM);
    supervisor.hears("STOPPING=1");
    proxy.wait();
}

/// The program stores its sockets, and the next process has those that it needs. The others are removed.
#[test]
fn the_supervisor_keeps_sockets_of_the_program() {
    let of_supervisor = TcpListener::bind("127.0.0.1:0").unwrap();
    let supervisor = Supervisor::new(of_supervisor);
    let echo = loopback_echo();
    let [v4, v6] = ["127.0.0.1:0", "[::1]:0"].map(|at| TcpListener::bind(at).unwrap().local_addr().unwrap());
    let file = supervisor.dir.path().join("longsplice.toml");
    let configure = |all: &[SocketAddr]| {
        let plug = |at: &SocketAddr| listener("plug", &at.to_string(), &format!("target = \"{echo}\""));
        fs::write(&file, all.iter().map(plug).collect::<String>()).unwrap();
    };
    let arguments = ["--copy-only", "--config", file.to_str().unwrap()];
    let start = |stored: &[&TcpListener]| {
        Running::start(supervisor.command_with(Command::new("bash"), stored), None, &arguments, &[])
    };
    let name = |at: SocketAddr| format!("longsplice-{at}").replace(':', "_");
    let of_supervisor = supervisor.address();
    configure(&[v4, v6, of_supervisor]);
    let mut proxy = start(&[]);
    let [first, second] = [v4, v6].map(|at| supervisor.stores(&name(at)));
    assert_eq!([&first, &second].map(|socket| socket.local_addr().unwrap()), [v4, v6]);

    proxy.kill();
    let mut waiting = [v4, v6, of_supervisor].map(connect);
    let mut proxy = start(&[&first, &second]);
    waiting.iter_mut().for_each(|client| round_trip(client, b"I have waited"));
    proxy.client(&["upgrade"]);
    assert!(proxy.wait().success());
    supervisor.hears("MAINPID=");
    [v4, v6].iter().for_each(|at| drop(supervisor.stores(&name(*at)))); // the same, as far as the new process knows
    configure(&[v4, of_supervisor]);
    proxy.client(&["reload"]);
    supervisor.removes(&name(v6));
    drop(second);
    eventually("an address that is closed", || TcpStream::connect(v6).is_err().then_some(()));
    proxy.client(&["stop"]);
    supervisor.hears("STOPPING=1");

    // what the configuration does not have any more is closed first, or else the other address could not be bound
    let any = SocketAddr::from(([0; 4], v4.port()));
    configure(&[any, of_supervisor]);
    let command = supervisor.command_with(Command::new("bash"), &[&first]);
    let mut proxy = thread::scope(|scope| {
        scope.spawn(|| {
            supervisor.removes(&name(v4));
            drop(first);
        });
        Running::start(command, None, &arguments, &[])
    });
    let again = supervisor.stores(&name(any));
    // clients are not to wait for a process that drains
    let mut client = connect(v4);
    round_trip(&mut client, b"hello");
    let mut stop = Command::new(LONGSPLICE);
    let mut stop = stop.args(["stop", "--drain", "60", "--control"]).arg(proxy.control()).spawn().unwrap();
    supervisor.removes(&name(any));
    drop(again);
    drop(client);
    assert!(stop.wait().unwrap().success() && proxy.wait().success());
}

/// Another program that takes over is the one to watch, and has the socket, too.
#[test]
fn the_supervisor_hears_of_an_upgrade() {
    let supervisor = Supervisor::new(TcpListener::bind("127.0.0.1:0").unwrap());
    let (at, echo) = (supervisor.address(), loopback_echo());
    let arguments = ["--copy-only", "--plug", &format!("{at}={echo}")];
    let mut proxy = Running::start(supervisor.command(Command::new("bash")), None, &arguments, &[]);
    let said = proxy.client(&["upgrade"]);
    let number = said.strip_prefix("process ").and_then(|rest| rest.split_once(' ')).expect("a number").0;
    supervisor.hears(&format!("MAINPID={number}"));
    supervisor.hears("WATCHDOG=1");
    assert!(proxy.wait().success());
    round_trip(&mut connect(at), b"hello");
    proxy.client(&["stop"]);
    supervisor.hears("STOPPING=1");
}

/// The connections of both processes are spliced, and those that came between them, too.
#[test_case("1000"; "when_due")]
#[test_case("\"at-once\""; "at_once")]
#[ignore = "root"]
fn a_client_that_comes_after_a_crash_is_spliced(splice: &str) {
    let at = FORWARDER_TO_CLIENT.port(Family::V4, 7000);
    let target = SERVER.port(Family::V4, 7020);
    let more = format!("target = \"{target}\"\npolicy = {{ splice = {splice} }}");
    let setting = Setting::new(&listener("plug", &at.to_string(), &more));
    setting.echo(target);
    let supervisor = Supervisor::new(setting.lab.forwarder.run(|| TcpListener::bind(at)).unwrap());
    let start = || setting.start_by(supervisor.command(setting.lab.forwarder.command("bash")), &[]);
    let mut proxy = start();
    let mut first = setting.connect(at);
    round_trip(&mut first, &[1; 100_000]);
    proxy.wait_flow("spliced");
    proxy.kill();
    let mut second = setting.connect(at);
    second.write_all(&[2; 1000]).unwrap();
    round_trip(&mut first, &[3; 100_000]);
    let mut proxy = start();
    let mut back = [0; 1000];
    second.read_exact(&mut back).unwrap();
    assert_eq!(back, [2; 1000]);
    round_trip(&mut second, &[4; 100_000]);
    proxy.wait_flow("spliced");
    round_trip(&mut first, &[5; 100_000]);
    drop((first, second));
    proxy.stop(&setting.pins[0]);
}

/// A start takes a second, for the kernel checks the programs. Clients wait in that time, and are spliced.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn clients_may_connect_before_the_programs_are_loaded(family: Family) {
    let (at, target) = (FORWARDER_TO_CLIENT.port(family, 7000), SERVER.port(family, 7020));
    let setting = Setting::new(&listener("plug", &at.to_string(), &format!("target = \"{target}\"\n{AT_ONCE}")));
    setting.echo(target);
    // the moment may pass on a busy machine
    for _ in 0..10 {
        let pins = setting.pins[0].path().to_owned();
        assert!(!pins.exists());
        let client = setting.lab.client.spawn(move || {
            let client = eventually("a connection", || TcpStream::connect_timeout(&at, PATIENCE).ok());
            (client, !pins.exists())
        });
        let mut proxy = setting.start();
        let (mut client, is_early) = client.join().unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        round_trip(&mut client, &[7; 100_000]);
        proxy.wait_flow("spliced");
        drop(client);
        proxy.stop(&setting.pins[0]);
        if is_early {
            return;
        }
    }
    panic!("no client could connect before the programs were loaded");
}
