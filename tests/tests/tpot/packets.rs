//! Single packets through the programs of translucent proxying: every header field, and what must be refused. The numbers in the
//! names are those of the requirements.

use longsplice_datapath::{
    Destinations, TPOT_EXID, TPOT_UDP_PORT, TestContext, TpotOptions, TpotUdp, TpotWhose, tpot_flush, tpot_known,
};
use longsplice_lab::{
    Family, Lab, Shape,
    topology::{CLIENT, FORWARDER_TO_CLIENT, SERVER},
};
use longsplice_tests::{
    TestTpot, families,
    packet::{ETHERNET, Icmp, Packet, check_header, flag, verify, verify_icmp},
};
use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

pub(crate) const PORT: u16 = 7000;
pub(crate) const NEXT: i32 = -1;
pub(crate) const DROP: i32 = 2;
const REDIRECT: i32 = 7;
/// MSS, SACK permitted, timestamps, window scale: as Linux sends them.
pub(crate) const USUAL: [u8; 20] = [2, 4, 5, 0xb4, 4, 2, 8, 10, 0, 0, 0, 9, 0, 0, 0, 0, 1, 3, 3, 7];
pub(crate) const SYN_ACK: u8 = flag::SYN | flag::ACK;

/// Bits of the option: the tunnel may be in UDP, and should be.
pub(crate) const CAN_UDP: u8 = 1;
pub(crate) const WANT_UDP: u8 = 2;

/// The option, with a number of hops.
pub(crate) fn option(hops: u8) -> Vec<u8> {
    let [high, low] = TPOT_EXID.to_be_bytes();
    vec![253, 8, high, low, 1, hops, 0, 0]
}

/// The option of a SYN that wants UDP, or not.
pub(crate) fn wants(udp: bool, hops: u8) -> Vec<u8> {
    capable(if udp { CAN_UDP | WANT_UDP } else { 0 }, hops)
}

/// The option of an answer in UDP, or not.
pub(crate) fn answers(udp: bool, hops: u8) -> Vec<u8> {
    capable(if udp { CAN_UDP } else { 0 }, hops)
}

/// The option with capabilities.
pub(crate) fn capable(bits: u8, hops: u8) -> Vec<u8> {
    let mut option = option(hops);
    option[7] = bits;
    option
}

/// The programs at a client, which asks for proxies in its own network.
pub(crate) struct Host {
    pub(crate) family: Family,
    pub(crate) tpot: TestTpot,
    pub(crate) client: SocketAddr,
    pub(crate) server: SocketAddr,
    pub(crate) proxy: IpAddr,
    pub(crate) lab: Lab,
    /// Whether its tunnels are in UDP.
    pub(crate) udp: bool,
}

impl Host {
    pub(crate) fn with(family: Family, options: &TpotOptions) -> Host {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        let tpot = lab.client.run(|| TestTpot::with(options));
        let server = SERVER.port(family, PORT);
        let proxy = FORWARDER_TO_CLIENT.ip(family);
        tpot.ask(&Destinations { net: server.ip(), prefix: 255, ports: PORT..=PORT }).expect("a rule");
        tpot.trust(&Destinations { net: proxy, prefix: 255, ports: 0..=0 }).expect("a rule");
        let udp = options.udp == TpotUdp::Always;
        Host { family, tpot, client: CLIENT.port(family, 4000), server, proxy, lab, udp }
    }

    pub(crate) fn run(&self, egress: bool, frame: &[u8]) -> (i32, u32, Vec<u8>) {
        let mut out = Vec::new();
        let context = TestContext::default();
        let (code, mark) = self.tpot.test_run(egress, frame, &context, &mut out).expect("a test run");
        (code, mark, out)
    }

    pub(crate) fn syn(&self) -> Packet {
        Packet { seq: 1000, flags: flag::SYN, options: USUAL.to_vec(), ..packet(self.client, self.server) }
    }

    /// The answer to it, with the option.
    pub(crate) fn answer(&self) -> Packet {
        let options = [USUAL.to_vec(), answers(self.udp, 7)].concat();
        Packet { seq: 5000, ack: 1001, flags: SYN_ACK, options, ..packet(self.server, self.client) }
    }

    fn client_says(&self) -> Packet {
        Packet { seq: 1001, ack: 5001, payload: vec![7; 100], ..packet(self.client, self.server) }
    }

