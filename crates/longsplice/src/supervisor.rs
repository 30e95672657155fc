//! The process that has started this one, such as systemd: listening sockets that it keeps for us (sd_listen_fds(3)), and what it is
//! told (sd_notify(3)). Without one, nothing here does anything.

use listenfd::ListenFd;
use longsplice_proxy::inherited::Inherited;
use sd_notify::NotifyState;
use std::{io, time::Duration};
use tokio::{
    task::spawn_blocking,
    time::{MissedTickBehavior, interval, timeout},
};

/// Longest time that the other process is waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// Takes the sockets that were handed to this process. Call it before there are other threads: it changes the environment.
pub fn inherited() -> io::Result<Inherited> {
    let mut all = ListenFd::from_env();
    let mut sockets = Vec::new();
    for n in 0..all.len() {
        match all.take_tcp_listener(n) {
            Ok(socket) => sockets.extend(socket),
            Err(error) => tracing::warn!("cannot use descriptor {} of LISTEN_FDS: it is left alone: {error}", 3 + n),
        }
    }
    Inherited::new(sockets)
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
