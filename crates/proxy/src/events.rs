//! What happens, for subscribers (`longsplice events`): the lives of flows, as the engine tells of them, the lines of
//! the access log, and what happens to pools and to the whole proxy. Nobody waits for a subscriber: a slow one misses
//! events, and hears how many.
//!
//! # Order
//! There are two queues: that of the engine, and that of [`Events`]. The engine tells of all steps of a flow before its line is
//! written. So whoever finds a line in one queue first reads what the other one has by then ([`Subscription::try_next`]).

use crate::log::{access_log::Record, calendar::rfc3339};
use longsplice_engine::{FlowEvent, FlowEventKind, FlowEvents, Splicer};
use serde::{Deserialize, Serialize};
use std::{
    fmt::{self, Display},
    net::SocketAddr,
    process,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::SystemTime,
};
use tokio::sync::broadcast::{
    self,
    error::{RecvError, TryRecvError},
};

/// Most subscribers. Each may keep a task of the main thread busy, and they must leave room on the control socket to others.
pub const SUBSCRIBERS: usize = 16;
/// Number of events that a subscriber may leave unread, as many as of flows. All subscribers share them: a few megabytes, as in
/// the queue of the access log.
const UNREAD: usize = 4096;

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A flow begins.
    Began,
    /// It is spliced.
    Spliced,
    /// It is not spliced, or could not be taken back.
    NotSpliced,
    /// It is taken back.
    TakenBack,
    /// Its sockets are closed; the kernel has it.
    Released,
    /// A flow that has relayed the body of a message has ended; its connections go on.
    Passed,
    /// A line of the access log: a connection has ended, or a request.
    Ended,
    /// The same, without anything that was relayed; or a connection beyond a limit.
    Refused,
    /// A server of a pool is used again.
    MemberUp,
    /// It is not used any more.
    MemberDown,
    /// An operator has told it to take nothing new.
    MemberDrained,
    /// An operator has told it to take its share again.
    MemberUndrained,
    /// An operator has told a listener to accept nobody for now.
    Paused,
    /// It accepts again.
    Resumed,
    /// Another configuration is in force.
    Reloaded,
    /// It could not be put in force.
    ReloadFailed,
    /// Another process serves now.
    HandedOver,
    /// From here on, the subscriber hears everything, or how much it has missed.
    Subscribed,
    /// Events that this subscriber was too slow for.
    Missed,
}

/// What a subscriber wants to hear.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Wanted {
    /// Of connections and listeners, only those of this name.
    pub listener: Option<String>,
    /// Only these kinds; empty: all.
    pub kinds: Vec<Kind>,
}

impl Wanted {
    /// `name`: of the listener, if it is about one.
    fn has(&self, kind: Kind, name: Option<Option<&str>>) -> bool {
        let of_listener = || match (&self.listener, name) {
            (Some(wanted), Some(name)) => name == Some(wanted.as_str()),
            _ => true,
        };
        (self.kinds.is_empty() || self.kinds.contains(&kind)) && of_listener()
    }
}

/// Why nobody else can subscribe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{SUBSCRIBERS} others listen to events already, which is the most: end one of them")]
pub struct TooMany;

/// Tells subscribers what the engine does not know. Costs one look at a number while there are none.
#[derive(Default)]
pub struct Events {
    subscribers: AtomicUsize,
    to: OnceLock<broadcast::Sender<Arc<Fact>>>,
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Events({})", self.subscribers.load(Relaxed))
    }
}

/// An event that is not of a flow.
struct Fact {
    at: SystemTime,
    kind: Kind,
    what: What,
}

#[derive(Serialize)]
#[serde(untagged)]
enum What {
    Line(Box<Record>),
    Member { pool: String, member: String, why: String },
    Listener { name: String },
    Reloaded { added: Vec<String>, moved: Vec<String>, removed: Vec<String>, reset: u64 },
    Failed { why: String },
    HandedOver { process: u32, program: String, left: usize, taken: usize, stay: u64 },
}

impl Events {
    /// Subscribes to all that happens from now on.
    pub fn subscribe(self: &Arc<Self>, splicer: &Splicer, wanted: Wanted) -> Result<Subscription, TooMany> {
        let enter = |n| (n < SUBSCRIBERS).then_some(n + 1);
        self.subscribers.fetch_update(Relaxed, Relaxed, enter).map_err(|_| TooMany)?;
        let facts = self.to.get_or_init(|| broadcast::Sender::new(UNREAD)).subscribe();
        let (events, flows) = (self.clone(), splicer.subscribe());
        Ok(Subscription { events, flows, facts, wanted, held: None, ahead: 0, missed: 0, told: 0 })
    }

