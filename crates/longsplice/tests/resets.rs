//! What a host has sent before its connection was reset reaches the other host before the reset does; and what it has sent
//! beyond the end of a message answers nothing. Needs root and eBPF, and fails without.

use crate::running::{LONGSPLICE, Pins, Running, connect, eventually};
use longsplice_datapath::path_facts;
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection, Shape,
    namespace::counter_here,
    pattern,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use nix::sys::socket::{setsockopt, sockopt::Linger};
use std::{
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};

const PORT: u16 = 7000;
const SITE: u16 = 8000;
/// More than a receiver that does not read has room for, and less than the proxy can hold for it.
const BYTES: usize = 180_000;
const SEED: u64 = 30;
const PATIENCE: Duration = Duration::from_secs(20);

/// What happens to the flow before the reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// It is copied.
    Copied,
    /// It has been spliced and taken back.
    TakenBack,
    /// It drains: the receiver has not acknowledged what came before.
    Drains,
}

fn reset(stream: TcpStream) {
    setsockopt(&stream, Linger, &nix::libc::linger { l_onoff: 1, l_linger: 0 }).unwrap();
}

/// Reads until the connection ends. It must end with a reset: its stream is not whole.
fn all_before_the_reset(stream: &mut TcpStream) -> Vec<u8> {
    let (mut got, mut room) = (Vec::new(), [0; 10_000]);
    loop {
        match stream.read(&mut room) {
            Ok(0) => panic!("the end of the stream after {} bytes", got.len()),
            Ok(n) => got.extend(&room[..n]),
            Err(e) if e.kind() == ErrorKind::ConnectionReset => return got,
            Err(e) => panic!("{e} after {} bytes", got.len()),
        }
    }
}

fn arrives_before_the_reset(from_client: bool, then: Then) {
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let [front, server] = [FORWARDER_TO_CLIENT, SERVER].map(|host| host.port(Family::V4, PORT));
    let listener = lab.server.run(|| TcpListener::bind(server)).unwrap();
    let pins = Pins::of(&lab.forwarder);
    let plug = format!("{front}={server}");
    let arguments = ["--plug", &plug, "--splice", "1000000000", "--log-format", "json"];
    let mut program = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
    let client = lab.client.run(|| connect(front));
    let onward = listener.accept().unwrap().0;
    onward.set_read_timeout(Some(PATIENCE)).unwrap();
    let (mut sender, mut receiver) = if from_client { (client, onward) } else { (onward, client) };
    let id = program.wait_flow("copying")["id"].to_string();
    let mut bytes = vec![0; BYTES];
    pattern::fill(SEED, 0, &mut bytes);
    let mut before = 0;
    if then == Then::TakenBack {
        program.client(&["splice", &id]);
        program.wait_flow("spliced");
        before = 1000;
        sender.write_all(&bytes[..before]).unwrap();
        receiver.read_exact(&mut vec![0; before]).unwrap();
        program.client(&["unsplice", &id]);
        program.wait_flow("copying");
    }
    sender.write_all(&bytes[before..]).unwrap();
    eventually("the proxy has got everything", || (path_facts(&sender).unwrap().outstanding == 0).then_some(()));
    if then == Then::Drains {
        program.client(&["splice", &id]);
        program.wait_flow("draining");
    }
    let resets = || lab.forwarder.run(|| counter_here("Tcp", "EstabResets").unwrap());
    let count = resets();
    reset(sender);
    eventually("the reset has come", || (resets() > count).then_some(()));
    if then == Then::Drains {
        eventually("the drain is over", || (program.flows_in("draining") == 0).then_some(()));
    }
    let got = all_before_the_reset(&mut receiver);
    assert_eq!(
        (got.len(), pattern::check(SEED, before as u64, &got)),
        (BYTES - before, Ok(())),
        "{from_client} {then:?}"
    );
    program.comes_to_rest();
    let record = program.end(&pins).remove(0);
    assert_eq!(record["how"], if from_client { "client-reset" } else { "server-reset" }, "{record}");
}

