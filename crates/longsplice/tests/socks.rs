//! BIND and UDP ASSOCIATE through the real program, off loopback: connections of BIND are spliced; dante's socksify and PySocks
//! get through, and so do dig, QUIC and a browser. Needs root and eBPF, and fails without; Debian packages: dante-client, python3,
//! python3-socks, python3-websockets, bind9-dnsutils, chromium-headless-shell, ngtcp2-client, ngtcp2-server, openssl.

use crate::running::{LONGSPLICE, Pins, Running, eventually, round_trip};
use longsplice_lab::{
    ChildGuard, Family, Lab, Namespace, Shape,
    topology::{CLIENT, FORWARDER_TO_CLIENT, SERVER},
    traffic::{self, Script},
};
use serde_json::Value;
use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream, UdpSocket},
    path::PathBuf,
    process::Command,
    time::Duration,
};
use tempfile::TempDir;
use test_case::test_case;

const SOCKS: u16 = 1080;
const PORT: u16 = 7000;
const PATIENCE: Duration = Duration::from_secs(40);
/// Debian's Python, which has Debian's packages: another one may come first in PATH.
const PYTHON: &str = "/usr/bin/python3";

/// A lab with the program in its forwarder.
struct Scene {
    proxy: Running,
    pins: Pins,
    lab: Lab,
    dir: TempDir,
}

impl Scene {
    fn new() -> Scene {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let both = Family::BOTH.map(|family| FORWARDER_TO_CLIENT.port(family, SOCKS).to_string());
        let arguments = ["--splice", "4096", "--log-format", "json", "--socks5", &both[0], "--socks5", &both[1]];
        let proxy = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
        Scene { proxy, pins: Pins::of(&lab.forwarder), lab, dir: tempfile::tempdir().unwrap() }
    }

    /// Asks for a command, and reads the first answer.
    fn ask(&self, family: Family, command: u8, target: SocketAddr) -> (TcpStream, SocketAddr) {
        let (proxy, script) = (FORWARDER_TO_CLIENT.port(family, SOCKS), Script::opener(1).deadline(PATIENCE));
        self.lab.client.run(|| traffic::socks5_ask(proxy, command, target, &script)).unwrap()
    }

    /// Connects from the server, with the address that the client has named: the host has others.
    fn peer(&self, to: SocketAddr) -> TcpStream {
        let family = if to.is_ipv4() { Family::V4 } else { Family::V6 };
        let script = Script { local: Some(SERVER.port(family, 0)), ..Script::opener(1) };
        self.lab.server.run(|| traffic::connect(to, &script)).unwrap()
    }

    /// A socket for datagrams, with the address of the client's connection: only that is served.
    fn datagrams(&self, control: &TcpStream) -> UdpSocket {
        let at = SocketAddr::new(control.local_addr().unwrap().ip(), 0);
        self.lab.client.run(|| UdpSocket::bind(at)).unwrap()
    }

    /// Writes a program of Python, and returns its path.
    fn python(&self, name: &str, program: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::write(&path, program).unwrap();
        path
    }

    fn counters(&self) -> Value {
        self.proxy.counters()["proxy"].clone()
    }
}

fn run(namespace: &Namespace, program: &str, arguments: &[&str], environment: &[(&str, &str)]) -> String {
    let mut command = Command::new("timeout");
    command.args(["-k1", &PATIENCE.as_secs().to_string(), program]).args(arguments).envs(environment.iter().copied());
    let output = namespace.run(|| command.output()).unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    text
}

