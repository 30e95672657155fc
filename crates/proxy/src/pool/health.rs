//! Health of a server: a state machine with the clock as an argument.
//!
//! A server is up only if connections (requests, of HTTP) and checks both say so. Consecutive failed ones take it out for a time.
//! The next one after that is a trial: it brings the server back, or takes it out again. Checks, if configured, take a
//! server down after `fall` consecutive failures, and bring it up after `rise` consecutive good results. It starts up.

use crate::config::pool::HealthLimits;
use std::time::Instant;

/// A change of state, as seen by requests or by checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    Up,
    Down,
}

/// State of a server, from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ServerHealth {
    /// The server is used.
    Up,
    /// Requests have failed; the server is out for a time.
    Out,
    /// Checks fail.
    Down,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Health {
    /// Number of failed requests since the last good one.
    failures: u32,
    /// Time until which the server is out.
    out: Option<Instant>,
    /// Whether the server is down according to the checks.
    down: bool,
    /// Number of consecutive checks that contradict `down`.
    streak: u32,
}

impl Health {
    pub fn state(&self, now: Instant) -> ServerHealth {
        if self.down { ServerHealth::Down } else { self.by_use(now) }
    }

    /// Returns the state without what checks say.
    pub fn by_use(&self, now: Instant) -> ServerHealth {
        match self.out {
            Some(until) if now < until => ServerHealth::Out,
            Some(_) | None => ServerHealth::Up,
        }
    }

    /// Whether it was taken out, and no request has been answered since.
    pub fn is_on_trial(&self) -> bool {
        self.out.is_some()
    }

    /// Records a request that was answered.
    pub fn succeeded(&mut self) -> Option<Change> {
        self.failures = 0;
        self.out.take().map(|_| Change::Up)
    }

    /// Records a request that was not answered.
    pub fn failed(&mut self, limits: &HealthLimits, now: Instant) -> Option<Change> {
        self.failures = self.failures.saturating_add(1);
        // Requests that were already running when the server was taken out do not prolong the time.
        if self.failures < limits.failures || self.out.is_some_and(|until| now < until) {
            return None;
        }
        let before = self.out.replace(now + limits.out);
        before.is_none().then_some(Change::Down)
    }

    /// Records the result of a check.
    pub fn checked(&mut self, limits: &HealthLimits, good: bool) -> Option<Change> {
        if good != self.down {
            self.streak = 0;
            return None;
        }
        self.streak += 1;
        if self.streak < if good { limits.rise } else { limits.fall } {
            return None;
        }
        (self.down, self.streak) = (!good, 0);
        Some(if good { Change::Up } else { Change::Down })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const LIMITS: HealthLimits = HealthLimits { failures: 2, out: Duration::from_secs(10), rise: 2, fall: 3 };

    #[test]
    fn failures_in_a_row_take_a_server_out_for_a_time() {
        let (mut h, t) = (Health::default(), Instant::now());
        let after = |s| t + Duration::from_secs(s);
        assert_eq!((h.failed(&LIMITS, t), h.succeeded(), h.failed(&LIMITS, t)), (None, None, None));
        assert_eq!((h.failed(&LIMITS, t), h.state(t)), (Some(Change::Down), ServerHealth::Out));
        assert_eq!((h.failed(&LIMITS, after(5)), h.state(after(9))), (None, ServerHealth::Out));
        assert_eq!(h.state(after(10)), ServerHealth::Up);
        // the trial fails: once is enough, and there is no change to report
        assert_eq!((h.failed(&LIMITS, after(11)), h.state(after(20))), (None, ServerHealth::Out));
        assert_eq!((h.succeeded(), h.state(after(12))), (Some(Change::Up), ServerHealth::Up));
        assert_eq!((h.failed(&LIMITS, after(13)), h.state(after(13))), (None, ServerHealth::Up));
    }

    #[test]
    fn checks_in_a_row_decide() {
        let (mut h, t) = (Health::default(), Instant::now());
        let mut run = |checks: &[bool]| checks.iter().map(|good| h.checked(&LIMITS, *good)).collect::<Vec<_>>();
        assert_eq!(run(&[true, false, false, true, false, false]), [None; 6]);
        assert_eq!(run(&[false, false, true, false, true]), [Some(Change::Down), None, None, None, None]);
        assert_eq!(run(&[true, false]), [Some(Change::Up), None]);
        assert_eq!(h.state(t), ServerHealth::Up);
    }

    #[test]
    fn a_good_request_does_not_overrule_checks() {
        let (mut h, t) = (Health::default(), Instant::now());
        assert_eq!([0; 3].map(|_| h.checked(&LIMITS, false)), [None, None, Some(Change::Down)]);
        h.succeeded();
        assert_eq!(h.state(t), ServerHealth::Down);
    }
}