    fn server_says(&self) -> Packet {
        Packet { seq: 5001, ack: 1001, payload: vec![8; 100], ..packet(self.server, self.client) }
    }

    /// Puts a packet into the tunnel from one address to another.
    pub(crate) fn tunnelled(&self, p: &Packet, from: IpAddr, to: IpAddr) -> Vec<u8> {
        wrap_in(self.udp, &p.frame(), from, to, p.tos)
    }

    pub(crate) fn ask(&self) {
        assert_eq!(self.run(true, &self.syn().frame()).0, NEXT);
    }

    fn open(&self) {
        self.ask();
        let (code, _, out) = self.run(false, &self.tunnelled(&self.answer(), self.proxy, self.client.ip()));
        assert_eq!((code, verify(&out)), (NEXT, Ok(self.answer())), "the socket gets the inner packet");
        assert_eq!(self.tpot.verdict("opened"), 1);
    }

    /// The socket has taken the proxy's answer.
    fn choose(&self) {
        assert_eq!(self.run(true, &self.client_says().frame()).0, REDIRECT);
    }
}

/// An ordinary segment, without the fields that IPv6 does not have.
pub(crate) fn packet(from: SocketAddr, to: SocketAddr) -> Packet {
    let p = Packet::new(from, to);
    if from.is_ipv4() { p } else { Packet { id: 0, fragment: 0, ..p } }
}

/// Puts an outer header in front of a frame's IP packet.
pub(crate) fn wrap(frame: &[u8], from: IpAddr, to: IpAddr, tos: u8) -> Vec<u8> {
    wrap_in(false, frame, from, to, tos)
}

/// The same, in UDP or not.
pub(crate) fn wrap_in(udp: bool, frame: &[u8], from: IpAddr, to: IpAddr, tos: u8) -> Vec<u8> {
    let header = [50_000, TPOT_UDP_PORT, (8 + frame.len() - ETHERNET) as u16, 0].map(u16::to_be_bytes);
    let inner = [if udp { header.as_flattened() } else { &[] }, &frame[ETHERNET..]].concat();
    let protocol = |v4: u8| if udp { 17 } else { v4 };
    let mut outer = frame[..ETHERNET].to_vec();
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            outer.extend([0x45, tos]);
            outer.extend((20 + inner.len() as u16).to_be_bytes());
            outer.extend([0, 1, 0x40, 0, 64, protocol(4), 0, 0]);
            outer.extend(from.octets());
            outer.extend(to.octets());
            check_header(&mut outer);
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            outer.extend((6 << 28 | u32::from(tos) << 20).to_be_bytes());
            outer.extend((inner.len() as u16).to_be_bytes());
            outer.extend([protocol(41), 64]);
            outer.extend(from.octets());
            outer.extend(to.octets());
        }
        _ => panic!("one family"),
    }
    outer.extend(inner);
    outer
}

/// The source port of a frame's tunnel, if it is one in UDP.
pub(crate) fn udp_source(family: Family, frame: &[u8]) -> Option<u16> {
    let ip = &frame[ETHERNET..];
    let (protocol, at) = if family == Family::V4 { (9, 20) } else { (6, 40) };
    let port = |at| u16::from_be_bytes([ip[at], ip[at + 1]]);
    (ip.get(protocol) == Some(&17) && ip.len() > at + 8 && port(at + 2) == TPOT_UDP_PORT).then(|| port(at))
}

