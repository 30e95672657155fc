//! Connections that are not spliced go over to the process that takes the place of the running one (`longsplice upgrade`): the old
//! one is gone soon, whatever its clients do, and they notice nothing.

use crate::{
    running::{LONGSPLICE, Running, Setting, connect, eventually, listener, loopback_echo, round_trip},
    upgrade::{self, Dynasty, gone},
};
use longsplice_lab::{
    Family, pattern,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use nix::{
    fcntl::{Flock, FlockArg},
    sys::socket::{setsockopt, sockopt},
};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
};
use tempfile::TempDir;

/// Limits that no slow machine reaches.
const PATIENT: &str = "limits = { handshake = 600, keep_alive = 600 }";

/// Ports of the server: an echo, and one that answers requests.
const ECHO: u16 = 7030;
const WEB: u16 = 7031;

/// Answers requests with a body of the length that they ask for. Returns the number of requests.
fn web(listener: TcpListener) -> Arc<AtomicU64> {
    let asked = Arc::new(AtomicU64::new(0));
    let count = asked.clone();
    thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let count = count.clone();
            thread::spawn(move || {
                let mut from = BufReader::new(stream.try_clone().unwrap());
                while let Some(path) = head(&mut from) {
                    let body = vec![b'x'; path.trim_start_matches('/').parse().unwrap()];
                    count.fetch_add(1, Relaxed);
                    let fields = format!("Cache-Control: max-age=1000\r\nContent-Length: {}\r\n", body.len());
                    let head = format!("HTTP/1.1 200 OK\r\n{fields}\r\n").into_bytes();
                    // in one piece, or else the body waits for a delayed acknowledgement
                    if stream.write_all(&[head, body].concat()).is_err() {
                        return;
                    }
                }
            });
        }
    });
    asked
}

/// Reads a head. Returns the second word of its first line, or `None` at the end of the stream.
fn head(from: &mut impl BufRead) -> Option<String> {
    let mut first = String::new();
    from.read_line(&mut first).ok().filter(|n| *n > 0)?;
    loop {
        let mut line = String::new();
        from.read_line(&mut line).ok()?;
        if line.trim_end().is_empty() {
            return first.split(' ').nth(1).map(String::from);
        }
    }
}

/// A request for so many bytes, and its reply.
fn get(stream: &mut TcpStream, length: usize) {
    stream.write_all(format!("GET /{length} HTTP/1.1\r\nHost: a.example\r\n\r\n").as_bytes()).unwrap();
    let mut from = BufReader::new(stream);
    assert_eq!(head(&mut from).as_deref(), Some("200"), "no reply");
    let mut body = vec![0; length];
    from.read_exact(&mut body).unwrap();
    assert!(body.iter().all(|byte| *byte == b'x') && from.buffer().is_empty(), "another body");
}

/// A proxy on the loopback device that copies: a plug, and a site.
fn copying(dir: &TempDir, more: &[&str]) -> (Running, [SocketAddr; 2]) {
    let at = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
    let servers = TcpListener::bind("127.0.0.1:0").unwrap();
    let plug = listener("plug", &at[0].to_string(), &format!("target = \"{}\"", loopback_echo()));
    let site = listener("http", &at[1].to_string(), &format!("route = [{{ pool = \"web\" }}]\n{PATIENT}"));
    let pool = format!("[pool.web]\nservers = [\"{}\"]\n", servers.local_addr().unwrap());
    web(servers);
    let file = dir.path().join("longsplice.toml");
    fs::write(&file, plug + &site + &pool).unwrap();
    let arguments = ["--copy-only", "--log-format", "json", "--config", file.to_str().unwrap()];
    (Running::start(Command::new(LONGSPLICE), None, &arguments, more), at)
}

