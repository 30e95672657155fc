//! Flows that the proxy does not splice: its messages and counters; and configurations
//! that it does not start with. Needs root and eBPF, and fails without.

use crate::running::{LONGSPLICE, Pins, Running, connect, echo, eventually, round_trip};
use longsplice_datapath::VERDICTS;
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection, Shape,
    topology::{Address, FORWARDER_TO_CLIENT, FORWARDER_TO_SERVER, SERVER},
};
use longsplice_proxy::CounterValues;
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener},
    path::Path,
    process::Command,
    sync::mpsc,
    thread,
    time::Duration,
};
use test_case::test_case;

const PORT: u16 = 7000;
const FRONT: SocketAddr = FORWARDER_TO_CLIENT.port(Family::V4, PORT);

struct Place {
    lab: Lab,
    pins: Pins,
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        for (namespace, address) in [(&lab.server, SERVER), (&lab.forwarder, FORWARDER_TO_SERVER)] {
            namespace.run(|| {
                Family::BOTH.into_iter().for_each(|f| echo(TcpListener::bind(address.port(f, PORT)).unwrap()));
            });
        }
        Place { pins: Pins::of(&lab.forwarder), lab, dir: tempfile::tempdir().unwrap() }
    }

    /// Writes a configuration with `text` and a plug to the server. Returns the arguments.
    fn configuration(&self, text: &str) -> Vec<String> {
        let file = self.dir.path().join("longsplice.toml");
        let server = SERVER.port(Family::V4, PORT);
        let plug = format!("[[listener]]\nprotocol = \"plug\"\nlisten = \"{FRONT}\"\ntarget = \"{server}\"\n");
        fs::write(&file, format!("{text}\n{plug}")).unwrap();
        vec!["--config".into(), file.to_str().unwrap().into()]
    }

    /// The error message of a program that does not start.
    fn complaint(&self, configuration: &str, more: &[&str]) -> String {
        let mut run = self.lab.forwarder.command(LONGSPLICE);
        run.arg("run").args(self.configuration(configuration)).args(more);
        let output = run.arg("--control").arg(self.dir.path().join("control")).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{configuration} {more:?}: {said}");
        assert!(!said.contains("splicing on"), "nothing was attached: {said}");
        assert!(!self.pins.exist(), "nothing is left: {said}");
        said
    }

    /// Starts a proxy and opens a connection. Returns the refusal in its list, which has to agree with its counters.
    fn refusal(&self, command: Command, arguments: &[String]) -> (String, Running) {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let proxy = Running::start(command, None, &arguments, &["--splice", "at-once"]);
        let mut stream = self.lab.client.run(|| connect(proxy.address()));
        let refusal = refusal(&proxy, &mut stream);
        (refusal, proxy)
    }
}

/// The refusal of the only connection of a proxy with one listener.
fn refusal(proxy: &Running, stream: &mut std::net::TcpStream) -> String {
    round_trip(stream, &[1; 100_000]);
    let refusal = eventually("a decision", || {
        let flow = proxy.flows().into_iter().find(|f| f["state"] == "spliced" || !f["refusal"].is_null())?;
        Some(flow["refusal"].as_str().unwrap_or("spliced").to_owned())
    });
    let listener = listeners(proxy).remove(0);
    let refused: Vec<_> = listener["refused"].as_object().unwrap().iter().filter(|(_, n)| **n != 0).collect();
    match &*refusal {
        "spliced" => assert_eq!((&listener["spliced"], refused.len()), (&1.into(), 0), "{listener}"),
        why => {
            assert_eq!((&listener["spliced"], refused), (&0.into(), vec![(&why.to_owned(), &1.into())]), "{listener}")
        }
    }
    refusal
}

fn listeners(proxy: &Running) -> Vec<Value> {
    proxy.counters()["listeners"].as_array().unwrap().clone()
}

