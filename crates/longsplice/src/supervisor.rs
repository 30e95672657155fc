//! The process that has started this one, such as systemd: listening sockets that it keeps for us (sd_listen_fds(3)), and what it is
//! told (sd_notify(3)). Without one, nothing here does anything.
//!
//! It keeps sockets of two kinds: those that it has opened itself (longsplice.socket), and those that this program has opened and
//! stored with it ([`Store`]), which the next process gets if this one dies.

use listenfd::ListenFd;
use longsplice_engine::BoundSocket;
use longsplice_proxy::{Config, Server, inherited::Inherited};
use rustix::{
    cmsg_space,
    net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
        sendmsg_addr, socket_with,
        sockopt::{Timeout, set_socket_timeout},
    },
};
use sd_notify::NotifyState;
use std::{
    collections::{BTreeMap, BTreeSet},
    env, io,
    io::IoSlice,
    mem::MaybeUninit,
    net::{SocketAddr, TcpListener},
    os::{fd::AsFd, unix::ffi::OsStrExt},
    sync::{Mutex, MutexGuard, PoisonError},
    thread::sleep,
    time::{Duration, Instant},
};
use tokio::{
    task::spawn_blocking,
    time::{MissedTickBehavior, interval, timeout},
};

/// Longest time that the other process is waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// How the names of stored sockets begin. Their addresses follow.
const STORED: &str = "longsplice-";

/// Takes the sockets that were handed to this process. Call it before there are other threads: it changes the environment.
pub fn inherited() -> io::Result<(Inherited, Store)> {
    let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
    let names: Vec<&str> = names.split(':').collect();
    let mut all = ListenFd::from_env();
    let (mut theirs, mut stored) = (Vec::new(), Vec::new());
    for n in 0..all.len() {
        match all.take_tcp_listener(n) {
            // a unit may have any name
            Ok(Some(socket)) if names.get(n).copied() == name_of(&socket).as_deref() => stored.push(socket),
            Ok(socket) => theirs.extend(socket),
            Err(error) => tracing::warn!("cannot use descriptor {} of LISTEN_FDS: it is left alone: {error}", 3 + n),
        }
    }
    let store = Store(Mutex::new(Stored { names: stored.iter().filter_map(name_of).collect(), is_known: true }));
    Ok((Inherited::new(theirs)?.with_stored(stored)?, store))
}

/// The listening sockets of this program that the service manager keeps for the next process.
#[derive(Debug)]
pub struct Store(Mutex<Stored>);

#[derive(Debug)]
struct Stored {
    names: BTreeSet<String>,
    /// They are known to be stored. The process that has handed over may have stored none.
    is_known: bool,
}

