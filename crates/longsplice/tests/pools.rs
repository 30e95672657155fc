//! Pools of servers behind plugs, through the real program: connections that are spliced count, servers are killed under load, and
//! a reload changes the pool. Needs root, eBPF and Python, and fails without.

use crate::{
    running::{AT_ONCE, Running, Setting, eventually, listener},
    upgrade::Dynasty,
};
use longsplice_lab::{
    ChildGuard, Family, Namespace, pattern,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    thread,
    time::Duration,
};
use test_case::test_case;

const PORT: u16 = 7000;
/// Ports of the servers.
const SERVERS: [u16; 3] = [7001, 7002, 7003];
const PATIENCE: Duration = Duration::from_secs(60);

/// Echoes. Its connections are reset when it is killed.
const PYTHON: &str = r#"
import socketserver, sys
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128
    address_family = 10 if ':' in sys.argv[1] else 2
Server((sys.argv[1], int(sys.argv[2])), Echo).serve_forever()
"#;

fn server(at: &Namespace, family: Family, port: u16) -> ChildGuard {
    let mut python = at.command("python3");
    let process = ChildGuard::spawn(python.args(["-c", PYTHON, &SERVER.ip(family).to_string(), &port.to_string()]));
    at.wait_listening(port, PATIENCE).unwrap();
    process.unwrap()
}

/// A plug with a pool of these servers. `more` belongs to the pool.
fn plug(family: Family, ports: &[u16], more: &str) -> String {
    let servers: Vec<String> = ports.iter().map(|port| name(family, *port)).collect();
    let pool = format!("pool = \"db\"\n{AT_ONCE}\n[pool.db]\nservers = {servers:?}\n{more}");
    listener("plug", &at(family).to_string(), &pool)
}

fn at(family: Family) -> SocketAddr {
    FORWARDER_TO_CLIENT.port(family, PORT)
}

/// A server, as the configuration names it.
fn name(family: Family, port: u16) -> String {
    SERVER.port(family, port).to_string()
}

/// Sends a pattern and compares what comes back.
fn exchange(stream: &mut TcpStream, seed: u64, bytes: usize) -> io::Result<()> {
    let (mut sent, mut back) = (vec![0; bytes], vec![0; bytes]);
    pattern::fill(seed, 0, &mut sent);
    let mut writer = stream.try_clone()?;
    thread::scope(|scope| {
        let writing = scope.spawn(|| writer.write_all(&sent));
        stream.read_exact(&mut back)?;
        writing.join().unwrap()
    })?;
    assert!(sent == back, "other bytes have come back");
    Ok(())
}

/// A client whose connection is spliced.
fn client(setting: &Setting, family: Family) -> TcpStream {
    let mut client = setting.connect(at(family));
    exchange(&mut client, 1, 100_000).unwrap();
    client
}

/// The number of spliced connections of each server, by its port.
fn spliced(proxy: &Running) -> BTreeMap<u16, usize> {
    let mut all = BTreeMap::new();
    for flow in proxy.flows().iter().filter(|flow| flow["state"] == "spliced") {
        *all.entry(port_of(flow)).or_default() += 1;
    }
    all
}

fn port_of(flow: &Value) -> u16 {
    flow["server"].as_str().unwrap().parse::<SocketAddr>().unwrap().port()
}

#[track_caller]
fn wait_spliced(proxy: &Running, want: &[(u16, usize)]) {
    let want = want.iter().copied().collect();
    eventually(&format!("{want:?}"), || (spliced(proxy) == want).then_some(()));
}

/// Ends the connections to the server at this port.
fn end_those(proxy: &Running, clients: &mut Vec<TcpStream>, port: u16) {
    let flows = proxy.flows();
    let theirs = flows.iter().filter(|flow| port_of(flow) == port).map(|flow| flow["client"].as_str().unwrap());
    let theirs: Vec<SocketAddr> = theirs.map(|client| client.parse().unwrap()).collect();
    clients.retain(|client| !theirs.contains(&client.local_addr().unwrap()));
}

