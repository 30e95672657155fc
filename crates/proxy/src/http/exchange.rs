//! One request and its reply: both bodies are relayed at the same time, each to its own end.
//!
//! | input | result |
//! | --- | --- |
//! | body of the request | checked, written to the server unchanged |
//! | interim reply (1xx) | forwarded, unless the client speaks HTTP/1.0 |
//! | 101, if the client asked for it | the exchange ends: no HTTP follows |
//! | head of the reply | checked by the rules, rewritten; after that, the reply cannot be replaced any more |
//! | 304 to conditions of the cache | the exchange ends: the cache answers |
//! | body of the reply | checked, written to the client; without chunks if the client does not understand them |
//! | reply before the end of the request | forwarded; then both connections are closed |
//! | reply that the rules must see more of | held back, head and body ([`Down::hold`]), or just not spliced ([`ReplyFilter`]) |
//!
//! Nothing is read from the server beyond the end of the reply. Bytes after it mean that the
//! server and we disagree about the end, and its connection is not used again.

use crate::{
    access::Denied,
    cache::{Asking, Fill, Heard, Meta},
    config::Http,
    fault::Fault,
    filter::{FIRST_MAX, FilterDecision, ReplyFilter},
    http_stream::Stream,
};
use longsplice_engine::{
    EndReason, FlowInfo, Leftovers, Leg, Message, Pair, PathFinding, Policy, Refusal, RelayedMessage, Side, SpliceWhen,
    Splicer,
};
use longsplice_http::{
    Body, Framing, Kind, REPLY_HEAD_MAX, Request, Response, Scan, Step, Version, Wrong,
    forward::{self, Back},
};
use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant, SystemTime},
};
use tokio::time::{Sleep, sleep};

/// Maximum number of interim replies in [`INTERIM_WITHIN`]; no server has a reason to send more. In a long operation, it may
/// send one again and again (RFC 2518, 10.1), so all of an exchange may be many.
const INTERIM_MAX: u32 = 100;
const INTERIM_WITHIN: Duration = Duration::from_secs(1);
/// Maximum number of bytes of a reply that are held back: the longest head, the longest first part of the body, and as many
/// bytes of chunk framing.
const HELD_MAX: usize = REPLY_HEAD_MAX + 2 * FIRST_MAX;

/// Number of bytes still to come from which a splice may pay.
const LEAST_TO_COME: u64 = 16 * 1024;
/// Size of a body from which the engine copies it for less than we do, through pipes, so that a failed attempt does no harm.
const LONG: u64 = 512 * 1024;

/// Size of a body that a server with a small window sends in one piece, or nearly ([`Leg::clamp`]).
const CLAMPED: u64 = 32 * 1024;

pub(crate) struct Exchange<'a> {
    client: &'a mut Stream,
    server: &'a mut Stream,
    request: &'a Request,
    http: &'a Http,
    /// Whether the client's connection is closed afterwards, even if the reply allows another request.
    last: bool,
    /// What the cache needs of the reply, its result for the access log, and the reply being stored.
    asking: Option<&'a Asking>,
    pub cache: Option<&'static str>,
    fill: Option<Fill>,
    up: Up,
    down: Down,
    /// Status of the reply, once its head has arrived.
    pub status: Option<u16>,
    /// The rule that decided on the reply, and its action.
    pub reply_rule: Option<String>,
    /// Bytes written, by the side that sent them.
    pub passed: Pair<u64>,
    /// Time of the last progress.
    pub moved: Instant,
    /// Amount of remaining content from which a splice pays.
    bodies: SpliceWhen,
    /// Whether a body with that much content was found.
    ahead: bool,
    /// Of the bytes written, those that were spliced; number of splices; reason against a splice.
    pub spliced: Pair<u64>,
    pub splices: u32,
    /// Number of the flow that passed a body on last.
    pub flow: Option<u64>,
    pub refusal: Option<Refusal>,
    /// What was measured, if that is `path`.
    pub path: Option<PathFinding>,
}

/// State of the direction from client to server.
struct Up {
    head: Vec<u8>,
    sent: usize,
    body: Body,
    /// Number of buffered bytes that belong to the body and may be written.
    checked: usize,
    /// The server does not accept more.
    broken: bool,
    /// The rest of the body must be copied.
    copy: bool,
}

