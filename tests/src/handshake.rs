//! Connections whose hosts shake hands with each other, through a forwarder: [`Route`].

use crate::Forwarder;
use longsplice_engine::{EndReason, Ended};
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection,
    process::wait_for,
    topology::CLIENT,
    traffic::{Report, Script, connect, converse, intact, listen},
};
use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    thread::JoinHandle,
    time::Duration,
};

/// Longer than any retransmission takes.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Where connections lead.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// The address to which clients connect: the server's own, or that of a listening socket.
    pub to: SocketAddr,
    /// The address of the server.
    pub server: SocketAddr,
}

impl Route {
    fn family(&self) -> Family {
        if self.to.is_ipv4() { Family::V4 } else { Family::V6 }
    }

    /// Serves one connection at the server. Returns the client's apparent address and the report.
    pub fn serve(&self, lab: &Lab, script: &Script) -> JoinHandle<(SocketAddr, Report)> {
        let listener = lab.server.run(|| listen(self.server, script)).expect("listen");
        self.serve_from(listener, script)
    }

    fn serve_from(&self, listener: TcpListener, script: &Script) -> JoinHandle<(SocketAddr, Report)> {
        let script = script.clone();
        std::thread::spawn(move || {
            listener.set_nonblocking(true).expect("nonblocking");
            let (stream, from) =
                wait_for(PATIENCE, || listener.accept().ok()).expect("a connection comes to the server");
            stream.set_nonblocking(false).expect("blocking");
            (from, converse(stream, &script))
        })
    }

    /// Opens a connection of the client. Returns it with its local address.
    pub fn dial(&self, lab: &Lab, script: &Script) -> (TcpStream, SocketAddr) {
        let mut script = script.clone();
        script.local = Some(CLIENT.port(self.family(), 0));
        let c = lab.client.run(|| connect(self.to, &script)).expect("the client connects");
        let own = c.local_addr().expect("bound");
        (c, own)
    }

    /// Opens connections one by one. Of each, another segment of the handshake is lost: SYN, SYN-ACK and ACK, each before and
    /// after the forwarder. Both hosts send `bytes` as soon as they can. `check` gets the records of the flows. The lab must
    /// have no large packets.
    pub fn lose_handshake_segments(&self, lab: &Lab, f: &Forwarder, bytes: u64, check: impl Fn(&Ended, &str)) {
        let syn = [(LinkDirection::FromClient, 1), (LinkDirection::ToServer, 1)];
        let answer = [(LinkDirection::FromServer, 1), (LinkDirection::ToClient, 1)];
        let ack = [(LinkDirection::FromClient, 2), (LinkDirection::ToServer, 2)];
        for (n, (way, which)) in [syn, answer, ack].concat().into_iter().enumerate() {
            let name = format!("{:?}, {way:?} {which}", self.family());
            let impairment = lab.impair(way, Impair { drop_every: Some(which), ..Impair::default() }).expect("impair");
            let serving = self.serve(lab, &Script::answerer().bytes(bytes));
            let (to, script) = (self.to, Script::opener(1).bytes(bytes));
            let client = lab.client.spawn(move || connect(to, &script).map(|c| converse(c, &script)));
            let lost = wait_for(Duration::from_secs(5), || (impairment.counters().lost >= 1).then_some(()));
            impairment.change(Impair::default()).expect("change");
            lost.unwrap_or_else(|| panic!("a segment is lost: {name}: {:?}", impairment.counters()));
            let client = client.join().expect("client").expect("the client connects in the end");
            let legs = || f.splicer.datapath().map(|d| d.legs());
            let served = serving.join();
            let (_, server) = served.unwrap_or_else(|_| panic!("{name}: {client}, {:?}, {:?}", f.verdicts(), legs()));
            intact(&client, &server).unwrap_or_else(|e| panic!("{name}: {e}"));
            let ended = &f.ended(n + 1)[n];
            assert_eq!(ended.how, EndReason::Closed, "{name}");
            check(ended, &name);
        }
    }

    /// The client sends right behind the handshake, and the server as soon as it can. No byte is copied.
    pub fn splice_from_the_first_byte(&self, lab: &Lab, f: &Forwarder) {
        const BYTES: u64 = 100_000;
        const TIMES: usize = 20;
        let [script, answer] = [Script::opener(1), Script::answerer()].map(|script| script.bytes(BYTES));
        let listener = lab.server.run(|| listen(self.server, &answer)).expect("listen");
        for n in 0..TIMES {
            let serving = self.serve_from(listener.try_clone().expect("a descriptor"), &answer);
            let client = lab.client.run(|| connect(self.to, &script).map(|c| converse(c, &script))).expect("connected");
            let (_, server) = serving.join().expect("server");
            intact(&client, &server).unwrap_or_else(|e| panic!("{n}: {e}\n{:?}", f.verdicts()));
            spliced_whole(&f.ended(n + 1)[n], BYTES, &format!("{:?} {n}, {:?}", self.family(), f.verdicts()));
        }
        assert!(f.verdict("held") > 0, "some data came before the splice: {:?}", f.verdicts());
    }
}

/// Asserts that a flow has carried `bytes` in each direction, all of them spliced.
pub fn spliced_whole(ended: &Ended, bytes: u64, name: &str) {
    let [up, down] = [(ended.spliced_up, ended.bytes_up), (ended.spliced_down, ended.bytes_down)];
    assert_eq!((up, down, ended.splices), ((bytes, bytes), (bytes, bytes), 1), "{name}: {ended:?}");
}
