//! S9: transparent connections through the real program (`protocol = "transparent"`). Needs root and eBPF.

use crate::running::{self, AT_ONCE, LONGSPLICE, Setting, eventually, listener, round_trip};
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection, Options, Shape, topology,
    traffic::{Script, connect, converse, intact, listen, serve},
};
use nix::{
    libc::linger,
    sys::{
        signal::Signal,
        socket::{setsockopt, sockopt::Linger},
    },
};
use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};
use test_case::test_case;

const PORT: u16 = 7000;
const BYTES: u64 = 4_000_000;

/// A listener for each family. One server is denied to clients of the first one.
fn configuration(policy: &str) -> String {
    let denied = "rules = [{ action = \"deny\", target = \"10.77.2.12\" }]\n".to_owned();
    v4(&(denied + policy)) + &listener("transparent", "[::]:7000", policy)
}

fn v4(more: &str) -> String {
    listener("transparent", "0.0.0.0:7000", more)
}

#[test]
#[ignore = "root"]
fn neither_end_sees_it() {
    let setting = Setting::new(&configuration(AT_ONCE));
    let lab = &setting.lab;
    let mut proxy = setting.start_with(&["--log-format", "json"]);
    for family in Family::BOTH {
        let server = topology::SERVER.port(family, PORT);
        let answer = Script::answerer().bytes(BYTES).pace(BYTES);
        let serving = serve(lab.server.run(|| listen(server, &answer)).unwrap(), 1, answer);
        let opener = Script::opener(7).bytes(BYTES).pace(BYTES);
        let client = lab.client.spawn(move || converse(connect(server, &opener).unwrap(), &opener));
        let flow = proxy.wait_flow("spliced");
        let (client, served) = (client.join().unwrap(), serving.join().remove(0));
        intact(&client, &served).unwrap();
        assert_eq!((client.remote, served.remote), (served.local, client.local), "both see each other");
        assert_eq!(flow["protocol"], "transparent");
        assert_eq!(flow["client"], client.local.unwrap().to_string());
        let line = proxy.wait_record(&[&client.local.unwrap().to_string()]);
        assert_eq!((&line["target"], &line["listener"]), (&server.to_string().into(), &"transparent".into()), "{line}");
    }
    // the server exists, but access to it is denied
    let second = topology::SERVER_SECOND.port(Family::V4, PORT);
    let listener = lab.server.run(|| listen(second, &Script::answerer())).unwrap();
    listener.set_nonblocking(true).unwrap();
    let denied = lab.client.run(|| TcpStream::connect_timeout(&second, Duration::from_millis(300)));
    assert_eq!(denied.unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    let counters = proxy.counters();
    assert_eq!((&counters["proxy"]["denied"], &counters["proxy"]["relayed"]), (&1.into(), &2.into()), "{counters}");
    assert_eq!(counters["verdicts"]["handshake-lost"], 0);
    proxy.shut_down();
    let rules = |family: &str| lab.forwarder.execute("ip", &[family, "rule"]).unwrap();
    for family in ["-4", "-6"] {
        assert!(!rules(family).contains("fwmark"), "what it has told the routes is taken back: {}", rules(family));
    }
}

/// Without the kernel path there is no alternative.
#[test]
fn without_the_packet_path_it_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("longsplice.toml");
    fs::write(&file, configuration(AT_ONCE)).unwrap();
    let control = dir.path().join("control");
    let out = running::longsplice(&[
        "run",
        "--copy-only",
        "--config",
        file.to_str().unwrap(),
        "--control",
        control.to_str().unwrap(),
    ]);
    assert!(!out.status.success());
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("cannot listen on 0.0.0.0:7000: the kernel's packet path is needed for this"), "{said}");
}

/// The number of routing rules does not grow, however often the program is killed, and a stop removes all of them, including
/// those of earlier versions, which gave them no number.
#[test]
#[ignore = "root"]
fn no_rule_of_routing_is_left() {
    let setting = Setting::new(&configuration(AT_ONCE));
    let lab = &setting.lab;
    let ip = |arguments: &[&str]| lab.forwarder.execute("ip", arguments).unwrap();
    let both = || ["-4", "-6"].map(|family| ip(&[family, "rule"]));
    let before = both();
    for _ in 0..2 {
        ip(&["rule", "add", "fwmark", "0x6c73706d", "lookup", "27763"]);
    }
    let mut first = setting.start();
    let running = both();
    assert!(running.iter().all(|rules| rules.matches("109:\t").count() == 1), "{running:?}");
    first.kill();
    let mut second = setting.start();
    assert_eq!(both(), running);
    second.kill();
    lab.forwarder.execute(LONGSPLICE, &["stop", "--flush"]).unwrap();
    assert_eq!(both(), before, "flushed");
    let mut third = setting.start();
    third.shut_down();
    assert_eq!(both(), before, "stopped");
}

