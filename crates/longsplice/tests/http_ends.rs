//! Hosts that break off in the middle of HTTP messages: at every position of a reply and of an upload, by FIN and by RST, at
//! once or after everything before has arrived. The other end must be told and must not get anything that looks complete but
//! is not, and the proxy must come to rest. Needs root and eBPF, and fails without.

use crate::running::{self, LONGSPLICE, Pins, Running, eventually};
use longsplice_lab::{
    Family, Lab, Shape, pattern,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use longsplice_proxy::Http;
use nix::{
    libc,
    sys::socket::{setsockopt, sockopt::Linger},
};
use std::{
    borrow::Cow,
    fs,
    io::{self, ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, LazyLock, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

const PROXY: u16 = 3128;
const SITE: u16 = 8000;
const PORT: u16 = 8081;
/// Time limit for each byte, and for the end.
const PATIENCE: Duration = Duration::from_secs(20);
/// Clients that work through the cases in parallel.
const CLIENTS: usize = 4;
/// Maximum number of flows of one case: one per chunk, if each is worth a splice.
const FLOWS: u64 = CHUNKS.len() as u64;
/// Chunk sizes. By default the second is large enough for a splice, and so is its second half.
const CHUNKS: [usize; 4] = [1000, 1_300_000, 60_000, 1];
const LENGTH: usize = 1_400_000;
const TRAILERS: &[u8] = b"X-Trailer: 1\r\n\r\n";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    Exact,
    Chunked,
    /// Until the connection closes; replies only.
    Close,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Host {
    Client,
    Server,
}

/// How a host breaks off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Break {
    Fin,
    Rst,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    id: usize,
    site: bool,
    /// The host that sends the body: in a request or in a reply.
    sender: Host,
    framing: Framing,
    who: Host,
    how: Break,
    /// Where to break off: the sender after this many bytes of its message, the receiver after this many bytes of the body.
    cut: usize,
    /// Whether everything before has arrived by then.
    late: bool,
}

impl Case {
    fn head(&self) -> String {
        let mut head = match (self.sender, self.site) {
            (Host::Server, _) => "HTTP/1.1 200 OK\r\n".to_owned(),
            (Host::Client, site) => request("PUT", self.id, site),
        };
        match self.framing {
            Framing::Exact => head += &format!("Content-Length: {LENGTH}\r\n"),
            Framing::Chunked => head += "Transfer-Encoding: chunked\r\n",
            Framing::Close => {}
        }
        head + "\r\n"
    }

    /// The body as sent, including chunk framing. That of each case begins at another word of the pattern.
    fn body(&self) -> Cow<'static, [u8]> {
        let piece = |n: usize, begin: usize| &PATTERN[begin * 8..][..n];
        if self.framing != Framing::Chunked {
            return piece(LENGTH, self.id).into();
        }
        let mut body = Vec::with_capacity(LENGTH);
        for (i, n) in CHUNKS.into_iter().enumerate() {
            body.extend(format!("{n:x}\r\n").as_bytes());
            body.extend(piece(n, self.id * 10 + i));
            body.extend(b"\r\n");
        }
        body.extend(b"0\r\n");
        body.extend(TRAILERS);
        body.into()
    }

    /// The length of head and body in bytes.
    fn length(&self) -> usize {
        static CHUNKED: OnceLock<usize> = OnceLock::new();
        let chunked = || *CHUNKED.get_or_init(|| self.body().len());
        self.head().len() + if self.framing == Framing::Chunked { chunked() } else { LENGTH }
    }
}

/// What all bodies are parts of: for ten thousand cases with ten chunks each.
static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut bytes = vec![0; LENGTH + 100_000 * 8];
    pattern::fill(1, 0, &mut bytes);
    bytes
});

fn request(method: &str, id: usize, site: bool) -> String {
    let server = SERVER.port(Family::V4, PORT);
    let host = if site { String::new() } else { format!("http://{server}") };
    format!("{method} {host}/{id} HTTP/1.1\r\nHost: {server}\r\n")
}

/// Special positions of a message, and some ordinary ones.
fn places(case: Case) -> Vec<usize> {
    let (head, all) = (case.head().len(), case.length());
    let mut at = vec![1, head - 1, head, head + 1, head + 70_000, all / 2, all - 1, all];
    match case.framing {
        // by default the rest is copied from here on
        Framing::Exact => at.extend([0, 1, 2].map(|n| all - Http::BODY_PAYS_FROM as usize - 1 + n)),
        Framing::Chunked => {
            let long = head + 3 + 2 + CHUNKS[0] + 2; // "3e8"
            let begin = long + 6 + 2; // "13d620"
            at.extend([head + 4, head + 5, long - 1, long, long + 3, long + 7, begin, begin + 1]);
            at.extend([begin + CHUNKS[1] - 1, begin + CHUNKS[1], begin + CHUNKS[1] + 1, begin + CHUNKS[1] + 2]);
            at.extend([all - 2, all - 5, all - 18, all - 19]);
        }
        Framing::Close => {}
    }
    at
}

