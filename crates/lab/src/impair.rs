//! Loss, duplication, reordering, delay and rate for one direction of one link, on kernels without netem.
//!
//! Impairments are put on the client's and the server's own devices, never on the forwarder's: the data path that is
//! tested there has its devices to itself. What is lost, duplicated or held back is decided in bpf/lab.bpf.c; delay and
//! rate are kept by a thread (delay.rs), through which packets pass one by one, not as super-packets. Loss and
//! duplication work on super-packets as they are, so use [`crate::Options::large_packets`] `= false` with them.
//!
//! Everything that was done is counted: a test that passes because nothing was impaired proves nothing.

use std::os::fd::AsFd;
use std::time::Duration;

use libbpf_rs::{
    MapCore, MapFlags, MapHandle, Object, ObjectBuilder, TC_EGRESS, TC_INGRESS, TcAttachPoint, TcHookBuilder,
};

use crate::delay::{DelayLine, Timing};
use crate::process::run;
use crate::topology::steer;
use crate::{Lab, LabError, Namespace};

/// Places in the maps, made from bpf/lab.h.
mod place {
    include!(concat!(env!("OUT_DIR"), "/places.rs"));
}

/// The compiled bpf/lab.bpf.c.
static PROGRAMS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/lab.bpf.o"));

/// One direction of one link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkDirection {
    /// What the client sends.
    FromClient,
    /// What the client receives.
    ToClient,
    /// What the server sends.
    FromServer,
    /// What the server receives.
    ToServer,
}

/// What to do to the packets of one direction. The default does nothing.
#[derive(Clone, Copy, Debug)]
pub struct Impair {
    /// Share of packets lost.
    pub loss: f64,
    /// Every so many-th packet is lost, beginning with that one.
    pub drop_every: Option<u64>,
    /// Share of packets marked for congestion, of those that may be: CE for ECT (RFC 3168).
    pub mark: f64,
    /// Share of packets sent twice.
    pub duplicate: f64,
    /// Share of packets held back, so that later ones overtake them.
    pub reorder: f64,
    /// How long they are held back.
    pub reorder_by: Duration,
    /// How long every packet takes.
    pub delay: Duration,
    /// Bytes a second, headers included.
    pub rate_bytes_per_s: Option<u64>,
    /// How much waiting for the rate is allowed; beyond that packets are dropped, as in a router.
    pub queue: Duration,
    /// Decides which packets are hit.
    pub seed: u64,
}

impl Default for Impair {
    fn default() -> Self {
        Self::NONE
    }
}

impl Impair {
    /// The default: all packets pass as they are.
    pub const NONE: Self = Self {
        loss: 0.0,
        drop_every: None,
        mark: 0.0,
        duplicate: 0.0,
        reorder: 0.0,
        reorder_by: Duration::from_millis(2),
        delay: Duration::ZERO,
        rate_bytes_per_s: None,
        queue: Duration::from_millis(100),
        seed: 1,
    };

    fn all_detoured(&self) -> bool {
        !self.delay.is_zero() || self.rate_bytes_per_s.is_some()
    }

    /// If all take the detour the delay line chooses whom to hold back; otherwise the program has chosen.
    fn timing(&self) -> Timing {
        Timing {
            delay: self.delay,
            rate: self.rate_bytes_per_s,
            queue: self.queue,
            reorder: if self.all_detoured() { self.reorder.clamp(0.0, 1.0) } else { 1.0 },
            reorder_by: self.reorder_by,
        }
    }

    fn settings(&self) -> [(u32, u64); 7] {
        let share = |probability: f64| (probability.clamp(0.0, 1.0) * 2f64.powi(32)) as u64;
        [
            (place::SETTING_SEED, self.seed),
            (place::SETTING_LOSS, share(self.loss)),
            (place::SETTING_DUPLICATE, share(self.duplicate)),
            (place::SETTING_REORDER, share(self.reorder)),
            (place::SETTING_MARK, share(self.mark)),
            (place::SETTING_DROP_EVERY, self.drop_every.unwrap_or(0)),
            (place::SETTING_DETOUR_ALL, self.all_detoured().into()),
        ]
    }
}

