//! Connections that one or two translucent proxies splice, take back and release, and proxies that are killed meanwhile.

use super::{PATIENCE, PORT, asker, dial, everywhere, wire::pass};
use longsplice_engine::{Command, EndReason, FlowState, Policy};
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection, Namespace, Options, Shape,
    process::wait_for,
    topology::SERVER,
    traffic::{Chunks, Report, Script, Serving, StreamEnd, converse, intact, listen, serve},
};
use longsplice_tests::{Forwarder, TestTpot, by_hand, families, process::Process};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{
    io::{Read, Write},
    net::TcpListener,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

/// Families, and numbers of proxies.
type Case = (Family, usize);
/// Where the family makes no difference.
const CROSSED: &[Case] = &[(Family::V4, 1), (Family::V6, 2)];

/// With one proxy, and with two.
fn all() -> Vec<Case> {
    families().into_iter().flat_map(|family| [(family, 1), (family, 2)]).collect()
}

/// Runs a test of each case, at the same time, since most of the time is that of the traffic's pace.
fn each_of(cases: &[Case], test: impl Fn(Family, usize) + Sync) {
    thread::scope(|s| {
        let run = |case: &Case| {
            s.spawn({
                let (test, (family, proxies)) = (&test, *case);
                move || test(family, proxies)
            })
        };
        let all: Vec<_> = cases.iter().map(run).collect();
        all.into_iter().for_each(|t| t.join().expect("the test of a case"));
    });
}

/// A network with one or two forwarders on the way to the server, whose client asks for proxies.
fn network(family: Family, proxies: usize, large_packets: bool) -> (Lab, TestTpot) {
    let shape = if proxies == 1 { Shape::TwoDevices } else { Shape::TwoForwarders };
    let lab = Lab::new(shape, Options { forwarding: proxies == 2, large_packets, ..Options::default() }).expect("lab");
    let asker = asker(&lab, family);
    (lab, asker)
}

fn places(lab: &Lab) -> Vec<&Namespace> {
    [&lab.forwarder].into_iter().chain(&lab.second).collect()
}

fn takers(lab: &Lab, family: Family, policy: &Policy) -> Vec<Forwarder> {
    let taker = |at: &Namespace| Forwarder::taker(at, everywhere(family), policy.clone(), true);
    places(lab).into_iter().map(taker).collect()
}

/// Both ends of connections, at work.
struct Talk {
    clients: Vec<thread::JoinHandle<Report>>,
    server: Serving,
}

fn talk(lab: &Lab, family: Family, scripts: &[Script], answer: &Script) -> Talk {
    let listener = lab.server.run(|| listen(SERVER.port(family, PORT), answer)).expect("listen");
    let server = serve(listener, scripts.len(), answer.clone());
    let client = |script: &Script| {
        let (stream, script) = (dial(lab, family, script), script.clone());
        thread::spawn(move || converse(stream, &script))
    };
    Talk { clients: scripts.iter().map(client).collect(), server }
}

impl Talk {
    /// The reports of each connection, client first.
    fn reports(self) -> Vec<(Report, Report)> {
        let clients: Vec<_> = self.clients.into_iter().map(|c| c.join().expect("client")).collect();
        let mut servers = self.server.join();
        let pair = |client: Report| {
            let at = servers.iter().position(|s| s.seed == client.seed);
            let at = at.unwrap_or_else(|| panic!("the server has no such connection: {client}"));
            (client, servers.swap_remove(at))
        };
        clients.into_iter().map(pair).collect()
    }

    fn intact(self, proxies: &[Forwarder]) {
        for (client, server) in self.reports() {
            let verdicts = || proxies.iter().map(Forwarder::verdicts).collect::<Vec<_>>();
            intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", verdicts()));
        }
    }
}

fn bytes_pass(f: &Forwarder) {
    let passed = || f.splicer.flows().first().map_or(0, |f| f.bytes_up.min(f.bytes_down));
    let before = passed();
    wait_for(PATIENCE, || (passed() > before).then_some(())).unwrap_or_else(|| panic!("{:?}", f.verdicts()));
}

fn segments_are_forwarded(f: &Forwarder) {
    let before = f.verdict("forwarded");
    wait_for(PATIENCE, || (f.verdict("forwarded") > before).then_some(()))
        .unwrap_or_else(|| panic!("{:?}", f.verdicts()));
}

/// Each state of a connection, in each proxy. While it is spliced or released, segments are forwarded from tunnel to tunnel;
/// while it is copied, none are.
#[test]
#[ignore = "root"]
fn copied_spliced_taken_back_released() {
    each_of(&all(), |family, proxies| {
        let (lab, asker) = network(family, proxies, true);
        let takers = takers(&lab, family, &by_hand());
        // with pauses: a released flow can be taken back only while it is idle
        let script = Script::opener(5).bytes(4_000_000).pace(1_000_000).chunks(Chunks::Fixed(50_000));
        let answer = Script::answerer().bytes(3_000_000).pace(700_000).chunks(Chunks::Fixed(40_000));
        let talk = talk(&lab, family, &[script], &answer);
        for f in &takers {
            f.wait_state(FlowState::Copying);
            bytes_pass(f);
            assert_eq!(f.verdict("forwarded"), 0, "{:?}", f.verdicts());
            f.command(Command::Splice);
            f.wait_state(FlowState::Spliced);
            segments_are_forwarded(f);
            bytes_pass(f);
            f.command(Command::Unsplice);
            f.wait_state(FlowState::Copying);
            let before = f.verdict("forwarded");
            bytes_pass(f);
            assert_eq!(f.verdict("forwarded"), before, "{:?}", f.verdicts());
            f.command(Command::Splice);
            f.wait_state(FlowState::Spliced);
            f.command(Command::Release);
            f.wait_state(FlowState::Released);
            assert!(f.splicer.datapath().expect("kernel path").legs().is_empty(), "no record and no socket is left");
            segments_are_forwarded(f);
            bytes_pass(f);
            f.command(Command::Unsplice);
            f.wait_state(FlowState::Copying);
            bytes_pass(f);
            f.command(Command::Splice);
            f.wait_state(FlowState::Spliced);
        }
        talk.intact(&takers);
        for f in &takers {
            let e = f.ended(1).remove(0);
            assert_eq!((&e.how, e.bytes_up, e.bytes_down), (&EndReason::Closed, 4_000_000, 3_000_000), "{e:?}");
            assert!(e.splices == 3 && e.spliced_up < e.bytes_up && e.spliced_up > 0, "{e:?}");
        }
        assert_eq!(["opened", "plain-refused", "unproven", "failed"].map(|v| asker.verdict(v)), [1, 0, 0, 0]);
    });
}

/// Bytes that the client's kernel has not seen acknowledged.
fn unacknowledged(lab: &Lab) -> u64 {
    let sockets = lab.client.execute("ss", &["-tnH"]).expect("ss");
    let column = sockets.lines().next().and_then(|line| line.split_whitespace().nth(2)?.parse().ok());
    column.unwrap_or_else(|| panic!("one socket with its Send-Q: {sockets}"))
}

/// A proxy that copies acknowledges what the server has not received yet. After the splice, only the server does.
#[test]
#[ignore = "root"]
fn acknowledgements_are_early_until_the_splice() {
    const DATA: [u8; 10_000] = [7; 10_000];
    each_of(CROSSED, |family, proxies| {
        let (lab, _asker) = network(family, proxies, false);
        let takers = takers(&lab, family, &by_hand());
        let listener = lab.server.run(|| TcpListener::bind(SERVER.port(family, PORT))).expect("listen");
        let mut client = dial(&lab, family, &Script::opener(1));
        let (mut server, _) = listener.accept().expect("accept");
        server.set_read_timeout(Some(PATIENCE)).expect("an option");
        let cut = lab.impair(LinkDirection::ToServer, Impair::NONE).expect("impairment");
        let mut talk = |spliced: bool| {
            let before = cut.counters().lost;
            cut.change(Impair { loss: 1.0, ..Impair::NONE }).expect("change");
            client.write_all(&DATA).expect("sent");
            // the first transmission, and at least one more
            let lost = || (cut.counters().lost > before + DATA.len() as u64 / 1000).then_some(());
            wait_for(PATIENCE, lost).expect("segments are lost");
            match spliced {
                true => assert_eq!(unacknowledged(&lab), DATA.len() as u64),
                false => wait_for(PATIENCE, || (unacknowledged(&lab) == 0).then_some(())).expect("acknowledged"),
            }
            cut.change(Impair::NONE).expect("change");
            let mut got = [0; DATA.len()];
            server.read_exact(&mut got).expect("it arrives in the end");
            assert_eq!(got, DATA);
            wait_for(PATIENCE, || (unacknowledged(&lab) == 0).then_some(())).expect("acknowledged");
        };
        talk(false);
        for f in &takers {
            f.command(Command::Splice);
            f.wait_state(FlowState::Spliced);
        }
        talk(true);
        for f in &takers {
            f.command(Command::Unsplice);
            f.wait_state(FlowState::Copying);
        }
        talk(false);
    });
}

/// Connections of a storm, and how long it lasts.
const CONNECTIONS: u64 = 4;
const STORM: Duration = Duration::from_secs(5);

/// Proxies that splice and take back at random, of which none knows what the other one does.
#[test]
#[ignore = "root"]
fn a_storm_of_switches_keeps_every_byte() {
    each_of(&all(), |family, proxies| {
        // with large packets, and with losses
        let lossy = (family == Family::V4) == (proxies == 1);
        let (lab, asker) = network(family, proxies, !lossy);
        let takers = takers(&lab, family, &by_hand());
        let bad = Impair { loss: 0.005, duplicate: 0.005, reorder: 0.005, ..Impair::NONE };
        let ways = [LinkDirection::FromClient, LinkDirection::FromServer, LinkDirection::ToClient];
        let bad: Vec<_> = ways.into_iter().filter(|_| lossy).map(|way| lab.impair(way, bad).expect("bad")).collect();
        let patient = |s: Script| s.lasting(STORM, 800_000).deadline(STORM + PATIENCE);
        let scripts: Vec<_> = (0..CONNECTIONS).map(|n| patient(Script::opener(100 + n))).collect();
        let talk = talk(&lab, family, &scripts, &patient(Script::answerer()));
        let (end, mut rng) = (Instant::now() + STORM, SmallRng::seed_from_u64(7));
        while Instant::now() < end {
            for f in &takers {
                for flow in f.splicer.flows() {
                    let command = match flow.state {
                        FlowState::Copying => Command::Splice,
                        FlowState::Spliced if rng.random_bool(0.1) => Command::Release,
                        FlowState::Spliced | FlowState::Released => Command::Unsplice,
                        _ => continue,
                    };
                    if rng.random_bool(0.5) {
                        f.splicer.command(flow.id, command);
                    }
                }
            }
            thread::sleep(Duration::from_micros(rng.random_range(500..20_000)));
        }
        talk.intact(&takers);
        for f in &takers {
            let ended = f.ended(CONNECTIONS as usize);
            assert!(ended.iter().all(|e| e.how == EndReason::Closed), "{ended:#?}");
            let splices: u64 = ended.iter().map(|e| u64::from(e.splices)).sum();
            eprintln!("{family:?}, {proxies} proxies, lossy {lossy}: {splices} splices {:?}", f.verdicts());
            assert!(splices > 5 * CONNECTIONS, "{splices}");
            // Segments that were decapsulated are cut, too. Only super-packets may be refused: they are sent again in parts.
            assert!(!lossy || f.verdict("rewrite-failed") == 0, "{:?}", f.verdicts());
        }
        assert!(bad.iter().all(|way| way.counters().lost > 0));
        // the client's programs see each packet once, whatever the lab does to it
        assert_eq!(["opened", "plain-refused", "failed"].map(|v| asker.verdict(v)), [CONNECTIONS, 0, 0]);
    });
}

/// Proxies are killed and started again while their connection is spliced: it does not notice.
#[test]
#[ignore = "root"]
fn proxies_die_and_come_back() {
    each_of(CROSSED, |family, proxies| {
        let (lab, asker) = network(family, proxies, true);
        let at = SERVER.port(family, PORT);
        let start = |place: &&Namespace| Process::taker(place, at, "at-once");
        let mut takers: Vec<_> = places(&lab).iter().map(start).collect();
        let listener = lab.server.run(|| TcpListener::bind(at)).expect("listen");
        let client = dial(&lab, family, &Script::opener(1));
        let (server, _) = listener.accept().expect("accept");
        takers.iter_mut().for_each(|p| p.wait_flows(1, FlowState::Spliced));
        let over = AtomicBool::new(false);
        thread::scope(|s| {
            s.spawn(|| {
                while !over.load(Relaxed) {
                    pass(&client, &server);
                    pass(&server, &client);
                }
            });
            for place in (0..proxies).cycle().take(3) {
                takers.remove(place).kill();
                thread::sleep(Duration::from_millis(300)); // forwarded by nobody
                takers.insert(place, start(&places(&lab)[place]));
                takers[place].wait_flows(1, FlowState::Released);
            }
            over.store(true, Relaxed);
        });
        drop((client, server));
        for taker in &mut takers {
            wait_for(PATIENCE, || taker.flows().is_empty().then_some(())).expect("it is over");
        }
        assert_eq!(["opened", "failed"].map(|v| asker.verdict(v)), [1, 0]);
        takers.into_iter().for_each(Process::end);
    });
}

/// A proxy dies with bytes in hand: both ends hear of it, and the next connection opens.
#[test]
#[ignore = "root"]
fn a_proxy_dies_while_it_copies() {
    each_of(CROSSED, |family, proxies| {
        let (lab, asker) = network(family, proxies, true);
        let at = SERVER.port(family, PORT);
        let start = |place: &&Namespace| Process::taker(place, at, "by-hand");
        let mut takers: Vec<_> = places(&lab).iter().map(start).collect();
        let endless = |s: Script| s.bytes(1_000_000_000).pace(1_000_000).deadline(PATIENCE);
        let talk_ = talk(&lab, family, &[endless(Script::opener(5))], &endless(Script::answerer()));
        takers.iter_mut().for_each(|p| p.wait_flows(1, FlowState::Copying));
        thread::sleep(Duration::from_millis(300)); // bytes are on their way
        takers.pop().expect("the last one").kill();
        for report in talk_.reports().into_iter().flat_map(|(client, server)| [client, server]) {
            let over =
                [&report.end, &report.send_end].iter().all(|how| matches!(how, StreamEnd::Eof | StreamEnd::Reset));
            assert!(report.mismatch.is_none() && over, "{report}");
            assert!([&report.end, &report.send_end].contains(&&StreamEnd::Reset), "it is not complete: {report}");
        }
        takers.push(start(&places(&lab)[proxies - 1]));
        let talk = talk(&lab, family, &[Script::opener(6).bytes(100_000)], &Script::answerer().bytes(100_000));
        for (client, server) in talk.reports() {
            intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", takers[0].ask("counters")));
        }
        assert_eq!(["opened", "failed"].map(|v| asker.verdict(v)), [2, 0]);
        takers.into_iter().for_each(Process::end);
    });
}
