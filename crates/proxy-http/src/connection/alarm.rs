//! A time limit that each request moves. The runtime's timer is only set when it has fired, or
//! would fire too late, so limits of seconds cost nothing at thousands of requests per second.

use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};
use tokio::time::{Sleep, sleep_until};

pub(super) struct Alarm(Pin<Box<Sleep>>);

impl Alarm {
    /// Needs a runtime with timers.
    pub fn new() -> Alarm {
        Alarm(Box::pin(sleep_until(Instant::now().into())))
    }

    /// Ready once `limit` has passed since `since`.
    pub fn poll(&mut self, cx: &mut Context<'_>, since: Instant, limit: Duration) -> Poll<()> {
        let Some(until) = since.checked_add(limit) else { return Poll::Pending };
        if self.0.deadline() > until.into() {
            self.0.as_mut().reset(until.into());
        }
        loop {
            ready!(self.0.as_mut().poll(cx));
            if Instant::now() >= until {
                return Poll::Ready(());
            }
            self.0.as_mut().reset(until.into());
        }
    }

    /// Waits until `limit` has passed since `since`.
    pub async fn ring(&mut self, since: Instant, limit: Duration) {
        poll_fn(|cx| self.poll(cx, since, limit)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::timeout;

    const SHORT: Duration = Duration::from_millis(20);

    #[tokio::test]
    async fn limits_come_and_go() {
        let mut alarm = Alarm::new();
        for limit in [Duration::from_secs(3600), SHORT, Duration::MAX, 2 * SHORT, Duration::ZERO] {
            let began = Instant::now();
            let rings = timeout(10 * SHORT, alarm.ring(began, limit)).await.is_ok();
            assert_eq!(rings, limit <= 2 * SHORT, "{limit:?}");
            assert!(!rings || began.elapsed() >= limit, "{limit:?}");
        }
    }
}