#[test]
#[ignore = "root"]
fn what_came_before_a_reset_arrives_while_copied() {
    for from_client in [false, true] {
        arrives_before_the_reset(from_client, Then::Copied);
    }
}

#[test]
#[ignore = "root"]
fn what_came_before_a_reset_arrives_after_a_splice() {
    for from_client in [false, true] {
        arrives_before_the_reset(from_client, Then::TakenBack);
    }
}

#[test]
#[ignore = "root"]
fn what_came_before_a_reset_arrives_in_a_drain() {
    for from_client in [false, true] {
        arrives_before_the_reset(from_client, Then::Drains);
    }
}

/// Reads the head of a message, and what has come behind it.
fn head(stream: &mut TcpStream) -> (String, Vec<u8>) {
    let mut bytes = Vec::new();
    loop {
        if let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            let rest = bytes.split_off(end + 4);
            return (String::from_utf8(bytes).unwrap(), rest);
        }
        let mut room = [0; 4096];
        match stream.read(&mut room) {
            Ok(n @ 1..) => bytes.extend(&room[..n]),
            end => return (format!("{end:?} after {:?}", String::from_utf8_lossy(&bytes)), Vec::new()),
        }
    }
}

/// A proxy for `server`, and a site with it.
fn http(lab: &Lab, server: SocketAddr, splice: &str) -> (Running, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("longsplice.toml");
    let [proxy, site] = [PORT, SITE].map(|port| FORWARDER_TO_CLIENT.port(Family::V4, port));
    let text = format!(
        "[[listener]]\nprotocol = \"http\"\nlisten = \"{proxy}\"\n\
         [[listener]]\nprotocol = \"http\"\nlisten = \"{site}\"\nroute = [{{ pool = \"web\" }}]\n\
         [pool.web]\nservers = [\"{server}\"]\nfailures = 1000000\n"
    );
    std::fs::write(&config, text).unwrap();
    let arguments = ["--config", config.to_str().unwrap(), "--splice", splice, "--log-format", "json"];
    (Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, &[]), dir)
}

fn line(method: &str, path: &str, site: bool) -> String {
    let server = SERVER.port(Family::V4, PORT);
    let target = if site { path.to_owned() } else { format!("http://{server}{path}") };
    format!("{method} {target} HTTP/1.1\r\nHost: {server}\r\n")
}

/// A server answers an upload before it has read it, and closes its connection, which resets it.
#[test]
#[ignore = "root"]
fn a_reply_that_overtakes_an_upload_arrives() {
    const CLIENTS: usize = 12;
    const LENGTH: usize = 8 << 20;
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let server = SERVER.port(Family::V4, PORT);
    let listener = lab.server.run(|| TcpListener::bind(server)).unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || {
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                let (asked, _) = head(&mut stream);
                if asked.contains("/late") {
                    stream.read_exact(&mut vec![0; 700_000]).unwrap();
                }
                let length = if asked.contains("close") { "" } else { "Content-Length: 4\r\n" };
                let reply = format!("HTTP/1.1 413 Too Large\r\n{length}Connection: close\r\n\r\nbig!");
                let _ = stream.write_all(reply.as_bytes());
            });
        }
    });
    for splice in ["at-once", "32768"] {
        let pins = Pins::of(&lab.forwarder);
        let (mut program, _dir) = http(&lab, server, splice);
        for (site, path) in [(false, "/now"), (true, "/now"), (true, "/late"), (false, "/late/close")] {
            let clients: Vec<_> = (0..CLIENTS)
                .map(|_| {
                    let front = FORWARDER_TO_CLIENT.port(Family::V4, if site { SITE } else { PORT });
                    lab.client.spawn(move || {
                        let mut stream = connect(front);
                        let ask = format!("{}Content-Length: {LENGTH}\r\n\r\n", line("POST", path, site));
                        stream.write_all(ask.as_bytes()).unwrap();
                        let mut sending = stream.try_clone().unwrap();
                        let upload = thread::spawn(move || drop(sending.write_all(&vec![0; LENGTH])));
                        let (mut reply, mut body) = head(&mut stream);
                        let mut room = [0; 100];
                        while body.len() < 4 && reply.starts_with("HTTP/1.1 413") {
                            match stream.read(&mut room) {
                                Ok(n @ 1..) => body.extend(&room[..n]),
                                end => reply = format!("{end:?} in the body"),
                            }
                        }
                        upload.join().unwrap();
                        (reply, body)
                    })
                })
                .collect();
            for (n, client) in clients.into_iter().enumerate() {
                let (reply, body) = client.join().unwrap();
                assert!(
                    reply.starts_with("HTTP/1.1 413") && body == b"big!",
                    "{splice} {site} {path} {n}: {reply} {body:?}"
                );
            }
        }
        program.comes_to_rest();
        program.end(&pins);
    }
}

