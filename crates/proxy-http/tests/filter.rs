//! Rules on replies, with servers on the loopback device that say exactly what a test wants.

use crate::{
    member::Member,
    origin::{Origin, undated},
    proxying::{LIMIT, OPEN, Proxy},
};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    sync::oneshot,
    time::timeout,
};

const HEAD: &str = "\r\n\r\n";

async fn proxy(filter: &str) -> Proxy {
    Proxy::start("http", &format!("{OPEN}via = \"\"\n[listener.filter]\n{filter}")).await
}

/// What the client gets of a reply, up to the end or the reset, and the line of the log.
async fn reply(proxy: &Proxy, request: &str, reply: &'static str) -> (String, Result<(), std::io::ErrorKind>, Value) {
    let origin = Origin::start(vec![vec![(HEAD, reply)]]).await;
    let mut client = proxy.connect().await;
    let target = request.replace("URL", &origin.url("/"));
    client.write_all(format!("{target}\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes()).await.unwrap();
    let mut got = Vec::new();
    let end = timeout(LIMIT, client.read_to_end(&mut got)).await.unwrap().map(drop).map_err(|e| e.kind());
    drop(client);
    (String::from_utf8(got).unwrap(), end, proxy.lines().await.pop().unwrap())
}

const GET: &str = "GET URL HTTP/1.1";
const FORBIDDEN: &str = "HTTP/1.1 403 Forbidden\r\n";
const CHUNKED: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";

#[tokio::test]
async fn what_is_denied_before_its_head_went_on_is_answered_with_403() {
    let rules = "rules = [\n{ action = \"allow\", status = 404 },\n{ action = \"deny\", type = \"video/*\" },\n\
                 { action = \"deny\", length = \"100-\" },\n{ action = \"deny\", body_begins = '(?i)<script' },\n]\nfirst = 16";
    let proxy = proxy(rules).await;
    for (request, said, rule) in [
        (GET, "HTTP/1.1 200 OK\r\nContent-Type: video/mp4\r\nContent-Length: 1\r\n\r\nx", 2),
        ("HEAD URL HTTP/1.1", "HTTP/1.1 200 OK\r\nContent-Type: video/mp4\r\nContent-Length: 1\r\n\r\n", 2),
        (GET, "HTTP/1.1 304 Not Modified\r\nContent-Type: video/mp4\r\n\r\n", 2),
        (GET, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", 3),
        (GET, "HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n12345 <SCRIPT> 67890", 4),
        (GET, "HTTP/1.1 200 OK\r\n\r\n<script>", 4),
        (GET, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n<scr\r\n4;x=y\r\nipt>\r\n0\r\n\r\n", 4),
        (
            "GET URL HTTP/1.0",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n<\r\n6\r\nscript\r\n0\r\n\r\n",
            4,
        ),
    ] {
        let (got, end, line) = reply(&proxy, request, said).await;
        assert!(got.starts_with(FORBIDDEN) && !got.contains("video"), "{said}: {got}");
        let text = format!("longsplice: reply rule {rule}\n");
        assert_eq!((end, got.ends_with(&text)), (Ok(()), !request.starts_with("HEAD")), "{got}");
        assert_eq!((&line["status"], &line["how"]), (&403.into(), &"denied".into()), "{line}");
        assert_eq!(line["reply_rule"], format!("{rule}:deny"));
    }
    assert_eq!(proxy.server.counters().replies_denied, 8);
    // by the first rule
    let found = "HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\n<script>\n";
    let (got, end, line) = reply(&proxy, GET, found).await;
    assert_eq!((got.ends_with("<script>\n"), end, &line["reply_rule"]), (true, Ok(()), &"1:allow".into()), "{got}");
}

#[tokio::test]
async fn what_is_allowed_goes_on_unchanged_whatever_its_framing() {
    let rules = "rules = [{ action = \"deny\", body_begins = 'evil' }, { action = \"deny\", body_contains = 'worse' }]\n\
                 first = 4";
    let proxy = proxy(rules).await;
    let close = "Connection: close\r\n";
    for (request, said) in [
        (GET, "HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\nhello, world"),
        (GET, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"),
        (GET, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        (GET, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a\r\nhello\r\n1\r\n!\r\n0\r\nX: y\r\n\r\n"),
        (GET, "HTTP/1.1 200 OK\r\n\r\nuntil the end"),
        (GET, "HTTP/1.1 200 OK\r\n\r\n"),
        (GET, "HTTP/1.1 204 No Content\r\n\r\n"),
        (GET, "HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n"),
        ("HEAD URL HTTP/1.1", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"),
    ] {
        let (got, end, line) = reply(&proxy, request, said).await;
        let want = said.replacen("\r\n\r\n", &format!("\r\n{close}\r\n"), 1);
        assert_eq!((undated(&got), end), (want, Ok(())));
        assert_eq!((&line["how"], &line["refusal"]), (&"closed".into(), &"unprivileged".into()), "{line}");
        assert_eq!(line.get("reply_rule"), None);
    }
    let said = "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\
                5\r\nhello\r\n6\r\n world\r\n0\r\nX: y\r\n\r\n";
    let (got, end, _) = reply(&proxy, "GET URL HTTP/1.0", said).await;
    assert_eq!((undated(&got).as_str(), end), ("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello world", Ok(())));
    assert_eq!(proxy.server.counters().replies_denied, 0);
}

#[tokio::test]
async fn what_is_denied_in_the_middle_is_reset() {
    let proxy =
        proxy("rules = [{ action = \"deny\", body_contains = 'wor[ks]e' }, { action = \"deny\", length = \"30-\" }]")
            .await;
    for (head, body, rule) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 22\r\n\r\n", ["good, good, wo", "rse, bad"].as_slice(), 1),
        ("HTTP/1.1 200 OK\r\n\r\n", &["good, good, ", "worke"], 1),
        (CHUNKED, &["5\r\ngood \r\n3\r\nwor\r\n", "1\r\ns\r\n1\r\ne\r\n0\r\n\r\n"], 1),
        (CHUNKED, &["14\r\n12345678901234567890\r\n", "a\r\n1234567890\r\n0\r\n\r\n"], 2),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (more, go) = oneshot::channel();
        let served = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 512];
            assert!(stream.read(&mut request).await.unwrap() > 0);
            stream.write_all([head, body[0]].concat().as_bytes()).await.unwrap();
            go.await.unwrap();
            stream.write_all(body[1].as_bytes()).await.unwrap();
            stream
        };
        let asked = async {
            let mut client = proxy.connect().await;
            let get = format!("GET http://{addr}/ HTTP/1.1\r\nHost: x\r\n\r\n");
            client.write_all(get.as_bytes()).await.unwrap();
            let mut got = Vec::new();
            // The first part comes before the server has said the rest.
            while !String::from_utf8_lossy(&got).ends_with(body[0]) {
                got.push(timeout(LIMIT, client.read_u8()).await.unwrap().unwrap());
            }
            more.send(()).unwrap();
            let mut rest = Vec::new();
            let end = timeout(LIMIT, client.read_to_end(&mut rest)).await.unwrap().map_err(|e| e.kind());
            assert_eq!((end, rest.len()), (Err(std::io::ErrorKind::ConnectionReset), 0), "{body:?}");
        };
        tokio::join!(served, asked);
        let line = proxy.lines().await.pop().unwrap();
        assert_eq!((&line["how"], &line["reply_rule"]), (&"denied".into(), &format!("{rule}:deny").into()), "{line}");
        assert_eq!(line["refusal"], format!("reply rule {rule}"));
    }
    assert_eq!(proxy.server.counters().replies_denied, 4);
}

#[tokio::test]
async fn a_reply_is_held_back_for_a_limited_time_and_judged_all_the_same() {
    let proxy = proxy("rules = [{ action = \"deny\", body_begins = 'evil' }]\nwait = 0.05").await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("GET http://{}/ HTTP/1.1\r\nHost: x\r\n\r\n", listener.local_addr().unwrap());
    let mut client = proxy.connect().await;
    client.write_all(url.as_bytes()).await.unwrap();
    let (mut server, _) = listener.accept().await.unwrap();
    let mut request = [0; 512];
    assert!(server.read(&mut request).await.unwrap() > 0);
    server.write_all(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\nev").await.unwrap();
    let mut got = Vec::new();
    while !got.ends_with(b"\r\n\r\nev") {
        got.push(timeout(LIMIT, client.read_u8()).await.unwrap().unwrap());
    }
    server.write_all(b"il").await.unwrap();
    let end = timeout(LIMIT, client.read_u8()).await.unwrap().map_err(|e| e.kind());
    assert_eq!(end, Err(std::io::ErrorKind::ConnectionReset));
    assert_eq!(proxy.line().await["reply_rule"], "1:deny");
}

#[tokio::test]
async fn tiny_chunks_are_not_held_back_until_they_fill_the_memory() {
    let proxy = proxy("rules = [{ action = \"deny\", body_begins = 'evil' }]\nfirst = 32768\nwait = 3600").await;
    let chunks = "1\r\nx\r\n".repeat(30_000);
    let said: &'static str = Box::leak(format!("{CHUNKED}{chunks}0\r\n\r\n").into_boxed_str());
    let (got, end, line) = reply(&proxy, GET, said).await;
    assert!(got.ends_with(&said[CHUNKED.len()..]));
    assert_eq!((end, &line["how"]), (Ok(()), &"closed".into()));
}

#[tokio::test]
async fn replies_that_break_off_while_they_are_held_back() {
    let proxy = proxy("rules = [{ action = \"deny\", body_begins = 'evil' }]").await;
    let (got, end, line) = reply(&proxy, GET, "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut").await;
    assert!(got.starts_with("HTTP/1.1 502 ") && end.is_ok(), "{got}");
    assert_eq!((&line["how"], &line["status"]), (&"bad-reply".into(), &502.into()), "{line}");
    let (got, _, line) = reply(&proxy, GET, &CHUNKED[..CHUNKED.len()]).await;
    assert!(got.starts_with("HTTP/1.1 502 "), "{got}: {line}");
}

#[tokio::test]
async fn bodies_can_be_asked_for_uncompressed_and_sites_have_rules_too() {
    let origin = Origin::start(vec![vec![(HEAD, "HTTP/1.1 204 No Content\r\n\r\n")]]).await;
    let proxy = proxy("accept_encoding = \"identity\"").await;
    let request = format!(
        "GET {} HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip, br\r\nConnection: close\r\n\r\n",
        origin.url("/")
    );
    proxy.answer(request.as_bytes()).await;
    let want = format!("GET / HTTP/1.1\r\nHost: {}\r\nAccept-Encoding: identity\r\n\r\n", origin.addr);
    assert_eq!(origin.seen(), [want]);

    let member = Member::start("one").await;
    let site = format!(
        "[listener.filter]\nrules = [{{ action = \"deny\", body_begins = '^one$' }}]\n\
         [[listener.route]]\npool = \"p\"\n[pool.p]\nservers = [\"{}\"]\nfailures = 1\n",
        member.addr
    );
    let proxy = Proxy::start("http", &site).await;
    for _ in 0..2 {
        let got = proxy.answer(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await;
        assert!(got.starts_with(FORBIDDEN.as_bytes()), "{}", got.escape_ascii());
    }
    let counters = proxy.server.counters();
    assert_eq!((counters.replies_denied, counters.servers_down), (2, 0), "the server is not to blame");
}
