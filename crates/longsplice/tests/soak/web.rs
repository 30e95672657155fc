//! HTTP: requests with bodies whose every byte is known, over persistent connections.

use super::{plan::HANGS, traffic::Traffic, ways::PROXY};
use longsplice_lab::{
    Family, Lab, pattern,
    topology::{FORWARDER_TO_CLIENT, SERVER, SERVER_SECOND},
    traffic::{self, STEP, Script},
};
use nix::sys::socket::{setsockopt, sockopt};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// The port of a reverse proxy, and of the servers behind it.
pub const SITE: u16 = 8080;
pub const WEB: u16 = 8081;
const CLIENTS: u64 = 4;
/// Pause before the next attempt to connect.
pub const DISCOURAGED: Duration = Duration::from_millis(500);
const PIECE: usize = 64 * 1024;
/// A server that waits for the rest of a request learns by keep-alive probes
/// that the connection is gone, or after this time that no one answers.
const FORSAKEN: Duration = Duration::from_secs(20 + 20 * 5 + 10);

pub fn servers() -> [SocketAddr; 3] {
    [SERVER.port(Family::V4, WEB), SERVER_SECOND.port(Family::V4, WEB), SERVER.port(Family::V6, WEB)]
}

pub fn begin(traffic: &Arc<Traffic>, lab: &Lab, seed: u64) {
    for at in servers() {
        let listener = lab.server.run(|| traffic::listen(at, &Script::answerer())).expect("the server listens");
        let traffic = traffic.clone();
        thread::spawn(move || accept(&traffic, &listener));
    }
    for n in 0..CLIENTS {
        let traffic = traffic.clone();
        let mut r = SmallRng::seed_from_u64(seed ^ (n + 1) << 48);
        lab.client.spawn(move || {
            while let Some(_open) = traffic.enter() {
                visit(&traffic, &mut r);
                thread::sleep(Duration::from_millis(r.random_range(10..200)));
            }
        });
    }
}

/// Opens a client connection and sends its requests.
fn visit(traffic: &Traffic, r: &mut SmallRng) {
    let family = Family::BOTH[r.random_range(0..2)];
    let is_site = r.random();
    let proxy = FORWARDER_TO_CLIENT.port(family, if is_site { SITE } else { PROXY });
    // from the start of the connection: the process that would serve the
    // next request may die while an earlier reply is still forwarded intact
    let began = Instant::now();
    let script = Script { deadline: HANGS, ..Script::opener(0) };
    let mut wire = match traffic::connect(proxy, &script).and_then(Wire::new) {
        Ok(wire) => wire,
        Err(e) => {
            failed(traffic, began, &format!("HTTP: connecting to {proxy}"), &e);
            return thread::sleep(DISCOURAGED);
        }
    };
    for n in 0..r.random_range(1..20) {
        if !traffic.is_open() {
            return;
        }
        let ask = Ask::draw(is_site, r);
        match ask.put_to(&mut wire, r) {
            Ok(bytes) => traffic.ledger.answered(bytes, n > 0),
            Err(e) => {
                let local = wire.stream.local_addr();
                let what =
                    format!("{ask:?}, request {n} from {local:?} to {proxy}, {} bytes read since it began", wire.read);
                return failed(traffic, began, &format!("HTTP: {what}"), &e);
            }
        }
        wire.read = 0;
        thread::sleep(Duration::from_millis(r.random_range(0..50)));
    }
}

/// Records a failure. Wrong content has no excuse.
pub fn failed(traffic: &Traffic, since: Instant, what: &str, error: &io::Error) {
    let what = format!("{what}: {error}");
    match error.kind() {
        ErrorKind::InvalidData => traffic.ledger.fail(format!("wrong bytes: {what}")),
        ErrorKind::TimedOut => traffic.ledger.hung(since, what),
        ErrorKind::HostUnreachable => traffic.ledger.unreached(since, what),
        _ => traffic.ledger.unanswered(since, what),
    }
}

pub fn wrong(what: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what.into())
}

/// A request. Its path contains all of its parameters.
#[derive(Debug)]
struct Ask {
    /// The server named by the client; otherwise the proxy chooses one.
    server: Option<SocketAddr>,
    is_upload: bool,
    is_chunked: bool,
    seed: u64,
    length: u64,
    /// Pause between two pieces of the body.
    pause: Duration,
}

impl Ask {
    fn draw(is_site: bool, r: &mut SmallRng) -> Ask {
        let all = servers();
        let is_large = r.random_ratio(1, 4);
        Ask {
            server: (!is_site).then(|| all[r.random_range(0..all.len())]),
            is_upload: r.random_ratio(1, 4),
            is_chunked: r.random_ratio(1, 3),
            seed: r.random(),
            length: if is_large { r.random_range(200_000..5_000_000) } else { r.random_range(0..20_000) },
            pause: Duration::from_millis(if is_large { r.random_range(0..20) } else { 0 }),
        }
    }

