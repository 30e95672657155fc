//! Connections whose hosts shake hands with each other, and segments that wait in user space.

pub(crate) mod handshake;
pub(crate) mod hold;
pub(crate) mod transparent;
