//! Rules that lead: through an upstream proxy, to a server of a pool, or straight to the target, as the first rule says that
//! matches; and upstream proxies with pools. Needs root and eBPF, and fails without; Debian package: curl.

use crate::{
    running::{AT_ONCE, Control, Pins, Running, Setting, eventually, is_reset, listener, round_trip},
    upstream::{FIRST, PORT, SECRET, UPSTREAM, head, ours_at},
};
use longsplice_lab::{
    Family,
    topology::{FORWARDER_TO_CLIENT, SERVER, SERVER_SECOND},
};
use serde_json::{Value, json};
use std::{
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpStream},
    thread,
};
use test_case::test_case;

/// Of servers of a pool; nothing listens at the first one.
pub const SERVERS: [u16; 3] = [7010, 7011, 7012];

fn front(family: Family) -> SocketAddr {
    FORWARDER_TO_CLIENT.port(family, PORT)
}

pub fn at(family: Family, port: u16) -> String {
    SERVER.port(family, port).to_string()
}

/// The same at the address of proxies and servers of pools, which is none of a target.
pub fn there(family: Family, port: u16) -> String {
    SERVER_SECOND.port(family, port).to_string()
}

/// Our program as the upstream proxy there.
pub fn ours(setting: &Setting, protocol: &str) -> (Pins, Running) {
    ours_at(setting, protocol, SERVER_SECOND)
}

/// A listener with these rules, an upstream proxy `up`, and a pool `db` whose first server is dead. `more`: further keys.
pub fn led(protocol: &str, family: Family, rules: &str, more: &str) -> String {
    let listener = listener(protocol, &front(family).to_string(), &format!("{AT_ONCE}\nrules = [\n{rules}\n]\n{more}"));
    let up = format!("[upstream.up]\nprotocol = \"socks5\"\nservers = \"{}\"\n{SECRET}\n", there(family, UPSTREAM));
    let servers = SERVERS.map(|port| there(family, port));
    format!(
        "[log]\nformat = \"json\"\n\n{listener}\n{up}resolve = false\n[pool.db]\nservers = {servers:?}\nfailures = 1\n"
    )
}

/// Asks for a target, and returns the stream, with the code of SOCKS or the status of HTTP.
pub fn ask(setting: &Setting, protocol: &str, family: Family, target: &str) -> (TcpStream, u16) {
    let mut stream = setting.connect(front(family));
    if protocol == "http" {
        write!(stream, "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n").unwrap();
        let status = head(&mut stream).split(' ').nth(1).unwrap().parse().unwrap();
        return (stream, status);
    }
    let (host, port) = target.rsplit_once(':').unwrap();
    let host = match host.trim_matches(['[', ']']).parse() {
        Ok(IpAddr::V4(ip)) => [&[1][..], &ip.octets()].concat(),
        Ok(IpAddr::V6(ip)) => [&[4][..], &ip.octets()].concat(),
        Err(_) => [&[3, host.len() as u8][..], host.as_bytes()].concat(),
    };
    let port = port.parse::<u16>().unwrap().to_be_bytes();
    stream.write_all(&[&[5, 1, 0, 5, 1, 0][..], &host, &port].concat()).unwrap();
    let mut answers = [0; 6];
    stream.read_exact(&mut answers).unwrap();
    let rest = if answers[5] == 4 { 16 + 2 } else { 4 + 2 };
    stream.read_exact(&mut [0; 18][..rest]).unwrap();
    (stream, answers[3].into())
}

fn is_granted(protocol: &str, code: u16) -> bool {
    code == if protocol == "http" { 200 } else { 0 }
}

/// Carries bytes there and back, spliced.
fn carries(proxy: &Running, stream: &mut TcpStream) {
    round_trip(stream, &vec![1; 100_000]);
    proxy.wait_flow("spliced");
    round_trip(stream, &(0..300_000).map(|n| (n % 251) as u8).collect::<Vec<_>>());
}