/// Every byte of the head, of the chunk framing, and of the trailer.
fn every_byte_of_framing(case: Case) -> Vec<usize> {
    let (head, all) = (case.head().len(), case.length());
    let mut at: Vec<_> = (1..=head).collect();
    if case.framing == Framing::Chunked {
        let mut here = head;
        for n in CHUNKS {
            let line = format!("{n:x}\r\n").len();
            at.extend(here..=here + line);
            here += line + n;
            at.extend([here, here + 1]);
            here += 2;
        }
        at.extend(here..=all);
    }
    at
}

fn cases(places: impl Fn(Case) -> Vec<usize>) -> Vec<Case> {
    use {Break::*, Framing::*, Host::*};
    let mut cases = Vec::new();
    for site in [false, true] {
        for (sender, framing) in
            [(Server, Exact), (Server, Chunked), (Server, Close), (Client, Exact), (Client, Chunked)]
        {
            for how in [Fin, Rst] {
                let case = Case { id: 0, site, sender, framing, who: sender, how, cut: 0, late: false };
                for cut in places(case) {
                    cases.extend([false, true].map(|late| Case { cut, late, ..case }));
                }
                let receiver = if sender == Client { Server } else { Client };
                for cut in [0, 1, 1500, LENGTH / 3, LENGTH / 2] {
                    cases.push(Case { who: receiver, cut, ..case });
                }
            }
        }
    }
    cases.iter_mut().enumerate().for_each(|(id, case)| case.id = id);
    cases
}

/// How a stream ended; whole if the message was complete before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Whole,
    Fin,
    Reset,
}

/// The state of all cases, with the bytes of bodies received so far.
struct State {
    cases: Vec<Case>,
    got: Vec<AtomicUsize>,
    wrong: Mutex<Vec<String>>,
    /// Connections that were reset before any reply.
    unheard: AtomicUsize,
}

impl State {
    fn wrong(&self, case: &Case, what: String) {
        self.wrong.lock().unwrap().push(format!("{case:?}: {what}"));
    }

    /// Waits until the receiver has this many bytes of the body.
    fn arrived(&self, case: &Case, want: usize) {
        eventually(&format!("{want} bytes of {case:?}"), || {
            (self.got[case.id].load(Ordering::Acquire) >= want).then_some(())
        });
    }

    /// Sends the sender's part, up to the position where it breaks off.
    fn send(&self, case: &Case, s: &mut TcpStream) -> io::Result<()> {
        let (head, body) = (case.head().into_bytes(), case.body());
        let length = head.len() + body.len();
        let cut = if case.who == case.sender { case.cut } else { length };
        let of_body = cut.saturating_sub(head.len());
        let begin = of_body.min(1000); // in a segment with the head
        s.write_all(&[&head[..cut.min(head.len())], &body[..begin]].concat())?;
        s.write_all(&body[begin..of_body])?;
        if case.who == case.sender && case.late {
            let mut there = cut;
            // Trailers of a reply are forwarded only once they are complete.
            if case.framing == Framing::Chunked && case.sender == Host::Server && cut < length {
                there = cut.min(length - TRAILERS.len());
            }
            self.arrived(case, there.saturating_sub(head.len()));
        }
        Ok(())
    }

    /// Reads a body, of which `at` bytes and `bytes` are there, until it is complete, has `most` bytes, or the stream ends. Fails on
    /// a wrong byte.
    fn receive(&self, case: &Case, s: &mut TcpStream, at: usize, bytes: &[u8], most: usize) -> io::Result<End> {
        let want = case.body();
        let is_right = |at: usize, bytes: &[u8]| want.get(at..at + bytes.len()) == Some(bytes);
        let (mut right, mut at) = (is_right(at, bytes), at + bytes.len());
        let mut buffer = vec![0; 1 << 16];
        let end = loop {
            self.got[case.id].store(at, Ordering::Release);
            if at >= most || (case.framing != Framing::Close && at >= want.len()) {
                break End::Whole;
            }
            match s.read(&mut buffer) {
                Ok(0) => break End::Fin,
                Ok(n) => {
                    right &= is_right(at, &buffer[..n]);
                    at += n;
                }
                Err(e) if e.kind() == ErrorKind::ConnectionReset => break End::Reset,
                Err(e) => return Err(e),
            }
        };
        if !right {
            return Err(io::Error::other(format!("{at} bytes, and not those that were sent")));
        }
        Ok(end)
    }
}

