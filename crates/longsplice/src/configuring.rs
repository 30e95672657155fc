//! The configuration of `longsplice run`: from the file and the command line, at the start and again while it runs.

use crate::{
    args::{Format, RunArgs},
    haproxy::Haproxy,
    supervisor::Store,
};
use longsplice_datapath::MAX_LISTENERS;
use longsplice_engine::SpliceWhen;
use longsplice_proxy::{
    Config, ConfigError, ListenerConfig, Protocol, Reloaded, Server, limits::CONNECTIONS, log::access_log::LogFormat,
};
use std::{
    io,
    net::UdpSocket,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::{Mutex, OwnedMutexGuard},
    task::spawn_blocking,
};

/// Reads the configuration, warns of what is hardly meant, and checks what can be checked before anything is opened.
pub fn configure(args: &RunArgs) -> Result<Config, String> {
    let config = read(args).map_err(|e| e.to_string())?;
    config.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    for source in &config.engine.sources {
        let failed = |e| format!("{}source {source}: {e}; name addresses of this host", config.places.of(source));
        UdpSocket::bind((*source, 0)).map_err(failed)?;
    }
    let tracked = |l: &&ListenerConfig| l.policy.when != SpliceWhen::Never || l.protocol == Protocol::Transparent;
    let tracked = config.listeners.iter().filter(tracked).count();
    if tracked > MAX_LISTENERS as usize && !args.copy_only {
        let advice = "give some of them `splice = \"never\"`, or let another process have them, in a network namespace of its own";
        return Err(format!("{tracked} listeners, of which {MAX_LISTENERS} can be spliced: {advice}"));
    }
    Ok(config)
}

/// Reads the configuration file and applies the command line on top.
fn read(args: &RunArgs) -> Result<Config, ConfigError> {
    let mut config = match &args.config {
        Some(file) => Config::from_file(file)?,
        None => Config::default(),
    };
    config.add_args(&args.socks5, &args.http, &args.tls, &args.plug)?;
    if let Some(when) = args.splice {
        config.listeners.iter_mut().for_each(|l| l.policy.when = when);
    }
    if let Some(path) = args.path {
        config.listeners.iter_mut().for_each(|l| l.policy.path = path);
    }
    if let Some(seconds) = args.keepalive {
        let after = Some(Duration::from_secs(seconds.into()));
        config.listeners.iter_mut().for_each(|l| l.policy.keepalive = after);
    }
    let datapath = &mut config.engine.datapath;
    if !args.device.is_empty() {
        datapath.devices.clone_from(&args.device);
    }
    if !args.xdp.is_empty() {
        datapath.xdp.clone_from(&args.xdp);
    }
    if !args.peer.is_empty() {
        datapath.peer.clone_from(&args.peer);
    }
    datapath.max_flows = args.max_flows;
    if let Some(dir) = &args.tap {
        config.listeners.iter_mut().for_each(|l| l.tap = Some(dir.clone()));
    }
    if let Some(file) = &args.access_log {
        config.log.to = file.as_path().into();
    }
    match args.log_format {
        Some(Format::Text) => config.log.format = LogFormat::Text,
        Some(Format::Json) => config.log.format = LogFormat::Json,
        Some(Format::Common) => config.log.format = LogFormat::common(),
        Some(Format::Combined) => config.log.format = LogFormat::combined(),
        None => {}
    }
    if let (Some(Format::Common | Format::Combined), true) = (args.log_format, config.log.tells_more()) {
        let message = "such lines do not tell that a connection begins or goes on: remove it, or begin and interval";
        return Err(ConfigError::Argument {
            option: "--log-format",
            value: "of web servers".into(),
            message: message.into(),
        });
    }
    config.leave_flows_on_stop |= args.leave_flows;
    config.connections.get_or_insert(CONNECTIONS.max(args.max_flows));
    Ok(config)
}

/// Returns why there is no socket for tools of HAProxy.
pub fn no_haproxy(config: &Config, error: &io::Error) -> String {
    let path = config.haproxy.as_deref().unwrap_or(Path::new("")).display();
    format!("{}socket {path}: {error}", config.places.of(&path))
}

/// Reads the configuration anew, and puts it in force.
#[derive(Clone)]
pub struct Reloader {
    args: Arc<RunArgs>,
    /// The server whose configuration it is.
    pub server: Arc<Server>,
    haproxy: Arc<Haproxy>,
    store: Arc<Store>,
    /// Whether spliced flows continue when the program stops.
    leave: Arc<AtomicBool>,
    /// One reload or upgrade at a time. How the process that serves now is asked to reload, if another one does.
    turn: Arc<Mutex<Option<PassOn>>>,
}

