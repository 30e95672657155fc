//! Both ends of HTTP transfers: a client and a server that speak HTTP/1.1, whatever is between them. A plug and a SOCKS
//! connection carry one request each. Every byte of a body is checked ([`pattern`], with the length as the seed), or with
//! [`Client::quickly`] some bytes of each read.

use super::{network::Acceptor, venue};
use longsplice_datapath::{SenderFacts, sender_facts};
use longsplice_lab::{
    pattern,
    traffic::{Script, connect, socks5_connect},
};
use nix::sys::socket::{setsockopt, sockopt::TcpCongestion};
use std::{
    collections::HashMap,
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex, MutexGuard},
    thread,
    time::{Duration, Instant},
};

/// Bytes per write and read over a long path.
const BLOCK: usize = 64 << 10;
/// Bytes per read of a client that requests as fast as it can: wrk reads 8 KB, and would cost more than what is measured.
const LARGE: usize = 256 << 10;
/// Bytes that such a client compares at each end of a read.
const LOOK: usize = 32;
/// Maximum length of a head.
const HEAD: u64 = 4 << 10;
/// Time limit of a transfer: one that takes longer counts as having taken this long.
pub const LIMIT: Duration = Duration::from_secs(20);

/// A server with a thread for each connection, which answers requests until it is dropped.
pub struct Server {
    listeners: Vec<TcpListener>,
    shared: Arc<Mutex<Served>>,
    _acceptors: Vec<Acceptor>,
}

/// What the threads of a server share.
#[derive(Default)]
struct Served {
    connections: u64,
    live: HashMap<u64, TcpStream>,
    /// Sum over the connections that have ended.
    ended: SenderFacts,
    /// When the last byte of the last upload arrived.
    uploaded: Option<Instant>,
}

fn lock(shared: &Mutex<Served>) -> MutexGuard<'_, Served> {
    shared.lock().expect("no panic under this lock")
}

impl Server {
    /// Serves on these non-blocking listeners.
    pub fn start(listeners: Vec<TcpListener>) -> io::Result<Server> {
        let shared = Arc::<Mutex<Served>>::default();
        let acceptor = |listener: &TcpListener| {
            let shared = shared.clone();
            Ok(Acceptor::start(listener.try_clone()?, true, move |stream| attend(stream, &shared)))
        };
        let _acceptors = listeners.iter().map(acceptor).collect::<io::Result<_>>()?;
        Ok(Server { listeners, shared, _acceptors })
    }

    /// Sets the congestion control of connections that are accepted from now on.
    pub fn set_congestion(&self, congestion: &'static str) -> io::Result<()> {
        let set = |listener| Ok(setsockopt(listener, TcpCongestion, &congestion.into())?);
        self.listeners.iter().try_for_each(set)
    }

    /// Closes all connections: later ones have the congestion control of their time. Returns whether there were any.
    pub fn hang_up(&self) -> bool {
        let shared = lock(&self.shared);
        for stream in shared.live.values() {
            // The client may have been faster.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        !shared.live.is_empty()
    }

    /// What its kernel has counted for all connections so far.
    pub fn facts(&self) -> SenderFacts {
        let shared = lock(&self.shared);
        let live = shared.live.values().filter_map(|stream| sender_facts(stream).ok());
        live.fold(shared.ended, plus)
    }

    /// When the last byte of the last upload arrived.
    pub fn uploaded(&self) -> Option<Instant> {
        lock(&self.shared).uploaded
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.hang_up();
    }
}

/// What was counted since then.
pub fn minus(after: SenderFacts, before: SenderFacts) -> SenderFacts {
    SenderFacts {
        retransmitted: after.retransmitted.saturating_sub(before.retransmitted),
        timeouts: after.timeouts.saturating_sub(before.timeouts),
    }
}

fn plus(a: SenderFacts, b: SenderFacts) -> SenderFacts {
    SenderFacts { retransmitted: a.retransmitted + b.retransmitted, timeouts: a.timeouts + b.timeouts }
}

/// Serves a connection, which is counted meanwhile and afterwards.
fn attend(stream: TcpStream, shared: &Mutex<Served>) -> io::Result<()> {
    let (other, served) = (stream.try_clone()?, stream.try_clone()?);
    let number = {
        let mut shared = lock(shared);
        shared.connections += 1;
        let number = shared.connections;
        shared.live.insert(number, other);
        number
    };
    let done = serve(served, shared);
    let mut shared = lock(shared);
    shared.live.remove(&number);
    shared.ended = plus(shared.ended, sender_facts(&stream).unwrap_or_default());
    done
}

/// Answers requests until the client ends the connection.
fn serve(stream: TcpStream, shared: &Mutex<Served>) -> io::Result<()> {
    let mut peer = Peer::new(stream)?;
    while let Some(head) = peer.head()? {
        if let Some(path) = head.strip_prefix("GET /") {
            let size = path.split(' ').next().and_then(|n| n.parse().ok()).ok_or_else(|| wrong("no size"))?;
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n");
            peer.send(&head, size)?;
        } else {
            let size = content_length(&head)?;
            peer.receive(size, 0, size)?;
            lock(shared).uploaded = Some(Instant::now());
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 0)?;
        }
    }
    Ok(())
}

