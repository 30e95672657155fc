//! Loading, pinning and attaching the data path.

use crate::{
    ABI_VERSION, Datapath, abi,
    attach::{attach_all, refuse_hindered, wanted_devices, wanted_xdp},
    attachment::Attachment,
    conntrack::Conntrack,
    devices::{Links, devices},
    error::{OpenError, kernel},
    guard::{self, Guard},
    load::load,
    maps::{Maps, from_bytes},
    pages::{PATHS4, PATHS6, embryos, fill, ring},
    pinned::{Holdings, abi_value, version_in},
    pins::{Owned, default_pin, detach_all, refuse_others},
    remotes::Remotes,
    requirements::{kernel_release, missing_capabilities},
    rest::Rest,
    skel::SpliceSkelBuilder,
    sockets::namespace_cookie,
    vias::NextHops,
};
use libbpf_rs::{
    MapCore, MapHandle,
    skel::{OpenSkel, Skel, SkelBuilder},
};
use nix::sys::eventfd::EventFd;
use std::{
    fs, io,
    mem::MaybeUninit,
    ops::RangeInclusive,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::{Mutex, atomic::AtomicBool},
};

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
}

impl Options {
    /// Range of [`Self::max_flows`]. Other numbers are moved to the nearer end.
    pub const FLOWS: RangeInclusive<u32> = 16..=1 << 24;
    /// Range of the sizes of rings in bytes: 64 KB (the largest page size) to 1 GB. Other sizes
    /// are moved to the nearer end; the result is rounded up to a power of two.
    pub const RING: RangeInclusive<u32> = 1 << 16..=1 << 30;

    /// Checks the named devices as [`Datapath::open`] does. Returns the names of those to which it would attach.
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
        }
    }
}

const PINNED: [&str; 14] = [
    "paths4",
    "paths6",
    "entries",
    "legs",
    "embryos",
    "listeners",
    "vias",
    "remotes6",
    "fragment_trains",
    "idents",
    "verdicts",
    "aheads",
    "events",
    "abi",
];

