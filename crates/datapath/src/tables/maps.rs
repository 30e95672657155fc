//! Typed access to the maps of the data path.

use crate::{Connection, LegFlags, Pair, PathFlags, Phase, abi, abi_id::AbiId, clock::monotonic, names};
use libbpf_rs::{MapCore, MapFlags, MapHandle};
use nix::libc;
use std::{
    collections::HashSet,
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::fd::{AsRawFd, OwnedFd},
    sync::{Mutex, RwLock},
    time::Duration,
};

/// A connection as one leg sees it. Key of all look-ups.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tuple {
    /// Address and port of the host.
    pub remote: SocketAddr,
    /// Our address and port.
    pub local: SocketAddr,
}

impl std::fmt::Debug for Tuple {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} <-> {}", self.local, self.remote)
    }
}

/// Returns an address as the programs have it: network byte order, IPv4 as ::ffff:a.b.c.d.
pub(crate) fn words(ip: IpAddr) -> [u32; 4] {
    let o = match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    std::array::from_fn(|i| u32::from_ne_bytes([o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]]))
}

pub(crate) fn address(w: [u32; 4]) -> IpAddr {
    let mut o = [0; 16];
    for (i, x) in w.iter().enumerate() {
        o[4 * i..4 * i + 4].copy_from_slice(&x.to_ne_bytes());
    }
    Ipv6Addr::from(o).to_canonical()
}

impl Tuple {
    /// Returns whether the leg is an IPv4 connection.
    pub fn is_v4(&self) -> bool {
        self.remote.ip().to_canonical().is_ipv4()
    }

    pub(crate) fn to_abi(self) -> abi::tuple {
        abi::tuple {
            remote: words(self.remote.ip()),
            local: words(self.local.ip()),
            rport: self.remote.port().to_be(),
            lport: self.local.port().to_be(),
        }
    }

    pub(crate) fn from_abi(t: &abi::tuple) -> Tuple {
        Tuple {
            remote: SocketAddr::new(address(t.remote), u16::from_be(t.rport)),
            local: SocketAddr::new(address(t.local), u16::from_be(t.lport)),
        }
    }
}

/// Plain data shared with the kernel.
///
/// # Safety
/// The type is `repr(C)`, valid for every bit pattern, and has no padding that must not be read.
pub(crate) unsafe trait Pod: Copy {}
// SAFETY: generated from BTF with explicit padding members; integers, arrays of them, and enums as integers.
unsafe impl Pod for abi::tuple {}
// SAFETY: as above.
unsafe impl Pod for abi::leg {}
// SAFETY: as above.
unsafe impl Pod for abi::embryo {}
// SAFETY: as above; the union's members overlap in full.
unsafe impl Pod for abi::path_args {}
// SAFETY: as above.
unsafe impl Pod for abi::clear_call {}
// SAFETY: as above.
unsafe impl Pod for abi::adopt_args {}
// SAFETY: as above.
unsafe impl Pod for abi::abi {}
// SAFETY: as above.
unsafe impl Pod for abi::via {}
// SAFETY: as above.
unsafe impl Pod for abi::listen_key {}
// SAFETY: as above.
unsafe impl Pod for abi::switch_call {}
// SAFETY: as above.
unsafe impl Pod for abi::event {}
// SAFETY: as above.
unsafe impl Pod for abi::train_key {}
// SAFETY: as above.
unsafe impl Pod for abi::train {}
// SAFETY: as above.
unsafe impl Pod for abi::tap_record {}
// SAFETY: as above.
unsafe impl Pod for abi::handshake {}
// SAFETY: as above.
unsafe impl Pod for abi::trace_record {}
// SAFETY: an integer.
unsafe impl Pod for u32 {}
// SAFETY: an integer.
unsafe impl Pod for u64 {}
// SAFETY: as above.
unsafe impl Pod for abi::held_record {}

pub(crate) fn bytes_of<T: Pod>(v: &T) -> &[u8] {
    // SAFETY: Pod: every byte of `v` may be read.
    unsafe { std::slice::from_raw_parts((&raw const *v).cast(), size_of::<T>()) }
}

pub(crate) fn bytes_of_mut<T: Pod>(v: &mut T) -> &mut [u8] {
    // SAFETY: Pod: every byte of `v` may be read, and any value written.
    unsafe { std::slice::from_raw_parts_mut((&raw mut *v).cast(), size_of::<T>()) }
}

