//! SIGKILL while connections are not relayed yet: first bytes are judged, clients of a login gateway are asked, peers of BIND and data
//! connections of FTP are awaited, associations are idle. Hosts see an end, and the next process serves on the same ports. Needs root and eBPF, and fails without.

use crate::{
    ftp_talk::Talk,
    running::{Running, Setting, eventually, listener},
};
use longsplice_lab::{
    Family,
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::{self, Script},
};
use nix::sys::socket::{MsgFlags, recv};
use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsRawFd,
    time::Duration,
};
use test_case::test_case;

const PORT: u16 = 7000;
/// All that wait for one get this port, again and again.
const ONLY: u16 = 40_000;
const PATIENCE: Duration = Duration::from_secs(30);

/// The stream ends, in order or not, and has no byte before.
#[track_caller]
fn ends(mut stream: &TcpStream, what: &str) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    match stream.read(&mut [0]) {
        Ok(0) => {}
        Err(e) if e.kind() == ErrorKind::ConnectionReset => {}
        other => panic!("{what}: {other:?}"),
    }
}

/// The bytes that a stream has, without taking them.
fn waiting(stream: &TcpStream) -> usize {
    recv(stream.as_raw_fd(), &mut [0; 64], MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT).unwrap_or(0)
}

fn kill_and_start(setting: &Setting, program: &mut Running, meanwhile: impl FnOnce()) {
    program.kill();
    meanwhile();
    *program = setting.start();
}

fn stop(setting: &Setting, program: &mut Running) {
    program.stop(&setting.pins[0]);
}

/// `must`: all is held back; `never`: all but the last byte is passed on. Neither is decided.
#[test_case(Family::V4, "client"; "client v4")]
#[test_case(Family::V6, "client"; "client v6")]
#[test_case(Family::V4, "server"; "server v4")]
#[ignore = "root"]
fn first_bytes_are_judged(family: Family, of: &str) {
    const PROTOCOLS: [&str; 3] = ["plug", "socks5", "login"];
    let (server, at) = (SERVER.port(family, PORT), |n: usize| FORWARDER_TO_CLIENT.port(family, PORT + n as u16));
    let config = |condition: &str| -> String {
        let one = |(n, protocol): (usize, &&str)| {
            let more = match *protocol {
                "plug" => format!("target = \"{server}\""),
                "login" => format!("destination = [{{ name = \"box\", target = \"{server}\" }}]"),
                _ => String::new(),
            };
            listener(
                protocol,
                &at(n).to_string(),
                &format!("{more}\nfilter.{of} = {{ {condition}, first = 64, wait = 600 }}"),
            )
        };
        PROTOCOLS.iter().enumerate().map(one).collect()
    };
    let setting = Setting::new(&config("must = '^SSH-2'"));
    let door = setting.listen(server);
    let mut program = setting.start();
    let open = |n: usize| {
        let mut client = setting.connect(at(n));
        match PROTOCOLS[n] {
            "socks5" => {
                let request = [&[5, 1, 0, 5, 1, 0][..], &traffic::socks5_address(server)].concat();
                client.write_all(&request).unwrap();
                client.read_exact(&mut [0; 2]).unwrap();
                traffic::socks5_answer(&mut client).unwrap();
            }
            "login" => {
                client.write_all(b"box\r\n").unwrap();
                let mut said = Vec::new();
                while !said.ends_with(b"connected to box\r\n") {
                    said.push(0);
                    let last = said.len() - 1;
                    client.read_exact(&mut said[last..]).unwrap();
                }
            }
            _ => {}
        }
        (client, door.accept().unwrap().0)
    };
    for (condition, passes) in [("must = '^SSH-2'", 0), ("never = 'evil'", 3)] {
        setting.configure(&config(condition));
        kill_and_start(&setting, &mut program, || {});
        let mut pairs: Vec<_> = (0..PROTOCOLS.len()).map(open).collect();
        for (client, served) in &mut pairs {
            let (from, to) = if of == "client" { (client, served) } else { (served, client) };
            from.write_all(b"SSH").unwrap();
            eventually("what may pass", || (waiting(to) == passes).then_some(()));
        }
        kill_and_start(&setting, &mut program, || {
            for ((client, served), protocol) in pairs.iter_mut().zip(PROTOCOLS) {
                let to = if of == "client" { &mut *served } else { &mut *client };
                to.read_exact(&mut [0; 3][..passes]).unwrap();
                ends(client, &format!("{condition}: client of {protocol}"));
                ends(served, &format!("{condition}: server of {protocol}"));
            }
        });
        for (n, protocol) in PROTOCOLS.iter().enumerate() {
            let (mut client, mut served) = open(n);
            let (from, to) = if of == "client" { (&mut client, &mut served) } else { (&mut served, &mut client) };
            let bytes = [b"SSH-2.0".to_vec(), vec![b'x'; 100_000]].concat();
            let mut writer = from.try_clone().unwrap();
            let all = bytes.clone();
            let writing = std::thread::spawn(move || writer.write_all(&all).unwrap());
            let mut got = vec![0; bytes.len()];
            to.read_exact(&mut got).unwrap();
            writing.join().unwrap();
            assert!(got == bytes, "{condition}: {protocol}");
        }
    }
    stop(&setting, &mut program);
}

