//! Network devices of this namespace, according to rtnetlink.

use crate::{
    abi::{via, via_flag},
    network::netlink::{Netlink, attributes, find, number, request},
};
use nix::libc;
use std::{
    collections::HashMap,
    ffi::CStr,
    io,
    time::{Duration, Instant},
};

/// Size of `struct ifinfomsg` in bytes.
const INFO: usize = 16;

/// IFLA_GSO_MAX_SIZE, IFLA_GRO_MAX_SIZE, and both for IPv4.
const SIZES: [u16; 4] = [41, 58, 63, 64];

/// A device that flows may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Name of the device.
    pub name: String,
    /// Index of the device.
    pub index: u32,
    /// Whether it is an Ethernet device (ARPHRD_ETHER), the only link layer that the data path handles.
    pub ethernet: bool,
    /// Whether it is administratively up.
    pub up: bool,
    /// Index of the bridge, bond or similar device of which it is a port. Packets are seen there.
    pub master: Option<u32>,
    /// Index of the lower device through which its packets pass unchanged, for a macvlan or
    /// ipvlan. Not set for a VLAN, whose tagged packets are left alone on the lower device.
    pub lower: Option<u32>,
    /// Size in bytes of the largest super-packet that it sends, or that is joined from what it receives. With
    /// BIG TCP it is more than 64 KB.
    pub largest: u32,
    pub(crate) mtu: u32,
    pub(crate) mac: [u8; 6],
    /// Why packets cannot be delivered to its peer. `None`: they can.
    pub(crate) hindrance: Option<&'static str>,
}

impl Device {
    /// Reads the body of RTM_NEWLINK or RTM_DELLINK. `None` for loopback,
    /// and for messages about the ports of a bridge (AF_BRIDGE).
    pub(crate) fn read(body: &[u8]) -> Option<Device> {
        let (info, rest) = body.split_at_checked(INFO)?;
        let flags = number(&info[8..])?;
        if info[0] != libc::AF_UNSPEC as u8 || flags & libc::IFF_LOOPBACK as u32 != 0 {
            return None;
        }
        let of = attributes(rest);
        let text = |bytes| CStr::from_bytes_until_nul(bytes).ok()?.to_str().ok();
        let about = |kind| find(&of, kind).and_then(number);
        let of_kind = find(&of, libc::IFLA_LINKINFO).map(attributes).unwrap_or_default();
        let kind = find(&of_kind, libc::IFLA_INFO_KIND).and_then(text).unwrap_or_default();
        let is_elsewhere = find(&of, libc::IFLA_LINK_NETNSID).is_some();
        let is_stacked = ["macvlan", "macvtap", "ipvlan", "ipvtap"].contains(&kind) && !is_elsewhere;
        let mac = find(&of, libc::IFLA_ADDRESS).unwrap_or_default();
        Some(Device {
            name: find(&of, libc::IFLA_IFNAME).and_then(text)?.to_owned(),
            index: number(&info[4..])?,
            ethernet: u16::from_ne_bytes([info[2], info[3]]) == libc::ARPHRD_ETHER,
            up: flags & libc::IFF_UP as u32 != 0,
            master: about(libc::IFLA_MASTER),
            lower: about(libc::IFLA_LINK).filter(|_| is_stacked),
            largest: SIZES.iter().filter_map(|kind| about(*kind)).max().unwrap_or_default(),
            mtu: about(libc::IFLA_MTU)?,
            mac: mac.try_into().unwrap_or_default(),
            hindrance: if !["veth", "netkit"].contains(&kind) {
                Some("it is no veth: leave it out")
            } else if !is_elsewhere {
                Some("its other end is in this network namespace: leave it out, or move that end into another")
            } else {
                None
            },
        })
    }
}

/// Lists all devices except loopback, by index.
pub fn devices() -> io::Result<Vec<Device>> {
    let mut found = Vec::new();
    // statistics are half of the answer (RTEXT_FILTER_SKIP_STATS)
    const LEAVE_OUT: [u8; 4] = 8u32.to_ne_bytes();
    let mask = [(libc::IFLA_EXT_MASK, &LEAVE_OUT[..])];
    Netlink::open(&[])?.dump(libc::RTM_GETLINK, &[0; INFO], &mask, |(_, body)| found.extend(Device::read(body)))?;
    found.sort_by_key(|d: &Device| d.index);
    Ok(found)
}

/// XDP abilities of a device's driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct XdpAbilities {
    /// It runs programs on received packets, and these may redirect.
    pub receives: bool,
    /// It sends frames that are redirected to it: bits of `enum via_flag`.
    pub sends: u32,
}

