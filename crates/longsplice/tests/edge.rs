//! Transparent listeners of other protocols (`transparent = true`), and listeners that show servers the client's address
//! (`source = "client"`), through the real program. Needs root and eBPF.

use crate::{
    pages::example,
    running::{
        AT_ONCE, LONGSPLICE, Pins, Running, Setting, eventually, is_reset, listener, round_trip,
        translucent::{PATIENCE, PORT, SECOND_PORT, listeners, translucent_at, transparent},
    },
};
use longsplice_lab::{
    Family, Lab, Options, Shape,
    topology::{CLIENT, CLIENT_SECOND, FORWARDER_TO_CLIENT, SERVER, SERVER_SECOND},
    traffic::{Script, connect, converse, intact, listen, serve},
};
use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{IpAddr, SocketAddr, TcpStream},
    thread,
};
use test_case::test_case;

const BYTES: u64 = 4_000_000;
const CLIENTS_ADDRESS: &str = "source = \"client\"\n";

/// A lab whose forwarder routes what nobody takes.
fn routed(configuration: &str) -> Setting {
    routed_in(Shape::TwoDevices, configuration)
}

fn routed_in(shape: Shape, configuration: &str) -> Setting {
    translucent_at(Lab::new(shape, Options { forwarding: true, ..Options::default() }).unwrap(), configuration)
}

/// Answers each connection with the peer's address as the server sees it, and with what the client says.
fn mirror(here: &Setting, at: SocketAddr) {
    let listener = here.listen(at);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            thread::spawn(move || {
                let seen = stream.peer_addr().unwrap().ip();
                // a client that is gone fails its test itself
                let _ = writeln!(stream, "{at} {seen}");
                let _ = std::io::copy(&mut stream.try_clone().unwrap(), &mut stream);
            });
        }
    });
}

/// What the mirror says: its address, and whom it sees.
fn seen(stream: &mut TcpStream) -> (SocketAddr, IpAddr) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut one = [0];
        stream.read_exact(&mut one).unwrap();
        line.extend(one);
    }
    let line = String::from_utf8(line).unwrap();
    let (at, who) = line.trim().split_once(' ').unwrap();
    (at.parse().unwrap(), who.parse().unwrap())
}

/// Whether it is one of the client's addresses, of which its kernel chooses one.
fn is_client(ip: IpAddr) -> bool {
    [CLIENT, CLIENT_SECOND].iter().any(|client| client.ip(Family::V4) == ip || client.ip(Family::V6) == ip)
}

/// The kernel shakes hands with the client in the server's name, and the flow is spliced. The server sees whom it should.
#[test_case(Family::V4, ""; "v4")]
#[test_case(Family::V6, ""; "v6")]
#[test_case(Family::V4, CLIENTS_ADDRESS; "v4, the client's address")]
#[test_case(Family::V6, CLIENTS_ADDRESS; "v6, the client's address")]
#[ignore = "root"]
fn a_plug_without_target_leads_to_where_the_client_wants(family: Family, source: &str) {
    let here = Setting::new(&transparent("plug", PORT, &format!("{source}{AT_ONCE}")));
    let mut proxy = here.start_with(&["--log-format", "json"]);
    let lab = &here.lab;
    let server = SERVER.port(family, PORT);
    for round in 0..3 {
        let answer = Script::answerer().bytes(BYTES).pace(BYTES);
        let serving = serve(lab.server.run(|| listen(server, &answer)).unwrap(), 1, answer);
        let opener = Script::opener(7 + round).bytes(BYTES).pace(BYTES);
        let client = lab.client.spawn(move || converse(connect(server, &opener).unwrap(), &opener));
        let flow = proxy.wait_flow("spliced");
        let (client, served) = (client.join().unwrap(), serving.join().remove(0));
        intact(&client, &served).unwrap();
        assert_eq!(client.remote, Some(server));
        let seen = served.remote.unwrap().ip();
        assert_eq!(is_client(seen), !source.is_empty(), "whom the server sees: {seen}");
        assert_eq!((&flow["protocol"], &flow["client"]), (&"plug".into(), &client.local.unwrap().to_string().into()));
        let line = proxy.wait_record(&[&client.local.unwrap().to_string()]);
        assert_eq!((&line["target"], &line["splices"]), (&server.to_string().into(), &1.into()), "{line}");
    }
    assert_eq!(proxy.count("tpot", "intercepted-plain"), 3);
    proxy.shut_down();
    let rules = lab.forwarder.execute("ip", &[if family == Family::V4 { "-4" } else { "-6" }, "rule"]).unwrap();
    assert!(!rules.contains("fwmark"), "what it has told the routes is taken back: {rules}");
}

