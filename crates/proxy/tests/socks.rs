//! BIND, UDP ASSOCIATE and look-ups of SOCKS over real sockets on the loopback device: what clients are told, what passes,
//! what is dropped and counted, the line in the access log, and what a hostile client or stranger gets.

use crate::proxying::{LIMIT, OPEN, Proxy};
use longsplice_engine::{Refusal, Splicer};
use longsplice_proxy::CounterValues;
use serde_json::Value;
use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};
use test_case::test_case;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream, UdpSocket},
    time::{sleep, timeout},
};

const BIND: u8 = 2;
const ASSOCIATE: u8 = 3;
const V6: &str = "rules = [{ action = \"allow\", target = \"::1\" }]\n";

/// `ATYP ADDR PORT`
fn address(at: SocketAddr) -> Vec<u8> {
    let port = at.port().to_be_bytes();
    match at.ip() {
        IpAddr::V4(ip) => [&[1][..], &ip.octets(), &port].concat(),
        IpAddr::V6(ip) => [&[4][..], &ip.octets(), &port].concat(),
    }
}

fn name(name: &str, port: u16) -> Vec<u8> {
    [&[3, u8::try_from(name.len()).unwrap()], name.as_bytes(), &port.to_be_bytes()].concat()
}

fn unknown() -> Vec<u8> {
    address(([0, 0, 0, 0], 0).into())
}

/// Reads an answer: its code and address.
async fn answer(client: &mut TcpStream) -> (u8, SocketAddr) {
    let read = async {
        let mut head = [0; 4];
        client.read_exact(&mut head).await.unwrap();
        assert_eq!((head[0], head[2]), (5, 0));
        let ip = match head[3] {
            1 => IpAddr::from(client.read_u32().await.unwrap().to_be_bytes()),
            4 => IpAddr::from(client.read_u128().await.unwrap().to_be_bytes()),
            other => panic!("type {other}"),
        };
        (head[1], SocketAddr::new(ip, client.read_u16().await.unwrap()))
    };
    timeout(LIMIT, read).await.expect("an answer")
}

/// Asks for a command without authentication.
async fn ask(proxy: &Proxy, command: u8, target: &[u8]) -> (TcpStream, u8, SocketAddr) {
    let mut client = proxy.connect().await;
    client.write_all(&[&[5, 1, 0, 5, command, 0], target].concat()).await.unwrap();
    let mut method = [0; 2];
    client.read_exact(&mut method).await.unwrap();
    assert_eq!(method, [5, 0]);
    let (code, bound) = answer(&mut client).await;
    (client, code, bound)
}

async fn counted(proxy: &Proxy, what: &str, is: impl Fn(&CounterValues) -> bool) {
    let wait = async {
        while !is(&proxy.server.counters()) {
            sleep(Duration::from_millis(2)).await;
        }
    };
    let Err(_) = timeout(LIMIT, wait).await else { return };
    panic!("{what}: {:?}", proxy.server.counters());
}

/// A server that sends each datagram back.
async fn echo(here: &str) -> SocketAddr {
    let socket = UdpSocket::bind(here).await.unwrap();
    let at = socket.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = vec![0; 65536];
        while let Ok((n, from)) = socket.recv_from(&mut buffer).await {
            let _ = socket.send_to(&buffer[..n], from).await;
        }
    });
    at
}

/// An association, and the socket of its client.
struct Associated {
    control: TcpStream,
    relay: SocketAddr,
    socket: UdpSocket,
}

async fn associate(proxy: &Proxy) -> Associated {
    let (control, code, relay) = ask(proxy, ASSOCIATE, &unknown()).await;
    assert_eq!(code, 0);
    assert_eq!(relay.ip(), control.peer_addr().unwrap().ip(), "where the client has reached the proxy");
    let socket = UdpSocket::bind(SocketAddr::new(relay.ip(), 0)).await.unwrap();
    Associated { control, relay, socket }
}

impl Associated {
    async fn send(&self, to: &[u8], data: &[u8]) {
        self.socket.send_to(&[&[0, 0, 0], to, data].concat(), self.relay).await.unwrap();
    }

