//! HTTP/1.0 and HTTP/1.1 messages (RFC 9112), without any I/O: where a head ends and what it says, which body follows,
//! where that body ends, and what a head becomes when a proxy passes it on.
//!
//! # Strictness
//! Two programs that disagree about where a message ends can be made to disagree about whose request it is (request
//! smuggling, RFC 9112, 11.2). So whatever the RFC lets a recipient repair is refused in requests, with a [`Wrong`] that names
//! the rule: nothing is guessed, and what was understood is written anew rather than copied.
//!
//! Many servers reply in ways that the RFC forbids, and that are understood everywhere. [`Scan::lenient`],
//! [`Response::lenient`] and [`Body::lenient`] mend what has one meaning; what is written of it is what the strict ones take.
//!
//! # Order of calls
//! [`Scan::feed`] with all bytes of a message so far, until it finds the end of the head; [`Request::parse`] or
//! [`Response::parse`] with the head; [`Body::new`] with its framing, then [`Body::step`] with what follows until
//! [`Body::is_done`]. The answers do not depend on how the bytes were cut. [`forward`] writes heads for the other side.
//!
//! Heads are taken apart by `httparse`; what it lets pass and RFC 9112 does not is found by [`Scan`] before.

mod authority;
mod body;
mod chunked;
mod fields;
pub mod forward;
mod mend;
pub mod path;
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

/// The longest head of a request in bytes, start line and final empty line included. Browsers send up to some 16 KB of cookies.
pub const HEAD_MAX: usize = 32 * 1024;
/// The longest head of a reply in bytes: what other proxies take.
pub const REPLY_HEAD_MAX: usize = 64 * 1024;
/// The longest start line in bytes. RFC 9112, 3, wants 8000 at least.
pub const LINE_MAX: usize = 16 * 1024;
/// The most fields of a request's head or a trailer section.
pub const FIELDS_MAX: usize = 128;
/// The most fields of a reply's head: while it is read, each takes 32 bytes of the stack.
pub const REPLY_FIELDS_MAX: usize = 512;
/// The longest trailer section in bytes.
pub const TRAILERS_MAX: usize = 8 * 1024;
/// The longest method in bytes: those registered have 18 at most.
pub const METHOD_MAX: usize = 32;

/// The version of a message. Others are refused.
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

    /// As `Via` has it, without the protocol's name (RFC 9110, 7.6.3).
    pub fn number(self) -> &'static str {
        match self {
            Version::Http10 => "1.0",
            Version::Http11 => "1.1",
        }
    }
}
