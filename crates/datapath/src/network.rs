//! The network of the machine, by netlink: devices, offloads, firewalls, connection tracking.

pub(crate) mod conntrack;
pub(crate) mod devices;
pub(crate) mod forward_policy;
pub(crate) mod netlink;
pub(crate) mod offloads;
