//! Transparent listeners in networks that are in their way: narrow links, routers that refuse, strict checks of the source, and full
//! tables; and what HTTP does on such a listener. Needs root and eBPF, and fails without.

use crate::{
    ftp::connect_from,
    running::{
        AT_ONCE, LONGSPLICE, Pins, Running, Setting, eventually, is_reset, listener, round_trip,
        translucent::{PATIENCE, PORT, SECOND_PORT, translucent_at, transparent},
    },
};
use longsplice_lab::{
    Family, Lab, Namespace, Options, Shape,
    topology::{CLIENT, CLIENT_SECOND, SERVER, SERVER_SECOND},
    traffic::{Script, connect, converse, intact, listen, serve},
};
use nix::{
    errno::Errno,
    sys::{
        signal::Signal,
        socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, socket},
    },
};
use std::{
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    os::fd::AsRawFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
};
use test_case::test_case;

const BYTES: u64 = 2_000_000;
const COPY: &str = "policy = { splice = \"never\" }";

/// Two machines that route, one of which runs the program. Every packet is as on a wire.
struct Way {
    here: Setting,
    _pins: [Pins; 2],
}

impl Way {
    fn new(configuration: &str) -> Way {
        let options = Options { forwarding: true, large_packets: false, ..Options::default() };
        let here = translucent_at(Lab::new(Shape::TwoForwarders, options).unwrap(), configuration);
        let _pins = [Pins::of(here.lab.second.as_ref().unwrap()), Pins::of_tpot(here.lab.second.as_ref().unwrap())];
        Way { here, _pins }
    }

    fn second(&self) -> &Namespace {
        self.here.lab.second.as_ref().unwrap()
    }

    /// Sends bytes from the client to the server, or back, and returns the line of the connection.
    fn sends(&self, proxy: &Running, family: Family, up: bool) -> String {
        let (lab, at) = (&self.here.lab, SERVER.port(family, PORT));
        let size = |mine: bool| if mine { BYTES } else { 500 };
        let answer = Script::answerer().bytes(size(!up)).deadline(PATIENCE * 8);
        let opener = Script::opener(7).bytes(size(up)).deadline(PATIENCE * 8);
        let serving = serve(lab.server.run(|| listen(at, &answer)).unwrap(), 1, answer);
        let client = lab.client.run(|| converse(connect(at, &opener).unwrap(), &opener));
        intact(&client, &serving.join().remove(0)).unwrap();
        proxy.wait_line(&[&client.local.unwrap().to_string()])
    }
}

/// A link behind another router is too narrow, which that router says to whom it takes for the sender. Before the splice, that is
/// our socket, and afterwards the host.
#[test_case("own", COPY; "copied")]
#[test_case("client", COPY; "copied, the client's address")]
#[test_case("own", AT_ONCE; "spliced")]
#[test_case("client", AT_ONCE; "spliced, the client's address")]
#[ignore = "root"]
fn a_narrow_link_behind_another_router(source: &str, policy: &str) {
    let configuration = transparent("plug", PORT, &format!("source = \"{source}\"\n{policy}"));
    for up in [true, false] {
        let way = Way::new(&configuration);
        // the program is on the far side of the link
        let (narrow, device, program) = match up {
            true => (way.second(), "g1", way.here.lab.forwarder.command(LONGSPLICE)),
            false => (&way.here.lab.forwarder, "f0", way.second().command(LONGSPLICE)),
        };
        narrow.ip(&format!("link set {device} mtu 1300\n")).unwrap();
        let mut proxy = way.here.start_by(program, &[]);
        for family in Family::BOTH {
            let before =
                narrow.counter("Ip", "FragFails").unwrap_or(0) + narrow.counter("Ip6", "InTooBigErrors").unwrap_or(0);
            let line = way.sends(&proxy, family, up);
            assert_eq!(line.contains("splices=1"), policy == AT_ONCE, "{line}");
            let after =
                narrow.counter("Ip", "FragFails").unwrap_or(0) + narrow.counter("Ip6", "InTooBigErrors").unwrap_or(0);
            assert!(after > before, "{family:?}: the router has refused packets");
        }
        proxy.shut_down();
    }
}

