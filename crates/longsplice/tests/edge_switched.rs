//! Edge proxies whose connections are spliced and taken back as often as they are told to, under load: each protocol that leaves a
//! connection to both hosts once it knows where that leads, and HTTP, which takes a connection back after each message. Once alone,
//! and once in front of a translucent proxy. All bytes are compared. Needs root and eBPF, and fails without.

use crate::{
    pages::hello,
    running::{
        AT_ONCE, LONGSPLICE, Pins, Running, Setting, eventually, round_trip,
        translucent::{PORT, listeners, translucent_at, transparent},
    },
};
use longsplice_lab::{Family, Lab, Options, Shape, topology::SERVER};
use std::{
    fs::{self, Permissions},
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt,
    sync::{
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc,
    },
    thread,
};
use test_case::test_case;

const PROTOCOLS: [&str; 4] = ["plug", "http", "tls", "login"];
const CLIENTS_ADDRESS: &str = "source = \"client\"\n";
/// How often a connection is spliced and taken back.
const TIMES: u64 = 4;
const ALL_PORTS: [u16; 4] = [PORT, PORT + 1, PORT + 2, PORT + 3];

/// A listener of each protocol, with the ports in that order.
fn edge(more: &str) -> String {
    let users = |protocol| if protocol == "login" { "users = { ann = \"secret\" }\n" } else { "" };
    let one = |(protocol, port)| transparent(protocol, port, &format!("{}{more}", users(protocol)));
    PROTOCOLS.into_iter().zip(ALL_PORTS).map(one).collect()
}

fn setting(shape: Shape, configuration: &str) -> Setting {
    let lab = Lab::new(shape, Options { forwarding: true, ..Options::default() }).unwrap();
    let here = translucent_at(lab, configuration);
    let file = here.dir.path().join("longsplice.toml");
    fs::set_permissions(file, Permissions::from_mode(0o600)).unwrap(); // it has a password
    here
}

/// Reads the head of a message, byte by byte: nothing behind it is read. `None`: the stream has ended.
fn head(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut one = [0];
        if stream.read(&mut one).unwrap() == 0 {
            return None;
        }
        head.extend(one);
    }
    Some(String::from_utf8(head).unwrap())
}

/// A server that changes protocols, and then echoes.
fn upgrading(here: &Setting, at: SocketAddr) {
    let listener = here.listen(at);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            thread::spawn(move || {
                assert!(head(&mut stream).unwrap().to_ascii_lowercase().contains("\r\nupgrade: echo\r\n"));
                let answer = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n";
                stream.write_all(answer.as_bytes()).unwrap();
                // a client that is gone fails its test itself
                let _ = std::io::copy(&mut stream.try_clone().unwrap(), &mut stream);
            });
        }
    });
}

/// Opens a connection, and goes so far that both hosts have it for themselves.
fn open(here: &Setting, protocol: &str, at: SocketAddr) -> TcpStream {
    let mut client = here.connect(at);
    match protocol {
        "http" => {
            write!(client, "GET / HTTP/1.1\r\nHost: a.test\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n").unwrap();
            let answer = head(&mut client).unwrap();
            assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
        }
        "tls" => round_trip(&mut client, &hello("a.test", "h2")),
        "login" => {
            client.write_all(b"ann\r\nsecret\r\n").unwrap();
            let mut said = String::new();
            BufReader::with_capacity(1, &client).read_line(&mut said).unwrap();
            assert_eq!(said, format!("login: password: connected to {at}\r\n"));
        }
        _ => {}
    }
    client
}

/// Splices the connection of each protocol and takes it back, while data move both ways.
fn all_change_sides(here: &Setting, proxy: &mut Running, family: Family) {
    for (protocol, port) in PROTOCOLS.into_iter().zip(ALL_PORTS) {
        let at = SERVER.port(family, port);
        match protocol {
            "http" => upgrading(here, at),
            _ => here.echo(at),
        }
        let (mut client, stop) = (open(here, protocol, at), AtomicBool::new(false));
        let from = client.local_addr().unwrap().to_string();
        thread::scope(|scope| {
            let talks = scope.spawn(|| {
                for n in (0..=u8::MAX).cycle().take_while(|_| !stop.load(Relaxed)) {
                    let bytes: Vec<u8> = (0..100_000_u32).map(|i| n.wrapping_add((i / 7) as u8)).collect();
                    round_trip(&mut client, &bytes);
                }
                drop(client);
            });
            let stops = Stops(&stop);
            let id = eventually("a flow", || proxy.flows().pop())["id"].to_string();
            let bytes = || proxy.flow()["bytes_up"].as_u64();
            for _ in 0..TIMES {
                for (command, state) in [("splice", "spliced"), ("unsplice", "copying")] {
                    proxy.client(&[command, &id]);
                    proxy.wait_flow(state);
                    let more = bytes().unwrap() + 300_000;
                    eventually("bytes pass", || (bytes()? > more).then_some(()));
                }
            }
            drop(stops);
            talks.join().unwrap();
        });
        let line = proxy.wait_record(&[&from]);
        assert_eq!((&line["how"], &line["splices"]), (&"closed".into(), &TIMES.into()), "{protocol}: {line}");
        assert!(line["spliced_up"].as_u64() > Some(TIMES * 300_000), "{protocol}: {line}");
        assert!(line["bytes_up"].as_u64() > Some(2 * TIMES * 300_000), "{protocol}: {line}");
    }
}

