//! Sockets for the two ends: options that must be set before the handshake, an accept loop with a limit, and SOCKS5.

use std::io::{self, Error, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::{Report, STEP, Script, converse};

/// More connections than any test opens at once, so that no SYN has to be retransmitted.
const BACKLOG: i32 = 4096;

/// Connects with the options of the script. Call it inside a namespace.
pub fn connect(remote: SocketAddr, script: &Script) -> io::Result<TcpStream> {
    let socket = socket(remote, script)?;
    if let Some(local) = script.local {
        socket.set_reuse_address(true)?;
        socket.bind(&local.into())?;
    }
    socket.connect_timeout(&remote.into(), script.deadline)?;
    Ok(socket.into())
}

/// Listens with the options of the script. Call it inside a namespace; port 0 takes any free port.
pub fn listen(local: SocketAddr, script: &Script) -> io::Result<TcpListener> {
    let socket = socket(local, script)?;
    socket.set_reuse_address(true)?;
    socket.bind(&local.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Creates a socket. Buffer and segment sizes affect the handshake, so they are set first.
fn socket(address: SocketAddr, script: &Script) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if let Some(size) = script.receive_buffer {
        socket.set_recv_buffer_size(size)?;
    }
    if let Some(size) = script.send_buffer {
        socket.set_send_buffer_size(size)?;
    }
    if let Some(size) = script.max_segment {
        socket.set_tcp_mss(size)?;
    }
    if let Some(name) = script.congestion {
        socket.set_tcp_congestion(name.as_bytes())?;
    }
    Ok(socket)
}

/// A server that runs on its own thread. Dropping it stops accepting, and waits.
#[derive(Debug)]
pub struct Serving {
    local: Option<SocketAddr>,
    stop: Arc<AtomicBool>,
    accepting: Option<JoinHandle<Vec<Report>>>,
}

/// Accepts this many connections and runs the script on each. The script's deadline applies to each connection, and
/// accepting ends if no new connection arrives for that long.
pub fn serve(listener: TcpListener, connections: usize, script: Script) -> Serving {
    let stop = Arc::new(AtomicBool::new(false));
    let local = listener.local_addr().ok();
    let stopped = stop.clone();
    let accepting = thread::spawn(move || accept_all(&listener, connections, &script, &stopped));
    Serving { local, stop, accepting: Some(accepting) }
}

impl Serving {
    /// The local address of the listener.
    pub fn local(&self) -> Option<SocketAddr> {
        self.local
    }

    /// Waits until all connections have arrived and ended. Reports are in the order of arrival, which through a proxy may
    /// differ from the order in which clients connected: see [`Report::seed`].
    pub fn join(mut self) -> Vec<Report> {
        self.finish()
    }

    /// Stops accepting, and waits for the existing connections.
    pub fn stop(mut self) -> Vec<Report> {
        self.stop.store(true, Ordering::Relaxed);
        self.finish()
    }

    fn finish(&mut self) -> Vec<Report> {
        self.accepting
            .take()
            .map_or_else(Vec::new, |accepting| accepting.join().expect("the accept loop does not panic"))
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(accepting) = self.accepting.take() {
            // A panic in the thread must not cause a second one here.
            let _ = accepting.join();
        }
    }
}

fn accept_all(listener: &TcpListener, connections: usize, script: &Script, stop: &AtomicBool) -> Vec<Report> {
    // SO_RCVTIMEO limits accept(), too.
    if SockRef::from(listener).set_read_timeout(Some(STEP)).is_err() {
        return Vec::new();
    }
    thread::scope(|scope| {
        let mut threads = Vec::new();
        let mut last = Instant::now();
        while threads.len() < connections && last.elapsed() < script.deadline && !stop.load(Ordering::Relaxed) {
            if let Ok((stream, _)) = listener.accept() {
                last = Instant::now();
                threads.push(scope.spawn(|| converse(stream, script)));
            }
        }
        threads.into_iter().map(|thread| thread.join().expect("a conversation does not panic")).collect()
    })
}

/// Connects to a SOCKS5 proxy and requests `target` (RFC 1928, CONNECT without
/// authentication). The rest of the stream is between client and target.
pub fn socks5_connect(proxy: SocketAddr, target: SocketAddr, script: &Script) -> io::Result<TcpStream> {
    socks5_ask(proxy, 1, target, script).map(|(stream, _)| stream)
}

/// Connects to a SOCKS5 proxy, and asks for a command (RFC 1928) without authentication. Returns the address in the answer.
pub fn socks5_ask(
    proxy: SocketAddr,
    command: u8,
    target: SocketAddr,
    script: &Script,
) -> io::Result<(TcpStream, SocketAddr)> {
    let mut stream = connect(proxy, script)?;
    // A proxy that never answers must not hang a test.
    let patience = Some(script.deadline.max(Duration::from_millis(1)));
    stream.set_read_timeout(patience)?;
    stream.set_write_timeout(patience)?;
    stream.write_all(&[5, 1, 0])?;
    let mut method = [0; 2];
    stream.read_exact(&mut method)?;
    if method != [5, 0] {
        return Err(refused(format!("method {method:?}")));
    }
    stream.write_all(&[&[5, command, 0], &socks5_address(target)[..]].concat())?;
    let at = socks5_answer(&mut stream)?;
    Ok((stream, at))
}

/// An address as SOCKS5 writes it, also in front of datagrams.
pub fn socks5_address(at: SocketAddr) -> Vec<u8> {
    let port = at.port().to_be_bytes();
    match at.ip() {
        IpAddr::V4(ip) => [&[1][..], &ip.octets(), &port].concat(),
        IpAddr::V6(ip) => [&[4][..], &ip.octets(), &port].concat(),
    }
}

/// Reads an answer up to its last byte and no further: the next byte is the target's. BIND has two.
pub fn socks5_answer(stream: &mut TcpStream) -> io::Result<SocketAddr> {
    let mut head = [0; 4];
    stream.read_exact(&mut head)?;
    let [version, reply, _, address_type] = head;
    if version != 5 || reply != 0 {
        return Err(refused(format!("reply {reply}")));
    }
    let ip = match address_type {
        1 => IpAddr::from(read_array::<4>(stream)?),
        4 => IpAddr::from(read_array::<16>(stream)?),
        other => return Err(refused(format!("address type {other}"))),
    };
    Ok(SocketAddr::new(ip, u16::from_be_bytes(read_array(stream)?)))
}

fn read_array<const N: usize>(stream: &mut TcpStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).map(|()| bytes)
}

fn refused(why: String) -> Error {
    Error::new(ErrorKind::ConnectionRefused, format!("the SOCKS5 proxy says {why}"))
}
