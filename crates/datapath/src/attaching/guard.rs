//! A netfilter program (bpf/guard.h) that keeps segments arriving over unattached devices from sockets
//! whose numbers differ from the host's. Its links are not pinned, because they would keep a network
//! namespace alive. So the guard exists as long as the process, which attaches to new devices.

use crate::{network::devices::Device, tables::bpffs::checked, tables::maps::io_error};
use libbpf_rs::{MapCore, MapFlags, MapHandle};
use nix::libc;
use std::{
    collections::HashSet,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr::null,
};

/// Hooks as in <linux/netfilter.h>. The program knows the first.
const HOOKS: [u32; 2] = [libc::NF_INET_LOCAL_IN as u32, libc::NF_INET_POST_ROUTING as u32];
/// Priorities: before all others, and after those that change addresses (NF_IP_PRI_NAT_SRC), since a spliced connection has
/// the socket's addresses on the wire. No two programs may have the same priority; another data path uses the next ones.
const PRIORITIES: [i32; 2] = [-1000, 1000];
const TRIES: i32 = 16;

/// Returns whether the kernel runs netfilter programs (CONFIG_NETFILTER_BPF_LINK).
pub fn has_guard() -> bool {
    // SAFETY: no options are passed.
    unsafe { libbpf_sys::libbpf_probe_bpf_prog_type(libbpf_sys::BPF_PROG_TYPE_NETFILTER, null()) == 1 }
}

pub(crate) struct Guard {
    program: OwnedFd,
    watched: MapHandle,
    /// Contents of the map.
    known: HashSet<u32>,
    /// Empty: nothing is checked.
    links: Vec<OwnedFd>,
}

impl Guard {
    pub fn new(program: OwnedFd, watched: MapHandle) -> Guard {
        Guard { program, watched, known: HashSet::new(), links: Vec::new() }
    }

    /// Checks packets of all devices except the attached ones and those above them that show the same packets again.
    pub fn watch(&mut self, attached: &[u32], all: &[Device]) -> io::Result<()> {
        let is = |d: &Device| attached.contains(&d.index);
        // a port was named, so nobody knows where all its packets appear
        if all.iter().any(|d| is(d) && d.master.is_some()) {
            self.links.clear();
            return Ok(());
        }
        let above = all.iter().filter(|d| d.lower.is_some_and(|lower| attached.contains(&lower)));
        let wanted: HashSet<u32> = attached.iter().copied().chain(above.map(|d| d.index)).collect();
        for device in wanted.difference(&self.known) {
            let value = 1u32.to_ne_bytes();
            self.watched.update(&device.to_ne_bytes(), &value, MapFlags::ANY).map_err(io_error)?;
        }
        for device in self.known.difference(&wanted) {
            self.watched.delete(&device.to_ne_bytes()).map_err(io_error)?;
        }
        self.known = wanted;
        if self.links.is_empty() {
            let families = [libc::NFPROTO_IPV4, libc::NFPROTO_IPV6];
            let hooks = HOOKS.iter().zip(PRIORITIES);
            let both = families.into_iter().flat_map(|family| hooks.clone().map(move |(hook, at)| (family, *hook, at)));
            self.links =
                both.map(|(family, hook, at)| self.link(family as u32, hook, at)).collect::<io::Result<_>>()?;
        }
        Ok(())
    }

    fn link(&self, family: u32, hook: u32, priority: i32) -> io::Result<OwnedFd> {
        // SAFETY: bpf_link_create_opts is plain data; all-zero but for its size and what is set below is valid.
        let mut opts: libbpf_sys::bpf_link_create_opts = unsafe { std::mem::zeroed() };
        opts.sz = size_of_val(&opts) as _;
        let netfilter = libbpf_sys::bpf_link_create_opts__bindgen_ty_1__bindgen_ty_5 {
            pf: family,
            hooknum: hook,
            priority,
            flags: 0,
        };
        opts.__bindgen_anon_1.netfilter = netfilter;
        let mut made = Err(io::Error::from_raw_os_error(libc::EBUSY));
        for at in priority..priority + TRIES {
            opts.__bindgen_anon_1.netfilter.priority = at;
            // SAFETY: the program is loaded and alive; `opts` outlives the call.
            let fd =
                unsafe { libbpf_sys::bpf_link_create(self.program.as_raw_fd(), 0, libbpf_sys::BPF_NETFILTER, &opts) };
            made = checked(fd);
            if made.as_ref().err().and_then(io::Error::raw_os_error) != Some(libc::EBUSY) {
                break;
            }
        }
        // SAFETY: a new descriptor that nobody else owns.
        made.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
    }
}
