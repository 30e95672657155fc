//! A connection is copied where a splice would make the transfer slower.
use longsplice_engine::{Command, EndReason, Ended, FlowState, PathCause, PathRule, Policy, Refusal, SpliceWhen};
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection, Options, Shape,
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::{Script, Start, connect, converse, intact, listen, serve},
};
use longsplice_tests::{Forwarder, at_once};
use nix::sys::socket::{setsockopt, sockopt};
use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    time::Duration,
};
use test_case::test_case;

const MANY: u64 = 400_000;
const FEW: u64 = 1_000;

/// A transfer of this many bytes each way.
struct Transfer {
    far: LinkDirection,
    policy: Policy,
    up: u64,
    down: u64,
    /// Whether the splice is told by command.
    command: bool,
}

impl Transfer {
    /// Transfers over one connection to this port, whose client or server is 10 ms away.
    fn run(self, lab: &Lab, f: &Forwarder, family: Family, port: u16) -> Ended {
        let Transfer { far, policy, up, down, command } = self;
        let _far = lab.impair(far, Impair { delay: Duration::from_millis(10), ..Impair::NONE }).expect("delay");
        let answer = Script::answerer().bytes(down).pace(4_000_000);
        let server = SERVER.port(family, port);
        let serving = lab.server.run(|| serve(listen(server, &answer).expect("listen"), 1, answer.clone()));
        let proxy = FORWARDER_TO_CLIENT.port(family, port);
        let over = f.ended(0).len();
        f.relay(proxy, server, policy);
        let script = Script::opener(5).bytes(up).pace(4_000_000);
        let client = lab.client.spawn(move || converse(connect(proxy, &script).expect("connect"), &script));
        if command {
            f.wait_state(FlowState::Copying);
            f.command(Command::Splice);
        }
        let (client, server) = (client.join().expect("client"), serving.join().remove(0));
        intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
        let ended = f.ended(over + 1).remove(over);
        assert_eq!((ended.how, ended.bytes_up, ended.bytes_down), (EndReason::Closed, up, down), "{ended:?}");
        ended
    }
}

#[test]
#[ignore = "root"]
fn near_senders_are_not_spliced_to_far_receivers() {
    let policy = |when| Policy { when, ..Policy::default() };
    let after = || policy(SpliceWhen::AfterBytes(2_000));
    let any = || Policy { path: PathRule::Any, ..after() };
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let (f, mut ports) = (Forwarder::idle(&lab), 7000..);
    for family in Family::BOTH {
        let mut transfer = |far, policy, up, down, command| {
            Transfer { far, policy, up, down, command }.run(&lab, &f, family, ports.next().expect("a port"))
        };
        for (far, up, down) in [
            (LinkDirection::FromClient, FEW, MANY),
            (LinkDirection::ToServer, MANY, FEW),
            (LinkDirection::FromServer, MANY, MANY),
        ] {
            let ended = transfer(far, after(), up, down, false);
            let found = (ended.splices, ended.refusal.map(|r| r.as_str()));
            assert_eq!(found, (0, Some("path")), "{family:?} {far:?} {up} {down}: {ended:?}");
        }
        for (far, up, down) in [(LinkDirection::FromClient, MANY, FEW), (LinkDirection::FromServer, FEW, MANY)] {
            let ended = transfer(far, after(), up, down, false);
            assert_eq!((ended.splices, ended.refusal), (1, None), "{family:?} {far:?} {up} {down}: {ended:?}");
        }
        for (policy, command) in [(any(), false), (policy(SpliceWhen::AfterBytes(u64::MAX)), true)] {
            let ended = transfer(LinkDirection::FromClient, policy, FEW, MANY, command);
            assert_eq!((ended.splices, ended.refusal), (1, None), "{family:?} {command}: {ended:?}");
        }
    }
}

