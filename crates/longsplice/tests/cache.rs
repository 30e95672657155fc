//! S19: a cache that is filled from the tap while replies are spliced. curl sends the requests, also over links with loss
//! and reordering; the server counts its requests. Needs root, eBPF and curl, and fails without.

use crate::running::{LONGSPLICE, Pins, Running, eventually};
use longsplice_lab::{
    ChildGuard, Family, Impair, Lab, LinkDirection, Shape, pattern,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    os::unix::fs::FileExt,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};
use tempfile::TempDir;

const PROXY: u16 = 3128;
const PORT: u16 = 8080;
const SIZE: usize = 12_000_000;
/// Time limit for every curl command.
const PATIENCE: Duration = Duration::from_secs(60);
/// A rate that the reader of the copies can always keep up with. Otherwise there would be gaps, which are not tested here.
const RATE: Impair = Impair { rate_bytes_per_s: Some(20_000_000), queue: Duration::from_secs(1), ..Impair::NONE };

/// The body for a path `/FRAMING/NAME`, which is always the same.
fn body(path: &str) -> Vec<u8> {
    let mut bytes = vec![0; SIZE];
    pattern::fill(u64::from(path.bytes().map(u32::from).sum::<u32>()), 0, &mut bytes);
    bytes
}

/// Answers requests until the client leaves; `stale` replies have to be revalidated, and are still valid.
fn answer(stream: TcpStream, asked: &AtomicU64) -> std::io::Result<()> {
    let mut out = stream.try_clone()?;
    let mut lines = BufReader::new(stream).lines();
    while let Some(line) = lines.next().transpose()? {
        let path = line.split(' ').nth(1).unwrap().to_owned();
        let mut known = false;
        for line in lines.by_ref() {
            let line = line?;
            known |= line == "If-None-Match: \"1\"";
            if line.is_empty() {
                break;
            }
        }
        asked.fetch_add(1, Relaxed);
        let age = if path.ends_with("stale") { 0 } else { 1000 };
        let fields = format!("Cache-Control: max-age={age}\r\nETag: \"1\"\r\n");
        if known {
            write!(out, "HTTP/1.1 304 Not Modified\r\n{fields}\r\n")?;
            continue;
        }
        let bytes = body(&path);
        match path.split('/').nth(1).unwrap() {
            "exact" => write!(out, "HTTP/1.1 200 OK\r\n{fields}Content-Length: {SIZE}\r\n\r\n")?,
            "close" => {
                write!(out, "HTTP/1.1 200 OK\r\n{fields}\r\n")?;
                return out.write_all(&bytes);
            }
            _ => {
                write!(out, "HTTP/1.1 200 OK\r\n{fields}Transfer-Encoding: chunked\r\n\r\n")?;
                for chunk in bytes.chunks(5_000_001) {
                    write!(out, "{:x}\r\n", chunk.len())?;
                    out.write_all(chunk)?;
                    out.write_all(b"\r\n")?;
                }
                out.write_all(b"0\r\n\r\n")?;
                continue;
            }
        }
        out.write_all(&bytes)?;
    }
    Ok(())
}

struct Scene {
    proxy: Running,
    _pins: Pins,
    lab: Lab,
    family: Family,
    dir: TempDir,
    asked: Arc<AtomicU64>,
}

impl Scene {
    fn new(family: Family) -> Scene {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let asked = Arc::new(AtomicU64::new(0));
        let listener = lab.server.run(|| TcpListener::bind(SERVER.port(family, PORT))).unwrap();
        let count = asked.clone();
        thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let count = count.clone();
                thread::spawn(move || answer(stream, &count)); // a client that breaks off has a reason
            }
        });
        let dir = tempfile::tempdir().unwrap();
        let at = FORWARDER_TO_CLIENT.port(family, PROXY);
        // space for two replies
        let cache = "[listener.cache]\ndir = \"cache\"\nsize = 30000000\nobject = 15000000\n";
        fs::write(dir.path().join("l.toml"), format!("[[listener]]\nprotocol = \"http\"\nlisten = \"{at}\"\n{cache}"))
            .unwrap();
        let proxy = Scene::start(&lab, &dir);
        Scene { proxy, _pins: Pins::of(&lab.forwarder), lab, family, dir, asked }
    }

    fn start(lab: &Lab, dir: &TempDir) -> Running {
        let config = dir.path().join("l.toml");
        let arguments = ["--config", config.to_str().unwrap(), "--log-format", "json"];
        Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, &[])
    }

    /// Fetches all paths with curl over one connection. Returns the number of requests to the server meanwhile.
    fn get(&self, paths: &[&str]) -> u64 {
        let before = self.asked.load(Relaxed);
        let proxy = format!("http://{}", FORWARDER_TO_CLIENT.port(self.family, PROXY));
        let mut curl = self.lab.client.command("curl");
        curl.args(["--disable", "--silent", "--show-error", "--fail", "--noproxy", "", "--proxy", &proxy]);
        let files: Vec<PathBuf> = (0..paths.len()).map(|i| self.dir.path().join(format!("got{i}"))).collect();
        for (path, file) in paths.iter().zip(&files) {
            curl.arg("--output").arg(file).arg(format!("http://{}{path}", SERVER.port(self.family, PORT)));
        }
        let mut curl = ChildGuard::spawn(&mut curl).unwrap();
        let status = curl.wait(PATIENCE);
        assert!(status.is_some_and(|s| s.success()), "{paths:?}: {status:?}: {}", curl.output());
        for (path, file) in paths.iter().zip(&files) {
            let got = fs::read(file).unwrap();
            assert_eq!((got.len(), Sha256::digest(&got)), (SIZE, Sha256::digest(body(path))), "{path}");
        }
        self.asked.load(Relaxed) - before
    }

    fn count(&self, name: &str) -> u64 {
        self.proxy.count("proxy", name)
    }

    /// The cache result in the log of each finished request, and the number of bytes spliced.
    fn log(&mut self) -> Vec<(String, u64)> {
        self.proxy.shut_down();
        let record = |r: Value| {
            assert_eq!(r["how"], "closed", "{r}");
            (r["cache"].as_str().unwrap().to_owned(), r["spliced_down"].as_u64().unwrap())
        };
        self.proxy.records().into_iter().map(record).collect()
    }

    fn entries(&self) -> Vec<PathBuf> {
        let all = fs::read_dir(self.dir.path().join("cache")).unwrap().map(|f| f.unwrap().path());
        all.filter(|p| p.extension().is_some_and(|e| e == "entry")).collect()
    }
}

