//! Single packets of hosts that do not ask, past a transparent listener: what it takes, and what is routed on.

use super::packets::{Host, NEXT, PORT, SYN_ACK, USUAL, option, packet};
use longsplice_datapath::{Destinations, TPOT_DOORS, TpotOptions, TpotWhose, set_transparent};
use longsplice_lab::{Family, topology::SERVER_SECOND};
use longsplice_tests::packet::{Packet, flag};
use nix::libc;
use socket2::{Domain, Socket, Type};
use std::net::{IpAddr, SocketAddr, TcpListener};
use test_case::test_case;

/// Mark of a packet that goes to our sockets (MARK_TAKEN).
const TAKEN: u32 = 0x6c73_7074;

/// The programs at a proxy with a listener for everything, and a client beyond it.
struct Edge {
    host: Host,
    client: SocketAddr,
    listener: Option<TcpListener>,
}

impl Edge {
    fn new(family: Family) -> Edge {
        Edge::with(family, |host, listener| {
            let everywhere = Destinations { net: host.client.ip(), prefix: 0, ports: 1..=u16::MAX };
            host.tpot.take(TpotWhose::All, &everywhere, listener).expect("a rule");
        })
    }

    fn with(family: Family, listen: impl FnOnce(&Host, &TcpListener)) -> Edge {
        let host = Host::with(family, &TpotOptions::default());
        let us = SocketAddr::new(host.client.ip(), 0);
        let listener = host.lab.client.run(|| TcpListener::bind(us)).expect("a listener");
        listen(&host, &listener);
        let client = SocketAddr::new(host.proxy, 4000);
        Edge { host, client, listener: Some(listener) }
    }

    fn syn(&self) -> Packet {
        Packet { seq: 1000, flags: flag::SYN, options: USUAL.to_vec(), ..packet(self.client, self.host.server) }
    }

    /// Our listener's answer to it.
    fn answer(&self) -> Packet {
        let answer = Packet { seq: 5000, ack: 1001, flags: SYN_ACK, options: USUAL.to_vec(), ..self.back() };
        assert_eq!(self.host.run(true, &answer.frame()), (NEXT, 0, answer.frame()), "it leaves unchanged");
        answer
    }

    fn back(&self) -> Packet {
        packet(self.host.server, self.client)
    }

    /// Whether the packet, which is never changed, goes to our sockets.
    fn takes(&self, p: &Packet) -> bool {
        let (code, mark, out) = self.host.run(false, &p.frame());
        assert_eq!((code, out), (NEXT, p.frame()), "{p:?}");
        assert!([0, TAKEN].contains(&mark), "{mark:x}");
        mark == TAKEN
    }

    fn verdict(&self, name: &str) -> u64 {
        self.host.tpot.verdict(name)
    }
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn only_what_fits_the_handshake_is_taken(family: Family) {
    let edge = Edge::new(family);
    let ack = Packet { seq: 1001, ack: 5001, flags: flag::ACK, ..packet(edge.client, edge.host.server) };
    let data = Packet { payload: vec![7; 100], ..ack.clone() };
    let reset = Packet { flags: flag::RST, ack: 0, ..ack.clone() };
    assert!(!edge.takes(&ack), "of a connection that is older");
    assert!(edge.takes(&edge.syn()));
    for of_another in [ack.clone(), data.clone(), Packet { seq: 7, ..reset.clone() }] {
        assert!(!edge.takes(&of_another), "before our answer: {of_another:?}");
    }
    edge.answer();
    for of_another in
        [Packet { ack: 5002, ..ack.clone() }, Packet { ack: 77, ..data.clone() }, Packet { seq: 7, ..reset.clone() }]
    {
        assert!(!edge.takes(&of_another), "of the connection that a forged SYN is about: {of_another:?}");
    }
    assert!(edge.takes(&reset), "of a client that does not want our answer");
    for of_client in [edge.syn(), ack, Packet { ack: 6000, ..data }] {
        assert!(edge.takes(&of_client), "{of_client:?}");
    }
    assert_eq!((edge.verdict("intercepted-plain"), edge.verdict("unserved")), (2, 0));
}

/// SYNs to this machine and of this machine, also in a client's name, and those of ports that no rule is about.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn what_concerns_this_machine_is_left_alone(family: Family) {
    let edge = Edge::new(family);
    let Host { client: us, server, .. } = edge.host;
    let syn = |from, to| Packet { from, to, ..edge.syn() };
    assert!(!edge.takes(&syn(edge.client, us)) && !edge.takes(&syn(us, server)));
    assert_eq!(edge.verdict("left"), 2);
    // a connection of ours to the server that shows it the client's address, whose SYN comes back
    let own = edge.host.lab.client.run(|| {
        let socket = Socket::new(Domain::for_address(server), Type::STREAM.nonblocking(), None)?;
        set_transparent(&socket, server.is_ipv6())?;
        socket.bind(&edge.client.into())?;
        assert_eq!(socket.connect(&server.into()).expect_err("it waits").raw_os_error(), Some(libc::EINPROGRESS));
        Ok::<_, std::io::Error>(socket)
    });
    let own = own.expect("a socket");
    assert!(
        !edge.host.lab.client.run(|| edge.takes(&syn(edge.client, server))),
        "the sockets are those of the namespace"
    );
    assert_eq!(edge.verdict("left"), 3);
    drop(own);
    let zero = SocketAddr::new(SERVER_SECOND.ip(family), 0);
    assert!(!edge.takes(&syn(edge.client, zero)));
    assert!(edge.takes(&syn(edge.client, SocketAddr::new(SERVER_SECOND.ip(family), PORT))));
}

