//! HTTP/1.0 and 1.1 (RFC 9110, RFC 9112): a forward proxy for CONNECT and requests in absolute-form or,
//! on a listener with routes, a reverse proxy that presents several servers as one site ([`site`]). Intercepted
//! requests go to the server that the client wants.
//!
//! A client's connection carries a sequence of requests. Each one is read, checked and answered before the next is parsed;
//! pipelined requests wait, so that replies come in order. Each request may go to a different target; the connection to the
//! last server is kept in case the next request has the same target. After CONNECT, or once a server has switched protocols
//! (101), no requests follow, and both legs are handed to the relay, which may splice them. Other messages have their bodies
//! spliced if they are long enough: the engine relays the rest of the body, and returns both legs (`Splicer::relay_message`).
//!
//! Each request has a line in the access log. The relay writes the line of a CONNECT or 101.

mod alarm;
mod auth;
mod exchange;
mod fields;
mod forward_request;
mod line;
mod read;
mod refresh;
mod site;
mod stored;

use crate::{cache::Cache, habit::Habit, pool::Pool, stream::Stream};
use alarm::Alarm;
use bytes::Bytes;
use fields::Current;
use forward_request::{Held, Onwards, RoutedRequest, To};
use line::{extra_of, path_of};
use longsplice_engine::{Leftovers, Leg, LegOfProxy};
use longsplice_http::{Authority, Form, Framing, Request, Wrong, accept::KNOWN, forward, path, reply::Reply};
use longsplice_proxy::{
    access::Denied,
    config::Http,
    context::{Front, Live, ServerContext},
    counters::Counters,
    fault::{Fault, Step},
    filter::{FilterDecision, ReplyFilter},
    limits::Limits,
    log::access_log::Record,
    onward::{DELIVER, Ready, Relayed, connect, dial::Reached, linger, relay, write},
    rewrite::Wanted,
    target::{Host, Target},
};
use std::{collections::HashMap, net::SocketAddr, pin::Pin, sync::Arc, time::Instant};
use tokio::time::timeout;

/// Default port of `http` (RFC 9110, 4.2.1).
const PORT: u16 = 80;

/// What a listener needs beside its configuration.
pub(crate) struct HttpListener {
    /// Pools by name.
    pub pools: Arc<HashMap<String, Arc<Pool>>>,
    /// Cache, and the fingerprint of the filter that stored replies have passed.
    pub cache: Option<(Arc<Cache>, Arc<str>)>,
}

/// A client's connection, with its sequence of requests.
struct Row<'a> {
    live: Live,
    front: &'a Front,
    http: &'a Http,
    of: &'a HttpListener,
    client: Stream,
    /// Connection to the last server.
    server: Option<Held>,
    /// What the replies of servers outside of pools are like.
    habit: Habit,
    began: Instant,
    /// Number of requests so far.
    count: u64,
    /// When the last one was answered.
    answered: Instant,
    /// The request that is served, for changes of fields.
    current: Current,
    alarm: Alarm,
    /// Completes when the client may go to another process, or no new requests may be accepted.
    goes: Pin<Box<dyn Future<Output = ()> + Send + Sync>>,
    /// It has completed, and the client stays.
    stays: bool,
}

/// What happens to the connection after a request.
enum Next {
    /// Another request may follow.
    Request,
    /// Close it, once the client has read our last bytes.
    Close,
    /// Reset it.
    Reset,
    /// The relay has it.
    Relay(Box<Record>),
}

