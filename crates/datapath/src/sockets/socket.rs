//! Socket options and ioctls for which no safe wrapper exists.

use crate::{Tuple, names::MARK_HOPS};
use bytes::BufMut;
use nix::{
    libc,
    sys::socket::{
        AddressFamily, SockFlag, SockType, SockaddrLike, SockaddrStorage, bind, connect, getsockopt, setsockopt,
        socket,
        sockopt::{self, Linger},
    },
};
use std::{
    io,
    net::{SocketAddr, SocketAddrV4, SocketAddrV6},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    sync::Arc,
    time::Duration,
};
use tokio::io::{Interest, unix::AsyncFd};

fn set_int(fd: impl AsFd, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the option value is one int, and its address and size are passed.
    let r = unsafe {
        libc::setsockopt(
            fd.as_fd().as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns whether a protocol works on the socket (TCP_ULP), such as TLS in the kernel: the bytes that are read are not those that
/// arrive.
pub fn has_ulp(fd: impl AsFd) -> bool {
    let mut name = [0_u8; 16]; // TCP_ULP_NAME_MAX
    let mut len = name.len() as libc::socklen_t;
    // SAFETY: the address and the size are those of `name` and of `len`.
    let r = unsafe {
        libc::getsockopt(
            fd.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_ULP,
            name.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    r == 0 && len > 0
}

/// Sets IP_TRANSPARENT: the socket, and those that it accepts, may have addresses that are not ours. Needs CAP_NET_ADMIN.
pub fn set_transparent(fd: impl AsFd, v6: bool) -> io::Result<()> {
    match v6 {
        false => set_int(fd, libc::IPPROTO_IP, libc::IP_TRANSPARENT, 1),
        true => set_int(fd, libc::IPPROTO_IPV6, libc::IPV6_TRANSPARENT, 1),
    }
}

/// Lets so many proxies intercept the socket's connection (`MARK_HOPS` of bpf/mark.h). Needs CAP_NET_ADMIN.
pub fn set_hops(fd: impl AsFd, hops: u8) -> io::Result<()> {
    set_int(fd, libc::SOL_SOCKET, libc::SO_MARK, (MARK_HOPS | u32::from(hops)) as libc::c_int)
}

/// Returns SO_NETNS_COOKIE: a number of this network namespace that, unlike its inode, is not reused until the machine reboots.
pub(crate) fn namespace_cookie() -> io::Result<u64> {
    const SO_NETNS_COOKIE: libc::c_int = 71; // <asm-generic/socket.h>; the libc crate does not have it
    let s = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    let (mut cookie, mut size) = (0u64, size_of::<u64>() as libc::socklen_t);
    // SAFETY: the option value is one u64, and its address and size are passed.
    let r = unsafe {
        libc::getsockopt(s.as_raw_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, (&raw mut cookie).cast(), &raw mut size)
    };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(cookie) }
}

/// Sets PACKET_VNET_HDR: each frame follows a `struct virtio_net_hdr`, which leaves work to the kernel.
pub(crate) fn with_virtio_header(fd: impl AsFd) -> io::Result<()> {
    set_int(fd, libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)
}

/// Sends a frame from a packet socket over a device. `protocol`: EtherType, in host byte order.
pub(crate) fn send_frame(fd: impl AsFd, ifindex: u32, protocol: u16, frame: &[u8]) -> io::Result<()> {
    // SAFETY: sockaddr_ll is plain data; all-zero is valid.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    to.sll_family = libc::AF_PACKET as _;
    to.sll_protocol = protocol.to_be();
    to.sll_ifindex = ifindex as _;
    // SAFETY: the lengths passed are those of the frame and of the address, which both outlive the call.
    let r = unsafe {
        libc::sendto(
            fd.as_fd().as_raw_fd(),
            frame.as_ptr().cast(),
            frame.len(),
            libc::MSG_DONTWAIT,
            (&raw const to).cast(),
            size_of_val(&to) as libc::socklen_t,
        )
    };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Sets TCP_WINDOW_CLAMP: limits the announced window to `bytes`. A window that was announced already stays.
pub fn clamp_window(fd: impl AsFd, bytes: u32) -> io::Result<()> {
    set_int(fd, libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, i32::try_from(bytes).unwrap_or(i32::MAX))
}

/// Limits the bytes that a socket holds although they cannot be sent yet (TCP_NOTSENT_LOWAT).
pub fn limit_unsent(fd: impl AsFd, bytes: u32) -> io::Result<()> {
    set_int(fd, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, bytes.cast_signed())
}

/// Limits the bytes that a socket holds until they are acknowledged (SO_SNDBUF). Bytes that it holds already stay.
/// Returns what [`lift_outstanding`] needs.
pub fn limit_outstanding(fd: impl AsFd, bytes: u32) -> io::Result<usize> {
    let fd = fd.as_fd();
    let before = getsockopt(&fd, sockopt::SndBuf)?;
    // the kernel doubles the size, for the overhead of packets
    setsockopt(&fd, sockopt::SndBuf, &(bytes as usize))?;
    Ok(before)
}

/// Lifts the limit: the kernel chooses the size again, from `before` on.
pub fn lift_outstanding(fd: impl AsFd, before: usize) -> io::Result<()> {
    let fd = fd.as_fd();
    setsockopt(&fd, sockopt::SndBufForce, &(before / 2))?;
    set_int(fd, libc::SOL_SOCKET, SO_BUF_LOCK, 0)
}

/// Sends the last segment of the handshake with the first data (TCP_QUICKACK off), or after 200 ms. For a socket that is not
/// connected yet.
pub fn acknowledge_with_data(fd: impl AsFd) -> io::Result<()> {
    set_int(fd, libc::IPPROTO_TCP, libc::TCP_QUICKACK, 0)
}

/// Limits the receive window to `bytes` for as long as data comes: unlike after [`clamp_window`] alone, the kernel does not enlarge
/// it. A larger one that was announced stays, and so does the room for it. Needs CAP_NET_ADMIN.
pub fn narrow_window(fd: impl AsFd, bytes: u32) -> io::Result<()> {
    let fd = fd.as_fd();
    let room = getsockopt(&fd, sockopt::RcvBuf)? / 2;
    // the kernel doubles the size, for the overhead of packets, and no longer changes it
    setsockopt(&fd, sockopt::RcvBufForce, &(bytes as usize).max(room))?;
    clamp_window(fd, bytes)
}

/// Lifts the limit: the kernel enlarges the window again.
pub fn widen_window(fd: impl AsFd) -> io::Result<()> {
    let fd = fd.as_fd();
    clamp_window(fd, u32::MAX)?;
    set_int(fd, libc::SOL_SOCKET, SO_BUF_LOCK, 0)
}

/// Limits the bytes that a host can send before they are read: to `bytes`, or ten segments if that is more (an initial window,
/// RFC 6928), and to twice as many if segments come in large packets. TCP_WINDOW_CLAMP would not: the kernel sets it anew when
/// the first data arrives. A larger window that was announced is taken back with the next segment that has a higher number than
/// the last one; until then, the host must have no reason to send. Needs CAP_NET_ADMIN. Returns what [`lift_unread`] needs.
pub fn limit_unread(fd: impl AsFd, bytes: u32) -> io::Result<usize> {
    let fd = fd.as_fd();
    let before = getsockopt(&fd, sockopt::RcvBuf)?;
    let bytes = bytes.max(10 * getsockopt(&fd, sockopt::TcpMaxSeg)?);
    Repair::On.set(fd)?;
    let retracted = retract_window(fd, bytes);
    Repair::Off.set(fd)?;
    retracted?;
    setsockopt(&fd, sockopt::RcvBuf, &(bytes as usize))?; // doubled by the kernel, for the overhead of packets
    Ok(before)
}

fn retract_window(fd: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    let mut window = repair_window(fd)?;
    window.rcv_wnd = window.rcv_wnd.min(bytes);
    set_raw(fd, TCP_REPAIR_WINDOW, &[window])
}

/// Lifts the limit: the kernel chooses the size again, from `before` on.
pub fn lift_unread(fd: impl AsFd, before: usize) -> io::Result<()> {
    let fd = fd.as_fd();
    setsockopt(&fd, sockopt::RcvBufForce, &(before / 2))?;
    set_int(fd, libc::SOL_SOCKET, SO_BUF_LOCK, 0)
}

/// TCP_REPAIR: a socket in this mode sends nothing, not even when it is closed. Needs CAP_NET_ADMIN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// Enters repair mode.
    On,
    /// Leaves it without a window probe (TCP_REPAIR_OFF_NO_WP).
    Off,
    /// Leaves it with two window probes (TCP_REPAIR_OFF). The first announces our window to the host, if
    /// the data path gives it a sequence number from which the host reads windows (`LEG_PROBE`). The host
    /// answers the second with its own window, or with a reset if it has forgotten the connection.
    Probe,
}

impl Repair {
    /// Applies the mode to a socket.
    pub fn set(self, fd: impl AsFd) -> io::Result<()> {
        // <linux/tcp.h>: TCP_REPAIR_ON, TCP_REPAIR_OFF_NO_WP, TCP_REPAIR_OFF
        let values: &[libc::c_int] = match self {
            Repair::On => &[1],
            Repair::Off => &[-1],
            Repair::Probe => &[0, 1, 0],
        };
        values.iter().try_for_each(|v| set_int(&fd, libc::IPPROTO_TCP, libc::TCP_REPAIR, *v))?;
        if self == Repair::On {
            return Ok(());
        }
        // leaving repair mode clears SO_REUSEADDR, and nobody could listen on the port again while this socket lives
        set_int(&fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)
    }
}

/// Sets SO_RCVLOWAT: readers are woken when this many bytes are there. Until
/// then, Linux acknowledges every other segment, however late the reader.
pub fn low_water(fd: impl AsFd, bytes: u32) -> io::Result<()> {
    set_int(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes as libc::c_int)
}

/// Registers a socket with the current runtime. Errors if the runtime accepts no more.
pub fn register(socket: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is owned: nobody can close or replace it, and nobody takes it out of its owner.
    Ok(unsafe { AsyncFd::register_with_interest(socket, interest) }?)
}

/// Registers a socket to which others may have a [`Weak`](std::sync::Weak), like [`register`].
pub fn register_shared(socket: Arc<OwnedFd>, interest: Interest) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: as above.
    Ok(unsafe { AsyncFd::register_with_interest(socket, interest) }?)
}

/// Returns whether a listening socket has no room for another connection. A client is then left without an answer.
pub fn queue_is_full(listener: impl AsFd) -> io::Result<bool> {
    // of a listening socket; offsets like TOTAL_RETRANS
    const QUEUED: usize = 6;
    const MOST: usize = 7;
    let info: [u32; MOST + 1] = get_raw(listener.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO)?;
    Ok(info[QUEUED] > info[MOST])
}

/// Accepts a connection (accept4(2)). The socket does not block, and is closed on exec. Returns the address of its host, too.
pub fn accept(listener: impl AsFd) -> io::Result<(OwnedFd, SocketAddr)> {
    // SAFETY: sockaddr_storage is plain data; all-zero is valid.
    let mut from: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut size = size_of_val(&from) as libc::socklen_t;
    let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: the kernel writes at most `size` bytes of an address.
    let fd = unsafe { libc::accept4(listener.as_fd().as_raw_fd(), (&raw mut from).cast(), &raw mut size, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nobody else has it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the address is that of a socket, with its family, and `size` bytes long.
    let from = unsafe { SockaddrStorage::from_raw((&raw const from).cast(), Some(size)) };
    let v4 = from.as_ref().and_then(|a| a.as_sockaddr_in()).map(|a| SocketAddr::from(SocketAddrV4::from(*a)));
    let v6 = || from.as_ref().and_then(|a| a.as_sockaddr_in6()).map(|a| SocketAddr::from(SocketAddrV6::from(*a)));
    let from = v4.or_else(v6).ok_or_else(|| io::Error::other("a host without an IP address"))?;
    Ok((socket, from))
}

/// Reads at most `most` bytes from a socket, and appends them. Returns their number; 0
/// at the end of the stream. A read never goes beyond an urgent mark (RFC 9293, 3.8.5).
pub fn receive(fd: impl AsFd, to: &mut impl BufMut, most: usize) -> io::Result<usize> {
    let room = to.chunk_mut();
    let len = room.len().min(most);
    // SAFETY: the kernel writes into the first `len` bytes of a buffer that is at least as long.
    let n = unsafe { libc::recv(fd.as_fd().as_raw_fd(), room.as_mut_ptr().cast(), len, 0) };
    let n = usize::try_from(n).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: the kernel has written `n` bytes.
    unsafe { to.advance_mut(n) };
    Ok(n)
}

/// Returns whether the next byte is urgent (SIOCATMARK; RFC 9293, 3.8.5). For sockets with SO_OOBINLINE.
pub fn is_urgent(fd: impl AsFd) -> io::Result<bool> {
    const SIOCATMARK: libc::Ioctl = 0x8905; // <asm-generic/sockios.h>; the libc crate does not have it
    let mut mark: libc::c_int = 0;
    // SAFETY: the kernel writes one int.
    let r = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), SIOCATMARK, &raw mut mark) };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(mark != 0) }
}

/// Returns what a socket in repair mode has received: the next sequence number
/// that it expects, and whether it holds unread bytes, in order or not.
pub fn received(fd: impl AsFd) -> io::Result<(u32, bool)> {
    // <linux/tcp.h>, <linux/sock_diag.h>
    const NO_QUEUE: libc::c_int = 0;
    const RECV_QUEUE: libc::c_int = 1;
    const SO_MEMINFO: libc::c_int = 55;
    const SK_MEMINFO_RMEM_ALLOC: usize = 0;
    set_int(&fd, libc::IPPROTO_TCP, libc::TCP_REPAIR_QUEUE, RECV_QUEUE)?;
    let [next] = get_raw(fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_QUEUE_SEQ)?;
    set_int(&fd, libc::IPPROTO_TCP, libc::TCP_REPAIR_QUEUE, NO_QUEUE)?;
    let memory: [u32; 9] = get_raw(fd.as_fd(), libc::SOL_SOCKET, SO_MEMINFO)?;
    Ok((next, memory[SK_MEMINFO_RMEM_ALLOC] > 0))
}

/// Facts about the path to a socket's host that the kernel has measured (TCP_INFO).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathFacts {
    /// Minimum round-trip time of the last five minutes. `None` if not measured.
    pub min_rtt: Option<Duration>,
    /// Smoothed round-trip time (RFC 6298). `None` if not measured.
    pub rtt: Option<Duration>,
    /// Bytes per second that the host has acknowledged lately. 0 if not measured.
    pub rate: u64,
    /// Congestion window towards the host, in bytes.
    pub cwnd: u32,
    /// Bytes for the host that it has not acknowledged, sent or not.
    pub outstanding: u32,
    /// Segments with data sent to the host, including those sent again.
    pub sent: u32,
    /// Segments sent again because they were lost: those that had arrived, as the host has reported (RFC 2883), do not count.
    pub lost: u32,
    /// Bytes from the host that wait to be read ([`unread`]). [`path_facts`] leaves it at 0.
    pub unread: u32,
    /// Path MTU: size in bytes of the largest IP packet, from the route and from routers. `None`
    /// if not known, for example after the socket's device was deleted, until it sends again.
    pub mtu: Option<u32>,
}

