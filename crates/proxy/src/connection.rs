//! The life of one accepted connection: `(PROXY header) -> handshake -> dial -> answer -> relay -> access log`.
//!
//! Every step before the relay has a time limit; in the relay the engine's idle limit takes over. The task of a connection
//! ends when it is handed over; what the last line needs then waits with the engine ([`Relayed`]).

use crate::{
    access::{Asker, Rules},
    access_log::Record,
    config::{ListenerConfig, Protocol},
    context::{Front, Live, Shared},
    counters::Counters,
    dial::dial,
    fault::{Fault, Step},
    http,
    intake::Intake,
    pool::Lease,
    socks::{self, Asked},
    target::Target,
    tls,
    users::Users,
};
use longsplice_engine::{FlowInfo, Leftovers, Leg};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

/// How long, and for how many bytes, a client that was refused is listened to.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 64 * 1024;

/// What a handshake leaves for the relay.
pub(crate) struct Ready {
    pub server: Leg,
    pub left: Leftovers,
}

/// What remains of a connection while it is relayed. For each of a million: small.
pub(crate) struct Relayed {
    pub live: Live,
    pub started: Instant,
    /// The server of a pool that is busy with it.
    pub lease: Option<Lease>,
}

/// Serves one connection, and sees to it that its line is written into the access log.
pub(crate) async fn serve(mut live: Live, front: Arc<Front>, client: Leg) {
    let started = Instant::now();
    let listener = &front.listener;
    let (mut client, mut intake) = (client, Intake::default());
    if let Some(dir) = &front.tap {
        client.tap(dir.tap(client.remote()));
    }
    let header = listener.proxy_protocol.receive(&mut client, &mut intake, listener.limits.handshake).await;
    let mut record = Record::new(listener.protocol.name(), client.source());
    if let Err(fault) = header {
        live.shared.counters.fault(&fault);
        record.fault(&fault);
        write(&live, record, started);
        client.reset_at_close();
        return live.shared.splicer.discard(client);
    }
    // As at accept, without a line in the access log.
    if live.is_from(client.source()).is_err() {
        Counters::add(&live.shared.counters.over_limit);
        client.reset_at_close();
        return live.shared.splicer.discard(client);
    }
    if let Protocol::Http(http) = &listener.protocol {
        // by itself: the tasks of others need not be as large
        return Box::pin(http::serve(live, &front, http, (client, intake.rest()))).await;
    }
    let shared = &live.shared;
    let ready = match &listener.protocol {
        Protocol::Socks5 { users } => {
            socks_handshake(shared, listener, users, (&mut client, intake), &mut record).await
        }
        Protocol::Tls(tls) => tls::handshake(shared, listener, tls, (&mut client, intake), &mut record).await,
        Protocol::Plug { target } => {
            record.target = Some(target.to_string());
            let asked = Asker::by(client.source().ip());
            let server = connect(shared, listener, &client, &asked, target).await;
            let left = Leftovers::for_server(intake.rest());
            server.map(|server| Ready { server, left })
        }
        Protocol::Http(_) | Protocol::Transparent => return,
    };
    match ready {
        Ok(ready) => relay(Relayed { live, started, lease: None }, &front, client, ready, record),
        Err(fault) => {
            shared.counters.fault(&fault);
            record.fault(&fault);
            match listener.protocol {
                Protocol::Socks5 { .. } | Protocol::Http(_) | Protocol::Tls(_) => linger(&mut client).await,
                // The client believes to be connected to the target: a reset is what it would have got from there.
                Protocol::Plug { .. } | Protocol::Transparent => client.reset_at_close(),
            }
            shared.splicer.discard(client);
            write(&live, record, started);
        }
    }
}

