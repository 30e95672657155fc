//! The chunked transfer coding (RFC 9112, 7.1): classifies each byte and changes none.
//!
//! Stricter than the grammar: no white space around the size, at most 16 digits, extensions of visible characters only.
//! Extensions are forwarded unchanged, so they must not contain anything that the next program could read differently. From
//! servers, lines that end with a lone LF, zeros before a size and white space after it are accepted and corrected.

use crate::{
    FIELDS_MAX, Step, Wrong,
    fields::forbidden_in_trailers,
    mend::mend,
    scan::{Kind, Scan},
};

/// Maximum number of bytes of chunk extensions in one body.
const EXTENSIONS_MAX: usize = 8 * 1024;
/// Maximum number of leading zeros and trailing white space of a size, which are not forwarded.
const PADDING_MAX: u32 = 256;
/// Maximum number of hexadecimal digits of a size, leading zeros included.
const DIGITS_MAX: u8 = 16;

/// A parser for a chunked body.
#[derive(Debug, Clone, Default)]
pub struct Chunked {
    state: ChunkState,
    extensions: usize,
    /// Leading zeros and trailing white space of the current size.
    padding: u32,
    lenient: bool,
    /// The corrected form of the bytes of the last step.
    mended: Option<Vec<u8>>,
}

/// How a byte is forwarded.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Goes {
    On,
    Nowhere,
    BehindCr,
}

#[derive(Debug, Clone)]
enum ChunkState {
    /// In the digits of a size.
    Size {
        digits: u8,
        size: u64,
    },
    /// In the extensions after a size.
    Extension {
        size: u64,
    },
    /// In white space after a size.
    Space {
        size: u64,
    },
    /// After the CR of the size line.
    SizeLf {
        size: u64,
    },
    /// In the content of a chunk, with this many bytes left.
    Content {
        left: u64,
    },
    /// After the content.
    Cr,
    /// After the CR that follows the content.
    Lf,
    /// After the last chunk.
    Trailers {
        seen: Vec<u8>,
        scan: Scan,
    },
    Done,
}

impl Default for ChunkState {
    fn default() -> ChunkState {
        ChunkState::Size { digits: 0, size: 0 }
    }
}

impl Chunked {
    /// Starts a body from a server, whose harmless errors are corrected.
    pub fn lenient() -> Chunked {
        Chunked { lenient: true, ..Chunked::default() }
    }

    /// See [`Body::mended`](crate::Body::mended).
    pub fn mended(&mut self) -> Option<Vec<u8>> {
        self.mended.take()
    }

    /// Whether the final empty line has been seen.
    pub fn is_done(&self) -> bool {
        matches!(self.state, ChunkState::Done)
    }

    /// Bytes left of the current chunk.
    pub fn ahead(&self) -> u64 {
        if let ChunkState::Content { left } = self.state { left } else { 0 }
    }

    /// Skips bytes of the current chunk.
    pub fn passed(&mut self, bytes: u64) {
        if let ChunkState::Content { left } = &mut self.state {
            *left = left.saturating_sub(bytes);
            if *left == 0 {
                self.state = ChunkState::Cr;
            }
        }
    }