/// Returns the number of bytes that wait to be read (FIONREAD).
pub fn unread(fd: impl AsFd) -> io::Result<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one int.
    let r = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(bytes.unsigned_abs()) }
}

/// Segments sent again: offset in struct tcp_info of <linux/tcp.h>, in units of 4 bytes.
const TOTAL_RETRANS: usize = 25;
/// Minimum round-trip time in microseconds: likewise.
const MIN_RTT: usize = 37;

/// Returns the minimum round-trip time of a `struct tcp_info`. `None`: not measured.
fn min_rtt(info: &[u32]) -> Option<Duration> {
    const NOT_MEASURED: u32 = u32::MAX;
    Some(info[MIN_RTT]).filter(|us| *us != NOT_MEASURED).map(|us| Duration::from_micros(us.into()))
}

/// Returns the facts about the path to a socket's host.
pub fn path_facts(fd: impl AsFd) -> io::Result<PathFacts> {
    // offsets like TOTAL_RETRANS
    const SND_MSS: usize = 4;
    const UNACKED: usize = 6; // segments
    const PMTU: usize = 15;
    const RTT: usize = 17; // microseconds
    const SND_CWND: usize = 20; // segments
    const NOTSENT_BYTES: usize = 36;
    const DATA_SEGS_OUT: usize = 39;
    const DELIVERY_RATE: usize = 40; // bytes per second, 64 bits
    // net.ipv4.route.min_pmtu: the kernel believes no router that reports less. A route whose
    // device was deleted leads to the kernel's blackhole device, which has an MTU of 68.
    const LEAST_PMTU: u32 = 552;
    const DSACK_DUPS: usize = 54; // Linux 4.19
    let info: [u32; DSACK_DUPS + 1] = get_raw(fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO)?;
    let rtt = Some(info[RTT]).filter(|us| *us != 0).map(|us| Duration::from_micros(us.into()));
    let [low, high] = [info[DELIVERY_RATE], info[DELIVERY_RATE + 1]].map(u32::to_ne_bytes);
    Ok(PathFacts {
        min_rtt: min_rtt(&info),
        rtt,
        rate: u64::from_ne_bytes(std::array::from_fn(|i| [low, high].as_flattened()[i])),
        cwnd: info[SND_CWND].saturating_mul(info[SND_MSS]),
        outstanding: info[UNACKED].saturating_mul(info[SND_MSS]).saturating_add(info[NOTSENT_BYTES]),
        sent: info[DATA_SEGS_OUT],
        lost: info[TOTAL_RETRANS].saturating_sub(info[DSACK_DUPS]),
        unread: 0,
        mtu: Some(info[PMTU]).filter(|bytes| *bytes >= LEAST_PMTU),
    })
}