/// The outer addresses, DSCP and ECN, and the frame without the outer headers. Their lengths and checksum must be right.
pub(crate) fn unwrap(family: Family, frame: &[u8]) -> (IpAddr, IpAddr, u8, Vec<u8>) {
    let ip = &frame[ETHERNET..];
    let source = udp_source(family, frame);
    let inner = |n: usize| {
        let Some(source) = source else { return [&frame[..ETHERNET], &ip[n..]].concat() };
        let field = |at: usize| u16::from_be_bytes([ip[n + at], ip[n + at + 1]]);
        assert!(source >= 0xc000, "a dynamic port: {source}");
        assert_eq!((usize::from(field(4)), field(6)), (ip.len() - n, 0), "length, and no checksum");
        [&frame[..ETHERNET], &ip[n + 8..]].concat()
    };
    let protocol = |of_ip: u8| if source.is_some() { 17 } else { of_ip };
    match family {
        Family::V4 => {
            assert_eq!((ip[0], ip[8], ip[9]), (0x45, 64, protocol(4)), "{ip:?}");
            assert_eq!(usize::from(u16::from_be_bytes([ip[2], ip[3]])), ip.len());
            let mut again = frame.to_vec();
            check_header(&mut again);
            assert_eq!(again, frame, "the sum of the outer header");
            let at = |n: usize| IpAddr::from(<[u8; 4]>::try_from(&ip[n..n + 4]).expect("four"));
            (at(12), at(16), ip[1], inner(20))
        }
        Family::V6 => {
            assert_eq!((ip[0] >> 4, ip[6], ip[7]), (6, protocol(41), 64), "{ip:?}");
            assert_eq!(usize::from(u16::from_be_bytes([ip[4], ip[5]])), ip.len() - 40);
            let at = |n: usize| IpAddr::from(<[u8; 16]>::try_from(&ip[n..n + 16]).expect("sixteen"));
            (at(8), at(24), ip[0] << 4 | ip[1] >> 4, inner(40))
        }
    }
}

/// Runs a test with both families and both kinds of tunnels.
fn each(test: impl Fn(Host)) {
    for (family, udp) in families().into_iter().flat_map(|f| [(f, TpotUdp::Never), (f, TpotUdp::Always)]) {
        test(Host::with(family, &TpotOptions { udp, ..TpotOptions::default() }));
    }
}

#[test]
#[ignore = "root"]
fn a_syn_asks_and_nothing_else_changes() {
    each(|h| {
        let (code, _, out) = h.run(true, &h.syn().frame());
        let want = Packet { options: [USUAL.to_vec(), wants(h.udp, 8)].concat(), ..h.syn() };
        assert_eq!((code, verify(&out)), (NEXT, Ok(want)));
        let elsewhere = Packet { to: SocketAddr::new(h.server.ip(), PORT + 1), ..h.syn() };
        for p in [elsewhere, h.client_says(), Packet { flags: flag::RST, ..h.client_says() }] {
            assert_eq!(h.run(true, &p.frame()), (NEXT, 0, p.frame()), "{p:?}");
        }
    });
}

#[test]
#[ignore = "root"]
fn the_second_retransmission_does_not_ask() {
    each(|h| {
        for _ in 0..2 {
            assert_eq!(verify(&h.run(true, &h.syn().frame()).2).expect("sums").options.len(), 28);
        }
        assert_eq!(h.run(true, &h.syn().frame()), (NEXT, 0, h.syn().frame()));
        assert_eq!([h.tpot.verdict("asked"), h.tpot.verdict("not-asked")], [2, 1]);
        // the port's next connection asks again, unless only the SYN without the option is answered
        let next = |seq| Packet { seq, ..h.syn() };
        assert_eq!(verify(&h.run(true, &next(77).frame()).2).expect("sums").options.len(), 28);
        let direct = |seq: u32| Packet { ack: seq + 1, options: USUAL.to_vec(), ..h.answer() };
        h.run(false, &direct(77).frame());
        assert_eq!(verify(&h.run(true, &next(78).frame()).2).expect("sums").options.len(), 28);
        for _ in 0..2 {
            h.run(true, &next(78).frame());
        }
        h.run(false, &direct(78).frame());
        assert_eq!(h.run(true, &next(79).frame()), (NEXT, 0, next(79).frame()));
        assert_eq!(h.tpot.verdict("avoided"), 1);
        let flushed = h.lab.client.run(|| tpot_flush().expect("a table"));
        assert_eq!(flushed, 1);
        assert_eq!(verify(&h.run(true, &next(79).frame()).2).expect("sums").options.len(), 28);
    });
}