    /// Returns a datagram, with its header.
    async fn receive(&self) -> Vec<u8> {
        let mut buffer = vec![0; 65536];
        let (n, from) = timeout(LIMIT, self.socket.recv_from(&mut buffer)).await.expect("a datagram").unwrap();
        assert_eq!(from, self.relay);
        buffer.truncate(n);
        buffer
    }

    async fn round_trip(&self, server: SocketAddr, data: &[u8]) {
        self.send(&address(server), data).await;
        assert!(self.receive().await == [&[0, 0, 0][..], &address(server), data].concat());
    }
}

#[test_case("127.0.0.1", OPEN; "v4")]
#[test_case("[::1]", V6; "v6")]
#[tokio::test]
async fn datagrams_pass_both_ways(here: &str, rules: &str) {
    let proxy = Proxy::start_at(here, "socks5", rules).await;
    let server = echo(&format!("{here}:0")).await;
    let client = associate(&proxy).await;
    for size in [0, 1, 1472, 9000, 65_000] {
        client.round_trip(server, &vec![7; size]).await;
    }
    drop(client.control);
    let line = proxy.line().await;
    assert_eq!((&line["how"], &line["command"]), (&"closed".into(), &"udp-associate".into()));
    assert_eq!((&line["bytes_up"], &line["bytes_down"]), (&75_473.into(), &75_473.into()));
    let datagrams = ["datagrams_up", "datagrams_down", "datagrams_dropped"].map(|key| line[key].as_u64().unwrap());
    assert_eq!((datagrams, &line["target"]), ([5, 5, 0], &"0.0.0.0:0".into()));
    let counters = proxy.server.counters();
    assert_eq!((counters.associations, counters.udp_up, counters.udp_down), (1, 5, 5));
}

#[tokio::test]
async fn both_families_through_one_association() {
    let rules = "rules = [{ action = \"allow\", target = [\"127.0.0.0/8\", \"::1\"] }]";
    let proxy = Proxy::start("socks5", rules).await;
    let client = associate(&proxy).await;
    client.round_trip(echo("127.0.0.1:0").await, b"four").await;
    client.round_trip(echo("[::1]:0").await, b"six").await;
    client.round_trip(echo("127.0.0.1:0").await, b"another").await;
}

#[tokio::test]
async fn datagrams_to_names_wait_for_the_look_up() {
    let rules = "rules = [{ action = \"allow\", target = [\"127.0.0.0/8\", \"::1\"] }]";
    let proxy = Proxy::start("socks5", rules).await;
    let server = echo("127.0.0.1:0").await;
    let client = associate(&proxy).await;
    // the resolver may put ::1 first, where nobody listens: then the kernel refuses, and nothing comes
    let also = UdpSocket::bind(format!("[::1]:{}", server.port())).await;
    if let Ok(also) = also {
        tokio::spawn(async move {
            let mut buffer = [0; 100];
            while let Ok((n, from)) = also.recv_from(&mut buffer).await {
                also.send_to(&buffer[..n], from).await.unwrap();
            }
        });
    }
    for n in 0..3 {
        client.send(&name("LocalHost", server.port()), &[n]).await;
    }
    for n in 0..3 {
        assert_eq!(client.receive().await.last(), Some(&n), "in order");
    }
    client.send(&name("no-such-name.invalid", 53), b"lost").await;
    counted(&proxy, "no address", |c| c.udp_unreachable == 1).await;
    client.send(&name("LocalHost", server.port()), b"more").await;
    assert!(client.receive().await.ends_with(b"more"));
}

