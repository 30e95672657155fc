//! Connections between hosts that do not know of us, and whose addresses we do not have. They shake hands with each other: we
//! pass their segments on, one by one, and make sockets for both sides as soon as all numbers are known. So everything is the
//! same on both sides, and spliced at once such a connection takes the identity path (bpf/path.h).

use crate::{Leg, Splicer, live::Live, sync::lock};
use longsplice_datapath::{Datapath, ExpectError, Foreign, Handshake, Segment, Tuple, foreign_sockets, is_local};
use nix::libc;
use socket2::SockRef;
use std::{
    collections::HashMap,
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::OwnedFd,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};
use tokio::sync::mpsc::{self, error::TrySendError};

/// Connections that are half open, of all listeners: a flood of SYNs takes no more than this, and two sockets for each that a server
/// answers. With more the oldest that nobody has answered is given up, and if all are answered, the new one is not even begun: they
/// go on without us, where this machine is a router.
const HALF_OPEN: usize = 1024;
/// How long they may be: as long as a server sends its SYN-ACK again (tcp_synack_retries).
const PATIENCE: Duration = Duration::from_secs(64);
/// Connections that wait to be accepted, for each listener; more are reset. As a listening socket's backlog.
const BACKLOG: usize = 4096;

/// May this client connect to this server?
type Allow = Box<dyn Fn(SocketAddr, SocketAddr) -> bool + Send>;

struct Acceptor {
    allow: Allow,
    pairs: mpsc::Sender<Pair>,
}

/// An open connection: the client's leg, and sockets for both.
struct Pair {
    client: Tuple,
    sockets: [OwnedFd; 2],
}

struct HalfOpen {
    since: Instant,
    /// The client's last.
    syn: Handshake,
    /// The server's answer, and what was made of it.
    answer: Option<(Handshake, [OwnedFd; 2])>,
}

/// What became of connections of others that were not opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ForeignCounts {
    /// SYNs that were not let pass, those to addresses of this machine among them.
    pub denied: u64,
    /// Half-open ones that were given up: there were more than 1024, and this was the oldest without an answer; or older
    /// than 64 s.
    pub given_up: u64,
    /// Passed on as by a router, and no more seen: 1024 were half open and answered, the tables full, or sockets not to be had.
    pub untracked: u64,
}

/// All that is not accepted yet.
#[derive(Default)]
pub(crate) struct TransparentFlows {
    /// Of IPv4 and IPv6.
    ways: [Option<Foreign>; 2],
    listeners: HashMap<SocketAddr, Acceptor>,
    /// By the client's leg.
    half: HashMap<Tuple, HalfOpen>,
    /// When they were looked through for old ones.
    looked: Option<Instant>,
    counts: ForeignCounts,
}

/// A listener to connections of others, which pass here ([`Splicer::listen_foreign`]).
pub struct ForeignListener {
    splicer: Splicer,
    addr: SocketAddr,
    pairs: mpsc::Receiver<Pair>,
}

impl ForeignListener {
    /// The legs of the next connection: its client's, and its server's. [`io::ErrorKind::NotConnected`]: the engine was closed.
    pub async fn accept(&mut self) -> io::Result<(Leg, Leg)> {
        let Pair { client, sockets: [c, s] } = self.pairs.recv().await.ok_or(io::ErrorKind::NotConnected)?;
        self.splicer.opened(&s);
        Ok((leg(c, &client)?, leg(s, &mirrored(&client))?))
    }

    /// The address listened to.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for ForeignListener {
    fn drop(&mut self) {
        lock(&self.splicer.inner.transparent).listeners.remove(&self.addr);
        if let Some(Err(error)) = self.splicer.datapath().map(|d| d.unlisten(self.addr)) {
            tracing::warn!(addr = %self.addr, %error, "connections are still taken");
        }
    }
}

