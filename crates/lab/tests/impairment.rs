//! Impaired links: checks that impairments take effect, and that checked traffic survives them.

use std::time::{Duration, Instant};

use longsplice_lab::topology::SERVER;
use longsplice_lab::traffic::{Report, Script, connect, converse, intact, listen, serve};
use longsplice_lab::{Family, Impair, Impaired, Lab, LinkDirection, Options, Shape};

const WAYS: [LinkDirection; 4] =
    [LinkDirection::FromClient, LinkDirection::ToClient, LinkDirection::FromServer, LinkDirection::ToServer];

fn wire(shape: Shape) -> Lab {
    let options = Options { forwarding: true, large_packets: false, ..Options::default() };
    Lab::new(shape, options).expect("a lab needs root")
}

fn exchange(lab: &Lab, family: Family, opener: &Script, answerer: Script) -> (Report, Report) {
    let at = SERVER.port(family, 7000);
    let server = serve(lab.server.run(|| listen(at, &answerer)).expect("listen"), 1, answerer);
    let client = converse(lab.client.run(|| connect(at, opener)).expect("connect"), opener);
    (client, server.join().pop().expect("one connection"))
}

/// Sends half a megabyte each way over an impaired link. Returns the impairment counters and both reports.
fn half_megabytes(lab: &Lab, family: Family, way: LinkDirection, impair: Impair) -> (Impaired, Report, Report) {
    let impairment = lab.impair(way, impair).expect("impair");
    let (opener, answerer) = (Script::opener(5).bytes(1 << 19), Script::answerer().bytes(1 << 19));
    let (client, server) = exchange(lab, family, &opener, answerer);
    intact(&client, &server).unwrap_or_else(|why| panic!("{way:?} {family:?} {impair:?}: {why}"));
    let counters = impairment.counters();
    assert_eq!(counters.unsent, 0, "{counters:?}");
    assert!(counters.seen > 20, "{way:?} {counters:?}");
    (counters, client, server)
}

#[test]
#[ignore = "root"]
fn loss_loses_and_the_traffic_survives() {
    let lab = wire(Shape::TwoDevices);
    for (way, family) in WAYS.into_iter().zip(Family::BOTH.into_iter().cycle()) {
        let (counters, client, server) = half_megabytes(&lab, family, way, Impair { loss: 0.03, ..Impair::default() });
        assert!(counters.lost > 0, "{way:?} {counters:?}");
        assert_eq!(counters.duplicated + counters.reordered + counters.delayed, 0);
        assert!(client.retransmits.unwrap() + server.retransmits.unwrap() > 0, "{client} {server}");
    }
}

#[test]
#[ignore = "root"]
fn every_nth_packet_is_lost() {
    let lab = wire(Shape::OneArmed);
    let (counters, ..) =
        half_megabytes(&lab, Family::V4, LinkDirection::ToServer, Impair { drop_every: Some(50), ..Impair::default() });
    assert_eq!(counters.lost, counters.seen / 50);
}

#[test]
#[ignore = "root"]
fn a_share_is_a_share() {
    let lab = wire(Shape::TwoDevices);
    let impairment = lab.impair(LinkDirection::FromClient, Impair { loss: 0.5, ..Impair::default() }).unwrap();
    lab.client.run(|| {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        (0..2000).for_each(|_| drop(socket.send_to(b"datagram", SERVER.port(Family::V4, 9))));
    });
    let counters = impairment.counters();
    assert_eq!(counters.seen, 2000);
    assert!((900..1100).contains(&counters.lost), "{counters:?}");
}

#[test]
#[ignore = "root"]
fn losses_end_with_the_first_packets_of_each_connection() {
    let lab = wire(Shape::TwoDevices);
    let impair = Impair { loss: 1.0, loss_among_first: Some(6), ..Impair::default() };
    for family in Family::BOTH {
        let impairment = lab.impair(LinkDirection::FromClient, impair).unwrap();
        lab.client.run(|| {
            for _ in 0..2 {
                let any: std::net::IpAddr = if family == Family::V4 { [0; 4].into() } else { [0; 16].into() };
                let socket = std::net::UdpSocket::bind((any, 0)).unwrap();
                (0..10).for_each(|_| drop(socket.send_to(b"datagram", SERVER.port(family, 9))));
            }
        });
        let counters = impairment.counters();
        assert_eq!((counters.seen, counters.lost), (20, 12));
    }
}

