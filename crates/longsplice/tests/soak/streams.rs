//! Checked streams through each kind of listener, and their server.

use super::{
    ledger::Ledger,
    plan::{HANGS, Kind, Plan},
    traffic::Traffic,
    web::DISCOURAGED,
};
use longsplice_lab::{
    Family, Lab,
    topology::{CLIENT, FORWARDER_TO_CLIENT, SERVER},
    traffic::{self, STEP, Script, converse},
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// The server's port for checked streams, and the proxy's port for a plug to it.
pub const STREAMS: u16 = 7000;
/// The proxy's port for a plug to the other address family.
pub const CROSSING: u16 = 7001;
pub const SOCKS: u16 = 1080;
pub const PROXY: u16 = 3128;
/// The server's port for TLS, and the proxy's, which forwards to it by name.
pub const NAMES: u16 = 8443;
/// The server's port for clients that connect without knowing of the proxy.
pub const TRANSPARENT: u16 = 7002;
/// The kinds of listeners.
pub const WAYS: [&str; 6] = ["plug", "crossing plug", "SOCKS", "CONNECT", "TLS by name", "transparent"];
/// Number of streams at a time.
const LASTING: u64 = 22;
const SHORT: u64 = 2;
/// The first of the source ports of short streams. Each client has one of them, and uses it again as soon as its last stream is over.
const AGAIN: u16 = 4000;

pub fn other(family: Family) -> Family {
    if family == Family::V4 { Family::V6 } else { Family::V4 }
}

/// The name that resolves to the server's address of this family.
pub fn name(family: Family) -> &'static str {
    if family == Family::V4 { "four.test" } else { "six.test" }
}

/// Starts clients that connect repeatedly, and a server for each address family.
pub fn begin(traffic: &Arc<Traffic>, lab: &Lab, seed: u64) {
    for family in Family::BOTH {
        for port in [STREAMS, NAMES, TRANSPARENT] {
            let at = SERVER.port(family, port);
            let listener = lab.server.run(|| traffic::listen(at, &Script::answerer())).expect("the server listens");
            let traffic = traffic.clone();
            thread::spawn(move || accept(&traffic, &listener, port == NAMES));
        }
    }
    // a host may use a port again at once if it keeps no TIME-WAIT, and some do not
    for host in [&lab.client, &lab.server] {
        host.sysctl("net.ipv4.tcp_max_tw_buckets", "0").expect("sysctl");
    }
    for n in 0..LASTING + SHORT {
        let traffic = traffic.clone();
        let mut r = SmallRng::seed_from_u64(seed ^ (n + 1) << 32);
        lab.client.spawn(move || {
            while let Some(_open) = traffic.enter() {
                if let Some(n) = n.checked_sub(LASTING) {
                    one(&traffic.ledger, Kind::passing(&mut r), Some(AGAIN + n as u16), &mut r);
                } else {
                    one(&traffic.ledger, Kind::lasting(&mut r), None, &mut r);
                    thread::sleep(Duration::from_millis(r.random_range(10..100)));
                }
            }
        });
    }
}

/// Runs one connection of a client from start to end. `port`: its source port; `None`: any.
fn one(ledger: &Ledger, kind: Kind, port: Option<u16>, r: &mut SmallRng) {
    let seed = Plan::seed(kind, r);
    let mut plan = Plan::of(seed).expect("one of ours");
    let [family, to] = [Family::BOTH[r.random_range(0..2)], Family::BOTH[r.random_range(0..2)]];
    let (proxy, target) = (|port| FORWARDER_TO_CLIENT.port(family, port), SERVER.port(to, STREAMS));
    let through = r.random_range(0..WAYS.len());
    let asks_server = WAYS[through] == "transparent";
    plan.opener.local = port.map(|port| CLIENT.port(if asks_server { to } else { family }, port));
    let script = &plan.opener;
    ledger.begin(seed, kind, WAYS[through]);
    let stream = match through {
        0 => traffic::connect(proxy(STREAMS), script),
        1 => traffic::connect(proxy(CROSSING), script),
        2 => traffic::socks5_connect(proxy(SOCKS), target, script),
        3 => tunnel(proxy(PROXY), target, script),
        4 => by_name(proxy(NAMES), name(to), script),
        _ => traffic::connect(SERVER.port(to, TRANSPARENT), script),
    };
    let is_connected = stream.is_ok();
    ledger.client_done(seed, stream.map(|stream| converse(stream, script)));
    if !is_connected {
        thread::sleep(DISCOURAGED);
    }
}

