//! Replies that pass through a filter: allowed bodies are spliced, whatever their framing; bodies that the filter has to
//! read are copied; denied ones are not delivered. Needs root and eBPF, and fails without.

use crate::running::{LONGSPLICE, Pins, Running};
use longsplice_lab::{
    Family, Lab, Shape, pattern,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use sha2::{Digest, Sha256};
use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

const PROXY: u16 = 3128;
const PORT: u16 = 8080;
const SIZE: usize = 30_000_000;
/// Pause in the middle of each reply.
const PAUSE: Duration = Duration::from_millis(300);
/// Time limit for each byte.
const PATIENCE: Duration = Duration::from_secs(30);

const FILTER: &str = "[listener.filter]\n\
                      rules = [{ action = \"deny\", type = \"video/*\" },\n\
                      { action = \"deny\", body_begins = '^MZ' },\n\
                      { action = \"deny\", status = 203, body_contains = 'top\\s+secret' }]\n\
                      first = 20000\n";

/// The server's reply to a path: status line and fields, and everything after the head.
fn reply(path: &str) -> (String, Vec<u8>) {
    let mut bytes = vec![0; SIZE];
    pattern::fill(path.len() as u64, 0, &mut bytes);
    let text = |at: usize, text: &[u8], bytes: &mut Vec<u8>| bytes[at..at + text.len()].copy_from_slice(text);
    let mut head = "HTTP/1.1 200 OK\r\n".to_owned();
    match path.split('/').nth(1) {
        Some("good") => text(0, b"good", &mut bytes),
        Some("type") => head += "Content-Type: video/mp4\r\n",
        Some("program") => text(0, b"MZ", &mut bytes),
        Some("clean") => head = "HTTP/1.1 203 Read\r\n".into(),
        Some("leak") => {
            head = "HTTP/1.1 203 Read\r\n".into();
            text(SIZE - 1000, b"top \n secret", &mut bytes);
        }
        Some(status @ ("204" | "304")) => return (format!("HTTP/1.1 {status} Empty\r\n"), Vec::new()),
        other => panic!("{other:?}"),
    }
    match path.split('/').nth(2) {
        Some("exact") => head += &format!("Content-Length: {SIZE}\r\n"),
        Some("chunked") => {
            head += "Transfer-Encoding: chunked\r\n";
            // the first bytes are spread over several chunks
            let mut chunks = Vec::with_capacity(SIZE + 100);
            let mut rest = &bytes[..];
            for length in [1, 999, 15_000, SIZE - 16_000] {
                let (chunk, after) = rest.split_at(length);
                chunks.extend(format!("{length:x}\r\n").as_bytes());
                chunks.extend(chunk);
                chunks.extend(b"\r\n");
                rest = after;
            }
            chunks.extend(b"0\r\n\r\n");
            bytes = chunks;
        }
        Some("close") => {}
        other => panic!("{other:?}"),
    }
    (head, bytes)
}

/// Serves one connection. A client that breaks off before the end of a reply has a reason.
fn answer(mut stream: TcpStream) {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut byte) {
            Ok(1) => head.push(byte[0]),
            _ => return,
        }
    }
    let head = String::from_utf8(head).unwrap();
    let mut words = head.split(' ');
    let (method, path) = (words.next().unwrap(), words.next().unwrap());
    let (said, body) = reply(path);
    let body = if method == "HEAD" { &[] } else { &body[..] };
    let reply = [said.as_bytes(), b"\r\n", body].concat();
    let (first, rest) = reply.split_at(reply.len() / 2);
    let _ = stream.write_all(first);
    // The proxy has nothing left to copy, so that the windows of both hosts fit, however busy the machine is.
    thread::sleep(PAUSE);
    let _ = stream.write_all(rest);
}

/// Sends one request. Returns the head of the reply, the bytes after it, and how the connection ended.
fn ask(proxy: SocketAddr, method: &str, url: &str) -> (String, Vec<u8>, Result<(), ErrorKind>) {
    let mut stream = TcpStream::connect(proxy).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "{method} {url} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut all = Vec::new();
    let end = stream.read_to_end(&mut all).map(drop).map_err(|e| e.kind());
    let head = all.windows(4).position(|w| w == b"\r\n\r\n").expect("a head") + 4;
    let body = all.split_off(head);
    (String::from_utf8(all).unwrap(), body, end)
}

