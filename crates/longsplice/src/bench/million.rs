//! A million connections at the same time, all spliced and released: what each of them takes, whether they still carry bytes,
//! and what a look-up costs among so many.
//!
//! One table of descriptors does not hold so many ends: every so many connections, client and server are other threads
//! (`Pair`), each with a table of its own. Each connection begins with its number, by which the server's end is found again.

use super::{
    Bench, Result,
    memory::{number, resident},
    peers::{control_socket, run_longsplice},
    results::Results,
    segment::on_one_cpu,
    venue::{self, PATIENCE, Packets, Pins},
};
use crate::{client::Client, control::Ask};
use libbpf_rs::MapHandle;
use longsplice_engine::FlowState;
use longsplice_lab::{ChildGuard, Family, Lab, process::wait_for, topology};
use nix::{
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CloneFlags, unshare},
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket, sockopt},
        time::{TimeVal, TimeValLike},
    },
};
use serde::{Deserialize, Serialize};
use std::{
    collections::VecDeque,
    fmt::Write as _,
    fs,
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    ops::Range,
    os::fd::{AsFd, AsRawFd},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

/// Opened first: what a look-up among a million is compared with. Memory counts from here on.
const FEW: usize = 1000;
/// Ports of one client address, and their first.
const PER_CLIENT: usize = 50_000;
const FIRST_PORT: u16 = 10_000;
/// Connections to one port of the server, from all source addresses: fewer than they have ports.
const PER_SERVER: usize = 200_000;
const SOURCES: u8 = 4;
/// Where listeners and servers begin.
const PORT: u16 = 7000;
/// Connections that the client may be ahead of the server: fewer than a backlog.
const AHEAD: usize = 1000;
/// Accepted and not yet read from.
const PENDING: usize = 256;
/// Bytes of a round trip.
const BLOCK: usize = 64;
/// What waits for a whole list of a million.
const LONG: Duration = Duration::from_secs(120);

/// What was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Million {
    /// Held at the same time.
    pub connections: usize,
    /// Opened, spliced and released per second, hosts included.
    pub per_second: f64,
    /// Resident in the process, bytes per connection.
    pub process: f64,
    /// All of the process at the end, bytes.
    pub resident: u64,
    /// Tables of the data path, bytes per flow they have room for.
    pub tables: f64,
    /// Kernel memory of all kinds of objects (slab), bytes per connection: the sockets of both hosts.
    pub slab: f64,
    /// Connections, drawn at random, that carried bytes both ways, all of them right.
    pub checked: usize,
    /// Of a round trip on one CPU over connections drawn from the first few, microseconds.
    pub micros_few: f64,
    /// The same, drawn from all.
    pub micros_all: f64,
}

/// For results as a table.
pub fn table(results: &Results) -> String {
    let Some(m) = &results.million else { return String::new() };
    let mut text = format!("{} connections, spliced and released:\n\n| what | |\n| --- | ---: |\n", m.connections);
    for (what, value) in [
        ("opened per second, hosts included", m.per_second),
        ("resident in the process, bytes per connection", m.process),
        ("resident in the process, MB", m.resident as f64 / 1e6),
        ("tables of the data path, bytes per flow", m.tables),
        ("kernel memory of both hosts' sockets, bytes per connection", m.slab),
        ("of them drawn at random, with all bytes right", m.checked as f64),
    ] {
        let _ = writeln!(text, "| {what} | {value:.0} |");
    }
    for (what, value) in [("the first few", m.micros_few), ("all", m.micros_all)] {
        let _ = writeln!(text, "| round trip, drawn from {what}, microseconds on one CPU | {value:.1} |");
    }
    text.push('\n');
    text
}

/// Opens them, in two steps, and looks.
pub fn measure(bench: &Bench, connections: usize) -> Result<Million> {
    let per_table = raise_limit()?;
    let place = Place::set(connections)?;
    let few = FEW.min(connections / 2);
    let rounds = (connections / 100).max(100);
    let mut hosts = Hosts::start(&place, connections, per_table)?;
    hosts.open(bench, 0..few)?;
    let mut dice = 1;
    let mut draw = |n: usize| (0..rounds).map(|_| (random(&mut dice) % n as u64) as usize).collect::<Vec<_>>();
    place.wait_released()?;
    hosts.ping(&draw(few))?; // everything is warm after this
    let micros_few = hosts.ping(&draw(few))?;
    let (resident_few, slab_few) = (resident(place.proxy.pid()) as u64, slab()?);

    let began = Instant::now();
    hosts.open(bench, few..connections)?;
    let seconds = began.elapsed().as_secs_f64();
    place.wait_released()?;
    let (resident, slab) = (resident(place.proxy.pid()) as u64, slab()?);
    bench.say(&format!("{connections} connections are open: {:.0} MB resident", resident as f64 / 1e6));
    let micros_all = hosts.ping(&draw(connections))?;
    let each = |after: u64, before: u64| after.saturating_sub(before) as f64 / (connections - few) as f64;
    Ok(Million {
        connections,
        per_second: (connections - few) as f64 / seconds,
        process: each(resident, resident_few),
        resident,
        tables: place.tables()? as f64 / place.room as f64,
        slab: each(slab, slab_few),
        checked: rounds,
        micros_few,
        micros_all,
    })
}

