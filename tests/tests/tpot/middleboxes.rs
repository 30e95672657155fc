//! Machines on the path that do more than routing. They are played by nftables, on the forwarder between host and proxy.
//!
//! None of them can take the option out of an answer, which is in the tunnel: `other_answers_are_dropped` is about that.

use super::{BYTES, PATIENCE, PORT, asker, everywhere, exchange, wire::pass};
use longsplice_engine::{EndReason, Policy};
use longsplice_lab::{
    Family, Lab, Options, Shape,
    process::wait_for,
    topology::{CLIENT, FORWARDER_TO_SECOND, SERVER},
    traffic::{Report, Script, connect, converse, intact, listen, serve},
};
use longsplice_tests::{Forwarder, at_once, by_hand, families};
use socket2::SockRef;
use std::{
    io::{Read, Write},
    net::IpAddr,
    time::Duration,
};
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

/// Of two paths between client and server, one has the proxy. `to_server`, `to_client`: a rule of nftables that marks the packets
/// with 1 that take the other one.
fn two_paths(lab: &Lab, family: Family, to_server: &str, to_client: &str) {
    let ways = [(&lab.client, "c0", SERVER, to_server), (&lab.server, "s0", CLIENT, to_client)];
    for (host, device, to, chosen) in ways {
        let (to, word) = (to.ip(family).to_string(), if family == Family::V4 { "-4" } else { "-6" });
        let ip = |rest: &[&str]| drop(host.execute("ip", &[&[word], rest].concat()).expect("done"));
        ip(&["route", "add", &to, "dev", device, "table", "100"]);
        ip(&["rule", "add", "fwmark", "1", "lookup", "100"]);
        let rules = format!("chain c {{ type route hook output priority 0; {chosen}; }}; ");
        host.execute("nft", &[&format!("table inet t {{ {rules}}}")]).expect("rules");
    }
}

/// Time limit of a connection whose packets are lost again and again: Linux repeats a SYN for longer.
const LATE: Duration = Duration::from_secs(120);
const EACH_ANOTHER: &str = "meta l4proto tcp mark set numgen random mod 2";

/// Of equal paths, one has the proxy, and each packet takes any of them. Whoever answers the SYN, a connection stays with it.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn each_packet_takes_another_path(family: Family) {
    const CONNECTIONS: u64 = 16;
    let lab = Lab::new(Shape::OneArmed, Options { forwarding: true, ..Options::default() }).expect("lab");
    let asker = asker(&lab, family);
    let _proxy = Forwarder::taker(&lab.forwarder, everywhere(family), at_once(), false);
    two_paths(&lab, family, EACH_ANOTHER, EACH_ANOTHER);
    let direct = (0..CONNECTIONS).filter(|_| exchange(&lab, family, 200_000).ip() == CLIENT.ip(family)).count() as u64;
    assert_eq!(asker.verdict("opened"), CONNECTIONS - direct);
    assert!((1..CONNECTIONS).contains(&direct), "{direct} of {CONNECTIONS} past the proxy");
}

