//! Records of flows of an earlier process that have ended. Their policies and callers are gone with it, so one function gets them all.

use crate::{
    engine::Engine,
    flow::Stop,
    splicer::Splicer,
    sync::lock,
    types::{EndReason, Ended},
};
use std::{
    mem,
    sync::{Arc, Mutex},
};

/// Records kept until there is a function that gets them. That takes moments, but any number of flows
/// may have ended while no process ran. As long as the queue of the access log, which gets them next.
const EARLY: usize = 8192;

type Tell = Arc<dyn Fn(Ended) + Send + Sync>;

/// Where the records go.
pub(crate) struct Recovered(Mutex<To>);

enum To {
    /// Nowhere yet: the records so far, and how many more there were.
    Early(Vec<Ended>, usize),
    Told(Tell),
}

impl Default for Recovered {
    fn default() -> Self {
        Recovered(Mutex::new(To::Early(Vec::new(), 0)))
    }
}

impl Recovered {
    /// Passes a record on.
    pub fn end(&self, ended: Ended) {
        let tell = match &mut *lock(&self.0) {
            To::Early(all, _) if all.len() < EARLY => return all.push(ended),
            To::Early(_, missed) => return *missed += 1,
            To::Told(tell) => tell.clone(),
        };
        tell(ended);
    }

    fn set(&self, tell: Tell) {
        if let To::Early(all, missed) = mem::replace(&mut *lock(&self.0), To::Told(tell.clone())) {
            all.into_iter().for_each(|ended| tell(ended));
            if missed > 0 {
                tracing::warn!("{missed} flows of an earlier process have ended unrecorded: more than {EARLY} at once");
            }
        }
    }
}

impl Engine {
    /// Records the flows of an earlier process that are still forwarded: this process does not watch them any longer.
    pub(crate) fn end_recovered(&self, stop: Stop) {
        let how = match stop {
            Stop::Go => return,
            Stop::Reset => EndReason::Stopped,
            Stop::Leave => EndReason::Left,
        };
        let Some(d) = self.datapath() else { return };
        for mut orphan in mem::take(&mut *lock(&self.orphans)).into_values() {
            orphan.count(d);
            self.recovered.end(orphan.ended(how));
        }
    }
}

impl Splicer {
    /// Calls `f` with the record of each flow of an earlier process that ends, or has ended before. How long such a flow has
    /// existed, and what it carried before, is not known exactly: `duration_ms` counts from when this process found it, and
    /// `spliced_up` and `spliced_down` do, too. `bytes_up` and `bytes_down` count all bytes of both connections, with those of
    /// their handshakes, unless the flow had been released. A thread of the engine calls `f`; it must not block.
    pub fn on_recovered_end(&self, f: impl Fn(Ended) + Send + Sync + 'static) {
        self.engine().recovered.set(Arc::new(f));
    }

    /// Returns whether this is a live flow of an earlier process, which takes no commands.
    pub fn is_recovered(&self, id: u64) -> bool {
        lock(&self.engine().orphans).contains_key(&id)
    }
}
