//! Parsing of good and bad headers, complete and cut at every byte, and encoding.

use super::*;

const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";
const V4: &[u8] = &[192, 0, 2, 1, 198, 51, 100, 2, 0x9c, 0x40, 0x01, 0xbb];

fn v2(command: u8, family: u8, block: &[u8]) -> Vec<u8> {
    let len = u16::try_from(block.len()).unwrap().to_be_bytes();
    [SIGNATURE, &[command, family], &len, block].concat()
}

fn ends(source: &str, destination: &str) -> Option<Ends> {
    Some((source.parse().unwrap(), destination.parse().unwrap()))
}

#[test]
fn good_headers() {
    let v6: Vec<u8> =
        [&[0x20, 1, 0xd, 0xb8][..], &[0; 11], &[1], &[0x20, 1, 0xd, 0xb8], &[0; 11], &[2, 0, 1, 0, 2]].concat();
    let six = || ends("[2001:db8::1]:1", "[2001:db8::2]:2");
    let four = || ends("192.0.2.1:40000", "198.51.100.2:443");
    let max = format!("PROXY UNKNOWN {0} {0} 65535 65535\r\n", ["ffff"; 8].join(":"));
    assert_eq!(max.len(), V1_MAX);
    let tlvs = [V4, &[4, 1, 0], &[0; 256], &[0x20, 0, 5, 1, 0, 0, 0, 0]].concat();
    let table: Vec<(Vec<u8>, Option<Ends>)> = vec![
        (b"PROXY TCP4 192.0.2.1 198.51.100.2 40000 443\r\n".to_vec(), four()),
        (
            b"PROXY TCP4 255.255.255.255 255.255.255.255 65535 65535\r\n".to_vec(),
            ends("255.255.255.255:65535", "255.255.255.255:65535"),
        ),
        (b"PROXY TCP4 0.0.0.0 0.0.0.0 0 0\r\n".to_vec(), ends("0.0.0.0:0", "0.0.0.0:0")),
        (b"PROXY TCP6 2001:db8::1 2001:0DB8:0:0:0:0:0:2 1 2\r\n".to_vec(), six()),
        (b"PROXY UNKNOWN\r\n".to_vec(), None),
        (b"PROXY UNKNOWN whatever it is\r\n".to_vec(), None),
        (max.into_bytes(), None),
        (v2(0x21, 0x11, V4), four()),
        (v2(0x21, 0x21, &v6), six()),
        (v2(0x21, 0x11, &tlvs), four()),
        (v2(0x21, 0x11, &[V4, &[9]].concat()), four()), // a malformed TLV is ignored
        (v2(0x21, 0x11, &[V4, &[0; V2_MAX - V2_FIXED - 12]].concat()), four()),
        (v2(0x21, 0x31, &[0; 216]), None),
        (v2(0x21, 0x00, &[]), None),
        (v2(0x21, 0x00, &[1; 20]), None),
        (v2(0x20, 0x00, &[]), None),
        (v2(0x20, 0x11, V4), None),
        (v2(0x20, 0xff, &[1; 3]), None),
    ];
    for (i, (header, want)) in table.iter().enumerate() {
        for cut in 0..header.len() {
            assert_eq!(parse(&header[..cut]), Ok(None), "{i}: cut at {cut}");
        }
        assert_eq!(parse(header), Ok(Some((*want, header.len()))), "{i}");
        let more = [header, &b"\r\nPROXY \r\n\r\n\0"[..]].concat();
        assert_eq!(parse(&more), Ok(Some((*want, header.len()))), "{i}: and more");
    }
}

