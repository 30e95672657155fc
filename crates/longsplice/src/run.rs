//! `longsplice run`: from configuration to clean shutdown.
//!
//! Start: configuration, control socket, addresses and files, data path, listeners. Shutdown: stop accepting, wait for flows
//! to end by themselves, end or leave the others, write the last lines of the access log, detach.

use crate::{
    Outcome,
    admin::Admin,
    args::{Format, RunArgs},
    configuring::{Reloader, configure},
    control::{self, Control, Ending, Stopper, end_limit},
    doctor, memory, paths, supervisor,
};
use longsplice_datapath::give_large_blocks_back;
use longsplice_engine::{OpenOptions, Refusal, Splicer, Tpot};
use longsplice_proxy::{Config, ListenerConfig, Open, Prepared, Workers, config::Places, inherited::Inherited};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::{
    future::pending,
    io::{self, IsTerminal},
    iter::from_fn,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
    task::spawn_blocking,
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
    let inherited = supervisor::inherited()?;
    let config = configure(args)?;
    raise_descriptor_limit();
    let path = control_path(&config, control)?;
    let workers = Workers::start()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(serve(args, (config, inherited), &path, &workers));
    // a thread that waits for a disk would be waited for
    runtime.shutdown_background();
    outcome
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
    control::check_directory(&path).map_err(|e| no_control(&path, &e))?;
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

/// Opens the engine with the kernel path; if that fails, without it, and logs the reason.
fn open(args: &RunArgs, config: &Config) -> Result<Splicer, String> {
    if args.copy_only {
        tracing::info!("copying only, as told by --copy-only");
        return Ok(Splicer::copying_from(config.engine.sources.clone(), Refusal::Policy));
    }
    remove_leftovers();
    let mut options = config.engine.clone();
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
    if let Some(limit) = config.listeners.iter().map(|l| l.policy.idle_limit).max() {
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
fn remove_leftovers() {
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

async fn serve(args: &RunArgs, (config, inherited): (Config, Inherited), path: &Path, workers: &Workers) -> Outcome {
    // Signals come first: one that arrives during the start must shut the proxy down cleanly, too.
    let mut signals = Signals::new()?;
    let leave = config.leave_flows_on_stop;
    // Bind this before the listeners: if the socket is taken, another
    // process runs, and clients meant for it must not reach us.
    let control = Control::bind(path).map_err(|e| no_control(path, &e))?;
    let admin = match &config.admin {
        Some(of) => Some(Admin::bind(of).await.map_err(|e| no_admin(&config, of.listen, &e))?),
        None => None,
    };
    for at in inherited.unused(&config) {
        tracing::warn!("no listener has the address {at} of an inherited socket: its clients get no answer");
    }
    // Files may be on a disk that does not answer. That must not keep the signals from ending the program.
    let preparing = spawn_blocking(move || Prepared::with(config, &SERVICES, inherited));
    let prepared = tokio::select! {
        prepared = preparing => prepared.map_err(io::Error::other)??,
        name = signals.until_told() => {
            tracing::info!("{name}: stopping, before files and addresses were opened");
            return Ok(ExitCode::SUCCESS);
        }
    };
    let splicer = open(args, prepared.config())?;
    let server = match prepared.start(workers, splicer.clone()).await {
        Ok(server) => Arc::new(server),
        Err(e) => {
            // Flows left by an earlier process must not suffer from an error in our configuration.
            close(splicer, true)?;
            return Err(e.into());
        }
    };
    let reloader = Reloader::new(args, server.clone(), leave);
    let (stop, mut stops) = mpsc::unbounded_channel();
    let mut stoppers = Vec::new();
    // Scripts wait for this line: everything is ready now.
    tracing::info!("control socket {}", path.display());
    supervisor::ready().await;
    tokio::spawn(supervisor::live());
    let office = Office { control, admin };
    let ending = tokio::select! {
        () = office.serve(&splicer, &reloader, &stop) => unreachable!("it serves until dropped"),
        ending = signals.until_end(&reloader) => ending,
        stopper = stops.recv() => {
            stoppers.extend(stopper);
            stoppers[0].ending
        }
    };
    supervisor::stopping().await;
    // Operators can still inspect flows while they drain.
    let leave = reloader.leaves_flows();
    tokio::select! {
        () = office.serve(&splicer, &reloader, &stop) => unreachable!("it serves until dropped"),
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
}

impl Office {
    /// Answers until dropped.
    async fn serve(&self, splicer: &Splicer, reloader: &Reloader, stop: &mpsc::UnboundedSender<Stopper>) {
        let admin = async {
            match &self.admin {
                Some(admin) => admin.serve(splicer, &reloader.server).await,
                None => pending().await,
            }
        };
        tokio::join!(self.control.serve(splicer, reloader, stop), admin);
    }
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
