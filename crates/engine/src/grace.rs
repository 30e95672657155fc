//! [`Grace`], the wait for segments under way, shared by all connections that are being adopted.

use crate::sync::lock;
use longsplice_datapath::await_packets;
use std::{
    mem::{replace, take},
    sync::{Arc, Mutex},
};
use tokio::{runtime::Handle, sync::oneshot};

/// Waits until segments that pass programs now have reached their sockets ([`await_packets`]), once for all who wait.
#[derive(Default)]
pub(crate) struct Grace(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    for_next: Vec<oneshot::Sender<()>>,
    /// There is a thread for them.
    has_thread: bool,
}

impl Grace {
    /// Begins to wait, in a runtime. The receiver fails if the kernel cannot wait.
    pub fn begin(self: &Arc<Grace>) -> oneshot::Receiver<()> {
        let (tell, told) = oneshot::channel();
        let mut waiting = lock(&self.0);
        waiting.for_next.push(tell);
        if !replace(&mut waiting.has_thread, true) {
            let mut thread = GraceThread(Some(self.clone()));
            Handle::current().spawn_blocking(move || thread.run());
        }
        told
    }
}

/// The thread. Whoever waits is told if it ends early, with its runtime.
struct GraceThread(Option<Arc<Grace>>);

impl GraceThread {
    fn run(&mut self) {
        while let Some(grace) = &self.0 {
            let now = {
                let mut waiting = lock(&grace.0);
                waiting.has_thread = !waiting.for_next.is_empty();
                take(&mut waiting.for_next)
            };
            if now.is_empty() {
                self.0 = None;
            } else if let Err(error) = await_packets() {
                tracing::warn!(%error, "cannot wait for segments that pass: connections that the data path does not know are copied");
            } else {
                for tell in now {
                    let _ = tell.send(()); // its flow may have ended meanwhile
                }
            }
        }
    }
}

impl Drop for GraceThread {
    fn drop(&mut self) {
        if let Some(grace) = &self.0 {
            *lock(&grace.0) = Waiting::default();
        }
    }
}
