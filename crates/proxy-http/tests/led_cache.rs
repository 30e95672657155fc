//! The cache where rules lead: who may have what others were sent, and what a request changes.

use crate::{
    origin::{Origin, Turn},
    proxying::{LIMIT, OPEN, Proxy},
};
use std::net::SocketAddr;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpSocket,
    time::{sleep, timeout},
};

const HEAD: &str = "\r\n\r\n";
const CACHE: &str = "cache = { dir = \"cache\", purge = \"127.0.0.0/8\" }\n";

/// A listener behind the first one, and upstream proxies at this address, which get names or addresses.
fn rest(more: &str, up: SocketAddr) -> String {
    let up = |name: &str, resolve: bool| {
        format!("[upstream.{name}]\nprotocol = \"http\"\nservers = \"{up}\"\nresolve = {resolve}\n")
    };
    format!(
        "[[listener]]\nprotocol = \"http\"\nlisten = \"127.0.0.1:0\"\n{more}{}{}",
        up("names", false),
        up("addresses", true)
    )
}

/// What a client with this address gets from a listener.
async fn ask(proxy: &Proxy, (client, listener): (&str, usize), request: &str) -> String {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(format!("{client}:0").parse().unwrap()).unwrap();
    let mut stream = socket.connect(proxy.server.listen_addrs()[listener]).await.unwrap();
    let length = if request.starts_with("POST") { "Content-Length: 0\r\n" } else { "" };
    stream
        .write_all(format!("{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{length}\r\n").as_bytes())
        .await
        .unwrap();
    let mut got = String::new();
    timeout(LIMIT, stream.read_to_string(&mut got)).await.unwrap().unwrap();
    got
}

/// Waits until so many replies have been stored.
async fn stored(proxy: &Proxy, n: u64) {
    let wait = async {
        while proxy.server.counters().cache.cache_stored != n {
            sleep(LIMIT / 2000).await;
        }
    };
    timeout(LIMIT, wait).await.unwrap_or_else(|_| panic!("{:?}", proxy.server.counters().cache));
}

/// A server that gives each connection another reply.
async fn origin<const N: usize>(names: [&str; N]) -> Origin {
    let reply = |name: &str| -> Turn {
        let text = format!(
            "HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{name}",
            name.len()
        );
        (HEAD, text.leak())
    };
    Origin::start(names.map(|name| vec![reply(name)]).to_vec()).await
}

/// A name that is connected to straight, and one that an upstream proxy is asked for by its address: it is known which address the
/// rules have judged.
#[tokio::test]
async fn replies_are_served_whose_address_is_known() {
    let up = Proxy::start("http", OPEN).await;
    let of_listener = "upstream = \"names\"\nrules = [{ action = \"deny\", target = \"10.0.0.0/8\" }, \
                       { action = \"allow\", target = [\"localhost\", \"127.0.0.0/8\"], upstream = false }]\n";
    let of_rule = "rules = [{ action = \"allow\", target = \"127.0.0.0/8\", upstream = \"addresses\" }]\n";
    for rules in [of_listener, of_rule] {
        let more = format!("{CACHE}{rules}{}", rest("", up.server.listen_addrs()[0]));
        let proxy = Proxy::start("http", &more).await;
        let origin = origin(["one"]).await;
        let get = format!("GET http://localhost:{}/", origin.addr.port());
        assert!(ask(&proxy, ("127.0.0.1", 0), &get).await.ends_with("one"));
        stored(&proxy, 1).await;
        assert!(ask(&proxy, ("127.0.0.1", 0), &get).await.ends_with("one"));
        assert_eq!((proxy.server.counters().cache.cache_hits, origin.seen().len()), (1, 1), "{rules}");
    }
}

/// Listeners may share a cache. What one has got from a guarded address, another does not give to its clients.
#[tokio::test]
async fn guarded_addresses_stay_guarded() {
    let up = Proxy::start("http", OPEN).await;
    let leads = "rules = [{ action = \"allow\", target = \"*.far\", upstream = \"names\" }]\n";
    let more = format!("{CACHE}{OPEN}{}", rest(&format!("{CACHE}{leads}"), up.server.listen_addrs()[0]));
    let proxy = Proxy::start("http", &more).await;
    let origin = origin(["secret"]).await;
    let get = format!("GET http://localhost:{}/", origin.addr.port());
    assert!(ask(&proxy, ("127.0.0.1", 0), &get).await.ends_with("secret"));
    stored(&proxy, 1).await;
    assert!(ask(&proxy, ("127.0.0.1", 0), &get).await.ends_with("secret"));
    let got = ask(&proxy, ("127.0.0.1", 1), &get).await;
    assert!(got.starts_with("HTTP/1.1 403 ") && got.contains("guarded"), "{got}");
    assert_eq!((proxy.server.counters().cache.cache_hits, origin.seen().len()), (1, 1));
}

/// Replies that have come another way are other ones, and a request that changes something changes all of them.
#[tokio::test]
async fn what_is_changed_is_changed_for_all_ways() {
    let up = Proxy::start("http", OPEN).await;
    let rules = "rules = [{ action = \"allow\", client = \"127.0.0.2\", target = \"127.0.0.0/8\", upstream = \"names\" }, \
                 { action = \"allow\", target = \"127.0.0.0/8\" }]\n";
    let proxy = Proxy::start("http", &format!("{CACHE}{rules}{}", rest("", up.server.listen_addrs()[0]))).await;
    let (straight, led) = (("127.0.0.1", 0), ("127.0.0.2", 0));
    let origin = origin(["one", "two", "posted", "three", "four", "five", "six"]).await;
    let url = origin.url("/");
    let both = async |names: [&str; 2], n| {
        for ((who, name), n) in [straight, led].into_iter().zip(names).zip(n..) {
            for _ in 0..2 {
                let got = ask(&proxy, who, &format!("GET {url}")).await;
                assert!(got.ends_with(name), "{who:?}: {got}");
                stored(&proxy, n).await;
            }
        }
    };
    both(["one", "two"], 1).await;
    assert!(ask(&proxy, led, &format!("POST {url}")).await.ends_with("posted"));
    both(["three", "four"], 3).await;
    let got = ask(&proxy, straight, &format!("PURGE {url}")).await;
    assert!(got.starts_with("HTTP/1.1 200 "), "{got}");
    both(["five", "six"], 5).await;
    let values = proxy.server.counters().cache;
    assert_eq!((values.cache_hits, values.cache_invalidated, values.cache_entries), (6, 4, 2), "{values:?}");
    assert_eq!(origin.seen().len(), 7);
    assert_eq!(up.lines().await.len(), 4, "half of them, and what was posted");
}