pub(crate) fn from_bytes<T: Pod>(b: &[u8]) -> T {
    assert!(b.len() >= size_of::<T>(), "the kernel gave {} bytes for a {}", b.len(), std::any::type_name::<T>());
    // SAFETY: Pod, and long enough; the read does not assume alignment.
    unsafe { b.as_ptr().cast::<T>().read_unaligned() }
}

/// Held while a syscall program runs. It may find entries and, as it
/// can sleep, keep them for longer than a program on a packet does.
static RUNS: RwLock<()> = RwLock::new(());

/// Waits until all programs have ended that are running now, of this process or on a packet, which has reached its socket then.
/// After that, nobody has an entry that was removed before. It takes some ten milliseconds.
pub(crate) fn await_programs() -> io::Result<()> {
    drop(RUNS.write().expect("no panic under this lock"));
    // Waits for another RCU grace period (kernel/sched/membarrier.c). Programs on packets are RCU readers, and do not outlive it.
    // SAFETY: without flags the call takes no pointers, and changes nothing.
    let r = unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Runs a syscall program with `args` as its context. Fails with an errno.
pub(crate) fn run_program<T: Pod>(fd: &OwnedFd, args: &mut T) -> Result<(), i32> {
    let _running = RUNS.read().expect("no panic under this lock");
    let ctx = bytes_of_mut(args);
    // SAFETY: bpf_test_run_opts is plain data; all-zero is valid.
    let mut opts: libbpf_sys::bpf_test_run_opts = unsafe { std::mem::zeroed() };
    opts.sz = size_of_val(&opts) as _;
    opts.ctx_in = ctx.as_mut_ptr().cast();
    opts.ctx_size_in = ctx.len() as u32;
    // SAFETY: a syscall program reads and writes its context in place, through ctx_in, within ctx_size_in.
    let r = unsafe { libbpf_sys::bpf_prog_test_run_opts(fd.as_raw_fd(), &mut opts) };
    if r < 0 { Err(-r) } else { Ok(()) }
}

/// The record of a connection that is about to be opened.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedLeg {
    /// The MSS in bytes that the client's host announced, if known.
    pub mss: Option<u16>,
    /// The generation of the new entry ([`Connection::generation`](crate::Connection)).
    pub generation: u32,
    /// The generation of the client's entry, if it has one.
    pub of_client: Option<u32>,
}

/// Reasons why a leg could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum ExpectError {
    /// A live flow has this four-tuple: use another source port.
    #[error("the four-tuple is in use by a live flow")]
    Taken,
    /// The client's leg is not tracked, so the connection is not tracked either.
    #[error("the client's leg is not tracked")]
    Untracked,
    /// The table is full: the connection is not tracked.
    #[error("the table of legs is full")]
    Full {
        /// The client's leg gave its record back, which makes room for others. It is no longer tracked.
        given_back: bool,
    },
    /// The kernel returned an error.
    #[error("map access: {0}")]
    Io(io::Error),
}

/// A leg's record: the part that user space needs. Positions count bytes since the SYN; a FIN counts as one.
#[derive(Clone, Copy, Debug)]
pub struct LegView {
    /// Bits of `LegFlags`.
    pub flags: u32,
    /// Phase of the bytes from the host.
    pub phase_in: Phase,
    /// Phase of the bytes to the host.
    pub phase_out: Phase,
    /// MSS announced by the host, in bytes.
    pub mss_in: u16,
    /// The other leg, if the two are paired.
    pub peer: Option<Tuple>,
    /// Position of all data that arrived from the host while this record was in use.
    pub received: u64,
    /// Time of the last segment: nanoseconds, CLOCK_MONOTONIC.
    pub seen: u64,
    pub(crate) raw: abi::leg,
}

impl LegView {
    /// Returns whether the numbers on the wire are those of the socket, and no switch is under way.
    pub fn is_untouched(&self) -> bool {
        let l = &self.raw;
        !self.is_switching() && l.shim_in | l.shim_out | l.shim_ts | (l.flags & LegFlags::AHEAD) == 0
    }

    /// Returns whether the data path owns bytes of either direction.
    pub fn is_switching(&self) -> bool {
        [self.phase_in, self.phase_out] != [Phase::Local; 2]
    }

