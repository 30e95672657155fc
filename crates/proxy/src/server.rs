//! The server: listens, accepts connections within the limits, and stops gracefully. Its configuration may change meanwhile
//! ([`reload`]).

mod alive;
pub(crate) mod check;
mod connection;
mod door;
pub(crate) mod explain;
mod handing;
pub(crate) mod pausing;
mod plug;
pub(crate) mod reload;
mod taken_up;

use crate::{
    access::own::Listening,
    config::{Config, ListenerConfig},
    context::{
        Opened, Purge, Purged, ServerContext, Service, TapDirs,
        handing::Handing,
        relays::Relays,
        roll::Roll,
        tap_dir::TapDir,
        watcher::{Means, Note, Triggers, watch_all},
        workers::Workers,
    },
    counters::{CounterValues, Counters, ListenerValues, tcp_memory},
    events::Events,
    handed::KnownServer,
    inherited::{Inherited, OfListener},
    limits::{CONNECTIONS, Counted},
    log::{access_log::AccessLog, turned_away::TurnedAway},
    pool::{
        self, Pools, Upkeep,
        commanded::{self, PoolValues, Tell},
    },
    resolve::Resolver,
    start_error::StartError,
    tables::Tables,
    target::{Host, Target},
    tpot,
};
use door::Door;
use longsplice_engine::{BoundSocket, Splicer, Tpot, TpotWhose};
use std::{
    collections::{BTreeSet, HashMap},
    io,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::{
    sync::{mpsc::UnboundedReceiver, watch},
    task::{JoinHandle, spawn_blocking},
    time::timeout,
};

/// Initial and maximum pause of accepting when descriptors have run out; the pause is doubled each time.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// Time for which [`Server::drain`] waits for the last log lines, tap files and stored replies.
const FLUSH: Duration = Duration::from_secs(2);
/// Time in which services leave what only one process can have ([`Service::leave`]).
const LEAVES_WITHIN: Duration = Duration::from_secs(2);

fn cannot_listen(addr: SocketAddr) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError::Listen { addr, source }
}

/// A running server. Connections that are being relayed outlive it.
pub struct Server {
    shared: Arc<ServerContext>,
    /// What a reload changes.
    state: Mutex<State>,
    /// Held by a reload from begin to end.
    reloading: tokio::sync::Mutex<()>,
    /// Whether there is room for copies, and for segments that are held, in the data path.
    rings: [bool; 2],
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
    /// Translucent proxying, if the configuration needs it.
    tpot: Option<Arc<Tpot>>,
    inherited: Arc<Inherited>,
}

/// The configuration in force, and what has been made of it.
struct State {
    config: Config,
    /// In the order of the configuration.
    doors: Vec<Door>,
    /// Number of doors so far.
    numbered: usize,
    /// Names that are looked up all the time.
    followed: HashMap<String, JoinHandle<()>>,
    /// What goes on for services.
    tended: Vec<JoinHandle<()>>,
}

/// Opens a protocol of another crate, for those of its listeners that the configuration has. What another process still has is left
/// for [`Service::begin`].
pub type Open = fn(&Config, &Pools, &Inherited) -> Result<Arc<dyn Service>, StartError>;

/// All resources of a server except the data path: missing ones are noticed before the data path is touched.
pub struct Prepared {
    config: Config,
    /// Bound sockets; `None` for listeners that do not bind one.
    sockets: Vec<Option<BoundSocket>>,
    log: AccessLog,
    events: Arc<Events>,
    taps: TapDirs,
    pools: Pools,
    services: Vec<Arc<dyn Service>>,
    inherited: Arc<Inherited>,
    paused: BTreeSet<Arc<str>>,
}

impl Prepared {
    /// Binds all listeners, and opens the log, tap directories and services. Fails if any of them cannot be had.
    pub fn new(config: Config, services: &[Open]) -> Result<Prepared, StartError> {
        Prepared::with(config, services, Inherited::default())
    }

    /// The same. Listeners at the addresses of inherited sockets have these, after each reload as well.
    pub fn with(config: Config, services: &[Open], inherited: Inherited) -> Result<Prepared, StartError> {
        let places = config.places.clone();
        Prepared::open(config, services, inherited).map_err(|e| e.at(&places))
    }

