//! Routing of TLS connections by server name: the target comes from the ClientHello, and nothing is decrypted. Of intercepted
//! connections, the name is read for the rules and the log only: they go to the server that the client wants.
//!
//! The first [`Route`] that matches decides. The ClientHello is sent to the server unchanged, so client
//! and server perform their handshake with each other, and the flow may be spliced like any other.

pub mod hello;

use crate::{
    access::Subject,
    config::{
        ListenerConfig,
        pool::LeadTo,
        tls::{Route, Tls},
    },
    context::ServerContext,
    fault::{Fault, Step},
    handshake_buffer::{HandshakeBuffer, HandshakeError},
    log::access_log::Record,
    onward::{Ready, connect_under, pooled},
    proxy_protocol,
    target::{Host, Target},
};
use hello::{ClientHello, HELLO_MAX, HelloError, Scan};
use longsplice_engine::{Leftovers, Leg};
use std::borrow::Cow;
use tokio::{io::AsyncWriteExt, time::timeout};

/// Descriptions of alerts (RFC 8446, 6.2).
const ACCESS_DENIED: u8 = 49;
const INTERNAL_ERROR: u8 = 80;
/// RFC 6066, 3.
const UNRECOGNIZED_NAME: u8 = 112;

impl Tls {
    /// Returns where a ClientHello leads to; `None`: nowhere, or to what it asks for.
    fn leads_to(&self, hello: &ClientHello) -> Option<Option<&LeadTo>> {
        self.routes.iter().find(|route| route.matches(hello)).map(|route| route.target.as_ref())
    }
}

impl Route {
    fn matches(&self, hello: &ClientHello) -> bool {
        let named = match &hello.name {
            Some(name) => self.name.is_empty() || self.name.iter().any(|p| p.matches_name(name)),
            None => self.name.is_empty() && self.target.is_some(),
        };
        named && (self.alpn.is_empty() || self.alpn.iter().any(|p| hello.alpn.iter().any(|a| a == p.as_bytes())))
    }
}

/// Reads the ClientHello and connects to its target; a refused client gets an alert.
pub(crate) async fn handshake(
    shared: &ServerContext,
    listener: &ListenerConfig,
    tls: &Tls,
    (client, buffer): (&mut Leg, HandshakeBuffer),
    record: &mut Record,
) -> Result<Ready, Fault> {
    let limit = listener.limits.handshake;
    match lead(shared, listener, tls, (client, buffer), record).await {
        Ok(ready) => Ok(ready),
        Err((fault, alert)) => {
            if let Some(description) = alert {
                // Content type, version, length; level fatal. Errors are ignored: the client may be gone.
                let alert = [21, 3, 3, 0, 2, 2, description];
                let _ = timeout(limit, client.write_all(&alert)).await;
            }
            Err(fault)
        }
    }
}

async fn lead(
    shared: &ServerContext,
    listener: &ListenerConfig,
    tls: &Tls,
    (client, mut buffer): (&mut Leg, HandshakeBuffer),
    record: &mut Record,
) -> Result<Ready, (Fault, Option<u8>)> {
    let (mut scan, left) = (Scan::default(), buffer.left(listener.limits.handshake));
    // Nothing is consumed, because the server gets all of it.
    let read = buffer.message_within(HELLO_MAX, client, |input| Ok(scan.feed(input)?.map(|hello| (hello, 0))));
    let read = timeout(left, read).await;
    let explained = |e| {
        let (fault, alert) = bad(e);
        (proxy_protocol::explained(buffer.seen(), fault), alert)
    };
    let hello = read.map_err(|_| (Fault::Timeout(Step::Handshake), None))?.map_err(explained)?;
    let mut asked = hello.name.clone().map(|host| Target { host, port: tls.port.unwrap_or(client.local().port()) });
    if listener.intercepts.is_some() {
        asked.get_or_insert_with(|| client.local().into());
    }
    record.target = asked.as_ref().map(Target::to_string);
    let led = match tls.leads_to(&hello) {
        Some(led) if led.is_some() || asked.is_some() => led,
        None if listener.intercepts.is_some() => None,
        _ => return Err((Fault::NoRoute(describe(&hello)), Some(UNRECOGNIZED_NAME))),
    };
    // A configured target is like that of a plug.
    let rules = if led.is_some() && listener.rules.guarded {
        Cow::Owned(listener.rules.unguarded())
    } else {
        Cow::Borrowed(&listener.rules)
    };
    let refused = |fault| {
        let alert = if let Fault::Denied(_) = fault { ACCESS_DENIED } else { INTERNAL_ERROR };
        (fault, Some(alert))
    };
    let subject = Subject::by(client.source().ip());
    let target = match (led, &asked) {
        (Some(LeadTo::Pool(pool)), _) => {
            let connected =
                Box::pin(pooled::connect(shared, (Some(&rules), listener), client, &subject, pool, record)).await;
            let (server, lease) = connected.map_err(refused)?;
            record.target.get_or_insert_with(|| lease.0.name.to_string());
            return Ok(Ready { lease: Some(lease), ..Ready::with(server, buffer.rest()) });
        }
        (Some(LeadTo::Target(target)), _) | (None, Some(target)) => target,
        (None, None) => unreachable!("a client that names no server is led somewhere, or refused"),
    };
    record.target.get_or_insert_with(|| target.to_string());
    // A name only leads where the configuration says so: its client wants another address.
    let at = listener.wanted(client).filter(|_| led.is_none());
    let reached =
        connect_under(&rules, shared, listener, client, &subject, (target, at), record).await.map_err(refused)?;
    record.server = Some(reached.leg.remote());
    Ok(Ready::reached(reached, Leftovers::for_server(buffer.rest())))
}

fn bad(e: HandshakeError<HelloError>) -> (Fault, Option<u8>) {
    let alert = match &e {
        HandshakeError::Parse(e) => e.alert(),
        HandshakeError::TooLong(_) => HelloError::TooLong.alert(),
        HandshakeError::Closed | HandshakeError::Io(_) => None,
    };
    (Fault::BadRequest(e.to_string()), alert)
}

fn describe(hello: &ClientHello) -> String {
    match &hello.name {
        Some(Host::Name(name)) => name.clone(),
        Some(Host::Ip(_)) | None => "a client that names no server".into(),
    }
}
