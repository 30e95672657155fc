//! Whether the kernel has a socket of a connection: sock_diag (<linux/inet_diag.h>), many questions at a time; the state of
//! one socket, and the end of one that nobody holds.

use crate::{
    Tuple,
    netlink::{Netlink, attributes, find, number, request},
};
use nix::{
    errno::Errno,
    libc,
    sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket},
};
use serde::Serialize;
use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::{AsRawFd, OwnedFd},
};

/// `struct nlmsghdr`.
const HEADER: usize = 16;
/// With `struct inet_diag_req_v2`.
const QUESTION: usize = HEADER + 56;
/// Where `struct inet_diag_msg` has the state.
const STATE: usize = HEADER + 1;
/// Of `struct inet_diag_msg`, bytes.
const MESSAGE: usize = 72;
/// Where it has the inode; 0: no process holds the socket.
const INODE: usize = 68;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
/// Of <net/tcp_states.h>. One that is being opened from outside is TCP_SYN_RECV here, whatever the kernel calls it inside.
const TCP_SYN_RECV: u8 = 3;
const TCP_LISTEN: u8 = 10;

/// Whether a socket claims a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// No socket: none at all, a request that waits for the end of its handshake, or only one that listens.
    No,
    /// A socket, in whatever state.
    Yes,
    /// The kernel did not say.
    Unknown,
}

/// Asks the kernel about the sockets of this network namespace.
#[derive(Debug)]
pub struct Sockets {
    netlink: OwnedFd,
    /// Number of the next question: an answer that was not read before must not be taken for another's.
    next: u32,
}

impl Sockets {
    /// So many questions at a time: their answers fit the socket's buffer, whatever it was set to.
    pub const AT_ONCE: usize = 64;

    /// Fails if the kernel has no answers: it says the same of each connection then as of those that it does not know.
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

    /// Whether these connections are claimed, each with the device that it came by or 0; [`Sockets::AT_ONCE`] at most.
    pub fn claims(&mut self, connections: &[(Tuple, u32)]) -> io::Result<Vec<Claim>> {
        let claim = |state| match state {
            Some(0 | TCP_LISTEN | TCP_SYN_RECV) => Claim::No,
            Some(_) => Claim::Yes,
            None => Claim::Unknown,
        };
        Ok(self.ask(connections)?.into_iter().map(claim).collect())
    }

    /// States; 0: there is no socket.
    fn ask(&mut self, connections: &[(Tuple, u32)]) -> io::Result<Vec<Option<u8>>> {
        assert!(connections.len() <= Self::AT_ONCE, "{} questions", connections.len());
        if connections.is_empty() {
            return Ok(Vec::new()); // nothing cannot be sent
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

/// Ends the socket of a connection if the kernel only closes it, and nobody holds it. False: there is no such socket. The other
/// host may hear of it.
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
    // the answer may be about one that listens, or about a new connection of the same host
    let is_held = found.get(INODE..INODE + 4).is_none_or(|inode| inode != [0; 4]);
    let Some(cookie) = found.get(COOKIE..COOKIE + 8).filter(|_| CLOSING.contains(&found[1]) && !is_held) else {
        return Ok(false);
    };
    let at = which.len() - 8;
    which[at..].copy_from_slice(cookie); // this one and no other
    netlink.ask(&request(SOCK_DESTROY, libc::NLM_F_ACK, &which, &[])).map(|_| true)
}

/// What the kernel knows of a socket (`struct inet_diag_msg`, `struct tcp_info`).
#[derive(Clone, Debug, Serialize)]
pub struct SocketState {
    /// Of the connection (RFC 9293, 3.3.2).
    pub state: &'static str,
    /// A process holds it; otherwise the kernel closes it by itself.
    pub is_held: bool,
    /// Bytes that have come and were not read.
    pub unread: u32,
    /// Bytes that were written and not acknowledged, sent or not.
    pub unacked: u32,
    /// What it waits for: `retransmit`, `keepalive`, `time-wait`, `probe` (of a window that is closed), or nothing.
    pub timer: Option<&'static str>,
    /// Milliseconds until then.
    pub timer_ms: u32,
    /// `struct tcp_info`; none in TIME-WAIT.
    pub info: Option<TcpInfo>,
}

/// A part of `struct tcp_info`.
#[derive(Clone, Debug, Serialize)]
pub struct TcpInfo {
    /// Timeouts in a row of the segment that is not acknowledged.
    pub retransmits: u8,
    /// Probes in a row that were not answered.
    pub probes: u8,
    /// Retransmission timeout, microseconds.
    pub rto_us: u32,
    /// Smoothed round-trip time, microseconds.
    pub rtt_us: u32,
    /// MSS for sending, bytes.
    pub snd_mss: u32,
    /// Congestion window, segments.
    pub snd_cwnd: u32,
    /// Segments that were sent and not acknowledged.
    pub unacked: u32,
    /// Of these, segments that are taken for lost.
    pub lost: u32,
    /// Segments sent again since the connection began.
    pub total_retrans: u32,
    /// MTU of the path, bytes.
    pub pmtu: u32,
    /// Milliseconds since data were sent last.
    pub last_data_sent_ms: u32,
    /// Milliseconds since data came last.
    pub last_data_recv_ms: u32,
    /// Milliseconds since an acknowledgement came last.
    pub last_ack_recv_ms: u32,
    /// Bytes written and not sent yet.
    pub notsent: Option<u32>,
    /// The window that the host has announced, bytes.
    pub snd_wnd: Option<u32>,
}

impl TcpInfo {
    /// Offsets are those of `struct tcp_info` in <linux/tcp.h>, to which kernels only add.
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

/// The kernel's socket of a connection; `None`: there is none, or it does not say.
pub(crate) fn socket_state(t: &Tuple) -> Option<SocketState> {
    const INET_DIAG_INFO: u16 = 2;
    // of <net/tcp_states.h>, from 1 on
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
        return None; // of other connections
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

/// `number` comes back with the answer.
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
    put(id + 40, &[0xff; 8]); // INET_DIAG_NOCOOKIE: whichever socket it is
    q
}

/// Of IPv4, the first four bytes count.
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

/// Which question is answered, and how; `None`: neither by a socket nor by there being none.
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

    /// One that listens, one that is held, one that nobody has accepted yet.
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
