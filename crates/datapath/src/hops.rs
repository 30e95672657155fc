//! Next hops: where packets to a host go, and how that follows the network.

pub(crate) mod follow;
pub(crate) mod routes;
pub(crate) mod vias;
