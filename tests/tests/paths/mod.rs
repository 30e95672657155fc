//! Spliced connections follow the network: next hops that change their address, gateways that fail, routes that change.
mod devices;

use longsplice_datapath::{Datapath, IdleLeg, NextHop, Options, Pair, Tuple};
use longsplice_engine::{Command, DatapathOptions, FlowState, FlowStatus, OpenOptions, Policy, Refusal};
use longsplice_lab::{
    Family, Lab, Namespace, Shape,
    process::wait_for,
    topology::{FORWARDER_TO_CLIENT, FORWARDER_TO_SERVER, SERVER, SERVER_SECOND},
    traffic::{Cue, Report, Script, Serving, connect, converse, intact, listen, serve},
};
use longsplice_tests::{Forwarder, at_once, by_hand, families};
use std::{
    collections::HashSet,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread::{self, JoinHandle},
    time::Duration,
};
use test_case::test_case;

/// Time limit for every wait.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes per second, each way.
const PACE: u64 = 1_000_000;
/// Bytes of an upload: at that pace it outlasts the change under test, which is over before the hosts wait for long.
const BYTES: u64 = 5_000_000;
/// Time limit for connections that last until the test ends.
const LONGEST: Duration = Duration::from_secs(240);

fn ip(host: &Namespace, commands: &str) {
    for line in commands.lines().map(str::trim).filter(|l| !l.is_empty()) {
        host.execute("ip", &line.split(' ').collect::<Vec<_>>()).unwrap_or_else(|e| panic!("ip {line}: {e}"));
    }
}

/// Connections with traffic in both directions.
struct Talk {
    forwarder: Forwarder,
    clients: Vec<JoinHandle<Report>>,
    serving: Serving,
    /// Given at the end: all hosts send until then.
    enough: Cue,
}

impl Talk {
    fn begin(lab: &Lab, family: Family, policy: Policy, connections: u32) -> Talk {
        Talk::with(lab, family, policy, connections, OpenOptions::default())
    }

    /// Begins, and waits until all connections are spliced.
    fn with(lab: &Lab, family: Family, policy: Policy, connections: u32, options: OpenOptions) -> Talk {
        let talk = Talk::open(lab, family, policy, connections, options);
        let all = connections as usize;
        talk.until("all are spliced", |t| t.states(&[FlowState::Spliced, FlowState::Released]) == all);
        talk.goes_on();
        talk
    }

    fn open(lab: &Lab, family: Family, policy: Policy, connections: u32, options: OpenOptions) -> Talk {
        let server = SERVER.port(family, 7000);
        let enough = Cue::default();
        let answer = Script::answerer().until(&enough, PACE).deadline(LONGEST);
        let all = connections as usize;
        let serving = lab.server.run(|| serve(listen(server, &answer).expect("listen"), all, answer.clone()));
        let proxy = FORWARDER_TO_CLIENT.port(family, 7000);
        let forwarder = Forwarder::open(lab, proxy, server, policy, options);
        let script = |seed| Script::opener(seed).until(&enough, PACE).deadline(LONGEST);
        let client =
            |script: Script| lab.client.spawn(move || converse(connect(proxy, &script).expect("connect"), &script));
        let clients = (1..=connections).map(|seed| client(script(seed.into()))).collect();
        Talk { forwarder, clients, serving, enough }
    }

    fn states(&self, wanted: &[FlowState]) -> usize {
        self.forwarder.splicer.flows().iter().filter(|f| wanted.contains(&f.state)).count()
    }

    /// Number of connections that are spliced, or were.
    fn once_spliced(&self) -> usize {
        let splicer = &self.forwarder.splicer;
        let splices = |f: &FlowStatus| splicer.inspect(f.id).and_then(|flow| flow.splices);
        splicer.flows().iter().filter(|f| splices(f) > Some(0)).count()
    }

    fn until(&self, what: &str, is: impl Fn(&Talk) -> bool) {
        wait_for(PATIENCE, || is(self).then_some(())).unwrap_or_else(|| {
            let f = &self.forwarder;
            panic!("{what}: {:#?} {:?} {:?}", f.splicer.flows(), f.verdicts(), self.changes())
        });
    }

    fn changes(&self) -> longsplice_datapath::PathChanges {
        self.forwarder.splicer.datapath().expect("kernel path").path_changes()
    }

