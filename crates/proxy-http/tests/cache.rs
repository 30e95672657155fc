//! The cache of a forward proxy, with servers on the loopback device that say exactly what a test wants, and no more often.

use crate::{
    origin::Origin,
    proxying::{LIMIT, OPEN, Proxy},
};
use longsplice_proxy::counters::cache::CacheValues;
use std::{fs::OpenOptions, io::ErrorKind, os::unix::fs::FileExt, path::PathBuf, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{sleep, timeout},
};

const HEAD: &str = "\r\n\r\n";
const CACHE: &str = "[listener.cache]\ndir = \"cache\"\n";

async fn proxy(more: &str) -> Proxy {
    Proxy::start("http", &format!("{OPEN}{more}{CACHE}")).await
}

/// What a client gets that asks for this and listens to the end, and how it ends.
async fn ask_at(proxy: &Proxy, listener: usize, request: &str) -> (String, Result<(), ErrorKind>) {
    let mut client = TcpStream::connect(proxy.server.listen_addrs()[listener]).await.unwrap();
    let (line, fields) = request.split_once('\n').unwrap_or((request, ""));
    let text = format!("{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{fields}\r\n");
    client.write_all(text.as_bytes()).await.unwrap();
    let mut got = Vec::new();
    let end = timeout(LIMIT, client.read_to_end(&mut got)).await.unwrap().map(drop).map_err(|e| e.kind());
    (String::from_utf8(got).unwrap(), end)
}

async fn ask(proxy: &Proxy, request: &str) -> String {
    let (got, end) = ask_at(proxy, 0, request).await;
    assert_eq!(end, Ok(()), "{request}: {got}");
    got
}

