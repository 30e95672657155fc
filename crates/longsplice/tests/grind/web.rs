//! HTTP: requests with bodies whose every byte is known, over connections that stay.

use super::{
    ends::{HANGS, connect, read_until, within},
    ledger::Ledger,
    ways::{self, PROXY, SITE, Sources, WEB},
};
use longsplice_lab::{
    Family, pattern,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{
    io::{self, ErrorKind},
    net::SocketAddr,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::sleep,
};

const PIECE: usize = 32 * 1024;

/// A connection, and how far it has come.
pub struct Visit {
    pub from: SocketAddr,
    pub began: Instant,
    /// When the last request was sent.
    pub asked: Instant,
    /// When the first reply was there.
    pub answered: Option<Instant>,
}

/// Opens a connection and sends its requests.
pub async fn visit(ledger: &Ledger, sources: &Sources, mut r: SmallRng) {
    let family = Family::BOTH[r.random_range(0..2)];
    let is_site = r.random();
    let proxy = FORWARDER_TO_CLIENT.port(family, if is_site { SITE } else { PROXY });
    let mut visit = Visit { from: sources.next(family), began: Instant::now(), asked: Instant::now(), answered: None };
    let mut wire = match connect(visit.from, proxy).await {
        Ok(stream) => Wire::of(stream),
        Err(error) => return ledger.not_connected(&visit, &error),
    };
    for n in 0..r.random_range(1..12) {
        let ask = Ask::draw(is_site, &mut r);
        visit.asked = Instant::now();
        match within(HANGS + ask.lasts(), ask.put_to(&mut wire, &mut r)).await {
            Ok(stays) => {
                visit.answered.get_or_insert_with(Instant::now);
                ledger.answered(&visit, &ask.path(), std::mem::take(&mut wire.read));
                if !stays {
                    return;
                }
            }
            Err(error) => return ledger.unanswered(&visit, &format!("{ask:?}, request {n}"), error.into()),
        }
        if !ledger.is_open() {
            return;
        }
        sleep(Duration::from_millis(r.random_range(0..600))).await;
    }
}

fn wrong(what: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what.into())
}

/// A request. Its path has all that the server has to know.
#[derive(Debug)]
struct Ask {
    server: Option<SocketAddr>,
    is_upload: bool,
    is_chunked: bool,
    seed: u64,
    length: u64,
    /// Between two pieces of the body.
    pause: Duration,
}

impl Ask {
    fn draw(is_site: bool, r: &mut SmallRng) -> Ask {
        let is_large = r.random_ratio(1, 5);
        Ask {
            server: (!is_site).then(|| SERVER.port(Family::BOTH[r.random_range(0..2)], WEB)),
            is_upload: r.random_ratio(1, 3),
            is_chunked: r.random_ratio(1, 3),
            seed: r.random(),
            length: if is_large { r.random_range(100_000..1_500_000) } else { r.random_range(0..20_000) },
            pause: Duration::from_millis(if is_large { r.random_range(0..100) } else { 0 }),
        }
    }

    /// The body of the reply.
    fn down(&self) -> u64 {
        if self.is_upload { 0 } else { self.length }
    }

    fn lasts(&self) -> Duration {
        self.pause * (self.length / 10).min(20_000) as u32 / 100
    }

    fn path(&self) -> String {
        let framing = if self.is_chunked { "chunked" } else { "exact" };
        format!("/{}/{}/{}/{framing}", self.seed, self.length, self.pause.as_millis())
    }

    /// Sends the request, and reads the reply. Returns whether the connection stays.
    async fn put_to(&self, wire: &mut Wire, r: &mut SmallRng) -> io::Result<bool> {
        let method = if self.is_upload { "PUT" } else { "GET" };
        let host = self.server.map_or("grind.example".into(), |server| server.to_string());
        let path = self.path();
        let target = if self.server.is_some() { format!("http://{host}{path}") } else { path };
        let head = format!("{method} {target} HTTP/1.1\r\nHost: {host}\r\n");
        if self.is_upload {
            wire.send(head, self.seed, self.length, (self.is_chunked, self.pause), r).await?;
        } else {
            wire.stream.write_all(format!("{head}\r\n").as_bytes()).await?;
        }
        let head = wire.head().await?.ok_or(ErrorKind::UnexpectedEof)?;
        match head.first().map(String::as_str) {
            Some(line) if line.starts_with("http/1.1 200") => {}
            Some(line) if line.starts_with("http/1.1 422") => return Err(wrong(format!("what was uploaded: {line}"))),
            line => return Err(io::Error::new(ErrorKind::ConnectionRefused, format!("{line:?}"))),
        }
        wire.expect(&head, self.seed, self.down()).await?;
        Ok(!head.iter().any(|line| line == "connection: close"))
    }
}

/// Serves requests until there are no more, or until the connection becomes something else.
pub async fn serve(ledger: &Ledger, stream: TcpStream) {
    let mut wire = Wire::of(stream);
    let mut r = SmallRng::seed_from_u64(1);
    loop {
        match exchange(ledger, &mut wire, &mut r).await {
            Ok(true) => {}
            Ok(false) => break,
            // its client tells the rest
            Err(error) => return ledger.broken_off(&error),
        }
    }
    let Wire { stream, ahead, .. } = wire;
    ways::answer(ledger, stream, ahead).await;
}