/// What the hosts of a connection have negotiated, and the first measurement between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Timestamps (RFC 7323).
    pub timestamps: bool,
    /// Selective acknowledgements (RFC 2018).
    pub sack: bool,
    /// The MSS in bytes that the host has announced, or less if the path is narrower.
    pub mss: u16,
    /// Minimum round-trip time of the last five minutes. `None` if not measured.
    pub min_rtt: Option<Duration>,
}

impl Agreed {
    /// Returns whether nothing has to be left out of what Linux offers another host, if both are to be spliced.
    pub fn is_all(&self) -> bool {
        self.timestamps && self.sack
    }
}

/// Returns what was negotiated (TCP_INFO).
pub fn agreed(fd: impl AsFd) -> io::Result<Agreed> {
    const TIMESTAMPS: u8 = 1; // TCPI_OPT_TIMESTAMPS
    const SACK: u8 = 2; // TCPI_OPT_SACK
    const TIMESTAMP_BYTES: u32 = 12; // of the option, in each segment: TCPOLEN_TSTAMP_ALIGNED
    const SND_MSS: usize = 4; // without the bytes of options
    let info: [u32; MIN_RTT + 1] = get_raw(fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO)?;
    let options = info[1].to_ne_bytes()[1];
    let timestamps = options & TIMESTAMPS != 0;
    let mss = info[SND_MSS] + if timestamps { TIMESTAMP_BYTES } else { 0 };
    let mss = mss.try_into().unwrap_or(u16::MAX);
    Ok(Agreed { timestamps, sack: options & SACK != 0, mss, min_rtt: min_rtt(&info) })
}

