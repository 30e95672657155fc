//! The HTTP listener over real sockets on the loopback device, with servers that say exactly what a test wants.

use crate::{
    origin::{Origin, undated},
    proxying::{LIMIT, OPEN, Proxy, closed},
};
use std::time::Duration;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};

const HEAD: &str = "\r\n\r\n";
const OK: &str = "HTTP/1.1 200 OK\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\nContent-Length: 2\r\n\r\nok";

async fn http(more: &str) -> Proxy {
    Proxy::start("http", &format!("{OPEN}via = \"\"\n{more}")).await
}

fn get(url: &str) -> String {
    format!("GET {url} HTTP/1.1\r\nHost: x\r\n\r\n")
}

fn last(url: &str) -> String {
    format!("GET {url} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
}

async fn answer(proxy: &Proxy, input: &str) -> String {
    String::from_utf8(proxy.answer(input.as_bytes()).await).unwrap()
}

/// Reads up to this.
async fn until(client: &mut TcpStream, end: &str) -> String {
    let mut got = Vec::new();
    while !String::from_utf8_lossy(&got).ends_with(end) {
        let byte = timeout(LIMIT, client.read_u8()).await;
        got.push(byte.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&got))).unwrap());
    }
    String::from_utf8(got).unwrap()
}

#[tokio::test]
async fn requests_go_on_in_origin_form_and_share_a_connection() {
    let origin = Origin::start(vec![vec![(HEAD, OK), (HEAD, OK), (HEAD, OK)]]).await;
    let proxy = http("forwarded = \"x-forwarded-for\"").await;
    let input = [get(&origin.url("/a?b")), get(&origin.url("")), last(&origin.url("/c"))].concat();
    let closing = OK.replace(HEAD, "\r\nConnection: close\r\n\r\n");
    assert_eq!(answer(&proxy, &input).await, [OK, OK, &closing].concat());
    let asked =
        |path: &str| format!("GET {path} HTTP/1.1\r\nHost: {}\r\nX-Forwarded-For: 127.0.0.1\r\n\r\n", origin.addr);
    assert_eq!(origin.seen(), [[asked("/a?b"), asked("/"), asked("/c")].concat()]);
    let lines = proxy.lines().await;
    assert_eq!(lines.len(), 3);
    for line in lines {
        assert_eq!((&line["how"], &line["method"], &line["status"]), (&"closed".into(), &"GET".into(), &200.into()));
        assert_eq!((&line["refusal"], &line["target"]), (&"unprivileged".into(), &origin.addr.to_string().into()));
        assert!(line["bytes_up"].as_u64() > Some(20) && line["bytes_down"].as_u64() > Some(20));
    }
    let counters = proxy.server.counters();
    assert_eq!((counters.requests, counters.replies_copied, counters.reused), (3, 3, 2));
}

