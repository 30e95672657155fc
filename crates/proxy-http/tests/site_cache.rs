//! The cache in front of a site: parts, stale replies, one request for many, PURGE. Servers are on the loopback device.

use crate::{
    origin::Origin,
    proxying::{LIMIT, Proxy},
};
use longsplice_proxy::{Purge, counters::cache::CacheValues};
use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Notify,
    task::JoinSet,
    time::{sleep, timeout},
};

const FRESH: &str = "HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\nContent-Length: 3\r\n\r\nnew";

/// A site with this server. `more`: keys of the listener, and those of its cache after a line `[cache]`.
async fn site(server: SocketAddr, more: &str) -> Proxy {
    let (listener, cache) = more.split_once("[cache]\n").unwrap_or((more, ""));
    let route = "[[listener.route]]\npool = \"p\"\n";
    let text =
        format!("{listener}[listener.cache]\ndir = \"cache\"\n{cache}{route}[pool.p]\nservers = [\"{server}\"]\n");
    Proxy::start("http", &text).await
}

/// A server that answers each connection once.
async fn origin(replies: &[&'static str]) -> Origin {
    Origin::start(replies.iter().map(|reply| vec![("\r\n\r\n", *reply)]).collect()).await
}

async fn ask(proxy: &Proxy, method: &str, more: &str) -> String {
    let request = format!("{method} /x HTTP/1.1\r\nHost: Site.example\r\n{more}Connection: close\r\n\r\n");
    String::from_utf8(proxy.answer(request.as_bytes()).await).unwrap()
}

async fn until(proxy: &Proxy, what: &str, is: impl Fn(&CacheValues) -> bool) {
    let wait = async {
        while !is(&proxy.server.counters().cache) {
            sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(LIMIT, wait).await.unwrap_or_else(|_| panic!("{what}: {:?}", proxy.server.counters().cache));
}

fn status(reply: &str) -> &str {
    reply.split(' ').nth(1).unwrap_or(reply)
}

fn body(reply: &str) -> &str {
    reply.split_once("\r\n\r\n").map_or("", |(_, body)| body)
}

#[tokio::test]
async fn parts_of_stored_replies() {
    let text: String = (0..40_000).map(|n| format!("{n:05}")).collect(); // several blocks
    let head = format!(
        "HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\nETag: \"a\"\r\nContent-Length: {}\r\n\r\n",
        text.len()
    );
    let server = origin(&[(head + &text).leak()]).await;
    let proxy = site(server.addr, "").await;
    assert_eq!(body(&ask(&proxy, "GET", "").await), text);
    until(&proxy, "stored", |v| v.cache_stored == 1).await;
    for (range, want) in [
        ("0-9", Some(0..10)),
        ("65530-65545", Some(65530..65546)),
        ("65536-131071", Some(65536..131_072)),
        ("60000-190000", Some(60000..190_001)),
        ("199999-", Some(199_999..200_000)),
        ("-7", Some(199_993..200_000)),
        ("200000-", None),
    ] {
        let said = ask(&proxy, "GET", &format!("Range: bytes={range}\r\n")).await;
        match want {
            Some(want) => {
                assert_eq!(status(&said), "206", "{range}");
                let field = format!("Content-Range: bytes {}-{}/200000\r\n", want.start, want.end - 1);
                assert!(said.contains(&field) && body(&said) == &text[want], "{range}");
            }
            None => assert!(status(&said) == "416" && said.contains("Content-Range: bytes */200000\r\n"), "{said}"),
        }
    }
    for more in ["Range: bytes=0-1,3-4\r\n", "Range: bytes=0-1\r\nIf-Range: \"b\"\r\n"] {
        let said = ask(&proxy, "GET", more).await;
        assert!(status(&said) == "200" && body(&said) == text, "{more}");
    }
    assert_eq!(status(&ask(&proxy, "GET", "Range: bytes=0-1\r\nIf-Range: \"a\"\r\n").await), "206");
    // the connection goes on behind a part
    let both = "GET /x HTTP/1.1\r\nHost: site.example\r\nRange: bytes=0-4\r\n\r\n".repeat(2);
    let last = "GET /x HTTP/1.1\r\nHost: site.example\r\nRange: bytes=5-9\r\nConnection: close\r\n\r\n";
    let said = String::from_utf8(proxy.answer((both + last).as_bytes()).await).unwrap();
    assert!(said.matches("206 Partial").count() == 3 && said.ends_with("\r\n\r\n00001"), "{said}");
    assert_eq!(server.seen().len(), 1);
}

/// A part is not stored, and what is stored whole answers for it.
#[tokio::test]
async fn parts_from_servers_are_not_stored() {
    let part = "HTTP/1.1 206 Partial Content\r\nCache-Control: max-age=100\r\nContent-Range: bytes 0-0/3\r\n\
                Content-Length: 1\r\n\r\nn";
    let server = origin(&[part, FRESH]).await;
    let proxy = site(server.addr, "").await;
    assert_eq!(body(&ask(&proxy, "GET", "Range: bytes=0-0\r\n").await), "n");
    // a server may send all of it instead
    assert_eq!(body(&ask(&proxy, "GET", "Range: bytes=0-0\r\n").await), "new");
    until(&proxy, "stored", |v| v.cache_stored == 1).await;
    assert_eq!(body(&ask(&proxy, "GET", "Range: bytes=1-1\r\n").await), "e");
    assert_eq!(server.seen().len(), 2);
}

const OLD: &str = "HTTP/1.1 200 OK\r\nETag: \"a\"\r\nAge: 5\r\nContent-Length: 3\r\n";

fn old(control: &str) -> &'static str {
    format!("{OLD}Cache-Control: max-age=5{control}\r\n\r\nold").leak()
}

#[tokio::test]
async fn a_server_that_fails_is_replaced_by_what_is_stored() {
    let sick = "HTTP/1.1 503 Sick\r\nContent-Length: 4\r\n\r\nsick";
    let lost = "HTTP/1.1 404 Lost\r\nContent-Length: 4\r\n\r\nlost";
    let first = "[cache]\nstale_if_error = 100\n";
    for (keys, control, after, want) in [
        ("", ", stale-if-error=100", Some(sick), "old"),
        ("", ", stale-if-error=100", None, "old"),
        (first, "", Some(sick), "old"),
        ("", "", Some(sick), "sick"),
        (first, ", must-revalidate", Some(sick), "sick"),
        ("", ", stale-if-error=100", Some(lost), "lost"),
    ] {
        let replies: Vec<_> = [Some(old(control)), after].into_iter().flatten().collect();
        let server = origin(&replies).await;
        let proxy = site(server.addr, keys).await;
        assert_eq!(body(&ask(&proxy, "GET", "").await), "old");
        until(&proxy, "stored", |v| v.cache_stored == 1).await;
        let said = ask(&proxy, "GET", "").await;
        assert_eq!(body(&said), want, "{keys} {control} {after:?}: {said}");
        assert_eq!(proxy.server.counters().cache.cache_stale, u64::from(want == "old"));
    }
}

#[tokio::test]
async fn a_stale_reply_is_sent_while_its_server_is_asked_again() {
    let confirmed = "HTTP/1.1 304 Same\r\nETag: \"a\"\r\nCache-Control: max-age=100\r\n\r\n";
    for (again, want) in [(FRESH, "new"), (confirmed, "old")] {
        let server = origin(&[old(", stale-while-revalidate=100"), again]).await;
        let proxy = site(server.addr, "").await;
        assert_eq!(body(&ask(&proxy, "GET", "").await), "old");
        until(&proxy, "stored", |v| v.cache_stored == 1).await;
        // this client wants a part, and the next one shall have all of it
        let said = ask(&proxy, "GET", "Range: bytes=0-0\r\n").await;
        assert_eq!((status(&said), body(&said)), ("206", "o"));
        let fresh = async {
            loop {
                let said = ask(&proxy, "GET", "").await;
                if proxy.server.counters().cache.cache_hits == 1 {
                    return said;
                }
            }
        };
        assert_eq!(body(&timeout(LIMIT, fresh).await.unwrap()), want);
        let seen = server.seen();
        assert!(
            seen.len() == 2 && seen[1].contains("If-None-Match: \"a\"\r\n") && !seen[1].contains("Range"),
            "{seen:?}"
        );
    }
}

/// A server that holds its replies until it is told. Returns its address, how often it was asked, and what tells it.
async fn slow(reply: &'static str) -> (SocketAddr, Arc<AtomicUsize>, Arc<Notify>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let (asked, go) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let (theirs, told) = (asked.clone(), go.clone());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (asked, go) = (theirs.clone(), told.clone());
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.unwrap());
                }
                asked.fetch_add(1, SeqCst);
                go.notified().await;
                stream.write_all(reply.as_bytes()).await.unwrap();
                let _ = stream.read_u8().await;
            });
        }
    });
    (addr, asked, go)
}

