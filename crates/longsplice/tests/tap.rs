//! S19: `--tap`, files of what passes. Needs root and eBPF.

mod running;

use longsplice_lab::{
    Family, Lab, Shape, topology,
    traffic::{Script, connect, converse, intact, listen, serve},
};
use running::{LONGSPLICE, Pins, Running, echo, eventually, loopback_echo, round_trip};
use serde_json::Value;
use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    path::{Path, PathBuf},
    process::Command,
};

const PORT: u16 = 7000;

fn sha256(file: &Path) -> String {
    let out = Command::new("sha256sum").arg(file).output().unwrap();
    assert!(out.status.success(), "{out:?}");
    String::from_utf8(out.stdout).unwrap().split(' ').next().unwrap().to_owned()
}

fn files(dir: &Path, end: &str) -> Vec<PathBuf> {
    let all = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    all.filter(|p| p.to_str().unwrap().ends_with(end)).collect()
}

/// What client and server have sent, copied and forwarded, is in the files, whole.
#[test]
fn needs_root_and_bpf_s19_files_equal_what_has_passed() {
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let _pins = Pins::of(&lab.forwarder);
    for family in Family::BOTH {
        let dir = tempfile::tempdir().unwrap();
        let taps = dir.path().join("to/be/made");
        let (server, at) = (topology::SERVER.port(family, PORT), topology::FORWARDER_TO_CLIENT.port(family, PORT));
        let answer = Script::answerer().bytes(12_000_000).pace(12_000_000);
        let serving = serve(lab.server.run(|| listen(server, &answer)).unwrap(), 1, answer);
        let plug = format!("{at}={server}");
        let more = ["--tap", taps.to_str().unwrap()];
        let mut proxy =
            Running::start(lab.forwarder.command(LONGSPLICE), None, &["--plug", &plug, "--splice", "at-once"], &more);
        let opener = Script::opener(7).bytes(12_000_000).pace(12_000_000);
        let client = lab.client.spawn(move || converse(connect(at, &opener).unwrap(), &opener));
        let wait = |state: &str| {
            eventually(state, || {
                let flows: Value = serde_json::from_str(&proxy.client(&["ls", "--json"])).unwrap();
                (flows[0]["state"] == state).then_some(())
            });
        };
        wait("spliced");
        proxy.client(&["unsplice", "1"]);
        wait("copying");
        proxy.client(&["splice", "1"]);
        wait("spliced");
        let (client, server) = (client.join().unwrap(), serving.join().remove(0));
        intact(&client, &server).unwrap();
        let counters = eventually("both streams in their files", || {
            let counters: Value = serde_json::from_str(&proxy.client(&["counters", "--json"])).unwrap();
            (counters["proxy"]["tap_bytes"] == 24_000_000).then_some(counters)
        });
        assert_eq!((&counters["proxy"]["tap_gap_bytes"], &counters["proxy"]["tap_errors"]), (&0.into(), &0.into()));
        assert!(counters["verdicts"]["tapped"].as_u64().unwrap() > 0, "{counters}");
        assert_eq!(counters["verdicts"]["tap-lost"], 0);
        proxy.client(&["stop"]);
        assert!(proxy.wait().success());
        for (end, report) in [("-client", &client), ("-server", &server)] {
            let [file] = &files(&taps, end)[..] else { panic!("one file {end}: {:?}", files(&taps, "")) };
            let from = client.local.unwrap();
            let name = format!("-1-{}-{}{end}", from.ip(), from.port());
            assert!(file.to_str().unwrap().ends_with(&name), "{file:?} is of {from}");
            assert_eq!(sha256(file), report.sha256_sent, "{end}");
        }
        assert_eq!(files(&taps, "").len(), 2, "no gaps");
    }
}

