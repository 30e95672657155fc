//! The handle through which proxies connect, relay and splice, and the table of live flows.

use crate::{
    Ended, FlowInfo, FlowState, FlowStatus, Leftovers, Leg, Listener, Policy, Refusal,
    orphans::{self, Orphan},
    ports::{Ports, source_for, tuple},
    relay::Relay,
};
use longsplice_datapath::{Datapath, EventKind, ExpectError, OpenError, Options, Released, Tuple};
use socket2::{Domain, SockRef, Socket, Type};
use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    ops::RangeInclusive,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::{mpsc, watch};

/// How often a taken source port is replaced by the next before a connect fails: far more than TIME-WAITs in a row.
const PORT_TRIES: usize = 256;
/// How long the entries of a flow that has ended go on answering retransmissions (TIME-WAIT, 2 MSL as Linux has it).
pub(crate) const LINGER: Duration = Duration::from_secs(60);

/// What [`Splicer::open`] is to do.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Devices to attach to; empty means all Ethernet devices of this network namespace that are up.
    pub devices: Vec<String>,
    /// Source ports of connections to servers. Outside of `net.ipv4.ip_local_port_range`, or other programs meet them.
    pub source_ports: RangeInclusive<u16>,
    /// How many flows at most.
    pub max_flows: u32,
    /// Where to pin maps and links; `None`: below /sys/fs/bpf/longsplice, by network namespace.
    pub pin: Option<PathBuf>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions { devices: Vec::new(), source_ports: 10240..=28671, max_flows: 65536, pin: None }
    }
}

/// The engine. Cheap to clone; one per process.
#[derive(Clone)]
pub struct Splicer {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub datapath: Option<Datapath>,
    /// Why there is no data path.
    refusal: Refusal,
    ports: Ports,
    pub next_id: AtomicU64,
    flows: Mutex<HashMap<u64, Arc<FlowShared>>>,
    /// Spliced flows of an earlier process.
    pub orphans: Mutex<Vec<Orphan>>,
    waiting: Mutex<HashMap<Tuple, mpsc::UnboundedSender<EventKind>>>,
    pub stopping: AtomicBool,
    stop: watch::Sender<Stop>,
}

/// What live flows are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Go,
    /// End now.
    Reset,
    /// End now, but leave spliced flows to the kernel.
    Leave,
}

/// What lists show of a flow; written by its relay.
pub(crate) struct FlowShared {
    pub id: u64,
    pub info: FlowInfo,
    pub client: Tuple,
    pub server: Tuple,
    pub began: Instant,
    pub now: Mutex<FlowNow>,
    released: Mutex<Option<[Released; 2]>>,
    /// Commands of the operator.
    pub commands: mpsc::UnboundedSender<Command>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct FlowNow {
    pub state: FlowState,
    pub copied: [u64; 2],
    /// Bytes of finished spliced stretches.
    pub spliced: [u64; 2],
    /// Positions where the present spliced stretch began.
    pub since: [u64; 2],
    pub splices: u32,
    pub refusal: Option<Refusal>,
}

/// What an operator or a program may ask of a live flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Splice now, whatever the policy waits for.
    Splice,
    /// Back to control mode.
    Unsplice,
    /// Close the parked sockets silently.
    Release,
}

pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().expect("nothing panics under the engine's locks")
}

impl FlowShared {
    pub fn now(&self) -> MutexGuard<'_, FlowNow> {
        lock(&self.now)
    }

    pub fn released(&self) -> MutexGuard<'_, Option<[Released; 2]>> {
        lock(&self.released)
    }

    /// Positions of all that came from the hosts.
    pub fn ends(&self, datapath: &Datapath) -> Option<[u64; 2]> {
        match *self.released() {
            Some([a, b]) => Some([datapath.released_end(&a)?, datapath.released_end(&b)?]),
            None => datapath.look(&self.client, &self.server).ok().map(|s| s.end),
        }
    }

    fn status(&self, datapath: Option<&Datapath>) -> FlowStatus {
        let now = *self.now();
        let ends = match now.state {
            FlowState::Copying | FlowState::Unsplicing => None,
            _ => datapath.and_then(|d| self.ends(d)),
        };
        let live = ends.map_or([0; 2], |e| [0, 1].map(|i| e[i].saturating_sub(now.since[i])));
        let bytes = |i: usize| now.copied[i] + now.spliced[i] + live[i];
        FlowStatus {
            id: self.id,
            protocol: self.info.protocol.to_owned(),
            client: self.client.remote,
            server: self.server.remote,
            target: self.info.target.clone(),
            user: self.info.user.clone(),
            state: now.state,
            stages: stages(now.state, self.info.protocol),
            bytes_up: bytes(0),
            bytes_down: bytes(1),
            age_ms: self.began.elapsed().as_millis() as u64,
            refusal: now.refusal,
        }
    }
}

