//! S19: `--tap`, files of the traffic. Needs root and eBPF.

use crate::running::{self, LONGSPLICE, Pins, Running, echo, eventually, loopback_echo, round_trip};
use longsplice_lab::{
    Family, Lab, Shape, topology,
    traffic::{Script, connect, converse, intact, listen, serve},
};
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

/// Everything sent by client and server, copied or forwarded, is completely in the files.
#[test]
#[ignore = "root"]
fn files_equal_what_has_passed() {
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let _pins = Pins::of(&lab.forwarder);
    for family in Family::BOTH {
        let dir = tempfile::tempdir().unwrap();
        let taps = dir.path().join("to/be/made");
        let (server, at) = (topology::SERVER.port(family, PORT), topology::FORWARDER_TO_CLIENT.port(family, PORT));
        // the ring holds the copies of both streams, should their reader not run for a while
        let answer = Script::answerer().bytes(7_000_000).pace(7_000_000);
        let serving = serve(lab.server.run(|| listen(server, &answer)).unwrap(), 1, answer);
        let plug = format!("{at}={server}");
        let more = ["--tap", taps.to_str().unwrap()];
        let mut proxy =
            Running::start(lab.forwarder.command(LONGSPLICE), None, &["--plug", &plug, "--splice", "at-once"], &more);
        let opener = Script::opener(7).bytes(7_000_000).pace(7_000_000);
        let client = lab.client.spawn(move || converse(connect(at, &opener).unwrap(), &opener));
        proxy.wait_flow("spliced");
        proxy.client(&["unsplice", "1"]);
        proxy.wait_flow("copying");
        proxy.client(&["splice", "1"]);
        proxy.wait_flow("spliced");
        let (client, server) = (client.join().unwrap(), serving.join().remove(0));
        intact(&client, &server).unwrap();
        let counters = eventually("both streams in their files", || {
            let counters = proxy.counters();
            (counters["proxy"]["tap_bytes"] == 14_000_000).then_some(counters)
        });
        assert_eq!((&counters["proxy"]["tap_gap_bytes"], &counters["proxy"]["tap_errors"]), (&0.into(), &0.into()));
        assert!(counters["verdicts"]["tapped"].as_u64().unwrap() > 0, "{counters}");
        assert_eq!(counters["verdicts"]["tap-lost"], 0);
        proxy.shut_down();
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

/// The reader of the copies has exited: the flow continues, and from the next start
/// on, or the end of a process that leaves its flows, it takes the short way.
#[test]
#[ignore = "root"]
fn taps_end_with_their_process() {
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
        proxy.wait_flow("spliced");
        round_trip(&mut connection, &[7; 100_000]);
        if leave {
            proxy.shut_down();
            assert_eq!(files(dir.path(), "").iter().map(|f| f.metadata().unwrap().len()).sum::<u64>(), 200_010);
        } else {
            proxy.kill();
            round_trip(&mut connection, &[8; 100_000]);
        }
        proxy = start(&[]);
        let copies = || ["tapped", "tap-lost"].map(|name| proxy.count("verdicts", name));
        let before = copies();
        assert!(before[0] > 0);
        round_trip(&mut connection, &[9; 100_000]);
        assert_eq!(copies(), before);
        drop(connection);
        proxy.client(&["stop", "--flush"]);
        assert!(proxy.wait().success());
    }
}

/// Taps also work without the kernel path.
#[test]
fn copied_connections_are_tapped() {
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
        eventually(end, || (fs::read(files(dir.path(), end).first()?).unwrap() == body).then_some(()));
    }
    assert_eq!(files(dir.path(), "").len(), 2);
}

/// A disk of limited size, unmounted on drop.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(size: usize) -> SmallDisk {
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={size}");
        let out = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "taps"]).arg(dir.path()).output().unwrap();
        assert!(out.status.success(), "{out:?}");
        SmallDisk(dir)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let out = Command::new("umount").arg("--lazy").arg(self.0.path()).output();
        assert!(std::thread::panicking() || out.is_ok_and(|o| o.status.success()), "{:?} stays mounted", self.0.path());
    }
}

