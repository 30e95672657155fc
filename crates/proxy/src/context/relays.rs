//! The ports of our own relays for datagrams: what is sent there by another relay of ours would go round and round.

use crate::access::own::is_own;
use std::{
    collections::HashSet,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Ports that face clients: as many as there are associations.
#[derive(Debug, Clone, Default)]
pub(crate) struct Relays(Arc<Mutex<HashSet<u16>>>);

/// A port that counts as long as this exists.
#[derive(Debug)]
pub(crate) struct Entered {
    relays: Relays,
    port: u16,
}

impl Relays {
    pub(crate) fn enter(&self, port: u16) -> Entered {
        self.lock().insert(port);
        Entered { relays: self.clone(), port }
    }

    /// Returns whether a datagram to this address would reach a relay of ours.
    pub(crate) fn leads_back(&self, to: SocketAddr) -> bool {
        let is_known = self.lock().contains(&to.port());
        is_known && is_own(to.ip())
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<u16>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.relays.lock().remove(&self.port);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_relays_lead_back() {
        let relays = Relays::default();
        let own = SocketAddr::from(([127, 0, 0, 1], 5000));
        let entered = relays.enter(5000);
        assert!(relays.leads_back(own) && !relays.leads_back(([127, 0, 0, 1], 5001).into()));
        assert!(!relays.leads_back(([192, 0, 2, 1], 5000).into()), "another machine's");
        drop(entered);
        assert!(!relays.leads_back(own));
    }
}
