//! The fields of a head, and which of them concern one connection only.

use crate::{Framing, Version, Wrong};

/// Fields that are never forwarded (RFC 9110, 7.6.1), or are written from the parsed values.
pub(crate) const OWN: [&str; 13] = [
    "connection",
    "content-length",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authentication-info",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Fields that are about the very bytes of a body: a validator of other bytes would poison caches, and a digest would not match
/// (RFC 9110, 8.8 and 14.3; RFC 9530; RFC 3230; RFC 1864).
pub(crate) const ABOUT_BYTES: [&str; 7] =
    ["accept-ranges", "content-digest", "content-md5", "digest", "etag", "last-modified", "repr-digest"];

/// Fields that say how a body is to be read: a filter must not read it in another way than its server.
pub(crate) const OF_CONTENT: [&str; 3] = ["content-encoding", "content-range", "content-type"];

/// Names and values in their original order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fields {
    text: Vec<u8>,
    /// End offsets of each name and value in `text`.
    ends: Vec<(u32, u32)>,
}

impl Fields {
    pub(crate) fn new(headers: &[httparse::Header<'_>]) -> Fields {
        let length = headers.iter().map(|h| h.name.len() + h.value.len()).sum();
        let mut fields = Fields { text: Vec::with_capacity(length), ends: Vec::with_capacity(headers.len()) };
        for header in headers {
            fields.text.extend(header.name.as_bytes());
            let name = fields.text.len() as u32; // at most HEAD_MAX
            fields.text.extend(header.value.trim_ascii());
            fields.ends.push((name, fields.text.len() as u32));
        }
        fields
    }

    /// All fields: the name as written, the value without surrounding white space.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.raw().map(named)
    }