    /// While the flow is forwarded, returns the next sequence number that the parked
    /// socket expects, in the socket's own numbers. The socket receives nothing meanwhile.
    pub fn parked_at(&self) -> Option<u32> {
        let is_forwarded = self.flags & crate::LegFlags::SPLICED != 0;
        is_forwarded.then(|| self.raw.bound_in.wrapping_sub(self.raw.shim_in))
    }
}

/// Has the width of `path.via`.
const VIA_TAP: u16 = names::VIA_TAP as u16;
pub(crate) const VIA_INDEX: u16 = names::VIA_INDEX as u16;

/// The path entry of one direction. Sequence numbers are in host byte order.
#[derive(Clone, Copy, Debug, Default)]
pub struct PathView {
    /// Bits of `PathFlags`.
    pub flags: u16,
    /// Highest sequence end that was forwarded.
    pub end: u32,
    /// Number of times that `end` has wrapped. Not counted while [`PathFlags::TRIGGER`] is set.
    pub wraps: u16,
    /// Highest acknowledgement that was forwarded.
    pub max_ack: u32,
    /// Coarse time of the last packet, in units of 2^33 ns, modulo 256.
    pub seen: u8,
    /// `end` in the numbers of the other leg: its host was sent nothing beyond.
    pub sent: u32,
    /// Index of the next hop.
    pub via: u16,
    /// Whether forwarded data is copied to user space.
    pub tapped: bool,
    /// The window that came with `max_ack`, encoded by `room_code()` in bpf/step.h.
    pub room: u8,
    /// Window scale of the host, as a shift.
    pub scale: u8,
    /// The IPv4 host to which packets go, or an index in `remotes6` if `PathFlags::CROSS` is set. Network byte order if a host.
    pub(crate) remote4: u32,
}

impl PathView {
    /// Returns whether the flow of these two entries has ended, by a reset or with both FINs acknowledged.
    pub fn are_over([a, b]: [&PathView; 2]) -> bool {
        (a.flags | b.flags) & PathFlags::DEAD != 0 || a.flags & b.flags & PathFlags::FIN_ACKED != 0
    }

    pub(crate) fn new(p: &abi::path) -> PathView {
        // SAFETY: both members of the union are plain integers over the same 8 bytes.
        let all = unsafe { p.word.all };
        PathView {
            end: all as u32,
            wraps: (all >> 32) as u16,
            flags: (all >> 48) as u16,
            max_ack: p.max_ack,
            seen: p.seen,
            sent: (all as u32).wrapping_add(p.seq_add),
            via: p.via & VIA_INDEX,
            tapped: p.via & VIA_TAP != 0,
            room: ((p.via & !VIA_TAP) / (VIA_INDEX + 1)) as u8,
            scale: p.scales & 15,
            remote4: p.remote4,
        }
    }

    /// Returns the minimum time since the last packet: the time is kept in units of 2^33 ns, modulo 256.
    pub fn silence(&self) -> Duration {
        let units = ((monotonic().as_nanos() >> 33) as u8).wrapping_sub(self.seen);
        Duration::from_nanos(u64::from(units.saturating_sub(1)) << 33)
    }

    /// Returns up to where the other host has acknowledged forwarded data,
    /// in the numbers of `end`. `back`: the entry of the other direction.
    pub(crate) fn acked(&self, back: &PathView) -> u32 {
        self.end.wrapping_sub(self.sent.wrapping_sub(back.max_ack))
    }

    /// Returns the minimum and the maximum of the window that came with
    /// `max_ack`, in units of its scale. Like `room_of()` in bpf/step.h.
    pub fn rooms(&self) -> (u32, u32) {
        let of = |code: u8| match code {
            0 => 0,
            1 => 8,
            n if n % 2 == 0 => 12 << (n / 2 - 1),
            n => 8 << (n / 2),
        };
        let least = self.room.checked_sub(1).map_or(0, |below| of(below) + 1);
        (least, of(self.room).min(65535))
    }

    /// Returns the maximum of the window that came with `max_ack`, in bytes.
    pub fn window(&self) -> u32 {
        self.rooms().1 << self.scale
    }

