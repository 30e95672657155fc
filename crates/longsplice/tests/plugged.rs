//! Plugs whose clients shake hands with the target (`handshake = "end-to-end"`), through the real program. Needs root and eBPF.

use crate::running::{self, LONGSPLICE, Pins, Running, echo, eventually, round_trip};
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection, Shape, topology,
    traffic::{Script, connect, converse, intact, listen, serve},
};
use serde_json::Value;
use std::{
    fs,
    io::{ErrorKind, Read},
    net::{SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
};

const PORT: u16 = 7000;
const BYTES: u64 = 4_000_000;

/// A lab with a plug for each family, and the configuration of the plugs.
struct Plugged {
    lab: Lab,
    file: PathBuf,
    _pins: Pins,
    _dir: tempfile::TempDir,
}

impl Plugged {
    fn new(policy: &str) -> Plugged {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let pins = Pins::of(&lab.forwarder);
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("longsplice.toml");
        let plug = |family| {
            format!(
                "[[listener]]\nprotocol = \"plug\"\nlisten = \"{}\"\ntarget = \"{}\"\nhandshake = \"end-to-end\"\n\
                 rules = [{{ action = \"deny\", client = \"{}\" }}]\npolicy = {{ splice = \"{policy}\" }}\n",
                at(family),
                target(family),
                topology::CLIENT_SECOND.ip(Family::V4)
            )
        };
        fs::write(&file, Family::BOTH.map(plug).concat()).unwrap();
        Plugged { lab, file, _pins: pins, _dir: dir }
    }

    fn start(&self) -> Running {
        let arguments = ["--config", self.file.to_str().unwrap(), "--log-format", "json"];
        Running::start(self.lab.forwarder.command(LONGSPLICE), None, &arguments, &[])
    }
}

fn at(family: Family) -> SocketAddr {
    topology::FORWARDER_TO_CLIENT.port(family, PORT)
}

fn target(family: Family) -> SocketAddr {
    topology::SERVER.port(family, PORT)
}

fn counters(proxy: &Running) -> Value {
    serde_json::from_str(&proxy.client(&["counters", "--json"])).unwrap()
}

#[test]
#[ignore = "root"]
fn spliced_logged_and_under_the_rules() {
    let plugged = Plugged::new("at-once");
    let lab = &plugged.lab;
    let mut proxy = plugged.start();
    for family in Family::BOTH {
        let answer = Script::answerer().bytes(BYTES).pace(BYTES);
        let serving = serve(lab.server.run(|| listen(target(family), &answer)).unwrap(), 1, answer);
        let opener = Script::opener(7).bytes(BYTES).pace(BYTES);
        let client = lab.client.spawn(move || converse(connect(at(family), &opener).unwrap(), &opener));
        let flow: Value = eventually("spliced", || {
            let flows: Value = serde_json::from_str(&proxy.client(&["ls", "--json"])).unwrap();
            (flows[0]["state"] == "spliced").then(|| flows[0].clone())
        });
        let (client, served) = (client.join().unwrap(), serving.join().remove(0));
        intact(&client, &served).unwrap();
        assert_eq!((&flow["protocol"], &flow["target"]), (&"plug".into(), &target(family).to_string().into()));
        assert_eq!(flow["listen"], at(family).to_string());
        let line: Value = eventually("a line of the access log", || {
            let log = fs::read_to_string(proxy.access_log()).unwrap();
            let line = log.lines().find(|l| l.contains(&client.local.unwrap().to_string()))?;
            serde_json::from_str(line).ok()
        });
        assert_eq!(
            (&line["target"], &line["listener"], &line["listen"], &line["id"]),
            (&target(family).to_string().into(), &"plug".into(), &at(family).to_string().into(), &flow["id"]),
            "{line}"
        );
        // what the client sends before the splice is copied
        assert!(line["spliced_up"].as_u64().unwrap() > BYTES * 9 / 10 && line["spliced_down"] == BYTES, "{line}");
    }
    let opened = counters(&proxy);
    assert_eq!((&opened["proxy"]["relayed"], &opened["proxy"]["handshakes_left"]), (&2.into(), &0.into()), "{opened}");

    // nobody listens there any more
    let refused = lab.client.run(|| TcpStream::connect(at(Family::V4)));
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    eventually("a count", || (counters(&proxy)["proxy"]["unreachable"] == 1).then_some(()));
    proxy.wait_message(&format!("the target {} of a plug is not reached by", target(Family::V4)));

    // As with any plug, the rules are for clients that are connected, and what they deny is logged.
    let second = Script { local: Some(topology::CLIENT_SECOND.port(Family::V4, 0)), ..Script::opener(1) };
    let denied = lab.client.run(|| connect(at(Family::V4), &second)).and_then(|mut c| c.read(&mut [0]));
    assert_eq!(denied.unwrap_err().kind(), ErrorKind::ConnectionReset);
    let after = counters(&proxy);
    assert_eq!((&after["proxy"]["denied"], &after["proxy"]["handshakes_left"]), (&1.into(), &1.into()), "{after}");
    eventually("a line of the access log", || {
        let log = fs::read_to_string(proxy.access_log()).unwrap();
        log.contains(&topology::CLIENT_SECOND.ip(Family::V4).to_string()).then_some(())
    });
    proxy.client(&["stop"]);
    assert!(proxy.wait().success());
}

/// A killed process leaves its spliced connections to the kernel. Nobody listens until the next process does.
#[test]
#[ignore = "root"]
fn connections_outlive_the_process() {
    let plugged = Plugged::new("at-once");
    for family in Family::BOTH {
        plugged.lab.server.run(|| echo(TcpListener::bind(target(family)).unwrap()));
        let mut first = plugged.start();
        let connect = || plugged.lab.client.run(|| running::connect(at(family)));
        let mut early = connect();
        round_trip(&mut early, &[7; 100_000]);
        eventually("spliced", || first.client(&["ls"]).contains("spliced").then_some(()));
        first.kill();
        round_trip(&mut early, &[8; 100_000]);
        let refused = plugged.lab.client.run(|| TcpStream::connect(at(family)));
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::ConnectionRefused, "no socket listens");
        let mut second = plugged.start();
        round_trip(&mut early, &[9; 100_000]);
        let mut late = connect();
        round_trip(&mut late, &[7; 100_000]);
        assert_eq!(counters(&second)["proxy"]["handshakes_left"], 0);
        drop((early, late));
        second.client(&["stop"]);
        assert!(second.wait().success());
    }
}

