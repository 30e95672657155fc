//! A flood of small packets over many flows, from the client through the forwarder to a sink at the server, all on one CPU.
//! CPU time divided by packets received is the cost of a packet, including generator and sink.
//!
//! Generator and sink are in bpf/flood.bpf.c. No connections are needed: the forwarder learns of the flows by other means. A
//! lab with a flood cannot be used for anything else, because the flood's packets are not valid TCP.

use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use libbpf_rs::{
    MapCore, MapFlags, MapHandle, Object, ObjectBuilder, ProgramInput, TC_INGRESS, TcHookBuilder, Xdp, XdpFlags,
};
use nix::ifaddrs::getifaddrs;
use nix::sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

use crate::process::run;
use crate::topology::{CLIENT, SERVER};
use crate::{Lab, LabError, Namespace, Shape};

/// Array indices, generated from bpf/flood.h.
mod place {
    include!(concat!(env!("OUT_DIR"), "/flood.rs"));
}

/// The compiled bpf/flood.bpf.c.
static PROGRAMS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/flood.bpf.o"));

/// BPF_F_TEST_XDP_LIVE_FRAMES of <linux/bpf.h>: frames are actually sent.
const LIVE_FRAMES: u32 = 1 << 1;
/// Packets per system call, a fraction of a second's worth: each call ends with a wait of some milliseconds.
const BURST: u32 = 1 << 18;
/// Has the length of the generator's frames.
const FRAME: [u8; 55] = [0; 55];
/// Number of source ports per address, as a power of two.
const PORT_BITS: u32 = 15;
/// The first source port.
const FIRST_PORT: u16 = 1 << PORT_BITS;
/// The last octet of the first source address.
const FIRST_HOST: u8 = 64;
/// Maximum number of flows: limited by the addresses left in the /24.
pub const MOST_FLOWS: u32 = (255 - FIRST_HOST as u32) << PORT_BITS;
/// Sequence number of the first packet of each flow.
pub const FIRST_SEQ: u32 = 1000;
/// Acknowledgement number of all packets.
pub const ACK: u32 = 5000;
/// Time allowed for packets still in flight when the generator ends.
const REST: Duration = Duration::from_millis(20);

/// The destination of a flood.
#[derive(Clone, Copy, Debug)]
pub struct Aim {
    /// Number of flows, which are chosen at random for each packet; at most [`MOST_FLOWS`].
    pub flows: u32,
    /// Destination address of the packets that the client sends.
    pub target: SocketAddrV4,
    /// Destination port of the packets that arrive at the server.
    pub arrives_at: u16,
}

/// The generator and the sink in a lab.
#[derive(Debug)]
pub struct Flood {
    object: Object,
    counts: MapHandle,
    client: Namespace,
}

/// The result of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Flooded {
    /// Packets sent.
    pub sent: u64,
    /// Packets received at the server.
    pub arrived: u64,
    /// Time from the first packet to the last.
    pub elapsed: Duration,
    /// CPU time of the flood's thread and of the kernel's ksoftirqd thread.
    pub cpu: Duration,
}

/// Link-layer identity of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Interface index.
    pub index: u32,
    /// Ethernet address.
    pub mac: [u8; 6],
}

impl Namespace {
    /// The index and Ethernet address of a device in this namespace.
    pub fn link(&self, device: &str) -> Result<Link, LabError> {
        let found = self.run(|| {
            let mut links = getifaddrs()?.filter(|a| a.interface_name == device).filter_map(|a| {
                let link = *a.address?.as_link_addr()?;
                Some(Link { index: link.ifindex() as u32, mac: link.addr()? })
            });
            links.next().ok_or(nix::Error::ENODEV)
        });
        found.map_err(LabError::errno(format!("the address of {device}")))
    }
}

/// Address and port of flow number `flow`, in the client's network or under another prefix.
fn spread(prefix: Ipv4Addr, flow: u32) -> SocketAddrV4 {
    let [a, b, c, _] = prefix.octets();
    let host = u32::from(FIRST_HOST) + (flow >> PORT_BITS);
    SocketAddrV4::new(Ipv4Addr::new(a, b, c, host as u8), FIRST_PORT + (flow & ((1 << PORT_BITS) - 1)) as u16)
}

impl Flood {
    /// Source address and port of flow number `flow`.
    pub fn source(flow: u32) -> SocketAddrV4 {
        spread(CLIENT.v4, flow)
    }

