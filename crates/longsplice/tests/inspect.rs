//! What `longsplice inspect` says of flows, beside what was transferred. Needs root and eBPF, and fails without.

mod running;

use longsplice_lab::{Family, Lab, Shape, topology};
use running::{LONGSPLICE, Pins, Running, connect, echo, eventually, round_trip};
use serde_json::Value;
use std::{
    fs,
    io::{ErrorKind, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

/// Spliced by command, and never released.
const PARKED: u16 = 7000;
/// Spliced and released at once.
const RELEASED: u16 = 7001;

struct Scene {
    lab: Lab,
    proxy: Running,
    _pins: Pins,
    dir: tempfile::TempDir,
}

impl Scene {
    fn new() -> Scene {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let _pins = Pins::of(&lab.forwarder);
        let dir = tempfile::tempdir().unwrap();
        Scene { proxy: Scene::proxy(&lab, &dir), lab, _pins, dir }
    }

    fn proxy(lab: &Lab, dir: &tempfile::TempDir) -> Running {
        let file = dir.path().join("longsplice.toml");
        let mut text = String::new();
        for family in Family::BOTH {
            let policies = [
                (PARKED, "splice = 1000000000, release_after = \"never\""),
                (RELEASED, "splice = \"at-once\", release_after = 0.1"),
            ];
            for (port, policy) in policies {
                let (front, server) = (front(family, port), topology::SERVER.port(family, port));
                text += &format!("[[listener]]\nprotocol = \"plug\"\nlisten = \"{front}\"\ntarget = \"{server}\"\n");
                text += &format!("policy = {{ {policy}, path = \"any\" }}\n");
            }
        }
        fs::write(&file, text).unwrap();
        Running::start(lab.forwarder.command(LONGSPLICE), None, &["--config", file.to_str().unwrap()], &[])
    }

    /// A connection to the echo server behind a listener.
    fn connect(&self, family: Family, port: u16) -> TcpStream {
        echo(self.server(family, port));
        self.lab.client.run(|| connect(front(family, port)))
    }

    fn server(&self, family: Family, port: u16) -> TcpListener {
        self.lab.server.run(|| TcpListener::bind(topology::SERVER.port(family, port)).unwrap())
    }

    fn inspect(&self, id: &str) -> Value {
        serde_json::from_str(&self.proxy.client(&["inspect", id, "--json"])).unwrap()
    }

    /// The number of the flow of this client, once it is in this state.
    fn wait_state(&self, client: SocketAddr, state: &str) -> String {
        eventually(state, || {
            let flows: Value = serde_json::from_str(&self.proxy.client(&["ls", "--json"])).unwrap();
            let found = flows.as_array().unwrap().iter().find(|f| f["client"] == client.to_string().as_str())?;
            (found["state"] == state).then(|| found["id"].to_string())
        })
    }

    /// What is said of the flow once both hosts have acknowledged all.
    fn at_rest(&self, id: &str, pointer: &str) -> Value {
        eventually("all to be acknowledged", || {
            let flow = self.inspect(id);
            let all = ["client_leg", "server_leg"].map(|leg| flow.pointer(&format!("/{leg}/{pointer}")).cloned());
            (all == [Some(0.into()), Some(0.into())]).then_some(flow)
        })
    }
}

fn front(family: Family, port: u16) -> SocketAddr {
    topology::FORWARDER_TO_CLIENT.port(family, port)
}

/// A number in 32 bits.
fn word(of: &Value, key: &str) -> u32 {
    of[key].as_u64().and_then(|n| n.try_into().ok()).unwrap_or_else(|| panic!("{key}: {of}"))
}

fn has(flags: &Value, flag: &str) -> bool {
    flags.as_array().unwrap().contains(&flag.into())
}

/// Both legs have the same.
fn both(flow: &Value, key: &str) -> Value {
    assert_eq!(flow["client_leg"][key], flow["server_leg"][key], "{key}: {flow}");
    flow["client_leg"][key].clone()
}

/// An entry in forwarding mode, whose host has sent and received as many bytes as `bytes`; from the records' numbers.
fn is_forwarded(leg: &Value, other: &Value, bytes: u32) {
    let (path, back) = (&leg["path"], &other["path"]);
    assert!(has(&path["flags"], "spliced"), "{path}");
    assert_eq!(word(path, "sent"), word(path, "end").wrapping_add(word(path, "seq_add")));
    assert_eq!(word(path, "sent"), word(back, "max_ack"), "all is acknowledged");
    assert_eq!(word(path, "seq_add").wrapping_add(word(back, "ack_add")), 0);
    assert_eq!(word(path, "tsval_add").wrapping_add(word(back, "tsecr_add")), 0);
    assert_eq!((&path["from"], &path["to"]), (&other["local"], &other["remote"]));
    assert_eq!(leg["received"], bytes);
    assert_eq!(word(&path["via"], "mtu"), 1500);
    let window = [word(path, "window_least"), word(path, "window_most")];
    assert!(window[0] > 1000 && window[0] <= window[1] && window[1] <= 2 * window[0], "{window:?}");
    assert_eq!(path["seen_least_ms"], 0);
}

#[test]
fn needs_root_and_bpf_copied_and_spliced_flows_are_shown_with_their_numbers() {
    let scene = Scene::new();
    for family in Family::BOTH {
        let mut connection = scene.connect(family, PARKED);
        round_trip(&mut connection, &[7; 5000]);
        let id = scene.wait_state(connection.local_addr().unwrap(), "copying");
        let flow = scene.at_rest(&id, "record/unacked_out");
        assert_eq!(
            (&flow["state"], &flow["protocol"], &flow["splices"]),
            (&"copying".into(), &"plug".into(), &0.into())
        );
        assert_eq!((both(&flow, "phase_in"), both(&flow, "phase_out")), ("local".into(), "local".into()));
        let devices = [scene.lab.client_device(), scene.lab.server_device()];
        for (key, device) in ["client_leg", "server_leg"].into_iter().zip(devices) {
            let (leg, r) = (&flow[key], &flow[key]["record"]);
            assert_eq!(leg["received"], 5000, "{leg}");
            assert_eq!(word(r, "max_in").wrapping_sub(word(r, "irs")), 5001);
            assert_eq!(word(r, "max_out").wrapping_sub(word(r, "iss")), 5001);
            assert_eq!((word(r, "max_out"), word(r, "max_in")), (word(r, "ack_in"), word(r, "ack_out")));
            assert!(has(&r["flags"], "tracked") && has(&r["flags"], "ts") && r["is_stale"] == false, "{r}");
            let mss = if family == Family::V4 { 1460 } else { 1440 };
            assert_eq!((word(r, "mss_in"), word(r, "mss_out"), word(r, "shim_out")), (mss, mss, 0));
            assert!(word(r, "room_out") > 1000 && word(r, "room_in") > 1000, "{r}");
            assert_eq!(r["hop"]["device"], device);
            assert_eq!((&leg["path"]["via"], &leg["path"]["to"]), (&Value::Null, &Value::Null), "it leads nowhere yet");
            let socket = &leg["socket"];
            assert_eq!(
                (&socket["state"], &socket["is_held"], &socket["unacked"]),
                (&"established".into(), &true.into(), &0.into())
            );
            assert!(word(&socket["info"], "rtt_us") > 0 && word(&socket["info"], "snd_wnd") > 1000, "{socket}");
        }
        scene.proxy.client(&["splice", &id]);
        scene.wait_state(connection.local_addr().unwrap(), "spliced");
        round_trip(&mut connection, &[8; 7000]);
        let flow = scene.at_rest(&id, "path/unacked");
        assert_eq!(
            (&flow["state"], &flow["splices"], &flow["bytes_up"]),
            (&"spliced".into(), &1.into(), &12000.into())
        );
        assert_eq!((both(&flow, "phase_in"), both(&flow, "phase_out")), ("forwarding".into(), "forwarding".into()));
        let legs = [&flow["client_leg"], &flow["server_leg"]];
        for (leg, other) in [(legs[0], legs[1]), (legs[1], legs[0])] {
            is_forwarded(leg, other, 12000);
            let (r, p) = (&leg["record"], &leg["path"]);
            assert_eq!(word(p, "end").wrapping_sub(word(r, "irs")), 12001);
            assert_eq!(word(p, "max_ack").wrapping_sub(word(r, "iss")), 12001);
            assert!(r["is_stale"] == true && has(&r["flags"], "spliced"), "{r}");
            assert_eq!(p["via"]["dmac"], other["record"]["hop"]["dmac"]);
            assert_eq!((&leg["socket"]["state"], &leg["socket"]["is_held"]), (&"established".into(), &true.into()));
        }
        assert_eq!(legs[0]["path"]["via"]["device"], scene.lab.server_device());
        let report = scene.proxy.client(&["inspect", &id]);
        for (key, number) in [("end", &legs[0]["path"]["end"]), ("seq_add", &legs[1]["path"]["seq_add"])] {
            assert!(report.contains(&format!("      {key:<12} {number:>10}  ")), "{key} {number}: {report}");
        }
        assert!(report.contains("spliced") && report.contains("forwarding: the data path"), "{report}");
        assert!(report.lines().all(|l| l.trim_end() == l && l.chars().count() <= 130), "{report}");
    }
    assert!(scene.proxy.client_error(&["inspect", "999"]).contains("there is no flow 999"));
}

#[test]
fn needs_root_and_bpf_flows_without_sockets_are_shown_and_those_of_an_earlier_process() {
    let mut scene = Scene::new();
    for family in Family::BOTH {
        let mut connection = scene.connect(family, RELEASED);
        round_trip(&mut connection, &[7; 5000]);
        let client = connection.local_addr().unwrap();
        let id = scene.wait_state(client, "released");
        round_trip(&mut connection, &[8; 7000]);
        let shown = |flow: &Value| {
            assert_eq!((both(flow, "phase_in"), both(flow, "phase_out")), ("forwarding".into(), "forwarding".into()));
            assert_eq!((both(flow, "record"), both(flow, "socket")), (Value::Null, Value::Null));
            let legs = [&flow["client_leg"], &flow["server_leg"]];
            legs.map(|leg| ["end", "max_ack", "seq_add", "to"].map(|key| leg["path"][key].clone()))
        };
        let flow = scene.at_rest(&id, "path/unacked");
        let before = shown(&flow);
        is_forwarded(&flow["client_leg"], &flow["server_leg"], 12000);
        is_forwarded(&flow["server_leg"], &flow["client_leg"], 12000);
        let report = scene.proxy.client(&["inspect", &id]);
        assert!(report.contains("none: not tracked, or released"), "{report}");
        scene.proxy.kill();
        scene.proxy = Scene::proxy(&scene.lab, &scene.dir);
        let id = scene.wait_state(client, "released");
        let flow = scene.inspect(&id);
        assert_eq!((&flow["protocol"], &flow["splices"]), (&"recovered".into(), &Value::Null));
        assert_eq!(shown(&flow), before, "nothing has moved");
        assert!(scene.proxy.client(&["inspect", &id]).contains("of an earlier process"));
    }
}

/// Which host a connection waits for.
#[test]
fn needs_root_and_bpf_a_server_that_does_not_read_is_seen_by_its_window() {
    let scene = Scene::new();
    let server = scene.server(Family::V4, PARKED);
    let mut connection = scene.lab.client.run(|| connect(front(Family::V4, PARKED)));
    connection.write_all(&[7; 5000]).unwrap();
    let held = server.accept().unwrap();
    let client = connection.local_addr().unwrap();
    let id = scene.wait_state(client, "copying");
    scene.proxy.client(&["splice", &id]);
    scene.wait_state(client, "spliced");
    connection.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let full = (0..100_000).find_map(|_| connection.write_all(&[7; 4096]).err()).expect("nobody reads it");
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    let flow = eventually("a window that is closed", || {
        let flow = scene.inspect(&id);
        (flow["server_leg"]["path"]["window_most"] == 0).then_some(flow)
    });
    println!("{}", scene.proxy.client(&["inspect", &id]));
    assert_eq!(flow["client_leg"]["path"]["unacked"], 0, "{flow}");
    drop(held);
}
