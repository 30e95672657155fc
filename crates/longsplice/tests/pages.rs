//! The configurations that pages show do what the pages say, with the addresses of a lab. Those of ftp.md and login.md have
//! their tests beside the others of FTP and login gateways. Needs root and eBPF.

use crate::running::{Running, Setting, eventually, round_trip};
use longsplice_lab::{
    Family, Lab, Options, Shape,
    topology::{CLIENT, FORWARDER_TO_CLIENT, SERVER},
};
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    thread,
    time::Duration,
};

const CONFIGURATION: &str = include_str!("../../../docs/configuration.md");
const PATIENCE: Duration = Duration::from_secs(30);

/// The first example behind this line of a page, with these words replaced.
pub fn example(page: &str, behind: &str, words: &[(&str, &str)]) -> String {
    let (_, rest) = page.split_once(&format!("{behind}\n")).expect("the line");
    let (_, rest) = rest.split_once("```toml\n").expect("an example");
    let (text, _) = rest.split_once("```").expect("its end");
    words.iter().fold(text.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "{from}: {text}");
        text.replace(from, to)
    })
}

fn start(lab: Lab, configuration: &str) -> (Setting, Running) {
    let setting = Setting::at(lab, configuration);
    fs::write(setting.dir.path().join("error.html"), "<p>It fails</p>").unwrap();
    let proxy = setting.start();
    (setting, proxy)
}

fn lab() -> Lab {
    Lab::simple(Shape::TwoDevices).unwrap()
}

/// Answers each request with what it asks for.
fn serve_http(setting: &Setting, at: SocketAddr) {
    let listener = setting.listen(at);
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let asked = lines.next().unwrap().unwrap();
            while !lines.next().unwrap().unwrap().is_empty() {}
            let length = asked.len();
            write!({ stream }, "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{asked}")
                .unwrap();
        }
    });
}