    /// Returns a measure of the bytes that were forwarded, for [`PathView::since`].
    pub fn reached(&self) -> u64 {
        u64::from(self.wraps) << 32 | u64::from(self.end)
    }

    /// Returns the number of bytes forwarded since this was `reached`, up to 2^48, or up to 2^32 with a trigger.
    pub fn since(&self, reached: u64) -> u64 {
        let is_counted = self.flags & PathFlags::TRIGGER == 0;
        self.reached().wrapping_sub(reached) & if is_counted { (1 << 48) - 1 } else { u32::MAX.into() }
    }

    /// Returns the position of all data from the host. `origin`: [`Switched::origin`](crate::Switched) of the commit. `None` if a
    /// trigger is set: its limit takes the place of the wraps.
    pub fn position(&self, origin: u64) -> Option<u64> {
        (self.flags & PathFlags::TRIGGER == 0).then(|| origin.wrapping_add(self.reached()))
    }

    /// Returns the number of bytes forwarded since `end` was `since`. Like `path_passed` in bpf/path.h.
    pub(crate) fn passed(&self, since: u32) -> u64 {
        self.since(since.into())
    }
}

/// The maps of one data path.
pub(crate) struct Maps {
    /// The program that looks up and changes path entries.
    pub path_entry: OwnedFd,
    /// The program that removes the entries of many flows.
    pub clear_ended: OwnedFd,
    pub paths4: MapHandle,
    pub paths6: MapHandle,
    pub entries: MapHandle,
    pub legs: MapHandle,
    pub embryos: MapHandle,
    pub listeners: MapHandle,
    pub listened_ports: MapHandle,
    /// Keys of listeners of the process before, at which nobody listens yet.
    pub unclaimed: Mutex<HashSet<Vec<u8>>>,
    pub vias: MapHandle,
    pub remotes6: MapHandle,
    pub verdicts: MapHandle,
    pub events: MapHandle,
    pub polling: MapHandle,
    pub taps: MapHandle,
    pub traces: MapHandle,
    pub tracing: MapHandle,
    pub held: MapHandle,
    pub holding: MapHandle,
    pub handshakes: MapHandle,
    pub abi: MapHandle,
    pub unheld: MapHandle,
}

/// Returns the sum of a counter over all CPUs: the first eight bytes of an entry.
pub(crate) fn sum_of(counters: &impl MapCore, which: u32) -> io::Result<u64> {
    let per_cpu = counters.lookup_percpu(bytes_of(&which), MapFlags::ANY).map_err(io_error)?.unwrap_or_default();
    Ok(per_cpu.iter().map(|b| u64::from_ne_bytes(b[..8].try_into().expect("8 bytes"))).sum())
}

pub(crate) fn io_error(e: libbpf_rs::Error) -> io::Error {
    io::Error::from_raw_os_error(errno(&e))
}

/// Returns the errno of an error. The library shows it only at the end of its message, which is that of [`io::Error`].
pub(crate) fn errno(e: &libbpf_rs::Error) -> i32 {
    let text = format!("{e:#}");
    let number = text.rsplit_once("(os error ").and_then(|(_, rest)| rest.strip_suffix(')'));
    number.and_then(|n| n.parse().ok()).unwrap_or(libc::EIO)
}

#[test]
fn errors_keep_their_number() {
    use libbpf_rs::ErrorExt;
    for n in
        [libc::EPERM, libc::EACCES, libc::EEXIST, libc::ENOENT, libc::ENOMEM, libc::E2BIG, libc::EINVAL, libc::ENOSPC]
    {
        let e = libbpf_rs::Error::from_raw_os_error(n);
        assert_eq!(errno(&e), n, "{e:#}");
        assert_eq!(errno(&e.context("a map")), n);
    }
}

impl Maps {
    pub fn set_abi(&self, seed: u64, namespace: u64) -> io::Result<()> {
        let abi = abi::abi { version: AbiId::OURS.version, layout: AbiId::OURS.layout, seed, namespace };
        self.abi.update(bytes_of(&0u32), bytes_of(&abi), MapFlags::ANY).map_err(io_error)
    }

    /// Tells the data path whether events are read at short intervals.
    pub fn set_polling(&self, polling: bool) -> io::Result<()> {
        self.polling.update(bytes_of(&0_u32), bytes_of(&u32::from(polling)), MapFlags::ANY).map_err(io_error)
    }