/// What was done to packets so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Impaired {
    /// TCP and UDP packets that came by.
    pub seen: u64,
    /// Lost on purpose.
    pub lost: u64,
    /// Marked for congestion.
    pub marked: u64,
    /// Sent twice.
    pub duplicated: u64,
    /// Held back longer than the others.
    pub reordered: u64,
    /// Let go by the delay line, reordered ones included.
    pub delayed: u64,
    /// Dropped because the queue for the rate was full.
    pub overflowed: u64,
    /// Lost by the lab itself: it could not send them. Not meant to happen.
    pub unsent: u64,
}

/// An impairment at work. Dropping it makes the link perfect again; what is on the detour then is lost.
#[derive(Debug)]
pub struct Impairment {
    namespace: Namespace,
    device: &'static str,
    at: TcAttachPoint,
    near: String,
    settings: MapHandle,
    counts: MapHandle,
    // None only while dropping.
    line: Option<DelayLine>,
}

impl Lab {
    /// Impairs one direction of one link.
    pub fn impair(&self, way: LinkDirection, impair: Impair) -> Result<Impairment, LabError> {
        let (namespace, device, at) = match way {
            LinkDirection::FromClient => (&self.client, "c0", TC_EGRESS),
            LinkDirection::ToClient => (&self.client, "c0", TC_INGRESS),
            LinkDirection::FromServer => (&self.server, "s0", TC_EGRESS),
            LinkDirection::ToServer => (&self.server, "s0", TC_INGRESS),
        };
        Impairment::attach(namespace, device, at, impair)
    }
}

impl Impairment {
    fn attach(
        namespace: &Namespace,
        device: &'static str,
        at: TcAttachPoint,
        impair: Impair,
    ) -> Result<Self, LabError> {
        let side = if at == TC_INGRESS { "i" } else { "e" };
        let (near, far) = (format!("{device}-{side}-near"), format!("{device}-{side}-far"));
        make_detour(namespace, &near, &far)?;
        steer(namespace, &[&near, &far], 0)?;

        let bpf = |what: &'static str| move |source| LabError::Bpf { what: what.into(), source };
        let object = ObjectBuilder::default().open_memory(PROGRAMS).and_then(|open| open.load());
        let object = object.map_err(bpf("loading the impairment programs"))?;
        let [settings, counts] = ["settings", "counts"].map(|name| map(&object, name));
        let impairment = Self {
            line: Some(DelayLine::start(namespace, &far, impair.timing(), impair.seed)?),
            settings: settings.map_err(bpf("opening the settings"))?,
            counts: counts.map_err(bpf("opening the counts"))?,
            namespace: namespace.clone(),
            device,
            at,
            near,
        };
        let number = |device: &str| index(namespace, device);
        impairment.set(&[
            (place::SETTING_DETOUR, number(&impairment.near)?.into()),
            (place::SETTING_DEVICE, number(device)?.into()),
            (place::SETTING_INGRESS, (at == TC_INGRESS).into()),
        ])?;
        impairment.set(&impair.settings())?;
        // From the far end to the device: nothing is redirected to where nobody is yet.
        for (program, device, at) in
            [("swallow", far.as_str(), TC_INGRESS), ("came_back", &impairment.near, TC_INGRESS), ("impair", device, at)]
        {
            let number = number(device)?;
            // Fails if the other direction has added it; libbpf would say so on standard error.
            let _ = namespace.execute("tc", &["qdisc", "add", "dev", device, "clsact"]);
            namespace.run(|| hook(&object, program, number, at)).map_err(bpf("attaching the impairment programs"))?;
        }
        Ok(impairment)
    }

