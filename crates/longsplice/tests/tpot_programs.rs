//! Other programs through a translucent proxy, none of which knows of it: git over SSH and over its own protocol, and iperf3 in
//! every direction; and what the proxy tells servers. Needs root and eBPF.

mod running;

use longsplice_lab::{ChildGuard, Family, Lab, Shape, topology};
use running::{LONGSPLICE, Pins, Running, eventually, round_trip};
use serde_json::Value;
use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::Command,
    time::Duration,
};

const PORT: u16 = 7000;
const SECOND_PORT: u16 = 7001;
const PATIENCE: Duration = Duration::from_secs(20);

/// A proxy that intercepts connections to the port, and a client whose host asks for one.
struct Translucent {
    proxy: Running,
    host: ChildGuard,
    lab: Lab,
    _dir: tempfile::TempDir,
    _pins: [Pins; 3],
}

impl Translucent {
    /// `more`: further keys of the listener.
    fn new(more: &str) -> Translucent {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let pins = [Pins::of(&lab.forwarder), Pins::of_tpot(&lab.forwarder), Pins::of_tpot(&lab.client)];
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("longsplice.toml");
        let listener = |any, port| format!("[[listener]]\nprotocol = \"tpot\"\nlisten = \"{any}:{port}\"\n{more}\n");
        let both = |port| listener("0.0.0.0", port) + &listener("[::]", port);
        fs::write(&file, both(PORT) + &both(SECOND_PORT)).unwrap();
        let proxy = Running::start(lab.forwarder.command(LONGSPLICE), None, &["--config", file.to_str().unwrap()], &[]);
        Translucent { proxy, host: host(&lab), lab, _dir: dir, _pins: pins }
    }

    /// Runs a program at the client that has to succeed. Returns its output.
    fn client(&self, command: &mut Command) -> Vec<u8> {
        let out = command.output().unwrap();
        assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
        out.stdout
    }

    fn counter(&self, name: &str) -> u64 {
        let counters: Value = serde_json::from_str(&self.proxy.client(&["counters", "--json"])).unwrap();
        counters["tpot"][name].as_u64().unwrap()
    }

    fn serve(&self, at: SocketAddr) -> TcpListener {
        self.lab.server.run(|| TcpListener::bind(at)).unwrap()
    }
}

fn host(lab: &Lab) -> ChildGuard {
    let mut host = lab.client.command(LONGSPLICE);
    host.args(["tpot", "host", "--proxy", "10.77.0.0/16", "--proxy", "fd77::/16"]);
    host.args(["--port", &PORT.to_string(), "--port", &SECOND_PORT.to_string()]);
    let mut host = ChildGuard::spawn(host.env_remove("RUST_LOG")).unwrap();
    host.wait_output("asking for proxies", PATIENCE).unwrap();
    host
}

fn git(dir: &Path, arguments: &[&str]) {
    let identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"];
    let out = Command::new("git").args(identity).args(arguments).current_dir(dir).output().unwrap();
    assert!(out.status.success(), "{arguments:?}: {out:?}");
}

fn brackets(ip: IpAddr) -> String {
    if ip.is_ipv6() { format!("[{ip}]") } else { ip.to_string() }
}

