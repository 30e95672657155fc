//! S19: a reply that the cache cannot read from the tap in time is not stored, and its client does not notice.

use longsplice_engine::{DatapathOptions, FlowState, Splicer};
use longsplice_lab::{
    Family, Lab, Options, Shape, pattern,
    process::wait_for,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use longsplice_proxy::{Config, CounterValues, Server};
use longsplice_tests::forge::forge;
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    sync::mpsc,
    thread::{self, JoinHandle},
    time::Duration,
};
use tempfile::TempDir;
use tokio::sync::oneshot;

const SIZE: usize = 30_000_000;
/// Time limit for every wait.
const PATIENCE: Duration = Duration::from_secs(30);

fn answer(stream: TcpStream) -> std::io::Result<()> {
    let mut out = stream.try_clone()?;
    let mut lines = BufReader::new(stream).lines();
    while lines.by_ref().any(|line| line.is_ok_and(|l| l.is_empty())) {
        begin(&mut out, SIZE)?;
        out.write_all(&body(0, SIZE))?;
    }
    Ok(())
}

fn begin(out: &mut TcpStream, size: usize) -> std::io::Result<()> {
    write!(out, "HTTP/1.1 200 OK\r\nCache-Control: max-age=1000\r\nContent-Length: {size}\r\n\r\n")
}

/// `n` bytes of the reply's body, starting at `from`.
fn body(from: usize, n: usize) -> Vec<u8> {
    let mut bytes = vec![0; n];
    pattern::fill(1, from as u64, &mut bytes);
    bytes
}

fn get(lab: &Lab, at: SocketAddr, server: SocketAddr) -> TcpStream {
    let mut stream = lab.client.run(|| TcpStream::connect(at)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET http://{server}/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    stream
}

/// Reads everything until the end of the stream, and returns it without the head.
fn rest(mut stream: TcpStream) -> Vec<u8> {
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    body_of(&got).to_vec()
}

/// The part of a reply after its head.
fn body_of(reply: &[u8]) -> &[u8] {
    reply.windows(4).position(|w| w == b"\r\n\r\n").map_or(&[], |head| &reply[head + 4..])
}

/// A proxy with a cache that runs in the forwarder.
struct Proxy {
    splicer: Splicer,
    stop: oneshot::Sender<()>,
    running: JoinHandle<(CounterValues, u64)>,
    dir: TempDir,
}

impl Proxy {
    fn start(lab: &Lab, listen: SocketAddr, options: DatapathOptions) -> Proxy {
        let dir = tempfile::tempdir().unwrap();
        let (path, (ready, is_ready), (stop, stopped)) = (dir.path().to_owned(), mpsc::channel(), oneshot::channel());
        let running = lab.forwarder.spawn(move || proxy(listen, &path, options, &ready, stopped));
        let splicer = is_ready.recv_timeout(PATIENCE).expect("the proxy starts");
        Proxy { splicer, stop, running, dir }
    }

    /// Stops the proxy. Returns its counters, and the count of the verdict `tap-lost`.
    fn stop(self) -> (CounterValues, u64) {
        self.stop.send(()).unwrap();
        drop(self.splicer);
        self.running.join().unwrap()
    }
}

/// Runs the proxy until it is told to stop.
fn proxy(
    listen: SocketAddr,
    dir: &Path,
    options: DatapathOptions,
    ready: &mpsc::Sender<Splicer>,
    stop: oneshot::Receiver<()>,
) -> (CounterValues, u64) {
    let text = format!("[[listener]]\nprotocol = \"http\"\nlisten = \"{listen}\"\n[listener.cache]\ndir = \"cache\"\n");
    let config = Config::from_toml(&text, &dir.join("longsplice.toml")).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let options = DatapathOptions { max_flows: 4096, ..options };
    let splicer = Splicer::open(&options.into()).expect("the data path opens: root, kernel 6.6, bpffs");
    let counted = runtime.block_on(async {
        let server = Server::start(splicer.clone(), config, &[longsplice_proxy_http::open]).await.unwrap();
        ready.send(splicer.clone()).unwrap();
        stop.await.unwrap();
        server.stop_accepting();
        assert_eq!(server.drain(PATIENCE).await, 0);
        let lost = splicer.datapath().unwrap().verdicts().unwrap().iter().find(|v| v.0 == "tap-lost").unwrap().1;
        (server.counters(), lost)
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    splicer.close().expect("what was attached is removed");
    counted
}

#[test]
#[ignore = "root"]
fn what_the_tap_has_lost_is_not_stored() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let (server, at) = (SERVER.port(Family::V4, 8080), FORWARDER_TO_CLIENT.port(Family::V4, 3128));
    let listener = lab.server.run(|| TcpListener::bind(server)).unwrap();
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            thread::spawn(move || answer(stream)); // ends when its client leaves
        }
    });
    // a ring smaller than one large packet
    let proxy = Proxy::start(&lab, at, DatapathOptions { tap_ring: 1, ..DatapathOptions::default() });
    for _ in 0..2 {
        let got = rest(get(&lab, at, server));
        assert_eq!(got.len(), SIZE);
        pattern::check(1, 0, &got).unwrap();
    }
    let (counted, lost) = proxy.stop();
    let cache = counted.cache;
    assert!(lost > 0 && counted.replies_spliced == 2, "{counted:?}");
    let dropped = cache.cache_dropped_gap + cache.cache_dropped_busy; // the second may arrive before the first is given up
    assert_eq!((dropped, cache.cache_stored, cache.cache_hits, cache.cache_bytes), (2, 0, 0, 0), "{counted:?}");
}