/// Three upgrades in a row, with some hundred clients who stay.
#[test]
fn hundreds_of_clients_stay_over_three_upgrades() {
    const EACH: usize = 150;
    let dir = tempfile::tempdir().unwrap();
    let (first, [plug, site]) = copying(&dir, &[]);
    let mut proxies = Dynasty::of(first);
    let [mut copied, silent_there, mut idle, mut silent] =
        [plug, plug, site, site].map(|at| (0..EACH).map(|_| connect(at)).collect::<Vec<_>>());
    for n in 0..4 {
        copied.iter_mut().for_each(|stream| round_trip(stream, &[n; 1000]));
        idle.iter_mut().for_each(|stream| get(stream, 100));
        if n < 3 {
            // accepted, and not on their way from the queue
            eventually("all are served", || (proxies.first.flows().len() == 2 * EACH).then_some(()));
            let said = proxies.upgrade(&[]);
            let want = format!("not spliced, and handed over: {}\nstay with the old process: 0", 4 * EACH);
            assert!(said.contains(&want), "{said}\n{}", proxies.first.messages());
        }
    }
    // while all of them are connected, those before are gone
    assert!(proxies.first.wait().success(), "{}", proxies.first.messages());
    proxies.others[..2].iter().for_each(|number| gone(*number));
    silent.iter_mut().for_each(|stream| get(stream, 7));
    drop((copied, silent_there, idle, silent));
    proxies.first.flows_end();
    proxies.stop();
    let records = proxies.first.records();
    let of_plug: Vec<_> = records.iter().filter(|record| record["listener"] == "plug").collect();
    let count = |bytes: u64| of_plug.iter().filter(|record| record["bytes_up"] == bytes).count();
    assert_eq!((of_plug.len(), count(4000), count(0)), (2 * EACH, EACH, EACH), "{of_plug:#?}");
    assert!(of_plug.iter().all(|record| record["processes"] == 4 && record["how"] == "closed"), "{of_plug:#?}");
    let requests = records.iter().filter(|record| record["listener"] == "http").count();
    assert_eq!(requests, 5 * EACH, "a line for each request");
}

/// What neither host has taken yet is in the hands of the old process: no byte is lost, doubled or out of order.
#[test]
fn bytes_in_hand_go_along() {
    const SIZE: usize = 8_000_000;
    let dir = tempfile::tempdir().unwrap();
    let servers = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = servers.local_addr().unwrap().to_string();
    let mut proxies = Dynasty::of(Running::copying(&to, &["--log-format", "json"]));
    let at = proxies.first.address();
    let client = connect(at);
    let server = servers.accept().unwrap().0;
    let bytes = |seed| {
        let mut bytes = vec![0; SIZE];
        pattern::fill(seed, 0, &mut bytes);
        bytes
    };
    setsockopt(&server, sockopt::RcvBuf, &20_000).unwrap();
    setsockopt(&client, sockopt::RcvBuf, &20_000).unwrap();
    thread::scope(|scope| {
        // both send as much as they can, and nobody reads
        let senders = [(&client, 1), (&server, 2)].map(|(of, seed)| {
            let mut of = of.try_clone().unwrap();
            scope.spawn(move || {
                of.write_all(&bytes(seed)).unwrap();
                of.shutdown(Shutdown::Write).unwrap();
            })
        });
        let before = || proxies.first.flow()["bytes_up"].as_u64();
        let mut last = None;
        eventually("no byte moves", || {
            let now = before();
            (std::mem::replace(&mut last, now) == now && now > Some(0)).then_some(())
        });
        for _ in 0..2 {
            let said = proxies.upgrade(&[]);
            assert!(said.contains("handed over: 1\nstay with the old process: 0"), "{said}");
        }
        for (mut of, seed) in [(&server, 1), (&client, 2)] {
            let mut got = Vec::new();
            of.read_to_end(&mut got).unwrap();
            assert!(got == bytes(seed), "{} bytes of seed {seed}, and not those", got.len());
        }
        senders.into_iter().for_each(|sender| sender.join().unwrap());
    });
    proxies.first.flows_end();
    assert!(proxies.first.wait().success());
    proxies.stop();
    drop(dir);
    let records = proxies.first.records();
    assert_eq!(records.len(), 1, "{records:#?}");
    let carried = |key: &str| records[0][key].as_u64();
    assert_eq!((carried("bytes_up"), carried("bytes_down")), (Some(SIZE as u64), Some(SIZE as u64)), "{records:#?}");
}

