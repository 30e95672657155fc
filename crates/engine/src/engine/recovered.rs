//! Flows of an earlier process, whose policies and callers are gone with it. One function gets the records of those that have ended,
//! and one gives those that go on to new callers.

use crate::{
    sync::lock,
    types::{Done, Ended, FlowStatus, Policy},
};
use std::{
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};
use tokio::runtime::Handle;

/// Records kept until there is a function that gets them. That takes moments, but any number of flows
/// may have ended while no process ran. As long as the queue of the access log, which gets them next.
const EARLY: usize = 8192;

type Tell = Arc<dyn Fn(Ended, Option<&EarlierFlow>) + Send + Sync>;
type TakeUp = Arc<dyn Fn(&EarlierFlow) -> Option<TakenUp> + Send + Sync>;

/// What an earlier process has written of a flow.
#[derive(Clone, Debug)]
pub struct EarlierFlow {
    /// Its status now.
    pub status: FlowStatus,
    /// What its caller said of it: [`Finish::description`](crate::Finish).
    pub description: Option<String>,
}

/// Called once a flow of an earlier process goes on.
pub(crate) type Begun = Box<dyn FnOnce() + Send>;

/// How a flow of an earlier process goes on ([`Splicer::take_up`](crate::Splicer::take_up)).
pub struct TakenUp {
    /// Its policy.
    pub policy: Arc<Policy>,
    /// The server of a pool, if it is one: [`FlowInfo::with_member`](crate::FlowInfo).
    pub member: Option<Arc<str>>,
    /// Called once it is listed, and takes commands.
    pub begun: Begun,
    /// Called at its end.
    pub done: Done,
    /// Where it is copied if it is taken back.
    pub runtime: Handle,
}

/// Where the records go.
#[derive(Default)]
pub(crate) struct Recovered {
    to: Mutex<To>,
    takes_up: Mutex<Option<TakeUp>>,
    /// See [`Recovered::tell_unknown`].
    unknown: AtomicBool,
}

enum To {
    /// Nowhere yet: the records so far, and how many more there were.
    Early(Vec<(Ended, Option<EarlierFlow>)>, usize),
    Told(Tell),
}

impl Default for To {
    fn default() -> Self {
        To::Early(Vec::new(), 0)
    }
}

impl Recovered {
    /// Records were found that cannot be read: the ends of flows without one are told, too.
    pub fn tell_unknown(&self) {
        self.unknown.store(true, Relaxed);
    }

    /// Returns whether the ends of flows without a record are told.
    pub fn tells_unknown(&self) -> bool {
        self.unknown.load(Relaxed)
    }

    /// Passes a record on, with the description of the flow, if there is one.
    pub fn end(&self, ended: Ended, known: Option<&EarlierFlow>) {
        let tell = match &mut *lock(&self.to) {
            To::Early(all, _) if all.len() < EARLY => return all.push((ended, known.cloned())),
            To::Early(_, missed) => return *missed += 1,
            To::Told(tell) => tell.clone(),
        };
        tell(ended, known);
    }

    /// Passes all records to this function from now on.
    pub fn set(&self, tell: Tell) {
        if let To::Early(all, missed) = mem::replace(&mut *lock(&self.to), To::Told(tell.clone())) {
            all.into_iter().for_each(|(ended, known)| tell(ended, known.as_ref()));
            if missed > 0 {
                tracing::warn!(
                    "cannot record the ends of {missed} flows of an earlier process: more than {EARLY} ended at once"
                );
            }
        }
    }

    /// Has flows taken up by this function from now on.
    pub fn set_take_up(&self, take_up: TakeUp) {
        *lock(&self.takes_up) = Some(take_up);
    }

    /// Returns that function.
    pub fn take_up(&self) -> Option<TakeUp> {
        lock(&self.takes_up).clone()
    }
}
