//! Devices that appear, disappear, change, and are stacked.
use super::*;
use test_case::test_case;

/// Sets the lab's addresses of the link to the server; `device` is the forwarder's.
fn address_server_wire(lab: &Lab, device: &str) {
    ip(
        &lab.server,
        "addr replace 10.77.2.2/24 dev s0
        addr replace fd77:2::2/64 dev s0 nodad
        link set s0 up
        route replace default via 10.77.2.1
        route replace default via fd77:2::1",
    );
    ip(
        &lab.forwarder,
        &format!(
            "addr replace 10.77.2.1/24 dev {device}
            addr replace 10.77.2.11/24 dev {device}
            addr replace fd77:2::1/64 dev {device} nodad
            addr replace fd77:2::b/64 dev {device} nodad
            link set {device} up"
        ),
    );
}

#[test]
#[ignore = "root"]
fn a_device_is_made_again() {
    for_all(|lab, _, talk| {
        let before = talk.forwarder.splicer.datapath().expect("kernel path").attached();
        ip(&lab.forwarder, "link del f1");
        let server = lab.server.path();
        ip(&lab.forwarder, &format!("link add f1 type veth peer name s0 netns {}", server.display()));
        address_server_wire(lab, "f1");
        talk.goes_on();
        let after = talk.forwarder.splicer.datapath().expect("kernel path").attached();
        assert!(before != after && before.len() == after.len(), "{before:?} {after:?}");
        talk.end();
    });
}

/// Packets are delivered directly to the other end of a veth. That end is
/// recreated, then moved into this namespace, and made a port of a bridge.
#[test]
#[ignore = "root"]
fn the_other_end_of_a_veth_is_recreated_and_moved() {
    let one = |family| {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        let peer = vec!["f0".into(), "f1".into()];
        let talk =
            Talk::with(&lab, family, at_once(), 2, DatapathOptions { peer, ..DatapathOptions::default() }.into());
        let goes_on = |passes: bool, how: &str| {
            let before = sent_by(&lab, "f1");
            talk.goes_on();
            assert_eq!(sent_by(&lab, "f1") > before + 300_000, passes, "{family:?}: {how}");
        };
        goes_on(false, "straight to the server");
        lab.cut_server_wire().expect("deleted");
        lab.lay_server_wire().expect("created");
        talk.goes_on();
        goes_on(false, "straight to the server again");
        let (here, server) = (lab.forwarder.path(), lab.server.path());
        ip(&lab.server, &format!("link set s0 netns {}", here.display()));
        ip(
            &lab.forwarder,
            &format!(
                "link add bridge type bridge stp_state 0 forward_delay 0
                link add near type veth peer name s0 netns {}
                link set s0 master bridge up
                link set near master bridge up
                link set bridge up",
                server.display()
            ),
        );
        address_server_wire(&lab, "f1");
        talk.goes_on();
        goes_on(true, "by the device");
        talk.end();
    };
    thread::scope(|s| families().into_iter().for_each(|family| drop(s.spawn(move || one(family)))));
}

/// A configured device is the port of a bridge, so it is unknown where all of its packets emerge. The route leads over the bridge,
/// which is not configured. So the flows are spliced, but not for long.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn ports_that_are_named_are_not_guarded(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    ip(&lab.forwarder, "addr flush dev f1");
    ip(
        &lab.forwarder,
        "link add up0 type bridge stp_state 0 forward_delay 0
        link set f1 master up0",
    );
    address_server_wire(&lab, "up0");
    let devices = ["f0", "f1"].map(String::from).into();
    let options = DatapathOptions { devices, ..DatapathOptions::default() };
    let talk = Talk::open(&lab, family, at_once(), 2, options.into());
    talk.until("all were spliced", |t| t.once_spliced() == 2);
    talk.forwarder.command(Command::Unsplice);
    talk.until("they are taken back", |t| t.states(&[FlowState::Copying]) == 2);
    talk.goes_on();
    assert_eq!(talk.forwarder.verdict("unwatched"), 0);
    talk.end();
}

/// A socket that sent while its device was gone learns nothing about the
/// path until it sends new data: the kernel reports an MTU of 68 bytes.
#[test]
#[ignore = "root"]
fn a_flow_is_spliced_behind_a_device_that_was_made_again() {
    let one = |family| {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        let [proxy, server] = [FORWARDER_TO_CLIENT.port(family, 7000), SERVER.port(family, 7000)];
        let listener = lab.server.run(|| TcpListener::bind(server)).expect("listen");
        let forwarder = Forwarder::start(&lab, proxy, server, by_hand());
        let until = |what: &str, is: fn(&FlowStatus) -> bool| {
            let flows = || forwarder.splicer.flows();
            wait_for(PATIENCE, || flows().iter().all(is).then_some(()))
                .unwrap_or_else(|| panic!("{family:?}, {what}: {:?}", flows()));
        };
        let mut client = lab.client.run(|| TcpStream::connect(proxy)).expect("connect");
        let mut server = listener.accept().expect("accept").0;
        server.set_read_timeout(Some(PATIENCE)).expect("a limit");
        lab.cut_server_wire().expect("deleted");
        client.write_all(&[7; 10]).expect("sent");
        until("it is passed on", |f| f.bytes_up == 10);
        lab.lay_server_wire().expect("made");
        server.read_exact(&mut [0; 10]).expect("received");
        forwarder.command(Command::Splice);
        until("it is spliced", |f| f.state == FlowState::Spliced);
        let mut all = vec![0; 1_000_000];
        thread::scope(|s| {
            s.spawn(|| client.write_all(&vec![7; 1_000_000]).expect("sent"));
            server.read_exact(&mut all).expect("received");
        });
        assert!(all.iter().all(|byte| *byte == 7));
    };
    thread::scope(|s| families().into_iter().for_each(|family| drop(s.spawn(move || one(family)))));
}

