//! Attachment of the programs to devices: tcx everywhere, and XDP where requested. The links are pinned and outlive the process.

use crate::{
    attaching::programs::{attached_programs, loaded_programs},
    error::OpenError,
    network::devices::{Device, xdp_abilities},
    network::offloads::without_lro,
    tables::bpffs::{self, checked},
};
use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    path::Path,
    ptr::null,
};

/// The hook at which a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hook {
    Ingress,
    Egress,
    Early,
}

impl Hook {
    pub const ALL: [Hook; 3] = [Hook::Ingress, Hook::Egress, Hook::Early];

    /// Returns the name of the hook's program.
    pub fn name(self) -> &'static str {
        ["ingress", "egress", "early"][self as usize]
    }

    /// Returns whether a pin has the name of a link.
    pub fn is_of(pin: &Path) -> bool {
        let name = pin.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Hook::ALL.iter().any(|hook| name.starts_with(&format!("{}-", hook.name())))
    }

    /// Returns the name of the pin of its link to a device.
    pub fn pin(self, device: u32) -> String {
        format!("{}-{device}", self.name())
    }
}

/// Selects the devices to attach to: those named, or all Ethernet devices if none are named. Includes devices that
/// are down, because the first packets after one comes up may belong to flows. Packets that pass a bridge's or bond's
/// port, or the device below a macvlan, pass the upper device as well if it is up. They must be seen only once.
pub(crate) fn wanted<'a>(names: &[String], all: &'a [Device]) -> Vec<&'a Device> {
    let is_meant = |d: &&Device| d.ethernet && (names.is_empty() || names.contains(&d.name));
    let meant: Vec<_> = all.iter().filter(is_meant).collect();
    let up: Vec<_> = meant.iter().filter(|d| d.up).copied().collect();
    let is_port = |d: &Device| names.is_empty() && d.master.is_some();
    meant.iter().filter(|d| !is_port(d) && above(d, &up).is_none()).copied().collect()
}

/// Returns the device that was named for XDP or peer delivery, if it is among the attached ones.
fn named<'a>(name: &str, attached: &[u32], all: &'a [Device]) -> Result<Option<&'a Device>, OpenError> {
    let device = all.iter().find(|d| d.name == name).ok_or_else(|| OpenError::Device(name.to_owned()))?;
    Ok(attached.contains(&device.index).then_some(device))
}

const NOT_AMONG: &str = "it is not among the devices to splice on";

/// Returns the device of these on which the packets of `d` are seen as well.
fn above<'a>(d: &Device, of: &[&'a Device]) -> Option<&'a Device> {
    of.iter().find(|upper| d.master == Some(upper.index) || upper.lower == Some(d.index)).copied()
}

/// Returns the indices of the requested devices.
pub(crate) fn wanted_devices(names: &[String], all: &[Device]) -> Result<Vec<u32>, OpenError> {
    let named = |name: &String| all.iter().find(|d| d.ethernet && d.name == *name);
    let named: Vec<_> =
        names.iter().map(|n| named(n).ok_or_else(|| OpenError::Device(n.clone()))).collect::<Result<_, _>>()?;
    if let Some((lower, upper)) = named.iter().find_map(|d| Some((d, above(d, &named)?))) {
        return Err(OpenError::Stacked { lower: lower.name.clone(), upper: upper.name.clone() });
    }
    Ok(wanted(names, all).iter().map(|d| d.index).collect())
}

/// Fails if packets of these devices cannot be delivered to their peers.
pub(crate) fn refuse_hindered(names: &[String], attached: &[u32], all: &[Device]) -> Result<(), OpenError> {
    for name in names {
        let refuse = |why| OpenError::Peer { device: name.clone(), why };
        let device = named(name, attached, all)?.ok_or_else(|| refuse(NOT_AMONG))?;
        device.hindrance.map_or(Ok(()), |why| Err(refuse(why)))?;
    }
    Ok(())
}

