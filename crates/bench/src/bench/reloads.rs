//! What reloads cost clients: each proxy is reloaded again and again, with long connections that begin before each time, while a
//! client connects all the time.

use super::{
    Result,
    network::{PATIENCE, PORT, Packets, accept, lab, listen, proxy, server},
    peers::Peer,
    variant::Variant,
    venue::{OURS, Venue, connect, lacks, longsplice_config},
};
use crate::{args::ReloadsArgs, program, watch_interrupts};
use longsplice::Outcome;
use longsplice_lab::Namespace;
use nix::{
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        signal::{Signal, kill},
    },
    unistd::Pid,
};
use std::{
    fs,
    io::{self, ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    thread,
    time::{Duration, Instant},
};

/// Time from one reload to the next: as often as a busy controller does it, and enough for each of these proxies.
const PACE: Duration = Duration::from_millis(200);
/// Time in which the rate without reloads is measured, and in which everything comes to rest after the last one.
const BEFORE: Duration = Duration::from_secs(5);

/// What is reloaded, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contestant {
    Longsplice,
    /// `longsplice upgrade`: a new process each time.
    Upgraded,
    /// Master and workers, SIGUSR2: the master executes its program again, and starts a new worker.
    Haproxy,
    /// SIGHUP: new workers.
    Nginx,
}

impl Contestant {
    const ALL: [Contestant; 4] = [Contestant::Longsplice, Contestant::Upgraded, Contestant::Haproxy, Contestant::Nginx];

    fn title(self) -> &'static str {
        match self {
            Contestant::Longsplice => "longsplice, reload",
            Contestant::Upgraded => "longsplice, upgrade",
            Contestant::Haproxy => "HAProxy, master-worker, SIGUSR2",
            Contestant::Nginx => "nginx, SIGHUP",
        }
    }

    fn variant(self) -> Variant {
        match self {
            Contestant::Longsplice | Contestant::Upgraded => Variant::Default,
            Contestant::Haproxy => Variant::Haproxy,
            Contestant::Nginx => Variant::Nginx,
        }
    }
}

/// What one client has seen that connects all the time.
#[derive(Default)]
struct Seen {
    served: AtomicU64,
    refused: AtomicU64,
    /// Reset, or ended without a reply.
    broken: AtomicU64,
}

/// A row of the table.
struct Row {
    refused: u64,
    broken: u64,
    lost: usize,
    long: usize,
    /// Connections per second, before and while it is reloaded.
    rates: [f64; 2],
    processes: usize,
    megabytes: f64,
}

