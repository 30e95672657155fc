//! Why a connection never came to be relayed: one enum for the reply, the access log and the counters alike.

use crate::access::Denied;
use std::{fmt, io};

/// A step with a time limit of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Greeting, authentication and request; before these, a PROXY header.
    Handshake,
    /// Looking up the name.
    Resolve,
    /// Connecting.
    Connect,
    /// Waiting for the body of an HTTP request.
    Body,
    /// Waiting for a reply of HTTP.
    Reply,
}

/// Why a connection was not relayed.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The client said something that cannot be served, or went away before it had said all.
    #[error("{0}")]
    BadRequest(String),
    /// No acceptable method, or a wrong name or password.
    #[error("{why}")]
    AuthFailed {
        /// The name given, if one was; whatever the client sent, made readable.
        user: Option<String>,
        /// What was missing or wrong.
        why: &'static str,
    },
    /// The rules forbid it.
    #[error("{0}")]
    Denied(Denied),
    /// The name has no address.
    #[error("no address: {0}")]
    NoAddress(io::Error),
    /// No address of the target could be connected to.
    #[error("{0}")]
    Unreachable(io::Error),
    /// The server said something that cannot be passed on, or went away before it had said all.
    #[error("{0}")]
    BadReply(String),
    /// No route of the listener is for this, which the client asks for.
    #[error("no route for {0}")]
    NoRoute(String),
    /// No server of the pool of this name is up.
    #[error("no server of pool {0} is up")]
    NoServer(String),
    /// A time limit passed.
    #[error("{0} took too long")]
    Timeout(Step),
}

impl Fault {
    /// The word for the access log and the counters.
    pub fn how(&self) -> &'static str {
        match self {
            Fault::BadRequest(_) => "bad-request",
            Fault::AuthFailed { .. } => "auth-failed",
            Fault::Denied(_) => "denied",
            Fault::NoRoute(_) => "no-route",
            Fault::NoAddress(_) | Fault::Unreachable(_) => "unreachable",
            Fault::BadReply(_) => "bad-reply",
            Fault::NoServer(_) => "no-server",
            Fault::Timeout(_) => "timeout",
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Step::Handshake => "handshake",
            Step::Resolve => "name lookup",
            Step::Connect => "connect",
            Step::Body => "request body",
            Step::Reply => "reply",
        })
    }
}
