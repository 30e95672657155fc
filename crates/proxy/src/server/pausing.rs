//! Listeners that are paused: their sockets stay open, and nobody accepts. Clients wait in the queue of the kernel.
//!
//! A pause belongs to the name of a listener: a reload keeps it, also at another address, and so does a process that takes the place
//! of this one ([`Prepared::pause`](super::Prepared::pause)).

use super::{Server, State, lock};
use crate::{
    config::ListenerConfig,
    events::{Events, Kind},
};
use std::{
    collections::BTreeSet,
    sync::{Arc, atomic::Ordering::Relaxed},
};

/// Most names in a message that lists them all.
const NAMES: usize = 20;

/// What has come of a request to pause listeners, or to resume them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToldListeners {
    /// Names of those that have done so.
    pub done: Vec<String>,
    /// Names of those that were so already.
    pub already: Vec<String>,
}

/// Returns why a listener cannot be paused, if it cannot.
fn obstacle(listener: &ListenerConfig) -> Option<&'static str> {
    if listener.end_to_end().is_some() {
        Some("its clients shake hands with the target themselves, and would not wait here (handshake = \"end-to-end\")")
    } else if !listener.binds() {
        Some("it takes connections that are routed through this machine, which would be cut off from their servers")
    } else {
        None
    }
}

impl Server {
    /// Lets listeners of these names accept nobody from now on, or accept again: all of them, or, if one of them is unknown or
    /// cannot be paused, none. Fails with a message then. A client that is being accepted at this instant is served.
    pub fn pause(&self, names: &[String], is_paused: bool) -> Result<ToldListeners, String> {
        let mut state = lock(&self.state);
        if *self.stop.borrow() {
            return Err("the program ends: none of its listeners accepts any more".into());
        }
        if self.shared.handed_over.load(Relaxed) {
            return Err("another process has the listeners now: say it once more".into());
        }
        let names: BTreeSet<&str> = names.iter().map(String::as_str).collect();
        check(&state, &names, is_paused)?;
        let mut told = ToldListeners::default();
        for door in &mut state.doors {
            let name = door.fronts.now().listener.name.to_string();
            if !names.contains(&*name) {
                continue;
            }
            if door.pause(is_paused) {
                tell(&self.shared.events, &name, is_paused);
                told.done.push(name);
            } else {
                told.already.push(name);
            }
        }
        Ok(told)
    }

    /// Returns the names of the listeners that are paused.
    pub fn paused(&self) -> Vec<String> {
        lock(&self.state).paused().iter().map(|name| name.to_string()).collect()
    }
}

/// Fails with a message about the first name that is wrong.
fn check(state: &State, names: &BTreeSet<&str>, is_paused: bool) -> Result<(), String> {
    let fronts: Vec<_> = state.doors.iter().map(|door| door.fronts.now()).collect();
    if names.is_empty() {
        return Err("no listener is named".into());
    }
    for name in names {
        let Some(front) = fronts.iter().find(|front| &*front.listener.name == *name) else {
            let known: Vec<&str> = fronts.iter().map(|front| &*front.listener.name).take(NAMES).collect();
            let others = fronts.len() - known.len();
            let others = if others > 0 { format!(" and {others} others") } else { String::new() };
            return Err(format!("no listener has the name {name}: there are {}{others}", known.join(", ")));
        };
        if let Some(why) = obstacle(&front.listener).filter(|_| is_paused) {
            return Err(format!("{name} cannot be paused: {why}"));
        }
    }
    Ok(())
}

fn tell(events: &Events, name: &str, is_paused: bool) {
    if is_paused {
        tracing::info!("{name} is paused: clients wait until `longsplice resume {name}`");
    } else {
        tracing::info!("{name} accepts clients again");
    }
    events.listener(if is_paused { Kind::Paused } else { Kind::Resumed }, name);
}

impl State {
    pub(super) fn paused(&self) -> BTreeSet<Arc<str>> {
        let paused = self.doors.iter().filter(|door| door.is_paused());
        paused.map(|door| door.fronts.now().listener.name.clone()).collect()
    }

    /// Pauses the listeners of these names, which were paused before, and lets the others accept. Those that begin to accept
    /// afterwards accept nobody before.
    pub(super) fn keep_paused(&mut self, names: &BTreeSet<Arc<str>>, events: &Events) {
        let mut left = names.clone();
        for door in &mut self.doors {
            let front = door.fronts.now();
            let is_paused = names.contains(&front.listener.name) && obstacle(&front.listener).is_none();
            left.retain(|name| !is_paused || *name != front.listener.name);
            door.pause(is_paused);
        }
        for name in left {
            tracing::info!("{name} is not paused any more: there is no such listener, or it cannot be paused");
            events.listener(Kind::Resumed, &name);
        }
    }
}