#[tokio::test]
async fn rules_hold_for_each_destination() {
    let server = echo("127.0.0.1:0").await;
    let rules = format!("rules = [{{ action = \"allow\", target = \"127.0.0.1\", ports = {} }}]", server.port());
    let proxy = Proxy::start("socks5", &rules).await;
    let other = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let client = associate(&proxy).await;
    client.send(&address(other.local_addr().unwrap()), b"guarded").await;
    client.send(&name("localhost", other.local_addr().unwrap().port()), b"guarded, by name").await;
    client.send(&address("169.254.169.254:80".parse().unwrap()), b"metadata").await;
    client.send(&address("255.255.255.255:9".parse().unwrap()), b"broadcast").await;
    client.send(&address("224.0.0.251:5353".parse().unwrap()), b"multicast").await;
    counted(&proxy, "denied", |c| c.udp_denied == 5).await;
    client.round_trip(server, b"allowed").await;
    assert!(other.try_recv(&mut [0; 1]).is_err(), "nothing has come");
    drop(client.control);
    assert_eq!(proxy.line().await["datagrams_dropped"], 5);
}

#[tokio::test]
async fn only_the_client_that_asked() {
    let proxy = Proxy::start("socks5", OPEN).await;
    let server = echo("127.0.0.1:0").await;
    let client = associate(&proxy).await;
    let datagram = [&[0, 0, 0][..], &address(server), b"mine"].concat();
    let elsewhere = UdpSocket::bind("127.0.0.2:0").await.unwrap();
    elsewhere.send_to(&datagram, client.relay).await.unwrap();
    counted(&proxy, "another address", |c| c.udp_strangers == 1).await;
    client.round_trip(server, b"first").await;
    // From then on, the kernel knows the client's port and lets nobody else in. The host of this one is told so.
    let port = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    port.connect(client.relay).await.unwrap();
    port.send(&datagram).await.unwrap();
    assert!(timeout(LIMIT, port.recv(&mut [0; 1])).await.unwrap().is_err());
    client.round_trip(server, b"second").await;
    assert_eq!(proxy.server.counters().udp_up, 2);
}

#[tokio::test]
async fn a_port_that_was_announced_is_the_only_one() {
    let proxy = Proxy::start("socks5", OPEN).await;
    let server = echo("127.0.0.1:0").await;
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let (control, code, relay) = ask(&proxy, ASSOCIATE, &address(socket.local_addr().unwrap())).await;
    assert_eq!(code, 0);
    let thief = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    thief.send_to(&[&[0, 0, 0][..], &address(server), b"mine"].concat(), relay).await.unwrap();
    counted(&proxy, "another port", |c| c.udp_strangers == 1).await;
    Associated { control, relay, socket }.round_trip(server, b"announced").await;
}

#[test_case("", false, false; "by default")]
#[test_case("udp.replies = \"host\"", true, false; "from any port")]
#[test_case("udp.replies = \"any\"", true, true; "from anywhere that is allowed")]
#[tokio::test]
async fn replies_come_from_where_datagrams_went(more: &str, port: bool, host: bool) {
    let rules = "rules = [{ action = \"allow\", target = [\"127.0.0.0/30\"] }]";
    let proxy = Proxy::start("socks5", &format!("{rules}\n{more}")).await;
    let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let client = associate(&proxy).await;
    client.send(&address(server.local_addr().unwrap()), b"hello").await;
    let (_, outside) = server.recv_from(&mut [0; 9]).await.unwrap();
    let mut unasked = 0;
    for (here, passes) in [("127.0.0.1:0", port), ("127.0.0.3:0", host), ("127.0.0.5:0", false)] {
        let other = UdpSocket::bind(here).await.unwrap();
        other.send_to(b"spoofed", outside).await.unwrap();
        if passes {
            assert!(client.receive().await.ends_with(b"spoofed"), "{here}");
        } else {
            unasked += 1;
            counted(&proxy, here, |c| c.udp_unasked == unasked).await;
        }
    }
    server.send_to(b"reply", outside).await.unwrap();
    assert!(client.receive().await.ends_with(b"reply"));
}