    fn open(config: Config, services: &[Open], inherited: Inherited) -> Result<Prepared, StartError> {
        if config.listeners.is_empty() {
            return Err(StartError::NoListener);
        }
        tpot::check(&config)?;
        let sockets = config.listeners.iter().map(|l| bind(l, &inherited)).collect::<Result<_, _>>()?;
        let log = AccessLog::open(&config.log)
            .map_err(|source| StartError::AccessLog { to: config.log.to.clone(), source })?;
        let taps = taps(&config, &TapDirs::default())?;
        let events = Arc::default();
        let pools = pool::open(&config.pools, &Pools::default(), &events);
        let services = services.iter().map(|open| open(&config, &pools, &inherited)).collect::<Result<Vec<_>, _>>()?;
        let mut protocols = config.listeners.iter().map(|l| &l.protocol).filter(|p| p.traits().is_service);
        match protocols.find(|protocol| !services.iter().any(|service| service.serves(protocol))) {
            Some(missing) => Err(StartError::NotServed(missing.name())),
            None => {
                let (inherited, paused) = (inherited.into(), BTreeSet::new());
                Ok(Prepared { config, sockets, log, events, taps, pools, services, inherited, paused })
            }
        }
    }

    /// Returns the configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Lets clients connect from now on, and wait until the start is over. Those of a start that fails are reset.
    pub fn listen(&mut self) -> Result<(), StartError> {
        for (listener, socket) in self.config.listeners.iter().zip(&mut self.sockets) {
            if let Some(socket) = socket.as_mut().filter(|_| waits_well(listener)) {
                match socket.listen() {
                    // somebody has the address for an instant: it is tried again when the data path is there
                    Err(e) if e.kind() == io::ErrorKind::AddrInUse => {}
                    listens => listens.map_err(cannot_listen(listener.listen))?,
                }
            }
        }
        Ok(())
    }

    /// Goes on with what another process has known of servers of pools.
    pub fn know(&self, servers: &[KnownServer]) {
        commanded::know(&self.pools, servers);
    }

    /// Lets listeners of these names accept nobody at first, as another process has done: [`Server::paused`].
    pub fn pause(&mut self, names: Vec<String>) {
        self.paused = names.into_iter().map(Arc::from).collect();
    }