/// Returns the time since a segment of the host was processed (TCP_INFO).
pub fn silent_for(fd: impl AsFd) -> io::Result<Duration> {
    const LAST_DATA_RECV: usize = 13; // milliseconds
    const LAST_ACK_RECV: usize = 14;
    let info: [u32; LAST_ACK_RECV + 1] = get_raw(fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO)?;
    Ok(Duration::from_millis(info[LAST_DATA_RECV].min(info[LAST_ACK_RECV]).into()))
}

/// Returns whether a connected socket still has its connection: until then, no other connection has its addresses.
pub fn has_connection(fd: impl AsFd) -> bool {
    const CLOSED: u8 = 7;
    state(fd.as_fd()).is_some_and(|state| state != CLOSED)
}

/// Returns whether the kernel would close the socket without a word, even if it was told to reset its host: both have sent their
/// ends (RFC 9293, 3.10.5). The host may not have got everything.
pub fn closes_mutely(fd: impl AsFd) -> bool {
    const LAST_ACK: u8 = 9;
    const CLOSING: u8 = 11;
    state(fd.as_fd()).is_some_and(|state| matches!(state, LAST_ACK | CLOSING))
}

/// Returns the state of a socket, as <net/tcp_states.h> numbers it.
fn state(fd: BorrowedFd<'_>) -> Option<u8> {
    // the first byte of struct tcp_info is tcpi_state
    let info: io::Result<[u32; 2]> = get_raw(fd, libc::IPPROTO_TCP, libc::TCP_INFO);
    info.ok().map(|info| info[0].to_ne_bytes()[0])
}

