//! Translucent proxying (TPOT): the programs of bpf/tpot/tpot.bpf.c, which ask for proxies, intercept connections
//! that ask for one, and carry both in tunnels. docs/tpot.md describes the protocol.

use crate::{
    Handshake, OpenError, Pair, Tuple,
    attaching::attach::{Hook, Place, attach_at, attach_lookup, wanted_devices},
    attaching::load::load_object,
    attaching::pins::{Owned, tpot_pin},
    network::devices::devices,
    network::netlink::Netlink,
    sockets::socket::register,
    tables::maps::{Pod, bytes_of, errno, from_bytes, io_error, sum_of, words},
    tpot::tables::{TpotTunnel, UDP, is_over, plain, tunnels_in},
    tpot_abi as abi,
};
#[cfg(feature = "testing")]
use crate::{TestContext, test_run};
use libbpf_rs::{
    MapCore, MapFlags, MapHandle, MapImpl, Object, ObjectBuilder, OpenMapMut, Program, RingBuffer, RingBufferBuilder,
};
use nix::{
    errno::Errno,
    ifaddrs::getifaddrs,
    libc,
    sys::{
        socket::{MsgFlags, SockaddrStorage, recv},
        statfs::{CGROUP2_SUPER_MAGIC, statfs},
    },
};
use std::{
    collections::HashMap,
    fmt, fs, io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    sync::{
        Mutex,
        mpsc::{Receiver, channel},
    },
    time::Duration,
};
use tokio::io::{Interest, unix::AsyncFd};

const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/tpot.bpf.o"));

/// Time for which the entry of an ended connection is kept: its last segments may be retransmitted (2 MSL on Linux).
const LINGER: Duration = Duration::from_secs(60);
/// Time without a packet after which a connection is given up, as by conntrack.
const IDLE: Duration = Duration::from_secs(5 * 24 * 3600);

/// A range of destinations: addresses and ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destinations {
    /// Address of the network. Bits beyond the prefix are ignored.
    pub net: IpAddr,
    /// Length of the prefix in bits.
    pub prefix: u8,
    /// Ports.
    pub ports: RangeInclusive<u16>,
}

/// When the packets of a tunnel are in UDP (port [`TPOT_UDP_PORT`]), for paths that drop IP in IP. Both ends must allow it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum TpotUdp {
    /// Never. SYNs that offer it are answered with IP in IP.
    #[default]
    Never,
    /// If a proxy's first answer in IP in IP does not arrive. Further connections to that destination begin in UDP for an hour.
    Fallback,
    /// Always.
    Always,
}

/// A key that proxies share with the hosts whose connections they may intercept. Its text is never printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TpotKey(pub [u8; 16]);

impl fmt::Debug for TpotKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TpotKey")
    }
}

/// Options of [`Tpot::open`].
#[derive(Clone, Debug)]
pub struct TpotOptions {
    /// Names of the devices to attach to. Empty: all Ethernet devices.
    pub devices: Vec<String>,
    /// Identifier of the option (RFC 6994). Hosts and proxies must agree on it.
    pub exid: u16,
    /// How many proxies may intercept a connection of this host, one after the other. 0: none.
    pub hops: u8,
    /// Directory of a cgroup2: only its processes, and those below it, ask for proxies. `None`: all.
    pub cgroup: Option<PathBuf>,
    /// Keys, at most [`TPOT_KEYS`]. If there are any, connections of this host enter a tunnel only if the proxy's answer carries a
    /// MAC that one of them has made, and answers of this machine carry one made with the first. Empty: no MAC is looked at or made.
    pub keys: Vec<TpotKey>,
    /// When tunnels of new connections are in UDP. Those that are in tunnels already stay as they are.
    pub udp: TpotUdp,
    /// The rules of the process that has [let go](Tpot::let_go) stay in force until [`Tpot::settle`]. Otherwise there are none before
    /// the first is added.
    pub follows: bool,
    /// Directory of the pins. `None`: one for this network namespace.
    pub pin: Option<PathBuf>,
}

impl Default for TpotOptions {
    fn default() -> Self {
        let (devices, keys, udp) = (Vec::new(), Vec::new(), TpotUdp::default());
        TpotOptions { devices, exid: TPOT_EXID, hops: 8, cgroup: None, keys, udp, follows: false, pin: None }
    }
}