    /// Listens, and starts to serve connections on these workers.
    pub async fn start(self, workers: &Workers, splicer: Splicer) -> Result<Server, StartError> {
        let Prepared { config, sockets, log, events, taps, pools, services, inherited, paused } = self;
        let of_before = services.clone();
        let _ = spawn_blocking(move || of_before.iter().for_each(|service| service.begin())).await; // nothing of it panics
        let tpot = tpot::open(&config, inherited.follows())?;
        let stop = watch::Sender::new(false);
        let (triggers, notes) = Triggers::new();
        let shared = Arc::new(ServerContext {
            splicer,
            triggers,
            resolver: Resolver::default(),
            tpot: tpot.as_ref().map(Arc::downgrade).unwrap_or_default(),
            opened: Default::default(),
            log,
            turned_away: TurnedAway::default(),
            events,
            counters: Arc::default(),
            loads: workers.loads(),
            relays: Relays::default(),
            roll: Roll::default(),
            forbidden: Mutex::default(),
            led: Default::default(),
            all: Counted::new(config.connections.unwrap_or(CONNECTIONS), u32::MAX),
            early: Counted::unlimited(),
            silent: Default::default(),
            tables: Tables::default(),
            live: watch::Sender::new(0),
            stop: stop.subscribe(),
            handed_over: false.into(),
            handing: Handing::default(),
        });
        let mut opened = Opened { pools, services, taps, listening: Listening::default() };
        let mut doors = Vec::new();
        for (number, (listener, socket)) in config.listeners.iter().zip(sockets).enumerate() {
            let of = (listener.clone(), socket);
            doors.push(Door::open((&shared, tpot.as_ref()), of, &opened, (number, None)).await?);
        }
        tpot.iter().try_for_each(|tpot| tpot.settle()).map_err(StartError::Asking)?;
        shared.splicer.settle();
        opened.listening = listening(&doors, &opened.pools);
        shared.set_opened(opened);
        taken_up::take_up(&shared, &doors); // their servers are those of pools
        let (tasks, reloading) = (Vec::new(), tokio::sync::Mutex::default());
        let needs = |of: fn(&ListenerConfig) -> bool| config.listeners.iter().any(of);
        let rings = [ListenerConfig::copies as fn(&ListenerConfig) -> bool, ListenerConfig::holds].map(needs);
        let rings = rings.map(|is| is || shared.splicer.refusal().is_some());
        let numbered = doors.len();
        let state = Mutex::new(State { config, doors, numbered, followed: HashMap::new(), tended: Vec::new() });
        let mut server = Server { shared, state, reloading, rings, stop, tasks, tpot, inherited };
        server.pull_triggers(notes);
        server.keep_tunnels();
        server.tasks.push(server.shared.loads.runtime(0).spawn(alive::tell(server.shared.clone())));
        let mut state = lock(&server.state);
        server.tend(&mut state);
        server.inherited.close_unneeded();
        state.keep_paused(&paused, &server.shared.events);
        state.doors.iter_mut().for_each(Door::accept);
        drop(state);
        Ok(server)
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // A reload that panics has not begun to change it.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns whether clients of a listener may wait in the queue of its socket while no process is there. An intercepted connection
/// needs its rule, one whose client is shown a record from its SYN on, and hosts that shake hands with each other need us for it.
fn waits_well(listener: &ListenerConfig) -> bool {
    listener.intercepts.is_none() && !listener.shows_clients && !listener.is_between_hosts()
}

/// Binds the address of a listener, if it has a socket.
fn bind(listener: &ListenerConfig, inherited: &Inherited) -> Result<Option<BoundSocket>, StartError> {
    inherited.bind(listener).map_err(cannot_listen(listener.listen))
}

/// Returns the directories for taps. Those that are open already are used again.
fn taps(config: &Config, open: &TapDirs) -> Result<TapDirs, StartError> {
    let mut taps = HashMap::new();
    for dir in config.listeners.iter().flat_map(ListenerConfig::tap_dirs) {
        if !taps.contains_key(dir) {
            let new = || TapDir::open(dir).map(Arc::new).map_err(|source| StartError::Tap { dir: dir.clone(), source });
            taps.insert(dir.clone(), open.get(dir).cloned().map_or_else(new, Ok)?);
        }
    }
    Ok(Arc::new(taps))
}

impl Server {
    /// Starts what goes on beside all connections: the names of the configuration are looked up, and services do what they do.
    /// What the configuration does not need any more ends.
    fn tend(&self, state: &mut State) {
        let (shared, runtime) = (&self.shared, self.shared.loads.runtime(0));
        let names = names(&state.config);
        let gone: Vec<String> = state.followed.keys().filter(|name| !names.contains(*name)).cloned().collect();
        gone.iter().filter_map(|name| state.followed.remove(name)).for_each(|task| task.abort());
        for name in names {
            let follow = || runtime.spawn(shared.resolver.clone().follow(name.clone()));
            state.followed.entry(name.clone()).or_insert_with(follow);
        }
        state.tended.retain(|task| !task.is_finished());
        let opened = shared.opened();
        let upkeep = Upkeep {
            splicer: shared.splicer.clone(),
            resolver: shared.resolver.clone(),
            counters: shared.counters.clone(),
            stop: shared.stop.clone(),
        };
        state.tended.extend(opened.pools.values().flat_map(|pool| pool.tend(&upkeep)));
        state.tended.extend(opened.services.iter().flat_map(|service| service.tend(shared)));
    }

    /// Starts to look after tunnels.
    fn keep_tunnels(&mut self) {
        let tunnels = |tpot| tpot::tend(Arc::downgrade(tpot), Some(self.shared.splicer.clone()));
        self.tasks.extend(self.tpot.as_ref().map(|tpot| self.shared.loads.runtime(0).spawn(tunnels(tpot))));
    }

    /// Starts to watch connections with triggers.
    fn pull_triggers(&mut self, notes: UnboundedReceiver<Note>) {
        let ServerContext { splicer, counters, loads, .. } = &*self.shared;
        let means = Means { splicer: splicer.clone(), counters: counters.clone() };
        self.tasks.push(loads.runtime(0).spawn(watch_all(notes, Arc::new(means))));
    }

    /// Binds all listeners and starts to serve in the current runtime.
    pub async fn start(splicer: Splicer, config: Config, services: &[Open]) -> Result<Server, StartError> {
        Prepared::new(config, services)?.start(&Workers::here(), splicer).await
    }

    /// Returns the listening addresses in the order of the configuration, with the ports that the kernel chose.
    pub fn listen_addrs(&self) -> Vec<SocketAddr> {
        lock(&self.state).doors.iter().map(|door| door.addr).collect()
    }

    /// Closes the listening sockets; connections continue. This cannot be undone.
    pub fn stop_accepting(&self) {
        self.stop.send_replace(true);
        self.shared.handing.stop();
        lock(&self.state).doors.iter().for_each(Door::stop_accepting);
    }

    /// Accepts no clients any more, because another process does, and waits until none is being accepted. What else goes on does so
    /// until [`Server::stop_accepting`]. HTTP connections between two requests stay until the next one even then, and are closed
    /// after its reply: a client may be about to send it. What only one process can have is left.
    pub async fn leave_doors(&self) {
        self.shared.handed_over.store(true, Relaxed);
        let opened = self.shared.opened();
        let leave = spawn_blocking(move || opened.services.iter().for_each(|service| service.leave()));
        // on a disk that hangs, another process has to do without
        let _ = timeout(LEAVES_WITHIN, leave).await;
        let tasks: Vec<_> = lock(&self.state).doors.iter_mut().flat_map(Door::leave).collect();
        for task in tasks {
            let _ = task.await; // it has ended, or its runtime has
        }
    }

    /// Returns other descriptors of the listening sockets, with the names of their listeners. Those without a name are a supervisor's.
    pub fn sockets(&self) -> io::Result<Vec<(Option<OfListener>, TcpListener)>> {
        let mut all: Vec<_> = self.inherited.kept()?.into_iter().map(|socket| (None, socket)).collect();
        for door in &lock(&self.state).doors {
            let of = |listener: &ListenerConfig| OfListener {
                name: listener.name.to_string(),
                intercepts: listener.intercepts.map(|whose| (listener.listen, whose == TpotWhose::Askers)),
            };
            all.extend(door.socket()?.map(|socket| (Some(of(&door.fronts.now().listener)), socket)));
        }
        Ok(all)
    }

    /// Returns other descriptors of the sockets in which clients may wait for the next process, and which no supervisor has opened.
    pub fn own_sockets(&self) -> io::Result<Vec<TcpListener>> {
        let kept = self.inherited.kept()?.iter().map(TcpListener::local_addr).collect::<io::Result<Vec<_>>>()?;
        let mut all = Vec::new();
        for door in &lock(&self.state).doors {
            if waits_well(&door.fronts.now().listener) {
                all.extend(door.socket()?);
            }
        }
        all.retain(|socket| socket.local_addr().is_ok_and(|at| !kept.contains(&at)));
        Ok(all)
    }

    /// Returns the directories of caches that [`Server::leave_doors`] leaves.
    pub fn cache_dirs(&self) -> Vec<PathBuf> {
        let dir = |listener: &ListenerConfig| Some(listener.cache()?.dir.clone());
        lock(&self.state).config.listeners.iter().filter_map(dir).collect()
    }

    /// Returns translucent proxying, if the configuration needs it. Close it after the engine: the last segments need their tunnels.
    pub fn tpot(&self) -> Option<Arc<Tpot>> {
        self.tpot.clone()
    }

    /// Waits until no connection is left, for `limit` at most, and returns the number that is left. Does not stop accepting.
    pub async fn drain(&self, limit: Duration) -> u64 {
        let mut live = self.shared.live.subscribe();
        let ended = async {
            // The sender is in `self`, so the wait ends with zero or at the limit.
            let _ = live.wait_for(|n| *n == 0).await;
            self.shared.splicer.ended().await;
        };
        let _ = timeout(limit, ended).await;
        let shared = self.shared.clone();
        let flush = move || {
            shared.log.flush(FLUSH);
            let opened = shared.opened();
            opened.taps.values().for_each(|t| t.flush(FLUSH));
            opened.services.iter().for_each(|service| service.flush(FLUSH));
        };
        let _ = tokio::task::spawn_blocking(flush).await;
        *self.shared.live.borrow()
    }

    /// Returns the number of lines of the access log that are not written yet. They are lost if the program ends.
    pub fn unwritten_lines(&self) -> u64 {
        self.shared.log.waiting()
    }

    /// Reopens the access log after a rotation.
    pub fn reopen_log(&self) {
        self.shared.log.reopen();
    }

    /// Removes stored replies, and blocks meanwhile ([`Service::purge`]).
    pub fn purge(&self, what: &Purge) -> Purged {
        let opened = self.shared.opened();
        let all = opened.services.iter().map(|service| service.purge(what));
        all.fold(Purged::default(), |sum, one| Purged {
            removed: sum.removed + one.removed,
            after: sum.after.or(one.after),
        })
    }

    /// Returns the current counters.
    pub fn counters(&self) -> CounterValues {
        let opened = self.shared.opened();
        let taps = opened.taps.values();
        let sum = |f: fn(&TapDir) -> u64| taps.clone().map(|t| f(t)).sum();
        let transparent = self.shared.splicer.transparent_counts();
        let paths = self.shared.splicer.path_changes();
        let conntrack = self.shared.splicer.conntrack_counts();
        let switches = self.shared.splicer.switches();
        let values = self.shared.counters.values();
        let mut values = CounterValues {
            live: *self.shared.live.borrow(),
            tcp_memory: tcp_memory().unwrap_or(0),
            denied: values.denied + transparent.denied,
            flows_spliced: switches.spliced,
            flows_taken_back: switches.taken_back,
            given_up: transparent.given_up,
            handshakes_left: transparent.left,
            untracked: transparent.untracked,
            unheard: self.shared.splicer.unheard(),
            swept: self.shared.splicer.swept(),
            path_hops: paths.hops,
            path_flows: paths.flows,
            path_stranded: paths.stranded,
            conntrack_renewed: conntrack.renewed,
            conntrack_failed: conntrack.failed,
            names_stale: self.shared.resolver.stale(),
            log_lines_dropped: self.shared.log.dropped(),
            tap_bytes: sum(|t| t.counts().bytes),
            tap_gap_bytes: sum(|t| t.counts().gaps),
            tap_doubt_bytes: sum(|t| t.counts().doubts),
            tap_errors: sum(TapDir::errors),
            ..values
        };
        opened.services.iter().for_each(|service| service.count(&mut values));
        values
    }

    /// Returns the limit of connections on all listeners together.
    pub fn max_connections(&self) -> u32 {
        lock(&self.state).config.connections.unwrap_or(CONNECTIONS)
    }

    /// Returns how many tasks serve connections and what goes on beside them.
    pub fn tasks(&self) -> usize {
        self.shared.loads.tasks()
    }

    /// Returns whether no client is accepted any more.
    pub fn is_stopping(&self) -> bool {
        *self.stop.borrow()
    }

    /// Counts a reload, and tells those who listen to events.
    pub fn note_reload(&self, result: &Result<reload::Reloaded, String>) {
        let counters = &self.shared.counters;
        Counters::add(if result.is_ok() { &counters.reloads } else { &counters.reloads_refused });
        self.shared.events.reloaded(result);
    }

    /// Returns what tells of all that happens.
    pub fn events(&self) -> &Arc<Events> {
        &self.shared.events
    }

    /// Returns what there is to see of the pools.
    pub fn pools(&self) -> Vec<PoolValues> {
        commanded::values(&self.shared.opened().pools)
    }

    /// Returns what is known of the servers of pools, for another process.
    pub fn known_servers(&self) -> Vec<KnownServer> {
        commanded::known(&self.shared.opened().pools)
    }

    /// Tells a server of a pool something: `POOL/HOST:PORT`, or `HOST:PORT` for that of all pools. Returns how many were told, if there
    /// are any.
    pub fn tell(&self, member: &str, what: Tell) -> Option<usize> {
        commanded::tell(&self.shared.opened().pools, member, what)
    }

    /// Returns for each listener the number of spliced flows, and of the others by reason.
    pub fn listeners(&self) -> Vec<ListenerValues> {
        let values = |door: &Door| {
            let front = door.fronts.now();
            let tally = &front.policy.tally;
            ListenerValues {
                name: front.listener.name.to_string(),
                listen: door.addr,
                protocol: front.listener.protocol.name(),
                spliced: tally.spliced(),
                refused: tally.refused().map(|(why, n)| (why.as_str(), n)).collect(),
                is_paused: door.is_paused(),
                live: front.live(),
                begun: front.summed.begun(),
                max_connections: front.listener.limits.connections,
                totals: front.summed.totals(),
            }
        };
        lock(&self.state).doors.iter().map(values).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.handing.stop();
        let State { followed, tended, doors, .. } = &mut *lock(&self.state);
        self.tasks.iter().chain(followed.values()).chain(&*tended).for_each(JoinHandle::abort);
        doors.clear();
    }
}

/// Returns the names of servers in the configuration.
fn names(config: &Config) -> BTreeSet<String> {
    let of_pools = config.pools.iter().flat_map(|pool| pool.servers.iter().map(|s| &s.target));
    let targets = of_pools.chain(config.listeners.iter().flat_map(ListenerConfig::targets));
    let name = |target: &Target| if let Host::Name(name) = &target.host { Some(name.clone()) } else { None };
    targets.filter_map(name).collect()
}

/// Returns the listening sockets.
fn listening<'a>(doors: impl IntoIterator<Item = &'a Door>, pools: &Pools) -> Listening {
    let of = |door: &Door| {
        let listener = &door.fronts.now().listener;
        // who reads its clients does not lead a connection on by itself
        let of_rules = listener.rule_pools().filter(|_| listener.leads_all());
        let led = listener.fixed_pool().into_iter().chain(of_rules).filter_map(|name| pools.get(name));
        let members = led.flat_map(|pool| &pool.members).map(|member| &member.target);
        listener.binds().then(|| (door.addr, listener.fixed_target().into_iter().chain(members).cloned().collect()))
    };
    Listening(doors.into_iter().filter_map(of).collect())
}
