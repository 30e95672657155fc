//! HTTP/1.0 and 1.1 as a forward proxy (RFC 9110, RFC 9112): CONNECT, and requests in absolute-form.
//!
//! A connection of a client is a row of requests, each read, judged and answered before the next is looked at; what is
//! pipelined waits, so that replies come in order. Each may go to another target: the connection to the last server is kept
//! for the case that the next is for the same. With CONNECT, or once a server has switched protocols (101), the row ends,
//! and the two legs are handed to the relay, which may splice them. All other replies are copied: their ends have to be
//! seen, and the next request has to be read.
//!
//! Each request has a line in the access log; the relay writes that of CONNECT and 101.

mod auth;
mod exchange;
mod read;
mod stream;

use crate::{
    access_log::Record,
    config::Http,
    connection::{Ready, Relayed, connect, linger, relay, write},
    counters::Counters,
    fault::{Fault, Step},
    server::{Front, Live, Shared},
    target::{Host, Target},
};
use bytes::Bytes;
use exchange::{End, Exchange};
use longsplice_engine::{Leftovers, Leg};
use longsplice_http::{
    Authority, Form, Framing, Request,
    forward::{self, Onward},
    reply::Reply,
};
use std::{
    future::poll_fn,
    net::SocketAddr,
    time::{Duration, Instant},
};
use stream::Stream;
use tokio::time::timeout;

/// Why a reply that was passed on was not spliced, in the access log.
const COPIED: &str = "http-reply";
/// The port of `http` (RFC 9110, 4.2.1).
const PORT: u16 = 80;

/// A client's connection.
struct Row<'a> {
    live: Live,
    front: &'a Front,
    http: &'a Http,
    client: Stream,
    /// The connection to the last server.
    server: Option<(Target, Stream)>,
    began: Instant,
    /// Requests so far.
    count: u64,
}

/// What becomes of the connection after a request.
enum Next {
    /// Another request may follow.
    Request,
    /// It is to be closed, once the client has read our last words.
    Close,
    /// It is to be reset.
    Reset,
    /// It belongs to the relay.
    Relay(Box<Record>),
}

/// Serves one connection, of which so much was read already.
pub(crate) async fn serve(live: Live, front: &Front, http: &Http, (client, read): (Leg, Bytes)) {
    let client = Stream::with(client, &read);
    let shared = live.shared.clone();
    let mut row = Row { live, front, http, client, server: None, began: Instant::now(), count: 0 };
    let next = tokio::select! {
        next = row.requests() => next,
        () = shared.splicer.stopped() => Next::Reset,
    };
    let Row { live, mut client, server, began, .. } = row;
    match next {
        Next::Relay(record) => {
            let Some((_, server)) = server else { return client.close(&shared.splicer) };
            let ((client, to_server), (server, to_client)) = (client.into_parts(), server.into_parts());
            let left = Leftovers { to_server, to_client };
            return relay(Relayed { live, started: began }, front, client, Ready { server, left }, *record);
        }
        Next::Reset => client.leg.reset_at_close(),
        Next::Request | Next::Close => linger(&mut client.leg).await,
    }
    client.close(&shared.splicer);
    if let Some((_, server)) = server {
        server.close(&shared.splicer);
    }
}

