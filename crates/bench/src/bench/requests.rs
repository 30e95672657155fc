//! Requests over persistent connections. Each connection sends the next request once the last reply is complete.
//!
//! The bench uses a client of its own, which reads 256 KB at a time: wrk reads 8 KB, and would
//! cost more than what is measured. The length of every reply is checked, and some bytes of
//! each read; the first reply of each connection, which does not count, is checked completely.

use super::{
    Result,
    machine::{Cost, Watch},
    network::PATIENCE,
    site::Site,
};
use longsplice_lab::pattern;
use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{Arc, Barrier},
    thread,
    time::{Duration, Instant},
};

/// Bytes per read.
const BLOCK: usize = 256 << 10;
/// Bytes compared at each end of a read.
const LOOK: usize = 32;
/// Maximum length of a head; the origin's are shorter.
const HEAD: usize = 4 << 10;

/// Returns the number of answered requests, and their cost.
pub fn ask(site: &Site, bytes: u64, connections: usize, length: Duration) -> Result<(f64, Cost)> {
    let ready = Arc::new(Barrier::new(connections + 1));
    let client = |number: usize| {
        let (ready, to) = (ready.clone(), site.address(number));
        site.lab.client.spawn(move || {
            let first = Asker::connect(to).and_then(|mut asker| asker.ask(bytes, usize::MAX).map(|()| asker));
            ready.wait();
            ready.wait();
            let (mut asker, end, mut count) = (first?, Instant::now() + length, 0);
            while count == 0 || Instant::now() < end {
                asker.ask(bytes, LOOK)?;
                count += 1;
            }
            Ok::<u32, io::Error>(count)
        })
    };
    let clients: Vec<thread::JoinHandle<_>> = (0..connections).map(client).collect();
    ready.wait();
    let watch = Watch::start();
    ready.wait();
    let counts = clients.into_iter().map(|c| c.join().map_err(|_| io::Error::other("a client panicked"))?);
    let count: u32 = counts.collect::<io::Result<Vec<u32>>>()?.into_iter().sum();
    Ok((f64::from(count), watch.stop()))
}

/// A connection of the client.
pub struct Asker {
    stream: TcpStream,
    to: SocketAddr,
    block: Vec<u8>,
}

impl Asker {
    /// Connects to a site, or directly to a server.
    pub fn connect(to: SocketAddr) -> io::Result<Asker> {
        let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Asker { stream, to, block: vec![0; BLOCK] })
    }

    /// Requests the file of `length` bytes, and compares `look` bytes at each end of every read of the reply.
    pub fn ask(&mut self, length: u64, look: usize) -> io::Result<()> {
        let request = format!("GET /{length} HTTP/1.1\r\nHost: {}\r\n\r\n", self.to);
        self.stream.write_all(request.as_bytes())?;
        let wrong = |what: String| io::Error::other(what);
        let (mut filled, body) = (0, b"\r\n\r\n");
        let start = loop {
            filled += self.read(filled)?;
            if let Some(end) = self.block[..filled].windows(body.len()).position(|w| w == body) {
                break end + body.len();
            }
            if filled > HEAD {
                return Err(wrong("a head without an end".into()));
            }
        };
        let head = String::from_utf8_lossy(&self.block[..start]).to_ascii_lowercase();
        if !head.starts_with("http/1.1 200 ") || !head.contains(&format!("content-length: {length}\r\n")) {
            return Err(wrong(format!("not the reply: {head}")));
        }
        let (mut at, mut part) = (0, start..filled);
        loop {
            let bytes = &self.block[part];
            let end = at + bytes.len() as u64;
            let edge = look.min(bytes.len());
            let tail = bytes.len() - edge;
            for (at, some) in [(at, &bytes[..edge]), (at + tail as u64, &bytes[tail..])] {
                pattern::check(length, at, some).map_err(|m| wrong(m.to_string()))?;
            }
            at = end;
            if at >= length {
                break;
            }
            part = 0..self.read(0)?;
        }
        if at == length { Ok(()) } else { Err(wrong(format!("{at} bytes instead of {length}"))) }
    }

    fn read(&mut self, from: usize) -> io::Result<usize> {
        match self.stream.read(&mut self.block[from..])? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            n => Ok(n),
        }
    }
}
