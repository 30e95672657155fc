//! Translucent proxying through the real program: `longsplice tpot host` on the client's host, and a listener of
//! `protocol = "tpot"` on its route. Needs root and eBPF.

mod running;

use longsplice_lab::{ChildGuard, Family, Lab, Shape, topology};
use nix::sys::signal::Signal;
use running::{LONGSPLICE, Pins, Running, echo, eventually, round_trip};
use serde_json::Value;
use std::{fs, net::TcpListener, path::PathBuf, process::Command, time::Duration};

const PORT: u16 = 7000;
const PATIENCE: Duration = Duration::from_secs(20);

/// A lab whose forwarder intercepts connections to the port of the tests.
struct Translucent {
    lab: Lab,
    file: PathBuf,
    pins: [Pins; 3],
    _dir: tempfile::TempDir,
}

impl Translucent {
    fn new() -> Translucent {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let pins = [Pins::of(&lab.forwarder), Pins::of_tpot(&lab.forwarder), Pins::of_tpot(&lab.client)];
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("longsplice.toml");
        let listener = |any| {
            format!(
                "[[listener]]\nprotocol = \"tpot\"\nlisten = \"{any}:{PORT}\"\npolicy = {{ splice = \"at-once\" }}\n"
            )
        };
        fs::write(&file, format!("leave_flows_on_stop = true\n{}{}", listener("0.0.0.0"), listener("[::]"))).unwrap();
        Translucent { lab, file, pins, _dir: dir }
    }

    fn proxy(&self) -> Running {
        Running::start(self.lab.forwarder.command(LONGSPLICE), None, &["--config", self.file.to_str().unwrap()], &[])
    }

    fn host(&self) -> ChildGuard {
        let mut command = self.lab.client.command(LONGSPLICE);
        command.args(["tpot", "host", "--proxy", "10.77.0.0/16", "--proxy", "fd77::/16", "--port", &PORT.to_string()]);
        let mut host = ChildGuard::spawn(command.env_remove("RUST_LOG")).unwrap();
        host.wait_output("asking for proxies", PATIENCE).unwrap();
        host
    }

    /// The connections in tunnels of the client's host.
    fn tunnels(&self) -> Vec<Value> {
        let out = self.lab.client.command(LONGSPLICE).args(["tpot", "ls", "--json"]).output().unwrap();
        assert!(out.status.success(), "{out:?}");
        String::from_utf8(out.stdout).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
    }
}

fn stop(mut host: ChildGuard) -> String {
    host.signal(Signal::SIGTERM).unwrap();
    assert!(host.wait(PATIENCE).unwrap().success(), "{}", host.output());
    host.output()
}