impl Row<'_> {
    fn shared(&self) -> &Shared {
        &self.live.shared
    }

    fn record(&self) -> Record {
        Record::new(self.front.listener.protocol.name(), self.client.leg.source())
    }

    /// One request after the other.
    async fn requests(&mut self) -> Next {
        loop {
            let read = self.read_request().await;
            let started = if self.count == 0 { self.began } else { Instant::now() };
            let next = match read {
                Ok(Some(request)) => {
                    self.count += 1;
                    Counters::add(&self.shared().counters.requests);
                    let mut record = self.record();
                    record.method = Some(request.method.clone());
                    self.serve(&request, record, started).await
                }
                Ok(None) => return Next::Close,
                Err((fault, status)) => {
                    let mut record = self.record();
                    self.answer(None, &mut record, &fault, status, true).await;
                    write(&self.live, record, started);
                    Next::Close
                }
            };
            if !matches!(next, Next::Request) {
                return next;
            }
        }
    }

    /// Judges one request, and answers it.
    async fn serve(&mut self, request: &Request, mut record: Record, started: Instant) -> Next {
        let target = match self.judge(request, &mut record) {
            Ok(target) => target,
            Err((fault, status)) => {
                let next = self.refuse(request, &mut record, &fault, status).await;
                write(&self.live, record, started);
                return next;
            }
        };
        let next = if request.method == "CONNECT" {
            self.connect(request, target, &mut record).await
        } else if request.method == "OPTIONS" && request.max_forwards == Some(0) {
            self.answer_options(request, &mut record).await
        } else {
            self.pass_on(request, target, &mut record).await
        };
        if let Next::Relay(..) = next {
            return next; // the relay writes the line
        }
        write(&self.live, record, started);
        next
    }

    /// Who asks, and for whom.
    fn judge(&self, request: &Request, record: &mut Record) -> Result<Target, (Fault, u16)> {
        let bad = |why: &str| (Fault::BadRequest(why.into()), 400);
        record.user = auth::authenticate(&request.fields, &self.http.users).map_err(|fault| (fault, 407))?;
        let authority = match &request.form {
            Form::Authority(authority) | Form::Absolute(authority, _) => authority,
            Form::Origin(_) | Form::Asterisk => {
                return Err(bad("this is a proxy: the request target has to be absolute (RFC 9112, 3.2.2)"));
            }
        };
        let target = target(authority).ok_or_else(|| bad("a bad host in the request target"))?;
        record.target = Some(target.to_string());
        if request.method == "TRACE" {
            // The reply would repeat all fields, and cookies among them, to whoever made the client ask.
            return Err((Fault::BadRequest("TRACE is not passed on".into()), 501));
        }
        Ok(target)
    }

    /// CONNECT (RFC 9110, 9.3.6).
    async fn connect(&mut self, request: &Request, target: Target, record: &mut Record) -> Next {
        self.drop_server();
        let listener = &self.front.listener;
        let server = match connect(self.shared(), listener, &self.client.leg, &target).await {
            Ok(server) => Stream::new(server),
            Err(fault) => return self.refuse(request, record, &fault, status_of(&fault)).await,
        };
        record.server = Some(server.leg.remote());
        record.status = Some(200);
        self.server = Some((target, server));
        let granted = self.client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n");
        match timeout(listener.limits.handshake, granted).await {
            Ok(Ok(())) => Next::Relay(Box::new(record.clone())),
            Ok(Err(_)) | Err(_) => {
                record.how = "client-reset";
                Next::Reset
            }
        }
    }

    /// Nobody is left who may pass it on (RFC 9110, 7.6.2).
    async fn answer_options(&mut self, request: &Request, record: &mut Record) -> Next {
        let next = self.after_refusal(request);
        record.status = Some(200);
        let close = matches!(next, Next::Close);
        let reply = Reply { status: 200, text: "a forward proxy", challenge: None, close, head_only: false };
        self.say(&reply.encode()).await;
        next
    }

    /// A request in absolute-form, and its reply.
    async fn pass_on(&mut self, request: &Request, target: Target, record: &mut Record) -> Next {
        let mut fresh = false;
        loop {
            let reused = match self.server_for(&target, fresh).await {
                Ok(reused) => reused,
                Err(fault) => return self.refuse(request, record, &fault, status_of(&fault)).await,
            };
            let end = self.exchange(request, &target, record, reused).await;
            let kept = matches!(end, End::Done { reuse: true, .. } | End::Upgraded);
            if !kept {
                self.drop_server();
            }
            return match end {
                End::Stale => {
                    fresh = true;
                    continue;
                }
                End::Done { close, .. } => {
                    Counters::add(&self.shared().counters.replies_copied);
                    record.refusal = Some(COPIED.into());
                    if close { Next::Close } else { Next::Request }
                }
                End::Upgraded => Next::Relay(Box::new(record.clone())),
                End::Fault(fault, status) => {
                    self.answer(Some(request), record, &fault, Some(status), true).await;
                    Next::Close
                }
                End::Cut(how, why) => {
                    (record.how, record.refusal) = (how, Some(why));
                    // Without a length the client would take a FIN for the end.
                    Next::Reset
                }
            };
        }
    }

    /// Sees to it that there is a connection to the target; true: it was used before.
    async fn server_for(&mut self, target: &Target, fresh: bool) -> Result<bool, Fault> {
        if let Some((last, server)) = &mut self.server
            && last == target
            && !fresh
            && server.is_quiet().await
        {
            Counters::add(&self.shared().counters.reused);
            return Ok(true);
        }
        self.drop_server();
        let server = connect(self.shared(), &self.front.listener, &self.client.leg, target).await?;
        self.server = Some((target.clone(), Stream::new(server)));
        Ok(false)
    }

    async fn exchange(&mut self, request: &Request, target: &Target, record: &mut Record, reused: bool) -> End {
        let last = !self.may_go_on(request);
        let limits = &self.front.listener.limits;
        let idle = self.front.policy.idle_limit;
        let Some((_, server)) = &mut self.server else { return End::Stale };
        record.server = Some(server.leg.remote());
        let onward = Onward {
            host: &host(target),
            via: self.http.via.as_deref(),
            forwarded: self.http.forwarded,
            client: self.client.leg.source().ip(),
        };
        let head = forward::request(request, &onward);
        let ends = (&mut self.client, server);
        let mut exchange = Exchange::new(ends, request, head, self.http.via.as_deref(), (last, reused));
        let end = loop {
            let limit = if exchange.replied() { idle } else { limits.reply.min(idle) };
            let left = limit.saturating_sub(exchange.moved.elapsed());
            match timeout(left, poll_fn(|cx| exchange.poll(cx))).await {
                Ok(end) => break end,
                Err(_) if exchange.moved.elapsed() < limit => {}
                Err(_) if exchange.replied() => break End::Cut("idle", "nothing has moved for too long".into()),
                Err(_) if exchange.waits_for_client() => break End::Fault(Fault::Timeout(Step::Body), 408),
                Err(_) => break End::Fault(Fault::Timeout(Step::Reply), 504),
            }
        };
        record.status = exchange.status;
        (record.bytes_up, record.bytes_down) = (exchange.passed[0], exchange.passed[1]);
        end
    }

    /// Answers instead of a server.
    async fn refuse(&mut self, request: &Request, record: &mut Record, fault: &Fault, status: u16) -> Next {
        let next = self.after_refusal(request);
        self.answer(Some(request), record, fault, Some(status), matches!(next, Next::Close)).await;
        next
    }

    /// Counts and notes a fault, and tells the client, if it listens.
    async fn answer(
        &mut self,
        request: Option<&Request>,
        record: &mut Record,
        fault: &Fault,
        status: Option<u16>,
        close: bool,
    ) {
        self.shared().counters.fault(fault);
        record.fault(fault);
        let Some(status) = status else { return };
        record.status = Some(status);
        let reply = Reply {
            status,
            text: &fault.to_string(),
            challenge: (status == 407).then_some(auth::CHALLENGE),
            close,
            head_only: request.is_some_and(|r| r.method == "HEAD"),
        };
        self.say(&reply.encode()).await;
    }

    /// Says something of our own; whether the client gets to read it is its own affair.
    async fn say(&mut self, bytes: &[u8]) {
        let limit: Duration = self.front.listener.limits.handshake;
        let _ = timeout(limit, self.client.write_all(bytes)).await;
    }

    /// Whether another request may follow this one.
    fn may_go_on(&self, request: &Request) -> bool {
        request.keep_alive && !*self.shared().stop.borrow()
    }

    /// After an answer of ours. What of the request was not read would be taken for the next.
    fn after_refusal(&self, request: &Request) -> Next {
        let whole = matches!(request.framing, Framing::None | Framing::Exact(0));
        if whole && self.may_go_on(request) { Next::Request } else { Next::Close }
    }

    fn drop_server(&mut self) {
        if let Some((_, server)) = self.server.take() {
            server.close(&self.live.shared.splicer);
        }
    }
}

/// The status for a target that cannot be had.
fn status_of(fault: &Fault) -> u16 {
    match fault {
        Fault::Denied(_) | Fault::NoRoute(_) => 403,
        Fault::Timeout(_) => 504,
        Fault::AuthFailed { .. } => 407,
        Fault::BadRequest(_) => 400,
        Fault::NoAddress(_) | Fault::Unreachable(_) | Fault::BadReply(_) => 502,
    }
}

/// What is connected to.
fn target(authority: &Authority) -> Option<Target> {
    let host = Host::from_name(authority.host.as_bytes()).ok()?;
    Some(Target { host, port: authority.port.unwrap_or(PORT) })
}

/// The value of `Host`.
fn host(target: &Target) -> String {
    match &target.host {
        Host::Name(name) => forward::host(name, target.port),
        Host::Ip(ip) => match SocketAddr::new(*ip, target.port) {
            SocketAddr::V4(a) => forward::host(&a.ip().to_string(), a.port()),
            SocketAddr::V6(a) => forward::host(&format!("[{}]", a.ip()), a.port()),
        },
    }
}
