//! Scratch.
#![allow(missing_docs)]
use longsplice_engine::{Command, FlowState};
use longsplice_lab::{*, topology::*, traffic::*, trace::Tap};
use longsplice_tests::{Forwarder, by_hand};
use std::time::{Duration, Instant};
#[test]
fn debug_gap() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let server = SERVER.port(Family::V6, 7000);
    let time = Duration::from_secs(4);
    let answer = Script::answerer().lasting(time, 2_500_000).deadline(Duration::from_secs(30));
    let serving = lab.server.run(|| serve(listen(server, &answer).unwrap(), 8, answer.clone()));
    let proxy = FORWARDER_TO_CLIENT.port(Family::V6, 7000);
    let f = Forwarder::start(&lab, proxy, server, by_hand());
    let tc = Tap::start(&lab.client, "c0").unwrap();
    let ts = Tap::start(&lab.server, "s0").unwrap();
    let t0 = Instant::now();
    let clients: Vec<_> = (0..8).map(|i| {
    let script = Script::opener(1+i).lasting(time, 2_500_000).deadline(Duration::from_secs(30));
    lab.client.spawn(move || converse(connect(proxy, &script).unwrap(), &script)) }).collect();
    let mut rng = 12345u64;
    let mut log = vec![];
    std::thread::sleep(Duration::from_millis(100));
    while t0.elapsed() < time {
        for fl in f.splicer.flows() {
            let c = match fl.state { FlowState::Copying => Command::Splice, FlowState::Spliced => Command::Unsplice, _ => continue };
            rng = rng.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407); if rng >> 63 == 0 { continue; }
            log.push((fl.client.port(), fl.server, std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap(), c));
            f.splicer.command(fl.id, c);
        }
        std::thread::sleep(Duration::from_micros(500 + (rng >> 33) % 19500));
    }
    for c in clients { eprintln!("{}", c.join().unwrap()); }
    for s in serving.join() { eprintln!("{s}"); }
    eprintln!("{:?}", f.verdicts());
    for n in [&lab.client, &lab.server, &lab.forwarder] { eprintln!("{}", n.execute("sh", &["-c", "cat /proc/net/netstat /proc/net/snmp"]).unwrap()); }
    for (n, tap) in [("client", tc), ("server", ts)] {
        let t = tap.stop().unwrap();
        let mut out = String::new();
        for p in &t.packets {
            use std::fmt::Write;
            writeln!(out, "{:?} {}>{} seq {} len {} ack {} win {} {:?}", p.time, p.from.port(), p.to.port(), p.seq, p.len, p.ack, p.window, p.flags).unwrap();
        }
        std::fs::write(format!("/tmp/dbg-{n}.txt"), out).unwrap();
    }
    std::fs::write("/tmp/dbg-log.txt", log.iter().map(|l| format!("{:?} {:?}\n", (l.2, l.0, l.1), l.3)).collect::<String>()).unwrap();
}