impl Datapath {
    /// Loads the programs, takes over pinned maps of the same ABI or creates new ones, and attaches to the
    /// devices. Existing links are updated to the new programs atomically, so no packet passes unseen.
    pub fn open(options: &Options) -> Result<Datapath, OpenError> {
        // report wrong options before anything else, and before anything is changed
        let all = devices().map_err(|source| OpenError::Kernel { what: "list devices", source })?;
        let wanted = wanted_devices(&options.devices, &all)?;
        if let (release, true) = kernel_release() {
            return Err(OpenError::TooOld(release));
        }
        // The load would fail, too, but only after the verifier has taken its time: without CAP_PERFMON, many seconds.
        if !missing_capabilities().is_empty() {
            return Err(OpenError::Privilege);
        }
        let pin = match &options.pin {
            Some(p) => p.clone(),
            None => default_pin().map_err(|source| OpenError::Kernel { what: "network namespace", source })?,
        };
        refuse_hindered(&options.peer, &wanted, &all)?;
        let xdp = wanted_xdp(&options.xdp, &wanted, &all, &pin)?;
        let links = Links::new(!options.xdp.is_empty(), options.peer.clone());
        let owned = Owned::take(&pin)?;
        let namespace = namespace_cookie()
            .map_err(|source| OpenError::Kernel { what: "cookie of the network namespace", source })?;
        let mut there = pinned_abi(&pin)?;
        if there.is_some_and(|abi| abi.namespace != namespace) {
            tracing::info!(pin = %pin.display(), "what is pinned belonged to a namespace that is gone: removed");
            clear(&pin)?;
            there = None;
        }
        if let Some(abi::abi { version: found, .. }) = there.filter(|abi| abi.version != ABI_VERSION) {
            remove_other_version(&pin, found)?;
            there = None;
        }
        if there.is_some() && PINNED.iter().any(|name| !pin.join(name).exists()) {
            tracing::warn!(pin = %pin.display(), "somebody has removed pins of a process that is gone: its flows are lost");
            clear(&pin)?;
            there = None;
        }
        let wanted_flows = options.max_flows.clamp(*Options::FLOWS.start(), *Options::FLOWS.end());
        if there.is_some() && !keeps_size(&pin, wanted_flows)? {
            there = None;
        }
        refuse_others(&all, &pin)?;
        if there.is_none() {
            remove_unfinished(&pin)?;
        }
        let seed = there.map_or_else(random, |abi| abi.seed);
        let n = there.map_or(Ok(wanted_flows), |_| pinned_flows(&pin))?;

        let mut object = MaybeUninit::uninit();
        let mut open = SpliceSkelBuilder::default().open(&mut object).map_err(kernel("open object"))?;
        let size = kernel("table size");
        let constants = open.maps.rodata_data.as_mut().expect("the object has constants");
        let (pages4, pages6) = (PATHS4.pages(n), PATHS6.pages(n));
        (constants.pages4, constants.pages6, constants.hash_seed) = (pages4, pages6, seed);
        (|| {
            open.maps.paths4.set_max_entries(pages4)?;
            open.maps.paths6.set_max_entries(pages6)?;
            open.maps.legs.set_max_entries(n.saturating_mul(2))?;
            open.maps.embryos.set_max_entries(embryos(n))?;
            open.maps.held.set_max_entries(ring(options.hold_ring))?;
            open.maps.taps.set_max_entries(ring(options.tap_ring))
        })()
        .map_err(size)?;
        for mut map in open.open_object_mut().maps_mut() {
            let name = map.name().to_string_lossy().into_owned();
            if PINNED.contains(&name.as_str()) {
                map.set_pin_path(pin.join(&name)).map_err(kernel("pin path"))?;
            }
        }
        let has_guard = guard::has_guard();
        open.progs.guard.set_autoload(has_guard);
        let begun = Begun(there.is_none().then_some(&pin));
        let skel = load(open)?;
        let handle = |m: &libbpf_rs::MapMut<'_>| MapHandle::try_from(&**m).map_err(kernel("map handle"));
        let dup = |fd: std::os::fd::BorrowedFd<'_>| {
            fd.try_clone_to_owned().map_err(|source| OpenError::Kernel { what: "program descriptor", source })
        };
        let m = &skel.maps;
        let maps = Maps {
            path_entry: dup(skel.progs.path_entry.as_fd())?,
            clear_ended: dup(skel.progs.clear_ended.as_fd())?,
            paths4: handle(&m.paths4)?,
            paths6: handle(&m.paths6)?,
            legs: handle(&m.legs)?,
            embryos: handle(&m.embryos)?,
            listeners: handle(&m.listeners)?,
            listened_ports: handle(&m.listened_ports)?,
            vias: handle(&m.vias)?,
            remotes6: handle(&m.remotes6)?,
            verdicts: handle(&m.verdicts)?,
            events: handle(&m.events)?,
            polling: handle(&m.polling)?,
            taps: handle(&m.taps)?,
            traces: handle(&m.traces)?,
            tracing: handle(&m.tracing)?,
            held: handle(&m.held)?,
            holding: handle(&m.holding)?,
            handshakes: handle(&m.handshakes)?,
            abi: handle(&m.abi)?,
            unheld: handle(&m.unheld)?,
        };
        if there.is_none() {
            for table in [&maps.paths4, &maps.paths6] {
                fill(table).map_err(|source| OpenError::Kernel { what: "tables of path entries", source })?;
            }
        }
        // The library reads this from a file, once. Read it now: later there may be no free descriptor.
        libbpf_rs::num_possible_cpus().map_err(kernel("number of processors"))?;
        let remotes =
            Remotes::taken_by(&maps).map_err(|source| OpenError::Kernel { what: "reading path entries", source })?;
        maps.unlisten_all();
        maps.set_abi(seed, namespace).map_err(|source| OpenError::Kernel { what: "ABI version", source })?;

