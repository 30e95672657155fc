//! The head of a reply.

use crate::{
    Fields, Framing, REPLY_FIELDS_MAX, Version, Wrong,
    fields::{is_token, wrong_field},
    mend::mend,
};
use std::mem::MaybeUninit;

/// A parsed reply head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// 100 to 599, or up to 999 if parsed leniently.
    pub status: u16,
    /// The reason phrase, which has no meaning.
    pub reason: String,
    /// The server's version.
    pub version: Version,
    /// All fields.
    pub fields: Fields,
    /// The framing of the body.
    pub framing: Framing,
    /// The Content-Length of a reply without a body: for HEAD and 304 (RFC 9110, 8.6).
    pub(crate) said: Option<u64>,
    /// Whether the connection can be used for another request.
    pub keep_alive: bool,
    /// The protocol switched to, with 101.
    pub upgrade: Option<String>,
    /// The options of `Connection`, in lower case.
    pub(crate) hop: Vec<String>,
}

impl Response {
    /// Parses a head whose end [`Scan`](crate::Scan) has found, as the reply to a request
    /// with this method, which determines the framing of the body (RFC 9112, 6.3).
    ///
    /// # Errors
    /// Anything that can be read in two ways.
    pub fn parse(head: &[u8], method: &str) -> Result<Response, Wrong> {
        let parts = Parts::new(head)?;
        if parts.status > 599 {
            return Err(Wrong::Status);
        }
        let said = parts.fields.framing(parts.version)?;
        Response::new(parts, said, method)
    }

    /// Parses a head found by [`Scan::lenient`](crate::Scan::lenient).
    /// Common errors of servers that leave only one meaning are corrected.
    ///
    /// # Errors
    /// Anything that can be read in two ways.
    pub fn lenient(head: &[u8], method: &str) -> Result<Response, Wrong> {
        let parts = Parts::new(head).or_else(|_| Parts::new(&mend(head, true)))?;
        let said = parts.fields.lenient_framing(parts.version)?;
        let doubtful = said == Some(Framing::Chunked) && parts.fields.all("content-length").next().is_some();
        let mut reply = Response::new(parts, said, method)?;
        reply.keep_alive &= !doubtful; // RFC 9112, 6.3: possibly an attack
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

    /// The length of the content according to the head; for HEAD and 304,
    /// the length that the content would have. `None`: until the end.
    pub fn length(&self) -> Option<u64> {
        match self.framing {
            Framing::Exact(n) => Some(n),
            Framing::None => Some(self.said.unwrap_or(0)),
            Framing::Chunked | Framing::UntilClose => None,
        }
    }

    /// The framing towards the client of a body whose length changes. Without chunks, it ends where the connection does.
    pub fn framing_of_changed(&self, client: Version) -> Framing {
        match self.framing {
            Framing::Exact(_) | Framing::Chunked if client == Version::Http11 => Framing::Chunked,
            Framing::Exact(_) | Framing::Chunked | Framing::UntilClose => Framing::UntilClose,
            Framing::None => Framing::None,
        }
    }

    /// The fields that are forwarded to the client unchanged: all but
    /// those about one connection and those that delimit the body.
    pub fn end_to_end(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.fields.plain(&self.hop)
    }

    /// The values of all fields with this name that are forwarded to the client.
    pub fn passed_on<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.fields.passed_on(&self.hop, name)
    }

    /// Whether another reply to the same request follows (RFC 9110, 15.2). 101 is final.
    pub fn is_interim(&self) -> bool {
        (100..200).contains(&self.status) && self.status != 101
    }
}

/// The parts of a head.
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
