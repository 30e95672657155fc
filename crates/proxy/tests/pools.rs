//! Pools of plugs and of TLS routes, over real sockets on the loopback device. What HTTP makes of pools is tested in its own crate.

use crate::proxying::{LIMIT, Proxy, closed};
use serde_json::Value;
use std::{
    io::ErrorKind,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};

/// A server that says its name, and then echoes.
struct Member {
    addr: SocketAddr,
    accepted: Arc<AtomicUsize>,
}

async fn member(name: u8) -> Member {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let accepted = Arc::new(AtomicUsize::new(0));
    let count = accepted.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            count.fetch_add(1, SeqCst);
            tokio::spawn(async move {
                let (mut from, mut to) = stream.split();
                // a check may be gone already
                if to.write_all(&[name]).await.is_ok() {
                    let _ = tokio::io::copy(&mut from, &mut to).await;
                }
            });
        }
    });
    Member { addr, accepted }
}

async fn plug(servers: &[SocketAddr], more: &str) -> Proxy {
    let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
    Proxy::start("plug", &format!("pool = \"p\"\n[pool.p]\nservers = {servers:?}\n{more}\n")).await
}

/// A client, and the name of its server.
async fn client(proxy: &Proxy) -> (TcpStream, u8) {
    let mut client = proxy.connect().await;
    let name = timeout(LIMIT, client.read_u8()).await.unwrap().unwrap();
    (client, name)
}

/// What a client sends comes back from its server.
async fn echoes((client, name): &mut (TcpStream, u8)) {
    client.write_all(&[*name; 1000]).await.unwrap();
    let mut back = [0; 1000];
    timeout(LIMIT, client.read_exact(&mut back)).await.unwrap().unwrap();
    assert_eq!(back, [*name; 1000]);
}

async fn eventually(what: &str, mut look: impl FnMut() -> bool) {
    let looking = async {
        while !look() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    timeout(LIMIT, looking).await.unwrap_or_else(|_| panic!("{what}: not within {LIMIT:?}"));
}

fn of<'a>(line: &'a Value, keys: &[&str]) -> Vec<&'a str> {
    keys.iter().map(|key| line[key].as_str().unwrap_or("-")).collect()
}

#[tokio::test]
async fn the_next_server_if_one_does_not_accept() {
    let (dead, [a, b]) = (closed().await, [member(b'a').await, member(b'b').await]);
    let proxy = plug(&[dead, a.addr, b.addr], "failures = 2").await;
    let mut names = Vec::new();
    for _ in 0..9 {
        // what is sent before there is a server is not lost
        let mut client = proxy.connect().await;
        client.write_all(b"early").await.unwrap();
        let name = timeout(LIMIT, client.read_u8()).await.unwrap().unwrap();
        let mut back = [0; 5];
        timeout(LIMIT, client.read_exact(&mut back)).await.unwrap().unwrap();
        assert_eq!(&back, b"early");
        names.push(name);
    }
    assert_eq!(String::from_utf8(names).unwrap(), "ababababa", "the one that is dead has no turn after two failures");
    let counters = proxy.server.counters();
    let seen = [counters.retries, counters.servers_down, counters.unreachable, counters.relayed];
    assert_eq!(seen, [2, 1, 0, 9]);
    for line in proxy.lines().await {
        let want = if line["server"] == a.addr.to_string() { a.addr } else { b.addr }.to_string();
        assert_eq!(of(&line, &["pool", "member", "server", "target"]), ["p", &want, &want, &want], "{line}");
    }
}

#[tokio::test]
async fn no_server_accepts() {
    let dead = [closed().await, closed().await];
    let proxy = plug(&dead, "tries = 2").await;
    let mut client = proxy.connect().await;
    let end = timeout(LIMIT, client.read_u8()).await.unwrap().unwrap_err();
    assert_eq!(end.kind(), ErrorKind::ConnectionReset, "as the server would have done");
    let line = proxy.line().await;
    assert_eq!(
        of(&line, &["how", "pool", "member", "server"]),
        ["unreachable", "p", &dead[1].to_string(), "-"],
        "{line}"
    );
    assert_eq!(proxy.server.counters().retries, 1);
}