/// A handshake in which a segment was lost says nothing of the path: a host may seem to be a second away.
#[test]
#[ignore = "root"]
fn a_handshake_that_took_a_second_puts_no_splice_off() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let (f, mut ports) = (Forwarder::idle(&lab), 7000..);
    let lost = Impair { loss: 1.0, loss_among_first: Some(1), ..Impair::NONE };
    for family in Family::BOTH {
        for way in
            [LinkDirection::FromClient, LinkDirection::ToClient, LinkDirection::FromServer, LinkDirection::ToServer]
        {
            let _lost = lab.impair(way, lost).expect("loss");
            let port = ports.next().expect("a port");
            let (proxy, server) = (FORWARDER_TO_CLIENT.port(family, port), SERVER.port(family, port));
            f.relay(proxy, server, at_once());
            let script = |s: Script| s.bytes(MANY).pace(2_000_000);
            let (over, answer, script) = (f.ended(0).len(), script(Script::answerer()), script(Script::opener(5)));
            let serving = lab.server.run(|| serve(listen(server, &answer).expect("listen"), 1, answer.clone()));
            let client = lab.client.spawn(move || converse(connect(proxy, &script).expect("connect"), &script));
            let (client, server) = (client.join().expect("client"), serving.join().remove(0));
            intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
            let ended = f.ended(over + 1).remove(over);
            assert_eq!((ended.splices, ended.refusal), (1, None), "{family:?} {way:?}: {ended:?}");
        }
    }
}

/// Downloads `bytes`. Returns the number of segments that the forwarder's stack has dropped because they were beyond the window,
/// and of those that the server has sent again.
fn download(lab: &Lab, family: Family, policy: Policy, bytes: u64, drive: impl FnOnce(&Forwarder)) -> (u64, u64) {
    let answer = Script::answerer().bytes(bytes);
    let server = SERVER.port(family, 7000);
    let serving = lab.server.run(|| serve(listen(server, &answer).expect("listen"), 1, answer.clone()));
    let proxy = FORWARDER_TO_CLIENT.port(family, 7000);
    let f = Forwarder::start(lab, proxy, server, policy);
    let script = Script::opener(5).bytes(100);
    let client = lab.client.spawn(move || converse(connect(proxy, &script).expect("connect"), &script));
    drive(&f);
    let (client, server) = (client.join().expect("client"), serving.join().remove(0));
    intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    let ended = f.ended(1).remove(0);
    eprintln!("{family:?} client {client}\nserver {server}\n{ended:?} {:?}", f.verdicts());
    assert_eq!(ended.splices, 1, "{ended:?}");
    let beyond = lab.forwarder.counter("TcpExt", "BeyondWindow").unwrap_or(0); // Linux 6.15
    (beyond, lab.server.counter("Tcp", "RetransSegs").expect("a counter"))
}

/// A client that takes 2 MB/s, and a far server that sends much faster: megabytes wait in the forwarder and in the queue of the
/// client's link. Had they to be drained first, the server would not hear of anything for longer than its timeout of 300 ms.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_switch_causes_no_timeout(family: Family) {
    // A machine that stands still for a while may cause a timeout, too, but not each time.
    let tries: Vec<_> = (0..3).map_while(|_| splice_behind_a_queue(family).err()).collect();
    assert!(tries.len() < 3, "{family:?}: {tries:#?}");
}