/// SSH gives its connections another service class when they are open, and git half-closes them.
#[test]
#[ignore = "root"]
fn git_over_ssh_and_its_own_protocol() {
    let here = Translucent::new("policy = { splice = \"at-once\" }");
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let file: Vec<u8> = (0..5_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::create_dir(path("source")).unwrap();
    fs::write(path("source/file"), &file).unwrap();
    git(&dir.path().join("source"), &["init", "-q"]);
    git(&dir.path().join("source"), &["add", "file"]);
    git(&dir.path().join("source"), &["commit", "-q", "-m", "File"]);
    for key in ["host", "user"] {
        let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f", &path(key)]).status();
        assert!(made.unwrap().success());
    }
    fs::create_dir_all("/run/sshd").unwrap();
    let config = format!(
        "HostKey {}\nAuthorizedKeysFile {}\nPermitRootLogin yes\nStrictModes no\nUsePAM no\nPidFile none\n",
        path("host"),
        path("user.pub")
    );
    fs::write(path("sshd"), config).unwrap();
    let mut sshd = here.lab.server.command("/usr/sbin/sshd");
    let _sshd = ChildGuard::spawn(sshd.args(["-D", "-e", "-f", &path("sshd"), "-p", &PORT.to_string()])).unwrap();
    let mut daemon = here.lab.server.command("git");
    daemon.args(["daemon", "--export-all", "--reuseaddr", &format!("--port={SECOND_PORT}")]);
    daemon.args([&format!("--base-path={}", dir.path().display()), dir.path().to_str().unwrap()]);
    // its processes may belong to another user than the directory's
    daemon.envs([("GIT_CONFIG_COUNT", "1"), ("GIT_CONFIG_KEY_0", "safe.directory"), ("GIT_CONFIG_VALUE_0", "*")]);
    let _daemon = ChildGuard::spawn(&mut daemon).unwrap().ended_gently();
    for port in [PORT, SECOND_PORT] {
        here.lab.server.wait_listening(port, PATIENCE).unwrap();
    }
    let ssh = format!(
        "ssh -i {} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o BatchMode=yes -o ConnectTimeout=20",
        path("user")
    );
    for family in Family::BOTH {
        let ip = topology::SERVER.ip(family);
        let words: Vec<&str> = ssh.split(' ').skip(1).collect();
        let mut cat = here.lab.client.command("ssh");
        cat.args(words).args(["-p", &PORT.to_string(), &format!("root@{ip}"), "cat", &path("source/file")]);
        assert!(here.client(&mut cat) == file, "as it is at the server");
        let sources = [
            format!("ssh://root@{}:{PORT}{}", brackets(ip), path("source")),
            format!("git://{}:{SECOND_PORT}/source", brackets(ip)),
        ];
        for (n, source) in sources.iter().enumerate() {
            let to = path(&format!("clone-{family:?}-{n}"));
            here.client(here.lab.client.command("git").args(["clone", "-q", source, &to]).env("GIT_SSH_COMMAND", &ssh));
            assert!(fs::read(format!("{to}/file")).unwrap() == file, "{source}");
        }
    }
    assert_eq!(here.counter("opened"), 6);
    let log = eventually("six lines of the access log", || {
        let log = fs::read_to_string(here.proxy.access_log()).unwrap();
        (log.lines().count() == 6).then_some(log)
    });
    assert!(log.lines().all(|line| line.contains("spliced")), "{log}");
}

#[test]
#[ignore = "root"]
fn iperf3_in_every_direction() {
    let here = Translucent::new("policy = { splice = 1_000_000 }");
    let port = PORT.to_string();
    let mut opened = 0;
    for family in Family::BOTH {
        let ip = topology::SERVER.ip(family).to_string();
        for (more, connections) in [(&["-R"][..], 2), (&["-P", "4"], 5), (&["--bidir"], 3)] {
            let mut server = here.lab.server.command("iperf3");
            let mut server = ChildGuard::spawn(server.args(["-s", "-1", "-p", &port])).unwrap();
            here.lab.server.wait_listening(PORT, PATIENCE).unwrap();
            let run = [&["-c", &ip, "-p", &port, "-n", "20M", "--json"], more].concat();
            let out = here.client(here.lab.client.command("iperf3").args(run));
            let report: Value = serde_json::from_slice(&out).unwrap();
            let received = report["end"]["sum_received"]["bytes"].as_u64();
            assert!(received >= Some(19_000_000), "{more:?}: {received:?}");
            assert!(server.wait(PATIENCE).unwrap().success());
            opened += connections;
            assert_eq!(here.counter("opened"), opened, "{more:?}");
        }
    }
    assert_eq!(here.counter("failed"), 0);
}

/// Nobody is bothered before there is a request.
#[test]
#[ignore = "root"]
fn r10_r19_the_server_is_asked_after_the_first_request() {
    let here = Translucent::new("inside = \"http\"");
    for family in Family::BOTH {
        let at = topology::SERVER.port(family, PORT);
        let server = here.serve(at);
        server.set_nonblocking(true).unwrap();
        let mut client = here.lab.client.run(|| running::connect(at));
        eventually("it is open", || here.proxy.client(&["counters"]).contains("opened").then_some(()));
        // half of a request, which the proxy has read when it answers another client
        client.write_all(b"GET / HTTP/1.1\r\nHo").unwrap();
        let mut other = here.lab.client.run(|| running::connect(at));
        other.write_all(b"BAD\r\n\r\n").unwrap();
        let mut refusal = String::new();
        other.read_to_string(&mut refusal).unwrap();
        assert!(refusal.starts_with("HTTP/1.1 400"), "{refusal}");
        assert_eq!(server.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        client.write_all(b"st: a.test\r\nConnection: close\r\n\r\n").unwrap();
        let mut accepted = eventually("a connection", || server.accept().ok()).0;
        accepted.set_nonblocking(false).unwrap();
        assert!(head(&mut accepted).starts_with("GET / HTTP/1.1\r\n"));
        accepted.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi").unwrap();
        let mut reply = String::new();
        client.read_to_string(&mut reply).unwrap();
        assert!(reply.starts_with("HTTP/1.1 200") && reply.ends_with("\r\n\r\nhi"), "{reply}");
    }
}

fn head(stream: &mut TcpStream) -> String {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        let mut one = [0];
        stream.read_exact(&mut one).unwrap();
        bytes.extend(one);
    }
    String::from_utf8(bytes).unwrap()
}

/// The server sees the proxy's address, and is told the client's if it wants to know.
#[test]
#[ignore = "root"]
fn r12_servers_are_told_the_client() {
    let here = Translucent::new("proxy_protocol = { send = \"v2\" }");
    for family in Family::BOTH {
        let at = topology::SERVER.port(family, PORT);
        let server = here.serve(at);
        let mut client = here.lab.client.run(|| running::connect(at));
        client.write_all(b"hello").unwrap();
        let (mut accepted, from) = server.accept().unwrap();
        let [proxies, ours] =
            [topology::FORWARDER_TO_SERVER, topology::FORWARDER_TO_SERVER_SECOND].map(|a| a.ip(family));
        assert!([proxies, ours].contains(&from.ip()), "{from}");
        accepted.set_read_timeout(Some(PATIENCE)).unwrap();
        let own = client.local_addr().unwrap();
        let addresses = match (own.ip(), at.ip()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => [a.octets(), b.octets()].concat(),
            (IpAddr::V6(a), IpAddr::V6(b)) => [a.octets(), b.octets()].concat(),
            _ => unreachable!("one family"),
        };
        let mut want = b"\r\n\r\n\0\r\nQUIT\n\x21".to_vec();
        want.extend([if own.is_ipv4() { 0x11 } else { 0x21 }, 0, addresses.len() as u8 + 4]);
        want.extend(addresses);
        want.extend([own.port().to_be_bytes(), at.port().to_be_bytes()].concat());
        want.extend(b"hello");
        let mut got = vec![0; want.len()];
        accepted.read_exact(&mut got).unwrap();
        assert_eq!(got, want);
    }
}

/// Nobody is asked to stop: connections go on, new ones still ask, and the next process takes all of them over.
#[test]
#[ignore = "root"]
fn r31_r32_the_program_of_the_host_is_killed() {
    let mut here = Translucent::new("policy = { splice = \"at-once\" }");
    for (n, family) in Family::BOTH.into_iter().enumerate() {
        let at = topology::SERVER.port(family, PORT);
        running::echo(here.serve(at));
        let connect = || here.lab.client.run(|| running::connect(at));
        let mut early = connect();
        round_trip(&mut early, &[7; 100_000]);
        here.host.kill();
        round_trip(&mut early, &[8; 100_000]);
        let mut late = connect();
        round_trip(&mut late, &[9; 100_000]);
        assert_eq!(here.counter("opened"), 2 * n as u64 + 2);
        here.host = host(&here.lab);
        let tunnels = here.client(here.lab.client.command(LONGSPLICE).args(["tpot", "ls"]));
        let tunnels = String::from_utf8(tunnels).unwrap();
        assert_eq!(
            tunnels.lines().filter(|l| l.contains(&at.to_string()) && !l.contains("over")).count(),
            2,
            "{tunnels}"
        );
        for stream in [&mut early, &mut late] {
            round_trip(stream, &[1; 100_000]);
        }
    }
}