/// A plug that clients know shows its target who comes.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_plug_that_shows_its_target_who_comes(family: Family) {
    let (listen, target) = (FORWARDER_TO_CLIENT.port(family, PORT), SERVER.port(family, PORT));
    let plug = listener("plug", &listen.to_string(), &format!("target = \"{target}\"\n{CLIENTS_ADDRESS}{AT_ONCE}"));
    let here = Setting::new(&plug);
    mirror(&here, target);
    let mut proxy = here.start();
    let mut client = here.connect(listen);
    let (server, who) = seen(&mut client);
    assert!(server == target && is_client(who), "{server} {who}");
    proxy.wait_flow("spliced");
    round_trip(&mut client, &[7; 1_000_000]);
    drop(client);
    proxy.wait_line(&["splices=1"]);
    // nobody listens: the server's refusal is heard
    let other = SERVER_SECOND.port(family, SECOND_PORT);
    proxy.shut_down();
    here.configure(&listener("plug", &listen.to_string(), &format!("target = \"{other}\"\n{CLIENTS_ADDRESS}")));
    let mut proxy = here.start();
    assert!(here.lab.client.run(|| is_reset(listen)));
    proxy.wait_line(&["unreachable"]);
    proxy.shut_down();
}

/// Connections to a server of a pool are not shared among clients if it sees their addresses.
#[test]
#[ignore = "root"]
fn a_site_that_shows_its_servers_who_comes() {
    let (listen, server) = (FORWARDER_TO_CLIENT.port(Family::V4, PORT), SERVER.port(Family::V4, PORT));
    let site = format!("{CLIENTS_ADDRESS}route = [{{ pool = \"web\" }}]\n[pool.web]\nservers = [\"{server}\"]\n");
    let here = Setting::new(&listener("http", &listen.to_string(), &site));
    let listener = here.listen(server);
    thread::spawn(move || {
        for stream in listener.incoming() {
            thread::spawn(move || {
                let mut stream = stream.unwrap();
                let body = stream.peer_addr().unwrap().ip().to_string();
                while stream.read(&mut [0; 4096]).is_ok_and(|n| n > 0) {
                    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
                    stream.write_all((head + &body).as_bytes()).unwrap();
                }
            });
        }
    });
    let mut proxy = here.start();
    for client in [CLIENT, CLIENT_SECOND, CLIENT] {
        let mut curl = here.lab.client.command("curl");
        let ip = client.ip(Family::V4).to_string();
        let url = format!("http://{listen}/");
        let got =
            curl.args(["-sS", "--max-time", "20", "--interface", &ip, &url, "--next", "-sS", &url]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&got.stdout), ip.repeat(2), "{}", String::from_utf8_lossy(&got.stderr));
    }
    proxy.shut_down();
}

/// What is older than the program, or for the machine itself, or comes when the process is gone.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn what_it_does_not_take_is_routed(family: Family) {
    let here = routed(&transparent("plug", PORT, AT_ONCE));
    let at = SERVER.port(family, PORT);
    mirror(&here, at);
    let mut older = here.connect(at);
    assert!(is_client(seen(&mut older).1));
    let mut proxy = here.start();
    round_trip(&mut older, &[7; 100_000]);
    let own = FORWARDER_TO_CLIENT.port(family, PORT);
    let refused = here.lab.client.run(|| TcpStream::connect(own));
    assert_eq!(
        refused.unwrap_err().kind(),
        ErrorKind::ConnectionRefused,
        "it is no listener of the machine's own address"
    );
    let mut taken = here.connect(at);
    assert!(!is_client(seen(&mut taken).1));
    proxy.wait_flow("spliced");
    proxy.kill();
    round_trip(&mut taken, &[8; 100_000]);
    let mut routed = here.connect(at);
    assert!(is_client(seen(&mut routed).1), "without a process, SYNs are routed");
    let mut next = here.start();
    for stream in [&mut older, &mut routed, &mut taken] {
        round_trip(stream, &[9; 100_000]);
    }
    assert!(!is_client(seen(&mut here.connect(at)).1));
    next.shut_down();
    assert!(is_client(seen(&mut here.connect(at)).1));
}

