//! Failed logins by client address: who has had too many is refused for a while, however many connections are used.

use crate::limits::counted_as;
use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tokio::time::Instant;

/// Time for which failures count.
pub const FORGET: Duration = Duration::from_secs(600);
/// Default maximum of failures: some users behind one address may mistype now and then.
pub const FAILURES: u32 = 10;
/// Maximum of wrong passwords in requests: programs send one again and again without asking anybody. Whoever guesses has 100 tries
/// in ten minutes.
pub const WRONG: u32 = 100;
/// Number of addresses that are remembered, about 4 MB. Whoever has more addresses than this is not held up by counting them;
/// the delay after each failure and the limit of connections still hold.
const ADDRESSES: usize = 65536;

/// The failures of a listener's clients.
#[derive(Debug)]
pub(crate) struct Failures {
    max: u32,
    of: Mutex<HashMap<IpAddr, (u32, Instant)>>,
}

impl Failures {
    pub fn new(max: u32) -> Failures {
        Failures { max, of: Mutex::default() }
    }

    /// Counts a try as failed until it is known. Returns false if the client has had too many.
    pub fn begin(&self, client: IpAddr) -> bool {
        let (client, now) = (counted_as(client), Instant::now());
        let mut of = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = |since: &Instant| now.duration_since(*since) < FORGET;
        if of.len() >= ADDRESSES && !of.contains_key(&client) {
            of.retain(|_, (_, since)| counts(since));
            if of.len() >= ADDRESSES {
                return true;
            }
        }
        let (number, since) = of.entry(client).or_insert((0, now));
        if !counts(since) {
            (*number, *since) = (0, now);
        }
        let may = *number < self.max;
        *number += u32::from(may);
        may
    }

    /// Whether a client has had too many. Other than with [`Failures::begin`], many may try at once.
    pub fn are_too_many(&self, client: IpAddr) -> bool {
        let of = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = |(number, since): &(u32, Instant)| *number >= self.max && since.elapsed() < FORGET;
        of.get(&counted_as(client)).is_some_and(counts)
    }

    /// The try was none. Those before still count: who has one password may guess another.
    pub fn succeeded(&self, client: IpAddr) {
        let client = counted_as(client);
        let mut of = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((number, _)) = of.get_mut(&client) {
            *number = number.saturating_sub(1);
            if *number == 0 {
                of.remove(&client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn failures_count_for_a_while() {
        let failures = Failures::new(2);
        let [a, b, c]: [IpAddr; 3] = ["192.0.2.1", "2001:db8::1", "2001:db8::ffff:2"].map(|a| a.parse().unwrap());
        assert!(failures.begin(a));
        failures.succeeded(a);
        assert_eq!([failures.begin(a), failures.begin(a), failures.begin(a)], [true, true, false]);
        assert_eq!([failures.begin(b), failures.begin(c), failures.begin(b)], [true, true, false], "one /64");
        advance(FORGET).await;
        assert!(failures.begin(a) && failures.begin(c));
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_failed_too_often_is_known() {
        let failures = Failures::new(2);
        let a = IpAddr::from([192, 0, 2, 1]);
        let tried = [(); 3].map(|()| (failures.are_too_many(a), failures.begin(a)).0);
        assert_eq!(tried, [false, false, true]);
        assert!(!failures.are_too_many([192, 0, 2, 2].into()));
        advance(FORGET).await;
        assert!(!failures.are_too_many(a));
    }

    #[tokio::test]
    async fn memory_is_bounded() {
        let failures = Failures::new(1);
        for n in 0..=u32::try_from(ADDRESSES).unwrap() {
            assert!(failures.begin(IpAddr::from(n.to_be_bytes())));
        }
        assert_eq!(failures.of.lock().unwrap().len(), ADDRESSES);
        assert!(!failures.begin(IpAddr::from([0; 4])));
    }
}
