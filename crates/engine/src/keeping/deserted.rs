//! Hosts whose segments find no socket. Most of their connections are over, and they have missed our reset. Others are clients
//! that were answered by a SYN cookie, for whom the listener's queue has had no room so far: they try again, and are accepted then.

use crate::{engine::Engine, sync::lock};
use longsplice_datapath::{Connection, queue_is_full};
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

/// Time in which a client for whom there is room again tries again, and gets its socket.
const AGAIN: Duration = Duration::from_secs(1);
/// Maximum number of connections that nobody knows of which it is noted when they were first reported. Of more, nothing is noted
/// until some of them are gone.
const MOST: usize = 4096;

/// Connections without a socket that nobody knows, and when they were first reported.
#[derive(Default)]
pub(super) struct Deserted(HashMap<Connection, Instant>);

impl Deserted {
    /// Returns whether a connection without a socket is over, as far as is known now. It is reported again.
    pub fn is_over(&mut self, engine: &Engine, connection: &Connection) -> bool {
        if engine.lingering.has(connection) {
            return true;
        }
        if engine.has_full_queue() {
            self.0.clear(); // there may have been no room for any of them
            return false;
        }
        let now = Instant::now();
        if self.0.len() >= MOST {
            self.0.retain(|_, first| now.duration_since(*first) < 2 * AGAIN);
        }
        if self.0.len() >= MOST && !self.0.contains_key(connection) {
            return false;
        }
        let first = *self.0.entry(*connection).or_insert(now);
        let is_over = now.duration_since(first) >= AGAIN;
        if is_over {
            self.0.remove(connection);
        }
        is_over
    }
}

impl Engine {
    /// Whether a listener for connections of other hosts has no room for another one.
    fn has_full_queue(&self) -> bool {
        let mut listeners = lock(&self.intercepting);
        listeners.retain(|listener| listener.strong_count() > 0);
        let mut live = listeners.iter().filter_map(|listener| listener.upgrade());
        live.any(|listener| queue_is_full(&listener).unwrap_or(false))
    }
}
