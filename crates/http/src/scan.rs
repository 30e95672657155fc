//! Finds the end of a head in the order in which bytes arrive, and refuses on the way what no line may contain.

use crate::{HEAD_MAX, LINE_MAX, REPLY_HEAD_MAX, TRAILERS_MAX, Wrong};

/// What is scanned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A request: one empty line before it is forgiven (RFC 9112, 2.2).
    Request,
    /// A reply.
    Response,
    /// The trailer section of a chunked body, which may be its final empty line alone.
    Trailers,
}

/// A head whose end has not come yet. Every byte is looked at once, however it arrives.
#[derive(Debug, Clone)]
pub struct Scan {
    kind: Kind,
    /// What can be mended is let through.
    lenient: bool,
    /// Bytes looked at.
    at: usize,
    /// Where the line of `at` begins.
    line: usize,
    /// Lines with something in them so far.
    lines: usize,
    /// Empty lines before them.
    empty: usize,
}

impl Scan {
    /// At the first byte of a message.
    pub fn new(kind: Kind) -> Scan {
        Scan { kind, lenient: false, at: 0, line: 0, lines: 0, empty: 0 }
    }

    /// The same, of a server's message that [`Response::lenient`](crate::Response::lenient) is to read: lines may end with LF
    /// alone, go on in the next one, and have control characters; one empty line before it is forgiven.
    pub fn lenient(kind: Kind) -> Scan {
        Scan { lenient: true, ..Scan::new(kind) }
    }

    /// The length of the head, once it is there. `input` is everything since the first byte of the message, what was given
    /// before included.
    ///
    /// # Errors
    /// The first byte, in their order, that cannot belong to a head.
    pub fn feed(&mut self, input: &[u8]) -> Result<Option<usize>, Wrong> {
        while let Some(&byte) = input.get(self.at) {
            if self.at >= self.most() {
                return Err(if self.kind == Kind::Trailers { Wrong::Trailer } else { Wrong::HeadTooLong });
            }
            if self.lines == 0 && self.at - self.line >= LINE_MAX {
                return Err(Wrong::LineTooLong);
            }
            let plain = self.plain(input);
            if plain > 0 {
                self.at += plain;
                continue;
            }
            let after_cr = self.at > self.line && input[self.at - 1] == b'\r';
            let first = self.at == self.line;
            self.at += 1;
            match byte {
                b'\n' if !after_cr && !self.lenient => return Err(Wrong::BareLf),
                b'\n' => {
                    let empty = self.at - self.line == 1 + usize::from(after_cr);
                    self.line = self.at;
                    if !empty {
                        self.lines += 1;
                    } else if self.lines > 0 || self.kind == Kind::Trailers {
                        return Ok(Some(self.at));
                    } else {
                        self.empty += 1;
                        if self.kind == Kind::Response && !self.lenient || self.empty > 1 {
                            return Err(Wrong::EmptyLines);
                        }
                    }
                }
                // a start line, or what is to be none, goes on nowhere (RFC 9112, 2.2)
                b' ' | b'\t' if first && !(self.lenient && self.fields() > 0) => return Err(Wrong::Fold),
                _ if self.lenient => {}
                _ if after_cr => return Err(Wrong::BareCr),
                b'\r' => {}
                b'\t' => {}
                0..=0x1f | 0x7f => return Err(Wrong::Control),
                _ => {}
            }
        }
        Ok(None)
    }

    /// So many bytes in the midst of a line say nothing about where it ends, and are allowed there: most of a head.
    fn plain(&self, input: &[u8]) -> usize {
        if self.at == self.line || input[self.at - 1] == b'\r' {
            return 0;
        }
        let line = if self.lines == 0 { self.line + LINE_MAX } else { usize::MAX };
        let end = self.most().min(line).min(input.len());
        let plain = |b: &&u8| matches!(**b, b' '..=b'~' | 0x80..);
        input[self.at..end].iter().take_while(plain).count()
    }

    /// Lines that were fields so far.
    fn fields(&self) -> usize {
        if self.kind == Kind::Trailers { self.lines } else { self.lines.saturating_sub(1) }
    }

    fn most(&self) -> usize {
        match self.kind {
            Kind::Request => HEAD_MAX,
            Kind::Response => REPLY_HEAD_MAX,
            Kind::Trailers => TRAILERS_MAX,
        }
    }

    /// Whether anything of the message has come, an empty line before it not counted.
    pub fn has_begun(&self) -> bool {
        self.lines > 0 || self.at > self.line
    }
}
