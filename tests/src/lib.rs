//! Shared code of the tests of the whole program: a forwarder inside a lab, driven from the test.

mod families;
pub mod forge;
pub mod handshake;
pub mod log;
pub mod packet;
pub mod process;
pub mod scenario;
pub mod sim;
pub mod strict;
pub mod translator;

pub use families::families;

use longsplice_datapath::{Destinations, Tpot, TpotOptions};
use longsplice_engine::{
    BoundSocket, Command, DatapathOptions, EndToEndListener, Ended, FlowInfo, FlowState, Leftovers, Leg, OpenOptions,
    Pair, PathRule, Policy, SpliceWhen, Splicer, TpotHandshake, TpotWhose,
};
use longsplice_lab::{Lab, Namespace, Report, process::wait_for, report::show_failures};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    task::JoinSet,
};

/// Whether the processor is emulated (`make kernels` without KVM). Emulated processors are slow, and may stall between
/// taking a segment's timestamp and sending the segment: a segment of another processor may overtake it and look newer.
pub fn is_emulated() -> bool {
    std::fs::read_to_string("/proc/cpuinfo").expect("/proc").contains("QEMU TCG")
}

/// A policy that leaves all decisions to the test.
pub fn by_hand() -> Policy {
    Policy { when: SpliceWhen::AfterBytes(u64::MAX), path: PathRule::Any, ..Policy::default() }
}

/// A policy that splices before the first byte.
pub fn at_once() -> Policy {
    Policy { when: SpliceWhen::AtOnce, path: PathRule::Any, ..Policy::default() }
}

/// Options whose ring holds the copies of 60 MB: taps of so much miss nothing, even if their reader does not run meanwhile.
pub fn all_copies() -> OpenOptions {
    DatapathOptions { tap_ring: 64 << 20, ..DatapathOptions::default() }.into()
}

/// A plug proxy in a lab's forwarder that runs in this process. Dropping it stops it and removes what it attached. If the test
/// fails or hangs, its flows, its entries, its counters and the end of its log are shown.
pub struct Forwarder {
    report: Report,
    /// The engine.
    pub splicer: Splicer,
    ended: Record,
    later: Option<UnboundedSender<(Later, mpsc::Sender<Splicer>)>>,
    _running: Running,
}

/// The thread of a forwarder.
struct Running {
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Records of ended flows.
type Record = Arc<Mutex<Vec<Ended>>>;

/// Relays each client to `target`.
fn plug(
    target: SocketAddr,
    policy: Policy,
) -> impl Fn(Splicer, Leg, Record) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync + 'static {
    let policy = Arc::new(policy);
    move |splicer, client, record| {
        let policy = policy.clone();
        Box::pin(async move {
            let server = match splicer.connect(target, &client).await {
                Ok(server) => server,
                Err(error) => {
                    eprintln!("{target}: {error}");
                    return client.reset();
                }
            };
            let info = FlowInfo::new("plug", target.to_string());
            let done = move |e, _: &FlowInfo| record.lock().expect("lock").push(e);
            splicer.hand_over(client, server, Leftovers::default(), policy, info, done);
        })
    }
}

/// Passes on what comes from one socket, until it would have to wait, or has ended. Returns how much.
async fn pass(from: &TcpStream, to: &mut TcpStream) -> std::io::Result<(u64, bool)> {
    let mut buffer = [0; 16 * 1024];
    match from.try_read(&mut buffer) {
        Ok(n) => to.write_all(&buffer[..n]).await.map(|()| (n as u64, n == 0)),
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => Ok((0, false)),
        Err(e) => Err(e),
    }
}

/// Copies with sockets of its own until `after` bytes have passed in all, or a host has ended. Returns how much each has sent.
async fn copy(client: &mut TcpStream, server: &mut TcpStream, after: u64) -> std::io::Result<Pair<u64>> {
    let (mut passed, mut ended) = (Pair::both(0), false);
    while passed.client + passed.server < after && !ended {
        let (n, end) = tokio::select! {
            ready = client.readable() => { ready?; pass(client, server).await? }
            ready = server.readable() => {
                ready?;
                let (n, end) = pass(server, client).await?;
                passed.server += n;
                (0, end)
            }
        };
        passed.client += n;
        ended = end;
    }
    Ok(passed)
}