/// Killed at each question. The next process asks from the beginning.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn logins_are_asked(family: Family) {
    const QUESTIONS: [&str; 3] = ["login: ", "password: ", "host: "];
    let (at, server) = (FORWARDER_TO_CLIENT.port(family, PORT), SERVER.port(family, PORT));
    let destination = format!("[[listener.destination]]\nname = \"box\"\ntarget = \"{server}\"\n");
    let more = format!("telnet = true\nusers = {{ ann = \"secret\" }}\n{destination}");
    let setting = Setting::new(&listener("login", &at.to_string(), &more));
    setting.echo(server);
    let mut program = setting.start();
    let hears = |mut client: &TcpStream, text: &str| {
        let mut heard = Vec::new();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        while !heard.ends_with(text.as_bytes()) {
            let mut byte = [0];
            client.read_exact(&mut byte).unwrap();
            heard.extend(byte);
        }
    };
    for (last, asked) in QUESTIONS.iter().enumerate() {
        let mut client = setting.connect(at);
        for (question, answer) in QUESTIONS.iter().zip(["ann\r\n", "secret\r\n"]).take(last) {
            hears(&client, question);
            client.write_all(answer.as_bytes()).unwrap();
        }
        hears(&client, asked);
        kill_and_start(&setting, &mut program, || ends(&client, asked));
    }
    let mut client = setting.connect(at);
    client.write_all(b"ann\r\nsecret\r\nbox\r\nhello").unwrap();
    hears(&client, "connected to box\r\nhello");
    drop(client);
    stop(&setting, &mut program);
}

fn socks(family: Family) -> SocketAddr {
    FORWARDER_TO_CLIENT.port(family, 1080)
}

/// A listener whose BIND and associations have one port each.
fn one_port(family: Family) -> Setting {
    let ports = format!("bind = {{ ports = {ONLY} }}\nudp = {{ ports = {ONLY} }}");
    Setting::new(&listener("socks5", &socks(family).to_string(), &ports))
}

fn ask(setting: &Setting, family: Family, command: u8, target: SocketAddr) -> (TcpStream, SocketAddr) {
    let script = Script::opener(1).deadline(PATIENCE);
    setting.lab.client.run(|| traffic::socks5_ask(socks(family), command, target, &script)).unwrap()
}

fn peer(setting: &Setting, to: SocketAddr) -> std::io::Result<TcpStream> {
    let family = if to.is_ipv4() { Family::V4 } else { Family::V6 };
    let script = Script { local: Some(SERVER.port(family, 0)), ..Script::opener(1) };
    setting.lab.server.run(|| traffic::connect(to, &script))
}

/// Killed before the peer has come, and behind it. Its port is taken by nothing that is left.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn peers_of_bind_are_awaited(family: Family) {
    let setting = one_port(family);
    let mut program = setting.start();
    for has_come in [false, true, false, true] {
        let (mut client, bound) = ask(&setting, family, 2, SERVER.port(family, 21));
        assert_eq!(bound.port(), ONLY);
        let early = has_come.then(|| peer(&setting, bound).unwrap());
        if let Some(early) = &early {
            assert_eq!(traffic::socks5_answer(&mut client).unwrap(), early.local_addr().unwrap());
        }
        kill_and_start(&setting, &mut program, || {
            ends(&client, "the client");
            early.iter().for_each(|early| ends(early, "the peer"));
            let late = peer(&setting, bound).map_err(|e| e.kind());
            assert_eq!(late.err(), Some(ErrorKind::ConnectionRefused));
        });
    }
    let (mut client, bound) = ask(&setting, family, 2, SERVER.port(family, 21));
    let mut peer = peer(&setting, bound).unwrap();
    traffic::socks5_answer(&mut client).unwrap();
    client.write_all(b"hello").unwrap();
    peer.read_exact(&mut [0; 5]).unwrap();
    drop((client, peer));
    stop(&setting, &mut program);
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn associations_are_there(family: Family) {
    let setting = one_port(family);
    let server = SERVER.port(family, PORT);
    let echo = setting.lab.server.run(|| UdpSocket::bind(server)).unwrap();
    let unknown = if family == Family::V4 { "0.0.0.0:0" } else { "[::]:0" };
    let mut program = setting.start();
    for _ in 0..3 {
        let (control, relay) = ask(&setting, family, 3, unknown.parse().unwrap());
        assert_eq!(relay.port(), ONLY);
        let own = SocketAddr::new(control.local_addr().unwrap().ip(), 0);
        let client = setting.lab.client.run(|| UdpSocket::bind(own)).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let datagram = [&[0, 0, 0], &traffic::socks5_address(server)[..], b"data"].concat();
        let mut block = [0; 100];
        client.send_to(&datagram, relay).unwrap();
        let (n, from) = echo.recv_from(&mut block).unwrap();
        assert_eq!(&block[..n], b"data");
        echo.send_to(b"data", from).unwrap();
        assert_eq!((client.recv(&mut block).unwrap(), &block[..datagram.len()]), (datagram.len(), &datagram[..]));
        kill_and_start(&setting, &mut program, || ends(&control, "the client"));
    }
    stop(&setting, &mut program);
}

