//! Tells pinned maps that fit together from others: [`AbiId`].

use crate::names::{ABI_VERSION, LAYOUT};
use std::fmt;

/// The ABI of pinned maps. A process takes over those of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbiId {
    /// `ABI_VERSION` of bpf/flow.h, which people count when a meaning changes.
    pub version: u32,
    /// Fingerprint of the maps' layout and of the values in them, which nobody can forget. 0: that version had none.
    pub layout: u32,
}

impl AbiId {
    /// That of this program.
    pub const OURS: AbiId = AbiId { version: ABI_VERSION, layout: LAYOUT };
}

impl fmt::Display for AbiId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with layout {:08x}", self.version, self.layout)
    }
}

/// Returns the identity in that value. All versions begin alike. `None`: not written yet.
pub(crate) fn id_in(abi: &[u8]) -> Option<AbiId> {
    let word = |at| abi.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_ne_bytes);
    Some(AbiId { version: word(0), layout: word(4) }).filter(|id| id.version != 0)
}
