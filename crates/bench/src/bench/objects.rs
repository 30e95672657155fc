//! Objects of a given size, each fetched over a connection of its own: the client sends eight bytes, and the server answers
//! with the number of bytes they contain. Connection set-up is included.

use super::{
    Result,
    machine::{Cost, together},
    network::{Acceptor, PATIENCE},
    venue::{Dialler, Near},
};
use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// Bytes per write and read.
const BLOCK: usize = 256 << 10;

/// The plan of a measurement.
#[derive(Clone, Copy)]
pub struct Plan {
    /// Size of each object in bytes.
    pub bytes: u64,
    /// Number of simultaneous clients.
    pub clients: usize,
    /// No fetch starts after this time.
    pub length: Duration,
    /// Maximum number of fetches, since ended flows stay in the tables for a minute.
    pub most: usize,
}

/// The result.
pub struct Fetched {
    /// Time of each fetch.
    pub times: Vec<Time>,
    /// Cost of all fetches.
    pub cost: Cost,
}

/// Seconds until the last byte of an object has arrived.
#[derive(Clone, Copy, Debug)]
pub struct Time {
    /// From connecting on.
    pub connect: f64,
    /// From the request on, which follows the connection and SOCKS's handshake.
    pub request: f64,
}

/// Fetches objects. Every client fetches once before the measurement, and at least once during it.
pub fn fetch(venue: &Near, plan: Plan) -> Result<Fetched> {
    let _server = Acceptor::start(venue.listener()?, plan.clients > 1, serve);
    let (dialler, begun) = (venue.dialler(), Arc::new(AtomicUsize::new(0)));
    let first = move |_| {
        let mut block = vec![0; BLOCK];
        one(&dialler, plan.bytes, &mut block).map(|_| (dialler.clone(), block))
    };
    let all = move |(dialler, mut block): (Dialler, Vec<u8>)| {
        let end = Instant::now() + plan.length;
        let mut times = vec![];
        while times.is_empty() || (begun.fetch_add(1, Relaxed) < plan.most && Instant::now() < end) {
            times.push(one(&dialler, plan.bytes, &mut block)?);
        }
        Ok(times)
    };
    let (times, cost) = together(&venue.lab.client, plan.clients, first, all)?;
    Ok(Fetched { times: times.concat(), cost })
}

fn one(dialler: &Dialler, bytes: u64, block: &mut [u8]) -> io::Result<Time> {
    let connect = Instant::now();
    let mut stream = dialler.dial()?;
    let request = Instant::now();
    stream.write_all(&bytes.to_be_bytes())?;
    let mut received = 0;
    loop {
        match stream.read(block)? {
            0 if received == bytes => {
                let [connect, request] = [connect, request].map(|began| began.elapsed().as_secs_f64());
                return Ok(Time { connect, request });
            }
            0 => return Err(io::Error::other(format!("{received} of {bytes} bytes arrived"))),
            n => received += n as u64,
        }
    }
}

/// Sends as many bytes as requested.
fn serve(mut stream: TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut size = [0; 8];
    stream.read_exact(&mut size)?;
    let mut left = u64::from_be_bytes(size);
    let block = vec![0x55; BLOCK.min(left as usize)];
    while left > 0 {
        let n = left.min(BLOCK as u64);
        stream.write_all(&block[..n as usize])?;
        left -= n;
    }
    stream.shutdown(Shutdown::Write)?;
    // Wait until the client has closed, so that no reset overtakes the end of the stream.
    stream.read(&mut size).map(drop)
}
