//! Client - forwarder - server, built from network namespaces and veth.
//!
//! Both shapes have the same addresses and routes, so that a test can run on either without knowing the shape:
//!
//! ```text
//! TwoDevices   client c0 ──── f0 forwarder f1 ──── s0 server
//!
//! OneArmed     client c0 ──┐
//!           forwarder f0 ──┼── bridge br0, in a namespace of its own
//!              server s0 ──┘
//!
//! TwoForwarders   client c0 ──── f0 forwarder f1 ──── g0 second g1 ──── s0 server
//!
//! Farm         client c0 ──── f0 forwarder f1 ──── s0 server
//!                          bridge farm ──┬── m0 first member
//!                                        └── m0 second member
//! ```
//!
//! The client's prefixes are 10.77.1.0/24 and fd77:1::/64, the server's 10.77.2.0/24 and fd77:2::/64. The forwarder has the
//! first address of each, and is the default gateway of client and server. A sysctl controls whether it forwards IP packets
//! ([`Options::forwarding`]). All labs use the same addresses, since they are isolated from each other.
//!
//! Namespaces are named `ls-PID-NUMBER-ROLE` in /run/netns, as `ip netns` does, so that people can inspect them.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::namespace::RUN_NETNS;
use crate::process::run;
use crate::{LabError, Namespace, Report, trace};

/// The prefix of the names of all lab namespaces; the sweep touches no others.
const PREFIX: &str = "ls-";

/// How the three hosts are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// The forwarder has one device towards the client and one towards the server.
    TwoDevices,
    /// All three are on one segment, and the forwarder has one device.
    OneArmed,
    /// A second forwarder is between the first one and the server. It has the addresses that the first one otherwise has
    /// on the server's network; between the two is 10.77.3.0/24 and fd77:3::/64, where they have the addresses 1 and 2.
    TwoForwarders,
    /// As with two devices, and the forwarder is the gateway of two more machines. Their network is 10.77.4.0/24 and
    /// fd77:4::/64, and the forwarder's device there is the bridge `farm`.
    Farm,
}

/// Options of a lab; the default suits most tests.
#[derive(Clone, Debug)]
pub struct Options {
    /// MTU of the client's link.
    pub mtu_client: u32,
    /// MTU of the server's link.
    pub mtu_server: u32,
    /// Segmentation and checksum offload, with packets of up to 64 KB. Without it every packet is as on a wire, with a
    /// complete checksum; only then are losses realistic.
    pub large_packets: bool,
    /// Whether the forwarder forwards IP packets, for comparison with splicing. So do a second one and members of a farm.
    pub forwarding: bool,
    /// Devices that receive packets in the order of sending.
    pub in_order: InOrder,
    /// Congestion control of all hosts. A child namespace can use reno or bbr, but not cubic.
    pub congestion: &'static str,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            mtu_client: 1500,
            mtu_server: 1500,
            large_packets: true,
            forwarding: false,
            in_order: InOrder::EndHosts,
            congestion: "reno",
        }
    }
}

/// Devices that process received packets on one CPU and therefore in the order of sending, as one queue of a network card
/// does. With plain veth one CPU may overtake another by milliseconds, and a host may then reject packets as old (RFC 7323)
/// without any fault in the data path. Detours (impair.rs) always keep the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InOrder {
    /// No devices.
    Nobody,
    /// The devices of client and server.
    EndHosts,
    /// The forwarder's devices, too, each on a CPU of its own:
    /// packets of one direction are never processed at the same time.
    All,
}

/// The IP version: most tests run with both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both versions, to loop over.
    pub const BOTH: [Family; 2] = [Family::V4, Family::V6];
}

/// The addresses of one interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// IPv4, in a /24.
    pub v4: Ipv4Addr,
    /// IPv6, in a /64.
    pub v6: Ipv6Addr,
}

impl Address {
    const fn new(side: u8, host: u8) -> Self {
        Self {
            v4: Ipv4Addr::new(10, 77, side, host),
            v6: Ipv6Addr::new(0xfd77, side as u16, 0, 0, 0, 0, 0, host as u16),
        }
    }

    /// The address of this IP version.
    pub const fn ip(self, family: Family) -> IpAddr {
        match family {
            Family::V4 => IpAddr::V4(self.v4),
            Family::V6 => IpAddr::V6(self.v6),
        }
    }

