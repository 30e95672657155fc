//! Datagrams in batches: `recvmmsg` and `sendmmsg`, and UDP segmentation offload both ways (udp(7)). One call passes up to
//! [`BATCH`] datagrams, or, joined by the kernel, 64 times as many.
//!
//! The buffers belong to the thread: they are used within one call, and no association has any of its own.

use nix::{
    cmsg_space,
    errno::Errno,
    sys::socket::{
        ControlMessage, ControlMessageOwned, MsgFlags, MultiHeaders, SockaddrStorage, recvmmsg, sendmmsg, sendmsg,
        setsockopt, sockopt,
    },
};
use socket2::{Domain, Protocol, Socket, Type};
use std::{
    io::{self, IoSlice, IoSliceMut},
    net::{SocketAddr, UdpSocket},
    os::fd::{AsRawFd, RawFd},
};

/// Datagrams per call: more save little, since a call then is a small part of their cost.
const BATCH: usize = 32;
/// Size of a buffer: the longest datagram, and the longest series of joined ones. Two megabytes per thread in all.
const BUFFER: usize = 65536;
/// Datagrams that the kernel cuts from one (UDP_MAX_SEGMENTS of older kernels).
const SEGMENTS: usize = 64;
/// Bytes that the kernel takes for a series, with room for the headers of IP.
const SERIES: usize = 65_000;
/// Size in bytes of a socket's queues, if the system allows so much: a hundredth of a second at a gigabit per second.
const QUEUE: usize = 1 << 20;

/// Buffers for one batch.
pub(super) struct Buffers(Vec<Box<[u8]>>);

impl Buffers {
    pub fn new() -> Buffers {
        Buffers((0..BATCH).map(|_| vec![0; BUFFER].into()).collect())
    }
}

/// Datagrams of one size from one source, in a buffer; only the last may be shorter.
#[derive(Debug, Clone, Copy)]
struct Series {
    source: SocketAddr,
    length: usize,
    size: usize,
}

/// A datagram that has come.
#[derive(Debug, Clone, Copy)]
pub(super) struct Received<'a> {
    pub source: SocketAddr,
    pub bytes: &'a [u8],
}

/// A datagram to send: its header, if it has one, and its data. `to`: none if the socket is connected.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outgoing<'a> {
    pub to: Option<SocketAddr>,
    pub header: &'a [u8],
    pub data: &'a [u8],
}

impl Outgoing<'_> {
    fn len(&self) -> usize {
        self.header.len() + self.data.len()
    }
}

/// What has become of a batch.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sent {
    pub datagrams: u64,
    /// Bytes of data, without headers.
    pub bytes: u64,
    /// Datagrams that the kernel did not take: no room, no route, too long, or a firewall.
    pub dropped: u64,
}

/// Opens a socket for datagrams.
pub(super) fn open(at: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(at), Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
    if at.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    // Both are best effort: without CAP_NET_ADMIN, the system's limit applies; without GRO, each datagram comes alone.
    if setsockopt(&socket, sockopt::RcvBufForce, &QUEUE).is_err() {
        let _ = socket.set_recv_buffer_size(QUEUE);
    }
    if setsockopt(&socket, sockopt::SndBufForce, &QUEUE).is_err() {
        let _ = socket.set_send_buffer_size(QUEUE);
    }
    let _ = setsockopt(&socket, sockopt::UdpGroSegment, &true);
    socket.bind(&at.into())?;
    Ok(socket.into())
}

