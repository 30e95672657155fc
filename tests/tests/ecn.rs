//! Congestion marks between real hosts: a mark reaches a receiver that echoes it, and the echo reaches the sender; no host
//! sees marks without having negotiated ECN; and a mark that would not be echoed becomes a loss.
use longsplice_datapath::{LegFlags, Pair, PathFlags, Side};
use longsplice_engine::{Command, FlowState, Policy, SpliceWhen};
use longsplice_lab::{
    Family, Impair, Impairment, Lab, LinkDirection, Namespace, Options, Shape,
    process::wait_for,
    topology::{CLIENT, FORWARDER_TO_CLIENT, SERVER},
    traffic::{Chunks, Report, Script, Serving, connect, converse, intact, listen, serve},
};
use longsplice_tests::{Forwarder, at_once, by_hand};
use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    thread::JoinHandle,
    time::Duration,
};
use test_case::test_case;

const PORT: u16 = 7000;
const BYTES: u64 = 6_000_000;
/// Fraction of ECN-capable packets marked during congestion.
const CONGESTION: Impair = Impair { mark: 0.03, ..Impair::NONE };

/// Who requests and who accepts ECN: values of net.ipv4.tcp_ecn at client, forwarder and server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Agreed {
    Both,
    Client,
    Server,
}

impl Agreed {
    fn settings(self) -> [&'static str; 3] {
        match self {
            Agreed::Both => ["1", "1", "2"],
            Agreed::Client => ["1", "2", "2"],
            Agreed::Server => ["0", "1", "2"],
        }
    }

    /// Whether each leg has negotiated ECN.
    fn legs(self) -> Pair<bool> {
        Pair::new(self != Agreed::Server, self != Agreed::Client)
    }
}

struct Run {
    lab: Lab,
    family: Family,
    f: Forwarder,
    client: JoinHandle<Report>,
    server: Serving,
    /// The links from the hosts.
    links: Pair<Impairment>,
}

/// A host's counters so far: packets received with a mark, and ECN-capable; marks
/// echoed to it for its own segments; and segments that it has retransmitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    ce: u64,
    ect: u64,
    echoed: u64,
    again: u64,
}

impl Run {
    fn start(agreed: Agreed, family: Family, policy: Policy, transparent: bool) -> Run {
        let lab = Lab::new(Shape::TwoDevices, Options { large_packets: false, ..Options::default() }).expect("lab");
        for (host, setting) in [&lab.client, &lab.forwarder, &lab.server].into_iter().zip(agreed.settings()) {
            host.sysctl("net.ipv4.tcp_ecn", setting).expect("sysctl");
        }
        let links = Pair::new(LinkDirection::FromClient, LinkDirection::FromServer)
            .map(|way| lab.impair(way, Impair::NONE).expect("impair"));
        let script = Script::opener(1).bytes(BYTES).pace(1_500_000).chunks(Chunks::Fixed(30_000));
        let answer = Script::answerer().bytes(BYTES).pace(1_500_000).chunks(Chunks::Fixed(30_000));
        let at = SERVER.port(family, PORT);
        let serving = lab.server.run(|| serve(listen(at, &answer).expect("listen"), 1, answer.clone()));
        let proxy = FORWARDER_TO_CLIENT.port(family, PORT);
        let any: SocketAddr = match family {
            Family::V4 => (Ipv4Addr::UNSPECIFIED, PORT).into(),
            Family::V6 => (Ipv6Addr::UNSPECIFIED, PORT).into(),
        };
        let f = if transparent {
            Forwarder::transparent(&lab, any, policy)
        } else {
            Forwarder::start(&lab, proxy, at, policy)
        };
        let to = if transparent { at } else { proxy };
        let client = lab.client.spawn(move || {
            let script = Script { local: Some(CLIENT.port(family, 0)), ..script };
            converse(connect(to, &script).expect("connect"), &script)
        });
        Run { lab, family, f, client, server: serving, links }
    }

