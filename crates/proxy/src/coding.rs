//! Codings of content (RFC 9110, 8.4.1), taken off and put on piece by piece, without I/O. The result does not depend on how the
//! content is cut.
//!
//! What a few bytes become is limited ([`Expansion`]): by all that may come of one body, and by how much more that is than what was
//! read. So the work that received bytes can cause is bounded, and so is memory: a window of 8 MB for zstd (RFC 9659), 16 MB for br,
//! 32 KB for the others, of which decoders together get no more than [`Windows`] has. Who finds none is told so at the beginning.

use flate2::{
    Compression,
    bufread::{DeflateDecoder, MultiGzDecoder, ZlibDecoder},
    write::{GzEncoder, ZlibEncoder},
};
use std::{
    io::{self, BufRead, Read, Write},
    sync::atomic::{AtomicU64, Ordering},
};

/// Number of bytes that are decoded at a time: in a change, each may become as long as what replaces it.
const PIECE: usize = 4096;
/// What a body may become however short it was: a page of empty lines is no attack.
const FREE: u64 = 1 << 20;
/// Base-2 logarithm of the longest window of zstd: RFC 9659 allows no longer one.
const ZSTD_WINDOW: u32 = 23;
/// All windows that are in use: those of 48 bodies of br that have the longest one, or 192 with the usual one; and a quarter more.
static WINDOWS: Windows = Windows { used: AtomicU64::new(0), most: 1 << 30 };
/// Levels of compression that keep up with a network, and windows that many bodies at once have memory for.
const GZIP_LEVEL: u32 = 4;
const BROTLI_LEVEL: u32 = 4;
const BROTLI_WINDOW: u32 = 18;
const ZSTD_LEVEL: i32 = 1;

/// A coding that can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// RFC 1952.
    Gzip,
    /// RFC 1950. Some servers leave its head out, and browsers read that, too.
    Deflate,
    /// RFC 7932.
    Brotli,
    /// RFC 8878.
    Zstd,
}

/// How much may come of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expansion {
    /// Most bytes.
    pub size: u64,
    /// Most bytes for each one that was read, from a megabyte on.
    pub ratio: u32,
}

impl Default for Expansion {
    fn default() -> Expansion {
        // No page has so much text; text is seldom compressed to less than a hundredth.
        Expansion { size: 100 << 20, ratio: 100 }
    }
}

/// Why content cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadContent {
    /// It has a coding that is not known, or several, or is a part of coded content.
    #[error("the content has a coding that cannot be taken off")]
    Unknown,
    /// It is damaged or incomplete, or needs a window that is too large.
    #[error("the content is not what its Content-Encoding says")]
    Corrupt,
    /// It becomes too long.
    #[error("the content is too long without its Content-Encoding")]
    TooLong,
    /// It becomes too much longer.
    #[error("the content becomes too much without its Content-Encoding")]
    Bomb,
    /// Others take the memory that it needs.
    #[error("too many contents are read without their Content-Encoding at once")]
    Memory,
}

impl Coding {
    /// Returns the coding of a content by the values of its Content-Encoding: none, or one.
    pub fn of<'a>(values: impl Iterator<Item = &'a [u8]>) -> Result<Option<Coding>, BadContent> {
        let values: Vec<String> = values.map(|value| String::from_utf8_lossy(value).to_ascii_lowercase()).collect();
        let names = values.iter().flat_map(|value| value.split(',')).map(str::trim);
        let mut names = names.filter(|name| !matches!(*name, "" | "identity"));
        match (names.next(), names.next()) {
            (None, _) => Ok(None),
            (Some(name), None) => Coding::named(name).map(Some).ok_or(BadContent::Unknown),
            (Some(_), Some(_)) => Err(BadContent::Unknown),
        }
    }

    fn named(name: &str) -> Option<Coding> {
        match name {
            "gzip" | "x-gzip" => Some(Coding::Gzip),
            "deflate" => Some(Coding::Deflate),
            "br" => Some(Coding::Brotli),
            "zstd" => Some(Coding::Zstd),
            _ => None,
        }
    }

    /// What an encoder takes at its level, rather too much than too little.
    fn encoder(self) -> u64 {
        match self {
            Coding::Gzip | Coding::Deflate => 256 << 10,
            Coding::Brotli | Coding::Zstd => 3 << 20,
        }
    }

    /// The longest window of a decoder.
    fn window(self) -> u64 {
        match self {
            Coding::Gzip | Coding::Deflate => 32 << 10,
            Coding::Brotli => 16 << 20,
            Coding::Zstd => 1 << ZSTD_WINDOW,
        }
    }

    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Coding::Gzip => "gzip",
            Coding::Deflate => "deflate",
            Coding::Brotli => "br",
            Coding::Zstd => "zstd",
        }
    }
}

