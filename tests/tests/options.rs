//! Hosts with other TCP options than their peers behind the splice, and receivers that are as strict as the RFCs allow. Each gets
//! only what it has negotiated, and all of it; a pair of legs that cannot be served so is copied.
use longsplice_datapath::{LegFlags, Pair, Tuple};
use longsplice_engine::{Command, FlowState, Policy, Refusal};
use longsplice_lab::{
    Family, Lab, Options, Shape,
    topology::{CLIENT, FORWARDER_TO_CLIENT, SERVER},
    traffic::{Script, connect, converse, intact, listen, serve},
};
use longsplice_tests::{Forwarder, at_once, by_hand, strict::Strict};
use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::mpsc,
};
use test_case::test_case;

const PORT: u16 = 7000;
const BYTES: u64 = 2_000_000;
const PACE: u64 = 1_500_000;

/// Lets the client send, which the server waits for.
type Begin = mpsc::Sender<()>;

/// Which addresses a connection uses.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Plug,
    EndToEnd,
    Transparent,
}

/// What `host` knows; the settings of net.ipv4.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Knows {
    timestamps: bool,
    sack: bool,
}

const ALL: Knows = Knows { timestamps: true, sack: true };
const NO_TIMESTAMPS: Knows = Knows { timestamps: false, sack: true };
const NO_SACK: Knows = Knows { timestamps: true, sack: false };
const NOTHING: Knows = Knows { timestamps: false, sack: false };

/// A network whose hosts know something else each time, with one data path.
struct Scene {
    f: Forwarder,
    lab: Lab,
    family: Family,
    /// The port of the last conversation.
    port: u16,
}

impl Scene {
    fn new(family: Family) -> Scene {
        let lab = Lab::new(Shape::TwoDevices, Options::default()).expect("lab");
        Scene { f: Forwarder::idle(&lab), lab, family, port: PORT }
    }

    /// Relays to a server. Returns where its client connects to.
    fn relay(&self, server: SocketAddr, kind: Kind, policy: Policy) -> SocketAddr {
        let proxy = FORWARDER_TO_CLIENT.port(self.family, self.port);
        match kind {
            Kind::Plug => self.f.relay(proxy, server, policy),
            Kind::EndToEnd => self.f.relay_end_to_end(proxy, server, policy),
            Kind::Transparent => {
                let any: SocketAddr = match self.family {
                    Family::V4 => (Ipv4Addr::UNSPECIFIED, self.port).into(),
                    Family::V6 => (Ipv6Addr::UNSPECIFIED, self.port).into(),
                };
                self.f.relay_transparent(any, policy);
                return server;
            }
        }
        proxy
    }

    /// Sends data both ways between hosts that know this. `during` acts on the flow, and lets the hosts begin. Returns why the flow
    /// was not spliced, if it was not.
    fn converse_between(
        &mut self,
        (client, server): (Knows, Knows),
        kind: Kind,
        policy: Policy,
        during: impl FnOnce(&Scene, Begin),
    ) -> Option<Refusal> {
        self.port += 1;
        let (Scene { f, lab, family, port }, over) = (&*self, self.f.ended(0).len());
        for (host, knows) in [(&lab.client, client), (&lab.server, server)] {
            let value = |on: bool| if on { "1" } else { "0" };
            host.sysctl("net.ipv4.tcp_timestamps", value(knows.timestamps)).expect("sysctl");
            host.sysctl("net.ipv4.tcp_sack", value(knows.sack)).expect("sysctl");
        }
        // with a plug, the client's connection is open before the server is known
        let at_server = client.timestamps && server.timestamps;
        let at_client = if kind == Kind::Plug { client.timestamps } else { at_server };
        let strict =
            [(&lab.client, at_client), (&lab.server, at_server)].map(|(host, ts)| Strict::at_port(host, *port, ts));
        let script = Script::opener(1).bytes(BYTES).pace(PACE);
        let answer = Script::answerer().bytes(BYTES).pace(PACE);
        let at = SERVER.port(*family, *port);
        let serving = lab.server.run(|| serve(listen(at, &answer).expect("listen"), 1, answer.clone()));
        let to = self.relay(at, kind, policy);
        let ((open, opened), (begin, begun)) = (mpsc::channel(), mpsc::channel());
        let script = Script { local: Some(CLIENT.port(*family, 0)), ..script };
        let talking = lab.client.spawn(move || {
            let socket = connect(to, &script).expect("connect");
            open.send(()).expect("the test waits");
            begun.recv().expect("the test goes on");
            converse(socket, &script)
        });
        opened.recv().expect("connected");
        during(self, begin);
        let (client, server) = (talking.join().expect("client"), serving.join().remove(0));
        let name = format!("{kind:?} {family:?} {client} {server} {:?}", f.verdicts());
        intact(&client, &server).unwrap_or_else(|e| panic!("{e}: {name}"));
        assert_eq!((client.sent, server.sent), (BYTES, BYTES), "{name}");
        let refused = strict.map(|s| s.refused());
        assert_eq!(refused, [0, 0], "segments without what was agreed, at client and server: {name}");
        let ended = f.ended(over + 1).remove(over);
        assert_eq!(ended.splices > 0, ended.refusal.is_none(), "{ended:?}");
        ended.refusal
    }