/// A destination that only answers without the option is avoided for ten seconds, and twice as long each time, up to an hour. One
/// answer to a SYN that asks ends that.
#[test]
#[ignore = "root"]
fn one_bad_moment_is_no_property_of_the_path() {
    each(|h| {
        let known = || h.lab.client.run(|| tpot_known().expect("a table"));
        let lasts = || known().iter().map(|known| known.lasts.as_secs()).collect::<Vec<_>>();
        let next = |seq| Packet { seq, ..h.syn() };
        let asks = |seq| verify(&h.run(true, &next(seq).frame()).2).expect("sums").options.len() == 28;
        let direct = |seq: u32| Packet { ack: seq + 1, options: USUAL.to_vec(), ..h.answer() };
        let fails = |seq| {
            assert!(asks(seq) && asks(seq) && !asks(seq));
            h.run(false, &direct(seq).frame());
            assert!(!asks(seq + 1), "it is avoided");
        };
        let mut seq = 77;
        for seconds in [10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600] {
            // a second connection has begun before the first one has failed
            let other = Packet { from: SocketAddr::new(h.client.ip(), 4001), ..next(seq) };
            (0..3).for_each(|_| drop(h.run(true, &other.frame())));
            fails(seq);
            h.run(false, &Packet { to: other.from, ..direct(seq) }.frame());
            assert_eq!(lasts(), [seconds]);
            h.tpot.age(Duration::from_secs(seconds)).expect("a table");
            assert_eq!(lasts(), [0; 0]);
            seq += 10;
        }
        // the answer of the server, to a SYN that asks
        assert!(asks(seq));
        h.run(false, &direct(seq).frame());
        seq += 10;
        fails(seq);
        assert_eq!(lasts(), [10]);
        h.tpot.age(Duration::from_secs(10)).expect("a table");
        // the answer of a proxy
        let from = SocketAddr::new(h.client.ip(), 4002);
        h.run(true, &Packet { from, ..h.syn() }.frame());
        let answer = Packet { to: from, ..h.answer() };
        h.run(false, &h.tunnelled(&answer, h.proxy, h.client.ip()));
        assert_eq!(h.tpot.verdict("opened"), 1);
        seq += 10;
        fails(seq);
        assert_eq!(lasts(), [10]);
        // and what is long past does not count
        h.tpot.age(Duration::from_secs(3611)).expect("a table");
        fails(seq + 10);
        assert_eq!(lasts(), [10]);
    });
}

/// Forged FINs, RSTs and SYNs at a host or a proxy that has asked, and whose connection has no socket: it may be spliced.
#[test]
#[ignore = "root"]
fn forged_ends_at_the_asker() {
    each(|h| {
        h.open();
        let (us, syn) = (h.client.ip(), Packet { seq: 9, flags: flag::SYN, options: USUAL.to_vec(), ..h.answer() });
        let fin = |p: Packet| Packet { flags: flag::FIN | flag::ACK, ..p };
        let is_there = |why: &str| {
            assert_eq!(h.run(false, &syn.frame()).0, REDIRECT, "{why}: the SYN is refused");
            assert_eq!(h.run(true, &h.client_says().frame()).0, REDIRECT, "{why}: the tunnel is still there");
        };
        h.run(true, &fin(h.client_says()).frame());
        is_there("our FIN");
        h.run(false, &h.tunnelled(&fin(Packet { seq: 70_000, ack: 7, ..h.server_says() }), h.proxy, us));
        is_there("a forged FIN");
        h.run(false, &h.tunnelled(&Packet { seq: 70_000, flags: flag::RST, ..h.server_says() }, h.proxy, us));
        is_there("a forged RST");
        let end = fin(Packet { ack: 1102, ..h.server_says() });
        h.run(false, &h.tunnelled(&end, h.proxy, us));
        is_there("the FIN, which nobody has acknowledged");
        h.run(true, &Packet { seq: 1102, ack: 5102, payload: Vec::new(), ..h.client_says() }.frame());
        assert_eq!(h.run(false, &syn.frame()), (NEXT, 0, syn.frame()), "both are acknowledged");
        assert_eq!(h.run(true, &h.client_says().frame()).0, NEXT, "the tunnel is gone");
    });
}

#[test]
#[ignore = "root"]
fn a_syn_without_space_or_with_data_does_not_ask() {
    each(|h| {
        let full = Packet { options: [USUAL.to_vec(), vec![1; 16]].concat(), ..h.syn() };
        let data = Packet { seq: 9, payload: vec![1; 10], ..h.syn() };
        for p in [full, data] {
            assert_eq!(h.run(true, &p.frame()), (NEXT, 0, p.frame()), "{p:?}");
        }
        assert_eq!(h.tpot.verdict("no-space"), 2);
    });
}