    fn seen(&self, host: &Namespace) -> Seen {
        let ip = |name| {
            let group = if self.family == Family::V4 { "IpExt" } else { "Ip6" };
            host.counter(group, name).expect("the kernel counts it")
        };
        Seen {
            ce: ip("InCEPkts"),
            ect: ip("InECT0Pkts") + ip("InECT1Pkts"),
            echoed: host.counter("TcpExt", "TCPDeliveredCE").expect("the kernel counts it"),
            again: host.counter("Tcp", "RetransSegs").expect("the kernel counts it"),
        }
    }

    fn hosts(&self) -> Pair<Seen> {
        Pair::new(self.seen(&self.lab.client), self.seen(&self.lab.server))
    }

    fn dropped(&self) -> u64 {
        self.f.verdict("ce-dropped")
    }

    /// Marks ECN-capable packets until a condition holds, while both ends are still sending.
    fn congested(&self, what: &str, mut so: impl FnMut() -> bool) {
        self.links.iter().for_each(|l| l.change(CONGESTION).expect("change"));
        let marked = || self.links.each_ref().map(|l| l.counters().marked);
        wait_for(Duration::from_secs(8), || so().then_some(())).unwrap_or_else(|| {
            let (seen, flows) = (self.hosts(), self.f.splicer.flows());
            panic!("{what}: marked {:?}, seen {seen:?}, {:?}, {flows:#?}", marked(), self.f.verdicts())
        });
        self.links.iter().for_each(|l| l.change(Impair::NONE).expect("change"));
    }

    fn end(self) {
        let (client, server) = (self.client.join().expect("client"), self.server.join().remove(0));
        intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", self.f.verdicts()));
        assert_eq!((client.sent, server.sent), (BYTES, BYTES));
    }
}