/// The data path tracks the peer's connection from its SYN on. Between the families, too.
#[test_case(Family::V4, Family::V4; "v4")]
#[test_case(Family::V6, Family::V6; "v6")]
#[test_case(Family::V4, Family::V6; "v4 to v6")]
#[ignore = "root"]
fn connections_of_bind_are_spliced(of_client: Family, of_server: Family) {
    let mut scene = Scene::new();
    let (mut client, bound) = scene.ask(of_client, 2, SERVER.port(of_server, 21));
    assert_eq!(bound.is_ipv4(), of_server == Family::V4);
    let mut peer = scene.peer(bound);
    assert_eq!(traffic::socks5_answer(&mut client).unwrap(), peer.local_addr().unwrap());
    let back = peer.try_clone().unwrap();
    let echo = std::thread::spawn(move || {
        let mut back = back;
        let mut buffer = [0; 65536];
        while let Ok(n @ 1..) = back.read(&mut buffer) {
            back.write_all(&buffer[..n]).unwrap();
        }
    });
    round_trip(&mut client, &[7; 10_000]);
    scene.proxy.wait_flow("spliced");
    round_trip(&mut client, &[8; 100_000]);
    peer.flush().unwrap();
    drop(client);
    echo.join().unwrap();
    drop(peer);
    let lines = scene.proxy.end(&scene.pins);
    let line = &lines[0];
    assert_eq!(
        (&line["command"], &line["bytes_up"], &line["how"]),
        (&"bind".into(), &110_000.into(), &"closed".into())
    );
    assert!(line["splices"].as_u64() >= Some(1) && line["spliced_up"].as_u64() >= Some(100_000), "{line}");
}

/// More than the data path has room for at a time, one after the other: each listener is forgotten.
#[test]
#[ignore = "root"]
fn listeners_of_bind_come_and_go() {
    let scene = Scene::new();
    for _ in 0..1100 {
        let (mut client, bound) = scene.ask(Family::V4, 2, SERVER.port(Family::V4, 21));
        let peer = scene.peer(bound);
        assert_eq!(traffic::socks5_answer(&mut client).unwrap(), peer.local_addr().unwrap());
    }
    assert_eq!(scene.counters()["bound"], 1100);
    let (mut client, bound) = scene.ask(Family::V4, 2, SERVER.port(Family::V4, 21));
    let peer = scene.peer(bound);
    assert_eq!(traffic::socks5_answer(&mut client).unwrap(), peer.local_addr().unwrap());
}

#[test_case(Family::V4, Family::V4; "v4")]
#[test_case(Family::V6, Family::V6; "v6")]
#[test_case(Family::V6, Family::V4; "v6 to v4")]
#[ignore = "root"]
fn datagrams_of_all_sizes(of_client: Family, of_server: Family) {
    let scene = Scene::new();
    let server = SERVER.port(of_server, PORT);
    let echo = scene.lab.server.run(|| UdpSocket::bind(server)).unwrap();
    let thread = std::thread::spawn(move || {
        let mut buffer = vec![0; 65536];
        while let Ok((n, from)) = echo.recv_from(&mut buffer) {
            if buffer[..n] == *b"end" {
                return;
            }
            echo.send_to(&buffer[..n], from).unwrap();
        }
    });
    let unknown = SocketAddr::from(([0, 0, 0, 0], 0));
    let (control, relay) = scene.ask(of_client, 3, unknown);
    assert_eq!(relay.ip(), FORWARDER_TO_CLIENT.ip(of_client));
    let client = scene.datagrams(&control);
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let header = [&[0, 0, 0], &traffic::socks5_address(server)[..]].concat();
    let mut buffer = vec![0; 65536];
    // with IP fragments on both parts of the path
    for size in [0, 1, 512, 1472, 1473, 9000, 60_000] {
        let data: Vec<u8> = (0..size).map(|n: u32| n as u8).collect();
        let datagram = [&header[..], &data].concat();
        client.send_to(&datagram, relay).unwrap();
        let (n, from) = client.recv_from(&mut buffer).unwrap();
        assert!((from, &buffer[..n]) == (relay, &datagram), "{size}");
    }
    client.send_to(&[&header[..], b"end"].concat(), relay).unwrap();
    thread.join().unwrap();
    drop(control);
    eventually("the end", || (scene.counters()["live"] == 0).then_some(()));
    eventually("its line", || {
        fs::read_to_string(scene.proxy.access_log()).unwrap().contains("datagrams_up").then_some(())
    });
}