/// Returns the indices of the devices on which to use XDP. `folder`: our pins, which may hold a link of an earlier process.
pub(crate) fn wanted_xdp(
    names: &[String],
    attached: &[u32],
    all: &[Device],
    folder: &Path,
) -> Result<Vec<u32>, OpenError> {
    let index = |name: &String| {
        let refuse = |why| OpenError::Xdp { device: name.clone(), why };
        let index = named(name, attached, all)?.ok_or_else(|| refuse(NOT_AMONG))?.index;
        if !xdp_abilities(index).receives {
            return Err(refuse("its driver has none, which the tcx entry does not need"));
        }
        if xdp_program(index)? != 0 && !folder.join(Hook::Early.pin(index)).exists() {
            return Err(refuse("another XDP program is there"));
        }
        Ok(index)
    };
    names.iter().map(index).collect()
}

/// Returns the id of a device's XDP program; 0 if there is none.
fn xdp_program(index: u32) -> Result<u32, OpenError> {
    let mut id = 0;
    // SAFETY: the library writes the number, which outlives the call.
    let asked = checked(unsafe { libbpf_sys::bpf_xdp_query_id(index as i32, 0, &mut id) });
    asked.map(|_| id).map_err(|source| OpenError::Kernel { what: "ask for an XDP program", source })
}

/// Where a program of tcx runs among those that are attached already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    First,
    Last,
    /// Behind others, but before `tpot_egress`: the data path must see packets that leave before they enter a tunnel.
    Inside,
}

/// Returns whether `tpot_egress` is attached to the device.
fn has_tunnels(device: u32) -> io::Result<bool> {
    let attached = attached_programs(device, true).map_err(io::Error::other)?;
    // most devices have no other programs there, and need no list
    let all = if attached.is_empty() { Vec::new() } else { loaded_programs().map_err(io::Error::other)? };
    Ok(all.iter().any(|p| attached.contains(&p.id) && p.name == "tpot_egress"))
}

/// Creates a link.
pub(crate) fn create(hook: Hook, place: Place, program: BorrowedFd<'_>, device: u32) -> io::Result<OwnedFd> {
    const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;
    let first = place == Place::First || place == Place::Inside && hook == Hook::Egress && has_tunnels(device)?;
    let place = if first { libbpf_sys::BPF_F_BEFORE } else { 0 };
    let (kind, flags) = match hook {
        Hook::Ingress => (libbpf_sys::BPF_TCX_INGRESS, place),
        Hook::Egress => (libbpf_sys::BPF_TCX_EGRESS, place),
        Hook::Early => (libbpf_sys::BPF_XDP, XDP_FLAGS_DRV_MODE),
    };
    link(program, device as i32, kind, flags)
}

/// Attaches a program of somebody else to a device by tcx, before those that are attached already, until the link is closed.
/// It runs where packets arrive (`ingress`), or where they leave. Errors are those of BPF_LINK_CREATE (bpf(2)).
pub fn attach_first(program: BorrowedFd<'_>, device: u32, ingress: bool) -> io::Result<OwnedFd> {
    create(if ingress { Hook::Ingress } else { Hook::Egress }, Place::First, program, device)
}

/// Lets a program choose the sockets of this network namespace that the kernel looks for, until the link is closed.
pub(crate) fn attach_lookup(program: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let namespace = fs::File::open("/proc/thread-self/ns/net")?;
    link(program, namespace.as_raw_fd(), libbpf_sys::BPF_SK_LOOKUP, 0)
}

