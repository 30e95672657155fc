//! Flows that are listed, ended and released by conditions: `longsplice ls`, `kill` and `release`.

use crate::running::{
    AT_ONCE, Control, LONGSPLICE, Running, Setting, connect, eventually, listener, longsplice, loopback_echo,
    round_trip,
};
use longsplice_lab::{
    Family,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use serde_json::{Value, json};
use std::{
    fs::{self, Permissions},
    io::{ErrorKind, Read},
    net::TcpStream,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    process::{Command, Output},
};

const FRONT: u16 = 7000;
const BACK: u16 = 7001;

/// Two plugs that splice at once, `front` by IPv4 and `back` by IPv6.
fn setting() -> Setting {
    let plug = |name: &str, family: Family, port: u16| {
        let (at, to) = (FORWARDER_TO_CLIENT.port(family, port), SERVER.port(family, port));
        listener("plug", &at.to_string(), &format!("name = \"{name}\"\ntarget = \"{to}\"\n{AT_ONCE}"))
    };
    let setting = Setting::new(&(plug("front", Family::V4, FRONT) + &plug("back", Family::V6, BACK)));
    setting.echo(SERVER.port(Family::V4, FRONT));
    setting.echo(SERVER.port(Family::V6, BACK));
    setting
}

/// A client that has exchanged so many bytes.
fn client(setting: &Setting, (family, port): (Family, u16), bytes: usize) -> TcpStream {
    let at = FORWARDER_TO_CLIENT.port(family, port);
    let mut client = setting.lab.client.run(|| connect(at));
    round_trip(&mut client, &vec![7; bytes]);
    client
}

/// The numbers of the flows that `ls` lists with these options.
fn listed(proxy: &Running, options: &[&str]) -> Vec<u64> {
    let text = proxy.client(&[&["ls", "--json"], options].concat());
    let flows: Vec<Value> = serde_json::from_str(&text).unwrap();
    flows.iter().map(|flow| flow["id"].as_u64().unwrap()).collect()
}

fn is_reset(mut client: TcpStream) -> bool {
    matches!(client.read(&mut [0]), Err(error) if error.kind() == ErrorKind::ConnectionReset)
}

/// Asks the process whose control socket this is, as another user who is in this group.
fn ask_as_member(control: &Path, group: u32, what: &[&str]) -> Output {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", &format!("--groups={group}"), "--", LONGSPLICE]);
    command.args(what).arg("--control").arg(control).output().unwrap()
}

/// The control sockets belong to a group, whose members may use them; and to another one after an upgrade.
#[test]
#[ignore = "root"]
fn members_of_a_group_may_use_the_control_socket() {
    const GROUPS: [u32; 2] = [59_901, 59_902];
    let dir = tempfile::tempdir().unwrap();
    let (file, socket) = (dir.path().join("longsplice.toml"), dir.path().join("control.sock"));
    for path in [dir.path(), Path::new(LONGSPLICE)] {
        fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }
    let configure = |more: &str| {
        let haproxy = dir.path().join("haproxy.sock");
        let control = format!("[control]\nhaproxy = {haproxy:?}\n{more}\n");
        fs::write(&file, control + &listener("socks5", "127.0.0.1:0", "")).unwrap();
        haproxy
    };
    let start = || {
        let arguments = ["--copy-only", "--config", file.to_str().unwrap()];
        Running::start(Command::new(LONGSPLICE), Some(&socket), &arguments, &[])
    };
    let may = |group: u32| {
        let out = ask_as_member(&socket, group, &["ls"]);
        let said = String::from_utf8(out.stderr).unwrap();
        assert!(out.status.success() || said.contains("ermission denied"), "{said}");
        out.status.success()
    };
    let haproxy = configure("");
    let mut proxy = start();
    assert_eq!(GROUPS.map(may), [false; 2]);
    proxy.client(&["stop"]);
    assert!(proxy.wait().success());
    configure(&format!("group = \"{}\"", GROUPS[0]));
    let mut proxy = start();
    assert_eq!(GROUPS.map(may), [true, false]);
    let other = ask_as_member(&socket, GROUPS[0], &["upgrade", "--binary", "/bin/true"]);
    let said = String::from_utf8(other.stderr).unwrap();
    assert!(!other.status.success() && said.contains("only root, and the user who runs the program"), "{said}");
    let of = fs::metadata(&haproxy).unwrap();
    assert_eq!((of.gid(), of.mode() & 0o777), (GROUPS[0], 0o660));
    configure(&format!("group = \"{}\"\nmode = \"0660\"", GROUPS[1]));
    let refused = proxy.client_error(&["reload"]);
    assert!(refused.contains("control"), "{refused}");
    proxy.client(&["upgrade"]);
    assert!(proxy.wait().success(), "{}", proxy.messages());
    assert_eq!(GROUPS.map(may), [false, true]);
    assert_eq!(fs::metadata(&haproxy).unwrap().gid(), GROUPS[1]);
    proxy.client(&["stop"]);
    eventually("its end", || (!socket.exists()).then_some(()));
}

#[test]
#[ignore = "root"]
fn flows_are_chosen_by_conditions() {
    let setting = setting();
    let proxy = setting.start();
    let front = [10, 100_000, 10].map(|bytes| client(&setting, (Family::V4, FRONT), bytes));
    let back = [10, 10].map(|bytes| client(&setting, (Family::V6, BACK), bytes));
    eventually("all flows", || (listed(&proxy, &[]).len() == 5).then_some(()));
    let target = SERVER.port(Family::V6, BACK).to_string();
    let host = SERVER.ip(Family::V4).to_string();
    for (options, want) in [
        (&["--listener", "front"][..], 3),
        (&["--listener", "back"], 2),
        (&["--listener", "none"], 0),
        (&["--client", "10.0.0.0/8"], 3),
        (&["--client", "fd77::/16", "--listener", "front"], 0),
        (&["--server", &host], 3),
        (&["--server", "::/0"], 2),
        (&["--target", &target], 2),
        (&["--target", &host], 3),
        (&["--user", "ann"], 0),
        (&["--refusal", "policy"], 0),
        (&["--min-bytes", "1000"], 1),
        (&["--min-age", "3600"], 0),
        (&["--limit", "1", "--listener", "back"], 1),
        (&["--state", "spliced", "--listener", "back"], 2),
    ] {
        eventually(&format!("{options:?}"), || (listed(&proxy, options).len() == want).then_some(()));
    }
    let [large] = listed(&proxy, &["--min-bytes", "1000"])[..] else { panic!("one is large") };
    let by_bytes = listed(&proxy, &["--sort", "bytes"]);
    assert!(by_bytes.len() == 5 && by_bytes[0] == large, "{large} of {by_bytes:?}");
    assert_eq!(listed(&proxy, &["--sort", "bytes", "--limit", "1"]), [large]);
    assert_eq!(listed(&proxy, &["--sort", "rate", "--listener", "back"]).len(), 2);
    let sums: Value = serde_json::from_str(&proxy.client(&["ls", "--summary", "--json"])).unwrap();
    let sums = sums["flows"].as_array().unwrap();
    let of = |name: &str, key: &str| {
        let of_listener = sums.iter().filter(|sum| sum["listener"] == name);
        of_listener.map(|sum| sum[key].as_u64().unwrap()).sum::<u64>()
    };
    assert_eq!((of("front", "flows"), of("back", "flows"), of("back", "bytes_up")), (3, 2, 20), "{sums:?}");
    assert!(of("front", "bytes_up") >= 100_020, "{sums:?}");
    assert_eq!(proxy.client(&["kill", &large.to_string()]), "killed 1\n");
    let [mut one, two, mut three] = front;
    assert!(is_reset(two), "the one that was named");
    eventually("its end", || (listed(&proxy, &[]).len() == 4).then_some(()));
    [&mut one, &mut three].into_iter().for_each(|client| round_trip(client, b"alive"));
    assert_eq!(proxy.client(&["kill", "--listener", "back", "--client", "fd77::/16"]), "killed 2\n");
    assert!(back.into_iter().all(is_reset));
    [&mut one, &mut three].into_iter().for_each(|client| round_trip(client, b"alive"));
    // a script's typo ends nothing
    let mut control = Control::of(&proxy);
    for wrong in
        [json!({}), json!({ "wich": {} }), json!({ "which": { "usr": "ann" } }), json!({ "ids": [1], "which": {} })]
    {
        let mut request = json!({ "version": 1, "ask": "kill" });
        request.as_object_mut().unwrap().extend(wrong.as_object().unwrap().clone());
        control.send(&format!("{request}\n"));
        assert!(control.answer()["error"].is_string(), "{request}");
    }
    [&mut one, &mut three].into_iter().for_each(|client| round_trip(client, b"alive"));
    assert_eq!(proxy.client(&["kill", "--all"]), "killed 2\n");
    assert!([one, three].into_iter().all(is_reset));
    proxy.flows_end();
    assert_eq!(proxy.client(&["kill", "--all"]), "killed 0\n");
    let missing = proxy.client_error(&["kill", &large.to_string()]);
    assert!(missing.contains(&format!("no flow of this process with these numbers: {large}")), "{missing}");
}

/// Runs the command, which may fail. Returns what it says, and whether it succeeds.
fn release(proxy: &Running, options: &[&str]) -> (String, bool) {
    let control = ["--control", proxy.control().to_str().unwrap()];
    let out = longsplice(&[&["release"], options, &control].concat());
    assert_eq!(String::from_utf8(out.stderr).unwrap(), "", "{options:?}");
    (String::from_utf8(out.stdout).unwrap(), out.status.success())
}

/// Spliced flows lose their sockets on command and go on, and can be taken back. It is said of the others why they have not.
#[test]
#[ignore = "root"]
fn spliced_flows_are_released() {
    const COPIED: u16 = 7002;
    const WAITS: u16 = 7003;
    let plug = |name: &str, port: u16, more: &str| {
        let at = FORWARDER_TO_CLIENT.port(Family::V4, port).to_string();
        listener("plug", &at, &format!("name = \"{name}\"\ntarget = \"{}\"\n{more}", SERVER.port(Family::V4, FRONT)))
    };
    let stays = "policy = { splice = \"at-once\", release_after = \"never\" }";
    let trigger = format!("{stays}\ntrigger = [{{ data = \"server\", then = \"copy\" }}]");
    let setting = Setting::new(
        &(plug("front", FRONT, stays)
            + &plug("copied", COPIED, "policy = { splice = 1000000000 }")
            + &plug("waits", WAITS, &trigger)),
    );
    setting.echo(SERVER.port(Family::V4, FRONT));
    let mut proxy = setting.start();
    let open = |port: u16| setting.connect(FORWARDER_TO_CLIENT.port(Family::V4, port));
    let (mut one, mut two, mut copied, waits) = (open(FRONT), open(FRONT), open(COPIED), open(WAITS));
    [&mut one, &mut two, &mut copied].into_iter().for_each(|client| round_trip(client, &[7; 1000]));
    eventually("three that are spliced", || (proxy.flows_in("spliced") == 3).then_some(()));
    let of =
        |name: &str| listed(&proxy, &["--listener", name]).into_iter().map(|id| id.to_string()).collect::<Vec<_>>();
    let (fronts, [copying, waiting]) = (of("front"), ["copied", "waits"].map(|name| of(name).remove(0)));
    proxy.comes_to_rest(); // commands have descriptors, too
    let before = proxy.descriptors();

    // one that has just been spliced may not be there yet
    let said = eventually("its release", || Some(release(&proxy, &[&fronts[0]])).filter(|(_, is_all)| *is_all));
    assert_eq!(said, ("released 1\n".to_owned(), true));
    proxy.wait_flow("released");
    eventually("two descriptors less", || (proxy.descriptors() == before - 2).then_some(()));
    [&mut one, &mut two].into_iter().for_each(|client| round_trip(client, &[8; 100_000]));
    let all = [&fronts[0], &copying, &waiting, "4000000000", &fronts[1]];
    let (said, is_all) = eventually("the other one", || {
        Some(release(&proxy, &all)).filter(|(said, _)| said.starts_with("released 1\n"))
    });
    assert!(!is_all, "{said}");
    for (id, why) in [
        (&fronts[0], "it has no sockets any more"),
        (&copying, "it is not spliced: it is copied"),
        (&waiting, "it keeps its sockets: its trigger waits"),
        (&"4000000000".to_owned(), "there is no flow"),
    ] {
        assert!(said.contains(&format!("not {id}: {why}")), "{said}");
    }
    eventually("both", || (proxy.flows_in("released") == 2).then_some(()));

    // both come back, and may go again
    fronts.iter().for_each(|id| drop(proxy.client(&["unsplice", id])));
    eventually("both are copied", || (proxy.flows_in("copying") == 3).then_some(()));
    [&mut one, &mut two].into_iter().for_each(|client| round_trip(client, &[9; 100_000]));
    fronts.iter().for_each(|id| drop(proxy.client(&["splice", id])));
    eventually("both are spliced", || (proxy.flows_in("spliced") == 3).then_some(()));
    let (said, is_all) = eventually("both again", || {
        let said = release(&proxy, &["--client", "10.0.0.0/8"]);
        (proxy.flows_in("released") == 2).then_some(said)
    });
    assert!(is_all, "whoever gives conditions means what can be: {said}");
    for why in ["it is not spliced: it is copied", "it keeps its sockets: its trigger"] {
        assert!(said.contains(&format!("not released: 1: {why}")), "{said}");
    }
    [&mut one, &mut two].into_iter().for_each(|client| round_trip(client, &[10; 100_000]));

    let mut control = Control::of(&proxy);
    let mut ask = |what: Value| {
        let mut request = json!({ "version": 1, "ask": "release" });
        request.as_object_mut().unwrap().extend(what.as_object().unwrap().clone());
        control.ask(&request).unwrap()
    };
    let all = ask(json!({ "which": {} }));
    let reasons: Vec<_> = all["left"].as_array().unwrap().iter().map(|one| (&one["reason"], &one["count"])).collect();
    let [one_copied, two_released, one_waits] = [json!("copying"), json!("released"), json!("trigger")];
    let want = [(&one_copied, &json!(1)), (&two_released, &json!(2)), (&one_waits, &json!(1))];
    assert_eq!((&all["released"], reasons), (&json!(0), want.to_vec()), "{all}");
    let id: u64 = copying.parse().unwrap();
    assert_eq!(ask(json!({ "ids": [id] }))["left"][0]["reason"], "copying");
    for wrong in
        [json!({}), json!({ "wich": {} }), json!({ "which": { "usr": "ann" } }), json!({ "ids": [1], "which": {} })]
    {
        assert!(ask(wrong.clone())["error"].is_string(), "{wrong}");
    }
    assert_eq!(proxy.client(&["kill", "--listener", "front"]), "killed 2\n");
    assert!([one, two].into_iter().all(is_reset));
    drop((copied, waits));
    proxy.stop(&setting.pins[0]);
}

#[test]
fn what_is_only_copied_is_not_released() {
    let proxy = Running::copying(&loopback_echo(), &[]);
    let mut client = connect(proxy.address());
    round_trip(&mut client, b"alive");
    for options in [&["1"][..], &["--all"], &["--user", "ann"]] {
        let why = proxy.client_error(&[&["release"], options].concat());
        assert!(why.contains("no flow of this process can be spliced"), "{why}");
    }
    round_trip(&mut client, b"alive");
}

#[test]
fn what_is_meant_has_to_be_said() {
    for (arguments, want) in [
        (&["kill"][..], "by number, by conditions, or with --all"),
        (&["kill", "7", "--user", "ann"], "not by both"),
        (&["kill", "--client", "10.0.0.1/8"], "invalid value '10.0.0.1/8'"),
        (&["ls", "--server", "x"], "invalid value 'x'"),
        (&["kill", "0x7"], "invalid value '0x7'"),
        (&["release"], "name the flows to release: by number, by conditions, or with --all"),
        (&["release", "7", "--user", "ann"], "not by both"),
    ] {
        let out = longsplice(arguments);
        let said = String::from_utf8(out.stderr).unwrap();
        assert!(!out.status.success() && said.contains(want), "{arguments:?}: {said}");
    }
}
