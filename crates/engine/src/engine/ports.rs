//! Source addresses of our own connections. A released flow has no socket that would keep the kernel from reusing its
//! port. So ports come from a range of our own, and the tables of the data path say which four-tuples are in use.

use crate::sync::lock;
use longsplice_datapath::Tuple;
use nix::sys::socket::{getsockopt, sockopt::IpMtu};
use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    ops::RangeInclusive,
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

/// Time for which the kernel's choice of a source address for a server
/// is cached. A change of routes takes effect within this time.
const FRESH: Duration = Duration::from_secs(1);
/// Maximum number of servers in the cache. At the limit, it is cleared.
const SERVERS: usize = 4096;

/// What the kernel would choose for a connection to a server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usual {
    /// Our address.
    pub source: IpAddr,
    /// MTU in bytes of the path from there, from which the MSS follows that is announced. `None`: not known.
    pub mtu: Option<u32>,
}

/// Ports, and addresses if there are several, assigned in turn.
#[derive(Debug)]
pub(crate) struct Ports {
    range: RangeInclusive<u16>,
    sources: Vec<IpAddr>,
    next: AtomicU32,
    /// Distance from a taken port to the next candidate. It shares no divisor with the length of the
    /// range, and is large, because long-lived ports lie next to each other, as they were assigned.
    leap: u32,
    /// The kernel's choice for each server, and the time of the answer.
    usual: Mutex<HashMap<SocketAddr, (Usual, Instant)>>,
}

impl Ports {
    pub fn new(range: RangeInclusive<u16>, sources: Vec<IpAddr>) -> Ports {
        // Start anywhere: a restarted process should not first meet the TIME-WAITs of the earlier one.
        let start = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |d| d.subsec_nanos() ^ d.as_secs() as u32);
        let leap = leap(length(&range));
        Ports { range, sources, next: AtomicU32::new(start), leap, usual: Mutex::default() }
    }

    /// Returns the next connection's turn.
    pub fn next_turn(&self) -> u32 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns a candidate for a connection to `server`, for which the kernel would use the
    /// address `usual`. In turn, all ports of an address are used, then those of the next address
    /// of the family. After `tries` taken candidates, it is a port from anywhere in the range.
    pub fn candidate(&self, turn: u32, tries: u32, server: SocketAddr, usual: IpAddr) -> Tuple {
        let ports = length(&self.range);
        let n = turn.wrapping_add(tries * self.leap);
        let source = self.nth_source((n / ports) as usize, usual).unwrap_or(usual);
        let port = self.range.start() + (n % ports) as u16;
        Tuple { remote: server, local: SocketAddr::new(source, port) }
    }

    /// Returns one of the configured addresses that matches `usual` in family, and in being loopback or not.
    fn nth_source(&self, n: usize, usual: IpAddr) -> Option<IpAddr> {
        let alike = |s: &&IpAddr| s.is_ipv4() == usual.is_ipv4() && s.is_loopback() == usual.is_loopback();
        let fit = || self.sources.iter().filter(alike);
        fit().nth(n % fit().count().max(1)).copied()
    }

    /// Returns a configured address, if any, for a connection whose port the kernel chooses.
    pub fn named(&self, server: SocketAddr) -> io::Result<Option<IpAddr>> {
        if self.sources.is_empty() {
            return Ok(None);
        }
        let n = self.next.fetch_add(1, Ordering::Relaxed) as usize;
        Ok(self.nth_source(n, self.usual_for(server)?.0.source))
    }

    /// Returns what the kernel would choose towards `server`, and whether it was asked just now.
    pub fn usual_for(&self, server: SocketAddr) -> io::Result<(Usual, bool)> {
        let now = Instant::now();
        if let Some((known, at)) = lock(&self.usual).get(&host(server))
            && now - *at < FRESH
        {
            return Ok((*known, false));
        }
        let asked = ask_kernel(server)?;
        let mut usual = lock(&self.usual);
        if usual.len() >= SERVERS {
            usual.clear();
        }
        usual.insert(host(server), (asked, now));
        Ok((asked, true))
    }

    /// Removes an address that no longer exists from the cache.
    pub fn forget_usual(&self, server: SocketAddr) {
        lock(&self.usual).remove(&host(server));
    }
}

