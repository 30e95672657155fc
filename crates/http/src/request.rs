//! The head of a request.

use crate::{
    Authority, FIELDS_MAX, Fields, Framing, METHOD_MAX, Version, Wrong,
    fields::{ABOUT_BYTES, is_token, number, wrong_field},
};
use std::mem::MaybeUninit;

/// Methods whose requests have defined content (RFC 9110, 9.3; RFC 5789, 4918, 5323, 3253, 3744, 4791; QUERY).
const WITH_CONTENT: [&str; 12] = [
    "ACL",
    "LOCK",
    "MKCALENDAR",
    "MKCOL",
    "PATCH",
    "POST",
    "PROPFIND",
    "PROPPATCH",
    "PUT",
    "QUERY",
    "REPORT",
    "SEARCH",
];

/// The request target, in the four forms of RFC 9112, 3.2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Form {
    /// A path and optionally a query: sent to a server.
    Origin(String),
    /// `http://HOST:PORT/PATH`, or `ws:` with an upgrade to WebSocket: sent to a proxy. The path is in the form that a server expects (RFC 9112, 3.2.1, 3.2.4).
    Absolute(Authority, String),
    /// `HOST:PORT`: CONNECT.
    Authority(Authority),
    /// `*`: OPTIONS for a server as a whole.
    Asterisk,
}

/// A parsed request head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The method in its original case: methods are case-sensitive (RFC 9110, 9.1).
    pub method: String,
    /// The target.
    pub form: Form,
    /// The client's version.
    pub version: Version,
    /// All fields.
    pub fields: Fields,
    /// The framing of the body; never [`Framing::UntilClose`].
    pub framing: Framing,
    /// Whether another request may follow on the connection. A proxy must
    /// not keep a connection from an HTTP/1.0 client open (RFC 9112, 9.3).
    pub keep_alive: bool,
    /// The protocols that the client asks to switch to, one or several (RFC 9110, 7.8).
    pub upgrade: Option<String>,
    /// Whether the client accepts trailers (RFC 9110, 10.1.4).
    pub(crate) trailers: bool,
    /// For OPTIONS and TRACE: how many more times the request may be forwarded (RFC 9110, 7.6.2).
    pub max_forwards: Option<u64>,
    /// The options of `Connection`, in lower case: the fields they name are not forwarded.
    pub(crate) hop: Vec<String>,
}

impl Request {
    /// Parses a head whose end [`Scan`](crate::Scan) has found.
    ///
    /// # Errors
    /// Anything that can be read in two ways or that a proxy must
    /// not forward. The status of the answer is [`Wrong::status`].
    pub fn parse(head: &[u8]) -> Result<Request, Wrong> {
        let mut room = [const { MaybeUninit::uninit() }; FIELDS_MAX];
        let mut raw = httparse::Request::new(&mut []);
        match raw.parse_with_uninit_headers(head, &mut room) {
            Ok(httparse::Status::Complete(n)) if n == head.len() => {}
            Ok(_) => return Err(Wrong::StartLine),
            Err(httparse::Error::Version) => return Err(version(head)),
            Err(e) => return Err(wrong_field(e)),
        }
        let (Some(method), Some(target), Some(minor)) = (raw.method, raw.path, raw.version) else {
            return Err(Wrong::StartLine);
        };
        if method.len() > METHOD_MAX {
            return Err(Wrong::Method);
        }
        let version = Version::new(minor);
        let fields = Fields::new(raw.headers);
        let form = form(method, target)?;
        host(&fields, version, &form)?;
        let framing = fields.framing(version)?.unwrap_or(Framing::None);
        if method == "CONNECT" && !framing.is_empty() {
            return Err(Wrong::ConnectBody);
        }
        let hop = fields.connection()?;
        let says = |option: &str| hop.iter().any(|h| h == option);
        let upgrade = upgrade(&fields, says("upgrade") && version == Version::Http11);
        if is_ws(target) && !upgrade.as_deref().is_some_and(asks_for_websocket) {
            return Err(Wrong::Scheme);
        }
        let max_forwards = fields.one("max-forwards", Wrong::MaxForwards)?;
        let max_forwards = match max_forwards.filter(|_| matches!(method, "OPTIONS" | "TRACE")) {
            Some(n) => Some(number(n).ok_or(Wrong::MaxForwards)?),
            None => None,
        };
        let framing = if framing.is_empty() && method == "CONNECT" { Framing::None } else { framing };
        Ok(Request {
            keep_alive: version == Version::Http11 && !says("close"),
            trailers: version == Version::Http11 && takes_trailers(&fields),
            upgrade,
            method: method.to_owned(),
            form,
            version,
            fields,
            framing,
            max_forwards,
            hop,
        })
    }
}

impl Request {
    /// The fields that are forwarded to the server unchanged: all but those
    /// about one connection, `Host`, and those that delimit the body.
    pub fn end_to_end(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.fields.plain(&self.hop)
    }

