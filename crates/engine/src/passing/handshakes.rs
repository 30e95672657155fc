//! Handshakes between hosts, end to end: we forward their segments one by one, and create sockets for both sides
//! as soon as all numbers are known. Numbers are therefore the same on both legs. There are two kinds of connections:
//! transparent ones, between hosts that do not know of us, and whose addresses are not ours; and those of clients of a
//! listening socket to a server of our choice. If a transparent one is spliced at once, it takes the identity path (bpf/path.h).

use crate::{engine::Engine, passing::holding::FirstData, sync::lock};
use longsplice_datapath::{
    Connection, Datapath, EndToEnd, ExpectError, Handshake, HandshakeSender, Pair, Repair, Segment, TransparentRoutes,
    Tuple, established_sockets, is_claimed, is_local, without_record,
};
use nix::libc;
use socket2::{Domain, SockRef, Socket, Type};
use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::sync::mpsc::{self, error::TrySendError};

/// Maximum number of half-open connections of all listeners. It bounds what a flood of SYNs takes: an entry
/// each, and two sockets for each that a server answers. At the limit, a listening socket serves its clients itself. A
/// transparent connection takes the place of the oldest unanswered one. If all are answered, it is not tracked, and
/// goes on without us where this machine is a router.
const HALF_OPEN: usize = 1024;
/// Maximum age of a half-open connection: as long as a server repeats its SYN-ACK (tcp_synack_retries).
const PATIENCE: Duration = Duration::from_secs(64);
/// How long a segment waits for the end of an earlier connection with the same addresses. That connection is over, and its flow
/// has been told, so this takes a millisecond or two. After a second, the segment is sent again.
const LATE: Duration = Duration::from_secs(1);
/// When such a segment is tried again for the first time. Later, when it has waited half as long again.
const FIRST_TRY: Duration = Duration::from_millis(1);
/// The time between two looks at what waits.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Maximum number of connections that wait to be accepted, for each
/// listener, like the backlog of a listening socket. More are reset.
const BACKLOG: usize = 4096;

/// Decides whether this client may connect to this server.
pub(crate) type Allow = Box<dyn Fn(SocketAddr, SocketAddr) -> bool + Send>;

/// Chooses the server for this client. `None`: the listening socket serves the client.
pub(crate) type Choose = Box<dyn Fn(SocketAddr) -> Option<SocketAddr> + Send>;

/// Is told of this client's handshake with this server, which has failed.
pub(crate) type Lost = Box<dyn Fn(SocketAddr, SocketAddr, io::Error) + Send>;

/// Where the connections of a listener lead.
pub(crate) enum Course {
    /// To their own destination: they are transparent.
    Transparent(Allow),
    /// From a listening socket to a server, from an address of ours.
    Chosen(Choose, Lost),
}

impl Course {
    fn is_transparent(&self) -> bool {
        matches!(self, Course::Transparent(_))
    }
}

struct Acceptor {
    course: Course,
    /// The first data of connections is held.
    holds: bool,
    opened: mpsc::Sender<Opened>,
}

/// An open connection: both legs, and their sockets.
pub(crate) struct Opened {
    /// As the data path named them during the handshake: the client may use its port again before the connection is accepted. The
    /// client's leg may have no record.
    pub legs: Pair<Connection>,
    pub sockets: Pair<OwnedFd>,
    pub first: Option<Box<FirstData>>,
}

/// The server's SYN-ACK, and what is made from it.
struct Answer {
    segment: Handshake,
    sockets: Pair<OwnedFd>,
    first: Option<Box<FirstData>>,
}

impl Answer {
    /// Creates the sockets, and begins to hold the first data if `holds`.
    fn of(engine: &Arc<Engine>, half: &HalfOpen, segment: Handshake, holds: bool) -> io::Result<Answer> {
        let sockets = established_sockets(&half.syn, &segment, half.transparent)?;
        let legs = Pair::new(half.syn.leg, segment.leg);
        let first = holds.then(|| FirstData::of(engine, legs).map(Box::new)).transpose();
        match first {
            Ok(first) => Ok(Answer { segment, sockets, first }),
            Err(error) => {
                reset(sockets);
                Err(error)
            }
        }
    }
}