fn splice_behind_a_queue(family: Family) -> Result<(), String> {
    let lab = Lab::new(Shape::TwoDevices, Options { large_packets: false, ..Options::default() }).expect("lab");
    let far = Impair { delay: Duration::from_millis(100), queue: Duration::from_secs(4), ..Impair::NONE };
    let slow = Impair { rate_bytes_per_s: Some(2_000_000), delay: Duration::ZERO, ..far };
    let ways = [(LinkDirection::FromClient, far), (LinkDirection::ToServer, far), (LinkDirection::ToClient, slow)];
    let _far = ways.map(|(way, impair)| lab.impair(way, impair).expect("impair"));
    for (host, memory) in [(&lab.server, "tcp_wmem"), (&lab.forwarder, "tcp_rmem")] {
        host.sysctl("net.ipv4.tcp_congestion_control", "reno").expect("sysctl");
        host.sysctl(&format!("net.ipv4.{memory}"), "4096 65536 2000000").expect("sysctl");
    }
    let policy = Policy { when: SpliceWhen::AfterBytes(2_000_000), ..Policy::default() };
    let (beyond, again) = download(&lab, family, policy, 12_000_000, |f| f.wait_state(FlowState::Spliced));
    let timeouts = lab.server.counter("TcpExt", "TCPTimeouts").expect("a counter");
    // a probe for the loss of the last segment is due after two round trips without an acknowledgement (RFC 8985, 7.2)
    let is_harmless = again <= 2 && (beyond, timeouts) == (0, 0);
    is_harmless
        .then_some(())
        .ok_or(format!("{timeouts} timeouts, {again} segments sent again, {beyond} beyond the window"))
}

/// The client has promised megabytes, and the parked socket less. What the server sends by that promise must not be dropped.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn an_unsplice_in_mid_transfer_loses_nothing(family: Family) {
    let lab = Lab::new(Shape::TwoDevices, Options { large_packets: false, ..Options::default() }).expect("lab");
    let far = Impair { delay: Duration::from_millis(30), queue: Duration::from_secs(2), ..Impair::NONE };
    let rated = Impair { rate_bytes_per_s: Some(5_000_000), ..far };
    let ways = [(LinkDirection::FromClient, far), (LinkDirection::FromServer, rated)];
    let _far = ways.map(|(way, impair)| lab.impair(way, impair).expect("impair"));
    for host in [&lab.server, &lab.forwarder] {
        host.sysctl("net.ipv4.tcp_congestion_control", "reno").expect("sysctl");
    }
    let lost = download(&lab, family, at_once(), 10_000_000, |f| {
        f.wait_state(FlowState::Spliced);
        // the data path drops what a parked socket sends, which must not look like congestion
        let sockets = lab.forwarder.execute("ss", &["-Htino"]).expect("ss");
        assert!(sockets.contains("cwnd:") && !sockets.contains(" ssthresh:"), "{sockets}");
        std::thread::sleep(Duration::from_millis(1500));
        f.command(Command::Unsplice);
    });
    assert_eq!(lost, (0, 0), "{family:?}");
}

/// Downloads 4 MB over legs with these round-trip times, of whose segments to the client this part is lost.
fn over_two_legs(family: Family, client: u64, server: u64, loss: f64) -> Ended {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let delay = |ms| Impair { delay: Duration::from_millis(ms), ..Impair::NONE };
    let lossy = Impair { loss, ..Impair::NONE };
    let ways = [
        (LinkDirection::FromClient, delay(client)),
        (LinkDirection::FromServer, delay(server)),
        (LinkDirection::ToClient, lossy),
    ];
    let _legs = ways.map(|(way, impair)| lab.impair(way, impair).expect("impair"));
    let answer = Script::answerer().bytes(4_000_000);
    let server = SERVER.port(family, 7000);
    let serving = lab.server.run(|| serve(listen(server, &answer).expect("listen"), 1, answer.clone()));
    let proxy = FORWARDER_TO_CLIENT.port(family, 7000);
    let f = Forwarder::start(&lab, proxy, server, Policy::default());
    let script = Script::opener(5).bytes(100);
    let client = lab.client.spawn(move || converse(connect(proxy, &script).expect("connect"), &script));
    let (client, server) = (client.join().expect("client"), serving.join().remove(0));
    intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    f.ended(1).remove(0)
}