    /// Whether both legs of the last conversation, which is about a plug, have agreed on the same.
    fn agreed(&self) -> Pair<Knows> {
        let legs = self.f.splicer.datapath().expect("kernel path").legs();
        let knows = |of_server: bool| {
            let port = |t: &Tuple| if of_server { t.remote.port() } else { t.local.port() };
            let (_, leg) = legs.iter().find(|(t, _)| port(t) == self.port).expect("a leg");
            Knows { timestamps: leg.flags & LegFlags::TS != 0, sack: leg.flags & LegFlags::SACK != 0 }
        };
        Pair::new(knows(false), knows(true))
    }
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_server_is_offered_what_its_client_knows(family: Family) {
    let mut scene = Scene::new(family);
    for client in [NO_TIMESTAMPS, NO_SACK, NOTHING] {
        let during = |scene: &Scene, begin: Begin| {
            scene.f.wait_state(FlowState::Spliced);
            assert_eq!(scene.agreed(), Pair::both(client), "{family:?}");
            begin.send(()).expect("the client waits");
        };
        let why = scene.converse_between((client, ALL), Kind::Plug, at_once(), during);
        assert_eq!(why, None, "{client:?} {family:?}");
    }
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_flow_whose_server_knows_less_than_its_client_is_copied(family: Family) {
    let mut scene = Scene::new(family);
    for server in [NO_TIMESTAMPS, NO_SACK, NOTHING] {
        let during = |_: &Scene, begin: Begin| begin.send(()).expect("the client waits");
        let why = scene.converse_between((ALL, server), Kind::Plug, at_once(), during);
        assert_eq!(why, Some(Refusal::Options), "{server:?} {family:?}");
    }
}

/// Hosts that shake hands with each other agree on the same on both legs.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn hosts_that_agree_with_each_other_are_spliced(family: Family) {
    let mut scene = Scene::new(family);
    for kind in [Kind::EndToEnd, Kind::Transparent] {
        for hosts in [(ALL, NOTHING), (NOTHING, ALL), (ALL, ALL)] {
            let during = |scene: &Scene, begin: Begin| {
                scene.f.wait_state(FlowState::Spliced);
                begin.send(()).expect("the client waits");
            };
            let why = scene.converse_between(hosts, kind, at_once(), during);
            assert_eq!(why, None, "{hosts:?} {kind:?} {family:?}");
        }
    }
}

/// What is sent at a switch is as complete as anything else.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn switched_again_and_again(family: Family) {
    let mut scene = Scene::new(family);
    for client in [ALL, NOTHING] {
        let during = |Scene { f, .. }: &Scene, begin: Begin| {
            f.wait_state(FlowState::Copying);
            begin.send(()).expect("the client waits");
            for _ in 0..5 {
                f.command(Command::Splice);
                f.wait_state(FlowState::Spliced);
                f.command(Command::Unsplice);
                f.wait_state(FlowState::Copying);
            }
        };
        let why = scene.converse_between((client, ALL), Kind::Plug, by_hand(), during);
        assert_eq!(why, None, "{client:?} {family:?}");
    }
}