/// A router that says that the server cannot be reached ends an attempt to connect, and says nothing about a connection that there is.
#[test_case("own"; "the proxy's address")]
#[test_case("client"; "the client's address")]
#[ignore = "root"]
fn a_router_that_cannot_reach_the_server(source: &str) {
    for policy in [COPY, AT_ONCE] {
        let way = Way::new(&transparent("plug", PORT, &format!("source = \"{source}\"\n{policy}")));
        let mut proxy = way.here.start();
        for family in Family::BOTH {
            let at = SERVER.port(family, PORT);
            way.here.echo(at);
            let mut open = way.here.connect(at);
            round_trip(&mut open, &[7; 1000]);
            if policy == AT_ONCE {
                proxy.wait_flow("spliced");
            }
            let (ip, icmp) = match family {
                Family::V4 => ("ip", "icmp type host-unreachable"),
                Family::V6 => ("ip6", "icmpv6 type addr-unreachable"),
            };
            let reject = format!("{ip} daddr {} tcp dport {PORT} counter reject with {icmp}", at.ip());
            let chain = format!("table inet t {{ chain c {{ type filter hook forward priority 0; {reject}; }}; }}");
            way.second().execute("nft", &[&chain]).unwrap();
            assert!(way.here.lab.client.run(|| is_reset(at)), "{family:?}: at once");
            proxy.wait_line(&["unreachable", &at.to_string()]);
            let refused = || {
                let shown = way.second().execute("nft", &["list table inet t"]).unwrap();
                shown.split("packets ").nth(1)?.split(' ').next()?.parse::<u64>().ok()
            };
            let before = refused().unwrap();
            open.write_all(&[8; 1000]).unwrap();
            eventually("the router refuses data", || (refused() > Some(before)).then_some(()));
            way.second().execute("nft", &["delete table inet t"]).unwrap();
            let mut back = [0; 1000];
            open.read_exact(&mut back).unwrap();
            assert_eq!(back, [8; 1000]);
        }
        proxy.shut_down();
    }
}

/// Where the server's answers to the client take a way around the proxy, the client has no connection, and the program says why.
#[test]
#[ignore = "root"]
fn answers_that_take_another_way() {
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).unwrap();
    let more = "source = \"client\"\nlimits = { connect = 1 }\n";
    let here = translucent_at(lab, &transparent("plug", PORT, more));
    let mut proxy = here.start();
    for family in Family::BOTH {
        let (at, client) = (SERVER.port(family, PORT), CLIENT.ip(family));
        here.echo(at);
        let way = format!("{client}/{}", if family == Family::V4 { 32 } else { 128 });
        here.lab.server.ip(&format!("route add blackhole {way}\n")).unwrap();
        let ended =
            here.lab.client.run(|| connect_from(SocketAddr::new(client, 0), at).and_then(|mut s| s.read(&mut [0])));
        assert!(ended.is_err(), "{ended:?}");
        proxy.wait_line(&["timeout", &at.to_string()]);
        here.lab.server.ip(&format!("route del blackhole {way}\n")).unwrap();
        round_trip(&mut here.connect(at), &[7; 1000]);
    }
    proxy.wait_message("answers have to come through this machine");
    proxy.shut_down();
}

/// A strict check of the source is met by everything that takes the right way. What comes by another one is dropped by the kernel, as
/// at any router, and the program says so.
#[test_case("own"; "the proxy's address")]
#[test_case("client"; "the client's address")]
#[ignore = "root"]
fn a_strict_check_of_the_source(source: &str) {
    for marks_count in ["0", "1"] {
        for policy in [COPY, AT_ONCE] {
            let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).unwrap();
            for device in ["all", "f0", "f1"] {
                lab.forwarder.sysctl(&format!("net.ipv4.conf.{device}.rp_filter"), "1").unwrap();
                lab.forwarder.sysctl(&format!("net.ipv4.conf.{device}.src_valid_mark"), marks_count).unwrap();
            }
            let here = translucent_at(lab, &transparent("plug", PORT, &format!("source = \"{source}\"\n{policy}")));
            let at = SERVER.port(Family::V4, PORT);
            here.echo(at);
            let mut proxy = here.start();
            let mut client = here.connect(at);
            round_trip(&mut client, &[7; 1_000_000]);
            if policy == AT_ONCE {
                proxy.wait_flow("spliced");
            }
            drop(client);
            proxy.wait_line(&[&at.to_string(), "how=closed"]);
            if marks_count == "1" {
                proxy.shut_down();
                continue;
            }
            let other = CLIENT_SECOND.ip(Family::V4);
            here.lab.forwarder.ip(&format!("route add {other}/32 dev f1\n")).unwrap();
            let attempt = here.lab.client.spawn(move || connect_from(SocketAddr::new(other, 0), at).is_err());
            proxy.wait_message("a strict check of the source (rp_filter)");
            here.lab.forwarder.ip(&format!("route del {other}/32 dev f1\n")).unwrap();
            assert!(!attempt.join().unwrap(), "its SYN comes again");
            proxy.shut_down();
        }
    }
}

fn talk(stream: &mut TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"hello").and_then(|()| stream.read_exact(&mut [0; 5]))
}

