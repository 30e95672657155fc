//! Asks a server again for a stale reply that its client has got already (RFC 5861, 3). No client waits for this.

use super::{
    Row,
    fields::Changes,
    forward_request::{RoutedRequest, To, head_for},
};
use crate::{
    cache::{Cache, Fetch, Found, Heard, Place, Question},
    stream::Stream,
};
use longsplice_engine::Splicer;
use longsplice_http::{Body, Kind, Response, Scan};
use longsplice_proxy::limits::Limits;
use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};
use tokio::time::timeout;

impl Row<'_> {
    /// Whether a stale reply may be sent before its server is asked again. Replies that a filter has to judge or to change, and
    /// servers that expect a client's address first, need a client. So do those that were not reached straight.
    pub(super) fn may_refresh(&self, found: &Found, question: &Question) -> bool {
        let Some((cache, _)) = &self.of.cache else { return false };
        let listener = &self.front.listener;
        let filter = &self.http.filter;
        let alone = filter.rules.is_empty()
            && filter.changes.list.is_empty()
            && listener.intercepts.is_none()
            && found.stored.meta.came.is_none()
            && listener.proxy_protocol.send.is_none();
        let default = cache.config().stale_while_revalidate;
        alone && found.stored.meta.may_be_stale(question, "stale-while-revalidate", default, SystemTime::now())
    }

    /// Begins to ask the server that has sent the reply, unless that goes on already.
    pub(super) fn refresh(&self, routed: &RoutedRequest<'_>, fetch: &Fetch, found: &Found) {
        let (Some((cache, filter)), Some(old)) = (&self.of.cache, &fetch.question) else { return };
        let Place::First(turn) = cache.turn(&old.url) else { return };
        // what this client wants to know, or to have, is no matter of the next one
        let mut request = routed.request.clone();
        "GET".clone_into(&mut request.method);
        for name in ["if-none-match", "if-modified-since", "range", "if-range"] {
            request.keep_back(name);
        }
        let server = found.stored.meta.server;
        let target = match &routed.to {
            To::Target(target) => target.clone(),
            _ => server.into(),
        };
        let again = Fetch {
            cache: cache.clone(),
            question: Question::new(&request, old.url.clone(), self.http.codings),
            filter: filter.clone(),
            stale: None,
            turn: Mutex::new(Some(turn)),
            changes: None,
            came: None,
            asked_at: SystemTime::now(),
        };
        let changes = Changes::new(self.http, &self.current, self.client.leg.source().ip());
        let mut head = head_for((self.http, &changes), &self.client, (routed, &request), &target);
        found.ask(&mut head);
        let (splicer, limits) = (self.shared().splicer.clone(), self.front.listener.limits.clone());
        let (cache, mut stop) = (cache.clone(), self.shared().stop.clone());
        let idle = self.front.policy.idle_limit.get();
        tokio::spawn(async move {
            let asked = ask(&cache, again, (&splicer, server), head, (&limits, idle));
            tokio::select! {
                // whatever comes of it, the next request asks again
                _ = asked => {}
                _ = stop.wait_for(|stop| *stop) => {}
            }
        });
    }
}

/// Asks, and stores the reply.
async fn ask(
    cache: &Arc<Cache>,
    fetch: Fetch,
    (splicer, server): (&Splicer, SocketAddr),
    head: Vec<u8>,
    (limits, idle): (&Limits, Duration),
) -> io::Result<()> {
    let leg = timeout(limits.connect, splicer.connect_alone(server)).await??;
    let mut stream = Stream::new(leg);
    let answered = store(cache, fetch, &mut stream, head, (limits, idle)).await;
    stream.leg.untap();
    stream.close(splicer);
    answered
}

async fn store(
    cache: &Arc<Cache>,
    mut fetch: Fetch,
    stream: &mut Stream,
    head: Vec<u8>,
    (limits, idle): (&Limits, Duration),
) -> io::Result<()> {
    let bad = |wrong: longsplice_http::Wrong| io::Error::other(wrong.to_string());
    timeout(limits.reply, stream.write_all(&head)).await??;
    let mut scan = Scan::lenient(Kind::Response);
    let reply = loop {
        if let Some(end) = scan.feed(stream.in_hand()).map_err(bad)? {
            let reply = Response::lenient(&stream.in_hand()[..end], "GET").map_err(bad)?;
            stream.consume(end);
            if !reply.is_interim() {
                break reply;
            }
            scan = Scan::lenient(Kind::Response);
        } else if timeout(limits.reply, stream.fill()).await?? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    };
    let question = fetch.question.clone().ok_or(io::ErrorKind::InvalidInput)?;
    fetch.stale = cache.look(question, fetch.filter.clone(), |meta| meta.came.is_none()).await;
    match fetch.hear(&reply, stream.leg.remote(), Some(stream.in_hand())) {
        Heard::Good(Some(meta)) => {
            if let Some(mut stale) = fetch.stale.take() {
                cache.freshen(&mut stale, *meta).await;
            }
        }
        Heard::Good(None) | Heard::Pass | Heard::Miss => {}
        Heard::Fill(fill, tap) => {
            stream.leg.tap(tap);
            let mut body = Body::lenient(reply.framing);
            loop {
                while !body.is_done() && !stream.in_hand().is_empty() {
                    let n = body.step(stream.in_hand()).map_err(bad)?.len();
                    stream.consume(n);
                }
                if body.is_done() {
                    break;
                }
                if timeout(idle, stream.fill()).await?? == 0 {
                    body.end_of_stream().map_err(bad)?;
                }
            }
            fill.complete();
        }
    }
    Ok(())
}