/// What the kernel has counted of a connection's sending (TCP_INFO).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SenderFacts {
    /// Segments sent again.
    pub retransmitted: u32,
    /// Retransmission timeouts; 0 before Linux 6.7, which counts them first.
    pub timeouts: u32,
}

/// Returns what the kernel has counted of a connection's sending.
pub fn sender_facts(fd: impl AsFd) -> io::Result<SenderFacts> {
    const TOTAL_RTO: usize = 60; // the first half of it
    let info: [u32; TOTAL_RTO + 1] = get_raw(fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO)?;
    let [a, b, ..] = info[TOTAL_RTO].to_ne_bytes();
    Ok(SenderFacts { retransmitted: info[TOTAL_RETRANS], timeouts: u16::from_ne_bytes([a, b]).into() })
}

fn get_raw<const N: usize>(fd: BorrowedFd<'_>, level: libc::c_int, option: libc::c_int) -> io::Result<[u32; N]> {
    let mut values = [0; N];
    let mut size = size_of_val(&values) as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes, which the array has.
    let r = unsafe { libc::getsockopt(fd.as_raw_fd(), level, option, values.as_mut_ptr().cast(), &raw mut size) };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(values) }
}

const SO_BUF_LOCK: libc::c_int = 72; // <asm-generic/socket.h>
const TCP_REPAIR_WINDOW: libc::c_int = 29; // <linux/tcp.h>; libc lacks it