/// The memory that windows of decoders, and encoders, take together. Windows have their whole length from the beginning: nobody
/// has got anything yet if there is no memory. That of zstd, of which most bodies need little, is as large as what was made, up to
/// its length. So a quarter is kept for bodies that have begun.
struct Windows {
    used: AtomicU64,
    most: u64,
}

/// The window of one decoder, or what an encoder takes.
struct Window {
    of: &'static Windows,
    length: u64,
    used: u64,
}

impl Windows {
    /// Begins a window of this length, of which so much is taken at once.
    fn begin(&'static self, length: u64, at_once: u64) -> Result<Window, BadContent> {
        let mut window = Window { of: self, length, used: 0 };
        if window.take(at_once) > self.most - self.most / 4 {
            return Err(BadContent::Memory);
        }
        Ok(window)
    }
}

impl Window {
    /// Takes so much more. Returns how much all take then.
    fn take(&mut self, more: u64) -> u64 {
        self.used += more;
        self.of.used.fetch_add(more, Ordering::Relaxed) + more
    }

    /// Whether there is memory for so much content.
    fn holds(&mut self, made: u64) -> bool {
        let more = made.min(self.length).saturating_sub(self.used);
        more == 0 || self.take(more) <= self.of.most
    }

    /// Gives back what is not needed.
    fn shorten(&mut self, length: u64) {
        self.length = length;
        let spare = self.used.saturating_sub(length);
        self.used -= spare;
        self.of.used.fetch_sub(spare, Ordering::Relaxed);
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.of.used.fetch_sub(self.used, Ordering::Relaxed);
    }
}

/// Bytes that were received and not read yet.
#[derive(Debug, Default)]
struct Input {
    bytes: Vec<u8>,
    at: usize,
    ended: bool,
}

impl Input {
    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }
}

impl BufRead for Input {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.left() == 0 && !self.ended {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(&self.bytes[self.at..])
    }

    fn consume(&mut self, n: usize) {
        self.at += n;
        if self.left() == 0 {
            (self.bytes, self.at) = (Vec::new(), 0);
        }
    }
}

impl Read for Input {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.fill_buf()?.read(out)?;
        self.consume(n);
        Ok(n)
    }
}

enum Source {
    /// Deflate, whose first two bytes are not known yet.
    Undecided(Input),
    Gzip(MultiGzDecoder<Input>),
    Zlib(ZlibDecoder<Input>),
    Deflate(DeflateDecoder<Input>),
    Brotli(Box<brotli::Decompressor<Input>>),
    Zstd(zstd::stream::read::Decoder<'static, Input>),
    Failed(BadContent),
}

/// Takes the coding off one body.
pub struct Decoder {
    source: Source,
    most: Expansion,
    window: Window,
    read: u64,
    made: u64,
    over: bool,
}

impl std::fmt::Debug for Decoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decoder").field("read", &self.read).field("made", &self.made).finish_non_exhaustive()
    }
}

impl Decoder {
    /// Starts at the first byte. Fails if there is no memory.
    pub fn new(coding: Coding, most: Expansion) -> Result<Decoder, BadContent> {
        Decoder::within(&WINDOWS, coding, most)
    }

