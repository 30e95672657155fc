//! The thread that reads forwarded data for taps.

use crate::{engine::Engine, sync::lock};
use std::{sync::Arc, time::Instant};

/// Starts the thread, once. Called at the first splice of a tapped leg.
pub(crate) fn start(engine: &Arc<Engine>) {
    engine.tap_ring.reader.get_or_init(|| {
        let of_thread = engine.clone();
        let thread = std::thread::Builder::new().name("taps".into()).spawn(move || hear(&of_thread));
        if let Err(error) = thread {
            tracing::error!(%error, "cannot start the reader of taps: they miss forwarded data");
        }
    });
}

/// Reads the ring until the engine closes.
fn hear(engine: &Engine) {
    let Some(d) = engine.datapath() else { return };
    let heard = d.poll_taps(|copied| {
        let mut stretches = lock(&engine.tap_ring.stretches);
        match copied {
            Some(copied) => stretches.copied(&copied),
            None => stretches.look(d, Instant::now()),
        }
        !engine.is_closing()
    });
    if let Err(error) = heard {
        tracing::error!(%error, "cannot read copies for taps: they miss forwarded data");
    }
    lock(&engine.tap_ring.stretches).close();
}