struct HalfOpen {
    since: Instant,
    /// The server's leg, with the record that was made for this handshake.
    server: Connection,
    /// It is transparent: our addresses on both legs are not ours.
    transparent: bool,
    /// The client's last SYN.
    syn: Handshake,
    answer: Option<Answer>,
}

impl HalfOpen {
    /// Returns whether the client's segment acknowledges the server's answer to its SYN, and not that to an earlier one.
    fn is_completed_by(&self, ack: &Handshake) -> bool {
        self.answer.as_ref().is_some_and(|answer| ack.ack() == answer.segment.seq().wrapping_add(1))
    }
}

struct Late {
    /// When it arrived.
    since: Instant,
    /// When it is tried again.
    due: Instant,
    segment: Handshake,
}

/// Counters of connections that were not opened from host to host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransparentCounts {
    /// SYNs that were not forwarded, including those to addresses of this machine.
    pub denied: u64,
    /// Half-open connections that were given up: the oldest without an
    /// answer when there were more than 1024, and those older than 64 s.
    pub given_up: u64,
    /// Connections that were forwarded as by a router, but not tracked: 1024 others were
    /// half open and answered, the tables were full, or sockets could not be created.
    pub untracked: u64,
    /// Clients that were left to their listening socket ([`Splicer::end_to_end`](crate::Splicer::end_to_end)): no server
    /// was chosen, it has another address family or is on this machine, or there was no room or no free port.
    pub left: u64,
}

/// Means to take part in handshakes of one address family.
struct Way {
    sender: HandshakeSender,
    /// Routing rules, if there is a listener for transparent connections.
    transparent: Option<TransparentRoutes>,
}

/// All connections that are not accepted yet.
#[derive(Default)]
pub(crate) struct Handshakes {
    /// There is a thread for them.
    hears: bool,
    /// For IPv4 and IPv6.
    ways: [Option<Way>; 2],
    listeners: HashMap<SocketAddr, Acceptor>,
    /// Half-open connections by the client's leg.
    half: HashMap<Tuple, HalfOpen>,
    /// The client's leg by the server's.
    clients: HashMap<Tuple, Tuple>,
    /// When old half-open connections were last looked for.
    looked: Option<Instant>,
    /// Segments that wait for the end of an earlier connection with the same addresses.
    late: Vec<Late>,
    /// None begins: SYNs are left to be sent again.
    paused: bool,
    counts: TransparentCounts,
}

/// Returns the other host's leg of the same transparent connection.
fn mirrored(leg: &Tuple) -> Tuple {
    Tuple { remote: leg.local, local: leg.remote }
}

/// Begins to take connections to `addr`. Returns where those that are open arrive. The first call starts the thread.
pub(crate) fn listen(
    all: &Arc<Mutex<Handshakes>>,
    engine: &Arc<Engine>,
    d: &Datapath,
    addr: SocketAddr,
    course: Course,
) -> io::Result<mpsc::Receiver<Opened>> {
    let mut handshakes = lock(all);
    if handshakes.listeners.contains_key(&addr) {
        return Err(io::ErrorKind::AddrInUse.into());
    }
    let transparent = course.is_transparent();
    handshakes.make_way(addr.is_ipv6(), transparent).map_err(|e| no_way(&e, addr.is_ipv6()))?;
    if !handshakes.hears {
        let (engine, all) = (engine.clone(), all.clone());
        std::thread::Builder::new().name("handshakes".into()).spawn(move || hear(&engine, &all))?;
        handshakes.hears = true;
    }
    hear_syns(d, addr, transparent, false)?;
    let (tell, opened) = mpsc::channel(BACKLOG);
    handshakes.listeners.insert(addr, Acceptor { course, holds: false, opened: tell });
    Ok(opened)
}

fn hear_syns(d: &Datapath, addr: SocketAddr, transparent: bool, holds: bool) -> io::Result<()> {
    if transparent { d.listen_transparent(addr, holds) } else { d.listen_end_to_end(addr, holds) }
}

fn no_way(e: &io::Error, v6: bool) -> io::Error {
    let cure = match e.raw_os_error() {
        Some(libc::EPERM) => "; CAP_NET_RAW and CAP_NET_ADMIN are needed",
        Some(libc::EACCES | libc::EAFNOSUPPORT) if v6 => "; is IPv6 disabled (net.ipv6.conf.lo.disable_ipv6)?",
        _ => "",
    };
    io::Error::other(format!("raw sockets and routing: {e}{cure}"))
}

