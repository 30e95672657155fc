//! One request and its reply: both bodies pass at the same time, each to its own end.
//!
//! | what comes | what becomes of it |
//! | --- | --- |
//! | the body of the request | checked, written to the server as it is |
//! | an interim reply (1xx) | passed on, unless the client speaks HTTP/1.0 |
//! | 101, if it was asked for | the exchange ends: what follows is no HTTP |
//! | the head of the reply | written anew, and from then on nothing can be taken back |
//! | the body of the reply | checked, written to the client; without chunks if it would not know them |
//! | a reply before the request has ended | passed on, and both connections are closed after it |
//!
//! Nothing is read from the server beyond the reply that is looked for: bytes behind it mean that the server and we do not
//! agree, and its connection is not used again.

use super::stream::Stream;
use crate::fault::Fault;
use longsplice_http::{
    Body, Framing, Kind, Request, Response, Scan, Step, Version, Wrong,
    forward::{self, Back},
};
use std::{
    io,
    task::{Context, Poll, ready},
    time::Instant,
};

/// More interim replies than any server has reason to send.
const INTERIM_MAX: u32 = 32;

pub(crate) struct Exchange<'a> {
    client: &'a mut Stream,
    server: &'a mut Stream,
    request: &'a Request,
    via: Option<&'a str>,
    /// Whether the client's connection is to be closed after it, whatever the reply says.
    last: bool,
    /// There is another connection to try: this one has carried a request before, or there are more servers.
    again: bool,
    up: Up,
    down: Down,
    /// Status of the reply, once its head has come.
    pub status: Option<u16>,
    /// Bytes written, to the server and to the client.
    pub passed: [u64; 2],
    /// When something has moved last.
    pub moved: Instant,
}

/// From client to server.
struct Up {
    head: Vec<u8>,
    sent: usize,
    body: Body,
    /// Bytes in hand that belong to the body and may be written.
    checked: usize,
    /// The server takes no more.
    broken: bool,
}

/// From server to client.
struct Down {
    scan: Scan,
    head: Vec<u8>,
    sent: usize,
    /// Once the head has come.
    body: Option<Body>,
    checked: usize,
    /// Pass on the content of chunks only.
    strip: bool,
    interim: u32,
    end: End,
}

/// How an exchange has ended.
#[derive(Debug)]
pub(crate) enum End {
    /// The reply was passed on. `close`: the client was told that we close; `reuse`: the server's connection is fit for more.
    Done { close: bool, reuse: bool },
    /// 101 was passed on.
    Upgraded,
    /// The server has closed without a word, and another connection may do better.
    Stale,
    /// Nothing of a final reply was passed on yet: answer with this status.
    Fault(Fault, u16),
    /// The reply was begun, and cannot be finished.
    Cut(&'static str, String),
}

/// Which side has failed.
enum Broken {
    Client(io::Error),
    Server(io::Error),
    Wrong(Wrong),
}

impl<'a> Exchange<'a> {
    /// With `head` for the server.
    pub fn new(
        (client, server): (&'a mut Stream, &'a mut Stream),
        request: &'a Request,
        head: Vec<u8>,
        via: Option<&'a str>,
        (last, again): (bool, bool),
    ) -> Exchange<'a> {
        let body = Body::new(request.framing);
        Exchange {
            client,
            server,
            request,
            via,
            last,
            again,
            up: Up { head, sent: 0, body, checked: 0, broken: false },
            down: Down {
                scan: Scan::new(Kind::Response),
                head: Vec::new(),
                sent: 0,
                body: None,
                checked: 0,
                strip: false,
                interim: 0,
                end: End::Stale,
            },
            status: None,
            passed: [0; 2],
            moved: Instant::now(),
        }
    }

    /// Whether the head of the reply has come.
    pub fn replied(&self) -> bool {
        self.down.body.is_some()
    }

