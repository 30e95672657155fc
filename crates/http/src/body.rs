//! Where a body ends (RFC 9112, 6.3).

use crate::{Chunked, Wrong};

/// What follows a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// Nothing: the next message.
    None,
    /// So many bytes.
    Exact(u64),
    /// Chunks.
    Chunked,
    /// All until the connection ends; replies only.
    UntilClose,
}

/// A body of which the end has not been seen yet. It looks at bytes, and changes none.
#[derive(Debug, Clone)]
pub enum Body {
    /// So many bytes are left.
    Exact(u64),
    /// Chunks.
    Chunked(Chunked),
    /// Ends with the connection; true: it has ended.
    UntilClose(bool),
}

/// What the next bytes of a body are; never none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// So many bytes say where chunks begin and end, or are trailer fields.
    Framing(usize),
    /// So many bytes are content.
    Content(usize),
}

impl Step {
    /// How many bytes.
    pub fn len(self) -> usize {
        let (Step::Framing(n) | Step::Content(n)) = self;
        n
    }

    /// It never is.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

impl Body {
    /// At its first byte.
    pub fn new(framing: Framing) -> Body {
        match framing {
            Framing::None => Body::Exact(0),
            Framing::Exact(n) => Body::Exact(n),
            Framing::Chunked => Body::Chunked(Chunked::default()),
            Framing::UntilClose => Body::UntilClose(false),
        }
    }

    /// The same, of a reply that [`Response::lenient`](crate::Response::lenient) has read: chunks are mended.
    pub fn lenient(framing: Framing) -> Body {
        match framing {
            Framing::Chunked => Body::Chunked(Chunked::lenient()),
            other => Body::new(other),
        }
    }

    /// What the bytes of the last [`Step::Framing`] are to be passed on as, if not as they are.
    pub fn mended(&mut self) -> Option<Vec<u8>> {
        if let Body::Chunked(c) = self { c.mended() } else { None }
    }

    /// Whether the last byte was seen: what comes next belongs to the next message.
    pub fn is_done(&self) -> bool {
        match self {
            Body::Exact(left) => *left == 0,
            Body::Chunked(c) => c.is_done(),
            Body::UntilClose(ended) => *ended,
        }
    }

    /// Bytes of content that come next, whatever they are; `None`: all until the connection ends.
    pub fn ahead(&self) -> Option<u64> {
        match self {
            Body::Exact(left) => Some(*left),
            Body::Chunked(c) => Some(c.ahead()),
            Body::UntilClose(_) => None,
        }
    }

    /// So many bytes of content went by unseen, no more than are [ahead](Body::ahead).
    pub fn passed(&mut self, bytes: u64) {
        match self {
            Body::Exact(left) => *left = left.saturating_sub(bytes),
            Body::Chunked(c) => c.passed(bytes),
            Body::UntilClose(_) => {}
        }
    }

    /// What the first bytes of `input` are, which must not be empty; only while the body is not done.
    ///
    /// # Errors
    /// Chunks that are none. Nothing from the wrong byte on may be passed on.
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

    /// The connection has ended.
    ///
    /// # Errors
    /// [`Wrong::Cut`], if the body should have gone on.
    pub fn end_of_stream(&mut self) -> Result<(), Wrong> {
        match self {
            Body::UntilClose(ended) => *ended = true,
            _ if self.is_done() => {}
            _ => return Err(Wrong::Cut),
        }
        Ok(())
    }
}
