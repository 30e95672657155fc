//! S19: what a cache cannot take from the tap in time is not stored, and whoever asked for it does not notice.

use longsplice_engine::{OpenOptions, Splicer};
use longsplice_lab::{
    Family, Lab, Shape, pattern,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use longsplice_proxy::{Config, CounterValues, Server};
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    sync::mpsc,
    thread,
    time::Duration,
};
use tokio::sync::oneshot;

const SIZE: usize = 30_000_000;
/// Nobody waits longer for anything.
const PATIENCE: Duration = Duration::from_secs(30);

fn answer(stream: TcpStream) -> std::io::Result<()> {
    let mut out = stream.try_clone()?;
    let mut lines = BufReader::new(stream).lines();
    while lines.by_ref().any(|line| line.is_ok_and(|l| l.is_empty())) {
        write!(out, "HTTP/1.1 200 OK\r\nCache-Control: max-age=1000\r\nContent-Length: {SIZE}\r\n\r\n")?;
        let mut bytes = vec![0; SIZE];
        pattern::fill(1, 0, &mut bytes);
        out.write_all(&bytes)?;
    }
    Ok(())
}

/// A proxy whose ring holds less than one large packet, until it is told to stop; what it has counted, and what the ring has lost.
fn proxy(
    listen: SocketAddr,
    dir: &Path,
    ready: &mpsc::Sender<()>,
    stop: oneshot::Receiver<()>,
) -> (CounterValues, u64) {
    let text = format!("[[listener]]\nprotocol = \"http\"\nlisten = \"{listen}\"\n[listener.cache]\ndir = \"cache\"\n");
    let config = Config::from_toml(&text, &dir.join("longsplice.toml")).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let options = OpenOptions { tap_ring: 1, max_flows: 4096, ..OpenOptions::default() };
    let splicer = Splicer::open(&options).expect("the data path opens: root, kernel 6.6, bpffs");
    let counted = runtime.block_on(async {
        let server = Server::start(splicer.clone(), config).await.unwrap();
        ready.send(()).unwrap();
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
fn s19_what_the_tap_has_lost_is_not_stored() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let (server, at) = (SERVER.port(Family::V4, 8080), FORWARDER_TO_CLIENT.port(Family::V4, 3128));
    let listener = lab.server.run(|| TcpListener::bind(server)).unwrap();
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            thread::spawn(move || answer(stream)); // it ends when its client goes
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let (path, (ready, is_ready), (stop, stopped)) = (dir.path().to_owned(), mpsc::channel(), oneshot::channel());
    let running = lab.forwarder.spawn(move || proxy(at, &path, &ready, stopped));
    is_ready.recv_timeout(PATIENCE).expect("the proxy starts");
    for _ in 0..2 {
        let mut stream = lab.client.run(|| TcpStream::connect(at)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(stream, "GET http://{server}/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        let body = got.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
        assert_eq!(got.len() - body, SIZE);
        pattern::check(1, 0, &got[body..]).unwrap();
    }
    stop.send(()).unwrap();
    let (counted, lost) = running.join().unwrap();
    let cache = counted.cache;
    assert!(lost > 0 && counted.replies_spliced == 2, "{counted:?}");
    let dropped = cache.cache_dropped_gap + cache.cache_dropped_busy; // the second may come before the first is given up
    assert_eq!((dropped, cache.cache_stored, cache.cache_hits, cache.cache_bytes), (2, 0, 0, 0), "{counted:?}");
}
