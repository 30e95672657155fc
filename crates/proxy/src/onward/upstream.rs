//! Connections through upstream proxies: what is said to a SOCKS or HTTP proxy until it has connected to the target. From then on,
//! its connection is as good as one to the target.
//!
//! If an upstream proxy has a pool, the next server is tried while there is no connection to the target. What that tells of a
//! server is in [`Means`].

use crate::{
    access::{Denied, Upstream, UpstreamProtocol},
    context::ServerContext,
    counters::Counters,
    fault::{Fault, Step},
    limits::Limits,
    log::access_log::Record,
    onward::dial::{STAGGER, first_of},
    pool::{Key, Lease},
    target::{Host, Target},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use longsplice_engine::{Leg, LegOfProxy};
use std::{
    io::{self, ErrorKind},
    net::{IpAddr, SocketAddr},
    slice,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

/// Maximum size in bytes of the head of an HTTP proxy's reply.
const HEAD_MAX: usize = 16 * 1024;

/// What an upstream proxy is needed for, and by whom.
#[derive(Clone, Copy)]
pub(crate) struct For<'a> {
    pub shared: &'a ServerContext,
    pub limits: &'a Limits,
    pub client: &'a Leg,
    /// Whether a connection to this address would come back to the listener.
    pub leads_back: &'a (dyn Fn(SocketAddr) -> bool + Sync),
}

/// Why there is no connection through a server of an upstream proxy, and what that tells of the server.
struct Trouble {
    means: Means,
    fault: Fault,
}

/// Clients choose targets, so nothing that a target can cause may take a proxy out of its pool: once it has been named, only what is
/// not in the proxy's protocol at all tells something of the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Means {
    /// This is its answer about the target: others would say the same.
    Target,
    /// It cannot, but others may.
    Cannot,
    /// It has failed.
    Failed,
}

/// Connects to the target through an upstream proxy, and through those by which that is reached. Returns the place at a server of
/// a pool as well, if there is a pool.
pub(crate) async fn open(
    of: For<'_>,
    upstream: &Upstream,
    target: &Target,
    record: &mut Record,
) -> Result<(Leg, Option<Lease>), Fault> {
    seek(of, upstream, target, record).await.map_err(|trouble| trouble.fault)
}

async fn seek(
    of: For<'_>,
    upstream: &Upstream,
    target: &Target,
    record: &mut Record,
) -> Result<(Leg, Option<Lease>), Trouble> {
    match &upstream.pool {
        None => by_way_of((of, upstream), &upstream.servers, target, record).await,
        Some(pool) => Box::pin(pooled((of, upstream), pool, target, record)).await,
    }
}

