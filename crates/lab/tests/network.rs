//! Both shapes of the network, with checked traffic through an IP-forwarding forwarder.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use longsplice_lab::topology::{CLIENT_SECOND, FORWARDER_TO_CLIENT, SERVER, SERVER_SECOND};
use longsplice_lab::traffic::{Report, Script, StreamEnd, connect, converse, intact, listen, serve};
use longsplice_lab::{ChildGuard, Family, Lab, Options, Shape};

const SHAPES: [Shape; 2] = [Shape::TwoDevices, Shape::OneArmed];

fn routed(shape: Shape, options: Options) -> Lab {
    Lab::new(shape, Options { forwarding: true, ..options }).expect("a lab needs root")
}

/// One connection from client to server, 1 MB up and 3 MB down.
fn megabytes(lab: &Lab, family: Family) -> (Report, Report) {
    let opener = Script::opener(1).bytes(1 << 20);
    let answerer = Script::answerer().bytes(3 << 20);
    let at = SERVER.port(family, 7000);
    let server = serve(lab.server.run(|| listen(at, &answerer)).expect("listen"), 1, answerer);
    let client = converse(lab.client.run(|| connect(at, &opener)).expect("connect"), &opener);
    (client, server.join().pop().expect("one connection"))
}

#[test]
#[ignore = "root"]
fn traffic_crosses_both_shapes_in_both_families() {
    for shape in SHAPES {
        for large_packets in [true, false] {
            let lab = routed(shape, Options { large_packets, ..Options::default() });
            for family in Family::BOTH {
                let (client, server) = megabytes(&lab, family);
                intact(&client, &server).unwrap_or_else(|why| panic!("{shape:?} {family:?} {large_packets}: {why}"));
            }
        }
    }
}

#[test]
#[ignore = "root"]
fn small_mtu_of_one_link_is_known_to_the_other() {
    for shape in SHAPES {
        let lab = routed(shape, Options { mtu_client: 1300, ..Options::default() });
        for family in Family::BOTH {
            let (client, server) = megabytes(&lab, family);
            intact(&client, &server).unwrap_or_else(|why| panic!("{shape:?} {family:?}: {why}"));
        }
    }
}

#[test]
#[ignore = "root"]
fn the_forwarder_only_forwards_when_told() {
    for shape in SHAPES {
        let lab = Lab::simple(shape).unwrap();
        let script = Script::opener(1).deadline(Duration::from_millis(300));
        let listener = lab.server.run(|| listen(SERVER.port(Family::V4, 7000), &script)).unwrap();
        lab.client.run(|| connect(listener.local_addr().unwrap(), &script)).expect_err("nothing forwards");
        lab.set_forwarding(true).unwrap();
        lab.client.run(|| connect(listener.local_addr().unwrap(), &Script::opener(1))).expect("now it forwards");
    }
}

#[test]
#[ignore = "root"]
fn second_addresses_work() {
    let lab = routed(Shape::TwoDevices, Options::default());
    for family in Family::BOTH {
        let opener = Script { local: Some(CLIENT_SECOND.port(family, 0)), ..Script::opener(1) }.bytes(10);
        let answerer = Script::answerer();
        let at = SERVER_SECOND.port(family, 7000);
        let server = serve(lab.server.run(|| listen(at, &answerer)).unwrap(), 1, answerer);
        converse(lab.client.run(|| connect(at, &opener)).unwrap(), &opener);
        assert_eq!(server.join()[0].remote.unwrap().ip(), CLIENT_SECOND.ip(family));
    }
}

#[test]
#[ignore = "root"]
fn devices_that_were_gone_carry_traffic_again() {
    let lab = routed(Shape::TwoDevices, Options::default());
    for device in [lab.client_device(), lab.server_device()] {
        lab.take_down(device).expect("down");
        lab.bring_up(device).expect("up");
    }
    lab.cut_server_wire().expect("cut");
    lab.lay_server_wire().expect("laid");
    for family in Family::BOTH {
        let (client, server) = megabytes(&lab, family);
        intact(&client, &server).unwrap_or_else(|why| panic!("{family:?}: {why}"));
    }
}

#[test]
#[ignore = "root"]
fn labs_do_not_see_each_other() {
    let labs: Vec<Lab> = (0..8).map(|i| routed(SHAPES[i % 2], Options::default())).collect();
    std::thread::scope(|scope| {
        for lab in &labs {
            scope.spawn(|| {
                let (client, server) = megabytes(lab, Family::V4);
                intact(&client, &server).unwrap();
            });
        }
    });
}