fn leg(socket: OwnedFd, tuple: &Tuple) -> io::Result<Leg> {
    SockRef::from(&socket).set_tcp_nodelay(true)?;
    let mut leg = Leg::new(Live::new(socket)?, tuple.remote, tuple.local, None);
    leg.at.shimmed = true; // without its entry, no segment would find the socket
    Ok(leg)
}

/// The leg of the same connection towards the other host.
fn mirrored(leg: &Tuple) -> Tuple {
    Tuple { remote: leg.local, local: leg.remote }
}

impl Splicer {
    /// Takes part in connections of others to `addr`, or to any address and this port if it is unspecified, that come through this
    /// machine: nobody has to be told of us, and neither end sees us. What `allow` does not let pass (client, server) gets no
    /// answer; it is called by a thread that must not wait. A connection is accepted when its server has answered. Errors are
    /// those of raw sockets and of rules of routing, which need CAP_NET_RAW and CAP_NET_ADMIN; [`io::ErrorKind::Unsupported`]
    /// without a data path.
    pub fn listen_foreign(
        &self,
        addr: SocketAddr,
        allow: impl Fn(SocketAddr, SocketAddr) -> bool + Send + 'static,
    ) -> io::Result<ForeignListener> {
        let without = || io::Error::new(io::ErrorKind::Unsupported, "the kernel's packet path is needed for this");
        let d = self.datapath().ok_or_else(without)?;
        if addr.port() == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "connections of others have a port: name it"));
        }
        let mut transparent = lock(&self.inner.transparent);
        if transparent.listeners.contains_key(&addr) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let is_first = transparent.ways.iter().all(Option::is_none);
        let family = usize::from(addr.is_ipv6());
        if transparent.ways[family].is_none() {
            transparent.ways[family] = Some(Foreign::new(addr.is_ipv6()).map_err(|e| no_way(&e, addr))?);
        }
        if is_first {
            let engine = self.internal();
            std::thread::Builder::new().name("handshakes".into()).spawn(move || hear(&engine))?;
        }
        d.listen_foreign(addr)?;
        let (tell, pairs) = mpsc::channel(BACKLOG);
        transparent.listeners.insert(addr, Acceptor { allow: Box::new(allow), pairs: tell });
        Ok(ForeignListener { splicer: self.clone(), addr, pairs })
    }

    /// What became of those that were not opened.
    pub fn foreign_counts(&self) -> ForeignCounts {
        lock(&self.inner.transparent).counts
    }
}

fn no_way(e: &io::Error, addr: SocketAddr) -> io::Error {
    let cure = match e.raw_os_error() {
        Some(libc::EPERM) => "; CAP_NET_RAW and CAP_NET_ADMIN are needed",
        Some(libc::EACCES | libc::EAFNOSUPPORT) if addr.is_ipv6() => {
            "; is IPv6 disabled (net.ipv6.conf.lo.disable_ipv6)?"
        }
        _ => "",
    };
    io::Error::other(format!("raw sockets and routing: {e}{cure}"))
}

/// The thread: until the engine closes.
fn hear(splicer: &Splicer) {
    let Some(d) = splicer.datapath() else { return };
    let heard = d.poll_handshakes(|handshake| {
        let mut f = lock(&splicer.inner.transparent);
        match handshake {
            Some(h) => f.hear(splicer, d, h),
            None => f.look(d, Instant::now()),
        }
        !splicer.inner.stopping.load(Ordering::Relaxed)
    });
    if let Err(error) = heard {
        tracing::error!(%error, "connections of others cannot be heard of; they get no answer");
    }
}

impl TransparentFlows {
    /// At the end.
    pub fn leave(&mut self, d: Option<&Datapath>) {
        let half_open: Vec<Tuple> = self.half.keys().copied().collect();
        d.iter().for_each(|d| half_open.iter().for_each(|client| self.give_up(d, client)));
        *self = TransparentFlows::default();
    }