/// Connects by way of a server of its pool: of the next one, if one fails before there is a connection to the target.
async fn pooled(
    (of, upstream): (For<'_>, &Upstream),
    name: &Arc<str>,
    target: &Target,
    record: &mut Record,
) -> Result<(Leg, Option<Lease>), Trouble> {
    let counters = &of.shared.counters;
    let about = |fault| Trouble { means: Means::Target, fault };
    // a reload may have removed it with the upstream proxy, for whose last clients it still stands
    let none = || about(Fault::NoServer(name.to_string()));
    let pool = of.shared.opened().pools.get(&**name).cloned().ok_or_else(none)?;
    record.pool = Some(name.clone());
    let key = Key::of(of.client.source().ip());
    let (mut tried, mut why) = (Vec::new(), None::<Trouble>);
    while tried.len() < pool.config.tries as usize {
        let lease = match pool.enter(key, &tried).await {
            Ok(lease) => lease,
            Err(fault) => return Err(why.unwrap_or_else(|| about(fault))),
        };
        if !tried.is_empty() {
            Counters::add(&counters.retries);
        }
        lease.note(record);
        let member = &lease.0;
        match by_way_of((of, upstream), slice::from_ref(&member.target), target, record).await {
            Ok((leg, _)) => {
                member.succeeded(counters, &"it has connected to a target");
                return Ok((leg, Some(lease)));
            }
            Err(trouble) => {
                match trouble.means {
                    Means::Target => return Err(trouble),
                    Means::Cannot => {}
                    Means::Failed => member.failed(counters, &trouble.fault),
                }
                tried.push(member.index);
                // what one says that was asked tells more
                if why.as_ref().is_none_or(|why| why.means != Means::Cannot) {
                    why = Some(trouble);
                }
            }
        }
    }
    Err(why.unwrap_or_else(none))
}

/// Connects by way of one of these servers, all of the same upstream proxy.
async fn by_way_of(
    (of, upstream): (For<'_>, &Upstream),
    servers: &[Target],
    target: &Target,
    record: &mut Record,
) -> Result<(Leg, Option<Lease>), Trouble> {
    let (mut proxy, lease) = match &upstream.through {
        None => (connect(of, upstream, servers).await?, None),
        // the first server only: others would be asked for through the same proxy, which knows more of them than we do
        Some(next) => Box::pin(seek(of, next, &servers[0], record)).await.map_err(Trouble::of_server)?,
    };
    let is_asked = AtomicBool::new(false);
    let asked = timeout(of.limits.connect, ask(&mut proxy, upstream, target, &is_asked)).await;
    let trouble = match asked {
        Ok(Ok(())) => return Ok((proxy, lease)),
        Ok(Err((means, error))) => Trouble { means, fault: Fault::Unreachable(error) },
        // whoever is asked for a host that does not answer is silent as well
        Err(_) => {
            let means = if is_asked.load(Relaxed) { Means::Target } else { Means::Failed };
            Trouble { means, fault: Fault::Timeout(Step::Upstream) }
        }
    };
    of.shared.splicer.discard(proxy);
    Err(trouble)
}

impl Trouble {
    /// Why another proxy has not connected to a server of this one: what its answer is about is this server.
    fn of_server(self) -> Trouble {
        let means = match self.means {
            Means::Target => Means::Failed,
            Means::Cannot => Means::Cannot,
            // it is not reached, and others are not reached through it either
            Means::Failed => Means::Target,
        };
        Trouble { means, ..self }
    }
}

/// Connects to one of these servers.
async fn connect(of: For<'_>, upstream: &Upstream, servers: &[Target]) -> Result<Leg, Trouble> {
    let For { shared, limits, client, leads_back } = of;
    let failed = |fault| Trouble { means: Means::Failed, fault };
    let (mut addresses, mut unknown) = (Vec::new(), None);
    for server in servers {
        match shared.resolver.resolve(server, limits.resolve).await {
            Ok(found) => addresses.extend(found.into_iter().filter(|a| !leads_back(*a))),
            Err(fault) => unknown = Some(fault),
        }
    }
    if addresses.is_empty() {
        // others may come by other listeners
        let back = || Trouble { means: Means::Cannot, fault: Fault::Denied(Denied::Loop) };
        return Err(unknown.map_or_else(back, failed));
    }
    let connecting = first_of(&addresses, STAGGER, |a| shared.splicer.connect(a, client));
    let connected = timeout(limits.connect, connecting).await.map_err(|_| failed(Fault::Timeout(Step::Upstream)))?;
    connected.map_err(|e| {
        servers.iter().for_each(|server| shared.resolver.doubt(server));
        failed(Fault::Unreachable(io::Error::new(e.kind(), format!("upstream proxy {}: {e}", upstream.name))))
    })
}

/// Why a proxy does not connect.
type Refused = (Means, io::Error);

/// Asks a proxy for a connection to the target. `is_asked`: whether it knows the target yet.
async fn ask(proxy: &mut Leg, upstream: &Upstream, target: &Target, is_asked: &AtomicBool) -> Result<(), Refused> {
    let login = upstream.login.as_ref().map(|(user, password)| (user.as_str(), password.as_str()));
    let asked = match upstream.protocol {
        UpstreamProtocol::Socks5 => match greet_socks(proxy, login).await {
            Ok(()) => {
                is_asked.store(true, Relaxed);
                ask_socks(proxy, target).await
            }
            Err(e) => Err((Means::Failed, e)),
        },
        UpstreamProtocol::Http => {
            is_asked.store(true, Relaxed);
            ask_http(proxy, login, target).await
        }
    };
    asked.map_err(|(means, e)| {
        let why = match e.kind() {
            ErrorKind::UnexpectedEof => "it has closed the connection".to_owned(),
            _ => e.to_string(),
        };
        (means, io::Error::new(e.kind(), format!("upstream proxy {}: {why}", upstream.name)))
    })
}

/// It has broken off, or does not make sense, after it was asked for a target.
fn broken(e: io::Error) -> Refused {
    (Means::Cannot, e)
}

/// RFC 1928, 3, and RFC 1929 for the password. No target is named yet.
async fn greet_socks(proxy: &mut Leg, login: Option<(&str, &str)>) -> io::Result<()> {
    const NO_LOGIN: u8 = 0;
    const PASSWORD: u8 = 2;
    let offered: &[u8] = if login.is_some() { &[5, 2, NO_LOGIN, PASSWORD] } else { &[5, 1, NO_LOGIN] };
    proxy.write_all(offered).await?;
    match (read::<2>(proxy).await?, login) {
        ([5, NO_LOGIN], _) => Ok(()),
        ([5, PASSWORD], Some((user, password))) => {
            let mut message = vec![1];
            counted(&mut message, user.as_bytes());
            counted(&mut message, password.as_bytes());
            proxy.write_all(&message).await?;
            if read::<2>(proxy).await?[1] == 0 { Ok(()) } else { Err(denied("it refuses our password")) }
        }
        ([5, 0xff], _) => Err(denied("it accepts no login that we have")),
        _ => Err(garbled()),
    }
}

/// RFC 1928, 4 to 6.
async fn ask_socks(proxy: &mut Leg, target: &Target) -> Result<(), Refused> {
    let mut request = vec![5, 1, 0];
    match &target.host {
        Host::Ip(IpAddr::V4(ip)) => request.extend([&[1][..], &ip.octets()].concat()),
        Host::Ip(IpAddr::V6(ip)) => request.extend([&[4][..], &ip.octets()].concat()),
        Host::Name(name) => {
            request.push(3);
            counted(&mut request, name.as_bytes());
        }
    }
    request.extend(target.port.to_be_bytes());
    proxy.write_all(&request).await.map_err(broken)?;
    let [version, reply, _, kind] = read::<4>(proxy).await.map_err(broken)?;
    if version != 5 {
        return Err(broken(garbled()));
    }
    if reply != 0 {
        return Err(refused(reply));
    }
    // its own address towards the target, and port
    let rest = match kind {
        1 => 4 + 2,
        4 => 16 + 2,
        3 => usize::from(read::<1>(proxy).await.map_err(broken)?[0]) + 2,
        _ => return Err(broken(garbled())),
    };
    proxy.read_exact(&mut [0; 255 + 2][..rest]).await.map(drop).map_err(broken)
}

/// Appends a text of at most 255 bytes, and its length before.
fn counted(message: &mut Vec<u8>, text: &[u8]) {
    message.push(u8::try_from(text.len()).expect("names, users and passwords have at most 255 bytes"));
    message.extend(text);
}

/// The answers of RFC 1928, section 6.
fn refused(reply: u8) -> Refused {
    let error = match reply {
        2 => denied("it does not allow the connection"),
        3 => io::Error::new(ErrorKind::NetworkUnreachable, "no route from there"),
        4 => io::Error::new(ErrorKind::HostUnreachable, "the host is not reachable from there"),
        5 => io::Error::new(ErrorKind::ConnectionRefused, "the host refuses"),
        6 => io::Error::new(ErrorKind::TimedOut, "the host does not answer"),
        other => io::Error::other(format!("it cannot connect (reply {other})")),
    };
    (if (2..=6).contains(&reply) { Means::Target } else { Means::Cannot }, error)
}

/// RFC 9110, 9.3.6.
async fn ask_http(proxy: &mut Leg, login: Option<(&str, &str)>, target: &Target) -> Result<(), Refused> {
    let authorization = login.map_or_else(String::new, |(user, password)| {
        format!("Proxy-Authorization: Basic {}\r\n", STANDARD.encode(format!("{user}:{password}")))
    });
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{authorization}\r\n");
    proxy.write_all(request.as_bytes()).await.map_err(broken)?;
    loop {
        let head = read_head(proxy).await.map_err(broken)?;
        // whatever the target is, it would speak HTTP
        match status_of(&head).ok_or_else(|| (Means::Failed, garbled()))? {
            100..200 => {} // another reply follows (RFC 9110, 15.2)
            200..300 => return Ok(()),
            status => return Err(refused_by_status(status)),
        }
    }
}

fn refused_by_status(status: u16) -> Refused {
    let unreachable = || io::Error::new(ErrorKind::HostUnreachable, "the host is not reachable from there");
    match status {
        // some say so as well of targets that they do not allow to anybody
        401 | 407 => (Means::Cannot, denied("it wants another login")),
        403 | 451 => (Means::Target, denied("it does not allow the connection")),
        502 => (Means::Target, unreachable()),
        // it may be busy, or mean the host
        503 => (Means::Cannot, unreachable()),
        504 => (Means::Target, io::Error::new(ErrorKind::TimedOut, "the host does not answer")),
        other => (Means::Cannot, io::Error::other(format!("it cannot connect (status {other})"))),
    }
}

/// Reads up to the end of a head, and nothing of what follows: that is for the client.
async fn read_head(proxy: &mut Leg) -> io::Result<Vec<u8>> {
    let (mut head, mut ahead) = (Vec::new(), [0; 1024]);
    loop {
        let n = proxy.peek(&mut ahead).await?;
        if n == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let before = head.len();
        head.extend(&ahead[..n]);
        let end = end_of_head(&head);
        let taken = end.unwrap_or(head.len()) - before;
        head.truncate(before + taken);
        proxy.read_exact(&mut ahead[..taken]).await?;
        if end.is_some() {
            return Ok(head);
        }
        if head.len() > HEAD_MAX {
            return Err(garbled());
        }
    }
}

/// Returns the length of the head, with the empty line. Lines may end without CR (RFC 9112, 2.2).
fn end_of_head(bytes: &[u8]) -> Option<usize> {
    let mut line = 0;
    for (i, _) in bytes.iter().enumerate().filter(|(_, b)| **b == b'\n') {
        if matches!(&bytes[line..i], [] | [b'\r']) && line > 0 {
            return Some(i + 1);
        }
        line = i + 1;
    }
    None
}

fn status_of(head: &[u8]) -> Option<u16> {
    let rest = head.strip_prefix(b"HTTP/1.1 ").or_else(|| head.strip_prefix(b"HTTP/1.0 "))?;
    let (digits, after) = rest.split_at_checked(3)?;
    let ends = matches!(after.first(), Some(b' ' | b'\r' | b'\n'));
    std::str::from_utf8(digits).ok().filter(|d| ends && d.bytes().all(|b| b.is_ascii_digit()))?.parse().ok()
}

async fn read<const N: usize>(proxy: &mut Leg) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    proxy.read_exact(&mut bytes).await?;
    Ok(bytes)
}

fn denied(why: &'static str) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, why)
}

fn garbled() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "its answer is not in its protocol")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_end_with_an_empty_line() {
        for (bytes, want) in [
            ("HTTP/1.1 200 OK\r\n\r\nSSH-2.0", Some(19)),
            ("HTTP/1.1 200 OK\nA: b\n\nx", Some(22)),
            ("HTTP/1.1 200 OK\r\n\r", None),
            ("\r\n\r\n", Some(4)),
            ("\r\n", None),
            ("", None),
        ] {
            assert_eq!(end_of_head(bytes.as_bytes()), want, "{bytes:?}");
        }
    }

    #[test]
    fn statuses() {
        for (line, want) in [
            ("HTTP/1.1 200 Connection established\r\n", Some(200)),
            ("HTTP/1.0 407\r\n", Some(407)),
            ("HTTP/1.1 2000 OK\r\n", None),
            ("HTTP/1.1 +20 OK\r\n", None),
            ("HTTP/2 200\r\n", None),
            ("HTTP/1.1 20", None),
        ] {
            assert_eq!(status_of(line.as_bytes()), want, "{line:?}");
        }
    }
}