    /// Checks that each connection makes progress in both directions in forwarding mode.
    fn goes_on(&self) {
        let passed = || -> Vec<Pair<u64>> {
            self.forwarder.splicer.flows().iter().map(|f| Pair::new(f.bytes_up, f.bytes_down)).collect()
        };
        let before = passed();
        let further = |now: &[Pair<u64>]| {
            let mut both = now.iter().zip(&before).flat_map(|(now, then)| now.zip(*then));
            both.all(|(now, then)| now >= then + 300_000)
        };
        self.until("bytes pass", |_| further(&passed()));
    }

    fn end(self) {
        self.enough.give();
        let mut servers = self.serving.join();
        for client in self.clients {
            let client = client.join().expect("client");
            let i =
                servers.iter().position(|s| s.seed == client.seed).unwrap_or_else(|| panic!("{client}, {servers:?}"));
            intact(&client, &servers.remove(i)).unwrap_or_else(|why| panic!("{why}"));
        }
    }
}

/// A connection whose client sends, while its server sends no data.
struct Upload {
    forwarder: Forwarder,
    client: JoinHandle<Report>,
    serving: Serving,
}

impl Upload {
    fn begin(lab: &Lab, family: Family, policy: Policy, script: Script, deadline: Duration) -> Upload {
        let (server, proxy) = (SERVER.port(family, 7000), FORWARDER_TO_CLIENT.port(family, 7000));
        let answer = Script::answerer().bytes(0).deadline(deadline);
        let serving = lab.server.run(|| serve(listen(server, &answer).expect("listen"), 1, answer.clone()));
        let forwarder = Forwarder::open(lab, proxy, server, policy, OpenOptions::default());
        let script = script.bytes(BYTES).pace(PACE).deadline(deadline);
        let client = lab.client.spawn(move || converse(connect(proxy, &script).expect("connect"), &script));
        Upload { forwarder, client, serving }
    }

    fn until(&self, what: &str, is: impl Fn(&FlowStatus) -> bool) {
        let flows = || self.forwarder.splicer.flows();
        wait_for(PATIENCE, || flows().first().is_some_and(&is).then_some(()))
            .unwrap_or_else(|| panic!("{what}: {:?}", flows()));
    }

    fn end(self) {
        let client = self.client.join().expect("client");
        intact(&client, &self.serving.join()[0]).unwrap_or_else(|why| panic!("{why}"));
    }
}

/// Runs the change with parked and released connections of both families.
fn for_all(happens: impl Fn(&Lab, Family, Talk) + Sync) {
    let one = &|family, release_after: Option<Duration>| {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        second_wire(&lab);
        let talk = Talk::begin(&lab, family, Policy { release_after, ..at_once() }, 3);
        let state = if release_after.is_some() { FlowState::Released } else { FlowState::Spliced };
        talk.until("all are forwarded", |t| t.states(&[state]) == 3);
        happens(&lab, family, talk);
    };
    thread::scope(|s| {
        for family in families() {
            for release_after in [None, Some(Duration::ZERO)] {
                s.spawn(move || one(family, release_after));
            }
        }
    });
}

/// Adds a second link between forwarder and server, which is not used
/// yet, and makes the kernel notice quickly when a neighbour is gone.
fn second_wire(lab: &Lab) {
    let server = lab.server.path();
    ip(&lab.forwarder, &format!("link add f2 type veth peer name s1 netns {}", server.display()));
    ip(
        &lab.forwarder,
        "addr add 10.77.3.1/24 dev f2
        addr add fd77:3::1/64 dev f2 nodad
        link set f2 up",
    );
    ip(
        &lab.server,
        "addr add 10.77.3.2/24 dev s1
        addr add fd77:3::2/64 dev s1 nodad
        link set s1 up",
    );
    // By default a neighbour that no longer answers is considered reachable for 45 s: longer than the hosts of a test wait.
    for device in ["f0", "f1", "f2"] {
        for (family, setting, value) in ["ipv4", "ipv6"]
            .into_iter()
            .flat_map(|family| [(family, "base_reachable_time_ms", "1000"), (family, "delay_first_probe_time", "1")])
        {
            lab.forwarder.sysctl(&format!("net.{family}.neigh.{device}.{setting}"), value).expect("sysctl");
        }
    }
}

