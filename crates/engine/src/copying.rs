//! The task of a flow while its bytes are copied or drain.

pub(crate) mod pipe;
pub(crate) mod pump;
pub(crate) mod relay;
#[cfg(feature = "taps")]
mod tap_reader;
