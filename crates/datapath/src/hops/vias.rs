//! Next hops, which flows share: a flow refers to one of [`VIAS`] slots (`struct
//! via` of bpf/flow.h), so one write changes the next hop of all its flows.

use crate::{
    PathView, SwitchError, Tuple,
    abi::{self, via_flag},
    hops::routes::Routes,
    names::MAX_VIAS,
    network::devices::{LinkFacts, Links},
    switching::switch::{Hop, headers},
    tables::maps::Maps,
};
use nix::libc;
use std::{
    collections::{HashMap, HashSet},
    io,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

/// Number of slots.
pub(crate) const VIAS: u16 = MAX_VIAS as u16;

/// A slot in use.
#[derive(Debug)]
pub(crate) struct Via {
    pub raw: abi::via,
    /// When a flow last got it.
    pub given: Instant,
    /// Whether it was in use when the entries were last walked.
    pub used: bool,
}

/// The properties by which flows share a slot, apart from the device's abilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ViaKey {
    pub hop: Hop,
    /// Our address.
    pub local: [u32; 4],
    /// Size in bytes of the largest IP packet that hosts and paths behind it accept.
    pub most: u32,
}

impl ViaKey {
    fn via(&self, link: LinkFacts) -> abi::via {
        let Hop { ifindex, dmac, smac, mark } = self.hop;
        let flags = via_flag(0);
        link.entry(&abi::via { ifindex, mtu: 0, dmac, smac, local: self.local, flags, most: self.most, mark })
    }
}

impl Via {
    fn new(key: &ViaKey, link: LinkFacts) -> Via {
        Via { raw: key.via(link), given: Instant::now(), used: true }
    }

    pub fn key(&self) -> ViaKey {
        ViaKey { hop: self.hop(), local: self.raw.local, most: self.raw.most }
    }

    pub fn hop(&self) -> Hop {
        Hop { ifindex: self.raw.ifindex, dmac: self.raw.dmac, smac: self.raw.smac, mark: self.raw.mark }
    }

    /// Returns whether it agrees with the present state of its device.
    pub fn is_as(&self, link: LinkFacts) -> bool {
        let now = link.entry(&self.raw);
        (now.mtu, now.flags) == (self.raw.mtu, self.raw.flags)
    }

    /// Returns a copy for another hop.
    pub fn with(&self, hop: &Hop, link: LinkFacts) -> Via {
        let key = ViaKey { hop: *hop, ..self.key() };
        Via { given: self.given, used: self.used, ..Via::new(&key, link) }
    }
}

/// Takes over the next hop of an earlier process.
impl From<abi::via> for Via {
    fn from(raw: abi::via) -> Via {
        Via { raw, given: Instant::now(), used: true }
    }
}

/// Next hops used by flows in a switch, and by flows after one. Their sockets may
/// be silent, so nobody but us uses these neighbours, and they have no slots.
#[derive(Debug, Default)]
pub(crate) struct SwitchHops(HashMap<Hop, Instant>);

impl SwitchHops {
    /// Adds next hops, no more than there are slots.
    pub fn add<'a>(&mut self, hops: impl IntoIterator<Item = &'a Hop>) {
        for hop in hops {
            if self.0.len() < usize::from(VIAS) || self.0.contains_key(hop) {
                self.0.insert(*hop, Instant::now());
            }
        }
    }

    /// Forgets next hops that were not added since `before`.
    pub fn forget(&mut self, before: Instant) {
        self.0.retain(|_, added| *added >= before);
    }

    pub fn hops(&self) -> impl Iterator<Item = &Hop> {
        self.0.keys()
    }
}

/// Rounds a payload size down, so that hosts with unusual sizes do not use up all slots: exact for what tunnels leave of
/// 1500 bytes, otherwise a little smaller. The same in both families, because a host announces what it was told before.
fn rounded(mss: u32) -> u32 {
    match mss {
        0..1220 => mss - mss % 16,
        1220..=1460 => mss - mss % 2,
        _ => (mss - mss % 128).max(1460),
    }
}

/// Counters of changes that made flows follow the network, since the data path was opened.
#[derive(Debug, Default)]
pub(crate) struct ChangeCounters {
    pub hops: AtomicU64,
    pub flows: AtomicU64,
    pub stranded: AtomicU64,
}

/// The next hops in use, and what they follow from: devices, neighbours and routes.
#[derive(Debug)]
pub(crate) struct NextHops {
    vias: Mutex<Vec<Via>>,
    switch_hops: Mutex<SwitchHops>,
    links: Mutex<Links>,
    routes: Mutex<Routes>,
    pub changes: ChangeCounters,
}

