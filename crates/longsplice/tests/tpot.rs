//! Translucent proxying through the real program: `longsplice tpot host` on the client's host, and a listener of
//! `protocol = "tpot"` on its route. Needs root and eBPF.

use crate::running::{
    AT_ONCE, LONGSPLICE, Pins, eventually, round_trip,
    translucent::{
        FILE_SERVER, PATIENCE, PORT, SECOND_PORT, listeners, service, stop, translucent, translucent_at,
        translucent_with, transparent,
    },
};
use longsplice_lab::{ChildGuard, Family, Lab, Namespace, Options, Shape, topology};
use serde_json::Value;
use std::{
    fs,
    io::{self, ErrorKind, Read, Write},
    net::{IpAddr, SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt,
    process::{Command, Output},
    thread,
    time::Duration,
};
use test_case::test_case;

#[test]
#[ignore = "root"]
fn programs_that_know_nothing_of_it() {
    let here = translucent();
    let (mut proxy, host) = (here.start(), here.host());
    let site = tempfile::tempdir().unwrap();
    let file: Vec<u8> = (0..20_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(site.path().join("file"), &file).unwrap();
    for family in Family::BOTH {
        let at = topology::SERVER.port(family, PORT);
        let mut server = here.lab.server.command("python3");
        server.args(["-c", FILE_SERVER, &at.ip().to_string(), &PORT.to_string()]).current_dir(site.path());
        let _server = ChildGuard::spawn(&mut server).unwrap();
        here.lab.server.wait_listening(PORT, PATIENCE).unwrap();
        let mut curl: Command = here.lab.client.command("curl");
        let got = curl.args(["-sS", "--max-time", "20", "-g", &format!("http://{at}/file")]).output().unwrap();
        assert!(got.status.success() && got.stdout == file, "{}", String::from_utf8_lossy(&got.stderr));
        let line = proxy.wait_line(&[&at.to_string()]);
        assert!(line.contains("tpot") && line.contains(" splices=1 "), "{line}");
        let tunnels = here.tunnels();
        let ours = tunnels.iter().find(|t| t["remote"] == at.to_string()).unwrap_or_else(|| panic!("{tunnels:?}"));
        assert_eq!((&ours["role"], &ours["over"]), (&"asker".into(), &true.into()), "{ours}");
    }
    assert!(stop(host).contains("opened: 2"));
    assert_eq!(["intercepted", "opened"].map(|name| proxy.count("tpot", name)), [2, 2]);
    proxy.shut_down();
}

/// A host and a proxy that want tunnels in UDP have them, and the list shows it.
#[test]
#[ignore = "root"]
fn tunnels_in_udp() {
    let here = translucent_with(&(listeners(PORT, AT_ONCE) + "[tpot]\nudp = \"fallback\"\n"));
    let trusted = ["--proxy", "10.77.0.0/16", "--proxy", "fd77::/16"];
    let (proxy, host) = (here.start(), here.host_that_trusts(&[&trusted[..], &["--udp", "always"]].concat()));
    for family in Family::BOTH {
        let at = topology::SERVER.port(family, PORT);
        here.echo(at);
        let mut stream = here.connect(at);
        round_trip(&mut stream, b"hello");
        let tunnels = here.tunnels();
        let ours = tunnels.iter().find(|t| t["remote"] == at.to_string()).unwrap_or_else(|| panic!("{tunnels:?}"));
        assert_eq!((&ours["udp"], &ours["over"]), (&true.into(), &false.into()), "{ours}");
        let list = here.lab.client.command(LONGSPLICE).args(["tpot", "ls"]).output().unwrap();
        let list = String::from_utf8(list.stdout).unwrap();
        assert!(list.lines().any(|l| l.contains(&at.to_string()) && l.contains(" in UDP ")), "{list}");
    }
    assert_eq!(["opened", "opened-udp"].map(|name| proxy.count("tpot", name)), [2, 2]);
    assert!(stop(host).contains("opened-udp: 2"));
    let wrong = Command::new(LONGSPLICE).args(["tpot", "host", "--port", "80", "--udp", "yes"]).output().unwrap();
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("write never, fallback or always"), "{wrong:?}");
}

/// `longsplice doctor` says whether tunnels pass.
#[test]
#[ignore = "root"]
fn doctor_probes_the_tunnel() {
    let here = translucent();
    let (_proxy, _host) = (here.start(), here.host());
    let doctor = |family, port| {
        let named = format!("{},{}", topology::FORWARDER_TO_CLIENT.ip(family), topology::SERVER.port(family, port));
        let output =
            here.lab.client.command(LONGSPLICE).args(["doctor", "--json", "--tunnel", &named]).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let ours = |c: &&Value| c["name"] == "tunnel" || c["name"] == "asking";
        let checks = report["checks"].as_array().unwrap().iter().filter(ours);
        let states: Vec<_> = checks.map(|c| c["state"].as_str().unwrap().to_owned()).collect();
        assert!(!states.is_empty(), "{output:?}");
        states
    };
    // both families at once, since most of the time is waited for answers
    let both = |port, want: &[&str], why: &str| {
        let doctor = &doctor;
        thread::scope(|s| {
            let all = Family::BOTH.map(|family| s.spawn(move || doctor(family, port)));
            all.map(|states| assert_eq!(states.join().unwrap(), want, "{why}"))
        });
    };
    both(PORT, &["ok", "ok", "ok"], "all passes");
    both(9, &["warning", "warning"], "nothing is intercepted there");
    let rules = |hook, what| format!("table inet t {{ chain c {{ type filter hook {hook} priority 0; {what}; }}; }}");
    let behind = |at: &Namespace, rules: String, want: &[&str]| {
        at.execute("nft", &[&rules]).unwrap();
        both(PORT, want, &rules);
        at.execute("nft", &["delete table inet t"]).unwrap();
    };
    let (ip, udp, all) = ("meta l4proto { 4, 41 }", "udp dport 6080", "meta l4proto { 4, 17, 41 }");
    for (what, want) in [(ip, &["ok", "note", "ok"][..]), (udp, &["ok", "ok", "note"]), (all, &["ok", "note", "note"])]
    {
        // programs of tc see what the host's own firewall does not
        behind(&here.lab.client, rules("input", format!("{what} drop")), &["ok", "ok", "ok"]);
        behind(&here.lab.client, rules("output", format!("{what} drop")), want);
    }
    for (what, want) in
        [(ip, &["warning", "warning", "ok"][..]), (udp, &["ok", "ok", "note"]), (all, &["warning", "warning"])]
    {
        let on_the_way = |way| {
            format!("table netdev t {{ chain c {{ type filter hook {way} device c0 priority 0; {what} drop; }}; }}")
        };
        here.lab.client.execute("nft", &[&on_the_way("ingress")]).unwrap();
        both(PORT, want, what);
        here.lab.client.execute("nft", &["delete table netdev t"]).unwrap();
    }
    // a usual firewall on the proxy
    let usual =
        "policy drop; ct state established accept; meta l4proto { icmp, ipv6-icmp } accept; tcp dport 22 accept";
    behind(&here.lab.forwarder, rules("input", usual.into()), &["warning", "ok", "ok"]);
    let right = format!("{usual}; tcp dport {PORT} accept");
    behind(&here.lab.forwarder, rules("input", right), &["ok", "ok", "ok"]);
}

/// The policy of the firewall holds for connections that ask for a proxy, unless the listener has rules of its own.
#[test]
#[ignore = "root"]
fn the_firewalls_forward_policy() {
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).unwrap();
    let allow = "rules = [{ action = \"allow\" }]\n";
    let both = listeners(PORT, AT_ONCE) + &listeners(SECOND_PORT, &(allow.to_owned() + AT_ONCE));
    let here = translucent_at(lab, &both);
    let (proxy, _host) = (here.start(), here.host());
    let serving =
        Family::BOTH.map(|family| [PORT, SECOND_PORT].map(|port| here.listen(topology::SERVER.port(family, port))));
    let connects = |family, port| {
        let at = topology::SERVER.port(family, port);
        here.lab.client.run(|| TcpStream::connect_timeout(&at, Duration::from_secs(10))).is_ok()
    };
    for family in Family::BOTH {
        assert!(connects(family, PORT) && connects(family, SECOND_PORT), "{family:?}");
    }
    assert_eq!(proxy.count("tpot", "opened"), 4);
    let policy = "table inet t { chain guard { type filter hook forward priority 0; policy drop; }; }";
    here.lab.forwarder.execute("nft", &[policy]).unwrap();
    let says = || proxy.messages().matches("the firewall's chain guard drops what is forwarded").count();
    eventually("both listeners without rules stop", || (says() == 2).then_some(()));
    for family in Family::BOTH {
        eventually("it is left alone", || (!connects(family, PORT)).then_some(()));
        assert!(connects(family, SECOND_PORT), "{family:?}: its rules say so");
    }
    here.lab.forwarder.execute("nft", &["delete table inet t"]).unwrap();
    for family in Family::BOTH {
        let opened = proxy.count("tpot", "opened");
        eventually("it is intercepted again", || {
            connects(family, PORT).then(|| proxy.count("tpot", "opened")).filter(|now| *now > opened)
        });
    }
    drop(serving);
}

