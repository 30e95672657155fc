//! Bodies of requests that a filter judges and changes, with a server on the loopback device.

use crate::proxying::{LIMIT, OPEN, Proxy};
use longsplice_proxy::coding::{Coding, Encoder};
use std::net::SocketAddr;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    sync::mpsc,
    time::timeout,
};

/// A server that reads each connection to its end, and answers once a request is complete. Returns what connections have sent.
async fn serve() -> (SocketAddr, mpsc::UnboundedReceiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let (tell, told) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (mut all, mut answered) = (Vec::new(), false);
            while let Ok(n @ 1..) = stream.read_buf(&mut all).await {
                let text = String::from_utf8_lossy(&all);
                let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
                let length =
                    head.lines().find_map(|l| l.strip_prefix("Content-Length: ")).map(|l| l.parse::<usize>().unwrap());
                let is_whole = length.map_or(body.ends_with("0\r\n\r\n"), |length| body.len() == length);
                if is_whole && !answered && n > 0 {
                    answered = true;
                    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await.unwrap();
                }
            }
            let _ = tell.send(String::from_utf8_lossy(&all).into_owned());
        }
    });
    (at, told)
}

async fn proxy(upload: &str) -> Proxy {
    Proxy::start("http", &format!("{OPEN}via = \"\"\n[listener.filter]\n{upload}\n")).await
}

/// Sends a body in pieces. Returns the status, and head and content that the server has got.
async fn send(proxy: &Proxy, fields: &str, pieces: &[&[u8]]) -> (String, String, String) {
    let (server, mut told) = serve().await;
    let mut client = proxy.connect().await;
    let head = format!("POST http://{server}/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{fields}\r\n");
    client.write_all(head.as_bytes()).await.unwrap();
    for piece in pieces {
        if client.write_all(piece).await.is_err() {
            break;
        }
        tokio::task::yield_now().await;
    }
    let mut got = Vec::new();
    let _ = timeout(LIMIT, client.read_to_end(&mut got)).await.unwrap();
    let status = String::from_utf8(got.get(9..12).unwrap_or_default().to_vec()).unwrap();
    drop(client);
    proxy.lines().await; // all connections have ended
    let seen = timeout(LIMIT, told.recv());
    // what the head decides is not passed on
    let unasked = status == "415" || fields.contains("video/");
    let seen = if unasked { String::new() } else { seen.await.unwrap().unwrap() };
    let (head, body) = seen.split_once("\r\n\r\n").unwrap_or((&seen, ""));
    let mut content = String::new();
    if head.contains("Transfer-Encoding: chunked") {
        let mut rest = body;
        while let Some((size, more)) = rest.split_once("\r\n") {
            let size = usize::from_str_radix(size, 16).unwrap();
            if size == 0 {
                content += "<end>";
                break;
            }
            content += &more[..size.min(more.len())];
            rest = more.get(size + 2..).unwrap_or_default();
        }
    } else {
        content = body.into();
    }
    (status, head.to_owned(), content)
}

fn whole(fields: &str, body: &[u8]) -> String {
    format!("Content-Type: text/plain\r\n{fields}Content-Length: {}\r\n", body.len())
}

fn coded(coding: Coding, content: &[u8]) -> Vec<u8> {
    let (mut encoder, mut out) = (Encoder::new(coding).unwrap(), Vec::new());
    encoder.write(content, &mut out).unwrap();
    encoder.end(&mut out).unwrap();
    out
}

const CHANGE: &str = "upload.change = [{ type = \"text/*\", replace = 'colour', with = \"color\" }]";

#[tokio::test]
async fn uploads_are_changed_whatever_their_framing_and_coding() {
    let about = "Content-MD5: x\r\nDigest: y\r\nX-Other: z\r\n";
    let chunked = "Content-Type: text/plain\r\nTransfer-Encoding: chunked\r\n";
    let body = b"one colour, two colours";
    let gzip = coded(Coding::Gzip, body);
    for (fields, pieces) in [
        (whole(about, body), vec![&body[..]]),
        (whole(about, body), body.chunks(1).collect()),
        (chunked.to_owned(), vec![&b"7\r\none col\r\n10\r\nour, two colours\r\n0\r\nX: y\r\n\r\n"[..]]),
        (whole(&format!("Content-Encoding: gzip\r\n{about}"), &gzip), gzip.chunks(5).collect()),
    ] {
        let proxy = proxy(CHANGE).await;
        let (status, head, content) = send(&proxy, &fields, &pieces).await;
        assert_eq!((status.as_str(), content.as_str()), ("200", "one color, two colors<end>"), "{head}");
        for name in ["Content-MD5", "Digest", "Content-Encoding", "Content-Length"] {
            assert!(!head.contains(name), "{head}");
        }
        assert_eq!(head.contains("X-Other: z"), fields.contains("X-Other"));
        assert_eq!(proxy.server.counters().requests_changed, 1);
    }
    // others are as they were
    let fields = whole(about, body).replace("text/plain", "image/png");
    let (status, head, content) = send(&proxy(CHANGE).await, &fields, &[body]).await;
    assert!(status == "200" && content.as_bytes() == body && head.contains("Content-MD5: x"), "{head}");
}