/// At the limit of connections, further ones have no proxy.
#[test]
#[ignore = "root"]
fn at_its_limit_it_leaves_connections_alone() {
    let here = routed(&transparent("plug", PORT, &format!("limits = {{ connections = 1 }}\n{AT_ONCE}")));
    let at = SERVER.port(Family::V4, PORT);
    mirror(&here, at);
    let mut proxy = here.start();
    let mut first = here.connect(at);
    assert!(!is_client(seen(&mut first).1));
    let mut second = here.connect(at);
    assert!(is_client(seen(&mut second).1));
    drop(first);
    eventually("room", || (!is_client(seen(&mut here.connect(at)).1)).then_some(()));
    round_trip(&mut second, &[7; 1000]);
    proxy.shut_down();
}

/// A server that refuses, with each handshake. With `"confirm"`, its client is refused as well.
#[test_case("basic", ""; "basic")]
#[test_case("pipelined", ""; "pipelined")]
#[test_case("confirm", ""; "confirm")]
#[test_case("pipelined", CLIENTS_ADDRESS; "pipelined, the client's address")]
#[test_case("confirm", CLIENTS_ADDRESS; "confirm, the client's address")]
#[ignore = "root"]
fn servers_that_refuse_and_servers_that_do_not(handshake: &str, source: &str) {
    let here = routed(&transparent("plug", PORT, &format!("handshake = \"{handshake}\"\n{source}{AT_ONCE}")));
    let mut proxy = here.start();
    for family in Family::BOTH {
        let at = SERVER.port(family, PORT);
        let refused = here.lab.client.run(|| TcpStream::connect(at)).and_then(|mut stream| stream.read(&mut [0]));
        let kind = if handshake == "confirm" { ErrorKind::ConnectionRefused } else { ErrorKind::ConnectionReset };
        assert_eq!(refused.unwrap_err().kind(), kind);
        mirror(&here, at);
        let mut client = here.connect(at);
        let (server, who) = seen(&mut client);
        assert_eq!((server, is_client(who)), (at, !source.is_empty()));
        round_trip(&mut client, &[7; 1_000_000]);
        drop(client);
        proxy.wait_line(&[&at.to_string(), "splices=1"]);
    }
    assert_eq!(proxy.count("proxy", "unreachable"), 2);
    proxy.shut_down();
}

/// Names lead elsewhere where a route says so, and nowhere else.
#[test]
#[ignore = "root"]
fn routes_by_name() {
    let second = SERVER_SECOND.port(Family::V4, SECOND_PORT);
    let tls = format!("[[listener.route]]\nname = \"second.test\"\ntarget = \"{second}\"\n");
    let http = "route = [{ host = \"second.test\", pool = \"second\" }]\n";
    let pool = format!("[pool.second]\nservers = [\"{second}\"]\n");
    let here = routed(&(transparent("http", PORT, http) + &transparent("tls", SECOND_PORT, &tls) + &pool));
    let at = |port| SERVER.port(Family::V4, port);
    for server in [at(PORT), at(SECOND_PORT), second] {
        let listener = here.listen(server);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
                let body = server.to_string();
                let _ = write!(
                    stream,
                    "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
                    body.len()
                );
            }
        });
    }
    let mut proxy = here.start();
    for (name, server) in [("second.test", second), ("other.test", at(PORT)), ("localhost", at(PORT))] {
        let mut client = here.connect(at(PORT));
        write!(client, "GET / HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n").unwrap();
        let mut reply = String::new();
        client.read_to_string(&mut reply).unwrap();
        assert!(reply.ends_with(&server.to_string()), "{name}: {reply}");
    }
    for (name, server) in [("second.test", second), ("other.test", at(SECOND_PORT))] {
        // the servers do not speak TLS, but tell who they are
        let mut openssl = here.lab.client.command("timeout");
        let address = at(SECOND_PORT).to_string();
        openssl.args(["20", "openssl", "s_client", "-msg", "-servername", name, "-connect", &address]);
        assert!(!openssl.output().unwrap().status.success());
        proxy.wait_line(&["tls", &format!("server={server}")]);
    }
    proxy.shut_down();
}

