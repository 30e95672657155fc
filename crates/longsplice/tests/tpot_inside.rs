//! Reading inside of translucent connections: when the server is asked, what is refused, and a stop in between. Needs root and
//! eBPF.

use crate::running::{
    LONGSPLICE, Running, Setting, eventually,
    translucent::{PATIENCE, PORT, SECOND_PORT, listeners, translucent_at, translucent_with},
};
use longsplice_lab::{ChildGuard, Family, Lab, Options, Shape, topology::SERVER};
use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
};

/// A request in two parts.
const REQUEST: [&[u8]; 2] = [b"GET / HTTP/1.1\r\nHo", b"st: a.test\r\nConnection: close\r\n\r\n"];
/// The beginning of a TLS record with a ClientHello.
const HELLO: &[u8] = &[22, 3, 1, 1, 0, 1, 0];

/// Reads HTTP at one port and TLS at the other.
fn both(more: &str) -> String {
    listeners(PORT, &format!("inside = \"http\"\n{more}"))
        + &listeners(SECOND_PORT, &format!("inside = \"tls\"\n{more}"))
}

fn serve(here: &Setting, at: SocketAddr) -> TcpListener {
    let server = here.listen(at);
    server.set_nonblocking(true).unwrap();
    server
}

fn nobody_came(server: &TcpListener) {
    assert_eq!(server.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}

/// Connects and sends a part of a message, all of which the proxy has read when this returns.
fn begin(here: &Setting, proxy: &Running, at: SocketAddr, part: &[u8]) -> TcpStream {
    let mut client = here.connect(at);
    client.write_all(part).unwrap();
    proxy.comes_to_rest();
    client
}

/// Sends the rest of the request, which the server answers.
fn complete(mut client: TcpStream, server: &TcpListener) {
    client.write_all(REQUEST[1]).unwrap();
    let mut accepted = eventually("a connection", || server.accept().ok()).0;
    accepted.set_nonblocking(false).unwrap();
    accepted.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut one = [0];
        accepted.read_exact(&mut one).unwrap();
        head.extend(one);
    }
    assert!(head.starts_with(b"GET / HTTP/1.1\r\nHost: a.test\r\n"), "{head:?}");
    accepted.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi").unwrap();
    let mut reply = String::new();
    client.read_to_string(&mut reply).unwrap();
    assert!(reply.starts_with("HTTP/1.1 200") && reply.ends_with("\r\n\r\nhi"), "{reply}");
}

#[test]
#[ignore = "root"]
fn the_server_is_asked_after_the_first_request() {
    let here = translucent_with(&both(""));
    let (proxy, _host) = (here.start(), here.host());
    for family in Family::BOTH {
        let at = SERVER.port(family, PORT);
        let server = serve(&here, at);
        let client = begin(&here, &proxy, at, REQUEST[0]);
        nobody_came(&server);
        complete(client, &server);
    }
}

/// The client learns that it is refused, the operator why, and the server nothing.
#[test]
#[ignore = "root"]
fn what_cannot_be_read_is_refused() {
    let here = translucent_with(&both("limits = { handshake = 1 }"));
    let (proxy, _host) = (here.start(), here.host());
    let alert = |description| vec![21, 3, 3, 0, 2, 2, description];
    for family in Family::BOTH {
        let servers = [PORT, SECOND_PORT].map(|port| serve(&here, SERVER.port(family, port)));
        for (server, sent, answer, why) in [
            (0, HELLO, b"HTTP/1.1 400 ".to_vec(), "how=bad-request"),
            (1, b"GET / HTTP/1.1\r\n\r\n", Vec::new(), "not TLS: begins with byte 0x47"),
            (1, &[22, 3, 3, 0, 4, 2, 0, 0, 0], alert(10), "begins with message 2"),
            (1, &[22, 3, 3, 0, 0], alert(50), "a TLS record that is none"),
            (1, HELLO, Vec::new(), "handshake took too long"),
            (1, b"", Vec::new(), "handshake took too long"), // whose server speaks first
        ] {
            let mut client = here.connect(servers[server].local_addr().unwrap());
            client.write_all(sent).unwrap();
            let mut got = Vec::new();
            client.read_to_end(&mut got).unwrap();
            assert!(if server == 0 { got.starts_with(&answer) } else { got == answer }, "{sent:?}: {got:?}");
            let own = format!("client={} ", client.local_addr().unwrap());
            drop(client);
            let line = proxy.wait_line(&[&own]);
            assert!(line.contains(why), "{sent:?}: {line}");
        }
        servers.iter().for_each(nobody_came);
    }
    assert_eq!(["bad_requests", "timeouts"].map(|name| proxy.count("proxy", name)), [8, 4]);
}

/// Whoever is in the middle of a request is reset at once.
#[test]
#[ignore = "root"]
fn a_stop_in_the_middle_of_a_request() {
    let here = translucent_with(&both(""));
    let (mut proxy, _host) = (here.start(), here.host());
    let all = Family::BOTH.into_iter().flat_map(|family| [(family, PORT, REQUEST[0]), (family, SECOND_PORT, HELLO)]);
    let begun = |(family, port, part)| {
        let at = SERVER.port(family, port);
        (serve(&here, at), begin(&here, &proxy, at, part))
    };
    let clients: Vec<_> = all.map(begun).collect();
    proxy.shut_down();
    assert!(!proxy.messages().contains("did not end"), "{}", proxy.messages());
    for (server, mut client) in clients {
        assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        nobody_came(&server);
    }
}

/// Requests that have begun are served, and new connections reach the server itself.
#[test]
#[ignore = "root"]
fn a_drain_in_the_middle_of_a_request() {
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).unwrap();
    let here = translucent_at(lab, &both(""));
    let (mut proxy, _host) = (here.start(), here.host());
    let begun = |family| {
        let at = SERVER.port(family, PORT);
        (serve(&here, at), begin(&here, &proxy, at, REQUEST[0]))
    };
    let clients = Family::BOTH.map(begun);
    let stop = ["stop", "--drain", "20", "--control", proxy.control().to_str().unwrap()];
    let mut stop = ChildGuard::spawn(Command::new(LONGSPLICE).args(stop)).unwrap();
    proxy.wait_message("draining for at most");
    proxy.comes_to_rest();
    for (server, client) in clients {
        let late = here.connect(server.local_addr().unwrap());
        let (_, from) = eventually("a connection", || server.accept().ok());
        assert_eq!(from, late.local_addr().unwrap());
        complete(client, &server);
    }
    assert!(stop.wait(PATIENCE).is_some_and(|status| status.success()), "{}", stop.output());
    assert!(proxy.wait().success());
}
