//! HTTP bodies spliced past the proxy: thousands of requests over few connections, pipelined or not, each to a different
//! server than the one before. Both ends are strict: a server must get only its own requests, and a client the reply to its
//! request. Needs root and eBPF, and fails without.

use crate::running::{LONGSPLICE, Pins, Running, eventually, least, listener};
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection, Shape,
    calls::SystemCalls,
    pattern,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use longsplice_proxy::Http;
use nix::libc::{SYS_bpf, SYS_epoll_ctl, SYS_poll, SYS_setsockopt};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::mpsc,
    thread,
    time::Duration,
};

const PROXY: u16 = 3128;
const PORTS: [u16; 3] = [8081, 8082, 8083];
/// Time limit for each byte.
const PATIENCE: Duration = Duration::from_secs(30);

/// The framing of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    Exact,
    Chunked,
    /// Chunked, from a server with harmless errors in its framing.
    Careless,
    Close,
}

/// A request with a unique path.
#[derive(Clone, Debug)]
struct Ask {
    port: u16,
    seed: u64,
    head_only: bool,
    up: Option<(Framing, usize)>,
    down: (Framing, usize),
}

impl Ask {
    fn path(&self) -> String {
        format!("/{}/{:?}/{}/{}", self.port, self.down.0, self.down.1, self.seed)
    }

    fn method(&self) -> &'static str {
        match (self.head_only, self.up) {
            (true, _) => "HEAD",
            (_, Some(_)) => "PUT",
            _ => "GET",
        }
    }
}

fn body(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    pattern::fill(seed, 0, &mut bytes);
    bytes
}

fn wrong(what: impl Into<String>) -> io::Error {
    io::Error::other(what.into())
}

/// Appends to a head the fields that announce a body, and the body.
fn message(mut head: String, framing: Framing, bytes: &[u8], r: &mut SmallRng) -> Vec<u8> {
    match framing {
        Framing::Exact => head += &format!("Content-Length: {}\r\n", bytes.len()),
        Framing::Chunked => head += "Transfer-Encoding: chunked\r\n",
        Framing::Careless => head = head.replace("\r\n", "\n") + "Transfer-Encoding : chunked\nX-Odd: a\n b\n",
        Framing::Close => {}
    }
    let careless = framing == Framing::Careless;
    let mut m = (head + if careless { "\n" } else { "\r\n" }).into_bytes();
    if !matches!(framing, Framing::Chunked | Framing::Careless) {
        m.extend_from_slice(bytes);
        return m;
    }
    let line = |r: &mut SmallRng, n: usize| match r.random_range(0..4) {
        0 if careless => format!("{n:x}\n"),
        1 if careless => format!("{n:x}  \t\r\n"),
        2 if careless => format!("{n:020x} \n"),
        _ => format!("{n:x}\r\n"),
    };
    let mut rest = bytes;
    while !rest.is_empty() {
        let most = *[10, 5000, 400_000].get(r.random_range(0..3usize)).unwrap();
        let (chunk, after) = rest.split_at(r.random_range(1..=most).min(rest.len()));
        m.extend(line(r, chunk.len()).as_bytes());
        m.extend_from_slice(chunk);
        m.extend(if careless && r.random() { &b"\n"[..] } else { b"\r\n" });
        rest = after;
    }
    m.extend(line(r, 0).as_bytes());
    m.extend(if careless { &b"\n"[..] } else { b"\r\n" });
    m
}

type Reader = BufReader<TcpStream>;

/// Reads the start line and fields, in lower case. `None`: end of stream.
fn head(s: &mut Reader) -> io::Result<Option<Vec<String>>> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        match (s.read_line(&mut line)?, lines.is_empty()) {
            (0, true) => return Ok(None),
            (0, false) => return Err(wrong("the end within a head")),
            _ if line == "\r\n" => return Ok(Some(lines)),
            _ if !line.ends_with("\r\n") => return Err(wrong(format!("a line {line:?}"))),
            (_, first) => lines.push(if first { line } else { line.to_ascii_lowercase() }),
        }
    }
}

fn field<'a>(lines: &'a [String], name: &str) -> Option<&'a str> {
    lines.iter().find_map(|l| l.strip_prefix(name)?.strip_prefix(": ")).map(str::trim)
}

