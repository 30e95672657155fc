//! Runs one accepted connection: `(PROXY header) -> handshake -> dial -> answer -> relay -> access log`.
//!
//! Every step before the relay has a time limit; during the relay, the idle limit of the engine applies. The task of a
//! connection ends when the flow is handed over. The state for its log line is then kept by the engine ([`Relayed`]).

use crate::{
    access::Subject,
    config::{ListenerConfig, Protocol, pool::LeadTo},
    context::{Front, Live, ServerContext},
    fault::Fault,
    handshake_buffer::HandshakeBuffer,
    log::access_log::Record,
    login,
    onward::{Ready, Relayed, connect, linger, opening, pooled, relay, write},
    socks,
    target::Target,
    tls,
};
use longsplice_engine::{EndReason, Leftovers, Leg, LegOfProxy};
use std::{future::poll_fn, sync::Arc, time::Instant};
use tokio::time::sleep_until;

/// Serves one connection up to the relay, and makes sure that it gets its line in the access log.
pub(crate) async fn serve(mut live: Live, front: Arc<Front>, client: Leg) {
    let (started, began, is_known) = live
        .continued
        .as_ref()
        .map_or_else(|| (Instant::now(), Instant::now(), false), |c| (c.accepted, c.began, c.is_known));
    let listener = &front.listener;
    let (mut client, mut buffer) = (client, HandshakeBuffer::new(began));
    if let Some(dir) = &front.tap {
        client.tap(dir.tap(client.remote()));
    }
    let mut header = Some(Ok(()));
    if !is_known {
        if listener.proxy_protocol.expects(client.remote().ip())
            && goes(&live, listener, &mut client, (began, false)).await
        {
            return;
        }
        let receive = listener.proxy_protocol.receive(&mut client, &mut buffer, listener.limits.handshake);
        header = unless_stopped(&live, receive).await;
        if client.bytes_in() > 0 {
            buffer.begins_anew();
            live.continued.iter_mut().for_each(|continued| continued.began = buffer.began());
        }
    }
    let mut record = listener.record(client.source());
    let Some(header) = header else { return stop((live, started), client, record) };
    if let Err(fault) = header {
        live.shared.counters.fault(&fault);
        record.fault(&fault);
        write(&live, record, started);
        return reset(&live, client);
    }
    if let Err(full) = live.is_from(client.source()) {
        live.shared.turned_away(listener, client.source(), full);
        return reset(&live, client);
    }
    if let Some(handler) = &front.handler {
        return handler.serve(live, &front, client, buffer.rest()).await;
    }
    let waits = listener.protocol.traits().listens && buffer.seen().is_empty();
    if waits && goes(&live, listener, &mut client, (buffer.began(), true)).await {
        return;
    }
    let shared = &live.shared;
    let ready = handshake(shared, &front, (&mut client, buffer), &mut record);
    let ready = unless_stopped(&live, ready).await;
    let Some(ready) = ready else { return stop((live, started), client, record) };
    match ready {
        Ok(Some(ready)) if !listener.first_bytes.is_empty() => {
            Box::pin(open(live, started, &front, client, ready, record)).await;
        }
        Ok(Some(ready)) => relay(Relayed { live, started, passed: None }, &front, client, ready, record),
        Ok(None) if record.how == EndReason::Stopped.as_str() => stop((live, started), client, record),
        Ok(None) => {
            linger(&mut client).await;
            shared.splicer.discard(client);
            write(&live, record, started);
        }
        Err(fault) => {
            shared.counters.fault(&fault);
            record.fault(&fault);
            match listener.protocol.traits().answers {
                true => linger(&mut client).await,
                false => client.reset_at_close(),
            }
            shared.splicer.discard(client);
            write(&live, record, started);
        }
    }
}

/// Waits until a client who speaks first has done so, or has had the time for it. Returns whether it has gone to another process
/// instead.
async fn goes(live: &Live, listener: &ListenerConfig, client: &mut Leg, (began, is_known): (Instant, bool)) -> bool {
    let late = began + listener.limits.handshake;
    let wait = async {
        let begun = tokio::select! {
            biased;
            _ = poll_fn(|cx| client.poll_readable(cx)) => false, // an error is for the handshake
            () = live.goes() => true,
            () = sleep_until(late.into()) => false,
        };
        begun && live.hand_on(listener, client, (began, is_known), None)
    };
    // if it has to end, the handshake says so
    unless_stopped(live, wait).await.unwrap_or_default()
}