/// The data in the file and the marked gaps add up to the traffic; otherwise the file does not get its final name.
#[test]
#[ignore = "root"]
fn nothing_looks_whole_on_a_full_disk() {
    const DISK: usize = 2 << 20;
    let disk = SmallDisk::new(DISK);
    let taps = disk.0.path().join("taps");
    let proxy = Running::copying(&loopback_echo(), &["--tap", taps.to_str().unwrap()]);
    let full = disk.0.path().join("full");
    let errors = || proxy.count("proxy", "tap_errors");
    let body: Vec<u8> = (0..100_000u32).map(|i| 1 + (i.wrapping_mul(i) >> 7) as u8 % 255).collect();
    // before the disk is full; while it is full, so that the end cannot be recorded; and with space again
    let (mut parts, mut names) = (0, 0);
    for (room_before, room_after) in [(true, true), (true, false), (false, false), (false, true)] {
        let _ = fs::remove_file(&full);
        if !room_before {
            fill(&full);
        }
        let mut connection = running::connect(proxy.address());
        let port = connection.local_addr().unwrap().port();
        round_trip(&mut connection, &body);
        eventually("the tap of the first part", || {
            let mine = files(&taps, "").into_iter().filter(|f| f.to_str().unwrap().contains(&format!("-{port}-")));
            let there = mine.filter(|f| f.metadata().is_ok_and(|m| m.len() == body.len() as u64)).count();
            (there == 2 || (!room_before && errors() > 0)).then_some(())
        });
        fill(&full);
        let before = errors();
        round_trip(&mut connection, &body);
        eventually("refused", || (errors() >= before + 2).then_some(()));
        if room_after {
            fs::remove_file(&full).unwrap();
        }
        drop(connection);
        for end in ["client", "server"] {
            let name = format!("-{port}-{end}");
            let (named, part) = eventually("its end", || {
                let [named, part] = ["", ".part"].map(|more| files(&taps, &format!("{name}{more}")).pop());
                let length = named.as_ref().or(part.as_ref())?.metadata().ok()?.len();
                // it gets its name a moment after its last byte
                (length == 2 * body.len() as u64 && named.is_some() == room_after).then_some((named, part))
            });
            assert_eq!((named.is_some(), part.is_some()), (room_after, !room_after), "{name}");
            let Some(named) = named else {
                parts += 1;
                continue;
            };
            names += 1;
            let mut want = body.repeat(2);
            let gaps = fs::read_to_string(
                named.with_file_name(format!("{}.gaps", named.file_name().unwrap().to_str().unwrap())),
            )
            .unwrap();
            assert!(!gaps.is_empty());
            for line in gaps.lines() {
                let (at, length) = line.split_once(' ').unwrap();
                let (at, length): (usize, usize) = (at.parse().unwrap(), length.parse().unwrap());
                want[at..at + length].fill(0);
            }
            let got = fs::read(&named).unwrap();
            // some of a gap may have been written
            let wrong =
                got.iter().zip(&want).zip(body.iter().cycle()).position(|((g, w), b)| g != w && (*w != 0 || g != b));
            assert_eq!((got.len(), wrong), (want.len(), None), "{gaps}");
        }
    }
    assert_eq!((parts, names), (4, 4));
}

/// Fills the rest of the disk.
fn fill(file: &Path) {
    let mut file = fs::OpenOptions::new().append(true).create(true).open(file).unwrap();
    while file.write(&[1; 4096]).is_ok() {}
}

/// Heads and the first bytes of bodies are written by one call, and must be in the files, too.
#[test]
fn messages_are_tapped_with_their_heads() {
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
fn a_cache_that_cannot_be_kept_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("l.toml");
    let cache = "cache.dir = \"/proc/no\"";
    fs::write(&config, format!("[[listener]]\nprotocol = \"http\"\nlisten = \"127.0.0.1:0\"\n{cache}\n")).unwrap();
    let out = running::longsplice(&["run", "--copy-only", "--config", config.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("cannot keep a cache in /proc/no"), "{said}");
}

#[test]
fn a_directory_that_cannot_be_written_is_named() {
    let out = running::longsplice(&["run", "--copy-only", "--plug", "127.0.0.1:0=127.0.0.1:9", "--tap", "/proc/no"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("cannot write taps into /proc/no"), "{said}");
}
