//! A whole proxy, and a client whose packets are made by hand: what it intercepts, and what nobody can do to it.

use super::{
    PATIENCE, PORT,
    capture::{Capture, Seen},
    packets::{answers, option, packet, wants, wrap_in},
};
use longsplice_datapath::{Destinations, TpotOptions, TpotUdp, Tuple, tpot_tunnels};
use longsplice_engine::{Command, FlowState, Policy, TpotHandshake};
use longsplice_lab::{
    Family, Lab, Namespace, Options, Shape,
    process::wait_for,
    topology::{CLIENT, CLIENT_SECOND, FORWARDER_TO_CLIENT, FORWARDER_TO_SERVER, SERVER, SERVER_SECOND},
};
use longsplice_tests::{
    Forwarder, by_hand, families,
    forge::send_frame,
    packet::{ETHERNET, Packet, cut, flag},
};
use nix::sys::socket::{AddressFamily, LinkAddr, SockFlag, SockType, bind, socket};
use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsRawFd, OwnedFd},
};

pub(crate) const SYN_ACK: u8 = flag::SYN | flag::ACK;
pub(crate) const FIN_ACK: u8 = flag::FIN | flag::ACK;
/// Of the client's first segment.
pub(crate) const ISN: u32 = 1000;
pub(crate) const MSS: [u8; 4] = [2, 4, 5, 0xb4];

pub(crate) fn link(at: &Namespace, name: &str) -> LinkAddr {
    let find = || {
        let mut all = nix::ifaddrs::getifaddrs().expect("interfaces");
        all.find_map(|i| i.address?.as_link_addr().filter(|_| i.interface_name == name).copied())
    };
    at.run(find).unwrap_or_else(|| panic!("{name} is an interface"))
}

/// The client's stack hears nothing.
pub(crate) struct Hand {
    family: Family,
    /// Whether the client's tunnels are in UDP.
    pub(crate) udp: bool,
    pub(crate) f: Forwarder,
    pub(crate) capture: Capture,
    pub(crate) listener: TcpListener,
    wire: OwnedFd,
    macs: [[u8; 6]; 2],
    pub(crate) client: SocketAddr,
    pub(crate) server: SocketAddr,
    pub(crate) taker: IpAddr,
    pub(crate) lab: Lab,
}

/// A connection of such a client.
pub(crate) struct Open {
    /// Numbers of the client's next byte, and of the next one that it expects.
    pub(crate) seq: u32,
    pub(crate) ack: u32,
    pub(crate) accepted: TcpStream,
}

impl Hand {
    /// Intercepts connections to a port of the server.
    pub(crate) fn new(family: Family, policy: Policy, handshake: TpotHandshake) -> Hand {
        Hand::with(family, policy, handshake, TpotUdp::Never)
    }

