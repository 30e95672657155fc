//! Loads programs, puts them on devices, pins them, and knows what else is there.

pub(crate) mod attach;
pub(crate) mod attachment;
pub(crate) mod guard;
pub(crate) mod load;
pub(crate) mod pins;
pub(crate) mod programs;