/// A client's connection.
pub struct Client {
    peer: Peer,
    host: SocketAddr,
}

impl Client {
    /// Connects over a short path, directly or to a reverse proxy.
    pub fn near(host: SocketAddr) -> io::Result<Client> {
        let stream = venue::connect(host)?;
        Ok(Client { peer: Peer::reading(stream, LARGE), host })
    }

    /// From now on, only some bytes of each read are compared.
    pub fn quickly(&mut self) {
        self.peer.look = LOOK;
    }

    /// Connects within [`LIMIT`]. Must be called in the client's namespace. With a SOCKS proxy at
    /// `to`, `target` is the address to ask for. A proxy's server may be slow to connect to, and its answer is awaited.
    pub fn connect(to: SocketAddr, target: Option<SocketAddr>, congestion: &'static str) -> io::Result<Client> {
        let script = Script { congestion: Some(congestion), ..Script::opener(1).deadline(LIMIT) };
        let stream = match target {
            Some(target) => socks5_connect(to, target, &script)?,
            None => connect(to, &script)?,
        };
        Ok(Client { peer: Peer::new(stream)?, host: to })
    }

    /// Transfers an object. Returns when its last byte has arrived, for an upload as far as the client can tell, or `None` if
    /// it has not by the deadline; then the connection is of no further use.
    pub fn transfer(&mut self, up: bool, size: u64, deadline: Instant) -> io::Result<Option<Instant>> {
        self.peer.from.get_mut().deadline = Some(deadline);
        match if up { self.put(size) } else { self.get(size) } {
            Err(e) if Instant::now() >= deadline && is_timeout(&e) => Ok(None),
            other => other.map(|()| Some(Instant::now())),
        }
    }

    /// Requests the object of this size, and checks it.
    pub fn get(&mut self, size: u64) -> io::Result<()> {
        let head = format!("GET /{size} HTTP/1.1\r\nHost: {}\r\n\r\n", self.host);
        self.peer.send(&head, 0)?;
        self.reply(size)?;
        self.peer.receive(size, 0, size).map(drop)
    }

    fn put(&mut self, size: u64) -> io::Result<()> {
        let head = format!("PUT / HTTP/1.1\r\nHost: {}\r\nContent-Length: {size}\r\n\r\n", self.host);
        self.peer.send(&head, size)?;
        self.reply(0)
    }

    /// Reads the head of a reply with a body of this size.
    fn reply(&mut self, size: u64) -> io::Result<()> {
        let head = self.peer.head()?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let right = head.starts_with("HTTP/1.1 200 ") && content_length(&head)? == size;
        if right { Ok(()) } else { Err(wrong(&head)) }
    }

    /// The same as a download, but the client reads no more than this many bytes per second.
    pub fn read_slowly(&mut self, size: u64, per_second: u64) -> io::Result<()> {
        const STEP: Duration = Duration::from_millis(50);
        let head = format!("GET /{size} HTTP/1.1\r\nHost: {}\r\n\r\n", self.host);
        self.peer.send(&head, 0)?;
        self.reply(size)?;
        let (began, mut at) = (Instant::now(), 0);
        while at < size {
            let due = (began.elapsed().as_secs_f64() * per_second as f64) as u64;
            let most = due.min(size).saturating_sub(at);
            if most == 0 {
                thread::sleep(STEP);
            }
            at = self.peer.receive(size, at, at + most)?;
        }
        Ok(())
    }

    /// What the kernel has counted for this connection.
    pub fn facts(&self) -> SenderFacts {
        sender_facts(&self.peer.from.get_ref().stream).unwrap_or_default()
    }
}

fn wrong(what: &str) -> io::Error {
    io::Error::other(format!("not the reply: {what}"))
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// The number in a head; 0 without one.
fn content_length(head: &str) -> io::Result<u64> {
    let value = |line: &str| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())
    };
    match head.lines().find_map(value) {
        None => Ok(0),
        Some(length) => length.ok_or_else(|| wrong(head)),
    }
}