    fn hear(&mut self, splicer: &Splicer, d: &Datapath, h: Handshake) {
        tracing::trace!(?h);
        match h.segment {
            Some(Segment::Syn) => self.asked(splicer, d, h),
            Some(Segment::SynAck) => self.answered(d, h),
            Some(Segment::Reset) => self.refused(d, &h),
            Some(Segment::Ack) => self.opened(d, &h),
            None => {}
        }
    }

    fn pass_on(&self, h: &Handshake) {
        let way = &self.ways[usize::from(!h.leg.is_v4())];
        if let Some(Err(error)) = way.as_ref().map(|way| way.pass_on(h)) {
            tracing::debug!(?h, %error, "not passed on; it will come again");
        }
    }

    fn asked(&mut self, splicer: &Splicer, d: &Datapath, syn: Handshake) {
        let client = syn.leg;
        match self.half.get_mut(&client) {
            Some(half) if half.syn.seq() == syn.seq() => {
                // one of them is lost
                half.syn = syn;
                let next = half.answer.as_ref().map_or(syn, |(answer, _)| *answer);
                return self.pass_on(&next);
            }
            Some(_) => self.give_up(d, &client),
            None => {}
        }
        let target = client.local;
        // without a route it is passed on to nobody
        let is_ours = is_local(target.ip()).unwrap_or(false);
        if is_ours || !self.acceptor(target).is_some_and(|h| (h.allow)(client.remote, target)) {
            self.counts.denied += 1;
            return tracing::debug!(?client, is_ours, "not let pass");
        }
        if !self.has_room(d) {
            return self.let_go(d, &client, &syn);
        }
        let server = mirrored(&client);
        let expected = match d.expect_foreign(&server) {
            Err(ExpectError::Taken) if make_way(splicer, d, &server) => d.expect_foreign(&server),
            expected => expected,
        };
        match expected {
            Ok(()) => {}
            Err(ExpectError::Full { .. }) => return self.let_go(d, &client, &syn),
            Err(error) => return tracing::debug!(?client, %error, "no answer"),
        }
        [client, server].iter().for_each(|leg| splicer.inner.lingering.begins_anew(leg));
        self.half.insert(client, HalfOpen { since: Instant::now(), syn, answer: None });
        self.pass_on(&syn);
    }

    /// For one more that is half open.
    fn has_room(&mut self, d: &Datapath) -> bool {
        if self.half.len() < HALF_OPEN {
            return true;
        }
        let unanswered = self.half.iter().filter(|(_, half)| half.answer.is_none());
        let oldest = unanswered.min_by_key(|(_, half)| half.since).map(|(client, _)| *client);
        oldest.iter().for_each(|client| self.give_up(d, client));
        oldest.is_some()
    }

    /// What a router does. The hosts shake hands without us; `next` is the segment that is on its way.
    fn let_go(&mut self, d: &Datapath, client: &Tuple, next: &Handshake) {
        self.counts.untracked += 1;
        d.let_go_foreign(client);
        self.pass_on(next);
    }

    fn acceptor(&self, target: SocketAddr) -> Option<&Acceptor> {
        let any = if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        self.listeners.get(&target).or_else(|| self.listeners.get(&SocketAddr::new(any, target.port())))
    }

    /// The half-open connection that a segment of its server belongs to.
    fn asked_by(&mut self, h: &Handshake) -> Option<&mut HalfOpen> {
        let half = self.half.get_mut(&mirrored(&h.leg))?;
        (half.answer.is_none() && h.ack() == half.syn.seq().wrapping_add(1)).then_some(half)
    }

