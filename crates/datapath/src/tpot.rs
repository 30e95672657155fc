//! Translucent proxying: the programs of a host or proxy, their tables, probes of a path, the router of a farm.

pub(crate) mod probe;
pub(crate) mod proxy;
pub(crate) mod router;
pub(crate) mod tables;