/// A connection of others, which goes where it goes: nothing is asked.
pub(crate) fn pass(live: Live, front: &Front, mut client: Leg, server: Leg) {
    let mut record = Record::new(front.listener.protocol.name(), client.source());
    record.target = Some(server.remote().to_string());
    if let Some(dir) = &front.tap {
        client.tap(dir.tap(client.remote()));
    }
    let relayed = Relayed { live, started: Instant::now(), lease: None };
    relay(relayed, front, client, Ready { server, left: Leftovers::default() }, record);
}

pub(crate) fn write(live: &Live, mut record: Record, started: Instant) {
    record.duration_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    live.shared.log.write(record);
}

async fn socks_handshake(
    shared: &Shared,
    listener: &ListenerConfig,
    users: &Users,
    (client, intake): (&mut Leg, Intake),
    record: &mut Record,
) -> Result<Ready, Fault> {
    let limit = listener.limits.handshake;
    let late = |_| Fault::Timeout(Step::Handshake);
    let asked: Asked = timeout(limit, socks::ask(client, intake, users)).await.map_err(late)??;
    record.target = Some(asked.target.to_string());
    record.user.clone_from(&asked.user);
    let by = Asker::by(client.source().ip());
    match connect(shared, listener, client, &by, &asked.target).await {
        Ok(server) => {
            record.server = Some(server.remote());
            let granted = timeout(limit, asked.grant(client, server.local())).await.map_err(late)?;
            granted.map_err(|e| Fault::BadRequest(format!("the client does not listen: {e}")))?;
            Ok(Ready { server, left: Leftovers::for_server(asked.rest) })
        }
        Err(fault) => {
            // The refusal is logged either way; whether the client gets to read it is its own affair.
            let _ = timeout(limit, asked.refuse(client, &fault)).await;
            Err(fault)
        }
    }
}

/// Connects to the target, if the listener's rules let the client.
pub(crate) async fn connect(
    shared: &Shared,
    listener: &ListenerConfig,
    client: &Leg,
    asked: &Asker<'_>,
    target: &Target,
) -> Result<Leg, Fault> {
    connect_under(&listener.rules, shared, listener, client, asked, target).await
}

/// The same under other rules.
pub(crate) async fn connect_under(
    rules: &Rules,
    shared: &Shared,
    listener: &ListenerConfig,
    client: &Leg,
    asked: &Asker<'_>,
    target: &Target,
) -> Result<Leg, Fault> {
    let mut server = dial(&shared.splicer, &shared.resolver, (rules, &listener.limits), client, asked, target).await?;
    match listener.proxy_protocol.send(client, &mut server).await {
        Ok(()) => Ok(server),
        Err(e) => {
            shared.splicer.discard(server);
            Err(Fault::Unreachable(e))
        }
    }
}

pub(crate) fn relay(relayed: Relayed, front: &Front, client: Leg, ready: Ready, record: Record) {
    let shared = relayed.live.shared.clone();
    Counters::add(&shared.counters.relayed);
    let route = record.route.map(String::into_boxed_str);
    let listener = record.listener;
    let target = exact(record.target.unwrap_or_default());
    let info = FlowInfo::new(listener, target).with_user(record.user.map(exact));
    shared.splicer.hand_over(client, ready.server, ready.left, front.policy.clone(), info, move |ended, info| {
        let Relayed { live, started, lease } = relayed;
        drop(lease);
        let mut record = Record::new(listener, ended.client);
        record.server = Some(ended.server);
        record.target = Some(info.target.clone());
        record.user.clone_from(&info.user);
        record.route = route.map(String::from);
        record.ended(&ended);
        write(&live, record, started);
    });
}

/// Without room to grow.
fn exact(text: String) -> String {
    text.into_boxed_str().into_string()
}

/// Closes so that the client can read our last message: closing with unread data would send a reset, which may
/// overtake it (RFC 9293, 3.6.1; RFC 2525, 2.17).
pub(crate) async fn linger(client: &mut Leg) {
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
    // Past the limit the client gets its reset.
    let _ = timeout(LINGER, drain).await;
}
