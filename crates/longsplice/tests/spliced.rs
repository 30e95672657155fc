//! The program with its kernel path: every test needs root and eBPF, and fails without.

use crate::running::{LONGSPLICE, Pins, Running, connect, echo, longsplice, round_trip};
use longsplice_lab::{
    Family, Lab, Options, Shape, topology,
    traffic::{Script, connect as traffic_connect, converse, intact, listen, serve},
};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    fs,
    net::{SocketAddr, TcpListener, TcpStream},
};

const PORT: u16 = 7000;

/// A client, a forwarder with a proxy that splices at once, and an echo server.
struct Scene {
    proxy: Running,
    pins: Pins,
    lab: Lab,
}

impl Scene {
    fn new(more: &[&str]) -> Scene {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let server = topology::SERVER.port(Family::V4, PORT);
        echo(lab.server.run(|| TcpListener::bind(server)).unwrap());
        Scene { proxy: Scene::proxy(&lab, more), pins: Pins::of(&lab.forwarder), lab }
    }

    fn proxy(lab: &Lab, more: &[&str]) -> Running {
        let plug = format!("{}={}", Scene::address(), topology::SERVER.port(Family::V4, PORT));
        Running::start(lab.forwarder.command(LONGSPLICE), None, &["--plug", &plug, "--splice", "at-once"], more)
    }

    fn address() -> SocketAddr {
        topology::FORWARDER_TO_CLIENT.port(Family::V4, PORT)
    }

    fn connect(&self) -> TcpStream {
        self.lab.client.run(|| connect(Scene::address()))
    }

    /// The client closes, the flow ends normally, the proxy is stopped, and nothing is left.
    fn end(&mut self, connection: TcpStream) {
        drop(connection);
        self.proxy.stop(&self.pins);
    }
}

#[test]
#[ignore = "root"]
fn a_spliced_flow_is_listed_counted_and_logged() {
    let mut scene = Scene::new(&[]);
    let mut connection = scene.connect();
    round_trip(&mut connection, b"hello");
    scene.proxy.wait_flow("spliced");
    let before = scene.proxy.count("verdicts", "forwarded");
    round_trip(&mut connection, &[7; 5000]);
    assert!(scene.proxy.count("verdicts", "forwarded") > before);
    let flow = scene.proxy.flow();
    assert_eq!(
        (&flow["refusal"], &flow["bytes_up"], &flow["bytes_down"]),
        (&Value::Null, &5005.into(), &5005.into()),
        "{flow}"
    );
    assert!(scene.proxy.client(&["ls"]).contains("device > forward > device"));
    assert!(scene.proxy.client_error(&["splice", "999"]).contains("there is no flow 999"));
    scene.end(connection);
    let log = scene.proxy.log();
    assert!(log.contains("how=closed bytes_up=5005 bytes_down=5005") && log.contains("splices=1"), "{log}");
}

#[test]
#[ignore = "root"]
fn a_flow_is_taken_back_by_command_and_spliced_again() {
    let mut scene = Scene::new(&[]);
    let mut connection = scene.connect();
    round_trip(&mut connection, b"hello");
    scene.proxy.wait_flow("spliced");
    let id = scene.proxy.flow()["id"].to_string();
    scene.proxy.client(&["unsplice", &id]);
    scene.proxy.wait_flow("copying");
    round_trip(&mut connection, &[8; 5000]);
    assert_eq!(scene.proxy.flow()["state"], "copying", "it stays until it is told otherwise");
    scene.proxy.client(&["splice", &id]);
    scene.proxy.wait_flow("spliced");
    round_trip(&mut connection, &[9; 5000]);
    scene.end(connection);
    let log = scene.proxy.log();
    assert!(log.contains("how=closed bytes_up=10005 bytes_down=10005") && log.contains("splices=2"), "{log}");
}