/// Requests and names are read of intercepted connections: for rules and the log. They go to the server that the client wants,
/// whichever host it names. The same for hosts that do not ask.
#[test_case(true; "of hosts that ask")]
#[test_case(false; "of hosts that know nothing")]
#[ignore = "root"]
fn http_and_tls_inside(asks: bool) {
    let rules = "rules = [{ action = \"deny\", target = \"bad.test\" }";
    let of_http = format!("{rules}, {{ action = \"deny\", path = \"/secret/*\" }}]\n{AT_ONCE}");
    let of_tls = format!("{rules}]\n{AT_ONCE}");
    let of = |port, protocol, more: &str| match asks {
        true => listeners(port, &format!("inside = \"{protocol}\"\n{more}")),
        false => transparent(protocol, port, more),
    };
    let here = translucent_with(&(of(PORT, "http", &of_http) + &of(SECOND_PORT, "tls", &of_tls)));
    let (mut proxy, host) = (here.start(), asks.then(|| here.host()));
    let site = tempfile::tempdir().unwrap();
    let file: Vec<u8> = (0..20_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(site.path().join("file"), &file).unwrap();
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"])
        .args(["-keyout", "key", "-out", "certificate", "-subj", "/CN=test"])
        .current_dir(site.path())
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let serve = |at: SocketAddr, certificate: &[&str]| {
        let mut server = here.lab.server.command("python3");
        server.args(["-c", FILE_SERVER, &at.ip().to_string(), &at.port().to_string()]).args(certificate);
        let server = ChildGuard::spawn(server.current_dir(site.path())).unwrap();
        here.lab.server.wait_listening(at.port(), PATIENCE).unwrap();
        server
    };
    let curl = |arguments: &[&str]| -> Output {
        let mut curl: Command = here.lab.client.command("curl");
        curl.args(["-sSgk", "--max-time", "20"]).args(arguments).output().unwrap()
    };
    for family in Family::BOTH {
        let at = topology::SERVER.port(family, PORT);
        let _server = serve(at, &[]);
        // two requests on one connection, for hosts that have nothing to do with the address
        let (file_at, missing) = (format!("http://{at}/file"), format!("http://{at}/none"));
        let got = curl(&["-HHost: good.test", &file_at, "--next", "-sS", "-o/dev/null", &missing]);
        assert!(got.status.success() && got.stdout == file, "{}", String::from_utf8_lossy(&got.stderr));
        proxy.wait_line(&["http", "good.test:7000", &at.to_string(), "GET", "200"]);
        proxy.wait_line(&[&at.to_string(), "GET", "404"]);
        for denied in [["-HHost: bad.test", &file_at], ["-HHost: good.test", &format!("http://{at}/secret/1")]] {
            let got = curl(&[&["-o/dev/null", "-w%{http_code}"], &denied[..]].concat());
            assert_eq!(String::from_utf8_lossy(&got.stdout), "403", "{denied:?}");
        }
        // the server would serve a CONNECT's target to everybody
        let got = curl(&["-p", "-x", &format!("http://{at}"), "http://other.test/"]);
        assert!(String::from_utf8_lossy(&got.stderr).contains("501"), "{got:?}");

        let at = topology::SERVER.port(family, SECOND_PORT);
        let _server = serve(at, &["certificate", "key"]);
        for (name, allowed) in [("good.test", true), ("bad.test", false)] {
            let resolve = format!("{name}:{SECOND_PORT}:{}", at.ip());
            let got = curl(&["--resolve", &resolve, &format!("https://{name}:{SECOND_PORT}/file")]);
            assert_eq!(got.status.success() && got.stdout == file, allowed, "{}", String::from_utf8_lossy(&got.stderr));
        }
        proxy.wait_line(&["tls", "good.test:7001", &at.to_string()]);
        proxy.wait_line(&["tls", "bad.test:7001", "denied"]);
        // a client that names no server
        let got = curl(&[&format!("https://{at}/file")]);
        assert!(got.status.success() && got.stdout == file, "{}", String::from_utf8_lossy(&got.stderr));
    }
    let counters = proxy.counters();
    assert!(counters["proxy"]["replies_spliced"].as_u64() >= Some(2), "{counters}");
    let spliced = |i: usize| counters["listeners"][i]["spliced"].as_u64().unwrap();
    assert_eq!([2, 3].map(spliced), [2, 2], "{counters}");
    host.map(stop);
    proxy.shut_down();
}

/// Replies are served from a cache without a connection to the server, but only to clients of the server that sent them: a
/// client can name any host, whichever server it connects to.
#[test]
#[ignore = "root"]
fn replies_from_a_cache() {
    let cache = tempfile::tempdir().unwrap();
    let cached = format!("inside = \"http\"\ncache = {{ dir = \"{}\" }}\n{AT_ONCE}", cache.path().display());
    let here = translucent_with(&listeners(PORT, &cached));
    let (proxy, host) = (here.start(), here.host());
    let count = |name| proxy.count("proxy", name);
    for (n, family) in (1..).zip(Family::BOTH) {
        let at = topology::SERVER.port(family, PORT);
        let body: Vec<u8> = at.to_string().into_bytes().repeat(200_000);
        let head = format!("Cache-Control: max-age=600\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
        let answer = [b"HTTP/1.1 200 OK\r\n", head.as_bytes(), &body].concat();
        let listener = here.listen(at);
        // answers one request; then nobody can connect
        let server = here.lab.server.spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
            stream.write_all(&answer).unwrap();
        });
        let get = || {
            let mut curl: Command = here.lab.client.command("curl");
            let got =
                curl.args(["-sSg", "--max-time", "20", "-HHost: same.test", &format!("http://{at}/file")]).output();
            let got = got.unwrap();
            assert!(got.status.success() && got.stdout == body, "{}", String::from_utf8_lossy(&got.stderr));
        };
        get();
        server.join().unwrap();
        eventually("stored", || (count("cache_stored") == n).then_some(()));
        get();
        assert_eq!((count("cache_hits"), count("cache_misses")), (n, n));
    }
    stop(host);
}