/// Reads the announced body, and compares it.
fn expect(s: &mut Reader, lines: &[String], until_close: bool, seed: u64, length: usize) -> io::Result<()> {
    let mut bytes = Vec::new();
    if field(lines, "transfer-encoding") == Some("chunked") {
        loop {
            let mut line = String::new();
            s.read_line(&mut line)?;
            let size = line.strip_suffix("\r\n").and_then(|size| usize::from_str_radix(size, 16).ok());
            let n = size.ok_or_else(|| wrong(format!("chunk size {line:?}")))?;
            let at = bytes.len();
            bytes.resize(at + n, 0);
            s.read_exact(&mut bytes[at..])?;
            let mut end = [0; 2];
            s.read_exact(&mut end)?;
            if end != *b"\r\n" {
                return Err(wrong(format!("{end:?} behind a chunk")));
            }
            if n == 0 {
                break;
            }
        }
    } else if until_close {
        s.read_to_end(&mut bytes)?;
    } else {
        let n = field(lines, "content-length").and_then(|n| n.parse().ok()).unwrap_or(0);
        bytes.resize(n, 0);
        s.read_exact(&mut bytes)?;
    }
    if bytes.len() != length {
        return Err(wrong(format!("{} bytes instead of {length}", bytes.len())));
    }
    pattern::check(seed, 0, &bytes).map_err(|m| wrong(format!("{m:?}")))
}

/// Answers requests on one connection until it ends.
fn answer(s: TcpStream, port: u16) -> io::Result<()> {
    s.set_nodelay(true)?;
    s.set_read_timeout(Some(PATIENCE * 2))?;
    let mut out = s.try_clone()?;
    let mut s = BufReader::new(s);
    while let Some(lines) = head(&mut s)? {
        let mut words = lines[0].split(' ');
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let parts: Vec<&str> = path.split('/').skip(1).collect();
        let [to, framing, length, seed] = parts[..] else { return Err(wrong(lines.concat())) };
        if to.parse() != Ok(port) {
            return Err(wrong(format!("{path} came to {port}")));
        }
        let (length, seed) = (length.parse().unwrap(), seed.parse().unwrap());
        if method == "PUT" {
            if field(&lines, "expect") == Some("100-continue") {
                out.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
            }
            let up = field(&lines, "x-length").and_then(|n| n.parse().ok()).unwrap_or(0);
            expect(&mut s, &lines, false, seed + 1, up)?;
        }
        let framing = match framing {
            "Exact" => Framing::Exact,
            "Chunked" => Framing::Chunked,
            "Careless" => Framing::Careless,
            _ => Framing::Close,
        };
        let mut r = SmallRng::seed_from_u64(seed);
        let bytes = body(seed, length);
        let reply = message(format!("HTTP/1.1 200 OK\r\nX-Path: {path}\r\n"), framing, &bytes, &mut r);
        let empty: &[u8] = if framing == Framing::Careless { b"\n\n" } else { b"\r\n\r\n" };
        let end = reply.windows(empty.len()).position(|w| w == empty).unwrap() + empty.len();
        if method == "HEAD" {
            out.write_all(&reply[..end])?;
        } else if r.random_bool(0.3) {
            // head and body in separate segments, as many servers send them
            out.write_all(&reply[..end])?;
            out.write_all(&reply[end..])?;
        } else {
            out.write_all(&reply)?;
        }
        if framing == Framing::Close {
            return Ok(());
        }
    }
    Ok(())
}

fn serve(lab: &Lab, family: Family, tell: &mpsc::Sender<String>) {
    for port in PORTS {
        let listener = lab.server.run(|| TcpListener::bind(SERVER.port(family, port))).unwrap();
        let tell = tell.clone();
        thread::spawn(move || {
            while let Ok((s, _)) = listener.accept() {
                let tell = tell.clone();
                thread::spawn(move || {
                    if let Err(e) = answer(s, port) {
                        let _ = tell.send(format!("server {port}: {e}"));
                    }
                });
            }
        });
    }
}

/// What clients do.
#[derive(Clone, Copy)]
struct Clients {
    /// How many there are, how many connections each has in turn, and how many requests a connection carries.
    count: (u64, u64, usize),
    /// How many requests are under way, on one connection after the other.
    ahead: [usize; 4],
    /// Whether the servers are one site: paths lead to them.
    site: bool,
}