    /// The values of all fields with this name that are forwarded to the server.
    pub fn passed_on<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.fields.passed_on(&self.hop, name)
    }

    /// Keeps fields of this name from being forwarded: they were for us.
    pub fn keep_back(&mut self, name: &str) {
        self.hop.push(name.to_ascii_lowercase());
    }

    /// Returns the request whose body is changed, and sent in chunks. What the client says of its bytes is not true any more.
    /// `decoded`: its coding is taken off.
    #[must_use]
    pub fn recast(&self, decoded: bool) -> Request {
        let mut changed = self.clone();
        changed.framing = Framing::Chunked;
        ABOUT_BYTES.iter().for_each(|name| changed.keep_back(name));
        if decoded {
            changed.keep_back("content-encoding");
        }
        changed
    }

    /// Whether the request may be sent again if no byte of a reply has come: its method is idempotent (RFC 9110, 9.2.2), and
    /// it has no body, part of which may already be gone.
    pub fn is_repeatable(&self) -> bool {
        matches!(self.method.as_str(), "GET" | "HEAD" | "OPTIONS" | "PUT" | "DELETE") && self.framing.is_empty()
    }

    /// Whether the request has content although its method defines none, as with GET, HEAD,
    /// DELETE and OPTIONS, or is unknown. A server that does not read the content takes it for
    /// the next request (RFC 9110, 9.3.1), so nothing else may be sent on that connection.
    pub fn has_odd_content(&self) -> bool {
        !self.framing.is_empty() && !WITH_CONTENT.contains(&self.method.as_str())
    }
}

/// The error for a version: valid but unsupported, or no version at all.
fn version(head: &[u8]) -> Wrong {
    let line = head.strip_prefix(b"\r\n").unwrap_or(head).split(|b| *b == b'\r').next().unwrap_or(head);
    let last = line.rsplit(|b| *b == b' ').next().unwrap_or(line);
    match last.strip_prefix(b"HTTP/") {
        Some(b"1.0" | b"1.1") => Wrong::StartLine,
        Some([major, b'.', minor]) if major.is_ascii_digit() && minor.is_ascii_digit() => Wrong::Version,
        _ => Wrong::StartLine,
    }
}

fn form(method: &str, target: &str) -> Result<Form, Wrong> {
    if method == "CONNECT" {
        let authority = Authority::parse(target)?;
        // RFC 9112, 3.2.3: the port is not optional
        return if authority.port.is_some() { Ok(Form::Authority(authority)) } else { Err(Wrong::Authority) };
    }
    // Clients send other characters that RFC 3986 excludes as they were typed, also UTF-8, and servers read them alike. Not `#`:
    // some servers cut the target there.
    if !target.bytes().all(|b| matches!(b, b'!'..=b'~' | 0x80..) && b != b'#') {
        return Err(Wrong::Target);
    }
    match target {
        "*" if method == "OPTIONS" => return Ok(Form::Asterisk),
        _ if target.starts_with('/') => return Ok(Form::Origin(target.to_owned())),
        _ => {}
    }
    let (scheme, rest) = target.split_once("://").ok_or(Wrong::Target)?;
    if !scheme.eq_ignore_ascii_case("http") && !is_ws(target) {
        let is_scheme = |b: u8| b.is_ascii_alphanumeric() || b"+-.".contains(&b);
        let good = scheme.bytes().next().is_some_and(|b| b.is_ascii_alphabetic()) && scheme.bytes().all(is_scheme);
        return Err(if good { Wrong::Scheme } else { Wrong::Target });
    }
    let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    let path = match path {
        // RFC 9112, 3.2.4
        "" if method == "OPTIONS" => "*".to_owned(),
        _ if path.starts_with('/') => path.to_owned(),
        _ => format!("/{path}"),
    };
    Ok(Form::Absolute(Authority::parse(authority)?, path))
}

/// Whether the scheme is `ws`: `http` by another name (RFC 6455, 3), in which some clients ask a proxy for a WebSocket.
fn is_ws(target: &str) -> bool {
    target.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("ws://"))
}

fn asks_for_websocket(protocols: &str) -> bool {
    protocols.split(',').any(|p| p.trim().eq_ignore_ascii_case("websocket"))
}

/// Checks `Host`: exactly one, with a valid host (RFC 9112, 3.2). If the target
/// itself names the host, a proxy ignores `Host` and replaces it (3.2.2).
fn host(fields: &Fields, version: Version, form: &Form) -> Result<(), Wrong> {
    match fields.one("host", Wrong::Hosts)? {
        None if version == Version::Http11 => Err(Wrong::NoHost),
        None => Ok(()),
        Some(_) if matches!(form, Form::Absolute(..) | Form::Authority(_)) => Ok(()),
        Some(value) => {
            let text = std::str::from_utf8(value).map_err(|_| Wrong::Host)?;
            Authority::parse(text).map(drop).map_err(|_| Wrong::Host)
        }
    }
}

fn takes_trailers(fields: &Fields) -> bool {
    let mut codings = fields.all("te").flat_map(|v| v.split(|b| *b == b','));
    codings.any(|c| c.trim_ascii().eq_ignore_ascii_case(b"trailers"))
}

/// The requested protocols that may be forwarded. `h2c` is dropped: it is obsolete (RFC 9113, 3.1), and has been used to
/// bypass rules, since its frames carry requests that no proxy inspects.
fn upgrade(fields: &Fields, asked: bool) -> Option<String> {
    let list = fields.all("upgrade").filter(|_| asked).flat_map(|v| v.split(|b| *b == b',')).map(<[u8]>::trim_ascii);
    let good = |p: &&[u8]| !p.is_empty() && p.iter().all(|b| is_token(*b) || *b == b'/');
    let passed = list.filter(good).map(String::from_utf8_lossy).filter(|p| !p.to_ascii_lowercase().starts_with("h2"));
    Some(passed.collect::<Vec<_>>().join(", ")).filter(|protocols| !protocols.is_empty())
}
