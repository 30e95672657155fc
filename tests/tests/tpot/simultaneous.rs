//! Client and server open the same connection, each from its side (RFC 9293, 3.5). Only the client's SYN meets a proxy. What
//! reaches the client first counts.

use super::{PATIENCE, PORT, asker, everywhere, wire::pass};
use longsplice_datapath::tpot_tunnels;
use longsplice_engine::{Command, FlowState};
use longsplice_lab::{
    Family, Lab, Options, Shape,
    process::wait_for,
    topology::{CLIENT, SERVER},
    traffic::{Script, connect},
};
use longsplice_tests::{Forwarder, TestTpot, at_once, by_hand};
use socket2::{Domain, SockRef, Socket, Type};
use std::{
    io::{self, ErrorKind, Read},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};
use test_case::test_case;

/// The client's port.
const CLIENT_PORT: u16 = 4000;

fn network(family: Family) -> (Lab, TestTpot) {
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).expect("lab");
    let asker = asker(&lab, family);
    (lab, asker)
}

/// A socket of the server, which has the port of its listener.
fn bound(at: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM, None)?;
    socket.set_reuse_port(true)?;
    socket.bind(&at.into())?;
    Ok(socket)
}

fn from_client(lab: &Lab, family: Family) -> io::Result<TcpStream> {
    let script = Script { local: Some(CLIENT.port(family, CLIENT_PORT)), ..Script::opener(1).deadline(PATIENCE) };
    lab.client.run(|| connect(SERVER.port(family, PORT), &script))
}

fn from_server(lab: &Lab, family: Family) -> io::Result<TcpStream> {
    lab.server.run(|| {
        let socket = bound(SERVER.port(family, PORT))?;
        socket.connect_timeout(&CLIENT.port(family, CLIENT_PORT).into(), PATIENCE)?;
        Ok(socket.into())
    })
}

/// The client is in a tunnel: the server's attempt is refused, and the tunnel goes on.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn the_proxy_answers_first(family: Family) {
    let states = [FlowState::Copying, FlowState::Spliced, FlowState::Released];
    for state in states {
        let (lab, asker) = network(family);
        let policy = if state == FlowState::Copying { by_hand() } else { at_once() };
        let f = Forwarder::taker(&lab.forwarder, everywhere(family), policy, false);
        let listen = || bound(SERVER.port(family, PORT)).and_then(|socket| socket.listen(1).map(|()| socket.into()));
        let listener: TcpListener = lab.server.run(listen).expect("listen");
        let client = from_client(&lab, family).expect("connected");
        let (accepted, _) = listener.accept().expect("accept");
        if state == FlowState::Released {
            f.wait_state(FlowState::Spliced);
            f.command(Command::Release);
        }
        f.wait_state(state);
        let refused = from_server(&lab, family).expect_err("the client has this connection with the proxy");
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{state:?}");
        pass(&client, &accepted);
        pass(&accepted, &client);
        assert_eq!(["opened", "second-answer", "failed"].map(|v| asker.verdict(v)), [1, 1, 0], "{family:?} {state:?}");
        let tunnels = lab.forwarder.run(tpot_tunnels).expect("a table");
        assert!(tunnels.iter().all(|(_, tunnel)| !tunnel.over), "{family:?} {state:?} {tunnels:?}");
    }
}

/// The server's SYN is there before the proxy's answer: that is refused, and client and server have a connection without it.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn the_server_comes_first(family: Family) {
    let (lab, asker) = network(family);
    let f = Forwarder::taker(&lab.forwarder, everywhere(family), by_hand(), false);
    let answers = format!("tcp flags & (syn | ack) == (syn | ack) tcp sport {PORT} drop");
    let late = format!("table inet late {{ chain c {{ type filter hook output priority 0; {answers}; }}; }}");
    lab.forwarder.execute("nft", &[&late]).expect("a rule");
    let (client, server) = thread::scope(|s| {
        let client = s.spawn(|| from_client(&lab, family));
        wait_for(PATIENCE, || (asker.verdict("asked") > 0).then_some(())).expect("it asks");
        let server = s.spawn(|| from_server(&lab, family));
        // it does not stay half-open for long
        let answered = ["-tnH", "state", "syn-recv", "state", "established"];
        let has_answered = || lab.client.execute("ss", &answered).expect("ss").contains(':');
        wait_for(PATIENCE, || has_answered().then_some(())).expect("the client answers the server's SYN");
        lab.forwarder.execute("nft", &["delete table inet late"]).expect("the rule is removed");
        [client, server].map(|t| t.join().expect("no panic").expect("connected")).into()
    });
    pass(&client, &server);
    pass(&server, &client);
    wait_for(PATIENCE, || (asker.verdict("second-answer") > 0).then_some(())).expect("the proxy repeats its answer");
    assert_eq!(asker.verdict("opened"), 0);
    assert!(f.splicer.flows().is_empty() && lab.forwarder.run(tpot_tunnels).expect("a table").is_empty());
    // the proxy takes nothing of it for its own
    SockRef::from(&server).set_linger(Some(Duration::ZERO)).expect("an option");
    drop(server);
    let reset = (&client).read(&mut [0]).expect_err("the server has reset it");
    assert_eq!(reset.kind(), ErrorKind::ConnectionReset);
}
