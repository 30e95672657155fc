//! `longsplice run`: from configuration to clean shutdown.
//!
//! Start: configuration, control socket, addresses and files, data path, listeners. Shutdown: stop accepting, wait for flows
//! to end by themselves, end or leave the others, write the last lines of the access log, detach.

use crate::{
    Outcome,
    admin::Admin,
    args::{Format, RunArgs},
    client,
    configuring::{Reloader, configure, no_haproxy},
    control::{Control, Ending, Orders, Stopper, end_limit},
    doctor,
    handing::{
        Of,
        heir::{Heir, Offered, Received},
        successor::{Asked, ITSELF, Predecessor, Prepared, Sockets, Upgraded},
    },
    haproxy::Haproxy,
    memory, paths, socket_file,
    supervisor::{self, Store},
};
use longsplice_datapath::{give_large_blocks_back, try_tpot};
use longsplice_engine::{OpenOptions, Refusal, Splicer, Tpot, Tuple};
use longsplice_proxy::{
    AdminConfig, Config, ListenerConfig, Open, Prepared as Opened, Server, Workers, config::Places, handed::Handed,
    inherited::Inherited, tpot,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::{
    env,
    future::pending,
    io::{self, IsTerminal},
    iter::from_fn,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    pin::pin,
    process::ExitCode,
    sync::Arc,
    time::Duration,
};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
    task::spawn_blocking,
    time::timeout,
};
use tracing_subscriber::EnvFilter;

/// The protocols that have their connections to the end. Handshakes before a relay need no row here.
const SERVICES: [Open; 2] = [longsplice_proxy_http::open, longsplice_proxy::ftp::open];

/// `longsplice run`.
pub fn run(args: &RunArgs, control: Option<&Path>, verbose: u8) -> Outcome {
    give_large_blocks_back();
    start_log(verbose, args.log_format == Some(Format::Json));
    if args.check {
        return check(args, control);
    }
    if !args.take_over {
        let (inherited, store) = supervisor::inherited()?;
        return begin(args, control, (inherited, store, None));
    }
    let (heir, mut offered) = Heir::begin()?;
    let heir = Arc::new(heir);
    let store = Store::of_earlier(offered.bound());
    let inherited = offered.inherited()?.with_caches(heir.caches());
    let outcome = begin(args, control, (inherited, store, Some((heir.clone(), offered))));
    outcome.as_ref().err().into_iter().for_each(|why| heir.refuse(&why.to_string()));
    outcome
}

/// What another process hands over to this one.
type Taken = Option<(Arc<Heir>, Offered)>;

fn begin(args: &RunArgs, control: Option<&Path>, (inherited, store, taken): (Inherited, Store, Taken)) -> Outcome {
    let config = configure(args)?;
    if taken.is_none() {
        store.leave_unneeded(&inherited, &config);
    }
    raise_descriptor_limit();
    let path = control_path(&config, control)?;
    let workers = Workers::start()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(serve(args, (config, inherited, store, taken), &path, &workers));
    // a thread that waits for a disk would be waited for
    runtime.shutdown_background();
    outcome
}

/// Returns the file from which the program was started, or where it was if there may be another one by now.
fn binary() -> PathBuf {
    let binary = env::current_exe().unwrap_or_else(|_| ITSELF.into());
    let was = binary.to_str().and_then(|binary| binary.strip_suffix(" (deleted)")).map(PathBuf::from);
    was.unwrap_or(binary)
}

fn control_path(config: &Config, control: Option<&Path>) -> io::Result<PathBuf> {
    match control.or(config.control.as_deref()) {
        Some(path) => Ok(path.to_owned()),
        None => paths::control_socket(),
    }
}

