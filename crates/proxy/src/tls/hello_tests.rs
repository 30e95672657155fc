//! ClientHellos: good, bad and hostile ones, complete and cut at every byte.

use super::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};

fn with_len16(content: &[u8]) -> Vec<u8> {
    [&u16::try_from(content.len()).unwrap().to_be_bytes()[..], content].concat()
}

fn extension(kind: u16, content: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &with_len16(content)].concat()
}

fn sni(name: &[u8]) -> Vec<u8> {
    extension(0, &with_len16(&[&[0], &with_len16(name)[..]].concat()))
}

fn alpn(names: &[&[u8]]) -> Vec<u8> {
    let list: Vec<u8> = names.iter().flat_map(|n| [&[n.len() as u8], *n].concat()).collect();
    extension(16, &with_len16(&list))
}

/// The part before the extensions.
fn start(session: usize) -> Vec<u8> {
    let id = [&[session as u8][..], &vec![7; session]].concat();
    [&[3, 3][..], &[9; 32], &id, &with_len16(&[0x13, 0x01, 0xc0, 0x2f]), &[1, 0]].concat()
}

fn message(body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len()).unwrap().to_be_bytes();
    [&[1, len[1], len[2], len[3]], body].concat()
}

fn records(message: &[u8], size: usize) -> Vec<u8> {
    message.chunks(size).flat_map(|part| [&[22, 3, 1][..], &with_len16(part)].concat()).collect()
}

/// A ClientHello with these extensions.
fn hello(extensions: &[Vec<u8>]) -> Vec<u8> {
    message(&[start(32), with_len16(&extensions.concat())].concat())
}

fn scan(input: &[u8]) -> Result<Option<ClientHello>, HelloError> {
    Scan::default().feed(input)
}

/// Scans the input at once and byte by byte; every prefix is incomplete.
#[track_caller]
fn found(input: &[u8]) -> ClientHello {
    let mut slow = Scan::default();
    for cut in 0..input.len() {
        assert_eq!(scan(&input[..cut]), Ok(None), "cut at {cut}");
        assert_eq!(slow.feed(&input[..cut]), Ok(None), "grown to {cut}");
    }
    let whole = scan(input).unwrap().unwrap();
    assert_eq!(slow.feed(input), Ok(Some(whole.clone())));
    assert_eq!(scan(&[input, b"early data"].concat()), Ok(Some(whole.clone())));
    whole
}

fn name(hello: &ClientHello) -> Option<&str> {
    match hello.name.as_ref()? {
        Host::Name(name) => Some(name),
        Host::Ip(_) => panic!("an address"),
    }
}

#[test]
fn names_and_protocols() {
    let grease = || extension(0x0a0a, &[]);
    let key_share = |len| extension(51, &with_len16(&[&[0x11, 0xec][..], &with_len16(&vec![5; len])].concat()));
    let outer = || extension(0xfe0d, &[0, 0, 1, 0, 1, 7, 0, 0, 0, 2, 1, 2]);
    let padding = |len| extension(21, &vec![0; len]);
    type Row<'a> = (Vec<Vec<u8>>, Option<&'a str>, &'a [&'a [u8]]);
    let table: &[Row] = &[
        (vec![], None, &[]),
        (vec![sni(b"example.org")], Some("example.org"), &[]),
        (vec![sni(b"Example.ORG")], Some("example.org"), &[]),
        (vec![sni(b"xn--nxasmq6b.example")], Some("xn--nxasmq6b.example"), &[]),
        (vec![sni(&[b'a'; 255])], Some(&"a".repeat(255)), &[]),
        (vec![alpn(&[b"h2", b"http/1.1"])], None, &[b"h2", b"http/1.1"]),
        (vec![grease(), alpn(&[b"\x0a\x0a", b"h2"]), sni(b"a.b"), grease()], Some("a.b"), &[b"\x0a\x0a", b"h2"]),
        // A key share of X25519MLKEM768, and a longer one, as may come in the future.
        (vec![key_share(1216), sni(b"pq.example")], Some("pq.example"), &[]),
        (vec![key_share(20_000), sni(b"pq.example")], Some("pq.example"), &[]),
        (vec![sni(b"outer.example"), outer()], Some("outer.example"), &[]),
        (vec![padding(400), sni(b"late.example"), padding(0)], Some("late.example"), &[]),
        // One malformed, but ignored extension, and one unknown to every parser.
        (vec![extension(43, &[9]), extension(65_000, &[1, 2, 3]), sni(b"a.b")], Some("a.b"), &[]),
    ];
    for (i, (extensions, want, protocols)) in table.iter().enumerate() {
        let message = hello(extensions);
        for size in [16_384, 512, 100, 1] {
            if message.len() * 6 > HELLO_MAX && size == 1 {
                continue;
            }
            let found = found(&records(&message, size));
            assert_eq!(
                (name(&found), &found.alpn[..]),
                (*want, &protocols.iter().map(|p| p.to_vec()).collect::<Vec<_>>()[..]),
                "{i}"
            );
        }
    }
}

