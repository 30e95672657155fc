//! Devices that hand over packets which were on no wire (docs/forwarding.md, Offloads): transfers over veth devices with each of the
//! offloads that change a packet's form. Hosts must not notice, whether a flow has sockets or none.
use longsplice_datapath::testing;
use longsplice_engine::{FlowState, Policy};
use longsplice_lab::{
    ChildGuard, Family, Lab, Namespace, Options, Shape,
    process::wait_for,
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::{Chunks, Script, connect, converse, intact, listen, serve},
};
use longsplice_tests::{Forwarder, at_once};
use std::{fs, net::SocketAddr, thread, time::Duration};

const PATIENCE: Duration = Duration::from_secs(60);
const PORT: u16 = 7000;
/// Bytes in each direction, and bytes per second: a released flow still has most of them to go.
const BYTES: u64 = 12_000_000;
const PACE: u64 = 6_000_000;
/// Writes that leave as many segments at once.
const BURST: usize = 400_000;
/// Segments that hosts may send again: far less than one of each joined packet, and more than a busy machine causes.
const AGAIN: u64 = 1000;

/// The families of client and server.
const FAMILIES: [(Family, Family); 4] =
    [(Family::V4, Family::V4), (Family::V6, Family::V6), (Family::V4, Family::V6), (Family::V6, Family::V4)];