/// `longsplice run --check` and `longsplice check`: says what would end a start, and touches nothing.
fn check(args: &RunArgs, control: Option<&Path>) -> Outcome {
    let config = configure(args)?;
    let path = control_path(&config, control)?;
    socket_file::check_directory(&path).map_err(|e| no_control(&path, &e))?;
    if let Some(path) = &config.haproxy {
        let checked = socket_file::check_directory(path).and_then(|()| socket_file::check_file(path));
        checked.map_err(|e| no_haproxy(&config, &e))?;
    }
    longsplice_proxy::check(&config)?;
    if !args.copy_only
        && let Err(e) = config.engine.datapath.check_devices()
    {
        if config.splice.is_fatal(&e) {
            return Err(e.to_string().into());
        }
        tracing::warn!("connections would be copied, not spliced: {e}");
    }
    println!("nothing is wrong with the configuration ({} listeners)", config.listeners.len());
    Ok(ExitCode::SUCCESS)
}

fn no_admin(config: &Config, at: SocketAddr, error: &io::Error) -> String {
    format!("{}cannot listen on {at} for [admin]: {error}", config.places.of(Places::key("admin")))
}

fn no_control(path: &Path, error: &io::Error) -> String {
    format!("control socket {}: {error}", path.display())
}

pub(crate) fn start_log(verbose: u8, json: bool) {
    let level = ["info", "debug", "trace"][usize::from(verbose).min(2)];
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_target(false);
    let log = log.with_ansi(io::stderr().is_terminal());
    if json {
        log.json().init();
    } else {
        log.init();
    }
}

/// Raises the soft limit of descriptors: a flow needs two, and the
/// usual limit of 1024 exists only for programs that call select(2).
fn raise_descriptor_limit() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
        && let Err(e) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        tracing::warn!("the limit of open files stays at {soft}: {e}");
    }
}

/// Opens the engine with the kernel path; if that fails, without it, and logs the reason. `handed`: legs of another process, and the
/// highest number of a flow.
fn open(args: &RunArgs, config: &Config, (handed, handed_number): (Vec<Tuple>, u64)) -> Result<Splicer, String> {
    if args.copy_only {
        tracing::info!("copying only, as told by --copy-only");
        return Ok(Splicer::copying_from(config.engine.sources.clone(), Refusal::Policy));
    }
    remove_leftovers();
    let mut options = OpenOptions { handed, handed_number, ..config.engine.clone() };
    options.datapath.follows = true; // after a crash as well: no connection passes unjudged before its listener is there
    if let Some(warning) = doctor::warn_of_shared_ports(&options.source_ports) {
        tracing::warn!("{warning}");
    }
    if !config.listeners.iter().any(ListenerConfig::copies) {
        options.datapath.tap_ring = 0; // the smallest possible
    }
    if !config.listeners.iter().any(ListenerConfig::holds) {
        options.datapath.hold_ring = 0;
    }
    // the longest of all: the listener of a recovered flow is not known
    if let Some(limit) = config.listeners.iter().map(|l| l.policy.idle_limit.get()).max() {
        options.recovered_idle_limit = limit;
    }
    memory::warn_if_small(options.datapath.max_flows);
    match Splicer::open(&options) {
        Ok(splicer) => {
            announce_devices(&splicer);
            Ok(splicer)
        }
        Err(e) if config.splice.is_fatal(&e) => {
            Err(format!("{e}; splice = \"if-possible\" in the configuration file would copy all the same"))
        }
        Err(e) => {
            let why = Refusal::from(&e);
            let more = if why == Refusal::Memory { memory(&options) } else { String::new() };
            tracing::warn!("connections are copied, not spliced ({why}): {e}{more}; see `longsplice doctor`");
            Ok(Splicer::copying_from(options.sources, why))
        }
    }
}

/// How much memory the tables need, and how much there is.
fn memory(options: &OpenOptions) -> String {
    const MB: u64 = 1_000_000;
    let need = options.datapath.table_bytes() / MB;
    let limit = doctor::memory_limit().filter(|limit| *limit != u64::MAX);
    let limit = limit.map_or_else(String::new, |limit| format!(", and the cgroup has {} MB", limit / MB));
    format!(" (the tables take about {need} MB{limit}: a smaller --max-flows, or a larger limit, helps)")
}

