//! Puts any state into the maps, reads the object's BTF and asks the verifier: for tests that look at single packets, at the
//! layout that both sides share, and at what the programs ask of a kernel. A program has no use for this.

pub use crate::names::{VIA_ROOM_SHIFT, VIA_TAP};
use crate::{
    Datapath, SwitchError, Tuple, abi, attach,
    maps::{bytes_of, errno, from_bytes, sum_of},
    switch::bare,
};
use libbpf_rs::{
    AsRawLibbpf, MapCore, MapFlags, MapHandle, MapType,
    btf::{Btf, types::Composite},
    skel::{OpenSkel, SkelBuilder},
};
use std::{
    ffi::CStr,
    fs, io,
    mem::MaybeUninit,
    net::Ipv6Addr,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    path::Path,
};

/// The compiled programs: an ELF file for the machine `bpf`.
pub const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/splice.bpf.o"));

/// What the verifier of the running kernel says of a program.
#[derive(Clone, Debug)]
pub struct Verified {
    /// The entry's name.
    pub program: String,
    /// Instructions walked through, each as often as it was; the kernel gives up at a million.
    pub instructions: u32,
    /// Bytes of stack of each function that the program contains, itself among them.
    pub stacks: Vec<u32>,
}

/// Loads all programs with the smallest tables, pins nothing, attaches nothing.
pub fn verify() -> io::Result<Vec<Verified>> {
    const STATISTICS: u32 = 4; // BPF_LOG_STATS
    const LOG: usize = 65536; // statistics take a few lines
    let mut object = MaybeUninit::uninit();
    let mut open = crate::skel::SpliceSkelBuilder::default().open(&mut object).map_err(io_error)?;
    let mut logs: Vec<(String, Vec<u8>)> = Vec::new();
    for mut program in open.open_object_mut().progs_mut() {
        program.set_log_level(STATISTICS);
        let mut log = vec![0; LOG];
        // SAFETY: the program is open; the buffer, whose size is told, is not moved with its vector and outlives the load.
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
            // Linux 7.3 has a line for each function; before, all stood in one
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

/// Detaches all programs, as anybody with the right to do so may; their links stay pinned.
pub fn detach(d: &Datapath) -> io::Result<()> {
    fs::read_dir(d.pin())?.try_for_each(|entry| attach::detach(&entry?.path()))
}

/// Stops the flow of two legs as [`Datapath::recreate`] does first, for new sockets, once it is idle for an instant.
pub fn stop_released(d: &Datapath, [a, b]: [&Tuple; 2]) -> Result<(), SwitchError> {
    d.run(abi::switch_op::OP_STOP, &bare(a), &bare(b), |args| args.fit = 1).map(drop)
}

/// What is pinned becomes that of another version.
pub fn put_version(pin: &Path, version: u32) -> io::Result<()> {
    let (map, key) = (MapHandle::from_pinned_path(pin.join("abi")).map_err(io_error)?, 0u32.to_ne_bytes());
    let value = map.lookup(&key, MapFlags::ANY).map_err(io_error)?.unwrap_or_default();
    let abi = abi::abi { version, ..from_bytes(&value) };
    map.update(&key, bytes_of(&abi), MapFlags::ANY).map_err(io_error)
}

/// What is pinned becomes that of the first version, which did not say whose it was.
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

/// A leg's record as it is.
pub fn get_leg(d: &Datapath, t: &Tuple) -> Option<abi::leg> {
    Some(d.maps.leg(t)?.raw)
}

/// The key that a leg's record is stored under, as it stands in `leg.peer`.
pub fn key(t: &Tuple) -> abi::tuple {
    t.to_abi()
}

/// Writes the entry for packets that come in on `t`. `remote`: the host where they go, for a leg that is IPv6.
pub fn put_path(d: &Datapath, t: &Tuple, p: &abi::path, remote: [u32; 4]) -> io::Result<()> {
    d.maps.put_path(t, abi::path6 { p: *p, remote })
}

/// How many path entries there are, as the data path counts them.
pub fn entries(d: &Datapath) -> io::Result<u64> {
    let value = pinned(d, "entries")?.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).map_err(io_error)?.unwrap_or_default();
    Ok(u64::from_ne_bytes(value.try_into().map_err(|_| io::ErrorKind::InvalidData)?))
}

/// How many packets had a path entry at hand, or another one of the same home, before their turn came.
pub fn found_ahead(d: &Datapath) -> io::Result<u64> {
    sum_of(&pinned(d, "aheads")?, 0)
}

/// Writes a next hop.
pub fn put_via(d: &Datapath, index: u16, via: &abi::via) -> io::Result<()> {
    d.maps.set_via(index, via)
}

/// Writes the address that a path with `PATH_CROSS` names by its index.
pub fn put_remote6(d: &Datapath, index: u32, address: Ipv6Addr) -> io::Result<()> {
    let map = pinned(d, "remotes6")?;
    map.update(bytes_of(&index), &address.octets(), MapFlags::ANY).map_err(io_error)
}

/// What is remembered of a segment that comes in fragments.
pub fn get_train(d: &Datapath, k: &abi::train_key) -> io::Result<Option<abi::train>> {
    let found = pinned(d, "fragment_trains")?.lookup(bytes_of(k), MapFlags::ANY).map_err(io_error)?;
    Ok(found.map(|b| from_bytes(&b)))
}

/// Writes it.
pub fn put_train(d: &Datapath, k: &abi::train_key, t: &abi::train) -> io::Result<()> {
    pinned(d, "fragment_trains")?.update(bytes_of(k), bytes_of(t), MapFlags::ANY).map_err(io_error)
}

/// One counter, by its place in [`crate::VERDICTS`].
pub fn verdict(d: &Datapath, place: usize) -> io::Result<u64> {
    let per_cpu = d.maps.verdicts.lookup_percpu(bytes_of(&(place as u32)), MapFlags::ANY).map_err(io_error)?;
    Ok(per_cpu.unwrap_or_default().iter().map(|b| u64::from_ne_bytes(b[..8].try_into().expect("8 bytes"))).sum())
}

fn pinned(d: &Datapath, map: &str) -> io::Result<MapHandle> {
    MapHandle::from_pinned_path(d.pin().join(map)).map_err(io_error)
}

/// A field of /proc/self/fdinfo.
fn fdinfo(fd: BorrowedFd<'_>, field: &str) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    let value = text.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':')?.trim().parse().ok());
    value.ok_or_else(|| io::Error::other(format!("no {field} in fdinfo")))
}

/// Kernel memory that a map takes, bytes.
pub fn memory(d: &Datapath, map: &str) -> io::Result<u64> {
    Ok(crate::map_size(&d.pin().join(map))?.bytes)
}

/// A struct or union as the loaded object's BTF has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes.
    pub size: usize,
    /// Names and offsets in bytes. Members of anonymous structs stand by themselves.
    pub members: Vec<(String, usize)>,
}

/// The types of the loaded programs.
#[derive(Debug)]
pub struct Types(Btf<'static>);

impl Types {
    /// Of what this data path has loaded.
    pub fn of(d: &Datapath) -> io::Result<Types> {
        let id = fdinfo(d.ingress.as_fd(), "prog_id")?;
        Btf::from_prog_id(id as u32).map(Types).map_err(io_error)
    }

    /// A struct or union by name.
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