/// Serves one connection. `read`: the bytes read from it so far.
pub(crate) async fn serve(live: Live, (front, http, of): (&Front, &Http, &HttpListener), (client, read): (Leg, Bytes)) {
    let client = Stream::with(client, &read);
    let shared = live.shared.clone();
    let (began, requests) = live.continues().unwrap_or_else(|| (Instant::now(), None));
    let (count, answered) = requests.unwrap_or((0, began));
    let goes = Box::pin(live.goes());
    let mut row = Row {
        live,
        front,
        http,
        of,
        client,
        server: None,
        habit: Habit::default(),
        began,
        count,
        answered,
        current: Current::default(),
        alarm: Alarm::new(),
        goes,
        stays: false,
    };
    let (end, mut pending) = (row.live.end(), None);
    let next = tokio::select! {
        next = row.requests(&mut pending) => next,
        () = end => Next::Reset,
    };
    let is_forbidden = matches!(next, Next::Reset) && row.live.is_forbidden();
    // between two requests, there is one to tell of only if the connection does not simply end with all others
    if let Some((started, mut record)) = pending.or_else(|| is_forbidden.then(|| (began, row.record()))) {
        row.live.ended(&mut record);
        write(&row.live, record, started);
    }
    let Row { live, mut client, server, began, .. } = row;
    match next {
        Next::Relay(record) => {
            let Some(held) = server else { return client.close(&shared.splicer) };
            let Held { stream, lease, onward: Onwards { way, known, place }, .. } = held;
            let ((client, to_server), (leg, to_client)) = (client.into_parts(), stream.into_parts());
            let left = Leftovers::new(to_server, to_client);
            let lease = lease.map(|lease| lease.general).or(place);
            let ready = Ready::reached(Reached { leg, lease, way, known }, left);
            return relay(Relayed { live, started: began, passed: None }, front, client, ready, *record);
        }
        Next::Reset => {
            // what came of the reply before it broke off, unless everything ends
            if !is_forbidden {
                tokio::select! {
                    () = client.leg.delivered(DELIVER) => {}
                    () = shared.splicer.stopped() => {}
                }
            }
            client.leg.reset_at_close();
        }
        Next::Request | Next::Close => linger(&mut client.leg).await,
    }
    client.close(&shared.splicer);
    if let Some(held) = server {
        held.stream.close(&shared.splicer);
    }
}