fn run(family: Family) {
    let mut scene = Scene::new(family);
    let slow = scene.lab.impair(LinkDirection::FromServer, RATE).unwrap();
    // a spliced reply is stored and served, whatever its framing
    for (n, path) in ["/exact/a", "/chunked/a", "/close/a"].into_iter().enumerate() {
        assert_eq!(scene.get(&[path]), 1);
        eventually("stored", || (scene.count("cache_stored") == n as u64 + 1).then_some(()));
        assert_eq!(scene.get(&[path, path]), 0);
    }
    // the first reply was evicted, and its connection continues after a splice
    assert_eq!((scene.count("cache_evicted"), scene.entries().len()), (1, 2));
    assert_eq!(scene.get(&["/exact/stale", "/close/a"]), 1);
    eventually("stored", || (scene.count("cache_stored") == 4).then_some(()));
    assert_eq!(scene.get(&["/exact/stale", "/exact/stale"]), 2);
    let counts = ["cache_hits", "cache_misses", "cache_revalidated", "cache_evicted"].map(|name| scene.count(name));
    assert_eq!(counts, [7, 4, 2, 2]);
    let log = scene.log();
    let words: Vec<&str> = log.iter().map(|(word, _)| word.as_str()).collect();
    let once = ["fill", "hit", "hit"];
    assert_eq!(words, [&once[..], &once, &once, &["fill", "hit", "revalidated", "revalidated"]].concat());
    for (word, spliced) in &log {
        // how much is spliced depends on the hosts: on the first moment at which both windows fit
        assert_eq!(*spliced > 1_000_000, word == "fill", "{log:?}");
    }

    // over bad links, and again after a restart
    scene.proxy = Scene::start(&scene.lab, &scene.dir);
    assert_eq!(scene.get(&["/close/a"]), 0);
    drop(slow);
    let bad = Impair { loss: 0.005, reorder: 0.01, duplicate: 0.005, ..RATE };
    let bad = [(LinkDirection::FromServer, 1), (LinkDirection::ToClient, 2)]
        .map(|(way, seed)| scene.lab.impair(way, Impair { seed, ..bad }).unwrap());
    assert_eq!(scene.get(&["/exact/b"]), 1);
    eventually("stored", || (scene.count("cache_stored") == 1).then_some(()));
    drop(bad);
    assert_eq!(scene.get(&["/exact/b"]), 0);
    // a corrupt entry is a miss
    for entry in scene.entries() {
        fs::OpenOptions::new().write(true).open(entry).unwrap().write_all_at(b"?", 1).unwrap();
    }
    let _slow = scene.lab.impair(LinkDirection::FromServer, RATE).unwrap();
    assert_eq!(scene.get(&["/exact/b"]), 1);
    eventually("stored", || (scene.count("cache_stored") == 2).then_some(()));
    assert_eq!((scene.get(&["/exact/b"]), scene.count("cache_damaged")), (0, 1));
    let log = scene.log();
    assert!(log.iter().filter(|(word, spliced)| word == "fill" && *spliced > 1_000_000).count() == 2, "{log:?}");
}

#[test]
#[ignore = "root"]
fn what_is_spliced_is_stored_and_served() {
    run(Family::V4);
}

#[test]
#[ignore = "root"]
fn what_is_spliced_is_stored_and_served_over_ipv6() {
    run(Family::V6);
}

/// The same paths are requested repeatedly over several connections at
/// once, while they are stored, evicted and served: no byte is ever wrong.
#[test]
#[ignore = "root"]
fn many_spliced_replies_are_stored_at_once() {
    let mut scene = Scene::new(Family::V4);
    let paths = ["/exact/a", "/chunked/b", "/close/c", "/exact/stale"];
    let proxy = format!("http://{}", FORWARDER_TO_CLIENT.port(scene.family, PROXY));
    let mut all = Vec::new();
    for client in 0..4 {
        for (i, path) in paths.iter().cycle().skip(client).take(4).enumerate() {
            all.push((scene.dir.path().join(format!("got{client}-{i}")), *path, client));
        }
    }
    let mut running = Vec::new();
    for client in 0..4 {
        let mut curl = scene.lab.client.command("curl");
        curl.args(["--disable", "--silent", "--show-error", "--fail", "--noproxy", "", "--proxy", &proxy]);
        for (file, path, _) in all.iter().filter(|(_, _, c)| *c == client) {
            curl.arg("--output").arg(file).arg(format!("http://{}{path}", SERVER.port(scene.family, PORT)));
        }
        running.push(ChildGuard::spawn(&mut curl).unwrap());
    }
    for mut curl in running {
        let status = curl.wait(PATIENCE);
        assert!(status.is_some_and(|s| s.success()), "{status:?}: {}", curl.output());
    }
    for (file, path, _) in &all {
        assert_eq!(Sha256::digest(fs::read(file).unwrap()), Sha256::digest(body(path)), "{path}");
    }
    let log = scene.log();
    assert_eq!(log.len(), all.len(), "{log:?}");
}
