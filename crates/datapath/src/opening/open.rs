//! Opens the data path: plans, takes over what is pinned, sizes and loads the programs, attaches.

use crate::{
    Datapath, Options,
    attaching::attach::{attach_all, refuse_hindered, wanted_devices, wanted_xdp},
    attaching::attachment::Attachment,
    attaching::guard::{self, Guard},
    attaching::load::load,
    attaching::pins::{Owned, default_pin, refuse_others},
    error::{OpenError, kernel, system},
    hops::vias::NextHops,
    network::conntrack::Conntrack,
    network::devices::{Device, Links, devices},
    opening::takeover::{Begun, Tables},
    requirements::{kernel_release, missing_capabilities},
    skel::{OpenSpliceSkel, SpliceSkel, SpliceSkelBuilder},
    sockets::socket::namespace_cookie,
    tables::flow_records::FlowRecords,
    tables::maps::Maps,
    tables::pages::{PATHS4, PATHS6, embryos, fill, ring},
    tables::pinned_names::PINNED,
    tables::remotes::Remotes,
    tables::rest::Rest,
};
use libbpf_rs::{
    MapCore, MapHandle,
    skel::{OpenSkel, Skel, SkelBuilder},
};
use nix::sys::eventfd::EventFd;
use std::{
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Mutex, atomic::AtomicBool},
};

impl Datapath {
    /// Loads the programs, takes over pinned maps of the same ABI or creates new ones, and attaches to the
    /// devices. Existing links are updated to the new programs atomically, so no packet passes unseen.
    pub fn open(options: &Options) -> Result<Datapath, OpenError> {
        let plan = Plan::of(options)?;
        let owned = Owned::take(&plan.pin)?;
        let namespace = namespace_cookie().map_err(system("cookie of the network namespace"))?;
        let wanted = options.max_flows.clamp(*Options::FLOWS.start(), *Options::FLOWS.end());
        let tables = Tables::at(&plan.pin, namespace, wanted, &plan.all)?;

        let mut object = MaybeUninit::uninit();
        let mut open = SpliceSkelBuilder::default().open(&mut object).map_err(kernel("open object"))?;
        size(&mut open, options, &tables)?;
        pin_maps(&mut open, &plan.pin)?;
        let has_guard = guard::has_guard();
        open.progs.guard.set_autoload(has_guard);
        open.progs.early.set_autoload(plan.has_early); // a tenth of the verifier's work, for nothing if no device is to run it
        let begun = Begun(tables.are_new.then_some(&plan.pin));
        let skel = load(open)?;

        let maps = maps_of(&skel)?;
        if tables.are_new {
            for table in [&maps.paths4, &maps.paths6] {
                fill(table).map_err(system("tables of path entries"))?;
            }
        }
        // The library reads this from a file, once. Read it now: later there may be no free descriptor.
        libbpf_rs::num_possible_cpus().map_err(kernel("number of processors"))?;
        let remotes = Remotes::taken_by(&maps).map_err(system("reading path entries"))?;
        maps.unlisten_all(options.follows);
        maps.set_abi(tables.seed, namespace).map_err(system("ABI version"))?;

        let flow_records = FlowRecords::open(&plan.pin, tables.flows).map_err(system("records of flows"))?;
        let attachment = attach(&skel, &plan, owned, has_guard)?;
        let next_hops = NextHops::new(&maps, plan.links).map_err(system("ask rtnetlink"))?;
        std::mem::forget(begun);
        Ok(Datapath {
            switch: dup(skel.progs.switch_flow.as_fd())?,
            adopt: dup(skel.progs.adopt.as_fd())?,
            ingress: dup(skel.progs.ingress.as_fd())?,
            egress: dup(skel.progs.egress.as_fd())?,
            next_hops,
            remotes: Mutex::new(remotes),
            conntrack: Conntrack::default(),
            maps,
            max_flows: tables.flows,
            pin: plan.pin,
            attachment: Mutex::new(Some(attachment)),
            devices: options.devices.clone(),
            xdp: options.xdp.clone(),
            switching: Mutex::new(()),
            one_trace: Mutex::new(()),
            wake: EventFd::new().map_err(|e| system("eventfd")(e.into()))?,
            polls: AtomicBool::new(false),
            rest: Rest::default(),
            flow_records,
        })
    }
}

/// What is to be done, once the options are found to be right. Nothing has been changed yet.
struct Plan {
    /// All devices of the network namespace.
    all: Vec<Device>,
    /// Indices of those to attach to, and of those with XDP.
    wanted: Vec<u32>,
    xdp: Vec<u32>,
    /// Whether the XDP program is needed, now or by a device that comes later.
    has_early: bool,
    links: Links,
    /// Directory of pins.
    pin: PathBuf,
}

