//! Consecutive messages with one splice each: the connections persist, and are joined with others in between.

use longsplice_engine::{
    EndReason, FlowEventKind, FlowInfo, Leftovers, Leg, Message, OpenOptions, PieceKind, Policy, Splicer,
    TapDirection as Stream, TapReader, Taps,
};
use longsplice_lab::{
    Family, Impair, Lab, LinkDirection, Shape,
    namespace::counter_here,
    pattern,
    process::wait_for,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use longsplice_tests::{Forwarder, all_copies, at_once};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{
    collections::HashMap,
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    time::Duration,
};
use test_case::test_case;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Length of a request's head in bytes: the lengths of its body and of the reply, big-endian.
const HEAD: usize = 8;
/// Time limit for every wait.
const PATIENCE: Duration = Duration::from_secs(20);

type Sizes = Arc<Vec<(usize, usize)>>;

/// Message sizes near those of a segment, a large packet, a buffer and a window.
fn sizes(seed: u64, n: usize) -> Sizes {
    let mut r = SmallRng::seed_from_u64(seed);
    let size = |r: &mut SmallRng| match r.random_range(0..8) {
        0 => 0,
        1 => r.random_range(0..3),
        2 => r.random_range(1447..1450),
        3 => r.random_range(0..10_000),
        4 => 65_536 + r.random_range(0..3) - 1,
        5 | 6 => r.random_range(0..400_000),
        _ => r.random_range(0..4_000_000),
    };
    let up = |r: &mut SmallRng| if r.random_bool(0.7) { 0 } else { size(r) };
    Arc::new((0..n).map(|_| (up(&mut r), size(&mut r))).collect())
}

fn body(seed: u64, length: usize) -> Vec<u8> {
    let mut b = vec![0; length];
    pattern::fill(seed, 0, &mut b);
    b
}

fn patient(s: TcpStream) -> TcpStream {
    s.set_read_timeout(Some(PATIENCE)).expect("timeout");
    s.set_write_timeout(Some(PATIENCE)).expect("timeout");
    s.set_nodelay(true).expect("nodelay");
    s
}

fn expect(s: &mut TcpStream, seed: u64, length: usize) -> io::Result<()> {
    let mut b = vec![0; length];
    s.read_exact(&mut b)?;
    pattern::check(seed, 0, &b).map_err(|m| io::Error::other(format!("{m:?} of {length} bytes of message {seed}")))
}

/// Answers the requests that are meant for this server; the body identifies each request.
fn server(listener: TcpListener, sizes: Sizes, mine: impl Fn(usize) -> bool) {
    let mut s = patient(listener.accept().expect("accept").0);
    for (i, (up, down)) in sizes.iter().enumerate().filter(|(i, _)| mine(*i)) {
        let mut head = [0; HEAD];
        s.read_exact(&mut head).unwrap_or_else(|e| panic!("head of request {i}: {e}"));
        let want = [*up as u32, *down as u32].map(u32::to_be_bytes);
        assert_eq!(head, *want.as_flattened(), "head of request {i}");
        expect(&mut s, i as u64, *up).unwrap_or_else(|e| panic!("body of request {i}: {e}"));
        s.write_all(&body(1000 + i as u64, *down)).unwrap_or_else(|e| panic!("reply {i}: {e}"));
    }
    assert_eq!(s.read(&mut [0; 1]).expect("the end"), 0, "nothing comes after the last request");
}

/// Sends `ahead` requests before it reads the first reply.
fn client(proxy: SocketAddr, sizes: Sizes, ahead: usize) {
    let mut s = patient(TcpStream::connect(proxy).expect("connect"));
    let mut reader = s.try_clone().expect("clone");
    let (told, tell) = std::sync::mpsc::sync_channel::<()>(ahead);
    let replies = sizes.clone();
    let read = std::thread::spawn(move || {
        for (i, (_, down)) in replies.iter().enumerate() {
            expect(&mut reader, 1000 + i as u64, *down).unwrap_or_else(|e| panic!("reply {i}: {e}"));
            tell.recv().expect("a request was sent");
        }
        assert_eq!(reader.read(&mut [0; 1]).expect("the end"), 0, "nothing comes after the last reply");
    });
    for (i, (up, down)) in sizes.iter().enumerate() {
        told.send(()).expect("the reader lives");
        let mut request = [*up as u32, *down as u32].map(u32::to_be_bytes).concat();
        request.extend(body(i as u64, *up));
        s.write_all(&request).unwrap_or_else(|e| panic!("request {i}: {e}"));
    }
    s.shutdown(std::net::Shutdown::Write).expect("shutdown");
    read.join().expect("all replies");
}

/// Relays the messages of one client, each to the next server in turn.
async fn switchboard(
    splicer: Splicer,
    mut client: Leg,
    servers: Vec<SocketAddr>,
    policy: Arc<Policy>,
    (count, taps): (Arc<Mutex<Count>>, Option<Taps>),
) {
    let mut legs = Vec::new();
    for s in &servers {
        legs.push(Some(splicer.connect(*s, &client).await.expect("connect")));
    }
    if let Some(taps) = taps {
        let all = [&mut client].into_iter().chain(legs.iter_mut().flatten());
        all.enumerate().for_each(|(i, leg)| leg.tap(taps.tap(i as u64)));
    }
    let source = SocketAddr::from(([192, 0, 2, 1], 1));
    client.announce(source, SERVER.port(Family::V4, 7000));
    let mut turn = 0;
    let mut head = [0; HEAD];
    while client.read_exact(&mut head).await.is_ok() {
        let place = turn % legs.len();
        turn += 1;
        let mut server = legs[place].take().expect("it came back");
        server.write_all(&head).await.expect("head");
        let length = |at: usize| u64::from(u32::from_be_bytes(head[at..at + 4].try_into().expect("four")));
        for message in [Message::from_client(Some(length(0))), Message::from_server(Some(length(4)))] {
            let info = FlowInfo::new("message", servers[place].to_string());
            let p = splicer
                .relay_message(&mut client, &mut server, Leftovers::default(), policy.clone(), info, message)
                .await;
            assert_eq!((p.ended.how, p.missing), (EndReason::MessageRelayed, 0), "message {turn}: {:?}", p.ended);
            assert_eq!([p.ended.client, client.source()], [source; 2]);
            let mut count = count.lock().expect("lock");
            count.splices += p.ended.splices;
            count.spliced += p.ended.spliced_up + p.ended.spliced_down;
        }
        legs[place] = Some(server);
    }
    // Later, duplicates of final acknowledgements may find no socket and cause resets.
    count.lock().expect("lock").resets = counter_here("Tcp", "OutRsts");
    for leg in legs.into_iter().flatten().chain([client]) {
        splicer.discard(leg);
    }
    count.lock().expect("lock").over = true;
}

/// S19: the client's leg and each server's leg are tapped; each tap contains the leg's own messages and no others.
fn tapped(reader: &TapReader, sizes: &Sizes) {
    let mut streams: HashMap<(u64, Stream), (Vec<u8>, bool)> = HashMap::new();
    while streams.len() < 8 || streams.values().any(|s| !s.1) {
        let piece = reader.next_within(PATIENCE).expect("the streams end").expect("taps are there");
        let s = streams.entry((piece.tap, piece.way)).or_default();
        match piece.what {
            PieceKind::Bytes(bytes) => s.0.extend(bytes),
            PieceKind::Gap(n) => panic!("{n} bytes are missing at {} of {:?} of {}", piece.at, piece.way, piece.tap),
            PieceKind::Doubt(n) => panic!("{n} bytes are in doubt at {} of {:?} of {}", piece.at, piece.way, piece.tap),
            PieceKind::End => s.1 = true,
            other => panic!("{other:?}"),
        }
    }
    for (tap, servers_side) in (0..4).map(|tap| (tap, tap > 0)) {
        let mine = |i: usize| !servers_side || i as u64 % 3 == tap - 1;
        let (mut requests, mut replies) = (Vec::new(), Vec::new());
        for (i, (up, down)) in sizes.iter().enumerate().filter(|(i, _)| mine(*i)) {
            requests.extend([*up as u32, *down as u32].map(u32::to_be_bytes).concat());
            requests.extend(body(i as u64, *up));
            replies.extend(body(1000 + i as u64, *down));
        }
        let (from, to) = if servers_side { (replies, requests) } else { (requests, replies) };
        for (way, want) in [(Stream::FromHost, from), (Stream::ToHost, to)] {
            let got = &streams[&(tap, way)].0;
            let differs = got.iter().zip(&want).position(|(a, b)| a != b);
            assert_eq!((got.len(), differs), (want.len(), None), "{way:?} of {tap}");
        }
    }
}

#[derive(Debug, Default)]
struct Count {
    splices: u32,
    spliced: u64,
    resets: Option<u64>,
    over: bool,
}

fn run(family: Family, shape: Shape, impair: Option<Impair>, (seed, ahead): (u64, usize), tap: bool) -> Count {
    let lab = Lab::simple(shape).expect("lab");
    let _bad = impair
        .map(|i| [LinkDirection::ToClient, LinkDirection::ToServer].map(|w| lab.impair(w, i).expect("impairment")));
    let sizes = sizes(seed, 120);
    let servers: Vec<_> = (0..3).map(|i| SERVER.port(family, 7000 + i)).collect();
    let serving: Vec<_> = servers
        .iter()
        .enumerate()
        .map(|(k, a)| {
            let (a, sizes) = (*a, sizes.clone());
            let listener = lab.server.run(|| TcpListener::bind(a).expect("listen"));
            lab.server.spawn(move || server(listener, sizes, |i| i % 3 == k))
        })
        .collect();
    let proxy = FORWARDER_TO_CLIENT.port(family, 7000);
    let count = Arc::new(Mutex::new(Count::default()));
    let (taps, reader) = Taps::new(1 << 30);
    let (policy, counted) = (Arc::new(at_once()), (count.clone(), tap.then_some(taps)));
    let options = if tap { all_copies() } else { OpenOptions::default() };
    let f = Forwarder::serving(&lab, proxy, options, move |splicer, leg, _| {
        switchboard(splicer, leg, servers.clone(), policy.clone(), counted.clone())
    });
    let asked = sizes.clone();
    let c = lab.client.spawn(move || client(proxy, sizes, ahead));
    c.join().unwrap_or_else(|_| {
        let sockets = lab.forwarder.execute("ss", &["-tinm"]).unwrap_or_default();
        let legs = f.splicer.datapath().map(|d| d.legs()).unwrap_or_default();
        panic!("client, seed {seed}: {:#?}\n{:?}\n{sockets}\n{legs:#?}", f.splicer.flows(), f.verdicts())
    });
    serving.into_iter().for_each(|s| s.join().expect("server"));
    wait_for(Duration::from_secs(10), || count.lock().expect("lock").over.then_some(())).expect("the end");
    for host in [&lab.client, &lab.server] {
        assert_eq!(host.counter("Tcp", "EstabResets"), Some(0), "nobody is reset");
    }
    assert_eq!(count.lock().expect("lock").resets, Some(0), "nobody is reset");
    assert!(impair.is_some() || lab.forwarder.counter("Tcp", "OutRsts") == Some(0), "nor afterwards, without copies");
    eprintln!("{:?}", f.verdicts());
    assert_eq!(f.verdict("tapped") > 0, tap);
    if tap {
        tapped(&reader, &asked);
    }
    std::mem::take(&mut *count.lock().expect("lock"))
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn each_message_is_spliced_and_the_legs_come_back(family: Family) {
    for shape in [Shape::TwoDevices, Shape::OneArmed] {
        let count = run(family, shape, None, (1, 1), false);
        eprintln!("{family:?} {shape:?}: {count:?}");
        assert!(count.splices > 0 && count.spliced > 3_000_000, "{count:?}");
    }
}

/// The next request arrives while the previous reply is spliced: no byte of the request is forwarded.
#[test]
#[ignore = "root"]
fn what_comes_early_is_for_the_next() {
    let mut spliced = 0;
    for ahead in [2, 30] {
        let count = run(Family::V4, Shape::TwoDevices, None, (2, ahead), false);
        eprintln!("{ahead} ahead: {count:?}");
        spliced += count.spliced;
    }
    assert!(spliced > 1_000_000, "{spliced}");
}

#[test]
#[ignore = "root"]
fn under_loss() {
    for (seed, ahead) in [(3, 1), (4, 4)] {
        let impair = Impair { loss: 0.005, duplicate: 0.01, ..Impair::default() };
        let count = run(Family::V4, Shape::TwoDevices, Some(impair), (seed, ahead), false);
        eprintln!("{count:?}");
        assert!(count.splices > 0 && count.spliced > 1_000_000, "{count:?}");
    }
}

/// Splices of one leg follow each other quickly, each with a different leg, while bytes of the next message wait unread.
#[test]
#[ignore = "root"]
fn taps_see_the_messages_of_their_legs() {
    let impair = Impair { loss: 0.005, duplicate: 0.01, ..Impair::default() };
    for (family, shape, impair, ahead) in [
        (Family::V4, Shape::TwoDevices, None, 1),
        (Family::V6, Shape::OneArmed, None, 30),
        (Family::V4, Shape::TwoDevices, Some(impair), 4),
    ] {
        let count = run(family, shape, impair, (4, ahead), true);
        assert!(count.splices > 0 && count.spliced > 1_000_000, "{count:?}");
    }
}

/// All bytes of a message pass while it waits for its commit, some of them while the acknowledgement of the drained ones is on
/// its way: nothing is left to commit for. What a first window brings waits before the splice.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn messages_pass_before_their_commit(family: Family) {
    let (count, commits) = late_splices(family, &[200_000; 10]);
    eprintln!("{family:?}: {count:?}, {commits} commits");
    assert!(count.splices >= 4 && count.spliced > 300_000, "{count:?}");
    assert!(commits <= 1, "{commits} commits");
}

/// Relays messages of these lengths from a near server to a client that is less near. Returns the number of commits, too.
fn late_splices(family: Family, lengths: &[usize]) -> (Count, usize) {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let far = Impair { delay: Duration::from_millis(4), ..Impair::NONE };
    let _far =
        [LinkDirection::FromClient, LinkDirection::ToClient].map(|way| lab.impair(way, far).expect("impairment"));
    let forwarder = if family == Family::V4 { "10.77.2.1/32" } else { "fd77:2::1/128" };
    lab.server.execute("ip", &["route", "replace", forwarder, "dev", "s0", "initcwnd", "100"]).expect("route");
    lab.forwarder.sysctl("net.ipv4.tcp_rmem", "4096 131072 131072").expect("sysctl");
    let sizes: Sizes = Arc::new(lengths.iter().map(|n| (0, *n)).collect());
    let to = SERVER.port(family, 7000);
    let (asked, listener) = (sizes.clone(), lab.server.run(|| TcpListener::bind(to).expect("listen")));
    let serving = lab.server.spawn(move || server(listener, asked, |_| true));
    let proxy = FORWARDER_TO_CLIENT.port(family, 7000);
    let count = Arc::new(Mutex::new(Count::default()));
    let counted = count.clone();
    let f = Forwarder::serving(&lab, proxy, OpenOptions::default(), move |splicer, mut client, _| {
        let count = counted.clone();
        async move {
            let mut server = splicer.connect(to, &client).await.expect("connect");
            let mut head = [0; HEAD];
            while client.read_exact(&mut head).await.is_ok() {
                server.write_all(&head).await.expect("head");
                tokio::time::sleep(Duration::from_millis(10)).await; // a first window arrives
                let length = u64::from(u32::from_be_bytes(head[4..].try_into().expect("four")));
                let (message, info) = (Message::from_server(Some(length)), FlowInfo::new("message", to.to_string()));
                let (left, policy) = (Leftovers::default(), Arc::new(at_once()));
                let p = splicer.relay_message(&mut client, &mut server, left, policy, info, message).await;
                assert_eq!((p.ended.how, p.missing), (EndReason::MessageRelayed, 0), "{:?}", p.ended);
                let mut count = count.lock().expect("lock");
                count.splices += p.ended.splices;
                count.spliced += p.ended.spliced_down;
            }
            [client, server].into_iter().for_each(|leg| splicer.discard(leg));
            count.lock().expect("lock").over = true;
        }
    });
    let mut events = f.splicer.subscribe();
    lab.client.spawn(move || client(proxy, sizes, 1)).join().expect("client");
    serving.join().expect("server");
    wait_for(PATIENCE, || count.lock().expect("lock").over.then_some(())).expect("the end");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("runtime");
    let (mut commits, mut ended) = (0, 0);
    while ended < lengths.len() {
        match runtime.block_on(events.next()).expect("the engine lives").kind {
            FlowEventKind::Spliced => commits += 1,
            FlowEventKind::Ended(_) => ended += 1,
            _ => {}
        }
    }
    assert_eq!(events.dropped(), 0);
    (std::mem::take(&mut *count.lock().expect("lock")), commits)
}