/// Waits until the cache says so.
async fn until(proxy: &Proxy, what: &str, is: impl Fn(&CacheValues) -> bool) -> CacheValues {
    let wait = async {
        loop {
            let values = proxy.server.counters().cache;
            if is(&values) {
                return values;
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LIMIT, wait).await.unwrap_or_else(|_| panic!("{what}: {:?}", proxy.server.counters().cache))
}

pub async fn stored(proxy: &Proxy, n: u64) {
    until(proxy, "stored", |v| v.cache_stored == n).await;
}

/// Without the fields that say when.
fn plain(reply: &str) -> String {
    let lines = reply.split_inclusive("\r\n");
    lines.filter(|l| !l.starts_with("Age: ") && !l.starts_with("Date: ")).collect()
}

fn entry(proxy: &Proxy) -> PathBuf {
    let all = std::fs::read_dir(proxy.dir.path().join("cache")).unwrap().map(|f| f.unwrap().path());
    all.into_iter().find(|p| p.extension().is_some_and(|e| e == "entry")).expect("an entry")
}

#[tokio::test]
async fn replies_are_stored_whatever_their_framing_and_served_by_length() {
    let proxy = proxy("via = \"p\"\n").await;
    let fresh = "Cache-Control: max-age=100\r\nX: y\r\n";
    let said = [
        "Content-Length: 12\r\n\r\nhello, world",
        "Transfer-Encoding: chunked\r\n\r\n5;a\r\nhello\r\n7\r\n, world\r\n0\r\nT: u\r\n\r\n",
        "\r\nhello, world",
    ];
    for (i, rest) in said.into_iter().enumerate() {
        let reply = format!("HTTP/1.1 200 OK\r\n{fresh}{rest}").leak();
        let origin = Origin::start(vec![vec![(HEAD, reply)]]).await;
        let get = format!("GET {}", origin.url("/a?b"));
        assert!(ask(&proxy, &get).await.contains("hello"));
        stored(&proxy, i as u64 + 1).await;
        let end = "Content-Length: 12\r\nVia: 1.1 p\r\nConnection: close\r\n\r\nhello, world";
        for _ in 0..2 {
            let got = ask(&proxy, &get).await;
            assert!(got.contains("\r\nAge: ") && got.contains("\r\nDate: "), "{got}");
            assert_eq!(plain(&got), format!("HTTP/1.1 200 OK\r\n{fresh}{end}"), "{rest}");
        }
        let old = ask(&proxy, &get.replace("GET", "HEAD")).await;
        assert_eq!(plain(&old), format!("HTTP/1.1 200 OK\r\n{fresh}{}", end.strip_suffix("hello, world").unwrap()));
        assert_eq!(origin.seen().len(), 1);
    }
    let values = proxy.server.counters().cache;
    assert_eq!((values.cache_hits, values.cache_misses, values.cache_entries), (9, 3, 3));
    let lines = proxy.lines().await;
    assert_eq!((&lines[0]["cache"], &lines[0]["how"]), (&"fill".into(), &"closed".into()), "{}", lines[0]);
    assert_eq!((&lines[1]["cache"], &lines[1]["status"]), (&"hit".into(), &200.into()), "{}", lines[1]);
}

#[tokio::test]
async fn what_is_stale_is_asked_about() {
    let proxy = proxy("").await;
    let origin = Origin::start(vec![
        vec![(
            HEAD,
            "HTTP/1.1 200 OK\r\nCache-Control: max-age=0\r\nETag: \"1\"\r\nX: a\r\nContent-Length: 3\r\n\r\none",
        )],
        vec![(HEAD, "HTTP/1.1 304 Not Modified\r\nCache-Control: max-age=100\r\nETag: \"1\"\r\nX: b\r\n\r\n")],
        vec![(HEAD, "HTTP/1.1 304 Not Modified\r\nETag: \"2\"\r\n\r\n")],
        vec![(HEAD, "HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\nETag: \"3\"\r\nContent-Length: 5\r\n\r\nthree")],
    ])
    .await;
    let get = format!("GET {}", origin.url("/"));
    assert!(ask(&proxy, &get).await.ends_with("\r\n\r\none"));
    stored(&proxy, 1).await;
    let got = ask(&proxy, &get).await; // revalidated
    assert!(
        got.starts_with("HTTP/1.1 200 OK\r\n") && got.contains("X: b\r\n") && got.ends_with("\r\n\r\none"),
        "{got}"
    );
    let got = ask(&proxy, &get).await; // and fresh
    assert!(got.contains("X: b\r\n") && got.ends_with("\r\n\r\none"), "{got}");
    // the server speaks of something else: all of it is asked for
    let got = ask(&proxy, &format!("{get}\nCache-Control: no-cache\r\n")).await;
    assert!(got.ends_with("\r\n\r\nthree"), "{got}");
    stored(&proxy, 2).await;
    assert!(ask(&proxy, &get).await.ends_with("\r\n\r\nthree"));
    let seen = origin.seen();
    let conditions: Vec<bool> = seen.iter().map(|s| s.contains("\r\nIf-None-Match: \"1\"\r\n")).collect();
    assert_eq!(conditions, [false, true, true, false], "{seen:?}");
    let v = proxy.server.counters().cache;
    assert_eq!((v.cache_hits, v.cache_misses, v.cache_revalidated, v.cache_invalidated), (2, 2, 1, 1), "{v:?}");
    let words: Vec<_> = proxy.lines().await.iter().map(|l| l["cache"].clone()).collect();
    assert_eq!(words, ["fill", "revalidated", "hit", "fill", "hit"]);
}

#[tokio::test]
async fn what_clients_say_of_it() {
    let proxy = proxy("").await;
    let reply = "HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\nETag: \"1\"\r\nContent-Length: 3\r\n\r\none";
    let part = "HTTP/1.1 206 Partial Content\r\nCache-Control: max-age=100\r\nContent-Range: bytes 1-1/3\r\n\
                Content-Length: 1\r\n\r\nn";
    let known = "HTTP/1.1 304 Not Modified\r\nETag: \"1\"\r\nX: new\r\n\r\n";
    let origin =
        Origin::start(vec![vec![(HEAD, reply)], vec![(HEAD, part)], vec![(HEAD, known)], vec![(HEAD, reply)]]).await;
    let get = format!("GET {}", origin.url("/"));
    let got = ask(&proxy, &format!("{get}\nCache-Control: only-if-cached\r\n")).await;
    assert!(got.starts_with("HTTP/1.1 504 Gateway Timeout\r\n") && origin.seen().is_empty(), "{got}");
    ask(&proxy, &get).await;
    stored(&proxy, 1).await;
    let got = ask(&proxy, &format!("{get}\nCache-Control: only-if-cached\r\n")).await;
    assert!(got.ends_with("\r\n\r\none"), "{got}");
    let got = ask(&proxy, &format!("{get}\nIf-None-Match: \"0\", W/\"1\"\r\n")).await;
    assert!(got.starts_with("HTTP/1.1 304 Not Modified\r\n") && got.contains("ETag: \"1\"\r\n"), "{got}");
    assert!(got.ends_with(HEAD) && !got.contains("Content-Length"), "{got}");
    let got = ask(&proxy, &format!("{get}\nIf-None-Match: \"0\"\r\n")).await;
    assert!(got.starts_with("HTTP/1.1 200 OK\r\n") && got.ends_with("\r\n\r\none"), "{got}");
    assert_eq!(origin.seen().len(), 1);
    // there are conditions that only the server can check
    let got = ask(&proxy, &format!("{get}\nIf-Match: \"1\"\r\nRange: bytes=1-1\r\n")).await;
    assert!(got.starts_with("HTTP/1.1 206") && got.ends_with("\r\n\r\nn"), "{got}");
    // who has a condition, and asks the server, gets its answer
    let got = ask(&proxy, &format!("{get}\nIf-None-Match: \"1\"\r\nCache-Control: no-cache\r\n")).await;
    assert!(got.starts_with("HTTP/1.1 304"), "{got}");
    assert!(origin.seen()[2].contains("If-None-Match: \"1\"\r\n"));
    let got = ask(&proxy, &format!("{get}\nAuthorization: x\r\nCache-Control: no-store, no-cache\r\n")).await;
    assert!(got.ends_with("\r\n\r\none"), "{got}");
    let v = proxy.server.counters().cache;
    assert_eq!((v.cache_stored, v.cache_hits, v.cache_misses), (1, 3, 3), "{v:?}");
    let lines = proxy.lines().await;
    assert_eq!(lines[5].get("cache"), None, "{}", lines[5]);
    // what it was told, the cache has heard
    let news = async { while !ask(&proxy, &get).await.contains("X: new\r\n") {} };
    timeout(LIMIT, news).await.unwrap();
    assert_eq!(origin.seen().len(), 4);
}

#[tokio::test]
async fn what_is_not_for_all_is_not_for_others() {
    let proxy = proxy("").await;
    for fields in [
        "Cache-Control: no-store, max-age=100\r\n",
        "Cache-Control: private, max-age=100\r\n",
        "Cache-Control: max-age=100\r\nAge: 100\r\n", // expired, and nothing to ask by
        "Cache-Control: max-age=100\r\nSet-Cookie: a=b\r\n",
        "Cache-Control: max-age=100\r\nVary: *\r\n",
    ] {
        let reply: &str = format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: 3\r\n\r\none").leak();
        let origin = Origin::start(vec![vec![(HEAD, reply)]; 2]).await;
        for n in 1..=2 {
            assert!(ask(&proxy, &format!("GET {}", origin.url("/"))).await.ends_with("\r\n\r\none"));
            assert_eq!(origin.seen().len(), n, "{fields}");
        }
    }
    assert_eq!((proxy.server.counters().cache.cache_misses, proxy.server.counters().cache.cache_entries), (10, 0));
    let reply = |body| {
        let fields = "Cache-Control: max-age=100\r\nVary: Accept-Language\r\n";
        format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: 4\r\n\r\n{body}").leak() as &str
    };
    let origin = Origin::start(["none", "eins", "one."].map(|body| vec![(HEAD, reply(body))]).to_vec()).await;
    let asked = [("", "none"), ("Accept-Language: de\r\n", "eins"), ("Accept-Language: en\r\n", "one.")];
    for n in 1..=6 {
        let (fields, body) = asked[(n - 1) % 3];
        assert!(ask(&proxy, &format!("GET {}\n{fields}", origin.url("/"))).await.ends_with(body), "{fields}");
        stored(&proxy, n.min(3) as u64).await;
    }
    assert_eq!((origin.seen().len(), proxy.server.counters().cache.cache_hits), (3, 3));
}

#[tokio::test]
async fn what_changes_it_makes_it_go() {
    let proxy = proxy("").await;
    let reply = "HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\nContent-Length: 3\r\n\r\none";
    let failed = "HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n";
    let done = "HTTP/1.1 204 No Content\r\nContent-Location: /b\r\nLocation: http://192.0.2.1/c\r\n\r\n";
    let turns = [reply, reply, reply, failed, done, reply, reply];
    let origin = Origin::start(turns.map(|reply| vec![(HEAD, reply)]).to_vec()).await;
    let get = |path: &str| format!("GET {}", origin.url(path));
    for (n, path) in ["/a", "/b", "/c"].into_iter().enumerate() {
        ask(&proxy, &get(path)).await;
        stored(&proxy, n as u64 + 1).await;
    }
    for want in [3, 1] {
        let got = ask(&proxy, &format!("POST {}\nContent-Length: 0\r\n", origin.url("/a"))).await;
        assert!(got.starts_with("HTTP/1.1 500") == (want == 3), "{got}");
        assert_eq!(proxy.server.counters().cache.cache_entries, want);
    }
    for path in ["/a", "/b", "/c"] {
        assert!(ask(&proxy, &get(path)).await.ends_with("one"));
    }
    assert_eq!(origin.seen().len(), 7);
}

#[tokio::test]
async fn rules_filters_and_passwords_come_first() {
    let more = "[[listener]]\nprotocol = \"http\"\nlisten = \"127.0.0.1:0\"\nusers = { ann = \"x\" }\n";
    let denied = "[[listener]]\nprotocol = \"http\"\nlisten = \"127.0.0.1:0\"\n"; // loopback is guarded
    let filter = "[listener.filter]\nrules = [{ action = \"deny\", body_begins = \"^one\" }]\n";
    let more = format!("{CACHE}{more}{OPEN}{CACHE}{denied}{CACHE}{denied}{OPEN}{filter}");
    let proxy = proxy(&more).await;
    let reply = "HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\nContent-Length: 3\r\n\r\none";
    let origin = Origin::start(vec![vec![(HEAD, reply)], vec![(HEAD, reply)]]).await;
    let get = format!("GET {}", origin.url("/"));
    ask(&proxy, &get).await;
    stored(&proxy, 1).await;
    let at = async |listener, fields: &str| ask_at(&proxy, listener, &format!("{get}\n{fields}")).await.0;
    assert!(at(1, "").await.starts_with("HTTP/1.1 407"));
    assert!(at(1, "Proxy-Authorization: Basic YW5uOng=\r\n").await.ends_with("\r\n\r\none"));
    assert!(at(2, "").await.starts_with("HTTP/1.1 403"));
    assert_eq!(origin.seen().len(), 1);
    // what was let through without the filter is not what the filter has let through
    assert!(at(3, "").await.starts_with("HTTP/1.1 403"));
    assert_eq!(origin.seen().len(), 2);
    until(&proxy, "what was denied is thrown away", |v| v.cache_dropped_cut == 1).await;
    assert_eq!(proxy.server.counters().cache.cache_stored, 1);
}

#[tokio::test]
async fn answers_come_in_order() {
    let proxy = proxy("").await;
    let reply =
        |n| format!("HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\nContent-Length: 3\r\n\r\n{n}").leak() as &str;
    let origin = Origin::start(["one", "two", "six"].map(|n| vec![(HEAD, reply(n))]).to_vec()).await;
    for (n, path) in ["/1", "/2"].into_iter().enumerate() {
        ask(&proxy, &format!("GET {}", origin.url(path))).await;
        stored(&proxy, n as u64 + 1).await;
    }
    let mut client = proxy.connect().await;
    let paths = ["/1", "/6", "/2", "/1"];
    let all = paths.map(|p| format!("GET {} HTTP/1.1\r\nHost: x\r\n\r\n", origin.url(p))).concat();
    client.write_all(all.as_bytes()).await.unwrap();
    client.shutdown().await.unwrap();
    let mut got = String::new();
    timeout(LIMIT, client.read_to_string(&mut got)).await.unwrap().unwrap();
    let bodies: Vec<&str> = got.split(HEAD).skip(1).map(|b| &b[..3]).collect();
    assert_eq!(bodies, ["one", "six", "two", "one"], "{got}");
    assert_eq!(proxy.server.counters().cache.cache_hits, 3);
}

#[tokio::test]
async fn replies_that_break_off_are_not_stored() {
    let proxy = proxy("").await;
    for (n, rest) in
        ["Content-Length: 9\r\n\r\none", "Transfer-Encoding: chunked\r\n\r\n3\r\none\r\n"].into_iter().enumerate()
    {
        let reply = format!("HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\n{rest}").leak();
        let origin = Origin::start(vec![vec![(HEAD, reply)], vec![(HEAD, reply)]]).await;
        for i in 1..=2 {
            let (got, end) = ask_at(&proxy, 0, &format!("GET {}", origin.url("/"))).await;
            assert!(end.is_err() || !got.ends_with("one"), "{got}");
            until(&proxy, "thrown away", |v| v.cache_dropped_cut == 2 * n as u64 + i).await;
        }
        assert_eq!(origin.seen().len(), 2);
    }
    assert_eq!(proxy.server.counters().cache.cache_bytes, 0);
}

#[tokio::test]
async fn what_is_damaged_never_comes_to_its_end() {
    let proxy = proxy("").await;
    let body: &str = "0123456789".repeat(20_000).leak();
    let reply: &str =
        format!("HTTP/1.1 200 OK\r\nETag: \"1\"\r\nCache-Control: max-age=9\r\nContent-Length: 200000\r\n\r\n{body}")
            .leak();
    let origin = Origin::start(vec![vec![(HEAD, reply)]; 3]).await;
    let get = format!("GET {}", origin.url("/"));
    for (n, at) in [(1, 100_000), (2, 5)] {
        assert!(ask(&proxy, &get).await.ends_with(body));
        stored(&proxy, n).await;
        assert!(ask(&proxy, &get).await.ends_with(body));
        OpenOptions::new().write(true).open(entry(&proxy)).unwrap().write_all_at(b"?", at).unwrap();
        if at > 65_536 {
            let (got, end) = ask_at(&proxy, 0, &get).await;
            let sent = got.split_once(HEAD).map_or("", |(_, body)| body);
            assert!(
                end == Err(ErrorKind::ConnectionReset) && sent.len() < 200_000 && body.starts_with(sent),
                "{end:?}"
            );
        }
    }
    // before a word was said, it is a miss
    assert!(ask(&proxy, &get).await.ends_with(body));
    assert_eq!((proxy.server.counters().cache.cache_damaged, origin.seen().len()), (2, 3));
    assert_eq!(proxy.lines().await.iter().filter(|l| l["how"] == "damaged").count(), 1);
}
