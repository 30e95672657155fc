//! Data connections: how both are made, and the flow that joins them.
//!
//! Each of the two is opened by us or by its host, as four commands and the configuration say, so there are four ways to make
//! the pair, in any mixture of families. A data connection belongs to the host that has the control connection: it is opened to
//! that address only, and accepted from that address only, on a port that is open for one connection (RFC 2577). It has our
//! address of the control connection as well ([`End`]): where a host takes us for another one, a connection to that one is
//! awaited, or comes from there.

use super::Session;
use crate::{
    access::PortRange,
    context::{Live, ServerContext},
    counters::Counters,
    log::access_log::{Record, ms_since},
    onward::write,
};
use longsplice_engine::{
    BoundSocket, Command, Ended, Finish, FlowEventKind, FlowEvents, FlowInfo, Leftovers, Leg, LegOfProxy, Listener,
    Pair, SpliceWhen, Splicer,
};
use std::{
    collections::hash_map::RandomState,
    hash::BuildHasher,
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tokio::time::timeout;

/// Time that a splice of two fresh connections may take before the transfer begins without it: nothing has to be drained.
const SPLICED_WITHIN: Duration = Duration::from_secs(1);

/// How one of the two connections is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// The host connects to this address of ours.
    Awaited(SocketAddr),
    /// We connect to this address of the host.
    Opened(SocketAddr),
}

/// How the next data connection is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plan {
    pub client: Way,
    pub server: Way,
}

/// The sockets of a [`Plan`], where connections are awaited.
#[derive(Default)]
pub(crate) struct Doors {
    pub client: Option<Listener>,
    pub server: Option<Listener>,
}

/// Our end of data connections with a host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct End {
    /// Our address, as the host knows it from the control connection.
    pub at: SocketAddr,
    /// It is one of this machine.
    pub is_ours: bool,
    /// The host.
    pub host: IpAddr,
}

impl End {
    /// Connects to the host on behalf of the other one, if that has its connection.
    async fn open(&self, splicer: &Splicer, to: SocketAddr, other: Option<&Leg>) -> io::Result<Leg> {
        match self.is_ours {
            true => splicer.connect_from(self.at.ip(), to, other).await,
            false => splicer.connect_from_elsewhere(self.at.ip(), to, other).await,
        }
    }
}

/// The line of a transfer in the access log. It is written when both the flow and the session have done with it.
pub(crate) struct Line {
    live: Arc<Live>,
    started: Instant,
    record: Mutex<Record>,
}

impl Line {
    pub fn new(live: Arc<Live>, record: Record) -> Arc<Line> {
        Arc::new(Line { live, started: Instant::now(), record: Mutex::new(record) })
    }