/// Gives a program that knows nothing of SOCKS an address of its host for a server, by way of an association of the client.
fn in_datagrams(scene: &Scene, of_client: Family, server: SocketAddr) -> (TcpStream, SocketAddr) {
    let (control, relay) = scene.ask(of_client, 3, SocketAddr::from(([0, 0, 0, 0], 0)));
    let outside = scene.datagrams(&control);
    outside.connect(relay).unwrap();
    let inside = scene.lab.client.run(|| UdpSocket::bind(CLIENT.port(of_client, 0))).unwrap();
    let address = inside.local_addr().unwrap();
    let header = [&[0, 0, 0], &traffic::socks5_address(server)[..]].concat();
    std::thread::spawn(move || {
        let mut buffer = vec![0; 65536];
        let (n, program) = inside.recv_from(&mut buffer).unwrap();
        outside.send(&[&header[..], &buffer[..n]].concat()).unwrap();
        inside.connect(program).unwrap();
        let [up, down] = [(); 2].map(|()| (inside.try_clone().unwrap(), outside.try_clone().unwrap(), header.clone()));
        // Both end with the test. The program's socket is closed before the server's last datagrams are here.
        std::thread::spawn(move || {
            let mut buffer = vec![0; 65536];
            while let Ok(n) = up.0.recv(&mut buffer) {
                up.1.send(&[&up.2[..], &buffer[..n]].concat()).unwrap();
            }
        });
        while let Ok(n) = down.1.recv(&mut buffer) {
            assert!(buffer[..n].starts_with(&down.2), "it comes from the server");
            let _ = down.0.send(&buffer[down.2.len()..n]);
        }
    });
    (control, address)
}

/// A client of QUIC downloads a file by HTTP/3: one connection of many datagrams, which both hosts judge.
#[test_case(Family::V4, Family::V4; "v4")]
#[test_case(Family::V6, Family::V6; "v6")]
#[test_case(Family::V4, Family::V6; "v4 to v6")]
#[ignore = "root"]
fn quic_passes(of_client: Family, of_server: Family) {
    const SIZE: usize = 3_000_000;
    let scene = Scene::new();
    let (server, path) = (SERVER.port(of_server, PORT), |name: &str| scene.dir.path().join(name).display().to_string());
    let mut file = vec![0; SIZE];
    longsplice_lab::pattern::fill(1, 0, &mut file);
    fs::write(path("file"), &file).unwrap();
    let (key, certificate, got) = (path("key"), path("certificate"), path("got"));
    let subject = ["-keyout", &key, "-out", &certificate, "-subj", "/CN=server.test", "-nodes", "-days", "2"];
    let kind = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"];
    run(&scene.lab.server, "openssl", &[&kind[..], &subject].concat(), &[]);
    fs::create_dir(&got).unwrap();
    let mut serving = scene.lab.server.command("gtlsserver");
    serving.args(["--quiet", "--htdocs", &path("")]).args([server.ip().to_string(), server.port().to_string()]);
    let _server = ChildGuard::spawn(serving.args([&key, &certificate])).unwrap();
    let is_there = || scene.lab.server.execute("ss", &["-Hulnp"]).unwrap().contains("gtlsserver").then_some(());
    eventually("the server", is_there);
    let (_control, at) = in_datagrams(&scene, of_client, server);
    let to = ["--quiet", "--exit-on-all-streams-close", "--download", &got];
    let (host, port, url) = (at.ip().to_string(), at.port().to_string(), "https://server.test/file");
    run(&scene.lab.client, "gtlsclient", &[&to[..], &[&host, &port, url]].concat(), &[]);
    assert!(fs::read(path("got/file")).unwrap() == file);
    let counters = scene.counters();
    assert!(
        counters["udp_down"].as_u64() > Some(SIZE as u64 / 1500) && counters["udp_up"].as_u64() > Some(10),
        "{counters}"
    );
    for nothing in ["udp_dropped", "udp_denied", "udp_strangers", "udp_unasked", "udp_malformed"] {
        assert_eq!(counters[nothing], 0, "{nothing}: {counters}");
    }
}

