//! Bodies of replies and requests that a filter changes or judges, through the real program: what is behind the limit of the
//! change, or behind what a rule reads, is spliced, whatever the framing. Needs root and eBPF, and fails without.

use crate::running::{Setting, listener};
use longsplice_lab::{
    Family, pattern,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use sha2::{Digest, Sha256};
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    thread,
    time::Duration,
};

const PROXY: u16 = 3128;
const PORT: u16 = 8080;
const SIZE: usize = 30_000_000;
/// Pause in the middle of each reply, in which both windows fit.
const PAUSE: Duration = Duration::from_millis(300);
const ELEMENT: &[u8] = b"<script>alert(1)</script>";

/// The content, with an element in its first bytes and one at its end.
fn content() -> Vec<u8> {
    let mut bytes = vec![0; SIZE];
    pattern::fill(1, 0, &mut bytes);
    bytes.iter_mut().filter(|b| **b == b'<').for_each(|b| *b = b'.');
    for at in [1000, SIZE - 1000] {
        bytes[at..at + ELEMENT.len()].copy_from_slice(ELEMENT);
    }
    bytes
}

/// Serves one connection: the framing is the path.
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
    let content = content();
    let html = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n";
    let reply = match head.split(' ').nth(1).unwrap() {
        "/exact" => [format!("{html}Content-Length: {SIZE}\r\n\r\n").as_bytes(), &content].concat(),
        "/chunked" => {
            let (one, two) = content.split_at(900);
            let chunks = [&b"384\r\n"[..], one, format!("\r\n{:x}\r\n", two.len()).as_bytes(), two].concat();
            [format!("{html}Transfer-Encoding: chunked\r\n\r\n").as_bytes(), &chunks, b"\r\n0\r\n\r\n"].concat()
        }
        _ => [format!("{html}\r\n").as_bytes(), &content].concat(),
    };
    let (first, rest) = reply.split_at(reply.len() / 2);
    let _ = stream.write_all(first);
    thread::sleep(PAUSE);
    let _ = stream.write_all(rest);
}

