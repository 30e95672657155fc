//! Threads that serve connections: one for each processor, each with its own runtime. A connection
//! stays on the thread where it starts, so a segment wakes only the thread that has its sockets.

use std::{
    io,
    num::NonZero,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};
use tokio::{
    runtime::{Builder, Handle},
    sync::watch,
};

/// Runtimes for connections. Dropping it ends the runtimes that it started, and everything that runs on them.
pub struct Workers {
    runtimes: Vec<Handle>,
    stop: watch::Sender<()>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Workers {
    /// Uses the current runtime for everything.
    ///
    /// # Panics
    ///
    /// Panics outside of a runtime.
    pub fn here() -> Workers {
        Workers { runtimes: vec![Handle::current()], stop: watch::Sender::new(()), threads: Vec::new() }
    }

    /// Starts one thread for each processor that the process may use. Fails if a thread or runtime cannot be created.
    pub fn start() -> io::Result<Workers> {
        let count = thread::available_parallelism().map_or(1, NonZero::get);
        let stop = watch::Sender::new(());
        let mut workers = Workers { runtimes: Vec::new(), stop, threads: Vec::new() };
        for number in 0..count {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            workers.runtimes.push(runtime.handle().clone());
            let mut stopped = workers.stop.subscribe();
            let work = move || {
                let _ = runtime.block_on(stopped.changed()); // an error means that the sender is gone, which is the signal
                runtime.shutdown_background();
            };
            workers.threads.push(thread::Builder::new().name(format!("worker-{number}")).spawn(work)?);
        }
        Ok(workers)
    }

    pub(crate) fn loads(&self) -> Loads {
        Loads(
            self.runtimes
                .iter()
                .map(|runtime| Arc::new(Load { runtime: runtime.clone(), live: AtomicUsize::new(0) }))
                .collect(),
        )
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop = watch::Sender::new(());
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a worker thread has panicked: its connections are lost");
            }
        }
    }
}

struct Load {
    runtime: Handle,
    live: AtomicUsize,
}

/// Number of connections that each worker serves. A spliced one needs no worker.
pub(crate) struct Loads(Vec<Arc<Load>>);

impl Loads {
    /// Returns the runtime of a worker.
    pub fn runtime(&self, number: usize) -> &Handle {
        &self.0[number % self.0.len()].runtime
    }

    /// Returns the number of tasks of all workers.
    pub fn tasks(&self) -> usize {
        self.0.iter().map(|load| load.runtime.metrics().num_alive_tasks()).sum()
    }

    /// Returns the runtimes of all workers.
    pub fn runtimes(&self) -> impl Iterator<Item = &Handle> {
        self.0.iter().map(|load| &load.runtime)
    }

    /// Assigns a connection to the worker with the fewest connections; among equals preferably to `awake`, which is running.
    pub fn seat(&self, awake: usize) -> Seat {
        let awake = awake % self.0.len();
        let key = |&i: &usize| (self.0[i].live.load(Relaxed), i != awake);
        let least = (0..self.0.len()).min_by_key(key).unwrap_or(awake);
        self.0[least].live.fetch_add(1, Relaxed);
        Seat(self.0[least].clone())
    }
}

/// A connection's place on a worker, until it is dropped. A connection that is taken back after a splice has none.
pub(crate) struct Seat(Arc<Load>);

impl Seat {
    pub fn runtime(&self) -> &Handle {
        &self.0.runtime
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.live.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn those_with_the_fewest_connections_get_the_next() {
        let workers = Workers::start().unwrap();
        let loads = workers.loads();
        let count = loads.0.len();
        let mut seats: Vec<Seat> = (0..3 * count).map(|_| loads.seat(1)).collect();
        assert!(loads.0.iter().all(|l| l.live.load(Relaxed) == 3), "evenly");
        let freed = seats.swap_remove(0);
        let runtime = freed.runtime().clone();
        drop(freed);
        assert_eq!(loads.seat(0).runtime().id(), runtime.id());
        let there = runtime.spawn(async { Handle::current().id() }).await.unwrap();
        assert_eq!(there, runtime.id());
    }
}
