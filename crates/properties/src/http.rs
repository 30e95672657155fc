//! HTTP messages.

use longsplice_http::{
    Authority, Body, Form, Framing, Kind, Request, Response, Scan, Step, Version, Wrong,
    accept::Codings,
    forward::{self, Back, Content, Forwarded, Onward},
    path, range,
};
use std::{
    net::{IpAddr, Ipv6Addr},
    time::SystemTime,
};

/// The length of the head, as it is found when bytes come one by one, and at once.
fn head(scan: fn(Kind) -> Scan, kind: Kind, input: &[u8]) -> Option<&[u8]> {
    let whole = scan(kind).feed(input);
    let mut slow = scan(kind);
    let mut grown = None;
    for n in 0..=input.len() {
        match slow.feed(&input[..n]) {
            Ok(None) => {}
            found => {
                grown = Some((n, found));
                break;
            }
        }
    }
    match (&whole, grown) {
        (Ok(None), None) => {}
        (Ok(Some(end)), Some((n, Ok(Some(same))))) => {
            assert!(*end == same && n == same && same <= input.len(), "{end}, but {same} after {n} bytes");
            assert!(input[..same].ends_with(b"\n"));
        }
        (Err(wrong), Some((_, Err(same)))) => assert_eq!(*wrong, same),
        (_, grown) => panic!("at once {whole:?}, byte by byte {grown:?}"),
    }
    whole.ok().flatten().map(|end| &input[..end])
}

/// What a body is: its content, what goes on, its length, and how it ends.
#[derive(Debug, PartialEq, Eq)]
struct Read {
    content: Vec<u8>,
    written: Vec<u8>,
    used: usize,
    end: Result<bool, Wrong>,
}

fn read(new: fn(Framing) -> Body, framing: Framing, input: &[u8], piece: usize) -> Read {
    let mut body = new(framing);
    let mut read = Read { content: Vec::new(), written: Vec::new(), used: 0, end: Ok(false) };
    for part in input.chunks(piece) {
        let mut part = part;
        while !part.is_empty() && !body.is_done() {
            let ahead = body.ahead();
            let step = match body.step(part) {
                Ok(step) => step,
                Err(wrong) => return Read { end: Err(wrong), used: 0, written: Vec::new(), ..read },
            };
            assert!(!step.is_empty() && step.len() <= part.len(), "{step:?} of {}", part.len());
            if let Step::Content(n) = step {
                read.content.extend(&part[..n]);
                let most = ahead.unwrap_or(u64::MAX);
                assert!(n as u64 <= most || matches!(body, Body::Chunked(_)) && most == 0, "{n} of {most} ahead");
            }
            match (step, body.mended()) {
                (Step::Framing(_), Some(mended)) => read.written.extend(mended),
                (Step::Content(_), Some(mended)) => panic!("content becomes {}", mended.escape_ascii()),
                (_, None) => read.written.extend(&part[..step.len()]),
            }
            read.used += step.len();
            part = &part[step.len()..];
        }
    }
    read.end = Ok(body.is_done());
    read
}

/// A body comes out the same however it is cut, and what is behind it does not change it.
fn body(new: fn(Framing) -> Body, framing: Framing, input: &[u8]) -> Read {
    let whole = read(new, framing, input, usize::MAX);
    for piece in [1, 2, 7] {
        let cut = read(new, framing, input, piece);
        // A wrong byte may be found before content that came with it was counted.
        if whole.end.is_ok() || cut.end.is_ok() {
            assert_eq!(cut, whole, "in pieces of {piece}");
        }
        assert_eq!(cut.end, whole.end, "in pieces of {piece}");
    }
    assert!(whole.used <= input.len());
    if whole.end == Ok(true) && framing != Framing::UntilClose {
        let alone = read(new, framing, &input[..whole.used], usize::MAX);
        assert_eq!(alone, whole, "without what follows");
        for cut in 0..whole.used.min(300) {
            assert_eq!(read(new, framing, &input[..cut], usize::MAX).end, Ok(false), "cut at {cut} it is not complete");
        }
    }
    whole
}

