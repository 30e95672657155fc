//! FTP with clients and servers that do what they should not, or nothing at all. Needs root and eBPF, and fails without.

use crate::{
    ftp::connect_from,
    ftp_talk::Talk,
    running::{LONGSPLICE, Pins, Running, eventually},
};
use longsplice_lab::{
    Family, Lab, Shape,
    topology::{Address, CLIENT, FORWARDER_TO_CLIENT, SERVER, SERVER_SECOND},
};
use nix::sys::socket::{MsgFlags, recv, setsockopt, sockopt::OobInline};
use serde_json::Value;
use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::AsRawFd,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

const PORT: u16 = 2121;

/// A lab with the proxy. The test is the server, and the client.
struct Place {
    proxy: Running,
    pins: Pins,
    door: TcpListener,
    lab: Lab,
    _dir: TempDir,
}

impl Place {
    fn new(more: &str) -> Place {
        Place::to(&SERVER.port(Family::V4, PORT).to_string(), more, |lab, _| lab.forwarder.command(LONGSPLICE))
    }

    fn to(target: &str, more: &str, command: impl FnOnce(&Lab, &Path) -> Command) -> Place {
        Place::led(&format!("target = \"{target}\"\n{more}"), command)
    }

    /// `to`: where clients are led to, and more.
    fn led(to: &str, command: impl FnOnce(&Lab, &Path) -> Command) -> Place {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("longsplice.toml");
        let listen = FORWARDER_TO_CLIENT.port(Family::V4, PORT);
        let config = format!("[[listener]]\nprotocol = \"ftp\"\nlisten = \"{listen}\"\n{to}\n");
        fs::write(&file, config).unwrap();
        let pins = Pins::of(&lab.forwarder);
        let arguments = ["--config", file.to_str().unwrap(), "--log-format", "json"];
        let proxy = Running::start(command(&lab, dir.path()), None, &arguments, &[]);
        let door = lab.server.run(|| TcpListener::bind(SERVER.port(Family::V4, PORT)).unwrap());
        Place { proxy, pins, door, lab, _dir: dir }
    }

    /// A session after the greeting: the client's end, and the server's.
    fn session(&self) -> (Talk, Talk) {
        let mut ends = (self.client(), Talk::of(self.door.accept().unwrap().0));
        ends.1.send(b"220 hello\r\n");
        assert_eq!(ends.0.reply().0, 220);
        ends
    }

    fn client(&self) -> Talk {
        self.lab.client.run(|| Talk::to(FORWARDER_TO_CLIENT.port(Family::V4, PORT)))
    }

    fn connect(&self, to: SocketAddr) -> TcpStream {
        self.lab.client.run(|| TcpStream::connect(to).unwrap())
    }

    fn end(mut self) -> Vec<Value> {
        self.proxy.end(&self.pins)
    }
}

/// Answers PASV, as a server that listens at this address.
fn offer(server: &mut Talk, at: SocketAddr) {
    assert_eq!(server.line().unwrap(), "PASV\r\n");
    let ip = at.ip().to_string().replace('.', ",");
    let [high, low] = at.port().to_be_bytes();
    server.send(format!("227 Here ({ip},{high},{low})\r\n").as_bytes());
}

#[test]
#[ignore = "root"]
fn lines_without_an_end() {
    let place = Place::new("");
    let (mut client, mut server) = place.session();
    client.send(&[b'a'; 8192]);
    assert_eq!(client.reply().0, 500);
    assert!(client.is_over() && server.is_over());
    let (mut client, mut server) = place.session();
    client.send(b"RETR a\rDELE b\r\n");
    assert_eq!(client.reply().0, 500);
    assert!(client.is_over() && server.is_over(), "the server has seen none of it");
    // the longest that fits
    let (mut client, mut server) = place.session();
    let longest = format!("SIZE {}\r\n", "x".repeat(8192 - 7));
    client.send(longest.as_bytes());
    assert_eq!(server.line().unwrap(), longest);
    server.send(&[b'2'; 8192]);
    assert_eq!(client.reply().0, 421);
    assert!(client.is_over() && server.is_over());
    let hows: Vec<Value> = place.end().iter().map(|r| r["how"].clone()).collect();
    assert_eq!(hows, ["bad-request", "bad-request", "bad-reply"]);
}

