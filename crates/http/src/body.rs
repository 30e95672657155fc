//! Where a body ends (RFC 9112, 6.3).

use crate::{Chunked, Wrong};

/// How the body after a head is delimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// No body: the next message follows.
    None,
    /// A body of this many bytes.
    Exact(u64),
    /// A chunked body.
    Chunked,
    /// A body that ends when the connection does; replies only.
    UntilClose,
}

impl Framing {
    /// Whether the head says that there is no content: no body, or one of zero bytes, which mean the same.
    pub fn is_empty(self) -> bool {
        matches!(self, Framing::None | Framing::Exact(0))
    }
}

/// A parser for a body. It inspects bytes and changes none.
#[derive(Debug, Clone)]
pub enum Body {
    /// Bytes left.
    Exact(u64),
    /// Chunked.
    Chunked(Chunked),
    /// Until the connection ends; true if it has ended.
    UntilClose(bool),
}

/// The kind and number of the next bytes of a body; never zero bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Bytes of chunk framing or trailer fields.
    Framing(usize),
    /// Bytes of content.
    Content(usize),
}

impl Step {
    /// The number of bytes.
    pub fn len(self) -> usize {
        let (Step::Framing(n) | Step::Content(n)) = self;
        n
    }

    /// Always false.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

impl Body {
    /// Starts at the first byte of a body.
    pub fn new(framing: Framing) -> Body {
        match framing {
            Framing::None => Body::Exact(0),
            Framing::Exact(n) => Body::Exact(n),
            Framing::Chunked => Body::Chunked(Chunked::default()),
            Framing::UntilClose => Body::UntilClose(false),
        }
    }

    /// Starts a body of a reply that [`Response::lenient`](crate::Response::lenient)
    /// has parsed: errors in the chunk framing are corrected.
    pub fn lenient(framing: Framing) -> Body {
        match framing {
            Framing::Chunked => Body::Chunked(Chunked::lenient()),
            other => Body::new(other),
        }
    }

    /// The bytes to forward in place of those of the last [`Step::Framing`], if they had to be corrected.
    pub fn mended(&mut self) -> Option<Vec<u8>> {
        if let Body::Chunked(c) = self { c.mended() } else { None }
    }

    /// Whether the body has ended. The next byte belongs to the next message.
    pub fn is_done(&self) -> bool {
        match self {
            Body::Exact(left) => *left == 0,
            Body::Chunked(c) => c.is_done(),
            Body::UntilClose(ended) => *ended,
        }
    }

    /// Bytes of content that come next, regardless of their values; `None`: everything until the connection ends.
    pub fn ahead(&self) -> Option<u64> {
        match self {
            Body::Exact(left) => Some(*left),
            Body::Chunked(c) => Some(c.ahead()),
            Body::UntilClose(_) => None,
        }
    }

    /// Skips bytes of content that were forwarded without being inspected, at most as many as are [ahead](Body::ahead).
    pub fn passed(&mut self, bytes: u64) {
        match self {
            Body::Exact(left) => *left = left.saturating_sub(bytes),
            Body::Chunked(c) => c.passed(bytes),
            Body::UntilClose(_) => {}
        }
    }

    /// Classifies the first bytes of `input`, which must not be empty. Must not be called once the body is done.
    ///
    /// # Errors
    /// Invalid chunk framing. Nothing from the invalid byte on may be forwarded.
    pub fn step(&mut self, input: &[u8]) -> Result<Step, Wrong> {
        match self {
            Body::Exact(left) => {
                let n = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len());
                *left -= n as u64;
                Ok(Step::Content(n))
            }
            Body::Chunked(c) => c.step(input),
            Body::UntilClose(_) => Ok(Step::Content(input.len())),
        }
    }

    /// Notes the end of the connection.
    ///
    /// # Errors
    /// [`Wrong::Cut`] if the body was not complete.
    pub fn end_of_stream(&mut self) -> Result<(), Wrong> {
        match self {
            Body::UntilClose(ended) => *ended = true,
            _ if self.is_done() => {}
            _ => return Err(Wrong::Cut),
        }
        Ok(())
    }
}
