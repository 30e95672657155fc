//! What is known of connections that do not go straight to their targets: their servers have other addresses than the rules have
//! judged. A reload that judges live connections again needs these.

use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
};

/// How a connection is led, if it does not go straight to its target.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Led {
    /// Name of the upstream proxy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream: Option<Box<str>>,
    /// The address that the rules have judged; none: the name alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judged: Option<SocketAddr>,
    /// Nobody knows: what an earlier process has said of it had no room.
    #[serde(default, skip_serializing_if = "<&bool as std::ops::Not>::not")]
    pub is_unknown: bool,
}

type ByFlow = Mutex<HashMap<u64, Weak<LedFlow>>>;

/// Those of all relayed connections, by the numbers of their flows.
#[derive(Debug, Default)]
pub(crate) struct AllLed(Arc<ByFlow>);

/// How a flow is led. Whoever relays it holds this up to its end, and when this is dropped, it is forgotten, however that came.
#[derive(Debug)]
pub(crate) struct LedFlow {
    pub led: Led,
    entered: OnceLock<(u64, Arc<ByFlow>)>,
}

impl AllLed {
    /// Notes how a flow is led. It has to be entered before it is listed.
    pub fn enter(&self, flow: u64, led: &Arc<LedFlow>) {
        if led.entered.set((flow, self.0.clone())).is_ok() {
            lock(&self.0).insert(flow, Arc::downgrade(led));
        }
    }

    /// Returns how a flow is led, if it is.
    pub fn of(&self, flow: u64) -> Option<Led> {
        let held = lock(&self.0).get(&flow)?.upgrade();
        held.map(|held| held.led.clone())
    }
}

impl LedFlow {
    pub fn new(led: Led) -> Arc<LedFlow> {
        Arc::new(LedFlow { led, entered: OnceLock::new() })
    }
}

impl Drop for LedFlow {
    fn drop(&mut self) {
        if let Some((flow, all)) = self.entered.get() {
            lock(all).remove(flow);
        }
    }
}

fn lock(all: &ByFlow) -> MutexGuard<'_, HashMap<u64, Weak<LedFlow>>> {
    // No code panics in the middle of a change, so the data behind a poisoned lock is consistent.
    all.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_knows_is_handed_on() {
        let unknown = Led { is_unknown: true, ..Led::default() };
        assert_eq!(serde_json::from_str::<Led>(&serde_json::to_string(&unknown).unwrap()).unwrap(), unknown);
        assert_eq!(serde_json::to_string(&Led::default()).unwrap(), "{}");
    }

    #[test]
    fn those_that_have_ended_are_forgotten() {
        let (all, led) = (AllLed::default(), Led::default());
        let [one, two] = [1, 2].map(|n| {
            let flow = LedFlow::new(led.clone());
            all.enter(n, &flow);
            flow
        });
        assert_eq!([1, 2, 3].map(|n| all.of(n)), [Some(led.clone()), Some(led), None]);
        drop(one);
        assert_eq!((all.of(1), lock(&all.0).len()), (None, 1), "nobody has to say so");
        drop(two);
        assert!(lock(&all.0).is_empty());
    }
}
