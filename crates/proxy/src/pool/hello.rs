//! A ClientHello that every server of TLS 1.2 or 1.3 answers with a ServerHello. It offers no share of a key, so a server of TLS 1.3
//! asks for one by its HelloRetryRequest, which is a ServerHello, too (RFC 8446, 4.1.4 and 4.2.8): nothing has to be computed.

/// Content type of a handshake record, and of an alert (RFC 8446, 5.1).
const HANDSHAKE: u8 = 22;
const ALERT: u8 = 21;
/// Type of the message (RFC 8446, 4).
const SERVER_HELLO: u8 = 2;
/// All with forward secrecy that are in use, and two without for old servers.
const SUITES: [u16; 13] =
    [0x1301, 0x1302, 0x1303, 0xc02b, 0xc02c, 0xc02f, 0xc030, 0xcca8, 0xcca9, 0x009e, 0x009f, 0x009c, 0x002f];
/// x25519, and the curves of NIST.
const GROUPS: [u16; 4] = [0x001d, 0x0017, 0x0018, 0x0019];
/// ECDSA, RSA-PSS and RSA with SHA-2; Ed25519.
const SIGNATURES: [u16; 10] = [0x0403, 0x0503, 0x0603, 0x0804, 0x0805, 0x0806, 0x0401, 0x0501, 0x0601, 0x0807];

/// Returns a record with a ClientHello, which asks for this name.
pub(super) fn client_hello(name: Option<&str>) -> Vec<u8> {
    let entry = |name: &str| sized([&[0][..], &sized(name.as_bytes().to_vec())].concat());
    let extensions = [
        name.map_or_else(Vec::new, |name| extension(0, entry(name))),
        extension(10, sized(words(&GROUPS))),
        extension(11, vec![1, 0]),
        extension(13, sized(words(&SIGNATURES))),
        extension(23, Vec::new()),
        extension(43, vec![4, 3, 4, 3, 3]),
        extension(51, vec![0, 0]),
        extension(0xff01, vec![0]),
    ];
    let body = [&[3, 3][..], &[7; 32], &[0], &sized(words(&SUITES)), &[1, 0], &sized(extensions.concat())].concat();
    let message = [&[1, 0][..], &sized(body)].concat();
    [&[HANDSHAKE, 3, 1][..], &sized(message)].concat()
}

/// Judges the first bytes of the answer; `None`: there have to be more.
pub(super) fn answered(read: &[u8]) -> Option<Result<(), String>> {
    match *read {
        [HANDSHAKE, 3, _, _, _, SERVER_HELLO, ..] => Some(Ok(())),
        [ALERT, 3, _, _, _, _, description, ..] => Some(Err(format!("alert {description}"))),
        [HANDSHAKE | ALERT] | [HANDSHAKE | ALERT, 3, ..] if read.len() < 7 => None,
        [] => None,
        _ => Some(Err("its answer is not of TLS".into())),
    }
}

fn words(all: &[u16]) -> Vec<u8> {
    all.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// With its length in two bytes before it.
fn sized(bytes: Vec<u8>) -> Vec<u8> {
    [&(bytes.len() as u16).to_be_bytes()[..], &bytes].concat()
}

fn extension(number: u16, bytes: Vec<u8>) -> Vec<u8> {
    [&number.to_be_bytes()[..], &sized(bytes)].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::hello::Scan;

    #[test]
    fn it_is_a_client_hello() {
        let mut scan = Scan::default();
        let hello = scan.feed(&client_hello(Some("a.example"))).unwrap().unwrap();
        assert_eq!(hello.name.map(|name| format!("{name:?}")), Some("Name(\"a.example\")".into()));
        assert_eq!(Scan::default().feed(&client_hello(None)).unwrap().unwrap().name, None);
    }

    #[test]
    fn answers() {
        for (read, want) in [
            (&[][..], None),
            (&[22], None),
            (&[22, 3, 3, 0, 90], None),
            (&[22, 3, 3, 0, 90, 2], Some(Ok(()))),
            (&[22, 3, 3, 0, 90, 2, 0, 0], Some(Ok(()))),
            (&[21, 3, 3, 0, 2, 2], None),
            (&[21, 3, 3, 0, 2, 2, 40], Some(Err("alert 40".into()))),
            (b"SSH-2.0", Some(Err("its answer is not of TLS".into()))),
            (b"S", Some(Err("its answer is not of TLS".into()))),
            (&[22, 3, 3, 0, 90, 1, 0], Some(Err("its answer is not of TLS".into()))),
        ] {
            assert_eq!(answered(read), want, "{read:?}");
        }
    }
}
