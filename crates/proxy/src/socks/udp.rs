//! UDP ASSOCIATE (RFC 1928, section 7): datagrams between a client and its destinations.
//!
//! # An association
//! One socket faces the client, on the address at which it has reached the proxy, and one per address family faces the
//! destinations. It takes datagrams
//! - from the client that asked: from its address, and from the port that it has announced or that sent first;
//! - to destinations that the rules allow, asked again each second;
//! - back from destinations that were addressed ([`Replies`]).
//!
//! All others are dropped and counted. It ends with the client's TCP connection, after [`Udp::idle_limit`] without a datagram,
//! or with the program. One task serves it; nothing is queued but by the kernel, save datagrams to a name that is looked up.

use super::{
    SocksRequest,
    batch::{self, Buffers, Outgoing, Received, Sender, Sent},
    datagram::{self, DatagramError, Header},
    names::{Named, Names},
};
use crate::{
    access::Subject,
    commands::{Replies, Udp},
    context::{Front, ServerContext},
    counters::Counters,
    fault::Fault,
    log::access_log::{Datagrams, Record},
    target::{Host, Target},
};
use longsplice_engine::{EndReason, Leg};
use std::{
    cell::RefCell,
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, atomic::AtomicU64, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, Interest},
    net::UdpSocket,
    task::yield_now,
    time::sleep_until,
};

/// Time for which the rules are not asked again about a destination: as long as an address may be ours without our knowing.
const CHECKED_FOR: Duration = Duration::from_secs(1);
/// Bytes that a client may send on the TCP connection of an association, where nothing is expected.
const CHATTER: usize = 4096;

thread_local! {
    static BUFFERS: RefCell<Option<Buffers>> = const { RefCell::new(None) };
}

/// Runs `work` with the thread's buffers.
fn with_buffers<T>(work: impl FnOnce(&mut Buffers) -> T) -> T {
    BUFFERS.with_borrow_mut(|buffers| work(buffers.get_or_insert_with(Buffers::new)))
}

/// What an association shares with look-ups, and what judges destinations.
#[derive(Clone)]
struct Judge {
    shared: Arc<ServerContext>,
    front: Arc<Front>,
    client: IpAddr,
    user: Option<Arc<str>>,
}

impl Judge {
    fn subject(&self) -> Subject<'_> {
        Subject::by(self.client).of(self.user.as_deref())
    }

    /// Whether the rules allow datagrams to this address of the target.
    fn allows(&self, target: &Target, address: SocketAddr) -> bool {
        let rules = &self.front.listener.rules;
        rules.check_here(&self.subject(), target, address).is_ok() && !self.shared.relays.leads_back(address)
    }
}

/// An address that datagrams were sent to, or might have been.
#[derive(Debug, Clone, Copy)]
struct Destination {
    /// Whether it is allowed as it is, without a name, and when that was found out.
    as_address: Option<(bool, Instant)>,
    /// Whether something was allowed to be sent there, so that an answer may come.
    addressed: bool,
    used: Instant,
}

/// What a datagram's destination is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Allowed,
    Denied,
}

/// The addresses that a client has addressed, at most as many as the configuration says.
struct Destinations {
    all: HashMap<SocketAddr, Destination>,
    most: usize,
}

impl Destinations {
    fn new(most: u32) -> Destinations {
        Destinations { all: HashMap::new(), most: most as usize }
    }

    /// Returns whether datagrams may go there. `allows` is asked about addresses that were not judged lately, and about each
    /// datagram to a name: rules may allow a name, and not its address.
    fn judge(&mut self, to: SocketAddr, now: Instant, named: bool, allows: impl FnOnce() -> bool) -> Verdict {
        if self.all.len() >= self.most && !self.all.contains_key(&to) {
            self.make_room();
        }
        let known = self.all.entry(to).or_insert(Destination { as_address: None, addressed: false, used: now });
        let allowed = match known.as_address {
            Some((allowed, checked)) if !named && now.saturating_duration_since(checked) < CHECKED_FOR => allowed,
            _ => {
                let allowed = allows();
                known.as_address = if named { known.as_address } else { Some((allowed, now)) };
                allowed
            }
        };
        known.used = now;
        known.addressed |= allowed;
        if allowed { Verdict::Allowed } else { Verdict::Denied }
    }

    /// Removes those that were never allowed, and, if that is not enough, the eighth that was not used for the longest time: so
    /// many at once that a flood of new ones does not pay for a search with each.
    fn make_room(&mut self) {
        let keep = self.most - (self.most / 8).max(1);
        self.all.retain(|_, known| known.addressed);
        if self.all.len() > keep {
            let mut used: Vec<Instant> = self.all.values().map(|known| known.used).collect();
            let (_, last, _) = used.select_nth_unstable(self.all.len() - keep - 1);
            let last = *last;
            self.all.retain(|_, known| known.used > last);
        }
    }

