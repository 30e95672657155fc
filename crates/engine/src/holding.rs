//! The hold policy at work: the segments of one flow are held while it drains, and a thread reads them.

use crate::{engine::Engine, holder::Holder, sync::lock};
use longsplice_datapath::{Pair, Side, Tuple};
use std::{
    io,
    sync::{Arc, MutexGuard},
};

/// Holds the segments from two hosts while it lives.
pub(crate) struct Holding {
    engine: Arc<Engine>,
    legs: Pair<Tuple>,
}

impl Holding {
    /// Starts to hold. Must be called before the freeze. Errors are those of raw sockets and threads.
    pub fn of(engine: &Arc<Engine>, legs: Pair<Tuple>) -> io::Result<Holding> {
        let holding = Holding { engine: engine.clone(), legs };
        if let Some(d) = engine.datapath() {
            let is_first = holding.holder().begin(d, legs).inspect_err(
                |error| tracing::warn!(%error, "flows that are to be held are copied: that needs root or CAP_NET_RAW"),
            )?;
            if is_first {
                let of_thread = engine.clone();
                std::thread::Builder::new().name("holder".into()).spawn(move || hear(&of_thread))?;
            }
        }
        Ok(holding)
    }

    fn holder(&self) -> MutexGuard<'_, Holder> {
        lock(&self.engine.holder)
    }

    /// Stops holding the segments from one host.
    pub fn let_go(&self, from: Side) {
        if let Some(d) = self.engine.datapath() {
            self.holder().let_go(d, &self.legs[from]);
        }
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        Side::BOTH.into_iter().for_each(|from| self.let_go(from));
    }
}

/// Runs the thread that reads the ring, until the engine closes.
fn hear(engine: &Engine) {
    let Some(d) = engine.datapath() else { return };
    let heard = d.poll_held(|held| {
        if let Some(held) = held {
            lock(&engine.holder).came(d, held);
        }
        !engine.is_closing()
    });
    if let Err(error) = heard {
        tracing::error!(%error, "what is held is lost, and will be sent again");
    }
}
