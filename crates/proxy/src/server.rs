//! The server: listens, accepts connections within the limits, and stops gracefully.

mod connection;
mod plug;

use crate::{
    access::{
        Subject,
        own::{Listening, is_own},
    },
    config::{Config, Http, ListenerConfig, Protocol, ftp::Ftp, pool::PoolConfig},
    context::{
        Front, Live, Purge, Purged, ServerContext, Service,
        relays::Relays,
        tap_dir::TapDir,
        watcher::{Means, Note, Triggers, watch_all},
        workers::Workers,
    },
    counters::{CounterValues, Counters, ListenerValues, tcp_memory},
    limits::{CONNECTIONS, Counted},
    log::{
        access_log::{AccessLog, Record},
        complaints::Complaints,
    },
    resolve::Resolver,
    start_error::StartError,
    target::{Host, Target},
    tpot,
};
use longsplice_engine::{
    BoundSocket, EndToEndListener, Leg, LegOfProxy, Listener, SpliceWhen, Splicer, Tally, Tpot, TpotWhose,
};
use std::{
    collections::{BTreeSet, HashMap},
    io,
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::{mpsc::UnboundedReceiver, watch},
    task::JoinHandle,
    time::{sleep, timeout},
};

/// Initial and maximum pause of accepting when descriptors have run out; the pause is doubled each time.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// Time for which [`Server::drain`] waits for the last log lines, tap files and stored replies.
const FLUSH: Duration = Duration::from_secs(2);

fn cannot_listen(addr: SocketAddr) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError::Listen { addr, source }
}

/// A running server. Connections that are being relayed outlive it.
pub struct Server {
    shared: Arc<ServerContext>,
    addrs: Vec<SocketAddr>,
    /// Protocols of the listeners and the counts of their flows, in the order of `addrs`.
    tallies: Vec<(&'static str, Arc<Tally>)>,
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
    /// Translucent proxying, if the configuration needs it.
    tpot: Option<Arc<Tpot>>,
}

/// Opens a protocol of another crate, for those of its listeners that the configuration has.
pub type Open = fn(&Config) -> Result<Arc<dyn Service>, StartError>;

/// All resources of a server except the data path: missing ones are noticed before the data path is touched.
pub struct Prepared {
    config: Config,
    /// Bound sockets; `None` for listeners that do not bind one.
    sockets: Vec<Option<BoundSocket>>,
    log: AccessLog,
    taps: HashMap<PathBuf, Arc<TapDir>>,
    services: Vec<Arc<dyn Service>>,
}

impl Prepared {
    /// Binds all listeners, and opens the log, tap directories and services. Fails if any of them cannot be had.
    pub fn new(config: Config, services: &[Open]) -> Result<Prepared, StartError> {
        let places = config.places.clone();
        Prepared::open(config, services).map_err(|e| e.at(&places))
    }

    fn open(config: Config, services: &[Open]) -> Result<Prepared, StartError> {
        if config.listeners.is_empty() {
            return Err(StartError::NoListener);
        }
        tpot::check(&config)?;
        let bind = |l: &ListenerConfig| {
            l.binds().then(|| BoundSocket::bind(l.listen)).transpose().map_err(cannot_listen(l.listen))
        };
        let sockets = config.listeners.iter().map(bind).collect::<Result<_, _>>()?;
        let log = AccessLog::open(&config.log)
            .map_err(|source| StartError::AccessLog { to: config.log.to.clone(), source })?;
        let mut taps = HashMap::new();
        for dir in config.listeners.iter().flat_map(ListenerConfig::tap_dirs) {
            if !taps.contains_key(dir) {
                let tap = TapDir::open(dir).map_err(|source| StartError::Tap { dir: dir.clone(), source })?;
                taps.insert(dir.clone(), Arc::new(tap));
            }
        }
        let services = services.iter().map(|open| open(&config)).collect::<Result<Vec<_>, _>>()?;
        let mut protocols = config.listeners.iter().map(|l| &l.protocol).filter(|p| p.traits().is_service);
        match protocols.find(|protocol| !services.iter().any(|service| service.serves(protocol))) {
            Some(missing) => Err(StartError::NotServed(missing.name())),
            None => Ok(Prepared { config, sockets, log, taps, services }),
        }
    }

