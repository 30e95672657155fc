//! Constants of `bpf/flow.h`, generated from the object's BTF at build time.

use crate::abi;
use serde::Serialize;

pub use generated::*;

#[allow(dead_code)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/names.rs"));
}

/// Who owns the bytes of one direction of a flow (`enum phase`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum Phase {
    /// The proxy: control mode.
    #[default]
    Local = abi::phase::PHASE_LOCAL.0 as u8,
    /// The proxy owns what lies below the bound, and drains it; the data path owns the rest.
    ToForwarding = abi::phase::PHASE_TO_FWD.0 as u8,
    /// The data path: forwarding mode.
    Forwarding = abi::phase::PHASE_FWD.0 as u8,
    /// The data path owns what lies below the bound, until that is acknowledged; the proxy owns the rest.
    ToLocal = abi::phase::PHASE_TO_LOCAL.0 as u8,
}

impl Phase {
    /// Is a switch under way: do bytes below the bound have another owner than those from there on?
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
    /// As it stands in a leg's record.
    fn from(phase: u8) -> Phase {
        abi::phase(phase.into()).into()
    }
}
