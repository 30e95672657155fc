//! What operators see of pools, and tell their servers. It lasts until the program ends, over reloads and
//! upgrades as well.

use super::{Member, Pool, Pools, ServerHealth, State, lock};
use crate::{
    events::Kind,
    handed::{Duty, KnownServer, Moment},
};
use serde::Serialize;
use std::{sync::atomic::Ordering::Relaxed, time::Instant};

/// What an operator may tell a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tell {
    /// To take nothing new. What it has goes on.
    Drain,
    /// The same, and that it is not checked meanwhile: whoever works on it may stop it.
    Maintain,
    /// To take its share again.
    Undrain,
    /// To have this weight; none: the one of the configuration. With 0 it takes nothing new.
    Weigh(Option<u16>),
}

impl Duty {
    fn of(told: u8) -> Duty {
        match told {
            1 => Duty::Drain,
            2 => Duty::Maintain,
            _ => Duty::Serve,
        }
    }
}

/// A pool, as operators see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PoolValues {
    /// Its name.
    pub name: String,
    /// Number of connections and requests that wait for a server.
    pub waiting: u32,
    /// Its servers.
    pub members: Vec<MemberValues>,
}

/// A server of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemberValues {
    /// Its address in the configuration.
    pub address: String,
    /// `up`; `out`: after failures, for a time; `down`: checks say so; `drained`, `maintenance`: an operator does. With the
    /// weight 0 it is drained as well.
    pub state: &'static str,
    /// It stands in for others.
    pub backup: bool,
    /// Its weight now, without its slow start.
    pub weight: u32,
    /// Its weight in the configuration.
    pub configured_weight: u32,
    /// Connections and requests that it has.
    pub connections: u32,
    /// Maximum number of these.
    pub max_connections: Option<u32>,
    /// Number of times that it was chosen.
    pub chosen: u64,
    /// Number of times that it has failed.
    pub failed: u64,
}

impl Pool {
    fn values(&self) -> PoolValues {
        let (now, name) = (Instant::now(), self.config.name.clone());
        PoolValues {
            name,
            waiting: self.queue.waiting(),
            members: self.members.iter().map(|member| member.values(now)).collect(),
        }
    }
}

impl Member {
    fn values(&self, now: Instant) -> MemberValues {
        let state = match self.health(now) {
            _ if self.duty() == Duty::Maintain => "maintenance",
            _ if !self.takes_new() => "drained",
            ServerHealth::Up => "up",
            ServerHealth::Out => "out",
            ServerHealth::Down => "down",
        };
        MemberValues {
            address: self.name.to_string(),
            state,
            backup: self.backup,
            weight: self.weight_told(),
            configured_weight: self.weight,
            connections: self.state.active.load(Relaxed),
            max_connections: Some(self.most).filter(|most| *most < u32::MAX),
            chosen: self.state.chosen.load(Relaxed),
            failed: self.state.failed.load(Relaxed),
        }
    }

    fn duty(&self) -> Duty {
        Duty::of(self.state.duty.load(Relaxed))
    }

    /// Whether an operator lets it have new connections and requests.
    pub(super) fn takes_new(&self) -> bool {
        self.duty() == Duty::Serve && self.weight_told() > 0
    }

    /// Whether somebody works on it, and failed checks would tell nothing.
    pub(super) fn is_maintained(&self) -> bool {
        self.duty() == Duty::Maintain
    }

    /// Returns the weight that it was told, unless the one of the configuration has changed since; otherwise that.
    pub(super) fn weight_told(&self) -> u32 {
        let told = self.state.told.load(Relaxed);
        if told >> 16 == self.weight { told & 0xffff } else { self.weight }
    }

    fn tell(&self, what: Tell) {
        let told = match what {
            Tell::Drain | Tell::Maintain | Tell::Undrain => {
                let (duty, kind, why, told) = match what {
                    Tell::Drain => (Duty::Drain, Kind::MemberDrained, "it was told so", "takes nothing new"),
                    Tell::Maintain => {
                        (Duty::Maintain, Kind::MemberDrained, "maintenance", "takes nothing new, and is not checked")
                    }
                    _ => (Duty::Serve, Kind::MemberUndrained, "it was told so", "takes its share again"),
                };
                self.state.duty.store(duty as u8, Relaxed);
                self.queue.freed();
                self.events.member(kind, (&self.pool, &self.name), &why);
                told.to_owned()
            }
            Tell::Weigh(weight) => {
                // that of the configuration is at least 1, so that 0 in all bits is told by nobody
                let told = weight.map_or(0, |weight| self.weight << 16 | u32::from(weight));
                self.state.told.store(told, Relaxed);
                self.queue.freed();
                format!("has weight {}", self.weight_told())
            }
        };
        tracing::info!("pool {}: {} {told}, as it was told", self.pool, self.name);
    }
}

impl Member {
    fn known(&self, now: Instant) -> KnownServer {
        let State { back, health, chosen, failed, told, .. } = &*self.state;
        let weight = Some(told.load(Relaxed)).filter(|told| *told > 0).map(|told| [told & 0xffff, told >> 16]);
        KnownServer {
            pool: self.pool.to_string(),
            name: self.name.to_string(),
            duty: self.duty(),
            weight,
            health: lock(health).known(now),
            back: lock(back).map(Moment::from),
            chosen: chosen.load(Relaxed),
            failed: failed.load(Relaxed),
        }
    }

    fn know(&self, known: &KnownServer, now: Instant) {
        let State { back, health, chosen, failed, duty, told, .. } = &*self.state;
        duty.store(known.duty as u8, Relaxed);
        let weight = known.weight.filter(|both| both.iter().all(|weight| *weight <= u32::from(u16::MAX)));
        told.store(weight.map_or(0, |[weight, configured]| configured << 16 | weight), Relaxed);
        lock(health).go_on(known.health, &self.limits, now);
        *lock(back) = known.back.map(Instant::from);
        chosen.store(known.chosen, Relaxed);
        failed.store(known.failed, Relaxed);
    }
}

/// Returns what is known of all servers, for another process.
pub(crate) fn known(pools: &Pools) -> Vec<KnownServer> {
    let now = Instant::now();
    pools.values().flat_map(|pool| &pool.members).map(|member| member.known(now)).collect()
}

/// Goes on with what another process has known of those that it had as well, before any of them is used.
pub(crate) fn know(pools: &Pools, all: &[KnownServer]) {
    let now = Instant::now();
    for known in all {
        let members = pools.get(&known.pool).into_iter().flat_map(|pool| &pool.members);
        members.filter(|member| *member.name == *known.name).for_each(|member| member.know(known, now));
    }
}

/// Returns all pools, by name.
pub(crate) fn values(pools: &Pools) -> Vec<PoolValues> {
    let mut all: Vec<PoolValues> = pools.values().map(|pool| pool.values()).collect();
    all.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    all
}

/// Tells a server something. `member`: `POOL/HOST:PORT`, or `HOST:PORT` for that of all pools. Returns how many were told, if
/// any.
pub(crate) fn tell(pools: &Pools, member: &str, what: Tell) -> Option<usize> {
    let (pool, address) = member.rsplit_once('/').map_or((None, member), |(pool, address)| (Some(pool), address));
    let pools = pools.values().filter(|of| pool.is_none_or(|pool| of.config.name == pool));
    let members: Vec<_> = pools.flat_map(|pool| &pool.members).filter(|member| *member.name == *address).collect();
    members.iter().for_each(|member| member.tell(what));
    Some(members.len()).filter(|n| *n > 0)
}
