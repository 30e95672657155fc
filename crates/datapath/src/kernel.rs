//! Loading, pinning and attaching the data path.

use crate::{
    ABI_VERSION, ExpectError, LegView, Pair, PathFlags, PathView, SwitchError, Tuple, abi,
    attach::{attach_all, refuse_hindered, wanted_devices, wanted_xdp},
    conntrack::Conntrack,
    devices::{Links, devices},
    follow::Counters,
    guard::{self, Guard},
    held::{Held, Mended},
    load::{Kept, OLDEST, kernel_release, load, missing_capabilities, tested_kernels},
    maps::{Maps, errno, from_bytes, sum_of},
    pages::{PATHS4, PATHS6, fill},
    pins::{Holdings, Owned, abi_value, default_pin, detach_all, refuse_others, version_in},
    rest::Rest,
    skel::SpliceSkelBuilder,
    sockets::namespace_cookie,
    vias::{Shown, VIAS, Via},
    ways::Ways,
};
use libbpf_rs::{
    MapCore, MapHandle,
    skel::{OpenSkel, Skel, SkelBuilder},
};
use nix::{libc, sys::eventfd::EventFd};
use std::{
    collections::HashMap,
    fs, io,
    mem::MaybeUninit,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard},
};

/// Options of [`Datapath::open`].
#[derive(Clone, Debug)]
pub struct Options {
    /// Devices to attach to. Empty: all Ethernet devices.
    pub devices: Vec<String>,
    /// Devices on which XDP, in the driver, forwards what it can before tcx sees it. Some offloads are turned off for it.
    pub xdp: Vec<String>,
    /// Devices (veth or netkit) whose peer is in another network namespace.
    /// Packets that leave over them are delivered directly to the peer.
    pub peer: Vec<String>,
    /// Directory on a bpffs for the pins of maps and links. `None`:
    /// one for this network namespace below `/sys/fs/bpf/longsplice`.
    pub pin: Option<PathBuf>,
    /// Maximum number of flows. Tables are preallocated for it.
    pub max_flows: u32,
    /// Size in bytes of the ring for copies of forwarded data. Rounded up
    /// to a power of two between 64 KB (the largest page size) and 1 GB.
    pub tap_ring: u32,
    /// Size in bytes of the ring for segments held by [`Datapath::freeze`]. Rounded in the same way.
    pub hold_ring: u32,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            devices: Vec::new(),
            xdp: Vec::new(),
            peer: Vec::new(),
            pin: None,
            max_flows: 65536,
            tap_ring: 0,
            hold_ring: 0,
        }
    }
}

