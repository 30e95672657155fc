//! The reasons why a connection was not relayed: one enum for the reply, the access log and the counters.

use crate::access::Denied;
use std::{fmt, io};

/// A step with its own time limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Greeting, authentication and request; before these, a PROXY header.
    Handshake,
    /// Name resolution.
    Resolve,
    /// Waiting for a server of a pool.
    Queue,
    /// Connecting to the target.
    Connect,
    /// Connecting to an upstream proxy, or its answer.
    Upstream,
    /// Body of an HTTP request.
    Body,
    /// HTTP reply.
    Reply,
    /// SOCKS: the connection of the peer that BIND waits for.
    Bind,
    /// First bytes on which there are conditions.
    FirstBytes,
}

/// Reason why a connection was not relayed.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The client sent something that cannot be served, or closed before its request was complete.
    #[error("{0}")]
    BadRequest(String),
    /// The client offered no acceptable method, or sent a wrong name or password.
    #[error("{why}")]
    AuthFailed {
        /// The name that the client sent, if any. Invalid UTF-8 is replaced.
        user: Option<String>,
        /// What was missing or wrong.
        why: &'static str,
    },
    /// The rules deny the request.
    #[error("{0}")]
    Denied(Denied),
    /// The name has no address.
    #[error("no address: {0}")]
    NoAddress(io::Error),
    /// No address of the target accepted a connection.
    #[error("{0}")]
    Unreachable(io::Error),
    /// The server sent something that cannot be forwarded, or closed before its reply was complete.
    #[error("{0}")]
    BadReply(String),
    /// No route of the listener matches the request.
    #[error("no route for {0}")]
    NoRoute(String),
    /// No server of this pool is up.
    #[error("no server of pool {0} is up")]
    NoServer(String),
    /// A time limit passed.
    #[error("{0} took too long")]
    Timeout(Step),
    /// The client, or all clients of the listener, have too many of these.
    #[error("too many of these at once: {0}")]
    Limit(&'static str),
}

impl Fault {
    /// Returns the name for the access log and the counters.
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
            Fault::Limit(_) => "limit",
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Step::Handshake => "handshake",
            Step::Resolve => "name lookup",
            Step::Queue => "waiting for a server",
            Step::Connect => "connect",
            Step::Upstream => "the upstream proxy",
            Step::Body => "request body",
            Step::Reply => "reply",
            Step::Bind => "the peer's connection",
            Step::FirstBytes => "the first bytes",
        })
    }
}
