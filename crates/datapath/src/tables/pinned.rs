//! Reads tables pinned in a directory, whichever process and version uses them.

use crate::{
    LegView, Tuple, abi,
    tables::maps::{from_bytes, io_error, leg_view},
};
use libbpf_rs::{MapCore, MapFlags, MapHandle};
use std::{fmt, io, path::Path};

/// Returns the value of the pinned map that describes the others, if it is there.
pub(crate) fn abi_value(folder: &Path) -> io::Result<Option<Vec<u8>>> {
    let path = folder.join("abi");
    if !path.exists() {
        return Ok(None);
    }
    let map = MapHandle::from_pinned_path(path).map_err(io_error)?;
    map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).map_err(io_error)
}

/// What would be lost with the tables of a directory, whatever their version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holdings {
    /// Number of path entries of flows in forwarding mode, and of flows
    /// that have just ended. `None`: that version did not count them.
    pub entries: Option<u64>,
    /// Number of records of connections.
    pub legs: usize,
    /// Number of transparent listeners, whose connections must not pass without a decision.
    pub transparent: usize,
}

impl Default for Holdings {
    fn default() -> Holdings {
        Holdings { entries: Some(0), legs: 0, transparent: 0 }
    }
}

impl fmt::Display for Holdings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.entries {
            Some(n) => write!(f, "{n} path entries")?,
            None => f.write_str("an unknown number of path entries")?,
        }
        write!(f, ", {} records of connections and {} transparent listeners", self.legs, self.transparent)
    }
}

impl Holdings {
    /// Counts the contents of the tables pinned in a directory, whichever process uses them. Errors are those of the maps.
    pub fn of(folder: &Path) -> io::Result<Holdings> {
        const LISTENS_TRANSPARENT: u8 = abi::listens::LISTENS_TRANSPARENT.0 as u8;
        const WAITS: u8 = abi::listens::LISTENS_WAITS.0 as u8;
        let map = |name| match folder.join(name) {
            path if path.exists() => MapHandle::from_pinned_path(path).map(Some).map_err(io_error),
            _ => Ok(None),
        };
        let counted =
            map("entries")?.map(|m| m.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).map_err(io_error)).transpose()?;
        // a listener that cannot be read may be one: what is taken for nothing is removed
        let is_transparent = |map: &MapHandle, key: &[u8]| {
            let value = map.lookup(key, MapFlags::ANY).map_err(io_error)?;
            Ok::<_, io::Error>(value.is_some_and(|v| v.iter().any(|byte| byte & !WAITS == LISTENS_TRANSPARENT)))
        };
        let transparent = |all: MapHandle| {
            all.keys().try_fold(0, |n, key| Ok::<_, io::Error>(n + usize::from(is_transparent(&all, &key)?)))
        };
        Ok(Holdings {
            entries: counted.flatten().and_then(|value| Some(u64::from_ne_bytes(value.try_into().ok()?))),
            legs: map("legs")?.map_or(0, |legs| legs.keys().count()),
            transparent: map("listeners")?.map_or(Ok(0), transparent)?,
        })
    }
}

/// Reads the connection records from the tables pinned in a directory, whichever process uses them, for diagnosis.
pub fn records(folder: &Path) -> io::Result<Vec<(Tuple, LegView)>> {
    let legs = MapHandle::from_pinned_path(folder.join("legs")).map_err(io_error)?;
    let value = |key: &[u8]| legs.lookup(key, MapFlags::ANY).ok().flatten();
    let record = |key: Vec<u8>| Some((Tuple::from_abi(&from_bytes(&key)), leg_view(from_bytes(&value(&key)?))));
    Ok(legs.keys().filter_map(record).collect())
}