/// The server sees the proxy's address, and is told the client's if it wants to know.
#[test]
#[ignore = "root"]
fn servers_are_told_the_client() {
    let here = translucent_with(&listeners(PORT, "proxy_protocol = { send = \"v2\" }"));
    let (_proxy, _host) = (here.start(), here.host());
    for family in Family::BOTH {
        let at = topology::SERVER.port(family, PORT);
        let server = here.listen(at);
        let mut client = here.connect(at);
        client.write_all(b"hello").unwrap();
        let (mut accepted, from) = server.accept().unwrap();
        let [proxies, ours] =
            [topology::FORWARDER_TO_SERVER, topology::FORWARDER_TO_SERVER_SECOND].map(|a| a.ip(family));
        assert!([proxies, ours].contains(&from.ip()), "{from}");
        accepted.set_read_timeout(Some(PATIENCE)).unwrap();
        let own = client.local_addr().unwrap();
        let addresses = match (own.ip(), at.ip()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => [a.octets(), b.octets()].concat(),
            (IpAddr::V6(a), IpAddr::V6(b)) => [a.octets(), b.octets()].concat(),
            _ => unreachable!("one family"),
        };
        let mut want = b"\r\n\r\n\0\r\nQUIT\n\x21".to_vec();
        want.extend([if own.is_ipv4() { 0x11 } else { 0x21 }, 0, addresses.len() as u8 + 4]);
        want.extend(addresses);
        want.extend([own.port().to_be_bytes(), at.port().to_be_bytes()].concat());
        want.extend(b"hello");
        let mut got = vec![0; want.len()];
        accepted.read_exact(&mut got).unwrap();
        assert_eq!(got, want);
    }
}