/// Connects through the proxy with CONNECT.
fn tunnel(proxy: SocketAddr, target: SocketAddr, script: &Script) -> io::Result<TcpStream> {
    let mut stream = traffic::connect(proxy, script)?;
    stream.set_read_timeout(Some(script.deadline))?;
    write!(stream, "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n")?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    match head.starts_with(b"HTTP/1.1 200") {
        true => Ok(stream),
        false => Err(io::Error::other(String::from_utf8_lossy(&head).into_owned())),
    }
}

/// The header of a TLS handshake record without content (RFC 8446, 5.1).
const ANSWER: [u8; 5] = [22, 3, 3, 0, 0];

/// Starts TLS: the proxy reads the ClientHello, and answers with an alert if the server cannot be reached.
fn by_name(proxy: SocketAddr, name: &str, script: &Script) -> io::Result<TcpStream> {
    let mut stream = traffic::connect(proxy, script)?;
    stream.set_read_timeout(Some(script.deadline))?;
    stream.write_all(&hello(name))?;
    let mut answer = [0; ANSWER.len()];
    stream.read_exact(&mut answer)?;
    if answer == ANSWER { Ok(stream) } else { Err(io::Error::other(format!("{answer:?}"))) }
}

/// A ClientHello with nothing but a server name (RFC 8446, 4.1.2; RFC 6066, 3).
fn hello(name: &str) -> Vec<u8> {
    let sized = |bytes: &[u8]| [&(bytes.len() as u16).to_be_bytes(), bytes].concat();
    let names = sized(&[&[0], &sized(name.as_bytes())[..]].concat());
    let extensions = sized(&[&[0, 0], &sized(&names)[..]].concat());
    // version, random number, no session, one cipher, no compression
    let body = [&[3, 3][..], &[7; 32], &[0], &[0, 2, 0x13, 1], &[1, 0], &extensions].concat();
    let handshake = [&[1, 0][..], &sized(&body)].concat();
    [&[22, 3, 1][..], &sized(&handshake)].concat()
}

fn accept(traffic: &Arc<Traffic>, listener: &TcpListener, greets: bool) {
    for stream in listener.incoming().map_while(Result::ok) {
        let traffic = traffic.clone();
        thread::spawn(move || answer(&traffic, stream, greets));
    }
}

/// Reads a message of [`hello`], and answers.
fn greet(mut stream: &TcpStream) -> io::Result<()> {
    let mut head = [0; 5];
    stream.set_read_timeout(Some(HANGS))?;
    stream.read_exact(&mut head)?;
    stream.read_exact(&mut vec![0; u16::from_be_bytes([head[3], head[4]]).into()])?;
    stream.write_all(&ANSWER)
}

/// Serves one connection. `greets`: a ClientHello comes first.
fn answer(traffic: &Traffic, stream: TcpStream, greets: bool) {
    let ledger = &traffic.ledger;
    let _open = traffic.count();
    let began = Instant::now();
    match if greets { greet(&stream) } else { Ok(()) } {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
            return ledger.silent(began, format!("no ClientHello, from {:?}", stream.peer_addr()));
        }
        Err(_) => return, // ended before it began
        Ok(()) => {}
    }
    let seed = match first_word(&stream) {
        Ok(Some(seed)) => seed,
        Ok(None) => return, // ended before it began
        Err(why) => return ledger.silent(began, format!("{why}, from {:?}", stream.peer_addr())),
    };
    if let Some(plan) = ledger.arrived(seed) {
        ledger.server_done(seed, converse(stream, &plan.answerer));
    }
}

/// Peeks at the first word of a stream.
fn first_word(stream: &TcpStream) -> Result<Option<u64>, String> {
    let (began, mut word) = (Instant::now(), [0; 8]);
    if stream.set_read_timeout(Some(STEP)).is_err() {
        return Ok(None);
    }
    let mut seen = 0;
    while began.elapsed() < HANGS {
        match stream.peek(&mut word) {
            Ok(8) => return Ok(Some(u64::from_le_bytes(word))),
            // an end of stream after a part of the word looks no different
            Ok(n) if n > seen => seen = n,
            Ok(0) => return Ok(None),
            Ok(_) => thread::sleep(STEP),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return Ok(None),
        }
    }
    if seen > 0 { Ok(None) } else { Err("a connection that says nothing".into()) }
}