impl Clients {
    fn new(count: (u64, u64, usize)) -> Clients {
        Clients { count, ahead: [1, 1, 2, 10], site: false }
    }
}

/// Sends the requests of one connection, `ahead` of them before it reads the first reply.
fn talk(proxy: SocketAddr, site: bool, family: Family, asks: Vec<Ask>, ahead: usize) -> io::Result<()> {
    let mut s = TcpStream::connect(proxy)?;
    s.set_nodelay(true)?;
    s.set_read_timeout(Some(PATIENCE))?;
    s.set_write_timeout(Some(PATIENCE))?;
    let mut replies = BufReader::new(s.try_clone()?);
    let (told, sent) = mpsc::sync_channel::<Ask>(ahead - 1);
    let reader = thread::spawn(move || {
        for ask in sent {
            let lines = loop {
                let lines = head(&mut replies)?.ok_or_else(|| wrong(format!("no reply to {ask:?}")))?;
                if !lines[0].contains(" 100 ") {
                    break lines;
                }
            };
            let about = |e: io::Error| wrong(format!("{ask:?}: {e}: {lines:?}"));
            if !lines[0].contains(" 200 ")
                || !lines.iter().any(|l| l.trim() == format!("x-path: {}", ask.path().to_ascii_lowercase()))
            {
                return Err(about(wrong("another reply")));
            }
            if !ask.head_only {
                expect(&mut replies, &lines, ask.down.0 == Framing::Close, ask.seed, ask.down.1).map_err(about)?;
            }
        }
        Ok(())
    });
    for ask in asks {
        let mut r = SmallRng::seed_from_u64(ask.seed);
        let host = SERVER.port(family, ask.port);
        let server = if site { String::new() } else { format!("http://{host}") };
        let mut request = format!("{} {server}{} HTTP/1.1\r\nHost: {host}\r\n", ask.method(), ask.path());
        let whole = match ask.up {
            None => (request + "\r\n").into_bytes(),
            Some((framing, length)) => {
                request += &format!("X-Length: {length}\r\n");
                message(request, framing, &body(ask.seed + 1, length), &mut r)
            }
        };
        // a failed reader reports the reason
        if told.send(ask).is_err() || s.write_all(&whole).is_err() {
            break;
        }
    }
    drop(told);
    reader.join().expect("no panic")
}

fn size(r: &mut SmallRng) -> usize {
    let around = |r: &mut SmallRng, n: usize| n + r.random_range(0..3) - 1;
    match r.random_range(0..20) {
        0..=2 => r.random_range(0..3),
        3..=8 => r.random_range(0..3000),
        9..=10 => around(r, 1448),
        11..=12 => around(r, 16_384),
        13..=14 => around(r, 65_536),
        15..=16 => around(r, 524_288),
        17..=18 => r.random_range(0..500_000),
        _ => r.random_range(0..3_000_000),
    }
}

fn asks(seed: u64, n: usize) -> Vec<Ask> {
    let mut r = SmallRng::seed_from_u64(seed);
    let one = |i: usize, r: &mut SmallRng| {
        let last = i + 1 == n;
        let framing = |r: &mut SmallRng| if r.random_bool(0.25) { Framing::Chunked } else { Framing::Exact };
        let down = match framing(r) {
            _ if last && r.random_bool(0.5) => Framing::Close,
            Framing::Chunked if r.random_bool(0.5) => Framing::Careless,
            other => other,
        };
        let head_only = !last && r.random_bool(0.05);
        Ask {
            port: PORTS[r.random_range(0..PORTS.len())],
            seed: seed * 1_000_000 + 10 * i as u64,
            head_only,
            up: (!head_only && r.random_bool(0.1)).then(|| (framing(r), size(r))),
            down: (down, size(r)),
        }
    };
    (0..n).map(|i| one(i, &mut r)).collect()
}

/// Requests for large bodies, all from one server.
fn large(seed: u64, n: usize) -> Vec<Ask> {
    let one = |i: usize| Ask {
        port: PORTS[0],
        seed: seed * 1_000_000 + 10 * i as u64,
        head_only: false,
        up: None,
        down: (Framing::Exact, [256, 300, 1024][i % 3] * 1024),
    };
    (0..n).map(one).collect()
}