/// State of the direction from server to client.
struct Down {
    scan: Scan,
    /// Head, followed by the part of the body that is held back.
    head: Vec<u8>,
    sent: usize,
    /// The body, once the head has arrived.
    body: Option<Body>,
    checked: usize,
    /// The whole body is worth a splice.
    long: bool,
    /// Remove the chunk framing: the client gets only the content.
    strip: bool,
    /// The rest of the body must be copied.
    copy: bool,
    /// Number of interim replies since a time that is no more than [`INTERIM_WITHIN`] before the last of them.
    interim: (u32, Instant),
    /// The filter, while it has not decided on the reply.
    filter: Option<ReplyFilter>,
    /// While set, nothing of the reply is sent; the timer ends that.
    hold: Option<Pin<Box<Sleep>>>,
    end: End,
}

/// Result of an exchange, or its next step.
#[derive(Debug)]
pub(crate) enum End {
    /// Enough content from this side remains for a splice: call [`Exchange::relay_body`], and continue.
    Ahead(Side),
    /// The reply was sent. `close`: it announced that we close; `reuse`: the server's connection may carry another request.
    Done { close: bool, reuse: bool },
    /// The server confirmed the stored reply, with this metadata. `None`: its 304 belongs to another reply.
    Validated { meta: Option<Box<Meta>>, reuse: bool },
    /// 101 was sent.
    Upgraded,
    /// The server closed without a reply.
    Stale,
    /// The server closed without a reply, and the request must not be sent twice. The client's
    /// connection is closed in the same way.
    Gone,
    /// Nothing of a final reply was sent: answer with this status.
    Fault(Fault, u16),
    /// The reply was started and cannot be finished.
    Cut(&'static str, String),
}

/// The `how` of an exchange whose reply was denied in the middle.
pub(super) const DENIED: &str = "denied";

/// Error, by its cause.
enum Broken {
    Client(io::Error),
    Server(io::Error),
    Wrong(Wrong),
    /// The rules deny the reply.
    Denied(Denied),
}

impl<'a> Exchange<'a> {
    /// Prepares an exchange. `head`: the request head for the server.
    pub fn new(
        (client, server): (&'a mut Stream, &'a mut Stream),
        request: &'a Request,
        head: Vec<u8>,
        http: &'a Http,
        last: bool,
        (bodies, asking): (SpliceWhen, Option<&'a Asking>),
    ) -> Exchange<'a> {
        let body = Body::new(request.framing);
        Exchange {
            client,
            server,
            request,
            http,
            last,
            asking,
            cache: None,
            fill: None,
            up: Up { head, sent: 0, body, checked: 0, broken: false, copy: false },
            down: Down {
                scan: scan(http),
                head: Vec::new(),
                sent: 0,
                body: None,
                checked: 0,
                long: false,
                strip: false,
                copy: false,
                interim: (0, Instant::now()),
                filter: None,
                hold: None,
                end: End::Stale,
            },
            status: None,
            reply_rule: None,
            passed: Pair::both(0),
            moved: Instant::now(),
            bodies,
            ahead: false,
            spliced: Pair::both(0),
            splices: 0,
            flow: None,
            refusal: None,
            path: None,
        }
    }

    /// Whether the head of the reply has arrived, and may have been sent.
    pub fn replied(&self) -> bool {
        self.down.body.is_some() && self.down.hold.is_none()
    }