/// A new program that takes all connections of these listeners, and speaks the protocol up to some step.
fn player(dir: &TempDir, name: &str, listeners: &str, steps: &str) -> String {
    let takes = format!(
        "def die():
    os.kill(os.getpid(), signal.SIGKILL)
for name, protocol in {listeners}:
    say({{'say': 'listens', 'name': name, 'protocol': protocol}})
takes = {{'version': offer['connections'], 'sockets': 1000, 'splices': False}}
prepared = {{'say': 'prepared', 'program': 'played', 'takes': takes}}
"
    );
    upgrade::player(dir, name, &(takes + steps))
}

/// Whatever becomes of a new program, and when: all connections go on, in the process that serves then. Debian package: python3.
#[test]
#[ignore = "root"]
fn a_new_program_that_fails_leaves_all_connections_as_they_were() {
    let dir = tempfile::tempdir().unwrap();
    let (first, [plug, site]) = copying(&dir, &[]);
    let mut proxies = Dynasty::of(first);
    let (mut copied, mut idle) = (connect(plug), connect(site));
    let mut go_on = || {
        round_trip(&mut copied, b"hello");
        get(&mut idle, 10);
    };
    let listeners = format!("[('plug-{plug}', 'plug'), ('http-{site}', 'http')]");
    let before = "say(prepared)\n";
    let two = "say(prepared)\nhear(); hear()\n";
    let all = "say(prepared)\nwhile hear()['say'] != 'commit': pass\n";
    for (name, steps, is_early) in [
        ("dies at once", "die()".to_owned(), true),
        ("refuses", "say({'say': 'refused', 'why': 'I may not'})\ntime.sleep(1000)".to_owned(), true),
        ("hangs", "time.sleep(1000)".to_owned(), true),
        ("says nonsense", "say({'say': 'yours'})\ntime.sleep(1000)".to_owned(), true),
        ("dies when it is prepared", format!("{before}die()"), false),
        ("hangs when it is prepared", format!("{before}time.sleep(1000)"), false),
        (
            "refuses when it is prepared",
            format!("{before}say({{'say': 'refused', 'why': 'no'}})\ntime.sleep(1000)"),
            false,
        ),
        ("dies with a part of them", format!("{two}die()"), false),
        ("hangs with a part of them", format!("{two}time.sleep(1000)"), false),
        ("dies with all of them", format!("{all}die()"), false),
        ("hangs with all of them", format!("{all}time.sleep(1000)"), false),
        ("refuses with all of them", format!("{all}say({{'say': 'refused', 'why': 'no'}})\ntime.sleep(1000)"), false),
    ] {
        go_on();
        let player = player(&dir, &name.replace(' ', "-"), &listeners, &steps);
        let why = proxies.first.client_error(&["upgrade", "--limit", "3", "--binary", &player]);
        assert_eq!(why.contains("everything stays as it is"), is_early, "{name}: {why}");
        if let Some(number) = why.split("as process ").nth(1).and_then(|rest| rest.split_once(':')) {
            proxies.others.push(number.0.parse().unwrap());
        } else {
            assert!(is_early, "{name}: {why}");
        }
        go_on();
    }
    assert!(proxies.first.wait().success(), "{}", proxies.first.messages());
    let (last, earlier) = proxies.others.split_last().unwrap();
    earlier.iter().for_each(|number| gone(*number));
    assert!(Path::new(&format!("/proc/{last}")).exists());
    proxies.stop();
}