    /// The address of this IP version with a port.
    pub const fn port(self, family: Family, port: u16) -> SocketAddr {
        SocketAddr::new(self.ip(family), port)
    }
}

/// The client's address.
pub const CLIENT: Address = Address::new(1, 2);
/// A second address of the client.
pub const CLIENT_SECOND: Address = Address::new(1, 12);
/// The forwarder's address on the client's network.
pub const FORWARDER_TO_CLIENT: Address = Address::new(1, 1);
/// The forwarder's address on the server's network.
pub const FORWARDER_TO_SERVER: Address = Address::new(2, 1);
/// A second address of the forwarder on the server's network.
pub const FORWARDER_TO_SERVER_SECOND: Address = Address::new(2, 11);
/// The forwarder's address on the network between two forwarders.
pub const FORWARDER_TO_SECOND: Address = Address::new(3, 1);
/// The second forwarder's address there.
pub const SECOND_TO_FORWARDER: Address = Address::new(3, 2);
/// The forwarder's address in the farm's network.
pub const FORWARDER_TO_FARM: Address = Address::new(4, 1);
/// Addresses of the members of a farm.
pub const MEMBERS: [Address; 2] = [Address::new(4, 2), Address::new(4, 3)];
/// The server's address.
pub const SERVER: Address = Address::new(2, 2);
/// A second address of the server.
pub const SERVER_SECOND: Address = Address::new(2, 12);

/// Three connected hosts. Dropping the lab removes them with everything inside.
#[derive(Debug)]
pub struct Lab {
    /// First, because a capture ends before its devices.
    packets: Option<Report>,
    /// The host that opens connections. Its device is `c0`.
    pub client: Namespace,
    /// The host that runs longsplice. Its devices are [`Lab::client_device`] and [`Lab::server_device`].
    pub forwarder: Namespace,
    /// The host that accepts connections. Its device is `s0`.
    pub server: Namespace,
    /// The second forwarder, for [`Shape::TwoForwarders`].
    pub second: Option<Namespace>,
    /// The members of the farm, for [`Shape::Farm`]. Their devices are `m0`.
    pub members: Vec<Namespace>,
    /// The bridge of [`Shape::OneArmed`]. Its ports are `pc`, `pf` and `ps`, to client, forwarder and server.
    pub segment: Option<Namespace>,
    shape: Shape,
    options: Options,
    // Last, so that the names are removed after the handles are dropped.
    _removal: Removal,
}

/// Removes namespaces by name on drop. Separate from [`Lab`], so that a partly built lab is removed too.
#[derive(Debug)]
struct Removal(Vec<String>);

impl Drop for Removal {
    fn drop(&mut self) {
        let remove = || {
            let existing = self.0.iter().filter(|name| Path::new(RUN_NETNS).join(name).exists());
            let batch: String = existing.map(|name| format!("netns del {name}\n")).collect();
            run("ip", &["-force", "-batch", "-"], &batch)
        };
        // Ctrl-C may have come before ip had a process group of its own.
        if let Err(error) = remove().or_else(|_| remove()) {
            eprintln!("lab not removed, left to the next sweep: {error}");
        }
    }
}