fn ask(setting: &Setting, at: SocketAddr, request: &str) -> String {
    let mut stream = setting.connect(at);
    write!(stream, "{request}Connection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
#[ignore = "root"]
fn the_example_of_http_works() {
    let (front, server) = (FORWARDER_TO_CLIENT.v4.to_string(), SERVER.port(Family::V4, 8080));
    let words = [("192.0.2.1", front.as_str()), ("10.0.0.1:8080", &server.to_string())];
    let (setting, mut proxy) = start(lab(), &example(CONFIGURATION, "## HTTP", &words));
    serve_http(&setting, server);
    let [forward, site] = [3128, 80].map(|port| FORWARDER_TO_CLIENT.port(Family::V4, port));
    let get = format!("GET http://{server}/x HTTP/1.1\r\nHost: x\r\n");
    let refused = ask(&setting, forward, &get);
    assert!(refused.starts_with("HTTP/1.1 407 "), "{refused}");
    let answer = ask(&setting, forward, &format!("{get}Proxy-Authorization: Basic YW5uOnNlY3JldA==\r\n"));
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\nGET /x HTTP/1.1"), "{answer}");
    let answer = ask(&setting, site, "GET /y HTTP/1.1\r\nHost: site.example\r\n");
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\nGET /y HTTP/1.1"), "{answer}");
    proxy.shut_down();
}

/// A ClientHello for this name and protocol.
pub fn hello(name: &str, protocol: &str) -> Vec<u8> {
    let sized = |bytes: Vec<u8>| [&(bytes.len() as u16).to_be_bytes()[..], &bytes].concat();
    let name = sized([&[0][..], &sized(name.as_bytes().to_vec())].concat());
    let protocol = sized([&[protocol.len() as u8], protocol.as_bytes()].concat());
    let extensions = [&[0, 0][..], &sized(name), &[0, 16], &sized(protocol)].concat();
    let body = [&[3, 3][..], &[7; 32], &[0, 0, 2, 0x13, 1, 1, 0], &sized(extensions)].concat();
    let message = [&[1, 0][..], &sized(body)].concat();
    [&[22, 3, 1][..], &sized(message)].concat()
}

#[test]
#[ignore = "root"]
fn the_example_of_tls_works() {
    let server = SERVER.port(Family::V4, 8443);
    let words = [("192.0.2.10:8443", &server.to_string()[..])];
    let (setting, mut proxy) = start(lab(), &example(CONFIGURATION, "### TLS routes", &words));
    setting.echo(server);
    let front = FORWARDER_TO_CLIENT.port(Family::V4, 443);
    round_trip(&mut setting.connect(front), &hello("www.example.org", "h2"));
    let mut stream = setting.connect(front);
    stream.write_all(&hello("www.example.com", "h2")).unwrap();
    let mut alert = [0; 7];
    stream.read_exact(&mut alert).unwrap();
    assert_eq!(alert[0], 21, "no route leads there");
    proxy.shut_down();
}

#[test]
#[ignore = "root"]
fn the_example_of_plugs_works() {
    let (front, server) = (FORWARDER_TO_CLIENT.port(Family::V6, 8080), SERVER.port(Family::V4, 80));
    // of a pool, a server that accepts and one that does not
    let (of_pool, member) = (FORWARDER_TO_CLIENT.port(Family::V4, 5432), SERVER.port(Family::V4, 5432));
    let words = [
        ("[::1]:8080", &front.to_string()[..]),
        ("example.org:80", &server.to_string()),
        ("192.0.2.1:5432", &of_pool.to_string()),
        ("10.0.0.3:5432", &member.to_string()),
        ("10.0.0.4:5432", &SERVER.port(Family::V4, 5433).to_string()),
    ];
    let (setting, mut proxy) = start(lab(), &example(CONFIGURATION, "## Plugs", &words));
    [server, member].into_iter().for_each(|at| setting.echo(at));
    for at in [front, of_pool, of_pool] {
        round_trip(&mut setting.connect(at), b"whatever it is");
    }
    proxy.shut_down();
}

/// Sends a request with a password. Returns the code and the address of the answer.
fn socks(setting: &Setting, front: SocketAddr, command: u8, to: SocketAddr) -> (TcpStream, u8, SocketAddr) {
    let mut stream = setting.connect(front);
    let SocketAddr::V4(v4) = to else { panic!("{to}") };
    let target = [&v4.ip().octets()[..], &v4.port().to_be_bytes()].concat();
    stream.write_all(&[&b"\x05\x01\x02\x01\x03ann\x06secret\x05"[..], &[command, 0, 1], &target].concat()).unwrap();
    let mut answer = [0; 14];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!((&answer[..5], answer[7]), (&[5, 2, 1, 0, 5][..], 1), "{answer:?}");
    let ip = Ipv4Addr::new(answer[8], answer[9], answer[10], answer[11]);
    (stream, answer[5], (ip, u16::from_be_bytes([answer[12], answer[13]])).into())
}

#[test]
#[ignore = "root"]
fn the_example_of_socks_works() {
    let front = FORWARDER_TO_CLIENT.port(Family::V4, 1080);
    let words = [("192.0.2.1:1080", &front.to_string()[..])];
    let (setting, mut proxy) = start(lab(), &example(include_str!("../../../docs/socks.md"), "# SOCKS", &words));
    let (server, elsewhere) = (SERVER.port(Family::V4, 7000), SocketAddr::from(([192, 0, 2, 77], 80)));
    setting.echo(server);
    let (mut stream, code, _) = socks(&setting, front, 1, server);
    assert_eq!(code, 0);
    round_trip(&mut stream, b"connected");
    assert_eq!(socks(&setting, front, 1, elsewhere).1, 2, "the rules deny it");
    // the server connects
    let (mut stream, code, at) = socks(&setting, front, 2, server);
    assert!(code == 0 && (40000..41000).contains(&at.port()), "{at}");
    let mut peer = setting.lab.server.run(|| TcpStream::connect(at)).unwrap();
    let mut second = [0; 10];
    stream.read_exact(&mut second).unwrap();
    assert_eq!(second[..8], [&[5, 0, 0, 1], &SERVER.v4.octets()[..]].concat());
    peer.write_all(b"bound").unwrap();
    let mut got = [0; 5];
    stream.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"bound");
    // datagrams
    let (_stream, code, at) = socks(&setting, front, 3, ([0, 0, 0, 0], 0).into());
    assert_eq!(code, 0);
    let there = setting.lab.server.run(|| UdpSocket::bind(server)).unwrap();
    let here = setting.lab.client.run(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
    [&there, &here].iter().for_each(|socket| socket.set_read_timeout(Some(PATIENCE)).unwrap());
    let header = [&[0, 0, 0, 1][..], &SERVER.v4.octets(), &server.port().to_be_bytes()].concat();
    here.send_to(&[&header[..], b"question"].concat(), at).unwrap();
    let mut datagram = [0; 100];
    let (n, from) = there.recv_from(&mut datagram).unwrap();
    assert_eq!(&datagram[..n], b"question");
    there.send_to(b"answer", from).unwrap();
    let n = here.recv(&mut datagram).unwrap();
    assert_eq!(datagram[..n], [&header[..], b"answer"].concat());
    proxy.client(&["stop", "--flush"]);
    assert!(proxy.wait().success());
}

/// Its hosts know of nothing.
#[test]
#[ignore = "root"]
fn the_example_of_edge_proxies_works() {
    let page = include_str!("../../../docs/edge.md");
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).unwrap();
    let (setting, mut proxy) = start(lab, &example(page, "# Edge proxies", &[]));
    let server = SERVER.port(Family::V4, 80);
    serve_http(&setting, server);
    let answer = ask(&setting, server, "GET /z HTTP/1.1\r\nHost: any.example\r\n");
    assert!(answer.contains("\r\nVia: 1.1 longsplice\r\n") && answer.ends_with("\r\n\r\nGET /z HTTP/1.1"), "{answer}");
    proxy.shut_down();
}

#[test]
#[ignore = "root"]
fn the_example_of_caches_works() {
    let (front, server) = (FORWARDER_TO_CLIENT.v4.to_string(), SERVER.port(Family::V4, 8080));
    let of = server.to_string();
    let words = [("192.0.2.1", &front[..]), ("10.0.0.1:8080", &of), ("/var/cache/", "")];
    let (setting, mut proxy) = start(lab(), &example(include_str!("../../../docs/cache.md"), "# The cache", &words));
    let listener = setting.listen(server);
    let [forward, site] = [3128, 80].map(|port| FORWARDER_TO_CLIENT.port(Family::V4, port));
    for (n, (front, path)) in (1..).zip([(forward, format!("http://{server}/x")), (site, "/x".into())]) {
        let get = || ask(&setting, front, &format!("GET {path} HTTP/1.1\r\nHost: {server}\r\n"));
        let serving = listener.try_clone().unwrap();
        let served = thread::spawn(move || {
            let (mut stream, _) = serving.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            while !lines.next().unwrap().unwrap().is_empty() {}
            let fields = "Cache-Control: max-age=1000\r\nContent-Length: 2\r\nConnection: close";
            write!(stream, "HTTP/1.1 200 OK\r\n{fields}\r\n\r\nhi").unwrap();
        });
        assert!(get().ends_with("\r\n\r\nhi"));
        served.join().unwrap();
        eventually("a stored reply", || (proxy.count("proxy", "cache_stored") == n).then_some(()));
        assert!(get().ends_with("\r\n\r\nhi"), "nobody else answers");
        assert_eq!(proxy.count("proxy", "cache_hits"), n);
    }
    proxy.shut_down();
}

#[test]
#[ignore = "root"]
fn the_example_of_taps_works() {
    let (front, server) = (FORWARDER_TO_CLIENT.port(Family::V4, 5432), SERVER.port(Family::V4, 5432));
    let words = [
        ("192.0.2.1:5432", &front.to_string()[..]),
        ("10.0.0.5:5432", &server.to_string()),
        ("/var/log/longsplice/", ""),
    ];
    let (setting, mut proxy) = start(lab(), &example(include_str!("../../../docs/taps.md"), "# Taps", &words));
    setting.echo(server);
    round_trip(&mut setting.connect(front), b"whatever it is");
    proxy.wait_line(&["how=closed"]);
    proxy.shut_down();
    let files = fs::read_dir(setting.dir.path().join("taps")).unwrap().map(|file| file.unwrap().path());
    let contents: Vec<_> = files.map(|file| fs::read(file).unwrap()).collect();
    assert_eq!(contents, vec![b"whatever it is"; 2]);
}

/// Each server sees whom the page says.
#[test]
#[ignore = "root"]
fn the_examples_of_handshakes_between_hosts_work() {
    let (front, [transparent, plugged]) =
        (FORWARDER_TO_CLIENT.port(Family::V4, 8080), [5432, 80].map(|port| SERVER.port(Family::V4, port)));
    let words = [("192.0.2.1:8080", &front.to_string()[..]), ("10.0.0.5:80", &plugged.to_string())];
    let page = include_str!("../../../docs/transparent.md");
    let (setting, mut proxy) = start(lab(), &example(page, "# Handshakes between hosts", &words));
    for (to, server) in [(transparent, transparent), (front, plugged)] {
        let listener = setting.listen(server);
        let accepted = thread::spawn(move || listener.accept().unwrap());
        let mut client = setting.connect(to);
        let (mut theirs, who) = accepted.join().unwrap();
        assert_eq!(who.ip() == CLIENT.ip(Family::V4), to == server, "{who}");
        client.write_all(b"hello").unwrap();
        let mut got = [0; 5];
        theirs.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello");
        proxy.wait_flow("spliced");
        drop((client, theirs));
        proxy.flows_end();
    }
    proxy.shut_down();
}