/// Lines about a flow have its number, in text and in JSON.
#[test]
#[ignore = "root"]
fn log_lines_name_their_flow() {
    for (format, name) in [("text", "flow{id=1}"), ("json", r#""span":{"id":1,"name":"flow"}"#)] {
        let scene = Scene::new(&["-v", "--log-format", format]);
        let mut connection = scene.connect();
        round_trip(&mut connection, b"hello");
        scene.proxy.wait_flow("spliced");
        scene.proxy.client(&["unsplice", "1"]);
        scene.proxy.wait_flow("copying");
        for of in ["Copying -> Draining", "frozen", "spliced at=", "Draining -> Spliced", "unspliced"] {
            let of = if format == "json" { of.trim_end_matches(" at=") } else { of };
            let messages = scene.proxy.messages();
            let mut lines = messages.lines().filter(|line| line.contains("DEBUG") && line.contains(of)).peekable();
            assert!(lines.peek().is_some(), "no line with {of}: {messages}");
            lines.for_each(|line| assert!(line.contains(name), "{line}"));
        }
    }
}

/// Stopping a process interrupts its system calls, as a handled signal does (signal(7)).
#[test]
#[ignore = "root"]
fn a_proxy_that_was_stopped_and_continued_hears_of_ends() {
    let mut scene = Scene::new(&[]);
    for _ in 0..3 {
        scene.proxy.signal(Signal::SIGSTOP);
        std::thread::sleep(std::time::Duration::from_millis(50));
        scene.proxy.signal(Signal::SIGCONT);
    }
    let mut connection = scene.connect();
    round_trip(&mut connection, b"hello");
    scene.proxy.wait_flow("spliced");
    scene.end(connection);
    assert!(!scene.proxy.messages().contains("events"), "{}", scene.proxy.messages());
}

#[test]
#[ignore = "root"]
fn flows_that_are_left_go_on_until_they_are_flushed() {
    let mut scene = Scene::new(&["--leave-flows"]);
    let mut connection = scene.connect();
    round_trip(&mut connection, b"hello");
    scene.proxy.wait_flow("spliced");
    scene.proxy.shut_down();
    assert!(scene.proxy.messages().contains("1 flows left running"), "{}", scene.proxy.messages());
    assert!(scene.proxy.log().contains("how=left"));
    round_trip(&mut connection, &[7; 100_000]);
    let flushed = scene.lab.forwarder.execute(LONGSPLICE, &["stop", "--flush"]).unwrap();
    assert!(flushed.contains("removed"), "{flushed}");
    assert!(!scene.pins.exist());
}

#[test]
#[ignore = "root"]
fn flows_outlive_a_killed_proxy_and_the_start_of_the_next() {
    let mut scene = Scene::new(&[]);
    let mut connection = scene.connect();
    round_trip(&mut connection, b"hello");
    scene.proxy.wait_flow("spliced");
    scene.proxy.kill();
    round_trip(&mut connection, &[7; 100_000]);
    // A failed start does not harm the flows either.
    let mistake = scene.lab.forwarder.execute(LONGSPLICE, &["run", "--socks5", "192.0.2.1:1080"]).unwrap_err();
    assert!(mistake.to_string().contains("no device of this host has the address"), "{mistake}");
    round_trip(&mut connection, &[8; 100_000]);
    scene.proxy = Scene::proxy(&scene.lab, &[]);
    round_trip(&mut connection, &[9; 100_000]);
    let mut second = scene.connect();
    round_trip(&mut second, b"hello again");
    scene.proxy.wait_flow("spliced");
}

#[test]
#[ignore = "root"]
fn what_is_never_spliced_is_no_work_of_the_data_path() {
    let mut scene = Scene::new(&[]);
    scene.proxy.stop(&scene.pins);
    let plug = format!("{}={}", Scene::address(), topology::SERVER.port(Family::V4, PORT));
    let never = ["--plug", &plug, "--splice", "never"];
    scene.proxy = Running::start(scene.lab.forwarder.command(LONGSPLICE), None, &never, &[]);
    let mut connection = scene.connect();
    round_trip(&mut connection, &[7; 100_000]);
    let flow = scene.proxy.flow();
    assert_eq!((&flow["state"], &flow["refusal"]), (&"copying".into(), &"policy".into()));
    assert_eq!(["local", "local-out"].map(|name| scene.proxy.count("verdicts", name)), [0, 0]);
    scene.end(connection);
}

#[test]
#[ignore = "root"]
fn flush_refuses_while_a_proxy_runs_elsewhere() {
    let scene = Scene::new(&[]);
    // A control socket other than the proxy's: no one listens there, but the data path is in use.
    let arguments = ["stop", "--flush", "--control", "/nowhere/control.sock"];
    let refused = scene.lab.forwarder.execute(LONGSPLICE, &arguments).unwrap_err();
    assert!(refused.to_string().contains("another process runs the data path"), "{refused}");
    assert!(scene.pins.exist());
}

#[test]
#[ignore = "root"]
fn doctor_finds_that_this_machine_can_splice() {
    let doctor = longsplice(&["doctor"]);
    assert!(doctor.status.success(), "{}", String::from_utf8_lossy(&doctor.stdout));
}

fn checks(output: &std::process::Output) -> Vec<Value> {
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    report["checks"].as_array().unwrap().clone()
}

/// What cannot be tried says so, and has no cure that would not help.
#[test]
#[ignore = "root"]
fn doctor_without_rights_blames_nothing_else() {
    for (capabilities, tcx) in
        [("", "not tried, because"), (",+bpf,+net_admin,+perfmon", "not tried: network namespace")]
    {
        let mut doctor = std::process::Command::new("setpriv");
        doctor.args([&format!("--bounding-set=-all{capabilities}"), "--inh-caps=-all", "--", LONGSPLICE]);
        let all = checks(&doctor.args(["doctor", "--json"]).output().unwrap());
        let of = |name: &str| all.iter().find(|check| check["name"] == name).unwrap();
        assert!(of("tcx")["found"].as_str().unwrap().starts_with(tcx), "{}", of("tcx"));
        assert!(!of("tcx").to_string().contains("iproute2"), "{}", of("tcx"));
        assert!(!of("guard").to_string().contains("CONFIG_"), "{}", of("guard"));
        let blamed = all.iter().filter(|c| c["cure"].to_string().contains("CONFIG_")).collect::<Vec<_>>();
        assert!(blamed.is_empty(), "this kernel has it all: {blamed:?}");
        if capabilities.is_empty() {
            assert!(of("guard")["found"].as_str().unwrap().starts_with("not checked: without CAP_"), "{}", of("guard"));
        }
    }
}

/// A data path that is pinned in another bpffs, as in a container that shares the network namespace.
#[test]
#[ignore = "root"]
fn doctor_sees_a_data_path_that_is_pinned_elsewhere() {
    let scene = Scene::new(&[]);
    let mut doctor = scene.lab.forwarder.command("unshare");
    doctor.args(["-m", "sh", "-c", "mount -t bpf none /sys/fs/bpf; exec \"$0\" \"$@\"", "setpriv"]);
    doctor.args([
        "--bounding-set=-all,+bpf,+net_admin,+perfmon",
        "--inh-caps=-all",
        "--",
        LONGSPLICE,
        "doctor",
        "--json",
    ]);
    let all = checks(&doctor.output().unwrap());
    let found = all.iter().find(|check| check["name"] == "data path").unwrap();
    assert_eq!(found["state"], "warning", "{found}");
    assert!(found["found"].as_str().unwrap().contains("another one is attached to f"), "{found}");
}

#[test]
#[ignore = "root"]
fn doctor_checks_a_configuration() {
    let scene = Scene::new(&[]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("longsplice.toml");
    let listener = "[[listener]]\nprotocol = \"tpot\"\nlisten = \"0.0.0.0:80\"\n";
    let check = |text: &str, capabilities: &str| {
        std::fs::write(&file, format!("{text}\n{listener}")).unwrap();
        let mut doctor = scene.lab.forwarder.command("setpriv");
        doctor.args([
            &format!("--bounding-set={capabilities}"),
            "--inh-caps=-all",
            "--",
            LONGSPLICE,
            "doctor",
            "--json",
        ]);
        checks(&doctor.arg("--config").arg(&file).output().unwrap())
    };
    let states = |all: &[Value], name: &str| {
        all.iter().filter(|c| c["name"] == name).map(|c| c["state"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let good = check("source = \"10.77.2.1\"", "+all");
    for name in ["configuration", "devices", "source", "raw sockets", "source ports"] {
        assert_eq!(states(&good, name), ["ok"], "{good:?}");
    }
    assert_eq!(states(&good, "memory").len(), 1, "{good:?}");
    let bad =
        check("devices = \"nosuch\"\nsource = [\"10.77.2.1\", \"192.0.2.1\"]\nsource_ports = \"30000-40000\"", "-all");
    assert_eq!(states(&bad, "devices"), ["missing"], "{bad:?}");
    assert_eq!(states(&bad, "source"), ["ok", "missing"], "{bad:?}");
    assert_eq!(states(&bad, "raw sockets"), ["missing"], "{bad:?}");
    assert_eq!(states(&bad, "source ports"), ["warning"], "{bad:?}");
    let wrong = check("devices = []", "+all");
    assert!(wrong.iter().any(|c| c["found"].as_str().unwrap().contains("longsplice.toml:1:11")), "{wrong:?}");
}

/// What `doctor --config` says of memory is computed, not measured.
#[test]
#[ignore = "root"]
fn the_memory_of_tables_is_known_before() {
    let scene = Scene::new(&["--max-flows", "20000"]);
    let pins = fs::read_dir(scene.pins.path()).unwrap();
    let bytes = |pin: std::path::PathBuf| longsplice_datapath::map_size(&pin).map_or(0, |size| size.bytes); // links have none
    let taken: u64 = pins.map(|pin| bytes(pin.unwrap().path())).sum();
    let options = longsplice_datapath::Options { max_flows: 20_000, ..Default::default() };
    let computed = options.with_smallest_rings().table_bytes();
    assert!(taken.abs_diff(computed) < taken / 4, "{computed}, and it takes {taken}");
}

/// As with a firewall that drops untracked packets.
#[test]
#[ignore = "root"]
fn doctor_tells_whether_connections_are_tracked() {
    let scene = Scene::new(&[]);
    let conntrack = || {
        let output = scene.lab.forwarder.command(LONGSPLICE).args(["doctor", "--json"]).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let checks = report["checks"].as_array().unwrap();
        let check = checks.iter().find(|check| check["name"] == "conntrack").unwrap();
        assert_eq!(check["state"], "ok", "{check}");
        check["found"].as_str().unwrap().to_owned()
    };
    assert_eq!(conntrack(), "tracks nothing in this network namespace");
    let rules = "add table inet f; add chain inet f input { type filter hook input priority 0; }; \
                 add rule inet f input ct state invalid drop";
    scene.lab.forwarder.execute("nft", &[rules]).unwrap();
    round_trip(&mut scene.connect(), b"hello");
    let found = conntrack();
    assert!(found.ends_with(" connections: renewed for those that were spliced and are taken back"), "{found}");
}

#[test]
#[ignore = "root"]
fn xdp_forwards_what_it_can_and_tcx_the_rest() {
    let lab = lab_for_xdp(false);
    for family in Family::BOTH {
        let all = streamed_by_xdp(&lab, family, &[("forwarded-early", 1000), ("local", 0)]);
        assert!(all, "what is not forwarded goes on: {family:?}");
    }
}

/// Linux's default over veth: a frame has no checksum yet, and XDP would send it on without one.
#[test]
#[ignore = "root"]
fn xdp_leaves_frames_without_a_checksum_to_tcx() {
    let lab = lab_for_xdp(true);
    for family in Family::BOTH {
        assert!(streamed_by_xdp(&lab, family, &[("forwarded", 10)]), "{family:?}");
    }
    // one end changes its setting
    lab.client.execute("ethtool", &["-K", "c0", "tso", "off", "gso", "off", "tx", "off"]).unwrap();
    for family in Family::BOTH {
        assert!(streamed_by_xdp(&lab, family, &[("forwarded-early", 100), ("forwarded", 10)]), "{family:?}");
    }
}

fn lab_for_xdp(large_packets: bool) -> Lab {
    let lab = Lab::new(Shape::TwoDevices, Options { large_packets, ..Options::default() }).unwrap();
    // Like a network card, a veth accepts frames from XDP only if the other end receives by NAPI.
    lab.client.execute("ethtool", &["-K", "c0", "gro", "on"]).unwrap();
    lab.server.execute("ethtool", &["-K", "s0", "gro", "on"]).unwrap();
    lab
}

/// Whether each of these counters exceeds its number after a stream. On a busy machine a stream may be over before much of it is
/// forwarded, so there are several tries.
fn streamed_by_xdp(lab: &Lab, family: Family, least: &[(&str, u64)]) -> bool {
    (0..5).any(|_| {
        let count = stream_by_xdp(lab, family);
        least.iter().all(|(name, least)| count(name) > *least)
    })
}

/// Transfers three megabytes each way, and checks them. Returns a function that reads the counters.
fn stream_by_xdp(lab: &Lab, family: Family) -> impl Fn(&str) -> u64 {
    let (server, at) = (topology::SERVER.port(family, PORT), topology::FORWARDER_TO_CLIENT.port(family, PORT));
    let answer = Script::answerer().bytes(3_000_000);
    let serving = serve(lab.server.run(|| listen(server, &answer)).unwrap(), 1, answer);
    let plug = format!("{at}={server}");
    let more = ["--xdp", lab.client_device(), "--xdp", lab.server_device()];
    let arguments = ["--plug", &plug, "--splice", "at-once"];
    let proxy = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, &more);
    let opener = Script::opener(7).bytes(3_000_000);
    let client = converse(lab.client.run(|| traffic_connect(at, &opener)).unwrap(), &opener);
    intact(&client, &serving.join()[0]).unwrap();
    let counters = proxy.counters();
    move |name| counters["verdicts"][name].as_u64().unwrap_or_else(|| panic!("no {name}: {counters}"))
}