    /// An address and port in the server's network for the flow, distinct from those of other flows.
    pub fn other_side(flow: u32) -> SocketAddrV4 {
        spread(SERVER.v4, flow)
    }

    /// Prepares a flood in a lab with two devices at the forwarder.
    /// Afterwards the forwarder has neighbour entries for both hosts.
    pub fn new(lab: &Lab, aim: Aim) -> Result<Self, LabError> {
        assert!(lab.shape() == Shape::TwoDevices, "a bridge would be part of what is measured");
        assert!(aim.flows > 0 && aim.flows <= MOST_FLOWS, "from 1 to {MOST_FLOWS} flows");
        let (c0, s0) = (lab.client.link("c0")?, lab.server.link("s0")?);
        let f0 = lab.forwarder.link(lab.client_device())?;
        // With GRO a veth receives by NAPI, as a network card does, and accepts frames without an skb.
        lab.forwarder.execute("ethtool", &["-K", lab.client_device(), "gro", "on"])?;
        let mac = s0.mac.map(|byte| format!("{byte:02x}")).join(":");
        lab.forwarder.ip(&format!(
            "neigh replace {} dev {} lladdr {mac} nud permanent\n",
            SERVER.v4,
            lab.server_device()
        ))?;

        let bpf = |what: &'static str| move |source| LabError::Bpf { what: what.into(), source };
        let object = load(&settings(&aim, c0, f0), aim.flows).map_err(bpf("loading the programs of the flood"))?;
        let counts = object.maps().find(|map| map.name().to_string_lossy().ends_with(".bss"));
        let counts =
            MapHandle::try_from(&counts.expect("bpf/flood.bpf.c counts")).map_err(bpf("opening the counts"))?;
        lab.server.run(|| -> Result<(), LabError> {
            run("tc", &["qdisc", "add", "dev", "s0", "clsact"], "")?;
            let mut hook = TcHookBuilder::new(program(&object, "sink_skb").as_fd())
                .ifindex(s0.index as i32)
                .handle(1)
                .priority(1)
                .hook(TC_INGRESS);
            hook.attach().map_err(bpf("attaching the sink behind the device"))?;
            let sink = Xdp::new(program(&object, "sink").as_fd()).attach(s0.index as i32, XdpFlags::DRV_MODE);
            sink.map_err(bpf("attaching the sink"))
        })?;
        Ok(Self { object, counts, client: lab.client.clone() })
    }

    /// Runs the flood for this long, on one CPU available to the calling thread.
    pub fn run(&mut self, length: Duration) -> Result<Flooded, LabError> {
        let Self { object, counts, client } = self;
        client.run(|| {
            let cpu = stay()?;
            let before = read(counts)?;
            let (began, used_before) = (Instant::now(), used(cpu));
            while began.elapsed() < length {
                send(object, "generate", &FRAME, BURST)?;
            }
            let (elapsed, cpu) = (began.elapsed(), used(cpu).saturating_sub(used_before));
            thread::sleep(REST);
            let after = read(counts)?;
            let of = |which: u32| after[which as usize] - before[which as usize];
            Ok(Flooded { sent: of(place::FLOOD_SENT), arrived: of(place::FLOOD_ARRIVED), elapsed, cpu })
        })
    }

    /// Sends the same frame repeatedly, in batches like a flood. Only the arrivals are counted.
    pub fn repeat(&mut self, frame: &[u8], times: u32) -> Result<(), LabError> {
        let Self { object, client, .. } = self;
        client.run(|| send(object, "pass_on", frame, times))
    }

    /// Number of packets that arrived with wrong checksums, among the first few thousand.
    pub fn wrong(&self) -> Result<u64, LabError> {
        Ok(read(&self.counts)?[place::FLOOD_WRONG as usize])
    }
}

/// Makes a program send live frames with this content.
fn send(object: &mut Object, by: &str, frame: &[u8], times: u32) -> Result<(), LabError> {
    let by = object.progs_mut().find(|found| found.name() == by).expect("bpf/flood.bpf.c has this program");
    let input = ProgramInput { data_in: Some(frame), flags: LIVE_FRAMES, repeat: times, ..Default::default() };
    let sent = by.test_run(input).map_err(|source| LabError::Bpf { what: "sending live frames".into(), source });
    sent.map(drop)
}