/// A router with small tables, and an echo server.
fn small(source: &str) -> (Setting, Running, SocketAddr) {
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).unwrap();
    let here = translucent_at(lab, &transparent("plug", PORT, &format!("source = \"{source}\"\n{AT_ONCE}")));
    let at = SERVER.port(Family::V4, PORT);
    here.echo(at);
    let proxy = here.start_with(&["--max-flows", "16"]);
    (here, proxy, at)
}

/// While tables are nearly full, clients are routed on: none of them is reset, or waits.
#[test_case("own"; "the proxy's address")]
#[test_case("client"; "the client's address")]
#[ignore = "root"]
fn full_tables(source: &str) {
    const CLIENTS: u64 = 40;
    let (here, mut proxy, at) = small(source);
    let open = || {
        let mut stream = here.connect(at);
        talk(&mut stream).unwrap();
        stream
    };
    let mut served: Vec<TcpStream> = (0..CLIENTS).map(|_| open()).collect();
    served.iter_mut().for_each(|stream| talk(stream).unwrap());
    let taken = proxy.count("proxy", "accepted");
    assert!((8..CLIENTS).contains(&taken), "{taken}");
    assert_eq!(["left_alone", "unheard"].map(|name| proxy.count("proxy", name)), [1, 0]);
    proxy.wait_message("the tables of flows are nearly full");
    drop(served);
    eventually("room", || {
        open();
        (proxy.count("proxy", "accepted") > taken).then_some(())
    });
    proxy.shut_down();
}

/// Clients that come while nobody looks, and find no room, are reset, and counted; none of them waits for ever.
#[test]
#[ignore = "root"]
fn a_burst_onto_full_tables() {
    let (here, mut proxy, at) = small("own");
    proxy.stand_still();
    let clients: Vec<TcpStream> = (0..40).map(|_| here.connect(at)).collect();
    proxy.signal(Signal::SIGCONT);
    let broken: Vec<_> = clients.into_iter().filter_map(|mut client| talk(&mut client).err()).collect();
    assert!(broken.iter().all(|e| e.kind() == ErrorKind::ConnectionReset), "{broken:?}");
    assert!((8..40).contains(&broken.len()), "{}", broken.len());
    assert_eq!(proxy.count("proxy", "unheard"), broken.len() as u64);
    assert!(proxy.count("verdicts", "table-full") > 0, "{}", proxy.counters());
    proxy.shut_down();
}

/// Begins connections from the client's host, all at once.
fn connect_all(here: &Setting, at: SocketAddr, count: usize) -> Vec<TcpStream> {
    let begin = || {
        let family = if at.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(family, SockType::Stream, flags, None).unwrap();
        let begun = nix::sys::socket::connect(socket.as_raw_fd(), &SockaddrStorage::from(at));
        assert!(matches!(begun, Ok(()) | Err(Errno::EINPROGRESS)), "{begun:?}");
        let stream = TcpStream::from(socket);
        stream.set_nonblocking(false).unwrap();
        stream
    };
    here.lab.client.run(|| (0..count).map(|_| begin()).collect())
}

/// Clients that come all at once are all served, with SYN cookies, too: none is lost, routed on, or waits for ever.
#[test_case("basic", "own", Family::V4, "1"; "basic")]
#[test_case("basic", "client", Family::V6, "2"; "basic, v6, cookies")]
#[test_case("pipelined", "client", Family::V4, "1"; "pipelined")]
#[test_case("confirm", "own", Family::V6, "1"; "confirm, v6")]
#[ignore = "root"]
fn a_burst_is_served(handshake: &str, source: &str, family: Family, cookies: &str) {
    const CLIENTS: usize = 400; // with the server's sockets, fewer than 1024
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).unwrap();
    lab.forwarder.sysctl("net.ipv4.tcp_syncookies", cookies).unwrap();
    let more = format!("source = \"{source}\"\nhandshake = \"{handshake}\"\n{AT_ONCE}");
    let here = translucent_at(lab, &transparent("plug", PORT, &more));
    let at = SERVER.port(family, PORT);
    here.echo(at);
    let mut proxy = here.start();
    let mut clients = connect_all(&here, at, CLIENTS);
    clients.iter_mut().for_each(|client| talk(client).unwrap());
    clients.iter_mut().for_each(|client| talk(client).unwrap());
    let counts = ["accepted", "left_alone", "unheard"].map(|name| proxy.count("proxy", name));
    assert_eq!(counts, [CLIENTS as u64, 0, 0]);
    drop(clients);
    proxy.shut_down();
}