/// Listens, and runs `serve` for each client. `adopts`: connections are tracked when a splice is due, and not from their SYN on.
async fn accept_each<F: Future<Output = ()> + Send + 'static>(
    splicer: Splicer,
    record: Record,
    ready: mpsc::Sender<Splicer>,
    listen: SocketAddr,
    adopts: bool,
    serve: impl Fn(Splicer, Leg, Record) -> F + Send + Sync + 'static,
) {
    // The program binds before it opens the data path. Here, a socket that resets a connection of the process before may hold the
    // port, until it leaves repair mode.
    let (mut bound, until) = (BoundSocket::bind(listen), Instant::now() + Duration::from_secs(60));
    while bound.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::AddrInUse) && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(5)).await;
        bound = BoundSocket::bind(listen);
    }
    let bound = bound.expect("bind");
    let listener = if adopts { splicer.listen_adopting(bound).await } else { splicer.listen_on(bound).await };
    let listener = listener.expect("listen");
    ready.send(splicer.clone()).expect("the test waits");
    loop {
        let client = listener.accept().await.expect("accept");
        tokio::spawn(serve(splicer.clone(), client, record.clone()));
    }
}

/// The same, as a [`Forwarder`] runs it.
fn accepting<F: Future<Output = ()> + Send + 'static>(
    listen: SocketAddr,
    adopts: bool,
    serve: impl Fn(Splicer, Leg, Record) -> F + Send + Sync + 'static,
) -> impl AsyncFnOnce(Splicer, Record, mpsc::Sender<Splicer>) + Send + 'static {
    async move |splicer, record, ready| accept_each(splicer, record, ready, listen, adopts, serve).await
}

/// Listens with a socket of its own, connects to `target` with another one, and copies until up to `most` bytes have passed in all.
/// Then the engine adopts both, whatever is on its way.
async fn adopt_each(
    splicer: Splicer,
    record: Record,
    ready: mpsc::Sender<Splicer>,
    [listen, target]: [SocketAddr; 2],
    policy: Arc<Policy>,
    most: u64,
) {
    let mut rng = SmallRng::seed_from_u64(most);
    let listener = TcpListener::bind(listen).await.expect("listen");
    ready.send(splicer.clone()).expect("the test waits");
    loop {
        let (mut client, _) = listener.accept().await.expect("accept");
        let (splicer, policy, record) = (splicer.clone(), policy.clone(), record.clone());
        let after = rng.random_range(1..=most);
        tokio::spawn(async move {
            let mut server = TcpStream::connect(target).await.expect("connect");
            let passed = copy(&mut client, &mut server, after).await.expect("no reset yet");
            let sockets = [client, server].map(|s| s.into_std().expect("a socket"));
            let [client, server] = sockets.map(|s| splicer.adopt(s));
            let info = FlowInfo::new("plug", target.to_string());
            let done = move |mut e: Ended, _: &FlowInfo| {
                e.bytes_up += passed.client;
                e.bytes_down += passed.server;
                record.lock().expect("lock").push(e);
            };
            let (client, server) = (client.expect("adopted"), server.expect("adopted"));
            splicer.hand_over(client, server, Leftovers::default(), policy, info, done);
        });
    }
}

/// Intercepts transparent connections to `to`.
async fn accept_transparent(
    splicer: Splicer,
    record: Record,
    ready: mpsc::Sender<Splicer>,
    to: SocketAddr,
    policy: Policy,
) {
    let policy = Arc::new(policy);
    let mut listener = splicer.listen_transparent(to, |_, _| true).expect("listen");
    hold_first_data(&listener, &policy);
    ready.send(splicer.clone()).expect("the test waits");
    loop {
        let (client, server) = listener.accept().await.expect("accept");
        hand_over(&splicer, &record, client, server, &policy);
    }
}