/// Removes the leftovers of dead processes and deleted network
/// namespaces: their tables take tens of megabytes of kernel memory.
pub(crate) fn remove_leftovers() {
    for removed in [longsplice_datapath::remove_dead(), paths::remove_leftovers()] {
        match removed {
            Ok(all) => {
                all.iter().for_each(|path| tracing::info!("removed {}, which nobody holds any more", path.display()))
            }
            // what another user has left is no concern of this one
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                tracing::debug!(%error, "no leftovers looked for")
            }
            Err(error) => tracing::warn!("cannot remove what earlier processes have left: {error}"),
        }
    }
}

fn announce_devices(splicer: &Splicer) {
    let names = splicer.devices();
    if names.is_empty() {
        tracing::warn!("no Ethernet device is up: nothing will be spliced; see `longsplice doctor`");
    } else {
        tracing::info!("splicing on {}", names.join(", "));
    }
}

async fn serve(
    args: &RunArgs,
    (config, inherited, store, taken): (Config, Inherited, Store, Taken),
    path: &Path,
    workers: &Workers,
) -> Outcome {
    // Signals come first: one that arrives during the start must shut the proxy down cleanly, too.
    let mut signals = Signals::new()?;
    let (leave, access) = (config.leave_flows_on_stop, config.control_access);
    let (heir, offered) = taken.map_or((None, Offered::default()), |(heir, offered)| (Some(heir), offered));
    // Bind this before the listeners: if the socket is taken, another
    // process runs, and clients meant for it must not reach us.
    let mut control = match offered.control.filter(|_| heir.as_ref().is_some_and(|heir| heir.has_control(path))) {
        Some(socket) => Control::at(socket),
        None => Control::bind(path, access),
    }
    .map_err(|e| no_control(path, &e))?;
    let admin = match &config.admin {
        Some(of) => Some(admin(of, offered.admin).await.map_err(|e| no_admin(&config, of.listen, &e))?),
        None => None,
    };
    let haproxy =
        Haproxy::open((config.haproxy.as_deref(), access), offered.haproxy).map_err(|e| no_haproxy(&config, &e))?;
    let haproxy = Arc::new(haproxy);
    for at in inherited.unused(&config) {
        tracing::warn!("no listener has the address {at} of an inherited socket: its clients get no answer");
    }
    // Files may be on a disk that does not answer. That must not keep the signals from ending the program.
    let preparing = spawn_blocking(move || Opened::with(config, &SERVICES, inherited));
    let mut prepared = tokio::select! {
        prepared = preparing => prepared.map_err(io::Error::other)??,
        name = signals.until_told() => {
            tracing::info!("{name}: stopping, before files and addresses were opened");
            return Ok(ExitCode::SUCCESS);
        }
    };
    let mut handed = Received::default();
    if let Some(heir) = heir.clone() {
        let splices = !args.copy_only;
        let named = |listener: &ListenerConfig| (listener.name.to_string(), listener.protocol.name().to_owned());
        let listeners: Vec<_> = prepared.config().listeners.iter().map(named).collect();
        let intercepts = tpot::is_needed(prepared.config());
        let taking = spawn_blocking(move || take_over(&heir, &listeners, (splices, intercepts)));
        handed = tokio::select! {
            taken = taking => taken.map_err(io::Error::other)??,
            name = signals.until_told() => return Err(format!("{name}, before anything was handed over").into()),
        };
        control.take_file(path, access);
        haproxy.take_file(access);
    }
    let Received { connections: handed, servers, paused } = handed;
    prepared.know(&servers);
    prepared.pause(paused);
    prepared.listen()?; // the kernel checks the programs for a second
    let legs = handed.iter().flat_map(|handed| handed.about.recorded()).collect();
    let last = handed.iter().filter_map(|handed| handed.about.flow()).max().unwrap_or(0);
    let splicer = match open(args, prepared.config(), (legs, last)) {
        Err(why) if heir.is_some() => {
            tracing::error!(
                "connections are copied, not spliced, because there is no other process to serve them: {why}"
            );
            Splicer::copying_from(prepared.config().engine.sources.clone(), Refusal::Failed)
        }
        opened => opened?,
    };
    splicer.number_after(last); // also if it only copies
    let server = match prepared.start(workers, splicer.clone()).await {
        Ok(server) => Arc::new(server),
        Err(e) => {
            if heir.is_some() {
                splicer.let_go().await; // the process before may go on, with what is in the kernel
            }
            // Flows left by an earlier process must not suffer from an error in our configuration.
            close(splicer, true)?;
            return Err(e.into());
        }
    };
    let reloader = Reloader::new(args, (server.clone(), haproxy.clone(), store), leave);
    let (stop, mut stops) = mpsc::unbounded_channel();
    let (upgrade, mut upgrades) = mpsc::unbounded_channel();
    let orders = Orders { stop, upgrade };
    let mut stoppers = Vec::new();
    // Scripts wait for this line: everything is ready now.
    haproxy.announce();
    tracing::info!("control socket {}", path.display());
    if let Some(heir) = heir {
        heir.serves();
        take_connections(heir, handed, &server).await;
    }
    supervisor::ready().await;
    tokio::spawn(reloader.clone().store());
    let live = tokio::spawn(supervisor::live());
    let office = Office { control, admin, haproxy };
    let predecessor =
        Predecessor { binary: binary(), control: path.to_owned(), splicer: splicer.clone(), server: server.clone() };
    let ending = {
        let mut serving = pin!(office.serve(&splicer, &reloader, &orders));
        loop {
            let asked = tokio::select! {
                () = &mut serving => unreachable!("it serves until dropped"),
                ending = signals.until_end(&reloader) => break Ok(ending),
                stopper = stops.recv() => {
                    stoppers.extend(stopper);
                    break Ok(stoppers[0].ending);
                }
                Some(asked) = upgrades.recv() => asked,
            };
            let prepare = async {
                // until it is over, a reload would be one of the old configuration
                let turn =
                    timeout(asked.limit, reloader.turn()).await.map_err(|_| "a reload does not come to its end")?;
                Ok((office.prepare(&predecessor, &asked).await?, turn))
            };
            let prepared: Result<_, String> = tokio::select! {
                () = &mut serving => unreachable!("it serves until dropped"),
                prepared = prepare => prepared,
            };
            match prepared {
                Ok((prepared, turn)) => break Err((prepared, asked, turn)),
                Err(why) => {
                    let why = format!("everything stays as it is: {why}");
                    tracing::error!("cannot upgrade: {why}");
                    asked.tell(Err(why)).await;
                }
            }
        }
    };
    let ending = match ending {
        Ok(ending) => ending,
        Err((prepared, asked, turn)) => {
            // From here on, others answer.
            office.leave();
            let served = replace(&predecessor, prepared, asked).await;
            let serves = path.to_owned();
            turn.pass_on_by(move |enforce| client::reload_at(&serves, enforce).map_err(|e| e.to_string()));
            live.abort();
            drop((predecessor, upgrades)); // others who have asked are too late
            // if nobody serves, whoever supervises the program is to start it again soon
            let drain = served.is_ok().then(|| Duration::from_secs(args.hand_over_limit));
            let ending = Ending { drain, flush: false };
            let end = end(&splicer, &reloader, ending, false, (&mut signals, &mut stops, &mut stoppers));
            tokio::join!(end, reloader.turn()); // reloads that have waited are passed on by now
            drop((server, reloader));
            let closed = close(splicer, false);
            served?;
            return Ok(closed.map(|()| ExitCode::SUCCESS)?);
        }
    };
    drop(predecessor);
    supervisor::stopping().await;
    // Operators can still inspect flows while they drain.
    let leave = reloader.leaves_flows();
    tokio::select! {
        () = office.serve(&splicer, &reloader, &orders) => unreachable!("it serves until dropped"),
        () = end(&splicer, &reloader, ending, leave, (&mut signals, &mut stops, &mut stoppers)) => {}
    }
    let tpot = server.tpot();
    drop((server, reloader));
    let closed = close(splicer, leave && !ending.flush).and_then(|()| tpot.as_deref().map_or(Ok(()), close_tpot));
    drop(office);
    stoppers.extend(from_fn(|| stops.try_recv().ok()));
    stoppers.into_iter().for_each(|s| s.tell(&closed));
    Ok(closed.map(|()| ExitCode::SUCCESS)?)
}