/// Maximum size in bytes of a receive buffer that is requested. A host that uses a larger promised
/// window fills the buffer only if nobody reads; data that does not fit is dropped, and sent again.
const MOST_BUFFERED: u32 = 64 << 20;

/// State with which a connection continues in a new socket. Sequence numbers
/// and timestamps as on the wire, in host byte order; windows in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Restore {
    /// Our address and port.
    pub local: SocketAddr,
    /// Address and port of the host.
    pub remote: SocketAddr,
    /// The next sequence number to send; everything before it is acknowledged.
    pub next_out: u32,
    /// The next sequence number expected.
    pub next_in: u32,
    /// The window that the host has announced. A larger value would overrun it.
    pub window: u32,
    /// The window that was announced to the host. With a smaller value, its data would be dropped (RFC 9293, 3.8.6).
    pub promised: u32,
    /// MSS that the host announced, in bytes.
    pub mss: u16,
    /// Window scales as shifts: the host's and ours. `None`: not negotiated.
    pub wscale: Option<(u8, u8)>,
    /// Whether selective acknowledgements were negotiated.
    pub sack: bool,
    /// Lower limit of the next TSval, if timestamps were negotiated.
    pub tsval: Option<u32>,
    /// Whether `local` is not an address of this machine.
    pub transparent: bool,
}

