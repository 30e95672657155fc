//! A farm of translucent proxies through the real program: `longsplice tpot router`, and its members. Needs root and eBPF.

use crate::running::{
    AT_ONCE, LONGSPLICE, Pins, Running, Setting, eventually, round_trip, spawn,
    translucent::{PATIENCE, PORT, listeners, service, stop, translucent_at},
};
use longsplice_lab::{
    ChildGuard, Family, Lab, Namespace, Options, Shape,
    topology::{CLIENT, CLIENT_SECOND, FORWARDER_TO_SERVER, FORWARDER_TO_SERVER_SECOND, MEMBERS, SERVER},
};
use serde_json::Value;
use std::{
    collections::HashSet,
    io::{ErrorKind, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};
use test_case::test_case;

const CHECK: u16 = 9999;

fn forwarding(shape: Shape) -> Lab {
    Lab::new(shape, Options { forwarding: true, ..Options::default() }).unwrap()
}

/// Answers checks at a member until it is dropped. Each connection gets `line`.
struct Agent(Arc<AtomicBool>, Vec<(Namespace, SocketAddr)>);

impl Agent {
    fn at(member: &Namespace, addresses: [IpAddr; 2], line: &'static str) -> Agent {
        let at = addresses.map(|ip| SocketAddr::new(ip, CHECK));
        let over = Arc::new(AtomicBool::new(false));
        for at in at {
            let listener = eventually("bound", || member.run(|| TcpListener::bind(at)).ok()); // the last one's may be open
            let over = over.clone();
            thread::spawn(move || {
                for mut stream in
                    listener.incoming().map_while(Result::ok).take_while(|_| !over.load(Ordering::Relaxed))
                {
                    let _ = stream.write_all(line.as_bytes()); // whoever does not read it has closed the connection
                }
            });
        }
        Agent(over, at.map(|at| (member.clone(), at)).to_vec())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        for (member, at) in &self.1 {
            let _ = member.run(|| TcpStream::connect(at)); // wakes the thread, which closes its socket
        }
    }
}

/// The lab of a farm: a proxy at each member, and the router.
struct Farm {
    proxies: Vec<Running>,
    _pins: Vec<Pins>,
    setting: Setting,
}

impl Farm {
    fn new() -> Farm {
        let setting = Setting::at(forwarding(Shape::Farm), &listeners(PORT, AT_ONCE));
        let members = &setting.lab.members;
        let of_member = |member: &Namespace| [Pins::of(member), Pins::of_tpot(member)];
        let mut pins: Vec<_> = members.iter().flat_map(of_member).collect();
        pins.push(Pins::of_router(&setting.lab.forwarder));
        let start = |member: &Namespace| setting.start_by(member.command(LONGSPLICE), &[]);
        Farm { proxies: members.iter().map(start).collect(), _pins: pins, setting }
    }

    fn router(&self, more: &[&str]) -> ChildGuard {
        let mut command = self.setting.lab.forwarder.command(LONGSPLICE);
        command.args(["tpot", "router", "--farm", "farm", "--port", &PORT.to_string()]);
        for (member, family) in MEMBERS.into_iter().flat_map(|member| Family::BOTH.map(|family| (member, family))) {
            command.args(["--member", &member.ip(family).to_string()]);
        }
        command.args(["--check", &CHECK.to_string(), "--interval", "1", "--rise", "1", "--fall", "1"]).args(more);
        let mut router = spawn(&mut command);
        router.wait_output("routing to the farm", PATIENCE).unwrap();
        router
    }

    fn agent(&self, i: usize, line: &'static str) -> Agent {
        Agent::at(&self.setting.lab.members[i], Family::BOTH.map(|family| MEMBERS[i].ip(family)), line)
    }

    fn show(&self, arguments: &[&str]) -> String {
        let mut command = self.setting.lab.forwarder.command(LONGSPLICE);
        let out = command.args(["tpot", "farm"]).args(arguments).output().unwrap();
        String::from_utf8(if out.status.success() { out.stdout } else { out.stderr }).unwrap()
    }

    /// The share of each member, of both families.
    fn shares(&self) -> Vec<f64> {
        let farm: Value = serde_json::from_str(&self.show(&["--json"])).unwrap();
        farm["members"].as_array().unwrap().iter().map(|m| m["share"].as_f64().unwrap()).collect()
    }

    fn wait_shares(&self, want: [f64; 2]) {
        let near = |shares: Vec<f64>| {
            shares.iter().zip([want[0], want[0], want[1], want[1]]).all(|(s, w)| (s - w).abs() < 0.03)
        };
        eventually("shares", || near(self.shares()).then_some(()));
    }

    /// Opens a connection. Returns it, and the address that the server sees.
    fn open(&self, server: &TcpListener) -> (TcpStream, IpAddr) {
        let mut client = self.setting.connect(server.local_addr().unwrap());
        client.write_all(b"hello").unwrap();
        let (mut accepted, from) = server.accept().unwrap();
        accepted.set_read_timeout(Some(PATIENCE)).unwrap();
        accepted.read_exact(&mut [0; 5]).unwrap();
        thread::spawn(move || {
            let mut buffer = [0; 65536];
            while let Ok(n @ 1..) = accepted.read(&mut buffer) {
                accepted.write_all(&buffer[..n]).unwrap();
            }
        });
        (client, from.ip())
    }
}

/// Checks decide who gets connections. Those that are open have nothing to do with it, or with the router's program.
#[test]
#[ignore = "root"]
fn members_that_are_down_are_left_out() {
    let farm = Farm::new();
    let (router, host) = (farm.router(&[]), farm.setting.host());
    let mut open = Vec::new();
    let mut all_work = |farm: &Farm, member: Option<usize>| {
        for family in Family::BOTH {
            let server = farm.setting.listen(SERVER.port(family, PORT));
            let (client, seen) = farm.open(&server);
            assert_eq!(MEMBERS.iter().position(|m| m.ip(family) == seen), member, "{seen}");
            open.push(client);
        }
        open.iter_mut().for_each(|stream| round_trip(stream, &[7; 100_000]));
    };
    all_work(&farm, None); // nobody is up
    let first = farm.agent(0, "");
    farm.wait_shares([1.0, 0.0]);
    all_work(&farm, Some(0));
    let _second = farm.agent(1, "");
    farm.wait_shares([0.5, 0.5]);
    drop(first);
    farm.wait_shares([0.0, 1.0]);
    all_work(&farm, Some(1));
    let mut peers: Vec<_> = farm.setting.tunnels().iter().map(|t| t["peer"].as_str().unwrap().to_owned()).collect();
    let mut want: Vec<_> = MEMBERS.iter().flat_map(|m| Family::BOTH.map(|family| m.ip(family).to_string())).collect();
    peers.sort();
    want.sort();
    assert_eq!(peers, want);
    let shown = farm.show(&[]);
    assert!(shown.contains("member 10.77.4.2  down  1 SYNs\nmember fd77:4::2  down  1 SYNs\n"), "{shown}");
    assert!(shown.contains("member 10.77.4.3  100.0 %  1 SYNs\n") && shown.contains("chosen       4\n"), "{shown}");
    let said = stop(router);
    for line in ["member 10.77.4.2 is up", "member 10.77.4.2 is down: 10.77.4.2:9999: Connection refused", "chosen: 4"]
    {
        assert!(said.contains(line), "{said}");
    }
    assert!(farm.show(&[]).contains("no router of a farm runs"));
    all_work(&farm, None);

    // nobody asks it to stop
    let mut router = farm.router(&[]);
    farm.wait_shares([0.0, 1.0]);
    all_work(&farm, Some(1));
    router.kill();
    assert!(farm.show(&[]).contains("no router of a farm runs"));
    all_work(&farm, None);
    let router = farm.router(&[]);
    farm.wait_shares([0.0, 1.0]);
    all_work(&farm, Some(1));
    stop(router);
    stop(host);
    assert_eq!([0, 1].map(|i| farm.proxies[i].count("tpot", "opened")), [2, 6]);
}

#[test]
#[ignore = "root"]
fn members_report_their_load() {
    let farm = Farm::new();
    let mut router = farm.router(&["--load"]);
    let (_first, second) = (farm.agent(0, "up 75%\n"), farm.agent(1, "25%\n"));
    farm.wait_shares([0.75, 0.25]);
    drop(second);
    farm.wait_shares([1.0, 0.0]);
    let second = farm.agent(1, "0%\n");
    router.wait_output("member 10.77.4.3 is up, weight 0", PATIENCE).unwrap();
    farm.wait_shares([1.0, 0.0]);
    drop(second);
    let _second = farm.agent(1, "SSH-2.0\r\n");
    router.wait_output("member 10.77.4.3 is down: 10.77.4.3:9999: it reports \"SSH-2.0\"", PATIENCE).unwrap();
    farm.wait_shares([1.0, 0.0]);
    assert!(stop(router).contains("stopped"));
}

/// A proxy at its limit leaves SYNs alone: they are routed on, to the router of a farm or to the server.
#[test]
#[ignore = "root"]
fn a_proxy_at_its_limit_leaves_syns_alone() {
    for limit in ["[listener.limits]\nconnections = 1", ""] {
        let total = if limit.is_empty() { "connections = 1\n" } else { "" };
        let here = translucent_at(forwarding(Shape::TwoDevices), &(total.to_owned() + &listeners(PORT, limit)));
        let mut proxy = here.start_with(&["-v"]);
        let host = here.host();
        for (n, family) in (1..).zip(Family::BOTH) {
            let server = here.listen(SERVER.port(family, PORT));
            let open = || {
                let mut client = here.connect(server.local_addr().unwrap());
                client.write_all(b"hello").unwrap();
                let (mut accepted, from) = server.accept().unwrap();
                accepted.set_read_timeout(Some(PATIENCE)).unwrap();
                accepted.read_exact(&mut [0; 5]).unwrap();
                ((client, accepted), [CLIENT, CLIENT_SECOND].iter().any(|a| a.ip(family) == from.ip()))
            };
            let listeners = if limit.is_empty() { 2 } else { 1 };
            let wait = |what: &str, times: usize| {
                eventually(what, || (proxy.messages().matches(what).count() == times * listeners).then_some(()));
            };
            let (first, routed) = open();
            assert!(!routed);
            wait("SYNs are left alone", 2 * n - 1);
            let left = proxy.count("tpot", "left");
            let (second, routed) = open();
            assert!(routed, "{}", proxy.messages());
            assert_eq!(proxy.count("tpot", "left"), left + 1);
            drop((first, second));
            wait("SYNs are intercepted again", 2 * n - 1);
            let (third, routed) = open();
            assert!(!routed);
            wait("SYNs are left alone", 2 * n); // a limit that is reached for a moment only may go unnoticed
            drop(third);
            wait("SYNs are intercepted again", 2 * n);
        }
        assert_eq!(proxy.count("proxy", "over_limit"), 0);
        stop(host);
        proxy.shut_down();
    }
}

/// One address has no more connections to a server than ports, and each further address has as many.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn more_addresses_for_more_connections(family: Family) {
    const PORTS: usize = 4;
    let own = [FORWARDER_TO_SERVER, FORWARDER_TO_SERVER_SECOND].map(|a| a.ip(family));
    for addresses in [&own[..1], &own] {
        let source = format!(
            "source_ports = \"20000-20003\"\nsource = {:?}\n",
            addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>()
        );
        let here = translucent_at(Lab::simple(Shape::TwoDevices).unwrap(), &(source + &listeners(PORT, "")));
        let (mut proxy, host) = (here.start(), here.host());
        let server = here.listen(SERVER.port(family, PORT));
        let at = server.local_addr().unwrap();
        let mut seen = HashSet::new();
        let open: Vec<_> = (0..PORTS * addresses.len())
            .map(|_| {
                let client = here.connect(at);
                let (accepted, from) = server.accept().unwrap();
                assert!(addresses.contains(&from.ip()) && (20000..=20003).contains(&from.port()), "{from}");
                assert!(seen.insert(from));
                (client, accepted)
            })
            .collect();
        // the reset may arrive before connect() returns
        let beyond = here.lab.client.run(|| TcpStream::connect_timeout(&at, PATIENCE));
        let refused = beyond.and_then(|mut beyond| {
            beyond.set_read_timeout(Some(PATIENCE))?;
            beyond.read(&mut [0])
        });
        assert!(refused.as_ref().map_or_else(|e| e.kind() == ErrorKind::ConnectionReset, |n| *n == 0), "{refused:?}");
        assert_eq!(proxy.count("proxy", "unreachable"), 1, "{}", proxy.messages());
        drop(open);
        stop(host);
        proxy.client(&["stop", "--flush"]);
        assert!(proxy.wait().success());
    }
}

