//! Upgrades of a proxy that intercepts connections: no SYN is routed past it, and no client notices. Needs root and eBPF.

use crate::{
    running::{
        AT_ONCE, Pins, Setting, connect, eventually, listener, round_trip,
        translucent::{listeners, stop, transparent},
    },
    upgrade::{Crowd, Dynasty, gone},
};
use longsplice_lab::{Family, Lab, Options, Shape, topology::SERVER};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::{IpAddr, Ipv6Addr, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};

/// Of clients that ask: spliced at once; or copied, and shaken hands with when their servers have.
const ASKED: [u16; 2] = [7000, 7001];
/// Of others: spliced at once; copied, with servers that are connected to on the client's SYN; copied, with servers that see the
/// client's address.
const PLAIN: [u16; 3] = [7002, 7003, 7004];
/// Between hosts that see each other: spliced at once, and copied.
const BETWEEN: [u16; 2] = [7005, 7006];
const NEVER: &str = "policy = { splice = \"never\" }";

fn all() -> Vec<(Family, u16)> {
    let ports = || [&ASKED[..], &PLAIN, &BETWEEN].concat();
    Family::BOTH.into_iter().flat_map(|family| ports().into_iter().map(move |port| (family, port))).collect()
}

fn configuration() -> String {
    let between = |port: u16, more: &str| {
        ["0.0.0.0", "[::]"].map(|any| listener("transparent", &format!("{any}:{port}"), more)).concat()
    };
    [
        listeners(ASKED[0], AT_ONCE),
        listeners(ASKED[1], &format!("handshake = \"confirm\"\n{NEVER}")),
        transparent("plug", PLAIN[0], AT_ONCE),
        transparent("plug", PLAIN[1], &format!("handshake = \"pipelined\"\n{NEVER}")),
        transparent("plug", PLAIN[2], &format!("source = \"client\"\n{NEVER}")),
        between(BETWEEN[0], AT_ONCE),
        between(BETWEEN[1], NEVER),
    ]
    .concat()
}

/// Tells each client its address as the server sees it, and echoes.
fn serve(listener: TcpListener) {
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            thread::spawn(move || {
                let seen = match stream.peer_addr().map(|at| at.ip()) {
                    Ok(IpAddr::V4(ip)) => ip.to_ipv6_mapped(),
                    Ok(IpAddr::V6(ip)) => ip,
                    Err(_) => return, // it has gone
                };
                let (mut n, mut buffer) = (stream.write_all(&seen.octets()).map(|()| 0), vec![0; 65536]);
                while n.is_ok() {
                    n = stream.read(&mut buffer).and_then(|n| stream.write_all(&buffer[..n]).map(|()| n));
                    if matches!(n, Ok(0)) {
                        return;
                    }
                }
            });
        }
    });
}

/// Connects to the server, and checks whom it sees: a client whose SYN went past the proxy would be seen itself. Its address is added
/// to `clients`.
fn visit(family: Family, port: u16, passes: bool, clients: &Mutex<BTreeSet<String>>) -> TcpStream {
    let mut stream = connect(SERVER.port(family, port));
    clients.lock().unwrap().insert(stream.local_addr().unwrap().to_string());
    let mut seen = [0; 16];
    stream.read_exact(&mut seen).unwrap_or_else(|e| panic!("{family:?}, {port}: {e}"));
    let seen = Ipv6Addr::from(seen);
    let seen = seen.to_ipv4_mapped().map_or(IpAddr::V6(seen), IpAddr::V4);
    let is_shown = passes || port == PLAIN[2] || BETWEEN.contains(&port);
    assert_eq!(seen == stream.local_addr().unwrap().ip(), is_shown, "the server at port {port} sees {seen}");
    round_trip(&mut stream, &[port as u8; 3000]);
    stream
}

fn setting() -> Setting {
    // a SYN that goes past the proxy reaches the server
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).unwrap();
    let setting = Setting::at(lab, &configuration());
    all().into_iter().for_each(|(family, port)| serve(setting.listen(SERVER.port(family, port))));
    setting
}