/// Returns a ClientHello like those of browsers: GREASE (RFC 8701) in every list, ECH
/// (draft-ietf-tls-esni) with its outer name, and a key share of X25519MLKEM768, which makes it
/// longer than a segment. The order of extensions depends on the seed.
fn browser(outer: &[u8], seed: u64) -> Vec<u8> {
    use rand::seq::SliceRandom;
    let mut rng = StdRng::seed_from_u64(seed);
    let mut noise = |n: usize| (0..n).map(|_| rng.random()).collect::<Vec<u8>>();
    let share = |group: u16, key: &[u8]| [&group.to_be_bytes()[..], &with_len16(key)].concat();
    let shares = [share(0x2a2a, &[0]), share(0x11ec, &noise(1216)), share(29, &noise(32))].concat();
    // HKDF-SHA256 and AES-128-GCM, a number, the sender's key, and the ciphertext
    let encrypted = [&[0, 0, 1, 0, 1, 77][..], &with_len16(&noise(32)), &with_len16(&noise(239))].concat();
    let mut extensions = vec![
        sni(outer),
        alpn(&[b"\x1a\x1a", b"h2", b"http/1.1"]),
        extension(10, &with_len16(&[0x2a, 0x2a, 0x11, 0xec, 0, 29, 0, 23, 0, 24])),
        extension(51, &with_len16(&shares)),
        extension(0xfe0d, &encrypted),
        extension(43, &[6, 0x3a, 0x3a, 3, 4, 3, 3]),
        extension(13, &with_len16(&[4, 3, 8, 4, 4, 1, 5, 3])),
        extension(17613, &with_len16(&[2, b'h', b'2'])),
        extension(0x001b, &[2, 0, 2]),
        extension(23, &[]),
        extension(35, &noise(208)),
        extension(0xff01, &[0]),
    ];
    extensions.shuffle(&mut rng);
    extensions.insert(0, extension(0x0a0a, &[]));
    extensions.push(extension(0xdada, &[0]));
    hello(&extensions)
}

#[test]
fn a_browser_with_ech_is_led_by_its_outer_name_however_it_is_cut() {
    for seed in 0..8 {
        let message = browser(b"Outer.Example", seed);
        assert!(message.len() > 1700, "more than a segment: {}", message.len());
        let want = found(&records(&message, 16_384));
        assert_eq!(name(&want), Some("outer.example"));
        assert_eq!(want.alpn, [&b"\x1a\x1a"[..], b"h2", b"http/1.1"]);
        found_in_two_records(&message, &want);
    }
}

/// Checks all cuts into two records, with segment boundaries around the record boundary.
#[track_caller]
fn found_in_two_records(message: &[u8], want: &ClientHello) {
    for at in 1..message.len() {
        let (a, b) = message.split_at(at);
        let (first, second) = (records(a, 16_384), records(b, 16_384));
        let both = [&first[..], &second].concat();
        let mut slow = Scan::default();
        for cut in [first.len() - 1, first.len(), first.len() + 4, first.len() + 6, both.len() - 1] {
            if cut < both.len() {
                assert_eq!(slow.feed(&both[..cut]), Ok(None), "records of {at}, cut at {cut}");
            }
        }
        assert_eq!(slow.feed(&both), Ok(Some(want.clone())), "records of {at}");
        assert_eq!(scan(&both), Ok(Some(want.clone())));
    }
}