/// The first packet on a device that comes up may belong to a flow. Attaching only then would let the kernel reset the flow.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn devices_are_attached_to_while_they_are_down(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    ip(&lab.forwarder, "link set f1 down");
    let forwarder = {
        let (proxy, server) = (FORWARDER_TO_CLIENT.port(family, 7001), SERVER.port(family, 7001));
        Forwarder::start(&lab, proxy, server, at_once())
    };
    let datapath = forwarder.splicer.datapath().expect("kernel path");
    let attached = |names: &[&str]| {
        let wanted: HashSet<u32> = lab.forwarder.run(|| names.iter().map(|name| index(name)).collect());
        let is_so = || datapath.attached().into_iter().collect::<HashSet<_>>() == wanted;
        assert!(wait_for(PATIENCE, || is_so().then_some(())).is_some(), "{names:?} are attached to, and no others");
    };
    attached(&["f0", "f1"]);
    lab.cut_server_wire().expect("deleted");
    attached(&["f0"]);
    ip(&lab.forwarder, "link add f1 type veth peer name f9");
    attached(&["f0", "f1", "f9"]);
    // packets of a macvlan also pass the device below it, but a macvlan that is down has none
    ip(&lab.forwarder, "link set f1 up\nlink set f9 up\nlink add up0 link f1 type macvlan mode bridge");
    attached(&["f0", "f1", "f9", "up0"]);
    ip(&lab.forwarder, "link set up0 up");
    attached(&["f0", "f9", "up0"]);
    drop(forwarder);
}

/// Packets of a macvlan also pass the device below it, and those of a bridge its ports. They are processed once.
#[test]
#[ignore = "root"]
fn stacked_devices_are_seen_once() {
    let macvlan = "link add up0 link f1 type macvlan mode bridge";
    let bridge = "link add up0 type bridge stp_state 0 forward_delay 0
        link set f1 master up0";
    for (family, upper) in [(Family::V4, macvlan), (Family::V6, macvlan), (Family::V4, bridge), (Family::V6, bridge)] {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        ip(&lab.forwarder, "addr flush dev f1");
        ip(&lab.forwarder, upper);
        address_server_wire(&lab, "up0");
        let named = ["f1", "up0"].map(String::from).to_vec();
        let refused = lab.forwarder.run(|| Datapath::open(&Options { devices: named, ..Options::default() }).map(drop));
        let why = refused.expect_err("each packet would be rewritten twice").to_string();
        assert!(why.contains("packets of up0 pass f1 as well"), "{why}");

        let talk = Talk::begin(&lab, family, at_once(), 2);
        for _ in 0..3 {
            talk.forwarder.command(Command::Unsplice);
            talk.until("they are taken back", |t| t.states(&[FlowState::Copying]) == 2);
            talk.goes_on();
            talk.forwarder.command(Command::Splice);
            talk.until("they are spliced", |t| t.states(&[FlowState::Spliced]) == 2);
        }
        talk.goes_on();
        talk.end();
    }
}

/// The other end of a veth stops accepting frames from XDP, without any notification.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn devices_that_take_no_more_frames_get_packets(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    for (host, device) in [(&lab.client, "c0"), (&lab.server, "s0")] {
        host.execute("ethtool", &["-K", device, "gro", "on", "tx", "off"]).expect("ethtool");
    }
    let options = DatapathOptions { xdp: vec!["f0".into(), "f1".into()], ..DatapathOptions::default() }.into();
    let talk = Talk::with(&lab, family, at_once(), 1, options);
    talk.until("XDP forwards", |t| t.forwarder.verdict("forwarded-early") > 100);
    for (host, device) in [(&lab.client, "c0"), (&lab.server, "s0")] {
        host.execute("ethtool", &["-K", device, "gro", "off"]).expect("ethtool");
    }
    talk.goes_on();
    talk.end();
}

#[test]
#[ignore = "root"]
fn other_devices_have_a_name_of_their_own() {
    for (family, named) in [(Family::V4, "f0"), (Family::V6, "f0"), (Family::V4, "f1"), (Family::V6, "f1")] {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        let server = SERVER.port(family, 7000);
        let answer = Script::answerer().bytes(1000).deadline(PATIENCE);
        let serving = lab.server.run(|| serve(listen(server, &answer).expect("listen"), 1, answer.clone()));
        let proxy = FORWARDER_TO_CLIENT.port(family, 7000);
        let options = DatapathOptions { devices: vec![named.into()], ..DatapathOptions::default() }.into();
        let forwarder = Forwarder::open(&lab, proxy, server, at_once(), options);
        let script = Script::opener(1).bytes(100_000).deadline(PATIENCE);
        let client = lab.client.run(|| converse(connect(proxy, &script).expect("connect"), &script));
        intact(&client, &serving.join()[0]).unwrap_or_else(|why| panic!("{why}"));
        assert_eq!(forwarder.ended(1)[0].refusal, Some(Refusal::Unattached), "{family:?}, {named}");
    }
}