    /// Records that nobody holds slots any more that were freed before `since`: nanoseconds, CLOCK_MONOTONIC.
    pub fn set_unheld(&self, since: u64) -> io::Result<()> {
        self.unheld.update(bytes_of(&0u32), &since.to_ne_bytes(), MapFlags::ANY).map_err(io_error)
    }

    /// Looks up or changes one path entry. `result` and `p` of the answer are those of `struct path_args`.
    pub fn path_op(&self, op: abi::path_op, key: &Tuple, p: abi::path6) -> io::Result<abi::path_args> {
        let mut args = abi::path_args { op, key: key.to_abi(), p, ..Default::default() };
        self.path_entry(&mut args)?;
        Ok(args)
    }

    fn path_entry(&self, args: &mut abi::path_args) -> io::Result<()> {
        run_program(&self.path_entry, args).map_err(io::Error::from_raw_os_error)
    }

    /// Returns a path entry. In an entry of an IPv4 leg, `remote` is unused.
    pub fn entry(&self, t: &Tuple) -> Option<abi::path6> {
        let args = self.path_op(abi::path_op::PATH_OP_GET, t, abi::path6::default()).ok()?;
        (args.result == 0).then_some(args.p)
    }

    /// Starts to listen on an address. With `None`, stops.
    pub fn listen(&self, addr: SocketAddr, to: Option<abi::listens>) -> io::Result<()> {
        let unspecified = addr.ip().is_unspecified();
        let key = abi::listen_key {
            local: if unspecified { [0; 4] } else { words(addr.ip()) },
            port: addr.port().to_be(),
            family: if addr.is_ipv4() { 4 } else { 6 },
        };
        match to {
            Some(to) => {
                self.unclaimed.lock().expect("no panic under this lock").remove(bytes_of(&key));
                self.note_port(addr.port())?;
                self.listeners.update(bytes_of(&key), bytes_of(&to.0), MapFlags::ANY).map_err(|e| match errno(&e) {
                    libc::E2BIG => io::Error::other(format!(
                        "the data path has room for {} listeners",
                        self.listeners.max_entries()
                    )),
                    n => io::Error::from_raw_os_error(n),
                })
            }
            None => self.listeners.delete(bytes_of(&key)).map_err(io_error),
        }
    }

    fn note_port(&self, port: u16) -> io::Result<()> {
        let class = u32::from(port) % names::PORT_CLASSES;
        self.listened_ports.update(bytes_of(&class), bytes_of(&1_u32), MapFlags::ANY).map_err(io_error)
    }

    /// Removes the listeners that an earlier process has left, but those for transparent connections only later if this one
    /// `follows` it: their SYNs must not be routed on meanwhile.
    pub fn unlisten_all(&self, follows: bool) {
        let mut unclaimed = self.unclaimed.lock().expect("no panic under this lock");
        for key in self.listeners.keys() {
            let to = self.listeners.lookup(&key, MapFlags::ANY).ok().flatten();
            let kind = to.map_or(0, |to| from_bytes::<u32>(&to) & !abi::listens::LISTENS_WAITS.0);
            let port = u16::from_be(from_bytes::<abi::listen_key>(&key).port);
            if follows && kind == abi::listens::LISTENS_TRANSPARENT.0 && self.note_port(port).is_ok() {
                unclaimed.insert(key);
            } else {
                drop(self.listeners.delete(&key));
            }
        }
    }

    /// Removes those at which nobody listens.
    pub fn settle(&self) {
        let mut unclaimed = self.unclaimed.lock().expect("no panic under this lock");
        unclaimed.drain().for_each(|key| drop(self.listeners.delete(&key)));
    }

    /// Creates the entries for a connection that is about to be opened, possibly
    /// on behalf of a client.
    pub fn expect(&self, t: &Tuple, client: Option<&Tuple>, leg_flags: u32) -> Result<ExpectedLeg, ExpectError> {
        let (op, key) = (abi::path_op::PATH_OP_ADD, t.to_abi());
        let other = client.map(|c| c.to_abi()).unwrap_or_default();
        let mut args = abi::path_args { op, key, other, leg_flags, ..Default::default() };
        self.path_entry(&mut args).map_err(ExpectError::Io)?;
        match args.result {
            0 => Ok(ExpectedLeg {
                mss: u16::try_from(args.mss).ok().filter(|mss| *mss > 0),
                generation: args.generation,
                of_client: Some(args.other_generation).filter(|of| *of != Connection::ANY),
            }),
            1 => Err(ExpectError::Taken),
            2 => Err(ExpectError::Untracked),
            r => Err(ExpectError::Full { given_back: r == -2 }),
        }
    }

