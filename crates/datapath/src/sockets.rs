//! The kernel's sockets: options, repair mode, lists by sock_diag.

pub(crate) mod diag;
pub(crate) mod name;
pub(crate) mod socket;