#[tokio::test]
async fn fragments_and_nonsense_are_dropped_and_counted() {
    let proxy = Proxy::start("socks5", OPEN).await;
    let server = echo("127.0.0.1:0").await;
    let client = associate(&proxy).await;
    for fragment in [1, 2, 0x83] {
        let datagram = [&[0, 0, fragment][..], &address(server), b"part"].concat();
        client.socket.send_to(&datagram, client.relay).await.unwrap();
    }
    counted(&proxy, "fragments", |c| c.udp_fragments == 3).await;
    for nonsense in
        [&b""[..], b"\0", b"\0\0\0\x01", b"\0\0\0\x09\0\0\0\0\0\0", b"\0\0\0\x01\x7f\0\0\x01\0\0", b"\0\0\0\x03\xff"]
    {
        client.socket.send_to(nonsense, client.relay).await.unwrap();
    }
    counted(&proxy, "nonsense", |c| c.udp_malformed == 6).await;
    client.round_trip(server, b"still there").await;
    assert_eq!(proxy.server.counters().udp_up, 1);
}

/// With its header, such a reply is longer than any datagram can be.
#[tokio::test]
async fn replies_that_are_too_long_are_dropped_and_counted() {
    let proxy = Proxy::start("socks5", OPEN).await;
    let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let client = associate(&proxy).await;
    client.send(&address(server.local_addr().unwrap()), b"hello").await;
    let (_, outside) = server.recv_from(&mut [0; 9]).await.unwrap();
    server.send_to(&vec![0; 65_507], outside).await.unwrap();
    counted(&proxy, "too long", |c| c.udp_dropped == 1).await;
    server.send_to(b"short", outside).await.unwrap();
    assert!(client.receive().await.ends_with(b"short"));
}

#[tokio::test]
async fn an_association_ends_with_its_connection() {
    let proxy = Proxy::start("socks5", OPEN).await;
    let server = echo("127.0.0.1:0").await;
    let Associated { control, relay, socket } = associate(&proxy).await;
    let client = Associated { control, relay, socket };
    client.round_trip(server, b"hello").await;
    let Associated { control, relay, socket } = client;
    control.set_zero_linger().unwrap();
    drop(control);
    assert_eq!(proxy.line().await["how"], "client-reset");
    // The port is closed, and the kernel says so.
    socket.connect(relay).await.unwrap();
    let refused = async {
        loop {
            let sent = socket.send(b"anybody?").await;
            if sent.is_err() || socket.recv(&mut [0; 1]).await.is_err() {
                return;
            }
        }
    };
    timeout(LIMIT, refused).await.expect("nobody listens");
    assert_eq!(proxy.server.counters().udp_up, 1);
}

#[tokio::test]
async fn associations_end_when_idle_or_when_their_connection_is_misused() {
    let proxy = Proxy::start("socks5", &format!("{OPEN}udp.idle_limit = 0.2")).await;
    let mut client = associate(&proxy).await;
    let mut end = Vec::new();
    timeout(LIMIT, client.control.read_to_end(&mut end)).await.unwrap().unwrap();
    assert_eq!(proxy.line().await["how"], "idle");

    let proxy = Proxy::start("socks5", OPEN).await;
    let mut client = associate(&proxy).await;
    let _ = client.control.write_all(&[0; 100_000]).await;
    let _ = timeout(LIMIT, client.control.read_to_end(&mut end)).await.unwrap();
    assert_eq!(proxy.line().await["how"], "bad-request");
    assert_eq!(proxy.server.counters().bad_requests, 1);
}

#[tokio::test]
async fn a_client_has_so_many_associations_and_destinations() {
    let proxy = Proxy::start("socks5", &format!("{OPEN}udp = {{ per_client = 2, destinations = 2 }}")).await;
    let (first, second) = (associate(&proxy).await, associate(&proxy).await);
    let (mut third, code, _) = ask(&proxy, ASSOCIATE, &unknown()).await;
    assert_eq!(code, 1);
    assert_eq!(third.read(&mut [0; 1]).await.unwrap(), 0);
    assert_eq!(proxy.server.counters().over_limit, 1);
    let quiet = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    first.send(&address(quiet.local_addr().unwrap()), b"hello").await;
    let (_, outside) = quiet.recv_from(&mut [0; 9]).await.unwrap();
    for _ in 0..3 {
        first.round_trip(echo("127.0.0.1:0").await, b"another").await;
    }
    quiet.send_to(b"late", outside).await.unwrap();
    counted(&proxy, "forgotten", |c| c.udp_unasked == 1).await;
    second.round_trip(echo("127.0.0.1:0").await, b"its own").await;
    drop((first, second));
    let lines = proxy.lines().await;
    let refused = lines.iter().find(|l| l["how"] == "limit").unwrap();
    assert_eq!(refused["refusal"], "too many of these at once: udp-associate");
}