#[tokio::test]
async fn live_connections_count() {
    let all = [member(b'a').await, member(b'b').await];
    let servers = [format!("\"{}\"", all[0].addr), format!("{{ address = \"{}\", weight = 2 }}", all[1].addr)];
    let more = format!("pool = \"p\"\n[pool.p]\nservers = [{}]\nbalance = \"least-connections\"\n", servers.join(","));
    let proxy = Proxy::start("plug", &more).await;
    let mut clients = Vec::new();
    for _ in 0..6 {
        clients.push(client(&proxy).await);
    }
    let of_b = |clients: &[(TcpStream, u8)]| clients.iter().filter(|(_, name)| *name == b'b').count();
    assert_eq!(of_b(&clients), 4, "two for one");
    for client in &mut clients {
        echoes(client).await;
    }
    // all of the second one end
    clients.retain(|(_, name)| *name == b'a');
    eventually("their ends", || proxy.server.counters().live == 2).await;
    for _ in 0..4 {
        clients.push(client(&proxy).await);
    }
    assert_eq!(of_b(&clients), 4);
}

#[tokio::test]
async fn a_full_server_is_waited_for() {
    let a = member(b'a').await;
    let limit = |queue: u32| format!("max_connections = 1\nqueue = {queue}\nqueue_wait = 60");
    let proxy = plug(&[a.addr], &limit(1)).await;
    let mut first = client(&proxy).await;
    let mut second = proxy.connect().await;
    second.write_all(b"early").await.unwrap();
    eventually("both", || proxy.server.counters().live == 2).await;
    assert_eq!(a.accepted.load(SeqCst), 1);
    sleep(Duration::from_millis(30)).await; // so long it waits at least
    echoes(&mut first).await;
    drop(first);
    let mut seen = [0; 6];
    timeout(LIMIT, second.read_exact(&mut seen)).await.unwrap().unwrap();
    assert_eq!(&seen, b"aearly");
    drop(second);
    let lines = proxy.lines().await;
    assert!(lines[1]["connect_ms"].as_u64() >= Some(30), "with the time in the queue: {lines:?}");

    let full = plug(&[a.addr], &limit(0)).await;
    let _first = client(&full).await;
    let end = timeout(LIMIT, full.connect().await.read_u8()).await.unwrap().unwrap_err();
    assert_eq!(end.kind(), ErrorKind::ConnectionReset);
    assert_eq!(full.server.counters().over_limit, 1);
    drop(_first);
    let lines = full.lines().await;
    let limited = lines.iter().find(|line| line["how"] == "limit").unwrap();
    let why = "too many of these at once: connections to servers of the pool";
    assert_eq!(of(limited, &["refusal", "pool", "member", "server"]), [why, "p", "-", "-"], "{limited}");
}

#[tokio::test]
async fn a_backup_serves_while_no_other_does() {
    let (main, spare) = (closed().await, member(b's').await);
    let servers = format!("[\"{main}\", {{ address = \"{}\", backup = true }}]", spare.addr);
    let proxy = Proxy::start("plug", &format!("pool = \"p\"\n[pool.p]\nservers = {servers}\nfailures = 2\n")).await;
    for _ in 0..4 {
        assert_eq!(client(&proxy).await.1, b's');
    }
    assert_eq!(proxy.server.counters().retries, 2, "until the other one was taken out");
}

#[tokio::test]
async fn checks_without_requests() {
    let a = member(b'a').await;
    // nobody listens on a bound socket until somebody does
    let late = tokio::net::TcpSocket::new_v4().unwrap();
    late.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let at = late.local_addr().unwrap();
    let proxy = plug(&[at, a.addr], "check = { interval = 0.02, fall = 2, rise = 2 }\nfailures = 1000000").await;
    eventually("the one that is down", || proxy.server.counters().servers_down == 1).await;
    for _ in 0..4 {
        assert_eq!(client(&proxy).await.1, b'a');
    }
    assert_eq!(proxy.server.counters().retries, 0, "nobody has tried it");
    eventually("checks of the other one", || a.accepted.load(SeqCst) >= 4 + 2).await;
    let listener = late.listen(16).unwrap();
    let accepting = async {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.write_all(b"c").await; // a check may be gone already
        }
    };
    let using = async {
        eventually("the one that is back", || proxy.server.counters().servers_up == 1).await;
        let names = [client(&proxy).await.1, client(&proxy).await.1];
        assert!(names.contains(&b'c') && names.contains(&b'a'), "{names:?}");
    };
    tokio::select! {
        () = accepting => {}
        () = using => {}
    }
}

