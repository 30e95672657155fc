//! Sockets that other code has made are adopted, and then spliced like any others. In scenarios, [`Mode::Adopted`] does so in the
//! midst of a transfer.
//!
//! [`Mode::Adopted`]: longsplice_tests::scenario::Mode

use longsplice_datapath::LegFlags;
use longsplice_engine::{
    Command, EndReason, FlowInfo, FlowState, Leftovers, Leg, Message, OpenOptions, Policy, Refusal, Splicer,
};
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection, Shape,
    process::wait_for,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use longsplice_tests::{Forwarder, at_once, by_hand};
use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::OwnedFd,
    sync::Arc,
    time::Duration,
};
use test_case::test_case;
use tokio::runtime::Runtime;

const PATIENCE: Duration = Duration::from_secs(20);

fn exchange(client: &TcpStream, server: &TcpStream) {
    for (mut from, mut to) in [(client, server), (server, client)] {
        let (said, mut heard) = ([7; 1000], [0; 1000]);
        from.write_all(&said).expect("write");
        to.read_exact(&mut heard).expect("read");
        assert_eq!(said, heard);
    }
}

/// A connection from the client to a listener at an address. Returns both ends.
fn connection(lab: &Lab, to: SocketAddr, listener: &TcpListener) -> (TcpStream, TcpStream) {
    let client = lab.client.run(|| TcpStream::connect(to)).expect("connect");
    let server = listener.accept().expect("accept").0;
    for s in [&client, &server] {
        s.set_read_timeout(Some(PATIENCE)).expect("a limit");
    }
    (client, server)
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn sockets_of_other_code_are_spliced_and_taken_back_and_never_released(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let (proxy, target) = (FORWARDER_TO_CLIENT.port(family, 7000), SERVER.port(family, 7000));
    let listener = lab.server.run(|| TcpListener::bind(target)).expect("listen");
    let f = Forwarder::adopting(&lab, proxy, target, by_hand(), 1);
    let (client, server) = connection(&lab, proxy, &listener);
    exchange(&client, &server);
    f.wait_state(FlowState::Copying);
    for _ in 0..3 {
        f.command(Command::Splice);
        f.wait_state(FlowState::Spliced);
        exchange(&client, &server);
        f.command(Command::Release);
        exchange(&client, &server);
        assert_eq!(f.splicer.flows()[0].state, FlowState::Spliced, "the kernel may give its port to another socket");
        f.command(Command::Unsplice);
        f.wait_state(FlowState::Copying);
        exchange(&client, &server);
    }
    drop((client, server));
    let ended = &f.ended(1)[0];
    assert_eq!((ended.how, ended.splices, ended.refusal), (EndReason::Closed, 3, None));
    assert_eq!((ended.bytes_up, ended.bytes_down), (10_000, 10_000));
}

/// A program with a data path, in the forwarder's namespace.
struct Program<'a> {
    lab: &'a Lab,
    runtime: Runtime,
    splicer: Splicer,
    listener: TcpListener,
    servers: TcpListener,
}

impl Program<'_> {
    fn start(lab: &Lab) -> Program<'_> {
        Program::on(lab, &[])
    }

    /// With a data path on these devices; on all, if there are none.
    fn on<'a>(lab: &'a Lab, devices: &[&str]) -> Program<'a> {
        let devices = devices.iter().map(|name| (*name).to_owned()).collect();
        let servers = lab.server.run(|| TcpListener::bind(SERVER.port(Family::V4, 7000))).expect("listen");
        lab.forwarder.run(move || {
            let mut options = OpenOptions::default();
            options.datapath.max_flows = 4096;
            options.datapath.devices = devices;
            let splicer = Splicer::open(&options).expect("the data path opens: root, kernel 6.6, bpffs");
            let listener = TcpListener::bind(FORWARDER_TO_CLIENT.port(Family::V4, 7000)).expect("listen");
            Program { lab, runtime: Runtime::new().expect("runtime"), splicer, listener, servers }
        })
    }

    /// A connection of the client to this program, and one of this program to the server: the hosts' ends, and its own.
    fn connections(&self) -> [(TcpStream, TcpStream); 2] {
        let (client, ours) = connection(self.lab, self.listener.local_addr().expect("an address"), &self.listener);
        let server = self.lab.forwarder.run(|| TcpStream::connect(SERVER.port(Family::V4, 7000))).expect("connect");
        [(client, ours), (self.servers.accept().expect("accept").0, server)]
    }

    fn adopt(&self, socket: impl Into<OwnedFd> + Send) -> std::io::Result<Leg> {
        self.lab.forwarder.run(|| {
            let _runtime = self.runtime.enter();
            self.splicer.adopt(socket)
        })
    }

    /// Adopts both, and hands them over. Returns the flow's number.
    fn begin(&self, client: TcpStream, server: TcpStream) -> u64 {
        let [client, server] = [client, server].map(|socket| self.adopt(socket).expect("a leg"));
        let _runtime = self.runtime.enter();
        let info = FlowInfo::new("test", "the server".to_owned());
        let policy = Arc::new(Policy { path: longsplice_engine::PathRule::Any, ..at_once() });
        self.splicer.hand_over(client, server, Leftovers::default(), policy, info, |_, _| ())
    }

    /// The same. Returns the reason for which the flow is not spliced.
    fn refusal(&self, client: TcpStream, server: TcpStream) -> Option<Refusal> {
        let id = self.begin(client, server);
        let decided = || {
            let flow = self.splicer.status(id)?;
            (flow.state == FlowState::Spliced || flow.refusal.is_some()).then_some(flow.refusal)
        };
        wait_for(PATIENCE, decided).expect("a decision")
    }

    fn is_empty(&self) -> bool {
        self.splicer.datapath().expect("it is open").legs().is_empty()
    }
}