/// Sets it in the end, after a panic, too.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Both hosts have been answered in each other's name, or the server by the proxy.
#[test_case(Family::V4, ""; "v4")]
#[test_case(Family::V6, ""; "v6")]
#[test_case(Family::V4, CLIENTS_ADDRESS; "v4, the client's address")]
#[test_case(Family::V6, CLIENTS_ADDRESS; "v6, the client's address")]
#[ignore = "root"]
fn connections_change_sides(family: Family, source: &str) {
    let here = setting(Shape::TwoDevices, &edge(&format!("{source}policy = {{ splice = 1_000_000_000_000 }}")));
    let mut proxy = here.start_with(&["--log-format", "json"]);
    all_change_sides(&here, &mut proxy, family);
    proxy.shut_down();
}

/// An edge proxy whose own connections ask for a proxy, and the one that answers.
struct Asking {
    first: Running,
    second: Running,
    here: Setting,
    _pins: [Pins; 2],
}

impl Asking {
    fn new(more: &str) -> Asking {
        let asking = format!("[tpot]\nports = \"{PORT}-{}\"\nproxies = [\"10.77.0.0/16\", \"fd77::/16\"]\n", PORT + 3);
        let here = setting(Shape::TwoForwarders, &(edge(more) + &asking));
        let inner = here.lab.second.clone().unwrap();
        let pins = [Pins::of(&inner), Pins::of_tpot(&inner)];
        let file = here.dir.path().join("second.toml");
        fs::write(&file, ALL_PORTS.map(|port| listeners(port, AT_ONCE)).concat()).unwrap();
        let second = Running::start(inner.command(LONGSPLICE), None, &["--config", file.to_str().unwrap()], &[]);
        let first = here.start_with(&["--log-format", "json"]);
        Asking { first, second, here, _pins: pins }
    }

    /// Ends both. `connections`: how many went through both.
    fn end(mut self, connections: u64) {
        assert_eq!(
            ["intercepted-plain", "asked", "opened"].map(|name| self.first.count("tpot", name)),
            [connections; 3]
        );
        assert_eq!(["intercepted", "opened"].map(|name| self.second.count("tpot", name)), [connections; 2]);
        self.first.shut_down();
        self.second.shut_down();
    }
}

/// The same where the edge proxy's own connections are those of a tunnel.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn connections_into_a_tunnel_change_sides(family: Family) {
    let mut place = Asking::new("policy = { splice = 1_000_000_000_000 }");
    all_change_sides(&place.here, &mut place.first, family);
    place.end(PROTOCOLS.len() as u64);
}

/// Sends requests on one connection, each with a body that comes back as that of the reply. Each message is spliced before the rest of
/// it is sent, and taken back at its end.
fn messages_change_sides(here: &Setting, proxy: &Running, family: Family) {
    const LENGTH: usize = 1_000_000;
    /// What is sent before the splice.
    const BEFORE: usize = 10_000;
    let at = SERVER.port(family, ALL_PORTS[1]);
    let listener = here.listen(at);
    let (go, goes) = mpsc::channel();
    let serves = thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        let mut served = 0;
        while head(&mut stream).is_some() {
            let mut body = vec![0; LENGTH];
            stream.read_exact(&mut body).unwrap();
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {LENGTH}\r\n\r\n").unwrap();
            stream.write_all(&body[..BEFORE]).unwrap();
            goes.recv().unwrap();
            stream.write_all(&body[BEFORE..]).unwrap();
            served += 1;
        }
        served
    });
    let mut client = here.connect(at);
    let from = client.local_addr().unwrap().to_string();
    for n in 0..TIMES {
        let body: Vec<u8> = (0..LENGTH).map(|i| n as u8 ^ (i / 5) as u8).collect();
        write!(client, "PUT /{n} HTTP/1.1\r\nHost: a.test\r\nContent-Length: {LENGTH}\r\n\r\n").unwrap();
        client.write_all(&body[..BEFORE]).unwrap();
        proxy.wait_flow("spliced");
        client.write_all(&body[BEFORE..]).unwrap();
        assert!(head(&mut client).unwrap().starts_with("HTTP/1.1 200 "));
        let mut back = vec![0; LENGTH];
        client.read_exact(&mut back[..BEFORE]).unwrap();
        proxy.wait_flow("spliced");
        go.send(()).unwrap();
        client.read_exact(&mut back[BEFORE..]).unwrap();
        assert!(back == body, "{n}");
        let line = proxy.wait_record(&[&format!("\"/{n}\""), &from]);
        let least = Some((LENGTH - BEFORE) as u64);
        assert!(line["spliced_up"].as_u64() >= least && line["spliced_down"].as_u64() >= least, "{line}");
    }
    drop(client);
    assert_eq!(serves.join().unwrap(), TIMES, "on one connection");
}

#[test_case(Family::V4, ""; "v4")]
#[test_case(Family::V6, ""; "v6")]
#[test_case(Family::V4, CLIENTS_ADDRESS; "v4, the client's address")]
#[test_case(Family::V6, CLIENTS_ADDRESS; "v6, the client's address")]
#[ignore = "root"]
fn messages_of_http_change_sides(family: Family, source: &str) {
    let here = setting(Shape::TwoDevices, &edge(&format!("{source}{AT_ONCE}")));
    let mut proxy = here.start_with(&["--log-format", "json"]);
    messages_change_sides(&here, &proxy, family);
    proxy.shut_down();
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn messages_of_http_into_a_tunnel_change_sides(family: Family) {
    let place = Asking::new(AT_ONCE);
    messages_change_sides(&place.here, &place.first, family);
    place.end(1);
}
