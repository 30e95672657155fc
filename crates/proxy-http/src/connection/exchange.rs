//! One request and its reply: both bodies are relayed at the same time, each to its own end.
//!
//! | input | result |
//! | --- | --- |
//! | body of the request | checked, judged, and written to the server, unchanged or in chunks of our own |
//! | interim reply (1xx) | forwarded, unless the client speaks HTTP/1.0 |
//! | 101, if the client asked for it | the exchange ends: no HTTP follows |
//! | head of the reply | checked by the rules, rewritten; after that, the reply cannot be replaced any more |
//! | 304 to conditions of the cache | the exchange ends: the cache answers |
//! | body of the reply | checked, written to the client; without chunks if the client does not understand them |
//! | reply before the end of the request | forwarded; then both connections are closed |
//! | body of the request that is denied, damaged or too much | answered in place of the server, which never gets the end of it |
//! | body that is changed | written as it becomes, in chunks of our own; what is left when nothing more can change goes on as it is |
//! | part (206) of what would be changed | the exchange ends: the request is sent again, without Range |
//! | reply that the rules must see more of | held back, head and body ([`Down::hold`]), or just not spliced ([`ReplyFilter`]) |
//!
//! Nothing is read from the server beyond the end of the reply. Bytes after it mean that the
//! server and we disagree about the end, and its connection is not used again.

mod changed;
mod down;
mod up;

use super::fields::Changes;
use crate::{
    cache::{Fetch, Fill, Meta},
    stream::Stream,
};
use changed::Change;
use down::Down;
use longsplice_engine::{
    EndReason, FlowInfo, Leftovers, Leg, LegOfProxy, Message, Pair, Policy, Refusal, RelayedMessage, Side, SpliceWhen,
    Splicer,
};
use longsplice_http::{Body, REPLY_HEAD_MAX, Request, Wrong};
use longsplice_proxy::{
    access::Denied,
    coding::{BadContent, Decoder},
    config::Http,
    counters::Counters,
    fault::Fault,
    filter::{FIRST_MAX, ReplyFilter},
    limits::Limits,
    log::access_log::Outcome,
    rewrite::Rewriter,
};
use std::{
    io,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Instant,
};
use up::Up;

/// Number of bytes still to come from which a splice may pay.
const LEAST_TO_COME: u64 = 16 * 1024;
/// Size of a body from which the engine copies it for less than we do, through pipes, so that a failed attempt does no harm.
const LONG: u64 = 512 * 1024;

/// Size of a body that a server with a small window sends in one piece, or nearly ([`LegOfProxy::clamp`]).
const CLAMPED: u64 = 32 * 1024;

/// Maximum number of bytes of a reply that are held back: the longest head, the longest first part of the body, and as many
/// bytes of chunk framing.
const HELD_MAX: usize = REPLY_HEAD_MAX + 2 * FIRST_MAX;

/// Why a body is refused that a rule has to read.
const UNKNOWN: &str = "a rule has to read the content, and it has a coding that cannot be taken off";
/// Of what there are too many if there is no memory for another one.
const BUSY: &str = "bodies whose codings are taken off";

pub(crate) struct Exchange<'a> {
    client: &'a mut Stream,
    server: &'a mut Stream,
    request: &'a Request,
    http: &'a Http,
    changes: Changes<'a>,
    /// The request is sent again, for the whole of a reply.
    pub whole: bool,
    limits: &'a Limits,
    /// Content of the request and of the reply so far.
    content: Pair<u64>,
    /// Whether the client's connection is closed afterwards, even if the reply allows another request.
    last: bool,
    /// What the cache needs of the reply, and the reply being stored.
    fetch: Option<&'a Fetch>,
    fill: Option<Fill>,
    up: Up,
    down: Down,
    /// A cookie for the client, in the head of the reply.
    pub cookie: Option<String>,
    /// For the access log.
    pub outcome: Outcome,
    /// Why a coding could not be taken off, for the counters.
    pub bad: Option<BadContent>,
    /// Time of the last progress.
    pub moved: Instant,
    /// When the request began to be sent.
    began: Instant,
    /// Amount of remaining content from which a splice pays.
    bodies: SpliceWhen,
    /// Whether a body with that much content was found.
    ahead: bool,
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
    /// The server sent a part of a reply that is changed as a whole: ask again, for all of it.
    Whole,
    /// The server closed without a reply.
    Stale,
    /// The server closed without a reply, and the request must not be sent twice. The client's
    /// connection is closed in the same way.
    Gone,
    /// The server's reply has this status, and a page of ours is sent instead. `close`: the client's connection is of no use.
    Replaced { status: u16, close: bool },
    /// Nothing of a final reply was sent: answer with this status.
    Fault(Fault, u16),
    /// The reply was started and cannot be finished.
    Cut(Cut, String),
}

