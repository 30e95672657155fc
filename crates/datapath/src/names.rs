//! Constants of `bpf/flow.h` and `bpf/mark.h`, generated from the object's BTF at build time.

use crate::abi;

pub use generated::*;

#[allow(dead_code)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/names.rs"));
}

/// The owner of the bytes of one direction of a flow (`enum phase`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "kebab-case"))]
#[repr(u8)]
pub enum Phase {
    /// Control mode: the proxy owns all bytes.
    #[default]
    Local = abi::phase::PHASE_LOCAL.0 as u8,
    /// Splicing: the proxy owns the bytes below the bound, and drains them; the data path owns the rest.
    ToForwarding = abi::phase::PHASE_TO_FWD.0 as u8,
    /// Forwarding mode: the data path owns all bytes.
    Forwarding = abi::phase::PHASE_FWD.0 as u8,
    /// Unsplicing: the data path owns the bytes below the bound until they are acknowledged; the proxy owns the rest.
    ToLocal = abi::phase::PHASE_TO_LOCAL.0 as u8,
}

impl Phase {
    /// Returns whether a switch is under way: the bytes below the bound have another owner than the rest.
    pub fn is_switching(self) -> bool {
        matches!(self, Phase::ToForwarding | Phase::ToLocal)
    }
}

impl From<abi::phase> for Phase {
    fn from(phase: abi::phase) -> Phase {
        match phase {
            abi::phase::PHASE_TO_FWD => Phase::ToForwarding,
            abi::phase::PHASE_FWD => Phase::Forwarding,
            abi::phase::PHASE_TO_LOCAL => Phase::ToLocal,
            _ => Phase::Local,
        }
    }
}

impl From<u8> for Phase {
    /// Converts the value in a leg's record.
    fn from(phase: u8) -> Phase {
        abi::phase(phase.into()).into()
    }
}
