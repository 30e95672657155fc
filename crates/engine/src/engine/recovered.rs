//! Records of flows of an earlier process that have ended. Their policies and callers are gone with it, so one function gets them all.

use crate::{sync::lock, types::Ended};
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

    /// Passes all records to this function from now on.
    pub fn set(&self, tell: Tell) {
        if let To::Early(all, missed) = mem::replace(&mut *lock(&self.0), To::Told(tell.clone())) {
            all.into_iter().for_each(|ended| tell(ended));
            if missed > 0 {
                tracing::warn!(
                    "cannot record the ends of {missed} flows of an earlier process: more than {EARLY} ended at once"
                );
            }
        }
    }
}
