//! The memory for codings of content has a limit: who comes too late is told so, whatever the server has sent by then.

use crate::running::{LONGSPLICE, Running, eventually};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    sync::Mutex,
    thread,
};

/// `<script>x</script>hi`, compressed by gzip.
const GZIP: &[u8] = b"\x1f\x8b\x08\0\0\0\0\0\x02\x03\xb3)N.\xca,(\xb1\xab\xb0\xd1\x87\xb222\x01\xfc#\xa8{\x14\0\0\0";
/// The first byte of a body that br has compressed with its longest window.
const BROTLI: &[u8] = b"\x0f";

/// Reads up to the end of a head, or of the stream.
fn head(stream: &mut impl BufRead) -> String {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") && stream.read_line(&mut head).unwrap_or(0) > 0 {}
    head
}

/// Connections on which bodies of br have begun.
static HELD: Mutex<Vec<TcpStream>> = Mutex::new(Vec::new());

/// Answers a request, and waits for the end of the connection. `/held`: the body goes on for ever; `/late`: it never begins.
fn answer(stream: TcpStream) {
    let mut stream = BufReader::new(stream);
    let asked = head(&mut stream);
    let (coding, length, body) = match asked.split(' ').nth(1) {
        Some("/held") => ("br", 1000, BROTLI),
        Some("/late") => ("gzip", GZIP.len(), &b""[..]),
        _ => ("gzip", GZIP.len(), GZIP),
    };
    let fields = format!("Content-Type: text/html\r\nContent-Encoding: {coding}\r\nContent-Length: {length}\r\n");
    // what becomes of it is seen at the client
    let _ = stream.get_mut().write_all(&[format!("HTTP/1.1 200 OK\r\n{fields}\r\n").as_bytes(), body].concat());
    if coding == "br" {
        HELD.lock().unwrap().push(stream.into_inner());
    } else {
        let _ = stream.read_to_end(&mut Vec::new());
    }
}

fn serve() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            thread::spawn(|| answer(stream));
        }
    });
    at
}

#[test]
fn who_finds_no_memory_for_codings_is_told_so() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("longsplice.toml");
    let change = "change = [{ type = \"text/html\", remove_element = \"script\" }]";
    let filters = [
        format!("{change}\nupload.{change}"),
        "rules = [{ action = \"deny\", body_contains = 'never there' }]\n\
         upload.rules = [{ action = \"deny\", body_contains = 'never there' }]"
            .into(),
    ];
    let ats = ["127.0.0.1", "127.0.0.2"];
    let listener = |at: &str, filter: &String| {
        let rules = "rules = [{ action = \"allow\", target = \"127.0.0.0/8\" }]";
        format!("[[listener]]\nprotocol = \"http\"\nlisten = \"{at}:0\"\n{rules}\n[listener.filter]\n{filter}\n")
    };
    let listeners: String = ats.iter().zip(&filters).map(|(at, filter)| listener(at, filter)).collect();
    fs::write(&file, format!("log.format = \"json\"\n{listeners}")).unwrap();
    let arguments = ["--copy-only", "--config", file.to_str().unwrap()];
    let mut proxy = Running::start(Command::new(LONGSPLICE), None, &arguments, &[]);
    let messages = proxy.messages();
    let fronts = ats.map(|at| {
        let (_, rest) = messages.split_once(&format!(" on {at}:")).expect("a listener");
        let port: String = rest.chars().take_while(char::is_ascii_digit).collect();
        format!("{at}:{port}")
    });
    let server = serve();
    let send = |front: &str, method: &str, path: &str, body: &[u8]| {
        let fields = format!("Content-Type: text/html\r\nContent-Encoding: gzip\r\nContent-Length: {}\r\n", body.len());
        let fields = if body.is_empty() { "" } else { &fields };
        let request =
            format!("{method} http://{server}{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{fields}\r\n");
        let mut stream = TcpStream::connect(front).unwrap();
        stream.write_all(&[request.as_bytes(), body].concat()).unwrap();
        let mut stream = BufReader::new(stream);
        (head(&mut stream), stream)
    };
    let is_served = |got: &(String, BufReader<TcpStream>)| got.0.starts_with("HTTP/1.1 200 ");
    // as many as fill it
    let held: Vec<_> = (0..100).map(|_| send(&fronts[0], "GET", "/held", b"")).take_while(is_served).collect();
    assert!((1..65).contains(&held.len()), "{}", held.len());
    let requests = [("GET", "/late", &b""[..]), ("GET", "/", b""), ("PUT", "/", GZIP)];
    for (front, (method, path, body)) in fronts.iter().flat_map(|front| requests.map(move |request| (front, request))) {
        let (got, mut rest) = send(front, method, path, body);
        assert!(got.starts_with("HTTP/1.1 503 "), "{front} {method} {path}: {got}");
        let mut page = String::new();
        rest.read_to_string(&mut page).unwrap();
        assert!(page.contains("bodies whose codings are taken off"), "{page}");
    }
    let counts = ["bodies_without_memory", "over_limit"].map(|name| proxy.count("proxy", name));
    assert_eq!(counts, [7; 2], "with the first that found none");
    let refused = |record: &Value| record["how"] == "limit" && record["status"] == 503;
    eventually("their lines", || (proxy.records().iter().filter(|r| refused(r)).count() == 7).then_some(()));
    drop(held);
    HELD.lock().unwrap().clear();
    for (front, (method, path, body)) in fronts.iter().flat_map(|front| requests.map(move |request| (front, request))) {
        eventually("memory", || is_served(&send(front, method, path, body)).then_some(()));
    }
    proxy.shut_down();
}
