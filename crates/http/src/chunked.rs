//! The chunked transfer coding (RFC 9112, 7.1): says what each byte is, and changes none.
//!
//! Stricter than the grammar: no white space around the size, at most 16 digits, extensions of visible characters only.
//! They are passed on as they came, so what the next program could read differently must not be in them.

use crate::{
    FIELDS_MAX, Step, Wrong,
    fields::forbidden_in_trailers,
    scan::{Kind, Scan},
};

/// Bytes of chunk extensions in one body.
const EXTENSIONS_MAX: usize = 8 * 1024;
/// Hexadecimal digits of a size, leading zeros included.
const DIGITS_MAX: u8 = 16;

/// A chunked body of which the end has not been seen yet.
#[derive(Debug, Clone, Default)]
pub struct Chunked {
    state: State,
    extensions: usize,
}

#[derive(Debug, Clone)]
enum State {
    /// In the digits of a size.
    Size {
        digits: u8,
        size: u64,
    },
    /// In the extensions behind it.
    Extension {
        size: u64,
    },
    /// Behind the CR of the size line.
    SizeLf {
        size: u64,
    },
    /// So many bytes of the chunk are left.
    Content {
        left: u64,
    },
    /// Behind the content.
    Cr,
    /// Behind the CR that follows the content.
    Lf,
    /// Behind the last chunk.
    Trailers {
        seen: Vec<u8>,
        scan: Scan,
    },
    Done,
}

impl Default for State {
    fn default() -> State {
        State::Size { digits: 0, size: 0 }
    }
}

impl Chunked {
    /// Whether the final empty line was seen.
    pub fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Bytes of the chunk that come next.
    pub fn ahead(&self) -> u64 {
        if let State::Content { left } = self.state { left } else { 0 }
    }

    /// So many of them went by.
    pub fn passed(&mut self, bytes: u64) {
        if let State::Content { left } = &mut self.state {
            *left = left.saturating_sub(bytes);
            if *left == 0 {
                self.state = State::Cr;
            }
        }
    }

    /// What the first bytes of `input` are, which must not be empty.
    ///
    /// # Errors
    /// [`Wrong::ChunkSize`], [`Wrong::ChunkExtension`], [`Wrong::ChunkEnd`], and those of trailer fields.
    pub fn step(&mut self, input: &[u8]) -> Result<Step, Wrong> {
        if let State::Content { left } = &mut self.state {
            let n = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len());
            *left -= n as u64;
            if *left == 0 {
                self.state = State::Cr;
            }
            return Ok(Step::Content(n));
        }
        let mut n = 0;
        while n < input.len() && !matches!(self.state, State::Content { .. } | State::Done) {
            n += match &mut self.state {
                State::Trailers { seen, scan } => match trailers(seen, scan, &input[n..])? {
                    Some(used) => {
                        self.state = State::Done;
                        used
                    }
                    None => input.len() - n,
                },
                _ => {
                    self.byte(input[n])?;
                    1
                }
            };
        }
        Ok(Step::Framing(n))
    }

    /// A byte outside of content and trailers.
    fn byte(&mut self, b: u8) -> Result<(), Wrong> {
        self.state = match (&self.state, b) {
            (State::Size { digits, size }, _) if b.is_ascii_hexdigit() => {
                let digit = (b as char).to_digit(16).map_or(0, u64::from);
                if *digits == DIGITS_MAX || *size > (i64::MAX as u64) >> 4 {
                    return Err(Wrong::ChunkSize);
                }
                State::Size { digits: digits + 1, size: size << 4 | digit }
            }
            (State::Size { digits: 1.., size }, b'\r') => State::SizeLf { size: *size },
            (State::Size { digits: 1.., size }, b';') => State::Extension { size: *size },
            (State::Size { .. }, _) => return Err(Wrong::ChunkSize),
            (State::Extension { size }, b'\r') => State::SizeLf { size: *size },
            (State::Extension { size }, b'\t' | b' '..=b'~') => {
                self.extensions += 1;
                if self.extensions > EXTENSIONS_MAX {
                    return Err(Wrong::ChunkExtension);
                }
                State::Extension { size: *size }
            }
            (State::Extension { .. }, _) => return Err(Wrong::ChunkExtension),
            (State::SizeLf { size: 0 }, b'\n') => State::Trailers { seen: Vec::new(), scan: Scan::new(Kind::Trailers) },
            (State::SizeLf { size }, b'\n') => State::Content { left: *size },
            (State::Cr, b'\r') => State::Lf,
            (State::Lf, b'\n') => State::default(),
            (State::SizeLf { .. } | State::Cr | State::Lf, _) => return Err(Wrong::ChunkEnd),
            (State::Content { .. } | State::Trailers { .. } | State::Done, _) => return Ok(()),
        };
        Ok(())
    }
}

/// Bytes up to the end of the trailer section, if `input` has it.
fn trailers(seen: &mut Vec<u8>, scan: &mut Scan, input: &[u8]) -> Result<Option<usize>, Wrong> {
    let before = seen.len();
    seen.extend(input.iter().take(crate::TRAILERS_MAX + 1 - before.min(crate::TRAILERS_MAX)));
    let Some(end) = scan.feed(seen)? else { return Ok(None) };
    seen.truncate(end);
    let mut room = [httparse::EMPTY_HEADER; FIELDS_MAX];
    match httparse::parse_headers(seen, &mut room) {
        Ok(httparse::Status::Complete((used, fields)))
            if used == end && !fields.iter().any(|f| forbidden_in_trailers(f.name)) =>
        {
            Ok(Some(end - before))
        }
        _ => Err(Wrong::Trailer),
    }
}
