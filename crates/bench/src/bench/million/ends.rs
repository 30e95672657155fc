//! What client and server do with their ends of a million connections. Every wait has a time limit.

use super::{
    super::{Result, network::PATIENCE, segment::on_one_cpu},
    random,
    venue::{PER_CLIENT, PER_SERVER, client_address, front},
};
use nix::{
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket, sockopt},
        time::{TimeVal, TimeValLike},
    },
};
use std::{
    collections::VecDeque,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    ops::Range,
    os::fd::{AsFd, AsRawFd},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

/// The first port of a client address.
const FIRST_PORT: u16 = 10_000;
/// Connections that may wait in the server's accept queue: the kernel's default limit.
pub const BACKLOG: i32 = 4096;
/// Connections by which the client may be ahead of the server: few enough
/// that no SYN is dropped, since a retransmission would take seconds.
const AHEAD: usize = 1000;
/// Connections accepted and not yet read from.
const PENDING: usize = 256;
/// Bytes of a round trip.
const BLOCK: usize = 64;

/// Sets a time limit for reads, and makes close send a reset: closing
/// a million connections in order would take as long as opening them.
pub fn endure(s: &impl AsFd) -> Result<()> {
    setsockopt(s, sockopt::ReceiveTimeout, &TimeVal::seconds(PATIENCE.as_secs() as i64))?;
    setsockopt(s, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 })?;
    Ok(())
}

fn block(k: usize) -> [u8; BLOCK] {
    let mut state = k as u64;
    let mut block = [0; BLOCK];
    for word in block.chunks_exact_mut(8) {
        word.copy_from_slice(&random(&mut state).to_ne_bytes());
    }
    block
}

/// Reads data that must be there.
fn expect(mut from: &TcpStream, k: usize) -> Result<()> {
    let mut got = [0; BLOCK];
    from.read_exact(&mut got).map_err(|e| format!("connection {k}: {e}"))?;
    if got == block(k) { Ok(()) } else { Err(format!("connection {k} has other bytes than were sent").into()) }
}

/// The client's ends.
pub struct Clients {
    pub base: usize,
    pub ends: Vec<TcpStream>,
    pub opened: Arc<AtomicUsize>,
}

impl Clients {
    pub fn open(&mut self, range: Range<usize>) -> Result<()> {
        for k in range {
            let mut progress = (self.opened.load(Relaxed), Instant::now());
            while k > self.opened.load(Relaxed) + AHEAD {
                thread::sleep(Duration::from_millis(1));
                if progress.0 != self.opened.load(Relaxed) {
                    progress = (self.opened.load(Relaxed), Instant::now());
                } else if progress.1.elapsed() > PATIENCE {
                    return Err(
                        format!("nothing arrives at the server any more, after {} connections", progress.0).into()
                    );
                }
            }
            let local = SocketAddr::new(client_address(k / PER_CLIENT), FIRST_PORT + (k % PER_CLIENT) as u16);
            let s = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
            endure(&s)?;
            bind(s.as_raw_fd(), &SockaddrStorage::from(local))?;
            connect(s.as_raw_fd(), &SockaddrStorage::from(front(k / PER_SERVER)))
                .map_err(|e| format!("connection {k}: {e}"))?;
            let mut s = TcpStream::from(s);
            s.write_all(&(k as u64).to_ne_bytes())?;
            self.ends.push(s);
        }
        Ok(())
    }

    pub fn ping(&self, list: &[usize]) -> Result<()> {
        on_one_cpu(|| {
            for k in list {
                let mut s = &self.ends[k - self.base];
                s.write_all(&block(*k))?;
                expect(s, *k)?;
            }
            Ok(())
        })
    }
}

/// The server's ends.
pub struct Servers {
    pub base: usize,
    pub listeners: Arc<Vec<TcpListener>>,
    pub ends: Vec<Option<TcpStream>>,
    pub opened: Arc<AtomicUsize>,
}

impl Servers {
    pub fn accept(&mut self, until: usize) -> Result<()> {
        let mut pending = VecDeque::new();
        while self.opened.load(Relaxed) < until {
            let mut ready: Vec<PollFd<'_>> =
                self.listeners.iter().map(|l| PollFd::new(l.as_fd(), PollFlags::POLLIN)).collect();
            let wait = if pending.is_empty() { PATIENCE } else { Duration::from_millis(1) };
            if poll(&mut ready, PollTimeout::try_from(wait)?)? == 0 && pending.is_empty() {
                return Err("no connection arrives at the server".into());
            }
            let mut came = false;
            for l in self.listeners.iter() {
                while let Ok((s, _)) = l.accept() {
                    came = true;
                    pending.push_back(s);
                }
            }
            // the numbers of older connections have arrived by now
            while pending.len() > PENDING || (!came && !pending.is_empty()) {
                let Some(mut s) = pending.pop_front() else { break };
                let mut k = [0; 8];
                s.read_exact(&mut k).map_err(|e| format!("the number of a connection: {e}"))?;
                let k = usize::try_from(u64::from_ne_bytes(k))?.checked_sub(self.base);
                let place = k.and_then(|k| self.ends.get_mut(k));
                if place.ok_or("a number that no connection has")?.replace(s).is_some() {
                    return Err("two connections with one number".into());
                }
                self.opened.fetch_add(1, Relaxed);
            }
        }
        Ok(())
    }

    pub fn echo(&self, list: &[usize]) -> Result<()> {
        on_one_cpu(|| {
            for k in list {
                let s = self.ends[k - self.base].as_ref().ok_or("a connection that never came")?;
                expect(s, *k)?;
                let mut s = s;
                s.write_all(&block(*k))?;
            }
            Ok(())
        })
    }
}
