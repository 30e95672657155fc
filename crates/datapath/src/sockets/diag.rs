//! Questions about sockets to the kernel (sock_diag, <linux/inet_diag.h>): whether connections have
//! a socket, many at a time; the state of one socket; and the end of a socket that no process holds.

use crate::{
    Tuple,
    network::netlink::{Netlink, attributes, find, number, request},
};
use nix::{
    errno::Errno,
    libc,
    sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket},
};
use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::{AsRawFd, OwnedFd},
};

/// Size of `struct nlmsghdr` in bytes.
const HEADER: usize = 16;
/// Size in bytes of `struct nlmsghdr` and `struct inet_diag_req_v2`.
const QUESTION: usize = HEADER + 56;
/// Offset of the state in an answer: that of `struct inet_diag_msg`.
const STATE: usize = HEADER + 1;
/// Size of `struct inet_diag_msg` in bytes.
const MESSAGE: usize = 72;
/// Offset of the inode in `struct inet_diag_msg`. 0: no process holds the socket.
const INODE: usize = 68;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
/// States of <net/tcp_states.h>. A connection that is being opened from
/// outside shows as TCP_SYN_RECV, whatever its state inside the kernel.
const TCP_SYN_RECV: u8 = 3;
const TCP_LISTEN: u8 = 10;

/// Whether a socket claims a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// No socket: none at all, a request whose handshake is not complete, or only a listener.
    No,
    /// A socket in any state.
    Yes,
    /// The kernel did not answer.
    Unknown,
}

/// Asks the kernel about the sockets of this network namespace.
#[derive(Debug)]
pub struct Sockets {
    netlink: OwnedFd,
    /// Number of the next question, so that an answer that was not read cannot be taken for another question's.
    next: u32,
}

impl Sockets {
    /// Maximum number of questions at a time. Their answers fit into the socket's buffer, whatever its size.
    pub const AT_ONCE: usize = 64;

    /// Opens the connection to the kernel. Fails if the kernel cannot
    /// answer: then it says the same of every connection as of unknown ones.
    pub fn open() -> io::Result<Sockets> {
        let protocol = SockProtocol::NetlinkSockDiag;
        let netlink = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
        let mut s = Sockets { netlink, next: 0 };
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let known = Tuple { remote: ([127, 0, 0, 1], 1).into(), local: listener.local_addr()? };
        match s.ask(&[(known, 0)])?[..] {
            [Some(TCP_LISTEN)] => Ok(s),
            _ => Err(io::Error::new(io::ErrorKind::Unsupported, "no answers about TCP (CONFIG_INET_DIAG)")),
        }
    }

    /// Returns whether a socket claims each connection, given with the index
    /// of the device on which it arrived, or 0. At most [`Sockets::AT_ONCE`].
    pub fn claims(&mut self, connections: &[(Tuple, u32)]) -> io::Result<Vec<Claim>> {
        let claim = |state| match state {
            Some(0 | TCP_LISTEN | TCP_SYN_RECV) => Claim::No,
            Some(_) => Claim::Yes,
            None => Claim::Unknown,
        };
        Ok(self.ask(connections)?.into_iter().map(claim).collect())
    }

    /// Returns the states of the sockets; 0: there is no socket.
    fn ask(&mut self, connections: &[(Tuple, u32)]) -> io::Result<Vec<Option<u8>>> {
        assert!(connections.len() <= Self::AT_ONCE, "{} questions", connections.len());
        if connections.is_empty() {
            return Ok(Vec::new()); // an empty message cannot be sent
        }
        let first = self.next;
        self.next = first.wrapping_add(Self::AT_ONCE as u32);
        let questions = (0..).zip(connections).flat_map(|(n, (t, device))| question(first.wrapping_add(n), t, *device));
        send(self.netlink.as_raw_fd(), &questions.collect::<Vec<u8>>(), MsgFlags::empty())?;
        let mut states = vec![None; connections.len()];
        let mut answer = [0; 4096];
        // all answers are there when the questions have been sent
        for _ in connections {
            let n = match recv(self.netlink.as_raw_fd(), &mut answer, MsgFlags::MSG_DONTWAIT) {
                Ok(n) => n,
                Err(Errno::EAGAIN) => break,
                Err(e) => return Err(e.into()),
            };
            if let Some((number, state)) = read(&answer[..n])
                && let Some(s) = states.get_mut(number.wrapping_sub(first) as usize)
            {
                *s = state;
            }
        }
        Ok(states)
    }
}

/// Returns whether a socket has this connection. If the kernel does not answer, it has not.
pub fn is_claimed(t: &Tuple) -> bool {
    socket_state(t).is_some()
}

/// Returns whether a process holds the socket of this connection. If the kernel does not answer, none does.
pub fn is_held(t: &Tuple) -> bool {
    socket_state(t).is_some_and(|socket| socket.is_held)
}