#[tokio::test]
async fn behind_the_limit_of_a_change_the_rest_of_an_upload_is_as_it_is() {
    let change = CHANGE.replace(" }]", ", until = 10 }]");
    let long = format!("colour colour colour{}", "x".repeat(20_000));
    let (status, head, content) = send(&proxy(&change).await, &whole("", long.as_bytes()), &[long.as_bytes()]).await;
    let want = format!("color colour colour{}<end>", "x".repeat(20_000));
    assert!(status == "200" && content == want, "{head}: {:.60}", content);
}

/// The server never gets the end of what is denied.
#[tokio::test]
async fn uploads_are_judged() {
    let rules =
        "upload.rules = [{ action = \"deny\", body_contains = 'secret' }, { action = \"deny\", type = \"video/*\" }]\n";
    let chunked = "Transfer-Encoding: chunked\r\n";
    let body = b"no se\x63ret at all";
    let zstd = coded(Coding::Zstd, body);
    let coded_fields = whole("Content-Encoding: zstd\r\n", &zstd);
    for (fields, pieces, status) in [
        (whole("", body), vec![&body[..]], "403"),
        (whole("", body), body.chunks(1).collect(), "403"),
        (chunked.into(), vec![&b"6\r\nno sec\r\n"[..], b"3\r\nret\r\n", b"0\r\n\r\n"], "403"),
        (coded_fields, vec![&zstd[..]], "403"),
        (whole("", b"no sec ret"), vec![&b"no sec ret"[..]], "200"),
        (whole("", b"x").replace("text/plain", "video/mp4"), vec![&b"x"[..]], "403"),
    ] {
        let proxy = proxy(rules).await;
        let (got, head, content) = send(&proxy, &fields, &pieces).await;
        assert_eq!(got, status, "{fields}");
        let is_whole = content.ends_with("<end>") || content == "no sec ret" && !head.contains("chunked");
        assert_eq!(is_whole, status == "200", "{head}: {content}");
        assert_eq!(proxy.server.counters().denied, u64::from(status == "403"));
    }
}

#[tokio::test]
async fn uploads_that_cannot_be_read() {
    let bomb = coded(Coding::Brotli, &vec![b'a'; 30_000_000]);
    let fields = |coding: &str, body: &[u8]| whole(&format!("Content-Encoding: {coding}\r\n"), body);
    for (more, fields, body, status) in [
        ("", fields("compress", b"z"), &b"z"[..], "415"),
        ("unreadable = \"pass\"\n", fields("compress", b"z"), b"z", "200"),
        ("", fields("gzip", b"not at all"), b"not at all", "400"),
        ("", fields("br", &bomb), &bomb, "413"),
    ] {
        let (got, head, content) = send(&proxy(&format!("{more}{CHANGE}")).await, &fields, &[body]).await;
        assert_eq!(got, status, "{head}");
        assert!(status == "200" || !content.contains("<end>") && content.len() < 2_000_000, "{} bytes", content.len());
    }
}

/// Whoever waits for 100 is not told to send what is refused, and nobody is asked.
#[tokio::test]
async fn what_the_head_decides_is_refused_before_the_body() {
    let rules = "upload.rules = [{ action = \"deny\", type = \"video/*\" }, { action = \"deny\", body_contains = 'x' }]\n\
        no_transform = \"deny\"\n";
    let proxy = proxy(&format!("{rules}{CHANGE}")).await;
    let server = crate::proxying::closed().await; // who asks it is answered with 502
    for (fields, status, more) in [
        ("Content-Type: video/mp4\r\n", "403", ""),
        ("Content-Encoding: compress\r\n", "415", "\r\nAccept-Encoding: gzip, x-gzip, deflate, br, zstd\r\n"),
        ("Content-Type: text/css\r\nContent-Encoding: gzip, br\r\n", "415", ""),
        ("Content-Type: text/css\r\nContent-Range: bytes 1-5/6\r\n", "415", ""),
        ("Content-Type: text/css\r\nCache-Control: no-transform\r\n", "403", ""),
        ("Content-Type: text/css\r\n", "502", ""),
    ] {
        let head = format!(
            "PUT http://{server}/ HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n{fields}\r\n"
        );
        let answer = String::from_utf8(proxy.answer(head.as_bytes()).await).unwrap();
        assert_eq!(answer.get(9..12), Some(status), "{fields}: {answer}");
        assert!(answer.contains(more) && !answer.contains(" 100 "), "{answer}");
    }
    let counters = proxy.server.counters();
    assert_eq!((counters.denied, counters.unreachable), (5, 1));
}