impl Restore {
    /// State of a socket that only ends its connection, whatever its numbers. Its address may no longer belong to this machine.
    pub(crate) fn mute(leg: &Tuple) -> Restore {
        Restore {
            local: leg.local,
            remote: leg.remote,
            next_out: 0,
            next_in: 0,
            window: 0,
            promised: 0,
            mss: 536,
            wscale: None,
            sack: false,
            tsval: None,
            transparent: true,
        }
    }
}

#[repr(C)]
struct RepairOption {
    code: u32,
    value: u32,
}

#[repr(C)]
struct RepairWindow {
    snd_wl1: u32,
    snd_wnd: u32,
    max_window: u32,
    rcv_wnd: u32,
    rcv_wup: u32,
}

fn set_raw<T>(fd: BorrowedFd<'_>, option: libc::c_int, values: &[T]) -> io::Result<()> {
    // SAFETY: the kernel reads size_of_val(values) bytes of initialized plain data.
    let r = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            values.as_ptr().cast(),
            size_of_val(values) as libc::socklen_t,
        )
    };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Has a socket in repair mode accept `bytes` more after those that it has received,
/// since its host was promised them while the socket was parked.
pub fn make_room(fd: impl AsFd, bytes: u32) -> io::Result<()> {
    let fd = fd.as_fd();
    let mut window = repair_window(fd)?;
    let (next, _) = received(fd)?;
    window.rcv_wnd = window.rcv_wnd.max(next.wrapping_sub(window.rcv_wup).saturating_add(bytes));
    set_raw(fd, TCP_REPAIR_WINDOW, &[window])?;
    buffer(fd, bytes)
}

fn repair_window(fd: BorrowedFd<'_>) -> io::Result<RepairWindow> {
    let [snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup] = get_raw(fd, libc::IPPROTO_TCP, TCP_REPAIR_WINDOW)?;
    Ok(RepairWindow { snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup })
}

/// Makes the receive buffer large enough for a window. Afterwards the kernel may change it.
fn buffer(fd: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    // the kernel doubles the size, for the overhead of packets
    if bytes > getsockopt(&fd, sockopt::RcvBuf)? as u32 / 2 {
        setsockopt(&fd, sockopt::RcvBufForce, &(bytes.min(MOST_BUFFERED) as usize))?;
        set_int(fd, libc::SOL_SOCKET, SO_BUF_LOCK, 0)?;
    }
    Ok(())
}

/// Has a socket in repair mode send timestamps from `tsval` on, or from the next one.
pub(crate) fn set_clock(socket: impl AsFd, tsval: u32) -> io::Result<()> {
    // bit 0 would switch the socket to microseconds
    set_int(socket, libc::IPPROTO_TCP, libc::TCP_TIMESTAMP, (tsval.wrapping_add(1) & !1) as libc::c_int)
}