/// A namespace's name of its device, of all that the lab has.
fn devices(lab: &Lab) -> [(&Namespace, &'static str); 4] {
    [(&lab.client, "c0"), (&lab.forwarder, "f0"), (&lab.forwarder, "f1"), (&lab.server, "s0")]
}

fn execute(host: &Namespace, command: &str) {
    let words: Vec<_> = command.split(' ').collect();
    host.execute(words[0], &words[1..]).unwrap_or_else(|e| panic!("{command}: {e}"));
}

/// Segments that a host's kernel has sent again.
fn sent_again(host: &Namespace) -> u64 {
    let table = host.run(|| fs::read_to_string("/proc/thread-self/net/snmp").expect("counters"));
    let mut rows = table.lines().filter_map(|l| l.strip_prefix("Tcp: ")).map(|l| l.split(' '));
    let (names, numbers) = (rows.next().expect("names"), rows.next().expect("numbers"));
    let found = names.zip(numbers).find(|(name, _)| *name == "RetransSegs").expect("the counter");
    found.1.parse().expect("a number")
}

/// Client's family and server's address of each pair of families, which have ports from `first` on.
fn pairs(first: u16) -> Vec<(Family, SocketAddr)> {
    FAMILIES.iter().zip(first..).map(|((client, server), port)| (*client, SERVER.port(*server, port))).collect()
}

/// Moves data both ways at once, through flows between these that are spliced at once, and released if there is such a state.
fn transfers(lab: &Lab, forwarder: &Forwarder, between: &[(Family, SocketAddr)], policy: &Policy, state: FlowState) {
    let name = || format!("{between:?}, {state:?}");
    let before = sent_again(&lab.client) + sent_again(&lab.server);
    let over = forwarder.ended(0).len();
    let script = |s: Script| s.bytes(BYTES).pace(PACE).chunks(Chunks::Fixed(BURST)).deadline(PATIENCE);
    let talks: Vec<_> = between
        .iter()
        .map(|(client, server)| {
            let (answer, proxy) = (script(Script::answerer()), FORWARDER_TO_CLIENT.port(*client, server.port()));
            let serving = lab.server.run(|| serve(listen(*server, &answer).expect("listen"), 1, answer.clone()));
            forwarder.relay(proxy, *server, policy.clone());
            let script = script(Script::opener(7));
            let talk = lab.client.spawn(move || converse(connect(proxy, &script).expect("connect"), &script));
            (talk, serving)
        })
        .collect();
    for (_, server) in between {
        let is = || forwarder.splicer.flows().iter().any(|flow| flow.server == *server && flow.state == state);
        wait_for(PATIENCE, || is().then_some(()))
            .unwrap_or_else(|| panic!("{server}: {}: {:?}", name(), forwarder.splicer.flows()));
    }
    for (talk, serving) in talks {
        let here = talk.join().expect("the client");
        intact(&here, &serving.join()[0]).unwrap_or_else(|e| panic!("{}: {e} {:?}", name(), forwarder.verdicts()));
    }
    for ended in &forwarder.ended(over + between.len())[over..] {
        assert_eq!(ended.refusal, None, "{}: {ended:?}", name());
        assert!(ended.spliced_up + ended.spliced_down > BYTES, "{}: {ended:?}", name());
    }
    let again = sent_again(&lab.client) + sent_again(&lab.server) - before;
    assert!(again < AGAIN, "{}: {again} segments were sent again, {:?}", name(), forwarder.verdicts());
    assert_eq!((forwarder.verdict("fragment"), forwarder.verdict("rewrite-failed")), (0, 0), "{}", name());
}

/// Flows without sockets, and flows with sockets. `between`: the pairs, with ports from the given one on.
fn both(lab: &Lab, between: impl Fn(u16) -> Vec<(Family, SocketAddr)>) {
    let released = Policy { release_after: Some(Duration::ZERO), ..at_once() };
    let parked = Policy { release_after: None, ..at_once() };
    let forwarder = Forwarder::idle(lab);
    for (port, policy, state) in [(PORT, released, FlowState::Released), (PORT + 10, parked, FlowState::Spliced)] {
        transfers(lab, &forwarder, &between(port), &policy, state);
    }
}

/// Runs transfers between all families at once, with these settings of the forwarder's devices (`ethtool -K`).
fn with(large_packets: bool, settings: &str) {
    let lab = Lab::new(Shape::TwoDevices, Options { large_packets, ..Options::default() }).expect("lab");
    for device in ["f0", "f1"] {
        execute(&lab.forwarder, &format!("ethtool -K {device} {settings}"));
    }
    both(&lab, pairs);
}

/// Single segments arrive, and leave one by one. Between, they are joined in lists, if there is no socket.
#[test]
#[ignore = "root"]
fn lists_of_segments() {
    with(false, "gro on rx-gro-list on tx-gso-list off");
}

/// The same, but the lists leave whole, for a device that takes them.
#[test]
#[ignore = "root"]
fn lists_of_segments_for_a_device_that_takes_them() {
    with(false, "gro on rx-gro-list on tx on gso on tx-gso-list on");
}

/// Packets of more than 64 KB, which carry a header for it in IPv6, before Linux 7.0.
#[test]
#[ignore = "root"]
fn big_tcp() {
    const SIZE: u32 = 196_608;
    let test = |(client, server)| {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        for (host, device) in devices(&lab) {
            host.run(|| testing::set_largest(device, SIZE)).expect("as large as that");
        }
        // the test is about nothing if no packet is that large
        let large = ["f0", "f1"].map(|device| {
            let mut command = lab.forwarder.command("tcpdump");
            command.args(["-i", device, "-Q", "out", "-n", "-c", "1", "greater 66000"]);
            let mut large = ChildGuard::spawn(&mut command).expect("tcpdump");
            large.wait_output("listening on", PATIENCE).expect("tcpdump is ready");
            large
        });
        both(&lab, |port| vec![(client, SERVER.port(server, port))]);
        for mut one in large {
            let seen = wait_for(PATIENCE, || (!one.is_running()).then_some(()));
            assert!(seen.is_some(), "{client:?} to {server:?}: no packet of BIG TCP: {}", one.output());
        }
    };
    // each pair by itself: the captures do not tell them apart
    thread::scope(|s| FAMILIES.map(|pair| s.spawn(move || test(pair))).map(drop));
}

/// Joined by GRO alone; and not even checksums are left to devices.
#[test]
#[ignore = "root"]
fn one_kind_of_offload_alone() {
    for (name, large_packets, settings) in [
        ("GRO", false, "gro on"),
        ("checksums of senders left out", false, "tx on"),
        ("no checksum is verified for us", true, "rx off gro off"),
        ("no segmentation on departure", true, "tso off gso off"),
        ("segments of one fixed identification", false, "gro on tx on tx-tcp-mangleid-segmentation on"),
    ] {
        println!("{name}");
        with(large_packets, settings);
    }
}

/// Super-packets that leave in a tunnel, and come out of one: the server is at the other end of a VXLAN.
#[test]
#[ignore = "root"]
fn segmentation_in_a_tunnel() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    for (host, device, own, other) in [(&lab.forwarder, "f1", 1, 2), (&lab.server, "s0", 2, 1)] {
        let to = format!("local 10.77.2.{own} remote 10.77.2.{other} dstport 4789");
        execute(host, &format!("ip link add x0 type vxlan id 7 dev {device} {to}"));
        execute(host, &format!("ip addr add 10.88.0.{own}/24 dev x0"));
        execute(host, "ip link set x0 up");
    }
    let policy = Policy { release_after: Some(Duration::ZERO), ..at_once() };
    let between = Family::BOTH.into_iter().zip(PORT..).map(|(client, port)| (client, ([10, 88, 0, 2], port).into()));
    transfers(&lab, &Forwarder::idle(&lab), &between.collect::<Vec<_>>(), &policy, FlowState::Released);
}