/// Bytes sent by the forwarder on a device.
fn sent_by(lab: &Lab, device: &str) -> u64 {
    let table = lab.forwarder.run(|| std::fs::read_to_string("/proc/thread-self/net/dev")).expect("net/dev");
    let line = table.lines().find_map(|l| l.trim().strip_prefix(device)?.strip_prefix(':')).expect("the device");
    line.split_whitespace().nth(8).expect("a column").parse().expect("a number")
}

#[test]
#[ignore = "root"]
fn a_neighbour_gets_another_address() {
    for_all(|lab, _, talk| {
        ip(&lab.server, "link set s0 address 02:00:00:00:77:01");
        talk.goes_on();
        let changes = talk.changes();
        assert_eq!((changes.hops, changes.flows), (1, 0), "one write for all");
        talk.end();
    });
}

#[test]
#[ignore = "root"]
fn our_own_address_changes() {
    for_all(|lab, _, talk| {
        for setting in ["net.ipv4.conf.f1.arp_notify", "net.ipv6.conf.f1.ndisc_notify"] {
            lab.forwarder.sysctl(setting, "1").expect("sysctl"); // so that the server learns of it
        }
        ip(&lab.forwarder, "link set f1 address 02:00:00:00:77:02");
        talk.until("next hops know it", |t| t.changes().hops == 1);
        talk.goes_on();
        talk.end();
    });
}

/// The MTU is lowered, and raised again. No message tells the server, but hosts are told how much they may send.
#[test]
#[ignore = "root"]
fn the_mtu_of_a_wire_changes() {
    for_all(|lab, _, talk| {
        for mtu in [1300, 1500] {
            ip(&lab.forwarder, &format!("link set f1 mtu {mtu}"));
            ip(&lab.server, &format!("link set s0 mtu {mtu}"));
            talk.goes_on();
        }
        assert!(talk.forwarder.verdict("oversize") > 0);
        talk.end();
    });
}

fn route_to_server(family: Family) -> [&'static str; 2] {
    match family {
        Family::V4 => ["10.77.2.2/32 via 10.77.3.2 dev f2", "10.77.2.1/32 via 10.77.3.1 dev s1"],
        Family::V6 => ["fd77:2::2/128 via fd77:3::2 dev f2", "fd77:2::1/128 via fd77:3::1 dev s1"],
    }
}

#[test]
#[ignore = "root"]
fn a_route_moves_to_another_device_and_back() {
    for_all(|lab, family, talk| {
        let [there, back] = route_to_server(family);
        ip(&lab.forwarder, &format!("route add {there}"));
        ip(&lab.server, &format!("route add {back}"));
        let before = sent_by(lab, "f2");
        talk.until("the other device is used", |_| sent_by(lab, "f2") > before + 500_000);
        let changes = talk.changes();
        assert_eq!((changes.hops, changes.flows), (1, 0), "one write for all");
        talk.goes_on();
        ip(&lab.forwarder, &format!("route del {there}"));
        let before = sent_by(lab, "f1");
        talk.until("the first device is used", |_| sent_by(lab, "f1") > before + 500_000);
        talk.end();
    });
}

/// Routes that refer to a next hop by ID do not change when it does (ip-nexthop(8)).
#[test]
#[ignore = "root"]
fn a_next_hop_that_routes_name_by_number_is_replaced() {
    for_all(|lab, family, talk| {
        lab.forwarder.sysctl("net.ipv4.nexthop_compat_mode", "0").expect("sysctl"); // no notifications of routes
        let (host, first, second) = match family {
            Family::V4 => ("10.77.2.2/32", "10.77.2.2", "10.77.3.2"),
            Family::V6 => ("fd77:2::2/128", "fd77:2::2", "fd77:3::2"),
        };
        let [_, back] = route_to_server(family);
        ip(&lab.server, &format!("route add {back}"));
        ip(&lab.forwarder, &format!("nexthop add id 7 via {first} dev f1\nroute add {host} nhid 7"));
        // wait, so that the route no longer causes a new look-up
        (0..8).for_each(|_| talk.goes_on());
        let before = sent_by(lab, "f2");
        ip(&lab.forwarder, &format!("nexthop replace id 7 via {second} dev f2"));
        talk.until("the other device is used", |_| sent_by(lab, "f2") > before + 500_000);
        talk.end();
    });
}

