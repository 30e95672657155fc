//! Ports that are opened for one client: any, or those that a firewall lets through.

use crate::access::PortRange;
use std::{
    io,
    net::SocketAddr,
    sync::atomic::{AtomicU16, Ordering::Relaxed},
};

/// Ports tried: of a range that is nine tenths full, one of these is free in all but one case of thousands.
const TRIES: u16 = 100;

/// Where the last search began, so that the next one begins elsewhere.
static TURN: AtomicU16 = AtomicU16::new(0);

/// Opens something at this address, with a port of the range, or with any port.
pub(super) fn within<T>(
    range: Option<PortRange>,
    at: SocketAddr,
    open: impl Fn(SocketAddr) -> io::Result<T>,
) -> io::Result<T> {
    let with = |port| {
        let mut at = at;
        at.set_port(port);
        open(at)
    };
    let Some(PortRange { first, last }) = range else { return with(0) };
    let count = u32::from(last - first) + 1;
    let begin = u32::from(TURN.fetch_add(1, Relaxed));
    for n in 0..count.min(TRIES.into()) {
        let port = u32::from(first) + (begin + n) % count;
        match with(u16::try_from(port).unwrap_or(first)) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {}
            done => return done,
        }
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, "no free port in the range: widen `ports`"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn a_range_is_used_to_its_last_port() {
        let open = |at: SocketAddr| UdpSocket::bind(at);
        let at = SocketAddr::from(([127, 0, 0, 1], 9));
        let any = within(None, at, open).unwrap();
        let first = any.local_addr().unwrap().port();
        assert!(first != 9);
        drop(any);
        let range = PortRange { first, last: first };
        let only = within(Some(range), at, open).unwrap();
        assert_eq!(only.local_addr().unwrap().port(), first);
        assert_eq!(within(Some(range), at, open).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }
}