/// The default identifier of the option: "tp". It is not registered with IANA.
pub const TPOT_EXID: u16 = 0x7470;
/// Destination port of tunnels in UDP, at both ends.
pub const TPOT_UDP_PORT: u16 = abi::tpot_constant::TPOT_UDP_PORT.0 as u16;
/// Maximum number of rules.
pub const TPOT_RULES: usize = abi::tpot_constant::TPOT_RULES.0 as usize;
/// Maximum number of addresses at which connections are awaited.
pub const TPOT_DOORS: usize = abi::tpot_constant::TPOT_DOORS.0 as usize;
/// Maximum number of keys.
pub const TPOT_KEYS: usize = abi::tpot_constant::TPOT_KEYS.0 as usize;

/// Whose connections are intercepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TpotWhose {
    /// Those of hosts that ask for a proxy. They are in tunnels.
    #[default]
    Askers,
    /// Those of all hosts. They are in no tunnel.
    All,
}

impl TpotWhose {
    fn kind(self) -> abi::tpot_rule_kind {
        match self {
            TpotWhose::Askers => abi::tpot_rule_kind::TPOT_RULE_TAKE,
            TpotWhose::All => abi::tpot_rule_kind::TPOT_RULE_PLAIN,
        }
    }
}

/// When the server of an intercepted connection is connected to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TpotHandshake {
    /// After the handshake with the client.
    #[default]
    Basic,
    /// On the client's SYN, which is answered at once.
    Pipelined,
    /// On the client's SYN, which is answered when the server has answered.
    Confirm,
}

/// What is heard of a client while its connection has no socket ([`Tpot::pipeline`]).
#[derive(Clone, Copy, Debug)]
pub struct TpotAsking {
    /// The client's leg.
    pub leg: Tuple,
    /// Sequence number of its SYN.
    pub isn: u32,
    /// How many more proxies may intercept the connection.
    pub hops: u8,
    /// The SYN, with the MSS that fits the tunnel. `None`: the client has another answer to it, or does not ask any more.
    pub syn: Option<Handshake>,
}

type Hear = Box<dyn Fn(TpotAsking) + Send>;

/// The ring of [`TpotAsking`].
struct Askings {
    ring: RingBuffer<'static>,
    /// What was read of it, with the index of the rule.
    heard: Receiver<(u8, TpotAsking)>,
    /// Who wants to hear of it, by the index of the rule.
    by_rule: HashMap<u8, Hear>,
}

impl Askings {
    fn new(ring: &MapImpl<'_>) -> io::Result<Askings> {
        let failed = |e: libbpf_rs::Error| io::Error::from_raw_os_error(errno(&e));
        let (tell, heard) = channel();
        let mut builder = RingBufferBuilder::new();
        let hear = move |data: &[u8]| {
            if let Some(raw) = plain::<abi::tpot_asking>(data) {
                let segment = Handshake::new(from_bytes(data)); // its first field
                let asking = TpotAsking {
                    leg: segment.leg,
                    isn: raw.isn,
                    hops: raw.hops.saturating_sub(1),
                    syn: (raw.over == 0).then_some(segment),
                };
                let _ = tell.send((raw.listener, asking)); // to the struct that is built below
            }
            0
        };
        builder.add(ring, hear).map_err(failed)?;
        Ok(Askings { ring: builder.build().map_err(failed)?, heard, by_rule: HashMap::new() })
    }
}

/// The programs and maps of translucent proxying in this network namespace. They are pinned: tunnels outlive the process, and
/// the next one takes them over.
pub struct Tpot {
    object: Object,
    config: abi::tpot_config,
    /// Index of the first rule.
    first: u32,
    rules: Mutex<Rules>,
    /// Names of the devices to attach to; empty: all.
    devices: Vec<String>,
    /// The links to each device, by its index.
    links: Mutex<HashMap<u32, Vec<OwnedFd>>>,
    /// The link of `tpot_lookup`, which is of no use to anybody else: the sockets that it finds are this process's.
    lookup: Mutex<Option<OwnedFd>>,
    askings: Mutex<Askings>,
    pins: PathBuf,
    /// `None`: another process has them.
    owned: Mutex<Option<Owned>>,
}

/// The rules of this process. Beside a live one, their indices, with those of their sockets, are other ones: connections in their
/// handshakes still name those of that process.
#[derive(Default)]
struct Rules {
    all: Vec<abi::tpot_rule>,
    /// They are in force.
    count: bool,
}

