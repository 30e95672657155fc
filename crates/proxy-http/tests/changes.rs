//! Bodies that a filter changes, with servers on the loopback device that say exactly what a test wants.

use crate::{
    origin::{Origin, undated},
    proxying::{LIMIT, OPEN, Proxy},
};
use std::io::ErrorKind;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

const HEAD: &str = "\r\n\r\n";
const HTML: &str = "Content-Type: text/html\r\n";
const SCRIPT: &str = "change = [{ type = \"text/html\", remove_element = \"script\" }]\n";

async fn proxy(filter: &str) -> Proxy {
    Proxy::start("http", &format!("{OPEN}via = \"\"\n[listener.filter]\n{filter}")).await
}

/// What the client gets of a reply, up to the end or the reset.
async fn reply(proxy: &Proxy, line: &str, reply: &str) -> (String, Result<(), ErrorKind>) {
    let origin = Origin::start(vec![vec![(HEAD, Box::leak(reply.to_owned().into_boxed_str()))]]).await;
    ask(proxy, &origin, line).await
}

async fn ask(proxy: &Proxy, origin: &Origin, line: &str) -> (String, Result<(), ErrorKind>) {
    let mut client = proxy.connect().await;
    let (line, fields) = line.split_once('\n').unwrap_or((line, ""));
    let target = line.replace("URL", &origin.url("/"));
    let text = format!("{target}\r\nHost: x\r\nConnection: close\r\n{fields}\r\n");
    client.write_all(text.as_bytes()).await.unwrap();
    let mut got = Vec::new();
    let end = timeout(LIMIT, client.read_to_end(&mut got)).await.unwrap().map(drop).map_err(|e| e.kind());
    (undated(&String::from_utf8(got).unwrap()), end)
}

/// Head without Connection, and the content of a complete reply, without chunks.
fn parts(reply: &str) -> (String, String) {
    let (head, mut body) = reply.split_once(HEAD).unwrap();
    let head = format!("{head}\r\n").replace("Connection: close\r\n", "");
    if !head.contains("chunked") {
        return (head, body.into());
    }
    let mut content = String::new();
    loop {
        let (size, rest) = body.split_once("\r\n").unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        let (chunk, rest) = rest.split_at(size);
        content += chunk;
        body = rest.strip_prefix("\r\n").unwrap();
        if size == 0 {
            assert_eq!(body, "", "{reply}");
            return (head, content);
        }
    }
}

const GET: &str = "GET URL HTTP/1.1";

#[tokio::test]
async fn bodies_are_changed_whatever_their_framing() {
    let proxy = proxy(SCRIPT).await;
    let body = "<p>one<script>alert(1)</script>two</p>";
    let chunked = "8;x=y\r\n<p>one<s\r\n1e\r\ncript>alert(1)</script>two</p>\r\n0\r\nDigest: x\r\n\r\n";
    let length = format!("Content-Length: {}\r\n", body.len());
    let in_chunks = "Transfer-Encoding: chunked\r\n";
    for (line, said, framing) in [
        (GET, format!("{length}\r\n{body}"), in_chunks),
        (GET, format!("{in_chunks}\r\n{chunked}"), in_chunks),
        (GET, format!("\r\n{body}"), ""),
        ("GET URL HTTP/1.0", format!("{length}\r\n{body}"), ""),
        ("GET URL HTTP/1.0", format!("{in_chunks}\r\n{chunked}"), ""),
        ("GET URL HTTP/1.0", format!("\r\n{body}"), ""),
    ] {
        let (got, end) = reply(&proxy, line, &format!("HTTP/1.1 200 OK\r\n{HTML}{said}")).await;
        let want = (format!("HTTP/1.1 200 OK\r\n{HTML}{framing}"), "<p>onetwo</p>".to_owned());
        assert_eq!((parts(&got), end), (want, Ok(())), "{line}: {said}: {got}");
    }
    assert_eq!(proxy.server.counters().replies_changed, 6);
}

/// Another version of a body under the validator of the first would poison caches behind us.
#[tokio::test]
async fn what_is_said_of_the_bytes_is_left_out_and_of_others_kept() {
    let proxy = proxy(SCRIPT).await;
    let about = "ETag: \"x\"\r\nLast-Modified: Thu, 01 Jan 1970 00:00:00 GMT\r\nAccept-Ranges: bytes\r\nDigest: a\r\n\
                 Repr-Digest: a\r\nContent-Digest: a\r\nContent-MD5: a\r\n";
    let of = |media: &str| format!("HTTP/1.1 200 OK\r\nContent-Type: {media}\r\n{about}Content-Length: 1\r\n\r\n");
    for (line, body, framing) in [(GET, "a", "Transfer-Encoding: chunked\r\n"), ("HEAD URL HTTP/1.1", "", "")] {
        let (got, _) = reply(&proxy, line, &(of("text/html") + body)).await;
        assert_eq!(parts(&got), (format!("HTTP/1.1 200 OK\r\n{HTML}{framing}"), body.into()), "{line}");
        let (got, _) = reply(&proxy, line, &(of("text/plain") + body)).await;
        assert_eq!(got, (of("text/plain") + body).replace(HEAD, "\r\nConnection: close\r\n\r\n"));
    }
    // there is nothing that could be changed
    for said in [
        "304 Not Modified\r\nETag: \"x\"\r\n",
        "204 No Content\r\nETag: \"x\"\r\n",
        "200 OK\r\nETag: \"x\"\r\nContent-Length: 0\r\n",
    ] {
        let (got, _) = reply(&proxy, GET, &format!("HTTP/1.1 {said}{HTML}\r\n")).await;
        assert!(got.contains("ETag: \"x\"\r\n") && got.ends_with(HEAD), "{got}");
    }
    assert_eq!(proxy.server.counters().replies_changed, 1);
}