/// Whether rules open loopback or not: datagrams of one relay to another would go round.
#[tokio::test]
async fn no_relay_feeds_another() {
    let proxy = Proxy::start("socks5", OPEN).await;
    let (one, other) = (associate(&proxy).await, associate(&proxy).await);
    one.send(&address(other.relay), b"round").await;
    one.send(&address(one.relay), b"and round").await;
    counted(&proxy, "denied", |c| c.udp_denied == 2).await;
}

/// A flood from one client, in which each other datagram is wrong, hinders neither its own good ones nor another client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_leaves_others_alone() {
    let proxy = Proxy::start("socks5", OPEN).await;
    let server = echo("127.0.0.1:0").await;
    let (hostile, good) = (associate(&proxy).await, associate(&proxy).await);
    let flood = async {
        for n in 0..20_000_u32 {
            let to = SocketAddr::from((Ipv4Addr::from(0x7f00_0000 + n % 4000), 9));
            hostile.send(&address(to), &n.to_be_bytes()).await;
            hostile.socket.send_to(b"\0\0\x01", hostile.relay).await.unwrap();
        }
    };
    let talk = async {
        for n in 0..200_u32 {
            good.round_trip(server, &n.to_be_bytes()).await;
        }
    };
    tokio::join!(flood, talk);
    // what is behind the flood may find its queue full, and is sent again
    let answered = async {
        let mut buffer = [0; 64];
        loop {
            hostile.send(&address(server), b"at last").await;
            let n = timeout(Duration::from_millis(100), hostile.socket.recv(&mut buffer)).await;
            if n.is_ok_and(|n| buffer[..n.unwrap()].ends_with(b"at last")) {
                break;
            }
        }
    };
    timeout(LIMIT, answered).await.expect("an answer");
}

#[tokio::test]
async fn ports_of_a_range() {
    // Ports that were free a moment ago; if one is taken meanwhile, the other serves.
    let free = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let first = free.local_addr().unwrap().port().min(60_000);
    drop(free);
    let range = format!("{OPEN}udp.ports = \"{first}-{}\"\nbind.ports = \"{first}-{}\"", first + 9, first + 9);
    let proxy = Proxy::start("socks5", &range).await;
    let (_control, code, relay) = ask(&proxy, ASSOCIATE, &unknown()).await;
    assert_eq!((code, (first..first + 10).contains(&relay.port())), (0, true), "{relay}");
    let (_client, code, bound) = ask(&proxy, BIND, &address(([127, 0, 0, 1], 21).into())).await;
    assert_eq!((code, (first..first + 10).contains(&bound.port())), (0, true), "{bound}");
}

