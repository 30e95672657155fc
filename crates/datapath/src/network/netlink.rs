//! Netlink: devices, neighbours and routes, with notifications of changes (rtnetlink(7)); requests to netfilter and sock_diag.

use nix::{
    libc,
    sys::socket::{
        AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt, socket,
        sockopt::RcvBufForce,
    },
};
use std::{
    io,
    net::IpAddr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

/// Size of `struct nlmsghdr` in bytes.
const HEADER: usize = 16;
/// Size of the receive buffer in bytes: more than the kernel puts into one datagram (NLMSG_GOODSIZE, or the size of the buffer).
const ANSWER: usize = 32768;

/// A message without its header: its type and its body.
pub(crate) type Message<'a> = (u16, &'a [u8]);

/// Returns the messages of a datagram.
pub(crate) fn messages(mut datagram: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let length = u32::from_ne_bytes(*datagram.first_chunk()?) as usize;
        let message = datagram.get(..length).filter(|m| m.len() >= HEADER)?;
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([message[4], message[5]]), &message[HEADER..]))
    })
}

/// Returns kinds and values of a row of `struct rtattr`, each of which begins at a multiple of four.
pub(crate) fn attributes(mut row: &[u8]) -> Vec<(u16, &[u8])> {
    const FLAGS: u16 = 0xc000; // NLA_F_NESTED, NLA_F_NET_BYTEORDER
    let mut all = Vec::new();
    while let Some(&[a, b, c, d]) = row.first_chunk() {
        let length = usize::from(u16::from_ne_bytes([a, b]));
        let Some(value) = row.get(4..length) else { break };
        all.push((u16::from_ne_bytes([c, d]) & !FLAGS, value));
        row = row.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    all
}

pub(crate) fn find<'a>(all: &[(u16, &'a [u8])], wanted: u16) -> Option<&'a [u8]> {
    all.iter().find(|(kind, _)| *kind == wanted).map(|(_, value)| *value)
}

/// Reads a 32-bit number in host byte order.
pub(crate) fn number(bytes: &[u8]) -> Option<u32> {
    bytes.first_chunk().map(|b| u32::from_ne_bytes(*b))
}

/// Reads an address of four or sixteen bytes.
pub(crate) fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = |b: [u8; 4]| IpAddr::from(b);
    bytes.try_into().map(v4).ok().or_else(|| <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from))
}

/// Returns the bytes of an address, and its family.
pub(crate) fn octets(address: IpAddr) -> (Vec<u8>, u8) {
    match address {
        IpAddr::V4(a) => (a.octets().to_vec(), libc::AF_INET as u8),
        IpAddr::V6(a) => (a.octets().to_vec(), libc::AF_INET6 as u8),
    }
}

/// Builds a row of attributes, as [`attributes`] reads it.
pub(crate) fn row(attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut row = Vec::new();
    for (kind, value) in attributes {
        row.extend((4 + value.len() as u16).to_ne_bytes());
        row.extend(kind.to_ne_bytes());
        row.extend(*value);
        row.resize(row.len().next_multiple_of(4), 0);
    }
    row
}

/// Builds a request from the structure `body` of its type, and attributes. NLM_F_REQUEST is added to `flags`.
pub(crate) fn request(kind: u16, flags: i32, body: &[u8], attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut m = vec![0; HEADER];
    m[4..6].copy_from_slice(&kind.to_ne_bytes());
    m[6..8].copy_from_slice(&((libc::NLM_F_REQUEST | flags) as u16).to_ne_bytes());
    m.extend(body);
    m.extend(row(attributes));
    let length = m.len() as u32;
    m[..4].copy_from_slice(&length.to_ne_bytes());
    m
}