/// Runs several clients in parallel, each with several connections in turn. Returns the bytes spliced according to the log.
fn run(
    family: Family,
    impair: Option<Impair>,
    more: &[&str],
    asks: fn(u64, usize) -> Vec<Ask>,
    count: (u64, u64, usize),
) -> Vec<Value> {
    run_in(&Lab::simple(Shape::TwoDevices).unwrap(), family, impair, more, asks, Clients::new(count))
}

fn run_in(
    lab: &Lab,
    family: Family,
    impair: Option<Impair>,
    more: &[&str],
    asks: fn(u64, usize) -> Vec<Ask>,
    Clients { count: (number, connections, requests), ahead, site }: Clients,
) -> Vec<Value> {
    let _bad = impair.map(|i| [LinkDirection::ToClient, LinkDirection::ToServer].map(|w| lab.impair(w, i).unwrap()));
    let (tell, told) = mpsc::channel();
    serve(lab, family, &tell);
    let proxy = FORWARDER_TO_CLIENT.port(family, PROXY);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("longsplice.toml");
    let mut text = listener("http", &proxy.to_string(), "");
    if site {
        text += &PORTS.map(|port| format!("[[listener.route]]\npath = \"/{port}\"\npool = \"{port}\"\n")).concat();
        let server = |port| SERVER.port(family, port);
        text += &PORTS.map(|port| format!("[pool.{port}]\nservers = [\"{}\"]\n", server(port))).concat();
    }
    fs::write(&file, text).unwrap();
    let arguments = ["--config", file.to_str().unwrap(), "--log-format", "json"];
    let pins = Pins::of(&lab.forwarder);
    let mut program = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, more);
    let clients: Vec<_> = (0..number)
        .map(|c| {
            lab.client.spawn(move || {
                for k in 0..connections {
                    let seed = c * 1000 + k;
                    let ahead = ahead[k as usize % 4];
                    let asks = asks(seed, requests);
                    talk(proxy, site, family, asks, ahead).unwrap_or_else(|e| panic!("client {seed}: {e}"));
                }
            })
        })
        .collect();
    let failed = clients.into_iter().map(|c| c.join()).filter(Result::is_err).count();
    let said: Vec<String> = told.try_iter().collect();
    let counters = program.client(&["counters"]);
    assert!(failed == 0 && said.is_empty(), "{failed} clients have failed; {said:#?}\n{counters}");
    assert!(counters.lines().any(|l| l.split_whitespace().eq(["rewrite-failed", "0"])), "{counters}");
    let all = number * connections * requests as u64;
    let spliced = eventually("each request is counted, once", || {
        let counters = program.counters();
        let listener = &counters["listeners"][0];
        let refused: u64 = listener["refused"].as_object()?.values().filter_map(Value::as_u64).sum();
        listener["spliced"].as_u64().filter(|spliced| spliced + refused == all)
    });
    let records = program.end(&pins);
    assert_eq!(records.iter().filter(|r| r["splices"] != 0).count() as u64, spliced);
    records
}

fn check(records: &[Value], requests: usize, spliced: u64) {
    assert_eq!(records.len(), requests);
    if let Some(file) = std::env::var_os("RECORDS") {
        fs::write(file, serde_json::to_vec(records).unwrap()).unwrap();
    }
    let bad: Vec<_> = records.iter().filter(|r| r["how"] != "closed").collect();
    assert!(bad.is_empty(), "{bad:#?}");
    let sum = |key: &str| records.iter().map(|r| r[key].as_u64().unwrap()).sum::<u64>();
    let (up, down, splices) = (sum("spliced_up"), sum("spliced_down"), sum("splices"));
    eprintln!("{splices} splices; spliced {up} of {} up, {down} of {} down", sum("bytes_up"), sum("bytes_down"));
    assert!(splices > 0 && up + down >= spliced, "{splices} splices, {up} up, {down} down");
}

/// Ten thousand requests; each body is spliced if possible.
#[test]
#[ignore = "root"]
fn ten_thousand_requests() {
    let records = run(Family::V4, None, &["--splice", "at-once"], asks, (8, 25, 50));
    check(&records, 10_000, 100_000_000);
}

#[test]
#[ignore = "root"]
fn under_loss() {
    let impair = Impair { loss: 0.005, duplicate: 0.005, ..Impair::default() };
    let records = run(Family::V4, Some(impair), &["--splice", "at-once"], asks, (4, 4, 25));
    check(&records, 400, 1_000_000);
}

