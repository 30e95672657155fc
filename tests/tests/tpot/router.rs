//! A farm of proxies behind a router: which SYNs go to which member, and whole connections.

use super::{
    PORT, asker,
    capture::Capture,
    dial, everywhere, exchange,
    hand::{MSS, SYN_ACK, link},
    packets::{option, packet},
    serve,
};
use longsplice_datapath::{Destinations, TPOT_EXID, TpotRouter, TpotRouterOptions, tpot_tunnels};
use longsplice_lab::{
    Family, Lab, Options, Shape,
    topology::{
        CLIENT, FORWARDER_TO_FARM, FORWARDER_TO_SERVER, FORWARDER_TO_SERVER_SECOND, MEMBERS, SERVER, SERVER_SECOND,
    },
    traffic::{Script, converse, intact},
};
use longsplice_tests::{
    Forwarder, at_once, families,
    forge::Nobody,
    packet::{Packet, flag},
};
use std::{
    collections::HashSet,
    io::ErrorKind,
    net::{IpAddr, SocketAddr, TcpStream},
};
use test_case::test_case;

const BYTES: u64 = 1_000_000;

fn lab() -> Lab {
    Lab::new(Shape::Farm, Options { forwarding: true, ..Options::default() }).expect("lab")
}

fn options(family: Family) -> TpotRouterOptions {
    TpotRouterOptions {
        farm: "farm".into(),
        members: MEMBERS.map(|member| member.ip(family)).to_vec(),
        to: vec![Destinations { net: SERVER.ip(family), prefix: 255, ports: PORT..=PORT }],
        devices: Vec::new(),
        exid: TPOT_EXID,
        pin: None,
    }
}

/// Routes to members with these weights.
fn route(lab: &Lab, family: Family, weights: [u8; 2]) -> TpotRouter {
    route_with(lab, family, weights, options(family))
}

fn route_with(lab: &Lab, family: Family, weights: [u8; 2], options: TpotRouterOptions) -> TpotRouter {
    let router = lab.forwarder.run(|| TpotRouter::open(options)).expect("root, kernel 6.6, bpffs");
    router.set_weights(&weights).expect("weights");
    meet(lab, family);
    router
}

/// Lets the router learn the members' link addresses, as by checks.
fn meet(lab: &Lab, family: Family) {
    for member in MEMBERS {
        let refused = lab.forwarder.run(|| TcpStream::connect(member.port(family, 9))).expect_err("nobody listens");
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    }
}

fn verdict(router: &TpotRouter, name: &str) -> u64 {
    router.verdicts().expect("counters").iter().find(|v| v.0 == name).expect("a verdict").1
}

/// A farm whose members have no proxies, but are routers, and a host that does not exist.
struct Farm {
    family: Family,
    router: TpotRouter,
    capture: Capture,
    nobody: Nobody,
    macs: [[u8; 6]; 2],
    lab: Lab,
}

impl Farm {
    fn new(family: Family) -> Farm {
        Farm::with(family, options(family))
    }

    fn with(family: Family, options: TpotRouterOptions) -> Farm {
        let lab = lab();
        let router = route_with(&lab, family, [100, 100], options);
        let macs = [0, 1].map(|i| link(&lab.members[i], "m0").addr().expect("an Ethernet address"));
        let (capture, nobody) = (Capture::start(&lab.forwarder), Nobody::new(&lab, family));
        Farm { family, router, capture, nobody, macs, lab }
    }

    fn syn(&self, port: u16, seq: u32) -> Packet {
        let options = [MSS.to_vec(), option(8)].concat();
        let packet = packet(self.nobody.address(port), SERVER.port(self.family, PORT));
        Packet { seq, flags: flag::SYN, options, ..packet }
    }

    /// Sends a packet, which is routed to the server untouched.
    fn is_routed(&mut self, p: &Packet) {
        self.nobody.sends(p);
        let routed = self.capture.wait("it is routed", |s| s.is("f1", true) && s.p.from == p.from);
        let want = Packet { ttl: 63, dmac: routed.p.dmac, smac: routed.p.smac, ..p.clone() };
        assert_eq!((routed.outer, routed.p), (None, want));
        assert_eq!(self.capture.count(|s| s.is("farm", true) && s.p.from == p.from), 0);
    }

    /// Sends a SYN. Returns the index of the member that gets it, with one hop less and otherwise unchanged.
    fn member(&mut self, syn: &Packet) -> usize {
        let to_farm = |s: &super::capture::Seen| s.is("farm", true) && (s.p.from, s.p.seq) == (syn.from, syn.seq);
        let before = self.capture.count(to_farm);
        self.nobody.sends(syn);
        let sent = self.capture.wait_nth("it goes to the farm", before, to_farm).p;
        let want = Packet { ttl: 63, dmac: sent.dmac, smac: sent.smac, ..syn.clone() };
        assert_eq!(sent, want);
        let member = self.macs.iter().position(|mac| *mac == sent.dmac);
        member.unwrap_or_else(|| panic!("{:?} is no member's: {:?}", sent.dmac, self.macs))
    }
}