/// Destroys the socket of a connection if it is closing and no process holds it.
/// Returns false if there is no such socket. The other host may be informed.
pub(crate) fn end_closing(t: &Tuple) -> io::Result<bool> {
    const COOKIE: usize = 44;
    // <net/tcp_states.h>: FIN_WAIT1, FIN_WAIT2, TIME_WAIT, LAST_ACK, CLOSING
    const CLOSING: [u8; 5] = [4, 5, 6, 9, 11];
    let mut netlink = Netlink::sockets()?;
    let mut which = question(0, t, 0)[HEADER..].to_vec();
    let found = match netlink.ask(&request(SOCK_DIAG_BY_FAMILY, 0, &which, &[])) {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => return Ok(false),
        found => found?,
    };
    // the answer may be about a listener, or about a new connection of the same host
    let is_held = found.get(INODE..INODE + 4).is_none_or(|inode| inode != [0; 4]);
    let Some(cookie) = found.get(COOKIE..COOKIE + 8).filter(|_| CLOSING.contains(&found[1]) && !is_held) else {
        return Ok(false);
    };
    let at = which.len() - 8;
    which[at..].copy_from_slice(cookie); // this socket and no other
    netlink.ask(&request(SOCK_DESTROY, libc::NLM_F_ACK, &which, &[])).map(|_| true)
}

/// The kernel's state of a socket (`struct inet_diag_msg`, `struct tcp_info`).
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct SocketState {
    /// State of the connection (RFC 9293, 3.3.2).
    pub state: &'static str,
    /// A process holds the socket. Otherwise the kernel is closing it.
    pub is_held: bool,
    /// Number of received bytes that were not read.
    pub unread: u32,
    /// Number of written bytes that were not acknowledged, sent or not.
    pub unacked: u32,
    /// Running timer: `retransmit`, `keepalive`, `time-wait`, `probe` (of a closed window), or none.
    pub timer: Option<&'static str>,
    /// Milliseconds until the timer expires.
    pub timer_ms: u32,
    /// `struct tcp_info`; `None` in TIME-WAIT.
    pub info: Option<TcpInfo>,
}

/// A part of `struct tcp_info`.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct TcpInfo {
    /// Number of consecutive timeouts of the first unacknowledged segment.
    pub retransmits: u8,
    /// Number of consecutive probes without an answer.
    pub probes: u8,
    /// Retransmission timeout in microseconds.
    pub rto_us: u32,
    /// Smoothed round-trip time in microseconds.
    pub rtt_us: u32,
    /// MSS for sending, in bytes.
    pub snd_mss: u32,
    /// Congestion window in segments.
    pub snd_cwnd: u32,
    /// Number of segments that were sent and not acknowledged.
    pub unacked: u32,
    /// Number of these segments that are considered lost.
    pub lost: u32,
    /// Number of retransmitted segments since the connection began.
    pub total_retrans: u32,
    /// Path MTU in bytes.
    pub pmtu: u32,
    /// Milliseconds since data was last sent.
    pub last_data_sent_ms: u32,
    /// Milliseconds since data was last received.
    pub last_data_recv_ms: u32,
    /// Milliseconds since an acknowledgement was last received.
    pub last_ack_recv_ms: u32,
    /// Number of bytes written but not sent yet.
    pub notsent: Option<u32>,
    /// The window that the host has announced, in bytes.
    pub snd_wnd: Option<u32>,
}

impl TcpInfo {
    /// Reads `struct tcp_info` of <linux/tcp.h>, to which kernels only append.
    fn read(info: &[u8]) -> Option<TcpInfo> {
        let word = |at: usize| number(info.get(at..)?);
        Some(TcpInfo {
            retransmits: *info.get(2)?,
            probes: *info.get(3)?,
            rto_us: word(8)?,
            rtt_us: word(68)?,
            snd_mss: word(16)?,
            snd_cwnd: word(80)?,
            unacked: word(24)?,
            lost: word(32)?,
            total_retrans: word(100)?,
            pmtu: word(60)?,
            last_data_sent_ms: word(44)?,
            last_data_recv_ms: word(52)?,
            last_ack_recv_ms: word(56)?,
            notsent: word(144),
            snd_wnd: word(228),
        })
    }
}

/// Returns the state of a connection's socket. `None`: there is none, or the kernel does not answer.
pub(crate) fn socket_state(t: &Tuple) -> Option<SocketState> {
    const INET_DIAG_INFO: u16 = 2;
    // from <net/tcp_states.h>, starting at 1
    const STATES: [&str; 12] = [
        "established",
        "syn-sent",
        "syn-received",
        "fin-wait-1",
        "fin-wait-2",
        "time-wait",
        "closed",
        "close-wait",
        "last-ack",
        "listen",
        "closing",
        "syn-received",
    ];
    let mut which = question(0, t, 0)[HEADER..].to_vec();
    which[2] = 1 << (INET_DIAG_INFO - 1); // idiag_ext
    let found = Netlink::sockets().and_then(|mut n| n.ask(&request(SOCK_DIAG_BY_FAMILY, 0, &which, &[]))).ok()?;
    let word = |at: usize| number(found.get(at..)?);
    let state = *found.get(1)?;
    if [TCP_LISTEN, TCP_SYN_RECV].contains(&state) {
        return None; // a socket for other connections
    }
    let info = attributes(found.get(MESSAGE..)?);
    Some(SocketState {
        state: STATES.get(usize::from(state).wrapping_sub(1))?,
        is_held: word(INODE)? != 0,
        unread: word(56)?,
        unacked: word(60)?,
        timer: match found[2] {
            1 => Some("retransmit"),
            2 => Some("keepalive"),
            3 => Some("time-wait"),
            4 => Some("probe"),
            _ => None,
        },
        timer_ms: word(52)?,
        info: find(&info, INET_DIAG_INFO).and_then(TcpInfo::read),
    })
}