impl Store {
    /// Starts with what the process has that hands over.
    pub fn of_earlier<'a>(sockets: impl IntoIterator<Item = &'a TcpListener>) -> Store {
        Store(Mutex::new(Stored { names: sockets.into_iter().filter_map(name_of).collect(), is_known: false }))
    }

    /// Removes those that no listener of a configuration has, before anything is bound: they could keep other addresses from being
    /// bound. Waits for a while until the service manager has closed them.
    pub fn leave_unneeded(&self, inherited: &Inherited, config: &Config) {
        let unneeded = inherited.close_unneeded_of(config);
        let names: Vec<String> = unneeded.iter().map(|at| name_at(*at)).collect();
        self.tell(names.iter().map(|name| (name.clone(), None)));
        let until = Instant::now() + PATIENCE;
        let is_free = |at: &SocketAddr| BoundSocket::bind(*at).is_ok();
        while Instant::now() < until && !unneeded.iter().all(is_free) {
            sleep(PATIENCE / 100);
        }
    }

    /// Stores the sockets at which the server listens, and removes others.
    pub fn keep(&self, server: &Server) {
        match server.own_sockets() {
            Ok(sockets) => self.replace(sockets),
            Err(error) => tracing::warn!("cannot store listening sockets: clients are refused after a crash: {error}"),
        }
    }

    /// Removes all: nobody accepts there any more.
    pub fn leave(&self) {
        self.replace(Vec::new());
    }

    fn replace(&self, sockets: Vec<TcpListener>) {
        let now: BTreeMap<_, _> = sockets.into_iter().filter_map(|socket| Some((name_of(&socket)?, socket))).collect();
        let (gone, new): (Vec<String>, Vec<_>) = {
            let stored = self.lock();
            let gone = stored.names.iter().filter(|name| !now.contains_key(*name)).cloned().collect();
            let is_new = |name: &String| !stored.is_known || !stored.names.contains(name);
            (gone, now.into_iter().filter(|(name, _)| is_new(name)).collect())
        };
        let gone = gone.into_iter().map(|name| (name, None));
        self.tell(gone.chain(new.into_iter().map(|(name, socket)| (name, Some(socket)))));
        self.lock().is_known = true;
    }

    /// Has sockets stored, or removed. What fails is tried again at the next reload. Blocks for a second at most.
    fn tell(&self, changes: impl Iterator<Item = (String, Option<TcpListener>)>) {
        let Some(manager) = env::var_os("NOTIFY_SOCKET") else { return };
        for (name, socket) in changes {
            let what = if socket.is_some() { "FDSTORE" } else { "FDSTOREREMOVE" };
            if let Err(error) = send(manager.as_bytes(), &format!("{what}=1\nFDNAME={name}\n"), socket.as_ref()) {
                return tracing::warn!(
                    "cannot tell the service manager of listening sockets: clients may be refused after a crash: {error}"
                );
            }
            let names = &mut self.lock().names;
            let _ = if socket.is_some() { names.insert(name) } else { names.remove(&name) };
        }
    }

    fn lock(&self) -> MutexGuard<'_, Stored> {
        // a panic cannot leave it half changed
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the name of a socket. The service manager takes no colon.
fn name_of(socket: &TcpListener) -> Option<String> {
    socket.local_addr().ok().map(name_at)
}

fn name_at(at: SocketAddr) -> String {
    format!("{STORED}{at}").replace(':', "_")
}

/// Sends a message to the service manager, with a descriptor or without (sd_notify(3)).
fn send(manager: &[u8], text: &str, with: Option<&TcpListener>) -> io::Result<()> {
    let to = match manager {
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
        path => SocketAddrUnix::new(path)?,
    };
    let from = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&from, Timeout::Send, Some(PATIENCE))?;
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    let sockets: Vec<_> = with.iter().map(|socket| socket.as_fd()).collect();
    if !sockets.is_empty() && !rights.push(SendAncillaryMessage::ScmRights(&sockets)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "no room for a descriptor"));
    }
    sendmsg_addr(&from, &to, &[IoSlice::new(text.as_bytes())], &mut rights, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Says that clients are served.
pub async fn ready() {
    tell(NotifyState::Ready).await;
}

/// Says that another process is the one to watch.
pub async fn replaced_by(process: u32) {
    tell(NotifyState::MainPid(process)).await;
}

/// Says that the program ends.
pub async fn stopping() {
    tell(NotifyState::Stopping).await;
}

/// Says that the program lives, twice in the time after which it would be taken for dead (WatchdogSec= of a service).
pub async fn live() {
    let Some(limit) = sd_notify::watchdog_enabled().filter(|limit| !limit.is_zero()) else { return };
    let mut ticks = interval(limit / 2);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        tell(NotifyState::Watchdog).await;
    }
}

/// Waits for the other process for a while only: if it does not read, sending blocks.
async fn tell(state: NotifyState<'static>) {
    let said = format!("{state:?}");
    let sent = match timeout(PATIENCE, spawn_blocking(move || sd_notify::notify(&[state]))).await {
        Ok(sent) => sent.unwrap_or_else(|panic| Err(io::Error::other(panic))),
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    };
    if let Err(error) = sent {
        tracing::warn!("cannot tell the service manager {said}: it may wait for it, or end the program: {error}");
    }
}