    /// Returns the configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Listens, and starts to serve connections on these workers.
    pub async fn start(self, workers: &Workers, splicer: Splicer) -> Result<Server, StartError> {
        let Prepared { config, sockets, log, taps, services } = self;
        let loads = workers.loads();
        let tpot = tpot::open(&config)?;
        let mut bound = Vec::new();
        for (number, (mut listener, socket)) in config.listeners.into_iter().zip(sockets).enumerate() {
            let runtime = loads.runtime(number);
            let source = match (socket, &tpot) {
                (Some(socket), _) => Source::listen(&listener, socket, &splicer, runtime).await,
                (None, tpot) => match (listener.intercepts, tpot) {
                    (Some(whose), Some(tpot)) => Source::intercept(&listener, (tpot, whose), &splicer, runtime).await,
                    _ => Source::route(&listener, &splicer),
                },
            };
            let (source, addr) = source.map_err(cannot_listen(listener.listen))?;
            listener.listen = addr;
            bound.push((source, listener));
        }
        let stop = watch::Sender::new(false);
        let (triggers, notes) = Triggers::new();
        let shared = Arc::new(ServerContext {
            splicer,
            triggers,
            resolver: Resolver::default(),
            tpot: tpot.as_ref().map(Arc::downgrade).unwrap_or_default(),
            listening: listening(&bound),
            log,
            counters: Arc::default(),
            services,
            taps,
            loads,
            relays: Relays::default(),
            all: Counted::new(config.connections.unwrap_or(CONNECTIONS), u32::MAX),
            early: Counted::new(u32::MAX, u32::MAX),
            live: watch::Sender::new(0),
            stop: stop.subscribe(),
        });
        log_recovered(&shared);
        let mut server = Server { shared, addrs: Vec::new(), tallies: Vec::new(), stop, tasks: Vec::new(), tpot };
        server.tend(&config.pools, &bound);
        server.pull_triggers(notes);
        for (number, (source, listener)) in bound.into_iter().enumerate() {
            server.serve(number, source, listener)?;
        }
        Ok(server)
    }
}

/// Writes a log line for each flow of an earlier process that has ended.
fn log_recovered(shared: &Arc<ServerContext>) {
    let of_earlier = Arc::downgrade(shared);
    shared.splicer.on_recovered_end(move |ended| {
        if let Some(shared) = of_earlier.upgrade() {
            let mut record = Record::new("recovered", None, ended.client);
            record.ended(&ended);
            (record.server, record.target) = (Some(ended.server), Some(ended.server.to_string()));
            record.duration_ms = ended.duration_ms;
            shared.log.write(record);
        }
    });
}

impl Server {
    /// Starts what goes on beside all connections: tunnels, names and the health of servers.
    fn tend(&mut self, pools: &[PoolConfig], bound: &[(Source, ListenerConfig)]) {
        let shared = self.shared.clone();
        let runtime = shared.loads.runtime(0);
        let tunnels = |tpot| tpot::tend(Arc::downgrade(tpot), Some(shared.splicer.clone()));
        self.tasks.extend(self.tpot.as_ref().map(|tpot| runtime.spawn(tunnels(tpot))));
        for name in names(pools.iter(), bound.iter().map(|(_, listener)| listener)) {
            self.tasks.push(runtime.spawn(shared.resolver.clone().follow(name)));
        }
        self.tasks.extend(shared.services.iter().flat_map(|service| service.tend(&shared)));
    }