/// A connection.
struct Peer {
    from: BufReader<Timed>,
    /// Number of bytes compared at each end of a read.
    look: usize,
}

/// A socket whose calls end by a deadline.
struct Timed {
    stream: TcpStream,
    deadline: Option<Instant>,
}

impl Peer {
    /// Over a long path.
    fn new(stream: TcpStream) -> io::Result<Peer> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(3 * LIMIT))?;
        stream.set_write_timeout(Some(3 * LIMIT))?;
        Ok(Peer::reading(stream, BLOCK))
    }

    fn reading(stream: TcpStream, block: usize) -> Peer {
        Peer { from: BufReader::with_capacity(block, Timed { stream, deadline: None }), look: usize::MAX }
    }

    /// Reads a head; `None` if the connection has ended before it.
    fn head(&mut self) -> io::Result<Option<String>> {
        let mut head = String::new();
        loop {
            match self.from.by_ref().take(HEAD).read_line(&mut head)? {
                0 if head.is_empty() => return Ok(None),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                _ if head.ends_with("\r\n\r\n") => return Ok(Some(head)),
                _ if head.len() as u64 > HEAD => return Err(wrong("a head without an end")),
                _ => {}
            }
        }
    }

    /// Reads and checks the bytes of a body from `at` to `until`. Returns the position.
    fn receive(&mut self, size: u64, mut at: u64, until: u64) -> io::Result<u64> {
        while at < until {
            let part = self.from.fill_buf()?;
            if part.is_empty() {
                return Err(io::Error::other(format!("{at} of {size} bytes arrived")));
            }
            let part = &part[..part.len().min(usize::try_from(until - at).unwrap_or(usize::MAX))];
            let edge = self.look.min(part.len());
            let tail = (part.len() - edge).max(edge);
            for (offset, some) in [(0, &part[..edge]), (tail, &part[tail..])] {
                pattern::check(size, at + offset as u64, some).map_err(|m| io::Error::other(m.to_string()))?;
            }
            let n = part.len();
            self.from.consume(n);
            at += n as u64;
        }
        Ok(at)
    }

    /// Sends a head and a body of this size.
    fn send(&mut self, head: &str, size: u64) -> io::Result<()> {
        let Timed { stream, deadline } = self.from.get_mut();
        let mut out = head.as_bytes().to_vec();
        let mut at = 0;
        loop {
            limit(*deadline, |left| stream.set_write_timeout(left))?;
            stream.write_all(&out)?;
            let n = (size - at).min(BLOCK as u64);
            if n == 0 {
                return Ok(());
            }
            out.resize(n as usize, 0);
            pattern::fill(size, at, &mut out);
            at += n;
        }
    }
}

impl Read for Timed {
    fn read(&mut self, block: &mut [u8]) -> io::Result<usize> {
        limit(self.deadline, |left| self.stream.set_read_timeout(left))?;
        self.stream.read(block)
    }
}

/// Limits the next call to the time that is left.
fn limit(deadline: Option<Instant>, set: impl FnOnce(Option<Duration>) -> io::Result<()>) -> io::Result<()> {
    match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
        None => Ok(()),
        Some(Duration::ZERO) => Err(io::ErrorKind::TimedOut.into()),
        left => set(left),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_a_body() {
        assert_eq!(content_length("HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n").unwrap(), 12);
        assert_eq!(content_length("HTTP/1.1 200 OK\r\n\r\n").unwrap(), 0);
        assert!(content_length("PUT / HTTP/1.1\r\nContent-Length: x\r\n\r\n").is_err());
    }

    #[test]
    fn objects_arrive_in_both_directions() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let at = listener.local_addr().unwrap();
        let server = Server::start(vec![listener]).unwrap();
        server.set_congestion("reno").unwrap();
        let mut client = Client::connect(at, None, "reno").unwrap();
        let deadline = Instant::now() + LIMIT;
        for size in [1, 1000, 300_001] {
            assert!(client.transfer(false, size, deadline).unwrap().is_some());
            assert!(client.transfer(true, size, deadline).unwrap().unwrap() >= server.uploaded().unwrap());
        }
        client.read_slowly(100_000, 10_000_000).unwrap();
        assert_eq!(client.transfer(false, 1, Instant::now()).unwrap(), None, "too late");
        assert_eq!(server.facts().timeouts, 0);
        let mut quick = Client::near(at).unwrap();
        for size in [0, 1, 63, 64, 65, 1_000_000] {
            quick.get(size).unwrap();
            quick.quickly();
        }
        assert!(quick.put(10).is_ok() && quick.get(10).is_ok());
    }
}
