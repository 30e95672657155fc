//! The request, from client to server.

use super::{
    Broken, Cut, End, Exchange, bad_request, bad_upload, changed::Change, is_to_come, is_worth, too_long, write_head,
};
use longsplice_http::{Body, Step, Wrong};
use longsplice_proxy::{
    access::Denied,
    coding::BadContent,
    fault::Fault,
    filter::{FilterDecision, ReplyFilter},
    log::access_log::Outcome,
};
use std::{
    io,
    task::{Context, Poll, ready},
    time::Instant,
};

/// State of the direction from client to server.
pub(super) struct Up {
    pub(super) head: Vec<u8>,
    pub(super) sent: usize,
    pub(super) body: Body,
    /// Number of buffered bytes that belong to the body and may be written.
    pub(super) checked: usize,
    /// The server does not accept more.
    pub(super) broken: bool,
    /// The rest of the body must be copied.
    pub(super) copy: bool,
    /// Judges the body, until it has decided.
    pub(super) filter: Option<ReplyFilter>,
    /// The change of the body, until its end.
    pub(super) change: Option<Change>,
    /// There was one.
    pub(super) changed: bool,
    /// It ought to be read or changed, and cannot be.
    pub(super) unread: bool,
}

impl Up {
    /// Judges content. An incomplete upload is no upload: what is denied never reaches the server's end of it.
    fn judge(filter: &mut Option<ReplyFilter>, unread: &mut bool, content: Option<&[u8]>) -> Result<(), Broken> {
        let Some(judge) = filter else { return Ok(()) };
        match content {
            Some(content) => judge.read(content),
            None => judge.end(),
        }
        *unread |= judge.is_unread();
        match judge.decision() {
            FilterDecision::Denied(rule) => return Err(Broken::Denied(Denied::Upload(rule))),
            FilterDecision::Unreadable(why) => return Err(Broken::Bad(why)),
            FilterDecision::Open { .. } if content.is_some() => {}
            FilterDecision::Allowed(_) | FilterDecision::Open { .. } => *filter = None,
        }
        Ok(())
    }

    /// Whether the rest of the body is as it is, whatever it is.
    fn is_free(&self) -> bool {
        self.filter.is_none() && self.change.as_ref().is_none_or(Change::is_over)
    }
}

impl Exchange<'_> {
    pub(super) fn up_done(&self) -> bool {
        self.up.sent == self.up.head.len() && self.up.checked == 0 && self.up.body.is_done() && self.up.change.is_none()
    }

    /// Notices a client that goes away before the reply. Bytes that it sends belong to its next request.
    pub(super) fn watch_client(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.client.ended || !self.client.in_hand().is_empty() {
            return Ok(());
        }
        match self.client.poll_fill(cx) {
            Poll::Ready(Err(e)) => Err(e),
            // a FIN is not a failure: the client may wait for the reply, with nothing more to send
            Poll::Ready(Ok(_)) | Poll::Pending => Ok(()),
        }
    }

    /// Checks, judges and changes the buffered part of the body.
    fn read_up(&mut self) -> Result<(), Broken> {
        let Exchange { client, up, content, limits, .. } = self;
        let most = limits.request_body.unwrap_or(u64::MAX);
        let Up { head, sent, body, checked, filter, change, unread, .. } = up;
        let mut look = |of_body: &[u8], ahead: u64| {
            content.client += of_body.len() as u64;
            // what is ahead is part of a chunk whose size is known
            if content.client.saturating_add(ahead) > most {
                return Err(Broken::TooLong(most));
            }
            if of_body.is_empty() { Ok(()) } else { Up::judge(filter, unread, Some(of_body)) }
        };
        if let Some(change) = change {
            change.run((client, body), (head, sent), |of_body| look(of_body, 0))?;
        }
        while change.as_ref().is_none_or(Change::is_over) && *checked < client.in_hand().len() && !body.is_done() {
            let rest = &client.in_hand()[*checked..];
            let step = body.step(rest).map_err(Broken::Wrong)?;
            let of_body = if let Step::Content(n) = step { &rest[..n] } else { &[] };
            look(of_body, body.ahead().unwrap_or(0))?;
            *checked += step.len();
        }
        if body.is_done() { Up::judge(filter, unread, None) } else { Ok(()) }
    }

    pub(super) fn poll_up(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        loop {
            self.read_up()?;
            let Exchange { client, server, up, down, outcome: Outcome { passed, .. }, moved, bodies, ahead, .. } = self;
            // Not before the body has begun: the client may wait for 100 (RFC 9110, 10.1.1).
            let begun = up.checked > 0 && up.checked == client.in_hand().len();
            if begun
                && !up.copy
                && up.is_free()
                // the engine relays a request until the server speaks, which it already does
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
            let is_changing = up.change.as_ref().is_some_and(|change| !change.is_over());
            if is_changing && (up.body.is_done() || up.change.as_ref().is_some_and(Change::has_more)) {
                continue;
            }
            if up.body.is_done() {
                let Some(last) = up.change.take().and_then(Change::last) else { return Poll::Ready(Ok(())) };
                (up.head, up.sent) = (last.to_vec(), 0);
                continue;
            }
            if client.in_hand().is_empty() {
                if ready!(client.poll_fill(cx)).map_err(Broken::Client)? == 0 {
                    up.body.end_of_stream().map_err(Broken::Wrong)?;
                } else if is_changing {
                    // nothing of it may be written for long, but the client is not idle
                    *moved = Instant::now();
                }
            }
        }
    }

    pub(super) fn request_too_long(&self, most: u64) -> End {
        let (fault, status) = too_long(most);
        if self.replied() { End::Cut(Cut::BadRequest, fault.to_string()) } else { End::Fault(fault, status) }
    }

    pub(super) fn upload_denied(&self, why: Denied) -> End {
        if self.replied() { End::Cut(Cut::BadRequest, why.to_string()) } else { End::Fault(Fault::Denied(why), 403) }
    }

    pub(super) fn bad_upload(&mut self, why: BadContent) -> End {
        self.bad = Some(why);
        let (fault, status) = bad_upload(why);
        if self.replied() { End::Cut(Cut::BadRequest, fault.to_string()) } else { End::Fault(fault, status) }
    }

    pub(super) fn bad_request(&self, wrong: Wrong) -> End {
        let begun = self.replied();
        if begun { End::Cut(Cut::BadRequest, wrong.to_string()) } else { bad_request(wrong) }
    }
}
