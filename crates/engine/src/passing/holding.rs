//! Segments of one flow that are held, and the thread that reads them: under the hold policy while the flow drains
//! ([`Holding`]), and between two hosts' handshake and the first splice ([`FirstData`]).

use crate::{
    engine::{
        Engine,
        holder::{Hold, Holder},
    },
    leg::opened::HeldData,
    sync::lock,
};
use longsplice_datapath::{Pair, Side, Tuple};
use std::{
    io,
    sync::{
        Arc, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

/// Opens a raw socket for held segments, and starts the thread that reads them, if that has not been done. A listener all of
/// whose flows begin by holding does it beforehand: later, there may be no free descriptor. Errors are those of raw sockets
/// and threads.
pub(crate) fn prepare(engine: &Arc<Engine>) -> io::Result<()> {
    let Some(d) = engine.datapath() else { return Ok(()) };
    let mut holder = lock(&engine.holder);
    if !holder.is_open() {
        let (reinjector, of_thread) = (d.reinjector()?, engine.clone());
        std::thread::Builder::new().name("holder".into()).spawn(move || hear(&of_thread))?;
        holder.open(reinjector);
    }
    Ok(())
}

/// Holds the segments from two hosts while it lives.
pub(crate) struct Holding {
    engine: Arc<Engine>,
    legs: Pair<Tuple>,
    hold: Hold,
}

impl Holding {
    /// Starts to hold. Must be called before the freeze. Errors are those of raw sockets and threads.
    pub fn of(engine: &Arc<Engine>, legs: Pair<Tuple>) -> io::Result<Holding> {
        prepare(engine).inspect_err(
            |error| tracing::warn!(%error, "cannot hold segments, which needs root or CAP_NET_RAW: flows with the hold policy are copied"),
        )?;
        let hold = lock(&engine.holder).begin(legs);
        Ok(Holding { engine: engine.clone(), legs, hold })
    }

    fn holder(&self) -> MutexGuard<'_, Holder> {
        lock(&self.engine.holder)
    }

    /// Stops holding the segments from one host.
    pub fn let_go(&self, from: Side) {
        if let Some(d) = self.engine.datapath() {
            self.holder().let_go(d, &self.legs[from], self.hold);
        }
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        Side::BOTH.into_iter().for_each(|from| self.let_go(from));
    }
}

/// The first data of two hosts that shook hands with each other waits in the data path until this is
/// dropped or [released](FirstData::release): it then belongs to whoever has the bytes of the flow.
pub(crate) struct FirstData {
    held: Holding,
    released: AtomicBool,
}

impl FirstData {
    /// Starts to hold. Must be called before a host may send. Errors are those of raw sockets and threads.
    pub fn of(engine: &Arc<Engine>, legs: Pair<Tuple>) -> io::Result<FirstData> {
        Ok(FirstData { held: Holding::of(engine, legs)?, released: AtomicBool::new(false) })
    }
}

impl HeldData for FirstData {
    fn release(&self) {
        if self.released.swap(true, Ordering::Relaxed) {
            return;
        }
        let legs = self.held.legs.each_ref();
        // those of the next connection from the same port may wait already
        let are_of_this = legs.iter().any(|leg| self.held.holder().has(leg, self.held.hold));
        // held segments that are sent on do not wait again, so an error costs time only
        if let Some(Err(error)) = self.held.engine.datapath().filter(|_| are_of_this).map(|d| d.decided(legs)) {
            tracing::warn!(?legs, %error, "cannot end the hold: segments still pass through user space");
        }
        Side::BOTH.into_iter().for_each(|from| self.held.let_go(from));
    }
}

impl Drop for FirstData {
    fn drop(&mut self) {
        self.release();
    }
}

impl std::fmt::Debug for FirstData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("FirstData").field(&self.held.legs).finish()
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
        tracing::error!(%error, "cannot read held segments: they are lost, and their hosts retransmit them");
    }
}