/// An edge proxy asks for its clients, as the page on it says: neither host knows of anything. All handshakes go on at the same time:
/// the server has a connection before the client's acknowledgement arrives.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn it_asks_for_hosts_that_know_of_nothing(family: Family) {
    let (any, proxies) = if family == Family::V4 { ("0.0.0.0", "10.77.0.0/16") } else { ("[::]", "fd77::/16") };
    let (listen, ports) = (format!("{any}:{PORT}"), format!("ports = {PORT}"));
    let words = [("0.0.0.0:5432", &listen[..]), ("ports = 5432", &ports), ("10.1.0.0/16", proxies)];
    let page = include_str!("../../../docs/edge.md");
    let here = routed_in(Shape::TwoForwarders, &example(page, "## In front of a translucent proxy", &words));
    let inner = here.lab.second.clone().unwrap();
    let _pins = [Pins::of(&inner), Pins::of_tpot(&inner)];
    let file = here.dir.path().join("second.toml");
    fs::write(&file, listeners(PORT, AT_ONCE)).unwrap();
    let mut second = Running::start(inner.command(LONGSPLICE), None, &["--config", file.to_str().unwrap()], &[]);
    let mut first = here.start();
    let at = SERVER.port(family, PORT);
    let server = here.listen(at);
    server.set_nonblocking(true).unwrap();
    let no_ack = format!("tcp dport {PORT} tcp flags & syn == 0 drop");
    let chain = format!("table inet t {{ chain c {{ type filter hook output priority 0; {no_ack}; }}; }}");
    here.lab.client.execute("nft", &[&chain]).unwrap();
    let mut client = here.connect(at);
    let (mut served, _) = eventually("a connection at the server", || server.accept().ok());
    assert_eq!(first.counters()["proxy"]["accepted"], 0, "the client's handshake is not over");
    here.lab.client.execute("nft", &["delete table inet t"]).unwrap();
    served.set_nonblocking(false).unwrap();
    let echo = thread::spawn(move || std::io::copy(&mut served.try_clone().unwrap(), &mut served));
    round_trip(&mut client, &[7; 1_000_000]);
    assert_eq!(["intercepted-plain", "asked", "opened"].map(|name| first.count("tpot", name)), [1, 1, 1]);
    assert_eq!(["intercepted", "opened"].map(|name| second.count("tpot", name)), [1, 1]);
    first.wait_flow("spliced");
    second.wait_flow("spliced");
    drop(client);
    assert_eq!(echo.join().unwrap().unwrap(), 1_000_000);
    for proxy in [&mut first, &mut second] {
        proxy.wait_line(&[&at.to_string(), "splices=1"]);
        proxy.shut_down();
    }
}

/// Where nobody answers with the option, it is a plain transparent proxy.
#[test]
#[ignore = "root"]
fn it_asks_and_nobody_answers() {
    let asking = format!("[tpot]\nports = {PORT}\nproxies = [\"10.77.0.0/16\", \"fd77::/16\"]\n");
    let here = routed(&(transparent("plug", PORT, &format!("handshake = \"pipelined\"\n{AT_ONCE}")) + &asking));
    let mut proxy = here.start();
    for family in Family::BOTH {
        let at = SERVER.port(family, PORT);
        mirror(&here, at);
        let mut client = here.connect(at);
        assert_eq!(seen(&mut client).0, at);
        round_trip(&mut client, &[7; 1_000_000]);
        drop(client);
        proxy.wait_line(&[&at.to_string(), "splices=1"]);
    }
    assert_eq!(["intercepted-plain", "asked", "opened"].map(|name| proxy.count("tpot", name)), [2, 2, 0]);
    proxy.shut_down();
}