fn each(test: impl Fn(Farm)) {
    families().into_iter().for_each(|family| test(Farm::new(family)));
}

#[test]
#[ignore = "root"]
fn only_chosen_syns_go_to_the_farm() {
    each(|mut farm| {
        let asks = farm.syn(4000, 1);
        let with = |options: Vec<u8>| Packet { options, ..asks.clone() };
        let mut version = asks.options.clone();
        version[8] = 2;
        let others = [
            with(MSS.to_vec()),
            with(version),
            with([MSS.to_vec(), option(0)].concat()),
            Packet { to: SERVER.port(farm.family, PORT + 1), ..asks.clone() },
            Packet { to: SERVER_SECOND.port(farm.family, PORT), ..asks.clone() },
            Packet { flags: SYN_ACK, ack: 1, ..asks.clone() },
            Packet { flags: flag::ACK, ack: 1, ..asks.clone() },
            Packet { payload: b"data".to_vec(), options: Vec::new(), flags: flag::ACK, ..asks.clone() },
            // a member's own, which has gone round a loop of routes
            Packet { from: MEMBERS[0].port(farm.family, 6000), ..asks.clone() },
        ];
        for (port, p) in (5000..).zip(&others) {
            let from = if p.from == asks.from { farm.nobody.address(port) } else { p.from };
            farm.is_routed(&Packet { from, ..p.clone() });
        }
        // to the router itself, and to a member
        let to_router = Packet {
            from: CLIENT.port(farm.family, 4000),
            to: FORWARDER_TO_SERVER.port(farm.family, PORT),
            ..asks.clone()
        };
        farm.nobody.sends(&to_router);
        farm.capture.wait("its stack refuses that", |s| s.is("f0", true) && s.p.from == to_router.to);
        // of a member
        let of_member = Packet { from: MEMBERS[1].port(farm.family, 6001), ..asks.clone() };
        Nobody::at(&farm.lab.members[1], farm.family).sends(&of_member);
        farm.capture.wait("it is routed", |s| s.is("f1", true) && s.p.from == of_member.from);
        assert_eq!(
            ["chosen", "unasked", "left", "no-return", "returned"].map(|v| verdict(&farm.router, v)),
            [0, 2, 3, 1, 1]
        );
        farm.member(&asks);
        assert_eq!(verdict(&farm.router, "chosen"), 1);
    });
}

#[test]
#[ignore = "root"]
fn a_rule_for_one_family_is_not_about_the_other() {
    for (family, everywhere) in [(Family::V4, IpAddr::from([0; 16])), (Family::V6, IpAddr::from([0; 4]))] {
        let to = |net| Destinations { net, prefix: 0, ports: PORT..=PORT };
        let mut farm = Farm::with(family, TpotRouterOptions { to: vec![to(everywhere)], ..options(family) });
        farm.is_routed(&farm.syn(4000, 1));
        assert_eq!(["chosen", "left"].map(|v| verdict(&farm.router, v)), [0, 1]);
    }
}

#[test]
#[ignore = "root"]
fn a_repeated_syn_goes_to_the_same_member() {
    each(|mut farm| {
        let mut chosen = HashSet::new();
        for seq in 0..20 {
            let syn = farm.syn(4000, seq);
            let member = farm.member(&syn);
            assert_eq!([(); 3].map(|()| farm.member(&syn)), [member; 3]);
            chosen.insert(member);
        }
        assert_eq!(chosen.len(), 2, "other numbers, other members");
    });
}

#[test]
#[ignore = "root"]
fn members_share_by_weight_and_one_that_is_down_gets_none() {
    const SYNS: u16 = 200;
    each(|mut farm| {
        let all = |farm: &mut Farm| -> Vec<usize> { (0..SYNS).map(|n| farm.member(&farm.syn(4000 + n, 1))).collect() };
        let ones = |all: &[usize]| all.iter().sum::<usize>();
        let before = all(&mut farm);
        assert!((50..150).contains(&ones(&before)), "{before:?}");
        farm.router.set_weights(&[100, 10]).expect("weights");
        let lighter = all(&mut farm);
        assert!((1..50).contains(&ones(&lighter)), "{lighter:?}");
        assert!(
            before.iter().zip(&lighter).all(|(before, after)| before >= after),
            "only SYNs of the lighter one move"
        );
        farm.router.set_weights(&[100, 0]).expect("weights");
        assert_eq!(all(&mut farm), [0; SYNS as usize]);
        farm.router.set_weights(&[100, 100]).expect("weights");
        assert_eq!(all(&mut farm), before);
        let members = farm.router.members().expect("counters");
        assert_eq!(members.iter().map(|m| m.syns).sum::<u64>(), 4 * u64::from(SYNS), "{members:?}");
        farm.router.set_weights(&[0, 0]).expect("weights");
        farm.is_routed(&farm.syn(3000, 1));
        assert_eq!(verdict(&farm.router, "no-member"), 1);
    });
}