/// A host that answers datagrams.
const ANSWERING: &str = r#"
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], int(sys.argv[2])))
l = socket.create_server((sys.argv[1], int(sys.argv[2])))  # which shows that it is there
while True:
    data, peer = s.recvfrom(65536)
    s.sendto(data, peer)
"#;

fn serve(scene: &Scene, program: &str) -> ChildGuard {
    let program = scene.python("server.py", program);
    let mut command = scene.lab.server.command(PYTHON);
    command.arg(program).arg(SERVER.ip(Family::V4).to_string()).arg(PORT.to_string());
    let server = ChildGuard::spawn(&mut command).unwrap();
    scene.lab.server.wait_listening(PORT, PATIENCE).unwrap();
    server
}

fn dante(scene: &Scene) -> String {
    let path = scene.dir.path().join("socks.conf");
    let text = format!(
        "route {{\nfrom: 0.0.0.0/0 to: 0.0.0.0/0 via: {} port = {SOCKS}\nproxyprotocol: socks_v5\n\
         method: none\ncommand: bind connect udpassociate\n}}\n",
        FORWARDER_TO_CLIENT.ip(Family::V4)
    );
    fs::write(&path, text).unwrap();
    path.display().to_string()
}

/// A client of FTP in active mode, which knows nothing of SOCKS: its server connects back.
#[test]
#[ignore = "root"]
fn socksify_binds_for_an_active_client() {
    let mut scene = Scene::new();
    let (host, port, dir) = (SERVER.ip(Family::V4).to_string(), PORT.to_string(), scene.dir.path().join("ftp"));
    fs::create_dir(&dir).unwrap();
    let file: String = (0..200_000).map(|n| format!("{n}\n")).collect();
    fs::write(dir.join("file"), &file).unwrap();
    let mut command = scene.lab.server.command(PYTHON);
    command.args(["-m", "pyftpdlib", "-i", &host, "-p", &port, "-d"]).arg(&dir);
    let _server = ChildGuard::spawn(&mut command).unwrap();
    scene.lab.server.wait_listening(PORT, PATIENCE).unwrap();
    let (from, conf) = (format!("ftp://{host}:{port}/file"), dante(&scene));
    let got = run(&scene.lab.client, "socksify", &["curl", "-sS", "--ftp-port", "-", &from], &[("SOCKS_CONF", &conf)]);
    assert!(got == file, "{} bytes", got.len());
    let lines = scene.proxy.end(&scene.pins);
    let bind = lines.iter().find(|line| line["command"] == "bind").unwrap();
    assert_eq!((&bind["bytes_down"], &bind["how"]), (&file.len().into(), &"closed".into()));
}

const PYSOCKS: &str = r#"
import socks, sys
proxy, port, host, there = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
s = socks.socksocket(type=socks.socket.SOCK_DGRAM)
s.set_proxy(socks.SOCKS5, proxy, port)
s.settimeout(20)
s.bind(("", 0))
for size in (1, 100, 8000):
    s.sendto(b"x" * size, (host, there))
    data, peer = s.recvfrom(65536)
    assert (data, peer) == (b"x" * size, (host, there)), (len(data), peer)
print("all")
"#;

#[test]
#[ignore = "root"]
fn pysocks_sends_datagrams() {
    let scene = Scene::new();
    let _server = serve(&scene, ANSWERING);
    let program = scene.python("pysocks.py", PYSOCKS).display().to_string();
    let (proxy, server) = (FORWARDER_TO_CLIENT.ip(Family::V4).to_string(), SERVER.ip(Family::V4).to_string());
    let ports = [SOCKS, PORT].map(|port| port.to_string());
    let said = run(&scene.lab.client, PYTHON, &[&program, &proxy, &ports[0], &server, &ports[1]], &[]);
    assert_eq!(said.trim(), "all");
    assert_eq!(scene.counters()["udp_down"], 3);
}

