//! Connections whose hosts shake hands with each other, and segments that wait in user space.

pub(crate) mod foreign;
pub(crate) mod handshake;
pub(crate) mod hold;