/// The kernel forgets the proxy's sockets a second after the end of the streams. For
/// addresses that are not its own, it does not answer later segments of the hosts.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn hosts_hear_that_the_process_is_gone(family: Family) {
    let setting = Setting::new(&configuration("policy = { splice = \"never\" }"));
    let lab = &setting.lab;
    lab.forwarder.sysctl("net.ipv4.tcp_fin_timeout", "1").unwrap();
    let mut first = setting.start();
    let at = topology::SERVER.port(family, PORT);
    let listener = setting.listen(at);
    let mut client = lab.client.run(|| TcpStream::connect(at)).unwrap();
    let mut server = listener.accept().unwrap().0;
    client.write_all(&[7]).unwrap();
    server.read_exact(&mut [0]).unwrap();
    first.kill();
    for host in [&mut client, &mut server] {
        assert_eq!(host.read(&mut [0]).unwrap(), 0);
    }
    let sockets = || lab.forwarder.execute("ss", &["-Htan", "state", "connected"]).unwrap();
    eventually("the sockets are forgotten", || sockets().is_empty().then_some(()));
    let _second = setting.start();
    for mut host in [client, server] {
        eventually("a reset", || host.write(&[7]).is_err().then_some(()));
    }
}

/// A released flow has been idle for too long, and its resets are lost. The hosts' addresses are not ours, so no stack answers what
/// they say next: the flow's entries do.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn hosts_that_have_not_heard_of_the_idle_limit_hear_when_they_speak(family: Family) {
    let policy = "policy = { splice = \"at-once\", release_after = 0.001, idle_limit = 2 }";
    let setting = Setting::new(&configuration(policy));
    let lab = &setting.lab;
    let mut proxy = setting.start();
    let at = topology::SERVER.port(family, PORT);
    let listener = setting.listen(at);
    let mut client = lab.client.run(|| TcpStream::connect(at)).unwrap();
    let mut server = listener.accept().unwrap().0;
    client.write_all(&[7]).unwrap();
    server.read_exact(&mut [0]).unwrap();
    proxy.wait_flow("released");
    let no_resets = "table inet t { chain c { type filter hook input priority 0; tcp flags & rst == rst drop; }; }";
    let hosts = [&lab.client, &lab.server];
    hosts.iter().for_each(|host| drop(host.execute("nft", &[no_resets]).unwrap()));
    eventually("the idle limit", || proxy.flows().is_empty().then_some(()));
    hosts.iter().for_each(|host| drop(host.execute("nft", &["delete table inet t"]).unwrap()));
    for mut host in [client, server] {
        eventually("a reset", || host.write(&[7]).is_err().then_some(()));
    }
    proxy.shut_down();
}

/// A SYN is retransmitted a few times in this, even if each of the first ones finds no process on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// The process dies in the middle of a handshake, before or after the server
/// has answered: the client retries, and succeeds with the next process.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_handshake_outlives_the_process(family: Family) {
    for way in [LinkDirection::ToServer, LinkDirection::ToClient] {
        let setting = Setting::new(&configuration(AT_ONCE));
        let at = topology::SERVER.port(family, PORT);
        setting.echo(at);
        let mut first = setting.start();
        let nothing_passes = setting.lab.impair(way, Impair { loss: 1.0, ..Impair::default() }).unwrap();
        let client = setting.lab.client.spawn(move || running::connect_within(at, LIMIT));
        eventually("a segment of the handshake", || (nothing_passes.counters().lost > 0).then_some(()));
        first.kill();
        let _second = setting.start();
        nothing_passes.change(Impair::default()).unwrap();
        eventually("a connection", || client.is_finished().then_some(()));
        round_trip(&mut client.join().unwrap(), &[7; 100_000]);
    }
}

/// The server repeats its answer to a process that has died, while the next one begins the handshake anew and resets the server: the
/// answer that counts is that to the SYN of this one.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn an_answer_to_an_earlier_process_is_not_taken(family: Family) {
    let setting = Setting::new(&configuration(AT_ONCE));
    let at = topology::SERVER.port(family, PORT);
    setting.echo(at);
    let mut first = setting.start();
    let impair = |way, loss| setting.lab.impair(way, Impair { loss, ..Impair::default() }).unwrap();
    let nothing_passes = impair(LinkDirection::ToClient, 1.0);
    let [asked, answered] = [LinkDirection::FromClient, LinkDirection::FromServer].map(|way| impair(way, 0.0));
    let client = setting.lab.client.spawn(move || running::connect_within(at, LIMIT));
    eventually("an answer", || (nothing_passes.counters().lost > 0).then_some(()));
    first.kill();
    let second = setting.start();
    second.signal(Signal::SIGSTOP);
    for host in [asked, answered] {
        let before = host.counters().seen;
        eventually("a segment that comes again", || (host.counters().seen > before).then_some(()));
    }
    nothing_passes.change(Impair::default()).unwrap();
    second.signal(Signal::SIGCONT);
    eventually("a connection", || client.is_finished().then_some(()));
    round_trip(&mut client.join().unwrap(), &[7; 100_000]);
}