    /// Returns whether a datagram from there is a reply.
    fn answers(&mut self, from: SocketAddr, replies: Replies, now: Instant) -> bool {
        match self.all.get_mut(&from) {
            Some(known) if known.addressed => {
                known.used = now;
                true
            }
            _ if replies == Replies::Host => self.all.iter().any(|(known, of)| known.ip() == from.ip() && of.addressed),
            _ => false,
        }
    }
}

/// The sockets that face destinations, one for each family; opened when they are needed.
#[derive(Default)]
struct Outside {
    v4: Option<UdpSocket>,
    v6: Option<UdpSocket>,
}

impl Outside {
    fn of(&mut self, to: SocketAddr, shared: &ServerContext) -> io::Result<&UdpSocket> {
        let socket = if to.is_ipv4() { &mut self.v4 } else { &mut self.v6 };
        if socket.is_none() {
            let any = if to.is_ipv4() { SocketAddr::from(([0; 4], 0)) } else { SocketAddr::from(([0; 16], 0)) };
            let at = shared.splicer.named_source(to)?.map_or(any, |ip| SocketAddr::new(ip, 0));
            *socket = Some(UdpSocket::from_std(batch::open(at)?)?);
        }
        socket.as_ref().ok_or_else(|| io::Error::other("it was just opened"))
    }
}

