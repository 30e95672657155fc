//! A resolver that is dead, wrong or slow takes no server down that is well, and a name that changes is followed. Needs root and
//! eBPF.

use crate::running::{AT_ONCE, LONGSPLICE, Setting, connect, echo, eventually, listener, round_trip};
use longsplice_lab::{Family, Namespace, topology};
use std::{
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::Path,
    process::Command,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

/// A plug, one whose clients shake hands with the target, a SOCKS proxy, and a site.
const PLUG: u16 = 7001;
const END_TO_END: u16 = 7002;
const SOCKS: u16 = 7003;
const SITE: u16 = 7004;
/// Ports of the server: an echo, and HTTP.
const ECHO: u16 = 7;
const HTTP: u16 = 80;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Says {
    Address(Ipv4Addr),
    NxDomain,
    Garbage,
    Nothing,
    /// After so many seconds.
    Late(u64, Ipv4Addr),
}

/// A name server for all names, and the number of questions that it got since it says what it says now.
#[derive(Clone)]
struct NameServer(Arc<Mutex<(Says, u64)>>);

impl NameServer {
    fn start(at: &Namespace, says: Says) -> NameServer {
        let socket = at.run(|| UdpSocket::bind((Ipv4Addr::LOCALHOST, 53))).unwrap();
        let server = NameServer(Arc::new(Mutex::new((says, 0))));
        let of_thread = server.clone();
        thread::spawn(move || {
            let mut question = [0; 512];
            while let Ok((n, client)) = socket.recv_from(&mut question) {
                let says = {
                    let mut state = of_thread.0.lock().unwrap();
                    state.1 += 1;
                    state.0
                };
                let Some(answer) = answer(&question[..n], says) else { continue };
                let socket = socket.try_clone().unwrap();
                thread::spawn(move || {
                    if let Says::Late(seconds, _) = says {
                        thread::sleep(Duration::from_secs(seconds));
                    }
                    socket.send_to(&answer, client).unwrap();
                });
            }
        });
        server
    }

    /// Answers like this from now on, and waits until somebody has asked.
    fn now(&self, says: Says) {
        *self.0.lock().unwrap() = (says, 0);
        // the second one follows an answer, or the lack of one
        eventually("questions", || (self.0.lock().unwrap().1 > 2).then_some(()));
    }
}

/// The answer to a question (RFC 1035, 4.1); there are only addresses of IPv4.
fn answer(question: &[u8], says: Says) -> Option<Vec<u8>> {
    let end = 12 + question[12..].iter().position(|b| *b == 0)? + 5;
    let asks_v4 = question[end - 3] == 1;
    let (code, address) = match says {
        Says::Nothing => return None,
        Says::Garbage => return Some([&question[..2], &[0xff; 40]].concat()),
        Says::NxDomain => (3, None),
        Says::Address(ip) | Says::Late(_, ip) => (0, asks_v4.then_some(ip)),
    };
    let mut message = question[..2].to_vec();
    message.extend([0x81, 0x80 | code, 0, 1, 0, u8::from(address.is_some()), 0, 0, 0, 0]);
    message.extend(&question[12..end]);
    if let Some(ip) = address {
        message.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4]);
        message.extend(ip.octets());
    }
    Some(message)
}

/// The program with a resolv.conf of its own.
fn with_names(at: &Namespace, dir: &Path) -> Command {
    let file = dir.join("resolv.conf");
    fs::write(&file, "nameserver 127.0.0.1\noptions timeout:4 attempts:1\n").unwrap();
    let mut command = at.command("unshare");
    let mount = format!("mount --bind {} /etc/resolv.conf && exec \"$0\" \"$@\"", file.display());
    command.args(["--mount", "sh", "-c", &mount, LONGSPLICE]);
    command
}

fn serve_http(listener: TcpListener) {
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|n| n == 1) {
                head.push(byte[0]);
            }
            // the client may be a check that has ended
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok");
        }
    });
}

