//! Transparent connections: connections between two hosts that do not know of us, and whose addresses
//! are not ours. The hosts shake hands with each other. We forward their segments one by one, and
//! create sockets for both sides as soon as all numbers are known. Numbers are therefore the same on
//! both sides, and a connection that is spliced at once takes the identity path (bpf/path.h).

use crate::{engine::Engine, sync::lock};
use longsplice_datapath::{Datapath, ExpectError, Foreign, Handshake, Pair, Segment, Tuple, foreign_sockets, is_local};
use nix::libc;
use socket2::SockRef;
use std::{
    collections::HashMap,
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::OwnedFd,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::sync::mpsc::{self, error::TrySendError};

/// Maximum number of half-open connections of all listeners. It bounds what a flood of SYNs takes: an entry
/// each, and two sockets for each that a server answers. At the limit, the oldest unanswered connection is given
/// up. If all are answered, the new one is not tracked, and goes on without us where this machine is a router.
const HALF_OPEN: usize = 1024;
/// Maximum age of a half-open connection: as long as a server repeats its SYN-ACK (tcp_synack_retries).
const PATIENCE: Duration = Duration::from_secs(64);
/// Maximum number of connections that wait to be accepted, for each
/// listener, like the backlog of a listening socket. More are reset.
const BACKLOG: usize = 4096;

/// Decides whether this client may connect to this server.
pub(crate) type Allow = Box<dyn Fn(SocketAddr, SocketAddr) -> bool + Send>;

struct Acceptor {
    allow: Allow,
    opened: mpsc::Sender<Opened>,
}

/// An open connection: the client's leg, and the sockets of both legs.
pub(crate) struct Opened {
    pub client: Tuple,
    pub sockets: Pair<OwnedFd>,
}

struct HalfOpen {
    since: Instant,
    /// The client's last SYN.
    syn: Handshake,
    /// The server's SYN-ACK, and the sockets made from it.
    answer: Option<(Handshake, Pair<OwnedFd>)>,
}

/// Counters of transparent connections that were not opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ForeignCounts {
    /// SYNs that were not forwarded, including those to addresses of this machine.
    pub denied: u64,
    /// Half-open connections that were given up: the oldest without an
    /// answer when there were more than 1024, and those older than 64 s.
    pub given_up: u64,
    /// Connections that were forwarded as by a router, but not tracked: 1024 others were
    /// half open and answered, the tables were full, or sockets could not be created.
    pub untracked: u64,
}

/// All connections that are not accepted yet.
#[derive(Default)]
pub(crate) struct TransparentFlows {
    /// Raw sockets and routing rules for IPv4 and IPv6.
    ways: [Option<Foreign>; 2],
    listeners: HashMap<SocketAddr, Acceptor>,
    /// Half-open connections by the client's leg.
    half: HashMap<Tuple, HalfOpen>,
    /// When old half-open connections were last looked for.
    looked: Option<Instant>,
    counts: ForeignCounts,
}

/// Returns the other host's leg of the same connection.
pub(crate) fn mirrored(leg: &Tuple) -> Tuple {
    Tuple { remote: leg.local, local: leg.remote }
}

