//! What comes before the relay: SOCKS, TLS, the PROXY protocol, names of targets.

use longsplice_proxy::{
    proxy_protocol::{self, Version},
    socks::{
        datagram::{self, DatagramError, Header},
        socks4, socks5,
    },
    target::{Host, Target},
    tls::hello::{HELLO_MAX, HelloError, Scan},
    triggers::TimeOfDay,
};
use std::{
    fmt::Debug,
    net::{IpAddr, SocketAddr},
};

/// Parsers of messages that are looked at again with each byte that comes: incomplete until they are complete or wrong, and
/// then the same for ever.
pub(crate) fn grows<T: PartialEq + Debug, E: PartialEq + Debug>(
    input: &[u8],
    parse: impl Fn(&[u8]) -> Result<Option<(T, usize)>, E>,
) -> Option<(T, usize)> {
    let whole = parse(input);
    // Longer than any of these messages, but for the PROXY protocol's.
    let first = (0..=input.len().min(1200)).map(|n| (n, parse(&input[..n]))).find(|(_, found)| *found != Ok(None));
    if let Some((n, first)) = first {
        assert_eq!(first, whole, "after {n} bytes, and at last");
        if let Ok(Some((_, used))) = &first {
            assert_eq!(*used, n, "complete with its last byte, and not before");
        }
    }
    whole.ok().flatten()
}

pub(crate) fn socks5(input: &[u8]) {
    grows(input, socks5::parse_greeting);
    if let Some((credentials, used)) = grows(input, socks5::parse_credentials) {
        assert!(!credentials.name.is_empty() && !credentials.password.is_empty());
        let lengths = [credentials.name.len(), credentials.password.len()].map(|n| n as u8);
        let again = [&[1, lengths[0]], &credentials.name[..], &[lengths[1]], &credentials.password[..]].concat();
        assert_eq!(again, input[..used]);
    }
    if let Some((request, used)) = grows(input, socks5::parse_request) {
        let mut again = input[..3].to_vec();
        match &request.target.host {
            Host::Ip(IpAddr::V4(ip)) => again.extend([&[1][..], &ip.octets()].concat()),
            Host::Ip(IpAddr::V6(ip)) => again.extend([&[4][..], &ip.octets()].concat()),
            Host::Name(name) => again.extend([&[3, name.len() as u8][..], name.as_bytes()].concat()),
        }
        again.extend(request.target.port.to_be_bytes());
        let length = again.len();
        assert_eq!(socks5::parse_request(&again), Ok(Some((request, length))), "{:?}", &input[..used]);
    }
}

pub(crate) fn socks4(input: &[u8]) {
    if let Some((request, used)) = grows(input, socks4::parse_request) {
        assert_eq!(input[used - 1], 0);
        let port = request.target.port.to_be_bytes();
        let again = match &request.target.host {
            Host::Ip(IpAddr::V4(ip)) => [&[4, input[1]], &port[..], &ip.octets(), &[0]].concat(),
            // a name, and what 4a takes for one: an address in figures
            host => {
                let name = match host {
                    Host::Name(name) => name.clone(),
                    Host::Ip(ip) => ip.to_string(),
                };
                [&[4, input[1]], &port[..], &[0, 0, 0, 1, 0], name.as_bytes(), &[0]].concat()
            }
        };
        let zero = matches!(request.target.host, Host::Ip(IpAddr::V4(ip)) if ip.octets()[..3] == [0; 3] && ip.octets()[3] != 0);
        let length = again.len();
        // 0.0.0.x can only be said as a name.
        if !zero {
            assert_eq!(socks4::parse_request(&again), Ok(Some((request, length))));
        }
    }
}

/// A datagram comes whole, so what is cut is wrong, and what follows the header is data, whatever it is.
pub(crate) fn socks_udp(input: &[u8]) {
    let Ok((target, used)) = datagram::parse(input) else { return };
    assert!(target.port != 0 && input[2] == 0);
    for n in 0..used {
        assert_eq!(datagram::parse(&input[..n]), Err(DatagramError::Short), "cut at {n}");
    }
    assert_eq!(datagram::parse(&input[..used]), Ok((target.clone(), used)), "without its data");
    if let Host::Ip(ip) = target.host {
        let header = Header::new(SocketAddr::new(ip, target.port));
        let length = header.as_bytes().len();
        assert!(length <= datagram::HEADER_MAX);
        let again = [header.as_bytes(), &input[used..]].concat();
        assert_eq!(datagram::parse(&again), Ok((target, length)));
    }
}