impl Tpot {
    /// Loads the programs, or takes over the tunnels of an earlier process, and attaches to the devices. The data path
    /// ([`Datapath`](crate::Datapath)) must be attached already if there is to be one: intercepted packets reach it through
    /// these programs, and it hands its own to them.
    pub fn open(options: &TpotOptions) -> Result<Tpot, OpenError> {
        let failed = |what| move |source| OpenError::Kernel { what, source };
        wanted_devices(&options.devices, &devices().map_err(failed("list of devices"))?)?; // a typo shows before anything changes
        let pin = options.pin.clone().map_or_else(tpot_pin, Ok).map_err(failed("network namespace"))?;
        let owned = Owned::take(&pin)?;
        let mut open = ObjectBuilder::default()
            .open_memory(OBJECT)
            .map_err(|e| OpenError::Kernel { what: "read programs", source: io::Error::other(e) })?;
        // the others hold constants
        for mut map in open.maps_mut().filter(|map| map.name().to_string_lossy().starts_with("tpot_")) {
            let path = pin.join(map.name());
            remove_outdated(&path, &map)?;
            map.set_pin_path(&path).map_err(|e| OpenError::Kernel { what: "pin maps", source: io::Error::other(e) })?;
        }
        let object = load_object(open)?;
        let (cgroup, level) = options.cgroup.as_deref().map_or(Ok((0, 0)), cgroup).map_err(failed("cgroup"))?;
        let (keys, key) = key_words(&options.keys).map_err(failed("keys"))?;
        let TpotOptions { exid, hops, .. } = *options;
        let udp = match options.udp {
            TpotUdp::Never => abi::tpot_udp::TPOT_UDP_NEVER,
            TpotUdp::Fallback => abi::tpot_udp::TPOT_UDP_FALLBACK,
            TpotUdp::Always => abi::tpot_udp::TPOT_UDP_ALWAYS,
        };
        let config = abi::tpot_config { exid, hops, udp: udp.0 as u8, cgroup, level, keys, key, ..Default::default() };
        let first = slots(&object, options.follows).map_err(failed("rules"))?;
        let (devices, links, lookup) = (options.devices.clone(), Mutex::default(), Mutex::default());
        let ring = object.maps().find(|m| m.name() == "askings").expect("the object has it");
        let askings = Mutex::new(Askings::new(&ring).map_err(failed("ring of askings"))?);
        let (rules, owned) = (Mutex::default(), Mutex::new(Some(owned)));
        let tpot = Tpot { object, config, first, rules, devices, links, lookup, askings, pins: pin, owned };
        if !options.follows {
            tpot.settle().map_err(failed("rules"))?; // those of an earlier process, and their listeners, are gone
        }
        tpot.follow()?;
        Ok(tpot)
    }

    /// Puts the rules in force, in place of those of the process before. Those that are added later are so at once.
    pub fn settle(&self) -> io::Result<()> {
        let mut rules = self.rules.lock().expect("no panic under this lock");
        self.set_rules(rules.all.len())?;
        rules.count = true;
        Ok(())
    }

    /// From now on, listeners get the SYNs that are for them at once, and nobody hears of those ([`Tpot::pipeline`]): while this
    /// process gives way to another one, a client's SYN and its repetition would be held in vain, and the next one routed on.
    pub fn stop_pipelines(&self) -> io::Result<()> {
        let mut rules = self.rules.lock().expect("no panic under this lock");
        rules.all.iter_mut().for_each(|rule| rule.handshake = abi::tpot_handshake::TPOT_BASIC.0 as u8);
        stop_pipelines(&self.map("tpot_rules"), self.first)
    }

    /// Leaves everything as it is to another process, which can open it from now on. Nothing here changes any of it any more.
    pub fn let_go(&self) {
        *self.owned.lock().expect("no panic under this lock") = None;
    }

    fn is_left(&self) -> bool {
        self.owned.lock().expect("no panic under this lock").is_none()
    }