/// IPv4 via an IPv6 gateway (RFC 8950). The server answers ARP on that link for none of its first link's addresses.
#[test]
#[ignore = "root"]
fn a_gateway_is_of_the_other_family() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    second_wire(&lab);
    lab.server.sysctl("net.ipv4.conf.all.arp_ignore", "1").expect("sysctl");
    let talk = Talk::begin(&lab, Family::V4, at_once(), 3);
    let before = sent_by(&lab, "f2");
    ip(&lab.forwarder, "route add 10.77.2.2/32 via inet6 fd77:3::2 dev f2");
    talk.until("the other device is used", |_| sent_by(&lab, "f2") > before + 500_000);
    talk.goes_on();
    talk.end();
}

/// State shared by several flows is split, and shared again.
#[test]
#[ignore = "root"]
fn one_flow_of_several_goes_another_way() {
    for_all(|lab, family, talk| {
        let [there, back] = route_to_server(family);
        let all = lab.server.execute("ss", &["-Htn", "state", "established", "sport", "=", ":7000"]).expect("ss");
        let port = all.trim().rsplit(':').next().expect("the port of one of them").to_owned();
        let version = if family == Family::V4 { "-4" } else { "-6" };
        ip(&lab.server, &format!("route add {back}"));
        ip(&lab.forwarder, &format!("{version} route add {there} table 77"));
        ip(&lab.forwarder, &format!("{version} rule add ipproto tcp sport {port} lookup 77"));
        let before = sent_by(lab, "f2");
        talk.until("the other device is used", |_| sent_by(lab, "f2") > before + 300_000);
        let (one, rest) = (sent_by(lab, "f2"), sent_by(lab, "f1"));
        talk.goes_on();
        assert!(sent_by(lab, "f2") > one + 200_000 && sent_by(lab, "f1") > rest + 400_000, "one, and two");
        let changes = talk.changes();
        assert_eq!((changes.hops, changes.flows), (0, 1), "no write for all");
        ip(&lab.forwarder, &format!("{version} rule del ipproto tcp sport {port} lookup 77"));
        talk.until("it is back", |t| t.changes().hops + t.changes().flows == 2);
        talk.goes_on();
        talk.end();
    });
}

/// Without a route the hosts have to find out by themselves, as with a router.
#[test]
#[ignore = "root"]
fn without_a_route_they_wait_for_one() {
    for_all(|lab, family, talk| {
        let host = if family == Family::V4 { "10.77.2.2/32" } else { "fd77:2::2/128" };
        ip(&lab.forwarder, &format!("route add unreachable {host}"));
        talk.until("they are counted", |t| t.changes().stranded == 3);
        ip(&lab.forwarder, &format!("route del unreachable {host}"));
        talk.until("they have a way again", |t| t.changes().stranded == 0);
        talk.goes_on();
        talk.end();
    });
}

/// Otherwise the kernel would reset the flows, or take their bytes for those of other connections.
#[test]
#[ignore = "root"]
fn what_comes_by_a_device_that_is_not_spliced_on_waits() {
    let one = |family, policy: Policy, is_taken_back| {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        second_wire(&lab);
        let devices = ["f0", "f1"].map(String::from).into();
        let talk =
            Talk::with(&lab, family, policy, 3, DatapathOptions { devices, ..DatapathOptions::default() }.into());
        if is_taken_back {
            talk.forwarder.command(Command::Unsplice);
            talk.until("all are taken back", |t| t.states(&[FlowState::Copying]) == 3);
        }
        let [there, back] = route_to_server(family);
        let also = if family == Family::V4 { back.replace(".1/", ".11/") } else { back.replace("2::1/", "2::b/") };
        let to_us = format!("{back}\nroute add {also}");
        for (host, route) in [(&lab.server, to_us.as_str()), (&lab.forwarder, there)] {
            let before = talk.forwarder.verdict("unwatched");
            ip(host, &format!("route add {route}"));
            // a flow in forwarding mode sends on any device
            if is_taken_back || host.name() == lab.server.name() {
                talk.until("it is seen", |t| t.forwarder.verdict("unwatched") > before + 3);
            }
            ip(host, &format!("route del {route}").replace(" add ", " del "));
            talk.goes_on();
        }
        talk.end();
    };
    let released = Policy { release_after: Some(Duration::ZERO), ..at_once() };
    thread::scope(|s| {
        for family in families() {
            for (policy, is_taken_back) in [(at_once(), false), (released.clone(), false), (at_once(), true)] {
                s.spawn(move || one(family, policy, is_taken_back));
            }
        }
    });
}

