//! Where the programs are attached: tcx everywhere, XDP where it was asked for, by pinned links that outlive the process.

use crate::{
    OpenError, Options,
    devices::{devices, xdp_abilities},
    kernel::kernel,
    peer,
};
use libbpf_rs::{AsRawLibbpf, Link};
use nix::libc;
use std::{
    collections::HashSet,
    ffi::CString,
    fs, io,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    path::Path,
    ptr::{NonNull, null},
};

/// Indices of the devices that were asked for.
pub(crate) fn wanted_devices(options: &Options) -> Result<Vec<u32>, OpenError> {
    let all = devices().map_err(|source| OpenError::Kernel { what: "list devices", source })?;
    if options.devices.is_empty() {
        return Ok(all.iter().filter(|d| d.ethernet && d.up && !d.enslaved).map(|d| d.index).collect());
    }
    options
        .devices
        .iter()
        .map(|n| {
            let d = all.iter().find(|d| d.ethernet && d.name == *n);
            d.map(|d| d.index).ok_or_else(|| OpenError::Device(n.clone()))
        })
        .collect()
}

/// Indices of the devices whose packets are to go to their other end at once.
pub(crate) fn wanted_peers(names: &[String], attached: &[u32]) -> Result<Vec<u32>, OpenError> {
    let all = devices().map_err(|source| OpenError::Kernel { what: "list devices", source })?;
    let index = |name: &String| {
        let refuse = |why| OpenError::Peer { device: name.clone(), why };
        let device = all.iter().find(|d| d.name == *name).ok_or_else(|| OpenError::Device(name.clone()))?;
        if !attached.contains(&device.index) {
            return Err(refuse("it is not among the devices to splice on"));
        }
        match peer::hindrance(device.index) {
            Ok(None) => Ok(device.index),
            Ok(Some(why)) => Err(refuse(why)),
            Err(source) => Err(OpenError::Kernel { what: "ask rtnetlink for a device", source }),
        }
    };
    names.iter().map(index).collect()
}

/// Numbers of the programs that tcx runs on a device.
pub(crate) fn attached_programs(index: u32) -> Result<Vec<u32>, OpenError> {
    let mut all = Vec::new();
    for direction in [libbpf_sys::BPF_TCX_INGRESS, libbpf_sys::BPF_TCX_EGRESS] {
        let mut ids = [0u32; 64]; // as many as there can be: BPF_MPROG_MAX
        // SAFETY: bpf_prog_query_opts is plain data; all-zero but for its size and the room for numbers is valid.
        let mut opts: libbpf_sys::bpf_prog_query_opts = unsafe { std::mem::zeroed() };
        (opts.sz, opts.prog_ids) = (size_of_val(&opts) as _, ids.as_mut_ptr());
        opts.__bindgen_anon_1.count = ids.len() as u32;
        // SAFETY: `ids` has room for as many numbers as `opts` says, and both outlive the call.
        let r = unsafe { libbpf_sys::bpf_prog_query_opts(index as i32, direction, &mut opts) };
        if r < 0 {
            return Err(OpenError::Kernel { what: "ask for programs", source: io::Error::from_raw_os_error(-r) });
        }
        // SAFETY: both members of the union are the same integer.
        let n = unsafe { opts.__bindgen_anon_1.count };
        all.extend(&ids[..n as usize]);
    }
    Ok(all)
}

/// Attaches by a pinned tcx link, or puts the program into the link that is there.
pub(crate) fn attach(prog: &libbpf_rs::ProgramMut<'_>, index: u32, path: &Path) -> Result<(), OpenError> {
    if path.exists() {
        let taken = Link::open(path).and_then(|mut l| l.update_prog(prog));
        if taken.is_ok() {
            return Ok(());
        }
        // the device of that link is gone, and its index was given to another one
        fs::remove_file(path).map_err(|source| OpenError::Kernel { what: "remove a stale link", source })?;
    }
    // SAFETY: the program is loaded and alive; no options are passed.
    let link = unsafe { libbpf_sys::bpf_program__attach_tcx(prog.as_libbpf_object().as_ptr(), index as i32, null()) };
    let Some(link) = NonNull::new(link) else {
        return Err(OpenError::Kernel { what: "attach tcx", source: io::Error::last_os_error() });
    };
    // SAFETY: a new link that nobody else owns.
    let mut link = unsafe { Link::from_ptr(link) };
    link.pin(path).map_err(kernel("pin link"))
}

/// Attaches the XDP program to the devices named, by pinned links, and takes it from all others.
pub(crate) fn attach_early(
    prog: &libbpf_rs::ProgramMut<'_>,
    names: &[String],
    attached: &[u32],
    pin: &Path,
) -> Result<(), OpenError> {
    let all = devices().map_err(|source| OpenError::Kernel { what: "list devices", source })?;
    let mut kept = HashSet::new();
    for name in names {
        let refuse = |why| OpenError::Xdp { device: name.clone(), why };
        let device = all.iter().find(|d| d.name == *name).ok_or_else(|| OpenError::Device(name.clone()))?;
        if !attached.contains(&device.index) {
            return Err(refuse("it is not among the devices to splice on"));
        }
        if !xdp_abilities(device.index).receives {
            return Err(refuse("its driver has none, which the tcx entry does not need"));
        }
        let path = pin.join(format!("early-{}", device.index));
        kept.insert(path.clone());
        if path.exists() && Link::open(&path).and_then(|mut l| l.update_prog(prog)).is_ok() {
            continue;
        }
        let _ = fs::remove_file(&path); // of a device that is gone; if it cannot be removed, pinning says so
        const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;
        // SAFETY: bpf_link_create_opts is plain data; all-zero but for its size and the flags is valid.
        let mut opts: libbpf_sys::bpf_link_create_opts = unsafe { std::mem::zeroed() };
        (opts.sz, opts.flags) = (size_of_val(&opts) as _, XDP_FLAGS_DRV_MODE);
        // SAFETY: the program is loaded and alive; `opts` outlives the call.
        let fd = unsafe {
            libbpf_sys::bpf_link_create(prog.as_fd().as_raw_fd(), device.index as i32, libbpf_sys::BPF_XDP, &opts)
        };
        if fd < 0 {
            return Err(match -fd {
                libc::EBUSY => refuse("another XDP program is there"),
                n => OpenError::Kernel { what: "attach XDP", source: io::Error::from_raw_os_error(n) },
            });
        }
        // SAFETY: a new descriptor that nobody else owns.
        let link = unsafe { OwnedFd::from_raw_fd(fd) };
        let at = CString::new(path.into_os_string().into_encoded_bytes()).expect("a path of ours has no NUL");
        // SAFETY: both outlive the call.
        let r = unsafe { libbpf_sys::bpf_obj_pin(link.as_raw_fd(), at.as_ptr()) };
        if r < 0 {
            return Err(OpenError::Kernel { what: "pin link", source: io::Error::from_raw_os_error(-r) });
        }
    }
    let entries = fs::read_dir(pin).map_err(|_| OpenError::NoBpffs(pin.to_owned()))?;
    for path in entries.flatten().map(|e| e.path()) {
        if path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("early-")) && !kept.contains(&path) {
            fs::remove_file(&path).map_err(|source| OpenError::Kernel { what: "remove a link", source })?;
        }
    }
    Ok(())
}