#[test]
#[ignore = "root"]
fn devices_that_cannot_be_used_as_named_end_the_start() {
    let place = Place::new();
    place.lab.forwarder.execute("ip", &["link", "add", "d9", "type", "bridge"]).unwrap();
    for (configuration, more, said) in [
        ("", &["--device", "nosuch"][..], "device nosuch: not found"),
        ("", &["--device", "f0", "--device", "nosuch"], "device nosuch: not found"),
        ("", &["--device", "lo"], "device lo: not found, or no Ethernet device"),
        ("", &["--xdp", "nosuch"], "device nosuch: not found"),
        ("", &["--device", "f0", "--xdp", "f1"], "device f1: cannot attach XDP: it is not among"),
        ("", &["--xdp", "d9"], "device d9: cannot attach XDP: its driver has none"),
        ("", &["--peer", "nosuch"], "device nosuch: not found"),
        ("", &["--device", ""], "--device <DEV>"),
        ("devices = [\"nosuch\"]", &[], "device nosuch: not found"),
        ("xdp = [\"nosuch\"]", &[], "device nosuch: not found"),
        ("devices = []", &[], "longsplice.toml:1:11: empty list"),
        ("devices = [\"\"]", &[], "longsplice.toml:1:12: no name of a device"),
        ("splice = \"if-possible\"\npeer = \"\"", &[], "longsplice.toml:2:8: no name of a device"),
        ("splice = \"sometimes\"", &[], "`if-possible` or `required`"),
    ] {
        let complaint = place.complaint(configuration, more);
        assert!(complaint.contains(said), "{configuration} {more:?}: {complaint}");
    }
    let arguments = place.configuration("devices = \"nosuch\"\nsplice = \"if-possible\"");
    let (refusal, proxy) = place.refusal(place.lab.forwarder.command(LONGSPLICE), &arguments);
    assert_eq!(refusal, "device");
    assert!(proxy.messages().contains("not spliced (device): device nosuch: not found"), "{}", proxy.messages());
}

/// Nothing in the kernel is touched for a configuration that cannot be served.
#[test]
#[ignore = "root"]
fn what_is_wrong_with_addresses_and_files_is_known_before_anything_is_attached() {
    let place = Place::new();
    let taken = place.lab.forwarder.run(|| TcpListener::bind(FRONT).unwrap());
    let said = place.complaint("", &[]);
    assert!(said.contains(&format!("cannot listen on {FRONT}")) && said.contains("another program listens"), "{said}");
    drop(taken);
    let said = place.complaint("", &["--plug", "192.0.2.1:1=192.0.2.2:1"]);
    assert!(said.contains("no device of this host has the address"), "{said}");
    let said = place.complaint("log.file = \"/nowhere/access.log\"", &[]);
    assert!(said.contains("cannot open the access log /nowhere/access.log"), "{said}");
}

#[test]
#[ignore = "root"]
fn every_cause_has_its_own_name() {
    let place = Place::new();
    let sh = |before: &str| {
        let mut command = place.lab.forwarder.command("unshare");
        command.args(["-m", "sh", "-c", &format!("{before} exec \"$0\" \"$@\""), LONGSPLICE]);
        command
    };
    for (before, why, said) in [
        ("", "spliced", "splicing on f0, f1"),
        ("mount -t tmpfs none /sys/fs/bpf;", "no-bpffs", "no bpffs at /sys/fs/bpf/longsplice"),
        (
            "mount -t bpf none /sys/fs/bpf; mkdir /sys/fs/bpf/longsplice; chown 1 /sys/fs/bpf/longsplice;",
            "pins",
            "/sys/fs/bpf/longsplice belongs to another user",
        ),
        ("ulimit -n 40;", "descriptors", "Too many open files"),
    ] {
        let (refusal, mut proxy) = place.refusal(sh(before), &place.configuration(""));
        assert_eq!(refusal, why, "{before}: {}", proxy.messages());
        assert!(proxy.messages().contains(said), "{before}: {}", proxy.messages());
        proxy.stop(&place.pins);
    }
    let required = place.configuration("splice = \"required\"").join(" ");
    let mut run = place.lab.forwarder.command("unshare");
    run.args(["-m", "sh", "-c", &format!("mount -t tmpfs none /sys/fs/bpf; {LONGSPLICE} run {required}")]);
    let output = run.output().unwrap();
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains("no bpffs"), "{output:?}");
}

#[test]
#[ignore = "root"]
fn who_comes_second_says_that_another_process_splices() {
    let place = Place::new();
    let (of_first, mut first) = place.refusal(place.lab.forwarder.command(LONGSPLICE), &place.configuration(""));
    let second = format!("{}={}", FORWARDER_TO_CLIENT.port(Family::V4, PORT + 1), SERVER.port(Family::V4, PORT));
    let arguments = ["--plug".to_owned(), second];
    let (of_second, second) = place.refusal(place.lab.forwarder.command(LONGSPLICE), &arguments);
    assert_eq!((&*of_first, &*of_second), ("spliced", "other-process"));
    assert!(second.client(&["counters"]).contains("  not: other-process "), "{}", second.client(&["counters"]));
    assert!(second.messages().contains("another process runs the data path"), "{}", second.messages());
    drop(second);
    first.stop(&place.pins);
}

