//! A body that is changed: its content is read here, and what becomes of it is written in chunks of our own, or, to an HTTP/1.0
//! client, up to the end of the connection. When nothing more can change, the rest is passed on as it comes, as one
//! chunk if it has a length, so it may be spliced.
//!
//! Coded content is decoded first, and coded again if that is wanted: such a body is copied to its end.

use super::{Broken, End, Exchange, HELD_MAX};
use crate::stream::Stream;
use longsplice_http::{Body, Framing, Response, Step, accept::accepts, forward::Content};
use longsplice_proxy::{
    access::Denied,
    coding::{BadContent, Coding, Decoder, Encoder},
    fault::Fault,
    rewrite::{Rewriter, Wanted},
};

/// Number of bytes that are changed at a time: each may become as long as what replaces it.
const AT_ONCE: usize = 4096;
/// The end of a body in chunks.
const LAST: &[u8] = b"0\r\n\r\n";

/// State of a body that is changed.
#[derive(Debug)]
pub(super) struct Change {
    /// `None`: the rest is as it is.
    rewriter: Option<Rewriter>,
    /// Takes the coding of the content off.
    decoder: Option<Decoder>,
    /// The decoder may have more of what it has read.
    more: bool,
    /// The decoder has all.
    ended: bool,
    /// Puts a coding on.
    encoder: Option<Encoder>,
    /// The encoder may have something that the client could get.
    unflushed: bool,
    /// The client gets chunks.
    chunks: bool,
    /// Trailers follow the chunks of the sender, and may be about its bytes.
    trailers: bool,
    /// What follows the rest.
    last: &'static [u8],
}

impl Change {
    /// One in chunks. `trailers`: the sender announces some.
    pub fn new(rewriter: Rewriter, decoder: Option<Decoder>, trailers: bool) -> Change {
        Change {
            rewriter: Some(rewriter),
            decoder,
            more: false,
            ended: false,
            encoder: None,
            unflushed: false,
            chunks: true,
            trailers,
            last: b"",
        }
    }

    /// Changes the content in the buffer. What becomes of it is behind the head. `look` sees the content as it was received.
    pub fn run(
        &mut self,
        (from, body): (&mut Stream, &mut Body),
        (head, sent): (&mut Vec<u8>, &mut usize),
        mut look: impl FnMut(&[u8]) -> Result<(), Broken>,
    ) -> Result<(), Broken> {
        if *sent == head.len() {
            (*head, *sent) = (Vec::new(), 0);
        }
        while !self.is_over() && head.len() - *sent <= HELD_MAX {
            if self.more {
                self.decode(head).map_err(Broken::Bad)?;
                continue;
            }
            if body.is_done() {
                self.end(head).map_err(Broken::Bad)?;
                continue;
            }
            let rest = from.in_hand();
            if rest.is_empty() {
                return self.flush(head).map_err(Broken::Bad);
            }
            let rest = &rest[..rest.len().min(AT_ONCE)];
            let step = body.step(rest).map_err(Broken::Wrong)?;
            let _ = body.mended(); // our own framing is right
            if let Step::Content(n) = step {
                look(&rest[..n])?;
                self.read(&rest[..n], head).map_err(Broken::Bad)?;
            }
            from.consume(step.len());
            self.retire(body, head);
        }
        Ok(())
    }

    /// Whether the rest of the body is as it is.
    pub fn is_over(&self) -> bool {
        self.rewriter.is_none()
    }

    /// Whether there is more to write, without anything that has to come.
    pub fn has_more(&self) -> bool {
        self.more && !self.is_over()
    }