impl Lab {
    /// Builds a lab, which takes about 30 ms. The first one in a process also sweeps ([`Lab::sweep`]).
    pub fn new(shape: Shape, options: Options) -> Result<Self, LabError> {
        static SWEPT: Once = Once::new();
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        SWEPT.call_once(|| {
            Self::sweep();
        });
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = |role: &str| format!("{PREFIX}{}-{number}-{role}", std::process::id());
        let plan = Plan { shape, options: &options, number, name: &name };

        let removal = Removal(plan.roles().iter().map(|role| name(role)).collect());
        run("ip", &["-batch", "-"], &plan.creation())?;
        let open = |role: &str| Namespace::open(name(role));
        let mut lab = Self {
            packets: None,
            client: open("client")?,
            forwarder: open("forwarder")?,
            server: open("server")?,
            second: (shape == Shape::TwoForwarders).then(|| open("second")).transpose()?,
            members: plan.members().iter().map(|role| open(role)).collect::<Result<_, _>>()?,
            segment: (shape == Shape::OneArmed).then(|| open("segment")).transpose()?,
            shape,
            options: options.clone(),
            _removal: removal,
        };
        for namespace in lab.namespaces() {
            lab.quieten(namespace)?;
        }
        lab.client.ip(&end_host("c0", 1, &[CLIENT, CLIENT_SECOND]))?;
        lab.server.ip(&end_host("s0", 2, &[SERVER, SERVER_SECOND]))?;
        lab.forwarder.ip(&plan.forwarder())?;
        if let Some(segment) = &lab.segment {
            segment.ip(&plan.segment())?;
        }
        if let Some(second) = &lab.second {
            second.ip(&plan.second())?;
        }
        for (member, address) in lab.members.iter().zip(MEMBERS) {
            member.ip(&end_host("m0", 4, &[address]))?;
        }
        lab.set_offloads()?;
        if options.in_order >= InOrder::EndHosts {
            steer(&lab.client, &["c0"], 0)?;
            steer(&lab.server, &["s0"], 0)?;
        }
        if options.in_order == InOrder::All {
            steer(&lab.forwarder, &[lab.client_device()], 0)?;
            if shape == Shape::TwoDevices {
                steer(&lab.forwarder, &[lab.server_device()], 1)?;
            }
        }
        let hosts = lab.namespaces().filter(|host| lab.segment.as_ref().is_none_or(|s| s.name() != host.name()));
        lab.packets = Some(trace::report(format!("the lab {}", name("*")), hosts)?);
        Ok(lab)
    }

    /// Ends the capture, if there is one: nothing of this lab is left to show.
    pub fn end_capture(&mut self) {
        self.packets = None;
    }

    /// Shows the packets, if they are captured, and how to capture them. A test that panics does so without this.
    pub fn show(&self) {
        self.packets.iter().for_each(Report::show);
    }

    /// Builds a lab with [`Options::default`].
    pub fn simple(shape: Shape) -> Result<Self, LabError> {
        Self::new(shape, Options::default())
    }

