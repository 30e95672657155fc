//! Events in the network and in the program during the traffic: a deck of cards, shuffled repeatedly.

use super::{
    ledger::Harm,
    program::{Going, Means, Program},
    traffic::Traffic,
};
use crate::running::Control;
use longsplice_lab::{Impair, Lab, LinkDirection, Namespace, process::wait_for};
use rand::{RngExt, rngs::SmallRng, seq::SliceRandom};
use std::{
    sync::{Arc, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// How long tables with few places may take to be full, with clients that come all the time.
const FULL_WITHIN: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Card {
    /// A host changes its Ethernet address.
    Neighbour,
    /// A device of the forwarder changes its Ethernet address.
    OwnAddress,
    /// The route to the server moves to a second link, and back.
    Route,
    /// A device is down for a while.
    Down,
    /// A device is deleted and created again.
    Remade,
    /// Packets are lost, duplicated and reordered.
    Losses,
    /// Many flows get commands to switch, repeatedly.
    Storm,
    /// The MTU of a link is reduced for a while.
    Mtu,
    /// The configuration is reloaded, repeatedly.
    Reloads,
    /// The process is killed, and started again at once.
    Killed,
    /// The process is killed while flows get commands to switch, and started again after a while.
    KilledInStorm,
    /// The process is killed while a device is down.
    KilledWhileDown,
    /// The process is stopped and leaves its flows.
    Left,
    /// The process is killed; the next one has few descriptors.
    FewDescriptors,
    /// The process is stopped; the next one has small tables.
    FewFlows,
}

/// Cards that the process survives.
const NETWORK: [Card; 9] = [
    Card::Neighbour,
    Card::OwnAddress,
    Card::Route,
    Card::Down,
    Card::Remade,
    Card::Losses,
    Card::Storm,
    Card::Mtu,
    Card::Reloads,
];
const PROCESS: [Card; 6] =
    [Card::Killed, Card::KilledInStorm, Card::KilledWhileDown, Card::Left, Card::FewDescriptors, Card::FewFlows];

impl Card {
    /// A shuffled deck; `process`: with the cards that end the process.
    pub fn deck(process: bool, r: &mut SmallRng) -> Vec<Card> {
        let mut deck: Vec<Card> = NETWORK.into_iter().chain(PROCESS.into_iter().filter(|_| process)).collect();
        deck.shuffle(r);
        deck
    }
}

/// The environment of the events.
pub struct Stage {
    pub program: Program,
    pub traffic: Arc<Traffic>,
    pub r: SmallRng,
    pub lab: Lab,
}

fn ip(host: &Namespace, commands: &[String]) {
    for line in commands {
        host.execute("ip", &line.split(' ').collect::<Vec<_>>()).unwrap_or_else(|e| panic!("ip {line}: {e}"));
    }
}

/// Adds a second link between forwarder and server, which is not used yet, and lets hosts learn of our address changes.
pub fn prepare(lab: &Lab) {
    ip(&lab.forwarder, &[format!("link add f2 type veth peer name s1 netns {}", lab.server.path().display())]);
    for (host, device, number) in [(&lab.forwarder, "f2", 1), (&lab.server, "s1", 2)] {
        let addresses =
            [format!("10.77.3.{number}/24 dev {device}"), format!("fd77:3::{number}/64 dev {device} nodad")];
        ip(host, &addresses.map(|address| format!("addr add {address}")));
        ip(host, &[format!("link set {device} up")]);
    }
    announce(&lab.forwarder, true);
    ["f0", "f1", "f2"].iter().for_each(|device| soon_noticed(lab, device));
}

/// Makes the kernel notice a silent change behind one of our devices within 15 s
/// instead of a minute: with so many other events, hosts would wait for too long.
fn soon_noticed(lab: &Lab, device: &str) {
    for family in ["ipv4", "ipv6"] {
        let setting = format!("net.{family}.neigh.{device}.base_reachable_time_ms");
        lab.forwarder.sysctl(&setting, "5000").expect("sysctl");
    }
}

/// Whether a host announces its new addresses. Without this, peers
/// find out only when they ask, which may take half a minute.
fn announce(host: &Namespace, tells: bool) {
    for setting in ["net.ipv4.conf.all.arp_notify", "net.ipv6.conf.all.ndisc_notify"] {
        host.sysctl(setting, if tells { "1" } else { "0" }).expect("sysctl");
    }
}

impl Stage {
    /// Waits for a random time in milliseconds, or until something has failed.
    pub fn pass(&mut self, low: u64, high: u64) {
        let end = Instant::now() + Duration::from_millis(self.r.random_range(low..high));
        while Instant::now() < end && self.traffic.ledger.failures().is_empty() {
            thread::sleep(Duration::from_millis(20));
        }
        self.traffic.ledger.settle(false);
    }

    fn address(&mut self) -> String {
        let [a, b, c]: [u8; 3] = self.r.random();
        format!("address 02:77:00:{a:02x}:{b:02x}:{c:02x}")
    }

    fn device(&mut self) -> &'static str {
        ["f0", "f1"][self.r.random_range(0..2)]
    }

    pub fn play(&mut self, card: Card) {
        let traffic = self.traffic.clone();
        let ledger = &traffic.ledger;
        match card {
            Card::Neighbour => {
                let is_client = self.r.random();
                let address = self.address();
                let (host, device) = if is_client { (&self.lab.client, "c0") } else { (&self.lab.server, "s0") };
                let tells = self.r.random();
                let harm = if tells { Harm::None } else { Harm::Late };
                ledger.ends(ledger.begins(&format!("{device} gets {address}, and tells others: {tells}"), harm));
                announce(host, tells);
                ip(host, &[format!("link set {device} {address}")]);
                self.pass(3000, 6000);
            }
            Card::OwnAddress => {
                let (device, address) = (self.device(), self.address());
                ledger.note(&format!("{device} gets {address}"));
                ip(&self.lab.forwarder, &[format!("link set {device} {address}")]);
                self.pass(2000, 4000);
            }
            Card::Route => {
                ledger.note("the server is reached by f2");
                self.route("add");
                self.pass(2000, 5000);
                ledger.note("... and by f1 again");
                self.route("del");
                self.pass(1000, 3000);
            }
            Card::Down => {
                let device = self.device();
                let down = ledger.begins(&format!("{device} is down"), Harm::Away);
                self.lab.take_down(device).expect("down");
                self.pass(200, 2500);
                self.lab.bring_up(device).expect("up");
                ledger.ends(down);
                self.pass(2000, 4000);
            }
            Card::Remade => {
                let gone = ledger.begins("f1 is deleted, and made again", Harm::Away);
                self.lab.cut_server_wire().expect("deleted");
                self.pass(1, 1500);
                self.lab.lay_server_wire().expect("made");
                soon_noticed(&self.lab, "f1");
                ledger.ends(gone);
                self.pass(3000, 5000);
            }
            Card::Losses => {
                let way = [LinkDirection::FromClient, LinkDirection::ToClient][self.r.random_range(0..2)];
                let losses =
                    Impair { loss: 0.01, duplicate: 0.01, reorder: 0.02, seed: self.r.random(), ..Impair::NONE };
                let lossy = ledger.begins(&format!("losses: {way:?}"), Harm::Again);
                let impairment = self.lab.impair(way, losses).expect("an impairment");
                self.pass(3000, 6000);
                drop(impairment);
                ledger.ends(lossy);
                ledger.note("no more losses");
            }
            Card::Storm => {
                ledger.note("a storm of commands");
                self.storm(Duration::from_millis(2000));
            }
            Card::Mtu => {
                let (forwarder, host, ours, theirs) = if self.r.random() {
                    (&self.lab.forwarder, &self.lab.client, "f0", "c0")
                } else {
                    (&self.lab.forwarder, &self.lab.server, "f1", "s0")
                };
                let set = |mtu: u32| {
                    ledger.note(&format!("{ours} and {theirs} carry {mtu} bytes"));
                    ip(forwarder, &[format!("link set {ours} mtu {mtu}")]);
                    ip(host, &[format!("link set {theirs} mtu {mtu}")]);
                };
                set(1300);
                thread::sleep(Duration::from_secs(4));
                set(1500);
                self.pass(1000, 3000);
            }
            Card::Reloads => {
                ledger.note("the configuration is reloaded, ten times");
                for n in 0..10 {
                    self.program.reload(n);
                    self.pass(1, 200);
                }
            }
            Card::Killed => {
                self.pass(0, 1000);
                self.replace(Going::Killed, Means::Ample, |_| {});
                self.pass(1000, 4000);
            }
            Card::KilledInStorm => {
                self.storm(Duration::from_millis(500));
                let pause = self.r.random_range(0..2000);
                self.replace(Going::Killed, Means::Ample, |_| thread::sleep(Duration::from_millis(pause)));
                self.pass(1000, 4000);
            }
            Card::KilledWhileDown => {
                let device = self.device();
                let down = ledger.begins(&format!("{device} is down"), Harm::Away);
                self.keep_addresses(true); // the program does not start without the addresses it listens on
                self.lab.take_down(device).expect("down");
                self.pass(1, 500);
                let before = self.r.random();
                let up = |lab: &Lab| lab.bring_up(device).expect("up");
                self.replace(Going::Killed, Means::Ample, |lab| {
                    if before {
                        up(lab)
                    }
                });
                if !before {
                    up(&self.lab);
                }
                self.keep_addresses(false);
                ledger.ends(down);
                self.pass(2000, 4000);
            }
            Card::Left => {
                self.replace(Going::Leaving, Means::Ample, |_| {});
                self.pass(1000, 4000);
            }
            Card::FewDescriptors => {
                let few = ledger.begins("few descriptors", Harm::New);
                self.replace(Going::Killed, Means::FewDescriptors, |_| {});
                self.pass(8000, 12_000);
                self.replace(Going::Killed, Means::Ample, |_| {});
                ledger.ends(few);
                self.pass(1000, 2000);
            }
            Card::FewFlows => {
                let few = ledger.begins("few flows", Harm::Taken);
                self.replace(Going::Clean, Means::FewFlows, |_| {});
                self.pass(6000, 10_000);
                self.full_tables();
                self.replace(Going::Clean, Means::Ample, |_| {});
                ledger.ends(few);
                self.pass(1000, 2000);
            }
        }
    }

    /// Replaces the process, and calls `meanwhile` in between.
    pub fn replace(&mut self, how: Going, means: Means, meanwhile: impl FnOnce(&Lab)) {
        let lab = &self.lab;
        self.program.replace(lab, &self.traffic.ledger, how, means, || meanwhile(lab));
    }

    /// Whether IPv6 addresses are kept on devices that are set down.
    fn keep_addresses(&self, keep: bool) {
        let value = if keep { "1" } else { "0" };
        self.lab.forwarder.sysctl("net.ipv6.conf.all.keep_addr_on_down", value).expect("sysctl");
    }

    fn route(&self, change: &str) {
        let there = ["10.77.2.2/32 via 10.77.3.2 dev f2", "fd77:2::2/128 via fd77:3::2 dev f2"];
        let mut back = Vec::from(["10.77.2.1/32", "10.77.2.11/32"].map(|own| format!("{own} via 10.77.3.1 dev s1")));
        back.extend(["fd77:2::1/128", "fd77:2::b/128"].map(|own| format!("{own} via fd77:3::1 dev s1")));
        ip(&self.lab.forwarder, &there.map(|route| format!("route {change} {route}")));
        ip(&self.lab.server, &back.iter().map(|route| format!("route {change} {route}")).collect::<Vec<_>>());
    }

    fn storm(&mut self, time: Duration) {
        let told = self.program.told.clone();
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        let mut control = Control::of(self.program.running());
        let end = Instant::now() + time;
        while Instant::now() < end {
            told.tell_some(&mut control, 10, &mut self.r).expect("the program answers");
            thread::sleep(Duration::from_micros(self.r.random_range(0..20_000)));
        }
    }

    /// Waits until the tables were full; otherwise this card would have tested nothing.
    fn full_tables(&self) {
        let full = wait_for(FULL_WITHIN, || (self.program.verdict("table-full") > 0).then_some(()));
        let flows = Control::of(self.program.running()).flows();
        let refused = flows.iter().filter(|flow| flow["refusal"] == "table-full").count();
        let all = self.program.verdict("table-full");
        self.traffic
            .ledger
            .note(&format!("{refused} of {} flows, and {all} legs all told, have found no room", flows.len()));
        assert!(full.is_some(), "the tables were not full");
    }
}