/// Clients that do not read hold their servers back, long before the proxy has much in its buffers.
#[test]
#[ignore = "root"]
fn buffers_are_bounded_and_shown() {
    const QUEUE: usize = 128 << 10;
    const CLIENTS: usize = 32; // the kernel counts memory to one megabyte for each processor
    let here = translucent_with(&listeners(PORT, "policy = { splice = \"never\" }"));
    for machine in [&here.lab.client, &here.lab.forwarder, &here.lab.server] {
        for name in ["tcp_rmem", "tcp_wmem"] {
            machine.execute("sysctl", &["-qw", &format!("net.ipv4.{name}=4096 {QUEUE} {QUEUE}")]).unwrap();
        }
    }
    let (proxy, _host) = (here.start(), here.host());
    for family in Family::BOTH {
        let at = topology::SERVER.port(family, PORT);
        let server = here.listen(at);
        let fill = || {
            let mut client = here.connect(at);
            client.write_all(b"go").unwrap();
            let mut accepted = server.accept().unwrap().0;
            accepted.read_exact(&mut [0; 2]).unwrap();
            accepted.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
            let (mut sent, block) = (0, [7; 4096]);
            while let Ok(n) = accepted.write(&block) {
                sent += n;
                assert!(sent < 6 * QUEUE, "two connections have four queues, and the proxy has a buffer");
            }
            assert!(sent > QUEUE);
            (client, accepted, sent as u64)
        };
        let all: Vec<_> = thread::scope(|s| {
            let filled: Vec<_> = (0..CLIENTS).map(|_| s.spawn(fill)).collect();
            filled.into_iter().map(|f| f.join().unwrap()).collect()
        });
        let sum = all.iter().map(|(_, _, sent)| sent).sum::<u64>();
        assert!(proxy.count("proxy", "tcp_memory") > sum / 2);
        let clients: Vec<_> = all.into_iter().map(|(client, ..)| client).collect(); // the servers close
        let read = clients.into_iter().map(|mut client| io::copy(&mut client, &mut io::sink()).unwrap());
        assert_eq!(read.sum::<u64>(), sum);
    }
}

