//! S19: everything that passes a tapped leg is read in order, copied or forwarded, and missing data is a marked gap.
use longsplice_engine::{
    Command, DatapathOptions, EndReason, FlowInfo, FlowState, Leftovers, OpenOptions, PieceKind, Policy, TapDirection,
    TapReader, Taps,
};
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection as Link, Options, Shape,
    pattern::{self, answer_seed},
    process::wait_for,
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::{Chunks, Report, Script, connect, converse, intact, listen, serve},
};
use longsplice_tests::{
    Forwarder, all_copies, at_once, by_hand,
    forge::{EVIL, forge},
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};
use test_case::test_case;

const SEED: u64 = 19;
/// Larger than the data of any test: nothing is lost for lack of space.
const PLENTY: usize = 256 << 20;

/// The data that a reader has got of one stream.
#[derive(Debug, Default, PartialEq, Eq)]
struct Got {
    bytes: u64,
    gaps: u64,
    doubts: u64,
    /// Length, once the stream has ended.
    end: Option<u64>,
}

impl Got {
    fn whole(length: u64) -> Got {
        Got { bytes: length, gaps: 0, doubts: 0, end: Some(length) }
    }
}

/// Reads both streams of one tap to their ends. Each byte has to be the right one for its position.
fn read(reader: &TapReader) -> [Got; 2] {
    let mut got = [Got::default(), Got::default()];
    while let Some(piece) = reader.next() {
        let seed = if piece.way == TapDirection::FromHost { SEED } else { answer_seed(SEED) };
        let g = &mut got[piece.way as usize];
        if let PieceKind::Doubt(n) = piece.what {
            g.doubts += n;
            continue;
        }
        assert_eq!((piece.at, g.end), (g.bytes + g.gaps, None), "pieces are in order: {piece:?}");
        match piece.what {
            PieceKind::Bytes(bytes) => {
                pattern::check(seed, piece.at, &bytes).unwrap_or_else(|m| panic!("{:?}: {m}", piece.way));
                g.bytes += bytes.len() as u64;
            }
            PieceKind::Gap(n) => {
                assert!(n > 0);
                g.gaps += n;
            }
            PieceKind::End => {
                g.end = Some(piece.at);
                if got.iter().all(|g| g.end.is_some()) {
                    break;
                }
            }
            other => unreachable!("{other:?}"),
        }
    }
    got
}

struct Run {
    lab: Lab,
    f: Forwarder,
    taps: Taps,
    client: JoinHandle<Report>,
    server: longsplice_lab::traffic::Serving,
}

/// Starts one connection through a forwarder that taps it.
fn start(
    family: Family,
    lab: Lab,
    (policy, options): (Policy, OpenOptions),
    most: usize,
    [up, down]: [Script; 2],
) -> (Run, TapReader) {
    let (taps, reader) = Taps::new(most);
    let server = SERVER.port(family, 7000);
    let serving = lab.server.run(|| serve(listen(server, &down).expect("listen"), 1, down.clone()));
    let proxy = FORWARDER_TO_CLIENT.port(family, 7000);
    let f = forwarder(&lab, family, (policy, options), taps.clone(), u64::MAX);
    let client = lab.client.spawn(move || converse(connect(proxy, &up).expect("connect"), &up));
    (Run { lab, f, taps, client, server: serving }, reader)
}

/// Runs a forwarder that taps the first `most` connections.
fn forwarder(lab: &Lab, family: Family, (policy, options): (Policy, OpenOptions), taps: Taps, most: u64) -> Forwarder {
    let target = SERVER.port(family, 7000);
    let (policy, number) = (Arc::new(policy), Arc::new(AtomicU64::new(0)));
    Forwarder::serving(lab, FORWARDER_TO_CLIENT.port(family, 7000), options, move |splicer, mut client, record| {
        let (policy, taps, id) = (policy.clone(), taps.clone(), number.fetch_add(1, Ordering::Relaxed));
        async move {
            if id < most {
                client.tap(taps.tap(id));
            }
            let server = splicer.connect(target, &client).await.expect("connect");
            let info = FlowInfo::new("plug", target.to_string());
            let done = move |e, _: &FlowInfo| record.lock().expect("lock").push(e);
            splicer.hand_over(client, server, Leftovers::default(), policy, info, done);
        }
    })
}

