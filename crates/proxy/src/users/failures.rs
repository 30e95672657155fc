//! Failed logins by client address: who has had too many is refused for a while, however many connections are used.

use crate::{limits::counted_as, users::NoUser};
use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{sync::Notify, time::Instant};

/// Time for which failures count.
pub const FORGET: Duration = Duration::from_secs(600);
/// Default maximum of failures of login gateways, where people type: some users behind one address may mistype now and then.
pub const FAILURES: u32 = 10;
/// Maximum of wrong passwords elsewhere: programs send one again and again without asking anybody. Whoever guesses has 100 tries
/// in ten minutes.
pub const WRONG: u32 = 100;
/// Number of addresses that are remembered, about 4 MB. Whoever has more addresses than this is not held up by counting them;
/// the delay after each failure and the limit of connections still hold.
const ADDRESSES: usize = 65536;
/// Time between two looks for addresses that can be forgotten. Each takes a millisecond in which nobody's password is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The failures of a listener's clients.
#[derive(Debug)]
pub(crate) struct Failures {
    max: u32,
    of: Mutex<Remembered>,
    /// A try has ended.
    ended: Notify,
}

#[derive(Debug, Default)]
struct Remembered {
    tries: HashMap<IpAddr, Tries>,
    /// When addresses that can be forgotten were looked for.
    looked: Option<Instant>,
}

impl Remembered {
    /// Returns whether there is room for this client.
    fn has_room(&mut self, client: IpAddr, now: Instant) -> bool {
        if self.tries.len() < ADDRESSES || self.tries.contains_key(&client) {
            return true;
        }
        if self.looked.is_none_or(|at| now >= at + LOOK_EVERY) {
            self.tries.retain(|_, tries| tries.running > 0 || tries.count_at(now));
            self.looked = Some(now);
        }
        self.tries.len() < ADDRESSES
    }
}

/// The tries of one client.
#[derive(Debug)]
struct Tries {
    failed: u32,
    /// Those whose result is not known.
    running: u32,
    since: Instant,
}

/// A try, which has failed unless it is said that it has not.
struct Try<'a> {
    failures: &'a Failures,
    /// `None`: it is not counted.
    client: Option<IpAddr>,
    succeeded: bool,
}

impl Failures {
    pub fn new(max: u32) -> Failures {
        Failures { max, of: Mutex::default(), ended: Notify::new() }
    }

    /// Checks a password of this client. Tries at once are no way around the limit, and not against it, either: a try waits while
    /// those that run might use up what is left. A try that is not waited for has failed. What failed before still counts after
    /// a good one: who has one password may guess another.
    pub async fn check<T, E>(
        &self,
        client: IpAddr,
        check: impl Future<Output = Result<T, E>>,
    ) -> Result<T, (NoUser, Option<E>)> {
        let mut running = loop {
            let ended = self.ended.notified();
            match self.begin(counted_as(client)) {
                Ok(Some(running)) => break running,
                Ok(None) => ended.await,
                Err(why) => return Err((why, None)),
            }
        };
        let result = check.await;
        running.succeeded = result.is_ok();
        result.map_err(|why| (NoUser::Wrong, Some(why)))
    }

    /// Returns nothing if the client has to wait.
    fn begin(&self, client: IpAddr) -> Result<Option<Try<'_>>, NoUser> {
        let now = Instant::now();
        let mut of = self.lock();
        let running = |client| Some(Try { failures: self, client, succeeded: false });
        if !of.has_room(client, now) {
            return Ok(running(None));
        }
        let tries = of.tries.entry(client).or_insert(Tries { failed: 0, running: 0, since: now });
        if !tries.count_at(now) {
            (tries.failed, tries.since) = (0, now);
        }
        if tries.failed >= self.max {
            return Err(NoUser::TooMany);
        }
        if tries.failed + tries.running >= self.max {
            return Ok(None);
        }
        tries.running += 1;
        Ok(running(Some(client)))
    }

    fn lock(&self) -> MutexGuard<'_, Remembered> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tries {
    fn count_at(&self, now: Instant) -> bool {
        now.duration_since(self.since) < FORGET
    }
}