/// Packets between addresses of one host take the loopback device, whichever device has the addresses.
#[test]
#[ignore = "root"]
fn addresses_of_this_host_are_loopback() {
    let place = Place::new();
    let through = |client: &longsplice_lab::Namespace, family: Family, target: Address, why: &str| {
        let front = FORWARDER_TO_CLIENT.port(family, PORT);
        let plug = ["--plug".to_owned(), format!("{front}={}", target.port(family, PORT))];
        let plug: Vec<&str> = plug.iter().map(String::as_str).collect();
        let command = place.lab.forwarder.command(LONGSPLICE);
        let mut proxy = Running::start(command, None, &plug, &["--splice", "at-once"]);
        let mut stream = client.run(|| connect(front));
        assert_eq!(refusal(&proxy, &mut stream), why, "{front}");
        drop(stream);
        proxy.stop(&place.pins);
    };
    for family in Family::BOTH {
        through(&place.lab.client, family, FORWARDER_TO_SERVER, "loopback");
        through(&place.lab.forwarder, family, SERVER, "loopback");
        through(&place.lab.client, family, SERVER, "spliced");
    }
}

/// The data path sees packets before or after NAT, and the socket the opposite.
#[test]
#[ignore = "root"]
fn legs_that_nat_changes_are_named() {
    for (hook, rule, port, why) in [
        ("prerouting", format!("tcp dport 7001 redirect to :{PORT}"), 7001, "nat"),
        ("postrouting", format!("tcp dport {PORT} masquerade to :50000-50009"), PORT, "nat"),
        // the addresses and ports stay as they are
        ("postrouting", format!("tcp dport {PORT} masquerade"), PORT, "spliced"),
    ] {
        let place = Place::new();
        let chain = format!("{{ type nat hook {hook} priority 0; {rule}; }}");
        place.lab.forwarder.execute("nft", &[&format!("table ip t {{ chain c {chain}; }}")]).unwrap();
        let plug = format!("{FRONT}={}", SERVER.port(Family::V4, PORT));
        let arguments = ["--plug", &plug, "--splice", "at-once"];
        let mut proxy = Running::start(place.lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
        let mut stream = place.lab.client.run(|| connect(FORWARDER_TO_CLIENT.port(Family::V4, port)));
        assert_eq!(refusal(&proxy, &mut stream), why, "{rule}");
        drop(stream);
        proxy.stop(&place.pins);
    }
}

/// Two listeners, and the counters of each.
#[test]
#[ignore = "root"]
fn flows_are_counted_by_listener() {
    let place = Place::new();
    let server = SERVER.port(Family::V4, PORT);
    let [first, second] = [PORT, PORT + 1].map(|port| FORWARDER_TO_CLIENT.port(Family::V4, port));
    let plugs = [first, second].map(|front| format!("{front}={server}"));
    let arguments = ["--plug", &plugs[0], "--plug", &plugs[1]];
    let mut proxy = Running::start(place.lab.forwarder.command(LONGSPLICE), None, &arguments, &["--splice", "50000"]);
    let talk = |to: SocketAddr, bytes: &[u8]| round_trip(&mut place.lab.client.run(|| connect(to)), bytes);
    talk(first, b"short");
    talk(second, b"short");
    talk(second, b"short, too");
    let mut stream = place.lab.client.run(|| connect(first));
    round_trip(&mut stream, &[1; 100_000]);
    let of = |l: &Value| (l["spliced"].clone(), l["refused"]["short"].clone());
    let counts = || listeners(&proxy).iter().map(of).collect::<Vec<_>>();
    let all: Vec<(Value, Value)> = vec![(1.into(), 1.into()), (0.into(), 2.into())];
    eventually("all are counted", || (counts() == all).then_some(()));
    assert_eq!(listeners(&proxy)[1]["listen"], second.to_string());
    let text = proxy.client(&["counters"]);
    assert!(text.contains(&format!("plug on {first}\n  spliced ")) && text.contains("  not: short "), "{text}");
    drop(stream);
    proxy.stop(&place.pins);
}

/// Replies of a near server to a distant client.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn bodies_that_would_be_slower_spliced_are_copied(family: Family) {
    const BODY: usize = 2_000_000;
    let place = Place::new();
    let far = Impair { delay: Duration::from_millis(20), ..Impair::NONE };
    let _far = place.lab.impair(LinkDirection::FromClient, far).unwrap();
    let [front, server] = [FORWARDER_TO_CLIENT.port(family, 3128), SERVER.port(family, 8080)];
    let listener = place.lab.server.run(|| TcpListener::bind(server).unwrap());
    let (go_on, goes_on) = mpsc::channel();
    thread::spawn(move || {
        let mut stream = BufReader::new(listener.accept().unwrap().0);
        stream.by_ref().lines().take_while(|line| line.as_ref().is_ok_and(|line| !line.is_empty())).for_each(drop);
        let stream = stream.get_mut();
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {BODY}\r\n\r\n").unwrap();
        stream.write_all(&[1; BODY / 2]).unwrap();
        goes_on.recv().unwrap();
        stream.write_all(&[1; BODY / 2]).unwrap();
    });
    let http = front.to_string();
    let arguments = ["--http", &http, "--path", "auto", "--splice", "65536", "--log-format", "json"];
    let mut proxy = Running::start(place.lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
    let mut stream = place.lab.client.run(|| connect(front));
    write!(stream, "GET http://{server}/ HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n\r\n").unwrap();
    eventually("a refusal in the list", || {
        let flow = proxy.flows().into_iter().find(|flow| flow["refusal"] == "path")?;
        let path = &flow["path"];
        assert_eq!((&path["cause"], &path["sender"]), (&"rtt".into(), &"server".into()), "{flow}");
        assert!(path["rtt_us"]["client"].as_u64() >= Some(20_000), "{flow}");
        Some(())
    });
    let ls = proxy.client(&["ls"]);
    assert!(ls.contains("not spliced: path (rtt, client ") && ls.contains(" ms, loss 0.0"), "{ls}");
    go_on.send(()).unwrap();
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).unwrap();
    assert!(reply.ends_with(&[1; BODY]), "{}", reply.len());
    let refused = || listeners(&proxy)[0]["refused"]["path"].clone();
    eventually("it is counted", || (refused() == 1).then_some(()));
    let log = proxy.end(&place.pins);
    assert_eq!((&log[0]["refusal"], &log[0]["splices"]), (&"path".into(), &0.into()), "{log:?}");
    assert_eq!(log[0]["path"]["cause"], "rtt", "{log:?}");
}

