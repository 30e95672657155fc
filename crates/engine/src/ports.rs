//! Source addresses of our own connections. A released flow has no socket that would keep the kernel from giving its port
//! away, so ports come from a range of our own, and the tables of the data path say which four-tuples live.

use longsplice_datapath::Tuple;
use std::{
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    ops::RangeInclusive,
    sync::atomic::{AtomicU32, Ordering},
};

/// Ports handed out in turn.
#[derive(Debug)]
pub(crate) struct Ports {
    range: RangeInclusive<u16>,
    next: AtomicU32,
}

impl Ports {
    pub fn new(range: RangeInclusive<u16>) -> Ports {
        // Starting anywhere: a restarted process should not meet its predecessor's TIME-WAITs first.
        let start = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |d| d.subsec_nanos() ^ d.as_secs() as u32);
        Ports { range, next: AtomicU32::new(start) }
    }

    /// The next candidate.
    pub fn next(&self) -> u16 {
        let n = u32::from(*self.range.end() - *self.range.start()) + 1;
        self.range.start() + (self.next.fetch_add(1, Ordering::Relaxed) % n) as u16
    }
}

/// The address that the kernel would use towards `server`.
pub(crate) fn source_for(server: SocketAddr) -> io::Result<IpAddr> {
    let any: SocketAddr = if server.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0u16; 8], 0).into() };
    let s = UdpSocket::bind(any)?;
    s.connect(server)?;
    Ok(s.local_addr()?.ip())
}

/// The connection as its leg sees it.
pub(crate) fn tuple(server: SocketAddr, source: IpAddr, port: u16) -> Tuple {
    Tuple { remote: server, local: SocketAddr::new(source, port) }
}
