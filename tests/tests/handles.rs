//! Handles of the public API are dropped while the data path forwards flows: the flows go on until the last handle of the
//! engine is gone, and then nothing is left.
use longsplice_datapath::default_pin;
use longsplice_engine::{
    Command, EndToEndListener, FlowInfo, FlowState, Leftovers, Leg, Listener, OpenOptions, Policy, Splicer,
};
use longsplice_lab::{
    Family, Lab, Shape,
    process::wait_for,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use longsplice_tests::at_once;
use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    time::Duration,
};
use test_case::test_case;
use tokio::{io::AsyncReadExt, runtime::Runtime};

const PATIENCE: Duration = Duration::from_secs(10);
const TEXT: &[u8] = b"more than one byte";

/// Both ends of a connection through the forwarder.
struct Ends {
    client: TcpStream,
    server: TcpStream,
}

impl Ends {
    fn exchange(&mut self, after: &str) {
        for (from, to) in [(&self.client, &self.server), (&self.server, &self.client)] {
            let mut heard = [0; TEXT.len()];
            { from }.write_all(TEXT).unwrap_or_else(|e| panic!("{after}: {e}"));
            { to }.read_exact(&mut heard).unwrap_or_else(|e| panic!("{after}: {e}"));
            assert_eq!(heard, TEXT, "{after}");
        }
    }
}

/// What a program has, within the forwarder's namespace.
struct Program<'a> {
    lab: &'a Lab,
    runtime: Runtime,
    server: SocketAddr,
    servers: TcpListener,
    splicer: Splicer,
    listener: Listener,
}

impl Program<'_> {
    fn start(lab: &Lab, family: Family) -> Program<'_> {
        let server = SERVER.port(family, 8000);
        let servers = lab.server.run(|| TcpListener::bind(server)).expect("listen");
        let runtime = Runtime::new().expect("runtime");
        let mut options = OpenOptions::default();
        options.datapath.max_flows = 4096;
        let splicer = Splicer::open(&options).expect("the data path opens: root, kernel 6.6, bpffs");
        let listener = runtime.block_on(splicer.listen(FORWARDER_TO_CLIENT.port(family, 7000))).expect("listen");
        Program { lab, runtime, server, servers, splicer, listener }
    }

    fn dial(&self, to: SocketAddr) -> TcpStream {
        let client = self.lab.client.run(|| TcpStream::connect(to)).expect("connected");
        client.set_read_timeout(Some(PATIENCE)).expect("time limit");
        client
    }

    fn accept_at_server(&self) -> TcpStream {
        let server = self.servers.accept().expect("accept").0;
        server.set_read_timeout(Some(PATIENCE)).expect("time limit");
        server
    }

    /// Opens both connections of a flow.
    fn open(&self) -> (Ends, Leg, Leg) {
        let client = self.dial(self.listener.local_addr().expect("bound"));
        let leg = self.runtime.block_on(self.listener.accept()).expect("accept");
        let to_server = self.runtime.block_on(self.splicer.connect(self.server, &leg)).expect("connect");
        (Ends { client, server: self.accept_at_server() }, leg, to_server)
    }

    /// Listens on another port for clients that shake hands with the server.
    fn end_to_end(&self, family: Family) -> (Listener, EndToEndListener) {
        let (_context, server) = (self.runtime.enter(), self.server);
        let at = FORWARDER_TO_CLIENT.port(family, 7001);
        let listener = self.runtime.block_on(self.splicer.listen(at)).expect("listen");
        let pairs = self.splicer.end_to_end(&listener, move |_| Some(server), |_, _, _| {}).expect("raw sockets");
        pairs.hold_first_data().expect("raw sockets");
        (listener, pairs)
    }

    fn wait_spliced(&self, flows: usize) {
        let spliced = || self.splicer.flows_after(0, usize::MAX, Some(FlowState::Spliced)).len() == flows;
        wait_for(PATIENCE, || spliced().then_some(())).unwrap_or_else(|| panic!("{:#?}", self.splicer.flows()));
    }
}

