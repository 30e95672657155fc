//! Who waits for a server of a pool while all of them have as many connections as they may have: first come, first served.

use super::{Choice, Key, Lease, Pool};
use crate::fault::{Fault, Step};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use tokio::{
    sync::{Mutex, Notify},
    time::timeout,
};

/// The queue of a pool.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: AtomicU32,
    /// Held by the one whose turn is next; tokio grants it in the order of arrival.
    turn: Mutex<()>,
    freed: Notify,
}

/// A place in the queue, until it is dropped.
struct Place<'a>(&'a Queue);

impl Queue {
    fn place(&self, places: u32) -> Option<Place<'_>> {
        let enter = |n| (n < places).then_some(n + 1);
        self.waiting.fetch_update(Relaxed, Relaxed, enter).ok().map(|_| Place(self))
    }

    /// Tells the next one that a server may have room.
    pub fn freed(&self) {
        self.freed.notify_one();
    }

    /// Returns how many wait.
    pub fn waiting(&self) -> u32 {
        self.waiting.load(Relaxed)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Relaxed);
    }
}

impl Pool {
    /// Returns a server like [`Pool::pick`]. Waits while those that could be had are full, behind all who wait already.
    pub async fn enter(&self, key: Key, tried: &[usize]) -> Result<Lease, Fault> {
        let none = || Fault::NoServer(self.config.name.clone());
        if self.queue.waiting() == 0 {
            match self.choose(key, tried) {
                Choice::Of(lease) => return Ok(lease),
                Choice::None => return Err(none()),
                Choice::Full => {}
            }
        }
        let _place = self.queue.place(self.config.queue).ok_or(Fault::Limit("connections to servers of the pool"))?;
        let waiting = async {
            let _turn = self.queue.turn.lock().await;
            loop {
                match self.choose(key, tried) {
                    Choice::Of(lease) => return Ok(lease),
                    Choice::None => return Err(none()),
                    Choice::Full => self.queue.freed.notified().await,
                }
            }
        };
        timeout(self.config.queue_wait, waiting).await.unwrap_or(Err(Fault::Timeout(Step::Queue)))
    }
}
