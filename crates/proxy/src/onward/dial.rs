//! Connects to a target: resolves it, checks every address, and then tries the allowed addresses,
//! each a little after the one before (RFC 8305, "Happy Eyeballs", section 5, in its simplest form). Where the rules or the
//! listener lead it, it goes through an upstream proxy, or to a server of a pool instead.

use super::{pooled, upstream::For};
use crate::{
    access::{Denied, Rules, Subject, Way},
    config::ListenerConfig,
    context::{ServerContext, led::Led},
    fault::{Fault, Step},
    log::access_log::Record,
    pool::Lease,
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

/// A connection to a server.
pub struct Reached {
    /// The connection.
    pub leg: Leg,
    /// The place at a server or proxy of a pool, if there is a pool.
    pub lease: Option<Lease>,
    /// Where it goes.
    pub way: Way,
    /// The address that the rules have judged; none: the name alone.
    pub known: Option<SocketAddr>,
}

impl Reached {
    /// Returns the connection, the place at a server of a pool, and how it is led, if it does not go straight to its target.
    pub fn into_parts(self) -> (Leg, Option<Lease>, Option<Led>) {
        let Reached { leg, lease, way, known } = self;
        let upstream = match way {
            Way::Direct => return (leg, lease, None),
            Way::Through(upstream) => Some(upstream.name.clone().into_boxed_str()),
            Way::Pool(_) => None,
        };
        (leg, lease, Some(Led { upstream, judged: known, ..Led::default() }))
    }
}

/// Where a connection goes, and the addresses of its target that the rules allow; none, if they know the name alone.
struct Plan {
    way: Way,
    addresses: Vec<SocketAddr>,
}

/// Connects to `target` on behalf of `client`, or to where that is led, if `rules` allow the request and it does not lead back to
/// the listener. `at`: the address, where it is not the resolver that knows it.
pub async fn dial(
    shared: &ServerContext,
    listener: &ListenerConfig,
    rules: &Rules,
    client: &Leg,
    subject: &Subject<'_>,
    (target, at): (&Target, Option<SocketAddr>),
    record: &mut Record,
) -> Result<Reached, Fault> {
    let opened = shared.opened();
    let leads_back = |to| opened.listening.leads_back(listener.listen, to, |t| shared.resolver.known(t));
    let Plan { way, addresses } = plan(shared, listener, rules, subject, (target, at), &leads_back).await?;
    let known = addresses.first().copied();
    let (leg, lease, known) = match &way {
        Way::Direct => {
            let leg = connect(shared, listener, client, target, &addresses).await?;
            let known = Some(leg.remote());
            (leg, None, known)
        }
        Way::Through(upstream) => {
            record.upstream = Some(upstream.name.as_str().into());
            // its own address is not the target's: of that, the rules may know nothing
            let asked = known.map(Target::from);
            let of = For { shared, limits: &listener.limits, client, leads_back: &leads_back };
            let opening = super::upstream::open(of, upstream, asked.as_ref().unwrap_or(target), record);
            let (leg, lease) = Box::pin(opening).await?;
            (leg, lease, known)
        }
        Way::Pool(pool) => {
            let connecting = pooled::connect(shared, (None, listener), client, subject, pool, record);
            let (leg, lease) = Box::pin(connecting).await?;
            (leg, Some(lease), known)
        }
    };
    if rules.are_of_listener()
        // they may have changed meanwhile
        && let Err(why) = shared.roll.decided(client, rules, subject, (target, known))
    {
        shared.splicer.discard(leg);
        return Err(Fault::Denied(why));
    }
    Ok(Reached { leg, lease, way, known })
}

/// Decides where a connection goes. A name is not looked up if its address does not matter. Otherwise, the first address decides
/// that the rules allow, and those that they lead elsewhere are left out.
async fn plan(
    shared: &ServerContext,
    listener: &ListenerConfig,
    rules: &Rules,
    subject: &Subject<'_>,
    (target, at): (&Target, Option<SocketAddr>),
    leads_back: &(dyn Fn(SocketAddr) -> bool + Sync),
) -> Result<Plan, Fault> {
    rules.check_name(subject, target).map_err(Fault::Denied)?;
    let mut addresses = match at {
        Some(at) => vec![at],
        None => match listener.by_name(rules, subject, target).map_err(Fault::Denied)? {
            Some((_, way)) => return Ok(Plan { way, addresses: Vec::new() }),
            None => shared.resolver.resolve(target, listener.limits.resolve).await?,
        },
    };
    let (mut first, mut denied) = (None, None);
    addresses.retain(|address| {
        let way = rules.judge(subject, target, *address).map(|allowed| listener.way(allowed.way, target, at));
        let way = match way {
            // What is intercepted has no listening socket to come back to. Servers of pools are looked at when one is chosen.
            Ok(Way::Direct | Way::Through(_)) if at.is_none() && leads_back(*address) => Err(Denied::Loop),
            way => way,
        };
        match way {
            Ok(way) => *first.get_or_insert_with(|| way.clone()) == way,
            Err(why) => {
                denied.get_or_insert(why);
                false
            }
        }
    });
    match (first, denied) {
        (Some(way), _) => Ok(Plan { way, addresses }),
        (None, Some(why)) => Err(Fault::Denied(why)),
        (None, None) => Err(Fault::NoAddress(io::Error::other("it has none"))),
    }
}

/// Connects to a server that the configuration names, unless that leads back to the listener. No rule is asked.
pub async fn dial_server(
    shared: &ServerContext,
    listener: &ListenerConfig,
    client: &Leg,
    server: &Target,
) -> Result<Leg, Fault> {
    let mut addresses = shared.resolver.resolve(server, listener.limits.resolve).await?;
    let opened = shared.opened();
    addresses.retain(|to| !opened.listening.leads_back(listener.listen, *to, |t| shared.resolver.known(t)));
    if addresses.is_empty() {
        return Err(Fault::Denied(Denied::Loop));
    }
    connect(shared, listener, client, server, &addresses).await
}

/// Connects to one of the addresses of the target.
async fn connect(
    shared: &ServerContext,
    listener: &ListenerConfig,
    client: &Leg,
    target: &Target,
    addresses: &[SocketAddr],
) -> Result<Leg, Fault> {
    let connecting = first_of(addresses, STAGGER, |a| shared.splicer.connect(a, client));
    let connected = timeout(listener.limits.connect, connecting).await;
    if !matches!(connected, Ok(Ok(_))) {
        shared.resolver.doubt(target);
    }
    let late = |_| {
        if listener.shows_clients {
            let to = format!("{target} does not answer {} of {}", client.source().ip(), listener.name);
            let why = "with source = \"client\", answers have to come through this machine";
            shared.silent.tell(&format!("{to}: {why}"));
        }
        Fault::Timeout(Step::Connect)
    };
    connected.map_err(late)?.map_err(Fault::Unreachable)
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
