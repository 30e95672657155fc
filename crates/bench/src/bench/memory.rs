//! Memory of connections: the data path's tables, the processes of a proxy, and the kernel's memory for sockets while they are
//! idle, and while their queues are full.

use super::{
    Bench, Result,
    machine::{Watch, number, tree},
    network::Packets,
    results::{Figure, Run, Section},
    variant::Variant,
    venue::{Near, Pair},
};
use longsplice_datapath::map_size;
use longsplice_lab::Namespace;
use std::{
    fs,
    io::{ErrorKind, Write},
    thread,
    time::Duration,
};

/// The variants measured. The first shows the memory of the end hosts alone.
const VARIANTS: [Variant; 8] = [
    Variant::IpForward,
    Variant::Copy,
    Variant::Spliced,
    Variant::Released,
    Variant::Haproxy,
    Variant::Nginx,
    Variant::Socat,
    Variant::Dante,
];
/// Number of simultaneous connections: enough that the fixed memory of a process is negligible.
const CONNECTIONS: usize = 2000;
/// The same for variants where each connection takes a process, or a large part of one.
const PROCESSES: usize = 200;
/// Connections opened and closed before, until code is paged in and allocator arenas exist.
const FIRST: usize = 50;
/// The counts must stay the same for this long: closing takes time, and allocators return memory late.
const REST: Duration = Duration::from_millis(500);
/// Maximum number of such periods, some 30 s in total: long for any proxy on a busy machine.
const RESTS: usize = 60;
/// Number of connections whose queues are filled.
const FULL: usize = 32;
/// Change in the number of sockets that is ignored: other programs always open and close a few.
const STIR: f64 = 10.0;
/// Kernel caches that hold the parts of a socket.
const CACHES: [&str; 6] = ["TCP", "sock_inode_cache", "filp", "dentry", "eventpoll_epi", "eventpoll_pwq"];
/// Page size of x86-64 and most other architectures.
const PAGE: f64 = 4096.0;

/// Measures processes and sockets, and tables.
pub fn measure(bench: &Bench<'_>) -> Result<()> {
    bench.some_rounds(1, Section::Memory, "", &VARIANTS, |v| {
        let venue = Near::set(v, Packets::Large)?;
        if v == Variant::Spliced {
            bench.results().words.insert(Section::Memory, tables(&venue)?);
        }
        held(&venue)
    })
}

/// What a flow takes in the tables of the data path: an entry for each direction, and before the release a record for each side.
fn tables(venue: &Near) -> Result<String> {
    let per = |map: &str| -> Result<f64> {
        let size = map_size(&venue.pinned().join(map)).map_err(|e| format!("pinned map {map}: {e}"))?;
        Ok(size.bytes as f64 / size.entries.max(1) as f64)
    };
    let (path, leg) = (per("paths4")?, per("legs")?);
    Ok(format!(
        "Tables of the data path, allocated at the start: {:.0} bytes per released IPv4 flow, {:.0} per parked one.",
        2.0 * path,
        2.0 * (path + leg)
    ))
}

/// Measures one variant.
fn held(venue: &Near) -> Result<Run> {
    let variant = venue.variant;
    let connections = if matches!(variant, Variant::Socat | Variant::Dante) { PROCESSES } else { CONNECTIONS };
    drop(venue.connect(FIRST)?);
    let at_rest = || sockets_when(|last, now| (now - last).abs() <= STIR);
    let closed = at_rest()?;
    let watch = Watch::start();
    let before = (venue.pid().map(resident), closed.bytes);
    let pairs = venue.connect(connections)?;
    let open = at_rest()?;
    let after = (venue.pid().map(resident), open.bytes);
    let cost = watch.stop();
    let queued = if variant.routed() { None } else { Some(queued(&venue.lab.forwarder, &pairs[..FULL])?) };
    drop(pairs);
    // Otherwise they would be closed while the next variant's are counted.
    sockets_when(|_, now| now <= closed.count + (open.count - closed.count) / 10.0 + STIR)?;
    let each = |before: f64, after: f64| (after - before).max(0.0) / connections as f64;
    let resident = before.0.zip(after.0).map(|(before, after)| each(before, after));
    let figures = [(Figure::Amount, connections as f64), (Figure::Value, each(before.1, after.1))];
    // It takes so long that it is not measured again.
    let run = Run { notes: cost.disturbed.into_iter().collect(), ..Run::of(variant, figures) };
    Ok(run.with(Figure::Resident, resident).with(Figure::Queued, queued))
}