impl Row<'_> {
    fn shared(&self) -> &ServerContext {
        &self.live.shared
    }

    fn record(&self) -> Record {
        self.front.listener.record(self.client.leg.source())
    }

    /// Serves one request after the other. `pending`: start and record of one that has no line in the access log yet.
    async fn requests(&mut self, pending: &mut Option<(Instant, Record)>) -> Next {
        loop {
            let read = self.read_request().await;
            let started = if self.count == 0 { self.began } else { Instant::now() };
            let next = match read {
                Ok(Some(request)) => {
                    self.count += 1;
                    Counters::add(&self.shared().counters.requests);
                    let mut record = self.record();
                    record.method = Some(request.method.clone());
                    record.uri = path_of(&request);
                    record.extra = extra_of(&request, self.shared().wanted_of_requests());
                    let next = self.serve(&request, &mut pending.insert((started, record)).1).await;
                    // of what is relayed, the relay writes the line
                    if let Some((_, record)) = pending.take().filter(|_| !matches!(next, Next::Relay(..))) {
                        write(&self.live, record, started);
                    }
                    self.answered = Instant::now();
                    next
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

    /// Checks one request and answers it.
    async fn serve(&mut self, request: &Request, record: &mut Record) -> Next {
        self.current = Current::default();
        let judged = if !self.http.routes.is_empty() {
            self.judge_for_site(request, record).await
        } else if self.front.listener.intercepts.is_some() {
            self.judge_intercepted(request, record)
        } else {
            self.judge(request, record).await
        };
        let own;
        let mut routed = match judged.and_then(|routed| self.fits(routed)) {
            Ok(routed) => routed,
            Err((fault, status)) => return self.refuse(request, record, &fault, status).await,
        };
        self.note_for_changes(&routed);
        if let Some(changed) = routed.changed.take() {
            own = changed;
            routed.request = &own;
        }
        let request = routed.request;
        match &routed.to {
            To::Elsewhere(status, location) => self.redirect(request, *status, location, record).await,
            To::Target(target) if request.method == "CONNECT" => self.connect(&routed, target, record).await,
            _ if request.method == "OPTIONS" && request.max_forwards == Some(0) => {
                self.answer_options(request, record).await
            }
            _ if self.of.cache.is_none() => self.forward_request(&routed, None, record).await,
            // boxed, to keep the tasks of other connections small
            _ if request.method == "PURGE" => match Box::pin(self.purge(&routed, record)).await {
                Some(next) => next,
                None => self.forward_request(&routed, None, record).await,
            },
            _ => match Box::pin(self.look_up(&routed, record)).await {
                Ok(next) => next,
                Err(asking) => self.forward_request(&routed, asking, record).await,
            },
        }
    }

    /// Checks a request to a forward proxy: authentication, target and rules.
    async fn judge<'r>(&self, request: &'r Request, record: &mut Record) -> Result<RoutedRequest<'r>, (Fault, u16)> {
        let bad = |why: &str| (Fault::BadRequest(why.into()), 400);
        let limit = self.front.listener.limits.handshake;
        let client = self.client.leg.source().ip();
        let user = auth::authenticate(&request.fields, ("proxy-authorization", 407), &self.http.users, client);
        record.user = timeout(limit, user).await.map_err(|_| (Fault::Timeout(Step::Handshake), 503))??;
        let (authority, path) = match &request.form {
            Form::Authority(authority) => (authority, None),
            Form::Absolute(authority, path) => (authority, Some(path)),
            Form::Origin(_) | Form::Asterisk => {
                return Err(bad("this is a proxy: the request target has to be absolute (RFC 9112, 3.2.2)"));
            }
        };
        let target = target(authority).ok_or_else(|| bad("a bad host in the request target"))?;
        record.target = Some(target.to_string());
        // A path with several readings is left to the server, unless rules have to match it.
        let path = match path.filter(|_| self.front.listener.rules.know_paths()) {
            Some(path) => Some(path::plain(path).map_err(wrong)?),
            None => None,
        };
        no_trace(request)?;
        let user = record.user.clone();
        Ok(RoutedRequest { request, route: None, changed: None, site: None, path, user, to: To::Target(target) })
    }

    /// Serves a CONNECT request (RFC 9110, 9.3.6).
    async fn connect(&mut self, routed: &RoutedRequest<'_>, target: &Target, record: &mut Record) -> Next {
        self.drop_server();
        let listener = &self.front.listener;
        let subject = routed.subject(&self.client);
        self.client.leg.speaks_first(false);
        let (server, onward) = match connect(self.shared(), listener, &self.client.leg, &subject, target, record).await
        {
            Ok(reached) => Onwards::of(reached),
            Err(fault) => return self.refuse(routed.request, record, &fault, status_of(&fault)).await,
        };
        record.server = Some(server.leg.remote());
        record.status = Some(200);
        self.server = Some(Held { target: target.clone(), stream: server, reused: false, lease: None, onward });
        let granted = self.client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n");
        match timeout(listener.limits.handshake, granted).await {
            Ok(Ok(())) => Next::Relay(Box::new(record.clone())),
            Ok(Err(_)) | Err(_) => {
                record.how = "client-reset";
                Next::Reset
            }
        }
    }

    /// Answers OPTIONS whose `Max-Forwards` does not allow another hop (RFC 9110, 7.6.2).
    async fn answer_options(&mut self, request: &Request, record: &mut Record) -> Next {
        let next = self.after_refusal(request);
        record.status = Some(200);
        let close = matches!(next, Next::Close);
        let reply = Reply { status: 200, text: "a proxy", close, ..Reply::default() };
        self.say(&reply).await;
        next
    }

    /// Returns the limits of a route.
    fn limits_of(&self, routed: &RoutedRequest<'_>) -> Limits {
        let mut limits = self.front.listener.limits.clone();
        if let Some(route) = routed.route.and_then(|number| self.http.routes.get(number - 1)) {
            let [request, reply] = route.longest;
            limits.request_body = request.or(limits.request_body);
            limits.reply_body = reply.or(limits.reply_body);
        }
        limits
    }

    /// Refuses requests whose heads say that their bodies are too long, are denied, or cannot be read and have to be.
    fn fits<'r>(&self, routed: RoutedRequest<'r>) -> Result<RoutedRequest<'r>, (Fault, u16)> {
        let (request, filter) = (routed.request, &self.http.filter);
        match filter.wanted_of_upload(request) {
            Wanted::Denied(why) => return Err((Fault::Denied(Denied::Unread(why)), 403)),
            Wanted::Unreadable(why) => return Err((Fault::Denied(Denied::Unread(why)), 415)),
            Wanted::Nothing | Wanted::Unread | Wanted::Changes(..) | Wanted::Whole => {}
        }
        if !request.framing.is_empty() {
            match ReplyFilter::of_upload(filter, request).decision() {
                FilterDecision::Denied(rule) => return Err((Fault::Denied(Denied::Upload(rule)), 403)),
                FilterDecision::Unreadable(why) => {
                    exchange::count_bad(&self.shared().counters, why);
                    return Err(exchange::bad_upload(why));
                }
                FilterDecision::Allowed(_) | FilterDecision::Open { .. } => {}
            }
        }
        match (request.framing, self.limits_of(&routed).request_body) {
            (Framing::Exact(length), Some(most)) if length > most => Err(exchange::too_long(most)),
            _ => Ok(routed),
        }
    }

    /// Tells the client where else to ask.
    async fn redirect(&mut self, request: &Request, status: u16, location: &str, record: &mut Record) -> Next {
        let next = self.after_refusal(request);
        record.status = Some(status);
        let close = matches!(next, Next::Close);
        let head_only = request.method == "HEAD";
        let field = Some(("Location", location));
        let reply = Reply { status, text: "it is elsewhere", field, close, head_only, ..Reply::default() };
        self.say(&reply).await;
        next
    }

    /// Answers in place of a server.
    async fn refuse(&mut self, request: &Request, record: &mut Record, fault: &Fault, status: u16) -> Next {
        let next = self.after_refusal(request);
        self.answer(Some(request), record, fault, Some(status), matches!(next, Next::Close)).await;
        next
    }

    /// Counts and logs a fault, and sends the client an error reply if there is a status for it.
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
        let codings = KNOWN.join(", ");
        let field = match status {
            401 => Some(("WWW-Authenticate", auth::CHALLENGE)),
            407 => Some(("Proxy-Authenticate", auth::CHALLENGE)),
            // what would have been read (RFC 9110, 12.5.3 and 15.5.16)
            415 => Some(("Accept-Encoding", &*codings)),
            _ => None,
        };
        let pages = self.http.error_pages.clone();
        let page = pages.find(status).map(|page| (page.media_type.as_str(), &*page.body));
        let head_only = request.is_some_and(|r| r.method == "HEAD");
        let reply = Reply { status, text: &fault.to_string(), field, page, close, head_only };
        self.say(&reply).await;
    }

    /// Whether another request may follow this one.
    fn may_go_on(&self, request: &Request) -> bool {
        request.keep_alive && !*self.shared().stop.borrow()
    }

    /// Returns what follows a reply of our own. An unread request body would be parsed as the
    /// next request, so the connection is closed then.
    fn after_refusal(&self, request: &Request) -> Next {
        if request.framing.is_empty() && self.may_go_on(request) { Next::Request } else { Next::Close }
    }

    fn drop_server(&mut self) {
        if let Some(held) = self.server.take() {
            held.stream.close(&self.live.shared.splicer);
        }
    }
}

