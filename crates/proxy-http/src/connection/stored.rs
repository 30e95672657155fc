//! Answers from the cache: before a request goes to its server, after the server has confirmed the stored reply, and after it
//! has failed.
//!
//! The request has been checked by then. The rules are checked again for the server that sent
//! the stored reply; if they deny it, the request is forwarded as usual.

use super::{
    Next, Row,
    fields::Changes,
    forward_request::{RoutedRequest, To},
    host,
};
use crate::cache::{BLOCK, Count, Fetch, Found, Meta, Part, Place, Question};
use longsplice_http::{
    Form, Request, Response,
    forward::{self, Back, Content},
    reply::Reply,
};
use longsplice_proxy::{fields::FieldChanges, log::access_log::Record};
use std::{
    io,
    ops::Range,
    sync::{Arc, Mutex},
    time::SystemTime,
};
use tokio::time::timeout;

impl Row<'_> {
    /// Answers a request from the cache. An error means that the request has to be forwarded, with this state of the cache.
    pub(super) async fn look_up(
        &mut self,
        routed: &RoutedRequest<'_>,
        record: &mut Record,
    ) -> Result<Next, Option<Box<Fetch>>> {
        let request = routed.request;
        let (Some((cache, filter)), Some(url)) = (&self.of.cache, self.url_of(routed)) else { return Err(None) };
        let safe = matches!(request.method.as_str(), "GET" | "HEAD" | "OPTIONS" | "TRACE");
        let mut fetch = Box::new(Fetch {
            cache: cache.clone(),
            // what servers are told of clients may be in their replies
            question: (!self.has_personal_fields(routed))
                .then(|| Question::new(request, url.clone(), self.http.codings))
                .flatten(),
            filter: filter.clone(),
            stale: None,
            turn: Mutex::default(),
            changes: (!safe).then(|| url.clone()),
            came: None,
            asked_at: SystemTime::now(),
        });
        let Some(question) = &fetch.question else { return Err(Some(fetch)) };
        // access to a pool was decided before
        let asker = routed.target().map(|target| {
            let subject = routed.subject(&self.client);
            Arc::new(self.front.listener.asker(&self.client.leg, &subject, target))
        });
        let may_have = || {
            let asker = asker.clone();
            move |meta: &Meta| asker.as_ref().is_none_or(|asker| asker.may_have(meta.server, meta.came.as_ref()))
        };
        let mut found = cache.look(question.clone(), filter.clone(), may_have()).await;
        let only_if_cached = question.only_if_cached;
        let question = question.clone();
        if let Some(late) = found.take_if(|found| !found.fresh && self.may_refresh(found, &question)) {
            self.refresh(routed, &fetch, &late);
            if let Some(next) = self.serve_stored(request, late, (Count::Stale, "stale"), record).await {
                return Ok(next);
            }
        }
        let collapse = cache.config().collapse.filter(|_| question.may_wait());
        if let (Some(limit), true) = (collapse, found.as_ref().is_none_or(|found| !found.fresh)) {
            // the reply that comes another way is not waited for
            let led = asker.as_ref().and_then(|asker| asker.is_led());
            match cache.turn(&led.map_or(url.clone(), |way| format!("{way} {url}"))) {
                Place::First(turn) => fetch.turn = Mutex::new(Some(turn)),
                Place::Behind(mut waits) => {
                    // an error says that the other request is over
                    let _ = timeout(limit, waits.changed()).await;
                    found = cache.look(question, filter.clone(), may_have()).await;
                    if found.as_ref().is_some_and(|found| found.fresh) {
                        cache.count(Count::Collapsed);
                    }
                }
                Place::Alone => {}
            }
        }
        match found {
            Some(found) if found.fresh => {
                if let Some(next) = self.serve_stored(request, found, (Count::Hits, "hit"), record).await {
                    return Ok(next);
                }
            }
            stale => fetch.stale = stale,
        }
        if only_if_cached {
            // RFC 9111, 5.2.1.7
            record.status = Some(504);
            let close = !self.may_go_on(request);
            let head_only = request.method == "HEAD";
            let reply = Reply { status: 504, text: "not in the cache", close, head_only, ..Reply::default() };
            self.say(&reply).await;
            return Ok(if close { Next::Close } else { Next::Request });
        }
        Err(Some(fetch))
    }

    /// Returns the changes of fields of the route.
    fn fields_of_route(&self, routed: &RoutedRequest<'_>) -> Option<&FieldChanges> {
        routed.route.and_then(|number| self.http.routes.get(number - 1)).map(|route| &route.fields)
    }

    /// Whether the server is sent what differs between clients with equal requests.
    fn has_personal_fields(&self, routed: &RoutedRequest<'_>) -> bool {
        self.http.fields.are_personal() || self.fields_of_route(routed).is_some_and(FieldChanges::are_personal)
    }

    /// Returns the URL of a request, as in [`Question::url`].
    fn url_of(&self, routed: &RoutedRequest<'_>) -> Option<String> {
        let (Form::Absolute(_, path) | Form::Origin(path)) = &routed.request.form else { return None };
        match &routed.to {
            To::Target(target) if self.front.listener.intercepts.is_some() => {
                Some(format!("{} http://{}{path}", self.client.leg.local(), host(target)))
            }
            To::Target(target) => Some(format!("http://{}{path}", host(target))),
            To::Pool(pool, _) => {
                let site = routed.site.as_deref().unwrap_or_default().to_ascii_lowercase();
                // servers may answer otherwise what is changed by the route
                let asked = self.fields_of_route(routed).filter(|fields| !fields.request.is_empty());
                let asked = asked.map_or_else(String::new, |fields| format!("{:?} ", fields.request));
                Some(format!("{} {asked}http://{site}{path}", pool.config().name))
            }
            To::Elsewhere(..) => None,
        }
    }

    /// Removes what is stored for a URL. `None`: PURGE is a method like others.
    pub(super) async fn purge(&mut self, routed: &RoutedRequest<'_>, record: &mut Record) -> Option<Next> {
        let (cache, _) = self.of.cache.as_ref()?;
        let config = cache.config();
        let clients = &config.purge;
        if routed.request.method != "PURGE" || clients.is_empty() {
            return None;
        }
        let client = self.client.leg.source().ip().to_canonical();
        let (status, text) = match self.url_of(routed) {
            _ if !clients.iter().any(|prefix| prefix.0.contains(&client)) => {
                (403, "this client may not remove replies")
            }
            Some(url) if cache.invalidate(&url) => (200, "it is removed"),
            Some(_) | None => (404, "nothing is stored for this URL"),
        };
        record.status = Some(status);
        let next = self.after_refusal(routed.request);
        let reply = Reply { status, text, close: matches!(next, Next::Close), ..Reply::default() };
        self.say(&reply).await;
        Some(next)
    }

    /// Answers with a stale reply because the server has failed, if that is allowed.
    pub(super) async fn stand_in(
        &mut self,
        request: &Request,
        fetch: Option<&mut Fetch>,
        record: &mut Record,
    ) -> Option<Next> {
        let fetch = fetch.filter(|fetch| fetch.stands_in())?;
        let found = fetch.stale.take()?;
        self.serve_stored(request, found, (Count::Stale, "stale"), record).await
    }

    /// Answers after the server has confirmed the stored reply. `None`: ask again, for the complete reply.
    pub(super) async fn validated(
        &mut self,
        request: &Request,
        (fetch, meta): (Option<&mut Fetch>, Option<Box<Meta>>),
        record: &mut Record,
    ) -> Option<Next> {
        let fetch = fetch?;
        let mut found = fetch.stale.take()?;
        let Some(meta) = meta else {
            fetch.cache.forget(&found);
            return None;
        };
        fetch.cache.freshen(&mut found, *meta).await;
        self.serve_stored(request, found, (Count::Revalidated, "revalidated"), record).await
    }

    /// Answers with the stored reply, or with 304 if the client has it. `None`: the file is damaged, and nothing was sent.
    async fn serve_stored(
        &mut self,
        request: &Request,
        found: Found,
        (count, word): (Count, &'static str),
        record: &mut Record,
    ) -> Option<Next> {
        let (cache, _) = self.of.cache.as_ref()?;
        let found = Arc::new(found);
        let (meta, length) = (&found.stored.meta, found.stored.length);
        let part = Part::of(request, meta, length);
        let Range { start, end } = match &part {
            Part::Whole if request.method != "HEAD" => 0..length,
            Part::Bytes(range) => range.clone(),
            Part::Whole | Part::Known | Part::Outside => 0..0,
        };
        let mut at = start / BLOCK as u64 * BLOCK as u64;
        let mut block = if start < end { cache.read(found.clone(), at).await.ok()? } else { Vec::new() };
        let now = SystemTime::now();
        let head = Response::parse(&meta.head(&part, length, now), &request.method).ok()?;
        let close = !self.may_go_on(request);
        let back =
            Back { via: self.http.via.as_deref(), client: request.version, close, now, content: Content::AsItIs };
        let within = |block: &mut Vec<u8>, at: u64| {
            block.truncate(usize::try_from(end - at).unwrap_or(usize::MAX));
            block.drain(..usize::try_from(start.saturating_sub(at)).unwrap_or(0));
        };
        let whole = block.len() as u64;
        within(&mut block, at);
        at += whole;
        let changes = Changes::new(self.http, &self.current, self.client.leg.source().ip());
        block.splice(..0, changes.in_reply(changes.undo(forward::response(&head, &back)), head.status));
        cache.count(count);
        (record.cache, record.status, record.server) = (Some(word), Some(head.status), Some(meta.server));
        let idle = self.front.policy.idle_limit.get();
        loop {
            let written = timeout(idle, self.client.write_all(&block)).await;
            match written.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                Ok(()) => record.bytes_down += block.len() as u64,
                Err(e) => {
                    record.how = if e.kind() == io::ErrorKind::TimedOut { "idle" } else { "client-reset" };
                    return Some(Next::Reset);
                }
            }
            if at >= end {
                return Some(if close { Next::Close } else { Next::Request });
            }
            match cache.read(found.clone(), at).await {
                Ok(next) => {
                    let whole = next.len() as u64;
                    block = next;
                    within(&mut block, at);
                    at += whole;
                }
                Err(e) => {
                    (record.how, record.refusal) = ("damaged", Some(format!("the stored reply: {e}")));
                    return Some(Next::Reset);
                }
            }
        }
    }
}