#[test]
#[ignore = "root"]
fn replies_that_nobody_asked_for() {
    let place = Place::new("");
    for (sent, told) in [("230 you are in\r\n", "replies 230"), ("nonsense\r\n", "without a code"), ("", "closed")] {
        let (mut client, mut server) = place.session();
        match sent {
            "" => drop(server),
            _ => server.send(sent.as_bytes()),
        }
        let (code, text) = client.reply();
        assert!(code == 421 && text.contains(told), "{text}");
        assert!(client.is_over());
    }
    // it may say that it leaves
    let (mut client, mut server) = place.session();
    server.send(b"421 too long\r\n");
    assert_eq!(client.reply(), (421, "421 too long\r\n".into()));
    assert!(client.is_over() && server.is_over());
    // replies come in order, however many commands wait
    let (mut client, mut server) = place.session();
    client.send(b"NOOP\r\nSYST\r\nHELP\r\n");
    for (command, reply) in
        [("NOOP\r\n", "200 a\r\n"), ("SYST\r\n", "215-b\r\n 215 c\r\n215 d\r\n"), ("HELP\r\n", "214 e\r\n")]
    {
        assert_eq!(server.line().unwrap(), command);
        server.send(reply.as_bytes());
        assert_eq!(client.reply().1, reply);
    }
    drop(client);
    assert!(server.is_over());
    let hows: Vec<Value> = place.end().iter().map(|r| r["how"].clone()).collect();
    assert_eq!(hows, ["bad-reply", "bad-reply", "bad-reply", "closed", "closed"]);
}

/// A server that always says that it will reply soon, or whose reply has no end that the client sees, keeps no session.
#[test]
#[ignore = "root"]
fn replies_without_an_end() {
    const MOST: usize = 1000;
    let place = Place::new("limits = { reply = 2 }");
    let soon = |count| "150 soon\r\n".repeat(count);
    let hears = |client: &mut Talk, count| (0..count).all(|_| client.reply().1 == "150 soon\r\n");
    let ends = |mut client: Talk, mut server: Talk| {
        let (code, text) = client.reply();
        assert!(code == 421 && text.contains("preliminary"), "{text}");
        assert!(client.is_over() && server.is_over());
    };
    for verb in ["NOOP", "FEAT"] {
        let (mut client, mut server) = place.session();
        for last in ["200 done\r\n", "150 soon\r\n"] {
            client.send(format!("{verb}\r\n").as_bytes());
            assert_eq!(server.line().unwrap(), format!("{verb}\r\n"));
            server.send((soon(MOST) + last).as_bytes());
            assert!(hears(&mut client, MOST));
            if last.starts_with('2') {
                assert_eq!(client.reply().1, last, "there may be that many");
            }
        }
        ends(client, server);
    }
    // in the middle of a transfer
    let (mut client, mut server) = place.session();
    let data = place.lab.server.run(|| TcpListener::bind(SERVER.port(Family::V4, 0)).unwrap());
    client.send(b"PASV\r\n");
    offer(&mut server, data.local_addr().unwrap());
    let stream = place.connect(client.passive_reply());
    client.send(b"RETR x\r\n");
    let theirs = data.accept().unwrap();
    assert_eq!(server.line().unwrap(), "RETR x\r\n");
    server.send(soon(MOST + 1).as_bytes());
    assert!(hears(&mut client, MOST));
    ends(client, server);
    drop((stream, theirs));
    // the proxy's own question: the client sees nothing of it
    let (mut client, mut server) = place.session();
    client.send(b"PASV\r\n");
    assert_eq!(server.line().unwrap(), "PASV\r\n");
    server.send(soon(MOST + 1).as_bytes());
    ends(client, server);
    let (mut client, mut server) = place.session();
    client.send(b"PASV\r\n");
    assert_eq!(server.line().unwrap(), "PASV\r\n");
    let endless = thread::spawn(move || while server.try_send(b"227-and so on\r\n").is_ok() {});
    assert_eq!(client.reply().0, 421);
    assert!(client.is_over());
    endless.join().unwrap();
    // a greeting
    let (mut client, mut server) = (place.client(), Talk::of(place.door.accept().unwrap().0));
    server.send(soon(MOST + 1).as_bytes());
    assert!(hears(&mut client, MOST));
    ends(client, server);
    let records = place.end();
    let hows: Vec<&str> =
        records.iter().filter(|r| r["method"].is_null()).map(|r| r["how"].as_str().unwrap()).collect();
    assert_eq!(hows, ["bad-reply", "bad-reply", "bad-reply", "bad-reply", "timeout", "bad-reply"]);
}