/// Each sender's window grows, and recovers from losses, by the round trips of its own leg.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn two_long_legs_are_copied_while_that_is_faster(family: Family) {
    let copied = |ended: &Ended| ended.bytes_down - ended.spliced_down;
    let early = over_two_legs(family, 0, 20, 0.0);
    assert!(early.splices == 1 && copied(&early) < 256 * 1024, "a near client: {early:?}");
    let late = over_two_legs(family, 10, 20, 0.0);
    assert!(late.splices == 1 && copied(&late) >= 1 << 20, "after slow start: {late:?}");
    let lossy = over_two_legs(family, 10, 20, 0.03);
    assert_eq!((lossy.splices, lossy.refusal.map(|r| r.as_str())), (0, Some("path")), "losses: {lossy:?}");
}

/// A client that reads nothing for a while: its server is near, so what waits for it can wait there.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_slow_reader_far_away_takes_little_memory(family: Family) {
    // on a busy machine, the first measurements may say that the server is far, and its window then grows until there are others
    let tries: Vec<_> = (0..5).map_while(|_| waits_for_a_slow_reader(family).err()).collect();
    assert!(tries.len() < 5, "{family:?}: {tries:#?}");
}

/// Returns an error if too many bytes wait for it, or the server was found to be far.
fn waits_for_a_slow_reader(family: Family) -> Result<(), String> {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let far = Impair { delay: Duration::from_millis(20), ..Impair::NONE };
    let _far = lab.impair(LinkDirection::FromClient, far).expect("delay");
    let answer = Script::answerer().bytes(30_000_000);
    let server = SERVER.port(family, 7000);
    let serving = lab.server.run(|| serve(listen(server, &answer).expect("listen"), 1, answer.clone()));
    let proxy = FORWARDER_TO_CLIENT.port(family, 7000);
    let f = Forwarder::start(&lab, proxy, server, Policy::default());
    let script = Script::opener(5).bytes(100).pause(1_000_000, Duration::from_secs(3));
    let client = lab.client.spawn(move || converse(connect(proxy, &script).expect("connect"), &script));
    // what waits for it, as long as the connection exists
    let look = |_| {
        std::thread::sleep(Duration::from_millis(50));
        let sockets = lab.forwarder.execute("ss", &["-Htnmi", "dport", "=", ":7000"]).expect("ss");
        let field = |name| sockets.split(name).nth(1)?.split([',', ' ', '\n']).next();
        Some((field("skmem:(r")?.parse::<u64>().ok()?, field("minrtt:")?.parse::<f64>().ok()?))
    };
    let (waits, rtt) = (0..60).filter_map(look).max_by_key(|look| look.0).expect("a connection to the server");
    let (client, server) = (client.join().expect("client"), serving.join().remove(0));
    intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    let ended = f.ended(1).remove(0);
    let is_copied = (ended.splices, ended.refusal.map(|r| r.as_str())) == (0, Some("path"));
    let is_right = is_copied && (1..=1 << 20).contains(&waits);
    is_right.then_some(()).ok_or(format!("{waits} bytes wait, {rtt} ms to the server; {ended:?}"))
}

/// Round-trip time of a far client: a quarter of it is long enough for a start on a busy machine.
const FAR: Duration = Duration::from_millis(300);