/// How many ends a table of descriptors holds, beside what every program has open.
fn raise_limit() -> Result<usize> {
    const OTHERS: u64 = 256;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok(usize::try_from(hard.saturating_sub(OTHERS).clamp(100, 200_000))?)
}

fn slab() -> Result<u64> {
    let info = fs::read_to_string("/proc/meminfo")?;
    Ok(number(&info, "Slab").ok_or("no Slab in /proc/meminfo")? * 1024)
}

/// splitmix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Addresses in the lab's two networks that nobody else has.
fn client_address(i: usize) -> IpAddr {
    Ipv4Addr::new(10, 77, 1, 100 + i as u8).into()
}

fn source_address(i: u8) -> IpAddr {
    Ipv4Addr::new(10, 77, 2, 100 + i).into()
}

/// Listener and server number `i`.
fn front(i: usize) -> SocketAddr {
    topology::FORWARDER_TO_CLIENT.port(Family::V4, PORT + i as u16)
}

fn server(i: usize) -> SocketAddr {
    topology::SERVER.port(Family::V4, PORT + i as u16)
}

/// The proxy in its network. Dropped in order.
struct Place {
    proxy: ChildGuard,
    pins: Pins,
    room: usize,
    control: std::path::PathBuf,
    lab: Lab,
    _dir: tempfile::TempDir,
}

impl Place {
    fn set(connections: usize) -> Result<Place> {
        let dir = tempfile::Builder::new().prefix("longsplice-bench-").tempdir()?;
        let lab = venue::lab(Packets::Large, false)?;
        for i in 0..connections.div_ceil(PER_CLIENT) {
            lab.client.execute("ip", &["addr", "add", &format!("{}/24", client_address(i)), "dev", "c0"])?;
        }
        for i in 0..SOURCES {
            let address = format!("{}/24", source_address(i));
            lab.forwarder.execute("ip", &["addr", "add", &address, "dev", lab.server_device()])?;
        }
        let pins = Pins::of(&lab)?;
        let room = connections + connections / 20 + FEW;
        let arguments = ["--splice", "at-once", "--max-flows", &room.to_string()];
        // tables for a million are zeroed first
        let proxy = run_longsplice(&lab, dir.path(), &configuration(connections), &arguments, PATIENCE * 3)?;
        Ok(Place { proxy, pins, room, control: control_socket(dir.path()), lab, _dir: dir })
    }

    /// Until nothing is in any other state.
    fn wait_released(&self) -> Result<()> {
        let mut control = Client::connect(Some(&self.control))?;
        let mut one = |state| -> Result<Option<String>> {
            let answer = control.ask(Ask::Ls { after: 0, limit: Some(1), state: Some(state) })?;
            Ok(answer.get("flows").and_then(|f| f.get(0)).map(ToString::to_string))
        };
        let mut last = None;
        let released = wait_for(LONG, || {
            for state in [FlowState::Copying, FlowState::Draining, FlowState::Spliced] {
                match one(state) {
                    Ok(None) => {}
                    Ok(flow) => {
                        last = flow;
                        return None;
                    }
                    Err(e) => return Some(Err(e)),
                }
            }
            Some(Ok(()))
        });
        released.unwrap_or_else(|| Err(format!("a flow was not released: {}", last.unwrap_or_default()).into()))
    }

    /// Bytes of all that is pinned, as the kernel accounts for them.
    fn tables(&self) -> Result<u64> {
        fs::read_dir(self.pins.folder())?.map(|entry| memlock(&entry?.path())).sum()
    }
}

/// None for what is no map.
fn memlock(pinned: &Path) -> Result<u64> {
    let Ok(map) = MapHandle::from_pinned_path(pinned) else { return Ok(0) };
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", map.as_fd().as_raw_fd()))?;
    Ok(number(&info, "memlock").unwrap_or(0))
}

