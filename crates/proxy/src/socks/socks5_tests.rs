//! Messages of RFC 1928 and RFC 1929: complete, cut short, and wrong.

use super::*;
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Checks that every proper prefix is incomplete, and that bytes after the message are left alone.
fn splits<T: PartialEq + std::fmt::Debug>(parse: impl Fn(&[u8]) -> Parsed<T>, message: &[u8], want: &T) {
    for cut in 0..message.len() {
        assert_eq!(parse(&message[..cut]), Ok(None), "cut at {cut}");
    }
    for tail in [&b""[..], b"\x05", b"GET / HTTP/1.0\r\n\r\n"] {
        let input = [message, tail].concat();
        let (got, used) = parse(&input).unwrap().unwrap();
        assert_eq!((&got, used), (want, message.len()));
    }
}

fn connect(target: &str) -> Request {
    Request { command: Command::Connect, target: target.parse().unwrap() }
}

#[test]
fn greeting() {
    splits(parse_greeting, &[5, 1, 0], &Greeting { no_auth: true, password: false, gssapi: false });
    splits(parse_greeting, &[5, 3, 1, 2, 0], &Greeting { no_auth: true, password: true, gssapi: true });
    splits(parse_greeting, &[5, 1, 0x80], &Greeting { no_auth: false, password: false, gssapi: false });
    splits(parse_greeting, &[5, 0], &Greeting { no_auth: false, password: false, gssapi: false });
    let mut all = vec![5, 255];
    all.extend(1..=255);
    splits(parse_greeting, &all, &Greeting { no_auth: false, password: true, gssapi: true });
}

#[test]
fn greeting_of_another_version() {
    assert_eq!(parse_greeting(&[4]), Err(ParseError::Version(4)));
    assert_eq!(parse_greeting(b"GET"), Err(ParseError::Version(b'G')));
}

#[test]
fn credentials() {
    let want = Credentials { name: b"ann".into(), password: b"pw".into() };
    splits(parse_credentials, b"\x01\x03ann\x02pw", &want);
    let long = [&[1, 255][..], &[b'n'; 255], &[255], &[b'p'; 255]].concat();
    splits(parse_credentials, &long, &Credentials { name: vec![b'n'; 255], password: vec![b'p'; 255] });
    assert_eq!(parse_credentials(&[5]), Err(ParseError::Version(5)));
    assert_eq!(parse_credentials(&[1, 0]), Err(ParseError::EmptyCredential));
    assert_eq!(parse_credentials(&[1, 1, b'a', 0]), Err(ParseError::EmptyCredential));
}

#[test]
fn passwords_are_not_shown() {
    let c = Credentials { name: b"ann".into(), password: b"secret".into() };
    assert!(!format!("{c:?}").contains("secret"));
}

#[test]
fn request_with_each_address_type() {
    splits(parse_request, &[5, 1, 0, 1, 192, 0, 2, 1, 0, 80], &connect("192.0.2.1:80"));
    splits(parse_request, b"\x05\x01\x00\x03\x0bexample.org\x01\xbb", &connect("example.org:443"));
    let v6: Ipv6Addr = "2001:db8::1".parse().unwrap();
    splits(parse_request, &[&[5, 1, 0, 4][..], &v6.octets(), &[0, 80]].concat(), &connect("[2001:db8::1]:80"));
    // An address sent as a name is parsed as an address, and a mapped address as the IPv4 address.
    splits(parse_request, b"\x05\x01\x00\x03\x09192.0.2.1\x00\x50", &connect("192.0.2.1:80"));
    let mapped: Ipv6Addr = "::ffff:127.0.0.1".parse().unwrap();
    splits(parse_request, &[&[5, 1, 0, 4][..], &mapped.octets(), &[0, 80]].concat(), &connect("127.0.0.1:80"));
}

#[test]
fn request_commands() {
    for (byte, command) in [(2, Command::Bind), (3, Command::UdpAssociate), (9, Command::Other(9))] {
        let target = Target { host: Host::Ip(Ipv4Addr::UNSPECIFIED.into()), port: 0 };
        splits(parse_request, &[5, byte, 0, 1, 0, 0, 0, 0, 0, 0], &Request { command, target });
    }
}

#[test]
fn request_errors_show_as_early_as_they_can() {
    assert_eq!(parse_request(&[4]), Err(ParseError::Version(4)));
    assert_eq!(parse_request(&[5, 1, 0, 2]), Err(ParseError::AddressType(2)));
    assert_eq!(parse_request(&[5, 1, 0, 3, 0]), Err(ParseError::Name));
    assert_eq!(parse_request(b"\x05\x01\x00\x03\x03a\0b"), Err(ParseError::Name));
}

#[test]
fn replies() {
    assert_eq!(encode_method(Method::NoAuth), [5, 0]);
    assert_eq!(encode_method(Method::Password), [5, 2]);
    assert_eq!(encode_method(Method::NoneAcceptable), [5, 0xff]);
    assert_eq!(encode_auth_status(true), [1, 0]);
    assert_eq!(encode_auth_status(false), [1, 1]);
    assert_eq!(encode_reply(Reply::NotAllowed, None), [5, 2, 0, 1, 0, 0, 0, 0, 0, 0]);
    let v4 = "192.0.2.9:258".parse().unwrap();
    assert_eq!(encode_reply(Reply::Succeeded, Some(v4)), [5, 0, 0, 1, 192, 0, 2, 9, 1, 2]);
    let v6 = encode_reply(Reply::Succeeded, Some("[2001:db8::1]:80".parse().unwrap()));
    assert_eq!((v6.len(), &v6[..6], &v6[19..]), (22, &[5, 0, 0, 4, 0x20, 0x01][..], &[1, 0, 80][..]));
}

#[test]
fn errors_of_connect_have_their_codes() {
    for (kind, want) in [
        (io::ErrorKind::ConnectionRefused, 5),
        (io::ErrorKind::HostUnreachable, 4),
        (io::ErrorKind::NetworkUnreachable, 3),
        (io::ErrorKind::TimedOut, 6),
        (io::ErrorKind::PermissionDenied, 2),
        (io::ErrorKind::AddrNotAvailable, 1),
    ] {
        assert_eq!(Reply::from_io(&kind.into()) as u8, want, "{kind:?}");
    }
}

/// For any input, a parser returns, uses no more than it got, and never contradicts its result for a prefix.
#[test]
fn garbage_never_panics() {
    let mut rng = StdRng::seed_from_u64(0x50c5);
    let mut input = [0; 600];
    for round in 0..20_000usize {
        rng.fill_bytes(&mut input);
        let len = round % input.len();
        input[0] = [5, 5, 1, input[0]][round % 4];
        // Most random bytes would fail at the address type, so make some valid.
        input[3] = if round % 3 == 0 { input[3] } else { input[3] % 5 };
        check(parse_greeting, &input[..len]);
        check(parse_credentials, &input[..len]);
        check(parse_request, &input[..len]);
    }
}

fn check<T: PartialEq + std::fmt::Debug>(parse: impl Fn(&[u8]) -> Parsed<T>, input: &[u8]) {
    let whole = parse(input);
    if let Ok(Some((_, used))) = &whole {
        assert!(*used > 0 && *used <= input.len());
    }
    match parse(&input[..input.len() / 2]) {
        Ok(None) => {}
        early => assert_eq!(early, whole),
    }
}