    /// Attaches to new devices, and reads the addresses of all devices again: SYNs are intercepted only on devices with an address
    /// of their family, and never if they are for an address of this machine. Call it every few seconds.
    pub fn follow(&self) -> Result<(), OpenError> {
        let failed = |what| move |source| OpenError::Kernel { what, source };
        if self.is_left() {
            return Ok(());
        }
        let all = devices().map_err(failed("list of devices"))?;
        let mut links = self.links.lock().expect("no panic under this lock");
        links.retain(|index, _| all.iter().any(|d| d.index == *index));
        let known: Vec<_> = self.devices.iter().filter(|name| all.iter().any(|d| d.name == **name)).cloned().collect();
        let indices =
            if known.is_empty() && !self.devices.is_empty() { Vec::new() } else { wanted_devices(&known, &all)? };
        for device in indices.into_iter().filter(|index| !links.contains_key(index)).collect::<Vec<_>>() {
            let attach = |(hook, name): (Hook, &str)| {
                let program = self.program(name);
                // before `ingress` of the data path, and after its `egress`
                let place = if hook == Hook::Ingress { Place::First } else { Place::Last };
                attach_at(hook, place, program.as_fd(), device, &self.pins)
            };
            let both = [(Hook::Ingress, "tpot_ingress"), (Hook::Egress, "tpot_egress")].into_iter().map(attach);
            links.insert(device, both.collect::<Result<_, _>>()?);
        }
        self.learn_addresses().map_err(failed("addresses of devices"))
    }