/// Whatever address a reply has: the member of a cluster, or the server behind NAT, that has the control connection.
#[test]
#[ignore = "root"]
fn data_go_to_the_host_of_the_control_connection() {
    let place = Place::new("");
    let (mut client, mut server) = place.session();
    let data = place.lab.server.run(|| TcpListener::bind(SERVER.port(Family::V4, 0)).unwrap());
    let port = data.local_addr().unwrap().port();
    for named in [SERVER_SECOND.port(Family::V4, port), CLIENT.port(Family::V4, port), ([127, 0, 0, 1], port).into()] {
        client.send(b"PASV\r\n");
        offer(&mut server, named);
        let mut stream = place.connect(client.passive_reply());
        client.send(b"STOR x\r\n");
        let (mut theirs, _) = data.accept().unwrap();
        assert_eq!(theirs.local_addr().unwrap().ip(), SERVER.ip(Family::V4));
        assert_eq!(server.line().unwrap(), "STOR x\r\n");
        server.send(b"150 go\r\n");
        assert_eq!(client.reply().0, 150);
        stream.write_all(b"data").unwrap();
        drop(stream);
        let mut got = String::new();
        theirs.read_to_string(&mut got).unwrap();
        assert_eq!(got, "data");
        drop(theirs);
        server.send(b"226 done\r\n");
        assert_eq!(client.reply().0, 226);
    }
    // without a port, there is nothing
    client.send(b"PASV\r\n");
    assert_eq!(server.line().unwrap(), "PASV\r\n");
    server.send(b"227 (1,2,3)\r\n");
    assert_eq!(client.reply().0, 425);
    client.send(b"EPSV\r\n");
    assert_eq!(server.line().unwrap(), "PASV\r\n");
    server.send(b"530 log in\r\n");
    assert_eq!(client.reply().1, "530 log in\r\n");
    assert_eq!(client.ask("RETR x").0, 425);
    drop((client, server));
    let records = place.end();
    assert_eq!(records.iter().filter(|r| r["method"] == "STOR" && r["spliced_up"] == 4).count(), 3, "{records:#?}");
}