impl Run {
    /// Checks that both hosts have received all data, and that the flow
    /// has ended. Returns the forwarder, and the bytes up and down.
    fn intact(self) -> (Forwarder, Lab, [u64; 2]) {
        let Run { lab, f, taps, client, server } = self;
        let (client, server) = (client.join().expect("client"), server.join().remove(0));
        intact(&client, &server).unwrap_or_else(|e| panic!("{e}\n{:?}", f.verdicts()));
        let e = &f.ended(1)[0];
        eprintln!("{e:?}\n{:?} {:?}", taps.counts(), f.verdicts());
        assert_eq!((e.how, e.bytes_up, e.bytes_down), (EndReason::Closed, client.sent, server.sent));
        assert!(e.splices > 0 && e.spliced_up > 0 && e.spliced_down > 0, "{e:?}");
        assert!(f.verdict("tapped") > 0);
        (f, lab, [client.sent, server.sent])
    }

    /// Splices and unsplices at random moments.
    fn switch(&self, times: u32) {
        let mut rng = SmallRng::seed_from_u64(SEED);
        for _ in 0..times {
            for (command, state) in [(Command::Splice, FlowState::Spliced), (Command::Unsplice, FlowState::Copying)] {
                self.f.command(command);
                let there = || self.f.splicer.flows().first().is_none_or(|f| f.state == state).then_some(());
                wait_for(Duration::from_secs(10), there).unwrap_or_else(|| panic!("{state:?}"));
                std::thread::sleep(Duration::from_micros(rng.random_range(500..30_000)));
            }
        }
    }
}

fn scripts(bytes: [u64; 2], pace: u64) -> [Script; 2] {
    [Script::opener(SEED).bytes(bytes[0]).pace(pace), Script::answerer().bytes(bytes[1]).pace(pace)]
}

fn simple() -> Lab {
    Lab::simple(Shape::TwoDevices).expect("lab")
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_tap_goes_through_splice_unsplice_and_splice(family: Family) {
    let scripts = scripts([12_000_000, 9_000_000], 10_000_000);
    let (run, reader) = start(family, simple(), (by_hand(), all_copies()), PLENTY, scripts);
    run.f.wait_state(FlowState::Copying);
    run.switch(12);
    run.f.command(Command::Splice);
    let (f, _lab, sent) = run.intact();
    assert_eq!(read(&reader), sent.map(Got::whole), "{:?}", f.verdicts());
    assert!(f.ended(1)[0].splices > 12);
}

#[test]
#[ignore = "root"]
fn a_tap_of_a_flow_that_is_released_and_recreated() {
    let up = Script::opener(SEED).bytes(3_000_000).pace(1_000_000).chunks(Chunks::Fixed(50_000));
    let down = Script::answerer().bytes(2_000_000).pace(700_000).chunks(Chunks::Fixed(40_000));
    let (run, reader) = start(Family::V4, simple(), (at_once(), OpenOptions::default()), PLENTY, [up, down]);
    for _ in 0..2 {
        for (command, state) in [
            (Command::Splice, FlowState::Spliced),
            (Command::Release, FlowState::Released),
            (Command::Unsplice, FlowState::Copying),
        ] {
            run.f.command(command);
            run.f.wait_state(state);
        }
    }
    run.f.command(Command::Splice);
    let (_f, _lab, sent) = run.intact();
    assert_eq!(read(&reader), sent.map(Got::whole));
}

/// Lost data is retransmitted; duplicated and late data is in the right position.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_tap_under_loss_reordering_and_duplicates(family: Family) {
    let lab = Lab::new(Shape::TwoDevices, Options { large_packets: false, ..Options::default() }).expect("lab");
    let impair = Impair { loss: 0.003, duplicate: 0.02, reorder: 0.02, ..Impair::default() };
    let ways = [Link::FromClient, Link::ToClient, Link::FromServer, Link::ToServer];
    let bad = ways.map(|w| lab.impair(w, Impair { seed: w as u64 + 1, ..impair }).expect("impairment"));
    let scripts = scripts([6_000_000, 6_000_000], 6_000_000);
    let (run, reader) = start(family, lab, (by_hand(), OpenOptions::default()), PLENTY, scripts);
    run.f.wait_state(FlowState::Copying);
    run.switch(8);
    run.f.command(Command::Splice);
    let (f, _lab, sent) = run.intact();
    eprintln!("{:?}", bad.each_ref().map(|b| b.counters()));
    assert_eq!(f.verdict("tap-lost"), 0);
    assert_eq!(read(&reader), sent.map(Got::whole));
}