/// A member routes what it does not want, as without a proxy or at its limit.
#[test]
#[ignore = "root"]
fn a_syn_that_a_member_sends_back_is_routed() {
    each(|mut farm| {
        let syn = farm.syn(4000, 1);
        farm.member(&syn);
        let routed = farm.capture.wait("it is routed", |s| s.is("f1", true) && s.p.from == syn.from).p;
        assert_eq!(routed, Packet { ttl: 61, dmac: routed.dmac, smac: routed.smac, ..syn.clone() });
        for (device, out) in [("f0", false), ("farm", true), ("farm", false), ("f1", true)] {
            assert_eq!(farm.capture.count(|s| s.is(device, out) && s.p.from == syn.from), 1, "{}", farm.capture.last());
        }
        assert_eq!(["chosen", "returned"].map(|v| verdict(&farm.router, v)), [1, 1]);
        let asker = asker(&farm.lab, farm.family);
        let from = exchange(&farm.lab, farm.family, BYTES);
        assert_eq!(from.ip(), CLIENT.ip(farm.family), "the server sees the client itself");
        assert_eq!([asker.verdict("asked"), asker.verdict("not-asked"), asker.verdict("opened")], [1, 0, 0]);
        assert_eq!(["chosen", "returned"].map(|v| verdict(&farm.router, v)), [2, 2]);
    });
}

/// Proxies at both members, a router, and a host that asks.
fn proxies(family: Family) -> (Lab, [Forwarder; 2]) {
    let lab = lab();
    let takers = [0, 1].map(|i| Forwarder::taker(&lab.members[i], everywhere(family), at_once(), false));
    (lab, takers)
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn connections_through_members(family: Family) {
    const CONNECTIONS: usize = 8;
    let (lab, _takers) = proxies(family);
    let router = route(&lab, family, [100, 100]);
    let asker = asker(&lab, family);
    let seen: Vec<_> = (0..CONNECTIONS).map(|_| exchange(&lab, family, BYTES).ip()).collect();
    let of = |peers: &[IpAddr]| MEMBERS.map(|m| peers.iter().filter(|peer| **peer == m.ip(family)).count());
    let peers: Vec<_> = lab.client.run(tpot_tunnels).expect("tunnels").iter().map(|(_, tunnel)| tunnel.peer).collect();
    assert_eq!(of(&seen).iter().sum::<usize>(), CONNECTIONS, "the server sees members: {seen:?}");
    assert_eq!(of(&seen), of(&peers), "a member answers with its own address: {peers:?}");
    let members = router.members().expect("counters");
    assert_eq!(members.iter().map(|m| m.syns as usize).collect::<Vec<_>>(), of(&seen), "{members:?}");
    let verdicts = ["opened", "asked", "not-asked", "plain-refused", "failed"].map(|v| asker.verdict(v));
    assert_eq!(verdicts, [CONNECTIONS as u64, CONNECTIONS as u64, 0, 0, 0]);
}

/// The router holds no connection. Without its program, new ones are routed.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn connections_do_not_need_the_program(family: Family) {
    let (lab, _takers) = proxies(family);
    let router = route(&lab, family, [100, 100]);
    let _asker = asker(&lab, family);
    let serving = serve(&lab, family, &Script::answerer().bytes(BYTES).pace(1_000_000));
    let script = Script::opener(1).bytes(BYTES).pace(1_000_000);
    let stream = dial(&lab, family, &script);
    let client = std::thread::spawn(move || converse(stream, &script));
    drop(router);
    let (client, (from, server)) = (client.join().expect("client"), serving.join().expect("server"));
    intact(&client, &server).expect("intact");
    assert!(MEMBERS.iter().any(|m| m.ip(family) == from.ip()), "{from}");
    assert_eq!(exchange(&lab, family, BYTES).ip(), CLIENT.ip(family));
}