pub fn of(record: &Value, keys: [&str; 5]) -> [String; 5] {
    keys.map(|key| record[key].as_str().unwrap_or("-").to_owned())
}

pub const WAY: [&str; 5] = ["target", "server", "upstream", "pool", "member"];

/// The servers that there are echo.
pub fn servers(setting: &Setting, family: Family) {
    SERVERS[1..].iter().for_each(|port| setting.echo(SERVER_SECOND.port(family, *port)));
}

#[test_case("socks5", Family::V4; "socks v4")]
#[test_case("socks5", Family::V6; "socks v6")]
#[test_case("http", Family::V4; "http v4")]
#[test_case("http", Family::V6; "http v6")]
#[ignore = "root"]
fn the_first_rule_that_matches_leads(protocol: &str, family: Family) {
    let ip = SERVER.ip(family);
    let rules = format!(
        "{{ action = \"allow\", target = \"db.internal\", ports = 5432, pool = \"db\" }},
         {{ action = \"allow\", target = \"{ip}\", ports = 5432, pool = \"db\" }},
         {{ action = \"allow\", target = \"*.there\", upstream = \"up\" }},
         {{ action = \"allow\", target = \"{ip}\", ports = {}, upstream = \"up\" }},
         {{ action = \"allow\", target = \"{ip}\" }},
         {{ action = \"deny\" }},",
        PORT + 1
    );
    let setting = Setting::new(&led(protocol, family, &rules, ""));
    let (pins, mut upstream) = ours(&setting, "socks5");
    let mut proxy = setting.start();
    servers(&setting, family);
    [PORT, PORT + 1].iter().for_each(|port| setting.echo(SERVER.port(family, *port)));
    let [proxy_there, first, second] = [UPSTREAM, SERVERS[1], SERVERS[2]].map(|port| there(family, port));
    let [straight, by_address, of_db] = [PORT, PORT + 1, 5432].map(|port| at(family, port));
    for (target, want) in [
        // the name is none that anybody knows
        ("db.internal:5432", [&*first, "-", "db", &first]),
        (&of_db, [&second, "-", "db", &second]),
        (&format!("only.there:{PORT}"), [&proxy_there, "up", "-", "-"]),
        (&by_address, [&proxy_there, "up", "-", "-"]),
        (&straight, [&straight, "-", "-", "-"]),
    ] {
        let (mut stream, code) = ask(&setting, protocol, family, target);
        assert!(is_granted(protocol, code), "{target}: {code}");
        carries(&proxy, &mut stream);
        let flow = proxy.flow();
        assert_eq!((&flow["server"], &flow["target"]), (&want[0].into(), &target.into()), "{flow}");
        drop(stream);
        proxy.flows_end();
        let record = proxy.wait_record(&["\"closed\"", &format!("\"target\":\"{target}\"")]);
        assert_eq!(of(&record, WAY), [target, want[0], want[1], want[2], want[3]], "{record}");
        assert!(record["spliced_down"].as_u64() >= Some(300_000), "{record}");
        let said = proxy.client(&["rule", "10.77.1.2", target]);
        let wanted = match want {
            [_, "-", "-", _] => "allowed by rule",
            [_, "-", ..] => "allowed, to a server of pool db, by rule",
            _ => "allowed, through upstream proxy up, by rule",
        };
        assert!(said.contains(wanted), "{target}: {said}");
    }
    let there = upstream.records();
    assert_eq!(
        there.iter().map(|r| r["target"].as_str().unwrap()).collect::<Vec<_>>(),
        [&*format!("only.there:{PORT}"), &by_address]
    );
    assert!(!is_granted(protocol, ask(&setting, protocol, family, "db.internal:1").1));
    upstream.stop(&pins);
    proxy.stop(&setting.pins[0]);
}

/// The same for what is no connection of SOCKS: nothing else may go where only connections are led.
#[test]
#[ignore = "root"]
fn nothing_but_connections_is_led() {
    let (family, ip) = (Family::V4, SERVER.v4);
    let rules = format!(
        "{{ action = \"allow\", target = \"db.internal\", pool = \"db\" }},
         {{ action = \"allow\", target = \"of-a-port.internal\", ports = 5432, pool = \"db\" }},
         {{ action = \"allow\", target = \"{ip}\", upstream = \"up\" }},",
    );
    let more = "commands = [\"connect\", \"bind\", \"udp-associate\", \"resolve\"]";
    let setting = Setting::new(&led("socks5", family, &rules, more));
    let mut proxy = setting.start();
    let octets = ip.octets();
    for (command, host) in [
        (2, [&[1][..], &octets].concat()),
        (2, [&[3, 11][..], b"db.internal"].concat()),
        (0xf0, [&[3, 11][..], b"db.internal"].concat()),
        // whoever asks for an address has no port
        (0xf0, [&[3, 18][..], b"of-a-port.internal"].concat()),
        (0xf1, [&[1][..], &octets].concat()),
    ] {
        let mut stream = setting.connect(front(family));
        stream.write_all(&[&[5, 1, 0, 5, command, 0][..], &host, &[0, 80]].concat()).unwrap();
        let mut answers = Vec::new();
        stream.read_to_end(&mut answers).unwrap();
        assert_eq!(answers[..4], [5, 0, 5, 2], "{command:x} {host:?}");
    }
    let why = |record: &Value| record["refusal"].as_str().unwrap().contains("leads connections elsewhere");
    assert!(proxy.records().iter().all(why), "{:?}", proxy.records());
    // datagrams: an association is none of a target yet
    let mut stream = setting.connect(front(family));
    stream.write_all(&[5, 1, 0, 5, 3, 0, 1, 0, 0, 0, 0, 0, 0]).unwrap();
    let mut answers = [0; 12];
    stream.read_exact(&mut answers).unwrap();
    assert_eq!(answers[..4], [5, 0, 5, 0]);
    let to = SocketAddr::new(front(family).ip(), u16::from_be_bytes([answers[10], answers[11]]));
    let datagram = [&[0, 0, 0, 1][..], &octets, &[0, 53], b"question"].concat();
    let socket = setting.lab.client.run(|| std::net::UdpSocket::bind("0.0.0.0:0")).unwrap();
    socket.send_to(&datagram, to).unwrap();
    eventually("the datagram is dropped", || (proxy.count("proxy", "udp_denied") == 1).then_some(()));
    drop(stream);
    proxy.stop(&setting.pins[0]);
}

/// Requests of HTTP go each where its rule leads, also over one connection of a client.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn requests_are_led_one_by_one(family: Family) {
    let rules = format!(
        "{{ action = \"allow\", target = \"{0}\", path = \"/through*\", upstream = \"up\" }},
         {{ action = \"allow\", target = \"{0}\", path = \"/pool*\", pool = \"db\" }},
         {{ action = \"allow\", target = \"{0}\" }},",
        SERVER.ip(family)
    );
    let setting = Setting::new(&led("http", family, &rules, ""));
    let (pins, mut upstream) = ours(&setting, "socks5");
    let mut proxy = setting.start();
    for (host, port, name) in
        [(SERVER, PORT, "target"), (SERVER_SECOND, SERVERS[1], "first"), (SERVER_SECOND, SERVERS[2], "second")]
    {
        let listener = setting.listen(host.port(family, port));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                thread::spawn(move || {
                    while stream.peek(&mut [0]).is_ok_and(|n| n > 0) {
                        let host =
                            head(&mut stream).lines().find(|line| line.starts_with("Host: ")).unwrap().to_owned();
                        let reply = format!("{name} {host}\n");
                        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{reply}", reply.len()).unwrap();
                    }
                });
            }
        });
    }
    let mut curl = setting.lab.client.command("curl");
    curl.args(["-q", "-sS", "--max-time", "20", "-x", &format!("http://{}", front(family))]);
    let target = at(family, PORT);
    let paths = ["straight", "straight", "through", "through", "pool", "pool", "straight", "pool"];
    curl.args(paths.map(|path| format!("http://{target}/{path}")));
    let out = curl.output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    let by: Vec<_> = said.lines().map(|line| line.split_once(' ').unwrap()).collect();
    assert!(by.iter().all(|(_, host)| *host == format!("Host: {target}")), "{out:?}");
    let by: Vec<_> = by.iter().map(|(name, _)| *name).collect();
    assert_eq!(by, ["target", "target", "target", "target", "first", "first", "target", "second"], "{out:?}");
    let [proxy_there, first, second] = [UPSTREAM, SERVERS[1], SERVERS[2]].map(|port| there(family, port));
    let records = eventually("all lines", || Some(proxy.records()).filter(|records| records.len() == paths.len()));
    for (record, want) in records.iter().zip([
        [&*target, "-", "-", "-"],
        [&target, "-", "-", "-"],
        [&proxy_there, "up", "-", "-"],
        [&proxy_there, "up", "-", "-"],
        [&first, "-", "db", &first],
        [&first, "-", "db", &first],
        [&target, "-", "-", "-"],
        [&second, "-", "db", &second],
    ]) {
        assert_eq!(of(record, WAY), [&target, want[0], want[1], want[2], want[3]], "{record}");
    }
    assert_eq!(proxy.count("proxy", "reused"), 3, "a connection that goes another way is not used");
    assert_eq!(upstream.records().len(), 1);
    upstream.stop(&pins);
    proxy.stop(&setting.pins[0]);
}

/// Whoever uses a login gateway is led by the same rules, also by the name of the user.
#[test]
#[ignore = "root"]
fn a_login_gateway_leads_by_user() {
    let family = Family::V4;
    let rules =
        "{ action = \"allow\", users = \"ann\", target = \"db.internal\", pool = \"db\" }, { action = \"deny\" }";
    let setting = Setting::new(&led(
        "login",
        family,
        rules,
        "users = { ann = \"secret\", bob = \"secret\" }\nlogin = { free = true }",
    ));
    let mut proxy = setting.start();
    servers(&setting, family);
    for (user, may) in [("ann", true), ("bob", false)] {
        let mut stream = setting.connect(front(family));
        write!(stream, "{user}\nsecret\ndb.internal:5432\n").unwrap();
        let mut said = String::new();
        while !said.contains("connect to") && !said.contains("connected to") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            said.push(byte[0].into());
        }
        assert_eq!(said.contains("connected to"), may, "{said}");
        if may {
            while !said.ends_with('\n') {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                said.push(byte[0].into());
            }
            carries(&proxy, &mut stream);
            drop(stream);
            let record = proxy.wait_record(&["\"closed\""]);
            let first = there(family, SERVERS[1]);
            assert_eq!(of(&record, WAY), ["db.internal:5432", &first, "-", "db", &first], "{record}");
        }
    }
    proxy.stop(&setting.pins[0]);
}

/// A place at a server of a pool is taken up to the end of the connection, and others wait for it.
#[test]
#[ignore = "root"]
fn places_at_servers_are_waited_for() {
    let family = Family::V4;
    let rules = "{ action = \"allow\", target = \"db.internal\", pool = \"db\" }";
    let text = led("socks5", family, rules, "") + "max_connections = 1\nqueue_wait = 60\n";
    let setting = Setting::new(&text);
    let mut proxy = setting.start();
    servers(&setting, family);
    let mut first: Vec<_> = (0..2).map(|_| ask(&setting, "socks5", family, "db.internal:1").0).collect();
    first.iter_mut().for_each(|stream| round_trip(stream, b"hello"));
    thread::scope(|scope| {
        let third = scope.spawn(|| ask(&setting, "socks5", family, "db.internal:1"));
        let waits = || {
            let pools: Value = serde_json::from_str(&proxy.client(&["pools", "--json"])).unwrap();
            (pools[0]["waiting"] == 1).then_some(())
        };
        eventually("it waits", waits);
        first.clear();
        let (mut stream, code) = third.join().unwrap();
        assert_eq!(code, 0);
        round_trip(&mut stream, b"hello");
    });
    proxy.stop(&setting.pins[0]);
}

/// The states and counts of a pool's servers.
fn members(proxy: &Running) -> Vec<(String, u64)> {
    let pools: Value = serde_json::from_str(&proxy.client(&["pools", "--json"])).unwrap();
    let members = pools.as_array().unwrap().iter().flat_map(|pool| pool["members"].as_array().unwrap());
    members.map(|m| (m["state"].as_str().unwrap().to_owned(), m["failed"].as_u64().unwrap())).collect()
}

/// A plug through a pool of proxies at these ports. `of_pool`: further keys of the pool.
fn proxies(protocol: &str, family: Family, ports: &[u16], of_pool: &str) -> String {
    let own = listener("socks5", &front(family).to_string(), &format!("upstream = \"up\"\n{AT_ONCE}"));
    let up = format!("[upstream.up]\nprotocol = \"{protocol}\"\n{SECRET}\npool = \"proxies\"\n");
    let servers: Vec<String> = ports.iter().map(|port| there(family, *port)).collect();
    format!("[log]\nformat = \"json\"\n\n{own}\n{up}[pool.proxies]\nservers = {servers:?}\n{of_pool}\n")
}

/// Answers each client of this port as it is told here, and closes.
fn rude(setting: &Setting, family: Family, port: u16, answer: &'static [u8]) {
    let listener = setting.listen(SERVER_SECOND.port(family, port));
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            thread::spawn(move || {
                let _ = stream.write_all(answer);
                let _ = stream.shutdown(std::net::Shutdown::Write);
                let _ = stream.read_to_end(&mut Vec::new());
            });
        }
    });
}

#[test_case("socks5", Family::V4; "socks v4")]
#[test_case("socks5", Family::V6; "socks v6")]
#[test_case("http", Family::V4; "http v4")]
#[test_case("http", Family::V6; "http v6")]
#[ignore = "root"]
fn proxies_share_the_load_and_stand_in_for_each_other(protocol: &str, family: Family) {
    // the first one is dead; both others are the same program, which speaks SOCKS at the second port
    let ports = [9, UPSTREAM, FIRST];
    let ports = if protocol == "socks5" { &ports[..] } else { &ports[..2] };
    let setting = Setting::new(&proxies(protocol, family, ports, "failures = 2\nout = 3600"));
    let (pins, mut upstream) = ours(&setting, protocol);
    let mut proxy = setting.start();
    setting.echo(SERVER.port(family, PORT));
    let target = at(family, PORT);
    for n in 1..=6 {
        let (mut stream, code) = ask(&setting, "socks5", family, &target);
        assert_eq!(code, 0);
        carries(&proxy, &mut stream);
        drop(stream);
        eventually("its line", || (proxy.records().len() == n).then_some(()));
        proxy.flows_end();
    }
    let members = members(&proxy);
    assert_eq!(members[0], ("out".to_owned(), 2));
    assert!(members[1..].iter().all(|member| *member == ("up".to_owned(), 0)), "{members:?}");
    let mut used: Vec<String> = Vec::new();
    for record in proxy.records() {
        let [of_target, server, up, pool, member] = of(&record, WAY);
        assert_eq!([&*of_target, &server, &up, &pool], [&target, &member, "up", "proxies"], "{record}");
        used.push(member);
    }
    used.sort();
    used.dedup();
    assert_eq!(used.len(), ports.len() - 1, "{used:?}");
    assert_eq!(proxy.count("proxy", "retries"), 2);
    upstream.stop(&pins);
    proxy.stop(&setting.pins[0]);
}

/// What a proxy answers about a target reaches the client, and tells nothing of the proxy, however often it is asked.
#[test_case("socks5", &[5, 0, 5, 5, 0, 1, 0, 0, 0, 0, 0, 0], 5, 0; "refused")]
#[test_case("socks5", &[5, 0, 5, 2, 0, 1, 0, 0, 0, 0, 0, 0], 2, 0; "not allowed")]
#[test_case("socks5", &[5, 0, 5, 1, 0, 1, 0, 0, 0, 0, 0, 0], 1, 1; "general failure")]
#[test_case("socks5", &[5, 0, 5, 8, 0, 1, 0, 0, 0, 0, 0, 0], 1, 1; "another family")]
#[test_case("socks5", &[5, 0], 1, 1; "closed on the request")]
#[test_case("http", b"HTTP/1.1 502 No\r\n\r\n", 4, 0; "bad gateway")]
#[test_case("http", b"HTTP/1.1 503 No\r\n\r\n", 4, 1; "unavailable")]
#[test_case("http", b"HTTP/1.1 407 No\r\n\r\n", 2, 1; "another login")]
#[test_case("http", b"", 1, 1; "closed")]
#[ignore = "root"]
fn targets_take_no_proxy_out(protocol: &str, answer: &'static [u8], reply: u16, retries: u64) {
    let family = Family::V4;
    let setting = Setting::new(&proxies(protocol, family, &[UPSTREAM, FIRST], "failures = 1"));
    let mut proxy = setting.start();
    [UPSTREAM, FIRST].iter().for_each(|port| rude(&setting, family, *port, answer));
    for n in 1..=5 {
        let (_, code) = ask(&setting, "socks5", family, &at(family, PORT));
        assert_eq!(code, reply);
        assert_eq!(proxy.count("proxy", "retries"), retries * n);
    }
    assert_eq!(members(&proxy), [("up".to_owned(), 0), ("up".to_owned(), 0)]);
    proxy.stop(&setting.pins[0]);
}

/// A proxy that cannot do what the next one does has failed, unless a target may be the cause.
#[test_case("socks5", &[5, 0], "up"; "closed on the request")]
#[test_case("socks5", &[5, 0, 4, 0], "up"; "another version for the request")]
#[test_case("socks5", &[5, 0xff], "out"; "no login")]
#[test_case("socks5", &[5, 2, 1, 1], "out"; "a wrong password")]
#[test_case("socks5", b"SSH-2.0-x\r\n", "out"; "another protocol")]
#[test_case("socks5", &[5, 0, 5, 1, 0, 1, 0, 0, 0, 0, 0, 0], "up"; "general failure")]
#[test_case("http", b"", "up"; "closed")]
#[test_case("http", b"HTTP/1.1 407 No\r\n\r\n", "up"; "another login")]
#[test_case("http", b"HTTP/1.1 503 No\r\n\r\n", "up"; "unavailable")]
#[test_case("http", b"SSH-2.0-x\r\n\r\n", "out"; "no http")]
#[ignore = "root"]
fn the_next_proxy_shows_what_is_wrong(protocol: &str, answer: &'static [u8], state: &str) {
    let family = Family::V4;
    let setting = Setting::new(&proxies(protocol, family, &[PORT + 1, UPSTREAM], "failures = 1\nout = 3600"));
    let (pins, mut upstream) = ours(&setting, protocol);
    let mut proxy = setting.start();
    rude(&setting, family, PORT + 1, answer);
    setting.echo(SERVER.port(family, PORT));
    let (mut stream, code) = ask(&setting, "socks5", family, &at(family, PORT));
    assert_eq!(code, 0);
    carries(&proxy, &mut stream);
    drop(stream);
    let members = members(&proxy);
    assert_eq!(members, [(state.to_owned(), u64::from(state == "out")), ("up".to_owned(), 0)]);
    upstream.stop(&pins);
    proxy.stop(&setting.pins[0]);
}

/// A target that nobody answers for costs the client its time, and no proxy its place.
#[test_case("socks5", &[5, 0], "up"; "after the greeting")]
#[test_case("socks5", b"", "out"; "before the greeting")]
#[test_case("http", b"", "up"; "http")]
#[ignore = "root"]
fn silent_proxies(protocol: &str, answer: &'static [u8], state: &str) {
    let family = Family::V4;
    let setting = Setting::new(
        &proxies(protocol, family, &[UPSTREAM], "failures = 1\nout = 3600")
            .replace(AT_ONCE, &format!("{AT_ONCE}\nlimits = {{ connect = 1 }}")),
    );
    let listener = setting.listen(SERVER_SECOND.port(family, UPSTREAM));
    thread::spawn(move || {
        let mut all = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.write_all(answer).unwrap();
            all.push(stream);
        }
    });
    let mut proxy = setting.start();
    let (_, code) = ask(&setting, "socks5", family, &at(family, PORT));
    assert_eq!(code, 6);
    assert_eq!(members(&proxy)[0].0, state);
    proxy.stop(&setting.pins[0]);
}

/// A check talks to proxies as the page says, and finds the one that is none.
#[test]
#[ignore = "root"]
fn proxies_are_checked() {
    let family = Family::V4;
    let check = "check = { send = '\\x05\\x01\\x02', expect = '^\\x05\\x02', interval = 0.1, fall = 1, rise = 1 }";
    let setting = Setting::new(&proxies("socks5", family, &[PORT + 1, UPSTREAM], check));
    let (pins, mut upstream) = ours(&setting, "socks5");
    rude(&setting, family, PORT + 1, b"SSH-2.0-x\r\n");
    let mut proxy = setting.start();
    eventually("it is down", || (members(&proxy)[0].0 == "down" && members(&proxy)[1].0 == "up").then_some(()));
    setting.echo(SERVER.port(family, PORT));
    for _ in 0..3 {
        let (mut stream, code) = ask(&setting, "socks5", family, &at(family, PORT));
        assert_eq!(code, 0);
        round_trip(&mut stream, b"hello");
    }
    assert_eq!(proxy.count("proxy", "retries"), 0);
    upstream.stop(&pins);
    proxy.stop(&setting.pins[0]);
}

/// A pool behind another proxy, and one that leads to another proxy.
#[test_case(true; "the near one has the pool")]
#[test_case(false; "the far one has the pool")]
#[ignore = "root"]
fn chains_with_a_pool(near: bool) {
    let family = Family::V6;
    let own = listener("socks5", &front(family).to_string(), &format!("upstream = \"far\"\n{AT_ONCE}"));
    let servers = |port: u16, has_pool: bool| match has_pool {
        true => "pool = \"proxies\"".to_owned(),
        false => format!("servers = \"{}\"", there(family, port)),
    };
    let far =
        format!("[upstream.far]\nprotocol = \"http\"\n{SECRET}\n{}\nthrough = \"near\"\n", servers(UPSTREAM, !near));
    let next = format!("[upstream.near]\nprotocol = \"socks5\"\n{SECRET}\n{}\n", servers(FIRST, near));
    let both = [9, if near { FIRST } else { UPSTREAM }].map(|port| there(family, port));
    let pool = format!("[pool.proxies]\nservers = {both:?}\nfailures = 1\nout = 3600\n");
    let setting = Setting::new(&format!("[log]\nformat = \"json\"\n\n{own}\n{far}{next}{pool}"));
    let (pins, mut upstream) = ours(&setting, "http");
    let mut proxy = setting.start();
    setting.echo(SERVER.port(family, PORT));
    for _ in 0..2 {
        let (mut stream, code) = ask(&setting, "socks5", family, &at(family, PORT));
        assert_eq!(code, 0);
        carries(&proxy, &mut stream);
        drop(stream);
        proxy.flows_end();
    }
    let record = proxy.wait_record(&["\"closed\""]);
    assert_eq!(of(&record, WAY), [&at(family, PORT), &there(family, FIRST), "far", "proxies", &both[1]], "{record}");
    assert_eq!(members(&proxy), [("out".to_owned(), 1), ("up".to_owned(), 0)]);
    upstream.stop(&pins);
    proxy.stop(&setting.pins[0]);
}

/// A name that is looked up here, and led by its address: that is known up to the end, whatever the proxy's own address is.
#[test_case("upstream = \"up\"\n", ""; "by the listener")]
#[test_case("", ", upstream = \"up\""; "by a rule")]
#[ignore = "root"]
fn names_that_are_led_by_their_addresses(of_listener: &str, of_rule: &str) {
    let family = Family::V4;
    // the address of localhost is that of the proxy's own host, and the echo server is there as well
    let rules = |first: &str| {
        format!("{first}{{ action = \"allow\", target = \"127.0.0.1\"{of_rule} }}, {{ action = \"deny\" }}")
    };
    let configured =
        |first: &str| led("socks5", family, &rules(first), of_listener).replace("resolve = false", "resolve = true");
    let setting = Setting::new(&configured(""));
    let (pins, mut upstream) = ours(&setting, "socks5");
    let mut proxy = setting.start();
    let (_, code) = ask(&setting, "socks5", family, &format!("localhost:{PORT}"));
    assert_eq!(code, 2, "the proxy there does not allow its own host");
    let record = upstream.wait_record(&["denied"]);
    assert_eq!(record["target"], format!("127.0.0.1:{PORT}"), "{record}");
    let said = proxy.client(&["rule", "10.77.1.2", &format!("localhost:{PORT}"), "--json"]);
    let said: Value = serde_json::from_str(&said).unwrap();
    let led = said["decided"].as_array().unwrap().iter().find(|one| one["allowed"] == true).unwrap().clone();
    assert_eq!((&led["upstream"], &led["rule"]), (&"up".into(), &1.into()), "{said}");
    upstream.stop(&pins);
    proxy.stop(&setting.pins[0]);
}

/// A proxy of a pool to which this listener cannot go may be there for others.
#[test]
#[ignore = "root"]
fn proxies_that_lead_back() {
    let family = Family::V4;
    let text = proxies("socks5", family, &[PORT, UPSTREAM], "failures = 1\nout = 3600");
    let setting = Setting::new(&text.replace(&there(family, PORT), &front(family).to_string()));
    let (pins, mut upstream) = ours(&setting, "socks5");
    let mut proxy = setting.start();
    setting.echo(SERVER.port(family, PORT));
    let (mut stream, code) = ask(&setting, "socks5", family, &at(family, PORT));
    assert_eq!(code, 0);
    carries(&proxy, &mut stream);
    drop(stream);
    assert_eq!(members(&proxy), [("up".to_owned(), 0), ("up".to_owned(), 0)]);
    assert_eq!(proxy.count("proxy", "retries"), 1);
    upstream.stop(&pins);
    proxy.stop(&setting.pins[0]);
}

/// A way back to the listener by way of its own rules is a loop.
#[test]
#[ignore = "root"]
fn pools_that_lead_back() {
    let family = Family::V4;
    let plug = listener(
        "plug",
        &front(family).to_string(),
        &format!("target = \"{}\"\nrules = [{{ action = \"allow\", pool = \"own\" }}]", at(family, PORT)),
    );
    let other = FORWARDER_TO_CLIENT.port(family, PORT + 1);
    let back = listener("plug", &other.to_string(), &format!("target = \"{}\"", front(family)));
    let pool = format!("[pool.own]\nservers = [\"{other}\"]\n");
    let setting = Setting::new(&format!("[log]\nformat = \"json\"\n\n{plug}\n{back}\n{pool}"));
    let mut proxy = setting.start();
    for at in [front(family), other] {
        assert!(setting.lab.client.run(|| is_reset(at)));
        let record = proxy.wait_record(&["denied"]);
        assert!(record["refusal"].as_str().unwrap().contains("leads back"), "{record}");
    }
    let mut control = Control::of(&proxy);
    let rule = json!({ "version": 1, "ask": "rule", "client": "10.77.1.2", "target": at(family, PORT) });
    assert_eq!(control.ask(&rule).unwrap()["decided"][0]["pool"], "own");
    drop(control);
    proxy.stop(&setting.pins[0]);
}