#[test_case("127.0.0.1", OPEN; "v4")]
#[test_case("[::1]", V6; "v6")]
#[tokio::test]
async fn bind_accepts_its_peer(here: &str, rules: &str) {
    let proxy = Proxy::start_at(here, "socks5", rules).await;
    let server: SocketAddr = format!("{here}:21").parse().unwrap();
    let (mut client, code, bound) = ask(&proxy, BIND, &address(server)).await;
    assert_eq!((code, bound.ip()), (0, server.ip()));
    client.write_all(b"early ").await.unwrap();
    let mut peer = TcpStream::connect(bound).await.unwrap();
    assert_eq!(answer(&mut client).await, (0, peer.local_addr().unwrap()));
    client.write_all(b"and late").await.unwrap();
    client.shutdown().await.unwrap();
    let mut seen = Vec::new();
    timeout(LIMIT, peer.read_to_end(&mut seen)).await.unwrap().unwrap();
    assert_eq!(seen, b"early and late");
    peer.write_all(b"data of the server").await.unwrap();
    drop(peer);
    seen.clear();
    timeout(LIMIT, client.read_to_end(&mut seen)).await.unwrap().unwrap();
    assert_eq!(seen, b"data of the server");
    let line = proxy.line().await;
    assert_eq!((&line["command"], &line["how"]), (&"bind".into(), &"closed".into()));
    assert_eq!((&line["target"], &line["bytes_up"]), (&server.to_string().into(), &14.into()));
    assert!(line["server"].as_str().unwrap().starts_with(here) && line["id"].is_u64());
    assert_eq!(proxy.server.counters().bound, 1);
    assert!(TcpStream::connect(bound).await.is_err(), "one connection, and no other");
}

#[tokio::test]
async fn bind_of_version_4() {
    let proxy = Proxy::start("socks5", OPEN).await;
    let mut client = proxy.connect().await;
    client.write_all(&[4, 2, 0, 21, 127, 0, 0, 1, b'm', b'e', 0]).await.unwrap();
    let mut reply = [0; 8];
    client.read_exact(&mut reply).await.unwrap();
    assert_eq!((reply[..2].to_vec(), reply[4..].to_vec()), (vec![0, 0x5a], vec![127, 0, 0, 1]));
    let bound = SocketAddr::from(([127, 0, 0, 1], u16::from_be_bytes([reply[2], reply[3]])));
    let mut peer = TcpStream::connect(bound).await.unwrap();
    client.read_exact(&mut reply).await.unwrap();
    let port = peer.local_addr().unwrap().port().to_be_bytes();
    assert_eq!(reply, [0, 0x5a, port[0], port[1], 127, 0, 0, 1]);
    peer.write_all(b"hello").await.unwrap();
    let mut seen = [0; 5];
    client.read_exact(&mut seen).await.unwrap();
    assert_eq!(&seen, b"hello");
}

#[tokio::test]
async fn a_stranger_does_not_get_in() {
    let proxy = Proxy::start("socks5", OPEN).await;
    let (mut client, code, bound) = ask(&proxy, BIND, &address(([127, 0, 0, 1], 21).into())).await;
    assert_eq!(code, 0);
    let from = |here: &str| {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(format!("{here}:0").parse().unwrap()).unwrap();
        socket.connect(bound)
    };
    for _ in 0..3 {
        let mut stranger = from("127.0.0.2").await.unwrap();
        let read = timeout(LIMIT, stranger.read(&mut [0; 1])).await.unwrap();
        assert!(read.is_err(), "it is reset");
    }
    counted(&proxy, "strangers", |c| c.bind_strangers == 3).await;
    let peer = from("127.0.0.1").await.unwrap();
    assert_eq!(answer(&mut client).await, (0, peer.local_addr().unwrap()));
}

#[tokio::test]
async fn bind_needs_a_peer_that_the_rules_allow() {
    let proxy = Proxy::start("socks5", "").await;
    for target in [address(([127, 0, 0, 1], 21).into()), unknown(), name("localhost", 21)] {
        assert_eq!(ask(&proxy, BIND, &target).await.1, 2, "{target:?}");
    }
    let lines = proxy.lines().await;
    let why = |n: usize| (lines[n]["how"].as_str().unwrap(), lines[n]["refusal"].as_str().unwrap());
    assert_eq!(why(0), ("denied", "guarded address (loopback)"));
    assert_eq!(why(1), ("denied", "no address of the peer"));
    assert_eq!(why(2), ("denied", "guarded address (loopback)"));
}