#[tokio::test]
async fn checks_that_talk() {
    let echo = member(b'a').await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap(); // the kernel accepts for it
    let check = r"{ send = 'PING\r\n', expect = '^aPING', interval = 0.02, timeout = 0.2, fall = 1 }";
    let proxy = plug(&[silent.local_addr().unwrap(), echo.addr], &format!("check = {check}")).await;
    eventually("the one that says nothing", || proxy.server.counters().servers_down == 1).await;
    for _ in 0..3 {
        assert_eq!(client(&proxy).await.1, b'a');
    }
    assert_eq!(proxy.server.counters().servers_down, 1);
    let other = plug(&[echo.addr], &format!("check = {}", check.replace("aPING", "PONG"))).await;
    eventually("the one that says something else", || other.server.counters().servers_down == 1).await;
}

/// OpenSSL answers whichever version it has; what is no server of TLS does not.
#[tokio::test]
async fn checks_by_tls() {
    let echo = member(b'a').await;
    for version in ["-tls1_2", "-tls1_3"] {
        let dir = tempfile::tempdir().unwrap();
        let (_openssl, at) = crate::tls::server(dir.path(), "DNS:a.example", version).await;
        let more = "check = { tls = true, host = \"a.example\", interval = 0.02, fall = 1 }";
        let proxy = plug(&[echo.addr, at], more).await;
        eventually("the one that is not of TLS", || proxy.server.counters().servers_down == 1).await;
        let checked = echo.accepted.load(SeqCst);
        eventually("more checks", || echo.accepted.load(SeqCst) > checked + 3).await;
        assert_eq!(proxy.server.counters().servers_down, 1, "{version}");
        let pools = proxy.server.pools();
        assert_eq!(pools[0].members.iter().map(|m| m.state).collect::<Vec<_>>(), ["down", "up"], "{version}");
    }
}

#[tokio::test]
async fn routes_of_tls_lead_to_pools() {
    let all = [member(b'a').await, member(b'b').await];
    let servers: Vec<String> = [closed().await, all[0].addr, all[1].addr].iter().map(ToString::to_string).collect();
    let routes = "[[listener.route]]\nname = \"a.example\"\npool = \"p\"\n[[listener.route]]\nname = \"b.example\"";
    let proxy = Proxy::start("tls", &format!("{routes}\n[pool.p]\nservers = {servers:?}\n")).await;
    let mut names = Vec::new();
    for _ in 0..2 {
        let mut client = proxy.connect().await;
        let hello = hello("a.example");
        client.write_all(&hello).await.unwrap();
        names.push(timeout(LIMIT, client.read_u8()).await.unwrap().unwrap());
        let mut back = vec![0; hello.len()];
        timeout(LIMIT, client.read_exact(&mut back)).await.unwrap().unwrap();
        assert_eq!(back, hello, "the server gets what the client has sent");
    }
    assert_eq!(names, b"ab");
    let lines = proxy.lines().await;
    let servers = [&all[0], &all[1]].map(|m| m.addr.to_string());
    let port = proxy.server.listen_addrs()[0].port();
    for server in servers {
        let line = lines.iter().find(|line| line["member"] == server.as_str()).unwrap();
        let want = ["p", &server, &format!("a.example:{port}")];
        assert_eq!(of(line, &["pool", "server", "target"]), want, "{line}");
    }
}

/// A ClientHello that asks for this name (RFC 8446, 4.1.2; RFC 6066, 3).
fn hello(name: &str) -> Vec<u8> {
    let sized = |bytes: Vec<u8>| [&u16::try_from(bytes.len()).unwrap().to_be_bytes()[..], &bytes].concat();
    let entry = [&[0][..], &sized(name.as_bytes().to_vec())].concat();
    let extension = [&[0, 0][..], &sized(sized(entry))].concat();
    let body = [&[3, 3][..], &[7; 32], &[0], &[0, 2, 0x13, 1], &[1, 0], &sized(extension)].concat();
    let message = [&[1, 0][..], &sized(body)].concat();
    [&[22, 3, 1][..], &sized(message)].concat()
}