fn documented(section: &str) -> Vec<String> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics-and-verdicts.md");
    let text = fs::read_to_string(docs).unwrap();
    let (_, table) = text.split_once(&format!("\n## {section}\n")).unwrap();
    let table = table.split("\n##").next().unwrap(); // translucent proxying and farms have sections of their own
    table.lines().filter(|l| l.starts_with("| `")).map(String::from).collect()
}

/// Each label is in the table of the documentation, with its remedy.
#[test]
fn refusals_are_documented() {
    let rows = documented("Refusals");
    for why in longsplice_engine::Refusal::ALL {
        let row = rows.iter().find(|l| l.starts_with(&format!("| `{why}` | ")));
        assert!(row.is_some_and(|row| row.matches(" | ").count() == 2), "{why}: {row:?}");
    }
}

/// What `stats` prints is in the documentation, and nothing else.
#[test]
fn verdicts_and_counters_are_documented() {
    let counters = serde_json::to_value(CounterValues::default()).unwrap();
    let counters: Vec<_> = counters.as_object().unwrap().keys().map(String::as_str).collect();
    for (section, names) in [("Verdicts", VERDICTS), ("Counters of the proxy", &counters)] {
        let rows = documented(section);
        let names_of = |row: &str| {
            row.split('|').nth(1).unwrap().split('`').skip(1).step_by(2).map(String::from).collect::<Vec<_>>()
        };
        let told: BTreeSet<String> = rows.iter().flat_map(|row| names_of(row)).collect();
        let known: BTreeSet<String> = names.iter().map(|name| name.to_string()).collect();
        assert_eq!(told, known, "{section}: documented, and known");
    }
}
