//! Connections that go on through upstream proxies: SOCKS and HTTP, of others and our own, alone and in chains. Needs root and
//! eBPF, and fails without; Debian packages: dante-server, curl.

use crate::running::{
    AT_ONCE, LONGSPLICE, Pins, Running, Setting, eventually, is_reset, listener, round_trip, translucent::transparent,
};
use longsplice_lab::{
    ChildGuard, Family, Namespace,
    topology::{Address, FORWARDER_TO_CLIENT, SERVER},
};
use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{IpAddr, SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt,
    process::Command,
    thread,
    time::Duration,
};
use test_case::test_case;

/// Of our listeners, and of the server.
pub const PORT: u16 = 7001;
/// Of the upstream proxy, at the server's host.
pub const UPSTREAM: u16 = 3128;
/// Of the one before it in a chain, which speaks SOCKS.
pub const FIRST: u16 = 1080;
const PATIENCE: Duration = Duration::from_secs(10);

fn front(family: Family) -> SocketAddr {
    FORWARDER_TO_CLIENT.port(family, PORT)
}

/// A listener that goes on through an upstream proxy. `of_it`: the further keys of that.
fn through(protocol: &str, family: Family, more: &str, of_it: &str) -> String {
    let upstream = format!("[upstream.up]\nservers = \"{}\"\n{of_it}\n", SERVER.port(family, UPSTREAM));
    let own = listener(protocol, &front(family).to_string(), &format!("upstream = \"up\"\n{AT_ONCE}\n{more}"));
    format!("[log]\nformat = \"json\"\n\n{own}\n{upstream}")
}

/// A plug to the echo server through an upstream proxy.
fn plug(family: Family, of_it: &str) -> Setting {
    let at = SERVER.port(family, PORT);
    Setting::new(&through("plug", family, &format!("target = \"{at}\""), of_it))
}

/// Our program as the upstream proxy, with the users ann and a name that only it knows.
pub fn ours(setting: &Setting, protocol: &str) -> (Pins, Running) {
    ours_at(setting, protocol, SERVER)
}

/// The same at another address of the server's host.
pub fn ours_at(setting: &Setting, protocol: &str, own: Address) -> (Pins, Running) {
    let path = |name: &str| setting.dir.path().join(name);
    let all = [SERVER.v4.into(), SERVER.v6.into(), own.ip(Family::V4), own.ip(Family::V6)];
    let targets = all.map(|ip| ip.to_string());
    let users = format!("users = {{ ann = \"secret\" }}\nrules = [{{ action = \"allow\", target = {targets:?} }}]\n");
    let at = |protocol, port| Family::BOTH.map(|f| listener(protocol, &own.port(f, port).to_string(), &users)).concat();
    let listeners = at(protocol, UPSTREAM) + &at("socks5", FIRST);
    fs::write(path("upstream.toml"), format!("[log]\nformat = \"json\"\n\n{listeners}")).unwrap();
    let pins = Pins::of(&setting.lab.server);
    let command = knowing(setting, &setting.lab.server, &[SERVER.v4.into(), SERVER.v6.into()], "only.there");
    let file = path("upstream.toml");
    (pins, Running::start(command, None, &["--config", file.to_str().unwrap()], &[]))
}

/// Our program on a host that knows these addresses of these names, and no others.
pub fn knowing(setting: &Setting, host: &Namespace, addresses: &[IpAddr], names: &str) -> Command {
    let hosts = setting.dir.path().join(format!("hosts of {names}"));
    let lines: String = addresses.iter().map(|ip| format!("{ip} {names}\n")).collect();
    fs::write(&hosts, lines).unwrap();
    let mut command = host.command("unshare");
    command.args(["--mount", "--", "sh", "-c", "mount --bind \"$0\" /etc/hosts && exec \"$@\""]);
    command.arg(hosts).arg(LONGSPLICE);
    command
}

/// Answers one client of the port as this function does, over and over.
pub fn rude(setting: &Setting, family: Family, answer: impl Fn(TcpStream) + Send + 'static) {
    let listener = setting.listen(SERVER.port(family, UPSTREAM));
    thread::spawn(move || listener.incoming().map_while(Result::ok).for_each(&answer));
}

/// Reads up to the end of a head.
pub fn head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    String::from_utf8(head).unwrap()
}

pub const SECRET: &str = "user = \"ann\"\npassword = \"secret\"";

