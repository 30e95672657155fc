//! Forwards one request: finds a connection to a server, runs the exchange over it, and keeps or closes both connections.
//!
//! | to | connection used | and afterwards |
//! | --- | --- | --- |
//! | a target (forward proxy) | that of the last request, if it has the same target, or a new one | kept for this client |
//! | a pool (reverse proxy) | an idle one to the chosen server, or a new one | kept by the pool |
//!
//! A request is sent twice only if that is safe: if no connection was established, or if it is idempotent, has no
//! body, and no byte of a reply has arrived (RFC 9110, 9.2.2). A server may close an idle connection at any moment.
//! A request that must not be sent twice therefore uses an idle connection only if the client's own connection has
//! carried a request before. If the server has closed it, the client's connection is closed, too: a client with a
//! persistent connection has to expect that, and knows whether it may repeat the request (RFC 9112, 9.5).

use super::{
    Next, Row,
    exchange::{Cut, End, Exchange, bad_upload, count_bad, no_reply},
    fields::Changes,
    host, status_of,
};
use crate::{
    cache::Fetch,
    pool::{Lease, Pool},
    stream::Stream,
};
use longsplice_engine::{FlowInfo, LegOfProxy, Refusal, SpliceWhen};
use longsplice_http::{
    Request,
    forward::{self, Onward},
    reply::Reply,
};
use longsplice_proxy::{
    access::{Subject, Way},
    coding::Decoder,
    config::{Came, Http},
    counters::Counters,
    fault::{Fault, Step},
    fields::without,
    filter::ReplyFilter,
    log::access_log::{Record, ms_since},
    onward::{
        connect,
        dial::{Reached, dial_server},
    },
    pool::{self, Key},
    rewrite::Wanted,
    target::Target,
};
use std::{borrow::Cow, future::poll_fn, net::SocketAddr, sync::Arc, task::Poll, time::Instant};

/// A request and its destination.
pub(super) struct RoutedRequest<'a> {
    pub request: &'a Request,
    /// Number of the route that was chosen, from 1.
    pub route: Option<usize>,
    /// The request as servers get it, if that is not what the client sent.
    pub changed: Option<Request>,
    /// The requested site, as the client wrote it; none for a forward proxy, which knows it from the target.
    pub site: Option<String>,
    /// The path for the rules; none if no rule has paths.
    pub path: Option<String>,
    /// The user that has logged in, for the rules.
    pub user: Option<String>,
    pub to: To,
}

pub(super) enum To {
    /// The target that the client requested.
    Target(Target),
    /// A server of this pool, chosen by this key.
    Pool(Arc<Pool>, Key),
    /// No server: the client is told, with this status, to ask there.
    Elsewhere(u16, String),
}

/// A connection to a server.
pub(super) struct Held {
    pub target: Target,
    pub stream: Stream,
    /// The connection has carried a request before, and may have been closed since.
    pub reused: bool,
    /// The server of a pool, if it is one.
    pub lease: Option<Lease>,
    /// How it was reached, if the client has named the target.
    pub onward: Onwards,
}

/// How a target was reached that a client has named.
pub(super) struct Onwards {
    /// Where the rules have led.
    pub way: Way,
    /// The address that they have judged; none: the name alone.
    pub known: Option<SocketAddr>,
    /// The place at a server or proxy of a pool to which they lead.
    pub place: Option<pool::Lease>,
}

impl Default for Onwards {
    fn default() -> Onwards {
        Onwards { way: Way::Direct, known: None, place: None }
    }
}

impl Onwards {
    /// Returns the connection of what was reached, and the rest.
    pub fn of(reached: Reached) -> (Stream, Onwards) {
        let Reached { leg, lease, way, known } = reached;
        (Stream::new(leg), Onwards { way, known, place: lease })
    }

    /// Returns the name of the upstream proxy, if there is one.
    fn upstream(&self) -> Option<Arc<str>> {
        if let Way::Through(upstream) = &self.way { Some(upstream.name.as_str().into()) } else { None }
    }
}

