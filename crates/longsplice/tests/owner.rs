//! One data path per network namespace, and no leftovers of
//! namespaces that are gone. Needs root and eBPF, and fails without.

use crate::running::{self, LONGSPLICE, Pins, Running, connect, eventually, round_trip};
use longsplice_lab::{
    Family, Lab, Shape,
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::{self, Cue, Script, converse, intact, listen, serve},
};
use nix::sys::signal::Signal;
use std::{
    collections::BTreeSet,
    fs,
    net::{TcpListener, TcpStream},
    os::unix::{
        fs::{MetadataExt, chown},
        net::UnixListener,
    },
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

struct Place {
    lab: Lab,
    pins: Pins,
    folder: PathBuf,
}

impl Place {
    fn new() -> Place {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let inode = fs::metadata(lab.forwarder.path()).unwrap().ino();
        lab.server.run(|| running::echo(TcpListener::bind(SERVER.port(Family::V4, 7001)).unwrap()));
        let folder = Path::new("/sys/fs/bpf/longsplice").join(format!("net-{inode}"));
        Place { pins: Pins::of(&lab.forwarder), lab, folder }
    }

    /// Starts a proxy in its own mount namespace, after the commands in `mount`.
    fn proxy(&self, mount: &str, port: u16) -> Running {
        let plug = format!("{}={}", FORWARDER_TO_CLIENT.port(Family::V4, port), SERVER.port(Family::V4, 7001));
        let mut command = self.lab.forwarder.command("unshare");
        command.args(["-m", "sh", "-c", &format!("{mount} exec \"$0\" \"$@\""), LONGSPLICE]);
        Running::start(command, None, &["--plug", &plug, "--splice", "at-once"], &[])
    }

    fn talk(&self, port: u16) -> TcpStream {
        let mut stream = self.lab.client.run(|| connect(FORWARDER_TO_CLIENT.port(Family::V4, port)));
        round_trip(&mut stream, b"hello");
        stream
    }

    /// A connection spliced by a process that has died.
    fn left(&self) -> TcpStream {
        let mut proxy = self.proxy("", 7001);
        let stream = self.talk(7001);
        eventually_spliced(&proxy, 1);
        proxy.kill();
        stream
    }
}

fn states(proxy: &Running) -> Vec<String> {
    proxy.flows().iter().map(|f| f["state"].as_str().unwrap().to_owned()).collect()
}

fn eventually_spliced(proxy: &Running, n: usize) {
    eventually("all are spliced", || (states(proxy) == vec!["spliced"; n]).then_some(()));
}

fn end(mut proxy: Running) {
    proxy.signal(Signal::SIGTERM);
    assert!(proxy.wait().success(), "{}", proxy.messages());
}

/// Containers that share a network namespace do not share /run, and perhaps not bpffs either.
#[test]
#[ignore = "root"]
fn a_second_process_takes_nothing_away() {
    let place = Place::new();
    let first = place.proxy("", 7001);
    let mut old = place.talk(7001);
    eventually_spliced(&first, 1);
    for (mount, why) in [
        ("mount -t tmpfs none /run;", "another process runs the data path"),
        ("mount -t tmpfs none /run; mount -t bpf none /sys/fs/bpf;", "another data path is attached"),
    ] {
        let second = place.proxy(mount, 7002);
        assert!(second.messages().contains(why), "{}", second.messages());
        round_trip(&mut place.talk(7002), &[1; 100_000]);
        round_trip(&mut old, &[2; 100_000]);
        end(second);
        round_trip(&mut old, &[3; 100_000]);
    }
    let mut new = place.talk(7001);
    eventually_spliced(&first, 2);
    round_trip(&mut new, &[4; 100_000]);
    drop((old, new));
    end(first);
    assert!(!place.pins.exist());
}

/// Two containers of a pod: each has its own bpffs and /run, and no more than what README recommends. A process needs no
/// further privilege to see that another one is there, and it matters on no device, since both would use the same ports.
#[test]
#[ignore = "root"]
fn a_second_process_sees_the_first_whatever_its_privileges() {
    const RECOMMENDED: &str = "-all,+bpf,+net_admin,+perfmon";
    let place = Place::new();
    let proxy = |capabilities: &str, port: u16, device: &str| {
        let plug = format!("{}={}", FORWARDER_TO_CLIENT.port(Family::V4, port), SERVER.port(Family::V4, 7001));
        let mut command = place.lab.forwarder.command("unshare");
        command.args(["-m", "sh", "-c", "mount -t tmpfs none /run; mount -t bpf none /sys/fs/bpf; exec \"$0\" \"$@\""]);
        command.args(["setpriv", &format!("--bounding-set={capabilities}"), "--inh-caps=-all", "--", LONGSPLICE]);
        Running::start(command, None, &["--plug", &plug, "--splice", "at-once", "--device", device], &[])
    };
    let devices = place.lab.forwarder.run(|| longsplice_datapath::devices().unwrap());
    let [one, other] = [0, 1].map(|i| devices[i].name.as_str());
    for (first, second) in [("+all", RECOMMENDED), (RECOMMENDED, "+all"), (RECOMMENDED, RECOMMENDED)] {
        let first = proxy(first, 7001, one);
        assert!(first.messages().contains("splicing on"), "{}", first.messages());
        for device in [one, other] {
            let second = proxy(second, 7002, device);
            let said = second.messages();
            assert!(said.contains("other-process") && said.contains("another data path is attached"), "{said}");
            round_trip(&mut place.talk(7002), &[1; 100_000]);
            end(second);
        }
        end(first);
    }
}

/// If pins cannot be removed at the end, the client that asked for the stop gets the error, too.
#[test]
#[ignore = "root"]
fn a_stop_that_leaves_something_is_no_success() {
    let place = Place::new();
    let mut proxy = place.proxy("", 7001);
    let there = place.folder.join("there");
    // mounted where only the proxy sees it, so that the mount is gone with it
    let mut mount = Command::new("nsenter");
    mount.args(["--mount", "--target", &proxy.id().to_string(), "sh", "-c", "mkdir $0 && mount -t tmpfs none $0"]);
    assert!(mount.arg(&there).status().unwrap().success());
    let why = proxy.client_error(&["stop"]);
    assert!(why.contains("not cleanly: cannot remove /sys/fs/bpf/longsplice/net-"), "{why}");
    assert_eq!(proxy.wait().code(), Some(1));
}

/// Someone removes the pins. The process has descriptors of all pinned objects, so nothing is lost.
#[test]
#[ignore = "root"]
fn pins_that_are_removed_come_back() {
    const DEADLINE: Duration = Duration::from_secs(120); // of all steps on a busy machine
    let place = Place::new();
    let [front, server] = [FORWARDER_TO_CLIENT.port(Family::V4, 7003), SERVER.port(Family::V4, 7003)];
    let plug = format!("{front}={server}");
    let command = place.lab.forwarder.command(LONGSPLICE);
    let mut first = Running::start(command, None, &["--plug", &plug, "--splice", "at-once"], &[]);
    let enough = Cue::default();
    let answer = Script::answerer().until(&enough, 2_000_000).deadline(DEADLINE);
    let serving = place.lab.server.run(|| serve(listen(server, &answer).unwrap(), 1, answer.clone()));
    let script = Script::opener(1).until(&enough, 2_000_000).deadline(DEADLINE);
    let client = place.lab.client.spawn(move || converse(traffic::connect(front, &script).unwrap(), &script));
    eventually_spliced(&first, 1);
    let pins = || {
        let entries = fs::read_dir(&place.folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().into_string().unwrap()).collect::<BTreeSet<_>>()
    };
    let all = pins();
    let link = all.iter().find(|name| name.starts_with("ingress-")).unwrap();
    for removed in [vec!["legs"], vec!["abi", link], vec![]] {
        let said = first.messages().matches("had been removed").count();
        if removed.is_empty() {
            fs::remove_dir_all(&place.folder).unwrap();
        }
        removed.iter().for_each(|name| fs::remove_file(place.folder.join(name)).unwrap());
        eventually("they are there again", || (pins() == all).then_some(()));
        eventually("it says so", || (first.messages().matches("had been removed").count() > said).then_some(()));
    }
    // the current folder is locked, too
    let other = place.proxy("", 7002);
    assert!(other.messages().contains("another process runs the data path"), "{}", other.messages());
    end(other);
    first.kill();
    let second = place.proxy("", 7001);
    assert!(second.messages().contains("spliced=1 over=0"), "{}", second.messages());
    enough.give();
    let (client, server) = (client.join().unwrap(), serving.join().remove(0));
    intact(&client, &server).unwrap_or_else(|why| panic!("{why}\n{}", second.client(&["counters"])));
    end(second);
    assert!(!place.pins.exist());
}

/// A pin of a deleted device must not be put back.
#[test]
#[ignore = "root"]
fn a_device_may_go() {
    let place = Place::new();
    place
        .lab
        .forwarder
        .execute("ip", &["link", "add", "extra", "up", "type", "veth", "peer", "name", "other"])
        .unwrap();
    let first = place.proxy("", 7001);
    assert!(first.messages().contains("extra"), "{}", first.messages());
    let mut stream = place.talk(7001);
    place.lab.forwarder.execute("ip", &["link", "del", "extra"]).unwrap();
    first.wait_message("is gone: nothing is spliced there");
    assert!(!first.messages().contains("cannot put back"), "{}", first.messages());
    eventually_spliced(&first, 1);
    round_trip(&mut stream, &[1; 100_000]);
    drop(stream);
    end(first);
    assert!(!place.pins.exist());
}

/// A device that was named is the one that had the name: udev and netplan rename devices of running machines.
#[test]
#[ignore = "root"]
fn a_device_that_is_renamed_stays() {
    let place = Place::new();
    let all = || place.lab.forwarder.run(|| longsplice_datapath::devices().unwrap());
    let names: Vec<String> = all().into_iter().map(|d| d.name).collect();
    let plug = format!("{}={}", FORWARDER_TO_CLIENT.port(Family::V4, 7001), SERVER.port(Family::V4, 7001));
    let named: Vec<&str> = names.iter().flat_map(|name| ["--device", name]).collect();
    let arguments = [&["--plug", &plug, "--splice", "at-once"], &named[..]].concat();
    let mut proxy = Running::start(place.lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
    let mut old = place.talk(7001);
    eventually_spliced(&proxy, 1);
    for name in &names {
        let new = format!("{name}x");
        place.lab.forwarder.execute("ip", &["link", "set", name, "name", &new]).unwrap();
        proxy.wait_message(&format!("{name} is called {new} now: it is spliced on as before"));
    }
    let mut new = place.talk(7001);
    eventually_spliced(&proxy, 2);
    [&mut old, &mut new].into_iter().for_each(|stream| round_trip(stream, &[1; 100_000]));
    // somebody relies on a device that was named, so its end is worth a warning, with its name
    let last = format!("{}x", names[0]);
    place.lab.forwarder.execute("ip", &["link", "del", &last]).unwrap();
    proxy.wait_message(&format!("{last} is gone: nothing is spliced there until"));
    let said = proxy.messages();
    assert!(said.contains("WARN") && !said.contains("nothing is spliced there\n"), "{said}");
    proxy.shut_down();
}

/// Processes of other namespaces remove their folders, and dead ones, at any time.
#[test]
#[ignore = "root"]
fn what_others_have_just_removed_is_no_trouble() {
    let place = Place::new();
    // a link that leads nowhere is listed, and then not found
    let gone =
        "mount -t bpf none /sys/fs/bpf; mkdir -m 700 /sys/fs/bpf/longsplice; ln -s gone /sys/fs/bpf/longsplice/net-1;";
    let proxy = place.proxy(gone, 7001);
    let said = proxy.messages();
    assert!(said.contains("splicing on") && !said.contains("stays"), "{said}");
    end(proxy);
}

/// The state left by a dead process can be taken over only if it is complete.
#[test]
#[ignore = "root"]
fn what_is_left_in_part_is_not_taken_over() {
    let place = Place::new();
    let _old = place.left();
    fs::remove_file(place.folder.join("legs")).unwrap();
    let second = place.proxy("", 7001);
    assert!(second.messages().contains("some of its pins were removed"), "{}", second.messages());
    let mut new = place.talk(7001);
    eventually_spliced(&second, 1);
    round_trip(&mut new, &[1; 100_000]);
    end(second);
    assert!(!place.pins.exist());
}

/// Ownership depends on the process, wherever its /run is.
#[test]
#[ignore = "root"]
fn the_next_process_takes_over_with_another_run() {
    let place = Place::new();
    let mut stream = place.left();
    let second = place.proxy("mount -t tmpfs none /run;", 7001);
    assert!(second.messages().contains("spliced=1 over=0"), "{}", second.messages());
    round_trip(&mut stream, &[1; 100_000]);
    drop(stream);
    end(second);
}

/// If anyone could hold the lock, anyone could disable splicing; and
/// a folder owned by another user could be removed by that user.
#[test]
#[ignore = "root"]
fn the_pins_are_nobody_elses() {
    let place = Place::new();
    let first = place.proxy("", 7001);
    for folder in [place.folder.as_path(), place.folder.parent().unwrap()] {
        let is = fs::metadata(folder).unwrap();
        assert_eq!((is.uid(), is.mode() & 0o777), (0, 0o700), "{}", folder.display());
    }
    end(first);
    fs::create_dir(&place.folder).unwrap();
    chown(&place.folder, Some(65534), None).unwrap();
    let second = place.proxy("", 7001);
    assert!(second.messages().contains("belongs to another user"), "{}", second.messages());
    end(second);
}

/// Each leftover takes 48 MB of kernel memory.
#[test]
#[ignore = "root"]
fn nothing_is_left_of_namespaces_that_are_gone() {
    let live = Place::new();
    let mut stream = live.left();
    let gone = Place::new();
    let mut other = gone.proxy("", 7001);
    other.kill();
    assert!(gone.pins.exist());
    let Place { lab, pins, .. } = gone;
    drop(lab);
    // devices of a namespace disappear some time after it
    let socket = Path::new("/run/longsplice").join(format!("control-{}.sock", std::process::id()));
    fs::create_dir_all(socket.parent().unwrap()).unwrap();
    drop(UnixListener::bind(&socket).unwrap());
    eventually("it is removed", || {
        let output = live.lab.server.command(LONGSPLICE).args(["stop", "--flush", "--all"]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        (!pins.exist()).then_some(())
    });
    assert!(!socket.exists(), "nobody listens there");
    assert!(live.pins.exist(), "its namespace lives, and so does its flow");
    round_trip(&mut stream, &[1; 100_000]);
}