/// What is changed after 100 was sent, and what follows it on the same connection.
#[tokio::test]
async fn requests_that_follow_a_changed_upload_are_requests() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = listener.local_addr().unwrap();
    // the change would end the chunk, if it could
    let filter =
        "upload.change = [{ type = \"text/plain\", replace = 'colour', with = \"\\r\\n0\\r\\n\\r\\nGET /evil\" }]";
    let proxy = proxy(filter).await;
    let mut client = proxy.connect().await;
    let put =
        format!("PUT http://{server}/ HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Type: text/plain\r\n");
    client.write_all(format!("{put}Transfer-Encoding: chunked\r\n\r\n").as_bytes()).await.unwrap();
    let (mut stream, _) = listener.accept().await.unwrap();
    let until = async |stream: &mut tokio::net::TcpStream, end: &[u8]| {
        let mut seen = Vec::new();
        while !seen.ends_with(end) {
            seen.push(timeout(LIMIT, stream.read_u8()).await.unwrap().unwrap());
        }
        String::from_utf8(seen).unwrap()
    };
    let head = until(&mut stream, b"\r\n\r\n").await;
    assert!(head.contains("Expect: 100-continue") && head.contains("Transfer-Encoding: chunked"), "{head}");
    stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.unwrap();
    assert_eq!(until(&mut client, b"\r\n\r\n").await, "HTTP/1.1 100 Continue\r\n\r\n");
    let next = format!("GET http://{server}/next HTTP/1.1\r\nHost: x\r\n\r\n");
    client.write_all(format!("8;ext=1\r\na colour\r\n0\r\nX-Trailer: y\r\n\r\n{next}").as_bytes()).await.unwrap();
    let body = until(&mut stream, b"GET /evil\r\n0\r\n\r\n").await;
    let (size, rest) = body.split_once("\r\n").unwrap();
    assert!(!body.contains("ext") && !body.contains("X-Trailer"), "{body}");
    let all: usize = usize::from_str_radix(size, 16).unwrap();
    assert!(rest.len() > all, "{body}");
    stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.unwrap();
    assert!(until(&mut client, b"\r\n\r\n").await.contains(" 204 "));
    assert!(until(&mut stream, b"\r\n\r\n").await.starts_with("GET /next "));
}

/// Two readings of where a body ends are refused before its coding is looked at.
#[tokio::test]
async fn codings_of_the_transfer_are_none_of_the_content() {
    let gzip = coded(Coding::Gzip, b"one colour");
    for (fields, status) in [
        ("Transfer-Encoding: gzip, chunked\r\n", "501"),
        ("Transfer-Encoding: gzip\r\n", "400"),
        ("Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", "400"),
        ("Content-Length: 3\r\nContent-Length: 4\r\n", "400"),
        ("Transfer-Encoding: x\r\nContent-Encoding: chunked\r\n", "400"),
    ] {
        let (server, _told) = serve().await;
        let head = format!("POST http://{server}/ HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n{fields}\r\n");
        let proxy = proxy(CHANGE).await;
        let answer = proxy.answer(&[head.as_bytes(), &gzip].concat()).await;
        assert_eq!(std::str::from_utf8(&answer[9..12]).unwrap(), status, "{fields}");
    }
    // of a coded content in chunks
    let chunk = [format!("{:x}\r\n", gzip.len()).as_bytes(), &gzip, b"\r\n0\r\n\r\n"].concat();
    let fields = "Content-Type: text/plain\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n";
    let (status, head, content) = send(&proxy(CHANGE).await, fields, &[&chunk]).await;
    assert!(status == "200" && content == "one color<end>" && !head.contains("Content-Encoding"), "{head} {content}");
}

/// A server that takes such a name for Content-Encoding would decode what no rule has read.
#[tokio::test]
async fn names_that_servers_mistake_do_not_hide_content() {
    let rules = "upload.rules = [{ action = \"deny\", body_contains = 'secret' }]\n";
    for name in ["Content_Encoding", "content.encoding", "CONTENT--ENCODING"] {
        let fields = whole(&format!("{name}: gzip\r\n"), b"harmless");
        let (status, head, content) = send(&proxy(rules).await, &fields, &[b"harmless"]).await;
        assert!(status == "200" && content == "harmless" && !head.contains("gzip"), "{name}: {head}");
    }
}

/// The limit of the listener counts what comes, and limits of codings what becomes of it.
#[tokio::test]
async fn uploads_that_are_too_long() {
    let body = coded(Coding::Gzip, "one colour ".repeat(10_000).as_bytes());
    for (more, limits, status, too_long) in
        [("", "", "200", 0), ("decoded_size = 50000\n", "", "413", 1), ("", "limits.request_body = 100\n", "413", 0)]
    {
        let listener = format!("{OPEN}{limits}[listener.filter]\n{more}{CHANGE}\n");
        let proxy = Proxy::start("http", &listener).await;
        let fields = "Content-Type: text/plain\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n";
        let chunk = [format!("{:x}\r\n", body.len()).as_bytes(), &body, b"\r\n0\r\n\r\n"].concat();
        let (got, head, content) = send(&proxy, fields, &[&chunk]).await;
        assert_eq!((got.as_str(), content.ends_with("<end>")), (status, status == "200"), "{head}");
        assert_eq!(proxy.server.counters().bodies_too_long, too_long);
    }
}