    pub fn insert_leg(&self, t: &Tuple, record: &abi::leg) -> io::Result<()> {
        self.legs.update(bytes_of(&t.to_abi()), bytes_of(record), MapFlags::ANY).map_err(io_error)
    }

    /// Writes a path entry, new or not.
    pub fn put_path(&self, t: &Tuple, p: abi::path6) -> io::Result<()> {
        match self.path_op(abi::path_op::PATH_OP_PUT, t, p)?.result {
            0.. => Ok(()),
            _ => Err(io::Error::other("no place in the table of path entries")),
        }
    }

    /// Removes path entry and record of one leg or two. A leg that is gone already is no error. Returns
    /// for each whether it is gone: unless `op` is `PATH_OP_REMOVE`, there are conditions (enum path_op).
    pub fn forget(&self, op: abi::path_op, t: &Connection, other: Option<&Connection>) -> [bool; 2] {
        let abi::ended_flow { key, other, generation, other_generation } = ended(t, other);
        self.forget_as(abi::path_args { op, key, other, generation, other_generation, ..Default::default() })
    }

    pub fn forget_as(&self, mut args: abi::path_args) -> [bool; 2] {
        let t = Tuple::from_abi(&args.key);
        if let Err(error) = self.path_entry(&mut args) {
            tracing::warn!(leg = ?t, %error, "cannot remove a path entry: it stays");
            return [false; 2];
        }
        [1, 2].map(|bit| args.result & bit == 0)
    }

    /// Removes the entries of flows that are over, as `forget` with `PATH_OP_CLEAR`: all in one call, or at most
    /// `CLEAR_FLOWS` in each. Returns for each flow which legs are gone.
    pub fn clear_ended(&self, flows: &[(Connection, Option<Connection>)]) -> Vec<[bool; 2]> {
        let cleared = flows.chunks(names::CLEAR_FLOWS as usize).flat_map(|some| {
            let flows: Vec<_> = some.iter().map(|(leg, other)| ended(leg, other.as_ref())).collect();
            let (flows, count) = (flows.as_ptr() as u64, flows.len() as u32);
            let mut call = abi::clear_call { flows, count, ..Default::default() };
            if let Err(error) = run_program(&self.clear_ended, &mut call).map_err(io::Error::from_raw_os_error) {
                tracing::warn!(flows = count, %error, "cannot remove path entries: they stay");
                call.kept = u64::MAX;
            }
            (0..count).map(move |i| [1, 2].map(|bit| (call.kept >> (2 * i)) & bit == 0))
        });
        cleared.collect()
    }

    /// Runs an operation that needs nothing but a connection, unless it is another one by now.
    pub fn path_op_on(&self, op: abi::path_op, connection: &Connection) -> io::Result<()> {
        let (key, generation) = (connection.leg.to_abi(), connection.generation);
        self.path_entry(&mut abi::path_args { op, key, generation, ..Default::default() })
    }

    /// Returns the generation of a leg's entry.
    pub fn generation(&self, t: &Tuple) -> Option<u32> {
        let args = self.path_op(abi::path_op::PATH_OP_GET, t, abi::path6::default()).ok()?;
        (args.result == 0).then_some(args.generation)
    }

    pub fn decided(&self, legs: Pair<&Tuple>) -> io::Result<()> {
        let (op, [key, other]) = (abi::path_op::PATH_OP_DECIDED, [legs.client, legs.server].map(|leg| leg.to_abi()));
        self.path_entry(&mut abi::path_args { op, key, other, ..Default::default() })
    }

    /// Stops tracking a leg of which segments have passed unseen.
    pub fn mistrust(&self, t: &Tuple) -> io::Result<()> {
        self.path_op(abi::path_op::PATH_OP_UNSEEN, t, abi::path6::default()).map(drop)
    }

