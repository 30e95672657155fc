//! The PROXY protocol over real sockets on the loopback device: headers that come in pieces, what becomes of the
//! addresses, and HAProxy on either side. Of Debian: haproxy, curl.

use crate::{
    member::Member,
    proxying::{LIMIT, OPEN, Proxy, closed},
};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use std::{io::ErrorKind, net::SocketAddr, os::fd::AsRawFd, process::Stdio};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    process::{Child, Command},
    time::timeout,
};

const FROM: &str = "proxy_protocol.from = \"127.0.0.0/8\"\n";
const V1: &[u8] = b"PROXY TCP4 192.0.2.1 198.51.100.2 40000 443\r\n";
const V2: &[u8] = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0f\xc0\0\x02\x01\xc6\x33\x64\x02\x9c\x40\x01\xbb\x04\0\0";

/// A server that sends back the first so many bytes of each connection, and closes.
async fn echo(len: usize) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut bytes = vec![0; len];
                stream.read_exact(&mut bytes).await.unwrap();
                stream.write_all(&bytes).await.unwrap();
            });
        }
    });
    addr
}

/// What is answered to `input`, sent in two pieces and without a FIN.
async fn answer(proxy: &Proxy, input: &[u8], cut: usize) -> Vec<u8> {
    let mut client = proxy.connect().await;
    client.set_nodelay(true).unwrap();
    client.write_all(&input[..cut]).await.unwrap();
    tokio::task::yield_now().await;
    client.write_all(&input[cut..]).await.unwrap();
    let mut seen = Vec::new();
    timeout(LIMIT, client.read_to_end(&mut seen)).await.unwrap().unwrap();
    seen
}

#[tokio::test]
async fn headers_cut_at_every_byte_with_the_protocol_behind_them() {
    let target = echo(5).await;
    let port = target.port().to_be_bytes();
    let socks = [&[5, 1, 0, 5, 1, 0, 1, 127, 0, 0, 1, port[0], port[1]][..], b"hello"].concat();
    let connect = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\nhello");
    let plug = format!("target = \"{target}\"\n");
    for (protocol, more, input, skip) in
        [("plug", &*plug, &b"hello"[..], 0), ("socks5", OPEN, &socks, 12), ("http", OPEN, connect.as_bytes(), 39)]
    {
        let proxy = Proxy::start(protocol, &format!("{more}{FROM}")).await;
        let mut count = 0;
        for header in [V1, V2] {
            let whole = [header, input].concat();
            for cut in 0..whole.len() {
                let seen = answer(&proxy, &whole, cut).await;
                assert_eq!(&seen[skip..], b"hello", "{protocol}, cut at {cut}: {seen:?}");
                count += 1;
            }
        }
        let lines = proxy.lines().await;
        assert_eq!(lines.len(), count);
        assert!(lines.iter().all(|l| l["client"] == "192.0.2.1:40000" && l["bytes_up"] == 5), "{protocol}: {lines:?}");
    }
}

#[tokio::test]
async fn rules_see_the_source() {
    let rules = "rules = [{ action = \"deny\", client = \"192.0.2.1\" }]\n";
    let proxy = Proxy::start("socks5", &format!("{rules}{FROM}")).await;
    let socks = [5, 1, 0, 5, 1, 0, 1, 198, 51, 100, 9, 0, 1];
    assert_eq!(answer(&proxy, &[V1, &socks].concat(), 9).await[..4], [5, 0, 5, 2]);
    let line = proxy.line().await;
    assert_eq!((&line["refusal"], &line["client"]), (&"rule 1".into(), &"192.0.2.1:40000".into()));
}

async fn is_reset(client: &mut TcpStream) {
    let e = timeout(LIMIT, client.read_u8()).await.unwrap().unwrap_err();
    assert!([ErrorKind::ConnectionReset, ErrorKind::UnexpectedEof].contains(&e.kind()), "{e}");
}

#[tokio::test]
async fn what_is_no_header_is_refused() {
    let proxy = Proxy::start("plug", &format!("target = \"{}\"\nlimits.handshake = 0.2\n{FROM}", closed().await)).await;
    for input in [&b"GET / HTTP/1.1\r\n"[..], b"PROXY TCP4 1.2.3.4\r\n", b"PROXY ", b""] {
        let mut client = proxy.connect().await;
        client.write_all(input).await.unwrap();
        is_reset(&mut client).await;
    }
    let lines = proxy.lines().await;
    assert!(lines.iter().all(|l| l["client"].as_str().unwrap().starts_with("127.0.0.1:")), "{lines:?}");
    let counters = proxy.server.counters();
    assert_eq!((counters.bad_requests, counters.timeouts), (2, 2), "{lines:?}");
}

