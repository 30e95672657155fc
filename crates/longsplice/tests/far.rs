//! Far clients of near servers, with each protocol of streams and no policy: what their servers send is spliced from its first
//! byte. Needs root and eBPF, and fails without.

use crate::{
    pages::hello,
    running::{LONGSPLICE, Pins, Running, connect, eventually, listener},
};
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection, Shape,
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::socks5_address,
};
use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};
use test_case::test_case;

/// Round-trip time of the client.
const FAR: Duration = Duration::from_millis(200);
const BYTES: usize = 100_000;
/// A start may come too late on a machine that stands still for a while.
const TRIES: usize = 4;

/// Asks a proxy of this protocol for the server.
fn ask(stream: &mut TcpStream, protocol: &str, server: SocketAddr) {
    let mut expect = |asked: &[u8], answered: usize| {
        stream.write_all(asked).unwrap();
        stream.read_exact(&mut vec![0; answered]).unwrap();
    };
    match protocol {
        "socks5" => {
            expect(&[5, 1, 0], 2);
            let address = socks5_address(server);
            expect(&[&[5, 1, 0][..], &address].concat(), 3 + address.len());
        }
        "http" => {
            let head = format!("CONNECT {server} HTTP/1.1\r\nHost: {server}\r\n\r\n");
            stream.write_all(head.as_bytes()).unwrap();
            let mut answer = Vec::new();
            while !answer.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                answer.push(byte[0]);
            }
            assert!(answer.starts_with(b"HTTP/1.1 200"));
        }
        "tls" => stream.write_all(&hello("far.example", "h2")).unwrap(),
        _ => {}
    }
}

#[test_case("plug"; "plug")]
#[test_case("socks5"; "socks5")]
#[test_case("http"; "connect")]
#[test_case("tls"; "tls")]
#[ignore = "root"]
fn all_that_a_near_server_sends_to_a_far_client_is_spliced(protocol: &'static str) {
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let family = if protocol == "tls" { Family::V6 } else { Family::V4 };
    let (front, server) = (FORWARDER_TO_CLIENT.port(family, 7000), SERVER.port(family, 7001));
    let servers = lab.server.run(|| TcpListener::bind(server)).unwrap();
    thread::spawn(move || {
        while let Ok((mut stream, _)) = servers.accept() {
            // it answers at once, which no splice may be late for
            if stream.read(&mut [0; 2000]).is_ok_and(|n| n > 0) {
                stream.write_all(&[7; BYTES]).unwrap();
            }
        }
    });
    let more = match protocol {
        "plug" => format!("target = \"{server}\""),
        "tls" => format!("route = [{{ name = \"far.example\", target = \"{server}\" }}]"),
        _ => String::new(),
    };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("longsplice.toml");
    fs::write(&file, listener(protocol, &front.to_string(), &more)).unwrap();
    let arguments = ["--config", file.to_str().unwrap(), "--log-format", "json", "--path", "auto"];
    let mut proxy = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
    let _far = lab.impair(LinkDirection::FromClient, Impair { delay: FAR, ..Impair::NONE }).unwrap();
    let fetch = |n: usize| {
        let mut stream = lab.client.run(|| connect(front));
        ask(&mut stream, protocol, server);
        if protocol != "tls" {
            stream.write_all(b"fetch").unwrap(); // a ClientHello asks by itself
        }
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        assert!(all == [7; BYTES], "{} bytes", all.len());
        drop(stream);
        let line = eventually("a line", || proxy.records().get(n).cloned());
        let is_whole = line["spliced_down"] == BYTES as u64;
        (is_whole && line["path"]["cause"] == "far").then_some(()).ok_or(line)
    };
    let failed: Vec<_> = (0..TRIES).map_while(|n| fetch(n).err()).collect();
    assert!(failed.len() < TRIES, "{failed:#?}");
    proxy.end(&Pins::of(&lab.forwarder));
}