#[test]
#[ignore = "root"]
fn a_lab_takes_little_time_and_leaves_nothing() {
    let started = Instant::now();
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let paths = [lab.client.path(), lab.forwarder.path(), lab.server.path()];
    assert!(paths.iter().all(|path| path.exists()));
    drop(lab);
    assert!(paths.iter().all(|path| !path.exists()));
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
}

#[test]
#[ignore = "root"]
fn a_panic_removes_the_lab() {
    let path = std::sync::Mutex::new(None);
    let panicked = std::panic::catch_unwind(|| {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        *path.lock().unwrap() = Some(lab.client.path());
        lab.client.run(|| panic!("on purpose"));
    });
    assert!(panicked.is_err());
    assert!(!path.lock().unwrap().take().unwrap().exists());
}

#[test]
#[ignore = "root"]
fn the_sweep_removes_what_a_dead_process_left() {
    // The ID of a process that has exited, so no process has it now.
    let mut dead = std::process::Command::new("true").spawn().unwrap();
    let name = format!("ls-{}-0-client", dead.id());
    dead.wait().unwrap();
    let ip = |verb| std::process::Command::new("ip").args(["netns", verb, &name]).status().unwrap();
    // the sweep of another test may take it while it is being made
    assert!((0..10).any(|_| ip("add").success()));
    let mine = Lab::simple(Shape::TwoDevices).unwrap();
    Lab::sweep();
    assert!(!std::path::Path::new("/run/netns").join(&name).exists());
    assert!(mine.client.path().exists(), "the sweep leaves the living alone");
}

#[test]
#[ignore = "root"]
fn commands_run_inside_and_are_killed() {
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let addresses = lab.client.execute("ip", &["-brief", "addr", "show", "c0"]).unwrap();
    assert!(addresses.contains("10.77.1.2/24") && addresses.contains("fd77:1::2/64"), "{addresses}");
    let mut child = ChildGuard::spawn(lab.forwarder.command("sh").args(["-c", "echo ready; sleep 60"])).unwrap();
    child.wait_output("ready", Duration::from_secs(5)).unwrap();
    assert!(child.wait_output("never", Duration::from_millis(50)).is_err());
    assert!(child.is_running());
    let pid = child.pid();
    drop(child);
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}

#[test]
#[ignore = "root"]
fn whoever_has_processes_of_its_own_is_let_end_them() {
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    let script = "sleep 60 & trap 'kill $!' TERM; echo ready $!; wait $!; wait";
    let child = ChildGuard::spawn(lab.forwarder.command("sh").args(["-c", script]));
    let mut child = child.unwrap().ended_gently();
    child.wait_output("ready", Duration::from_secs(5)).unwrap();
    let own = child.output().trim().replace("ready ", "/proc/");
    assert!(std::path::Path::new(&own).exists());
    drop(child);
    assert!(!std::path::Path::new(&own).exists());
}

#[test]
#[ignore = "root"]
fn a_listener_is_seen_without_connecting() {
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    assert!(!lab.server.listening(7000));
    let script = Script::answerer();
    for family in Family::BOTH {
        let _listener = lab.server.run(|| listen(SERVER.port(family, 7000), &script)).unwrap();
        lab.server.wait_listening(7000, Duration::from_secs(1)).unwrap();
    }
}

#[test]
#[ignore = "root"]
fn the_forwarder_answers_on_its_own_address() {
    let lab = Lab::simple(Shape::OneArmed).unwrap();
    for family in Family::BOTH {
        let refused = lab.client.run(|| TcpStream::connect(FORWARDER_TO_CLIENT.port(family, 9)));
        assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
    }
    assert!(lab.forwarder.counter("Tcp", "OutRsts").unwrap() >= 2);
}

#[test]
#[ignore = "root"]
fn an_end_that_is_late_says_so() {
    let lab = routed(Shape::TwoDevices, Options::default());
    let opener = Script::opener(1);
    let listener = lab.server.run(|| listen(SERVER.port(Family::V4, 7000), &opener)).unwrap();
    let stream = lab.client.run(|| connect(listener.local_addr().unwrap(), &opener)).unwrap();
    let report = converse(stream, &opener.deadline(Duration::from_millis(200)));
    assert_eq!(report.end, StreamEnd::Timeout);
    assert!(report.duration < Duration::from_secs(1));
}