    /// How the hosts are connected.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The forwarder's device towards the client.
    pub fn client_device(&self) -> &'static str {
        "f0"
    }

    /// The forwarder's device towards the server; with one arm, the only one.
    pub fn server_device(&self) -> &'static str {
        match self.shape {
            Shape::TwoDevices | Shape::TwoForwarders | Shape::Farm => "f1",
            Shape::OneArmed => "f0",
        }
    }

    /// Gives the forwarder's devices queues of this length in bytes, which empty at this rate in Mbit/s (tc-tbf(8)). The kernel
    /// drops what does not fit. If a local socket has sent it, the socket is told, unlike with a loss by [`Impair`](crate::Impair).
    pub fn shorten_queues(&self, bytes: u32, rate: u32) -> Result<(), LabError> {
        let devices: BTreeSet<_> = [self.client_device(), self.server_device()].into();
        devices.into_iter().try_for_each(|device| {
            let queue = format!("qdisc add dev {device} root tbf rate {rate}mbit burst {bytes} limit {bytes}");
            self.forwarder.execute("tc", &queue.split(' ').collect::<Vec<_>>()).map(drop)
        })
    }

    /// Switches IP forwarding at the forwarder on or off.
    pub fn set_forwarding(&self, on: bool) -> Result<(), LabError> {
        let value = if on { "1" } else { "0" };
        self.forwarder.sysctl("net.ipv4.ip_forward", value)?;
        self.forwarder.sysctl("net.ipv6.conf.all.forwarding", value)
    }

    /// Deletes the link between forwarder and server, and with it both devices. Only for [`Shape::TwoDevices`].
    pub fn cut_server_wire(&self) -> Result<(), LabError> {
        self.forwarder.ip("link del f1\n")
    }

    /// Creates the link again, with new devices that have the names, addresses and routes of the original ones.
    pub fn lay_server_wire(&self) -> Result<(), LabError> {
        let (forwarder, server, mtu) = (self.forwarder.name(), self.server.name(), self.options.mtu_server);
        let wire =
            format!("link add name f1 mtu {mtu} netns {forwarder} type veth peer name s0 mtu {mtu} netns {server}\n");
        run("ip", &["-batch", "-"], &wire)?;
        self.set_offloads()?;
        if self.options.in_order >= InOrder::EndHosts {
            steer(&self.server, &["s0"], 0)?;
        }
        if self.options.in_order == InOrder::All {
            steer(&self.forwarder, &["f1"], 1)?;
        }
        self.server.ip(&end_host("s0", 2, &[SERVER, SERVER_SECOND]))?;
        self.forwarder.ip(&addresses_of("f1", &[FORWARDER_TO_SERVER, FORWARDER_TO_SERVER_SECOND]))
    }

    /// Sets one of the forwarder's devices down.
    pub fn take_down(&self, device: &str) -> Result<(), LabError> {
        self.forwarder.ip(&format!("link set {device} down\n"))
    }

    /// Sets a device up again, and restores its IPv6 addresses, which the kernel has removed.
    pub fn bring_up(&self, device: &str) -> Result<(), LabError> {
        let side = if device == self.client_device() { 1 } else { 2 };
        let own = [FORWARDER_TO_CLIENT, FORWARDER_TO_SERVER, FORWARDER_TO_SERVER_SECOND];
        let mut batch = format!("link set {device} up\n");
        for address in own.iter().filter(|a| self.shape == Shape::OneArmed || a.v4.octets()[2] == side) {
            let _ = writeln!(batch, "addr replace {}/64 dev {device} nodad", address.v6);
        }
        self.forwarder.ip(&batch)
    }

    /// Removes the labs of dead processes, along with the programs that still run in them. Returns the number of namespaces
    /// removed. Failures are left to the next sweep.
    pub fn sweep() -> usize {
        let stale: Vec<String> = entries(RUN_NETNS).into_iter().filter(|name| is_stale(name)).collect();
        stale.iter().for_each(|name| end_programs(name));
        let count = stale.len();
        drop(Removal(stale));
        count
    }

    /// Kills all programs that run in it.
    pub fn end_programs(&self) {
        self.namespaces().for_each(|host| end_programs(host.name()));
    }

    fn namespaces(&self) -> impl Iterator<Item = &Namespace> {
        let three = [&self.client, &self.forwarder, &self.server];
        three.into_iter().chain(&self.second).chain(&self.members).chain(&self.segment)
    }

    /// Disables everything that sends packets no test asked for, or that delays an IPv6 address.
    fn quieten(&self, namespace: &Namespace) -> Result<(), LabError> {
        let forwarding = if self.options.forwarding { "1" } else { "0" };
        let mut settings = vec![
            ("ipv6/conf/all/accept_ra", "0"),
            ("ipv6/conf/default/accept_ra", "0"),
            ("ipv6/conf/all/accept_dad", "0"),
            ("ipv6/conf/default/accept_dad", "0"),
            // On one segment the forwarder would redirect the client straight to the server.
            ("ipv4/conf/all/accept_redirects", "0"),
            ("ipv4/conf/default/accept_redirects", "0"),
            ("ipv4/conf/all/send_redirects", "0"),
            ("ipv4/conf/default/send_redirects", "0"),
            ("ipv4/tcp_congestion_control", self.options.congestion),
            // What one connection learned about a path must not affect the next test.
            ("ipv4/tcp_no_metrics_save", "1"),
        ];
        let mut forwarders = [&self.forwarder].into_iter().chain(&self.second).chain(&self.members);
        if forwarders.any(|f| f.name() == namespace.name()) {
            settings.extend([("ipv4/ip_forward", forwarding), ("ipv6/conf/all/forwarding", forwarding)]);
        }
        let written = namespace.run(|| {
            let devices = entries("/proc/sys/net/ipv4/conf");
            for device in devices.iter().filter(|name| !["all", "default", "lo"].contains(&name.as_str())) {
                fs::write(format!("/proc/sys/net/ipv4/conf/{device}/send_redirects"), "0")?;
                for setting in ["accept_ra", "accept_dad", "router_solicitations", "accept_redirects"] {
                    fs::write(format!("/proc/sys/net/ipv6/conf/{device}/{setting}"), "0")?;
                }
            }
            settings.iter().try_for_each(|(name, value)| fs::write(format!("/proc/sys/net/{name}"), value))
        });
        written.map_err(LabError::io(format!("sysctl settings of {}", namespace.name())))
    }

    fn set_offloads(&self) -> Result<(), LabError> {
        if self.options.large_packets {
            return Ok(());
        }
        let forwarder_devices = BTreeSet::from([self.client_device(), self.server_device()]);
        let hosts = [(&self.client, "c0"), (&self.server, "s0")];
        let forwarder = forwarder_devices.into_iter().map(|device| (&self.forwarder, device));
        let ports = self.segment.iter().flat_map(|segment| ["pc", "pf", "ps"].map(|port| (segment, port)));
        let second = self.second.iter().flat_map(|second| ["g0", "g1"].map(|device| (second, device)));
        let members = self.members.iter().map(|member| (member, "m0"));
        for (namespace, device) in hosts.into_iter().chain(forwarder).chain(second).chain(members).chain(ports) {
            const OFF: [&str; 8] = ["tso", "off", "gso", "off", "gro", "off", "tx", "off"];
            namespace.run(|| {
                run("ethtool", &[&["-K", device][..], &OFF].concat(), "")?;
                // TCP builds large packets even without offload, and they are segmented only after the tc programs.
                run("ip", &["link", "set", device, "gso_max_segs", "1"], "")
            })?;
        }
        Ok(())
    }
}

