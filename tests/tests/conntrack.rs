//! Unsplicing behind a stateful firewall (nftables, `ct state`), which has not seen the forwarded segments.
use longsplice_engine::{Command, FlowState, OpenOptions, Policy, Trigger};
use longsplice_lab::{
    Family, Lab, Shape,
    process::wait_for,
    topology::{CLIENT, FORWARDER_TO_CLIENT, SERVER},
    traffic::{Chunks, Report, Script, Serving, connect, converse, intact, listen, serve},
};
use longsplice_tests::{Forwarder, at_once, families};
use socket2::SockRef;
use std::{
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread::JoinHandle,
    time::Duration,
};
use test_case::test_case;

const PORT: u16 = 7000;
const PATIENCE: Duration = Duration::from_secs(20);
/// Timeout of conntrack entries, in tests where they should expire.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The time for which parked sockets are assumed to be still known to conntrack, and a little more.
const PARKED: Duration = Duration::from_secs(6);
/// Bytes per second each way; and the bytes that pass before an unsplice: more than a window.
const PACE: u64 = 4_000_000;
const BEFORE: u64 = 10_000_000;

/// The usual rules of distributions, and stricter: a segment without SYN never starts a connection, whatever conntrack makes
/// of it. The NAT chains have no rules, but every new entry passes them.
const FIREWALL: &str = "
table inet nat {
    chain before { type nat hook prerouting priority dstnat; }
    chain behind { type nat hook postrouting priority srcnat; }
}
table inet filter {
    counter refused {}
    chain input {
        type filter hook input priority filter; policy accept;
        meta l4proto ipv6-icmp accept
        ct state invalid counter name refused drop
        ct state established,related ESTABLISHED accept
        tcp flags & (fin|syn|rst|ack) == syn tcp dport 7000 ct state new ct mark set 0x77 accept
        counter name refused drop
    }
    chain output {
        type filter hook output priority filter; policy accept;
        meta l4proto ipv6-icmp accept
        ct state invalid counter name refused drop
        ct state established,related ESTABLISHED accept
        tcp flags & (fin|syn|rst|ack) == syn tcp dport 7000 ct state new ct mark set 0x77 accept
        counter name refused drop
    }
}
";

fn nft(lab: &Lab, rules: &str) {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), rules).expect("written");
    lab.forwarder.execute("nft", &["-f", file.path().to_str().expect("UTF-8")]).expect("nft");
}

/// Loads the rules. `established`: a further condition for packets of established connections.
fn firewall(lab: &Lab, loose: bool, established: &str) {
    nft(lab, &FIREWALL.replace("ESTABLISHED", established));
    let loose = if loose { "1" } else { "0" };
    lab.forwarder.sysctl("net.netfilter.nf_conntrack_tcp_loose", loose).expect("sysctl");
}

fn let_expire(lab: &Lab) {
    let seconds = TIMEOUT.as_secs().to_string();
    lab.forwarder.sysctl("net.netfilter.nf_conntrack_tcp_timeout_established", &seconds).expect("sysctl");
}

/// Number of packets that the firewall has dropped.
fn refused(lab: &Lab) -> u64 {
    let counter = lab.forwarder.execute("nft", &["list", "counter", "inet", "filter", "refused"]).expect("nft");
    let packets = counter.split_whitespace().skip_while(|w| *w != "packets").nth(1).and_then(|n| n.parse().ok());
    packets.unwrap_or_else(|| panic!("{counter}"))
}

/// How a flow is forwarded before the unsplice.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Away {
    Released,
    ReleasedAndExpired,
    ParkedAndExpired,
}

const AWAY: [Away; 3] = [Away::Released, Away::ReleasedAndExpired, Away::ParkedAndExpired];

impl Away {
    /// Called before the first connection.
    fn prepare(self, lab: &Lab) {
        if self != Away::Released {
            let_expire(lab);
        }
    }

    /// Waits until the flow is spliced, and then until it has been forwarded for long enough.
    fn go(self, f: &Forwarder) {
        f.wait_state(FlowState::Spliced);
        if self != Away::ParkedAndExpired {
            f.command(Command::Release);
            f.wait_state(FlowState::Released);
        }
        std::thread::sleep(if self == Away::Released { Duration::ZERO } else { PARKED });
    }
}

/// Which addresses a connection uses.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Plug,
    EndToEnd,
    Transparent,
}

fn forwarder(lab: &Lab, family: Family, kind: Kind, policy: Policy) -> (Forwarder, SocketAddr) {
    let server = SERVER.port(family, PORT);
    match kind {
        Kind::Plug => {
            let proxy = FORWARDER_TO_CLIENT.port(family, PORT);
            (Forwarder::start(lab, proxy, server, policy), proxy)
        }
        Kind::EndToEnd => {
            let proxy = FORWARDER_TO_CLIENT.port(family, PORT);
            (Forwarder::plugged(lab, proxy, [server; 2], policy, OpenOptions::default()), proxy)
        }
        Kind::Transparent => {
            let any: SocketAddr = match family {
                Family::V4 => (Ipv4Addr::UNSPECIFIED, PORT).into(),
                Family::V6 => (Ipv6Addr::UNSPECIFIED, PORT).into(),
            };
            (Forwarder::transparent(lab, any, policy), server)
        }
    }
}

