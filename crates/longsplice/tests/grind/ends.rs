//! The two ends of a checked connection. Many of them run on one thread in the namespace of their host.

use super::plan::{Half, Plan};
use longsplice_lab::pattern;
use nix::{
    libc,
    sys::socket::{setsockopt, sockopt},
};
use std::{
    fmt::{self, Display, Formatter},
    future::Future,
    io::{self, ErrorKind},
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    sync::Notify,
    time::{sleep, timeout},
};

/// A host that still waits this long after the planned time has been left hanging. A start on a busy machine, and retransmissions
/// that have waited for one, take less.
pub const HANGS: Duration = Duration::from_secs(120);
const PIECE: usize = 64 * 1024;

/// How a connection ended at one end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum How {
    /// All was sent, and all has come, with the end of the stream behind it.
    Whole,
    /// This end has reset it, as planned.
    Own,
    /// The stream ended before all had come.
    Early,
    Reset,
    /// Nothing has happened for far too long.
    Stalled,
    /// Other bytes than those of the stream, or more.
    Wrong(String),
    Failed(String),
}

/// What one end has seen.
#[derive(Clone, Debug)]
pub struct Seen {
    pub sent: u64,
    pub received: u64,
    pub how: How,
}

impl Display for Seen {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "sent {}, received {}: {:?}", self.sent, self.received, self.how)
    }
}

impl From<io::Error> for How {
    fn from(error: io::Error) -> How {
        match error.kind() {
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => How::Reset,
            ErrorKind::UnexpectedEof => How::Early,
            ErrorKind::TimedOut => How::Stalled,
            ErrorKind::InvalidData => How::Wrong(error.to_string()),
            _ => How::Failed(error.to_string()),
        }
    }
}

/// A reset is sent only once. If it is lost, a host that has nothing to send learns of it by asking.
pub fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    setsockopt(stream, sockopt::TcpKeepIdle, &10)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &3)?;
    setsockopt(stream, sockopt::TcpKeepCount, &20)?;
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    stream.set_nodelay(true)
}

/// Connects from this address.
pub async fn connect(from: SocketAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(from)?;
    let stream = within(HANGS, socket.connect(to)).await?;
    keep_alive(&stream)?;
    Ok(stream)
}

/// Fails with `TimedOut` if it takes longer.
pub async fn within<T>(limit: Duration, done: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(limit, done).await.map_err(|_| ErrorKind::TimedOut)?
}

/// Reads up to and with `end`. Returns that, and what has come behind it.
pub async fn read_until(stream: &mut TcpStream, mut got: Vec<u8>, end: &[u8]) -> io::Result<(Vec<u8>, Vec<u8>)> {
    loop {
        if let Some(at) = got.windows(end.len()).position(|window| window == end) {
            let rest = got.split_off(at + end.len());
            return Ok((got, rest));
        }
        if got.len() > PIECE {
            return Err(io::Error::new(ErrorKind::InvalidData, "a head without an end"));
        }
        if stream.read_buf(&mut got).await? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
}

/// Reads so many bytes. Returns these, and what has come behind them.
pub async fn read_first(stream: &mut TcpStream, mut got: Vec<u8>, bytes: usize) -> io::Result<(Vec<u8>, Vec<u8>)> {
    while got.len() < bytes {
        if stream.read_buf(&mut got).await? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
    let rest = got.split_off(bytes);
    Ok((got, rest))
}

/// One end, while it lasts.
struct End<'a> {
    mine: &'a Half,
    theirs: u64,
    seeds: [u64; 2],
    sent: AtomicU64,
    received: AtomicU64,
    more: Notify,
}

/// Runs one end to its end: that of the client (0) or of the server (1). `got`: what of the other's stream has come already.
pub async fn converse(mut stream: TcpStream, seed: u64, who: usize, got: Vec<u8>) -> Seen {
    let plan = Plan::of(seed);
    let seeds = [seed, pattern::answer_seed(seed)];
    let end = End {
        mine: &plan.halves[who],
        theirs: plan.halves[1 - who].total(),
        seeds: [seeds[who], seeds[1 - who]],
        sent: AtomicU64::new(0),
        received: AtomicU64::new(0),
        more: Notify::new(),
    };
    let done = {
        let (mut from, mut to) = stream.split();
        let both = async { tokio::try_join!(end.write(&mut to), end.read(&mut from, got)) };
        timeout(plan.lasts + HANGS, both).await
    };
    let how = match done {
        Err(_) => How::Stalled,
        Ok(Ok(_)) => How::Whole,
        Ok(Err(how)) => how,
    };
    if how == How::Own || how == How::Stalled {
        let _ = setsockopt(&stream, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 });
    }
    Seen { sent: end.sent.load(Relaxed), received: end.received.load(Relaxed), how }
}

impl End<'_> {
    async fn write(&self, to: &mut (impl AsyncWriteExt + Unpin)) -> Result<(), How> {
        let mut buffer = vec![0; PIECE];
        for step in &self.mine.steps {
            while self.received.load(Relaxed) < step.after {
                self.more.notified().await;
            }
            if !step.pause.is_zero() {
                sleep(step.pause).await;
            }
            let mut left = step.bytes;
            while left > 0 {
                let piece = &mut buffer[..left.min(PIECE as u64) as usize];
                pattern::fill(self.seeds[0], self.sent.load(Relaxed), piece);
                // what was sent is known also if it is broken off here
                let sent = to.write(piece).await? as u64;
                self.sent.fetch_add(sent, Relaxed);
                left -= sent;
            }
        }
        if self.mine.resets {
            return Err(How::Own);
        }
        Ok(to.shutdown().await?)
    }

    async fn read(&self, from: &mut (impl AsyncReadExt + Unpin), got: Vec<u8>) -> Result<(), How> {
        self.take(&got)?;
        let (most, pause) = self.mine.reads.unwrap_or((PIECE, Duration::ZERO));
        let mut buffer = vec![0; most];
        loop {
            let n = from.read(&mut buffer).await?;
            if n == 0 {
                let all = self.received.load(Relaxed) == self.theirs;
                return if all { Ok(()) } else { Err(How::Early) };
            }
            self.take(&buffer[..n])?;
            if !pause.is_zero() {
                sleep(pause).await;
            }
        }
    }

    fn take(&self, bytes: &[u8]) -> Result<(), How> {
        let at = self.received.load(Relaxed);
        if at + bytes.len() as u64 > self.theirs {
            return Err(How::Wrong(format!("{} bytes more than all", at + bytes.len() as u64 - self.theirs)));
        }
        pattern::check(self.seeds[1], at, bytes).map_err(|mismatch| How::Wrong(mismatch.to_string()))?;
        self.received.fetch_add(bytes.len() as u64, Relaxed);
        self.more.notify_one();
        Ok(())
    }
}