/// Ends the clients, also if the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn spliced_connections_count_until_they_end(family: Family) {
    let setting = Setting::new(&plug(family, &SERVERS[..2], "balance = \"least-connections\""));
    let _servers = SERVERS[..2].iter().map(|port| server(&setting.lab.server, family, *port)).collect::<Vec<_>>();
    let mut proxy = setting.start_with(&["--log-format", "json"]);
    let mut clients: Vec<TcpStream> = (0..6).map(|_| client(&setting, family)).collect();
    let [first, second, _] = SERVERS;
    wait_spliced(&proxy, &[(first, 3), (second, 3)]);
    end_those(&proxy, &mut clients, first);
    wait_spliced(&proxy, &[(second, 3)]);
    clients.extend((0..3).map(|_| client(&setting, family)));
    wait_spliced(&proxy, &[(first, 3), (second, 3)]);
    clients.iter_mut().for_each(|client| exchange(client, 2, 3_000_000).unwrap());
    drop(clients);
    let records = proxy.end(&setting.pins[0]);
    assert_eq!(records.len(), 9);
    for record in &records {
        let server = &record["server"];
        assert_eq!((&record["pool"], &record["member"], &record["target"]), (&"db".into(), server, server), "{record}");
        assert_eq!((&record["how"], &record["splices"]), (&"closed".into(), &1.into()), "{record}");
    }
}

/// Clients come and go, and what each has sent comes back. A server is killed: it takes with it the connections that it has, one
/// of each client at most, and no others. When it is there again, it gets its share.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_server_is_killed_under_load(family: Family) {
    const CLIENTS: usize = 8;
    let check = "check = { interval = 0.1, rise = 1, fall = 1 }\nfailures = 1\nout = 0.5";
    let setting = Setting::new(&plug(family, &SERVERS, check));
    let mut servers = SERVERS.map(|port| Some(server(&setting.lab.server, family, port)));
    let mut proxy = setting.start_with(&["--log-format", "json"]);
    let (stop, served, broken) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let serves = |port: u16| {
        let member = name(family, port);
        proxy.records().iter().filter(|r| r["member"] == member.as_str() && r["how"] == "closed").count()
    };
    let more_from = |port: u16| {
        let before = serves(port);
        eventually(&format!("connections to port {port}"), || (serves(port) >= before + 20).then_some(()));
    };
    thread::scope(|scope| {
        let _end = Stop(&stop);
        for seed in 0..CLIENTS as u64 {
            let (setting, stop, served, broken) = (&setting, &stop, &served, &broken);
            scope.spawn(move || {
                let sizes = [100, 50_000, 400_000];
                for bytes in sizes.iter().cycle().take_while(|_| !stop.load(SeqCst)) {
                    let mut client = setting.connect(at(family));
                    match exchange(&mut client, seed, *bytes) {
                        Ok(()) => served.fetch_add(1, SeqCst),
                        Err(_) => broken.fetch_add(1, SeqCst),
                    };
                }
            });
        }
        SERVERS.iter().for_each(|port| more_from(*port));
        assert_eq!(broken.load(SeqCst), 0, "before anything happens");
        let before = served.load(SeqCst);
        servers[1].as_mut().unwrap().kill();
        proxy.wait_message(&format!("pool db: {} is down", name(family, SERVERS[1])));
        [SERVERS[0], SERVERS[2]].into_iter().for_each(more_from);
        assert!(served.load(SeqCst) > before);
        let lost = broken.load(SeqCst);
        assert!(lost <= CLIENTS, "{lost} connections are lost");
        servers[1] = Some(server(&setting.lab.server, family, SERVERS[1]));
        proxy.wait_message(&format!("pool db: {} is up", name(family, SERVERS[1])));
        more_from(SERVERS[1]);
        assert_eq!(broken.load(SeqCst), lost, "afterwards, none is lost");
    });
    let records = proxy.end(&setting.pins[0]);
    assert_eq!(records.len(), served.load(SeqCst) + broken.load(SeqCst));
    let cut = records.iter().filter(|record| record["how"] != "closed").count();
    assert!(cut <= CLIENTS, "{cut} connections have not ended in order");
    assert!(records.iter().any(|r| r["splices"] == 1), "they are spliced");
}

/// An agent at another port says whether a server is good: it serves while the agent is there, whatever its own port does.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_check_asks_another_port(family: Family) {
    const AGENT: u16 = 7900;
    let check = format!("check = {{ port = {AGENT}, interval = 0.1, rise = 1, fall = 1 }}");
    let setting = Setting::new(&plug(family, &SERVERS[..1], &check));
    let mut serving = server(&setting.lab.server, family, SERVERS[0]);
    let mut proxy = setting.start();
    let member = name(family, SERVERS[0]);
    proxy.wait_message(&format!("pool db: {member} is down"));
    let agent = setting.listen(SERVER.port(family, AGENT));
    proxy.wait_message(&format!("pool db: {member} is up"));
    exchange(&mut setting.connect(at(family)), 1, 1000).unwrap();
    serving.kill();
    agent.set_nonblocking(true).unwrap();
    while agent.accept().is_ok() {}
    agent.set_nonblocking(false).unwrap();
    agent.accept().unwrap(); // it is asked all the same
    drop(agent);
    eventually("it is down again", || {
        let pools: Value = serde_json::from_str(&proxy.client(&["pools", "--json"])).unwrap();
        (pools[0]["members"][0]["state"] == "down").then_some(())
    });
    proxy.stop(&setting.pins[0]);
}

