//! The head of a reply.

use crate::{
    Fields, Framing, REPLY_FIELDS_MAX, Version, Wrong,
    fields::{is_token, wrong_field},
    mend::mend,
};
use std::mem::MaybeUninit;

/// A reply's head, understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// 100 to 599, or to 999 if it was read leniently.
    pub status: u16,
    /// The reason phrase, which means nothing.
    pub reason: String,
    /// The server's version.
    pub version: Version,
    /// All fields.
    pub fields: Fields,
    /// What follows.
    pub framing: Framing,
    /// A length that is said though no body follows: HEAD and 304 (RFC 9110, 8.6).
    pub(crate) said: Option<u64>,
    /// Whether the connection can be used again.
    pub keep_alive: bool,
    /// What is spoken from now on, with 101.
    pub upgrade: Option<String>,
    /// Options of `Connection`, in lower case.
    pub(crate) hop: Vec<String>,
}

impl Response {
    /// Reads a head of which [`Scan`](crate::Scan) has found the end, as the answer to a request with this method: the body
    /// depends on it (RFC 9112, 6.3).
    ///
    /// # Errors
    /// Whatever may be read in two ways.
    pub fn parse(head: &[u8], method: &str) -> Result<Response, Wrong> {
        let parts = Parts::new(head)?;
        if parts.status > 599 {
            return Err(Wrong::Status);
        }
        let said = parts.fields.framing(parts.version)?;
        Response::new(parts, said, method)
    }

    /// The same, of a head that [`Scan::lenient`](crate::Scan::lenient) has found: what servers often do wrong, and what has one
    /// meaning all the same, is mended.
    ///
    /// # Errors
    /// Whatever may be read in two ways.
    pub fn lenient(head: &[u8], method: &str) -> Result<Response, Wrong> {
        let parts = Parts::new(head).or_else(|_| Parts::new(&mend(head, true)))?;
        let said = parts.fields.lenient_framing(parts.version)?;
        let doubtful = said == Some(Framing::Chunked) && parts.fields.all("content-length").next().is_some();
        let mut reply = Response::new(parts, said, method)?;
        reply.keep_alive &= !doubtful; // RFC 9112, 6.3: perhaps somebody has tampered with it
        Ok(reply)
    }

    fn new(parts: Parts, said: Option<Framing>, method: &str) -> Result<Response, Wrong> {
        let Parts { status, version, reason, fields } = parts;
        let framing = match status {
            100..=199 | 204 | 304 => Framing::None,
            _ if method == "HEAD" => Framing::None,
            _ => said.unwrap_or(Framing::UntilClose),
        };
        let said = match said {
            Some(Framing::Exact(n)) if method == "HEAD" && status >= 200 && status != 204 || status == 304 => Some(n),
            _ => None,
        };
        let hop = fields.connection()?;
        let says = |option: &str| hop.iter().any(|h| h == option);
        let persists = !says("close") && (version == Version::Http11 || says("keep-alive"));
        let upgrade = fields.all("upgrade").next().filter(|v| status == 101 && is_list(v));
        Ok(Response {
            status,
            reason,
            version,
            keep_alive: persists && framing != Framing::UntilClose,
            upgrade: upgrade.map(|v| String::from_utf8_lossy(v).into_owned()),
            fields,
            framing,
            said,
            hop,
        })
    }

    /// Bytes of content, as far as the head says: of HEAD and 304, those that the content would have. None: until the end.
    pub fn length(&self) -> Option<u64> {
        match self.framing {
            Framing::Exact(n) => Some(n),
            Framing::None => Some(self.said.unwrap_or(0)),
            Framing::Chunked | Framing::UntilClose => None,
        }
    }

    /// All fields that go on to the client as they are: not about one connection, nor about where the body ends.
    pub fn end_to_end(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.fields.plain(&self.hop)
    }

    /// The values of all fields of this name that go on to the client.
    pub fn passed_on<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.fields
            .end_to_end(&self.hop)
            .filter(move |(n, _)| n.eq_ignore_ascii_case(name.as_bytes()))
            .map(|(_, value)| value)
    }

    /// Whether another reply to the same request follows (RFC 9110, 15.2). 101 is the last.
    pub fn is_interim(&self) -> bool {
        (100..200).contains(&self.status) && self.status != 101
    }
}

/// A head, taken apart.
struct Parts {
    status: u16,
    version: Version,
    reason: String,
    fields: Fields,
}

impl Parts {
    fn new(head: &[u8]) -> Result<Parts, Wrong> {
        let mut room = [const { MaybeUninit::uninit() }; REPLY_FIELDS_MAX];
        let mut raw = httparse::Response::new(&mut []);
        match httparse::ParserConfig::default().parse_response_with_uninit_headers(&mut raw, head, &mut room) {
            Ok(httparse::Status::Complete(n)) if n == head.len() => {}
            Ok(_) => return Err(Wrong::StartLine),
            Err(e) => return Err(wrong_field(e)),
        }
        let (Some(status), Some(minor)) = (raw.code, raw.version) else { return Err(Wrong::StartLine) };
        if status < 100 {
            return Err(Wrong::Status);
        }
        let reason = raw.reason.unwrap_or("").to_owned();
        Ok(Parts { status, version: Version::new(minor), reason, fields: Fields::new(raw.headers) })
    }
}

fn is_list(value: &[u8]) -> bool {
    !value.is_empty() && value.iter().all(|b| is_token(*b) || b"/, ".contains(b))
}
