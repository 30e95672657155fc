//! The thread that reads forwarded data for taps.

use crate::{engine::Engine, sync::lock};
use std::{sync::Arc, time::Instant};

/// Starts the thread, once. Called at the first splice of a tapped leg.
pub(crate) fn start(engine: &Arc<Engine>) {
    engine.tap_reader.call_once(|| {
        let of_thread = engine.clone();
        let thread = std::thread::Builder::new().name("taps".into()).spawn(move || hear(&of_thread));
        if let Err(error) = thread {
            tracing::error!(%error, "taps will miss what is forwarded");
        }
    });
}

/// Reads the ring until the engine closes.
fn hear(engine: &Engine) {
    let Some(d) = engine.datapath() else { return };
    let heard = d.poll_taps(|copied| {
        let mut stretches = lock(&engine.stretches);
        match copied {
            Some(copied) => stretches.copied(&copied),
            None => stretches.look(d, Instant::now()),
        }
        !engine.is_closing()
    });
    if let Err(error) = heard {
        tracing::error!(%error, "copies of what is forwarded are lost");
    }
    lock(&engine.stretches).close();
}