#[test]
#[ignore = "root"]
fn a_service_of_systemd() {
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let _pins = Pins::of_tpot(&lab.client);
    service("host", &lab.client, &[], "asking for proxies");
}

/// Tunnels outlive the processes at both ends, and the next ones take them over.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn connections_outlive_the_processes(family: Family) {
    let here = translucent();
    let (mut proxy, host) = (here.start(), here.host());
    let at = topology::SERVER.port(family, PORT);
    here.echo(at);
    let connect = || here.connect(at);
    let mut early = connect();
    round_trip(&mut early, &[7; 100_000]);
    eventually("spliced", || proxy.client(&["ls"]).contains("spliced").then_some(()));
    assert!(stop(host).contains("1 connections stay"));
    round_trip(&mut early, &[8; 100_000]);
    proxy.shut_down();
    round_trip(&mut early, &[9; 100_000]);
    let mut proxy = here.start();
    eventually("adopted", || proxy.client(&["ls"]).contains("released").then_some(()));
    round_trip(&mut early, &[9; 100_000]);
    proxy.kill();
    round_trip(&mut early, &[9; 100_000]);
    let (mut proxy, host) = (here.start(), here.host());
    round_trip(&mut early, &[1; 100_000]);
    let mut late = connect();
    round_trip(&mut late, &[2; 100_000]);
    assert_eq!(here.tunnels().len(), 2);
    drop((early, late));
    eventually("the end of both", || here.tunnels().iter().all(|t| t["over"] == true).then_some(()));
    assert!(stop(host).contains("stopped"));
    proxy.shut_down();
}