/// Requests for large bodies, each from another server than the one before.
fn large_by_turns(seed: u64, n: usize) -> Vec<Ask> {
    large(seed, n).into_iter().zip(PORTS.into_iter().cycle()).map(|(ask, port)| Ask { port, ..ask }).collect()
}

/// The whole mix of requests of persistent, pipelined connections to a site of several servers.
#[test]
#[ignore = "root"]
fn the_servers_of_a_site_get_their_own_requests() {
    let clients = Clients { site: true, ..Clients::new((8, 8, 50)) };
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let records = run_in(&lab, Family::V4, None, &["--splice", "at-once"], asks, clients);
    check(&records, 3200, 30_000_000);
}

/// Clients that send all of their requests before the first reply: each goes to another server of the site, and each reply is
/// spliced.
#[test]
#[ignore = "root"]
fn replies_to_pipelined_requests_to_a_site_are_spliced() {
    for family in Family::BOTH {
        let clients = Clients { ahead: [60; 4], site: true, ..Clients::new((4, 2, 60)) };
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let records = run_in(&lab, family, None, &["--splice", "at-once"], large_by_turns, clients);
        check_shares(&records);
        for port in PORTS {
            let route = format!("{port}");
            let of = records.iter().filter(|r| r["route"].as_str().unwrap().ends_with(&route));
            let [all, spliced] = of.fold([0, 0], |[all, spliced], r| [all + 1, spliced + u64::from(r["splices"] != 0)]);
            assert!(all == 160 && spliced > 140, "{port}: {spliced} of {all} replies");
        }
    }
}

/// A server writes a whole body at once, and must not be able to send most of it ahead of the splice: neither on a new connection
/// nor on one over which a body has been forwarded, or copied.
#[test]
#[ignore = "root"]
fn bodies_of_persistent_connections_are_spliced() {
    check_shares(&run(Family::V4, None, &["--splice", "at-once"], large, (4, 2, 60)));
}

/// Checks that most bodies, and most of their bytes, were spliced.
fn check_shares(records: &[Value]) {
    check(records, 480, 100_000_000);
    let sum = |key: &str| records.iter().map(|r| r[key].as_u64().unwrap()).sum::<u64>() as f64;
    let spliced = records.iter().filter(|r| r["splices"] != 0).count() as f64;
    let (bodies, bytes) = (spliced / records.len() as f64, sum("spliced_down") / sum("bytes_down"));
    eprintln!("{bodies:.2} of the bodies, {bytes:.2} of the bytes");
    assert!(bodies > 0.9 && bytes > 0.7, "{bodies:.2} of the bodies, {bytes:.2} of the bytes");
}

/// A near server whose first congestion window holds much of a body: only its receive window keeps it from sending that ahead.
#[test]
#[ignore = "root"]
fn bodies_of_a_server_with_a_large_first_window_are_spliced() {
    for (family, forwarder) in [(Family::V4, "10.77.2.1/32"), (Family::V6, "fd77:2::1/128")] {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        lab.server.execute("ip", &["route", "replace", forwarder, "dev", "s0", "initcwnd", "100"]).unwrap();
        check_shares(&run_in(&lab, family, None, &["--splice", "at-once"], large, Clients::new((4, 2, 60))));
    }
}

/// One body in three is spliced, and the next ones are copied over the same connections with the usual window. Then the window of
/// a connection that is in use becomes small again.
#[test]
#[ignore = "root"]
fn bodies_among_others_are_spliced() {
    let mixed = |seed, n| {
        let sizes = [300 * 1024, 2 << 20, 40_000];
        large(seed, n)
            .into_iter()
            .zip(sizes.into_iter().cycle())
            .map(|(ask, n)| Ask { down: (Framing::Exact, n), ..ask })
            .collect()
    };
    let records = run(Family::V6, None, &[], mixed, (4, 2, 60));
    check(&records, 480, 100_000_000);
    let sum = |key: &str, least: u64, most: u64| {
        let all = records.iter().filter(|r| (least..most).contains(&r["bytes_down"].as_u64().unwrap()));
        all.map(|r| r[key].as_u64().unwrap()).sum::<u64>() as f64
    };
    let [share, none] =
        [(2 << 20, u64::MAX), (0, 2 << 20)].map(|(l, m)| sum("spliced_down", l, m) / sum("bytes_down", l, m));
    eprintln!("{share:.2} of the bytes of the long bodies");
    assert!(share > 0.8 && none == 0.0, "{share:.2} of the bytes of long bodies, {none:.2} of the others");
}