/// The client's bytes come to the target, and are spliced; the lines of both proxies say where to.
#[test_case("socks5", Family::V4; "socks v4")]
#[test_case("socks5", Family::V6; "socks v6")]
#[test_case("http", Family::V4; "http v4")]
#[test_case("http", Family::V6; "http v6")]
#[ignore = "root"]
fn a_plug_through_our_own(protocol: &str, family: Family) {
    let setting = plug(family, &format!("protocol = \"{protocol}\"\n{SECRET}"));
    let (pins, mut upstream) = ours(&setting, protocol);
    let mut proxy = setting.start();
    setting.echo(SERVER.port(family, PORT));
    let mut stream = setting.connect(front(family));
    round_trip(&mut stream, &vec![1; 100_000]);
    proxy.wait_flow("spliced");
    round_trip(&mut stream, &vec![2; 300_000]);
    drop(stream);
    let record = proxy.wait_record(&["\"closed\""]);
    assert_eq!((&record["bytes_up"], &record["bytes_down"]), (&400_000.into(), &400_000.into()), "{record}");
    assert!(record["spliced_up"].as_u64() >= Some(300_000), "{record}");
    let at = [SERVER.port(family, UPSTREAM), SERVER.port(family, PORT)].map(|at| at.to_string());
    assert_eq!([&record["server"], &record["target"]], [&at[0], &at[1]], "{record}");
    let there = upstream.wait_record(&["\"closed\""]);
    assert_eq!((&there["user"], &there["target"]), (&"ann".into(), &at[1].as_str().into()), "{there}");
    upstream.stop(&pins);
    proxy.stop(&setting.pins[0]);
}

/// Names go to the upstream proxy as they are: nobody here knows them.
#[test_case("socks5"; "by socks")]
#[test_case("http"; "by http")]
#[ignore = "root"]
fn names_are_looked_up_there(protocol: &str) {
    let family = Family::V4;
    for of_client in ["socks5", "http"] {
        let rules = "rules = [{ action = \"deny\", target = \"denied.there\" }, { action = \"allow\", target = \"*.there\" }, \
                     { action = \"deny\" }]";
        let of_it = format!("protocol = \"{protocol}\"\n{SECRET}");
        let setting = Setting::new(&through(of_client, family, rules, &of_it));
        let (pins, mut upstream) = ours(&setting, protocol);
        let mut proxy = setting.start();
        let listener = setting.listen(SERVER.port(family, PORT));
        let serve = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let request = head(&mut stream);
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello").unwrap();
            request
        });
        let curl = |host: &str| {
            let mut command = setting.lab.client.command("curl");
            let scheme = if of_client == "http" { "http" } else { "socks5h" };
            command.args(["-q", "-sS", "-p", "--max-time", "20", "-x", &format!("{scheme}://{}", front(family))]);
            command.arg(format!("http://{host}:{PORT}/")).output().unwrap()
        };
        let output = curl("only.there");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "hello", "{output:?}");
        assert!(serve.join().unwrap().contains(&format!("Host: only.there:{PORT}\r\n")));
        for denied in ["denied.there", "elsewhere.test", "127.0.0.1"] {
            assert!(!curl(denied).status.success(), "{denied}");
        }
        assert_eq!(proxy.count("proxy", "denied"), 3);
        let explain = |target: &str| proxy.client(&["rule", "10.77.1.2", target]);
        assert!(explain("only.there:1").contains("allowed"), "{}", explain("only.there:1"));
        // a reload that judges live connections knows no address of the name either
        proxy.client(&["reload", "--enforce"]);
        upstream.stop(&pins);
        proxy.stop(&setting.pins[0]);
    }
}

/// Dante asks for a password of the system, or for none.
#[test]
#[ignore = "root"]
fn a_plug_through_dante() {
    let family = Family::V4;
    let setting = plug(family, "protocol = \"socks5\"");
    let conf = setting.dir.path().join("danted.conf");
    let ip = SERVER.v4;
    let text = format!(
        "logoutput: stderr\ninternal: {ip} port = {UPSTREAM}\nexternal: {ip}\nclientmethod: none\nsocksmethod: none\n\
         user.privileged: root\nuser.unprivileged: nobody\n\
         client pass {{ from: 0.0.0.0/0 to: 0.0.0.0/0 }}\nsocks pass {{ from: 0.0.0.0/0 to: 0.0.0.0/0 }}\n"
    );
    fs::write(&conf, text).unwrap();
    let mut command = setting.lab.server.command("danted");
    let _dante = ChildGuard::spawn(command.arg("-f").arg(&conf)).unwrap();
    setting.lab.server.wait_listening(UPSTREAM, PATIENCE).unwrap();
    let mut proxy = setting.start();
    setting.echo(SERVER.port(family, PORT));
    let mut stream = setting.connect(front(family));
    round_trip(&mut stream, &vec![1; 100_000]);
    proxy.wait_flow("spliced");
    round_trip(&mut stream, &vec![2; 100_000]);
    drop(stream);
    proxy.flows_end();
    proxy.stop(&setting.pins[0]);
}