/// Nobody is asked to stop: connections go on, new ones still ask, and the next process takes all of them over.
#[test]
#[ignore = "root"]
fn the_program_of_the_host_is_killed() {
    let here = translucent();
    let (proxy, mut host) = (here.start(), here.host());
    let mut all = Vec::new();
    for family in Family::BOTH {
        let at = topology::SERVER.port(family, PORT);
        here.echo(at);
        let mut early = here.connect(at);
        round_trip(&mut early, &[7; 100_000]);
        host.kill();
        round_trip(&mut early, &[8; 100_000]);
        let mut late = here.connect(at);
        round_trip(&mut late, &[9; 100_000]);
        host = here.host();
        let open = |t: &&Value| t["remote"] == at.to_string() && t["over"] == false;
        assert_eq!(here.tunnels().iter().filter(open).count(), 2, "{:?}", here.tunnels());
        all.extend([early, late]);
        all.iter_mut().for_each(|stream| round_trip(stream, &[1; 100_000]));
    }
    assert!(stop(host).contains("4 connections stay"));
    assert_eq!(proxy.count("tpot", "opened"), 4);
}

/// A new device is attached as soon as it appears, so that a route may lead there: tunnelled packets leave by it as well.
#[test]
#[ignore = "root"]
fn a_route_to_a_new_device() {
    let here = translucent();
    let (mut proxy, host) = (here.start(), here.host());
    let at = topology::SERVER.port(Family::V4, PORT);
    here.echo(at);
    let mut stream = here.connect(at);
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
    proxy.shut_down();
}

const KEYS: [&str; 3] =
    ["00112233445566778899aabbccddeeff", "ffeeddccbbaa99887766554433221100", "0123456789abcdef0123456789abcdef"];

fn keyed_listeners() -> String {
    listeners(PORT, "") + "[tpot]\nkey_file = \"proxy.keys\"\n"
}

/// A host that names no addresses accepts the proxy that has one of its keys, also while a key is replaced, and also if the proxy
/// answers with SYN cookies.
#[test]
#[ignore = "root"]
fn a_proxy_with_a_key_of_the_host() {
    for (host_keys, proxy_keys, cookies) in
        [(&KEYS[..1], &KEYS[..1], "1"), (&[KEYS[1], KEYS[0]], &[KEYS[0], KEYS[1]], "1"), (&KEYS[..2], &KEYS[1..], "2")]
    {
        let here = translucent_with(&keyed_listeners());
        here.lab.forwarder.execute("sysctl", &["-qw", &format!("net.ipv4.tcp_syncookies={cookies}")]).unwrap();
        here.keys("proxy.keys", proxy_keys);
        let (mut proxy, host) =
            (here.start(), here.host_that_trusts(&["--key-file", &here.keys("host.keys", host_keys)]));
        for family in Family::BOTH {
            let at = topology::SERVER.port(family, PORT);
            here.echo(at);
            round_trip(&mut here.connect(at), &[7; 100_000]);
        }
        let log = stop(host);
        assert!(log.contains("opened: 2") && !log.contains("unauthenticated"), "{log}");
        proxy.shut_down();
    }
}

