//! Flows ended by the proxy: both hosts are told, in every state of the flow.
use longsplice_datapath::PathFlags;
use longsplice_engine::{Command, EndReason, FlowState, Policy, SpliceWhen};
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection, Shape,
    process::wait_for,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use longsplice_tests::{Forwarder, at_once};
use socket2::SockRef;
use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    time::Duration,
};
use test_case::test_case;

/// Time limit for every wait.
const PATIENCE: Duration = Duration::from_secs(30);

/// A connection through a forwarder, with all bytes delivered.
struct Pair {
    client: TcpStream,
    server: TcpStream,
}

impl Pair {
    /// Opens a connection to the server's `listener`.
    fn open(lab: &Lab, family: Family, listener: &TcpListener) -> Pair {
        let proxy = FORWARDER_TO_CLIENT.port(family, 7000);
        let client = lab.client.run(|| TcpStream::connect(proxy)).expect("connect");
        let server = listener.accept().expect("accept").0;
        for s in [&client, &server] {
            s.set_read_timeout(Some(PATIENCE)).expect("a limit");
        }
        Pair { client, server }
    }

    fn exchange(&self) {
        for (mut from, mut to) in [(&self.client, &self.server), (&self.server, &self.client)] {
            let mut heard = [0; 1000];
            from.write_all(&[7; 1000]).expect("write");
            to.read_exact(&mut heard).expect("read");
        }
    }

    /// Checks that both ends are reset although neither has sent anything since.
    fn are_reset(&self) {
        for (who, mut s) in [("client", &self.client), ("server", &self.server)] {
            let heard = s.read(&mut [0]);
            assert_eq!(heard.as_ref().map_err(|e| e.kind()), Err(ErrorKind::ConnectionReset), "{who}: {heard:?}");
        }
    }
}

/// Checks that the resets were in sequence; otherwise the hosts would have sent challenge ACKs (RFC 5961, 3.2).
fn were_in_sequence(lab: &Lab) {
    for host in [&lab.client, &lab.server] {
        assert_eq!(host.counter("TcpExt", "TCPChallengeACK"), Some(0), "the resets had the numbers that were expected");
    }
}

fn lab(family: Family) -> (Lab, TcpListener) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let listener = lab.server.run(|| TcpListener::bind(SERVER.port(family, 7000))).expect("listen");
    (lab, listener)
}

fn start(lab: &Lab, family: Family, policy: Policy) -> Forwarder {
    Forwarder::start(lab, FORWARDER_TO_CLIENT.port(family, 7000), SERVER.port(family, 7000), policy)
}