    pub fn found_no_room(&self, t: &Tuple) -> bool {
        let found = self.embryos.lookup(bytes_of(&t.to_abi()), MapFlags::ANY).ok().flatten();
        found.is_some_and(|e| u32::from(from_bytes::<abi::embryo>(&e).opts_in) & names::OPT_FULL != 0)
    }

    /// Returns what a client has acknowledged before its SYN was answered.
    pub fn acknowledged(&self, t: &Tuple) -> Option<u32> {
        let found = self.embryos.lookup(bytes_of(&t.to_abi()), MapFlags::ANY).ok()??;
        let e = from_bytes::<abi::embryo>(&found);
        (u32::from(e.opts_out) & names::OPT_PASSED != 0).then_some(e.edge_out)
    }

    /// Removes the state of the SYN with this number. It is no error if it is gone already, or is that of a later SYN.
    pub fn forget_embryo(&self, t: &Tuple, irs: u32) {
        let found = self.embryos.lookup(bytes_of(&t.to_abi()), MapFlags::ANY).ok().flatten();
        if found.is_some_and(|e| from_bytes::<abi::embryo>(&e).irs == irs) {
            let _ = self.embryos.delete(bytes_of(&t.to_abi()));
        }
    }

    /// Removes a leg's record. It is no error if it is gone already.
    pub fn forget_leg(&self, t: &Tuple) {
        let _ = self.legs.delete(bytes_of(&t.to_abi()));
    }

    pub fn leg(&self, t: &Tuple) -> Option<LegView> {
        let b = self.legs.lookup(bytes_of(&t.to_abi()), MapFlags::ANY).ok()??;
        Some(leg_view(from_bytes(&b)))
    }

    pub fn path(&self, t: &Tuple) -> Option<PathView> {
        self.entry(t).map(|e| PathView::new(&e.p))
    }

    /// Returns the path entries of both legs of a flow, in one call.
    pub fn paths_of(&self, legs: [Connection; 2]) -> Option<[PathView; 2]> {
        let (op, [key, other]) = (abi::path_op::PATH_OP_GET, legs.map(|c| c.leg.to_abi()));
        let mut args = abi::path_args { op, key, other, ..Default::default() };
        self.path_entry(&mut args).ok()?;
        let found = [args.generation, args.other_generation];
        let are_meant = legs.iter().zip(found).all(|(c, found)| [Connection::ANY, found].contains(&c.generation));
        (args.result == 0 && are_meant).then(|| [&args.p.p, &args.p_other].map(PathView::new))
    }

    pub fn all_legs(&self) -> Vec<(Tuple, LegView)> {
        self.legs.keys().map(|k| Tuple::from_abi(&from_bytes(&k))).filter_map(|t| Some((t, self.leg(&t)?))).collect()
    }

    /// Returns the next entry that is not in forwarding mode: `key`, and data of its
    /// leg's record. `result` and `slot` of the answer are those of `struct path_args`.
    pub fn next_idle(&self, slot: u64) -> io::Result<abi::path_args> {
        let mut args = abi::path_args { op: abi::path_op::PATH_OP_IDLE, slot, ..Default::default() };
        self.path_entry(&mut args)?;
        Ok(args)
    }

    /// Calls `f` with each path entry: the leg on which its packets arrive, and the entry.
    pub fn each_path(&self, mut f: impl FnMut(Tuple, &abi::path6)) -> io::Result<()> {
        self.walk(abi::path_op::PATH_OP_NEXT, |t, e| {
            f(t, e);
            true
        })
    }