    fn is_heard(&self) -> bool {
        self.subscribers.load(Relaxed) > 0
    }

    /// `what` is only called if somebody listens.
    fn tell(&self, kind: Kind, what: impl FnOnce() -> What) {
        if let Some(to) = self.to.get().filter(|_| self.is_heard()) {
            let _ = to.send(Arc::new(Fact { at: SystemTime::now(), kind, what: what() })); // the last may just have gone
        }
    }

    /// Tells of a line of the access log.
    pub(crate) fn line(&self, record: &Record) {
        let kind = if record.id.is_none() && record.refusal.is_some() { Kind::Refused } else { Kind::Ended };
        self.tell(kind, || What::Line(Box::new(record.clone())));
    }

    /// Tells of a connection that a limit has turned away, and that may have no line.
    pub(crate) fn turned_away(&self, record: impl FnOnce() -> Record) {
        self.tell(Kind::Refused, || What::Line(Box::new(record())));
    }

    /// Tells of a server of a pool.
    pub(crate) fn member(&self, kind: Kind, (pool, member): (&str, &str), why: &dyn Display) {
        self.tell(kind, || What::Member { pool: pool.into(), member: member.into(), why: why.to_string() });
    }

    /// Tells of a listener.
    pub(crate) fn listener(&self, kind: Kind, name: &str) {
        self.tell(kind, || What::Listener { name: name.into() });
    }

    /// Tells what has come of a reload.
    pub fn reloaded(&self, result: &Result<crate::Reloaded, String>) {
        match result {
            Ok(crate::Reloaded { added, moved, removed, reset }) => self.tell(Kind::Reloaded, || {
                let [added, moved, removed] = [added, moved, removed].map(Clone::clone);
                What::Reloaded { added, moved, removed, reset: *reset }
            }),
            Err(why) => self.tell(Kind::ReloadFailed, || What::Failed { why: why.clone() }),
        }
    }

    /// Tells which process serves now, which program it runs, how many flows the kernel forwards, how many other connections go on
    /// there, and how many stay.
    pub fn handed_over(&self, process: u32, program: &str, (left, taken): (usize, usize), stay: u64) {
        let program = || program.to_owned();
        self.tell(Kind::HandedOver, || What::HandedOver { process, program: program(), left, taken, stay });
    }
}

/// A subscription. A place is free for another one when it is dropped.
#[derive(Debug)]
pub struct Subscription {
    events: Arc<Events>,
    flows: FlowEvents,
    facts: broadcast::Receiver<Arc<Fact>>,
    wanted: Wanted,
    /// What was read, and has to wait for so many events of flows.
    held: Option<Arc<Fact>>,
    ahead: usize,
    /// Facts that were missed; and those, with events of flows, of which the subscriber has heard.
    missed: u64,
    told: u64,
}

impl fmt::Debug for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fact({:?})", self.kind)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.events.subscribers.fetch_sub(1, Relaxed);
    }
}

/// A line for the subscriber.
#[derive(Serialize)]
struct Line<T> {
    time: String,
    event: Kind,
    #[serde(flatten)]
    what: T,
}

#[derive(Serialize)]
#[serde(untagged)]
enum OfFlow<'a> {
    Began {
        id: u64,
        listener: String,
        name: Option<String>,
        listen: Option<SocketAddr>,
        client: SocketAddr,
        server: SocketAddr,
        target: String,
        user: Option<String>,
    },
    Step {
        id: u64,
        name: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        refusal: Option<&'static str>,
    },
    Passed {
        id: u64,
        name: Option<&'a str>,
        how: &'static str,
        bytes_up: u64,
        bytes_down: u64,
        spliced_up: u64,
        spliced_down: u64,
        splices: u32,
        refusal: Option<&'static str>,
    },
}

#[derive(Serialize)]
struct Begun {
    version: u32,
    process: u32,
}

#[derive(Serialize)]
struct Missed {
    count: u64,
}

impl Subscription {
    /// Returns the first line. `version`: of the protocol.
    pub fn begun(&self, version: u32) -> String {
        let (mut to, process) = (String::new(), process::id());
        line(&mut to, SystemTime::now(), Kind::Subscribed, Begun { version, process });
        to
    }

