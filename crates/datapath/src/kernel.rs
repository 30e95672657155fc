//! Loading, pinning, attaching.

use crate::{
    ABI_VERSION, ExpectError, LegView, PathFlags, PathView, SwitchError, Tuple, abi,
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

/// How to open the data path.
#[derive(Clone, Debug)]
pub struct Options {
    /// Devices to attach to; empty: all Ethernet devices.
    pub devices: Vec<String>,
    /// Devices of which XDP forwards what it can, in the driver, before tcx sees it. Some switch offloads off for it.
    pub xdp: Vec<String>,
    /// Devices, veth or netkit, whose other end is in another network namespace: what leaves by them arrives there directly.
    pub peer: Vec<String>,
    /// Where maps and links are pinned (bpffs). `None`: a folder of this network namespace below `/sys/fs/bpf/longsplice`.
    pub pin: Option<PathBuf>,
    /// How many flows at most; tables are preallocated for it.
    pub max_flows: u32,
    /// Bytes of the ring for copies of what is forwarded; made a power of two, 64 KB (the largest page) to 1 GB.
    pub tap_ring: u32,
    /// Bytes of the ring for what is held by [`Datapath::freeze`]; likewise.
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

/// Why the kernel path cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON, or root.
    #[error("no privilege to load programs, {}: run as root or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON", lacking())]
    Privilege,
    /// Nothing that is loaded here would run on it.
    #[error("Linux {0} is too old: splicing needs {major}.{minor} or newer", major = OLDEST.0, minor = OLDEST.1)]
    TooOld(String),
    /// The kernel is new enough, but its verifier does not accept a program. That is a mistake of ours.
    #[error("the verifier of Linux {release} refuses the program `{program}`: {why} ({log}; tested: {})",
        tested_kernels().join(", "))]
    Refused {
        /// Of the kernel.
        release: String,
        /// Which.
        program: String,
        /// Its last word on it.
        why: String,
        /// All of its words.
        log: Kept,
    },
    /// It was built without something.
    #[error("Linux {release} lacks what the programs need: {what} ({log})")]
    Lacks {
        /// Of the kernel.
        release: String,
        /// As the kernel or the library calls it.
        what: String,
        /// All that they said.
        log: Kept,
    },
    /// bpffs is not there.
    #[error("no bpffs at {0}: mount -t bpf bpf /sys/fs/bpf")]
    NoBpffs(PathBuf),
    /// Pinned by another version.
    #[error(
        "{path} has ABI version {found}, and this program {ABI_VERSION}: it holds {held}; run the version that made it until \
         they have ended, or end them with `longsplice stop --flush`"
    )]
    Abi {
        /// Where.
        path: PathBuf,
        /// Version found.
        found: u32,
        /// What would be lost with it.
        held: Holdings,
    },
    /// Another process of this namespace holds it.
    #[error("another process runs the data path of this network namespace (it has locked {0})")]
    Running(PathBuf),
    /// Another process of this namespace, or one that is gone, has pinned a data path elsewhere.
    #[error(
        "another data path is attached to device number {0} of this network namespace, pinned in a bpffs that is not seen from here"
    )]
    Attached(u32),
    /// The folder cannot be made.
    #[error("{path}: {source}: pins need a folder of a bpffs that this user may write: make {folder} for it as root, and chown it",
        folder = path.parent().unwrap_or(path).display())]
    Pins {
        /// Where.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Somebody else has made the folder first.
    #[error("{0} belongs to another user: remove it")]
    Foreign(PathBuf),
    /// A device named does not exist or is no Ethernet device.
    #[error("device {0}: not found, or no Ethernet device")]
    Device(String),
    /// Two devices were named of which one's packets pass the other as well.
    #[error("packets of {upper} pass {lower} as well, and would be handled twice: name one of these devices")]
    Stacked {
        /// A port, or the device below a macvlan.
        lower: String,
        /// The bridge or bond, or the macvlan.
        upper: String,
    },
    /// XDP was asked for where it cannot be had.
    #[error("device {device}: XDP cannot be had there: {why}")]
    Xdp {
        /// Which.
        device: String,
        /// What to do about it.
        why: &'static str,
    },
    /// Packets were to go straight to its other end.
    #[error("device {device}: packets cannot be handed to its other end: {why}")]
    Peer {
        /// Which.
        device: String,
        /// What to do about it.
        why: &'static str,
    },
    /// The kernel refused something that it should have.
    #[error("{what}: {source}")]
    Kernel {
        /// What was tried.
        what: &'static str,
        /// Its answer.
        source: io::Error,
    },
}