/// Where operators ask.
struct Office {
    control: Control,
    admin: Option<Admin>,
    haproxy: Arc<Haproxy>,
}

impl Office {
    /// Answers until dropped.
    async fn serve(&self, splicer: &Splicer, reloader: &Reloader, orders: &Orders) {
        let admin = async {
            match &self.admin {
                Some(admin) => admin.serve(splicer, &reloader.server).await,
                None => pending().await,
            }
        };
        tokio::join!(
            self.control.serve(splicer, reloader, orders),
            admin,
            self.haproxy.serve(splicer, &reloader.server)
        );
    }

    /// Starts another process that is to take over.
    async fn prepare(&self, predecessor: &Predecessor, asked: &Asked) -> Result<Prepared, String> {
        let mut others = vec![self.control.socket().map(|socket| (Of::Control, socket))];
        others.extend(self.admin.iter().map(|admin| admin.socket().map(|socket| (Of::Admin, socket))));
        let haproxy = self.haproxy.socket().transpose();
        others.extend(haproxy.map(|of| of.map(|(path, socket)| (Of::Haproxy { path }, socket))));
        let sockets = others.into_iter().collect::<io::Result<_>>();
        let sockets = sockets.and_then(|others| Sockets::of(&predecessor.server, others)).map_err(|e| e.to_string())?;
        predecessor.prepare(sockets, asked).await
    }

