//! S6: triggers of the configuration, on connections that are spliced. Needs root and eBPF.

use crate::running::{AT_ONCE, Running, Setting, eventually, listener, round_trip};
use longsplice_lab::{
    Family,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use serde_json::Value;
use std::{
    fs::{self, Permissions},
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt,
    path::Path,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use test_case::test_case;

const PORT: u16 = 7000;

fn front(family: Family) -> SocketAddr {
    FORWARDER_TO_CLIENT.port(family, PORT)
}

/// A plug to an echo server, with these triggers.
fn plug(family: Family, more: &str, triggers: &str) -> String {
    let target = format!("target = \"{}\"\n{more}\ntrigger = [{triggers}]", SERVER.port(family, PORT));
    listener("plug", &front(family).to_string(), &target)
}

/// Starts the program, and opens a connection to an echo server that is spliced before its first byte.
fn spliced(family: Family, triggers: &str) -> (Setting, Running, TcpStream) {
    let setting = Setting::new(&plug(family, AT_ONCE, triggers));
    setting.echo(SERVER.port(family, PORT));
    let proxy = setting.start_with(&["--log-format", "json"]);
    let client = setting.connect(front(family));
    proxy.wait_flow("spliced");
    (setting, proxy, client)
}

/// Ends a connection in order. Returns its line of the access log.
fn end(setting: &Setting, mut proxy: Running, mut client: TcpStream) -> Value {
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    drop(client);
    proxy.end(&setting.pins[0]).remove(0)
}

/// What has taken a connection back may be copied before the connection is reset.
#[track_caller]
fn is_killed(mut client: TcpStream, most: usize) {
    let mut rest = Vec::new();
    let end = client.read_to_end(&mut rest).unwrap_err();
    assert_eq!((end.kind(), rest.len() <= most), (ErrorKind::ConnectionReset, true));
}

fn triggered(proxy: &Running, count: u64) {
    eventually("a trigger", || (proxy.count("proxy", "triggered") == count).then_some(()));
}

/// None of what the client sends, and none of what the server answers, has passed in forwarding mode.
#[test_case(Family::V4, "client"; "client v4")]
#[test_case(Family::V6, "client"; "client v6")]
#[test_case(Family::V4, "server"; "server v4")]
#[test_case(Family::V6, "server"; "server v6")]
#[ignore = "root"]
fn data_take_a_connection_back(family: Family, host: &str) {
    let (setting, proxy, mut client) = spliced(family, &format!("{{ data = \"{host}\", then = \"copy\" }}"));
    round_trip(&mut client, &[7; 10_000]);
    proxy.wait_flow("copying");
    triggered(&proxy, 1);
    round_trip(&mut client, &[8; 100_000]);
    let line = end(&setting, proxy, client);
    let (up, down) = (&line["spliced_up"], &line["spliced_down"]);
    let expected = if host == "client" { (0, 0) } else { (10_000, 0) };
    assert_eq!((up, down), (&expected.0.into(), &expected.1.into()), "{line}");
    assert_eq!((&line["bytes_up"], &line["splices"]), (&110_000.into(), &1.into()));
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn data_kill_a_connection(family: Family) {
    let (setting, mut proxy, mut client) = spliced(family, "{ data = \"server\", then = \"kill\" }");
    client.write_all(&[7; 10]).unwrap();
    is_killed(client, 10);
    let line = proxy.wait_record(&["\"how\":\"stopped\""]);
    assert_eq!((&line["bytes_up"], &line["spliced_down"]), (&10.into(), &0.into()));
    proxy.client(&["stop", "--flush"]);
    assert!(proxy.wait().success());
    drop(setting);
}

/// Those of the client, of the server, and of both. The first one comes after 150 KB.
#[test_case(Family::V4, "client", 150_000; "client")]
#[test_case(Family::V6, "server", 150_000; "server")]
#[test_case(Family::V4, "both", 300_000; "both")]
#[ignore = "root"]
fn bytes_take_a_connection_back(family: Family, of: &str, count: u64) {
    let trigger = format!("{{ bytes = {count}, of = \"{of}\", then = \"copy\" }}");
    let (setting, proxy, mut client) = spliced(family, &trigger);
    round_trip(&mut client, &[7; 149_999]);
    // it has been looked at with this number, or with more
    eventually("a look", || (proxy.flow()["bytes_down"] == 149_999).then_some(()));
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!((proxy.count("proxy", "triggered"), proxy.flows_in("spliced")), (0, 1));
    round_trip(&mut client, b"x");
    proxy.wait_flow("copying");
    triggered(&proxy, 1);
    round_trip(&mut client, &[8; 100_000]);
    let line = end(&setting, proxy, client);
    assert_eq!((&line["spliced_up"], &line["bytes_up"]), (&150_000.into(), &250_000.into()), "{line}");
}

/// Copied connections have triggers as well.
#[test_case(Family::V4, AT_ONCE; "spliced")]
#[test_case(Family::V6, "policy = { splice = \"never\" }"; "copied")]
#[ignore = "root"]
fn idle_connections(family: Family, policy: &str) {
    let setting = Setting::new(&plug(family, policy, "{ idle = 1, then = \"kill\" }, { bytes = 1, then = \"copy\" }"));
    setting.echo(SERVER.port(family, PORT));
    let proxy = setting.start();
    let mut client = setting.connect(front(family));
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(4) {
        round_trip(&mut client, b"x");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(proxy.count("proxy", "triggered"), 1, "only the other one");
    is_killed(client, 0);
    triggered(&proxy, 2);
}

/// The next minute comes within a minute.
#[test]
#[ignore = "root"]
fn a_time_of_day() {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    // the program needs some seconds to start
    let minute = (now() + 20) / 60 + 1;
    let at = format!("at = \"{:02}:{:02}\"", minute / 60 % 24, minute % 60);
    let text = plug(Family::V4, AT_ONCE, &format!("{{ {at}, then = \"kill\" }}"))
        + &plug(Family::V6, AT_ONCE, &format!("{{ {at}, then = \"copy\" }}"));
    let setting = Setting::new(&text);
    Family::BOTH.iter().for_each(|family| setting.echo(SERVER.port(*family, PORT)));
    let proxy = setting.start();
    let [killed, mut copied] = Family::BOTH.map(|family| setting.connect(front(family)));
    eventually("both are spliced", || (proxy.flows_in("spliced") == 2).then_some(()));
    assert_eq!(proxy.count("proxy", "triggered"), 0);
    assert!(now() < minute * 60, "the machine is too slow for this test");
    std::thread::sleep(Duration::from_secs(minute * 60 - now()));
    triggered(&proxy, 2);
    is_killed(killed, 0);
    proxy.wait_flow("copying");
    round_trip(&mut copied, b"still here");
}

/// What comes after the trigger is in the files, and the connection is spliced again.
#[test_case(Family::V4, AT_ONCE; "spliced")]
#[test_case(Family::V6, AT_ONCE; "spliced v6")]
#[test_case(Family::V4, "policy = { splice = \"never\" }"; "copied")]
#[ignore = "root"]
fn a_tap_begins_later(family: Family, policy: &str) {
    const BEFORE: usize = 1_000_000;
    let setting =
        Setting::new(&plug(family, policy, "{ bytes = 1_000_000, of = \"server\", then = \"tap\", dir = \"taps\" }"));
    setting.echo(SERVER.port(family, PORT));
    let mut proxy = setting.start_with(&["--log-format", "json"]);
    let mut client = setting.connect(front(family));
    // through pipes, if it is copied
    round_trip(&mut client, &[7; BEFORE]);
    triggered(&proxy, 1);
    let dir = setting.dir.path().join("taps");
    let file = |end: &str| {
        let all = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path());
        all.filter(|path| path.to_string_lossy().ends_with(end)).map(fs::read).map(Result::unwrap).next()
    };
    eventually("the beginning of a tap", || {
        round_trip(&mut client, b"?");
        (proxy.count("proxy", "tap_bytes") > 0).then_some(())
    });
    if policy == AT_ONCE {
        proxy.wait_flow("spliced");
    }
    let after: Vec<u8> = (0..300_000u32).map(|n| (n % 251) as u8).collect();
    // not faster than the reader of the copies
    after.chunks(1000).for_each(|part| round_trip(&mut client, part));
    drop(client);
    proxy.flows_end();
    proxy.client(&["stop", "--flush"]);
    assert!(proxy.wait().success());
    let line = &proxy.records()[0];
    for end in ["-client", "-server"] {
        let all = file(end).unwrap();
        assert_eq!(all[..BEFORE].iter().position(|byte| *byte != 0), None, "{end}");
        let tail = &all[all.len() - after.len()..];
        assert_eq!(tail.iter().zip(&after).position(|(got, sent)| got != sent), None, "{end}");
    }
    assert_eq!(line["splices"], if policy == AT_ONCE { 2 } else { 0 }, "{line}");
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 2, "no gaps");
}

/// Writes a program that notes what it is told, and does this.
fn program(dir: &Path, does: &str) -> String {
    let (path, seen) = (dir.join("decide"), dir.join("seen"));
    let text = format!("#!/bin/sh\necho $WHEN $PROTOCOL $CLIENT $BYTES_UP >> {}\n{does}\n", seen.display());
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

/// What it answers, what becomes of the connection, and whether that counts as a failure. `go-on`: spliced again.
#[test_case(Family::V4, "echo go-on", "spliced", 0; "go on")]
#[test_case(Family::V6, "echo copy", "copying", 0; "copy")]
#[test_case(Family::V4, "echo kill", "", 0; "kill")]
#[test_case(Family::V6, "exit 1", "", 1; "fails")]
#[test_case(Family::V4, "echo perhaps", "", 1; "makes no sense")]
#[test_case(Family::V6, "sleep 60", "", 1; "is late")]
#[test_case(Family::V4, "while :; do echo kill; done", "", 1; "says too much")]
#[ignore = "root"]
fn a_program_is_asked(family: Family, does: &str, state: &str, failures: u64) {
    let home = tempfile::tempdir().unwrap();
    let path = program(home.path(), does);
    let ask = format!("then = \"ask\", program = \"{path}\", limit = 2, otherwise = \"kill\"");
    let (_setting, proxy, mut client) = spliced(family, &format!("{{ data = \"client\", {ask} }}"));
    let from = client.local_addr().unwrap();
    client.write_all(b"?").unwrap();
    triggered(&proxy, 1);
    if state.is_empty() {
        is_killed(client, 1);
    } else {
        client.read_exact(&mut [0]).unwrap();
        proxy.wait_flow(state);
        if state == "spliced" {
            eventually("the second splice", || {
                (proxy.count("proxy", "triggered") == 1 && proxy.flows_in("spliced") == 1).then_some(())
            });
        }
    }
    assert_eq!(proxy.count("proxy", "trigger_failures"), failures);
    let seen = fs::read_to_string(home.path().join("seen")).unwrap();
    assert!(seen.starts_with(&format!("client-data plug {from} ")), "{seen}");
}

/// One connection, and what is found in the program's place each time its client sends. Nothing of that harms the connection, and
/// no process is left.
#[test]
#[ignore = "root"]
fn a_program_that_is_not_there_any_more() {
    let home = tempfile::tempdir().unwrap();
    let path = program(home.path(), "echo go-on");
    let ask = format!("then = \"ask\", program = \"{path}\", limit = 2, otherwise = \"go-on\"");
    let (_setting, proxy, mut client) = spliced(Family::V4, &format!("{{ data = \"client\", {ask} }}"));
    let mut asked = 0;
    let mut go_on = |failures: u64| {
        asked += 1;
        round_trip(&mut client, b"?");
        triggered(&proxy, asked);
        eventually("a failure", || (proxy.count("proxy", "trigger_failures") == failures).then_some(()));
        proxy.wait_flow("spliced");
    };
    go_on(0);
    fs::remove_file(&path).unwrap();
    go_on(1);
    fs::create_dir(&path).unwrap();
    go_on(2);
    fs::remove_dir(&path).unwrap();
    fs::write(&path, "#!/bin/sh\necho go-on\n").unwrap();
    go_on(3); // it is not executable
    fs::remove_file(&path).unwrap();
    program(home.path(), "head -c 10000 /dev/zero; echo go-on");
    go_on(4);
    fs::write(&path, [0x7f; 500]).unwrap();
    go_on(5); // it is no program
    let child = home.path().join("child");
    program(home.path(), &format!("sleep 1000 &\necho $! > {}\necho go-on", child.display()));
    go_on(6); // its output has no end
    let child = fs::read_to_string(child).unwrap();
    let stat = format!("/proc/{}/stat", child.trim());
    eventually("the end of its child", || fs::read_to_string(&stat).is_err().then_some(()));
    let other = home.path().join("other");
    fs::create_dir(&other).unwrap();
    fs::rename(program(&other, "echo kill"), &path).unwrap();
    client.write_all(b"?").unwrap();
    is_killed(client, 1);
}