/// A proxy without the host's key cannot intercept, whatever its address. The server answers, after the SYNs that ask.
#[test]
#[ignore = "root"]
fn a_proxy_without_a_key_of_the_host() {
    for proxy_keys in [&KEYS[2..], &[]] {
        let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).unwrap();
        let listeners = keyed_listeners();
        let here = translucent_at(
            lab,
            if proxy_keys.is_empty() { &listeners[..listeners.find("[tpot]").unwrap()] } else { &listeners },
        );
        here.keys("proxy.keys", proxy_keys);
        let keys = here.keys("host.keys", &KEYS[..2]);
        let (mut proxy, host) =
            (here.start(), here.host_that_trusts(&["--key-file", &keys, "--proxy", "0.0.0.0/0", "--proxy", "::/0"]));
        std::thread::scope(|scope| {
            for family in Family::BOTH {
                let at = topology::SERVER.port(family, PORT);
                here.echo(at);
                let here = &here;
                scope.spawn(move || round_trip(&mut here.connect(at), &[7; 100_000]));
            }
        });
        let log = stop(host);
        assert!(log.contains("unauthenticated: ") && !log.contains("opened"), "{log}");
        proxy.shut_down();
    }
}

/// Mistakes show before anything is attached, and neither they nor the help tell a key.
#[test]
fn files_of_keys_with_mistakes() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys");
    for (mode, text, want) in [
        (0o600, format!("{}\n{}\n", KEYS[0], &KEYS[1][1..]), ":2:1: 31 digits"),
        (0o600, "# none\n".into(), "has no key"),
        (0o644, KEYS[0].into(), "others may read or write it: chmod 600 it"),
    ] {
        fs::write(&file, text).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        let host = ["tpot", "host", "--port", "80", "--key-file", file.to_str().unwrap()];
        let out = Command::new(LONGSPLICE).args(host).output().unwrap();
        let error = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && error.contains(want) && error.contains(file.to_str().unwrap()), "{error}");
        assert!(!error.contains(&KEYS[1][4..20]), "{error}");
    }
    let out = Command::new(LONGSPLICE).args(["tpot", "host", "--port", "80"]).output().unwrap();
    assert!(String::from_utf8_lossy(&out.stderr).contains("--proxy"), "{out:?}");
}

/// Rules and limits decide before the server hears of a client, and a server that refuses is logged.
#[test]
#[ignore = "root"]
fn rules_limits_and_log_of_early_connections() {
    for handshake in ["pipelined", "confirm"] {
        let early = format!("handshake = \"{handshake}\"\n");
        let limited = listeners(PORT, &format!("{early}limits = {{ connections_per_client = 1 }}\n"));
        let denied = listeners(SECOND_PORT, &format!("{early}rules = [{{ action = \"deny\" }}]\n"));
        let here = translucent_with(&(limited + &denied));
        let (mut proxy, host) = (here.start(), here.host());
        let connect = |at: SocketAddr| here.lab.client.run(|| TcpStream::connect(at));
        // The reset may arrive before connect() returns.
        let is_turned_away = |client: io::Result<TcpStream>| {
            let error = client.and_then(|mut client| {
                client.set_read_timeout(Some(PATIENCE)).unwrap();
                client.read(&mut [0])
            });
            assert_eq!(error.unwrap_err().kind(), ErrorKind::ConnectionReset);
        };
        for family in Family::BOTH {
            let [at, forbidden] = [PORT, SECOND_PORT].map(|port| topology::SERVER.port(family, port));
            match handshake {
                "confirm" => assert_eq!(connect(at).unwrap_err().kind(), ErrorKind::ConnectionRefused),
                _ => is_turned_away(connect(at)),
            }
            proxy.wait_line(&[&at.to_string(), "unreachable"]);
            let servers = [at, forbidden].map(|at| here.listen(at));
            is_turned_away(connect(forbidden));
            proxy.wait_line(&[&forbidden.to_string(), "denied"]);
            let mut client = connect(at).unwrap();
            let (mut accepted, _) = servers[0].accept().unwrap();
            client.write_all(b"hello").unwrap();
            let mut got = [0; 5];
            accepted.read_exact(&mut got).unwrap();
            is_turned_away(connect(at));
            for server in servers {
                server.set_nonblocking(true).unwrap();
                assert!(
                    server.accept().is_err_and(|e| e.kind() == ErrorKind::WouldBlock),
                    "the server hears of nobody else"
                );
            }
        }
        stop(host);
        proxy.shut_down();
    }
}