    /// Leaves all of it to another process.
    fn leave(mut self) {
        self.control.leave_file();
        self.haproxy.leave();
    }
}

/// Hands everything over, and says what came of it. Fails if no process serves then.
async fn replace(predecessor: &Predecessor, prepared: Prepared, asked: Asked) -> Result<(), String> {
    let upgraded = predecessor.finish(prepared).await;
    let successor = upgraded.as_ref().map_or_else(|failed| failed.restarted, |upgraded| Some(upgraded.process));
    match &upgraded {
        Ok(Upgraded { process, program, left, taken, stay, .. }) => {
            predecessor.server.events().handed_over(*process, program, (*left, *taken), *stay);
            tracing::info!("process {process} serves now; {stay} connections stay here until they end");
        }
        Err(failed) => tracing::error!("cannot upgrade: {failed}"),
    }
    let upgraded = upgraded.map_err(|failed| failed.to_string());
    let lost = upgraded.as_ref().err().filter(|_| successor.is_none()).cloned();
    asked.tell(upgraded).await;
    lost.map_or(Ok(()), Err)
}

/// Listens for those who ask for metrics, at the socket of an earlier process if it has the address.
async fn admin(of: &AdminConfig, offered: Option<TcpListener>) -> io::Result<Admin> {
    let is_it = |socket: &TcpListener| {
        let at = socket.local_addr();
        at.is_ok_and(|at| at.ip() == of.listen.ip() && [at.port(), 0].contains(&of.listen.port()))
    };
    match offered.filter(is_it) {
        Some(socket) => Admin::at(of, socket),
        None => Admin::bind(of).await,
    }
}

/// Goes on with the connections of the process that has handed over, once that has said so. Returns when it has closed its sockets:
/// a reload may bind an address again that the new configuration did not have.
async fn take_connections(heir: Arc<Heir>, mut handed: Vec<Handed>, server: &Server) {
    if !handed.is_empty() {
        let of_heir = heir.clone();
        match spawn_blocking(move || of_heir.are_ours()).await.map_err(|e| e.to_string()).and_then(|ours| ours) {
            Ok(()) => {
                tracing::info!("{} connections go on here", handed.len());
                handed.iter_mut().for_each(|handed| handed.about.has_moved());
                server.go_on(handed);
            }
            Err(why) => {
                let n = handed.len();
                tracing::error!(
                    "cannot go on with {n} connections of the process that has handed over, and resets them: {why}"
                );
                server.reset(handed);
            }
        }
    }
    let _ = spawn_blocking(move || heir.until_closed()).await;
}