    fn within(of: &'static Windows, coding: Coding, most: Expansion) -> Result<Decoder, BadContent> {
        let length = coding.window();
        let window = of.begin(length, if coding == Coding::Zstd { 0 } else { length })?;
        let input = Input::default();
        let source = match coding {
            Coding::Gzip => Source::Gzip(MultiGzDecoder::new(input)),
            Coding::Deflate => Source::Undecided(input),
            Coding::Brotli => Source::Brotli(Box::new(brotli::Decompressor::new(input, 4096))),
            Coding::Zstd => zstd::stream::read::Decoder::with_buffer(input)
                .and_then(|mut decoder| decoder.window_log_max(ZSTD_WINDOW).map(|()| decoder))
                .map(Source::Zstd)
                .map_err(|_| BadContent::Memory)?,
        };
        Ok(Decoder { source, most, window, read: 0, made: 0, over: false })
    }

    /// Adds received bytes, all of which [`Decoder::next`] has to read before the next ones.
    pub fn add(&mut self, coded: &[u8]) {
        if let (0, Source::Brotli(_), Some(first)) = (self.read, &self.source, coded.first()) {
            match brotli_window(*first) {
                Some(length) => self.window.shorten(length),
                None => self.source = Source::Failed(BadContent::Corrupt),
            }
        }
        self.read += coded.len() as u64;
        if let Some(input) = self.input() {
            input.bytes.extend_from_slice(coded);
        }
    }

    /// No more bytes follow.
    pub fn end(&mut self) {
        if let Some(input) = self.input() {
            input.ended = true;
        }
        self.over |= self.read == 0; // an empty body has no coding
    }

    /// Appends the next decoded bytes. False: there are no more, or not yet.
    pub fn next(&mut self, out: &mut Vec<u8>) -> Result<bool, BadContent> {
        if self.over {
            // behind the end, there is nothing
            return if self.input().is_some_and(|input| input.left() > 0) {
                Err(BadContent::Corrupt)
            } else {
                Ok(false)
            };
        }
        self.decide();
        let from = out.len();
        out.resize(from + PIECE, 0);
        let piece = &mut out[from..];
        let read = match &mut self.source {
            Source::Undecided(_) => Err(io::ErrorKind::WouldBlock.into()),
            Source::Gzip(source) => source.read(piece),
            Source::Zlib(source) => source.read(piece),
            Source::Deflate(source) => source.read(piece),
            Source::Brotli(source) => source.read(piece),
            Source::Zstd(source) => source.read(piece),
            Source::Failed(why) => {
                out.truncate(from);
                return Err(*why);
            }
        };
        out.truncate(from + read.as_ref().map_or(0, |n| *n));
        let failed = match read {
            Ok(0) => {
                self.over = true;
                // it says only the second time that more has come than it has used
                let again = if let Source::Brotli(source) = &mut self.source { source.read(&mut [0]) } else { Ok(0) };
                let more = again.is_err() || self.input().is_some_and(|input| input.left() > 0);
                more.then_some(BadContent::Corrupt)
            }
            Ok(n) => {
                self.made += n as u64;
                let ratio = FREE.max(self.read.saturating_mul(self.most.ratio.into()));
                let too_long = (self.made > self.most.size).then_some(BadContent::TooLong);
                let too_much = too_long.or((self.made > ratio).then_some(BadContent::Bomb));
                too_much.or((!self.window.holds(self.made)).then_some(BadContent::Memory))
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(_) => Some(BadContent::Corrupt),
        };
        match failed {
            Some(why) => {
                out.truncate(from);
                (self.source, self.over) = (Source::Failed(why), false);
                Err(why)
            }
            None => Ok(!self.over),
        }
    }

    /// Whether deflate has the head of RFC 1950.
    fn decide(&mut self) {
        let Source::Undecided(input) = &mut self.source else { return };
        if input.left() < 2 && !input.ended {
            return;
        }
        let head = [0, 1].map(|n| u16::from(input.bytes.get(n).copied().unwrap_or(0)));
        let input = std::mem::take(input);
        let is_zlib = head[0] & 0xf == 8 && (head[0] << 8 | head[1]).is_multiple_of(31);
        self.source = match is_zlib {
            true => Source::Zlib(ZlibDecoder::new(input)),
            false => Source::Deflate(DeflateDecoder::new(input)),
        };
    }

    fn input(&mut self) -> Option<&mut Input> {
        match &mut self.source {
            Source::Undecided(input) => Some(input),
            Source::Gzip(source) => Some(source.get_mut()),
            Source::Zlib(source) => Some(source.get_mut()),
            Source::Deflate(source) => Some(source.get_mut()),
            Source::Brotli(source) => Some(source.get_mut()),
            Source::Zstd(source) => Some(source.get_mut()),
            Source::Failed(_) => None,
        }
    }
}

/// Returns the length of the window by the first byte of a stream (RFC 7932, 9.1). None: it has no such one. The decoder would take
/// that for a sign of "large windows", of up to 1 GB, which are no part of the coding.
fn brotli_window(first: u8) -> Option<u64> {
    let bits = match (first & 1, first >> 1 & 7, first >> 4 & 7) {
        (0, ..) => 16,
        (_, 0, 0) => 17,
        (_, 0, 1) => return None,
        (_, 0, more) => 8 + more,
        (_, more, _) => 17 + more,
    };
    Some(1 << bits)
}

/// Puts a coding on one body.
pub struct Encoder {
    kind: Kind,
    _memory: Window,
}

enum Kind {
    Gzip(GzEncoder<Vec<u8>>),
    Deflate(ZlibEncoder<Vec<u8>>),
    Brotli(Box<brotli::CompressorWriter<Vec<u8>>>),
    Zstd(zstd::stream::write::Encoder<'static, Vec<u8>>),
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Encoder")
    }
}

impl Encoder {
    /// Starts at the first byte.
    pub fn new(coding: Coding) -> Result<Encoder, BadContent> {
        let memory = WINDOWS.begin(coding.encoder(), coding.encoder())?;
        let level = Compression::new(GZIP_LEVEL);
        let kind = match coding {
            Coding::Gzip => Kind::Gzip(GzEncoder::new(Vec::new(), level)),
            Coding::Deflate => Kind::Deflate(ZlibEncoder::new(Vec::new(), level)),
            Coding::Brotli => {
                Kind::Brotli(Box::new(brotli::CompressorWriter::new(Vec::new(), 4096, BROTLI_LEVEL, BROTLI_WINDOW)))
            }
            Coding::Zstd => {
                let encoder = zstd::stream::write::Encoder::new(Vec::new(), ZSTD_LEVEL);
                Kind::Zstd(encoder.map_err(|_| BadContent::Memory)?)
            }
        };
        Ok(Encoder { kind, _memory: memory })
    }

