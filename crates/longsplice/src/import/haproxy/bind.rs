//! `bind`: where a frontend listens.

use super::words::Words;
use crate::import::model::{Mistake, Notes};
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
};

/// What was made of a line.
#[derive(Default)]
pub struct Bind {
    pub listen: Vec<SocketAddr>,
    /// Clients begin with a PROXY header.
    pub header: bool,
}

/// The port of all these lines, if they have one only.
pub fn only_port(binds: &[Words]) -> Option<u16> {
    let mut ports = binds.iter().flat_map(|of| {
        of.word(1).split(',').map(|one| one.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok()))
    });
    let first = ports.next()??;
    ports.all(|port| port == Some(first)).then_some(first)
}

/// Reads a line. `all`: the others, whose addresses are not taken from them.
pub fn read(of: &Words, all: &[Words], notes: &mut Notes) -> Result<Bind, Mistake> {
    let mut bind = Bind::default();
    let (mut both, mut only_v6) = (false, false);
    let mut words = of.from(2).iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "ssl" | "crt" | "crt-list" => {
                notes.left_out(
                    &of.line,
                    "nothing is decrypted, and without that clients would speak in the clear (put \
                    a proxy that decrypts in front; mode tcp and req.ssl_sni route without)",
                );
                return Ok(Bind::default());
            }
            "interface" | "namespace" => {
                notes.left_out(
                    &of.line,
                    "a listener is not bound to a device or namespace (write the device's address)",
                );
                return Ok(Bind::default());
            }
            "accept-netscaler-cip" => {
                notes.left_out(&of.line, "only PROXY headers are known (accept-proxy)");
                return Ok(Bind::default());
            }
            "accept-proxy" => bind.header = true,
            "v4v6" => both = true,
            "v6only" => only_v6 = true,
            // what is so anyway
            "name" | "id" | "nice" | "process" | "thread" | "mode" | "user" | "uid" | "group" | "gid"
            | "severity-output" | "shards" => {
                words.next();
            }
            "defer-accept"
            | "tfo"
            | "transparent"
            | "expose-fd"
            | "prefer-client-ciphers"
            | "generate-certificates"
            | "strict-sni" => {
                notes.changed(&of.line, &format!("{word} is left out: sockets have no such setting"));
            }
            "maxconn" | "backlog" | "mss" | "tcp-ut" | "level" | "alpn" | "npn" | "proto" | "ciphers"
            | "ciphersuites" | "ca-file" | "verify" | "crl-file" | "curves" | "ecdhe" | "ssl-min-ver"
            | "ssl-max-ver" | "tls-ticket-keys" => {
                let value = words.next().map_or("", String::as_str);
                notes.changed(
                    &of.line,
                    &format!(
                        "{word} {value} is left out: there is no such setting of an address (limits of a listener)"
                    ),
                );
            }
            _ => return Err(of.wrong(format!("bind has no {word}"))),
        }
    }
    for address in of.word(1).split(',') {
        let Some((ip, ports)) = parse(of, address, notes)? else { continue };
        let mut ips = vec![ip];
        // a socket for [::] takes clients of IPv4 as well, unless another one does
        let is_taken = || all.iter().flat_map(|of| of.word(1).split(',')).any(|other| has_ipv4(other, *ports.start()));
        if ip == Ipv6Addr::UNSPECIFIED && !only_v6 && (both || !is_taken()) {
            ips.push(Ipv4Addr::UNSPECIFIED.into());
        }
        for ip in ips {
            bind.listen.extend(ports.clone().map(|port| SocketAddr::new(ip, port)));
        }
    }
    Ok(bind)
}

/// Whether an address is one of IPv4, with this port.
fn has_ipv4(text: &str, port: u16) -> bool {
    let Some((host, of)) = text.rsplit_once(':') else { return false };
    let host = host.strip_prefix("ipv4@").unwrap_or(host);
    let is_ipv4 = ["", "*", "localhost"].contains(&host) || host.parse::<Ipv4Addr>().is_ok();
    is_ipv4 && of.split('-').next().is_some_and(|first| first.parse() == Ok(port))
}

fn parse(of: &Words, text: &str, notes: &mut Notes) -> Result<Option<(IpAddr, RangeInclusive<u16>)>, Mistake> {
    let (family, bare) = match text.split_once('@') {
        Some((family @ ("ipv4" | "ipv6" | "tcp" | "tcp4" | "tcp6"), rest)) => (family, rest),
        Some(_) => {
            notes.left_out(&of.line, "listeners have an address and a port, for TCP");
            return Ok(None);
        }
        None if text.starts_with('/') => {
            notes.left_out(&of.line, "listeners have an address and a port, no path");
            return Ok(None);
        }
        None => ("", text),
    };
    let wrong = || of.wrong(format!("{text:?}: write ADDRESS:PORT, *:PORT or :PORT"));
    let (host, ports) = bare.rsplit_once(':').ok_or_else(wrong)?;
    let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
    let [first, last]: [u16; 2] = [first, last].map(|port| port.parse().unwrap_or(0));
    if first == 0 || last < first {
        return Err(wrong());
    }
    let ip = match host.trim_start_matches('[').trim_end_matches(']') {
        "" | "*" if family.ends_with('6') => Ipv6Addr::UNSPECIFIED.into(),
        "" | "*" => Ipv4Addr::UNSPECIFIED.into(),
        "localhost" => Ipv4Addr::LOCALHOST.into(),
        host => match host.parse() {
            Ok(ip) => ip,
            Err(_) => {
                notes.left_out(&of.line, "listeners have addresses, no names (write the address)");
                return Ok(None);
            }
        },
    };
    Ok(Some((ip, first..=last)))
}