/// Returns the abilities according to the kernel's netdev family (6.3). A device that it does not describe has none.
pub(crate) fn xdp_abilities(index: u32) -> XdpAbilities {
    // enum netdev_xdp_act of <linux/netdev.h>
    const BASIC: u64 = 1;
    const REDIRECT: u64 = 2;
    const NDO_XMIT: u64 = 4;
    const NDO_XMIT_SG: u64 = 64;
    // SAFETY: bpf_xdp_query_opts is plain data; the library expects all-zero except for its size.
    let mut opts: libbpf_sys::bpf_xdp_query_opts = unsafe { std::mem::zeroed() };
    opts.sz = size_of_val(&opts) as _;
    // SAFETY: the library writes `opts`, whose size is passed.
    if unsafe { libbpf_sys::bpf_xdp_query(index as i32, 0, &mut opts) } < 0 {
        return XdpAbilities::default();
    }
    let can = |bits: u64| opts.feature_flags & bits == bits;
    XdpAbilities {
        receives: can(BASIC | REDIRECT),
        sends: [(NDO_XMIT, via_flag::VIA_XDP), (NDO_XMIT | NDO_XMIT_SG, via_flag::VIA_XDP_FRAGMENTS)]
            .iter()
            .fold(0, |all, (bits, flag)| if can(*bits) { all | flag.0 } else { all }),
    }
}

/// Returns one device.
fn device(index: u32) -> io::Result<Device> {
    let mut info = [0; INFO];
    info[4..8].copy_from_slice(&index.to_ne_bytes());
    let body = Netlink::open(&[])?.ask(&request(libc::RTM_GETLINK, 0, &info, &[]))?;
    Device::read(&body).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Lets a device of this namespace send and receive super-packets of up to `bytes` bytes, in both families (BIG TCP).
#[cfg(feature = "testing")]
pub(crate) fn set_largest(index: u32, bytes: u32) -> io::Result<()> {
    let mut info = [0; INFO];
    info[4..8].copy_from_slice(&index.to_ne_bytes());
    let sizes = SIZES.map(|kind| (kind, bytes.to_ne_bytes()));
    let all: Vec<_> = sizes.iter().map(|(kind, bytes)| (*kind, &bytes[..])).collect();
    Netlink::open(&[])?.ask(&request(libc::RTM_SETLINK, libc::NLM_F_ACK, &info, &all)).map(drop)
}

/// Facts about devices, cached for a second: a commit must not cost unnecessary system calls.
#[derive(Debug)]
pub(crate) struct Links {
    /// XDP is in use, so next hops must include the abilities of their devices.
    early: bool,
    /// Devices whose packets are delivered directly to their peer, while that is possible.
    peers: Vec<String>,
    known: HashMap<u32, (Instant, LinkFacts)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinkFacts {
    /// MTU in bytes.
    pub mtu: u32,
    /// Abilities: bits of `enum via_flag`.
    pub can: u32,
}

impl LinkFacts {
    /// Returns a next hop over the device, in its present state.
    pub fn entry(self, v: &via) -> via {
        via { mtu: self.mtu.min(v.most), flags: via_flag(self.can), ..*v }
    }
}

impl Links {
    pub fn new(early: bool, peers: Vec<String>) -> Links {
        Links { early, peers, known: HashMap::new() }
    }

    pub fn of(&mut self, index: u32) -> LinkFacts {
        match self.known.get(&index) {
            Some((asked, facts)) if asked.elapsed() < Duration::from_secs(1) => *facts,
            _ => self.ask(index),
        }
    }

    /// Reads the facts of a device, and caches them.
    pub fn ask(&mut self, index: u32) -> LinkFacts {
        let device = device(index).ok();
        let sends = if self.early { xdp_abilities(index).sends } else { 0 };
        let is_peer = |d: &Device| self.peers.contains(&d.name) && d.hindrance.is_none();
        let can = if device.as_ref().is_some_and(is_peer) { sends | via_flag::VIA_PEER.0 } else { sends };
        // a device that is gone: its packets go nowhere anyway
        let facts = LinkFacts { mtu: device.map_or(1500, |d| d.mtu), can };
        self.known.insert(index, (Instant::now(), facts));
        facts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_listed_and_found() {
        for d in devices().unwrap() {
            assert_eq!(device(d.index).unwrap(), d);
        }
        assert_eq!(device(1).unwrap_err().kind(), io::ErrorKind::NotFound, "loopback");
        assert_eq!(device(0x7fff_ffff).unwrap_err().raw_os_error(), Some(libc::ENODEV));
    }
}
