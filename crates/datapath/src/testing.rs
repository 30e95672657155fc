//! Test access: puts any state into the maps, reads the object's BTF, and runs the verifier. For tests of single packets,
//! of the layout that both sides share, and of what the programs need from a kernel. Programs have no use for it.

mod busy;

pub use self::busy::Busy;
pub use crate::names::{VIA_ROOM_SHIFT, VIA_TAP};
use crate::{
    AbiId, Connection, Datapath, Pair, SwitchError, Tuple, abi,
    attaching::attach,
    network::devices,
    switching::switch::bare,
    tables::maps::{bytes_of, errno, from_bytes, sum_of},
};
use libbpf_rs::{
    AsRawLibbpf, MapCore, MapFlags, MapHandle, MapType, ObjectBuilder,
    btf::{Btf, types::Composite},
};
use std::{
    ffi::CStr,
    fs, io,
    net::Ipv6Addr,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    path::Path,
};

/// The compiled programs of the data path: an ELF file for the machine `bpf`.
pub const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/splice.bpf.o"));
/// The same for translucent proxying.
pub const TPOT_OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/tpot.bpf.o"));
/// The same for the router of a farm of translucent proxies.
pub const TPOT_ROUTER_OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/tpot_router.bpf.o"));
/// The same for the list of loaded programs.
pub const PROGRAMS_OBJECT: &[u8] = crate::attaching::programs::OBJECT;

/// Lets the named device of this network namespace have super-packets of up to `bytes` bytes, in both families (BIG TCP).
pub fn set_largest(device: &str, bytes: u32) -> io::Result<()> {
    let named = devices::devices()?.into_iter().find(|d| d.name == device).ok_or(io::ErrorKind::NotFound)?;
    devices::set_largest(named.index, bytes)
}

/// The verifier's statistics on a program, from the running kernel.
#[derive(Clone, Debug)]
pub struct Verified {
    /// Name of the program.
    pub program: String,
    /// Number of instructions walked, each counted as often as it was. The kernel gives up at a million.
    pub instructions: u32,
    /// Bytes of stack of each function that the program contains, including itself.
    pub stacks: Vec<u32>,
}

/// Loads all programs of an object. Pins and attaches nothing.
pub fn verify(object: &[u8]) -> io::Result<Vec<Verified>> {
    const STATISTICS: u32 = 4; // BPF_LOG_STATS
    const LOG: usize = 65536; // statistics take a few lines
    let mut open = ObjectBuilder::default().open_memory(object).map_err(io_error)?;
    let mut logs: Vec<(String, Vec<u8>)> = Vec::new();
    for mut program in open.progs_mut() {
        program.set_log_level(STATISTICS);
        let mut log = vec![0; LOG];
        // SAFETY: the program is open; the buffer, whose size is passed, is not moved with its vector and outlives the load.
        let r = unsafe {
            libbpf_sys::bpf_program__set_log_buf(program.as_libbpf_object().as_ptr(), log.as_mut_ptr().cast(), LOG as _)
        };
        if r < 0 {
            return Err(io::Error::from_raw_os_error(-r));
        }
        logs.push((program.name().to_string_lossy().into_owned(), log));
    }
    open.load().map_err(io_error)?;
    logs.into_iter()
        .map(|(program, log)| {
            let log = CStr::from_bytes_until_nul(&log).map_err(io::Error::other)?.to_string_lossy();
            let after = |what| log.split_once(what).and_then(|(_, rest)| rest.split_whitespace().next());
            // Linux 7.3 prints a line for each function; before, there was one line for all
            let each = log
                .lines()
                .filter(|l| l.starts_with("subprog "))
                .filter_map(|l| l.split_once(" stack ")?.1.parse().ok());
            let each: Vec<u32> = each.collect();
            let joined = || after("stack depth ").and_then(|all| all.split('+').map(|n| n.parse().ok()).collect());
            let stacks = if each.is_empty() { joined() } else { Some(each) };
            let instructions = after("processed ").and_then(|n| n.parse().ok());
            let (instructions, stacks) =
                instructions.zip(stacks).ok_or_else(|| io::Error::other(format!("{program}: {log}")))?;
            Ok(Verified { program, instructions, stacks })
        })
        .collect()
}