fn read(counts: &MapHandle) -> Result<Vec<u64>, LabError> {
    let value = counts.lookup(&0u32.to_ne_bytes(), MapFlags::ANY);
    let value = value.map_err(|source| LabError::Bpf { what: "reading the counts".into(), source })?;
    let words = value.unwrap_or_default();
    Ok(words.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().expect("8 bytes"))).collect())
}

fn settings(aim: &Aim, from: Link, to: Link) -> [(u32, u64); 12] {
    let mac = |m: [u8; 6]| u64::from_le_bytes([m[0], m[1], m[2], m[3], m[4], m[5], 0, 0]);
    let source = Flood::source(0);
    [
        (place::FLOOD_DEVICE, from.index.into()),
        (place::FLOOD_TO_MAC, mac(to.mac)),
        (place::FLOOD_FROM_MAC, mac(from.mac)),
        (place::FLOOD_FLOWS, aim.flows.into()),
        (place::FLOOD_SOURCE, source.ip().to_bits().into()),
        (place::FLOOD_SOURCE_PORT, source.port().into()),
        (place::FLOOD_PORT_BITS, PORT_BITS.into()),
        (place::FLOOD_TARGET, aim.target.ip().to_bits().into()),
        (place::FLOOD_TARGET_PORT, aim.target.port().into()),
        (place::FLOOD_SINK_PORT, aim.arrives_at.into()),
        (place::FLOOD_SEQ, FIRST_SEQ.into()),
        (place::FLOOD_ACK, ACK.into()),
    ]
}

/// Loads the programs. Settings are constants, which the kernel compiles in.
fn load(settings: &[(u32, u64)], flows: u32) -> libbpf_rs::Result<Object> {
    let mut open = ObjectBuilder::default().open_memory(PROGRAMS)?;
    let mut sent = open.maps_mut().find(|map| map.name() == "sent").expect("bpf/flood.bpf.c counts by flow");
    sent.set_max_entries(flows)?;
    let mut constants = open.maps_mut().find(|map| map.name().to_string_lossy().ends_with(".rodata"));
    let bytes = constants.as_mut().and_then(|map| map.initial_value_mut()).expect("bpf/flood.bpf.c has settings");
    for (which, value) in settings {
        let at = *which as usize * 8;
        bytes[at..at + 8].copy_from_slice(&value.to_ne_bytes());
    }
    open.load()
}

fn program<'a>(object: &'a Object, name: &str) -> libbpf_rs::Program<'a> {
    object.progs().find(|found| found.name() == name).expect("bpf/flood.bpf.c has this program")
}

/// Pins the calling thread to a CPU that it may use. Returns that CPU.
fn stay() -> Result<usize, LabError> {
    let failed = || LabError::errno("staying on one CPU");
    let me = Pid::from_raw(0);
    let may = sched_getaffinity(me).map_err(failed())?;
    let here = sched_getcpu().map_err(failed())?;
    let first = (0..CpuSet::count()).find(|cpu| may.is_set(*cpu).unwrap_or(false));
    let cpu = if may.is_set(here).unwrap_or(false) { here } else { first.unwrap_or(here) };
    let mut one = CpuSet::new();
    one.set(cpu).and_then(|()| sched_setaffinity(me, &one)).map_err(failed())?;
    Ok(cpu)
}

/// CPU time that the calling thread and the ksoftirqd thread have used on this CPU.
fn used(cpu: usize) -> Duration {
    let mine = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("this clock always exists").into();
    late_softirqs(cpu).map_or(mine, |late| late + mine)
}

fn late_softirqs(cpu: usize) -> Option<Duration> {
    static THREADS: std::sync::Mutex<Vec<(usize, Option<u32>)>> = std::sync::Mutex::new(Vec::new());
    let mut threads = THREADS.lock().ok()?;
    if !threads.iter().any(|(of, _)| *of == cpu) {
        threads.push((cpu, thread_of(&format!("ksoftirqd/{cpu}"))));
    }
    let pid = threads.iter().find(|(of, _)| *of == cpu)?.1?;
    let stat = fs::read_to_string(format!("/proc/{pid}/schedstat")).ok()?;
    Some(Duration::from_nanos(stat.split_whitespace().next()?.parse().ok()?))
}

fn thread_of(name: &str) -> Option<u32> {
    let pids = fs::read_dir("/proc").ok()?.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    let mut pids = pids.filter(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c.trim() == name));
    pids.next()
}