impl OpenError {
    /// Whether whoever named devices has to change that: nothing else would help.
    pub fn is_mistake(&self) -> bool {
        matches!(self, OpenError::Device(_) | OpenError::Xdp { .. } | OpenError::Peer { .. })
    }
}

/// What the privilege lacks.
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

/// What an error number of the kernel's means.
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
    /// How many segments.
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
    /// Until it is removed.
    held: Mutex<Option<Held>>,
    /// Names of the devices that were asked for; empty: all.
    pub(crate) devices: Vec<String>,
    pub(crate) xdp: Vec<String>,
    pub(crate) vias: Mutex<Vec<Via>>,
    pub(crate) shown: Mutex<Shown>,
    remotes: Mutex<Remotes>,
    pub(crate) links: Mutex<Links>,
    pub(crate) ways: Mutex<Ways>,
    pub(crate) followed: Counters,
    pub(crate) conntrack: Conntrack,
    /// One switch at a time: user space is the only one to begin them but for triggers.
    pub(crate) switching: Mutex<()>,
    /// One trace at a time.
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
    /// Loads the programs, takes over pinned maps of the same ABI or makes new ones, and attaches to the devices.
    /// Links that are there already get the new programs atomically: no packet passes unseen.
    pub fn open(options: &Options) -> Result<Datapath, OpenError> {
        // what is wrong with the options is said before anything else, and before anything is changed
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
        // The library reads it from a file, once: later there may be no descriptor for that.
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

    /// How many flows there may be.
    pub fn max_flows(&self) -> u32 {
        self.max_flows
    }

    /// Indices of the devices attached to.
    pub fn attached(&self) -> Vec<u32> {
        self.held().as_ref().map(Held::devices).unwrap_or_default()
    }

    /// Connections to this address are tracked from their SYN on.
    pub fn listen(&self, addr: SocketAddr) -> io::Result<()> {
        self.maps.listen(addr, Some(abi::listens::LISTENS))
    }

    /// No more.
    pub fn unlisten(&self, addr: SocketAddr) -> io::Result<()> {
        self.maps.listen(addr, None)
    }

    /// Prepares the record of a connection that is about to be opened from `leg.local`, and if it is on behalf of the leg `client`,
    /// the MSS that its host announced. Without room the client's leg gives its own back, unless it was in a switch before: it
    /// cannot be spliced, and others can.
    pub fn expect(&self, leg: &Tuple, client: Option<&Tuple>) -> Result<Option<u16>, ExpectError> {
        self.maps.expect(leg, client, 0)
    }

    /// Forgets a leg: its connection is over, or was never opened.
    pub fn forget(&self, leg: &Tuple) {
        self.forget_if(abi::path_op::PATH_REMOVE, leg, None);
    }

    /// Forgets both legs of a flow, at the price of one.
    pub fn forget_flow(&self, [a, b]: [&Tuple; 2]) {
        self.forget_if(abi::path_op::PATH_REMOVE, a, Some(b));
    }

    fn forget_if(&self, op: abi::path_op, leg: &Tuple, other: Option<&Tuple>) -> [bool; 2] {
        let gone = self.maps.forget(op, leg, other);
        self.free_remotes([Some(leg), other], gone);
        gone
    }

    /// Entries were removed: what goes with them.
    pub(crate) fn free_remotes(&self, legs: [Option<&Tuple>; 2], gone: [bool; 2]) {
        self.rest.begin();
        let mut remotes = self.remotes.lock().expect("no panic under this lock");
        legs.into_iter().zip(gone).filter_map(|(leg, gone)| leg.filter(|_| gone)).for_each(|l| remotes.free(l));
    }

    /// Both legs of a flow that is not to be spliced give their records back, unless they were in a switch before: their
    /// sockets go on without. Which have done so.
    pub fn give_back(&self, [a, b]: [&Tuple; 2]) -> [bool; 2] {
        self.forget_if(abi::path_op::PATH_RETURN, a, Some(b))
    }

    /// Forgets one leg or both of a flow that is over, but for those whose port is used for a new connection since.
    pub fn forget_ended(&self, leg: &Tuple, other: Option<&Tuple>) {
        self.forget_if(abi::path_op::PATH_CLEAR, leg, other);
    }

    pub(crate) fn forget_leg(&self, leg: &Tuple) {
        self.maps.forget_leg(leg);
    }

    pub(crate) fn insert_leg(&self, leg: &Tuple, record: &abi::leg) -> io::Result<()> {
        self.maps.insert_leg(leg, record)
    }

    /// Has a client completed its handshake when there was no room for its leg? Known until many others have sent SYNs.
    pub fn found_no_room(&self, leg: &Tuple) -> bool {
        self.maps.found_no_room(leg)
    }

    /// One leg.
    pub fn leg(&self, leg: &Tuple) -> Option<LegView> {
        self.maps.leg(leg)
    }

    /// One direction's entry: packets that come in on `leg`.
    pub fn path(&self, leg: &Tuple) -> Option<PathView> {
        self.maps.path(leg)
    }

    /// The entries of both directions of a flow, if both are there.
    pub fn paths_of(&self, [a, b]: [&Tuple; 2]) -> Option<[PathView; 2]> {
        self.maps.paths_of(a, b)
    }

    /// The leg where packets of `leg` go out, if it is or was spliced.
    pub fn other_leg(&self, leg: &Tuple) -> Option<Tuple> {
        self.maps.other_leg(leg)
    }

    /// Has the flow of this leg ended? Its entries stay for a while, for what is late.
    pub fn is_over(&self, leg: &Tuple) -> bool {
        let paths = self.other_leg(leg).and_then(|other| self.paths_of([leg, &other]));
        paths.is_none_or(|paths| PathView::are_over(&paths))
    }

    /// All legs.
    pub fn legs(&self) -> Vec<(Tuple, LegView)> {
        self.maps.all_legs()
    }

    /// All entries, of legs and of spliced flows.
    pub fn paths(&self) -> Vec<(Tuple, PathView)> {
        self.paths_as(abi::path_op::PATH_NEXT)
    }

    /// Those that are not in forwarding mode.
    pub fn stopped_paths(&self) -> Vec<(Tuple, PathView)> {
        self.paths_as(abi::path_op::PATH_STOPPED)
    }

    fn paths_as(&self, op: abi::path_op) -> Vec<(Tuple, PathView)> {
        self.maps.all_paths(op).unwrap_or_else(|error| {
            tracing::warn!(%error, "path entries cannot be read");
            Vec::new()
        })
    }

    /// Each entry in forwarding mode, for as long as the answer is true. The table may change meanwhile.
    pub fn each_forwarded(&self, mut f: impl FnMut(&Tuple, &PathView) -> bool) -> io::Result<()> {
        self.maps.walk(abi::path_op::PATH_NEXT, |t, e| {
            let path = PathView::new(&e.p);
            path.flags & PathFlags::SPLICED == 0 || f(&t, &path)
        })
    }

    /// Counters since the maps were made: label and packets.
    pub fn verdicts(&self) -> io::Result<Vec<(&'static str, u64)>> {
        self.maps.verdicts()
    }

    /// How many legs have found no room since the maps were made: the verdict `table-full`.
    pub fn legs_without_room(&self) -> io::Result<u64> {
        sum_of(&self.maps.verdicts, abi::verdict::V_TABLE_FULL.0)
    }

    /// Where the IPv6 address is kept that packets of this IPv4 leg go to.
    pub(crate) fn remote_for(&self, leg: &Tuple) -> Result<u32, SwitchError> {
        self.remotes.lock().expect("no panic under this lock").take(leg).ok_or(SwitchError::Full)
    }

    /// Runs the ingress or egress program over one packet, for tests: the packet out and the return code.
    pub fn test_run(&self, egress: bool, packet: &[u8], out: &mut Vec<u8>) -> io::Result<i32> {
        self.test_run_with(egress, packet, &TestContext::default(), out)
    }

    /// The same with what the kernel knows of a packet beside its bytes.
    pub fn test_run_with(
        &self,
        egress: bool,
        packet: &[u8],
        context: &TestContext,
        out: &mut Vec<u8>,
    ) -> io::Result<i32> {
        let TestContext { mark, gso_size, gso_segs } = *context;
        // SAFETY: __sk_buff is plain data; all-zero, in its padding too, is what the kernel wants of what is not set.
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

    /// Looks whether all is still pinned and attached, and puts it right. Legs whose bytes went to their sockets unseen are not
    /// tracked any more: they cannot be spliced.
    pub fn mend(&self) -> Result<Mended, OpenError> {
        let mistrust = || {
            let legs = self.maps.all_legs();
            legs.iter().filter(|(_, l)| l.parked_at().is_none()).try_for_each(|(t, _)| self.maps.mistrust(t))
        };
        self.held().as_mut().map_or(Ok(Mended::default()), |held| held.mend(mistrust))
    }

    /// Detaches from all devices and removes the maps: no flow survives this.
    pub fn remove(&self) -> io::Result<()> {
        self.held().take().map_or(Ok(()), Held::remove)
    }

    pub(crate) fn held(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().expect("no panic under this lock")
    }

    /// Where it is pinned.
    pub fn pin(&self) -> &Path {
        &self.pin
    }
}

/// Places in `remotes6`, one for each flow from IPv4 to IPv6.
#[derive(Debug, Default)]
struct Remotes {
    taken: HashMap<Tuple, u32>,
    free: Vec<u32>,
    next: u32,
}

impl Remotes {
    const MOST: u32 = 65536;

    /// Those in use by pinned flows.
    fn taken_by(maps: &Maps) -> io::Result<Remotes> {
        let crossing =
            |p: &PathView| p.flags & (PathFlags::CROSS | PathFlags::SPLICED) == PathFlags::CROSS | PathFlags::SPLICED;
        let mut taken = HashMap::new();
        // places are taken from the first on: a walk through a million entries for nothing would keep others waiting
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

/// What the maps that are pinned already were made with; `None` too if a process died before it was done with making them.
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

/// If nothing is lost with it.
fn remove_other_version(pin: &Path, found: u32) -> Result<(), OpenError> {
    let held = Holdings::of(pin).map_err(|source| OpenError::Kernel { what: "read pinned maps", source })?;
    if held != Holdings::default() {
        return Err(OpenError::Abi { path: pin.to_owned(), found, held });
    }
    tracing::info!(pin = %pin.display(), "what is pinned is of another version, and holds nothing: removed");
    clear(pin)
}

/// Maps of a process that died before it attached anything.
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

/// Empties the folder, which is locked itself: whatever was pinned is detached and freed.
fn clear(pin: &Path) -> Result<(), OpenError> {
    detach_all(pin);
    let empty = || fs::read_dir(pin)?.try_for_each(|entry| fs::remove_file(entry?.path()));
    empty().map_err(|source| OpenError::Kernel { what: "remove pinned maps and links", source })
}

/// What a start pins and attaches where nothing was. If it fails, nothing of it stays.
struct Begun<'a>(Option<&'a PathBuf>);

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.map(|pin| clear(pin)) {
            tracing::warn!(%error, "pins of a start that has failed stay");
        }
    }
}

/// Tables that hold something keep their size; others that are not as wanted are removed.
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

/// For how many flows the pinned maps were made.
fn pinned_flows(pin: &Path) -> Result<u32, OpenError> {
    let legs = MapHandle::from_pinned_path(pin.join("legs")).map_err(kernel("open pinned map"))?;
    Ok(legs.max_entries() / 2)
}

/// From the keys that the standard library draws for its own hashes.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}
