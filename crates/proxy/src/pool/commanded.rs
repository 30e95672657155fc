//! What operators see of pools, and tell their servers. It lasts until the program ends, over reloads as well.

use super::{Member, Pool, Pools, ServerHealth};
use crate::events::Kind;
use serde::Serialize;
use std::{sync::atomic::Ordering::Relaxed, time::Instant};

/// What an operator may tell a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tell {
    /// To take nothing new. What it has goes on.
    Drain,
    /// To take its share again.
    Undrain,
    /// To have this weight; none: the one of the configuration.
    Weigh(Option<u16>),
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
    /// `up`; `out`: after failures, for a time; `down`: checks say so; `drained`: an operator does.
    pub state: &'static str,
    /// It stands in for others.
    pub backup: bool,
    /// Its weight now, without its slow start.
    pub weight: u32,
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
            _ if self.is_drained() => "drained",
            ServerHealth::Up => "up",
            ServerHealth::Out => "out",
            ServerHealth::Down => "down",
        };
        MemberValues {
            address: self.name.to_string(),
            state,
            backup: self.backup,
            weight: self.weight_told(),
            connections: self.state.active.load(Relaxed),
            max_connections: Some(self.most).filter(|most| *most < u32::MAX),
            chosen: self.state.chosen.load(Relaxed),
            failed: self.state.failed.load(Relaxed),
        }
    }

    pub(super) fn is_drained(&self) -> bool {
        self.state.drained.load(Relaxed)
    }

    /// Returns the weight that it was told, unless the one of the configuration has changed since; otherwise that.
    pub(super) fn weight_told(&self) -> u32 {
        let told = self.state.told.load(Relaxed);
        if told >> 16 == self.weight { told & 0xffff } else { self.weight }
    }

    fn tell(&self, what: Tell) {
        let told = match what {
            Tell::Drain | Tell::Undrain => {
                self.state.drained.store(what == Tell::Drain, Relaxed);
                self.queue.freed();
                let (kind, told) = match what {
                    Tell::Drain => (Kind::MemberDrained, "takes nothing new"),
                    _ => (Kind::MemberUndrained, "takes its share again"),
                };
                self.events.member(kind, (&self.pool, &self.name), &"it was told so");
                told.to_owned()
            }
            Tell::Weigh(weight) => {
                let told = weight.map_or(0, |weight| self.weight << 16 | u32::from(weight));
                self.state.told.store(told, Relaxed);
                format!("has weight {}", self.weight_told())
            }
        };
        tracing::info!("pool {}: {} {told}, as it was told", self.pool, self.name);
    }
}

/// Returns all pools, by name.
pub(crate) fn values(pools: &Pools) -> Vec<PoolValues> {
    let mut all: Vec<PoolValues> = pools.values().map(|pool| pool.values()).collect();
    all.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    all
}

/// Tells a server something. `member`: `POOL/HOST:PORT`, or `HOST:PORT` for that of all pools. Returns how many were told, if any.
pub(crate) fn tell(pools: &Pools, member: &str, what: Tell) -> Option<usize> {
    let (pool, address) = member.rsplit_once('/').map_or((None, member), |(pool, address)| (Some(pool), address));
    let pools = pools.values().filter(|of| pool.is_none_or(|pool| of.config.name == pool));
    let members: Vec<_> = pools.flat_map(|pool| &pool.members).filter(|member| *member.name == *address).collect();
    members.iter().for_each(|member| member.tell(what));
    Some(members.len()).filter(|n| *n > 0)
}