/// Receives what waits, one batch at most, and returns it, and whether more may wait: datagrams in their order. `WouldBlock` if there
/// is nothing.
pub(super) fn receive<'b>(socket: &impl AsRawFd, buffers: &'b mut Buffers) -> io::Result<(Vec<Received<'b>>, bool)> {
    let (mut series, mut messages): (Vec<(usize, Series)>, _) = (Vec::with_capacity(BATCH), 0);
    {
        let mut slices: Vec<[IoSliceMut<'_>; 1]> = buffers.0.iter_mut().map(|b| [IoSliceMut::new(b)]).collect();
        // anew each time: it is not fit for a second call, which would have no room for control messages
        let mut headers = MultiHeaders::<SockaddrStorage>::preallocate(BATCH, Some(cmsg_space!(i32)));
        let flags = MsgFlags::MSG_DONTWAIT;
        for (number, message) in recvmmsg(socket.as_raw_fd(), &mut headers, &mut slices, flags, None)?.enumerate() {
            messages = number + 1;
            let Some(source) = message.address.as_ref().and_then(address) else { continue };
            let joined = message.cmsgs().ok().into_iter().flatten().find_map(|control| match control {
                ControlMessageOwned::UdpGroSegments(size) => usize::try_from(size).ok().filter(|size| *size > 0),
                _ => None,
            });
            let (length, size) = (message.bytes, joined.unwrap_or(message.bytes));
            series.push((number, Series { source, length, size }));
        }
    }
    let mut received = Vec::with_capacity(series.len());
    for (number, Series { source, length, size }) in series {
        let bytes = &buffers.0[number][..length];
        match bytes.is_empty() {
            true => received.push(Received { source, bytes }), // a datagram may be empty
            false => received.extend(bytes.chunks(size).map(|bytes| Received { source, bytes })),
        }
    }
    Ok((received, messages == BATCH))
}

fn address(storage: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = storage.as_sockaddr_in().map(|v4| SocketAddr::V4((*v4).into()));
    v4.or_else(|| storage.as_sockaddr_in6().map(|v6| SocketAddr::V6((*v6).into())))
}

/// Sends datagrams through one socket. Those to one destination keep their order.
#[derive(Debug)]
pub(super) struct Sender {
    /// Datagrams of at most this size are sent in series. Longer ones than the MTU cannot be, and some devices cannot at all.
    series_up_to: usize,
}

impl Default for Sender {
    fn default() -> Sender {
        Sender { series_up_to: BUFFER }
    }
}

impl Sender {
    /// Never waits: what the kernel does not take is dropped, as a router with a full queue drops it.
    pub fn send(&mut self, socket: &impl AsRawFd, all: &[Outgoing<'_>]) -> Sent {
        let (fd, mut sent) = (socket.as_raw_fd(), Sent::default());
        let (mut from, mut at) = (0, 0);
        while at < all.len() {
            let length = self.series(&all[at..]);
            if length > 1 {
                one_by_one(fd, &all[from..at], &mut sent);
                let series = &all[at..at + length];
                match send_series(fd, series) {
                    Ok(()) => passed(series, &mut sent),
                    Err(errno) => {
                        // too long for the path, or no such offload: never tried again for such sizes
                        if matches!(errno, Errno::EINVAL | Errno::EMSGSIZE | Errno::EIO) {
                            self.series_up_to = series[0].len() - 1;
                        }
                        one_by_one(fd, series, &mut sent);
                    }
                }
                from = at + length;
            }
            at += length;
        }
        one_by_one(fd, &all[from..], &mut sent);
        sent
    }

    /// Returns how many of the first datagrams can be sent as one series.
    fn series(&self, all: &[Outgoing<'_>]) -> usize {
        let size = all[0].len();
        if size == 0 || size > self.series_up_to {
            return 1;
        }
        let (mut count, mut bytes) = (1, size);
        for next in all[1..].iter().take(SEGMENTS - 1) {
            if next.to != all[0].to || next.len() > size || next.len() == 0 || bytes + next.len() > SERIES {
                break;
            }
            (count, bytes) = (count + 1, bytes + next.len());
            if next.len() < size {
                break;
            }
        }
        count
    }
}

fn send_series(fd: RawFd, series: &[Outgoing<'_>]) -> nix::Result<()> {
    let parts: Vec<IoSlice<'_>> =
        series.iter().flat_map(|one| [IoSlice::new(one.header), IoSlice::new(one.data)]).collect();
    let size = u16::try_from(series[0].len()).map_err(|_| Errno::EMSGSIZE)?;
    let to = series[0].to.map(SockaddrStorage::from);
    sendmsg(fd, &parts, &[ControlMessage::UdpGsoSegments(&size)], MsgFlags::MSG_DONTWAIT, to.as_ref()).map(drop)
}

/// Sends each datagram by itself, [`BATCH`] of them per call.
fn one_by_one(fd: RawFd, all: &[Outgoing<'_>], sent: &mut Sent) {
    let mut left = all;
    let mut reported = false;
    while !left.is_empty() {
        let some = &left[..left.len().min(BATCH)];
        match send_some(fd, some) {
            Ok(count @ 1..) => {
                passed(&some[..count], sent);
                left = &left[count..];
                reported = false;
            }
            // an error of an earlier datagram, reported by the host it was for: this one was not tried yet
            Err(Errno::ECONNREFUSED | Errno::EHOSTUNREACH) if !reported => reported = true,
            Err(Errno::EAGAIN | Errno::ENOBUFS) => {
                sent.dropped += left.len() as u64;
                return;
            }
            Ok(0) | Err(_) => {
                sent.dropped += 1;
                left = &left[1..];
                reported = false;
            }
        }
    }
}

fn send_some(fd: RawFd, some: &[Outgoing<'_>]) -> nix::Result<usize> {
    let parts: Vec<[IoSlice<'_>; 2]> =
        some.iter().map(|one| [IoSlice::new(one.header), IoSlice::new(one.data)]).collect();
    let to: Vec<Option<SockaddrStorage>> = some.iter().map(|one| one.to.map(SockaddrStorage::from)).collect();
    let mut headers = MultiHeaders::<SockaddrStorage>::preallocate(some.len(), None);
    let no_control: [ControlMessage<'_>; 0] = [];
    sendmmsg(fd, &mut headers, &parts, &to, no_control, MsgFlags::MSG_DONTWAIT).map(Iterator::count)
}

fn passed(some: &[Outgoing<'_>], sent: &mut Sent) {
    sent.datagrams += some.len() as u64;
    sent.bytes += some.iter().map(|one| one.data.len() as u64).sum::<u64>();
}