/// A single large packet exceeds the ring, and the reader does not read: all missing data is marked.
#[test]
#[ignore = "root"]
fn what_the_reader_cannot_keep_up_with_is_a_gap() {
    let [much, little] = [[30_000_000, 20_000_000], [6_000_000, 4_000_000]];
    // the large ring has room for little even if it is not read meanwhile
    for (tap_ring, most, sent) in [(1, PLENTY, much), (16 << 20, 1_000_000, little), (1, 100_000, much)] {
        let scripts = [Script::opener(SEED).bytes(sent[0]), Script::answerer().bytes(sent[1])];
        let options = DatapathOptions { tap_ring, ..DatapathOptions::default() }.into();
        let (run, reader) = start(Family::V4, simple(), (at_once(), options), most, scripts);
        let taps = run.taps.clone();
        let (f, _lab, sent) = run.intact();
        // before that, what is read makes room for more
        let known = || (taps.counts().bytes + taps.counts().gaps == sent[0] + sent[1]).then_some(());
        wait_for(Duration::from_secs(10), known).unwrap_or_else(|| panic!("{:?}", taps.counts()));
        let got = read(&reader);
        for (got, sent) in got.iter().zip(sent) {
            assert_eq!((got.bytes + got.gaps, got.end), (sent, Some(sent)));
        }
        let [bytes, gaps] = [got[0].bytes + got[1].bytes, got[0].gaps + got[1].gaps];
        assert!(bytes > 0 && gaps > 0, "{got:?}");
        assert_eq!((taps.counts().bytes, taps.counts().gaps), (bytes, gaps));
        assert_eq!(f.verdict("tap-lost") > 0, tap_ring == 1, "{:?}", f.verdicts());
        assert!(bytes <= most as u64);
    }
}

/// Packets of other flows take the short way, which XDP counts separately.
#[test]
#[ignore = "root"]
fn flows_without_a_tap_take_the_short_way() {
    let lab = Lab::new(Shape::TwoDevices, Options { large_packets: false, ..Options::default() }).expect("lab");
    // Like a network card, a veth accepts frames from XDP only if the other end receives by NAPI.
    lab.client.execute("ethtool", &["-K", "c0", "gro", "on"]).expect("ethtool");
    lab.server.execute("ethtool", &["-K", "s0", "gro", "on"]).expect("ethtool");
    let (server, proxy) = (SERVER.port(Family::V4, 7000), FORWARDER_TO_CLIENT.port(Family::V4, 7000));
    let down = Script::answerer().bytes(2_000_000);
    let serving = lab.server.run(|| serve(listen(server, &down).expect("listen"), 2, down));
    let devices = [lab.client_device(), lab.server_device()].map(String::from).to_vec();
    let options = DatapathOptions { xdp: devices.clone(), devices, ..DatapathOptions::default() }.into();
    let (taps, reader) = Taps::new(PLENTY);
    let f = forwarder(&lab, Family::V4, (at_once(), options), taps, 1);
    let counts = || ["tapped", "forwarded-early"].map(|name| f.verdict(name));
    let mut before = counts();
    assert_eq!(before, [0, 0]);
    for (i, seed) in [SEED, 20].into_iter().enumerate() {
        let up = Script::opener(seed).bytes(2_000_000);
        let client = lab.client.run(|| converse(connect(proxy, &up).expect("connect"), &up));
        assert!(client.clean() && client.received == 2_000_000, "{client}");
        assert!(f.ended(i + 1)[i].spliced_down > 0);
        let now = counts();
        eprintln!("{:?}", f.verdicts());
        assert_eq!(
            [now[0] > before[0], now[1] > before[1]],
            [i == 0, i == 1],
            "tapped: the long way only; others: not copied"
        );
        before = now;
    }
    serving.join();
    assert_eq!(read(&reader), [2_000_000; 2].map(Got::whole));
}

/// A flow that is spliced before it has read of its tap does not begin it, and neither does one that has ended.
#[test]
#[ignore = "root"]
fn a_tap_that_comes_too_late_does_not_begin() {
    let (lab, family) = (simple(), Family::V4);
    let (server, proxy) = (SERVER.port(family, 7000), FORWARDER_TO_CLIENT.port(family, 7000));
    let listener = lab.server.run(|| TcpListener::bind(server)).expect("listen");
    let (taps, reader) = Taps::new(PLENTY);
    let f = forwarder(&lab, family, (by_hand(), OpenOptions::default()), taps.clone(), 0);
    let client = lab.client.run(|| TcpStream::connect(proxy)).expect("connect");
    let (served, _) = listener.accept().expect("accept");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("runtime");
    let made = Arc::new(AtomicU64::new(0));
    let tap = |id| {
        let (taps, made) = (taps.clone(), made.clone());
        let make = move || {
            made.fetch_add(1, Ordering::Relaxed);
            taps.tap(7)
        };
        runtime.block_on(f.splicer.tap(id, make))
    };
    for round in 0..50 {
        f.wait_state(FlowState::Copying);
        f.command(Command::Splice);
        let id = f.splicer.flows()[0].id;
        assert!(!tap(id), "taken in round {round}");
        f.wait_state(FlowState::Spliced);
        f.command(Command::Unsplice);
    }
    f.wait_state(FlowState::Copying);
    let id = f.splicer.flows()[0].id;
    assert_eq!((made.load(Ordering::Relaxed), tap(id)), (0, true));
    for (mut from, mut to, seed) in [(&client, &served, SEED), (&served, &client, answer_seed(SEED))] {
        let mut bytes = [0; 1000];
        pattern::fill(seed, 0, &mut bytes);
        from.write_all(&bytes).expect("write");
        to.read_exact(&mut bytes).expect("read");
    }
    drop((client, served));
    f.ended(1);
    assert_eq!(read(&reader), [1000; 2].map(Got::whole));
    assert_eq!((tap(id), made.load(Ordering::Relaxed)), (false, 1));
}

