//! Loss, duplication, reordering, delay and rate for one direction of one link, on kernels without netem.
//!
//! Impairments are attached to the devices of the client and the server, never of the forwarder: the data path under test
//! has its devices to itself. Programs that are attached to the client's or the server's device already see each packet once,
//! as if it were impaired on the wire. bpf/lab.bpf.c decides which packets are lost, duplicated or held back. A thread (delay.rs)
//! implements delay and rate; packets pass through it one by one, not as super-packets. Loss and duplication apply to whole
//! super-packets, so use them with [`crate::Options::large_packets`] `= false`.
//!
//! Every impairment is counted: a test that passes because nothing was impaired proves nothing.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use libbpf_rs::{MapCore, MapFlags, MapHandle, Object, ObjectBuilder, Program, TC_EGRESS, TcHookBuilder};
use longsplice_datapath::attach_first;
use serde::Deserialize;

use crate::delay::{DelayLine, Timing};
use crate::process::run;
use crate::topology::steer;
use crate::{Lab, LabError, Namespace};

/// Map indices, generated from bpf/lab.h.
mod place {
    include!(concat!(env!("OUT_DIR"), "/places.rs"));
}

/// The compiled bpf/lab.bpf.c.
static PROGRAMS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/lab.bpf.o"));

/// One direction of one link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkDirection {
    /// Packets sent by the client.
    FromClient,
    /// Packets received by the client.
    ToClient,
    /// Packets sent by the server.
    FromServer,
    /// Packets received by the server.
    ToServer,
    /// Packets sent by the second forwarder to the first, for [`Shape::TwoForwarders`](crate::Shape). Programs of the first
    /// that are to see what has passed the link must be attached before.
    FromSecond,
    /// Packets sent by the first forwarder to the second, likewise.
    ToSecond,
}

/// The impairments of one direction. The default is none.
#[derive(Clone, Copy, Debug)]
pub struct Impair {
    /// Fraction of packets lost.
    pub loss: f64,
    /// Only the first n packets of each connection can be lost by `loss`, which bounds how long a connection is delayed.
    pub loss_among_first: Option<u64>,
    /// Lose every n-th packet, starting with the n-th.
    pub drop_every: Option<u64>,
    /// Fraction of ECN-capable packets that are marked: ECT becomes CE (RFC 3168).
    pub mark: f64,
    /// Fraction of packets sent twice.
    pub duplicate: f64,
    /// Fraction of packets held back, so that later packets overtake them.
    pub reorder: f64,
    /// Additional delay of packets that are held back.
    pub reorder_by: Duration,
    /// Delay of every packet.
    pub delay: Duration,
    /// Bytes per second, headers included.
    pub rate_bytes_per_s: Option<u64>,
    /// Maximum time that a packet may wait for the rate; beyond it packets are dropped, as in a router.
    pub queue: Duration,
    /// Whether each connection has the rate and the queue to itself, so that none delays another.
    pub per_connection: bool,
    /// Seed that determines which packets are affected.
    pub seed: u64,
}

impl Default for Impair {
    fn default() -> Self {
        Self::NONE
    }
}

impl Impair {
    /// No impairment, which is the default.
    pub const NONE: Self = Self {
        loss: 0.0,
        loss_among_first: None,
        drop_every: None,
        mark: 0.0,
        duplicate: 0.0,
        reorder: 0.0,
        reorder_by: Duration::from_millis(2),
        delay: Duration::ZERO,
        rate_bytes_per_s: None,
        queue: Duration::from_millis(100),
        per_connection: false,
        seed: 1,
    };

    fn all_detoured(&self) -> bool {
        !self.delay.is_zero() || self.rate_bytes_per_s.is_some()
    }

    /// If all packets take the detour, the delay line chooses which
    /// ones to hold back; otherwise the program has already chosen.
    fn timing(&self) -> Timing {
        Timing {
            delay: self.delay,
            rate: self.rate_bytes_per_s,
            queue: self.queue,
            per_connection: self.per_connection,
            reorder: if self.all_detoured() { self.reorder.clamp(0.0, 1.0) } else { 1.0 },
            reorder_by: self.reorder_by,
        }
    }

