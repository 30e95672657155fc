//! Handshakes over an in-memory stream: client bytes at once or one by one, and the bytes that the client receives.

use super::*;
use crate::access::Denied;
use std::io::ErrorKind;
use tokio::io::AsyncReadExt;

const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
const REQUEST: &[u8] = b"\x05\x01\x00\x03\x0bexample.org\x01\xbb";

fn ann() -> Users {
    let mut users = Users::default();
    users.add("ann", "pw").unwrap();
    users
}

/// Returns the result of [`ask`] and the bytes sent to a client that sends `input` in pieces of `size`, and then its FIN.
async fn dialogue(users: &Users, input: &[u8], size: usize) -> (Result<SocksRequest, Fault>, Vec<u8>) {
    let (mut leg, mut client) = tokio::io::duplex(4096);
    let talk = async {
        for piece in input.chunks(size) {
            // The handshake may have closed after a refusal.
            if client.write_all(piece).await.is_err() {
                break;
            }
            tokio::task::yield_now().await;
        }
        client.shutdown().await.unwrap();
        let mut seen = Vec::new();
        client.read_to_end(&mut seen).await.unwrap();
        seen
    };
    let asking = async move { ask(&mut leg, HandshakeBuffer::default(), (users, &Commands::default()), CLIENT).await };
    tokio::join!(asking, talk)
}

async fn granted(users: &Users, input: &[u8], rest: &[u8]) -> (SocksRequest, Vec<u8>) {
    let whole = [input, rest].concat();
    for size in 1..input.len() {
        let (asked, _) = dialogue(users, input, size).await;
        assert!(asked.unwrap().rest.is_empty(), "pieces of {size}");
    }
    let (asked, seen) = dialogue(users, &whole, whole.len()).await;
    let asked = asked.unwrap();
    assert_eq!(&asked.rest[..], rest);
    (asked, seen)
}

async fn refused(users: &Users, input: &[u8]) -> (&'static str, Vec<u8>) {
    let (asked, seen) = dialogue(users, input, input.len().max(1)).await;
    (asked.unwrap_err().how(), seen)
}

#[tokio::test]
async fn version_5_without_authentication() {
    let input = [&[5, 2, 0, 2][..], REQUEST].concat();
    let (asked, seen) = granted(&Users::default(), &input, b"early data").await;
    assert_eq!((asked.target.to_string().as_str(), asked.user), ("example.org:443", None));
    assert_eq!(seen, [5, 0]);
}

#[tokio::test]
async fn version_5_with_password() {
    let input = [b"\x05\x02\x00\x02\x01\x03ann\x02pw", REQUEST].concat();
    let (asked, seen) = granted(&ann(), &input, b"\x05").await;
    assert_eq!(asked.user.as_deref(), Some("ann"));
    assert_eq!(seen, [5, 2, 1, 0]);
}

#[tokio::test]
async fn version_4_and_4a() {
    let (asked, seen) = granted(&Users::default(), b"\x04\x01\x00\x50\xc0\x00\x02\x01me\x00", b"x").await;
    assert_eq!((asked.target.to_string().as_str(), seen.len()), ("192.0.2.1:80", 0));
    let (asked, _) = granted(&Users::default(), b"\x04\x01\x00\x50\x00\x00\x00\x01\x00a.org\x00", b"x").await;
    assert_eq!(asked.target.to_string(), "a.org:80");
}

#[tokio::test]
async fn authentication_that_fails() {
    // A password that is required and not offered, offered and not required, or wrong. Version 4 has no passwords.
    assert_eq!(refused(&ann(), &[5, 1, 0]).await, ("auth-failed", vec![5, 0xff]));
    assert_eq!(refused(&Users::default(), &[5, 1, 2]).await, ("auth-failed", vec![5, 0xff]));
    assert_eq!(refused(&Users::default(), &[5, 0]).await, ("auth-failed", vec![5, 0xff]));
    let wrong = b"\x05\x01\x02\x01\x03ann\x02pX";
    assert_eq!(refused(&ann(), wrong).await, ("auth-failed", vec![5, 2, 1, 1]));
    let v4 = b"\x04\x01\x00\x50\xc0\x00\x02\x01me\x00";
    assert_eq!(refused(&ann(), v4).await, ("auth-failed", vec![0, 0x5b, 0, 0, 0, 0, 0, 0]));
}

#[tokio::test]
async fn nobody_gets_past_authentication() {
    let skipped = [&[5, 1, 2][..], REQUEST].concat();
    assert_eq!(refused(&ann(), &skipped).await, ("bad-request", vec![5, 2]));
}