impl Drop for Try<'_> {
    fn drop(&mut self) {
        let Some(client) = self.client else { return };
        let mut of = self.failures.lock();
        if let Some(tries) = of.tries.get_mut(&client) {
            tries.running -= 1;
            tries.failed += u32::from(!self.succeeded);
            if (tries.running, tries.failed) == (0, 0) {
                of.tries.remove(&client);
            }
        }
        drop(of);
        self.failures.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{cell::Cell, future::pending};
    use tokio::{
        join,
        time::{advance, sleep, timeout},
    };

    const GOOD: Result<(), ()> = Ok(());
    const WRONG: Result<(), ()> = Err(());

    async fn tried(failures: &Failures, client: IpAddr, result: Result<(), ()>) -> Result<(), NoUser> {
        failures.check(client, async { result }).await.map_err(|(why, _)| why)
    }

    #[tokio::test(start_paused = true)]
    async fn failures_count_for_a_while() {
        let failures = Failures::new(2);
        let [a, b, c]: [IpAddr; 3] = ["192.0.2.1", "2001:db8::1", "2001:db8::ffff:2"].map(|a| a.parse().unwrap());
        for (client, result, want) in [
            (a, GOOD, Ok(())),
            (a, WRONG, Err(NoUser::Wrong)),
            (a, GOOD, Ok(())),
            (a, WRONG, Err(NoUser::Wrong)),
            (a, GOOD, Err(NoUser::TooMany)),
            (b, WRONG, Err(NoUser::Wrong)),
            (c, WRONG, Err(NoUser::Wrong)), // one /64
            (b, GOOD, Err(NoUser::TooMany)),
        ] {
            assert_eq!(tried(&failures, client, result).await, want, "{client}");
        }
        advance(FORGET).await;
        assert_eq!([tried(&failures, a, GOOD).await, tried(&failures, c, GOOD).await], [Ok(()); 2]);
        assert_eq!(failures.lock().tries.len(), 0, "nothing is left of who has not failed");
    }

    /// Whoever asks many times at once has no more tries, and whoever has the right password is not refused for it.
    #[tokio::test(start_paused = true)]
    async fn tries_at_once_are_as_many_as_one_after_the_other() {
        let (failures, a) = (Failures::new(3), IpAddr::from([192, 0, 2, 1]));
        let (now, most, looked_at) = (Cell::new(0), Cell::new(0), Cell::new(0));
        let slow = |result: Result<(), ()>| {
            let (now, most, looked_at) = (&now, &most, &looked_at);
            failures.check(a, async move {
                now.set(now.get() + 1);
                most.set(most.get().max(now.get()));
                sleep(FORGET / 100).await;
                now.set(now.get() - 1);
                looked_at.set(looked_at.get() + 1);
                result
            })
        };
        let good = join!(slow(GOOD), slow(GOOD), slow(GOOD), slow(GOOD), slow(GOOD), slow(GOOD));
        assert!(matches!(good, (Ok(()), Ok(()), Ok(()), Ok(()), Ok(()), Ok(()))), "{good:?}");
        assert_eq!((most.get(), looked_at.replace(0)), (3, 6));
        let wrong = join!(slow(WRONG), slow(WRONG), slow(WRONG), slow(WRONG), slow(WRONG), slow(GOOD));
        assert!(matches!(wrong.3, Err((NoUser::TooMany, None))), "{wrong:?}");
        assert!(matches!(wrong.5, Err((NoUser::TooMany, None))), "{wrong:?}");
        assert_eq!(looked_at.get(), 3);
    }

    /// Nobody has learned its result, but whoever does not wait for one has caused the same work.
    #[tokio::test(start_paused = true)]
    async fn a_try_that_is_given_up_has_failed() {
        let (failures, a) = (Failures::new(1), IpAddr::from([192, 0, 2, 1]));
        let given_up = failures.check(a, pending::<Result<(), ()>>());
        assert!(timeout(FORGET / 100, given_up).await.is_err());
        assert_eq!(tried(&failures, a, GOOD).await, Err(NoUser::TooMany));
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_bounded() {
        let failures = Failures::new(1);
        let all = u32::try_from(ADDRESSES).unwrap();
        let ip = |n: u32| IpAddr::from(n.to_be_bytes());
        for n in 0..=all {
            assert_eq!(tried(&failures, ip(n), WRONG).await, Err(NoUser::Wrong));
        }
        assert_eq!(failures.lock().tries.len(), ADDRESSES);
        assert_eq!(tried(&failures, ip(0), WRONG).await, Err(NoUser::TooMany));
        // all are looked through at most once a second
        let first = failures.lock().looked;
        assert!(first.is_some());
        advance(LOOK_EVERY - Duration::from_millis(1)).await;
        assert_eq!(tried(&failures, ip(all), WRONG).await, Err(NoUser::Wrong));
        assert_eq!(failures.lock().looked, first, "not for each client");
        advance(FORGET).await;
        assert_eq!(tried(&failures, ip(all), WRONG).await, Err(NoUser::Wrong));
        assert_eq!(failures.lock().tries.len(), 1, "what no longer counts is forgotten");
        assert_eq!(tried(&failures, ip(all), GOOD).await, Err(NoUser::TooMany));
    }
}