/// Creates a link to a device or a network namespace.
fn link(program: BorrowedFd<'_>, target: i32, kind: libbpf_sys::bpf_attach_type, flags: u32) -> io::Result<OwnedFd> {
    // SAFETY: bpf_link_create_opts is plain data; all-zero but for its size and the flags is valid.
    let mut opts: libbpf_sys::bpf_link_create_opts = unsafe { std::mem::zeroed() };
    (opts.sz, opts.flags) = (size_of_val(&opts) as _, flags);
    // SAFETY: the program is loaded and alive; `opts` outlives the call.
    let fd = checked(unsafe { libbpf_sys::bpf_link_create(program.as_raw_fd(), target, kind, &opts) })?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Replaces the program of a link. No packet passes unseen.
pub(crate) fn replace(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: both descriptors are open; no options are passed.
    checked(unsafe { libbpf_sys::bpf_link_update(link.as_raw_fd(), program.as_raw_fd(), null()) }).map(drop)
}

/// Returns the id of a link's program. `None`: the link was detached, or its device is gone.
pub(crate) fn attached_program(link: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    // SAFETY: bpf_link_info is plain data; all-zero is valid.
    let mut info: libbpf_sys::bpf_link_info = unsafe { std::mem::zeroed() };
    let mut size = size_of_val(&info) as u32;
    // SAFETY: `info` has room for as many bytes as `size` says, and both outlive the call.
    checked(unsafe { libbpf_sys::bpf_link_get_info_by_fd(link.as_raw_fd(), &mut info, &mut size) })?;
    // SAFETY: the members of the union for tcx and XDP are plain integers, and begin with the device.
    let device = unsafe {
        match info.type_ {
            libbpf_sys::BPF_LINK_TYPE_XDP => info.__bindgen_anon_1.xdp.ifindex,
            _ => info.__bindgen_anon_1.tcx.ifindex,
        }
    };
    Ok((device != 0).then_some(info.prog_id))
}

/// Detaches a pinned link, which stays pinned. Does nothing to other pins.
pub(crate) fn detach(path: &Path) -> io::Result<()> {
    if !Hook::is_of(path) {
        return Ok(());
    }
    let link = bpffs::open(path)?;
    // SAFETY: the descriptor is open.
    checked(unsafe { libbpf_sys::bpf_link_detach(link.as_raw_fd()) }).map(drop)
}

/// Attaches a program of the data path with a pinned link, or updates the existing link.
pub(crate) fn attach(hook: Hook, program: BorrowedFd<'_>, device: u32, folder: &Path) -> Result<OwnedFd, OpenError> {
    if hook == Hook::Ingress {
        without_lro(device);
    }
    attach_at(hook, Place::Inside, program, device, folder)
}

/// Like [`attach`]. A link that exists keeps its place.
pub(crate) fn attach_at(
    hook: Hook,
    place: Place,
    program: BorrowedFd<'_>,
    device: u32,
    folder: &Path,
) -> Result<OwnedFd, OpenError> {
    let path = folder.join(hook.pin(device));
    if path.exists() {
        let taken = bpffs::open(&path).and_then(|link| replace(link.as_fd(), program).map(|()| link));
        if let Ok(link) = taken {
            return Ok(link);
        }
        // it was detached, or its device is gone and another device has got the index
        fs::remove_file(&path).map_err(|source| OpenError::Kernel { what: "remove a stale link", source })?;
    }
    let link = create(hook, place, program, device).map_err(|source| match hook {
        Hook::Early => OpenError::Kernel { what: "attach XDP", source },
        _ => OpenError::Kernel { what: "attach tcx", source },
    })?;
    bpffs::pin(link.as_fd(), &path).map_err(|source| OpenError::Kernel { what: "pin link", source })?;
    Ok(link)
}

/// Attaches the programs, in the order of [`Hook::ALL`]: tcx to `devices` and XDP to `xdp`, if there are any. Removes XDP from all
/// other devices.
pub(crate) fn attach_all(
    programs: &[BorrowedFd<'_>],
    devices: &[u32],
    xdp: &[u32],
    folder: &Path,
) -> Result<Vec<(Hook, u32, OwnedFd)>, OpenError> {
    let mut links = Vec::new();
    let tcx = devices.iter().flat_map(|device| [(Hook::Ingress, *device), (Hook::Egress, *device)]);
    for (hook, device) in tcx.chain(xdp.iter().map(|device| (Hook::Early, *device))) {
        links.push((hook, device, attach(hook, programs[hook as usize], device, folder)?));
    }
    let kept: Vec<_> = links.iter().map(|(hook, device, _)| hook.pin(*device)).collect();
    let entries = fs::read_dir(folder).map_err(|_| OpenError::NoBpffs(folder.to_owned()))?;
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(Hook::Early.name()) && !kept.contains(&name) {
            fs::remove_file(entry.path()).map_err(|source| OpenError::Kernel { what: "remove a link", source })?;
        }
    }
    Ok(links)
}
