//! What would end a start, as far as it is known without one: nothing is listened on, created, written or loaded.

use super::cannot_listen;
use crate::{
    config::{Config, ListenerConfig},
    log::access_log::AccessLog,
    room::can_have,
    start_error::StartError,
    tpot,
};
use std::{
    io,
    net::{SocketAddr, UdpSocket},
};

/// Checks the addresses and files of a configuration. An address may be in use: that is not looked at, so that the configuration
/// of a running program can be checked.
pub fn check(config: &Config) -> Result<(), StartError> {
    if config.listeners.is_empty() {
        return Err(StartError::NoListener);
    }
    tpot::check(config)?;
    all(config).map_err(|e| e.at(&config.places))
}

fn all(config: &Config) -> Result<(), StartError> {
    let listeners = config.listeners.iter().filter(|l| l.binds()).map(|l| l.listen);
    for addr in listeners.chain(config.admin.iter().map(|admin| admin.listen)) {
        is_of_this_machine(addr).map_err(cannot_listen(addr))?;
    }
    AccessLog::check(&config.log).map_err(|source| StartError::AccessLog { to: config.log.to.clone(), source })?;
    for dir in config.listeners.iter().flat_map(ListenerConfig::tap_dirs) {
        can_have(dir).map_err(|source| StartError::Tap { dir: dir.clone(), source })?;
    }
    for dir in config.listeners.iter().filter_map(|l| Some(&l.cache()?.dir)) {
        can_have(dir).map_err(|source| StartError::Cache { dir: dir.clone(), source })?;
    }
    Ok(())
}

/// A port of UDP that the kernel chooses tells whether there is such an address.
fn is_of_this_machine(mut addr: SocketAddr) -> io::Result<()> {
    addr.set_port(0);
    UdpSocket::bind(addr).map(drop)
}
