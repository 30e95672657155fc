//! Servers that suffer from splices before their first byte: those that use BBR, which keeps the shortest round trip that it has
//! measured for ten seconds, that of the near leg, and sends no more than this leg needs.

use crate::sync::lock;
use std::{
    collections::HashMap,
    net::IpAddr,
    sync::Mutex,
    time::{Duration, Instant},
};

/// How long a server is remembered. It may be given another congestion control, or its address to another machine.
const REMEMBERED: Duration = Duration::from_secs(3600);
/// Most servers that are remembered: some hundred kilobytes. The one that was noted first makes room.
const MOST: usize = 4096;

/// The servers, and when each was found to be slow.
#[derive(Default)]
pub(crate) struct SlowServers(Mutex<HashMap<IpAddr, Instant>>);

impl SlowServers {
    /// Remembers a server.
    pub fn note(&self, server: IpAddr) {
        self.note_at(server, Instant::now());
    }

    fn note_at(&self, server: IpAddr, now: Instant) {
        let mut all = lock(&self.0);
        if all.len() >= MOST && !all.contains_key(&server) {
            all.retain(|_, noted| now.saturating_duration_since(*noted) < REMEMBERED);
            let first = all.iter().min_by_key(|(_, noted)| **noted).map(|(server, _)| *server);
            first.filter(|_| all.len() >= MOST).map(|first| all.remove(&first));
        }
        all.insert(server, now);
    }

    /// Returns whether a server is remembered.
    pub fn has(&self, server: IpAddr) -> bool {
        lock(&self.0).get(&server).is_some_and(|noted| noted.elapsed() < REMEMBERED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_makes_room_and_none_is_remembered_for_longer_than_an_hour() {
        let (slow, now) = (SlowServers::default(), Instant::now());
        let server = |n: u32| IpAddr::from(n.to_be_bytes());
        slow.note_at(server(0), now.checked_sub(REMEMBERED).expect("the machine is up for longer"));
        assert!(!slow.has(server(0)));
        (1..=MOST as u32 + 1).for_each(|n| slow.note_at(server(n), now + Duration::from_micros(n.into())));
        assert!(!slow.has(server(1)) && slow.has(server(2)) && slow.has(server(MOST as u32 + 1)));
        assert_eq!(lock(&slow.0).len(), MOST);
    }
}