/// Traffic both ways, with pauses in which a released flow can be unspliced.
struct Talk {
    lab: Lab,
    f: Forwarder,
    client: JoinHandle<Report>,
    server: Serving,
}

impl Talk {
    fn begin(lab: Lab, family: Family, kind: Kind) -> Talk {
        let (f, to) = forwarder(&lab, family, kind, at_once());
        // forwarded for a while, and then in control mode for as long
        let script = |s: Script| s.bytes(16 * PACE).pace(PACE).chunks(Chunks::Fixed(50_000)).deadline(2 * PATIENCE);
        let answer = script(Script::answerer());
        let server = lab.server.run(|| serve(listen(SERVER.port(family, PORT), &answer).expect("listen"), 1, answer));
        let script = Script { local: Some(CLIENT.port(family, 0)), ..script(Script::opener(5)) };
        let client = lab.client.spawn(move || converse(connect(to, &script).expect("connect"), &script));
        Talk { lab, f, client, server }
    }

    fn passed(&self) -> u64 {
        self.f.splicer.flows().first().map_or(0, |f| f.bytes_up.min(f.bytes_down))
    }

    fn until_passed(&self, bytes: u64) {
        wait_for(PATIENCE, || (self.passed() >= bytes).then_some(()))
            .unwrap_or_else(|| panic!("{} of {bytes} bytes: {:?}", self.passed(), self.f.verdicts()));
    }

    /// Splices, forwards and unsplices once.
    fn round(&self, away: Away) {
        away.go(&self.f);
        self.until_passed(self.passed() + BEFORE);
        self.f.command(Command::Unsplice);
        self.f.wait_state(FlowState::Copying);
        self.until_passed(self.passed() + PACE);
    }

    fn end(self, what: &dyn std::fmt::Debug) {
        let (client, servers) = (self.client.join().expect("client"), self.server.join());
        intact(&client, &servers[0]).unwrap_or_else(|e| panic!("{what:?}: {e}\n{:?}", self.f.verdicts()));
        assert_eq!(refused(&self.lab), 0, "{what:?}: dropped by the firewall");
    }
}

fn come_back(kind: Kind, away: Away) {
    let one = |family, loose| {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        firewall(&lab, loose, "");
        away.prepare(&lab);
        let talk = Talk::begin(lab, family, kind);
        talk.round(away);
        talk.end(&(family, loose));
    };
    std::thread::scope(|s| {
        for family in families() {
            for loose in [false, true] {
                s.spawn(move || one(family, loose));
            }
        }
    });
}

#[test]
#[ignore = "root"]
fn released() {
    come_back(Kind::Plug, Away::Released);
}

#[test]
#[ignore = "root"]
fn released_for_longer_than_conntrack_remembers() {
    come_back(Kind::Plug, Away::ReleasedAndExpired);
}

#[test]
#[ignore = "root"]
fn parked_for_longer_than_conntrack_remembers() {
    come_back(Kind::Plug, Away::ParkedAndExpired);
}

#[test]
#[ignore = "root"]
fn transparent_and_released() {
    come_back(Kind::Transparent, Away::Released);
}

#[test]
#[ignore = "root"]
fn transparent_and_released_for_longer_than_conntrack_remembers() {
    come_back(Kind::Transparent, Away::ReleasedAndExpired);
}

#[test]
#[ignore = "root"]
fn transparent_and_parked_for_longer_than_conntrack_remembers() {
    come_back(Kind::Transparent, Away::ParkedAndExpired);
}

/// Conntrack sees neither the client's SYN nor the server's answer.
#[test]
#[ignore = "root"]
fn opened_end_to_end_and_released() {
    come_back(Kind::EndToEnd, Away::Released);
}

#[test]
#[ignore = "root"]
fn opened_end_to_end_and_parked_for_longer_than_conntrack_remembers() {
    come_back(Kind::EndToEnd, Away::ParkedAndExpired);
}

/// Marks of a conntrack entry are kept, over several unsplices.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn marks_stay(family: Family) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    firewall(&lab, false, "ct mark 0x77");
    let talk = Talk::begin(lab, family, Kind::Plug);
    for _ in 0..3 {
        talk.round(Away::Released);
        talk.f.command(Command::Splice);
    }
    talk.end(&family);
}

/// Both ends of a connection that sends nothing by itself.
struct Ends {
    lab: Lab,
    f: Forwarder,
    client: TcpStream,
    server: TcpStream,
}

impl Ends {
    fn begin(family: Family, kind: Kind, policy: Policy, prepare: impl FnOnce(&Lab)) -> Ends {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        firewall(&lab, false, "");
        prepare(&lab);
        let (f, to) = forwarder(&lab, family, kind, policy);
        let listener = lab.server.run(|| TcpListener::bind(SERVER.port(family, PORT))).expect("listen");
        let client = lab.client.run(|| TcpStream::connect(to)).expect("connect");
        listener.set_nonblocking(true).expect("nonblocking");
        let (server, _) = wait_for(PATIENCE, || listener.accept().ok()).expect("it comes to the server");
        server.set_nonblocking(false).expect("blocking");
        for s in [&client, &server] {
            s.set_read_timeout(Some(PATIENCE)).expect("a limit");
            s.set_write_timeout(Some(PATIENCE)).expect("a limit");
        }
        Ends { lab, f, client, server }
    }

