//! Waits for a request within the time limits.

use super::Row;
use longsplice_http::{Kind, Request, Scan, Wrong};
use longsplice_proxy::{
    fault::{Fault, Step},
    proxy_protocol,
};
use std::{sync::atomic::Ordering::Relaxed, time::Instant};

impl Row<'_> {
    /// Lets the client go to another process, if there is one that takes it. Returns whether it is gone.
    fn hand_on(&mut self) -> bool {
        let requests = (self.count > 0).then_some((self.count, self.answered));
        let is_empty = self.client.in_hand().is_empty() && !self.client.ended;
        let Row { live, front, client, began, .. } = self;
        is_empty && live.hand_on(&front.listener, &mut client.leg, (*began, true), requests)
    }

    /// Returns the next request; `None` if the client has no more, waits too long, goes to another process, or the program stops.
    pub(super) async fn read_request(&mut self) -> Result<Option<Request>, (Fault, Option<u16>)> {
        let front = self.front;
        let limits = &front.listener.limits;
        let mut scan = Scan::new(Kind::Request);
        let (mut since, mut limit) = match self.count {
            0 => (self.began, limits.handshake),
            _ => (self.answered, limits.keep_alive),
        };
        loop {
            let idle = !scan.has_begun();
            let seen = self.client.in_hand();
            let wrong = |w: Wrong| {
                let fault = proxy_protocol::explained(seen, Fault::BadRequest(w.to_string()));
                (fault, Some(w.status()))
            };
            let end = scan.feed(seen).map_err(wrong)?;
            if end.unwrap_or(seen.len()) > limits.request_head as usize {
                return Err(wrong(Wrong::HeadTooLong));
            }
            if let Some(end) = end {
                let request = Request::parse(&seen[..end]).map_err(wrong)?;
                self.client.consume(end);
                return Ok(Some(request));
            }
            let begun = scan.has_begun();
            if idle && begun && self.count > 0 {
                (since, limit) = (Instant::now(), limits.handshake);
            }
            let read = tokio::select! {
                read = self.client.fill() => read,
                () = self.alarm.ring(since, limit) => match (begun, self.count) {
                    (true, _) => return Err((Fault::Timeout(Step::Handshake), Some(408))),
                    // A client that has sent nothing expects no answer.
                    (false, 0) => return Err((Fault::Timeout(Step::Handshake), None)),
                    (false, _) => return Ok(None),
                },
                () = &mut self.goes, if !begun && !self.stays => {
                    self.stays = true;
                    // nothing is in hand
                    if self.hand_on() || self.count > 0 && !self.shared().handed_over.load(Relaxed) {
                        return Ok(None);
                    }
                    // A client that sends its request at this moment would get no answer.
                    continue;
                }
            };
            match read {
                Ok(1..) => {}
                Ok(0) | Err(_) if !begun && self.count > 0 => return Ok(None),
                Ok(0) | Err(_) => {
                    let why = "the client closed before its request was complete";
                    return Err((Fault::BadRequest(why.into()), begun.then_some(400)));
                }
            }
        }
    }
}