    /// Drives both directions until the reply has ended.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        if !self.up_done() && !self.up.broken {
            match self.poll_up(cx) {
                Poll::Ready(Ok(())) if self.ahead => return Poll::Ready(End::Ahead(Side::Client)),
                Poll::Pending | Poll::Ready(Ok(())) => {}
                // The server may have replied before it closed.
                Poll::Ready(Err(Broken::Server(_))) => self.up.broken = true,
                Poll::Ready(Err(Broken::Client(e))) => {
                    return Poll::Ready(End::Cut("client-reset", e.to_string()));
                }
                Poll::Ready(Err(Broken::Wrong(wrong))) => return Poll::Ready(self.bad_request(wrong)),
                Poll::Ready(Err(Broken::Denied(_))) => unreachable!("the rules are for replies"),
            }
        }
        if self.up_done()
            && let Err(e) = self.watch_client(cx)
        {
            return Poll::Ready(End::Cut("client-reset", e.to_string()));
        }
        match ready!(self.poll_down(cx)) {
            Ok(()) if self.ahead => Poll::Ready(End::Ahead(Side::Server)),
            Ok(()) => Poll::Ready(std::mem::replace(&mut self.down.end, End::Stale)),
            Err(Broken::Client(e)) => Poll::Ready(End::Cut("client-reset", e.to_string())),
            Err(Broken::Server(e)) => Poll::Ready(self.no_reply(&e)),
            Err(Broken::Wrong(wrong)) => Poll::Ready(self.bad_reply(&wrong.to_string())),
            Err(Broken::Denied(why)) if self.replied() => Poll::Ready(End::Cut(DENIED, why.to_string())),
            Err(Broken::Denied(why)) => Poll::Ready(End::Fault(Fault::Denied(why), 403)),
        }
    }

    /// Relays the rest of a body in the engine: spliced if possible, otherwise copied. `Some`: the exchange has ended.
    pub async fn relay_body(
        &mut self,
        sender: Side,
        splicer: &Splicer,
        policy: Arc<Policy>,
        info: FlowInfo,
    ) -> Option<End> {
        self.ahead = false;
        let Exchange { client, server, up, down, .. } = self;
        let (from, head, checked, body) = match sender {
            Side::Client => (&mut **client, &up.head[up.sent..], &mut up.checked, Some(&mut up.body)),
            Side::Server => (&mut **server, &down.head[down.sent..], &mut down.checked, down.body.as_mut()),
        };
        let body = body?;
        let first = [head, from.in_hand()].concat();
        from.consume(std::mem::take(checked));
        let ahead = body.ahead();
        let (left, message) = match sender {
            Side::Client => (Leftovers::for_server(first), Message::from_client(ahead).until_receiver_speaks()),
            Side::Server => {
                let rest = Message::from_server(ahead);
                (Leftovers::for_client(first), if down.long && ahead.is_some() { rest.that_pays() } else { rest })
            }
        };
        let RelayedMessage { ended, missing, in_hand, excess, receiver_failed, .. } =
            splicer.relay_message(&mut client.leg, &mut server.leg, left, policy, info, message).await;
        match sender {
            Side::Client => (up.sent, up.broken) = (up.head.len(), receiver_failed),
            Side::Server => down.sent = down.head.len(),
        }
        match ahead {
            Some(ahead) => body.passed(ahead - missing),
            None => *body = Body::UntilClose(true),
        }
        // Of a chunk, the excess is the next one.
        if let (Side::Server, true, End::Done { reuse, .. }) = (sender, excess && body.is_done(), &mut down.end) {
            *reuse = false;
        }
        // Either the sender stopped early or the receiver sent something; copying notices both.
        // Copying also keeps a call that has moved nothing from being repeated.
        let copy = missing > 0;
        match sender {
            Side::Client => {
                up.copy |= copy;
                up.checked = in_hand.len();
                client.put_back(&in_hand);
            }
            Side::Server => down.copy |= copy,
        }
        self.passed.client += ended.bytes_up;
        self.passed.server += ended.bytes_down;
        self.spliced.client += ended.spliced_up;
        self.spliced.server += ended.spliced_down;
        self.splices += ended.splices;
        (self.refusal, self.path) = (ended.refusal, ended.path);
        self.flow = Some(ended.id);
        self.moved = Instant::now();
        let gone = |how| Some(End::Cut(how, "while its body was passed on".into()));
        match ended.how {
            EndReason::MessageRelayed => None,
            EndReason::ClientReset => gone("client-reset"),
            EndReason::ServerReset => gone("server-reset"),
            EndReason::Idle => gone("idle"),
            _ => gone("stopped"),
        }
    }

    /// Ends the storing of the reply: it is complete if the exchange is done.
    pub fn end_fill(&mut self, end: &End) {
        if let Some(fill) = self.fill.take() {
            if let End::Done { .. } = end {
                fill.complete();
            }
            self.server.leg.untap();
        }
    }

    /// Whether the reply was spliced, or could have been if less of it had been sent ahead.
    pub fn reply_is_long(&self) -> bool {
        self.spliced.server > 0 || self.down.long && self.refusal.is_none_or(|why| why == Refusal::Short)
    }

    /// Whether the exchange waits for bytes from the client.
    pub fn waits_for_client(&self) -> bool {
        self.up.sent == self.up.head.len() && self.up.checked == 0 && !self.up.body.is_done() && !self.up.broken
    }

    fn up_done(&self) -> bool {
        self.up.sent == self.up.head.len() && self.up.checked == 0 && self.up.body.is_done()
    }

    /// Notices a client that goes away before the reply. Bytes that it sends belong to its next request.
    fn watch_client(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.client.ended || !self.client.in_hand().is_empty() {
            return Ok(());
        }
        match self.client.poll_fill(cx) {
            Poll::Ready(Err(e)) => Err(e),
            Poll::Ready(Ok(_)) | Poll::Pending => Ok(()),
        }
    }

    fn poll_up(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        let Exchange { client, server, up, down, passed, moved, bodies, ahead, .. } = self;
        loop {
            while up.checked < client.in_hand().len() && !up.body.is_done() {
                up.checked += up.body.step(&client.in_hand()[up.checked..]).map_err(Broken::Wrong)?.len();
            }
            // Not before the body has begun: the client may wait for 100 (RFC 9110, 10.1.1).
            let begun = up.checked > 0 && up.checked == client.in_hand().len();
            if begun
                && !up.copy
                && down.body.is_none()
                && is_worth(*bodies, up.body.ahead())
                && is_to_come(up.body.ahead(), &client.leg)
            {
                *ahead = true;
                return Poll::Ready(Ok(()));
            }
            while up.sent < up.head.len() {
                let written = write_head(cx, server, (&up.head, &mut up.sent), client, &mut up.checked);
                passed.client += ready!(written).map_err(Broken::Server)? as u64;
                *moved = Instant::now();
            }
            while up.checked > 0 {
                let n = ready!(server.poll_write(cx, &client.in_hand()[..up.checked])).map_err(Broken::Server)?;
                client.consume(n);
                up.checked -= n;
                passed.client += n as u64;
                *moved = Instant::now();
            }
            if up.body.is_done() {
                return Poll::Ready(Ok(()));
            }
            if client.in_hand().is_empty() && ready!(client.poll_fill(cx)).map_err(Broken::Client)? == 0 {
                up.body.end_of_stream().map_err(Broken::Wrong)?;
            }
        }
    }

    fn poll_down(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        loop {
            self.check()?;
            if self.is_ahead() {
                self.ahead = true;
                return Poll::Ready(Ok(()));
            }
            let Down { head, sent, checked, hold, .. } = &mut self.down;
            if hold.as_mut().is_some_and(|over| over.as_mut().poll(cx).is_ready()) {
                *hold = None; // the filter stays in force
                self.server.leg.unclamp();
            }
            while hold.is_none() && *sent < head.len() {
                let written = write_head(cx, self.client, (head, sent), self.server, checked);
                self.passed.server += ready!(written).map_err(Broken::Client)? as u64;
                self.moved = Instant::now();
            }
            if self.down.body.is_some() {
                if ready!(self.poll_body(cx))? {
                    return Poll::Ready(Ok(()));
                }
                continue;
            }
            if let Some(end) = self.down.scan.feed(self.server.in_hand()).map_err(Broken::Wrong)? {
                let read = if self.http.strict_replies { Response::parse } else { Response::lenient };
                let reply = read(&self.server.in_hand()[..end], &self.request.method);
                self.server.consume(end);
                self.down.scan = scan(self.http);
                if let Err(end) = self.head(&reply.map_err(Broken::Wrong)?) {
                    self.down.end = end;
                    return Poll::Ready(Ok(()));
                }
            } else if ready!(self.server.poll_fill(cx)).map_err(Broken::Server)? == 0 {
                return Poll::Ready(Err(Broken::Server(io::ErrorKind::UnexpectedEof.into())));
            } else {
                self.moved = Instant::now();
            }
        }
    }

    /// Handles the head of a reply. An error ends the exchange.
    fn head(&mut self, reply: &Response) -> Result<(), End> {
        let refuse = |why: &str| Err(End::Fault(Fault::BadReply(why.into()), 502));
        let client = self.request.version;
        if reply.is_interim() {
            if is_too_many(&mut self.down.interim, Instant::now()) {
                return refuse("the server sends one interim reply after the other");
            }
            if client == Version::Http11 {
                self.begin(reply, false);
            }
            return Ok(());
        }
        self.status = Some(reply.status);
        if !self.http.filter.rules.is_empty() {
            (self.down.filter, self.down.hold) =
                (Some(ReplyFilter::new(&self.http.filter, reply)), Some(Box::pin(sleep(self.http.filter.wait))));
        }
        match reply.status {
            101 if self.request.upgrade.is_none() || !self.request.framing.is_empty() => {
                return refuse("the server switches protocols, and nobody has asked it to");
            }
            101 if reply.upgrade.is_none() => return refuse("the server switches to no protocol"),
            101 => {
                self.begin(reply, false);
                (self.down.body, self.down.end) = (Some(Body::new(Framing::None)), End::Upgraded);
                return Ok(());
            }
            // A 407 would make the client send its password for us to this server (RFC 9110, 15.5.8).
            407 => return refuse("the server asks for a password in the name of the proxy"),
            _ => {}
        }
        let early = !self.up_done();
        // The server would take the unread rest of the request for the next one.
        let reuse = reply.keep_alive && !early && !self.request.has_odd_content();
        if let Some(asking) = self.asking {
            let (from, first) = (self.server.leg.remote(), self.server.in_hand());
            match asking.hear(reply, from, first) {
                Heard::Pass => {}
                Heard::Miss => self.cache = Some("miss"),
                Heard::Fill(fill, tap) => {
                    self.server.leg.tap(tap);
                    (self.fill, self.cache) = (Some(fill), Some("fill"));
                }
                Heard::Good(meta) => return Err(End::Validated { meta, reuse: reuse && first.is_empty() }),
            }
        }
        let strip = client == Version::Http10 && reply.framing == Framing::Chunked;
        let close = self.last || early || strip || reply.framing == Framing::UntilClose;
        self.begin(reply, close);
        self.down.strip = strip;
        let (long, large) = match reply.framing {
            Framing::Exact(n) => (is_worth(self.bodies, Some(n)), n > CLAMPED),
            Framing::Chunked => (false, true), // chunks may be spliced, but most are short
            Framing::UntilClose => (is_worth(self.bodies, None), true),
            Framing::None => (false, false),
        };
        self.down.long = long;
        if large && !long {
            self.server.leg.unclamp(); // it is copied
        }
        let body = if self.http.strict_replies { Body::new } else { Body::lenient };
        self.down.body = Some(body(reply.framing));
        self.down.end = End::Done { close, reuse };
        Ok(())
    }

    /// Parses the buffered part of the reply's body, and passes its content to the filter.
    fn check(&mut self) -> Result<(), Broken> {
        let Exchange { server, down, .. } = self;
        let Down { body: Some(body), checked, strip, filter, hold, head, .. } = down else { return Ok(()) };
        let mut at = *checked;
        // Start of a repaired part, and its replacement.
        let mut mended: Option<(usize, Vec<u8>)> = None;
        // When chunk framing is removed, content is taken from the start of the buffer only.
        while at < server.in_hand().len() && !body.is_done() && !(*strip && at > 0) {
            let rest = &server.in_hand()[at..];
            let step = body.step(rest).map_err(Broken::Wrong)?;
            let (taken, instead) = (&rest[..step.len()], body.mended());
            let goes = instead.as_deref().unwrap_or(taken);
            if let (Step::Content(_), Some(filter)) = (step, &mut *filter) {
                filter.read(taken);
            }
            match step {
                Step::Framing(n) if *strip => server.consume(n),
                _ if hold.is_some() => {
                    head.extend_from_slice(goes);
                    server.consume(step.len());
                }
                _ => {
                    if instead.is_some() || mended.is_some() {
                        mended.get_or_insert_with(|| (at, Vec::new())).1.extend_from_slice(goes);
                    }
                    at += step.len();
                }
            }
        }
        if let Some((from, bytes)) = mended {
            server.replace(from, at - from, &bytes);
            at = from + bytes.len();
        }
        *checked = at;
        if let (true, Some(filter)) = (body.is_done(), filter) {
            filter.end();
        }
        self.apply_filter()
    }

    /// Applies the current decision of the filter.
    fn apply_filter(&mut self) -> Result<(), Broken> {
        let down = &mut self.down;
        let Some(filter) = &down.filter else { return Ok(()) };
        let decision = filter.decision();
        match decision {
            FilterDecision::Denied(rule) => {
                self.reply_rule = Some(format!("{rule}:deny"));
                return Err(Broken::Denied(Denied::Reply(rule)));
            }
            FilterDecision::Allowed(rule) => {
                self.reply_rule = rule.map(|n| format!("{n}:allow"));
                (down.filter, down.hold) = (None, None);
            }
            FilterDecision::Open { hold } => {
                if !hold || down.head.len() > HELD_MAX {
                    down.hold = None;
                }
                if down.hold.is_none() {
                    self.server.leg.unclamp(); // it is copied, at least for now
                }
            }
        }
        Ok(())
    }

    /// Whether enough of the reply's body remains for a splice.
    fn is_ahead(&mut self) -> bool {
        let (server, down) = (&self.server, &self.down);
        let (Some(body), false) = (&down.body, down.strip || down.copy) else { return false };
        let all = down.checked == server.in_hand().len() && !body.is_done();
        let worth = all && self.up_done() && (down.long || is_worth(self.bodies, body.ahead()));
        if !worth {
            return false;
        }
        if down.filter.is_some() {
            self.refusal = Some(Refusal::Filter);
            return false;
        }
        is_to_come(body.ahead(), &self.server.leg)
    }

    fn begin(&mut self, reply: &Response, close: bool) {
        let (via, client, now) = (self.http.via.as_deref(), self.request.version, SystemTime::now());
        self.down.head = forward::response(reply, &Back { via, client, close, now });
        self.down.sent = 0;
    }

    /// Copies the body of the reply. False: the filter has just decided or released the reply, and it may be spliced.
    fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<Result<bool, Broken>> {
        loop {
            let Exchange { client, server, up, down, passed, moved, .. } = self;
            let Some(body) = &mut down.body else { return Poll::Ready(Ok(true)) };
            while down.checked > 0 {
                let n = ready!(client.poll_write(cx, &server.in_hand()[..down.checked])).map_err(Broken::Client)?;
                server.consume(n);
                down.checked -= n;
                passed.server += n as u64;
                *moved = Instant::now();
            }
            if body.is_done() {
                if let End::Done { reuse, .. } = &mut down.end {
                    *reuse &= server.in_hand().is_empty();
                }
                return Poll::Ready(Ok(true));
            }
            if server.in_hand().is_empty() {
                if ready!(server.poll_fill(cx)).map_err(Broken::Server)? == 0 {
                    if up.broken && matches!(body, Body::UntilClose(_)) {
                        // its socket has told of the reset already, and this may be half of the reply
                        return Poll::Ready(Err(Broken::Server(io::ErrorKind::ConnectionReset.into())));
                    }
                    body.end_of_stream().map_err(Broken::Wrong)?;
                } else if down.hold.is_some() {
                    *moved = Instant::now();
                }
            }
            let (judged, held) = (down.filter.is_some(), down.hold.is_some());
            self.check()?;
            if judged != self.down.filter.is_some() || held != self.down.hold.is_some() {
                return Poll::Ready(Ok(false));
            }
        }
    }

    fn bad_request(&self, wrong: Wrong) -> End {
        let begun = self.replied();
        if begun { End::Cut("bad-request", wrong.to_string()) } else { bad_request(wrong) }
    }

    fn bad_reply(&self, why: &str) -> End {
        // The mistake in the body may have arrived together with the head.
        if self.replied() && self.down.sent > 0 {
            return End::Cut("server-reset", format!("the server's reply: {why}"));
        }
        End::Fault(Fault::BadReply(format!("the server's reply: {why}")), 502)
    }

    /// Returns the result if the server's connection has failed or ended.
    fn no_reply(&self, e: &io::Error) -> End {
        if self.replied() {
            return End::Cut("server-reset", format!("the server's connection: {e}"));
        }
        let nothing = self.status.is_none() && self.down.interim.0 == 0 && self.server.in_hand().is_empty();
        if nothing { End::Stale } else { End::Fault(no_reply(), 502) }
    }
}