/// A proxy behind a proxy, one for SOCKS and one for HTTP.
#[test]
#[ignore = "root"]
fn a_chain() {
    let family = Family::V6;
    let of_it = format!("protocol = \"http\"\n{SECRET}\nthrough = \"first\"");
    let first =
        format!("[upstream.first]\nprotocol = \"socks5\"\nservers = \"{}\"\n{SECRET}", SERVER.port(family, FIRST));
    let setting = plug(family, &format!("{of_it}\n{first}"));
    let (pins, mut upstream) = ours(&setting, "http");
    let mut proxy = setting.start();
    setting.echo(SERVER.port(family, PORT));
    let mut stream = setting.connect(front(family));
    round_trip(&mut stream, &vec![1; 100_000]);
    drop(stream);
    eventually("both lines", || (upstream.records().len() == 2).then_some(()));
    let mut targets: Vec<_> = upstream.records().iter().map(|r| r["target"].as_str().unwrap().to_owned()).collect();
    targets.sort();
    assert_eq!(targets, [UPSTREAM, PORT].map(|port| SERVER.port(family, port).to_string()));
    upstream.stop(&pins);
    proxy.stop(&setting.pins[0]);
}

/// What does not go through it, and servers of which only the last one is there.
#[test]
#[ignore = "root"]
fn direct_targets_and_dead_servers() {
    let (family, server) = (Family::V4, SERVER.ip(Family::V4));
    let setting = plug(family, &format!("protocol = \"socks5\"\ndirect = [\"192.0.2.1\", \"{server}/32\"]"));
    let mut proxy = setting.start();
    setting.echo(SERVER.port(family, PORT));
    round_trip(&mut setting.connect(front(family)), b"direct");
    let record = proxy.wait_record(&["\"closed\""]);
    assert_eq!(record["server"], record["target"], "{record}");
    proxy.stop(&setting.pins[0]);

    let servers = format!("servers = [\"{server}:9\", \"{server}:{UPSTREAM}\"]");
    let text =
        through("plug", family, &format!("target = \"{server}:{PORT}\""), &format!("protocol = \"http\"\n{SECRET}"));
    setting.configure(&text.replace(&format!("servers = \"{server}:{UPSTREAM}\""), &servers));
    let (pins, mut upstream) = ours(&setting, "http");
    let mut proxy = setting.start();
    round_trip(&mut setting.connect(front(family)), b"the second one");
    upstream.stop(&pins);
    proxy.stop(&setting.pins[0]);
}

/// The server speaks at once: its first bytes come in the segment of the proxy's answer, which itself may come in pieces.
#[test_case(&["HTTP/1.1 200 OK\r\nVia: x\r\n\r\nSSH-2.0"]; "in one")]
#[test_case(&["HTTP/1.1 103 Early\r\n\r\nHTTP/1.0 2", "00 OK\r\nA: b\r\n", "\r", "\nSSH-2", ".0"]; "in pieces")]
#[ignore = "root"]
fn first_bytes_of_the_server(answer: &'static [&'static str]) {
    let family = Family::V4;
    let setting = plug(family, "protocol = \"http\"");
    rude(&setting, family, move |mut stream| {
        let request = head(&mut stream);
        assert!(request.starts_with(&format!("CONNECT {} HTTP/1.1\r\n", SERVER.port(family, PORT))), "{request}");
        stream.set_nodelay(true).unwrap(); // each piece in a segment of its own
        answer.iter().for_each(|piece| stream.write_all(piece.as_bytes()).unwrap());
        let mut bytes = [0; 5];
        stream.read_exact(&mut bytes).unwrap();
        stream.write_all(&bytes).unwrap();
    });
    let mut proxy = setting.start();
    let mut stream = setting.connect(front(family));
    let mut banner = [0; 7];
    stream.read_exact(&mut banner).unwrap();
    assert_eq!(&banner, b"SSH-2.0");
    stream.write_all(b"hello").unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"hello");
    drop(stream);
    let record = proxy.wait_record(&["\"closed\""]);
    assert_eq!((&record["bytes_up"], &record["bytes_down"]), (&5.into(), &12.into()), "{record}");
    proxy.stop(&setting.pins[0]);
}