    /// Whether the rest will be as it is.
    pub fn is_limited(&self) -> bool {
        self.decoder.is_none() && self.rewriter.as_ref().is_none_or(Rewriter::is_limited)
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

    /// Reads content as it was received.
    fn read(&mut self, content: &[u8], out: &mut Vec<u8>) -> Result<(), BadContent> {
        match &mut self.decoder {
            Some(decoder) => {
                decoder.add(content);
                self.more = true;
                Ok(())
            }
            None => self.change(content, false, out),
        }
    }

    /// Takes the coding off the next bytes.
    fn decode(&mut self, out: &mut Vec<u8>) -> Result<(), BadContent> {
        let Some(decoder) = &mut self.decoder else { return Ok(()) };
        let mut piece = Vec::new();
        self.more = decoder.next(&mut piece)?;
        self.change(&piece, false, out)
    }

    /// Reads the end of the body.
    fn end(&mut self, out: &mut Vec<u8>) -> Result<(), BadContent> {
        if let Some(decoder) = self.decoder.as_mut().filter(|_| !self.ended) {
            decoder.end();
            (self.ended, self.more) = (true, true);
            return Ok(());
        }
        self.change(b"", true, out)?;
        self.rewriter = None;
        if let Some(encoder) = self.encoder.take() {
            let mut rest = Vec::new();
            encoder.end(&mut rest)?;
            self.write(&rest, out);
        }
        out.extend_from_slice(if self.chunks { LAST } else { b"" });
        Ok(())
    }

    fn change(&mut self, content: &[u8], end: bool, out: &mut Vec<u8>) -> Result<(), BadContent> {
        let Some(rewriter) = &mut self.rewriter else { return Ok(()) };
        let mut changed = Vec::new();
        rewriter.read(content, end, &mut changed);
        if let Some(encoder) = &mut self.encoder {
            self.unflushed |= !changed.is_empty();
            let mut coded = Vec::new();
            encoder.write(&changed, &mut coded)?;
            changed = coded;
        }
        self.write(&changed, out);
        Ok(())
    }

    /// Lets go of what waits for more: nothing has come yet.
    fn flush(&mut self, out: &mut Vec<u8>) -> Result<(), BadContent> {
        let mut coded = Vec::new();
        if let Some(encoder) = self.encoder.as_mut().filter(|_| std::mem::take(&mut self.unflushed)) {
            encoder.flush(&mut coded)?;
        }
        self.write(&coded, out);
        Ok(())
    }

    /// Leaves the rest of the body as it is, if nothing can change in it and the client's framing allows that here.
    fn retire(&mut self, body: &Body, out: &mut Vec<u8>) {
        if self.decoder.is_some() || !self.rewriter.as_ref().is_some_and(Rewriter::is_over) {
            return;
        }
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
    pub(super) fn change_of(&mut self, reply: &Response) -> Result<Option<(Content, Option<Change>)>, End> {
        let is_empty = reply.framing.is_empty() && self.request.method != "HEAD";
        let changes = &self.http.filter.changes;
        let (rewriter, coding) = match changes.wanted(reply) {
            Wanted::Denied(why) | Wanted::Unreadable(why) => {
                return Err(End::Fault(Fault::Denied(Denied::Unchanged(why)), 403));
            }
            Wanted::Whole if self.request.is_repeatable() && !self.whole => return Err(End::Whole),
            Wanted::Whole => {
                let why = "the server sends a part of what has to be changed as a whole";
                return Err(End::Fault(Fault::BadReply(why.into()), 502));
            }
            Wanted::Changes(rewriter, coding) if !is_empty => (rewriter, coding),
            Wanted::Unread => {
                self.down.unread = true;
                return Ok(None);
            }
            Wanted::Nothing | Wanted::Changes(..) => return Ok(None),
        };
        let accepted = |coding: &Coding| accepts(self.request.fields.all("accept-encoding"), coding.name());
        let again = coding.filter(|_| changes.encode).filter(accepted);
        let content = coding.map_or(Content::Changed, |_| Content::Recoded(again.map(Coding::name)));
        if reply.framing == Framing::None {
            return Ok(Some((content, None)));
        }
        let decoder = coding.map(|coding| Decoder::new(coding, changes.decoded)).transpose();
        let both = decoder.and_then(|decoder| Ok((decoder, again.map(Encoder::new).transpose()?)));
        let (decoder, encoder) = both.map_err(|why| self.bad_content(why))?;
        let change = Change {
            encoder,
            chunks: reply.framing_of_changed(self.request.version) == Framing::Chunked,
            ..Change::new(rewriter, decoder, reply.fields.all("trailer").next().is_some())
        };
        Ok(Some((content, Some(change))))
    }
}
