//! Network devices of this namespace.

use nix::{ifaddrs::getifaddrs, libc, net::if_::InterfaceFlags};
use std::{
    collections::HashMap,
    fs, io,
    os::fd::AsRawFd,
    path::Path,
    time::{Duration, Instant},
};

/// A device that packets of flows may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Name.
    pub name: String,
    /// Index.
    pub index: u32,
    /// Ethernet (ARPHRD_ETHER): the only link layer the data path handles.
    pub ethernet: bool,
    /// Administratively up.
    pub up: bool,
    /// A port of a bridge or bond: packets are seen on the master.
    pub enslaved: bool,
}

/// All devices but loopback.
pub fn devices() -> io::Result<Vec<Device>> {
    let mut found = Vec::new();
    for a in getifaddrs()? {
        let Some(link) = a.address.as_ref().and_then(|x| x.as_link_addr()) else { continue };
        if a.flags.contains(InterfaceFlags::IFF_LOOPBACK) {
            continue;
        }
        found.push(Device {
            name: a.interface_name,
            index: link.ifindex() as u32,
            ethernet: link.hatype() == libc::ARPHRD_ETHER,
            up: a.flags.contains(InterfaceFlags::IFF_UP),
            enslaved: false,
        });
    }
    for d in &mut found {
        d.enslaved = has_master(d);
    }
    Ok(found)
}

/// By sysfs, if it shows this network namespace (it shows the one it was mounted in).
fn has_master(d: &Device) -> bool {
    let dir = Path::new("/sys/class/net").join(&d.name);
    let index = fs::read_to_string(dir.join("ifindex")).ok().and_then(|s| s.trim().parse().ok());
    index == Some(d.index) && dir.join("master").exists()
}

/// MTU in bytes of IP packet.
fn mtu(index: u32) -> io::Result<u32> {
    let s = nix::sys::socket::socket(
        nix::sys::socket::AddressFamily::Inet,
        nix::sys::socket::SockType::Datagram,
        nix::sys::socket::SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    // SAFETY: ifreq is plain data; all-zero is valid.
    let mut req: libc::ifreq = unsafe { std::mem::zeroed() };
    // SAFETY: ifr_name holds IF_NAMESIZE bytes, which is what if_indextoname writes at most.
    if unsafe { libc::if_indextoname(index, req.ifr_name.as_mut_ptr()) }.is_null() {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: SIOCGIFMTU reads the name and writes ifru_mtu of the ifreq that `req` is.
    if unsafe { libc::ioctl(s.as_raw_fd(), libc::SIOCGIFMTU as _, &mut req) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the ioctl has just written this member of the union.
    Ok(unsafe { req.ifr_ifru.ifru_mtu } as u32)
}

/// What XDP can do on a device, in its driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct XdpAbilities {
    /// Runs programs on what it receives, and they may redirect.
    pub receives: bool,
    /// Sends frames that are redirected to it; bits of `enum via_ability`.
    pub sends: u32,
}

/// By the kernel's netdev family (6.3); a device that it says nothing about can nothing.
pub(crate) fn xdp_abilities(index: u32) -> XdpAbilities {
    // enum netdev_xdp_act of <linux/netdev.h>
    const BASIC: u64 = 1;
    const REDIRECT: u64 = 2;
    const NDO_XMIT: u64 = 4;
    const NDO_XMIT_SG: u64 = 64;
    // SAFETY: bpf_xdp_query_opts is plain data; all-zero but for its size is what the library wants.
    let mut opts: libbpf_sys::bpf_xdp_query_opts = unsafe { std::mem::zeroed() };
    opts.sz = size_of_val(&opts) as _;
    // SAFETY: the library writes `opts`, whose size it is told.
    if unsafe { libbpf_sys::bpf_xdp_query(index as i32, 0, &mut opts) } < 0 {
        return XdpAbilities::default();
    }
    let can = |bits: u64| opts.feature_flags & bits == bits;
    XdpAbilities {
        receives: can(BASIC | REDIRECT),
        sends: u32::from(can(NDO_XMIT)) | u32::from(can(NDO_XMIT | NDO_XMIT_SG)) << 1,
    }
}

/// What is known of devices, asked for again after a second: a commit must not cost a system call more than it needs.
#[derive(Debug)]
pub(crate) struct Links {
    /// XDP is in use: next hops must say what their devices can.
    early: bool,
    /// Devices whose packets go to their other end at once.
    peers: Vec<u32>,
    known: HashMap<u32, (Instant, LinkFacts)>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkFacts {
    /// Bytes of IP packet.
    pub mtu: u32,
    /// `enum via_ability`.
    pub can: u32,
}

impl Links {
    pub fn new(early: bool, peers: Vec<u32>) -> Links {
        Links { early, peers, known: HashMap::new() }
    }

    pub fn of(&mut self, index: u32) -> LinkFacts {
        const PEER: u32 = 1 << 2; // VIA_PEER
        match self.known.get(&index) {
            Some((asked, facts)) if asked.elapsed() < Duration::from_secs(1) => *facts,
            _ => {
                // a device that is gone: its packets go nowhere anyway
                let mtu = mtu(index).unwrap_or(1500);
                let sends = if self.early { xdp_abilities(index).sends } else { 0 };
                let can = if self.peers.contains(&index) { sends | PEER } else { sends };
                let facts = LinkFacts { mtu, can };
                self.known.insert(index, (Instant::now(), facts));
                facts
            }
        }
    }
}