    /// Starts to watch connections with triggers.
    fn pull_triggers(&mut self, notes: UnboundedReceiver<Note>) {
        let ServerContext { splicer, counters, taps, loads, .. } = &*self.shared;
        let means = Means { splicer: splicer.clone(), counters: counters.clone(), taps: taps.clone() };
        self.tasks.push(loads.runtime(0).spawn(watch_all(notes, Arc::new(means))));
    }

    /// Starts to serve the clients of a listener. `number`: index of its worker.
    fn serve(&mut self, number: usize, source: Source, listener: ListenerConfig) -> Result<(), StartError> {
        let (shared, addr) = (self.shared.clone(), listener.listen);
        announce(addr, &listener);
        if addr.ip().is_loopback() && shared.splicer.refusal().is_none() {
            tracing::info!("clients of {addr} are on this host: their connections are copied, not spliced (loopback)");
        }
        self.tallies.push((listener.protocol.name(), listener.policy.tally.clone()));
        self.addrs.push(addr);
        let pairs = match &source {
            Source::Own(socket) => plug::end_to_end(&shared, &listener, socket),
            Source::EndToEnd(_) => None,
        };
        let front = Arc::new(Front::new(listener, &shared));
        let runtime = shared.loads.runtime(number);
        if let (Some(whose), Some(tpot)) = (front.listener.intercepts, &self.tpot) {
            let (to, full) = ((whose, tpot::intercepted(addr)), [front.full(), shared.all.full()]);
            let is_open = front.listener.rules.list().is_empty();
            self.tasks.push(runtime.spawn(tpot::leave(Arc::downgrade(tpot), to, full, is_open)));
        }
        if let Source::Own(socket) = &source {
            let _entered = runtime.enter(); // it accepts there
            tpot::pipeline(&shared, &front, socket).map_err(cannot_listen(addr))?;
        }
        for source in pairs.map(Source::EndToEnd).into_iter().chain([source]) {
            let (shared, front, stop) = (shared.clone(), front.clone(), self.stop.subscribe());
            self.tasks.push(match source {
                Source::Own(socket) => runtime.spawn(accept_all(shared, front, (socket, number), stop)),
                Source::EndToEnd(socket) => {
                    hold_first_data(&front.listener, &socket);
                    runtime.spawn(accept_pairs(shared, front, (socket, number), stop))
                }
            });
        }
        Ok(())
    }

    /// Binds all listeners and starts to serve in the current runtime.
    pub async fn start(splicer: Splicer, config: Config, services: &[Open]) -> Result<Server, StartError> {
        Prepared::new(config, services)?.start(&Workers::here(), splicer).await
    }

    /// Returns the listening addresses in the order of the configuration, with the ports that the kernel chose.
    pub fn listen_addrs(&self) -> &[SocketAddr] {
        &self.addrs
    }

    /// Closes the listening sockets; connections continue. This cannot be undone.
    pub fn stop_accepting(&self) {
        self.stop.send_replace(true);
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
            shared.taps.values().for_each(|t| t.flush(FLUSH));
            shared.services.iter().for_each(|service| service.flush(FLUSH));
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
        let all = self.shared.services.iter().map(|service| service.purge(what));
        all.fold(Purged::default(), |sum, one| Purged {
            removed: sum.removed + one.removed,
            after: sum.after.or(one.after),
        })
    }