#[test]
#[ignore = "root"]
fn a_service_of_systemd() {
    let lab = forwarding(Shape::Farm);
    let _pins = Pins::of_router(&lab.forwarder);
    let changes = [("eth1", "farm"), ("192.0.2.2", "10.77.4.2"), ("192.0.2.3", "fd77:4::3")];
    service("router", &lab.forwarder, &changes, "routing to the farm");
}

/// Mistakes on the command line, and what is missing.
#[test]
fn mistakes_of_the_operator() {
    let right = ["tpot", "router", "--farm", "farm9", "--member", "10.0.0.2", "--port", "80", "--check", "22"];
    for (n, said) in [(2, "--farm"), (4, "--member"), (6, "--port"), (8, "--check")] {
        let mut arguments = right.to_vec();
        arguments.drain(n..n + 2);
        let out = Command::new(LONGSPLICE).args(arguments).output().unwrap();
        let error = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && error.contains(said), "{error}");
    }
    for more in
        [["--member", "10.0.0.300"], ["--check", "0"], ["--interval", "0"], ["--rise", "0"], ["--port", "90-80"]]
    {
        let out = Command::new(LONGSPLICE).args(right).args(more).output().unwrap();
        assert!(!out.status.success() && String::from_utf8_lossy(&out.stderr).contains(more[0]), "{out:?}");
    }
    let out = Command::new(LONGSPLICE).args(right).output().unwrap();
    assert!(String::from_utf8_lossy(&out.stderr).contains("device farm9: not found"), "{out:?}");
}