/// The data path's records: ECN of each leg, and whether all path entries let marks pass.
fn noted(run: &Run) -> (Pair<bool>, bool) {
    let d = run.f.splicer.datapath().expect("kernel path");
    let of_client = |remote: SocketAddr| remote.port() != PORT;
    let mut legs = d.legs();
    legs.sort_by_key(|(t, _)| !of_client(t.remote));
    let legs: Vec<bool> = legs.iter().map(|(_, l)| l.flags & LegFlags::ECN != 0).collect();
    let pass = d.paths().iter().all(|(_, p)| p.flags & PathFlags::ECN != 0);
    let both: [bool; 2] = legs.try_into().expect("both legs");
    (both.into(), pass)
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn spliced_marks_reach_the_other_host_and_the_echo_its_sender(family: Family) {
    let run = Run::start(Agreed::Both, family, at_once(), false);
    run.f.wait_state(FlowState::Spliced);
    assert_eq!(noted(&run), (Pair::both(true), true), "{family:?}");
    let before = run.hosts();
    run.congested("both hosts see marks, and hear of their own", || {
        run.hosts().iter().zip(&before).all(|(now, then)| now.ce > then.ce && now.echoed > then.echoed)
    });
    assert_eq!(run.dropped(), 0, "{family:?}");
    run.end();
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn spliced_marks_become_losses_for_a_host_without_ecn(family: Family) {
    for agreed in [Agreed::Client, Agreed::Server] {
        let run = Run::start(agreed, family, at_once(), false);
        run.f.wait_state(FlowState::Spliced);
        assert_eq!(noted(&run), (agreed.legs(), false), "{family:?}");
        let sender = if agreed == Agreed::Server { Side::Server } else { Side::Client };
        let before = run.hosts()[sender];
        run.congested("what was marked is sent again", || {
            run.dropped() > 2 && run.hosts()[sender].again > before.again
        });
        let now = run.hosts();
        assert_eq!(now[sender].echoed, before.echoed, "{agreed:?} {family:?}: nobody could echo them");
        let other = now[sender.other()];
        assert_eq!((other.ce, other.ect), (0, 0), "{agreed:?} {family:?}: it has agreed on nothing");
        assert!(run.links[sender].counters().marked > 2);
        run.end();
    }
}

#[test]
#[ignore = "root"]
fn copied_each_connection_has_its_own() {
    for (family, agreed) in Family::BOTH.into_iter().zip([Agreed::Both, Agreed::Client]) {
        let run = Run::start(agreed, family, Policy { when: SpliceWhen::Never, ..Policy::default() }, false);
        run.f.wait_state(FlowState::Copying);
        run.congested("our sockets echo marks", || {
            run.hosts().iter().zip(agreed.legs()).all(|(host, ecn)| !ecn || host.echoed > 0)
        });
        assert_eq!(run.dropped(), 0);
        run.end();
    }
}

#[test]
#[ignore = "root"]
fn switched_again_and_again() {
    use {Agreed::*, Family::*};
    for (family, agreed) in [(V4, Both), (V6, Client), (V4, Server), (V6, Both)] {
        let run = Run::start(agreed, family, by_hand(), false);
        run.f.wait_state(FlowState::Copying);
        let mut switches = 0;
        run.congested("marks while it is switched", || {
            run.f.command(Command::Splice);
            run.f.wait_state(FlowState::Spliced);
            run.f.command(Command::Unsplice);
            run.f.wait_state(FlowState::Copying);
            switches += 1;
            switches >= 20 && run.hosts().iter().zip(agreed.legs()).all(|(host, ecn)| !ecn || host.echoed > 0)
        });
        if agreed == Agreed::Both {
            assert_eq!(run.dropped(), 0, "{family:?}: socket or host, everybody echoes");
        }
        for (host, ecn) in run.hosts().iter().zip(agreed.legs()) {
            assert!(ecn || (host.ce, host.ect, host.echoed) == (0, 0, 0), "{agreed:?} {family:?}: {host:?}");
        }
        run.end();
    }
}

/// A recreated socket has no ECN, but its host has.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn released_and_made_anew(family: Family) {
    let run = Run::start(Agreed::Both, family, at_once(), false);
    run.f.wait_state(FlowState::Spliced);
    run.f.command(Command::Release);
    run.f.wait_state(FlowState::Released);
    run.f.command(Command::Unsplice);
    run.f.wait_state(FlowState::Copying);
    assert_eq!(noted(&run).0, Pair::both(true), "{family:?}: the hosts have agreed as ever");
    let before = run.hosts();
    run.congested("nobody is there to echo, so marks become losses", || {
        run.dropped() > 2 && run.hosts().iter().zip(&before).any(|(now, then)| now.again > then.again)
    });
    let echoed = |hosts: Pair<Seen>| hosts.map(|h| h.echoed);
    assert_eq!(echoed(run.hosts()), echoed(before), "{family:?}");
    run.f.command(Command::Splice);
    run.f.wait_state(FlowState::Spliced);
    run.congested("hosts echo each other's marks again", || {
        run.hosts().iter().zip(&before).all(|(now, then)| now.ce > then.ce && now.echoed > then.echoed)
    });
    run.end();
}

/// The hosts have negotiated ECN with each other.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn connections_of_others(family: Family) {
    let run = Run::start(Agreed::Client, family, by_hand(), true);
    run.f.wait_state(FlowState::Copying);
    assert_eq!(noted(&run).0, Pair::both(true), "{family:?}: as the hosts say");
    run.congested("our sockets cannot echo", || run.dropped() > 2);
    assert_eq!(run.hosts().map(|h| h.echoed), Pair::both(0), "{family:?}");
    run.f.command(Command::Splice);
    run.f.wait_state(FlowState::Spliced);
    run.congested("the hosts can", || run.hosts().iter().all(|h| h.ce > 0 && h.echoed > 0));
    run.end();
}