#[test]
#[ignore = "root"]
fn packets_in_the_tunnel_have_the_headers_of_rfc_2003() {
    each(|h| {
        h.open();
        for tos in [0, 0x2a, 3] {
            let p = Packet { tos, ..h.client_says() };
            let (code, _, out) = h.run(true, &p.frame());
            let (from, to, outer, inner) = unwrap(h.family, &out);
            assert_eq!((code, from, to, outer), (REDIRECT, h.client.ip(), h.proxy, tos));
            assert_eq!(verify(&inner), Ok(p), "the inner packet is as it was");
        }
        let p = h.server_says();
        let (code, mark, out) = h.run(false, &h.tunnelled(&p, h.proxy, h.client.ip()));
        assert_eq!((code, mark, verify(&out)), (NEXT, 0, Ok(p)));
    });
}

#[test]
#[ignore = "root"]
fn a_mark_on_the_tunnel_reaches_the_packet_or_drops_it() {
    each(|h| {
        h.open();
        for (inner, want) in [(2, Some(3)), (1, Some(3)), (3, Some(3)), (0, None)] {
            let p = Packet { tos: inner, ..h.server_says() };
            let (code, _, out) = h.run(false, &wrap(&p.frame(), h.proxy, h.client.ip(), 3));
            match want {
                Some(tos) => assert_eq!((code, verify(&out).expect("sums").tos), (NEXT, tos)),
                None => assert_eq!((code, h.tpot.verdict("ce-dropped")), (DROP, 1)),
            }
        }
    });
}

/// Nobody else can answer, or send packets of the connection.
#[test]
#[ignore = "root"]
fn forged_answers_and_packets_are_refused() {
    each(|h| {
        let (us, stranger) = (h.client.ip(), SERVER.ip(h.family));
        let before = [h.tunnelled(&h.answer(), h.proxy, us), h.tunnelled(&h.server_says(), h.proxy, us)];
        for frame in before {
            assert_eq!(h.run(false, &frame), (NEXT, 0, frame.clone()), "nobody has asked");
        }
        h.ask();
        let (code, ..) = h.run(false, &h.tunnelled(&h.answer(), stranger, us));
        assert_eq!((code, h.tpot.verdict("untrusted")), (DROP, 1));
        let versions = |at: usize, value: u8| {
            let mut options = h.answer().options;
            options[20 + at] = value;
            Packet { options, ..h.answer() }
        };
        let wrong = [
            Packet { ack: 1002, ..h.answer() },
            Packet { options: USUAL.to_vec(), ..h.answer() },
            versions(4, 2), // version
            versions(3, 0), // identifier
            Packet { flags: flag::SYN, ..h.answer() },
        ];
        for p in wrong {
            let frame = h.tunnelled(&p, h.proxy, us);
            assert_eq!(h.run(false, &frame), (NEXT, 0, frame.clone()), "{p:?}");
        }
        assert_eq!(h.tpot.verdict("opened"), 0);
        h.open();
        let syn = Packet { flags: flag::SYN, ..h.server_says() };
        let others = [
            h.tunnelled(&h.server_says(), stranger, us),
            h.tunnelled(&h.server_says(), h.proxy, stranger),
            h.tunnelled(&syn, h.proxy, us),
            h.tunnelled(&Packet { from: SocketAddr::new(stranger, 1), ..h.server_says() }, h.proxy, us),
        ];
        for frame in others {
            assert_eq!(h.run(false, &frame), (NEXT, 0, frame.clone()), "the stack has no protocol for it");
        }
        assert_eq!(h.run(false, &h.server_says().frame()).0, DROP, "outside of the tunnel");
        assert_eq!(h.run(false, &Packet { flags: flag::RST, ..h.server_says() }.frame()).0, DROP, "a blind reset");
    });
}

/// Checks an answer on the way that the SYN-ACK came.
fn is_reset(h: &Host, frame: &[u8]) {
    let p = verify(frame).expect("sums");
    assert_eq!((p.from, p.to, p.seq, p.ack), (h.client, h.server, 1001, 5001), "{p:?}");
    assert_eq!((p.flags, p.window, p.options.len(), p.payload.len()), (flag::RST | flag::ACK, 0, 0, 0), "{p:?}");
    assert_eq!((p.dmac, p.smac), ([2, 0, 0, 0, 0, 2], [0; 6]), "back to the sender");
}

