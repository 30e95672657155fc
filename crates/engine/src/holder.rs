//! The hold policy: segments that arrive while a splice drains wait here unchanged, and are
//! sent on when the drain is over or was taken back. The data path limits how much may wait.

use crate::{Splicer, sync::lock};
use longsplice_datapath::{Datapath, HeldSegment, Pair, Reinjector, Side, Tuple};
use std::{
    collections::HashMap,
    io,
    sync::{MutexGuard, atomic::Ordering},
};

#[derive(Default)]
pub(crate) struct Holder {
    reinjector: Option<Reinjector>,
    /// Held segments by the leg on which they arrived, in order. Segments of other legs are late and do not wait.
    of: HashMap<Tuple, Vec<HeldSegment>>,
}

impl Holder {
    fn came(&mut self, d: &Datapath, held: HeldSegment) {
        match self.of.get_mut(&held.leg) {
            Some(waiting) => waiting.push(held),
            None => self.send(d, &held),
        }
    }

    fn let_go(&mut self, d: &Datapath, leg: &Tuple) {
        for held in self.of.remove(leg).unwrap_or_default() {
            self.send(d, &held);
        }
    }

    fn send(&mut self, d: &Datapath, held: &HeldSegment) {
        let Some(reinjector) = &mut self.reinjector else { return };
        if let Err(error) = d.reinject(reinjector, held) {
            tracing::debug!(leg = ?held.leg, %error, "what was held is lost, and will be sent again");
        }
    }
}

/// Holds the segments from two hosts while it lives.
pub(crate) struct Holding {
    splicer: Splicer,
    legs: Pair<Tuple>,
}

impl Holding {
    /// Starts to hold. Must be called before the freeze. Errors are those of raw sockets and threads.
    pub fn of(splicer: &Splicer, legs: Pair<Tuple>) -> io::Result<Holding> {
        let holding = Holding { splicer: splicer.internal(), legs };
        if let Some(d) = splicer.datapath() {
            let mut holder = holding.holder();
            if holder.reinjector.is_none() {
                let reinjector = d.reinjector().inspect_err(
                    |error| tracing::warn!(%error, "flows that are to be held are copied: that needs root or CAP_NET_RAW"),
                );
                holder.reinjector = Some(reinjector?);
                let engine = splicer.internal();
                std::thread::Builder::new().name("holder".into()).spawn(move || hear(&engine))?;
            }
            holder.of.extend(legs.map(|leg| (leg, Vec::new())));
        }
        Ok(holding)
    }

    fn holder(&self) -> MutexGuard<'_, Holder> {
        lock(&self.splicer.inner.holder)
    }

    /// Stops holding the segments from one host.
    pub fn let_go(&self, from: Side) {
        if let Some(d) = self.splicer.datapath() {
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
fn hear(splicer: &Splicer) {
    let Some(d) = splicer.datapath() else { return };
    let heard = d.poll_held(|held| {
        if let Some(held) = held {
            lock(&splicer.inner.holder).came(d, held);
        }
        !splicer.inner.stopping.load(Ordering::Relaxed)
    });
    if let Err(error) = heard {
        tracing::error!(%error, "what is held is lost, and will be sent again");
    }
}