pub(crate) fn request(input: &[u8]) {
    let Some(head_bytes) = head(Scan::new, Kind::Request, input) else { return };
    let Ok(request) = Request::parse(head_bytes) else { return };
    assert_ne!(request.framing, Framing::UntilClose);
    body(Body::new, request.framing, &input[head_bytes.len()..]);
    if let Form::Authority(_) = request.form {
        return; // CONNECT is not passed on
    }
    let client = IpAddr::V6(Ipv6Addr::LOCALHOST);
    for (via, forwarded, codings, site) in [
        (None, Forwarded::None, Codings::Any, None),
        (Some("us"), Forwarded::Standard, Codings::None, Some("a:1")),
        (Some("us"), Forwarded::XForwardedFor, Codings::Known, Some("a:1")),
    ] {
        let to = Onward { host: "b.example:81", via, forwarded, client, codings, site };
        let written = forward::request(&request, &to);
        // Lists grow by what we add; a head that was as long as it may be is the next one's affair.
        if written.len() > longsplice_http::HEAD_MAX {
            continue;
        }
        let again = head(Scan::new, Kind::Request, &written).unwrap_or_else(|| panic!("{}", written.escape_ascii()));
        assert_eq!(again.len(), written.len(), "one head, and nothing behind it: {}", written.escape_ascii());
        let same = match Request::parse(again) {
            Err(Wrong::TooManyFields) => continue,
            parsed => parsed.unwrap_or_else(|w| panic!("{w}: {}", written.escape_ascii())),
        };
        assert_eq!((&same.method, same.framing), (&request.method, request.framing));
        let path = match (&request.form, &same.form) {
            (Form::Origin(p) | Form::Absolute(_, p), Form::Origin(q)) => p == q,
            (Form::Asterisk, Form::Asterisk) => true,
            (Form::Absolute(_, p), Form::Asterisk) => p == "*",
            _ => false,
        };
        assert!(path, "{:?} becomes {:?}", request.form, same.form);
        assert_eq!(same.fields.all("host").collect::<Vec<_>>(), [b"b.example:81"]);
    }
}

/// The first byte says which method and client it answers.
pub(crate) fn reply(input: &[u8]) {
    let Some((how, input)) = input.split_first() else { return };
    let method = if how & 1 == 0 { "GET" } else { "HEAD" };
    let client = if how & 2 == 0 { Version::Http11 } else { Version::Http10 };
    let close = how & 4 == 0;
    let strict = head(Scan::new, Kind::Response, input).and_then(|h| Some((h, Response::parse(h, method).ok()?)));
    let mended = head(Scan::lenient, Kind::Response, input).and_then(|h| Some((h, Response::lenient(h, method).ok()?)));
    if let Some((head_bytes, reply)) = &strict {
        assert_eq!(Some(reply), mended.as_ref().map(|(_, reply)| reply), "what needs no mending stays as it is");
        body(Body::new, reply.framing, &input[head_bytes.len()..]);
    }
    let Some((head_bytes, reply)) = mended else { return };
    let found = body(Body::lenient, reply.framing, &input[head_bytes.len()..]);
    is_chunks(reply.framing, &found);
    if method == "HEAD" || matches!(reply.status, 100..=199 | 204 | 304) {
        assert_eq!(reply.framing, Framing::None);
    }
    let back = Back { via: Some("us"), client, close, now: SystemTime::UNIX_EPOCH, content: Content::AsItIs };
    let written = forward::response(&reply, &back);
    if written.len() > longsplice_http::REPLY_HEAD_MAX {
        return;
    }
    let again = head(Scan::new, Kind::Response, &written).unwrap_or_else(|| panic!("{}", written.escape_ascii()));
    assert_eq!(again.len(), written.len(), "one head, and nothing behind it: {}", written.escape_ascii());
    let same = match Response::parse(again, method) {
        Err(Wrong::TooManyFields) => return,
        Err(Wrong::Status) if reply.status > 599 => return,
        parsed => parsed.unwrap_or_else(|w| panic!("{w}: {}", written.escape_ascii())),
    };
    let unchunked = client == Version::Http10 && reply.framing == Framing::Chunked;
    let framing = if unchunked { Framing::UntilClose } else { reply.framing };
    assert_eq!(
        (same.status, same.framing, same.length()),
        (reply.status, framing, if unchunked { None } else { reply.length() })
    );
    assert!(!(close && same.keep_alive) || reply.is_interim() || reply.upgrade.is_some(), "{}", written.escape_ascii());
}

/// How a program reads chunks that is as simple as it can be: up to the first line feed, a number, and what it says.
fn simple_chunks(mut input: &[u8]) -> Option<(Vec<u8>, &[u8])> {
    let mut content = Vec::new();
    let line = |input: &mut &[u8]| {
        let end = input.iter().position(|b| *b == b'\n')?;
        let (line, rest) = input.split_at(end + 1);
        *input = rest;
        Some(String::from_utf8_lossy(line).trim_end().to_owned())
    };
    loop {
        let size = line(&mut input)?;
        let size = usize::from_str_radix(size.split(';').next()?.trim(), 16).ok()?;
        if size == 0 {
            while !line(&mut input)?.is_empty() {}
            return Some((content, input));
        }
        content.extend(input.get(..size)?);
        input = &input[size..];
        line(&mut input)?;
    }
}