fn configuration(connections: usize) -> String {
    let sources: Vec<String> = (0..SOURCES).map(|i| format!("\"{}\"", source_address(i))).collect();
    let mut text = format!("source_ports = \"1024-65535\"\nsource = [{}]\n", sources.join(", "));
    for i in 0..connections.div_ceil(PER_SERVER) {
        let _ = write!(
            text,
            "[[listener]]\nprotocol = \"plug\"\nlisten = \"{}\"\ntarget = \"{}\"\npolicy = {{ release_after = 0.001 }}\n\
             limits = {{ connections_per_client = {connections} }}\n",
            front(i),
            server(i)
        );
    }
    text
}

/// What an end is told: which connections to open, or to use.
#[derive(Clone)]
enum Order {
    Open(Range<usize>),
    Ping(Vec<usize>),
}

/// Both ends of as many connections as a table holds. The threads end, and close everything, when nobody can tell them
/// anything any more.
struct Pair {
    client: End,
    server: End,
}

struct Hosts<'a> {
    place: &'a Place,
    pairs: Vec<Pair>,
    per_table: usize,
    listeners: Arc<Vec<TcpListener>>,
    opened: Arc<AtomicUsize>,
}

impl Hosts<'_> {
    fn start(place: &Place, connections: usize, per_table: usize) -> Result<Hosts<'_>> {
        let servers = connections.div_ceil(PER_SERVER);
        let listeners: io::Result<Vec<TcpListener>> =
            place.lab.server.run(|| (0..servers).map(|i| TcpListener::bind(server(i))).collect());
        let listeners = Arc::new(listeners?);
        for l in listeners.iter() {
            l.set_nonblocking(true)?;
            endure(l)?; // what is accepted inherits it
        }
        Ok(Hosts { place, pairs: Vec::new(), per_table, listeners, opened: Arc::default() })
    }

    /// The threads for connections from this one on.
    fn pair(&self, base: usize) -> Pair {
        let (ends, opened) = (Vec::new(), self.opened.clone());
        let mut clients = Clients { base, ends, opened };
        let client = end(&self.place.lab.client, move |order| match order {
            Order::Open(range) => clients.open(range),
            Order::Ping(list) => clients.ping(&list),
        });
        let mut ends = Vec::new();
        ends.resize_with(self.per_table, || None);
        let mut servers = Servers { base, listeners: self.listeners.clone(), ends, opened: self.opened.clone() };
        let server = end(&self.place.lab.server, move |order| match order {
            Order::Open(range) => servers.accept(range.end),
            Order::Ping(list) => servers.echo(&list),
        });
        Pair { client, server }
    }

    /// One pair of threads after the other.
    fn open(&mut self, bench: &Bench, range: Range<usize>) -> Result<()> {
        let mut from = range.start;
        while from < range.end {
            bench.check()?;
            let i = from / self.per_table;
            if i == self.pairs.len() {
                self.pairs.push(self.pair(from));
                bench.say(&format!("million: {from} connections"));
            }
            let to = range.end.min((i + 1) * self.per_table);
            self.pairs[i].both(&Order::Open(from..to))?;
            from = to;
        }
        Ok(())
    }

    /// Microseconds of a round trip.
    fn ping(&mut self, list: &[usize]) -> Result<f64> {
        let mut seconds = 0.0;
        for (i, pair) in self.pairs.iter().enumerate() {
            let own: Vec<usize> = list.iter().copied().filter(|k| k / self.per_table == i).collect();
            seconds += pair.both(&Order::Ping(own))?;
        }
        Ok(seconds * 1e6 / list.len() as f64)
    }
}

impl Pair {
    /// Seconds that the client took.
    fn both(&self, order: &Order) -> Result<f64> {
        for (orders, _) in [&self.client, &self.server] {
            orders.send(order.clone()).map_err(|_| "a host is gone")?;
        }
        // if one fails, the other does soon
        let seconds = self.client.1.recv()??;
        self.server.1.recv()??;
        Ok(seconds)
    }
}

type End = (Sender<Order>, Receiver<std::result::Result<f64, String>>);

/// A thread in a namespace, with descriptors of its own; it answers each order with the seconds it took.
fn end(place: &longsplice_lab::Namespace, mut act: impl FnMut(Order) -> Result<()> + Send + 'static) -> End {
    let ((orders, told), (tell, done)) = (channel(), channel());
    place.spawn(move || {
        let own = unshare(CloneFlags::CLONE_FILES).map_err(|e| format!("descriptors of its own: {e}"));
        for order in told {
            let began = Instant::now();
            let result = own.clone().and_then(|()| act(order).map_err(|e| e.to_string()));
            if tell.send(result.map(|()| began.elapsed().as_secs_f64())).is_err() {
                return;
            }
        }
    });
    (orders, done)
}