/// Through sockets that have the hosts' numbers, so that nothing has to be rewritten.
#[test]
#[ignore = "root"]
fn flows_whose_way_leads_elsewhere_are_taken_back() {
    let one = |family, policy| {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        second_wire(&lab);
        let devices = ["f0", "f1"].map(String::from).into();
        let talk =
            Talk::with(&lab, family, policy, 3, DatapathOptions { devices, ..DatapathOptions::default() }.into());
        let [there, back] = route_to_server(family);
        let also = if family == Family::V4 { back.replace(".1/", ".11/") } else { back.replace("2::1/", "2::b/") };
        ip(&lab.forwarder, &format!("route add {there}"));
        talk.until("all are taken back", |t| t.states(&[FlowState::Copying]) == 3);
        ip(&lab.server, &format!("route add {back}\nroute add {also}"));
        let before = sent_by(&lab, "f2");
        talk.goes_on();
        assert!(sent_by(&lab, "f2") > before + 500_000, "by the other device");
        let refused = talk.forwarder.splicer.flows().iter().all(|f| f.refusal == Some(Refusal::Unattached));
        assert!(refused, "{:?}", talk.forwarder.splicer.flows());
        ip(&lab.forwarder, &format!("route del {there}"));
        ip(&lab.server, &format!("route del {back}\nroute del {also}"));
        talk.goes_on();
        talk.forwarder.command(Command::Splice);
        talk.until("all are spliced", |t| t.states(&[FlowState::Spliced, FlowState::Released]) == 3);
        talk.goes_on();
        talk.end();
    };
    thread::scope(|s| {
        for family in families() {
            for release_after in [None, Some(Duration::ZERO)] {
                s.spawn(move || one(family, Policy { release_after, ..at_once() }));
            }
        }
    });
}

/// Unspliced, and spliced again at once: the sockets have sent nothing in between.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn hops_are_known_after_the_way_back(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let talk = Talk::begin(&lab, family, at_once(), 1);
    ip(&lab.server, "link set s0 address 02:00:00:00:77:03");
    talk.goes_on();
    for _ in 0..5 {
        talk.forwarder.command(Command::Unsplice);
        talk.until("it is taken back", |t| t.states(&[FlowState::Copying]) == 1);
        talk.forwarder.command(Command::Splice);
        talk.until("it is spliced", |t| t.states(&[FlowState::Spliced]) == 1);
    }
    talk.goes_on();
    talk.end();
}

/// Data in flight at an unsplice is retransmitted past sockets that are silent, to a host that sends nothing itself: nothing
/// else would reveal that its address has changed.
#[test]
#[ignore = "root"]
fn a_neighbour_that_only_hears_gets_another_address() {
    let one = &|family| {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        // by default the kernel keeps an unused neighbour for a minute, longer than the clients wait
        let setting = format!("net.{}.neigh.f1", if family == Family::V4 { "ipv4" } else { "ipv6" });
        for (name, value) in [("base_reachable_time_ms", "2000"), ("delay_first_probe_time", "1")] {
            lab.forwarder.sysctl(&format!("{setting}.{name}"), value).expect("sysctl");
        }
        let upload = Upload::begin(&lab, family, at_once(), Script::opener(1), PATIENCE / 2);
        upload.until("it is spliced", |f| f.state == FlowState::Spliced);
        upload.until("bytes pass", |f| f.bytes_up > 500_000);
        ip(&lab.server, "link set s0 address 02:00:00:00:77:05");
        thread::sleep(Duration::from_millis(100));
        upload.forwarder.command(Command::Unsplice);
        upload.until("it is taken back", |f| f.state == FlowState::Copying);
        // all paths are checked, and none is in forwarding mode
        ip(&lab.forwarder, "route add unreachable 192.0.2.0/24");
        upload.end();
    };
    thread::scope(|s| families().into_iter().for_each(|family| drop(s.spawn(move || one(family)))));
}