/// An attacker forges data from the server in the middle of a reply. Whatever
/// the first client receives, no other client is served the forged data.
#[test]
#[ignore = "root"]
fn what_is_forged_is_not_stored() {
    const SIZE: usize = 4_000_000;
    const PARTS: [usize; 4] = [0, 1_000_000, 1_500_000, SIZE];
    for (beyond, right) in [(0, false), (5000, false), (0, true), (5000, true)] {
        let what = format!("{beyond} beyond, right {right}");
        let lab = Lab::new(Shape::TwoDevices, Options { large_packets: false, ..Options::default() }).expect("lab");
        let (server, at) = (SERVER.port(Family::V4, 8080), FORWARDER_TO_CLIENT.port(Family::V4, 3128));
        let listener = lab.server.run(|| TcpListener::bind(server)).unwrap();
        let (told, tell) = mpsc::channel::<()>();
        let serving = thread::spawn(move || {
            for turn in 0.. {
                let Ok((stream, _)) = listener.accept() else { return };
                let mut out = stream.try_clone().unwrap();
                BufReader::new(stream).lines().find(|line| line.as_ref().is_ok_and(String::is_empty));
                begin(&mut out, SIZE).unwrap();
                for part in PARTS.windows(2) {
                    out.write_all(&body(part[0], part[1] - part[0])).unwrap();
                    if turn == 0 && part[1] < SIZE {
                        tell.recv().unwrap();
                    }
                }
            }
        });
        let proxy = Proxy::start(&lab, at, DatapathOptions::default());
        let mut first = get(&lab, at, server);
        let mut got = Vec::new();
        let mut read = |part: usize| {
            while body_of(&got).len() < PARTS[part] {
                let mut buffer = vec![0; 1 << 16];
                let n = first.read(&mut buffer).unwrap();
                got.extend(&buffer[..n]);
            }
        };
        let verdicts = || proxy.splicer.datapath().unwrap().verdicts().unwrap();
        let count = |name: &str| verdicts().iter().find(|v| v.0 == name).map_or(0, |v| v.1);
        read(1);
        let spliced = || proxy.splicer.flows().iter().any(|f| f.state == FlowState::Spliced).then_some(());
        wait_for(PATIENCE, spliced).expect("spliced");
        told.send(()).unwrap();
        read(2);
        assert!(count("tapped") > 0, "{what}: tapped");
        forge(&lab, &proxy.splicer, server, beyond, right);
        let seen = || (count("bad-checksum") == u64::from(!right)).then_some(());
        wait_for(PATIENCE, seen).unwrap_or_else(|| panic!("{what}: {:?}", verdicts()));
        told.send(()).unwrap();
        let mut end = Vec::new();
        first.read_to_end(&mut end).unwrap();
        got.extend(end);
        assert_eq!((body_of(&got).len(), body_of(&got) == body(0, SIZE)), (SIZE, !right), "{what}");
        drop(first);
        let files = || fs::read_dir(proxy.dir.path().join("cache")).unwrap().map(|f| f.unwrap().path());
        let is_decided = || files().all(|f| f.extension().is_none_or(|e| e != "tmp")).then_some(());
        wait_for(PATIENCE, is_decided).expect("stored or not");
        assert_eq!(rest(get(&lab, at, server)), body(0, SIZE), "{what}: what the second client gets");
        let (counted, _) = proxy.stop();
        let cache = counted.cache;
        let want = if right { (0, 1) } else { (1, 0) };
        assert_eq!((cache.cache_hits, cache.cache_dropped_doubt), want, "{what}: {counted:?}");
        drop((lab, serving));
    }
}