    /// The same by a proxy with tunnels in UDP, if that is not [`TpotUdp::Never`]: the client has such tunnels then.
    pub(crate) fn with(family: Family, policy: Policy, handshake: TpotHandshake, udp: TpotUdp) -> Hand {
        let options = Options { forwarding: true, large_packets: false, ..Options::default() };
        let lab = Lab::new(Shape::TwoDevices, options).expect("lab");
        let deaf = "table inet t { chain c { type filter hook input priority 0; meta l4proto { tcp, udp, icmp, 4, 41 } drop; }; }";
        lab.client.execute("nft", &[deaf]).expect("a rule");
        let server = SERVER.port(family, PORT);
        let to = Destinations { net: server.ip(), prefix: 255, ports: PORT..=PORT };
        let f = Forwarder::taker_with(
            &lab.forwarder,
            to,
            policy,
            false,
            handshake,
            TpotOptions { udp, ..TpotOptions::default() },
        );
        let udp = udp != TpotUdp::Never;
        let mut capture = Capture::start(&lab.forwarder);
        capture.checked = true;
        let listener = lab.server.run(|| TcpListener::bind(server)).expect("listen");
        let (own, other) = (link(&lab.client, "c0"), link(&lab.forwarder, "f0"));
        let raw = || socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None);
        let wire = lab.client.run(raw).expect("socket");
        bind(wire.as_raw_fd(), &own).expect("bind");
        let macs = [other, own].map(|link| link.addr().expect("an Ethernet address"));
        let taker = FORWARDER_TO_CLIENT.ip(family);
        Hand { family, udp, f, capture, listener, wire, macs, client: CLIENT.port(family, 4000), server, taker, lab }
    }

    fn send(&self, mut frame: Vec<u8>) {
        frame[..12].copy_from_slice(&self.macs.concat());
        send_frame(&self.wire, &frame);
    }

    pub(crate) fn plain(&self, p: &Packet) {
        self.send(p.frame());
    }

    fn wrap(&self, frame: &[u8], from: IpAddr, to: IpAddr) -> Vec<u8> {
        wrap_in(self.udp, frame, from, to, 0)
    }

    /// Sends a packet in a tunnel of the client's.
    pub(crate) fn tunnelled(&self, p: &Packet) {
        self.send(self.wrap(&p.frame(), self.client.ip(), self.taker));
    }

    pub(crate) fn syn(&self) -> Packet {
        let options = [MSS.to_vec(), wants(self.udp, 8)].concat();
        Packet { seq: ISN, flags: flag::SYN, options, ..packet(self.client, self.server) }
    }

    /// A segment that follows the SYN.
    pub(crate) fn says(&self, seq: u32, ack: u32, payload: &[u8]) -> Packet {
        Packet { seq, ack, payload: payload.to_vec(), ..packet(self.client, self.server) }
    }

    /// Sends a SYN. Returns the number of the answer, whose headers are checked.
    pub(crate) fn ask(&mut self, syn: &Packet) -> u32 {
        // not one to an earlier SYN, sent again
        let (to, ack) = (self.client, syn.seq + 1);
        let answers_it = move |s: &Seen| s.is("f0", true) && s.has(SYN_ACK) && (s.p.to, s.p.ack) == (to, ack);
        let before = self.capture.count(answers_it);
        self.plain(syn);
        let answer = self.capture.wait_nth("an answer", before, answers_it);
        assert_eq!(answer.p.from, self.server, "{answer:?}");
        assert_eq!(answer.outer.map(|o| (o.0, o.1)), Some((self.taker, self.client.ip())), "{answer:?}");
        assert_eq!(answer.udp.is_some(), self.udp, "{answer:?}");
        assert!(answer.p.options.ends_with(&answers(self.udp, 7)), "{answer:?}");
        answer.p.seq
    }

    pub(crate) fn open(&mut self) -> Open {
        self.open_with(&self.syn())
    }

    pub(crate) fn open_with(&mut self, syn: &Packet) -> Open {
        let (iss, seq) = (self.ask(syn), syn.seq + 1);
        self.tunnelled(&self.says(seq, iss + 1, b""));
        let (accepted, _) = self.listener.accept().expect("accept");
        accepted.set_read_timeout(Some(PATIENCE)).expect("an option");
        let mut open = Open { seq, ack: iss + 1, accepted };
        self.works(&mut open);
        open
    }

    /// Sends data, in the tunnel or not, and gets an answer to it in the tunnel.
    pub(crate) fn exchange(&mut self, open: &mut Open, plain: bool) {
        let data = self.says(open.seq, open.ack, b"question");
        if plain {
            self.plain(&data)
        } else {
            self.tunnelled(&data)
        }
        let mut got = [0; 8];
        let read = open.accepted.read_exact(&mut got);
        read.unwrap_or_else(|e| panic!("{e}: {} {:?}", self.capture.last(), self.f.verdicts()));
        assert_eq!(&got, b"question", "and nothing else");
        open.seq += 8;
        open.accepted.write_all(b"answer").expect("sent");
        let (to, ack) = (self.client, open.ack);
        let answer = self
            .capture
            .wait("the answer", |s| s.is("f0", true) && s.p.to == to && s.p.seq == ack && !s.p.payload.is_empty());
        assert_eq!((&answer.p.payload[..], answer.p.ack), (&b"answer"[..], open.seq), "{answer:?}");
        assert_eq!(answer.outer.map(|o| (o.0, o.1)), Some((self.taker, self.client.ip())), "{answer:?}");
        assert_eq!(answer.udp.is_some(), self.udp, "{answer:?}");
        open.ack += 6;
        self.tunnelled(&self.says(open.seq, open.ack, b""));
    }

    pub(crate) fn works(&mut self, open: &mut Open) {
        self.exchange(open, false);
    }

    /// How many SYNs have gone to the server.
    pub(crate) fn onward(&mut self) -> usize {
        self.capture.count(|s| s.is("f1", true) && s.has(flag::SYN))
    }

    fn switch(&self, command: Command, state: FlowState) {
        self.f.command(command);
        self.f.wait_state(state);
    }

    /// A packet of another connection, which passes the proxy's device after all that was sent before it.
    pub(crate) fn fence(&mut self) {
        let other = SocketAddr::new(self.server.ip(), 9);
        let before = self.capture.count(|s| s.is("f1", true) && s.p.to == other);
        self.plain(&packet(self.client, other));
        self.capture.wait_nth("the fence", before, |s| s.is("f1", true) && s.p.to == other);
    }

    pub(crate) fn tunnels(&self) -> Vec<(Tuple, longsplice_datapath::TpotTunnel)> {
        self.lab.forwarder.run(tpot_tunnels).expect("a table")
    }
}