    fn settings(&self) -> [(u32, u64); 8] {
        let share = |probability: f64| (probability.clamp(0.0, 1.0) * 2f64.powi(32)) as u64;
        [
            (place::SETTING_SEED, self.seed),
            (place::SETTING_LOSS, share(self.loss)),
            (place::SETTING_LOSS_AMONG_FIRST, self.loss_among_first.unwrap_or(0)),
            (place::SETTING_DUPLICATE, share(self.duplicate)),
            (place::SETTING_REORDER, share(self.reorder)),
            (place::SETTING_MARK, share(self.mark)),
            (place::SETTING_DROP_EVERY, self.drop_every.unwrap_or(0)),
            (place::SETTING_DETOUR_ALL, self.all_detoured().into()),
        ]
    }
}

/// Counters of impairments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Impaired {
    /// TCP and UDP packets seen.
    pub seen: u64,
    /// Packets lost on purpose.
    pub lost: u64,
    /// Packets marked with CE.
    pub marked: u64,
    /// Packets sent twice.
    pub duplicated: u64,
    /// Packets held back longer than the others.
    pub reordered: u64,
    /// Packets sent on by the delay line, including reordered ones.
    pub delayed: u64,
    /// Packets dropped because the queue for the rate was full.
    pub overflowed: u64,
    /// Packets that the lab failed to send. Should be zero.
    pub unsent: u64,
}

/// An active impairment. Dropping it removes the impairment; packets on the detour at that time are lost.
#[derive(Debug)]
pub struct Impairment {
    namespace: Namespace,
    device: &'static str,
    receives: bool,
    near: String,
    settings: MapHandle,
    counts: MapHandle,
    links: Vec<OwnedFd>,
    // None only during drop.
    line: Option<DelayLine>,
}

impl Lab {
    /// Impairs one direction of one link.
    pub fn impair(&self, way: LinkDirection, impair: Impair) -> Result<Impairment, LabError> {
        let (namespace, device, receives) = match way {
            LinkDirection::FromClient => (&self.client, "c0", false),
            LinkDirection::ToClient => (&self.client, "c0", true),
            LinkDirection::FromServer => (&self.server, "s0", false),
            LinkDirection::ToServer => (&self.server, "s0", true),
            LinkDirection::FromSecond => (&self.forwarder, "f1", true),
            LinkDirection::ToSecond => (&self.forwarder, "f1", false),
        };
        Impairment::attach(namespace, device, receives, impair)
    }
}

impl Impairment {
    fn attach(namespace: &Namespace, device: &'static str, receives: bool, impair: Impair) -> Result<Self, LabError> {
        let side = if receives { "i" } else { "e" };
        let (near, far) = (format!("{device}-{side}-near"), format!("{device}-{side}-far"));
        make_detour(namespace, &near, &far)?;
        steer(namespace, &[&near, &far], 0)?;

        let bpf = |what: &'static str| move |source| LabError::Bpf { what: what.into(), source };
        let object = ObjectBuilder::default().open_memory(PROGRAMS).and_then(|open| open.load());
        let object = object.map_err(bpf("loading the impairment programs"))?;
        let [settings, counts] = ["settings", "counts"].map(|name| map(&object, name));
        let mut impairment = Self {
            line: Some(DelayLine::start(namespace, &far, impair.timing(), impair.seed)?),
            settings: settings.map_err(bpf("opening the settings"))?,
            counts: counts.map_err(bpf("opening the counts"))?,
            namespace: namespace.clone(),
            device,
            receives,
            near: near.clone(),
            links: Vec::new(),
        };
        let number = |device: &str| index(namespace, device);
        impairment.set(&[
            (place::SETTING_DETOUR, number(&near)?.into()),
            (place::SETTING_DEVICE, number(device)?.into()),
            (place::SETTING_INGRESS, receives.into()),
        ])?;
        impairment.set(&impair.settings())?;
        // Attach from the far end towards the device, so that no packet is redirected to a program not yet attached.
        let at_device = if receives { "impair" } else { "pass_by" };
        for (name, device, ingress) in [
            ("swallow", far.as_str(), true),
            ("on_detour", &far, false),
            ("came_back", &near, true),
            ("on_detour", &near, false),
            (at_device, device, receives),
        ] {
            let number = number(device)?;
            let link = namespace.run(|| attach_first(program(&object, name).as_fd(), number, ingress));
            impairment.links.push(link.map_err(LabError::io(format!("attaching {name} to {device}")))?);
        }
        if !receives {
            // Fails if it is there already; libbpf would print that on standard error.
            let _ = namespace.execute("tc", &["qdisc", "add", "dev", device, "clsact"]);
            let number = number(device)?;
            namespace.run(|| hook_last(&object, "impair", number)).map_err(bpf("attaching the impairment"))?;
        }
        Ok(impairment)
    }