    /// Returns the number of path entries in both tables.
    pub fn entries(&self) -> io::Result<u64> {
        let value = self.entries.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).map_err(io_error)?;
        Ok(value.map_or(0, |value| from_bytes::<u64>(&value)))
    }

    /// Calls `f` with each path entry of an operation like PATH_OP_NEXT, until it returns false.
    pub fn walk(&self, op: abi::path_op, mut f: impl FnMut(Tuple, &abi::path6) -> bool) -> io::Result<()> {
        if self.entries()? == 0 {
            return Ok(()); // tables for 65536 flows have 400,000 slots, which take 30 ms
        }
        let mut args = abi::path_args { op, ..Default::default() };
        loop {
            self.path_entry(&mut args)?;
            match args.result {
                0 if f(Tuple::from_abi(&args.key), &args.p) => {}
                ..=0 => return Ok(()),
                _ => {}
            }
        }
    }

    pub fn all_paths(&self, op: abi::path_op) -> io::Result<Vec<(Tuple, PathView)>> {
        let mut all = Vec::new();
        self.walk(op, |t, e| {
            all.push((t, PathView::new(&e.p)));
            true
        })?;
        Ok(all)
    }

    /// Returns the leg on which packets of `t` leave, from the path entry alone.
    pub fn other_leg(&self, t: &Tuple) -> Option<Tuple> {
        let entry = self.entry(t)?;
        self.way_out(t, &entry, self.via(entry.p.via & VIA_INDEX)?.local)
    }

    /// Like [`Maps::other_leg`], for an entry `e` whose next hop has the address `local`.
    pub fn way_out(&self, t: &Tuple, e: &abi::path6, local: [u32; 4]) -> Option<Tuple> {
        let p = &e.p;
        let remote = if !t.is_v4() {
            e.remote
        } else if PathView::new(p).flags & crate::PathFlags::CROSS == 0 {
            [0, 0, u32::from_ne_bytes([0, 0, 0xff, 0xff]), p.remote4]
        } else {
            let b = self.remotes6.lookup(bytes_of(&p.remote4), MapFlags::ANY).ok()??;
            std::array::from_fn(|i| from_bytes(&b[4 * i..]))
        };
        Some(Tuple::from_abi(&abi::tuple { remote, local, rport: p.rport, lport: p.lport }))
    }

    /// Sets another next hop in a leg's record.
    pub fn lead(&self, t: &Tuple, via: u16) -> io::Result<()> {
        let (op, p) = (abi::path_op::PATH_OP_HOP, abi::path { via, ..Default::default() });
        let p = abi::path6 { p, ..Default::default() };
        self.path_entry(&mut abi::path_args { op, key: t.to_abi(), p, ..Default::default() })
    }

    /// Returns whether the first index of `remotes6` was ever used.
    pub fn has_remotes(&self) -> io::Result<bool> {
        let first = self.remotes6.lookup(bytes_of(&0u32), MapFlags::ANY).map_err(io_error)?;
        Ok(first.is_some_and(|address| address.iter().any(|b| *b != 0)))
    }

    /// Changes the next hop of a path entry in forwarding mode from `from` to `to`. Returns false if nothing was changed.
    pub fn move_path(&self, t: &Tuple, [from, to]: [u16; 2]) -> io::Result<bool> {
        let path = |via| abi::path { via, ..Default::default() };
        let (op, p) = (abi::path_op::PATH_OP_MOVE, abi::path6 { p: path(to), ..Default::default() });
        let mut args = abi::path_args { op, key: t.to_abi(), p, p_other: path(from), ..Default::default() };
        self.path_entry(&mut args)?;
        Ok(args.result == 0)
    }

    pub fn via(&self, index: u16) -> Option<abi::via> {
        Some(from_bytes(&self.vias.lookup(bytes_of(&u32::from(index)), MapFlags::ANY).ok()??))
    }

    pub fn set_via(&self, index: u16, v: &abi::via) -> io::Result<()> {
        self.vias.update(bytes_of(&u32::from(index)), bytes_of(v), MapFlags::ANY).map_err(io_error)
    }

    pub fn verdicts(&self) -> io::Result<Vec<(&'static str, u64)>> {
        crate::VERDICTS.iter().enumerate().map(|(i, name)| Ok((*name, sum_of(&self.verdicts, i as u32)?))).collect()
    }
}

fn ended(leg: &Connection, other: Option<&Connection>) -> abi::ended_flow {
    abi::ended_flow {
        key: leg.leg.to_abi(),
        other: other.map(|other| other.leg.to_abi()).unwrap_or_default(),
        generation: leg.generation,
        other_generation: other.map_or(Connection::ANY, |other| other.generation),
    }
}

pub(crate) fn leg_view(l: abi::leg) -> LegView {
    LegView {
        flags: l.flags,
        phase_in: l.phase_in.into(),
        phase_out: l.phase_out.into(),
        mss_in: l.mss_in,
        peer: (l.flags & crate::LegFlags::PAIRED != 0).then(|| Tuple::from_abi(&l.peer)),
        received: l.in64,
        seen: l.seen,
        raw: l,
    }
}