/// Lets each client shake hands with `target`. Those that cannot are relayed to `otherwise`.
async fn accept_end_to_end(
    splicer: Splicer,
    record: Record,
    ready: mpsc::Sender<Splicer>,
    [listen, target, otherwise]: [SocketAddr; 3],
    policy: Policy,
) {
    let serve = plug(otherwise, policy.clone());
    let policy = Arc::new(policy);
    let listener = splicer.listen(listen).await.expect("listen");
    let mut pairs = splicer.end_to_end(&listener, move |_| Some(target), |_, _, _| ()).expect("raw sockets");
    hold_first_data(&pairs, &policy);
    ready.send(splicer.clone()).expect("the test waits");
    loop {
        tokio::select! {
            client = listener.accept() => {
                tokio::spawn(serve(splicer.clone(), client.expect("accept"), record.clone()));
            }
            legs = pairs.accept() => {
                let (client, server) = legs.expect("accept");
                hand_over(&splicer, &record, client, server, &policy);
            }
        }
    }
}

/// Hands over two legs whose hosts have shaken hands with each other.
fn hand_over(splicer: &Splicer, record: &Record, client: Leg, server: Leg, policy: &Arc<Policy>) {
    let info = FlowInfo::new("plug", server.remote().to_string());
    let record = record.clone();
    let done = move |e, _: &FlowInfo| record.lock().expect("lock").push(e);
    splicer.hand_over(client, server, Leftovers::default(), policy.clone(), info, done);
}

/// How a listener that a forwarder gets later accepts connections.
type Later = Box<dyn FnOnce(Splicer, Record, mpsc::Sender<Splicer>) -> Accepting + Send>;
type Accepting = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Listens wherever it is told to.
async fn accept_later(splicer: Splicer, record: Record, mut later: UnboundedReceiver<(Later, mpsc::Sender<Splicer>)>) {
    let mut listeners = JoinSet::new();
    loop {
        tokio::select! {
            Some((accept, ready)) = later.recv() => drop(listeners.spawn(accept(splicer.clone(), record.clone(), ready))),
            Some(over) = listeners.join_next() => over.expect("accepts until the end"),
            else => return,
        }
    }
}

/// Intercepts connections to `to`, and relays each to where its client wants.
fn taking(
    to: Destinations,
    policy: Policy,
    onward: bool,
    handshake: TpotHandshake,
    options: TpotOptions,
) -> impl AsyncFnOnce(Splicer, Record, mpsc::Sender<Splicer>) + Send + 'static {
    async move |splicer, record, ready| {
        let tpot = TestTpot::with(&options);
        if onward {
            tpot.ask(&to).and_then(|()| tpot.trust(&to)).expect("rules");
        }
        let listener = splicer.intercept(&tpot, TpotWhose::Askers, &to).await.expect("listen");
        if handshake != TpotHandshake::Basic {
            let refused = |client, server, error| eprintln!("{client} to {server}: {error}");
            listener.pipeline(handshake, |_, _| Some(Box::new(())), refused).expect("pipelined");
        }
        ready.send(splicer.clone()).expect("the test waits");
        loop {
            let client = listener.accept().await.expect("accept");
            let serve = plug(client.local(), policy.clone());
            tokio::spawn(serve(splicer.clone(), client, record.clone()));
        }
    }
}

/// The port of this address, at all addresses of its family.
pub fn everywhere(at: SocketAddr) -> Destinations {
    let net = if at.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    Destinations { net, prefix: 0, ports: at.port()..=at.port() }
}

impl Forwarder {
    /// Listens on `listen` in the forwarder namespace and relays each connection to `target`.
    pub fn start(lab: &Lab, listen: SocketAddr, target: SocketAddr, policy: Policy) -> Forwarder {
        Forwarder::open(lab, listen, target, policy, OpenOptions::default())
    }

    /// The same with other options.
    pub fn open(lab: &Lab, listen: SocketAddr, target: SocketAddr, policy: Policy, options: OpenOptions) -> Forwarder {
        Forwarder::serving(lab, listen, options, plug(target, policy))
    }

    /// The same in the caller's network namespace.
    pub fn here(listen: SocketAddr, target: SocketAddr, policy: Policy) -> Forwarder {
        let spawn = |work: Box<dyn FnOnce() + Send>| std::thread::spawn(work);
        Forwarder::running(spawn, OpenOptions::default(), accepting(listen, false, plug(target, policy)))
    }

