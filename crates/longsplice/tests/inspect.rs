//! The output of `longsplice inspect` and `longsplice trace`, compared
//! with what was transferred. Needs root and eBPF, and fails without.

use crate::running::{LONGSPLICE, Pins, Running, connect, echo, eventually, round_trip};
use longsplice_lab::{Family, Lab, Shape, topology};
use serde_json::Value;
use std::{
    fs,
    io::{ErrorKind, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Child, Command},
    thread,
    time::Duration,
};

/// Port of a listener whose flows are spliced by command, and never released.
const PARKED: u16 = 7000;
/// Port of a listener whose flows are spliced and released at once.
const RELEASED: u16 = 7001;
/// Port of a listener whose flows are never spliced.
const COPIED: u16 = 7002;

struct Scene {
    lab: Lab,
    proxy: Running,
    pins: Pins,
    dir: tempfile::TempDir,
}

impl Scene {
    fn new() -> Scene {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let pins = Pins::of(&lab.forwarder);
        let dir = tempfile::tempdir().unwrap();
        Scene { proxy: Scene::proxy(&lab, &dir), lab, pins, dir }
    }

    fn proxy(lab: &Lab, dir: &tempfile::TempDir) -> Running {
        let file = dir.path().join("longsplice.toml");
        let mut text = String::new();
        for family in Family::BOTH {
            let policies = [
                (PARKED, "splice = 1000000000, release_after = \"never\""),
                (RELEASED, "splice = \"at-once\", release_after = 0.1"),
                (COPIED, "splice = \"never\""),
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

    /// Connects to the echo server behind a listener.
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

    /// Waits until the flow of this client is in this state. Returns its ID.
    fn wait_state(&self, client: SocketAddr, state: &str) -> String {
        eventually(state, || {
            let found = self.proxy.flows().into_iter().find(|f| f["client"] == client.to_string().as_str())?;
            (found["state"] == state).then(|| found["id"].to_string())
        })
    }

    /// The details of the flow once both hosts have acknowledged everything.
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

/// A 32-bit number.
fn word(of: &Value, key: &str) -> u32 {
    of[key].as_u64().and_then(|n| n.try_into().ok()).unwrap_or_else(|| panic!("{key}: {of}"))
}

fn has(flags: &Value, flag: &str) -> bool {
    flags.as_array().is_some_and(|flags| flags.contains(&flag.into()))
}

/// Returns a value that must be the same on both legs.
fn both(flow: &Value, key: &str) -> Value {
    assert_eq!(flow["client_leg"][key], flow["server_leg"][key], "{key}: {flow}");
    flow["client_leg"][key].clone()
}

/// Checks the numbers of an entry in forwarding mode, whose host has sent and received `bytes` bytes.
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
#[ignore = "root"]
fn copied_and_spliced_flows_are_shown_with_their_numbers() {
    let scene = Scene::new();
    for family in Family::BOTH {
        let mut connection = scene.connect(family, PARKED);
        round_trip(&mut connection, &[7; 5000]);
        let id = scene.wait_state(connection.local_addr().unwrap(), "copying");
        let flow = scene.at_rest(&id, "socket/unacked");
        assert_eq!(
            (&flow["state"], &flow["protocol"], &flow["splices"]),
            (&"copying".into(), &"plug".into(), &0.into())
        );
        assert_eq!((both(&flow, "record"), both(&flow, "path")), (Value::Null, Value::Null), "no splice was due");
        drop(Tracer::of(&scene, &id, &[])); // the data path has to know it for that
        let flow = scene.at_rest(&id, "record/unacked_out");
        assert_eq!((&flow["state"], &flow["splices"]), (&"copying".into(), &0.into()));
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
        for (key, number) in [("end", word(&legs[0]["path"], "end")), ("seq_add", word(&legs[1]["path"], "seq_add"))] {
            assert!(report.contains(&format!("      {key:<12} {number:>10}  ")), "{key} {number}: {report}");
        }
        assert!(report.contains("spliced") && report.contains("forwarding: the data path"), "{report}");
        assert!(report.lines().all(|l| l.trim_end() == l && l.chars().count() <= 130), "{report}");
    }
    assert!(scene.proxy.client_error(&["inspect", "999"]).contains("there is no flow 999"));
}

#[test]
#[ignore = "root"]
fn flows_without_sockets_are_shown_and_those_of_an_earlier_process() {
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
        assert_eq!((&flow["processes"], &flow["splices"]), (&2.into(), &1.into()));
        let report = scene.proxy.client(&["inspect", &id]);
        assert!(report.contains("  processes        2, with this one\n"), "{report}");
        assert_eq!(shown(&flow), before, "nothing has moved");
    }
}

/// Shows which host a connection is waiting for.
#[test]
#[ignore = "root"]
fn a_server_that_does_not_read_is_seen_by_its_window() {
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

/// A `longsplice trace` that writes to a file. Killed on drop.
struct Tracer {
    child: Child,
    file: tempfile::NamedTempFile,
}

impl Tracer {
    /// Starts a trace of a flow. The flow's entries are marked when this returns.
    fn of(scene: &Scene, id: &str, more: &[&str]) -> Tracer {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut trace = Command::new(LONGSPLICE);
        trace.args(["trace", id, "--json", "--control"]).arg(scene.proxy.control()).args(more);
        let tracer = Tracer { child: trace.stdout(file.reopen().unwrap()).spawn().unwrap(), file };
        scene.wait_traced(id, true);
        tracer
    }

    fn segments(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.file.path()).unwrap();
        text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
    }

    /// Waits until the trace has ended by itself. Returns its output.
    fn wait(&mut self) -> Vec<Value> {
        let status = eventually("the end of a trace", || self.child.try_wait().unwrap());
        assert!(status.success());
        self.segments()
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Scene {
    fn wait_traced(&self, id: &str, traced: bool) {
        eventually("both entries to be marked, or not", || {
            let flow = self.inspect(id);
            let is = |leg: &str| has(&flow[leg]["path"]["flags"], "trace") == traced;
            (is("client_leg") && is("server_leg")).then_some(())
        });
    }

    /// A copied flow that has transferred 5000 bytes each way.
    fn copied(&self, family: Family) -> (TcpStream, String) {
        let mut connection = self.connect(family, PARKED);
        round_trip(&mut connection, &[7; 5000]);
        let id = self.wait_state(connection.local_addr().unwrap(), "copying");
        (connection, id)
    }
}

fn is_verdict(segment: &Value, verdict: &str) -> bool {
    segment["verdicts"] == Value::from(vec![verdict])
}

/// The numbers of a segment except for its window, which has a different scale on the way out.
fn numbers(of: &Value) -> (u32, u32, u32, &Value) {
    (word(of, "seq"), word(of, "ack"), word(of, "len"), &of["flags"])
}

#[test]
#[ignore = "root"]
fn a_trace_shows_segments_as_they_came_and_as_they_left() {
    let scene = Scene::new();
    for family in Family::BOTH {
        let (mut connection, id) = scene.copied(family);
        scene.proxy.client(&["splice", &id]);
        scene.wait_state(connection.local_addr().unwrap(), "spliced");
        let flow = scene.at_rest(&id, "path/unacked");
        let mut tracer = Tracer::of(&scene, &id, &["--count", "40", "--seconds", "25"]);
        assert!(scene.proxy.client_error(&["trace", &id]).contains("another flow is being traced"));
        for n in 0..20 {
            round_trip(&mut connection, &[n; 1000]);
        }
        let segments = tracer.wait();
        assert_eq!(segments.len(), 40);
        for (leg, key) in [("client", "client_leg"), ("server", "server_leg")] {
            let path = &flow[key]["path"];
            let mut next = word(path, "end");
            let of_leg = segments.iter().filter(|s| s["leg"] == leg);
            for s in of_leg.clone() {
                let (seq, ack, len, flags) = numbers(&s["came"]);
                let there =
                    (seq.wrapping_add(word(path, "seq_add")), ack.wrapping_add(word(path, "ack_add")), len, flags);
                assert!(is_verdict(s, "forwarded") && s["from"] == "host" && s["to_socket"].is_null(), "{s}");
                assert_eq!(numbers(&s["to_host"]), there, "{s}");
                // A delayed acknowledgement is sent from another processor, and may pass after the data written next.
                let late = next.wrapping_sub(seq);
                assert!(late == 0 || (len == 0 && late <= 1000), "in order: {s}, not {next}");
                next = next.wrapping_add(len);
            }
            assert!(of_leg.filter(|s| s["came"]["len"] == 1000).count() > 5, "{segments:?}");
        }
        scene.wait_traced(&id, false);
        let shown = thread::scope(|s| {
            let trace = s.spawn(|| scene.proxy.client(&["trace", &id, "--count", "6"]));
            scene.wait_traced(&id, true);
            (0..6).for_each(|n| round_trip(&mut connection, &[n; 100]));
            trace.join().unwrap()
        });
        let lines: Vec<_> = shown.lines().collect();
        assert!(lines.len() == 7 && lines[1].starts_with("  0.000000  client  host "), "{shown}");
        // at full speed: some segments may be missing, but none is delayed
        let mut tracer = Tracer::of(&scene, &id, &["--seconds", "3"]);
        (0..50).for_each(|n| round_trip(&mut connection, &[n; 100_000]));
        assert!(tracer.wait().len() > 100);
        assert!(lines[1..].iter().all(|l| l.ends_with("forwarded") && l.len() <= 130), "{shown}");
    }
    assert!(scene.proxy.client_error(&["trace", "999"]).contains("there is no flow 999"));
}

#[test]
#[ignore = "root"]
fn a_trace_goes_on_across_a_splice_and_ends_with_its_flow() {
    let scene = Scene::new();
    let (mut connection, id) = scene.copied(Family::V4);
    let mut tracer = Tracer::of(&scene, &id, &["--seconds", "25"]);
    round_trip(&mut connection, &[8; 1000]);
    scene.proxy.client(&["splice", &id]);
    scene.wait_state(connection.local_addr().unwrap(), "spliced");
    round_trip(&mut connection, &[9; 1001]);
    scene.at_rest(&id, "path/unacked"); // otherwise the next segment would be for both
    scene.proxy.client(&["unsplice", &id]);
    scene.wait_state(connection.local_addr().unwrap(), "copying");
    round_trip(&mut connection, &[9; 1002]);
    drop(connection);
    let segments = tracer.wait();
    let found = |leg: &str, from: &str, len: u32, verdict: &str| {
        let is = |s: &&Value| s["leg"] == leg && s["from"] == from && s["came"]["len"] == len && is_verdict(s, verdict);
        segments.iter().find(is).unwrap_or_else(|| panic!("{leg} {from} {len} {verdict}: {segments:#?}"))
    };
    for leg in ["client", "server"] {
        // before the first splice the socket's numbers are those on the wire
        let (up, down) = (found(leg, "host", 1000, "local"), found(leg, "socket", 1000, "local-out"));
        assert_eq!((&up["came"], &up["to_host"]), (&up["to_socket"], &Value::Null));
        assert_eq!((&down["came"], &down["to_socket"]), (&down["to_host"], &Value::Null));
        assert!(found(leg, "host", 1001, "forwarded")["to_host"].is_object());
        let (up, down) = (found(leg, "host", 1002, "local"), found(leg, "socket", 1002, "local-out"));
        for (came, left) in [(&up["came"], &up["to_socket"]), (&down["came"], &down["to_host"])] {
            assert_ne!((&came["seq"], &came["ack"]), (&left["seq"], &left["ack"]), "1001 bytes went past the socket");
        }
    }
}

/// A killed client cleans nothing up.
#[test]
#[ignore = "root"]
fn a_trace_that_nobody_reads_ends_by_itself() {
    let mut scene = Scene::new();
    let (mut connection, id) = scene.copied(Family::V4);
    scene.proxy.client(&["splice", &id]);
    let client = connection.local_addr().unwrap();
    scene.wait_state(client, "spliced");
    drop(Tracer::of(&scene, &id, &[]));
    scene.wait_traced(&id, false);
    let tracer = Tracer::of(&scene, &id, &[]);
    scene.proxy.kill();
    drop(tracer);
    scene.proxy = Scene::proxy(&scene.lab, &scene.dir);
    let id = scene.wait_state(client, "released");
    eventually("the end of a trace", || {
        round_trip(&mut connection, &[7; 1000]);
        let flow = scene.inspect(&id);
        let is = |leg: &str| has(&flow[leg]["path"]["flags"], "trace");
        (!is("client_leg") && !is("server_leg")).then_some(())
    });
    let mut tracer = Tracer::of(&scene, &id, &["--count", "4"]);
    round_trip(&mut connection, &[7; 1000]);
    round_trip(&mut connection, &[7; 1000]);
    assert_eq!(tracer.wait().len(), 4);
    let _tracer = Tracer::of(&scene, &id, &[]);
    scene.proxy.client(&["stop"]);
    assert!(scene.proxy.wait().success() && !scene.pins.exist(), "a trace keeps no program from ending");
}

#[test]
#[ignore = "root"]
fn a_flow_that_is_only_copied_has_sockets_and_nothing_else() {
    let scene = Scene::new();
    let mut connection = scene.connect(Family::V6, COPIED);
    round_trip(&mut connection, &[7; 5000]);
    let id = scene.wait_state(connection.local_addr().unwrap(), "copying");
    let flow = scene.inspect(&id);
    assert_eq!((both(&flow, "record"), both(&flow, "path"), both(&flow, "phase_in")), Default::default());
    assert_eq!((&flow["refusal"], &flow["server_leg"]["socket"]["state"]), (&"policy".into(), &"established".into()));
    assert!(scene.proxy.client(&["inspect", &id]).contains("not tracked by the data path"));
    assert!(scene.proxy.client_error(&["trace", &id]).contains(&format!("flow {id} is only copied")));
}
