//! Addresses of the proxy's own machine: clients do not choose them as targets, and no connection comes back. Needs root.

use crate::running::{LONGSPLICE, Pins, Running, connect, echo, eventually, is_reset, round_trip};
use longsplice_lab::{Family, Lab, Shape, topology};
use serde_json::Value;
use std::{
    fs,
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
};

const SOCKS: u16 = 1080;
const OPEN: u16 = 1081;
const HTTP: u16 = 3128;
const SELF: u16 = 7001;
const FAR: u16 = 7002;
const NEAR: u16 = 7003;
const PLUG: u16 = 7004;
const SITE: u16 = 7005;
/// A service on the proxy's machine.
const SERVICE: u16 = 22;
/// An address that the machine gets while the proxy runs.
const LATE: &str = "10.77.2.99";

fn at(family: Family, port: u16) -> SocketAddr {
    topology::FORWARDER_TO_CLIENT.port(family, port)
}

/// Asks a SOCKS proxy for a target. Returns the code of its reply.
fn ask(proxy: SocketAddr, target: SocketAddr) -> (TcpStream, u8) {
    let mut stream = connect(proxy);
    stream.write_all(&[5, 1, 0]).unwrap();
    stream.read_exact(&mut [0; 2]).unwrap();
    let address = match target.ip() {
        IpAddr::V4(ip) => [&[1], &ip.octets()[..]].concat(),
        IpAddr::V6(ip) => [&[4], &ip.octets()[..]].concat(),
    };
    stream.write_all(&[&[5, 1, 0], &address[..], &target.port().to_be_bytes()].concat()).unwrap();
    let mut reply = [0; 4];
    stream.read_exact(&mut reply).unwrap();
    let mut rest = vec![0; if reply[3] == 1 { 6 } else { 18 }];
    stream.read_exact(&mut rest).unwrap();
    (stream, reply[1])
}

#[test]
#[ignore = "root"]
fn own_services_are_guarded_and_no_connection_comes_back() {
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let pins = Pins::of(&lab.forwarder);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("longsplice.toml");
    let near = topology::FORWARDER_TO_CLIENT.v4;
    let far = topology::FORWARDER_TO_SERVER.v4;
    let plug = |listen: u16, target: &str| {
        format!("[[listener]]\nprotocol = \"plug\"\nlisten = \"0.0.0.0:{listen}\"\ntarget = \"{target}\"\n")
    };
    let config = [
        format!("[[listener]]\nprotocol = \"socks5\"\nlisten = \"0.0.0.0:{SOCKS}\"\n"),
        format!("[[listener]]\nprotocol = \"socks5\"\nlisten = \"[::]:{SOCKS}\"\n"),
        format!("[[listener]]\nprotocol = \"http\"\nlisten = \"0.0.0.0:{HTTP}\"\n"),
        format!(
            "[[listener]]\nprotocol = \"socks5\"\nlisten = \"0.0.0.0:{OPEN}\"\n\
             rules = [{{ action = \"allow\", target = \"{far}\" }}, {{ action = \"allow\", target = \"10.0.0.0/8\" }}]\n"
        ),
        plug(SELF, &format!("{far}:{SELF}")),
        plug(FAR, &format!("{far}:{NEAR}")),
        plug(NEAR, &format!("{near}:{FAR}")),
        plug(PLUG, &format!("{far}:{SERVICE}")),
        format!(
            "[[listener]]\nprotocol = \"http\"\nlisten = \"0.0.0.0:{SITE}\"\nroute = [{{ pool = \"self\" }}]\n\
             [pool.self]\nservers = [\"{far}:{SITE}\"]\n"
        ),
    ];
    fs::write(&file, config.concat()).unwrap();
    let arguments = ["--config", file.to_str().unwrap(), "--log-format", "json"];
    let mut proxy = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
    echo(lab.forwarder.run(|| TcpListener::bind(("::", SERVICE))).unwrap()); // both families
    echo(lab.server.run(|| TcpListener::bind((topology::SERVER.v4, SERVICE))).unwrap());

    const NOT_ALLOWED: u8 = 2;
    let asked = |proxy: SocketAddr, target: SocketAddr| lab.client.run(|| ask(proxy, target));
    for family in Family::BOTH {
        for own in [topology::FORWARDER_TO_CLIENT, topology::FORWARDER_TO_SERVER] {
            assert_eq!(asked(at(family, SOCKS), own.port(family, SERVICE)).1, NOT_ALLOWED, "{own:?}");
        }
    }
    let wrapped: IpAddr = format!("64:ff9b::{far}").parse().unwrap();
    assert_eq!(asked(at(Family::V4, SOCKS), (wrapped, SERVICE).into()).1, NOT_ALLOWED);
    let (mut to_server, code) = asked(at(Family::V4, SOCKS), topology::SERVER.port(Family::V4, SERVICE));
    assert_eq!(code, 0, "others are reached as ever");
    round_trip(&mut to_server, b"hello");
    let http = lab.client.run(|| {
        let mut stream = connect(at(Family::V4, HTTP));
        stream.write_all(format!("CONNECT {far}:{SERVICE} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes()).unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap();
        String::from_utf8_lossy(&status).into_owned()
    });
    assert_eq!(http, "HTTP/1.1 403");

    // a rule opens the address that it names, and no other
    let open = |ip| asked(at(Family::V4, OPEN), SocketAddr::new(ip, SERVICE));
    let (mut opened, code) = open(far.into());
    assert_eq!(code, 0);
    round_trip(&mut opened, b"hello");
    assert_eq!(open(near.into()).1, NOT_ALLOWED, "10.0.0.0/8 names more than this machine");
    // even then, the listener itself is no target
    assert_eq!(asked(at(Family::V4, OPEN), (far, OPEN).into()).1, NOT_ALLOWED);

    // addresses that come and go
    lab.forwarder.ip(&format!("addr add {LATE}/32 dev f1\n")).unwrap();
    let late = SocketAddr::new(LATE.parse().unwrap(), SERVICE);
    assert_eq!(asked(at(Family::V4, SOCKS), late).1, NOT_ALLOWED);
    lab.forwarder.ip(&format!("addr del {LATE}/32 dev f1\n")).unwrap();
    assert_ne!(asked(at(Family::V4, SOCKS), late).1, NOT_ALLOWED);

    // a plug may lead to this machine, as it was configured to, but not back to itself
    lab.client.run(|| round_trip(&mut connect(at(Family::V4, PLUG)), b"hello"));
    for port in [SELF, FAR, NEAR] {
        assert!(lab.client.run(|| is_reset(at(Family::V4, port))), "{port}");
    }
    let site = lab.client.run(|| {
        let mut stream = connect(at(Family::V4, SITE));
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    });
    assert!(site.starts_with("HTTP/1.1 403") || site.starts_with("HTTP/1.1 5"), "{site}");
    drop((to_server, opened));
    let counters: Value = eventually("the end of all connections", || {
        let all = proxy.counters();
        (all["proxy"]["live"] == 0).then(|| all["proxy"].clone())
    });
    let log = proxy.end(&pins);
    let refused = |why: &str| log.iter().filter(|line| line["refusal"] == why).count();
    // of the two plugs of a circle, the first one reached refuses
    assert_eq!(refused("the target leads back to this listener"), 5, "{log:#?}");
    assert_eq!(refused("guarded address (own)"), 8, "{log:#?}");
    assert!(counters["accepted"].as_u64().unwrap() < 25, "{counters}");
}