#[tokio::test]
async fn coded_replies_are_not_asked_for_and_refused_or_passed() {
    let coded = format!("HTTP/1.1 200 OK\r\n{HTML}Content-Encoding: compress\r\nContent-Length: 1\r\n\r\nz");
    for (more, status) in [("", "403"), ("unreadable = \"pass\"\n", "200")] {
        let proxy = proxy(&format!("{SCRIPT}{more}")).await;
        let origin = Origin::start(vec![vec![(HEAD, Box::leak(coded.clone().into_boxed_str()))]]).await;
        let (got, _) = ask(&proxy, &origin, &format!("{GET}\nAccept-Encoding: gzip\r\n")).await;
        assert!(got.starts_with(&format!("HTTP/1.1 {status} ")), "{got}");
        assert!(origin.seen()[0].contains("\r\nAccept-Encoding: identity\r\n"), "{:?}", origin.seen());
        assert_eq!(proxy.server.counters().replies_denied, u64::from(status == "403"));
    }
    let forbidden = format!("HTTP/1.1 200 OK\r\n{HTML}Cache-Control: no-transform\r\n\r\n<script>x</script>");
    for (more, body) in [("", "<script>x</script>"), ("no_transform = \"change\"\n", "")] {
        let proxy = proxy(&format!("{SCRIPT}{more}")).await;
        let (got, _) = reply(&proxy, GET, &forbidden).await;
        assert_eq!(parts(&got).1, body);
    }
}

/// What is before a part is not known: it may be in the middle of an element.
#[tokio::test]
async fn parts_of_what_is_changed_are_asked_for_as_a_whole() {
    let part = |media: &str| {
        let head = format!("HTTP/1.1 206 Part\r\nContent-Type: {media}\r\nContent-Range: bytes 9-9/20\r\n");
        Box::leak(format!("{head}Content-Length: 1\r\n\r\nx").into_boxed_str())
    };
    let whole = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 20\r\n\r\n<script>x</script>.\n";
    let proxy = proxy(SCRIPT).await;
    let get = format!("{GET}\nRange: bytes=9-9\r\nIf-Range: \"x\"\r\n");
    for media in ["text/html", "multipart/byteranges; boundary=x"] {
        let origin = Origin::start(vec![vec![(HEAD, part(media))], vec![(HEAD, whole)]]).await;
        let (got, end) = ask(&proxy, &origin, &get).await;
        assert_eq!((parts(&got).1.as_str(), end), (".\n", Ok(())), "{got}");
        let ranges: Vec<bool> = origin.seen().iter().map(|seen| seen.contains("Range")).collect();
        assert_eq!(ranges, [true, false]);
    }
    let origin = Origin::start(vec![vec![(HEAD, part("text/html"))]; 2]).await;
    assert!(ask(&proxy, &origin, &get).await.0.starts_with("HTTP/1.1 502 "), "a server that sends parts unasked");
    let origin = Origin::start(vec![vec![(HEAD, part("video/mp4"))]]).await;
    assert!(ask(&proxy, &origin, &get).await.0.starts_with("HTTP/1.1 206 "), "nothing is changed in it");
}