/// Receives a batch. Returns whether more may wait. If not, the socket counts as empty: a call that would find nothing is spared.
fn hear<'b>(socket: &UdpSocket, buffers: &'b mut Buffers) -> io::Result<(Vec<Received<'b>>, bool)> {
    let mut heard = None;
    let into = &mut heard;
    let tried = socket.try_io(Interest::READABLE, move || {
        let (received, more) = batch::receive(socket, buffers)?;
        *into = Some((received, more));
        if more { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    });
    heard.ok_or_else(|| tried.err().unwrap_or_else(|| io::ErrorKind::WouldBlock.into()))
}

/// Waits until a socket, if there is one, may have datagrams.
async fn readable(socket: Option<&UdpSocket>) -> io::Result<()> {
    match socket {
        Some(socket) => socket.readable().await,
        None => std::future::pending().await,
    }
}

/// An association, from the answer to the request on.
pub(super) struct Association {
    judge: Judge,
    config: Udp,
    /// Faces the client. Connected to it, once its port is known.
    inside: UdpSocket,
    /// The client's port, once it is known.
    port: Option<u16>,
    connected: bool,
    outside: Outside,
    destinations: Destinations,
    names: Names,
    senders: (Sender, Sender),
    counts: Datagrams,
    bytes: (u64, u64),
    used: Instant,
    _entered: crate::context::relays::Entered,
}

impl Association {
    /// Opens the socket that faces the client.
    pub fn open(
        (shared, front): (&Arc<ServerContext>, &Arc<Front>),
        config: &Udp,
        client: &Leg,
        request: &SocksRequest,
    ) -> io::Result<Association> {
        let inside = super::ports::within(config.ports, client.local(), batch::open)?;
        let entered = shared.relays.enter(inside.local_addr()?.port());
        let client = client.source().ip().to_canonical();
        let judge = Judge {
            shared: shared.clone(),
            front: front.clone(),
            client,
            user: request.user.as_deref().map(Arc::from),
        };
        Ok(Association {
            judge,
            config: *config,
            inside: UdpSocket::from_std(inside)?,
            port: datagram::announced_port(&request.target, client),
            connected: false,
            outside: Outside::default(),
            destinations: Destinations::new(config.destinations),
            names: Names::default(),
            senders: Default::default(),
            counts: Datagrams::default(),
            bytes: (0, 0),
            used: Instant::now(),
            _entered: entered,
        })
    }

    /// Returns the address to which the client sends its datagrams.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.inside.local_addr()
    }

    /// Relays until the association ends, and fills in its record.
    pub async fn run(mut self, client: &mut Leg, record: &mut Record) {
        let how = self.relay(client).await;
        record.how = how.map_or_else(|(how, _)| how, EndReason::as_str);
        record.refusal = how.err().map(|(_, why)| why.into());
        (record.bytes_up, record.bytes_down) = self.bytes;
        record.datagrams = Some(self.counts);
    }

    async fn relay(&mut self, client: &mut Leg) -> Result<EndReason, (&'static str, &'static str)> {
        let shared = self.judge.shared.clone();
        let (mut chatter, mut heard) = ([0; 256], 0);
        let stopped = shared.splicer.stopped();
        tokio::pin!(stopped);
        loop {
            let idle = self.used + self.config.idle_limit;
            tokio::select! {
                read = client.read(&mut chatter) => match read {
                    Ok(0) => return Ok(EndReason::Closed),
                    Ok(n) if heard + n <= CHATTER => heard += n,
                    Ok(_) => {
                        let why = "data on the TCP connection of an association";
                        shared.counters.fault(&Fault::BadRequest(why.into()));
                        return Err(("bad-request", why));
                    }
                    Err(_) => return Ok(EndReason::ClientReset),
                },
                () = &mut stopped => return Ok(EndReason::Stopped),
                () = sleep_until(idle.into()) => if self.used.elapsed() >= self.config.idle_limit {
                    return Ok(EndReason::Idle);
                },
                // errors of readiness are those of a runtime that ends
                Ok(()) = self.inside.readable() => self.hear_client().await,
                Ok(()) = readable(self.outside.v4.as_ref()) => self.hear_outside(true).await,
                Ok(()) = readable(self.outside.v6.as_ref()) => self.hear_outside(false).await,
                Some(found) = self.names.found() => self.resolved(found),
            }
        }
    }

    /// Passes on what the client has sent: one batch. Others of this thread get their turn after it.
    async fn hear_client(&mut self) {
        let more = with_buffers(|buffers| {
            let (received, more) = hear(&self.inside, buffers)?;
            self.upward(&received);
            Ok::<_, io::Error>(more)
        });
        if more.is_ok_and(|more| more) {
            yield_now().await;
        }
        // an error is one of an earlier datagram that the client did not take, or there is nothing
    }

    fn upward(&mut self, received: &[Received<'_>]) {
        let now = Instant::now();
        let mut ready: (Vec<Outgoing<'_>>, Vec<Outgoing<'_>>) = Default::default();
        let mut last: Option<(SocketAddr, Verdict)> = None;
        for datagram in received {
            if !self.is_of_client(datagram.source) {
                Counters::add(&self.judge.shared.counters.udp_strangers);
                continue;
            }
            let (target, at) = match datagram::parse(datagram.bytes) {
                Ok(parsed) => parsed,
                Err(DatagramError::Fragment(_)) => {
                    self.drop_up(1, |c| &c.udp_fragments);
                    continue;
                }
                Err(_) => {
                    self.drop_up(1, |c| &c.udp_malformed);
                    continue;
                }
            };
            self.pin(datagram.source);
            self.used = now;
            let data = &datagram.bytes[at..];
            let to = match self.names.address(&target, now) {
                Named::Address(to) => to,
                Named::Unknown => {
                    self.look_up(target, data, now);
                    continue;
                }
                Named::No => {
                    self.drop_up(1, |c| &c.udp_unreachable);
                    continue;
                }
            };
            let named = matches!(target.host, Host::Name(_));
            let verdict = match last {
                Some((same, verdict)) if same == to && !named => verdict,
                _ => {
                    let judge = &self.judge;
                    self.destinations.judge(to, now, named, || judge.allows(&target, to))
                }
            };
            last = (!named).then_some((to, verdict));
            match verdict {
                Verdict::Allowed => {
                    let of = if to.is_ipv4() { &mut ready.0 } else { &mut ready.1 };
                    of.push(Outgoing { to: Some(to), header: &[], data });
                }
                Verdict::Denied => self.drop_up(1, |c| &c.udp_denied),
            }
        }
        self.send_up(&ready.0);
        self.send_up(&ready.1);
    }

    /// Sends datagrams of one family to their destinations.
    fn send_up(&mut self, ready: &[Outgoing<'_>]) {
        let Some(to) = ready.first().and_then(|first| first.to) else { return };
        let sent = match self.outside.of(to, &self.judge.shared) {
            Ok(socket) => self.senders.0.send(socket, ready),
            // no descriptor, or no such family
            Err(_) => Sent { dropped: ready.len() as u64, ..Sent::default() },
        };
        self.counts.up += sent.datagrams;
        self.bytes.0 += sent.bytes;
        self.judge.shared.counters.udp_up.fetch_add(sent.datagrams, Relaxed);
        self.drop_up(sent.dropped, |c| &c.udp_dropped);
    }

    /// Counts datagrams of the client that go nowhere.
    fn drop_up(&mut self, count: u64, why: impl FnOnce(&Counters) -> &AtomicU64) {
        self.counts.dropped += count;
        why(&self.judge.shared.counters).fetch_add(count, Relaxed);
    }

    fn is_of_client(&self, source: SocketAddr) -> bool {
        source.ip().to_canonical() == self.judge.client && self.port.is_none_or(|port| port == source.port())
    }

    /// The client has sent from there: nobody else is listened to from now on, and replies go there.
    fn pin(&mut self, source: SocketAddr) {
        if self.connected {
            return;
        }
        self.port = Some(source.port());
        // Without this, each datagram is checked by us as before, and replies have no address: it cannot fail for an address
        // from which a datagram has come, unless the system is out of memory.
        self.connected = socket2::SockRef::from(&self.inside).connect(&source.into()).is_ok();
    }

    /// Passes on replies: one batch.
    async fn hear_outside(&mut self, v4: bool) {
        let more = with_buffers(|buffers| {
            let socket = if v4 { self.outside.v4.as_ref() } else { self.outside.v6.as_ref() };
            let socket = socket.ok_or(io::ErrorKind::NotConnected)?;
            let (received, more) = hear(socket, buffers)?;
            self.downward(&received);
            Ok::<_, io::Error>(more)
        });
        if more.is_ok_and(|more| more) {
            yield_now().await;
        }
    }

    fn downward(&mut self, received: &[Received<'_>]) {
        let now = Instant::now();
        let mut headers: Vec<(SocketAddr, bool, Header)> = Vec::new();
        let mut of = Vec::with_capacity(received.len());
        for datagram in received {
            if headers.last().is_none_or(|(source, ..)| *source != datagram.source) {
                let source = datagram.source;
                let answers = self.connected && self.is_reply(source, now);
                headers.push((source, answers, Header::new(source)));
            }
            of.push(headers.len() - 1);
        }
        let mut ready = Vec::with_capacity(received.len());
        let mut unasked = 0;
        for (datagram, number) in received.iter().zip(of) {
            match &headers[number] {
                (_, true, header) => {
                    ready.push(Outgoing { to: None, header: header.as_bytes(), data: datagram.bytes });
                }
                _ => unasked += 1,
            }
        }
        let counters = &self.judge.shared.counters;
        counters.udp_unasked.fetch_add(unasked, Relaxed);
        if ready.is_empty() {
            return;
        }
        self.used = now;
        let sent = self.senders.1.send(&self.inside, &ready);
        self.counts.down += sent.datagrams;
        self.counts.dropped += sent.dropped;
        self.bytes.1 += sent.bytes;
        counters.udp_down.fetch_add(sent.datagrams, Relaxed);
        counters.udp_dropped.fetch_add(sent.dropped, Relaxed);
    }

    fn is_reply(&mut self, source: SocketAddr, now: Instant) -> bool {
        self.destinations.answers(source, self.config.replies, now)
            || (self.config.replies == Replies::Any && self.judge.allows(&source.into(), source))
    }

    /// Keeps a datagram until its name is looked up.
    fn look_up(&mut self, target: Target, data: &[u8], now: Instant) {
        let Judge { shared, front, .. } = &self.judge;
        // A name that is denied whatever its addresses is not looked up.
        if front.listener.rules.check_name_here(&self.judge.subject(), &target).is_err() {
            return self.drop_up(1, |c| &c.udp_denied);
        }
        let ask = (shared.resolver.clone(), front.listener.limits.resolve);
        if !self.names.look_up(target, data, ask, now) {
            self.drop_up(1, |c| &c.udp_dropped);
        }
    }

    /// Sends what has waited for a name.
    fn resolved(&mut self, found: super::names::Found) {
        let (judge, now) = (self.judge.clone(), Instant::now());
        let (target, addresses) = found;
        let is_empty = addresses.is_empty();
        let allowed: Vec<SocketAddr> = addresses.into_iter().filter(|a| judge.allows(&target, *a)).collect();
        let to = allowed.iter().copied().find(|a| is_routed(*a)).or(allowed.first().copied());
        let waiting = self.names.settle(&target, to, now);
        let count = waiting.len() as u64;
        let Some(to) = to else {
            return match is_empty {
                true => self.drop_up(count, |c| &c.udp_unreachable),
                false => self.drop_up(count, |c| &c.udp_denied),
            };
        };
        match self.destinations.judge(to, now, true, || true) {
            Verdict::Allowed => {
                let outgoing = |data| Outgoing { to: Some(to), header: &[], data };
                let ready: Vec<Outgoing<'_>> = waiting.iter().map(|data| outgoing(data)).collect();
                self.send_up(&ready);
            }
            Verdict::Denied => self.drop_up(count, |c| &c.udp_denied),
        }
    }
}

/// Whether the kernel knows a way there.
fn is_routed(to: SocketAddr) -> bool {
    let any = if to.is_ipv4() { SocketAddr::from(([0; 4], 0)) } else { SocketAddr::from(([0; 16], 0)) };
    std::net::UdpSocket::bind(any).and_then(|socket| socket.connect(to)).is_ok()
}

#[cfg(test)]
#[path = "udp_tests.rs"]
mod tests;
