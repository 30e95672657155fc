//! IPv6 addresses to which packets of IPv4 legs go: their indices in the map `remotes6`.

use crate::{PathFlags, PathView, Tuple, tables::maps::Maps};
use std::{collections::HashMap, io};

/// Indices in `remotes6`, one for each flow from IPv4 to IPv6.
#[derive(Debug, Default)]
pub(crate) struct Remotes {
    taken: HashMap<Tuple, u32>,
    free: Vec<u32>,
    next: u32,
}

impl Remotes {
    /// Size of the map.
    const MOST: u32 = 65536;

    /// Collects the indices that pinned flows use.
    pub fn taken_by(maps: &Maps) -> io::Result<Remotes> {
        let crossing =
            |p: &PathView| p.flags & (PathFlags::CROSS | PathFlags::SPLICED) == PathFlags::CROSS | PathFlags::SPLICED;
        let mut taken = HashMap::new();
        // indices are assigned from 0 on: a useless walk through a million entries would delay others
        if maps.has_remotes()? {
            maps.each_path(|t, e| {
                let p = PathView::new(&e.p);
                if crossing(&p) {
                    taken.insert(t, p.remote4);
                }
            })?;
        }
        let next = taken.values().max().map_or(0, |n| n + 1);
        Ok(Remotes { taken, free: Vec::new(), next })
    }

    /// Returns the index of a leg. Assigns one if necessary. `None`: all are taken.
    pub fn take(&mut self, leg: &Tuple) -> Option<u32> {
        if let Some(i) = self.taken.get(leg) {
            return Some(*i);
        }
        let i = self.free.pop().or_else(|| (self.next < Self::MOST).then_some(self.next))?;
        self.next = self.next.max(i + 1);
        self.taken.insert(*leg, i);
        Some(i)
    }

    pub fn free(&mut self, leg: &Tuple) {
        self.free.extend(self.taken.remove(leg));
    }
}