        let programs = [&skel.progs.ingress, &skel.progs.egress, &skel.progs.early];
        let attached = attach_all(programs.map(|p| p.as_fd()), &wanted, &xdp, &pin)?;
        refuse_others(&all, &pin)?; // one that has started at the same time: whoever attaches last sees the other
        let mut pinned = Vec::new();
        for map in skel.object().maps() {
            let name = map.name().to_string_lossy().into_owned();
            if PINNED.contains(&name.as_str()) {
                pinned.push((name, dup(map.as_fd())?));
            }
        }
        let [ingress, egress, early] = programs.map(|p| dup(p.as_fd()));
        let guard = || Ok(Guard::new(dup(skel.progs.guard.as_fd())?, handle(&m.watched)?));
        let guard = has_guard.then(guard).transpose()?;
        let mut attachment = Attachment::new(owned, [ingress?, egress?, early?], pinned, attached, guard)?;
        attachment.watch(&all)?;
        let next_hops =
            NextHops::new(&maps, links).map_err(|source| OpenError::Kernel { what: "ask rtnetlink", source })?;
        std::mem::forget(begun);
        Ok(Datapath {
            switch: dup(skel.progs.switch_flow.as_fd())?,
            ingress: dup(skel.progs.ingress.as_fd())?,
            egress: dup(skel.progs.egress.as_fd())?,
            next_hops,
            remotes: Mutex::new(remotes),
            conntrack: Conntrack::default(),
            maps,
            max_flows: n,
            pin,
            attachment: Mutex::new(Some(attachment)),
            devices: options.devices.clone(),
            xdp: options.xdp.clone(),
            switching: Mutex::new(()),
            one_trace: Mutex::new(()),
            wake: EventFd::new().map_err(|e| OpenError::Kernel { what: "eventfd", source: e.into() })?,
            polls: AtomicBool::new(false),
            rest: Rest::default(),
        })
    }
}

/// Returns the ABI record of the pinned maps. `None` also if a process died before it had finished creating them.
fn pinned_abi(pin: &Path) -> Result<Option<abi::abi>, OpenError> {
    let Some(value) = abi_value(pin).map_err(|source| OpenError::Kernel { what: "read pinned map", source })? else {
        return Ok(None);
    };
    match version_in(&value) {
        0 => Ok(None),
        found if value.len() < size_of::<abi::abi>() => remove_other_version(pin, found).map(|()| None),
        _ => Ok(Some(from_bytes(&value))),
    }
}

/// Removes the pins of another version, if they hold nothing.
fn remove_other_version(pin: &Path, found: u32) -> Result<(), OpenError> {
    let held = Holdings::of(pin).map_err(|source| OpenError::Kernel { what: "read pinned maps", source })?;
    if held != Holdings::default() {
        return Err(OpenError::Abi { path: pin.to_owned(), found, held });
    }
    tracing::info!(pin = %pin.display(), "what is pinned is of another version, and holds nothing: removed");
    clear(pin)
}

/// Removes the maps of a process that died before it attached anything.
fn remove_unfinished(pin: &Path) -> Result<(), OpenError> {
    for name in PINNED {
        match fs::remove_file(pin.join(name)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(OpenError::Kernel { what: "remove pinned maps", source: e });
            }
            _ => {}
        }
    }
    Ok(())
}

/// Empties the directory, which is locked itself. Everything that was pinned is detached and freed.
fn clear(pin: &Path) -> Result<(), OpenError> {
    detach_all(pin);
    let empty = || fs::read_dir(pin)?.try_for_each(|entry| fs::remove_file(entry?.path()));
    empty().map_err(|source| OpenError::Kernel { what: "remove pinned maps and links", source })
}

/// Removes what a start has pinned and attached, if the start fails. Only where nothing was pinned before.
struct Begun<'a>(Option<&'a PathBuf>);

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.map(|pin| clear(pin)) {
            tracing::warn!(%error, "pins of a start that has failed stay");
        }
    }
}

/// Returns whether the pinned tables can be used. Tables that hold
/// something keep their size; empty ones of another size are removed.
fn keeps_size(pin: &Path, wanted: u32) -> Result<bool, OpenError> {
    let is = pinned_flows(pin)?;
    if is == wanted {
        return Ok(true);
    }
    let held = Holdings::of(pin).map_err(|source| OpenError::Kernel { what: "read pinned maps", source })?;
    if held == Holdings::default() {
        clear(pin)?;
        return Ok(false);
    }
    tracing::warn!(
        "the tables of an earlier process have room for {is} flows and hold {held}: they stay as they are, and --max-flows {wanted} \
         is for the next start that finds them empty; `longsplice stop --flush` ends what they hold"
    );
    Ok(true)
}

/// Returns the number of flows for which the pinned maps were created.
fn pinned_flows(pin: &Path) -> Result<u32, OpenError> {
    let legs = MapHandle::from_pinned_path(pin.join("legs")).map_err(kernel("open pinned map"))?;
    Ok(legs.max_entries() / 2)
}

/// Returns a random number, from the keys that the standard library draws for its hashes.
pub(crate) fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}