    /// The fields to forward, with names as text.
    pub(crate) fn plain<'a>(&'a self, hop: &'a [String]) -> impl Iterator<Item = (&'a str, &'a [u8])> {
        self.end_to_end(hop).map(named)
    }

    fn raw(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let mut start = 0;
        self.ends.iter().map(move |(name, value)| {
            let (name, value) = (*name as usize, *value as usize);
            (&self.text[std::mem::replace(&mut start, value)..name], &self.text[name..value])
        })
    }

    /// The values of all fields with this name, which is compared without regard to case.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.raw().filter(move |(n, _)| n.eq_ignore_ascii_case(name.as_bytes())).map(|(_, value)| value)
    }

    /// The values of the cookies of this name, in order (RFC 6265, 5.4).
    pub fn cookies<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        let pairs = self.all("cookie").flat_map(|line| line.split(|b| *b == b';'));
        pairs.filter_map(move |pair| pair.trim_ascii().strip_prefix(name.as_bytes())?.strip_prefix(b"="))
    }

    /// The only value of this field; an error if there are several.
    pub(crate) fn one<'a>(&'a self, name: &'a str, several: Wrong) -> Result<Option<&'a [u8]>, Wrong> {
        let mut all = self.all(name);
        match (all.next(), all.next()) {
            (value, None) => Ok(value),
            (_, Some(_)) => Err(several),
        }
    }

    /// The fields that are forwarded unchanged: those neither about this connection nor named by `Connection`.
    pub(crate) fn end_to_end<'a>(&'a self, hop: &'a [String]) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        self.raw().filter(|(name, _)| {
            let is = |other: &str| name.eq_ignore_ascii_case(other.as_bytes());
            !OWN.iter().any(|o| is(o)) && !hop.iter().any(|h| is(h))
        })
    }

    /// The values of all fields with this name that are forwarded.
    pub(crate) fn passed_on<'a>(&'a self, hop: &'a [String], name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.end_to_end(hop).filter(move |(n, _)| n.eq_ignore_ascii_case(name.as_bytes())).map(|(_, value)| value)
    }

    /// The options of `Connection`, in lower case (RFC 9110, 7.6.1).
    pub(crate) fn connection(&self) -> Result<Vec<String>, Wrong> {
        let mut options = Vec::new();
        for value in self.all("connection") {
            for option in value.split(|b| *b == b',').map(<[u8]>::trim_ascii).filter(|o| !o.is_empty()) {
                if !option.iter().all(|b| is_token(*b)) {
                    return Err(Wrong::Connection);
                }
                options.push(String::from_utf8_lossy(option).to_ascii_lowercase());
            }
        }
        Ok(options)
    }

    /// The framing according to Content-Length and Transfer-Encoding (RFC 9112, 6.3); `None` if there is neither.
    pub(crate) fn framing(&self, version: Version) -> Result<Option<Framing>, Wrong> {
        let length = self.one("content-length", Wrong::Lengths)?;
        let coded = self.all("transfer-encoding").next().is_some();
        match (length, coded) {
            (Some(_), true) => Err(Wrong::LengthAndCoding),
            (None, true) if version == Version::Http10 => Err(Wrong::CodingInOld),
            (None, true) => self.chunked().map(|()| Some(Framing::Chunked)),
            (Some(length), false) => number(length).map(|n| Some(Framing::Exact(n))).ok_or(Wrong::Length),
            (None, false) => Ok(None),
        }
    }

    /// The framing of a reply that is parsed leniently. If both are present, the transfer coding counts (RFC 9112, 6.3).
    /// Several lengths are allowed if all are equal, and so are leading zeros (RFC 9110, 8.6).
    pub(crate) fn lenient_framing(&self, version: Version) -> Result<Option<Framing>, Wrong> {
        let mut length = None;
        for said in self.all("content-length").flat_map(|v| v.split(|b| *b == b',')).map(<[u8]>::trim_ascii) {
            let zeros = said.iter().take_while(|b| **b == b'0').count().min(said.len().saturating_sub(1));
            let n = number(&said[zeros..]).ok_or(Wrong::Length)?;
            if length.replace(n).is_some_and(|other| other != n) {
                return Err(Wrong::Lengths);
            }
        }
        match self.all("transfer-encoding").next() {
            Some(_) if version == Version::Http10 => Err(Wrong::CodingInOld),
            Some(_) => self.chunked().map(|()| Some(Framing::Chunked)),
            None => Ok(length.map(Framing::Exact)),
        }
    }

    /// Checks that the transfer coding is `chunked` alone.
    fn chunked(&self) -> Result<(), Wrong> {
        let codings: Vec<&[u8]> =
            self.all("transfer-encoding").flat_map(|v| v.split(|b| *b == b',')).map(<[u8]>::trim_ascii).collect();
        let is_chunked = |c: &&[u8]| c.eq_ignore_ascii_case(b"chunked");
        match codings.split_last() {
            Some((last, [])) if is_chunked(last) => Ok(()),
            Some((last, before)) if is_chunked(last) && !before.iter().any(|c| is_chunked(c) || c.is_empty()) => {
                Err(Wrong::UnknownCoding)
            }
            _ => Err(Wrong::Coding),
        }
    }
}

/// Converts the name to text: names are tokens, which are ASCII.
fn named<'a>((name, value): (&'a [u8], &'a [u8])) -> (&'a str, &'a [u8]) {
    (std::str::from_utf8(name).unwrap_or(""), value)
}

/// Parses `1*DIGIT` up to 2^63-1, so that the sum of two does not overflow.
pub(crate) fn number(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || digits.len() > 19 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let n: u64 = std::str::from_utf8(digits).ok()?.parse().ok()?;
    (n <= i64::MAX as u64).then_some(n)
}

/// Whether a byte may be part of a token (RFC 9110, 5.6.2).
pub(crate) fn is_token(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b)
}

/// Maps an error of `httparse` about a field.
pub(crate) fn wrong_field(e: httparse::Error) -> Wrong {
    match e {
        httparse::Error::TooManyHeaders => Wrong::TooManyFields,
        httparse::Error::HeaderValue => Wrong::FieldValue,
        httparse::Error::HeaderName => Wrong::FieldName,
        httparse::Error::Version => Wrong::Version,
        httparse::Error::Token | httparse::Error::Status | httparse::Error::NewLine => Wrong::StartLine,
    }
}

/// Fields that, received in a trailer, would contradict what was decided from the head (RFC 9110, 6.5.1).
pub(crate) fn forbidden_in_trailers(name: &str) -> bool {
    const MORE: [&str; 8] = [
        "authorization",
        "content-encoding",
        "content-range",
        "content-type",
        "cookie",
        "expect",
        "max-forwards",
        "set-cookie",
    ];
    OWN.iter().chain(&MORE).any(|o| name.eq_ignore_ascii_case(o))
}