    /// Listens on `listen`, and serves each client with the given function. Records of ended flows are added to the list.
    pub fn serving<F: Future<Output = ()> + Send + 'static>(
        lab: &Lab,
        listen: SocketAddr,
        options: OpenOptions,
        serve: impl Fn(Splicer, Leg, Record) -> F + Send + Sync + 'static,
    ) -> Forwarder {
        Forwarder::running(|work| lab.forwarder.spawn(work), options, accepting(listen, false, serve))
    }

    /// Like [`Forwarder::start`], for connections that are tracked when a splice is due.
    pub fn adopting_late(lab: &Lab, listen: SocketAddr, target: SocketAddr, policy: Policy) -> Forwarder {
        Forwarder::adopting_late_with(lab, listen, target, policy, OpenOptions::default())
    }

    /// The same with other options.
    pub fn adopting_late_with(
        lab: &Lab,
        listen: SocketAddr,
        target: SocketAddr,
        policy: Policy,
        options: OpenOptions,
    ) -> Forwarder {
        let accept = accepting(listen, true, plug(target, policy));
        Forwarder::running(|work| lab.forwarder.spawn(work), options, accept)
    }

    /// Listens with a socket of its own, connects to `target` with another one, and copies until up to `most` bytes have passed in
    /// all. Then the engine adopts both, whatever is on its way.
    pub fn adopting(lab: &Lab, listen: SocketAddr, target: SocketAddr, policy: Policy, most: u64) -> Forwarder {
        let forwarder = Forwarder::idle(lab);
        forwarder.relay_adopting(listen, target, policy, most);
        forwarder
    }

    /// Listens nowhere until [`Forwarder::relay`] says so: several runs have one data path, whose programs are loaded once.
    pub fn idle(lab: &Lab) -> Forwarder {
        let (tell, later) = unbounded_channel();
        let accept = async move |splicer: Splicer, record: Record, ready: mpsc::Sender<Splicer>| {
            ready.send(splicer.clone()).expect("the test waits");
            accept_later(splicer, record, later).await;
        };
        let forwarder = Forwarder::running(|work| lab.forwarder.spawn(work), OpenOptions::default(), accept);
        Forwarder { later: Some(tell), ..forwarder }
    }

    /// From now on, a forwarder that was idle relays connections to `listen`, too.
    pub fn relay(&self, listen: SocketAddr, target: SocketAddr, policy: Policy) {
        self.add(move |s, record, ready| Box::pin(accept_each(s, record, ready, listen, false, plug(target, policy))));
    }

    /// The same, tracking each connection when its splice is due, as with [`Forwarder::adopting_late`].
    pub fn relay_adopting_late(&self, listen: SocketAddr, target: SocketAddr, policy: Policy) {
        self.add(move |s, record, ready| Box::pin(accept_each(s, record, ready, listen, true, plug(target, policy))));
    }

    /// The same, but the engine adopts the sockets, as with [`Forwarder::adopting`].
    pub fn relay_adopting(&self, listen: SocketAddr, target: SocketAddr, policy: Policy, most: u64) {
        let policy = Arc::new(policy);
        self.add(move |s, record, ready| Box::pin(adopt_each(s, record, ready, [listen, target], policy, most)));
    }

    /// The same for connections that hosts open with each other: transparent ones to `to`.
    pub fn relay_transparent(&self, to: SocketAddr, policy: Policy) {
        self.add(move |s, record, ready| Box::pin(accept_transparent(s, record, ready, to, policy)));
    }

    /// The same for clients of `listen`, which shake hands with `target`.
    pub fn relay_end_to_end(&self, listen: SocketAddr, target: SocketAddr, policy: Policy) {
        let to = [listen, target, target];
        self.add(move |s, record, ready| Box::pin(accept_end_to_end(s, record, ready, to, policy)));
    }

    fn add(&self, accept: impl FnOnce(Splicer, Record, mpsc::Sender<Splicer>) -> Accepting + Send + 'static) {
        let (ready, is_ready) = mpsc::channel();
        let later = self.later.as_ref().expect("it was idle");
        assert!(later.send((Box::new(accept), ready)).is_ok(), "it runs");
        is_ready.recv().expect("it listens");
    }

    /// Intercepts transparent connections to `to`.
    pub fn transparent(lab: &Lab, to: SocketAddr, policy: Policy) -> Forwarder {
        Forwarder::transparent_with(lab, to, policy, OpenOptions::default())
    }

    /// The same with other options.
    pub fn transparent_with(lab: &Lab, to: SocketAddr, policy: Policy, options: OpenOptions) -> Forwarder {
        let accept = async move |splicer, record, ready| accept_transparent(splicer, record, ready, to, policy).await;
        Forwarder::running(|work| lab.forwarder.spawn(work), options, accept)
    }

    /// Intercepts connections of hosts that ask for a proxy, by translucent proxying (TPOT). `onward`: asks for another one.
    pub fn taker(at: &Namespace, to: Destinations, policy: Policy, onward: bool) -> Forwarder {
        Forwarder::taker_with(at, to, policy, onward, TpotHandshake::Basic, TpotOptions::default())
    }

    /// The same with another handshake, and other options.
    pub fn taker_with(
        at: &Namespace,
        to: Destinations,
        policy: Policy,
        onward: bool,
        handshake: TpotHandshake,
        options: TpotOptions,
    ) -> Forwarder {
        let accept = taking(to, policy, onward, handshake, options);
        Forwarder::running(|work| at.spawn(work), OpenOptions::default(), accept)
    }

    /// The same in the caller's network namespace, asking for another one.
    pub fn taker_here(to: Destinations, policy: Policy, handshake: TpotHandshake) -> Forwarder {
        let spawn = |work: Box<dyn FnOnce() + Send>| std::thread::spawn(work);
        Forwarder::running(spawn, OpenOptions::default(), taking(to, policy, true, handshake, TpotOptions::default()))
    }

    /// Listens on `listen` in the forwarder namespace, and lets each client shake hands with `target`. Clients that cannot are
    /// relayed to `otherwise`.
    pub fn plugged(
        lab: &Lab,
        listen: SocketAddr,
        [target, otherwise]: [SocketAddr; 2],
        policy: Policy,
        options: OpenOptions,
    ) -> Forwarder {
        let to = [listen, target, otherwise];
        let accept = async move |splicer, record, ready| accept_end_to_end(splicer, record, ready, to, policy).await;
        Forwarder::running(|work| lab.forwarder.spawn(work), options, accept)
    }

    fn running<A>(
        spawn: impl FnOnce(Box<dyn FnOnce() + Send>) -> JoinHandle<()>,
        options: OpenOptions,
        accept: A,
    ) -> Forwarder
    where
        A: AsyncFnOnce(Splicer, Record, mpsc::Sender<Splicer>) + Send + 'static,
    {
        log::keep();
        show_failures();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (ready, is_ready) = mpsc::channel();
        let ended = Arc::new(Mutex::new(Vec::new()));
        let record = ended.clone();
        let work = move || {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("runtime");
            let mut options = options;
            options.datapath.max_flows = options.datapath.max_flows.min(4096);
            let splicer = Splicer::open(&options).expect("the data path opens: root, kernel 6.6, bpffs");
            runtime.block_on(async {
                tokio::select! { () = accept(splicer.clone(), record, ready) => {}, _ = stopped => {} }
                splicer.stop(false);
                wait_async(Duration::from_secs(5), || splicer.flows().is_empty()).await;
            });
            runtime.shutdown_timeout(Duration::from_secs(1));
            splicer.close().expect("what was attached is removed");
        };
        let thread = spawn(Box::new(work));
        let splicer = is_ready.recv_timeout(Duration::from_secs(120)).expect("the forwarder starts");
        let (shown, of) = (splicer.clone(), ended.clone());
        let report = Report::new("a forwarder of this process", move || state(&shown, &of) + &log::last());
        let running = Running { stop: Some(stop), thread: Some(thread) };
        Forwarder { report, splicer, ended, later: None, _running: running }
    }

    /// Shows its state. A test that panics does so without this.
    pub fn show(&self) {
        self.report.show();
    }

    /// Waits until `n` flows have ended, and returns their records.
    pub fn ended(&self, n: usize) -> Vec<Ended> {
        let all = wait_for(Duration::from_secs(30), || {
            let e = self.ended.lock().expect("lock");
            (e.len() >= n).then(|| e.clone())
        });
        all.unwrap_or_else(|| {
            let ended = self.ended.lock().expect("lock").len(); // the lock is free again before the state is shown
            panic!("{n} flows end, but only {ended} have, live: {:#?}", self.splicer.flows())
        })
    }

    /// Waits until the first flow is in the given state.
    pub fn wait_state(&self, state: FlowState) {
        wait_for(Duration::from_secs(10), || self.splicer.flows().iter().any(|f| f.state == state).then_some(()))
            .unwrap_or_else(|| panic!("a flow becomes {state:?}: {:#?}, {:?}", self.splicer.flows(), self.verdicts()));
    }

    /// Sends a command to all live flows.
    pub fn command(&self, c: Command) {
        for f in self.splicer.flows() {
            self.splicer.command(f.id, c);
        }
    }

    /// The verdict counters that are not zero.
    pub fn verdicts(&self) -> Vec<(&'static str, u64)> {
        let all = self.splicer.datapath().expect("kernel path").verdicts().expect("counters");
        all.into_iter().filter(|v| v.1 > 0).collect()
    }

    /// The value of one verdict counter.
    pub fn verdict(&self, name: &str) -> u64 {
        self.verdicts().iter().find(|v| v.0 == name).map_or(0, |v| v.1)
    }
}