/// Returns whether an address belongs to this machine, or whether nobody knows, for example for want of descriptors.
/// What has no route does not: its segments go nowhere.
fn may_be_ours(ip: IpAddr) -> bool {
    const NO_ROUTE: [i32; 4] = [libc::ENETUNREACH, libc::EHOSTUNREACH, libc::EACCES, libc::EINVAL];
    is_local(ip).unwrap_or_else(|e| !e.raw_os_error().is_some_and(|errno| NO_ROUTE.contains(&errno)))
}

/// Runs the thread that handles handshakes, until the engine closes.
fn hear(engine: &Arc<Engine>, handshakes: &Mutex<Handshakes>) {
    let Some(d) = engine.datapath() else { return };
    let heard = d.poll_handshakes(|handshake| {
        let mut f = lock(handshakes);
        match handshake {
            Some(h) => f.hear(engine, d, h),
            None => {
                f.hear_late(engine, d, Instant::now());
                f.look(d, Instant::now());
            }
        }
        (!engine.is_closing()).then(|| f.rest())
    });
    if let Err(error) = heard {
        tracing::error!(%error, "cannot read handshakes of transparent and end-to-end connections: new ones time out");
    }
}

impl Handshakes {
    pub fn counts(&self) -> TransparentCounts {
        self.counts
    }