/// ClientHellos of Chromium 156: GREASE, ECH, a key share of X25519MLKEM768; one record, longer than a segment.
#[test]
fn chromium() {
    let table: [(&[u8], Option<&str>); 3] = [
        (include_bytes!("../../../../fuzz/corpus/client_hello/chromium-156-www"), Some("www.example.org")),
        (include_bytes!("../../../../fuzz/corpus/client_hello/chromium-156-mail"), Some("mail.example.org")),
        (include_bytes!("../../../../fuzz/corpus/client_hello/chromium-156-unnamed"), None),
    ];
    for (sent, want) in table {
        assert!(sent.len() > 1900, "more than a segment: {}", sent.len());
        let hello = found(sent);
        assert_eq!(name(&hello), want);
        assert_eq!(hello.alpn, [&b"h2"[..], b"http/1.1"], "{want:?}");
        found_in_two_records(&sent[5..], &hello);
    }
}

/// Only the outer name counts, and it may be missing.
#[test]
fn ech_alone_names_nobody() {
    let encrypted = || extension(0xfe0d, &[&[0, 0, 1, 0, 1, 77, 0, 0][..], &with_len16(b"inner.example")].concat());
    assert_eq!(name(&found(&records(&hello(&[encrypted()]), 16_384))), None);
    // The mark of an inner ClientHello (draft-ietf-tls-esni, 5) in a plaintext one has no effect.
    let inner = || extension(0xfe0d, &[1]);
    assert_eq!(name(&found(&records(&hello(&[inner(), sni(b"outer.example")]), 16_384))), Some("outer.example"));
}

#[test]
fn old_clients() {
    // No extensions and no session.
    assert_eq!(name(&found(&records(&message(&start(0)), 16_384))), None);
    // SSL 3.0 in the record, TLS 1.0 in the message.
    let mut old = records(&message(&[start(0), with_len16(&sni(b"old.example"))].concat()), 16_384);
    (old[2], old[10]) = (0, 1);
    assert_eq!(name(&found(&old)), Some("old.example"));
}

#[test]
fn another_message_in_the_same_record_is_for_the_server() {
    let both = records(&[hello(&[sni(b"a.b")]), vec![1, 0, 0, 0]].concat(), 16_384);
    assert_eq!(name(&scan(&both).unwrap().unwrap()), Some("a.b"));
}