/// Asks another process to reload, with or without `--enforce`, and waits for its answer.
type PassOn = Arc<dyn Fn(bool) -> Result<Reloaded, String> + Send + Sync>;

/// Keeps reloads waiting: another process has read the configuration, and may be about to serve with it.
pub struct Turn(OwnedMutexGuard<Option<PassOn>>);

impl Turn {
    /// Whoever waits is passed on to the process that serves now.
    pub fn pass_on_by(mut self, ask: impl Fn(bool) -> Result<Reloaded, String> + Send + Sync + 'static) {
        *self.0 = Some(Arc::new(ask));
    }
}

impl Reloader {
    /// `leave`: whether spliced flows continue when the program stops.
    pub fn new(args: &RunArgs, (server, haproxy, store): (Arc<Server>, Arc<Haproxy>, Store), leave: bool) -> Reloader {
        let turn = Arc::default();
        Reloader {
            args: Arc::new(args.clone()),
            server,
            haproxy,
            store: store.into(),
            leave: Arc::new(leave.into()),
            turn,
        }
    }

    /// Waits for reloads that were asked for before, and lets none begin.
    pub async fn turn(&self) -> Turn {
        Turn(self.turn.clone().lock_owned().await)
    }

    /// Returns whether spliced flows continue when the program stops.
    pub fn leaves_flows(&self) -> bool {
        self.leave.load(Relaxed)
    }

    /// Reads the file and those that it names, as at the start, and puts all of it in force; or says why not, and nothing has
    /// changed. Returns what has changed.
    ///
    /// If another process has taken over meanwhile, it reloads: it may have read the file before it was changed.
    pub async fn reload(&self, enforce: bool) -> Result<Reloaded, String> {
        let turn = self.turn().await;
        if let Some(pass_on) = turn.0.clone() {
            tracing::info!("the process that serves now is to reload");
            return spawn_blocking(move || pass_on(enforce)).await.map_err(|e| e.to_string())?;
        }
        let result = self.try_reload(enforce).await;
        self.server.note_reload(&result);
        match &result {
            Ok(Reloaded { added, moved, removed, reset }) => {
                let all = [("added", added), ("moved", moved), ("removed", removed)];
                let all = all.iter().filter(|(_, names)| !names.is_empty());
                let what: String = all.map(|(what, names)| format!("; {what}: {}", names.join(", "))).collect();
                let reset = if *reset > 0 {
                    format!("; reset, because forbidden now: {reset} connections")
                } else {
                    String::new()
                };
                tracing::info!("reloaded{what}{reset}");
            }
            Err(why) => tracing::error!("cannot reload: everything stays as it is: {why}"),
        }
        result
    }

    async fn try_reload(&self, enforce: bool) -> Result<Reloaded, String> {
        if self.args.config.is_none() {
            return Err("there is no file to read: the program was started without --config".into());
        }
        let args = self.args.clone();
        let haproxy = self.haproxy.clone();
        let prepare = move || {
            let config = configure(&args)?;
            let next = haproxy
                .prepare((config.haproxy.as_deref(), config.control_access))
                .map_err(|e| no_haproxy(&config, &e))?;
            Ok::<_, String>((config, next))
        };
        let (config, next) = spawn_blocking(prepare).await.map_err(|e| e.to_string())??;
        let leave = config.leave_flows_on_stop;
        let reloaded = self.server.reload(config, enforce).await.map_err(|e| e.to_string())?;
        self.haproxy.put(next);
        self.leave.store(leave, Relaxed);
        self.clone().store().await;
        Ok(reloaded)
    }

    /// Lets the service manager keep the sockets at which the server listens now.
    pub async fn store(self) {
        // a panic there changes nothing here
        let _ = spawn_blocking(move || self.store.keep(&self.server)).await;
    }

    /// Has it close them: clients are to be refused, and not to wait for nobody.
    pub async fn leave_store(self) {
        let _ = spawn_blocking(move || self.store.leave()).await;
    }

    /// Reopens the access log, and reloads if there is a file.
    pub fn hang_up(&self) {
        tracing::info!("SIGHUP: opening the access log anew");
        self.server.reopen_log();
        if self.args.config.is_some() {
            let reloader = self.clone();
            // What comes of it is logged. Other signals are not kept waiting by a disk that does not answer.
            tokio::spawn(async move { reloader.reload(false).await });
        }
    }
}