/// Steers received packets of these devices to one CPU (RPS). A namespace's devices are visible only in a /sys of its own.
pub(crate) fn steer(host: &Namespace, devices: &[&str], cpu: u32) -> Result<(), LabError> {
    let set = |device: &&str| format!("echo {:x} > /sys/class/net/{device}/queues/rx-0/rps_cpus", 1 << cpu);
    let all: Vec<String> = devices.iter().map(set).collect();
    run("ip", &["netns", "exec", host.name(), "sh", "-ec", &all.join("\n")], "").map(drop)
}

/// The names in a directory; empty if it cannot be read.
fn entries(path: &str) -> Vec<String> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Kills all programs in a namespace.
fn end_programs(name: &str) {
    let pids = run("ip", &["netns", "pids", name], "").unwrap_or_default();
    for pid in pids.split_whitespace().filter_map(|pid| pid.parse().ok()) {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
    }
}

/// Whether a namespace belongs to a lab of a dead process. A reused process ID only delays the sweep.
fn is_stale(name: &str) -> bool {
    let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()).and_then(|pid| pid.parse::<u32>().ok());
    let gone =
        |pid| matches!(fs::metadata(format!("/proc/{pid}")), Err(error) if error.kind() == io::ErrorKind::NotFound);
    pid.is_some_and(gone)
}

/// The `ip` batches that build a lab: one process runs many commands.
struct Plan<'a> {
    shape: Shape,
    options: &'a Options,
    number: u32,
    name: &'a dyn Fn(&str) -> String,
}