    fn program(&self, name: &str) -> Program<'_> {
        self.object.progs().find(|p| p.name() == name).expect("the object has it")
    }

    fn map(&self, name: &str) -> MapImpl<'_> {
        self.object.maps().find(|m| m.name() == name).expect("the object has it")
    }

    /// Returns the devices to which the programs are attached, each once for every program, by their indices. For tests.
    #[doc(hidden)]
    pub fn attached(&self) -> Vec<u32> {
        let links = self.links.lock().expect("no panic under this lock");
        links.iter().flat_map(|(device, links)| links.iter().map(|_| *device)).collect()
    }

    fn set_rules(&self, rules: usize) -> io::Result<()> {
        let rules = rules as u32 | self.first << 16;
        update(&self.map("tpot_config"), &0u32, &abi::tpot_config { rules, ..self.config })
    }

    /// Adds a rule, with the socket that accepts what it intercepts. There is room for [`TPOT_RULES`]. Returns its index.
    fn add(&self, rule: &abi::tpot_rule, listener: Option<BorrowedFd<'_>>) -> io::Result<u32> {
        let mut rules = self.rules.lock().expect("no panic under this lock");
        let index = self.first + rules.all.len() as u32;
        if rules.all.len() >= TPOT_RULES {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("there is room for {TPOT_RULES} rules")));
        }
        update(&self.map("tpot_rules"), &index, rule)?;
        if let Some(listener) = listener {
            self.look_up()?;
            update(&self.map("tpot_listeners"), &index, &(listener.as_raw_fd() as u64))?;
        }
        if rules.count {
            self.set_rules(rules.all.len() + 1)?; // only now SYNs are compared with it
        }
        rules.all.push(*rule);
        Ok(index)
    }

    /// Lets the kernel find the listening sockets of rules. Does nothing the second time.
    fn look_up(&self) -> io::Result<()> {
        let mut lookup = self.lookup.lock().expect("no panic under this lock");
        if lookup.is_none() {
            *lookup = Some(attach_lookup(self.program("tpot_lookup").as_fd())?);
        }
        Ok(())
    }

    /// Asks for a proxy when this host connects to these destinations.
    pub fn ask(&self, to: &Destinations) -> io::Result<()> {
        self.add(&raw(to, abi::tpot_rule_kind::TPOT_RULE_ASK), None).map(drop)
    }

    /// Lets proxies with these addresses intercept the connections of this host. Ports do not count.
    pub fn trust(&self, proxies: &Destinations) -> io::Result<()> {
        let any_port = Destinations { ports: 0..=u16::MAX, ..proxies.clone() };
        self.add(&raw(&any_port, abi::tpot_rule_kind::TPOT_RULE_TRUST), None).map(drop)
    }

    /// Intercepts connections of other hosts to these destinations, and gives them to a listening socket of the same family,
    /// which must have IP_TRANSPARENT. Addresses of this machine are never intercepted. Returns the index of the rule, for
    /// [`Tpot::pipeline`].
    pub fn take(&self, whose: TpotWhose, to: &Destinations, listener: impl AsFd) -> io::Result<u32> {
        self.add(&raw(to, whose.kind()), Some(listener.as_fd()))
    }

    /// Gives connections of `host` to this address, which is not of this machine, to the socket that listens there, until it is
    /// closed. There is room for [`TPOT_DOORS`]: then it fails with E2BIG.
    pub fn await_at(&self, at: SocketAddr, host: IpAddr, listener: impl AsFd) -> io::Result<()> {
        let key = Tuple { local: at, remote: SocketAddr::new(host, 0) }.to_abi();
        update(&self.map("tpot_doors"), &key, &(listener.as_fd().as_raw_fd() as u64))
    }

    /// Leaves further SYNs to these destinations alone, or intercepts them again, after [`Tpot::take`] with the same ones.
    pub fn leave(&self, whose: TpotWhose, to: &Destinations, leave: bool) -> io::Result<()> {
        if self.is_left() {
            return Ok(());
        }
        let taking = raw(to, whose.kind());
        let rules = self.rules.lock().expect("no panic under this lock");
        let is_it = |rule: &abi::tpot_rule| {
            let with_handshake = abi::tpot_rule { handshake: rule.handshake, ..taking };
            bytes_of(rule) == bytes_of(&with_handshake)
        };
        for (i, rule) in (self.first..).zip(&rules.all).filter(|(_, rule)| is_it(rule)) {
            let kind = if leave { 0 } else { rule.kind };
            update(&self.map("tpot_rules"), &i, &abi::tpot_rule { kind, ..*rule })?;
        }
        Ok(())
    }

    /// From now on, [`Tpot::hear`] tells `hear` of the SYNs that a rule intercepts, before the listener gets them. With
    /// [`TpotHandshake::Confirm`], the listener gets them only when they are given back
    /// ([`HandshakeSender::give_back`](crate::HandshakeSender::give_back)). `hear` must not block.
    pub fn pipeline(
        &self,
        rule: u32,
        handshake: TpotHandshake,
        hear: impl Fn(TpotAsking) + Send + 'static,
    ) -> io::Result<()> {
        let mut rules = self.rules.lock().expect("no panic under this lock");
        let place = rule.checked_sub(self.first).and_then(|n| rules.all.get_mut(n as usize));
        let known = place.ok_or(io::ErrorKind::InvalidInput)?;
        known.handshake = match handshake {
            TpotHandshake::Basic => abi::tpot_handshake::TPOT_BASIC,
            TpotHandshake::Pipelined => abi::tpot_handshake::TPOT_PIPELINED,
            TpotHandshake::Confirm => abi::tpot_handshake::TPOT_CONFIRM,
        }
        .0 as u8;
        self.askings.lock().expect("no panic under this lock").by_rule.insert(rule as u8, Box::new(hear));
        update(&self.map("tpot_rules"), &rule, known)
    }

    /// Returns a descriptor that is readable when there is something to hear. Each one tells of it once.
    pub fn askings(&self) -> io::Result<OwnedFd> {
        self.map("askings").as_fd().try_clone_to_owned()
    }

    /// Tells of the askings since the last call, as [`Tpot::pipeline`] wants it. When it returns, that of every connection that
    /// has been accepted was told.
    pub fn hear(&self) {
        let askings = self.askings.lock().expect("no panic under this lock");
        askings.ring.consume_raw();
        for (rule, asking) in askings.heard.try_iter() {
            if let Some(hear) = askings.by_rule.get(&rule) {
                hear(asking);
            }
        }
    }

    fn learn_addresses(&self) -> io::Result<()> {
        for (index, addresses) in own_addresses()? {
            let of = |v6: bool| addresses.iter().find(|a| a.is_ipv6() == v6).map_or([0; 4], |a| words(*a));
            update(&self.map("tpot_own"), &index, &abi::tpot_own { v4: of(false), v6: of(true) })?;
            for a in addresses {
                update(&self.map("tpot_addresses"), &abi::tpot_address { words: words(a) }, &1u32)?;
            }
        }
        Ok(())
    }

    /// Returns the connections in tunnels.
    pub fn tunnels(&self) -> Vec<(Tuple, TpotTunnel)> {
        tunnels_in(&self.map("tpot_tunnels"))
    }

    /// Returns how many more proxies may intercept a connection that was intercepted here, and the sequence number of the
    /// client's SYN; `None` if it was not.
    pub fn asked(&self, leg: &Tuple) -> Option<(u8, u32)> {
        let entry = |map| self.map(map).lookup(bytes_of(&leg.to_abi()), MapFlags::ANY).ok()?;
        let in_tunnel = || plain::<abi::tpot_tunnel>(&entry("tpot_tunnels")?).map(|tunnel| (tunnel.hops, tunnel.isn));
        let outside = || plain::<abi::tpot_syn>(&entry("tpot_syns")?).map(|syn| (syn.hops, syn.seq));
        in_tunnel().or_else(outside).map(|(hops, isn)| (hops.saturating_sub(1), isn))
    }

    /// Returns whether the legs are in tunnels of different kinds. Large packets cannot be moved between the two: after a packet
    /// has left a tunnel, the kernel still segments it as that tunnel's.
    pub fn differ(&self, legs: &Pair<Tuple>) -> bool {
        if self.config.udp == abi::tpot_udp::TPOT_UDP_NEVER.0 as u8 {
            return false;
        }
        let map = self.map("tpot_tunnels");
        let in_udp = |leg: &Tuple| {
            let value = map.lookup(bytes_of(&leg.to_abi()), MapFlags::ANY).ok()??;
            plain::<abi::tpot_tunnel>(&value).map(|tunnel| tunnel.flags & UDP)
        };
        matches!((in_udp(&legs.client), in_udp(&legs.server)), (Some(client), Some(server)) if client != server)
    }

    /// Forgets connections that have ended, a minute later, and those silent for five days. `is_spliced`: whether the data path
    /// of this process still has a leg, which may have no socket. `None`: it has none, and the end needs proof. Call it every few
    /// seconds.
    pub fn sweep(&self, is_spliced: Option<&(dyn Fn(&Tuple) -> bool + Sync)>) {
        let map = self.map("tpot_tunnels");
        let all = if self.is_left() { Vec::new() } else { self.tunnels() };
        for (t, tunnel) in all {
            let lives_on = || is_spliced.map_or(!tunnel.proven, |is_spliced| is_spliced(&t));
            if tunnel.silent > IDLE || tunnel.silent > LINGER && is_over(&t, &tunnel) && !lives_on() {
                // one that is gone already needs no removal
                let _ = map.delete(bytes_of(&t.to_abi()));
            }
        }
    }

    /// Returns the counters: names and numbers of packets.
    pub fn verdicts(&self) -> io::Result<Vec<(&'static str, u64)>> {
        let map = self.map("tpot_verdicts");
        let sum = |(i, name): (usize, &&'static str)| Ok((*name, sum_of(&map, i as u32)?));
        generated::TPOT_VERDICTS.iter().enumerate().map(sum).collect()
    }

    /// Asks for no more proxies and intercepts no more connections. If none is in a tunnel, everything is detached and removed.
    /// Otherwise returns how many there are: their programs stay attached, until [`Tpot::close`] of a later process. Does nothing
    /// after [`Tpot::let_go`].
    pub fn close(&self) -> io::Result<usize> {
        if self.is_left() {
            return Ok(0);
        }
        update(&self.map("tpot_config"), &0u32, &abi::tpot_config::default())?; // no rules, and no keys that stay in the kernel
        let left = self.tunnels().iter().filter(|(t, tunnel)| !is_over(t, tunnel)).count();
        if left == 0 {
            self.remove()?;
        }
        Ok(left)
    }

    /// Makes what is known about destinations older, for tests.
    #[cfg(feature = "testing")]
    pub fn age(&self, by: Duration) -> io::Result<()> {
        let map = self.map("tpot_known");
        for key in map.keys() {
            let Some(value) = map.lookup(&key, MapFlags::ANY).map_err(io_error)? else { continue };
            let mut known: abi::tpot_known = from_bytes(&value);
            known.at = known.at.wrapping_sub(by.as_nanos() as u64); // perhaps before the machine was started
            map.update(&key, bytes_of(&known), MapFlags::ANY).map_err(io_error)?;
        }
        Ok(())
    }

    /// Runs a program on one packet, for tests: `tpot_ingress` or `tpot_egress`. Writes the resulting packet to `out`. Returns
    /// the program's return code, and the packet's mark.
    #[cfg(feature = "testing")]
    pub fn test_run(
        &self,
        egress: bool,
        packet: &[u8],
        context: &TestContext,
        out: &mut Vec<u8>,
    ) -> io::Result<(i32, u32)> {
        let name = if egress { "tpot_egress" } else { "tpot_ingress" };
        test_run::run(self.program(name).as_fd(), packet, context, out)
    }

    /// Detaches and removes everything. Connections in tunnels break.
    pub fn remove(&self) -> io::Result<()> {
        self.owned.lock().expect("no panic under this lock").as_ref().map_or(Ok(()), Owned::remove)
    }
}