fn patient(s: &TcpStream) {
    s.set_nodelay(true).unwrap();
    s.set_read_timeout(Some(PATIENCE)).unwrap();
    s.set_write_timeout(Some(PATIENCE)).unwrap();
}

/// Reads a head. Returns it with the bytes after it; `None`: the stream ended before or within the head.
fn head(s: &mut TcpStream) -> io::Result<Option<(String, Vec<u8>)>> {
    let (mut bytes, mut buffer) = (Vec::new(), vec![0; 4096]);
    loop {
        if let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            let rest = bytes.split_off(end + 4);
            return Ok(Some((String::from_utf8(bytes).unwrap(), rest)));
        }
        match s.read(&mut buffer) {
            Ok(0) => return Ok(None),
            Ok(n) => bytes.extend(&buffer[..n]),
            Err(e) => return Err(e),
        }
    }
}

/// Breaks off, and waits until the other end does the same. Data received meanwhile is discarded.
fn break_off(how: Break, mut s: TcpStream) -> io::Result<()> {
    if how == Break::Rst {
        return Ok(setsockopt(&s, Linger, &libc::linger { l_onoff: 1, l_linger: 0 })?);
    }
    let told = s.shutdown(Shutdown::Write);
    let mut buffer = vec![0; 1 << 16];
    loop {
        match s.read(&mut buffer) {
            Ok(1..) => {}
            Ok(0) => return Ok(()),
            Err(e) if e.kind() == ErrorKind::ConnectionReset => return Ok(()),
            Err(e) => return told.and(Err(e)),
        }
    }
}

/// Serves one connection until a request ends it.
fn serve(mut s: TcpStream, state: &State) -> io::Result<()> {
    patient(&s);
    s.set_read_timeout(None)?; // connections in a pool are idle
    loop {
        let (text, rest) = match head(&mut s) {
            Ok(Some(request)) => request,
            Ok(None) => return Ok(()),
            Err(e) if e.kind() == ErrorKind::ConnectionReset => return Ok(()),
            Err(e) => return Err(e),
        };
        let id: usize = text.split(['/', ' ']).find_map(|w| w.parse().ok()).expect("a number");
        let case = &state.cases[id];
        patient(&s);
        if case.sender == Host::Server {
            match state.send(case, &mut s) {
                Ok(()) => {}
                Err(e) if case.who == Host::Client && e.kind() != ErrorKind::WouldBlock => return Ok(()),
                Err(e) => return Err(e),
            }
            if case.who == Host::Server {
                return break_off(case.how, s);
            }
            if case.framing == Framing::Close {
                return Ok(());
            }
        } else {
            let whole = case.who == Host::Client && case.cut == case.length();
            let most = if case.who == Host::Server { case.cut } else { usize::MAX };
            match state.receive(case, &mut s, 0, &rest, most)? {
                _ if case.who == Host::Server => return break_off(case.how, s),
                End::Whole if !whole => state.wrong(case, "the server has got all of it".into()),
                End::Whole => s.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")?,
                End::Fin | End::Reset => return Ok(()),
            }
        }
        s.set_read_timeout(None)?;
    }
}