/// Returns the content of what a client gets to its end, without chunks.
fn ask(setting: &Setting, family: Family, path: &str) -> Vec<u8> {
    let mut stream = setting.connect(FORWARDER_TO_CLIENT.port(family, PROXY));
    let server = SERVER.port(family, PORT);
    write!(stream, "GET http://{server}{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    let at = all.windows(4).position(|w| w == b"\r\n\r\n").expect("a head") + 4;
    let head = String::from_utf8(all[..at].to_vec()).unwrap();
    let mut body = &all[at..];
    assert_eq!(head.contains("\r\nTransfer-Encoding: chunked\r\n"), path != "/close", "{head}");
    assert!(!head.contains("Content-Length"), "{head}");
    if path == "/close" {
        return body.to_vec();
    }
    let mut content = Vec::new();
    loop {
        let end = body.windows(2).position(|w| w == b"\r\n").expect("a size");
        let size = usize::from_str_radix(std::str::from_utf8(&body[..end]).unwrap(), 16).unwrap();
        body = &body[end + 2..];
        content.extend(&body[..size]);
        assert_eq!(&body[size..size + 2], b"\r\n");
        body = &body[size + 2..];
        if size == 0 {
            assert!(body.is_empty(), "{} bytes", body.len());
            return content;
        }
    }
}

fn run(family: Family) {
    let at = FORWARDER_TO_CLIENT.port(family, PROXY).to_string();
    let change = |more: &str| {
        let filter = format!("filter.change = [{{ type = \"text/html\", remove_element = \"script\"{more} }}]");
        format!("log.format = \"json\"\n{}", listener("http", &at, &filter))
    };
    let setting = Setting::new(&change(", until = 4096"));
    let server = setting.listen(SERVER.port(family, PORT));
    thread::spawn(move || {
        while let Ok((stream, _)) = server.accept() {
            thread::spawn(move || answer(stream));
        }
    });
    let without = |all: &[u8], at: usize| [&all[..at], &all[at + ELEMENT.len()..]].concat();
    let first = without(&content(), 1000);
    let both = without(&first, SIZE - 1000 - ELEMENT.len());
    for (configuration, want, is_spliced) in [(change(", until = 4096"), first, true), (change(""), both, false)] {
        setting.configure(&configuration);
        let mut program = setting.start();
        for path in ["/exact", "/chunked", "/close"] {
            let got = ask(&setting, family, path);
            assert_eq!((got.len(), Sha256::digest(&got)), (want.len(), Sha256::digest(&want)), "{path}");
        }
        program.flows_end();
        let records = program.end(&setting.pins[0]);
        assert_eq!(records.len(), 3);
        for record in records {
            let spliced = record["spliced_down"].as_u64().unwrap();
            match is_spliced {
                true => assert!(record["splices"] == 1 && spliced > 1_000_000, "{record}"),
                false => assert!(record["refusal"] == "filter" && spliced == 0, "{record}"),
            }
            assert_eq!(record["how"], "closed");
        }
    }
}

fn said(content: &[u8]) -> String {
    format!("{} {:?}", content.len(), Sha256::digest(content).as_slice())
}

/// Reads a request to its end, and answers with the length and the digest of its content.
fn take(stream: TcpStream) {
    let mut from = BufReader::new(stream);
    let mut line = String::new();
    let mut next = |from: &mut BufReader<TcpStream>| {
        line.clear();
        from.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    };
    let (mut length, mut field) = (None, next(&mut from));
    while !field.is_empty() {
        length = field.strip_prefix("Content-Length: ").map(|n| n.parse().unwrap()).or(length);
        field = next(&mut from);
    }
    let mut content = Vec::new();
    loop {
        let size = length.unwrap_or_else(|| usize::from_str_radix(&next(&mut from), 16).unwrap());
        from.by_ref().take(size as u64).read_to_end(&mut content).unwrap();
        if length.is_some() {
            break;
        }
        assert_eq!(next(&mut from), "");
        if size == 0 {
            break;
        }
    }
    let said = said(&content);
    write!(from.get_mut(), "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{said}", said.len()).unwrap();
}

/// Uploads this, with a pause in its middle. Returns the end of the answer.
fn upload(setting: &Setting, family: Family, content: &[u8], chunked: bool) -> String {
    let mut stream = setting.connect(FORWARDER_TO_CLIENT.port(family, PROXY));
    let server = SERVER.port(family, PORT);
    let (one, two) = content.split_at(900);
    let (framing, body) = match chunked {
        true => {
            let chunks = [&b"384\r\n"[..], one, format!("\r\n{:x}\r\n", two.len()).as_bytes(), two].concat();
            ("Transfer-Encoding: chunked".to_owned(), [&chunks[..], b"\r\n0\r\n\r\n"].concat())
        }
        false => (format!("Content-Length: {}", content.len()), content.to_vec()),
    };
    let head = format!("PUT http://{server}/ HTTP/1.1\r\nHost: x\r\nContent-Type: text/html\r\n{framing}\r\n");
    write!(stream, "{head}Connection: close\r\n\r\n").unwrap();
    let (first, rest) = body.split_at(body.len() / 2);
    stream.write_all(first).unwrap();
    thread::sleep(PAUSE);
    stream.write_all(rest).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.rsplit("\r\n").next().unwrap().to_owned()
}

fn uploads(family: Family) {
    let at = FORWARDER_TO_CLIENT.port(family, PROXY).to_string();
    let change = |more: &str| format!("change = [{{ type = \"text/html\", remove_element = \"script\"{more} }}]");
    let rule = |what: &str| format!("rules = [{{ action = \"deny\", {what} }}]");
    let whole = content();
    let first = [&whole[..1000], &whole[1000 + ELEMENT.len()..]].concat();
    let both = [&first[..SIZE - 1000 - ELEMENT.len()], &first[SIZE - 1000..]].concat();
    let setting = Setting::new("");
    let server = setting.listen(SERVER.port(family, PORT));
    thread::spawn(move || {
        while let Ok((stream, _)) = server.accept() {
            thread::spawn(move || take(stream));
        }
    });
    for (filter, want, is_spliced) in [
        (change(", until = 4096"), &first, true),
        (rule("body_begins = '^MZ'"), &whole, true),
        (change(""), &both, false),
        (rule("body_contains = 'never there'"), &whole, false),
    ] {
        let keys = format!("[listener.filter.upload]\n{filter}");
        setting.configure(&format!("log.format = \"json\"\n{}", listener("http", &at, &keys)));
        let mut program = setting.start();
        for chunked in [false, true] {
            let got = upload(&setting, family, &whole, chunked);
            assert_eq!(got, said(want), "{filter}, chunked: {chunked}");
        }
        program.flows_end();
        let records = program.end(&setting.pins[0]);
        assert_eq!(records.len(), 2);
        for record in records {
            let spliced = record["spliced_up"].as_u64().unwrap();
            assert!(if is_spliced { spliced > 1_000_000 } else { spliced == 0 }, "{filter}: {record}");
            assert_eq!((&record["splices"], &record["how"]), (&u64::from(is_spliced).into(), &"closed".into()));
        }
    }
}

#[test]
#[ignore = "root"]
fn behind_a_filter_the_rest_of_an_upload_is_spliced() {
    uploads(Family::V4);
}

#[test]
#[ignore = "root"]
fn the_same_of_uploads_over_ipv6() {
    uploads(Family::V6);
}

#[test]
#[ignore = "root"]
fn behind_the_limit_of_a_change_the_rest_is_spliced() {
    run(Family::V4);
}

#[test]
#[ignore = "root"]
fn the_same_over_ipv6() {
    run(Family::V6);
}