#[test]
fn bad_headers() {
    #[derive(PartialEq, Debug)]
    enum Kind {
        Missing,
        TooLong,
        V1,
        V2,
    }
    use Kind::{Missing, TooLong, V1};
    let line = |text: &str| (text.as_bytes().to_vec(), V1);
    let block = |bytes: Vec<u8>| (bytes, Kind::V2);
    let table: Vec<(Vec<u8>, Kind)> = vec![
        (b"GET / HTTP/1.1\r\n".to_vec(), Missing),
        (b"\x16\x03\x01".to_vec(), Missing),
        (b"PROXYTCP4".to_vec(), Missing),
        (b"proxy TCP4".to_vec(), Missing),
        (b"PROXY\tTCP4".to_vec(), Missing),
        (b" PROXY ".to_vec(), Missing),
        (b"\r\n\r\n\0\r\nQUIX".to_vec(), Missing),
        (b"\r\n\r\n\0\r\nQUIT\r".to_vec(), Missing),
        ([&b"PROXY UNKNOWN "[..], &[b'x'; 200]].concat(), TooLong),
        ([&b"PROXY UNKNOWN "[..], &[b'x'; 92], b"\r\n"].concat(), TooLong),
        (v2(0x21, 0x11, &[0; V2_MAX - V2_FIXED + 1]), TooLong),
        line("PROXY \r\n"),
        line("PROXY TCP4\r\n"),
        line("PROXY TCP4 \r\n"),
        line("PROXY tcp4 192.0.2.1 192.0.2.2 1 2\r\n"),
        line("PROXY TCP5 192.0.2.1 192.0.2.2 1 2\r\n"),
        line("PROXY UDP4 192.0.2.1 192.0.2.2 1 2\r\n"),
        line("PROXY UNKNOWNS\r\n"),
        line("PROXY  TCP4 192.0.2.1 192.0.2.2 1 2\r\n"),
        line("PROXY TCP4  192.0.2.1 192.0.2.2 1 2\r\n"),
        line("PROXY TCP4 192.0.2.1 192.0.2.2 1  2\r\n"),
        line("PROXY TCP4 192.0.2.1 192.0.2.2 1 2 \r\n"),
        line("PROXY TCP4 192.0.2.1 192.0.2.2 1 2 3\r\n"),
        line("PROXY TCP4 192.0.2.1 192.0.2.2 1\r\n"),
        line("PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\r\n"),
        line("PROXY TCP4 192.0.2.1 192.0.2.2\r1 2\r\n"),
        line("PROXY TCP4 192.0.2.1 192.0.2.2 1 2\n\r\n"),
        line("PROXY TCP4 192.0.2.1 192.0.2.2 1 65536\r\n"),
        line("PROXY TCP4 192.0.2.1 192.0.2.2 1 -2\r\n"),
        line("PROXY TCP4 192.0.2.1 192.0.2.2 +1 2\r\n"),
        line("PROXY TCP4 192.0.2.1 192.0.2.2 01 2\r\n"),
        line("PROXY TCP4 192.0.2.1 192.0.2.2 0x1 2\r\n"),
        line("PROXY TCP4 192.0.2.1 192.0.2.2 1,2\r\n"),
        line("PROXY TCP4 192.0.2.01 192.0.2.2 1 2\r\n"),
        line("PROXY TCP4 192.0.2 192.0.2.2 1 2\r\n"),
        line("PROXY TCP4 192.0.2.256 192.0.2.2 1 2\r\n"),
        line("PROXY TCP4 2001:db8::1 2001:db8::2 1 2\r\n"),
        line("PROXY TCP6 192.0.2.1 192.0.2.2 1 2\r\n"),
        line("PROXY TCP6 [2001:db8::1] [2001:db8::2] 1 2\r\n"),
        line("PROXY TCP6 fe80::1%eth0 fe80::2 1 2\r\n"),
        line("PROXY TCP6 1::2::3 ::1 1 2\r\n"),
        (b"PROXY TCP4 \xff 192.0.2.2 1 2\r\n".to_vec(), V1),
        block(v2(0x11, 0x11, V4)),
        block(v2(0x31, 0x11, V4)),
        block(v2(0x22, 0x11, V4)),
        block(v2(0x2f, 0x11, V4)),
        block(v2(0x21, 0x41, V4)),
        block(v2(0x21, 0x13, V4)),
        block(v2(0x21, 0x10, V4)),
        block(v2(0x21, 0x12, V4)),
        block(v2(0x21, 0x01, V4)),
        block(v2(0x21, 0x32, &[0; 216])),
        block(v2(0x21, 0x11, &V4[..11])),
        block(v2(0x21, 0x11, &[])),
        block(v2(0x21, 0x21, V4)),
        block(v2(0x21, 0x31, V4)),
    ];
    let kind = |e: &HeaderError| match e {
        HeaderError::Missing => Missing,
        HeaderError::TooLong(_) => TooLong,
        HeaderError::V1(_) => V1,
        HeaderError::V2(_) => Kind::V2,
    };
    for (header, want) in table {
        let text = String::from_utf8_lossy(&header).into_owned();
        assert_eq!(parse(&header).as_ref().map_err(kind), Err(want), "{text:?}");
        // Byte by byte, the header ends in a refusal, and is never accepted before.
        let end = (0..=header.len()).map(|cut| parse(&header[..cut])).find(|r| *r != Ok(None));
        assert!(end.is_some_and(|end| end.is_err()), "{text:?}");
    }
}

#[test]
fn what_is_sent_can_be_read() {
    for (source, destination) in [
        ("192.0.2.1:40000", "198.51.100.2:443"),
        ("[2001:db8::1]:1", "[2001:db8::2]:65535"),
        ("[::ffff:192.0.2.1]:1", "[::ffff:192.0.2.2]:2"),
    ] {
        let ends = ends(source, destination).unwrap();
        let plain = |a: SocketAddr| SocketAddr::new(a.ip().to_canonical(), a.port());
        for version in [Version::V1, Version::V2] {
            let header = encode(version, ends).unwrap();
            assert_eq!(parse(&header), Ok(Some((Some((plain(ends.0), plain(ends.1))), header.len()))), "{version:?}");
        }
    }
    let ends = ends("192.0.2.1:40000", "198.51.100.2:443").unwrap();
    assert_eq!(encode(Version::V1, ends).unwrap(), b"PROXY TCP4 192.0.2.1 198.51.100.2 40000 443\r\n");
    assert_eq!(encode(Version::V2, ends).unwrap(), v2(0x21, 0x11, V4));
    let mixed = ("192.0.2.1:1".parse().unwrap(), "[2001:db8::1]:2".parse().unwrap());
    for version in [Version::V1, Version::V2] {
        let header = encode(version, mixed).unwrap();
        assert_eq!(parse(&header), Ok(Some((None, header.len()))), "{version:?}");
    }
}

#[test]
fn who_is_believed() {
    let from = ["10.0.0.0/8", "2001:db8::/32"].map(|p| p.parse().unwrap()).to_vec();
    let told = ProxyProtocol { from, ..ProxyProtocol::default() };
    for (peer, want) in
        [("10.1.2.3", true), ("::ffff:10.1.2.3", true), ("11.0.0.1", false), ("2001:db8::1", true), ("::1", false)]
    {
        assert_eq!(told.expects(peer.parse().unwrap()), want, "{peer}");
    }
    assert!(!ProxyProtocol::default().expects("10.0.0.1".parse().unwrap()));
}
