//! Coded bodies that a filter reads and changes, with a server on the loopback device.

use crate::proxying::{LIMIT, OPEN, Proxy};
use longsplice_proxy::coding::{Coding, Decoder, Encoder, Expansion};
use std::{
    io::ErrorKind,
    net::SocketAddr,
    sync::{Arc, Mutex},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    time::timeout,
};

const HEAD: &[u8] = b"\r\n\r\n";
const ALL: [Coding; 4] = [Coding::Gzip, Coding::Deflate, Coding::Brotli, Coding::Zstd];
const CHANGE: &str = "change = [{ type = \"text/html\", remove_element = \"script\" }]\n";
const KNOWN: &str = "accept_encoding = \"known\"\n";

fn coded(coding: Coding, content: &[u8]) -> Vec<u8> {
    let (mut encoder, mut out) = (Encoder::new(coding).unwrap(), Vec::new());
    encoder.write(content, &mut out).unwrap();
    encoder.end(&mut out).unwrap();
    out
}

fn decoded(coding: Coding, content: &[u8]) -> Vec<u8> {
    let (mut decoder, mut out) = (Decoder::new(coding, Expansion::default()).unwrap(), Vec::new());
    decoder.add(content);
    decoder.end();
    while decoder.next(&mut out).unwrap() {}
    out
}

/// A server that answers each connection with these pieces, each after a byte more of the client's next request; and the heads
/// that it has seen.
async fn serve(pieces: Vec<Vec<u8>>) -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let theirs = seen.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = Vec::new();
            while !head.ends_with(HEAD) {
                match stream.read_u8().await {
                    Ok(byte) => head.push(byte),
                    Err(_) => return,
                }
            }
            theirs.lock().unwrap().push(String::from_utf8(head).unwrap());
            for piece in &pieces {
                if stream.write_all(piece).await.is_err() {
                    break;
                }
                tokio::task::yield_now().await;
            }
        }
    });
    (at, seen)
}