    /// Changes what is done, from the next packet on. Counters go on.
    pub fn change(&self, impair: Impair) -> Result<(), LabError> {
        if let Some(line) = &self.line {
            line.set_timing(impair.timing());
        }
        self.set(&impair.settings())
    }

    /// What was done so far.
    pub fn counters(&self) -> Impaired {
        use std::sync::atomic::Ordering::Relaxed;
        let count = |which: u32| match self.counts.lookup(&which.to_ne_bytes(), MapFlags::ANY) {
            Ok(Some(value)) => value.try_into().map_or(0, u64::from_ne_bytes),
            _ => 0,
        };
        let line = self.line.as_ref().map(DelayLine::counts);
        let of_line = |field: fn(&crate::delay::Counts) -> &std::sync::atomic::AtomicU64| {
            line.map_or(0, |counts| field(counts).load(Relaxed))
        };
        Impaired {
            seen: count(place::COUNT_SEEN),
            lost: count(place::COUNT_LOST),
            marked: count(place::COUNT_MARKED),
            duplicated: count(place::COUNT_DUPLICATED),
            reordered: of_line(|counts| &counts.reordered),
            delayed: of_line(|counts| &counts.delayed),
            overflowed: of_line(|counts| &counts.overflowed),
            unsent: of_line(|counts| &counts.unsent),
        }
    }

    fn set(&self, settings: &[(u32, u64)]) -> Result<(), LabError> {
        let update = |&(which, value): &(u32, u64)| {
            self.settings.update(&which.to_ne_bytes(), &value.to_ne_bytes(), MapFlags::ANY)
        };
        settings
            .iter()
            .try_for_each(update)
            .map_err(|source| LabError::Bpf { what: "setting the impairment".into(), source })
    }
}

impl Drop for Impairment {
    fn drop(&mut self) {
        let side = if self.at == TC_INGRESS { "ingress" } else { "egress" };
        // The program first, then what it leads to. With the namespace gone already there is nothing to undo.
        let _ = self.namespace.execute("tc", &["filter", "del", "dev", self.device, side]);
        self.line = None;
        let _ = self.namespace.execute("ip", &["link", "del", &self.near]);
    }
}

/// The near end must hand over single packets with complete checksums: they are read as frames.
fn make_detour(namespace: &Namespace, near: &str, far: &str) -> Result<(), LabError> {
    namespace.run(|| {
        let pair = format!("link add {near} mtu 65535 txqueuelen 10000 type veth peer {far} mtu 65535\n");
        run("ip", &["-batch", "-"], &pair)?;
        for device in [near, far] {
            // The stack has nothing to say here.
            let path = format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6");
            std::fs::write(&path, "1").map_err(LabError::io(path))?;
        }
        const OFF: [&str; 8] = ["tso", "off", "gso", "off", "gro", "off", "tx", "off"];
        run("ethtool", &[&["-K", near][..], &OFF].concat(), "")?;
        run("ip", &["-batch", "-"], &format!("link set {near} up arp off\nlink set {far} up arp off\n")).map(drop)
    })
}

fn index(namespace: &Namespace, device: &str) -> Result<u32, LabError> {
    namespace.run(|| nix::net::if_::if_nametoindex(device)).map_err(LabError::errno(format!("the number of {device}")))
}

fn map(object: &Object, name: &str) -> libbpf_rs::Result<MapHandle> {
    let map = object.maps().find(|map| map.name() == name).expect("bpf/lab.bpf.c has this map");
    MapHandle::try_from(&map)
}

/// Attaches a program to a clsact, which leaves tcx and the order of the programs there alone. Inside the namespace.
fn hook(object: &Object, program: &str, index: u32, at: TcAttachPoint) -> libbpf_rs::Result<()> {
    let program = object.progs().find(|found| found.name() == program).expect("bpf/lab.bpf.c has this program");
    let mut hook =
        TcHookBuilder::new(program.as_fd()).ifindex(index as i32).replace(true).handle(1).priority(1).hook(at);
    hook.attach().map(drop)
}