/// Runs a test with both families and both kinds of tunnels.
pub(crate) fn each(test: impl Fn(Hand)) {
    for (family, udp) in families().into_iter().flat_map(|f| [(f, TpotUdp::Never), (f, TpotUdp::Fallback)]) {
        test(Hand::with(family, by_hand(), TpotHandshake::Basic, udp));
    }
}

/// Each state of a connection, one after the other.
fn in_each_state(h: &mut Hand, open: &mut Open, test: impl Fn(&mut Hand, &mut Open)) {
    test(h, open);
    for (command, state) in [
        (Command::Splice, FlowState::Spliced),
        (Command::Release, FlowState::Released),
        (Command::Unsplice, FlowState::Copying),
    ] {
        h.switch(command, state);
        test(h, open);
    }
}

/// Everything but a SYN with the option, to the right port and address, is routed as without us.
#[test]
#[ignore = "root"]
fn only_chosen_syns_are_intercepted() {
    each(|mut h| {
        let asks = h.syn();
        let with = |options: Vec<u8>| Packet { options, ..asks.clone() };
        let [mut version, mut exid, mut length] = [(); 3].map(|()| [MSS.to_vec(), option(8)].concat());
        version[8] = 2;
        exid[6] ^= 1;
        length[5] = 12;
        length.extend([0; 4]);
        let others = [
            with(MSS.to_vec()),
            with(version),
            with(exid),
            with(length),
            with([MSS.to_vec(), option(0)].concat()),
            Packet { to: SocketAddr::new(h.server.ip(), PORT + 1), ..asks.clone() },
            Packet { to: SERVER_SECOND.port(h.family, PORT), ..asks.clone() },
            Packet { flags: SYN_ACK, ack: 1, ..asks.clone() },
            Packet { flags: flag::ACK, ack: 1, ..asks.clone() },
            h.says(7, 8, b"data"),
        ];
        for (n, p) in others.iter().enumerate() {
            let p = Packet { from: SocketAddr::new(h.client.ip(), 5000 + n as u16), ..p.clone() };
            h.plain(&p);
            let routed = h.capture.wait("it is routed", |s| s.is("f1", true) && s.p.from == p.from);
            let want = Packet { ttl: 63, dmac: routed.p.dmac, smac: routed.p.smac, ..p };
            assert_eq!((routed.outer, routed.p), (None, want));
        }
        // to the proxy itself
        let own = Packet { to: FORWARDER_TO_SERVER.port(h.family, PORT), ..asks };
        h.plain(&own);
        h.capture.wait("its stack refuses that", |s| s.is("f0", true) && s.p.from == own.to && s.outer.is_none());
        assert!(h.f.splicer.flows().is_empty());
        h.open();
        assert_eq!(h.f.splicer.flows().len(), 1);
    });
}