    fn exchange(&self, text: &[u8]) {
        for (mut from, mut to) in [(&self.client, &self.server), (&self.server, &self.client)] {
            std::thread::scope(|s| {
                let writing = s.spawn(move || from.write_all(text));
                let mut heard = vec![0; text.len()];
                to.read_exact(&mut heard).unwrap_or_else(|e| panic!("{e}: {:?}", self.f.verdicts()));
                assert_eq!(heard, text);
                writing.join().expect("no panic").expect("write");
            });
        }
    }
}

/// A reset on a forwarded connection must pass, from either host.
#[test]
#[ignore = "root"]
fn resets_pass() {
    let one = |family, kind, away: Away| {
        let ends = Ends::begin(family, kind, at_once(), |lab| away.prepare(lab));
        ends.f.wait_state(FlowState::Spliced);
        ends.exchange(&[7; 1_000_000]);
        away.go(&ends.f);
        ends.f.command(Command::Reset);
        for mut s in [&ends.client, &ends.server] {
            let error = s.read(&mut [0]).expect_err("a reset");
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{family:?} {kind:?} {away:?}");
        }
        assert_eq!(refused(&ends.lab), 0, "{family:?} {kind:?} {away:?}");
    };
    std::thread::scope(|s| {
        for family in families() {
            for (kind, away) in [Kind::Plug, Kind::Transparent].into_iter().flat_map(|k| AWAY.map(|a| (k, a))) {
                s.spawn(move || one(family, kind, away));
            }
        }
    });
}

/// The data path itself ends forwarding, before anyone could inform
/// conntrack; segments dropped in the meantime are retransmitted.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn new_data_take_back_what_conntrack_has_forgotten(family: Family) {
    let policy = Policy { trigger: Some(Trigger::ClientData), ..at_once() };
    let ends = Ends::begin(family, Kind::Plug, policy, let_expire);
    Away::ParkedAndExpired.go(&ends.f);
    ends.exchange(b"new data");
    ends.f.wait_state(FlowState::Copying);
    ends.exchange(&[7; 1_000_000]);
}

/// Conntrack checks the sequence numbers of resets even where it does not check windows: after half of the number space, the
/// last number seen by conntrack would appear to be ahead.
#[test]
#[ignore = "root"]
fn a_reset_passes_after_two_gigabytes() {
    const BYTES: u64 = (1 << 31) + 200_000_000;
    let ends = Ends::begin(Family::V4, Kind::Plug, at_once(), |_| {});
    ends.exchange(b"hello");
    Away::Released.go(&ends.f);
    std::thread::scope(|s| {
        s.spawn(|| {
            let (mut client, zeros) = (&ends.client, vec![0; 1 << 20]);
            let mut left = BYTES as usize;
            while left > 0 {
                left -= client.write(&zeros[..left.min(zeros.len())]).expect("write");
            }
        });
        let read = std::io::copy(&mut (&ends.server).take(BYTES), &mut std::io::sink());
        assert_eq!(read.expect("read"), BYTES);
    });
    ends.f.command(Command::Unsplice);
    ends.f.wait_state(FlowState::Copying);
    ends.exchange(b"in control mode");
    let Ends { lab, f, client, mut server } = ends;
    SockRef::from(&client).set_linger(Some(Duration::ZERO)).expect("linger");
    drop(client);
    assert_eq!(server.read(&mut [0]).expect_err("a reset").kind(), ErrorKind::ConnectionReset, "{:?}", f.verdicts());
    assert_eq!(refused(&lab), 0);
}

/// Untracked connections must stay untracked: a conntrack entry created for one would stay for days.
#[test]
#[ignore = "root"]
fn what_is_not_tracked_stays_so() {
    const RULES: &str = "
table inet untracked {
    chain before { type filter hook prerouting priority raw; meta l4proto tcp notrack; }
    chain output { type filter hook output priority raw; meta l4proto tcp notrack; }
}
table inet filter {
    counter refused {}
    chain input { type filter hook input priority filter; ct state invalid counter name refused drop; }
}
";
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    nft(&lab, RULES);
    lab.forwarder.run(|| {
        let other = UdpSocket::bind("127.0.0.1:0").expect("bind");
        other.send_to(b"tracked", "127.0.0.1:9").expect("send");
    });
    let talk = Talk::begin(lab, Family::V4, Kind::Plug);
    talk.round(Away::Released);
    let all = talk.lab.forwarder.run(|| std::fs::read_to_string("/proc/thread-self/net/nf_conntrack")).expect("/proc");
    assert!(all.contains(" udp ") && !all.contains(" tcp "), "{all}");
    talk.end(&"not tracked");
}
