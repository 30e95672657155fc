//! The request, from client to server.

use super::{Broken, Cut, End, Exchange, bad_request, is_to_come, is_worth, too_long, write_head};
use longsplice_http::{Body, Step, Wrong};
use longsplice_proxy::log::access_log::Outcome;
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
}

impl Exchange<'_> {
    pub(super) fn up_done(&self) -> bool {
        self.up.sent == self.up.head.len() && self.up.checked == 0 && self.up.body.is_done()
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

    pub(super) fn poll_up(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        let Exchange { client, server, up, down, outcome: Outcome { passed, .. }, moved, bodies, ahead, .. } = self;
        let most = self.limits.request_body.unwrap_or(u64::MAX);
        loop {
            while up.checked < client.in_hand().len() && !up.body.is_done() {
                let step = up.body.step(&client.in_hand()[up.checked..]).map_err(Broken::Wrong)?;
                up.checked += step.len();
                if let Step::Content(n) = step {
                    self.content.client += n as u64;
                }
                // what is ahead is part of a chunk whose size is known
                if self.content.client.saturating_add(up.body.ahead().unwrap_or(0)) > most {
                    return Poll::Ready(Err(Broken::TooLong(most)));
                }
            }
            // Not before the body has begun: the client may wait for 100 (RFC 9110, 10.1.1).
            let begun = up.checked > 0 && up.checked == client.in_hand().len();
            if begun
                && !up.copy
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
            if up.body.is_done() {
                return Poll::Ready(Ok(()));
            }
            if client.in_hand().is_empty() && ready!(client.poll_fill(cx)).map_err(Broken::Client)? == 0 {
                up.body.end_of_stream().map_err(Broken::Wrong)?;
            }
        }
    }

    pub(super) fn request_too_long(&self, most: u64) -> End {
        let (fault, status) = too_long(most);
        if self.replied() { End::Cut(Cut::BadRequest, fault.to_string()) } else { End::Fault(fault, status) }
    }

    pub(super) fn bad_request(&self, wrong: Wrong) -> End {
        let begun = self.replied();
        if begun { End::Cut(Cut::BadRequest, wrong.to_string()) } else { bad_request(wrong) }
    }
}