/// One segment forged from the server, somewhere beyond its last byte. If the receiver drops it, it is not in the tap; if
/// the receiver may have accepted it, the tap says that the bytes are in doubt.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn what_others_say_in_the_name_of_a_host(family: Family) {
    const FIRST: u64 = 200_000;
    const THEN: u64 = 100_000;
    for (beyond, right) in [(0, false), (5000, false), (0, true), (1, true), (5000, true)] {
        let what = format!("{family:?}, {beyond} beyond, right {right}");
        let lab = Lab::new(Shape::TwoDevices, Options { large_packets: false, ..Options::default() }).expect("lab");
        let (server, proxy) = (SERVER.port(family, 7000), FORWARDER_TO_CLIENT.port(family, 7000));
        let listener = lab.server.run(|| TcpListener::bind(server)).expect("listen");
        let (taps, reader) = Taps::new(PLENTY);
        let f = forwarder(&lab, family, (at_once(), OpenOptions::default()), taps, 1);
        let mut client = lab.client.run(|| TcpStream::connect(proxy)).expect("connect");
        let (mut served, _) = listener.accept().expect("accept");
        client.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
        let mut say = |from: u64, n: u64, client: &mut TcpStream| {
            let mut bytes = vec![0; n as usize];
            pattern::fill(answer_seed(SEED), from, &mut bytes);
            let mut got = vec![0; n as usize];
            // in pieces that fit the window, because nobody reads meanwhile
            for (bytes, got) in bytes.chunks(20_000).zip(got.chunks_mut(20_000)) {
                served.write_all(bytes).expect("write");
                client.read_exact(got).unwrap_or_else(|e| panic!("{what}: {e}: {:?}", f.verdicts()));
            }
            got
        };
        f.wait_state(FlowState::Spliced);
        pattern::check(answer_seed(SEED), 0, &say(0, FIRST, &mut client)).expect("nothing was forged yet");
        forge(&lab, &f.splicer, server, beyond, right);
        let seen = || (f.verdict("bad-checksum") == u64::from(!right)).then_some(());
        wait_for(Duration::from_secs(10), seen).unwrap_or_else(|| panic!("{what}: {:?}", f.verdicts()));
        let got = say(FIRST, THEN, &mut client);
        if !right {
            pattern::check(answer_seed(SEED), FIRST, &got).expect("the client drops it");
        }
        drop((client, served));
        f.ended(1);
        let doubts = if right { EVIL.len() as u64 } else { 0 };
        let got = doubtful(&reader);
        assert_eq!(got, (FIRST + THEN, if right { Some((FIRST + u64::from(beyond), doubts)) } else { None }), "{what}");
    }
}

/// The bytes sent to the client according to the tap: their number, and
/// the range in doubt. Bytes outside that range are the server's.
fn doubtful(reader: &TapReader) -> (u64, Option<(u64, u64)>) {
    let (mut all, mut doubt, mut ended) = (Vec::new(), None::<(u64, u64)>, 0);
    while ended < 2 {
        let piece = reader.next_within(Duration::from_secs(20)).expect("the streams end").expect("taps are there");
        match (piece.what, piece.way) {
            (PieceKind::End, _) => ended += 1,
            (PieceKind::Bytes(bytes), TapDirection::ToHost) => all.extend_from_slice(&bytes),
            // one record per segment
            (PieceKind::Doubt(n), TapDirection::ToHost) => {
                let (at, before) = doubt.unwrap_or((piece.at, 0));
                assert_eq!(piece.at, at + before);
                doubt = Some((at, before + n));
            }
            (what, way) => panic!("{what:?} at {} of {way:?}", piece.at),
        }
    }
    let mut good = vec![0; all.len()];
    pattern::fill(answer_seed(SEED), 0, &mut good);
    let (from, to) = doubt.map_or((0, 0), |(at, n)| (at as usize, (at + n) as usize));
    assert!(all[..from] == good[..from] && all[to..] == good[to..], "beside the doubt all is right");
    assert!(doubt.is_some() || all == good);
    (all.len() as u64, doubt)
}