    /// Changes the impairments from the next packet on. The counters continue.
    pub fn change(&self, impair: Impair) -> Result<(), LabError> {
        if let Some(line) = &self.line {
            line.set_timing(impair.timing());
        }
        self.set(&impair.settings())
    }

    /// Starts the impairments again: the packets from now on meet the fate
    /// of the first ones, as the seed determines it. The counters continue.
    pub fn restart(&self, impair: Impair) -> Result<(), LabError> {
        let seen = self.counters().seen;
        self.change(Impair { seed: restarted(impair.seed, seen), ..impair })
    }

    /// The counters so far.
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
        // Remove the program first, then its detour. If the namespace is already gone, there is nothing to undo.
        if self.receives {
            drop(self.links.pop());
        } else {
            let _ = self.namespace.execute("tc", &["filter", "del", "dev", self.device, "egress"]);
        }
        self.line = None;
        let _ = self.namespace.execute("ip", &["link", "del", &self.near]);
    }
}

/// The seed with which the packet after `seen` others meets the fate of the
/// first one: `chance()` in bpf/lab.bpf.c adds this much to it for each packet.
fn restarted(seed: u64, seen: u64) -> u64 {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    const DICE: u64 = 4;
    seed.wrapping_sub(seen.wrapping_mul(DICE).wrapping_mul(GOLDEN))
}

/// Creates the detour. The near end must deliver single packets
/// with complete checksums, because they are read as raw frames.
fn make_detour(namespace: &Namespace, near: &str, far: &str) -> Result<(), LabError> {
    namespace.run(|| {
        let pair = format!("link add {near} mtu 65535 txqueuelen 10000 type veth peer {far} mtu 65535\n");
        run("ip", &["-batch", "-"], &pair)?;
        for device in [near, far] {
            // Keep the IPv6 stack from sending anything on these devices.
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

fn program<'a>(object: &'a Object, name: &str) -> Program<'a> {
    object.progs().find(|found| found.name() == name).expect("bpf/lab.bpf.c has this program")
}

/// Attaches a program by clsact where packets leave: after all programs of tcx,
/// also those attached later. Must be called inside the namespace.
fn hook_last(object: &Object, name: &str, index: u32) -> libbpf_rs::Result<()> {
    let program = program(object, name);
    let mut hook =
        TcHookBuilder::new(program.as_fd()).ifindex(index as i32).replace(true).handle(1).priority(1).hook(TC_EGRESS);
    hook.attach().map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restarted_seed_makes_up_for_the_packets_seen() {
        assert_eq!(restarted(7, 0), 7);
        assert_eq!(restarted(restarted(7, 3), 5), restarted(7, 8));
        let golden = 0x9e37_79b9_7f4a_7c15_u64;
        assert_eq!(restarted(7, 2).wrapping_add(golden.wrapping_mul(2 * 4)), 7);
    }
}