/// Returns how often each system call is made for a body of so many bytes, one after the other over the same connections. All are
/// spliced, or none is. poll(2) does not count: the keeper looks for events each millisecond, and others use the machine, too.
fn calls_per_body(more: &[&str], length: usize, are_spliced: bool) -> Vec<f64> {
    const BODIES: usize = 400;
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let (tell, _told) = mpsc::channel();
    serve(&lab, Family::V4, &tell);
    let proxy = FORWARDER_TO_CLIENT.port(Family::V4, PROXY);
    let pins = Pins::of(&lab.forwarder);
    let arguments = ["--http", &proxy.to_string(), "--log-format", "json"];
    let mut program = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, more);
    let calls = SystemCalls::of(program.id()).unwrap();
    let ask = move |ask| Ask { down: (Framing::Exact, length), ..ask };
    let asks: Vec<_> = large(1, BODIES).into_iter().map(ask).collect();
    lab.client.spawn(move || talk(proxy, false, Family::V4, asks, 1).unwrap()).join().unwrap();
    let mut calls: Vec<_> = calls.so_far().into_iter().map(|n| n as f64 / BODIES as f64).collect();
    calls[SYS_poll as usize] = 0.0;
    let records = program.end(&pins);
    let spliced = records.iter().filter(|r| r["splices"] != 0).count();
    assert_eq!(records.len(), BODIES);
    let whys: BTreeSet<_> = records.iter().map(|r| r["refusal"].to_string()).collect();
    let is_right = if are_spliced { spliced > BODIES * 9 / 10 } else { spliced == 0 };
    assert!(is_right, "{spliced} of {BODIES} are spliced; refusals: {whys:?}; the last: {}", records[BODIES - 1]);
    calls
}

/// Bodies that are never long enough are copied with the usual window: in as few steps as without splicing.
#[test]
#[ignore = "root"]
fn bodies_that_are_copied_cost_no_more_where_others_would_be_spliced() {
    let [never, default] =
        [&["--splice", "never"][..], &[]].map(|more: &[&str]| calls_per_body(more, 200_000, false).iter().sum::<f64>());
    eprintln!("system calls for a body: never {never:.1}, default {default:.1}");
    assert!(default <= never * 1.25 + 1.0, "never {never}, default {default}");
}

/// A connection that is over before a body is long enough: the data path is asked once, whether a released flow has its port.
#[test]
#[ignore = "root"]
fn a_connection_without_long_bodies_is_no_work_for_the_data_path() {
    const CONNECTIONS: usize = 200;
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let (tell, _told) = mpsc::channel();
    serve(&lab, Family::V4, &tell);
    let proxy = FORWARDER_TO_CLIENT.port(Family::V4, PROXY);
    let pins = Pins::of(&lab.forwarder);
    let arguments = ["--http", &proxy.to_string(), "--log-format", "json"];
    let mut program = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
    let [bpf] = least([1.5], || {
        let calls = SystemCalls::of(program.id()).unwrap();
        let asks = large(1, CONNECTIONS).into_iter().map(|ask| Ask { down: (Framing::Exact, 1000), ..ask });
        let each = asks.map(|ask| vec![ask]).collect::<Vec<_>>();
        let all = move || each.into_iter().for_each(|ask| talk(proxy, false, Family::V4, ask, 1).unwrap());
        lab.client.spawn(all).join().unwrap();
        [calls.so_far()[SYS_bpf as usize] as f64 / CONNECTIONS as f64]
    });
    assert_eq!(program.end(&pins).len() % CONNECTIONS, 0);
    assert!(bpf <= 1.5, "{bpf} calls of bpf(2) per connection");
}