/// A host announces a new Ethernet address for one of its IP
/// addresses. By itself, the kernel would never doubt the other one.
#[test]
#[ignore = "root"]
fn a_host_with_two_addresses_gets_another_one() {
    let one = &|family| {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        let setting = format!("net.{}.neigh.f1", if family == Family::V4 { "ipv4" } else { "ipv6" });
        lab.forwarder.sysctl(&format!("{setting}.base_reachable_time_ms"), "3600000").expect("sysctl");
        let upload = Upload::begin(&lab, family, at_once(), Script::opener(1), PATIENCE / 2);
        let [here, second] = [FORWARDER_TO_SERVER, SERVER_SECOND].map(|a| a.port(family, 9));
        let send = |host: &Namespace, from: SocketAddr, to: SocketAddr| {
            host.run(|| UdpSocket::bind(from).and_then(|s| s.send_to(b"x", to))).expect("sent");
        };
        let is_known = || {
            let all = lab.forwarder.execute("ip", &["neigh", "show", &second.ip().to_string(), "nud", "reachable"]);
            all.is_ok_and(|all| all.contains("lladdr"))
        };
        send(&lab.forwarder, here, second);
        wait_for(PATIENCE, || is_known().then_some(())).expect("its second address is known");
        upload.until("bytes pass", |f| f.state == FlowState::Spliced && f.bytes_up > 500_000);
        ip(&lab.server, "link set s0 address 02:00:00:00:77:0a");
        send(&lab.server, second, here);
        upload.end();
    };
    thread::scope(|s| families().into_iter().for_each(|family| drop(s.spawn(move || one(family)))));
}

/// The next hop seen with a socket's last segment may be out of date. The routes must be followed nevertheless.
#[test]
#[ignore = "root"]
fn sockets_show_what_was() {
    let one = &|family, is_own: bool| {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        second_wire(&lab);
        let (old, new) = ("02:00:00:00:77:07", "02:00:00:00:77:08");
        let (address, second) =
            if family == Family::V4 { ("10.77.2.2", "10.77.2.12") } else { ("fd77:2::2", "fd77:2::c") };
        ip(&lab.server, &format!("link set s0 address {old}"));
        // the same host under another address, which sends nothing after that
        ip(&lab.forwarder, &format!("neigh replace {second} lladdr {old} dev f1 nud permanent"));
        let script = Script::opener(1).pause(PACE, Duration::from_secs(4));
        let upload = Upload::begin(&lab, family, by_hand(), script, PATIENCE);
        upload.until("the client pauses", |f| f.bytes_up >= PACE);
        thread::sleep(Duration::from_millis(200));
        if is_own {
            // the way back may lead over f1 still: the server has to learn of it
            for setting in ["net.ipv4.conf.f1.arp_notify", "net.ipv6.conf.f1.ndisc_notify"] {
                lab.forwarder.sysctl(setting, "1").expect("sysctl");
            }
            ip(&lab.forwarder, &format!("link set f1 address {new}"));
        } else {
            ip(&lab.server, &format!("link set s0 address {new}"));
            ip(&lab.forwarder, &format!("neigh replace {address} lladdr {new} dev f1 nud reachable"));
        }
        let datapath = upload.forwarder.splicer.datapath().expect("kernel path");
        let wanted = datapath.path_changes();
        upload.forwarder.command(Command::Splice);
        upload.until("it is spliced", |f| f.state == FlowState::Spliced);
        let [there, back] = route_to_server(family);
        ip(&lab.server, &format!("route add {back}"));
        ip(&lab.forwarder, &format!("route add {there}"));
        let before = sent_by(&lab, "f2");
        // the connection may be over by then
        let is_followed = || (sent_by(&lab, "f2") > before + 500_000).then_some(());
        wait_for(PATIENCE, is_followed).unwrap_or_else(|| panic!("the route is not followed: {family:?}, {is_own}"));
        assert!(datapath.path_changes().hops > wanted.hops);
        upload.end();
    };
    thread::scope(|s| {
        for family in families() {
            [false, true].into_iter().for_each(|is_own| drop(s.spawn(move || one(family, is_own))));
        }
    });
}

/// Packets marked by a firewall before routing follow the rules for the mark. They keep that path, and other packets theirs.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn marks_are_followed_as_the_kernel_does(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    second_wire(&lab);
    let [there, back] = route_to_server(family);
    let version = if family == Family::V4 { "-4" } else { "-6" };
    ip(&lab.server, &format!("route add {back}"));
    ip(&lab.forwarder, &format!("{version} route add {there} table 77"));
    ip(&lab.forwarder, &format!("{version} rule add fwmark 7 lookup 77"));
    let mark = "add table inet marks; add chain inet marks out { type route hook output priority mangle; }; \
                add rule inet marks out tcp dport 7000 meta mark set 7";
    lab.forwarder.execute("nft", &[mark]).expect("nft");
    let talk = Talk::begin(&lab, family, at_once(), 2);
    let before = sent_by(&lab, "f1");
    ip(&lab.forwarder, "route add unreachable 192.0.2.0/24"); // all paths are checked
    talk.goes_on();
    ip(&lab.server, "link set s1 address 02:00:00:00:77:09");
    talk.goes_on();
    assert!(sent_by(&lab, "f1") < before + 10_000, "marked packets go by f2");
    talk.end();
}