/// Returns the scanner for a new reply.
fn scan(http: &Http) -> Scan {
    let scan = if http.strict_replies { Scan::new } else { Scan::lenient };
    scan(Kind::Response)
}

/// The fault of a server that closed without a reply.
pub(super) fn no_reply() -> Fault {
    Fault::BadReply("the server closed before it had replied".into())
}

/// Writes the rest of a head, together with the checked bytes of the body in the buffer.
fn write_head(
    cx: &mut Context<'_>,
    to: &mut Stream,
    (head, sent): (&[u8], &mut usize),
    from: &mut Stream,
    checked: &mut usize,
) -> Poll<io::Result<usize>> {
    let n = ready!(to.poll_write_both(cx, &head[*sent..], &from.in_hand()[..*checked]))?;
    let of_head = n.min(head.len() - *sent);
    *sent += of_head;
    from.consume(n - of_head);
    *checked -= n - of_head;
    Poll::Ready(Ok(n))
}

/// Whether this much content pays for a splice.
fn is_worth(bodies: SpliceWhen, ahead: Option<u64>) -> bool {
    let ahead = ahead.unwrap_or(u64::MAX);
    match bodies {
        SpliceWhen::Never => false,
        SpliceWhen::AtOnce => ahead >= LEAST_TO_COME,
        SpliceWhen::AfterBytes(n) => ahead >= n.max(1),
        _ => false,
    }
}