#[tokio::test]
async fn without_trust_a_header_is_data_or_the_end() {
    let target = echo(V1.len()).await;
    for (more, denied) in [("from = \"10.0.0.0/8\"", false), ("from = \"10.0.0.0/8\", required = true", true)] {
        let proxy = Proxy::start("plug", &format!("target = \"{target}\"\nproxy_protocol = {{ {more} }}")).await;
        if denied {
            is_reset(&mut proxy.connect().await).await;
            assert_eq!(proxy.line().await["refusal"], "not from where PROXY headers may come from");
        } else {
            assert_eq!(answer(&proxy, V1, 3).await, V1);
        }
    }
}

#[tokio::test]
async fn connections_are_counted_for_the_source() {
    let proxy = Proxy::start("socks5", &format!("limits.connections_per_client = 1\n{FROM}")).await;
    let mut held = Vec::new();
    for header in [V1, b"PROXY TCP4 192.0.2.2 198.51.100.2 40000 443\r\n", b"PROXY UNKNOWN\r\n"] {
        let mut client = proxy.connect().await;
        client.write_all(&[header, &[5, 1, 0]].concat()).await.unwrap();
        assert_eq!(client.read_u16().await.unwrap(), 0x500);
        held.push(client);
    }
    let mut again = proxy.connect().await;
    again.write_all(V1).await.unwrap();
    is_reset(&mut again).await;
    assert_eq!(proxy.server.counters().over_limit, 1);
    drop(held);
    let lines = proxy.lines().await;
    assert_eq!((lines.len(), lines.iter().filter(|line| line["how"] == "limit").count()), (4, 1));
    let mut again = proxy.connect().await;
    again.write_all(&[V1, &[5, 1, 0]].concat()).await.unwrap();
    assert_eq!(again.read_u16().await.unwrap(), 0x500);
}

#[tokio::test]
async fn a_header_precedes_all_else() {
    for (version, len) in [("v1", 0), ("v2", 28)] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Proxy::start(
            "plug",
            &format!("target = \"{}\"\nproxy_protocol.send = \"{version}\"", listener.local_addr().unwrap()),
        )
        .await;
        let mut client = proxy.connect().await;
        client.write_all(b"hello").await.unwrap();
        let v1 = format!(
            "PROXY TCP4 127.0.0.1 127.0.0.1 {} {}\r\n",
            client.local_addr().unwrap().port(),
            client.peer_addr().unwrap().port()
        );
        let (mut server, _) = timeout(LIMIT, listener.accept()).await.unwrap().unwrap();
        let mut seen = vec![0; if len == 0 { v1.len() } else { len }];
        server.read_exact(&mut seen).await.unwrap();
        assert!(if len == 0 { seen == v1.as_bytes() } else { seen.starts_with(&V2[..12]) }, "{seen:?}");
        let mut data = [0; 5];
        server.read_exact(&mut data).await.unwrap();
        assert_eq!(&data, b"hello");
    }
}

/// A request to a site by a client at this address, which a proxy before us announces.
fn announced(client: &str, path: &str) -> Vec<u8> {
    let header = format!("PROXY TCP4 {client} 198.51.100.2 40000 80\r\n");
    format!("{header}GET {path} HTTP/1.1\r\nHost: site.example\r\nConnection: close\r\n\r\n").into_bytes()
}

#[tokio::test]
async fn sites_know_clients_by_the_source() {
    let members = [Member::start("a").await, Member::start("b").await, Member::start("c").await];
    let servers = members.each_ref().map(|m| m.addr.to_string());
    let proxy = Proxy::start(
        "http",
        &format!(
            "forwarded = \"x-forwarded-for\"\nrules = [{{ action = \"deny\", client = \"192.0.2.9\" }}]\n{FROM}\
             [[listener.route]]\npool = \"p\"\n[pool.p]\nservers = {servers:?}\nbalance = \"consistent-hash\"\n"
        ),
    )
    .await;
    let mut owners = Vec::new();
    for n in 10..40 {
        let client = format!("192.0.2.{n}");
        let [first, second] = [announced(&client, "/"), announced(&client, "/")];
        let [first, second] = [answer(&proxy, &first, 30).await, answer(&proxy, &second, 60).await];
        assert_eq!(first.last(), second.last(), "{client} has one server");
        owners.extend(first.last().copied());
    }
    assert!((b'a'..=b'c').all(|name| owners.contains(&name)), "{owners:?}");
    let seen = members.each_ref().map(Member::seen).concat();
    for n in 10..40 {
        let field = format!("X-Forwarded-For: 192.0.2.{n}\r\n");
        assert_eq!(seen.iter().filter(|head| head.contains(&field)).count(), 2);
    }
    // Kept connections carried requests of several clients.
    assert!(members.iter().all(|m| m.connections() == 1));
    assert!(answer(&proxy, &announced("192.0.2.9", "/"), 1).await.starts_with(b"HTTP/1.1 403 "));
    let lines = proxy.lines().await;
    assert_eq!((&lines[60]["client"], &lines[60]["refusal"]), (&"192.0.2.9:40000".into(), &"rule 1".into()));
}

