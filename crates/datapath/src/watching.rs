//! What user space hears and sees of flows: events, traces, details.

pub(crate) mod events;
pub(crate) mod inspect;
pub(crate) mod trace;