#[test]
#[ignore = "root"]
fn what_cannot_be_adopted_is_refused_or_copied() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let program = Program::on(&lab, &["f1"]); // not the client's
    let udp = lab.forwarder.run(|| UdpSocket::bind("127.0.0.1:0")).expect("a socket");
    assert_eq!(program.adopt(udp).expect_err("no TCP").kind(), ErrorKind::InvalidInput);
    let listener = lab.forwarder.run(|| TcpListener::bind("127.0.0.1:0")).expect("a socket");
    assert_eq!(program.adopt(listener).expect_err("no connection").kind(), ErrorKind::NotConnected);

    let [(client, ours), (server, to_server)] = program.connections();
    ours.shutdown(std::net::Shutdown::Write).expect("shut down");
    assert_eq!(program.refusal(ours, to_server), Some(Refusal::Closing));
    drop((client, server));

    let [(client, ours), (server, to_server)] = program.connections();
    assert_eq!(program.refusal(ours, to_server), Some(Refusal::Unattached));
    exchange(&client, &server);
    drop((client, server));
    wait_for(PATIENCE, || (program.splicer.flows().is_empty() && program.is_empty()).then_some(()))
        .expect("nothing is left");
}

/// Nothing has to come from a host for that: its socket knows all.
#[test]
#[ignore = "root"]
fn a_host_that_is_silent_and_one_that_has_ended_are_spliced() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let program = Program::start(&lab);
    let [(client, ours), (server, to_server)] = program.connections();
    let gone =
        lab.impair(LinkDirection::FromClient, Impair { drop_every: Some(1), ..Impair::default() }).expect("impair");
    assert_eq!(program.refusal(ours, to_server), None);
    drop(gone);
    exchange(&client, &server);
    drop((client, server));

    let [(mut client, ours), (mut server, to_server)] = program.connections();
    client.shutdown(std::net::Shutdown::Write).expect("shut down");
    wait_for(PATIENCE, || (ours.peek(&mut [0]).expect("the end") == 0).then_some(())).expect("the end");
    let id = program.begin(ours, to_server);
    assert_eq!(server.read(&mut [0]).expect("the end"), 0);
    // no probe is sent: something has to pass
    let spliced = || {
        server.write_all(&[7; 1000]).expect("write");
        client.read_exact(&mut [0; 1000]).expect("read");
        program.splicer.status(id).is_some_and(|flow| flow.state == FlowState::Spliced).then_some(())
    };
    wait_for(PATIENCE, spliced).expect("spliced");
    drop((client, server));
    wait_for(PATIENCE, || program.splicer.flows().is_empty().then_some(())).expect("the flows end");
}

/// As most listeners of other code are bound: to all addresses of both families.
#[test]
#[ignore = "root"]
fn a_client_of_ipv4_at_a_socket_for_ipv6_is_spliced() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let program = Program::start(&lab);
    let listener = lab.forwarder.run(|| TcpListener::bind("[::]:7001")).expect("listen");
    let (client, ours) = connection(&lab, FORWARDER_TO_CLIENT.port(Family::V4, 7001), &listener);
    let [_, (server, to_server)] = program.connections();
    assert_eq!(program.refusal(ours, to_server), None);
    exchange(&client, &server);
    drop((client, server));
    wait_for(PATIENCE, || program.splicer.flows().is_empty().then_some(())).expect("the flow ends");
}