/// Serves one request. Returns whether there may be another one.
async fn exchange(ledger: &Ledger, wire: &mut Wire, r: &mut SmallRng) -> io::Result<bool> {
    let Some(head) = wire.head().await? else { return Err(ErrorKind::NotConnected.into()) };
    if head.iter().any(|line| line == "upgrade: grind") {
        let switched = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: grind\r\n\r\n";
        wire.stream.write_all(switched.as_bytes()).await?;
        return Ok(false);
    }
    let line = head.first().cloned().unwrap_or_default();
    let path = line.split(' ').nth(1).unwrap_or_default();
    let mut words = line.split([' ', '/']);
    let (method, mut rest) = (words.next(), words.by_ref().skip(1));
    let numbers = [0; 3].map(|_| rest.next().and_then(|word| word.parse::<u64>().ok()));
    let [Some(seed), Some(length), Some(pause)] = numbers else { return Err(wrong(format!("request {line:?}"))) };
    if method == Some("put") {
        let read = within(HANGS * 2, wire.expect(&head, seed, length)).await;
        let is_wrong = read.as_ref().is_err_and(|error| error.kind() == ErrorKind::InvalidData);
        if read.is_ok() || is_wrong {
            let status = if is_wrong { "422 Unprocessable Content" } else { "200 OK" };
            ledger.served(path, std::mem::take(&mut wire.read));
            let reply = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
            wire.stream.write_all(reply.as_bytes()).await?;
        }
        read?;
    } else {
        ledger.served(path, std::mem::take(&mut wire.read));
        let how = (line.contains("chunked"), Duration::from_millis(pause));
        wire.send("HTTP/1.1 200 OK\r\n".into(), seed, length, how, r).await?;
    }
    Ok(true)
}

struct Wire {
    stream: TcpStream,
    /// What was read and is not consumed.
    ahead: Vec<u8>,
    /// Bytes of the messages that were read.
    read: u64,
}

impl Wire {
    fn of(stream: TcpStream) -> Wire {
        Wire { stream, ahead: Vec::new(), read: 0 }
    }

    /// Reads start line and fields, in lower case. `None`: the end of the stream.
    async fn head(&mut self) -> io::Result<Option<Vec<String>>> {
        let ahead = std::mem::take(&mut self.ahead);
        if ahead.is_empty() && self.stream.read_buf(&mut self.ahead).await? == 0 {
            return Ok(None);
        }
        let got = if ahead.is_empty() { std::mem::take(&mut self.ahead) } else { ahead };
        let (head, rest) = read_until(&mut self.stream, got, b"\r\n\r\n").await?;
        self.ahead = rest;
        self.read += head.len() as u64;
        let head = String::from_utf8(head).map_err(|e| wrong(e.to_string()))?;
        Ok(Some(head.lines().map(str::to_ascii_lowercase).collect()))
    }

    async fn line(&mut self) -> io::Result<String> {
        let (line, rest) = read_until(&mut self.stream, std::mem::take(&mut self.ahead), b"\r\n").await?;
        self.ahead = rest;
        self.read += line.len() as u64;
        String::from_utf8(line).map(|line| line.trim_end().to_owned()).map_err(|e| wrong(e.to_string()))
    }

    /// Reads the body that the head announces, and compares it.
    async fn expect(&mut self, head: &[String], seed: u64, length: u64) -> io::Result<()> {
        let field = |name: &str| head.iter().find_map(|l| l.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
        let mut at = 0;
        if field("transfer-encoding") == Some("chunked") {
            loop {
                let line = self.line().await?;
                let n = u64::from_str_radix(&line, 16).map_err(|_| wrong(format!("chunk size {line:?}")))?;
                self.take(n, seed, &mut at).await?;
                let end = self.line().await?;
                if !end.is_empty() {
                    return Err(wrong(format!("{end:?} behind a chunk")));
                }
                if n == 0 {
                    break;
                }
            }
        } else {
            let n = field("content-length").and_then(|n| n.parse().ok()).ok_or_else(|| wrong(format!("{head:?}")))?;
            self.take(n, seed, &mut at).await?;
        }
        if at == length { Ok(()) } else { Err(wrong(format!("{at} bytes instead of {length}"))) }
    }

    async fn take(&mut self, mut n: u64, seed: u64, at: &mut u64) -> io::Result<()> {
        while n > 0 {
            if self.ahead.is_empty() && self.stream.read_buf(&mut self.ahead).await? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            let len = n.min(self.ahead.len() as u64) as usize;
            pattern::check(seed, *at, &self.ahead[..len]).map_err(|mismatch| wrong(mismatch.to_string()))?;
            self.ahead.drain(..len);
            self.read += len as u64;
            *at += len as u64;
            n -= len as u64;
        }
        Ok(())
    }

    /// Sends a head, given without its end, and a body.
    async fn send(
        &mut self,
        mut head: String,
        seed: u64,
        length: u64,
        (is_chunked, pause): (bool, Duration),
        r: &mut SmallRng,
    ) -> io::Result<()> {
        head += &match is_chunked {
            true => "Transfer-Encoding: chunked\r\n\r\n".into(),
            false => format!("Content-Length: {length}\r\n\r\n"),
        };
        let (mut message, mut at) = (head.into_bytes(), 0);
        while at < length {
            let most = if is_chunked { [1000, 5000, PIECE][r.random_range(0..3)] } else { PIECE };
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
                self.stream.write_all(&message).await?;
                message.clear();
                sleep(pause).await;
            }
        }
        if is_chunked {
            message.extend(b"0\r\n\r\n");
        }
        self.stream.write_all(&message).await
    }
}