    /// Begins no more handshakes, or again.
    pub fn pause(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Returns whether no connection is half open.
    pub fn are_over(&self) -> bool {
        self.half.is_empty()
    }

    fn make_way(&mut self, v6: bool, transparent: bool) -> io::Result<()> {
        let way = &mut self.ways[usize::from(v6)];
        let way = match way.take() {
            Some(known) => way.insert(known),
            None => way.insert(Way { sender: HandshakeSender::new(v6)?, transparent: None }),
        };
        if transparent && way.transparent.is_none() {
            way.transparent = Some(TransparentRoutes::new(v6)?);
        }
        Ok(())
    }

    /// Holds the first data of connections to `addr` from now on.
    pub fn hold_first_data(&mut self, d: &Datapath, addr: SocketAddr) -> io::Result<()> {
        let acceptor = self.listeners.get_mut(&addr).ok_or(io::ErrorKind::NotConnected)?;
        // first here: what the data path holds must have somebody who releases it
        acceptor.holds = true;
        hear_syns(d, addr, acceptor.course.is_transparent(), true)
    }

    /// Routes segments for addresses that are not ours to local sockets, until the engine closes.
    pub fn route_transparent(&mut self, v6: bool) -> io::Result<()> {
        self.make_way(v6, true).map_err(|e| no_way(&e, v6))
    }

    /// Takes no more connections to `addr`.
    pub fn unlisten(&mut self, addr: SocketAddr) {
        self.listeners.remove(&addr);
    }

    /// Gives up all half-open connections when the engine closes.
    pub fn leave(&mut self, d: Option<&Datapath>) {
        let half_open: Vec<Tuple> = self.half.keys().copied().collect();
        for (d, client) in d.iter().flat_map(|d| half_open.iter().map(move |client| (d, client))) {
            self.give_up(d, client);
            d.forget(client); // nobody will hear that it has completed its handshake
        }
        *self = Handshakes::default();
    }

    /// The same, but segments for addresses that are not ours are routed to local sockets on: those of another process.
    pub fn hand_over(&mut self, d: Option<&Datapath>) {
        let routes = self.ways.iter_mut().flatten().filter_map(|way| way.transparent.take());
        routes.for_each(TransparentRoutes::let_go);
        self.leave(d);
    }

    fn hear(&mut self, engine: &Arc<Engine>, d: &Datapath, h: Handshake) {
        tracing::trace!(?h);
        // It replaces an earlier one, which its host has repeated or given up. That one would begin another connection later.
        self.late.retain(|late| late.segment.leg != h.leg || late.segment.segment != h.segment);
        match h.segment {
            Some(Segment::Syn) if self.paused => {}
            Some(Segment::Syn) => self.asked(engine, d, h, Instant::now()),
            Some(Segment::SynAck) => self.answered(engine, d, h, Instant::now()),
            Some(Segment::Reset) => self.refused(d, &h),
            Some(Segment::Ack) => self.opened(engine, d, &h),
            None => {}
        }
    }

    /// Puts a segment off until the flow of an earlier connection has ended. `since`: the first attempt.
    fn put_off(&mut self, segment: Handshake, since: Instant) {
        let waited = since.elapsed();
        if waited < LATE && self.late.len() < HALF_OPEN {
            let due = Instant::now() + (waited / 2).max(FIRST_TRY);
            self.late.push(Late { since, due, segment });
        } else {
            tracing::debug!(?segment, "its addresses are still in use; it will come again");
        }
    }

    /// Returns the time until something has to be tried again, or looked at.
    fn rest(&self) -> Duration {
        let due = self.late.iter().map(|late| late.due).min();
        due.map_or(LOOK_EVERY, |due| due.saturating_duration_since(Instant::now()).clamp(FIRST_TRY, LOOK_EVERY))
    }

    fn hear_late(&mut self, engine: &Arc<Engine>, d: &Datapath, now: Instant) {
        if self.paused {
            return;
        }
        let late = std::mem::take(&mut self.late);
        let (due, early): (Vec<_>, _) = late.into_iter().partition(|late| late.due <= now);
        self.late = early;
        for Late { since, segment, .. } in due {
            match segment.segment {
                Some(Segment::Syn) if !self.half.contains_key(&segment.leg) => self.asked(engine, d, segment, since),
                Some(Segment::SynAck) => self.answered(engine, d, segment, since),
                _ => {} // it has come again meanwhile
            }
        }
    }

    fn sender(&self, leg: &Tuple) -> Option<&HandshakeSender> {
        self.ways[usize::from(!leg.is_v4())].as_ref().map(|way| &way.sender)
    }

    /// Passes a segment on to the host of `out`.
    fn pass_on(&self, h: &Handshake, out: &Tuple) {
        if let Some(Err(error)) = self.sender(&h.leg).map(|sender| sender.pass_on(h, out)) {
            tracing::debug!(?h, %error, "not passed on; it will come again");
        }
    }

    /// Gives a SYN of a client back: its listening socket answers it.
    pub fn give_back(&self, syn: &Handshake) {
        if let Some(Err(error)) = self.sender(&syn.leg).map(|sender| sender.give_back(syn)) {
            tracing::debug!(?syn, %error, "not given back; it will come again");
        }
    }

    /// Refuses a client's segment in the name of its destination.
    pub fn refuse(&self, segment: &Handshake) {
        if let Some(Err(error)) = self.sender(&segment.leg).map(|sender| sender.refuse(segment)) {
            tracing::debug!(?segment, %error, "not refused; it will come again");
        }
    }

    fn insert(&mut self, client: Tuple, half: HalfOpen) {
        self.clients.insert(half.server.leg, client);
        self.half.insert(client, half);
    }

    fn remove(&mut self, client: &Tuple) -> Option<HalfOpen> {
        let half = self.half.remove(client)?;
        self.clients.remove(&half.server.leg);
        Some(half)
    }

    /// `since`: when the SYN arrived.
    fn asked(&mut self, engine: &Engine, d: &Datapath, syn: Handshake, since: Instant) {
        let client = syn.leg;
        match self.half.get_mut(&client) {
            Some(half) if half.syn.seq() == syn.seq() => {
                // one of the two segments was lost
                half.syn = syn;
                let (next, out) =
                    half.answer.as_ref().map_or((syn, half.server.leg), |answer| (answer.segment, client));
                return self.pass_on(&next, &out);
            }
            Some(_) => self.abandon(d, &client),
            None => {}
        }
        match self.acceptor(client.local).map(|a| &a.course) {
            Some(Course::Chosen(choose, _)) => match choose(client.remote) {
                Some(server) => self.asked_for(engine, d, syn, server),
                None => self.leave_to_listener(d, &syn),
            },
            Some(Course::Transparent(allow)) => {
                let is_ours = may_be_ours(client.local.ip());
                if is_ours || !allow(client.remote, client.local) {
                    self.counts.denied += 1;
                    return tracing::debug!(?client, is_ours, "not let pass");
                }
                self.asked_through(engine, d, syn, since);
            }
            None => self.counts.denied += 1,
        }
    }

    /// Handles the SYN of a transparent connection.
    fn asked_through(&mut self, engine: &Engine, d: &Datapath, syn: Handshake, since: Instant) {
        let client = syn.leg;
        if !self.has_room(d) {
            return self.let_go(d, &syn, &mirrored(&client));
        }
        let server = mirrored(&client);
        let kind = EndToEnd { transparent: true, waits: self.holds(&client) };
        match expect(engine, d, &server, &client, kind) {
            Ok(server) => self.begin(engine, syn, server, true),
            // It cannot go on without us while sockets of an earlier connection would take its segments. In a table with much
            // room, only the places of this four-tuple are taken: those that earlier connections have left, free in a second.
            Err(ExpectError::Full { .. })
                if has_much_room(engine, d) || [&client, &server].into_iter().any(is_claimed) =>
            {
                self.put_off(syn, since);
            }
            Err(ExpectError::Full { .. }) => self.let_go(d, &syn, &server),
            Err(ExpectError::Taken) => self.put_off(syn, since),
            Err(error) => tracing::debug!(?client, %error, "no answer"),
        }
    }

    /// Handles the SYN of a client of a listening socket.
    fn asked_for(&mut self, engine: &Engine, d: &Datapath, syn: Handshake, server: SocketAddr) {
        let client = syn.leg;
        let waits = self.holds(&client);
        let leg = if self.half.len() < HALF_OPEN { server_leg(engine, d, &client, server, waits) } else { None };
        match leg {
            Some(leg) => self.begin(engine, syn, leg, false),
            None => self.leave_to_listener(d, &syn),
        }
    }

    fn begin(&mut self, engine: &Engine, syn: Handshake, server: Connection, transparent: bool) {
        let client = syn.leg;
        [client, server.leg].iter().for_each(|leg| engine.lingering.begins_anew(leg));
        self.insert(client, HalfOpen { since: Instant::now(), server, transparent, syn, answer: None });
        self.pass_on(&syn, &server.leg);
    }

    /// Gives the client's SYN to the listening socket.
    fn leave_to_listener(&mut self, d: &Datapath, syn: &Handshake) {
        self.counts.left += 1;
        d.let_go_handshake(&syn.leg, syn.seq());
        if let Some(Err(error)) = self.sender(&syn.leg).map(|sender| sender.give_back(syn)) {
            tracing::debug!(?syn, %error, "not given to the listening socket; it will come again");
        }
    }

    /// Makes room for one more half-open transparent connection. Returns false if there is none.
    fn has_room(&mut self, d: &Datapath) -> bool {
        if self.half.len() < HALF_OPEN {
            return true;
        }
        let unanswered = self.half.iter().filter(|(_, half)| half.answer.is_none());
        let oldest = unanswered.min_by_key(|(_, half)| half.since).map(|(client, _)| *client);
        oldest.iter().for_each(|client| self.give_up(d, client));
        oldest.is_some()
    }

    /// Lets a transparent connection go on untracked, as a router does. The hosts shake hands without us. `next` is the segment
    /// on its way to the host of `out`.
    fn let_go(&mut self, d: &Datapath, next: &Handshake, out: &Tuple) {
        self.counts.untracked += 1;
        let is_syn = next.segment == Some(Segment::Syn);
        let (client, syn) = if is_syn { (&next.leg, next.seq()) } else { (out, next.ack().wrapping_sub(1)) };
        d.let_go_handshake(client, syn);
        self.pass_on(next, out);
    }

    fn acceptor(&self, target: SocketAddr) -> Option<&Acceptor> {
        let any = if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        self.listeners.get(&target).or_else(|| self.listeners.get(&SocketAddr::new(any, target.port())))
    }

    /// Returns whether the first data of this client's connection is held.
    fn holds(&self, client: &Tuple) -> bool {
        self.acceptor(client.local).is_some_and(|a| a.holds)
    }

    /// Returns the client of the unanswered half-open connection that a segment of its server belongs to.
    fn asked_by(&self, h: &Handshake) -> Option<Tuple> {
        let client = self.clients.get(&h.leg)?;
        let half = self.half.get(client)?;
        (half.answer.is_none() && h.ack() == half.syn.seq().wrapping_add(1)).then_some(*client)
    }

    /// `since`: when the SYN-ACK arrived.
    fn answered(&mut self, engine: &Arc<Engine>, d: &Datapath, answer: Handshake, since: Instant) {
        let Some(client) = self.clients.get(&answer.leg).copied() else {
            return self.answered_late(engine, d, &answer);
        };
        // a repeated SYN-ACK: the client has not received it, or its answer was lost
        let is_repeated = |half: &HalfOpen| half.answer.as_ref().is_some_and(|first| first.segment.repeats(&answer));
        if self.half.get(&client).is_some_and(is_repeated) {
            return self.pass_on(&answer, &client);
        }
        let Some(half) = self.half.get(&client) else { return };
        if answer.ack() != half.syn.seq().wrapping_add(1) {
            // it answers a SYN that we have not seen, which is for the client to judge
            return self.pass_on(&answer, &client);
        }
        if answer.connection() != half.server {
            // It came before our SYN, for the record of a process that died. The server was reset since, and answers our SYN anew.
            return tracing::debug!(leg = ?answer.leg, "an answer to an earlier process is dropped");
        }
        if half.answer.is_some() {
            // The server has forgotten its first answer, whose numbers our sockets have: it was reset, or has restarted.
            let syn = half.syn;
            self.abandon(d, &client);
            return self.asked(engine, d, syn, since);
        }
        if d.has_passed(&client, answer.seq().wrapping_add(1)) {
            // An earlier answer has reached the client: this one repeats it, and the connection has begun without us.
            self.remove(&client).iter().for_each(|half| d.forget(half.server));
            return self.let_go(d, &answer, &client);
        }
        let holds = self.holds(&client);
        let Some(half) = self.half.get_mut(&client) else { return };
        match Answer::of(engine, half, answer, holds) {
            Ok(made) => {
                if !half.transparent {
                    d.track_handshake(Pair::new(&client, &answer.leg), &half.syn, &answer);
                }
                half.answer = Some(made);
                self.pass_on(&answer, &client);
            }
            // The sockets of an earlier connection are about to be closed. Until then, they would take its segments.
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => self.put_off(answer, since),
            Err(error) => {
                tracing::warn!(leg = ?answer.leg, %error, "cannot create sockets for a handshake between hosts: they go on without us");
                let (syn, transparent) = (half.syn, half.transparent);
                self.remove(&client).iter().for_each(|half| d.forget(half.server));
                if transparent {
                    self.let_go(d, &answer, &client);
                } else {
                    self.leave_to_listener(d, &syn); // the stack resets the server when it answers again
                }
            }
        }
    }

    /// Handles the answer to a SYN that was given up just before, or that an earlier process has passed on. It may also be the
    /// second answer to the SYN of a connection that is open by now, which nothing must happen to.
    fn answered_late(&self, engine: &Engine, d: &Datapath, answer: &Handshake) {
        let server = answer.connection();
        if may_be_ours(answer.leg.local.ip()) {
            if !d.has_client(&answer.leg) {
                d.forget(server); // the stack resets the server when it answers again
            }
        } else if engine.present(&answer.leg) != Some(server) {
            self.pass_on(answer, &mirrored(&answer.leg));
        }
        // Otherwise the client would complete a handshake that nobody knows. It sends its SYN again, and that begins another one.
    }

    /// Handles a reset: the server refuses the connection, or the client gives it up.
    fn refused(&mut self, d: &Datapath, h: &Handshake) {
        if let Some(half) = self.half.get(&h.leg) {
            // otherwise the client resets an earlier connection, which only a server that has not accepted this one can have
            let is_of_this = h.seq() == half.syn.seq().wrapping_add(1);
            if is_of_this || half.answer.is_none() {
                self.pass_on(h, &half.server.leg);
            }
            if is_of_this {
                self.abandon(d, &h.leg);
            }
        } else if let Some(client) = self.asked_by(h) {
            self.remove(&client).iter().for_each(|half| d.forget(half.server));
            d.let_go_handshake(&client, h.ack().wrapping_sub(1)); // otherwise the client would not get the reset
            self.pass_on(h, &client);
            self.lose(&client, &h.leg, io::ErrorKind::ConnectionRefused);
        } else if !may_be_ours(h.leg.local.ip()) {
            // of a handshake that an earlier process has heard of: its hosts have gone on without us
            self.pass_on(h, &mirrored(&h.leg));
        }
    }

    fn opened(&mut self, engine: &Engine, d: &Datapath, ack: &Handshake) {
        // The server still has an earlier connection from this port. The client
        // resets that one when it sees this segment, and then repeats its SYN.
        if let Some(client) = self.clients.get(&ack.leg) {
            if self.half.get(client).is_some_and(|half| half.answer.is_none()) {
                self.pass_on(ack, client);
            }
            return; // or it has accepted meanwhile
        }
        let client = ack.leg;
        let is_transparent = self.acceptor(client.local).is_some_and(|a| a.course.is_transparent());
        if is_transparent && ack.connection().generation == Connection::NONE {
            return self.let_pass(engine, d, ack);
        }
        if !self.half.get(&client).is_some_and(|half| half.is_completed_by(ack)) {
            return self.desert(d, ack);
        }
        let Some(HalfOpen { answer: Some(Answer { sockets, first, segment }), server, .. }) = self.remove(&client)
        else {
            return;
        };
        let legs = Pair::new(ack.connection(), server);
        if legs.client.generation == Connection::NONE
            && let Err(error) = without_record(&sockets.client, &segment)
        {
            tracing::warn!(?client, %error, "cannot set the clock of a socket: its client ignores it for a second");
        }
        self.pass_on(ack, &server.leg);
        let opened = Opened { legs, sockets, first };
        let left = match self.acceptor(client.local) {
            Some(acceptor) => acceptor.opened.try_send(opened).map_err(TrySendError::into_inner).err(),
            None => Some(opened),
        };
        if let Some(Opened { sockets, .. }) = left {
            reset(sockets);
            d.forget_flow(legs.into());
        }
    }

    /// Lets a transparent connection go on untracked whose client's leg finds no room. Its sockets have not said anything yet.
    fn let_pass(&mut self, engine: &Engine, d: &Datapath, ack: &Handshake) {
        let client = ack.leg;
        // as in asked_through(): only the places of this four-tuple are taken, and the client's next segment finds one
        if has_much_room(engine, d) {
            return;
        }
        d.let_go_handshake(&client, ack.seq().wrapping_sub(1)); // first: it can get no leg after that
        if engine.present(&client).is_some() {
            return; // the client's next segment has found room meanwhile, and is reported, too
        }
        if let Some(half) = self.remove(&client) {
            for socket in half.answer.iter().flat_map(|answer| answer.sockets.iter()) {
                if let Err(error) = Repair::On.set(socket.as_fd()) {
                    tracing::warn!(?client, %error, "cannot close the sockets of a handshake silently: its hosts are reset");
                }
            }
            d.forget(half.server);
            self.counts.untracked += 1;
        }
        self.pass_on(ack, &mirrored(&client));
    }

    /// Handles a client's acknowledgement of a handshake that was given up just before, or that an earlier process has begun:
    /// there are no sockets for it. The client is told, as it would wait for ever.
    fn desert(&self, d: &Datapath, ack: &Handshake) {
        if self.acceptor(ack.leg.local).is_none() {
            return; // a server challenges the SYN of a connection that is open or given up by now
        }
        d.forget(ack.connection());
        self.refuse(ack);
    }

    /// Gives up half-open connections that are too old. Looks once a second.
    fn look(&mut self, d: &Datapath, now: Instant) {
        if self.looked.is_some_and(|at| now < at + Duration::from_secs(1)) {
            return;
        }
        self.looked = Some(now);
        let old: Vec<Tuple> =
            self.half.iter().filter(|(_, half)| now >= half.since + PATIENCE).map(|(client, _)| *client).collect();
        for client in old {
            let silent = self.half.get(&client).filter(|half| half.answer.is_none()).map(|half| half.server.leg);
            self.give_up(d, &client);
            silent.iter().for_each(|server| self.lose(&client, server, io::ErrorKind::TimedOut));
        }
    }

    /// Tells of a handshake with a server of our choice that the server has refused or not answered.
    fn lose(&self, client: &Tuple, server: &Tuple, why: io::ErrorKind) {
        if let Some(Course::Chosen(_, lost)) = self.acceptor(client.local).map(|a| &a.course) {
            lost(client.remote, server.remote, why.into());
        }
    }

    /// Gives up a half-open connection. Later segments of its hosts are not for us: if
    /// it is transparent and the server has not answered yet, they go on without us.
    fn give_up(&mut self, d: &Datapath, client: &Tuple) {
        let Some(syn) = self.half.get(client).map(|half| half.syn.seq()) else { return };
        self.counts.given_up += 1;
        d.let_go_handshake(client, syn); // first, or the client would not get the reset
        self.abandon(d, client);
    }

    /// Removes what was made for a half-open connection, if there is one. Its client has no leg yet, or one that
    /// [`Handshakes::opened`] will hear of. What the data path knows of its SYN may be of the next one already.
    fn abandon(&mut self, d: &Datapath, client: &Tuple) {
        let Some(half) = self.remove(client) else { return };
        half.answer.into_iter().for_each(|answer| reset(answer.sockets));
        d.forget(half.server);
    }
}

/// Returns whether live flows take less than half of the table.
fn has_much_room(engine: &Engine, d: &Datapath) -> bool {
    engine.live() < d.max_flows() as usize / 2
}

/// Number of source ports to try before a client is left to its listening socket.
const PORT_TRIES: u32 = 32;

/// Finds an address and a port of ours for a connection to `server`, and prepares its record.
fn server_leg(engine: &Engine, d: &Datapath, client: &Tuple, server: SocketAddr, waits: bool) -> Option<Connection> {
    let kind = EndToEnd { transparent: false, waits };
    let source = engine.ports.usual_for(server).ok()?.0.source;
    if server.is_ipv4() != client.is_v4() || source.is_loopback() || source == server.ip() {
        return None;
    }
    let turn = engine.ports.next_turn();
    for tries in 0..PORT_TRIES {
        let leg = engine.ports.candidate(turn, tries, server, source);
        match expect(engine, d, &leg, client, kind) {
            Ok(server) if is_free(&leg) => return Some(server),
            Ok(server) => d.forget(server),
            Err(ExpectError::Taken) => {}
            Err(error) => {
                tracing::debug!(?leg, %error, "not tracked");
                return None;
            }
        }
    }
    None
}

/// Returns whether a socket could be bound to our address of a leg.
fn is_free(leg: &Tuple) -> bool {
    let bind = || {
        let s = Socket::new(Domain::for_address(leg.local), Type::STREAM, None)?;
        s.set_reuse_address(true)?; // ports are counted per server
        s.bind(&leg.local.into())
    };
    bind().is_ok() && !is_claimed(leg)
}

/// Prepares the record of the leg towards a server.
fn expect(
    engine: &Engine,
    d: &Datapath,
    server: &Tuple,
    client: &Tuple,
    kind: EndToEnd,
) -> Result<Connection, ExpectError> {
    match d.expect_end_to_end(server, client, kind) {
        Err(ExpectError::Taken) if make_way(engine, d, server, kind.transparent) => {
            d.expect_end_to_end(server, client, kind)
        }
        expected => expected,
    }
}

/// Removes the server's leg of an earlier connection, when a client without a leg sends a SYN. The earlier connection
/// is over, or its process died before the client had completed the handshake. Returns whether the leg is gone.
fn make_way(engine: &Engine, d: &Datapath, server: &Tuple, transparent: bool) -> bool {
    // A client that has chosen the port may use it again at once, as without us. A port of ours rests: another client's numbers
    // need not follow those of the last connection, which the server may remember.
    let ended = if transparent { engine.lingering.make_way_at_once(server) } else { engine.lingering.make_way(server) };
    match ended {
        Some((a, b)) => {
            d.forget_ended(&a, b.as_ref());
            true
        }
        None => transparent && !engine.is_routed(server) && d.forget_unopened(server),
    }
}

/// Resets the connections to both hosts.
fn reset(sockets: Pair<OwnedFd>) {
    for socket in sockets.iter() {
        // a socket that is gone cannot be reset
        let _ = SockRef::from(socket).set_linger(Some(Duration::ZERO));
    }
}
