//! Answers from the cache of a forward or a translucent proxy: before a request goes to its server, and after
//! the server has confirmed the stored reply.
//!
//! The request has been checked by then. The rules are checked again for the server that sent
//! the stored reply; if they deny it, the request is forwarded as usual.

use super::{
    Next, Row,
    fields::Changes,
    forward_request::{RoutedRequest, To},
    host,
};
use crate::cache::{Count, Fetch, Found, Meta, Question};
use longsplice_http::{
    Form, Request, Response,
    forward::{self, Back},
    reply::Reply,
};
use longsplice_proxy::log::access_log::Record;
use std::{io, sync::Arc, time::SystemTime};
use tokio::time::timeout;

impl Row<'_> {
    /// Answers a request from the cache. An error means that the request has to be forwarded, with this state of the cache.
    pub(super) async fn look_up(
        &mut self,
        routed: &RoutedRequest<'_>,
        record: &mut Record,
    ) -> Result<Next, Option<Box<Fetch>>> {
        let request = routed.request;
        let (Some((cache, filter)), To::Target(target)) = (&self.of.cache, &routed.to) else { return Err(None) };
        let url = match &request.form {
            Form::Absolute(_, path) | Form::Origin(path) => format!("http://{}{path}", host(target)),
            Form::Authority(_) | Form::Asterisk => return Err(None),
        };
        let intercepts = self.front.listener.intercepts;
        let url = if intercepts.is_some() { format!("{} {url}", self.client.leg.local()) } else { url };
        let safe = matches!(request.method.as_str(), "GET" | "HEAD" | "OPTIONS" | "TRACE");
        let mut fetch = Box::new(Fetch {
            cache: cache.clone(),
            // what servers are told of clients may be in their replies
            question: (!self.http.fields.are_personal())
                .then(|| Question::new(request, url.clone(), self.http.identity))
                .flatten(),
            filter: filter.clone(),
            stale: None,
            changes: (!safe).then_some(url),
            asked_at: SystemTime::now(),
        });
        let Some(question) = &fetch.question else { return Err(Some(fetch)) };
        let may_have = |found: &Found| {
            let (subject, from) = (routed.subject(&self.client), found.stored.meta.server);
            self.front.listener.rules.check(&subject, target, from).is_ok()
        };
        let found = cache.look(question.clone(), filter.clone()).await.filter(may_have);
        let only_if_cached = question.only_if_cached;
        match found {
            Some(found) if found.fresh => {
                if let Some(next) = self.serve_stored(request, found, (Count::Hits, "hit"), record).await {
                    return Ok(next);
                }
            }
            Some(found) if found.stored.meta.has_validator() => fetch.stale = Some(found),
            Some(_) | None => {}
        }
        if only_if_cached {
            // RFC 9111, 5.2.1.7
            record.status = Some(504);
            let close = !self.may_go_on(request);
            let head_only = request.method == "HEAD";
            let reply = Reply { status: 504, text: "not in the cache", challenge: None, close, head_only };
            self.say(&reply).await;
            return Ok(if close { Next::Close } else { Next::Request });
        }
        Err(Some(fetch))
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
        let known = meta.is_known(request);
        let all = if known || request.method == "HEAD" { 0 } else { length };
        let mut block = if all > 0 { cache.read(found.clone(), 0).await.ok()? } else { Vec::new() };
        let now = SystemTime::now();
        let head = Response::parse(&meta.head(known, length, now), &request.method).ok()?;
        let close = !self.may_go_on(request);
        let back = Back { via: self.http.via.as_deref(), client: request.version, close, now, changed: false };
        let mut at = block.len() as u64;
        let changes = Changes::new(self.http, &self.current, self.client.leg.source().ip());
        block.splice(..0, changes.in_reply(forward::response(&head, &back), head.status));
        cache.count(count);
        (record.cache, record.status, record.server) = (Some(word), Some(head.status), Some(meta.server));
        let idle = self.front.policy.idle_limit;
        loop {
            let written = timeout(idle, self.client.write_all(&block)).await;
            match written.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                Ok(()) => record.bytes_down += block.len() as u64,
                Err(e) => {
                    record.how = if e.kind() == io::ErrorKind::TimedOut { "idle" } else { "client-reset" };
                    return Some(Next::Reset);
                }
            }
            if at == all {
                return Some(if close { Next::Close } else { Next::Request });
            }
            match cache.read(found.clone(), at).await {
                Ok(next) => block = next,
                Err(e) => {
                    (record.how, record.refusal) = ("damaged", Some(format!("the stored reply: {e}")));
                    return Some(Next::Reset);
                }
            }
            at += block.len() as u64;
        }
    }
}
