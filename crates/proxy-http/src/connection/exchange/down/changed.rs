//! A reply whose body is changed: its content is read here, and what becomes of it is written in chunks of our own, or, to an
//! HTTP/1.0 client, up to the end of the connection. When nothing more can change, the rest is passed on as it comes, as one
//! chunk if it has a length, so it may be spliced.

use super::{super::Exchange, Broken, Down, End, HELD_MAX};
use longsplice_http::{Body, Framing, Response, Step};
use longsplice_proxy::{
    access::Denied,
    fault::Fault,
    rewrite::{Rewriter, Wanted},
};

/// Number of bytes that are changed at a time: each may become as long as what replaces it.
const AT_ONCE: usize = 4096;
/// The end of a body in chunks.
const LAST: &[u8] = b"0\r\n\r\n";

/// State of a body that is changed.
#[derive(Debug)]
pub(in super::super) struct Change {
    /// `None`: the rest is as it is.
    rewriter: Option<Rewriter>,
    /// The client gets chunks.
    chunks: bool,
    /// Trailers follow the chunks of the server, and may be about its bytes.
    trailers: bool,
    /// What follows the rest.
    last: &'static [u8],
}

impl Change {
    /// Whether the rest of the body is as it is.
    pub fn is_over(&self) -> bool {
        self.rewriter.is_none()
    }

    /// Whether the rest will be as it is.
    pub fn is_limited(&self) -> bool {
        self.rewriter.as_ref().is_none_or(Rewriter::is_limited)
    }

    /// Returns what follows the rest of the body.
    pub fn last(self) -> Option<&'static [u8]> {
        Some(self.last).filter(|last| !last.is_empty())
    }

    fn write(&self, content: &[u8], out: &mut Vec<u8>) {
        if self.chunks && !content.is_empty() {
            out.extend_from_slice(format!("{:x}\r\n", content.len()).as_bytes());
            out.extend_from_slice(content);
            out.extend_from_slice(b"\r\n");
        } else {
            out.extend_from_slice(content);
        }
    }

    /// Leaves the rest of the body as it is, if the client's framing allows that here.
    fn retire(&mut self, body: &Body, out: &mut Vec<u8>) {
        let ahead = body.ahead().unwrap_or(0);
        let (last, may) = match body {
            _ if !self.chunks => (&b""[..], true),
            Body::Exact(_) => (&b"\r\n0\r\n\r\n"[..], ahead > 0),
            Body::Chunked(_) => (&b""[..], ahead > 0 && !self.trailers),
            Body::UntilClose(_) => (&b""[..], false),
        };
        if may {
            if self.chunks {
                out.extend_from_slice(format!("{ahead:x}\r\n").as_bytes());
            }
            (self.rewriter, self.last) = (None, last);
        }
    }
}

impl Exchange<'_> {
    /// Decides whether a final reply is changed, and how its body is. An error ends the exchange.
    pub(super) fn change_of(&self, reply: &Response) -> Result<Option<Option<Change>>, End> {
        let is_empty = reply.framing.is_empty() && self.request.method != "HEAD";
        let rewriter = match self.http.filter.changes.wanted(reply) {
            Wanted::Denied(why) => return Err(End::Fault(Fault::Denied(Denied::Unchanged(why)), 403)),
            Wanted::Whole if self.request.is_repeatable() && !self.whole => return Err(End::Whole),
            Wanted::Whole => {
                let why = "the server sends a part of what has to be changed as a whole";
                return Err(End::Fault(Fault::BadReply(why.into()), 502));
            }
            Wanted::Changes(rewriter) if !is_empty => rewriter,
            Wanted::Nothing | Wanted::Changes(_) => return Ok(None),
        };
        let chunks = reply.framing_of_changed(self.request.version) == Framing::Chunked;
        let trailers = reply.fields.all("trailer").next().is_some();
        let change = Change { rewriter: Some(rewriter), chunks, trailers, last: b"" };
        Ok(Some((reply.framing != Framing::None).then_some(change)))
    }

    /// Changes the content in the buffer. What becomes of it is behind the head.
    pub(super) fn change_content(&mut self) -> Result<(), Broken> {
        let Exchange { server, down, content: all, limits, .. } = self;
        let most = limits.reply_body.unwrap_or(u64::MAX);
        let Down { body: Some(body), change: Some(change), head, sent, filter, .. } = down else { return Ok(()) };
        if change.is_over() {
            return Ok(());
        }
        if *sent == head.len() {
            (*head, *sent) = (Vec::new(), 0);
        }
        let mut content = Vec::new();
        while let Some(rewriter) = &mut change.rewriter
            && !server.in_hand().is_empty()
            && !body.is_done()
            && head.len() - *sent <= HELD_MAX
        {
            let rest = server.in_hand();
            let rest = &rest[..rest.len().min(AT_ONCE)];
            let step = body.step(rest).map_err(Broken::Wrong)?;
            let _ = body.mended(); // our own framing is right
            content.clear();
            if let Step::Content(n) = step {
                all.server += n as u64;
                if all.server > most {
                    return Err(Broken::TooLong(most));
                }
                if let Some(filter) = &mut *filter {
                    filter.read(&rest[..n]);
                }
                rewriter.read(&rest[..n], false, &mut content);
            }
            let is_over = rewriter.is_over();
            server.consume(step.len());
            change.write(&content, head);
            if is_over {
                change.retire(body, head);
            }
        }
        if body.is_done()
            && let Some(mut rewriter) = change.rewriter.take()
        {
            content.clear();
            rewriter.read(b"", true, &mut content);
            change.write(&content, head);
            head.extend_from_slice(if change.chunks { LAST } else { b"" });
        }
        Ok(())
    }
}