/// One side is awaited by the proxy, or both are: `data` says who connects to the server's side.
#[test_case("PASV", "passive"; "client awaited")]
#[test_case("PASV", "active"; "both awaited")]
#[test_case("PORT", "active"; "server awaited")]
#[test_case("PORT", "passive"; "nobody awaited")]
#[ignore = "root"]
fn data_connections_are_awaited(way: &str, data: &str) {
    let at = FORWARDER_TO_CLIENT.port(Family::V4, 2121);
    let more = format!(
        "target = \"{}\"\nftp = {{ data = \"{data}\", ports = \"{ONLY}-{}\" }}",
        SERVER.port(Family::V4, 2121),
        ONLY + 1
    );
    let setting = Setting::new(&listener("ftp", &at.to_string(), &more));
    let door = setting.listen(SERVER.port(Family::V4, 2121));
    let mut program = setting.start();
    for round in 0..3 {
        let mut client = setting.lab.client.run(|| Talk::to(at));
        let mut server = Talk::of(door.accept().unwrap().0);
        server.send(b"220 hello\r\n");
        assert_eq!(client.reply().0, 220);
        let awaits = setting.lab.client.run(|| TcpListener::bind((client.local().ip(), 0))).unwrap();
        let offers = setting.listen(SERVER.port(Family::V4, 0));
        let [high, low] = awaits.local_addr().unwrap().port().to_be_bytes();
        let ip = client.local().ip().to_string().replace('.', ",");
        let command = if way == "PORT" { format!("PORT {ip},{high},{low}\r\n") } else { "PASV\r\n".into() };
        client.send(command.as_bytes());
        // the server is asked in its way
        let asked = server.line().unwrap();
        let of_proxy = if data == "active" {
            server.send(b"200 ok\r\n");
            Some(named(&asked))
        } else {
            let [high, low] = offers.local_addr().unwrap().port().to_be_bytes();
            server.send(format!("227 here (10,77,2,2,{high},{low})\r\n").as_bytes());
            None
        };
        let to_proxy = if way == "PASV" {
            Some(client.passive_reply())
        } else {
            assert_eq!(client.reply().0, 200);
            None
        };
        for port in of_proxy.iter().chain(&to_proxy).map(SocketAddr::port) {
            assert!((ONLY..=ONLY + 1).contains(&port), "{port}");
        }
        // in every other round, a transfer has begun: the proxy waits for both sides
        let mut half = None;
        if round % 2 == 1 {
            half = to_proxy.map(|to| setting.connect(to));
            client.send(b"RETR x\r\n");
        }
        kill_and_start(&setting, &mut program, || {
            assert!(client.is_over() && server_ends(&mut server));
            half.iter().for_each(|half| ends(half, "the client's data connection"));
            let refused = |end: std::io::Result<TcpStream>| end.err().map(|e| e.kind());
            if let (Some(to), None) = (to_proxy, &half) {
                let late = refused(setting.lab.client.run(|| TcpStream::connect(to)));
                assert_eq!(late, Some(ErrorKind::ConnectionRefused));
            }
            if let Some(to) = of_proxy {
                let late = refused(setting.lab.server.run(|| TcpStream::connect(to)));
                assert_eq!(late, Some(ErrorKind::ConnectionRefused));
            }
        });
    }
    stop(&setting, &mut program);
}

/// The address in `PORT 10,77,2,1,156,64`.
fn named(command: &str) -> SocketAddr {
    let numbers = command.trim_end().strip_prefix("PORT ").unwrap_or_else(|| panic!("{command}"));
    let parts: Vec<u8> = numbers.split(',').map(|n| n.parse().unwrap()).collect();
    let [a, b, c, d, high, low] = parts[..] else { panic!("{command}") };
    SocketAddr::from(([a, b, c, d], u16::from_be_bytes([high, low])))
}

/// Commands that were sent before the kill may come first.
fn server_ends(server: &mut Talk) -> bool {
    (0..3).any(|_| server.is_over())
}
