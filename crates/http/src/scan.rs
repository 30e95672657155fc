//! Finds the end of a head as bytes arrive, and refuses bytes on the way that no line may contain.

use crate::{HEAD_MAX, LINE_MAX, REPLY_HEAD_MAX, TRAILERS_MAX, Wrong};

/// The part of a message to scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A request: one empty line before it is accepted (RFC 9112, 2.2).
    Request,
    /// A reply.
    Response,
    /// The trailer section of a chunked body, which may consist of the final empty line alone.
    Trailers,
}

/// A scanner for the end of a head. It looks at every byte once, however the bytes are divided.
#[derive(Debug, Clone)]
pub struct Scan {
    kind: Kind,
    /// Accept errors that can be corrected.
    lenient: bool,
    /// Bytes scanned.
    at: usize,
    /// Where the current line begins.
    line: usize,
    /// Non-empty lines so far.
    lines: usize,
    /// Empty lines before them.
    empty: usize,
}

impl Scan {
    /// Starts at the first byte of a message.
    pub fn new(kind: Kind) -> Scan {
        Scan { kind, lenient: false, at: 0, line: 0, lines: 0, empty: 0 }
    }

    /// Starts a message from a server that [`Response::lenient`](crate::Response::lenient) is to parse: lines may end with a
    /// lone LF, be folded, and contain control characters; one empty line before the message is accepted.
    pub fn lenient(kind: Kind) -> Scan {
        Scan { lenient: true, ..Scan::new(kind) }
    }

    /// Returns the length of the head once it is complete. `input` is everything
    /// since the first byte of the message, including bytes passed in earlier calls.
    ///
    /// # Errors
    /// The error of the first byte that cannot belong to a head.
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
                // even lenient parsing needs a field to continue: a start line cannot be folded (RFC 9112, 2.2)
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

    /// The number of ordinary bytes ahead in the middle of a line, which need no further check: most of a head.
    fn plain(&self, input: &[u8]) -> usize {
        if self.at == self.line || input[self.at - 1] == b'\r' {
            return 0;
        }
        let line = if self.lines == 0 { self.line + LINE_MAX } else { usize::MAX };
        let end = self.most().min(line).min(input.len());
        let plain = |b: &&u8| matches!(**b, b' '..=b'~' | 0x80..);
        input[self.at..end].iter().take_while(plain).count()
    }

    /// The number of field lines so far.
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

    /// Whether the message has begun. An empty line before it does not count.
    pub fn has_begun(&self) -> bool {
        self.lines > 0 || self.at > self.line
    }
}