fn at(port: u16) -> SocketAddr {
    topology::FORWARDER_TO_CLIENT.port(Family::V4, port)
}

/// A connection to the named server by way of SOCKS.
fn by_socks() -> TcpStream {
    let mut stream = connect(at(SOCKS));
    stream.write_all(&[5, 1, 0]).unwrap();
    stream.read_exact(&mut [0; 2]).unwrap();
    let name = b"server.example";
    stream.write_all(&[&[5, 1, 0, 3, name.len() as u8], &name[..], &ECHO.to_be_bytes()].concat()).unwrap();
    let mut reply = [0; 10];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[1], 0, "granted");
    stream
}

fn all_work(setting: &Setting, what: &str) {
    setting.lab.client.run(|| {
        round_trip(&mut connect(at(PLUG)), what.as_bytes());
        round_trip(&mut connect(at(END_TO_END)), what.as_bytes());
        round_trip(&mut by_socks(), what.as_bytes());
        let mut site = connect(at(SITE));
        site.write_all(b"GET / HTTP/1.1\r\nHost: a.example\r\nConnection: close\r\n\r\n").unwrap();
        let mut reply = String::new();
        site.read_to_string(&mut reply).unwrap();
        assert!(reply.starts_with("HTTP/1.1 200"), "{what}: {reply}");
    });
}

#[test]
#[ignore = "root"]
fn servers_that_are_well_outlive_a_bad_resolver_and_changes_are_followed() {
    let web = "check = { path = \"/\", interval = 0.1, timeout = 2, fall = 1 }";
    let target = format!("target = \"server.example:{ECHO}\"");
    let all = [
        listener("plug", &at(PLUG).to_string(), &target),
        listener("plug", &at(END_TO_END).to_string(), &format!("{target}\nhandshake = \"end-to-end\"\n{AT_ONCE}")),
        listener("socks5", &at(SOCKS).to_string(), ""),
        listener("http", &at(SITE).to_string(), "route = [{ pool = \"web\" }]"),
        format!("[pool.web]\nservers = [\"server.example:{HTTP}\"]\n{web}\n"),
    ];
    let setting = Setting::new(&all.concat());
    let lab = &setting.lab;
    let [first, second] = [topology::SERVER.v4, topology::SERVER_SECOND.v4];
    lab.server.run(|| {
        for ip in [first, second] {
            echo(TcpListener::bind((ip, ECHO)).unwrap());
            serve_http(TcpListener::bind((ip, HTTP)).unwrap());
        }
    });
    let names = NameServer::start(&lab.forwarder, Says::Address(first));
    let program = with_names(&lab.forwarder, setting.dir.path());
    let mut proxy = setting.start_by(program, &["--log-format", "json"]);
    all_work(&setting, "at the start");
    for says in [Says::NxDomain, Says::Garbage, Says::Nothing, Says::Late(3, first)] {
        names.now(says);
        for _ in 0..3 {
            all_work(&setting, &format!("{says:?}"));
        }
    }
    let seen = proxy.counters()["proxy"].take();
    assert!(seen["names_stale"].as_u64().unwrap() > 0, "{seen}");
    let failed =
        ["unreachable", "timeouts", "no_server", "servers_down", "handshakes_left"].map(|name| seen[name].as_u64());
    assert_eq!(failed, [Some(0); 5], "{seen}");

    *names.0.lock().unwrap() = (Says::Address(second), 0);
    eventually("the new address", || {
        all_work(&setting, "changed");
        let records = proxy.records();
        let there = |listener: &str, port: u16| {
            let server = format!("{second}:{port}");
            records.iter().any(|r| r["listener"] == listener && r["server"] == server)
        };
        (there("plug", ECHO) && there("socks5", ECHO) && there("http", HTTP)).then_some(())
    });
    proxy.stop(&setting.pins[0]);
}
