//! Messages about what may happen a thousand times a second.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Minimum time between two messages of one kind.
const EVERY: Duration = Duration::from_secs(10);

/// Logs the first of many messages of one kind, and then one in ten seconds.
#[derive(Debug, Default)]
pub(crate) struct Complaints(Mutex<Option<Instant>>);

impl Complaints {
    /// Logs a warning, unless another one was logged just before.
    pub fn tell(&self, message: &str) {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|at| at.elapsed() >= EVERY) {
            tracing::warn!("{message}");
            *last = Some(Instant::now());
        }
    }
}