/// Why a reply that was started is not finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    ClientReset,
    /// The server's connection has failed, or its reply is wrong.
    ServerReset,
    Idle,
    Stopped,
    /// The rest of the request is wrong.
    BadRequest,
    /// The rules deny the reply.
    Denied,
    /// Too many bodies like this one are read at once.
    Limit,
}

impl Cut {
    /// Returns the name for the access log.
    pub fn how(self) -> &'static str {
        match self {
            Cut::ClientReset => EndReason::ClientReset.as_str(),
            Cut::ServerReset => EndReason::ServerReset.as_str(),
            Cut::Idle => EndReason::Idle.as_str(),
            Cut::Stopped => EndReason::Stopped.as_str(),
            Cut::BadRequest => "bad-request",
            Cut::Denied => "denied",
            Cut::Limit => "limit",
        }
    }
}

/// Error, by its cause.
enum Broken {
    Client(io::Error),
    Server(io::Error),
    Wrong(Wrong),
    /// The content is not what its coding says, or too much.
    Bad(BadContent),
    /// The rules deny the reply.
    Denied(Denied),
    /// A body is longer than this.
    TooLong(u64),
}

impl<'a> Exchange<'a> {
    /// Prepares an exchange. `head`: the request head for the server.
    pub fn new(
        (client, server): (&'a mut Stream, &'a mut Stream),
        request: &'a Request,
        head: Vec<u8>,
        (http, limits, changes): (&'a Http, &'a Limits, Changes<'a>),
        last: bool,
        (bodies, fetch): (SpliceWhen, Option<&'a Fetch>),
    ) -> Exchange<'a> {
        let body = Body::new(request.framing);
        Exchange {
            client,
            server,
            request,
            http,
            changes,
            whole: false,
            limits,
            content: Pair::default(),
            last,
            fetch,
            fill: None,
            up: Up {
                head,
                sent: 0,
                body,
                checked: 0,
                broken: false,
                copy: false,
                filter: None,
                change: None,
                changed: false,
                unread: false,
            },
            down: Down {
                scan: down::scan(http),
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
                change: None,
                changed: false,
                unread: false,
                begun: false,
                end: End::Stale,
            },
            cookie: None,
            outcome: Outcome::default(),
            bad: None,
            moved: Instant::now(),
            began: Instant::now(),
            bodies,
            ahead: false,
        }
    }

    /// Judges and changes the body of the request.
    pub fn set_upload(
        &mut self,
        filter: Option<ReplyFilter>,
        change: Option<(Rewriter, Option<Decoder>)>,
        unread: bool,
    ) {
        self.up.filter = filter;
        self.up.unread = unread;
        self.up.changed = change.is_some();
        let trailers = self.request.fields.all("trailer").next().is_some();
        self.up.change = change.map(|(rewriter, decoder)| Change::new(rewriter, decoder, trailers));
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
                    return Poll::Ready(End::Cut(Cut::ClientReset, e.to_string()));
                }
                Poll::Ready(Err(Broken::Wrong(wrong))) => return Poll::Ready(self.bad_request(wrong)),
                Poll::Ready(Err(Broken::TooLong(most))) => return Poll::Ready(self.request_too_long(most)),
                Poll::Ready(Err(Broken::Denied(why))) => return Poll::Ready(self.upload_denied(why)),
                Poll::Ready(Err(Broken::Bad(why))) => return Poll::Ready(self.bad_upload(why)),
            }
        }
        // Nothing else reads from the client now: its reset would go unnoticed.
        if self.up_done()
            && let Err(e) = self.watch_client(cx)
        {
            return Poll::Ready(End::Cut(Cut::ClientReset, e.to_string()));
        }
        match ready!(self.poll_down(cx)) {
            Ok(()) if self.ahead => Poll::Ready(End::Ahead(Side::Server)),
            Ok(()) => Poll::Ready(std::mem::replace(&mut self.down.end, End::Stale)),
            Err(Broken::Client(e)) => Poll::Ready(End::Cut(Cut::ClientReset, e.to_string())),
            Err(Broken::Server(e)) => Poll::Ready(self.no_reply(&e)),
            Err(Broken::Wrong(wrong)) => Poll::Ready(self.bad_reply(&wrong.to_string())),
            Err(Broken::Bad(why)) => Poll::Ready(self.bad_content(why)),
            Err(Broken::TooLong(most)) => Poll::Ready(self.bad_reply(&format!("more than {most} bytes"))),
            Err(Broken::Denied(why)) if self.replied() => Poll::Ready(End::Cut(Cut::Denied, why.to_string())),
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
        // The whole buffer belongs to the body: otherwise it would not have been found ahead.
        let first = [head, from.in_hand()].concat();
        from.consume(std::mem::take(checked));
        let ahead = body.ahead();
        let (left, message) = match sender {
            // a server that refuses an upload replies before its end, and often closes then
            Side::Client => (Leftovers::for_server(first), Message::from_client(ahead).until_receiver_speaks()),
            Side::Server => {
                // the whole length was compared with the policy; what is left may be less
                let rest = Message::from_server(ahead);
                (Leftovers::for_client(first), if down.long && ahead.is_some() { rest.that_pays() } else { rest })
            }
        };
        let RelayedMessage { ended, missing, in_hand, excess, receiver_failed, .. } =
            splicer.relay_message(&mut client.leg, &mut server.leg, left, policy, info, message).await;
        match sender {
            Side::Client => (up.sent, up.broken) = (up.head.len(), receiver_failed),
            Side::Server => (down.sent, down.begun) = (down.head.len(), true),
        }
        match ahead {
            Some(ahead) => {
                body.passed(ahead - missing);
                self.content[sender] += ahead - missing;
            }
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
            // nothing interrupts a reply: all that was read of it has been passed on
            Side::Server => down.copy |= copy,
        }
        self.outcome.add(&ended);
        self.moved = Instant::now();
        let gone = |cut| Some(End::Cut(cut, "while its body was passed on".into()));
        match ended.how {
            EndReason::MessageRelayed => None,
            EndReason::ClientReset => gone(Cut::ClientReset),
            EndReason::ServerReset => gone(Cut::ServerReset),
            EndReason::Idle => gone(Cut::Idle),
            _ => gone(Cut::Stopped),
        }
    }

    /// Ends the storing of the reply: it is complete if the exchange is done.
    pub fn end_fill(&mut self, end: &End) {
        if let Some(fill) = self.fill.take() {
            // for a body that ends with its connection, this is the only sign that it is complete
            if let End::Done { .. } = end {
                fill.complete();
            }
            self.server.leg.untap();
        }
    }

    /// Whether the reply was spliced, or could have been if less of it had been sent ahead.
    pub fn reply_is_long(&self) -> bool {
        self.outcome.spliced.server > 0
            || self.down.long && self.outcome.refusal.is_none_or(|why| why == Refusal::Short)
    }

    /// Whether the bodies of request and reply are changed.
    pub fn are_changed(&self) -> Pair<bool> {
        Pair::new(self.up.changed, self.down.changed)
    }

    /// Whether the bodies of request and reply ought to be read or changed, and cannot be.
    pub fn are_unread(&self) -> Pair<bool> {
        Pair::new(self.up.unread, self.down.unread)
    }

    /// Whether the exchange waits for bytes from the client.
    pub fn waits_for_client(&self) -> bool {
        self.up.sent == self.up.head.len() && self.up.checked == 0 && !self.up.body.is_done() && !self.up.broken
    }
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
    match bodies.threshold() {
        Some(n) => ahead >= n.max(1),
        None => bodies == SpliceWhen::AtOnce && ahead >= LEAST_TO_COME,
    }
}

