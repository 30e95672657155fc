//! Checks of a configuration file on this machine: what would end the start of `longsplice run --config`, or keep it from splicing.

use super::{Check, CheckResult, facts, routed};
use longsplice_datapath::has_raw_sockets;
use longsplice_engine::SpliceWhen;
use longsplice_proxy::{Config, ListenerConfig};
use std::{fs, net::UdpSocket, path::Path};

/// Checks a file. Nothing is changed, and no port is opened.
pub fn all(file: &Path) -> Vec<Check> {
    const NAME: &str = "configuration";
    let config = match Config::from_file(file) {
        Ok(config) => config,
        Err(e) => return vec![Check::missing(NAME, e.to_string(), "see docs/configuration.md")],
    };
    let listeners = config.listeners.len();
    let mut checks = vec![Check::ok(NAME, format!("{}: {listeners} listeners", file.display()))];
    checks.extend([devices(&config), facts::source_ports_of(&config.engine.source_ports)]);
    checks.extend(sources(&config));
    checks.extend(raw_sockets(&config));
    checks.extend(routed::all(&config));
    checks.push(memory(&config));
    checks
}

fn devices(config: &Config) -> Check {
    const NAME: &str = "devices";
    match config.engine.datapath.check_devices() {
        Ok(names) if names.is_empty() => {
            Check::missing(NAME, "no Ethernet device to splice on", "ip link set DEVICE up")
        }
        Ok(names) => Check::ok(NAME, format!("would splice on {}", names.join(", "))),
        Err(e) => Check::missing(NAME, e.to_string(), "name others in devices, xdp or peer"),
    }
}

fn sources(config: &Config) -> Vec<Check> {
    const NAME: &str = "source";
    let check = |source| match UdpSocket::bind((source, 0)) {
        Ok(_) => Check::ok(NAME, format!("{source}: an address of this host")),
        Err(e) => Check::missing(NAME, format!("{source}: {e}"), "name addresses of this host"),
    };
    config.engine.sources.iter().map(|source| check(*source)).collect()
}

/// Listeners that need CAP_NET_RAW beside what splicing needs.
fn raw_sockets(config: &Config) -> Option<Check> {
    const NAME: &str = "raw sockets";
    let needs = |l: &&ListenerConfig| {
        l.is_between_hosts()
            || l.intercepts.is_some()
            || l.shows_clients
            || l.policy.hold && l.policy.when != SpliceWhen::Never
    };
    let first = config.listeners.iter().find(needs)?;
    let who = format!("the listener {} needs them", first.listen);
    Some(match has_raw_sockets() {
        true => Check::ok(NAME, format!("permitted: {who}")),
        false => Check::missing(NAME, format!("not permitted, and {who}"), "run as root, or with CAP_NET_RAW as well"),
    })
}

/// Tables are allocated at the start. A cgroup that is too small makes that fail, or kills the process.
fn memory(config: &Config) -> Check {
    const NAME: &str = "memory";
    const MB: u64 = 1_000_000;
    let (flows, need) = (config.engine.datapath.max_flows, config.engine.datapath.table_bytes());
    let found = format!("tables of {flows} flows (--max-flows) take about {} MB", need / MB);
    match memory_limit() {
        None => Check::new(NAME, CheckResult::Note, format!("{found}; the limit of this process is not known")),
        Some(limit) if limit / 2 < need && limit != u64::MAX => {
            let found = format!("{found}, of {} MB that its cgroup may use", limit / MB);
            Check::warning(NAME, found, "a smaller --max-flows, or a larger limit")
        }
        Some(_) => Check::ok(NAME, found),
    }
}

/// The least memory limit of the cgroups that contain this process, in bytes; the largest number: there is none. `None`: it
/// cannot be read. With a namespace of cgroups, only those inside of it are seen.
pub fn memory_limit() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    let all = Path::new(path.trim_start_matches('/')).ancestors();
    let limit = |at: &Path| fs::read_to_string(Path::new("/sys/fs/cgroup").join(at).join("memory.max")).ok();
    let limits = all.filter_map(limit).map(|text| text.trim().parse().unwrap_or(u64::MAX)); // "max": none
    Path::new("/sys/fs/cgroup/cgroup.controllers").exists().then(|| limits.min().unwrap_or(u64::MAX))
}