/// Clients that come while nobody looks, and find the listener's queue full, are routed on, or wait if they have got a SYN cookie.
/// None is reset, and those that are not routed are served afterwards.
#[test]
#[ignore = "root"]
fn a_burst_onto_a_full_queue() {
    const CLIENTS: usize = 100;
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).unwrap();
    lab.forwarder.sysctl("net.core.somaxconn", "16").unwrap();
    let here = translucent_at(lab, &transparent("plug", PORT, AT_ONCE));
    let at = SERVER.port(Family::V4, PORT);
    here.echo(at);
    let mut proxy = here.start();
    proxy.stand_still();
    let mut clients = connect_all(&here, at, CLIENTS);
    eventually("connections", || clients.iter().all(|client| client.peer_addr().is_ok()).then_some(()));
    proxy.signal(Signal::SIGCONT);
    clients.iter_mut().for_each(|client| talk(client).unwrap());
    let taken = proxy.count("proxy", "accepted");
    assert!((8..=CLIENTS as u64).contains(&taken), "{taken}");
    assert!(proxy.count("tpot", "unanswered") >= CLIENTS as u64 - taken, "{}", proxy.counters());
    // there is room again
    clients.extend(connect_all(&here, at, 8));
    clients.iter_mut().for_each(|client| talk(client).unwrap());
    assert_eq!(proxy.count("proxy", "accepted"), taken + 8);
    drop(clients);
    proxy.shut_down();
}

/// A page that a server has once sent comes from the cache, in the server's name; another one is changed on its way; names lead where
/// a route says so, and are denied where a rule says so.
#[test]
#[ignore = "root"]
fn http_in_the_servers_name() {
    let second = SERVER_SECOND.port(Family::V4, SECOND_PORT);
    let more = "transparent = true\nroute = [{ host = \"second.test\", pool = \"second\" }]\n\
        rules = [{ action = \"deny\", target = \"ads.test\" }, { action = \"allow\" }]\n\
        [listener.cache]\ndir = \"cache\"\nsize = 30000000\n\
        [listener.filter]\nchange = [{ type = \"text/html\", remove_element = \"script\" }]\n";
    let pool = format!("[pool.second]\nservers = [\"{second}\"]\n");
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let here = translucent_at(lab, &(listener("http", &format!("0.0.0.0:{PORT}"), more) + &pool));
    let (at, asked) = (SERVER.port(Family::V4, PORT), Arc::new(AtomicU64::new(0)));
    for server in [at, second] {
        let (listener, asked) = (here.listen(server), asked.clone());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut head = [0; 4096];
                let n = stream.read(&mut head).unwrap();
                asked.fetch_add(1, Relaxed);
                let (kind, body) = match String::from_utf8_lossy(&head[..n]).starts_with("GET /page ") {
                    true => ("text/html", b"<p><script>x</script></p>".to_vec()),
                    false => ("text/plain", server.to_string().repeat(100_000).into_bytes()),
                };
                let fields =
                    format!("Content-Type: {kind}\r\nCache-Control: max-age=1000\r\nContent-Length: {}", body.len());
                let head = format!("HTTP/1.1 200 OK\r\nConnection: close\r\n{fields}\r\n\r\n");
                let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
            }
        });
    }
    let mut proxy = here.start();
    let get = |name: &str, path: &str| {
        let mut client = here.connect(at);
        write!(client, "GET {path} HTTP/1.0\r\nHost: {name}\r\n\r\n").unwrap();
        let mut reply = String::new();
        client.read_to_string(&mut reply).unwrap();
        reply
    };
    assert!(get("www.test", "/page").ends_with("<p></p>"));
    assert!(get("ads.test", "/page").starts_with("HTTP/1.1 403 "));
    let ends = |reply: &str, server: SocketAddr| reply.ends_with(&server.to_string()) && reply.len() > 100_000;
    assert!(ends(&get("second.test", "/file"), second));
    let before = asked.load(Relaxed);
    // on a busy machine, all of a body may have come before its splice
    let mut paths = (0..).map(|n| format!("/file{n}"));
    let path = eventually("a reply that is stored and spliced", || {
        let path = paths.next()?;
        assert!(ends(&get("www.test", &path), at));
        proxy.wait_line(&[&format!("{path} ")[..], "cache=fill"]).contains("splices=1").then_some(path)
    });
    eventually("a reply of the cache", || {
        let asked_before = asked.load(Relaxed);
        assert!(ends(&get("www.test", &path), at));
        (asked.load(Relaxed) == asked_before).then_some(())
    });
    assert!(asked.load(Relaxed) > before);
    proxy.wait_line(&[&path, "cache=hit", &format!("server={at}")]);
    proxy.shut_down();
}
