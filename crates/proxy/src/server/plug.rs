//! Plugs, listeners with one fixed target, whose clients shake hands with the target themselves (`handshake = "end-to-end"`).

use crate::{
    access::Subject,
    context::{Fronts, ServerContext},
    fault::{Fault, Step},
    log::complaints::Complaints,
};
use longsplice_engine::{EndToEndListener, Listener};
use std::{io, net::SocketAddr};

/// Lets the clients of a plug shake hands with its target, if it is configured and possible. Returns the connections. A client
/// that the rules deny, or whose address family the target does not have, is left to `listening`.
pub(crate) fn end_to_end(shared: &ServerContext, fronts: &Fronts, listening: &Listener) -> Option<EndToEndListener> {
    fronts.now().listener.end_to_end()?;
    // There is no line in the access log: the client has not proved its address yet.
    let (counters, complaints, of) = (shared.counters.clone(), Complaints::default(), fronts.clone());
    let lost = move |client: SocketAddr, server: SocketAddr, error: io::Error| {
        let late = error.kind() == io::ErrorKind::TimedOut;
        let fault = if late { Fault::Timeout(Step::Connect) } else { Fault::Unreachable(error) };
        counters.fault(&fault);
        let front = of.now();
        let target = front.listener.end_to_end().map_or_else(|| server.to_string(), ToString::to_string);
        let name = &front.listener.name;
        complaints.tell(&format!("the target {target} of {name} is not reached by {client} at {server}: {fault}"));
    };
    let (resolver, of) = (shared.resolver.clone(), fronts.clone());
    // The thread that handles SYNs runs this, and must not wait for the resolver: the name is followed.
    let choose = move |client: SocketAddr| {
        let (front, subject) = (of.now(), Subject::by(client.ip()));
        let (target, rules) = (front.listener.end_to_end()?, &front.listener.rules);
        rules.check_name(&subject, target).ok()?;
        let fits = |a: &SocketAddr| a.is_ipv4() == client.is_ipv4() && rules.check(&subject, target, *a).is_ok();
        resolver.known(target).into_iter().find(fits)
    };
    match shared.splicer.end_to_end(listening, choose, lost) {
        Ok(pairs) => Some(pairs),
        Err(error) => {
            tracing::warn!(
                "cannot shake hands end to end for {}: the proxy answers its clients itself: {error}",
                fronts.now().listener.listen
            );
            None
        }
    }
}