/// Answers to requests, of which BIND has two: a client reads the address that we have written. It stands where datagrams and
/// requests have theirs.
pub(crate) fn socks_reply(input: &[u8]) {
    let (Some(ip), Some(port)) = (input.first_chunk::<16>(), input.last_chunk::<2>()) else { return };
    let port = u16::from_be_bytes(*port);
    for ip in [IpAddr::from(*ip), IpAddr::from([ip[0], ip[1], ip[2], ip[3]])] {
        let reply = socks5::encode_reply(socks5::Reply::Succeeded, Some(SocketAddr::new(ip, port)));
        let target = Target { host: Host::Ip(ip.to_canonical()), port };
        assert_eq!(reply[..3], [5, 0, 0]);
        let command = socks5::Command::Other(0);
        let length = reply.len();
        assert_eq!(socks5::parse_request(&reply), Ok(Some((socks5::Request { command, target }, length))));
        if let IpAddr::V4(v4) = ip.to_canonical() {
            let reply = socks4::encode_reply(socks4::Reply::Granted, Some(SocketAddr::new(ip, port)));
            assert_eq!(reply, *[&[0, 90][..], &port.to_be_bytes(), &v4.octets()].concat());
        }
    }
}

/// Two digits, a colon and two digits, and nothing else.
pub(crate) fn time_of_day(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let digits = |part: &[u8]| part.iter().all(u8::is_ascii_digit).then(|| (part[0] - b'0') * 10 + part[1] - b'0');
    let is_time = input.len() == 5
        && input[2] == b':'
        && digits(&input[..2]).is_some_and(|hours| hours < 24)
        && digits(&input[3..]).is_some_and(|minutes| minutes < 60);
    assert_eq!(text.parse::<TimeOfDay>().is_ok(), is_time, "{text}");
}

pub(crate) fn proxy_protocol(input: &[u8]) {
    let Some((Some(ends), _)) = grows(input, proxy_protocol::parse) else { return };
    for version in [Version::V1, Version::V2] {
        let written = proxy_protocol::encode(version, ends).expect("a short header");
        let plain = [ends.0, ends.1].map(|a| (a.ip().to_canonical(), a.port()));
        let Ok(Some((again, used))) = proxy_protocol::parse(&written) else { panic!("{}", written.escape_ascii()) };
        assert_eq!(used, written.len());
        // Those of different families name nobody.
        let same = plain[0].0.is_ipv4() == plain[1].0.is_ipv4();
        let again = again.map(|(a, b)| [a, b].map(|a| (a.ip(), a.port())));
        assert_eq!(again, same.then_some(plain), "{}", written.escape_ascii());
    }
}

pub(crate) fn target(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else {
        assert!(Host::from_name(input).is_err());
        return;
    };
    if let Ok(target) = text.parse::<Target>() {
        assert_ne!(target.port, 0);
        assert_eq!(target.to_string().parse(), Ok(target.clone()), "{text}");
    }
    if let Ok(host) = Host::from_name(input) {
        let again = match &host {
            Host::Name(name) => name.clone(),
            Host::Ip(ip) => ip.to_string(),
        };
        assert_eq!(Host::from_name(again.as_bytes()), Ok(host), "{text}");
    }
}

/// The handshake message in these records, and nothing else.
fn message(mut input: &[u8]) -> Vec<u8> {
    let mut message = Vec::new();
    while let [_, _, _, a, b, rest @ ..] = input {
        let (part, rest) = rest.split_at(usize::from(u16::from_be_bytes([*a, *b])).min(rest.len()));
        message.extend(part);
        input = rest;
        if let [_, a, b, c, ..] = message[..]
            && message.len() >= 4 + u32::from_be_bytes([0, a, b, c]) as usize
        {
            message.truncate(4 + u32::from_be_bytes([0, a, b, c]) as usize);
            break;
        }
    }
    message
}

pub(crate) fn client_hello(input: &[u8]) {
    let whole = Scan::default().feed(input);
    let mut slow = Scan::default();
    let grown = (0..=input.len()).map(|n| (n, slow.feed(&input[..n]))).find(|(_, found)| *found != Ok(None));
    match grown {
        Some((_, found)) => assert_eq!(found, whole),
        None => assert_eq!(whole, Ok(None)),
    }
    let Ok(Some(hello)) = whole else { return };
    if let Some(Host::Ip(ip)) = hello.name {
        panic!("{ip} is no name");
    }
    assert!(hello.alpn.iter().all(|name| !name.is_empty()));
    let message = message(input);
    for size in [1, 3, 500, 16_384] {
        let cut: Vec<u8> = message
            .chunks(size)
            .flat_map(|part| [&[22, 3, 1][..], &(part.len() as u16).to_be_bytes(), part].concat())
            .collect();
        match Scan::default().feed(&cut) {
            Err(HelloError::TooLong) => assert!(cut.len() > HELLO_MAX),
            found => assert_eq!(found, Ok(Some(hello.clone())), "in records of {size}"),
        }
        let (_, short) = cut.split_last().expect("not empty");
        assert!(!matches!(Scan::default().feed(&cut[..short.len()]), Ok(Some(_))), "complete without its last byte");
    }
}
