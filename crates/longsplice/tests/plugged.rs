//! Plugs whose clients shake hands with the target (`handshake = "end-to-end"`), through the real program. Needs root and eBPF.

use crate::running::{AT_ONCE, Setting, eventually, listener, round_trip};
use longsplice_lab::{
    Family, Impair, LinkDirection, topology,
    traffic::{Script, connect, converse, intact, listen, serve},
};
use std::{
    io::{ErrorKind, Read},
    net::{SocketAddr, TcpStream},
};
use test_case::test_case;

const PORT: u16 = 7000;
const BYTES: u64 = 4_000_000;

/// A lab with a plug for each family.
fn setting() -> Setting {
    let denied = topology::CLIENT_SECOND.ip(Family::V4);
    let plug = |family| {
        let rules = format!("rules = [{{ action = \"deny\", client = \"{denied}\" }}]");
        let more = format!("target = \"{}\"\nhandshake = \"end-to-end\"\n{rules}\n{AT_ONCE}", target(family));
        listener("plug", &at(family).to_string(), &more)
    };
    Setting::new(&Family::BOTH.map(plug).concat())
}

fn at(family: Family) -> SocketAddr {
    topology::FORWARDER_TO_CLIENT.port(family, PORT)
}

fn target(family: Family) -> SocketAddr {
    topology::SERVER.port(family, PORT)
}

#[test]
#[ignore = "root"]
fn spliced_logged_and_under_the_rules() {
    let setting = setting();
    let lab = &setting.lab;
    let mut proxy = setting.start_with(&["--log-format", "json"]);
    for family in Family::BOTH {
        let answer = Script::answerer().bytes(BYTES).pace(BYTES);
        let serving = serve(lab.server.run(|| listen(target(family), &answer)).unwrap(), 1, answer);
        let opener = Script::opener(7).bytes(BYTES).pace(BYTES);
        let client = lab.client.spawn(move || converse(connect(at(family), &opener).unwrap(), &opener));
        let flow = proxy.wait_flow("spliced");
        let (client, served) = (client.join().unwrap(), serving.join().remove(0));
        intact(&client, &served).unwrap();
        assert_eq!((&flow["protocol"], &flow["target"]), (&"plug".into(), &target(family).to_string().into()));
        assert_eq!(flow["listen"], at(family).to_string());
        let line = proxy.wait_record(&[&client.local.unwrap().to_string()]);
        assert_eq!(
            (&line["target"], &line["listener"], &line["listen"], &line["id"]),
            (&target(family).to_string().into(), &"plug".into(), &at(family).to_string().into(), &flow["id"]),
            "{line}"
        );
        // what the client sends before the splice is copied
        assert!(line["spliced_up"].as_u64().unwrap() > BYTES * 9 / 10 && line["spliced_down"] == BYTES, "{line}");
    }
    let opened = proxy.counters();
    assert_eq!((&opened["proxy"]["relayed"], &opened["proxy"]["handshakes_left"]), (&2.into(), &0.into()), "{opened}");

    // nobody listens there any more
    let refused = lab.client.run(|| TcpStream::connect(at(Family::V4)));
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    eventually("a count", || (proxy.count("proxy", "unreachable") == 1).then_some(()));
    let (named, of) = (target(Family::V4), at(Family::V4));
    proxy.wait_message(&format!("the target {named} of plug-{of} is not reached by"));

    // As with any plug, the rules are for clients that are connected, and what they deny is logged.
    let second = Script { local: Some(topology::CLIENT_SECOND.port(Family::V4, 0)), ..Script::opener(1) };
    let denied = lab.client.run(|| connect(at(Family::V4), &second)).and_then(|mut c| c.read(&mut [0]));
    assert_eq!(denied.unwrap_err().kind(), ErrorKind::ConnectionReset);
    let after = proxy.counters();
    assert_eq!((&after["proxy"]["denied"], &after["proxy"]["handshakes_left"]), (&1.into(), &1.into()), "{after}");
    proxy.wait_line(&[&topology::CLIENT_SECOND.ip(Family::V4).to_string()]);
    proxy.shut_down();
}

/// A killed process leaves its spliced connections to the kernel. Nobody listens until the next process does.
#[test]
#[ignore = "root"]
fn connections_outlive_the_process() {
    let setting = setting();
    for family in Family::BOTH {
        setting.echo(target(family));
        let mut first = setting.start();
        let mut early = setting.connect(at(family));
        round_trip(&mut early, &[7; 100_000]);
        first.wait_flow("spliced");
        first.kill();
        round_trip(&mut early, &[8; 100_000]);
        let refused = setting.lab.client.run(|| TcpStream::connect(at(family)));
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::ConnectionRefused, "no socket listens");
        let mut second = setting.start();
        round_trip(&mut early, &[9; 100_000]);
        let mut late = setting.connect(at(family));
        round_trip(&mut late, &[7; 100_000]);
        assert_eq!(second.count("proxy", "handshakes_left"), 0);
        drop((early, late));
        second.shut_down();
    }
}

/// The process dies in the middle of a handshake, before or after the server
/// has answered: the client retries, and succeeds with the next process.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_handshake_outlives_the_process(family: Family) {
    for way in [LinkDirection::ToServer, LinkDirection::ToClient] {
        let setting = setting();
        setting.echo(target(family));
        let mut first = setting.start();
        let nothing_passes = setting.lab.impair(way, Impair { loss: 1.0, ..Impair::default() }).unwrap();
        // refused while there is no process
        let client =
            setting.lab.client.spawn(move || eventually("a connection", || TcpStream::connect(at(family)).ok()));
        eventually("a segment of the handshake", || (nothing_passes.counters().lost > 0).then_some(()));
        first.kill();
        let _second = setting.start();
        nothing_passes.change(Impair::default()).unwrap();
        eventually("a connection", || client.is_finished().then_some(()));
        round_trip(&mut client.join().unwrap(), &[7; 100_000]);
    }
}

/// Without raw sockets, the proxy answers its clients itself.
#[test]
#[ignore = "root"]
fn without_the_packet_path_the_proxy_answers() {
    let setting = setting();
    let mut proxy = setting.start_with(&["--copy-only"]);
    setting.echo(target(Family::V4));
    let mut client = setting.connect(at(Family::V4));
    round_trip(&mut client, &[7; 100_000]);
    drop(client);
    proxy.shut_down();
    assert!(proxy.messages().contains("the proxy answers its clients itself"), "{}", proxy.messages());
}
