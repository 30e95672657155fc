//! The whole server over real sockets on the loopback device, where everything is copied: handshakes, refusals,
//! limits, relayed bytes, and the line that each connection leaves in the access log.

use crate::proxying::{LIMIT, OPEN, Proxy, closed};
use longsplice_engine::{Refusal, Splicer};
use longsplice_proxy::{Config, Server, StartError};
use serde_json::Value;
use std::{io::ErrorKind, net::SocketAddr, path::Path, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};

/// A SOCKS 5 client's messages for an IPv4 target, without authentication, all at once.
fn socks5(target: SocketAddr) -> Vec<u8> {
    let SocketAddr::V4(v4) = target else { panic!() };
    [&[5, 1, 0, 5, 1, 0, 1][..], &v4.ip().octets(), &v4.port().to_be_bytes()].concat()
}

fn socks5_name(name: &str, port: u16) -> Vec<u8> {
    [&[5, 1, 0, 5, 1, 0, 3, u8::try_from(name.len()).unwrap()], name.as_bytes(), &port.to_be_bytes()].concat()
}

/// Method 0, then a failure.
fn refused(code: u8) -> Vec<u8> {
    vec![5, 0, 5, code, 0, 1, 0, 0, 0, 0, 0, 0]
}

/// A server that says `hello`, then sends back what it gets until the client's FIN, then `bye`.
async fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from, mut to) = stream.split();
                to.write_all(b"hello").await.unwrap();
                tokio::io::copy(&mut from, &mut to).await.unwrap();
                to.write_all(b"bye").await.unwrap();
                to.shutdown().await.unwrap();
            });
        }
    });
    addr
}

#[tokio::test]
async fn loopback_is_guarded() {
    let proxy = Proxy::start("socks5", "").await;
    assert_eq!(proxy.answer(&socks5(closed().await)).await, refused(2));
    let line = proxy.line().await;
    assert_eq!((&line["how"], &line["listener"], &line["id"]), (&"denied".into(), &"socks5".into(), &Value::Null));
    assert_eq!(line["refusal"], "guarded address (loopback)");
    assert_eq!(proxy.server.counters().denied, 1);
}

#[tokio::test]
async fn names_that_resolve_to_loopback_are_guarded() {
    let proxy = Proxy::start("socks5", "rules = [{ action = \"allow\", target = \"localhost\" }]").await;
    for name in ["localhost", "127.1", "::1", "[::ffff:127.0.0.1]"] {
        let reply = proxy.answer(&socks5_name(name, 80)).await;
        // The resolver may not know the short form, and brackets around nothing are no name.
        assert!([refused(2), refused(4)].contains(&reply), "{name}: {reply:?}");
    }
    assert!(proxy.lines().await.iter().all(|l| l["how"] == "denied" || l["how"] == "unreachable"));
}

#[tokio::test]
async fn refused_by_the_host() {
    let proxy = Proxy::start("socks5", OPEN).await;
    let target = closed().await;
    assert_eq!(proxy.answer(&socks5(target)).await, refused(5));
    let line = proxy.line().await;
    assert_eq!((&line["how"], &line["target"]), (&"unreachable".into(), &target.to_string().into()));
}

#[tokio::test]
async fn names_without_addresses() {
    let proxy = Proxy::start("socks5", "limits.resolve = 2").await;
    let reply = proxy.answer(&socks5_name("no-such-name.invalid", 80)).await;
    // Without a name server the lookup runs into its limit instead.
    assert!([refused(4), refused(6)].contains(&reply), "{reply:?}");
}

#[tokio::test]
async fn wrong_password() {
    let proxy = Proxy::start("socks5", "users = { ann = \"pw\" }").await;
    assert_eq!(proxy.answer(b"\x05\x01\x02\x01\x03ann\x02pX").await, [5, 2, 1, 1]);
    let line = proxy.line().await;
    assert_eq!((&line["how"], &line["user"]), (&"auth-failed".into(), &"ann".into()));
}

#[tokio::test]
async fn commands_that_are_not_supported() {
    let proxy = Proxy::start("socks5", "").await;
    assert_eq!(proxy.answer(&[5, 1, 0, 5, 4, 0, 1, 0, 0, 0, 0, 0, 0]).await, refused(7));
    assert_eq!(proxy.line().await["how"], "bad-request");
}

/// The answer arrives although bytes lie unread at our end, which makes a careless close send a reset.
#[tokio::test]
async fn a_refusal_is_not_overtaken_by_a_reset() {
    let proxy = Proxy::start("socks5", "").await;
    let input = [socks5(closed().await), vec![b'x'; 20_000]].concat();
    let mut client = proxy.connect().await;
    client.write_all(&input).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let mut seen = Vec::new();
    client.read_to_end(&mut seen).await.unwrap();
    assert_eq!(seen, refused(2));
}

