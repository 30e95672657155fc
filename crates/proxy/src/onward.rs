//! The steps that all protocols share once the target is known: connect, relay or refuse, and write the log line.

pub mod dial;
pub(crate) mod of_flow;
pub(crate) mod opening;
pub(crate) mod pooled;
mod upstream;

use crate::{
    access::{Rules, Subject, Way},
    config::ListenerConfig,
    context::{
        Front, Live, ServerContext,
        led::{Led, LedFlow},
        roll::Enrolled,
    },
    counters::Counters,
    fault::Fault,
    log::access_log::{Record, ms_since},
    onward::{
        dial::{Reached, dial, dial_server},
        of_flow::{Asked, OfFlow},
    },
    pool::Lease,
    target::Target,
};
use bytes::Bytes;
use longsplice_engine::{Command, Ended, FlowInfo, Leftovers, Leg, LegOfProxy};
use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

/// Time and number of bytes for which a refused client is drained before the close.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 64 * 1024;
/// Time that a client has to acknowledge what was written before its connection is reset: some round trips.
pub const DELIVER: Duration = Duration::from_secs(5);

/// Result of a handshake, for the relay.
pub struct Ready {
    /// The server's leg.
    pub server: Leg,
    /// Bytes that were read too early.
    pub left: Leftovers,
    /// The server of a pool, occupied up to the end.
    pub lease: Option<Lease>,
    /// How the connection is led, if it does not go straight to its target.
    pub led: Option<Led>,
}

impl Ready {
    /// Returns what is ready with a server that is of no pool, and bytes for it.
    pub(crate) fn with(server: Leg, rest: impl Into<Bytes>) -> Ready {
        Ready { server, left: Leftovers::for_server(rest), lease: None, led: None }
    }

    /// Returns what is ready with a server that was reached, and bytes that were read too early.
    pub fn reached(reached: Reached, left: Leftovers) -> Ready {
        let (server, lease, led) = reached.into_parts();
        Ready { server, left, lease, led }
    }
}

/// State of a connection while it is relayed; small, because there may be a million of them.
pub struct Relayed {
    /// Counts the connection.
    pub live: Live,
    /// When it was accepted.
    pub started: Instant,
    /// Bytes of client and server that were passed on before.
    pub passed: Option<Box<[u64; 2]>>,
}

/// Connects to the target, or to where the rules lead, if the rules of the listener allow it. Notes in the record how long it took.
pub async fn connect(
    shared: &ServerContext,
    listener: &ListenerConfig,
    client: &Leg,
    subject: &Subject<'_>,
    target: &Target,
    record: &mut Record,
) -> Result<Reached, Fault> {
    let to = (target, listener.wanted(client));
    connect_under(&listener.rules, shared, listener, client, subject, to, record).await
}

/// Connects under other rules than those of the listener. `at`: the address of the target, if that is known.
pub(crate) async fn connect_under(
    rules: &Rules,
    shared: &ServerContext,
    listener: &ListenerConfig,
    client: &Leg,
    subject: &Subject<'_>,
    (target, at): (&Target, Option<SocketAddr>),
    record: &mut Record,
) -> Result<Reached, Fault> {
    let began = Instant::now();
    let called = dial(shared, listener, rules, client, subject, (target, at), record).await;
    record.connect_ms = Some(ms_since(began));
    let reached = called?;
    if let Way::Pool(_) = reached.way {
        return Ok(reached); // it knows of the client already
    }
    Ok(Reached { leg: introduced(shared, listener, client, reached.leg).await?, ..reached })
}

/// Connects to a server that the configuration names, whatever the rules are.
pub(crate) async fn connect_server(
    shared: &ServerContext,
    listener: &ListenerConfig,
    client: &Leg,
    server: &Target,
) -> Result<Leg, Fault> {
    let leg = dial_server(shared, listener, client, server).await?;
    introduced(shared, listener, client, leg).await
}