impl Plan {
    fn of(options: &Options) -> Result<Plan, OpenError> {
        let all = devices().map_err(system("list devices"))?;
        let wanted = wanted_devices(&options.devices, &all)?;
        if let (release, true) = kernel_release() {
            return Err(OpenError::TooOld(release));
        }
        // The load would fail, too, but only after the verifier has taken its time: without CAP_PERFMON, many seconds.
        if !missing_capabilities().is_empty() {
            return Err(OpenError::Privilege);
        }
        let pin = options.pin.clone().map_or_else(default_pin, Ok).map_err(system("network namespace"))?;
        refuse_hindered(&options.peer, &wanted, &all)?;
        let xdp = wanted_xdp(&options.xdp, &wanted, &all, &pin)?;
        let has_early = !options.xdp.is_empty();
        let links = Links::new(has_early, options.peer.clone());
        Ok(Plan { all, wanted, xdp, has_early, links, pin })
    }
}

/// Gives the tables and rings their sizes, and the programs what depends on these.
fn size(open: &mut OpenSpliceSkel<'_>, options: &Options, tables: &Tables) -> Result<(), OpenError> {
    let n = tables.flows;
    let constants = open.maps.rodata_data.as_mut().expect("the object has constants");
    let (pages4, pages6) = (PATHS4.pages(n), PATHS6.pages(n));
    (constants.pages4, constants.pages6, constants.hash_seed) = (pages4, pages6, tables.seed);
    let mut sizes = || {
        open.maps.paths4.set_max_entries(pages4)?;
        open.maps.paths6.set_max_entries(pages6)?;
        open.maps.legs.set_max_entries(n.saturating_mul(2))?;
        open.maps.embryos.set_max_entries(embryos(n))?;
        open.maps.held.set_max_entries(ring(options.hold_ring))?;
        open.maps.taps.set_max_entries(ring(options.tap_ring))
    };
    sizes().map_err(kernel("table size"))
}

/// Says where the maps are pinned: the load takes those that are there, and pins the others.
fn pin_maps(open: &mut OpenSpliceSkel<'_>, pin: &Path) -> Result<(), OpenError> {
    for mut map in open.open_object_mut().maps_mut() {
        let name = map.name().to_string_lossy().into_owned();
        if PINNED.contains(&name.as_str()) {
            map.set_pin_path(pin.join(&name)).map_err(kernel("pin path"))?;
        }
    }
    Ok(())
}

fn maps_of(skel: &SpliceSkel<'_>) -> Result<Maps, OpenError> {
    let m = &skel.maps;
    Ok(Maps {
        path_entry: dup(skel.progs.path_entry.as_fd())?,
        clear_ended: dup(skel.progs.clear_ended.as_fd())?,
        paths4: handle(&m.paths4)?,
        paths6: handle(&m.paths6)?,
        entries: handle(&m.entries)?,
        legs: handle(&m.legs)?,
        embryos: handle(&m.embryos)?,
        listeners: handle(&m.listeners)?,
        listened_ports: handle(&m.listened_ports)?,
        unclaimed: Mutex::default(),
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
    })
}

/// Attaches the programs, and keeps descriptors of all that is pinned.
fn attach(skel: &SpliceSkel<'_>, plan: &Plan, owned: Owned, has_guard: bool) -> Result<Attachment, OpenError> {
    let early = plan.has_early.then_some(&skel.progs.early);
    let programs: Vec<_> =
        [&skel.progs.ingress, &skel.progs.egress].into_iter().chain(early).map(|p| p.as_fd()).collect();
    let attached = attach_all(&programs, &plan.wanted, &plan.xdp, &plan.pin)?;
    refuse_others(&plan.all, &plan.pin)?; // one that has started at the same time: whoever attaches last sees the other
    let mut pinned = Vec::new();
    for map in skel.object().maps() {
        let name = map.name().to_string_lossy().into_owned();
        if PINNED.contains(&name.as_str()) {
            pinned.push((name, dup(map.as_fd())?));
        }
    }
    let programs = programs.into_iter().map(dup).collect::<Result<_, _>>()?;
    let guard = || Ok(Guard::new(dup(skel.progs.guard.as_fd())?, handle(&skel.maps.watched)?));
    let guard = has_guard.then(guard).transpose()?;
    let mut attachment = Attachment::new(owned, programs, pinned, attached, guard)?;
    attachment.watch(&plan.all)?;
    Ok(attachment)
}

fn handle(map: &libbpf_rs::MapMut<'_>) -> Result<MapHandle, OpenError> {
    MapHandle::try_from(&**map).map_err(kernel("map handle"))
}

fn dup(fd: BorrowedFd<'_>) -> Result<OwnedFd, OpenError> {
    fd.try_clone_to_owned().map_err(system("program descriptor"))
}