    pub fn change(&self, change: impl FnOnce(&mut Record)) {
        change(&mut self.record.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// What is kept of a transfer while it is relayed.
struct OfTransfer(Arc<Line>);

impl Finish for OfTransfer {
    fn begun(&self, id: u64, Pair { client, server }: Pair<SocketAddr>, _: &FlowInfo) {
        let OfTransfer(line) = self;
        line.live.shared.begins(id, || {
            let record = line.record.lock().unwrap_or_else(PoisonError::into_inner).clone();
            Record { client, server: Some(server), duration_ms: ms_since(line.started), ..record }
        });
    }

    fn finish(self: Box<Self>, ended: Ended, _: &FlowInfo) {
        self.0.change(|record| {
            record.ended(&ended);
            (record.client, record.server) = (ended.client, Some(ended.server));
        });
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let record = self.record.get_mut().unwrap_or_else(PoisonError::into_inner).clone();
        write(&self.live, record, self.started);
    }
}

/// Opens a port at our end for a data connection. Nobody can tell which: the kernel draws it, or we do. `like`: a port at which
/// the other host awaits its own. At an address of somebody else, it is free for sure.
pub(crate) async fn open_door(
    shared: &ServerContext,
    end: End,
    ports: Option<PortRange>,
    like: Option<u16>,
) -> io::Result<(Listener, SocketAddr)> {
    let bind = |port| {
        let mut at = end.at;
        at.set_port(port);
        if end.is_ours { BoundSocket::bind(at) } else { BoundSocket::bind_elsewhere(at) }
    };
    let socket = match (ports, like) {
        (None, Some(like)) if !end.is_ours => bind(like).or_else(|_| bind(0))?,
        (None, _) => bind(0)?,
        (Some(PortRange { first, last }), _) => {
            let count = u64::from(last - first) + 1;
            // keyed by random numbers of the system
            let start = RandomState::new().hash_one(end.at);
            let bind = |n| bind(first + ((start % count + n) % count) as u16);
            let mut bound =
                (0..count).map(bind).skip_while(|b| matches!(b, Err(e) if e.kind() == io::ErrorKind::AddrInUse));
            bound.next().unwrap_or_else(|| Err(io::ErrorKind::AddrInUse.into()))?
        }
    };
    let door = match (end.is_ours, shared.tpot.upgrade()) {
        (false, Some(tpot)) => shared.splicer.listen_elsewhere(&tpot, socket, end.host).await?,
        (false, None) => return Err(io::ErrorKind::Unsupported.into()),
        (true, _) => shared.splicer.listen_for_a_while(socket).await?,
    };
    let at = door.local_addr()?;
    Ok((door, at))
}

/// Accepts the connection of this host. Those of others are reset.
pub(crate) async fn accept_from(shared: &ServerContext, door: &Listener, host: IpAddr) -> io::Result<Leg> {
    loop {
        let leg = door.accept().await?;
        if leg.remote().ip().to_canonical() == host.to_canonical() {
            return Ok(leg);
        }
        Counters::add(&shared.counters.denied);
        tracing::debug!(from = %leg.remote(), %host, "a data connection of another host is reset");
        leg.reset_at_close();
        shared.splicer.discard(leg);
    }
}

/// Makes what can be made before the server has the command: the client's connection, and that to the server if we open it.
pub(crate) async fn make(session: &Session<'_>, plan: Plan, doors: &Doors) -> io::Result<(Leg, Option<Leg>)> {
    let splicer = &session.live.shared.splicer;
    let (at_client, at_server) = (session.client_end(), session.server_end()?);
    let gone = || io::Error::other("nothing listens for it");
    match (plan.client, plan.server) {
        (Way::Awaited(_), server) => {
            let door = doors.client.as_ref().ok_or_else(gone)?;
            let client = accept_from(&session.live.shared, door, at_client.host).await?;
            match server {
                Way::Opened(to) => {
                    let server = at_server.open(splicer, to, Some(&client)).await?;
                    Ok((client, Some(server)))
                }
                Way::Awaited(_) => Ok((client, None)),
            }
        }
        (Way::Opened(to), Way::Opened(server)) => {
            let server = at_server.open(splicer, server, None).await?;
            let client = at_client.open(splicer, to, Some(&server)).await?;
            Ok((client, Some(server)))
        }
        (Way::Opened(to), Way::Awaited(_)) => Ok((at_client.open(splicer, to, None).await?, None)),
    }
}

/// Joins both connections. Returns the number of the flow once it is spliced, if the policy is to splice it at once, or will not be.
pub(crate) async fn join(session: &Session<'_>, mut client: Leg, server: Leg, line: &Arc<Line>) -> u64 {
    let (splicer, front) = (&session.live.shared.splicer, session.front);
    let info = session.info();
    if let Some(dir) = &front.tap {
        client.tap(dir.tap(client.remote()));
    }
    Counters::add(&session.live.shared.counters.relayed);
    let events = (front.bodies.when == SpliceWhen::AtOnce).then(|| splicer.subscribe());
    let done = Box::new(OfTransfer(line.clone()));
    let id = splicer.hand_over_to(client, server, Leftovers::default(), front.bodies.clone(), info, done);
    if let Some(events) = events {
        let _ = timeout(SPLICED_WITHIN, settled(events, id)).await; // then the first bytes are copied
    }
    id
}

async fn settled(mut events: FlowEvents, id: u64) {
    while let Some(event) = events.next().await {
        let settles =
            matches!(event.kind, FlowEventKind::Spliced | FlowEventKind::Refused(_) | FlowEventKind::Ended(_));
        if event.flow == id && settles {
            return;
        }
    }
}

/// Resets both connections of a transfer that the server has refused, or the client has broken off.
pub(crate) fn reset(splicer: &Splicer, flow: u64) {
    splicer.command(flow, Command::Reset);
}
