//! Segments that user space passes on: those of handshakes between hosts, and those held until a drain is over.

pub(crate) mod handshakes;
pub(crate) mod holding;
