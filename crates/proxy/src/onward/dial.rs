//! Connects to a target: resolves it, checks every address, and then tries the allowed addresses,
//! each a little after the one before (RFC 8305, "Happy Eyeballs", section 5, in its simplest form).

use crate::{
    access::{Denied, Rules, Subject},
    config::ListenerConfig,
    context::ServerContext,
    fault::{Fault, Step},
    target::Target,
};
use longsplice_engine::Leg;
use std::{
    future::{Future, poll_fn},
    io,
    net::SocketAddr,
    pin::Pin,
    task::Poll,
    time::Duration,
};
use tokio::time::{Instant, sleep_until, timeout};

/// Connection Attempt Delay (RFC 8305, section 5).
pub(super) const STAGGER: Duration = Duration::from_millis(250);

/// Connects to `target` on behalf of `client`, if `rules` allow the request and it does not lead back to the listener. `at`: the
/// address, where it is not the resolver that knows it.
pub async fn dial(
    shared: &ServerContext,
    listener: &ListenerConfig,
    rules: &Rules,
    client: &Leg,
    subject: &Subject<'_>,
    (target, at): (&Target, Option<SocketAddr>),
) -> Result<Leg, Fault> {
    let (resolver, limits) = (&shared.resolver, &listener.limits);
    rules.check_name(subject, target).map_err(Fault::Denied)?;
    let upstream = listener.upstream.as_deref().filter(|upstream| upstream.leads_to(target, at));
    let is_looked_up_there = upstream.is_some_and(|u| u.resolve != Some(true) && target.host.ip().is_none());
    let mut addresses = match at {
        Some(at) => vec![at],
        None if is_looked_up_there => Vec::new(),
        None => resolver.resolve(target, limits.resolve).await?,
    };
    let opened = shared.opened();
    let leads_back = |to| opened.listening.leads_back(listener.listen, to, |t| resolver.known(t));
    let mut denied = None;
    addresses.retain(|address| {
        let checked = match rules.check(subject, target, *address) {
            // What is intercepted has no listening socket to come back to.
            Ok(()) if at.is_none() && leads_back(*address) => Err(Denied::Loop),
            checked => checked,
        };
        checked.map_err(|why| denied.get_or_insert(why)).is_ok()
    });
    // All that there are were removed, unless there are none because they are looked up elsewhere.
    if let (true, Some(why)) = (addresses.is_empty(), denied) {
        return Err(Fault::Denied(why));
    }
    let (server, known) = match upstream {
        Some(upstream) => {
            // its own address is not the target's: of that, the rules may know nothing
            let known = addresses.first().copied();
            if known.is_none() {
                rules.check_known(subject, target, None).map_err(Fault::Denied)?;
            }
            let asked = known.map(Target::from);
            let asked = asked.as_ref().unwrap_or(target);
            let opening = super::upstream::open((shared, limits), client, upstream, asked, &leads_back);
            (Box::pin(opening).await?, known)
        }
        None => {
            let connecting = first_of(&addresses, STAGGER, |a| shared.splicer.connect(a, client));
            let connected = timeout(limits.connect, connecting).await;
            if !matches!(connected, Ok(Ok(_))) {
                resolver.doubt(target);
            }
            let late = |_| {
                if listener.shows_clients {
                    let to = format!("{target} does not answer {} of {}", client.source().ip(), listener.name);
                    let why = "with source = \"client\", answers have to come through this machine";
                    shared.silent.tell(&format!("{to}: {why}"));
                }
                Fault::Timeout(Step::Connect)
            };
            let server = connected.map_err(late)?.map_err(Fault::Unreachable)?;
            let known = Some(server.remote());
            (server, known)
        }
    };
    decided(shared, rules, (client, subject), (target, known), server)
}

