//! Creates the pages of the tables of path entries, which are arrays of pages (bpf/table.h). Also the sizes of pinned maps.

use crate::{Options, abi, tables::maps::io_error};
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd},
    path::Path,
    thread,
};

/// A table of path entries.
pub(crate) struct Table {
    name: &'static str,
    /// Number of slots in a page: `SLOTS4` and `SLOTS6` of bpf/place.h.
    page: u32,
    /// Number of slots for ten flows, which have two entries each. The smaller the pages, the more their fill levels differ.
    ten_flows: u32,
}

/// At most two thirds full.
pub(crate) const PATHS4: Table = Table { name: "paths4", page: 503, ten_flows: 30 };
/// At most three fifths full.
pub(crate) const PATHS6: Table = Table { name: "paths6", page: 251, ten_flows: 34 };
/// Size of a page in bytes: `struct table_page`. The kernel rejects any other.
const PAGE: u32 = 503 * 64 + 64;
/// Number of threads that install pages. Kernels before 6.8 wait at each page until no program can have
/// seen its place empty, which takes milliseconds; waiting in parallel costs no more than waiting once.
const THREADS: usize = 32;
/// Number of pages that a thread has open at a time. All of them together stay below the 1024 files that any process may have.
const AT_ONCE: usize = 16;
const _: () = assert!(THREADS * AT_ONCE < 1024);

impl Options {
    /// Returns about how many bytes of kernel memory the tables and rings of these options take.
    pub fn table_bytes(&self) -> u64 {
        // an entry of a hash has 48 bytes of its own, and its bucket 16
        const ENTRY: usize = 64 + size_of::<abi::tuple>().next_multiple_of(8);
        let flows = self.max_flows.clamp(*Options::FLOWS.start(), *Options::FLOWS.end());
        let pages = PATHS4.pages(flows) + PATHS6.pages(flows);
        let legs = 2 * u64::from(flows) * (ENTRY + size_of::<abi::leg>()) as u64;
        let embryos = u64::from(embryos(flows)) * (ENTRY + size_of::<abi::embryo>()) as u64;
        let rings = u64::from(ring(self.tap_ring)) + u64::from(ring(self.hold_ring));
        u64::from(pages) * u64::from(PAGE) + legs + embryos + rings
    }
}

/// Returns the number of half-open connections that are known, in a table for so many flows.
pub(crate) fn embryos(flows: u32) -> u32 {
    flows.clamp(1024, 65536)
}

/// Returns the size of a ring for which so many bytes were requested.
pub(crate) fn ring(bytes: u32) -> u32 {
    bytes.clamp(*Options::RING.start(), *Options::RING.end()).next_power_of_two()
}

impl Table {
    /// Returns the number of pages for `flows` flows.
    pub fn pages(&self, flows: u32) -> u32 {
        (u64::from(flows) * u64::from(self.ten_flows)).div_ceil(10 * u64::from(self.page)) as u32
    }
}

/// Fills a table with pages of empty slots.
pub(crate) fn fill(table: &MapHandle) -> io::Result<()> {
    let numbers: Vec<u32> = (0..table.max_entries()).collect();
    let share = numbers.len().div_ceil(THREADS).max(AT_ONCE);
    thread::scope(|s| {
        let threads: Vec<_> = numbers.chunks(share).map(|share| s.spawn(|| fill_share(table, share))).collect();
        threads.into_iter().try_for_each(|t| t.join().expect("no panic in here"))
    })
}

fn fill_share(table: &MapHandle, share: &[u32]) -> io::Result<()> {
    // SAFETY: bpf_map_create_opts is plain data; all-zero is valid.
    let mut options: libbpf_sys::bpf_map_create_opts = unsafe { std::mem::zeroed() };
    options.sz = size_of_val(&options) as _;
    for some in share.chunks(AT_ONCE) {
        let make = |_: &u32| MapHandle::create(MapType::Array, Some("page"), 4, PAGE, 1, &options).map_err(io_error);
        let pages = some.iter().map(make).collect::<io::Result<Vec<_>>>()?;
        let places: Vec<u8> = some.iter().flat_map(|number| number.to_ne_bytes()).collect();
        let files: Vec<u8> = pages.iter().flat_map(|page| page.as_fd().as_raw_fd().to_ne_bytes()).collect();
        let put = table.update_batch(&places, &files, some.len() as u32, MapFlags::ANY, MapFlags::ANY);
        put.map_err(io_error)?;
    }
    Ok(())
}

/// The size of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapSize {
    /// Number of entries for which it has room.
    pub entries: u64,
    /// Kernel memory in bytes, as the kernel accounts for it.
    pub bytes: u64,
}

/// Returns the size of a pinned map; for a table of path entries, with all its pages.
pub fn map_size(pinned: &Path) -> io::Result<MapSize> {
    let map = MapHandle::from_pinned_path(pinned).map_err(io_error)?;
    let (entries, mut bytes) = (u64::from(map.max_entries()), memlock(&map)?);
    if map.map_type() != MapType::ArrayOfMaps {
        return Ok(MapSize { entries, bytes });
    }
    let page = map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).map_err(io_error)?.unwrap_or_default();
    let id = page.try_into().map(u32::from_ne_bytes).map_err(|_| io::Error::other("a table without pages"))?;
    bytes += entries * memlock(&MapHandle::from_map_id(id).map_err(io_error)?)?;
    let table = [PATHS4, PATHS6].into_iter().find(|table| map.name() == table.name);
    Ok(MapSize { entries: entries * table.map_or(1, |table| table.page.into()), bytes })
}

/// Returns the bytes that a map has allocated, from /proc.
fn memlock(map: &MapHandle) -> io::Result<u64> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", map.as_fd().as_raw_fd()))?;
    let bytes = info.lines().find_map(|line| line.strip_prefix("memlock:")?.trim().parse().ok());
    bytes.ok_or_else(|| io::Error::other("no memlock in fdinfo"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_pages_for_all_flows() {
        assert_eq!([16, 167, 168, 1_000_000].map(|flows| PATHS4.pages(flows)), [1, 1, 2, 5965]);
        assert_eq!([16, 73, 74, 1_000_000].map(|flows| PATHS6.pages(flows)), [1, 1, 2, 13546]);
    }
}