/// Only one process has the directory of a cache: the next one finds what is stored there, and stores more. Debian package: python3.
#[test]
#[ignore = "root"]
fn caches_go_over() {
    let dir = tempfile::tempdir().unwrap();
    let servers = TcpListener::bind("127.0.0.1:0").unwrap();
    let pool = format!("[pool.web]\nservers = [\"{}\"]\n", servers.local_addr().unwrap());
    let asked = web(servers);
    let at = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let cache =
        format!("cache = {{ dir = \"{}\", size = 30000000, object = 15000000 }}", dir.path().join("cache").display());
    let route = "route = [{ pool = \"web\" }]";
    let site = listener("http", &at.to_string(), &format!("{route}\n{PATIENT}\n{cache}"));
    let file = dir.path().join("longsplice.toml");
    fs::write(&file, site + &pool).unwrap();
    let arguments = ["--copy-only", "--config", file.to_str().unwrap()];
    let mut proxies = Dynasty::of(Running::start(Command::new(LONGSPLICE), None, &arguments, &[]));
    // one that has begun stays, and is served without the cache in the end
    let mut begun = connect(at);
    begun.write_all(b"GET /1000 HTTP/1.1\r\n").unwrap();
    let fetches = |length: usize| {
        let before = asked.load(Relaxed);
        get(&mut connect(at), length);
        asked.load(Relaxed) - before
    };
    let until_stored = |length| eventually("it is stored", || (fetches(length) == 0).then_some(()));
    until_stored(1000);
    eventually("it is read", || (unread(at, begun.local_addr().unwrap()) == Some(0)).then_some(()));
    for n in 1..3 {
        proxies.upgrade(&[]);
        assert_eq!((1..=n).map(|n| fetches(1000 * n)).sum::<u64>(), 0, "{}", proxies.first.messages());
        assert_eq!(fetches(1000 * (n + 1)), 1);
        until_stored(1000 * (n + 1));
    }
    begun.write_all(b"Host: a.example\r\n\r\n").unwrap();
    let mut all = Vec::new();
    begun.read_to_end(&mut all).unwrap();
    assert!(all.starts_with(b"HTTP/1.1 200") && all.ends_with(&[b'x'; 1000]), "{}", all.len());
    // a program that dies when it was let in, and another one that only would not have the cache
    let let_in = "say(prepared)\nwhile hear()['say'] != 'commit': pass\ndie()";
    let player = player(&dir, "player", "[]", let_in);
    let why = proxies.first.client_error(&["upgrade", "--limit", "3", "--binary", &player]);
    let number =
        why.split("as process ").nth(1).and_then(|rest| rest.split_once(':')).unwrap_or_else(|| panic!("{why}"));
    proxies.others.push(number.0.parse().unwrap());
    assert_eq!((1..4).map(|n| fetches(1000 * n)).sum::<u64>(), 0, "{}", proxies.first.messages());
    // in use by somebody else: the upgrade is refused, and all stays as it is
    let another = tempfile::tempdir().unwrap();
    let foreign = fs::File::create(another.path().join("lock")).unwrap();
    let _held = Flock::lock(foreign, FlockArg::LockExclusiveNonblock).unwrap();
    let text = fs::read_to_string(&file).unwrap();
    let here = dir.path().join("cache").display().to_string();
    fs::write(&file, text.replace(&here, &another.path().display().to_string())).unwrap();
    let why = proxies.first.client_error(&["upgrade"]);
    assert!(why.contains("another program has its cache there") && why.contains("everything stays"), "{why}");
    assert_eq!(fetches(1000), 0);
    let (last, earlier) = proxies.others.split_last().unwrap();
    earlier.iter().for_each(|number| gone(*number));
    assert!(Path::new(&format!("/proc/{last}")).exists());
    proxies.stop();
}