#[test]
#[ignore = "root"]
fn a_spliced_body_takes_few_system_calls() {
    const MOST: f64 = 20.0;
    let mut fewest: Vec<f64> = Vec::new();
    let [n] = least([MOST], || {
        let calls = calls_per_body(&["--splice", "at-once"], 256 * 1024, true);
        // each by itself: the number of reads depends on what has arrived by the freeze
        fewest = if fewest.is_empty() { calls } else { fewest.iter().zip(calls).map(|(a, b)| a.min(b)).collect() };
        [fewest.iter().sum()]
    });
    let by_number: Vec<_> = fewest.iter().enumerate().filter(|(_, n)| **n > 0.01).collect();
    eprintln!("system calls for a spliced body: {n:.1}; by number: {by_number:.2?}");
    assert!(n <= MOST, "{n}: {by_number:.2?}");
}

/// No socket is parked for a body that is over soon, and few looks are needed.
#[test]
#[ignore = "root"]
fn a_short_spliced_body_parks_no_sockets() {
    const MOST: [f64; 3] = [5.0, 0.5, 2.0];
    let made = least(MOST, || {
        let calls = calls_per_body(&["--splice", "at-once"], 256 * 1024, true);
        [SYS_bpf, SYS_epoll_ctl, SYS_setsockopt].map(|call| calls[call as usize])
    });
    eprintln!("bpf, epoll_ctl, setsockopt: {made:.2?}");
    assert!(made.iter().zip(MOST).all(|(n, most)| *n <= most), "{made:.2?}, at most {MOST:?}");
}

/// The window that the client's host was last told, in bytes.
fn window_of_client(lab: &Lab) -> usize {
    let sockets = lab.client.execute("ss", &["-tinH"]).unwrap();
    let window = sockets.split_whitespace().find_map(|word| word.strip_prefix("snd_wnd:")?.parse().ok());
    window.unwrap_or_else(|| panic!("no window: {sockets}"))
}

/// After a spliced body, a far client keeps the window that it was promised, so that the next body does not have to wait for a
/// larger one.
#[test]
#[ignore = "root"]
fn a_far_client_keeps_its_window() {
    const BODY: usize = 2_000_000;
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    // the server's window is what the client is promised: at a slow pace the kernel would leave it small
    lab.server.sysctl("net.ipv4.tcp_rmem", "4096 2000000 6291456").unwrap();
    let far = Impair { delay: Duration::from_millis(10), ..Impair::NONE };
    let _far = [LinkDirection::FromClient, LinkDirection::ToClient].map(|way| lab.impair(way, far).unwrap());
    let (tell, _told) = mpsc::channel();
    Family::BOTH.iter().for_each(|family| serve(&lab, *family, &tell));
    for family in Family::BOTH {
        let proxy = FORWARDER_TO_CLIENT.port(family, PROXY);
        let pins = Pins::of(&lab.forwarder);
        let arguments = ["--http", &proxy.to_string(), "--log-format", "json"];
        let mut program = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
        let mut client = lab.client.run(|| TcpStream::connect(proxy)).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut replies = BufReader::new(client.try_clone().unwrap());
        for seed in 0..3 {
            let ask = Ask { port: PORTS[0], seed, head_only: false, up: None, down: (Framing::Exact, 10) };
            let host = SERVER.port(family, ask.port);
            let head_of_it =
                format!("PUT http://{host}{} HTTP/1.1\r\nHost: {host}\r\nX-Length: {BODY}\r\n", ask.path());
            let mut random = SmallRng::seed_from_u64(seed);
            client.write_all(&message(head_of_it, Framing::Exact, &body(seed + 1, BODY), &mut random)).unwrap();
            let lines = head(&mut replies).unwrap().unwrap();
            expect(&mut replies, &lines, false, seed, 10).unwrap();
        }
        let window = window_of_client(&lab);
        drop((client, replies));
        let records = program.end(&pins);
        assert!(records[0]["spliced_up"].as_u64() > Some(1_000_000), "{records:?}");
        assert!(window > 300_000, "{family:?}: {window}");
    }
}

#[test]
#[ignore = "root"]
fn by_default_large_bodies_are_spliced() {
    let records = run(Family::V6, None, &["-vv"], asks, (2, 10, 50));
    check(&records, 1000, 10_000_000);
    for r in records {
        let (all, spliced) = (r["bytes_down"].as_u64().unwrap(), r["spliced_down"].as_u64().unwrap());
        assert!(spliced == 0 || all >= Http::BODY_PAYS_FROM, "{r}");
    }
}
