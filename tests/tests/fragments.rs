//! Real traffic in fragments: a user-space link between client and forwarder fragments the packets of the client's TCP. No
//! router would do this for IPv6, nor for IPv4 unless allowed to.

use longsplice_engine::{Command, EndReason, FlowState, Refusal};
use longsplice_lab::{
    Family, Lab, Options, Shape,
    process::wait_for,
    topology::{CLIENT, FORWARDER_TO_CLIENT, SERVER},
    traffic::{Report, Script, Serving, connect, converse, intact, listen, serve},
};
use longsplice_tests::{
    Forwarder, by_hand,
    forge::send_frame,
    packet::{Packet, cut, flag},
};
use nix::sys::{
    socket::{
        AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, bind, recv, setsockopt, socket,
        sockopt::ReceiveTimeout,
    },
    time::{TimeVal, TimeValLike},
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{
    os::fd::{AsRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};
use test_case::test_case;

/// The link that all packets from the client to the forwarder pass.
struct Wire {
    cutting: Arc<AtomicBool>,
    /// The next acknowledgement without data is lost.
    losing: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

fn link(name: &str) -> LinkAddr {
    let all = nix::ifaddrs::getifaddrs().expect("interfaces");
    let found = all.filter(|i| i.interface_name == name).find_map(|i| i.address?.as_link_addr().copied());
    found.unwrap_or_else(|| panic!("{name} is an interface"))
}

/// Opens a packet socket for all frames of an interface.
fn frames(name: &str) -> OwnedFd {
    let s = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::EthAll).expect("socket");
    bind(s.as_raw_fd(), &link(name)).expect("bind");
    setsockopt(&s, ReceiveTimeout, &TimeVal::milliseconds(50)).expect("timeout");
    s
}

impl Wire {
    /// `bad`: how many fragments per thousand are lost, and how many are duplicated or late.
    fn new(lab: &Lab, bad: u32) -> Wire {
        let there = lab.forwarder.run(|| link("f0")).addr().expect("an Ethernet address");
        let mac = there.map(|b| format!("{b:02x}")).join(":");
        let (v4, v6) = (FORWARDER_TO_CLIENT.v4, FORWARDER_TO_CLIENT.v6);
        for command in [
            "ip link add t0 mtu 1500 type veth peer name t1 mtu 1500".to_owned(),
            "ethtool -K t0 tso off gso off tx off".into(),
            "ip link set t0 gso_max_segs 1 up".into(),
            "ip link set t1 up".into(),
            format!("ip neigh replace {v4} lladdr {mac} dev t0"),
            format!("ip neigh replace {v6} lladdr {mac} dev t0"),
            format!("ip route replace {v4}/32 dev t0 src {}", CLIENT.v4),
            format!("ip route replace {v6}/128 dev t0 src {}", CLIENT.v6),
        ] {
            let words: Vec<&str> = command.split(' ').collect();
            lab.client.execute(words[0], &words[1..]).unwrap_or_else(|e| panic!("{command}: {e}"));
        }
        for device in ["all", "c0"] {
            lab.client.sysctl(&format!("net.ipv4.conf.{device}.rp_filter"), "0").expect("sysctl");
        }
        let [cutting, losing, stop] = [(); 3].map(|()| Arc::new(AtomicBool::new(false)));
        let (cut_now, lose_now, stopped) = (cutting.clone(), losing.clone(), stop.clone());
        let (from, to) = lab.client.run(|| (frames("t1"), frames("c0")));
        let thread = std::thread::spawn(move || {
            let mut r = SmallRng::seed_from_u64(1);
            let (mut buffer, mut late, mut id) = (vec![0; 65536], None, 0u32);
            while !stopped.load(Ordering::Relaxed) {
                let Ok(n) = recv(from.as_raw_fd(), &mut buffer, MsgFlags::empty()) else { continue };
                let frame = &buffer[..n];
                // only frames from the client: the other end of the link is visible here, too
                if frame[..6] != there {
                    continue;
                }
                let packet = Packet::parse(frame);
                let is_bare = packet.as_ref().is_some_and(|p| p.payload.is_empty() && p.flags == flag::ACK);
                if is_bare && lose_now.swap(false, Ordering::Relaxed) {
                    continue;
                }
                let long = packet.is_some_and(|p| p.payload.len() > 500);
                if !long || !cut_now.load(Ordering::Relaxed) {
                    send_frame(&to, frame);
                    continue;
                }
                id += 1;
                let mut out = Vec::new();
                for f in cut(frame, &[256, 512], id) {
                    match r.random_range(0..1000) {
                        n if n < bad => {}
                        n if n < 2 * bad => out.extend([f.clone(), f]),
                        n if n < 3 * bad => late = Some(f),
                        _ => out.push(f),
                    }
                    if r.random_bool(0.2) {
                        out.extend(late.take());
                    }
                }
                for f in out {
                    send_frame(&to, &f);
                }
            }
        });
        Wire { cutting, losing, stop, thread: Some(thread) }
    }

    fn cut(&self) {
        self.cutting.store(true, Ordering::Relaxed);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(t) = self.thread.take() {
            let _ = t.join();
        }
    }
}

const UP: u64 = 3_000_000;
const DOWN: u64 = 1_000_000;

struct Run {
    f: Forwarder,
    wire: Wire,
    client: JoinHandle<Report>,
    server: Serving,
    _lab: Lab,
}

/// Starts a connection that is copied and not fragmented yet.
fn start(family: Family, bad: u32) -> Run {
    begin(family, bad, |_| {})
}

/// Starts a connection that is copied. `first` prepares the link.
fn begin(family: Family, bad: u32, first: impl FnOnce(&Wire)) -> Run {
    let lab = Lab::new(Shape::TwoDevices, Options { large_packets: false, ..Options::default() }).expect("lab");
    let wire = Wire::new(&lab, bad);
    first(&wire);
    let answer = Script::answerer().bytes(DOWN).pace(600_000);
    let (target, proxy) = (SERVER.port(family, 7000), FORWARDER_TO_CLIENT.port(family, 7000));
    let server = lab.server.run(|| serve(listen(target, &answer).expect("listen"), 1, answer.clone()));
    let f = Forwarder::start(&lab, proxy, target, by_hand());
    let script = Script::opener(5).bytes(UP).pace(1_500_000).deadline(Duration::from_secs(40));
    let client = lab.client.spawn(move || converse(connect(proxy, &script).expect("connect"), &script));
    f.wait_state(FlowState::Copying);
    Run { f, wire, client, server, _lab: lab }
}

impl Run {
    /// Checks that all bytes arrived and were counted.
    fn ends(self, name: &str, splices: u32, refusal: Option<Refusal>) {
        let (c, s) = (self.client.join().expect("client"), self.server.join().remove(0));
        intact(&c, &s).unwrap_or_else(|e| panic!("{name}: {e}\n{:?}", self.f.verdicts()));
        let e = &self.f.ended(1)[0];
        assert_eq!((e.bytes_up, e.bytes_down, e.how), (UP, DOWN, EndReason::Closed), "{name}: {e:?}");
        assert_eq!((e.splices, e.refusal), (splices, refusal), "{name}: {e:?}");
    }

    fn wait_verdict(&self, verdict: &str, n: u64) {
        wait_for(Duration::from_secs(10), || (self.f.verdict(verdict) >= n).then_some(()))
            .unwrap_or_else(|| panic!("{n} packets become {verdict}: {:?}", self.f.verdicts()));
    }
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_spliced_flow_goes_on_in_fragments(family: Family) {
    for bad in [0, 5] {
        let name = format!("{family:?}, {bad} of 1000 lost");
        let r = start(family, bad);
        r.f.command(Command::Splice);
        r.f.wait_state(FlowState::Spliced);
        r.wire.cut();
        r.wait_verdict("fragment-forwarded", 1000);
        // there is no way back to control mode
        r.f.command(Command::Unsplice);
        let refused = || r.f.splicer.flows().iter().any(|f| f.refusal == Some(Refusal::Fragments)).then_some(());
        wait_for(Duration::from_secs(5), refused).unwrap_or_else(|| panic!("{name}: {:?}", r.f.splicer.flows()));
        r.f.wait_state(FlowState::Spliced);
        r.f.command(Command::Release);
        r.f.wait_state(FlowState::Released);
        r.f.command(Command::Unsplice);
        r.wait_verdict("fragment-forwarded", 3000);
        r.f.wait_state(FlowState::Released);
        r.ends(&name, 1, Some(Refusal::Fragments));
    }
}

/// The sockets' numbers differ from those on the wire; and after the first fragment, the flow is not spliced again.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_flow_that_was_taken_back_goes_on_in_fragments(family: Family) {
    let r = start(family, 5);
    r.f.command(Command::Splice);
    r.f.wait_state(FlowState::Spliced);
    r.wait_verdict("forwarded", 300);
    r.f.command(Command::Unsplice);
    r.f.wait_state(FlowState::Copying);
    std::thread::sleep(Duration::from_millis(100));
    r.wire.cut();
    r.wait_verdict("fragment-stray", 300);
    r.f.command(Command::Splice);
    r.ends(&format!("{family:?}"), 1, Some(Refusal::Fragments));
}

/// The acknowledgement of the handshake is lost, and the first data arrives in fragments, which the kernel puts together. They
/// are dropped, and the connection is tracked from the next acknowledgement on.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn fragments_do_not_end_a_handshake(family: Family) {
    let r = begin(family, 0, |wire| {
        wire.losing.store(true, Ordering::Relaxed);
        wire.cut();
    });
    r.wait_verdict("fragment-stray", 300);
    assert!(r.f.verdict("fragment") > 0, "{:?}", r.f.verdicts());
    r.f.command(Command::Splice);
    r.ends(&format!("{family:?}"), 0, Some(Refusal::Fragments));
}