#[tokio::test]
async fn silent_clients_are_cut_off() {
    let proxy = Proxy::start("socks5", "limits.handshake = 0.1").await;
    let mut silent = Vec::new();
    for input in [&b""[..], b"\x05", b"\x05\x01\x00", b"\x05\x01\x00\x05\x01"] {
        let mut client = proxy.connect().await;
        client.write_all(input).await.unwrap();
        silent.push(client);
    }
    for client in &mut silent {
        let mut seen = Vec::new();
        // FIN or reset: anything but an open connection.
        let _ = timeout(LIMIT, client.read_to_end(&mut seen)).await.unwrap();
    }
    let lines = proxy.lines().await;
    assert!(
        lines.len() == 4 && lines.iter().all(|l| l["how"] == "timeout" && l["refusal"] == "handshake took too long")
    );
    assert_eq!(proxy.server.counters().timeouts, 4);
}

#[tokio::test]
async fn one_client_too_many_is_reset_and_has_a_line() {
    let proxy = Proxy::start("socks5", "limits.connections_per_client = 1").await;
    let first = proxy.connect().await;
    while proxy.server.counters().live < 1 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut second = proxy.connect().await;
    let e = timeout(LIMIT, second.read_u8()).await.unwrap().unwrap_err();
    assert!([ErrorKind::ConnectionReset, ErrorKind::UnexpectedEof].contains(&e.kind()), "{e}");
    drop(first);
    let lines = proxy.lines().await;
    assert_eq!(lines[0]["refusal"], "too many connections from this client");
    assert_eq!(lines.iter().map(|line| &line["how"]).collect::<Vec<_>>(), ["limit", "bad-request"]);
    assert_eq!(proxy.server.counters().over_limit, 1);
    // There is room again.
    assert_eq!(proxy.answer(&socks5(closed().await)).await, refused(2));
}

/// The number is used up within an hour only by those that were served.
#[tokio::test]
async fn one_client_too_often_is_reset() {
    let proxy = Proxy::start("socks5", "limits.new_per_client = \"3/hour\"").await;
    for _ in 0..3 {
        assert_eq!(proxy.answer(&socks5(closed().await)).await, refused(2));
    }
    for refused in 1..=2 {
        let mut client = proxy.connect().await;
        let e = timeout(LIMIT, client.read_u8()).await.unwrap().unwrap_err();
        assert!([ErrorKind::ConnectionReset, ErrorKind::UnexpectedEof].contains(&e.kind()), "{e}");
        assert_eq!(proxy.server.counters().over_limit, refused);
    }
    let lines = proxy.lines().await;
    let turned_away = lines.iter().filter(|line| line["refusal"] == "too many new connections from this client");
    assert_eq!((lines.len(), turned_away.count()), (5, 2));
}

#[tokio::test]
async fn a_plug_without_a_server_resets() {
    let proxy = Proxy::start("plug", &format!("target = \"{}\"", closed().await)).await;
    let mut client = proxy.connect().await;
    let e = timeout(LIMIT, client.read_u8()).await.unwrap().unwrap_err();
    assert_eq!(e.kind(), ErrorKind::ConnectionReset);
    assert_eq!(proxy.line().await["how"], "unreachable");
}

#[tokio::test]
async fn all_listeners_or_none() {
    let held = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let taken = held.local_addr().unwrap();
    let config = Config::from_args(&[free.to_string(), taken.to_string()], &[], &[], &[]).unwrap();
    let e = Server::start(Splicer::copying(Refusal::Unprivileged), config, crate::SERVICES).await.err().unwrap();
    assert!(matches!(&e, StartError::Listen { addr, .. } if *addr == taken), "{e}");
    assert!(e.to_string().contains("another program listens there"), "{e}");
    assert!(TcpStream::connect(free).await.is_err());
    let none = Server::start(Splicer::copying(Refusal::Unprivileged), Config::default(), crate::SERVICES).await;
    assert!(matches!(none, Err(StartError::NoListener)));
}

#[tokio::test]
async fn a_log_that_cannot_be_opened() {
    let text = "log.file = \"/nowhere/log\"\n[[listener]]\nprotocol = \"socks5\"\nlisten = \"127.0.0.1:0\"";
    let config = Config::from_toml(text, Path::new("x")).unwrap();
    let e = Server::start(Splicer::copying(Refusal::Unprivileged), config, crate::SERVICES).await.err().unwrap();
    assert!(e.to_string().starts_with("x:1:12: cannot open the access log /nowhere/log: "), "{e}");
}