#[tokio::test]
async fn pipelined_requests_to_different_servers_are_answered_in_order() {
    let slow = Origin::start(vec![vec![(HEAD, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nslow")]; 2]).await;
    let fast = Origin::start(vec![vec![(HEAD, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfast")]; 2]).await;
    let proxy = http("").await;
    let input = [get(&slow.url("/")), get(&fast.url("/")), get(&slow.url("/")), last(&fast.url("/"))].concat();
    let found = answer(&proxy, &input).await;
    let bodies: Vec<&str> = found.split("\r\n\r\n").skip(1).map(|b| &b[..4]).collect();
    assert_eq!(bodies, ["slow", "fast", "slow", "fast"]);
    assert_eq!((slow.seen().len(), fast.seen().len()), (2, 2));
}

#[tokio::test]
async fn bodies_pass_both_ways_whatever_their_framing() {
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a\r\nhello\r\n0\r\nX: y\r\n\r\n";
    let origin = Origin::start(vec![vec![
        ("hello", OK),
        ("0\r\nX: y\r\n\r\n", chunked),
        (HEAD, "HTTP/1.1 204 No Content\r\n\r\n"),
        (HEAD, "HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n"),
        (HEAD, "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"),
        (HEAD, "HTTP/1.1 200 OK\r\n\r\nuntil the end"),
    ]])
    .await;
    let proxy = http("").await;
    let url = origin.url("/");
    let mut client = proxy.connect().await;
    let post = format!("POST {url} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n");
    client.write_all(post.as_bytes()).await.unwrap();
    sleep(Duration::from_millis(20)).await;
    client.write_all(b"hello").await.unwrap();
    until(&mut client, OK).await;
    let body = "5;a\r\nhello\r\n0\r\nX: y\r\n\r\n";
    let post = format!("POST {url} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{body}");
    for byte in post.as_bytes() {
        client.write_all(&[*byte]).await.unwrap();
    }
    assert_eq!(undated(&until(&mut client, "X: y\r\n\r\n").await), chunked);
    let head = get(&url).replace("GET", "HEAD");
    client.write_all([get(&url), get(&url), head, last(&url)].concat().as_bytes()).await.unwrap();
    let mut rest = String::new();
    client.read_to_string(&mut rest).await.unwrap();
    let want = "HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n\
                HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nHTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end";
    assert_eq!(undated(&rest), want);
    let seen = origin.seen();
    assert_eq!(seen.len(), 1, "one connection was enough");
    assert!(seen[0].contains("Content-Length: 5\r\n\r\nhello") && seen[0].contains(body), "{}", seen[0]);
}

#[tokio::test]
async fn large_bodies_pass_whole() {
    let proxy = http("").await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    const SIZE: usize = 5_000_003;
    let payload: Vec<u8> = (0..SIZE).map(|i| (i % 251) as u8).collect();
    let theirs = payload.clone();
    // The server sends back while it still receives; but not to the end, which would end the exchange.
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        until(&mut stream, HEAD).await;
        let (mut from, mut to) = stream.split();
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\n\r\n");
        to.write_all(head.as_bytes()).await.unwrap();
        let mut got = vec![0; SIZE];
        let (most, last) = theirs.split_at(SIZE - 1);
        let (got, sent) = tokio::join!(from.read_exact(&mut got), to.write_all(most));
        assert_eq!((got.unwrap(), sent.unwrap()), (SIZE, ()));
        to.write_all(last).await.unwrap();
    });
    let mut client = proxy.connect().await;
    let (mut from, mut to) = client.split();
    let head = format!("PUT http://{addr}/ HTTP/1.1\r\nHost: x\r\nContent-Length: {SIZE}\r\n\r\n");
    let (began, has_begun) = tokio::sync::oneshot::channel();
    let send = async {
        let (most, last) = payload.split_at(SIZE - 1);
        to.write_all(head.as_bytes()).await.unwrap();
        to.write_all(most).await.unwrap();
        has_begun.await.unwrap(); // or the reply may come when the whole request has gone, which is not early
        to.write_all(last).await.unwrap();
    };
    let mut got = Vec::new();
    let receive = async {
        from.read_buf(&mut got).await.unwrap();
        began.send(()).unwrap();
        from.read_to_end(&mut got).await.unwrap();
    };
    timeout(LIMIT, async { tokio::join!(send, receive) }).await.unwrap();
    assert!(got.ends_with(&payload) && got.len() < SIZE + 200);
    assert!(String::from_utf8_lossy(&got[..150]).contains("Connection: close"), "the reply came early");
}

#[tokio::test]
async fn continue_and_early_hints() {
    let origin = Origin::start(vec![vec![
        (HEAD, "HTTP/1.1 100 Continue\r\n\r\n"),
        ("hello", "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"),
        (HEAD, "HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\n\r\n"),
    ]])
    .await;
    let proxy = http("").await;
    let url = origin.url("/");
    let mut client = proxy.connect().await;
    let put = format!("PUT {url} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n");
    client.write_all(put.as_bytes()).await.unwrap();
    assert_eq!(until(&mut client, HEAD).await, "HTTP/1.1 100 Continue\r\n\r\n");
    client.write_all(b"hello").await.unwrap();
    let want = "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    assert_eq!(undated(&until(&mut client, "ok").await), want);
    client.write_all(put.as_bytes()).await.unwrap();
    // The body that nobody wants does not come: the next request would be taken for it.
    let mut rest = String::new();
    timeout(LIMIT, client.read_to_string(&mut rest)).await.unwrap().unwrap();
    assert_eq!(undated(&rest), "HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
}

/// A long operation may be announced again and again (RFC 2518, 10.1), but not without a pause.
#[tokio::test]
async fn interim_replies_may_be_many_but_not_endless() {
    const BUSY: &str = "HTTP/1.1 102 Processing\r\n\r\n";
    let done = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    let many: &'static str = format!("{}{done}", BUSY.repeat(50)).leak();
    let endless: &'static str = BUSY.repeat(100_000).leak();
    let origin = Origin::start(vec![vec![(HEAD, many)], vec![(HEAD, endless)]]).await;
    let proxy = http("").await;
    let found = answer(&proxy, &last(&origin.url("/"))).await;
    assert_eq!(found.matches(BUSY).count(), 50, "{found}");
    assert!(found.ends_with("\r\n\r\nok"), "{found}");
    let found = answer(&proxy, &last(&origin.url("/"))).await;
    assert!(found.contains("HTTP/1.1 502 "), "{} bytes", found.len());
}

#[tokio::test]
async fn clients_of_http_1_0_get_no_chunks() {
    let reply = "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\
                 5\r\nhello\r\n6\r\n world\r\n0\r\nX: y\r\n\r\n";
    let origin = Origin::start(vec![vec![(HEAD, reply)]]).await;
    let proxy = http("").await;
    let found = answer(&proxy, &format!("GET {} HTTP/1.0\r\n\r\n", origin.url("/"))).await;
    assert_eq!(undated(&found), "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello world");
    assert_eq!(origin.seen(), [format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", origin.addr)]);
}

/// Number of faults of this kind.
fn faults(proxy: &Proxy, how: &str) -> u64 {
    let counters = proxy.server.counters();
    match how {
        "bad-request" => counters.bad_requests,
        "unreachable" => counters.unreachable,
        "denied" => counters.denied,
        "bad-reply" => counters.bad_replies,
        "auth-failed" => counters.auth_failed,
        "timeout" => counters.timeouts,
        how => panic!("{how}"),
    }
}

/// Status and `how` of the log for a request that is not passed on, which is counted.
async fn refused(proxy: &Proxy, input: &str, status: u16, how: &str) {
    let before = faults(proxy, how);
    let found = answer(proxy, input).await;
    assert!(found.starts_with(&format!("HTTP/1.1 {status} ")), "{input}: {found}");
    assert!(found.contains("\r\nConnection: close\r\n"), "{found}");
    let line = proxy.lines().await.pop().unwrap();
    assert_eq!((&line["status"], &line["how"]), (&status.into(), &how.into()), "{line}");
    assert_eq!(faults(proxy, how), before + 1, "{line}");
}

#[tokio::test]
async fn what_is_wrong_is_answered() {
    let proxy = http("").await;
    let nowhere = format!("http://{}/", closed().await);
    refused(&proxy, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\nGET", 400, "bad-request").await;
    refused(&proxy, "GET http://a/ HTTP/1.1\r\n\r\n", 400, "bad-request").await;
    refused(&proxy, "GET http://a/ HTTP/1.1\nHost: a\n\n", 400, "bad-request").await;
    refused(&proxy, "GET http://a..b/ HTTP/1.0\r\n\r\n", 400, "bad-request").await;
    refused(&proxy, &format!("GET http://a/{}", "x".repeat(17000)), 414, "bad-request").await;
    refused(&proxy, &format!("GET http://a/ HTTP/1.1\r\nX: {}", "x".repeat(33000)), 431, "bad-request").await;
    refused(&proxy, "PRI * HTTP/2.0\r\n\r\n", 505, "bad-request").await;
    refused(&proxy, &last(&nowhere).replace("GET", "TRACE"), 501, "bad-request").await;
    refused(&proxy, &last(&nowhere), 502, "unreachable").await;
    refused(&proxy, &last("http://10.0.0.1:0/"), 400, "bad-request").await;
    refused(&proxy, &last("http://[::1]/"), 403, "denied").await;
    refused(&proxy, "CONNECT [::1]:443 HTTP/1.0\r\n\r\n", 403, "denied").await;
    refused(&proxy, &format!("CONNECT {} HTTP/1.0\r\n\r\n", closed().await), 502, "unreachable").await;
    let smuggled =
        format!("POST {nowhere} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n");
    refused(&proxy, &smuggled, 400, "bad-request").await;
    // A refused request with a body: what follows is not taken for a request.
    let body = format!("POST http://[::1]/ HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{}", get(&nowhere));
    refused(&proxy, &body, 403, "denied").await;
    // One without goes on.
    let found =
        answer(&proxy, &[get("http://[::1]/"), get(&nowhere).replace("GET", "HEAD"), last(&nowhere)].concat()).await;
    assert_eq!(found.matches("HTTP/1.1 ").count(), 3, "{found}");
    assert_eq!(found.matches("Connection: close").count(), 1, "{found}");
}

#[tokio::test]
async fn what_servers_do_wrong_is_answered() {
    for (reply, status) in [
        ("", 502),
        ("HTTP/1.1 200 OK\r\n", 502),
        ("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n0\r\n", 502),
        // what is wrong with a body may come with its head
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", 502),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nZZ\r\n", 502),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nHost: b\r\n\r\n", 502),
        ("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", 502),
        ("HTTP/1.1 407 Who?\r\nProxy-Authenticate: Basic realm=\"x\"\r\nContent-Length: 0\r\n\r\n", 502),
        ("SSH-2.0-OpenSSH_9.2\r\n\r\n", 502),
    ] {
        let origin = Origin::start(vec![vec![(HEAD, reply)]]).await;
        refused(&http("").await, &last(&origin.url("/")), status, "bad-reply").await;
    }
    let silent = Origin::start(vec![vec![("never", "")]; 2]).await;
    let hasty = http("limits = { reply = 0.2 }").await;
    refused(&hasty, &last(&silent.url("/")), 504, "timeout").await;
    let post = format!("POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhe", silent.url("/"));
    refused(&hasty, &post, 408, "timeout").await;
}

#[tokio::test]
async fn careless_replies_are_mended() {
    const DATE: &str = "Date: Sun, 06 Nov 1994 08:49:37 GMT";
    for (reply, read) in [
        ("\nHTTP/1.1 200 OK\nX : a\n b\nContent-Length: 2\n\nok", "X: a b\r\nContent-Length: 2\r\nEND\r\n\r\nok"),
        (
            "HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 2, 02\r\nContent-Length: 2\r\n\r\nok",
            "X: a b\r\nContent-Length: 2\r\nEND\r\n\r\nok",
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2 \nok\r\n0000\nX : y\n\n",
            "Transfer-Encoding: chunked\r\nEND\r\n\r\n2\r\nok\r\n0\r\nX: y\r\n\r\n",
        ),
    ] {
        for strict in [false, true] {
            let reply = reply.replace("200 OK", &format!("200 OK\r\n{DATE}"));
            let origin = Origin::start(vec![vec![(HEAD, &*Box::leak(reply.into_boxed_str()))]]).await;
            let found = answer(&http(&format!("strict_replies = {strict}")).await, &last(&origin.url("/"))).await;
            let read = read.replace("END", "Connection: close");
            let whole = format!("HTTP/1.1 200 OK\r\n{DATE}\r\n{read}");
            assert!(found == whole || strict && found.starts_with("HTTP/1.1 502 "), "{strict}: {found:?}");
            assert_eq!(found == whole, !strict);
        }
    }
    // Byte by byte it is the same.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut server, _) = listener.accept().await.unwrap();
        server.set_nodelay(true).unwrap();
        until(&mut server, HEAD).await;
        for byte in "HTTP/1.1 999 Odd\nX\t: a\nTransfer-Encoding: chunked\n\n002 ;c\nok\n00\nX: y\n z\n\n".as_bytes() {
            server.write_u8(*byte).await.unwrap();
            sleep(Duration::from_millis(1)).await;
        }
    });
    let found = answer(&http("").await, &last(&url)).await;
    assert!(found.starts_with("HTTP/1.1 999 Odd\r\nX: a\r\n"), "{found}");
    assert!(found.ends_with("\r\n\r\n02;c\r\nok\r\n0\r\nX: y z\r\n\r\n"), "{found}");
}

#[tokio::test]
async fn clients_of_http_1_0_get_the_content_of_careless_chunks() {
    let reply = "HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n2 \nok\n0\nX: y\n\n";
    let origin = Origin::start(vec![vec![(HEAD, reply)]]).await;
    let found = answer(&http("").await, &format!("GET {} HTTP/1.0\r\n\r\n", origin.url("/"))).await;
    assert!(found.ends_with("\r\n\r\nok") && !found.contains("chunked"), "{found}");
}

#[tokio::test]
async fn replies_are_dated() {
    let origin = Origin::start(vec![vec![(HEAD, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), (HEAD, OK)]]).await;
    let proxy = http("").await;
    let input = [get(&origin.url("/")), get(&origin.url("/")), last("http://[::1]/")].concat();
    let found = answer(&proxy, &input).await;
    let dates: Vec<_> = found.split("\r\nDate: ").skip(1).map(|d| d.split_once("\r\n").unwrap().0).collect();
    assert!(matches!(dates[..], [a, "Sun, 06 Nov 1994 08:49:37 GMT", b] if a.ends_with(" GMT") && b.ends_with(" GMT")));
}

#[tokio::test]
async fn replies_that_break_off_do_not_look_whole() {
    for reply in [
        "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    ] {
        let origin = Origin::start(vec![vec![(HEAD, reply)]]).await;
        let proxy = http("").await;
        let mut client = proxy.connect().await;
        client.write_all(get(&origin.url("/")).as_bytes()).await.unwrap();
        let mut seen = Vec::new();
        let end = timeout(LIMIT, client.read_to_end(&mut seen)).await.unwrap();
        assert!(end.is_err(), "a reset, not an end: {}", String::from_utf8_lossy(&seen));
        assert_eq!(proxy.line().await["how"], "server-reset");
    }
}

#[tokio::test]
async fn servers_that_say_too_much_are_not_used_again() {
    let more = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil";
    let origin = Origin::start(vec![vec![(HEAD, more)], vec![(HEAD, OK)]]).await;
    let proxy = http("").await;
    let found = answer(&proxy, &[get(&origin.url("/")), last(&origin.url("/"))].concat()).await;
    assert!(found.ends_with("ok") && !found.contains("evil"), "{found}");
    assert_eq!(origin.seen().len(), 2);
}

#[tokio::test]
async fn connections_that_servers_have_closed_are_made_anew() {
    let origin = Origin::start(vec![vec![(HEAD, OK)], vec![(HEAD, OK)]]).await;
    let proxy = http("").await;
    let mut client = proxy.connect().await;
    client.write_all(get(&origin.url("/")).as_bytes()).await.unwrap();
    until(&mut client, OK).await;
    client.write_all(last(&origin.url("/")).as_bytes()).await.unwrap();
    until(&mut client, "ok").await;
    assert_eq!(origin.seen().len(), 2);
}

#[tokio::test]
async fn passwords_are_asked_for() {
    let origin = Origin::start(vec![vec![(HEAD, OK)]]).await;
    let proxy = http("users = { ann = \"pw\" }").await;
    let with =
        |url: String, basic: &str| url.replace("Host: x", &format!("Host: x\r\nProxy-Authorization: Basic {basic}"));
    let url = origin.url("/");
    let input = [get(&url), with(get(&url), "YW5uOmJhZA=="), with(last(&url), "YW5uOnB3")].concat();
    let found = answer(&proxy, &input).await;
    assert_eq!(found.matches("HTTP/1.1 407 ").count(), 2, "{found}");
    assert_eq!(found.matches("Proxy-Authenticate: Basic realm=\"longsplice\"").count(), 2, "{found}");
    assert!(found.ends_with("ok"), "{found}");
    assert!(!origin.seen()[0].contains("Proxy-Auth"), "the password is for us alone");
    let users: Vec<_> = proxy.lines().await.iter().map(|l| l["user"].as_str().map(String::from)).collect();
    assert_eq!(users, [None, Some("ann".into()), Some("ann".into())]);
    assert_eq!(proxy.server.counters().auth_failed, 2);
}

#[tokio::test]
async fn hashed_passwords_are_verified() {
    let origin = Origin::start(vec![vec![(HEAD, OK), (HEAD, OK)]]).await;
    // what crypt(3) makes of `pw`
    let proxy = http("users = { ann = \"$2y$04$abcdefghijklmnopqrstuuyvPXIbu7xe6/CED2DzX8z6Si09MlzlW\" }").await;
    let url = origin.url("/");
    let with =
        |url: String, basic: &str| url.replace("Host: x", &format!("Host: x\r\nProxy-Authorization: Basic {basic}"));
    let wrong = with(get(&url), "YW5uOmJhZA==");
    let found = answer(&proxy, &[wrong, with(get(&url), "YW5uOnB3"), with(last(&url), "YW5uOnB3")].concat()).await;
    let statuses: Vec<_> = found.split("HTTP/1.1 ").skip(1).map(|r| &r[..3]).collect();
    assert_eq!(statuses, ["407", "200", "200"], "{found}");
}

#[tokio::test]
async fn connect_is_relayed() {
    let origin = Origin::start(vec![vec![("ping", "pong")], vec![(HEAD, OK)]]).await;
    let proxy = http("").await;
    let mut client = proxy.connect().await;
    let addr = origin.addr;
    // Also behind another request, and with the first bytes for the server in the same segment.
    let input = format!("{}CONNECT {addr} HTTP/1.1\r\nHost: {addr}\r\n\r\nping", get("http://[::1]/"));
    client.write_all(input.as_bytes()).await.unwrap();
    let mut seen = String::new();
    timeout(LIMIT, client.read_to_string(&mut seen)).await.unwrap().unwrap();
    assert!(seen.ends_with("HTTP/1.1 200 Connection established\r\n\r\npong"), "{seen}");
    drop(client);
    let lines = proxy.lines().await;
    let line = &lines[1];
    assert_eq!((&line["how"], &line["listener"]), (&"closed".into(), &"http".into()));
    assert_eq!(
        (&line["bytes_up"], &line["bytes_down"], &line["target"]),
        (&4.into(), &4.into(), &addr.to_string().into())
    );
}

#[tokio::test]
async fn other_protocols_begin_with_101() {
    let switching = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n";
    for (scheme, protocol, more) in [
        ("http:", "echo", ""),
        ("http:", "echo", "\r\nContent-Length: 0"), // no content either
        ("ws:", "websocket", ""),
    ] {
        let origin = Origin::start(vec![vec![(HEAD, switching), ("ping", "pong")]]).await;
        let proxy = http("").await;
        let mut client = proxy.connect().await;
        let ask = get(&origin.url("/")).replace("http:", scheme);
        let ask = ask.replace("Host: x", &format!("Host: x\r\nConnection: upgrade\r\nUpgrade: {protocol}{more}"));
        client.write_all(ask.as_bytes()).await.unwrap();
        assert_eq!(until(&mut client, HEAD).await, switching, "{ask}");
        client.write_all(b"ping").await.unwrap();
        assert_eq!(until(&mut client, "pong").await, "pong");
        drop(client);
        assert_eq!(proxy.line().await["how"], "closed");
        assert!(origin.seen()[0].contains(&format!("Connection: upgrade\r\nUpgrade: {protocol}\r\n")));
    }
}

#[tokio::test]
async fn nobody_waits_for_ever() {
    let proxy = http("limits = { handshake = 0.3, keep_alive = 0.3 }").await;
    assert_eq!(proxy.answer(b"").await, b"", "who has said nothing expects no answer");
    let found = answer(&proxy, "GET http://a/ HTTP/1.1\r\n").await;
    assert!(found.starts_with("HTTP/1.1 408 "), "{found}");
    let origin = Origin::start(vec![vec![(HEAD, OK)]]).await;
    assert_eq!(answer(&proxy, &get(&origin.url("/"))).await, OK, "then it is closed");
    assert_eq!(proxy.lines().await.len(), 3);
}

#[tokio::test]
async fn a_client_that_goes_away_takes_its_request_along() {
    let silent = Origin::start(vec![vec![("never", "")]]).await;
    let proxy = http("").await;
    let mut client = proxy.connect().await;
    client.write_all(get(&silent.url("/")).as_bytes()).await.unwrap();
    sleep(Duration::from_millis(100)).await;
    client.set_zero_linger().unwrap();
    drop(client);
    assert_eq!(proxy.line().await["how"], "client-reset");
}

#[tokio::test]
async fn idle_connections_do_not_hold_up_the_end() {
    let origin = Origin::start(vec![vec![(HEAD, OK), (HEAD, OK)]]).await;
    let proxy = http("").await;
    let mut client = proxy.connect().await;
    client.write_all(get(&origin.url("/")).as_bytes()).await.unwrap();
    until(&mut client, OK).await;
    proxy.server.stop_accepting();
    let mut rest = Vec::new();
    timeout(LIMIT, client.read_to_end(&mut rest)).await.unwrap().unwrap();
    assert!(rest.is_empty());
    drop(client);
    assert_eq!(proxy.server.drain(LIMIT).await, 0);
}