/// A client of UDP that knows nothing of SOCKS.
const ASKING: &str = r#"
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(20)
there = (sys.argv[1], int(sys.argv[2]))
for size in (1, 100, 1400):
    s.sendto(b"x" * size, there)
    data, peer = s.recvfrom(65536)
    assert (data, peer) == (b"x" * size, there), (len(data), peer)
print("all")
"#;

#[test]
#[ignore = "root"]
fn socksify_sends_datagrams() {
    let scene = Scene::new();
    let _server = serve(&scene, ANSWERING);
    let program = scene.python("asking.py", ASKING).display().to_string();
    let (host, port, conf) = (SERVER.ip(Family::V4).to_string(), PORT.to_string(), dante(&scene));
    let said = run(&scene.lab.client, "socksify", &[PYTHON, &program, &host, &port], &[("SOCKS_CONF", &conf)]);
    assert_eq!(said.trim(), "all");
    assert_eq!(scene.counters()["udp_up"], 3);
}

/// A server of names that knows one address.
const NAMES: &str = r#"
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], int(sys.argv[2])))
l = socket.create_server((sys.argv[1], int(sys.argv[2])))
while True:
    question, peer = s.recvfrom(4096)
    end = question.index(0, 12) + 5
    s.sendto(question[:2] + b"\x81\x80\0\1\0\1\0\0\0\0" + question[12:end]
             + b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4\xc0\0\2\7", peer)
"#;

/// Passes questions on through the proxy. dig itself calls what socksify does not know.
const RESOLVER: &str = r#"
import socket, socks, subprocess, sys, threading
proxy, port, host, there = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
near, far = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socks.socksocket(type=socket.SOCK_DGRAM)
near.bind((sys.argv[5], 5353))
far.set_proxy(socks.SOCKS5, proxy, port)
far.bind(("", 0))
def serve():
    while True:
        question, client = near.recvfrom(4096)
        far.sendto(question, (host, there))
        near.sendto(far.recvfrom(4096)[0], client)
threading.Thread(target=serve, daemon=True).start()
ask = ["dig", "@" + sys.argv[5], "-p", "5353", "+short", "+tries=1", "+timeout=20"]
for name in "name.test", "other.test":
    print(subprocess.run(ask + [name, "A"], check=True, capture_output=True, text=True).stdout, end="")
"#;

#[test]
#[ignore = "root"]
fn dig_asks_for_names() {
    let scene = Scene::new();
    let _server = serve(&scene, NAMES);
    let program = scene.python("resolver.py", RESOLVER).display().to_string();
    let [proxy, server, own] = [FORWARDER_TO_CLIENT, SERVER, CLIENT].map(|host| host.ip(Family::V4).to_string());
    let ports = [SOCKS, PORT].map(|port| port.to_string());
    let said = run(&scene.lab.client, PYTHON, &[&program, &proxy, &ports[0], &server, &ports[1], &own], &[]);
    assert_eq!(said, "192.0.2.7\n192.0.2.7\n");
    assert_eq!((scene.counters()["udp_up"].as_u64(), scene.counters()["udp_down"].as_u64()), (Some(2), Some(2)));
}

/// A page, a WebSocket, and a picture that is there once the WebSocket has ended: the page is not complete before.
const SITE: &str = r#"
import asyncio, http, sys, websockets
PAGE = b"""<p>nothing yet</p><img src=picture><script>
const text = 'x'.repeat(50000), socket = new WebSocket(`ws://${location.host}/echo`);
let left = 20;
socket.onopen = () => socket.send(text);
socket.onmessage = message => {
    if (message.data !== text) return;
    if (--left) return socket.send(text);
    document.querySelector('p').textContent = 'all came back';
    socket.close();
};
</script>"""
ended = asyncio.Event()
async def page(path, headers):
    if path == "/echo":
        return None
    if path == "/picture":
        await ended.wait()
    return http.HTTPStatus.OK, [("Content-Type", "text/html")], PAGE if path == "/" else b""
async def echo(socket):
    try:
        async for message in socket:
            await socket.send(message)
    finally:
        ended.set()
async def main():
    more = dict(process_request=page, max_size=None, compression=None)
    async with websockets.serve(echo, sys.argv[1], int(sys.argv[2]), **more):
        await asyncio.Future()
asyncio.run(main())
"#;

#[test]
#[ignore = "root"]
fn a_browser_loads_a_page_and_opens_a_web_socket() {
    let mut scene = Scene::new();
    let _server = serve(&scene, SITE);
    let profile = format!("--user-data-dir={}", scene.dir.path().join("profile").display());
    let proxy = format!("--proxy-server=socks5://{}", FORWARDER_TO_CLIENT.port(Family::V4, SOCKS));
    let url = format!("http://{}/", SERVER.port(Family::V4, PORT));
    let how = ["--no-sandbox", "--disable-gpu", &profile, &proxy, "--dump-dom", &url];
    let page = run(&scene.lab.client, "chromium-headless-shell", &how, &[]);
    assert!(page.contains("<p>all came back</p>"), "{page}");
    let lines = scene.proxy.end(&scene.pins);
    let socket = lines.iter().find(|line| line["bytes_up"].as_u64() > Some(1_000_000)).expect("the WebSocket");
    // how much of it is copied before the splice depends on how busy the machine is
    assert!(socket["splices"] == 1 && socket["spliced_up"].as_u64() > Some(100_000), "{socket}");
    assert!(lines.len() >= 3, "{lines:#?}");
}

/// Datagrams as fast as they go, both ways, through GSO and without; each that arrives is whole, and none comes twice.
#[test]
#[ignore = "root"]
fn a_stream_of_datagrams_is_not_mixed_up() {
    const COUNT: u32 = 20_000;
    let scene = Scene::new();
    let server = SERVER.port(Family::V4, PORT);
    let sink = scene.lab.server.run(|| UdpSocket::bind(server)).unwrap();
    sink.set_read_timeout(Some(PATIENCE)).unwrap();
    let (control, relay) = scene.ask(Family::V4, 3, SocketAddr::from(([0, 0, 0, 0], 0)));
    let client = scene.datagrams(&control);
    let header = [&[0, 0, 0], &traffic::socks5_address(server)[..]].concat();
    const SIZES: [usize; 6] = [1200, 1200, 1200, 40, 1200, 1];
    let datagram = |n: u32| [&n.to_be_bytes()[..], &vec![n as u8; SIZES[n as usize % SIZES.len()]]].concat();
    // first, so that the forwarder knows the server's link-layer address: what waits for that is overtaken
    client.send_to(&[&header[..], &datagram(0)].concat(), relay).unwrap();
    assert_eq!(sink.recv(&mut [0; 65536]).unwrap(), datagram(0).len());
    let receiver = std::thread::spawn(move || {
        let (mut buffer, mut last, mut count) = (vec![0; 65536], None, 0);
        while last != Some(COUNT) {
            let n = sink.recv(&mut buffer).unwrap();
            let number = u32::from_be_bytes(buffer[..4].try_into().unwrap());
            assert!(last.is_none_or(|last| last < number), "{last:?}, then {number}");
            assert!(buffer[..n] == datagram(number), "{number}: {n} bytes");
            (last, count) = (Some(number), count + 1);
        }
        count
    });
    for n in 1..COUNT {
        client.send_to(&[&header[..], &datagram(n)].concat(), relay).unwrap();
        if n % 64 == 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    // The last one has to arrive, whatever queue was full before.
    while !receiver.is_finished() {
        client.send_to(&[&header[..], &datagram(COUNT)].concat(), relay).unwrap();
        std::thread::sleep(Duration::from_millis(10));
    }
    let count = receiver.join().unwrap();
    assert!(count > COUNT / 10, "{count} have arrived");
    drop(control);
}