/// Returns the index of the first rule of this process. If it `follows` a live one, its slots are the other ones, and are emptied. In
/// place of a dead one it has the same ones: connections in their handshakes name the index of their listener.
fn slots(object: &Object, follows: bool) -> io::Result<u32> {
    let map = |name| object.maps().find(|m| m.name() == name).expect("the object has it");
    let (config, rules, listeners) = (map("tpot_config"), map("tpot_rules"), map("tpot_listeners"));
    let before = config.lookup(bytes_of(&0u32), MapFlags::ANY).map_err(io_error)?;
    let before: abi::tpot_config = from_bytes(&before.unwrap_or_else(|| vec![0; size_of::<abi::tpot_config>()]));
    let before = before.rules >> 16;
    if !follows {
        return Ok(before);
    }
    stop_pipelines(&rules, before)?; // that process may have been killed
    let first = if before == 0 { TPOT_RULES as u32 } else { 0 };
    for i in first..first + TPOT_RULES as u32 {
        update(&rules, &i, &abi::tpot_rule::default())?;
        // most have no socket
        let _ = listeners.delete(bytes_of(&i));
    }
    Ok(first)
}

/// Gives the SYNs of rules to their listeners at once. `first`: index of the first rule.
fn stop_pipelines(rules: &MapImpl<'_>, first: u32) -> io::Result<()> {
    for i in first..first + TPOT_RULES as u32 {
        let now = rules.lookup(bytes_of(&i), MapFlags::ANY).map_err(io_error)?;
        let Some(now) = now.and_then(|bytes| plain::<abi::tpot_rule>(&bytes)) else { continue };
        let handshake = abi::tpot_handshake::TPOT_BASIC.0 as u8;
        update(rules, &i, &abi::tpot_rule { handshake, ..now })?;
    }
    Ok(())
}