/// One that does not have the listener any more, or is of a version before there was this: connections stay where they are.
#[test]
fn what_the_new_program_does_not_know_stays() {
    let dir = tempfile::tempdir().unwrap();
    let (first, [plug, site]) = copying(&dir, &[]);
    let mut proxies = Dynasty::of(first);
    let (mut copied, mut idle) = (connect(plug), connect(site));
    round_trip(&mut copied, b"hello");
    get(&mut idle, 10);
    let file = dir.path().join("longsplice.toml");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replacen("protocol = \"plug\"", "protocol = \"plug\"\nname = \"another\"", 1)).unwrap();
    let said = proxies.upgrade(&[]);
    assert!(said.contains("handed over: 1\nstay with the old process: 1"), "{said}");
    round_trip(&mut copied, b"here");
    get(&mut idle, 20);
    drop(copied);
    assert!(proxies.first.wait().success(), "{}", proxies.first.messages());
    let line = proxies.first.records().into_iter().find(|record| record["listener"] == "plug").unwrap();
    assert_eq!((&line["how"], &line["processes"]), (&"closed".into(), &Value::Null), "{line}");
    get(&mut idle, 30);
    proxies.stop();
}

/// The head of a request is in the hands of the old process: it answers, and closes the connection.
#[test]
fn a_request_that_has_begun_is_answered_where_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let (first, [_, site]) = copying(&dir, &[]);
    let mut proxies = Dynasty::of(first);
    let mut begun = connect(site);
    get(&mut begun, 10);
    begun.write_all(b"GET /20 HTTP/1.1\r\n").unwrap();
    eventually("it is read", || (unread(site, begun.local_addr().unwrap()) == Some(0)).then_some(()));
    let said = proxies.upgrade(&[]);
    assert!(said.contains("handed over: 0\nstay with the old process: 1"), "{said}");
    begun.write_all(b"Host: a.example\r\n\r\n").unwrap();
    let mut all = String::new();
    begun.read_to_string(&mut all).unwrap();
    assert!(all.starts_with("HTTP/1.1 200") && all.ends_with(&"x".repeat(20)), "{all}");
    assert!(proxies.first.wait().success(), "{}", proxies.first.messages());
    proxies.stop();
}

/// Bytes that wait in the socket of a connection of this host.
fn unread(local: SocketAddr, remote: SocketAddr) -> Option<u64> {
    let hex = |at: SocketAddr| match at {
        SocketAddr::V4(at) => format!("{:08X}:{:04X}", u32::from_ne_bytes(at.ip().octets()), at.port()),
        SocketAddr::V6(_) => unreachable!("of IPv4"),
    };
    let text = fs::read_to_string("/proc/net/tcp").unwrap();
    let line = text.lines().find(|line| line.contains(&format!("{} {}", hex(local), hex(remote))))?;
    u64::from_str_radix(line.split_whitespace().nth(4)?.split_once(':')?.1, 16).ok()
}

