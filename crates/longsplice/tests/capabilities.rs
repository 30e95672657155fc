//! Missing capabilities: the functions that still work, and the messages. Needs root and eBPF, and fails without.

use crate::running::{LONGSPLICE, Pins, Running, connect, echo, eventually, loopback_echo, round_trip};
use longsplice_lab::{
    Family, Lab, Shape,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use serde_json::Value;
use std::{fs, net::TcpListener, os::unix::fs::chown, process::Command};

const PORT: u16 = 7000;

/// The program in the forwarder with only these capabilities: even root has no more than the bounding set.
fn with(lab: &Lab, capabilities: &str) -> Command {
    let mut command = lab.forwarder.command("setpriv");
    command.args([&format!("--bounding-set=-all{capabilities}"), "--inh-caps=-all", "--", LONGSPLICE]);
    command
}

/// One connection through a proxy with these capabilities. Returns its flow
/// once the proxy has decided whether to splice it, and the proxy's messages.
fn relayed(capabilities: &str, hold: bool) -> (Value, String) {
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let pins = Pins::of(&lab.forwarder);
    let [front, server] = [FORWARDER_TO_CLIENT.port(Family::V4, PORT), SERVER.port(Family::V4, PORT)];
    echo(lab.server.run(|| TcpListener::bind(server)).unwrap());
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("longsplice.toml");
    let text = format!(
        "[[listener]]\nprotocol = \"plug\"\nlisten = \"{front}\"\ntarget = \"{server}\"\n\
         policy = {{ splice = \"at-once\", hold = {hold} }}\n"
    );
    fs::write(&config, text).unwrap();
    let arguments = ["--config", config.to_str().unwrap()];
    let mut proxy = Running::start(with(&lab, capabilities), None, &arguments, &[]);
    let mut stream = lab.client.run(|| connect(front));
    round_trip(&mut stream, &[1; 100_000]);
    let flow = decided(&proxy);
    round_trip(&mut stream, &[2; 100_000]);
    drop(stream);
    proxy.stop(&pins);
    (flow, proxy.messages())
}

/// The proxy's only flow, once it is spliced or refused.
fn decided(proxy: &Running) -> Value {
    eventually("a decision", || proxy.flows().into_iter().find(|f| f["state"] == "spliced" || !f["refusal"].is_null()))
}

#[test]
#[ignore = "root"]
fn what_is_missing_is_named() {
    for (capabilities, missing) in [
        ("", "CAP_NET_ADMIN, CAP_PERFMON, CAP_BPF"),
        ("+net_admin,+perfmon", "CAP_BPF"),
        ("+bpf,+perfmon", "CAP_NET_ADMIN"),
        ("+bpf,+net_admin", "CAP_PERFMON"),
    ] {
        let capabilities = if capabilities.is_empty() { String::new() } else { format!(",{capabilities}") };
        let (flow, said) = relayed(&capabilities, false);
        assert_eq!([&flow["state"], &flow["refusal"]], ["copying", "unprivileged"], "{capabilities}: {flow}\n{said}");
        let expected = format!(
            "connections are copied, not spliced (unprivileged): no privilege to load programs, without {missing}: run as"
        );
        assert!(said.contains(&expected), "{capabilities}: {said}");
    }
}

#[test]
#[ignore = "root"]
fn three_capabilities_are_enough() {
    let (flow, said) = relayed(",+bpf,+net_admin,+perfmon", false);
    assert_eq!(flow["state"], "spliced", "{flow}\n{said}");
}

/// The set-up in the README under Install: the program never runs as root, but root has created its folder.
#[test]
#[ignore = "root"]
fn another_user_with_three_capabilities_needs_a_folder_of_a_bpffs() {
    const NOBODY: u32 = 65534;
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let [front, server] = [FORWARDER_TO_CLIENT.port(Family::V4, PORT), SERVER.port(Family::V4, PORT)];
    echo(lab.server.run(|| TcpListener::bind(server)).unwrap());
    // readable and writable by that user, wherever the program was built
    let home = tempfile::tempdir().unwrap();
    let program = home.path().join("longsplice");
    fs::copy(LONGSPLICE, &program).unwrap();
    chown(home.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let start = |folder: &str| {
        let before = format!("mount -t bpf -o mode=711 none /sys/fs/bpf && mount -t tmpfs none /run; {folder}");
        let mut command = lab.forwarder.command("unshare");
        command.args(["-m", "sh", "-c", &format!("{before} exec \"$0\" \"$@\""), "setpriv"]);
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all,+bpf,+net_admin,+perfmon"]);
        command.args(["--ambient-caps=-all,+bpf,+net_admin,+perfmon", "--bounding-set=-all,+bpf,+net_admin,+perfmon"]);
        command.arg(&program);
        let plug = format!("{front}={server}");
        let arguments = ["--plug", &plug, "--splice", "at-once"];
        Running::start_in(home.path(), command, &arguments)
    };
    for (folder, state, refusal, says) in [
        (
            "mkdir -m 700 /sys/fs/bpf/longsplice; chown 65534 /sys/fs/bpf/longsplice;",
            "spliced",
            Value::Null,
            "splicing on",
        ),
        ("", "copying", "pins".into(), "make /sys/fs/bpf/longsplice for it as root, and chown it"),
    ] {
        let mut proxy = start(folder);
        let mut stream = lab.client.run(|| connect(front));
        round_trip(&mut stream, &[1; 100_000]);
        let flow = decided(&proxy);
        let said = proxy.messages();
        assert_eq!((&flow["state"], &flow["refusal"]), (&state.into(), &refusal), "{folder}: {flow}\n{said}");
        assert!(said.contains(says), "{said}");
        round_trip(&mut stream, &[2; 100_000]);
        drop(stream);
        let status = fs::read_to_string(format!("/proc/{}/status", proxy.id())).unwrap();
        assert!(status.contains("\nUid:\t65534\t65534\t65534\t65534\n"), "{status}");
        proxy.flows_end();
        proxy.shut_down();
    }
}

/// What root has left is not this user's to remove, and no reason for a warning.
#[test]
#[ignore = "root"]
fn nobody_is_warned_of_what_others_have_left() {
    let home = tempfile::tempdir().unwrap();
    let program = home.path().join("longsplice");
    fs::copy(LONGSPLICE, &program).unwrap();
    chown(home.path(), Some(65534), Some(65534)).unwrap();
    let folders = ["/sys/fs/bpf", "/run"].map(|at| format!("mkdir -m 700 -p {at}/longsplice;")).concat();
    let mounts = "mount -t bpf -o mode=711 none /sys/fs/bpf; mount -t tmpfs -o mode=755 none /run;";
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", &format!("{mounts} {folders} exec \"$0\" \"$@\""), "setpriv", "--reuid=65534"]);
    command.args(["--regid=65534", "--clear-groups", "--bounding-set=-all"]).arg(&program);
    let mut proxy = Running::start_in(home.path(), command, &["--plug", &format!("127.0.0.1:0={}", loopback_echo())]);
    let said = proxy.messages();
    assert_eq!(said.matches("WARN").count(), 1, "{said}");
    assert!(said.contains("connections are copied, not spliced (unprivileged)"), "{said}");
    proxy.client(&["stop"]);
    assert!(proxy.wait().success(), "{said}");
}