/// A forwarder whose connections are adopted when a splice is due, with a connection through it.
fn late(lab: &Lab, family: Family) -> (Forwarder, TcpStream, TcpStream) {
    let (proxy, target) = (FORWARDER_TO_CLIENT.port(family, 7000), SERVER.port(family, 7000));
    let listener = lab.server.run(|| TcpListener::bind(target)).expect("listen");
    let f = Forwarder::adopting_late(lab, proxy, target, by_hand());
    let (client, server) = connection(lab, proxy, &listener);
    f.wait_state(FlowState::Copying);
    (f, client, server)
}

fn records(f: &Forwarder) -> usize {
    f.splicer.datapath().expect("it is open").legs().len()
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_connection_has_records_when_a_splice_is_due_and_is_released_like_any_other(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let (f, client, server) = late(&lab, family);
    exchange(&client, &server);
    assert_eq!(records(&f), 0);
    for _ in 0..3 {
        f.command(Command::Splice);
        f.wait_state(FlowState::Spliced);
        exchange(&client, &server);
        f.command(Command::Release);
        f.wait_state(FlowState::Released);
        exchange(&client, &server);
        f.command(Command::Unsplice);
        f.wait_state(FlowState::Copying);
        exchange(&client, &server);
    }
    drop((client, server));
    let ended = &f.ended(1)[0];
    assert_eq!((ended.how, ended.splices, ended.refusal), (EndReason::Closed, 3, None));
    assert_eq!((ended.bytes_up, ended.bytes_down), (10_000, 10_000));
}

#[test]
#[ignore = "root"]
fn before_its_first_byte_a_connection_is_adopted_by_a_probe() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let (f, client, server) = late(&lab, Family::V4);
    f.command(Command::Splice);
    f.wait_state(FlowState::Spliced);
    exchange(&client, &server);
    drop((client, server));
    assert_eq!(f.ended(1)[0].refusal, None);
}

/// One direction has ended before there are records. The other one is spliced, and its end is heard.
#[test_case(true, Family::V4; "by_the_client_v4")]
#[test_case(false, Family::V6; "by_the_server_v6")]
#[ignore = "root"]
fn a_connection_that_is_half_closed_is_adopted(by_client: bool, family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let (f, client, server) = late(&lab, family);
    exchange(&client, &server);
    let (mut ended, mut open) = if by_client { (&client, &server) } else { (&server, &client) };
    ended.shutdown(std::net::Shutdown::Write).expect("shut down");
    assert_eq!(open.read(&mut [0]).expect("the end"), 0);
    f.command(Command::Splice);
    let mut passed = 0;
    let mut pass = |n: usize| {
        let (said, mut heard) = (vec![9; n], vec![0; n]);
        open.write_all(&said).expect("write");
        ended.read_exact(&mut heard).expect("read");
        assert!(said == heard);
        passed += n as u64;
    };
    // no probe is sent where one direction has ended: something has to pass while it is adopted
    let spliced = || {
        pass(1000);
        f.splicer.flows().iter().any(|flow| flow.state == FlowState::Spliced).then_some(())
    };
    wait_for(PATIENCE, spliced).expect("spliced");
    pass(50_000);
    open.shutdown(std::net::Shutdown::Write).expect("shut down");
    assert_eq!(ended.read(&mut [0]).expect("the end"), 0);
    let ended = &f.ended(1)[0];
    assert_eq!((ended.how, ended.splices, ended.refusal), (EndReason::Closed, 1, None));
    assert_eq!(ended.bytes_up + ended.bytes_down, 2000 + passed);
}

/// The server would otherwise be offered timestamps, and could not be spliced with its client.
#[test_case("net.ipv4.tcp_timestamps"; "timestamps")]
#[test_case("net.ipv4.tcp_sack"; "sack")]
#[ignore = "root"]
fn a_server_is_not_offered_what_a_client_lacks_that_has_no_record(option: &str) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    lab.client.sysctl(option, "0").expect("sysctl");
    let (f, client, server) = late(&lab, Family::V4);
    assert_eq!(records(&f), 1, "the server's, whose SYN the data path changes");
    f.command(Command::Splice);
    f.wait_state(FlowState::Spliced);
    exchange(&client, &server);
    drop((client, server));
    assert_eq!(f.ended(1)[0].refusal, None);
}