/// The stages a segment traverses (connection-splicing paper, Figs. 6 and 8).
pub(crate) fn stages(state: FlowState, protocol: &'static str) -> Vec<&'static str> {
    match state {
        FlowState::Copying => vec!["device", "ip", "tcp", protocol, "tcp", "ip", "device"],
        FlowState::Draining | FlowState::Unsplicing => {
            vec!["device", "switch", "ip", "tcp", protocol, "tcp", "ip", "device"]
        }
        FlowState::Spliced | FlowState::Released => vec!["device", "forward", "device"],
    }
}

impl Splicer {
    /// Loads the data path. On error, [`Splicer::copying`] still serves.
    pub fn open(options: &OpenOptions) -> Result<Splicer, OpenError> {
        let datapath = Datapath::open(&Options {
            devices: options.devices.clone(),
            pin: options.pin.clone(),
            max_flows: options.max_flows,
        })?;
        let s = Splicer::with(Some(datapath), Refusal::Unprivileged, options.source_ports.clone());
        orphans::adopt(&s.inner)?;
        let weak = Arc::downgrade(&s.inner);
        std::thread::Builder::new()
            .name("events".into())
            .spawn(move || {
                let Some(inner) = weak.upgrade() else { return };
                let d = inner.datapath.as_ref().expect("opened above");
                // the thread holds the engine until told to stop
                if let Err(error) = d.poll_events(|e| {
                    if let Some(e) = e
                        && let Some(to) = lock(&inner.waiting).get(&e.leg)
                    {
                        let _ = to.send(e.kind); // a flow that has just ended hears nothing any more
                    }
                    !inner.stopping.load(Ordering::Relaxed)
                }) {
                    tracing::error!(%error, "events of the data path are lost; flows notice by polling");
                }
            })
            .map_err(|source| OpenError::Kernel { what: "event thread", source })?;
        Ok(s)
    }

    /// An engine that only copies; every flow shows `reason`.
    pub fn copying(reason: Refusal) -> Splicer {
        Splicer::with(None, reason, OpenOptions::default().source_ports)
    }

    fn with(datapath: Option<Datapath>, refusal: Refusal, ports: RangeInclusive<u16>) -> Splicer {
        Splicer {
            inner: Arc::new(Inner {
                datapath,
                refusal,
                ports: Ports::new(ports),
                next_id: AtomicU64::new(1),
                flows: Mutex::default(),
                orphans: Mutex::default(),
                waiting: Mutex::default(),
                stopping: AtomicBool::new(false),
                stop: watch::Sender::new(Stop::Go),
            }),
        }
    }

    /// The data path, for counters and lists.
    pub fn datapath(&self) -> Option<&Datapath> {
        self.inner.datapath.as_ref()
    }

    /// Why no flow can be spliced at all, if so.
    pub fn refusal(&self) -> Option<Refusal> {
        self.inner.datapath.is_none().then_some(self.inner.refusal)
    }

    /// Listens on `addr`, IPv6-only for IPv6 addresses, SO_REUSEADDR set.
    pub async fn listen(&self, addr: SocketAddr) -> io::Result<Listener> {
        let s = Socket::new(Domain::for_address(addr), Type::STREAM, None)?;
        if addr.is_ipv6() {
            s.set_only_v6(true)?;
        }
        s.set_reuse_address(true)?;
        s.set_nonblocking(true)?;
        s.bind(&addr.into())?;
        if let Some(d) = &self.inner.datapath {
            let bound = s.local_addr()?.as_socket().expect("bound to an IP address");
            d.listen(bound)?; // before listen(2): the first SYN counts
        }
        s.listen(4096)?;
        Ok(Listener { listener: tokio::net::TcpListener::from_std(s.into())? })
    }

    /// Connects to a server on behalf of `client`. No time limit of its own.
    ///
    /// The server is told the MSS of the client, so that its segments fit the client's path when they are forwarded
    /// whole (symmetric TCP splice, 5.4.4).
    pub async fn connect(&self, server: SocketAddr, client: &Leg) -> io::Result<Leg> {
        let mss = self.inner.datapath.as_ref().and_then(|d| d.leg(&client.tuple())).map(|l| l.mss_in);
        self.connect_with(server, mss).await
    }

    /// The same with an MSS in bytes, or none.
    pub async fn connect_with(&self, server: SocketAddr, mss: Option<u16>) -> io::Result<Leg> {
        let source = source_for(server)?;
        let Some(d) = self.inner.datapath.as_ref().filter(|_| !source.is_loopback()) else {
            return Leg::new(tokio::net::TcpStream::connect(server).await?);
        };
        for _ in 0..PORT_TRIES {
            let t = tuple(server, source, self.inner.ports.next());
            let s = Socket::new(Domain::for_address(server), Type::STREAM, None)?;
            s.set_nonblocking(true)?;
            if let Err(e) = s.bind(&t.local.into()) {
                if e.kind() == io::ErrorKind::AddrInUse {
                    continue;
                }
                return Err(e);
            }
            match d.expect(&t) {
                Ok(()) => {}
                Err(ExpectError::Taken) => continue,
                Err(e) => tracing::warn!(leg = ?t, error = %e, "connection will not be tracked"),
            }
            if let Some(mss) = mss.filter(|m| *m >= 88) {
                // best effort: the kernel refuses values below its minimum, and keeps its own then
                let _ = SockRef::from(&s).set_tcp_mss(mss.into());
            }
            // Dropped without a connection, by an error or because the caller gave up: nothing stays behind.
            let mut expected = Expected { datapath: d, leg: Some(t) };
            let leg = tokio::net::TcpSocket::from_std_stream(s.into()).connect(server).await.and_then(Leg::new)?;
            expected.leg = None;
            return Ok(leg);
        }
        Err(io::Error::new(io::ErrorKind::AddrNotAvailable, "no free source port: widen source_ports"))
    }

    /// Relays until both directions have ended: copies, splices when `policy` says so, and copies again if it must.
    /// `left` is delivered first. Half-closes and resets are passed on.
    pub async fn relay(&self, client: Leg, server: Leg, left: Leftovers, policy: &Policy, info: FlowInfo) -> Ended {
        let (commands, orders) = mpsc::unbounded_channel();
        let shared = Arc::new(FlowShared {
            id: self.inner.next_id.fetch_add(1, Ordering::Relaxed),
            info,
            client: client.tuple(),
            server: server.tuple(),
            began: Instant::now(),
            now: Mutex::new(FlowNow {
                state: FlowState::Copying,
                copied: [0; 2],
                spliced: [0; 2],
                since: [0; 2],
                splices: 0,
                refusal: self.refusal(),
            }),
            released: Mutex::default(),
            commands,
        });
        let registered = Registered::new(&self.inner, shared);
        Relay::new(self, &registered, policy, client, server, left, orders).run().await
    }

    /// All live flows, and those that an earlier process left in forwarding mode.
    pub fn flows(&self) -> Vec<FlowStatus> {
        let flows: Vec<_> = lock(&self.inner.flows).values().cloned().collect();
        let own = flows.iter().map(|f| f.status(self.inner.datapath.as_ref()));
        own.chain(lock(&self.inner.orphans).iter().map(Orphan::status)).collect()
    }

    /// Asks something of a live flow. False: there is no such flow.
    pub fn command(&self, id: u64, command: Command) -> bool {
        lock(&self.inner.flows).get(&id).is_some_and(|f| f.commands.send(command).is_ok())
    }

    /// Ends all flows now; `leave`: spliced ones go on in the kernel, without this process.
    pub fn stop(&self, leave: bool) {
        self.inner.stop.send_replace(if leave { Stop::Leave } else { Stop::Reset });
    }

    /// After all relays have returned: removes everything that was attached and pinned, unless flows were left to the
    /// kernel by [`Splicer::stop`].
    pub fn close(self) -> io::Result<()> {
        self.inner.stopping.store(true, Ordering::Relaxed);
        match &self.inner.datapath {
            Some(d) if *self.inner.stop.borrow() != Stop::Leave => d.remove(),
            _ => Ok(()),
        }
    }

    pub(crate) fn stop_signal(&self) -> watch::Receiver<Stop> {
        self.inner.stop.subscribe()
    }
}

/// The record of a connection that is being opened.
struct Expected<'a> {
    datapath: &'a Datapath,
    leg: Option<Tuple>,
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        if let Some(t) = &self.leg {
            self.datapath.forget(t);
        }
    }
}

/// A flow in the tables, for as long as its relay runs.
pub(crate) struct Registered {
    inner: Arc<Inner>,
    pub shared: Arc<FlowShared>,
}

impl Registered {
    fn new(inner: &Arc<Inner>, shared: Arc<FlowShared>) -> Registered {
        lock(&inner.flows).insert(shared.id, shared.clone());
        Registered { inner: inner.clone(), shared }
    }

    /// Events of both legs from now on.
    pub fn events(&self) -> mpsc::UnboundedReceiver<EventKind> {
        let (tx, rx) = mpsc::unbounded_channel();
        let mut w = lock(&self.inner.waiting);
        w.insert(self.shared.client, tx.clone());
        w.insert(self.shared.server, tx);
        rx
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        lock(&self.inner.flows).remove(&self.shared.id);
        let mut w = lock(&self.inner.waiting);
        w.remove(&self.shared.client);
        w.remove(&self.shared.server);
    }
}