fn run(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let listener = lab.server.run(|| TcpListener::bind(SERVER.port(family, PORT))).unwrap();
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            thread::spawn(move || answer(stream));
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let (config, proxy) = (dir.path().join("longsplice.toml"), FORWARDER_TO_CLIENT.port(family, PROXY));
    fs::write(&config, format!("[[listener]]\nprotocol = \"http\"\nlisten = \"{proxy}\"\n{FILTER}")).unwrap();
    let arguments = ["--config", config.to_str().unwrap(), "--log-format", "json"];
    let pins = Pins::of(&lab.forwarder);
    let mut program = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
    let asked = |method: &'static str, path: &'static str| {
        let url = format!("http://{}{path}", SERVER.port(family, PORT));
        lab.client.run(|| ask(proxy, method, &url))
    };

    let whole = ["/good/exact", "/good/chunked", "/good/close", "/clean/exact", "/clean/close", "/204", "/304"];
    for path in whole {
        let (head, body, end) = asked("GET", path);
        let (said, sent) = reply(path);
        assert!(head.starts_with(said.lines().next().unwrap()), "{path}: {head}");
        assert_eq!((body.len(), end), (sent.len(), Ok(())), "{path}: {head}");
        assert_eq!(Sha256::digest(&body), Sha256::digest(&sent), "{path}");
    }
    let (head, body, end) = asked("HEAD", "/program/exact");
    assert!(head.starts_with("HTTP/1.1 200 OK") && body.is_empty() && end.is_ok(), "{head}");
    let denied = ["/type/exact", "/type/close", "/program/exact", "/program/chunked", "/program/close"];
    for path in denied {
        let (head, body, end) = asked("GET", path);
        assert!(head.starts_with("HTTP/1.1 403 Forbidden") && !head.contains("video"), "{path}: {head}");
        let rule = if path.starts_with("/type") { 1 } else { 2 };
        assert_eq!((String::from_utf8(body), end), (Ok(format!("longsplice: reply rule {rule}\n")), Ok(())));
    }
    for path in ["/leak/exact", "/leak/chunked", "/leak/close"] {
        let (head, body, end) = asked("GET", path);
        assert!(head.starts_with("HTTP/1.1 203 Read"), "{head}");
        assert_eq!(end, Err(ErrorKind::ConnectionReset), "{path}");
        assert!(reply(path).1.starts_with(&body) && !body.windows(12).any(|w| w == b"top \n secret"), "{path}");
    }

    program.flows_end();
    let counters = program.counters();
    let counters = ["replies_denied", "replies_filtered"].map(|name| counters["proxy"][name].as_u64());
    assert_eq!(counters, [Some(8), Some(2)]);
    let records = program.end(&pins);
    assert_eq!(records.len(), whole.len() + 1 + denied.len() + 3);
    for (path, r) in whole.iter().zip(&records) {
        let spliced = r["spliced_down"].as_u64().unwrap() as usize;
        match *path {
            _ if path.starts_with("/good") => {
                // how much is spliced depends on the first moment at which both windows fit; in the pause they do
                assert!(r["splices"] == 1 && spliced > 1_000_000, "{path}: {r}");
            }
            _ if path.starts_with("/clean") => assert!(r["refusal"] == "filter" && spliced == 0, "{path}: {r}"),
            _ => assert_eq!(r["refusal"], "short", "{path}: {r}"),
        }
        assert_eq!(r["how"], "closed");
    }
    for r in &records[whole.len() + 1..] {
        assert_eq!((&r["how"], r["reply_rule"].as_str().unwrap().ends_with(":deny")), (&"denied".into(), true), "{r}");
    }
}

#[test]
#[ignore = "root"]
fn replies_are_let_through_or_not() {
    run(Family::V4);
}

#[test]
#[ignore = "root"]
fn the_same_over_ipv6() {
    run(Family::V6);
}
