//! The SOCKS handshake, versions 4, 4a and 5 on one listener, told apart by their first byte.
//!
//! `accept -> ask -> (connect) -> grant | refuse`: [`ask`] answers its own failures;
//! [`SocksRequest::refuse`] answers those of the connect.

pub mod socks4;
pub mod socks5;

use crate::{
    fault::Fault,
    handshake_buffer::{HandshakeBuffer, HandshakeError},
    proxy_protocol,
    socks::socks5::{Method, Reply},
    target::Target,
    users::Users,
};
use bytes::Bytes;
use std::{convert::Infallible, fmt::Display, io, net::SocketAddr};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

/// The stream of a handshake.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Unpin {}
impl<S: AsyncRead + AsyncWrite + Unpin> Stream for S {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    Socks4,
    Socks5,
}

/// A connect request that has not been answered yet.
#[derive(Debug)]
pub(crate) struct SocksRequest {
    version: Version,
    pub(crate) target: Target,
    /// The authenticated user.
    pub(crate) user: Option<String>,
    /// Bytes that the client has already sent after its request, for the server.
    pub(crate) rest: Bytes,
}

/// Runs the handshake up to the request. It has no time limit of its own.
pub(crate) async fn ask(
    leg: &mut impl Stream,
    mut buffer: HandshakeBuffer,
    users: &Users,
) -> Result<SocksRequest, Fault> {
    let peek = |input: &[u8]| Ok::<_, Infallible>(input.first().map(|b| (*b, 0)));
    match buffer.message(leg, peek).await.map_err(bad)? {
        socks5::VERSION => ask_v5(leg, buffer, users).await,
        socks4::VERSION => ask_v4(leg, buffer, users).await,
        other => {
            let fault = Fault::BadRequest(format!("not SOCKS: first byte 0x{other:02x}"));
            Err(proxy_protocol::explained(buffer.seen(), fault))
        }
    }
}

async fn ask_v5(leg: &mut impl Stream, mut buffer: HandshakeBuffer, users: &Users) -> Result<SocksRequest, Fault> {
    let greeting = buffer.message(leg, socks5::parse_greeting).await.map_err(bad)?;
    let method = choose(greeting, users);
    send(leg, &socks5::encode_method(method)).await?;
    let user = match method {
        Method::NoAuth => None,
        Method::Password => Some(authenticate(leg, &mut buffer, users).await?),
        Method::NoneAcceptable => return Err(Fault::AuthFailed { user: None, why: "no acceptable method" }),
    };
    let request = match buffer.message(leg, socks5::parse_request).await {
        Ok(request) => request,
        Err(e) => {
            if let HandshakeError::Parse(e) = &e {
                send(leg, &socks5::encode_reply(reply_to_bad_request(*e), None)).await?;
            }
            return Err(bad(e));
        }
    };
    if request.command != socks5::Command::Connect {
        send(leg, &socks5::encode_reply(Reply::CommandNotSupported, None)).await?;
        return Err(Fault::BadRequest(format!("command {:?} not supported", request.command)));
    }
    Ok(SocksRequest { version: Version::Socks5, target: request.target, user, rest: buffer.rest() })
}

fn choose(greeting: socks5::Greeting, users: &Users) -> Method {
    match users.is_empty() {
        true if greeting.no_auth => Method::NoAuth,
        false if greeting.password => Method::Password,
        _ => Method::NoneAcceptable,
    }
}

/// Runs the sub-negotiation of RFC 1929.
async fn authenticate(leg: &mut impl Stream, buffer: &mut HandshakeBuffer, users: &Users) -> Result<String, Fault> {
    let given = buffer.message(leg, socks5::parse_credentials).await.map_err(bad)?;
    let user = users.check(&given).await.map(String::from);
    send(leg, &socks5::encode_auth_status(user.is_some())).await?;
    user.ok_or_else(|| Fault::AuthFailed {
        user: Some(String::from_utf8_lossy(&given.name).into_owned()),
        why: "wrong name or password",
    })
}

fn reply_to_bad_request(e: socks5::ParseError) -> Reply {
    match e {
        socks5::ParseError::AddressType(_) => Reply::AddressTypeNotSupported,
        socks5::ParseError::Version(_) | socks5::ParseError::Name | socks5::ParseError::EmptyCredential => {
            Reply::GeneralFailure
        }
    }
}

async fn ask_v4(leg: &mut impl Stream, mut buffer: HandshakeBuffer, users: &Users) -> Result<SocksRequest, Fault> {
    let refusal = socks4::encode_reply(socks4::Reply::Rejected, None);
    if !users.is_empty() {
        send(leg, &refusal).await?;
        return Err(Fault::AuthFailed { user: None, why: "version 4 cannot authenticate" });
    }
    let request = match buffer.message(leg, socks4::parse_request).await {
        Ok(request) => request,
        Err(e) => {
            if matches!(e, HandshakeError::Parse(_)) {
                send(leg, &refusal).await?;
            }
            return Err(bad(e));
        }
    };
    if request.command != socks4::Command::Connect {
        send(leg, &refusal).await?;
        return Err(Fault::BadRequest(format!("command {:?} not supported", request.command)));
    }
    Ok(SocksRequest { version: Version::Socks4, target: request.target, user: None, rest: buffer.rest() })
}

impl SocksRequest {
    /// Reports success to the client; `bound` is our own address on the server's leg.
    pub(crate) async fn grant(&self, leg: &mut impl Stream, bound: SocketAddr) -> io::Result<()> {
        match self.version {
            Version::Socks4 => leg.write_all(&socks4::encode_reply(socks4::Reply::Granted, Some(bound))).await,
            Version::Socks5 => leg.write_all(&socks5::encode_reply(Reply::Succeeded, Some(bound))).await,
        }
    }

    /// Reports failure to the client, with the reason if its version has a code for it.
    pub(crate) async fn refuse(&self, leg: &mut impl Stream, fault: &Fault) -> io::Result<()> {
        match self.version {
            Version::Socks4 => leg.write_all(&socks4::encode_reply(socks4::Reply::Rejected, None)).await,
            Version::Socks5 => leg.write_all(&socks5::encode_reply(reply_to(fault), None)).await,
        }
    }
}

fn reply_to(fault: &Fault) -> Reply {
    match fault {
        Fault::Denied(_) | Fault::AuthFailed { .. } => Reply::NotAllowed,
        // No code fits better; Tor also sends this one for a name that does not resolve.
        Fault::NoAddress(_) => Reply::HostUnreachable,
        Fault::Unreachable(e) => Reply::from_io(e),
        Fault::Timeout(_) => Reply::TtlExpired,
        Fault::BadRequest(_) | Fault::BadReply(_) | Fault::NoRoute(_) | Fault::NoServer(_) => Reply::GeneralFailure,
    }
}

fn bad<E: Display>(e: HandshakeError<E>) -> Fault {
    Fault::BadRequest(e.to_string())
}

async fn send(leg: &mut impl Stream, bytes: &[u8]) -> Result<(), Fault> {
    leg.write_all(bytes).await.map_err(|e| Fault::BadRequest(format!("the client does not listen: {e}")))
}

#[cfg(test)]
#[path = "socks_tests.rs"]
mod tests;