/// Attempts for one request.
#[derive(Default)]
struct Tries {
    /// A reused connection was closed: the next one has to be new.
    fresh: bool,
    /// Servers of the pool that have failed, and the last reason.
    failed: Vec<usize>,
    why: Option<Fault>,
    /// A part of a reply came that is changed as a whole: parts are not asked for.
    whole: bool,
}

impl RoutedRequest<'_> {
    /// Returns the target that the client requested, if it named one.
    pub fn target(&self) -> Option<&Target> {
        if let To::Target(target) = &self.to { Some(target) } else { None }
    }

    /// Returns the subject for the rules.
    pub fn subject(&self, client: &Stream) -> Subject<'_> {
        let (method, path) = (Some(self.request.method.as_str()), self.path.as_deref());
        Subject { client: client.leg.source().ip(), method, path, user: self.user.as_deref() }
    }
}

impl Row<'_> {
    /// Forwards a request to a server, and its reply to the client.
    pub(super) async fn forward_request(
        &mut self,
        routed: &RoutedRequest<'_>,
        mut fetch: Option<Box<Fetch>>,
        record: &mut Record,
    ) -> Next {
        let mut tries = Tries::default();
        loop {
            if let Err(fault) = self.seek(routed, &mut tries, record).await {
                let stored = Box::pin(self.stand_in(routed.request, fetch.as_deref_mut(), record));
                if let Some(next) = stored.await {
                    return next;
                }
                return self.refuse(routed.request, record, &fault, status_of(&fault)).await;
            }
            if let (Some(fetch), Some(Held { onward, .. })) = (fetch.as_deref_mut(), &self.server) {
                fetch.came = Came::of(&onward.way, onward.known);
            }
            let end = self.exchange(routed, (&tries, fetch.as_deref()), record).await;
            self.settle(&end, &mut tries);
            return match end {
                End::Stale => continue,
                End::Whole => {
                    tries.whole = true;
                    continue;
                }
                End::Validated { meta, .. } => {
                    let stored = Box::pin(self.validated(routed.request, (fetch.as_deref_mut(), meta), record)).await;
                    let Some(next) = stored else { continue }; // ask again, for the complete reply
                    next
                }
                End::Done { close, .. } => {
                    let counters = &self.shared().counters;
                    if record.refusal.as_deref() == Some(Refusal::Filter.as_str()) {
                        Counters::add(&counters.replies_filtered);
                    }
                    Counters::add(if record.spliced_down > 0 {
                        &counters.replies_spliced
                    } else {
                        &counters.replies_copied
                    });
                    if close { Next::Close } else { Next::Request }
                }
                End::Ahead(_) => unreachable!("it goes on in exchange()"),
                End::Upgraded => Next::Relay(Box::new(record.clone())),
                End::Gone => {
                    (record.how, record.refusal) = (Cut::ServerReset.how(), Some(no_reply().to_string()));
                    Next::Close
                }
                End::Replaced { status, close } => {
                    let stored = Box::pin(self.stand_in(routed.request, fetch.as_deref_mut(), record));
                    if let Some(next) = stored.await {
                        return next;
                    }
                    let pages = self.http.error_pages.clone();
                    let page = pages.instead(status).map(|page| (page.media_type.as_str(), &*page.body));
                    let head_only = routed.request.method == "HEAD";
                    let reply = Reply { status, text: "an error of the server", page, close, head_only, field: None };
                    self.say(&reply).await;
                    if close { Next::Close } else { Next::Request }
                }
                End::Fault(fault, status) => {
                    if status > 500 {
                        let stored = Box::pin(self.stand_in(routed.request, fetch.as_deref_mut(), record));
                        if let Some(next) = stored.await {
                            return next;
                        }
                    }
                    self.answer(Some(routed.request), record, &fault, Some(status), true).await;
                    Next::Close
                }
                End::Cut(cut, why) => {
                    if cut == Cut::Denied {
                        Counters::add(&self.shared().counters.replies_denied);
                    }
                    (record.how, record.refusal) = (cut.how(), Some(why));
                    // Without a length, the client would take a FIN for the end of the reply.
                    Next::Reset
                }
            };
        }
    }

    /// Finds or opens a connection to a server.
    async fn seek(&mut self, routed: &RoutedRequest<'_>, tries: &mut Tries, record: &mut Record) -> Result<(), Fault> {
        let began = Instant::now();
        let found = match &routed.to {
            To::Target(target) => self.seek_target(routed, target, tries.fresh, record).await,
            To::Pool(pool, key) => self.seek_member(routed, (pool, *key), tries).await,
            To::Elsewhere(..) => unreachable!("it is answered before"),
        };
        let reused = self.server.as_ref().is_some_and(|held| held.reused);
        record.connect_ms = (!reused).then(|| ms_since(began));
        found
    }

    async fn seek_target(
        &mut self,
        routed: &RoutedRequest<'_>,
        target: &Target,
        fresh: bool,
        record: &mut Record,
    ) -> Result<(), Fault> {
        let (shared, listener) = (&self.live.shared, &self.front.listener);
        let subject = routed.subject(&self.client);
        if let Some(held) = &mut self.server
            && held.target == *target
            && !fresh
            // The rules may deny this request, or lead it elsewhere, and have allowed the last one.
            && shared.may_serve(&self.client.leg, listener, &subject, target, (&held.onward.way, held.onward.known))
            && held.stream.is_quiet()
        {
            held.reused = true;
            if let Some(place) = &held.onward.place {
                place.note(record);
            }
            record.upstream = held.onward.upstream();
            Counters::add(&self.shared().counters.reused);
            return Ok(());
        }
        self.drop_server();
        // The last segment of the handshake waits for the request: it would promise the server a large window.
        self.client.leg.speaks_first(true);
        let reached = connect(self.shared(), listener, &self.client.leg, &subject, target, record).await?;
        let (stream, onward) = Onwards::of(reached);
        self.server = Some(Held { target: target.clone(), stream, reused: false, lease: None, onward });
        Ok(())
    }

    async fn seek_member(
        &mut self,
        routed: &RoutedRequest<'_>,
        (pool, key): (&Pool, Key),
        tries: &mut Tries,
    ) -> Result<(), Fault> {
        let shared = self.live.shared.clone();
        self.drop_server(); // its place may be the one that is waited for
        let none = |pool: &Pool| Fault::NoServer(pool.config().name.clone());
        loop {
            let may_try = tries.failed.len() < pool.config().tries as usize;
            let lease = if may_try { pool.enter(key, &tries.failed).await } else { Err(none(pool)) };
            let lease = lease.map_err(|fault| tries.why.take().unwrap_or(fault))?;
            if !tries.failed.is_empty() {
                Counters::add(&shared.counters.retries);
            }
            let target = lease.member.target.clone();
            if !tries.fresh
                && !self.front.listener.shows_clients
                && (routed.request.is_repeatable() || self.count > 1)
                && let Some(stream) = lease.member.idle(&shared.splicer, &self.client.leg)
            {
                Counters::add(&shared.counters.reused);
                let onward = Onwards::default();
                self.server = Some(Held { target, stream, reused: true, lease: Some(lease), onward });
                return Ok(());
            }
            // Access to the pool was decided before, for the request as a whole.
            self.client.leg.speaks_first(true);
            match dial_server(&shared, &self.front.listener, &self.client.leg, &target).await {
                Ok(leg) => {
                    let (stream, onward) = (Stream::new(leg), Onwards::default());
                    self.server = Some(Held { target, stream, reused: false, lease: Some(lease), onward });
                    return Ok(());
                }
                Err(fault) => tries.failed(&lease, fault, &shared.counters),
            }
        }
    }

    /// Runs the exchange over the connection that was found.
    async fn exchange(
        &mut self,
        routed: &RoutedRequest<'_>,
        (tries, fetch): (&Tries, Option<&Fetch>),
        record: &mut Record,
    ) -> End {
        let request = routed.request;
        let last = !self.may_go_on(request);
        let limits = &self.limits_of(routed);
        let idle = self.front.policy.idle_limit.get();
        let Some(Held { target, stream: server, reused, lease, .. }) = &mut self.server else { return End::Stale };
        let habit = lease.as_ref().map_or(&self.habit, |lease| &lease.member.habit);
        record.server = Some(server.leg.remote());
        lease.iter().for_each(|lease| lease.general.note(record));
        let member = lease.as_ref().map(|lease| lease.member.label.clone());
        let more = match &routed.to {
            To::Target(_) | To::Elsewhere(..) => false,
            To::Pool(pool, _) => tries.failed.len() + 1 < pool.config().tries as usize,
        };
        let changes = Changes::new(self.http, &self.current, self.client.leg.source().ip());
        let filter = &self.http.filter;
        let judge = !request.framing.is_empty() && !filter.upload_rules.is_empty();
        let judge = judge.then(|| ReplyFilter::of_upload(filter, request));
        let (mut recast, mut unread) = (None, false);
        let change = match filter.wanted_of_upload(request) {
            Wanted::Changes(rewriter, coding) => {
                recast = Some(request.recast(coding.is_some()));
                match coding.map(|coding| Decoder::new(coding, filter.changes.decoded)).transpose() {
                    Ok(decoder) => Some((rewriter, decoder)),
                    Err(why) => {
                        count_bad(&self.live.shared.counters, why);
                        let (fault, status) = bad_upload(why);
                        return End::Fault(fault, status);
                    }
                }
            }
            wanted => {
                unread = matches!(wanted, Wanted::Unread);
                None
            }
        };
        let asked = recast.as_ref().unwrap_or(request);
        let mut head = head_for((self.http, &changes), &self.client, (routed, asked), target);
        if tries.whole {
            head = without(head, &["Range", "If-Range"]);
        }
        if let Some(fetch) = fetch {
            fetch.ask(&mut head);
        }
        let shared = self.live.shared.clone();
        let may_be = shared.splicer.may_splice(&self.client.leg, &server.leg);
        let bodies = if may_be.is_ok() { self.front.bodies.when } else { SpliceWhen::Never };
        // what comes ahead of a splice has to be copied; what is copied anyway would be slower with a small window
        server.limit(bodies != SpliceWhen::Never && habit.is_long());
        let cookie = match (&routed.to, &*lease) {
            (To::Pool(pool, _), Some(lease)) => pool.cookie(request, &lease.member),
            _ => None,
        };
        let ends = (&mut self.client, server);
        let mut exchange = Exchange::new(ends, request, head, (self.http, limits, changes), last, (bodies, fetch));
        exchange.whole = tries.whole;
        exchange.cookie = cookie;
        exchange.set_upload(judge, change, unread);
        let end = loop {
            let limit = if exchange.replied() { idle } else { limits.reply.min(idle) };
            let (since, alarm) = (exchange.moved, &mut self.alarm);
            let end = poll_fn(|cx| match exchange.poll(cx) {
                Poll::Ready(end) => Poll::Ready(Some(end)),
                Poll::Pending => alarm.poll(cx, since, limit).map(|()| None),
            });
            match end.await {
                Some(End::Ahead(sender)) => {
                    let target = record.target.clone().unwrap_or_default();
                    let info = FlowInfo::new(record.listener, target);
                    let info = info.with_user(record.user.clone()).with_listen(record.listen);
                    let info = info.with_name(record.name.clone()).with_member(member.clone());
                    if let Some(end) =
                        exchange.relay_body(sender, &shared.splicer, self.front.bodies.clone(), info).await
                    {
                        break end;
                    }
                }
                Some(end) => break end,
                // the alarm was set before the last progress
                None if exchange.moved.elapsed() < limit => {}
                None if exchange.replied() => break End::Cut(Cut::Idle, "nothing has moved for too long".into()),
                None if exchange.waits_for_client() => break End::Fault(Fault::Timeout(Step::Body), 408),
                None => break End::Fault(Fault::Timeout(Step::Reply), 504),
            }
        };
        exchange.end_fill(&end);
        habit.note(exchange.reply_is_long());
        let mut outcome = std::mem::take(&mut exchange.outcome);
        // an exchange that is repeated over another connection is not counted yet
        let tally = matches!(end, End::Done { .. } | End::Cut(..)).then_some(&self.front.policy.tally);
        if outcome.splices > 0 {
            (outcome.refusal, outcome.path) = (None, None);
            tally.inspect(|tally| tally.splice());
        } else {
            let why = outcome.refusal.or(may_be.err()).unwrap_or(match bodies {
                SpliceWhen::Never => Refusal::Policy,
                _ => Refusal::Short,
            });
            outcome.refusal = Some(why);
            outcome.path = outcome.path.filter(|_| why == Refusal::Path);
            tally.inspect(|tally| tally.refuse(why));
        }
        let (changed, unread, counters) = (exchange.are_changed(), exchange.are_unread(), &shared.counters);
        for (counter, is) in [
            (&counters.requests_changed, changed.client && tally.is_some()),
            (&counters.replies_changed, changed.server && tally.is_some()),
            (&counters.requests_unread, unread.client && tally.is_some()),
            (&counters.replies_unread, unread.server && tally.is_some()),
        ] {
            if is {
                Counters::add(counter);
            }
        }
        exchange.bad.inspect(|why| count_bad(counters, *why));
        record.outcome(outcome);
        match end {
            // the connection may just have been idle for too long, and another server may answer
            End::Stale if request.is_repeatable() && (*reused || more) => End::Stale,
            // the client, whose connection is closed like this, knows whether to repeat the request (RFC 9112, 9.5)
            End::Stale if *reused && self.count > 1 => End::Gone,
            End::Stale => End::Fault(no_reply(), 502),
            end => end,
        }
    }

    /// Keeps or closes the server's connection, and reports the result to its pool.
    fn settle(&mut self, end: &End, tries: &mut Tries) {
        let shared = self.live.shared.clone();
        let counters = &shared.counters;
        if let Some(Held { lease: Some(lease), reused, .. }) = &self.server {
            match end {
                End::Done { .. } | End::Validated { .. } | End::Whole | End::Upgraded | End::Replaced { .. } => {
                    lease.member.succeeded(counters, &"it has answered a request")
                }
                // a server may close an idle connection at any time: that is no failure
                End::Stale if !reused => tries.failed(lease, no_reply(), counters),
                End::Fault(fault @ (Fault::BadReply(_) | Fault::Timeout(Step::Reply)), _) => {
                    lease.member.failed(counters, fault);
                }
                End::Cut(Cut::ServerReset, why) => lease.member.failed(counters, why),
                End::Ahead(_) | End::Stale | End::Gone | End::Fault(..) | End::Cut(..) => {}
            }
        }
        tries.fresh = true;
        match (end, self.server.take()) {
            // it shows the server this client's address
            (End::Done { .. } | End::Validated { .. }, Some(Held { stream, lease: Some(_), .. }))
                if self.front.listener.shows_clients =>
            {
                stream.close(&shared.splicer);
            }
            (
                End::Done { reuse: true, .. } | End::Validated { reuse: true, .. },
                Some(Held { stream, lease: Some(lease), .. }),
            ) => {
                lease.member.keep(stream, &shared.splicer, &shared.stop);
            }
            (End::Done { reuse: true, .. } | End::Validated { reuse: true, .. } | End::Upgraded, held) => {
                self.server = held
            }
            (_, Some(held)) => held.stream.close(&shared.splicer),
            (_, None) => {}
        }
    }
}

/// Returns the head of a request for a server.
pub(super) fn head_for(
    (http, changes): (&Http, &Changes<'_>),
    client: &Stream,
    (routed, request): (&RoutedRequest<'_>, &Request),
    target: &Target,
) -> Vec<u8> {
    let host = routed.site.as_deref().map_or_else(|| host(target).into(), Cow::Borrowed);
    let onward = Onward {
        host: &host,
        via: http.via.as_deref(),
        forwarded: http.forwarded,
        client: client.leg.source().ip(),
        codings: http.codings,
        site: routed.site.as_deref().filter(|_| matches!(routed.to, To::Pool(..))),
    };
    changes.in_request(forward::request(request, &onward))
}

impl Tries {
    fn failed(&mut self, lease: &Lease, why: Fault, counters: &Counters) {
        lease.member.failed(counters, &why);
        self.failed.push(lease.member.index);
        self.why = Some(why);
    }
}
