//! An upstream of nginx: servers, and how they are chosen.

use super::{blocks::Block, unknown};
use crate::import::{
    model::{Keys, Mistake, Notes, Pool, SERVERS_MAX, Server},
    values::{quote, seconds},
};
use longsplice_proxy::target::Target;
use std::collections::BTreeSet;

/// What `max_fails = 0` means: servers are never taken out.
const NEVER: &str = "1000000";

/// What was read of an upstream.
pub struct Read {
    pub pool: Option<Pool>,
    /// The only server of an upstream that has nothing else: nginx never takes it out.
    pub single: Option<String>,
    pub notes: Notes,
    pub leads: bool,
}

/// Reads an upstream.
pub fn pool(name: &str, block: &Block) -> Result<Read, Mistake> {
    let mut pool = Pool { name: name.to_owned(), ..Pool::default() };
    let mut fails = BTreeSet::new();
    let mut is_plain = true;
    for inner in block.inner.iter().flatten() {
        let number = inner.line.number;
        match inner.name() {
            "server" => is_plain &= upstream_server(inner, &mut pool, &mut fails)?,
            "least_conn" => drop(pool.keys.insert("balance", quote("least-connections"))),
            "hash" => {
                let key = inner.word(1).ok_or_else(|| Mistake::new(number, "hash what? Write a key"))?;
                if ["$remote_addr", "$binary_remote_addr"].contains(&key) {
                    pool.keys.insert("balance", quote("consistent-hash"));
                    if inner.word(2) != Some("consistent") {
                        pool.notes.changed(
                            &inner.line,
                            "the hash is a consistent one, so clients get other servers than nginx gives them",
                        );
                    }
                } else {
                    pool.notes.left_out(&inner.line, "only the client's address is hashed; servers are chosen in turn");
                }
            }
            "random" => pool.notes.left_out(&inner.line, "servers are chosen in turn"),
            "zone" => {}
            "least_time" => pool
                .notes
                .left_out(&inner.line, "servers are chosen in turn (balance = \"least-connections\" is the nearest)"),
            _ => pool.notes.left_out(&inner.line, unknown(inner.name())),
        }
    }
    if pool.servers.len() > SERVERS_MAX {
        return Err(Mistake::new(
            block.line.number,
            format!("a pool has at most {SERVERS_MAX} servers: split the upstream"),
        ));
    }
    if let Some((number, what)) = pool.servers.iter().enumerate().find_map(|(i, server)| {
        let twice = pool.servers[..i].iter().any(|other| other.address == server.address);
        twice.then(|| (block.line.number, format!("{} is in upstream {name} twice: give it a weight", server.address)))
    }) {
        return Err(Mistake::new(number, what));
    }
    if pool.servers.iter().all(|server| server.keys.contains_key("backup")) {
        for server in &mut pool.servers {
            server.keys.remove("backup");
        }
    }
    if fails.len() > 1 {
        pool.notes
            .changed(&block.line, "a pool has one max_fails and fail_timeout for all servers: the first are taken");
    }
    let (_, failures, out) = fails.pop_first().unwrap_or((0, "1".into(), "10".into()));
    pool.keys.extend([("failures", failures), ("out", out), ("tries", pool.servers.len().clamp(1, 16).to_string())]);
    let single = match &pool.servers[..] {
        [one] if is_plain => Some(one.address.clone()),
        _ => None,
    };
    let notes = pool.notes.clone();
    let pool = Some(pool).filter(|pool| !pool.servers.is_empty());
    Ok(Read { leads: pool.is_some(), pool, single, notes })
}

/// Reads a server of an upstream. Returns whether it has nothing that only pools know.
fn upstream_server(
    inner: &Block,
    pool: &mut Pool,
    fails: &mut BTreeSet<(usize, String, String)>,
) -> Result<bool, Mistake> {
    let number = inner.line.number;
    let address = inner.word(1).ok_or_else(|| Mistake::new(number, "a server needs an address"))?;
    let Ok(target) = address.parse::<Target>() else {
        if address.starts_with("unix:") {
            pool.notes.left_out(&inner.line, "servers have a host and a port, no path");
            return Ok(true);
        }
        return Err(Mistake::new(number, format!("{address}: write HOST:PORT")));
    };
    let (mut keys, mut failures, mut out) = (Keys::new(), "1".to_owned(), "10".to_owned());
    let mut is_plain = true;
    for option in &inner.words[2..] {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        let bad = || Mistake::new(number, format!("{option}: write a number"));
        match name {
            "weight" => {
                let weight: u32 = value.parse().map_err(|_| bad())?;
                if weight > 256 || weight == 0 {
                    pool.notes.changed(&inner.line, "weights are from 1 to 256");
                }
                if weight != 1 {
                    keys.insert("weight", weight.clamp(1, 256).to_string());
                }
            }
            "max_conns" => {
                let most: u32 = value.parse().map_err(|_| bad())?;
                if most > 0 {
                    is_plain = false;
                    keys.insert("max_connections", most.to_string());
                    pool.notes.changed(
                        &inner.line,
                        "connections beyond max_conns wait for queue_wait before they are refused \
                            (queue = 0: at once)",
                    );
                }
            }
            "max_fails" => {
                let most: u32 = value.parse().map_err(|_| bad())?;
                failures = if most == 0 { NEVER.to_owned() } else { most.min(1_000_000).to_string() };
            }
            "fail_timeout" => out = duration(value, number)?,
            "backup" => drop(keys.insert("backup", "true".to_owned())),
            "down" => {
                pool.notes
                    .left_out(&inner.line, "it is down (longsplice drain takes servers out while the program runs)");
                return Ok(true);
            }
            "resolve" => pool.notes.changed(&inner.line, "names are looked up every ten seconds"),
            "slow_start" => drop(pool.keys.insert("slow_start", duration(value, number)?)),
            _ => return Err(Mistake::new(number, format!("a server has no {name}"))),
        }
    }
    pool.servers.push(Server { address: target.to_string(), keys });
    // sorted by the line, so that the first is taken
    if !fails.iter().any(|(_, f, o)| (f, o) == (&failures, &out)) {
        fails.insert((number, failures, out));
    }
    Ok(is_plain)
}

/// A time of nginx in seconds: `90`, `1m`, `1h30m`.
pub fn duration(text: &str, line: usize) -> Result<String, Mistake> {
    let wrong = || Mistake::new(line, format!("{text:?} is no time: write one such as 30s or 10m"));
    let mut milliseconds = 0_u64;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let number: u64 = rest[..digits].parse().map_err(|_| wrong())?;
        let units = [
            ("ms", 1),
            ("s", 1000),
            ("m", 60_000),
            ("h", 3_600_000),
            ("d", 86_400_000),
            ("w", 604_800_000),
            ("M", 2_592_000_000),
            ("y", 31_536_000_000),
        ];
        let after = &rest[digits..];
        let (unit, factor) = match after.is_empty() {
            true => ("", 1000),
            false => *units.iter().find(|(unit, _)| after.starts_with(unit)).ok_or_else(wrong)?,
        };
        milliseconds = number.checked_mul(factor).and_then(|n| n.checked_add(milliseconds)).ok_or_else(wrong)?;
        rest = after[unit.len()..].trim_start();
    }
    seconds(milliseconds).ok_or_else(wrong)
}