#[test]
#[ignore = "root"]
fn fates_repeat_after_a_restart() {
    let lab = wire(Shape::TwoDevices);
    let impair = Impair { loss: 0.5, seed: 7, ..Impair::default() };
    let impairment = lab.impair(LinkDirection::FromClient, impair).unwrap();
    let fates = || {
        impairment.restart(impair).unwrap();
        let socket = lab.client.run(|| std::net::UdpSocket::bind("0.0.0.0:0")).unwrap();
        let lost = |_| {
            let before = impairment.counters().lost;
            socket.send_to(b"datagram", SERVER.port(Family::V4, 9)).unwrap();
            impairment.counters().lost > before
        };
        (0..50).map(lost).collect::<Vec<bool>>()
    };
    fates(); // the first datagram waits until the neighbour has answered
    let first = fates();
    assert!(first.contains(&true) && first.contains(&false));
    assert_eq!(fates(), first);
}

#[test]
#[ignore = "root"]
fn duplicates_are_made_and_do_no_harm() {
    let lab = wire(Shape::OneArmed);
    for way in WAYS {
        let (counters, ..) = half_megabytes(&lab, Family::V4, way, Impair { duplicate: 0.1, ..Impair::default() });
        assert!(counters.duplicated > 0, "{way:?} {counters:?}");
    }
}

#[test]
#[ignore = "root"]
fn a_duplicate_arrives_twice() {
    for delay in [Duration::ZERO, Duration::from_millis(1)] {
        for way in [LinkDirection::FromClient, LinkDirection::ToServer] {
            let lab = wire(Shape::TwoDevices);
            let _impairment = lab.impair(way, Impair { duplicate: 1.0, delay, ..Impair::default() }).unwrap();
            let receiver = lab.server.run(|| std::net::UdpSocket::bind(SERVER.port(Family::V4, 9))).unwrap();
            receiver.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
            let sender = lab.client.run(|| std::net::UdpSocket::bind("0.0.0.0:0")).unwrap();
            sender.send_to(b"datagram", receiver.local_addr().unwrap()).unwrap();
            for _ in 0..2 {
                assert_eq!(receiver.recv(&mut [0; 16]).unwrap_or_else(|why| panic!("{way:?} {delay:?}: {why}")), 8);
            }
            receiver.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            receiver.recv(&mut [0; 16]).expect_err("twice, not three times");
        }
    }
}

#[test]
#[ignore = "root"]
fn delay_delays() {
    let lab = wire(Shape::TwoDevices);
    let delay = Duration::from_millis(20);
    for (way, family) in WAYS.into_iter().zip(Family::BOTH.into_iter().cycle()) {
        let impairment = lab.impair(way, Impair { delay, ..Impair::default() }).unwrap();
        // Ten one-byte turns each way.
        let (opener, answerer) = (Script::opener(5).bytes(18).ahead(1), Script::answerer_of(5).bytes(18).ahead(0));
        let started = Instant::now();
        let (client, server) = exchange(&lab, family, &opener, answerer);
        intact(&client, &server).unwrap();
        let turns = started.elapsed();
        assert!(turns > 10 * delay && turns < 40 * delay, "{way:?} {family:?} {turns:?}");
        assert!(impairment.counters().delayed >= 18);
        drop(impairment);
        for host in [&lab.client, &lab.server] {
            let links = host.execute("ip", &["-brief", "link"]).unwrap();
            assert!(!links.contains("near"), "the detour is gone: {links}");
        }
        exchange(&lab, family, &Script::opener(5).bytes(1), Script::answerer());
    }
}

#[test]
#[ignore = "root"]
fn rate_limits() {
    let lab = wire(Shape::TwoDevices);
    let impair = Impair { rate_bytes_per_s: Some(2 << 20), queue: Duration::from_secs(1), ..Impair::default() };
    let (counters, _, server) = half_megabytes(&lab, Family::V4, LinkDirection::FromClient, impair);
    assert_eq!(counters.overflowed, 0, "{counters:?}");
    assert!(server.duration > Duration::from_millis(240), "{server}");
    let short = Impair { rate_bytes_per_s: Some(1 << 20), queue: Duration::from_millis(5), ..Impair::default() };
    let (counters, ..) = half_megabytes(&lab, Family::V4, LinkDirection::FromClient, short);
    assert!(counters.overflowed > 0, "{counters:?}");
}

