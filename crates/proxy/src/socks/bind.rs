//! BIND (RFC 1928, section 4): one connection from a host that the client knows of, such as an FTP server in active mode.
//!
//! `ask -> listen -> first answer -> one connection of the peer -> second answer -> relay`. Only the peer that the client has named
//! gets in, whatever its port; others are reset and counted. The connection is tracked from its SYN on, and spliced like others.

use super::{SocksRequest, late, ports};
use crate::{
    access::{Denied, Subject},
    commands::{Bind, Command},
    context::{Front, ServerContext},
    counters::Counters,
    fault::{Fault, Step},
    onward::Ready,
    target::Host,
};
use bytes::BytesMut;
use longsplice_engine::{BoundSocket, Leg, LegOfProxy, Listener, SpliceWhen};
use std::{
    io,
    net::{IpAddr, SocketAddr},
};
use tokio::{io::AsyncReadExt, time::timeout};

/// Bytes that a client may send before its peer is there.
const EARLY: usize = 16 * 1024;

/// Who may connect.
enum Peers {
    /// Hosts of the target that the rules allow.
    Named(Vec<IpAddr>),
    /// Whoever the rules allow.
    Any,
}

/// Serves the command up to the relay.
pub(super) async fn serve(
    (shared, front): (&ServerContext, &Front),
    config: &Bind,
    request: &mut SocksRequest,
    client: &mut Leg,
) -> Result<Ready, Fault> {
    let limit = front.listener.limits.handshake;
    let (client_ip, user) = (client.source().ip(), request.user.clone());
    let _slot = front.binds.enter(Some(client_ip)).map_err(|_| Fault::Limit(Command::Bind.as_str()))?;
    let (peers, local) = peers(shared, front, config, request, client).await?;
    let listener = listen(shared, front, config, local).await.map_err(Fault::Unreachable)?;
    let bound = listener.local_addr().map_err(Fault::Unreachable)?;
    timeout(limit, request.grant(client, bound)).await.map_err(late)?.map_err(gone)?;
    let mut early = BytesMut::from(&request.rest[..]);
    let peer = timeout(config.wait, async {
        loop {
            let peer = tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok(peer) => peer,
                    // one that was gone at once; for lack of descriptors, the wait is the engine's
                    Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => continue,
                    Err(e) => return Err(Fault::Unreachable(e)),
                },
                read = client.read_buf(&mut early), if early.len() < EARLY => match read {
                    Ok(1..) => continue,
                    Ok(0) => return Err(Fault::BadRequest("the client has left before its peer came".into())),
                    Err(e) => return Err(gone(e)),
                },
            };
            if may_enter(front, &peers, &Subject::by(client_ip).of(user.as_deref()), peer.remote()) {
                return Ok(peer);
            }
            Counters::add(&shared.counters.bind_strangers);
            peer.reset_at_close();
            shared.splicer.discard(peer);
        }
    });
    let server = peer.await.map_err(|_| Fault::Timeout(Step::Bind))??;
    drop(listener);
    Counters::add(&shared.counters.bound);
    request.rest = early.freeze();
    match timeout(limit, request.grant(client, server.remote())).await.map_err(late).and_then(|r| r.map_err(gone)) {
        Ok(()) => Ok(Ready::with(server, request.rest.clone())),
        Err(fault) => {
            server.reset_at_close();
            shared.splicer.discard(server);
            Err(fault)
        }
    }
}

fn gone(e: io::Error) -> Fault {
    Fault::BadRequest(format!("the client does not listen: {e}"))
}

fn may_enter(front: &Front, peers: &Peers, subject: &Subject<'_>, peer: SocketAddr) -> bool {
    match peers {
        Peers::Named(all) => all.contains(&peer.ip().to_canonical()),
        Peers::Any => front.listener.rules.check_here(subject, &peer.into(), peer).is_ok(),
    }
}

/// Returns who may connect, and the address on which they reach us.
async fn peers(
    shared: &ServerContext,
    front: &Front,
    config: &Bind,
    request: &SocksRequest,
    client: &Leg,
) -> Result<(Peers, SocketAddr), Fault> {
    let (target, rules) = (&request.target, &front.listener.rules);
    let subject = request.subject(client);
    if let Host::Ip(ip) = target.host
        && ip.is_unspecified()
    {
        return match config.any_peer {
            true => Ok((Peers::Any, client.local())),
            false => Err(Fault::Denied(Denied::Unnamed)),
        };
    }
    rules.check_name_here(&subject, target).map_err(Fault::Denied)?;
    let found = shared.resolver.resolve(target, front.listener.limits.resolve).await?;
    let (mut allowed, mut denied): (Vec<IpAddr>, _) = (Vec::new(), None);
    for address in found.into_iter().filter(|a| a.is_ipv4() || request.says_ipv6()) {
        match rules.check_here(&subject, target, address) {
            // one socket has one family
            Ok(()) if allowed.first().is_none_or(|first| first.is_ipv4() == address.is_ipv4()) => {
                allowed.push(address.ip());
            }
            Ok(()) => {}
            Err(why) => drop(denied.get_or_insert(why)),
        }
    }
    let Some(first) = allowed.first() else {
        let none = || Fault::NoAddress(io::Error::other("none that this version of SOCKS can say"));
        return Err(denied.map_or_else(none, Fault::Denied));
    };
    // the port matters to no route, and the client may have named none
    let local = shared.splicer.source_for(SocketAddr::new(*first, target.port.max(1))).map_err(Fault::Unreachable)?;
    Ok((Peers::Named(allowed), SocketAddr::new(local, 0)))
}

async fn listen(shared: &ServerContext, front: &Front, config: &Bind, at: SocketAddr) -> io::Result<Listener> {
    let socket = ports::within(config.ports, at, BoundSocket::bind)?;
    match front.listener.policy.when {
        SpliceWhen::Never => shared.splicer.listen_to_copy(socket).await,
        _ => shared.splicer.listen_for_a_while(socket).await,
    }
}