/// Nobody but the data path has the ports of released flows.
#[test]
#[ignore = "root"]
fn the_port_of_a_released_flow_is_not_used_again() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let (proxy, target) = (FORWARDER_TO_CLIENT.port(Family::V4, 7000), SERVER.port(Family::V4, 7000));
    let listener = lab.server.run(|| TcpListener::bind(target)).expect("listen");
    let options = OpenOptions { source_ports: 10_000..=10_001, ..OpenOptions::default() };
    let f = Forwarder::adopting_late_with(&lab, proxy, target, by_hand(), options);
    let both = [(); 2].map(|()| {
        let (client, server) = connection(&lab, proxy, &listener);
        exchange(&client, &server);
        (client, server)
    });
    for flow in f.splicer.flows() {
        for (command, state) in [(Command::Splice, FlowState::Spliced), (Command::Release, FlowState::Released)] {
            f.splicer.command(flow.id, command);
            let is_there = || f.splicer.status(flow.id).is_some_and(|now| now.state == state).then_some(());
            wait_for(PATIENCE, is_there).expect("the command is carried out");
        }
    }
    let mut third = lab.client.run(|| TcpStream::connect(proxy)).expect("connect");
    third.set_read_timeout(Some(PATIENCE)).expect("a limit");
    assert!(!matches!(third.read(&mut [0]), Ok(1..)), "no port is left for it");
    both.iter().for_each(|(client, server)| exchange(client, server));
}

/// It may end at any moment of the adoption.
#[test]
#[ignore = "root"]
fn a_connection_that_ends_while_it_is_adopted_leaves_nothing() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let (proxy, target) = (FORWARDER_TO_CLIENT.port(Family::V4, 7000), SERVER.port(Family::V4, 7000));
    let listener = lab.server.run(|| TcpListener::bind(target)).expect("listen");
    let f = Forwarder::adopting_late(&lab, proxy, target, by_hand());
    for n in 0..100 {
        let (client, server) = connection(&lab, proxy, &listener);
        exchange(&client, &server);
        let flow = wait_for(PATIENCE, || f.splicer.flows().pop()).expect("a flow");
        f.splicer.command(flow.id, Command::Splice);
        std::thread::sleep(Duration::from_micros(n * 300));
        if n % 3 == 0 {
            socket2::SockRef::from(&client).set_linger(Some(Duration::ZERO)).expect("it resets");
        }
        drop((client, server));
        wait_for(PATIENCE, || f.splicer.flows().is_empty().then_some(())).expect("the flow ends");
    }
    f.ended(100);
    // those of flows that were in a switch linger, and are complete
    let legs = f.splicer.datapath().expect("it is open").legs();
    assert!(legs.iter().all(|(_, leg)| leg.flags & LegFlags::TRACKED != 0), "{legs:#?}");
    assert!(legs.len() < 200);
}

/// As in a pool of servers: the client's leg was spliced with another one before, so its socket goes on with the help of the record.
#[test]
#[ignore = "root"]
fn a_message_that_has_passed_before_its_server_is_adopted_ends_well() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let program = Program::start(&lab);
    let [(mut client, ours), (mut first, first_ours)] = program.connections();
    let [mut leg, mut first_leg] = [ours, first_ours].map(|socket| program.adopt(socket).expect("a leg"));
    let policy = Arc::new(Policy { path: longsplice_engine::PathRule::Any, ..at_once() });
    let mut relay = |server: &mut Leg| {
        let (message, info) = (Message::from_server(Some(1000)), FlowInfo::new("test", "a server".to_owned()));
        let relay =
            program.splicer.relay_message(&mut leg, server, Leftovers::default(), policy.clone(), info, message);
        let passed = program.runtime.block_on(relay);
        assert_eq!((passed.ended.how, passed.missing), (EndReason::MessageRelayed, 0), "{:?}", passed.ended);
        passed.ended.splices
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let spliced = || program.splicer.flows().pop().filter(|flow| flow.state == FlowState::Spliced);
            wait_for(PATIENCE, spliced).expect("spliced before its first byte");
            first.write_all(&[7; 1000]).expect("write");
        });
        assert_eq!(relay(&mut first_leg), 1);
    });
    let second_ours = lab.forwarder.run(|| TcpStream::connect(SERVER.port(Family::V4, 7000))).expect("connect");
    let mut second = program.servers.accept().expect("accept").0;
    second.write_all(&[8; 1000]).expect("write");
    let has_come = || second_ours.peek(&mut [0; 1000]).is_ok_and(|n| n == 1000).then_some(());
    wait_for(PATIENCE, has_come).expect("all of it waits to be read");
    let mut second_leg = program.adopt(second_ours).expect("a leg");
    assert_eq!(relay(&mut second_leg), 0, "it has passed before");
    let mut said = [0; 2000];
    client.read_exact(&mut said).expect("read");
    assert_eq!(said, *[[7; 1000], [8; 1000]].as_flattened());
}