/// A process that is gone, or leaves SYNs alone: they are routed.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn without_a_listener_everything_is_routed(family: Family) {
    let mut edge = Edge::new(family);
    let everywhere = Destinations { net: edge.host.client.ip(), prefix: 0, ports: 1..=u16::MAX };
    let leave = |edge: &Edge, leave| edge.host.tpot.leave(TpotWhose::All, &everywhere, leave).expect("a rule");
    assert!(edge.takes(&edge.syn()));
    leave(&edge, true);
    assert!(!edge.takes(&edge.syn()), "at a limit");
    leave(&edge, false);
    assert!(edge.takes(&edge.syn()));
    edge.answer();
    drop(edge.listener.take());
    assert!(!edge.takes(&edge.syn()));
    let ack = Packet { seq: 1001, ack: 5001, flags: flag::ACK, ..packet(edge.client, edge.host.server) };
    assert!(!edge.takes(&ack), "the server's answer has another number, and this is not for us any more");
    assert_eq!(edge.verdict("unserved"), 1);
}

/// A connection that is awaited at an address: of one host, whatever its port, as long as somebody listens.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_connection_that_is_awaited(family: Family) {
    let mut edge = Edge::with(family, |host, listener| {
        host.tpot.await_at(host.server, host.proxy, listener).expect("room");
    });
    let server = edge.host.server;
    let syn = |from, to| Packet { from, to, ..edge.syn() };
    let stranger = SocketAddr::new(SERVER_SECOND.ip(family), 4000);
    let other = |of: SocketAddr| SocketAddr::new(of.ip(), of.port() + 1);
    assert!(!edge.takes(&syn(stranger, server)) && !edge.takes(&syn(edge.client, other(server))));
    assert!(edge.takes(&syn(other(edge.client), server)) && edge.takes(&edge.syn()));
    edge.answer();
    let ack = Packet { seq: 1001, ack: 5001, flags: flag::ACK, ..packet(edge.client, server) };
    assert!(!edge.takes(&Packet { ack: 77, ..ack.clone() }) && edge.takes(&ack));
    drop(edge.listener.take());
    assert!(!edge.takes(&Packet { from: SocketAddr::new(edge.client.ip(), 4002), ..edge.syn() }));
    assert_eq!(["intercepted-plain", "left", "unserved"].map(|name| edge.verdict(name)), [2, 0, 0]);
}

/// Connections are awaited in one namespace at so many addresses, and not at one more. A listener that is gone leaves its places.
#[test]
#[ignore = "root"]
fn there_is_room_for_so_many_awaited_connections() {
    let others = |host: &Host, n: u32| SocketAddr::new(IpAddr::V4((0x0a00_0000 + n).into()), host.server.port());
    let mut edge = Edge::with(Family::V4, |host, listener| {
        for n in 0..TPOT_DOORS as u32 {
            host.tpot.await_at(others(host, n), host.proxy, listener).expect("room");
        }
        let error = host.tpot.await_at(host.server, host.proxy, listener).expect_err("no room");
        assert_eq!(error.raw_os_error(), Some(libc::E2BIG));
    });
    assert!(!edge.takes(&edge.syn()));
    let listener = edge.listener.take().expect("once");
    assert!(edge.takes(&Packet { to: others(&edge.host, 7), ..edge.syn() }));
    drop(listener);
    let next = edge.host.lab.client.run(|| TcpListener::bind("127.0.0.1:0")).expect("a listener");
    edge.host.tpot.await_at(edge.host.server, edge.host.proxy, &next).expect("room again");
}

/// A SYN that asks for a proxy and is taken by a transparent listener is not left alone.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_host_that_asks_is_served_by_a_transparent_listener(family: Family) {
    let mut edge = Edge::new(family);
    let asks = Packet { options: [USUAL.to_vec(), option(8)].concat(), ..edge.syn() };
    assert!(edge.takes(&asks));
    assert_eq!(["intercepted-plain", "left"].map(|name| edge.verdict(name)), [1, 0]);
    let everywhere = Destinations { net: edge.host.client.ip(), prefix: 0, ports: 1..=u16::MAX };
    edge.host.tpot.leave(TpotWhose::All, &everywhere, true).expect("a rule");
    drop(edge.listener.take());
    assert!(!edge.takes(&Packet { from: SocketAddr::new(edge.client.ip(), 4001), ..asks }));
    assert_eq!(edge.verdict("left"), 1);
}