/// A process dies with a SYN that it has not heard, and the connection begins while nobody listens for it. The hosts have it without
/// us from then on, and so is its reset, whether or not a later process listens.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_reset_of_a_connection_that_began_between_two_processes_is_routed(family: Family) {
    for is_killed in [false, true] {
        let transparent = configuration("policy = { splice = \"never\" }");
        let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).unwrap();
        let setting = Setting::at(lab, &transparent);
        let at = topology::SERVER.port(family, PORT);
        let listening = setting.listen(at);
        setting.start().kill();
        let client = setting.lab.client.spawn(move || running::connect_within(at, LIMIT));
        let asking = || setting.lab.client.execute("ss", &["-Htan", "state", "syn-sent"]).unwrap();
        eventually("a SYN that nobody hears", || (!asking().is_empty()).then_some(()));
        let plug = topology::FORWARDER_TO_CLIENT.port(family, PORT);
        setting.configure(&listener("plug", &plug.to_string(), &format!("target = \"{at}\"\n")));
        let mut without = setting.start();
        let mut client = client.join().unwrap();
        let mut server = listening.accept().unwrap().0;
        without.kill();
        setting.configure(&transparent);
        let mut third = setting.start();
        client.write_all(&[7]).unwrap();
        server.read_exact(&mut [0]).unwrap();
        if is_killed {
            third.kill();
        }
        setsockopt(&client, Linger, &linger { l_onoff: 1, l_linger: 0 }).unwrap();
        drop(client);
        eventually("a reset", || server.write(&[7]).is_err().then_some(()));
    }
}

/// Rules forbid a server. Nobody reaches it while the next process starts, after the death of the one before either.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn no_connection_passes_unjudged_after_a_crash(family: Family) {
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).unwrap();
    // others come first, so that the start takes longer
    let others = (8000..8100).map(|port| listener("plug", &format!("127.0.0.1:{port}"), "target = \"127.0.0.1:9\"\n"));
    let any = match family {
        Family::V4 => "0.0.0.0:7000",
        Family::V6 => "[::]:7000",
    };
    let forbidden = listener("transparent", any, "rules = [{ action = \"deny\" }]\n");
    let setting = Setting::at(lab, &(others.collect::<String>() + &forbidden));
    let at = topology::SERVER.port(family, PORT);
    let listening = setting.listen(at);
    listening.set_nonblocking(true).unwrap();
    let mut process = setting.start();
    let over = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..16)
        .map(|_| {
            let over = over.clone();
            setting.lab.client.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let asked = TcpStream::connect_timeout(&at, Duration::from_millis(50));
                    assert_eq!(asked.unwrap_err().kind(), ErrorKind::TimedOut);
                }
            })
        })
        .collect();
    for _ in 0..3 {
        process.kill();
        process = setting.start();
        let denied = || process.counters()["proxy"]["denied"].as_u64();
        eventually("a client that is denied", || denied().filter(|n| *n > 0));
    }
    over.store(true, Ordering::Relaxed);
    clients.into_iter().for_each(|client| client.join().unwrap());
    assert_eq!(listening.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}

/// Clients that connect while one process replaces another may be reset, or have to retry. None of them waits in vain.
#[test]
#[ignore = "root"]
fn handshakes_pass_while_processes_come_and_go() {
    let setting = Setting::new(&configuration(AT_ONCE));
    let over = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..16)
        .map(|n| {
            let at = topology::SERVER.port(Family::BOTH[n % 2], PORT);
            if n < 2 {
                setting.echo(at);
            }
            let over = over.clone();
            setting.lab.client.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    match TcpStream::connect_timeout(&at, LIMIT) {
                        Ok(mut stream) => drop(stream.write_all(&[7; 100])),
                        Err(e) if e.kind() == ErrorKind::TimedOut => return Err(e),
                        Err(_) => {}
                    }
                }
                Ok(())
            })
        })
        .collect();
    for n in 0..6 {
        let mut process = setting.start_with(&["--leave-flows"]);
        // longer than the interval between two SYNs
        thread::sleep(Duration::from_millis(1500));
        if n % 2 == 0 {
            process.kill();
        } else {
            process.signal(Signal::SIGTERM);
            assert!(process.wait().success(), "{}", process.messages());
        }
    }
    let _last = setting.start_with(&["--leave-flows"]);
    over.store(true, Ordering::Relaxed);
    let waited: Vec<_> = clients.into_iter().filter_map(|client| client.join().unwrap().err()).collect();
    assert!(waited.is_empty(), "{waited:?}");
}

#[test]
#[ignore = "root"]
fn transparent_listeners_where_ipv6_is_disabled() {
    let setting = Setting::new(&v4(AT_ONCE));
    setting.lab.forwarder.sysctl("net.ipv6.conf.all.disable_ipv6", "1").unwrap();
    setting.start().shut_down();
    setting.configure(&configuration(AT_ONCE));
    let said = setting.refused();
    assert!(said.contains("is IPv6 disabled"), "{said}");
}