/// Reasons why the data path cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Privileges are missing: root, or CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON.
    #[error("no privilege to load programs, {}: run as root or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON", lacking())]
    Privilege,
    /// The kernel is too old for the programs.
    #[error("Linux {0} is too old: splicing needs {major}.{minor} or newer", major = OLDEST.0, minor = OLDEST.1)]
    TooOld(String),
    /// The kernel is new enough, but its verifier rejects a program. This is a bug of longsplice.
    #[error("the verifier of Linux {release} refuses the program `{program}`: {why} ({log}; tested: {})",
        tested_kernels().join(", "))]
    Refused {
        /// Release of the kernel.
        release: String,
        /// Name of the program.
        program: String,
        /// The last line of the verifier's log.
        why: String,
        /// Where the complete log is.
        log: Kept,
    },
    /// The kernel was built without a required feature.
    #[error("Linux {release} lacks what the programs need: {what} ({log})")]
    Lacks {
        /// Release of the kernel.
        release: String,
        /// The missing feature, as the kernel or the library names it.
        what: String,
        /// Where the complete log is.
        log: Kept,
    },
    /// There is no bpffs.
    #[error("no bpffs at {0}: mount -t bpf bpf /sys/fs/bpf")]
    NoBpffs(PathBuf),
    /// Another version has pinned its maps, and they are not empty.
    #[error(
        "{path} has ABI version {found}, and this program {ABI_VERSION}: it holds {held}; run the version that made it until \
         they have ended, or end them with `longsplice stop --flush`"
    )]
    Abi {
        /// The directory of pins.
        path: PathBuf,
        /// The ABI version found.
        found: u32,
        /// What would be lost if the pins were removed.
        held: Holdings,
    },
    /// Another process of this network namespace holds the lock of the pins.
    #[error("another process runs the data path of this network namespace (it has locked {0})")]
    Running(PathBuf),
    /// A process of this network namespace, running or dead, has pinned a data path elsewhere.
    #[error(
        "another data path is attached to device number {0} of this network namespace, pinned in a bpffs that is not seen from here"
    )]
    Attached(u32),
    /// The directory of pins cannot be created.
    #[error("{path}: {source}: pins need a folder of a bpffs that this user may write: make {folder} for it as root, and chown it",
        folder = path.parent().unwrap_or(path).display())]
    Pins {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Another user has created the directory of pins.
    #[error("{0} belongs to another user: remove it")]
    Foreign(PathBuf),
    /// A device that was named does not exist, or is not an Ethernet device.
    #[error("device {0}: not found, or no Ethernet device")]
    Device(String),
    /// Two devices were named of which one carries the other's packets as well.
    #[error("packets of {upper} pass {lower} as well, and would be handled twice: name one of these devices")]
    Stacked {
        /// The port of a bridge or bond, or the device below a macvlan.
        lower: String,
        /// The bridge, bond or macvlan.
        upper: String,
    },
    /// XDP was requested on a device that does not support it.
    #[error("device {device}: XDP cannot be had there: {why}")]
    Xdp {
        /// The device.
        device: String,
        /// The reason, and what to do about it.
        why: &'static str,
    },
    /// Delivery to the peer was requested on a device that does not support it.
    #[error("device {device}: packets cannot be handed to its other end: {why}")]
    Peer {
        /// The device.
        device: String,
        /// The reason, and what to do about it.
        why: &'static str,
    },
    /// The kernel refused an operation that should have succeeded.
    #[error("{what}: {source}")]
    Kernel {
        /// The operation.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl OpenError {
    /// Returns whether a wrong device was named: only a change of the options helps.
    pub fn is_mistake(&self) -> bool {
        matches!(self, OpenError::Device(_) | OpenError::Xdp { .. } | OpenError::Peer { .. })
    }
}

/// Describes the missing privileges.
fn lacking() -> String {
    match missing_capabilities() {
        none if none.is_empty() => {
            "though no capability is missing (a container or a security module may forbid it)".into()
        }
        some => format!("without {}", some.join(", ")),
    }
}

pub(crate) fn kernel(what: &'static str) -> impl FnOnce(libbpf_rs::Error) -> OpenError {
    move |e| refused(what, errno(&e))
}

/// Converts an error number of the kernel.
pub(crate) fn refused(what: &'static str, errno: i32) -> OpenError {
    match errno {
        libc::EPERM => OpenError::Privilege,
        libc::EACCES if !nix::unistd::Uid::effective().is_root() => OpenError::Privilege,
        n => OpenError::Kernel { what, source: io::Error::from_raw_os_error(n) },
    }
}

/// Fields of `struct __sk_buff` for [`Datapath::test_run_with`].
#[derive(Clone, Copy, Debug, Default)]
pub struct TestContext {
    /// `skb->mark`.
    pub mark: u32,
    /// Payload bytes per segment of a large packet; 0: not a large packet.
    pub gso_size: u32,
    /// Number of segments.
    pub gso_segs: u32,
}

/// A loaded and attached data path. Dropping it leaves links and maps pinned: spliced flows go on.
pub struct Datapath {
    pub(crate) maps: Maps,
    pub(crate) switch: OwnedFd,
    pub(crate) ingress: OwnedFd,
    egress: OwnedFd,
    max_flows: u32,
    pin: PathBuf,
    /// Pins, links and lock. `None` after [`Datapath::remove`].
    held: Mutex<Option<Held>>,
    /// Names of the requested devices. Empty: all.
    pub(crate) devices: Vec<String>,
    pub(crate) xdp: Vec<String>,
    pub(crate) vias: Mutex<Vec<Via>>,
    pub(crate) shown: Mutex<Shown>,
    remotes: Mutex<Remotes>,
    pub(crate) links: Mutex<Links>,
    pub(crate) ways: Mutex<Ways>,
    pub(crate) followed: Counters,
    pub(crate) conntrack: Conntrack,
    /// Held during a switch, so that there is one at a time. Apart from triggers, only user space starts switches.
    pub(crate) switching: Mutex<()>,
    /// Held during a trace, so that there is one at a time.
    pub(crate) one_trace: Mutex<()>,
    pub(crate) wake: EventFd,
    pub(crate) rest: Rest,
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
        let wanted_flows = options.max_flows.max(16);
        if there.is_some() && !keeps_size(&pin, wanted_flows)? {
            there = None;
        }
        refuse_others(&wanted, &pin)?;
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
            open.maps.embryos.set_max_entries(n.clamp(1024, 65536))?;
            let ring = |bytes: u32| bytes.clamp(65536, 1 << 30).next_power_of_two();
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
            paths4: handle(&m.paths4)?,
            paths6: handle(&m.paths6)?,
            legs: handle(&m.legs)?,
            embryos: handle(&m.embryos)?,
            listeners: handle(&m.listeners)?,
            vias: handle(&m.vias)?,
            remotes6: handle(&m.remotes6)?,
            verdicts: handle(&m.verdicts)?,
            events: handle(&m.events)?,
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
        let mut held = Held::new(owned, [ingress?, egress?, early?], pinned, attached, guard)?;
        held.watch(&all)?;
        let ways = Ways::new().map_err(|source| OpenError::Kernel { what: "ask rtnetlink", source })?;
        let vias = (0..VIAS).map_while(|i| maps.via(i).filter(|v| v.ifindex != 0)).map(Via::from).collect();
        std::mem::forget(begun);
        Ok(Datapath {
            switch: dup(skel.progs.switch_flow.as_fd())?,
            ingress: dup(skel.progs.ingress.as_fd())?,
            egress: dup(skel.progs.egress.as_fd())?,
            vias: Mutex::new(vias),
            shown: Mutex::default(),
            remotes: Mutex::new(remotes),
            links: Mutex::new(links),
            ways: Mutex::new(ways),
            followed: Counters::default(),
            conntrack: Conntrack::default(),
            maps,
            max_flows: n,
            pin,
            held: Mutex::new(Some(held)),
            devices: options.devices.clone(),
            xdp: options.xdp.clone(),
            switching: Mutex::new(()),
            one_trace: Mutex::new(()),
            wake: EventFd::new().map_err(|e| OpenError::Kernel { what: "eventfd", source: e.into() })?,
            rest: Rest::default(),
        })
    }

    /// Returns the maximum number of flows.
    pub fn max_flows(&self) -> u32 {
        self.max_flows
    }

    /// Returns the indices of the devices attached to.
    pub fn attached(&self) -> Vec<u32> {
        self.held().as_ref().map(Held::devices).unwrap_or_default()
    }

    /// Tracks connections to this address from their SYN on.
    pub fn listen(&self, addr: SocketAddr) -> io::Result<()> {
        self.maps.listen(addr, Some(abi::listens::LISTENS))
    }

    /// Stops tracking new connections to this address.
    pub fn unlisten(&self, addr: SocketAddr) -> io::Result<()> {
        self.maps.listen(addr, None)
    }

    /// Prepares the record of a connection that is about to be opened from `leg.local`. If `client` is given, the connection
    /// is opened on behalf of that leg; returns the MSS in bytes that its host announced, if known. If there is no room, the
    /// client's leg gives its record back, unless it has been in a switch: it cannot be spliced, but others can.
    pub fn expect(&self, leg: &Tuple, client: Option<&Tuple>) -> Result<Option<u16>, ExpectError> {
        self.maps.expect(leg, client, 0)
    }

    /// Removes the entries of a leg whose connection is over, or was never opened.
    pub fn forget(&self, leg: &Tuple) {
        self.forget_if(abi::path_op::PATH_REMOVE, leg, None);
    }

    /// Removes the entries of both legs of a flow, in one call. The order of the legs does not matter.
    pub fn forget_flow(&self, [a, b]: [&Tuple; 2]) {
        self.forget_if(abi::path_op::PATH_REMOVE, a, Some(b));
    }

    fn forget_if(&self, op: abi::path_op, leg: &Tuple, other: Option<&Tuple>) -> [bool; 2] {
        let gone = self.maps.forget(op, leg, other);
        self.free_remotes([Some(leg), other], gone);
        gone
    }

    /// Frees what belongs to entries that were removed.
    pub(crate) fn free_remotes(&self, legs: [Option<&Tuple>; 2], gone: [bool; 2]) {
        self.rest.begin();
        let mut remotes = self.remotes.lock().expect("no panic under this lock");
        legs.into_iter().zip(gone).filter_map(|(leg, gone)| leg.filter(|_| gone)).for_each(|l| remotes.free(l));
    }

    /// Gives back the records of both legs of a flow that will not be spliced, except legs that have been in
    /// a switch. Their sockets go on without records. Returns for each leg whether its record was given back.
    pub fn give_back(&self, legs: Pair<&Tuple>) -> Pair<bool> {
        self.forget_if(abi::path_op::PATH_RETURN, legs.client, Some(legs.server)).into()
    }

    /// Removes the entries of one or both legs of a flow that is over, except legs whose port is used for a new connection.
    pub fn forget_ended(&self, leg: &Tuple, other: Option<&Tuple>) {
        self.forget_if(abi::path_op::PATH_CLEAR, leg, other);
    }

    pub(crate) fn forget_leg(&self, leg: &Tuple) {
        self.maps.forget_leg(leg);
    }

    pub(crate) fn insert_leg(&self, leg: &Tuple, record: &abi::leg) -> io::Result<()> {
        self.maps.insert_leg(leg, record)
    }

    /// Returns whether there was no room for this leg when the client completed
    /// its handshake. Remembered until many other clients have sent SYNs.
    pub fn found_no_room(&self, leg: &Tuple) -> bool {
        self.maps.found_no_room(leg)
    }

    /// Returns the record of a leg.
    pub fn leg(&self, leg: &Tuple) -> Option<LegView> {
        self.maps.leg(leg)
    }

    /// Returns the path entry of packets that arrive on `leg`.
    pub fn path(&self, leg: &Tuple) -> Option<PathView> {
        self.maps.path(leg)
    }

    /// Returns the path entries of both directions of a flow, if both exist.
    pub fn paths_of(&self, legs: Pair<&Tuple>) -> Option<Pair<PathView>> {
        self.maps.paths_of(legs.into()).map(Pair::from)
    }

    /// Returns the leg on which packets of `leg` leave, if it is or was spliced.
    pub fn other_leg(&self, leg: &Tuple) -> Option<Tuple> {
        self.maps.other_leg(leg)
    }

    /// Returns whether the flow of this leg has ended. Its entries stay for a while, for late packets.
    pub fn is_over(&self, leg: &Tuple) -> bool {
        let paths = self.other_leg(leg).and_then(|other| self.maps.paths_of([leg, &other]));
        paths.is_none_or(|paths| PathView::are_over(paths.each_ref()))
    }

    /// Returns all legs.
    pub fn legs(&self) -> Vec<(Tuple, LegView)> {
        self.maps.all_legs()
    }

    /// Returns all path entries, of legs and of spliced flows.
    pub fn paths(&self) -> Vec<(Tuple, PathView)> {
        self.paths_as(abi::path_op::PATH_NEXT)
    }

    /// Returns all path entries that are not in forwarding mode.
    pub fn stopped_paths(&self) -> Vec<(Tuple, PathView)> {
        self.paths_as(abi::path_op::PATH_STOPPED)
    }

    fn paths_as(&self, op: abi::path_op) -> Vec<(Tuple, PathView)> {
        self.maps.all_paths(op).unwrap_or_else(|error| {
            tracing::warn!(%error, "path entries cannot be read");
            Vec::new()
        })
    }

    /// Calls `f` with each path entry in forwarding mode, until it returns false. The table may change meanwhile.
    pub fn each_forwarded(&self, mut f: impl FnMut(&Tuple, &PathView) -> bool) -> io::Result<()> {
        self.maps.walk(abi::path_op::PATH_NEXT, |t, e| {
            let path = PathView::new(&e.p);
            path.flags & PathFlags::SPLICED == 0 || f(&t, &path)
        })
    }

    /// Returns the counters since the maps were created: names and numbers of packets.
    pub fn verdicts(&self) -> io::Result<Vec<(&'static str, u64)>> {
        self.maps.verdicts()
    }

    /// Returns how many legs have found no room since the maps were created: the verdict `table-full`.
    pub fn legs_without_room(&self) -> io::Result<u64> {
        sum_of(&self.maps.verdicts, abi::verdict::V_TABLE_FULL.0)
    }

    /// Returns the index in `remotes6` for the IPv6 address to which packets of this IPv4 leg go. Assigns one if necessary.
    pub(crate) fn remote_for(&self, leg: &Tuple) -> Result<u32, SwitchError> {
        self.remotes.lock().expect("no panic under this lock").take(leg).ok_or(SwitchError::Full)
    }

    /// Runs the ingress or egress program on one packet, for tests. Writes
    /// the resulting packet to `out`, and returns the program's return code.
    pub fn test_run(&self, egress: bool, packet: &[u8], out: &mut Vec<u8>) -> io::Result<i32> {
        self.test_run_with(egress, packet, &TestContext::default(), out)
    }

    /// Runs a program like [`Datapath::test_run`], with metadata that the kernel keeps beside the packet's bytes.
    pub fn test_run_with(
        &self,
        egress: bool,
        packet: &[u8],
        context: &TestContext,
        out: &mut Vec<u8>,
    ) -> io::Result<i32> {
        let TestContext { mark, gso_size, gso_segs } = *context;
        // SAFETY: __sk_buff is plain data; the kernel requires unset fields and padding to be zero.
        let mut skb: abi::__sk_buff = unsafe { std::mem::zeroed() };
        (skb.mark, skb.gso_size, skb.gso_segs) = (mark, gso_size, gso_segs);
        let fd = if egress { &self.egress } else { &self.ingress };
        // SAFETY: bpf_test_run_opts is plain data; all-zero is valid.
        let mut opts: libbpf_sys::bpf_test_run_opts = unsafe { std::mem::zeroed() };
        out.resize(packet.len() + 256, 0);
        opts.sz = size_of_val(&opts) as _;
        opts.data_in = packet.as_ptr().cast();
        opts.data_size_in = packet.len() as u32;
        opts.data_out = out.as_mut_ptr().cast();
        opts.data_size_out = out.len() as u32;
        opts.ctx_in = (&raw const skb).cast();
        opts.ctx_size_in = size_of_val(&skb) as u32;
        opts.repeat = 1;
        // SAFETY: the pointers and sizes are those of live buffers.
        let r = unsafe { libbpf_sys::bpf_prog_test_run_opts(fd.as_raw_fd(), &mut opts) };
        if r < 0 {
            return Err(io::Error::from_raw_os_error(-r));
        }
        out.truncate(opts.data_size_out as usize);
        Ok(opts.retval as i32)
    }

    /// Checks whether everything is still pinned and attached, and restores it. Legs whose
    /// segments went to their sockets unseen are no longer tracked, and cannot be spliced.
    pub fn mend(&self) -> Result<Mended, OpenError> {
        let mistrust = || {
            let legs = self.maps.all_legs();
            legs.iter().filter(|(_, l)| l.parked_at().is_none()).try_for_each(|(t, _)| self.maps.mistrust(t))
        };
        self.held().as_mut().map_or(Ok(Mended::default()), |held| held.mend(mistrust))
    }

    /// Detaches from all devices and removes the maps. No flow survives this.
    pub fn remove(&self) -> io::Result<()> {
        self.held().take().map_or(Ok(()), Held::remove)
    }

    pub(crate) fn held(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().expect("no panic under this lock")
    }

    /// Returns the directory of the pins.
    pub fn pin(&self) -> &Path {
        &self.pin
    }
}