/// Clients of each kind stay over two upgrades, in both families: copied below their threshold, tracked from their SYN on, between two
/// requests of which one was spliced, or silent. What they do next, the process that serves then does.
#[test]
#[ignore = "root"]
fn clients_of_each_kind_go_over() {
    const LONG: usize = 3_000_000;
    let at = |family, port| FORWARDER_TO_CLIENT.port(family, port);
    let mut text = String::new();
    for family in Family::BOTH {
        let target = format!("target = \"{}\"\n", SERVER.port(family, ECHO));
        let plug = |port: u16, more: &str| {
            listener("plug", &at(family, port).to_string(), &format!("{target}{PATIENT}\n{more}"))
        };
        text += &plug(7100, "policy = { splice = 1000 }");
        text += &plug(7101, "policy = { splice = \"never\" }");
        text += &plug(7102, "proxy_protocol = { from = [\"0.0.0.0/0\", \"::/0\"] }");
        text += &plug(7103, "trigger = [{ bytes = 60000, then = \"kill\" }]\npolicy = { splice = \"never\" }");
        text += &listener("http", &at(family, 7104).to_string(), PATIENT);
        text += &listener("socks5", &at(family, 7105).to_string(), PATIENT);
    }
    let setting = Setting::new(&text);
    for family in Family::BOTH {
        setting.echo(SERVER.port(family, ECHO));
        web(setting.listen(SERVER.port(family, WEB)));
    }
    let mut proxies = Dynasty::of(setting.start_with(&["--log-format", "json"]));
    let get = |stream: &mut TcpStream, family, length: usize| {
        let server = SERVER.port(family, WEB);
        write!(stream, "GET http://{server}/{length} HTTP/1.1\r\nHost: {server}\r\n\r\n").unwrap();
        let mut from = BufReader::new(stream);
        assert_eq!(head(&mut from).as_deref(), Some("200"), "no reply");
        from.read_exact(&mut vec![0; length]).unwrap();
        assert!(from.buffer().is_empty());
    };
    let each: Vec<_> =
        Family::BOTH.into_iter().flat_map(|family| (7100..=7105).map(move |port| (family, port))).collect();
    let mut all: Vec<_> = each.iter().map(|(family, port)| setting.connect(at(*family, *port))).collect();
    let mut silent: Vec<_> = Family::BOTH.into_iter().map(|family| setting.connect(at(family, 7104))).collect();
    for upgrades in 0..3 {
        for ((family, port), stream) in each.iter().zip(&mut all) {
            match port {
                7100 if upgrades == 2 => round_trip(stream, &[1; 50_000]),
                7100 => round_trip(stream, &[1; 100]),
                7101 => round_trip(stream, &[1; 30_000]),
                7103 => round_trip(stream, &[1; 5000]),
                7104 => [100, LONG].iter().for_each(|length| get(stream, *family, *length)),
                _ => {}
            }
        }
        if upgrades < 2 {
            let said = proxies.upgrade(&[]);
            assert!(said.contains("stay with the old process: 0"), "{said}\n{}", proxies.first.messages());
        }
    }
    assert!(proxies.first.wait().success(), "{}", proxies.first.messages());
    gone(proxies.others[0]);
    eventually("those above their threshold are spliced", || {
        (proxies.first.flows_in("spliced") == Family::BOTH.len()).then_some(())
    });
    for ((family, port), stream) in each.iter().zip(&mut all) {
        match port {
            7102 => {
                let (name, ip) = if *family == Family::V4 { ("TCP4", "192.0.2.9") } else { ("TCP6", "2001:db8::9") };
                write!(stream, "PROXY {name} {ip} {ip} 1000 80\r\n").unwrap();
                round_trip(stream, b"hello");
            }
            // 30,000 bytes have passed before, both ways, in three processes
            7103 => {
                stream.write_all(&[1; 20_000]).unwrap();
                let mut rest = Vec::new();
                let ended = stream.read_to_end(&mut rest);
                assert!(ended.is_err_and(|e| e.kind() == ErrorKind::ConnectionReset), "{}", rest.len());
            }
            7105 => {
                stream.write_all(&[5, 1, 0]).unwrap();
                stream.read_exact(&mut [0; 2]).unwrap();
            }
            _ => {}
        }
    }
    for (family, stream) in Family::BOTH.into_iter().zip(&mut silent) {
        get(stream, family, 10);
    }
    drop((all, silent));
    proxies.first.flows_end();
    proxies.stop();
    let records = proxies.first.records();
    let of = |port: u64| -> Vec<&Value> {
        let is = |record: &&Value| record["listen"].as_str().is_some_and(|at| at.ends_with(&format!(":{port}")));
        records.iter().filter(is).collect()
    };
    for (port, bytes) in [(7100, 50_200), (7101, 90_000)] {
        assert!(of(port).iter().all(|r| r["bytes_up"] == bytes && r["bytes_down"] == bytes), "{:#?}", of(port));
        assert!(of(port).len() == 2 && of(port).iter().all(|r| r["processes"] == 3), "{:#?}", of(port));
    }
    assert!(of(7102).iter().all(|r| r["client"].as_str().is_some_and(|at| at.ends_with(":1000"))), "{:#?}", of(7102));
    assert!(of(7103).iter().all(|r| r["how"] == "stopped"), "{:#?}", of(7103));
    assert_eq!([7102, 7103, 7104].map(|port| of(port).len()), [2, 2, 2 * (3 * 2 + 1)], "{records:#?}");
    assert!(!setting.pins[0].exist(), "a clean stop leaves nothing pinned");
}