/// SYNs that are sent again since the answer was lost, and copies that have been on their way for long.
#[test]
#[ignore = "root"]
fn a_repeated_syn_makes_no_second_connection() {
    each(|mut h| {
        let iss = h.ask(&h.syn());
        assert_eq!([(); 2].map(|()| h.ask(&h.syn())), [iss; 2]);
        let mut open = h.open();
        let others = h.onward();
        in_each_state(&mut h, &mut open, |h, open| {
            h.plain(&h.syn());
            h.works(open);
        });
        assert_eq!(h.onward(), others);
        assert_eq!(h.f.splicer.flows().len(), 1);
    });
}

/// A host that does not use the tunnel, for example since it has not learnt of it.
#[test]
#[ignore = "root"]
fn packets_outside_of_the_tunnel_are_accepted() {
    each(|mut h| {
        let mut open = h.open();
        in_each_state(&mut h, &mut open, |h, open| {
            h.exchange(open, true);
            h.exchange(open, false);
        });
    });
}

/// Keep-alive probes, and FINs that are repeated in TIME-WAIT.
#[test]
#[ignore = "root"]
fn a_tunnel_lasts_longer_than_its_connection() {
    each(|mut h| {
        let Open { seq, ack, accepted } = h.open();
        let count = |h: &mut Hand| h.capture.count(|s| s.is("f0", true) && s.outer.is_some());
        let before = count(&mut h);
        h.tunnelled(&h.says(seq - 1, ack, b""));
        h.capture.wait_nth("the answer to a probe", before, |s| s.is("f0", true) && s.outer.is_some());
        // the proxy closes first, and is in TIME-WAIT
        drop(accepted);
        h.capture.wait("a FIN", |s| s.is("f0", true) && s.has(FIN_ACK) && s.outer.is_some());
        let fin = Packet { flags: FIN_ACK, ..h.says(seq, ack + 1, b"") };
        for n in 0..2 {
            h.tunnelled(&fin);
            let last = |s: &Seen| s.is("f0", true) && s.has(flag::ACK) && s.p.ack == seq + 1 && s.outer.is_some();
            h.capture.wait_nth("the last acknowledgement", n, last);
        }
        h.f.ended(1);
        let [(tuple, tunnel)] = h.tunnels()[..] else { panic!("{:?}", h.tunnels()) };
        assert_eq!((tuple.remote, tuple.local, tunnel.peer, tunnel.over), (h.client, h.server, h.client.ip(), true));
    });
}