impl NextHops {
    /// Takes over the next hops of an earlier process.
    pub fn new(maps: &Maps, links: Links) -> io::Result<NextHops> {
        let vias = (0..VIAS).map_while(|i| maps.via(i).filter(|v| v.ifindex != 0)).map(Via::from).collect();
        Ok(NextHops {
            vias: Mutex::new(vias),
            switch_hops: Mutex::default(),
            links: Mutex::new(links),
            routes: Mutex::new(Routes::new()?),
            changes: ChangeCounters::default(),
        })
    }

    pub fn vias(&self) -> MutexGuard<'_, Vec<Via>> {
        self.vias.lock().expect("no panic under this lock")
    }

    pub fn switch_hops(&self) -> MutexGuard<'_, SwitchHops> {
        self.switch_hops.lock().expect("no panic under this lock")
    }

    pub fn links(&self) -> MutexGuard<'_, Links> {
        self.links.lock().expect("no panic under this lock")
    }

    pub fn routes(&self) -> MutexGuard<'_, Routes> {
        self.routes.lock().expect("no panic under this lock")
    }

    /// Returns the slot of the next hop to a leg's host, as its socket has used it. `most`: as in [`ViaKey`].
    pub fn slot_for(&self, maps: &Maps, leg: &Tuple, hop: &Hop, most: u32) -> Result<u16, SwitchError> {
        let used = headers(leg);
        let most = rounded(most.saturating_sub(used)) + used;
        let hop = self.routes().explained(leg, hop);
        self.slot(maps, &self.key(&hop, leg.to_abi().local, most)).map_err(|e| match e.kind() {
            io::ErrorKind::StorageFull => SwitchError::Full,
            _ => SwitchError::Run(e.raw_os_error().unwrap_or(libc::EIO)),
        })
    }

    /// Returns the properties of a next hop. Hosts whose packets the device limits share a slot, whatever else they accept.
    pub fn key(&self, hop: &Hop, local: [u32; 4], most: u32) -> ViaKey {
        let device = self.links().of(hop.ifindex).mtu;
        ViaKey { hop: *hop, local, most: most.min(device) }
    }

    /// Returns the index of the slot with these properties. Fails with [`io::ErrorKind::StorageFull`] if flows use all slots.
    pub fn slot(&self, maps: &Maps, key: &ViaKey) -> io::Result<u16> {
        let link = self.links().of(key.hop.ifindex);
        let mut vias = self.vias();
        let same = |v: &Via| v.key() == *key && v.is_as(link);
        if let Some(i) = vias.iter().position(same) {
            vias[i].given = Instant::now();
            return Ok(i as u16);
        }
        let want = Via::new(key, link);
        let i = if vias.len() < usize::from(VIAS) {
            vias.push(want);
            vias.len() - 1
        } else {
            // next hops have changed: take a slot that no flow uses any more
            let mut used = HashSet::new();
            maps.each_path(|_, e| used.extend([PathView::new(&e.p).via]))?;
            let free = (0..VIAS).find(|i| !used.contains(i)).ok_or(io::ErrorKind::StorageFull)?;
            vias[usize::from(free)] = want;
            usize::from(free)
        };
        maps.set_via(i as u16, &vias[i].raw)?;
        Ok(i as u16)
    }

    /// Rewrites slot `i`, for all flows that share it.
    pub fn rewrite(&self, maps: &Maps, i: usize, v: &mut Via, new: Via) -> io::Result<()> {
        maps.set_via(i as u16, &new.raw)?;
        tracing::debug!(from = ?v.hop(), to = ?new.hop(), mtu = new.raw.mtu, flags = new.raw.flags.0, "next hop");
        *v = new;
        self.changes.hops.fetch_add(1, Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_down_to_few() {
        // Ethernet; PPPoE; IPv6 in IPv4; WireGuard; RFC 8200's least; and what all of that leaves in IPv6
        for usual in [1460, 1452, 1440, 1380, 1240, 1432, 1420, 1360, 1220] {
            assert_eq!(rounded(usual), usual);
        }
        assert!((0..=65535).all(|n| rounded(rounded(n)) == rounded(n)));
        assert!((0..=65535).all(|n| rounded(n) <= n && n - rounded(n) < 128));
        let few: HashSet<_> = (512..=9000).map(rounded).collect();
        assert!(few.len() < usize::from(VIAS) / 4, "{}", few.len());
    }
}