/// Begins to take connections to `addr`. Returns where those that are open arrive. The first call starts the thread.
pub(crate) fn listen(
    all: &Arc<Mutex<TransparentFlows>>,
    engine: &Arc<Engine>,
    d: &Datapath,
    addr: SocketAddr,
    allow: Allow,
) -> io::Result<mpsc::Receiver<Opened>> {
    let mut transparent = lock(all);
    if transparent.listeners.contains_key(&addr) {
        return Err(io::ErrorKind::AddrInUse.into());
    }
    let is_first = transparent.ways.iter().all(Option::is_none);
    let family = usize::from(addr.is_ipv6());
    if transparent.ways[family].is_none() {
        transparent.ways[family] = Some(Foreign::new(addr.is_ipv6()).map_err(|e| no_way(&e, addr))?);
    }
    if is_first {
        let (engine, all) = (engine.clone(), all.clone());
        std::thread::Builder::new().name("handshakes".into()).spawn(move || hear(&engine, &all))?;
    }
    d.listen_foreign(addr)?;
    let (tell, opened) = mpsc::channel(BACKLOG);
    transparent.listeners.insert(addr, Acceptor { allow, opened: tell });
    Ok(opened)
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

/// Runs the thread that handles handshakes, until the engine closes.
fn hear(engine: &Engine, transparent: &Mutex<TransparentFlows>) {
    let Some(d) = engine.datapath() else { return };
    let heard = d.poll_handshakes(|handshake| {
        let mut f = lock(transparent);
        match handshake {
            Some(h) => f.hear(engine, d, h),
            None => f.look(d, Instant::now()),
        }
        !engine.is_closing()
    });
    if let Err(error) = heard {
        tracing::error!(%error, "connections of others cannot be heard of; they get no answer");
    }
}

impl TransparentFlows {
    pub fn counts(&self) -> ForeignCounts {
        self.counts
    }

    /// Takes no more connections to `addr`.
    pub fn unlisten(&mut self, addr: SocketAddr) {
        self.listeners.remove(&addr);
    }

    /// Gives up all half-open connections when the engine closes.
    pub fn leave(&mut self, d: Option<&Datapath>) {
        let half_open: Vec<Tuple> = self.half.keys().copied().collect();
        d.iter().for_each(|d| half_open.iter().for_each(|client| self.give_up(d, client)));
        *self = TransparentFlows::default();
    }

    fn hear(&mut self, engine: &Engine, d: &Datapath, h: Handshake) {
        tracing::trace!(?h);
        match h.segment {
            Some(Segment::Syn) => self.asked(engine, d, h),
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

    fn asked(&mut self, engine: &Engine, d: &Datapath, syn: Handshake) {
        let client = syn.leg;
        match self.half.get_mut(&client) {
            Some(half) if half.syn.seq() == syn.seq() => {
                // one of the two segments was lost
                half.syn = syn;
                let next = half.answer.as_ref().map_or(syn, |(answer, _)| *answer);
                return self.pass_on(&next);
            }
            Some(_) => self.give_up(d, &client),
            None => {}
        }
        let target = client.local;
        // without a route, the segment goes nowhere
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
            Err(ExpectError::Taken) if make_way(engine, d, &server) => d.expect_foreign(&server),
            expected => expected,
        };
        match expected {
            Ok(()) => {}
            Err(ExpectError::Full { .. }) => return self.let_go(d, &client, &syn),
            Err(error) => return tracing::debug!(?client, %error, "no answer"),
        }
        [client, server].iter().for_each(|leg| engine.lingering.begins_anew(leg));
        self.half.insert(client, HalfOpen { since: Instant::now(), syn, answer: None });
        self.pass_on(&syn);
    }

    /// Makes room for one more half-open connection. Returns false if there is none.
    fn has_room(&mut self, d: &Datapath) -> bool {
        if self.half.len() < HALF_OPEN {
            return true;
        }
        let unanswered = self.half.iter().filter(|(_, half)| half.answer.is_none());
        let oldest = unanswered.min_by_key(|(_, half)| half.since).map(|(client, _)| *client);
        oldest.iter().for_each(|client| self.give_up(d, client));
        oldest.is_some()
    }

    /// Lets a connection go on untracked, as a router does. The hosts shake hands without us. `next` is the segment on its way.
    fn let_go(&mut self, d: &Datapath, client: &Tuple, next: &Handshake) {
        self.counts.untracked += 1;
        d.let_go_foreign(client);
        self.pass_on(next);
    }

    fn acceptor(&self, target: SocketAddr) -> Option<&Acceptor> {
        let any = if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        self.listeners.get(&target).or_else(|| self.listeners.get(&SocketAddr::new(any, target.port())))
    }

    /// Returns the unanswered half-open connection that a segment of its server belongs to.
    fn asked_by(&mut self, h: &Handshake) -> Option<&mut HalfOpen> {
        let half = self.half.get_mut(&mirrored(&h.leg))?;
        (half.answer.is_none() && h.ack() == half.syn.seq().wrapping_add(1)).then_some(half)
    }

    fn answered(&mut self, d: &Datapath, answer: Handshake) {
        match self.half.get(&mirrored(&answer.leg)) {
            None => return self.pass_on(&answer), // given up just before
            // a repeated SYN-ACK: the client has not received it, or its answer was lost
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

    /// Handles a reset: the server refuses the connection, or the client gives it up.
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
            d.let_go_foreign(&client); // otherwise the client would not get the reset
            self.pass_on(h);
        }
    }

    fn opened(&mut self, d: &Datapath, ack: &Handshake) {
        // The server still has an earlier connection from this port. The client
        // resets that one when it sees this segment, and then repeats its SYN.
        if self.half.get(&mirrored(&ack.leg)).is_some_and(|half| half.answer.is_none()) {
            return self.pass_on(ack);
        }
        let client = ack.leg;
        let Some(HalfOpen { answer: Some((_, sockets)), .. }) = self.half.remove(&client) else {
            return d.forget(&client); // given up just before
        };
        self.pass_on(ack);
        let opened = Opened { client, sockets };
        let left = match self.acceptor(client.local) {
            Some(acceptor) => acceptor.opened.try_send(opened).map_err(TrySendError::into_inner).err(),
            None => Some(opened),
        };
        if let Some(Opened { sockets, .. }) = left {
            reset(sockets);
            d.forget_flow([&client, &mirrored(&client)]);
        }
    }

    /// Gives up half-open connections that are too old. Looks once a second.
    fn look(&mut self, d: &Datapath, now: Instant) {
        if self.looked.is_some_and(|at| now < at + Duration::from_secs(1)) {
            return;
        }
        self.looked = Some(now);
        let old: Vec<Tuple> =
            self.half.iter().filter(|(_, half)| now >= half.since + PATIENCE).map(|(client, _)| *client).collect();
        old.iter().for_each(|client| self.give_up(d, client));
    }

    /// Gives up a half-open connection. Later segments of its hosts are not
    /// for us: if the server has not answered yet, they go on without us.
    fn give_up(&mut self, d: &Datapath, client: &Tuple) {
        if let Some(half) = self.half.remove(client) {
            self.counts.given_up += 1;
            d.let_go_foreign(client);
            half.answer.into_iter().for_each(|(_, sockets)| reset(sockets));
            d.forget_flow([client, &mirrored(client)]);
        }
    }
}

/// Removes the server's leg of an earlier connection, when a client without a leg sends a SYN. The earlier connection
/// is over, or its process died before the client had completed the handshake. Returns whether the leg is gone.
fn make_way(engine: &Engine, d: &Datapath, server: &Tuple) -> bool {
    match engine.lingering.make_way(server) {
        Some((a, b)) => {
            d.forget_ended(&a, b.as_ref());
            true
        }
        None => !engine.is_routed(server) && d.forget_unopened(server),
    }
}

/// Resets the connections to both hosts.
fn reset(sockets: Pair<OwnedFd>) {
    for socket in sockets.iter() {
        // a socket that is gone cannot be reset
        let _ = SockRef::from(socket).set_linger(Some(Duration::ZERO));
    }
}