/// Has the kernel check the programs, and changes nothing.
pub fn try_tpot() -> Result<(), OpenError> {
    let open = ObjectBuilder::default()
        .open_memory(OBJECT)
        .map_err(|e| OpenError::Kernel { what: "read programs", source: io::Error::other(e) })?;
    load_object(open).map(drop)
}

/// Removes a pinned map of another version, whose entries have another size. Fails if it holds connections.
fn remove_outdated(path: &Path, map: &OpenMapMut<'_>) -> Result<(), OpenError> {
    let failed = |what| move |e: libbpf_rs::Error| OpenError::Kernel { what, source: io::Error::other(e) };
    if !path.exists() {
        return Ok(());
    }
    let there = MapHandle::from_pinned_path(path).map_err(failed("open a pinned map"))?;
    let same = (there.key_size(), there.value_size(), there.max_entries())
        == (map.key_size(), map.value_size(), map.max_entries());
    if same {
        return Ok(());
    }
    let left = if map.name() == "tpot_tunnels" { there.keys().count() } else { 0 };
    if left > 0 {
        let why = format!("{left} connections are in tunnels of another version; run that one until they have ended");
        return Err(OpenError::Kernel { what: "take over tunnels", source: io::Error::other(why) });
    }
    fs::remove_file(path).map_err(|source| OpenError::Kernel { what: "remove a map of another version", source })
}

/// Tells of new devices and addresses in the network namespace in which it was made.
#[derive(Debug)]
pub struct DeviceChanges(AsyncFd<OwnedFd>);

impl DeviceChanges {
    /// Listens from now on. Must be called within a runtime. Errors are those of netlink(7).
    pub fn new() -> io::Result<DeviceChanges> {
        let groups = [libc::RTNLGRP_LINK, libc::RTNLGRP_IPV4_IFADDR, libc::RTNLGRP_IPV6_IFADDR];
        register(Netlink::open(&groups)?.into_socket(), Interest::READABLE).map(DeviceChanges)
    }

    /// Waits for the next change. Several may count as one.
    pub async fn changed(&self) -> io::Result<()> {
        let drain = |socket: &OwnedFd| {
            let (mut any, mut datagram) = (false, [0; 64]); // follow() reads everything again, so the message may be cut off
            loop {
                match recv(socket.as_raw_fd(), &mut datagram, MsgFlags::MSG_DONTWAIT) {
                    Ok(_) | Err(Errno::ENOBUFS) => any = true,
                    Err(Errno::EAGAIN) if any => return Ok(()),
                    Err(e) => return Err(e.into()),
                }
            }
        };
        self.0.async_io(Interest::READABLE, drain).await
    }
}

/// Returns the number of keys, and the words of each.
fn key_words(keys: &[TpotKey]) -> io::Result<(u32, [[u64; 2]; TPOT_KEYS])> {
    if keys.len() > TPOT_KEYS {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("there is room for {TPOT_KEYS}")));
    }
    let word = |key: &TpotKey, at: usize| u64::from_le_bytes(std::array::from_fn(|i| key.0[at + i]));
    let words = |i| keys.get(i).map_or([0; 2], |key| [word(key, 0), word(key, 8)]);
    Ok((keys.len() as u32, std::array::from_fn(words)))
}