fn io_error(e: libbpf_rs::Error) -> io::Error {
    io::Error::from_raw_os_error(errno(&e))
}

/// Detaches all programs, as any privileged process may. Their links stay pinned.
pub fn detach(d: &Datapath) -> io::Result<()> {
    fs::read_dir(d.pin())?.try_for_each(|entry| attach::detach(&entry?.path()))
}

/// Stops the flow of two legs like the first step of [`Datapath::recreate`], once it has no data in flight.
/// The order of the legs does not matter.
pub fn stop_released(d: &Datapath, legs: [&Tuple; 2]) -> Result<(), SwitchError> {
    let any = Pair::both(Connection::ANY);
    d.run(abi::switch_op::OP_STOP, Pair::from(legs.map(bare)).each_ref(), any, |args| args.fit = 1).map(drop)
}

/// Makes the pins look like those of another version or build.
pub fn put_abi(pin: &Path, AbiId { version, layout }: AbiId) -> io::Result<()> {
    let (map, key) = (MapHandle::from_pinned_path(pin.join("abi")).map_err(io_error)?, 0u32.to_ne_bytes());
    let value = map.lookup(&key, MapFlags::ANY).map_err(io_error)?.unwrap_or_default();
    let abi = abi::abi { version, layout, ..from_bytes(&value) };
    map.update(&key, bytes_of(&abi), MapFlags::ANY).map_err(io_error)
}

