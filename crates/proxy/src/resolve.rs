//! Resolves a target to a list of addresses, in the order in which to try them.
//!
//! `getaddrinfo` cannot be cancelled: a lookup that exceeds its time limit goes on in its thread.
//! The number of lookups is therefore bounded, and each counts until it has really ended.

use crate::{
    fault::{Fault, Step},
    target::{Host, Target},
};
use std::{io, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{sync::Semaphore, time::timeout};

/// Half of the runtime's threads for blocking calls.
const LOOKUPS_MAX: usize = 256;
/// Maximum number of addresses tried per name. If none of the first ones works, later ones hardly will.
const ADDRESSES_MAX: usize = 8;

/// Resolver of names. Clones share the limit of lookups.
#[derive(Debug, Clone)]
pub(crate) struct Resolver {
    lookups: Arc<Semaphore>,
}

impl Default for Resolver {
    fn default() -> Self {
        Resolver { lookups: Arc::new(Semaphore::new(LOOKUPS_MAX)) }
    }
}

impl Resolver {
    /// Returns the addresses of `target`, at least one, with alternating families.
    pub(crate) async fn resolve(&self, target: &Target, limit: Duration) -> Result<Vec<SocketAddr>, Fault> {
        let name = match &target.host {
            Host::Ip(ip) => return Ok(vec![SocketAddr::new(*ip, target.port)]),
            Host::Name(name) => name.clone(),
        };
        let found = timeout(limit, self.lookup(name, target.port)).await.map_err(|_| Fault::Timeout(Step::Resolve))?;
        let addresses = alternate(found.map_err(Fault::NoAddress)?);
        if addresses.is_empty() {
            return Err(Fault::NoAddress(io::Error::other("the name has none")));
        }
        Ok(addresses)
    }

    async fn lookup(&self, name: String, port: u16) -> io::Result<Vec<SocketAddr>> {
        let permit = self.lookups.clone().acquire_owned().await.map_err(io::Error::other)?;
        let task = tokio::spawn(async move {
            let found = tokio::net::lookup_host((name, port)).await.map(Iterator::collect);
            drop(permit);
            found
        });
        task.await.map_err(io::Error::other)?
    }
}

/// Alternates between the families, starting with that of the first address. The resolver has sorted them by
/// preference (RFC 6724), but the other family should not have to wait for all of the first (RFC 8305, section 4).
fn alternate(found: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let mut distinct: Vec<SocketAddr> = Vec::new();
    for address in found {
        // Also drops scope and flow label, which are meaningless in a name that came over the network.
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        if !distinct.contains(&address) {
            distinct.push(address);
        }
    }
    let first_is_v6 = distinct.first().is_some_and(SocketAddr::is_ipv6);
    let (one, other): (Vec<_>, Vec<_>) = distinct.into_iter().partition(|a| a.is_ipv6() == first_is_v6);
    let mut other = other.into_iter();
    let mut mixed = Vec::new();
    for address in one {
        mixed.push(address);
        mixed.extend(other.next());
    }
    mixed.extend(other);
    mixed.truncate(ADDRESSES_MAX);
    mixed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mixed(found: &[&str]) -> Vec<String> {
        let found = found.iter().map(|a| SocketAddr::new(a.parse().unwrap(), 1)).collect();
        alternate(found).into_iter().map(|a| a.ip().to_string()).collect()
    }

    #[test]
    fn families_alternate() {
        assert_eq!(mixed(&["::1", "::2", "::3", "1.1.1.1"]), ["::1", "1.1.1.1", "::2", "::3"]);
        assert_eq!(mixed(&["1.1.1.1", "1.1.1.2", "::1"]), ["1.1.1.1", "::1", "1.1.1.2"]);
        assert_eq!(mixed(&["1.1.1.1", "::1", "::2", "::3"]), ["1.1.1.1", "::1", "::2", "::3"]);
        assert_eq!(mixed(&[]), Vec::<String>::new());
    }

    #[test]
    fn duplicates_and_the_hundredth_address_are_dropped() {
        assert_eq!(mixed(&["1.1.1.1", "1.1.1.1", "::ffff:1.1.1.1"]), ["1.1.1.1"]);
        let many: Vec<String> = (0..100).map(|i| format!("10.0.0.{i}")).collect();
        assert_eq!(mixed(&many.iter().map(String::as_str).collect::<Vec<_>>()).len(), ADDRESSES_MAX);
    }

    #[tokio::test]
    async fn addresses_need_no_lookup() {
        let resolver = Resolver { lookups: Arc::new(Semaphore::new(0)) };
        let found = resolver.resolve(&"[2001:db8::1]:80".parse().unwrap(), Duration::ZERO).await.unwrap();
        assert_eq!(found, ["[2001:db8::1]:80".parse().unwrap()]);
    }

    #[tokio::test]
    async fn waiting_for_a_lookup_counts_as_looking_up() {
        let resolver = Resolver { lookups: Arc::new(Semaphore::new(0)) };
        let r = resolver.resolve(&"localhost:80".parse().unwrap(), Duration::from_millis(20)).await;
        assert!(matches!(r, Err(Fault::Timeout(Step::Resolve))));
    }

    #[tokio::test]
    async fn localhost() {
        let found =
            Resolver::default().resolve(&"localhost:80".parse().unwrap(), Duration::from_secs(5)).await.unwrap();
        assert!(found.iter().all(|a| a.ip().is_loopback() && a.port() == 80));
    }
}