#[test]
fn what_is_refused() {
    let whole = |body: Vec<u8>| records(&message(&body), 16_384);
    let extended = |extensions: &[u8]| [start(0), with_len16(extensions)].concat();
    let list = |content: &[u8]| whole(extended(&extension(0, content)));
    let names = |content: &[u8]| list(&with_len16(content));
    let entry = |kind: u8, name: &[u8]| [&[kind], &with_len16(name)[..]].concat();
    let protocols = |content: &[u8]| whole(extended(&extension(16, content)));
    let twice = |e: Vec<u8>| whole(extended(&[e.clone(), e].concat()));
    use HelloError::{Malformed, Message, Name, NotTls, Record, TooLong, Twice};
    let table: Vec<(Vec<u8>, HelloError)> = vec![
        // Not TLS.
        (b"GET / HTTP/1.1\r\n".to_vec(), NotTls(b'G')),
        (vec![0x80, 0x2e, 1, 0, 2], NotTls(0x80)),
        (vec![0], NotTls(0)),
        (vec![23, 3, 3, 0, 5], NotTls(23)),
        // Records.
        (vec![22, 2], Record),
        (vec![22, 3, 1, 0, 0], Record),
        (vec![22, 3, 1, 0x40, 1], Record),
        (vec![22, 3, 1, 0, 1, 1, 23], Record),
        (vec![22, 3, 1, 0, 1, 1, 22, 4], Record),
        (vec![22, 3, 1, 0, 1, 1, 22, 3, 1, 0, 0], Record),
        // Messages.
        (vec![22, 3, 1, 0, 4, 2], Message(2)),
        (vec![22, 3, 1, 0, 4, 1, 1, 0, 0], TooLong),
        (vec![22, 3, 1, 0, 4, 1, 0, 255, 253], TooLong),
        (whole(vec![]), Malformed),
        (whole(start(0)[..20].to_vec()), Malformed),
        (whole([&start(0)[..34], &[33], &[0; 33], &[0, 2, 1, 1, 1, 0]].concat()), Malformed),
        (whole([&start(0)[..35], &[0, 3, 1, 1, 1, 1, 0][..]].concat()), Malformed),
        (whole([&start(0)[..35], &[0, 200, 1, 1][..]].concat()), Malformed),
        (whole([start(0), vec![0]].concat()), Malformed),
        (whole([start(0), vec![0, 9, 1]].concat()), Malformed),
        (whole([extended(&sni(b"a.b")), vec![1]].concat()), Malformed),
        (whole(extended(&[0])), Malformed),
        (whole(extended(&[0, 0, 0, 9, 1])), Malformed),
        // Names.
        (list(&[]), Name),
        (names(&[]), Name),
        (list(&[0, 9, 0, 0, 3, b'a', b'.', b'b']), Malformed),
        (list(&[&with_len16(&entry(0, b"a.b"))[..], &[1]].concat()), Malformed),
        (names(&[entry(0, b"a.b"), vec![0]].concat()), Name),
        (names(&[entry(0, b"a.b"), entry(0, b"c.d")].concat()), Name),
        (names(&[entry(0, b"a.b"), entry(1, b"c.d")].concat()), Name),
        (names(&entry(1, b"a.b")), Name),
        (names(&entry(0, b"")), Name),
        (names(&entry(0, b"a\0.b")), Name),
        (names(&entry(0, b"a b")), Name),
        (names(&entry(0, "ä.example".as_bytes())), Name),
        (names(&entry(0, b"192.0.2.1")), Name),
        (names(&entry(0, b"2001:db8::1")), Name),
        (names(&entry(0, b"[::1]")), Name),
        (names(&entry(0, &[b'a'; 256])), Name),
        (twice(sni(b"a.b")), Twice(0)),
        // Protocols.
        (protocols(&[]), Malformed),
        (protocols(&[0, 0]), Malformed),
        (protocols(&[0, 1, 0]), Malformed),
        (protocols(&[0, 3, 2, b'h']), Malformed),
        (protocols(&[0, 3, 3, b'h', b'2']), Malformed),
        (protocols(&[0, 3, 2, b'h', b'2', 1]), Malformed),
        (twice(alpn(&[b"h2"])), Twice(16)),
    ];
    for (i, (input, want)) in table.into_iter().enumerate() {
        assert_eq!(scan(&input), Err(want), "{i}: {input:?}");
        // Byte by byte, the input ends in the same refusal, and never in a ClientHello.
        let mut slow = Scan::default();
        let end = (0..=input.len()).map(|cut| slow.feed(&input[..cut])).find(|r| *r != Ok(None));
        assert_eq!(end, Some(Err(want)), "{i}: byte by byte");
        assert!(want.alert().is_some() != matches!(want, NotTls(_)));
    }
}

#[test]
fn noise_is_refused_without_a_panic() {
    let mut rng = StdRng::seed_from_u64(1);
    let good = records(&hello(&[sni(b"example.org"), alpn(&[b"h2", b"http/1.1"])]), 60);
    for _ in 0..20_000 {
        let mut noise = good.clone();
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..noise.len());
            noise[at] = rng.random();
        }
        let mut slow = Scan::default();
        let grown = (0..=noise.len()).map(|cut| slow.feed(&noise[..cut])).find(|r| *r != Ok(None)).unwrap_or(Ok(None));
        assert_eq!(scan(&noise), grown);
        let random: Vec<u8> = (0..rng.random_range(0..300)).map(|_| rng.random()).collect();
        let _ = scan(&[&[22, 3, 1, 1, 0, 1, 0, 0, 200], &random[..]].concat());
        let _ = scan(&random);
    }
}