/// The client's part of a case. Returns the error, if any.
fn ask(case: &Case, state: &State) -> Result<(), String> {
    let proxy = FORWARDER_TO_CLIENT.port(Family::V4, if case.site { SITE } else { PROXY });
    let failed = |what: &str| {
        let what = what.to_owned();
        move |e: io::Error| format!("{what}: {e}")
    };
    let mut s = TcpStream::connect(proxy).map_err(failed("connect"))?;
    patient(&s);
    if case.sender == Host::Client {
        match state.send(case, &mut s) {
            Ok(()) if case.who == Host::Client => return break_off(case.how, s).map_err(failed("the end")),
            Ok(()) => {}
            // the server has broken off, and so has the proxy: the reply is lost
            Err(e) if e.kind() != ErrorKind::WouldBlock => return Ok(()),
            Err(e) => return Err(format!("upload: {e}")),
        }
        return break_off(Break::Fin, s).map_err(failed("the answer"));
    }
    write!(s, "{}\r\n", request("GET", case.id, case.site)).map_err(failed("request"))?;
    let all = case.length();
    let (by_server, within_head) = (case.who == Host::Server, case.cut < case.head().len());
    // data in flight when its sender resets may be lost anywhere
    let lost = by_server && case.how == Break::Rst && !case.late;
    let answer = match head(&mut s) {
        Err(e) if e.kind() == ErrorKind::ConnectionReset => {
            state.unheard.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        answer => answer.map_err(failed("the reply"))?,
    };
    let Some((text, rest)) = answer else { return Err("no answer at all".into()) };
    if !text.starts_with("HTTP/1.1 200") {
        let right = text.starts_with("HTTP/1.1 502") && by_server && (within_head || lost);
        return if right { Ok(()) } else { Err(text) };
    }
    let most = if by_server { usize::MAX } else { case.cut };
    let end = state.receive(case, &mut s, 0, &rest, most).map_err(failed("the body"))?;
    if by_server {
        let may_be: &[End] = match (case.framing, case.how) {
            (Framing::Close, Break::Fin) => &[End::Fin],
            (Framing::Exact | Framing::Chunked, _) if case.cut == all && !lost => &[End::Whole],
            (Framing::Exact | Framing::Chunked, _) if case.cut == all => &[End::Whole, End::Reset],
            _ => &[End::Reset],
        };
        return if may_be.contains(&end) { Ok(()) } else { Err(format!("{end:?} instead of {may_be:?}")) };
    }
    if case.how == Break::Rst {
        return break_off(Break::Rst, s).map_err(failed("the reset"));
    }
    // a half-close does not end the connection: the rest of the reply arrives
    s.shutdown(Shutdown::Write).map_err(failed("shutdown"))?;
    let so_far = state.got[case.id].load(Ordering::Acquire);
    let end = state.receive(case, &mut s, so_far, &[], usize::MAX).map_err(failed("the rest"))?;
    let want = if case.framing == Framing::Close { End::Fin } else { End::Whole };
    if end == want { Ok(()) } else { Err(format!("{end:?} of the rest, instead of {want:?}")) }
}

/// Runs the cases. Returns the number of flows and of splices.
fn run(cases: Vec<Case>, more: &[&str]) -> (u64, u64) {
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let got = cases.iter().map(|_| AtomicUsize::new(0)).collect();
    let state = Arc::new(State { cases, got, wrong: Mutex::default(), unheard: AtomicUsize::new(0) });
    let server = SERVER.port(Family::V4, PORT);
    let listener = lab.server.run(|| TcpListener::bind(server)).unwrap();
    let serving = state.clone();
    thread::spawn(move || {
        for s in listener.incoming().map_while(Result::ok) {
            let state = serving.clone();
            thread::spawn(move || {
                if let Err(e) = serve(s, &state) {
                    state.wrong.lock().unwrap().push(format!("server: {e}"));
                }
            });
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("longsplice.toml");
    let [proxy, site] = [PROXY, SITE].map(|port| FORWARDER_TO_CLIENT.port(Family::V4, port));
    let text = format!(
        "[[listener]]\nprotocol = \"http\"\nlisten = \"{proxy}\"\n\
         [[listener]]\nprotocol = \"http\"\nlisten = \"{site}\"\nroute = [{{ pool = \"web\" }}]\n\
         [pool.web]\nservers = [\"{server}\"]\nfailures = 1000000\n"
    );
    fs::write(&config, text).unwrap();
    let arguments = ["--config", config.to_str().unwrap(), "--log-format", "json"];
    let pins = Pins::of(&lab.forwarder);
    let mut program = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, more);
    let next = Arc::new(AtomicUsize::new(0));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (state, next) = (state.clone(), next.clone());
            lab.client.spawn(move || {
                while let Some(case) = state.cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(e) = ask(case, &state) {
                        state.wrong(case, e);
                    }
                }
            })
        })
        .collect();
    let failed = clients.into_iter().map(thread::JoinHandle::join).filter(Result::is_err).count();
    let wrong = std::mem::take(&mut *state.wrong.lock().unwrap());
    let some: Vec<_> = wrong.iter().take(20).collect();
    assert!(failed == 0 && wrong.is_empty(), "{failed} clients, {} cases: {some:#?}", wrong.len());
    // The kernel itself does this in one of 150,000 connections: a segment
    // finds neither the request, just removed, nor the new socket.
    let unheard = state.unheard.load(Ordering::Relaxed);
    assert!(unheard <= 1, "{unheard} clients were reset before they had an answer");
    program.comes_to_rest();
    // The ID of a last flow shows how many there were: flows that are started over and over would each have used an ID.
    let last = lab.client.run(|| tunnel(proxy, server));
    drop(last);
    let records = program.end(&pins);
    let flows = records.iter().filter_map(|r| r["id"].as_u64()).max().expect("a number");
    let most = FLOWS * state.cases.len() as u64;
    assert!(flows <= most, "{flows} flows for {} cases", state.cases.len());
    (flows, records.iter().map(|r| r["splices"].as_u64().unwrap()).sum())
}

