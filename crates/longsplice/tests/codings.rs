//! The memory for codings of content has a limit: who comes too late is told so, whatever the server has sent by then.

use crate::running::{LONGSPLICE, Running, eventually};
use nix::{
    libc,
    sys::socket::{setsockopt, sockopt::Linger},
};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
};
use tempfile::TempDir;

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

/// Connections on which bodies have begun.
static HELD: Mutex<Vec<TcpStream>> = Mutex::new(Vec::new());

/// The tests take turns: what one holds, the other would end.
static TURN: Mutex<()> = Mutex::new(());

/// Answers a request, and waits for the end of the connection. `/held`: the body goes on for ever; `/late`: it never begins.
/// `/upload`: there is no answer.
fn answer(stream: TcpStream) {
    let mut stream = BufReader::new(stream);
    let asked = head(&mut stream);
    let (coding, length, body) = match asked.split(' ').nth(1) {
        Some("/upload") => return HELD.lock().unwrap().push(stream.into_inner()),
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

/// The program with a listener that changes bodies and one that searches them, and a server.
struct Scene {
    proxy: Running,
    fronts: [String; 2],
    server: SocketAddr,
    _dir: TempDir,
    _turn: MutexGuard<'static, ()>,
}

type Answer = (String, BufReader<TcpStream>);

impl Scene {
    fn new() -> Scene {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
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
        let proxy = Running::start(Command::new(LONGSPLICE), None, &arguments, &[]);
        let messages = proxy.messages();
        let fronts = ats.map(|at| {
            let (_, rest) = messages.split_once(&format!(" on {at}:")).expect("a listener");
            let port: String = rest.chars().take_while(char::is_ascii_digit).collect();
            format!("{at}:{port}")
        });
        Scene { proxy, fronts, server: serve(), _dir: dir, _turn: turn }
    }

    /// Sends a request with this body, of this length in all.
    fn begin(&self, front: usize, ask: &str, more: &str, body: &[u8], length: usize) -> TcpStream {
        let (method, path) = ask.split_once(' ').unwrap();
        let fields = format!("Content-Type: text/html\r\nContent-Length: {length}\r\n");
        let fields = if body.is_empty() { "" } else { &fields };
        let server = self.server;
        let request =
            format!("{method} http://{server}{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{more}{fields}\r\n");
        let mut stream = TcpStream::connect(&self.fronts[front]).unwrap();
        stream.write_all(&[request.as_bytes(), body].concat()).unwrap();
        stream
    }

    /// Sends a request, and reads the head of the reply.
    fn send(&self, front: usize, ask: &str, body: &[u8]) -> Answer {
        let coding = if body.is_empty() { "" } else { "Content-Encoding: gzip\r\n" };
        let mut stream = BufReader::new(self.begin(front, ask, coding, body, body.len()));
        (head(&mut stream), stream)
    }

    /// Begins replies until there is no memory for another one. The client takes codings, so each has an encoder, too.
    fn fill(&self) -> Vec<BufReader<TcpStream>> {
        let begin = |_| {
            let mut stream = BufReader::new(self.begin(0, "GET /held", "Accept-Encoding: br\r\n", b"", 0));
            head(&mut stream).starts_with("HTTP/1.1 200 ").then_some(stream)
        };
        let held: Vec<_> = (0..100).map_while(begin).collect();
        assert!((1..65).contains(&held.len()), "{}", held.len());
        held
    }

    /// Waits until there is memory again.
    fn has_memory(&self) {
        eventually("memory", || is_served(&self.send(0, "GET /", b"")).then_some(()));
    }
}

fn is_served(got: &Answer) -> bool {
    got.0.starts_with("HTTP/1.1 200 ")
}

/// Ends a connection by an RST.
fn reset(stream: &TcpStream) {
    setsockopt(stream, Linger, &libc::linger { l_onoff: 1, l_linger: 0 }).unwrap();
}

#[test]
fn who_finds_no_memory_for_codings_is_told_so() {
    let mut scene = Scene::new();
    let held = scene.fill();
    let requests = [("GET /late", &b""[..]), ("GET /", b""), ("PUT /", GZIP)];
    let all = || (0..2).flat_map(|front| requests.map(move |(ask, body)| (front, ask, body)));
    for (front, ask, body) in all() {
        let (got, mut rest) = scene.send(front, ask, body);
        assert!(got.starts_with("HTTP/1.1 503 "), "{front} {ask}: {got}");
        let mut page = String::new();
        rest.read_to_string(&mut page).unwrap();
        assert!(page.contains("bodies whose codings are taken off"), "{page}");
    }
    let counts = ["bodies_without_memory", "over_limit"].map(|name| scene.proxy.count("proxy", name));
    assert_eq!(counts, [7; 2], "with the first that found none");
    let refused = |record: &Value| record["how"] == "limit" && record["status"] == 503;
    let lines = || (scene.proxy.records().iter().filter(|r| refused(r)).count() == 7).then_some(());
    eventually("their lines", lines);
    drop(held);
    HELD.lock().unwrap().clear();
    for (front, ask, body) in all() {
        eventually("memory", || is_served(&scene.send(front, ask, body)).then_some(()));
    }
    scene.proxy.shut_down();
}

/// A client that disappears in the midst of a body leaves its memory to others, whatever its server does.
#[test]
fn clients_that_are_gone_have_no_memory_for_codings() {
    let mut scene = Scene::new();
    // replies
    for _ in 0..2 {
        let held = scene.fill();
        let count = held.len();
        held.iter().for_each(|stream| reset(stream.get_ref()));
        drop(held);
        scene.has_memory();
        // all of it
        let again = scene.fill();
        assert_eq!(again.len(), count);
        again.iter().for_each(|stream| reset(stream.get_ref()));
    }
    scene.has_memory();
    // uploads, by a FIN or by an RST before their end
    for resets in [false, true] {
        let more = "Content-Encoding: br\r\n";
        let refused = || scene.proxy.count("proxy", "bodies_without_memory");
        let before = refused();
        let mut begun: Vec<_> = (0..64).map(|_| scene.begin(0, "PUT /upload", more, BROTLI, 1000)).collect();
        eventually("no memory", || (refused() > before && !is_served(&scene.send(0, "GET /", b""))).then_some(()));
        begun.iter().filter(|_| resets).for_each(reset);
        begun.clear();
        scene.has_memory();
        let held = scene.fill();
        held.iter().for_each(|stream| reset(stream.get_ref()));
        drop(held);
        scene.has_memory();
    }
    scene.proxy.shut_down();
}
