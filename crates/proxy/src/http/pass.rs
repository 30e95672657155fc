//! The way of one request: a connection to a server, the exchange over it, and what becomes of both connections after it.

use super::{
    Next, Row,
    exchange::{End, Exchange},
    status_of,
    stream::Stream,
};
use crate::{
    access_log::Record,
    connection::connect,
    counters::Counters,
    fault::{Fault, Step},
    target::Target,
};
use longsplice_http::{
    Request,
    forward::{self, Onward},
};
use std::future::poll_fn;
use tokio::time::timeout;

/// Why a reply that was passed on was not spliced, in the access log.
const COPIED: &str = "http-reply";

/// A request, and where it is to go.
pub(super) struct Errand<'a> {
    pub request: &'a Request,
    /// `Host`, as the server is to see it.
    pub host: &'a str,
    pub target: &'a Target,
}

/// A connection to a server.
pub(super) struct Held {
    pub target: Target,
    pub stream: Stream,
    /// It has carried a request before, and may have been closed meanwhile.
    pub reused: bool,
}

impl Row<'_> {
    /// A request that goes to a server, and its reply.
    pub(super) async fn pass_on(&mut self, errand: &Errand<'_>, record: &mut Record) -> Next {
        let mut fresh = false;
        loop {
            if let Err(fault) = self.seek(errand, fresh).await {
                return self.refuse(errand.request, record, &fault, status_of(&fault)).await;
            }
            let end = self.exchange(errand, record).await;
            if !matches!(end, End::Done { reuse: true, .. } | End::Upgraded) {
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
                    self.answer(Some(errand.request), record, &fault, Some(status), true).await;
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

    /// Sees to it that there is a connection to the server; `fresh`: a new one.
    async fn seek(&mut self, errand: &Errand<'_>, fresh: bool) -> Result<(), Fault> {
        if let Some(held) = &mut self.server
            && held.target == *errand.target
            && !fresh
            && held.stream.is_quiet().await
        {
            held.reused = true;
            Counters::add(&self.shared().counters.reused);
            return Ok(());
        }
        self.drop_server();
        let target = errand.target;
        let server = connect(self.shared(), &self.front.listener, &self.client.leg, target).await?;
        self.server = Some(Held { target: target.clone(), stream: Stream::new(server), reused: false });
        Ok(())
    }

    /// Request and reply, over the connection that was found.
    async fn exchange(&mut self, errand: &Errand<'_>, record: &mut Record) -> End {
        let request = errand.request;
        let last = !self.may_go_on(request);
        let limits = &self.front.listener.limits;
        let idle = self.front.policy.idle_limit;
        let Some(Held { stream: server, reused, .. }) = &mut self.server else { return End::Stale };
        record.server = Some(server.leg.remote());
        let onward = Onward {
            host: errand.host,
            via: self.http.via.as_deref(),
            forwarded: self.http.forwarded,
            client: self.client.leg.remote().ip(),
        };
        let head = forward::request(request, &onward);
        let ends = (&mut self.client, server);
        let mut exchange = Exchange::new(ends, request, head, self.http.via.as_deref(), (last, *reused));
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
}