/// Bytes in the forwarder's queues for each connection, once the servers can send no more. The clients do not read.
fn queued(forwarder: &Namespace, pairs: &[Pair]) -> Result<f64> {
    let block = vec![0; 256 << 10];
    let before = socket_memory(forwarder)?;
    pairs.iter().try_for_each(|pair| pair.server.set_nonblocking(true))?;
    for _ in 0..RESTS {
        let mut sent = 0;
        for mut server in pairs.iter().map(|pair| &pair.server) {
            loop {
                match server.write(&block) {
                    Ok(n) => sent += n,
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(e) => return Err(e.into()),
                }
            }
        }
        if sent == 0 {
            return Ok(socket_memory(forwarder)?.saturating_sub(before) as f64 / pairs.len() as f64);
        }
        thread::sleep(REST);
    }
    Err("the queues are never full".into())
}

/// Bytes of kernel memory charged to a host's connections.
pub fn socket_memory(host: &Namespace) -> Result<u64> {
    Ok(charged(&host.execute("ss", &["-tmnH"])?))
}

/// The sum of what ss(8) reports: memory of received data, of data to be sent, and reserved for either.
fn charged(output: &str) -> u64 {
    let fields = output.split("skmem:(").skip(1).filter_map(|rest| rest.split(')').next());
    let counted = |field: &str| {
        let digits = field.strip_prefix(['r', 'f', 'w'])?;
        digits.parse::<u64>().ok()
    };
    fields.flat_map(|fields| fields.split(',')).filter_map(counted).sum()
}

/// Resident bytes of a process and its descendants. Shared pages are divided among their users.
pub fn resident(pid: u32) -> f64 {
    let of = |pid: u32| {
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        number(&rollup, "Pss").unwrap_or(0) as f64 * 1024.0
    };
    tree(pid).into_iter().map(of).sum()
}

/// The kernel's memory for TCP on the whole machine.
struct Sockets {
    /// Number of sockets, in all namespaces.
    count: f64,
    /// Bytes in [`CACHES`] and in queues.
    bytes: f64,
}

/// Waits until `they(last, now)` holds for the socket counts. Not for bytes, which also include other programs' files.
fn sockets_when(they: impl Fn(f64, f64) -> bool) -> Result<Sockets> {
    let mut last = sockets()?;
    for _ in 0..RESTS {
        thread::sleep(REST);
        let now = sockets()?;
        if they(last.count, now.count) {
            return Ok(now);
        }
        last = now;
    }
    let count = last.count;
    Err(format!(
        "the sockets do not come to rest, {count} now: something else opens and closes connections on this machine"
    )
    .into())
}

fn sockets() -> Result<Sockets> {
    let slabs = slab_bytes(&fs::read_to_string("/proc/slabinfo")?);
    let sockstat = fs::read_to_string("/proc/net/sockstat")?;
    let tcp = sockstat.lines().find(|l| l.starts_with("TCP:")).unwrap_or_default();
    let number = |name: &str| {
        let found = tcp.split_whitespace().skip_while(|w| *w != name).nth(1).and_then(|n| n.parse::<f64>().ok());
        found.ok_or_else(|| format!("no {name} of TCP in /proc/net/sockstat"))
    };
    Ok(Sockets { count: number("alloc")?, bytes: slabs + number("mem")? * PAGE })
}

/// Total size of live objects (slabinfo(5)).
fn slab_bytes(slabinfo: &str) -> f64 {
    let bytes = |line: &str| {
        let mut fields = line.split_whitespace();
        let ours = CACHES.contains(&fields.next()?);
        let (objects, size) = (fields.next()?.parse::<f64>().ok()?, fields.nth(1)?.parse::<f64>().ok()?);
        ours.then_some(objects * size)
    };
    slabinfo.lines().filter_map(bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_sockets() {
        let output = "ESTAB 0 0 10.77.1.1:7000 10.77.1.2:4000\n\t skmem:(r100,rb131072,t7,tb87040,f20,w3,o0,bl0,d5)\n\
                      ESTAB 0 0 a b skmem:(r1,rb1,t0,tb1,f0,w0,o0,bl0,d0)\n";
        assert_eq!(charged(output), 124);
        assert_eq!(charged(""), 0);
    }

    #[test]
    fn numbers_of_proc_files() {
        assert_eq!(number("Rss:\t    6120 kB\n", "Pss"), None);
        assert_eq!(number("Pss:\t    5120 kB\n", "Pss"), Some(5120));
        let slabs =
            "# name <active_objs> <num_objs> <objsize>\nTCP 10 117 2368 13 8\nTCPv6 1 1 1 1 1\nfilp 2 4 256 1 1\n";
        assert_eq!(slab_bytes(slabs), 10.0 * 2368.0 + 2.0 * 256.0);
    }
}