fn reply(coding: &str, more: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: {coding}\r\nETag: \"x\"\r\nContent-MD5: y\r\n\
         {more}Content-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

async fn proxy(filter: &str) -> Proxy {
    Proxy::start("http", &format!("{OPEN}via = \"\"\n[listener.filter]\n{filter}")).await
}

struct Got {
    head: String,
    content: Vec<u8>,
    end: Result<(), ErrorKind>,
}

impl Got {
    fn field(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    fn status(&self) -> &str {
        &self.head[9..12]
    }
}

async fn ask(proxy: &Proxy, server: SocketAddr, method: &str, fields: &str) -> Got {
    let mut client = proxy.connect().await;
    let text = format!("{method} http://{server}/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{fields}\r\n");
    client.write_all(text.as_bytes()).await.unwrap();
    let mut got = Vec::new();
    let end = timeout(LIMIT, client.read_to_end(&mut got)).await.unwrap().map(drop).map_err(|e| e.kind());
    let at = got.windows(4).position(|w| w == HEAD).map_or(got.len(), |at| at + 4);
    let (head, mut body) = got.split_at(at);
    let head = String::from_utf8(head.to_vec()).unwrap();
    let mut content = Vec::new();
    while head.contains("Transfer-Encoding: chunked") {
        let Some(end) = body.windows(2).position(|w| w == b"\r\n") else { break };
        let size = usize::from_str_radix(std::str::from_utf8(&body[..end]).unwrap(), 16).unwrap();
        let all = (end + 2 + size).min(body.len());
        content.extend(&body[end + 2..all]);
        body = &body[(all + 2).min(body.len())..];
    }
    content.extend(body);
    Got { head, content, end }
}

/// Long enough for several pieces, and with something to remove in each.
fn page() -> (Vec<u8>, Vec<u8>) {
    let part = |n: u32| format!("<p>{n} and {}<script>alert({n})</script></p>\n", n.wrapping_mul(2_654_435_761));
    let all: String = (0..5000).map(part).collect();
    let without: String = (0..5000).map(|n| part(n).replace(&format!("<script>alert({n})</script>"), "")).collect();
    (all.into_bytes(), without.into_bytes())
}

#[tokio::test]
async fn a_coding_is_taken_off_and_put_on_again_if_the_client_accepts_it() {
    let (page, want) = page();
    for coding in ALL {
        let (server, seen) = serve(vec![reply(coding.name(), "", &coded(coding, &page))]).await;
        for (encode, accepted, again) in [
            ("", "gzip, deflate, br, zstd, foo, *", false),
            ("encode = true\n", "gzip, deflate, br, zstd, foo, *", true),
            ("encode = true\n", "foo", false),
        ] {
            let proxy = proxy(&format!("{CHANGE}{KNOWN}{encode}")).await;
            let got = ask(&proxy, server, "GET", &format!("Accept-Encoding: {accepted}\r\n")).await;
            let asked = if accepted == "foo" { "identity" } else { "gzip, deflate, br, zstd" };
            let head = seen.lock().unwrap().pop().unwrap();
            assert!(head.contains(&format!("\r\nAccept-Encoding: {asked}\r\n")), "{head}");
            let content = if again { decoded(coding, &got.content) } else { got.content.clone() };
            assert!(content == want && got.end.is_ok(), "{coding:?}: {} bytes, {}", content.len(), got.head);
            assert!(!again || got.content.len() < want.len() / 2, "{coding:?}: {}", got.content.len());
            for head in [&got, &ask(&proxy, server, "HEAD", &format!("Accept-Encoding: {accepted}\r\n")).await] {
                assert_eq!(head.field("Content-Encoding"), again.then_some(coding.name()), "{}", head.head);
                assert_eq!(head.field("Vary"), Some("Accept-Encoding"));
                let gone = ["ETag", "Content-MD5", "Content-Length"].map(|name| head.field(name));
                assert_eq!(gone, [None; 3], "{}", head.head);
            }
            assert_eq!(proxy.server.counters().replies_changed, 1);
        }
    }
}

/// Without changes, nothing of that.
#[tokio::test]
async fn what_is_not_changed_stays_coded() {
    let body = coded(Coding::Gzip, b"<script>x</script>");
    let (server, _) = serve(vec![reply("gzip", "Cache-Control: no-transform\r\n", &body)]).await;
    let got = ask(&proxy(&format!("{CHANGE}{KNOWN}encode = true\n")).await, server, "GET", "").await;
    assert!(got.content == body && got.field("ETag").is_some() && got.field("Vary").is_none(), "{}", got.head);
}

/// A client of an event stream waits for each event.
#[tokio::test]
async fn what_has_come_does_not_wait_for_more() {
    for coding in ALL {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = listener.local_addr().unwrap();
        let proxy = proxy(&format!("{CHANGE}{KNOWN}encode = true\n")).await;
        let mut client = proxy.connect().await;
        let name = coding.name();
        let text = format!("GET http://{server}/ HTTP/1.0\r\nHost: x\r\nAccept-Encoding: {name}\r\n\r\n");
        client.write_all(text.as_bytes()).await.unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        let head = format!("HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: {name}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut got = Vec::new();
        while !got.ends_with(HEAD) {
            got.push(timeout(LIMIT, client.read_u8()).await.unwrap().unwrap());
        }
        let (mut encoder, mut decoder) =
            (Encoder::new(coding).unwrap(), Decoder::new(coding, Expansion::default()).unwrap());
        for n in 0..10 {
            let (mut out, mut event) = (Vec::new(), Vec::new());
            encoder.write(format!("event {n}<script></script>\n").as_bytes(), &mut out).unwrap();
            encoder.flush(&mut out).unwrap();
            stream.write_all(&out).await.unwrap();
            while event != format!("event {n}\n").as_bytes() {
                decoder.add(&[timeout(LIMIT, client.read_u8()).await.unwrap().unwrap()]);
                while decoder.next(&mut event).unwrap() {}
            }
        }
    }
}

#[tokio::test]
async fn content_that_cannot_be_read_is_refused_or_passed_and_counted() {
    let rule = "rules = [{ action = \"deny\", body_contains = 'never there' }]\n";
    for (filter, coding, status, counts) in [
        (CHANGE.to_owned(), "compress", "403", [1, 0]),
        (CHANGE.to_owned(), "gzip, br", "403", [1, 0]),
        (format!("{CHANGE}unreadable = \"pass\"\n"), "compress", "200", [0, 1]),
        (rule.to_owned(), "compress", "403", [1, 0]),
        (format!("{rule}unreadable = \"pass\"\n"), "compress", "200", [0, 1]),
    ] {
        let (server, _) = serve(vec![reply(coding, "", b"zzz")]).await;
        let proxy = proxy(&filter).await;
        let got = ask(&proxy, server, "GET", "").await;
        assert_eq!(got.status(), status, "{filter} {coding}");
        assert!(status != "200" || got.content == b"zzz" && got.field("ETag").is_some(), "{}", got.head);
        let counters = proxy.server.counters();
        assert_eq!([counters.replies_denied, counters.replies_unread], counts, "{filter} {coding}");
    }
}

/// A rule sees what the client will see.
#[tokio::test]
async fn rules_read_what_is_coded() {
    let (page, _) = page();
    let rules = "rules = [{ action = \"deny\", body_begins = '^evil' }, { action = \"deny\", body_contains = 'alert\\(4999\\)' }]\n";
    for coding in ALL {
        let proxy = proxy(rules).await;
        let of = |content: &[u8]| vec![reply(coding.name(), "", &coded(coding, content))];
        let (server, _) = serve(of(b"evil")).await;
        assert_eq!(ask(&proxy, server, "GET", "").await.status(), "403", "{coding:?}");
        let good = coded(coding, &page[..page.len() / 2]);
        let (server, _) = serve(of(&page[..page.len() / 2])).await;
        let got = ask(&proxy, server, "GET", "").await;
        assert!(got.content == good && got.end.is_ok() && got.field("ETag").is_some(), "{coding:?}: {}", got.head);
        let (server, _) = serve(of(&page)).await;
        let got = ask(&proxy, server, "GET", "").await;
        assert!(got.status() == "403" || got.end == Err(ErrorKind::ConnectionReset), "{coding:?}: {}", got.head);
    }
}

/// An incomplete or damaged body never looks complete, and a bomb does no harm.
#[tokio::test]
async fn content_that_is_damaged_or_a_bomb() {
    let (page, _) = page();
    for encode in ["", "encode = true\n"] {
        let proxy = proxy(&format!("{CHANGE}{KNOWN}{encode}decoded_size = 20000000\n")).await;
        for coding in ALL {
            let whole = coded(coding, &page);
            let cut = &whole[..whole.len() - 1];
            let more = [&whole[..], b"more"].concat();
            let bomb = coded(coding, &vec![b'a'; 30_000_000]);
            let hidden = coded(coding, &[b"<script>", &vec![b'a'; 30_000_000][..]].concat());
            for body in [cut, &more, b"plain", &bomb, &hidden] {
                let (server, _) = serve(vec![reply(coding.name(), "", body)]).await;
                let got = ask(&proxy, server, "GET", "Accept-Encoding: gzip, deflate, br, zstd\r\n").await;
                let refused = got.status() == "502" || got.end == Err(ErrorKind::ConnectionReset);
                assert!(refused && got.content.len() < 2_000_000, "{coding:?}, {} bytes: {}", body.len(), got.head);
            }
        }
        assert!(proxy.server.counters().bad_replies > 0);
    }
}

/// Whatever delimits it: neither an end that comes too early nor one that looks right makes half of a body look whole.
#[tokio::test]
async fn bodies_that_end_too_early_look_incomplete() {
    let (page, want) = page();
    let html = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: ";
    for coding in ALL {
        let (whole, name) = (coded(coding, &page), coding.name());
        let half = &whole[..whole.len() / 2];
        let chunk = |body: &[u8]| [format!("{:x}\r\n", body.len()).as_bytes(), body, b"\r\n"].concat();
        let chunked = format!("{html}{name}\r\nTransfer-Encoding: chunked\r\n\r\n").into_bytes();
        let close = format!("{html}{name}\r\n\r\n").into_bytes();
        for (pieces, is_whole) in [
            (
                vec![
                    chunked.clone(),
                    chunk(half),
                    chunk(&whole[half.len()..]),
                    b"0\r\nContent-MD5: x\r\n\r\n".to_vec(),
                ],
                true,
            ),
            (vec![chunked.clone(), chunk(half), b"0\r\n\r\n".to_vec()], false),
            (vec![chunked, chunk(half)], false),
            (vec![close.clone(), half.to_vec(), whole[half.len()..].to_vec()], true),
            (vec![close, half.to_vec()], false),
        ] {
            let proxy = proxy(&format!("{CHANGE}{KNOWN}")).await;
            let (server, _) = serve(pieces).await;
            let got = ask(&proxy, server, "GET", &format!("Accept-Encoding: {name}\r\n")).await;
            assert_eq!(got.end.is_ok() && got.status() == "200", is_whole, "{name}: {} {:?}", got.head, got.end);
            assert!(!is_whole || got.content == want, "{name}: {}", got.content.len());
            assert!(!got.head.contains("Content-MD5"), "{}", got.head);
        }
    }
}

/// Each reason has its counter, and the log says it.
#[tokio::test]
async fn why_content_is_refused_is_counted_and_said() {
    let page = page().0;
    let whole = coded(Coding::Gzip, &page);
    let bomb = coded(Coding::Gzip, &vec![b'a'; 3_000_000]);
    let rule = "rules = [{ action = \"deny\", body_contains = 'never there' }]\n";
    for filter in [format!("{CHANGE}{KNOWN}"), rule.to_owned()] {
        for (more, body, why, counts) in [
            ("", &b"no gzip"[..], "not what its Content-Encoding says", [1, 0]),
            ("", &bomb, "becomes too much", [0, 1]),
            ("decoded_size = 1000\n", &whole, "too long", [0, 1]),
        ] {
            let proxy = proxy(&format!("{filter}{more}")).await;
            let (server, _) = serve(vec![reply("gzip", "", body)]).await;
            let got = ask(&proxy, server, "GET", "Accept-Encoding: gzip\r\n").await;
            assert!(got.status() == "502" || got.end == Err(ErrorKind::ConnectionReset), "{}", got.head);
            let line = proxy.line().await;
            assert!(line["refusal"].as_str().unwrap().contains(why), "{line}");
            assert!(["bad-reply", "server-reset"].contains(&line["how"].as_str().unwrap()), "{line}");
            let counters = proxy.server.counters();
            assert_eq!([counters.bodies_damaged, counters.bodies_too_long], counts, "{filter} {why}");
        }
    }
}

#[tokio::test]
async fn rules_that_need_not_be_kept_let_pass_what_cannot_be_read() {
    let rules = "unreadable = \"pass\"\nrules = [{ action = \"deny\", body_contains = 'evil' }]\n";
    let proxy = proxy(rules).await;
    let evil = coded(Coding::Gzip, b"evil");
    for (body, status) in [(&b"no gzip"[..], "200"), (&evil, "403")] {
        let (server, _) = serve(vec![reply("gzip", "", body)]).await;
        let got = ask(&proxy, server, "GET", "").await;
        assert_eq!(got.status(), status, "{}", got.head);
        assert!(status != "200" || got.content == body);
    }
    let counters = proxy.server.counters();
    assert_eq!((counters.replies_unread, counters.replies_denied, counters.bodies_damaged), (1, 1, 0));
}

/// The beginning of coded content is needed to read the rest of it.
#[tokio::test]
async fn parts_of_what_is_coded() {
    let part = [&b"HTTP/1.1 206 Partial Content\r\nContent-Type: text/html\r\nContent-Encoding: gzip\r\n\
        Content-Range: bytes 5-7/100\r\nContent-Length: 3\r\n\r\nabc"[..]]
    .concat();
    let rules = "rules = [{ action = \"deny\", body_contains = 'evil' }]\n";
    for (filter, status, asked) in [
        (rules.to_owned(), "403", 1),
        (format!("{rules}unreadable = \"pass\"\n"), "206", 1),
        // it is asked again, and this server sends a part again
        (format!("{CHANGE}{KNOWN}"), "502", 2),
    ] {
        let (server, seen) = serve(vec![part.clone()]).await;
        let got = ask(&proxy(&filter).await, server, "GET", "Range: bytes=5-7\r\n").await;
        assert_eq!((got.status(), seen.lock().unwrap().len()), (status, asked), "{filter}: {}", got.head);
        assert!(asked == 1 || !seen.lock().unwrap()[1].contains("Range"));
    }
}

/// What one client accepts does not come to another.
#[tokio::test]
async fn caches_tell_codings_apart() {
    let fresh = "Cache-Control: max-age=1000\r\nVary: Accept-Encoding\r\n";
    let rules = "rules = [{ action = \"deny\", body_contains = 'evil' }]\n";
    let body = coded(Coding::Gzip, b"good");
    for (filter, asked) in [(rules.to_owned(), 2), (format!("{CHANGE}{KNOWN}encode = true\n"), 5)] {
        let (server, seen) = serve(vec![reply("gzip", fresh, &body)]).await;
        let proxy = proxy(&format!("{filter}[listener.cache]\ndir = \"cache\"\n")).await;
        for (accepted, n) in [("gzip", 1), ("gzip, foo", 1), ("br", 2), ("gzip", 2), ("br, dcb", 2)] {
            let got = ask(&proxy, server, "GET", &format!("Accept-Encoding: {accepted}\r\n")).await;
            assert!(got.end.is_ok() && got.status() == "200", "{}", got.head);
            if asked == 2 {
                assert_eq!(seen.lock().unwrap().len(), n, "{accepted}");
                crate::cache::stored(&proxy, n as u64).await;
            }
        }
        assert_eq!(seen.lock().unwrap().len(), asked, "{filter}");
    }
}
