//! Counters and attachments of the data path, for metrics and logs.

use crate::splicer::Splicer;
use longsplice_datapath::{ConntrackCounts, PathChanges, PathFlags};
use std::{io, path::Path, sync::atomic::Ordering};

/// Least number of entries that [`Splicer::has_little_room`] keeps: four connections may have come before the first is accepted.
const ENTRIES_KEPT: u64 = 8;

impl Splicer {
    /// Returns the number of packets for each verdict of the data path, by name. Empty without a data path.
    pub fn verdicts(&self) -> io::Result<Vec<(&'static str, u64)>> {
        self.datapath().map_or(Ok(Vec::new()), |d| d.verdicts())
    }

    /// Returns how many entries the table of flows has, and how many fit into it: a flow takes two. `None` without a data path, or
    /// if the kernel does not say.
    pub fn entries(&self) -> Option<(u64, u64)> {
        let d = self.datapath()?;
        Some((d.entries().ok()?, 2 * u64::from(d.max_flows())))
    }

    /// Returns the names of the devices to which the data path is attached.
    pub fn devices(&self) -> Vec<String> {
        let Some(d) = self.datapath() else { return Vec::new() };
        let attached = d.attached();
        let all = longsplice_datapath::devices().unwrap_or_default().into_iter();
        all.filter(|device| attached.contains(&device.index)).map(|device| device.name).collect()
    }

    /// Returns the number of flows that the kernel forwards, including those of an earlier process.
    pub fn forwarded(&self) -> usize {
        let is_forwarded = |flags: u16| flags & PathFlags::SPLICED != 0 && flags & PathFlags::DEAD == 0;
        let paths = self.datapath().map(|d| d.paths()).unwrap_or_default();
        paths.iter().filter(|(_, p)| is_forwarded(p.flags)).count() / 2 // two entries each
    }

    /// Returns the directory in which programs and tables are pinned.
    pub fn pin(&self) -> Option<&Path> {
        self.datapath().map(|d| d.pin())
    }

    /// Returns counters of what network changes did to forwarded flows.
    pub fn path_changes(&self) -> PathChanges {
        self.datapath().map(|d| d.path_changes()).unwrap_or_default()
    }

    /// Returns the number of intercepted connections that were reset because the data path had no room for their records, without
    /// which no segment finds their sockets.
    pub fn unheard(&self) -> u64 {
        self.engine().unheard.load(Ordering::Relaxed)
    }

    /// Returns whether the data path has room for few more flows, less than an eighth: intercepted connections need it. `before`:
    /// what was returned last. If it was true, it takes a quarter for it to be false again.
    pub fn has_little_room(&self, before: bool) -> bool {
        let kept = |all: u64| (all / 8).max(ENTRIES_KEPT) * if before { 2 } else { 1 };
        self.entries().is_some_and(|(entries, all)| entries + kept(all) > all)
    }

    /// Returns counters of conntrack entries that were kept alive.
    pub fn conntrack_counts(&self) -> ConntrackCounts {
        self.datapath().map(|d| d.conntrack_counts()).unwrap_or_default()
    }
}
