//! Forwarded segments fit the other host and the path to it, for every pair of address families.
use longsplice_engine::{Ended, Policy, Refusal, SpliceWhen};
use longsplice_lab::{
    Family, Lab, Namespace, Options, Shape,
    process::wait_for,
    topology::{FORWARDER_TO_CLIENT, FORWARDER_TO_SERVER, SERVER},
    traffic::{Script, connect, converse, intact, listen, serve},
};
use longsplice_tests::{Forwarder, at_once, families};
use std::{
    io,
    net::{SocketAddr, TcpStream},
    thread,
    time::Duration,
};

/// Longest time of an upload. A client that hears of no router sends what was lost again when its timer ends, which takes 6 s by
/// then, and doubles.
const PATIENCE: Duration = Duration::from_secs(150);
const PORT: u16 = 7000;
const UP: u64 = 3_000_000;
/// Bytes per second, slow enough that data is left at a switch in the middle.
const PACE: u64 = 10_000_000;

/// Every packet is as on a wire: one that is too large for a device is dropped silently.
fn lab() -> Lab {
    Lab::new(Shape::TwoDevices, Options { large_packets: false, ..Options::default() }).expect("lab")
}

fn ip(host: &Namespace, command: &str) {
    host.execute("ip", &command.split(' ').collect::<Vec<_>>()).unwrap_or_else(|e| panic!("ip {command}: {e}"));
}

/// Runs a test for each pair of client's and server's family.
fn for_all(test: impl Fn(Family, Family) + Sync) {
    let test = &test;
    for client in families() {
        thread::scope(|s| Family::BOTH.map(|server| s.spawn(move || test(client, server))).map(drop));
    }
}

/// Runs an upload. Returns the flow's record and the counters.
fn upload(
    lab: &Lab,
    client: Family,
    server: SocketAddr,
    host: &Namespace,
    policy: Policy,
) -> (Ended, impl Fn(&str) -> u64) {
    let answer = Script::answerer().bytes(500).deadline(PATIENCE);
    let serving = host.run(|| serve(listen(server, &answer).expect("listen"), 1, answer.clone()));
    let proxy = FORWARDER_TO_CLIENT.port(client, PORT);
    let forwarder = Forwarder::start(lab, proxy, server, policy);
    let script = Script::opener(7).bytes(UP).pace(PACE).deadline(PATIENCE);
    let here = lab.client.run(|| converse(connect(proxy, &script).expect("connect"), &script));
    intact(&here, &serving.join()[0]).unwrap_or_else(|why| panic!("{client:?}: {why} {:?}", forwarder.verdicts()));
    let ended = forwarder.ended(1).remove(0);
    let verdicts = forwarder.verdicts();
    (ended, move |name: &str| verdicts.iter().find(|(n, _)| *n == name).map_or(0, |(_, n)| *n))
}

fn is_spliced(ended: &Ended) {
    assert_eq!(ended.refusal, None);
    assert!(ended.spliced_up + 100_000 > UP, "{ended:?}");
}

/// Makes a host ignore ICMP messages.
fn deafen(host: &Namespace) {
    let rules = "add table inet deaf; add chain inet deaf in { type filter hook input priority 0; }; \
                 add rule inet deaf in icmp type destination-unreachable drop; \
                 add rule inet deaf in icmpv6 type packet-too-big drop";
    host.execute("nft", &[rules]).expect("nft");
}

/// Only the announced MSS limits the segments, as with a tunnel that clamps SYNs.
#[test]
#[ignore = "root"]
fn a_server_that_takes_less_gets_less() {
    for_all(|client, server| {
        let lab = lab();
        ip(&lab.server, "link set s0 mtu 1400");
        let (ended, count) = upload(&lab, client, SERVER.port(server, PORT), &lab.server, at_once());
        is_spliced(&ended);
        assert!(count("oversize") > 0);
    });
}

#[test]
#[ignore = "root"]
fn a_client_that_hears_no_icmp_is_copied() {
    for_all(|client, server| {
        let lab = lab();
        deafen(&lab.client);
        ip(&lab.server, "link set s0 mtu 1400");
        let (ended, _) = upload(&lab, client, SERVER.port(server, PORT), &lab.server, at_once());
        assert_eq!(ended.refusal, Some(Refusal::Mtu), "{ended:?}");
    });
}