/// What goes on of a mended body is what the strict ones take, and has the same content.
fn is_chunks(framing: Framing, found: &Read) {
    if framing == Framing::Chunked && found.end == Ok(true) {
        let again = read(Body::new, framing, &found.written, usize::MAX);
        if again.end != Err(Wrong::Trailer) {
            assert_eq!((again.end, again.used), (Ok(true), found.written.len()), "{}", found.written.escape_ascii());
            assert_eq!(again.content, found.content);
        }
    }
}

pub(crate) fn chunked(input: &[u8]) {
    is_chunks(Framing::Chunked, &body(Body::lenient, Framing::Chunked, input));
    let found = body(Body::new, Framing::Chunked, input);
    assert!(input.starts_with(&found.written));
    if found.end == Ok(true) {
        let (content, rest) = simple_chunks(input).expect("what we accept everybody can read");
        assert_eq!((content.len(), rest.len()), (found.content.len(), input.len() - found.used));
        assert_eq!(content, found.content);
    }
}

/// A request target, and what rules and routes make of it.
pub(crate) fn target(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Ok(authority) = Authority::parse(text) {
        assert_eq!(Authority::parse(&authority.to_string()), Ok(authority.clone()));
        assert_ne!(authority.port, Some(0));
    }
    if let Ok(plain) = path::plain(text) {
        assert!(!plain.contains("//") && !plain.contains('\\'), "{plain:?}");
        assert!(!plain.bytes().any(|b| b < b' ' || b == 0x7f), "{plain:?}");
        assert!(!plain.split('/').any(|segment| segment == "." || segment == ".."), "{plain:?}");
        // Written as it is compared, it is compared with itself.
        if !plain.contains(['%', '?']) {
            assert_eq!(path::plain(&plain).as_deref(), Ok(plain.as_str()));
        }
    }
    request(format!("GET {text} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes());
    request(format!("OPTIONS {text} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes());
    request(format!("GET / HTTP/1.1\r\nHost: {text}\r\n\r\n").as_bytes());
}

/// A first number, which chooses the length of the body, and the value of a field.
pub(crate) fn range(input: &[u8]) {
    let Some((first, value)) = input.split_first() else { return };
    for length in [0, 1, u64::from(*first), u64::MAX] {
        let Some(bytes) = range::bytes_of(value, length) else { continue };
        assert!(bytes.start <= bytes.end && bytes.end <= length, "{bytes:?} of {length}");
        if !bytes.is_empty() {
            let again = format!("bytes={}-{}", bytes.start, bytes.end - 1);
            assert_eq!(range::bytes_of(again.as_bytes(), length), Some(bytes));
        }
    }
}

/// The value of a field, or of two.
pub(crate) fn cookie(input: &[u8]) {
    if input.iter().any(|b| b"\r\n".contains(b)) {
        return; // it is more than a value
    }
    let request = |fields: &[u8]| {
        let head = [&b"GET / HTTP/1.1\r\nHost: a\r\n"[..], fields, b"\r\n"].concat();
        let end = Scan::new(Kind::Request).feed(&head).ok().flatten()?;
        Request::parse(&head[..end]).ok().filter(|_| end == head.len())
    };
    let one = |value: &[u8]| [b"Cookie: ", value, b"\r\n"].concat();
    let Some(whole) = request(&one(input)) else { return };
    let values: Vec<&[u8]> = whole.fields.cookies("id").collect();
    for value in &values {
        assert!(!value.contains(&b';') && value.trim_ascii_end() == *value);
        // another cookie that ends so, or begins so, is none of ours
        let again = [b"x; xid=1; ID=2; idx=3;id=", *value, b" ;id"].concat();
        let again = request(&one(&again)).expect("a request");
        assert_eq!(again.fields.cookies("id").collect::<Vec<_>>(), [*value]);
    }
    // cut where cookies are, in two fields
    if let Some(at) = input.iter().position(|b| *b == b';')
        && let Some(two) = request(&[one(&input[..at]), one(&input[at + 1..])].concat())
    {
        assert_eq!(two.fields.cookies("id").collect::<Vec<_>>(), values);
    }
}
