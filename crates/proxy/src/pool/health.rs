//! Health of a server: a state machine with the clock as an argument.
//!
//! A server is up only if connections (requests, of HTTP) and checks both say so. Consecutive failed ones take it out for a time.
//! The next one after that is a trial: it brings the server back, or takes it out again. Checks, if configured, take a
//! server down after `fall` consecutive failures, and bring it up after `rise` consecutive good results. It starts up.

use crate::{config::pool::HealthLimits, handed::KnownHealth};
use std::time::{Duration, Instant};

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

    /// Returns what another process has to know.
    pub fn known(&self, now: Instant) -> KnownHealth {
        let left = |until: Instant| u64::try_from(until.saturating_duration_since(now).as_millis()).unwrap_or(u64::MAX);
        KnownHealth { failures: self.failures, out: self.out.map(left), down: self.down }
    }

    /// Goes on with what another process has known. `limits`: no time out is longer than these say.
    pub fn go_on(&mut self, KnownHealth { failures, out, down }: KnownHealth, limits: &HealthLimits, now: Instant) {
        let out = out.map(|left| now + Duration::from_millis(left).min(limits.out));
        *self = Health { failures, out, down, streak: 0 };
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
    fn another_process_goes_on() {
        let t = Instant::now();
        let after = |s| t + Duration::from_secs(s);
        let mut h = Health::default();
        let mut next = Health::default();
        assert_eq!([0; 3].map(|_| h.checked(&LIMITS, false)), [None, None, Some(Change::Down)]);
        next.go_on(h.known(t), &LIMITS, t);
        assert_eq!(next.state(t), ServerHealth::Down);
        assert_eq!([0; 2].map(|_| next.checked(&LIMITS, true)), [None, Some(Change::Up)]);
        assert_eq!([t; 2].map(|t| next.failed(&LIMITS, t)), [None, Some(Change::Down)]);
        let (known, mut last) = (next.known(after(4)), Health::default());
        assert_eq!(known, KnownHealth { failures: 2, out: Some(6000), down: false });
        last.go_on(known, &LIMITS, after(5));
        assert_eq!((last.state(after(10)), last.state(after(11))), (ServerHealth::Out, ServerHealth::Up));
        assert!(last.is_on_trial());
        assert_eq!(
            (last.failed(&LIMITS, after(12)), last.state(after(13))),
            (None, ServerHealth::Out),
            "once is enough"
        );
        last.go_on(KnownHealth { out: Some(u64::MAX), ..known }, &LIMITS, t);
        assert_eq!(last.state(after(10)), ServerHealth::Up, "not for longer than the limit");
    }

    #[test]
    fn a_good_request_does_not_overrule_checks() {
        let (mut h, t) = (Health::default(), Instant::now());
        assert_eq!([0; 3].map(|_| h.checked(&LIMITS, false)), [None, None, Some(Change::Down)]);
        h.succeeded();
        assert_eq!(h.state(t), ServerHealth::Down);
    }
}