/// Checks the first bytes of both hosts before the relay. What was begun and cannot go on is reset, so that it looks incomplete.
async fn open(live: Live, started: Instant, front: &Front, mut client: Leg, mut ready: Ready, mut record: Record) {
    record.server = Some(ready.server.remote());
    let (of, idle) = (&front.listener.first_bytes, front.policy.idle_limit.get());
    let checked = unless_stopped(&live, opening::check(of, &mut client, &mut ready, idle)).await;
    let passed = match checked {
        Some((Ok(()), passed)) => passed,
        broken => {
            ready.server.reset_at_close();
            live.shared.splicer.discard(ready.server);
            let Some((Err(fault), [up, down])) = broken else { return stop((live, started), client, record) };
            live.shared.counters.fault(&fault);
            record.fault(&fault);
            (record.bytes_up, record.bytes_down) = (up, down);
            write(&live, record, started);
            return reset(&live, client);
        }
    };
    relay(Relayed { live, started, passed: Some(Box::new(passed)) }, front, client, ready, record);
}

/// Runs a step, which may wait for a host, unless the connection has to end.
async fn unless_stopped<T>(live: &Live, step: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        // a step that hears of the stop itself has something to say
        biased;
        done = step => Some(done),
        () = live.end() => None,
    }
}

/// Resets a client because its connection has to end.
fn stop((live, started): (Live, Instant), client: Leg, mut record: Record) {
    live.ended(&mut record);
    reset(&live, client);
    write(&live, record, started);
}

fn reset(live: &Live, client: Leg) {
    client.reset_at_close();
    live.shared.splicer.discard(client);
}

/// Learns the target, and connects to it. `None`: the client has been served to its end, and its record is filled in.
async fn handshake(
    shared: &Arc<ServerContext>,
    front: &Arc<Front>,
    (client, buffer): (&mut Leg, HandshakeBuffer),
    record: &mut Record,
) -> Result<Option<Ready>, Fault> {
    let listener = &front.listener;
    let subject = Subject::by(client.source().ip());
    let target = match &listener.protocol {
        Protocol::Socks5 { users, commands } => {
            return socks::serve((shared, front), (users, commands), (client, buffer), record).await;
        }
        Protocol::Tls(tls) => return tls::handshake(shared, listener, tls, (client, buffer), record).await.map(Some),
        Protocol::Login(login) => {
            return Box::pin(login::handshake(shared, listener, login, (client, buffer), record)).await.map(Some);
        }
        Protocol::Plug { target: Some(LeadTo::Target(target)), .. } => target.clone(),
        Protocol::Plug { target: Some(LeadTo::Pool(pool)), .. } => {
            let of = (Some(&listener.rules), listener);
            let connected = Box::pin(pooled::connect(shared, of, client, &subject, pool, record));
            let (server, lease) = connected.await?;
            record.target = Some(lease.0.name.to_string());
            return Ok(Some(Ready { lease: Some(lease), ..Ready::with(server, buffer.rest()) }));
        }
        // The address that the client wants. HTTP, FTP and transparent connections are served elsewhere.
        Protocol::Plug { target: None, .. }
        | Protocol::Tpot
        | Protocol::Http(_)
        | Protocol::Ftp(_)
        | Protocol::Transparent => client.local().into(),
    };
    record.target = Some(target.to_string());
    let reached = connect(shared, listener, client, &subject, &target, record).await?;
    Ok(Some(Ready::reached(reached, Leftovers::for_server(buffer.rest()))))
}

/// Serves a connection whose hosts have shaken hands with each other. The target
/// is that of the plug, or the original destination of a transparent connection.
pub(crate) fn serve_end_to_end(live: Live, front: &Front, mut client: Leg, server: Leg) {
    let listener = &front.listener;
    let mut record = listener.record(client.source());
    record.target = Some(listener.fixed_target().map_or_else(|| server.remote().to_string(), Target::to_string));
    if let Some(dir) = &front.tap {
        client.tap(dir.tap(client.remote()));
    }
    let relayed = Relayed { live, started: Instant::now(), passed: None };
    relay(relayed, front, client, Ready::with(server, Vec::new()), record);
}
