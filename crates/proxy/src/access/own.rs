//! Addresses of this machine. Its services trust whoever comes from there, and a connection to its own listener comes back.

use crate::{access::guarded_ranges::faces, target::Target};
use longsplice_engine::is_local;
use std::{
    collections::{BTreeMap, HashSet},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Name of what guards such addresses, in the log.
pub const NAME: &str = "own";

/// How long an address counts as another machine's without being asked about again. HTTP asks for each request, and an answer
/// takes four system calls. An address that this machine gets is guarded that much later.
const OTHERS_FOR: Duration = Duration::from_secs(1);
/// Addresses remembered: as many as are in use within that time by a busy proxy, in some 50 KB. Others are asked about.
const OTHERS: usize = 1024;

/// Addresses of other machines, with the time at which the kernel said so.
static KNOWN: Mutex<BTreeMap<IpAddr, Instant>> = Mutex::new(BTreeMap::new());

/// Returns whether the address, or one that is embedded in it, is one of this machine now. If the kernel does not tell, it is.
pub fn is_own(ip: IpAddr) -> bool {
    let now = Instant::now();
    let others = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if others().get(&ip).is_some_and(|at| now.saturating_duration_since(*at) < OTHERS_FOR) {
        return false;
    }
    let own = faces(ip).any(|ip| is_local(ip).unwrap_or_else(|_| may_be_bound(ip)));
    if !own {
        let mut others = others();
        if others.len() >= OTHERS {
            others.retain(|_, at| now.saturating_duration_since(*at) < OTHERS_FOR);
        }
        if others.len() < OTHERS {
            others.insert(ip, now);
        }
    }
    own
}

/// Without netlink, bind(2) tells. Where programs may bind foreign addresses (net.ipv4.ip_nonlocal_bind), all count as own.
fn may_be_bound(ip: IpAddr) -> bool {
    !UdpSocket::bind((ip, 0)).is_err_and(|e| e.kind() == io::ErrorKind::AddrNotAvailable)
}

/// The listening sockets of this process, with the targets of plugs: several, if they have a pool.
#[derive(Debug, Default)]
pub(crate) struct Listening(pub Vec<(SocketAddr, Vec<Target>)>);

impl Listening {
    /// Returns whether a connection from the listener `from` to the server `to` would come back to `from`: at once, or by way of
    /// our plugs. `known`: the addresses of a plug's target.
    pub fn leads_back(&self, from: SocketAddr, to: SocketAddr, known: impl Fn(&Target) -> Vec<SocketAddr>) -> bool {
        let (mut seen, mut left) = (HashSet::new(), vec![to]);
        while let Some(to) = left.pop() {
            let Some((listen, targets)) = self.at(to) else { continue };
            if *listen == from {
                return true;
            }
            if seen.insert(*listen) {
                left.extend(targets.iter().flat_map(&known));
            }
        }
        false
    }

    /// Returns the listener that accepts connections to this address.
    fn at(&self, to: SocketAddr) -> Option<&(SocketAddr, Vec<Target>)> {
        // The kernel takes a connection to the unspecified address for one to loopback.
        let ip = match to.ip().to_canonical() {
            IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv6Addr::LOCALHOST.into(),
            ip => ip,
        };
        let here = |listen: &SocketAddr| listen.port() == to.port() && listen.is_ipv4() == ip.is_ipv4();
        let exact = self.0.iter().find(|(listen, _)| here(listen) && listen.ip() == ip);
        let any = || self.0.iter().find(|(listen, _)| here(listen) && listen.ip().is_unspecified() && is_own(ip));
        exact.or_else(any)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(addr: &str) -> SocketAddr {
        addr.parse().unwrap()
    }

    #[test]
    fn loopback_is_own_whatever_it_is_wrapped_in() {
        for ip in ["127.0.0.1", "127.1.2.3", "64:ff9b::127.0.0.1"] {
            assert!(is_own(ip.parse().unwrap()), "{ip}");
        }
        for ip in ["192.0.2.1", "2001:db8::1", "64:ff9b::192.0.2.1"] {
            assert!(!is_own(ip.parse().unwrap()), "{ip}");
            assert!(!may_be_bound(ip.parse().unwrap()), "{ip}");
        }
        assert!(may_be_bound(Ipv4Addr::LOCALHOST.into()));
    }

    #[test]
    fn ways_back() {
        let plug = |listen, target: &str| (at(listen), target.split(' ').map(|t| t.parse().unwrap()).collect());
        let all = Listening(vec![
            (at("0.0.0.0:1080"), Vec::new()),
            plug("127.0.0.1:1", "127.0.0.2:2"),
            plug("0.0.0.0:2", "name:3"),
            plug("127.0.0.1:3", "127.0.0.1:1"),
            plug("127.0.0.1:4", "127.0.0.1:1"),
            plug("[::1]:5", "127.0.0.1:1080"),
            plug("[::1]:6", "192.0.2.1:1 127.0.0.1:1080"),
        ]);
        let known = |target: &Target| match target.to_string().as_str() {
            "name:3" => vec![at("192.0.2.1:3"), at("127.0.0.1:3")],
            other => vec![at(other)],
        };
        for (from, to, want) in [
            ("0.0.0.0:1080", "127.0.0.9:1080", true),
            ("0.0.0.0:1080", "0.0.0.0:1080", true),
            ("0.0.0.0:1080", "192.0.2.1:1080", false),
            ("0.0.0.0:1080", "[::1]:1080", false),
            ("0.0.0.0:1080", "127.0.0.1:1081", false),
            ("127.0.0.1:1", "127.0.0.2:2", true),
            ("0.0.0.0:2", "127.0.0.1:3", true),
            ("127.0.0.1:3", "127.0.0.1:1", true),
            ("127.0.0.1:4", "127.0.0.1:1", false), // the others are in a circle: they are refused there
            ("[::1]:5", "127.0.0.1:1080", false),
            ("0.0.0.0:1080", "[::1]:6", true),
        ] {
            assert_eq!(all.leads_back(at(from), at(to), known), want, "{from} to {to}");
        }
    }
}
