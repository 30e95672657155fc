//! Both ends of HTTP transfers: a client and a server that speak HTTP/1.1, whatever is between them. A plug and a SOCKS
//! connection carry one request each. Every byte of a body is checked ([`pattern`], with the length as the seed), or with
//! [`Client::quickly`] some bytes of each read.

use super::{network, venue};
use crate::cell::{Congestion, Direction};
use longsplice_datapath::{SenderFacts, sender_facts};
use longsplice_lab::{
    pattern,
    traffic::{Script, connect, socks5_connect},
};
use nix::sys::socket::{setsockopt, sockopt::TcpCongestion};
use std::{
    collections::HashMap,
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
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
const HEAD: usize = 4 << 10;
/// Time limit of a transfer: one that takes longer counts as having taken this long.
pub const LIMIT: Duration = Duration::from_secs(20);

/// A server with a thread for each connection, which answers requests until it is dropped.
pub struct Server {
    listeners: Vec<TcpListener>,
    stop: Arc<AtomicBool>,
    shared: Arc<Mutex<Served>>,
    threads: Vec<thread::JoinHandle<()>>,
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
        let (stop, shared) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let mut threads = Vec::new();
        for listener in &listeners {
            let (listener, stop, shared) = (listener.try_clone()?, stop.clone(), Arc::clone(&shared));
            threads.push(thread::spawn(move || accept_all(&listener, &stop, &shared)));
        }
        Ok(Server { listeners, stop, shared, threads })
    }

    /// Sets the congestion control of connections that are accepted from now on.
    pub fn set_congestion(&self, congestion: Congestion) -> io::Result<()> {
        let set = |listener| Ok(setsockopt(listener, TcpCongestion, &congestion.name().into())?);
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
        self.stop.store(true, Relaxed);
        self.hang_up();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
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

fn accept_all(listener: &TcpListener, stop: &AtomicBool, shared: &Arc<Mutex<Served>>) {
    const LOOK: Duration = Duration::from_millis(50);
    while !stop.load(Relaxed) {
        // Errors are noticed by the client.
        let Ok(Some(stream)) = network::accept(listener, LOOK) else { continue };
        let shared = Arc::clone(shared);
        thread::spawn(move || {
            let (Ok(other), Ok(served)) = (stream.try_clone(), stream.try_clone()) else { return };
            let number = {
                let mut shared = lock(&shared);
                shared.connections += 1;
                let number = shared.connections;
                shared.live.insert(number, other);
                number
            };
            let _ = serve(served, &shared);
            let mut shared = lock(&shared);
            shared.live.remove(&number);
            shared.ended = plus(shared.ended, sender_facts(&stream).unwrap_or_default());
        });
    }
}

/// Answers requests until the client ends the connection.
fn serve(stream: TcpStream, shared: &Mutex<Served>) -> io::Result<()> {
    let mut peer = Peer::new(stream, BLOCK)?;
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
        Ok(Client {
            peer: Peer { stream, block: vec![0; LARGE], from: 0, until: 0, look: usize::MAX, deadline: None },
            host,
        })
    }

    /// From now on, only some bytes of each read are compared.
    pub fn quickly(&mut self) {
        self.peer.look = LOOK;
    }

    /// Connects within [`LIMIT`]. Must be called in the client's namespace. With a SOCKS proxy at
    /// `to`, `target` is the address to ask for. A proxy's server may be slow to connect to, and its answer is awaited.
    pub fn connect(to: SocketAddr, target: Option<SocketAddr>, congestion: Congestion) -> io::Result<Client> {
        let script = Script { congestion: Some(congestion.name()), ..Script::opener(1).deadline(LIMIT) };
        let stream = match target {
            Some(target) => socks5_connect(to, target, &script)?,
            None => connect(to, &script)?,
        };
        Ok(Client { peer: Peer::new(stream, BLOCK)?, host: to })
    }

    /// Transfers an object. Returns when its last byte has arrived, for an upload as far as the client can tell, or `None` if
    /// it has not by the deadline; then the connection is of no further use.
    pub fn transfer(&mut self, direction: Direction, size: u64, deadline: Instant) -> io::Result<Option<Instant>> {
        self.peer.deadline = Some(deadline);
        let done = match direction {
            Direction::Down => self.get(size),
            Direction::Up => self.put(size),
        };
        match done {
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
        sender_facts(&self.peer.stream).unwrap_or_default()
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

/// A connection, with the bytes that were read and not used yet: those of the block in `from..until`.
struct Peer {
    stream: TcpStream,
    block: Vec<u8>,
    from: usize,
    until: usize,
    /// Number of bytes compared at each end of a read.
    look: usize,
    deadline: Option<Instant>,
}

impl Peer {
    /// Over a long path.
    fn new(stream: TcpStream, block: usize) -> io::Result<Peer> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(3 * LIMIT))?;
        stream.set_write_timeout(Some(3 * LIMIT))?;
        Ok(Peer { stream, block: vec![0; block], from: 0, until: 0, look: usize::MAX, deadline: None })
    }

    /// Reads a head; `None` if the connection has ended before it.
    fn head(&mut self) -> io::Result<Option<String>> {
        const END: &[u8] = b"\r\n\r\n";
        loop {
            let filled = &self.block[self.from..self.until];
            if let Some(at) = filled.windows(END.len()).position(|w| w == END) {
                let end = at + END.len();
                let head = String::from_utf8_lossy(&filled[..end]).into_owned();
                self.from += end;
                return Ok(Some(head));
            }
            if filled.len() > HEAD {
                return Err(wrong("a head without an end"));
            }
            let empty = filled.is_empty();
            match self.read(usize::MAX)? {
                0 if empty => return Ok(None),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                _ => {}
            }
        }
    }

    /// Reads and checks the bytes of a body from `at` to `until`. Returns the position.
    fn receive(&mut self, size: u64, mut at: u64, until: u64) -> io::Result<u64> {
        while at < until {
            let most = usize::try_from(until - at).unwrap_or(usize::MAX);
            if self.from == self.until && self.read(most)? == 0 {
                return Err(io::Error::other(format!("{at} of {size} bytes arrived")));
            }
            let part = &self.block[self.from..self.until.min(self.from.saturating_add(most))];
            let edge = self.look.min(part.len());
            let tail = (part.len() - edge).max(edge);
            for (offset, some) in [(0, &part[..edge]), (tail, &part[tail..])] {
                pattern::check(size, at + offset as u64, some).map_err(|m| io::Error::other(m.to_string()))?;
            }
            self.from += part.len();
            at += part.len() as u64;
        }
        Ok(at)
    }

    /// Sends a head and a body of this size.
    fn send(&mut self, head: &str, size: u64) -> io::Result<()> {
        let mut out = head.as_bytes().to_vec();
        let mut at = 0;
        loop {
            self.limit(TcpStream::set_write_timeout)?;
            self.stream.write_all(&out)?;
            let n = (size - at).min(BLOCK as u64);
            if n == 0 {
                return Ok(());
            }
            out.resize(n as usize, 0);
            pattern::fill(size, at, &mut out);
            at += n;
        }
    }

    /// Reads at most so many bytes, as far as the block has room.
    fn read(&mut self, most: usize) -> io::Result<usize> {
        self.limit(TcpStream::set_read_timeout)?;
        if self.from == self.until {
            (self.from, self.until) = (0, 0);
        }
        if self.until == self.block.len() {
            self.block.copy_within(self.from.., 0);
            (self.from, self.until) = (0, self.until - self.from);
        }
        let end = self.block.len().min(self.until.saturating_add(most));
        let n = self.stream.read(&mut self.block[self.until..end])?;
        self.until += n;
        Ok(n)
    }

    /// Limits the next call to the time that is left.
    fn limit(&self, set: fn(&TcpStream, Option<Duration>) -> io::Result<()>) -> io::Result<()> {
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        match left {
            None => Ok(()),
            Some(Duration::ZERO) => Err(io::ErrorKind::TimedOut.into()),
            left => set(&self.stream, left),
        }
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
        server.set_congestion(Congestion::Reno).unwrap();
        let mut client = Client::connect(at, None, Congestion::Reno).unwrap();
        let deadline = Instant::now() + LIMIT;
        for size in [1, 1000, 300_001] {
            assert!(client.transfer(Direction::Down, size, deadline).unwrap().is_some());
            assert!(client.transfer(Direction::Up, size, deadline).unwrap().unwrap() >= server.uploaded().unwrap());
        }
        client.read_slowly(100_000, 10_000_000).unwrap();
        assert_eq!(client.transfer(Direction::Down, 1, Instant::now()).unwrap(), None, "too late");
        assert_eq!(server.facts().timeouts, 0);
        let mut quick = Client::near(at).unwrap();
        for size in [0, 1, 63, 64, 65, 1_000_000] {
            quick.get(size).unwrap();
            quick.quickly();
        }
        assert!(quick.put(10).is_ok() && quick.get(10).is_ok());
    }
}
