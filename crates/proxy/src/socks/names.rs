//! Names that the client of an association sends datagrams to. A datagram waits here until its name is looked up.

use crate::{
    resolve::Resolver,
    target::{Host, Target},
};
use std::{
    collections::HashMap,
    net::SocketAddr,
    time::{Duration, Instant},
};
use tokio::task::JoinSet;

/// Names that are known to an association: those of a page with many parts. Those whose time has passed make room.
const NAMES: usize = 128;
/// Look-ups at a time for one association, so that a few of them leave room for those of others.
const LOOK_UPS: usize = 8;
/// Datagrams that wait for look-ups, and their bytes: what hosts send before the first answer of a server.
const WAITING: usize = 64;
const WAITING_BYTES: usize = 64 * 1024;
/// Time after which a name is looked up again, as for connections. The old address is used meanwhile.
const FRESH: Duration = Duration::from_secs(10);
/// Time for which a name without an address is not looked up again.
const RETRY: Duration = Duration::from_secs(2);

/// A name and its addresses; none if they are not known.
pub(super) type Found = (Target, Vec<SocketAddr>);

/// What is known of a datagram's target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Named {
    Address(SocketAddr),
    /// It has to be looked up, or is being looked up.
    Unknown,
    /// It has no address.
    No,
}

#[derive(Debug)]
struct Name {
    address: Option<SocketAddr>,
    until: Instant,
    asking: bool,
    waiting: Vec<Box<[u8]>>,
}

/// The names of an association.
#[derive(Default)]
pub(super) struct Names {
    all: HashMap<(String, u16), Name>,
    asking: JoinSet<Found>,
    waiting: (usize, usize),
}

impl Names {
    /// Returns the address of a target.
    pub fn address(&self, target: &Target, now: Instant) -> Named {
        let name = match &target.host {
            Host::Ip(ip) => return Named::Address(SocketAddr::new(*ip, target.port)),
            Host::Name(name) => name,
        };
        // without a borrowed key for pairs: names are few, and this is not what takes time
        match self.all.get(&(name.clone(), target.port)) {
            Some(Name { address: Some(to), until, asking, .. }) if *asking || now < *until => Named::Address(*to),
            Some(Name { address: None, until, asking: false, .. }) if now < *until => Named::No,
            _ => Named::Unknown,
        }
    }

    /// Keeps a datagram to a name, and has the name looked up. Returns whether there was room.
    pub fn look_up(
        &mut self,
        target: Target,
        data: &[u8],
        (resolver, limit): (Resolver, Duration),
        now: Instant,
    ) -> bool {
        let Host::Name(name) = &target.host else { return false };
        let key = (name.clone(), target.port);
        let is_asked = self.all.get(&key).is_some_and(|name| name.asking);
        if self.waiting.0 >= WAITING || self.waiting.1 + data.len() > WAITING_BYTES {
            return false;
        }
        if !is_asked {
            if self.asking.len() >= LOOK_UPS || (self.all.len() >= NAMES && !self.make_room(now)) {
                return false;
            }
            self.asking.spawn(async move {
                let found = resolver.resolve(&target, limit).await;
                (target, found.unwrap_or_default())
            });
        }
        let empty = || Name { address: None, until: now, asking: true, waiting: Vec::new() };
        let name = self.all.entry(key).or_insert_with(empty);
        name.asking = true;
        name.waiting.push(data.into());
        self.waiting = (self.waiting.0 + 1, self.waiting.1 + data.len());
        true
    }

    fn make_room(&mut self, now: Instant) -> bool {
        self.all.retain(|_, name| name.asking || now < name.until);
        self.all.len() < NAMES
    }

    /// Waits for the end of a look-up. `None` if there is none.
    pub async fn found(&mut self) -> Option<Found> {
        // a look-up does not panic, and nobody cancels it
        self.asking.join_next().await.and_then(Result::ok)
    }

    /// Sets the address of a name, and returns the datagrams that have waited for it.
    pub fn settle(&mut self, target: &Target, to: Option<SocketAddr>, now: Instant) -> Vec<Box<[u8]>> {
        let Host::Name(name) = &target.host else { return Vec::new() };
        let Some(name) = self.all.get_mut(&(name.clone(), target.port)) else { return Vec::new() };
        (name.address, name.asking) = (to, false);
        name.until = now + if to.is_some() { FRESH } else { RETRY };
        let waiting = std::mem::take(&mut name.waiting);
        let bytes: usize = waiting.iter().map(|data| data.len()).sum();
        self.waiting = (self.waiting.0 - waiting.len(), self.waiting.1 - bytes);
        waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Target {
        text.parse().unwrap()
    }

    #[tokio::test]
    async fn datagrams_wait_for_their_name_within_limits() {
        let (mut names, now) = (Names::default(), Instant::now());
        let ask = || (Resolver::default(), Duration::from_secs(1));
        assert_eq!(names.address(&target("192.0.2.1:53"), now), Named::Address("192.0.2.1:53".parse().unwrap()));
        let name = target("name.invalid:53");
        assert_eq!(names.address(&name, now), Named::Unknown);
        for _ in 0..WAITING {
            assert!(names.look_up(name.clone(), b"data", ask(), now));
        }
        assert!(!names.look_up(name.clone(), b"data", ask(), now), "too many wait");
        assert_eq!((names.asking.len(), names.address(&name, now)), (1, Named::Unknown), "one look-up");
        let to = "192.0.2.9:53".parse().unwrap();
        assert_eq!(names.settle(&name, Some(to), now).len(), WAITING);
        assert_eq!((names.waiting, names.address(&name, now)), ((0, 0), Named::Address(to)));
        assert_eq!(names.address(&name, now + FRESH), Named::Unknown, "old");
        assert!(names.settle(&name, None, now).is_empty());
        assert_eq!(names.address(&name, now), Named::No);
        assert_eq!(names.address(&name, now + RETRY), Named::Unknown);
        assert!(!names.look_up(name, &vec![0; WAITING_BYTES + 1], ask(), now), "too long");
    }

    #[tokio::test]
    async fn look_ups_and_names_are_bounded() {
        let (mut names, now) = (Names::default(), Instant::now());
        let ask = || (Resolver::default(), Duration::from_secs(1));
        let of = |n: usize| target(&format!("n{n}.invalid:53"));
        let begun = (0..LOOK_UPS + 3).filter(|n| names.look_up(of(*n), b"", ask(), now)).count();
        assert_eq!(begun, LOOK_UPS);
        (0..LOOK_UPS).for_each(|n| drop(names.settle(&of(n), None, now)));
        names.asking.abort_all();
        while names.asking.join_next().await.is_some() {}
        for n in 0..NAMES {
            let later = now + RETRY * u32::try_from(n).unwrap();
            if names.look_up(of(n), b"", ask(), later) {
                names.settle(&of(n), Some("192.0.2.1:53".parse().unwrap()), later);
            }
            names.asking.abort_all();
            while names.asking.join_next().await.is_some() {}
            assert!(names.all.len() <= NAMES);
        }
    }
}