    /// Waits until something happens, and appends its line if it is wanted. Returns false at the end of the engine. Cancel safe.
    pub async fn next(&mut self, to: &mut String) -> bool {
        while !self.try_next(to) {
            tokio::select! {
                event = self.flows.next() => match event {
                    Some(event) => {
                        self.flow(&event, to);
                        return true;
                    }
                    None => return false,
                },
                fact = self.facts.recv() => match fact {
                    Ok(fact) => self.hold(fact),
                    Err(RecvError::Lagged(missed)) => self.missed += missed,
                    Err(RecvError::Closed) => return false,
                },
            }
        }
        true
    }

    /// The same without a wait. Returns false if nothing has happened.
    pub fn try_next(&mut self, to: &mut String) -> bool {
        while self.held.is_none() {
            match self.facts.try_recv() {
                Ok(fact) => self.hold(fact),
                Err(TryRecvError::Lagged(missed)) => self.missed += missed,
                Err(TryRecvError::Empty | TryRecvError::Closed) => {
                    let event = self.flows.try_next();
                    event.iter().for_each(|event| self.flow(event, to));
                    return event.is_some();
                }
            }
        }
        if self.ahead > 0 {
            self.ahead -= 1;
            if let Some(event) = self.flows.try_next() {
                self.flow(&event, to);
                return true;
            }
        }
        self.held.take().into_iter().for_each(|fact| self.fact(&fact, to));
        true
    }

    fn hold(&mut self, fact: Arc<Fact>) {
        // others that come meanwhile must not keep it for ever
        (self.held, self.ahead) = (Some(fact), self.flows.unread());
    }

    fn flow(&mut self, event: &FlowEvent, to: &mut String) {
        self.tell_missed(to);
        let (id, name) = (event.flow, event.name.as_deref());
        let step = |refusal| OfFlow::Step { id, name, refusal };
        let (kind, what) = match (event.kind, &event.message) {
            (FlowEventKind::Begun, _) => {
                let Some(f) = event.begun() else { return };
                let (listener, name, listen) = (f.protocol, f.name, f.listen);
                let (client, server, target, user) = (f.client, f.server, f.target, f.user);
                (Kind::Began, OfFlow::Began { id, listener, name, listen, client, server, target, user })
            }
            (FlowEventKind::Spliced, _) => (Kind::Spliced, step(None)),
            (FlowEventKind::Refused(why), _) => (Kind::NotSpliced, step(Some(why.as_str()))),
            (FlowEventKind::TakenBack, _) => (Kind::TakenBack, step(None)),
            (FlowEventKind::Released, _) => (Kind::Released, step(None)),
            (FlowEventKind::Ended(how), Some(e)) => {
                let what = OfFlow::Passed {
                    id,
                    name,
                    how: how.as_str(),
                    bytes_up: e.bytes_up,
                    bytes_down: e.bytes_down,
                    spliced_up: e.spliced_up,
                    spliced_down: e.spliced_down,
                    splices: e.splices,
                    refusal: e.refusal.map(|why| why.as_str()),
                };
                (Kind::Passed, what)
            }
            // its line in the access log says it, and more
            _ => return,
        };
        if self.wanted.has(kind, Some(name)) {
            line(to, event.at, kind, what);
        }
    }

    fn fact(&mut self, fact: &Fact, to: &mut String) {
        self.tell_missed(to);
        let name = match &fact.what {
            What::Line(record) => Some(record.name.as_deref()),
            What::Listener { name } => Some(Some(name.as_str())),
            _ => None,
        };
        if self.wanted.has(fact.kind, name) {
            line(to, fact.at, fact.kind, &fact.what);
        }
    }

    fn tell_missed(&mut self, to: &mut String) {
        let all = self.missed + self.flows.dropped();
        let count = all - std::mem::replace(&mut self.told, all);
        if count > 0 {
            line(to, SystemTime::now(), Kind::Missed, Missed { count });
        }
    }
}

fn line(to: &mut String, at: SystemTime, event: Kind, what: impl Serialize) {
    // strings, numbers and lists of them: JSON can hold all of it
    to.push_str(&serde_json::to_string(&Line { time: rfc3339(at), event, what }).unwrap_or_default());
    to.push('\n');
}

#[cfg(test)]
#[path = "events_tests.rs"]
mod tests;
