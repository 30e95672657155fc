//! Sockets that other code has made are adopted, and then spliced like any others. In scenarios, [`Mode::Adopted`] does so in the
//! midst of a transfer.
//!
//! [`Mode::Adopted`]: longsplice_tests::scenario::Mode

use longsplice_engine::{
    Command, EndReason, FlowInfo, FlowState, Leftovers, Leg, OpenOptions, Policy, Refusal, Splicer,
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
use tokio::{runtime::Runtime, time::timeout};

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
        let servers = lab.server.run(|| TcpListener::bind(SERVER.port(Family::V4, 7000))).expect("listen");
        lab.forwarder.run(move || {
            let mut options = OpenOptions::default();
            options.datapath.max_flows = 4096;
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
        self.lab.forwarder.run(|| self.runtime.block_on(self.splicer.adopt(socket)))
    }

    /// Adopts both, and hands them over. Returns the reason for which the flow is not spliced.
    fn refusal(&self, client: TcpStream, server: TcpStream) -> Option<Refusal> {
        let [client, server] = [client, server].map(|socket| self.adopt(socket).expect("a leg"));
        let _runtime = self.runtime.enter();
        let info = FlowInfo::new("test", "the server".to_owned());
        let policy = Arc::new(Policy { path: longsplice_engine::PathRule::Any, ..at_once() });
        let id = self.splicer.hand_over(client, server, Leftovers::default(), policy, info, |_, _| ());
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
    let program = Program::start(&lab);
    let udp = lab.forwarder.run(|| UdpSocket::bind("127.0.0.1:0")).expect("a socket");
    assert_eq!(program.adopt(udp).expect_err("no TCP").kind(), ErrorKind::InvalidInput);
    let listener = lab.forwarder.run(|| TcpListener::bind("127.0.0.1:0")).expect("a socket");
    assert_eq!(program.adopt(listener).expect_err("no connection").kind(), ErrorKind::NotConnected);

    let [(client, ours), (server, to_server)] = program.connections();
    client.shutdown(std::net::Shutdown::Write).expect("shut down");
    wait_for(PATIENCE, || (ours.peek(&mut [0]).expect("the end") == 0).then_some(())).expect("the end");
    assert_eq!(program.refusal(ours, to_server), Some(Refusal::Closing));
    drop((client, server));

    // the host does not answer
    let [(client, ours), (server, to_server)] = program.connections();
    let gone =
        lab.impair(LinkDirection::FromClient, Impair { drop_every: Some(1), ..Impair::default() }).expect("impair");
    assert_eq!(program.refusal(ours, to_server), Some(Refusal::Untracked));
    drop(gone);
    exchange(&client, &server);
    drop((client, server));
    wait_for(PATIENCE, || (program.splicer.flows().is_empty() && program.is_empty()).then_some(()))
        .expect("nothing is left");
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

#[test]
#[ignore = "root"]
fn an_adoption_that_is_given_up_leaves_nothing() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let program = Program::start(&lab);
    let [(_client, ours), _to_server] = program.connections();
    let gone =
        lab.impair(LinkDirection::FromClient, Impair { drop_every: Some(1), ..Impair::default() }).expect("impair");
    lab.forwarder.run(|| {
        program.runtime.block_on(async {
            let adopted = timeout(Duration::from_millis(200), program.splicer.adopt(ours)).await;
            assert!(adopted.is_err(), "the host does not answer");
        });
    });
    assert!(program.is_empty());
    drop(gone);
}
