//! HTTP/1.0 and HTTP/1.1 messages (RFC 9112), without any I/O: finds the end of a head, parses it, finds the end of the
//! body, and writes the head that a proxy forwards.
//!
//! # Strictness
//! If two programs disagree about where a message ends, an attacker can make them disagree about whose request it is
//! (request smuggling, RFC 9112, 11.2). Therefore requests that the RFC allows a recipient to repair are refused, with a
//! [`Wrong`] that names the rule: nothing is guessed, and heads are written from the parsed values rather than copied.
//!
//! Many servers send replies that violate the RFC but are understood everywhere. [`Scan::lenient`], [`Response::lenient`]
//! and [`Body::lenient`] correct errors that leave only one meaning; the corrected message passes the strict parsers.
//!
//! # Order of calls
//! Call [`Scan::feed`] with all bytes of a message so far until it finds the end of the head; then [`Request::parse`] or
//! [`Response::parse`] with the head; then [`Body::new`] with its framing and [`Body::step`] with the following bytes until
//! [`Body::is_done`]. The results do not depend on how the bytes were divided. [`forward`] writes heads for the other side.
//!
//! Heads are parsed by `httparse`. [`Scan`] first rejects what `httparse` accepts and RFC 9112 forbids.

pub mod accept;
mod authority;
mod body;
mod chunked;
mod fields;
pub mod forward;
mod mend;
pub mod path;
pub mod range;
pub mod reply;
mod request;
mod response;
mod scan;
mod wrong;

pub use authority::Authority;
pub use body::{Body, Framing, Step};
pub use chunked::Chunked;
pub use fields::Fields;
pub use request::{Form, Request};
pub use response::Response;
pub use scan::{Kind, Scan};
pub use wrong::Wrong;

/// Maximum length of a request's head in bytes, including start line
/// and final empty line. Browsers send up to about 16 KB of cookies.
pub const HEAD_MAX: usize = 32 * 1024;
/// Maximum length of a reply's head in bytes: the limit of other proxies.
pub const REPLY_HEAD_MAX: usize = 64 * 1024;
/// Maximum length of a start line in bytes. RFC 9112, 3, requires at least 8000.
pub const LINE_MAX: usize = 16 * 1024;
/// Maximum number of fields in a request's head or a trailer section.
pub const FIELDS_MAX: usize = 128;
/// Maximum number of fields in a reply's head. During parsing, each takes 32 bytes of the stack.
pub const REPLY_FIELDS_MAX: usize = 512;
/// Maximum length of a trailer section in bytes.
pub const TRAILERS_MAX: usize = 8 * 1024;
/// Maximum length of a method in bytes. Registered methods have at most 18.
pub const METHOD_MAX: usize = 32;

/// The version of a message. Other versions are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// HTTP/1.0 (RFC 1945).
    Http10,
    /// HTTP/1.1.
    Http11,
}

impl Version {
    fn new(minor: u8) -> Version {
        if minor == 0 { Version::Http10 } else { Version::Http11 }
    }

    /// The version as written in `Via`, without the protocol name (RFC 9110, 7.6.3).
    pub fn number(self) -> &'static str {
        match self {
            Version::Http10 => "1.0",
            Version::Http11 => "1.1",
        }
    }
}
