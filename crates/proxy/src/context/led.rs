//! What is known of connections that do not go straight to their targets: their servers have other addresses than the rules have
//! judged. A reload that judges live connections again needs these.

use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

/// How a connection is led.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Led {
    /// Name of the upstream proxy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream: Option<Box<str>>,
    /// The address that the rules have judged; none: the name alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judged: Option<SocketAddr>,
}

/// Those of all relayed connections, by the numbers of their flows.
#[derive(Debug, Default)]
pub(crate) struct AllLed(Mutex<HashMap<u64, Weak<Led>>>);

impl AllLed {
    /// Notes how a flow is led, which holds `led` up to its end.
    pub fn enter(&self, flow: u64, led: &Weak<Led>) {
        let mut all = self.lock();
        all.insert(flow, led.clone());
        // it may have ended meanwhile
        if led.strong_count() == 0 {
            all.remove(&flow);
        }
    }

    /// Notes that a flow has ended, which does not hold it any more.
    pub fn leave(&self, flow: u64) {
        self.lock().remove(&flow);
    }

    /// Returns how a flow is led, if it is.
    pub fn of(&self, flow: u64) -> Option<Arc<Led>> {
        self.lock().get(&flow)?.upgrade()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Weak<Led>>> {
        // No code panics in the middle of a change, so the data behind a poisoned lock is consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_have_ended_are_forgotten() {
        let (all, led) = (AllLed::default(), Arc::new(Led { upstream: None, judged: None }));
        all.enter(1, &Arc::downgrade(&led));
        assert_eq!(all.of(1), Some(led.clone()));
        assert_eq!(all.of(2), None);
        let weak = Arc::downgrade(&led);
        drop(led);
        assert_eq!(all.of(1), None);
        all.leave(1);
        all.enter(2, &weak);
        assert!(all.lock().is_empty(), "it has ended before it was entered");
    }
}