/// With so small an MSS announced, the flow is copied: the host would keep such a path MTU for its other connections.
#[test]
#[ignore = "root"]
fn a_server_that_takes_next_to_nothing_is_copied_to() {
    for_all(|client, server| {
        let lab = lab();
        for (us, mss) in [("10.77.2.0/28", 400), ("fd77:2::/112", 1000)] {
            ip(&lab.server, &format!("route add {us} dev s0 advmss {mss}"));
        }
        let (ended, _) = upload(&lab, client, SERVER.port(server, PORT), &lab.server, at_once());
        // A few segments may be forwarded before the splice is taken back. They are cut to fit, and nobody is told.
        assert_eq!((ended.refusal, ended.splices), (Some(Refusal::Mtu), 0), "{ended:?}");
        let us = FORWARDER_TO_CLIENT.port(client, 0).ip().to_string();
        let route = lab.client.execute("ip", &["route", "get", &us]).expect("ip");
        assert!(!route.contains("mtu"), "{route}");
    });
}

/// The MTU of a route limits the segments, as with a tunnel further along the path.
#[test]
#[ignore = "root"]
fn the_mtu_of_the_route_counts() {
    for_all(|client, server| {
        let lab = lab();
        let host = SERVER.port(server, 0).ip();
        ip(&lab.forwarder, &format!("route add {host} dev f1 mtu 1400"));
        // larger packets are lost there, and the server does not know
        ip(&lab.server, "link set s0 mtu 1400");
        ip(
            &lab.server,
            &format!("route add {} dev s0 mtu lock 1500 advmss 1460", FORWARDER_TO_SERVER.port(server, 0).ip()),
        );
        let (ended, count) = upload(&lab, client, SERVER.port(server, PORT), &lab.server, at_once());
        is_spliced(&ended);
        assert!(count("oversize") > 0);
    });
}

/// Adds a router with a narrower link behind the server's. Returns the lab of the host there.
fn behind_a_router(lab: &Lab) -> Lab {
    let beyond = self::lab();
    ip(&beyond.server, "link set s0 down");
    let there = beyond.server.path();
    ip(&lab.server, &format!("link add r0 type veth peer name e0 netns {}", there.display()));
    for (host, commands) in [
        (
            &lab.server,
            ["addr add 10.77.9.1/24 dev r0", "addr add fd77:9::1/64 dev r0 nodad", "link set r0 up mtu 1300"],
        ),
        (&beyond.server, ["addr add 10.77.9.2/24 dev e0", "addr add fd77:9::2/64 dev e0 nodad", "link set e0 up"]),
    ] {
        commands.iter().for_each(|c| ip(host, c));
    }
    ip(&beyond.server, "route replace default via 10.77.9.1");
    ip(&beyond.server, "route replace default via fd77:9::1");
    for setting in ["net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"] {
        lab.server.sysctl(setting, "1").expect("sysctl");
    }
    ip(&lab.forwarder, "route add 10.77.9.0/24 via 10.77.2.2");
    ip(&lab.forwarder, "route add fd77:9::/64 via fd77:2::2");
    // Until the kernel has noticed that the link is up, its packets are lost.
    for family in Family::BOTH {
        let answers =
            || lab.forwarder.run(|| TcpStream::connect(self::beyond(family))).is_err_and(is_refused).then_some(());
        wait_for(PATIENCE, answers).expect("an answer from behind the router");
    }
    beyond
}

fn is_refused(error: io::Error) -> bool {
    error.kind() == io::ErrorKind::ConnectionRefused
}

fn beyond(family: Family) -> SocketAddr {
    match family {
        Family::V4 => ([10, 77, 9, 2], PORT).into(),
        Family::V6 => ([0xfd77, 9, 0, 0, 0, 0, 0, 2], PORT).into(),
    }
}

#[test]
#[ignore = "root"]
fn what_routers_say_is_translated() {
    for_all(|client, server| {
        let lab = lab();
        let far = behind_a_router(&lab);
        let (ended, count) = upload(&lab, client, beyond(server), &far.server, at_once());
        is_spliced(&ended);
        // a message that arrives in the middle of a switch is remembered instead
        assert!(count("icmp-translated") + count("oversize") > 0);
    });
}

/// Our sockets have already learned the path MTU.
#[test]
#[ignore = "root"]
fn what_routers_have_said_counts() {
    for_all(|client, server| {
        let lab = lab();
        let far = behind_a_router(&lab);
        let policy = Policy { when: SpliceWhen::AfterBytes(200_000), ..at_once() };
        let (ended, count) = upload(&lab, client, beyond(server), &far.server, policy);
        assert!(ended.refusal.is_none() && ended.splices == 1, "{ended:?}");
        assert_eq!((count("icmp-translated"), count("oversize") > 0), (0, true));
    });
}

#[test]
#[ignore = "root"]
fn a_client_that_hears_of_no_router_is_copied() {
    for_all(|client, server| {
        let lab = lab();
        deafen(&lab.client);
        let far = behind_a_router(&lab);
        let (ended, _) = upload(&lab, client, beyond(server), &far.server, at_once());
        assert_eq!(ended.refusal, Some(Refusal::Mtu), "{ended:?}");
    });
}