/// Whoever reads the copies is gone: the flow goes on, and from the next start on, or the end of one that leaves flows, the short way.
#[test]
fn needs_root_and_bpf_s19_taps_end_with_their_process() {
    for leave in [true, false] {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let _pins = Pins::of(&lab.forwarder);
        let (server, at) =
            (topology::SERVER.port(Family::V4, PORT), topology::FORWARDER_TO_CLIENT.port(Family::V4, PORT));
        echo(lab.server.run(|| TcpListener::bind(server)).unwrap());
        let (dir, plug) = (tempfile::tempdir().unwrap(), format!("{at}={server}"));
        let start = |more: &[&str]| {
            let arguments = ["--plug", &plug, "--splice", "at-once", "--leave-flows"];
            Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, more)
        };
        let mut proxy = start(&["--tap", dir.path().to_str().unwrap()]);
        let mut connection = lab.client.run(|| running::connect(at));
        round_trip(&mut connection, b"hello");
        eventually("spliced", || proxy.client(&["ls"]).contains("spliced").then_some(()));
        round_trip(&mut connection, &[7; 100_000]);
        if leave {
            proxy.client(&["stop"]);
            assert!(proxy.wait().success());
            assert_eq!(files(dir.path(), "").iter().map(|f| f.metadata().unwrap().len()).sum::<u64>(), 200_010);
        } else {
            proxy.kill();
            round_trip(&mut connection, &[8; 100_000]);
        }
        proxy = start(&[]);
        let copies = || {
            let counters: Value = serde_json::from_str(&proxy.client(&["counters", "--json"])).unwrap();
            ["tapped", "tap-lost"].map(|name| counters["verdicts"][name].as_u64().unwrap())
        };
        let before = copies();
        assert!(before[0] > 0);
        round_trip(&mut connection, &[9; 100_000]);
        assert_eq!(copies(), before);
        drop(connection);
        proxy.client(&["stop", "--flush"]);
        assert!(proxy.wait().success());
    }
}

/// Without the kernel path, too.
#[test]
fn s19_copied_connections_are_tapped() {
    let dir = tempfile::tempdir().unwrap();
    let proxy = Running::copying(&loopback_echo(), &["--tap", dir.path().to_str().unwrap()]);
    let mut connection = running::connect(proxy.address());
    let body: Vec<u8> = (0..1_000_000u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect();
    let mut sender = connection.try_clone().unwrap();
    let sent = body.clone();
    let sending = std::thread::spawn(move || sender.write_all(&sent).unwrap());
    let mut back = vec![0; body.len()];
    connection.read_exact(&mut back).unwrap();
    sending.join().unwrap();
    drop(connection);
    for end in ["-client", "-server"] {
        eventually(end, || (fs::read(&files(dir.path(), end)[0]).unwrap() == body).then_some(()));
    }
    assert_eq!(files(dir.path(), "").len(), 2);
}

/// Heads and the first bytes of bodies are written by one call: they are in the files as well.
#[test]
fn s19_messages_are_tapped_with_their_heads() {
    let dir = tempfile::tempdir().unwrap();
    let (config, taps) = (dir.path().join("l.toml"), dir.path().join("taps"));
    let rule = "rules = [{ action = \"allow\", target = \"127.0.0.0/8\" }]\ntap = \"taps\"";
    fs::write(&config, format!("[[listener]]\nprotocol = \"http\"\nlisten = \"127.0.0.1:0\"\n{rule}\n")).unwrap();
    let arguments = ["--copy-only", "--config", config.to_str().unwrap()];
    let proxy = Running::start(Command::new(LONGSPLICE), None, &arguments, &[]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let asked =
        format!("GET http://{}/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", listener.local_addr().unwrap());
    let serving = std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            request.push(byte[0]);
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello").unwrap();
    });
    let mut client = running::connect(proxy.address());
    client.write_all(asked.as_bytes()).unwrap();
    let mut got = Vec::new();
    client.read_to_end(&mut got).unwrap();
    serving.join().unwrap();
    drop(client);
    assert!(got.ends_with(b"hello"));
    for (end, want) in [("-client", asked.as_bytes()), ("-server", &got[..])] {
        eventually(end, || (fs::read(files(&taps, end).first()?).unwrap() == want).then_some(()));
    }
    assert_eq!(files(&taps, "").len(), 2, "no gaps");
}

#[test]
fn s19_a_cache_that_cannot_be_kept_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("l.toml");
    let cache = "cache.dir = \"/proc/no\"";
    fs::write(&config, format!("[[listener]]\nprotocol = \"http\"\nlisten = \"127.0.0.1:0\"\n{cache}\n")).unwrap();
    let out = running::longsplice(&["run", "--copy-only", "--config", config.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("cannot keep a cache in /proc/no"), "{said}");
}

#[test]
fn s19_a_directory_that_cannot_be_written_is_named() {
    let out = running::longsplice(&["run", "--copy-only", "--plug", "127.0.0.1:0=127.0.0.1:9", "--tap", "/proc/no"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("cannot write taps into /proc/no"), "{said}");
}