#[tokio::test]
async fn behind_the_limit_the_rest_is_as_it_is() {
    let proxy = proxy("change = [{ type = \"text/html\", replace = 'aa', with = \"-\", until = 5 }]\n").await;
    let content = "aaaabaaaab";
    let length = format!("Content-Length: 10\r\n\r\n{content}");
    let chunks = "Transfer-Encoding: chunked\r\n\r\n2\r\naa\r\n4\r\naaba\r\n4\r\naaab\r\n0\r\n\r\n";
    for line in [GET, "GET URL HTTP/1.0"] {
        for said in [&length, chunks, &format!("\r\n{content}")] {
            let (got, end) = reply(&proxy, line, &format!("HTTP/1.1 200 OK\r\n{HTML}{said}")).await;
            assert_eq!((parts(&got).1.as_str(), end), ("--baaaab", Ok(())), "{line}: {said}: {got}");
        }
    }
    // the rest is a chunk of its own, or what was left of the server's; the connections to server and client are used again
    let long = "aaaab".repeat(4000);
    let length = format!("Content-Length: 20000\r\n\r\n{long}");
    let in_chunks = "Transfer-Encoding: chunked\r\n\r\n";
    for said in [length.clone(), format!("{in_chunks}4e20\r\n{long}\r\n0\r\nX: y\r\n\r\n")] {
        let (got, end) = reply(&proxy, GET, &format!("HTTP/1.1 200 OK\r\n{HTML}{said}")).await;
        let got = got.replace("X: y\r\n", "");
        // size and content of two chunks, and the last one
        assert_eq!((got.split_once(HEAD).unwrap().1.split("\r\n").count(), end), (7, Ok(())), "{got}");
        assert!(parts(&got).1 == format!("--b{}", &long[5..]), "{got}");
    }
    let said = format!("HTTP/1.1 200 OK\r\n{HTML}{length}");
    let said: &str = Box::leak(said.into_boxed_str());
    let origin = Origin::start(vec![vec![(HEAD, said), (HEAD, said)]]).await;
    let get = |close: &str| format!("GET {} HTTP/1.1\r\nHost: x\r\n{close}\r\n", origin.url("/"));
    let got = proxy.answer((get("") + &get("Connection: close\r\n")).as_bytes()).await;
    assert_eq!(String::from_utf8(got).unwrap().matches("aaaab\r\n0\r\n\r\n").count(), 2);
    assert_eq!(origin.seen().len(), 1);
}

/// An incomplete body never looks complete.
#[tokio::test]
async fn bodies_that_break_off() {
    let proxy = proxy(SCRIPT).await;
    for said in ["Content-Length: 99\r\n\r\nabc", "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n9\r\n<script"] {
        for line in [GET, "GET URL HTTP/1.0"] {
            let (got, end) = reply(&proxy, line, &format!("HTTP/1.1 200 OK\r\n{HTML}{said}")).await;
            assert!(end == Err(ErrorKind::ConnectionReset) && !got.contains("0\r\n\r\n"), "{line}: {end:?} {got}");
        }
    }
}

/// Rules see what the server sends, and hold it back; what passes is changed all the same.
#[tokio::test]
async fn rules_and_changes_together() {
    let rules =
        "rules = [{ action = \"deny\", body_begins = 'evil' }, { action = \"deny\", body_contains = 'worse' }]\n";
    let proxy = proxy(&format!("{rules}{SCRIPT}")).await;
    let of = |body: &str| format!("HTTP/1.1 200 OK\r\n{HTML}Content-Length: {}\r\n\r\n{body}", body.len());
    let (got, _) = reply(&proxy, GET, &of("a<script>evil</script>")).await;
    assert!(got.starts_with("HTTP/1.1 403 "), "{got}");
    let (got, end) = reply(&proxy, GET, &of(&format!("a<script>good</script>{}", "b".repeat(100_000)))).await;
    assert_eq!((parts(&got).1.len(), end), (100_001, Ok(())));
    let (_, end) = reply(&proxy, GET, &of(&format!("{}<script>worse</script>", "b".repeat(100_000)))).await;
    assert_eq!(end, Err(ErrorKind::ConnectionReset));
}

/// Each byte of a body may become as much as a kilobyte, which does not all wait in memory.
#[tokio::test]
async fn a_body_that_grows_a_thousandfold() {
    let with = "x".repeat(1024);
    let proxy = proxy(&format!("change = [{{ type = \"text/html\", replace = 'a', with = \"{with}\" }}]\n")).await;
    let body = "a".repeat(20_000);
    let (got, end) = reply(&proxy, GET, &format!("HTTP/1.1 200 OK\r\n{HTML}Content-Length: 20000\r\n\r\n{body}")).await;
    assert_eq!((parts(&got).1.len(), end), (20_000 * 1024, Ok(())));
}

/// A cache stores what servers send, and what is changed is not stored, so nobody gets it unchanged.
#[tokio::test]
async fn changed_replies_are_not_stored() {
    let head = "HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\nContent-Length: 18\r\nContent-Type: ";
    let body = "\r\n\r\n<script>x</script>";
    for (media, asked, want) in [("text/html", 2, ""), ("text/plain", 1, "<script>x</script>")] {
        let said: &str = Box::leak(format!("{head}{media}{body}").into_boxed_str());
        let origin = Origin::start(vec![vec![(HEAD, said)]; 2]).await;
        let proxy = proxy(&format!("{SCRIPT}[listener.cache]\ndir = \"cache\"\n")).await;
        for _ in 0..2 {
            assert_eq!(parts(&ask(&proxy, &origin, GET).await.0).1, want);
            proxy.lines().await; // which waits until it is stored
        }
        assert_eq!(origin.seen().len(), asked, "{media}");
    }
}