#[tokio::test]
async fn stopping_lets_live_connections_be() {
    let proxy = Proxy::start("socks5", OPEN).await;
    let mut client = proxy.connect().await;
    while proxy.server.counters().live < 1 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    proxy.server.stop_accepting();
    while TcpStream::connect(proxy.server.listen_addrs()[0]).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(proxy.server.drain(Duration::from_millis(20)).await, 1);
    client.write_all(&socks5(closed().await)).await.unwrap();
    let mut seen = Vec::new();
    client.read_to_end(&mut seen).await.unwrap();
    assert_eq!(seen, refused(5));
    drop(client);
    assert_eq!(proxy.server.drain(LIMIT).await, 0);
}

// From here on bytes are relayed.

/// Sends `input` and a FIN, and expects `want` and a FIN.
async fn talk(client: &mut TcpStream, input: &[u8], want: &[u8]) {
    let (mut from, mut to) = client.split();
    let send = async {
        to.write_all(input).await.unwrap();
        to.shutdown().await.unwrap();
    };
    let mut seen = Vec::new();
    let ((), read) = tokio::join!(send, timeout(LIMIT, from.read_to_end(&mut seen)));
    read.unwrap().unwrap();
    assert!(seen == want, "{} bytes instead of {}", seen.len(), want.len());
}

fn payload() -> Vec<u8> {
    (0..1_000_003u32).map(|i| (i % 251) as u8).collect()
}

#[tokio::test]
async fn socks5_relays_with_early_data_and_half_close() {
    let proxy = Proxy::start("socks5", &format!("{OPEN}users = {{ ann = \"pw\" }}")).await;
    let target = echo().await;
    let mut client = proxy.connect().await;
    let request = &socks5(target)[3..];
    client.write_all(&[b"\x05\x01\x02\x01\x03ann\x02pw", request, b"early "].concat()).await.unwrap();
    let mut reply = [0; 14];
    client.read_exact(&mut reply).await.unwrap();
    assert_eq!(reply[..12], [5, 2, 1, 0, 5, 0, 0, 1, 127, 0, 0, 1]);
    let payload = payload();
    talk(&mut client, &payload, &[b"helloearly ", &payload[..], b"bye"].concat()).await;
    let line = proxy.line().await;
    assert_eq!((&line["how"], &line["user"]), (&"closed".into(), &"ann".into()));
    assert_eq!((&line["server"], &line["target"]), (&target.to_string().into(), &target.to_string().into()));
    assert_eq!((&line["bytes_up"], &line["bytes_down"]), (&1_000_009.into(), &1_000_017.into()));
    assert_eq!((&line["splices"], &line["refusal"]), (&0.into(), &"unprivileged".into()));
    assert!(line["id"].is_u64());
    assert_eq!(proxy.server.counters().relayed, 1);
}

#[tokio::test]
async fn socks4_relays() {
    let proxy = Proxy::start("socks5", OPEN).await;
    let target = echo().await;
    let mut client = proxy.connect().await;
    let port = target.port().to_be_bytes();
    client.write_all(&[4, 1, port[0], port[1], 127, 0, 0, 1, b'm', b'e', 0, b'!']).await.unwrap();
    let mut reply = [0; 8];
    client.read_exact(&mut reply).await.unwrap();
    assert_eq!((reply[..2].to_vec(), reply[4..].to_vec()), (vec![0, 0x5a], vec![127, 0, 0, 1]));
    talk(&mut client, b"data", b"hello!databye").await;
    assert_eq!(proxy.line().await["bytes_up"], 5);
}

#[tokio::test]
async fn names_are_resolved_and_relayed() {
    let rules = "rules = [{ action = \"allow\", target = [\"127.0.0.0/8\", \"::1\"] }]";
    let proxy = Proxy::start("socks5", rules).await;
    let target = echo().await;
    let mut client = proxy.connect().await;
    client.write_all(&socks5_name("LocalHost", target.port())).await.unwrap();
    let mut reply = [0; 12];
    client.read_exact(&mut reply).await.unwrap();
    assert_eq!(reply[..6], [5, 0, 5, 0, 0, 1]);
    talk(&mut client, b"data", b"hellodatabye").await;
    let line = proxy.line().await;
    assert_eq!(
        (&line["server"], &line["target"]),
        (&target.to_string().into(), &format!("localhost:{}", target.port()).into())
    );
}

#[tokio::test]
async fn a_plug_relays_to_loopback() {
    let proxy = Proxy::start("plug", &format!("target = \"{}\"", echo().await)).await;
    let mut client = proxy.connect().await;
    let payload = payload();
    talk(&mut client, &payload, &[b"hello", &payload[..], b"bye"].concat()).await;
    let line = proxy.line().await;
    assert_eq!(
        (&line["listener"], &line["how"], &line["bytes_up"]),
        (&"plug".into(), &"closed".into(), &1_000_003.into())
    );
}