#[tokio::test]
async fn bind_for_any_peer_asks_the_rules() {
    let rules = "rules = [{ action = \"allow\", target = \"127.0.0.1\" }]\nbind.any_peer = true";
    let proxy = Proxy::start("socks5", rules).await;
    let (mut client, code, bound) = ask(&proxy, BIND, &unknown()).await;
    assert_eq!(code, 0);
    let denied = TcpSocket::new_v4().unwrap();
    denied.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let mut denied = denied.connect(bound).await.unwrap();
    assert!(timeout(LIMIT, denied.read(&mut [0; 1])).await.unwrap().is_err());
    let peer = TcpStream::connect(bound).await.unwrap();
    assert_eq!(answer(&mut client).await, (0, peer.local_addr().unwrap()));
    assert_eq!(proxy.server.counters().bind_strangers, 1);
}

#[tokio::test]
async fn bind_ends_without_a_peer() {
    let proxy = Proxy::start("socks5", &format!("{OPEN}bind = {{ wait = 0.1, per_client = 1 }}")).await;
    let target = address(([127, 0, 0, 1], 21).into());
    let (mut client, _, bound) = ask(&proxy, BIND, &target).await;
    assert_eq!(answer(&mut client).await.0, 6);
    let line = proxy.line().await;
    assert_eq!((&line["how"], &line["refusal"]), (&"timeout".into(), &"the peer's connection took too long".into()));
    assert!(TcpStream::connect(bound).await.is_err());

    let proxy = Proxy::start("socks5", &format!("{OPEN}bind.per_client = 1")).await;
    let (client, _, bound) = ask(&proxy, BIND, &target).await;
    let (_, code, _) = ask(&proxy, BIND, &target).await;
    assert_eq!(code, 1, "one too many");
    drop(client);
    let lines = proxy.lines().await;
    assert!(lines.iter().any(|l| l["how"] == "limit"), "{lines:?}");
    let left = lines.iter().find(|l| l["how"] == "bad-request").unwrap();
    assert_eq!(left["refusal"], "the client has left before its peer came");
    assert!(TcpStream::connect(bound).await.is_err());
}

#[tokio::test]
async fn look_ups_are_off_unless_asked_for() {
    let proxy = Proxy::start("socks5", OPEN).await;
    for command in [0xf0, 0xf1] {
        assert_eq!(ask(&proxy, command, &name("localhost", 0)).await.1, 7);
    }
    let lookups =
        "commands = [\"connect\", \"resolve\"]\nrules = [{ action = \"allow\", target = [\"127.0.0.0/8\", \"::1\"] }]";
    let proxy = Proxy::start("socks5", lookups).await;
    let (_, code, found) = ask(&proxy, 0xf0, &name("localhost", 0)).await;
    assert!(code == 0 && found.ip().is_loopback() && found.port() == 0, "{code} {found}");
    for command in [BIND, ASSOCIATE] {
        assert_eq!(ask(&proxy, command, &address(([127, 0, 0, 1], 21).into())).await.1, 7);
    }
    let request = [&[5, 1, 0, 5, 0xf1, 0][..], &address(([127, 0, 0, 1], 0).into())].concat();
    let told = proxy.answer(&request).await;
    let length = usize::from(told[6]);
    assert_eq!((&told[..6], told.len()), (&[5, 0, 5, 0, 0, 3][..], 9 + length));
    assert!(told[7..7 + length].is_ascii() && length > 0);
    // What the rules do not let a client connect to, it is not told either.
    let proxy = Proxy::start("socks5", "commands = \"resolve\"").await;
    assert_eq!(ask(&proxy, 0xf0, &name("localhost", 0)).await.1, 2);
    let line: Value = proxy.line().await;
    assert_eq!((&line["command"], &line["how"]), (&"resolve".into(), &"denied".into()));
}

#[tokio::test]
async fn a_stopped_program_ends_associations_with_their_counts() {
    let splicer = Splicer::copying(Refusal::Unprivileged);
    let proxy = Proxy::start_with(splicer.clone(), "127.0.0.1", "socks5", OPEN).await;
    let client = associate(&proxy).await;
    client.round_trip(echo("127.0.0.1:0").await, b"hello").await;
    splicer.stop(false);
    let line = proxy.line().await;
    assert_eq!((&line["how"], &line["datagrams_up"]), (&"stopped".into(), &1.into()));
}
