//! Connections through upstream proxies: what is said to a SOCKS or HTTP proxy until it has connected to the target. From then on,
//! its connection is as good as one to the target.

use crate::{
    access::Denied,
    config::upstream::{Upstream, UpstreamProtocol},
    context::ServerContext,
    fault::{Fault, Step},
    limits::Limits,
    onward::dial::{STAGGER, first_of},
    target::{Host, Target},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use longsplice_engine::{Leg, LegOfProxy};
use std::{
    io::{self, ErrorKind},
    net::{IpAddr, SocketAddr},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

/// Maximum size in bytes of the head of an HTTP proxy's reply.
const HEAD_MAX: usize = 16 * 1024;

/// Connects to the target through an upstream proxy, and through those by which that is reached. `leads_back`: whether a
/// connection to this address would come back to the listener.
pub(crate) async fn open(
    (shared, limits): (&ServerContext, &Limits),
    client: &Leg,
    upstream: &Upstream,
    target: &Target,
    leads_back: &(dyn Fn(SocketAddr) -> bool + Sync),
) -> Result<Leg, Fault> {
    let mut proxy = match &upstream.through {
        None => connect((shared, limits), client, upstream, leads_back).await?,
        // the first server only: others would be asked for through the same proxy, which knows more of them than we do
        Some(next) => Box::pin(open((shared, limits), client, next, &upstream.servers[0], leads_back)).await?,
    };
    let asked = timeout(limits.connect, ask(&mut proxy, upstream, target)).await;
    match asked.map_err(|_| Fault::Timeout(Step::Upstream)).and_then(|asked| asked.map_err(Fault::Unreachable)) {
        Ok(()) => Ok(proxy),
        Err(fault) => {
            shared.splicer.discard(proxy);
            Err(fault)
        }
    }
}

/// Connects to one of its servers.
async fn connect(
    (shared, limits): (&ServerContext, &Limits),
    client: &Leg,
    upstream: &Upstream,
    leads_back: &(dyn Fn(SocketAddr) -> bool + Sync),
) -> Result<Leg, Fault> {
    let (mut addresses, mut failed) = (Vec::new(), None);
    for server in &upstream.servers {
        match shared.resolver.resolve(server, limits.resolve).await {
            Ok(found) => addresses.extend(found.into_iter().filter(|a| !leads_back(*a))),
            Err(fault) => failed = Some(fault),
        }
    }
    if addresses.is_empty() {
        return Err(failed.unwrap_or(Fault::Denied(Denied::Loop)));
    }
    let connecting = first_of(&addresses, STAGGER, |a| shared.splicer.connect(a, client));
    let connected = timeout(limits.connect, connecting).await.map_err(|_| Fault::Timeout(Step::Upstream))?;
    connected.map_err(|e| {
        upstream.servers.iter().for_each(|server| shared.resolver.doubt(server));
        Fault::Unreachable(io::Error::new(e.kind(), format!("upstream proxy {}: {e}", upstream.name)))
    })
}

/// Asks a proxy for a connection to the target.
async fn ask(proxy: &mut Leg, upstream: &Upstream, target: &Target) -> io::Result<()> {
    let login = upstream.login.as_ref().map(|(user, password)| (user.as_str(), password.as_str()));
    let asked = match upstream.protocol {
        UpstreamProtocol::Socks5 => ask_socks(proxy, login, target).await,
        UpstreamProtocol::Http => ask_http(proxy, login, target).await,
    };
    asked.map_err(|e| {
        let why = match e.kind() {
            ErrorKind::UnexpectedEof => "it has closed the connection".to_owned(),
            _ => e.to_string(),
        };
        io::Error::new(e.kind(), format!("upstream proxy {}: {why}", upstream.name))
    })
}

/// RFC 1928, and RFC 1929 for the password.
async fn ask_socks(proxy: &mut Leg, login: Option<(&str, &str)>, target: &Target) -> io::Result<()> {
    const NO_LOGIN: u8 = 0;
    const PASSWORD: u8 = 2;
    let offered: &[u8] = if login.is_some() { &[5, 2, NO_LOGIN, PASSWORD] } else { &[5, 1, NO_LOGIN] };
    proxy.write_all(offered).await?;
    match (read::<2>(proxy).await?, login) {
        ([5, NO_LOGIN], _) => {}
        ([5, PASSWORD], Some((user, password))) => {
            let mut message = vec![1];
            counted(&mut message, user.as_bytes());
            counted(&mut message, password.as_bytes());
            proxy.write_all(&message).await?;
            if read::<2>(proxy).await?[1] != 0 {
                return Err(denied("it refuses our password"));
            }
        }
        ([5, 0xff], _) => return Err(denied("it accepts no login that we have")),
        _ => return Err(garbled()),
    }
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
    proxy.write_all(&request).await?;
    let [version, reply, _, kind] = read::<4>(proxy).await?;
    if version != 5 {
        return Err(garbled());
    }
    if reply != 0 {
        return Err(refused(reply));
    }
    // its own address towards the target, and port
    let rest = match kind {
        1 => 4 + 2,
        4 => 16 + 2,
        3 => usize::from(read::<1>(proxy).await?[0]) + 2,
        _ => return Err(garbled()),
    };
    proxy.read_exact(&mut [0; 255 + 2][..rest]).await.map(drop)
}

/// Appends a text of at most 255 bytes, and its length before.
fn counted(message: &mut Vec<u8>, text: &[u8]) {
    message.push(u8::try_from(text.len()).expect("names, users and passwords have at most 255 bytes"));
    message.extend(text);
}

/// The answers of RFC 1928, section 6.
fn refused(reply: u8) -> io::Error {
    match reply {
        2 => denied("it does not allow the connection"),
        3 => io::Error::new(ErrorKind::NetworkUnreachable, "no route from there"),
        4 => io::Error::new(ErrorKind::HostUnreachable, "the host is not reachable from there"),
        5 => io::Error::new(ErrorKind::ConnectionRefused, "the host refuses"),
        6 => io::Error::new(ErrorKind::TimedOut, "the host does not answer"),
        other => io::Error::other(format!("it cannot connect (reply {other})")),
    }
}

/// RFC 9110, 9.3.6.
async fn ask_http(proxy: &mut Leg, login: Option<(&str, &str)>, target: &Target) -> io::Result<()> {
    let authorization = login.map_or_else(String::new, |(user, password)| {
        format!("Proxy-Authorization: Basic {}\r\n", STANDARD.encode(format!("{user}:{password}")))
    });
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{authorization}\r\n");
    proxy.write_all(request.as_bytes()).await?;
    loop {
        let head = read_head(proxy).await?;
        match status_of(&head).ok_or_else(garbled)? {
            100..200 => {} // another reply follows (RFC 9110, 15.2)
            200..300 => return Ok(()),
            401 | 407 => return Err(denied("it wants another login")),
            403 => return Err(denied("it does not allow the connection")),
            502 | 503 => {
                return Err(io::Error::new(ErrorKind::HostUnreachable, "the host is not reachable from there"));
            }
            504 => return Err(io::Error::new(ErrorKind::TimedOut, "the host does not answer")),
            other => return Err(io::Error::other(format!("it cannot connect (status {other})"))),
        }
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