/// Whoever knows everything but the sequence numbers, or who cannot send from the client's address, does not disturb a handshake.
#[test]
#[ignore = "root"]
fn forged_packets_in_a_handshake() {
    each(|mut h| {
        let iss = h.ask(&h.syn());
        let (right, stranger) = (h.says(ISN + 1, iss + 1, b""), CLIENT_SECOND.ip(h.family));
        let rst = |seq| Packet { flags: flag::RST, ack: 0, ..h.says(seq, 0, b"") };
        let wrong = Packet { ack: iss + 2, ..right.clone() };
        h.plain(&Packet { seq: 77, ..h.syn() });
        h.plain(&Packet { seq: 77, options: MSS.to_vec(), ..h.syn() });
        h.plain(&rst(77));
        h.tunnelled(&rst(77));
        h.tunnelled(&wrong);
        h.tunnelled(&Packet { flags: SYN_ACK, ..wrong.clone() });
        h.tunnelled(&h.syn());
        h.send(h.wrap(&right.frame(), stranger, h.taker));
        h.send(h.wrap(&right.frame(), h.client.ip(), FORWARDER_TO_SERVER.ip(h.family)));
        h.fence();
        // the SYN that does not ask is routed
        assert_eq!((h.onward(), h.tunnels().len(), h.f.splicer.flows().len()), (1, 0, 0));
        h.tunnelled(&right);
        let (accepted, _) = h.listener.accept().expect("accept");
        accepted.set_read_timeout(Some(PATIENCE)).expect("an option");
        h.works(&mut Open { seq: ISN + 1, ack: iss + 1, accepted });
        assert_eq!((h.onward(), h.tunnels().len()), (2, 1));
    });
}

/// The same of a connection that is open, whatever its state.
#[test]
#[ignore = "root"]
fn forged_packets_of_a_connection() {
    each(|mut h| {
        let mut open = h.open();
        let stranger = CLIENT_SECOND.ip(h.family);
        in_each_state(&mut h, &mut open, |h, open| {
            let evil = h.says(open.seq, open.ack, b"evil");
            h.send(h.wrap(&evil.frame(), stranger, h.taker));
            h.send(h.wrap(&evil.frame(), h.client.ip(), FORWARDER_TO_SERVER.ip(h.family)));
            for far in [1 << 30, 1 << 31, 3 << 30] {
                let rst = Packet { flags: flag::RST, ..h.says(open.seq.wrapping_add(far), 0, b"") };
                let fin = Packet { flags: FIN_ACK, ..h.says(open.seq.wrapping_add(far), open.ack, b"") };
                let syn = Packet { seq: open.seq.wrapping_add(far), ..h.syn() };
                for p in [rst, fin, syn] {
                    h.tunnelled(&p);
                    h.plain(&p);
                }
            }
            h.fence();
            h.works(open);
        });
        assert_eq!((h.onward(), h.tunnels().len()), (1, 1));
    });
}

/// Nothing in a tunnel is routed on: neither what belongs to no connection, nor other protocols, nor tunnels in tunnels.
#[test]
#[ignore = "root"]
fn nobody_sends_packets_through_a_proxy_in_the_name_of_others() {
    each(|mut h| {
        let mut open = h.open();
        let victim = SERVER_SECOND.ip(h.family);
        let data = h.says(open.seq, open.ack, b"evil");
        let from = |ip: IpAddr, port| Packet { from: SocketAddr::new(ip, port), ..data.clone() };
        let mut others = [
            from(CLIENT_SECOND.ip(h.family), 4000),
            from(h.client.ip(), 4001),
            from(FORWARDER_TO_SERVER.ip(h.family), 4000),
            Packet { to: SocketAddr::new(victim, PORT), ..data.clone() },
            Packet { to: SocketAddr::new(h.server.ip(), PORT + 1), ..data.clone() },
            Packet { from: h.server, to: h.client, ..data.clone() },
            h.syn(),
            Packet { to: SocketAddr::new(victim, PORT), ..h.syn() },
        ]
        .iter()
        .map(Packet::frame)
        .collect::<Vec<_>>();
        let protocol = |number: u8| {
            let mut frame = data.frame();
            frame[ETHERNET + if h.family == Family::V4 { 9 } else { 6 }] = number;
            if h.family == Family::V4 {
                longsplice_tests::packet::check_header(&mut frame);
            }
            frame
        };
        others.extend([17, 1, 58, 50].map(protocol));
        others.push(h.wrap(&data.frame(), h.client.ip(), h.taker)); // a tunnel in a tunnel
        others.push(h.wrap(&data.frame(), h.client.ip(), victim));
        others.extend(cut(&data.frame(), &[8], 7));
        for frame in others {
            h.send(h.wrap(&frame, h.client.ip(), h.taker));
        }
        let before = h.capture.count(|s| s.is("f1", true));
        h.fence();
        h.works(&mut open);
        let ours = h.f.splicer.flows().remove(0);
        let through = |s: &Seen| s.is("f1", true) && s.p.from.ip() == h.client.ip() && s.p.to.port() != 9;
        assert_eq!(h.capture.count(through), 0, "{:?}", ours);
        let strange: Vec<_> = h
            .capture
            .others
            .iter()
            .filter(|(device, out, f)| {
                // the kernel looks for neighbours (ICMPv6), and reports its multicast groups
                let of_kernel = f[12] == 0x86 && (f[ETHERNET + 6] == 58 || f[0] & 1 == 1);
                device == "f1" && *out && !of_kernel
            })
            .collect();
        assert!(strange.is_empty(), "{strange:?}");
        assert!(h.capture.count(|s| s.is("f1", true)) > before);
        assert_eq!(h.onward(), 1);
    });
}

