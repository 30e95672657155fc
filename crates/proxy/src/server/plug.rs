//! Plugs, listeners with one fixed target, whose clients shake hands with the target themselves (`handshake = "end-to-end"`).

use crate::{
    access::Subject,
    config::ListenerConfig,
    context::ServerContext,
    fault::{Fault, Step},
    log::complaints::Complaints,
};
use longsplice_engine::{EndToEndListener, Listener};
use std::{io, net::SocketAddr};

/// Lets the clients of a plug shake hands with its target, if it is configured and possible. Returns the connections. A client
/// that the rules deny, or whose address family the target does not have, is left to `listening`.
pub(crate) fn end_to_end(
    shared: &ServerContext,
    listener: &ListenerConfig,
    listening: &Listener,
) -> Option<EndToEndListener> {
    let target = listener.end_to_end()?.clone();
    // There is no line in the access log: the client has not proved its address yet.
    let (counters, complaints, of) = (shared.counters.clone(), Complaints::default(), target.clone());
    let lost = move |client: SocketAddr, server: SocketAddr, error: io::Error| {
        let late = error.kind() == io::ErrorKind::TimedOut;
        let fault = if late { Fault::Timeout(Step::Connect) } else { Fault::Unreachable(error) };
        counters.fault(&fault);
        complaints.tell(&format!("the target {of} of a plug is not reached by {client} at {server}: {fault}"));
    };
    let (resolver, rules) = (shared.resolver.clone(), listener.rules.clone());
    // The thread that handles SYNs runs this, and must not wait for the resolver: the name is followed.
    let choose = move |client: SocketAddr| {
        let subject = Subject::by(client.ip());
        rules.check_name(&subject, &target).ok()?;
        let fits = |a: &SocketAddr| a.is_ipv4() == client.is_ipv4() && rules.check(&subject, &target, *a).is_ok();
        resolver.known(&target).into_iter().find(fits)
    };
    match shared.splicer.end_to_end(listening, choose, lost) {
        Ok(pairs) => Some(pairs),
        Err(error) => {
            tracing::warn!(
                "cannot shake hands end to end for {}: the proxy answers its clients itself: {error}",
                listener.listen
            );
            None
        }
    }
}