impl Plan<'_> {
    fn roles(&self) -> &'static [&'static str] {
        match self.shape {
            Shape::TwoDevices => &["client", "forwarder", "server"],
            Shape::OneArmed => &["client", "forwarder", "server", "segment"],
            Shape::TwoForwarders => &["client", "forwarder", "server", "second"],
            Shape::Farm => &["client", "forwarder", "server", "member0", "member1"],
        }
    }

    fn members(&self) -> &'static [&'static str] {
        if self.shape == Shape::Farm { &self.roles()[3..] } else { &[] }
    }

    /// Commands that create the namespaces and the links between them.
    fn creation(&self) -> String {
        let (client, server) = (self.options.mtu_client, self.options.mtu_server);
        let names = self.roles().iter().map(|role| format!("netns add {}\n", (self.name)(role)));
        let two = || {
            vec![
                self.wire(0, ("client", "c0"), ("forwarder", "f0"), client),
                self.wire(1, ("server", "s0"), ("forwarder", "f1"), server),
            ]
        };
        let wires = match self.shape {
            Shape::TwoDevices => two(),
            Shape::Farm => [
                two(),
                vec![
                    self.wire(2, ("member0", "m0"), ("forwarder", "p0"), server),
                    self.wire(3, ("member1", "m0"), ("forwarder", "p1"), server),
                ],
            ]
            .concat(),
            Shape::TwoForwarders => vec![
                self.wire(0, ("client", "c0"), ("forwarder", "f0"), client),
                self.wire(1, ("second", "g0"), ("forwarder", "f1"), server),
                self.wire(2, ("server", "s0"), ("second", "g1"), server),
            ],
            Shape::OneArmed => vec![
                self.wire(0, ("client", "c0"), ("segment", "pc"), client),
                self.wire(1, ("server", "s0"), ("segment", "ps"), server),
                self.wire(2, ("forwarder", "f0"), ("segment", "pf"), client.max(server)),
            ],
        };
        names.chain(wires).collect()
    }

    /// Commands for a link whose two ends have different interface indices. If a veth and its
    /// peer had the same index, the kernel would report its state with the delay used for
    /// physical devices, and a bridge does not use a port before that: this would cost a second.
    fn wire(&self, wire: u8, left: (&str, &str), right: (&str, &str), mtu: u32) -> String {
        let end = |(role, device): (&str, &str), end: u8| {
            let (mac, index, role) = (self.mac(wire * 2 + end), 10 + wire * 2 + end, (self.name)(role));
            format!("name {device} index {index} address {mac} mtu {mtu} netns {role}")
        };
        format!("link add {} type veth peer {}\n", end(left, 0), end(right, 1))
    }

    /// A MAC address unique among all labs on this machine, so that a trace shows where a frame comes from.
    fn mac(&self, end: u8) -> String {
        let [_, _, pid_high, pid_low] = std::process::id().to_be_bytes();
        let [.., number_high, number_low] = self.number.to_be_bytes();
        format!("02:{end:02x}:{pid_high:02x}:{pid_low:02x}:{number_high:02x}:{number_low:02x}")
    }

    fn forwarder(&self) -> String {
        let to_server = [FORWARDER_TO_SERVER, FORWARDER_TO_SERVER_SECOND];
        match self.shape {
            Shape::TwoDevices => addresses_of("f0", &[FORWARDER_TO_CLIENT]) + &addresses_of("f1", &to_server),
            Shape::Farm => {
                addresses_of("f0", &[FORWARDER_TO_CLIENT])
                    + &addresses_of("f1", &to_server)
                    + &bridge("farm", self.options.mtu_server, &["p0", "p1"])
                    + &addresses_of("farm", &[FORWARDER_TO_FARM])
            }
            Shape::TwoForwarders => {
                addresses_of("f0", &[FORWARDER_TO_CLIENT])
                    + &addresses_of("f1", &[FORWARDER_TO_SECOND])
                    + &route(2, SECOND_TO_FORWARDER)
            }
            Shape::OneArmed => {
                let mut batch = addresses_of("f0", &[&[FORWARDER_TO_CLIENT][..], &to_server].concat());
                // A device has only one MTU; the MTU of the smaller link is set on its routes.
                for (side, mtu) in [(1, self.options.mtu_client), (2, self.options.mtu_server)] {
                    let own = Address::new(side, 1);
                    let _ = writeln!(batch, "route replace 10.77.{side}.0/24 dev f0 src {} mtu {mtu}", own.v4);
                    let _ = writeln!(batch, "route replace fd77:{side}::/64 dev f0 metric 256 mtu {mtu}");
                }
                batch
            }
        }
    }

    fn second(&self) -> String {
        addresses_of("g0", &[SECOND_TO_FORWARDER])
            + &addresses_of("g1", &[FORWARDER_TO_SERVER, FORWARDER_TO_SERVER_SECOND])
            + &route(1, FORWARDER_TO_SECOND)
    }

    fn segment(&self) -> String {
        let mtu = self.options.mtu_client.max(self.options.mtu_server);
        bridge("br0", mtu, &["pc", "pf", "ps"])
    }
}

fn bridge(name: &str, mtu: u32, ports: &[&str]) -> String {
    let mut batch = format!(
        "link add {name} type bridge stp_state 0 forward_delay 0 mcast_snooping 0\nlink set {name} mtu {mtu} up\n"
    );
    for port in ports {
        let _ = writeln!(batch, "link set {port} master {name} up");
    }
    batch
}

/// A route to the client's or the server's network.
fn route(side: u8, via: Address) -> String {
    format!("route add 10.77.{side}.0/24 via {}\nroute add fd77:{side}::/64 via {}\n", via.v4, via.v6)
}

fn end_host(device: &str, side: u8, addresses: &[Address]) -> String {
    let gateway = Address::new(side, 1);
    let mut batch = addresses_of(device, addresses);
    let _ = writeln!(batch, "route add default via {}\nroute add default via {}", gateway.v4, gateway.v6);
    batch
}

fn addresses_of(device: &str, addresses: &[Address]) -> String {
    let mut batch = format!("link set lo up\nlink set {device} up\n");
    for address in addresses {
        let _ = writeln!(batch, "addr add {}/24 dev {device}", address.v4);
        let _ = writeln!(batch, "addr add {}/64 dev {device} nodad", address.v6);
    }
    batch
}