/// Fragments of a tunnel are left to the stack, which has no tunnels: such a packet is lost, and the connection goes on.
#[test]
#[ignore = "root"]
fn fragments_of_a_tunnel_are_reassembled_or_refused() {
    each(|mut h| {
        let mut open = h.open();
        in_each_state(&mut h, &mut open, |h, open| {
            let data = h.says(open.seq, open.ack, &[7; 64]);
            for part in cut(&h.wrap(&data.frame(), h.client.ip(), h.taker), &[48], 9) {
                h.send(part);
            }
            h.fence();
            h.works(open);
        });
    });
}

/// Encrypted packets show no port and no option: they are routed.
#[test]
#[ignore = "root"]
fn ipsec_is_routed() {
    each(|mut h| {
        let mut frame = h.syn().frame();
        let at = if h.family == Family::V4 { (9, 8) } else { (6, 7) }; // protocol, TTL
        frame[ETHERNET + at.0] = 50;
        if h.family == Family::V4 {
            longsplice_tests::packet::check_header(&mut frame);
        }
        h.send(frame.clone());
        let is = |(device, out, f): &&(String, bool, Vec<u8>)| device == "f1" && *out && f[ETHERNET + at.0] == 50;
        let routed = wait_for(PATIENCE, || {
            h.capture.seen();
            h.capture.others.iter().find(is).map(|(_, _, f)| f.clone())
        });
        let mut routed = routed.expect("it is routed");
        assert_eq!(routed[ETHERNET + at.1], 63);
        routed[ETHERNET + at.1] = 64;
        if h.family == Family::V4 {
            longsplice_tests::packet::check_header(&mut routed);
        }
        assert_eq!(routed[ETHERNET..], frame[ETHERNET..]);
        assert!(h.f.splicer.flows().is_empty());
    });
}

/// Tunnelled packets of connections that do not exist: no table grows, and the connection that exists goes on.
#[test]
#[ignore = "root"]
fn a_flood_of_tunnelled_packets() {
    each(|mut h| {
        let mut open = h.open();
        h.switch(Command::Splice, FlowState::Spliced);
        for n in 0..50_000u32 {
            let from = SocketAddr::new(h.client.ip(), 5000 + (n % 60_000) as u16);
            let flags = [flag::ACK, flag::RST, SYN_ACK, flag::SYN][n as usize % 4];
            h.tunnelled(&Packet { from, flags, ..h.says(n, n, b"") });
        }
        h.works(&mut open);
        assert_eq!((h.tunnels().len(), h.f.splicer.flows().len(), h.onward()), (1, 1, 1));
        let kinds = [ErrorKind::WouldBlock];
        h.listener.set_nonblocking(true).expect("an option");
        assert!(h.listener.accept().is_err_and(|e| kinds.contains(&e.kind())));
    });
}
