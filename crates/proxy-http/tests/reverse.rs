//! An HTTP listener with routes, over real sockets on the loopback device, with servers that do what a test wants.

use crate::{
    member::Member,
    origin::Origin,
    proxying::{LIMIT, Proxy, closed},
};
use std::{net::SocketAddr, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{sleep, timeout},
};

const HEAD: &str = "\r\n\r\n";
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const ROUTE: &str = "[[listener.route]]\npool = \"p\"\n";

/// A site with one pool of these servers; `more` belongs to the pool.
async fn site(servers: &[SocketAddr], more: &str) -> Proxy {
    let servers: Vec<String> = servers.iter().map(SocketAddr::to_string).collect();
    Proxy::start("http", &format!("via = \"\"\n{ROUTE}[pool.p]\nservers = {servers:?}\n{more}\n")).await
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: site.example\r\n\r\n")
}

fn last(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: site.example\r\nConnection: close\r\n\r\n")
}

async fn answer(proxy: &Proxy, input: &str) -> String {
    String::from_utf8(proxy.answer(input.as_bytes()).await).unwrap()
}

/// The bodies of replies that are one after the other.
fn bodies(replies: &str) -> Vec<&str> {
    let bodies = replies.split(HEAD).skip(1);
    bodies.map(|b| b.split_once("HTTP/1.1 ").map_or(b, |(body, _)| body)).collect()
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

/// Waits for something that comes of itself.
async fn eventually(what: &str, mut look: impl FnMut() -> bool) {
    let wait = async {
        while !look() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LIMIT, wait).await.unwrap_or_else(|_| panic!("{what}"));
}

#[tokio::test]
async fn hosts_and_paths_lead_to_pools() {
    let [www, api, images] = [Member::start("www").await, Member::start("api").await, Member::start("png").await];
    let proxy = Proxy::start(
        "http",
        &format!(
            "[[listener.route]]\nhost = \"site.example\"\npath_regex = '\\.png$'\npool = \"images\"\n\
             [[listener.route]]\nhost = [\"site.example\", \"*.site.example\"]\npath = \"/api\"\npool = \"api\"\n\
             [[listener.route]]\nhost = \"site.example\"\npath_exact = \"/\"\npool = \"www\"\n\
             [pool.www]\nservers = [\"{}\"]\n[pool.api]\nservers = [\"{}\"]\n[pool.images]\nservers = [\"{}\"]\n",
            www.addr, api.addr, images.addr
        ),
    )
    .await;
    let on_other = get("/api/x").replace("site", "a.site");
    let absolute = get("http://Site.Example/api").replace("Host: site", "Host: other");
    let input = [get("/?q"), get("/api"), get("/a.png"), on_other, absolute, get("/%61pi"), last("/apix")].concat();
    let found = answer(&proxy, &input).await;
    let nothing = "longsplice: no route for this host and path\n";
    assert_eq!(bodies(&found), ["www", "api", "png", "api", "api", "api", nothing], "{found}");
    assert!(found.contains("HTTP/1.1 404 Not Found\r\n"), "{found}");
    let seen = api.seen();
    assert!(seen[2].starts_with("GET /api HTTP/1.1\r\nHost: site.example\r\n"), "{}", seen[2]);
    assert!(seen[3].starts_with("GET /%61pi HTTP/1.1\r\n"), "it goes on as it was written: {}", seen[3]);
    let lines = proxy.lines().await;
    let routes: Vec<_> = lines.iter().map(|l| l["route"].as_str().unwrap_or("-")).collect();
    assert_eq!(routes, ["3:www", "2:api", "1:images", "2:api", "2:api", "2:api", "-"]);
    assert_eq!((&lines[0]["server"], &lines[0]["target"]), (&www.addr.to_string().into(), &"site.example".into()));
    assert_eq!((&lines[6]["how"], &lines[6]["status"]), (&"no-route".into(), &404.into()));
    assert_eq!(proxy.server.counters().no_route, 1);
}

#[tokio::test]
async fn what_is_no_request_to_a_site() {
    let server = Member::start("a").await;
    let proxy = site(&[server.addr], "").await;
    for (request, status) in [
        ("CONNECT site.example:80 HTTP/1.1\r\nHost: site.example:80\r\n\r\n", 501),
        ("TRACE / HTTP/1.1\r\nHost: site.example\r\nConnection: close\r\n\r\n", 501),
        ("GET / HTTP/1.1\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: a..b\r\nConnection: close\r\n\r\n", 400),
        ("GET https://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 501),
        ("OPTIONS / HTTP/1.1\r\nHost: a\r\nMax-Forwards: 0\r\nConnection: close\r\n\r\n", 200),
    ] {
        let mut client = proxy.connect().await;
        client.write_all(request.as_bytes()).await.unwrap();
        let found = until(&mut client, HEAD).await;
        assert!(found.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {found}");
    }
    assert!(server.seen().is_empty());
    // HTTP/1.0 need not name a host, and `*` is for whoever has the top.
    assert!(answer(&proxy, "GET / HTTP/1.0\r\n\r\n").await.ends_with('a'));
    let options = "OPTIONS * HTTP/1.1\r\nHost: site.example\r\nConnection: close\r\n\r\n";
    assert!(answer(&proxy, options).await.ends_with('a'));
    let seen = server.seen();
    assert!(seen[0].starts_with(&format!("GET / HTTP/1.1\r\nHost: {}\r\n", server.addr)), "{}", seen[0]);
    assert!(seen[1].starts_with("OPTIONS * HTTP/1.1\r\nHost: site.example\r\n"), "{}", seen[1]);
}

#[tokio::test]
async fn paths_are_refused_only_where_they_are_looked_at() {
    let server = Member::start("a").await;
    let odd = ["/a/../b", "/%2e%2e/b", "/%zz", "/%00", "/a%", "/?a\\b"];
    for (more, read) in [("", false), ("path = \"/\"\n", false), ("path_regex = \"\"\n", true)] {
        let text = format!("{ROUTE}{more}[pool.p]\nservers = [\"{}\"]\n", server.addr);
        let proxy = Proxy::start("http", &text).await;
        for path in odd {
            let found = answer(&proxy, &last(path)).await;
            let refused = read && !path.contains('?');
            assert!(found.starts_with(if refused { "HTTP/1.1 400 " } else { "HTTP/1.1 200 " }), "{path}: {found}");
        }
    }
    let rule = "rules = [{ action = \"deny\", path = \"/x\" }]\n";
    let proxy = Proxy::start("http", &format!("{rule}{ROUTE}[pool.p]\nservers = [\"{}\"]\n", server.addr)).await;
    assert!(answer(&proxy, &last("/a/../b")).await.starts_with("HTTP/1.1 400 "));
    assert!(server.seen()[0].starts_with("GET /a/../b HTTP/1.1\r\n"), "it goes on as it was written");
}

#[tokio::test]
async fn pipelined_requests_go_to_different_servers_and_replies_stay_in_order() {
    let [a, b] = [Member::start("a").await, Member::start("b").await];
    let proxy = site(&[a.addr, b.addr], "").await;
    let mut client = proxy.connect().await;
    // The first waits: those behind it must not overtake.
    let input = [get("/held"), get("/1"), get("/2"), get("/3"), get("/4"), last("/5")].concat();
    client.write_all(input.as_bytes()).await.unwrap();
    eventually("the first request", || a.seen().len() == 1).await;
    assert!(b.seen().is_empty());
    a.release();
    let mut found = String::new();
    timeout(LIMIT, client.read_to_string(&mut found)).await.unwrap().unwrap();
    assert_eq!(bodies(&found), ["a", "b", "a", "b", "a", "b"], "{found}");
    assert_eq!((a.connections(), b.connections()), (1, 1), "connections are kept");
    assert_eq!(proxy.server.counters().reused, 4);
}

#[tokio::test]
async fn connections_are_kept_for_other_clients() {
    let server = Member::start("a").await;
    let proxy = site(&[server.addr], "").await;
    for _ in 0..3 {
        answer(&proxy, &last("/")).await;
    }
    // What could not be sent again gets a connection of its own, if the client has none that may end at any time, too.
    let post = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi";
    answer(&proxy, &post.replace(HEAD, "\r\nConnection: close\r\n\r\n")).await;
    assert_eq!((server.connections(), proxy.server.counters().reused), (2, 2));
    answer(&proxy, &[get("/"), post.repeat(20), last("/")].concat()).await;
    assert_eq!((server.connections(), proxy.server.counters().reused), (2, 24));
    proxy.server.stop_accepting();
    assert_eq!(proxy.server.drain(LIMIT).await, 0);

    let forgetful = site(&[server.addr], "idle_connections = 0").await;
    for _ in 0..2 {
        answer(&forgetful, &last("/")).await;
    }
    assert_eq!((server.connections(), forgetful.server.counters().reused), (4, 0));
}

#[tokio::test]
async fn idle_connections_that_servers_close_harm_nobody() {
    // Closed while idle; and closed at the very moment when the next request comes.
    for first in [vec![(HEAD, OK)], vec![(HEAD, OK), (HEAD, "")]] {
        let server = Origin::start(vec![first, vec![(HEAD, OK)]]).await;
        let proxy = site(&[server.addr], "tries = 1").await;
        for _ in 0..2 {
            assert!(answer(&proxy, &last("/")).await.ends_with("ok"));
        }
        assert_eq!(server.seen().len(), 2);
        let counters = proxy.server.counters();
        assert_eq!((counters.retries, counters.servers_down, counters.bad_replies), (0, 0, 0));
    }
}

#[tokio::test]
async fn what_an_idle_connection_loses_is_not_sent_again_unless_it_may_be() {
    let post = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi";
    let server = Origin::start(vec![vec![(HEAD, OK), ("hi", "")], vec![(HEAD, OK)]]).await;
    let proxy = site(&[server.addr], "failures = 1").await;
    let found = answer(&proxy, &(get("/") + post)).await;
    assert_eq!(bodies(&found), ["ok"], "the client's connection ends like the server's: {found}");
    let seen = server.seen();
    assert!(seen.len() == 1 && seen[0].ends_with("hi"), "{seen:?}");
    assert_eq!(proxy.server.counters().servers_down, 0, "servers may close idle connections");
    assert_eq!(proxy.lines().await[1]["how"], "server-reset");
}

#[tokio::test]
async fn idle_connections_on_which_servers_speak_are_not_used() {
    let evil = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil";
    let server = Origin::start(vec![vec![(HEAD, OK), ("", evil), ("never", "")], vec![(HEAD, OK)]]).await;
    let proxy = site(&[server.addr], "").await;
    assert!(answer(&proxy, &last("/")).await.ends_with("ok"));
    let found = answer(&proxy, &last("/")).await;
    assert!(found.ends_with("ok") && !found.contains("evil"), "{found}");
    assert_eq!(server.seen().len(), 2);
}

#[tokio::test]
async fn content_that_servers_do_not_read_is_no_request() {
    for method in ["GET", "HEAD", "DELETE", "OPTIONS", "ODD"] {
        // It reads the head alone, and answers what is hidden behind it when the next client asks.
        let hidden = ("GET /b HTTP/1.1", "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil");
        let server = Origin::start(vec![vec![(HEAD, OK), hidden], vec![(HEAD, OK)]]).await;
        let proxy = site(&[server.addr], "").await;
        let hides = last("/a").replace("GET", method).replace(HEAD, "\r\nContent-Length: 38\r\n\r\n");
        let found = answer(&proxy, &(hides + "GET /hidden HTTP/1.1\r\nHost: site.a\r\n\r\n")).await;
        assert!(found.starts_with("HTTP/1.1 200 "), "{method}: {found}");
        let found = answer(&proxy, &last("/b")).await;
        assert!(found.ends_with("ok"), "{method}: {found}");
        let seen = server.seen();
        assert!(seen[0].contains("\r\nConnection: close\r\n") && seen.len() == 2, "{method}: {seen:?}");
    }
}

#[tokio::test]
async fn a_dead_server_is_passed_over_and_taken_out() {
    let alive = Member::start("a").await;
    let proxy = site(&[closed().await, alive.addr], "failures = 2\nout = 3600").await;
    let body = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi";
    let found =
        answer(&proxy, &[&get("/"), body, &get("/"), &get("/"), &last("/")].map(ToString::to_string).concat()).await;
    assert_eq!(bodies(&found), ["a"; 5], "where nothing was sent, a request with a body may go elsewhere, too");
    let counters = proxy.server.counters();
    assert_eq!((counters.retries, counters.servers_down, counters.unreachable), (2, 1, 0));
    let lines = proxy.lines().await;
    assert!(lines.iter().all(|l| l["server"] == alive.addr.to_string()), "{lines:?}");
}

#[tokio::test]
async fn no_server_is_left() {
    let proxy = site(&[closed().await, closed().await, closed().await], "tries = 2").await;
    let found = answer(&proxy, &last("/")).await;
    assert!(found.starts_with("HTTP/1.1 502 "), "{found}");
    assert_eq!(proxy.server.counters().retries, 1);
    assert_eq!(proxy.line().await["how"], "unreachable");
    // The only one closes without a word: nobody is left to ask.
    let proxy = site(&[Origin::start(vec![vec![(HEAD, "")]]).await.addr], "").await;
    let found = answer(&proxy, &last("/")).await;
    assert!(found.starts_with("HTTP/1.1 502 "), "{found}");
    assert_eq!(proxy.server.counters().retries, 0);
    assert_eq!(proxy.line().await["how"], "bad-reply");
}

#[tokio::test]
async fn only_what_is_safe_is_sent_again() {
    let post = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".to_owned();
    let put = "PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi".to_owned();
    for (request, tries, repeated) in [(last("/"), 3, true), (post, 3, false), (put, 3, false), (last("/"), 1, false)] {
        // reads a request and closes
        let failing = Origin::start(vec![vec![(if request.starts_with("PUT") { "hi" } else { HEAD }, "")]]).await;
        let good = Member::start("good").await;
        let proxy = site(&[failing.addr, good.addr], &format!("failures = 1\ntries = {tries}")).await;
        let found = answer(&proxy, &request).await;
        assert_eq!(found.ends_with("good"), repeated, "{request}: {found}");
        assert_eq!(found.starts_with("HTTP/1.1 502 "), !repeated, "{found}");
        let counters = proxy.server.counters();
        assert_eq!((counters.retries, counters.servers_down), (u64::from(repeated), 1));
    }
}

#[tokio::test]
async fn a_reply_that_was_begun_is_not_begun_again() {
    let dying = Origin::start(vec![vec![(HEAD, "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello")]]).await;
    let good = Member::start("good").await;
    let proxy = site(&[dying.addr, good.addr], "failures = 1").await;
    let mut client = proxy.connect().await;
    client.write_all(get("/").as_bytes()).await.unwrap();
    let mut seen = Vec::new();
    let end = timeout(LIMIT, client.read_to_end(&mut seen)).await.unwrap();
    assert!(end.is_err(), "a reset, not an end: {}", String::from_utf8_lossy(&seen));
    assert_eq!(proxy.line().await["how"], "server-reset");
    assert!(good.seen().is_empty());
    let counters = proxy.server.counters();
    assert_eq!((counters.retries, counters.servers_down), (0, 1));
}

#[tokio::test]
async fn checks_take_servers_down_and_bring_them_back() {
    let [a, b] = [Member::start("a").await, Member::start("b").await];
    let check = "check = { path = \"/health\", interval = 0.01, status = 200, rise = 2, fall = 2 }";
    let proxy = site(&[a.addr, b.addr], check).await;
    a.set_sick(true);
    eventually("a to be down", || proxy.server.counters().servers_down == 1).await;
    let found = answer(&proxy, &[get("/"), get("/"), last("/")].concat()).await;
    assert_eq!(bodies(&found), ["b"; 3]);
    b.set_sick(true);
    eventually("b to be down", || proxy.server.counters().servers_down == 2).await;
    let found = answer(&proxy, &last("/")).await;
    assert!(found.starts_with("HTTP/1.1 503 Service Unavailable\r\n"), "{found}");
    assert_eq!(proxy.server.counters().no_server, 1);
    a.set_sick(false);
    eventually("a to be up", || proxy.server.counters().servers_up == 1).await;
    assert_eq!(bodies(&answer(&proxy, &[get("/"), last("/")].concat()).await), ["a"; 2]);
}

#[tokio::test]
async fn a_field_can_decide() {
    let [a, b, c] = [Member::start("a").await, Member::start("b").await, Member::start("c").await];
    let hashing = "balance = \"consistent-hash\"\nhash_field = \"X-User\"";
    let proxy = site(&[a.addr, b.addr, c.addr], hashing).await;
    let by = |user: u32| get("/").replace("\r\n\r\n", &format!("\r\nX-User: {user}\r\n\r\n"));
    let input: String = (0..60).map(|n| by(n % 20)).chain([last("/")]).collect();
    let found = answer(&proxy, &input).await;
    let by_user: Vec<&str> = bodies(&found)[..60].to_vec();
    assert_eq!((&by_user[..20], &by_user[..20]), (&by_user[20..40], &by_user[40..]));
    assert!(["a", "b", "c"].iter().all(|name| by_user.contains(name)), "{by_user:?}");
}

#[tokio::test]
async fn the_least_busy_server_is_asked() {
    let [a, b] = [Member::start("a").await, Member::start("b").await];
    let proxy = site(&[a.addr, b.addr], "balance = \"least-connections\"").await;
    let mut waiting = proxy.connect().await;
    waiting.write_all(last("/held").as_bytes()).await.unwrap();
    eventually("the first request", || a.seen().len() == 1).await;
    assert_eq!(bodies(&answer(&proxy, &[get("/"), get("/"), last("/")].concat()).await), ["b"; 3]);
    a.release();
    until(&mut waiting, "a").await;
    assert_eq!(proxy.lines().await.len(), 4);
}

#[tokio::test]
async fn an_upgraded_connection_keeps_its_server_busy() {
    let switching = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n";
    let busy = Origin::start(vec![vec![(HEAD, switching), ("ping", "pong"), ("end", "bye")]]).await;
    let other = Member::start("other").await;
    let proxy = site(&[busy.addr, other.addr], "balance = \"least-connections\"").await;
    let mut client = proxy.connect().await;
    let ask = get("/").replace("\r\n\r\n", "\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n");
    client.write_all(ask.as_bytes()).await.unwrap();
    assert_eq!(until(&mut client, HEAD).await, switching);
    client.write_all(b"ping").await.unwrap();
    assert_eq!(until(&mut client, "pong").await, "pong");
    assert_eq!(bodies(&answer(&proxy, &[get("/"), last("/")].concat()).await), ["other"; 2]);
    client.write_all(b"end").await.unwrap();
    assert_eq!(until(&mut client, "bye").await, "bye");
    drop(client);
    let lines = proxy.lines().await;
    assert_eq!((&lines[2]["route"], &lines[2]["how"]), (&"1:p".into(), &"closed".into()));
}

#[tokio::test]
async fn servers_are_told_who_asked_for_what() {
    let server = Member::start("a").await;
    let text = format!("forwarded = \"x-forwarded-for\"\n{ROUTE}[pool.p]\nservers = [\"{}\"]\n", server.addr);
    let proxy = Proxy::start("http", &text).await;
    answer(&proxy, &last("/").replace("Host", "X-Forwarded-Proto: https\r\nHost")).await;
    let want = "GET / HTTP/1.1\r\nHost: site.example\r\nVia: 1.1 longsplice\r\nX-Forwarded-Host: site.example\r\n\
                X-Forwarded-Proto: http\r\nX-Forwarded-For: 127.0.0.1\r\n\r\n";
    assert_eq!(server.seen(), [want]);
}

#[tokio::test]
async fn rules_know_methods_and_paths() {
    let server = Member::start("a").await;
    let rules = "rules = [\n{ action = \"allow\", methods = [\"GET\", \"HEAD\"], path = \"/admin/help\" },\n\
                 { action = \"deny\", path = \"/admin*\" },\n{ action = \"deny\", methods = \"DELETE\" },\n\
                 { action = \"deny\", target = \"secret.example\" }]\n";
    let text = format!("{rules}{ROUTE}[pool.p]\nservers = [\"{}\"]\n", server.addr);
    let proxy = Proxy::start("http", &text).await;
    let requests = [
        get("/admin/help"),
        get("/admin/help").replace("GET", "DELETE"),
        get("/%61dmin"),
        get("//admin"),
        get("/").replace("GET", "DELETE"),
        get("/").replace("site", "secret"),
        last("/x"),
    ];
    answer(&proxy, &requests.concat()).await;
    let lines = proxy.lines().await;
    let found: Vec<_> = lines.iter().map(|l| l["status"].as_u64().unwrap()).collect();
    assert_eq!(found, [200, 403, 403, 403, 403, 403, 200]);
    assert_eq!(lines[2]["refusal"], "rule 2");
    // The same for a forward proxy; a kept connection does not let through what a new one would not.
    let allow = "{ action = \"allow\", target = \"127.0.0.0/8\" }]\n";
    let proxy = Proxy::start("http", &rules.replace("]\n", &format!(", {allow}"))).await;
    let url = |path: &str| format!("http://{}{path}", server.addr);
    let requests = [get(&url("/")), get(&url("/admin")), get(&url("/a/../b")), last(&url("/y"))];
    let found = answer(&proxy, &requests.concat()).await;
    let statuses: Vec<_> = found.split("HTTP/1.1 ").skip(1).map(|r| &r[..3]).collect();
    assert_eq!(statuses, ["200", "403", "400", "200"], "{found}");
}

/// How long clients wait, and for what.
#[tokio::test]
async fn the_log_says_how_long_connections_and_replies_took() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = site(&[listener.local_addr().unwrap()], "").await;
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        for wait in [40, 0] {
            until(&mut stream, HEAD).await;
            sleep(Duration::from_millis(wait)).await;
            stream.write_all(OK.as_bytes()).await.unwrap();
        }
    });
    let found = answer(&proxy, &[get("/a"), last("/b")].concat()).await;
    assert_eq!(bodies(&found), ["ok", "ok"]);
    server.await.unwrap();
    let lines = proxy.lines().await;
    let [first, second] = &lines[..] else { panic!("{lines:?}") };
    assert!(first["connect_ms"].is_u64() && second["connect_ms"].is_null(), "one connection for both: {lines:?}");
    assert!(first["reply_ms"].as_u64() >= Some(40) && second["reply_ms"].is_u64(), "{lines:?}");
    let totals = proxy.server.listeners().remove(0).totals;
    let counted = [&totals.connects, &totals.replies].map(|times| times.by_bound.iter().sum::<u64>());
    assert_eq!(counted, [1, 2]);
}
