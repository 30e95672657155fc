//! A million simultaneous connections, all spliced and released: the memory of each, whether they still carry data, and the
//! cost of a look-up among so many. Every wait has a time limit.

use super::{
    Bench, Result,
    machine::number,
    memory::resident,
    network::{PATIENCE, Packets, lab},
    results::{Figure, Line, Section},
    segment::on_one_cpu,
    variant::Variant,
    venue::{OURS, Venue},
};
use longsplice::{Ask, Which};
use longsplice_datapath::map_size;
use longsplice_engine::FlowState;
use longsplice_lab::{Family, Namespace, process::wait_for, topology};
use nix::{
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CloneFlags, unshare},
    sys::{
        resource::{Resource, getrlimit},
        socket::{
            AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, connect, listen, setsockopt, socket,
            sockopt,
        },
        time::{TimeVal, TimeValLike},
    },
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{
    collections::VecDeque,
    fs, io,
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    ops::Range,
    os::fd::{AsFd, AsRawFd},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc::{Receiver, Sender, channel},
    },
    time::{Duration, Instant},
};

/// Number of connections opened first: look-ups among a million are
/// compared with look-ups among these. Memory is measured from here on.
const FEW: usize = 1000;
/// Descriptors that the program has beside those of the connections.
const OTHERS: u64 = 256;
/// Maximum number of connections in a group: between two groups, there is a look for an interrupt.
const GROUP: u64 = 50_000;
/// Ports used per client address, and the first of them.
const PER_CLIENT: usize = 50_000;
const FIRST_PORT: u16 = 10_000;
/// Connections to one port of the server, from all source addresses: fewer than these have ports.
const PER_SERVER: usize = 200_000;
const SOURCES: u8 = 4;
/// First port of listeners and servers.
const PORT: u16 = 7000;
/// Connections that may wait in the server's accept queue: the kernel's default limit.
const BACKLOG: i32 = 4096;
/// Connections by which the client may be ahead of the server: few enough
/// that no SYN is dropped, since a retransmission would take seconds.
const AHEAD: usize = 1000;
/// Connections accepted and not yet read from.
const PENDING: usize = 256;
/// Time limit for waits that involve a list of a million flows.
const LONG: Duration = Duration::from_secs(120);

/// Opens the connections in two steps, and measures.
pub fn measure(bench: &Bench<'_>) -> Result<()> {
    let connections = bench.args.connections as usize;
    let venue = venue(connections)?;
    let few = FEW.min(connections / 2);
    let rounds = (connections / 100).max(100);
    let mut ends = Ends::listen(bench, &venue, connections)?;
    let mut dice = SmallRng::seed_from_u64(1);
    let mut draw = |n: usize| (0..rounds).map(|_| dice.random_range(0..n)).collect::<Vec<_>>();
    ends.open(0..few)?;
    wait_released(&venue)?;
    ends.ping(&draw(few))?; // warms everything up
    let micros_few = ends.ping(&draw(few))?;
    let (resident_few, slab_few) = (held(&venue), slab()?);

    let began = Instant::now();
    ends.open(few..connections)?;
    let seconds = began.elapsed().as_secs_f64();
    wait_released(&venue)?;
    let (resident, slab) = (held(&venue), slab()?);
    let micros_all = ends.ping(&draw(connections))?;
    let each = |after: f64, before: f64| (after - before).max(0.0) / (connections - few) as f64;
    let rows = [
        ("connections", connections as f64),
        ("opened per second, hosts included", (connections - few) as f64 / seconds),
        ("resident in the process, bytes per connection", each(resident, resident_few)),
        ("resident in the process, MB", resident / 1e6),
        ("tables of the data path, bytes per flow", tables(&venue)? as f64 / venue.ends as f64),
        ("kernel memory of both hosts' sockets, bytes per connection", each(slab, slab_few)),
        ("of them drawn at random, with all bytes right", rounds as f64),
        ("round trip, drawn from the first few, microseconds on one CPU", micros_few),
        ("round trip, drawn from all, microseconds on one CPU", micros_all),
    ];
    let line = |(row, n)| Line::of(Section::Million, row, Variant::Released, [(Figure::Value, Some(n))]);
    bench.results().lines.extend(rows.map(line));
    Ok(())
}

/// The proxy in its network. Its ends are the number of flows that fit in its tables.
type Many = Venue<usize>;

fn venue(connections: usize) -> Result<Many> {
    let mut venue = Venue::new(Variant::Released, lab(Packets::Large, false)?)?;
    let forwarder = venue.lab.forwarder.clone();
    for i in 0..connections.div_ceil(PER_CLIENT) {
        venue.lab.client.execute("ip", &["addr", "add", &format!("{}/24", client_address(i)), "dev", "c0"])?;
    }
    let sources: Vec<String> = (0..SOURCES).map(|i| format!("10.77.2.{}", 100 + i)).collect();
    for source in &sources {
        forwarder.execute("ip", &["addr", "add", &format!("{source}/24"), "dev", venue.lab.server_device()])?;
    }
    let mut config = format!("source_ports = \"1024-65535\"\nsource = {:?}\n", sources);
    for i in 0..connections.div_ceil(PER_SERVER) {
        config += &format!(
            "[[listener]]\nprotocol = \"plug\"\nlisten = \"{}\"\ntarget = \"{}\"\npolicy = {{ release_after = 0.001 }}\n\
             limits = {{ connections_per_client = {connections} }}\n",
            front(i),
            server(i)
        );
    }
    let room = connections + connections / 20 + FEW;
    venue.longsplice(&forwarder, OURS, &config, &["--splice", "at-once", "--max-flows", &room.to_string()])?;
    Ok(venue.with(room))
}