#[test]
#[ignore = "root"]
fn holding_needs_raw_sockets() {
    let cure = "cannot hold segments, which needs root or CAP_NET_RAW: flows with the hold policy are copied";
    let (flow, said) = relayed(",+bpf,+net_admin,+perfmon", true);
    assert_eq!([&flow["state"], &flow["refusal"]], ["copying", "unprivileged"], "{flow}\n{said}");
    assert!(said.contains(cure), "{said}");
    let (flow, said) = relayed(",+bpf,+net_admin,+perfmon,+net_raw", true);
    assert_eq!(flow["state"], "spliced", "{flow}\n{said}");
    assert!(!said.contains(cure), "{said}");
}

/// A proxy that has to splice does not start: it has no alternative.
#[test]
#[ignore = "root"]
fn connections_of_others_need_raw_sockets() {
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let pins = Pins::of(&lab.forwarder);
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("longsplice.toml");
    // the cure is that of the cause, whatever the port
    for (protocol, port) in [("transparent", 7000), ("tpot", 7000), ("tpot", 80)] {
        fs::write(&config, format!("[[listener]]\nprotocol = \"{protocol}\"\nlisten = \"0.0.0.0:{port}\"\n")).unwrap();
        let mut run = with(&lab, ",+bpf,+net_admin,+perfmon");
        run.args(["run", "--config"]).arg(&config).arg("--control").arg(dir.path().join("control"));
        let output = run.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{said}");
        assert!(said.contains(&format!("cannot listen on 0.0.0.0:{port}")) && said.contains("CAP_NET_RAW"), "{said}");
        assert!(!said.contains("CAP_NET_BIND_SERVICE"), "{said}");
        assert!(!pins.exist(), "nothing is left of the attempt");
    }
}
