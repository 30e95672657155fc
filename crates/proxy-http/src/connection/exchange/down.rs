//! The reply, from server to client.

use super::{
    BUSY, Broken, CLAMPED, Cut, End, Exchange, HELD_MAX, UNKNOWN, changed::Change, is_to_come, is_worth, no_reply,
    write_head,
};
use crate::cache::{Fetch, Heard};
use longsplice_engine::{LegOfProxy, Refusal};
use longsplice_http::{
    Body, Framing, Kind, Response, Scan, Step, Version,
    forward::{self, Back, Content},
};
use longsplice_proxy::{
    access::Denied,
    coding::BadContent,
    config::Http,
    fault::Fault,
    filter::{FilterDecision, ReplyFilter},
    log::access_log::{Outcome, ms_since},
};
use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::{Duration, Instant, SystemTime},
};
use tokio::time::{Sleep, sleep};

/// Maximum number of interim replies in [`INTERIM_WITHIN`]; no server has a reason to send more. In a long operation, it may
/// send one again and again (RFC 2518, 10.1), so all of an exchange may be many.
pub(super) const INTERIM_MAX: u32 = 100;
const INTERIM_WITHIN: Duration = Duration::from_secs(1);

/// State of the direction from server to client.
pub(super) struct Down {
    pub(super) scan: Scan,
    /// Head, followed by the part of the body that is held back.
    pub(super) head: Vec<u8>,
    pub(super) sent: usize,
    /// The body, once the head has arrived.
    pub(super) body: Option<Body>,
    pub(super) checked: usize,
    /// The whole body is worth a splice.
    pub(super) long: bool,
    /// Remove the chunk framing: the client gets only the content.
    pub(super) strip: bool,
    /// The rest of the body must be copied.
    pub(super) copy: bool,
    /// Number of interim replies since a time that is no more than [`INTERIM_WITHIN`] before the last of them.
    pub(super) interim: (u32, Instant),
    /// The filter, while it has not decided on the reply.
    pub(super) filter: Option<ReplyFilter>,
    /// While set, nothing of the reply is sent; the timer ends that.
    pub(super) hold: Option<Pin<Box<Sleep>>>,
    /// The change of the body, until its end.
    pub(super) change: Option<Change>,
    /// There was one.
    pub(super) changed: bool,
    /// It ought to be read or changed, and cannot be.
    pub(super) unread: bool,
    /// Something of the head was sent.
    pub(super) begun: bool,
    pub(super) end: End,
}