/// HAProxy with these sections, of which the first listens on the address that is returned. Its socket listens already, so
/// nobody has to wait, and no other test can be given the port.
async fn haproxy(sections: &str) -> (Child, TempDir, SocketAddr) {
    let dir = tempfile::tempdir().unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    fcntl(&listener, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
    let text = format!(
        "defaults\n timeout connect 10s\n timeout client 10s\n timeout server 10s\n{}",
        sections.replace("LISTEN", &format!("fd@{}", listener.as_raw_fd()))
    );
    std::fs::write(dir.path().join("haproxy.cfg"), text).unwrap();
    let mut command = Command::new("haproxy");
    command.args(["-db", "-f", "haproxy.cfg"]).current_dir(dir.path()).stdin(Stdio::null()).kill_on_drop(true);
    (command.spawn().unwrap(), dir, listener.local_addr().unwrap())
}

/// What a client at this address is answered to a request of HTTP, and its own port.
async fn ask(from: &str, at: SocketAddr) -> (String, u16) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
    let mut client = socket.connect(at).await.unwrap();
    let port = client.local_addr().unwrap().port();
    client.write_all(b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
    let mut seen = String::new();
    timeout(LIMIT, client.read_to_string(&mut seen)).await.unwrap().unwrap();
    (seen.split("\r\n\r\n").nth(1).unwrap_or_default().to_owned(), port)
}

#[tokio::test]
async fn haproxy_before_and_behind() {
    // Says which connection it believes to serve.
    let (_behind, _dir, behind) = haproxy(
        "frontend f\n mode http\n bind LISTEN accept-proxy\n\
         http-request return status 200 content-type text/plain lf-string \"%[src]:%[src_port] %[dst]:%[dst_port]\"\n",
    )
    .await;
    for (received, sent) in
        [("send-proxy", "v2"), ("send-proxy-v2", "v1"), ("send-proxy-v2 proxy-v2-options crc32c,unique-id", "v2")]
    {
        let own = format!("target = \"{behind}\"\nproxy_protocol.send = \"{sent}\"\n");
        let proxy = Proxy::start("plug", &format!("{own}{FROM}proxy_protocol.required = true\n")).await;
        let here = proxy.server.listen_addrs()[0];
        let (_before, _dir, before) =
            haproxy(&format!("listen l\n mode tcp\n bind LISTEN\n server s {here} {received}\n")).await;
        let (seen, port) = ask("127.0.0.5", before).await;
        assert_eq!(seen, format!("127.0.0.5:{port} {before}"), "{received}, then {sent}");
        let line = proxy.line().await;
        assert_eq!((&line["client"], &line["how"]), (&format!("127.0.0.5:{port}").into(), &"closed".into()));
        // Without a proxy before us, the connection is the client's own.
        let direct = Proxy::start("plug", &own).await;
        let (seen, port) = ask("127.0.0.6", direct.server.listen_addrs()[0]).await;
        assert_eq!(seen, format!("127.0.0.6:{port} {}", direct.server.listen_addrs()[0]));
    }
}

#[tokio::test]
async fn requests_of_http_are_preceded_by_one_header_per_connection() {
    let (_behind, _dir, behind) = haproxy(
        "frontend f\n mode http\n bind LISTEN accept-proxy\n\
         http-request return status 200 content-type text/plain lf-string \"%[src]:%[src_port];\"\n",
    )
    .await;
    let proxy = Proxy::start("http", &format!("{OPEN}proxy_protocol.send = \"v2\"")).await;
    let mut client = proxy.connect().await;
    let request = format!("GET http://{behind}/ HTTP/1.1\r\nHost: {behind}\r\n\r\n");
    let last = format!("GET http://{behind}/ HTTP/1.1\r\nHost: {behind}\r\nConnection: close\r\n\r\n");
    client.write_all(format!("{request}{last}").as_bytes()).await.unwrap();
    let mut seen = String::new();
    timeout(LIMIT, client.read_to_string(&mut seen)).await.unwrap().unwrap();
    let source = format!("{};", client.local_addr().unwrap());
    assert_eq!(seen.matches(&source).count(), 2, "{seen}");
    assert_eq!(proxy.server.counters().reused, 1);
}