/// A released flow that has sent data in each direction, and has no sockets any more.
fn released(lab: &Lab, family: Family, listener: &TcpListener, policy: Policy) -> (Forwarder, Pair) {
    let f = start(lab, family, policy);
    let pair = Pair::open(lab, family, listener);
    f.wait_state(FlowState::Spliced);
    pair.exchange();
    f.command(Command::Release);
    f.wait_state(FlowState::Released);
    pair.exchange();
    (f, pair)
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_stop_resets_the_hosts_of_released_flows(family: Family) {
    let (lab, listener) = lab(family);
    let (f, pair) = released(&lab, family, &listener, at_once());
    f.splicer.stop(false);
    pair.are_reset();
    assert_eq!(f.ended(1)[0].how, EndReason::Stopped);
    were_in_sequence(&lab);
    let left = f.splicer.datapath().expect("kernel path").paths();
    assert!(
        left.iter().all(|(_, path)| path.flags & PathFlags::DEAD != 0),
        "they answer hosts whose reset was lost: {left:?}"
    );
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn the_idle_limit_resets_the_hosts_of_released_flows(family: Family) {
    let (lab, listener) = lab(family);
    let policy = Policy { idle_limit: Duration::from_secs(3).into(), ..at_once() };
    let (f, pair) = released(&lab, family, &listener, policy);
    pair.are_reset();
    assert_eq!(f.ended(1)[0].how, EndReason::Idle);
    were_in_sequence(&lab);
}

#[test]
#[ignore = "root"]
fn the_idle_limit_is_for_copied_flows_too() {
    let (lab, listener) = lab(Family::V4);
    let f = start(
        &lab,
        Family::V4,
        Policy { when: SpliceWhen::Never, idle_limit: Duration::from_secs(3).into(), ..at_once() },
    );
    let pair = Pair::open(&lab, Family::V4, &listener);
    pair.exchange();
    pair.are_reset();
    assert_eq!(f.ended(1)[0].how, EndReason::Idle);
}

/// A host that answers keep-alives is not given up, whether its flow is copied or parked.
#[test]
#[ignore = "root"]
fn a_client_without_power_is_given_up() {
    let policy = |when| Policy { when, keepalive: Some(Duration::from_secs(1)), ..Policy::default() };
    let (lab, listener) = lab(Family::V4);
    let f = start(&lab, Family::V4, policy(SpliceWhen::AfterBytes(u64::MAX)));
    let pair = Pair::open(&lab, Family::V4, &listener);
    pair.exchange();
    let asked = || lab.forwarder.counter("TcpExt", "TCPKeepAlive").expect("a counter");
    let wait_asked = |n| wait_for(PATIENCE, || (asked() >= n).then_some(())).expect("hosts are asked");
    wait_asked(4);
    pair.exchange();
    f.command(Command::Splice);
    f.wait_state(FlowState::Spliced);
    pair.exchange();
    let before = asked();
    std::thread::sleep(Duration::from_secs(6)); // longer than four unanswered probes take
    assert_eq!(asked(), before, "nobody asks for a parked socket");
    f.command(Command::Unsplice);
    f.wait_state(FlowState::Copying);
    pair.exchange();
    let _gone =
        lab.impair(LinkDirection::FromClient, Impair { drop_every: Some(1), ..Impair::default() }).expect("impair");
    let heard = (&pair.server).read(&mut [0]);
    assert_eq!(heard.map_err(|e| e.kind()), Err(ErrorKind::ConnectionReset));
    assert_eq!(f.ended(1)[0].how, EndReason::ClientReset);
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_server_without_power_is_given_up(family: Family) {
    let (lab, listener) = lab(family);
    let keepalive = Some(Duration::from_secs(1));
    let f = start(&lab, family, Policy { when: SpliceWhen::Never, keepalive, ..Policy::default() });
    let pair = Pair::open(&lab, family, &listener);
    pair.exchange();
    let _gone =
        lab.impair(LinkDirection::FromServer, Impair { drop_every: Some(1), ..Impair::default() }).expect("impair");
    let heard = (&pair.client).read(&mut [0]);
    assert_eq!(heard.map_err(|e| e.kind()), Err(ErrorKind::ConnectionReset));
    assert_eq!(f.ended(1)[0].how, EndReason::ServerReset);
}

/// A reset behind data that our socket has received, but not acknowledged yet. The client does not answer a challenge: a firewall
/// before it has forgotten the connection. That it was never spliced, or was and is no longer, makes no difference.
#[test_case(Family::V4, false; "v4")]
#[test_case(Family::V6, false; "v6")]
#[test_case(Family::V4, true; "v4_taken_back")]
#[test_case(Family::V6, true; "v6_taken_back")]
#[ignore = "root"]
fn a_reset_is_heard_though_its_host_answers_no_challenge(family: Family, spliced: bool) {
    let (lab, listener) = lab(family);
    let f = start(&lab, family, Policy { when: SpliceWhen::AfterBytes(u64::MAX), ..Policy::default() });
    let mut pair = Pair::open(&lab, family, &listener);
    pair.exchange();
    if spliced {
        f.command(Command::Splice);
        f.wait_state(FlowState::Spliced);
        f.command(Command::Unsplice);
        f.wait_state(FlowState::Copying);
    }
    // until our socket delays its acknowledgements
    (0..30).for_each(|_| pair.exchange());
    let _gone =
        lab.impair(LinkDirection::ToClient, Impair { drop_every: Some(1), ..Impair::default() }).expect("impair");
    pair.client.write_all(&[7; 50]).expect("write");
    SockRef::from(&pair.client).set_linger(Some(Duration::ZERO)).expect("linger");
    drop(pair.client);
    pair.server.read_exact(&mut [0; 50]).expect("all that came before");
    let heard = pair.server.read(&mut [0]);
    assert_eq!(heard.map_err(|e| e.kind()), Err(ErrorKind::ConnectionReset), "{:?}", f.verdicts());
    assert_eq!(f.ended(1)[0].how, EndReason::ClientReset);
}

/// The server has sent its end, and has then forgotten the connection, while the client lacks bytes that were forwarded. Both have sent
/// their ends: so our socket at the server is in TIME-WAIT and does not report the reset, and the one at the client would not send
/// any.
#[test]
#[ignore = "root"]
fn a_client_that_lacks_bytes_which_nobody_has_is_reset() {
    let (lab, listener) = lab(Family::V4);
    let f = start(&lab, Family::V4, at_once());
    let pair = Pair::open(&lab, Family::V4, &listener);
    pair.server.set_nodelay(true).expect("TCP_NODELAY");
    f.wait_state(FlowState::Spliced);
    pair.exchange();
    let Pair { mut client, mut server } = pair;
    let everything = Impair { drop_every: Some(1), ..Impair::default() };
    let lost = lab.impair(LinkDirection::ToClient, everything).expect("impair");
    server.write_all(&[7; 1000]).expect("write");
    wait_for(PATIENCE, || (lost.counters().lost > 0).then_some(())).expect("forwarded, and lost");
    f.command(Command::Unsplice);
    f.wait_state(FlowState::Copying);
    client.shutdown(Shutdown::Write).expect("shutdown");
    assert_eq!(server.read(&mut [0]).expect("the client's end"), 0);
    server.write_all(&[7; 1000]).expect("write");
    server.shutdown(Shutdown::Write).expect("shutdown");
    let has_come = || f.splicer.flows().iter().all(|flow| flow.bytes_down == 3000);
    wait_for(PATIENCE, || has_come().then_some(())).expect("all the rest has come");
    SockRef::from(&server).set_linger(Some(Duration::ZERO)).expect("linger");
    drop(server); // without a word, since it has sent its end
    lost.change(Impair::NONE).expect("impair");
    let heard = client.read(&mut [0]);
    assert_eq!(heard.map_err(|e| e.kind()), Err(ErrorKind::ConnectionReset));
    assert_eq!(f.ended(1)[0].how, EndReason::ServerReset);
}