/// An otherwise unused client address in the lab's network.
fn client_address(i: usize) -> IpAddr {
    Ipv4Addr::new(10, 77, 1, 100 + i as u8).into()
}

/// Address of listener and server number `i`.
fn front(i: usize) -> SocketAddr {
    topology::FORWARDER_TO_CLIENT.port(Family::V4, PORT + i as u16)
}

fn server(i: usize) -> SocketAddr {
    topology::SERVER.port(Family::V4, PORT + i as u16)
}

/// Waits until all flows are released.
fn wait_released(venue: &Many) -> Result<()> {
    let mut control = venue.control(OURS)?;
    let mut one = |state| -> Result<Option<String>> {
        let answer = control.ask(Ask::Ls { after: 0, limit: Some(1), state: Some(state), which: Which::default() })?;
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

/// Bytes of all pinned maps, as accounted for by the kernel.
fn tables(venue: &Many) -> Result<u64> {
    // pins that are not maps are links, which take next to nothing
    fs::read_dir(venue.pinned())?.map(|entry| Ok(map_size(&entry?.path()).map_or(0, |size| size.bytes))).sum()
}

fn held(venue: &Many) -> f64 {
    venue.pid().map_or(0.0, resident)
}

fn slab() -> Result<f64> {
    let info = fs::read_to_string("/proc/meminfo")?;
    Ok(number(&info, "Slab").ok_or("no Slab in /proc/meminfo")? as f64 * 1024.0)
}

/// An order to one end of a group: which connections to open, or to pass bytes over.
#[derive(Clone)]
enum Order {
    Open(Range<usize>),
    Ping(Vec<usize>),
}

/// One end of a group: a thread that closes its connections when its orders can no longer come. It answers each with the seconds
/// that it took.
type End = (Sender<Order>, Receiver<std::result::Result<f64, String>>);

/// Both ends of all connections, in groups. Each end of a group has a table of descriptors of its own: there is a limit for each
/// table, which not every root may raise.
struct Ends<'a> {
    bench: &'a Bench<'a>,
    venue: &'a Many,
    listeners: Arc<Vec<TcpListener>>,
    /// Number of connections accepted.
    accepted: Arc<AtomicUsize>,
    groups: Vec<[End; 2]>,
    /// Number of connections in a group.
    room: usize,
}

impl Ends<'_> {
    /// Starts the listeners.
    fn listen<'a>(bench: &'a Bench<'a>, venue: &'a Many, connections: usize) -> Result<Ends<'a>> {
        let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE)?;
        let room = usize::try_from(limit.saturating_sub(OTHERS).clamp(100, GROUP))?;
        let servers = connections.div_ceil(PER_SERVER);
        let listeners: io::Result<Vec<TcpListener>> =
            venue.lab.server.run(|| (0..servers).map(|i| TcpListener::bind(server(i))).collect());
        let listeners = Arc::new(listeners?);
        for l in listeners.iter() {
            l.set_nonblocking(true)?;
            endure(l)?; // accepted sockets inherit it
            listen(l, Backlog::new(BACKLOG)?)?;
        }
        Ok(Ends { bench, venue, listeners, accepted: Arc::default(), groups: Vec::new(), room })
    }

    /// Starts both ends of the next group.
    fn group(&self) -> [End; 2] {
        let (base, room, lab) = (self.groups.len() * self.room, self.room, &self.venue.lab);
        let (listeners, accepted) = (self.listeners.clone(), self.accepted.clone());
        let (mut clients, until) = (Vec::new(), accepted.clone());
        let client = end(&lab.client, move |order| match order {
            Order::Open(mut range) => range.try_for_each(|k| {
                clients.push(open(k, &until)?);
                Ok(())
            }),
            Order::Ping(list) => on_one_cpu(|| {
                list.iter().try_for_each(|k| {
                    let mut s: &TcpStream = clients.get(k - base).ok_or("a connection that was not opened")?;
                    s.write_all(&block(*k))?;
                    expect(s, *k)
                })
            }),
        });
        let mut servers: Vec<Option<TcpStream>> = (0..room).map(|_| None).collect();
        let server = end(&lab.server, move |order| match order {
            Order::Open(range) => accept(&listeners, base, &mut servers, range.end, &accepted),
            Order::Ping(list) => on_one_cpu(|| {
                list.iter().try_for_each(|k| {
                    let mut s = servers[k - base].as_ref().ok_or("a connection that never came")?;
                    expect(s, *k)?;
                    Ok(s.write_all(&block(*k))?)
                })
            }),
        });
        [client, server]
    }

    /// Gives both ends of a group an order. Returns the seconds that the client took.
    fn both(&self, group: usize, order: &Order) -> Result<f64> {
        let [client, server] = &self.groups[group];
        for (orders, _) in [client, server] {
            orders.send(order.clone()).map_err(|_| "a host is gone")?;
        }
        // If one fails, the other soon fails, too.
        let seconds = client.1.recv()??;
        server.1.recv()??;
        Ok(seconds)
    }

    /// Opens connections, one group after another.
    fn open(&mut self, range: Range<usize>) -> Result<()> {
        let mut from = range.start;
        while from < range.end {
            self.bench.check()?;
            let group = from / self.room;
            if group == self.groups.len() {
                self.bench.say(&format!("million: {from} connections"));
                self.groups.push(self.group());
            }
            let to = range.end.min((group + 1) * self.room);
            self.both(group, &Order::Open(from..to))?;
            from = to;
        }
        Ok(())
    }

    /// Measures round trips over these connections. Returns the average in microseconds.
    fn ping(&self, list: &[usize]) -> Result<f64> {
        let mut seconds = 0.0;
        for group in 0..self.groups.len() {
            let own = list.iter().copied().filter(|k| k / self.room == group).collect();
            seconds += self.both(group, &Order::Ping(own))?;
        }
        Ok(seconds * 1e6 / list.len() as f64)
    }
}