/// Creates an established socket in the middle of its connection with TCP_REPAIR. It stays in repair mode, and nothing is sent.
pub fn restore(r: &Restore) -> io::Result<OwnedFd> {
    // <linux/tcp.h>
    const RECV_QUEUE: libc::c_int = 1;
    const SEND_QUEUE: libc::c_int = 2;
    const OPT_MSS: u32 = 2;
    const OPT_WSCALE: u32 = 3;
    const OPT_SACK: u32 = 4;
    const OPT_TIMESTAMP: u32 = 8;

    let family = if r.remote.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let s = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)?;
    Repair::On.set(&s)?;
    if r.transparent {
        set_transparent(&s, r.local.is_ipv6())?;
    }
    bind(s.as_raw_fd(), &SockaddrStorage::from(r.local))?;
    for (queue, seq) in [(SEND_QUEUE, r.next_out), (RECV_QUEUE, r.next_in)] {
        set_int(&s, libc::IPPROTO_TCP, libc::TCP_REPAIR_QUEUE, queue)?;
        set_int(&s, libc::IPPROTO_TCP, libc::TCP_QUEUE_SEQ, seq as libc::c_int)?;
    }
    set_int(&s, libc::SOL_SOCKET, libc::SO_OOBINLINE, 1)?; // so that reads agree with sequence numbers
    connect(s.as_raw_fd(), &SockaddrStorage::from(r.remote))?;
    let mut options = vec![RepairOption { code: OPT_MSS, value: r.mss.into() }];
    if let Some((snd, rcv)) = r.wscale {
        options.push(RepairOption { code: OPT_WSCALE, value: u32::from(snd) | u32::from(rcv) << 16 });
    }
    if r.sack {
        options.push(RepairOption { code: OPT_SACK, value: 0 });
    }
    if let Some(tsval) = r.tsval {
        options.push(RepairOption { code: OPT_TIMESTAMP, value: 0 });
        set_clock(&s, tsval)?;
    }
    set_raw(s.as_fd(), libc::TCP_REPAIR_OPTIONS, &options)?;
    let w = RepairWindow {
        snd_wl1: r.next_in,
        snd_wnd: r.window,
        max_window: r.window,
        rcv_wnd: r.promised,
        rcv_wup: r.next_in,
    };
    set_raw(s.as_fd(), TCP_REPAIR_WINDOW, &[w])?;
    buffer(s.as_fd(), r.promised)?;
    Ok(s)
}

/// Closes a socket in repair mode with a reset instead of a FIN (RFC 9293, 3.10.5: ABORT). The host may have received more
/// than it was seen to acknowledge, and ignores a reset below that (RFC 5961, 3.2). So it is sent a probe first. When the
/// answer arrives, there is no socket any more, and the stack sends a reset with exactly the number acknowledged.
pub(crate) fn reset(s: OwnedFd) -> io::Result<()> {
    setsockopt(&s, Linger, &libc::linger { l_onoff: 1, l_linger: 0 })?;
    Repair::Probe.set(&s)
}

#[test]
#[ignore = "root"]
fn a_new_socket_has_room_for_what_was_promised() {
    for (promised, room) in [(65_535, 65_536), (3_000_000, 3_000_000), (65_535 << 14, MOST_BUFFERED)] {
        let s = restore(&Restore {
            local: ([127, 0, 0, 1], 0).into(),
            remote: ([127, 0, 0, 2], 9).into(),
            next_out: 1,
            next_in: 1,
            window: 1000,
            promised,
            mss: 1460,
            wscale: Some((7, 14)),
            sack: true,
            tsval: None,
            transparent: false,
        })
        .expect("CAP_NET_ADMIN");
        assert!(getsockopt(&s, sockopt::RcvBuf).unwrap() >= 2 * room as usize, "{promised}");
        assert!(getsockopt(&s, sockopt::RcvBuf).unwrap() <= 2 * MOST_BUFFERED as usize);
        let [locked] = get_raw::<1>(s.as_fd(), libc::SOL_SOCKET, SO_BUF_LOCK).unwrap();
        assert_eq!(locked, 0, "the kernel may make it larger still");
    }
}