    /// Both directions, until the reply has ended.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        if !self.up_done() && !self.up.broken {
            match self.poll_up(cx) {
                Poll::Pending | Poll::Ready(Ok(())) => {}
                // It may have replied before it closed.
                Poll::Ready(Err(Broken::Server(_))) => self.up.broken = true,
                Poll::Ready(Err(Broken::Client(e))) => {
                    return Poll::Ready(End::Cut("client-reset", e.to_string()));
                }
                Poll::Ready(Err(Broken::Wrong(wrong))) => return Poll::Ready(self.bad_request(wrong)),
            }
        }
        if self.up_done()
            && let Err(e) = self.watch_client(cx)
        {
            return Poll::Ready(End::Cut("client-reset", e.to_string()));
        }
        match ready!(self.poll_down(cx)) {
            Ok(()) => Poll::Ready(std::mem::replace(&mut self.down.end, End::Stale)),
            Err(Broken::Client(e)) => Poll::Ready(End::Cut("client-reset", e.to_string())),
            Err(Broken::Server(e)) => Poll::Ready(self.no_reply(&e)),
            Err(Broken::Wrong(wrong)) => Poll::Ready(self.bad_reply(&wrong.to_string())),
        }
    }

    /// Whether it is the client who has to send something.
    pub fn waits_for_client(&self) -> bool {
        self.up.sent == self.up.head.len() && self.up.checked == 0 && !self.up.body.is_done() && !self.up.broken
    }

    fn up_done(&self) -> bool {
        self.up.sent == self.up.head.len() && self.up.checked == 0 && self.up.body.is_done()
    }

    /// Notices a client that goes away while the server thinks. What it sends is its next request.
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
        let Exchange { client, server, up, passed, moved, .. } = self;
        while up.sent < up.head.len() {
            let n = ready!(server.poll_write(cx, &up.head[up.sent..])).map_err(Broken::Server)?;
            up.sent += n;
            passed[0] += n as u64;
            *moved = Instant::now();
        }
        loop {
            while up.checked > 0 {
                let n = ready!(server.poll_write(cx, &client.in_hand()[..up.checked])).map_err(Broken::Server)?;
                client.consume(n);
                up.checked -= n;
                passed[0] += n as u64;
                *moved = Instant::now();
            }
            if up.body.is_done() {
                return Poll::Ready(Ok(()));
            }
            if client.in_hand().is_empty() && ready!(client.poll_fill(cx)).map_err(Broken::Client)? == 0 {
                up.body.end_of_stream().map_err(Broken::Wrong)?;
            }
            while up.checked < client.in_hand().len() && !up.body.is_done() {
                up.checked += up.body.step(&client.in_hand()[up.checked..]).map_err(Broken::Wrong)?.len();
            }
        }
    }

    fn poll_down(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        loop {
            let Down { head, sent, .. } = &mut self.down;
            while *sent < head.len() {
                let n = ready!(self.client.poll_write(cx, &head[*sent..])).map_err(Broken::Client)?;
                *sent += n;
                self.passed[1] += n as u64;
                self.moved = Instant::now();
            }
            if self.down.body.is_some() {
                return self.poll_body(cx);
            }
            if let Some(end) = self.down.scan.feed(self.server.in_hand()).map_err(Broken::Wrong)? {
                let reply = Response::parse(&self.server.in_hand()[..end], &self.request.method);
                self.server.consume(end);
                self.down.scan = Scan::new(Kind::Response);
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

    /// A head has come; Err: it is none that can be passed on.
    fn head(&mut self, reply: &Response) -> Result<(), End> {
        let refuse = |why: &str| Err(End::Fault(Fault::BadReply(why.into()), 502));
        let client = self.request.version;
        if reply.is_interim() {
            self.down.interim += 1;
            if self.down.interim > INTERIM_MAX {
                return refuse("the server sends one interim reply after the other");
            }
            if client == Version::New {
                self.pass(reply, false);
            }
            return Ok(());
        }
        self.status = Some(reply.status);
        match reply.status {
            101 if self.request.upgrade.is_none() || self.request.framing != Framing::None => {
                return refuse("the server switches protocols, and nobody has asked it to");
            }
            101 if reply.upgrade.is_none() => return refuse("the server switches to no protocol"),
            101 => {
                self.pass(reply, false);
                (self.down.body, self.down.end) = (Some(Body::new(Framing::None)), End::Upgraded);
                return Ok(());
            }
            // It would make the client send its password for us to whoever asks (RFC 9110, 15.5.8).
            407 => return refuse("the server asks for a password in the name of the proxy"),
            _ => {}
        }
        let strip = client == Version::Old && reply.framing == Framing::Chunked;
        let early = !self.up_done();
        let close = self.last || early || strip || reply.framing == Framing::UntilClose;
        self.pass(reply, close);
        self.down.strip = strip;
        self.down.body = Some(Body::new(reply.framing));
        self.down.end = End::Done { close, reuse: reply.keep_alive && !early };
        Ok(())
    }

    fn pass(&mut self, reply: &Response, close: bool) {
        self.down.head = forward::response(reply, &Back { via: self.via, client: self.request.version, close });
        self.down.sent = 0;
    }

    fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        let Exchange { client, server, down, passed, moved, .. } = self;
        let Some(body) = &mut down.body else { return Poll::Ready(Ok(())) };
        loop {
            while down.checked > 0 {
                let n = ready!(client.poll_write(cx, &server.in_hand()[..down.checked])).map_err(Broken::Client)?;
                server.consume(n);
                down.checked -= n;
                passed[1] += n as u64;
                *moved = Instant::now();
            }
            if body.is_done() {
                if let End::Done { reuse, .. } = &mut down.end {
                    *reuse &= server.in_hand().is_empty();
                }
                return Poll::Ready(Ok(()));
            }
            if server.in_hand().is_empty() && ready!(server.poll_fill(cx)).map_err(Broken::Server)? == 0 {
                body.end_of_stream().map_err(Broken::Wrong)?;
            }
            while down.checked < server.in_hand().len() && !body.is_done() {
                match body.step(&server.in_hand()[down.checked..]).map_err(Broken::Wrong)? {
                    Step::Framing(n) if down.strip => server.consume(n),
                    Step::Content(n) if down.strip => {
                        down.checked = n;
                        break;
                    }
                    step => down.checked += step.len(),
                }
            }
        }
    }

    fn bad_request(&self, wrong: Wrong) -> End {
        let begun = self.replied();
        if begun { End::Cut("bad-request", wrong.to_string()) } else { bad_request(wrong) }
    }

    fn bad_reply(&self, why: &str) -> End {
        if self.replied() {
            return End::Cut("server-reset", format!("the server's reply: {why}"));
        }
        End::Fault(Fault::BadReply(format!("the server's reply: {why}")), 502)
    }

    /// The server's connection has failed or ended.
    fn no_reply(&self, e: &io::Error) -> End {
        if self.replied() {
            return End::Cut("server-reset", format!("the server's connection: {e}"));
        }
        let nothing = self.down.interim == 0 && self.server.in_hand().is_empty();
        // RFC 9112, 9.3.1: what may be done twice is sent again, the rest is not
        if self.again && nothing && self.request.is_repeatable() {
            return End::Stale;
        }
        End::Fault(no_reply(), 502)
    }
}

/// The server has closed without a word.
pub(super) fn no_reply() -> Fault {
    Fault::BadReply("the server closed before it had replied".into())
}

/// The answer to a request that is wrong.
pub(crate) fn bad_request(wrong: Wrong) -> End {
    End::Fault(Fault::BadRequest(wrong.to_string()), wrong.status())
}