/// Whether enough of this content is still to come: what the socket holds has to be copied anyway. Or it is long.
fn is_to_come(ahead: Option<u64>, from: &Leg) -> bool {
    ahead.is_none_or(|ahead| ahead >= LONG || ahead >= u64::from(from.unread()) + LEAST_TO_COME)
}

/// Returns the answer to a malformed request.
pub(crate) fn bad_request(wrong: Wrong) -> End {
    End::Fault(Fault::BadRequest(wrong.to_string()), wrong.status())
}

/// Counts an interim reply ([`Down::interim`]). Returns whether there are too many.
fn is_too_many((count, since): &mut (u32, Instant), now: Instant) -> bool {
    if now.saturating_duration_since(*since) > INTERIM_WITHIN {
        (*count, *since) = (0, now);
    }
    *count += 1;
    *count > INTERIM_MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::{io::AsyncWriteExt, net::TcpStream};

    #[test]
    fn interim_replies_are_limited_in_a_second_not_in_an_exchange() {
        let start = Instant::now();
        let mut steady = (0, start);
        let mut every = (0..1000).map(|n| start + n * Duration::from_millis(20));
        assert!(!every.any(|now| is_too_many(&mut steady, now)), "{steady:?}");
        let mut at_once = (0, start);
        assert_eq!((0..1000).position(|_| is_too_many(&mut at_once, start)), Some(INTERIM_MAX as usize));
    }

    /// An attempt to splice such a body would fail, and cost more than to copy it.
    #[tokio::test]
    async fn what_has_come_already_is_not_worth_a_splice() {
        const COME: u64 = 20_000;
        let splicer = Splicer::copying(Refusal::Policy);
        let listener = splicer.listen(([127, 0, 0, 1], 0).into()).await.expect("a listener");
        let mut server = TcpStream::connect(listener.local_addr().expect("its address")).await.expect("connected");
        let leg = listener.accept().await.expect("accepted");
        server.write_all(&vec![0; COME as usize]).await.expect("written");
        while u64::from(leg.unread()) < COME {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let worth = |ahead| is_to_come(ahead, &leg);
        assert!(!worth(Some(COME + LEAST_TO_COME - 1)) && worth(Some(COME + LEAST_TO_COME)));
        assert!(worth(None), "nobody knows how much will come");
    }
}