#[test]
#[ignore = "root"]
fn a_reload_keeps_what_is_known_of_servers() {
    let family = Family::V4;
    let balance = "balance = \"least-connections\"";
    let setting = Setting::new(&plug(family, &SERVERS[..2], balance));
    let _servers = SERVERS.map(|port| server(&setting.lab.server, family, port));
    let mut proxy = setting.start();
    let mut clients: Vec<TcpStream> = (0..4).map(|_| client(&setting, family)).collect();
    let [first, second, third] = SERVERS;
    wait_spliced(&proxy, &[(first, 2), (second, 2)]);
    // the first one is gone, and there is another
    setting.configure(&plug(family, &[third, second], balance));
    proxy.client(&["reload"]);
    clients.extend((0..2).map(|_| client(&setting, family)));
    wait_spliced(&proxy, &[(first, 2), (second, 2), (third, 2)]);
    clients.extend((0..2).map(|_| client(&setting, family)));
    wait_spliced(&proxy, &[(first, 2), (second, 3), (third, 3)]);
    // all that was there goes on, and counts up to its end
    clients.iter_mut().for_each(|client| exchange(client, 3, 200_000).unwrap());
    end_those(&proxy, &mut clients, second);
    wait_spliced(&proxy, &[(first, 2), (third, 3)]);
    clients.extend((0..2).map(|_| client(&setting, family)));
    wait_spliced(&proxy, &[(first, 2), (second, 2), (third, 3)]);
    drop(clients);
    proxy.stop(&setting.pins[0]);
}

/// What is to see of the servers: state, weight and connections.
fn members(proxy: &Running) -> Vec<(String, u64, u64)> {
    let pools: Value = serde_json::from_str(&proxy.client(&["pools", "--json"])).unwrap();
    let of = |member: &Value| {
        let number = |key: &str| member[key].as_u64().unwrap();
        (member["state"].as_str().unwrap().to_owned(), number("weight"), number("connections"))
    };
    pools[0]["members"].as_array().unwrap().iter().map(of).collect()
}

#[test]
#[ignore = "root"]
fn operators_drain_servers_and_change_their_weights() {
    let family = Family::V4;
    let setting =
        Setting::new(&format!("admin = {{ listen = \"127.0.0.1:9180\" }}\n{}", plug(family, &SERVERS[..2], "")));
    let _servers = SERVERS.map(|port| server(&setting.lab.server, family, port));
    let mut proxy = setting.start();
    let [first, second, _] = SERVERS;
    let named = [first, second].map(|port| format!("db/{}", name(family, port)));
    let mut clients: Vec<TcpStream> = (0..2).map(|_| client(&setting, family)).collect();
    wait_spliced(&proxy, &[(first, 1), (second, 1)]);
    proxy.client(&["drain", &named[0]]);
    clients.extend((0..3).map(|_| client(&setting, family)));
    wait_spliced(&proxy, &[(first, 1), (second, 4)]);
    assert_eq!(members(&proxy), [("drained".into(), 1, 1), ("up".into(), 1, 4)]);
    let table = proxy.client(&["pools"]);
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["SERVER", "STATE", "WEIGHT", "CONNECTIONS", "CHOSEN", "FAILED"]);
    assert_eq!(rows[1..], [[&*named[0], "drained", "1", "1", "1", "0"], [&*named[1], "up", "1", "4", "4", "0"]]);
    // what it has goes on, and then it has none
    clients.iter_mut().for_each(|client| exchange(client, 4, 200_000).unwrap());
    end_those(&proxy, &mut clients, first);
    eventually("nothing on the first one", || (members(&proxy)[0].2 == 0).then_some(()));

    proxy.client(&["undrain", &named[0]]);
    proxy.client(&["weight", &named[0], "3"]);
    clients.extend((0..8).map(|_| client(&setting, family)));
    wait_spliced(&proxy, &[(first, 6), (second, 6)]);
    setting
        .configure(&format!("admin = {{ listen = \"127.0.0.1:9180\" }}\n{}", plug(family, &SERVERS[..2], "tries = 2")));
    proxy.client(&["reload"]);
    assert_eq!(members(&proxy), [("up".into(), 3, 6), ("up".into(), 1, 6)], "a reload changes nothing of it");
    proxy.client(&["weight", &named[0]]);
    assert_eq!(members(&proxy)[0].1, 1);
    let labels = format!("{{pool=\"db\",member=\"{}\"}}", name(family, first));
    let mut scrape = setting.lab.forwarder.run(|| TcpStream::connect("127.0.0.1:9180")).unwrap();
    scrape.write_all(b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n").unwrap();
    let mut metrics = String::new();
    scrape.read_to_string(&mut metrics).unwrap();
    for (of, value) in [("chosen_total", 7), ("failed_total", 0), ("connections", 6), ("weight", 1), ("up", 1)] {
        let line = format!("longsplice_pool_{of}{labels} {value}\n");
        assert!(metrics.contains(&line), "{line}: {metrics}");
    }
    let unknown = proxy.client_error(&["drain", "db/192.0.2.1:1"]);
    assert!(unknown.contains("no pool has a server db/192.0.2.1:1"), "{unknown}");
    drop(clients);
    proxy.stop(&setting.pins[0]);
}

