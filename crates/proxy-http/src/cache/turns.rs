//! One request to the server for many at once: the first request for a URL asks it, and the others wait for the stored reply.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};
use tokio::sync::watch;

/// Maximum number of URLs that are asked for: each takes some 200 bytes. Beyond that, requests do not wait.
const ASKED: usize = 4096;
/// Maximum number of requests that wait for one URL. Others ask the server themselves.
const WAITING: usize = 1024;

type Asked = Mutex<HashMap<String, watch::Sender<()>>>;

/// The URLs that a server is being asked for.
#[derive(Debug, Default, Clone)]
pub(super) struct Turns(Arc<Asked>);

/// The right to ask for a URL. When it is dropped, those who wait go on.
#[derive(Debug)]
pub(crate) struct Turn {
    url: String,
    of: Arc<Asked>,
}

/// What a request has to do.
#[derive(Debug)]
pub(crate) enum Place {
    /// Ask the server.
    First(Turn),
    /// Wait until this says that the sender is gone.
    Behind(watch::Receiver<()>),
    /// Ask the server: there are too many.
    Alone,
}

impl Turns {
    pub fn take(&self, url: &str) -> Place {
        let mut asked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match asked.get(url) {
            Some(sender) if sender.receiver_count() < WAITING => Place::Behind(sender.subscribe()),
            None if asked.len() < ASKED => {
                asked.insert(url.to_owned(), watch::channel(()).0);
                Place::First(Turn { url: url.to_owned(), of: self.0.clone() })
            }
            Some(_) | None => Place::Alone,
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.of.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.url);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_asks_and_the_others_wait() {
        let turns = Turns::default();
        let Place::First(turn) = turns.take("a") else { panic!() };
        let Place::Behind(mut waits) = turns.take("a") else { panic!() };
        let other = turns.take("b");
        assert!(matches!(other, Place::First(_)));
        drop(turn);
        assert!(waits.changed().await.is_err());
        assert!(matches!(turns.take("a"), Place::First(_)));
    }

    #[test]
    fn not_too_many() {
        let turns = Turns::default();
        let first = turns.take("a");
        let behind: Vec<_> = (0..WAITING).map(|_| turns.take("a")).collect();
        assert!(behind.iter().all(|place| matches!(place, Place::Behind(_))));
        assert!(matches!((turns.take("a"), &first), (Place::Alone, Place::First(_))));
        let others: Vec<_> = (1..ASKED).map(|n| turns.take(&n.to_string())).collect();
        assert!(others.iter().all(|place| matches!(place, Place::First(_))));
        assert!(matches!(turns.take("z"), Place::Alone));
    }
}