/// Makes the pins look like those of the first version, which did not record its namespace.
pub fn put_first_version(pin: &Path) -> io::Result<()> {
    // SAFETY: bpf_map_create_opts is plain data; all-zero is valid.
    let mut options: libbpf_sys::bpf_map_create_opts = unsafe { std::mem::zeroed() };
    options.sz = size_of_val(&options) as _;
    let mut map = MapHandle::create(MapType::Array, Some("abi"), 4, 16, 1, &options).map_err(io_error)?;
    let value: Vec<u8> = [1u64, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
    map.update(&0u32.to_ne_bytes(), &value, MapFlags::ANY).map_err(io_error)?;
    fs::remove_file(pin.join("abi"))?;
    map.pin(pin.join("abi")).map_err(io_error)
}

/// Writes a leg's record.
pub fn put_leg(d: &Datapath, t: &Tuple, leg: &abi::leg) -> io::Result<()> {
    d.maps.legs.update(bytes_of(&t.to_abi()), bytes_of(leg), MapFlags::ANY).map_err(io_error)
}

/// Reads a leg's record.
pub fn get_leg(d: &Datapath, t: &Tuple) -> Option<abi::leg> {
    Some(d.maps.leg(t)?.raw)
}

/// Writes what is known of the SYN of a client that has not completed its handshake. `irs`: its number.
pub fn put_embryo(d: &Datapath, t: &Tuple, irs: u32) -> io::Result<()> {
    let e = abi::embryo { irs, ..Default::default() };
    d.maps.embryos.update(bytes_of(&t.to_abi()), bytes_of(&e), MapFlags::ANY).map_err(io_error)
}

/// Returns the key of a leg's record, as in `leg.peer`.
pub fn key(t: &Tuple) -> abi::tuple {
    t.to_abi()
}

/// Writes the path entry of packets that arrive on `t`. `remote`: the host to which they go, for an IPv6 leg.
pub fn put_path(d: &Datapath, t: &Tuple, p: &abi::path, remote: [u32; 4]) -> io::Result<()> {
    d.maps.put_path(t, abi::path6 { p: *p, remote })
}

/// Returns the number of packets whose path entry, or another one of the same home, was found before their turn.
pub fn found_ahead(d: &Datapath) -> io::Result<u64> {
    sum_of(&pinned(d, "aheads")?, 0)
}

/// Writes a next hop.
pub fn put_via(d: &Datapath, index: u16, via: &abi::via) -> io::Result<()> {
    d.maps.set_via(index, via)
}

/// Writes the address to which a path with `PATH_CROSS` refers by its index.
pub fn put_remote6(d: &Datapath, index: u32, address: Ipv6Addr) -> io::Result<()> {
    let map = pinned(d, "remotes6")?;
    map.update(bytes_of(&index), &address.octets(), MapFlags::ANY).map_err(io_error)
}

/// Returns the state of a fragmented segment.
pub fn get_train(d: &Datapath, k: &abi::train_key) -> io::Result<Option<abi::train>> {
    let found = pinned(d, "fragment_trains")?.lookup(bytes_of(k), MapFlags::ANY).map_err(io_error)?;
    Ok(found.map(|b| from_bytes(&b)))
}

/// Writes the state of a fragmented segment.
pub fn put_train(d: &Datapath, k: &abi::train_key, t: &abi::train) -> io::Result<()> {
    pinned(d, "fragment_trains")?.update(bytes_of(k), bytes_of(t), MapFlags::ANY).map_err(io_error)
}

/// Returns one counter, by its index in [`crate::VERDICTS`].
pub fn verdict(d: &Datapath, place: usize) -> io::Result<u64> {
    let per_cpu = d.maps.verdicts.lookup_percpu(bytes_of(&(place as u32)), MapFlags::ANY).map_err(io_error)?;
    Ok(per_cpu.unwrap_or_default().iter().map(|b| u64::from_ne_bytes(b[..8].try_into().expect("8 bytes"))).sum())
}

fn pinned(d: &Datapath, map: &str) -> io::Result<MapHandle> {
    MapHandle::from_pinned_path(d.pin().join(map)).map_err(io_error)
}

/// Reads a field of /proc/self/fdinfo.
fn fdinfo(fd: BorrowedFd<'_>, field: &str) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    let value = text.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':')?.trim().parse().ok());
    value.ok_or_else(|| io::Error::other(format!("no {field} in fdinfo")))
}

/// Returns the kernel memory of a map in bytes.
pub fn memory(d: &Datapath, map: &str) -> io::Result<u64> {
    Ok(crate::map_size(&d.pin().join(map))?.bytes)
}

/// A struct or union in the loaded object's BTF.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Size in bytes.
    pub size: usize,
    /// Names and offsets in bytes. Members of anonymous structs are listed by themselves.
    pub members: Vec<(String, usize)>,
}

/// The types of the loaded programs.
#[derive(Debug)]
pub struct Types(Btf<'static>);

impl Types {
    /// Reads the types of what this data path has loaded.
    pub fn of(d: &Datapath) -> io::Result<Types> {
        let id = fdinfo(d.ingress.as_fd(), "prog_id")?;
        Btf::from_prog_id(id as u32).map(Types).map_err(io_error)
    }

    /// Returns a struct or union by name.
    pub fn layout(&self, name: &str) -> Option<Layout> {
        let c: Composite<'_> = self.0.type_by_name(name)?;
        let mut members = Vec::new();
        flatten(&self.0, c, 0, &mut members);
        Some(Layout { size: size_of_type(&c), members })
    }
}

fn size_of_type(c: &Composite<'_>) -> usize {
    use libbpf_rs::btf::HasSize;
    c.size()
}

fn flatten(btf: &Btf<'_>, c: Composite<'_>, base: usize, to: &mut Vec<(String, usize)>) {
    use libbpf_rs::btf::types::MemberAttr;
    for i in 0..c.len() {
        let m = c.get(i).expect("within its length");
        let bits = match m.attr {
            MemberAttr::Normal { offset } => offset,
            MemberAttr::BitField { offset, .. } => offset,
        };
        let at = base + bits as usize / 8;
        match m.name {
            Some(n) if !n.is_empty() => to.push((n.to_string_lossy().into_owned(), at)),
            _ => flatten(btf, btf.type_by_id(m.ty).expect("an anonymous member is a struct or union"), at, to),
        }
    }
}
