//! Requests over persistent connections, each of which has the next when the last reply has come.
//!
//! A client of our own, since it reads 256 KB at a time: wrk reads 8 KB, and would cost more than what is measured. Every
//! reply's length is checked, and some bytes of each read; the first reply of each connection, which does not count, whole.

use super::{
    Result,
    machine::{Cost, Watch},
    site::Site,
    venue::PATIENCE,
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
/// Of each read, so many are compared at either end.
const LOOK: usize = 32;
/// A longer head is none of the origin's.
const HEAD: usize = 4 << 10;

/// Requests that were answered, and what they have cost.
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

/// A client's connection.
pub struct Asker {
    stream: TcpStream,
    to: SocketAddr,
    block: Vec<u8>,
}

impl Asker {
    /// To a site, or to a server itself.
    pub fn connect(to: SocketAddr) -> io::Result<Asker> {
        let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Asker { stream, to, block: vec![0; BLOCK] })
    }

    /// A request for the file of so many bytes, and the reply, of which so many bytes at either end of each read are compared.
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
