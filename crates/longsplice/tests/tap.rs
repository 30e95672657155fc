//! S19: `--tap`, files of what passes. Needs root and eBPF.

mod running;

use longsplice_lab::{
    Family, Lab, Shape, topology,
    traffic::{Script, connect, converse, intact, listen, serve},
};
use running::{LONGSPLICE, Running, eventually};
use serde_json::Value;
use std::{
    fs,
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

#[test]
fn s19_a_directory_that_cannot_be_written_is_named() {
    let out = running::longsplice(&["run", "--copy-only", "--plug", "127.0.0.1:0=127.0.0.1:9", "--tap", "/proc/no"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("cannot write taps into /proc/no"), "{said}");
}