    fn answered(&mut self, d: &Datapath, answer: Handshake) {
        match self.half.get(&mirrored(&answer.leg)) {
            None => return self.pass_on(&answer), // given up just before
            // the client has not got it, or the server has not heard so
            Some(HalfOpen { answer: Some((first, _)), .. }) if first.repeats(&answer) => return self.pass_on(&answer),
            Some(_) => {}
        }
        let Some(half) = self.asked_by(&answer) else { return };
        match foreign_sockets(&half.syn, &answer) {
            Ok(sockets) => {
                half.answer = Some((answer, sockets));
                self.pass_on(&answer);
            }
            Err(error) => {
                tracing::warn!(leg = ?answer.leg, %error, "no sockets for a connection; its hosts go on without us");
                let client = mirrored(&answer.leg);
                self.half.remove(&client);
                d.forget(&answer.leg);
                self.let_go(d, &client, &answer);
            }
        }
    }

    /// By the server, or the client does not want it any more.
    fn refused(&mut self, d: &Datapath, h: &Handshake) {
        let is_of_an_earlier = |half: &HalfOpen| half.answer.is_none() && h.seq() != half.syn.seq().wrapping_add(1);
        if self.half.get(&h.leg).is_some_and(is_of_an_earlier) {
            return self.pass_on(h);
        }
        if let Some(half) = self.half.remove(&h.leg) {
            self.pass_on(h);
            half.answer.into_iter().for_each(|(_, sockets)| reset(sockets));
            d.forget_flow([&h.leg, &mirrored(&h.leg)]);
        } else if self.asked_by(h).is_some() {
            let client = mirrored(&h.leg);
            self.half.remove(&client);
            d.forget(&h.leg);
            d.let_go_foreign(&client); // or it would not be told
            self.pass_on(h);
        }
    }

    fn opened(&mut self, d: &Datapath, ack: &Handshake) {
        // The server has an earlier connection from this port. The client resets that one, if it hears of it, and its SYN comes again.
        if self.half.get(&mirrored(&ack.leg)).is_some_and(|half| half.answer.is_none()) {
            return self.pass_on(ack);
        }
        let client = ack.leg;
        let Some(HalfOpen { answer: Some((_, sockets)), .. }) = self.half.remove(&client) else {
            return d.forget(&client); // given up just before
        };
        self.pass_on(ack);
        let pair = Pair { client, sockets };
        let left = match self.acceptor(client.local) {
            Some(acceptor) => acceptor.pairs.try_send(pair).map_err(TrySendError::into_inner).err(),
            None => Some(pair),
        };
        if let Some(Pair { sockets, .. }) = left {
            reset(sockets);
            d.forget_flow([&client, &mirrored(&client)]);
        }
    }

    /// Gives up those that are too old, once a second.
    fn look(&mut self, d: &Datapath, now: Instant) {
        if self.looked.is_some_and(|at| now < at + Duration::from_secs(1)) {
            return;
        }
        self.looked = Some(now);
        let old: Vec<Tuple> =
            self.half.iter().filter(|(_, half)| now >= half.since + PATIENCE).map(|(client, _)| *client).collect();
        old.iter().for_each(|client| self.give_up(d, client));
    }

    /// What its hosts say later is no longer for us: if nobody has answered yet, they may go on without.
    fn give_up(&mut self, d: &Datapath, client: &Tuple) {
        if let Some(half) = self.half.remove(client) {
            self.counts.given_up += 1;
            d.let_go_foreign(client);
            half.answer.into_iter().for_each(|(_, sockets)| reset(sockets));
            d.forget_flow([client, &mirrored(client)]);
        }
    }
}

/// A client that has no leg sends a SYN, and its server's leg is still there: the connection is over, or its process died before the
/// client had completed the handshake. Is the leg gone?
fn make_way(splicer: &Splicer, d: &Datapath, server: &Tuple) -> bool {
    match splicer.inner.lingering.make_way(server) {
        Some((a, b)) => {
            d.forget_ended(&a, b.as_ref());
            true
        }
        None => !splicer.inner.is_routed(server) && d.forget_unopened(server),
    }
}

/// Both hosts hear of it.
fn reset(sockets: [OwnedFd; 2]) {
    for socket in &sockets {
        // one that is gone already cannot be reset any more
        let _ = SockRef::from(socket).set_linger(Some(Duration::ZERO));
    }
}