/// Notes what the rules have allowed. Fails if they have changed meanwhile, and deny it. `known`: the address of the target.
fn decided(
    shared: &ServerContext,
    rules: &Rules,
    (client, subject): (&Leg, &Subject<'_>),
    (target, known): (&Target, Option<SocketAddr>),
    server: Leg,
) -> Result<Leg, Fault> {
    if rules.are_of_listener()
        && let Err(why) = shared.roll.decided(client, rules, subject, (target, known))
    {
        shared.splicer.discard(server);
        return Err(Fault::Denied(why));
    }
    Ok(server)
}

/// Returns the first connection that is established. The next address is tried when `stagger`
/// has passed or an attempt has failed. Attempts that are still running then are dropped.
pub(super) async fn first_of<T, F>(
    addresses: &[SocketAddr],
    stagger: Duration,
    connect: impl Fn(SocketAddr) -> F,
) -> io::Result<T>
where
    F: Future<Output = io::Result<T>>,
{
    let mut untried = addresses.iter().copied();
    let mut attempts: Vec<Pin<Box<F>>> = Vec::new();
    let mut error: Option<io::Error> = None;
    loop {
        if let Some(address) = untried.next() {
            attempts.push(Box::pin(connect(address)));
        }
        if attempts.is_empty() {
            return Err(error.unwrap_or_else(|| io::Error::other("no address to connect to")));
        }
        let wait = if untried.len() > 0 { Some(Instant::now() + stagger) } else { None };
        tokio::select! {
            done = first_done(&mut attempts) => match done {
                Ok(connected) => return Ok(connected),
                Err(e) => error = Some(worse(error, e)),
            },
            () = sleep_until(wait.unwrap_or_else(Instant::now)), if wait.is_some() => {}
        }
    }
}

/// Waits for one of the attempts, removes it and returns its result.
async fn first_done<T, F: Future<Output = T>>(attempts: &mut Vec<Pin<Box<F>>>) -> T {
    poll_fn(|cx| {
        for i in 0..attempts.len() {
            if let Poll::Ready(done) = attempts[i].as_mut().poll(cx) {
                drop(attempts.swap_remove(i));
                return Poll::Ready(done);
            }
        }
        Poll::Pending
    })
    .await
}

/// Returns the more informative of two errors: a host that refuses is at least reachable.
fn worse(a: Option<io::Error>, b: io::Error) -> io::Error {
    let rank = |e: &io::Error| match e.kind() {
        io::ErrorKind::ConnectionRefused => 0,
        io::ErrorKind::TimedOut => 1,
        io::ErrorKind::HostUnreachable => 2,
        io::ErrorKind::NetworkUnreachable => 3,
        _ => 4,
    };
    match a {
        Some(a) if rank(&a) <= rank(&b) => a,
        _ => b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{cell::RefCell, io::ErrorKind};

    const MS: Duration = Duration::from_millis(1);

    /// The port number selects the result of an attempt: 1 connects, 2 is refused, 3 hangs, 4 has no route.
    async fn run(ports: &[u16], stagger: Duration) -> (io::Result<u16>, Vec<u16>) {
        let addresses: Vec<_> = ports.iter().map(|p| SocketAddr::from(([192, 0, 2, 1], *p))).collect();
        let tried = RefCell::new(Vec::new());
        let connect = |a: SocketAddr| {
            tried.borrow_mut().push(a.port());
            async move {
                match a.port() {
                    1 => Ok(1),
                    2 => Err(ErrorKind::ConnectionRefused.into()),
                    3 => std::future::pending().await,
                    _ => Err(ErrorKind::NetworkUnreachable.into()),
                }
            }
        };
        let r = timeout(1000 * MS, first_of(&addresses, stagger, connect)).await;
        let r = r.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()));
        (r, tried.into_inner())
    }

    #[tokio::test]
    async fn an_attempt_that_hangs_is_overtaken() {
        let (r, tried) = run(&[3, 1, 1], 10 * MS).await;
        assert_eq!((r.unwrap(), tried), (1, vec![3, 1]));
    }

    #[tokio::test]
    async fn an_attempt_that_fails_is_followed_at_once() {
        let (r, tried) = run(&[2, 4, 1], 60_000 * MS).await;
        assert_eq!((r.unwrap(), tried), (1, vec![2, 4, 1]));
    }

    #[tokio::test]
    async fn the_first_success_is_the_last_attempt() {
        let (r, tried) = run(&[1, 1], 10 * MS).await;
        assert_eq!((r.unwrap(), tried), (1, vec![1]));
    }

    #[tokio::test]
    async fn of_many_errors_the_most_telling() {
        assert_eq!(run(&[4, 2, 4], MS).await.0.unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert_eq!(run(&[2, 4], MS).await.0.unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert_eq!(run(&[4], MS).await.0.unwrap_err().kind(), ErrorKind::NetworkUnreachable);
        assert!(run(&[], MS).await.0.is_err());
    }
}