    /// Sends the body.
    fn put_to(&self, wire: &mut Wire, r: &mut SmallRng) -> io::Result<u64> {
        let (method, framing) =
            (if self.is_upload { "PUT" } else { "GET" }, if self.is_chunked { "chunked" } else { "exact" });
        let path = format!("/{}/{}/{framing}", self.seed, self.length);
        let host = self.server.map_or("soak.example".into(), |server| server.to_string());
        let target = if self.server.is_some() { format!("http://{host}{path}") } else { path };
        let head = format!("{method} {target} HTTP/1.1\r\nHost: {host}\r\n");
        if self.is_upload {
            wire.send(head, self.seed, self.length, self.is_chunked, self.pause, r)?;
        } else {
            wire.stream.write_all(format!("{head}\r\n").as_bytes())?;
        }
        let head = wire.head(false)?.ok_or(ErrorKind::UnexpectedEof)?;
        match head.first().map(String::as_str) {
            Some(line) if line.starts_with("http/1.1 200") => {}
            Some(line) if line.starts_with("http/1.1 422") => return Err(wrong(format!("what was uploaded: {line}"))),
            Some(line) if line.starts_with("http/1.1 504") => return Err(ErrorKind::HostUnreachable.into()),
            line => return Err(io::Error::other(format!("{line:?}"))),
        }
        let (seed, length) = if self.is_upload { (0, 0) } else { (self.seed, self.length) };
        wire.expect(&head, seed, length, self.pause)?;
        Ok(self.length)
    }
}

fn accept(traffic: &Arc<Traffic>, listener: &TcpListener) {
    for stream in listener.incoming().map_while(Result::ok) {
        let traffic = traffic.clone();
        thread::spawn(move || {
            let mut r = SmallRng::seed_from_u64(1);
            let (began, what) = (Instant::now(), format!("at the server {:?}", stream.peer_addr()));
            // Interrupted requests are reported by their client.
            if keep_alive(&stream).is_ok()
                && let Ok(mut wire) = Wire::new(stream)
                && let Err(e) = serve(&traffic, &mut wire, &mut r)
                && matches!(e.kind(), ErrorKind::InvalidData | ErrorKind::TimedOut)
            {
                failed(&traffic, began, &format!("HTTP: {what}"), &e);
            }
        });
    }
}

/// Enables keep-alive, as servers with persistent connections do. The end of an idle
/// connection is sent only a few times, and is lost if the kernel has an outdated address
/// of the host. That may last for a minute, so the probes have to go on for longer.
pub fn keep_alive(stream: &TcpStream) -> nix::Result<()> {
    setsockopt(stream, sockopt::TcpKeepIdle, &20)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &5)?;
    setsockopt(stream, sockopt::TcpKeepCount, &20)?;
    setsockopt(stream, sockopt::KeepAlive, &true)
}