#[test]
#[ignore = "root"]
fn the_server_answers_after_the_proxy() {
    each(|h| {
        h.open();
        h.choose();
        let late = Packet { options: USUAL.to_vec(), ..h.answer() };
        let (code, mark, out) = h.run(false, &late.frame());
        assert_eq!((code, h.tpot.verdict("second-answer")), (REDIRECT, 1));
        is_reset(&h, &out);
        assert_ne!(mark, 0, "it must not enter the tunnel");
        let mut sent = Vec::new();
        let context = TestContext { mark, ..TestContext::default() };
        assert_eq!(h.tpot.test_run(true, &out, &context, &mut sent).expect("a test run"), (NEXT, 0));
        assert_eq!(sent, out);
    });
}

#[test]
#[ignore = "root"]
fn the_proxy_answers_after_the_server_or_another_proxy() {
    each(|h| {
        h.ask();
        let direct = Packet { options: USUAL.to_vec(), ..h.answer() };
        assert_eq!(h.run(false, &direct.frame()).0, NEXT);
        let late = h.tunnelled(&h.answer(), h.proxy, h.client.ip());
        let (code, _, out) = h.run(false, &late);
        assert_eq!((code, h.tpot.verdict("second-answer"), h.tpot.verdict("opened")), (REDIRECT, 1, 0));
        let (from, to, _, inner) = unwrap(h.family, &out);
        assert_eq!((from, to), (h.client.ip(), h.proxy));
        is_reset(&h, &inner);
        // the connection with the server is not in a tunnel
        assert_eq!(h.run(true, &h.client_says().frame()), (NEXT, 0, h.client_says().frame()));
    });
    each(|h| {
        h.open();
        let (code, _, out) = h.run(false, &h.tunnelled(&h.answer(), SERVER.ip(h.family), h.client.ip()));
        let (from, to, _, inner) = unwrap(h.family, &out);
        assert_eq!((code, from, to), (REDIRECT, h.client.ip(), SERVER.ip(h.family)));
        is_reset(&h, &inner);
    });
}

/// Both answers are on their way to the socket, and the SYN was sent again meanwhile. The socket's first segment says which one it
/// has taken.
#[test]
#[ignore = "root"]
fn proxy_and_server_answer_at_once() {
    let servers = |h: &Host| Packet { seq: 4_000_000_000, options: USUAL.to_vec(), ..h.answer() };
    let ways: [fn(&Host); 2] = [|_| {}, |h| h.ask()];
    for (again, takes_server) in ways.into_iter().flat_map(|again| [(again, false), (again, true)]) {
        each(|h| {
            h.open();
            again(&h);
            let other = servers(&h).frame();
            assert_eq!(h.run(false, &other), (NEXT, 0, other.clone()));
            again(&h);
            let ours = Packet { ack: if takes_server { 4_000_000_051 } else { 5051 }, ..h.client_says() };
            let (code, _, out) = h.run(true, &ours.frame());
            let proxys = h.tunnelled(&h.answer(), h.proxy, h.client.ip());
            if takes_server {
                assert_eq!((code, out), (NEXT, ours.frame()), "outside of any tunnel");
                let (code, _, out) = h.run(false, &proxys);
                assert_eq!((code, h.tpot.verdict("second-answer")), (REDIRECT, 1));
                is_reset(&h, &unwrap(h.family, &out).3);
            } else {
                assert_eq!(code, REDIRECT);
                assert_eq!(unwrap(h.family, &out).1, h.proxy);
                assert_eq!(
                    (h.run(false, &proxys).0, h.tpot.verdict("second-answer")),
                    (NEXT, 0),
                    "it has not got the ACK"
                );
                assert_eq!((h.run(false, &other).0, h.tpot.verdict("second-answer")), (REDIRECT, 1));
            }
        });
    }
}

/// The server opens the same connection from its side: what the client gets first counts.
#[test]
#[ignore = "root"]
fn the_server_sends_a_syn() {
    let syn = |h: &Host| Packet { seq: 70, flags: flag::SYN, options: USUAL.to_vec(), ..packet(h.server, h.client) };
    each(|h| {
        h.open();
        let (code, mark, out) = h.run(false, &syn(&h).frame());
        let reset = verify(&out).expect("sums");
        assert_eq!((code, reset.from, reset.to), (REDIRECT, h.client, h.server));
        assert_eq!((reset.flags, reset.seq, reset.ack), (flag::RST | flag::ACK, 0, 71));
        assert_ne!(mark, 0, "it must not enter the tunnel");
    });
    each(|h| {
        h.ask();
        assert_eq!(h.run(false, &syn(&h).frame()), (NEXT, 0, syn(&h).frame()));
        // the socket has taken it: anybody may have sent it, and the socket may have ignored it
        let taken = Packet { ack: 71, flags: SYN_ACK, options: USUAL.to_vec(), ..h.syn() };
        assert_eq!(h.run(true, &taken.frame()), (NEXT, 0, taken.frame()));
        let (code, ..) = h.run(false, &h.tunnelled(&h.answer(), h.proxy, h.client.ip()));
        assert_eq!((code, h.tpot.verdict("second-answer"), h.tpot.verdict("opened")), (REDIRECT, 1, 0));
    });
    each(|h| {
        h.ask();
        h.run(false, &syn(&h).frame());
        let (code, ..) = h.run(false, &h.tunnelled(&h.answer(), h.proxy, h.client.ip()));
        assert_eq!((code, h.tpot.verdict("second-answer"), h.tpot.verdict("opened")), (NEXT, 0, 1));
    });
}

