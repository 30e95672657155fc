//! Prefetching of path entries for packets that wait in a batch: the right entries, and only when there are many packets.

use longsplice_datapath::{Datapath, IdleLeg, NextHop, Options, Pair, Tuple, testing::found_ahead};
use longsplice_lab::{
    Family, Lab, Namespace, Shape,
    flood::{self, Aim, Flood},
    topology::{CLIENT, FORWARDER_TO_CLIENT, SERVER},
};
use longsplice_tests::packet::Packet;
use std::{net::SocketAddr, time::Duration};

/// Flows whose entries exceed the CPU caches.
const MANY: u32 = 40_000;
/// Table size. The tables are nearly empty nevertheless, so a packet mistaken for another one would find no entry.
const ROOM: u32 = 4 * MANY;
const PORT: u16 = 7000;
/// Window scale, large enough that every packet of the flood is in the window.
const SCALE: u8 = 14;

/// Runs `work` with a flood over this many spliced flows.
fn flooded(flows: u32, work: impl FnOnce(&Lab, &Datapath, &mut Flood) + Send) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab: root and iproute2");
    let SocketAddr::V4(target) = FORWARDER_TO_CLIENT.port(Family::V4, PORT) else { unreachable!("IPv4 was asked for") };
    let mut flood = Flood::new(&lab, Aim { flows, target, arrives_at: PORT }).expect("flood");
    let d = lab.forwarder.run(|| Datapath::open(&Options { max_flows: ROOM, ..Options::default() })).expect("open");
    let hop = |device: &str, host: &Namespace, its: &str| {
        let (own, neighbour) = (lab.forwarder.link(device).expect("device"), host.link(its).expect("device"));
        NextHop { device: own.index, to: neighbour.mac, from: own.mac }
    };
    let hops = Pair::new(hop(lab.client_device(), &lab.client, "c0"), hop(lab.server_device(), &lab.server, "s0"));
    let idle = |leg, hop, end, ack| IdleLeg { leg, hop, end, ack, scale: SCALE };
    let both = |n| {
        let client = Tuple { remote: Flood::source(n).into(), local: target.into() };
        let server = Tuple { remote: SERVER.port(Family::V4, PORT), local: Flood::other_side(n).into() };
        Pair {
            client: idle(client, hops.client, flood::FIRST_SEQ, flood::ACK),
            server: idle(server, hops.server, flood::ACK, flood::FIRST_SEQ),
        }
    };
    let all: Vec<_> = (0..flows).map(both).collect();
    lab.forwarder.run(|| d.install(&all)).expect("room");
    work(&lab, &d, &mut flood);
    d.remove().expect("what was pinned is removed");
}

#[test]
#[ignore = "root"]
fn packets_of_a_batch_find_their_entries_at_hand() {
    flooded(MANY, |lab, d, flood| {
        let run = flood.run(Duration::from_millis(100)).expect("flood");
        let found = found_ahead(d).expect("counter");
        assert!((run.sent * 3 / 4..run.sent).contains(&found), "all but the first of each batch: {found} of {run:?}");

        let v6 = Tuple { remote: CLIENT.port(Family::V6, PORT), local: FORWARDER_TO_CLIENT.port(Family::V6, PORT) };
        d.expect(&v6, None).expect("room");
        let [to, from] =
            [lab.forwarder.link(lab.client_device()), lab.client.link("c0")].map(|l| l.expect("device").mac);
        let packet = Packet { dmac: to, smac: from, ..Packet::new(v6.remote, v6.local) };
        flood.repeat(&packet.frame(), 1000).expect("live frames");
        let more = found_ahead(d).expect("counter") - found;
        assert!((750..1000).contains(&more), "{more} of 1000 IPv6 packets");
    });
}

#[test]
#[ignore = "root"]
fn among_few_flows_nothing_is_fetched() {
    flooded(100, |_, d, flood| {
        assert!(flood.run(Duration::from_millis(100)).expect("flood").arrived > 1000);
        assert_eq!(found_ahead(d).expect("counter"), 0);
    });
}