/// Tells a server who the client is, if it is to know.
async fn introduced(
    shared: &ServerContext,
    listener: &ListenerConfig,
    client: &Leg,
    mut server: Leg,
) -> Result<Leg, Fault> {
    match listener.proxy_protocol.send(client, &mut server).await {
        Ok(()) => Ok(server),
        Err(e) => {
            shared.splicer.discard(server);
            Err(Fault::Unreachable(e))
        }
    }
}

/// Hands both legs to the engine. The log line is written when the connection has ended.
pub fn relay(mut relayed: Relayed, front: &Front, mut client: Leg, ready: Ready, record: Record) {
    let shared = relayed.live.shared.clone();
    client.until_parked(relayed.live.seat.take());
    let enrolled = relayed.live.enrolled.take();
    Counters::add(&shared.counters.relayed);
    let target = record.target.unwrap_or_default();
    let Ready { server, left, lease, led } = ready;
    let led = led.map(LedFlow::new);
    let flow = shared.splicer.number();
    // before it is listed: whoever judges it then needs this
    led.iter().for_each(|led| shared.led.enter(flow, led));
    let member = lease.as_ref().map(|lease| lease.0.label.clone());
    let info = FlowInfo::new(record.listener, target).with_user(record.user).with_listen(record.listen);
    let info = info.with_name(record.name).with_member(member);
    let done = OfFlow {
        relayed,
        listener: record.listener,
        lease,
        led,
        route: record.route.map(String::into_boxed_str),
        command: record.command,
        connect_ms: record.connect_ms,
        http: record.method.map(|method| {
            let (uri, status, extra) = (record.uri.map(exact), record.status, record.extra);
            Box::new(Asked { method: exact(method), uri, status, extra })
        }),
        earlier: None,
    };
    shared.splicer.hand_over_as((flow, info), client, server, left, front.policy.clone(), Box::new(done));
    shared.triggers.begin(flow, &front.listener.triggers, &front.taps, None);
    if let Some(why) = enrolled.and_then(Enrolled::leave) {
        forbid(&shared, flow, why);
    }
}

/// Writes into the record of a flow that it was reset because it was forbidden, if it was.
pub(crate) fn forbidden(shared: &ServerContext, ended: &Ended, record: &mut Record) {
    if let Some(why) = lock(&shared.forbidden).remove(&ended.id) {
        record.forbidden(&why);
    }
}

/// Resets a flow that was allowed, and is not any more. Returns whether it has not ended by itself.
pub(crate) fn forbid(shared: &ServerContext, flow: u64, why: Arc<str>) -> bool {
    lock(&shared.forbidden).insert(flow, why);
    let is_there = shared.splicer.command(flow, Command::Reset);
    if is_there {
        Counters::add(&shared.counters.forbidden);
    } else {
        lock(&shared.forbidden).remove(&flow);
    }
    is_there
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics in the middle of a change, so the data behind a poisoned lock is consistent.
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes spare capacity.
fn exact(text: String) -> String {
    text.into_boxed_str().into_string()
}

/// Closes such that the client can read our last message: closing with unread data sends a reset, which discards what
/// the socket still holds of the message (RFC 9293, 3.6.1; RFC 2525, 2.17).
pub async fn linger(client: &mut Leg) {
    let drain = async {
        if client.shutdown().await.is_err() {
            return;
        }
        let mut bin = [0; 1024];
        let mut left = LINGER_BYTES;
        while let Ok(n @ 1..) = client.read(&mut bin).await {
            left = left.saturating_sub(n);
            if left == 0 {
                return;
            }
        }
    };
    // After the limits, the client gets the reset.
    let _ = timeout(LINGER, drain).await;
    client.delivered(DELIVER).await;
}

/// Writes the log line of a connection or request that has ended, and adds it to the totals of its listener.
pub fn write(live: &Live, mut record: Record, started: Instant) {
    record.duration_ms = ms_since(started);
    live.summed.add(&record);
    live.shared.write(record);
}
