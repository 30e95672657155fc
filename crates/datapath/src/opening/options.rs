//! What [`Datapath::open`](crate::Datapath::open) is told: [`Options`].

use crate::{
    attaching::attach::{refuse_hindered, wanted_devices, wanted_xdp},
    attaching::pins::default_pin,
    error::OpenError,
    network::devices::devices,
};
use std::{ops::RangeInclusive, path::PathBuf};

/// Options of the data path: its devices, tables and rings. Minor releases add fields:
/// write `..Default::default()` after those you set.
#[derive(Clone, Debug)]
pub struct Options {
    /// Devices to attach to. Empty: all Ethernet devices of this network namespace.
    pub devices: Vec<String>,
    /// The devices among these on which XDP, in the driver, forwards what it can before tcx sees it. Some offloads are turned
    /// off for it.
    pub xdp: Vec<String>,
    /// The devices among these (veth or netkit) whose peer is in another network namespace.
    /// Packets that leave over them are delivered directly to the peer.
    pub peer: Vec<String>,
    /// Directory on a bpffs for the pins of maps and links. `None`: a directory
    /// below `/sys/fs/bpf/longsplice`, named after the network namespace.
    pub pin: Option<PathBuf>,
    /// Maximum number of flows, within [`Self::FLOWS`]; default 65536. Tables are preallocated for it.
    pub max_flows: u32,
    /// Size in bytes of the ring that carries copies of forwarded data to taps, within [`Self::RING`]; default 16 MB.
    /// The default holds what arrives at 10 Gbit/s while the reader does not run for 13 ms.
    pub tap_ring: u32,
    /// Size in bytes of the ring that carries held segments to user space, under the hold policy or as the first data of
    /// connections between hosts, within [`Self::RING`]; default 4 MB.
    pub hold_ring: u32,
    /// Transparent connections to the addresses of the process that has let go begin only when they are listened to again, or
    /// after [`Datapath::settle`](crate::Datapath::settle_listeners): meanwhile, SYNs are held, and come again.
    pub follows: bool,
}

impl Options {
    /// Range of [`Self::max_flows`]. Other numbers are moved to the nearer end.
    pub const FLOWS: RangeInclusive<u32> = 16..=1 << 24;
    /// Range of the sizes of rings in bytes: 64 KB (the largest page size) to 1 GB. Other sizes
    /// are moved to the nearer end; the result is rounded up to a power of two.
    pub const RING: RangeInclusive<u32> = 1 << 16..=1 << 30;

    /// Checks the named devices as [`Datapath::open`](crate::Datapath::open) does. Returns the names of those to which it would attach.
    pub fn check_devices(&self) -> Result<Vec<String>, OpenError> {
        let all = devices().map_err(|source| OpenError::Kernel { what: "list devices", source })?;
        let wanted = wanted_devices(&self.devices, &all)?;
        refuse_hindered(&self.peer, &wanted, &all)?;
        let pin = self.pin.clone().map_or_else(default_pin, Ok);
        let pin = pin.map_err(|source| OpenError::Kernel { what: "network namespace", source })?;
        wanted_xdp(&self.xdp, &wanted, &all, &pin)?;
        Ok(all.into_iter().filter(|d| wanted.contains(&d.index)).map(|d| d.name).collect())
    }

    /// Returns these options with the smallest rings, for a data path that neither taps nor holds.
    #[must_use]
    pub fn with_smallest_rings(self) -> Options {
        Options { tap_ring: 0, hold_ring: 0, ..self }
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            devices: Vec::new(),
            xdp: Vec::new(),
            peer: Vec::new(),
            pin: None,
            max_flows: 65536,
            tap_ring: 16 << 20,
            hold_ring: 4 << 20,
            follows: false,
        }
    }
}