/// Half of the answers are lost as well. So SYNs are sent again, and for many, proxy and server answer in the same moment: both
/// repeat their answers a second later. Each connection is with one of them, and the other one's is over.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn both_answer_at_once(family: Family) {
    const CONNECTIONS: usize = 32;
    const BYTES: u64 = 100_000;
    let lab = Lab::new(Shape::OneArmed, Options { forwarding: true, ..Options::default() }).expect("lab");
    let asker = asker(&lab, family);
    let proxy = Forwarder::taker(&lab.forwarder, everywhere(family), at_once(), false);
    two_paths(&lab, family, EACH_ANOTHER, EACH_ANOTHER);
    let segment = lab.segment.as_ref().expect("a bridge");
    let both = 0x12; // SYN and ACK
    let tunnelled = match family {
        Family::V4 => format!("ip protocol ipip @nh,{},8 & {both} == {both}", 8 * (20 + 20 + 13)),
        Family::V6 => format!("ip6 nexthdr ipv6 @nh,{},8 & {both} == {both}", 8 * (40 + 40 + 13)),
    };
    for (name, port, answers) in [("p", "pf", tunnelled), ("s", "ps", "tcp flags & (syn | ack) == (syn | ack)".into())]
    {
        let chain = format!("type filter hook ingress device {port} priority 0; {answers} numgen random mod 2 0 drop;");
        segment.execute("nft", &[&format!("table netdev {name} {{ chain c {{ {chain} }}; }}")]).expect("a rule");
    }
    let (at, answer) = (SERVER.port(family, PORT), Script::answerer().bytes(BYTES).deadline(LATE));
    let mut all = 0;
    // in some rounds, no SYN has two answers
    for round in 1.. {
        let serving = lab.server.run(|| serve(listen(at, &answer).expect("listen"), CONNECTIONS, answer.clone()));
        let clients: Vec<_> = (0..CONNECTIONS)
            .map(|n| {
                let script = Script::opener((round * CONNECTIONS + n) as u64).bytes(BYTES).deadline(LATE);
                lab.client.spawn(move || connect(at, &script).map(|stream| converse(stream, &script)))
            })
            .collect();
        let clients: Vec<Report> =
            clients.into_iter().map(|c| c.join().expect("no panic").expect("connected")).collect();
        let servers = serving.stop();
        for client in &clients {
            let server = servers.iter().find(|server| server.seed == client.seed);
            intact(client, server.unwrap_or_else(|| panic!("no server for {client}"))).expect("intact");
        }
        all += CONNECTIONS;
        if asker.verdict("second-answer") > 0 {
            break;
        }
        assert!(round < 5, "{:?}", asker.verdicts());
    }
    wait_for(PATIENCE, || proxy.splicer.flows().is_empty().then_some(())).expect("all flows end");
    let ended = proxy.ended(1);
    assert!(ended.len() < all && ended.len() as u64 <= asker.verdict("opened"), "{ended:?}");
    assert!(
        ended.iter().all(|e| (&e.how, e.bytes_up, e.bytes_down) == (&EndReason::Closed, BYTES, BYTES)),
        "{ended:?}"
    );
}

/// A client's port has been that of a connection through the proxy. In the next connection, it is the server that answers; all
/// packets but the SYN pass the proxy, and are not for it.
#[test_case(Family::V4, at_once, false; "spliced_v4")]
#[test_case(Family::V6, at_once, false; "spliced_v6")]
#[test_case(Family::V4, by_hand, false; "copied_v4")]
#[test_case(Family::V6, by_hand, false; "copied_v6")]
#[test_case(Family::V4, by_hand, true; "aborted_v4")]
#[test_case(Family::V6, by_hand, true; "aborted_v6")]
#[ignore = "root"]
fn a_port_again_past_the_proxy(family: Family, policy: fn() -> Policy, aborts: bool) {
    let lab = Lab::new(Shape::OneArmed, Options { forwarding: true, ..Options::default() }).expect("lab");
    let asker = asker(&lab, family);
    let proxy = Forwarder::taker(&lab.forwarder, everywhere(family), policy(), false);
    let script = Script { local: Some(CLIENT.port(family, 4000)), ..Script::opener(1).deadline(PATIENCE) };
    let at = SERVER.port(family, PORT);
    let listener = lab.server.run(|| listen(at, &Script::answerer())).expect("listen");
    for direct in [false, true] {
        // the port is in use until the last connection is over at the client's host
        let client = wait_for(PATIENCE, || lab.client.run(|| connect(at, &script)).ok()).expect("connected");
        let (server, from) = listener.accept().expect("accept");
        assert_eq!(from.ip() == CLIENT.ip(family), direct, "{from}");
        pass(&client, &server);
        pass(&server, &client);
        if aborts && !direct {
            // the reset is behind data that nobody has acknowledged yet
            SockRef::from(&client).set_linger(Some(Duration::ZERO)).expect("an option");
            (&client).write_all(&[1; 100]).expect("sent");
            drop((client, server));
        } else {
            // the server ends it, so that the client's host need not remember it
            drop(server);
            assert_eq!((&client).read(&mut [0]).expect("the end"), 0);
            drop(client);
        }
        if !direct {
            proxy.ended(1);
            two_paths(&lab, family, "tcp flags & (syn | ack) == syn mark set 1", "accept");
        }
    }
    assert_eq!((asker.verdict("opened"), proxy.ended(1).len()), (1, 1));
}