/// The router's firewall decides about SYNs as without a farm, and those that it translates are routed: the member's answer would
/// come to the router.
#[test]
#[ignore = "root"]
fn firewalls_and_translation_of_the_router() {
    each(|mut farm| {
        let nft = |rules: &str| farm.lab.forwarder.execute("nft", &[rules]).expect("rules");
        let denied = farm.syn(4000, 1);
        nft("table inet t { chain c { type filter hook forward priority 0; tcp sport 4000 drop; }; }");
        nft("table inet n { chain c { type nat hook postrouting priority 100; oif f1 masquerade; }; }");
        farm.nobody.sends(&denied);
        let asker = asker(&farm.lab, farm.family);
        let from = exchange(&farm.lab, farm.family, BYTES);
        let own = [FORWARDER_TO_SERVER, FORWARDER_TO_SERVER_SECOND].map(|a| a.ip(farm.family));
        assert!(own.contains(&from.ip()), "{from}");
        assert_eq!([asker.verdict("asked"), asker.verdict("not-asked")], [1, 0]);
        assert_eq!(["chosen", "no-return"].map(|v| verdict(&farm.router, v)), [0, 1]);
        assert_eq!(farm.capture.count(|s| s.is("farm", true) || s.is("f1", true) && s.p.from == denied.from), 0);
    });
}

/// The farm's device, and one of the others, are made anew.
#[test]
#[ignore = "root"]
fn devices_are_followed() {
    let family = Family::V4;
    let farm = Farm::new(family);
    let Farm { router, lab, .. } = &farm;
    lab.cut_server_wire().expect("a wire");
    lab.lay_server_wire().expect("a wire");
    lab.forwarder.run(|| router.follow()).expect("followed");
    exchange_through(lab, family, router, 1);
    let own = FORWARDER_TO_FARM.v4;
    lab.forwarder.ip("link del farm\n").expect("removed");
    lab.forwarder.run(|| router.follow()).expect("followed");
    exchange_through(lab, family, router, 1);
    let again = format!("link add farm type bridge forward_delay 0\naddr add {own}/24 dev farm\nlink set farm up\n");
    lab.forwarder.ip(&(again + "link set p0 master farm up\nlink set p1 master farm up\n")).expect("a bridge");
    meet(lab, family);
    exchange_through(lab, family, router, 1); // routed, as long as the new device is not known
    lab.forwarder.run(|| router.follow()).expect("followed");
    exchange_through(lab, family, router, 2);
}

fn exchange_through(lab: &Lab, family: Family, router: &TpotRouter, chosen: u64) {
    let _asker = asker(lab, family);
    exchange(lab, family, 1000);
    assert_eq!(verdict(router, "chosen"), chosen);
}

#[test]
#[ignore = "root"]
fn farms_that_cannot_be() {
    let lab = lab();
    let right = options(Family::V4);
    let [one, other] = [right.members[0], right.members[1]];
    let with = |members: Vec<IpAddr>| TpotRouterOptions { members, ..right.clone() };
    let many = (0..65).map(|host| IpAddr::from([10, 77, 4, 10 + host])).collect();
    let far = SocketAddr::from(([10, 77, 5, 2], 0)).ip();
    for (wrong, said) in [
        (TpotRouterOptions { farm: "farn".into(), ..right.clone() }, "device farn: not found"),
        (TpotRouterOptions { farm: "p0".into(), ..right.clone() }, "p0 is a port: name farm"),
        (TpotRouterOptions { devices: vec!["f9".into()], ..right.clone() }, "device f9: not found"),
        (TpotRouterOptions { devices: vec!["f1".into(), "farm".into()], ..right.clone() }, "leave it out"),
        (
            TpotRouterOptions { devices: vec!["f1".into(), "p1".into()], ..right.clone() },
            "packets of farm pass p1 as well",
        ),
        (TpotRouterOptions { to: vec![right.to[0].clone(); 65], ..right.clone() }, "65 rules"),
        (with(many), "65 members"),
        (with(vec![one, other, one]), "10.77.4.2 is named twice"),
        (with(vec![one, far]), "10.77.5.2 is in no network of farm"),
        (with(vec![one, SERVER.v4.into()]), "10.77.2.2 is in no network of farm"),
        (with(vec![FORWARDER_TO_FARM.v4.into()]), "10.77.4.1 is an address of this machine"),
        (with(vec!["fe80::2".parse().expect("an address")]), "fe80::2 is a link-local address"),
        (with(vec!["fd77:5::2".parse().expect("an address")]), "fd77:5::2 is in no network of farm"),
    ] {
        let error = lab.forwarder.run(|| TpotRouter::open(wrong).map(drop)).expect_err(said).to_string();
        assert!(error.contains(said), "{error}");
    }
    let router = route(&lab, Family::V4, [1, 1]);
    let second = lab.forwarder.run(|| TpotRouter::open(right.clone()).map(drop)).expect_err("one is enough");
    assert!(second.to_string().contains("another process"), "{second}");
    drop(router);
    route(&lab, Family::V4, [1, 1]);
}