fn has_ended(mut client: TcpStream) -> bool {
    match client.read(&mut [0]) {
        Ok(0) => true,
        Err(e) => matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe),
        Ok(_) => false,
    }
}

/// Legs that join no flow are dropped: their hosts notice, and nobody else.
fn drop_legs(p: &Program, family: Family, go_on: &mut impl FnMut(&str)) {
    let (ends, leg, to_server) = p.open();
    drop(leg);
    assert!(has_ended(ends.client), "a leg was dropped");
    drop(to_server);
    assert!(has_ended(ends.server), "a leg was dropped");
    go_on("two legs");

    let (listener, mut pairs) = p.end_to_end(family);
    let at = listener.local_addr().expect("bound");
    let mut pair = || {
        let mut client = p.dial(at);
        let server = p.accept_at_server();
        client.write_all(TEXT).expect("written");
        let legs = p.runtime.block_on(pairs.accept()).expect("accept");
        (client, server, legs)
    };
    let (client, server, (mut leg, to_server)) = pair();
    let mut heard = [0; TEXT.len()];
    let read = async { tokio::time::timeout(PATIENCE, leg.read_exact(&mut heard)).await };
    p.runtime.block_on(read).expect("in time").expect("read");
    assert_eq!(heard, TEXT, "data that waits for a splice reaches a reader");
    drop((leg, to_server));
    assert!(has_ended(client) && has_ended(server));
    let (client, server, legs) = pair();
    drop(legs);
    assert!(has_ended(client) && has_ended(server), "their data still waited");
    go_on("legs of hosts that shook hands");
    drop(pairs);
    go_on("the listener of such handshakes");
    drop(listener);
    go_on("its listening socket");
}

fn until_the_last_handle(lab: &Lab, family: Family) {
    let pin = default_pin().expect("a namespace");
    let p = Program::start(lab, family);
    let policy: Arc<Policy> = Arc::new(at_once());
    let info = || FlowInfo::new("plug", "a server");
    let (mut first, leg, to_server) = p.open();
    let id = {
        let _context = p.runtime.enter();
        p.splicer.hand_over(leg, to_server, Leftovers::default(), policy.clone(), info(), |_, _| ())
    };
    let (mut second, leg, to_server) = p.open();
    let splicer = p.splicer.clone();
    let relay = async move { splicer.relay(leg, to_server, Leftovers::default(), policy, info()).await };
    let relay = p.runtime.spawn(relay);
    p.wait_spliced(2);
    let mut go_on = |dropped: &str| {
        [&mut first, &mut second].into_iter().for_each(|ends| ends.exchange(dropped));
        p.wait_spliced(2);
    };
    go_on("nothing");
    drop(p.splicer.clone());
    go_on("another handle");
    drop(p.splicer.subscribe());
    go_on("a subscription");
    relay.abort();
    p.runtime.block_on(relay).expect_err("the future of a flow is dropped");
    go_on("the future of a flow");
    drop_legs(&p, family, &mut go_on);

    let Program { runtime, splicer, listener, .. } = p;
    let at = listener.local_addr().expect("bound");
    drop(listener);
    [&mut first, &mut second].into_iter().for_each(|ends| ends.exchange("the listener"));
    let refused = lab.client.run(|| TcpStream::connect(at)).expect_err("nobody listens");
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    assert!(splicer.command(id, Command::Unsplice), "the last handle still has the flows");
    wait_for(PATIENCE, || splicer.flows().iter().any(|f| f.state == FlowState::Copying).then_some(())).expect("copied");
    [&mut first, &mut second].into_iter().for_each(|ends| ends.exchange("the splice"));
    assert!(pin.exists(), "{}", pin.display());
    drop(splicer);
    let ends = [first, second].map(|ends| [ends.client, ends.server]);
    assert!(ends.into_iter().flatten().all(has_ended), "all flows have ended");
    wait_for(PATIENCE, || (!pin.exists()).then_some(())).expect("nothing is left pinned");
    runtime.shutdown_timeout(Duration::from_secs(1));
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn forwarded_flows_go_on_until_the_last_handle_is_dropped(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    lab.forwarder.run(|| until_the_last_handle(&lab, family));
}