/// Fetches 200 KB from a server.
fn fetch(lab: &Lab, f: &Forwarder, family: Family, port: u16) -> Ended {
    let (proxy, server) = (FORWARDER_TO_CLIENT.port(family, port), SERVER.port(family, port));
    let answer = Script::answerer().bytes(200_000).start(Start::Received(100));
    let script = Script::opener(5).bytes(100);
    let serving = lab.server.run(|| serve(listen(server, &answer).expect("listen"), 1, answer.clone()));
    let over = f.ended(0).len();
    f.relay_adopting_late(proxy, server, Policy::default());
    let client = lab.client.spawn(move || converse(connect(proxy, &script).expect("connect"), &script));
    let (client, server) = (client.join().expect("client"), serving.join().remove(0));
    intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
    f.ended(over + 1).remove(over)
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_near_server_of_a_far_client_is_spliced_before_its_first_byte(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let f = Forwarder::idle(&lab);
    // a handshake on a busy machine may make any client seem far
    let near: Vec<Ended> = (6990..6993).map(|port| fetch(&lab, &f, family, port)).collect();
    assert!(near.iter().any(|ended| ended.spliced_down < 200_000 && ended.path.is_none()), "near clients: {near:#?}");
    let _far = lab.impair(LinkDirection::FromClient, Impair { delay: FAR, ..Impair::NONE }).expect("delay");
    // on a machine that stands still for a while, the start may come too late
    let tries = (7001..7004).map(|port| fetch(&lab, &f, family, port));
    let all: Vec<Ended> = tries.take_while(|ended| (ended.splices, ended.spliced_down) != (1, 200_000)).collect();
    assert!(all.len() < 3, "{all:#?}");
    let ended = f.ended(0).pop().expect("the last one");
    let found = ended.path.expect("the numbers that have decided");
    assert_eq!((found.cause, ended.refusal), (PathCause::Far, None));
    assert!(u128::from(found.rtt_us.client) >= FAR.as_micros() && found.rtt_us.server < found.rtt_us.client / 10);
}

/// A server that sends 1 MB as fast as it can, and the rest by a small window, as BBR does that knows the near leg alone.
fn serve_by_a_small_window(listener: &TcpListener, bytes: usize) {
    let (mut stream, _) = listener.accept().expect("accept");
    stream.read_exact(&mut [0]).expect("a request");
    stream.write_all(&vec![7; 1_000_000]).expect("write");
    setsockopt(&stream, sockopt::SndBuf, &8192).expect("a small buffer");
    stream.write_all(&vec![7; bytes - 1_000_000]).expect("write");
}

#[test]
#[ignore = "root"]
fn a_server_that_suffers_from_a_splice_before_its_first_byte_is_taken_back_and_remembered() {
    const BYTES: usize = 6_000_000;
    // a send buffer takes at least one packet, however large
    let lab = Lab::new(Shape::TwoDevices, Options { large_packets: false, ..Options::default() }).expect("lab");
    let delay = Duration::from_millis(100);
    let far = Impair { delay, ..Impair::NONE };
    let rated = Impair { rate_bytes_per_s: Some(2_000_000), queue: Duration::from_secs(4), ..Impair::NONE };
    let _far = [(LinkDirection::FromClient, far), (LinkDirection::ToClient, rated)]
        .map(|(way, impair)| lab.impair(way, impair).expect("impair"));
    let (proxy, server) = (FORWARDER_TO_CLIENT.port(Family::V4, 7000), SERVER.port(Family::V4, 7000));
    let listener = lab.server.run(|| TcpListener::bind(server)).expect("listen");
    let f = Forwarder::adopting_late(&lab, proxy, server, Policy::default());
    let mut over = 0;
    let mut fetch = || {
        std::thread::scope(|scope| {
            scope.spawn(|| serve_by_a_small_window(&listener, BYTES));
            let mut client = lab.client.run(|| TcpStream::connect(proxy)).expect("connect");
            client.write_all(&[1]).expect("write");
            let mut all = Vec::new();
            client.read_to_end(&mut all).expect("read");
            assert!(all.len() == BYTES && all.iter().all(|byte| *byte == 7), "{} bytes", all.len());
        });
        over += 1;
        f.ended(over).remove(over - 1)
    };
    let cause = |ended: &Ended| ended.path.map(|found| found.cause);
    // on a machine that stands still for a while, a start may come too late, or the server pause
    let tries: Vec<Ended> = (0..3)
        .map(|_| fetch())
        .take_while(|ended| (ended.splices, cause(ended)) != (1, Some(PathCause::Rate)))
        .collect();
    assert!(tries.len() < 3, "{tries:#?}");
    let first = f.ended(tries.len() + 1).remove(tries.len());
    assert_eq!(first.refusal, Some(Refusal::Path));
    assert!(first.spliced_down < BYTES as u64 / 2, "{first:?}");
    let second = fetch();
    assert_eq!((second.splices, cause(&second)), (0, Some(PathCause::Rtt)), "{second:?}");
}