#[tokio::test]
async fn requests_that_are_not_served() {
    let reply = |code| vec![5, 0, 5, code, 0, 1, 0, 0, 0, 0, 0, 0];
    for (request, code) in [
        (&b"\x05\x04\x00\x01\x00\x00\x00\x00\x00\x00"[..], 7),
        (b"\x05\xf0\x00\x01\x00\x00\x00\x00\x00\x00", 7),
        (b"\x05\xf1\x00\x01\x00\x00\x00\x00\x00\x00", 7),
        (b"\x05\x01\x00\x02", 8),
        (b"\x05\x01\x00\x03\x01\x00\x00\x50", 1),
        (b"\x04\x01\x00\x03", 1),
    ] {
        let input = [&[5, 1, 0][..], request].concat();
        assert_eq!(refused(&Users::default(), &input).await, ("bad-request", reply(code)), "{request:?}");
    }
    let resolve = b"\x04\xf0\x00\x50\xc0\x00\x02\x01\x00";
    assert_eq!(refused(&Users::default(), resolve).await, ("bad-request", vec![0, 0x5b, 0, 0, 0, 0, 0, 0]));
}

#[tokio::test]
async fn gssapi_is_refused_and_other_methods_are_taken() {
    let gssapi = ask(
        &mut tokio::io::join(&[5, 1, 1][..], Vec::new()),
        HandshakeBuffer::default(),
        (&Users::default(), &Commands::default()),
        CLIENT,
    )
    .await;
    assert_eq!(gssapi.unwrap_err().to_string(), "no acceptable method: GSSAPI is not supported");
    assert_eq!(refused(&Users::default(), &[5, 1, 1]).await, ("auth-failed", vec![5, 0xff]));
    assert_eq!(refused(&ann(), &[5, 2, 1, 0]).await, ("auth-failed", vec![5, 0xff]));
    let (asked, seen) = granted(&Users::default(), &[&[5, 3, 1, 2, 0][..], REQUEST].concat(), b"").await;
    assert_eq!((asked.target.port, seen), (443, vec![5, 0]));
}

#[tokio::test]
async fn commands_of_both_versions() {
    for (number, want) in [(1, Asked::Connect), (2, Asked::Bind), (3, Asked::UdpAssociate)] {
        let input = [&[5, 1, 0, 5, number][..], &REQUEST[2..]].concat();
        assert_eq!(granted(&Users::default(), &input, b"").await.0.asked, want);
    }
    let (asked, _) = granted(&Users::default(), b"\x04\x02\x00\x50\xc0\x00\x02\x01\x00", b"").await;
    assert_eq!(asked.asked, Asked::Bind);
}

#[tokio::test]
async fn what_a_listener_does_not_serve() {
    let (users, commands) = (Users::default(), Commands { served: vec![Command::Resolve], ..Commands::default() });
    let asked = async |number| {
        let input = [&[5, 1, 0, 5, number][..], &REQUEST[2..]].concat();
        let mut leg = tokio::io::join(&input[..], Vec::new());
        ask(&mut leg, HandshakeBuffer::default(), (&users, &commands), CLIENT).await
    };
    assert_eq!(asked(1).await.unwrap_err().to_string(), "command Connect not supported");
    assert_eq!(asked(0xf0).await.unwrap().asked, Asked::Resolve { name: false });
}

#[tokio::test]
async fn what_is_not_socks_gets_no_answer() {
    for input in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\x16\x03\x01", b"", b"\x05", b"\x05\x01"] {
        assert_eq!(refused(&Users::default(), input).await, ("bad-request", vec![]), "{input:?}");
    }
}

#[tokio::test]
async fn endless_messages_are_cut() {
    let endless = [&b"\x04\x01\x00\x50\xc0\x00\x02\x01"[..], &[b'u'; 2000]].concat();
    let (asked, seen) = dialogue(&Users::default(), &endless, 7).await;
    assert!(matches!(asked, Err(Fault::BadRequest(_))));
    assert_eq!(seen, [0, 0x5b, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn every_fault_has_its_code() {
    let io = |kind: ErrorKind| io::Error::from(kind);
    for (fault, code) in [
        (Fault::Denied(Denied::Rule(1)), 2),
        (Fault::NoAddress(io(ErrorKind::Other)), 4),
        (Fault::Unreachable(io(ErrorKind::ConnectionRefused)), 5),
        (Fault::Unreachable(io(ErrorKind::NetworkUnreachable)), 3),
        (Fault::Unreachable(io(ErrorKind::HostUnreachable)), 4),
        (Fault::Timeout(crate::fault::Step::Connect), 6),
        (Fault::BadRequest(String::new()), 1),
    ] {
        assert_eq!(reply_to(&fault) as u8, code, "{fault:?}");
    }
}