/// Indices in `remotes6`, one for each flow from IPv4 to IPv6.
#[derive(Debug, Default)]
struct Remotes {
    taken: HashMap<Tuple, u32>,
    free: Vec<u32>,
    next: u32,
}

impl Remotes {
    const MOST: u32 = 65536;

    /// Collects the indices that pinned flows use.
    fn taken_by(maps: &Maps) -> io::Result<Remotes> {
        let crossing =
            |p: &PathView| p.flags & (PathFlags::CROSS | PathFlags::SPLICED) == PathFlags::CROSS | PathFlags::SPLICED;
        let mut taken = HashMap::new();
        // indices are assigned from 0 on: a useless walk through a million entries would delay others
        if maps.has_remotes()? {
            maps.each_path(|t, e| {
                let p = PathView::new(&e.p);
                if crossing(&p) {
                    taken.insert(t, p.remote4);
                }
            })?;
        }
        let next = taken.values().max().map_or(0, |n| n + 1);
        Ok(Remotes { taken, free: Vec::new(), next })
    }

    fn take(&mut self, leg: &Tuple) -> Option<u32> {
        if let Some(i) = self.taken.get(leg) {
            return Some(*i);
        }
        let i = self.free.pop().or_else(|| (self.next < Self::MOST).then_some(self.next))?;
        self.next = self.next.max(i + 1);
        self.taken.insert(*leg, i);
        Some(i)
    }

    fn free(&mut self, leg: &Tuple) {
        self.free.extend(self.taken.remove(leg));
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
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}