/// Refuses TRACE: its reply would disclose all fields, including cookies, to a script that made the client send it.
fn no_trace(request: &Request) -> Result<(), (Fault, u16)> {
    if request.method == "TRACE" { Err((Fault::BadRequest("TRACE is not passed on".into()), 501)) } else { Ok(()) }
}

fn wrong(wrong: Wrong) -> (Fault, u16) {
    (Fault::BadRequest(wrong.to_string()), wrong.status())
}

/// Returns the status for a target that cannot be reached.
fn status_of(fault: &Fault) -> u16 {
    match fault {
        Fault::Denied(_) => 403,
        Fault::Timeout(Step::Queue) => 503,
        Fault::Timeout(_) => 504,
        Fault::AuthFailed { .. } => 407,
        Fault::BadRequest(_) => 400,
        Fault::NoRoute(_) => 404,
        Fault::NoServer(_) | Fault::Limit(_) => 503,
        Fault::NoAddress(_) | Fault::Unreachable(_) | Fault::BadReply(_) => 502,
    }
}

/// Returns the target to connect to.
fn target(authority: &Authority) -> Option<Target> {
    let host = Host::from_name(authority.host.as_bytes()).ok()?;
    Some(Target { host, port: authority.port.unwrap_or(PORT) })
}

/// Returns the value of `Host`.
fn host(target: &Target) -> String {
    match &target.host {
        Host::Name(name) => forward::host(name, target.port),
        Host::Ip(ip) => match SocketAddr::new(*ip, target.port) {
            SocketAddr::V4(a) => forward::host(&a.ip().to_string(), a.port()),
            SocketAddr::V6(a) => forward::host(&format!("[{}]", a.ip()), a.port()),
        },
    }
}