/// Sends over two connections at once, which share the rate or do not. Returns the duration of the longer transfer.
fn two_at_once(per_connection: bool) -> Duration {
    let lab = wire(Shape::TwoDevices);
    let impair =
        Impair { rate_bytes_per_s: Some(2 << 20), queue: Duration::from_secs(5), per_connection, ..Impair::default() };
    let _impairment = lab.impair(LinkDirection::FromClient, impair).unwrap();
    let at = SERVER.port(Family::V4, 7000);
    let server = serve(lab.server.run(|| listen(at, &Script::answerer())).unwrap(), 2, Script::answerer());
    let opener = |seed| Script { congestion: Some("cubic"), ..Script::opener(seed).bytes(1 << 20) };
    std::thread::scope(|scope| {
        let lab = &lab;
        let send = move |seed| converse(lab.client.run(|| connect(at, &opener(seed))).unwrap(), &opener(seed));
        let clients = [5, 6].map(|seed| scope.spawn(move || send(seed)));
        clients.into_iter().for_each(|client| assert!(client.join().unwrap().clean()));
    });
    server.join().iter().map(|report| report.duration).max().unwrap()
}

#[test]
#[ignore = "root"]
fn a_connection_can_have_the_rate_to_itself() {
    let shared = two_at_once(false);
    assert!(shared > Duration::from_millis(950), "{shared:?}");
    // a machine that stands still for a while makes it slow, but not each time
    assert!((0..5).any(|_| two_at_once(true) < shared.mul_f64(0.75)), "{shared:?}");
}

#[test]
#[ignore = "root"]
fn reordering_reorders_and_the_traffic_survives() {
    let lab = wire(Shape::TwoDevices);
    for (way, family) in WAYS.into_iter().zip(Family::BOTH.into_iter().cycle()) {
        for delay in [Duration::ZERO, Duration::from_millis(2)] {
            let impair = Impair { reorder: 0.05, reorder_by: Duration::from_millis(1), delay, ..Impair::default() };
            let out_of_order = || {
                let queued = |host: &longsplice_lab::Namespace| host.counter("TcpExt", "TCPOFOQueue").unwrap();
                queued(&lab.client) + queued(&lab.server)
            };
            let before = out_of_order();
            let (counters, ..) = half_megabytes(&lab, family, way, impair);
            assert!(counters.reordered > 0, "{way:?} {delay:?} {counters:?}");
            assert!(out_of_order() > before, "{way:?} {delay:?}: nothing arrived out of order");
        }
    }
}

#[test]
#[ignore = "root"]
fn both_ways_and_everything_at_once() {
    let lab = wire(Shape::OneArmed);
    let impair = Impair {
        loss: 0.005,
        duplicate: 0.02,
        reorder: 0.02,
        delay: Duration::from_millis(1),
        rate_bytes_per_s: Some(20 << 20),
        ..Impair::default()
    };
    let _others = [LinkDirection::ToClient, LinkDirection::FromServer, LinkDirection::ToServer]
        .map(|way| lab.impair(way, impair).unwrap());
    let (counters, ..) = half_megabytes(&lab, Family::V6, LinkDirection::FromClient, impair);
    assert!(counters.lost > 0 && counters.duplicated > 0 && counters.reordered > 0, "{counters:?}");
}

#[test]
#[ignore = "root"]
fn large_packets_take_the_detour_too() {
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).unwrap();
    for way in WAYS {
        let (counters, ..) =
            half_megabytes(&lab, Family::V4, way, Impair { delay: Duration::from_millis(1), ..Impair::default() });
        assert!(counters.delayed > 100, "{way:?} {counters:?}");
    }
}

#[test]
#[ignore = "root"]
fn impairment_can_change_while_at_work() {
    let lab = wire(Shape::TwoDevices);
    let impairment = lab.impair(LinkDirection::ToServer, Impair::default()).unwrap();
    std::thread::scope(|scope| {
        let traffic = scope.spawn(|| {
            exchange(
                &lab,
                Family::V4,
                &Script::opener(3).lasting(Duration::from_millis(400), 5_000_000),
                Script::answerer(),
            )
        });
        std::thread::sleep(Duration::from_millis(150));
        assert_eq!(impairment.counters().lost, 0);
        impairment.change(Impair { loss: 0.02, ..Impair::default() }).unwrap();
        let (client, server) = traffic.join().unwrap();
        intact(&client, &server).unwrap();
    });
    assert!(impairment.counters().lost > 0);
}
