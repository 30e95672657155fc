//! Look-ups for clients: the extensions RESOLVE and RESOLVE_PTR of Tor (socks-extensions.txt, 2 and 3).

use super::SocksRequest;
use crate::{
    context::{Front, ServerContext},
    fault::{Fault, Step},
    target::Host,
};
use longsplice_engine::{Leg, name_of};
use std::{io, net::SocketAddr};
use tokio::{sync::Semaphore, task::spawn_blocking, time::timeout};

/// Look-ups of addresses at a time: each takes a thread, and cannot be cancelled.
static BACKWARD: Semaphore = Semaphore::const_new(32);

/// Returns the address of the name that the client asks for, if the rules let it connect there.
pub(super) async fn forward(
    (shared, front): (&ServerContext, &Front),
    request: &SocksRequest,
    client: &Leg,
) -> Result<SocketAddr, Fault> {
    let (target, rules) = (&request.target, &front.listener.rules);
    let subject = request.subject(client);
    rules.check_look_up(&subject, target).map_err(Fault::Denied)?;
    let found = shared.resolver.resolve(target, front.listener.limits.resolve).await?;
    let mut denied = None;
    for address in found.into_iter().filter(|a| a.is_ipv4() || request.says_ipv6()) {
        match rules.check_here(&subject, target, address) {
            Ok(()) => return Ok(address),
            Err(why) => denied = denied.or(Some(why)),
        }
    }
    Err(denied.map_or_else(|| Fault::NoAddress(io::Error::other("none of IPv4")), Fault::Denied))
}

/// Returns the name of the address that the client asks for, if the rules let it connect there.
pub(super) async fn backward(front: &Front, request: &SocksRequest, client: &Leg) -> Result<String, Fault> {
    let target = &request.target;
    let Host::Ip(ip) = target.host else { return Err(Fault::BadRequest("the name of a name is asked for".into())) };
    let address = SocketAddr::new(ip, target.port);
    front.listener.rules.check_here(&request.subject(client), target, address).map_err(Fault::Denied)?;
    let look_up = async {
        let permit = BACKWARD.acquire().await;
        let name = spawn_blocking(move || {
            let _permit = permit; // until it has really ended
            name_of(ip)
        });
        name.await.map_err(io::Error::other)?
    };
    let limit = front.listener.limits.resolve;
    let name = timeout(limit, look_up).await.map_err(|_| Fault::Timeout(Step::Resolve))?.map_err(Fault::NoAddress)?;
    // its length is a byte in the answer
    match name.len() {
        1..=255 => Ok(name),
        _ => Err(Fault::NoAddress(io::Error::other("its name is empty or too long"))),
    }
}