/// One server is drained, one has another weight, and one is down: the next process knows all of it.
#[test]
#[ignore = "root"]
fn an_upgrade_hands_over_what_is_known_of_servers() {
    let family = Family::V4;
    let setting = Setting::new(&plug(family, &SERVERS, "check = { interval = 1 }\nslow_start = 600"));
    let _servers = SERVERS[..2].iter().map(|port| server(&setting.lab.server, family, *port)).collect::<Vec<_>>();
    let mut dynasty = Dynasty::of(setting.start());
    let [first, second, _] = SERVERS.map(|port| format!("db/{}", name(family, port)));
    let state = |dynasty: &Dynasty, n: usize| members(&dynasty.first)[n].0.clone();
    eventually("the third is down", || (state(&dynasty, 2) == "down").then_some(()));
    drop((client(&setting, family), client(&setting, family)));
    dynasty.first.client(&["drain", &first]);
    dynasty.first.client(&["weight", &second, "5"]);
    let is_idle = || members(&dynasty.first).iter().all(|(_, _, connections)| *connections == 0).then_some(());
    eventually("both are over", is_idle);
    let all = |dynasty: &Dynasty| dynasty.first.client(&["pools", "--json"]);
    let before = all(&dynasty);
    for _ in 0..2 {
        dynasty.upgrade(&[]);
        assert_eq!(all(&dynasty), before);
    }
    dynasty.first.client(&["undrain", &first]);
    dynasty.first.client(&["weight", &second]);
    assert_eq!(members(&dynasty.first)[..2], [("up".into(), 1, 0), ("up".into(), 1, 0)]);
    let _third = server(&setting.lab.server, family, SERVERS[2]);
    eventually("the third is up", || (state(&dynasty, 2) == "up").then_some(()));
    dynasty.stop();
}

/// Clients beyond the limit wait, and get the places of those that end, spliced or not.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn clients_wait_for_full_servers(family: Family) {
    let setting = Setting::new(&plug(family, &SERVERS[..2], "max_connections = 2\nqueue_wait = 60"));
    let _servers = SERVERS[..2].iter().map(|port| server(&setting.lab.server, family, *port)).collect::<Vec<_>>();
    let mut proxy = setting.start();
    let mut clients: Vec<TcpStream> = (0..4).map(|_| client(&setting, family)).collect();
    let [first, second, _] = SERVERS;
    wait_spliced(&proxy, &[(first, 2), (second, 2)]);
    let mut late: Vec<TcpStream> = (0..2).map(|_| setting.connect(at(family))).collect();
    late.iter_mut().for_each(|client| client.write_all(b"early").unwrap());
    let wait = |n: &str| eventually(n, || proxy.client(&["pools"]).contains(n).then_some(()));
    wait("db: 2 wait");
    end_those(&proxy, &mut clients, second);
    let mut back = [0; 5];
    for client in &mut late {
        client.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"early");
    }
    wait_spliced(&proxy, &[(first, 2), (second, 2)]);
    assert!(!proxy.client(&["pools"]).contains("wait"));
    clients.iter_mut().chain(&mut late).for_each(|client| exchange(client, 5, 100_000).unwrap());
    drop((clients, late));
    proxy.stop(&setting.pins[0]);
}
