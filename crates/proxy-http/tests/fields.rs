//! Fields that the configuration sets, adds, removes and replaces, in all heads that leave.

use crate::{
    member::Member,
    origin::{Origin, undated},
    proxying::{OPEN, Proxy},
};

const HEAD: &str = "\r\n\r\n";

async fn answer(proxy: &Proxy, request: &str) -> String {
    undated(&String::from_utf8(proxy.answer(request.as_bytes()).await).unwrap())
}

#[tokio::test]
async fn requests_and_replies_are_changed_and_framing_is_not() {
    let reply = "HTTP/1.1 103 Early Hints\r\nServer: s\r\n\r\nHTTP/1.1 200 OK\r\nServer: s\r\nX-Powered-By: p\r\n\
                 Location: http://a/\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n";
    let origin = Origin::start(vec![vec![(HEAD, reply)]]).await;
    let proxy = Proxy::start(
        "http",
        &format!(
            "{OPEN}users = {{ ann = \"pw\" }}\nvia = \"\"\n[listener.fields]\n\
             request = [{{ set = \"X-User\", value = \"${{user}}\" }}, {{ remove = \"Cookie\" }},\n\
             {{ set = \"Host\", value = \"other.example\" }}, {{ add = \"X-At\", value = \"${{host}} ${{client}}\" }}]\n\
             reply = [{{ remove = [\"Server\", \"X-P*\"] }}, {{ replace = \"Location\", match = '^http:', with = \"https:\" }},\n\
             {{ set = \"X-Error\", value = \"yes\", status = \"400-599\" }}, {{ default = \"Vary\", value = \"*\" }}]"
        ),
    )
    .await;
    let auth = "Proxy-Authorization: Basic YW5uOnB3\r\n";
    let get = format!(
        "GET {} HTTP/1.1\r\nHost: x\r\nX_User: root\r\nX-User: root\r\nCookie: a\r\nConnection: close, x-user\r\n{auth}\r\n",
        origin.url("/")
    );
    let got = answer(&proxy, &get).await;
    let want = "HTTP/1.1 103 Early Hints\r\nServer: s\r\n\r\nHTTP/1.1 200 OK\r\nLocation: https://a/\r\n\
                Transfer-Encoding: chunked\r\nConnection: close\r\nVary: *\r\n\r\n2\r\nhi\r\n0\r\n\r\n";
    assert_eq!(got, want);
    let at = origin.addr;
    let want = format!("GET / HTTP/1.1\r\nHost: other.example\r\nX-User: ann\r\nX-At: {at} 127.0.0.1\r\n\r\n");
    assert_eq!(origin.seen(), [want]);
    // a reply of our own
    let refused = answer(&proxy, "GET http://x/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
    let (head, body) = refused.split_once(HEAD).unwrap();
    assert!(head.starts_with("HTTP/1.1 407 ") && head.contains("\r\nX-Error: yes\r\nVary: *"), "{refused}");
    assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{refused}");
}

#[tokio::test]
async fn a_route_changes_after_its_listener() {
    let member = Member::start("one").await;
    let site = format!(
        "via = \"\"\n[listener.fields]\nrequest = [{{ set = \"X-Of\", value = \"listener\" }}]\n\
         reply = [{{ set = \"X-Of\", value = \"listener\" }}]\n\
         [[listener.route]]\npath = \"/a\"\npool = \"p\"\n\
         fields.request = [{{ replace = \"X-Of\", match = '^l(.*)$', with = '$1 of ' }}, {{ add = \"X-Host\", value = \"${{host}}\" }}]\n\
         fields.reply = [{{ add = \"X-Of\", value = \"route\" }}]\n\
         [[listener.route]]\npool = \"p\"\n[pool.p]\nservers = [\"{}\"]\n",
        member.addr
    );
    let proxy = Proxy::start("http", &site).await;
    for (path, request, reply) in [
        ("/a", "X-Of: istener of\r\nX-Host: s.example:81\r\n", "X-Of: listener\r\nX-Of: route\r\n"),
        ("/", "X-Of: listener\r\n", "X-Of: listener\r\n"),
    ] {
        let host = "Host: s.example:81\r\nConnection: close\r\n";
        let got = answer(&proxy, &format!("GET {path} HTTP/1.1\r\n{host}\r\n")).await;
        assert_eq!(got, format!("HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n{reply}\r\none"));
        let seen = member.seen().pop().unwrap();
        assert_eq!(seen, format!("GET {path} HTTP/1.1\r\nHost: s.example:81\r\n{request}\r\n"));
    }
}

/// Otherwise a client would get what another one's name or address has selected.
#[tokio::test]
async fn a_cache_stores_what_servers_say_unless_it_is_about_a_client() {
    let reply = "HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\nServer: s\r\nContent-Length: 2\r\n\r\nhi";
    for (value, hits) in [("${host}", 1), ("${client}", 0)] {
        let origin = Origin::start(vec![vec![(HEAD, reply)]; 2]).await;
        let fields = format!(
            "[listener.cache]\ndir = \"cache\"\n[listener.fields]\n\
             request = [{{ set = \"X\", value = \"{value}\" }}]\nreply = [{{ remove = \"Server\" }}]\n"
        );
        let proxy = Proxy::start("http", &format!("{OPEN}via = \"\"\n{fields}")).await;
        let get = format!("GET {} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", origin.url("/"));
        for _ in 0..2 {
            let got = answer(&proxy, &get).await;
            assert!(got.ends_with("\r\n\r\nhi") && !got.contains("Server"), "{got}");
            proxy.lines().await; // which waits until it is stored
        }
        assert_eq!(
            (proxy.server.counters().cache.cache_hits, origin.seen().len()),
            (hits, 2 - hits as usize),
            "{value}"
        );
    }
}