    /// Returns the current counters.
    pub fn counters(&self) -> CounterValues {
        let taps = self.shared.taps.values();
        let sum = |f: fn(&TapDir) -> u64| taps.clone().map(|t| f(t)).sum();
        let transparent = self.shared.splicer.transparent_counts();
        let paths = self.shared.splicer.path_changes();
        let conntrack = self.shared.splicer.conntrack_counts();
        let values = self.shared.counters.values();
        let mut values = CounterValues {
            live: *self.shared.live.borrow(),
            tcp_memory: tcp_memory().unwrap_or(0),
            denied: values.denied + transparent.denied,
            given_up: transparent.given_up,
            handshakes_left: transparent.left,
            untracked: transparent.untracked,
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
        self.shared.services.iter().for_each(|service| service.count(&mut values));
        values
    }

    /// Returns for each listener the number of spliced flows, and of the others by reason.
    pub fn listeners(&self) -> Vec<ListenerValues> {
        let values = |(addr, (protocol, tally)): (&SocketAddr, &(&'static str, Arc<Tally>))| ListenerValues {
            listen: *addr,
            protocol,
            spliced: tally.spliced(),
            refused: tally.refused().map(|(why, n)| (why.as_str(), n)).collect(),
        };
        self.addrs.iter().zip(&self.tallies).map(values).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Returns the names of servers in the configuration.
fn names<'a>(
    pools: impl Iterator<Item = &'a PoolConfig>,
    listeners: impl Iterator<Item = &'a ListenerConfig>,
) -> BTreeSet<String> {
    let of_pools = pools.flat_map(|pool| pool.servers.iter().map(|s| &s.target));
    let targets = of_pools.chain(listeners.flat_map(ListenerConfig::targets));
    let name = |target: &Target| if let Host::Name(name) = &target.host { Some(name.clone()) } else { None };
    targets.filter_map(name).collect()
}

fn announce(addr: SocketAddr, listener: &ListenerConfig) {
    let protocol = &listener.protocol;
    match protocol {
        _ if listener.intercepts == Some(TpotWhose::All) => {
            tracing::info!("{} on {addr}, transparent", protocol.name())
        }
        _ if listener.intercepts.is_some() => tracing::info!("tpot on {addr}: {}", protocol.name()),
        Protocol::Http(Http { routes, .. }) if !routes.is_empty() => {
            tracing::info!("http on {addr}, {} routes", routes.len());
        }
        Protocol::Socks5 { users, .. } | Protocol::Http(Http { users, .. })
            if users.is_empty() && !addr.ip().is_loopback() && listener.rules.list().is_empty() =>
        {
            tracing::warn!("{} on {addr}: open to everybody who can reach it; add users or rules", protocol.name());
        }
        Protocol::Socks5 { .. } | Protocol::Http(_) => tracing::info!("{} on {addr}", protocol.name()),
        Protocol::Ftp(Ftp { target: Some(target), .. }) => tracing::info!("ftp on {addr} to {target}"),
        Protocol::Ftp(Ftp { users, .. })
            if users.is_empty() && !addr.ip().is_loopback() && listener.rules.list().is_empty() =>
        {
            tracing::warn!(
                "ftp on {addr}: leads everybody who can reach it to any server; add a target, users or rules"
            );
        }
        Protocol::Ftp(_) => tracing::info!("ftp on {addr}"),
        Protocol::Plug { target: Some(target), .. } => tracing::info!("plug on {addr} to {target}"),
        Protocol::Tls(tls) if tls.forwards() && !addr.ip().is_loopback() && listener.rules.list().is_empty() => {
            tracing::warn!(
                "tls on {addr}: leads everybody who can reach it to any name; give routes targets or add rules"
            );
        }
        Protocol::Login(login)
            if !login.asks_users() && login.free && !addr.ip().is_loopback() && listener.rules.list().is_empty() =>
        {
            tracing::warn!("login on {addr}: leads everybody who can reach it to any host; add users or rules");
        }
        Protocol::Tls(_) | Protocol::Login(_) => tracing::info!("{} on {addr}", protocol.name()),
        Protocol::Transparent if !addr.ip().is_unspecified() && is_own(addr.ip()) => {
            tracing::warn!(
                "transparent on {addr}: this is an address of this machine, whose connections are not taken part in"
            );
        }
        Protocol::Plug { target: None, .. } | Protocol::Transparent | Protocol::Tpot => {
            tracing::info!("{} on {addr}", protocol.name())
        }
    }
}

/// Returns the listening sockets.
fn listening(bound: &[(Source, ListenerConfig)]) -> Listening {
    let own = bound.iter().filter(|(source, l)| matches!(source, Source::Own(_)) && l.intercepts.is_none());
    Listening(own.map(|(_, l)| (l.listen, l.fixed_target().cloned())).collect())
}

/// Source of connections: clients that connect to the proxy, or hosts that shake hands with each other.
enum Source {
    Own(Listener),
    EndToEnd(EndToEndListener),
}

impl Source {
    /// Listens on a bound socket. Each of these returns the address as well, which the kernel may have chosen.
    async fn listen(
        listener: &ListenerConfig,
        socket: BoundSocket,
        splicer: &Splicer,
        runtime: &Handle,
    ) -> io::Result<(Source, SocketAddr)> {
        let splicer = splicer.clone();
        let shows_clients = listener.shows_clients;
        let copied = listener.policy.when == SpliceWhen::Never && listener.end_to_end().is_none() && !shows_clients;
        let adopts = listener.adopts();
        let listen = async move {
            let mut listening = match () {
                () if copied => splicer.listen_to_copy(socket).await,
                () if adopts => splicer.listen_adopting(socket).await,
                () => splicer.listen_on(socket).await,
            }?;
            let addr = listening.local_addr()?;
            if shows_clients {
                listening.show_clients()?;
            }
            Ok((Source::Own(listening), addr))
        };
        runtime.spawn(listen).await.map_err(io::Error::other)?
    }

    /// Intercepts connections that are routed through this machine.
    async fn intercept(
        listener: &ListenerConfig,
        (tpot, whose): (&Arc<Tpot>, TpotWhose),
        splicer: &Splicer,
        runtime: &Handle,
    ) -> io::Result<(Source, SocketAddr)> {
        let (splicer, tpot, to) = (splicer.clone(), tpot.clone(), tpot::intercepted(listener.listen));
        let shows_clients = listener.shows_clients;
        let listen = async move {
            let mut listening = splicer.intercept(&tpot, whose, &to).await?;
            if shows_clients {
                listening.show_clients()?;
            }
            Ok::<_, io::Error>(listening)
        };
        let listening = runtime.spawn(listen).await.map_err(io::Error::other)??;
        Ok((Source::Own(listening), listener.listen))
    }

    /// Takes part in connections that are routed through this machine.
    fn route(listener: &ListenerConfig, splicer: &Splicer) -> io::Result<(Source, SocketAddr)> {
        let rules = listener.rules.clone();
        let allow = move |client: SocketAddr, server: SocketAddr| {
            rules.check(&Subject::by(client.ip()), &server.into(), server).is_ok()
        };
        Ok((Source::EndToEnd(splicer.listen_transparent(listener.listen, allow)?), listener.listen))
    }
}

/// Accepts connections. `number`: index of the worker that runs this.
async fn accept_all(
    shared: Arc<ServerContext>,
    front: Arc<Front>,
    (socket, number): (Listener, usize),
    mut stop: watch::Receiver<bool>,
) {
    let mut wait = BACK_OFF.0;
    let complaints = Complaints::default();
    loop {
        let accepted = tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => return,
            accepted = socket.accept_idle() => accepted,
        };
        match accepted {
            Ok(client) => {
                wait = BACK_OFF.0;
                let front_of = front.clone();
                let serve = async move |live, [client]: [Leg; 1]| connection::serve(live, front_of, client).await;
                admit(&shared, &front, ([client], number), &complaints, serve);
            }
            Err(e) if concerns_one_connection(&e) => {}
            Err(e) => {
                Counters::add(&shared.counters.accept_errors);
                complaints.tell(&format!("cannot accept on {}: {e}", front.listener.listen));
                // Only the end of another connection can help. Meanwhile, clients wait in the kernel's queue.
                sleep(wait).await;
                wait = BACK_OFF.1.min(wait * 2);
            }
        }
    }
}

/// Holds the first data of connections that are spliced at once.
fn hold_first_data(listener: &ListenerConfig, socket: &EndToEndListener) {
    if listener.holds_first_data()
        && let Err(error) = socket.hold_first_data()
    {
        tracing::warn!("cannot hold the first data of connections to {}: it is copied: {error}", listener.listen);
    }
}

/// Accepts connections whose hosts have shaken hands with each other.
async fn accept_pairs(
    shared: Arc<ServerContext>,
    front: Arc<Front>,
    (mut socket, number): (EndToEndListener, usize),
    mut stop: watch::Receiver<bool>,
) {
    let complaints = Complaints::default();
    loop {
        let accepted = tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => return,
            accepted = socket.accept() => accepted,
        };
        match accepted {
            Ok((client, server)) => {
                let front_of = front.clone();
                let serve = async move |live, [client, server]: [Leg; 2]| {
                    connection::serve_end_to_end(live, &front_of, client, server);
                };
                admit(&shared, &front, ([client, server], number), &complaints, serve);
            }
            Err(e) if e.kind() == io::ErrorKind::NotConnected => return,
            Err(e) => {
                Counters::add(&shared.counters.accept_errors);
                complaints.tell(&format!("a connection to {} is lost: {e}", front.listener.listen));
            }
        }
    }
}

/// Starts to serve a connection, unless a limit is reached. The first leg is that of the client.
fn admit<const N: usize, F: Future<Output = ()> + Send>(
    shared: &Arc<ServerContext>,
    front: &Front,
    (legs, awake): ([Leg; N], usize),
    complaints: &Complaints,
    serve: impl FnOnce(Live, [Leg; N]) -> F + Send + 'static,
) {
    Counters::add(&shared.counters.accepted);
    let client = legs[0].remote();
    match Live::enter(shared, front, client, awake) {
        Ok(live) => serve_on(live, (legs, !front.listener.splices_unread()), serve),
        // No line in the access log: a flood must not displace the lines of served clients.
        Err(full) => {
            Counters::add(&shared.counters.over_limit);
            complaints.tell(&format!("{client} turned away: {full}"));
            for leg in legs {
                leg.reset_at_close();
                shared.splicer.discard(leg);
            }
        }
    }
}

/// Serves a connection on the worker that it was assigned to. `is_read`: its client is waited for before a splice.
fn serve_on<const N: usize, F: Future<Output = ()> + Send>(
    live: Live,
    (mut legs, is_read): ([Leg; N], bool),
    serve: impl FnOnce(Live, [Leg; N]) -> F + Send + 'static,
) {
    let runtime = live.seat.as_ref().map_or_else(Handle::current, |seat| seat.runtime().clone());
    let here = runtime.id() == Handle::current().id();
    runtime.spawn(async move {
        let enter = |leg: &mut Leg| match leg.is_idle() {
            true if is_read => leg.attend(),
            false if !here => leg.enter(),
            _ => Ok(()),
        };
        match legs.iter_mut().try_for_each(enter) {
            Ok(()) => serve(live, legs).await,
            Err(e) => {
                Counters::add(&live.shared.counters.accept_errors);
                tracing::warn!("cannot serve {}: it is reset: {e}", legs[0].remote());
                legs.into_iter().for_each(|leg| live.shared.splicer.discard(leg));
            }
        }
    });
}

/// Whether the error concerns a connection that was gone before it was accepted; the next one may be fine (accept(2)).
fn concerns_one_connection(e: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, NotConnected, TimedOut};
    matches!(e.kind(), ConnectionAborted | ConnectionReset | Interrupted | NotConnected | TimedOut)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepting_backs_off_only_when_the_next_connection_would_fail_too() {
        let one = |errno| concerns_one_connection(&io::Error::from_raw_os_error(errno));
        // ECONNABORTED and ENOTCONN; then EMFILE, ENFILE, ENOBUFS and ENOMEM.
        assert_eq!([103, 107].map(one), [true; 2]);
        assert_eq!([24, 23, 105, 12].map(one), [false; 4]);
    }
}