/// A proxy refuses the connection on behalf of the server.
#[test]
#[ignore = "root"]
fn a_tunnelled_reset_refuses_the_connection() {
    each(|h| {
        h.ask();
        let refusal = Packet { flags: flag::RST | flag::ACK, seq: 0, options: Vec::new(), ..h.answer() };
        let (code, _, out) = h.run(false, &h.tunnelled(&refusal, h.proxy, h.client.ip()));
        assert_eq!((code, verify(&out)), (NEXT, Ok(refusal)));
        assert_eq!(h.tpot.verdict("opened"), 0);
    });
}

/// A router reports that a tunnelled packet was too big: the connection hears of it, with what the tunnel leaves.
#[test]
#[ignore = "root"]
fn too_big_reports_concern_the_connection() {
    each(|h| {
        h.open();
        let (inner, kind, code) = match h.family {
            Family::V4 => (20, 3, 4),
            Family::V6 => (40, 2, 0),
        };
        let header = inner + if h.udp { 8 } else { 0 };
        let sent = h.tunnelled(&h.client_says(), h.client.ip(), h.proxy);
        let report = |quote: &[u8], mtu| Icmp {
            dmac: [0; 6],
            smac: [2, 0, 0, 0, 0, 2],
            from: FORWARDER_TO_CLIENT.ip(h.family),
            to: h.client.ip(),
            kind,
            code,
            mtu,
            quote: quote.to_vec(),
        };
        for shown in [sent.len(), ETHERNET + header + inner + 20] {
            let icmp = report(&sent[ETHERNET..shown], 1400);
            let (code, _, out) = h.run(false, &icmp.frame());
            let got = verify_icmp(&out).expect("lengths and sums");
            assert_eq!((code, got.mtu, got.from, got.to), (NEXT, 1400 - header as u32, icmp.from, icmp.to));
            assert_eq!(got.quote, h.client_says().frame()[ETHERNET..][..inner + 20]);
        }
        assert_eq!(h.tpot.verdict("too-big"), 2);
        // about others' packets, or too little of one, or from somebody who makes the path very narrow
        let other = h.tunnelled(&h.client_says(), h.client.ip(), SERVER.ip(h.family));
        let short = &sent[ETHERNET..ETHERNET + header + inner + 8];
        for icmp in [report(&other[ETHERNET..], 1400), report(short, 1400), report(&sent[ETHERNET..], 100)] {
            assert_eq!(h.run(false, &icmp.frame()), (NEXT, 0, icmp.frame()));
        }
    });
}

/// The host has rebooted, and its port still has a connection at the proxy: the socket hears of that, and resets it.
#[test]
#[ignore = "root"]
fn the_proxy_has_an_earlier_connection_of_the_port() {
    each(|h| {
        h.ask();
        let challenge = Packet { seq: 70_000, ack: 80_000, ..h.server_says() };
        let (code, _, out) = h.run(false, &h.tunnelled(&challenge, h.proxy, h.client.ip()));
        assert_eq!((code, verify(&out)), (NEXT, Ok(challenge.clone())));
        assert_eq!(h.tpot.verdict("opened"), 0);
        let (code, ..) = h.run(false, &h.tunnelled(&challenge, SERVER.ip(h.family), h.client.ip()));
        assert_eq!((code, h.tpot.verdict("untrusted")), (DROP, 1));
    });
}