/// Returns the number of a cgroup, and its distance from the root.
fn cgroup(dir: &Path) -> io::Result<(u64, u32)> {
    let is_cgroup2 = |dir: &Path| statfs(dir).map(|s| s.filesystem_type() == CGROUP2_SUPER_MAGIC);
    if !is_cgroup2(dir)? {
        let why = format!("{} is not a directory of cgroup2", dir.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let dir = dir.canonicalize()?;
    let root = |dir: &&Path| !dir.parent().is_some_and(|above| is_cgroup2(above).unwrap_or(false));
    let level = dir.ancestors().take_while(|dir| !root(dir)).count();
    Ok((fs::metadata(&dir)?.ino(), level as u32))
}

#[allow(dead_code)]
pub(crate) mod generated {
    include!(concat!(env!("OUT_DIR"), "/tpot.rs"));
}

/// Returns the addresses of each device, by its index, without those that cannot be routed.
fn own_addresses() -> io::Result<HashMap<u32, Vec<IpAddr>>> {
    let mut all: HashMap<u32, Vec<IpAddr>> = HashMap::new();
    for a in getifaddrs()? {
        let ip = a.address.as_ref().and_then(ip).filter(|ip| match ip {
            IpAddr::V4(v4) => !v4.is_link_local() && !v4.is_loopback(),
            IpAddr::V6(v6) => !v6.is_unicast_link_local() && !v6.is_loopback(),
        });
        if let (Some(ip), Ok(index)) = (ip, nix::net::if_::if_nametoindex(a.interface_name.as_str())) {
            all.entry(index).or_default().push(ip);
        }
    }
    Ok(all)
}

pub(crate) fn ip(a: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = a.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
    v4.or_else(|| a.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip())))
}

pub(crate) fn raw(d: &Destinations, kind: abi::tpot_rule_kind) -> abi::tpot_rule {
    let bits = u32::from(d.prefix.min(if d.net.is_ipv4() { 32 } else { 128 })) + if d.net.is_ipv4() { 96 } else { 0 };
    let mask: u128 = if bits == 0 { 0 } else { u128::MAX << (128 - bits) };
    let mask = words(IpAddr::V6(Ipv6Addr::from(mask)));
    let net = words(d.net);
    abi::tpot_rule {
        net: std::array::from_fn(|i| net[i] & mask[i]),
        mask,
        low: *d.ports.start(),
        high: *d.ports.end(),
        kind: kind.0 as u8,
        ..Default::default()
    }
}

// SAFETY: C structs of integers and arrays of them, with explicit fillers in place of padding.
unsafe impl Pod for abi::tpot_rule {}
// SAFETY: as above.
unsafe impl Pod for abi::tpot_config {}
// SAFETY: as above.
unsafe impl Pod for abi::tpot_own {}
// SAFETY: as above.
unsafe impl Pod for abi::tpot_address {}
// SAFETY: as above.
unsafe impl Pod for abi::tpot_tunnel {}
// SAFETY: as above.
unsafe impl Pod for abi::tpot_syn {}
// SAFETY: as above.
unsafe impl Pod for abi::tpot_known {}
// SAFETY: as above.
unsafe impl Pod for abi::tpot_asking {}

pub(crate) fn update<K: Pod, V: Pod>(map: &MapImpl<'_>, key: &K, value: &V) -> io::Result<()> {
    map.update(bytes_of(key), bytes_of(value), MapFlags::ANY).map_err(io_error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::maps::address;

    #[test]
    fn rules_have_addresses_in_network_order() {
        let to = Destinations { net: [10, 1, 2, 3].into(), prefix: 8, ports: 80..=443 };
        let r = raw(&to, abi::tpot_rule_kind::TPOT_RULE_ASK);
        assert_eq!(address(r.net), IpAddr::from([10, 0, 0, 0]));
        assert_eq!((r.low, r.high, r.mask[3]), (80, 443, u32::from_ne_bytes([255, 0, 0, 0])));
        let any = raw(
            &Destinations { net: Ipv6Addr::UNSPECIFIED.into(), prefix: 0, ..to },
            abi::tpot_rule_kind::TPOT_RULE_ASK,
        );
        assert_eq!((any.net, any.mask), ([0; 4], [0; 4]));
    }
}