/// Whatever an upstream proxy answers, the client hears the matching reply, the line has the reason, and nothing hangs.
#[test_case("http", b"HTTP/1.1 407 Who\r\n\r\n", "it wants another login", 2; "another login")]
#[test_case("http", b"HTTP/1.1 403 No\r\n\r\n", "it does not allow the connection", 2; "not allowed by http")]
#[test_case("http", b"HTTP/1.1 502 No\r\n\r\n", "not reachable from there", 4; "not reachable by http")]
#[test_case("http", b"HTTP/1.1 504 No\r\n\r\n", "the host does not answer", 6; "late by http")]
#[test_case("http", b"SSH-2.0\r\n\r\n", "not in its protocol", 1; "another protocol")]
#[test_case("http", b"HTTP/1.1 200 OK\r\n", "it has closed the connection", 1; "half a head")]
#[test_case("socks5", &[5, 0xff], "it accepts no login that we have", 2; "no login")]
#[test_case("socks5", &[5, 0, 5, 2, 0, 1, 0, 0, 0, 0, 0, 0], "it does not allow the connection", 2; "not allowed")]
#[test_case("socks5", &[5, 0, 5, 5, 0, 1, 0, 0, 0, 0, 0, 0], "the host refuses", 5; "refused")]
#[test_case("socks5", &[5, 0, 5, 0, 0, 9], "not in its protocol", 1; "another kind of address")]
#[test_case("socks5", &[5, 2, 1, 0], "not in its protocol", 1; "a password that we do not have")]
#[test_case("socks5", &[4, 0], "not in its protocol", 1; "another version")]
#[test_case("socks5", &[5, 0, 5, 0, 0, 3, 255, b'a'], "it has closed the connection", 1; "half a reply")]
#[test_case("http", b"", "it has closed the connection", 1; "nothing")]
#[ignore = "root"]
fn refusals(protocol: &str, answer: &'static [u8], why: &str, reply: u8) {
    let family = Family::V4;
    let rules = format!("rules = [{{ action = \"allow\", target = \"{}\" }}]", SERVER.ip(family));
    let of_it = format!("protocol = \"{protocol}\"\nresolve = true");
    let setting = Setting::new(&through("socks5", family, &rules, &of_it));
    rude(&setting, family, |mut stream| {
        stream.write_all(answer).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let _ = stream.read_to_end(&mut Vec::new()); // it may be reset
    });
    let mut proxy = setting.start();
    let mut stream = setting.connect(front(family));
    stream.write_all(&[5, 1, 0]).unwrap();
    let at = [SERVER.v4.octets().as_slice(), &PORT.to_be_bytes()].concat();
    stream.write_all(&[&[5, 1, 0, 1], &at[..]].concat()).unwrap();
    let mut said = Vec::new();
    stream.read_to_end(&mut said).unwrap();
    assert_eq!(said[..4], [5, 0, 5, reply], "{said:?}");
    let record = proxy.wait_record(&["unreachable"]);
    let error = record["refusal"].as_str().unwrap();
    assert!(error.starts_with("upstream proxy up: ") && error.contains(why), "{record}");
    proxy.stop(&setting.pins[0]);
}

/// An upstream proxy that does not answer is given up after the time for connections.
#[test]
#[ignore = "root"]
fn silence() {
    let family = Family::V6;
    let setting = plug(family, "protocol = \"socks5\"");
    let text = through(
        "plug",
        family,
        &format!("target = \"{}\"\nlimits = {{ connect = 1 }}", SERVER.port(family, PORT)),
        "protocol = \"socks5\"",
    );
    setting.configure(&text);
    rude(&setting, family, |mut stream| drop(stream.read_to_end(&mut Vec::new())));
    let mut proxy = setting.start();
    let mut stream = setting.connect(front(family));
    let ended = stream.read(&mut [0]);
    assert!(ended.is_err_and(|e| e.kind() == ErrorKind::ConnectionReset));
    let record = proxy.wait_record(&["timeout"]);
    assert_eq!(record["refusal"], "the upstream proxy took too long", "{record}");
    proxy.stop(&setting.pins[0]);
}