/// Whether enough of this content is still to come: what the socket holds has to be copied anyway. Or it is long.
fn is_to_come(ahead: Option<u64>, from: &Leg) -> bool {
    ahead.is_none_or(|ahead| ahead >= LONG || ahead >= u64::from(from.unread()) + LEAST_TO_COME)
}

/// Returns the answer to a request whose body is longer than it may be.
pub(crate) fn too_long(most: u64) -> (Fault, u16) {
    (Fault::BadRequest(format!("the body of the request has more than {most} bytes")), 413)
}

/// Returns the answer to a request whose body cannot be read to be judged or changed.
pub(crate) fn bad_upload(why: BadContent) -> (Fault, u16) {
    match why {
        BadContent::Unknown => (Fault::Denied(Denied::Unread(UNKNOWN)), 415),
        BadContent::Corrupt => (Fault::BadRequest(why.to_string()), 400),
        BadContent::TooLong | BadContent::Bomb => (Fault::BadRequest(why.to_string()), 413),
        BadContent::Memory => (Fault::Limit(BUSY), 503),
    }
}

/// Counts a body that cannot be read.
pub(crate) fn count_bad(counters: &Counters, why: BadContent) {
    match why {
        BadContent::Unknown => {}
        BadContent::Corrupt => Counters::add(&counters.bodies_damaged),
        BadContent::TooLong | BadContent::Bomb => Counters::add(&counters.bodies_too_long),
        BadContent::Memory => Counters::add(&counters.bodies_without_memory),
    }
}

/// Returns the answer to a malformed request.
pub(crate) fn bad_request(wrong: Wrong) -> End {
    End::Fault(Fault::BadRequest(wrong.to_string()), wrong.status())
}

#[cfg(test)]
mod tests {
    use super::{
        down::{INTERIM_MAX, is_too_many},
        *,
    };
    use std::time::Duration;
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
