//! Splice and unsplice at random moments under full load: no byte lost, no connection reset, none left behind.
use longsplice_engine::{Command, FlowState, How};
use longsplice_lab::{
    Family, Impair, Lab, Options, Shape, Way,
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::{Report, Script, connect, converse, intact, listen, serve},
};
use longsplice_tests::{Forwarder, by_hand};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

const CONNECTIONS: usize = 8;
/// Splices all told; as many unsplices.
const CYCLES: u32 = 1000;
/// Storms during which the hypervisor took a processor away, and which show nothing of the clocks for that: what one processor has
/// settled may be overtaken by what the other sends. So many are made again.
const DISTURBED: u32 = 5;

struct Storm {
    family: Family,
    lab: Lab,
    pace: u64,
    time: Duration,
    cycles: u32,
}

impl Storm {
    /// Runs it; the longest gap that any receiver saw, and the number of splices.
    fn run(&self) -> (Duration, u32) {
        for _ in 0..DISTURBED {
            let (stolen, before) = (stolen(), self.sum("PAWSEstab"));
            let seen = self.once();
            let paws = self.sum("PAWSEstab");
            if paws == before {
                return seen;
            }
            assert!(self::stolen() > stolen, "segments seem older than they are: {before:?} {paws:?}");
            eprintln!("disturbed: {before:?} {paws:?}");
        }
        panic!("segments seem older than they are, in {DISTURBED} storms");
    }

    fn sum(&self, name: &str) -> [u64; 2] {
        [&self.lab.client, &self.lab.server].map(|n| n.counter("TcpExt", name).unwrap_or(0))
    }

    fn once(&self) -> (Duration, u32) {
        let server = SERVER.port(self.family, 7000);
        let deadline = self.time + Duration::from_secs(60);
        let answer = Script::answerer().lasting(self.time, self.pace).deadline(deadline);
        let serving =
            self.lab.server.run(|| serve(listen(server, &answer).expect("listen"), CONNECTIONS, answer.clone()));
        let proxy = FORWARDER_TO_CLIENT.port(self.family, 7000);
        let f = Forwarder::start(&self.lab, proxy, server, by_hand());
        let clients: Vec<_> = (0..CONNECTIONS as u64)
            .map(|i| {
                let script = Script::opener(100 + i).lasting(self.time, self.pace).deadline(deadline);
                self.lab.client.spawn(move || converse(connect(proxy, &script).expect("connect"), &script))
            })
            .collect();
        let splices = self.switch_at_random(&f);
        let clients: Vec<Report> = clients.into_iter().map(|c| c.join().expect("client")).collect();
        let verdicts = f.verdicts();
        let servers: HashMap<_, _> = serving.join().into_iter().map(|r| (r.seed.expect("seed"), r)).collect();
        let mut longest = Duration::ZERO;
        for c in &clients {
            let s = &servers[&c.seed.expect("seed")];
            intact(c, s).unwrap_or_else(|e| panic!("{e}\n{verdicts:?}"));
            longest = longest.max(c.longest_gap).max(s.longest_gap);
        }
        let ended = f.ended(CONNECTIONS);
        assert!(ended.iter().all(|e| e.how == How::Closed), "{ended:#?}");
        for e in &ended {
            let c = clients.iter().find(|c| c.sent == e.bytes_up && c.received == e.bytes_down);
            assert!(c.is_some(), "the counts of a flow are those of its ends: {e:?} {clients:#?}");
        }
        assert!(f.splicer.flows().is_empty());
        eprintln!("{splices} splices, longest gap {longest:?}, timeouts {:?}, {verdicts:?}", self.sum("TCPTimeouts"));
        (longest, splices)
    }

    fn switch_at_random(&self, f: &Forwarder) -> u32 {
        let mut rng = SmallRng::seed_from_u64(7);
        let end = Instant::now() + self.time;
        let mut splices = 0;
        while splices < self.cycles && Instant::now() < end {
            let flows = f.splicer.flows();
            for flow in &flows {
                let c = match flow.state {
                    FlowState::Copying => {
                        splices += 1;
                        Command::Splice
                    }
                    FlowState::Spliced => Command::Unsplice,
                    _ => continue,
                };
                if rng.random_bool(0.5) {
                    f.splicer.command(flow.id, c);
                }
            }
            std::thread::sleep(Duration::from_micros(rng.random_range(500..20_000)));
        }
        splices
    }
}

/// Time that the hypervisor has taken of all processors, in ticks: the eighth number of /proc/stat (proc(5)).
fn stolen() -> u64 {
    let stat = std::fs::read_to_string("/proc/stat").expect("/proc");
    stat.split_whitespace().nth(8).and_then(|n| n.parse().ok()).expect("steal")
}

fn lab(large_packets: bool) -> Lab {
    Lab::new(Shape::TwoDevices, Options { large_packets, ..Options::default() }).expect("lab")
}

#[test]
fn full_speed_both_ways() {
    for family in Family::BOTH {
        let s = Storm {
            family,
            lab: lab(true),
            pace: 20_000_000 / CONNECTIONS as u64,
            time: Duration::from_secs(10),
            cycles: CYCLES,
        };
        let (_, splices) = s.run();
        assert!(splices >= CYCLES, "{splices}");
    }
}

#[test]
fn under_loss() {
    let lab = lab(false);
    let loss = Impair { loss: 0.005, ..Impair::default() };
    let _up = lab.impair(Way::ToServer, loss).expect("impairment");
    let _down = lab.impair(Way::ToClient, loss).expect("impairment");
    let s = Storm {
        family: Family::V4,
        lab,
        pace: 20_000_000 / CONNECTIONS as u64,
        time: Duration::from_secs(10),
        cycles: CYCLES,
    };
    let (_, splices) = s.run();
    assert!(splices >= CYCLES / 2, "{splices}");
}
