//! Whether packets can go straight to the other end of a device: rtnetlink knows what a device is, and where its peer is.

use nix::{
    libc,
    sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket},
};
use std::{io, os::fd::AsRawFd};

/// `struct nlmsghdr` and `struct ifinfomsg` are 16 bytes each, `struct rtattr` is 4.
const HEADER: usize = 16;
const ATTRIBUTES: usize = 32;
/// More than a page, which is what the kernel begins with; a virtual function's statistics are not asked for.
const ANSWER: usize = 16384;

/// Why packets cannot be handed to the other end of this device; none: they can.
pub(crate) fn hindrance(index: u32) -> io::Result<Option<&'static str>> {
    let link = ask(index)?;
    let of = attributes(link.get(ATTRIBUTES..).unwrap_or_default());
    let kind = find(&of, libc::IFLA_LINKINFO).and_then(|info| find(&attributes(info), libc::IFLA_INFO_KIND));
    let kind = kind.and_then(|name| name.split(|b| *b == 0).next());
    Ok(if !matches!(kind, Some(b"veth" | b"netkit")) {
        Some("it is no veth: leave it out")
    } else if find(&of, libc::IFLA_LINK_NETNSID).is_none() {
        Some("its other end is in this network namespace: leave it out, or move that end into another")
    } else {
        None
    })
}

/// RTM_GETLINK: the answer, from its `struct nlmsghdr` on.
fn ask(index: u32) -> io::Result<Vec<u8>> {
    let mut request = [0; ATTRIBUTES];
    request[..4].copy_from_slice(&(ATTRIBUTES as u32).to_ne_bytes());
    request[4..6].copy_from_slice(&libc::RTM_GETLINK.to_ne_bytes());
    request[6..8].copy_from_slice(&(libc::NLM_F_REQUEST as u16).to_ne_bytes());
    request[HEADER + 4..HEADER + 8].copy_from_slice(&index.to_ne_bytes());
    talk(&request)
}

/// Asks rtnetlink; the answer, from its `struct nlmsghdr` on, which an error is not.
pub(crate) fn talk(request: &[u8]) -> io::Result<Vec<u8>> {
    let s = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute)?;
    send(s.as_raw_fd(), request, MsgFlags::empty())?;
    let mut answer = vec![0; ANSWER];
    let n = recv(s.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    answer.truncate(n);
    let kind = answer.get(4..6).map(|b| u16::from_ne_bytes([b[0], b[1]])).ok_or(io::ErrorKind::InvalidData)?;
    if kind != libc::NLMSG_ERROR as u16 {
        return Ok(answer);
    }
    // struct nlmsgerr begins with the negative error; 0: an acknowledgement
    match answer.get(HEADER..).and_then(|b| b.first_chunk()).map(|b| -i32::from_ne_bytes(*b)) {
        Some(0) => Ok(answer),
        Some(error) => Err(io::Error::from_raw_os_error(error)),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn find<'a>(all: &[(u16, &'a [u8])], wanted: u16) -> Option<&'a [u8]> {
    all.iter().find(|(kind, _)| *kind == wanted).map(|(_, value)| *value)
}

/// Kinds and values of a row of `struct rtattr`, each of which begins at a multiple of four.
fn attributes(mut row: &[u8]) -> Vec<(u16, &[u8])> {
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
    fn the_loopback_device_has_no_other_end() {
        assert!(hindrance(1).unwrap().unwrap().contains("no veth"));
        assert_eq!(hindrance(0x7fff_ffff).unwrap_err().raw_os_error(), Some(libc::ENODEV));
    }
}