/// Starts an end in a namespace.
fn end(host: &Namespace, mut act: impl FnMut(Order) -> Result<()> + Send + 'static) -> End {
    let ((orders, told), (tell, done)) = (channel(), channel());
    host.spawn(move || {
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

/// Opens a connection, once the server is not too far behind. Must be called in the client's namespace.
fn open(k: usize, accepted: &AtomicUsize) -> Result<TcpStream> {
    let behind = || (k <= accepted.load(Relaxed) + AHEAD).then_some(());
    if behind().is_none() {
        wait_for(PATIENCE, behind)
            .ok_or_else(|| format!("the server has only {} connections", accepted.load(Relaxed)))?;
    }
    let local = SocketAddr::new(client_address(k / PER_CLIENT), FIRST_PORT + (k % PER_CLIENT) as u16);
    let s = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    endure(&s)?;
    bind(s.as_raw_fd(), &SockaddrStorage::from(local))?;
    connect(s.as_raw_fd(), &SockaddrStorage::from(front(k / PER_SERVER)))
        .map_err(|e| format!("connection {k}: {e}"))?;
    let mut s = TcpStream::from(s);
    s.write_all(&(k as u64).to_ne_bytes())?;
    Ok(s)
}

/// Accepts connections up to this number, of which the first has number `base`.
fn accept(
    listeners: &[TcpListener],
    base: usize,
    ends: &mut [Option<TcpStream>],
    until: usize,
    accepted: &AtomicUsize,
) -> Result<()> {
    let mut pending = VecDeque::new();
    while accepted.load(Relaxed) < until {
        let mut ready: Vec<PollFd<'_>> = listeners.iter().map(|l| PollFd::new(l.as_fd(), PollFlags::POLLIN)).collect();
        let wait = if pending.is_empty() { PATIENCE } else { Duration::from_millis(1) };
        if poll(&mut ready, PollTimeout::try_from(wait)?)? == 0 && pending.is_empty() {
            return Err("no connection arrives at the server".into());
        }
        let before = pending.len();
        for l in listeners {
            pending.extend(std::iter::from_fn(|| l.accept().ok()).map(|(s, _)| s));
        }
        // the numbers of older connections have arrived by now
        let keep = if pending.len() > before { PENDING } else { 0 };
        while pending.len() > keep {
            let Some(mut s) = pending.pop_front() else { break };
            let mut k = [0; 8];
            s.read_exact(&mut k).map_err(|e| format!("the number of a connection: {e}"))?;
            let place = ends.get_mut(usize::try_from(u64::from_ne_bytes(k))?.wrapping_sub(base));
            if place.ok_or("a number that no connection has")?.replace(s).is_some() {
                return Err("two connections with one number".into());
            }
            accepted.fetch_add(1, Relaxed);
        }
    }
    Ok(())
}

/// Sets a time limit for reads, and makes close send a reset: closing
/// a million connections in order would take as long as opening them.
fn endure(s: &impl AsFd) -> Result<()> {
    setsockopt(s, sockopt::ReceiveTimeout, &TimeVal::seconds(PATIENCE.as_secs() as i64))?;
    setsockopt(s, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 })?;
    Ok(())
}

/// What a connection carries in a round trip.
fn block(k: usize) -> [u8; 64] {
    let mut block = [0; 64];
    longsplice_lab::pattern::fill(k as u64, 0, &mut block);
    block
}

/// Reads data that must be there.
fn expect(mut from: &TcpStream, k: usize) -> Result<()> {
    let mut got = [0; 64];
    from.read_exact(&mut got).map_err(|e| format!("connection {k}: {e}"))?;
    if got == block(k) { Ok(()) } else { Err(format!("connection {k} has other bytes than were sent").into()) }
}
