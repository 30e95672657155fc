//! The head of a reply.

use crate::{
    FIELDS_MAX, Fields, Framing, Version, Wrong,
    fields::{is_token, wrong_field},
};
use std::mem::MaybeUninit;

/// A reply's head, understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// 100 to 599.
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
        let mut room = [const { MaybeUninit::uninit() }; FIELDS_MAX];
        let mut raw = httparse::Response::new(&mut []);
        match httparse::ParserConfig::default().parse_response_with_uninit_headers(&mut raw, head, &mut room) {
            Ok(httparse::Status::Complete(n)) if n == head.len() => {}
            Ok(_) => return Err(Wrong::StartLine),
            Err(e) => return Err(wrong_field(e)),
        }
        let (Some(status), Some(minor)) = (raw.code, raw.version) else { return Err(Wrong::StartLine) };
        if !(100..=599).contains(&status) {
            return Err(Wrong::Status);
        }
        let version = Version::new(minor);
        let fields = Fields::new(raw.headers);
        let said = fields.framing(version)?;
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
        let persists = !says("close") && (version == Version::New || says("keep-alive"));
        let upgrade = fields.all("upgrade").next().filter(|v| status == 101 && is_list(v));
        Ok(Response {
            status,
            reason: raw.reason.unwrap_or("").to_owned(),
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

fn is_list(value: &[u8]) -> bool {
    !value.is_empty() && value.iter().all(|b| is_token(*b) || b"/, ".contains(b))
}
