//! SOCKS, versions 4, 4a and 5 on one listener, told apart by their first byte.
//!
//! `accept -> ask -> (connect | bind | associate | look up) -> grant | refuse`: [`ask`] answers its own failures;
//! [`SocksRequest::refuse`] answers those of the command. CONNECT and BIND lead to the relay; an association and a look-up
//! are served to their ends here.

mod asked;
mod batch;
mod bind;
pub mod datagram;
mod lookup;
mod names;
mod ports;
pub mod socks4;
pub mod socks5;
mod udp;

use crate::{
    access::Subject,
    commands::{self, Command, Commands},
    context::{Front, ServerContext},
    counters::Counters,
    fault::{Fault, Step},
    handshake_buffer::{HandshakeBuffer, HandshakeError},
    log::access_log::Record,
    onward::{Ready, connect},
    proxy_protocol,
    socks::socks5::{Method, Reply},
    target::Target,
    users::{NoUser, Users},
};
use asked::Asked;
use bytes::Bytes;
use longsplice_engine::{Leftovers, Leg};
use std::{
    convert::Infallible,
    fmt::Display,
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    time::{error::Elapsed, timeout},
};

/// The stream of a handshake.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Unpin {}
impl<S: AsyncRead + AsyncWrite + Unpin> Stream for S {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    Socks4,
    Socks5,
}

/// A request that has not been answered yet.
#[derive(Debug)]
pub(crate) struct SocksRequest {
    version: Version,
    pub(crate) asked: Asked,
    pub(crate) target: Target,
    /// The authenticated user.
    pub(crate) user: Option<String>,
    /// Bytes that the client has already sent after its request, for the server.
    pub(crate) rest: Bytes,
}

/// Runs the handshake of this client up to the request. It has no time limit of its own.
pub(crate) async fn ask(
    leg: &mut impl Stream,
    mut buffer: HandshakeBuffer,
    (users, commands): (&Users, &Commands),
    from: IpAddr,
) -> Result<SocksRequest, Fault> {
    let peek = |input: &[u8]| Ok::<_, Infallible>(input.first().map(|b| (*b, 0)));
    match buffer.message(leg, peek).await.map_err(bad)? {
        socks5::VERSION => ask_v5(leg, buffer, (users, commands), from).await,
        socks4::VERSION => ask_v4(leg, buffer, (users, commands)).await,
        other => {
            let fault = Fault::BadRequest(format!("not SOCKS: first byte 0x{other:02x}"));
            Err(proxy_protocol::explained(buffer.seen(), fault))
        }
    }
}