/// Serves requests until there are no more.
fn serve(traffic: &Traffic, wire: &mut Wire, r: &mut SmallRng) -> io::Result<()> {
    let _open = traffic.count();
    wire.patience = FORSAKEN;
    while let Some(head) = wire.head(true)? {
        let line = head.first().cloned().unwrap_or_default();
        let mut words = line.split([' ', '/']);
        let (method, mut rest) = (words.next(), words.by_ref().skip(1));
        let numbers = [rest.next(), rest.next()].map(|word| word.and_then(|word| word.parse::<u64>().ok()));
        let [Some(seed), Some(length)] = numbers else { return Err(wrong(format!("request {line:?}"))) };
        if method == Some("put") {
            let read = wire.expect(&head, seed, length, Duration::ZERO);
            let status = if read.is_ok() { "200 OK" } else { "422 Unprocessable Content" };
            wire.stream.write_all(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").as_bytes())?;
            read?;
        } else {
            let is_chunked = line.contains("chunked");
            wire.send("HTTP/1.1 200 OK\r\n".into(), seed, length, is_chunked, Duration::ZERO, r)?;
        }
    }
    Ok(())
}

/// A connection whose waits are limited in time.
struct Wire {
    stream: TcpStream,
    /// Time limit for each read.
    patience: Duration,
    /// Bytes read and not consumed yet.
    ahead: Vec<u8>,
    /// Bytes read in total.
    read: u64,
}

impl Wire {
    fn new(stream: TcpStream) -> io::Result<Wire> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(STEP))?;
        stream.set_write_timeout(Some(HANGS))?;
        Ok(Wire { stream, patience: HANGS, ahead: Vec::new(), read: 0 })
    }

    /// Reads more bytes; 0: end of stream. `may_rest`: without a time limit.
    fn more(&mut self, may_rest: bool) -> io::Result<usize> {
        let (began, mut buffer) = (Instant::now(), [0; PIECE]);
        loop {
            match self.stream.read(&mut buffer) {
                Ok(n) => {
                    self.ahead.extend_from_slice(&buffer[..n]);
                    self.read += n as u64;
                    return Ok(n);
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    if !may_rest && began.elapsed() > self.patience {
                        return Err(ErrorKind::TimedOut.into());
                    }
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Reads a line, and returns it without its end.
    fn line(&mut self, may_rest: bool) -> io::Result<Option<String>> {
        loop {
            if let Some(end) = self.ahead.windows(2).position(|two| two == b"\r\n") {
                let line = self.ahead.drain(..end + 2).take(end).collect();
                return String::from_utf8(line).map(Some).map_err(|e| wrong(e.to_string()));
            }
            if self.ahead.len() > PIECE {
                return Err(wrong("a line without an end"));
            }
            if self.more(may_rest && self.ahead.is_empty())? == 0 {
                return if self.ahead.is_empty() { Ok(None) } else { Err(ErrorKind::UnexpectedEof.into()) };
            }
        }
    }

    /// Reads the start line and fields, in lower case.
    fn head(&mut self, may_rest: bool) -> io::Result<Option<Vec<String>>> {
        let mut lines = Vec::new();
        loop {
            match self.line(may_rest && lines.is_empty())? {
                Some(line) if line.is_empty() => return Ok(Some(lines)),
                Some(line) => lines.push(line.to_ascii_lowercase()),
                None if lines.is_empty() => return Ok(None),
                None => return Err(ErrorKind::UnexpectedEof.into()),
            }
        }
    }

    /// Reads the body announced by the head, and compares it.
    fn expect(&mut self, head: &[String], seed: u64, length: u64, pause: Duration) -> io::Result<()> {
        let field = |name: &str| head.iter().find_map(|l| l.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
        let mut at = 0;
        if field("transfer-encoding") == Some("chunked") {
            loop {
                let line = self.line(false)?.ok_or(ErrorKind::UnexpectedEof)?;
                let n = u64::from_str_radix(&line, 16).map_err(|_| wrong(format!("chunk size {line:?}")))?;
                self.take(n, seed, &mut at, pause)?;
                let end = self.line(false)?.ok_or(ErrorKind::UnexpectedEof)?;
                if !end.is_empty() {
                    return Err(wrong(format!("{end:?} behind a chunk")));
                }
                if n == 0 {
                    break;
                }
            }
        } else {
            let n = field("content-length").and_then(|n| n.parse().ok()).ok_or_else(|| wrong(format!("{head:?}")))?;
            self.take(n, seed, &mut at, pause)?;
        }
        if at == length { Ok(()) } else { Err(wrong(format!("{at} bytes instead of {length}"))) }
    }

    fn take(&mut self, mut n: u64, seed: u64, at: &mut u64, pause: Duration) -> io::Result<()> {
        while n > 0 {
            if self.ahead.is_empty() {
                thread::sleep(pause);
                if self.more(false)? == 0 {
                    return Err(ErrorKind::UnexpectedEof.into());
                }
            }
            let len = n.min(self.ahead.len() as u64) as usize;
            pattern::check(seed, *at, &self.ahead[..len]).map_err(|mismatch| wrong(mismatch.to_string()))?;
            self.ahead.drain(..len);
            *at += len as u64;
            n -= len as u64;
        }
        Ok(())
    }

    /// Sends a head, given without its end, and a body.
    fn send(
        &mut self,
        mut head: String,
        seed: u64,
        length: u64,
        is_chunked: bool,
        pause: Duration,
        r: &mut SmallRng,
    ) -> io::Result<()> {
        head += &if is_chunked {
            "Transfer-Encoding: chunked\r\n\r\n".into()
        } else {
            format!("Content-Length: {length}\r\n\r\n")
        };
        let mut message = head.into_bytes();
        let mut at = 0;
        while at < length {
            let most = if is_chunked { *[10, 5000, PIECE].get(r.random_range(0..3)).unwrap_or(&1) } else { PIECE };
            let len = (length - at).min(r.random_range(1..=most as u64)) as usize;
            let mut piece = vec![0; len];
            pattern::fill(seed, at, &mut piece);
            if is_chunked {
                message.extend(format!("{len:x}\r\n").as_bytes());
            }
            message.extend(piece);
            if is_chunked {
                message.extend(b"\r\n");
            }
            at += len as u64;
            if message.len() >= PIECE {
                self.write(&message)?;
                message.clear();
                thread::sleep(pause);
            }
        }
        if is_chunked {
            message.extend(b"0\r\n\r\n");
        }
        self.write(&message)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let is_late = |e: io::Error| if e.kind() == ErrorKind::WouldBlock { ErrorKind::TimedOut.into() } else { e };
        self.stream.write_all(bytes).map_err(is_late)
    }
}