/// A server sends more than its reply while that drains. What the data path cuts off comes again after a timeout, when the next
/// request has been sent.
#[test]
#[ignore = "root"]
fn what_is_cut_off_behind_a_reply_answers_no_request() {
    const LENGTH: usize = 40_000;
    const FIRST: usize = 1000;
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    // a drain lasts for a round trip
    let delay = Impair { delay: Duration::from_millis(300), ..Impair::NONE };
    let _far = [LinkDirection::ToClient, LinkDirection::FromClient].map(|way| lab.impair(way, delay).unwrap());
    // all of it is sent within that time, and comes again when the next request is on its way
    lab.server.ip("route change 10.77.2.0/24 dev s0 initcwnd 100 rto_min 5s\n").unwrap();
    lab.server.sysctl("net.ipv4.tcp_early_retrans", "0").unwrap();
    let server = SERVER.port(Family::V4, PORT);
    let listener = lab.server.run(|| TcpListener::bind(server)).unwrap();
    let (drains, goes_on) = mpsc::channel::<()>();
    let goes_on = Arc::new(Mutex::new(goes_on));
    thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let goes_on = goes_on.clone();
            thread::spawn(move || -> io::Result<()> {
                let reply = |text: &[u8]| {
                    [format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", text.len()).as_bytes(), text].concat()
                };
                let (asked, _) = head(&mut stream);
                if asked.contains("/next") {
                    return stream.write_all(&reply(b"good"));
                }
                let long = reply(&[b'x'; LENGTH]);
                stream.write_all(&long[..FIRST])?;
                goes_on.lock().unwrap().recv().expect("the test goes on");
                stream.write_all(&[&long[FIRST..], &reply(b"evil")].concat())?;
                // what is asked next is answered by what was sent already
                while stream.read(&mut [0; 1000])? > 0 {}
                Ok(())
            });
        }
    });
    let pins = Pins::of(&lab.forwarder);
    let (mut program, _dir) = http(&lab, server, "at-once");
    for site in [false, true, false, true] {
        let front = FORWARDER_TO_CLIENT.port(Family::V4, if site { SITE } else { PORT });
        let mut client = lab.client.run(|| connect(front));
        let body = |client: &mut TcpStream, length: usize| {
            let (reply, mut body) = head(client);
            assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
            let have = body.len();
            body.resize(length, 0);
            client.read_exact(&mut body[have..]).unwrap();
            body
        };
        client.write_all(format!("{}\r\n", line("GET", "/long", site)).as_bytes()).unwrap();
        program.wait_flow("draining");
        drains.send(()).unwrap();
        assert!(body(&mut client, LENGTH).iter().all(|b| *b == b'x'));
        client.write_all(format!("{}\r\n", line("GET", "/next", site)).as_bytes()).unwrap();
        assert_eq!(body(&mut client, 4), b"good", "{site}");
    }
    program.end(&pins);
}