/// Reads `struct nlmsgerr`, which begins with the negative errno; 0 is an acknowledgement.
fn error(body: &[u8]) -> io::Result<()> {
    match body.first_chunk().map(|b| -i32::from_ne_bytes(*b)) {
        Some(0) => Ok(()),
        Some(error) => Err(io::Error::from_raw_os_error(error)),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// A socket in the network namespace in which it was created.
#[derive(Debug)]
pub(crate) struct Netlink {
    socket: OwnedFd,
    datagram: Vec<u8>,
}

impl Netlink {
    /// Opens rtnetlink. `groups`: RTNLGRP_* of the notifications to receive.
    pub fn open(groups: &[u32]) -> io::Result<Netlink> {
        let Netlink { socket, datagram } = Netlink::to(SockProtocol::NetlinkRoute)?;
        if !groups.is_empty() {
            // without it, notifications are lost somewhat earlier, and everything is read again
            let _ = setsockopt(&socket, RcvBufForce, &(1 << 20));
            let bits = groups.iter().fold(0, |bits, group| bits | 1 << (group - 1));
            bind(socket.as_raw_fd(), &NetlinkAddr::new(0, bits))?;
        }
        Ok(Netlink { socket, datagram })
    }

    /// Opens nfnetlink.
    pub fn netfilter() -> io::Result<Netlink> {
        Netlink::to(SockProtocol::NetlinkNetFilter)
    }

    /// Opens generic netlink.
    pub fn generic() -> io::Result<Netlink> {
        Netlink::to(SockProtocol::NetlinkGeneric)
    }

    /// Opens sock_diag.
    pub fn sockets() -> io::Result<Netlink> {
        Netlink::to(SockProtocol::NetlinkSockDiag)
    }

    fn to(protocol: SockProtocol) -> io::Result<Netlink> {
        let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
        Ok(Netlink { socket, datagram: vec![0; ANSWER] })
    }

    pub fn into_socket(self) -> OwnedFd {
        self.socket
    }

    pub fn send(&self, requests: &[u8]) -> io::Result<()> {
        send(self.socket.as_raw_fd(), requests, MsgFlags::empty()).map(drop).map_err(io::Error::from)
    }

    /// Receives the next datagram.
    pub fn receive(&mut self, flags: MsgFlags) -> io::Result<&[u8]> {
        let n = recv(self.socket.as_raw_fd(), &mut self.datagram, flags)?;
        Ok(&self.datagram[..n])
    }

    /// Sends a request for one object. Returns the body of the answer, which is empty for an acknowledgement.
    pub fn ask(&mut self, request: &[u8]) -> io::Result<Vec<u8>> {
        self.send(request)?;
        let (kind, body) = messages(self.receive(MsgFlags::empty())?).next().ok_or(io::ErrorKind::InvalidData)?;
        if kind == libc::NLMSG_ERROR as u16 {
            return error(body).map(|()| Vec::new());
        }
        Ok(body.to_vec())
    }

    /// Requests all objects of a kind. `body`: as in [`request`].
    pub fn dump(
        &mut self,
        kind: u16,
        body: &[u8],
        attributes: &[(u16, &[u8])],
        mut f: impl FnMut(Message<'_>),
    ) -> io::Result<()> {
        self.send(&request(kind, libc::NLM_F_DUMP, body, attributes))?;
        loop {
            for (kind, body) in messages(self.receive(MsgFlags::empty())?) {
                match i32::from(kind) {
                    libc::NLMSG_DONE => return Ok(()),
                    libc::NLMSG_ERROR => return error(body),
                    _ => f((kind, body)),
                }
            }
        }
    }
}

impl AsFd for Netlink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_end_where_their_row_does() {
        let row = [[6, 0, 1, 0], [7, 8, 0, 0], [4, 0, 2, 0x80], [9, 0, 3, 0], [1, 2, 3, 4]].concat();
        assert_eq!(attributes(&row), [(1, &[7, 8][..]), (2, &[])], "the last one claims a byte too many");
        assert_eq!(attributes(&[3, 0, 1, 0, 5, 5, 5, 5]), []);
        assert_eq!(attributes(&[]), []);
    }

    #[test]
    fn what_is_asked_is_read_alike() {
        let one = request(7, 0, &[1, 2, 3, 4], &[(5, &[6, 7])]);
        let two = request(8, libc::NLM_F_DUMP, &[], &[]);
        let both = [&one[..], &two, &[200, 0, 0, 0]].concat();
        let all: Vec<_> = messages(&both).collect();
        assert_eq!(all, [(7, &[1, 2, 3, 4, 6, 0, 5, 0, 6, 7, 0, 0][..]), (8, &[])], "the last one is cut off");
        assert_eq!(attributes(&all[0].1[4..]), [(5, &[6, 7][..])]);
    }
}