/// The proxy has rebooted: it resets the connections that are still sent to it, and nothing else.
#[test]
#[ignore = "root"]
fn the_proxy_has_forgotten_the_connection() {
    each(|h| {
        // this machine as the proxy
        let (us, asker) = (h.client.ip(), SocketAddr::new(h.proxy, 4000));
        let socket = h.lab.client.run(|| std::net::TcpListener::bind(SocketAddr::new(us, 0)));
        let to = Destinations { net: h.server.ip(), prefix: 255, ports: PORT..=PORT };
        h.tpot.take(TpotWhose::Askers, &to, socket.expect("a listener")).expect("a rule");
        let data = Packet { seq: 7, ack: 9, payload: vec![1; 50], ..packet(asker, h.server) };
        let (code, _, out) = h.run(false, &h.tunnelled(&data, asker.ip(), us));
        assert_eq!((code, h.tpot.verdict("forgotten")), (REDIRECT, 1));
        let (from, to, _, inner) = unwrap(h.family, &out);
        let reset = verify(&inner).expect("sums");
        assert_eq!((from, to, reset.from, reset.to), (us, asker.ip(), h.server, asker));
        assert_eq!((reset.flags, reset.seq, reset.payload.len()), (flag::RST, 9, 0));
        let others = [
            h.tunnelled(&Packet { flags: flag::RST | flag::ACK, ..data.clone() }, asker.ip(), us),
            h.tunnelled(&Packet { flags: flag::SYN, ..data.clone() }, asker.ip(), us),
            h.tunnelled(&data, SERVER.ip(h.family), us),
            h.tunnelled(&data, asker.ip(), SERVER.ip(h.family)),
            h.tunnelled(&Packet { to: SocketAddr::new(h.server.ip(), 9), ..data }, asker.ip(), us),
        ];
        for frame in others {
            assert_eq!(h.run(false, &frame), (NEXT, 0, frame.clone()));
        }
    });
}

/// SYNs of other hosts without an option that can be read, wherever they go. No other packet counts.
#[test]
#[ignore = "root"]
fn a_syn_that_does_not_ask_is_counted() {
    each(|h| {
        let from = SocketAddr::new(h.proxy, 4000);
        let changed = |at: usize, value: u8| {
            let mut option = option(8);
            option[at] = value;
            [USUAL.to_vec(), option].concat()
        };
        let syn = |options| Packet { flags: flag::SYN, options, ..packet(from, h.server) };
        let bare = [syn(USUAL.to_vec()), Packet { to: SocketAddr::new(h.client.ip(), 9), ..syn(USUAL.to_vec()) }];
        let unread = [(0, 252), (1, 6), (3, 0), (4, 2)].map(|(at, value)| syn(changed(at, value)));
        let asks = syn([USUAL.to_vec(), option(8)].concat());
        let others = [SYN_ACK, flag::ACK, flag::RST].map(|flags| Packet { flags, ack: 1, ..syn(USUAL.to_vec()) });
        let count = |packets: &[Packet]| {
            packets.iter().for_each(|p| assert_eq!(h.run(false, &p.frame()), (NEXT, 0, p.frame()), "{p:?}"));
            h.tpot.verdict("unasked")
        };
        assert_eq!([count(&bare), count(&unread), count(&[asks]), count(&others)], [2, 6, 6, 6]);
        assert_eq!(h.tpot.verdict("left"), 1);
    });
}

/// A proxy does not intercept its own SYN, one for itself, or one with no hops left.
#[test]
#[ignore = "root"]
fn loops_end() {
    each(|h| {
        // this machine as the proxy
        let us = h.client.ip();
        let socket = h.lab.client.run(|| std::net::TcpListener::bind(SocketAddr::new(us, 0)));
        let everywhere = Destinations { net: us, prefix: 0, ports: 1..=u16::MAX };
        h.tpot.take(TpotWhose::Askers, &everywhere, socket.expect("a listener")).expect("a rule");
        let other = SocketAddr::new(h.proxy, 4000);
        let asks = |from, to, hops| {
            let options = [USUAL.to_vec(), option(hops)].concat();
            Packet { flags: flag::SYN, options, ..packet(from, to) }
        };
        for p in [asks(h.client, h.server, 8), asks(other, h.client, 8), asks(other, h.server, 0)] {
            assert_eq!(h.run(false, &p.frame()), (NEXT, 0, p.frame()), "{p:?}");
        }
        assert_eq!((h.tpot.verdict("left"), h.tpot.verdict("intercepted")), (3, 0));
    });
}
