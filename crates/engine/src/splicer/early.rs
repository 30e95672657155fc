//! Early connections: those to servers that are opened on a client's SYN, while the client shakes hands with us (TPOT, 2.3:
//! the pipelined handshake; docs/tpot.md).
//!
//! The client's connection has no socket yet; with SYN cookies, not even the kernel knows of it. So the connection to its server
//! waits under the client's addresses and the sequence number of its SYN. Whoever accepts the client's connection takes it along,
//! and [`Splicer::connect`] returns it. What nobody takes is reset.

use crate::{
    leg::{Leg, opened::EarlyConnection},
    passing::handshakes::Handshakes,
    splicer::{Splicer, connect::Behalf},
    sync::lock,
};
use longsplice_datapath::{Handshake, Tpot, TpotAsking, TpotHandshake, Tuple, register};
use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    future::pending,
    io,
    net::SocketAddr,
    os::fd::OwnedFd,
    pin::{Pin, pin},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    task::JoinHandle,
    time::{Instant, sleep_until},
};

/// Maximum number of early connections of a listener: each takes a descriptor and a port. At the limit, the oldest one makes
/// room, so that a flood of SYNs cannot keep others out for long.
const MOST: usize = 1024;
/// Time for which one waits for its client: longer than the SYNs of either connection take to be repeated, four times after a second
/// each on Linux, and then after two (net.ipv4.tcp_syn_linear_timeouts).
const PATIENCE: Duration = Duration::from_secs(10);

/// Counts an early connection for as long as it waits ([`Listener::pipeline`](crate::Listener::pipeline)).
pub type Permit = Box<dyn Send>;

type Allow = Box<dyn Fn(SocketAddr, SocketAddr) -> Option<Permit> + Send + Sync>;
type Refused = Box<dyn Fn(SocketAddr, SocketAddr, io::Error) + Send + Sync>;

/// The early connections of a listener.
pub(crate) struct Pipeline {
    splicer: Splicer,
    tpot: Arc<Tpot>,
    /// Clients are answered when their servers have answered.
    confirms: bool,
    /// Servers see the client's address.
    shows_clients: bool,
    allow: Allow,
    refused: Refused,
    /// Readable when `tpot` has heard of a client.
    heard: AsyncFd<OwnedFd>,
    waiting: Mutex<Waiting>,
}

/// The client's leg, and the sequence number of its SYN: a client may use a port again.
type Key = (Tuple, u32);

#[derive(Default)]
struct Waiting {
    all: HashMap<Key, Box<Early>>,
    /// The keys by number.
    by_age: BTreeMap<u64, Key>,
    /// Number of the next one.
    next: u64,
}

/// An early connection. Dropping it resets it.
pub(crate) struct Early {
    number: u64,
    until: Instant,
    connecting: JoinHandle<io::Result<Unclaimed>>,
    _permit: Permit,
}

impl fmt::Debug for Early {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Early")
    }
}

impl Drop for Early {
    fn drop(&mut self) {
        self.connecting.abort();
    }
}

impl EarlyConnection for Early {
    fn connected(mut self: Box<Early>) -> Pin<Box<dyn Future<Output = io::Result<Leg>> + Send>> {
        Box::pin(async move {
            let mut unclaimed = (&mut self.connecting).await.map_err(io::Error::other)??;
            unclaimed.leg.as_mut().map_or(Ok(()), Leg::enter)?;
            unclaimed.leg.take().ok_or_else(|| io::ErrorKind::NotConnected.into())
        })
    }
}

/// An open connection, which is reset unless somebody claims it.
struct Unclaimed {
    splicer: Splicer,
    leg: Option<Leg>,
}

impl Drop for Unclaimed {
    fn drop(&mut self) {
        if let Some(leg) = self.leg.take() {
            leg.abort();
            self.splicer.discard(leg);
        }
    }
}

impl Waiting {
    fn insert(&mut self, key: Key, connecting: JoinHandle<io::Result<Unclaimed>>, permit: Permit) {
        let number = self.next;
        self.next += 1;
        self.by_age.insert(number, key);
        self.all.insert(key, Box::new(Early { number, until: Instant::now() + PATIENCE, connecting, _permit: permit }));
    }

    fn remove(&mut self, key: &Key) -> Option<Box<Early>> {
        let early = self.all.remove(key)?;
        self.by_age.remove(&early.number);
        Some(early)
    }

    fn oldest(&self) -> Option<(Key, &Early)> {
        let key = self.by_age.first_key_value()?.1;
        self.all.get(key).map(|early| (*key, &**early))
    }
}