fn length(range: &RangeInclusive<u16>) -> u32 {
    u32::from(*range.end() - *range.start()) + 1
}

/// About three eighths of the range (the golden section): such steps reach every part of the range soon.
fn leap(ports: u32) -> u32 {
    let divides = |n: u32| (2..=n).any(|d| n.is_multiple_of(d) && ports.is_multiple_of(d));
    (1..=ports * 382 / 1000).rev().find(|n| !divides(*n)).unwrap_or(1)
}

/// Returns the address without a port. Link-local addresses differ by their scope.
fn host(mut server: SocketAddr) -> SocketAddr {
    server.set_port(0);
    server
}

/// Asks the kernel what it would choose towards `server`.
fn ask_kernel(server: SocketAddr) -> io::Result<Usual> {
    let any: SocketAddr = if server.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0u16; 8], 0).into() };
    let s = UdpSocket::bind(any)?;
    s.connect(server)?;
    let mtu = getsockopt(&s, IpMtu).ok().and_then(|mtu| u32::try_from(mtu).ok()); // of both families
    Ok(Usual { source: s.local_addr()?.ip(), mtu })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_port_of_every_source_in_turn() {
        let of = |s: &str| s.parse::<IpAddr>().expect("address");
        let ports = Ports::new(100..=102, ["192.0.2.1", "192.0.2.2", "2001:db8::1"].map(of).to_vec());
        let server = "198.51.100.7:80".parse().expect("address");
        let next = |ports: &Ports| ports.candidate(ports.next_turn(), 0, server, of("192.0.2.9")).local;
        let drawn: HashSet<SocketAddr> = (0..6).map(|_| next(&ports)).collect();
        assert_eq!(drawn.len(), 6, "{drawn:?}");
        assert!(drawn.iter().all(|a| a.is_ipv4() && a.ip() != of("192.0.2.9")), "{drawn:?}");
        let none = Ports::new(100..=102, Vec::new());
        assert_eq!(next(&none).ip(), of("192.0.2.9"));
    }

    #[test]
    fn a_row_of_taken_ports_is_soon_left() {
        let (server, usual) = ("198.51.100.7:80".parse().expect("address"), IpAddr::from([192, 0, 2, 9]));
        for length in [1, 2, 4, 255, 256, 2000, 18_432, 50_000] {
            let ports = Ports::new(10_000..=(10_000 + length - 1) as u16, Vec::new());
            let port = |turn, tries| ports.candidate(turn, tries, server, usual).local.port();
            for turn in 0..length {
                let (first, taken) = (port(turn, 0), length * 9 / 10);
                let is_free = |port: u16| (u32::from(port) + length - u32::from(first)) % length >= taken;
                assert!((0..32).any(|tries| is_free(port(turn, tries))), "{length} ports from {first} on");
            }
            let all: HashSet<u16> = (0..length).map(|tries| port(7, tries)).collect();
            assert_eq!(all.len(), length as usize, "one after the other, each is tried");
        }
    }

    #[test]
    fn loopback_servers_are_reached_from_loopback() {
        let of = |s: &str| s.parse::<IpAddr>().expect("address");
        let server = "127.0.0.1:80".parse().expect("address");
        let named =
            |sources: &[&str]| Ports::new(1..=2, sources.iter().map(|s| of(s)).collect()).named(server).unwrap();
        assert_eq!(named(&[]), None);
        assert_eq!(named(&["192.0.2.1", "::1"]), None);
        assert_eq!(named(&["192.0.2.1", "127.0.0.2"]), Some(of("127.0.0.2")));
    }
}