/// The state of an engine, for people.
fn state(splicer: &Splicer, ended: &Record) -> String {
    let flows = splicer.flows().into_iter().map(|flow| format!("{flow:?}\n"));
    let ended = ended.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let ended = ended.into_iter().map(|ended| format!("{ended:?}\n"));
    let Some(d) = splicer.datapath() else { return flows.chain(ended).collect() };
    let legs = d.legs().into_iter().map(|(t, leg)| format!("{t:?} {leg:?}\n"));
    let paths = d.paths().into_iter().map(|(t, path)| format!("{t:?} {path:?}\n"));
    let counters = d.verdicts().map(|all| all.into_iter().filter(|v| v.1 > 0).collect::<Vec<_>>());
    flows.chain(ended).chain(legs).chain(paths).chain([format!("{counters:?}\n")]).collect()
}

/// As the proxy does: no byte of a flow that is spliced at once is copied.
fn hold_first_data(listener: &EndToEndListener, policy: &Policy) {
    if policy.when == SpliceWhen::AtOnce {
        listener.hold_first_data().expect("raw sockets");
    }
}

/// Translucent proxying in a test. Dropping it prints the counters and removes what was attached.
pub struct TestTpot(Arc<Tpot>);

impl TestTpot {
    /// Attaches in the caller's network namespace.
    pub fn open() -> TestTpot {
        TestTpot::with(&TpotOptions::default())
    }

    /// The same with other options.
    pub fn with(options: &TpotOptions) -> TestTpot {
        TestTpot(Arc::new(Tpot::open(options).expect("TPOT: root, kernel 6.6, bpffs")))
    }

    /// The value of one verdict counter.
    pub fn verdict(&self, name: &str) -> u64 {
        self.verdicts().expect("counters").iter().find(|v| v.0 == name).expect("a verdict").1
    }
}

impl std::ops::Deref for TestTpot {
    type Target = Arc<Tpot>;

    fn deref(&self) -> &Arc<Tpot> {
        &self.0
    }
}

impl Drop for TestTpot {
    fn drop(&mut self) {
        let all = self.verdicts().expect("counters");
        eprintln!("TPOT: {:?}", all.into_iter().filter(|v| v.1 > 0).collect::<Vec<_>>());
        self.remove().expect("removed");
    }
}

async fn wait_async(limit: Duration, done: impl Fn() -> bool) {
    let end = tokio::time::Instant::now() + limit;
    while !done() && tokio::time::Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(t) = self.thread.take()
            && let Err(panic) = t.join()
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}