#[test]
#[ignore = "root"]
fn programs_that_know_nothing_of_it() {
    let here = Translucent::new();
    let (mut proxy, host) = (here.proxy(), here.host());
    let site = tempfile::tempdir().unwrap();
    let file: Vec<u8> = (0..20_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(site.path().join("file"), &file).unwrap();
    for family in Family::BOTH {
        let at = topology::SERVER.port(family, PORT);
        let mut server = here.lab.server.command("python3");
        server.args(["-m", "http.server", "--bind", &at.ip().to_string(), &PORT.to_string()]).current_dir(site.path());
        let _server = ChildGuard::spawn(&mut server).unwrap();
        here.lab.server.wait_listening(PORT, PATIENCE).unwrap();
        let mut curl: Command = here.lab.client.command("curl");
        let got = curl.args(["-sS", "--max-time", "20", "-g", &format!("http://{at}/file")]).output().unwrap();
        assert!(got.status.success() && got.stdout == file, "{}", String::from_utf8_lossy(&got.stderr));
        let line = eventually("a line of the access log", || {
            let log = fs::read_to_string(proxy.access_log()).unwrap();
            log.lines().find(|l| l.contains(&format!("{at}"))).map(str::to_owned)
        });
        assert!(line.contains("tpot") && line.contains("spliced"), "{line}");
        let tunnels = here.tunnels();
        let ours = tunnels.iter().find(|t| t["remote"] == at.to_string()).unwrap_or_else(|| panic!("{tunnels:?}"));
        assert_eq!((&ours["role"], &ours["over"]), (&"asker".into(), &true.into()), "{ours}");
    }
    // two connections of iperf3, one after the other: it talks to its server, and sends
    let port = PORT.to_string();
    let mut server = here.lab.server.command("iperf3");
    let mut server = ChildGuard::spawn(server.args(["-s", "-1", "-p", &port])).unwrap();
    here.lab.server.wait_listening(PORT, PATIENCE).unwrap();
    let at = topology::SERVER.ip(Family::V4).to_string();
    let sent = here.lab.client.execute("iperf3", &["-c", &at, "-p", &port, "-n", "20M"]);
    assert!(sent.as_ref().is_ok_and(|out| out.contains("receiver")), "{sent:?}");
    assert!(server.wait(PATIENCE).unwrap().success());
    assert!(stop(host).contains("opened: 4"));
    let counters: Value = serde_json::from_str(&proxy.client(&["counters", "--json"])).unwrap();
    assert_eq!((&counters["tpot"]["intercepted"], &counters["tpot"]["opened"]), (&4.into(), &4.into()));
    proxy.client(&["stop"]);
    assert!(proxy.wait().success());
}

/// Tunnels outlive the processes at both ends, and the next ones take them over.
#[test]
#[ignore = "root"]
fn connections_outlive_the_processes() {
    for family in Family::BOTH {
        let here = Translucent::new();
        let (mut proxy, host) = (here.proxy(), here.host());
        let at = topology::SERVER.port(family, PORT);
        here.lab.server.run(|| echo(TcpListener::bind(at).unwrap()));
        let connect = || here.lab.client.run(|| running::connect(at));
        let mut early = connect();
        round_trip(&mut early, &[7; 100_000]);
        eventually("spliced", || proxy.client(&["ls"]).contains("spliced").then_some(()));
        assert!(stop(host).contains("1 connections stay"));
        round_trip(&mut early, &[8; 100_000]);
        proxy.client(&["stop"]);
        assert!(proxy.wait().success());
        round_trip(&mut early, &[9; 100_000]);
        let mut proxy = here.proxy();
        eventually("adopted", || proxy.client(&["ls"]).contains("recovered").then_some(()));
        round_trip(&mut early, &[9; 100_000]);
        proxy.kill();
        round_trip(&mut early, &[9; 100_000]);
        let (mut proxy, host) = (here.proxy(), here.host());
        round_trip(&mut early, &[1; 100_000]);
        let mut late = connect();
        round_trip(&mut late, &[2; 100_000]);
        assert_eq!(here.tunnels().len(), 2);
        drop((early, late));
        eventually("the end of both", || here.tunnels().iter().all(|t| t["over"] == true).then_some(()));
        assert!(stop(host).contains("stopped"));
        proxy.client(&["stop"]);
        assert!(proxy.wait().success());
    }
}

/// A new device is attached as soon as it appears, so that a route may lead there: tunnelled packets leave by it as well.
#[test]
#[ignore = "root"]
fn a_route_to_a_new_device() {
    let here = Translucent::new();
    let (mut proxy, host) = (here.proxy(), here.host());
    let at = topology::SERVER.port(Family::V4, PORT);
    here.lab.server.run(|| echo(TcpListener::bind(at).unwrap()));
    let mut stream = here.lab.client.run(|| running::connect(at));
    round_trip(&mut stream, &[7; 100_000]);
    let (client, server) = (&here.lab.client, &here.lab.server);
    client
        .ip(&format!("link add c1 index 77 netns {} type veth peer name s1 netns {}\n", client.name(), server.name()))
        .unwrap();
    client.ip("addr add 10.77.9.1/24 dev c1\nlink set c1 up\n").unwrap();
    server.ip("addr add 10.77.9.2/24 dev s1\nlink set s1 up\n").unwrap();
    let pin = here.pins[2].path().join("egress-77");
    eventually("attached", || pin.exists().then_some(()));
    client.ip(&format!("route add {} via 10.77.9.2 src {}\n", at.ip(), topology::CLIENT.v4)).unwrap();
    round_trip(&mut stream, &[8; 100_000]);
    drop(stream);
    stop(host);
    proxy.client(&["stop"]);
    assert!(proxy.wait().success());
}