/// Upgraded again and again, with clients that come and go: each is intercepted, and none fails. Those that stay go on, in the kernel or
/// in the next process, and each has one line in the end.
#[test]
#[ignore = "root"]
fn each_client_is_intercepted_at_any_time() {
    const TIMES: usize = 3;
    let here = setting();
    let mut proxies = Dynasty::of(here.start_with(&["--log-format", "json"]));
    let host = here.host();
    let clients = Arc::new(Mutex::new(BTreeSet::new()));
    let long = |(family, port)| {
        let mut stream = here.lab.client.run(|| visit(family, port, false, &clients));
        round_trip(&mut stream, &[1; 100_000]);
        stream
    };
    let mut stay: Vec<_> = all().into_iter().map(long).collect();
    eventually("those are spliced that can be", || (proxies.first.flows_in("spliced") == 6).then_some(()));
    let come = |(family, port)| {
        let clients = clients.clone();
        Box::new(move || drop(visit(family, port, false, &clients))) as Box<dyn Fn() + Send>
    };
    let crowd = Crowd::new(&here, all().into_iter().map(come).collect());
    crowd.are_served(50);
    for _ in 0..TIMES {
        let said = proxies.upgrade(&[]);
        assert!(said.contains("tpot-0.0.0.0:7000") && said.contains("plug-[::]:7004"), "{said}");
        stay.iter_mut().for_each(|stream| round_trip(stream, &[2; 50_000]));
        crowd.are_served(100);
    }
    crowd.end();
    stay.iter_mut().for_each(|stream| round_trip(stream, &[3; 50_000]));
    assert!(proxies.first.wait().success(), "{}", proxies.first.messages());
    let stayed = stay.len();
    drop(stay);
    let is_one = |record: &&Value| record["how"] == "closed" && record["processes"] == TIMES as u64 + 1;
    eventually("each has one line", || (proxies.first.records().iter().filter(is_one).count() == stayed).then_some(()));
    let clients = clients.lock().unwrap();
    eventually("each client has been intercepted", || {
        let records = proxies.first.records();
        let known: BTreeSet<_> = records.iter().filter_map(|r| Some(r["client"].as_str()?.to_owned())).collect();
        clients.difference(&known).next().is_none().then_some(())
    });
    let (_, earlier) = proxies.others.split_last().unwrap();
    earlier.iter().for_each(|number| gone(*number));
    proxies.first.flows_end();
    let is_open = |tunnel: &Value| tunnel["over"] == false;
    eventually("the tunnels are over", || (!here.tunnels_of_proxy().iter().any(is_open)).then_some(()));
    proxies.stop();
    stop(host);
    let left = [&here.pins[0], &here.pins[1]].map(Pins::exist);
    assert_eq!(left, [false; 2], "a clean stop leaves nothing pinned");
    for family in ["-4", "-6"] {
        let rules = here.lab.forwarder.execute("ip", &[family, "rule"]).unwrap();
        assert!(!rules.contains("fwmark"), "what it has told the routes is taken back: {rules}");
    }
}

/// The next process has other listeners, in another order: each connection goes to the one that is for it, or past the proxy if
/// none is. The one after has none that intercepts, and asks for no proxy: nothing is left of that.
#[test]
#[ignore = "root"]
fn other_listeners_in_another_order() {
    let here = setting();
    let mut proxies = Dynasty::of(here.start_with(&["--log-format", "json"]));
    let host = here.host();
    // which listener has served: its name has the port
    let check = |proxies: &Dynasty, gone: u16| {
        for (family, port) in all() {
            let clients = Mutex::default();
            here.lab.client.run(|| drop(visit(family, port, port == gone, &clients)));
            let client = clients.lock().unwrap().first().unwrap().clone();
            if port != gone {
                let line = eventually("its line", || {
                    proxies.first.records().into_iter().rev().find(|r| r["client"] == client.as_str())
                });
                assert!(line["name"].as_str().unwrap().ends_with(&format!(":{port}")), "{line}");
            }
        }
    };
    check(&proxies, 0);
    for gone in [PLAIN[0], ASKED[0], 0] {
        let configured = configuration();
        let mut parts: Vec<_> =
            configured.split("[[listener]]").skip(1).filter(|l| !l.contains(&format!(":{gone}\""))).collect();
        if gone != 0 {
            parts.reverse();
        }
        let parts: String = parts.into_iter().map(|part| format!("[[listener]]{part}")).collect();
        here.configure(&parts);
        proxies.upgrade(&[]);
        check(&proxies, gone);
    }
    here.configure(&listener("plug", "127.0.0.1:7990", "target = \"127.0.0.1:7991\""));
    proxies.upgrade(&[]);
    let clients = Mutex::default();
    all().into_iter().for_each(|(family, port)| here.lab.client.run(|| drop(visit(family, port, true, &clients))));
    proxies.first.flows_end();
    eventually("the tunnels are over", || (!here.tunnels_of_proxy().iter().any(|t| t["over"] == false)).then_some(()));
    proxies.stop();
    stop(host);
    assert_eq!([&here.pins[0], &here.pins[1]].map(Pins::exist), [false; 2], "a clean stop leaves nothing pinned");
}