fn tunnel(proxy: SocketAddr, server: SocketAddr) -> TcpStream {
    let mut s = TcpStream::connect(proxy).unwrap();
    patient(&s);
    write!(s, "CONNECT {server} HTTP/1.1\r\nHost: {server}\r\n\r\n").unwrap();
    assert!(head(&mut s).unwrap().unwrap().0.starts_with("HTTP/1.1 200"));
    s
}

#[test]
#[ignore = "root"]
fn where_long_bodies_are_spliced() {
    let (flows, splices) = run(cases(places), &[]);
    eprintln!("{flows} flows, {splices} splices");
    assert!(splices > 50, "{splices}");
}

#[test]
#[ignore = "root"]
fn where_all_bodies_are_spliced() {
    let (flows, splices) = run(cases(places), &["--splice", "at-once"]);
    eprintln!("{flows} flows, {splices} splices");
    assert!(splices > 50, "{splices}");
}

#[test]
#[ignore = "root"]
fn at_every_byte_of_the_framing() {
    let (flows, splices) = run(cases(every_byte_of_framing), &["--splice", "at-once"]);
    eprintln!("{flows} flows, {splices} splices");
    assert!(splices > 50, "{splices}");
}

/// A reset that comes at once behind a spliced chunk: the data path drops what lies beyond the chunk, the client may lack what was
/// forwarded, and the proxy's socket may hear nothing of the reset. One case in two hundred hung.
#[test]
#[ignore = "root"]
fn where_a_reset_follows_a_spliced_chunk() {
    let is_behind = |case: &Case| {
        let Case { sender, framing, who, how, cut, late, .. } = *case;
        (sender, framing, who, how, late) == (Host::Server, Framing::Chunked, Host::Server, Break::Rst, false)
            && cut > CHUNKS.iter().sum()
    };
    let some: Vec<_> = cases(places).into_iter().filter(is_behind).collect();
    let again = some.iter().cycle().take(100 * some.len()).enumerate();
    let (_, splices) = run(again.map(|(id, case)| Case { id, ..*case }).collect(), &[]);
    assert!(splices > 50, "{splices}");
}

#[test]
#[ignore = "root"]
fn where_all_bodies_are_copied() {
    let (_, splices) = run(cases(places), &["--copy-only"]);
    assert_eq!(splices, 0);
}

/// The proxy is not reading from the client, and has nothing to write to it.
#[test]
#[ignore = "root"]
fn a_reset_is_heard_while_the_server_is_silent() {
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let (front, server) = (FORWARDER_TO_CLIENT.port(Family::V4, PROXY), SERVER.port(Family::V4, PORT));
    let listener = lab.server.run(|| TcpListener::bind(server)).unwrap();
    let pins = Pins::of(&lab.forwarder);
    let arguments = ["--splice", "at-once", "--http", &front.to_string()];
    let mut proxy = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
    for taken_back in [false, true] {
        let mut client = lab.client.run(|| running::connect(front));
        write!(client, "GET http://{server}/ HTTP/1.1\r\nHost: {server}\r\n\r\n").unwrap();
        let mut onward = listener.accept().unwrap().0;
        patient(&onward);
        assert!(head(&mut onward).unwrap().is_some());
        onward.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nonly a part of it").unwrap();
        let (_, mut body) = head(&mut client).unwrap().unwrap();
        while body.len() < 17 {
            let mut more = [0; 17];
            let n = client.read(&mut more).unwrap();
            body.extend(&more[..n]);
        }
        let id = proxy.wait_flow("spliced")["id"].to_string();
        if taken_back {
            proxy.client(&["unsplice", &id]);
            proxy.wait_flow("copying");
        }
        break_off(Break::Rst, client).unwrap();
        match onward.read(&mut [0]) {
            Ok(0) => {}
            Err(e) if e.kind() == ErrorKind::ConnectionReset => {}
            heard => panic!("{taken_back}: {heard:?}"),
        }
        proxy.flows_end();
    }
    proxy.stop(&pins);
}