/// The target is a name with two addresses: data go to the member that has the control connection, and not to the other one, which
/// has the same port open.
#[test]
#[ignore = "root"]
fn data_go_to_the_member_that_has_the_control_connection() {
    let members = [SERVER, SERVER_SECOND].map(|member| member.ip(Family::V4));
    let mut place = Place::to(&format!("ftp.test:{PORT}"), "", |lab, dir| {
        let hosts = dir.join("hosts");
        fs::write(&hosts, members.map(|ip| format!("{ip} ftp.test\n")).concat()).unwrap();
        let mut command = lab.forwarder.command("unshare");
        let mount = format!("mount --bind {} /etc/hosts && exec \"$0\" \"$@\"", hosts.display());
        command.args(["--mount", "sh", "-c", &mount, LONGSPLICE]);
        command
    });
    let bind = |lab: &Lab, ip, port| lab.server.run(|| TcpListener::bind((ip, port)).unwrap());
    for [member, other] in [members, [members[1], members[0]]] {
        drop(std::mem::replace(&mut place.door, bind(&place.lab, other, 0)));
        place.door = bind(&place.lab, member, PORT);
        let (mut client, mut server) = place.session();
        let data = bind(&place.lab, member, 0);
        let port = data.local_addr().unwrap().port();
        let not_this = bind(&place.lab, other, port);
        client.send(b"PASV\r\n");
        offer(&mut server, (other, port).into());
        let mut stream = place.connect(client.passive_reply());
        client.send(b"STOR x\r\n");
        let (mut theirs, _) = data.accept().unwrap();
        assert_eq!(server.line().unwrap(), "STOR x\r\n");
        server.send(b"150 go\r\n");
        assert_eq!(client.reply().0, 150);
        stream.write_all(b"data").unwrap();
        drop(stream);
        let mut got = String::new();
        theirs.read_to_string(&mut got).unwrap();
        assert_eq!(got, "data");
        not_this.set_nonblocking(true).unwrap();
        assert_eq!(not_this.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        server.send(b"226 done\r\n");
        assert_eq!(client.reply().0, 226);
    }
    assert_eq!(place.end().iter().filter(|r| r["method"] == "STOR" && r["spliced_up"] == 4).count(), 2);
}

/// A pool: sessions are shared among its servers, data go to the server of the session, whatever address it names, and a server that
/// does not accept costs nobody a session.
#[test]
#[ignore = "root"]
fn a_pool_of_servers() {
    let members = [SERVER, SERVER_SECOND].map(|member| member.port(Family::V4, PORT));
    let servers = members.map(|member| format!("\"{member}\"")).join(", ");
    let pool = format!("pool = \"files\"\n[pool.files]\nservers = [{servers}]\nfailures = 100");
    let place = Place::led(&pool, |lab, _| lab.forwarder.command(LONGSPLICE));
    let bind = |at: SocketAddr| place.lab.server.run(|| TcpListener::bind(at).unwrap());
    let second = bind(members[1]);
    let connections = || -> Vec<u64> {
        let pools: Value = serde_json::from_str(&place.proxy.client(&["pools", "--json"])).unwrap();
        pools[0]["members"].as_array().unwrap().iter().map(|m| m["connections"].as_u64().unwrap()).collect()
    };
    let mut clients = [place.client(), place.client()];
    let mut servers = [&place.door, &second].map(|door| Talk::of(door.accept().unwrap().0));
    assert_eq!(connections(), [1, 1], "in turn");
    servers.iter_mut().zip(0..).for_each(|(server, n)| server.send(format!("220 {n}\r\n").as_bytes()));
    for client in &mut clients {
        let n = usize::from(client.reply().1 == "220 1\r\n");
        let server = &mut servers[n];
        let at = |member: SocketAddr, port| SocketAddr::new(member.ip(), port);
        let data = bind(at(members[n], 0));
        let port = data.local_addr().unwrap().port();
        client.send(b"PASV\r\n");
        offer(server, at(members[1 - n], port));
        let mut stream = place.connect(client.passive_reply());
        client.send(b"STOR x\r\n");
        let mut theirs = data.accept().unwrap().0;
        assert_eq!(server.line().unwrap(), "STOR x\r\n");
        server.send(b"150 go\r\n");
        assert_eq!(client.reply().0, 150);
        stream.write_all(b"data").unwrap();
        drop(stream);
        let mut got = String::new();
        theirs.read_to_string(&mut got).unwrap();
        assert_eq!(got, "data");
        server.send(b"226 done\r\n");
        assert_eq!(client.reply().0, 226);
    }
    drop((clients, servers));
    eventually("the ends", || (connections() == [0, 0]).then_some(()));
    drop(second);
    for _ in 0..3 {
        drop(place.session());
    }
    eventually("the ends", || (connections() == [0, 0]).then_some(()));
    let records = place.end();
    let of = |member: SocketAddr, verb: Value| {
        let is = |r: &&Value| r["pool"] == "files" && r["member"] == member.to_string() && r["method"] == verb;
        records.iter().filter(is).count()
    };
    assert_eq!(members.map(|member| of(member, "STOR".into())), [1, 1], "{records:#?}");
    assert_eq!(members.map(|member| of(member, Value::Null)), [4, 1], "{records:#?}");
}

#[test]
#[ignore = "root"]
fn data_connections_that_are_never_made() {
    let place = Place::new("limits = { connect = 1 }\nftp.data = \"active\"");
    let (mut client, mut server) = place.session();
    // the client does not connect: the server does not see the command
    client.send(b"EPSV\r\n");
    assert!(server.line().unwrap().starts_with("PORT "));
    server.send(b"200 ok\r\n");
    assert_eq!(client.reply().0, 229);
    assert_eq!(client.ask("RETR x").0, 425);
    // nothing listens at the client
    client.send(b"PORT 10,77,1,2,4,1\r\n");
    assert!(server.line().unwrap().starts_with("PORT "));
    server.send(b"200 ok\r\n");
    assert_eq!(client.reply().0, 200);
    assert_eq!(client.ask("RETR x").0, 425);
    // the server does not connect, and says so; the client's connection ends
    client.send(b"EPSV\r\n");
    assert!(server.line().unwrap().starts_with("PORT "));
    server.send(b"200 ok\r\n");
    let mut stream = place.connect(client.passive_reply());
    client.send(b"RETR x\r\n");
    assert_eq!(server.line().unwrap(), "RETR x\r\n");
    server.send(b"425 cannot\r\n");
    assert_eq!(client.reply().1, "425 cannot\r\n");
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
    client.send(b"NOOP\r\n");
    assert_eq!(server.line().unwrap(), "NOOP\r\n", "the session goes on");
    server.send(b"200 ok\r\n");
    assert_eq!(client.reply().0, 200);
    drop((client, server, stream));
    let records = place.end();
    let hows: Vec<_> = records.iter().filter(|r| r["method"] == "RETR").map(|r| r["how"].as_str().unwrap()).collect();
    assert_eq!(hows, ["timeout", "unreachable", "closed"], "{records:#?}");
}

/// Where the server is to connect to the proxy, nobody else does.
#[test]
#[ignore = "root"]
fn only_the_server_makes_its_data_connection() {
    let place = Place::new("ftp.data = \"active\"");
    let (mut client, mut server) = place.session();
    client.send(b"EPSV\r\n");
    let line = server.line().unwrap();
    let parts: Vec<u8> =
        line.trim_end().strip_prefix("PORT ").unwrap().split(',').map(|n| n.parse().unwrap()).collect();
    let [a, b, c, d, high, low] = parts[..] else { panic!("{line}") };
    let at = SocketAddr::from(([a, b, c, d], u16::from_be_bytes([high, low])));
    server.send(b"200 ok\r\n");
    let mut stream = place.connect(client.passive_reply());
    client.send(b"RETR x\r\n");
    assert_eq!(server.line().unwrap(), "RETR x\r\n");
    let from = |host: Address| place.lab.server.run(|| connect_from(host.port(Family::V4, 0), at));
    // the reset may come before connect(2) has returned
    let thief = from(SERVER_SECOND).and_then(|mut thief| thief.read(&mut [0]));
    assert_eq!(thief.unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(place.proxy.count("proxy", "denied"), 1);
    let mut theirs = from(SERVER).unwrap();
    server.send(b"150 go\r\n");
    assert_eq!(client.reply().0, 150);
    theirs.write_all(b"data").unwrap();
    drop(theirs);
    let mut got = String::new();
    stream.read_to_string(&mut got).unwrap();
    assert_eq!(got, "data");
    assert_eq!(from(SERVER).unwrap_err().kind(), ErrorKind::ConnectionRefused, "it was open for one connection");
    server.send(b"226 done\r\n");
    assert_eq!(client.reply().0, 226);
    drop((client, server, stream));
    assert_eq!(place.end().iter().filter(|r| r["method"] == "RETR" && r["how"] == "closed").count(), 1);
}

/// Reads to a mark. Returns the bytes before it, and the urgent byte.
fn to_mark(stream: &TcpStream) -> (Vec<u8>, u8) {
    setsockopt(stream, OobInline, &false).unwrap();
    let mut urgent = [0];
    let byte = eventually("urgent data", || {
        let found = recv(stream.as_raw_fd(), &mut urgent, MsgFlags::MSG_OOB | MsgFlags::MSG_DONTWAIT);
        found.is_ok_and(|n| n == 1).then_some(urgent[0])
    });
    let mut before = [0; 64];
    let n = recv(stream.as_raw_fd(), &mut before, MsgFlags::empty()).unwrap(); // it ends at the mark
    (before[..n].to_vec(), byte)
}

#[test]
#[ignore = "root"]
fn marks_are_urgent_both_ways() {
    let place = Place::new("");
    let client = place.connect(FORWARDER_TO_CLIENT.port(Family::V4, PORT));
    let server = place.door.accept().unwrap().0;
    let mut client_talk = Talk::of(client.try_clone().unwrap());
    let mut server_talk = Talk::of(server.try_clone().unwrap());
    server_talk.send(b"220 hello\r\n");
    client_talk.reply();
    client_talk.send_urgent(b"\xff\xf4\xff\xf2");
    client_talk.send(b"ABOR\r\n");
    assert_eq!(to_mark(&server), (b"\xff\xf4\xff".to_vec(), 0xf2));
    assert_eq!(server_talk.line().unwrap(), "ABOR\r\n");
    server_talk.send_urgent(b"\xff\xf2");
    server_talk.send(b"226 nothing to abort\r\n");
    assert_eq!(to_mark(&client), (b"\xff".to_vec(), 0xf2));
    assert_eq!(client_talk.reply().0, 226);
    // options of Telnet are refused, and the server sees none of them
    client_talk.send(b"\xff\xfd\x0aNO\xff\xfb\x01OP\r\n");
    assert_eq!(server_talk.line().unwrap(), "NOOP\r\n");
    let mut answers = [0; 6];
    (&client).read_exact(&mut answers).unwrap();
    assert_eq!(&answers, b"\xff\xfc\x0a\xff\xfe\x01");
    server_talk.send(b"200 \xff\xff\r\n");
    let mut line = [0; 8];
    (&client).read_exact(&mut line).unwrap();
    assert_eq!(&line, b"200 \xff\xff\r\n");
    drop((client, server, client_talk, server_talk));
    place.end();
}

/// A server that does not know ABOR, or does not hear it, learns from its data connection that the transfer is over; so does a client
/// whose server has made none.
#[test]
#[ignore = "root"]
fn servers_that_do_not_break_off() {
    for data in ["passive", "active"] {
        let place = Place::new(&format!("ftp.data = \"{data}\""));
        let (mut client, mut server) = place.session();
        for knows in [Some("502 what?\r\n"), None] {
            let door = place.lab.server.run(|| TcpListener::bind(SERVER.port(Family::V4, 0)).unwrap());
            client.send(b"PASV\r\n");
            match data {
                "passive" => offer(&mut server, door.local_addr().unwrap()),
                _ => {
                    assert!(server.line().unwrap().starts_with("PORT "));
                    server.send(b"200 ok\r\n");
                }
            }
            let stream = place.connect(client.passive_reply());
            client.send(b"RETR x\r\n");
            assert_eq!(server.line().unwrap(), "RETR x\r\n");
            let theirs = (data == "passive").then(|| door.accept().unwrap().0);
            server.send(b"150 go\r\n");
            assert_eq!(client.reply().0, 150);
            client.send(b"ABOR\r\n");
            if let Some(reply) = knows {
                assert_eq!(server.line().unwrap(), "ABOR\r\n");
                server.send(reply.as_bytes());
                assert_eq!(client.reply().1, reply);
            }
            for end in [Some(stream), theirs].iter_mut().flatten() {
                assert_eq!(end.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
            }
            server.send(b"426 broken\r\n");
            assert_eq!(client.reply().0, 426);
            if knows.is_none() {
                assert_eq!(server.line().unwrap(), "ABOR\r\n");
                server.send(b"225 nothing to break off\r\n");
                assert_eq!(client.reply().0, 225);
            }
            client.send(b"NOOP\r\n");
            assert_eq!(server.line().unwrap(), "NOOP\r\n");
            server.send(b"200 ok\r\n");
            assert_eq!(client.reply().0, 200);
        }
        drop((client, server));
        let records = place.end();
        let codes: Vec<_> = records.iter().filter_map(|r| r["status"].as_u64()).collect();
        assert_eq!(codes, [426, 426], "{records:#?}");
    }
}

#[test]
#[ignore = "root"]
fn tls_is_relayed_whole() {
    let place = Place::new("ftp.tls = \"relay\"");
    let (mut client, mut server) = place.session();
    client.send(b"FEAT\r\n");
    assert_eq!(server.line().unwrap(), "FEAT\r\n");
    server.send(b"211-Features\r\n AUTH TLS\r\n PROT\r\n LPSV\r\n EPSV\r\n211 End\r\n");
    assert_eq!(client.reply().1, "211-Features\r\n AUTH TLS\r\n PROT\r\n EPSV\r\n EPRT\r\n211 End\r\n");
    assert_eq!(client.ask("AUTH GSSAPI").0, 504);
    for (reply, is_relayed) in [("534 no\r\n", false), ("234 yes\r\n", true)] {
        client.send(b"AUTH TLS\r\n");
        assert_eq!(server.line().unwrap(), "AUTH TLS\r\n");
        server.send(reply.as_bytes());
        assert_eq!(client.reply().1, reply);
        if !is_relayed {
            assert_eq!(client.ask("LPSV").0, 502, "commands are read");
        }
    }
    for line in ["LPSV\r\n", "\x16\x03\x01\0 no line at all\n", "\n"] {
        client.send(line.as_bytes());
        assert_eq!(server.line().unwrap(), line);
        server.send(line.as_bytes());
        assert_eq!(client.line().unwrap(), line);
    }
    drop(client);
    assert!(server.is_over());
    drop(server);
    let records = place.end();
    assert_eq!((records.len(), &records[0]["how"], &records[0]["listener"]), (1, &"closed".into(), &"ftp".into()));
}

/// The idle limit is that of a session without data. They trickle for three times as long.
#[test]
#[ignore = "root"]
fn a_session_is_kept_while_data_move() {
    const IDLE: Duration = Duration::from_secs(2);
    let place = Place::new("policy = { idle_limit = 2 }");
    let (mut client, mut server) = place.session();
    let data = place.lab.server.run(|| TcpListener::bind(SERVER.port(Family::V4, 0)).unwrap());
    client.send(b"PASV\r\n");
    offer(&mut server, data.local_addr().unwrap());
    let mut stream = place.connect(client.passive_reply());
    client.send(b"RETR x\r\n");
    let (mut theirs, _) = data.accept().unwrap();
    assert_eq!(server.line().unwrap(), "RETR x\r\n");
    server.send(b"150 go\r\n");
    assert_eq!(client.reply().0, 150);
    let began = Instant::now();
    while began.elapsed() < 3 * IDLE {
        theirs.write_all(b"x").unwrap();
        stream.read_exact(&mut [0]).unwrap();
        thread::sleep(IDLE / 8);
    }
    // a server may say that it is done long before its data are
    server.send(b"226 done\r\n");
    assert_eq!(client.reply().0, 226);
    let began = Instant::now();
    while began.elapsed() < 2 * IDLE {
        theirs.write_all(b"x").unwrap();
        stream.read_exact(&mut [0]).unwrap();
        thread::sleep(IDLE / 8);
    }
    client.send(b"NOOP\r\n");
    assert_eq!(server.line().unwrap(), "NOOP\r\n");
    server.send(b"200 ok\r\n");
    assert_eq!(client.reply().0, 200);
    drop((stream, theirs));
    assert_eq!(client.reply().0, 421);
    assert!(client.is_over() && server.is_over());
    let records = place.end();
    assert!(records.iter().any(|r| r["how"] == "idle" && r["method"].is_null()), "{records:#?}");
}