/// Prints a table.
pub fn reloads(args: &ReloadsArgs) -> Outcome {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    let interrupted = watch_interrupts()?;
    let (times, each) = (args.reloads, args.connections);
    println!("{times} reloads, one each {PACE:?}; before each, {each} connections that stay begin");
    println!("| | refused | reset | long ones lost | connections per second | processes | memory |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for of in Contestant::ALL {
        if let Some(why) = lacks(of.variant()) {
            println!("without {why}");
            continue;
        }
        let row = measure(of, args, &interrupted).map_err(|e| format!("{}: {e}", of.title()))?;
        let Row { refused, broken, lost, long, rates: [before, during], processes, megabytes } = row;
        let (title, ratio) = (of.title(), during / before);
        println!(
            "| {title} | {refused} | {broken} | {lost} of {long} | {ratio:.2} of that without reloads | {processes} | \
             {megabytes:.0} MB |"
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(of: Contestant, args: &ReloadsArgs, interrupted: &AtomicBool) -> Result<Row> {
    let lab = lab(Packets::Large, false)?;
    lab.client.sysctl("net.ipv4.ip_local_port_range", "1024 65535")?;
    echo(lab.server.run(|| listen(server()))?);
    let at = lab.forwarder.clone();
    let mut venue = Venue::new(of.variant(), lab)?;
    let exe = match of.variant().peer() {
        None => {
            venue.longsplice(&at, OURS, &longsplice_config(Variant::Default, None), &[])?;
            program()?
        }
        Some(Peer::Haproxy) => {
            // without it, it is one process, which cannot be reloaded
            let file = venue.path("haproxy.cfg");
            fs::write(&file, Peer::Haproxy.config().unwrap_or_default())?;
            let mut run = at.command(Peer::Haproxy.program());
            venue.serve(&at, run.args(["-W", "-f"]).arg(&file), PORT)?;
            Peer::Haproxy.program().into()
        }
        Some(peer) => {
            venue.peer(&at, peer, "peer", &peer.config().unwrap_or_default(), PORT)?;
            peer.program().into()
        }
    };
    let main = venue.pid().ok_or("no program was started")?;
    let (seen, runs) = (Arc::new(Seen::default()), Arc::new(AtomicBool::new(true)));
    let (of_client, still) = (seen.clone(), runs.clone());
    let client = venue.lab.client.spawn(move || {
        while still.load(SeqCst) {
            of_client.note(try_once());
        }
    });
    let rate = |length: Duration| {
        let (began, before) = (Instant::now(), seen.served.load(Relaxed));
        thread::sleep(length);
        (seen.served.load(Relaxed) - before) as f64 / began.elapsed().as_secs_f64()
    };
    let before = rate(BEFORE);
    let (began, served) = (Instant::now(), seen.served.load(Relaxed));
    let mut long = Vec::new();
    for n in 1..=args.reloads {
        if interrupted.load(Relaxed) {
            return Err("interrupted".into());
        }
        for _ in 0..args.connections {
            let mut stream = venue.lab.client.run(|| connect(proxy()))?;
            ask(&mut stream).map_err(|e| format!("a connection is not served: {e}{}", venue.last_words()))?;
            long.push(stream);
        }
        match of {
            Contestant::Longsplice => drop(venue.ask(&at, OURS, &["reload"])?),
            Contestant::Upgraded => drop(venue.ask(&at, OURS, &["upgrade"])?),
            Contestant::Haproxy => kill(Pid::from_raw(main as i32), Signal::SIGUSR2)?,
            Contestant::Nginx => kill(Pid::from_raw(main as i32), Signal::SIGHUP)?,
        }
        thread::sleep((began + PACE * n).saturating_duration_since(Instant::now()));
    }
    let during = (seen.served.load(Relaxed) - served) as f64 / began.elapsed().as_secs_f64();
    thread::sleep(BEFORE);
    let all = processes(&at, &exe);
    let megabytes = all.iter().map(|pid| resident(*pid)).sum::<f64>() / 1e6;
    let lost = long.iter_mut().filter_map(|stream| ask(stream).err()).count();
    runs.store(false, SeqCst);
    client.join().map_err(|_| "the client has panicked")?;
    let long = long.len();
    if of == Contestant::Upgraded {
        venue.ask(&at, OURS, &["stop"])?; // it is not the process that was started
    }
    let [refused, broken] = [&seen.refused, &seen.broken].map(|n| n.load(Relaxed));
    Ok(Row { refused, broken, lost, long, rates: [before, during], processes: all.len(), megabytes })
}

impl Seen {
    fn note(&self, outcome: io::Result<()>) {
        match outcome {
            Ok(()) => &self.served,
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => &self.refused,
            Err(_) => &self.broken,
        }
        .fetch_add(1, Relaxed);
    }
}

/// A connection that is closed at once. In the client's namespace.
fn try_once() -> io::Result<()> {
    ask(&mut connect(proxy())?)
}

/// A byte to the server, and back.
fn ask(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(b"?")?;
    stream.read_exact(&mut [0])
}

/// Echoes the bytes of all connections, until the program ends.
fn echo(listener: TcpListener) {
    let serve = |mut stream: TcpStream| {
        let mut byte = [0];
        // without a time limit: some of them are idle until the end
        while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {}
    };
    thread::spawn(move || {
        while let Ok(accepted) = accept(&listener, PATIENCE) {
            // without a thread, its client sees the end of it, which is counted
            accepted.map(|stream| thread::Builder::new().stack_size(64 << 10).spawn(move || serve(stream)));
        }
    });
}

/// The processes of a program at a host.
fn processes(at: &Namespace, exe: &Path) -> Vec<i32> {
    let Ok(namespace) = fs::metadata(at.path()) else { return Vec::new() };
    let is_one = |pid: &i32| {
        let of = |what: &str| PathBuf::from(format!("/proc/{pid}/{what}"));
        let is_there = fs::metadata(of("ns/net")).is_ok_and(|ns| ns.ino() == namespace.ino());
        is_there && fs::read_link(of("exe")).is_ok_and(|link| link == exe)
    };
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_one).collect()
}

/// Bytes of a process. Shared pages are divided among their users.
fn resident(pid: i32) -> f64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    super::machine::number(&rollup, "Pss").unwrap_or(0) as f64 * 1024.0
}