impl Exchange<'_> {
    pub(super) fn poll_down(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        loop {
            self.check()?;
            if self.is_ahead() {
                self.ahead = true;
                return Poll::Ready(Ok(()));
            }
            let Down { head, sent, checked, hold, body, begun, .. } = &mut self.down;
            if hold.as_mut().is_some_and(|over| over.as_mut().poll(cx).is_ready()) {
                *hold = None; // the filter stays in force
                self.server.leg.unclamp();
            }
            while hold.is_none() && *sent < head.len() {
                let written = write_head(cx, self.client, (head, sent), self.server, checked);
                self.outcome.passed.server += ready!(written).map_err(Broken::Client)? as u64;
                *begun |= body.is_some();
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
    pub(super) fn head(&mut self, reply: &Response) -> Result<(), End> {
        let refuse = |why: &str| Err(End::Fault(Fault::BadReply(why.into()), 502));
        let client = self.request.version;
        if reply.is_interim() {
            if is_too_many(&mut self.down.interim, Instant::now()) {
                return refuse("the server sends one interim reply after the other");
            }
            // HTTP/1.0 has no interim replies (RFC 9110, 15.2)
            if client == Version::Http11 {
                self.begin(reply, false, Content::AsItIs);
            }
            return Ok(());
        }
        self.outcome.status = Some(reply.status);
        self.outcome.reply_ms = Some(ms_since(self.began));
        if !self.http.filter.rules.is_empty() {
            let filter = ReplyFilter::new(&self.http.filter, reply);
            (self.down.filter, self.down.hold) = (Some(filter), Some(Box::pin(sleep(self.http.filter.wait))));
        }
        match reply.status {
            101 if self.request.upgrade.is_none() || !self.request.framing.is_empty() => {
                return refuse("the server switches protocols, and nobody has asked it to");
            }
            101 if reply.upgrade.is_none() => return refuse("the server switches to no protocol"),
            101 => {
                self.begin(reply, false, Content::AsItIs);
                (self.down.body, self.down.end) = (Some(Body::new(Framing::None)), End::Upgraded);
                return Ok(());
            }
            // A 407 would make the client send its password for us to this server (RFC 9110, 15.5.8).
            407 => return refuse("the server asks for a password in the name of the proxy"),
            _ => {}
        }
        let change = self.change_of(reply)?;
        let early = !self.up_done();
        let failed = matches!(reply.status, 500 | 502..=504) && self.fetch.is_some_and(Fetch::stands_in);
        if failed || self.http.error_pages.instead(reply.status).is_some() {
            return Err(End::Replaced { status: reply.status, close: self.last || early });
        }
        if let (Framing::Exact(length), Some(most)) = (reply.framing, self.limits.reply_body)
            && length > most
        {
            return refuse(&format!("the reply has {length} bytes, and may have {most}"));
        }
        // The server would take the unread rest of the request for the next one.
        let reuse = reply.keep_alive && !early && !self.request.has_odd_content();
        if let Some(fetch) = self.fetch {
            let (from, first) = (self.server.leg.remote(), self.server.in_hand());
            match fetch.hear(reply, from, change.is_none().then_some(first)) {
                Heard::Pass => {}
                Heard::Miss => self.outcome.cache = Some("miss"),
                Heard::Fill(fill, tap) => {
                    self.server.leg.tap(tap);
                    (self.fill, self.outcome.cache) = (Some(fill), Some("fill"));
                }
                // a 304 has no body: bytes behind it belong to no reply
                Heard::Good(meta) => {
                    return Err(End::Validated { meta, reuse: reuse && self.server.in_hand().is_empty() });
                }
            }
        }
        let strip = client == Version::Http10 && reply.framing == Framing::Chunked;
        // without its chunks, a reply ends where its connection does
        let close = self.last || early || strip || reply.framing == Framing::UntilClose;
        let (content, change) = change.unwrap_or_default();
        self.begin(reply, close, content);
        (self.down.strip, self.down.change) = (strip, change);
        self.down.changed = self.down.change.is_some();
        let (long, large) = match reply.framing {
            Framing::Exact(n) => (is_worth(self.bodies, Some(n)), n > CLAMPED),
            Framing::Chunked => (false, true), // chunks may be spliced, but most are short
            Framing::UntilClose => (is_worth(self.bodies, None), true),
            Framing::None => (false, false),
        };
        // of a body without a length, each byte has to be counted
        self.down.copy = self.limits.reply_body.is_some() && reply.framing == Framing::UntilClose;
        self.down.long = long;
        if large && (!long || self.down.change.as_ref().is_some_and(|change| !change.is_limited())) {
            self.server.leg.unclamp(); // it is copied
        }
        let body = if self.http.strict_replies { Body::new } else { Body::lenient };
        self.down.body = Some(body(reply.framing));
        self.down.end = End::Done { close, reuse };
        Ok(())
    }

    /// Changes the buffered part of the reply's body. What becomes of it is behind the head.
    fn change_content(&mut self) -> Result<(), Broken> {
        let Exchange { server, down, content: all, limits, .. } = self;
        let most = limits.reply_body.unwrap_or(u64::MAX);
        let Down { body: Some(body), change: Some(change), head, sent, filter, .. } = down else { return Ok(()) };
        change.run((server, body), (head, sent), |content| {
            all.server += content.len() as u64;
            if all.server > most {
                return Err(Broken::TooLong(most));
            }
            if let Some(filter) = &mut *filter {
                filter.read(content);
            }
            Ok(())
        })
    }

    /// Parses the buffered part of the reply's body, and passes its content to the filter.
    pub(super) fn check(&mut self) -> Result<(), Broken> {
        self.change_content()?;
        let Exchange { server, down, content, limits, .. } = self;
        let most = limits.reply_body.unwrap_or(u64::MAX);
        let Down { body: Some(body), checked, strip, filter, hold, head, change, .. } = down else { return Ok(()) };
        let mut at = *checked;
        // Start of a repaired part, and its replacement.
        let mut mended: Option<(usize, Vec<u8>)> = None;
        // When chunk framing is removed, content is taken from the start of the buffer only.
        let stays = |change: &Option<Change>| change.as_ref().is_none_or(Change::is_over);
        while at < server.in_hand().len() && !body.is_done() && !(*strip && at > 0) && stays(change) {
            let rest = &server.in_hand()[at..];
            let step = body.step(rest).map_err(Broken::Wrong)?;
            if let Step::Content(n) = step {
                content.server += n as u64;
            }
            if content.server.saturating_add(body.ahead().unwrap_or(0)) > most {
                return Err(Broken::TooLong(most));
            }
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
    pub(super) fn apply_filter(&mut self) -> Result<(), Broken> {
        let down = &mut self.down;
        let Some(filter) = &down.filter else { return Ok(()) };
        down.unread |= filter.is_unread();
        match filter.decision() {
            FilterDecision::Denied(rule) => {
                self.outcome.reply_rule = Some(format!("{rule}:deny"));
                return Err(Broken::Denied(Denied::Reply(rule)));
            }
            FilterDecision::Unreadable(why) => return Err(Broken::Bad(why)),
            FilterDecision::Allowed(rule) => {
                self.outcome.reply_rule = rule.map(|n| format!("{n}:allow"));
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
    pub(super) fn is_ahead(&mut self) -> bool {
        let (server, down) = (&self.server, &self.down);
        let (Some(body), false) = (&down.body, down.strip || down.copy) else { return false };
        let all = down.checked == server.in_hand().len() && !body.is_done();
        // Nobody would read the rest of the request while the engine relays the reply.
        let worth = all && self.up_done() && (down.long || is_worth(self.bodies, body.ahead()));
        if !worth {
            return false;
        }
        if down.filter.is_some() || down.change.as_ref().is_some_and(|change| !change.is_over()) {
            self.outcome.refusal = Some(Refusal::Filter);
            return false;
        }
        is_to_come(body.ahead(), &self.server.leg)
    }

    pub(super) fn begin(&mut self, reply: &Response, close: bool, content: Content) {
        let (via, client, now) = (self.http.via.as_deref(), self.request.version, SystemTime::now());
        let head = forward::response(reply, &Back { via, client, close, now, content });
        self.down.head = self.changes.undo(head);
        if let Some(cookie) = self.cookie.as_ref().filter(|_| !reply.is_interim()) {
            self.down.head.truncate(self.down.head.len() - 2); // the empty line
            self.down.head.extend(format!("Set-Cookie: {cookie}\r\n\r\n").as_bytes());
        }
        if !reply.is_interim() {
            self.down.head = self.changes.in_reply(std::mem::take(&mut self.down.head), reply.status);
        }
        self.down.sent = 0;
    }

    /// Copies the body of the reply. False: the filter has just decided or released the reply, and it may be spliced.
    pub(super) fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<Result<bool, Broken>> {
        loop {
            let Exchange { client, server, up, down, outcome: Outcome { passed, .. }, moved, .. } = self;
            let Some(body) = &mut down.body else { return Poll::Ready(Ok(true)) };
            while down.checked > 0 {
                let n = ready!(client.poll_write(cx, &server.in_hand()[..down.checked])).map_err(Broken::Client)?;
                server.consume(n);
                down.checked -= n;
                passed.server += n as u64;
                *moved = Instant::now();
            }
            let more = down.change.as_ref().is_some_and(Change::has_more);
            if body.is_done() && down.change.as_ref().is_none_or(Change::is_over) {
                if let Some(last) = down.change.take().and_then(Change::last) {
                    (down.head, down.sent) = (last.to_vec(), 0);
                    return Poll::Ready(Ok(false));
                }
                if let End::Done { reuse, .. } = &mut down.end {
                    *reuse &= server.in_hand().is_empty();
                }
                return Poll::Ready(Ok(true));
            }
            if server.in_hand().is_empty() && !more && !body.is_done() {
                if ready!(server.poll_fill(cx)).map_err(Broken::Server)? == 0 {
                    if up.broken && matches!(body, Body::UntilClose(_)) {
                        // its socket has told of the reset already, and this may be half of the reply
                        return Poll::Ready(Err(Broken::Server(io::ErrorKind::ConnectionReset.into())));
                    }
                    body.end_of_stream().map_err(Broken::Wrong)?;
                } else if down.hold.is_some() || down.change.is_some() {
                    // nothing is written yet, but the server is not idle
                    *moved = Instant::now();
                }
            }
            let (judged, held) = (down.filter.is_some(), down.hold.is_some());
            self.check()?;
            let to_write = self.down.hold.is_none() && self.down.sent < self.down.head.len();
            if to_write || judged != self.down.filter.is_some() || held != self.down.hold.is_some() {
                return Poll::Ready(Ok(false));
            }
        }
    }

    pub(super) fn bad_content(&mut self, why: BadContent) -> End {
        self.bad = Some(why);
        let cut = |cut| End::Cut(cut, why.to_string());
        match (why, self.down.begun) {
            (BadContent::Unknown, true) => cut(Cut::Denied),
            (BadContent::Unknown, false) => End::Fault(Fault::Denied(Denied::Unchanged(UNKNOWN)), 403),
            (BadContent::Memory, true) => cut(Cut::Limit),
            (BadContent::Memory, false) => End::Fault(Fault::Limit(BUSY), 503),
            (BadContent::Corrupt | BadContent::TooLong | BadContent::Bomb, _) => self.bad_reply(&why.to_string()),
        }
    }

    pub(super) fn bad_reply(&self, why: &str) -> End {
        // The mistake in the body may have arrived together with the head.
        if self.down.begun {
            return End::Cut(Cut::ServerReset, format!("the server's reply: {why}"));
        }
        End::Fault(Fault::BadReply(format!("the server's reply: {why}")), 502)
    }

    /// Returns the result if the server's connection has failed or ended.
    pub(super) fn no_reply(&self, e: &io::Error) -> End {
        if self.replied() {
            return End::Cut(Cut::ServerReset, format!("the server's connection: {e}"));
        }
        // after any part of a reply, the request must not be sent again (RFC 9110, 9.2.2)
        let nothing = self.outcome.status.is_none() && self.down.interim.0 == 0 && self.server.in_hand().is_empty();
        if nothing { End::Stale } else { End::Fault(no_reply(), 502) }
    }
}

/// Returns the scanner for a new reply.
pub(super) fn scan(http: &Http) -> Scan {
    let scan = if http.strict_replies { Scan::new } else { Scan::lenient };
    scan(Kind::Response)
}

/// Counts an interim reply ([`Down::interim`]). Returns whether there are too many.
pub(super) fn is_too_many((count, since): &mut (u32, Instant), now: Instant) -> bool {
    if now.saturating_duration_since(*since) > INTERIM_WITHIN {
        (*count, *since) = (0, now);
    }
    *count += 1;
    *count > INTERIM_MAX
}
