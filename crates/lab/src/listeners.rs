//! The TCP ports on which sockets listen, as sock_diag(7) tells them. /proc/net/tcp would walk through the table of all
//! connections of the machine, which takes milliseconds, and all of a processor where somebody waits for a listener.

use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::libc::{AF_INET, AF_INET6, IPPROTO_TCP, NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};

/// Size in bytes of `struct nlmsghdr`, and of that and `struct inet_diag_req_v2` (linux/netlink.h, linux/inet_diag.h).
const HEADER: usize = 16;
const REQUEST: usize = HEADER + 56;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// Of net/tcp_states.h.
const TCP_LISTEN: u32 = 10;

/// The ports of the caller's network namespace.
pub(crate) fn ports() -> nix::Result<Vec<u16>> {
    let mut ports = Vec::new();
    for family in [AF_INET, AF_INET6] {
        let netlink =
            socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkSockDiag)?;
        let mut request = [0; REQUEST];
        request[..4].copy_from_slice(&(REQUEST as u32).to_ne_bytes());
        request[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        request[6..8].copy_from_slice(&((NLM_F_REQUEST | NLM_F_DUMP) as u16).to_ne_bytes());
        (request[HEADER], request[HEADER + 1]) = (family as u8, IPPROTO_TCP as u8);
        request[HEADER + 4..][..4].copy_from_slice(&(1u32 << TCP_LISTEN).to_ne_bytes());
        send(netlink.as_raw_fd(), &request, MsgFlags::empty())?;
        let mut answer = [0; 32 * 1024];
        'dump: loop {
            let n = recv(netlink.as_raw_fd(), &mut answer, MsgFlags::empty())?;
            let mut rest = &answer[..n];
            while let Some((length, kind)) = head(rest) {
                match i32::from(kind) {
                    NLMSG_DONE => break 'dump,
                    NLMSG_ERROR => return Err(Errno::EOPNOTSUPP),
                    // behind family, state, timer and retransmissions
                    _ => ports.extend(rest.get(HEADER + 4..HEADER + 6).map(|p| u16::from_be_bytes([p[0], p[1]]))),
                }
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            }
        }
    }
    Ok(ports)
}

/// Length and kind of the message at the beginning.
fn head(bytes: &[u8]) -> Option<(usize, u16)> {
    let (length, kind) = (bytes.get(..4)?.try_into().ok()?, bytes.get(4..6)?.try_into().ok()?);
    Some((u32::from_ne_bytes(length) as usize, u16::from_ne_bytes(kind))).filter(|(length, _)| *length >= HEADER)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn listeners_are_told_and_connections_are_not() {
        for at in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(at).unwrap();
            let port = listener.local_addr().unwrap().port();
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let all = ports().unwrap();
            assert!(all.contains(&port) && !all.contains(&client.local_addr().unwrap().port()), "{all:?}");
            drop(listener);
            assert!(!ports().unwrap().contains(&port));
        }
    }
}
