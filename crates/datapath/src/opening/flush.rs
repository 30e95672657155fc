//! Removes everything that a dead process has left.

use crate::{
    Datapath, OpenError, Options, Resets, attaching::pins::Owned, handshakes::transparent::remove_rules,
    tables::pinned::Holdings,
};
use std::{io, path::Path};

/// Removes everything that a dead process has left in a directory and in the routing rules of this network namespace, with
/// all flows. The hosts of flows are reset, for which the data path is loaded once more. Returns `None` if nothing was there.
pub fn flush(path: &Path) -> Result<Option<Resets>, OpenError> {
    let rules = remove_rules();
    if !path.exists() {
        return Ok(None);
    }
    rules.map_err(|source| OpenError::Kernel { what: "remove rules of routing", source })?;
    let source = |source| OpenError::Kernel { what: "remove pinned maps and links", source };
    let remove = |resets| Owned::take(path)?.remove().map(|()| Some(resets)).map_err(source);
    // tables that cannot be read may hold something
    let held = Holdings::of(path).map(|held| held.entries);
    let entries = held.unwrap_or(None);
    if entries == Some(0) {
        return remove(Resets::default());
    }
    match Datapath::open(&Options { pin: Some(path.to_owned()), ..Options::default() }.with_smallest_rings()) {
        Ok(d) => {
            let resets = d.reset_all_forwarded();
            d.remove().map(|()| Some(resets)).map_err(source)
        }
        Err(e @ OpenError::Running(_)) => Err(e),
        Err(e) => remove(Resets { failed: entries.unwrap_or(0) / 2, error: Some(io::Error::other(e)), reset: 0 }),
    }
}