/// The upstream proxy may be this program: only what comes back to the same listener is a loop.
#[test]
#[ignore = "root"]
fn a_loop() {
    let family = Family::V4;
    let text = through("plug", family, &format!("target = \"{}\"", SERVER.port(family, PORT)), "protocol = \"http\"");
    let setting = Setting::new(&text.replace(&SERVER.port(family, UPSTREAM).to_string(), &front(family).to_string()));
    let mut proxy = setting.start();
    assert!(setting.lab.client.run(|| is_reset(front(family))));
    let record = proxy.wait_record(&["denied"]);
    assert!(record["refusal"].as_str().unwrap().contains("leads back"), "{record}");
    proxy.stop(&setting.pins[0]);
}

/// Passwords are read from a file that nobody else can write.
#[test]
#[ignore = "root"]
fn a_password_in_a_file() {
    let family = Family::V4;
    let setting = plug(family, "protocol = \"http\"\nuser = \"ann\"\npassword_file = \"secret\"");
    let file = setting.dir.path().join("secret");
    fs::write(&file, "secret\n").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
    assert!(setting.refused().contains("chmod 600"));
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let (pins, mut upstream) = ours(&setting, "http");
    let mut proxy = setting.start();
    setting.echo(SERVER.port(family, PORT));
    round_trip(&mut setting.connect(front(family)), b"hello");
    upstream.stop(&pins);
    proxy.stop(&setting.pins[0]);
}

/// Connections that are routed through the machine, of clients that know of no proxy.
#[test_case("socks5", Family::V4; "v4")]
#[test_case("http", Family::V6; "v6")]
#[ignore = "root"]
fn routed_connections(protocol: &str, family: Family) {
    let own = transparent("plug", PORT, &format!("upstream = \"up\"\n{AT_ONCE}"));
    let servers = SERVER.port(family, UPSTREAM);
    let it = format!("[upstream.up]\nservers = \"{servers}\"\nprotocol = \"{protocol}\"\n{SECRET}");
    let setting = Setting::new(&format!("[log]\nformat = \"json\"\n\n{own}\n{it}"));
    let (pins, mut upstream) = ours(&setting, protocol);
    let mut proxy = setting.start();
    let at = SERVER.port(family, PORT);
    setting.echo(at);
    let mut stream = setting.connect(at);
    round_trip(&mut stream, &vec![1; 100_000]);
    proxy.wait_flow("spliced");
    round_trip(&mut stream, &vec![2; 100_000]);
    drop(stream);
    let there = upstream.wait_record(&["\"closed\""]);
    assert_eq!((&there["user"], &there["target"]), (&"ann".into(), &at.to_string().into()), "{there}");
    upstream.stop(&pins);
    proxy.flows_end();
    proxy.shut_down();
}

/// A reload judges live connections again, by their names, and not by the address of the upstream proxy.
#[test]
#[ignore = "root"]
fn live_connections_are_judged_by_name() {
    let family = Family::V6;
    let rules = |first: &str| {
        format!("rules = [{first}{{ action = \"allow\", target = \"*.there\" }}, {{ action = \"deny\" }}]")
    };
    let configured = |first| through("socks5", family, &rules(first), &format!("protocol = \"http\"\n{SECRET}"));
    let setting = Setting::new(&configured(""));
    let (pins, mut upstream) = ours(&setting, "http");
    let mut proxy = setting.start();
    setting.echo(SERVER.port(family, PORT));
    let mut stream = setting.connect(front(family));
    stream.write_all(&[5, 1, 0]).unwrap();
    let name = b"only.there";
    stream.write_all(&[&[5, 1, 0, 3, name.len() as u8], &name[..], &PORT.to_be_bytes()].concat()).unwrap();
    let mut answers = [0; 2 + 4 + 16 + 2];
    stream.read_exact(&mut answers).unwrap();
    assert_eq!(answers[..6], [5, 0, 5, 0, 0, 4]);
    round_trip(&mut stream, &[1; 1000]);
    proxy.wait_flow("spliced");
    proxy.client(&["reload", "--enforce"]);
    round_trip(&mut stream, &[1; 1000]);
    setting.configure(&configured("{ action = \"deny\", target = \"only.there\" }, "));
    proxy.client(&["reload", "--enforce"]);
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    upstream.stop(&pins);
    proxy.stop(&setting.pins[0]);
}