/// State shared by many flows is written once, independent of their number.
#[test]
#[ignore = "root"]
fn thousands_of_flows_are_one_write() {
    const FLOWS: u32 = 4000;
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let talk = Talk::begin(&lab, Family::V4, at_once(), 1);
    let d = talk.forwarder.splicer.datapath().expect("kernel path");
    let mac = |host: &Namespace, device: &str| {
        host.run(|| {
            let mut all = nix::ifaddrs::getifaddrs().expect("devices");
            all.find_map(|a| a.address.filter(|_| a.interface_name == device)?.as_link_addr()?.addr())
                .expect("its address")
        })
    };
    let (to, from, device) = (mac(&lab.server, "s0"), mac(&lab.forwarder, "f1"), lab.forwarder.run(|| index("f1")));
    let leg = |remote: SocketAddr, local: SocketAddr| IdleLeg {
        leg: Tuple { remote, local },
        hop: NextHop { device, to, from },
        end: 1,
        ack: 1,
        scale: 7,
    };
    let own = FORWARDER_TO_SERVER.port(Family::V4, 0);
    let flow = |n: u32| {
        let host = |net: u8| SocketAddr::from(([198, net, (n >> 8) as u8, n as u8], 7000));
        let [client, server] = [40000, 40001].map(|port| SocketAddr::new(own.ip(), port));
        Pair::new(leg(host(18), client), leg(host(19), server))
    };
    d.install(&(0..FLOWS).map(flow).collect::<Vec<_>>()).expect("installed");
    let before = talk.changes();
    ip(&lab.server, "link set s0 address 02:00:00:00:77:04");
    talk.goes_on();
    let after = talk.changes();
    assert_eq!((after.hops - before.hops, after.flows - before.flows), (1, 0));
    talk.end();
}

/// Notifications that do not fit the socket's queue are lost, and the kernel reports only the loss.
#[test]
#[ignore = "root"]
fn what_was_lost_of_notifications_is_asked_for() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let neighbour = |mac: &str| {
        let of = |ip: &str| format!("neigh replace {ip} lladdr {mac} dev f1 nud permanent\n");
        ip(&lab.forwarder, &format!("{}{}", of("10.77.2.2"), of("fd77:2::2")));
    };
    let [old, new] = ["02:00:00:00:77:05", "02:00:00:00:77:06"];
    neighbour(old);
    lab.forwarder.run(|| {
        let d = Datapath::open(&Options { max_flows: 16, ..Options::default() }).expect("the data path opens");
        let hop = NextHop { device: index("f1"), to: [2, 0, 0, 0, 0x77, 5], from: [2, 0, 0, 0, 0, 1] };
        let leg = |remote: [u8; 4], local: SocketAddr| IdleLeg {
            leg: Tuple { remote: (remote, 7000).into(), local },
            hop,
            end: 1,
            ack: 1,
            scale: 7,
        };
        let own = FORWARDER_TO_SERVER.port(Family::V4, 7000);
        let flow = Pair::new(leg([10, 77, 2, 3], own), leg([10, 77, 2, 2], own));
        d.install(&[flow]).expect("installed");
        let legs = flow.each_ref().map(|idle| &idle.leg);
        let mut watch = d.watch().expect("a socket");
        d.follow(&mut watch).expect("followed");
        let goes_to = || Some(d.inspect(legs, None).client.path?.via?.hop.dmac);
        assert_eq!(goes_to().as_deref(), Some(old));
        // a megabyte, at more than 200 bytes per notification
        let changes = "link set f0 alias a\nlink set f0 alias b\n".repeat(5000);
        lab.forwarder.ip(&changes).expect("ip");
        neighbour(new);
        d.follow(&mut watch).expect("followed");
        assert_eq!(goes_to().as_deref(), Some(new));
        d.remove().expect("removed");
    });
}

fn index(device: &str) -> u32 {
    nix::net::if_::if_nametoindex(device).expect("the device")
}