/// Checks the machine, and waits until the process that hands over has let go. Returns what it hands over.
fn take_over(
    heir: &Heir,
    listeners: &[(String, String)],
    (splices, intercepts): (bool, bool),
) -> Result<Received, String> {
    if splices && heir.splices() {
        heir.check_tables()?;
        doctor::attach_for_trial().map_err(|why| format!("this program cannot splice here: {why}"))?;
    }
    if intercepts {
        try_tpot().map_err(|why| format!("this program cannot intercept connections here: {why}"))?;
    }
    heir.prepared(listeners, splices)
}

/// Ends all flows in the way that `ending` asks for.
async fn end(
    splicer: &Splicer,
    reloader: &Reloader,
    ending: Ending,
    leave: bool,
    (signals, stops, stoppers): (&mut Signals, &mut mpsc::UnboundedReceiver<Stopper>, &mut Vec<Stopper>),
) {
    let server = &reloader.server;
    server.stop_accepting();
    if let Some(limit) = ending.drain {
        tracing::info!("draining for at most {} s", limit.as_secs());
        reloader.clone().leave_store().await;
        tokio::select! {
            left = server.drain(limit) => tracing::info!("{left} connections left after draining"),
            _ = signals.until_end(reloader) => {}
            stopper = stops.recv() => {
                stoppers.extend(stopper);
                tracing::info!("told again to stop: no more draining");
            }
        }
    }
    splicer.stop(leave && !ending.flush);
    let limit = end_limit(server.counters().live);
    let left = server.drain(limit).await;
    if left > 0 {
        tracing::warn!("{left} connections did not end within {} s; closing them", limit.as_secs());
    }
    let lost = server.unwritten_lines();
    if lost > 0 {
        tracing::warn!("cannot write the end of the access log: {lost} lines are lost");
    }
}

/// Detaches from the kernel and removes the tables; with `keep` only if the kernel forwards no flows.
fn close(splicer: Splicer, keep: bool) -> Result<(), String> {
    let pin = splicer.pin().map(|pin| pin.display().to_string()).unwrap_or_default();
    let flows = if keep { splicer.forwarded() } else { 0 };
    splicer.stop(flows > 0);
    splicer.close().map_err(|e| format!("cannot remove {pin}: {e}"))?;
    if flows > 0 {
        tracing::info!("stopped; {flows} flows left running, pinned at {pin}");
    } else {
        tracing::info!("stopped");
    }
    Ok(())
}

/// Detaches the programs of translucent proxying, unless connections are left in tunnels.
fn close_tpot(tpot: &Tpot) -> Result<(), String> {
    match tpot.close() {
        Ok(0) => Ok(()),
        Ok(left) => {
            tracing::info!("{left} connections stay in their tunnels, which the next start takes over");
            Ok(())
        }
        Err(e) => Err(format!("cannot detach translucent proxying: {e}")),
    }
}

/// The signals that the process handles.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    user: [Signal; 2],
}

impl Signals {
    fn new() -> io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
            user: [signal(SignalKind::user_defined1())?, signal(SignalKind::user_defined2())?],
        })
    }

    /// Waits for SIGTERM or SIGINT.
    async fn until_told(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }

    /// Waits for SIGTERM or SIGINT. Meanwhile SIGUSR1 reopens the access log, and SIGHUP reloads the configuration as well. SIGUSR2
    /// is caught and ignored, since its default action would kill the process.
    async fn until_end(&mut self, reloader: &Reloader) -> Ending {
        loop {
            let [user1, user2] = &mut self.user;
            let name = tokio::select! {
                _ = self.terminate.recv() => "SIGTERM",
                _ = self.interrupt.recv() => "SIGINT",
                _ = self.hang_up.recv() => {
                    reloader.hang_up();
                    continue;
                }
                _ = user1.recv() => {
                    tracing::info!("SIGUSR1: opening the access log anew");
                    reloader.server.reopen_log();
                    continue;
                }
                _ = user2.recv() => {
                    tracing::info!("SIGUSR2 has no meaning here: ignored");
                    continue;
                }
            };
            tracing::info!("{name}: stopping");
            return Ending { drain: None, flush: false };
        }
    }
}