    /// Reads the next bytes, and appends what is ready.
    pub fn write(&mut self, content: &[u8], out: &mut Vec<u8>) -> Result<(), BadContent> {
        self.with(out, |to| to.write_all(content))
    }

    /// Appends all that was read so far, so that a client need not wait for it.
    pub fn flush(&mut self, out: &mut Vec<u8>) -> Result<(), BadContent> {
        self.with(out, |to| to.flush())
    }

    /// Appends the rest.
    pub fn end(self, out: &mut Vec<u8>) -> Result<(), BadContent> {
        let rest = match self.kind {
            Kind::Gzip(encoder) => encoder.finish(),
            Kind::Deflate(encoder) => encoder.finish(),
            Kind::Brotli(encoder) => Ok(encoder.into_inner()),
            Kind::Zstd(encoder) => encoder.finish(),
        };
        out.append(&mut rest.map_err(|_| BadContent::Memory)?);
        Ok(())
    }

    fn with(
        &mut self,
        out: &mut Vec<u8>,
        what: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), BadContent> {
        let (done, made) = match &mut self.kind {
            Kind::Gzip(encoder) => (what(encoder), encoder.get_mut()),
            Kind::Deflate(encoder) => (what(encoder), encoder.get_mut()),
            Kind::Brotli(encoder) => (what(encoder), encoder.get_mut()),
            Kind::Zstd(encoder) => (what(encoder), encoder.get_mut()),
        };
        out.append(made);
        done.map_err(|_| BadContent::Memory)
    }
}

#[cfg(test)]
#[path = "coding_tests.rs"]
mod tests;