/// The process dies in the middle of a handshake, before or after the server
/// has answered: the client retries, and succeeds with the next process.
#[test]
#[ignore = "root"]
fn a_handshake_outlives_the_process() {
    for (family, way) in
        Family::BOTH.into_iter().flat_map(|f| [(f, LinkDirection::ToServer), (f, LinkDirection::ToClient)])
    {
        let plugged = Plugged::new("at-once");
        let lab = &plugged.lab;
        lab.server.run(|| echo(TcpListener::bind(target(family)).unwrap()));
        let mut first = plugged.start();
        let nothing_passes = lab.impair(way, Impair { loss: 1.0, ..Impair::default() }).unwrap();
        // refused while there is no process
        let client = lab.client.spawn(move || eventually("a connection", || TcpStream::connect(at(family)).ok()));
        eventually("a segment of the handshake", || (nothing_passes.counters().lost > 0).then_some(()));
        first.kill();
        let _second = plugged.start();
        nothing_passes.change(Impair::default()).unwrap();
        eventually("a connection", || client.is_finished().then_some(()));
        round_trip(&mut client.join().unwrap(), &[7; 100_000]);
    }
}

/// Without raw sockets, the proxy answers its clients itself.
#[test]
#[ignore = "root"]
fn without_the_packet_path_the_proxy_answers() {
    let plugged = Plugged::new("at-once");
    let arguments = ["--copy-only", "--config", plugged.file.to_str().unwrap()];
    let mut proxy = Running::start(plugged.lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
    plugged.lab.server.run(|| echo(TcpListener::bind(target(Family::V4)).unwrap()));
    let mut client = plugged.lab.client.run(|| running::connect(at(Family::V4)));
    round_trip(&mut client, &[7; 100_000]);
    drop(client);
    proxy.client(&["stop"]);
    assert!(proxy.wait().success());
    assert!(proxy.messages().contains("the proxy answers its clients itself"), "{}", proxy.messages());
}
