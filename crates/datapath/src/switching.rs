//! The calls that switch a flow, and flows without sockets.

pub(crate) mod adoption;
pub(crate) mod calls;
pub(crate) mod install;
pub(crate) mod released;
pub(crate) mod switch;