/// Asks for the same URL ten times at once, and lets the server answer when it has so many requests.
async fn all_at_once(more: &str, reply: &'static str, requests: usize) -> (Proxy, usize) {
    const CLIENTS: usize = 10;
    let (server, asked, go) = slow(reply).await;
    let proxy = Arc::new(site(server, more).await);
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        let proxy = proxy.clone();
        clients.spawn(async move { ask(&proxy, "GET", "").await });
    }
    let all = async {
        while proxy.server.counters().requests < CLIENTS as u64 || asked.load(SeqCst) < requests {
            sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(LIMIT, all).await.unwrap();
    let release = tokio::spawn(async move {
        loop {
            go.notify_waiters();
            sleep(Duration::from_millis(2)).await;
        }
    });
    while let Some(said) = timeout(LIMIT, clients.join_next()).await.unwrap() {
        assert_eq!(body(&said.unwrap()), "new");
    }
    release.abort();
    (Arc::into_inner(proxy).unwrap(), asked.load(SeqCst))
}

#[tokio::test]
async fn one_request_to_the_server_for_many() {
    let (proxy, asked) = all_at_once("[cache]\ncollapse = 30\n", FRESH, 1).await;
    assert_eq!((asked, proxy.server.counters().cache.cache_hits), (1, 9));
    // without it, all ask
    let (_, asked) = all_at_once("", FRESH, 10).await;
    assert_eq!(asked, 10);
    // a limit in time
    let (_, asked) = all_at_once("[cache]\ncollapse = 0.05\n", FRESH, 10).await;
    assert_eq!(asked, 10);
    // what is not stored is no answer to others: when that is known, all ask
    let own = "HTTP/1.1 200 OK\r\nCache-Control: private\r\nContent-Length: 3\r\n\r\nnew";
    let (_, asked) = all_at_once("[cache]\ncollapse = 30\n", own, 1).await;
    assert_eq!(asked, 10);
}

#[tokio::test]
async fn purge() {
    let server = origin(&[FRESH, FRESH, FRESH]).await;
    let proxy = site(server.addr, "[cache]\npurge = [\"127.0.0.0/8\", \"192.0.2.1\"]\n").await;
    assert_eq!(status(&ask(&proxy, "PURGE", "").await), "404");
    for n in 1..=2 {
        ask(&proxy, "GET", "").await;
        until(&proxy, "stored", |v| v.cache_stored == n).await;
        assert_eq!(status(&ask(&proxy, "PURGE", "").await), "200");
    }
    assert_eq!(server.seen().len(), 2);
    for (keys, want) in [("[cache]\npurge = \"192.0.2.1\"\n", "403"), ("", "200")] {
        let server = origin(&[FRESH]).await;
        let proxy = site(server.addr, keys).await;
        assert_eq!(status(&ask(&proxy, "PURGE", "").await), want, "a method like others, unless clients are named");
        assert_eq!(server.seen().len(), usize::from(want == "200"));
    }
}

/// An operator's removal looks at a part of one cache at a time, and comes to all of them.
#[tokio::test]
async fn a_removal_comes_to_all_caches() {
    let server = origin(&[FRESH, FRESH]).await;
    let second = "[[listener]]\nprotocol = \"http\"\nlisten = \"127.0.0.1:0\"\n[listener.cache]\ndir = \"other\"\n\
                  [[listener.route]]\npool = \"p\"\n";
    let route = "[[listener.route]]\npool = \"p\"\n";
    let pool = format!("[pool.p]\nservers = [\"{}\"]\n", server.addr);
    let proxy = Proxy::start("http", &format!("[listener.cache]\ndir = \"cache\"\n{route}{second}{pool}")).await;
    let request = b"GET /x HTTP/1.1\r\nHost: site.example\r\nConnection: close\r\n\r\n";
    let fill = async |n| {
        for front in proxy.server.listen_addrs() {
            let mut client = TcpStream::connect(front).await.unwrap();
            client.write_all(request).await.unwrap();
            let mut reply = String::new();
            timeout(LIMIT, client.read_to_string(&mut reply)).await.unwrap().unwrap();
            assert_eq!(body(&reply), "new");
        }
        until(&proxy, "stored", |v| v.cache_stored == n).await;
    };
    let remove = |url: &str, below| {
        let mut what = Purge { url: url.into(), below, after: None };
        let (mut removed, mut asked) = (0, 0);
        loop {
            let one = proxy.server.purge(&what);
            (removed, asked) = (removed + one.removed, asked + 1);
            match one.after {
                Some(_) => what.after = one.after,
                None => return (removed, asked),
            }
        }
    };
    fill(2).await;
    assert_eq!(remove("http://site.example/y", false), (0, 2));
    assert_eq!(remove("http://site.example/x", false), (2, 2));
    assert_eq!(remove("http://site.example/", true), (0, 2));
    assert_eq!(proxy.server.counters().cache.cache_entries, 0);
}

/// Servers do not know who asks, so all users of a site get the same replies.
#[tokio::test]
async fn users_share_what_is_stored() {
    let server = origin(&[FRESH]).await;
    let proxy = site(server.addr, "users = { ann = \"secret\", bob = \"pw\" }\n").await;
    let [ann, bob] = ["YW5uOnNlY3JldA==", "Ym9iOnB3"].map(|pair| format!("Authorization: Basic {pair}\r\n"));
    assert_eq!(body(&ask(&proxy, "GET", &ann).await), "new");
    until(&proxy, "stored", |v| v.cache_stored == 1).await;
    assert_eq!(body(&ask(&proxy, "GET", &bob).await), "new");
    assert_eq!(status(&ask(&proxy, "GET", "").await), "401");
    assert_eq!((server.seen().len(), proxy.server.counters().cache.cache_hits), (1, 1));
}