impl Pipeline {
    /// Begins to hear of clients that the listener with this rule will accept. Errors are those of maps, and of the current
    /// runtime, in which the listener accepts.
    pub fn begin(
        splicer: &Splicer,
        (tpot, rule, shows_clients): (&Arc<Tpot>, u32, bool),
        handshake: TpotHandshake,
        allow: Allow,
        refused: Refused,
    ) -> io::Result<Arc<Pipeline>> {
        let pipeline = Arc::new(Pipeline {
            splicer: splicer.clone(),
            tpot: tpot.clone(),
            confirms: handshake == TpotHandshake::Confirm,
            shows_clients,
            allow,
            refused,
            heard: register(tpot.askings()?, Interest::READABLE)?,
            waiting: Mutex::default(),
        });
        let listening = Arc::downgrade(&pipeline);
        let hear = move |asking| listening.upgrade().into_iter().for_each(|pipeline| pipeline.heard_of(asking));
        tpot.pipeline(rule, handshake, hear)?;
        Ok(pipeline)
    }

    /// Opens early connections, and resets those that are too old, while `work` goes on.
    pub async fn beside<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            let until = self.expire();
            let expired = async { if let Some(until) = until { sleep_until(until).await } else { pending().await } };
            let heard = async {
                match self.heard.readable().await {
                    Ok(mut heard) => heard.clear_ready(),
                    Err(_) => pending().await, // the runtime ends
                }
            };
            tokio::select! {
                () = heard => self.tpot.hear(),
                done = &mut work => return done,
                () = expired => {}
            }
        }
    }

    /// Takes the early connection of a client whose connection was accepted.
    pub fn take(&self, client: &Tuple, isn: u32) -> Option<Box<Early>> {
        self.tpot.hear(); // its SYN was reported before the listener got it
        self.waiting().remove(&(*client, isn))
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        lock(&self.waiting)
    }

    fn handshakes(&self) -> MutexGuard<'_, Handshakes> {
        lock(self.splicer.handshakes())
    }

    fn heard_of(self: &Arc<Self>, asking: TpotAsking) {
        let (key, TpotAsking { leg: client, syn, .. }) = ((asking.leg, asking.isn), asking);
        let mut waiting = self.waiting();
        let Some(syn) = syn else { return drop(waiting.remove(&key)) };
        if let Some(known) = waiting.all.get(&key) {
            // sent again, since our answer to the first one was lost
            if self.confirms && known.connecting.is_finished() {
                self.handshakes().give_back(&syn);
            }
            return;
        }
        let Some(permit) = (self.allow)(client.remote, client.local) else {
            if self.confirms {
                self.handshakes().give_back(&syn); // whoever accepts the connection learns why
            }
            return;
        };
        if waiting.all.len() >= MOST
            && let Some((oldest, _)) = waiting.oldest()
        {
            waiting.remove(&oldest);
        }
        let shown = self.shows_clients.then(|| client.remote.ip());
        let (splicer, held) = (self.splicer.clone(), self.confirms.then(|| (Arc::downgrade(self), syn, key)));
        let connecting = tokio::spawn(async move {
            let behalf = Behalf { hops: Some(asking.hops), syn: Some(&syn), shown, ..Behalf::default() };
            let connected = splicer.connect_for(client.local, behalf).await;
            let connected = connected.map(|leg| Unclaimed { splicer, leg: Some(leg) });
            match held.and_then(|(pipeline, syn, key)| Some((pipeline.upgrade()?, syn, key))) {
                Some((pipeline, syn, key)) => pipeline.confirm(&syn, &key, connected),
                None => connected,
            }
        });
        waiting.insert(key, connecting, permit);
    }

    /// Resets connections that have waited for too long. Returns when the next one will have.
    fn expire(&self) -> Option<Instant> {
        let mut waiting = self.waiting();
        while let Some((key, Early { until, connecting, .. })) = waiting.oldest() {
            if *until > Instant::now() {
                return Some(*until);
            }
            if self.confirms && !connecting.is_finished() {
                (self.refused)(key.0.remote, key.0.local, io::ErrorKind::TimedOut.into());
            }
            waiting.remove(&key);
        }
        None
    }

    /// Lets a client have its answer: that of our listener if the server has accepted the connection, otherwise a reset.
    fn confirm(&self, syn: &Handshake, key: &Key, connected: io::Result<Unclaimed>) -> io::Result<Unclaimed> {
        match connected {
            Ok(open) => {
                self.handshakes().give_back(syn);
                Ok(open)
            }
            Err(error) => {
                drop(self.waiting().remove(key)); // nobody takes it, and the client may try again
                self.handshakes().refuse(syn);
                (self.refused)(syn.leg.remote, syn.leg.local, error);
                Err(io::ErrorKind::ConnectionRefused.into())
            }
        }
    }
}