/// Builds a question. Its answer carries `number`.
fn question(number: u32, t: &Tuple, device: u32) -> [u8; QUESTION] {
    let family = if t.is_v4() { libc::AF_INET } else { libc::AF_INET6 } as u8;
    let mut q = [0; QUESTION];
    let mut put = |at: usize, bytes: &[u8]| q[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &(QUESTION as u32).to_ne_bytes());
    put(4, &SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    put(6, &(libc::NLM_F_REQUEST as u16).to_ne_bytes());
    put(8, &number.to_ne_bytes());
    put(HEADER, &[family, libc::IPPROTO_TCP as u8]);
    put(HEADER + 4, &u32::MAX.to_ne_bytes()); // all states
    let id = HEADER + 8; // struct inet_diag_sockid
    for (i, side) in [t.local, t.remote].iter().enumerate() {
        put(id + 2 * i, &side.port().to_be_bytes());
        put(id + 4 + 16 * i, &address(side));
    }
    put(id + 36, &device.to_ne_bytes());
    put(id + 40, &[0xff; 8]); // INET_DIAG_NOCOOKIE: any socket
    q
}

/// Returns the bytes of an address. For IPv4, the first four count.
fn address(side: &SocketAddr) -> [u8; 16] {
    match side.ip().to_canonical() {
        IpAddr::V4(v4) => {
            let mut all = [0; 16];
            all[..4].copy_from_slice(&v4.octets());
            all
        }
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Returns the number of the question and its answer. `None` as an answer: neither a socket nor its absence.
fn read(answer: &[u8]) -> Option<(u32, Option<u8>)> {
    let word = |at: usize| Some(u32::from_ne_bytes(*answer.get(at..)?.first_chunk()?));
    let kind = u16::from_ne_bytes(*answer.get(4..)?.first_chunk()?);
    let number = word(8)?;
    let state = match kind {
        SOCK_DIAG_BY_FAMILY => Some(*answer.get(STATE)?),
        // struct nlmsgerr begins with the negative error
        _ if kind == libc::NLMSG_ERROR as u16 && word(HEADER)? as i32 == -libc::ENOENT => Some(0),
        _ => None,
    };
    Some((number, state))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    fn ends(s: &TcpStream) -> (Tuple, u32) {
        (Tuple { remote: s.peer_addr().unwrap(), local: s.local_addr().unwrap() }, 0)
    }

    #[test]
    fn sockets_are_told_from_what_is_none() {
        let mut sockets = Sockets::open().unwrap();
        for at in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(at).unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let queued = ends(&client);
            let mirrored = (Tuple { remote: queued.0.local, local: queued.0.remote }, 0);
            assert_eq!(sockets.claims(&[queued, mirrored]).unwrap(), [Claim::Yes; 2], "accepted or not");
            let stranger = Tuple { remote: SocketAddr::new(queued.0.local.ip(), 1), ..mirrored.0 };
            let nobody = Tuple { remote: stranger.remote, local: stranger.remote };
            assert_eq!(sockets.claims(&[(stranger, 0), (nobody, 0)]).unwrap(), [Claim::No; 2], "a listener is none");
            let many: Vec<_> = [queued, (nobody, 0)].into_iter().cycle().take(Sockets::AT_ONCE).collect();
            let expected: Vec<_> = [Claim::Yes, Claim::No].into_iter().cycle().take(Sockets::AT_ONCE).collect();
            assert_eq!(sockets.claims(&many).unwrap(), expected);
        }
        assert_eq!(sockets.claims(&[]).unwrap(), []);
    }

    /// A listener, a socket that is held, and one that nobody has accepted yet.
    #[test]
    fn sockets_in_use_are_not_ended() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let client = TcpStream::connect(at).unwrap();
        let (mine, _) = ends(&client);
        let stranger = Tuple { remote: ([127, 0, 0, 1], 1).into(), local: at };
        for t in [mine, Tuple { remote: mine.local, local: mine.remote }, stranger] {
            assert!(!end_closing(&t).unwrap(), "{t:?}");
        }
        drop(listener.accept().unwrap());
        TcpStream::connect(at).expect("it still listens");
    }

    #[test]
    fn other_answers_say_nothing() {
        let error = |e: i32| [&[36, 0, 0, 0, 2, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0][..], &(-e).to_ne_bytes()].concat();
        assert_eq!(read(&error(libc::ENOENT)), Some((7, Some(0))));
        assert_eq!(read(&error(libc::EPERM)), Some((7, None)));
        assert_eq!(read(&error(libc::ENOENT)[..12]), None);
    }
}
