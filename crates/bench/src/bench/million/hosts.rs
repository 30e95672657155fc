//! The threads at both ends of a million connections.
//!
//! A single table of descriptors cannot hold that many ends: each group of connections
//! has its own client and server threads (`Pair`), each with a table of its own.

use super::{
    super::{Bench, Result},
    ends::{BACKLOG, Clients, Servers, endure},
    venue::{PER_SERVER, Venue, server},
};
use longsplice_lab::Namespace;
use nix::{
    sched::{CloneFlags, unshare},
    sys::socket::{Backlog, listen},
};
use std::{
    io,
    net::TcpListener,
    ops::Range,
    sync::{
        Arc,
        atomic::AtomicUsize,
        mpsc::{Receiver, Sender, channel},
    },
    time::Instant,
};

/// An order to an end: which connections to open, or to use.
#[derive(Clone)]
enum Order {
    Open(Range<usize>),
    Ping(Vec<usize>),
}

/// Both ends of a group of connections. The threads close everything and exit when their orders can no longer come.
struct Pair {
    client: End,
    server: End,
}

/// All ends of both hosts.
pub struct Hosts<'a> {
    venue: &'a Venue,
    pairs: Vec<Pair>,
    per_table: usize,
    listeners: Arc<Vec<TcpListener>>,
    opened: Arc<AtomicUsize>,
}

impl Hosts<'_> {
    /// Starts the listeners only; threads are started with the connections.
    pub fn start(venue: &Venue, connections: usize, per_table: usize) -> Result<Hosts<'_>> {
        let servers = connections.div_ceil(PER_SERVER);
        let listeners: io::Result<Vec<TcpListener>> =
            venue.lab.server.run(|| (0..servers).map(|i| TcpListener::bind(server(i))).collect());
        let listeners = Arc::new(listeners?);
        for l in listeners.iter() {
            l.set_nonblocking(true)?;
            endure(l)?; // accepted sockets inherit it
            listen(l, Backlog::new(BACKLOG)?)?;
        }
        Ok(Hosts { venue, pairs: Vec::new(), per_table, listeners, opened: Arc::default() })
    }

    /// Starts the threads for connections from `base` on.
    fn pair(&self, base: usize) -> Pair {
        let (ends, opened) = (Vec::new(), self.opened.clone());
        let mut clients = Clients { base, ends, opened };
        let client = end(&self.venue.lab.client, move |order| match order {
            Order::Open(range) => clients.open(range),
            Order::Ping(list) => clients.ping(&list),
        });
        let mut ends = Vec::new();
        ends.resize_with(self.per_table, || None);
        let mut servers = Servers { base, listeners: self.listeners.clone(), ends, opened: self.opened.clone() };
        let server = end(&self.venue.lab.server, move |order| match order {
            Order::Open(range) => servers.accept(range.end),
            Order::Ping(list) => servers.echo(&list),
        });
        Pair { client, server }
    }

    /// Opens connections with one pair of threads after another.
    pub fn open(&mut self, bench: &Bench, range: Range<usize>) -> Result<()> {
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

    /// Measures round trips. Returns the average in microseconds.
    pub fn ping(&mut self, list: &[usize]) -> Result<f64> {
        let mut seconds = 0.0;
        for (i, pair) in self.pairs.iter().enumerate() {
            let own: Vec<usize> = list.iter().copied().filter(|k| k / self.per_table == i).collect();
            seconds += pair.both(&Order::Ping(own))?;
        }
        Ok(seconds * 1e6 / list.len() as f64)
    }
}

impl Pair {
    /// Sends an order to both ends. Returns the seconds that the client took.
    fn both(&self, order: &Order) -> Result<f64> {
        for (orders, _) in [&self.client, &self.server] {
            orders.send(order.clone()).map_err(|_| "a host is gone")?;
        }
        // if one fails, the other soon fails, too
        let seconds = self.client.1.recv()??;
        self.server.1.recv()??;
        Ok(seconds)
    }
}

type End = (Sender<Order>, Receiver<std::result::Result<f64, String>>);

/// Starts a thread in a namespace with its own descriptor table. It answers each order with the seconds it took.
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