/// No wait for ever, and no wait at the end: closing a million connections in order would take as long as opening them.
fn endure(s: &impl AsFd) -> Result<()> {
    setsockopt(s, sockopt::ReceiveTimeout, &TimeVal::seconds(PATIENCE.as_secs() as i64))?;
    setsockopt(s, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 })?;
    Ok(())
}

fn block(k: usize) -> [u8; BLOCK] {
    let mut state = k as u64;
    let mut block = [0; BLOCK];
    for word in block.chunks_exact_mut(8) {
        word.copy_from_slice(&random(&mut state).to_ne_bytes());
    }
    block
}

/// Reads what must be there.
fn expect(mut from: &TcpStream, k: usize) -> Result<()> {
    let mut got = [0; BLOCK];
    from.read_exact(&mut got).map_err(|e| format!("connection {k}: {e}"))?;
    if got == block(k) { Ok(()) } else { Err(format!("connection {k} has other bytes than were sent").into()) }
}

struct Clients {
    base: usize,
    ends: Vec<TcpStream>,
    opened: Arc<AtomicUsize>,
}

impl Clients {
    fn open(&mut self, range: Range<usize>) -> Result<()> {
        for k in range {
            let mut progress = (self.opened.load(Relaxed), Instant::now());
            while k > self.opened.load(Relaxed) + AHEAD {
                thread::sleep(Duration::from_millis(1));
                if progress.0 != self.opened.load(Relaxed) {
                    progress = (self.opened.load(Relaxed), Instant::now());
                } else if progress.1.elapsed() > PATIENCE {
                    return Err(
                        format!("nothing arrives at the server any more, after {} connections", progress.0).into()
                    );
                }
            }
            let local = SocketAddr::new(client_address(k / PER_CLIENT), FIRST_PORT + (k % PER_CLIENT) as u16);
            let s = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
            endure(&s)?;
            bind(s.as_raw_fd(), &SockaddrStorage::from(local))?;
            connect(s.as_raw_fd(), &SockaddrStorage::from(front(k / PER_SERVER)))
                .map_err(|e| format!("connection {k}: {e}"))?;
            let mut s = TcpStream::from(s);
            s.write_all(&(k as u64).to_ne_bytes())?;
            self.ends.push(s);
        }
        Ok(())
    }

    fn ping(&self, list: &[usize]) -> Result<()> {
        on_one_cpu(|| {
            for k in list {
                let mut s = &self.ends[k - self.base];
                s.write_all(&block(*k))?;
                expect(s, *k)?;
            }
            Ok(())
        })
    }
}

struct Servers {
    base: usize,
    listeners: Arc<Vec<TcpListener>>,
    ends: Vec<Option<TcpStream>>,
    opened: Arc<AtomicUsize>,
}

impl Servers {
    fn accept(&mut self, until: usize) -> Result<()> {
        let mut pending = VecDeque::new();
        while self.opened.load(Relaxed) < until {
            let mut ready: Vec<PollFd<'_>> =
                self.listeners.iter().map(|l| PollFd::new(l.as_fd(), PollFlags::POLLIN)).collect();
            let wait = if pending.is_empty() { PATIENCE } else { Duration::from_millis(1) };
            if poll(&mut ready, PollTimeout::try_from(wait)?)? == 0 && pending.is_empty() {
                return Err("no connection arrives at the server".into());
            }
            let mut came = false;
            for l in self.listeners.iter() {
                while let Ok((s, _)) = l.accept() {
                    came = true;
                    pending.push_back(s);
                }
            }
            // numbers of those that came a while ago are there by now
            while pending.len() > PENDING || (!came && !pending.is_empty()) {
                let Some(mut s) = pending.pop_front() else { break };
                let mut k = [0; 8];
                s.read_exact(&mut k).map_err(|e| format!("the number of a connection: {e}"))?;
                let k = usize::try_from(u64::from_ne_bytes(k))?.checked_sub(self.base);
                let place = k.and_then(|k| self.ends.get_mut(k));
                if place.ok_or("a number that no connection has")?.replace(s).is_some() {
                    return Err("two connections with one number".into());
                }
                self.opened.fetch_add(1, Relaxed);
            }
        }
        Ok(())
    }

    fn echo(&self, list: &[usize]) -> Result<()> {
        on_one_cpu(|| {
            for k in list {
                let s = self.ends[k - self.base].as_ref().ok_or("a connection that never came")?;
                expect(s, *k)?;
                let mut s = s;
                s.write_all(&block(*k))?;
            }
            Ok(())
        })
    }
}