async fn ask_v5(
    leg: &mut impl Stream,
    mut buffer: HandshakeBuffer,
    (users, commands): (&Users, &Commands),
    from: IpAddr,
) -> Result<SocksRequest, Fault> {
    let greeting = buffer.message(leg, socks5::parse_greeting).await.map_err(bad)?;
    let method = choose(greeting, users);
    send(leg, &socks5::encode_method(method)).await?;
    let user = match method {
        Method::NoAuth => None,
        Method::Password => Some(authenticate(leg, &mut buffer, (users, from)).await?),
        // GSSAPI (RFC 1961) encapsulates all that follows, which nothing could splice.
        Method::NoneAcceptable if greeting.gssapi => {
            return Err(Fault::AuthFailed { user: None, why: "no acceptable method: GSSAPI is not supported" });
        }
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
    let Some(asked) = Asked::v5(request.command).filter(|asked| commands.serves(asked.command())) else {
        send(leg, &socks5::encode_reply(Reply::CommandNotSupported, None)).await?;
        return Err(Fault::BadRequest(format!("command {:?} not supported", request.command)));
    };
    Ok(SocksRequest { version: Version::Socks5, asked, target: request.target, user, rest: buffer.rest() })
}

fn choose(greeting: socks5::Greeting, users: &Users) -> Method {
    match users.is_empty() {
        true if greeting.no_auth => Method::NoAuth,
        false if greeting.password => Method::Password,
        _ => Method::NoneAcceptable,
    }
}

/// Runs the sub-negotiation of RFC 1929.
async fn authenticate(
    leg: &mut impl Stream,
    buffer: &mut HandshakeBuffer,
    (users, from): (&Users, IpAddr),
) -> Result<String, Fault> {
    let given = buffer.message(leg, socks5::parse_credentials).await.map_err(bad)?;
    let user = users.check_of(from, &given).await;
    send(leg, &socks5::encode_auth_status(user.is_ok())).await?;
    user.map_err(|no| {
        let user = (no == NoUser::Wrong).then(|| String::from_utf8_lossy(&given.name).into_owned());
        Fault::AuthFailed { user, why: no.why() }
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

async fn ask_v4(
    leg: &mut impl Stream,
    mut buffer: HandshakeBuffer,
    (users, commands): (&Users, &Commands),
) -> Result<SocksRequest, Fault> {
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
    let Some(asked) = Asked::v4(request.command).filter(|asked| commands.serves(asked.command())) else {
        send(leg, &refusal).await?;
        return Err(Fault::BadRequest(format!("command {:?} not supported", request.command)));
    };
    Ok(SocksRequest { version: Version::Socks4, asked, target: request.target, user: None, rest: buffer.rest() })
}

impl SocksRequest {
    /// Returns the request's subject for the rules.
    fn subject(&self, client: &Leg) -> Subject<'_> {
        Subject::by(client.source().ip()).of(self.user.as_deref())
    }

    /// Whether an answer can name an IPv6 address.
    fn says_ipv6(&self) -> bool {
        self.version == Version::Socks5
    }

    /// Reports success to the client; `bound` is our own address on the server's leg, or what the command asks for.
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
        Fault::BadRequest(_) | Fault::BadReply(_) | Fault::NoRoute(_) | Fault::NoServer(_) | Fault::Limit(_) => {
            Reply::GeneralFailure
        }
    }
}

fn bad<E: Display>(e: HandshakeError<E>) -> Fault {
    Fault::BadRequest(e.to_string())
}

async fn send(leg: &mut impl Stream, bytes: &[u8]) -> Result<(), Fault> {
    leg.write_all(bytes).await.map_err(|e| Fault::BadRequest(format!("the client does not listen: {e}")))
}

fn late(_: Elapsed) -> Fault {
    Fault::Timeout(Step::Handshake)
}

/// Serves a client up to the relay. `None`: it has been served to its end, and its record is filled in.
pub(crate) async fn serve(
    (shared, front): (&Arc<ServerContext>, &Arc<Front>),
    (users, commands): (&Users, &Commands),
    (client, buffer): (&mut Leg, HandshakeBuffer),
    record: &mut Record,
) -> Result<Option<Ready>, Fault> {
    let limit = front.listener.limits.handshake;
    let from = client.source().ip();
    let mut request =
        timeout(buffer.left(limit), ask(client, buffer, (users, commands), from)).await.map_err(late)??;
    record.target = Some(request.target.to_string());
    record.user.clone_from(&request.user);
    shared.roll.is_of(client, request.user.as_deref());
    let command = request.asked.command();
    record.command = (command != Command::Connect).then_some(command);
    let done = match request.asked {
        Asked::Connect => connect_to((shared, front), &request, client, record).await.map(Some),
        // boxed, to keep the tasks of most connections small
        Asked::Bind => Box::pin(bind::serve((shared, front), &commands.bind, &mut request, client)).await.map(Some),
        Asked::UdpAssociate => {
            Box::pin(associate((shared, front), &commands.udp, &request, client, record)).await.map(none)
        }
        Asked::Resolve { name } => Box::pin(look_up((shared, front), &request, client, name)).await.map(none),
    };
    if let Err(fault) = &done {
        // The refusal is logged either way; the client may be gone.
        let _ = timeout(limit, request.refuse(client, fault)).await;
    }
    done
}

fn none((): ()) -> Option<Ready> {
    None
}

async fn connect_to(
    (shared, front): (&ServerContext, &Front),
    request: &SocksRequest,
    client: &mut Leg,
    record: &mut Record,
) -> Result<Ready, Fault> {
    let subject = request.subject(client);
    let reached = connect(shared, &front.listener, client, &subject, &request.target, record).await?;
    record.server = Some(reached.leg.remote());
    let granted = timeout(front.listener.limits.handshake, request.grant(client, reached.leg.local())).await;
    granted.map_err(late)?.map_err(|e| Fault::BadRequest(format!("the client does not listen: {e}")))?;
    Ok(Ready::reached(reached, Leftovers::for_server(request.rest.clone())))
}

async fn associate(
    (shared, front): (&Arc<ServerContext>, &Arc<Front>),
    config: &commands::Udp,
    request: &SocksRequest,
    client: &mut Leg,
    record: &mut Record,
) -> Result<(), Fault> {
    let slot = front.associations.enter(Some(client.source().ip()));
    let _slot = slot.map_err(|_| Fault::Limit(Command::UdpAssociate.as_str()))?;
    let association = udp::Association::open((shared, front), config, client, request);
    let association = association.map_err(Fault::Unreachable)?;
    let address = association.address().map_err(Fault::Unreachable)?;
    let granted = timeout(front.listener.limits.handshake, request.grant(client, address)).await;
    granted.map_err(late)?.map_err(|e| Fault::BadRequest(format!("the client does not listen: {e}")))?;
    Counters::add(&shared.counters.associations);
    association.run(client, record).await;
    Ok(())
}

async fn look_up(
    of: (&ServerContext, &Front),
    request: &SocksRequest,
    client: &mut Leg,
    name: bool,
) -> Result<(), Fault> {
    let limit = of.1.listener.limits.handshake;
    let written = if name {
        let reply = socks5::encode_name(&lookup::backward(of.1, request, client).await?);
        timeout(limit, client.write_all(&reply)).await
    } else {
        let found = lookup::forward(of, request, client).await?;
        timeout(limit, request.grant(client, SocketAddr::new(found.ip(), 0))).await
    };
    written.map_err(late)?.map_err(|e| Fault::BadRequest(format!("the client does not listen: {e}")))
}

#[cfg(test)]
#[path = "socks_tests.rs"]
mod tests;