    /// Classifies the first bytes of `input`, which must not be empty.
    ///
    /// # Errors
    /// [`Wrong::ChunkSize`], [`Wrong::ChunkExtension`], [`Wrong::ChunkEnd`], and the errors of trailer fields.
    pub fn step(&mut self, input: &[u8]) -> Result<Step, Wrong> {
        if let ChunkState::Content { left } = &mut self.state {
            let n = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len());
            *left -= n as u64;
            if *left == 0 {
                self.state = ChunkState::Cr;
            }
            return Ok(Step::Content(n));
        }
        let mut n = 0;
        self.mended = None;
        while n < input.len() && !matches!(self.state, ChunkState::Content { .. } | ChunkState::Done) {
            if let ChunkState::Trailers { seen, scan } = &mut self.state {
                let came = &input[n..];
                let found = trailers(seen, scan, came, self.lenient)?;
                let used = found.as_ref().map_or(came.len(), |(used, _)| *used);
                let section = found.map(|(_, section)| section);
                // Corrected trailers are forwarded as a whole, when their end has come.
                if self.mended.is_some() || self.lenient && section.as_deref() != Some(&came[..used]) {
                    let mended = self.mended.get_or_insert_with(|| input[..n].to_vec());
                    mended.extend(section.iter().flatten());
                }
                if section.is_some() {
                    self.state = ChunkState::Done;
                }
                n += used;
                continue;
            }
            let goes = self.byte(input[n])?;
            if goes != Goes::On {
                self.mended.get_or_insert_with(|| input[..n].to_vec());
            }
            if let Some(mended) = &mut self.mended {
                mended.extend(match goes {
                    Goes::On => &input[n..=n],
                    Goes::Nowhere => &[],
                    Goes::BehindCr => b"\r\n",
                });
            }
            n += 1;
        }
        Ok(Step::Framing(n))
    }

    /// Classifies a byte outside of content and trailers.
    fn byte(&mut self, b: u8) -> Result<Goes, Wrong> {
        let mut goes = Goes::On;
        self.state = match (&self.state, b) {
            (ChunkState::Size { digits: 1.., size: 0 }, b'0') if self.lenient => {
                goes = self.pad()?;
                ChunkState::Size { digits: 1, size: 0 }
            }
            (ChunkState::Size { digits: 1.., size } | ChunkState::Space { size }, b' ' | b'\t') if self.lenient => {
                let size = *size;
                goes = self.pad()?;
                ChunkState::Space { size }
            }
            (
                ChunkState::Space { size } | ChunkState::Size { digits: 1.., size } | ChunkState::Extension { size },
                b'\n',
            ) if self.lenient => {
                goes = Goes::BehindCr;
                self.behind_size(*size)
            }
            (ChunkState::Cr, b'\n') if self.lenient => {
                goes = Goes::BehindCr;
                ChunkState::default()
            }
            (ChunkState::Space { size }, b'\r') => ChunkState::SizeLf { size: *size },
            (ChunkState::Space { size }, b';') => ChunkState::Extension { size: *size },
            (ChunkState::Size { digits, size }, _) if b.is_ascii_hexdigit() => {
                let digit = (b as char).to_digit(16).map_or(0, u64::from);
                if *digits == DIGITS_MAX || *size > (i64::MAX as u64) >> 4 {
                    return Err(Wrong::ChunkSize);
                }
                ChunkState::Size { digits: digits + 1, size: size << 4 | digit }
            }
            (ChunkState::Size { digits: 1.., size }, b'\r') => ChunkState::SizeLf { size: *size },
            (ChunkState::Size { digits: 1.., size }, b';') => ChunkState::Extension { size: *size },
            (ChunkState::Size { .. } | ChunkState::Space { .. }, _) => return Err(Wrong::ChunkSize),
            (ChunkState::Extension { size }, b'\r') => ChunkState::SizeLf { size: *size },
            (ChunkState::Extension { size }, b'\t' | b' '..=b'~') => {
                self.extensions += 1;
                if self.extensions > EXTENSIONS_MAX {
                    return Err(Wrong::ChunkExtension);
                }
                ChunkState::Extension { size: *size }
            }
            (ChunkState::Extension { .. }, _) => return Err(Wrong::ChunkExtension),
            (ChunkState::SizeLf { size }, b'\n') => self.behind_size(*size),
            (ChunkState::Cr, b'\r') => ChunkState::Lf,
            (ChunkState::Lf, b'\n') => ChunkState::default(),
            (ChunkState::SizeLf { .. } | ChunkState::Cr | ChunkState::Lf, _) => return Err(Wrong::ChunkEnd),
            (ChunkState::Content { .. } | ChunkState::Trailers { .. } | ChunkState::Done, _) => return Ok(goes),
        };
        Ok(goes)
    }

    /// Counts a byte of padding: a leading zero or white space.
    fn pad(&mut self) -> Result<Goes, Wrong> {
        self.padding += 1;
        if self.padding > PADDING_MAX { Err(Wrong::ChunkSize) } else { Ok(Goes::Nowhere) }
    }

    fn behind_size(&mut self, size: u64) -> ChunkState {
        self.padding = 0;
        let scan = if self.lenient { Scan::lenient } else { Scan::new };
        match size {
            0 => ChunkState::Trailers { seen: Vec::new(), scan: scan(Kind::Trailers) },
            left => ChunkState::Content { left },
        }
    }
}

/// Returns the number of bytes of `input` up to the end of the trailer
/// section, if `input` reaches it, and the section, corrected if need be.
fn trailers(
    seen: &mut Vec<u8>,
    scan: &mut Scan,
    input: &[u8],
    lenient: bool,
) -> Result<Option<(usize, Vec<u8>)>, Wrong> {
    let before = seen.len();
    seen.extend(input.iter().take(crate::TRAILERS_MAX + 1 - before.min(crate::TRAILERS_MAX)));
    let Some(end) = scan.feed(seen)? else { return Ok(None) };
    let section = if lenient { mend(&seen[..end], false) } else { seen[..end].to_vec() };
    let mut room = [httparse::EMPTY_HEADER; FIELDS_MAX];
    match httparse::parse_headers(&section, &mut room) {
        Ok(httparse::Status::Complete((used, fields)))
            if used == section.len() && !fields.iter().any(|f| forbidden_in_trailers(f.name)) =>
        {
            Ok(Some((end - before, section)))
        }
        _ => Err(Wrong::Trailer),
    }
}
