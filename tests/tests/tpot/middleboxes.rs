//! Machines on the path that do more than routing. They are played by nftables, on the forwarder between host and proxy.
//!
//! None of them can take the option out of an answer, which is in the tunnel: `other_answers_are_dropped` is about that.

use super::{BYTES, asker, everywhere, exchange};
use longsplice_lab::{
    Family, Lab, Namespace, Options, Shape,
    topology::{CLIENT, FORWARDER_TO_SECOND, SERVER},
};
use longsplice_tests::{Forwarder, at_once, families};
use std::net::IpAddr;
use test_case::test_case;

/// Opens two connections past a middlebox with these rules. `seen`: the server sees them from this address. `asked`: verdicts of
/// the host after each of them. Nothing gets into a tunnel.
fn past(rules: &str, seen: fn(Family) -> IpAddr, asked: [[(&str, u64); 2]; 2]) {
    for family in families() {
        let lab = Lab::new(Shape::TwoForwarders, Options { forwarding: true, ..Options::default() }).expect("lab");
        let asker = asker(&lab, family);
        let _proxy = Forwarder::taker(lab.second.as_ref().expect("a second"), everywhere(family), at_once(), false);
        lab.forwarder.execute("nft", &[rules]).expect("rules");
        for verdicts in asked {
            assert_eq!(exchange(&lab, family, BYTES).ip(), seen(family));
            assert_eq!(verdicts.map(|(name, _)| (name, asker.verdict(name))), verdicts, "{family:?}");
            assert_eq!(asker.verdict("opened"), 0);
        }
    }
}

#[test]
#[ignore = "root"]
fn the_option_is_taken_out_of_syns() {
    let rules = "table inet t { chain c { type filter hook forward priority 0; reset tcp option 253; }; }";
    let asked = |n| [("asked", n), ("not-asked", 0)];
    past(rules, |family| CLIENT.ip(family), [asked(1), asked(2)]);
}

#[test]
#[ignore = "root"]
fn syns_with_the_option_are_dropped() {
    let rules = "table inet t { chain c { type filter hook forward priority 0; tcp option 253 exists drop; }; }";
    past(rules, |family| CLIENT.ip(family), [[("asked", 2), ("avoided", 0)], [("asked", 2), ("avoided", 1)]]);
}

/// The proxy's answer goes to the middlebox, which knows no tunnel.
#[test]
#[ignore = "root"]
fn sources_are_translated() {
    let rules = "table inet t { chain c { type nat hook postrouting priority 100; oif f1 masquerade; }; }";
    past(
        rules,
        |family| FORWARDER_TO_SECOND.ip(family),
        [[("asked", 2), ("avoided", 0)], [("asked", 2), ("avoided", 1)]],
    );
}

/// Of equal paths, one has the proxy, and each packet takes any of them. Whoever answers the SYN, a connection stays with it.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn each_packet_takes_another_path(family: Family) {
    const CONNECTIONS: u64 = 16;
    let lab = Lab::new(Shape::OneArmed, Options { forwarding: true, ..Options::default() }).expect("lab");
    let asker = asker(&lab, family);
    let _proxy = Forwarder::taker(&lab.forwarder, everywhere(family), at_once(), false);
    let scatter = |host: &Namespace, device: &str, to: IpAddr| {
        let family = if to.is_ipv4() { "-4" } else { "-6" };
        let to = to.to_string();
        let ip = |rest: &[&str]| drop(host.execute("ip", &[&[family], rest].concat()).expect("done"));
        ip(&["route", "add", &to, "dev", device, "table", "100"]);
        ip(&["rule", "add", "fwmark", "1", "lookup", "100"]);
        let rules = "chain c { type route hook output priority 0; meta l4proto tcp mark set numgen random mod 2; }; ";
        host.execute("nft", &[&format!("table inet t {{ {rules}}}")]).expect("rules");
    };
    scatter(&lab.client, "c0", SERVER.ip(family));
    scatter(&lab.server, "s0", CLIENT.ip(family));
    let direct = (0..CONNECTIONS).filter(|_| exchange(&lab, family, 200_000).ip() == CLIENT.ip(family)).count() as u64;
    assert_eq!(asker.verdict("opened"), CONNECTIONS - direct);
    assert!((1..CONNECTIONS).contains(&direct), "{direct} of {CONNECTIONS} past the proxy");
}
